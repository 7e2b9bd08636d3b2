"""Softmax attention in Triton on a GPU, against the written-out scores in float64: skipped, visibly, without one.

test_attention_triton.py has the small cases; here are the dtypes, widths and lengths, what only sizes and the compiler
can break, and every tile configuration.
"""

from dataclasses import replace
from typing import Any

import attention_cases as cases
import gpu_checks
import packed_checks
import pytest
import torch
from attention_cases import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LIMITS,
    assert_within,
    check_decode,
    make_cache,
    results,
)
from gpu_checks import DEVICE, give_memory_back  # noqa: F401 for every test here
from recurrence_cases import Inputs, error
from torch import Tensor

from kernels import resolve_backend, softmax_attention, softmax_decode

pytestmark = gpu_checks.required

SIZES = {"HQ": 4, "HKV": 2, "D": 64, "dtype": BFLOAT16, "device": DEVICE}  # the same where it can be
dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=str)


def make(T: int, S: int | None = None, **sizes: Any) -> Inputs:
    return cases.make(T, S, **{**SIZES, **sizes})


def check(inputs: Inputs, times: dict[str, float] | None = None, **options: Any) -> Inputs:
    """With NaN in all new memory: nothing may be read before it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return cases.check(inputs, times, **{"scale": None, **options})
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_is_triton() -> None:
    assert resolve_backend("auto", DEVICE) == "triton"
    inputs = make(100)
    auto, same, other = (results(inputs, backend=name)["o"] for name in ("auto", "triton", "torch"))
    assert torch.equal(auto, same) and not torch.equal(auto, other)


def test_torch_on_the_gpu() -> None:
    """Windows, too, and what Triton does not take."""
    for window in (None, 17):
        inputs = make(100)
        out = results(inputs, backend="torch", window=window, scale=None)
        assert_within(out, cases.reference(inputs, window=window, scale=None), BFLOAT16, o=2.0, dq=2.0, dk=2.0, dv=2.0)
    for change in ({"D": 257}, {"dtype": torch.float64}):
        inputs = make(5, **change)
        assert torch.equal(results(inputs, backend="auto")["o"], results(inputs, backend="torch")["o"])
        with pytest.raises(ValueError, match="backend: got 'triton' for D = "):
            results(inputs, backend="triton")


# Widths, lengths, options


@dtypes
@pytest.mark.parametrize("D", [16, 32, 48, 64, 72, 96, 128, 192, 256])
def test_widths(D: int, dtype: torch.dtype) -> None:
    """The same bits four times, with NaN in new memory: nothing beyond a head's width counts."""
    inputs = make(200, D=D, dtype=dtype)
    first, *others = (check(inputs) for _ in range(4))
    for other in others:
        cases.assert_same(other, first)


@pytest.mark.parametrize("T", [*range(1, 9), 63, 64, 65, 127, 128, 129, 1334])
def test_lengths(T: int) -> None:
    check(make(T))


@dtypes
@pytest.mark.parametrize("T", [1, 5, 128, 300])
def test_lengths_at_128(T: int, dtype: torch.dtype) -> None:
    check(make(T, D=128, dtype=dtype))


@pytest.mark.parametrize(("T", "S"), [(1, 9), (1, 1334), (3, 64), (64, 65), (65, 200), (128, 1024), (130, 1334)])
def test_last_queries(T: int, S: int) -> None:
    check(make(T, S))


@pytest.mark.parametrize(("HQ", "HKV"), [(1, 1), (6, 6), (8, 1), (6, 2)])
@pytest.mark.parametrize("D", [64, 128])
def test_grouped_heads(HQ: int, HKV: int, D: int) -> None:
    check(make(200, B=2, HQ=HQ, HKV=HKV, D=D))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 128, 200, 333, 499, 500])
@pytest.mark.parametrize("D", [64, 128])
def test_windows(window: int, D: int) -> None:
    """Of one token, nothing is left of the gradients of q and k but rounding."""
    out = check(make(500, D=D), window=window, times={"dq": 1e9, "dk": 1e9} if window == 1 else None)
    if window == 1:
        assert max(out[name].norm() for name in ("dq", "dk")) < 1e-2


@dtypes
def test_windows_of_last_queries(dtype: torch.dtype) -> None:
    check(make(100, 500, dtype=dtype), window=130)


