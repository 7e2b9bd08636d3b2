"""Loss by position and on what the context has shown, by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import compose_config, small_options, tiny_lm

from kda_lm.checkpoint import open_checkpoint
from kda_lm.errors import UserError
from kda_lm.evaluation.context import ContextScore, Sum, bigrams, count_in, measure_context, seen_before, smoothed
from scripts.evaluating.context import run_context
from scripts.evaluating.score import run as run_evaluate

Run = Callable[..., tuple[dict[str, Any], Path]]
CPU = torch.device("cpu")


def context(ckpt: Path, *overrides: str) -> ContextScore:
    return run_context(compose_config("context", f"ckpt={ckpt}", "accelerator=cpu", *overrides))


def test_by_hand() -> None:
    """Each target in its position, and in one of the three kinds."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(4, (5, 21), generator=rng)  # few, so that bigrams come again
    targets = ids[:, 1:].clone()
    targets[4, 9:] = -100
    targets[2, :6] = -100  # context only, as with strides
    batches = [{"tokens": ids[i : i + 2, :-1], "targets": targets[i : i + 2]} for i in (0, 2, 4)]
    training = np.array([0, 1] * 11 + [2, 3] * 2 + [3, 3], dtype=np.uint16)
    lm = tiny_lm(small_options("kda"), small_options("softmax"))
    score = measure_context(lm, batches, CPU, training, rare=2)

    log_p = lm(ids[:, :-1])[0].double().log_softmax(-1)
    positions = [[0.0, 0] for _ in range(20)]
    kinds: dict[str, list[float]] = {"seen": [0.0, 0], "frequent": [0.0, 0], "other": [0.0, 0]}
    pairs = list(zip(training[:-1].tolist(), training[1:].tolist(), strict=True))
    for row in range(5):
        for t in range(20):
            if targets[row, t] == -100:
                continue
            nll = -float(log_p[row, t, targets[row, t]].detach())
            pair = (int(ids[row, t]), int(targets[row, t]))
            before = [(int(ids[row, s]), int(ids[row, s + 1])) for s in range(t) if targets[row, s] != -100]
            kind = "other" if pair not in before else "frequent" if pairs.count(pair) > 2 else "seen"
            for total in (positions[t], kinds[kind]):
                total[0] += nll
                total[1] += 1
    assert [x.targets for x in score.positions] == [count for _, count in positions]
    for found, (nats, _) in zip(score.positions, positions, strict=True):
        assert found.nats == pytest.approx(nats, rel=1e-5, abs=1e-9)
    for name, (nats, count) in kinds.items():
        assert getattr(score, name).targets == count > 0 and getattr(score, name).nats == pytest.approx(nats, rel=1e-5)
    everything = measure_context(lm, batches, CPU)
    assert everything.frequent.targets == 0 and everything.seen.targets == kinds["seen"][1] + kinds["frequent"][1]


def test_counting_bigrams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Across the parts that the text is read in."""
    tokens = np.random.default_rng(0).integers(0, 7, 1000).astype(np.uint16)
    codes = bigrams(tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64), 7)
    wanted, counts = np.unique(codes, return_counts=True)
    for size in (1, 3, 100, 999, 5000):
        monkeypatch.setattr("kda_lm.evaluation.context.TOKENS", size)
        assert np.array_equal(count_in(tokens, wanted, 7), counts)
        assert np.array_equal(count_in(tokens, wanted[::5], 7), counts[::5])
    assert len(count_in(tokens, wanted[:0], 7)) == 0
    assert count_in(tokens, np.array([10**6]), 7).tolist() == [0]


def test_what_was_seen() -> None:
    codes = np.array([[5, 6, 5, -1, 5, -1], [6, 7, 8, 9, 9, 6]])
    assert seen_before(codes).tolist() == [[False, False, True, False, True, False], [False] * 4 + [True] * 2]


def test_ranges_and_curves() -> None:
    score = ContextScore([Sum(float(i), 1) for i in range(11)])
    assert [(a, b, x.nats, x.targets) for a, b, x in score.ranges()] == [
        (0, 0, 0.0, 1), (1, 1, 1.0, 1), (2, 3, 5.0, 2), (4, 7, 22.0, 4), (8, 10, 27.0, 3)
    ]  # fmt: skip
    assert list(smoothed(score.positions)) == [
        (0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.5, 4.5), (7.0, 7.0), (9.5, 9.5)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", [(), ("data.isolate_documents=true", "model.pattern=[gated_delta,linear]")], ids=str
)
def test_the_command(run: Run, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Positions add up to the evaluation's loss, at lengths beyond training, too; whatever the batch."""
    _, folder = run("trained", *options)
    ckpt = folder / "checkpoints" / "last.ckpt"
    for words in (["batch_size=3"], ["seq_len=100", "batch_size=8"]):
        score = context(ckpt, *words, "plot=figures/loss.png", "json=loss.json")
        whole = run_evaluate(compose_config("evaluate", f"ckpt={ckpt}", "accelerator=cpu", *words))
        assert sum(x.targets for x in score.positions) == whole.targets  # type: ignore[union-attr]
        kinds = (score.seen, score.frequent, score.other)
        assert sum(x.targets for x in kinds) == whole.targets  # type: ignore[union-attr]
        for parts in (score.positions, kinds):
            assert sum(x.nats for x in parts) / whole.targets == pytest.approx(whole.loss, rel=1e-5)  # type: ignore[union-attr]
        saved = json.loads(Path("loss.json").read_text())
        assert len(saved["loss_by_position"]) == saved["seq_len"] and saved["seen"]["targets"] == score.seen.targets
        assert Path("figures/loss.png").read_bytes()[1:4] == b"PNG" and Path("figures/loss.png").stat().st_size > 9000
    printed = capsys.readouterr().out
    assert "64–99" in printed and "at most 10 times in training" in printed
    assert context(ckpt, "rare=null").frequent.targets == 0


def test_losses_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of logits are made in parts: the same numbers."""
    lm = tiny_lm(small_options("kda"))
    ids = torch.randint(29, (3, 18), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    scores = []
    for rows in (7, 4096):
        monkeypatch.setattr("kda_lm.evaluation.context.ROWS", rows)
        scores.append([x.nats for x in measure_context(lm, [batch], CPU).positions])
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)
    assert sum(scores[0]) == pytest.approx(float(lm.loss(**batch)[0].detach()), rel=1e-5)


def test_nothing_to_measure() -> None:
    score = measure_context(tiny_lm(small_options("kda")), [], CPU)
    assert score.positions == [] and math.isnan(score.seen.loss) and score.ranges() == []


def test_refusals(run: Run, corpus: Path) -> None:
    _, folder = run("trained")
    ckpt = folder / "checkpoints" / "last.ckpt"
    for option, said in (
        ("seq_len=1", "seq_len is 1"),
        ("rare=-1", "rare is -1"),
        ("plot=loss.gif", r"plot is 'loss.gif'; it takes a file that ends in .png, .svg, .pdf"),
        ("stride=3", "stride"),
    ):
        with pytest.raises(UserError, match=said):
            context(ckpt, option if option != "stride=3" else "+stride=3")
    Path("other.txt").write_text("the union is strong and so on and so on", encoding="utf-8")
    assert open_checkpoint(ckpt, CPU).step == 8
    corpus.write_text(corpus.read_text() + "More.\n", encoding="utf-8")
    with pytest.raises(UserError, match="has changed since; rare=null does without it"):
        context(ckpt, "text=other.txt", "seq_len=12")
    assert context(ckpt, "text=other.txt", "seq_len=12", "rare=null").seen.targets > 0
