"""Packing: from a token stream to batches, as pure functions.

Training. The stream has N tokens; its closing eot equals its first token, so it is read as a ring of N − 1
tokens and each epoch cuts the ring, from a random position on, into B = (N − 1) // T blocks of T targets,
visited in a random order. Position and order depend on (seed, epoch) only. Row r of optimizer step s is
sample n = s·batch_size + r: block order_e[n mod B] of epoch e = n // B. So an epoch has every block once and
every target at most once (all but (N − 1) mod T of them), and any step can be had without the steps before
it.

Evaluation. Window w has the targets w·S + 1 … (w + 1)·S of the stream, S ≤ T being the stride: every token after
the first is a target once. The T − S tokens before them, if there are as many, are context.

A batch is a dict of tensors:

    tokens      int64 [b, T]  inputs
    targets     int64 [b, T]  the next token; IGNORE where it is context, and where the last window is padded
    cu_seqlens  int32 [n + 1] only if documents are isolated: boundaries in the flattened b·T tokens, at every
                              row start, at every eot (the first token of its document) and at the end

Isolation needs no masked targets: the target of a document's last token is the next eot, which ends the
document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.errors import DataError
from data.token_file import TokenFile

IGNORE = -100  # target that counts for nothing; torch's default ignore_index

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """One optimizer step: batch_size rows over all `world` ranks, micro_batch_size rows at a time."""

    seq_len: int  # tokens of a row
    batch_size: int
    micro_batch_size: int | None = None  # None: all rows of a rank at once
    world: int = 1

    @property
    def micro(self) -> int:
        return self.micro_batch_size or self.batch_size // self.world

    def check(self) -> None:
        """Raises DataError unless every rank gets the same whole number of micro-batches."""
        for name in ("seq_len", "batch_size", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name} is {value}: it must be at least 1")
        if self.batch_size % self.world or self.batch_size % (self.world * self.micro):
            raise DataError(
                f"batch_size {self.batch_size} must be a multiple of ranks × micro_batch_size = "
                f"{self.world} × {self.micro_batch_size or 1}"
            )


def blocks_per_epoch(file: TokenFile, seq_len: int) -> int:
    """Blocks of `seq_len` targets in an epoch. Raises DataError if the stream is shorter than one."""
    if len(file) < seq_len + 1:
        name = {"train": "training", "val": "validation"}.get(file.manifest.split, file.manifest.split)
        raise DataError(
            f"{name} text has {len(file)} tokens, a block needs seq_len + 1 = {seq_len + 1}: "
            f"lower data.seq_len or give more {name} text"
        )
    return (len(file) - 1) // seq_len


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, blocks: int, ring: int) -> tuple[int, NDArray[np.int64]]:
    """Start of the first block on the ring, and the order of the blocks (8 bytes a block)."""
    rng = np.random.default_rng([seed, epoch])
    return int(rng.integers(ring)), rng.permutation(blocks)


def block_start(file: TokenFile, seq_len: int, seed: int, sample: int) -> int:
    """Position on the ring of N − 1 tokens at which sample `sample` of a run begins."""
    ring, blocks = len(file) - 1, blocks_per_epoch(file, seq_len)
    phase, order = _epoch(seed, sample // blocks, blocks, ring)
    return int((phase + order[sample % blocks] * seq_len) % ring)


def read_block(file: TokenFile, start: int, seq_len: int) -> NDArray[np.int64]:
    """seq_len + 1 tokens from `start` on, across the end of the ring if need be."""
    ring = len(file) - 1
    block = file.tokens[start : start + seq_len + 1]
    if len(block) <= seq_len:
        block = np.concatenate([file.tokens[start:ring], file.tokens[: start + seq_len + 1 - ring]])
    return block.astype(np.int64)


def train_step(file: TokenFile, shape: Shape, seed: int, step: int, rank: int, isolate: bool) -> list[Batch]:
    """The micro-batches of one rank in one optimizer step: rows rank, rank + world, … of the step."""
    samples = range(step * shape.batch_size + rank, (step + 1) * shape.batch_size, shape.world)
    rows = [read_block(file, block_start(file, shape.seq_len, seed, n), shape.seq_len) for n in samples]
    return [
        _batch(
            [row[:-1] for row in rows[i : i + shape.micro]],
            [row[1:] for row in rows[i : i + shape.micro]],
            file.manifest.eot_id if isolate else None,
        )
        for i in range(0, len(rows), shape.micro)
    ]


def window_count(file: TokenFile, stride: int) -> int:
    """Evaluation windows of the stream, with `stride` targets each but the last."""
    return -(-(len(file) - 1) // stride)


def eval_batch(file: TokenFile, seq_len: int, stride: int, windows: Sequence[int], isolate: bool) -> Batch:
    """The given evaluation windows as one batch; what is missing is filled with eot, which is no target."""
    eot = file.manifest.eot_id
    inputs, targets = [], []
    for window in windows:
        begin, end = window * stride, (window + 1) * stride  # of the targets' inputs
        start = max(0, end - seq_len)
        block = file.tokens[start : start + seq_len + 1].astype(np.int64)
        missing = seq_len + 1 - len(block)
        inputs.append(np.pad(block[:-1], (0, missing), constant_values=eot))
        row = np.pad(block[1:], (0, missing), constant_values=IGNORE)
        row[: begin - start] = row[end - start :] = IGNORE
        targets.append(row)
    return _batch(inputs, targets, eot if isolate else None)


def _batch(inputs: list[NDArray[np.int64]], targets: list[NDArray[np.int64]], eot: int | None) -> Batch:
    """Stacks rows; with an `eot`, adds the boundaries of documents."""
    tokens = np.stack(inputs)
    batch = {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(np.stack(targets))}
    if eot is not None:
        begins = tokens == eot
        begins[:, 0] = True
        boundaries = np.append(np.flatnonzero(begins), tokens.size).astype(np.int32)
        batch["cu_seqlens"] = torch.from_numpy(boundaries)
    return batch
