"""`python scripts/evaluate.py questions ckpt=…`: last words, and facts of documents."""

from dataclasses import asdict

from omegaconf import DictConfig

from data.questions import HUB, names_seen_before, questions
from kda_lm.cli import print_table
from kda_lm.config import plain, read_config
from kda_lm.device import arithmetic, resolve_device
from kda_lm.errors import UserError
from kda_lm.evaluation.questions import QuestionsConfig, QuestionsScore, answer_documents, answer_last_words
from kda_lm.runs import from_launch_dir, launch_dir, write_json
from scripts.evaluating.common import documents, opened


def run_questions(options: DictConfig) -> QuestionsScore:
    """Ask as configs/questions.yaml says, print the table, and return the score."""
    config = read_config(QuestionsConfig, plain(options), "questions")
    device = resolve_device(config.accelerator)
    path, checkpoint = opened(config)
    tokenizer = checkpoint.text_tokenizer()
    if config.set == "names":
        asked = names_seen_before(documents(config, checkpoint), config.characters)
        if not asked:
            raise UserError("no name comes again in the text: give a longer one with text=, or more characters=")
        source = "the validation text" if config.text is None else str(config.text)
    else:
        asked = questions(config.set, config.files, from_launch_dir(config.cache_dir), launch_dir())
        source = str(config.files or HUB[config.set][0])
    asked = asked[: config.limit]
    with arithmetic(config.precision, device):
        if config.set in ("lambada", "names"):
            score = answer_last_words(checkpoint.model, tokenizer, asked, config.batch_tokens)
        else:
            score = answer_documents(checkpoint.model, tokenizer, asked, config.max_new_tokens, config.batch_tokens)

    rows = {
        "checkpoint": f"{path}, step {checkpoint.step:,}",
        "questions": f"{score.questions:,} of {source}, {score.tokens:.0f} tokens each",
        "accuracy": f"{100 * score.accuracy:.2f} %",
    }
    if score.perplexity is not None:
        rows["perplexity of a word"] = f"{score.perplexity:.2f}"
    for question, text in zip(asked, score.said, strict=False):
        rows[f"…{question.prompt[-60:]!r}"] = f"{text!r}, wanted {' or '.join(map(repr, question.answers))}"
    print_table(config.set, rows)
    if config.json is not None:
        about = {"checkpoint": str(path), "step": checkpoint.step, "set": config.set}
        write_json(from_launch_dir(config.json), {**about, **asdict(score)})
    return score
