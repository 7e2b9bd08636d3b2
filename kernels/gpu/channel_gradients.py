# mypy: disable-error-code="no-untyped-def"
"""Gradients of q, k and g under a channel decay: see pair_gradients.py for the equations, pairs.py for across and near.

As there, tokens of the left half meet at its first token and those of the right half, which also meet all earlier ones,
at theirs. So one operand serves a token in all its products as the later one of a pair, 2^(G_i − G_a) q̂ or k̂, and two
as the earlier one, 2^(G_a − G_j) k̂, for the two a. dG takes both from the same rounded operands.

One program per chunk, value head and some key channels. Most of its time it waits for memory, and it is short of
registers.
"""

import triton
import triton.language as tl

from kernels.gpu.common import (
    INTERPRETED,
    SIZES,
    decayed,
    exp2,
    gate_gradient,
    load_norms,
    load_row,
    load_rows,
    locate,
    store_rows,
)
from kernels.gpu.pair_gradients import load_pairs
from kernels.gpu.pairs import earlier_power, later_power


@triton.jit
def sums_to_end(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Σ_{j ≥ i} x_j over the rows of x, as a product with ones: Triton's scan takes several times the instructions."""
    C: tl.constexpr = x.shape[0]
    r = tl.arange(0, C)
    ones = tl.where(r[:, None] <= r[None, :], 1.0, 0.0).to(OPERAND)
    if x.dtype == OPERAND:
        return tl.dot(ones, x, input_precision=PRECISION)
    else:
        high = x.to(OPERAND)
        return tl.dot(ones, (x - high).to(OPERAND), acc=tl.dot(ones, high))


@triton.jit
def add_level(
    b_dq,
    b_dk,
    b_dG,
    b_Z,
    b_M,
    q,
    k,
    G,
    anchor,
    right,
    r,
    c,
    live,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    DELTA: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients with those of the pairs b_Z, b_M between left and `right` halves that meet at `anchor`."""
    as_query = tl.where(right, 1.0, 0.0)[:, None]
    decay = exp2(-tl.abs((load_rows(G, HV * K, r, c, live, K, KP) - anchor).to(tl.float32)))
    l_k = decayed(load_rows(k, H * K, r, c, live, K, KP), decay, OPERAND)
    l_x = decayed(load_rows(tl.where(right, q, k)[:, None], H * K, r, c, live, K, KP), decay, OPERAND)
    x = tl.dot(b_Z, l_x, input_precision=PRECISION)
    sign = tl.where(right, 1.0, -1.0)[:, None]
    b_dG += l_x * (x * sign)
    x *= decay
    b_dq += x * as_query
    b_dk += x * (1.0 - as_query)
    if DELTA:
        x = tl.dot(b_M, l_k, input_precision=PRECISION)
        b_dG += l_k * (x * sign)
        b_dk += x * decay
    return b_dq, b_dk, b_dG


@triton.jit
def settled(x):
    """x, computed here: LLVM would keep what it is computed from in registers until x is used."""
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def earlier_keys(
    k,
    G,
    drop,
    right: tl.constexpr,
    r,
    c,
    live,
    length,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Keys as the later tokens of the left or right half meet them, and the powers that make them so."""
    HALF: tl.constexpr = r.shape[0] // 2
    anchor = load_row(G, HV * K, HALF if right else 0, c, length, K)
    power = earlier_power(anchor[None, :], load_rows(G, HV * K, r, c, live, K, KP), LIMIT, SHIFT)
    # A token of the same half that is not near meets no other by this way.
    there = (tl.load(drop + r) <= LIMIT) | ((r >= HALF) != right)
    power = tl.where(there[:, None], power, 0.0)
    return decayed(load_rows(k, H * K, r, c, live, K, KP), power, OPERAND), power


@triton.jit
def leaving_rows(
    v,
    E,
    dS,
    rows,
    tile,
    r,
    vc,
    c,
    live,
    HV: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    KP: tl.constexpr,
    DELTA: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """E of a chunk and the gradient of the state that leaves it, for the value channels vc."""
    if DELTA:
        b_E = tl.load(E + tile * r.shape[0] * VP + r[:, None] * VP + vc[None, :])
    else:
        b_E = load_rows(v + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
    return b_E, tl.load(dS + tile * VP * KP + vc[:, None] * KP + c[None, :])


@triton.jit(do_not_specialize=SIZES)
def channel_gradients_kernel(
    q,  # [B, T, H, K]
    k,
    g,  # [B, T, HV, K], with GATE
    A_log,
    dt_bias,
    G,  # [B, T, HV, K]; may be the memory of d_g
    drop,  # [tiles, C]
    v,  # [B, T, HV, V], additive rule
    d_o,
    d_v,
    E,  # [tiles, C, VP], delta rule
    S,  # [tiles, VP, KP]
    dS,
    norms,
    Z,  # [tiles, C, C]
    M,
    Z_near,  # [tiles, C, C/2]
    M_near,
    diagonal,
    dots,
    d_q,  # [B, T, HV, K], written; also what follows
    d_k,
    d_g,
    d_rate,  # [tiles, KP], with GATE: Σ over the chunk of the gradient of A_log
    d_bias,  # [tiles, KP], with GATE
    chunks,
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    LEVELS: tl.constexpr,
    DELTA: tl.constexpr,
    L2NORM: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = (tl.program_id(0) // (KP // BK)).to(tl.int64)
    head = (tile % HV).to(tl.int32)
    first, length = locate((tile // HV).to(tl.int32), T, NT, chunks, C, PACKED)
    r = tl.arange(0, C)
    live = r < length
    c = (tl.program_id(0) % (KP // BK)) * BK + tl.arange(0, BK)
    q += (first * H + head // (HV // H)) * K
    k += (first * H + head // (HV // H)) * K
    G += (first * HV + head) * K
    drop += tile * C
    rows = (first * HV + head) * V
    HALF: tl.constexpr = C // 2
    right = r >= HALF
    left = r < HALF

    # The pairs of later tokens (rows) in one half, and transposed. All are asked for before the first product: each
    # would make the program wait again. What else is read again and again comes from the cache, and takes no registers.
    in_left = left[:, None] & left[None, :]
    Z_left = load_pairs(Z, Z_near, tile, r < 0, in_left)
    Z_right = load_pairs(Z, Z_near, tile, r < 0, right[:, None] & (r >= 0)[None, :])
    Z_left_t = load_pairs(Z, Z_near, tile, left, in_left)
    Z_right_t = load_pairs(Z, Z_near, tile, right, right[None, :] & (r >= 0)[:, None])
    if DELTA:
        M_left = load_pairs(M, M_near, tile, r < 0, in_left)
        M_right = load_pairs(M, M_near, tile, r < 0, right[:, None] & (r >= 0)[None, :])
        M_left_t = load_pairs(M, M_near, tile, left, in_left)
        M_right_t = load_pairs(M, M_near, tile, right, right[None, :] & (r >= 0)[:, None])

    # As later tokens: with the state that enters, then with earlier tokens. 2^(G_i) is applied in two steps: up to the
    # first token of the half, and `down` from there.
    b_dq = tl.zeros((C, BK), tl.float32)
    b_dk = tl.zeros((C, BK), tl.float32)
    d_end = tl.zeros((BK,), tl.float32)
    for start in tl.range(0, VP, BV, num_stages=STAGES):
        vc = start + tl.arange(0, BV)
        at_state = tile * VP * KP + vc[:, None] * KP + c[None, :]
        b_S = tl.load(S + at_state)
        b_do = load_rows(d_o + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
        b_dq = tl.dot(b_do, b_S, acc=b_dq, input_precision=PRECISION)
        if DELTA:
            b_dv = load_rows(d_v + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
            b_dk = tl.dot(b_dv, b_S, acc=b_dk, input_precision=PRECISION)
        d_end += tl.sum(b_S.to(tl.float32) * tl.load(dS + at_state).to(tl.float32), 0)
    norm_q, norm_k = load_norms(norms, tile, C, L2NORM)
    to_left = load_row(G, HV * K, 0, c, length, K)[None, :]
    to_right = load_row(G, HV * K, HALF, c, length, K)[None, :]
    entering = tl.where(right[:, None], exp2(to_right.to(tl.float32) - SHIFT), exp2(to_left.to(tl.float32) - SHIFT))
    b_dq *= entering * (norm_q * scale)[:, None]
    b_dk *= entering * -norm_k[:, None]
    k_left, _ = earlier_keys(k, G, drop, False, r, c, live, length, H, HV, K, KP, LIMIT, SHIFT, OPERAND)
    b_dq = tl.dot(Z_left, k_left, acc=b_dq, input_precision=PRECISION)
    if DELTA:
        b_dk = tl.dot(M_left, k_left, acc=b_dk, input_precision=PRECISION)
    k_right, _ = earlier_keys(k, G, drop, True, r, c, live, length, H, HV, K, KP, LIMIT, SHIFT, OPERAND)
    b_dq = tl.dot(Z_right, k_right, acc=b_dq, input_precision=PRECISION)
    if DELTA:
        b_dk = tl.dot(M_right, k_right, acc=b_dk, input_precision=PRECISION)
    to_left = load_row(G, HV * K, 0, c, length, K)[None, :]
    to_right = load_row(G, HV * K, HALF, c, length, K)[None, :]
    b_G = load_rows(G, HV * K, r, c, live, K, KP)
    down = later_power((b_G - tl.where(right[:, None], to_right, to_left)).to(tl.float32), SHIFT)
    q_down = decayed(load_rows(q, H * K, r, c, live, K, KP), down, OPERAND)
    b_dG = q_down * b_dq
    b_dq = settled(b_dq * down)
    k_down = q_down
    if DELTA:
        k_down = decayed(load_rows(k, H * K, r, c, live, K, KP), down, OPERAND)
        b_dG += k_down * b_dk
        b_dk = settled(b_dk * down)
    b_dG = settled(b_dG)

    if BV == VP:  # asked for now, needed at the end
        b_E, b_dS = leaving_rows(v, E, dS, rows, tile, r, tl.arange(0, BV), c, live, HV, V, VP, KP, DELTA, OPERAND)

    # As earlier tokens: with later ones of the left half, of the right half, and with the state that leaves.
    written = tl.dot(Z_left_t, q_down, input_precision=PRECISION)
    if DELTA:
        written = tl.dot(M_left_t, k_down, acc=written, input_precision=PRECISION)
    k_left, power = earlier_keys(k, G, drop, False, r, c, live, length, H, HV, K, KP, LIMIT, SHIFT, OPERAND)
    b_dG = settled(b_dG - k_left * written)
    b_dk = settled(b_dk + power * written)
    written = tl.dot(Z_right_t, q_down, input_precision=PRECISION)
    if DELTA:
        written = tl.dot(M_right_t, k_down, acc=written, input_precision=PRECISION)
    k_right, power = earlier_keys(k, G, drop, True, r, c, live, length, H, HV, K, KP, LIMIT, SHIFT, OPERAND)
    b_dG = settled(b_dG - k_right * written)
    b_dk = settled(b_dk + power * written)

    # Pairs in one half whose earlier token is not near, by smaller blocks.
    same = right[:, None] == right[None, :]
    for level in tl.range(tl.where(tl.max(tl.load(drop + r), 0) > LIMIT, 0, LEVELS - 1), LEVELS - 1):
        half = r >> level
        later = (half & 1) == 1
        asking = tl.where(later | (tl.load(drop + r) <= LIMIT), -1, half + 1)
        chosen = (asking[:, None] == half[None, :]) | (half[:, None] == asking[None, :])
        b_Z = load_pairs(Z, Z_near, tile, half & 1 == 0, same)
        b_Z = tl.where(chosen, b_Z, tl.zeros((C, C), OPERAND))
        b_M = b_Z
        if DELTA:
            b_M = load_pairs(M, M_near, tile, half & 1 == 0, same)
            b_M = tl.where(chosen, b_M, tl.zeros((C, C), OPERAND))
        anchors = (((half >> 1) << 1) << level) + (1 << level) - 1
        anchor = load_rows(G, HV * K, anchors, c, anchors < length, K, KP)
        b_dq, b_dk, b_dG = add_level(
            b_dq, b_dk, b_dG, b_Z, b_M, q, k, G, anchor, later, r, c, live, H, HV, K, KP, DELTA, OPERAND, PRECISION
        )

    # What the rest needs, again asked for at once.
    b_q = load_rows(q, H * K, r, c, live, K, KP)
    b_k = load_rows(k, H * K, r, c, live, K, KP)
    b_G = load_rows(G, HV * K, r, c, live, K, KP)
    if BV == VP:
        b_write = tl.dot(b_E, b_dS, input_precision=PRECISION)
    else:
        b_write = tl.zeros((C, BK), tl.float32)
        for start in tl.range(0, VP, BV, num_stages=STAGES):
            vc = start + tl.arange(0, BV)
            b_E, b_dS = leaving_rows(v, E, dS, rows, tile, r, vc, c, live, HV, V, VP, KP, DELTA, OPERAND)
            b_write = tl.dot(b_E, b_dS, acc=b_write, input_precision=PRECISION)
    end = load_row(G, HV * K, tl.maximum(length - 1, 0), c, length, K)
    b_write *= exp2(tl.minimum((end[None, :] - b_G).to(tl.float32), 0.0)) * norm_k[:, None]
    b_dk += b_write
    # The last token's write crosses no gate of this chunk: left out, for it would be far larger than what does.
    b_write *= tl.where((r != length - 1)[:, None], b_k, 0.0)
    b_dG -= b_write
    d_end = d_end * exp2(end.to(tl.float32)) + tl.sum(b_write, 0)

    b_diagonal = tl.load(diagonal + tile * C + r)[:, None]
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    b_dq += b_diagonal * b_k
    b_dk += b_diagonal * b_q
    if L2NORM:
        b_dq -= b_q * (norm_q * norm_q * tl.load(dots + tile * 2 * C + r))[:, None]
        b_dk -= b_k * (norm_k * norm_k * tl.load(dots + (tile * 2 + 1) * C + r))[:, None]
    store_rows(d_q + (first * HV + head) * K, HV * K, r, c, live, b_dq, K, KP)
    store_rows(d_k + (first * HV + head) * K, HV * K, r, c, live, b_dk, K, KP)
    b_dg = sums_to_end(b_dG, OPERAND, PRECISION) + d_end[None, :]
    if GATE:
        raw = load_rows(g + (first * HV + head) * K, HV * K, r, c, live, K, KP).to(tl.float32)
        if BIAS:
            raw += tl.load(dt_bias + head * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
        b_dg, by_rate = gate_gradient(b_dg, raw, rate, live[:, None])
        tl.store(d_rate + tile * KP + c, tl.sum(by_rate, 0))
        tl.store(d_bias + tile * KP + c, tl.sum(b_dg, 0))
    tl.debug_barrier()  # d_g may lie where other threads have just read G
    store_rows(d_g + (first * HV + head) * K, HV * K, r, c, live, b_dg, K, KP)
