"""Packed sequences through torch, bit for bit: the Triton kernels' tests have the same of theirs."""

from typing import Any

import packed_checks
import pytest
import torch
from recurrence_cases import CELLS

from kernels import chunk, fused_recurrent

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize(("rule", "decay"), CELLS)
def test_chunks_do_not_meet(rule: str, decay: str) -> None:
    packed_checks.assert_recurrences_do_not_meet(chunk, rule, decay, torch.bfloat16, backend="torch")


@pytest.mark.parametrize(("rule", "decay"), CELLS)
def test_steps_do_not_meet(rule: str, decay: str) -> None:
    sizes: dict[str, Any] = {"cuts": packed_checks.SHORT, "backend": "torch"}
    packed_checks.assert_recurrences_do_not_meet(fused_recurrent, rule, decay, torch.bfloat16, **sizes)


@dtypes
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("window", [None, 9])
def test_attention_does_not_meet(dtype: torch.dtype, backend: str, window: int | None) -> None:
    packed_checks.assert_attention_does_not_meet(dtype, backend=backend, window=window)


@dtypes
def test_convolutions_do_not_meet(dtype: torch.dtype) -> None:
    packed_checks.assert_convolutions_do_not_meet(dtype, backend="torch")
