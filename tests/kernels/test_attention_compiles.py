"""Softmax attention compiles for every generation of GPUs, without one, as test_triton_compiles.py has it.

A test is one kernel of one call. After a change of kernels or tiles, `python tests/kernels/test_attention_compiles.py`
prints `SPILLS` anew.
"""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from attention_cases import SCALE, make, make_cache
from test_triton_compiles import (
    DEFAULT_SHARED,
    KIB,
    SHARED,
    TENSOR_MEMORY,
    TRITON,
    TYPES,
    Kernel,
    compile_logged,
    recorded,
    spills,
)

from kernels.gpu.attention.decode import launch
from kernels.gpu.attention.hopper import described, readable
from kernels.gpu.attention.hopper_backward import heads_at_once
from kernels.gpu.attention.operators import attention
from kernels.gpu.attention.tiles import TABLE, AttentionTiles, default, forced
from kernels.gpu.limits import padded

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32

# As in test_triton_compiles.py. The main loops of the forward and of d_q at the measured shapes spill nothing.
SPILLS: dict[str, int] = {
    "default-sm80-fp32-256-attention_forward_kernel": 1024,
    "default-sm80-fp32-256-attention_d_q_kernel": 256,
    "default-sm80-fp32-256-attention_d_kv_kernel": 896,
    "table-sm90-bf16-128-attention_hopper_d_kv_kernel": 128,
    "table-sm90-bf16-128-attention_d_kv_kernel": 64,
    "table-sm90-bf16-256-attention_forward_kernel": 192,
    "table-sm90-bf16-256-attention_d_q_kernel": 128,
    "table-sm90-fp16-128-attention_d_kv_kernel": 64,
    "table-sm90-bf16-128-window-attention_d_q_kernel": 64,
    "table-sm90-bf16-128-window-attention_d_kv_kernel": 64,
    "table-sm90-bf16-128-packed-attention_d_kv_kernel": 384,
    "table-sm90-bf16-96-narrower-attention_d_kv_kernel": 64,
    "sm80-fp32-256-attention_decode_kernel": 192,
}

# dtype, capability, D: the defaults on every generation, with lengths that end inside a block.
DEFAULTS = [
    (BFLOAT16, 80, 128),
    (BFLOAT16, 80, 256),
    (FLOAT16, 80, 128),
    (FLOAT32, 80, 256),
    (FLOAT32, 90, 64),
    (BFLOAT16, 100, 128),
]
# dtype, capability, D, query heads of a key head, new tokens.
DECODING = [(BFLOAT16, 80, 64, 1, 1), (BFLOAT16, 90, 128, 4, 1), (FLOAT32, 80, 256, 1, 1), (BFLOAT16, 100, 128, 4, 16)]


def kernels_of(
    capability: int, limits: dict[int, int], tiles: AttentionTiles, dtype: torch.dtype, T: int, D: int, HQ: int = 16,
    **options: Any,
) -> dict[str, Kernel]:  # fmt: skip
    """By the kernel's name, forward and backward, 16 key heads."""
    inputs = make(T, HQ=HQ, HKV=16, D=D, dtype=dtype)
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v")]
    with forced(tiles), recorded() as launches:
        o = attention(*leaves, options.get("cu_seqlens"), SCALE, options.get("window"))
        torch.autograd.grad(o, leaves, inputs["d_o"])
    return {f.__name__: Kernel(f, arguments, capability, limits[capability] * KIB) for f, arguments in launches}


def all_kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for dtype, capability, D in DEFAULTS:
        of = kernels_of(capability, DEFAULT_SHARED, default(dtype, padded(D)), dtype, 100, D)
        found |= {f"default-sm{capability}-{TYPES[dtype]}-{D}-{name}": x for name, x in of.items()}
    for (capability, dtype, D), tiles in TABLE.items():
        for variant in (tiles, replace(tiles, hopper=None, hopper_backward=False)):
            of = kernels_of(capability, SHARED, variant, dtype, 256, D)
            found |= {f"table-sm{capability}-{TYPES[dtype]}-{D}-{name}": x for name, x in of.items()}
    tiles = TABLE[90, BFLOAT16, 128]
    bounds = torch.tensor([0, 100], dtype=torch.int32)
    for name, D, options in (
        ("window", 128, {"window": 50}),
        ("packed", 128, {"cu_seqlens": bounds, "HQ": 64}),
        ("narrower", 96, {}),
    ):
        of = kernels_of(90, SHARED, tiles, BFLOAT16, 100, D, **options)
        found |= {f"table-sm90-bf16-{D}-{name}-{kernel}": x for kernel, x in of.items()}
    for dtype, capability, D, group, T in DECODING:
        inputs, lengths = make_cache([100], T, 100, HQ=8 * group, HKV=8, D=D, dtype=dtype)
        with recorded() as launches:
            launch(*inputs.values(), lengths, SCALE, None, 64)
        for function, arguments in launches:
            name = f"sm{capability}-{TYPES[dtype]}-{D}-{function.__name__}"
            found[name] = Kernel(function, arguments, capability, DEFAULT_SHARED[capability] * KIB)
    return found


KERNELS = all_kernels()


def compiled(kernel: Kernel) -> tuple[Any, int | None, bool]:
    """The kernel's metadata, the bytes that it spills, and whether ptxas serialises its products."""
    metadata, log = compile_logged(kernel)
    return metadata, spills(log), "wgmma.mma_async instructions are serialized" in log


