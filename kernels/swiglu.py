"""The gate of SwiGLU: one half of a joint product opens the other."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_tensor, resolve_backend, without_triton

TRITON: Callable[..., Any]
if importlib.util.find_spec("triton") is not None:
    from kernels.gpu.swiglu import swiglu as TRITON


def swiglu(x: Tensor, backend: str = "auto") -> Tensor:
    """y = silu(gate) ⊙ up of x = [gate, up] along the last axis (Shazeer 2020), in float32 (float64 for float64 inputs)
    and rounded once.

    Args:
        x: [..., 2·N], the product with both matrices at once.
        backend: see `resolve_backend`; "torch" and "reference" are one implementation, "triton" takes 16 or 32 bits.

    Returns:
        y [..., N] in x's dtype.
    """
    check_tensor("x", x, "..., 2·N", tuple(x.shape) if isinstance(x, Tensor) else ())
    if x.dim() < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError(f"x: got shape {list(x.shape)}, accepted: [..., 2·N], N ≥ 1")
    chosen = resolve_backend(backend, x.device)
    if chosen == "triton" and x.dtype == torch.float64:
        chosen = without_triton(backend, str(x.dtype), "16 or 32 bits")
    if chosen == "triton" and x.numel() > 0:
        y: Tensor = TRITON(x)
        return y
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)
