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

The norm's gradient dq = (dq̂ − q̂ (q̂·dq̂)) / ‖q‖ needs no program that has all of a row's channels, because

    q̂_i · dq̂_i = o_i · dO_i                    k̂_i · dk̂_i = 2 β_i dβ_i − dV_i · v_i  (additive: dV_i · v_i)

A channel decay takes two kernels, `pair_gradients` (Z, M, dβ) and `channel_gradients` (the rest); otherwise
`scalar_gradients` does all. Here is what they share.
"""

import triton
import triton.language as tl

from kernels.gpu.common import load_rows


@triton.jit
def write_gradient(gradient, raw, SIGMOID: tl.constexpr):
    """Gradient of the raw β from that of β."""
    if SIGMOID == 0:
        return gradient
    else:
        s = 1.0 / (1.0 + tl.exp(-raw))
        return gradient * (SIGMOID * s * (1.0 - s))


@triton.jit
def value_rows(
    v,
    d_o,
    d_v,
    E,
    rows,
    r,
    vc,
    live,
    tile,
    HV: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    DELTA: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """dO, dV (of the delta rule) and E of a chunk, for the value channels vc."""
    b_do = load_rows(d_o + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
    b_dv = b_do
    if DELTA:
        b_dv = load_rows(d_v + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
        b_E = tl.load(E + tile * live.shape[0] * VP + r[:, None] * VP + vc[None, :])
    else:
        b_E = load_rows(v + rows, HV * V, r, vc, live, V, VP).to(OPERAND)
    return b_do, b_dv, b_E


@triton.jit
def row_dots(a, b, rows, r, live, HV: tl.constexpr, V: tl.constexpr, VP: tl.constexpr):
    """a_i · b_i of a chunk's tokens: both [B, T, HV, V]."""
    dots = tl.zeros((live.shape[0],), tl.float32)
    for start in tl.range(0, VP, 64):  # channels at a time: in float32 they take registers
        vc = start + tl.arange(0, 64)
        x = load_rows(a + rows, HV * V, r, vc, live, V, VP).to(tl.float32)
        dots += tl.sum(x * load_rows(b + rows, HV * V, r, vc, live, V, VP).to(tl.float32), 1)
    return dots


@triton.jit
def diagonal(x):
    """Of a square matrix."""
    i = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(i[:, None] == i[None, :], x, 0.0), 1)
