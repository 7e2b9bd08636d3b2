"""Synthetic tasks: oracles score 100 %, samples do not depend on batches, and generators are as they say."""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from data import IGNORE, DataError
from data.tasks import (
    FILLER,
    MQAR,
    TASKS,
    Draws,
    Examples,
    GlobalReset,
    InContextRecall,
    Mixture,
    ModularArithmetic,
    Overwrite,
    Palindrome,
    Parity,
    Permutations,
    PhoneBook,
    SelectiveCopy,
    SelectiveReset,
    Stacks,
    Task,
)
from data.tasks.draws import SPLITS, Ints
from data.tasks.state import compositions

CASES: dict[str, Task] = {name: kind() for name, kind in TASKS.items()} | {
    "mqar, random filler": MQAR(seq_len=512, num_pairs=64, vocab_size=300, filler="random"),
    "mqar, all keys there are": MQAR(seq_len=28, num_pairs=7, vocab_size=16, power=1.0),
    "mqar, few queries, odd": MQAR(seq_len=101, num_queries=3, num_pairs=10, vocab_size=41),
    "overwrite, mostly": Overwrite(seq_len=100, num_pairs=3, rewrites=0.9, vocab_size=12),
    "overwrite, never": Overwrite(seq_len=30, num_pairs=1, rewrites=0.0, vocab_size=5),
    "global reset, short": GlobalReset(seq_len=60, num_pairs=3, num_queries=5, vocab_size=100),
    "selective reset, two classes": SelectiveReset(num_classes=2, live=0.5),
    "selective reset, one class": SelectiveReset(num_classes=1, seq_len=200, num_pairs=5, num_queries=9),
    "phone book, all names": PhoneBook(num_entries=9, num_names=3, num_queries=9, digits=2, seq_len=99),
    "palindrome, short": Palindrome(seq_len=4, vocab_size=3),
    "selective copy, full": SelectiveCopy(seq_len=10, num_tokens=5),
    "one stack": Stacks(seq_len=200, num_stacks=1, vocab_size=40, pop=0.45),
    "recall, noise": InContextRecall(noise=0.2, vocab_size=33),
    "recall, runs": InContextRecall(longest=3, num_keys=6, seq_len=161),
    "recall, runs of one id": InContextRecall(longest=4, vocab_size=4, num_keys=4, noise=0.5, seq_len=77),
    "parity, each": Parity(ask="each", min_len=1),
    "S3, last": Permutations(degree=3, ask="last", seq_len=9),
    "arithmetic, shortest": ModularArithmetic(seq_len=4, modulus=2),
    "arithmetic": ModularArithmetic(seq_len=61, modulus=97),
}
cases = pytest.mark.parametrize("name", CASES)


def asked(found: Examples) -> Any:
    return found.targets != IGNORE


def answers(task: Task, tokens: Ints) -> Ints:
    return np.stack([task.solve(row) for row in tokens])


@cases
def test_the_oracle_answers_everything(name: str) -> None:
    task = CASES[name]
    for split in SPLITS:
        found = task.examples(3, split, np.arange(40))
        assert found.tokens.shape == found.targets.shape == (40, task.seq_len)
        assert found.tokens.dtype == found.targets.dtype == np.int64
        assert found.tokens.min() >= 0 and found.tokens.max() < task.vocab_size
        assert found.targets[asked(found)].min() > FILLER and found.targets.max() < task.vocab_size
        assert 0 < asked(found).sum(axis=1).max() <= task.most_questions
        solved = answers(task, found.tokens)
        assert np.array_equal(solved[asked(found)], found.targets[asked(found)])
        for values in found.slices.values():
            assert values.shape == found.tokens.shape and values[asked(found)].min() >= 0


@cases
def test_the_oracle_knows_nothing_of_later_tokens(name: str) -> None:
    task = CASES[name]
    found = task.examples(5, "test", np.arange(12))
    for tokens, targets in zip(found.tokens, found.targets, strict=True):
        for t in np.flatnonzero(targets != IGNORE)[::7].tolist():
            cut = tokens.copy()
            # Tasks that are read in records need the record's length, and not what is in it.
            cut[t + 1 :] = tokens[t + 1 :] if isinstance(task, SelectiveCopy) else FILLER
            assert task.solve(cut)[t] == targets[t]


@cases
def test_a_sample_is_the_same_in_any_batch(name: str) -> None:
    task = CASES[name]
    whole = task.examples(7, "train", np.arange(10, 50))
    for part in (np.arange(10, 11), np.arange(13, 20), np.array([49, 10, 30])):
        found = task.examples(7, "train", part)
        assert np.array_equal(found.tokens, whole.tokens[part - 10])
        assert np.array_equal(found.targets, whole.targets[part - 10])
        assert all(np.array_equal(found.slices[key], whole.slices[key][part - 10]) for key in whole.slices)


