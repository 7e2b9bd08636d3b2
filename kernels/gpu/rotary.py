"""Rotary positions behind an RMS norm, on a GPU: each head is read once and written once, in either direction.

    x̂ = x / sqrt(mean(x²) + eps),   u = x̂ ⊙ w                              or u = x, without a weight
    y = [u₁ cos − u₂ sin, u₂ cos + u₁ sin],   angle = position · frequency    of the halves u₁, u₂ of a head
    e = [d₁ cos + d₂ sin, d₂ cos − d₁ sin],   d = dy                          the rotation back
    dw = Σ e ⊙ x̂,   dx = (e ⊙ w − x̂ · mean(e ⊙ w ⊙ x̂)) / sqrt(mean(x²) + eps)

A program has some tokens and goes through heads: cosine and sine, which cost more than all the rest, are made once for
all of them. x may be a part of wider rows, as a joint projection leaves it. The backward computes the norm again, and
keeps nothing but x; its programs leave a sum each for dw, which torch adds up: the same bits in every run.
"""

# mypy: disable-error-code="no-untyped-def"
# The reason: @triton.jit functions take constexprs, pointers and blocks, none of which has a type to annotate with.

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gpu.launch import Launcher, launcher, numbers, token_stride, traced, types

TILE = 512  # pairs of channels of a program at a time
WARPS = 4
PROGRAMS = 2048  # so many, and programs go through several heads each


