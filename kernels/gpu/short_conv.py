"""The short causal depthwise convolution on a GPU: one pass over time forward, one backward.

    p_t = Σ_{i<W} w_i ⊙ x_{t−W+1+i} + b,   y = p or SiLU(p)
    dp  = dy ⊙ SiLU'(p),   dx_t = Σ_{j<W} w_{W−1−j} ⊙ dp_{t+j},   dw_i = Σ_t dp_t ⊙ x_{t−W+1+i},   db = Σ_t dp_t

A program walks through a segment of a sequence with BD channels, U tokens loaded at a time, the last W − 1 rows of x
(and of dp) in registers. So every row is read once but for W − 1 beside each segment, and nothing between x, dy and dx
touches memory; only dw and db are partial sums of each segment, added by torch: the same bits in every run.

The channels of y may be several tensors, as q, k and v are: blocks of channels are counted part by part, so a program
has channels of one part, chooses its pointer and goes on as if there were no other.

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
from kernels.gpu.limits import MOST_PARTS

WIDEST = 128  # channels of a program, which is one warp
FORWARD_ROWS, BACKWARD_ROWS = 64, 256  # tokens of a program; a program's partial sums take W + 1 rows of float32
FEWEST_ROWS = 32
PROGRAMS = 4096  # the backward's, at least, if the segments may still be shorter
UNROLL = 8  # tokens that are loaded together

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
def _of_part(block, first, second, third, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BD: tl.constexpr):
    """Of a value for each part of D0, D1, D2 channels (0: there is none) that of the part of this block of channels."""
    blocks0: tl.constexpr = (D0 + BD - 1) // BD
    blocks1: tl.constexpr = (D1 + BD - 1) // BD
    if D1 == 0:
        return first
    elif D2 == 0:
        return tl.where(block < blocks0, first, second)
    else:
        return tl.where(block < blocks0, first, tl.where(block < blocks0 + blocks1, second, third))


@triton.jit
def _channels(block, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BD: tl.constexpr):
    """Where the part of a block of channels starts, its size, and the block's columns in it."""
    blocks0: tl.constexpr = (D0 + BD - 1) // BD
    blocks1: tl.constexpr = (D1 + BD - 1) // BD
    start = _of_part(block, 0, D0, D0 + D1, D0, D1, D2, BD)
    size = _of_part(block, D0, D1, D2, D0, D1, D2, BD)
    before = _of_part(block, 0, blocks0, blocks0 + blocks1, D0, D1, D2, BD)
    return start, size, (block - before) * BD + tl.arange(0, BD)


@triton.jit
def _mask(position, first, end, columns, live):
    place = tl.zeros_like(columns) + position  # a block: Triton 3.9's interpreter takes no scalar into a mask
    mask = (place >= first) & (place < end)
    if live is not None:
        mask = mask & live
    return mask


@triton.jit
def _load(row, position, first, end, columns, live, INSIDE: tl.constexpr = False):
    """A row of a tensor, zero unless its position is in [first, end), of which INSIDE is sure, and where a channel is
    not `live` (None: all are)."""
    mask = live
    if not INSIDE:
        mask = _mask(position, first, end, columns, live)
    if mask is None:
        return tl.load(row + columns)
    else:
        return tl.load(row + columns, mask=mask, other=0.0)


@triton.jit
def _store(row, value, position, first, end, columns, live, INSIDE: tl.constexpr = False):
    """What `_load` would read."""
    mask = live
    if not INSIDE:
        mask = _mask(position, first, end, columns, live)
    tl.store(row + columns, value.to(row.dtype.element_ty), mask=mask)


@triton.jit
def _input(x_rows, stride, position, states, columns, live, D: tl.constexpr, W: tl.constexpr):
    """Row `position` ≥ 1 − W of a sequence, which may lie in its initial state or be zero."""
    value = _load(x_rows + tl.cast(position, tl.int64) * stride, position, 0, 1 << 30, columns, live)
    if states is not None:
        value += _load(states + (position + W - 1) * D, position, 1 - W, 0, columns, live)
    return value


