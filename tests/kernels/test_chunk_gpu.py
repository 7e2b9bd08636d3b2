"""The chunkwise kernels on a GPU, against the token-by-token recurrence in float64: skipped, visibly, without one.

test_triton_interpreted.py has the small cases; here are the other dtypes, what only sizes and the compiler
can break, and every tile configuration.
"""

from typing import Any

import gpu_checks
import kernel_checks as checks
import packed_checks
import pytest
import torch
from gpu_checks import (
    BFLOAT16,
    DEVICE,
    FLOAT16,
    FLOAT32,
    KINDS,
    LIMITS,
    SIZES,
    assert_within,
    cells,
    check,
    dtypes,
    give_memory_back,  # noqa: F401 for every test here
    kinds,
    make,
    reference,
    triton,
)
from recurrence_cases import CELLS, GATED, GATES, Inputs, error, evaluate, make_inputs, make_raw, raw_options
from torch import Tensor

from kernels import chunk, fused_recurrent, resolve_backend

pytestmark = gpu_checks.required


# What "auto" is, and the other implementations


def test_auto_is_triton() -> None:
    assert resolve_backend("auto", DEVICE) == "triton"
    inputs = make("delta", "channel", 100)
    for form in (chunk, fused_recurrent):
        auto, same, other = (
            form(**inputs, rule="delta", decay="channel", backend=name)[0] for name in ("auto", "triton", "torch")
        )
        assert torch.equal(auto, same) and not torch.equal(auto, other)


def test_what_triton_does_not_take_goes_to_torch() -> None:
    wide, exact = make("delta", "channel", 3, K=257), make("delta", "channel", 3, dtype=torch.float64)
    exact = {name: x.double() for name, x in exact.items()}
    for inputs in (wide, exact):
        for form in (chunk, fused_recurrent):
            auto, other = (form(**inputs, rule="delta", decay="channel", backend=x)[0] for x in ("auto", "torch"))
            assert torch.equal(auto, other)
            with pytest.raises(ValueError, match="backend: got 'triton' for K = "):
                form(**inputs, rule="delta", decay="channel", backend="triton")


@dtypes
@pytest.mark.parametrize(("rule", "decay", "gate"), [(*cell, x) for cell in GATED for x in GATES])
def test_torch_on_the_gpu(rule: str, decay: str, gate: str, dtype: torch.dtype) -> None:
    """Float32 inside, so that only the roundings of results are left: 2⁻⁹ at most."""
    inputs = make(rule, decay, 130, dtype, gate=gate, K=32, V=48)
    out = evaluate(chunk, inputs, rule=rule, decay=decay, backend="torch")
    assert_within(out, reference(inputs, rule, decay), dtype)


# Cells, widths, lengths, gates, options


@cells
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_matches_float64(rule: str, decay: str, dtype: torch.dtype) -> None:
    check(make(rule, decay, 500, dtype), rule, decay, dtype)


WIDTHS = [(16, 16), (48, 96), (72, 72), (96, 48), (72, 128), (128, 128), (128, 256), (256, 256), (256, 64)]


@kinds
@pytest.mark.parametrize(
    ("dtype", "K", "V"),
    [*((BFLOAT16, *x) for x in WIDTHS), *((FLOAT32, *x) for x in [(40, 72), (128, 128), (256, 256)])],
    ids=str,
)
def test_widths(rule: str, decay: str, dtype: torch.dtype, K: int, V: int) -> None:
    """Against float64, and the same bits four times, with NaN in new memory: nothing beyond a head's width counts."""
    inputs = make(rule, decay, 130, dtype, K=K, V=V)
    check(inputs, rule, decay, dtype)
    first, *others = (triton(inputs, rule, decay) for _ in range(4))
    for other in others:
        checks.assert_same(other, first)


@kinds
@pytest.mark.parametrize("T", [*range(1, 9), 31, 32, 33, 63, 64, 65, 1334])
def test_lengths(rule: str, decay: str, T: int) -> None:
    """One token has four write strengths, whose error varies."""
    check(make(rule, decay, T), rule, decay, BFLOAT16, times={"dbeta": 1.3} if T == 1 else None)


