"""What a run shows while it trains: throughput and loss to the loggers, a progress bar, samples of text."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from data import Tokenizer
from kda_lm.generation import generate
from kda_lm.training.config import SamplesConfig
from kda_lm.training.module import TrainingModule


def log_metrics(trainer: lightning.Trainer, metrics: dict[str, float]) -> None:
    """To every logger, at the number of finished optimizer steps."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)


class Monitor(Callback):
    """Logs, every `log_every` steps and at the last, loss, gradient norm, learning rate, tokens/s and MFU; and every
    validation.

    The loss is the mean over the steps since the log before, the gradient norm and the rate are the last step's.
    Tokens/s count those steps, the waiting for their data and the saving, not validation and samples; only where one
    of these ends does the host wait for the device. MFU = 3 · forward FLOPs a token (see LM.flops_per_token) · tokens/s
    / peak, the peak being `peak_flops`.
    """

    def __init__(self, log_every: int, tokens_per_step: int, seq_len: int) -> None:
        self.log_every = log_every
        self.tokens_per_step = tokens_per_step
        self.seq_len = seq_len
        self.loss: float | None = None  # as last logged
        self.tokens_per_second: float | None = None
        self._losses: list[Tensor | float] = []  # of the steps since the last log
        self._window, self._total = _Clock(), _Clock()
        self._since = 0.0
        self._peak = 0.0
        self._flops_per_token = 0

    @property
    def average(self) -> float | None:
        """Tokens/s over all steps of this process; None before the first."""
        return self._total.speed(self.tokens_per_step) if self._total.steps else None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._peak = peak_flops(pl_module.device, trainer.precision == "bf16-mixed") * trainer.world_size
        self._flops_per_token = 3 * pl_module.model.flops_per_token(self.seq_len)
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, *args: Any
    ) -> None:
        self._losses.append(outputs["train/loss"])
        step = trainer.global_step
        due = step % self.log_every == 0 or step == trainer.max_steps
        if due:
            self.loss = sum(float(loss) for loss in self._losses) / len(self._losses)  # waits for the device
        self._count(steps=1)
        if not due:
            return
        self.tokens_per_second = self._window.speed(self.tokens_per_step)
        metrics = {
            **outputs,
            "train/grad_norm": float(outputs["train/grad_norm"]),
            "train/loss": self.loss,
            "train/tokens": step * self.tokens_per_step,
            "train/tokens_per_second": self.tokens_per_second,
            "train/mfu": self.tokens_per_second * self._flops_per_token / self._peak,
        }
        self._losses, self._window = [], _Clock()
        log_metrics(trainer, metrics)

    def _count(self, steps: int) -> None:
        """The time since the last call, with the steps that ended in it."""
        now = time.perf_counter()
        for clock in (self._window, self._total):
            clock.steps += steps
            clock.seconds += now - self._since
        self._since = now

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if trainer.state.fn == "fit":
            pl_module.settle()
            self._count(steps=0)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule) and pl_module.val_score is not None
        if trainer.state.fn == "fit":
            log_metrics(trainer, pl_module.val_score.metrics("val"))
        self._since = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [float(loss) for loss in self._losses]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses = list(state_dict["losses"])


@dataclass
class _Clock:
    """Steps and the seconds they took."""

    steps: int = 0
    seconds: float = 0.0

    def speed(self, tokens_per_step: int) -> float:
        return self.steps * tokens_per_step / self.seconds


class ProgressLine(Callback):
    """A progress bar with loss and tokens/s on a terminal; elsewhere a line at most every `seconds`."""

    def __init__(self, monitor: Monitor, seconds: float = 10.0) -> None:
        self.monitor = monitor
        self.seconds = seconds
        self._bar: Progress | None = None
        self._last_line = 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        console = Console()
        if not trainer.is_global_zero or not console.is_terminal:
            return
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console)
        self._bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, status="")
        self._bar.start()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, *args: Any
    ) -> None:
        if not trainer.is_global_zero:
            return
        assert isinstance(pl_module, TrainingModule)
        step, speed, score = trainer.global_step, self.monitor.tokens_per_second, pl_module.val_score
        parts = []
        if self.monitor.loss is not None:
            parts.append(f"loss {self.monitor.loss:.3f}")
        if score is not None:
            parts.append(f"val {score.brief}")
        if speed is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, status=" · ".join(parts))
        elif time.monotonic() - self._last_line >= self.seconds or step == trainer.max_steps:
            self._last_line = time.monotonic()
            print(" · ".join([f"step {step}/{trainer.max_steps}", *parts]), flush=True)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._stop()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Samples(Callback):
    """At every validation, continues the prompts and keeps the texts in `folder`/step_N.txt and in wandb."""

    def __init__(self, tokenizer: Tokenizer, config: SamplesConfig, folder: Path) -> None:
        self.tokenizer, self.config, self.folder = tokenizer, config, folder

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # Not on_validation_end: by then weight averaging has put the plain weights back.
        if trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, TrainingModule)
        texts = self._draw(pl_module)
        self._write(f"step_{trainer.global_step:06d}.txt", texts)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_text("samples", ["step", "text"], [[str(trainer.global_step), text] for text in texts])

    def show(self, module: TrainingModule) -> None:
        """Print the texts of the finished model and keep them in `folder`/final.txt."""
        texts = self._draw(module)
        self._write("final.txt", texts)
        for text in texts:
            print(f"--- sample ---\n{text}\n")

    def _draw(self, module: TrainingModule) -> list[str]:
        training = module.training
        module.eval()
        stop = self.tokenizer.eot_id
        texts = []
        for prompt in self.config.prompts:
            ids = self.tokenizer.begin(prompt)
            with module.trainer.precision_plugin.forward_context():
                drawn = [int(token) for token in generate(module.model, ids, 1, self.config, stop_id=stop)]
            decoder = self.tokenizer.stream(ids)
            texts.append(prompt + "".join(decoder.push(token) for token in drawn if token != stop) + decoder.flush())
        module.train(training)
        return texts

    def _write(self, name: str, texts: list[str]) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / name).write_text("\n\n---\n\n".join(texts) + "\n", encoding="utf-8")


# Dense bf16 operations a second by the driver's name; NVIDIA's data sheet prints twice as many, with sparsity.
# Lightning's table has the H200 under names that no driver gives, and with the sparse figure.
DENSE_BF16 = {"NVIDIA H200": 989.4e12}


def peak_flops(device: torch.device, bf16: bool) -> float:
    """Floating-point operations a second that `device` can do, without sparsity: the data sheet's, from DENSE_BF16 or
    Lightning's table, else a large matrix product's.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if bf16 and name in DENSE_BF16:
            return DENSE_BF16[name]
        try:
            known = get_available_flops(device, dtype)
        except (ValueError, KeyError):  # a card that Lightning's table lacks
            known = None
        if known is not None:
            return float(known)
    size = 4096 if device.type == "cuda" else 512
    a = torch.randn(size, size, device=device).to(dtype)
    seconds = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # reading an element waits for the product
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * size**3 / seconds
