"""The kernels compile for every generation of GPUs, without one: shared memory, tensor memory and spilled registers.

A test is one kernel of one op, with all its options, as the op launches it: launches are recorded instead of run. After
a change of kernels or tiles, `python tests/kernels/test_triton_compiles.py` prints `SPILLS` anew.
"""

import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled", allow_module_level=True)

import torch
import triton
from recurrence_cases import CELLS, make_raw
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from kernels.gpu.limits import WIDEST
from kernels.gpu.recurrence import chunk as chunkwise
from kernels.gpu.recurrence import recurrent as recurrence
from kernels.gpu.recurrence.tiles import FLOAT32, HALF, HALF_256, TABLE, Key, Tiles, forced

# Bytes of registers spilled to local memory that a kernel may store, rounded up to the next 64; none if it is not here.
# They depend on the compiler: they hold for TRITON alone.
TRITON = "3.7.1"
SPILLS: dict[str, int] = {
    "default-sm80-bf16-128-delta-channel-pairs_kernel": 1088,
    "default-sm80-bf16-128-delta-channel-scan_kernel": 64,
    "default-sm80-bf16-128-delta-channel-channel_gradients_kernel": 1216,
    "default-sm80-bf16-128-delta-scalar-scan_kernel": 64,
    "default-sm80-bf16-128-delta-scalar-scalar_gradients_kernel": 1408,
    "default-sm80-bf16-256-delta-channel-pairs_kernel": 64,
    "default-sm80-bf16-256-delta-channel-scan_kernel": 1920,
    "default-sm80-bf16-256-delta-channel-channel_gradients_kernel": 384,
    "default-sm80-bf16-256-delta-scalar-scan_kernel": 960,
    "default-sm80-bf16-256-delta-scalar-scalar_gradients_kernel": 192,
    "default-sm90-bf16-256-delta-channel-pairs_kernel": 128,
    "default-sm90-bf16-256-delta-channel-scan_kernel": 1216,
    "default-sm90-bf16-256-delta-channel-pair_gradients_kernel": 64,
    "default-sm90-bf16-256-delta-channel-channel_gradients_kernel": 64,
    "default-sm100-bf16-128-delta-channel-pairs_kernel": 64,
    "default-sm100-bf16-128-delta-channel-scan_kernel": 64,
    "default-sm100-bf16-128-delta-channel-channel_gradients_kernel": 1536,
    "default-sm100-bf16-128-delta-scalar-scan_kernel": 64,
    "default-sm100-bf16-128-delta-scalar-scalar_gradients_kernel": 960,
    "default-sm80-fp32-256-delta-scalar-pairs_kernel": 640,
    "default-sm80-fp32-256-delta-scalar-scan_kernel": 6656,
    "default-sm80-fp32-256-delta-scalar-reverse_scan_kernel": 18944,
    "default-sm80-fp32-256-delta-scalar-scalar_gradients_kernel": 2496,
    "default-sm90-fp32-128-delta-channel-pairs_kernel": 3264,
    "default-sm90-fp32-128-delta-channel-reverse_scan_kernel": 320,
    "default-sm90-fp32-128-delta-channel-pair_gradients_kernel": 256,
    "default-sm90-fp32-128-delta-channel-channel_gradients_kernel": 2560,
    "default-sm90-fp32-128-delta-scalar-pairs_kernel": 64,
    "default-sm90-fp32-128-delta-scalar-scan_kernel": 64,
    "default-sm90-fp32-128-delta-scalar-reverse_scan_kernel": 384,
    "default-sm90-fp32-128-delta-scalar-scalar_gradients_kernel": 2496,
    "default-sm100-fp32-128-delta-scalar-pairs_kernel": 64,
    "default-sm100-fp32-128-delta-scalar-scan_kernel": 128,
    "default-sm100-fp32-128-delta-scalar-reverse_scan_kernel": 448,
    "default-sm100-fp32-128-delta-scalar-scalar_gradients_kernel": 2624,
    "default-sm90-fp16-64-delta-channel-pairs_kernel": 64,
    "default-sm90-fp16-64-delta-channel-channel_gradients_kernel": 64,
    "default-sm90-fp16-64-delta-scalar-scalar_gradients_kernel": 640,
    "table-sm90-bf16-64-delta-channel-pairs_kernel": 192,
    "table-sm90-bf16-64-delta-channel-pair_gradients_kernel": 128,
    "table-sm90-bf16-64-delta-channel-channel_gradients_kernel": 448,
    "table-sm90-bf16-64-delta-channel-ragged-pairs_kernel": 192,
    "table-sm90-bf16-64-delta-channel-ragged-pair_gradients_kernel": 128,
    "table-sm90-bf16-64-delta-channel-ragged-channel_gradients_kernel": 576,
    "table-sm90-bf16-64-delta-scalar-scan_kernel": 64,
    "table-sm90-bf16-64-delta-scalar-scalar_gradients_kernel": 384,
    "table-sm90-bf16-64-additive-none-scalar_gradients_kernel": 64,
    "table-sm90-bf16-64-delta-none-scalar_gradients_kernel": 128,
    "table-sm90-bf16-128-delta-channel-pairs_kernel": 320,
    "table-sm90-bf16-128-delta-channel-scan_kernel": 64,
    "table-sm90-bf16-128-delta-channel-channel_gradients_kernel": 448,
    "table-sm90-bf16-128-delta-channel-ragged-pairs_kernel": 512,
    "table-sm90-bf16-128-delta-channel-ragged-scan_kernel": 64,
    "table-sm90-bf16-128-delta-channel-ragged-channel_gradients_kernel": 576,
    "table-sm90-bf16-128-delta-scalar-scan_kernel": 192,
    "table-sm90-bf16-128-delta-scalar-reverse_scan_kernel": 64,
    "table-sm90-bf16-128-delta-scalar-scalar_gradients_kernel": 640,
    "table-sm90-bf16-128-delta-none-scalar_gradients_kernel": 448,
}

