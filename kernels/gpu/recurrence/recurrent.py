"""The recurrence token by token in one launch, for decoding: rule and decay choose among six kernels.

    S ← exp(g_t) ⊙ S                      decay: none | scalar | channel
    u = β_t (v_t − Sᵀ k_t)  or  v_t       rule:  delta | additive
    S ← S + k_t uᵀ
    o_t = scale · Sᵀ q_t                  read after write

A program carries BV value columns of the state of one sequence and value head, float32 in registers, through all
tokens: columns never meet, so N · HV · ⌈V / BV⌉ programs run independently. Arithmetic is float32.

Bytes    A call reads and writes each state once, 8·K·V bytes a head, however many tokens it has; the rows q, k, g,
         v, o are 2·(3K + 2V) a token and head in bf16 (KDA, HV = H). A step of one token is bound by the state: 128 KiB
         against 1.25 KiB at K = V = 128.
Gradient Of the chunkwise form (kernels.gpu.recurrence.chunk), whose forward is run again in the backward.
"""

# mypy: disable-error-code="no-untyped-def"
# The reason: @triton.jit functions take constexprs, pointers and blocks, none of which has a type to annotate with.

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import NORM_EPS, log_decay, write_strength
from kernels.gpu.launch import contiguous, launcher, numbers, token_stride, traced, types
from kernels.gpu.recurrence.chunk import chunk_backward, chunk_forward, differentiate

TILE = 4096  # state elements of a program: 32 registers a thread with four warps
WIDEST = 64  # value columns of a program


