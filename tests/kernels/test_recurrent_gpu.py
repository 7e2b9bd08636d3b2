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
    FLOAT16,
    FLOAT32,
    KINDS,
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


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("rule", "decay", "normalize"), [*((*x, False) for x in KINDS), ("additive", "none", True)])
def test_8000_steps(rule: str, decay: str, normalize: bool, dtype: torch.dtype) -> None:
    """The quotient of the normaliser is of float32, and rounded once."""
    checks.assert_long_decoding(8_000, dtype, DEVICE, "triton", rule, decay, normalize, ROUNDED[dtype])


@kinds
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_same_bits_every_time(rule: str, decay: str, dtype: torch.dtype) -> None:
    inputs = make(rule, decay, 5, dtype, B=8)
    gradients = checks.weights(inputs)
    first, *others = (checks.results(fused_recurrent, inputs, *gradients, rule=rule, decay=decay) for _ in range(20))
    for other in others:
        checks.assert_same(other, first)


@kinds
@pytest.mark.parametrize("D", [48, 72, 96])
def test_widths_between_powers_of_two(rule: str, decay: str, D: int) -> None:
    """Four times, with NaN in new memory (B15)."""
    inputs = make(rule, decay, 3, K=D, V=D)
    first, *others = (triton(inputs, rule, decay, fused_recurrent) for _ in range(4))
    assert_within(first, reference(inputs, rule, decay), BFLOAT16)
    for other in others:
        checks.assert_same(other, first)
