"""The language-model loss from the last hidden states, without all logits in memory."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_tensor, resolve_backend, without_triton

TRITON: Callable[..., Any]
if importlib.util.find_spec("triton") is not None:
    from kernels.gpu.cross_entropy import linear_cross_entropy as TRITON


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Σ (l − z[target] + z_loss · l²) over the targets that are not ignored, with z = weight x, l = log Σ exp z.

    Products are of operands in the inputs' dtype, or autocast's as in any linear layer; their sums, the logarithms and
    the result are float32 (float64 for float64 inputs).

    Args:
        x: [..., dim].
        weight: [vocab, dim], in x's dtype unless autocast is on.
        targets: int64 [...], in [0, vocab) or ignore_index. Others make the result NaN with "triton", and are an error
            with "torch".
        ignore_index: the target that does not count.
        z_loss: weight of the squared logarithm of the partition function, which keeps it near 0 (Chowdhery et al.
            2022, section 5).
        backend: see `resolve_backend`; "torch" and "reference" are one implementation, "triton" takes 16 and 32 bits.

    Returns:
        The sum, of no dimensions. With "triton" its gradients are computed beside it, if any are wanted, and are
        differentiable only once.
    """
    check_tensor("x", x, "..., dim", tuple(x.shape) if isinstance(x, Tensor) else ())
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: got shape {list(x.shape)}, accepted: [..., dim], dim ≥ 1")
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind)
    check_tensor("weight", weight, "vocab, dim", (-1, x.shape[-1]), x, None if autocast else x.dtype)
    _check_targets(targets, x)
    if isinstance(z_loss, bool) or not isinstance(z_loss, int | float):
        raise TypeError(f"z_loss: got {type(z_loss).__name__}, accepted: a number from 0 on")
    if not z_loss >= 0:
        raise ValueError(f"z_loss: got {z_loss}, accepted: a number from 0 on")
    chosen = resolve_backend(backend, x.device)
    if chosen == "triton" and torch.float64 in (x.dtype, weight.dtype):
        chosen = without_triton(backend, "torch.float64", "16 or 32 bits")
    if chosen == "triton" and targets.numel():
        if autocast:
            x = x.to(torch.get_autocast_dtype(kind))
        return TRITON(x.flatten(0, -2), weight, targets.flatten(), ignore_index, float(z_loss))
    return _with_torch(x.reshape(-1, x.shape[-1]), weight, targets.flatten(), ignore_index, z_loss, autocast)


def _check_targets(targets: Tensor, x: Tensor) -> None:
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"targets: got {got}, accepted: an int64 tensor [...]")
    if targets.shape != x.shape[:-1]:
        raise ValueError(f"targets: got shape {list(targets.shape)}, accepted: [...], here {list(x.shape[:-1])}")
    if targets.device != x.device:
        raise ValueError(f"targets: got a tensor on {targets.device}, accepted: {x.device}, like the first argument")


def _with_torch(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float, autocast: bool) -> Tensor:
    """x [N, dim], targets [N]. In chunks where torch has that (2.13) and it is right: it rounds the sum to the inputs'
    dtype, and does not compile."""
    right = x.dtype in (torch.float32, torch.float64) and not autocast and not z_loss and len(x) > 0
    if right and hasattr(torch.nn, "LinearCrossEntropyOptions") and not torch.compiler.is_compiling():
        options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True)
        given: dict[str, Any] = {"reduction": "sum", "ignore_index": ignore_index, "options": options}
        return F.linear_cross_entropy(x, weight, targets, **given)
    logits = F.linear(x, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(-1).square().masked_fill(targets == ignore_index, 0.0).sum()
    return loss