@triton.jit
def _load(pointers, mask):
    """In float32, zero outside of the mask; None: all of it is inside."""
    values = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _recurrent(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    initial_state,
    cu_seqlens,
    o,
    final_state,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    RULE: tl.constexpr,
    DECAY: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Pointers are to contiguous tensors, but for the stride from a token's q, k, v, g or beta to the next one's; those
    that the cell does not take are None. BK ≥ K and BV: powers of two."""
    GATE: tl.constexpr = A_log is not None
    slices = tl.cdiv(V, BV)
    row = tl.program_id(0) // slices  # sequence · HV + value head
    sequence, head = (row // HV).to(tl.int64), row % HV
    if cu_seqlens is None:
        start = sequence * T
        length = T
    else:
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)

    i_k = tl.arange(0, BK)
    i_v = tl.program_id(0) % slices * BV + tl.arange(0, BV)
    in_k = i_k < K if K < BK else None
    in_v = i_v < V if V % BV else None
    inside = None if K == BK and V % BV == 0 else (i_k < K)[:, None] & (i_v < V)[None, :]
    before, place = row.to(tl.int64) * (K * V), i_k[:, None] * V + i_v[None, :]  # [BK, BV]
    S = tl.zeros([BK, BV], tl.float32) if initial_state is None else _load(initial_state + before + place, inside)

    q_row = q + start * q_stride + head // (HV // H) * K + i_k
    k_row = k + start * k_stride + head // (HV // H) * K + i_k
    v_row = v + start * v_stride + head * V + i_v
    o_row = o + (start * HV + head) * V + i_v
    if RULE == "delta":
        beta_row = beta + start * beta_stride + head
    rate, bias = 0.0, 0.0
    if GATE:
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    if DECAY == "scalar":
        g_row = g + start * g_stride + head
        if dt_bias is not None:
            bias = tl.load(dt_bias + head).to(tl.float32)
    elif DECAY == "channel":
        g_row = g + start * g_stride + head * K + i_k
        if dt_bias is not None:
            bias = _load(dt_bias + head * K + i_k, in_k)

    for _ in range(length):
        query = _load(q_row, in_k)  # [BK]
        key = _load(k_row, in_k)
        write = _load(v_row, in_v)  # [BV]
        if L2NORM:
            query *= tl.rsqrt(tl.sum(query * query) + NORM_EPS)
            key *= tl.rsqrt(tl.sum(key * key) + NORM_EPS)
        if DECAY == "scalar":
            S *= tl.exp(log_decay(tl.load(g_row).to(tl.float32), rate, bias, GATE))
            g_row += g_stride
        elif DECAY == "channel":
            S *= tl.exp(log_decay(_load(g_row, in_k), rate, bias, GATE))[:, None]
            g_row += g_stride
        if RULE == "delta":
            strength = write_strength(tl.load(beta_row).to(tl.float32), SIGMOID)
            write = strength * (write - tl.sum(S * key[:, None], axis=0))
            beta_row += beta_stride
        S += key[:, None] * write[None, :]
        read = scale * tl.sum(S * query[:, None], axis=0)
        tl.store(o_row, read.to(o.dtype.element_ty), mask=in_v)
        q_row += q_stride
        k_row += k_stride
        v_row += v_stride
        o_row += HV * V

    tl.store(final_state + before + place, S, mask=inside)


def _rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """x [B, T, ...] or a copy of it in which each token's numbers lie together and all tokens a stride apart, as in a
    part of wider rows; and the stride.
    """
    if x is None:
        return None, 0
    stride = token_stride(x)
    together = x.stride(-1) == 1 and (x.dim() == 3 or x.stride(2) == x.shape[3])
    if together and stride is not None:
        return x, stride
    return x.contiguous(), x[0, 0].numel()


@lru_cache
def tile(K: int, V: int) -> tuple[int, int, int]:
    """BK, BV and the number of warps: about `TILE` elements, at most 32 a thread, each held by one thread only."""
    BK = triton.next_power_of_2(K)
    BV = min(triton.next_power_of_2(V), WIDEST, TILE // BK)
    return BK, BV, min(4, max(1, BK * BV // 1024))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    rule: str,
    decay: str,
    l2norm: bool,
    sigmoid: float,
    *,
    out_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`recurrent` without gradient. The last state is written to `out_state` [N,HV,K,V] if given (contiguous float32):
    with the initial state itself, the update is in place."""
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = v.new_empty(v.shape)
    final_state = v.new_empty((N, HV, K, V), dtype=torch.float32) if out_state is None else out_state
    BK, BV, warps = tile(K, V)
    rows, strides = zip(*map(_rows, (q, k, v, g, beta)), strict=True)
    tensors = (*rows, *contiguous(A_log, dt_bias, initial_state, cu_seqlens))
    sizes = {"H": H, "HV": HV, "K": K, "V": V, "BK": BK, "BV": BV}
    options = {"RULE": rule, "DECAY": decay, "L2NORM": l2norm, "SIGMOID": sigmoid, "num_warps": warps}
    # Triton also compiles for a length of one and for multiples of 16.
    key = (T == 1, T % 16 == 0, *sizes.values(), *options.values())
    start = launcher("recurrent", v.device, key, types(*tensors, final_state), numbers(*strides))
    with torch.cuda.device_of(v):
        grid = (N * HV * triton.cdiv(V, BV),)
        start(_recurrent, grid, (*tensors, o, final_state, *strides, scale, T), sizes | options)
    return o, final_state


@torch.library.custom_op("kda_lm::recurrent", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    rule: str,
    decay: str,
    l2norm: bool,
    sigmoid: float,
) -> tuple[Tensor, Tensor]:
    return launch(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, rule, decay, l2norm, sigmoid)


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens = rest[5]
    N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty(v.shape), v.new_empty((N, v.shape[2], k.shape[3], v.shape[3]), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.options = inputs[9:]


def _backward(ctx: Any, d_o: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
    """Autograd passes zeros for the gradient of a result that was not used."""
    tensors = ctx.saved_tensors
    o, _, *kept = chunk_forward(*tensors, *ctx.options, False, True)
    return *differentiate(d_o, d_state, (*tensors, o, *kept), ctx.options, chunk_backward), *[None] * 5


_operator.register_autograd(_backward, setup_context=_setup_context)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    rule: str,
    decay: str,
    l2norm: bool,
    sigmoid: float,
    float32_output: bool = False,
    inplace_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """o [B,T,HV,V] in v's dtype, or float32, and the last state [N,HV,K,V] in float32, with `inplace_state` where the
    initial one was, if that lies without gaps.

    Args:
        q, k: [B,T,H,K], K at most 256. With `l2norm` each is divided by sqrt(Σ_c x_c² + 1e-6), head by head.
        v: [B,T,HV,V]; value head i reads key head i // (HV // H).
        g: [B,T,HV] for decay "scalar", [B,T,HV,K] for "channel". With A_log [HV] the log-decay is
            −exp(A_log) · softplus(g + dt_bias), dt_bias [HV] or [HV·K] or None; without, g itself in [−inf, 0].
        beta: [B,T,HV] for rule "delta". The write strength is beta for `sigmoid` 0, else sigmoid · sigmoid(beta).
        initial_state: [N,HV,K,V] float32, zero unless given.
        cu_seqlens: integers [N + 1] on the device: N sequences, empty ones too, packed along T; B = 1.
    """
    if float32_output:
        v = v.float()
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    # The dispatcher costs more than the launch: only autograd and compilers need it.
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if torch.compiler.is_compiling() or traced(v) or differentiable:
        o, state = _operator(*given, scale, rule, decay, l2norm, sigmoid)
        return o, state
    there = inplace_state and initial_state is not None and initial_state.is_contiguous()
    return launch(*given, scale, rule, decay, l2norm, sigmoid, out_state=initial_state if there else None)
