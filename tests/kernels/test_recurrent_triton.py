"""The Triton kernel for decoding, in Triton's interpreter: see interpreter.py."""

from typing import Any

import interpreter
import pytest
import torch
from recurrence_cases import (
    BFLOAT16_ERROR,
    CELLS,
    FLOAT32_ERROR,
    FLOAT64_ERROR,
    GATED,
    GATES,
    Inputs,
    assert_close,
    error,
    evaluate,
    make_inputs,
    make_raw,
)
from torch import Tensor

interpreter.required()

import kernels  # noqa: E402
from kernels.gpu.recurrence.recurrent import recurrent as function  # noqa: E402

SCALE = 0.37
# float16 has 11 bits: o is rounded once, 2⁻¹¹ = 5e-4 at most.
ERRORS = {torch.float32: FLOAT32_ERROR, torch.float16: 5e-4, torch.bfloat16: BFLOAT16_ERROR}
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
PACKED = torch.tensor([0, 0, 2, 2, 5, 5])  # three of the five sequences are empty

cells = pytest.mark.parametrize(("rule", "decay"), CELLS)


def arguments(
    inputs: Inputs, rule: str, decay: str, l2norm: bool = False, sigmoid: float = 0.0
) -> tuple[Tensor | float | str | None, ...]:
    """The positional arguments of `recurrent` and of the operators."""
    return *(inputs.get(name) for name in TENSORS), SCALE, rule, decay, l2norm, sigmoid


def recurrent(inputs: Inputs, *options: Any) -> Inputs:
    o, state = function(*arguments(inputs, *options))
    return {"o": o, "state": state}


def reference(inputs: Inputs, rule: str, decay: str, l2norm: bool = False, sigmoid: float = 0.0) -> Inputs:
    """The same, token by token in float64, over the same rounded inputs."""
    o, state = kernels.fused_recurrent(
        **{name: x if name == "cu_seqlens" else x.double() for name, x in inputs.items()},
        rule=rule,
        decay=decay,
        scale=SCALE,
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
        use_gate_in_kernel="A_log" in inputs,
        use_beta_sigmoid_in_kernel=sigmoid > 0,
        allow_neg_eigval=sigmoid == 2,
        backend="reference",
    )
    assert state is not None
    return {"o": o, "state": state}


def raw(rule: str, decay: str, T: int = 5, bias: bool = True) -> Inputs:
    """Grouped value heads; gates far into both tails."""
    return make_raw(rule, decay, T, bias, spread=8.0, dtype=torch.float32, H=2, HV=4)


@pytest.mark.parametrize(
    ("rule", "decay", "gate", "T"),
    [(*cell, gate, 3) for cell in GATED for gate in GATES] + [(*cell, "mild", 1) for cell in CELLS],
)
def test_matches_float64(rule: str, decay: str, gate: str, T: int) -> None:
    """Grouped value heads, K ≠ V, neither a power of two."""
    inputs = make_inputs(rule, decay, T, H=2, HV=4, gate=gate, dtype=torch.float32)
    assert_close(recurrent(inputs, rule, decay), reference(inputs, rule, decay), FLOAT32_ERROR)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (4, 65), (16, 128), (130, 33), (256, 5), (64, 32)])
@pytest.mark.parametrize(("rule", "decay"), [("delta", "channel"), ("additive", "none")])
def test_widths(rule: str, decay: str, K: int, V: int) -> None:
    """One slice of the values or several, the last one full or not."""
    inputs = make_inputs(rule, decay, T=2, B=1, K=K, V=V, dtype=torch.float32)
    assert_close(recurrent(inputs, rule, decay), reference(inputs, rule, decay), FLOAT32_ERROR)


