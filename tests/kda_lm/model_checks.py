"""What holds of whole models on a CPU and on a GPU alike: the checks that test_model_*.py and test_model_gpu.py share.

A model lies where it is to be run, in the dtype that is to be tried.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from support import error
from torch import Tensor

from kda_lm.decoding import Decoder
from kda_lm.mixers import RecurrentState
from kda_lm.model import LM, LMState

Results = dict[str, Tensor]


def tokens(model: LM, batch: int, length: int, seed: int = 0) -> Tensor:
    ids = torch.randint(29, (batch, length), generator=torch.Generator().manual_seed(seed))
    return ids.to(model.embedding.weight.device)


def packed(lengths: list[int], like: Tensor) -> Tensor:
    return torch.tensor([0, *lengths], device=like.device).cumsum(0).to(torch.int32)


def tensors(states: LMState) -> list[Tensor]:
    return [x for state in states for x in state if x is not None]


def results(model: LM, ids: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Results:
    """The loss and the gradient of every parameter."""
    loss, _ = model.loss(ids, targets, cu_seqlens)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return {"loss": loss.detach(), **dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))}


def assert_within(out: Results, ref: Results, limit: float) -> None:
    """Every result by itself; what is not finite is no number and beyond any limit."""
    assert out.keys() == ref.keys()
    assert {name: error(out[name], ref[name]) for name in ref if not error(out[name], ref[name]) <= limit} == {}


def decode(model: LM, ids: Tensor, prefix: int) -> Tensor:
    """Logits of the tokens from `prefix` − 1 on, [B, T − prefix + 1, vocab]: prefill, then a step a token."""
    decoder = Decoder(model, capacity=ids.shape[1])
    found = [decoder.prefill(ids[:, :prefix].tolist())]
    found += [decoder.step(ids[:, t]).clone() for t in range(prefix, ids.shape[1])]
    return torch.stack(found, dim=1)


@torch.inference_mode()
def assert_segments(model: LM, cuts: list[int], limit: float, length: int = 512) -> None:
    """Logits and last states of segments with carried states are those of one pass (C1)."""
    ids = tokens(model, 2, length)
    whole, last = model(ids)
    state, parts = None, []
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        part, state = model(ids[:, start:end], state=state)
        parts.append(part)
    assert state is not None
    assert error(torch.cat(parts, dim=1), whole) <= limit
    for a, b in zip(tensors(state), tensors(last), strict=True):
        assert a.dtype == b.dtype and error(a, b) <= limit


def assert_copies_are_one(model: LM, limit: float, batch: int = 8, length: int = 40) -> None:
    """A row alone and in a batch of its copies: the same logits, and a gradient as many times as large (A11)."""
    row, targets = tokens(model, 1, length), tokens(model, 1, length, seed=1)
    with torch.no_grad():
        alone, together = model(row)[0], model(row.expand(batch, -1))[0]
    assert torch.equal(together, together[:1].expand_as(together))
    assert error(together[:1], alone) <= limit
    many = results(model, row.expand(batch, -1), targets.expand(batch, -1))
    assert_within({name: x / batch for name, x in many.items()}, results(model, row, targets), limit)


def assert_documents_do_not_meet(model: LM) -> None:
    """What is before, between and after a document's own tokens in a packed row changes no bit of its hidden states,
    of what it carries on and of its tokens' gradients, and parameters' gradients by rounding alone (C6)."""
    lengths, (start, end) = [5, 1, 37, 2, 19], (6, 43)  # the third document
    ids = tokens(model, 1, sum(lengths))
    other = (ids + 1 + tokens(model, 1, sum(lengths), seed=1) % 28) % 29  # every token another one
    other[:, start:end] = ids[:, start:end]
    assert not (other[:, :start] == ids[:, :start]).any() and not (other[:, end:] == ids[:, end:]).any()
    targets = torch.full_like(ids, -100)
    targets[:, start:end] = tokens(model, 1, end - start, seed=2)
    bounds = packed(lengths, ids)
    exact, found = [], []
    for given in (ids, other):
        with embedded(model) as inputs:
            hidden, states = model.hidden_states(given, cu_seqlens=bounds)
            found.append(results(model, given, targets, bounds))
            model.loss(given, targets, bounds)[0].backward()
        carried = [
            x[2] if isinstance(state, RecurrentState) else x[0, start:end]
            for state in states
            for x in (state[:1] + state[-1:] if isinstance(state, RecurrentState) else state[:2])
            if x is not None
        ]
        gradient = inputs[-1].grad
        assert gradient is not None and not gradient[0, :start].any() and not gradient[0, end:].any()
        exact.append([hidden[0, start:end].detach(), gradient[0, start:end], *carried])
    for a, b in zip(*exact, strict=True):
        assert a.numel() and torch.equal(a, b)
    assert_within(found[1], found[0], 1e-6)


@contextmanager
def embedded(model: LM) -> Iterator[list[Tensor]]:
    """The embedding's outputs inside, which keep their gradients."""
    found: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        found.append(output)

    handle = model.embedding.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


@torch.inference_mode()
def assert_states_are_the_callers(model: LM) -> None:
    """One saved state continues twice, by a token and by a segment, and stays as it was (C8)."""
    _, state = model(tokens(model, 2, 5))
    before = [x.clone() for x in tensors(state)]
    ids = tokens(model, 2, 9, seed=1)
    outputs = []
    for _ in range(2):
        first, after = model(ids[:, :1], state)
        second, later = model(ids, state)
        outputs.append([first, second, *tensors(after), *tensors(later)])
        for found in (after, later):
            assert [type(x) for x in found] == [type(x) for x in state]
            assert [x.dtype for x in tensors(found)] == [x.dtype for x in before]
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), before, strict=True))


def assert_checkpointing_changes_nothing(model: LM, dtype: torch.dtype) -> None:
    """Layers run a second time in the backward, under autocast, give the same gradients to the bit (B13)."""
    ids, targets = tokens(model, 2, 33), tokens(model, 2, 33, seed=1)
    found = []
    for model.checkpoint_layers in (False, True):
        with torch.autocast(ids.device.type, dtype):
            found.append(results(model, ids, targets))
    assert all(torch.equal(found[1][name], x) and x.isfinite().all() for name, x in found[0].items())


def two_steps(model: LM, length: int, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> Results:
    """Losses and weights of two steps of descent on different tokens, which leaves the model as it was."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), {}
    for step in range(2):
        ids = tokens(model, 2, length, seed=step)
        result = model.loss(ids, ids)[0] if loss is None else loss(ids, ids)
        result.backward()
        found |= {f"{name}.grad.{step}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss.{step}"] = result.detach().clone()
    assert len(found) == 2 * (1 + len(weights))
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        p.data.copy_(weights[name])
    return found
