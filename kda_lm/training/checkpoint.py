"""Writing checkpoints: whole or not at all; `last.ckpt` is the latest, `best.ckpt` has the lowest validation loss.

What is in one, and reading it: kda_lm/checkpoint.py.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from kda_lm.errors import UserError
from kda_lm.training.module import TrainingModule
from kda_lm.training.stop import StopOnSignal, Stopped


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
        except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a full disk
            reason = error.strerror if isinstance(error, OSError) else "the disk may be full"
            raise UserError(f"cannot write the checkpoint {path}: {reason}; the one before it is whole") from None
        finally:
            with suppress(OSError):
                temporary.unlink()


class SaveCheckpoints(Checkpoint):
    """`last.ckpt` every `every` steps, at the end of the run, and when the run is asked to stop; `best.ckpt` whenever
    the validation loss improves.

    The last step is validated, too, whatever `val_every` is. Where a save and a validation fall on one step, the save
    waits for the validation, so that a resumed run does neither twice.
    """

    def __init__(self, folder: Path, every: int, val_every: int, max_steps: int, stop: StopOnSignal) -> None:
        self.folder = folder
        self.every, self.val_every, self.max_steps = every, val_every, max_steps
        self.stop = stop
        self.best_loss = float("inf")

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step == self.max_steps:
            trainer.should_stop = True  # the one thing that has Lightning validate out of turn
        elif step % self.val_every:
            self._save_last(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        assert isinstance(pl_module, TrainingModule) and pl_module.val_score is not None
        if pl_module.val_score.loss < self.best_loss:
            self.best_loss = pl_module.val_score.loss
            trainer.save_checkpoint(self.folder / "best.ckpt")
        self._save_last(trainer)

    def _save_last(self, trainer: lightning.Trainer) -> None:
        """Save if it is time to, or if the run was asked to stop; and stop then."""
        step = trainer.global_step
        stopping = self.stop.requested(trainer)
        if stopping or step % self.every == 0 or step == self.max_steps:
            trainer.save_checkpoint(self.folder / "last.ckpt")
        if stopping and step < self.max_steps:
            raise Stopped(self.stop.signum or signal.SIGTERM, step, self.folder.parent)

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss = state_dict["best_loss"]
