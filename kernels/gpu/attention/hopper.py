# mypy: disable-error-code="no-untyped-def"
"""What attention's kernels for Hopper, in Gluon, have in common: how tensors are described to the TMA unit, which
copies between them and shared memory, and how a ring of stages is gone around.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GROUP_ROWS = gl.constexpr(64)  # rows of a product of a group of four warps
PRODUCER_REGISTERS = gl.constexpr(24)
# Triton 3.9 has new names.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next stage, and the parity of its barriers' phases."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def of_stage(barriers, kind: gl.constexpr, stage, STAGES: gl.constexpr):
    """The barrier of a kind and a stage: two that are of no stage come first, then all stages' of each kind."""
    return barriers.index(2 + kind * STAGES + stage)


def readable(x: Tensor) -> Tensor:
    """x [B, T, H, D] or a copy of it that the TMA unit can read: all rows begin at multiples of 16 bytes."""
    steps = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    aligned = x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(step > 0 and step % 8 == 0 for step in steps[:-1])
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


@cache
def layout(rows: int, D: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, D], gl.bfloat16)


def described(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, T, H, D], read or written `rows` tokens of a head at a time."""
    B, T, H, D = x.shape
    # The step along an axis of one is never taken, and may be anything.
    steps = [step if size > 1 else D * H * T for step, size in zip(x.stride()[:3], x.shape, strict=False)]
    return TensorDescriptor(x, [B, T, H, D], [*steps, 1], [1, rows, 1, D], layout(rows, D))
