"""Softmax attention through torch against its written-out scores."""

import pytest
import torch
from recurrence_cases import BFLOAT16_ERROR, FLOAT64_ERROR, error
from torch import Tensor

from kernels import softmax_attention


def make(T: int, S: int, HQ: int = 4, HKV: int = 2, D: int = 6, B: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = ((B, T, HQ, D), (B, S, HKV, D), (B, S, HKV, D))
    q, k, v = (torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def results(q: Tensor, k: Tensor, v: Tensor, **options: object) -> list[Tensor]:
    o = softmax_attention(q, k, v, **options)  # type: ignore[arg-type]
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [o, *torch.autograd.grad((o * weights).sum(), (q, k, v))]


@pytest.mark.parametrize(("T", "S"), [(1, 1), (7, 7), (1, 9), (3, 9)])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("scale", [None, 1.0, 0.37])
def test_backends_agree(T: int, S: int, heads: tuple[int, int], scale: float | None) -> None:
    inputs = make(T, S, *heads)
    torch_ = results(*inputs, scale=scale)
    reference = results(*inputs, scale=scale, backend="reference")
    assert all(error(a, b) <= FLOAT64_ERROR for a, b in zip(torch_, reference, strict=True))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_packed_sequences_are_separate(backend: str) -> None:
    q, k, v = make(12, 12, B=1)
    bounds = [0, 0, 1, 5, 5, 12]
    o = softmax_attention(q, k, v, cu_seqlens=torch.tensor(bounds), backend=backend)
    for start, end in ((0, 1), (1, 5), (5, 12)):
        alone = softmax_attention(q[:, start:end], k[:, start:end], v[:, start:end], backend=backend)
        assert error(o[:, start:end], alone) <= FLOAT64_ERROR


def test_last_queries_of_a_cache() -> None:
    """The last T queries over S cached keys give what the full pass gave them."""
    q, k, v = make(9, 9)
    full = softmax_attention(q, k, v)
    for T in (1, 2, 8):
        assert error(softmax_attention(q[:, -T:], k, v), full[:, -T:]) <= FLOAT64_ERROR


def test_dtype_is_that_of_v() -> None:
    q, k, v = make(20, 20)
    ref = softmax_attention(*(x.bfloat16().double() for x in (q, k, v)), backend="reference")
    o = softmax_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert o.dtype == torch.bfloat16 and error(o, ref) <= 2 * BFLOAT16_ERROR  # weights are rounded, too
    with torch.autocast("cpu", torch.bfloat16):
        assert softmax_attention(q.float(), k.float(), v.float()).dtype == torch.float32