@triton.jit
def _past(x_rows, stride, begin, states, columns, live, D: tl.constexpr, W: tl.constexpr):
    """The W − 1 rows before `begin`, the oldest first."""
    past = ()
    for i in tl.static_range(W - 1):
        past = past + (_input(x_rows, stride, begin - (W - 1) + i, states, columns, live, D, W).to(tl.float32),)
    return past


@triton.jit
def _taps(weight, bias, columns, live, W: tl.constexpr):
    """The weights of each tap, the oldest input's first, and the bias or zero."""
    taps = ()
    for i in tl.static_range(W):
        taps = taps + (_weight(weight + columns * W + i, live),)
    if bias is None:
        offset = tl.zeros_like(taps[0])
    else:
        offset = _weight(bias + columns, live)
    return taps, offset


@triton.jit
def _weight(places, live):
    if live is None:
        return tl.load(places).to(tl.float32)
    else:
        return tl.load(places, mask=live, other=0.0).to(tl.float32)


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
    y0,
    y1,
    y2,
    final_state,
    batch_stride,
    row_stride,
    T,
    NT,
    N,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
    L: tl.constexpr,
    U: tl.constexpr,
    SILU: tl.constexpr,
):
    D: tl.constexpr = D0 + D1 + D2
    blocks: tl.constexpr = (D0 + BD - 1) // BD + (D1 + BD - 1) // BD + (D2 + BD - 1) // BD
    program = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    start, size, columns = _channels(block, D0, D1, D2, BD)
    live = None
    if D0 % BD + D1 % BD + D2 % BD != 0:
        live = columns < size
    sequence, first, length, begin, end = _segment(program, T, NT, N, cu_seqlens, L)
    if cu_seqlens is None:
        x_rows = x + start + sequence * batch_stride
    else:
        x_rows = x + start + first * row_stride
    states = None
    if initial_state is not None:
        states = initial_state + start + sequence * ((W - 1) * D)
    taps, offset = _taps(weight, bias, start + columns, live, W)

    past = _past(x_rows, row_stride, begin, states, columns, live, D, W)
    x_row = x_rows + tl.cast(begin, tl.int64) * row_stride
    y_row = _of_part(block, y0, y1, y2, D0, D1, D2, BD) + (first + begin) * size
    for t in range(begin, end, U):
        loaded = ()
        for u in tl.static_range(U):
            loaded = loaded + (_load(x_row + u * row_stride, t + u, begin, end, columns, live),)
        for u in tl.static_range(U):
            rows = past + (loaded[u].to(tl.float32),)
            value = _convolved(rows, taps, offset, W)
            if SILU:
                value *= _sigmoid(value)
            _store(y_row + u * size, value, t + u, begin, end, columns, live)
            past = rows[1:]
        x_row += U * row_stride
        y_row += U * size

    if final_state is not None:
        if (end == length) & ((begin < end) | (begin == 0)):  # the sequence's last segment
            # Where it is the initial state, too: a row is read before it is written, by the same thread.
            into = final_state + start + sequence * ((W - 1) * D)
            for i in tl.static_range(W - 1):
                value = _input(x_rows, row_stride, length - (W - 1) + i, states, columns, live, D, W)
                _store(into + i * D, value, i, 0, W - 1, columns, live)


