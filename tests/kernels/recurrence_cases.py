"""Inputs, gates and measures that the tests of the recurrence share."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

CELLS = [(rule, decay) for rule in ("additive", "delta") for decay in ("none", "scalar", "channel")]
GATED = [cell for cell in CELLS if cell[1] != "none"]

# Rearranged sums in float64 over at most 200 tokens: a few hundred roundings of 1.1e-16.
FLOAT64_ERROR = 1e-12
# float32 has 6e-8 a rounding; sums over 130 tokens and the chain of states reach 2e-7, whatever the gates are.
FLOAT32_ERROR = 1e-6
# o is rounded to bfloat16 once, 2⁻⁹ = 2e-3 at most; everything before it is float32.
BFLOAT16_ERROR = 4e-3

Inputs = dict[str, Tensor]


def make_inputs(
    rule: str,
    decay: str,
    T: int,
    B: int = 2,
    H: int = 1,
    HV: int = 2,
    K: int = 5,
    V: int = 3,
    N: int | None = None,
    gate: str = "mild",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Unit keys, write strengths in (0, 1), a random state; only the tensors that the cell takes."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    inputs = {
        "q": F.normalize(normal(B, T, H, K), dim=-1),
        "k": F.normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
        "initial_state": normal(B if N is None else N, HV, K, V),
    }
    if decay != "none":
        shape = (B, T, HV, K) if decay == "channel" else (B, T, HV)
        inputs["g"] = GATES[gate](torch.rand(*shape, generator=rng, dtype=torch.float64), rng)
    if rule == "delta":
        inputs["beta"] = torch.rand(B, T, HV, generator=rng, dtype=torch.float64)
    return {name: x.to(dtype) for name, x in inputs.items()}


def make_raw(
    rule: str,
    decay: str,
    T: int,
    bias: bool = True,
    spread: float = 1.0,
    dtype: torch.dtype = torch.float64,
    **sizes: int | None,
) -> Inputs:
    """What norm, gate and sigmoid in the kernel are for: keys of any length, short enough for the norm's 1e-6 to show;
    raw gates and write strengths, with a `spread` of 8 far into both tails."""
    inputs = make_inputs(rule, decay, T, **sizes)
    rng = torch.Generator().manual_seed(2)
    inputs["q"], inputs["k"] = 3 * inputs["q"], 0.01 * inputs["k"]
    for name in ("g", "beta"):
        if name in inputs:
            inputs[name] = spread * torch.randn(inputs[name].shape, generator=rng, dtype=torch.float64)
    if decay != "none":
        inputs["A_log"] = torch.randn(inputs["v"].shape[2], generator=rng, dtype=torch.float64)
        if bias:
            inputs["dt_bias"] = torch.randn(inputs["g"].shape[2:].numel(), generator=rng, dtype=torch.float64)
    return {name: x.to(dtype) for name, x in inputs.items()}


def raw_options(inputs: Inputs, negative: bool = False) -> dict[str, bool]:
    """The options that go with `make_raw`."""
    return {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": "A_log" in inputs,
        "use_beta_sigmoid_in_kernel": "beta" in inputs,
        "allow_neg_eigval": negative and "beta" in inputs,
    }


def _sprinkled(value: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Mild gates, a tenth of them replaced by `value`; all of the first and the last token's, too."""

    def gate(u: Tensor, rng: torch.Generator) -> Tensor:
        hit = torch.rand(u.shape, generator=rng) < 0.1
        hit[:, [0, -1]] = True
        return (-0.3 * u).masked_fill(hit, value)

    return gate


GATES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "mild": lambda u, _: -0.3 * u,
    "zero to -20": lambda u, _: -20.0 * u,
    "all -3.4": lambda u, _: torch.full_like(u, -3.4),
    "all -5": lambda u, _: torch.full_like(u, -5.0),
    "all -18": lambda u, _: torch.full_like(u, -18.0),
    "some -1e4": _sprinkled(-1e4),
    "some -inf": _sprinkled(float("-inf")),
}


def error(out: Tensor, ref: Tensor) -> float:
    """‖out − ref‖ / ‖ref‖ in float64; ‖out‖ where ref is zero."""
    out, ref = out.detach().double(), ref.detach().double()
    return ((out - ref).norm() / (ref.norm() or 1.0)).item()


def evaluate(function: Callable[..., tuple[Tensor, Tensor | None]], inputs: Inputs, **options: object) -> Inputs:
    """o, the last state and the gradient of every input, for fixed random gradients of both results."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o, state = function(**leaves, output_final_state=True, **options)
    assert state is not None
    rng = torch.Generator().manual_seed(1)
    # Rounded, so that a 16-bit output has the same gradient as a float64 one.
    weights = [torch.randn(x.shape, generator=rng).bfloat16().to(x.device, torch.float64) for x in (o, state)]
    ((o.double() * weights[0]).sum() + (state.double() * weights[1]).sum()).backward()
    grads = {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}
    assert len(grads) == len(leaves)
    return {"o": o.detach(), "state": state.detach(), **grads}


def assert_close(out: Inputs, ref: Inputs, tolerance: float) -> None:
    assert out.keys() == ref.keys()
    for name, value in ref.items():
        assert out[name].isfinite().all(), f"{name} is not finite"
        assert error(out[name], value) <= tolerance, f"{name}: error {error(out[name], value):.1e}"