KIB = 1024
# Shared memory that one program may take. The default tiles serve every GPU from sm_80 on, so there they have to fit
# the smallest, 99 KiB on sm_86 and sm_89.
SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
DEFAULT_SHARED = {**SHARED, 80: 99}
TENSOR_MEMORY = 512  # columns, from sm_100 on

CHANNEL, SCALAR, NONE = ("delta", "channel"), ("delta", "scalar"), ("additive", "none")
# dtype of q, k, v, β; capability; K = V; cells: the defaults on every generation. Other cells launch the same kernels.
DEFAULTS: list[tuple[torch.dtype, int, int, list[tuple[str, str]]]] = [
    (torch.bfloat16, 80, 128, [CHANNEL, SCALAR]),
    (torch.bfloat16, 80, 256, [CHANNEL, SCALAR]),
    (torch.bfloat16, 90, 256, [CHANNEL]),
    (torch.bfloat16, 100, 128, [CHANNEL, SCALAR, NONE]),
    (torch.float32, 80, 256, [SCALAR]),
    (torch.float32, 90, 128, [CHANNEL, SCALAR]),
    (torch.float32, 100, 128, [SCALAR]),
    (torch.float16, 90, 64, [CHANNEL, SCALAR]),
]
RECURRENT = [(80, 64, CHANNEL), (90, 128, CHANNEL), (90, 128, SCALAR), (90, 256, NONE), (100, 128, CHANNEL)]

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
}


@dataclass
class Kernel:
    """One launch, for one GPU."""

    function: Any
    arguments: dict[str, Any]  # by name, Triton's options too
    capability: int
    limit: int  # bytes of shared memory


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Kernels and arguments of what is launched inside; nothing runs."""
    launches: list[tuple[Any, dict[str, Any]]] = []

    def record(function: Any, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launches.append((function, dict(zip(function.arg_names, positional, strict=False)) | named))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def operation(form: Any, T: int, dtype: torch.dtype, K: int, V: int, rule: str, decay: str) -> None:
    """Forward and backward with every option that the cell has. What they compute is not initialised."""
    inputs = make_raw(rule, decay, T, dtype=torch.float32, B=1, H=16, HV=16, K=K, V=V)
    inputs = {name: x.to(dtype) if name in ("q", "k", "v", "beta") else x for name, x in inputs.items()}
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    results = form(*(leaves.get(name) for name in names), K**-0.5, rule, decay, True, 1.0 if rule == "delta" else 0.0)
    torch.autograd.grad(results, list(leaves.values()), [torch.ones_like(x) for x in results])


def kernels_of(capability: int, limits: dict[int, int], tiles: Tiles, full: bool, *sizes: Any) -> dict[str, Kernel]:
    """By the kernel's name, with "again" where it runs a second time, in the backward. Chunks are `full` or end early:
    compiled for either."""
    with forced(tiles), recorded() as launches:
        operation(chunkwise.chunk, tiles.chunk if full else 2, *sizes)
    limit = limits[capability] * KIB
    found: dict[str, Kernel] = {}
    for f, arguments in launches:
        name = f"{f.__name__}-again" if f.__name__ in found else f.__name__
        found[name] = Kernel(f, arguments, capability, limit)
    return found


def table_entries() -> list[Key]:
    """Of entries that are equal but for the cell, one: the kind of kernels before its variants."""
    cells = [CHANNEL, SCALAR, NONE, *CELLS]
    entries: dict[tuple[int, int, Tiles], Key] = {}
    for key in sorted(TABLE, key=lambda key: (key[:2], cells.index(key[2:]))):
        entries.setdefault((key[0], key[1], TABLE[key]), key)
    return list(entries.values())


def all_kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for dtype, capability, width, cells in DEFAULTS:
        for cell in cells:
            name = "-".join([f"default-sm{capability}", TYPES[dtype], str(width), *cell])
            tiles = FLOAT32 if dtype != torch.bfloat16 else HALF if width < WIDEST else HALF_256
            of = kernels_of(capability, DEFAULT_SHARED, tiles, False, dtype, width, width, *cell)
            found |= {f"{name}-{kernel}": x for kernel, x in of.items()}
    for capability, width, *cell in table_entries():
        tiles = TABLE[capability, width, *cell]
        for full in (True, False) if cell == [*CHANNEL] else (True,):
            name = "-".join([f"table-sm{capability}", "bf16", str(width), *cell, *([] if full else ["ragged"])])
            of = kernels_of(capability, SHARED, tiles, full, torch.bfloat16, width, width, *cell)
            found |= {f"{name}-{kernel}": x for kernel, x in of.items()}
    for capability, width, cell in RECURRENT:
        with recorded() as launches:
            operation(recurrence.recurrent, 2, torch.bfloat16, width, width, *cell)
        function, arguments = launches[0]
        name = "-".join([f"sm{capability}-bf16", str(width), *cell, "recurrent"])
        found[name] = Kernel(function, arguments, capability, DEFAULT_SHARED[capability] * KIB)
    return found


KERNELS = all_kernels()


def source(kernel: Kernel) -> tuple[ASTSource, dict[str, Any]]:
    """As Triton would specialise it: pointers and multiples of 16 are divisible by 16, a 1 is a constant."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, parameter in enumerate(kernel.function.params):
        x = kernel.arguments[parameter.name]
        if parameter.is_constexpr or x is None or (not parameter.do_not_specialize and type(x) is int and x == 1):
            signature[parameter.name] = "constexpr"
            constants[i,] = x
        elif isinstance(x, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[x.dtype]}"
            attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(x, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[x.base.dtype]}{x.block_shape},{x.layout!r}>"
        else:
            signature[parameter.name] = "fp32" if isinstance(x, float) else "i32"
            if isinstance(x, int) and not parameter.do_not_specialize and x % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    options = {name: x for name, x in kernel.arguments.items() if name not in kernel.function.arg_names}
    kind = GluonASTSource if isinstance(kernel.function, GluonJITFunction) else ASTSource
    return kind(kernel.function, signature, constants, attributes), options