@triton.jit(do_not_specialize=SIZES)
def short_conv_gradients_kernel(
    x,
    weight,
    bias,
    initial_state,
    cu_seqlens,
    d_y0,
    d_y1,
    d_y2,
    d_final,
    d_x,
    d_initial,
    partial,
    batch_stride,
    row_stride,
    batch_stride0,
    row_stride0,
    batch_stride1,
    row_stride1,
    batch_stride2,
    row_stride2,
    T,
    NT,
    N,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
    L: tl.constexpr,
    U: tl.constexpr,
    SILU: tl.constexpr,
):
    """`partial` [segments, W or W + 1 with a bias, D]; numbered strides are those of d_y0, d_y1, d_y2."""
    D: tl.constexpr = D0 + D1 + D2
    blocks: tl.constexpr = (D0 + BD - 1) // BD + (D1 + BD - 1) // BD + (D2 + BD - 1) // BD
    program = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    start, size, columns = _channels(block, D0, D1, D2, BD)
    live = None
    if D0 % BD + D1 % BD + D2 % BD != 0:
        live = columns < size
    sequence, first, length, begin, end = _segment(program, T, NT, N, cu_seqlens, L)
    d_y = _of_part(block, d_y0, d_y1, d_y2, D0, D1, D2, BD)
    d_row_stride = _of_part(block, row_stride0, row_stride1, row_stride2, D0, D1, D2, BD)
    if cu_seqlens is None:
        x_rows = x + start + sequence * batch_stride
        d_y_rows = d_y + sequence * _of_part(block, batch_stride0, batch_stride1, batch_stride2, D0, D1, D2, BD)
    else:
        x_rows = x + start + first * row_stride
        d_y_rows = d_y + first * d_row_stride
    states = None
    if initial_state is not None:
        states = initial_state + start + sequence * ((W - 1) * D)
    taps, offset = _taps(weight, bias, start + columns, live, W)

    sums = ()  # of dw, tap by tap
    ahead = ()  # the last W − 1 rows of dp
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros([BD], tl.float32),)
    for _ in tl.static_range(W - 1):
        ahead = ahead + (tl.zeros([BD], tl.float32),)
    d_offset = tl.zeros([BD], tl.float32)
    past = _past(x_rows, row_stride, begin, states, columns, live, D, W)
    x_row = x_rows + tl.cast(begin, tl.int64) * row_stride
    d_y_row = d_y_rows + tl.cast(begin, tl.int64) * d_row_stride
    d_x_row = d_x + start + (first + begin - (W - 1)) * D
    # dx of a token is complete W − 1 tokens later; those may be the next segment's, or beyond the end.
    stop = end
    if (begin < end) | (begin == 0):
        stop = end + (W - 1)
    # Steps from `inner` to `outer` have all their tokens in the segment, and so have the gradients that they complete.
    HEAD: tl.constexpr = (W - 1 + U - 1) // U * U
    inner = begin + HEAD
    outer = inner + tl.maximum(end - inner, 0) // U * U
    for phase in tl.static_range(3):
        if phase == 0:
            low, high = begin, tl.minimum(inner, stop)
        elif phase == 1:
            low, high = inner, outer
        else:
            low, high = outer, stop
        for t in range(low, high, U):
            loaded = ()
            d_loaded = ()
            for u in tl.static_range(U):
                x_place, d_y_place = x_row + u * row_stride, d_y_row + u * d_row_stride
                loaded = loaded + (_load(x_place, t + u, begin, length, columns, live, phase == 1),)
                d_loaded = d_loaded + (_load(d_y_place, t + u, begin, length, columns, live, phase == 1),)
            for u in tl.static_range(U):
                rows = past + (loaded[u].to(tl.float32),)
                d_p = d_loaded[u].to(tl.float32)
                if SILU:
                    p = _convolved(rows, taps, offset, W)
                    open = _sigmoid(p)
                    d_p *= open * tl.fma(p, 1.0 - open, 1.0)
                owned = d_p
                if phase != 1:
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
                if phase != 1:
                    if d_final is not None:
                        i = position - length + (W - 1)
                        row = d_final + start + (sequence * (W - 1) + i) * D
                        value += _load(row, i, 0, W - 1, columns, live).to(tl.float32)
                _store(d_x_row + u * D, value, position, begin, end, columns, live, phase == 1)
                if phase == 0:
                    if d_initial is not None:
                        i = position + (W - 1)
                        last = tl.where(begin == 0, W - 1, 0)
                        row = d_initial + start + (sequence * (W - 1) + i) * D
                        _store(row, value, i, 0, last, columns, live)
                past = rows[1:]
                ahead = d_rows[1:]
            x_row += U * row_stride
            d_y_row += U * d_row_stride
            d_x_row += U * D

    kinds: tl.constexpr = W if bias is None else W + 1
    into = partial + start + program.to(tl.int64) * (kinds * D)
    for i in tl.static_range(W):
        _store(into + i * D, sums[i], i, 0, W, columns, live)
    if bias is not None:
        _store(into + W * D, d_offset, 0, 0, 1, columns, live)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: Sequence[int],
    silu: bool,
    output_final_state: bool,
    inplace_state: bool,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """As `kernels.short_convolution`, y always in parts; cu_seqlens on x's device. With `inplace_state` the last state
    is where the initial one was, if one program has all tokens of a sequence.
    """
    tensors = (x, weight, bias, initial_state, cu_seqlens)
    if torch.compiler.is_compiling() or traced(x):
        results = short_conv_forward(*tensors, sizes, silu, output_final_state)
    elif torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in tensors):
        results = _ShortConv.apply(*tensors, sizes, silu, output_final_state)
    else:
        alone = cu_seqlens is None and x.shape[1] <= FORWARD_ROWS
        results = _results(x, weight, cu_seqlens, sizes, output_final_state)
        if inplace_state and alone and initial_state is not None and initial_state.is_contiguous():
            results[-1] = initial_state
        _convolve(*tensors, results[: len(sizes)], results[len(sizes)] if output_final_state else None, silu)
    return tuple(results[: len(sizes)]), results[len(sizes)] if output_final_state else None


