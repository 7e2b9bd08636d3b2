"""The small layers against their equations, and the dtypes that they keep."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import error
from torch import Tensor, nn

import kernels
from kda_lm.layers import JointLinear, RMSNorm, Rotary, ShortConvolution, SwiGLU

BF16 = 2**-8  # one rounding


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_rms_norm() -> None:
    norm = RMSNorm(6).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    assert error(norm(x), expected) < 1e-14
    assert norm(torch.zeros(1, 6, dtype=torch.float64)).eq(0).all()


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 1e15), (torch.float16, 3e4), (torch.float32, 1e15)])
def test_rms_norm_computes_wide_and_keeps_the_dtype(dtype: torch.dtype, size: float) -> None:
    """Squares of these overflow float16, or lose everything in bf16; the norm is computed in float32."""
    x = (torch.randn(4, 64).clamp(-1, 1) * size).to(dtype)
    y = RMSNorm(64).to(dtype)(x)
    assert y.dtype == dtype and y.isfinite().all()
    assert error(y, F.rms_norm(x.double(), (64,))) < BF16


@pytest.mark.parametrize("hidden", [6, 16, 1])
def test_swiglu(hidden: int) -> None:
    """With padding to the joint weight and without."""
    layer = SwiGLU(4, hidden).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    gate, up = x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T
    assert error(layer(x), (gate * gate.sigmoid() * up) @ layer.out_proj.weight.T) < 1e-14


def test_the_gate_takes_a_joint_product_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No split, whose backward would copy; with padding rows of the product are read where they lie."""
    seen: list[Tensor] = []
    monkeypatch.setattr(kernels, "swiglu", lambda x, op=kernels.swiglu: seen.append(x) or op(x))
    for hidden in (16, 6):
        SwiGLU(4, hidden)(torch.randn(3, 4))
    whole, part = seen
    assert whole.shape == (3, 32) and type(whole.grad_fn).__name__ == "MmBackward0"
    assert part.shape == (3, 12) and part.stride() == (16, 1)


def test_joint_layers() -> None:
    """Each group as one tensor without padding, also with fixed weights; every weight has its gradient."""
    layers = [nn.Linear(4, n, bias=False).double() for n in (16, 32, 3, 5)]
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    joint = JointLinear(layers[:2], layers[2:])
    whole, padded = joint(x)
    assert whole.is_contiguous() and whole._base is None and not joint.state_dict() and not list(joint.parameters())
    separate = torch.cat([layer(x) for layer in layers], dim=-1)
    assert error(torch.cat([whole, padded], dim=-1), separate) < 1e-14
    weights = [layer.weight for layer in layers]
    grads = (torch.autograd.grad(y.sin().sum(), weights) for y in (torch.cat([whole, padded], dim=-1), separate))
    assert all(error(a, b) < 1e-14 for a, b in zip(*grads, strict=True))
    joint.fix(torch.float32)
    fixed = joint(x.float())
    assert joint.fixed is not None and joint.fixed.shape == (64, 4) and joint.fixed.dtype == torch.float32
    assert all(error(y, before) < 1e-6 for y, before in zip(fixed, (whole, padded), strict=True))
    with pytest.raises(ValueError, match="JointLinear: got a layer with a bias"):
        JointLinear(layers, [nn.Linear(4, 4)])


def convolve(layer: ShortConvolution, x: Tensor, *state: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    parts, after = layer(x, *state, **options)
    return torch.cat(parts, dim=-1), after


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_short_convolution_is_torch_conv1d(width: int, activation: str | None) -> None:
    """Whose output comes in parts."""
    layer = ShortConvolution([2, 3], width, activation).double()
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    expected = F.conv1d(F.pad(x.mT, (width - 1, 0)), layer.weight[:, None], groups=5).mT
    y, state = convolve(layer, x)
    assert error(y, expected if activation is None else F.silu(expected)) < 1e-14
    assert state is not None and state.shape == (2, width - 1, 5)
    assert torch.equal(state, x[:, 10 - width :])
    for cut in (1, 2, 8):  # shorter than the taps too
        first, state = convolve(layer, x[:, :cut])
        with torch.no_grad():
            second, same = convolve(layer, x[:, cut:], state, inplace_state=True)
        assert same is state and torch.equal(state, x[:, 10 - width :])
        assert error(torch.cat([first, second], dim=1), y) < 1e-14


def test_short_convolution_stays_within_documents() -> None:
    layer = ShortConvolution([2, 3], 4, "silu").double()
    x = torch.randn(1, 10, 5, dtype=torch.float64)
    y, state = convolve(layer, x, cu_seqlens=torch.tensor([0, 1, 3, 10]))
    parts = [convolve(layer, piece) for piece in x.split([1, 2, 7], dim=1)]
    assert error(y, torch.cat([part for part, _ in parts], dim=1)) < 1e-14
    assert torch.equal(state, torch.cat([s for _, s in parts]))


def test_rotation_turns_in_float32_whatever_the_dtype() -> None:
    """At position 4,096 bf16 angles would be off by many turns."""
    layer = Rotary(64, 10000.0)
    x, place = torch.randn(1, 1, 1, 64).bfloat16(), torch.tensor([4096])
    exact = layer(x.double(), place)
    y = layer.bfloat16()(x, place)
    assert not list(layer.buffers()) and not layer.state_dict()  # nothing to be cast, or averaged with weights
    assert y.dtype == torch.bfloat16 and error(y, exact) < BF16


def test_rotation_behind_a_norm() -> None:
    norm = RMSNorm(8)
    nn.init.normal_(norm.weight)
    layer, x, places = Rotary(8, 100.0), torch.randn(2, 6, 3, 8), torch.arange(6)
    assert error(layer(x, places, norm), layer(norm(x), places)) < 1e-6


def test_what_autocast_leaves_alone() -> None:
    """Norms go into products: in autocast's dtype, but for float64, which it exempts, and where nothing is computed."""
    norm = RMSNorm(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.ones(2, 8)).dtype == torch.bfloat16
        assert norm.double()(torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64
        assert norm.to("meta")(torch.ones(2, 8, device="meta")).device.type == "meta"