@dtypes
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("D", [64, 128])
def test_packed(window: int | None, D: int, dtype: torch.dtype) -> None:
    """Unequal sequences, three of them empty. Boundaries may lie on either device."""
    bounds = torch.tensor([0, 0, 37, 37, 38, 166, 500, 500], dtype=torch.int32, device=DEVICE)
    inputs = make(500, D=D, dtype=dtype)
    out = check(inputs, cu_seqlens=bounds, window=window)
    cases.assert_same(results(inputs, cu_seqlens=bounds.cpu().long(), window=window, scale=None), out)


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-30, 1.0])
def test_any_scale(scale: float) -> None:
    check(make(200), scale=scale, window=150, times={"dq": 1.5, "dk": 1.5} if scale == 1.0 else None)


def test_gradients_of_float16_have_its_range() -> None:
    """As a loss scale would have them."""
    inputs = make(300, dtype=FLOAT16)
    plain = check(inputs)
    for exponent in (-10, 8):
        scaled = results({**inputs, "d_o": inputs["d_o"] * 2.0**exponent}, scale=None)
        for name in ("dq", "dk", "dv"):
            assert error(scaled[name].double() / 2.0**exponent, plain[name]) < 2e-3


def test_mixed_dtypes() -> None:
    inputs = make(100)
    inputs["k"] = inputs["k"].float()
    out = results(inputs)
    assert {name: x.dtype for name, x in out.items()} == {"o": BFLOAT16, "dq": BFLOAT16, "dk": FLOAT32, "dv": BFLOAT16}
    assert_within(out, cases.reference(inputs), BFLOAT16)


# Bits


@dtypes
@pytest.mark.parametrize("options", [{}, {"window": 100}], ids=str)
def test_same_bits_every_time(dtype: torch.dtype, options: dict[str, Any]) -> None:
    inputs = make(600, B=8, D=128, dtype=dtype)
    first = results(inputs, **options)
    for _ in range(19):
        cases.assert_same(results(inputs, **options), first)


@dtypes
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("D", [64, 128])
def test_future_never_changes_the_past(dtype: torch.dtype, window: int | None, D: int) -> None:
    inputs = make(300, D=D, dtype=dtype)
    del inputs["d_o"]
    cases.assert_causal(inputs, [1, 2, 31, 32, 63, 64, 65, 127, 128, 129, 192, 255, 256, 299], window=window)


@dtypes
def test_rows_of_a_batch_do_not_meet(dtype: torch.dtype) -> None:
    cases.assert_rows_do_not_meet(make(136, B=3, dtype=dtype))


@dtypes
@pytest.mark.parametrize("window", [None, 9])
def test_packed_sequences_do_not_meet(dtype: torch.dtype, window: int | None) -> None:
    packed_checks.assert_attention_does_not_meet(dtype, DEVICE, D=64, window=window)


def test_float32_is_not_asked_of_torch() -> None:
    """The setting that lets torch's own products be TF32 changes no bit of the kernels'."""
    inputs = make(256, dtype=FLOAT32)
    exact, before = check(inputs), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        cases.assert_same(results(inputs, scale=None), exact)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 128, 129, 192, 200, 256, 257, 320, 500, 704, 777])
def test_any_length_in_bfloat16(T: int, D: int) -> None:
    """Where a GPU has kernels of its own, as Hopper: lengths around their blocks; groups of 1, 2 and 4 queries a key;
    one tile and more than there are multiprocessors."""
    for B, HQ, HKV in ((1, 1, 1), (2, 8, 2), (9, 16, 8)):
        inputs = make(T, B=B, HQ=HQ, HKV=HKV, D=D)
        first = check(inputs)
        cases.assert_same(results(inputs, scale=None), first)


@pytest.mark.parametrize("D", [64, 128])
def test_parts_of_one_product(D: int) -> None:
    """q, k and v as a joint projection leaves them, or heads before tokens, or a batch of one row again and again: the
    same bits as apart."""
    B, T, H = 3, 130, 4
    joint = torch.randn(B, T, 3, H, D, device=DEVICE).bfloat16()
    q, k, v = joint.unbind(2)
    o = softmax_attention(q.contiguous(), k.contiguous(), v.contiguous(), backend="triton")
    assert torch.equal(softmax_attention(q, k, v, backend="triton"), o)
    early = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(softmax_attention(*early, backend="triton"), o)
    again = [x[:1].expand(x.shape) for x in (q, k, v)]
    assert torch.equal(softmax_attention(*again, backend="triton"), o[:1].expand(o.shape))


