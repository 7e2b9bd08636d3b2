"""Stopping a run in good order: Ctrl-C or SIGTERM, and the run saves after the step it is in, then ends."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from kda_lm.errors import UserError


class Stopped(UserError):
    """The run ended early because a signal asked for it; everything up to its last step is saved."""

    def __init__(self, signum: int, step: int, run_dir: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}; go on with resume={run_dir}")
        self.exit_status = 128 + signum


class StopOnSignal(Callback):
    """Notes the first SIGINT or SIGTERM; a second one acts at once, as if nobody listened."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def requested(self, trainer: lightning.Trainer) -> bool:
        """Whether any process of the run was asked to stop: all stop after the same step."""
        asked = self.signum is not None
        if trainer.world_size > 1:
            asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        return asked

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # Here and not earlier: Lightning has put its own handlers in place by now.
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._note) for signum in (signal.SIGINT, signal.SIGTERM)}

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._restore()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self._restore()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
