# mypy: disable-error-code="no-untyped-def"
"""Softmax attention, backward: two kernels, each with its own sums, so that no program adds to another's memory and the
same inputs give the same bits.

    P_ij = 2^(scale · q_i·k_j − lse_i)       dP_ij = dO_i·v_j       δ_i = Σ o_i·dO_i       dS_ij = P_ij (dP_ij − δ_i)

    d_q     a block of queries, over their keys                            dQ = scale · dS K, and δ for the other
    d_kv    a block of keys, over the queries of all heads of its group    dK = scale · dSᵀ Q,  dV = Pᵀ dO

P and dP are computed in both: 7 products of D FLOPs times 2 for a pair instead of 5, the price of no atomics. d_kv
computes Sᵀ and dPᵀ at once, so that they leave the accumulators as the left operand of the next product.

dS is an operand in the inputs' dtype; for float16 in TF32, which has its 11 bits: dS is as large as the gradient,
which a loss scale moves, and would leave float16's range. P is at most 1, and comes times 2^SHIFT for float16, so that
the small weights of long rows stay normal numbers. With ROUNDED d_kv forms dS from P as rounded for its product, which
takes fewer registers, and computes dP later.
"""

import triton
import triton.language as tl

from kernels.gpu.attention.blocks import SIZES, exp2, key_ranges, load_block, locate, store_block, visible


@triton.jit
def score_dot(d_s, x, acc, PRECISION: tl.constexpr):
    """acc + dS x."""
    if x.dtype == tl.float16:
        return tl.dot(d_s, x.to(tl.float32), acc=acc, input_precision="tf32")
    else:
        return tl.dot(d_s.to(x.dtype), x, acc=acc, input_precision=PRECISION)


@triton.jit
def add_d_q(
    d_q, b_q, b_do, b_lse, delta, k, v, k_t, v_t, begin, end, position, limit, scale, window,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the keys [begin, end) give, of which those from `limit` on do not exist."""
    r = tl.arange(0, BN)
    c = tl.arange(0, DP)
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        at = tl.cast(start, tl.int64)
        b_k = load_block(k + at * k_t, k_t, r, c, limit - start, D, DP, MASKED)
        b_v = load_block(v + at * v_t, v_t, r, c, limit - start, D, DP, MASKED)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        d_p = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        p = exp2(s * scale - b_lse[:, None])
        if MASKED:
            p = tl.where(visible(position[:, None], (start + r)[None, :], window, WINDOW), p, 0.0)
        d_q = score_dot(p * (d_p - delta[:, None]), b_k, d_q, PRECISION)
    return d_q


@triton.jit(do_not_specialize=(*SIZES, "factor"))
def attention_d_q_kernel(
    q,  # [B, T, HQ, D]
    k,  # [B, S, HKV, D]
    v,
    o,  # [B, T, HQ, D]
    d_o,
    lse,  # [B, HQ, T]
    delta,  # [B, HQ, T], written
    d_q,  # [B, T, HQ, D], written
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
    d_b,
    d_t,
    d_h,
    scale,
    factor,  # scale without log2(e)
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
    d_o += batch * d_b + (first + start) * d_t + head.to(tl.int64) * d_h
    k += batch * k_b + first * k_t + key_head * k_h
    v += batch * v_b + first * v_t + key_head * v_h
    low, full, diagonal, end = key_ranges(start, length, past, window, BM, BN, WINDOW)
    position = start + past + r
    limit = length + past
    row = ((batch * T + first + start) * HQ + head) * D
    at = (batch * HQ + head) * T + first + start

    b_do = load_block(d_o, d_t, r, c, length - start, D, DP, MASKED=True)
    b_o = load_block(o + row, HQ * D, r, c, length - start, D, DP, MASKED=True)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    tl.store(delta + at + r, b_delta, mask=r < length - start)
    b_lse = tl.load(lse + at + r, mask=r < length - start, other=0.0)
    b_q = load_block(q, q_t, r, c, length - start, D, DP, MASKED=True)
    acc = tl.zeros((BM, DP), tl.float32)
    acc = add_d_q(
        acc, b_q, b_do, b_lse, b_delta, k, v, k_t, v_t, full, diagonal, position, limit, scale, window,
        D, DP, BN, WINDOW, PRECISION, False, STAGES,
    )  # fmt: skip
    if WINDOW:
        acc = add_d_q(
            acc, b_q, b_do, b_lse, b_delta, k, v, k_t, v_t, low, full, position, limit, scale, window,
            D, DP, BN, WINDOW, PRECISION, True, EDGE,
        )  # fmt: skip
    acc = add_d_q(
        acc, b_q, b_do, b_lse, b_delta, k, v, k_t, v_t, diagonal, end, position, limit, scale, window,
        D, DP, BN, WINDOW, PRECISION, True, EDGE,
    )  # fmt: skip
    store_block(d_q + row, HQ * D, r, c, length - start, acc * factor, D, DP)


@triton.jit
def add_d_kv(
    d_k, d_v, b_k, b_v, q, d_o, lse, delta, q_t, d_t, begin, end, key, past, limit, scale, window,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
    ROUNDED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the queries [begin, end) give, of which those from `limit` on do not exist."""
    r = tl.arange(0, BM)
    c = tl.arange(0, DP)
    for start in tl.range(begin, end, BM, num_stages=STAGES):
        at = tl.cast(start, tl.int64)
        b_q = load_block(q + at * q_t, q_t, r, c, limit - start, D, DP, MASKED)
        b_do = load_block(d_o + at * d_t, d_t, r, c, limit - start, D, DP, MASKED)
        if MASKED:
            b_lse = tl.load(lse + at + r, mask=r < limit - start, other=0.0)
            b_delta = tl.load(delta + at + r, mask=r < limit - start, other=0.0)
        else:
            b_lse = tl.load(lse + at + r)
            b_delta = tl.load(delta + at + r)
        s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BM]
        if not ROUNDED:
            d_p = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        p = exp2(s * scale - (b_lse - SHIFT)[None, :])
        if MASKED:
            p = tl.where(visible((start + past + r)[None, :], key[:, None], window, WINDOW), p, 0.0)
        d_v = tl.dot(p.to(b_do.dtype), b_do, acc=d_v, input_precision=PRECISION)
        if ROUNDED:
            d_p = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
            p = p.to(b_do.dtype).to(tl.float32)
        d_k = score_dot(p * (d_p - b_delta[None, :]), b_q, d_k, PRECISION)
    return d_k, d_v


