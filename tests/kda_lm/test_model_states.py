"""What whole models carry from token to token: a rollout is what one pass over the same tokens would have been."""

import model_checks as checks
import pytest
import torch
from support import PUBLISHED, error, small_options, tiny_lm
from torch import Tensor

from kda_lm.generation import SamplingConfig, generate
from kda_lm.model import LM

EXACT = 1e-10  # float64, as in test_model.py
FLOAT32 = 1e-5
# On a CPU bf16 layers compute in float32 and round what they return, so that a step differs from the whole pass only
# where a float32 rounding decides a bf16 one: not once in six models of each kind. One that does moves a number of
# the 16 of a token by 2⁻⁸ of itself, and the layers behind it make no more of it than of their own roundings.
BF16 = 0.01

kinds = pytest.mark.parametrize("kind", PUBLISHED)


@kinds
@pytest.mark.parametrize("cuts", [[1], [63], [64], [200], [1, 63, 64, 200]], ids=str)
def test_512_tokens_in_segments(kind: str, cuts: list[int]) -> None:
    model = tiny_lm(small_options(kind), layers=2)
    checks.assert_segments(model, cuts, FLOAT32)
    if cuts == [200]:
        checks.assert_segments(model.double(), cuts, EXACT)


@kinds
@torch.inference_mode()
def test_24_layers_and_one_step_in_bf16(kind: str) -> None:
    """All but one of five tokens at once and the last by a step, against five at once (C3)."""
    model = tiny_lm(small_options(kind), layers=24).bfloat16()
    ids = checks.tokens(model, 3, 5)
    assert error(checks.decode(model, ids, 4)[:, -1], model(ids)[0][:, -1]) <= BF16


# ------------------------------------------------------------------------------ what was learned


LENGTH = 4


def copies(batch: int, seed: int) -> Tensor:
    """Random tokens, a 0, and the same tokens again: [batch, 2 · LENGTH + 1]."""
    first = torch.randint(1, 9, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))
    return torch.cat([first, torch.zeros_like(first[:, :1]), first], dim=1)


@pytest.fixture(scope="module")
def copier() -> LM:
    """A DeltaNet that has learned to say again what it read: two seconds."""
    model = tiny_lm(small_options("delta"), layers=2, dim=32, vocab_size=9).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(80):
        ids = copies(32, seed=step)
        targets = ids[:, 1:].clone()
        targets[:, :LENGTH] = -100
        nll, count = model.loss(ids[:, :-1], targets)
        optimizer.zero_grad()
        (nll / count).backward()
        optimizer.step()
    return model.eval()


@torch.inference_mode()
def test_a_trained_model_decodes_what_it_recomputes(copier: LM) -> None:
    """Trained chunkwise, greedy token by token: the same tokens, far beyond what it was trained for, and the first of
    them right (C7)."""
    right = 0
    for row in copies(20, seed=1000).tolist():
        prompt, again = row[: LENGTH + 1], row[: LENGTH + 1]
        cached = [int(x) for x in generate(copier, prompt, 1, SamplingConfig(max_new_tokens=20, temperature=0))]
        for _ in range(20):
            again.append(int(copier(torch.tensor([again]))[0][0, -1].argmax()))
        assert cached == again[len(prompt) :]
        right += cached[:LENGTH] == row[len(prompt) :]
    assert right >= 18
