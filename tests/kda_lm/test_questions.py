"""Continuations by hand; last words, documents and needles with models that know the answers."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import compose_config, small_options, tiny_lm

from data import DataError, Tokenizer
from data.questions import Question, names_seen_before, questions
from data.tasks.needle import sentences_of, solve
from data.tokenizers import byte_tokenizer
from kda_lm.checkpoint import open_checkpoint
from kda_lm.errors import UserError
from kda_lm.evaluation import questions as asking
from kda_lm.evaluation.completions import Continuation, Pair, complete, score_continuations, split_ids
from kda_lm.evaluation.questions import answer_documents, answer_last_words, contains
from kda_lm.generation import SamplingConfig, generate
from kda_lm.model import LM
from scripts.evaluating.needle import run_needle
from scripts.evaluating.questions import run_questions

Run = Callable[..., tuple[dict[str, Any], Path]]
CPU = torch.device("cpu")


def lm() -> LM:
    return tiny_lm(*(small_options(kind) for kind in ("kda", "softmax", "linear")))


def ragged() -> list[Pair]:
    """Prompts of 1 to 40 tokens, shorter than a convolution, too; continuations of 1 to 9."""
    rng = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        drawn: list[int] = torch.randint(29, (count,), generator=rng).tolist()
        return drawn

    return [(ids(a), ids(b)) for a, b in ((1, 1), (40, 2), (3, 9), (17, 1), (2, 2), (40, 9), (8, 3))]


# ------------------------------------------------------------------------------ continuations


def test_continuations_by_hand() -> None:
    model, pairs = lm(), ragged()
    for found, (prompt, continuation) in zip(score_continuations(model, pairs), pairs, strict=True):
        ids = torch.tensor([*prompt, *continuation])
        log_p = model(ids[None, :-1])[0][0, len(prompt) - 1 :].double().log_softmax(-1).detach()
        wanted = ids[len(prompt) :]
        assert found.nats == pytest.approx(-float(log_p.gather(1, wanted[:, None]).sum()), rel=1e-5)
        assert found.tokens == len(continuation) and found.greedy == bool((log_p.argmax(-1) == wanted).all())


@pytest.mark.parametrize("batch_tokens", [1, 50, 100, 10_000])
def test_what_is_in_a_batch_does_not_matter(batch_tokens: int) -> None:
    model, pairs = lm(), ragged()
    alone = [score_continuations(model, [pair])[0] for pair in pairs]
    together = score_continuations(model, pairs, batch_tokens)
    assert [x.greedy for x in together] == [x.greedy for x in alone]
    assert [x.nats for x in together] == pytest.approx([x.nats for x in alone], rel=1e-5)
    prompts = [prompt for prompt, _ in pairs]
    assert complete(model, prompts, 6, batch_tokens=batch_tokens) == [complete(model, [p], 6)[0] for p in prompts]


def test_the_likeliest_continuation() -> None:
    """As sampling at temperature 0 draws it; a greedy one is found greedy; it ends before the stop."""
    model = lm()
    prompts = [prompt for prompt, _ in ragged()]
    greedy = SamplingConfig(max_new_tokens=7, temperature=0)
    expected = [[int(token) for token in generate(model, prompt, 1, greedy)] for prompt in prompts]
    assert complete(model, prompts, 7) == expected
    assert all(x.greedy for x in score_continuations(model, list(zip(prompts, expected, strict=True))))
    stop = expected[1][3]
    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in expected]
    assert complete(model, prompts, 7, stop_id=stop) == cut
    assert complete(model, [], 7) == [] and score_continuations(model, []) == []


def test_where_a_prompt_ends() -> None:
    """Of bytes at the byte; a token that spans both is the continuation's."""
    tokenizer = byte_tokenizer()
    assert split_ids(tokenizer, "ab", " c") == ([256, 97, 98], [32, 99])
    assert split_ids(tokenizer, "", "a") == ([256], [97])

    class Pairs(Tokenizer):
        """Two letters a token, from the left."""

        def __init__(self) -> None:
            self.eot_id = 0

        def begin(self, text: str) -> list[int]:
            return [0, *(hash(text[i : i + 2]) for i in range(0, len(text), 2))]

    prompt, continuation = split_ids(Pairs(), "abc", "de")
    assert prompt == Pairs().begin("ab") and [*prompt, *continuation] == Pairs().begin("abcde")


# ------------------------------------------------------------------------------ sets of questions


