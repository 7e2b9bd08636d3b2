"""Loading, for any kind of data: one Lightning batch is one optimizer step.

A batch is a list of micro-batches (see `data.packing`), and a run is one Lightning epoch of `max_steps` batches, so the
step is the whole state of the loader and nothing needs saving. On resume the loader starts at the step after the
checkpoint's, while its length stays `max_steps`: Lightning compares it with its own restored batch counter. Use
`Trainer(max_epochs=1, use_distributed_sampler=False)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import lightning
from torch.utils.data import DataLoader, Dataset, Sampler

from data.errors import DataError
from data.packing import Batch, Shape
from data.tokenizers import Tokenizer


class BaseDataModule(lightning.LightningDataModule, ABC):
    """What a trainer takes; subclasses say where batches come from.

    seq_len           tokens of a row
    batch_size        rows of an optimizer step, over all ranks and micro-batches
    micro_batch_size  rows that go through the model at once; None: all rows of a rank
    max_steps         optimizer steps of the run
    seed              of the order of training samples
    num_workers       loader processes

    `prepare()` does all the work and may be called at any time, before a model that needs `vocab_size` is
    built. Raises DataError for input that cannot be used.
    """

    def __init__(
        self,
        seq_len: int,
        *,
        batch_size: int,
        micro_batch_size: int | None,
        max_steps: int,
        seed: int,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        Shape(seq_len, batch_size, micro_batch_size).check()
        if max_steps < 1:
            raise DataError(f"max_steps is {max_steps}: it must be at least 1")
        if seed < 0:
            raise DataError(f"seed is {seed}: it must not be negative")
        self.seq_len = seq_len
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.max_steps, self.seed = max_steps, seed
        self.num_workers = num_workers
        self.allow_zero_length_dataloader_with_multiple_devices = True  # a rank may have nothing to validate

    @abstractmethod
    def prepare(self) -> Self:
        """Makes or reuses everything on disk and checks that it is enough; idempotent."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids that tokens and targets are of."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """What turns text into ids; None where there is no text."""

    @property
    @abstractmethod
    def identity(self) -> list[str]:
        """What has to be the same for a resumed run to see the same data."""

    @property
    @abstractmethod
    def contents(self) -> str:
        """What there is to train and validate on, in words."""

    @property
    def val_bytes(self) -> int | None:
        """UTF-8 bytes of the text that validation scores; None where they are not known."""
        return None

    @abstractmethod
    def train_steps(self, shape: Shape, rank: int) -> "Dataset[list[Batch]]":
        """Optimizer steps of one rank, by step."""

    @abstractmethod
    def val_batches(self, rank: int, world: int) -> "Dataset[Batch]":
        """What one rank validates on, by number."""

    # ------------------------------------------------------------------------------------- Lightning's hooks

    def prepare_data(self) -> None:
        """Called by one process a node."""
        self.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Called by every process."""
        self.prepare()

    def train_dataloader(self) -> "DataLoader[list[Batch]]":
        """Steps `start_step` … `max_steps` − 1, each as a list of micro-batches; its len() is `max_steps`."""
        rank, world = self._rank_and_world
        shape = Shape(self.seq_len, self.batch_size, self.micro_batch_size, world)
        shape.check()
        return self.loader(self.train_steps(shape, rank), RemainingSteps(self.start_step, self.max_steps))

    def val_dataloader(self) -> "DataLoader[Batch]":
        """This rank's part of the validation data."""
        dataset: Any = self.val_batches(*self._rank_and_world)
        return self.loader(dataset, range(len(dataset)), self.val_workers)

    @property
    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    @property
    def start_step(self) -> int:
        """Steps that the run has behind it: 0, or those of the checkpoint it resumes.

        Lightning's count of batches is used and not `trainer.global_step`, which counts every optimizer of a
        step and leaves out skipped updates.
        """
        if self.trainer is None:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]

    @property
    def val_workers(self) -> int:
        """Loader processes of a validation."""
        return self.num_workers

    def loader(self, dataset: "Dataset[Any]", sampler: Any, num_workers: int | None = None) -> "DataLoader[Any]":
        """The items of `dataset` that `sampler` names, as they are."""
        workers = self.num_workers if num_workers is None else num_workers
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=workers, pin_memory=pin)


class RemainingSteps(Sampler[int]):
    """Yields start … stop − 1, but has the length of the whole run, which Lightning counts against."""

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._start, self._stop))

    def __len__(self) -> int:
        return self._stop
