"""Rotary positions, and the norm of queries and keys in front of them, in one pass over the heads."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_tensor, resolve_backend, without_triton
from kernels.gpu.limits import WIDEST

TRITON: Callable[..., Any]
if importlib.util.find_spec("triton") is not None:
    from kernels.gpu.rotary import rotary as TRITON


def rotary(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """y = rotate(x) or, with a weight, rotate(x / sqrt(mean(x²) + eps) ⊙ weight), head by head: channels i and i + D/2
    are turned by the angle position · frequencies[i] (Su et al. 2021). In float32, rounded once.

    Args:
        x: [B, T, H, D], D even.
        positions: integers [T] or [B, T].
        frequencies: float32 [D/2], in radians a position.
        weight: [D], of any floating dtype: RMS norm over each head's channels; None: no norm.
        eps: added to the mean square.
        backend: see `resolve_backend`; "torch" and "reference" are one implementation, "triton" takes D ≤ 256 in 16 or
            32 bits.

    Returns:
        y [B, T, H, D] in x's dtype. There is a gradient to x and weight.
    """
    check_tensor("x", x, "B, T, H, D", (-1, -1, -1, -1))
    B, T, _, D = x.shape
    if D % 2:
        raise ValueError(f"x: got D = {D}, accepted: an even number")
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int32, torch.int64):
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions: got {got}, accepted: an int32 or int64 tensor")
    if positions.shape not in ((T,), (B, T)):
        raise ValueError(f"positions: got shape {list(positions.shape)}, accepted: [T] or [B, T], here T = {T}")
    if positions.device != x.device:
        raise ValueError(f"positions: got a tensor on {positions.device}, accepted: {x.device}, as x is")
    check_tensor("frequencies", frequencies, "D/2", (D // 2,), x, torch.float32)
    if weight is not None:
        check_tensor("weight", weight, "D", (D,), x)
    chosen = resolve_backend(backend, x.device)
    if chosen == "triton" and (x.dtype == torch.float64 or D > WIDEST):
        chosen = without_triton(backend, f"D = {D} in {x.dtype}", f"D ≤ {WIDEST} in 16 or 32 bits")
    if chosen == "triton":
        return TRITON(x, positions, frequencies, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight is not None:
        wide = F.rms_norm(wide, (D,), weight.to(wide.dtype), eps)
    angles = positions.to(torch.float32)[..., None, None] * frequencies  # [(B,) T, 1, D/2]
    cos, sin = angles.cos(), angles.sin()
    first, second = wide.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
