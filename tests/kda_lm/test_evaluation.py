"""Perplexity and bits per byte by hand, and scripts/evaluate.py against the training run's own numbers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import compose_config, small_options, tiny_lm

from kda_lm.checkpoint import open_checkpoint
from kda_lm.errors import UserError
from kda_lm.evaluation.text import Score, Tally, evaluate
from kda_lm.model import LM
from scripts.evaluating.score import run as run_evaluate

Run = Callable[..., tuple[dict[str, Any], Path]]
CPU = torch.device("cpu")
Batch = dict[str, torch.Tensor]


def score_of(ckpt: Path, *overrides: str) -> Score:
    """What `python scripts/evaluate.py ckpt=… overrides` returns."""
    return run_evaluate(compose_config("evaluate", f"ckpt={ckpt}", "accelerator=cpu", *overrides))


def ragged(length: int = 101, window: int = 16, batch: int = 3) -> list[Batch]:
    """A text of `length` tokens in windows, the last one padded with −100 targets."""
    ids = torch.randint(29, (length,), generator=torch.Generator().manual_seed(0))
    windows = []
    for start in range(0, length - 1, window):
        block = ids[start : start + window + 1]
        tokens, targets = torch.zeros(window, dtype=torch.int64), torch.full((window,), -100)
        tokens[: len(block) - 1], targets[: len(block) - 1] = block[:-1], block[1:]
        windows.append((tokens, targets))
    return [
        {"tokens": torch.stack([a for a, _ in part]), "targets": torch.stack([b for _, b in part])}
        for part in (windows[i : i + batch] for i in range(0, len(windows), batch))
    ]


def model() -> LM:
    return tiny_lm(*(small_options(kind) for kind in ("kda", "softmax", "linear")))


def test_perplexity_by_hand() -> None:
    """exp(Σ NLL / targets) over every target once; bits per byte over the text's bytes (G1)."""
    lm = model()
    nll, targets = 0.0, 0
    for batch in ragged(batch=1):
        log_p = lm(batch["tokens"])[0][0].double().log_softmax(-1)
        for t, target in enumerate(batch["targets"][0].tolist()):
            if target != -100:
                nll, targets = nll - float(log_p[t, target].detach()), targets + 1
    score = evaluate(lm, ragged(), CPU, num_bytes=70)
    assert score.targets == targets == 100
    assert score.loss == pytest.approx(nll / 100, rel=1e-6)
    assert score.perplexity == pytest.approx(math.exp(nll / 100), rel=1e-6)
    assert score.bits_per_byte == pytest.approx(nll / math.log(2) / 70, rel=1e-6)
    assert evaluate(lm, ragged(), CPU).bits_per_byte is None


def test_the_batch_size_does_not_matter() -> None:
    """Three, eight, or one at a time: the same value, and no mean of means (G1, G5)."""
    scores = [evaluate(model(), ragged(batch=size), CPU, 70) for size in (1, 2, 3, 5, 8)]
    assert {score.targets for score in scores} == {100}
    for score in scores[1:]:
        assert score.loss == pytest.approx(scores[0].loss, rel=1e-6)
    means = [float(n / c) for n, c in (model().loss(**b) for b in ragged(batch=3)) if c]
    assert abs(sum(means) / len(means) - scores[0].loss) > 1e-4  # the test can fail


def test_a_tally_adds_in_float64() -> None:
    tally = Tally()
    for _ in range(2000):
        tally.add(torch.tensor(16777216.0), torch.tensor(1))
        tally.add(torch.tensor(1.0), torch.tensor(1))
    assert tally.score().loss == (16777216.0 + 1) / 2


def test_no_targets_are_no_number() -> None:
    score = Tally().score(10)
    assert math.isnan(score.loss) and math.isnan(score.perplexity) and score.targets == 0


def test_a_huge_loss_has_an_infinite_perplexity() -> None:
    tally = Tally()
    tally.add(torch.tensor(1000.0), torch.tensor(1))
    assert tally.score().perplexity == math.inf and tally.score().loss == 1000


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_model_as_it_was(training: bool) -> None:
    lm = model().train(training)
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    evaluate(lm, ragged(), CPU)
    assert lm.training == training and all(p.grad is None for p in lm.parameters())
    assert all(torch.equal(before[name], value) for name, value in lm.state_dict().items())


