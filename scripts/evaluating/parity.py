"""`python scripts/evaluate.py parity ckpt=…`: whether a checkpoint gives one answer whichever way it is computed."""

import math
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig

from kda_lm.cli import print_table
from kda_lm.config import plain, read_config
from kda_lm.device import Precision, resolve_device
from kda_lm.errors import UserError
from kda_lm.evaluation.parity import Parity, ParityConfig, compare, places
from kda_lm.runs import from_launch_dir, write_json
from scripts.evaluating.common import open_text, opened


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
