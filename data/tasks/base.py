"""What all tasks share: examples, the task itself, and mixtures of tasks.

A task is a small configuration. Sample `index` of a split is a pure function of (seed, split, index): train and test
draw from other streams, and workers may divide the indices as they like. The target of a position is what the model has
to say there, as in language modelling; positions without a question have none. `solve` is the oracle: it answers every
question from the tokens before it alone, and where it does not reach 100 % the generator is wrong.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from data.errors import DataError
from data.packing import IGNORE
from data.tasks.draws import Draws, Ints, Split

FILLER = 0  # the id that stands for nothing, in every task


@dataclass
class Examples:
    """n samples of T tokens."""

    tokens: Ints  # [n, T]
    targets: Ints  # [n, T], IGNORE where nothing is asked
    slices: dict[str, Ints]  # by name [n, T]: what a question is like, read where there is a target

    @staticmethod
    def empty(n: int, T: int, slices: Iterable[str] = ()) -> "Examples":
        nothing = np.zeros((n, T), dtype=np.int64)
        return Examples(nothing + FILLER, nothing + IGNORE, {name: nothing.copy() for name in slices})

    def ask(self, at: Ints, answers: ArrayLike, **slices: ArrayLike) -> None:
        """Questions at the positions `at` [n, k]; answers and slices are [n, k] or broadcast to it."""
        rows = np.arange(len(self.tokens))[:, None]
        self.targets[rows, at] = answers
        for name, values in slices.items():
            self.slices[name][rows, at] = values


class Task(ABC):
    """`seq_len` tokens a sample, ids under `vocab_size`; subclasses are frozen dataclasses of options."""

    seq_len: int
    vocab_size: int

    @property
    @abstractmethod
    def most_questions(self) -> int:
        """That a sample can have: batches are of one size."""

    @abstractmethod
    def draw(self, draws: Draws) -> Examples:
        """An example for each sample of `draws`."""

    @abstractmethod
    def solve(self, tokens: Ints) -> Ints:
        """The oracle's answers to one sample [T]: at every position that may be asked, from the tokens up to there;
        elsewhere IGNORE."""

    def examples(self, seed: int, split: Split, indices: Ints) -> Examples:
        return self.draw(Draws(seed, split, indices))

    @property
    def slice_names(self) -> tuple[str, ...]:
        """In alphabetical order."""
        return _slice_names(self)


@cache
def _slice_names(task: Task) -> tuple[str, ...]:
    return tuple(sorted(task.examples(0, "val", np.arange(1)).slices))


@dataclass(frozen=True)
class Mixture(Task):
    """A sample is of one of the tasks, by weight: a curriculum of mixed difficulty. Slices that a task does not have
    are −1; `task` is which one it is.
    """

    tasks: tuple[Task, ...]
    weights: tuple[float, ...] | None = None  # None: all alike

    def __post_init__(self) -> None:
        lengths = {task.seq_len for task in self.tasks}
        if len(lengths) != 1:
            raise DataError(f"tasks of a mixture have the lengths {sorted(lengths)}: it takes tasks of one length")
        if self.weights is not None and (len(self.weights) != len(self.tasks) or min(self.weights) <= 0):
            raise DataError(f"weights are {list(self.weights)}: it takes a positive number for each task")

    @property
    def seq_len(self) -> int:  # type: ignore[override]
        return self.tasks[0].seq_len

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return max(task.vocab_size for task in self.tasks)

    @property
    def most_questions(self) -> int:
        return max(task.most_questions for task in self.tasks)

    def draw(self, draws: Draws) -> Examples:
        raise NotImplementedError("the samples of a mixture are drawn by its tasks")

    def examples(self, seed: int, split: Split, indices: Ints) -> Examples:
        indices = np.asarray(indices, dtype=np.int64)
        limits = np.cumsum(self.weights if self.weights is not None else np.ones(len(self.tasks)))
        which = np.searchsorted(limits, Draws(seed, split, indices).uniform() * limits[-1], side="right")
        parts = {i: self.tasks[i].examples(seed, split, indices[which == i]) for i in np.unique(which).tolist()}
        names = {name for task in self.tasks for name in task.slice_names}
        found = Examples.empty(len(indices), self.seq_len, ("task", *names))
        for name in names:
            found.slices[name] -= 1
        for i, part in parts.items():
            rows = which == i
            found.tokens[rows], found.targets[rows], found.slices["task"][rows] = part.tokens, part.targets, i
            for name, values in part.slices.items():
                found.slices[name][rows] = values
        return found

    def solve(self, tokens: Ints) -> Ints:
        raise NotImplementedError("the tasks of a mixture have their own")


def check_least(task: Task, **least: int) -> None:
    """Raises DataError, naming the option: below its least value."""
    for name, value in least.items():
        if getattr(task, name) < value:
            raise DataError(f"{name} is {getattr(task, name)}: it must be at least {value}")


def check_room(task: Task, needed: int, what: str) -> None:
    if task.seq_len < needed:
        raise DataError(f"seq_len is {task.seq_len}: {what} takes at least {needed}")
