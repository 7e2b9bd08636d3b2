"""bfloat16 in Triton's interpreter as on a GPU: the interpreter by itself multiplies and adds its bits as integers, and
cuts what it should round.

Products are exact and summed in float32; other operations and casts are rounded to the nearest, ties to even. What is
left to a GPU is the order of its sums. Errors of the kernels agree with an H200's to about a tenth.
"""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widened(x: Any) -> Any:
    """A handle of bfloat16 as one of float32; others as they are."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def rounded(data: Any) -> Any:
    """float32 numbers as a handle of bfloat16."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isfinite(data), nearest, bits >> 16).astype(np.uint16), tl.bfloat16)


def install(patch: pytest.MonkeyPatch) -> None:
    """Until the patch ends."""
    dot, binary, unary, cast = (
        getattr(InterpreterBuilder, name) for name in ("create_dot", "binary_op", "unary_op", "cast_impl")
    )

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        result = binary(self, widened(a), widened(b), op)
        is_number = a.dtype.scalar == tl.bfloat16 and result.data.dtype == np.float32  # and not a comparison
        return rounded(result.data) if is_number else result

    def unary_op(self: Any, a: Any, op: Any) -> Any:
        result = unary(self, widened(a), op)
        return rounded(result.data) if a.dtype.scalar == tl.bfloat16 else result

    def cast_impl(self: Any, x: Any, kind: Any) -> Any:
        if kind.scalar == tl.bfloat16 and x.dtype.scalar in (tl.float32, tl.float64):
            return rounded(x.data.astype(np.float32))
        return cast(self, widened(x), kind)

    for function in (create_dot, binary_op, unary_op, cast_impl):
        patch.setattr(InterpreterBuilder, function.__name__, function)
