"""Blocks and warps of the attention kernels: one checked table instead of autotuning at run time.

`attention_tiles` looks up (compute capability, dtype, padded head width); what the table does not name takes the
default of its dtype and width, which fits the 99 KiB of shared memory of every GPU from sm_80 on.
scripts/tune_attention.py measures candidates; it admits none whose output and gradients it has not compared with
float64 on that device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernels.gpu.limits import capability, padded


@dataclass(frozen=True)
class Blocks:
    """How one kernel is compiled."""

    queries: int  # at a time
    keys: int
    warps: int = 4
    stages: int = 2  # of the loop without masks
    edge: int = 1  # of the loops with masks
    rounded: bool = False  # d_kv: see backward.py
    registers: int | None = None  # at most, of a thread


@dataclass(frozen=True)
class HopperBlocks:
    """How the forward for Hopper is compiled."""

    queries: int  # at a time, 64 for each of 2 or 4 groups of four warps
    keys: int
    stages: int  # blocks of keys and values in shared memory
    registers: int  # of a thread


@dataclass(frozen=True)
class AttentionTiles:
    """How the kernels are compiled. Results change by their rounding alone."""

    forward: Blocks
    d_q: Blocks
    d_kv: Blocks
    hopper: HopperBlocks | None = None  # instead of `forward`, where hopper_forward.py can
    hopper_backward: bool = False  # instead of `d_q` and `d_kv`, where hopper_backward.py can


# What any GPU from sm_80 on can run, in 99 KB of shared memory: for 16 bits, for float32, by the padded head width.
DEFAULTS: dict[tuple[bool, int], AttentionTiles] = {
    (False, 64): AttentionTiles(Blocks(64, 64), Blocks(64, 64), Blocks(64, 32)),
    (False, 128): AttentionTiles(Blocks(64, 64), Blocks(64, 64, 8), Blocks(64, 64, 8)),
    (False, 256): AttentionTiles(Blocks(64, 64, 8, 1), Blocks(32, 64, 8, 1), Blocks(32, 32, 8, 1)),
    (True, 64): AttentionTiles(Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
    (True, 128): AttentionTiles(Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
    (True, 256): AttentionTiles(Blocks(32, 16, 8, 1), Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
}

# (capability, dtype, padded head width).
Key = tuple[int, torch.dtype, int]
TABLE: dict[Key, AttentionTiles] = {
    (90, torch.bfloat16, 64): AttentionTiles(
        forward=Blocks(128, 64, 8, 3, registers=128),
        d_q=Blocks(64, 64, 4, 3),
        d_kv=Blocks(64, 64, 4, 3, 2),
        hopper=HopperBlocks(256, 64, 4, 112),
    ),
    (90, torch.bfloat16, 128): AttentionTiles(
        forward=Blocks(64, 64, 4, 3),
        d_q=Blocks(128, 64, 8, 3),
        d_kv=Blocks(32, 64, 4, 4, 2),
        hopper=HopperBlocks(128, 128, 2, 240),
        hopper_backward=True,
    ),
    (90, torch.bfloat16, 256): AttentionTiles(
        forward=Blocks(128, 64, 8, 2), d_q=Blocks(64, 32, 8, 2), d_kv=Blocks(32, 32, 8, 1)
    ),
    (90, torch.float16, 64): AttentionTiles(
        forward=Blocks(128, 64, 4, 3), d_q=Blocks(128, 64, 8, 2), d_kv=Blocks(64, 64, 8, 2, 2)
    ),
    (90, torch.float16, 128): AttentionTiles(
        forward=Blocks(128, 64, 8, 3), d_q=Blocks(128, 64, 8, 2), d_kv=Blocks(64, 64, 8, 2, 2)
    ),
}

DECODE_KEYS = 64  # of a block
DECODE_ROWS = 64  # at most, of a tile: query heads of a group times new tokens
MAX_SPLITS = 64  # of a cache
SPLIT_KEYS = 256  # positions of a split, at least
NEAR_BYTES = 32 * 2**20  # of keys and values that programs running at the same time share: most of an H200's L2 cache

_forced: AttentionTiles | None = None
_generation = 0


def attention_tiles(device: torch.device, dtype: torch.dtype, D: int) -> AttentionTiles:
    """The table's entry for this GPU, or the default."""
    if _forced is not None:
        return _forced
    return TABLE.get((capability(device), dtype, padded(D))) or default(dtype, padded(D))


def default(dtype: torch.dtype, wide: int) -> AttentionTiles:
    """For any GPU, for a padded head width."""
    return DEFAULTS[dtype == torch.float32, wide]


@contextmanager
def forced(tiles: AttentionTiles) -> Iterator[None]:
    """Compile attention with `tiles` inside: for the tuner and for tests of the whole table."""
    global _forced, _generation
    before, _forced = _forced, tiles
    _generation += 1
    try:
        yield
    finally:
        _forced = before
        _generation += 1


def generation() -> int:
    """Changes whenever `attention_tiles` may answer differently."""
    return _generation
