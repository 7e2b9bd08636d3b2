"""Questions in words: the last word of a passage, a name that came before, a fact of a document, a needle in hay.

word       accuracy: all its tokens are the likeliest ones; perplexity: exp of the mean −log p of a word
document   what the model says next, up to its line's end, contains an answer, whatever the case of letters
needle     the value is what the model says: all its tokens are the likeliest ones
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data import Tokenizer
from data.questions import Question
from data.tasks.needle import REPEATED, Needle
from kda_lm.evaluation.completions import complete, score_continuations, split_ids
from kda_lm.evaluation.text import TextConfig
from kda_lm.model import LM

Kind = Literal["repeated", "text", "uuid"]


@dataclass(frozen=True)
class QuestionsConfig(TextConfig):
    """Options of `scripts/evaluate.py questions`; see configs/questions.yaml. `text` is of `names` alone."""

    set: Literal["lambada", "squad", "fda", "swde", "names"] = "lambada"
    characters: int = 1000
    files: str | tuple[str, ...] | None = None
    limit: int | None = None
    max_new_tokens: int = 48
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("limit", "max_new_tokens", "batch_tokens", "characters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it takes at least 1")
        if self.set == "names" and self.files is not None:
            raise ValueError("files is set; the names are of a text, which text= gives")
        if self.set != "names" and self.text is not None:
            raise ValueError(f"text is set; the questions of {self.set} come from files= or the hub")


@dataclass(frozen=True)
class NeedleConfig(TextConfig):
    """Options of `scripts/evaluate.py needle`; see configs/needle.yaml. `text` is what haystacks are of."""

    kinds: tuple[Kind, ...] = ("repeated",)
    lengths: tuple[int, ...] = (256, 512, 1024)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 20
    num_needles: int = 1
    seed: int = 0
    plot: str | None = None
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("samples", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes at least 1")
        for name in ("kinds", "lengths", "depths"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; it takes at least one")
        for length in self.lengths:
            Needle(length=length, num_needles=self.num_needles)
        for depth in self.depths:
            Needle(depth=depth)


@dataclass(frozen=True)
class QuestionsScore:
    """`perplexity` of a word; None where answers are said, and not scored."""

    accuracy: float
    perplexity: float | None
    questions: int
    tokens: float  # of a prompt, on average
    said: tuple[str, ...]  # to the first questions


def answer_last_words(
    model: LM, tokenizer: Tokenizer, questions: Sequence[Question], batch_tokens: int
) -> QuestionsScore:
    pairs = [split_ids(tokenizer, question.prompt, " " + question.answers[0]) for question in questions]
    found = score_continuations(model, pairs, batch_tokens)
    nats = sum(x.nats for x in found) / len(found)
    return QuestionsScore(
        accuracy=sum(x.greedy for x in found) / len(found),
        perplexity=math.exp(nats) if nats < 700 else math.inf,
        questions=len(found),
        tokens=sum(len(prompt) for prompt, _ in pairs) / len(pairs),
        said=(),
    )


def answer_documents(
    model: LM, tokenizer: Tokenizer, questions: Sequence[Question], max_new_tokens: int, batch_tokens: int
) -> QuestionsScore:
    prompts = [tokenizer.begin(question.prompt) for question in questions]
    drawn = complete(model, prompts, max_new_tokens, tokenizer.eot_id, batch_tokens)
    said = []
    for prompt, ids in zip(prompts, drawn, strict=True):
        decoder = tokenizer.stream(prompt)
        text = "".join(decoder.push(token) for token in ids) + decoder.flush()
        said.append(text.lstrip("\n").partition("\n")[0])
    right = [contains(text, question.answers) for text, question in zip(said, questions, strict=True)]
    tokens = sum(map(len, prompts)) / len(prompts)
    return QuestionsScore(sum(right) / len(right), None, len(right), tokens, tuple(said[:3]))


def contains(said: str, answers: Iterable[str]) -> bool:
    return any(answer.lower() in said.lower() for answer in answers)


@dataclass(frozen=True)
class Cell:
    """Of a grid of needles."""

    kind: str
    length: int  # tokens of prompt and answer, at most
    depth: float
    accuracy: float


def find_needles(
    model: LM,
    tokenizer: Tokenizer,
    config: NeedleConfig,
    sentences: Sequence[str],
    tell: Callable[[Iterable[Cell]], Iterable[Cell]] = lambda cells: cells,
) -> list[Cell]:
    """A cell for each kind, length and depth, all of the same `samples` needles; `sentences` are real text's.

    Raises DataError: no room for needle and question.
    """

    def cells() -> Iterable[Cell]:
        for kind in config.kinds:
            for length in config.lengths:
                for depth in config.depths:
                    needle = Needle(kind, length, depth, config.num_needles)
                    prompts = needle.prompts(
                        config.seed, "test", np.arange(config.samples), measure, sentences or REPEATED
                    )
                    pairs = [split_ids(tokenizer, prompt.text, prompt.answer) for prompt in prompts]
                    found = score_continuations(model, pairs, config.batch_tokens)
                    yield Cell(kind, length, depth, sum(x.greedy for x in found) / len(found))

    def measure(text: str) -> int:
        return len(tokenizer.encode(text)) + 1  # the end-of-text token comes first

    return list(tell(cells()))
