"""Whole models under torch.compile and under checkpointing of their layers: the same numbers, and no layer left out.

Tracing takes its time from the chunkwise recurrence in torch, which is unrolled: chunks have two tokens here.
test_model_gpu.py has the real compiler, and tests/kernels every op by itself through its forward and backward.
"""

from collections.abc import Iterator

import model_checks as checks
import pytest
import torch
from support import PUBLISHED, small_options, tiny_lm
from torch._dynamo.utils import counters

from kernels import chunk_torch


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chunk_torch, "CHUNK", 2)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def assert_one_whole_graph_a_kind(kinds: int) -> None:
    assert counters["stats"]["unique_graphs"] == kinds and not counters["graph_break"], counters["graph_break"]


@pytest.mark.usefixtures("fresh_compiler")
def test_four_layers_of_each_kind_evaluate_without_a_graph_break() -> None:
    """Without gradients, as in validation, a compiler traces another way than with them (B10)."""
    model = tiny_lm(*map(small_options, PUBLISHED), layers=4 * len(PUBLISHED))
    ids = checks.tokens(model, 2, 3)
    with torch.no_grad():
        eager, _ = model.loss(ids, ids)
        model.compile_blocks(backend="eager")
        assert torch.equal(model.loss(ids, ids)[0], eager)
    assert_one_whole_graph_a_kind(len(PUBLISHED))


@pytest.mark.usefixtures("fresh_compiler")
def test_two_compiled_steps() -> None:
    """Losses, gradients and weights are those of eager steps; the second step compiles nothing (B9, B10)."""
    model = tiny_lm(small_options("kda"), layers=4).train()
    eager = checks.two_steps(model, 3)
    model.compile_blocks(backend="aot_eager")
    compiled = checks.two_steps(model, 3)
    assert_one_whole_graph_a_kind(1)
    assert not torch.equal(compiled["loss.0"], compiled["loss.1"])
    checks.assert_within(compiled, eager, 1e-6)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_checkpointed_layers_under_autocast(kind: str) -> None:
    checks.assert_checkpointing_changes_nothing(tiny_lm(small_options(kind), layers=4).train(), torch.bfloat16)