@triton.jit
def _halves(base, row, i, mask, HALF: tl.constexpr):
    """Both halves of a head of some tokens, [tokens, pairs] in float32."""
    at = base + row[:, None] + i[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(base, row, i, mask, first, second, HALF: tl.constexpr):
    at = base + row[:, None] + i[None, :]
    tl.store(at, first.to(base.dtype.element_ty), mask=mask)
    tl.store(at + HALF, second.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _tokens(positions, frequencies, T, N, TOKENS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """A program's tokens, counted through the batch, its pairs of channels, which are there, cosine and sine."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    i = tl.arange(0, PAIRS)
    there = token < N
    mask = there[:, None] & (i < HALF)[None, :]
    position = tl.load(positions + token % T, mask=there, other=0).to(tl.float32)
    frequency = tl.load(frequencies + i, mask=i < HALF, other=0.0)
    angle = position[:, None] * frequency[None, :]
    return token, i, mask, tl.cos(angle), tl.sin(angle)


@triton.jit
def _weights(weight, i, HALF: tl.constexpr):
    """Of both halves, [1, pairs]."""
    first = tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)
    second = tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


@triton.jit(do_not_specialize=("eps", "N"))
def rotary_kernel(
    x,
    positions,
    frequencies,
    weight,
    y,
    x_token,
    x_head,
    eps,
    T,  # after so many tokens the positions begin again
    N,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token, i, mask, cos, sin = _tokens(positions, frequencies, T, N, TOKENS, HALF, PAIRS)
    if weight is not None:
        w_first, w_second = _weights(weight, i, HALF)
    for step in range(HEADS):
        head = tl.program_id(1) * HEADS + step
        inside = mask & (head < H)
        first, second = _halves(x, token * x_token + head * x_head, i, inside, HALF)
        if weight is not None:
            scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
            first *= scale * w_first
            second *= scale * w_second
        row = token * (2 * H * HALF) + head * (2 * HALF)
        _store(y, row, i, inside, first * cos - second * sin, second * cos + first * sin, HALF)


@triton.jit(do_not_specialize=("eps", "N"))
def rotary_gradients_kernel(
    d_y,
    x,
    positions,
    frequencies,
    weight,
    d_x,
    partial,
    d_token,
    d_head,
    x_token,
    x_head,
    eps,
    T,
    N,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """`partial` [programs, 2·HALF], with a weight."""
    token, i, mask, cos, sin = _tokens(positions, frequencies, T, N, TOKENS, HALF, PAIRS)
    if weight is not None:
        w_first, w_second = _weights(weight, i, HALF)
    sum_first = tl.zeros([TOKENS, PAIRS], tl.float32)
    sum_second = tl.zeros([TOKENS, PAIRS], tl.float32)
    for step in range(HEADS):
        head = tl.program_id(1) * HEADS + step
        inside = mask & (head < H)
        turned_first, turned_second = _halves(d_y, token * d_token + head * d_head, i, inside, HALF)
        first = turned_first * cos + turned_second * sin
        second = turned_second * cos - turned_first * sin
        if weight is not None:
            unit_first, unit_second = _halves(x, token * x_token + head * x_head, i, inside, HALF)
            size = tl.sum(unit_first * unit_first, 1) + tl.sum(unit_second * unit_second, 1)
            scale = tl.rsqrt(size / (2 * HALF) + eps)[:, None]
            unit_first *= scale
            unit_second *= scale
            sum_first += first * unit_first
            sum_second += second * unit_second
            first *= w_first
            second *= w_second
            along = (tl.sum(first * unit_first, 1) + tl.sum(second * unit_second, 1)) / (2 * HALF)
            first = (first - unit_first * along[:, None]) * scale
            second = (second - unit_second * along[:, None]) * scale
        _store(d_x, token * (2 * H * HALF) + head * (2 * HALF), i, inside, first, second, HALF)
    if weight is not None:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        at = partial + program.to(tl.int64) * (2 * HALF) + i
        tl.store(at, tl.sum(sum_first, 0), mask=i < HALF)
        tl.store(at + HALF, tl.sum(sum_second, 0), mask=i < HALF)


def rotary(x: Tensor, positions: Tensor, frequencies: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `kernels.rotary`."""
    tensors, eps = (x, positions, frequencies, weight), float(eps)
    if torch.compiler.is_compiling() or traced(x):
        return rotary_forward(*tensors, eps)
    if torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in (x, weight)):
        y: Tensor = _Rotary.apply(*tensors, eps)
        return y
    return _forward(*tensors, eps)


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x [B, T, H, D] or a copy of it in which channels lie together and all tokens a stride apart; that stride and the
    heads'.
    """
    stride = token_stride(x)
    if x.stride(3) == 1 and stride is not None:
        return x, stride, x.stride(2)
    x = x.contiguous()
    return x, x.shape[2] * x.shape[3], x.shape[3]


def _sizes(x: Tensor, positions: Tensor) -> tuple[tuple[int, int], int, dict[str, int]]:
    """The programs of a launch, after how many tokens positions begin again, and the kernels' constants."""
    B, T, H, D = x.shape
    pairs = max(16, triton.next_power_of_2(D // 2))
    tokens = max(1, TILE // pairs)
    blocks = triton.cdiv(B * T, tokens)
    heads = min(H, triton.next_power_of_2(max(1, blocks * H // PROGRAMS)))  # few tokens: a head a program
    constants = {"H": H, "HEADS": heads, "HALF": D // 2, "PAIRS": pairs, "TOKENS": tokens, "num_warps": WARPS}
    return (blocks, triton.cdiv(H, heads)), T if positions.dim() == 1 else B * T, constants


def _start(
    tensors: Sequence[Tensor | None], period: int, strides: Sequence[int], constants: dict[str, int]
) -> Launcher:
    device = None if tensors[0] is None else tensors[0].device
    return launcher("rotary", device, types(*tensors), numbers(period, *strides), *constants.values())


def _forward(x: Tensor, positions: Tensor, frequencies: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.new_empty(x.shape)
    x, *strides = _rows(x)
    positions, frequencies = positions.contiguous(), frequencies.contiguous()
    weight = None if weight is None else weight.contiguous()
    grid, period, constants = _sizes(x, positions)
    tensors = (x, positions, frequencies, weight)
    start = _start(tensors, period, strides, constants)
    with torch.cuda.device_of(x):  # where Triton launches
        start(rotary_kernel, grid, (*tensors, y, *strides, eps, period, x.shape[0] * x.shape[1]), constants)
    return y


def _backward(
    d_y: Tensor, x: Tensor, positions: Tensor, frequencies: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and weight."""
    d_x = x.new_empty(x.shape)
    d_y, *d_strides = _rows(d_y)
    x, *x_strides = _rows(x)
    positions, frequencies = positions.contiguous(), frequencies.contiguous()
    scale = None if weight is None else weight.contiguous()
    grid, period, constants = _sizes(x, positions)
    D = x.shape[3]
    partial = None if weight is None else x.new_empty((grid[0] * grid[1], D), dtype=torch.float32)
    tensors = (d_y, x, positions, frequencies, scale)
    start = _start(tensors, period, (*d_strides, *x_strides), constants)
    with torch.cuda.device_of(x):
        strides = (*d_strides, *x_strides)
        arguments = (*tensors, d_x, partial, *strides, eps, period, x.shape[0] * x.shape[1])
        start(rotary_gradients_kernel, grid, arguments, constants)
    return d_x, None if weight is None or partial is None else partial.sum(0).to(weight.dtype)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, positions: Tensor, frequencies: Tensor, weight: Tensor | None, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, positions, frequencies, weight)
        ctx.eps = eps
        return _forward(x, positions, frequencies, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight = _backward(d_y, *ctx.saved_tensors, ctx.eps)  # type: ignore[call-arg]
        return d_x, None, None, d_weight, None


rotary_forward = torch.library.custom_op("kda_lm::rotary_forward", _forward, mutates_args=())


@torch.library.custom_op("kda_lm::rotary_backward", mutates_args=())
def rotary_backward(
    d_y: Tensor, x: Tensor, positions: Tensor, frequencies: Tensor, weight: Tensor | None, eps: float
) -> list[Tensor]:
    """`_backward` with an empty tensor where there is no gradient: operators return no None."""
    gradients = _backward(d_y, x, positions, frequencies, weight, eps)
    return [x.new_empty(0) if z is None else z for z in gradients]


@rotary_forward.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@rotary_backward.register_fake
def _(d_y: Tensor, x: Tensor, positions: Any, frequencies: Any, weight: Any, eps: float) -> list[Tensor]:
    return [x.new_empty(0 if z is None else z.shape, dtype=(x if z is None else z).dtype) for z in (x, weight)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _operator_backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, weight = ctx.saved_tensors
    d_x, d_weight = rotary_backward(d_y, *tensors, weight, ctx.eps)
    return d_x, None, None, None if weight is None else d_weight, None


rotary_forward.register_autograd(_operator_backward, setup_context=_setup_context)