@triton.jit(do_not_specialize=(*SIZES, "factor"))
def attention_d_kv_kernel(
    q,  # [B, T, HQ, D]
    k,  # [B, S, HKV, D]
    v,
    d_o,  # [B, T, HQ, D]
    lse,  # [B, HQ, T]
    delta,
    d_k,  # [B, S, HKV, D], written
    d_v,
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
    d_b,
    d_t,
    d_h,
    scale,
    factor,
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
    EVEN: tl.constexpr,  # T is a multiple of BM
    SHIFT: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE: tl.constexpr,
):
    batch, head, first, length, start = locate(cu_seqlens, S, N, blocks, near, heads, HKV, BN, PACKED, REVERSED=False)
    past = S - T
    r = tl.arange(0, BN)
    c = tl.arange(0, DP)
    k += batch * k_b + (first + start) * k_t + head.to(tl.int64) * k_h
    v += batch * v_b + (first + start) * v_t + head.to(tl.int64) * v_h
    q += batch * q_b + first * q_t
    d_o += batch * d_b + first * d_t
    # Queries see the block from its first key on: [low, full) not all of it, [full, tail) all, [tail, end) is cut by
    # the window or by the sequence's end.
    queries = length - past
    low = tl.minimum(tl.maximum(start - past, 0) // BM * BM, queries)
    full = tl.cdiv(tl.maximum(tl.minimum(start + BN, length) - 1 - past, 0), BM) * BM
    end = queries
    tail = queries // BM * BM
    if WINDOW:
        end = tl.maximum(tl.minimum(queries, start + BN - 1 + window - past), low)
        tail = tl.maximum(tl.minimum(tail, (start + window - past) // BM * BM), low)
    full = tl.minimum(full, end)
    tail = tl.maximum(tail, full)

    b_k = load_block(k, k_t, r, c, length - start, D, DP, MASKED=True)
    b_v = load_block(v, v_t, r, c, length - start, D, DP, MASKED=True)
    acc_k = tl.zeros((BN, DP), tl.float32)
    acc_v = tl.zeros((BN, DP), tl.float32)
    for member in range(HQ // HKV):
        query_head = (head * (HQ // HKV) + member).to(tl.int64)
        at = (batch * HQ + query_head) * T + first
        acc_k, acc_v = add_d_kv(
            acc_k, acc_v, b_k, b_v, q + query_head * q_h, d_o + query_head * d_h, lse + at, delta + at, q_t, d_t,
            full, tail, start + r, past, queries, scale, window,
            D, DP, BM, WINDOW, SHIFT, ROUNDED, PRECISION, False, STAGES,
        )  # fmt: skip
        acc_k, acc_v = add_d_kv(
            acc_k, acc_v, b_k, b_v, q + query_head * q_h, d_o + query_head * d_h, lse + at, delta + at, q_t, d_t,
            low, full, start + r, past, queries, scale, window,
            D, DP, BM, WINDOW, SHIFT, ROUNDED, PRECISION, True, EDGE,
        )  # fmt: skip
        if WINDOW or not EVEN:
            acc_k, acc_v = add_d_kv(
                acc_k, acc_v, b_k, b_v, q + query_head * q_h, d_o + query_head * d_h, lse + at, delta + at, q_t, d_t,
                tail, end, start + r, past, queries, scale, window,
                D, DP, BM, WINDOW, SHIFT, ROUNDED, PRECISION, True, EDGE,
            )  # fmt: skip
    row = ((batch * S + first + start) * HKV + head) * D
    store_block(d_k + row, HKV * D, r, c, length - start, acc_k * (factor * 2.0**-SHIFT), D, DP)
    store_block(d_v + row, HKV * D, r, c, length - start, acc_v * 2.0**-SHIFT, D, DP)