@pytest.mark.parametrize("D", [64, 128])
def test_what_follows_a_row_does_not_enter(D: int) -> None:
    """Not even as 0 · NaN: the next row's first keys are in the same block as this one's last."""
    inputs = make(129, B=3, D=D)
    alone = softmax_attention(*(inputs[name][:1] for name in "qkv"), backend="triton")
    for name in "qkv":
        inputs[name][1] = torch.nan
    o = softmax_attention(*(inputs[name] for name in "qkv"), backend="triton")
    assert torch.equal(o[:1], alone) and o[1].isnan().all() and o[2].isfinite().all()


@pytest.mark.parametrize("T", [128, 192])
def test_other_rows_do_not_enter_gradients(T: int) -> None:
    """A block of which a part is beyond the row's end copies in what is the next row's, and drops what comes of it."""
    inputs = make(T, B=3, D=128)
    first = results(inputs, scale=None)
    inputs["q"][1] = torch.nan
    out = results(inputs, scale=None)
    for name, x in out.items():
        assert torch.equal(x[0], first[name][0]) and torch.equal(x[2], first[name][2]) and x[1].isnan().any(), name


def test_heads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept between two kernels may be of some heads at a time: the same bits."""
    from kernels.gpu.attention import hopper_backward
    from kernels.gpu.attention.tiles import attention_tiles, forced

    inputs = make(320, B=3, HQ=6, HKV=3, D=128)
    first = check(inputs)
    for kept, at_once in ((1, 1), (2, 2), (1 << 40, 9)):
        monkeypatch.setattr(hopper_backward, "KEPT_BYTES", kept * 2 * hopper_backward.tiles_of(320) * 64 * 64 * 2)
        with forced(attention_tiles(torch.device(DEVICE), BFLOAT16, 128)):
            assert hopper_backward.heads_at_once(320, 9, 2, 132) == at_once
            cases.assert_same(results(inputs, scale=None), first)


def test_strides_do_not_matter() -> None:
    cases.assert_strides_do_not_matter(make(100, B=2, HKV=4))


def test_alignment_does_not_matter() -> None:
    """Inputs that begin between multiples of 16 bytes, or whose rows do."""

    def moved(x: Tensor, gap: int) -> Tensor:
        wide = x.new_full((*x.shape[:3], x.shape[3] + gap), 99.0).flatten()
        wide = torch.cat([wide.new_zeros(1), wide])[1:].view(*x.shape[:3], -1)[..., : x.shape[3]]
        return wide.copy_(x)

    inputs = make(100)
    first = results(inputs)
    for gap in (0, 1):
        other = results({name: moved(x, gap) for name, x in inputs.items()})
        assert_within(other, first, BFLOAT16)
    cases.assert_same(results(inputs), first)


# Sizes


def test_many_heads() -> None:
    """More than 65,535 heads in the batch: a grid's second and third dimensions end there."""
    inputs = make(3, B=35_000, HQ=2, HKV=2, D=16)
    out = check(inputs)
    ref = cases.reference({name: x[-8:] for name, x in inputs.items()}, scale=None)
    assert_within({name: x[-8:] for name, x in out.items()}, ref, BFLOAT16, dq=2.0, dk=2.0)


@pytest.mark.parametrize("window", [None, 1000])
def test_a_long_sequence(window: int | None) -> None:
    """More than 65,536 tokens, against the last and the first of them: the scores of all do not fit."""
    T, few = 65_537, 100
    inputs = make(T, HQ=1, HKV=1)
    inputs["d_o"][:, : T - few] = 0.0  # so that the last queries have all the gradient
    out = results(inputs, window=window, scale=None)
    last = {"q": inputs["q"][:, -few:], "k": inputs["k"], "v": inputs["v"], "d_o": inputs["d_o"][:, -few:]}
    ref = cases.reference(last, window=window, scale=None)
    found = {**out, "o": out["o"][:, -few:], "dq": out["dq"][:, -few:]}
    assert_within(found, ref, BFLOAT16)
    assert not out["dq"][:, :-few].any()
    head = {name: x[:, :few] for name, x in inputs.items()}
    assert error(out["o"][:, :few], cases.reference(head, window=window, scale=None)["o"]) < LIMITS[BFLOAT16][0]


