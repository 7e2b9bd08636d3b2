"""Root-mean-square norms over the last axis: plain, of a sum, or with a gate on their output."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_choice, check_tensor, resolve_backend, without_triton
from kernels.gpu.limits import WIDEST_NORM

ACTIVATIONS = ("sigmoid", "silu")

TRITON: Callable[..., Any]
if importlib.util.find_spec("triton") is not None:
    from kernels.gpu.norm import norm as TRITON


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, backend: str = "auto", dtype: torch.dtype | None = None
) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) ⊙ weight over the last axis (Zhang & Sennrich 2019), in float32 (float64 for float64
    inputs) and rounded once.

    Args:
        x: [..., N].
        weight: [N], of any floating dtype.
        eps: added to the mean square.
        backend: see `resolve_backend`; "torch" and "reference" are one implementation, "triton" takes N ≤ 8192 in 16
            or 32 bits.
        dtype: of y; x's unless given.

    Returns:
        y [..., N].
    """
    check_tensor("weight", weight, "N", (_width(x),), x)
    dtype = dtype or x.dtype
    if _takes_triton(backend, x, dtype):
        y: Tensor = TRITON(x, None, None, weight, eps, False, dtype)[0]
        return y
    return _normalised(x, weight, eps).to(dtype)


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float = 1e-6, backend: str = "auto", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """s = x + y, the residual stream and what a layer adds to it, and z = s / sqrt(mean(s²) + eps) ⊙ weight, the
    `rms_norm` of s as it is returned: one pass over what are otherwise two, in the backward, too.

    Args:
        x, y: [..., N].
        weight: [N], of any floating dtype.
        eps: added to the mean square.
        backend: see `rms_norm`.
        dtype: of z; the sum's unless given.

    Returns:
        s [..., N] in the dtype that x + y has, and z [..., N].
    """
    N = _width(x)
    check_tensor("y", y, "..., N", tuple(x.shape), x)
    check_tensor("weight", weight, "N", (N,), x)
    dtype = dtype or torch.promote_types(x.dtype, y.dtype)
    if _takes_triton(backend, x, y.dtype, dtype):
        z, total = TRITON(x, y, None, weight, eps, False, dtype)
    else:
        total = x + y
        z = _normalised(total, weight, eps).to(dtype)
    return total, z


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "sigmoid",
    backend: str = "auto",
) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) ⊙ weight ⊙ act(gate) over the last axis, in float32 (float64 for float64 inputs) and
    rounded once.

    Args:
        x: [..., N].
        gate: [..., N], before its activation.
        weight: [N], of any floating dtype, or None.
        eps: added to the mean square.
        activation: "sigmoid" or "silu", of the gate.
        backend: see `rms_norm`.

    Returns:
        y [..., N] in x's dtype.
    """
    N = _width(x)
    check_tensor("gate", gate, "..., N", tuple(x.shape), x)
    if weight is not None:
        check_tensor("weight", weight, "N", (N,), x)
    check_choice("activation", activation, ACTIVATIONS)
    if _takes_triton(backend, x, gate.dtype):
        y: Tensor = TRITON(x, None, gate, weight, eps, activation == "silu", x.dtype)[0]
        return y
    y = _normalised(x, weight, eps)
    opening = gate.to(torch.promote_types(y.dtype, gate.dtype))
    return (y * (F.silu(opening) if activation == "silu" else opening.sigmoid())).to(x.dtype)


def _width(x: Tensor) -> int:
    check_tensor("x", x, "..., N", tuple(x.shape) if isinstance(x, Tensor) else ())
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: got shape {list(x.shape)}, accepted: [..., N], N ≥ 1")
    return x.shape[-1]


def _takes_triton(backend: str, x: Tensor, *others: torch.dtype) -> bool:
    N, wide = x.shape[-1], torch.float64 in (x.dtype, *others)
    chosen = resolve_backend(backend, x.device)
    if chosen == "triton" and (wide or N > WIDEST_NORM):
        got = f"N = {N} in {torch.float64 if wide else x.dtype}"
        chosen = without_triton(backend, got, f"N ≤ {WIDEST_NORM} in 16 or 32 bits")
    return chosen == "triton" and x.numel() > 0


def _normalised(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Not yet rounded to x's dtype."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(dtype), x.shape[-1:], None if weight is None else weight.to(dtype), eps)
