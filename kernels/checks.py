"""What the public functions accept. Every refusal names the argument, what it got and what is accepted.

Wrong shapes and values are ValueErrors, wrong types and dtypes TypeErrors.
"""

from itertools import pairwise

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "reference")


def resolve_backend(backend: str, device: torch.device | str) -> str:
    """The implementation that runs for tensors on `device`: "torch" or "reference". "auto" is torch everywhere."""
    if backend == "triton":
        raise ValueError(
            f"backend: got 'triton' for {device}, but this release has no Triton kernels yet; "
            f"accepted: {', '.join(BACKENDS)}"
        )
    check_choice("backend", backend, BACKENDS)
    return "torch" if backend == "auto" else backend


def check_choice(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name}: got {value!r}, accepted: {', '.join(accepted)}")


def check_scale(scale: float | None) -> None:
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale: got {type(scale).__name__}, accepted: a number or None")


def check_tensor(
    name: str,
    x: Tensor | None,
    axes: str,
    sizes: tuple[int, ...],
    first: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """`x` is a floating tensor (of `dtype`, if given) on the device of the `first` argument, of shape `sizes`.

    `axes` names the sizes in the message; a size of −1 stands for any size from 1 on.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, accepted: a tensor [{axes}]")
    if not x.is_floating_point() or x.dtype != (dtype or x.dtype):
        raise TypeError(f"{name}: got {x.dtype}, accepted: {dtype or 'a floating dtype'}")
    shape = tuple(x.shape)
    if shape != sizes and (
        len(shape) != len(sizes) or any(a != b and (b >= 0 or a < 1) for a, b in zip(shape, sizes, strict=True))
    ):
        here = ", ".join("≥ 1" if size < 0 else str(size) for size in sizes)
        raise ValueError(f"{name}: got shape {list(shape)}, accepted: [{axes}], here [{here}]")
    if first is not None and x.device != first.device:
        raise ValueError(f"{name}: got a tensor on {x.device}, accepted: {first.device}, like the first argument")


def check_groups(name: str, heads: int, others: str, groups: int) -> None:
    if heads % groups:
        raise ValueError(f"{name}: got {heads} heads, accepted: a multiple of the {groups} heads of {others}")


def read_cu_seqlens(cu_seqlens: Tensor | None, B: int, T: int) -> list[int] | None:
    """The boundaries on the host: one read, the only one that a call makes."""
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: got {got}, accepted: an int32 or int64 tensor [N + 1]")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: got shape {list(cu_seqlens.shape)}, accepted: [N + 1] with N ≥ 1")
    if B != 1:
        raise ValueError(f"cu_seqlens: got a batch of {B}, accepted: B = 1, the sequences packed along T")
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != T or any(a > b for a, b in pairwise(bounds)):
        shown = bounds if len(bounds) <= 16 else [*bounds[:8], "…", *bounds[-7:]]
        raise ValueError(f"cu_seqlens: got {shown}, accepted: boundaries from 0 to T = {T} that never decrease")
    return bounds
