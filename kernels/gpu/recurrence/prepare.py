# mypy: disable-error-code="no-untyped-def"
"""Channel decay: what the state's products need of gate, queries and keys, chunk by chunk.

    G   = cumulative log2-decay from the chunk's start, inclusive
    q̃   = scale · q̂ ⊙ 2^G          meets the state that enters
    k̃   = k̂ ⊙ 2^G                  likewise (delta rule)
    k̄   = k̂ ⊙ 2^(G_C − G)          is written to the state that leaves, which keeps 2^(G_C) of the one that entered

q̂ and k̂ are q and k, or these with unit norm. One program per chunk, value head and BK key channels, in the forward and,
since keeping all but the norms would cost more than making it again, in the backward.
"""

import triton
import triton.language as tl

from kernels.gpu.common import (
    LOG2_E,
    NORM_EPS,
    SIZES,
    STRONGEST,
    exp2,
    load_norms,
    load_rows,
    locate,
    log_decay,
    store_rows,
)


@triton.jit
def row_norms(q, k, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, live, L2NORM: tl.constexpr):
    """1/‖q‖ and 1/‖k‖ of a chunk's tokens, or ones."""
    C: tl.constexpr = live.shape[0]
    r = tl.arange(0, C)
    if L2NORM:
        norm_q = tl.full((C,), NORM_EPS, tl.float32)
        norm_k = tl.full((C,), NORM_EPS, tl.float32)
        for start in tl.static_range(0, KP, BK):
            c = start + tl.arange(0, BK)
            b_q = load_rows(q, H * K, r, c, live, K, KP).to(tl.float32)
            b_k = load_rows(k, H * K, r, c, live, K, KP).to(tl.float32)
            norm_q += tl.sum(b_q * b_q, 1)
            norm_k += tl.sum(b_k * b_k, 1)
        return 1.0 / tl.sqrt(norm_q), 1.0 / tl.sqrt(norm_k)
    else:
        return tl.full((C,), 1.0, tl.float32), tl.full((C,), 1.0, tl.float32)


@triton.jit(do_not_specialize=SIZES)
def prepare_kernel(
    q,  # [B, T, H, K]
    k,
    g,  # [B, T, HV, K]
    A_log,
    dt_bias,
    G,  # [B, T, HV, K], written; also what follows
    q_in,  # [tiles, C, KP]
    k_in,
    k_out,
    total,  # [tiles, KP]
    norms,  # [tiles, 2, C], with L2NORM: 1/‖q‖, 1/‖k‖; read if KNOWN
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
    DELTA: tl.constexpr,
    L2NORM: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
    KNOWN: tl.constexpr,
):
    tile = (tl.program_id(0) // (KP // BK)).to(tl.int64)
    part = tl.program_id(0) % (KP // BK)
    head = (tile % HV).to(tl.int32)
    first, length = locate((tile // HV).to(tl.int32), T, NT, chunks, C, PACKED, FULL)
    q += (first * H + head // (HV // H)) * K
    k += (first * H + head // (HV // H)) * K
    r = tl.arange(0, C)
    live = r < length
    g += (first * HV + head) * K
    G += (first * HV + head) * K
    c = part * BK + tl.arange(0, BK)
    b_g = load_rows(g, HV * K, r, c, live, K, KP).to(tl.float32)
    if KNOWN:
        norm_q, norm_k = load_norms(norms, tile, C, L2NORM)
    else:
        norm_q, norm_k = row_norms(q, k, H, K, KP, BK, live, L2NORM)
        if L2NORM and part == 0:
            tl.store(norms + tile * 2 * C + r, norm_q)
            tl.store(norms + (tile * 2 + 1) * C + r, norm_k)
    if GATE:
        bias = 0.0
        if BIAS:
            bias = tl.load(dt_bias + head * K + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
        b_g = log_decay(b_g, tl.exp(tl.load(A_log + head).to(tl.float32)), bias, GATE)
        b_g = tl.where(live[:, None], b_g, 0.0)
    steps = tl.maximum(b_g * LOG2_E, STRONGEST).to(G.dtype.element_ty)
    b_G = tl.cumsum(steps, 0)
    end = tl.sum(steps, 0)
    store_rows(G, HV * K, r, c, live, b_G, K, KP)
    entering = exp2(b_G.to(tl.float32))
    b_q = load_rows(q, H * K, r, c, live, K, KP).to(tl.float32) * (norm_q * scale)[:, None]
    b_k = load_rows(k, H * K, r, c, live, K, KP).to(tl.float32) * norm_k[:, None]
    at = tile * C * KP + r[:, None] * KP + c[None, :]
    tl.store(total + tile * KP + c, exp2(end.to(tl.float32)))
    tl.store(q_in + at, (b_q * entering).to(q_in.dtype.element_ty))
    tl.store(k_out + at, (b_k * exp2((end[None, :] - b_G).to(tl.float32))).to(k_out.dtype.element_ty))
    if DELTA:
        tl.store(k_in + at, (b_k * entering).to(k_in.dtype.element_ty))
