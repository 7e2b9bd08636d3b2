"""Softmax attention in Triton, in Triton's interpreter: see interpreter.py.

Inputs are float32, and what only 16 bits have is tried with bfloat16.py's arithmetic. test_attention_gpu.py has the
other dtypes, sizes and the real compiler.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import attention_cases as cases
import interpreter
import pytest
import torch
from attention_cases import BFLOAT16, SCALE, check, check_decode, make, make_cache, results
from recurrence_cases import error
from torch import Tensor

interpreter.required()

import bfloat16  # noqa: E402
import packed_checks  # noqa: E402

from kernels import softmax_attention, softmax_decode  # noqa: E402
from kernels.gpu.attention.decode import launch, part_of  # noqa: E402
from kernels.gpu.attention.tiles import AttentionTiles, Blocks, forced  # noqa: E402

BOUNDS = [0, 0, 37, 38, 38, 70, 70]
# Blocks of 64 as for 16 bits; unequal ones, either way.
WIDE = AttentionTiles(Blocks(64, 64), Blocks(64, 64), Blocks(64, 64))
UNEQUAL = AttentionTiles(Blocks(64, 16), Blocks(16, 64), Blocks(64, 16))


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """What a kernel reads before something has written it becomes NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    bfloat16.install(monkeypatch)


def test_auto_is_triton_here() -> None:
    inputs = make(5)
    del inputs["d_o"]
    auto, triton, other = (softmax_attention(**inputs, backend=name) for name in ("auto", "triton", "torch"))
    assert torch.equal(auto, triton) and not torch.equal(auto, other)
    lengths = torch.tensor([5])
    auto, triton, other = (softmax_decode(**inputs, lengths=lengths, backend=x) for x in ("auto", "triton", "torch"))
    assert torch.equal(auto, triton) and not torch.equal(auto, other)


@pytest.mark.parametrize(("D", "dtype"), [(257, torch.float32), (8, torch.float64)])
def test_what_the_kernels_do_not_take(D: int, dtype: torch.dtype) -> None:
    """Named by "triton", and left to torch by "auto"."""
    inputs = {name: x.to(dtype) for name, x in make(2, D=D).items() if name != "d_o"}
    for function in (softmax_attention, softmax_decode):
        extra = {"lengths": torch.tensor([2])} if function is softmax_decode else {}
        with pytest.raises(ValueError, match=rf"backend: got 'triton' for D = {D} .*accepted: D ≤ 256 .*'torch'"):
            function(**inputs, **extra, backend="triton")
        assert torch.equal(function(**inputs, **extra), function(**inputs, **extra, backend="torch"))


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 70])
def test_lengths(T: int) -> None:
    check(make(T))


@pytest.mark.parametrize("tiles", [WIDE, UNEQUAL], ids=["wide", "unequal"])
@pytest.mark.parametrize(("T", "S"), [(128, 128), (70, 131)])
@pytest.mark.parametrize("window", [None, 40])
def test_blocks(tiles: AttentionTiles, T: int, S: int, window: int | None) -> None:
    with forced(tiles):
        check(make(T, S, HQ=1, D=8), window=window)


@pytest.mark.parametrize("D", [1, 8, 48, 64, 72, 130, 256])
def test_widths(D: int) -> None:
    check(make(33, HQ=1, D=D), scale=None)


@pytest.mark.parametrize(("HQ", "HKV"), [(2, 2), (4, 2), (3, 1)])
def test_grouped_heads(HQ: int, HKV: int) -> None:
    check(make(40, B=2, HQ=HQ, HKV=HKV))


@pytest.mark.parametrize(("T", "S"), [(1, 40), (5, 37), (32, 64), (33, 90), (64, 65)])
def test_last_queries(T: int, S: int) -> None:
    check(make(T, S))


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 64, 69, 70, 100])
def test_windows(window: int) -> None:
    """Of one token: its own value, and no gradient but v's."""
    out = check(make(70, HQ=1, D=8), window=window, times={"dq": 1e9, "dk": 1e9} if window == 1 else None)
    if window == 1:
        assert max(out[name].norm() for name in ("dq", "dk")) < 1e-4


@pytest.mark.parametrize("window", [1, 17, 40])
def test_windows_of_last_queries(window: int) -> None:
    check(make(40, 70, HQ=1, D=8), window=window, times={"dq": 1e9, "dk": 1e9} if window == 1 else None)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_packed(window: int | None, kind: torch.dtype) -> None:
    """Three of the six sequences are empty."""
    with forced(WIDE if kind == torch.int32 else UNEQUAL):
        check(make(70, HQ=1, D=8), cu_seqlens=torch.tensor(BOUNDS, dtype=kind), window=window)


