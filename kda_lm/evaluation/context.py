"""What a model makes of its context: loss by position, and loss on what the context has shown already.

loss by position  mean −log p of the targets at position t of their windows, all with t tokens before them
seen              targets that followed the same token earlier in their window: a bigram to be recalled. Only those
                  that the training text has at most `rare` times: others are known without any context
                  (associative-recall hits, Arora et al. 2023, arXiv 2312.04927)
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kda_lm.evaluation.text import TextConfig
from kda_lm.model import LM

ROWS = 4096  # of logits at a time
TOKENS = 1 << 22  # of the training text at a time


@dataclass(frozen=True)
class ContextConfig(TextConfig):
    """Options of `scripts/evaluate.py context`; see configs/context.yaml."""

    seq_len: int | None = None
    batch_size: int = 8
    rare: int | None = 10
    plot: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("seq_len", 2), ("batch_size", 1), ("rare", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it takes at least {least}")


@dataclass
class Sum:
    """Nats over targets."""

    nats: float = 0.0
    targets: int = 0

    @property
    def loss(self) -> float:
        return self.nats / self.targets if self.targets else float("nan")

    def add(self, nll: NDArray[np.floating]) -> None:
        self.nats += float(nll.sum(dtype=np.float64))
        self.targets += nll.size


@dataclass
class ContextScore:
    """The result of `measure_context`."""

    positions: list[Sum]
    seen: Sum = field(default_factory=Sum)
    frequent: Sum = field(default_factory=Sum)  # seen, too, but often in training
    other: Sum = field(default_factory=Sum)

    def ranges(self) -> list[tuple[int, int, Sum]]:
        """Positions 0, 1, 2–3, 4–7, …: first, last, and their sum."""
        found, first = [], 0
        while first < len(self.positions):
            end = min(max(2 * first, 1), len(self.positions))
            part = self.positions[first:end]
            found.append((first, end - 1, Sum(sum(x.nats for x in part), sum(x.targets for x in part))))
            first = end
        return found


def target_losses(model: LM, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """−log p of each target [B, T] in float32, 0 where it is −100; no more than ROWS rows of logits at once."""
    x, _ = model.hidden_states(tokens, cu_seqlens=cu_seqlens, keep_states=False)
    rows = zip(x.flatten(0, 1).split(ROWS), targets.flatten().split(ROWS), strict=True)
    losses = [F.cross_entropy(model.logits(x), y, reduction="none") for x, y in rows]
    return torch.cat(losses).view(targets.shape)


def bigrams(tokens: NDArray[np.int64], targets: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """A number for each token with its target; −1 where there is none."""
    return np.where(targets >= 0, tokens * vocab_size + targets, -1)


def seen_before(codes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of codes [B, T] their row has had before."""
    seen = np.zeros(codes.shape, dtype=bool)
    for row, found in zip(codes, seen, strict=True):
        found[:] = True
        found[np.unique(row, return_index=True)[1]] = False
    return seen & (codes >= 0)


def count_in(tokens: NDArray[np.unsignedinteger], wanted: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """How often each bigram of `wanted`, ascending, is in `tokens`, which are read a part at a time."""
    counts = np.zeros(len(wanted), dtype=np.int64)
    for start in range(0, len(tokens) - 1, TOKENS):
        part = tokens[start : start + TOKENS + 1].astype(np.int64)
        codes = part[:-1] * vocab_size + part[1:]
        at = np.minimum(np.searchsorted(wanted, codes), max(len(wanted) - 1, 0))
        if len(wanted):
            counts += np.bincount(at[wanted[at] == codes], minlength=len(wanted))
    return counts


@torch.inference_mode()
def measure_context(
    model: LM,
    batches: Iterable[dict[str, Tensor]],
    device: torch.device,
    training: NDArray[np.unsignedinteger] | None = None,
    rare: int | None = None,
) -> ContextScore:
    """Of batches of text, all windows of one length. Without `training` tokens, or `rare`, all that was seen counts."""
    vocab_size = model.config.vocab_size
    kept: list[tuple[NDArray[np.floating], NDArray[np.int64]]] = []  # losses, and codes of what was seen, else −1
    score: ContextScore | None = None
    for batch in batches:
        nll = target_losses(model, **{name: x.to(device) for name, x in batch.items()}).cpu().numpy()
        tokens, targets = batch["tokens"].numpy(), batch["targets"].numpy()
        score = score or ContextScore([Sum() for _ in range(tokens.shape[1])])
        asked = targets != -100
        for position, total in enumerate(score.positions):
            total.add(nll[:, position][asked[:, position]])
        codes = bigrams(tokens, targets, vocab_size)
        codes = np.where(seen_before(codes), codes, -1)
        kept.append((nll[asked], codes[asked]))
    if score is None:
        return ContextScore([])
    losses, codes = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    seen = codes >= 0
    often = np.zeros_like(seen)
    if training is not None and rare is not None:
        wanted, where = np.unique(codes[seen], return_inverse=True)
        often[seen] = (count_in(training, wanted, vocab_size) > rare)[where]
    score.seen.add(losses[seen & ~often])
    score.frequent.add(losses[often])
    score.other.add(losses[~seen])
    return score


def smoothed(positions: list[Sum]) -> Iterator[tuple[float, float]]:
    """Points of a curve: of ranges of positions, each half as long again as the one before, the middle and the loss."""
    first = 0
    while first < len(positions):
        end = min(max(3 * first // 2, first + 1), len(positions))
        part = positions[first:end]
        yield (first + end - 1) / 2, Sum(sum(x.nats for x in part), sum(x.targets for x in part)).loss
        first = end
