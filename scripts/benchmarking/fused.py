"""The ops around the recurrence, each beside the same in plain torch: inputs, calls, and the bytes that must move.

Of a shape B×T×H×D, the short convolution takes what is projected to q, k and v, [B, T, 3·H·D], four taps and SiLU; the
norm the residual stream, [B, T, H·D]; the gated norm a mixer's output, [B, T, H, D], with a sigmoid; the loss B·T
hidden states of H·D channels and a vocabulary of 32,000. x, the gate and the loss's weight are in the given dtype,
other weights in float32.
"""

from typing import Any

import torch
from torch import Tensor

import kernels
from scripts.benchmarking.cases import Call, Inputs, Shape

NAMES = ("short_convolution", "rms_norm", "gated_rms_norm", "linear_cross_entropy")
WIDTH, VOCAB = 4, 32_000


def make_inputs(op: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """What has a gradient, by name."""
    random = torch.Generator(device).manual_seed(seed)
    B, T, H, D = shape.B, shape.T, shape.H, shape.D

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=random, device=device)

    if op == "short_convolution":
        return {"x": normal(B, T, 3 * H * D).to(dtype), "weight": normal(3 * H * D, WIDTH) * WIDTH**-0.5}
    if op == "rms_norm":
        return {"x": normal(B, T, H * D).to(dtype), "weight": 1 + normal(H * D)}
    if op == "gated_rms_norm":
        x, gate = (normal(B, T, H, D).to(dtype) for _ in range(2))
        return {"x": x, "gate": gate, "weight": 1 + normal(D)}
    x, weight = normal(B * T, H * D), normal(VOCAB, H * D) * (H * D) ** -0.5
    return {"x": x.to(dtype), "weight": weight.to(dtype)}


def bind(op: str, backend: str, inputs: Inputs, seed: int) -> Call:
    """Tensors by name → the output and None."""
    options: dict[str, Any] = {"backend": backend}
    if op == "short_convolution":
        options["activation"] = "silu"
        return lambda **tensors: kernels.short_convolution(**tensors, **options)
    if op == "linear_cross_entropy":
        x = inputs["x"]
        random = torch.Generator(x.device).manual_seed(seed)
        options["targets"] = torch.randint(VOCAB, (len(x),), generator=random, device=x.device)
    function = getattr(kernels, op)
    return lambda **tensors: (function(**tensors, **options), None)


def d_output(op: str, inputs: Inputs) -> Tensor:
    """The gradient of the output, which is of x's shape but for the loss, a float32 or float64 number."""
    x = inputs["x"]
    if op == "linear_cross_entropy":
        return torch.ones((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(9), device=x.device).to(x.dtype)


def floor_bytes(op: str, inputs: Inputs) -> dict[str, int]:
    """As `cases.floor_bytes`. The loss does its products in nearly all of its time; of it only the bytes count here."""
    everything = sum(x.nbytes for x in inputs.values())
    output = 0 if op == "linear_cross_entropy" else inputs["x"].nbytes
    forward = everything + output
    return {"forward": forward, "both": forward + everything + output + everything}
