"""The recurrence in chunks of tokens on a GPU: which kernels run, on which memory.

The forward keeps the state that enters each chunk, the errors E and the chunk's two matrices; what depends on queries,
keys and gates alone is computed again by the backward.

`kda_lm::chunk_forward` and `kda_lm::chunk_backward` are the same as torch operators, opaque to torch.compile (no graph
break, shapes by fakes). Outside of a compiler an autograd.Function does: the dispatcher would take longer than the GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gpu.launch import Launcher, contiguous, launcher, traced, types
from kernels.gpu.recurrence.channel_gradients import channel_gradients_kernel
from kernels.gpu.recurrence.pair_gradients import pair_gradients_kernel
from kernels.gpu.recurrence.pairs import pairs_kernel
from kernels.gpu.recurrence.plan import Plan, plan_for
from kernels.gpu.recurrence.prepare import prepare_kernel
from kernels.gpu.recurrence.scalar_gradients import scalar_gradients_kernel
from kernels.gpu.recurrence.scan import reverse_scan_kernel, scan_kernel


def chunk(
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
    """o [B, T, HV, V] in v's dtype, or float32, and the last state [N, HV, K, V] in float32; `inplace_state` is left to
    the caller.

    Tensors as in `kernels.chunk`; A_log is given if the kernels compute the gate; the write strength is `beta` for
    sigmoid = 0, else sigmoid · sigmoid(beta).
    """
    if q.dtype != k.dtype:
        dtype = torch.promote_types(q.dtype, k.dtype)
        q, k = q.to(dtype), k.to(dtype)
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    options = (scale, rule, decay, l2norm, sigmoid)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if torch.compiler.is_compiling() or traced(v):
        o, state, *_ = chunk_forward(*tensors, *options, float32_output, keep)
    elif keep:
        o, state = _Chunk.apply(*tensors, options, float32_output)
    else:
        o, state = _forward(*tensors, *options, float32_output, False)
    return o, state


def _prepare(
    p: Plan, launch: Launcher, inputs: Sequence[Tensor | None], norms: Tensor, chunks: Tensor | None, known: bool
) -> dict[str, Tensor]:
    """What a channel decay's state products need, from q, k, g, A_log, dt_bias: see kernels.gpu.recurrence.prepare.

    The norms are written too, unless `known`.
    """
    made = {  # in the order of the kernel's arguments
        "G": p.empty(p.B, p.T, p.HV, p.K, dtype=p.wide),
        "q_in": p.empty(p.tiles, p.C, p.KP),
        "k_in": p.empty(p.tiles if p.delta else 0, p.C, p.KP),
        "k_out": p.empty(p.tiles, p.C, p.KP),
        "total": p.floats(p.tiles, p.KP),
    }
    arguments = (*inputs, *made.values(), norms, chunks, *p.sizes)
    launch(prepare_kernel, (p.tiles * p.slices["prepare"],), arguments, p.prepare | {"KNOWN": known})
    return made


def _kept(p: Plan, keep: bool) -> list[Tensor]:
    """Memory for what the backward needs: S, E, W, P, then β, norms, and `drop` for a channel decay, else G.

    All but S and E are needed in any case.
    """
    delta = p.tiles if p.delta else 0
    kept = [
        p.empty(p.tiles if keep else 0, p.VP, p.KP),
        p.empty(delta if keep else 0, p.C, p.VP),
        p.empty(delta, p.C, p.C),
        p.empty(p.tiles, p.C, p.C),
    ]
    return [
        *kept,
        p.floats(delta, p.C),
        p.norms(),
        p.floats(p.tiles, p.C) if p.channel else p.empty(p.tiles, p.C, dtype=p.wide),
    ]


def _results(p: Plan, v: Tensor, float32_output: bool) -> list[Tensor]:
    return [v.new_empty(v.shape, dtype=torch.float32 if float32_output else v.dtype), p.floats(p.N, p.HV, p.K, p.V)]


def _forward(
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
    float32_output: bool,
    keep: bool,
) -> list[Tensor]:
    """[o, state] and, with `keep`, the list of `_kept`."""
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens = contiguous(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens
    )
    p = plan_for(q, k, v, g, A_log, dt_bias, cu_seqlens, scale, rule, decay, l2norm, sigmoid)
    o, state = _results(p, v, float32_output)
    S, E, W, P, strengths, norms, other = kept = _kept(p, keep)
    launch = launcher(p, keep, float32_output, types(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens))
    with torch.cuda.device_of(q):  # where Triton launches
        chunks, offsets = p.order(cu_seqlens)
        made: dict[str, Tensor] = {}
        queries, keys, G, drop = q, k, other, None
        if p.channel:
            made = _prepare(p, launch, (q, k, g, A_log, dt_bias), norms, chunks, known=False)
            queries, keys, G, drop = made["q_in"], made["k_out"], made["G"], other
        pairs = (q, k, g, beta, A_log, dt_bias, G, drop, norms, strengths, W, P, chunks)
        launch(pairs_kernel, (p.tiles,), (*pairs, *p.sizes), p.pairs)
        scan = (
            queries, made.get("k_in"), keys, made.get("total"), G, norms, v, strengths, W, P, o, S, E, initial_state,
            state, cu_seqlens, offsets,
        )  # fmt: skip
        flags = {"KEEP": keep, "INITIAL": initial_state is not None}
        launch(scan_kernel, (p.N * p.HV, p.slices["scan"]), (*scan, *p.sizes), p.scan | flags)
    return [o, state, *kept] if keep else [o, state]


def _backward(
    d_o: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    saved: Sequence[Tensor],
    scale: float,
    rule: str,
    decay: str,
    l2norm: bool,
    sigmoid: float,
) -> list[Tensor | None]:
    """Gradients of q, k, v, g, beta, A_log, dt_bias, initial_state."""
    d_o, d_state, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens = contiguous(
        d_o, d_state, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens
    )
    p = plan_for(q, k, v, g, A_log, dt_bias, cu_seqlens, scale, rule, decay, l2norm, sigmoid)
    S, E, W, P, strengths, norms, other = saved
    d_beta, d_initial = _like(beta), _like(initial_state)
    d_v, dS = p.empty(*v.shape), p.empty(p.tiles, p.VP, p.KP)
    launch = launcher(
        p, types(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, o, d_o, d_state), "backward"
    )
    with torch.cuda.device_of(q):  # where Triton launches
        chunks, offsets = p.order(cu_seqlens)
        made: dict[str, Tensor] = {}
        queries, keys, G = q, k, other
        if p.channel:
            made = _prepare(p, launch, (q, k, g, A_log, dt_bias), norms, chunks, known=True)
            queries, keys, G = made["q_in"], made["k_out"], made["G"]
        scan = (
            queries, made.get("k_in"), keys, made.get("total"), G, norms, strengths, W, P, d_o, d_v, dS, d_state,
            d_initial, cu_seqlens, offsets,
        )  # fmt: skip
        flags = {"FINAL": d_state is not None, "INITIAL": initial_state is not None}
        launch(reverse_scan_kernel, (p.N * p.HV, p.slices["reverse_scan"]), (*scan, *p.sizes), p.reverse_scan | flags)
        del made, queries, keys, scan  # their memory serves the gradients

        pairs: list[Tensor] = []
        if p.channel:
            delta = p.tiles if p.delta else 0
            pairs = [
                p.empty(p.tiles, p.C, p.C),  # Z, M
                p.empty(delta, p.C, p.C),
                p.empty(p.tiles, p.C, p.C // 2),
                p.empty(delta, p.C, p.C // 2),
                p.floats(p.tiles, p.C),  # the diagonal of Z
                p.floats(p.tiles if p.dots else 0, 2, p.C),  # products of rows with their gradients
            ]
            arguments = (v, beta, o, d_o, d_v, E, norms, *pairs, d_beta, chunks)
            launch(pair_gradients_kernel, (p.tiles,), (*arguments, *p.sizes), p.pair_gradients)
        # Of one value head each; in float32 where several value heads share a key head.
        grouped = p.HV != p.H
        d_q, d_k = (p.empty(p.B, p.T, p.HV, p.K, dtype=torch.float32 if grouped else q.dtype) for _ in range(2))
        # The gradient of a float32 gate is written over the cumulative gate.
        d_g = G if p.channel and g is not None and G.dtype == g.dtype else _like(g)
        slices = p.slices["gradients"] if p.channel else 1
        biases = p.KP if p.channel else 1
        sums = p.floats(0 if A_log is None else p.tiles, biases + slices)
        results = (d_q, d_k, d_g, sums) if p.channel else (d_q, d_k, d_g, d_beta, sums)
        if p.channel:
            arguments = (q, k, g, A_log, dt_bias, G, other, v, d_o, d_v, E, S, dS, norms, *pairs, *results, chunks)
            launch(channel_gradients_kernel, (p.tiles * slices,), (*arguments, *p.sizes), p.gradients)
        else:
            arguments = (q, k, g, beta, A_log, dt_bias, G, v, o, d_o, d_v, E, S, dS, P, norms, *results, chunks)
            launch(scalar_gradients_kernel, (p.tiles,), (*arguments, *p.sizes), p.gradients)
    if grouped:
        d_q, d_k = (x.unflatten(2, (p.H, -1)).sum(3).to(q.dtype) for x in (d_q, d_k))
    d_A_log = d_dt_bias = None
    if A_log is not None:
        by_head = sums.view(p.chunks, p.HV, -1).sum(0)
        d_A_log = by_head[:, biases:].sum(1).to(A_log.dtype)
        if dt_bias is not None:
            # A copy: no result of an operator may be a part of another tensor.
            d_dt_bias = by_head[:, : p.K if p.channel else 1].to(dt_bias.dtype, copy=True).reshape(-1)
    return [d_q, d_k, d_v.to(v.dtype), d_g, d_beta, d_A_log, d_dt_bias, d_initial]


def _like(x: Tensor | None) -> Tensor | None:
    """Memory for a gradient of x."""
    return None if x is None else x.new_empty(x.shape)


def differentiate(
    d_o: Tensor | None, d_state: Tensor | None, saved: Sequence[Any], options: Sequence[Any], backward: Any
) -> list[Tensor | None]:
    """Gradients of the nine tensor arguments, from those of o and the state; `saved` are the tensors, o and `_kept`."""
    *tensors, o = saved[:10]
    if d_o is None:
        d_o = torch.zeros_like(o)
    gradients = backward(d_o, d_state, *tensors, o, list(saved[10:]), *options)
    return [*(None if x is None else d for d, x in zip(gradients, tensors, strict=False)), None]


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, options, float32_output = arguments
        o, state, *kept = _forward(*tensors, *options, float32_output, True)  # type: ignore[call-arg]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, o, *kept)
        ctx.options = options
        return o, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
        return *differentiate(d_o, d_state, ctx.saved_tensors, ctx.options, _backward), None, None


chunk_forward = torch.library.custom_op("kda_lm::chunk_forward", _forward, mutates_args=())


@torch.library.custom_op("kda_lm::chunk_backward", mutates_args=())
def chunk_backward(
    d_o: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    saved: Sequence[Tensor],
    scale: float,
    rule: str,
    decay: str,
    l2norm: bool,
    sigmoid: float,
) -> list[Tensor]:
    """`_backward` with an empty tensor where there is no gradient: operators return no None."""
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    gradients = _backward(d_o, d_state, *tensors, o, saved, scale, rule, decay, l2norm, sigmoid)
    return [q.new_empty(0) if x is None else x for x in gradients]


@chunk_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any, A_log: Any, dt_bias: Any, *rest: Any) -> list[Tensor]:
    _, cu_seqlens, *options, float32_output, keep = rest
    p = plan_for(q, k, v, g, A_log, dt_bias, cu_seqlens, *options)
    return _results(p, v, float32_output) + (_kept(p, True) if keep else [])


@chunk_backward.register_fake
def _(d_o: Tensor, d_state: Any, q: Tensor, *rest: Any) -> list[Tensor]:
    return [q.new_empty(0 if x is None else x.shape, dtype=(q if x is None else x).dtype) for x in (q, *rest[:7])]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, scale, rule, decay, l2norm, sigmoid, _, keep = inputs
    o, _, *kept = output
    if not keep:
        raise RuntimeError("kda_lm::chunk_forward: got keep=False and inputs that require gradients")
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, o, *kept)
    ctx.options = (scale, rule, decay, l2norm, sigmoid)


def _operator_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    d_o, d_state = grads[:2]
    return *differentiate(d_o, d_state, ctx.saved_tensors, ctx.options, chunk_backward), *[None] * 7


chunk_forward.register_autograd(_operator_backward, setup_context=_setup_context)