ROWS = {
    "lambada.jsonl": [{"text": "the union is strong"}, {"text": "we must keep it"}, {"text": "word"}],
    "squad.jsonl": [
        {"context": "It rains.", "question": "What does it do? ", "answers": {"text": ["rains", "rains ", "pours"]}}
    ],
    "fda.jsonl": [{"text": "The device is a pump. Kind: ", "value": " pump "}],
}
NESTED = {
    "version": "1.1",
    "data": [{"title": "t", "paragraphs": [{"context": "A dog.", "qas": [
        {"id": "1", "question": "Who?", "answers": [{"text": "dog", "answer_start": 2}]},
        {"id": "2", "question": "What?", "answers": [{"text": "A dog", "answer_start": 0}]},
    ]}]}],
}  # fmt: skip


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "squad.json").write_text(json.dumps(NESTED), encoding="utf-8")
    return tmp_path


def ask(name: str, file: str, sets: Path) -> list[Question]:
    return questions(name, file, sets / "cache", sets)


def test_sets(sets: Path) -> None:
    assert ask("lambada", "lambada.jsonl", sets) == [
        Question("the union is", ("strong",)), Question("we must keep", ("it",))
    ]  # fmt: skip
    assert ask("squad", "squad.jsonl", sets) == [
        Question("It rains.\n\nQuestion: What does it do?\nAnswer:", ("rains", "pours"))
    ]
    assert [x.answers for x in ask("squad", "squad.json", sets)] == [("dog",), ("A dog",)]
    assert ask("fda", "fda.jsonl", sets) == [Question("The device is a pump. Kind:", ("pump",))]


def test_parquet_and_several_files(sets: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS["lambada.jsonl"]).to_parquet(sets / "more.parquet")
    assert len(questions("lambada", ["more.parquet", "lambada.jsonl"], sets / "cache", sets)) == 4


