"""Choose the tiles of the chunkwise kernels on this GPU: `python scripts/tune.py --ops kda --dims 128 [--json FILE]`.

Kernel by kernel: every candidate is compiled, in processes of its own, then compared with the float64 recurrence,
forward and gradients, and run twice to the same bits; what passes is timed by the profiler, kernel by kernel, on random
data, and the fastest enters. Prints the entries for kernels/gpu/recurrence/tiles.py, every candidate's time and error.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds what lies beside it, not its own package

from kernels.gpu.limits import capability, padded
from kernels.gpu.recurrence.tiles import Launch, Tiles, default, forced
from scripts.benchmark import DTYPES, Parser, read_ops
from scripts.benchmarking.cases import CELLS, NAMES, Case, Shape, make_inputs, ours, reference
from scripts.benchmarking.measure import Problem, beyond, differentiate, kernel_ms, one_line, relative_error, worst

# The function whose time a group of options decides.
KERNELS = {
    "prepare": ("prepare_kernel",),
    "pairs": ("pairs_kernel",),
    "scan": ("scan_kernel",),
    "reverse_scan": ("reverse_scan_kernel",),
    "pair_gradients": ("pair_gradients_kernel",),
    "gradients": ("channel_gradients_kernel", "scalar_gradients_kernel"),
}


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=read_ops, default=["kda"], metavar="OP,…", help=", ".join(NAMES.values()))
    parser.add_argument("--dims", default="128", help="comma-separated K = V")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--groups", default=",".join(KERNELS), help="kernels to tune, comma-separated")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)  # part, parts
    arguments = parser.parse_args()
    for name, values, accepted in (
        ("--groups", arguments.groups, list(KERNELS)),
        ("--dims", arguments.dims, ["64", "128", "256"]),
    ):
        for value in values.split(","):
            if value not in accepted:
                parser.error(f"{name}: got {value!r}, accepted: {', '.join(accepted)}")
    for op in arguments.ops:
        if op not in CELLS:
            parser.error(f"--ops: got {op!r}, accepted: {', '.join(CELLS)}; tune_attention.py has the other")
    jobs = [(op, int(dim)) for op in arguments.ops for dim in arguments.dims.split(",")]
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
    channel, wide = CELLS[op][1] == "channel", padded(dim)
    if group == "pairs":
        for inverse in ("fp16", "tf32") if CELLS[op][0] == "delta" and tiles.chunk == 64 else (tiles.inverse,):
            for keys in {64, wide}:
                for registers in (None, 168):
                    yield replace(tiles, inverse=inverse, pairs=Launch(keys=keys, registers=registers))
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
        yield from (replace(tiles, prepare=Launch(warps, keys=keys)) for warps in (4, 8) for keys in (32, 64))
    elif group == "pair_gradients" and channel:
        for values in {64, min(128, wide)}:
            for warps, registers in ((4, None), (4, 168), (4, 128), (8, None)):
                yield replace(tiles, pair_gradients=Launch(warps, values=values, registers=registers))


def compile_part(jobs: list[tuple[str, int]], arguments: argparse.Namespace) -> int:
    """Fill the compiler's cache with every `parts`-th candidate."""
    part, parts = arguments.compile
    dtype = DTYPES[arguments.dtype]
    number = 0
    for op, dim in jobs:
        problem, call = Problem.of(inputs_of(op, Shape(1, 128, 1, dim), dtype)), ours("triton").bind(Case(op), "chunk")
        start = default(dtype == torch.float32, padded(dim))
        for group in arguments.groups.split(","):
            for tiles in candidates(start, op, dim, group):
                if number % parts == part:
                    try:
                        with forced(tiles):
                            problem.both(call)
                    except Exception as error:  # reported when it is its turn
                        print(f"{op} {dim} {tiles}: {one_line(error)}", file=sys.stderr)
                number += 1
    return 0


def tune(op: str, dim: int, arguments: argparse.Namespace) -> dict[str, Any]:
    dtype = DTYPES[arguments.dtype]
    case = Case(op)
    call = ours("triton").bind(case, "chunk")
    small = inputs_of(op, Shape(1, 500, 2, dim), dtype)
    gradients = (torch.randn_like(small["v"]), torch.randn(1, 2, dim, dim, device=small["v"].device))
    exact = {name: x.double() for name, x in small.items()}
    expected = differentiate(reference(case, False), exact, *gradients)
    big = Problem.of(inputs_of(op, Shape(8, 4096, 16, dim) if dim > 64 else Shape(32, 2048, 8, dim), dtype))
    best = default(dtype == torch.float32, padded(dim))
    log = []
    for group in arguments.groups.split(","):
        ranked: list[tuple[float, int, Tiles]] = []
        for tiles in candidates(best, op, dim, group):
            row: dict[str, Any] = {"op": op, "dim": dim, "group": group, "launch": asdict(tiles)[group]}
            row["inverse"] = tiles.inverse
            admitted = False
            try:
                with forced(tiles):
                    once, again = (differentiate(call, small, *gradients) for _ in range(2))
                    errors = {name: relative_error(once[name], ref) for name, ref in expected.items()}
                    row["error"] = worst(errors)
                    row["same bits"] = all(torch.equal(once[name], again[name]) for name in once)
                    row["ms"] = ms_of(lambda: big.both(call), KERNELS[group])
                admitted = not beyond(errors, dtype) and row["same bits"]
            except Exception as error:
                row["failed"] = one_line(error)
            log.append(row)
            print("  " if admitted else "✗ ", {k: v for k, v in row.items() if k not in ("op", "dim")}, flush=True)
            if admitted:
                ranked.append((row["ms"], len(ranked), tiles))
        if ranked:
            best = min(ranked)[2]
    key = (capability(torch.device("cuda", 0)), padded(dim), *CELLS[op])
    print(f"{key}: {best},", flush=True)
    return {"key": key, "tiles": asdict(best), "log": log}


def inputs_of(op: str, shape: Shape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return make_inputs(Case(op), shape, dtype, torch.device("cuda"), seed=0)


def ms_of(step: Callable[[], object], names: tuple[str, ...]) -> float:
    """Milliseconds of one kernel in a step, forward and backward of an op."""
    times = [ms for name, ms in kernel_ms(step, repeats=6).items() if name in names]
    if not times:
        raise RuntimeError(f"the profiler saw no {' or '.join(names)}")
    return sum(times)


if __name__ == "__main__":
    sys.exit(main())
