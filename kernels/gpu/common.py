# mypy: disable-error-code="no-untyped-def"
"""What the kernels share: gates, write strengths, powers, where the rows of a chunk lie.

Every kernel is compiled for one rule and one decay; `tl.constexpr` arguments in capitals choose. Operands of
tensor-core products are bf16 for bf16 inputs; float32 for float16 inputs, in TF32 products that lose nothing of them
(bf16 would; float16 itself has not the range for powers of decays); and float32 for float32 inputs, in three TF32
products that are as exact as float32. Sums, states and gates are float32; cumulative gates are float64 beside float32
operands, so that their differences are exact to float32.
"""

import os

import triton
import triton.language as tl

# Triton's interpreter runs the kernels on a CPU, for tests; it has no inline assembly.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Arguments that change from call to call: no kernel is compiled anew for their divisors.
SIZES = ("scale", "T", "NT")

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NORM_EPS = tl.constexpr(1e-6)  # under the root of the query and key norm, as in kernels.ops
# A token's log2-decay is cut here: 2⁻⁶⁴ is nothing beside float32's 2⁻²⁴, and −inf becomes a number.
STRONGEST = tl.constexpr(-64.0)
# |β| is at least this inside the delta rule, so that E / β is defined. Writes of 2⁻⁴⁰ v are invisible beside float32's
# 2⁻²⁴, and β² is far from the smallest number.
WEAKEST = tl.constexpr(2.0**-40)


@triton.jit
def exp2(x):
    """2ˣ in float32, 0 under 2⁻¹²⁶. Assembly, because Triton evaluates tl.exp2 again for every layout it needs."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )


@triton.jit
def reciprocal(x):
    """1 / x in float32, to one unit in the last place."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def opening(z, SILU: tl.constexpr):
    """a(z) and a'(z) of a gate's activation: SiLU, or the sigmoid."""
    sigmoid = reciprocal(1.0 + exp2(z * -LOG2_E))
    if SILU:
        return z * sigmoid, sigmoid * (1.0 + z * (1.0 - sigmoid))
    else:
        return sigmoid, sigmoid * (1.0 - sigmoid)


@triton.jit
def softplus(x):
    """log(1 + eˣ) and its derivative, the sigmoid, both from u = e^−|x|, to 3e-7 of themselves (4e-6 below −20).

    log(1 + eˣ) = max(x, 0) + log(1 + u), and log(1 + u) / u is a polynomial to 3e-8 on [0, 1]: its minimax of degree 8.
    """
    u = exp2(tl.abs(x) * -LOG2_E)
    p = 0.0782259551 + u * (-0.0295052408 + u * 0.00523269476)
    p = -0.248429822 + u * (0.191060069 + u * (-0.136632461 + u * p))
    p = 0.99999997 + u * (-0.499994931 + u * (0.333190968 + u * p))
    return tl.maximum(x, 0.0) + u * p, tl.where(x >= 0.0, 1.0, u) * reciprocal(1.0 + u)


@triton.jit
def log_decay(raw, rate, bias, GATE: tl.constexpr):
    """The log-decay g: `raw` itself, or −rate · softplus(raw + bias) with rate = exp(A_log)."""
    if GATE:
        value, _ = softplus(raw + bias)
        return -rate * value
    else:
        return raw


@triton.jit
def gate_gradient(d_g, raw, rate, live):
    """With the gate of `log_decay`: gradients of `raw`, and of A_log before it is summed, zero where not live."""
    value, slope = softplus(raw)
    b_g = -rate * value
    # What is cut has a gradient of nothing but rounding.
    d_g = tl.where(live & (b_g > STRONGEST * LN_2), d_g, 0.0)
    return d_g * (-rate * slope), d_g * b_g


@triton.jit
def write_strength(raw, SIGMOID: tl.constexpr):
    """β: `raw` itself for SIGMOID = 0, else SIGMOID · sigmoid(raw)."""
    if SIGMOID == 0:
        return raw
    else:
        return SIGMOID / (1.0 + tl.exp(-raw))


@triton.jit
def floored(beta):
    """β, or WEAKEST where |β| is less."""
    return tl.where(tl.abs(beta) < WEAKEST, WEAKEST, beta)


@triton.jit
def decayed(x, decay, OPERAND: tl.constexpr):
    """x ⊙ decay as an operand of a product."""
    return (x * decay).to(OPERAND)


@triton.jit
def locate(chunk, T, NT, chunks, C: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr):
    """First token of a chunk, counted through the batch, and its number of tokens (0 for an unused chunk).

    With FULL it is known to be C while compiling: then LLVM drops the masks of all rows.
    """
    if PACKED:
        first = tl.load(chunks + 2 * chunk)
        length = tl.load(chunks + 2 * chunk + 1).to(tl.int32)
    else:
        n = chunk % NT
        first = (chunk // NT).to(tl.int64) * T + n * C
        if FULL:
            length = tl.full((), C, tl.int32)
        else:
            length = tl.minimum(C, T - n * C)
    return first, length


@triton.jit
def load_rows(base, stride, rows, columns, live, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[rows, columns] of a matrix with rows `stride` apart, zero where a row is not `live` and from column WIDTH on."""
    mask = live[:, None]
    if WIDTH != PADDED:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_norms(norms, tile, C: tl.constexpr, L2NORM: tl.constexpr):
    """1/‖q‖ and 1/‖k‖ of a chunk's tokens, or ones."""
    r = tl.arange(0, C)
    if L2NORM:
        return tl.load(norms + tile * 2 * C + r), tl.load(norms + (tile * 2 + 1) * C + r)
    else:
        return tl.full((C,), 1.0, tl.float32), tl.full((C,), 1.0, tl.float32)


@triton.jit
def load_row(base, stride, row, columns, length, WIDTH: tl.constexpr):
    """One row of what `load_rows` reads, zero from `length` on."""
    there = tl.zeros_like(columns) + row < length  # a block: Triton 3.9's interpreter takes no scalar into a mask
    return tl.load(base + row * stride + columns, mask=(columns < WIDTH) & there, other=0.0)


@triton.jit
def store_rows(base, stride, rows, columns, live, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store x where `load_rows` would read."""
    mask = live[:, None]
    if WIDTH != PADDED:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(base + rows[:, None] * stride + columns[None, :], x.to(base.dtype.element_ty), mask=mask)