@kinds
def test_a_long_sequence(rule: str, decay: str) -> None:
    """More than 65,536 tokens, in either form. In float64 torch in chunks is the reference, which in Python takes
    minutes."""
    inputs = make(rule, decay, 65_537, K=16, V=16)
    ref = reference(inputs, rule, decay, backend="torch")
    for form in (chunk, fused_recurrent):
        assert_within(triton(inputs, rule, decay, form), ref, BFLOAT16)


@pytest.mark.parametrize(
    ("rule", "decay", "dtype"), [*((*x, BFLOAT16) for x in CELLS), *((*x, FLOAT32) for x in KINDS)], ids=str
)
def test_packed(rule: str, decay: str, dtype: torch.dtype) -> None:
    """Unequal sequences, three of them empty: each of these ends in the state that it began with. Boundaries may lie on
    either device."""
    kind = torch.int32 if decay == "scalar" else torch.int64
    bounds = torch.tensor([0, 0, 37, 37, 38, 166, 500, 500], dtype=kind, device=DEVICE)
    inputs = make(rule, decay, 500, dtype, N=7)
    check(inputs, rule, decay, dtype, cu_seqlens=bounds)
    state = triton(inputs, rule, decay, cu_seqlens=bounds.cpu())["state"]
    assert torch.equal(state[[0, 2, 6]], inputs["initial_state"][[0, 2, 6]])


STRONG = [x for x in GATES if x != "mild"]


@pytest.mark.parametrize(
    ("rule", "decay", "gate", "dtype"),
    [
        *((*cell, x, dtype) for cell in GATED for x in STRONG for dtype in (BFLOAT16, FLOAT32)),
        *(("delta", decay, x, FLOAT16) for decay in ("scalar", "channel") for x in ("all -5", "some -inf")),
    ],
    ids=str,
)
def test_any_gate(rule: str, decay: str, gate: str, dtype: torch.dtype) -> None:
    """As exact as a mild one. Chunks of bfloat16 are full here, and compiled without masks."""
    check(make(rule, decay, 128 if dtype == BFLOAT16 else 130, dtype, gate=gate), rule, decay, dtype)


@pytest.mark.parametrize(
    ("rule", "decay", "dtype", "bias"),
    [
        *((*cell, BFLOAT16, True) for cell in CELLS),
        *((*cell, FLOAT32, True) for cell in KINDS),
        *(("delta", decay, BFLOAT16, False) for decay in ("none", "scalar", "channel")),
    ],
    ids=str,
)
def test_norm_gate_and_sigmoid(rule: str, decay: str, dtype: torch.dtype, bias: bool) -> None:
    """In the kernels, with the gradients of A_log and dt_bias. The gradient of a raw write strength is that of the
    strength times a factor of at most 1/4, or 1/2 where strengths reach 2."""
    T = 192 if bias else 500  # chunks that are full, and one that is not
    inputs = make_raw(rule, decay, T, bias, **SIZES)
    options = raw_options(inputs, negative=not bias)
    check(checks.placed(inputs, DEVICE, dtype), rule, decay, dtype, **options)


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
def test_long_equal_keys_reach_no_earlier_token(decay: str) -> None:
    checks.assert_long_equal_keys_reach_no_earlier_token(DEVICE, decay)


@dtypes
@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_strong_gates_made_in_the_kernel(decay: str, dtype: torch.dtype) -> None:
    """A log-decay of −1e4 has no gradient to speak of, and gives A_log none, whose own is four sums in which most
    cancels."""
    inputs = make_inputs("delta", decay, 500, **SIZES, gate="some -1e4")
    inputs["g"] = -inputs["g"]  # softplus(1e4) = 1e4
    inputs["A_log"] = torch.linspace(-1.0, 0.5, 4)
    check(checks.placed(inputs, DEVICE, dtype), "delta", decay, dtype, use_gate_in_kernel=True)


