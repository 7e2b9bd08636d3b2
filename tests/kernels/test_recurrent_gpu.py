"""The kernel that goes token by token on a GPU, against the recurrence in float64: skipped, visibly, without one.

What it shares with the chunkwise ones bit for bit (causality, rows, strides) is tested beside them, in
test_chunk_gpu.py.
"""

from typing import Any

import gpu_checks
import kernel_checks as checks
import pytest
import torch
from gpu_checks import (
    BFLOAT16,
    DEVICE,
    FLOAT32,
    ROUNDED,
    SIZES,
    assert_within,
    cells,
    dtypes,
    give_memory_back,  # noqa: F401 for every test here
    kinds,
    make,
    reference,
    triton,
)
from recurrence_cases import error, make_raw, raw_options
from torch import Tensor

from kernels import chunk, fused_recurrent

pytestmark = gpu_checks.required


@cells
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_matches_float64(rule: str, decay: str, dtype: torch.dtype) -> None:
    """One token for many sequences, and a few tokens; the state is float32 and exact to it."""
    for T, B in ((1, 256), (7, 3)):
        inputs = make(rule, decay, T, dtype, B=B, K=128, V=128)
        before = inputs["initial_state"].clone()
        with torch.no_grad():
            given: dict[str, Any] = {"rule": rule, "decay": decay, "output_final_state": True}
            o, state = fused_recurrent(**inputs, **given, backend="triton")
            ref_o, ref_state = chunk(**{x: y.double() for x, y in inputs.items()}, **given, backend="reference")
        assert state is not None and ref_state is not None
        assert o.dtype == dtype and state.dtype == FLOAT32 and torch.equal(inputs["initial_state"], before)
        assert error(o, ref_o) <= ROUNDED[dtype] and error(state, ref_state) <= ROUNDED[FLOAT32]


@kinds
def test_packed_and_uneven(rule: str, decay: str) -> None:
    bounds = torch.tensor([0, 0, 1, 4, 4, 9], device=DEVICE)
    inputs = make(rule, decay, 9, N=5, K=72, V=200)
    out = triton(inputs, rule, decay, fused_recurrent, cu_seqlens=bounds)
    assert_within(out, reference(inputs, rule, decay, cu_seqlens=bounds), BFLOAT16)
    assert torch.equal(out["state"][[0, 3]], inputs["initial_state"][[0, 3]])


@kinds
@dtypes
def test_gradients(rule: str, decay: str, dtype: torch.dtype) -> None:
    """They are the chunkwise form's, and as exact."""
    inputs = checks.placed(make_raw(rule, decay, 40, **{**SIZES, "B": 2}), DEVICE, dtype)
    options = raw_options(inputs)
    out = triton(inputs, rule, decay, fused_recurrent, **options)
    assert_within(out, reference(inputs, rule, decay, **options), dtype)


@kinds
def test_8000_steps(rule: str, decay: str) -> None:
    """One by one, the state carried: no drift, every output finite."""
    steps = 8_000
    inputs = make(rule, decay, steps)
    state: Tensor | None = inputs.pop("initial_state")
    begin = state
    given: dict[str, Any] = {"rule": rule, "decay": decay, "output_final_state": True}
    outputs = []
    with torch.no_grad():
        for t in range(steps):
            step = checks.at(inputs, slice(t, t + 1))
            o, state = fused_recurrent(**step, initial_state=state, **given, backend="triton")
            outputs.append(o)
        assert begin is not None and state is not None
        exact = {name: x.double() for name, x in inputs.items()}
        ref_o, ref_state = chunk(**exact, initial_state=begin.double(), **given, backend="torch")
    assert ref_state is not None
    assert error(torch.cat(outputs, dim=1), ref_o) <= ROUNDED[BFLOAT16]
    assert error(state, ref_state) <= ROUNDED[FLOAT32]