@pytest.mark.parametrize("scale", [None, 0.0, -0.37, 1e-30, 40.0])
def test_any_scale(scale: float | None) -> None:
    """With none of the scores' differences left, with the least score winning, and with one key taking all."""
    check(make(40, D=8), scale=scale, window=35, times={"dq": 30.0, "dk": 30.0} if scale == 40.0 else None)


def test_large_scores() -> None:
    """Of ±3e4, all negative for some rows."""
    inputs = make(40, D=8)
    inputs["q"] *= 1e3
    inputs["k"] = inputs["k"].abs() * 1e2
    out = results(inputs)
    assert all(x.isfinite().all() for x in out.values())
    assert error(out["o"], cases.reference(inputs)["o"]) < 1e-2  # scores are rounded to 2e-3


@pytest.mark.parametrize("options", [{}, {"window": 33}], ids=str)
@pytest.mark.usefixtures("with_bfloat16")
def test_bfloat16(options: dict[str, Any]) -> None:
    for tiles in (WIDE, replace(WIDE, d_kv=Blocks(64, 64, rounded=True))):
        with forced(tiles):
            check(make(130, HQ=1, D=64, dtype=BFLOAT16), scale=None, **options)


@pytest.mark.usefixtures("with_bfloat16")
def test_bfloat16_of_few_tokens() -> None:
    for T in (2, 3, 8):
        check(make(T, HQ=2, D=64, dtype=BFLOAT16), scale=None)


def test_float16() -> None:
    """Loss scales move gradients by powers of two, and no further."""
    inputs = make(70, HQ=1, D=16, dtype=torch.float16)
    out = check(inputs)
    scaled = results({**inputs, "d_o": inputs["d_o"] * 2.0**9})
    for name in ("dq", "dk", "dv"):
        assert error(scaled[name].double() / 2**9, out[name]) < 1e-3


def test_small_weights_in_float16() -> None:
    """4e-3 a token at most, and none of them lost: every key alike."""
    inputs = make(300, HQ=1, D=8, dtype=torch.float16)
    inputs["k"] *= 0.01
    check(inputs)


def test_mixed_dtypes() -> None:
    inputs = make(20)
    inputs["q"] = inputs["q"].half()
    out = results(inputs)
    assert out["dq"].dtype == torch.float16 and out["o"].dtype == torch.float32
    assert error(out["o"], cases.reference(inputs)["o"]) < 1e-5


# Bits


@pytest.mark.parametrize("window", [None, 20])
def test_future_never_changes_the_past(window: int | None) -> None:
    cases.assert_causal(make(70, HQ=1, D=8), [1, 15, 31, 32, 33, 64], window=window)


def test_rows_of_a_batch_do_not_meet() -> None:
    cases.assert_rows_do_not_meet(make(33, B=2, D=8))


def test_packed_sequences_do_not_meet() -> None:
    packed_checks.assert_attention_does_not_meet(torch.float32, cuts=packed_checks.SHORT)


def test_strides_do_not_matter() -> None:
    cases.assert_strides_do_not_matter(make(5, B=2, HQ=2, HKV=2, D=8))


def test_order_of_programs() -> None:
    """Heads in groups that share a cache, the last group smaller, give the same bits in any order."""
    inputs = make(40, B=3, HQ=2, HKV=1, D=8)
    plain = results(inputs)
    for near_bytes in (1, 40 * 8 * 8 * 2):
        with pytest.MonkeyPatch.context() as patch, forced(AttentionTiles(*[Blocks(32, 32, 4, 1)] * 3)):
            patch.setattr("kernels.gpu.attention.operators.NEAR_BYTES", near_bytes)
            cases.assert_same(results(inputs), plain)


# Around the operators


def test_gradients_of_some_inputs() -> None:
    inputs = make(20)
    full = results(inputs)
    for frozen in ("q", "k", "v"):
        leaves = {name: inputs[name].clone().requires_grad_(name != frozen) for name in ("q", "k", "v")}
        softmax_attention(**leaves, scale=SCALE, backend="triton").backward(inputs["d_o"])
        assert leaves[frozen].grad is None
        assert all(torch.equal(x.grad, full[f"d{name}"]) for name, x in leaves.items() if x.grad is not None)


