"""Score a checkpoint, or see whether it gives one answer whichever way it is computed.

    python scripts/evaluate.py ckpt=…            loss, perplexity and bits per byte; of a task accuracy
                                                                                        configs/evaluate.yaml
    python scripts/evaluate.py parity ckpt=…     prefill, decoding, splits, batches     configs/parity.yaml

Each shows its options with `--help`.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track

from data import DataConfig, DataModule
from data.tasks import TaskDataModule
from kda_lm.checkpoint import Checkpoint, open_checkpoint
from kda_lm.cli import one_line_errors, print_table, quiet_libraries, required_path
from kda_lm.config import plain, read_config
from kda_lm.device import Precision, arithmetic, resolve_device
from kda_lm.errors import UserError
from kda_lm.evaluation import EvaluationConfig, Score, TextConfig, evaluate
from kda_lm.parity import Parity, ParityConfig, compare, places
from kda_lm.runs import CONFIGS, absolute_paths, from_launch_dir, write_json
from kda_lm.sources import read_task
from kda_lm.task_evaluation import TaskScore, score_tests


def opened(config: TextConfig) -> tuple[Path, Checkpoint]:
    path = required_path("ckpt", config.ckpt)
    tokenizer = None if config.tokenizer is None else from_launch_dir(config.tokenizer)
    return path, open_checkpoint(path, resolve_device(config.accelerator), tokenizer)


def open_text(
    config: TextConfig, checkpoint: Checkpoint, seq_len: int | None, batch_size: int, stride: int | None = None
) -> DataModule:
    """The checkpoint's validation text or the one that is given, in batches of windows."""
    tokenizer = checkpoint.text_tokenizer()
    data_options = {**checkpoint.data, "val_batch_size": batch_size, "max_val_windows": None, "val_stride": stride}
    if config.text is not None:
        text = absolute_paths({"files": config.text})["files"]
        data_options.update(corpus="text", files=text, val_files=text, text_key=config.text_key)
    if seq_len is not None:
        data_options["seq_len"] = seq_len
    data_options["cache_dir"] = str(from_launch_dir(config.cache_dir))
    data = DataModule(
        read_config(DataConfig, data_options, "data"),
        batch_size=1,
        micro_batch_size=None,
        max_steps=1,
        seed=0,
        tokenizer=tokenizer,
    )
    if config.text is None and config.tokenizer is None and data.val.manifest.key != checkpoint.text[1]:
        raise UserError("the text that this checkpoint was trained on has changed since; say what to score with text=…")
    return data


def run(options: DictConfig) -> Score | dict[str, TaskScore]:
    """Evaluate as configs/evaluate.yaml says, print the table, and return the score; of a task those of its tests."""
    config = read_config(EvaluationConfig, plain(options), "evaluate")
    device = resolve_device(config.accelerator)
    path, checkpoint = opened(config)
    if checkpoint.tokenizer is None and "task" in checkpoint.data:
        return run_tests(config, path, checkpoint)
    if config.test or config.samples:
        raise UserError("test= and samples= are for what was trained on a task; this checkpoint was trained on text")
    data = open_text(config, checkpoint, config.seq_len, config.batch_size, config.stride)
    with arithmetic(config.precision, device):
        console = Console(stderr=True)
        batches = track(
            data.val_dataloader(), "scoring", console=console, transient=True, disable=not console.is_terminal
        )
        score = evaluate(checkpoint.model, batches, device, data.val_bytes)

    rows = {
        "checkpoint": f"{path}, step {checkpoint.step:,}",
        "text": "validation text of the training run" if config.text is None else str(config.text),
        "targets": f"{score.targets:,} tokens, {data.config.stride} of each window of {data.config.seq_len}",
        "loss": f"{score.loss:.4f} nats a token",
        "perplexity": f"{score.perplexity:.2f}",
        "bits per byte": "unknown" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}",
    }
    print_table("evaluation", rows)
    if config.json is not None:
        write_json(from_launch_dir(config.json), {"checkpoint": str(path), "step": checkpoint.step, **asdict(score)})
    return score


