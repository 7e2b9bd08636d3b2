"""Random numbers that belong to a sample: pure functions of (seed, split, index), however samples are batched.

A generator would give its numbers to whichever sample asks first. Here number j of a sample is a hash of the sample's
key and j (SplitMix64, Steele et al. 2014), for all samples of a batch at once.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")

Ints = NDArray[np.int64]

SPARSE = 8  # a subset this many times smaller than its population is quicker drawn one by one
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Draws:
    """The numbers of the samples `indices`; every call goes on from the one before, each sample by itself."""

    def __init__(self, seed: int, split: Split, indices: Ints) -> None:
        key = np.full(len(indices), seed, dtype=np.uint64)
        for part in (np.uint64(SPLITS.index(split)), np.asarray(indices).astype(np.uint64)):
            key = _mix(key + GOLDEN) ^ part
        self._keys = _mix(key + GOLDEN)
        self._used = 0

    def __len__(self) -> int:
        return len(self._keys)

    def bits(self, *shape: int) -> NDArray[np.uint64]:
        """Uniform 64-bit numbers [n, *shape]."""
        count = int(np.prod(shape, dtype=np.int64))
        counters = np.arange(self._used + 1, self._used + count + 1, dtype=np.uint64)
        self._used += count
        return _mix(self._keys[:, None] + GOLDEN * counters).reshape(len(self), *shape)

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """In (0, 1), [n, *shape]."""
        return ((self.bits(*shape) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def below(self, high: int | Ints, *shape: int) -> Ints:
        """Whole numbers in [0, high), [n, *shape]; `high` under 2³¹, one for all or [n, *shape]."""
        top = (self.bits(*shape) >> np.uint64(32)).astype(np.int64)
        return (top * high) >> 32

    def subset(self, population: int, size: int) -> Ints:
        """[n, size] distinct numbers of [0, population), in random order."""
        if SPARSE * size >= population:
            return np.argsort(self.bits(population), axis=1, kind="stable")[:, :size]
        # Floyd's algorithm: the i-th number is of [0, population − size + i], or the last of these if it was taken.
        most = np.arange(population - size, population)
        chosen = self.below(most + 1, size)
        for i in range(1, size):
            taken = (chosen[:, :i] == chosen[:, i : i + 1]).any(axis=1)
            chosen[taken, i] = most[i]
        return np.take_along_axis(chosen, np.argsort(self.bits(size), axis=1, kind="stable"), axis=1)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