@dtypes
@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
def test_normalizer(decay: str, dtype: torch.dtype) -> None:
    """A quotient, whose two parts both have the error of an output."""
    inputs = make("additive", decay, 200, dtype)
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    z = torch.rand(1, 4, 64, 1, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    inputs["initial_state"] = torch.cat([inputs["initial_state"], z], dim=-1)
    check(inputs, "additive", decay, dtype, normalize=True)


def test_all_of_it_in_16_bits() -> None:
    """Gates, too; their gradients come back in their dtype."""
    inputs = make("delta", "channel", 200)
    inputs["g"] = inputs["g"].bfloat16()
    out = triton(inputs, "delta", "channel")
    assert out["dg"].dtype == BFLOAT16
    assert_within(out, reference(inputs, "delta", "channel"), BFLOAT16)


# Bits


@pytest.mark.parametrize(
    ("rule", "decay", "dtype"), [*((*x, BFLOAT16) for x in CELLS), *((*x, FLOAT32) for x in KINDS)], ids=str
)
def test_same_bits_every_time(rule: str, decay: str, dtype: torch.dtype) -> None:
    inputs = make(rule, decay, 300, dtype, B=8)
    gradients = checks.weights(inputs)
    first = checks.results(chunk, inputs, *gradients, rule=rule, decay=decay)
    for _ in range(19):
        checks.assert_same(checks.results(chunk, inputs, *gradients, rule=rule, decay=decay), first)


@cells
@dtypes
@pytest.mark.parametrize("form", [chunk, fused_recurrent], ids=lambda form: form.__name__)
def test_future_never_changes_the_past(form: checks.Form, rule: str, decay: str, dtype: torch.dtype) -> None:
    cuts = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 80, 96, 127, 128, 199]
    checks.assert_causal(form, make(rule, decay, 200, dtype), cuts, rule, decay)
    if decay != "none":
        checks.assert_causal(form, make(rule, decay, 192, dtype, gate="zero to -20"), cuts[:-1], rule, decay, "mild")


@kinds
@dtypes
def test_rows_of_a_batch_do_not_meet(rule: str, decay: str, dtype: torch.dtype) -> None:
    for form, T in ((chunk, 136), (fused_recurrent, 4)):  # rows that begin at multiples of 16 bytes
        checks.assert_rows_do_not_meet(form, make(rule, decay, T, dtype, B=4), rule=rule, decay=decay)


@cells
@dtypes
def test_packed_sequences_do_not_meet(rule: str, decay: str, dtype: torch.dtype) -> None:
    for form, cuts in ((chunk, packed_checks.LONG), (fused_recurrent, packed_checks.SHORT)):
        packed_checks.assert_recurrences_do_not_meet(form, rule, decay, dtype, DEVICE, cuts=cuts, K=64, V=64)


@kinds
def test_float32_is_not_asked_of_torch(rule: str, decay: str) -> None:
    """The setting that lets torch's own products be TF32 changes no bit of the kernels'."""
    inputs = make(rule, decay, 256, FLOAT32)
    exact = triton(inputs, rule, decay)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        checks.assert_same(triton(inputs, rule, decay), exact)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_within(exact, reference(inputs, rule, decay), FLOAT32)


@kinds
def test_strides_do_not_matter(rule: str, decay: str) -> None:
    inputs = checks.placed(make_raw(rule, decay, 100, **{**SIZES, "B": 2}), DEVICE, BFLOAT16)
    checks.assert_strides_do_not_matter(chunk, inputs, rule=rule, decay=decay, **raw_options(inputs))


