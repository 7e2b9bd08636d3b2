# mypy: disable-error-code="no-untyped-def"
"""Gradients of q, k and g under a channel decay: see pair_gradients.py for the equations, pairs.py for near and level.

One program per chunk, value head and some key channels. What it is short of is registers: three accumulators, and a
dozen tensors to read.
"""

import triton
import triton.language as tl

from kernels.gpu.common import LN_2, SIZES, decayed, exp2, load_rows, locate, store_rows
from kernels.gpu.pair_gradients import load_pairs
from kernels.gpu.pairs import LIMIT


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
    level,
    r,
    c,
    length,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    DELTA: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients with those of the pairs b_Z, b_M between the halves of blocks of 2^(level + 1) tokens."""
    half = r >> level
    right = (half & 1) == 1
    as_query = tl.where(right, 1.0, 0.0)[:, None]
    live = r < length
    anchors = (((half >> 1) << 1) << level) + (1 << level) - 1
    l_G = load_rows(G, HV * K, r, c, live, K, KP)
    decay = exp2(-tl.abs((l_G - load_rows(G, HV * K, anchors, c, anchors < length, K, KP)).to(tl.float32)))
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
    Z_near,  # [tiles, C, NEAR]
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
    NEAR: tl.constexpr,
    NEAR_LEVEL: tl.constexpr,
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
    rows = (first * HV + head) * V

    # Through the states.
    b_dq = tl.zeros((C, BK), tl.float32)
    b_dk = tl.zeros((C, BK), tl.float32)
    b_write = tl.zeros((C, BK), tl.float32)
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
            b_E = tl.load(E + tile * C * VP + r[:, None] * VP + vc[None, :])
        else:
            b_E = load_rows(v + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
        b_write = tl.dot(b_E, b_dS, acc=b_write, input_precision=PRECISION)
        d_end += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)
    norm_q = tl.load(norms + tile * 2 * C + r)
    norm_k = tl.load(norms + (tile * 2 + 1) * C + r)
    b_G = load_rows(G, HV * K, r, c, live, K, KP)
    end = tl.load(G + (length - 1) * (HV * K) + c, mask=(c < K) & (length > 0), other=0.0)
    b_q = load_rows(q, H * K, r, c, live, K, KP)
    b_k = load_rows(k, H * K, r, c, live, K, KP)
    power = exp2(b_G.to(tl.float32))
    b_dq = b_dq * power * (norm_q * scale)[:, None]
    b_dG = b_q * b_dq
    if DELTA:
        b_dk = b_dk * power * -norm_k[:, None]
        b_dG += b_k * b_dk
    b_write = b_write * exp2(tl.minimum((end[None, :] - b_G).to(tl.float32), 0.0)) * norm_k[:, None]
    b_dk += b_write
    # The last token's write crosses no gate of this chunk: left out, for it would be far larger than what does.
    b_write *= b_k * tl.where(r == length - 1, 0.0, 1.0)[:, None]
    b_dG -= b_write
    d_end = d_end * exp2(end.to(tl.float32)) + tl.sum(b_write, 0)

    # Pairs in one block of NEAR tokens: of queries, then of the keys of errors, with keys of writes. Loops, and
    # operands that are read and decayed again in each, because registers are what this kernel is short of.
    b_drop = tl.load(drop + tile * C + r)
    near = b_drop <= LIMIT
    block = r // NEAR
    chosen = block[:, None] == block[None, :]
    written = tl.zeros((C, BK), tl.float32)
    for kind in tl.range(0, 2 if DELTA else 1):
        as_query = tl.where(kind == 0, 1.0, 0.0)
        pairs = tl.where(kind == 0, Z, M)
        pairs_near = tl.where(kind == 0, Z_near, M_near)
        fall = load_rows(G, HV * K, r, c, live, K, KP) - load_rows(G, HV * K, r - r % NEAR, c, live, K, KP)
        fall = fall.to(tl.float32)
        up = exp2(tl.minimum(-fall, LIMIT))
        down = exp2(fall)
        # Tokens that are not near are left out: as rows of the pairs, and as rows of the operand.
        k_up = decayed(load_rows(k, H * K, r, c, live, K, KP), up, OPERAND)
        x_down = decayed(load_rows(tl.where(kind == 0, q, k), H * K, r, c, live & near, K, KP), down, OPERAND)
        x = tl.dot(
            load_pairs(pairs, pairs_near, tile, r, r, r < 0, chosen & near[:, None], C, NEAR),
            k_up,
            input_precision=PRECISION,
        )
        written = tl.dot(
            load_pairs(pairs, pairs_near, tile, r, r, r >= 0, chosen, C, NEAR),
            x_down,
            acc=written,
            input_precision=PRECISION,
        )
        b_dG += x_down * x
        x *= down
        b_dq += x * as_query
        b_dk += x * (1.0 - as_query)
    fall = load_rows(G, HV * K, r, c, live, K, KP) - load_rows(G, HV * K, r - r % NEAR, c, live, K, KP)
    up = exp2(tl.minimum(-fall.to(tl.float32), LIMIT))
    b_dG -= decayed(load_rows(k, H * K, r, c, live, K, KP), up, OPERAND) * written
    b_dk += written * up

    # Pairs in two halves of a block of more than NEAR tokens.
    for level in tl.range(NEAR_LEVEL, LEVELS):
        half = r >> level
        other = ((half ^ 1) << level) // NEAR  # first block of the other half
        chosen = (block[None, :] >= other[:, None]) & (block[None, :] < (other + (1 << level) // NEAR)[:, None])
        b_Z = load_pairs(Z, Z_near, tile, r, r, r < 0, chosen, C, NEAR)
        b_M = b_Z
        if DELTA:
            b_M = load_pairs(M, M_near, tile, r, r, r < 0, chosen, C, NEAR)
        b_dq, b_dk, b_dG = add_level(
            b_dq, b_dk, b_dG, b_Z, b_M, q, k, G, level, r, c, length, H, HV, K, KP, DELTA, OPERAND, PRECISION
        )
    # And those of smaller blocks whose later token is not near.
    for level in tl.range(tl.where(tl.max(b_drop, 0) > LIMIT, 0, NEAR_LEVEL), NEAR_LEVEL):
        half = r >> level
        asking = tl.where(((half & 1) == 1) & (b_drop > LIMIT), half - 1, -1)
        chosen = (asking[:, None] == half[None, :]) | (half[:, None] == asking[None, :])
        b_Z = load_pairs(Z, Z_near, tile, r, r, half & 1 == 0, block[:, None] == block[None, :], C, NEAR)
        b_Z = tl.where(chosen, b_Z, tl.zeros((C, C), OPERAND))
        b_M = b_Z
        if DELTA:
            b_M = load_pairs(M, M_near, tile, r, r, half & 1 == 0, block[:, None] == block[None, :], C, NEAR)
            b_M = tl.where(chosen, b_M, tl.zeros((C, C), OPERAND))
        b_dq, b_dk, b_dG = add_level(
            b_dq, b_dk, b_dG, b_Z, b_M, q, k, G, level, r, c, length, H, HV, K, KP, DELTA, OPERAND, PRECISION
        )

    b_diagonal = tl.load(diagonal + tile * C + r)[:, None]
    b_q = load_rows(q, H * K, r, c, live, K, KP).to(tl.float32)
    b_k = load_rows(k, H * K, r, c, live, K, KP).to(tl.float32)
    b_dq += b_diagonal * b_k
    b_dk += b_diagonal * b_q
    if L2NORM:
        b_dq -= b_q * (norm_q * norm_q * tl.load(dots + tile * 2 * C + r))[:, None]
        b_dk -= b_k * (norm_k * norm_k * tl.load(dots + (tile * 2 + 1) * C + r))[:, None]
    store_rows(d_q + (first * HV + head) * K, HV * K, r, c, live, b_dq, K, KP)
    store_rows(d_k + (first * HV + head) * K, HV * K, r, c, live, b_dk, K, KP)
    b_dg = sums_to_end(b_dG, OPERAND, PRECISION) + d_end[None, :]
    if GATE:
        b_dg = tl.where(live[:, None], b_dg, 0.0)
        # The log-decay itself, in nats, from its sums: cheaper than the gate once more.
        b_g = load_rows(G, HV * K, r, c, live, K, KP) - load_rows(G, HV * K, r - 1, c, live & (r > 0), K, KP)
        tl.store(d_rate + tile * KP + c, tl.sum(b_dg * (b_g.to(tl.float32) * LN_2), 0))
        raw = load_rows(g + (first * HV + head) * K, HV * K, r, c, live, K, KP).to(tl.float32)
        if BIAS:
            raw += tl.load(dt_bias + head * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
        b_dg *= -tl.exp(tl.load(A_log + head).to(tl.float32)) / (1.0 + tl.exp(-raw))
        tl.store(d_bias + tile * KP + c, tl.sum(b_dg, 0))
    tl.debug_barrier()  # d_g may lie where other threads have just read G
    store_rows(d_g + (first * HV + head) * K, HV * K, r, c, live, b_dg, K, KP)