def test_backward_twice() -> None:
    inputs = make(20)
    leaves = [inputs[name].clone().requires_grad_() for name in ("q", "k", "v")]
    o = softmax_attention(*leaves, backend="triton")
    first, second = (torch.autograd.grad(o, leaves, inputs["d_o"], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool) -> None:
    cases.assert_checkpoint_changes_nothing(make(20), use_reentrant)


@pytest.mark.usefixtures("with_bfloat16")
def test_autocast_decides_the_products() -> None:
    """As in torch: float32 inputs are cast, and their gradients come back in float32."""
    inputs = make(20, D=64)
    with torch.autocast("cpu", BFLOAT16):
        out = results(inputs)
    cast = results({name: x.to(BFLOAT16) for name, x in inputs.items()})
    for name, x in cast.items():
        assert out[name].dtype == torch.float32
        assert torch.equal(out[name], x.float()), name


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(packed: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(softmax_attention, fullgraph=True, backend="aot_eager")
    for T in (6, 9) if packed else (6,):
        inputs = make(T, D=8)
        options = {"cu_seqlens": torch.tensor([0, 2, T])} if packed else {"window": 4}
        cases.assert_same(results(inputs, compiled, **options), results(inputs, **options))


def test_decoding_compiles_without_a_graph_break() -> None:
    torch.compiler.reset()
    compiled = torch.compile(softmax_decode, fullgraph=True, backend="aot_eager")
    inputs, lengths = make_cache([3, 9], 1, 10)
    with torch.no_grad():
        assert torch.equal(compiled(**inputs, lengths=lengths), softmax_decode(**inputs, lengths=lengths))


@pytest.mark.parametrize("packed", [False, True])
def test_operators(packed: bool) -> None:
    """They mutate and alias nothing, their fakes have the shapes, strides and dtypes of the results, and autograd is
    registered."""
    inputs = make(6, D=8)
    bounds = torch.tensor([0, 2, 6]) if packed else None
    tensors = [inputs[name] for name in ("q", "k", "v")]
    ops = torch.ops.kda_lm
    for grad in (False, True):
        leaves = [x.clone().requires_grad_(grad) for x in tensors]
        torch.library.opcheck(
            ops.attention_forward.default,
            (*leaves, bounds, SCALE, 4),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
    o, lse = ops.attention_forward(*tensors, bounds, SCALE, 4)
    torch.library.opcheck(
        ops.attention_backward.default,
        (torch.ones_like(o), *tensors, o, lse, bounds, SCALE, 4),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        ops.attention_decode.default,
        (*tensors, torch.tensor([5]), SCALE, None),
        test_utils=("test_schema", "test_faketensor"),
    )


# Decoding

LENGTHS = [150, 1, 37, 0]


def in_parts(size: int) -> Any:
    def function(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, window: int | None = None) -> Tensor:
        return launch(q, k, v, lengths, scale, window, size)

    return function


@pytest.mark.parametrize("size", [192, 96, 64, 32])
@pytest.mark.parametrize("window", [None, 9])
def test_decode(size: int, window: int | None) -> None:
    """Grouped heads, ragged lengths, one of them empty; more parts than some lengths have blocks."""
    inputs, lengths = make_cache(LENGTHS, 1, 150, HQ=4, HKV=2)
    o = check_decode(inputs, lengths, in_parts(size), window=window)
    assert torch.equal(o[3], torch.zeros_like(o[3]))


@pytest.mark.parametrize("size", [128, 64])
@pytest.mark.parametrize(("T", "window"), [(3, None), (40, None), (5, 7)])
def test_decode_several_tokens(size: int, T: int, window: int | None) -> None:
    """More rows than a tile has, and tokens before the first position."""
    check_decode(*make_cache([90, 3], T, 100, HQ=2, HKV=1, D=8), in_parts(size), window=window)


@pytest.mark.parametrize("D", [1, 64, 130])
def test_decode_widths(D: int) -> None:
    check_decode(*make_cache([70], 1, 80, D=D), in_parts(64))


def test_decode_is_the_last_query() -> None:
    inputs = make(5, 40, D=8)
    del inputs["d_o"]
    o = softmax_decode(**inputs, lengths=torch.tensor([40]), scale=-0.2, backend="triton")
    assert error(o, softmax_attention(**inputs, scale=-0.2, backend="triton")) < 1e-6


@pytest.mark.usefixtures("with_bfloat16")
def test_decode_in_bfloat16() -> None:
    check_decode(*make_cache([100, 70], 1, 128, HQ=4, D=64, dtype=BFLOAT16), in_parts(64))


def test_other_rows_do_not_matter() -> None:
    inputs, lengths = make_cache([100, 70], 1, 128, D=8)
    other, longer = {name: x.clone() for name, x in inputs.items()}, torch.tensor([5, 70], dtype=torch.int32)
    other["k"][0] = other["v"][0] = 3.0
    a, b = (launch(*x.values(), n, SCALE, None, 64) for x, n in ((inputs, lengths), (other, longer)))
    assert torch.equal(a[1], b[1]) and not torch.equal(a[0], b[0])
    alone = {name: x[1:] for name, x in inputs.items()}
    assert torch.equal(a[1:], launch(*alone.values(), lengths[1:], SCALE, None, 64))


def test_parts_follow_from_the_cache() -> None:
    """At most 64, of whole blocks."""
    assert [part_of(S) for S in (1, 256, 16384, 16385, 10**6)] == [256, 256, 256, 320, 15680]
