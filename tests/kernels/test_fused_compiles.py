"""The kernels around the recurrence compile for every generation of GPUs, without one: see test_triton_compiles.py.

None of them spills a register, but for the widest rows that cannot be read 16 bytes at a time.
"""

import importlib.util
import os
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled", allow_module_level=True)

import torch
import triton
from test_triton_compiles import DEFAULT_SHARED, KIB, TRITON, Kernel, compiled, recorded
from torch import Tensor

from kernels.gpu.cross_entropy import linear_cross_entropy
from kernels.gpu.norm import norm as norm_of
from kernels.gpu.rotary import rotary
from kernels.gpu.short_conv import short_conv
from kernels.gpu.swiglu import swiglu

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def both(function: Any, *leaves: Tensor, **options: Any) -> None:
    """Forward and backward; what they compute is not initialised."""
    results = [x for x in function(*(x.requires_grad_() for x in leaves), **options) if x is not None]
    torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])


def conv(T: int, sizes: list[int], W: int, dtype: torch.dtype, packed: bool, everything: bool) -> None:
    D = sum(sizes)
    x, weight, bias, state = (torch.zeros(*n, dtype=dtype) for n in ((1, T, D), (D, W), (D,), (1, W - 1, D)))
    leaves = (x, weight, bias, state) if everything else (x, weight)
    bounds = torch.tensor([0, T]) if packed else None

    def function(x: Tensor, weight: Tensor, bias: Any = None, state: Any = None) -> Any:
        parts, last = short_conv(x, weight, bias, state, bounds, sizes, True, True, False)
        return *parts, last

    both(function, *leaves)


def norm(N: int, dtype: torch.dtype, gated: bool) -> None:
    x, gate, weight = torch.zeros(16, N, dtype=dtype), torch.zeros(16, N, dtype=dtype), torch.zeros(N)
    if gated:
        both(lambda x, *others: norm_of(x, None, *others, 1e-6, True, dtype), x, gate, weight)
    else:
        both(lambda x, weight: norm_of(x, None, None, weight, 1e-6, True, dtype), x, weight)


def add_norm(N: int, x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    x, y, weight = torch.zeros(16, N, dtype=x_dtype), torch.zeros(16, N, dtype=dtype), torch.zeros(N)
    both(lambda x, y, weight: norm_of(x, y, None, weight, 1e-6, True, dtype), x, y, weight)


def gate(N: int, dtype: torch.dtype) -> None:
    both(lambda x: [swiglu(x)], torch.zeros(16, 2 * N, dtype=dtype))


def turn(D: int, T: int, dtype: torch.dtype, norm: bool) -> None:
    x, weight = torch.zeros(1, T, 3, D, dtype=dtype), torch.zeros(D)
    positions, turns = torch.arange(T), torch.zeros(D // 2)
    if norm:
        both(lambda x, weight: [rotary(x, positions, turns, weight, 1e-6)], x, weight)
    else:
        both(lambda x: [rotary(x, positions, turns, None, 1e-6)], x)


def loss(vocab: int, dtype: torch.dtype) -> None:
    x, weight = torch.zeros(4, 16, dtype=dtype), torch.zeros(vocab, 16, dtype=dtype)
    both(lambda *leaves: [linear_cross_entropy(*leaves, torch.zeros(4, dtype=torch.int64), -100, 0.1)], x, weight)


OPERATIONS = {
    "conv-bf16": (conv, 64, [256], 4, BFLOAT16, False, False),
    "conv-bf16-everything": (conv, 64, [200], 4, BFLOAT16, True, True),
    "conv-bf16-width8": (conv, 64, [256], 8, BFLOAT16, False, False),
    "conv-fp32": (conv, 64, [256], 4, FLOAT32, False, False),
    "conv-bf16-step": (conv, 1, [256], 4, BFLOAT16, False, True),
    "conv-parts-bf16": (conv, 64, [256, 128, 384], 4, BFLOAT16, False, False),
    "conv-parts-bf16-everything": (conv, 64, [200, 72], 4, BFLOAT16, True, True),
    "norm-128-bf16": (norm, 128, BFLOAT16, True),
    "norm-1024-bf16": (norm, 1024, BFLOAT16, False),
    "norm-8192-fp32": (norm, 8192, FLOAT32, True),
    "norm-8191": (norm, 8191, BFLOAT16, True),
    "add-norm-768-bf16": (add_norm, 768, FLOAT32, BFLOAT16),
    "add-norm-1024-bf16": (add_norm, 1024, BFLOAT16, BFLOAT16),
    "add-norm-8192": (add_norm, 8192, FLOAT32, BFLOAT16),
    "swiglu-2048-bf16": (gate, 2048, BFLOAT16),
    "swiglu-2736-fp32": (gate, 2736, FLOAT32),
    "swiglu-1365": (gate, 1365, BFLOAT16),
    "rotary-64-bf16": (turn, 64, 2048, BFLOAT16, True),
    "rotary-96-bf16": (turn, 96, 1, BFLOAT16, True),
    "rotary-256-fp32": (turn, 256, 33, FLOAT32, False),
    "loss-32000-bf16": (loss, 32000, BFLOAT16),
    "loss-50257-fp32": (loss, 50257, FLOAT32),
}
SPILLS = {  # bytes, with TRITON
    "norm-8191-sm90-norm_gradients_kernel": 320,
    "conv-parts-bf16-everything-sm100-short_conv_gradients_kernel": 4,  # of 128 registers
    "rotary-96-bf16-sm80-rotary_kernel": 8,  # around cosine and sine of large angles
}
CAPABILITIES = (80, 90, 100)


def all_kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for name, (operation, *arguments) in OPERATIONS.items():
        with recorded() as launches:
            operation(*arguments)
        for function, given in launches:
            for capability in CAPABILITIES:
                if capability == 90 or name.endswith(("bf16", "everything")):
                    limit = DEFAULT_SHARED[capability] * KIB
                    found[f"{name}-sm{capability}-{function.__name__}"] = Kernel(function, given, capability, limit)
    return found


KERNELS = all_kernels()


@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name: str) -> None:
    metadata, spilled = compiled(KERNELS[name])
    assert metadata.shared <= KERNELS[name].limit, f"{metadata.shared} bytes of shared memory"
    if triton.__version__ == TRITON and spilled is not None:
        assert spilled <= SPILLS.get(name, 0), f"{spilled} bytes spilled"
