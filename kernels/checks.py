"""What the public functions accept. Every refusal names the argument, what it got and what is accepted.

Wrong shapes and values are ValueErrors, wrong types and dtypes TypeErrors.
"""

import importlib.util
import os
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "torch", "reference")

OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = (8, 0)


def resolve_backend(backend: str, device: torch.device | str) -> str:
    """The implementation that runs for tensors on `device`: "triton", "torch" or "reference".

    "auto" is triton on a GPU that it supports, else torch. It looks at neither shapes nor values.
    """
    if backend == "triton":
        missing = missing_for_triton(torch.device(device))
        if missing:
            others = ", ".join(name for name in BACKENDS if name != "triton")
            raise ValueError(f"backend: got 'triton' for {device}, which needs {missing}; accepted here: {others}")
    check_choice("backend", backend, BACKENDS)
    if backend != "auto":
        return backend
    return "torch" if missing_for_triton(torch.device(device)) else "triton"


def without_triton(backend: str, got: str, accepted: str) -> str:
    """The implementation for arguments that Triton kernels do not take: "auto" goes without, "triton" is refused."""
    if backend == "triton":
        raise ValueError(f"backend: got 'triton' for {got}, accepted: {accepted}; backend='torch' takes any")
    return "torch"


@torch.compiler.assume_constant_result
def missing_for_triton(device: torch.device) -> str | None:
    """What the Triton kernels lack on `device`, None if nothing."""
    return _missing_for_triton(device)


@cache
def _missing_for_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return f"triton {'.'.join(map(str, OLDEST_TRITON))} or later (here {triton.__version__})"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return "an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return f"a GPU of compute capability {'.'.join(map(str, OLDEST_CAPABILITY))} or later"
    return None


def check_choice(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name}: got {value!r}, accepted: {', '.join(accepted)}")


def check_scale(scale: float | None) -> None:
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale: got {type(scale).__name__}, accepted: a number or None")


def check_window(window: int | None) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise TypeError(f"window: got {type(window).__name__}, accepted: a whole number or None")
    if window is not None and window < 1:
        raise ValueError(f"window: got {window}, accepted: a whole number from 1 on, or None")


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


def check_in_place(initial_state: Tensor | None, *others: Tensor | None) -> None:
    """A state that is to be written over is there, and nothing asks for a gradient through it."""
    if initial_state is None:
        raise ValueError("inplace_state: got True without initial_state, accepted: only with it")
    tensors = (initial_state, *others)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("inplace_state: got True and inputs that require gradients, accepted: only without")


def check_groups(name: str, heads: int, others: str, groups: int) -> None:
    if heads % groups:
        raise ValueError(f"{name}: got {heads} heads, accepted: a multiple of the {groups} heads of {others}")


def check_cu_seqlens(cu_seqlens: Tensor | None, B: int) -> None:
    """Everything about the boundaries but their values."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: got {got}, accepted: an int32 or int64 tensor [N + 1]")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: got shape {list(cu_seqlens.shape)}, accepted: [N + 1] with N ≥ 1")
    if B != 1:
        raise ValueError(f"cu_seqlens: got a batch of {B}, accepted: B = 1, the sequences packed along T")


class _LastRead(NamedTuple):
    cu_seqlens: Tensor
    version: int
    T: int
    bounds: list[int]


_last_read: _LastRead | None = None


def read_cu_seqlens(cu_seqlens: Tensor | None, B: int, T: int) -> list[int] | None:
    """The boundaries on the host. A tensor that comes again, as in every layer of a model, is not read again: on a GPU
    a read waits for all that was asked of it before.
    """
    global _last_read
    check_cu_seqlens(cu_seqlens, B)
    if cu_seqlens is None:
        return None
    # What inference mode makes counts no versions: it may have changed.
    last, version = _last_read, -1 if cu_seqlens.is_inference() else cu_seqlens._version
    if last is not None and last.cu_seqlens is cu_seqlens and (last.version, last.T) == (version, T) and version >= 0:
        return last.bounds
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != T or any(a > b for a, b in pairwise(bounds)):
        shown = bounds if len(bounds) <= 16 else [*bounds[:8], "…", *bounds[-7:]]
        raise ValueError(f"cu_seqlens: got {shown}, accepted: boundaries from 0 to T = {T} that never decrease")
    _last_read = _LastRead(cu_seqlens, version, T, bounds)
    return bounds
