"""`python scripts/evaluate.py ckpt=…`: loss, perplexity and bits per byte; of a task accuracy."""

from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig

from data.tasks import TaskDataModule
from kda_lm.checkpoint import Checkpoint
from kda_lm.cli import print_table
from kda_lm.config import plain, read_config
from kda_lm.device import arithmetic, resolve_device
from kda_lm.errors import UserError
from kda_lm.evaluation.tasks import TaskScore, score_tests
from kda_lm.evaluation.text import EvaluationConfig, Score, evaluate
from kda_lm.runs import from_launch_dir, write_json
from kda_lm.sources import read_task
from scripts.evaluating.common import open_text, opened, progress


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
        score = evaluate(checkpoint.model, progress(data.val_dataloader()), device, data.val_bytes)

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
