"""reference × chunk × recurrent, over the six cells: forward, every gradient, every way to cut the sequence."""

import kernel_checks as checks
import pytest
import torch
import torch.nn.functional as F
from recurrence_cases import (
    BFLOAT16_ERROR,
    CELLS,
    FLOAT32_ERROR,
    FLOAT64_ERROR,
    GATED,
    GATES,
    assert_close,
    error,
    evaluate,
    make_inputs,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernels
from kernels import chunk, fused_recurrent

FORMS = [chunk, fused_recurrent]
cells = pytest.mark.parametrize(("rule", "decay"), CELLS)
gated = pytest.mark.parametrize(("rule", "decay"), GATED)
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


@cells
@pytest.mark.parametrize("T", [1, 2, 3, 7, 8, 63, 64, 65, 130])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_forms_agree(rule: str, decay: str, T: int, packed: bool) -> None:
    """Grouped value heads, K ≠ V, neither a power of two; packed sequences are unequal, three of them empty."""
    options: dict[str, object] = {"rule": rule, "decay": decay, "scale": 0.37}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 0, T // 3, T // 3, T, T])
        inputs = make_inputs(rule, decay, T, B=1, N=5)
    else:
        inputs = make_inputs(rule, decay, T)
    ref = evaluate(chunk, inputs, backend="reference", **options)
    for form in FORMS:
        assert_close(evaluate(form, inputs, backend="torch", **options), ref, FLOAT64_ERROR)


@gated
@pytest.mark.parametrize("gate", GATES)
def test_any_gate_in_float32(rule: str, decay: str, gate: str) -> None:
    """The strongest decay is as accurate as the mildest, gradients included, and nothing is ever NaN."""
    inputs = make_inputs(rule, decay, 130, K=16, V=16, gate=gate, dtype=torch.float32)
    exact = {name: x.double() for name, x in inputs.items()}
    ref = evaluate(chunk, exact, rule=rule, decay=decay, backend="reference")
    for form, backend in ((chunk, "torch"), (fused_recurrent, "torch"), (chunk, "reference")):
        assert_close(evaluate(form, inputs, rule=rule, decay=decay, backend=backend), ref, FLOAT32_ERROR)


@pytest.mark.parametrize("rule", ["additive", "delta"])
def test_without_decay_in_float32(rule: str) -> None:
    inputs = make_inputs(rule, "none", 130, K=16, V=16, dtype=torch.float32)
    exact = {name: x.double() for name, x in inputs.items()}
    ref = evaluate(chunk, exact, rule=rule, decay="none", backend="reference")
    for form in FORMS:
        assert_close(evaluate(form, inputs, rule=rule, decay="none"), ref, FLOAT32_ERROR)


@cells
def test_packed_sequences_of_one_length(rule: str, decay: str) -> None:
    inputs = make_inputs(rule, decay, 12, B=1, N=4)
    options = {"rule": rule, "decay": decay, "cu_seqlens": torch.tensor([0, 3, 6, 9, 12])}
    ref = evaluate(chunk, inputs, backend="reference", **options)
    for form in FORMS:
        assert_close(evaluate(form, inputs, **options), ref, FLOAT64_ERROR)


@cells
@pytest.mark.parametrize("cuts", [[1], [63], [64], [200], [5, 69, 133]], ids=str)
def test_split_with_carried_state(rule: str, decay: str, cuts: list[int]) -> None:
    """Any form may continue what any form began."""
    inputs = make_inputs(rule, decay, 230)
    state = inputs.pop("initial_state")
    o, last = chunk(**inputs, rule=rule, decay=decay, initial_state=state, output_final_state=True)
    for begin, resume in ((chunk, chunk), (chunk, fused_recurrent), (fused_recurrent, chunk)):
        carried, outputs = state, []
        for part, (start, end) in enumerate(zip([0, *cuts], [*cuts, 230], strict=True)):
            form = begin if part == 0 else resume
            piece = {name: x[:, start:end] for name, x in inputs.items()}
            output, after = form(**piece, rule=rule, decay=decay, initial_state=carried, output_final_state=True)
            assert after is not None
            carried = after
            outputs.append(output)
        assert error(torch.cat(outputs, dim=1), o) <= FLOAT64_ERROR
        assert last is not None
        assert error(carried, last) <= FLOAT64_ERROR


@cells
@forms
def test_future_never_changes_the_past(form: kernels.ops.Function, rule: str, decay: str) -> None:
    """Bit for bit: neither values nor rounding of later tokens, gates included, reach an earlier output."""
    inputs = make_inputs(rule, decay, 100, K=16, V=16, dtype=torch.float32)
    other = make_inputs(rule, decay, 100, K=16, V=16, gate="zero to -20", dtype=torch.float32, seed=1)
    state = inputs.pop("initial_state")
    o, _ = form(**inputs, rule=rule, decay=decay, initial_state=state)
    for t in (1, 15, 16, 31, 32, 33, 50, 64, 99):
        mixed = {name: torch.cat([x[:, :t], other[name][:, t:]], dim=1) for name, x in inputs.items()}
        changed, _ = form(**mixed, rule=rule, decay=decay, initial_state=state)
        assert torch.equal(changed[:, :t], o[:, :t])
        assert not torch.equal(changed[:, t:], o[:, t:])


@cells
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, FLOAT32_ERROR), (torch.bfloat16, BFLOAT16_ERROR)], ids=str
)
def test_rows_of_a_batch_do_not_meet(rule: str, decay: str, dtype: torch.dtype, limit: float) -> None:
    """Eight copies are one another to the bit, and the row alone but for rounding; gradients included."""
    inputs = checks.placed(make_inputs(rule, decay, 70, B=1, K=16, V=16), "cpu", dtype)
    copies = {name: x.repeat(8, *[1] * (x.dim() - 1)) for name, x in inputs.items()}
    for form, T in ((chunk, 70), (fused_recurrent, 5)):
        alone, together = (
            checks.results(form, x, *checks.weights(x), rule=rule, decay=decay, backend="torch")
            for x in (checks.at(inputs, slice(T)), checks.at(copies, slice(T)))
        )
        for name, x in together.items():
            assert torch.equal(x, x[:1].expand_as(x)), name
            assert error(x[:1], alone[name]) <= limit, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rule", "decay", "normalize"), [*((*cell, False) for cell in CELLS), ("additive", "none", True)]
)
def test_long_decoding(rule: str, decay: str, normalize: bool, dtype: torch.dtype) -> None:
    """test_recurrent_gpu.py has 8,000 steps."""
    checks.assert_long_decoding(500, dtype, "cpu", "torch", rule, decay, normalize, BFLOAT16_ERROR)


