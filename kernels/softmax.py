"""Causal softmax attention, the mechanism that the others are measured against.

o_t = Σ_{s ≤ t} softmax_s(scale · q_t·k_s) v_s, over the last `window` positions s if one is given.

`softmax_attention` is for training and prompts, `softmax_decode` for new tokens over a cache that is longer than what
is in it. Products of 16-bit inputs are of 16 bits, sums, weights and the log-sum-exp float32; float32 stays float32.
"""

import importlib.util
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.checks import (
    check_cu_seqlens,
    check_groups,
    check_scale,
    check_tensor,
    check_window,
    read_cu_seqlens,
    resolve_backend,
    without_triton,
)
from kernels.gpu.limits import WIDEST

if importlib.util.find_spec("triton") is not None:
    from kernels.gpu.attention.decode import decode as _decode
    from kernels.gpu.attention.operators import attention as _attention


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Grouped-query causal attention.

    Args:
        q: [B, T, HQ, D], the last T of the S positions, T ≤ S: a cache of keys and values goes in whole.
        k, v: [B, S, HKV, D], HQ a multiple of HKV; query head i reads key head i // (HQ // HKV).
        scale: factor on the scores; D^−½ unless given.
        cu_seqlens: int32 or int64 [N + 1], boundaries of N sequences packed along T; B = 1 and T = S.
        window: how many positions a token sees, itself included: the last ones. All unless given.
        backend: see `resolve_backend`; "torch" is `F.scaled_dot_product_attention`, "triton" takes D ≤ 256 in 16 or 32
            bits.

    Returns:
        o [B, T, HQ, D] in v's dtype. Under autocast the products follow autocast, as in any attention layer.
    """
    B, T, S = _check(q, k, v, scale, window)
    if cu_seqlens is not None and T != S:
        raise ValueError(f"cu_seqlens: got T = {T} queries for S = {S} keys, accepted: T = S")
    check_cu_seqlens(cu_seqlens, B)
    chosen = _resolve(backend, q, k, v)
    # A compiled model cannot stop to read values; the kernels only read cu_seqlens on the GPU.
    bounds = None
    if chosen != "triton" or not torch.compiler.is_compiling():
        bounds = read_cu_seqlens(cu_seqlens, B, T)
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    if chosen == "reference":
        return reference.softmax_attention(q, k, v, factor, bounds, window)
    if chosen == "triton":
        boundaries = None if cu_seqlens is None else cu_seqlens.to(q.device)
        dtype = v.dtype
        q, k, v = _autocast(q, k, v)
        return _attention(q, k, v, boundaries, factor, window).to(dtype)
    if bounds is None:
        return _attend(q, k, v, factor, window).to(v.dtype)
    sequences = [slice(start, end) for start, end in pairwise(bounds) if start < end]
    parts = [_attend(q[:, at], k[:, at], v[:, at], factor, window) for at in sequences]
    return torch.cat(parts, dim=1).to(v.dtype)


def softmax_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """`softmax_attention` of T new tokens over a cache that is allocated beforehand, each row as long as it is.

    Query i of row b has position lengths[b] − T + i. What runs follows from the shapes, not from the lengths, so that a
    step can be captured in a CUDA graph. There is no gradient.

    Args:
        q: [B, T, HQ, D], the new tokens; T = 1 in most steps.
        k, v: [B, S, HKV, D], the cache, in q's dtype, new tokens included. From lengths[b] on it is not read, and may
            hold anything.
        lengths: int32 or int64 [B] on q's device, how many positions of the cache are valid: 0 to S, which is not
            checked. Tokens before position 0, where lengths[b] < T, get zeros.
        scale, window, backend: as in `softmax_attention`.

    Returns:
        o [B, T, HQ, D] in v's dtype. Of a cache of the same size a row has the same bits alone and in any batch.
    """
    B, T, S = _check(q, k, v, scale, window)
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        got = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths: got {got}, accepted: an int32 or int64 tensor [B]")
    if lengths.shape != (B,):
        raise ValueError(f"lengths: got shape {list(lengths.shape)}, accepted: [B], here [{B}]")
    if lengths.device != q.device:
        raise ValueError(f"lengths: got a tensor on {lengths.device}, accepted: {q.device}, like the first argument")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("q, k, v: got one that requires gradients, accepted: none; softmax_attention has a backward")
    chosen = _resolve(backend, q, k, v)
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    if chosen == "reference":
        return reference.softmax_decode(q, k, v, lengths, factor, window)
    if chosen == "triton":
        dtype = v.dtype
        q, k, v = _autocast(q, k, v)
        return _decode(q, k, v, lengths, factor, window).to(dtype)
    key = torch.arange(S, device=q.device)
    position = lengths.view(B, 1, 1, 1) - T + torch.arange(T, device=q.device).view(T, 1)  # [B, 1, T, 1]
    seen = _visible(position, key, window)  # [B, 1, T, S]
    unused = (key >= lengths.unsqueeze(1)).view(B, S, 1, 1)  # where a NaN would outlast a weight of zero
    o = _sdpa(q, k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0), factor, seen | (position < 0))
    return o.masked_fill((position < 0).view(B, T, 1, 1), 0.0).to(v.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> tuple[int, int, int]:
    """What both functions take alike; B, T and S."""
    check_scale(scale)
    check_window(window)
    check_tensor("q", q, "B, T, HQ, D", (-1, -1, -1, -1))
    B, T, HQ, D = q.shape
    check_tensor("k", k, "B, S, HKV, D", (B, -1, -1, D), q)
    S, HKV = k.shape[1:3]
    check_tensor("v", v, "B, S, HKV, D", (B, S, HKV, D), q)
    check_groups("q", HQ, "k and v", HKV)
    if T > S:
        raise ValueError(f"q: got T = {T} queries for S = {S} keys, accepted: T ≤ S")
    return B, T, S


def _resolve(backend: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """As `resolve_backend`; what the Triton kernels do not take, "auto" leaves to torch and "triton" refuses."""
    chosen, dtype, D = resolve_backend(backend, q.device), reference.compute_dtype(q, k, v), q.shape[3]
    if chosen == "triton" and (dtype != torch.float32 or D > WIDEST):
        chosen = without_triton(backend, f"D = {D} in {dtype}", f"D ≤ {WIDEST} in 16 or 32 bits")
    return chosen


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """The operands as torch's own attention would cast them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def _visible(position: Tensor, key: Tensor, window: int | None) -> Tensor:
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    T, S = q.shape[1], k.shape[1]
    mask = None
    windowed = window is not None and window < S
    if windowed or 1 < T < S:  # a single query sees every key, and T = S is torch's own causal case
        key = torch.arange(S, device=q.device)
        mask = _visible(key[S - T :, None], key, window)
    return _sdpa(q, k, v, scale, mask, causal=mask is None and T > 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool = False) -> Tensor:
    if scale < 0:  # NaN from torch 2.13 on a CPU, for causal attention
        q, scale = -q, -scale
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)