@kinds
def test_alignment_does_not_matter(rule: str, decay: str) -> None:
    """Contiguous inputs that begin between multiples of 16 bytes, after some of the same shapes that do not."""

    def moved(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    inputs = make(rule, decay, 100)
    gradients = checks.weights(inputs)
    unaligned = {name: moved(x) for name, x in inputs.items()}
    for form in (chunk, fused_recurrent):
        first, other, again = (
            checks.results(form, x, *gradients, rule=rule, decay=decay) for x in (inputs, unaligned, inputs)
        )
        assert_within(other, first, BFLOAT16)  # sums are taken in another order
        checks.assert_same(again, first)


@kinds
def test_backward_twice(rule: str, decay: str) -> None:
    checks.assert_backward_twice(chunk, make(rule, decay, 100), rule=rule, decay=decay)


@kinds
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(rule: str, decay: str, use_reentrant: bool) -> None:
    inputs = make(rule, decay, 100)
    checks.assert_checkpoint_changes_nothing(chunk, inputs, use_reentrant, True, rule=rule, decay=decay)


@kinds
@pytest.mark.parametrize("form", [chunk, fused_recurrent], ids=lambda form: form.__name__)
def test_autocast_changes_nothing(form: checks.Form, rule: str, decay: str) -> None:
    inputs = make(rule, decay, 100, FLOAT32)
    gradients = checks.weights(inputs)
    plain = checks.results(form, inputs, *gradients, rule=rule, decay=decay)
    with torch.autocast(torch.device(DEVICE).type, BFLOAT16):
        checks.assert_same(checks.results(form, inputs, *gradients, rule=rule, decay=decay), plain)


@kinds
def test_split_with_carried_state(rule: str, decay: str) -> None:
    """Either form goes on from what either began, and changes no state that it was given."""
    pieces: list[tuple[checks.Form, int]] = [(fused_recurrent, 3), (chunk, 64), (fused_recurrent, 1), (chunk, 132)]
    for dtype in (BFLOAT16, FLOAT32):
        inputs = make(rule, decay, 200, dtype)
        o, state = checks.split(inputs, pieces, rule=rule, decay=decay)
        ref = reference(inputs, rule, decay)
        assert_within({"o": o, "state": state}, {name: ref[name] for name in ("o", "state")}, dtype)


# Sizes


@kinds
@pytest.mark.parametrize("form", [chunk, fused_recurrent], ids=lambda form: form.__name__)
def test_many_heads(form: checks.Form, rule: str, decay: str) -> None:
    """More than 65,535 heads in the batch: a grid's second and third dimensions end there."""
    inputs = make(rule, decay, 2, B=35_000, H=1, HV=2, K=16, V=16)
    out, ref = triton(inputs, rule, decay, form), reference(inputs, rule, decay)
    assert_within(out, ref, BFLOAT16)
    assert_within(
        *({name: x[-1] for name, x in results.items()} for results in (out, ref)), BFLOAT16, **dict.fromkeys(ref, 10.0)
    )


def test_many_elements() -> None:
    """More than 2³¹ elements of q: the second row, which begins beyond 2³⁰ and ends beyond 2³¹, is as it is alone.

    In one test, because the 55 GB that it takes are not there twice.
    """
    B, T, H, D = 2, 600_000, 16, 128
    assert B * T * H * D > 2**31
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 64 * 2**30:
        pytest.skip("needs 64 GiB of free memory on the GPU")
    rng = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=DEVICE, dtype=BFLOAT16)

    shared = {"q": normal(B, T, H, D), "k": normal(B, T, H, D), "v": normal(B, T, H, D), "beta": normal(B, T, H)}
    shared["A_log"] = torch.zeros(H, device=DEVICE)
    for form, decay in ((chunk, "scalar"), (chunk, "channel"), (fused_recurrent, "channel")):
        inputs = {**shared, "g": normal(B, T, H, D) if decay == "channel" else normal(B, T, H)}
        options: dict[str, Any] = {"rule": "delta", "decay": decay, "output_final_state": True, "backend": "triton"}
        options |= raw_options(inputs)
        with torch.no_grad():
            o, state = form(**inputs, **options)
            alone, last = form(**checks.rows(inputs, slice(1, 2)), **options)
        assert state is not None and last is not None
        assert torch.equal(state[1], last[0])
        for start in range(0, T, 100_000):
            at = slice(start, start + 100_000)
            assert alone[0, at].isfinite().all()
            assert torch.equal(o[1, at], alone[0, at]) and not torch.equal(o[0, at], alone[0, at])
        del inputs, o, alone


