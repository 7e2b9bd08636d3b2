"""The chunkwise Triton kernels, and what is common to both forms, in Triton's interpreter: see interpreter.py.

Inputs are float32, and what only bfloat16 has, chunks of 64 tokens (`chunk64`) and its range of exponents, is tried
with these, too. bfloat16.py teaches the interpreter the rest of it. test_chunk_gpu.py has the other dtypes, sizes and
the real compiler.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import interpreter
import pytest
import torch
from recurrence_cases import (
    CELLS,
    FLOAT32_ERROR,
    GATED,
    GATES,
    Inputs,
    assert_close,
    error,
    evaluate,
    make_inputs,
    make_raw,
    raw_options,
)
from torch import Tensor

interpreter.required()

import bfloat16  # noqa: E402
import kernel_checks as checks  # noqa: E402
import packed_checks  # noqa: E402
from gpu_checks import assert_within, reference  # noqa: E402

from kernels import chunk, chunk_kda, fused_recurrent, fused_recurrent_kda, resolve_backend  # noqa: E402
from kernels.gpu.recurrence import plan  # noqa: E402
from kernels.gpu.recurrence.tiles import FLOAT32, forced  # noqa: E402

SCALE = 0.37
# The gradient of a gate is a sum over the chunk in which what does not cross the gate cancels; A_log's is one number.
GATE_ERROR = 3e-5
MOVED_ERROR = 5e-6  # of exponents moved as for bfloat16: 80 has steps of 2⁻¹⁷ = 8e-6
SMALL = {"B": 1, "H": 1, "HV": 1, "K": 20, "V": 12}
WIDER = {"B": 1, "H": 1, "HV": 2, "K": 64, "V": 64}  # errors in bfloat16 need some numbers to be alike

cells = pytest.mark.parametrize(("rule", "decay"), CELLS)
# One cell for each set of kernels.
kinds = pytest.mark.parametrize(("rule", "decay"), [("delta", "channel"), ("delta", "scalar"), ("additive", "none")])


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """What a kernel reads before something has written it becomes NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    bfloat16.install(monkeypatch)


@pytest.fixture
def chunk64() -> Iterator[None]:
    """Chunks as long as those of bfloat16: one more level of pairs and of the inverse."""
    with forced(replace(FLOAT32, chunk=64)):
        yield


def make(rule: str, decay: str, T: int, **sizes: Any) -> Inputs:
    return make_inputs(rule, decay, T, dtype=torch.float32, **{**SMALL, **sizes})


def check(
    form: checks.Form, inputs: Inputs, rule: str, decay: str, limit: float = FLOAT32_ERROR, **options: Any
) -> Inputs:
    """Output, last state and every gradient against the token-by-token recurrence in float64."""
    options = {"rule": rule, "decay": decay, "scale": SCALE, **options}
    exact = {name: x.double() for name, x in inputs.items()}
    ref = evaluate(chunk, exact, backend="reference", **options)
    out = evaluate(form, inputs, backend="triton", **options)
    gates = {"dg", "dA_log", "ddt_bias"} if "A_log" in inputs else {"dg"}
    for names, tolerance in ((gates & ref.keys(), GATE_ERROR), (ref.keys() - gates, limit)):
        assert_close(*({name: x[name] for name in names} for x in (out, ref)), tolerance)
    return out


def test_auto_is_triton_here() -> None:
    assert resolve_backend("auto", "cpu") == "triton"
    inputs = make("delta", "channel", 5)
    options = {"rule": "delta", "decay": "channel"}
    for form in (chunk, fused_recurrent):
        auto, triton, other = (form(**inputs, **options, backend=name)[0] for name in ("auto", "triton", "torch"))
        assert torch.equal(auto, triton) and not torch.equal(auto, other)


def test_names_run_the_kernels() -> None:
    """The named functions hand the backend on."""
    inputs = make("delta", "channel", 5)
    for form, name in ((chunk, chunk_kda), (fused_recurrent, fused_recurrent_kda)):
        o, _ = form(**inputs, rule="delta", decay="channel", backend="triton")
        assert torch.equal(name(**inputs, backend="triton")[0], o)


