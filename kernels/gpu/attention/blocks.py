# mypy: disable-error-code="no-untyped-def"
"""What the attention kernels share: where a program works, which keys a query sees, how blocks are read.

Tensors q [B, T, HQ, D], k and v [B, S, HKV, D] and the output's gradient come with strides, the last axis is
contiguous; o, gradients and what is kept are contiguous. Offsets are int64 up to a block's first row, int32 inside.
"""

import triton
import triton.language as tl

from kernels.gpu.common import INTERPRETED

# Arguments that change from call to call: no kernel is compiled anew for their divisors.
SIZES = ("scale", "T", "S", "N", "window", "blocks", "near", "heads")

FLOOR = tl.constexpr(-1e30)  # of scores: finite, so that rows that see nothing in a block make no NaN


@triton.jit
def locate(
    cu_seqlens, T, N, blocks, near, heads, HEADS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """Row of the batch, head, first token of the sequence, its tokens, first token of the block inside it.

    `near` heads, whose keys and values fit the L2 cache together, are gone through block by block, then the next;
    REVERSED takes the last blocks, whose rows are longest, first.

    Sequence n of packed ones has blocks from cu_seqlens[n] // BLOCK + n on: as many as it needs or one more, and
    T // BLOCK + N in all, without a sum over the sequences. A block that is not needed has no tokens.
    """
    pid = tl.program_id(0)
    group = pid // (near * blocks)
    inside = pid - group * near * blocks
    width = tl.minimum(near, heads - group * near)
    at = group * near + inside % width
    block = inside // width
    if REVERSED:
        block = blocks - 1 - block
    batch = (at // HEADS).to(tl.int64)
    if PACKED:
        n = N * 0
        last = N - 1
        while n < last:
            middle = (n + last + 1) // 2
            before = tl.load(cu_seqlens + middle).to(tl.int32) // BLOCK + middle <= block
            n = tl.where(before, middle, n)
            last = tl.where(before, last, middle - 1)
        first = tl.load(cu_seqlens + n).to(tl.int32)
        length = tl.load(cu_seqlens + n + 1).to(tl.int32) - first
        start = (block - first // BLOCK - n) * BLOCK
        needed = start < length
        length = tl.where(needed, length, 0)
        start = tl.where(needed, start, 0)
    else:
        first = T * 0
        length = T
        start = block * BLOCK
    return batch, at % HEADS, first.to(tl.int64), length, start


@triton.jit
def exp2(x):
    """2ˣ in float32, 0 under 2⁻¹²⁶. Unlike that of common.py free to be moved: pipelined loops for sm_100 take no
    other, and here no second layout needs it."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def visible(position, key, window, WINDOW: tl.constexpr):
    """Whether the token at `position` sees `key`."""
    seen = key <= position
    if WINDOW:
        seen = seen & (key > position - window)
    return seen


@triton.jit
def key_ranges(start, length, past, window, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    """Key blocks of the queries [start, start + BM) after `past` more keys: [low, full) are cut by the window,
    [full, diagonal) seen by every query, [diagonal, end) not by all.
    """
    end = tl.minimum(start + BM, length) + past
    diagonal = tl.minimum((start + past) // BN * BN, end)
    low = start * 0
    full = low
    if WINDOW:
        low = tl.maximum(start + past - window + 1, 0) // BN * BN
        low = tl.minimum(low, diagonal)
        # Up to here the last query does not see every key.
        full = tl.cdiv(tl.maximum(start + BM + past - window, 0), BN) * BN
        full = tl.minimum(tl.maximum(full, low), diagonal)
    return low, full, diagonal, end


@triton.jit
def load_block(base, stride, rows, columns, limit, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """[rows, columns] of a matrix with rows `stride` apart: zero from column D on, and with MASKED from row `limit`."""
    at = base + rows[:, None] * stride + columns[None, :]
    if MASKED and D != DP:
        return tl.load(at, mask=(rows < limit)[:, None] & (columns < D)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    elif D != DP:
        return tl.load(at, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_block(base, stride, rows, columns, limit, x, D: tl.constexpr, DP: tl.constexpr):
    mask = (rows < limit)[:, None]
    if D != DP:
        mask = mask & (columns < D)[None, :]
    tl.store(base + rows[:, None] * stride + columns[None, :], x.to(base.dtype.element_ty), mask=mask)
