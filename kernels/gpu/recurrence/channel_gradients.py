# mypy: disable-error-code="no-untyped-def"
"""Gradients of q, k and g under a channel decay: equations in gradients.py, near and by level in pairs.py.

Tokens meet those of their half of the chunk at its origin O. So one operand serves a token in all its products as the
later one of a pair, 2^(G_i − O) q̂ or k̂, and one as the earlier one, 2^(O − G_j) k̂. For a pair across the halves the two
lack what the gate falls by over the left half: sums here are over tokens, so that it multiplies them. Tokens that are
not near meet all later ones by level. dG takes both sides of a pair from the same rounded operands.

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
from kernels.gpu.recurrence.gradients import diagonal
from kernels.gpu.recurrence.pair_gradients import load_pairs
from kernels.gpu.recurrence.pairs import earlier_power, later_exponent


@triton.jit
def sums_to_end(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Σ_{j ≥ i} x_j over the rows of x, as a product with ones: Triton's scan takes several times the instructions."""
    C: tl.constexpr = x.shape[0]
    r = tl.arange(0, C)
    ones = tl.where(r[:, None] <= r[None, :], 1.0, 0.0).to(OPERAND)
    high = x.to(OPERAND)
    sums = tl.dot(ones, high, input_precision=PRECISION)
    if x.dtype != OPERAND:
        sums = tl.dot(ones, (x - high).to(OPERAND), acc=sums)
    return sums


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
    z_diagonal,  # [tiles, C]
    dots,
    d_q,  # [B, T, HV, K], written; also what follows
    d_k,
    d_g,
    sums,  # [tiles, KP + KP / BK], with GATE: the chunk's gradients of dt_bias, and of A_log by program
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
    FULL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    PARTS: tl.constexpr = KP // BK
    tile = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    head = (tile % HV).to(tl.int32)
    first, length = locate((tile // HV).to(tl.int32), T, NT, chunks, C, PACKED, FULL)
    r = tl.arange(0, C)
    live = r < length
    c = part * BK + tl.arange(0, BK)
    q += (first * H + head // (HV // H)) * K
    k += (first * H + head // (HV // H)) * K
    G += (first * HV + head) * K
    drop += tile * C
    rows = (first * HV + head) * V
    HALF: tl.constexpr = C // 2
    left = r < HALF
    right = r >= HALF

    # Pairs as rows of later tokens, and transposed (_t): across the halves, and in the same. All are asked for before
    # the first product, for each would make the program wait again, as are norms and rows. What else is read more than
    # once comes from the cache, and takes no registers meanwhile.
    across = right[:, None] & left[None, :]
    across_t = left[:, None] & right[None, :]
    same = right[:, None] == right[None, :]
    Z_across = load_pairs(Z, Z_near, tile, r < 0, across)
    Z_same = load_pairs(Z, Z_near, tile, r < 0, same)
    Z_across_t = load_pairs(Z, Z_near, tile, r < 0, across_t)
    Z_same_t = load_pairs(Z, Z_near, tile, r >= 0, same)
    if DELTA:
        M_across = load_pairs(M, M_near, tile, r < 0, across)
        M_same = load_pairs(M, M_near, tile, r < 0, same)
        M_across_t = load_pairs(M, M_near, tile, r < 0, across_t)
        M_same_t = load_pairs(M, M_near, tile, r >= 0, same)
    norm_q, norm_k = load_norms(norms, tile, C, L2NORM)
    of_left = load_row(G, HV * K, 0, c, length, K)[None, :] - SHIFT
    of_right = load_row(G, HV * K, HALF, c, length, K)[None, :] - SHIFT

    # As later tokens: with the state that enters, earlier tokens of the other half, and of the same. What reaches a
    # token falls to the origin of the left half, over that half, and `down` from the origin of its own.
    b_dq = tl.zeros((C, BK), tl.float32)
    b_dk = tl.zeros((C, BK), tl.float32)
    # Σ S ⊙ dS as the diagonal of a product: so bf16 operands are never looked at outside of the tensor core, which sums
    # their products in float32, too. Float32 operands would be split in three, and more value channels would take the
    # cache's place.
    BY_PRODUCT: tl.constexpr = tl.float32 != OPERAND and BV <= BK
    if BY_PRODUCT:
        d_end = tl.zeros((BK, BK), tl.float32)
    else:
        d_end = tl.zeros((BK,), tl.float32)
    for start in tl.range(0, VP, BV, num_stages=STAGES):
        vc = start + tl.arange(0, BV)
        at_state = tile * VP * KP + vc[:, None] * KP + c[None, :]
        b_S = tl.load(S + at_state)
        b_dS = tl.load(dS + at_state)
        b_do = load_rows(d_o + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
        b_dq = tl.dot(b_do, b_S, acc=b_dq, input_precision=PRECISION)
        if DELTA:
            b_dv = load_rows(d_v + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
            b_dk = tl.dot(b_dv, b_S, acc=b_dk, input_precision=PRECISION)
        if BY_PRODUCT:
            d_end = tl.dot(tl.trans(b_S), b_dS, acc=d_end)
        else:
            d_end += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)
    if BY_PRODUCT:
        d_end = diagonal(d_end)
    entering = exp2(of_left.to(tl.float32))
    b_dq *= entering * (norm_q * scale)[:, None]
    b_dk *= entering * -norm_k[:, None]
    origin = tl.where(right[:, None], of_right, of_left)
    most = tl.where(tl.load(drop + r) <= LIMIT, LIMIT - SHIFT, float("-inf"))[:, None]  # 2^−∞ = 0: not near
    up = earlier_power(load_rows(G, HV * K, r, c, live, K, KP), origin, most)
    k_up = decayed(load_rows(k, H * K, r, c, live, K, KP), up, OPERAND)
    b_dq = tl.dot(Z_across, k_up, acc=b_dq, input_precision=PRECISION)
    if DELTA:
        b_dk = tl.dot(M_across, k_up, acc=b_dk, input_precision=PRECISION)
    # The root of the fall over the left half, applied twice: the fall itself may be less than the smallest number.
    root = exp2((of_right - of_left).to(tl.float32) * 0.5)
    over = tl.where(right[:, None], root, 1.0)
    b_dq = tl.dot(Z_same, k_up, acc=b_dq * over * over, input_precision=PRECISION)
    if DELTA:
        b_dk = tl.dot(M_same, k_up, acc=b_dk * over * over, input_precision=PRECISION)
    down = exp2(later_exponent(load_rows(G, HV * K, r, c, live, K, KP), origin, SHIFT, FULL))
    q_down = decayed(load_rows(q, H * K, r, c, live, K, KP), down, OPERAND)
    b_dG = q_down * b_dq
    b_dq = settled(b_dq * down)
    if DELTA:
        k_down = decayed(load_rows(k, H * K, r, c, live, K, KP), down, OPERAND)
        b_dG += k_down * b_dk
        b_dk = settled(b_dk * down)
    b_dG = settled(b_dG)

    # As earlier tokens: with later ones of the other half and of the same.
    written = tl.dot(Z_across_t, q_down, input_precision=PRECISION)
    if DELTA:
        written = tl.dot(M_across_t, k_down, acc=written, input_precision=PRECISION)
    written = tl.dot(Z_same_t, q_down, acc=written * root * root, input_precision=PRECISION)
    if DELTA:
        written = tl.dot(M_same_t, k_down, acc=written, input_precision=PRECISION)
    b_dG = settled(b_dG - k_up * written)
    b_dk = settled(b_dk + up * written)

    # Pairs whose earlier token is not near, level by level.
    for level in tl.range(tl.where(tl.max(tl.load(drop + r), 0) > LIMIT, 0, LEVELS), LEVELS):
        half = r >> level
        everywhere = tl.full((C, C), True, tl.int1)
        later = (half & 1) == 1
        asking = tl.where(later | (tl.load(drop + r) <= LIMIT), -1, half + 1)
        chosen = (asking[:, None] == half[None, :]) | (half[:, None] == asking[None, :])
        mirrored = (half & 1 == 0) & (level < LEVELS - 1)
        b_Z = tl.where(chosen, load_pairs(Z, Z_near, tile, mirrored, everywhere), 0.0).to(OPERAND)
        b_M = b_Z
        if DELTA:
            b_M = tl.where(chosen, load_pairs(M, M_near, tile, mirrored, everywhere), 0.0).to(OPERAND)
        anchors = (((half >> 1) << 1) << level) + (1 << level) - 1
        anchor = load_rows(G, HV * K, anchors, c, anchors < length, K, KP)
        b_dq, b_dk, b_dG = add_level(
            b_dq, b_dk, b_dG, b_Z, b_M, q, k, G, anchor, later, r, c, live, H, HV, K, KP, DELTA, OPERAND, PRECISION
        )

    # What the rest needs, again asked for at once.
    b_q = load_rows(q, H * K, r, c, live, K, KP)
    b_k = load_rows(k, H * K, r, c, live, K, KP)
    b_G = load_rows(G, HV * K, r, c, live, K, KP)
    end = load_row(G, HV * K, tl.maximum(length - 1, 0), c, length, K)
    # A token with itself: apart from the other pairs, for it crosses no gate, and would have to cancel in dG.
    with_self = tl.load(z_diagonal + tile * C + r)[:, None]
    if L2NORM and PARTS > 1:
        dot_q = tl.load(dots + tile * 2 * C + r)
        dot_k = tl.load(dots + (tile * 2 + 1) * C + r)
    if GATE:
        raw = load_rows(g + (first * HV + head) * K, HV * K, r, c, live, K, KP).to(tl.float32)
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
        if BIAS:
            raw += tl.load(dt_bias + head * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
    b_write = tl.zeros((C, BK), tl.float32)
    for start in tl.range(0, VP, BV, num_stages=STAGES):
        vc = start + tl.arange(0, BV)
        if DELTA:
            b_E = tl.load(E + tile * C * VP + r[:, None] * VP + vc[None, :])
        else:
            b_E = load_rows(v + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
        b_dS = tl.load(dS + tile * VP * KP + vc[:, None] * KP + c[None, :])
        b_write = tl.dot(b_E, b_dS, acc=b_write, input_precision=PRECISION)
    b_write *= exp2((end[None, :] - b_G).to(tl.float32)) * norm_k[:, None]
    b_dk += b_write
    # The last token's write crosses no gate of this chunk: left out, for it would be far larger than what does.
    b_write *= tl.where((r != length - 1)[:, None], b_k, 0.0)
    b_dG -= b_write
    d_end = d_end * exp2(end.to(tl.float32)) + tl.sum(b_write, 0)

    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    b_dq += with_self * b_k
    b_dk += with_self * b_q
    if L2NORM:
        if PARTS == 1:  # all channels are here
            dot_q = tl.sum(b_q * b_dq, 1)
            dot_k = tl.sum(b_k * b_dk, 1)
        b_dq -= b_q * (norm_q * norm_q * dot_q)[:, None]
        b_dk -= b_k * (norm_k * norm_k * dot_k)[:, None]
    store_rows(d_q + (first * HV + head) * K, HV * K, r, c, live, b_dq, K, KP)
    store_rows(d_k + (first * HV + head) * K, HV * K, r, c, live, b_dk, K, KP)
    b_dg = sums_to_end(b_dG, OPERAND, PRECISION) + d_end[None, :]
    if GATE:
        b_dg, by_rate = gate_gradient(b_dg, raw, rate, live[:, None])
        sums += tile * (KP + PARTS)
        tl.store(sums + KP + part, tl.sum(by_rate))
        if BIAS:  # the first row of the sums is that of all tokens
            by_bias = sums_to_end(b_dg, OPERAND, PRECISION)
            tl.store(sums + r[:, None] * 0 + c[None, :], by_bias, mask=(r == 0)[:, None])
    tl.debug_barrier()  # d_g may lie where other threads have just read G
    store_rows(d_g + (first * HV + head) * K, HV * K, r, c, live, b_dg, K, KP)
