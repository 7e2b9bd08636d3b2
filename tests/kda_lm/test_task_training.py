"""Training on tasks: what a run reports, resumes and leaves behind, and accuracy by hand."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import TINY_TASK, compose_config, small_options, tiny_lm

from data import DataError
from data.tasks import TASKS, Mixture, Overwrite, Parity, TaskDataModule
from kda_lm.checkpoint import read_checkpoint
from kda_lm.config import plain
from kda_lm.errors import UserError
from kda_lm.evaluation.tasks import TaskTally, accuracy_by, score_tests
from kda_lm.model import LM
from kda_lm.sources import read_source, read_task
from scripts.evaluating.parity import run_parity
from scripts.evaluating.score import run as run_evaluate

CPU = torch.device("cpu")
Start = Callable[..., tuple[dict[str, Any], Path]]


@pytest.fixture
def start() -> Start:
    from train import train

    def call(folder: str, *words: str) -> tuple[dict[str, Any], Path]:
        return train(compose_config("train", *TINY_TASK, f"run_dir={folder}", *words)), Path(folder).absolute()

    return call


def options(**changed: Any) -> dict[str, Any]:
    return {"task": "overwrite", "seq_len": 24, "vocab_size": 16, "num_pairs": 2, **changed}


def module_of(batch_size: int = 8, seed: int = 0, micro: int | None = None, **changed: Any) -> TaskDataModule:
    return TaskDataModule(
        read_task(options(**changed)), batch_size=batch_size, micro_batch_size=micro, max_steps=3, seed=seed
    )


def model(vocab: int = 16) -> LM:
    lm = tiny_lm(small_options("kda"), small_options("softmax"))
    assert lm.config.vocab_size >= vocab
    return lm


# ------------------------------------------------------------------------------ runs


def test_a_run(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    summary, folder = start("task")
    assert list(summary["test"]) == ["as trained", "seq_len=48", "num_pairs=4, rewrites=0.2"]
    for test in summary["test"].values():
        assert (
            0 <= test["exact_match"] <= test["accuracy"] <= 1 and test["samples"] == 20 and math.isfinite(test["loss"])
        )
        assert set(test["slices"]) == {"gap", "pairs", "rewrites"}
    assert {"2"} == set(summary["test"]["as trained"]["slices"]["pairs"])
    assert summary["test"]["seq_len=48"]["targets"] > summary["test"]["as trained"]["targets"]
    assert {"val/loss", "val/accuracy", "val/exact_match"} <= summary.keys() and "val/perplexity" not in summary
    with (folder / "metrics.csv").open(newline="") as file:
        validated = [row for row in csv.DictReader(file) if row["val/accuracy"]]
    assert [row["step"] for row in validated] == ["3", "6"]
    assert float(validated[-1]["val/accuracy"]) == pytest.approx(summary["val/accuracy"])
    assert not (folder / "tokenizer.json").exists() and not (folder / "samples").exists()
    printed = capsys.readouterr().out
    for said in ("overwrite, drawn anew every step", "test, seq_len=48", "accuracy by gap", "% right", "exact match"):
        assert said in printed


def test_a_resumed_run_is_the_run(start: Start) -> None:
    from train import train

    whole, folder = start("whole")
    start("parts", "trainer.max_steps=3", "trainer.save_every=3")
    # The schedule ends with the run: only the data and the bookkeeping can be compared.
    words = ["resume=parts", "trainer.max_steps=6"]
    resumed = train(compose_config("train", *TINY_TASK, *words), words)
    assert resumed["steps"] == whole["steps"] == 6 and resumed["val/targets"] == whole["val/targets"]
    words = ["resume=parts", "data.num_pairs=3"]
    with pytest.raises(UserError, match="its text differs"):
        train(compose_config("train", *TINY_TASK, *words), words)
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["kda_lm"]["tokenizer"] is None


def test_evaluation_of_a_checkpoint(start: Start, tmp_path: Path) -> None:
    summary, folder = start("task")
    ckpt = f"ckpt={folder / 'checkpoints' / 'last.ckpt'}"

    def evaluate(*words: str) -> Any:
        return run_evaluate(compose_config("evaluate", ckpt, "accelerator=cpu", *words))

    scores = evaluate("test=[{seq_len: 72}]", f"json={tmp_path}/out.json", "batch_size=7")
    assert list(scores) == ["as trained", "seq_len=48", "num_pairs=4, rewrites=0.2", "seq_len=72"]
    for name, test in summary["test"].items():
        assert scores[name].accuracy == test["accuracy"]
        assert scores[name].loss == pytest.approx(test["loss"], rel=1e-5)
        assert scores[name].slices == test["slices"]
    assert json.loads((tmp_path / "out.json").read_text())["test"]["seq_len=72"]["samples"] == 20
    assert evaluate("samples=5")["as trained"].samples == 5
    for word, said in (
        ("text=some.txt", "text= is for text"),
        ("stride=3", "stride= is for text"),
        ("test=[{n: 1}]", "'n'"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate(word)
    with pytest.raises(UserError, match="trained on the task overwrite"):
        run_parity(compose_config("parity", ckpt, "accelerator=cpu"))
    from scripts.sample import run as sample

    with pytest.raises(UserError, match="trained on the task overwrite: it knows no text"):
        sample(compose_config("sample", ckpt, "accelerator=cpu"))


def test_text_has_no_tests(run: Start) -> None:
    _, folder = run("text")
    for word in ("samples=5", "test=[{seq_len: 3}]"):
        with pytest.raises(UserError, match="this checkpoint was trained on text"):
            run_evaluate(compose_config("evaluate", f"ckpt={folder / 'checkpoints' / 'last.ckpt'}", word))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_configuration(name: str) -> None:
    """configs/data/NAME.yaml: all its options, with the defaults of the class."""
    config = read_source(plain(compose_config("train", f"data={name}"))["data"])
    assert config.task == TASKS[name]() and config.name == name


@pytest.mark.parametrize(
    "name", ["overwrite", "selective_reset", "global_reset", "mqar", "parity", "palindrome", "stacks"]
)
def test_experiments(name: str) -> None:
    composed = plain(compose_config("train", f"experiment={name}"))
    config = read_source(composed["data"])
    assert config.name == name and composed["model"]["mlp_hidden"] == 0 and composed["optim"]["optimizer"] == "adamw"


# ------------------------------------------------------------------------------ data


def test_batches_hold_the_questions() -> None:
    """What `at` and `targets` say is what the task asks, and nothing else is."""
    data = module_of(mix=[{"num_pairs": 1}, {"num_pairs": 4}])
    task = data.config.task
    found = task.examples(0, "train", np.arange(8, 16))
    (batch,) = data.train_dataloader().dataset[1]
    assert batch["at"].shape == batch["targets"].shape == (8, task.most_questions)
    for row in range(8):
        asked = np.flatnonzero(found.targets[row] != -100)
        kept = batch["targets"][row] != -100
        assert batch["at"][row][kept].tolist() == asked.tolist() and not batch["at"][row][~kept].any()
        assert batch["targets"][row][kept].tolist() == found.targets[row][asked].tolist()
    assert torch.equal(batch["tokens"], torch.from_numpy(found.tokens))


def test_ranks_and_micro_batches_share_a_step() -> None:
    from data.packing import Shape

    data = module_of()
    (whole,) = data.train_steps(Shape(24, 8), 0)[2]
    parts = [data.train_steps(Shape(24, 8, 2, world=2), rank)[2] for rank in (0, 1)]
    assert all(len(part) == 2 for part in parts)
    for rank in (0, 1):
        for name, tensor in whole.items():
            assert torch.equal(torch.cat([micro[name] for micro in parts[rank]]), tensor[rank::2])


def test_no_sample_is_seen_twice_or_tested() -> None:
    data = module_of(seq_len=60, vocab_size=500, num_pairs=8)
    rows = [
        tuple(row)
        for step in range(3)
        for micro in data.train_dataloader().dataset[step]
        for row in micro["tokens"].tolist()
    ]
    rows += [tuple(row) for batch in data.val_dataloader() for row in batch["tokens"].tolist()]
    rows += [tuple(row) for batch in data.test_dataloader() for row in batch["tokens"].tolist()]
    assert len(rows) == len(set(rows)) == 24 + 1000 + 2000
    other = module_of(seed=1, seq_len=60, vocab_size=500, num_pairs=8)
    tested = [batch["tokens"] for batch in other.test_dataloader()]
    assert [tuple(row) for batch in tested for row in batch.tolist()] == rows[-2000:]  # whatever the seed


def test_the_loss_is_of_the_questions_alone() -> None:
    """As with all positions and the others left out, gradients, too."""
    lm = model()
    (batch,) = module_of().train_dataloader().dataset[0]
    everywhere = torch.full((8, 24), -100)
    for row in range(8):
        kept = batch["targets"][row] != -100
        everywhere[row, batch["at"][row][kept]] = batch["targets"][row][kept]
    gradients = []
    for words in (batch, {"tokens": batch["tokens"], "targets": everywhere}):
        lm.zero_grad()
        nll, count = lm.loss(**words)
        nll.backward()
        gradients.append(
            [float(nll.detach()), int(count), [p.grad.clone() for p in lm.parameters() if p.grad is not None]]
        )
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-5) and gradients[0][1] == gradients[1][1]
    for ours, theirs in zip(gradients[0][2], gradients[1][2], strict=True):
        torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------------ accuracy


def test_accuracy_by_hand() -> None:
    lm, data = model(), module_of(val_samples=30, test_samples=25, val_batch_size=7)
    score = score_tests(lm, data, CPU)["as trained"]
    found = data.config.task.examples(0, "test", np.arange(25))
    with torch.no_grad():
        logits, _ = lm(torch.from_numpy(found.tokens))
    answers, asked = logits.argmax(-1).numpy(), found.targets != -100
    right = answers == found.targets
    assert score.accuracy == pytest.approx(right[asked].mean()) and score.targets == asked.sum()
    assert score.exact_match == pytest.approx(np.mean([right[i][asked[i]].all() for i in range(25)]))
    log_p = logits.log_softmax(-1).numpy()
    rows, places = np.nonzero(asked)
    assert score.loss == pytest.approx(-log_p[rows, places, found.targets[rows, places]].mean(), rel=1e-5)
    for value, accuracy in score.slices["rewrites"].items():
        chosen = asked & (found.slices["rewrites"] == int(value))
        assert accuracy == pytest.approx(right[chosen].mean())


def test_slices_of_many_values_are_ranges() -> None:
    values = np.array([-1, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14])
    found = accuracy_by(values, values % 2 == 0)
    assert list(found) == ["0", "1", "2–3", "4–7", "8–15"]
    assert found["0"] == 1.0 and found["1"] == 0.0 and found["2–3"] == 0.5 and found["8–15"] == pytest.approx(4 / 7)
    assert accuracy_by(np.array([5, 5, 9]), np.array([True, False, True])) == {"5": 0.5, "9": 1.0}


def test_an_empty_tally() -> None:
    score = TaskTally(("gap",)).score()
    assert math.isnan(score.accuracy) and score.targets == score.samples == 0 and score.slices == {"gap": {}}


# ------------------------------------------------------------------------------ options


def test_mixtures_and_tests() -> None:
    config = read_task(options(mix=[{"num_pairs": 1}, {"num_pairs": 3}], weights=[1, 3], test=[{"seq_len": 48}]))
    assert config.task == Mixture((Overwrite(24, 16, 1), Overwrite(24, 16, 3)), (1.0, 3.0))
    assert config.tests == {"seq_len=48": Overwrite(48, 16, 2)}
    assert read_task({"task": "parity", "seq_len": 9}).task == Parity(seq_len=9)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"task": "chess"}, "data.task is 'chess'; it takes one of mqar, overwrite"),
        ({"pairs": 3}, "unknown option 'pairs'; options of the task overwrite are seq_len, vocab_size, num_pairs"),
        ({"num_pairs": "many"}, "data.num_pairs is 'many'; it takes a whole number"),
        ({"num_pairs": 100}, "vocab_size is 16: it has 7 keys, and a sample takes 100"),
        ({"mix": {"num_pairs": 3}}, "data.mix is .*; it takes a list of options"),
        ({"mix": [{"pairs": 3}]}, "unknown option 'pairs'"),
        ({"mix": [{"seq_len": 30}, {}]}, "it takes tasks of one length"),
        ({"weights": [1]}, "data.weights is set, and data.mix is not"),
        ({"mix": [{}, {}], "weights": [1]}, "it takes a positive number for each task"),
        ({"mix": [{}], "weights": ["a"]}, "data.weights is .*; it takes a list of numbers"),
        ({"test": [{"vocab_size": 20}]}, "test vocab_size=20: it has 20 ids, what is trained on 16"),
        ({"val_samples": 0}, "val_samples is 0: it must be at least 1"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": 0.5}, "data.num_workers is 0.5; it takes a whole number"),
    ],
    ids=str,
)
def test_what_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises((UserError, DataError), match=said):
        read_source(options(**changed))