def test_seeds_and_splits_do_not_meet() -> None:
    """Of samples that can hardly be alike by chance, none is."""
    task = MQAR(seq_len=64, num_pairs=8)
    samples = [
        tuple(row)
        for seed in (0, 1, 2)
        for split in SPLITS
        for row in task.examples(seed, split, np.arange(200)).tokens.tolist()
    ]
    assert len(set(samples)) == len(samples)


@cases
def test_fast_enough(name: str) -> None:
    """200,000 tokens a second on one core."""
    task, count = CASES[name], 256
    rates = []
    for attempt in range(4):
        start = time.perf_counter()
        task.examples(attempt, "train", np.arange(count))
        rates.append(count * task.seq_len / (time.perf_counter() - start))
    assert max(rates) > 200_000, f"{max(rates):,.0f} tokens/s"


# ------------------------------------------------------------------------------ the numbers


def test_draws_are_uniform() -> None:
    draws = Draws(0, "train", np.arange(20_000))
    counts = np.bincount(draws.below(7, 3).ravel(), minlength=7)
    assert np.abs(counts / counts.sum() - 1 / 7).max() < 0.005
    uniform = draws.uniform(2)
    assert uniform.min() > 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(uniform.T)[0, 1]) < 0.03 and abs(np.corrcoef(uniform[:-1, 0], uniform[1:, 0])[0, 1]) < 0.03
    high = np.array([1, 2, 1000])
    numbers = draws.below(high, 3)
    assert (numbers < high).all() and (numbers[:, 0] == 0).all() and 450 < numbers[:, 2].mean() < 550


@pytest.mark.parametrize(("population", "size"), [(5, 5), (6, 2), (40, 4), (1, 1)])
def test_subsets(population: int, size: int) -> None:
    """Every ordered choice as often as any other, drawn either way."""
    chosen = Draws(1, "val", np.arange(60_000)).subset(population, size)
    assert all(len(set(row)) == size for row in chosen[:500].tolist())
    for column in chosen.T:
        share = np.bincount(column, minlength=population) / len(chosen)
        assert np.abs(share - 1 / population).max() < 0.01
    if size > 1:
        assert abs((chosen[:, 0] < chosen[:, 1]).mean() - 0.5) < 0.01


# ------------------------------------------------------------------------------ what each is like


def test_mqar_is_laid_out_as_published() -> None:
    task = MQAR(seq_len=64, num_pairs=8, vocab_size=100)
    found = task.examples(0, "train", np.arange(2000))
    keys, values = found.tokens[:, 0:16:2], found.tokens[:, 1:16:2]
    assert ((keys >= 1) & (keys < 50)).all() and ((values >= 50) & (values < 100)).all()
    assert all(len(set(row)) == 8 for rows in (keys, values) for row in rows[:100].tolist())
    rows, at = np.nonzero(asked(found))
    assert (at >= 16).all() and (at % 2 == 0).all() and (np.bincount(rows) == 8).all()
    assert (found.tokens[:, 16:][~asked(found)[:, 16:]] == FILLER).all()
    for row in range(50):
        assert set(found.tokens[row][asked(found)[row]]) == set(keys[row])
    first = asked(found)[:, 16].mean()  # the first slot's weight is by far the largest
    assert first > 0.9 > asked(found)[:, 62].mean()
    gap = found.slices["gap"][rows, at]
    back = found.tokens[rows, at - gap]
    assert np.array_equal(back, found.targets[rows, at])


def test_the_power_of_mqar() -> None:
    """With a = 1 all slots are alike."""
    found = MQAR(seq_len=48, num_pairs=4, vocab_size=100, power=1.0).examples(0, "train", np.arange(20_000))
    share = asked(found)[:, 8::2].mean(axis=0)
    assert np.abs(share - 4 / 20).max() < 0.01


def test_random_filler_is_never_a_key() -> None:
    task = MQAR(seq_len=200, num_pairs=20, vocab_size=64, filler="random")
    found = task.examples(0, "train", np.arange(300))
    filler = found.tokens[:, 40:][~asked(found)[:, 40:]]
    assert (filler > 0).all() and set(np.unique(filler)) == set(range(1, 64))  # of other samples' keys, too
    for row in range(300):
        rest = found.tokens[row, 40:][~asked(found)[row, 40:]]
        assert not set(rest) & set(found.tokens[row, 0:40:2])


