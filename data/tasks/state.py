"""State tracking: nothing to recall, but a state that every token changes."""

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Literal

import numpy as np

from data.errors import DataError
from data.packing import IGNORE
from data.tasks.base import FILLER, Examples, Task, check_least
from data.tasks.draws import Draws, Ints


@dataclass(frozen=True)
class _Tracking(Task):
    """Samples of `min_len` to seq_len tokens, filler after that; asked at the last token, or at each."""

    seq_len: int = 40
    min_len: int = 3
    ask: Literal["last", "each"] = "last"

    def __post_init__(self) -> None:
        check_least(self, min_len=1)
        if self.min_len > self.seq_len:
            raise DataError(f"min_len is {self.min_len}: it takes 1 to seq_len = {self.seq_len}")

    @property
    def most_questions(self) -> int:
        return self.seq_len if self.ask == "each" else 1

    def fill(self, draws: Draws, tokens: Ints, states: Ints) -> Examples:
        """Examples of `tokens` and the states after them [n, seq_len], ids, cut to random lengths."""
        lengths = self.min_len + draws.below(self.seq_len - self.min_len + 1)[:, None]
        position = np.arange(self.seq_len)
        inside = position < lengths
        asked = inside if self.ask == "each" else position == lengths - 1
        found = Examples.empty(len(tokens), self.seq_len, ("length",))
        found.tokens[inside] = tokens[inside]
        found.targets[asked] = states[asked]
        found.slices["length"][:] = lengths if self.ask == "last" else position + 1
        return found


@dataclass(frozen=True)
class Parity(_Tracking):
    """Whether the ones so far are odd.

        tokens   0 1 1 0 1
        targets  . . . . 1      or with ask=each  0 1 0 0 1

    Ids: 0 is 1, 1 is 2; an answer is one of them.
    """

    vocab_size = 3

    def draw(self, draws: Draws) -> Examples:
        bits = draws.below(2, self.seq_len)
        return self.fill(draws, 1 + bits, 1 + np.cumsum(bits, axis=1) % 2)

    def solve(self, tokens: Ints) -> Ints:
        answers, odd = np.full(len(tokens), IGNORE), 0
        for t, token in enumerate(tokens.tolist()):
            if token != FILLER:
                odd ^= token - 1
                answers[t] = 1 + odd
        return answers


@cache
def compositions(degree: int) -> Ints:
    """[n!, n!] of the permutations in lexicographic order: entry [a, b] is a after b, i ↦ a(b(i))."""
    group = list(permutations(range(degree)))
    number = {permutation: i for i, permutation in enumerate(group)}
    return np.array([[number[tuple(a[i] for i in b)] for b in group] for a in group])


@dataclass(frozen=True)
class Permutations(_Tracking):
    """The word problem of the symmetric group: each token permutes what the ones before it have.

        tokens   a b c          targets  a ba cba       (the product so far, the latest on the left)

    Of `degree` 2 to 5. Ids from 1 on are permutations in lexicographic order; an answer is one of them. S5 is not
    solvable, and its word problem is complete for NC¹ (Barrington 1989): a fixed number of layers with diagonal
    transitions does not follow it.
    """

    seq_len: int = 32
    ask: Literal["last", "each"] = "each"
    degree: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.degree <= 5:
            raise DataError(f"degree is {self.degree}: it takes 2 to 5")

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 1 + len(compositions(self.degree))

    def draw(self, draws: Draws) -> Examples:
        table = compositions(self.degree)
        words = draws.below(len(table), self.seq_len)
        states = words.copy()
        for t in range(1, self.seq_len):
            states[:, t] = table[words[:, t], states[:, t - 1]]
        return self.fill(draws, 1 + words, 1 + states)

    def solve(self, tokens: Ints) -> Ints:
        group = list(permutations(range(self.degree)))
        answers, places = np.full(len(tokens), IGNORE), tuple(range(self.degree))
        for t, token in enumerate(tokens.tolist()):
            if token != FILLER:
                places = tuple(group[token - 1][i] for i in places)
                answers[t] = 1 + group.index(places)
        return answers


@dataclass(frozen=True)
class ModularArithmetic(Task):
    """Sums, differences and products modulo m, products first: the answer is due at the equals sign.

        tokens   3 + 2 × 4 − 1 =
        targets  . . . . . . . 0        modulo 5

    Expressions have 2 numbers up to what there is room for; filler comes after them. Ids: = 1, + 2, − 3, × 4, numbers
    from 5 on; an answer is a number.
    """

    seq_len: int = 40
    modulus: int = 5

    EQUALS, PLUS, MINUS, TIMES, FIRST = 1, 2, 3, 4, 5  # ids

    def __post_init__(self) -> None:
        check_least(self, seq_len=4, modulus=2)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self.FIRST + self.modulus

    @property
    def most_questions(self) -> int:
        return 1

    def draw(self, draws: Draws) -> Examples:
        n, most = len(draws), self.seq_len // 2
        counts = 2 + draws.below(most - 1)
        numbers = draws.below(self.modulus, most)
        operators = self.PLUS + draws.below(3, most - 1)
        found = Examples.empty(n, self.seq_len, ("length",))
        written = np.empty((n, 2 * most - 1), dtype=np.int64)
        written[:, ::2], written[:, 1::2] = self.FIRST + numbers, operators
        position = np.arange(written.shape[1])
        found.tokens[:, : 2 * most - 1] = np.where(position < 2 * counts[:, None] - 1, written, FILLER)
        total, term = np.zeros((2, n), dtype=np.int64)
        term += numbers[:, 0]
        results = np.empty((n, most), dtype=np.int64)
        results[:, 0] = term
        for i in range(1, most):
            operator, number = operators[:, i - 1], numbers[:, i]
            times = operator == self.TIMES
            total = np.where(times, total, total + term)
            term = np.where(times, term * number, np.where(operator == self.PLUS, number, -number)) % self.modulus
            results[:, i] = (total + term) % self.modulus
        at = 2 * counts[:, None] - 1
        np.put_along_axis(found.tokens, at, self.EQUALS, 1)
        found.ask(at, self.FIRST + np.take_along_axis(results, counts[:, None] - 1, 1), length=counts[:, None])
        return found

    def solve(self, tokens: Ints) -> Ints:
        answers = np.full(len(tokens), IGNORE)
        end = tokens.tolist().index(self.EQUALS)
        signs = {self.PLUS: "+", self.MINUS: "-", self.TIMES: "*"}
        text = "".join(signs.get(token, str(token - self.FIRST)) for token in tokens[:end].tolist())
        answers[end] = self.FIRST + eval(text) % self.modulus
        return answers
