"""A row of `benchmark.py train`, measured in this process: some steps of train.py's own training, and a clock."""

import statistics
import time
from typing import Any, cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data import Batch, DataConfig, DataModule
from data.packing import Shape
from kda_lm.cli import quiet_libraries
from kda_lm.config import read_config
from kda_lm.device import resolve_precision
from kda_lm.errors import UserError
from kda_lm.model import LM
from kda_lm.runs import absolute_paths
from kda_lm.training.config import TrainerConfig
from kda_lm.training.module import TrainingModule
from kda_lm.training.optim import OptimConfig
from scripts.benchmarking import measure, peer_lm, tuning
from scripts.benchmarking.models import build_lm
from scripts.benchmarking.run import Result
from scripts.benchmarking.train import Trial


class RandomSteps(Dataset[list[Batch]]):
    """Optimizer steps of uniform ids in DataModule's form, each a list of micro-batches; a target is the next id."""

    def __init__(self, shape: Shape, vocab_size: int, steps: int, seed: int) -> None:
        self._shape, self._vocab_size, self._steps, self._seed = shape, vocab_size, steps, seed

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> list[Batch]:
        random = torch.Generator().manual_seed(self._seed + step)
        rows = torch.randint(self._vocab_size, (self._shape.batch_size, self._shape.seq_len + 1), generator=random)
        return [
            {"tokens": part[:, :-1].contiguous(), "targets": part[:, 1:].contiguous()}
            for part in rows.split(self._shape.micro)
        ]


class Clock(Callback):
    """Marks the end of each step from the `warmup`-th on, and the wall time of the first."""

    def __init__(self, warmup: int, device: torch.device, recorded: bool) -> None:
        self.warmup, self.gpu, self.recorded = warmup, measure.on_gpu(device), recorded
        self.first_step_s = 0.0
        self.losses: list[Tensor] = []
        self.activation_mib: float | None = None
        self._marks: list[Any] = []  # CUDA events; on a CPU ms
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, *args: Any
    ) -> None:
        if not self.losses:
            if self.gpu:
                torch.cuda.synchronize()
            self.first_step_s = time.perf_counter() - self._began
        self.losses.append(outputs["train/loss"])
        self.activation_mib = outputs.get("train/activation_mib")
        if len(self.losses) == self.warmup and self.gpu and not self.recorded:  # replays allocate nothing
            torch.cuda.reset_peak_memory_stats()  # a tuner's memory is not training's
        if len(self.losses) >= self.warmup:
            self._marks.append(self._mark())

    def _mark(self) -> Any:
        if not self.gpu:
            return 1e3 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step_ms(self) -> list[float]:
        """Of every measured step, in order; waits for the GPU."""
        if self.gpu:
            torch.cuda.synchronize()
        pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
        return [start.elapsed_time(end) if self.gpu else end - start for start, end in pairs]


def load(trial: Trial, device: torch.device) -> dict[str, Any]:
    """What Trainer.fit takes the data from.

    Raises DataError, or UserError where real data have more ids than the model.
    """
    options, vocab_size = trial.options, trial.options["model"]["vocab_size"]
    trainer = read_config(TrainerConfig, options["trainer"], "trainer")
    if trial.data == "random":
        shape = Shape(options["data"]["seq_len"], trainer.batch_size, trainer.micro_batch_size)
        shape.check()
        steps = RandomSteps(shape, vocab_size, trainer.max_steps, options["seed"])
        return {"train_dataloaders": DataLoader(steps, batch_size=None, pin_memory=measure.on_gpu(device))}
    data = DataModule(
        read_config(DataConfig, absolute_paths(options["data"]), "data"),
        batch_size=trainer.batch_size,
        micro_batch_size=trainer.micro_batch_size,
        max_steps=trainer.max_steps,
        seed=options["seed"],
    ).prepare()
    if data.vocab_size > vocab_size:
        raise UserError(f"--vocab: got {vocab_size}, but the data have {data.vocab_size} ids")
    return {"datamodule": data}


def build(trial: Trial, device: torch.device) -> torch.nn.Module:
    """The model, as train.py readies it; or the peer's of the same sizes."""
    trainer = read_config(TrainerConfig, trial.options["trainer"], "trainer")
    if trial.contender == "fla":
        if trial.part:
            tuning.take_part(*trial.part)
        elif trial.peer_ms:
            tuning.hasten(trial.peer_ms)
        seq_len = trial.options["data"]["seq_len"]
        switches = {"compiled": trial.peer_compile, "checkpointed": trainer.checkpoint_layers}
        return peer_lm.build(trial.options["model"], trial.head_dim, seq_len, trial.peer_loss, **switches)
    model = build_lm(trial.options)
    model.backends(device)  # refuses what is not to be had there
    model.checkpoint_layers = trainer.checkpoint_layers
    if trainer.compile:
        model.compile_blocks()
    return model


def measure_row(trial: Trial) -> Result:
    """Train, and say what it took; see the columns in train.py.

    Raises whatever building and training do.
    """
    quiet_libraries()
    device = torch.device(trial.device)
    config = read_config(TrainerConfig, trial.options["trainer"], "trainer")
    lightning.seed_everything(trial.options["seed"], verbose=False)
    source = load(trial, device)
    torch.zeros(1, device=device)  # the GPU is up before the clock starts
    recorded = config.uses_cuda_graph(trial.options["data"]["isolate_documents"])
    clock = Clock(trial.warmup, device, recorded)
    model = build(trial, device)
    module = TrainingModule(
        cast(LM, model),
        read_config(OptimConfig, trial.options["optim"], "optim"),
        config.max_steps,
        metadata={},
        cuda_graph=recorded,
    )
    trainer = lightning.Trainer(
        accelerator="gpu" if measure.on_gpu(device) else "cpu",
        devices=[device.index or 0] if measure.on_gpu(device) else 1,
        precision=resolve_precision(config.precision, device),
        max_epochs=1,
        max_steps=config.max_steps,
        limit_val_batches=0,
        logger=False,
        callbacks=[clock],
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, **source)
    times = clock.step_ms()
    step_ms = statistics.median(times)
    result: Result = {
        "step_ms": step_ms,
        "steps_ms": times,
        "tokens_per_second": 1e3 * config.batch_size * trial.options["data"]["seq_len"] / step_ms,
        "first_step_s": clock.first_step_s,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss": [float(clock.losses[0]), float(clock.losses[-1])],  # nats a token
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
    }
    if measure.on_gpu(device):
        result |= {"peak_mib": torch.cuda.max_memory_allocated() / 2**20, "activation_mib": clock.activation_mib}
    return result
