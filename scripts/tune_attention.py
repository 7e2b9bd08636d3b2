"""Choose the blocks of the attention kernels on this GPU: `python scripts/tune_attention.py --dims 64,128`.

Kernel by kernel: every candidate is compiled, in processes of its own, then compared with the written-out scores in
float64, output and gradients, and run twice to the same bits; what passes is timed by the profiler at a shape of
SHAPES, and the fastest enters. Prints the entries for kernels/gpu/attention/tiles.py, every candidate's time and error,
and what torch's own attention takes.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds what lies beside it, not its own package

from kernels.gpu.attention.tiles import AttentionTiles, Blocks, HopperBlocks, attention_tiles, forced
from kernels.gpu.limits import capability, padded
from scripts.benchmarking import attention
from scripts.benchmarking.cases import Shape
from scripts.benchmarking.measure import Problem, beyond, kernel_ms, median_ms, one_line, worst

KERNELS = {
    "hopper": "attention_hopper_forward_kernel",
    "forward": "attention_forward_kernel",
    "d_q": "attention_d_q_kernel",
    "d_kv": "attention_d_kv_kernel",
}
SHAPES = {64: Shape(32, 2048, 8, 64), 128: Shape(8, 4096, 16, 128), 256: Shape(4, 4096, 8, 256)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CUDA = torch.device("cuda")

# queries, keys, warps, stages, stages of the masked loops, rounded, registers: what compiles for sm_90 without spilling
# in the main loop, or little.
CANDIDATES: dict[tuple[bool, int], dict[str, list[tuple[Any, ...]]]] = {
    (False, 64): {
        "forward": [
            (128, 64, 4, 3), (128, 64, 4, 4), (64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 4),
            (128, 64, 8, 3, 1, False, 128), (128, 64, 8, 4, 1, False, 128), (64, 64, 4, 3, 1, False, 168),
        ],
        "d_q": [
            (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 4), (128, 64, 4, 3), (64, 64, 4, 3, 1, False, 168),
            (128, 64, 8, 3, 1, False, 128), (128, 64, 8, 2, 1, False, 128), (64, 32, 4, 3, 1, False, 128),
        ],
        "d_kv": [
            (64, 64, 4, 3, 2), (64, 64, 4, 4, 2), (64, 64, 4, 2, 2), (64, 128, 8, 4, 2), (32, 64, 4, 4, 2),
            (32, 64, 4, 3, 2, False, 168), (32, 128, 4, 4, 2),
        ],
    },
    (False, 128): {
        "forward": [
            (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (64, 32, 4, 4), (128, 128, 8, 3),
            (64, 64, 4, 5),
        ],
        "d_q": [
            (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 8, 4), (64, 32, 4, 3), (64, 32, 4, 4),
        ],
        "d_kv": [
            (64, 128, 8, 2, 2), (32, 128, 8, 3, 2), (32, 128, 8, 4, 2), (32, 128, 8, 3, 3), (64, 64, 4, 3, 2, True),
            (32, 64, 4, 3, 2), (32, 64, 4, 4, 2), (64, 128, 8, 3, 2),
        ],
    },
    (False, 256): {
        "forward": [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 1)],
        "d_q": [(64, 32, 8, 2), (64, 32, 4, 1), (32, 64, 8, 1), (64, 64, 8, 2), (128, 32, 8, 1)],
        "d_kv": [(32, 32, 8, 1), (64, 32, 8, 1), (64, 64, 8, 2, 2), (32, 64, 8, 1)],
    },
    (True, 64): {
        "forward": [(32, 32, 4, 1), (32, 32, 4, 2), (64, 32, 4, 1), (64, 64, 8, 1)],
        "d_q": [(32, 32, 4, 1), (32, 32, 4, 2), (64, 32, 4, 1), (64, 32, 8, 1)],
        "d_kv": [(32, 32, 4, 1), (32, 32, 4, 2), (32, 64, 4, 1), (32, 64, 8, 1)],
    },
    (True, 128): {
        "forward": [(32, 32, 4, 1), (32, 32, 4, 2), (64, 32, 4, 1), (64, 32, 8, 1)],
        "d_q": [(32, 32, 8, 1), (16, 32, 4, 1), (32, 16, 4, 1), (32, 32, 8, 2)],
        "d_kv": [(32, 32, 8, 1), (32, 16, 4, 1), (32, 32, 8, 2)],
    },
}  # fmt: skip

# queries, keys, stages, registers, where hopper_forward.py serves: what compiles without spilling.
HOPPER: dict[tuple[torch.dtype, int], list[tuple[int, int, int, int]]] = {
    (torch.bfloat16, 64): [(256, 64, 4, 112), (256, 64, 3, 112), (128, 128, 3, 240)],
    (torch.bfloat16, 128): [(128, 128, 2, 240), (128, 64, 4, 240)],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="128", help="comma-separated head widths: 64, 128, 256")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--groups", default=",".join(KERNELS), help="kernels to tune, comma-separated")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)  # part, parts
    arguments = parser.parse_args()
    dtype, groups = DTYPES[arguments.dtype], arguments.groups.split(",")
    known = [str(dim) for float32, dim in CANDIDATES if float32 == (dtype == torch.float32)]
    for name, values, accepted in (("--groups", groups, list(KERNELS)), ("--dims", arguments.dims.split(","), known)):
        for value in values:
            if value not in accepted:
                parser.error(f"{name}: got {value!r}, accepted: {', '.join(accepted)}")
    dims = [int(dim) for dim in arguments.dims.split(",")]
    if not torch.cuda.is_available():
        parser.error("blocks are measured on an NVIDIA GPU, and there is none here")
    if arguments.compile:
        return compile_part(dims, dtype, groups, *arguments.compile)
    parts = [
        subprocess.Popen([sys.executable, *sys.argv, "--compile", str(part), str(arguments.processes)])
        for part in range(arguments.processes)
    ]
    for part in parts:
        part.wait()
    results = [tune(dim, dtype, groups) for dim in dims]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
    return 0


def candidates(tiles: AttentionTiles, dim: int, dtype: torch.dtype, group: str) -> Iterator[AttentionTiles]:
    """`tiles` with every choice for one kernel; those that do not fit the GPU fail to compile and drop out."""
    if group == "hopper":
        for choice in HOPPER.get((dtype, dim), []):
            yield replace(tiles, hopper=HopperBlocks(*choice))
        return
    for choice in CANDIDATES[dtype == torch.float32, dim][group]:
        changed: dict[str, Any] = {group: Blocks(*choice)}
        instead: dict[str, Any] = {"hopper": None} if group == "forward" else {"hopper_backward": False}
        yield replace(tiles, **changed, **instead)


def inputs_of(dim: int, dtype: torch.dtype, B: int, T: int) -> Problem:
    """At the timed shape's heads, for which the kernels are compiled."""
    return Problem.of(attention.make_inputs(Shape(B, T, SHAPES[dim].H, dim), dtype, CUDA, seed=0))


