# mypy: disable-error-code="no-untyped-def"
"""The chain of states over the chunks of a sequence, forward (with the output) and in reverse (with dV).

    forward                                       reverse, dS the gradient of the state that leaves
    E  = W β (V − K̃ S)    E = V (additive)        dE = Pᵀ dO + K̄ dS
    O  = Q̃ S + P E                                dV = β Wᵀ dE
    S  ← 2^(G_C) ⊙ S + K̄ᵀ E                       dS ← 2^(G_C) ⊙ dS + Q̃ᵀ dO − K̃ᵀ dV

Q̃, K̃, K̄ are q, k with their factors of gate and norm: made by `prepare` for a channel decay, else one number a token
that is applied to the other operand or to the product.

One program per sequence, value head and slice of BV value columns. The state lies transposed, [BV, K], in float32
registers; every accumulator becomes the next product's register operand. A chunk costs 6 C (K + C) BV FLOPs forward
and as many in reverse (the product with W is done twice, see exact_dot), 2 C (2 K + C) BV for the additive rule.
"""

import triton
import triton.language as tl

from kernels.gpu.common import SIZES, exp2, load_norms, load_rows, store_rows


@triton.jit
def sequence(n, T, NT, cu_seqlens, offsets, C: tl.constexpr, PACKED: tl.constexpr):
    """First token, tokens, first chunk and chunks of sequence n."""
    if PACKED:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - first).to(tl.int32)
        chunk = tl.load(offsets + n).to(tl.int32)
        count = tl.load(offsets + n + 1).to(tl.int32) - chunk
    else:
        first = n.to(tl.int64) * T
        length = T
        chunk = n * NT
        count = NT
    return first, length, chunk, count


