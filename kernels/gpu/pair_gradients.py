# mypy: disable-error-code="no-untyped-def"
"""Gradients of q, k, g and β, chunk by chunk, from the states of the scan and of the reverse scan.

With the notation of `pairs` and `scan`, Z = dP and M = dA the gradients of the pairs' products,

    Z_ij = scale · dO_i · E_j, i ≥ j           M_ij = −dV_i · E_j, i > j
    dq̂   = scale · 2^G ⊙ (dO Sᵀ)                     + Σ_j Z_ij k̂_j 2^(G_i − G_j)
    dk̂   = −2^G ⊙ (dV Sᵀ)                            + Σ_j M_ij k̂_j 2^(G_i − G_j)        as the key of an error
           + 2^(G_C − G) ⊙ (E dSᵀ)                   + Σ_i (M_ij k̂_i + Z_ij q̂_i) 2^(G_i − G_j)     of a write
    dG   = q̂ ⊙ dq̂ + k̂ ⊙ (dk̂ as an error − dk̂ as a write), and S ⊙ dS 2^(G_C) for the last token
    dg_t = Σ_{i ≥ t} dG_i
    dβ_i = (dV_i / β_i) · (E_i / β_i)

Rows and columns of one pair meet in dg with opposite signs. Both are formed from the same rounded operands, so that
what does not cross t cancels to float32's precision and not to bf16's.

The norm's gradient dq = (dq̂ − q̂ (q̂·dq̂)) / ‖q‖ needs no second pass over a row, because

    q̂_i · dq̂_i = o_i · dO_i                    k̂_i · dk̂_i = 2 β_i dβ_i − dV_i · v_i  (additive: dV_i · v_i)

A channel decay takes two kernels, the one here (Z, M, dβ) and `channel_gradients` (the rest); otherwise
`scalar_gradients` does all.
"""

import triton
import triton.language as tl

from kernels.gpu.common import SIZES, floored, load_norms, load_rows, locate, write_strength


@triton.jit
def write_gradient(gradient, raw, SIGMOID: tl.constexpr):
    """Gradient of the raw β from that of β."""
    if SIGMOID == 0:
        return gradient
    else:
        s = 1.0 / (1.0 + tl.exp(-raw))
        return gradient * (SIGMOID * s * (1.0 - s))


@triton.jit
def store_pairs(X, X_near, tile, x):
    """What lies under the diagonal of x, and its mirror image: that of pairs in one half of the chunk apart."""
    C: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = C // 2
    r = tl.arange(0, C)
    mirrored = tl.trans(x)
    block = (r // HALF)[:, None] == (r // HALF)[None, :]
    lower = r[:, None] > r[None, :]
    zero = tl.zeros((C, C), x.dtype)
    above = tl.where(block, zero, mirrored)
    tl.store(X + tile * C * C + r[:, None] * C + r[None, :], tl.where(lower, x, above))
    at = X_near + tile * C * HALF + r[:, None] * HALF + (r % HALF)[None, :]
    tl.store(at, tl.where(r[:, None] < r[None, :], mirrored, zero), mask=block)


@triton.jit
def load_pairs(X, X_near, tile, mirrored, chosen):
    """The chosen elements of what `store_pairs` stored, of rows `mirrored` in their half."""
    C: tl.constexpr = chosen.shape[0]
    HALF: tl.constexpr = C // 2
    r = tl.arange(0, C)
    at = X + tile * C * C + r[:, None] * C + r[None, :]
    at_near = X_near + tile * C * HALF + r[:, None] * HALF + (r % HALF)[None, :]
    return tl.load(tl.where(mirrored[:, None], at_near, at), mask=chosen, other=0.0)


@triton.jit(do_not_specialize=SIZES)
def pair_gradients_kernel(
    v,  # [B, T, HV, V]
    beta,  # [B, T, HV]
    o,  # [B, T, HV, V], with L2NORM
    d_o,
    d_v,
    E,  # [tiles, C, VP], delta rule
    norms,  # [tiles, 2, C]
    Z,  # [tiles, C, C], written; also what follows. [i, j] as above for i > j, and mirrored between the chunk's halves
    M,
    Z_near,  # [tiles, C, C/2]: row i has Z_ji for the later tokens j of its half, else zero
    M_near,
    diagonal,  # [tiles, C]: Z_ii
    dots,  # [tiles, 2, C], with L2NORM: q̂·dq̂, k̂·dk̂
    d_beta,  # [B, T, HV]
    chunks,
    scale,
    T,
    NT,
    HV: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DELTA: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    PACKED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    head = (tile % HV).to(tl.int32)
    first, length = locate(tl.program_id(0) // HV, T, NT, chunks, C, PACKED)
    r = tl.arange(0, C)
    live = r < length
    z = tl.zeros((C, C), tl.float32)
    m = tl.zeros((C, C), tl.float32)
    o_dot = tl.zeros((C,), tl.float32)
    v_dot = tl.zeros((C,), tl.float32)
    error_dot = tl.zeros((C,), tl.float32)
    inverse = tl.full((C,), 1.0, tl.float32)
    if DELTA:
        raw = tl.load(beta + (first + r) * HV + head, mask=r < length, other=0.0).to(tl.float32)
        b_beta = floored(write_strength(raw, SIGMOID))
        inverse = 1.0 / b_beta
    rows = (first * HV + head) * V
    for start in tl.range(0, VP, BV):
        vc = start + tl.arange(0, BV)
        b_do = load_rows(d_o + rows, HV * V, r, vc, live, V, VP)
        b_v = load_rows(v + rows, HV * V, r, vc, live, V, VP)
        b_dv = load_rows(d_v + rows, HV * V, r, vc, live, V, VP)
        if L2NORM:
            b_o = load_rows(o + rows, HV * V, r, vc, live, V, VP)
            o_dot += tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
            v_dot += tl.sum(b_v.to(tl.float32) * b_dv.to(tl.float32), 1)
        if DELTA:
            b_E = tl.load(E + tile * C * VP + r[:, None] * VP + vc[None, :])
            error_dot += tl.sum((b_dv * inverse[:, None]) * (b_E * inverse[:, None]), 1)
            m = tl.dot(b_dv.to(OPERAND), tl.trans(b_E), acc=m, input_precision=PRECISION)
        else:
            b_E = b_v.to(OPERAND)
        z = tl.dot(b_do.to(OPERAND), tl.trans(b_E), acc=z, input_precision=PRECISION)

    norm_q, norm_k = load_norms(norms, tile, C, L2NORM)
    z *= (norm_q * scale)[:, None] * norm_k[None, :]
    tl.store(diagonal + tile * C + r, tl.sum(tl.where(r[:, None] == r[None, :], z, 0.0), 1))
    store_pairs(Z, Z_near, tile, z.to(OPERAND))
    if DELTA:
        store_pairs(M, M_near, tile, (m * -norm_k[:, None] * norm_k[None, :]).to(OPERAND))
        at_beta = d_beta + (first + r) * HV + head
        d_raw = write_gradient(error_dot, raw, SIGMOID)
        tl.store(at_beta, d_raw.to(d_beta.dtype.element_ty), mask=r < length)
        v_dot = 2.0 * b_beta * error_dot - v_dot
    if L2NORM:
        tl.store(dots + tile * 2 * C + r, o_dot)
        tl.store(dots + (tile * 2 + 1) * C + r, v_dot)
