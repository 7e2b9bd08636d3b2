"""The gate of SwiGLU on a GPU: the joint product is read once in either direction, and its gradient written as one.

    y = s(g) ⊙ u,   s(g) = g · sigmoid(g)                     x = [g, u] along a row
    dg = dy ⊙ u ⊙ s'(g),   du = dy ⊙ s(g)                     dx = [dg, du], no copy of halves

A program takes so many numbers of y, wherever rows end: threads are as busy whatever the width.
"""

# mypy: disable-error-code="no-untyped-def"
# The reason: @triton.jit functions take constexprs, pointers and blocks, none of which has a type to annotate with.

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gpu.common import opening
from kernels.gpu.launch import Launcher, as_rows, launcher, numbers, traced, types

BLOCK = 1024  # numbers of y a program: 8 a thread, 16 bytes of bfloat16
WARPS = 4


@triton.jit
def _places(M, N: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of a program's numbers, and which are there: one division in 64 bits, the others in 32."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = (first % N).to(tl.int32) + tl.arange(0, BLOCK)
    # Triton does not see through the remainder that numbers lie side by side, as many as divide N.
    rows = tl.max_constancy(first // N + place // N, TOGETHER)
    columns = tl.max_contiguous(tl.multiple_of(place % N, TOGETHER), TOGETHER)
    return rows, columns, rows < M


@triton.jit(do_not_specialize=("M",))
def swiglu_kernel(x, y, x_stride, M, N: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns, live = _places(M, N, TOGETHER, BLOCK)
    at = x + rows * x_stride + columns
    value, _ = opening(tl.load(at, mask=live, other=0.0).to(tl.float32), True)
    value *= tl.load(at + N, mask=live, other=0.0).to(tl.float32)
    tl.store(y + rows * N + columns, value.to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=("M",))
def swiglu_gradients_kernel(
    d_y, x, d_x, d_y_stride, x_stride, M, N: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr
):
    rows, columns, live = _places(M, N, TOGETHER, BLOCK)
    at = x + rows * x_stride + columns
    error = tl.load(d_y + rows * d_y_stride + columns, mask=live, other=0.0).to(tl.float32)
    value, slope = opening(tl.load(at, mask=live, other=0.0).to(tl.float32), True)
    up = tl.load(at + N, mask=live, other=0.0).to(tl.float32)
    into = d_x + rows * (2 * N) + columns
    tl.store(into, (error * up * slope).to(d_x.dtype.element_ty), mask=live)
    tl.store(into + N, (error * value).to(d_x.dtype.element_ty), mask=live)


def swiglu(x: Tensor) -> Tensor:
    """As `kernels.swiglu`."""
    if torch.compiler.is_compiling() or traced(x):
        return swiglu_forward(x)
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _SwiGLU.apply(x)
        return y
    return _forward(x)


def _start(x: Tensor, *tensors: Tensor) -> tuple[Launcher, tuple[int], dict[str, int]]:
    """For rows of x [M, 2·N] and others: what starts a kernel, its programs and constants."""
    M, N = x.shape[0], x.shape[1] // 2
    constants = {"N": N, "TOGETHER": math.gcd(N, BLOCK), "BLOCK": BLOCK, "num_warps": WARPS}
    sizes = numbers(*(z.stride(0) for z in (x, *tensors)))
    start = launcher("swiglu", x.device, M >= 2**31, N, types(x, *tensors), sizes)
    return start, (triton.cdiv(M * N, BLOCK),), constants


def _forward(x: Tensor) -> Tensor:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    x = as_rows(x)
    start, grid, constants = _start(x)
    with torch.cuda.device_of(x):  # where Triton launches
        start(swiglu_kernel, grid, (x, y, x.stride(0), x.shape[0]), constants)
    return y


def _backward(d_y: Tensor, x: Tensor) -> Tensor:
    """The gradient of x."""
    d_x = x.new_empty(x.shape)
    d_y, x = as_rows(d_y), as_rows(x)
    start, grid, constants = _start(x, d_y)
    with torch.cuda.device_of(x):
        start(swiglu_gradients_kernel, grid, (d_y, x, d_x, d_y.stride(0), x.stride(0), x.shape[0]), constants)
    return d_x


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        return _backward(d_y, *ctx.saved_tensors)


swiglu_forward = torch.library.custom_op("kda_lm::swiglu_forward", _forward, mutates_args=())
swiglu_backward = torch.library.custom_op("kda_lm::swiglu_backward", _backward, mutates_args=())


@swiglu_forward.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@swiglu_backward.register_fake
def _(d_y: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _operator_backward(ctx: Any, d_y: Tensor) -> Tensor:
    return swiglu_backward(d_y, *ctx.saved_tensors)


swiglu_forward.register_autograd(_operator_backward, setup_context=_setup_context)
