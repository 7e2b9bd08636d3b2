"""How kernels are started.

Triton's own call reads the types of all arguments anew, which takes several times as long as the start itself. Here
that happens once for all calls of the same key; afterwards the compiled kernel takes its arguments as they are.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


def traced(x: Tensor) -> bool:
    """Whether operators are being recorded or replaced, and not merely run."""
    return type(x) not in (Tensor, torch.nn.Parameter) or _get_current_dispatch_mode() is not None


def contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.contiguous() for x in tensors]


def as_rows(x: Tensor) -> Tensor:
    """[M, N] with numbers side by side, a view if it can be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def token_stride(x: Tensor) -> int | None:
    """From each token of x [B, T, ...] to the next, on through the batch; None where that is not one number."""
    B, T = x.shape[:2]
    stride = x.stride(0 if T == 1 else 1)
    return stride if B == 1 or x.stride(0) == T * stride else None


def types(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What Triton compiles for: dtypes, which are missing, which lie at multiples of 16 bytes."""
    return tuple(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors)


def numbers(*values: int) -> tuple[Any, ...]:
    """What Triton compiles for of whole numbers: ones, multiples of 16, 64 bits."""
    return tuple((x == 1, x % 16 == 0, not -(2**31) <= x < 2**31) for x in values)


class Launcher:
    """Starts kernels whose arguments always have the same types, and their constants the same values."""

    def __init__(self) -> None:
        self._compiled: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        """Start `kernel`: `arguments` by position, then the constants, as it declares them."""
        known = self._compiled.get(kernel.__name__)
        if known is not None:
            compiled, values = known
            compiled[(*grid, 1, 1)[:3]](*arguments, *values)
            return
        compiled = kernel[grid](*arguments, **constants)
        if compiled is not None:  # Triton's interpreter compiles nothing
            values = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            self._compiled[kernel.__name__] = compiled, values


@lru_cache(maxsize=4096)
def launcher(*key: Any) -> Launcher:
    """The one of this key, which has to name all that the kernels are compiled for."""
    return Launcher()
