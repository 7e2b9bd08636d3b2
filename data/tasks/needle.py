"""Needles in haystacks (RULER's S-NIAH, Hsieh et al. 2024): one sentence of a long text says what its end asks for.

    The river runs to the sea. The secret number of the amber falcon is 4821973. The sea is never full.
    The secret number of the amber falcon is                                      → 4821973

These are texts, not ids, so that a model of any tokenizer can be asked. As in data.tasks, prompt `index` of a split is
a pure function of (seed, split, index).
"""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data.errors import DataError
from data.tasks.draws import Draws, Ints, Split

REPEATED = ("The river runs to the sea.", "The sea is never full.", "The wind turns to the north, and back again.")
# Names are one of each.
FIRST = ["amber", "brave", "calm", "dusty", "early", "faint", "gentle", "hollow", "iron", "jolly", "keen", "lonely"]
SECOND = ["anchor", "badger", "candle", "dancer", "engine", "falcon", "garden", "harbor", "island", "jacket", "kettle"]


@dataclass(frozen=True)
class Prompt:
    text: str  # ends where the answer begins
    answer: str  # with the space before it
    depth: float  # of the haystack's sentences, the share that stands before the needle


@dataclass(frozen=True)
class Needle:
    """What a haystack is like, and how long prompt and answer are together: `length` of the reader's tokens, or less by
    no more than a sentence.

    S-NIAH-1 is "repeated", a few sentences again and again, and a number; S-NIAH-2 "text", real text and a number;
    S-NIAH-3 "uuid", real text and a UUID.
    """

    kind: Literal["repeated", "text", "uuid"] = "repeated"
    length: int = 1024
    depth: float | None = None  # 0: the needle comes first, 1: right before the question; None: anywhere
    num_needles: int = 1  # of which one is asked for, and the others stand anywhere

    def __post_init__(self) -> None:
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise DataError(f"depth is {self.depth}: it takes 0 to 1, or null for any")
        most = len(FIRST) * len(SECOND)
        if not 1 <= self.num_needles <= most:
            raise DataError(f"num_needles is {self.num_needles}: it takes 1 to {most}")

    def prompts(
        self, seed: int, split: Split, indices: Ints, measure: Callable[[str], int], sentences: Sequence[str] = REPEATED
    ) -> list[Prompt]:
        """A prompt for each index. `measure` says how many tokens a text is; `sentences` are the real text's, which is
        read on from a random one and from its start again.

        Raises DataError: there is no room for the needles and the question.
        """
        draws = Draws(seed, split, np.asarray(indices))
        hay = REPEATED if self.kind == "repeated" else sentences
        n, N = len(draws), self.num_needles
        keys = draws.subset(len(FIRST) * len(SECOND), N)
        numbers, bits = 10**6 + draws.below(9 * 10**6, N), draws.bits(N, 2)
        places, starts = draws.uniform(N), draws.below(len(hay))
        found = []
        for i in range(n):
            names = [f"{FIRST[key // len(SECOND)]} {SECOND[key % len(SECOND)]}" for key in keys[i].tolist()]
            if self.kind == "uuid":
                values = [str(uuid.UUID(int=high << 64 | low, version=4)) for high, low in bits[i].tolist()]
            else:
                values = [str(number) for number in numbers[i].tolist()]
            depths = places[i].tolist()
            if self.depth is not None:
                depths[0] = self.depth
            found.append(self._fitted(hay, int(starts[i]), names, values, depths, measure))
        return found

    def _fitted(
        self,
        hay: Sequence[str],
        start: int,
        names: list[str],
        values: list[str],
        depths: list[float],
        measure: Callable[[str], int],
    ) -> Prompt:
        """With as many sentences of hay as there is room for; the first name is asked for."""
        what = "code" if self.kind == "uuid" else "number"

        def prompt(count: int) -> Prompt:
            pieces = [hay[(start + j) % len(hay)] for j in range(count)]
            at = [round(depth * count) for depth in depths]
            # From the last place to the first, so that the places before stay what they are.
            for j in sorted(range(len(names)), key=lambda j: -at[j]):
                pieces.insert(at[j], f"The secret {what} of the {names[j]} is {values[j]}.")
            question = f"The secret {what} of the {names[0]} is"
            return Prompt(" ".join([*pieces, question]), f" {values[0]}", at[0] / count if count else 0.0)

        def fits(count: int) -> bool:
            made = prompt(count)
            return measure(made.text + made.answer) <= self.length

        if not fits(0):
            least = measure(prompt(0).text + prompt(0).answer)
            raise DataError(f"length is {self.length}: needles and question take {least} tokens")
        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return prompt(low)


def solve(text: str) -> str:
    """The oracle: the answer to a prompt, from its text alone."""
    question = text[text.rindex("The secret ") :]
    said = re.search(re.escape(question) + r"( \S+)\.", text)
    if said is None:
        raise ValueError("no sentence says what is asked")
    return said[1]


def sentences_of(text: str) -> list[str]:
    """A text's sentences, by their final marks, each in one line."""
    pieces = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return [piece for piece in pieces if piece]