@cells
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_packed(rule: str, decay: str, dtype: torch.dtype) -> None:
    """An empty sequence ends in its initial state."""
    inputs = make_inputs(rule, decay, T=5, B=1, N=5, dtype=torch.float32)
    inputs["cu_seqlens"] = PACKED.to(dtype)
    out = recurrent(inputs, rule, decay)
    assert_close(out, reference(inputs, rule, decay), FLOAT32_ERROR)
    assert torch.equal(out["state"][[0, 2, 4]], inputs["initial_state"][[0, 2, 4]])


@cells
@pytest.mark.parametrize(("bias", "sigmoid"), [(False, 1.0), (True, 2.0)])
def test_norm_gate_and_sigmoid_in_the_kernel(rule: str, decay: str, bias: bool, sigmoid: float) -> None:
    inputs = raw(rule, decay, 3, bias)
    options = (rule, decay, True, sigmoid if rule == "delta" else 0.0)
    assert_close(recurrent(inputs, *options), reference(inputs, *options), FLOAT32_ERROR)


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """16-bit inputs are exact in float32, where everything is computed; o has their dtype."""
    inputs = make_inputs("delta", "channel", T=5, dtype=torch.float32)
    inputs = {name: x if name == "initial_state" else x.to(dtype) for name, x in inputs.items()}
    out, ref = recurrent(inputs, "delta", "channel"), reference(inputs, "delta", "channel")
    assert out["o"].dtype == dtype and out["state"].dtype == torch.float32
    assert error(out["o"], ref["o"]) <= ERRORS[dtype]
    assert error(out["state"], ref["state"]) <= FLOAT32_ERROR


@cells
def test_the_callers_state_stays(rule: str, decay: str) -> None:
    """Steps that carry the state equal one call; no state is the zero state."""
    inputs = make_inputs(rule, decay, T=3, dtype=torch.float32)
    before = inputs["initial_state"].clone()
    whole = recurrent(inputs, rule, decay)
    state, steps = inputs["initial_state"], []
    for t in range(3):
        step = {name: x[:, t : t + 1] for name, x in inputs.items()} | {"initial_state": state}
        o, state = recurrent(step, rule, decay).values()
        steps.append(o)
    assert torch.equal(inputs["initial_state"], before)
    assert torch.equal(torch.cat(steps, dim=1), whole["o"]) and torch.equal(state, whole["state"])

    zero = inputs | {"initial_state": torch.zeros_like(before)}
    del inputs["initial_state"]
    fresh, expected = recurrent(inputs, rule, decay), recurrent(zero, rule, decay)
    assert all(torch.equal(fresh[name], expected[name]) for name in fresh)


@cells
@pytest.mark.parametrize("contiguous", [True, False])
def test_in_place(rule: str, decay: str, contiguous: bool) -> None:
    """Asked for, the state is written over: where it is, or by a copy if it has gaps."""
    inputs = make_inputs(rule, decay, T=3, B=1, V=130, dtype=torch.float32)
    expected = recurrent(inputs, rule, decay)
    state = inputs["initial_state"].clone() if contiguous else inputs["initial_state"].mT.contiguous().mT
    o, last = kernels.fused_recurrent(
        **{**inputs, "initial_state": state},
        rule=rule,
        decay=decay,
        scale=SCALE,
        output_final_state=True,
        inplace_state=True,
        backend="triton",
    )
    assert last is state
    assert torch.equal(o, expected["o"]) and torch.equal(state, expected["state"])


@cells
@pytest.mark.parametrize("T", [1, 3])
def test_parts_of_wider_rows(rule: str, decay: str, T: int) -> None:
    """As a mixer's projections lie beside each other: the same bits as from tensors of their own."""
    inputs = make_inputs(rule, decay, T, B=2, H=2, HV=4, dtype=torch.float32)
    names = [name for name in ("q", "k", "v", "g", "beta") if name in inputs]
    wide = torch.cat([inputs[name].flatten(2) for name in names], dim=-1)
    parts = wide.split([inputs[name].flatten(2).shape[2] for name in names], dim=-1)
    spread = {name: x.unflatten(-1, inputs[name].shape[2:]) for name, x in zip(names, parts, strict=True)}
    assert not any(x.is_contiguous() for x in spread.values())
    out, expected = recurrent({**inputs, **spread}, rule, decay), recurrent(inputs, rule, decay)
    assert all(torch.equal(out[name], expected[name]) for name in out)


