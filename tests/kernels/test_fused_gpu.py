"""The kernels around the recurrence on a GPU, against float64: skipped, visibly, without one."""

from itertools import pairwise
from typing import Any

import fused_checks as checks
import gpu_checks
import packed_checks
import pytest
import rotary_checks
import torch
from gpu_checks import BFLOAT16, DEVICE, FLOAT16, FLOAT32, give_memory_back  # noqa: F401 for every test here
from recurrence_cases import Inputs, assert_close, error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import add_rms_norm, gated_rms_norm, linear_cross_entropy, rms_norm, rotary, short_convolution, swiglu

pytestmark = gpu_checks.required

# Everything is float32 but what is rounded on its way out.
LIMITS = {BFLOAT16: 4e-3, FLOAT16: 5e-4, FLOAT32: 1e-5}
dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=str)


def placed(inputs: Inputs) -> Inputs:
    return {name: x.to(DEVICE) for name, x in inputs.items()}


@pytest.fixture
def nan_in_new_memory() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype = BFLOAT16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE, dtype=dtype)


# The short convolution

EVERYTHING = {"bias", "initial_state"}


@dtypes
@pytest.mark.parametrize(
    ("T", "D", "W"), [(300, 384, 4), (1000, 200, 4), (2, 77, 4), (1, 6144, 4), (130, 130, 8), (65, 64, 1)]
)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_conv_matches_float64(dtype: torch.dtype, T: int, D: int, W: int) -> None:
    inputs = placed(checks.conv_inputs(3, T, D, W, EVERYTHING if T != 300 else set()))
    checks.assert_conv(inputs, dtype, LIMITS[dtype], activation="silu" if T != 65 else None)


@dtypes
@pytest.mark.parametrize("sizes", [[256, 256, 512], [64, 64, 64], [200, 72, 300], [33, 1, 70], [768, 96]], ids=str)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_conv_in_parts(dtype: torch.dtype, sizes: list[int]) -> None:
    bounds = torch.tensor([0, 1, 1, 130, 300], device=DEVICE)
    for B, given in ((3, {}), (1, {"cu_seqlens": bounds})):
        inputs = placed(checks.conv_inputs(B, 300, sum(sizes), 4, EVERYTHING, N=4 if given else None))
        checks.assert_conv(inputs, dtype, LIMITS[dtype], activation="silu", sizes=sizes, **given)
        inputs = {name: x.to(dtype) for name, x in inputs.items()}
        checks.assert_conv_parts(inputs, sizes, activation="silu", **given)


@pytest.mark.parametrize("compiler", [None, "inductor"])
@pytest.mark.parametrize("used", [[1], [0, 2, 3], [3]], ids=str)
def test_conv_backward_of_some_results(used: list[int], compiler: str | None) -> None:
    inputs = placed(checks.conv_inputs(2, 70, 256, 4, {"initial_state"}, FLOAT32))
    checks.assert_conv_some_results(inputs, used, compiler, sizes=[128, 64, 64])


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize(("B", "T"), [(300, 1), (300, 2), (5, 64), (5, 200)])
@pytest.mark.parametrize("W", [2, 4, 8])
def test_conv_in_place(dtype: torch.dtype, B: int, T: int, W: int) -> None:
    inputs = placed(checks.conv_inputs(B, T, 700, W, {"bias", "initial_state"}, dtype))
    checks.assert_conv_in_place(inputs, [300, 300, 100])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("W", [2, 4])
