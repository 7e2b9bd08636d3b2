# mypy: disable-error-code="no-untyped-def"
"""Softmax attention, forward: one program per block of queries and query head.

    s_ij = scale · q_i·k_j      m_i = max_j s_ij      l_i = Σ_j 2^(s_ij − m_i)      o_i = Σ_j 2^(s_ij − m_i) v_j / l_i

over the keys that i sees, block by block with m, l and o rescaled as m grows. `scale` comes times log2(e), so that
powers are of two. Kept for the backward: the base-2 log-sum-exp m + log2(l), float32 [B, HQ, T].

Blocks that every query of the program sees whole have no masks and a pipelined loop; those on the diagonal and at the
window's edge have their own. 4 D FLOPs for a pair of query and key.
"""

import triton
import triton.language as tl

from kernels.gpu.attention.blocks import FLOOR, SIZES, exp2, key_ranges, load_block, locate, store_block, visible


@triton.jit
def attend(
    acc, peak, total, b_q, k, v, k_t, v_t, begin, end, position, limit, scale, window,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, NEGATIVE: tl.constexpr,
    SHIFT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Let the queries at `position` read the keys [begin, end), of which those from `limit` on do not exist."""
    r = tl.arange(0, BN)
    c = tl.arange(0, DP)
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        at = tl.cast(start, tl.int64)
        b_k = load_block(k + at * k_t, k_t, r, c, limit - start, D, DP, MASKED)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if NEGATIVE:
            s = -s
        if MASKED:
            seen = visible(position[:, None], (start + r)[None, :], window, WINDOW)
            s = tl.where(seen, s, FLOOR)
        highest = tl.maximum(peak, tl.max(s, 1) * scale)
        p = exp2(s * scale - (highest - SHIFT)[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)
        faded = exp2(peak - highest)
        total = total * faded + tl.sum(p, 1)
        acc = acc * faded[:, None]
        b_v = load_block(v + at * v_t, v_t, r, c, limit - start, D, DP, MASKED)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc=acc, input_precision=PRECISION)
        peak = highest
    return acc, peak, total


@triton.jit(do_not_specialize=SIZES)
def attention_forward_kernel(
    q,  # [B, T, HQ, D]
    k,  # [B, S, HKV, D]
    v,
    o,  # [B, T, HQ, D], written
    lse,  # [B, HQ, T], written
    cu_seqlens,
    q_b,  # strides
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    scale,
    T,
    S,
    N,
    window,
    blocks,
    near,
    heads,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    PACKED: tl.constexpr,
    NEGATIVE: tl.constexpr,
    SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE: tl.constexpr,
):
    batch, head, first, length, start = locate(cu_seqlens, T, N, blocks, near, heads, HQ, BM, PACKED, REVERSED=True)
    past = S - T
    r = tl.arange(0, BM)
    c = tl.arange(0, DP)
    key_head = (head // (HQ // HKV)).to(tl.int64)
    q += batch * q_b + (first + start) * q_t + head.to(tl.int64) * q_h
    k += batch * k_b + first * k_t + key_head * k_h
    v += batch * v_b + first * v_t + key_head * v_h
    low, full, diagonal, end = key_ranges(start, length, past, window, BM, BN, WINDOW)
    position = start + past + r
    limit = length + past

    b_q = load_block(q, q_t, r, c, length - start, D, DP, MASKED=True)
    acc = tl.zeros((BM, DP), tl.float32)
    peak = tl.full((BM,), FLOOR, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc, peak, total = attend(
        acc, peak, total, b_q, k, v, k_t, v_t, full, diagonal, position, limit, scale, window,
        D, DP, BN, WINDOW, NEGATIVE, SHIFT, PRECISION, False, STAGES,
    )  # fmt: skip
    if WINDOW:
        acc, peak, total = attend(
            acc, peak, total, b_q, k, v, k_t, v_t, low, full, position, limit, scale, window,
            D, DP, BN, WINDOW, NEGATIVE, SHIFT, PRECISION, True, EDGE,
        )  # fmt: skip
    acc, peak, total = attend(
        acc, peak, total, b_q, k, v, k_t, v_t, diagonal, end, position, limit, scale, window,
        D, DP, BN, WINDOW, NEGATIVE, SHIFT, PRECISION, True, EDGE,
    )  # fmt: skip

    total = tl.where(total > 0.0, total, 1.0)  # of rows that do not exist
    row = batch * T + first + start
    store_block(o + (row * HQ + head) * D, HQ * D, r, c, length - start, acc / total[:, None], D, DP)
    at = (batch * HQ + head) * T + first + start
    tl.store(lse + at + r, peak - SHIFT + tl.log2(total), mask=r < length - start)