def compile_part(dims: list[int], dtype: torch.dtype, groups: list[str], part: int, parts: int) -> int:
    """Fill the compiler's cache with every `parts`-th candidate."""
    number = 0
    for dim in dims:
        problem, start = inputs_of(dim, dtype, 1, 256), attention_tiles(CUDA, dtype, dim)
        for group in groups:
            for tiles in candidates(start, dim, dtype, group):
                if number % parts == part:
                    try:
                        with forced(tiles):
                            problem.both(attention.ours("triton"))
                    except Exception as error:  # reported when it is its turn
                        print(f"{dim} {getattr(tiles, group)}: {one_line(error)}", file=sys.stderr)
                number += 1
    return 0


def tune(dim: int, dtype: torch.dtype, groups: list[str]) -> dict[str, Any]:
    call, shape = attention.ours("triton"), SHAPES[dim]
    ragged, full, big = (inputs_of(dim, dtype, B, T) for B, T in ((1, 500), (1, 512), (shape.B, shape.T)))
    best, log = attention_tiles(CUDA, dtype, dim), []
    for group in groups:
        ranked: list[tuple[float, int, AttentionTiles]] = []
        for tiles in candidates(best, dim, dtype, group):
            row: dict[str, Any] = {"dim": dim, "group": group, "blocks": asdict(tiles)[group]}
            admitted = False
            try:
                with forced(tiles):
                    wrong = []
                    for problem in (ragged, full):
                        once, again = (problem.both(call) for _ in range(2))
                        errors = attention.compare(call, problem, attention.ours("reference"), exact)
                        row["error"] = max(row.get("error", 0.0), worst(errors))
                        wrong += beyond(errors, dtype)
                        if not all(torch.equal(a, b) for a, b in zip(once, again, strict=True)):
                            wrong.append("other bits the second time")
                    times = kernel_ms(partial(big.both, call), repeats=6)
                    row |= {"wrong": wrong, "ms": sum(ms for name, ms in times.items() if name == KERNELS[group])}
                admitted = not wrong and row["ms"] > 0
            except Exception as error:
                row["failed"] = one_line(error)
            log.append(row)
            print("  " if admitted else "✗ ", {k: v for k, v in row.items() if k != "dim"}, flush=True)
            if admitted:
                ranked.append((row["ms"], len(ranked), tiles))
        if ranked:
            chosen = min(ranked)[2]
            best = replace(chosen, hopper=chosen.hopper or best.hopper, hopper_backward=best.hopper_backward)
    key = (capability(torch.device("cuda", 0)), dtype, padded(dim))
    print(f"{key}: {best},", flush=True)
    ms = {}
    with forced(best):
        for name, contender in (("ours", call), (attention.PEER, attention.sdpa())):
            ms[f"{name} forward"] = median_ms(partial(big.forward, contender), 10, CUDA)
            ms[f"{name} both"] = median_ms(partial(big.both, contender), 10, CUDA)
    print(f"{shape}, ms: {ms}", flush=True)
    return {"key": key, "tiles": asdict(best), "ms": ms, "log": log}


def exact(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double()


if __name__ == "__main__":
    sys.exit(main())
