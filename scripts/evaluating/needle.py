"""`python scripts/evaluate.py needle ckpt=…`: a grid of needles in haystacks."""

from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track

from data.tasks.needle import sentences_of
from kda_lm.cli import print_table
from kda_lm.config import plain, read_config
from kda_lm.device import arithmetic, resolve_device
from kda_lm.evaluation.questions import Cell, NeedleConfig, find_needles
from kda_lm.runs import from_launch_dir, write_json
from scripts.evaluating.common import check_figure, documents, opened, save_figure


def run_needle(options: DictConfig) -> list[Cell]:
    """Search as configs/needle.yaml says, print the grid, draw the heat map, and return the cells."""
    config = read_config(NeedleConfig, plain(options), "needle")
    check_figure(config.plot)
    device = resolve_device(config.accelerator)
    path, checkpoint = opened(config)
    tokenizer = checkpoint.text_tokenizer()
    sentences = []
    if set(config.kinds) != {"repeated"}:
        sentences = [sentence for text in documents(config, checkpoint) for sentence in sentences_of(text)]
    console = Console(stderr=True)
    count = len(config.kinds) * len(config.lengths) * len(config.depths)
    with arithmetic(config.precision, device):
        cells = find_needles(
            checkpoint.model,
            tokenizer,
            config,
            sentences,
            lambda found: track(
                found, "searching", total=count, console=console, transient=True, disable=not console.is_terminal
            ),
        )
    print_table("needles", {"checkpoint": f"{path}, step {checkpoint.step:,}", "a cell": f"{config.samples} samples"})
    for kind in config.kinds:
        rows = {}
        for length in config.lengths:
            parts = [f"{c.depth:g}: {100 * c.accuracy:.0f}" for c in cells if (c.kind, c.length) == (kind, length)]
            rows[f"{length:,} tokens"] = ", ".join(parts)
        print_table(f"{kind}: right, %, by depth", rows)
    if config.plot is not None:
        draw(cells, config, from_launch_dir(config.plot))
    if config.json is not None:
        about = {"checkpoint": str(path), "step": checkpoint.step, "samples": config.samples}
        write_json(from_launch_dir(config.json), {**about, "cells": [asdict(cell) for cell in cells]})
    return cells


def draw(cells: list[Cell], config: NeedleConfig, path: Path) -> None:
    """A heat map for each kind, depth over length."""
    from matplotlib.figure import Figure  # here: it takes a second to import

    figure = Figure(figsize=(1.5 + 3 * len(config.kinds), 3.2), layout="constrained")
    for i, kind in enumerate(config.kinds):
        axes = figure.add_subplot(1, len(config.kinds), i + 1)
        found = {(c.depth, c.length): c.accuracy for c in cells if c.kind == kind}
        grid = [[100 * found[depth, length] for length in config.lengths] for depth in config.depths]
        image = axes.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(config.lengths)), [f"{length:,}" for length in config.lengths])
        axes.set_yticks(range(len(config.depths)), [f"{depth:g}" for depth in config.depths])
        axes.set_xlabel("tokens")
        axes.set_ylabel("depth")
        axes.set_title(kind, fontsize="medium")
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                color = "white" if value < 60 else "black"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize="small", color=color)
    figure.colorbar(image, ax=figure.axes, label="right, %")
    save_figure(figure, path)