@cells
def test_any_strides(rule: str, decay: str) -> None:
    """Every tensor is every other element of a wider one, its dimensions laid out backwards."""

    def spread(x: Tensor) -> Tensor:
        wide = x.new_full((*reversed(x.shape), 2), 99)
        view = wide[..., 0].permute(*reversed(range(x.dim())))
        view.copy_(x)
        assert not view.is_contiguous()
        return view

    inputs = raw(rule, decay)
    # One sequence of five tokens in two pieces: B = 1.
    inputs = {name: x if name in ("A_log", "dt_bias") else x[:1] for name, x in inputs.items()}
    inputs["initial_state"] = torch.cat([inputs["initial_state"]] * 2)
    inputs["cu_seqlens"] = torch.tensor([0, 2, 5])
    options = (rule, decay, True, 1.0 if rule == "delta" else 0.0)
    out = recurrent({name: spread(x) for name, x in inputs.items()}, *options)
    expected = recurrent(inputs, *options)
    assert all(torch.equal(out[name], expected[name]) for name in out)


@pytest.mark.parametrize(("rule", "decay", "packed"), [*((*cell, False) for cell in CELLS), ("delta", "channel", True)])
def test_backward_hands_on_every_gradient(rule: str, decay: str, packed: bool) -> None:
    inputs = make_raw(rule, decay, 3, dtype=torch.float32, B=1, HV=1, N=2 if packed else None)
    options = (rule, decay, True, 2.0 if rule == "delta" else 0.0)
    extra = {"cu_seqlens": torch.tensor([0, 1, 3])} if packed else {}

    def ours(output_final_state: bool, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, state = recurrent(tensors | extra, *options).values()
        return o, state

    def theirs(output_final_state: bool, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, state = reference(tensors | extra, *options).values()
        return o, state

    assert_close(evaluate(ours, inputs), evaluate(theirs, inputs), FLOAT32_ERROR)


@pytest.mark.parametrize("used", ["o", "state"])
def test_backward_of_one_result(used: str) -> None:
    """The result that was not used has gradient zero; inputs that need no gradient get none."""
    inputs = make_inputs("delta", "channel", T=2, B=1, dtype=torch.float32)
    grads = []
    for form in (recurrent, reference):
        leaves = {name: x.clone() for name, x in inputs.items()}
        leaves["g"].requires_grad_()
        form(leaves, "delta", "channel")[used].sin().sum().backward()
        assert leaves["v"].grad is None and leaves["g"].grad is not None
        grads.append(leaves["g"].grad)
    assert error(*grads) <= FLOAT32_ERROR


@cells
def test_operator(rule: str, decay: str) -> None:
    """The operator mutates and aliases nothing, and its fake results have the shapes of the real ones."""
    inputs = make_inputs(rule, decay, T=2, B=1, N=2, dtype=torch.float32)
    for bounds in (None, torch.tensor([0, 1, 2])):
        if bounds is None:
            given = inputs | {"initial_state": inputs["initial_state"][:1]}
        else:
            given = inputs | {"cu_seqlens": bounds}
        torch.library.opcheck(
            torch.ops.kda_lm.recurrent.default,
            arguments(given, rule, decay),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


def test_compiles_without_graph_breaks() -> None:
    inputs = make_inputs("delta", "scalar", T=2, dtype=torch.float32)
    args = arguments(inputs, "delta", "scalar")
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for out, expected in zip(compiled(*args), function(*args), strict=True):
        assert error(out, expected) <= FLOAT64_ERROR
