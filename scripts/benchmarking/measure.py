"""The numbers: errors, milliseconds, bytes, host time, cold start. Every function measures one thing of one call."""

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.benchmarking.cases import Call, Case, Contender, Inputs, Shape, make_inputs, ours, reference

# ‖out − ref‖ / ‖ref‖ against float64 on the same rounded inputs: (o and state, gradients). 16-bit results are rounded
# to 2⁻⁹ and computed from operands as coarse; float32 stays float32, products in TF32 would be at 1e-3.
LIMITS = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (4e-3, 5e-3),
    torch.float16: (4e-3, 5e-3),
}
# At the timed shape only a slice is compared, with the chunkwise float32 form: for a wrong tile, not for rounding.
LIMIT_AT_SHAPE = 2e-2

CHECKED = {"B": 2, "T": 500}  # of the comparison: ragged, several chunks; H as timed, for a peer compiles anew for each
WARMUP_MS = 25
MS_PER_REPEAT = 20  # of timed runs on a GPU
COPY_BYTES = 2**30
HOST_TOKENS = 64  # B = 1: the GPU is done before the host has enqueued the next call
HOST_BLOCKS, HOST_CALLS = 20, 10
COLD_SECONDS = 1200


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# Errors


def relative_error(out: Tensor, ref: Tensor) -> float:
    """‖out − ref‖ / ‖ref‖; NaN stays NaN."""
    out, ref = out.detach().double(), ref.detach().double()
    difference, size = float((out - ref).norm()), float(ref.norm())
    return difference / size if size else difference


def limit_of(name: str, dtype: torch.dtype) -> float:
    return LIMITS[dtype][0 if name in ("o", "state") else 1]


def beyond(errors: dict[str, float], dtype: torch.dtype) -> list[str]:
    """What is over its limit, NaN too, in words."""
    limits = {name: limit_of(name, dtype) for name in errors}
    return [
        f"{name} {error:.1e}, limit {limits[name]:.0e}" for name, error in errors.items() if not error <= limits[name]
    ]


def worst(errors: dict[str, float]) -> float:
    """The largest, or NaN if one is."""
    return float(torch.tensor(list(errors.values()), dtype=torch.float64).max())


