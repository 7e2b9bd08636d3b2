"""The loss against a linear layer and torch's own cross-entropy, and what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_checks import exact_loss, loss, loss_inputs, normal
from recurrence_cases import FLOAT64_ERROR, assert_close, error
from torch import Tensor

from kernels import linear_cross_entropy


def by_hand(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, z_loss: float = 0.0) -> Tensor:
    logits = x @ weight.T
    log_sums, kept = logits.logsumexp(-1), targets != ignore_index
    chosen = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return ((log_sums - chosen + z_loss * log_sums**2) * kept).sum()


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}, {"ignore_index": 3}, {"ignore_index": 3, "z_loss": 1}])
def test_matches_the_equation(options: dict[str, Any]) -> None:
    inputs = loss_inputs(12, 5, 9)
    if "ignore_index" in options:
        inputs["targets"].masked_fill_(inputs["targets"] == -100, 3)
    out = loss(inputs, "torch", **options)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))
    ref = by_hand(x, weight, inputs["targets"], **options)
    d_x, d_weight = torch.autograd.grad(0.1 * ref, (x, weight))
    assert_close(out, {"loss": ref.detach(), "dx": d_x, "dweight": d_weight}, FLOAT64_ERROR)


def test_any_leading_shape() -> None:
    x, weight, targets = loss_inputs(12, 5, 9).values()
    flat = linear_cross_entropy(x, weight, targets)
    assert torch.equal(linear_cross_entropy(x.view(3, 4, 5), weight, targets.view(3, 4)), flat)
    one = linear_cross_entropy(x[0], weight, torch.tensor(2))
    assert one.shape == () and error(one, by_hand(x[0], weight, torch.tensor(2))) <= FLOAT64_ERROR


def test_float32_and_bfloat16() -> None:
    """float32 sums in any case; bfloat16 logits are rounded, as by a linear layer, and so under autocast."""
    inputs = loss_inputs(300, 8, 40, torch.float32)
    ref = F.cross_entropy(inputs["x"] @ inputs["weight"].T, inputs["targets"], reduction="sum")
    assert error(linear_cross_entropy(**inputs), ref) <= 1e-6
    half = {name: x if name == "targets" else x.bfloat16() for name, x in inputs.items()}
    plain = F.cross_entropy(F.linear(half["x"], half["weight"]).float(), half["targets"], reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        mixed = linear_cross_entropy(**inputs)
    for result in (linear_cross_entropy(**half), mixed):
        assert result.dtype == torch.float32 and torch.equal(result, plain)
    assert error(plain, exact_loss(half)["loss"]) <= 1e-3


def test_nothing_to_count() -> None:
    inputs = loss_inputs(4, 5, 9)
    out = loss({**inputs, "targets": torch.full((4,), -100)}, "torch")
    assert all(not result.any() and result.isfinite().all() for result in out.values())
    assert linear_cross_entropy(inputs["x"][:0], inputs["weight"], inputs["targets"][:0]) == 0


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        (TypeError, "x: got NoneType", {"x": None}),
        (ValueError, "x: got shape", {"x": torch.ones(4, 0)}),
        (
            ValueError,
            r"weight: got shape \[3, 6\], accepted: \[vocab, dim\], here \[≥ 1, 5\]",
            {"weight": normal(3, 6)},
        ),
        (TypeError, "weight: got torch.float32, accepted: torch.float64", {"weight": torch.ones(3, 5)}),
        (TypeError, "targets: got torch.int32, accepted: an int64 tensor", {"targets": torch.ones(4).int()}),
        (ValueError, r"targets: got shape \[2\], accepted: \[...\], here \[4\]", {"targets": torch.ones(2).long()}),
        (TypeError, "z_loss: got str", {"z_loss": "0"}),
        (ValueError, "z_loss: got -1, accepted: a number from 0 on", {"z_loss": -1}),
        (ValueError, r"backend: got 'triton' for cpu, .*accepted here: auto, torch", {"backend": "triton"}),
    ],
)
def test_refusals(kind: type[Exception], message: str, change: dict[str, Any]) -> None:
    with pytest.raises(kind, match=message):
        linear_cross_entropy(**{**loss_inputs(4, 5, 3), **change})