@pytest.mark.usefixtures("nan_in_new_memory")
def test_conv_packed(kind: torch.dtype, W: int) -> None:
    """Empty sequences, short ones, ones of many segments, and very many."""
    T = 2000
    cuts = torch.randint(T, (200,), generator=torch.Generator().manual_seed(0)).sort().values.tolist()
    for bounds in ([0, 0, 1, 64, 128, 128, 1300, T, T], [0, *cuts, T]):
        inputs = placed(checks.conv_inputs(1, T, 136, W, EVERYTHING, N=len(bounds) - 1))
        cu_seqlens = torch.tensor(bounds, device=DEVICE, dtype=kind)
        checks.assert_conv(inputs, FLOAT32, LIMITS[FLOAT32], activation="silu", cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_conv_alone_strided_chained_are_the_same_bits(dtype: torch.dtype) -> None:
    inputs = placed(checks.conv_inputs(3, 300, 200, 4, EVERYTHING, dtype))
    checks.assert_conv_rows_alone(inputs)
    checks.assert_conv_strides(inputs)
    checks.assert_conv_strides(inputs, sizes=[64, 100, 36])
    options: dict[str, Any] = {"activation": "silu", "output_final_state": True, "backend": "triton"}
    whole, last = short_convolution(inputs["x"], inputs["weight"], **options)
    state, pieces = None, []
    for start, end in pairwise([0, 1, 2, 3, 130, 131, 300]):
        y, state = short_convolution(inputs["x"][:, start:end], inputs["weight"], initial_state=state, **options)
        pieces.append(y)
    assert last is not None and state is not None
    assert torch.equal(torch.cat(pieces, dim=1), whole) and torch.equal(state, last)


@dtypes
def test_conv_packed_sequences_do_not_meet(dtype: torch.dtype) -> None:
    packed_checks.assert_convolutions_do_not_meet(dtype, DEVICE)


@pytest.mark.parametrize("sizes", [[4096], [1000, 3000, 96]], ids=str)
@pytest.mark.parametrize(("B", "T", "packed"), [(36, 15_000, False), (1, 540_000, False), (1, 540_000, True)])
def test_conv_of_more_than_2_31_numbers(B: int, T: int, packed: bool, sizes: list[int]) -> None:
    """The last tokens are as they are alone, forward and backward."""
    D, W, tail = 4096, 4, 300
    x, weight = random(B, T, D).requires_grad_(), random(D, W, seed=1).requires_grad_()
    assert x.numel() > 2**31
    bounds = torch.tensor([0, 3, T - 50_000, T], device=DEVICE) if packed else None
    parts, _ = short_convolution(x, weight, activation="silu", cu_seqlens=bounds, backend="triton", sizes=sizes)
    (d_x,) = torch.autograd.grad(parts, x, x.detach().split(sizes, dim=-1))
    end = x.detach()[-1:, T - tail :].clone().requires_grad_()
    y_end, _ = short_convolution(end, weight, activation="silu", backend="triton")
    (d_end,) = torch.autograd.grad(y_end, end, end.detach())
    after = W - 1  # that the tokens before the tail reach
    for part, expected in zip(parts, y_end.split(sizes, dim=-1), strict=True):
        assert torch.equal(part[-1:, T - tail + after :], expected[:, after:])
    assert torch.equal(d_x[-1:, T - tail + 2 * after :], d_end[:, 2 * after :])


# Norms


@dtypes
@pytest.mark.parametrize(
    "shape", [(4, 150, 16, 128), (33, 7, 64), (3000, 1024), (700, 8192), (300, 8191), (900, 1), (511, 77)]
)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_norm_matches_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """With and without a gate or a weight; dw is a sum of thousands in float32."""
    for gated, weighted, options in (
        (False, True, {}),
        (True, True, {"activation": "silu"}),
        (True, False, {"activation": "sigmoid"}),
    ):
        inputs = placed(checks.norm_inputs(*shape, gated=gated, weighted=weighted))
        checks.assert_norm(inputs, dtype, LIMITS[dtype], **options)


@pytest.mark.parametrize("shape", [(5, 3, 16, 128), (4, 1000)])
def test_norm_alone_and_strided_are_the_same_bits(shape: tuple[int, ...]) -> None:
    inputs = placed(checks.norm_inputs(*shape, dtype=BFLOAT16))
    checks.assert_norm_rows_alone(inputs)
    checks.assert_norm_strides(inputs)


def test_norm_of_a_float32_stream_for_bfloat16_products() -> None:
    inputs = placed(checks.norm_inputs(300, 768, gated=False, dtype=FLOAT32))
    out = checks.norm(inputs, "triton", dtype=BFLOAT16)
    ref = checks.norm({name: x.double() for name, x in inputs.items()}, "torch")
    assert out["y"].dtype == BFLOAT16 and out["dx"].dtype == FLOAT32
    assert error(out["y"], ref["y"]) <= LIMITS[BFLOAT16]


@dtypes
@pytest.mark.parametrize("shape", [(4, 150, 768), (3000, 1024), (700, 8192), (300, 8191), (900, 1), (511, 77)])
@pytest.mark.usefixtures("nan_in_new_memory")
def test_norm_of_a_sum_matches_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    checks.assert_norm(placed(checks.norm_inputs(*shape, added=True, gated=False)), dtype, LIMITS[dtype])


@pytest.mark.parametrize("N", [768, 1000])
@pytest.mark.usefixtures("nan_in_new_memory")
def test_norm_of_a_sum_under_autocast(N: int) -> None:
    """A float32 stream and what a bfloat16 layer adds. Sums of a row may be in another order than without a sum, and
    with other strides."""
    inputs = placed(checks.norm_inputs(300, N, added=True, gated=False, dtype=FLOAT32))
    inputs["y"] = inputs["y"].bfloat16()
    checks.assert_sum_and_norm_apart(inputs, LIMITS[BFLOAT16], same="s", dtype=BFLOAT16)
    checks.assert_either_gradient(inputs, LIMITS[BFLOAT16])
    checks.assert_norm_strides(inputs, LIMITS[BFLOAT16])


def test_norm_of_a_sum_with_one_gradient_for_both() -> None:
    checks.assert_gradients_are_apart(placed(checks.norm_inputs(300, 768, added=True, gated=False, dtype=BFLOAT16)))


def test_norm_of_a_sum_of_more_than_2_31_numbers() -> None:
    M, N = 17_000_000, 128
    x, y = random(M, N, dtype=FLOAT32).requires_grad_(), random(M, N, seed=1).requires_grad_()
    weight = random(N, seed=2)
    results = add_rms_norm(x, y, weight, backend="triton", dtype=BFLOAT16)
    grads = torch.autograd.grad(results, (x, y), [z.detach() for z in results])
    ends = [z.detach()[-100:].clone().requires_grad_() for z in (x, y)]
    alone = add_rms_norm(*ends, weight, backend="triton", dtype=BFLOAT16)
    d_alone = torch.autograd.grad(alone, ends, [z.detach() for z in alone])
    for found, wanted in zip((*results, *grads), (*alone, *d_alone), strict=True):
        assert torch.equal(found[-100:], wanted)


def test_norm_of_more_than_2_31_numbers() -> None:
    M, N = 17_000_000, 128
    x, gate = random(M, N).requires_grad_(), random(M, N, seed=1).requires_grad_()
    assert x.numel() > 2**31
    y = gated_rms_norm(x, gate, backend="triton")
    grads = torch.autograd.grad(y, (x, gate), y.detach())
    ends = [z.detach()[-100:].clone().requires_grad_() for z in (x, gate)]
    y_end = gated_rms_norm(*ends, backend="triton")
    assert torch.equal(y[-100:], y_end)
    for found, alone in zip(grads, torch.autograd.grad(y_end, ends, y_end.detach()), strict=True):
        assert torch.equal(found[-100:], alone)


# SwiGLU


@dtypes
@pytest.mark.parametrize("shape", [(4, 150, 4096), (3000, 2752), (511, 154), (900, 2), (70, 2730), (1, 4096)])
@pytest.mark.usefixtures("nan_in_new_memory")
def test_swiglu_matches_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    checks.assert_gate(placed(checks.gate_inputs(*shape)), dtype, LIMITS[dtype])


@pytest.mark.parametrize("N", [4096, 154])
def test_swiglu_alone_and_strided_are_the_same_bits(N: int) -> None:
    checks.assert_gate_strides(placed(checks.gate_inputs(5, 3, N, dtype=BFLOAT16)))


def test_swiglu_of_more_than_2_31_numbers() -> None:
    M, N = 1_100_000, 1376
    x = random(M, 2 * N).requires_grad_()
    assert x.numel() > 2**31
    y = swiglu(x, backend="triton")
    (d_x,) = torch.autograd.grad(y, x, y.detach())
    end = x.detach()[-100:].clone().requires_grad_()
    y_end = swiglu(end, backend="triton")
    assert torch.equal(y[-100:], y_end)
    assert torch.equal(d_x[-100:], torch.autograd.grad(y_end, end, y_end.detach())[0])


# The loss


@dtypes
@pytest.mark.parametrize(
    ("N", "dim", "vocab", "options"),
    [
        (5000, 256, 32_000, {}),
        (2100, 100, 50_257, {"z_loss": 1e-3}),
        (70, 64, 1000, {}),
        (9000, 128, 77, {"z_loss": 0.1}),
    ],
)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_loss_matches_float64(dtype: torch.dtype, N: int, dim: int, vocab: int, options: dict[str, Any]) -> None:
    """Several chunks, any vocabulary. The loss is of float32 logits; 16-bit gradients are rounded thrice."""
    inputs = placed(checks.loss_inputs(N, dim, vocab, dtype))
    out = checks.loss(inputs, "triton", **options)
    checks.assert_loss(out, checks.exact_loss(inputs, **options), 1.25 * LIMITS[dtype], 1e-5)


def test_loss_under_autocast() -> None:
    inputs = placed(checks.loss_inputs(3000, 256, 5000, FLOAT32))
    with torch.autocast(DEVICE, BFLOAT16):
        out = checks.loss(inputs, "triton")
        plain = linear_cross_entropy(**inputs, backend="torch")
    rounded = {name: x if name == "targets" else x.bfloat16() for name, x in inputs.items()}
    assert out["dweight"].dtype == FLOAT32
    checks.assert_loss(out, checks.exact_loss(rounded), 1.25 * LIMITS[BFLOAT16], 1e-5)
    assert error(plain, out["loss"]) <= 1e-3


def test_loss_of_many_rows() -> None:
    """More than 65,536 rows and 2³¹ logits, of which the last rows alone have targets: their own loss and gradients."""
    N, dim, vocab, few = 70_000, 64, 32_000, 300
    assert N * vocab > 2**31
    x, weight = random(N, dim, dtype=FLOAT32), random(vocab, dim, dtype=FLOAT32, seed=1)
    targets = torch.full((N,), -100, device=DEVICE)
    targets[-few:] = torch.arange(few, device=DEVICE)
    out = checks.loss({"x": x, "weight": weight, "targets": targets}, "triton")
    alone = checks.exact_loss({"x": x[-few:], "weight": weight, "targets": targets[-few:]})
    assert not out["dx"][:-few].any()
    out["dx"] = out["dx"][-few:]
    checks.assert_loss(out, alone, LIMITS[FLOAT32], LIMITS[FLOAT32])


def test_loss_keeps_a_chunk_of_logits() -> None:
    """Of 32,768 rows, whose logits in float32 are 4.2 GB."""
    N, dim, vocab = 32_768, 512, 32_000
    x, weight = random(N, dim).requires_grad_(), random(vocab, dim, seed=1).requires_grad_()
    targets = torch.randint(vocab, (N,), device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, targets, backend="triton").backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1e9


# Rotary positions


def placed_positions(T: int, B: int | None = None) -> Tensor:
    return rotary_checks.places(T, B).to(DEVICE)


@dtypes
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("B", "T", "H", "D"), [(3, 1000, 12, 64), (4, 1, 5, 96), (2, 65, 3, 256), (1, 3, 1, 2)])
@pytest.mark.usefixtures("nan_in_new_memory")
def test_rotary_matches_complex_numbers(dtype: torch.dtype, norm: bool, B: int, T: int, H: int, D: int) -> None:
    inputs = placed(rotary_checks.make_inputs(B, T, H, D, norm))
    if dtype == FLOAT16:  # whose range ends before that of the shortest rows' gradients
        inputs["x"] = inputs["x"].clamp(min=-100, max=100) + 0.01
    for positions in (placed_positions(T), placed_positions(T, B)):
        rotary_checks.assert_exact(inputs, positions, dtype, LIMITS[dtype], "triton")


