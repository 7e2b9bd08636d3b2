"""Checkpoints: written whole or not at all, `last.ckpt` is the latest, `best.ckpt` the lowest validation loss.

A checkpoint holds plain values and tensors only and loads with `weights_only=True`. Its key "kda_lm" has all that
sampling and evaluation need beside the weights: the model's options, the tokenizer, the data options.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from kda_lm.errors import UserError
from kda_lm.model import LM


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, flushes to disk, then renames: a kill leaves the previous file as it was."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise UserError(f"cannot write the checkpoint {path}: {error.strerror or error}") from None
        finally:
            temporary.unlink(missing_ok=True)


class SaveCheckpoints(Checkpoint):
    """`last.ckpt` every `every` steps and at the end of the run; `best.ckpt` whenever the validation loss improves.

    Where a save and a validation fall on one step, the save waits for the validation, so that a resumed run does
    neither twice.
    """

    def __init__(self, folder: Path, every: int, val_every: int, max_steps: int) -> None:
        self.folder = folder
        self.every, self.val_every, self.max_steps = every, val_every, max_steps
        self.best_loss = float("inf")

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any
    ) -> None:
        if self._due(trainer.global_step) and not self._validates(trainer.global_step):
            trainer.save_checkpoint(self.folder / "last.ckpt")

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if not trainer.state.fn == "fit" or trainer.sanity_checking:
            return
        score = pl_module.val_score
        if score.loss < self.best_loss:  # type: ignore[union-attr]
            self.best_loss = score.loss  # type: ignore[union-attr, assignment]
            trainer.save_checkpoint(self.folder / "best.ckpt")
        if self._due(trainer.global_step):
            trainer.save_checkpoint(self.folder / "last.ckpt")

    def _due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.max_steps

    def _validates(self, step: int) -> bool:
        return step % self.val_every == 0

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss = state_dict["best_loss"]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint's contents, on the CPU.

    Raises UserError: no such file, not a whole checkpoint, not one of this project's.
    """
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist" + _suggestion(path))
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, OSError):
        raise UserError(f"checkpoint {path} is damaged or not a checkpoint: it cannot be read") from None
    if not isinstance(checkpoint, dict) or "kda_lm" not in checkpoint:
        raise UserError(f"checkpoint {path} was not written by this project's train.py")
    return checkpoint


def load_model(checkpoint: dict[str, Any]) -> LM:
    """The model of a checkpoint, in evaluation mode; with weight averaging, the averaged weights."""
    model = LM.from_hyperparameters(checkpoint["kda_lm"])
    prefix = "model."
    model.load_state_dict({name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items()})
    return model.eval()


def _suggestion(path: Path) -> str:
    """Checkpoints where the user may have meant to point."""
    folder = path if path.is_dir() else path.parent
    found = sorted(folder.glob("**/*.ckpt"))[:3] if folder.is_dir() else []
    return f"; there is {', '.join(map(str, found))}" if found else ""
