"""The Triton kernels around the recurrence in Triton's interpreter: short convolution, norms, SwiGLU, loss.

See interpreter.py. test_fused_gpu.py has the real compiler, other dtypes and sizes.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import interpreter
import pytest
import torch
from recurrence_cases import BFLOAT16_ERROR, FLOAT32_ERROR, error
from torch.utils.checkpoint import checkpoint

interpreter.required()

import bfloat16  # noqa: E402
import fused_checks as checks  # noqa: E402
import packed_checks  # noqa: E402

from kernels import (  # noqa: E402
    add_rms_norm,
    gated_rms_norm,
    linear_cross_entropy,
    rms_norm,
    short_convolution,
    swiglu,
)
from kernels.gpu import cross_entropy, short_conv  # noqa: E402

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
LIMITS = {FLOAT32: FLOAT32_ERROR, BFLOAT16: BFLOAT16_ERROR}

dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=str)


@pytest.fixture(autouse=True)
def nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a kernel reads before something has written it becomes NaN."""
    bfloat16.install(monkeypatch)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# The short convolution


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for few tokens; those of the backward have steps with and without masks, up to four taps."""
    monkeypatch.setattr(short_conv, "FORWARD_ROWS", 8)
    monkeypatch.setattr(short_conv, "BACKWARD_ROWS", 8)
    monkeypatch.setattr(short_conv, "FEWEST_ROWS", 8)
    monkeypatch.setattr(short_conv, "UNROLL", 2)


@dtypes
@pytest.mark.parametrize(
    ("T", "W", "given"),
    [(1, 1, {"bias"}), (1, 4, {"initial_state"}), (2, 4, set()), (11, 4, {"bias", "initial_state"}), (9, 8, {"bias"})],
)
@pytest.mark.usefixtures("short_segments")
def test_conv_matches_float64(dtype: torch.dtype, T: int, W: int, given: set[str]) -> None:
    """Two blocks of channels, the last not full; fewer tokens than taps; several segments."""
    inputs = checks.conv_inputs(2, T, 130 if T == 2 else 5, W, given)
    checks.assert_conv(inputs, dtype, LIMITS[dtype], activation="silu" if T != 9 else None)


@pytest.mark.parametrize(("W", "dtype"), [(1, torch.int32), (3, torch.int64), (4, torch.int32)], ids=str)
@pytest.mark.usefixtures("short_segments")
def test_conv_packed(W: int, dtype: torch.dtype) -> None:
    """Sequences that are empty, shorter than the window, end within a segment or with it."""
    for bounds in ([0, 0, 2, 3, 3, 8, 13, 13], [0, 7, 9, 13]):
        cu_seqlens = torch.tensor(bounds, dtype=dtype)
        inputs = checks.conv_inputs(1, 13, 5, W, {"bias", "initial_state"}, N=len(bounds) - 1)
        checks.assert_conv(inputs, FLOAT32, LIMITS[FLOAT32], activation="silu", cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("sizes", "dtype"), [([33, 1, 70], FLOAT32), ([40, 130], FLOAT32), ([32, 32, 64], BFLOAT16)], ids=str
)
@pytest.mark.usefixtures("short_segments")
def test_conv_in_parts(sizes: list[int], dtype: torch.dtype) -> None:
    """Of whole blocks of channels, and of parts that end within a block."""
    inputs = checks.conv_inputs(1, 11, sum(sizes), 4, {"bias", "initial_state"})
    checks.assert_conv(inputs, dtype, LIMITS[dtype], activation="silu", sizes=sizes)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    checks.assert_conv_parts(inputs, sizes, activation="silu")


@pytest.mark.usefixtures("short_segments")
def test_conv_packed_in_parts() -> None:
    bounds = [0, 0, 2, 3, 3, 8, 13, 13]
    inputs = checks.conv_inputs(1, 13, 12, 3, {"bias", "initial_state"}, FLOAT32, N=len(bounds) - 1)
    options = {"sizes": [2, 7, 3], "cu_seqlens": torch.tensor(bounds)}
    checks.assert_conv(inputs, FLOAT32, LIMITS[FLOAT32], **options)
    checks.assert_conv_parts(inputs, **options)


@pytest.mark.usefixtures("short_segments")
def test_conv_sequences_alone_are_the_same_bits() -> None:
    """Rows of a batch, packed sequences, and pieces with the state carried."""
    inputs = checks.conv_inputs(2, 10, 5, 3, {"bias", "initial_state"}, FLOAT32)
    checks.assert_conv_rows_alone(inputs)
    x, weight = inputs["x"], inputs["weight"]
    whole, last = short_convolution(x, weight, activation="silu", output_final_state=True, backend="triton")
    state, pieces = None, []
    for start, end in pairwise([0, 1, 2, 5, 10]):
        y, state = short_convolution(
            x[:, start:end], weight, None, "silu", state, output_final_state=True, backend="triton"
        )
        pieces.append(y)
    assert last is not None and state is not None
    assert torch.equal(torch.cat(pieces, dim=1), whole) and torch.equal(state, last)


@pytest.mark.usefixtures("short_segments")
def test_conv_packed_sequences_do_not_meet() -> None:
    packed_checks.assert_convolutions_do_not_meet(FLOAT32, cuts=packed_checks.SHORT)


@pytest.mark.usefixtures("short_segments")
def test_conv_takes_any_strides() -> None:
    inputs = checks.conv_inputs(2, 5, 6, 3, {"bias", "initial_state"}, FLOAT32)
    checks.assert_conv_strides(inputs)
    checks.assert_conv_strides(inputs, sizes=[1, 3, 2])


@pytest.mark.parametrize(
    ("sizes", "used", "compiler"),
    [
        (None, [0], None),
        (None, [1], None),
        ([1, 3], [1], None),
        ([1, 2, 1], [0, 2, 3], None),
        ([1, 2, 1], [1], "aot_eager"),
        ([2, 1, 1], [3], "aot_eager"),
    ],
)
def test_conv_backward_of_some_results(sizes: list[int] | None, used: list[int], compiler: str | None) -> None:
    inputs = checks.conv_inputs(1, 5, 4, 4, {"initial_state"}, FLOAT32)
    checks.assert_conv_some_results(inputs, used, compiler, sizes=sizes)


@pytest.mark.parametrize("T", [1, 2, 3, 8, 11])
@pytest.mark.usefixtures("short_segments")
def test_conv_in_place_in_parts(T: int) -> None:
    """By one program or, of more than 8 tokens, several."""
    checks.assert_conv_in_place(checks.conv_inputs(2, T, 6, 4, {"bias", "initial_state"}, FLOAT32), [1, 2, 3])


def test_conv_mixed_dtypes() -> None:
    """Weights in float32 beside inputs in bfloat16: each gradient has its tensor's dtype."""
    inputs = checks.conv_inputs(1, 7, 5, 4, {"bias"}, FLOAT32)
    inputs["x"] = inputs["x"].bfloat16()
    out = checks.conv(inputs, "triton", activation="silu")
    ref = checks.conv({name: x.double() for name, x in inputs.items()}, "torch", activation="silu")
    assert out["dweight"].dtype == out["dbias"].dtype == FLOAT32 and out["y"].dtype == out["dx"].dtype == BFLOAT16
    assert error(out["dweight"], ref["dweight"]) <= 1e-6 and error(out["dbias"], ref["dbias"]) <= 1e-6


