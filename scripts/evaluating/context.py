"""`python scripts/evaluate.py context ckpt=…`: loss by position, and on what the context has shown already."""

from pathlib import Path

from omegaconf import DictConfig

from kda_lm.checkpoint import Checkpoint
from kda_lm.cli import print_table
from kda_lm.config import plain, read_config
from kda_lm.device import arithmetic, resolve_device
from kda_lm.evaluation.context import ContextConfig, ContextScore, Sum, measure_context, smoothed
from kda_lm.runs import from_launch_dir, write_json
from scripts.evaluating.common import check_figure, open_text, open_training, opened, progress, save_figure


def run_context(options: DictConfig) -> ContextScore:
    """Measure as configs/context.yaml says, print the tables, draw the figure, and return what was found."""
    config = read_config(ContextConfig, plain(options), "context")
    check_figure(config.plot)
    device = resolve_device(config.accelerator)
    path, checkpoint = opened(config)
    data = open_text(config, checkpoint, config.seq_len, config.batch_size)
    training = None if config.rare is None else open_training(config, checkpoint).train.tokens
    with arithmetic(config.precision, device):
        score = measure_context(checkpoint.model, progress(data.val_dataloader()), device, training, config.rare)

    window = data.config.seq_len
    text = "validation text of the training run" if config.text is None else str(config.text)
    print_table(
        "context", {"checkpoint": f"{path}, step {checkpoint.step:,}", "text": text, "windows": f"{window} tokens"}
    )
    rows = {_named(first, last): _said(total) for first, last, total in score.ranges()}
    print_table("loss by position, nats a token", rows)
    before = "seen before in the window"
    kinds = {before: score.seen, "all others": score.other}
    if config.rare is not None:
        seldom, often = (f"{before}, {than} {config.rare} times in training" for than in ("at most", "more than"))
        kinds = {seldom: score.seen, often: score.frequent, "all others": score.other}
    print_table("loss on bigrams, nats a token", {name: _said(total) for name, total in kinds.items()})
    if config.plot is not None:
        draw(score, checkpoint, from_launch_dir(config.plot))
    if config.json is not None:
        found = {
            "checkpoint": str(path),
            "step": checkpoint.step,
            "seq_len": window,
            "rare": config.rare,
            "loss_by_position": [_number(total) for total in score.positions],
            **{
                name: {"loss": _number(total), "targets": total.targets}
                for name, total in (("seen", score.seen), ("frequent", score.frequent), ("other", score.other))
            },
        }
        write_json(from_launch_dir(config.json), found)
    return score


def _named(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _said(total: Sum) -> str:
    return f"{total.loss:.4f} over {total.targets:,}" if total.targets else "none"


def _number(total: Sum) -> float | None:
    return total.loss if total.targets else None


def draw(score: ContextScore, checkpoint: Checkpoint, path: Path) -> None:
    """Loss by position; the dashed line is the length that the model was trained at."""
    from matplotlib.figure import Figure  # here: it takes a second to import

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    middles, losses = zip(*smoothed(score.positions), strict=True)
    axes.plot([middle + 1 for middle in middles], losses, label=checkpoint.model.config.pattern_name)
    trained = checkpoint.data.get("seq_len")
    if trained is not None and trained < len(score.positions):
        axes.axvline(trained, color="gray", linestyle="--", linewidth=1, label="training length")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the window, tokens")
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)