def test_log_probabilities_are_float32_under_autocast() -> None:
    """Of bf16 logits, exactly: nothing is rounded to bf16 after the head."""
    lm, (batch, *_) = model(), ragged()
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = lm(batch["tokens"])
        nll, count = lm.loss(**batch)
        score = evaluate(lm, [batch], CPU)
    assert logits.dtype == nll.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())  # the head is bf16
    log_p = logits.double().log_softmax(-1)
    expected = -log_p.gather(-1, batch["targets"][..., None]).sum()
    assert float(nll.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert score.loss == pytest.approx(float(expected.detach()) / int(count), rel=1e-6)


# ------------------------------------------------------------------------------ scripts/evaluate.py


@pytest.mark.parametrize(
    "options",
    [(), ("trainer.ema_decay=0.9",), ("data.isolate_documents=true", "model.pattern=[gated_delta,linear]"),
     ("data.tokenizer=bpe", "data.vocab_size=300")],
    ids=["plain", "ema", "isolated", "bpe"],
)  # fmt: skip
def test_evaluate_finds_the_training_runs_numbers(run: Run, options: tuple[str, ...]) -> None:
    """The final validation of the run, from its last checkpoint alone, whatever the batch size."""
    summary, folder = run("trained", *options)
    for batch in (1, 3, 8):
        score = score_of(folder / "checkpoints" / "last.ckpt", f"batch_size={batch}", "precision=32-true")
        assert score.targets == summary["val/targets"]
        assert score.loss == pytest.approx(summary["val/loss"], rel=1e-6)
        assert score.perplexity == pytest.approx(summary["val/perplexity"], rel=1e-6)
        assert score.bits_per_byte == pytest.approx(summary["val/bits_per_byte"], rel=1e-6)


def test_validation_does_not_depend_on_its_batch_size(run: Run) -> None:
    losses = [run(f"b{size}", f"data.val_batch_size={size}")[0]["val/loss"] for size in (3, 8)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_evaluate_with_another_window(run: Run) -> None:
    """Every token after the first is a target at any seq_len, and a softmax model sees further in longer ones."""
    summary, folder = run("trained")
    ckpt = folder / "checkpoints" / "last.ckpt"
    scores = {length: score_of(ckpt, f"seq_len={length}") for length in (1, 7, 16, 100, 5000)}
    assert {score.targets for score in scores.values()} == {summary["val/targets"]}
    assert len({round(score.loss, 6) for score in scores.values()}) == len(scores)


def test_evaluate_with_strides(run: Run) -> None:
    """The same targets; at a stride of 1 each has all the context that a window holds, as by hand."""
    _, folder = run("trained")
    ckpt = folder / "checkpoints" / "last.ckpt"
    Path("other.txt").write_text("Fellow citizens — the union is strong", encoding="utf-8")
    scores = {stride: score_of(ckpt, "text=other.txt", "seq_len=12", f"stride={stride}") for stride in (1, 5, 12)}
    assert scores[12] == score_of(ckpt, "text=other.txt", "seq_len=12")
    ids = torch.tensor([256, *Path("other.txt").read_bytes(), 256])
    lm, nll = open_checkpoint(ckpt, CPU).model, 0.0
    for at in range(1, len(ids)):
        logits = lm(ids[None, max(0, at - 12) : at])[0][0, -1].double()
        nll -= float(logits.log_softmax(-1)[ids[at]].detach())
    assert scores[1].loss == pytest.approx(nll / (len(ids) - 1), rel=1e-5)
    assert {score.targets for score in scores.values()} == {len(ids) - 1}
    assert len({round(score.loss, 6) for score in scores.values()}) == 3
    with pytest.raises(UserError, match=r"stride is 13; it takes at most seq_len = 12"):
        score_of(ckpt, "seq_len=12", "stride=13")


def test_evaluate_other_text_by_hand(run: Run, tmp_path: Path) -> None:
    """A file of one document: its bytes and the end of text are the targets, its bytes are what bits are a part of."""
    _, folder = run("trained")
    ckpt = folder / "checkpoints" / "last.ckpt"
    text = "Fellow citizens — the union is strong"
    (tmp_path / "other.txt").write_text(text, encoding="utf-8")
    score = score_of(ckpt, "text=other.txt", "seq_len=1000", "json=result.json")
    opened = open_checkpoint(ckpt, CPU)
    ids = torch.tensor([256, *text.encode(), 256])
    log_p = opened.model(ids[None, :-1])[0][0].double().log_softmax(-1)
    nll = -float(log_p.gather(-1, ids[1:, None]).sum().detach())
    size = len(text.encode())
    assert score.targets == size + 1
    assert score.loss == pytest.approx(nll / (size + 1), rel=1e-5)
    assert score.bits_per_byte == pytest.approx(nll / math.log(2) / size, rel=1e-5)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["loss"] == score.loss and result["step"] == 8 and result["targets"] == score.targets
    listed = score_of(ckpt, "text=[other.txt]", "seq_len=1000")
    assert listed == score


def test_evaluate_needs_only_the_checkpoint_for_other_text(run: Run, tmp_path: Path, corpus: Path) -> None:
    _, folder = run("trained")
    (tmp_path / "other.txt").write_text("the people of every county", encoding="utf-8")
    corpus.unlink()
    assert score_of(folder / "checkpoints" / "best.ckpt", "text=other.txt").targets == 27


def test_evaluate_and_bf16(run: Run) -> None:
    summary, folder = run("trained")
    score = score_of(folder / "checkpoints" / "last.ckpt", "precision=bf16-mixed")
    assert score.loss == pytest.approx(summary["val/loss"], rel=0.01) and score.loss != summary["val/loss"]


def test_evaluate_from_another_directory(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a run that was given as a relative path is found from anywhere (F6)."""
    summary, _ = run("trained", "data.files=corpus.txt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    score = score_of(Path("../trained/checkpoints/last.ckpt"))
    assert score.loss == pytest.approx(summary["val/loss"], rel=1e-6)


def test_evaluate_with_the_runs_own_tokenizer_file(run: Run) -> None:
    summary, folder = run("trained")
    score = score_of(folder / "checkpoints" / "last.ckpt", f"tokenizer={folder / 'tokenizer.json'}")
    assert score.loss == pytest.approx(summary["val/loss"], rel=1e-6)


@pytest.mark.parametrize(
    "option", ["seq_len=0", "batch_size=0", "stride=0", "seq_len=-1", "batch_size=half", "+windows=3"]
)
def test_refusals(option: str) -> None:
    with pytest.raises(UserError) as caught:
        run_evaluate(compose_config("evaluate", "ckpt=none.ckpt", option))
    assert "\n" not in str(caught.value) and option.strip("+").partition("=")[0] in str(caught.value)
