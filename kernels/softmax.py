"""Causal softmax attention, the mechanism that the others are measured against.

o_t = Σ_{s ≤ t} softmax_s(scale · q_t·k_s) v_s
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.checks import PLAIN_BACKENDS, check_groups, check_scale, check_tensor, read_cu_seqlens, resolve_backend


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
    if resolve_backend(backend, q.device, PLAIN_BACKENDS) == "reference":
        return reference.softmax_attention(q, k, v, D**-0.5 if scale is None else scale, bounds)

    if bounds is None:
        return _attend(q, k, v, scale).to(v.dtype)
    sequences = [slice(start, end) for start, end in pairwise(bounds) if start < end]
    return torch.cat([_attend(q[:, at], k[:, at], v[:, at], scale) for at in sequences], dim=1).to(v.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    (T, HQ), (S, HKV) = q.shape[1:3], k.shape[1:3]
    mask = None
    if 1 < T < S:  # a single query sees every key, and T = S is torch's own causal case
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=1 < T == S,
        scale=scale,
        enable_gqa=HQ != HKV,
    )
    return o.transpose(1, 2)