@cells
@forms
@pytest.mark.parametrize("scale", [1.0, 5**-0.5, 0.37])
def test_scale_is_applied_once(form: kernels.ops.Function, rule: str, decay: str, scale: float) -> None:
    """Against a scale of 1 with the query scaled beforehand: o, dq, dk, dv and the rest."""
    inputs = make_inputs(rule, decay, 40)
    by_hand = evaluate(
        lambda q, **rest: form(scale * q, **rest, rule=rule, decay=decay, scale=1.0, backend="reference"), inputs
    )
    assert_close(evaluate(form, inputs, rule=rule, decay=decay, scale=scale), by_hand, FLOAT64_ERROR)
    if scale == 5**-0.5:
        assert_close(evaluate(form, inputs, rule=rule, decay=decay), by_hand, FLOAT64_ERROR)


@cells
@forms
def test_grouped_heads_equal_explicit_repeat(form: kernels.ops.Function, rule: str, decay: str) -> None:
    inputs = make_inputs(rule, decay, 40, H=2, HV=6)

    def repeated(q: Tensor, k: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k = (x.repeat_interleave(3, dim=2) for x in (q, k))
        return form(q, k, **rest, rule=rule, decay=decay)

    assert_close(evaluate(form, inputs, rule=rule, decay=decay), evaluate(repeated, inputs), FLOAT64_ERROR)


@pytest.mark.parametrize("decay", ["scalar", "channel"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("negative", [False, True])
@forms
def test_gate_norm_and_sigmoid_in_kernel(form: kernels.ops.Function, decay: str, biased: bool, negative: bool) -> None:
    """Against the same formulas in front of the reference, gradients of A_log, dt_bias and raw g included."""
    inputs = make_inputs("delta", decay, 40)
    HV, K = inputs["v"].shape[2], inputs["q"].shape[3]
    rng = torch.Generator().manual_seed(2)
    for name in ("q", "k", "g", "beta"):
        inputs[name] = torch.randn(inputs[name].shape, generator=rng, dtype=torch.float64)
    inputs["A_log"] = torch.rand(HV, generator=rng, dtype=torch.float64)
    if biased:
        inputs["dt_bias"] = torch.randn(HV * K if decay == "channel" else HV, generator=rng, dtype=torch.float64)

    def by_hand(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, **rest: Tensor) -> tuple:
        bias = rest.pop("dt_bias").view(g.shape[2:]) if biased else 0.0
        rate = A_log.exp() if decay == "scalar" else A_log.exp()[:, None]
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        g = -rate * F.softplus(g + bias)
        beta = (2 if negative else 1) * torch.sigmoid(beta)
        return form(q, k, g=g, beta=beta, **rest, rule="delta", decay=decay, backend="reference")

    out = evaluate(
        form,
        inputs,
        rule="delta",
        decay=decay,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=negative,
    )
    assert_close(out, evaluate(by_hand, inputs), FLOAT64_ERROR)


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
@forms
def test_normalizer(form: kernels.ops.Function, decay: str) -> None:
    """o = Sᵀq / (zᵀq + 1e-10) with z carried as one more value column; dk included, whatever the scale."""
    inputs = make_inputs("additive", decay, 40)
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    state = torch.rand(2, 2, 5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    inputs["initial_state"] = state

    def by_hand(v: Tensor, initial_state: Tensor, **rest: Tensor | bool) -> tuple[Tensor, Tensor]:
        options = {"rule": "additive", "decay": decay, "scale": 1.0, "backend": "reference"}
        o, s = form(v=v, initial_state=initial_state[..., :3], **rest, **options)
        norm, z = form(v=torch.ones_like(v[..., :1]), initial_state=initial_state[..., 3:], **rest, **options)
        return o / (norm + 1e-10), torch.cat([s, z], dim=-1)

    ref = evaluate(by_hand, inputs)
    for scale in (None, 0.37):
        out = evaluate(form, inputs, rule="additive", decay=decay, normalize=True, scale=scale)
        assert_close(out, ref, FLOAT64_ERROR)


def test_normalized_linear_attention_is_an_average() -> None:
    """o_t = Σ_{s ≤ t} (q_t·k_s) v_s / Σ_{s ≤ t} q_t·k_s, and token by token it is the same."""
    inputs = make_inputs("additive", "none", 40, H=2)
    q, k, v = inputs["q"].abs(), inputs["k"].abs(), inputs["v"]
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril()
    ref = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v)
    assert error(kernels.chunk_linear_attn(q, k, v)[0], ref) <= 1e-9  # 1e-10 in the denominator
    state: Tensor | None = None
    for t in range(40):
        at = slice(t, t + 1)
        o, state = kernels.fused_recurrent_linear_attn(q[:, at], k[:, at], v[:, at], None, state, True)
        assert error(o, ref[:, at]) <= 1e-9


@cells
@forms
def test_states_belong_to_the_caller(form: kernels.ops.Function, rule: str, decay: str) -> None:
    """Decoding twice from one saved state gives one answer and leaves the state as it was."""
    for T in (1, 5):
        inputs = make_inputs(rule, decay, T, dtype=torch.float32)
        saved = inputs["initial_state"].clone()
        with torch.no_grad():
            first = form(**inputs, rule=rule, decay=decay, output_final_state=True)
            second = form(**inputs, rule=rule, decay=decay, output_final_state=True)
        assert torch.equal(inputs["initial_state"], saved)
        for a, b in zip(first, second, strict=True):
            assert a is not None and b is not None
            assert torch.equal(a, b)
            assert a.data_ptr() != b.data_ptr()
        assert first[1] is not None
        assert first[1].dtype == torch.float32 and first[1].shape == saved.shape
        assert form(**inputs, rule=rule, decay=decay)[1] is None


@cells
@forms
def test_inputs_need_not_be_contiguous(form: kernels.ops.Function, rule: str, decay: str) -> None:
    inputs = make_inputs(rule, decay, 40, H=2)
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in strided.values())
    o, _ = form(**inputs, rule=rule, decay=decay)
    assert torch.equal(form(**strided, rule=rule, decay=decay)[0], o)


@cells
@forms
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(form: kernels.ops.Function, rule: str, decay: str, autocast: bool) -> None:
    """Rounded inputs, but float32 inside, whatever autocast asks for: o has v's dtype, the state is float32."""
    inputs = make_inputs(rule, decay, 130, K=16, V=16, dtype=torch.bfloat16)
    inputs["initial_state"] = inputs["initial_state"].float()
    exact = {name: x.double() for name, x in inputs.items()}
    ref = evaluate(chunk, exact, rule=rule, decay=decay, backend="reference")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        o, state = form(**inputs, rule=rule, decay=decay, output_final_state=True)
        single, _ = form(**{name: x.float() for name, x in inputs.items()}, rule=rule, decay=decay)
    assert o.dtype == torch.bfloat16 and error(o, ref["o"]) <= BFLOAT16_ERROR
    assert state is not None
    assert state.dtype == torch.float32 and error(state, ref["state"]) <= FLOAT32_ERROR
    assert single.dtype == torch.float32 and error(single, ref["o"]) <= FLOAT32_ERROR


@cells
def test_checkpointing_changes_no_gradient(rule: str, decay: str) -> None:
    inputs = make_inputs(rule, decay, 40)
    plain = evaluate(chunk, inputs, rule=rule, decay=decay)
    again = evaluate(
        lambda **leaves: checkpoint(lambda: chunk(**leaves, rule=rule, decay=decay), use_reentrant=False), inputs
    )
    assert_close(again, plain, 0.0)


@cells
@forms
def test_compiles_without_a_graph_break(form: kernels.ops.Function, rule: str, decay: str) -> None:
    inputs = make_inputs(rule, decay, 40 if form is chunk else 2)
    torch.compiler.reset()
    compiled = torch.compile(form, fullgraph=True, backend="aot_eager")
    eager = evaluate(form, inputs, rule=rule, decay=decay)
    assert_close(evaluate(compiled, inputs, rule=rule, decay=decay), eager, FLOAT64_ERROR)


@pytest.mark.parametrize(
    ("name", "rule", "decay"),
    [
        ("linear_attn", "additive", "none"),
        ("simple_gla", "additive", "scalar"),
        ("gla", "additive", "channel"),
        ("delta_rule", "delta", "none"),
        ("gated_delta_rule", "delta", "scalar"),
        ("kda", "delta", "channel"),
    ],
)
@forms
def test_names_pin_rule_and_decay(form: kernels.ops.Function, name: str, rule: str, decay: str) -> None:
    """Positional order: q, k, v, then g and beta where the cell has them, scale, state, output_final_state."""
    function = getattr(kernels, f"{form.__name__}_{name}")
    assert function.__name__ == f"{form.__name__}_{name}" and function.__name__ in kernels.__all__
    inputs = make_inputs(rule, decay, 9)
    state = inputs.pop("initial_state")
    positional = [inputs[x] for x in ("q", "k", "v", "g", "beta") if x in inputs]
    plain = {"normalize": False} if name == "linear_attn" else {}
    o, last = function(*positional, 0.37, state, True, **plain)
    options = {"rule": rule, "decay": decay, "scale": 0.37, "output_final_state": True}
    ref_o, ref_last = form(**inputs, **options, initial_state=state)
    assert torch.equal(o, ref_o) and torch.equal(last, ref_last)


# Identities of the mathematics


@forms
def test_no_decay_turns_gated_deltanet_into_deltanet(form: kernels.ops.Function) -> None:
    inputs = make_inputs("delta", "none", 70)
    zero = torch.zeros_like(inputs["beta"])
    deltanet, _ = form(**inputs, rule="delta", decay="none")
    assert error(form(**inputs, g=zero, rule="delta", decay="scalar")[0], deltanet) <= FLOAT64_ERROR


@forms
def test_equal_channels_turn_kda_into_gated_deltanet(form: kernels.ops.Function) -> None:
    inputs = make_inputs("delta", "scalar", 70)
    gated_deltanet, _ = form(**inputs, rule="delta", decay="scalar")
    inputs["g"] = inputs["g"].unsqueeze(3).expand(-1, -1, -1, 5)
    assert error(form(**inputs, rule="delta", decay="channel")[0], gated_deltanet) <= FLOAT64_ERROR


@forms
@pytest.mark.parametrize("T", [1, 40])
def test_a_full_write_reads_back(form: kernels.ops.Function, T: int) -> None:
    """β = 1 and a unit key read back exactly the value, whatever was there before."""
    inputs = make_inputs("delta", "channel", T, H=2)
    inputs["beta"] = torch.ones_like(inputs["beta"])
    inputs["q"] = inputs["k"]
    o, _ = form(**inputs, rule="delta", decay="channel", scale=1.0)
    assert error(o, inputs["v"]) <= FLOAT64_ERROR


@forms
def test_writing_twice(form: kernels.ops.Function) -> None:
    """One key, one value, two writes: addition returns 2v, assignment v."""
    inputs = make_inputs("additive", "none", 1, H=2)
    q = k = inputs["k"].expand(-1, 2, -1, -1)
    v = inputs["v"].expand(-1, 2, -1, -1)
    added, _ = form(q, k, v, rule="additive", decay="none", scale=1.0)
    assigned, _ = form(q, k, v, beta=torch.ones(2, 2, 2, dtype=v.dtype), rule="delta", decay="none", scale=1.0)
    assert error(added[:, 1], 2 * v[:, 1]) <= FLOAT64_ERROR
    assert error(assigned[:, 1], v[:, 1]) <= FLOAT64_ERROR


@forms
@pytest.mark.parametrize("rule", ["additive", "delta"])
def test_orthogonal_query_misses_the_write(form: kernels.ops.Function, rule: str) -> None:
    inputs = make_inputs(rule, "none", 1, H=2)
    q, k = inputs["q"], inputs["k"]
    q = q - (q * k).sum(-1, keepdim=True) * k
    inputs["q"] = q
    before = torch.einsum("bhkv,bthk->bthv", inputs["initial_state"], q)
    assert error(form(**inputs, rule=rule, decay="none", scale=1.0)[0], before) <= FLOAT64_ERROR


@gated
@forms
@pytest.mark.parametrize("t", [1, 31, 32, 50])
def test_minus_infinity_starts_afresh(form: kernels.ops.Function, rule: str, decay: str, t: int) -> None:
    inputs = make_inputs(rule, decay, 70)
    inputs["g"][:, t] = float("-inf")
    o, last = form(**inputs, rule=rule, decay=decay, output_final_state=True)
    later = {name: x[:, t:] for name, x in inputs.items() if name != "initial_state"}
    fresh, fresh_last = form(**later, rule=rule, decay=decay, output_final_state=True)
    assert last is not None and fresh_last is not None
    assert error(o[:, t:], fresh) <= FLOAT64_ERROR
    assert error(last, fresh_last) <= FLOAT64_ERROR