def test_overwriting_takes_the_latest_value() -> None:
    """Whoever remembers the first value is wrong as often as there was a second."""
    found = Overwrite().examples(0, "train", np.arange(200))
    rows, at = np.nonzero(asked(found))
    assert len(rows) == 200 * 64 and (found.tokens[found.tokens >= 512].size == 200 * (32 + 64))
    first = {(row, key): value for row in range(200) for key, value in found.tokens[row, :64].reshape(32, 2).tolist()}
    naive = np.array([first[row, key] for row, key in zip(rows.tolist(), found.tokens[rows, at].tolist(), strict=True)])
    same = naive == found.targets[rows, at]
    rewritten = found.slices["rewrites"][rows, at] > 0
    assert same[~rewritten].all() and same[rewritten].mean() < 0.02 and 0.4 < rewritten.mean() < 0.9
    assert np.array_equal(found.tokens[rows, at - found.slices["gap"][rows, at]], found.targets[rows, at])


@pytest.mark.parametrize("task", [GlobalReset(), SelectiveReset()], ids=["global", "selective"])
def test_resets_clear_and_nothing_else_does(task: GlobalReset | SelectiveReset) -> None:
    found = task.examples(0, "train", np.arange(300))
    rows, at = np.nonzero(asked(found))
    live = found.slices["live"][rows, at].astype(bool)
    targets = found.targets[rows, at]
    assert np.array_equal(targets == task.NONE, ~live)
    written = found.tokens[rows, at - found.slices["gap"][rows, at]]
    assert np.array_equal(written[live], targets[live]) and (written[~live] > task.NONE).all()
    late = at > 2 * task.round_len
    assert 0.57 < live[late].mean() < 0.63
    assert (found.slices["gap"][rows, at] < 3 * task.round_len).all()


def test_the_classes_of_selective_reset() -> None:
    """Of keys that were written in the same round, a marker clears one class and no other."""
    task = SelectiveReset(num_classes=2)
    found = task.examples(0, "train", np.arange(200))
    zone = slice(task.round_len - task.num_queries, task.round_len)
    keys, targets = found.tokens[:, zone], found.targets[:, zone]
    marker = found.tokens[:, 2 * task.num_pairs] - task.FIRST_MARKER
    assert set(marker) == {0, 1}
    assert np.array_equal(targets == task.NONE, keys % 2 == marker[:, None])


def test_stacks_are_last_in_first_out() -> None:
    found = Stacks(seq_len=300, num_stacks=3, vocab_size=50).examples(0, "train", np.arange(100))
    rows, at = np.nonzero(asked(found))
    assert (found.tokens[rows, at - 1] == Stacks.POP).all()
    assert np.array_equal(found.tokens[rows, at + 1], found.targets[rows, at])
    depth = found.slices["depth"][rows, at]
    assert depth.min() == 1 and depth.max() > 8
    assert np.array_equal(found.tokens[rows, at - found.slices["gap"][rows, at]], found.targets[rows, at])


def test_palindrome_and_copy() -> None:
    found = Palindrome(seq_len=12, vocab_size=30).examples(0, "train", np.arange(3))
    for tokens, targets in zip(found.tokens.tolist(), found.targets.tolist(), strict=True):
        assert tokens[6] == Palindrome.SEPARATOR and tokens[7:] + targets[-1:] == tokens[5::-1]
        assert targets[:7] == [IGNORE] * 7 and targets[7:] == tokens[4::-1]
    found = SelectiveCopy(seq_len=40, num_tokens=6).examples(0, "train", np.arange(3))
    for tokens, targets in zip(found.tokens.tolist(), found.targets.tolist(), strict=True):
        assert [token for token in tokens if token > 1] == targets[34:] and tokens[34:] == [SelectiveCopy.MARKER] * 6


def test_recall_in_context_asks_what_was_there() -> None:
    """A key's first time is no question; one map a sample; noise as often as asked for."""
    task = InContextRecall(noise=0.2, vocab_size=34)
    found = task.examples(0, "train", np.arange(200))
    share = (found.tokens == task.NOISE).sum() / (found.tokens >= task.FIRST + task.key_ids).sum()
    assert 0.18 < share < 0.22
    for tokens, targets in zip(found.tokens[:50].tolist(), found.targets[:50].tolist(), strict=True):
        seen: dict[int, int] = {}
        for t, token in enumerate(tokens[:-1]):
            if task.FIRST <= token < task.FIRST + task.key_ids:
                assert targets[t] == seen.get(token, IGNORE) and seen.setdefault(token, tokens[t + 1]) == tokens[t + 1]
            else:
                assert targets[t] == IGNORE


def test_phone_book_needs_both_names() -> None:
    found = PhoneBook().examples(0, "train", np.arange(50))
    parts = [Counter(found.tokens[:, i:144:6].ravel().tolist()) for i in (0, 1)]
    assert all(count > 1 for part in parts for count in part.values())
    digits = found.targets[asked(found)]
    assert set(digits) == set(range(PhoneBook.FIRST_DIGIT, PhoneBook.FIRST_NAME))