def test_rotary_takes_any_strides() -> None:
    for T in (1, 70):
        inputs = placed(rotary_checks.make_inputs(3, T, 12, 64, True, BFLOAT16))
        rotary_checks.assert_strides_do_not_matter(inputs, placed_positions(T, 3))


# All of them


def calls() -> dict[str, tuple[Any, list[Tensor]]]:
    """Each op as a function of its differentiable tensors."""
    conv = placed(checks.conv_inputs(2, 300, 200, 4, EVERYTHING, BFLOAT16))
    norm = placed(checks.norm_inputs(300, 3, 96, dtype=BFLOAT16))
    sums = placed(checks.norm_inputs(300, 768, added=True, gated=False, dtype=BFLOAT16))
    sums["x"] = sums["x"].float()
    loss = placed(checks.loss_inputs(3000, 64, 1000, BFLOAT16))
    targets = loss.pop("targets")
    gate = placed(checks.gate_inputs(300, 2 * 688, dtype=BFLOAT16))
    heads, positions = placed(rotary_checks.make_inputs(2, 300, 3, 96, True, BFLOAT16)), placed_positions(300)
    turns = rotary_checks.frequencies(96, DEVICE)

    def convolve(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        y, last = short_convolution(x, weight, bias, "silu", state, True, backend="triton")
        assert last is not None
        return y, last

    def convolve_in_parts(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"backend": "triton", "sizes": [96, 64, 40]}
        parts, last = short_convolution(x, weight, bias, "silu", state, True, **options)
        return *parts, last

    return {
        "conv": (convolve, list(conv.values())),
        "conv in parts": (convolve_in_parts, list(conv.values())),
        "norm": (lambda x, weight: (rms_norm(x, weight, backend="triton"),), [norm["x"], norm["weight"]]),
        "norm of a sum": (lambda *xs: add_rms_norm(*xs, backend="triton", dtype=BFLOAT16), list(sums.values())),
        "gated norm": (lambda *xs: (gated_rms_norm(*xs, backend="triton"),), list(norm.values())),
        "swiglu": (lambda x: (swiglu(x, backend="triton"),), list(gate.values())),
        "rotary": (lambda x, weight: (rotary(x, positions, turns, weight, backend="triton"),), list(heads.values())),
        "loss": (lambda x, w: (linear_cross_entropy(x, w, targets, backend="triton"),), list(loss.values())),
    }


OPS = ("conv", "conv in parts", "norm", "norm of a sum", "gated norm", "swiglu", "rotary", "loss")


def results(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = function(*leaves)
    weights = [checks.normal(*x.shape, seed=i).to(x) for i, x in enumerate(found)]
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, weights)]


