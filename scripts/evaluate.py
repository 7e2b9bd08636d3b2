"""Score a checkpoint: loss, perplexity and bits per byte. `--help` shows the options (configs/evaluate.yaml)."""

from dataclasses import asdict

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track

from data import DataConfig, DataModule
from kda_lm.checkpoint import open_checkpoint
from kda_lm.cli import one_line_errors, print_table, quiet_libraries, required_path
from kda_lm.config import plain, read_config
from kda_lm.device import arithmetic, resolve_device
from kda_lm.errors import UserError
from kda_lm.evaluation import EvaluationConfig, Score, evaluate
from kda_lm.runs import CONFIGS, absolute_paths, from_launch_dir, write_json


def run(options: DictConfig) -> Score:
    """Evaluate as configs/evaluate.yaml says, print the table, and return the score."""
    config = read_config(EvaluationConfig, plain(options), "evaluate")
    device = resolve_device(config.accelerator)
    path = required_path("ckpt", config.ckpt)
    tokenizer = None if config.tokenizer is None else from_launch_dir(config.tokenizer)
    checkpoint = open_checkpoint(path, device, tokenizer)

    data_options = {**checkpoint.data, "val_batch_size": config.batch_size, "max_val_windows": None}
    if config.text is not None:
        text = absolute_paths({"files": config.text})["files"]
        data_options.update(corpus="text", files=text, val_files=text, text_key=config.text_key)
    if config.seq_len is not None:
        data_options["seq_len"] = config.seq_len
    data_options["cache_dir"] = str(from_launch_dir(config.cache_dir))
    data = DataModule(
        read_config(DataConfig, data_options, "data"),
        batch_size=1,
        micro_batch_size=None,
        max_steps=1,
        seed=0,
        tokenizer=checkpoint.tokenizer,
    )
    if config.text is None and config.tokenizer is None and data.val.manifest.key != checkpoint.text[1]:
        raise UserError("the text that this checkpoint was trained on has changed since; say what to score with text=…")
    with arithmetic(config.precision, device):
        console = Console(stderr=True)
        batches = track(
            data.val_dataloader(), "scoring", console=console, transient=True, disable=not console.is_terminal
        )
        score = evaluate(checkpoint.model, batches, device, data.val_bytes)

    rows = {
        "checkpoint": f"{path}, step {checkpoint.step:,}",
        "text": "validation text of the training run" if config.text is None else str(config.text),
        "targets": f"{score.targets:,} tokens in windows of {data.config.seq_len}",
        "loss": f"{score.loss:.4f} nats a token",
        "perplexity": f"{score.perplexity:.2f}",
        "bits per byte": "unknown" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}",
    }
    print_table("evaluation", rows)
    if config.json is not None:
        write_json(from_launch_dir(config.json), {"checkpoint": str(path), "step": checkpoint.step, **asdict(score)})
    return score


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="evaluate")
def main(options: DictConfig) -> None:
    quiet_libraries()
    with one_line_errors():
        run(options)


if __name__ == "__main__":
    main()
