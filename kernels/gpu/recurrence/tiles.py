"""Tile sizes and warps of the chunkwise kernels: one checked table instead of autotuning at run time.

`tiles_for` looks up (compute capability, dtype, K, V, rule, decay); what the table does not name takes the default of
its dtype, which fits the shared memory of every GPU from sm_80 on. scripts/tune.py measures candidates and prints
entries; it admits none whose output and gradients it has not compared with the float64 recurrence on that device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernels.gpu.limits import WIDEST, capability, padded


@dataclass(frozen=True)
class Launch:
    """How one kernel is compiled."""

    warps: int = 4
    stages: int = 1  # of its loop over chunks or value channels
    keys: int = 64  # key channels at a time
    values: int = 64  # value channels at a time
    registers: int | None = None  # at most, of a thread


@dataclass(frozen=True)
class Tiles:
    """How an op's kernels are compiled. Results change by their rounding alone."""

    chunk: int = 64  # tokens: 32 or 64
    inverse: str = "fp16"  # of the triangular inverse's products, for bf16: "fp16" or an input_precision of tl.dot
    prepare: Launch = Launch()
    pairs: Launch = Launch()
    scan: Launch = Launch()
    reverse_scan: Launch = Launch()
    pair_gradients: Launch = Launch()
    gradients: Launch = Launch()


# What any GPU from sm_80 on can run, in 99 KB of shared memory: for bf16 inputs, those of 256 channels, and others.
HALF = Tiles(scan=Launch(values=32), reverse_scan=Launch(values=32))
HALF_256 = Tiles(chunk=32, scan=Launch(values=32), reverse_scan=Launch(values=32))
FLOAT32 = Tiles(chunk=32, scan=Launch(8, values=16), reverse_scan=Launch(values=32))

# (capability, wider of K and V as in `padded`, rule, decay), for bf16 inputs. Measured on an H200 with Triton 3.7.1;
# the additive cells with a decay have what was measured for the others.
Key = tuple[int, int, str, str]
_KDA_128 = Tiles(
    prepare=Launch(keys=32),
    scan=Launch(8, 2, values=128),
    reverse_scan=Launch(8, 2, values=128),
    pair_gradients=Launch(registers=168),
    gradients=Launch(values=128),
)
_KDA_64 = Tiles(
    pairs=Launch(registers=168),
    prepare=Launch(keys=32),
    scan=Launch(stages=2),
    reverse_scan=Launch(stages=3),
    pair_gradients=Launch(registers=128),
)
_LINEAR_128 = Tiles(scan=Launch(8, 3, values=128), reverse_scan=Launch(8, 3, values=128), gradients=Launch(values=128))
TABLE: dict[Key, Tiles] = {
    (90, 64, "additive", "none"): Tiles(scan=Launch(stages=2), reverse_scan=Launch(stages=2)),
    (90, 64, "additive", "scalar"): Tiles(scan=Launch(stages=2), reverse_scan=Launch(stages=2)),
    (90, 64, "additive", "channel"): _KDA_64,
    (90, 64, "delta", "none"): Tiles(scan=Launch(stages=3), reverse_scan=Launch(stages=3)),
    (90, 64, "delta", "scalar"): Tiles(scan=Launch(stages=3), reverse_scan=Launch(stages=2)),
    (90, 64, "delta", "channel"): _KDA_64,
    (90, 128, "additive", "none"): _LINEAR_128,
    (90, 128, "additive", "scalar"): _LINEAR_128,
    (90, 128, "additive", "channel"): _KDA_128,
    (90, 128, "delta", "none"): Tiles(
        pairs=Launch(keys=128),
        scan=Launch(8, 2, values=128),
        reverse_scan=Launch(8, 3, values=128),
        gradients=Launch(values=128),
    ),
    (90, 128, "delta", "scalar"): Tiles(
        pairs=Launch(keys=128),
        scan=Launch(stages=2),
        reverse_scan=Launch(8, 3, values=128),
        gradients=Launch(values=128),
    ),
    (90, 128, "delta", "channel"): _KDA_128,
}

_forced: Tiles | None = None
_generation = 0


def tiles_for(device: torch.device, float32: bool, K: int, V: int, rule: str, decay: str) -> Tiles:
    """The table's entry for this GPU, or the default."""
    if _forced is not None:
        return _forced
    wide = max(padded(K), padded(V))
    entry = None if float32 else TABLE.get((capability(device), wide, rule, decay))
    return entry or default(float32, wide)


def default(float32: bool, wide: int) -> Tiles:
    """For any GPU, for the wider of K and V as in `padded`."""
    if float32:
        return FLOAT32
    return HALF if wide < WIDEST else HALF_256


@contextmanager
def forced(tiles: Tiles) -> Iterator[None]:
    """Compile every op with `tiles` inside: for the tuner and for tests of the whole table."""
    global _forced, _generation
    before, _forced = _forced, tiles
    _generation += 1
    try:
        yield
    finally:
        _forced = before
        _generation += 1


def generation() -> int:
    """Changes whenever `tiles_for` may answer differently."""
    return _generation