def test_many_elements() -> None:
    """More than 2³¹ elements of q: the second row, which begins beyond 2³⁰ and ends beyond 2³¹, is as it is alone."""
    B, T, H, D = 2, 600_000, 16, 128
    assert B * T * H * D > 2**31
    if torch.cuda.mem_get_info()[0] < 48 * 2**30:
        pytest.skip("needs 48 GiB of free memory on the GPU")
    rng = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(B, T, H, D, generator=rng, device=DEVICE, dtype=BFLOAT16)
    leaves = [x.requires_grad_() for x in (q, q.roll(1, 1), q.roll(2, 1))]
    options: dict[str, Any] = {"window": 64, "backend": "triton"}
    o = softmax_attention(*leaves, **options)
    grads = torch.autograd.grad(o, leaves, leaves[1].detach())
    alone = [x.detach()[1:].requires_grad_() for x in leaves]
    o_alone = softmax_attention(*alone, **options)
    grads_alone = torch.autograd.grad(o_alone, alone, leaves[1].detach()[1:])
    for together, one in zip((o, *grads), (o_alone, *grads_alone), strict=True):
        for start in range(0, T, 100_000):
            at = slice(start, start + 100_000)
            assert one[0, at].isfinite().all() and torch.equal(together[1, at], one[0, at])


# Decoding

DECODE = {"HQ": 8, "HKV": 2, "D": 128, "dtype": BFLOAT16, "device": DEVICE}
LENGTHS = [1, 1000, 4096, 64, 65, 0]


@dtypes
@pytest.mark.parametrize("D", [16, 48, 64, 72, 96, 128, 256])
@pytest.mark.parametrize("T", [1, 4])
def test_decode(dtype: torch.dtype, D: int, T: int) -> None:
    """Ragged lengths, and NaN in what is not used of the cache."""
    check_decode(*make_cache(LENGTHS, T, 4096, **{**DECODE, "D": D, "dtype": dtype}))


@pytest.mark.parametrize("window", [1, 100, 2000])
@pytest.mark.parametrize("T", [1, 40])
def test_decode_with_a_window(window: int, T: int) -> None:
    check_decode(*make_cache(LENGTHS, T, 4096, **DECODE), window=window)


@pytest.mark.parametrize("window", [None, 2000])
def test_decode_of_a_long_cache(window: int | None) -> None:
    """More than 65,536 positions, all of them valid in one row."""
    check_decode(*make_cache([65_537, 40_000], 1, 65_537, **DECODE), window=window)


def test_decode_of_many_elements() -> None:
    """More than 2³¹ elements of the cache: the second row is as it is alone, and its last positions count."""
    B, S, H, D = 2, 600_000, 16, 128
    assert B * S * H * D > 2**31
    if torch.cuda.mem_get_info()[0] < 32 * 2**30:
        pytest.skip("needs 32 GiB of free memory on the GPU")
    rng = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(B, 1, H, D, generator=rng, device=DEVICE, dtype=BFLOAT16)
    k, v = (torch.randn(B, S, H, D, generator=rng, device=DEVICE, dtype=BFLOAT16) for _ in range(2))
    lengths = torch.tensor([S, S], device=DEVICE)
    o = softmax_decode(q, k, v, lengths)
    assert o.isfinite().all() and torch.equal(o[1:], softmax_decode(q[1:], k[1:], v[1:], lengths[1:]))
    last = softmax_decode(q, k, v, lengths, window=100)
    few = (x[:, -100:].contiguous() for x in (k, v))
    assert error(last, softmax_decode(q, *few, torch.tensor([100, 100], device=DEVICE))) < LIMITS[BFLOAT16][0]


def test_decode_heads() -> None:
    for HQ, HKV in ((1, 1), (32, 1), (4, 4)):
        check_decode(*make_cache([700, 3], 1, 1024, **{**DECODE, "HQ": HQ, "HKV": HKV}))


def test_decode_of_a_large_batch() -> None:
    """Without parts, and with more than 65,535 programs."""
    lengths = [1 + n % 70 for n in range(280)]
    check_decode(*make_cache(lengths, 1, 72, **{**DECODE, "HQ": 240, "HKV": 240, "D": 16}))


