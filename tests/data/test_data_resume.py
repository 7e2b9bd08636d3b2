"""Resume on Lightning: the same steps, none skipped or repeated. Toy model, manual optimization."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

from data import DataModule
from data.packing import Batch, Shape, train_step

Make = Callable[..., DataModule]

STEPS = 20


class Toy(lightning.LightningModule):
    """Remembers the first row of every micro-batch; saves after step `save_at`."""

    def __init__(
        self,
        optimizers: int,
        save_at: int = 0,
        where: str = "",
        path: Path = Path(),
        dump: Path | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weights = torch.nn.ParameterList(torch.zeros(1) for _ in range(optimizers))
        self.save_at, self.where, self.path = save_at, where, path
        self.seen: list[list[list[int]]] = []
        self.indices: list[int] = []
        self.windows, self.dump = 0, dump

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([weight], lr=0.1) for weight in self.weights]

    def training_step(self, step: list[Batch], batch_idx: int) -> None:
        self.seen.append([batch["tokens"][0].tolist() for batch in step])
        self.indices.append(batch_idx)
        optimizers = self.optimizers()
        for optimizer, weight in zip(
            optimizers if isinstance(optimizers, list) else [optimizers], self.weights, strict=True
        ):
            self.manual_backward((weight - 1).square().sum())
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.windows += len(batch["tokens"])

    def on_train_batch_end(self, *_: Any) -> None:
        self._maybe_save("batch_end")

    def on_validation_end(self) -> None:
        self._maybe_save("validation_end")

    def on_fit_end(self) -> None:
        if self.dump:
            seen = json.dumps({"seen": self.seen, "windows": self.windows})
            (self.dump / f"rank{self.trainer.global_rank}.json").write_text(seen)

    def _maybe_save(self, where: str) -> None:
        if self.where == where and self.trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.save_at:
            self.trainer.save_checkpoint(self.path)


def fit(data: DataModule, module: Toy, checkpoint: Path | None = None, **options: Any) -> None:
    trainer = lightning.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "val_check_interval": 3,
            "num_sanity_val_steps": 0,
            **options,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)


def expected(data: DataModule, world: int = 1, rank: int = 0) -> list[list[list[int]]]:
    shape = Shape(64, data.batch_size, data.micro_batch_size, world)
    return [
        [batch["tokens"][0].tolist() for batch in train_step(data.train, shape, 0, step, rank, False)]
        for step in range(STEPS)
    ]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield


@pytest.mark.parametrize(("workers", "optimizers"), [(0, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize(
    ("save_at", "where", "by_steps"),
    [
        (7, "batch_end", False),
        (9, "batch_end", True),
        (9, "validation_end", True),
        (9, "validation_end", False),
        (1, "batch_end", True),
        (19, "batch_end", False),
    ],
)
def test_resume_is_exact(
    make: Make, tmp_path: Path, workers: int, optimizers: int, save_at: int, where: str, by_steps: bool
) -> None:
    """Validation is due after step 9, not after 7. Saving changes nothing in the run that saves."""
    # Lightning counts the steps of every optimizer
    options = {"max_steps": optimizers * STEPS, "check_val_every_n_epoch": None} if by_steps else {}
    path = tmp_path / "a.ckpt"
    whole, resumed = Toy(optimizers, save_at, where, path), Toy(optimizers)
    data = make(STEPS, micro_batch_size=2, num_workers=workers)
    fit(data, whole, **options)
    assert whole.seen == expected(data)
    fit(make(STEPS, micro_batch_size=2, num_workers=workers), resumed, path, **options)
    assert resumed.seen == expected(data)[save_at:]
    assert resumed.indices == list(range(save_at, STEPS))


@pytest.mark.parametrize("windows", [None, 1])
def test_two_ranks(make: Make, tmp_path: Path, windows: int | None) -> None:
    """D11: disjoint rows, a clean end, resume; also when one rank has no validation window at all."""
    options = {"strategy": "ddp_fork", "devices": 2, "val_check_interval": 5}
    path = tmp_path / "a.ckpt"
    data = make(STEPS, micro_batch_size=1, max_val_windows=windows)
    fit(data, Toy(1, 7, "batch_end", path, tmp_path), **options)
    whole = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank in (0, 1):
        assert whole[rank]["seen"] == expected(data, 2, rank)
        assert whole[rank]["windows"] == len(range(rank, data.val_windows, 2)) * (STEPS // 5)
    fit(
        make(STEPS, micro_batch_size=1, max_val_windows=windows),
        Toy(1, dump=tmp_path),
        path,
        **options,
    )
    for rank in (0, 1):
        rest = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert rest["seen"] == expected(data, 2, rank)[7:]
