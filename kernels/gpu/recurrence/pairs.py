# mypy: disable-error-code="no-untyped-def"
"""The products between the tokens of a chunk, and the triangular inverse of the delta rule.

    P_ij = scale · Σ_c q̂_ic k̂_jc 2^(G_ic − G_jc), i ≥ j
    A_ij =         Σ_c k̂_ic k̂_jc 2^(G_ic − G_jc), i > j
    W    = (I + diag(β) A)⁻¹                                             so that E = W diag(β) (V − K̃ S)

Without a channel decay 2^(G_i − G_j) multiplies a plain product. With one, it has to be split between two operands, and
2^(−G_j) overflows. How it is split depends on where the pair lies:

    across   the halves of the chunk, at the origin of the right half (below): the later token has fallen from it, the
             earlier one has not reached it, whatever the gate.
    near     in one half: 2^(G_i − O) meets 2^(O − G_j), O = G_a − SHIFT the half's origin, a its first token, so that
             both stay in the range of exponents. Right as long as no channel has fallen by more than 2^LIMIT between a
             and j, which is `drop`; else
    by level in the halves of a block of 2, 4, … tokens, across its middle. Only for chunks with such a j.

Which way a pair goes, and all that enters it, is known at its later token i: no rounding depends on the future.

The inverse doubles blocks: X ← X − X L X, L what lies between the two halves of each block. One program per chunk and
value head; q, k, G are read once (and for each level again, from the cache), P, W and β written. β stays out of W, so
that W's diagonal is exact: rounded there, β would be wrong in E and in dV alike, and twice in its own gradient.
"""

import triton
import triton.language as tl

from kernels.gpu.common import (
    INTERPRETED,
    LOG2_E,
    SIZES,
    STRONGEST,
    exp2,
    floored,
    load_norms,
    load_row,
    load_rows,
    locate,
    log_decay,
    write_strength,
)
from kernels.gpu.recurrence.prepare import row_norms


@triton.jit
def later_exponent(b_G, origin, SHIFT: tl.constexpr, FULL: tl.constexpr):
    """log2 of what a token is multiplied by as the later one of a pair that meets at `origin`."""
    exponent = (b_G - origin).to(tl.float32)
    if FULL:
        return exponent
    else:
        return tl.minimum(exponent, SHIFT)  # behind the chunk's end G is zero


@triton.jit
def earlier_power(b_G, origin, most):
    """What a token is multiplied by as the earlier one of a pair that meets at `origin`: at most 2^`most`."""
    return exp2(tl.minimum((origin - b_G).to(tl.float32), most))


