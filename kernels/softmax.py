"""Causal softmax attention, the mechanism that the others are measured against.

    o_t = Σ_{s ≤ t} softmax_s(scale · q_t·k_s) v_s
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.checks import check_groups, check_scale, check_tensor, read_cu_seqlens, resolve_backend


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Grouped-query causal attention through `F.scaled_dot_product_attention`.

    Args:
        q: [B, T, HQ, D], the last T of the S positions, T ≤ S: a cache of keys and values goes in whole.
        k, v: [B, S, HKV, D], HQ a multiple of HKV; query head i reads key head i // (HQ // HKV).
        scale: factor on the scores; D^−½ unless given.
        cu_seqlens: int32 or int64 [N + 1], boundaries of N sequences packed along T; B = 1 and T = S.
        backend: see `resolve_backend`.

    Returns:
        o [B, T, HQ, D] in v's dtype. Under autocast the products follow autocast, as in any attention layer.
    """
    check_scale(scale)
    check_tensor("q", q, "B, T, HQ, D", (-1, -1, -1, -1))
    B, T, HQ, D = q.shape
    check_tensor("k", k, "B, S, HKV, D", (B, -1, -1, D), q)
    S, HKV = k.shape[1:3]
    check_tensor("v", v, "B, S, HKV, D", (B, S, HKV, D), q)
    check_groups("q", HQ, "k and v", HKV)
    if T > S:
        raise ValueError(f"q: got T = {T} queries for S = {S} keys, accepted: T ≤ S")
    if cu_seqlens is not None and T != S:
        raise ValueError(f"cu_seqlens: got T = {T} queries for S = {S} keys, accepted: T = S")
    bounds = read_cu_seqlens(cu_seqlens, B, T)
    if resolve_backend(backend, q.device) == "reference":
        return reference.softmax_attention(q, k, v, D**-0.5 if scale is None else scale, bounds)

    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    if bounds is None:
        o = _attend(*heads_first, scale)
    else:
        lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
        sequences = zip(*(x.split(lengths, dim=2) for x in heads_first), strict=True)
        o = torch.cat([_attend(*x, scale) for x in sequences if x[0].shape[2]], dim=2)
    return o.transpose(1, 2).to(v.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """[B, HQ, T, D] from q [B, HQ, T, D] and k, v [B, HKV, S, D]."""
    T, S = q.shape[2], k.shape[2]
    mask = None
    if 1 < T < S:  # one query sees everything, and T = S is the causal case that has its own fast path
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=1 < T == S, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