def test_conv_leaves_float64_to_torch() -> None:
    inputs = checks.conv_inputs(1, 3, 5, 4, set())
    with pytest.raises(ValueError, match=r"backend: got 'triton' for torch.float64.*'torch'"):
        short_convolution(**inputs, backend="triton")
    assert torch.equal(short_convolution(**inputs)[0], short_convolution(**inputs, backend="torch")[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [[4], [1, 2, 1]])
def test_conv_operator(packed: bool, sizes: list[int]) -> None:
    inputs = checks.conv_inputs(1, 5, 4, 3, {"bias", "initial_state"}, FLOAT32, N=2 if packed else 1)
    cu_seqlens = torch.tensor([0, 2, 5]) if packed else None
    leaves = [x.requires_grad_() for x in inputs.values()]
    torch.library.opcheck(
        torch.ops.kda_lm.short_conv_forward.default,
        (*leaves, cu_seqlens, sizes, True, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    d_parts, d_final = [torch.randn(1, 5, size) for size in sizes], torch.randn_like(inputs["initial_state"])
    torch.library.opcheck(
        torch.ops.kda_lm.short_conv_backward.default,
        (d_parts, d_final, *(x.detach() for x in leaves), cu_seqlens, True),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_conv_compiles_without_graph_breaks() -> None:
    inputs = checks.conv_inputs(2, 5, 4, 4, {"initial_state"}, FLOAT32)
    for sizes in (None, [1, 2, 1]):
        out = checks.conv(inputs, "triton", compiler="aot_eager", sizes=sizes)
        checks.assert_same(out, checks.conv(inputs, "triton", sizes=sizes))


# Norms


@dtypes
@pytest.mark.parametrize(
    ("shape", "gated", "weighted"),
    [((3, 5, 2, 20), True, True), ((7, 5000), True, True), ((9, 1), False, True), ((130, 64), True, False)],
)
def test_norm_matches_float64(dtype: torch.dtype, shape: tuple[int, ...], gated: bool, weighted: bool) -> None:
    """Many short rows in a program or a long one; more of them than programs."""
    inputs = checks.norm_inputs(*shape, gated=gated, weighted=weighted)
    for activation in ("sigmoid", "silu") if gated else (None,):
        checks.assert_norm(inputs, dtype, LIMITS[dtype], **({"activation": activation} if activation else {}))


def test_norm_rows_alone_are_the_same_bits() -> None:
    checks.assert_norm_rows_alone(checks.norm_inputs(3, 5, 20, dtype=FLOAT32))


def test_norm_takes_any_strides() -> None:
    checks.assert_norm_strides(checks.norm_inputs(3, 5, 20, dtype=FLOAT32))


def test_norm_weights_in_float32() -> None:
    """Beside a bfloat16 x: their gradient is not rounded."""
    inputs = checks.norm_inputs(6, 20, dtype=BFLOAT16)
    inputs["weight"] = inputs["weight"].float()
    out = checks.norm(inputs, "triton")
    ref = checks.norm({name: x.double() for name, x in inputs.items()}, "torch")
    assert out["y"].dtype == BFLOAT16 and out["dweight"].dtype == FLOAT32
    assert error(out["dweight"], ref["dweight"]) <= FLOAT32_ERROR


def test_norm_rounds_what_it_returns_and_not_what_it_keeps() -> None:
    """A float32 stream normalised for products in bfloat16: its gradient is float32."""
    inputs = checks.norm_inputs(6, 20, gated=False, dtype=FLOAT32)
    out = checks.norm(inputs, "triton", dtype=BFLOAT16)
    checks.assert_same(out, checks.norm(inputs, "triton", "aot_eager", dtype=BFLOAT16))
    ref = checks.norm(inputs, "torch", dtype=BFLOAT16)
    assert out["y"].dtype == ref["y"].dtype == BFLOAT16 and out["dx"].dtype == FLOAT32
    assert error(out["y"], ref["y"].double()) <= LIMITS[BFLOAT16]
    assert error(out["dx"], ref["dx"].double()) <= FLOAT32_ERROR


@dtypes
@pytest.mark.parametrize("shape", [(3, 5, 2, 20), (7, 5000), (9, 1), (130, 64)])
def test_norm_of_a_sum_matches_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    checks.assert_norm(checks.norm_inputs(*shape, added=True, gated=False), dtype, LIMITS[dtype])


@pytest.mark.parametrize(
    ("x_dtype", "y_dtype", "dtype"),
    [
        (FLOAT32, BFLOAT16, BFLOAT16),  # a residual stream under autocast
        (FLOAT32, BFLOAT16, None),
        (BFLOAT16, FLOAT32, BFLOAT16),
        (BFLOAT16, BFLOAT16, None),
        (torch.float16, BFLOAT16, None),  # whose sum is float32
        (FLOAT32, FLOAT32, None),
    ],
    ids=str,
)
def test_norm_of_a_sum_is_the_sum_and_its_norm(
    x_dtype: torch.dtype, y_dtype: torch.dtype, dtype: torch.dtype | None
) -> None:
    """Any dtypes, which gradients have, too; under a compiler as without."""
    inputs = checks.norm_inputs(6, 20, added=True, gated=False, dtype=FLOAT32)
    inputs["x"], inputs["y"] = inputs["x"].to(x_dtype), inputs["y"].to(y_dtype)
    narrow = FLOAT32 if x_dtype == y_dtype == FLOAT32 else BFLOAT16
    checks.assert_sum_and_norm_apart(inputs, LIMITS[narrow], dtype=dtype)
    eager, compiled = (checks.norm(inputs, "triton", compiler, dtype=dtype) for compiler in (None, "aot_eager"))
    checks.assert_same(compiled, eager)


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_norm_of_a_sum_with_one_gradient(compiler: str | None) -> None:
    inputs = checks.norm_inputs(6, 20, added=True, gated=False, dtype=FLOAT32)
    checks.assert_either_gradient(inputs, FLOAT32_ERROR, compiler)
    mixed = {**inputs, "y": inputs["y"].bfloat16()}
    checks.assert_either_gradient(mixed, LIMITS[BFLOAT16], compiler)


def test_norm_of_a_sum_with_one_gradient_for_both() -> None:
    checks.assert_gradients_are_apart(checks.norm_inputs(6, 20, added=True, gated=False, dtype=FLOAT32))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_norm_of_a_sum_checkpointed(use_reentrant: bool) -> None:
    """Which gives each saved tensor away once."""
    inputs = checks.norm_inputs(6, 20, added=True, gated=False, dtype=FLOAT32)

    def gradients(call: Any, **options: Any) -> list[torch.Tensor | None]:
        leaves = list(checks.leaves_of(inputs).values())
        torch.autograd.backward(tuple(x.square().sum() for x in call(*leaves, **options)))
        return [x.grad for x in leaves]

    plain = gradients(add_rms_norm)
    again = gradients(partial(checkpoint, add_rms_norm), use_reentrant=use_reentrant)
    assert all(a is not None and torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_norm_of_a_sum_takes_any_strides() -> None:
    checks.assert_norm_strides(checks.norm_inputs(3, 5, 20, added=True, gated=False, dtype=FLOAT32))


def test_norm_of_nothing_and_what_it_leaves_to_torch() -> None:
    assert rms_norm(torch.zeros(0, 4), torch.ones(4), backend="triton").shape == (0, 4)
    assert [x.shape for x in add_rms_norm(*torch.zeros(2, 0, 4), torch.ones(4), backend="triton")] == [(0, 4)] * 2
    for x, y in ((torch.ones(2, 8193), torch.ones(2, 8193)), (torch.ones(2, 4), torch.ones(2, 4).double())):
        weight = torch.ones(x.shape[1])
        with pytest.raises(ValueError, match=r"backend: got 'triton' for N = .*accepted: N ≤ 8192 in 16.*'torch'"):
            add_rms_norm(x, y, weight, backend="triton")
        found, wanted = add_rms_norm(x, y, weight), add_rms_norm(x, y, weight, backend="torch")
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for x in (torch.ones(2, 8193), torch.ones(2, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"backend: got 'triton' for N = .*accepted: N ≤ 8192 in 16.*'torch'"):
            gated_rms_norm(x, x, backend="triton")
        with pytest.raises(ValueError, match=r"backend: got 'triton' for N = "):
            rms_norm(x, torch.ones(x.shape[1]), backend="triton")
        assert torch.equal(gated_rms_norm(x, x), gated_rms_norm(x, x, backend="torch"))


@pytest.mark.parametrize("kind", ["plain", "gated", "of a sum", "of a sum in two dtypes"])
def test_norm_operator(kind: str) -> None:
    inputs = checks.norm_inputs(2, 3, 20, added="sum" in kind, gated=kind == "gated", dtype=FLOAT32)
    if "two" in kind:
        inputs["y"] = inputs["y"].bfloat16()
    tensors = [inputs[name].requires_grad_() if name in inputs else None for name in ("x", "y", "gate", "weight")]
    torch.library.opcheck(
        torch.ops.kda_lm.norm_forward.default,
        (*tensors, 1e-6, True, BFLOAT16, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    x, y, *others = [None if x is None else x.detach() for x in tensors]
    d_total = None if y is None else torch.ones(2, 3, 20)
    y_dtype = None if y is None else y.dtype
    torch.library.opcheck(
        torch.ops.kda_lm.norm_backward.default,
        (torch.ones(2, 3, 20), d_total, x, *others, torch.ones(2, 3), True, FLOAT32, y_dtype),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_norm_compiles_without_graph_breaks() -> None:
    inputs = checks.norm_inputs(2, 3, 20, dtype=FLOAT32)
    checks.assert_same(checks.norm(inputs, "triton", compiler="aot_eager"), checks.norm(inputs, "triton"))


# SwiGLU


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 704), (5, 1202), (1, 2), (700, 6), (4, 32)])
def test_swiglu_matches_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Rows within a program and across some, widths of any divisor, a last program that is not full."""
    checks.assert_gate(checks.gate_inputs(*shape), dtype, LIMITS[dtype])


def test_swiglu_takes_any_strides() -> None:
    checks.assert_gate_strides(checks.gate_inputs(3, 5, 20, dtype=FLOAT32))


def test_swiglu_of_nothing_and_what_it_leaves_to_torch() -> None:
    assert swiglu(torch.zeros(0, 4), backend="triton").shape == (0, 2)
    x = torch.ones(2, 4, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"backend: got 'triton' for torch.float64, accepted: 16 or 32 bits; .*'torch'"
    ):
        swiglu(x, backend="triton")
    assert torch.equal(swiglu(x), swiglu(x, backend="torch"))


def test_swiglu_operator() -> None:
    x = checks.gate_inputs(2, 3, 20, dtype=FLOAT32)["x"].requires_grad_()
    torch.library.opcheck(
        torch.ops.kda_lm.swiglu_forward.default,
        (x,),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.kda_lm.swiglu_backward.default,
        (torch.ones(2, 3, 10), x.detach()),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_swiglu_compiles_without_graph_breaks() -> None:
    inputs = checks.gate_inputs(2, 3, 20, dtype=FLOAT32)
    checks.assert_same(checks.gate(inputs, "triton", compiler="aot_eager"), checks.gate(inputs, "triton"))


# The loss


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for few rows, several blocks for few logits."""
    monkeypatch.setattr(cross_entropy, "FEWEST_ROWS", 4)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 0)
    monkeypatch.setattr(cross_entropy, "BLOCK", 512)


@dtypes
@pytest.mark.parametrize(
    ("N", "dim", "vocab", "options"),
    [(9, 12, 700, {}), (5, 3, 1, {"z_loss": 0.1}), (10, 16, 513, {"z_loss": 1e-2, "ignore_index": 5})],
)
@pytest.mark.usefixtures("short_chunks")
def test_loss_matches_float64(dtype: torch.dtype, N: int, dim: int, vocab: int, options: dict[str, Any]) -> None:
    """The loss is of float32 logits in any case; bfloat16 gradients are rounded three times."""
    inputs = checks.loss_inputs(N, dim, vocab, dtype)
    if "ignore_index" in options:
        inputs["targets"].masked_fill_(inputs["targets"] == -100, 5)
    elif vocab > 1:
        assert (inputs["targets"] == -100).any()
    out = checks.loss(inputs, "triton", **options)
    assert out["loss"].dtype == FLOAT32 and out["loss"].shape == () and out["dx"].dtype == dtype
    checks.assert_loss(out, checks.exact_loss(inputs, **options), 1.5 * LIMITS[dtype], FLOAT32_ERROR)


@pytest.mark.usefixtures("short_chunks")
def test_loss_of_extreme_logits() -> None:
    inputs = checks.loss_inputs(6, 4, 600, FLOAT32)
    inputs["x"] *= 1e3
    checks.assert_loss(checks.loss(inputs, "triton"), checks.exact_loss(inputs), 1e-5, FLOAT32_ERROR)


@pytest.mark.usefixtures("short_chunks")
def test_loss_without_targets_or_gradients() -> None:
    inputs = checks.loss_inputs(6, 4, 30, FLOAT32)
    x, weight, targets = inputs.values()
    ref = checks.exact_loss(inputs)
    assert error(linear_cross_entropy(x, weight, targets, backend="triton"), ref["loss"]) <= FLOAT32_ERROR
    for name in ("x", "weight"):  # of one of the two alone
        leaves = {**inputs, name: inputs[name].clone().requires_grad_()}
        linear_cross_entropy(**leaves, backend="triton").mul(0.1).backward()
        gradient = leaves[name].grad
        assert gradient is not None and error(gradient, ref[f"d{name}"]) <= FLOAT32_ERROR
    out = checks.loss({**inputs, "targets": torch.full((6,), -100)}, "triton")
    assert all(not result.any() for result in out.values())
    assert linear_cross_entropy(x, weight, torch.full((6,), 30), backend="triton").isnan()
    assert linear_cross_entropy(x[:0], weight, targets[:0], backend="triton") == 0


@pytest.mark.usefixtures("short_chunks")
def test_loss_under_autocast() -> None:
    """Operands are rounded, and so x's gradient; that of float32 weights is not."""
    inputs = checks.loss_inputs(9, 12, 40, FLOAT32)
    with torch.autocast("cpu", BFLOAT16):
        out = checks.loss(inputs, "triton")
    rounded = {name: x if name == "targets" else x.bfloat16() for name, x in inputs.items()}
    assert out["loss"].dtype == out["dx"].dtype == out["dweight"].dtype == FLOAT32
    assert not torch.equal(out["dweight"], out["dweight"].bfloat16())
    checks.assert_loss(out, checks.exact_loss(rounded), LIMITS[BFLOAT16], FLOAT32_ERROR)


def test_loss_backward_twice() -> None:
    """A graph that is kept gives the same gradients again."""
    inputs = checks.loss_inputs(5, 4, 30, FLOAT32)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))
    result = linear_cross_entropy(x, weight, inputs["targets"], backend="triton")
    first, second = (torch.autograd.grad(2.0 * result, (x, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_loss_operator() -> None:
    inputs = checks.loss_inputs(5, 4, 30, FLOAT32)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))
    torch.library.opcheck(
        torch.ops.kda_lm.cross_entropy_forward.default,
        (x, weight, inputs["targets"], -100, 0.1, True, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_loss_compiles_without_graph_breaks() -> None:
    inputs = checks.loss_inputs(5, 4, 30, FLOAT32)
    checks.assert_same(checks.loss(inputs, "triton", compiler="aot_eager"), checks.loss(inputs, "triton"))
