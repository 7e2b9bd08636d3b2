"""The norms against their equations, their dtypes, and what they refuse."""

from typing import Any

import pytest
import torch
from fused_checks import differentiate, leaves_of, norm_inputs
from recurrence_cases import BFLOAT16_ERROR, FLOAT64_ERROR, Inputs, assert_close, error
from torch import Tensor

from kernels import add_rms_norm, gated_rms_norm, rms_norm


def by_hand(x: Tensor, gate: Tensor | None = None, weight: Tensor | None = None, activation: str = "sigmoid") -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    y = y if weight is None else y * weight
    return y if gate is None else y * gate.sigmoid() * (gate if activation == "silu" else 1.0)


@pytest.mark.parametrize("shape", [(5,), (3, 1), (2, 3, 4, 6)])
@pytest.mark.parametrize(("gated", "weighted"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_matches_the_equation(shape: tuple[int, ...], gated: bool, weighted: bool, activation: str) -> None:
    """Output and every gradient; any leading shape."""
    inputs = norm_inputs(*shape, gated=gated, weighted=weighted)
    options = {"activation": activation} if gated else {}

    def results(function: Any, **options: Any) -> Inputs:
        leaves = leaves_of(inputs)
        return differentiate({"y": function(**leaves, **options)}, leaves)

    out = results(gated_rms_norm if gated else rms_norm, **options)
    assert_close(out, results(by_hand, **options), FLOAT64_ERROR)


@pytest.mark.parametrize("shape", [(5,), (3, 1), (2, 3, 4, 6)])
def test_of_a_sum_matches_the_equation(shape: tuple[int, ...]) -> None:
    """Both results, and every gradient of both."""
    inputs = norm_inputs(*shape, added=True, gated=False)

    def results(function: Any) -> Inputs:
        leaves = leaves_of(inputs)
        return differentiate(dict(zip("sz", function(**leaves), strict=True)), leaves)

    def one_after_the_other(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, by_hand(x + y, weight=weight)

    assert_close(results(add_rms_norm), results(one_after_the_other), FLOAT64_ERROR)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_of_a_sum_in_bfloat16(dtypes: tuple[torch.dtype, torch.dtype], autocast: bool) -> None:
    """The sum has the dtype that x + y has; its norm is of the sum as it is returned, and is rounded once."""
    x, y = (norm_inputs(9, 30, seed=i)["x"].to(dtype) for i, dtype in enumerate(dtypes))
    weight = norm_inputs(9, 30)["weight"].float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total, z = add_rms_norm(x, y, weight)
        rounded = add_rms_norm(x, y, weight, dtype=torch.bfloat16)[1]
        apart = rms_norm(x + y, weight, dtype=torch.bfloat16)
    assert total.dtype == z.dtype == dtypes[0] and torch.equal(total, x + y)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, apart)
    assert error(rounded, by_hand(total.double(), weight=weight.double())) <= BFLOAT16_ERROR


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast: bool) -> None:
    """Computed in float32 and rounded once; x's dtype, whatever the gate's and the weight's, under autocast too."""
    inputs = norm_inputs(9, 30, dtype=torch.bfloat16)
    inputs["weight"] = inputs["weight"].float()
    ref = by_hand(**{name: x.double() for name, x in inputs.items()})
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = gated_rms_norm(**inputs)
        wide = gated_rms_norm(**{**inputs, "x": inputs["x"].float()})
        plain = rms_norm(inputs["x"], inputs["weight"])
    assert y.dtype == plain.dtype == torch.bfloat16 and wide.dtype == torch.float32
    assert error(y, ref) <= BFLOAT16_ERROR and error(wide, ref) <= 1e-6


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        (TypeError, "x: got list", {"x": [1.0]}),
        (TypeError, "x: got torch.int64", {"x": torch.ones(2, 4, dtype=torch.int64)}),
        (ValueError, r"x: got shape \[\], accepted: \[..., N\]", {"x": torch.ones(())}),
        (ValueError, r"x: got shape \[2, 0\]", {"x": torch.ones(2, 0)}),
        (ValueError, r"gate: got shape \[4\], accepted: \[..., N\], here \[2, 4\]", {"gate": torch.ones(4)}),
        (ValueError, "weight: got shape", {"weight": torch.ones(3)}),
        (ValueError, "activation: got 'relu', accepted: sigmoid, silu", {"activation": "relu"}),
        (ValueError, r"backend: got 'triton' for cpu, .*accepted here: auto, torch", {"backend": "triton"}),
    ],
)
def test_refusals(kind: type[Exception], message: str, change: dict[str, Any]) -> None:
    with pytest.raises(kind, match=message):
        gated_rms_norm(**{"x": torch.ones(2, 4), "gate": torch.ones(2, 4), "weight": torch.ones(4), **change})
    if "gate" not in change and "activation" not in change:
        with pytest.raises(kind, match=message):
            rms_norm(**{"x": torch.ones(2, 4), "weight": torch.ones(4), **change})
        with pytest.raises(kind, match=message):
            add_rms_norm(**{"x": torch.ones(2, 4), "y": torch.ones(2, 4), "weight": torch.ones(4), **change})


@pytest.mark.parametrize(
    ("kind", "message", "y"),
    [
        (ValueError, r"y: got shape \[4\], accepted: \[..., N\], here \[2, 4\]", torch.ones(4)),
        (TypeError, "y: got torch.int64, accepted: a floating dtype", torch.ones(2, 4, dtype=torch.int64)),
        (TypeError, r"y: got NoneType, accepted: a tensor", None),
        (ValueError, "y: got a tensor on meta, accepted: cpu", torch.ones(2, 4, device="meta")),
    ],
)
def test_refusals_of_a_sum(kind: type[Exception], message: str, y: Any) -> None:
    with pytest.raises(kind, match=message):
        add_rms_norm(torch.ones(2, 4), y, torch.ones(4))