@pytest.mark.parametrize(("change", "message"), [({"K": 257}, "K = 257"), ({"V": 257}, "V = 257"), ({}, "float64")])
def test_what_the_kernels_do_not_take(change: dict[str, int], message: str) -> None:
    """Named by "triton", and left to torch by "auto"."""
    dtype = torch.float32 if change else torch.float64
    inputs = make_inputs("additive", "none", 2, dtype=dtype, **{**SMALL, **change})
    for form in (chunk, fused_recurrent):
        with pytest.raises(ValueError, match=rf"backend: got 'triton' for .*{message}.*accepted: .*256.*'torch'"):
            form(**inputs, rule="additive", decay="none", backend="triton")
        auto, other = (form(**inputs, rule="additive", decay="none", backend=name)[0] for name in ("auto", "torch"))
        assert torch.equal(auto, other)


@cells
def test_matches_float64(rule: str, decay: str) -> None:
    """K ≠ V, neither a power of two; two chunks of which the last is not full."""
    check(chunk, make(rule, decay, 40), rule, decay)


@kinds
def test_grouped_heads(rule: str, decay: str) -> None:
    """Two key heads, four value heads."""
    check(chunk, make(rule, decay, 6, H=2, HV=4), rule, decay)


@kinds
def test_wide_heads(rule: str, decay: str) -> None:
    """Several blocks of key channels and of value channels."""
    check(chunk, make(rule, decay, 17, K=130, V=70), rule, decay)


@kinds
@pytest.mark.parametrize("T", [1, 32, 33])
def test_lengths(rule: str, decay: str, T: int) -> None:
    check(chunk, make(rule, decay, T), rule, decay)


@cells
def test_packed(rule: str, decay: str) -> None:
    """Two of the four sequences are empty: each ends in the state that it began with."""
    bounds = torch.tensor([0, 9, 9, 43, 43], dtype=torch.int32 if decay == "scalar" else torch.int64)
    inputs = make(rule, decay, 43, N=4)
    out = check(chunk, inputs, rule, decay, cu_seqlens=bounds)
    assert torch.equal(out["state"][[1, 3]], inputs["initial_state"][[1, 3]])


@pytest.mark.parametrize(
    ("rule", "decay", "gate"), [(*cell, x) for cell in CELLS for x in GATES if x == "mild" or cell in GATED]
)
@pytest.mark.usefixtures("chunk64")
def test_any_gate(rule: str, decay: str, gate: str) -> None:
    """As exact as a mild one, and finite, gradients included."""
    check(chunk, make(rule, decay, 60, gate=gate), rule, decay)


