"""Perplexity and bits per byte: one tally for training's validation and for scripts/evaluate.py.

    loss           = Σ −log p(target) / targets             nats a token
    perplexity     = exp(loss)
    bits per byte  = Σ −log p(target) / (ln 2 · bytes)      bytes: UTF-8 bytes of the text that was scored

Sums, never means of means: the result does not depend on the batch size. Log-probabilities are float32, sums float64.
Every token of the text is a target once, and so is the end of each document, which has no bytes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kda_lm.device import Accelerator, Precision, resolve_device
from kda_lm.model import LM


@dataclass(frozen=True)
class TextConfig:
    """Which checkpoint, over which text, where, and where to: what everything in scripts/evaluate.py asks for."""

    ckpt: str | None = None
    text: str | tuple[str, ...] | None = None
    text_key: str = "text"
    tokenizer: str | None = None
    accelerator: Accelerator = "auto"
    precision: Precision = "auto"
    json: str | None = None
    cache_dir: str = "~/.cache/kda_lm"

    def __post_init__(self) -> None:
        resolve_device(self.accelerator)


@dataclass(frozen=True)
class EvaluationConfig(TextConfig):
    """Options of scripts/evaluate.py; see configs/evaluate.yaml."""

    seq_len: int | None = None
    stride: int | None = None
    batch_size: int = 8
    test: tuple[dict[str, Any], ...] = ()
    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seq_len", "stride", "batch_size", "samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes at least 1")


@dataclass(frozen=True)
class Score:
    """The result of an evaluation; `bits_per_byte` is None where the number of bytes is not known."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    targets: int

    def metrics(self, prefix: str) -> dict[str, float]:
        values = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {f"{prefix}/{name}": value for name, value in values.items() if value is not None}

    @property
    def brief(self) -> str:
        """For a progress line."""
        return f"{self.loss:.3f}"

    def rows(self, prefix: str) -> dict[str, str]:
        """For a table."""
        return {
            f"{prefix} loss": f"{self.loss:.4f} nats a token over {self.targets:,} tokens",
            f"{prefix} perplexity": f"{self.perplexity:.2f}",
            "bits per byte": "unknown" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}",
        }


T = TypeVar("T", bound="Tally")


class Tally:
    """Running sum of −log p over targets."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # [2]: nats, targets; float64

    def add(self, nll: Tensor, targets: Tensor) -> None:
        sums = torch.stack([nll.detach().double(), targets.double()])
        self.sums = sums if self.sums is None else self.sums + sums

    def add_batch(self, model: LM, batch: dict[str, Tensor]) -> None:
        """{tokens, targets[, cu_seqlens]}, as the data room makes them, on the model's device."""
        self.add(*model.loss(**batch, z_loss=0.0))

    def over_ranks(self, device: torch.device) -> None:
        """Add what the other processes of a run have; each of them calls this."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.sums = torch.zeros(2, dtype=torch.float64, device=device) if self.sums is None else self.sums.clone()
            dist.all_reduce(self.sums)

    def score(self, num_bytes: int | None = None) -> Score:
        nll, targets = self.sums.tolist() if self.sums is not None else (0.0, 0.0)
        loss = nll / targets if targets else math.nan
        perplexity = math.inf if loss > 700 else math.exp(loss)
        return Score(loss, perplexity, nll / math.log(2) / num_bytes if num_bytes else None, int(targets))


@torch.inference_mode()
def add_batches(tally: T, model: LM, batches: Iterable[dict[str, Tensor]], device: torch.device) -> T:
    """`tally`, with the `batches` in it, as the data room makes them, scored on `device`."""
    training = model.training
    model.eval()
    for batch in batches:
        tally.add_batch(model, {name: tensor.to(device) for name, tensor in batch.items()})
    model.train(training)
    return tally


def evaluate(
    model: LM, batches: Iterable[dict[str, Tensor]], device: torch.device, num_bytes: int | None = None
) -> Score:
    """Of batches of text."""
    return add_batches(Tally(), model, batches, device).score(num_bytes)