@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name: str) -> None:
    """Within the GPU's memories, and without more spilled registers than the tiles were chosen with."""
    metadata, spilled, serial = compiled(KERNELS[name])
    assert metadata.shared <= KERNELS[name].limit, f"{metadata.shared} bytes of shared memory"
    assert getattr(metadata, "tmem_size", None) is None or metadata.tmem_size <= TENSOR_MEMORY
    if triton.__version__ != TRITON or spilled is None:
        pytest.skip(f"compiled; spills are recorded for triton {TRITON}, this is {triton.__version__}")
    assert spilled <= SPILLS.get(name, 0), f"{spilled} bytes spilled"
    assert not serial, "ptxas serialises the products"


@pytest.mark.parametrize(
    ("served", "changed"),
    [
        (True, {}),
        (True, {"HQ": 64, "T": 77, "B": 3, "window": 77}),
        (False, {"D": 96}),
        (False, {"window": 76}),
        (False, {"S": 101}),
        (False, {"scale": -0.5}),
        (False, {"cu_seqlens": torch.tensor([0, 77], dtype=torch.int32)}),
    ],
    ids=str,
)
def test_which_forward_runs(served: bool, changed: dict[str, Any]) -> None:
    """Gluon's for whole sequences that see all earlier keys; nothing but the kind of call decides."""
    given = {"T": 77, "S": None, "B": 1, "HQ": 16, "D": 128, "dtype": BFLOAT16} | changed
    options = {name: given.pop(name, None) for name in ("cu_seqlens", "scale", "window")}
    inputs = make(**given, HKV=16)
    with forced(TABLE[90, BFLOAT16, 128]), recorded() as launches:
        attention(*(inputs[name] for name in "qkv"), options["cu_seqlens"], options["scale"] or 0.5, options["window"])
    assert [f.__name__ for f, _ in launches] == [f"attention_{'hopper_' * served}forward_kernel"]


@pytest.mark.parametrize(
    ("served", "changed"),
    [
        (True, {}),
        (True, {"HQ": 64, "T": 64, "B": 3}),
        (False, {"D": 64}),
        (False, {"T": 100}),
        (False, {"window": 100}),
        (False, {"S": 256}),
        (False, {"scale": -0.5}),
    ],
    ids=str,
)
def test_which_backward_runs(served: bool, changed: dict[str, Any]) -> None:
    given = {"T": 192, "S": None, "B": 1, "HQ": 16, "D": 128, "dtype": BFLOAT16} | changed
    window, scale = given.pop("window", None), given.pop("scale", 0.5)
    inputs = make(**given, HKV=16)
    leaves = [inputs[name].requires_grad_() for name in "qkv"]
    with forced(TABLE[90, BFLOAT16, given["D"]]), recorded() as launches:
        torch.autograd.grad(attention(*leaves, None, scale, window), leaves, inputs["d_o"])
    kernels = ["delta", "hopper_d_kv", "hopper_d_q"] if served else ["d_q", "d_kv"]
    assert [f.__name__ for f, _ in launches][1:] == [f"attention_{name}_kernel" for name in kernels]


def test_heads_at_once() -> None:
    """As many as the memory holds and divide the programs' work evenly; none where one is too much."""
    for T, heads, group, at_once in (
        (4096, 128, 1, 33),  # 16 pairs of blocks a head: 4 for each of 132 programs
        (4096, 12, 1, 12),
        (4096, 64, 4, 8),
        (16384, 4, 1, 2),
        (32768, 4, 1, 1),
        (32768, 4, 2, None),
        (65536, 1, 1, None),
        (100, 8, 1, None),
    ):
        assert heads_at_once(T, heads, group, 132) == at_once, (T, heads, group)


@pytest.mark.parametrize("D", [64, 128])
def test_what_the_tma_unit_cannot_read_is_copied(D: int) -> None:
    qkv = torch.randn(2, 5, 3, 4, D).bfloat16()
    whole = qkv.unbind(2)[1]
    assert readable(whole) is whole and readable(whole.transpose(1, 2)).data_ptr() == whole.data_ptr()
    for x in (
        whole[..., :1].expand(whole.shape),
        whole[:1].expand(whole.shape),
        qkv.flatten()[1 : 1 + D].view(1, 1, 1, D),
        torch.randn(2, 5, 4 * D + 4).bfloat16()[..., : 4 * D].unflatten(-1, (4, D)),  # begins well, its rows do not
        torch.randn(2, 5, 4, D + 1).bfloat16()[..., :D],
    ):
        copy = readable(x)
        assert copy is not x and torch.equal(copy, x) and copy.is_contiguous() and copy.data_ptr() % 16 == 0
    descriptor = described(whole[:1, :, :1], 64)
    assert descriptor.shape == [1, 5, 1, D] and all(step % 8 == 0 and step > 0 for step in descriptor.strides[:3])


def test_every_record_is_of_a_kernel() -> None:
    assert SPILLS.keys() <= KERNELS.keys()


def main() -> None:
    lines = []
    for name, kernel in KERNELS.items():
        try:
            metadata, spilled, serial = compiled(kernel)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
            continue
        print(f"{name}: {metadata.shared} bytes shared, {spilled} spilled{' SERIAL' * serial}", file=sys.stderr)
        if spilled:
            lines.append(f'    "{name}": {-(-spilled // 64) * 64},')
    print("\n".join([f'TRITON = "{triton.__version__}"', "SPILLS: dict[str, int] = {", *lines, "}"]))


if __name__ == "__main__":
    main()
