"""Sequences that are packed into one row do not meet, bit for bit, whatever runs the ops.

This is what stands here for masks: a token that does not belong to a sequence, before it, behind it or in another one,
changes neither its outputs nor its states nor its gradients.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from kernel_checks import placed
from recurrence_cases import Inputs, make_inputs, make_raw, raw_options
from torch import Tensor

from kernels import short_convolution, softmax_attention

# Boundaries of which the longest sequence is looked at: after others, before one, and after one without tokens.
LONG, SHORT = [0, 2, 2, 7, 45, 50], [0, 2, 6, 8]

Op = Callable[..., tuple[Tensor, Tensor | None]]
SHARED = ("A_log", "dt_bias", "weight", "bias")


def assert_sequences_do_not_meet(op: Op, inputs: Inputs, other: Inputs, cuts: list[int]) -> None:
    """`op` gives an output [1, T, …] and states [N, …] or none; `other` is what the other sequences have instead."""
    length, n = max((end - start, n) for n, (start, end) in enumerate(pairwise(cuts)))
    at = slice(cuts[n], cuts[n] + length)

    def own(name: str, x: Tensor) -> Tensor:
        """The chosen sequence's part."""
        return x[n] if name.endswith("state") else x[:, at]

    def mixed(name: str, x: Tensor, elsewhere: Tensor) -> Tensor:
        if name in SHARED:
            return x
        result = elsewhere.clone()
        own(name, result).copy_(own(name, x))
        return result

    def run(tensors: Inputs, weights: Inputs) -> Inputs:
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        found = {name: x for name, x in zip(("o", "state"), op(**leaves), strict=True) if x is not None}
        gradients = [weights[name].to(x) for name, x in found.items()]
        grads = torch.autograd.grad(list(found.values()), list(leaves.values()), gradients)
        return {
            **{name: x.detach() for name, x in found.items()},
            **dict(zip([f"d_{x}" for x in leaves], grads, strict=True)),
        }

    with torch.no_grad():
        shapes = {name: x for name, x in zip(("o", "state"), op(**inputs), strict=True) if x is not None}
    rng = torch.Generator().manual_seed(4)
    some, others = ({name: torch.randn(x.shape, generator=rng) for name, x in shapes.items()} for _ in range(2))
    alone = {name: mixed(name, x, torch.zeros_like(x)) for name, x in some.items()}
    changed = {name: mixed(name, x, other[name]) for name, x in inputs.items()}

    first, of_itself, same = run(inputs, some), run(inputs, alone), run(changed, alone)
    other_gradients = run(changed, {name: mixed(name, x, others[name]) for name, x in some.items()})
    for name, x in first.items():
        if name.removeprefix("d_") in SHARED:  # a sum over all sequences, of which one has a gradient
            assert torch.equal(same[name], of_itself[name]), name
            continue
        for found in (of_itself, same, other_gradients):
            assert own(name, x).isfinite().all() and torch.equal(own(name, found[name]), own(name, x)), name
        if name.startswith("d_"):
            assert torch.equal(same[name], mixed(name, same[name], torch.zeros_like(x))), f"{name} reaches others"
        else:
            assert not torch.equal(same[name], x), f"{name} of the others is another one"


def assert_recurrences_do_not_meet(
    form: Op,
    rule: str,
    decay: str,
    dtype: torch.dtype,
    device: str = "cpu",
    backend: str = "triton",
    cuts: list[int] = LONG,
    options_in_kernel: tuple[bool, ...] = (False, True),
    **sizes: int,
) -> None:
    """The other sequences' values are a thousand times as large, and their gates stop at nothing."""
    T = cuts[-1]
    sizes = {"B": 1, "N": len(cuts) - 1, "H": 1, "HV": 2, **sizes}
    for options in options_in_kernel:
        make = make_raw if options else make_inputs
        inputs = make(rule, decay, T, **sizes)
        other = make(rule, decay, T, **sizes, seed=1)
        other["v"] = 1e3 * other["v"]
        if options:  # whose raw numbers no seed changes
            other |= {name: 3 * inputs[name].flip(1) for name in ("g", "beta") if name in inputs}
        elif decay != "none":
            other["g"] = make_inputs(rule, decay, T, **sizes, gate="some -inf", seed=1)["g"]
        given: dict[str, Any] = {"rule": rule, "decay": decay, "backend": backend}
        given["cu_seqlens"] = torch.tensor(cuts, device=device)
        given |= raw_options(inputs) if options else {}

        def op(given: dict[str, Any] = given, **tensors: Tensor) -> tuple[Tensor, Tensor | None]:
            return form(**tensors, output_final_state=True, **given)

        assert_sequences_do_not_meet(op, placed(inputs, device, dtype), placed(other, device, dtype), cuts)


def assert_attention_does_not_meet(
    dtype: torch.dtype, device: str = "cpu", backend: str = "triton", cuts: list[int] = LONG, D: int = 8, **options: Any
) -> None:
    """Keys of the others would take all of the weight."""
    bounds = torch.tensor(cuts, device=device)
    rng = torch.Generator().manual_seed(0)

    def make(size: float) -> Inputs:
        shapes = {"q": (1, cuts[-1], 2, D), "k": (1, cuts[-1], 1, D), "v": (1, cuts[-1], 1, D)}
        return {name: (size * torch.randn(x, generator=rng)).to(device, dtype) for name, x in shapes.items()}

    def op(**tensors: Tensor) -> tuple[Tensor, None]:
        return softmax_attention(**tensors, cu_seqlens=bounds, backend=backend, **options), None

    assert_sequences_do_not_meet(op, make(1.0), make(30.0), cuts)


def assert_convolutions_do_not_meet(
    dtype: torch.dtype, device: str = "cpu", backend: str = "triton", cuts: list[int] = LONG
) -> None:
    D, W, rng = 20, 4, torch.Generator().manual_seed(0)

    def make(size: float) -> Inputs:
        shapes = {
            "x": (1, cuts[-1], D),
            "initial_state": (len(cuts) - 1, W - 1, D),
            "weight": (D, W),
            "bias": (D,),
        }
        return {name: (size * torch.randn(x, generator=rng)).to(device, dtype) for name, x in shapes.items()}

    def op(**tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        given: dict[str, Any] = {"cu_seqlens": torch.tensor(cuts, device=device), "backend": backend}
        return short_convolution(**tensors, activation="silu", output_final_state=True, **given)

    assert_sequences_do_not_meet(op, make(1.0), make(1e3), cuts)