def assert_equal(function: Any, other: Any, tensors: list[Tensor]) -> None:
    pairs = zip(results(function, tensors), results(other, tensors), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", OPS)
def test_same_bits_every_time(name: str) -> None:
    function, tensors = calls()[name]
    for _ in range(10):
        assert_equal(function, function, tensors)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_changes_nothing(name: str, use_reentrant: bool) -> None:
    function, tensors = calls()[name]

    def gradients(call: Any) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        torch.autograd.backward(tuple(x.float().square().sum() for x in call(*leaves)))
        return [x.grad for x in leaves if x.grad is not None]

    pairs = zip(
        gradients(function),
        gradients(lambda *xs: checkpoint(function, *xs, use_reentrant=use_reentrant)),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_without_graph_breaks(name: str, mode: str) -> None:
    """Two steps on different inputs: results of the first are not the second's (buffers of CUDA graphs). A compiler may
    round the factor of the loss's gradient elsewhere."""
    function, tensors = calls()[name]
    torch.compiler.reset()
    compiled = torch.compile(function, mode=mode, fullgraph=True)
    steps = []
    for given in (tensors, [-0.5 * x for x in tensors]):
        for call in (compiled, function):
            torch.compiler.cudagraph_mark_step_begin()
            steps.append({str(i): x.clone() for i, x in enumerate(results(call, given))})
    assert not torch.equal(steps[0]["0"], steps[2]["0"])
    for out, ref in (steps[:2], steps[2:]):
        assert_close(out, ref, LIMITS[BFLOAT16])