def compile_logged(kernel: Kernel) -> tuple[Any, str]:
    """The kernel's metadata and what ptxas says."""
    tool = knobs.nvidia.ptxas_blackwell if kernel.capability >= 100 else knobs.nvidia.ptxas
    if tool is None:
        pytest.skip(f"no ptxas for sm_{kernel.capability} in this triton")
    code, options = source(kernel)
    log = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="triton-cache-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", folder)  # what is in the cache is not compiled, and says nothing
        patch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        with contextlib.redirect_stdout(log):
            result = triton.compile(code, target=GPUTarget("cuda", kernel.capability, 32), options=options)
    return result.metadata, log.getvalue()


def spills(log: str) -> int | None:
    """Bytes that the kernel spills, if ptxas says so."""
    spilled = re.search(r"(\d+) bytes spill stores", log)
    return int(spilled[1]) if spilled else None


def compiled(kernel: Kernel) -> tuple[Any, int | None]:
    """The kernel's metadata and the bytes that it spills."""
    metadata, log = compile_logged(kernel)
    return metadata, spills(log)


@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name: str) -> None:
    """Within the GPU's memories, and without more spilled registers than the tiles were chosen with."""
    metadata, spilled = compiled(KERNELS[name])
    assert metadata.shared <= KERNELS[name].limit, f"{metadata.shared} bytes of shared memory"
    assert getattr(metadata, "tmem_size", None) is None or metadata.tmem_size <= TENSOR_MEMORY
    if triton.__version__ != TRITON or spilled is None:
        pytest.skip(f"compiled; spills are recorded for triton {TRITON}, this is {triton.__version__}")
    assert spilled <= SPILLS.get(name, 0), f"{spilled} bytes spilled"


def test_every_record_is_of_a_kernel() -> None:
    assert SPILLS.keys() <= KERNELS.keys()


def test_the_table_is_all_here() -> None:
    """Every entry is compiled, if not for its own cell."""
    compiled_tiles = {(*key[:2], TABLE[key]) for key in table_entries()}
    assert compiled_tiles == {(*key[:2], tiles) for key, tiles in TABLE.items()}


def main() -> None:
    lines = []
    for name, kernel in KERNELS.items():
        try:
            metadata, spilled = compiled(kernel)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
            continue
        print(f"{name}: {metadata.shared} bytes shared, {spilled} spilled", file=sys.stderr)
        if spilled:
            lines.append(f'    "{name}": {-(-spilled // 64) * 64},')
    print("\n".join([f'TRITON = "{triton.__version__}"', "SPILLS: dict[str, int] = {", *lines, "}"]))


if __name__ == "__main__":
    main()