def block(sizes: Sequence[int]) -> int:
    """Channels of a program."""
    return min(WIDEST, max(32, triton.next_power_of_2(max(sizes))))


def _blocks(sizes: Sequence[int]) -> int:
    return sum(triton.cdiv(size, block(sizes)) for size in sizes)


def _segments(x: Tensor, cu_seqlens: Tensor | None, L: int) -> tuple[int, int, int]:
    """Segments of L tokens in all and in a row of the batch, and sequences."""
    B, T, _ = x.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    per_row = triton.cdiv(T, L)
    return T // L + N if cu_seqlens is not None else B * per_row, per_row, N


def _constants(sizes: Sequence[int], weight: Tensor, L: int, U: int, silu: bool) -> dict[str, Any]:
    D0, D1, D2 = _three(sizes, 0)
    widths = {"D0": D0, "D1": D1, "D2": D2, "W": weight.shape[1], "BD": block(sizes)}
    return {**widths, "L": L, "U": U, "SILU": silu, "num_warps": 1}


def _three(values: Sequence[Any], missing: Any) -> list[Any]:
    """One for each part that the kernels know."""
    return [*values, *[missing] * (MOST_PARTS - len(values))]


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
    sizes: Sequence[int],
    silu: bool,
    output_final_state: bool,
) -> list[Tensor]:
    """The parts of y, and the last state if wanted."""
    results = _results(x, weight, cu_seqlens, sizes, output_final_state)
    state = results[len(sizes)] if output_final_state else None
    _convolve(x, weight, bias, initial_state, cu_seqlens, results[: len(sizes)], state, silu)
    return results


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    parts: Sequence[Tensor],
    state: Tensor | None,
    silu: bool,
) -> None:
    """Write the parts of y, and the last state where there is memory for it."""
    x, weight = _channels_together(x), weight.contiguous()
    bias, initial_state, cu_seqlens = (z if z is None else z.contiguous() for z in (bias, initial_state, cu_seqlens))
    sizes, T = [part.shape[2] for part in parts], x.shape[1]
    segments, NT, N = _segments(x, cu_seqlens, FORWARD_ROWS)
    constants = _constants(sizes, weight, FORWARD_ROWS, UNROLL if T > 1 else 1, silu)
    tensors = (x, weight, bias, initial_state, cu_seqlens)
    start = _start(tensors, x.device, state is None, *constants.values())
    with torch.cuda.device_of(x):  # where Triton launches
        arguments = (*tensors, *_three(parts, None), state, *x.stride()[:2], T, NT, N)
        start(short_conv_kernel, (segments * _blocks(sizes),), arguments, constants)


def _results(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, sizes: Sequence[int], output_final_state: bool
) -> list[Tensor]:
    B, T, D = x.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    parts = [x.new_empty(B, T, size) for size in sizes]
    return [*parts, *([x.new_empty(N, weight.shape[1] - 1, D)] if output_final_state else [])]


