"""Whole models over batches, packed rows and short sequences: what one row has does not depend on what is beside it."""

import model_checks as checks
import pytest
import torch
from support import PUBLISHED, small_options, tiny_lm

EXACT = 1e-10  # float64, as in test_model.py
FLOAT32 = 1e-5  # what the README says of the kernels; two layers around them add some
# A row of logits is rounded to bf16 in other sums, 2⁻⁹ at most each; a gradient of eight copies sums rounded numbers.
BF16 = 0.01

kinds = pytest.mark.parametrize("kind", PUBLISHED)


@kinds
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, FLOAT32), (torch.bfloat16, BF16)], ids=str)
def test_copies_of_a_row(kind: str, dtype: torch.dtype, limit: float) -> None:
    checks.assert_copies_are_one(tiny_lm(small_options(kind), layers=2).to(dtype), limit)


@kinds
def test_float32_is_float32(kind: str) -> None:
    """256 tokens, loss and every gradient, against the same weights in float64 (A13)."""
    model = tiny_lm(small_options(kind), layers=2)
    ids, targets = checks.tokens(model, 1, 256), checks.tokens(model, 1, 256, seed=1)
    out = checks.results(model, ids, targets)
    checks.assert_within(out, checks.results(model.double(), ids, targets), FLOAT32)


@kinds
@pytest.mark.parametrize("length", [1, 2, 32, 64])
def test_short_sequences_train(kind: str, length: int) -> None:
    """In training mode, no longer than a chunk: with the gradients of the token-by-token recurrence, and by these the
    loss changes as it does (B2)."""
    model, reference = (tiny_lm(small_options(kind, backend=name), layers=2).double() for name in ("auto", "reference"))
    ids, targets = checks.tokens(model, 2, length), checks.tokens(model, 2, length, seed=1)
    out, ref = (checks.results(x.train(), ids, targets) for x in (model, reference))
    for name, gradient in ref.items():  # of what one token cannot reach, such as a decay, there is none
        assert (out[name] - gradient).norm() <= EXACT * max(1.0, float(gradient.norm())), name
    rng, step = torch.Generator().manual_seed(2), 1e-6
    wide = {name: p for name, p in model.named_parameters() if p.dtype == torch.float64}  # time scales are float32
    directions = {name: torch.randn(p.shape, generator=rng, dtype=p.dtype) for name, p in wide.items()}
    losses = []
    for sign in (1, -1):
        for name, parameter in wide.items():
            parameter.data += sign * step * directions[name]
        losses.append(float(model.loss(ids, targets)[0].detach()))
        for name, parameter in wide.items():
            parameter.data -= sign * step * directions[name]
    slope = sum(float((out[name] * x).sum()) for name, x in directions.items())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)


@kinds
def test_documents_of_a_packed_row_do_not_meet(kind: str) -> None:
    checks.assert_documents_do_not_meet(tiny_lm(small_options(kind), layers=2))