def differentiate(call: Call, inputs: Inputs, d_o: Tensor, d_state: Tensor) -> Inputs:
    """o, state and the gradient of every input, the initial state among them."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o, state = call(**leaves, output_final_state=True)
    assert state is not None
    gradients = torch.autograd.grad((o, state), list(leaves.values()), (d_o.to(o.dtype), d_state.to(state.dtype)))
    named = zip(leaves, gradients, strict=True)
    return {"o": o.detach(), "state": state.detach(), **{f"d{name}": x for name, x in named}}


def chunk_errors(
    contenders: list[Contender], case: Case, H: int, D: int, dtype: torch.dtype, device: torch.device, seed: int
) -> list[dict[str, float] | str]:
    """Of each contender, over o, state and every gradient: errors by name, or a line on what it raised."""
    shape = Shape(**CHECKED, H=H, D=D)
    inputs = make_inputs(case, shape, dtype, device, seed)
    random = torch.Generator(device).manual_seed(seed + 1)
    states = (shape.B, H, D, D)
    inputs["initial_state"] = torch.randn(*states, generator=random, device=device)
    d_state = torch.randn(*states, generator=random, device=device)
    d_o = torch.randn(inputs["v"].shape, generator=random, device=device).to(dtype)

    expected: dict[bool, Inputs] = {}
    results: list[dict[str, float] | str] = []
    for contender in contenders:
        gate = case.in_kernel and contender.safe_gate
        try:
            if gate not in expected:
                exact = {name: x.double() for name, x in inputs.items()}
                expected[gate] = differentiate(reference(case, gate), exact, d_o.double(), d_state.double())
            got = differentiate(contender.bind(case, "chunk"), inputs, d_o, d_state)
            results.append({name: relative_error(got[name], ref) for name, ref in expected[gate].items()})
        except Exception as error:
            results.append(one_line(error))
    return results


def decode_errors(
    contender: Contender, case: Case, D: int, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, float]:
    """One token from a random state."""
    inputs, state = decode_inputs(case, Shape(2, 1, 2, D), dtype, device, seed)
    exact = {name: x.double() for name, x in inputs.items()}
    wanted = reference(case, False)(**exact, initial_state=state.double(), output_final_state=True)
    got = contender.bind(case, "fused_recurrent")(**inputs, initial_state=state, output_final_state=True)
    pairs = zip(("o", "state"), got, wanted, strict=True)
    return {name: relative_error(out, ref) for name, out, ref in pairs if out is not None and ref is not None}


def errors_at_shape(call: Call, case: Case, problem: "Problem") -> dict[str, float]:
    """Ours against plain torch in float32, at the timed shape: first sequence, first two heads, o and gradients."""
    heads = problem.leaves["q"].shape[2]

    def cut(name: str, x: Tensor) -> Tensor:
        if name in ("A_log", "dt_bias"):
            return x.detach().view(heads, -1)[:2].flatten().float()
        return x.detach()[:1, :, :2].float()

    part = Problem.of({name: cut(name, x) for name, x in problem.leaves.items()}, cut("d_o", problem.d_o))
    wanted = part.both(ours("torch").bind(case, "chunk"))
    pairs = zip(("o", *problem.leaves), problem.both(call), wanted, strict=True)
    return {  # the gradients of A_log and dt_bias sum over the batch
        name if name == "o" else f"d{name}": relative_error(cut(name, out), ref)
        for name, out, ref in pairs
        if name not in ("A_log", "dt_bias")
    }


# Time


@dataclass(frozen=True)
class Problem:
    """The inputs of a call, and the gradient of its output; of its second result, too, if that has one."""

    leaves: Inputs
    d_o: Tensor
    d_second: Tensor | None = None

    @classmethod
    def of(cls, inputs: Inputs, d_o: Tensor | None = None, d_second: Tensor | None = None) -> "Problem":
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        return cls(leaves, torch.randn_like(inputs["v"]) if d_o is None else d_o, d_second)

    def forward(self, call: Call) -> object:
        with torch.no_grad():
            return call(**self.leaves)

    def both(self, call: Call) -> list[Tensor]:
        """The results that have gradients, and the gradients of all inputs."""
        o, second = call(**self.leaves)
        results, d_results = [o], [self.d_o]
        if second is not None and self.d_second is not None:
            results, d_results = [o, second], [self.d_o, self.d_second]
        return [*results, *torch.autograd.grad(results, list(self.leaves.values()), d_results)]


def median_ms(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """By CUDA events over `repeats` · 20 ms of runs, the L2 cache cleared before each; on a CPU `repeats` runs."""
    if on_gpu(device):
        from triton.testing import do_bench

        return float(do_bench(function, warmup=WARMUP_MS, rep=MS_PER_REPEAT * repeats, return_mode="median"))
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def kernel_ms(function: Callable[[], object], repeats: int = 12) -> dict[str, float]:
    """What each kernel takes of a call by torch's profiler, ms, longest first: its median times its starts a call."""
    from torch.profiler import ProfilerActivity, profile

    function()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_time_total:
            found.setdefault(event.name, []).append(event.device_time_total)
    times = {name: statistics.median(us) * len(us) / repeats / 1e3 for name, us in found.items()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def host_us(function: Callable[[], object]) -> float:
    """Wall time of a call that leaves the GPU idle: medians over blocks of 10 calls, each ended by synchronising."""
    times = []
    for _ in range(1 + HOST_BLOCKS):  # the first warms up
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            function()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / HOST_CALLS)
    return statistics.median(times[1:])


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read plus bytes written, a second, by a large copy from device to device."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / median_ms(lambda: target.copy_(source), 5, device)


def seconds_of_first_step(call: Call, problem: Problem, device: torch.device) -> float:
    """In a fresh process with an empty cache: the cold start. The device is up, since the inputs are there."""
    if on_gpu(device):
        torch.cuda.synchronize()
    start = time.perf_counter()
    problem.both(call)
    if on_gpu(device):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def cold_seconds(script: str, words: list[str]) -> float:
    """`python script cold words…` with an empty Triton cache. Raises RuntimeError with its last line of complaint."""
    with tempfile.TemporaryDirectory(prefix="cold-triton-") as folder:
        done = subprocess.run(
            [sys.executable, script, "cold", *words],
            env={**os.environ, "TRITON_CACHE_DIR": folder},
            capture_output=True,
            text=True,
            timeout=COLD_SECONDS,
        )
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


# Memory


def extra_mib(function: Callable[[], object]) -> float:
    """Most device memory held during a call beyond what was held before, its results counted in (MiB = 2²⁰ bytes)."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del results
    return (peak - before) / 2**20


def release_memory(device: torch.device) -> None:
    """What a failed or finished measurement left in the allocator."""
    gc.collect()
    if on_gpu(device):
        with contextlib.suppress(RuntimeError):  # after an illegal access every call fails; the run shall still end
            torch.cuda.empty_cache()


# Decoding


def decode_inputs(
    case: Case, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Inputs, Tensor]:
    random = torch.Generator(device).manual_seed(seed + 1)
    state = torch.randn(shape.B, shape.H, shape.D, shape.D, generator=random, device=device)
    return make_inputs(case, shape, dtype, device, seed), state


def decode_bytes(shape: Shape) -> int:
    """The float32 state, read and written; what a token brings is nothing beside it."""
    return 2 * 4 * shape.B * shape.H * shape.D * shape.D


def decode_step(call: Call, inputs: Inputs, state: Tensor) -> Callable[[], object]:
    """One token for every sequence, the float32 state read and a new one written."""

    def step() -> object:
        with torch.no_grad():
            return call(**inputs, initial_state=state, output_final_state=True)

    return step
