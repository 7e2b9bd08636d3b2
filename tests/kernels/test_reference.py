"""The reference against what does not share its lines: the expanded transition, closed sums, plain softmax."""

import pytest
import torch
from recurrence_cases import CELLS, FLOAT64_ERROR, GATED, assert_close, error, evaluate, make_inputs
from torch import Tensor

from kernels import chunk
from kernels.reference import recurrence, softmax_attention


@pytest.mark.parametrize(("rule", "decay"), CELLS)
def test_state_follows_the_expanded_transition(rule: str, decay: str) -> None:
    """S_t = (I − β k kᵀ) Diag(e^g) S_{t−1} + β k vᵀ (article, section 4.1), with β = 1 and no kkᵀ for addition."""
    inputs = make_inputs(rule, decay, 12, B=1, HV=1, K=5, V=3)
    q, k, v, state = (inputs[name][0] for name in ("q", "k", "v", "initial_state"))
    S, identity = state[0], torch.eye(5, dtype=torch.float64)
    o, last = recurrence(
        inputs["q"], inputs["k"], inputs["v"], inputs.get("g"), inputs.get("beta"), 0.37, inputs["initial_state"]
    )
    for t in range(12):
        g = inputs["g"][0, t, 0].expand(5) if decay != "none" else torch.zeros(5, dtype=torch.float64)
        beta = inputs["beta"][0, t, 0] if rule == "delta" else 1.0
        erase = beta * torch.outer(k[t, 0], k[t, 0]) if rule == "delta" else 0.0
        S = (identity - erase) @ torch.diag(g.exp()) @ S + beta * torch.outer(k[t, 0], v[t, 0])
        assert error(o[0, t, 0], 0.37 * q[t, 0] @ S) <= FLOAT64_ERROR
    assert error(last[0, 0], S) <= FLOAT64_ERROR


def test_additive_rule_is_masked_attention() -> None:
    inputs = make_inputs("additive", "scalar", 20, H=2)
    q, k, v, g = (inputs[name] for name in ("q", "k", "v", "g"))
    G = g.cumsum(1)
    between = (G[:, :, None] - G[:, None]).exp()  # [B, T, S, H]
    weights = (torch.einsum("bthk,bshk->btsh", q, k) * between).permute(0, 3, 1, 2).tril()
    ref = 0.37 * torch.einsum("bhts,bshv->bthv", weights, v)
    assert error(recurrence(q, k, v, g, None, 0.37)[0], ref) <= FLOAT64_ERROR


@pytest.mark.parametrize(("rule", "decay"), GATED)
def test_reset_gates_keep_gradients_finite(rule: str, decay: str) -> None:
    inputs = make_inputs(rule, decay, 20, gate="some -inf")
    out = evaluate(chunk, inputs, rule=rule, decay=decay, backend="reference")
    assert all(x.isfinite().all() for x in out.values())
    assert (out["dg"][inputs["g"].isinf()] == 0).all()
    assert (out["dg"] != 0).any()


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
def test_gradients_against_finite_differences(decay: str) -> None:
    inputs = make_inputs("delta", decay, 4, B=1, K=3, V=2)
    names = [name for name in ("q", "k", "v", "g", "beta", "initial_state") if name in inputs]
    leaves = [inputs[name].requires_grad_() for name in names]

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        x = dict(zip(names, tensors, strict=True))
        return recurrence(x["q"], x["k"], x["v"], x.get("g"), x["beta"], 0.37, x["initial_state"])

    assert torch.autograd.gradcheck(function, leaves)


def test_packed_sequences_are_separate() -> None:
    inputs = make_inputs("delta", "channel", 10, B=1, N=3)
    packed = evaluate(
        chunk, inputs, rule="delta", decay="channel", backend="reference", cu_seqlens=torch.tensor([0, 4, 4, 10])
    )
    parts = []
    for n, (start, end) in enumerate([(0, 4), (4, 10)]):
        piece = {name: x[:, start:end] for name, x in inputs.items()}
        piece["initial_state"] = inputs["initial_state"][[0, 2][n]][None]
        parts.append(chunk(**piece, rule="delta", decay="channel", backend="reference", output_final_state=True))
    states = [parts[0][1], inputs["initial_state"][1:2], parts[1][1]]
    ref = {"o": torch.cat([o for o, _ in parts], dim=1), "state": torch.cat([s for s in states if s is not None])}
    assert_close({name: packed[name] for name in ref}, ref, 0.0)


def test_softmax_attention_by_hand() -> None:
    """One query over two keys: weights e^s / Σ e^s; a first token that can only return its own value."""
    q = torch.tensor([[[[1.0]], [[2.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[0.5]], [[-1.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[3.0]], [[7.0]]]], dtype=torch.float64)
    weight = torch.sigmoid(torch.tensor(0.5 * 2 * (0.5 + 1), dtype=torch.float64))
    expected = torch.stack([torch.tensor(3.0, dtype=torch.float64), 3 * weight + 7 * (1 - weight)])
    assert error(softmax_attention(q, k, v, 0.5).flatten(), expected) <= FLOAT64_ERROR
