"""Rotary positions against complex numbers, and what they refuse."""

from typing import Any

import pytest
import rotary_checks as checks
import torch
from recurrence_cases import error

from kernels import rotary


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-7), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_matches_complex_numbers(dtype: torch.dtype, limit: float, rows: bool, norm: bool) -> None:
    """Output and every gradient; positions for all rows or for each."""
    positions = checks.places(9, 3 if rows else None)
    checks.assert_exact(checks.make_inputs(3, 9, 2, 6, norm), positions, dtype, limit, "torch")


def test_turns_add_and_lengths_stay() -> None:
    x, turns = torch.randn(1, 6, 2, 8, dtype=torch.float64), checks.frequencies(8)
    places = torch.arange(6)
    y = rotary(x, places, turns)
    assert torch.equal(y[:, 0], x[:, 0])
    assert error(y.norm(dim=-1), x.norm(dim=-1)) < 1e-6
    assert error(rotary(y, torch.full((6,), 3), turns), rotary(x, places + 3, turns)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        (ValueError, r"x: got D = 5, accepted: an even number", {"x": torch.ones(2, 3, 1, 5)}),
        (ValueError, r"x: got shape \[2, 3, 4\], accepted: \[B, T, H, D\]", {"x": torch.ones(2, 3, 4)}),
        (TypeError, "positions: got torch.float32, accepted: an int32 or int64", {"positions": torch.ones(3)}),
        (ValueError, r"positions: got shape \[2\], accepted: \[T\] or \[B, T\]", {"positions": torch.arange(2)}),
        (ValueError, r"frequencies: got shape \[4\], accepted: \[D/2\], here \[2\]", {"frequencies": torch.ones(4)}),
        (TypeError, "frequencies: got torch.float64", {"frequencies": torch.ones(2, dtype=torch.float64)}),
        (ValueError, r"weight: got shape \[2\], accepted: \[D\], here \[4\]", {"weight": torch.ones(2)}),
        (ValueError, "backend: got 'triton' for cpu", {"backend": "triton"}),
    ],
)
def test_refuses(kind: type[Exception], message: str, change: dict[str, Any]) -> None:
    given = {"x": torch.ones(2, 3, 1, 4), "positions": torch.arange(3), "frequencies": torch.ones(2)}
    with pytest.raises(kind, match=message):
        rotary(**{**given, **change})
