"""Options of a run and of its trainer: name, samples, how long, how much at once, on what, how often to look."""

import re
from dataclasses import dataclass

from kda_lm.device import Accelerator, Precision, resolve_device
from kda_lm.errors import UserError
from kda_lm.generation import SamplingConfig


@dataclass(frozen=True)
class RunConfig:
    """The options of configs/train.yaml that belong to no group."""

    name: str | None = None  # null: from the pattern
    seed: int = 0
    run_dir: str | None = None
    resume: str | None = None
    wandb: bool = True
    wandb_project: str = "kda_lm"

    def __post_init__(self) -> None:
        if self.name is not None and not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name is {self.name!r}; it takes letters, digits, and . _ - (it names the run folder)")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it takes 0 to 4294967295")


@dataclass(frozen=True)
class SamplesConfig(SamplingConfig):
    """What is sampled at every validation and at the end."""

    prompts: tuple[str, ...] = ()


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
    compile: bool = False
    cuda_graph: bool | None = None
    checkpoint_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "devices", "log_every", "val_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes at least 1")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay is {self.ema_decay}; it takes more than 0 and less than 1, or null for none")
        resolve_device(self.accelerator)

    def uses_cuda_graph(self, isolate_documents: bool) -> bool:
        """Whether steps are replayed from a CUDA graph.

        Raises UserError: asked for where it cannot be.
        """
        obstacles = {
            "a GPU": resolve_device(self.accelerator).type != "cuda",
            "trainer.devices=1": self.devices != 1,
            "data.isolate_documents=false": isolate_documents,
        }
        missing = [name for name, missed in obstacles.items() if missed]
        if self.cuda_graph and missing:
            raise UserError(
                f"trainer.cuda_graph is true, but needs {' and '.join(missing)}; it takes null or false here"
            )
        return self.cuda_graph is not False and not missing
