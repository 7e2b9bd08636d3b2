"""A stopped run that is resumed ends where an unstopped one does, bit for bit (cases D2, D3, D8, D9, D12, D14)."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_lm.training.checkpoint import SaveCheckpoints
from kda_lm.training.module import TrainingModule

Run = Callable[..., tuple[dict[str, Any], Path]]
Resume = Callable[..., dict[str, Any]]


class Stopped(Exception):
    """Stands for the machine going away."""


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """`stop_at(n)`: the next run dies in its n-th step, in the middle of it; `stop_at(None)` lets runs be."""
    original = TrainingModule.training_step

    def set_step(step: int | None) -> None:
        def training_step(self: TrainingModule, batch: list[dict[str, Tensor]], batch_idx: int) -> dict[str, Any]:
            if self.trainer.global_step + 1 == step:
                self.model.loss(**batch[0])[0].backward()  # micro-batch 1 of the step is done
                raise Stopped
            return original(self, batch, batch_idx)

        monkeypatch.setattr(TrainingModule, "training_step", training_step)

    return set_step


def checkpoint(folder: Path, name: str = "last.ckpt") -> dict[str, Any]:
    contents: dict[str, Any] = torch.load(folder / "checkpoints" / name, weights_only=True)
    return contents


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal, bit for bit, through nested containers."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def rows(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without what time decides."""
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if "second" not in k and "mfu" not in k} for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("trainer.micro_batch_size=1",),
        ("data.num_workers=2",),
        ("optim=adamw", "trainer.ema_decay=0.9"),
        (
            "trainer.ema_decay=0.9",
            "optim.schedule=wsd",
            "data.isolate_documents=true",
            "trainer.save_every=3",
        ),
        (
            "trainer.max_steps=80",
            "trainer.save_every=7",
            "trainer.val_every=40",
        ),  # crosses two epochs of the corpus
    ],
    ids=["plain", "accumulation", "workers", "adamw-ema", "wsd-ema-isolated", "epochs"],
)
def test_resume_is_exact(
    run: Run, resume: Resume, stop_at: Callable[[int | None], None], options: tuple[str, ...]
) -> None:
    whole, whole_folder = run("whole", *options)
    stop_at(whole["steps"] - 2)
    with pytest.raises(Stopped):
        run("parts", *options)
    saved = checkpoint(Path("parts"))["global_step"]
    assert 0 < saved < whole["steps"] - 2
    stop_at(None)
    parts = resume("parts")

    for name in ("val/loss", "steps", "tokens", "val/targets"):
        assert parts[name] == whole[name], name
    a, b = checkpoint(whole_folder), checkpoint(Path("parts"))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "rng", "global_step", "kda_lm"):
        assert_same(a[key], b[key], key)
    assert a.get("current_model_state", {}).keys() == b.get("current_model_state", {}).keys()
    assert_same(a.get("current_model_state"), b.get("current_model_state"), "current_model_state")
    assert_same(
        checkpoint(whole_folder, "best.ckpt")["state_dict"],
        checkpoint(Path("parts"), "best.ckpt")["state_dict"],
    )
    assert rows(whole_folder) == rows(Path("parts"))


def test_resuming_twice_and_extending(run: Run, resume: Resume, stop_at: Callable[[int | None], None]) -> None:
    """A finished run can be made longer; a constant rate makes the longer run's start the shorter run."""
    run("whole", "optim.schedule=constant", "trainer.max_steps=12")
    run("parts", "optim.schedule=constant")
    resume("parts", "trainer.max_steps=12")
    assert_same(checkpoint(Path("whole"))["state_dict"], checkpoint(Path("parts"))["state_dict"])
    assert rows(Path("whole")) == rows(Path("parts"))


def test_last_is_the_latest_and_best_the_best(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a validation loss that only gets worse, `best` stays and `last` moves on (D8)."""
    losses = iter([1.0, 2.0, 3.0])
    original = SaveCheckpoints.on_validation_end

    def worsening(self: SaveCheckpoints, trainer: Any, module: Any) -> None:
        if trainer.state.fn == "fit":
            object.__setattr__(module.val_score, "loss", next(losses))
        original(self, trainer, module)

    monkeypatch.setattr(SaveCheckpoints, "on_validation_end", worsening)
    _, folder = run("worse", "trainer.max_steps=12")
    assert checkpoint(folder, "best.ckpt")["global_step"] == 4
    assert checkpoint(folder, "last.ckpt")["global_step"] == 12