@kinds
def test_gradients_of_many_elements(rule: str, decay: str) -> None:
    """The same beyond 2³¹ elements backwards: every gradient of the second row is what it is alone."""
    B, T, H, D = 2, 600_000, 16, 128
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 125 * 2**30:
        pytest.skip("needs 125 GiB of free memory on the GPU")
    rng = torch.Generator(DEVICE).manual_seed(0)
    names = {"q": (H, D), "k": (H, D), "v": (H, D)} | ({"beta": (H,)} if rule == "delta" else {})
    names |= {} if decay == "none" else {"g": (H, D) if decay == "channel" else (H,)}
    inputs = {x: torch.randn(B, T, *y, generator=rng, device=DEVICE, dtype=BFLOAT16) for x, y in names.items()}
    if decay != "none":
        inputs["A_log"] = torch.zeros(H, device=DEVICE)
    options: dict[str, Any] = {"rule": rule, "decay": decay, "backend": "triton", **raw_options(inputs)}

    def gradients(tensors: Inputs) -> list[Tensor]:
        leaves = {name: x.detach().requires_grad_(name != "A_log") for name, x in tensors.items()}
        o, _ = chunk(**leaves, **options)
        return list(torch.autograd.grad(o, [x for x in leaves.values() if x.requires_grad], leaves["v"].detach()))

    together, alone = gradients(inputs), gradients(checks.rows(inputs, slice(1, 2)))
    for both, one in zip(together, alone, strict=True):
        for start in range(0, T, 100_000):
            at = slice(start, start + 100_000)
            assert one[0, at].isfinite().all() and torch.equal(both[1, at], one[0, at])


# Around the operators


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(
    ("rule", "decay", "packed"),
    [("delta", "channel", False), ("delta", "scalar", True), ("additive", "none", False)],
)
def test_compiles_without_a_graph_break(rule: str, decay: str, packed: bool, mode: str) -> None:
    """Two steps on different inputs: results of the first are not the second's (buffers of CUDA graphs)."""
    options: dict[str, Any] = {"rule": rule, "decay": decay, "backend": "triton", "output_final_state": True}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 50, 50, 130], device=DEVICE)

    def layer(**leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        options_of_layer = raw_options(leaves)
        return chunk(**leaves, **options, **options_of_layer)

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    steps, seeds = [], (0, 1)
    for seed in seeds:
        raw = make_raw(rule, decay, 130, **{**SIZES, "K": 128, "V": 128}, N=3 if packed else None, seed=seed)
        inputs = checks.placed(raw, DEVICE, BFLOAT16)
        d_o = checks.weights(inputs)[0].to(BFLOAT16)
        found = []
        for function in (layer, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
            o, state = function(**leaves)
            assert state is not None
            grads = torch.autograd.grad((o, state), list(leaves.values()), (d_o, torch.ones_like(state)))
            out = {"o": o, "state": state, **{f"d{name}": d for name, d in zip(leaves, grads, strict=True)}}
            found.append({name: x.detach().clone() for name, x in out.items()})
        steps.append(found)
    assert not torch.equal(steps[0][0]["o"], steps[1][0]["o"])
    for eager, out in steps:
        assert out.keys() == eager.keys()
        assert {name: error(out[name], eager[name]) for name in eager if error(out[name], eager[name]) > 1e-6} == {}


# Tiles


def tile_cases() -> list[Any]:
    """(float32, K, V, rule, decay, tiles) of the table for this GPU, and of the defaults where they are large."""
    if not torch.cuda.is_available():
        return [pytest.param(None, id="of this GPU")]
    from kernels.gpu.limits import WIDEST, capability
    from kernels.gpu.recurrence import tiles

    here = capability(torch.device("cuda"))
    cases = [(False, width, width, *kind, entry) for (sm, width, *kind), entry in tiles.TABLE.items() if sm == here]
    for width in (128, 256):
        default = tiles.HALF if width < WIDEST else tiles.HALF_256
        cases += [(False, width, width, *kind, default) for kind in KINDS]
        cases += [(True, width, width, *kind, tiles.FLOAT32) for kind in KINDS]
    return [pytest.param(case, id="-".join(str(x) for x in case[:5])) for case in cases]


@pytest.mark.parametrize("case", tile_cases())
def test_every_tile_configuration(case: tuple[bool, int, int, str, str, Any]) -> None:
    """Against float64, and the same bits twenty times."""
    from kernels.gpu.recurrence.tiles import forced

    float32, K, V, rule, decay, tiles = case
    dtype = FLOAT32 if float32 else BFLOAT16
    for T in (300, 320):  # the last chunk ends early, or is full like the others: compiled without masks
        inputs = make(rule, decay, T, dtype, K=K, V=V)
        with forced(tiles):
            first, *others = (triton(inputs, rule, decay) for _ in range(20))
        for other in others:
            checks.assert_same(other, first)
        assert_within(first, reference(inputs, rule, decay), dtype)
