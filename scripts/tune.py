"""Choose the tiles of the chunkwise kernels on this GPU: `python scripts/tune.py --ops kda --dims 128 [--json FILE]`.

Kernel by kernel: every candidate is compiled, in processes of its own, then compared with the float64 recurrence,
forward and gradients, and run twice to the same bits; what passes is timed by the profiler, kernel by kernel, on random
data, and the fastest enters. Prints the entries for kernels/gpu/tiles.py, and every candidate's time and error.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds what lies beside it, not its own package

import kernels
from kernels.gpu.tiles import Launch, Tiles, capability, default, forced, padded

OPS = {
    "linear_attn": ("additive", "none"),
    "simple_gla": ("additive", "scalar"),
    "gla": ("additive", "channel"),
    "delta_rule": ("delta", "none"),
    "gated_delta_rule": ("delta", "scalar"),
    "kda": ("delta", "channel"),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIMITS = {torch.bfloat16: 5e-3, torch.float32: 1e-5}  # ‖out − ref‖/‖ref‖, the largest over o, state and gradients
# The function whose time a group of options decides.
KERNELS = {
    "prepare": ("prepare_kernel",),
    "pairs": ("pairs_kernel",),
    "scan": ("scan_kernel",),
    "reverse_scan": ("reverse_scan_kernel",),
    "pair_gradients": ("pair_gradients_kernel",),
    "gradients": ("channel_gradients_kernel", "scalar_gradients_kernel"),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line; what is accepted is in it."""
        self.exit(2, f"error: {message}\n")


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="kda", help=f"comma-separated, of {', '.join(OPS)}")
    parser.add_argument("--dims", default="128", help="comma-separated K = V")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--groups", default=",".join(KERNELS), help="kernels to tune, comma-separated")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)  # part, parts
    arguments = parser.parse_args()
    for name, values, accepted in (
        ("--ops", arguments.ops, list(OPS)),
        ("--groups", arguments.groups, list(KERNELS)),
        ("--dims", arguments.dims, ["64", "128", "256"]),
    ):
        for value in values.split(","):
            if value not in accepted:
                parser.error(f"{name}: got {value!r}, accepted: {', '.join(accepted)}")
    jobs = [(op, int(dim)) for op in arguments.ops.split(",") for dim in arguments.dims.split(",")]
    if not torch.cuda.is_available():
        parser.error("tiles are measured on an NVIDIA GPU, and there is none here")
    if arguments.compile:
        return compile_part(jobs, arguments)
    parts = [
        subprocess.Popen([sys.executable, *sys.argv, "--compile", str(part), str(arguments.processes)])
        for part in range(arguments.processes)
    ]
    for part in parts:
        part.wait()
    results = [tune(op, dim, arguments) for op, dim in jobs]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
    return 0


def candidates(tiles: Tiles, op: str, dim: int, group: str) -> Iterator[Tiles]:
    """`tiles` with every choice for one kernel; those that do not fit the GPU fail to compile and drop out."""
    channel, wide = OPS[op][1] == "channel", padded(dim)
    if group == "pairs":
        for inverse in ("fp16", "tf32") if OPS[op][0] == "delta" and tiles.chunk == 64 else (tiles.inverse,):
            for keys in {64, wide}:
                yield replace(tiles, inverse=inverse, pairs=Launch(keys=keys))
    elif group in ("scan", "reverse_scan"):
        shapes = [(64, 4), (128, 8)] if tiles.chunk == 64 else [(32, 4), (64, 4)]
        for values, warps in shapes if wide > 64 else shapes[:1]:
            for stages in (1, 2, 3):
                launch = Launch(warps, stages, values=values)
                yield replace(tiles, scan=launch) if group == "scan" else replace(tiles, reverse_scan=launch)
    elif group == "gradients":
        for values in {64, min(128, wide)}:
            for warps, stages, keys in ((4, 1, 64), (4, 2, 64), (8, 1, 64), (8, 1, wide)):
                yield replace(tiles, gradients=Launch(warps, stages, keys, values))
    elif group == "prepare" and channel:
        yield from (replace(tiles, prepare=Launch(warps)) for warps in (4, 8))
    elif group == "pair_gradients" and channel:
        for values in {64, min(128, wide)}:
            yield from (replace(tiles, pair_gradients=Launch(warps, values=values)) for warps in (4, 8))


