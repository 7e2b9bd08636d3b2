"""The short causal depthwise convolution on a GPU: one pass over time forward, one backward.

    p_t = Σ_{i<W} w_i ⊙ x_{t−W+1+i} + b,   y = p or SiLU(p)
    dp  = dy ⊙ SiLU'(p),   dx_t = Σ_{j<W} w_{W−1−j} ⊙ dp_{t+j},   dw_i = Σ_t dp_t ⊙ x_{t−W+1+i},   db = Σ_t dp_t

A program walks through a segment of a sequence with BD channels, U tokens loaded at a time, the last W − 1 rows of x
(and of dp) in registers. So every row is read once but for W − 1 beside each segment, and nothing between x, dy and dx
touches memory; only dw and db are partial sums of each segment, added by torch: the same bits in every run.

Positions are counted from the start of a sequence; those before it are the initial state. Of packed sequences a segment
is what a sequence has of L tokens from a multiple of L on, and program i finds its own: the starts of the segments of
sequence n are at ⌊token / L⌋ + n, which grows from each to the next.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
# The reason: @triton.jit functions take constexprs, pointers and blocks, none of which has a type to annotate with, and
# their tuples grow.

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gpu.common import LOG2_E, exp2, reciprocal
from kernels.gpu.launch import Launcher, launcher, numbers, traced, types

WIDEST = 128  # channels of a program, which is one warp
FORWARD_ROWS, BACKWARD_ROWS = 64, 256  # tokens of a program; a program's partial sums take W + 1 rows of float32
FEWEST_ROWS = 32
PROGRAMS = 4096  # the backward's, at least, if the segments may still be shorter
FORWARD_UNROLL, BACKWARD_UNROLL = 8, 4  # tokens that are loaded together

SIZES = ("T", "NT", "N")  # no kernel is compiled anew for their divisors


@triton.jit
def _segment(program, T, NT, N, cu_seqlens, L: tl.constexpr):
    """Sequence, its first row, its length, and the positions [begin, end) of a program; begin ≥ end > 0 or begin > 0
    where there are none."""
    if cu_seqlens is None:
        sequence = (program // NT).to(tl.int64)
        first = sequence * T
        length = T
        begin = program % NT * L
        end = tl.minimum(begin + L, length)
    else:
        low, high = program * 0, program * 0 + N  # of the sequences that start at `program` or before, the last
        while high - low > 1:
            middle = (low + high) // 2
            before = tl.load(cu_seqlens + middle) // L + middle <= program
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        sequence = low.to(tl.int64)
        first = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens + sequence + 1) - first).to(tl.int32)
        begin = ((program - low).to(tl.int64) * L - first).to(tl.int32)
        end = tl.minimum(begin + L, length)
        begin = tl.maximum(begin, 0)
    return sequence, first, length, begin, end


@triton.jit
def _mask(position, first, end, columns, D: tl.constexpr):
    place = tl.zeros_like(columns) + position  # a block: Triton 3.9's interpreter takes no scalar into a mask
    mask = (place >= first) & (place < end)
    if tl.constexpr(D) % columns.shape[0] != 0:
        mask = mask & (columns < D)
    return mask


@triton.jit
def _load(row, position, first, end, columns, D: tl.constexpr):
    """A row of a tensor, zero unless its position is in [first, end) and from channel D on."""
    return tl.load(row + columns, mask=_mask(position, first, end, columns, D), other=0.0)


@triton.jit
def _store(row, value, position, first, end, columns, D: tl.constexpr):
    """What `_load` would read."""
    mask = _mask(position, first, end, columns, D)
    tl.store(row + columns, value.to(row.dtype.element_ty), mask=mask)


@triton.jit
def _input(x_rows, stride, position, states, columns, D: tl.constexpr, W: tl.constexpr):
    """Row `position` ≥ 1 − W of a sequence, which may lie in its initial state or be zero."""
    value = _load(x_rows + tl.cast(position, tl.int64) * stride, position, 0, 1 << 30, columns, D)
    if states is not None:
        value += _load(states + (position + W - 1) * D, position, 1 - W, 0, columns, D)
    return value


@triton.jit
def _past(x_rows, stride, begin, states, columns, D: tl.constexpr, W: tl.constexpr):
    """The W − 1 rows before `begin`, the oldest first."""
    past = ()
    for i in tl.static_range(W - 1):
        past = past + (_input(x_rows, stride, begin - (W - 1) + i, states, columns, D, W).to(tl.float32),)
    return past


@triton.jit
def _taps(weight, bias, columns, D: tl.constexpr, W: tl.constexpr):
    """The weights of each tap, the oldest input's first, and the bias or zero."""
    taps = ()
    for i in tl.static_range(W):
        taps = taps + (tl.load(weight + columns * W + i, mask=columns < D, other=0.0).to(tl.float32),)
    if bias is None:
        offset = tl.zeros_like(taps[0])
    else:
        offset = tl.load(bias + columns, mask=columns < D, other=0.0).to(tl.float32)
    return taps, offset


