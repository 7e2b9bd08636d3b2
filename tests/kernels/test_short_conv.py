"""The short convolution against torch's conv1d and against itself, cut anywhere."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from recurrence_cases import BFLOAT16_ERROR, FLOAT64_ERROR, error
from torch import Tensor

from kernels import short_convolution

D = 5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor) -> Tensor:
    y = F.conv1d(torch.cat([state, x], dim=1).mT, weight[:, None], bias, groups=D).mT
    return F.silu(y) if activation else y


@pytest.mark.parametrize("W", range(1, 9))
@pytest.mark.parametrize("T", [1, 2, 3, 9])
@pytest.mark.parametrize(("biased", "activation"), [(False, None), (True, "silu")])
def test_matches_conv1d(W: int, T: int, biased: bool, activation: str | None) -> None:
    """Output, state and the gradients of everything, the initial state included."""
    leaves = [normal(2, T, D), normal(D, W, seed=1), normal(2, W - 1, D, seed=2)]
    leaves += [normal(D, seed=3)] if biased else []
    x, weight, state = (leaf.requires_grad_() for leaf in leaves[:3])
    bias = leaves[3].requires_grad_() if biased else None
    y, last = short_convolution(x, weight, bias, activation, state, output_final_state=True)
    ref, ref_last = by_conv1d(x, weight, bias, activation, state), torch.cat([state, x], dim=1)[:, T:]
    assert last is not None and torch.equal(last, ref_last) and last.shape == (2, W - 1, D)
    assert error(y, ref) <= FLOAT64_ERROR
    grads = (
        torch.autograd.grad((a * normal(*a.shape, seed=4)).sum() + (b * normal(*b.shape, seed=5)).sum(), leaves)
        for a, b in ((y, last), (ref, ref_last))
    )
    assert all(error(a, b) <= FLOAT64_ERROR for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("W", [1, 2, 4, 8])
def test_packed_sequences_are_separate(W: int) -> None:
    """Also sequences shorter than the window and empty ones, whose state passes through."""
    x, weight, state = normal(1, 20, D), normal(D, W, seed=1), normal(6, W - 1, D, seed=2)
    bounds = [0, 0, 2, 3, 3, 11, 20]
    y, last = short_convolution(x, weight, None, "silu", state, True, torch.tensor(bounds))
    assert last is not None
    for n, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            assert torch.equal(last[n], state[n])
            continue
        alone, alone_last = short_convolution(x[:, start:end], weight, None, "silu", state[n : n + 1], True)
        assert alone_last is not None
        assert error(y[:, start:end], alone) <= FLOAT64_ERROR and torch.equal(last[n], alone_last[0])


def test_packed_gradients_stay_in_their_sequence() -> None:
    x, weight, state = normal(1, 9, D).requires_grad_(), normal(D, 4, seed=1), normal(3, 3, D).requires_grad_()
    y, _ = short_convolution(x, weight, None, None, state, cu_seqlens=torch.tensor([0, 4, 4, 9]))
    dx, dstate = torch.autograd.grad(y[:, 4:].sum(), (x, state))
    assert (dx[:, :4] == 0).all() and (dx[:, 4:] != 0).all()
    assert (dstate[:2] == 0).all() and (dstate[2] != 0).all()


@pytest.mark.parametrize("cut", [1, 2, 3, 10])
def test_split_with_carried_state(cut: int) -> None:
    x, weight = normal(2, 12, D), normal(D, 4, seed=1)
    whole, last = short_convolution(x, weight, output_final_state=True)
    head, state = short_convolution(x[:, :cut], weight, output_final_state=True)
    tail, end = short_convolution(x[:, cut:], weight, initial_state=state, output_final_state=True)
    assert last is not None and end is not None
    assert torch.equal(torch.cat([head, tail], dim=1), whole) and torch.equal(end, last)


def test_state_is_the_callers_own() -> None:
    """Neither what came in nor what went out changes with the tensors of the other call."""
    x, weight, state = normal(2, 1, D), normal(D, 4, seed=1), normal(2, 3, D, seed=2)
    for bounds in (None, torch.tensor([0, 1, 2])):
        tokens = x if bounds is None else x.transpose(0, 1).contiguous()
        before = state.clone()
        _, last = short_convolution(tokens, weight, initial_state=state, output_final_state=True, cu_seqlens=bounds)
        assert last is not None
        kept = last.clone()
        assert torch.equal(state, before)
        tokens.add_(1.0)
        state.add_(1.0)
        assert torch.equal(last, kept)
    assert short_convolution(x, weight)[1] is None


def test_future_never_changes_the_past() -> None:
    x, weight = normal(1, 12, D).float(), normal(D, 4, seed=1).float()
    y, _ = short_convolution(x, weight)
    x[:, 7:] = 99.0
    assert torch.equal(short_convolution(x, weight)[0][:, :7], y[:, :7])


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast: bool) -> None:
    """bfloat16 inputs and float32 weights: summed in float32, rounded once, state in the inputs' dtype."""
    x, weight = normal(2, 30, D).bfloat16(), normal(D, 4, seed=1).float()
    ref, _ = short_convolution(x.double(), weight.double(), activation="silu")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, last = short_convolution(x, weight, activation="silu", output_final_state=True)
    assert last is not None
    assert y.dtype == last.dtype == torch.bfloat16
    assert error(y, ref) <= BFLOAT16_ERROR


@pytest.mark.parametrize("bounds", [None, [0, 0, 4, 9]])
def test_in_parts(bounds: list[int] | None) -> None:
    """The channels of y as tensors of their own; what is not used of them has no gradient."""
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    x, weight, state = normal(1, 9, D), normal(D, 4, seed=1), normal(1 if bounds is None else 3, 3, D, seed=2)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, state)]
    y, last = short_convolution(x, weight, None, "silu", state, True, cu_seqlens)
    for sizes in ([5], [2, 3], [1, 1, 3]):
        parts, same = short_convolution(x, weight, None, "silu", state, True, cu_seqlens, sizes=sizes)
        assert isinstance(parts, tuple) and [part.shape[2] for part in parts] == sizes
        assert all(part.is_contiguous() for part in parts) and torch.equal(torch.cat(parts, dim=-1), y)
        assert same is not None and last is not None and torch.equal(same, last)
        grads = (
            torch.autograd.grad(z.sin().sum(), leaves, retain_graph=True) for z in (parts[-1], y[..., -sizes[-1] :])
        )
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("T", [1, 2, 9])
def test_in_place(T: int) -> None:
    x, weight, state = torch.randn(2, T, 6), torch.randn(6, 4), torch.randn(2, 3, 6)
    y, last = short_convolution(x, weight, initial_state=state, output_final_state=True)
    assert last is not None and not torch.equal(last, state)
    same_y, nothing = short_convolution(x, weight, initial_state=state, inplace_state=True)
    assert nothing is None and torch.equal(same_y, y) and torch.equal(state, last)
    with pytest.raises(ValueError, match="inplace_state: got True without initial_state"):
        short_convolution(x, weight, inplace_state=True)
