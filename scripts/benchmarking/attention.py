"""Softmax attention beside torch's own: the rows that `benchmark.py kernels --ops softmax_attention` adds.

Both get the same q, k, v ~ N(0, 1), K = V = D, as many key heads as query heads, causal, in the same run. Torch chooses
its fastest implementation. Errors are against the written-out scores in float64, as for the other ops, and at the timed
shape, for one row and two heads, against torch in float32.

Decoding is one token over a cache that is full, four query heads a key head; its floor is the cache, read once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from scripts.benchmarking import measure
from scripts.benchmarking.cases import Call, Inputs, Shape
from scripts.benchmarking.measure import Problem

NAME, PEER = "softmax_attention", "sdpa"
GROUP = 4  # query heads of a key head, in decoding
DECODING = [Shape(64, 8192, 32, 128), Shape(1, 65536, 32, 128)]  # T: of the cache
DECODING_ON_CPU = [Shape(2, 512, 8, 64)]

Result = dict[str, Any]
Row = dict[str, Any]


def ours(backend: str) -> Call:
    return lambda q, k, v: (kernels.softmax_attention(q, k, v, backend=backend), None)


def sdpa() -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None

    return call


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    random = torch.Generator(device).manual_seed(seed)
    sizes = (shape.B, shape.T, shape.H, shape.D)
    return {name: torch.randn(sizes, generator=random, device=device).to(dtype) for name in ("q", "k", "v")}


def compare(call: Call, problem: Problem, reference: Call, cut: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Errors of o and every gradient, on what `cut` leaves of the problem."""
    part = Problem.of({name: cut(x) for name, x in problem.leaves.items()}, cut(problem.d_o))
    pairs = zip(("o", "dq", "dk", "dv"), problem.both(call), part.both(reference), strict=True)
    return {name: measure.relative_error(cut(out), ref) for name, out, ref in pairs}


def errors(call: Call, H: int, D: int, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, float]:
    problem = Problem.of(make_inputs(Shape(**measure.CHECKED, H=H, D=D), dtype, device, seed))
    return compare(call, problem, ours("reference"), lambda x: x.detach().double())


def errors_at_shape(call: Call, problem: Problem) -> dict[str, float]:
    return compare(call, problem, ours("torch"), lambda x: x.detach()[:1, :, :2].float())


def add(result: Result, key: str, function: Callable[..., Any], *arguments: Any) -> None:
    """What `function` measures, under `key`; if it fails, why, and the run goes on."""
    try:
        result[key] = function(*arguments)
    except Exception as error:
        result[f"{key}_failed"] = measure.one_line(error)
    if key == "errors" and key in result:
        result["error"] = measure.worst(result[key])


def row(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    peer: bool,
    repeats: int,
    seed: int,
    check_only: bool,
    profile: bool,
) -> Row:
    """Errors and times of one shape, as the other ops' rows."""
    calls = {"ours": ours(backend)} | ({PEER: sdpa()} if peer else {})
    results: dict[str, Result] = {name: {} for name in calls}
    gpu = measure.on_gpu(device)
    for name, call in calls.items():
        result = results[name]
        add(result, "errors", errors, call, shape.H, shape.D, dtype, device, seed)
        if check_only:
            continue
        problem = Problem.of(make_inputs(shape, dtype, device, seed))
        forward, both = partial(problem.forward, call), partial(problem.both, call)
        if gpu and name == "ours":
            add(result, "errors_at_shape", errors_at_shape, call, problem)
        add(result, "forward_ms", measure.median_ms, forward, repeats, device)
        add(result, "both_ms", measure.median_ms, both, repeats, device)
        if gpu:
            tiny = Problem.of(make_inputs(Shape(1, measure.HOST_TOKENS, shape.H, shape.D), dtype, device, seed))
            add(result, "extra_mib", measure.extra_mib, both)
            add(result, "host_us", measure.host_us, partial(tiny.both, call))
        if profile:
            add(result, "kernel_ms", measure.kernel_ms, both)
        measure.release_memory(device)
    return {"op": NAME, "shape": str(shape), "results": results}


# Decoding


def decode_row(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    peer: bool,
    repeats: int,
    seed: int,
    check_only: bool,
    bandwidth: float | None,
) -> Row:
    """One token for each of B sequences over a full cache of T positions."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(T: int, H: int) -> Tensor:
        return torch.randn(shape.B, T, H, shape.D, generator=random, device=device, dtype=torch.float32).to(dtype)

    heads = max(1, shape.H // GROUP)
    q, k, v = normal(1, shape.H), normal(shape.T, heads), normal(shape.T, heads)
    lengths = torch.full((shape.B,), shape.T, dtype=torch.int32, device=device)

    def step() -> Tensor:
        return kernels.softmax_decode(q, k, v, lengths, backend=backend)

    def peer_step() -> Tensor:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(
            heads_first[0], heads_first[1], heads_first[2], enable_gqa=heads < shape.H
        ).transpose(1, 2)

    def compared(function: Callable[[], Tensor]) -> dict[str, float]:
        first = [x[:1].double() for x in (q, k, v)]
        ref = kernels.softmax_decode(first[0], first[1], first[2], lengths[:1], backend="reference")
        return {"o": measure.relative_error(function()[:1], ref)}

    steps = {"ours": step} | ({PEER: peer_step} if peer else {})
    results: dict[str, Result] = {name: {} for name in steps}
    for name, function in steps.items():
        add(results[name], "errors", compared, function)
        if not check_only:
            add(results[name], "step_ms", measure.median_ms, function, repeats, device)
    row: Row = {"op": "softmax_decode", "shape": str(shape), "results": results}
    if bandwidth:
        row["floor_ms"] = {"step": 1e3 * (k.nbytes + v.nbytes) / bandwidth}
    return row