def test_other_rows_do_not_matter() -> None:
    inputs, lengths = make_cache([1000, 3000], 1, 4096, **DECODE)
    other, longer = {name: x.clone() for name, x in inputs.items()}, torch.tensor([5, 3000], device=DEVICE)
    other["k"][0] = other["v"][0] = 3.0
    a, b = softmax_decode(**inputs, lengths=lengths), softmax_decode(**other, lengths=longer)
    assert torch.equal(a[1], b[1]) and not torch.equal(a[0], b[0])
    assert all(torch.equal(softmax_decode(**inputs, lengths=lengths), a) for _ in range(10))
    assert torch.equal(a[1:], softmax_decode(**{name: x[1:] for name, x in inputs.items()}, lengths=lengths[1:]))


def test_decode_in_a_cuda_graph() -> None:
    """Captured once, replayed at other lengths."""
    inputs, lengths = make_cache([1000, 3000], 1, 4096, unused=0.0, **DECODE)
    softmax_decode(**inputs, lengths=lengths)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = softmax_decode(**inputs, lengths=lengths)
    for new in ([1000, 3000], [1, 2999], [17, 4096]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(o, softmax_decode(**inputs, lengths=lengths))


# Around the operators


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(packed: bool, mode: str) -> None:
    """Two steps on different inputs: results of the first are not the second's (buffers of CUDA graphs)."""
    options: dict[str, Any] = {"backend": "triton", "window": 70}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 50, 50, 130], device=DEVICE)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax_attention(q, k, v, **options)

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    steps = []
    for seed in (0, 1):
        inputs, found = make(130, D=128, seed=seed), []
        for function in (layer, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            leaves = [inputs[name].clone().requires_grad_() for name in ("q", "k", "v")]
            o = function(*leaves)
            grads = torch.autograd.grad(o, leaves, inputs["d_o"])
            found.append([x.detach().clone() for x in (o, *grads)])
        steps.append(found)
    assert not torch.equal(steps[0][0][0], steps[1][0][0])
    for eager, out in steps:
        assert all(torch.equal(a, b) for a, b in zip(eager, out, strict=True))


def test_decoding_compiles_without_a_graph_break() -> None:
    torch.compiler.reset()
    compiled = torch.compile(softmax_decode, fullgraph=True)
    inputs, lengths = make_cache([1000, 3000], 1, 4096, **DECODE)
    assert torch.equal(compiled(**inputs, lengths=lengths), softmax_decode(**inputs, lengths=lengths))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool) -> None:
    cases.assert_checkpoint_changes_nothing(make(100), use_reentrant)


def test_autocast_decides_the_products() -> None:
    """As in torch: float32 inputs are cast, and their gradients come back in float32."""
    inputs = make(100, dtype=FLOAT32)
    with torch.autocast(DEVICE, BFLOAT16):
        out = results(inputs)
    cast = results({name: x.to(BFLOAT16) for name, x in inputs.items()})
    cases.assert_same(out, {name: x.float() for name, x in cast.items()})


# Tiles


def tile_cases() -> list[Any]:
    """(dtype, D, tiles) of the table for this GPU, and of the defaults."""
    if not torch.cuda.is_available():
        return [pytest.param(None, id="of this GPU")]
    from kernels.gpu.attention import tiles
    from kernels.gpu.limits import capability

    here = capability(torch.device("cuda"))
    found = [("table", dtype, D, entry) for (sm, dtype, D), entry in tiles.TABLE.items() if sm == here]
    found += [("rounded", dtype, D, replace(x, d_kv=replace(x.d_kv, rounded=True))) for _, dtype, D, x in found]
    found += [("default", dtype, D, tiles.default(dtype, D)) for dtype in LIMITS for D in (64, 128, 256)]
    return [pytest.param(case, id="-".join(str(x) for x in case[:3])) for case in found]


@pytest.mark.parametrize("case", tile_cases())
def test_every_tile_configuration(case: tuple[str, torch.dtype, int, Any]) -> None:
    """Against float64, and the same bits twenty times."""
    from kernels.gpu.attention.tiles import forced

    _, dtype, D, tiles = case
    with forced(tiles):
        for T in (300, 384):  # the last block ends early, or is full like the others: compiled without masks
            inputs = make(T, D=D, dtype=dtype)
            first = check(inputs)
            for _ in range(19):
                cases.assert_same(results(inputs, scale=None), first)
        check(make(300, D=D, dtype=dtype), window=130)