@triton.jit
def exact_dot(a, b, acc, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a @ b without rounding the float32 a to OPERAND: in the chain of states such an error would stay."""
    if a.dtype == OPERAND:
        return tl.dot(a, b, acc=acc, input_precision=PRECISION)
    else:
        high = a.to(OPERAND)
        return tl.dot((a - high).to(OPERAND), b, acc=tl.dot(high, b, acc=acc))


@triton.jit
def factors(G, norms, tile, scale, C: tl.constexpr, GATED: tl.constexpr, L2NORM: tl.constexpr):
    """Without a channel decay: what a token's q, the k of its error and of its write are multiplied by, [1, C], and the
    state of a whole chunk; numbers where all tokens have the same.
    """
    r = tl.arange(0, C)
    reading = scale
    entering = 1.0
    leaving = 1.0
    kept = 1.0
    if L2NORM:
        norm_q, norm_k = load_norms(norms, tile, C, L2NORM)
        reading = norm_q[None, :] * scale
        entering = norm_k[None, :]
        leaving = entering
    if GATED:
        b_G = tl.load(G + tile * C + r)
        end = tl.load(G + tile * C + C - 1)
        power = exp2(b_G.to(tl.float32))[None, :]
        reading = power * reading
        entering = power * entering
        leaving = exp2((end - b_G).to(tl.float32))[None, :] * leaving
        kept = exp2(end.to(tl.float32))
    return reading, entering, leaving, kept


@triton.jit
def load_state(state, columns, KP: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """[columns of V, KP] of a state [K, V]."""
    c = tl.arange(0, KP)
    mask = (columns < V)[:, None] & (c < K)[None, :]
    return tl.load(state + c[None, :] * V + columns[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_state(state, columns, x, KP: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    c = tl.arange(0, KP)
    mask = (columns < V)[:, None] & (c < K)[None, :]
    tl.store(state + c[None, :] * V + columns[:, None], x, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def scan_kernel(
    q,  # q_in [tiles, C, KP] for a channel decay, else q [B, T, H, K]; k_in and k_out likewise
    k_in,
    k_out,
    total,  # [tiles, KP], channel decay
    G,  # [tiles, C], scalar decay
    norms,  # [tiles, 2, C]: 1/‖q‖, 1/‖k‖
    v,  # [B, T, HV, V]
    strengths,  # [tiles, C]: β, delta rule
    W,  # [tiles, C, C]
    P,
    o,  # [B, T, HV, V], written; also what follows
    S,  # [tiles, VP, KP], KEEP: the state that enters each chunk
    E,  # [tiles, C, VP], KEEP and delta rule
    initial,  # [N, HV, K, V]
    final,
    cu_seqlens,
    offsets,
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNEL: tl.constexpr,
    GATED: tl.constexpr,
    L2NORM: tl.constexpr,
    KEEP: tl.constexpr,
    INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, length, chunk, count = sequence(n, T, NT, cu_seqlens, offsets, C, PACKED)
    r = tl.arange(0, C)
    c = tl.arange(0, KP)
    vc = tl.program_id(1) * BV + tl.arange(0, BV)
    at_k = r[:, None] * KP + c[None, :]
    at_c = r[:, None] * C + r[None, :]
    at_state = vc[:, None] * KP + c[None, :]
    state_at = tl.program_id(0).to(tl.int64) * K * V

    if INITIAL:
        state = load_state(initial + state_at, vc, KP, K, V)
    else:
        state = tl.zeros((BV, KP), tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        tile = (chunk + i).to(tl.int64) * HV + head
        token = first + i * C
        live = r < (C if FULL else length - i * C)
        b_v = load_rows(v + (token * HV + head) * V, HV * V, r, vc, live, V, VP)
        b_P = tl.load(P + tile * C * C + at_c)
        if DELTA:
            b_beta = tl.load(strengths + tile * C + r)[None, :]
        b_state = state.to(OPERAND)
        if KEEP:
            tl.store(S + tile * VP * KP + at_state, b_state)
        if CHANNEL:
            b_q = tl.load(q + tile * C * KP + at_k)
            b_k = tl.load(k_out + tile * C * KP + at_k)
            b_total = tl.load(total + tile * KP + c)
        else:
            at = (token * H + head // (HV // H)) * K
            b_q = load_rows(q + at, H * K, r, c, live, K, KP).to(OPERAND)
            b_k = load_rows(k_out + at, H * K, r, c, live, K, KP).to(OPERAND)
            reading, entering, leaving, kept = factors(G, norms, tile, scale, C, GATED, L2NORM)

        if DELTA:
            b_W = tl.load(W + tile * C * C + at_c)
            if CHANNEL:
                b_k_in = tl.load(k_in + tile * C * KP + at_k)
                error = tl.dot(b_state, tl.trans(b_k_in), input_precision=PRECISION)
            else:
                error = tl.dot(b_state, tl.trans(b_k), input_precision=PRECISION) * entering
            error = tl.trans(b_v).to(tl.float32) * b_beta - error * b_beta
            error = exact_dot(error, tl.trans(b_W), None, OPERAND, PRECISION)  # [BV, C]
            b_E = error.to(OPERAND)
            if KEEP:
                tl.store(E + tile * C * VP + r[:, None] * VP + vc[None, :], tl.trans(b_E))
        else:
            b_E = tl.trans(b_v).to(OPERAND)
        b_o = tl.dot(b_state, tl.trans(b_q), input_precision=PRECISION)
        if CHANNEL:
            write = b_E
            state *= b_total[None, :]
        else:
            b_o *= reading
            if GATED:
                state *= kept
                write = (error * leaving if DELTA else b_E * leaving).to(OPERAND)
            elif DELTA:
                write = error * leaving  # unrounded: what a state never forgets, errors of writes too, adds up
            else:
                write = (b_E * leaving).to(OPERAND)
        state = exact_dot(write, b_k, state, OPERAND, PRECISION)
        b_o = tl.dot(b_E, tl.trans(b_P), acc=b_o, input_precision=PRECISION)
        store_rows(o + (token * HV + head) * V, HV * V, r, vc, live, tl.trans(b_o.to(o.dtype.element_ty)), V, VP)
    store_state(final + state_at, vc, state, KP, K, V)


@triton.jit(do_not_specialize=SIZES)
def reverse_scan_kernel(
    q,  # as in scan_kernel
    k_in,
    k_out,
    total,
    G,
    norms,
    strengths,
    W,
    P,
    d_o,  # [B, T, HV, V]
    d_v,  # [B, T, HV, V], written; also what follows
    dS,  # [tiles, VP, KP]: gradient of the state that leaves each chunk
    d_final,  # [N, HV, K, V]
    d_initial,
    cu_seqlens,
    offsets,
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNEL: tl.constexpr,
    GATED: tl.constexpr,
    L2NORM: tl.constexpr,
    FINAL: tl.constexpr,
    INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, length, chunk, count = sequence(n, T, NT, cu_seqlens, offsets, C, PACKED)
    r = tl.arange(0, C)
    c = tl.arange(0, KP)
    vc = tl.program_id(1) * BV + tl.arange(0, BV)
    at_k = r[:, None] * KP + c[None, :]
    at_c = r[:, None] * C + r[None, :]
    at_state = vc[:, None] * KP + c[None, :]
    state_at = tl.program_id(0).to(tl.int64) * K * V

    if FINAL:
        d_state = load_state(d_final + state_at, vc, KP, K, V)
    else:
        d_state = tl.zeros((BV, KP), tl.float32)
    for j in tl.range(0, count, num_stages=STAGES):
        i = count - 1 - j
        tile = (chunk + i).to(tl.int64) * HV + head
        token = first + i * C
        live = r < (C if FULL else length - i * C)
        b_do = tl.trans(load_rows(d_o + (token * HV + head) * V, HV * V, r, vc, live, V, VP)).to(OPERAND)
        b_P = tl.load(P + tile * C * C + at_c)
        b_dS = d_state.to(OPERAND)
        tl.store(dS + tile * VP * KP + at_state, b_dS)
        if CHANNEL:
            b_q = tl.load(q + tile * C * KP + at_k)
            b_k = tl.load(k_out + tile * C * KP + at_k)
            b_total = tl.load(total + tile * KP + c)
            d_E = tl.dot(b_dS, tl.trans(b_k), input_precision=PRECISION)
        else:
            at = (token * H + head // (HV // H)) * K
            b_q = load_rows(q + at, H * K, r, c, live, K, KP).to(OPERAND)
            b_k = load_rows(k_out + at, H * K, r, c, live, K, KP).to(OPERAND)
            reading, entering, leaving, kept = factors(G, norms, tile, scale, C, GATED, L2NORM)
            d_E = tl.dot(b_dS, tl.trans(b_k), input_precision=PRECISION) * leaving
        d_E = tl.dot(b_do, b_P, acc=d_E, input_precision=PRECISION)
        if DELTA:
            b_W = tl.load(W + tile * C * C + at_c)
            d_write = exact_dot(d_E, b_W, None, OPERAND, PRECISION) * tl.load(strengths + tile * C + r)[None, :]
        else:
            d_write = d_E
        store_rows(d_v + (token * HV + head) * V, HV * V, r, vc, live, tl.trans(d_write.to(OPERAND)), V, VP)
        if CHANNEL:
            d_state *= b_total[None, :]
            d_state = tl.dot(b_do, b_q, acc=d_state, input_precision=PRECISION)
            if DELTA:
                b_k_in = tl.load(k_in + tile * C * KP + at_k)
                d_state = tl.dot((-d_write).to(OPERAND), b_k_in, acc=d_state, input_precision=PRECISION)
        else:
            if GATED:
                d_state *= kept
            d_state = tl.dot((b_do * reading).to(OPERAND), b_q, acc=d_state, input_precision=PRECISION)
            if DELTA:
                d_error = d_write * -entering
                if GATED:
                    d_error = d_error.to(OPERAND)
                d_state = exact_dot(d_error, b_k, d_state, OPERAND, PRECISION)
    if INITIAL:
        store_state(d_initial + state_at, vc, d_state, KP, K, V)
