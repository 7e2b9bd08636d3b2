"""Options of the trainer: how long, how much at once, on what, and how often to look."""

from dataclasses import dataclass

from kda_lm.device import Accelerator, Precision, resolve_device


@dataclass(frozen=True)
class TrainerConfig:
    """All counts are optimizer steps; see configs/trainer/default.yaml for the meaning of each."""

    max_steps: int
    batch_size: int
    micro_batch_size: int | None = None
    precision: Precision = "auto"
    accelerator: Accelerator = "auto"
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
        resolve_device(self.accelerator)
