"""Associative recall: keys and their values, then questions after keys."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from data.errors import DataError
from data.packing import IGNORE
from data.tasks.base import FILLER, Examples, Task, check_least, check_room
from data.tasks.draws import Draws, Ints


@dataclass(frozen=True)
class MQAR(Task):
    """Multi-query associative recall, in the layout of Zoology (Arora et al. 2024): all pairs first, then keys again,
    at gaps that follow a power law; the answer is due at the key.

        tokens   3 61  7 52  5 68  .  .  7  .  .  .  3  .  5  .
        targets  .  .  .  .  .  .  .  . 52  .  .  . 61  . 68  .

    Keys are 1 … V/2 − 1, values V/2 … V − 1, all different. Slot i = 1, 2, … after the pairs has weight a·i^(a−1),
    slots are at even distances, and each is taken once.
    """

    seq_len: int = 256
    vocab_size: int = 8192
    num_pairs: int = 16
    num_queries: int | None = None  # None: every key once
    power: float = 0.01  # a
    filler: Literal["none", "random"] = "none"  # between questions: 0, or any id that is no key of this sample

    def __post_init__(self) -> None:
        check_least(self, num_pairs=1, vocab_size=4)
        _check_keys(self, self.num_pairs, self.vocab_size // 2 - 1)
        if not 1 <= self.queries <= self.num_pairs:
            raise DataError(f"num_queries is {self.queries}: it takes 1 to num_pairs = {self.num_pairs}")
        if self.power <= 0:
            raise DataError(f"power is {self.power}: it must be positive")
        check_room(self, 2 * self.num_pairs + 2 * self.queries, f"{self.num_pairs} pairs and {self.queries} queries")

    @property
    def queries(self) -> int:
        return self.num_pairs if self.num_queries is None else self.num_queries

    @property
    def most_questions(self) -> int:
        return self.queries

    def draw(self, draws: Draws) -> Examples:
        n, N, Q, half = len(draws), self.num_pairs, self.queries, self.vocab_size // 2
        keys = 1 + draws.subset(half - 1, N)
        values = half + draws.subset(self.vocab_size - half, N)
        found = Examples.empty(n, self.seq_len, ("pairs", "gap"))
        if self.filler == "random":
            found.tokens[:, 2 * N :] = _none_of(keys, self.vocab_size, draws, self.seq_len - 2 * N)
        found.tokens[:, 0 : 2 * N : 2], found.tokens[:, 1 : 2 * N : 2] = keys, values
        slots = np.arange(1, (self.seq_len - 2 * N) // 2 + 1)
        # Gumbel's trick: the largest of log-weight + noise, in order, are draws without replacement.
        scores = (self.power - 1) * np.log(slots) - np.log(-np.log(draws.uniform(len(slots))))
        at = 2 * N + 2 * np.argsort(-scores, axis=1, kind="stable")[:, :Q]
        asked = draws.subset(N, Q)
        np.put_along_axis(found.tokens, at, np.take_along_axis(keys, asked, 1), 1)
        found.ask(at, np.take_along_axis(values, asked, 1), pairs=N, gap=at - 2 * asked - 1)
        return found

    def solve(self, tokens: Ints) -> Ints:
        start = 2 * self.num_pairs
        values = dict(zip(tokens[0:start:2].tolist(), tokens[1:start:2].tolist(), strict=True))
        return np.array([IGNORE] * start + [values.get(token, IGNORE) for token in tokens[start:].tolist()])


def _check_keys(task: Task, needed: int, there: int) -> None:
    if needed > there:
        raise DataError(f"vocab_size is {task.vocab_size}: it has {there} keys, and a sample takes {needed}")


def _none_of(keys: Ints, vocab_size: int, draws: Draws, count: int) -> Ints:
    """[n, count] ids from 1 on that are not in the sample's keys [n, N]."""
    ids = 1 + draws.below(vocab_size - 1 - keys.shape[1], count)
    for key in np.sort(keys, axis=1).T:  # ascending: an id moves past every key that is not above it
        ids += ids >= key[:, None]
    return ids