@pytest.mark.parametrize("rule", ["additive", "delta"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", [60, 64])
@pytest.mark.usefixtures("chunk64")
def test_any_gate_with_the_exponents_of_bfloat16(rule: str, gate: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which pairs are near, and by how much their exponents are moved, differs between the dtypes. A full chunk
    has no masks."""
    monkeypatch.setattr(plan, "NEAR_FLOAT32", plan.NEAR)
    check(chunk, make(rule, "channel", T, gate=gate), rule, "channel", limit=MOVED_ERROR)


def check_bfloat16(inputs: Inputs, rule: str, decay: str, **options: Any) -> None:
    """As close to float64 as is asked of it on a GPU."""
    inputs = checks.placed(inputs, "cpu", torch.bfloat16)
    options = {"rule": rule, "decay": decay, "scale": SCALE, **options}
    ref = reference(inputs, backend="torch", **options)
    assert_within(evaluate(chunk, inputs, backend="triton", **options), ref, torch.bfloat16)


@cells
@pytest.mark.parametrize(("T", "options_in_kernel"), [(130, False), (128, True)])
@pytest.mark.usefixtures("with_bfloat16")
def test_bfloat16(rule: str, decay: str, T: int, options_in_kernel: bool) -> None:
    inputs = (make_raw if options_in_kernel else make_inputs)(rule, decay, T, **WIDER)
    check_bfloat16(inputs, rule, decay, **(raw_options(inputs) if options_in_kernel else {}))


@pytest.mark.parametrize(("rule", "decay", "gate"), [(*cell, x) for cell in GATED for x in ("all -18", "some -1e4")])
@pytest.mark.usefixtures("with_bfloat16")
def test_bfloat16_with_any_gate(rule: str, decay: str, gate: str) -> None:
    check_bfloat16(make_inputs(rule, decay, 128, **WIDER, gate=gate), rule, decay)


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
@pytest.mark.usefixtures("with_bfloat16")
def test_long_equal_keys_reach_no_earlier_token(decay: str) -> None:
    checks.assert_long_equal_keys_reach_no_earlier_token("cpu", decay)


@cells
@pytest.mark.parametrize("T", [20, 32])
def test_norm_gate_and_sigmoid(rule: str, decay: str, T: int) -> None:
    """In the kernels, with the gradients of A_log and dt_bias."""
    inputs = make_raw(rule, decay, T, dtype=torch.float32, **{**SMALL, "HV": 2})
    check(chunk, inputs, rule, decay, **raw_options(inputs, negative=decay != "none"))


@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_strong_gates_made_in_the_kernel(decay: str) -> None:
    """A log-decay of −1e4 has no gradient to speak of, and gives A_log none."""
    inputs = make("delta", decay, 20, gate="some -1e4")
    inputs["g"] = -inputs["g"]  # softplus(1e4) = 1e4
    inputs["A_log"] = torch.zeros(1)
    check(chunk, inputs, "delta", decay, use_gate_in_kernel=True)


@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_gate_without_bias_packed(decay: str) -> None:
    """No token behind a sequence's end counts in the gradient of A_log: softplus(0) is not 0."""
    inputs = make_raw("delta", decay, 20, bias=False, N=2, dtype=torch.float32, **SMALL)
    inputs["A_log"] = torch.tensor([0.5])
    check(chunk, inputs, "delta", decay, **raw_options(inputs), cu_seqlens=torch.tensor([0, 3, 20]))


@pytest.mark.parametrize("option", ["use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"])
@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_one_option_alone(decay: str, option: str) -> None:
    names = {"use_qk_l2norm_in_kernel": ("q", "k"), "use_gate_in_kernel": ("g", "A_log", "dt_bias")}
    inputs, raw = (f("delta", decay, 20, dtype=torch.float32, **SMALL) for f in (make_inputs, make_raw))
    inputs |= {name: raw[name] for name in names.get(option, ("beta",))}
    check(chunk, inputs, "delta", decay, **{option: True})


@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_write_strengths_of_nothing_and_all(decay: str) -> None:
    """0 writes nothing and still has a gradient, 1 replaces what was there, 2 reflects it."""
    inputs = make("delta", decay, 20)
    inputs["beta"] = torch.tensor([0.0, 1.0, 2.0, 0.3]).repeat(5).view(1, 20, 1)
    check(chunk, inputs, "delta", decay)


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
@pytest.mark.parametrize("form", [chunk, fused_recurrent], ids=lambda form: form.__name__)
def test_normalizer(form: checks.Form, decay: str) -> None:
    """V + 1 value columns, one of them the normaliser; dk included."""
    inputs = make("additive", decay, 40 if form is chunk else 3)
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    inputs["initial_state"] = torch.rand(1, 1, SMALL["K"], SMALL["V"] + 1, generator=torch.Generator().manual_seed(3))
    check(form, inputs, "additive", decay, normalize=True)


@pytest.mark.parametrize("used", ["o", "state"])
@kinds
def test_gradient_of_one_result(rule: str, decay: str, used: str) -> None:
    """The other result has no gradient, and there is no initial state; inputs that need no gradient get none."""
    inputs = make(rule, decay, 5)
    del inputs["initial_state"]
    for frozen in ("k", "v"):
        found = []
        for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
            leaves = {name: x.to(dtype, copy=True).requires_grad_(name != frozen) for name, x in inputs.items()}
            o, state = chunk(**leaves, rule=rule, decay=decay, output_final_state=True, backend=backend)
            assert state is not None
            (o if used == "o" else state).sin().sum().backward()
            assert leaves[frozen].grad is None
            grads = {name: x.grad for name, x in leaves.items() if name != frozen and (name, used) != ("q", "state")}
            found.append({name: x for name, x in grads.items() if x is not None})
        assert_close(*found, FLOAT32_ERROR)


@cells
@pytest.mark.usefixtures("chunk64")
def test_future_never_changes_the_past(rule: str, decay: str) -> None:
    """Around the borders of blocks of 16, of halves and of chunks; the future's gates fall deep, then the past's."""
    cuts = [1, 15, 16, 17, 31, 32, 33, 64] if decay == "channel" else [1, 31, 32, 64]
    checks.assert_causal(chunk, make(rule, decay, 70), cuts, rule, decay)
    if decay == "channel":
        checks.assert_causal(chunk, make(rule, decay, 34, gate="zero to -20"), [9, 17, 33], rule, decay, "mild")
        checks.assert_causal(chunk, make(rule, decay, 64, gate="zero to -20"), [9, 31, 33], rule, decay, "mild")


@cells
def test_split_with_carried_state(rule: str, decay: str) -> None:
    """Either form goes on from what either began, and changes no state that it was given."""
    inputs = make(rule, decay, 70)
    o, last = chunk(**inputs, rule=rule, decay=decay, output_final_state=True, backend="triton")
    joined, state = checks.split(inputs, checks.PIECES, rule=rule, decay=decay)
    assert last is not None
    assert error(joined, o) <= FLOAT32_ERROR and error(state, last) <= FLOAT32_ERROR


@kinds
def test_rows_of_a_batch_do_not_meet(rule: str, decay: str) -> None:
    checks.assert_rows_do_not_meet(chunk, make(rule, decay, 17, B=2), rule=rule, decay=decay)


def test_packed_sequences_do_not_meet() -> None:
    """With norm, gate and sigmoid in the kernels; test_chunk_gpu.py has the other cells."""
    sizes: dict[str, Any] = {"HV": 1, "cuts": packed_checks.SHORT, "options_in_kernel": (True,)}
    packed_checks.assert_recurrences_do_not_meet(chunk, "delta", "channel", torch.float32, **sizes)


@kinds
def test_strides_do_not_matter(rule: str, decay: str) -> None:
    inputs = make_raw(rule, decay, 5, dtype=torch.float32, **{**SMALL, "B": 2})
    checks.assert_strides_do_not_matter(chunk, inputs, rule=rule, decay=decay, **raw_options(inputs))


@kinds
def test_backward_twice(rule: str, decay: str) -> None:
    checks.assert_backward_twice(chunk, make(rule, decay, 33), rule=rule, decay=decay)


@pytest.mark.parametrize(
    ("rule", "decay", "use_reentrant"),
    [("delta", "channel", False), ("delta", "channel", True), ("delta", "none", False)],
)
def test_checkpointing(rule: str, decay: str, use_reentrant: bool) -> None:
    inputs = make(rule, decay, 5)
    checks.assert_checkpoint_changes_nothing(chunk, inputs, use_reentrant, True, rule=rule, decay=decay)


@pytest.mark.parametrize("form", [chunk, fused_recurrent], ids=lambda form: form.__name__)
def test_autocast_changes_nothing(form: checks.Form) -> None:
    inputs = make("delta", "channel", 5)
    options = {"rule": "delta", "decay": "channel"}

    def under_autocast(**given: Any) -> tuple[Tensor, Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            return form(**given)

    plain = checks.results(form, inputs, *checks.weights(inputs), **options)
    checks.assert_same(checks.results(under_autocast, inputs, *checks.weights(inputs), **options), plain)


@pytest.mark.parametrize(("form", "packed"), [(chunk, False), (chunk, True), (fused_recurrent, True)])
def test_compiles_without_a_graph_break(form: checks.Form, packed: bool) -> None:
    """A layer's work, its options in the kernels: forward and every gradient as in eager mode, at two lengths."""
    torch.compiler.reset()
    compiled = torch.compile(form, fullgraph=True, backend="aot_eager")
    for T in (6, 9) if packed and form is chunk else (6,):
        inputs = make_raw("delta", "channel", T, N=2 if packed else None, dtype=torch.float32, **SMALL)
        options: dict[str, Any] = {"rule": "delta", "decay": "channel", **raw_options(inputs)}
        if packed:
            options["cu_seqlens"] = torch.tensor([0, 2, T])
        d_o, _ = checks.weights(inputs)
        eager = checks.results(form, inputs, d_o, **options)
        assert_close(checks.results(compiled, inputs, d_o, **options), eager, 0.0)


@pytest.mark.parametrize(
    ("rule", "decay", "packed"), [("delta", "channel", True), ("delta", "scalar", False), ("additive", "none", False)]
)
def test_operators(rule: str, decay: str, packed: bool) -> None:
    """They mutate and alias nothing, their fakes have the shapes, strides and dtypes of the results, and autograd is
    registered."""
    bounds = torch.tensor([0, 2, 6]) if packed else None
    inputs = make_raw(rule, decay, 6, N=2 if packed else None, dtype=torch.float32, **SMALL)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    tensors = [*(inputs.get(name) for name in names), bounds]
    options = (SCALE, rule, decay, True, 1.0 if rule == "delta" else 0.0)
    ops = torch.ops.kda_lm
    for keep in (False, True):
        leaves = [None if x is None else x.clone().requires_grad_(keep and x.is_floating_point()) for x in tensors]
        torch.library.opcheck(
            ops.chunk_forward.default,
            (*leaves, *options, False, keep),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
    o, state, *saved = ops.chunk_forward(*tensors, *options, False, True)
    torch.library.opcheck(
        ops.chunk_backward.default,
        (torch.ones_like(o), torch.ones_like(state) if packed else None, *tensors, o, saved, *options),
        test_utils=("test_schema", "test_faketensor"),
    )
