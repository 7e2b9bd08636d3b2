"""Inputs and measures that the tests of softmax attention share, on a CPU, in Triton's interpreter and on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from recurrence_cases import Inputs, error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import softmax_attention, softmax_decode

SCALE = 0.37  # of random heads of 8 to 64 channels: weights that differ
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# Of outputs, and of gradients, as of the recurrence. float16 rounds to 2⁻¹² at most, TF32 cuts to 2⁻¹¹.
LIMITS = {BFLOAT16: (4e-3, 5e-3), FLOAT16: (1e-3, 2e-3), FLOAT32: (1e-5, 1e-5)}

Attention = Callable[..., Tensor]


def make(
    T: int,
    S: int | None = None,
    B: int = 1,
    HQ: int = 2,
    HKV: int = 1,
    D: int = 20,
    dtype: torch.dtype = FLOAT32,
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """q, k, v and the gradient of o, the same numbers on every device."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, T, HQ, D), "k": (B, S or T, HKV, D), "v": (B, S or T, HKV, D), "d_o": (B, T, HQ, D)}
    return {name: torch.randn(shape, generator=rng).to(device, dtype) for name, shape in shapes.items()}


def results(inputs: Inputs, function: Attention = softmax_attention, **options: Any) -> Inputs:
    """o and the gradients of q, k, v; scale is SCALE unless given."""
    leaves = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v")]
    o = function(*leaves, **{"scale": SCALE, "backend": "triton", **options})
    gradients = torch.autograd.grad(o, leaves, inputs["d_o"].to(o.dtype))
    return {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def reference(inputs: Inputs, backend: str = "reference", **options: Any) -> Inputs:
    return results({name: x.double() for name, x in inputs.items()}, backend=backend, **options)


def assert_within(out: Inputs, ref: Inputs, dtype: torch.dtype, **times: float) -> None:
    """As close as LIMITS, or so many times as far for the results that are named."""
    broken = {name: "not finite" for name, x in out.items() if not x.isfinite().all()}
    for name in ref.keys() - broken.keys():
        found, limit = error(out[name], ref[name]), times.get(name, 1.0) * LIMITS[dtype][name.startswith("d")]
        if found > limit:
            broken[name] = f"{found:.1e} > {limit:.0e}"
    assert not broken, broken


def check(inputs: Inputs, times: dict[str, float] | None = None, **options: Any) -> Inputs:
    """o and every gradient against the written-out scores in float64."""
    out = results(inputs, **options)
    assert all(x.dtype == inputs["q"].dtype for x in out.values())
    assert_within(out, reference(inputs, **options), inputs["q"].dtype, **(times or {}))
    return out


def assert_same(out: Inputs, ref: Inputs) -> None:
    """To the bit."""
    assert out.keys() == ref.keys()
    for name, value in ref.items():
        assert out[name].dtype == value.dtype and torch.equal(out[name], value), name


def assert_causal(inputs: Inputs, cuts: list[int], **options: Any) -> None:
    """What comes from a cut on changes no bit of an earlier output. B = 1 and T = S."""
    other = {name: torch.cat([x.flip(1), x.flip(1)])[:1] for name, x in inputs.items()}
    batch = {
        name: torch.cat([inputs[name], *(torch.cat([inputs[name][:, :t], other[name][:, t:]], 1) for t in cuts)])
        for name in ("q", "k", "v")
    }
    o = softmax_attention(**batch, scale=SCALE, backend="triton", **options)
    for changed, t in zip(o[1:], cuts, strict=True):
        assert torch.equal(changed[:t], o[0, :t]), f"what follows token {t} reaches an earlier output"
        assert not torch.equal(changed[t:], o[0, t:])


def assert_rows_do_not_meet(inputs: Inputs, **options: Any) -> None:
    together = results(inputs, **options)
    for n in range(len(inputs["q"])):
        alone = results({name: x[n : n + 1] for name, x in inputs.items()}, **options)
        assert_same(alone, {name: x[n : n + 1] for name, x in together.items()})


def assert_strides_do_not_matter(inputs: Inputs, **options: Any) -> None:
    """Heads before tokens, slices of wider tensors, a last axis that is not contiguous, one gradient for all."""

    def between(x: Tensor) -> Tensor:
        wide = x.new_full((*x.shape[:2], 3, *x.shape[2:]), 99.0)
        wide[:, :, 1] = x
        return wide[:, :, 1]

    def transposed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def spread(x: Tensor) -> Tensor:
        return torch.stack([x, x.new_full(x.shape, 99.0)], dim=-1)[..., 0]

    plain = results(inputs, **options)
    for form in (between, transposed, spread):
        assert_same(results({name: form(x) for name, x in inputs.items()}, **options), plain)
    one = inputs["d_o"][:, :1, :1].expand_as(inputs["d_o"])
    assert_same(results({**inputs, "d_o": one}, **options), results({**inputs, "d_o": one.contiguous()}, **options))


def assert_checkpoint_changes_nothing(inputs: Inputs, use_reentrant: bool, **options: Any) -> None:
    def checkpointed(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        def layer(*tensors: Tensor) -> Tensor:
            return softmax_attention(*tensors, **given)

        result: Tensor = checkpoint(layer, q, k, v, use_reentrant=use_reentrant)
        return result

    if not use_reentrant:  # which takes no torch.autograd.grad
        assert_same(results(inputs, checkpointed, **options), results(inputs, **options))
        return
    leaves = {name: inputs[name].detach().requires_grad_() for name in ("q", "k", "v")}
    o = checkpointed(**leaves, scale=SCALE, backend="triton", **options)
    o.backward(inputs["d_o"])
    grads = {f"d{name}": x.grad for name, x in leaves.items()}
    assert_same({"o": o.detach(), **grads}, results(inputs, **options))  # type: ignore[dict-item]


def make_cache(lengths: list[int], T: int, S: int, unused: float = float("nan"), **sizes: Any) -> tuple[Inputs, Tensor]:
    """New tokens and a cache whose unused positions hold `unused`."""
    inputs = make(T, S, B=len(lengths), **sizes)
    del inputs["d_o"]
    for b, length in enumerate(lengths):
        inputs["k"][b, length:] = inputs["v"][b, length:] = unused
    return inputs, torch.tensor(lengths, dtype=torch.int32, device=inputs["q"].device)


def check_decode(inputs: Inputs, lengths: Tensor, function: Attention = softmax_decode, **options: Any) -> Tensor:
    options = {"scale": SCALE, **options}
    exact = {name: x.double() for name, x in inputs.items()}
    ref = softmax_decode(**exact, lengths=lengths, backend="reference", **options)
    with torch.no_grad():
        o = function(**inputs, lengths=lengths, **options)
    assert o.dtype == inputs["v"].dtype
    assert_within({"o": o}, {"o": ref}, inputs["q"].dtype)
    return o
