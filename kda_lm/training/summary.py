"""What a run says of itself: the table before it starts, the samples and the table at its end, summary.json."""

import json
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data import BaseDataModule
from kda_lm.cli import print_table
from kda_lm.device import resolve_device, resolve_precision
from kda_lm.evaluation.tasks import TaskScore
from kda_lm.model import LM
from kda_lm.runs import write_json
from kda_lm.training.config import TrainerConfig
from kda_lm.training.module import TrainingModule


def describe(model: LM, config: TrainerConfig, data: BaseDataModule, folder: Path) -> None:
    """Print what is about to run."""
    seq_len = data.seq_len
    device = resolve_device(config.accelerator)
    precision = resolve_precision(config.precision, device)
    outside = model.num_parameters(embeddings=False)
    rows = {
        "layers": " ".join(model.layer_names()),
        "parameters": f"{model.num_parameters():,}, {outside:,} of them outside the embedding",
        "state a sequence": f"{model.state_bytes(seq_len):,} bytes at {seq_len} tokens, caches in bf16",
        "training cost": f"{3 * model.flops_per_token(seq_len) / 1e6:.1f} MFLOP a token",
        "data": data.contents,
        "run": f"{config.max_steps} steps of {config.batch_size} × {seq_len} tokens",
        "device": f"{device.type}, {precision}, kernels: {', '.join(model.backends(device))}",
        "run folder": str(folder),
    }
    print_table("kda_lm", rows)


@dataclass(frozen=True)
class Outcome:
    """What is left to say when a run is over."""

    module: TrainingModule
    device: torch.device
    data: BaseDataModule
    tests: dict[str, TaskScore]  # of a task, by name
    steps: int
    tokens: int
    tokens_per_second: float | None
    revision: str


def summarise(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Write summary.json, print the final table, and return the summary."""
    module, seq_len = outcome.module, outcome.data.seq_len
    model, score = module.model, module.val_score
    assert score is not None
    path = folder / "summary.json"
    speed = outcome.tokens_per_second
    if speed is None and path.is_file():  # a finished run that was resumed: nothing was trained just now
        with suppress(ValueError):
            speed = json.loads(path.read_text(encoding="utf-8")).get("tokens_per_second")
    cpu = platform.processor() or platform.machine()
    summary = {
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        **score.metrics("val"),
        "val/targets": score.targets,
        **({"test": {name: asdict(test) for name, test in outcome.tests.items()}} if outcome.tests else {}),
        "tokens_per_second": speed,
        "parameters": model.num_parameters(),
        "forward_flops_per_token": model.flops_per_token(seq_len),
        "state_bytes": model.state_bytes(seq_len),
        "seq_len": seq_len,
        "revision": outcome.revision,
        "device": torch.cuda.get_device_name() if outcome.device.type == "cuda" else cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    write_json(path, summary)
    rows = {
        "steps": f"{outcome.steps:,}",
        "training tokens": f"{outcome.tokens:,}",
        **score.rows("validation"),
        "speed": "unknown" if speed is None else f"{speed:,.0f} tokens/s",
        "run folder": str(folder),
    }
    print_table("result", rows)
    for name, test in outcome.tests.items():
        print_table(f"test, {name}", test.rows("test"))
    return summary