def test_sets_that_are_refused(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sets / "bad.jsonl").write_text('{"a": 1}\n', encoding="utf-8")
    (sets / "no.json").write_text("no json", encoding="utf-8")
    (sets / "words.txt").write_text("words", encoding="utf-8")
    for name, file, said in (
        ("lambada", "bad.jsonl", r"questions have the keys a: it takes \{\"text\"\} for lambada"),
        ("squad", "bad.jsonl", "questions have the keys a"),
        ("lambada", "no.json", "cannot read .*no.json"),
        ("lambada", "none.jsonl", "none.jsonl"),
        ("squad", "words.txt", "words.txt: questions come from .json, .jsonl, .parquet files"),
        ("glue", "bad.jsonl", "set is 'glue': it takes one of lambada, squad, fda, swde"),
    ):
        with pytest.raises(DataError, match=said):
            ask(name, file, sets)

    def offline(*args: Any, **options: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(DataError, match=r"cannot load hazyresearch/based-fda from the hub .*: give local files"):
        questions("fda", None, sets / "cache", sets)


def test_names_that_have_come_before() -> None:
    """Within a sentence, whole words, near enough; a sentence's first word is no name."""
    text = "We saw Madison, and later Adams met Madison. Adams wrote. Then to Adamson, and to Adams went Madisons."
    found = names_seen_before([text, "the end of Madison"], 60)
    assert [q.answers[0] for q in found] == ["Madison", "Adams"]
    assert found[0].prompt == "We saw Madison, and later Adams met" and found[1].prompt.endswith("to Adamson, and to")
    assert [q.answers[0] for q in names_seen_before([text], 20)] == []


# ------------------------------------------------------------------------------ answers


def test_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a word has to be right; the perplexity is of words."""
    tokenizer = byte_tokenizer()
    asked = [Question("the union is", ("strong",)), Question("we must keep", ("it",))]

    def scored(model: LM, pairs: Sequence[Pair], batch_tokens: int) -> list[Continuation]:
        assert [tokenizer.decode(b) for _, b in pairs] == [" strong", " it"]
        return [Continuation(math.log(4), 7, True), Continuation(math.log(16), 3, False)]

    monkeypatch.setattr(asking, "score_continuations", scored)
    score = answer_last_words(lm(), tokenizer, asked, 100)
    assert (score.accuracy, score.questions, score.tokens) == (0.5, 2, 13.0)
    assert score.perplexity == pytest.approx(8.0)


def test_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said up to the line's end counts."""
    tokenizer = byte_tokenizer()
    said = [" It RAINS today\nand pours", "\n pours", " no\nrains", ""]
    monkeypatch.setattr(asking, "complete", lambda *args: [tokenizer.encode(text).tolist() for text in said])
    asked = [Question("What does it do?", ("rains", "pours"))] * 4
    score = answer_documents(lm(), tokenizer, asked, 48, 100)
    assert score.accuracy == 0.5 and score.said == (" It RAINS today", " pours", " no") and score.perplexity is None
    assert contains("About 308 points", ["308"]) and not contains("", ["308"])


def test_the_questions_command(run: Run, sets: Path) -> None:
    _, folder = run("trained")
    ckpt = f"ckpt={folder / 'checkpoints' / 'last.ckpt'}"

    def command(*words: str) -> Any:
        return run_questions(compose_config("questions", ckpt, "accelerator=cpu", *words))

    score = command("files=lambada.jsonl", "json=out.json")
    opened = open_checkpoint(folder / "checkpoints" / "last.ckpt", CPU)
    nats = []
    for prompt, word in (("the union is", " strong"), ("we must keep", " it")):
        ids = torch.tensor([256, *prompt.encode(), *word.encode()])
        log_p = opened.model(ids[None, :-1])[0][0].double().log_softmax(-1).detach()
        nats.append(-float(log_p[-len(word) :].gather(1, ids[-len(word) :, None]).sum()))
    assert score.perplexity == pytest.approx(math.exp(sum(nats) / 2), rel=1e-4)
    assert json.loads(Path("out.json").read_text())["perplexity"] == score.perplexity
    assert command("files=lambada.jsonl", "limit=1").questions == 1
    Path("names.txt").write_text("He saw Madison and then Madison went, said Madison.", encoding="utf-8")
    named = command("set=names", "text=names.txt")
    assert named.questions == 2 and named.perplexity > 1
    for words, said in (
        (["text=a.txt"], "text is set"),
        (["set=names", "files=a.txt"], "files is set"),
        (["set=names", "text=names.txt", "characters=3"], "no name comes again"),
    ):
        with pytest.raises(UserError, match=said):
            command(*words)
    told = command("set=squad", "files=squad.json", "max_new_tokens=3")
    assert told.questions == 2 and told.accuracy == 0 and len(told.said) == 2
    for word, said in (
        ("set=glue", "questions.set is 'glue'"),
        ("limit=0", "limit is 0"),
        ("files=none.json", "none.json"),
    ):
        with pytest.raises((UserError, DataError), match=said):
            command(word)


# ------------------------------------------------------------------------------ needles


def test_the_oracle_finds_every_needle(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, in the middle, right before the question; prompts as long as asked for, from the end-of-text token
    on; scored by the value alone (G4)."""
    _, folder = run("trained")
    tokenizer, lengths = byte_tokenizer(), []

    def scored(model: LM, pairs: Sequence[Pair], batch_tokens: int) -> list[Continuation]:
        for prompt, answer in pairs:
            lengths.append(len(prompt) + len(answer))
            assert prompt[0] == tokenizer.eot_id and tokenizer.eot_id not in prompt[1:]
        right = [solve(tokenizer.decode(prompt[1:])) == tokenizer.decode(answer) for prompt, answer in pairs]
        return [Continuation(0.0, 1, x) for x in right]

    monkeypatch.setattr(asking, "score_continuations", scored)
    ckpt = f"ckpt={folder / 'checkpoints' / 'last.ckpt'}"
    words = ["kinds=[repeated,text,uuid]", "lengths=[400,900]", "depths=[0,0.5,1]", "samples=4", "num_needles=2"]
    cells = run_needle(compose_config("needle", ckpt, "accelerator=cpu", *words, "plot=grid.png", "json=grid.json"))
    assert [cell.accuracy for cell in cells] == [1.0] * 18
    assert {(cell.kind, cell.length, cell.depth) for cell in cells} == {
        (kind, length, depth) for kind in ("repeated", "text", "uuid") for length in (400, 900) for depth in (0, 0.5, 1)
    }
    assert (
        max(lengths[:12]) <= 400 and min(lengths[:12]) > 300 and max(lengths[12:24]) <= 900 < max(lengths[12:24]) + 200
    )
    assert len(json.loads(Path("grid.json").read_text())["cells"]) == 18
    assert Path("grid.png").read_bytes()[1:4] == b"PNG"


def test_the_needle_command(run: Run) -> None:
    _, folder = run("trained")
    ckpt = f"ckpt={folder / 'checkpoints' / 'last.ckpt'}"

    def command(*words: str) -> Any:
        return run_needle(compose_config("needle", ckpt, "accelerator=cpu", "samples=2", *words))

    assert [cell.accuracy for cell in command("lengths=[200]", "depths=[0.5]")] == [0.0]  # it has learned nothing
    Path("hay.txt").write_text("One thing. Another thing! A third?", encoding="utf-8")
    assert len(command("lengths=[200]", "depths=[0.5,1]", "kinds=[text]", "text=hay.txt", "batch_tokens=1")) == 2
    for word, said in (
        ("lengths=[20]", "length is 20: needles and question take"),
        ("lengths=[]", "lengths is empty"),
        ("depths=[2]", "depth is 2"),
        ("kinds=[words]", "needle.kinds"),
        ("samples=0", "samples is 0"),
        ("num_needles=0", "num_needles is 0"),
        ("plot=a.gif", "plot is 'a.gif'"),
    ):
        with pytest.raises((UserError, DataError), match=said):
            command(word)
    assert sentences_of("One thing. Another\nthing! A third?") == ["One thing.", "Another thing!", "A third?"]
