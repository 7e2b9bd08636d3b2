# mypy: disable-error-code="no-untyped-def"
"""The products between the tokens of a chunk, and the triangular inverse of the delta rule.

    P_ij = scale · Σ_c q̂_ic k̂_jc 2^(G_ic − G_jc), i ≥ j
    A_ij =         Σ_c k̂_ic k̂_jc 2^(G_ic − G_jc), i > j
    W    = (I + diag(β) A)⁻¹ diag(β)                                     so that E = W (V − K̃ S)

Without a channel decay 2^(G_i − G_j) multiplies a plain product. With one, it has to be split between two operands, and
2^(−G_j) overflows. Pairs are therefore grouped by the block in which they meet:

    near   both in one block of 16 tokens: 2^(G_i − G_a) meets 2^(G_a − G_j), a the block's first token. Right as long
           as the block has not fallen by more than 2^LIMIT before i, which is `drop`; else the pair is
    level  in the two halves of a block of 2, 4, … C tokens, m the last token of the left half: 2^(G_i − G_m) meets
           2^(G_m − G_j). Neither exceeds 1, whatever the gate.

Which way a pair goes, and all that enters it, is known at its later token i: no rounding depends on the future.

The inverse doubles blocks: X ← X − X L X, L what lies between the two halves of each block. One program per chunk and
value head; q, k, G are read (again for each level, from the cache), P and W written. A channel decay's `prepare` comes
first, on the same rows.
"""

import triton
import triton.language as tl

from kernels.gpu.common import (
    LOG2_E,
    SIZES,
    STRONGEST,
    exp2,
    floored,
    load_rows,
    locate,
    log_decay,
    write_strength,
)
from kernels.gpu.prepare import prepare, row_norms

LIMIT = tl.constexpr(110.0)  # 2^110 leaves 2^17 for a key's own size, and −5 a token stays near


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b for the inverse, in float32: PRECISION "fp16" or an `input_precision`."""
    if PRECISION == "fp16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


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
    q_in,  # as in prepare_kernel, for a channel decay
    k_in,
    k_out,
    total,
    drop,  # [tiles, C], for a channel decay
    norms,  # [tiles, 2, C]: 1/‖q‖, 1/‖k‖
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
    NEAR: tl.constexpr,
    NEAR_LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNEL: tl.constexpr,
    GATED: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    OPERAND: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    head = (tile % HV).to(tl.int32)
    first, length = locate(tl.program_id(0) // HV, T, NT, chunks, C, PACKED)
    q += (first * H + head // (HV // H)) * K
    k += (first * H + head // (HV // H)) * K
    r = tl.arange(0, C)
    live = r < length
    p = tl.zeros((C, C), tl.float32)
    a = tl.zeros((C, C), tl.float32)

    norm_q, norm_k = row_norms(q, k, H, K, KP, BK, live, L2NORM)
    tl.store(norms + tile * 2 * C + r, norm_q)
    tl.store(norms + (tile * 2 + 1) * C + r, norm_k)
    if CHANNEL:
        g += (first * HV + head) * K
        G += (first * HV + head) * K
        tokens = tile * C * KP
        for start in tl.range(0, KP, BK):
            prepare(
                q, k, g, A_log, dt_bias, G, q_in + tokens, k_in + tokens, k_out + tokens, total + tile * KP, norm_q,
                norm_k, scale, head, live, start + tl.arange(0, BK), H, HV, K, KP, DELTA, GATE, BIAS,
            )  # fmt: skip
        tl.debug_barrier()  # G is read by other threads than wrote it
        diagonal = tl.zeros((C,), tl.float32)
        b_drop = tl.zeros((C,), tl.float32)
        # Blocks of NEAR tokens.
        for start in tl.static_range(0, KP, BK):
            c = start + tl.arange(0, BK)
            b_q = load_rows(q, H * K, r, c, live, K, KP)
            b_k = load_rows(k, H * K, r, c, live, K, KP)
            b_G = load_rows(G, HV * K, r, c, live, K, KP)
            anchor = load_rows(G, HV * K, r - r % NEAR, c, live, K, KP)
            diagonal += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
            fall = (b_G - anchor).to(tl.float32)
            b_drop = tl.maximum(b_drop, tl.max(-fall, 1))
            down = exp2(fall)
            up = tl.trans((b_k * exp2(tl.minimum(-fall, LIMIT))).to(OPERAND))
            p = tl.dot((b_q * down).to(OPERAND), up, acc=p, input_precision=PRECISION)
            if DELTA:
                a = tl.dot((b_k * down).to(OPERAND), up, acc=a, input_precision=PRECISION)
        tl.store(drop + tile * C + r, b_drop)
        block = r // NEAR
        chosen = (tl.where(b_drop <= LIMIT, block, -1)[:, None] == block[None, :]) & (r[:, None] > r[None, :])
        p = tl.where(chosen, p, 0.0)
        a = tl.where(chosen, a, 0.0)
        # Blocks of 2^(level + 1) tokens; below NEAR only for tokens behind a deep fall.
        lowest = tl.where(tl.max(b_drop, 0) > LIMIT, 0, NEAR_LEVEL)
        for level in tl.range(lowest, LEVELS - 1):
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
            right = ((half & 1) == 1) & ((level >= NEAR_LEVEL) | (b_drop > LIMIT))
            chosen = tl.where(right, half - 1, -1)[:, None] == half[None, :]
            p = tl.where(chosen, p_level, p)
            if DELTA:
                a = tl.where(chosen, a_level, a)
        # The two halves of the chunk: rows are zero in the left one, columns in the right one.
        right = r >= C // 2
        for start in tl.static_range(0, KP, BK):
            c = start + tl.arange(0, BK)
            b_G = load_rows(G, HV * K, r, c, live, K, KP)
            anchor = load_rows(G, HV * K, r * 0 + (C // 2 - 1), c, live & (length >= C // 2), K, KP)
            decay = exp2(-tl.abs((b_G - anchor).to(tl.float32)))
            rows = live & right
            b_q = (load_rows(q, H * K, r, c, rows, K, KP) * decay).to(OPERAND)
            columns = tl.trans((load_rows(k, H * K, r, c, live & (r < C // 2), K, KP) * decay).to(OPERAND))
            p = tl.dot(b_q, columns, acc=p, input_precision=PRECISION)
            if DELTA:
                b_k = (load_rows(k, H * K, r, c, rows, K, KP) * decay).to(OPERAND)
                a = tl.dot(b_k, columns, acc=a, input_precision=PRECISION)
        p = tl.where(r[:, None] == r[None, :], diagonal[:, None], p)
    else:
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
        a *= (b_beta * norm_k)[:, None] * norm_k[None, :]
        if INVERSE == "fp16":
            a = tl.minimum(tl.maximum(a, -60000.0), 60000.0)
        odd = tl.where((r & 1) == 1, r - 1, -1)
        x = tl.where(r[:, None] == r[None, :], 1.0, 0.0) - tl.where(odd[:, None] == r[None, :], a, 0.0)
        for level in tl.range(1, LEVELS):
            half = r >> level
            chosen = tl.where((half & 1) == 1, half - 1, -1)[:, None] == half[None, :]
            x -= product(product(x, tl.where(chosen, a, 0.0), INVERSE), x, INVERSE)
        tl.store(W + at, (x * b_beta[None, :]).to(W.dtype.element_ty))