def compile_part(jobs: list[tuple[str, int]], arguments: argparse.Namespace) -> int:
    """Fill the compiler's cache with every `parts`-th candidate."""
    part, parts = arguments.compile
    dtype = DTYPES[arguments.dtype]
    number = 0
    for op, dim in jobs:
        inputs = random_inputs(op, (1, 128, 1, dim), dtype)
        start = default(dtype == torch.float32, padded(dim))
        for group in arguments.groups.split(","):
            for tiles in candidates(start, op, dim, group):
                if number % parts == part:
                    try:
                        with forced(tiles):
                            evaluate(op, inputs, "triton")
                    except Exception as error:  # reported when it is its turn
                        print(f"{op} {dim} {tiles}: {str(error)[:100]}", file=sys.stderr)
                number += 1
    return 0


def tune(op: str, dim: int, arguments: argparse.Namespace) -> dict[str, Any]:
    dtype = DTYPES[arguments.dtype]
    small = random_inputs(op, (1, 500, 2, dim), dtype)
    reference = evaluate(op, {name: x.double() for name, x in small.items()}, "reference")
    big = random_inputs(op, (8, 4096, 16, dim) if dim > 64 else (32, 2048, 8, dim), dtype)
    best = default(dtype == torch.float32, padded(dim))
    log = []
    for group in arguments.groups.split(","):
        ranked: list[tuple[float, int, Tiles]] = []
        for tiles in candidates(best, op, dim, group):
            row: dict[str, Any] = {"op": op, "dim": dim, "group": group, "launch": asdict(tiles)[group]}
            row["inverse"] = tiles.inverse
            try:
                with forced(tiles):
                    once, again = (evaluate(op, small, "triton") for _ in range(2))
                    row["error"] = max(distance(once[name], reference[name]) for name in reference)
                    row["same bits"] = all(torch.equal(once[name], again[name]) for name in once)
                    row["ms"] = kernel_ms(op, big, KERNELS[group])
            except Exception as error:
                row["failed"] = str(error).replace("\n", " ")[:120]
            log.append(row)
            admitted = "failed" not in row and row["error"] <= LIMITS[dtype] and row["same bits"]
            print("  " if admitted else "✗ ", {k: v for k, v in row.items() if k not in ("op", "dim")}, flush=True)
            if admitted:
                ranked.append((row["ms"], len(ranked), tiles))
        if ranked:
            best = min(ranked)[2]
    key = (capability(torch.device("cuda", 0)), padded(dim), *OPS[op])
    print(f"{key}: {best},", flush=True)
    return {"key": key, "tiles": asdict(best), "log": log}


def random_inputs(op: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    B, T, H, D = shape
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", generator=generator)

    rule, decay = OPS[op]
    inputs = {
        "q": F.normalize(normal(B, T, H, D), dim=-1).to(dtype),
        "k": F.normalize(normal(B, T, H, D), dim=-1).to(dtype),
        "v": normal(B, T, H, D).to(dtype),
    }
    if decay != "none":
        inputs["g"] = -0.1 * normal(*(B, T, H, D)[: 4 if decay == "channel" else 3]).exp()
    if rule == "delta":
        inputs["beta"] = normal(B, T, H).sigmoid().to(dtype)
    return inputs


def evaluate(op: str, inputs: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """o, the state and all gradients, for fixed random gradients of both."""
    rule, decay = OPS[op]
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o, state = kernels.chunk(**leaves, rule=rule, decay=decay, output_final_state=True, backend=backend)
    assert state is not None
    generator = torch.Generator(device="cuda").manual_seed(1)
    weights = [torch.randn(x.shape, device="cuda", generator=generator).to(torch.bfloat16) for x in (o, state)]
    grads = torch.autograd.grad(
        [o, state], list(leaves.values()), [w.to(x.dtype) for w, x in zip(weights, (o, state), strict=True)]
    )
    return {"o": o.detach(), "state": state.detach(), **dict(zip(leaves, grads, strict=True))}


def distance(out: Tensor, ref: Tensor) -> float:
    out, ref = out.double(), ref.double()
    error = ((out - ref).norm() / ref.norm()).item()
    return error if error == error else float("inf")


def kernel_ms(op: str, inputs: dict[str, Tensor], names: tuple[str, ...], repeats: int = 6) -> float:
    """Median milliseconds of one kernel in forward and backward of the op."""
    evaluate(op, inputs, "triton")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            evaluate(op, inputs, "triton")
        torch.cuda.synchronize()
    times = sorted(event.device_time_total for event in profiler.events() if event.name in names)
    if not times:
        raise RuntimeError(f"the profiler saw no {' or '.join(names)}")
    return float(times[len(times) // 2]) / 1e3


if __name__ == "__main__":
    sys.exit(main())
