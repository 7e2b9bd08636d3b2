"""The gate of SwiGLU against its equation, its dtypes, and what it refuses."""

from typing import Any

import pytest
import torch
from fused_checks import differentiate, gate, gate_inputs, leaves_of
from recurrence_cases import BFLOAT16_ERROR, FLOAT64_ERROR, assert_close, error

from kernels import swiglu


@pytest.mark.parametrize("shape", [(2,), (3, 6), (2, 3, 4, 10)])
def test_matches_the_equation(shape: tuple[int, ...]) -> None:
    """Output and gradient; any leading shape."""
    inputs = gate_inputs(*shape)
    leaves = leaves_of(inputs)
    half = shape[-1] // 2
    opened, up = leaves["x"][..., :half], leaves["x"][..., half:]
    ref = differentiate({"y": opened * opened.sigmoid() * up}, leaves)
    assert_close(gate(inputs, "torch"), ref, FLOAT64_ERROR)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast: bool) -> None:
    """Computed in float32 and rounded once, under autocast too."""
    x = gate_inputs(40, 60, dtype=torch.bfloat16)["x"]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, wide = swiglu(x), swiglu(x.float())
    assert y.dtype == torch.bfloat16 and wide.dtype == torch.float32 and torch.equal(y, wide.bfloat16())
    assert error(y, swiglu(x.double())) <= BFLOAT16_ERROR


@pytest.mark.parametrize(
    ("kind", "message", "x", "options"),
    [
        (TypeError, "x: got list, accepted: a tensor", [1.0, 2.0], {}),
        (TypeError, "x: got torch.int64", torch.ones(2, 4, dtype=torch.int64), {}),
        (ValueError, r"x: got shape \[\], accepted: \[..., 2·N\], N ≥ 1", torch.ones(()), {}),
        (ValueError, r"x: got shape \[2, 0\]", torch.ones(2, 0), {}),
        (ValueError, r"x: got shape \[2, 5\], accepted: \[..., 2·N\]", torch.ones(2, 5), {}),
        (
            ValueError,
            r"backend: got 'triton' for cpu, .*accepted here: auto, torch",
            torch.ones(2, 4),
            {"backend": "triton"},
        ),
    ],
)
def test_refusals(kind: type[Exception], message: str, x: Any, options: dict[str, Any]) -> None:
    with pytest.raises(kind, match=message):
        swiglu(x, **options)
