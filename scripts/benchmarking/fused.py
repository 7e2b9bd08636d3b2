"""The ops around the recurrence, each beside the same in plain torch: inputs, calls, and the bytes that must move.

Of a shape B×T×H×D, the short convolution takes what is projected to q, k and v, [B, T, 3·H·D], four taps and SiLU; the
norm the residual stream, [B, T, H·D]; the gated norm a mixer's output, [B, T, H, D], with a sigmoid; the norm of a sum
the stream in float32, as it is under autocast, and what is added to it; SwiGLU gate and up of an MLP of 8/3 · H·D
channels; the loss B·T hidden states of H·D channels and a vocabulary of 32,000. All else is in the given dtype, but
weights other than the loss's are in float32.
"""

import math
from typing import Any

import torch
from torch import Tensor

import kernels
from scripts.benchmarking.cases import Call, Inputs, Shape

NAMES = ("short_convolution", "rms_norm", "gated_rms_norm", "add_rms_norm", "swiglu", "linear_cross_entropy")
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
    if op == "add_rms_norm":
        return {"x": normal(B, T, H * D), "y": normal(B, T, H * D).to(dtype), "weight": 1 + normal(H * D)}
    if op == "swiglu":
        return {"x": normal(B, T, 2 * 16 * math.ceil(H * D * 8 / 3 / 16)).to(dtype)}
    if op == "gated_rms_norm":
        x, gate = (normal(B, T, H, D).to(dtype) for _ in range(2))
        return {"x": x, "gate": gate, "weight": 1 + normal(D)}
    x, weight = normal(B * T, H * D), normal(VOCAB, H * D) * (H * D) ** -0.5
    return {"x": x.to(dtype), "weight": weight.to(dtype)}


def bind(op: str, backend: str, inputs: Inputs, seed: int) -> Call:
    """Tensors by name → the output and None, or the sum that it is the norm of."""
    options: dict[str, Any] = {"backend": backend}
    if op == "short_convolution":
        options["activation"] = "silu"
        return lambda **tensors: kernels.short_convolution(**tensors, **options)
    if op == "linear_cross_entropy":
        x = inputs["x"]
        random = torch.Generator(x.device).manual_seed(seed)
        options["targets"] = torch.randint(VOCAB, (len(x),), generator=random, device=x.device)
    function = getattr(kernels, op)
    if op == "add_rms_norm":
        options["dtype"] = inputs["y"].dtype
        return lambda **tensors: function(**tensors, **options)[::-1]
    return lambda **tensors: (function(**tensors, **options), None)


def d_outputs(op: str, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The gradients of what `bind` returns: of x's shape, or half of it; of the loss, a float32 or float64 number."""
    x = inputs["x"]
    random = torch.Generator(x.device).manual_seed(9)

    def normal(*sizes: int, dtype: torch.dtype = x.dtype) -> Tensor:
        return torch.randn(sizes, generator=random, device=x.device).to(dtype)

    if op == "linear_cross_entropy":
        return torch.ones((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device), None
    if op == "add_rms_norm":
        return normal(*x.shape, dtype=inputs["y"].dtype), normal(*x.shape)
    return normal(*x.shape[:-1], x.shape[-1] // 2 if op == "swiglu" else x.shape[-1]), None


def floor_bytes(op: str, inputs: Inputs) -> dict[str, int]:
    """As `cases.floor_bytes`, but that the backward of a sum's norm reads the sum, which is as large as x, and not what
    was added, whose gradient is x's if they have one dtype. The loss does its products in nearly all of its time; of it
    only the bytes count here."""
    x, added = inputs["x"], inputs.get("y")
    everything = read = written = sum(x.nbytes for x in inputs.values())
    output = {"linear_cross_entropy": 0, "swiglu": x.nbytes // 2}.get(op, x.nbytes)
    if added is not None:
        output += added.nbytes
        read -= added.nbytes
        written -= added.nbytes if added.dtype == x.dtype else 0
    forward = everything + output
    return {"forward": forward, "both": forward + read + output + written}
