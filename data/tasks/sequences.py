"""Copying and stacks: what a bounded memory has to keep in order."""

from dataclasses import dataclass

import numpy as np

from data.errors import DataError
from data.packing import IGNORE
from data.tasks.base import Examples, Task, check_least, check_room
from data.tasks.draws import Draws, Ints


@dataclass(frozen=True)
class Palindrome(Task):
    """Tokens, a separator, and the tokens from the last to the first (Kimi Linear 2025, section 5.1).

        tokens   5 9 7 | 7 9
        targets  . . . . 9 5

    The first of the reversal is not asked for, as in the report. Ids: | is 1, tokens from 2 on.
    """

    seq_len: int = 256
    vocab_size: int = 512

    SEPARATOR, FIRST = 1, 2  # ids

    def __post_init__(self) -> None:
        check_least(self, vocab_size=3)
        check_room(self, 4, "two tokens and their reversal")
        if self.seq_len % 2:
            raise DataError(f"seq_len is {self.seq_len}: it must be even")

    @property
    def most_questions(self) -> int:
        return self.seq_len // 2 - 1

    def draw(self, draws: Draws) -> Examples:
        n, half = len(draws), self.seq_len // 2
        data = self.FIRST + draws.below(self.vocab_size - self.FIRST, half)
        found = Examples.empty(n, self.seq_len, ("gap",))
        found.tokens[:, :half], found.tokens[:, half] = data, self.SEPARATOR
        found.tokens[:, half + 1 :] = data[:, :0:-1]
        at = np.broadcast_to(np.arange(half + 1, self.seq_len), (n, half - 1))
        found.ask(at, data[:, -2::-1], gap=at - np.arange(half - 2, -1, -1))
        return found

    def solve(self, tokens: Ints) -> Ints:
        half = self.seq_len // 2
        return np.concatenate([np.full(half + 1, IGNORE), tokens[half - 2 :: -1]])