@triton.jit
def _convolved(rows, taps, offset, W: tl.constexpr):
    sums = offset
    for i in tl.static_range(W):
        sums = tl.fma(taps[i], rows[i], sums)
    return sums


@triton.jit
def _sigmoid(x):
    return reciprocal(1.0 + exp2(x * -LOG2_E))


@triton.jit(do_not_specialize=SIZES)
def short_conv_kernel(
    x,
    weight,
    bias,
    initial_state,
    cu_seqlens,
    y,
    final_state,
    batch_stride,
    row_stride,
    T,
    NT,
    N,
    D: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
    L: tl.constexpr,
    U: tl.constexpr,
    SILU: tl.constexpr,
):
    blocks: tl.constexpr = (D + BD - 1) // BD
    program = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    sequence, first, length, begin, end = _segment(program, T, NT, N, cu_seqlens, L)
    if cu_seqlens is None:
        x_rows = x + sequence * batch_stride
    else:
        x_rows = x + first * row_stride
    states = None
    if initial_state is not None:
        states = initial_state + sequence * ((W - 1) * D)
    taps, offset = _taps(weight, bias, columns, D, W)

    past = _past(x_rows, row_stride, begin, states, columns, D, W)
    x_row = x_rows + tl.cast(begin, tl.int64) * row_stride
    y_row = y + (first + begin) * D
    for t in range(begin, end, U):
        loaded = ()
        for u in tl.static_range(U):
            loaded = loaded + (_load(x_row + u * row_stride, t + u, begin, end, columns, D),)
        for u in tl.static_range(U):
            rows = past + (loaded[u].to(tl.float32),)
            value = _convolved(rows, taps, offset, W)
            if SILU:
                value *= _sigmoid(value)
            _store(y_row + u * D, value, t + u, begin, end, columns, D)
            past = rows[1:]
        x_row += U * row_stride
        y_row += U * D

    if final_state is not None:
        if (end == length) & ((begin < end) | (begin == 0)):  # the sequence's last segment
            into = final_state + sequence * ((W - 1) * D)
            for i in tl.static_range(W - 1):
                value = _input(x_rows, row_stride, length - (W - 1) + i, states, columns, D, W)
                _store(into + i * D, value, i, 0, W - 1, columns, D)


