"""What the commands of scripts/evaluate.py begin with: a checkpoint, and a text in windows."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader

from data import Batch, DataConfig, DataModule, Tokenizer
from kda_lm.checkpoint import Checkpoint, open_checkpoint
from kda_lm.cli import required_path
from kda_lm.config import read_config
from kda_lm.device import resolve_device
from kda_lm.errors import UserError
from kda_lm.evaluation.text import TextConfig
from kda_lm.runs import absolute_paths, from_launch_dir

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = (".png", ".svg", ".pdf")
MOST_TOKENS = 1 << 20


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
    if stride is not None and stride > data_options["seq_len"]:
        raise UserError(f"stride is {stride}; it takes at most seq_len = {data_options['seq_len']}")
    data = _text_of(data_options, config, tokenizer)
    if config.text is None and config.tokenizer is None and data.val.manifest.key != checkpoint.text[1]:
        raise UserError("the text that this checkpoint was trained on has changed since; say what to score with text=…")
    return data


def open_training(config: TextConfig, checkpoint: Checkpoint) -> DataModule:
    """The data of the checkpoint's run, as it was trained on.

    Raises UserError or DataError: the text is no longer there, or has changed.
    """
    data = _text_of(checkpoint.data, config, checkpoint.text_tokenizer())
    if config.tokenizer is None and data.train.manifest.key != checkpoint.text[0]:
        raise UserError("the text that this checkpoint was trained on has changed since; rare=null does without it")
    return data


def _text_of(options: Mapping[str, Any], config: TextConfig, tokenizer: Tokenizer) -> DataModule:
    """What the data options describe, in the ids of `tokenizer`, with its files where the user keeps caches now."""
    options = {**options, "cache_dir": str(from_launch_dir(config.cache_dir))}
    source = read_config(DataConfig, options, "data")
    return DataModule(source, batch_size=1, micro_batch_size=None, max_steps=1, seed=0, tokenizer=tokenizer)


def progress(batches: "DataLoader[Batch]") -> Iterable[Batch]:
    """The batches, with a progress bar on a terminal."""
    console = Console(stderr=True)
    return track(batches, "scoring", console=console, transient=True, disable=not console.is_terminal)


def documents(config: TextConfig, checkpoint: Checkpoint) -> list[str]:
    """The first of the checkpoint's validation text, or of the one that is given, MOST_TOKENS long together."""
    data = open_text(config, checkpoint, None, 1)
    tokens = data.val.tokens[:MOST_TOKENS]
    parts = np.split(tokens, np.flatnonzero(tokens == data.val.manifest.eot_id))
    tokenizer = checkpoint.text_tokenizer()
    return [tokenizer.decode(ids[1:]) for ids in parts if len(ids) > 1]


def check_figure(plot: str | None) -> None:
    """Raises UserError: no kind of figure that can be drawn. Better now than after the work."""
    if plot is not None and Path(plot).suffix not in FIGURES:
        raise UserError(f"plot is {plot!r}; it takes a file that ends in {', '.join(FIGURES)}")


def save_figure(figure: "Figure", path: Path) -> None:
    """Raises UserError: the file can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
