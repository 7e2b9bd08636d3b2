"""The data module of a task: samples drawn as they are needed, by the training step they belong to.

A batch is a dict of tensors, of b samples with at most Q questions each:

    tokens   int64 [b, T]
    at       int64 [b, Q]  positions that are asked, in order; then zeros
    targets  int64 [b, Q]  the answers; IGNORE where there is no question
    slices   int64 [b, Q, S]  what the questions are like, in the order of the task's `slice_names`; only in evaluation

Training samples are of the split "train", from 0 on, each once. Validation and test are the first samples of the splits
"val" and "test", whatever the run's seed: runs of several seeds are tested on one set.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.errors import DataError
from data.loading import BaseDataModule
from data.packing import IGNORE, Batch, Shape
from data.tasks.base import Examples, Task
from data.tasks.draws import Split

EVAL_SEED = 0


@dataclass(frozen=True)
class TaskConfig:
    """What the group `data` says where it names a task."""

    name: str  # of TASKS
    task: Task  # to train and validate on
    tests: dict[str, Task] = field(default_factory=dict)  # beside it, by name: longer ones, say
    val_samples: int = 1000
    test_samples: int = 2000  # of every test
    val_batch_size: int = 100  # samples
    num_workers: int = 0  # loader processes

    isolate_documents = False  # a sample is a row

    def __post_init__(self) -> None:
        for name in ("val_samples", "test_samples", "val_batch_size"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.num_workers < 0:
            raise DataError(f"num_workers is {self.num_workers}: it must not be negative")
        for name, test in self.tests.items():
            if test.vocab_size > self.task.vocab_size:
                ids = f"it has {test.vocab_size} ids, what is trained on {self.task.vocab_size}"
                raise DataError(f"test {name}: {ids}: tests take no more")

    @property
    def seq_len(self) -> int:
        return self.task.seq_len


class TaskDataModule(BaseDataModule):
    """Serves what `config` describes; see BaseDataModule. There is no text, and nothing on disk."""

    def __init__(
        self, config: TaskConfig, *, batch_size: int, micro_batch_size: int | None, max_steps: int, seed: int
    ) -> None:
        super().__init__(
            config.seq_len,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            max_steps=max_steps,
            seed=seed,
            num_workers=config.num_workers,
        )
        self.config = config

    def prepare(self) -> "TaskDataModule":
        return self

    @property
    def vocab_size(self) -> int:
        return self.config.task.vocab_size

    @property
    def tokenizer(self) -> None:
        return None

    @property
    def identity(self) -> list[str]:
        return [repr(self.config.task)]

    @property
    def contents(self) -> str:
        c = self.config
        samples = f"{c.val_samples:,} samples to validate on, {len(self.tests)} × {c.test_samples:,} to test"
        return f"{c.name}, drawn anew every step; {samples}"

    def train_steps(self, shape: Shape, rank: int) -> "TaskSteps":
        return TaskSteps(self.config.task, shape, self.seed, rank)

    def val_batches(self, rank: int, world: int) -> "TaskBatches":
        """This rank's validation samples (rank, rank + world, …), `val_batch_size` at a time."""
        samples = range(rank, self.config.val_samples, world)
        return TaskBatches(self.config.task, "val", samples, self.config.val_batch_size)

    @property
    def val_workers(self) -> int:
        """None: to draw the samples takes less time than to start processes."""
        return 0

    @property
    def tests(self) -> dict[str, Task]:
        """What is trained on, then the others, by name."""
        return {"as trained": self.config.task, **self.config.tests}

    def test_dataloader(self, name: str = "as trained") -> "DataLoader[Batch]":
        """All samples of one of `tests`."""
        dataset = TaskBatches(self.tests[name], "test", range(self.config.test_samples), self.config.val_batch_size)
        return self.loader(dataset, range(len(dataset)), self.val_workers)


class TaskSteps(Dataset[list[Batch]]):
    """Optimizer steps of one rank, by step: samples rank, rank + world, … of the step."""

    def __init__(self, task: Task, shape: Shape, seed: int, rank: int) -> None:
        self._task, self._shape, self._seed, self._rank = task, shape, seed, rank

    def __getitem__(self, step: int) -> list[Batch]:
        shape = self._shape
        first = step * shape.batch_size
        samples = np.arange(first + self._rank, first + shape.batch_size, shape.world)
        batch = as_batch(self._task, self._task.examples(self._seed, "train", samples))
        parts = {name: tensor.split(shape.micro) for name, tensor in batch.items()}
        return [dict(zip(parts, micro, strict=True)) for micro in zip(*parts.values(), strict=True)]


class TaskBatches(Dataset[Batch]):
    """Samples of a split in batches, by number; the last may be smaller."""

    def __init__(self, task: Task, split: Split, samples: range, batch_size: int) -> None:
        self.task, self._split, self._samples, self._batch_size = task, split, samples, batch_size

    def __len__(self) -> int:
        return -(-len(self._samples) // self._batch_size)

    def __getitem__(self, index: int) -> Batch:
        samples = np.array(self._samples[index * self._batch_size : (index + 1) * self._batch_size])
        found = self.task.examples(EVAL_SEED, self._split, samples)
        batch = as_batch(self.task, found)
        values = [torch.from_numpy(found.slices[name]).gather(1, batch["at"]) for name in self.task.slice_names]
        return {**batch, "slices": torch.stack(values, dim=2)}


def as_batch(task: Task, found: Examples) -> Batch:
    """tokens, at and targets, as the module says."""
    rows, positions = np.nonzero(found.targets != IGNORE)
    counts = np.bincount(rows, minlength=len(found.tokens))
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)  # which question of its sample
    at = np.zeros((len(found.tokens), task.most_questions), dtype=np.int64)
    targets = np.full_like(at, IGNORE)
    at[rows, columns], targets[rows, columns] = positions, found.targets[rows, positions]
    return {"tokens": torch.from_numpy(found.tokens), "at": torch.from_numpy(at), "targets": torch.from_numpy(targets)}