@triton.jit(do_not_specialize=SIZES)
def short_conv_gradients_kernel(
    x,
    weight,
    bias,
    initial_state,
    cu_seqlens,
    d_y,
    d_final,
    d_x,
    d_initial,
    partial,
    batch_stride,
    row_stride,
    d_batch_stride,
    d_row_stride,
    T,
    NT,
    N,
    D: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
    L: tl.constexpr,
    U: tl.constexpr,
    SILU: tl.constexpr,
):
    """`partial` [segments, W or W + 1 with a bias, D]."""
    blocks: tl.constexpr = (D + BD - 1) // BD
    program = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    sequence, first, length, begin, end = _segment(program, T, NT, N, cu_seqlens, L)
    if cu_seqlens is None:
        x_rows = x + sequence * batch_stride
        d_y_rows = d_y + sequence * d_batch_stride
    else:
        x_rows = x + first * row_stride
        d_y_rows = d_y + first * d_row_stride
    states = None
    if initial_state is not None:
        states = initial_state + sequence * ((W - 1) * D)
    taps, offset = _taps(weight, bias, columns, D, W)

    sums = ()  # of dw, tap by tap
    ahead = ()  # the last W − 1 rows of dp
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros([BD], tl.float32),)
    for _ in tl.static_range(W - 1):
        ahead = ahead + (tl.zeros([BD], tl.float32),)
    d_offset = tl.zeros([BD], tl.float32)
    past = _past(x_rows, row_stride, begin, states, columns, D, W)
    x_row = x_rows + tl.cast(begin, tl.int64) * row_stride
    d_y_row = d_y_rows + tl.cast(begin, tl.int64) * d_row_stride
    d_x_row = d_x + (first + begin - (W - 1)) * D
    # dx of a token is complete W − 1 tokens later; those may be the next segment's, or beyond the end.
    stop = end
    if (begin < end) | (begin == 0):
        stop = end + (W - 1)
    for t in range(begin, stop, U):
        loaded = ()
        d_loaded = ()
        for u in tl.static_range(U):
            loaded = loaded + (_load(x_row + u * row_stride, t + u, begin, length, columns, D),)
            d_loaded = d_loaded + (_load(d_y_row + u * d_row_stride, t + u, begin, length, columns, D),)
        for u in tl.static_range(U):
            rows = past + (loaded[u].to(tl.float32),)
            d_p = d_loaded[u].to(tl.float32)
            if SILU:
                p = _convolved(rows, taps, offset, W)
                open = _sigmoid(p)
                d_p *= open * tl.fma(p, 1.0 - open, 1.0)
            owned = tl.where(t + u < end, d_p, 0.0)
            new_sums = ()
            for i in tl.static_range(W):
                new_sums = new_sums + (tl.fma(owned, rows[i], sums[i]),)
            sums = new_sums
            d_offset += owned

            d_rows = ahead + (d_p,)  # zero beyond the end, as dy is there
            value = tl.zeros([BD], tl.float32)
            for j in tl.static_range(W):
                value = tl.fma(taps[W - 1 - j], d_rows[j], value)
            position = t + u - (W - 1)  # whose gradient is complete
            if d_final is not None:
                i = position - length + (W - 1)
                value += _load(d_final + (sequence * (W - 1) + i) * D, i, 0, W - 1, columns, D).to(tl.float32)
            _store(d_x_row + u * D, value, position, begin, end, columns, D)
            if d_initial is not None:
                i = position + (W - 1)
                last = tl.where(begin == 0, W - 1, 0)
                _store(d_initial + (sequence * (W - 1) + i) * D, value, i, 0, last, columns, D)
            past = rows[1:]
            ahead = d_rows[1:]
        x_row += U * row_stride
        d_y_row += U * d_row_stride
        d_x_row += U * D

    kinds: tl.constexpr = W if bias is None else W + 1
    into = partial + program.to(tl.int64) * (kinds * D)
    for i in tl.static_range(W):
        _store(into + i * D, sums[i], i, 0, W, columns, D)
    if bias is not None:
        _store(into + W * D, d_offset, 0, 0, 1, columns, D)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """As `kernels.short_convolution`; cu_seqlens on x's device."""
    tensors = (x, weight, bias, initial_state, cu_seqlens)
    if torch.compiler.is_compiling() or traced(x):
        results = short_conv_forward(*tensors, silu, output_final_state)
    elif torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in tensors):
        results = _ShortConv.apply(*tensors, silu, output_final_state)
    else:
        results = _forward(*tensors, silu, output_final_state)
    return results[0], results[1] if output_final_state else None


def _sizes(x: Tensor, cu_seqlens: Tensor | None, L: int) -> tuple[int, int, int, int]:
    """Segments of L tokens in all and in a row of the batch, sequences, blocks of channels."""
    B, T, D = x.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    per_row = triton.cdiv(T, L)
    return T // L + N if cu_seqlens is not None else B * per_row, per_row, N, triton.cdiv(D, block(D))


def block(D: int) -> int:
    """Channels of a program."""
    return min(WIDEST, max(32, triton.next_power_of_2(D)))


def _start(tensors: Sequence[Tensor | None], *key: Any) -> Launcher:
    strides = [stride for x in tensors if x is not None for stride in x.stride()[:2]]
    return launcher("short_conv", key, types(*tensors), numbers(*strides))


def _channels_together(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    output_final_state: bool,
) -> list[Tensor]:
    """y, and the last state if wanted."""
    x, weight = _channels_together(x), weight.contiguous()
    bias, initial_state, cu_seqlens = (z if z is None else z.contiguous() for z in (bias, initial_state, cu_seqlens))
    results = _results(x, weight, cu_seqlens, output_final_state)
    T, D = x.shape[1:]
    segments, NT, N, blocks = _sizes(x, cu_seqlens, FORWARD_ROWS)
    constants = {
        "D": D,
        "W": weight.shape[1],
        "BD": block(D),
        "L": FORWARD_ROWS,
        "U": FORWARD_UNROLL if T > 1 else 1,
        "SILU": silu,
        "num_warps": 1,
    }
    tensors = (x, weight, bias, initial_state, cu_seqlens)
    state = results[1] if output_final_state else None
    start = _start(tensors, x.device, output_final_state, *constants.values())
    with torch.cuda.device_of(x):  # where Triton launches
        arguments = (*tensors, results[0], state, *x.stride()[:2], T, NT, N)
        start(short_conv_kernel, (segments * blocks,), arguments, constants)
    return results


