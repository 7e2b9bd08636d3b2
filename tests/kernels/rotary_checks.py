"""What the tests of rotary positions share, whatever runs them: plain torch, the interpreter, a GPU."""

import torch
from fused_checks import differentiate, leaves_of, normal
from recurrence_cases import Inputs, assert_close
from torch import Tensor

from kernels import rotary


def frequencies(D: int, device: torch.device | str = "cpu", theta: float = 10000.0) -> Tensor:
    half = D // 2
    return theta ** (-torch.arange(half, dtype=torch.float32, device=device) / half)


def places(T: int, B: int | None = None) -> Tensor:
    """From 0 for all rows, or from elsewhere for each row, far out for the last one."""
    if B is None:
        return torch.arange(T)
    return torch.arange(T) + torch.tensor([[0], [7], [1000], [100_000]])[-B:]


def make_inputs(B: int, T: int, H: int, D: int, norm: bool, dtype: torch.dtype = torch.float64) -> Inputs:
    """Rows of all lengths, down to where eps counts."""
    x = normal(B, T, H, D)
    inputs = {"x": x * torch.logspace(-4, 1, T, dtype=x.dtype).view(1, T, 1, 1) if norm else x}
    if norm:
        inputs["weight"] = 1 + 0.3 * normal(D, seed=1)
    return {name: x.to(dtype) for name, x in inputs.items()}


def by_hand(x: Tensor, positions: Tensor, weight: Tensor | None = None) -> Tensor:
    """In float64 and complex numbers, of angles in float32."""
    angle = (positions.float()[..., None, None] * frequencies(x.shape[3], x.device)).double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def results(inputs: Inputs, positions: Tensor, backend: str, compiler: str | None = None) -> Inputs:
    """y and every gradient."""
    leaves = leaves_of(inputs)
    turns = frequencies(inputs["x"].shape[3], inputs["x"].device)

    def function(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return rotary(x, positions, turns, weight, backend=backend)

    call = function if compiler is None else torch.compile(function, backend=compiler, fullgraph=True)
    return differentiate({"y": call(**leaves)}, leaves)


def assert_exact(inputs: Inputs, positions: Tensor, dtype: torch.dtype, limit: float, backend: str) -> None:
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    leaves = leaves_of({name: x.double() for name, x in inputs.items()})
    ref = differentiate({"y": by_hand(leaves["x"], positions, leaves.get("weight"))}, leaves)
    out = results(inputs, positions, backend)
    assert all(x.dtype == dtype for x in out.values())
    assert_close(out, ref, limit)


def assert_strides_do_not_matter(inputs: Inputs, positions: Tensor) -> None:
    """x beside others in wider rows, as a joint projection leaves it, and laid out backwards: the same bits."""
    x = inputs["x"]
    plain = results(inputs, positions, "triton")
    wide = torch.cat([x.flatten(2), x.flatten(2)], dim=-1)[..., x.shape[2] * x.shape[3] :].unflatten(-1, x.shape[2:])
    backwards = x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    for spread in (wide, backwards):
        assert not spread.is_contiguous() and torch.equal(spread, x)
        out = results({**inputs, "x": spread}, positions, "triton")
        assert all(torch.equal(out[name], value) for name, value in plain.items())