@dataclass(frozen=True)
class Overwrite(Task):
    """Overwriting recall: keys are written once, then written again or asked for; the latest value counts.

        tokens   3 61  7 52  7  3 70  3  7 66  7
        targets  .  .  .  . 52  .  . 70  .  . 66

    A key that is followed by a value is a write, else a question. Keys are 1 … V/2 − 1, values V/2 … V − 1.
    """

    seq_len: int = 256
    vocab_size: int = 1024
    num_pairs: int = 32
    rewrites: float = 0.5  # of what follows the first writes, the share that writes

    def __post_init__(self) -> None:
        check_least(self, num_pairs=1, vocab_size=4)
        _check_keys(self, self.num_pairs, self.vocab_size // 2 - 1)
        if not 0 <= self.rewrites < 1:
            raise DataError(f"rewrites is {self.rewrites}: it takes 0 up to, but not, 1")
        check_room(self, 2 * self.num_pairs + 4, f"{self.num_pairs} pairs and what follows")

    @property
    def events(self) -> int:
        """That follow the first writes."""
        return int((self.seq_len - 2 * self.num_pairs) / (1 + self.rewrites))

    @property
    def writes(self) -> int:
        return int(self.events * self.rewrites)

    @property
    def most_questions(self) -> int:
        return self.events - self.writes

    def draw(self, draws: Draws) -> Examples:
        n, N, half = len(draws), self.num_pairs, self.vocab_size // 2
        keys = 1 + draws.subset(half - 1, N)
        current = half + draws.below(self.vocab_size - half, N)
        found = Examples.empty(n, self.seq_len, ("pairs", "gap", "rewrites"))
        found.tokens[:, 0 : 2 * N : 2], found.tokens[:, 1 : 2 * N : 2] = keys, current
        events, writes = self.events, self.writes
        writing = draws.subset(events, events) < writes
        which, new = draws.below(N, events), half + draws.below(self.vocab_size - half, events)
        at = np.full(n, 2 * N)
        written = np.broadcast_to(2 * np.arange(N) + 1, (n, N)).copy()  # where each key's value is
        times = np.zeros((n, N), dtype=np.int64)
        rows = np.arange(n)
        for event in range(events):
            key, write = which[:, event], writing[:, event]
            found.tokens[rows, at] = keys[rows, key]
            asking = rows[~write]
            place = at[asking]
            chosen = key[asking]
            found.targets[asking, place] = current[asking, chosen]
            found.slices["gap"][asking, place] = place - written[asking, chosen]
            found.slices["rewrites"][asking, place] = times[asking, chosen]
            changing = rows[write]
            chosen = key[changing]
            found.tokens[changing, at[changing] + 1] = current[changing, chosen] = new[changing, event]
            written[changing, chosen] = at[changing] + 1
            times[changing, chosen] += 1
            at += 1 + write
        found.slices["pairs"][:] = N
        return found

    def solve(self, tokens: Ints) -> Ints:
        half, memory = self.vocab_size // 2, dict[int, int]()
        answers = np.full(len(tokens), IGNORE)
        key = FILLER
        for t, token in enumerate(tokens.tolist()):
            if token >= half:
                memory[key] = token
            elif token != FILLER:
                key = token
                answers[t] = memory.get(key, IGNORE)
        return answers


@dataclass(frozen=True)
class GlobalReset(Task):
    """Rounds of writes and questions; a marker at the start of each clears everything before.

        tokens   #  3 61  7 52  7  3  #  9 58  4 70  9  7
        targets  .  .  .  .  . 52 61  .  .  .  .  . 58  ?

    The answer after a key of an earlier round is "none" (here ?), id 2; # is 1. No key is written twice.
    """

    seq_len: int = 392
    vocab_size: int = 1024
    num_pairs: int = 16  # of a round
    num_queries: int = 16  # of a round
    live: float = 0.6  # share of the questions after keys of this round; the others are of the two rounds before

    def __post_init__(self) -> None:
        check_least(self, num_pairs=1, num_queries=1, vocab_size=6)
        check_room(self, self.round_len, "a round")
        _check_keys(self, self.rounds * self.num_pairs, self.keys)
        if not 0 <= self.live <= 1:
            raise DataError(f"live is {self.live}: it takes 0 to 1")

    RESET, NONE, FIRST = 1, 2, 3  # ids; FIRST is the first key's

    @property
    def keys(self) -> int:
        return (self.vocab_size - self.FIRST) // 2

    @property
    def round_len(self) -> int:
        return 1 + 2 * self.num_pairs + self.num_queries

    @property
    def rounds(self) -> int:
        return self.seq_len // self.round_len

    @property
    def most_questions(self) -> int:
        return self.rounds * self.num_queries

    def draw(self, draws: Draws) -> Examples:
        n, N, Q, R = len(draws), self.num_pairs, self.num_queries, self.rounds
        keys = self.FIRST + draws.subset(self.keys, R * N)
        first_value = self.FIRST + self.keys
        values = first_value + draws.below(self.vocab_size - first_value, R * N)
        found = Examples.empty(n, self.seq_len, ("live", "gap"))
        for r in range(R):
            start = r * self.round_len
            found.tokens[:, start] = self.RESET
            ours = slice(r * N, (r + 1) * N)
            queries = start + 1 + 2 * N
            found.tokens[:, start + 1 : queries : 2] = keys[:, ours]
            found.tokens[:, start + 2 : queries : 2] = values[:, ours]
            now = r * N + draws.below(N, Q)
            stale = min(2 * N, r * N)
            before = (r * N - stale) + draws.below(max(stale, 1), Q)
            live = (draws.uniform(Q) < self.live) | (r == 0)
            pair = np.where(live, now, before)
            at = np.broadcast_to(queries + np.arange(Q), (n, Q))
            found.tokens[:, queries : queries + Q] = np.take_along_axis(keys, pair, 1)
            written = pair // N * self.round_len + 2 + 2 * (pair % N)
            answers = np.where(live, np.take_along_axis(values, pair, 1), self.NONE)
            found.ask(at, answers, live=live, gap=at - written)
        return found

    def solve(self, tokens: Ints) -> Ints:
        first_value = self.FIRST + self.keys
        memory: dict[int, int] = {}
        answers, key = np.full(len(tokens), IGNORE), FILLER
        for t, token in enumerate(tokens.tolist()):
            if token == self.RESET:
                memory = {}
            elif token >= first_value:
                memory[key] = token
            elif token >= self.FIRST:
                key = token
                answers[t] = memory.get(key, self.NONE)
        return answers


@dataclass(frozen=True)
class SelectiveReset(Task):
    """Rounds of writes, a marker that clears all earlier keys of one class, and questions.

        tokens   a3 61 b7 52 a5 68 #b a5 b7 a3
        targets   .  .  .  .  .  .  . 68  ? 61

    A key's class is its id's, modulo the number of classes (here letters). Questions are after the keys of the last
    three rounds; the answer after a cleared one is "none", id 1. Ids 2, 3, … are the classes' markers. No key is
    written twice.
    """

    seq_len: int = 392
    vocab_size: int = 1024
    num_pairs: int = 16  # of a round
    num_queries: int = 16  # of a round
    num_classes: int = 4
    live: float = 0.6  # share of the questions after keys that are not cleared, where there are both kinds

    NONE, FIRST_MARKER = 1, 2  # ids
    RECENT = 3  # rounds

    def __post_init__(self) -> None:
        check_least(self, num_pairs=1, num_queries=1, num_classes=1, vocab_size=6)
        check_room(self, self.round_len, "a round")
        _check_keys(self, self.rounds * self.num_pairs, self.keys)
        if not 0 <= self.live <= 1:
            raise DataError(f"live is {self.live}: it takes 0 to 1")

    @property
    def first_key(self) -> int:
        return self.FIRST_MARKER + self.num_classes

    @property
    def keys(self) -> int:
        return (self.vocab_size - self.first_key) // 2

    @property
    def round_len(self) -> int:
        return 2 * self.num_pairs + 1 + self.num_queries

    @property
    def rounds(self) -> int:
        return self.seq_len // self.round_len

    @property
    def most_questions(self) -> int:
        return self.rounds * self.num_queries

    def draw(self, draws: Draws) -> Examples:
        n, N, Q, R = len(draws), self.num_pairs, self.num_queries, self.rounds
        keys = self.first_key + draws.subset(self.keys, R * N)
        first_value = self.first_key + self.keys
        values = first_value + draws.below(self.vocab_size - first_value, R * N)
        cleared = np.zeros(keys.shape, dtype=bool)
        found = Examples.empty(n, self.seq_len, ("live", "gap"))
        for r in range(R):
            start, end = r * self.round_len, (r + 1) * N
            marker = start + 2 * N
            found.tokens[:, start:marker:2] = keys[:, r * N : end]
            found.tokens[:, start + 1 : marker : 2] = values[:, r * N : end]
            kind = draws.below(self.num_classes)
            found.tokens[:, marker] = self.FIRST_MARKER + kind
            cleared[:, :end] |= keys[:, :end] % self.num_classes == kind[:, None]
            first = max(0, end - self.RECENT * N)
            recent = ~cleared[:, None, first:end]
            wanted = draws.uniform(Q)[:, :, None] < self.live
            # Of the wanted kind one at random, or where there is none of the other.
            pair = first + np.argmax(draws.uniform(Q, end - first) + (recent == wanted), axis=2)
            at = np.broadcast_to(marker + 1 + np.arange(Q), (n, Q))
            found.tokens[:, marker + 1 : marker + 1 + Q] = np.take_along_axis(keys, pair, 1)
            live = ~np.take_along_axis(cleared, pair, 1)
            written = pair // N * self.round_len + 1 + 2 * (pair % N)
            answers = np.where(live, np.take_along_axis(values, pair, 1), self.NONE)
            found.ask(at, answers, live=live, gap=at - written)
        return found

    def solve(self, tokens: Ints) -> Ints:
        first_value = self.first_key + self.keys
        memory: dict[int, int] = {}
        answers, key = np.full(len(tokens), IGNORE), FILLER
        for t, token in enumerate(tokens.tolist()):
            if token >= first_value:
                memory[key] = token
            elif token >= self.first_key:
                key = token
                answers[t] = memory.get(key, self.NONE)
            elif token >= self.FIRST_MARKER:
                kind = token - self.FIRST_MARKER
                memory = {k: v for k, v in memory.items() if k % self.num_classes != kind}
        return answers


@dataclass(frozen=True)
class PhoneBook(Task):
    """A list of names with their numbers, then names again, each followed by its number.

        tokens   A J 5 0 1  A K 7 2 2  B J 5 3 9  # A K 7 2 2  # B J 5 3 9
        targets  . . . . .  . . . . .  . . . . .  . . 7 2 2 .  . . 5 3 9 .

    A name is two ids, a number `digits` of them; names share their parts, so that neither part alone will do. The
    digits of an answer follow it in the tokens. Ids: # is 1, digits 2 to 11, then first and last parts of names.
    """

    seq_len: int = 256
    num_entries: int = 24
    num_queries: int = 8
    num_names: int = 16  # first parts, and as many last parts
    digits: int = 4

    ASK, FIRST_DIGIT, FIRST_NAME = 1, 2, 12  # ids

    def __post_init__(self) -> None:
        check_least(self, num_entries=1, num_queries=1, num_names=1, digits=1)
        if self.num_entries > self.num_names**2:
            names = f"num_names = {self.num_names} makes {self.num_names**2} names"
            raise DataError(f"num_entries is {self.num_entries}: {names}")
        if self.num_queries > self.num_entries:
            raise DataError(f"num_queries is {self.num_queries}: it takes 1 to num_entries = {self.num_entries}")
        width = 2 + self.digits
        check_room(self, self.num_entries * width + self.num_queries * (width + 1), "the book and its questions")

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self.FIRST_NAME + 2 * self.num_names

    @property
    def most_questions(self) -> int:
        return self.num_queries * self.digits

    def draw(self, draws: Draws) -> Examples:
        n, N, Q, d = len(draws), self.num_entries, self.num_queries, self.digits
        both = draws.subset(self.num_names**2, N)
        entries = np.empty((n, N, 2 + d), dtype=np.int64)
        entries[:, :, 0] = self.FIRST_NAME + both // self.num_names
        entries[:, :, 1] = self.FIRST_NAME + self.num_names + both % self.num_names
        entries[:, :, 2:] = self.FIRST_DIGIT + draws.below(10, N, d)
        found = Examples.empty(n, self.seq_len, ("entries", "gap", "digit"))
        book = N * (2 + d)
        found.tokens[:, :book] = entries.reshape(n, -1)
        asked = draws.subset(N, Q)
        questions = np.take_along_axis(entries, asked[:, :, None], 1)
        marked = np.concatenate([np.full((n, Q, 1), self.ASK), questions], axis=2)
        found.tokens[:, book : book + Q * (3 + d)] = marked.reshape(n, -1)
        digit = np.tile(np.arange(d), Q)
        at = np.broadcast_to(book + np.repeat(np.arange(Q), d) * (3 + d) + 2 + digit, (n, Q * d))
        written = np.repeat(asked, d, axis=1) * (2 + d) + 2 + digit
        found.ask(at, questions[:, :, 2:].reshape(n, -1), entries=N, gap=at - written, digit=digit)
        return found

    def solve(self, tokens: Ints) -> Ints:
        d, listed = self.digits, tokens.tolist()
        book: dict[tuple[int, int], list[int]] = {}
        for i in range(0, self.num_entries * (2 + d), 2 + d):
            book[listed[i], listed[i + 1]] = listed[i + 2 : i + 2 + d]
        answers = np.full(len(listed), IGNORE)
        for t, token in enumerate(listed):
            if token == self.ASK:
                answers[t + 2 : t + 2 + d] = book[listed[t + 1], listed[t + 2]]
        return answers
