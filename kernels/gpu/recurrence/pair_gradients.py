# mypy: disable-error-code="no-untyped-def"
"""Gradients of the pairs' products under a channel decay, Z and M of gradients.py, and of β.

One program per chunk and value head.
"""

import triton
import triton.language as tl

from kernels.gpu.common import SIZES, floored, load_norms, locate, write_strength
from kernels.gpu.recurrence.gradients import diagonal, row_dots, value_rows, write_gradient


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
    v,  # [B, T, HV, V], additive rule or DOTS
    beta,  # [B, T, HV]
    o,  # [B, T, HV, V], with DOTS
    d_o,
    d_v,
    E,  # [tiles, C, VP], delta rule
    norms,  # [tiles, 2, C]
    Z,  # [tiles, C, C], written; also what follows. [i, j] as above for i > j, and mirrored between the chunk's halves
    M,
    Z_near,  # [tiles, C, C/2]: row i has Z_ji for the later tokens j of its half, else zero
    M_near,
    z_diagonal,  # [tiles, C]: Z_ii
    dots,  # [tiles, 2, C], with DOTS: q̂·dq̂, k̂·dk̂
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
    DOTS: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    head = (tile % HV).to(tl.int32)
    first, length = locate(tl.program_id(0) // HV, T, NT, chunks, C, PACKED, FULL)
    r = tl.arange(0, C)
    live = r < length
    if DELTA:
        raw_beta = tl.load(beta + (first + r) * HV + head, mask=live, other=0.0).to(tl.float32)
    rows = (first * HV + head) * V
    norm_q, norm_k = load_norms(norms, tile, C, L2NORM)  # with the others, so that their waiting is one
    z = tl.zeros((C, C), tl.float32)
    m = tl.zeros((C, C), tl.float32)
    for start in tl.range(0, VP, BV):
        vc = start + tl.arange(0, BV)
        b_do, b_dv, b_E = value_rows(v, d_o, d_v, E, rows, r, vc, live, tile, HV, V, VP, DELTA, OPERAND)
        z = tl.dot(b_do, tl.trans(b_E), acc=z, input_precision=PRECISION)
        if DELTA:
            m = tl.dot(b_dv, tl.trans(b_E), acc=m, input_precision=PRECISION)

    z *= (norm_q * scale)[:, None] * norm_k[None, :]
    tl.store(z_diagonal + tile * C + r, diagonal(z))
    store_pairs(Z, Z_near, tile, z.to(OPERAND))
    if DELTA:
        store_pairs(M, M_near, tile, (m * -norm_k[:, None] * norm_k[None, :]).to(OPERAND))
        b_beta = floored(write_strength(raw_beta, SIGMOID))
        b_dbeta = diagonal(m) / (b_beta * b_beta)
        d_raw = write_gradient(b_dbeta, raw_beta, SIGMOID)
        tl.store(d_beta + (first + r) * HV + head, d_raw.to(d_beta.dtype.element_ty), mask=live)
    if DOTS:
        tl.store(dots + tile * 2 * C + r, row_dots(o, d_o, rows, r, live, HV, V, VP))
        dot_k = row_dots(v, d_v, rows, r, live, HV, V, VP)
        if DELTA:
            dot_k = 2.0 * b_beta * b_dbeta - dot_k
        tl.store(dots + (tile * 2 + 1) * C + r, dot_k)
