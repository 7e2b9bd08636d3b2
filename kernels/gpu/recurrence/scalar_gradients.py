# mypy: disable-error-code="no-untyped-def"
"""Gradients of q, k, g and β under a scalar decay or none: see gradients.py for the equations.

The decay between two tokens is one number: dg of what lies between them comes from products that are already there,
Z ⊙ P and M ⊙ A, and no key channel takes part. One program per chunk and value head.
"""

import triton
import triton.language as tl

from kernels.gpu.common import (
    SIZES,
    exp2,
    floored,
    gate_gradient,
    load_norms,
    load_rows,
    locate,
    store_rows,
    write_strength,
)
from kernels.gpu.recurrence.gradients import diagonal, row_dots, value_rows, write_gradient


@triton.jit(do_not_specialize=SIZES)
def scalar_gradients_kernel(
    q,  # [B, T, H, K]
    k,
    g,  # [B, T, HV], with GATE
    beta,
    A_log,
    dt_bias,
    G,  # [tiles, C], scalar decay
    v,  # [B, T, HV, V]
    o,
    d_o,
    d_v,
    E,  # [tiles, C, VP], delta rule
    S,  # [tiles, VP, KP]
    dS,
    P,  # [tiles, C, C]
    norms,
    d_q,  # [B, T, HV, K], written; also what follows
    d_k,
    d_g,  # [B, T, HV]
    d_beta,
    sums,  # [tiles, 2], with GATE: the chunk's gradients of dt_bias and of A_log
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
    DELTA: tl.constexpr,
    GATED: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    head = (tile % HV).to(tl.int32)
    first, length = locate(tl.program_id(0) // HV, T, NT, chunks, C, PACKED, FULL)
    r = tl.arange(0, C)
    live = r < length
    q += (first * H + head // (HV // H)) * K
    k += (first * H + head // (HV // H)) * K
    rows = (first * HV + head) * V

    # The pairs' gradients.
    z = tl.zeros((C, C), tl.float32)
    m = tl.zeros((C, C), tl.float32)
    if DELTA:
        raw_beta = tl.load(beta + (first + r) * HV + head, mask=live, other=0.0).to(tl.float32)
    if BV == VP:  # read once, for all of the products
        vc = tl.arange(0, BV)
        b_do, b_dv, b_E = value_rows(v, d_o, d_v, E, rows, r, vc, live, tile, HV, V, VP, DELTA, OPERAND)
    # All is asked for before the products: each would make the program wait again.
    norm_q, norm_k = load_norms(norms, tile, C, L2NORM)
    if GATED:
        b_G = tl.load(G + tile * C + r)
        end = tl.load(G + tile * C + C - 1)
        b_P = tl.load(P + tile * C * C + r[:, None] * C + r[None, :])
    for start in tl.range(0, VP, BV):
        if BV < VP:
            vc = start + tl.arange(0, BV)
            b_do, b_dv, b_E = value_rows(v, d_o, d_v, E, rows, r, vc, live, tile, HV, V, VP, DELTA, OPERAND)
        if DELTA:
            m = tl.dot(b_dv, tl.trans(b_E), acc=m, input_precision=PRECISION)
        z = tl.dot(b_do, tl.trans(b_E), acc=z, input_precision=PRECISION)

    if DELTA:
        b_beta = floored(write_strength(raw_beta, SIGMOID))
        b_dbeta = diagonal(m) / (b_beta * b_beta)
        d_raw = write_gradient(b_dbeta, raw_beta, SIGMOID)
        tl.store(d_beta + (first + r) * HV + head, d_raw.to(d_beta.dtype.element_ty), mask=live)
    if L2NORM:
        dot_q = row_dots(o, d_o, rows, r, live, HV, V, VP)
        dot_k = row_dots(v, d_v, rows, r, live, HV, V, VP)
        if DELTA:
            dot_k = 2.0 * b_beta * b_dbeta - dot_k
    reading = norm_q * scale
    entering = norm_k
    leaving = norm_k
    lower = r[:, None] >= r[None, :]
    strict = r[:, None] > r[None, :]
    b_dG = tl.zeros((C,), tl.float32)
    if GATED:
        down = exp2(tl.where(lower, (b_G[:, None] - b_G[None, :]).to(tl.float32), float("-inf")))
        # A pair crosses every gate from behind j to i: for rows, and against columns.
        crossing = z * b_P
        if DELTA:
            a = tl.zeros((C, C), tl.float32)
            for column in tl.range(0, KP, BK):
                b_k = load_rows(k, H * K, r, column + tl.arange(0, BK), live, K, KP).to(OPERAND)
                a = tl.dot(b_k, tl.trans(b_k), acc=a, input_precision=PRECISION)
            crossing -= m * a * down * (norm_k[:, None] * norm_k[None, :])
        crossing = tl.where(strict, crossing, 0.0)
        b_dG = tl.sum(crossing, 1) - tl.sum(crossing, 0)
        power = exp2(b_G.to(tl.float32))
        reading *= power
        entering *= power
        leaving *= exp2((end - b_G).to(tl.float32))
    else:
        down = tl.where(lower, 1.0, 0.0)
    z = (z * down * ((norm_q * scale)[:, None] * norm_k[None, :])).to(OPERAND)
    m *= tl.where(strict, down, 0.0)

    # Their transposes, by products of their own: Triton 3.4 to 3.7.0 compiles the product of a transposed, rounded
    # accumulator wrongly.
    z_t = tl.zeros((C, C), tl.float32)
    m_t = tl.zeros((C, C), tl.float32)
    for start in tl.range(0, VP, BV):
        if BV < VP:
            vc = start + tl.arange(0, BV)
            b_do, b_dv, b_E = value_rows(v, d_o, d_v, E, rows, r, vc, live, tile, HV, V, VP, DELTA, OPERAND)
        if DELTA:
            m_t = tl.dot(b_E, tl.trans(b_dv), acc=m_t, input_precision=PRECISION)
        z_t = tl.dot(b_E, tl.trans(b_do), acc=z_t, input_precision=PRECISION)
    upper = r[:, None] <= r[None, :]
    if GATED:
        down = exp2(tl.where(upper, (b_G[None, :] - b_G[:, None]).to(tl.float32), float("-inf")))
    else:
        down = tl.where(upper, 1.0, 0.0)
    z_t = (z_t * down * (norm_k[:, None] * (norm_q * scale)[None, :])).to(OPERAND)
    if DELTA:
        # Rows for the key of an error, columns for that of a write: both meet k.
        m += m_t * tl.where(r[:, None] < r[None, :], down, 0.0)
        m = (m * (-norm_k[:, None] * norm_k[None, :])).to(OPERAND)

    # Σ S ⊙ dS as the trace of a product: so bf16 operands are never looked at outside of the tensor core, which sums
    # their products in float32, too. Float32 operands would be split in three.
    BY_TRACE: tl.constexpr = tl.float32 != OPERAND
    if BY_TRACE:
        d_end = tl.zeros((BK, BK), tl.float32)
    else:
        d_end = tl.zeros((BV,), tl.float32)
    written_sum = tl.zeros((C,), tl.float32)
    for column in tl.range(0, KP, BK, num_stages=STAGES if BV == VP else 1):
        c = column + tl.arange(0, BK)
        b_dq = tl.zeros((C, BK), tl.float32)
        b_error = tl.zeros((C, BK), tl.float32)
        b_dk = tl.zeros((C, BK), tl.float32)
        b_q = load_rows(q, H * K, r, c, live, K, KP)
        b_k = load_rows(k, H * K, r, c, live, K, KP)
        for start in tl.range(0, VP, BV, num_stages=STAGES if BV < VP else 1):
            vc = start + tl.arange(0, BV)
            at_state = tile * VP * KP + vc[:, None] * KP + c[None, :]
            b_S = tl.load(S + at_state)
            b_dS = tl.load(dS + at_state)
            if BV < VP:
                b_do, b_dv, b_E = value_rows(v, d_o, d_v, E, rows, r, vc, live, tile, HV, V, VP, DELTA, OPERAND)
            b_dq = tl.dot(b_do, b_S, acc=b_dq, input_precision=PRECISION)
            if DELTA:
                b_error = tl.dot(b_dv, b_S, acc=b_error, input_precision=PRECISION)
            b_dk = tl.dot(b_E, b_dS, acc=b_dk, input_precision=PRECISION)
            if GATED:
                if BY_TRACE:
                    d_end = tl.dot(tl.trans(b_S), b_dS, acc=d_end)
                else:
                    d_end += tl.sum(b_S * b_dS, 1)
        b_dq *= reading[:, None]
        b_dk *= leaving[:, None]
        if DELTA:
            b_error *= -entering[:, None]
        if GATED:
            # The last token's write crosses no gate of this chunk: left out, for it would be far larger than what does.
            written = tl.where(r == length - 1, 0.0, tl.sum(b_k * b_dk, 1))
            b_dG += tl.sum(b_q * b_dq + b_k * b_error, 1) - written
            written_sum += written
        if DELTA:
            b_dk += b_error
            b_dk = tl.dot(m, b_k.to(OPERAND), acc=b_dk, input_precision=PRECISION)
        b_dq = tl.dot(z, b_k.to(OPERAND), acc=b_dq, input_precision=PRECISION)
        b_dk = tl.dot(z_t, b_q.to(OPERAND), acc=b_dk, input_precision=PRECISION)
        if L2NORM:
            b_dq -= b_q * (norm_q * norm_q * dot_q)[:, None]
            b_dk -= b_k * (norm_k * norm_k * dot_k)[:, None]
        store_rows(d_q + (first * HV + head) * K, HV * K, r, c, live, b_dq, K, KP)
        store_rows(d_k + (first * HV + head) * K, HV * K, r, c, live, b_dk, K, KP)
    if GATED:
        if BY_TRACE:
            d_end = tl.sum(diagonal(d_end), 0)
        else:
            d_end = tl.sum(d_end, 0)
        b_dg = tl.cumsum(b_dG, 0, reverse=True)
        b_dg += d_end * exp2(end.to(tl.float32)) + tl.sum(written_sum, 0)
        if GATE:
            raw = tl.load(g + (first + r) * HV + head, mask=r < length, other=0.0).to(tl.float32)
            bias = 0.0
            if BIAS:
                bias = tl.load(dt_bias + head).to(tl.float32)
            rate = tl.exp(tl.load(A_log + head).to(tl.float32))
            b_dg, by_rate = gate_gradient(b_dg, raw + bias, rate, live)
            tl.store(sums + tile * 2, tl.sum(b_dg, 0))
            tl.store(sums + tile * 2 + 1, tl.sum(by_rate, 0))
        tl.store(d_g + (first + r) * HV + head, b_dg.to(d_g.dtype.element_ty), mask=r < length)