@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Tokens scattered among blanks, then as many markers: give the tokens in order (Poli et al. 2024).

        tokens   . 5 . . 9 . 7 . # # #
        targets  . . . . . . . . 5 9 7

    Ids: blank is 0, # is 1, tokens from 2 on.
    """

    seq_len: int = 256
    vocab_size: int = 16
    num_tokens: int = 16

    MARKER, FIRST = 1, 2  # ids

    def __post_init__(self) -> None:
        check_least(self, vocab_size=3, num_tokens=1)
        check_room(self, 2 * self.num_tokens, f"{self.num_tokens} tokens and as many markers")

    @property
    def most_questions(self) -> int:
        return self.num_tokens

    def draw(self, draws: Draws) -> Examples:
        n, K = len(draws), self.num_tokens
        zone = self.seq_len - K
        places = np.sort(draws.subset(zone, K), axis=1)
        data = self.FIRST + draws.below(self.vocab_size - self.FIRST, K)
        found = Examples.empty(n, self.seq_len, ("gap", "order"))
        np.put_along_axis(found.tokens, places, data, 1)
        found.tokens[:, zone:] = self.MARKER
        at = np.broadcast_to(zone + np.arange(K), (n, K))
        found.ask(at, data, gap=at - places, order=np.arange(K))
        return found

    def solve(self, tokens: Ints) -> Ints:
        answers = np.full(len(tokens), IGNORE)
        data = tokens[tokens >= self.FIRST]
        answers[tokens == self.MARKER] = data
        return answers


@dataclass(frozen=True)
class Stacks(Task):
    """Several stacks, pushed and popped at random: say what a pop gives (Kimi Linear 2025, section 5.1).

        tokens   + s 9  + t 7  + s 5  - s 5  - s 9  - t 7
        targets  . . .  . . .  . . .  . 5 .  . 9 .  . 7 .

    Ids: + is 1, − is 2, the stacks s, t, … from 3 on, then the elements. Empty stacks are not popped.
    """

    seq_len: int = 256
    vocab_size: int = 512
    num_stacks: int = 64
    pop: float = 0.5  # share of the operations on a stack with elements

    PUSH, POP, FIRST_STACK = 1, 2, 3  # ids

    def __post_init__(self) -> None:
        check_least(self, num_stacks=1, vocab_size=self.FIRST_STACK + self.num_stacks + 1)
        check_room(self, 6, "a push and a pop")
        if not 0 < self.pop < 1:
            raise DataError(f"pop is {self.pop}: it must lie between 0 and 1")

    @property
    def most_questions(self) -> int:
        return self.seq_len // 6  # of three ids, each pop after a push of its own

    def draw(self, draws: Draws) -> Examples:
        n, steps = len(draws), self.seq_len // 3
        first = self.FIRST_STACK + self.num_stacks
        which, wants = draws.below(self.num_stacks, steps), draws.uniform(steps) < self.pop
        new = first + draws.below(self.vocab_size - first, steps)
        found = Examples.empty(n, self.seq_len, ("depth", "gap"))
        # What lies under the top is a list linked through the pushes: a step's element, its step, the one under it.
        top = np.full((n, self.num_stacks), -1)
        under = np.full((n, steps), -1)
        height = np.zeros((n, self.num_stacks), dtype=np.int64)
        rows = np.arange(n)
        for step in range(steps):
            stack = which[:, step]
            last = top[rows, stack]
            popping = wants[:, step] & (last >= 0)
            element = np.where(popping, new[rows, np.maximum(last, 0)], new[:, step])
            at = 3 * step
            found.tokens[:, at] = np.where(popping, self.POP, self.PUSH)
            found.tokens[:, at + 1], found.tokens[:, at + 2] = self.FIRST_STACK + stack, element
            found.targets[:, at + 1] = np.where(popping, element, IGNORE)
            found.slices["depth"][:, at + 1] = np.where(popping, height[rows, stack], 0)
            found.slices["gap"][:, at + 1] = np.where(popping, at - 1 - 3 * last, 0)
            under[:, step] = last
            top[rows, stack] = np.where(popping, under[rows, np.maximum(last, 0)], step)
            height[rows, stack] += np.where(popping, -1, 1)
        return found

    def solve(self, tokens: Ints) -> Ints:
        stacks: dict[int, list[int]] = {}
        answers, listed = np.full(len(tokens), IGNORE), tokens.tolist()
        for at in range(0, len(listed) - 2, 3):
            operation, stack, element = listed[at : at + 3]
            if operation == self.PUSH:
                stacks.setdefault(stack, []).append(element)
            elif operation == self.POP:
                answers[at + 1] = stacks[stack].pop()
        return answers


@dataclass(frozen=True)
class InContextRecall(Task):
    """A stream of pairs from a map that is new in each sample: say a value whose key has come before (MAD, Poli et al.
    2024). With `noise`, an id that means nothing comes before some pairs; with `longest` above 1 keys and values are
    runs of 1 to so many ids ("fuzzy"), and what is asked is each id of a value.

        tokens   3 61  5 7 52 68  ~  3 61  4 66  5 7 52 68
        targets  .  .  . .  .  .  . 61  .  .  .  . 52 68  .

    Ids: noise 1, keys 2 … , values the upper half.
    """

    seq_len: int = 128
    vocab_size: int = 16
    num_keys: int | None = None  # of a sample's map; None: as many as there are key ids
    noise: float = 0.0  # share of the pairs that noise comes before
    longest: int = 1  # ids of a key, and of a value

    NOISE, FIRST = 1, 2  # ids
    MOST_RUNS = 1 << 16

    def __post_init__(self) -> None:
        check_least(self, vocab_size=4, longest=1)
        if not 0 <= self.noise <= 1:
            raise DataError(f"noise is {self.noise}: it takes 0 to 1")
        if self.runs > self.MOST_RUNS:
            raise DataError(
                f"longest is {self.longest}: {self.key_ids} key ids make more than {self.MOST_RUNS} runs; it takes less"
            )
        if not 1 <= self.size <= self.runs:
            raise DataError(f"num_keys is {self.size}: it takes 1 to {self.runs}")
        check_room(self, 4 * self.longest + 2, "two pairs")

    @property
    def key_ids(self) -> int:
        return (self.vocab_size - self.FIRST) // 2

    @property
    def runs(self) -> int:
        """Keys that there can be: runs of 1 to `longest` ids."""
        return sum(self.key_ids**length for length in range(1, self.longest + 1))

    @property
    def size(self) -> int:
        return self.key_ids if self.num_keys is None else self.num_keys

    @property
    def most_questions(self) -> int:
        return self.seq_len // 2 if self.longest == 1 else self.seq_len

    def draw(self, draws: Draws) -> Examples:
        n, N, L, K = len(draws), self.size, self.longest, self.key_ids
        first_value = self.FIRST + K
        keys, key_lengths = _runs(draws.subset(self.runs, N), K, L)
        values = first_value + draws.below(self.vocab_size - first_value, N, L)
        value_lengths = 1 + draws.below(L, N)
        events = self.seq_len // 2  # more than there is room for, where runs are longer
        which, noisy = draws.below(N, events), draws.uniform(events) < self.noise
        key_length = np.take_along_axis(key_lengths, which, 1)
        length = key_length + np.take_along_axis(value_lengths, which, 1)
        ends = np.cumsum(length + noisy, axis=1)
        # One place more than there are: what has no room goes there.
        found = Examples.empty(n, self.seq_len + 1, ("gap",))
        rows = np.arange(n)
        seen = np.full((n, N), -1)  # where each key's value last began
        for event in range(events):
            pair = which[:, event]
            start = ends[:, event] - length[:, event]
            before = np.where(noisy[:, event], start - 1, self.seq_len)
            found.tokens[rows, np.minimum(before, self.seq_len)] = self.NOISE
            after = start + key_length[:, event]
            known = seen[rows, pair]
            for i in range(L):
                inside = (i < key_length[:, event]) & (start + i < self.seq_len)
                found.tokens[rows, np.where(inside, start + i, self.seq_len)] = self.FIRST + keys[rows, pair, i]
                inside = i < value_lengths[rows, pair]
                place = np.where(inside & (after + i < self.seq_len), after + i, self.seq_len)
                found.tokens[rows, place] = values[rows, pair, i]
                asked = np.where(inside & (known >= 0) & (after + i - 1 < self.seq_len), after + i - 1, self.seq_len)
                found.targets[rows, asked] = values[rows, pair, i]
                found.slices["gap"][rows, asked] = after - known
            seen[rows, pair] = after
        slices = {name: x[:, :-1] for name, x in found.slices.items()}
        return Examples(found.tokens[:, :-1], found.targets[:, :-1], slices)

    def solve(self, tokens: Ints) -> Ints:
        first_value = self.FIRST + self.key_ids
        memory: dict[tuple[int, ...], list[int]] = {}
        answers = np.full(len(tokens), IGNORE)
        key: tuple[int, ...] = ()
        value: list[int] = []
        for t, token in enumerate(tokens.tolist()):
            if token >= first_value:
                value.append(token)
            else:
                if value:
                    memory[key], key, value = value, (), []
                key = (*key, token) if token >= self.FIRST else ()
            known = memory.get(key, [])
            if len(value) < len(known):
                answers[t] = known[len(value)]
        return answers


def _runs(numbers: Ints, ids: int, longest: int) -> tuple[Ints, Ints]:
    """Runs of 1 to `longest` of `ids` ids by their number: the ids [..., longest], zero after the end, and lengths."""
    lengths, rest = np.ones(numbers.shape, dtype=np.int64), numbers.copy()
    for length in range(1, longest):
        longer = (rest >= ids**length) & (lengths == length)
        rest[longer] -= ids**length
        lengths[longer] += 1
    digits = [np.where(i < lengths, rest // ids**i % ids, 0) for i in range(longest)]
    return np.stack(digits, axis=-1), lengths
