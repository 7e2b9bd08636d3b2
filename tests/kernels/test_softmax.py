"""Softmax attention through torch against its written-out scores, windows and decoding over a cache included."""

from typing import Any

import pytest
import torch
from recurrence_cases import BFLOAT16_ERROR, FLOAT64_ERROR, error
from torch import Tensor

from kernels import softmax_attention, softmax_decode


def make(T: int, S: int, HQ: int = 4, HKV: int = 2, D: int = 6, B: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = ((B, T, HQ, D), (B, S, HKV, D), (B, S, HKV, D))
    q, k, v = (torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def results(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    o = softmax_attention(q, k, v, **options)
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


@pytest.mark.parametrize(("T", "S"), [(1, 1), (9, 9), (1, 9), (3, 9)])
@pytest.mark.parametrize("window", [1, 2, 4, 8, 9, 100])
def test_window(T: int, S: int, window: int) -> None:
    """By hand: each query by itself over the last keys; by every backend, with its gradients."""
    inputs = make(T, S)
    torch_, reference = (results(*inputs, window=window, backend=name) for name in ("torch", "reference"))
    q, k, v = inputs
    for t in range(T):
        at = slice(max(0, S - T + t + 1 - window), S - T + t + 1)
        alone = softmax_attention(q[:, t : t + 1], k[:, at], v[:, at])
        assert error(torch_[0][:, t : t + 1], alone) <= FLOAT64_ERROR
    for a, b in zip(torch_, reference, strict=True):
        assert (a - b).norm() <= FLOAT64_ERROR * max(1.0, b.norm())
    if window >= S:
        assert all(torch.equal(a, b) for a, b in zip(torch_, results(*inputs), strict=True))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_window_in_packed_sequences(backend: str) -> None:
    q, k, v = make(12, 12, B=1)
    o = softmax_attention(q, k, v, cu_seqlens=torch.tensor([0, 5, 5, 12]), window=3, backend=backend)
    for at in (slice(0, 5), slice(5, 12)):
        assert error(o[:, at], softmax_attention(q[:, at], k[:, at], v[:, at], window=3)) <= FLOAT64_ERROR


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("scale", [None, -0.3])
def test_decode(backend: str, T: int, window: int | None, scale: float | None) -> None:
    """Each row as `softmax_attention` over what it has; what is behind its length may be anything."""
    lengths = [9, 3, 7, 0]
    q, k, v = (x.detach() for x in make(T, 9, B=4))
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = float("nan")
    o = softmax_decode(q, k, v, torch.tensor(lengths), scale, window, backend=backend)
    for b, length in enumerate(lengths[:3]):
        row = (q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length])
        assert error(o[b : b + 1], softmax_attention(*row, scale, window=window)) <= FLOAT64_ERROR
    assert torch.equal(o[3], torch.zeros_like(o[3]))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_decode_of_tokens_before_the_first_position(backend: str) -> None:
    q, k, v = (x.detach() for x in make(5, 9, B=1))
    o = softmax_decode(q, k, v, torch.tensor([2], dtype=torch.int32), backend=backend)
    assert not o[:, :3].any()
    assert error(o[:, 3:], softmax_attention(q[:, 3:], k[:, :2], v[:, :2])) <= FLOAT64_ERROR


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"lengths": [2, 2]}, TypeError, "lengths: got list, accepted: an int32 or int64 tensor"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths: got torch.float32"),
        ({"lengths": torch.tensor([2])}, ValueError, r"lengths: got shape \[1\], accepted: \[B\], here \[2\]"),
        ({"window": 0}, ValueError, "window: got 0, accepted: a whole number from 1 on"),
        ({"scale": "1"}, TypeError, "scale: got str"),
        ({"backend": "cudnn"}, ValueError, "backend: got 'cudnn', accepted: auto, triton, torch, reference"),
        ({"q": torch.ones(2, 10, 4, 6)}, ValueError, "T = 10 queries for S = 9 keys"),
    ],
)
def test_decode_refuses(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    q, k, v = (x.detach() for x in make(1, 9))
    with pytest.raises(kind, match=message):
        softmax_decode(**{"q": q, "k": k, "v": v, "lengths": torch.tensor([9, 9]), **change})


def test_decode_has_no_gradient() -> None:
    inputs, lengths = make(1, 9), torch.tensor([9, 9])
    with pytest.raises(ValueError, match=r"requires gradients, accepted: none; softmax_attention has a backward"):
        softmax_decode(*inputs, lengths)
    with torch.no_grad():
        assert softmax_decode(*inputs, lengths).shape == (2, 1, 4, 6)


@pytest.mark.parametrize(
    ("window", "kind"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), ("2", TypeError)]
)
def test_window_is_a_whole_number(window: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"window: got .*, accepted: a whole number"):
        softmax_attention(*make(3, 3), window=window)