def _backward(
    d_parts: Sequence[Tensor],
    d_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> list[Tensor | None]:
    """Gradients of x, weight, bias, initial_state."""
    sizes = [d_y.shape[2] for d_y in d_parts]
    x, weight, d_parts = _channels_together(x), weight.contiguous(), [_channels_together(d_y) for d_y in d_parts]
    d_final, bias, initial_state, cu_seqlens = (
        z if z is None else z.contiguous() for z in (d_final, bias, initial_state, cu_seqlens)
    )
    (T, D), W = x.shape[1:], weight.shape[1]
    rows, blocks = BACKWARD_ROWS, _blocks(sizes)
    while rows > FEWEST_ROWS and x.shape[0] * T // rows * blocks < PROGRAMS:
        rows //= 2
    segments, NT, N = _segments(x, cu_seqlens, rows)
    d_x = x.new_empty(x.shape)
    d_initial = None if initial_state is None else x.new_empty(initial_state.shape)
    partial = x.new_empty((segments, W if bias is None else W + 1, D), dtype=torch.float32)
    constants = _constants(sizes, weight, rows, UNROLL, silu)
    tensors = (x, weight, bias, initial_state, cu_seqlens, *_three(d_parts, None), d_final)
    start = _start(tensors, x.device, *constants.values())
    with torch.cuda.device_of(x):
        strides = [stride for pair in _three([d_y.stride()[:2] for d_y in d_parts], (0, 0)) for stride in pair]
        arguments = (*tensors, d_x, d_initial, partial, *x.stride()[:2], *strides, T, NT, N)
        start(short_conv_gradients_kernel, (segments * blocks,), arguments, constants)
    sums = partial.sum(0)
    d_weight = weight.new_empty(D, W).copy_(sums[:W].mT)
    d_bias = None if bias is None else bias.new_empty(D).copy_(sums[W])
    return [d_x, d_weight, d_bias, d_initial]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        _setup_context(ctx, arguments, [])
        return tuple(_forward(*arguments))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: checkpointed ones are unpacked no second time
        d_parts, d_final = _gradients(tensors[0], ctx.sizes, grads)
        gradients = _backward(d_parts, d_final, *tensors, ctx.silu)  # type: ignore[call-arg]
        return *gradients, None, None, None, None


short_conv_forward = torch.library.custom_op("kda_lm::short_conv_forward", _forward, mutates_args=())


@torch.library.custom_op("kda_lm::short_conv_backward", mutates_args=())
def short_conv_backward(
    d_parts: Sequence[Tensor],
    d_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> list[Tensor]:
    """`_backward` with an empty tensor where there is no gradient: operators return no None."""
    gradients = _backward(d_parts, d_final, x, weight, bias, initial_state, cu_seqlens, silu)
    return [x.new_empty(0) if z is None else z for z in gradients]


@short_conv_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Any, initial: Any, cu_seqlens: Any, sizes: Sequence[int], silu: bool, final: bool
) -> list[Tensor]:
    return _results(x, weight, cu_seqlens, sizes, final)


@short_conv_backward.register_fake
def _(d_parts: Any, d_final: Any, x: Tensor, *rest: Any) -> list[Tensor]:
    return [x.new_empty(0 if z is None else z.shape, dtype=(x if z is None else z).dtype) for z in (x, *rest[:3])]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, sizes, silu, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.sizes, ctx.silu = sizes, silu


def _gradients(x: Tensor, sizes: Sequence[int], grads: Sequence[Tensor | None]) -> tuple[list[Tensor], Tensor | None]:
    """Of the parts of y, zeros (which take no memory) for one that is missing, and of the last state."""
    parts = len(sizes)
    pairs = zip(grads[:parts], sizes, strict=True)
    d_parts = [x.new_zeros(size).expand(*x.shape[:2], size) if d_y is None else d_y for d_y, size in pairs]
    return d_parts, grads[parts] if len(grads) > parts else None


def _operator_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    d_parts, d_final = _gradients(tensors[0], ctx.sizes, grads)
    gradients = short_conv_backward(d_parts, d_final, *tensors, ctx.silu)
    named = zip(gradients, tensors, strict=False)
    return *(None if z is None else gradient for gradient, z in named), None, None, None, None


short_conv_forward.register_autograd(_operator_backward, setup_context=_setup_context)
