"""Whether a model gives one answer whichever way it is computed: what every cache, chunk and batch has to leave alone.

The answer that all others are held against is one pass over a batch of texts. The error of a position is

    ‖logits − reference‖ / ‖reference‖

float32   of no position more than 1e-4: sums in another order, through all layers.
bf16      the root mean square over all positions at most 2·d, where d is that of the one pass in bf16 from the same
          pass in float32. Two ways in bf16 round the same numbers at other places; each is about d from what they both
          stand for, and errors that know nothing of each other add up as squares: to √2·d, and to 2·d if a way rounds
          so much more that it is √3·d away. For the worst position nothing follows, for layers amplify what is rounded
          at some places more than at others, and a way is compared at more places than d is measured at: it may be
          TAIL times as far as the worst of the one pass. A token that is wrong altogether is off by about 1.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_lm.decoding import Decoder
from kda_lm.device import Precision, arithmetic
from kda_lm.evaluation.text import TextConfig
from kda_lm.model import LM

FLOAT32_BOUND = 1e-4
TAIL = 4.0
TELLING_SPLITS = (1, 2, 3, 63, 64, 65)  # around nothing, a short convolution, a chunk; and the last token
PIECES = (1, 2, 16, 17)  # tokens that are appended at once, before all that is left


@dataclass(frozen=True)
class ParityConfig(TextConfig):
    """Options of `scripts/evaluate.py parity`; see configs/parity.yaml."""

    length: int = 256
    batch_size: int = 4
    splits: int = 8
    steps: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("length", 3), ("batch_size", 2), ("splits", 1), ("steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes at least {least}")


@dataclass
class Difference:
    """What was found of one way of computing."""

    way: str
    bound: float | None = None  # its own, of every position; None: that of the arithmetic
    error: float = 0.0  # of the worst position
    where: str = ""
    absolute: float = 0.0  # the largest of a logit
    squares: float = 0.0  # of the errors, summed over
    positions: int = 0

    @property
    def rms(self) -> float:
        """Of the errors of all positions."""
        return math.sqrt(self.squares / max(self.positions, 1))

    def add(self, logits: Tensor, reference: Tensor, where: str) -> None:
        """Both [rows, positions, vocab] or [rows, vocab]."""
        errors = position_errors(logits, reference)
        self.squares += float(errors.square().sum())
        self.positions += errors.numel()
        error = float(errors.max())
        if not (error <= self.error or math.isnan(self.error)):  # NaN is the largest, and stays
            row = int(errors.argmax()) // errors[0].numel()
            self.error, self.where = error, where if len(errors) == 1 else f"row {row}, {where}"
        largest = float((logits - reference).abs().max())
        self.absolute = largest if not largest <= self.absolute and not math.isnan(self.absolute) else self.absolute


@dataclass(frozen=True)
class Parity:
    """What was found in one arithmetic."""

    precision: Precision
    distance: float | None  # d; None in float32
    bound: float  # of the worst position
    differences: list[Difference]

    @property
    def broken(self) -> list[Difference]:
        """Beyond a bound, or no number."""
        return [found for found in self.differences if not self.share(found) <= 1]

    def share(self, found: Difference) -> float:
        """Of what it may be off, the worst position or all of them."""
        limits = [(found.error, self.bound if found.bound is None else found.bound)]
        if self.distance is not None and found.bound is None:
            limits.append((found.rms, 2 * self.distance))
        # The least number for a bound of 0: any difference is beyond it.
        shares = [value / max(bound, sys.float_info.min) for value, bound in limits]
        return max(shares, key=lambda share: math.inf if math.isnan(share) else share)


def position_errors(logits: Tensor, reference: Tensor) -> Tensor:
    """[..., positions]."""
    out, ref = logits.double(), reference.double()
    return (out - ref).norm(dim=-1) / ref.norm(dim=-1)


def places(length: int, count: int) -> list[int]:
    """Where to split `length` tokens: where faults show, and `count` more, evenly."""
    even = [round(length * (i + 1) / (count + 1)) for i in range(count)]
    return sorted({n for n in (*TELLING_SPLITS, *even, length - 1) if 0 < n < length})


@torch.inference_mode()
def compare(model: LM, tokens: Tensor, splits: Sequence[int], steps: int, precision: Precision) -> Parity:
    """All ways of computing the logits of tokens [B, T], in `precision`; `steps` tokens are decoded after a split."""
    device = tokens.device
    exact, _ = model(tokens)
    with arithmetic(precision, device):
        whole, _ = model(tokens)
        found = [way(model, tokens, whole, splits, steps) for way in WAYS]
        if device.type == "cuda":
            found.append(graph_and_none(model, tokens, whole, splits, steps))
    if precision == "32-true":
        return Parity(precision, None, FLOAT32_BOUND, found)
    errors = position_errors(whole, exact)
    return Parity(precision, float(errors.square().mean().sqrt()), TAIL * float(errors.max()), found)


def segments(model: LM, tokens: Tensor, whole: Tensor, splits: Sequence[int], steps: int) -> Difference:
    found = Difference("in two segments, the state carried")
    for n in splits:
        first, state = model(tokens[:, :n])
        second, _ = model(tokens[:, n:], state)
        found.add(torch.cat([first, second], dim=1), whole, f"split at {n}")
    return found


def stepped(model: LM, tokens: Tensor, whole: Tensor, splits: Sequence[int], steps: int) -> Difference:
    found = Difference("prefill, then token by token")
    decoder = Decoder(model, tokens.shape[1])
    for n in splits:
        found.add(decoder.prefill(tokens[:, :n].tolist()), whole[:, n - 1], f"after {n}")
        for t in range(n, min(n + steps, tokens.shape[1])):
            found.add(decoder.step(tokens[:, t]), whole[:, t], f"prefill of {n}, token {t}")
    return found


def appended(model: LM, tokens: Tensor, whole: Tensor, splits: Sequence[int], steps: int) -> Difference:
    found = Difference("prefill, then several tokens at once")
    length = tokens.shape[1]
    decoder = Decoder(model, length)
    for n in splits:
        decoder.prefill(tokens[:, :n].tolist())
        start = n
        for piece in (*PIECES, length):
            end = min(start + piece, length)
            if start < end:
                found.add(decoder.append(tokens[:, start:end]), whole[:, start:end], f"after {n}, tokens from {start}")
            start = end
    return found


def alone(model: LM, tokens: Tensor, whole: Tensor, splits: Sequence[int], steps: int) -> Difference:
    found = Difference("a row without the batch")
    for i in range(len(tokens)):
        found.add(model(tokens[i : i + 1])[0], whole[i : i + 1], f"row {i}")
    return found


def unequal(model: LM, tokens: Tensor, whole: Tensor, splits: Sequence[int], steps: int) -> Difference:
    found = Difference("prompts of unequal length, then token by token")
    batch, length = tokens.shape
    decoder = Decoder(model, length)
    usable = [n for n in splits if n + steps <= length]
    usable = usable if len(usable) > 1 else [1, 2]
    for start in range(0, len(usable), batch - 1):  # sets of lengths that share one with the next
        lengths = [usable[(start + i) % len(usable)] for i in range(batch)]
        logits = decoder.prefill([row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)])
        for step in range(min(steps, length - max(lengths)) + 1):
            if step:
                logits = decoder.step(torch.stack([row[n + step - 1] for row, n in zip(tokens, lengths, strict=True)]))
            for i, n in enumerate(lengths):
                where = f"row {i}, prompts of {lengths}, token {n + step - 1}"
                found.add(logits[i : i + 1], whole[i : i + 1, n + step - 1], where)
    return found


def graph_and_none(model: LM, tokens: Tensor, whole: Tensor, splits: Sequence[int], steps: int) -> Difference:
    found = Difference("steps from a CUDA graph against steps without", bound=0.0)
    n, length = splits[len(splits) // 2], tokens.shape[1]
    decoders = [Decoder(model, length, cuda_graph=graph) for graph in (True, False)]
    for decoder in decoders:
        decoder.prefill(tokens[:, :n].tolist())
    for t in range(n, min(n + steps, length)):
        replayed, plain = (decoder.step(tokens[:, t]) for decoder in decoders)
        found.add(replayed, plain, f"token {t}")
    return found


WAYS: list[Callable[[LM, Tensor, Tensor, Sequence[int], int], Difference]] = [
    segments,
    stepped,
    appended,
    alone,
    unequal,
]
