"""`python scripts/evaluate.py memory ckpt=…`: the memory of each recurrent layer while it reads a text."""

from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig

from kda_lm.cli import print_table
from kda_lm.config import plain, read_config
from kda_lm.device import resolve_device
from kda_lm.errors import UserError
from kda_lm.evaluation.memory import LayerMemory, MemoryConfig, summary, watch_memory
from kda_lm.runs import from_launch_dir, write_json
from scripts.evaluating.common import check_figure, open_text, opened, save_figure


def run_memory(options: DictConfig) -> list[LayerMemory]:
    """Watch as configs/memory.yaml says, print a table for each layer, draw the figure, and return what was found."""
    config = read_config(MemoryConfig, plain(options), "memory")
    check_figure(config.plot)
    device = resolve_device(config.accelerator)
    path, checkpoint = opened(config)
    data = open_text(config, checkpoint, None, 1)
    tokens = torch.from_numpy(data.val.tokens[: config.length].astype(np.int64))
    if len(tokens) < config.length:
        raise UserError(f"the text has {len(tokens)} tokens: lower length= or give another text=")
    found = watch_memory(checkpoint.model, tokens.to(device))
    print_table("memory", {"checkpoint": f"{path}, step {checkpoint.step:,}", "text": f"{len(tokens):,} tokens"})
    for memory in found:
        print_table(f"layer {memory.layer}, {memory.name}", summary(memory))
    if config.plot is not None:
        draw(found, from_launch_dir(config.plot))
    if config.json is not None:
        layers = [_plain(memory) for memory in found]
        write_json(from_launch_dir(config.json), {"checkpoint": str(path), "step": checkpoint.step, "layers": layers})
    return found


def _plain(memory: LayerMemory) -> dict[str, object]:
    """The retention of every token is left out: its half-lives say the same, and are small."""
    lives = np.where(np.isfinite(memory.half_lives()), memory.half_lives(), -1.0)
    return {
        "layer": memory.layer,
        "name": memory.name,
        "half_lives": [[None if x < 0 else x for x in head] for head in lives.tolist()],
        "strength": memory.strength.tolist(),
        "norm": memory.norm.tolist(),
        "rank": memory.rank.tolist(),
        "gaps": list(memory.gaps),
        "read_back": memory.read_back.tolist(),
        "interference": memory.interference.tolist(),
    }


def draw(found: list[LayerMemory], path: Path) -> None:
    """A row for each layer; heads are lines, or lie one below the other."""
    from matplotlib.figure import Figure  # here: it takes a second to import

    figure = Figure(figsize=(18, 2.6 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 6, squeeze=False)
    for (kept, writes, norms, ranks, reads, alike), memory in zip(panels, found, strict=True):
        T, heads, channels = memory.retention.shape
        image = kept.imshow(
            memory.retention.reshape(T, -1).T, vmin=0, vmax=1, aspect="auto", cmap="viridis", interpolation="nearest"
        )
        for head in range(1, heads):
            kept.axhline(head * channels - 0.5, color="white", linewidth=1)
        figure.colorbar(image, ax=kept)
        kept.set_ylabel(f"layer {memory.layer}, {memory.name}\nchannels of {heads} heads")
        for axes, values in ((writes, memory.strength), (norms, memory.norm), (ranks, memory.rank)):
            axes.plot(values, linewidth=0.8)
        reads.plot(memory.gaps, memory.read_back, linewidth=1.2, marker="o", markersize=3)
        reads.set_xscale("symlog", base=2, linthresh=1)
        reads.set_ylim(bottom=0)
        later = np.tril_indices(T, -1)
        for cosines in memory.cosines:
            alike.hist(cosines[later], bins=50, range=(0, 1), density=True, histtype="step")
        alike.set_xlabel("|cosine| of two tokens' keys")
        for axes in (kept, writes, norms, ranks):
            axes.set_xlabel("token")
        reads.set_xlabel("tokens since the pair was written")
        for axes in (writes, norms, ranks, reads, alike):
            axes.grid(alpha=0.3)
        titles = (
            "retention",
            "write strength",
            "norm of the state",
            "effective rank",
            "read-back error",
            "interference",
        )
        for axes, title in zip((kept, writes, norms, ranks, reads, alike), titles, strict=True):
            axes.set_title(title, fontsize="medium")
    save_figure(figure, path)