def run_tests(config: EvaluationConfig, path: Path, checkpoint: Checkpoint) -> dict[str, TaskScore]:
    """Test a task's checkpoint: on what it was trained on, on its run's tests and on those that are given."""
    for option in ("text", "seq_len", "stride"):
        if getattr(config, option) is not None:
            task = checkpoint.data["task"]
            raise UserError(
                f"{option}= is for text; this checkpoint was trained on the task {task}, which test= varies"
            )
    options = {**checkpoint.data, "val_batch_size": config.batch_size}
    options["test"] = [*(options.get("test") or []), *config.test]
    if config.samples is not None:
        options["test_samples"] = config.samples
    data = TaskDataModule(read_task(options), batch_size=1, micro_batch_size=None, max_steps=1, seed=0)
    device = resolve_device(config.accelerator)
    with arithmetic(config.precision, device):
        scores = score_tests(checkpoint.model, data, device)
    print_table("evaluation", {"checkpoint": f"{path}, step {checkpoint.step:,}", "task": checkpoint.data["task"]})
    for name, score in scores.items():
        print_table(f"test, {name}", score.rows("test"))
    if config.json is not None:
        found = {name: asdict(score) for name, score in scores.items()}
        write_json(from_launch_dir(config.json), {"checkpoint": str(path), "step": checkpoint.step, "test": found})
    return scores


class BrokenParity(UserError):
    """The model's answers differ: not a slip of the user's."""

    exit_status = 1


def run_parity(options: DictConfig) -> list[Parity]:
    """Compare as configs/parity.yaml says, print what was found, and return it.

    Raises BrokenParity: a difference beyond its bound, after everything was printed.
    """
    config = read_config(ParityConfig, plain(options), "parity")
    device = resolve_device(config.accelerator)
    path, checkpoint = opened(config)
    data = open_text(config, checkpoint, config.length, config.batch_size)
    batch = next(iter(data.val_dataloader()))
    tokens = batch["tokens"].view(-1, config.length).to(device)
    if len(tokens) < config.batch_size or (batch["targets"] == -100).any():
        wanted = f"{config.batch_size} windows of {config.length} tokens"
        raise UserError(f"the text is shorter than {wanted}: lower batch_size= or length=, or give another text=")
    both: list[Precision] = ["32-true", "bf16-mixed"]
    chosen = [config.precision] if config.precision != "auto" else both[: 1 if device.type == "cpu" else 2]
    splits = places(config.length, config.splits)
    found = [compare(checkpoint.model, tokens, splits, config.steps, precision) for precision in chosen]
    texts = f"{len(tokens)} rows of {config.length} tokens, split at {', '.join(map(str, splits))}"
    print_table("parity", {"checkpoint": f"{path}, step {checkpoint.step:,}", "texts": texts})
    for parity in found:
        rows = {}
        for way in parity.differences:
            verdict = "BEYOND its bound: " if way in parity.broken else ""
            rows[way.way] = f"{verdict}{way.rms:.1e}, at worst {way.error:.1e}, a logit by {way.absolute:.1e}"
            rows[way.way] += f" ({way.where})" if way.error else ""
        bound = f"{parity.bound:.1e} for the worst position"
        if parity.distance is not None:
            bound = f"{2 * parity.distance:.1e} = twice the distance of bf16 from float32, at worst {parity.bound:.1e}"
        print_table(f"{parity.precision}: errors of positions, root mean square", {**rows, "bound": bound})
    if config.json is not None:
        about = {"checkpoint": str(path), "step": checkpoint.step, "rows": len(tokens), "splits": splits}
        write_json(from_launch_dir(config.json), {**about, "parity": [_numbers(_values(parity)) for parity in found]})
    broken = [
        f"{parity.precision}, {way.way}: {way.rms:.1e}, at worst {way.error:.1e}"
        for parity in found
        for way in parity.broken
    ]
    if broken:
        raise BrokenParity(f"not one answer whichever way it is computed: {'; '.join(broken)}")
    return found


def _values(parity: Parity) -> dict[str, Any]:
    return {**asdict(parity), "differences": [{**asdict(way), "rms": way.rms} for way in parity.differences]}


def _numbers(value: Any) -> Any:
    """None for what is no number, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


COMMANDS: dict[str, Callable[[DictConfig], object]] = {"evaluate": run, "parity": run_parity}  # by their configurations


def main() -> None:
    command = "evaluate"
    with one_line_errors():
        if len(sys.argv) > 1 and "=" not in sys.argv[1] and not sys.argv[1].startswith("-"):
            command = sys.argv.pop(1)
            if command not in COMMANDS:
                raise UserError(f"unknown command '{command}'; commands are {', '.join(COMMANDS)}")

    def start(options: DictConfig) -> None:
        quiet_libraries()
        with one_line_errors():
            COMMANDS[command](options)

    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=command)(start)()


if __name__ == "__main__":
    main()