def test_permutations_are_a_group() -> None:
    for degree, size in ((3, 6), (5, 120)):
        table = compositions(degree)
        assert table.shape == (size, size) and np.array_equal(table[0], np.arange(size))  # 0 is the identity
        assert all(len(set(line)) == size for line in (*table.tolist(), *table.T.tolist()))
        assert not np.array_equal(table, table.T)
        a, b, c = np.random.default_rng(0).integers(size, size=(3, 50))
        assert np.array_equal(table[table[a, b], c], table[a, table[b, c]])


def test_lengths_of_state_tracking() -> None:
    found = Parity(seq_len=12, min_len=3).examples(0, "train", np.arange(3000))
    lengths = (found.tokens != FILLER).sum(axis=1)
    assert set(lengths) == set(range(3, 13)) and np.array_equal(asked(found).argmax(axis=1), lengths - 1)
    assert abs((found.targets[asked(found)] == 2).mean() - 0.5) < 0.03


def test_products_come_first() -> None:
    task = ModularArithmetic(modulus=10)
    n = task.FIRST
    tokens = np.array([n + 2, task.PLUS, n + 3, task.TIMES, n + 4, task.MINUS, n + 5, task.EQUALS, 0])
    assert task.solve(tokens)[7] == n + 9


# ------------------------------------------------------------------------------ mixtures


def test_mixtures() -> None:
    some = [MQAR(seq_len=64, num_pairs=pairs, vocab_size=100) for pairs in (2, 4, 8)]
    tasks = (*some, Overwrite(seq_len=64, num_pairs=4))
    mixture = Mixture(tasks, weights=(1.0, 1.0, 2.0, 4.0))
    assert mixture.vocab_size == 1024 and mixture.seq_len == 64
    found = mixture.examples(0, "val", np.arange(4000))
    which = found.slices["task"][:, 0]
    assert np.abs(np.bincount(which) / 4000 - np.array([1, 1, 2, 4]) / 8).max() < 0.03
    for i, task in enumerate(tasks):
        indices = np.flatnonzero(which == i)
        own = task.examples(0, "val", indices)
        assert np.array_equal(found.tokens[indices], own.tokens) and np.array_equal(found.targets[indices], own.targets)
    assert (found.slices["rewrites"][which < 3] == -1).all()
    assert all((found.slices["pairs"][which == i][asked(found)[which == i]] == 2 ** (i + 1)).all() for i in range(3))
    alone = mixture.examples(0, "val", np.array([17]))
    assert np.array_equal(alone.tokens, found.tokens[17:18])


# ------------------------------------------------------------------------------ bad options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mqar", {"num_pairs": 0}, "num_pairs is 0: it must be at least 1"),
        ("mqar", {"num_pairs": 65}, "seq_len is 256: 65 pairs and 65 queries takes at least 260"),
        ("mqar", {"vocab_size": 32}, "vocab_size is 32: it has 15 keys, and a sample takes 16"),
        ("mqar", {"num_queries": 17}, "num_queries is 17: it takes 1 to num_pairs = 16"),
        ("mqar", {"power": 0.0}, "power is 0.0: it must be positive"),
        ("overwrite", {"rewrites": 1.0}, "rewrites is 1.0: it takes 0 up to, but not, 1"),
        ("global_reset", {"live": 1.5}, "live is 1.5: it takes 0 to 1"),
        ("global_reset", {"seq_len": 48}, "seq_len is 48: a round takes at least 49"),
        ("selective_reset", {"vocab_size": 64}, "vocab_size is 64: it has 29 keys, and a sample takes 128"),
        ("phone_book", {"num_names": 4}, "num_entries is 24: num_names = 4 makes 16 names"),
        ("palindrome", {"seq_len": 7}, "seq_len is 7: it must be even"),
        ("stacks", {"vocab_size": 67}, "vocab_size is 67: it must be at least 68"),
        ("in_context_recall", {"num_keys": 8}, "num_keys is 8: it takes 1 to 7"),
        ("parity", {"min_len": 41}, "min_len is 41: it takes 1 to seq_len = 40"),
        ("permutations", {"degree": 6}, "degree is 6: it takes 2 to 5"),
    ],
)
def test_bad_options_are_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as refusal:
        TASKS[name](**options)
    assert str(refusal.value) == message


def test_bad_mixtures() -> None:
    with pytest.raises(DataError, match=r"have the lengths \[40, 64\]: it takes tasks of one length"):
        Mixture((Parity(), MQAR(seq_len=64)))
    with pytest.raises(DataError, match="it takes a positive number for each task"):
        Mixture((Parity(), replace(Parity(), min_len=9)), weights=(1.0, 0.0))