def _results(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, output_final_state: bool) -> list[Tensor]:
    B, _, D = x.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return [x.new_empty(x.shape), *([x.new_empty(N, weight.shape[1] - 1, D)] if output_final_state else [])]


def _backward(
    d_y: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> list[Tensor | None]:
    """Gradients of x, weight, bias, initial_state."""
    x, d_y, weight = _channels_together(x), _channels_together(d_y), weight.contiguous()
    d_final, bias, initial_state, cu_seqlens = (
        z if z is None else z.contiguous() for z in (d_final, bias, initial_state, cu_seqlens)
    )
    (T, D), W = x.shape[1:], weight.shape[1]
    rows = BACKWARD_ROWS
    while rows > FEWEST_ROWS and x.shape[0] * T // rows * triton.cdiv(D, block(D)) < PROGRAMS:
        rows //= 2
    segments, NT, N, blocks = _sizes(x, cu_seqlens, rows)
    d_x = x.new_empty(x.shape)
    d_initial = None if initial_state is None else x.new_empty(initial_state.shape)
    partial = x.new_empty((segments, W if bias is None else W + 1, D), dtype=torch.float32)
    constants = {"D": D, "W": W, "BD": block(D), "L": rows, "U": BACKWARD_UNROLL, "SILU": silu, "num_warps": 1}
    tensors = (x, weight, bias, initial_state, cu_seqlens, d_y, d_final)
    start = _start(tensors, x.device, *constants.values())
    with torch.cuda.device_of(x):
        strides = (*x.stride()[:2], *d_y.stride()[:2])
        arguments = (*tensors, d_x, d_initial, partial, *strides, T, NT, N)
        start(short_conv_gradients_kernel, (segments * blocks,), arguments, constants)
    sums = partial.sum(0)
    d_weight = weight.new_empty(D, W).copy_(sums[:W].mT)
    d_bias = None if bias is None else bias.new_empty(D).copy_(sums[W])
    return [d_x, d_weight, d_bias, d_initial]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, silu, _ = arguments
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.silu = silu
        return tuple(_forward(*arguments))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor | None, d_final: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if d_y is None:
            d_y = torch.zeros_like(ctx.saved_tensors[0])
        gradients = _backward(d_y, d_final, *ctx.saved_tensors, ctx.silu)  # type: ignore[call-arg]
        return *gradients, None, None, None


short_conv_forward = torch.library.custom_op("kda_lm::short_conv_forward", _forward, mutates_args=())


@torch.library.custom_op("kda_lm::short_conv_backward", mutates_args=())
def short_conv_backward(
    d_y: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> list[Tensor]:
    """`_backward` with an empty tensor where there is no gradient: operators return no None."""
    gradients = _backward(d_y, d_final, x, weight, bias, initial_state, cu_seqlens, silu)
    return [x.new_empty(0) if z is None else z for z in gradients]


@short_conv_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, initial: Any, cu_seqlens: Any, silu: bool, final: bool) -> list[Tensor]:
    return _results(x, weight, cu_seqlens, final)


@short_conv_backward.register_fake
def _(d_y: Tensor, d_final: Any, x: Tensor, *rest: Any) -> list[Tensor]:
    return [x.new_empty(0 if z is None else z.shape, dtype=(x if z is None else z).dtype) for z in (x, *rest[:3])]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, silu, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.silu = silu


def _operator_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    d_y, d_final = grads[0], grads[1] if len(grads) > 1 else None
    tensors = ctx.saved_tensors
    if d_y is None:
        d_y = torch.zeros_like(tensors[0])
    gradients = short_conv_backward(d_y, d_final, *tensors, ctx.silu)
    named = zip(gradients, tensors, strict=False)
    return *(None if z is None else gradient for gradient, z in named), None, None, None


short_conv_forward.register_autograd(_operator_backward, setup_context=_setup_context)