@triton.jit
def halved(x):
    """x in float16, its largest number in place of infinity: 0 · ∞ would carry a NaN to earlier tokens."""
    if INTERPRETED:
        return tl.clamp(x, -65504.0, 65504.0).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b for the inverse, in float32: PRECISION "fp16" or an `input_precision`."""
    if PRECISION == "fp16":
        return tl.dot(halved(a), halved(b))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def doubled(x, a, level, INVERSE: tl.constexpr):
    """The inverse by blocks of 2^(level + 1) tokens, from that by blocks of half as many."""
    half = tl.arange(0, x.shape[0]) >> level
    chosen = tl.where((half & 1) == 1, half - 1, -1)[:, None] == half[None, :]
    return x - product(product(x, tl.where(chosen, a, 0.0), INVERSE), x, INVERSE)


@triton.jit
def scalar_gates(g, A_log, dt_bias, at, head, r, length, GATED: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr):
    """Log2-decays [C] of a chunk, zero behind its end."""
    C: tl.constexpr = r.shape[0]
    if GATED:
        b_g = tl.load(g + at, mask=r < length, other=0.0).to(tl.float32)
        if GATE:
            bias = 0.0
            if BIAS:
                bias = tl.load(dt_bias + head).to(tl.float32)
            b_g = log_decay(b_g, tl.exp(tl.load(A_log + head).to(tl.float32)), bias, GATE)
            b_g = tl.where(r < length, b_g, 0.0)
        return tl.maximum(b_g * LOG2_E, STRONGEST)
    else:
        return tl.zeros((C,), tl.float32)


@triton.jit(do_not_specialize=SIZES)
def pairs_kernel(
    q,  # [B, T, H, K]
    k,
    g,  # [B, T, HV] or [B, T, HV, K]
    beta,  # [B, T, HV], delta rule
    A_log,
    dt_bias,
    G,  # [B, T, HV, K] for a channel decay, else [tiles, C], written; also what follows
    drop,  # [tiles, C], for a channel decay
    norms,  # [tiles, 2, C], with L2NORM: 1/‖q‖, 1/‖k‖
    strengths,  # [tiles, C]: β, delta rule
    W,  # [tiles, C, C]
    P,
    chunks,
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    LEVELS: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNEL: tl.constexpr,
    GATED: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
    OPERAND: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    head = (tile % HV).to(tl.int32)
    first, length = locate(tl.program_id(0) // HV, T, NT, chunks, C, PACKED, FULL)
    q += (first * H + head // (HV // H)) * K
    k += (first * H + head // (HV // H)) * K
    r = tl.arange(0, C)
    live = r < length
    p = tl.zeros((C, C), tl.float32)
    a = tl.zeros((C, C), tl.float32)

    if CHANNEL:
        HALF: tl.constexpr = C // 2
        G += (first * HV + head) * K
        right = r >= HALF
        p_right = tl.zeros((C, C), tl.float32)
        a_right = tl.zeros((C, C), tl.float32)
        diagonal = tl.zeros((C,), tl.float32)
        lowest = tl.full((C,), SHIFT, tl.float32)
        for start in tl.static_range(0, KP, BK):
            c = start + tl.arange(0, BK)
            b_q = load_rows(q, H * K, r, c, live, K, KP)
            b_k = load_rows(k, H * K, r, c, live, K, KP)
            b_G = load_rows(G, HV * K, r, c, live, K, KP)
            if start == 0:  # behind the others, so that their waiting is one
                norm_q, norm_k = load_norms(norms, tile, C, L2NORM)
            diagonal += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
            of_left = load_row(G, HV * K, 0, c, length, K)[None, :] - SHIFT
            of_right = load_row(G, HV * K, HALF, c, length, K)[None, :] - SHIFT
            exponent = later_exponent(b_G, tl.where(right[:, None], of_right, of_left), SHIFT, FULL)
            lowest = tl.minimum(lowest, tl.min(exponent, 1))
            down = exp2(exponent)
            q_down = (b_q * down).to(OPERAND)
            k_down = (b_k * down).to(OPERAND)
            to_left = tl.trans((b_k * earlier_power(b_G, of_left, LIMIT - SHIFT)).to(OPERAND))
            to_right = tl.trans((b_k * earlier_power(b_G, of_right, LIMIT - SHIFT)).to(OPERAND))
            p = tl.dot(q_down, to_left, acc=p, input_precision=PRECISION)
            p_right = tl.dot(q_down, to_right, acc=p_right, input_precision=PRECISION)
            if DELTA:
                a = tl.dot(k_down, to_left, acc=a, input_precision=PRECISION)
                a_right = tl.dot(k_down, to_right, acc=a_right, input_precision=PRECISION)
        b_drop = SHIFT - lowest
        tl.store(drop + tile * C + r, b_drop)
        across = right[:, None] & (r < HALF)[None, :]
        chosen = (r[:, None] > r[None, :]) & ((b_drop <= LIMIT)[None, :] | across)
        p = tl.where(chosen, tl.where(right[:, None], p_right, p), 0.0)
        a = tl.where(chosen, tl.where(right[:, None], a_right, a), 0.0)
        # Blocks of 2^(level + 1) tokens, for earlier tokens that are not near.
        first_level = tl.where(tl.max(b_drop, 0) > LIMIT, 0, LEVELS - 1)
        for level in tl.range(first_level, LEVELS - 1):
            half = r >> level
            anchors = (((half >> 1) << 1) << level) + (1 << level) - 1
            p_level = tl.zeros((C, C), tl.float32)
            a_level = tl.zeros((C, C), tl.float32)
            for start in tl.static_range(0, KP, BK):
                c = start + tl.arange(0, BK)
                b_q = load_rows(q, H * K, r, c, live, K, KP)
                b_k = load_rows(k, H * K, r, c, live, K, KP)
                b_G = load_rows(G, HV * K, r, c, live, K, KP)
                anchor = load_rows(G, HV * K, anchors, c, anchors < length, K, KP)
                decay = exp2(-tl.abs((b_G - anchor).to(tl.float32)))
                keys = (b_k * decay).to(OPERAND)
                columns = tl.trans(keys)
                p_level = tl.dot((b_q * decay).to(OPERAND), columns, acc=p_level, input_precision=PRECISION)
                if DELTA:
                    a_level = tl.dot(keys, columns, acc=a_level, input_precision=PRECISION)
            asking = tl.where(((half & 1) == 0) & (b_drop > LIMIT), half + 1, -1)
            chosen = half[:, None] == asking[None, :]
            p = tl.where(chosen, p_level, p)
            if DELTA:
                a = tl.where(chosen, a_level, a)
        p = tl.where(r[:, None] == r[None, :], diagonal[:, None], p)
    else:
        norm_q, norm_k = row_norms(q, k, H, K, KP, BK, live, L2NORM)
        if L2NORM:
            tl.store(norms + tile * 2 * C + r, norm_q)
            tl.store(norms + (tile * 2 + 1) * C + r, norm_k)
        for start in tl.static_range(0, KP, BK):
            c = start + tl.arange(0, BK)
            b_q = load_rows(q, H * K, r, c, live, K, KP)
            b_k = load_rows(k, H * K, r, c, live, K, KP)
            columns = tl.trans(b_k.to(OPERAND))
            p = tl.dot(b_q.to(OPERAND), columns, acc=p, input_precision=PRECISION)
            if DELTA:
                a = tl.dot(b_k.to(OPERAND), columns, acc=a, input_precision=PRECISION)
        steps = scalar_gates(g, A_log, dt_bias, (first + r) * HV + head, head, r, length, GATED, GATE, BIAS)
        b_G = tl.cumsum(steps.to(WIDE), 0)
        # Masked before the power: it would overflow above the diagonal.
        between = tl.where(r[:, None] >= r[None, :], (b_G[:, None] - b_G[None, :]).to(tl.float32), float("-inf"))
        decay = exp2(between)
        p *= decay
        a = tl.where(r[:, None] > r[None, :], a * decay, 0.0)
        tl.store(G + tile * C + r, b_G)

    at = tile * C * C + r[:, None] * C + r[None, :]
    tl.store(P + at, (p * (norm_q * scale)[:, None] * norm_k[None, :]).to(P.dtype.element_ty))
    if DELTA:
        b_beta = tl.load(beta + (first + r) * HV + head, mask=r < length, other=0.0).to(tl.float32)
        b_beta = floored(write_strength(b_beta, SIGMOID))
        tl.store(strengths + tile * C + r, b_beta)
        a *= (b_beta * norm_k)[:, None] * norm_k[None, :]
        odd = tl.where((r & 1) == 1, r - 1, -1)
        x = tl.where(r[:, None] == r[None, :], 1.0, 0.0) - tl.where(odd[:, None] == r[None, :], a, 0.0)
        if INVERSE == "fp16":  # unrolled: what is chosen is then known while compiling
            for level in tl.static_range(1, LEVELS):
                x = doubled(x, a, level, INVERSE)
        else:
            for level in tl.range(1, LEVELS):
                x = doubled(x, a, level, INVERSE)
        tl.store(W + at, x.to(W.dtype.element_ty))
