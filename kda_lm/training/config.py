"""Options of the trainer: how long, how much at once, on what, and how often to look."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class TrainerConfig:
    """All counts are optimizer steps; see configs/trainer/default.yaml for the meaning of each."""

    max_steps: int
    batch_size: int
    micro_batch_size: int | None = None
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1
    log_every: int = 10
    val_every: int = 100
    save_every: int = 100
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "devices", "log_every", "val_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes at least 1")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay is {self.ema_decay}; it takes more than 0 and less than 1, or null for none")
        if self.accelerator == "gpu" and not torch.cuda.is_available():
            raise ValueError("accelerator is gpu, but no CUDA GPU is available; it takes auto or cpu here")

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        if self.accelerator == "auto":
            return "gpu" if torch.cuda.is_available() else "cpu"
        return self.accelerator

    @property
    def numerics(self) -> Literal["32-true", "bf16-mixed"]:
        """`auto` is bf16 autocast with float32 weights on a GPU, float32 on a CPU."""
        if self.precision == "auto":
            return "bf16-mixed" if self.device == "gpu" else "32-true"
        return self.precision
