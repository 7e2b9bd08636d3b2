"""Training, evaluation and decoding on a GPU: skipped, visibly, without one."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PUBLISHED, TINY_TASK, compose_config

from kda_lm.checkpoint import read_checkpoint
from kda_lm.errors import UserError
from kda_lm.model import LM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_training_on_the_gpu(
    kind: str, run: Callable[..., tuple[dict[str, Any], Path]], resume: Callable[..., dict[str, Any]]
) -> None:
    """`auto` trains in bf16 on the GPU; sampling and evaluation agree with the CPU; one answer whichever way it is
    computed; a resumed run goes on."""
    from scripts.evaluating.parity import run_parity
    from scripts.evaluating.score import run as evaluate

    options = [f"model.pattern=[{kind}]", "trainer.accelerator=auto", f"mixers.{kind}.num_heads=2"]
    summary, folder = run("gpu", *options)
    assert summary["device"] == torch.cuda.get_device_name()
    ckpt = f"ckpt={folder / 'checkpoints' / 'last.ckpt'}"
    same = evaluate(compose_config("evaluate", ckpt))
    assert same.loss == pytest.approx(summary["val/loss"], rel=1e-4)
    for device in ("cpu", "gpu"):
        exact = evaluate(compose_config("evaluate", ckpt, f"accelerator={device}", "precision=32-true"))
        assert exact.loss == pytest.approx(summary["val/loss"], rel=2e-2)
    found = run_parity(compose_config("parity", ckpt, "length=100", "splits=3"))
    assert [x.precision for x in found] == ["32-true", "bf16-mixed"]
    assert resume("gpu", "trainer.max_steps=12")["steps"] == 12


GRAPHS = {
    "plain": ["trainer.val_every=3"],
    "micro-batches": ["trainer.micro_batch_size=2", "optim.z_loss=1e-4"],
    "averaged": ["trainer.ema_decay=0.5", "trainer.val_every=3", "trainer.checkpoint_layers=true"],
    "float32": ["trainer.precision=32-true"],
    "compiled": ["trainer.compile=true"],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_cuda_graph_changes_nothing(
    name: str, run: Callable[..., tuple[dict[str, Any], Path]], resume: Callable[..., dict[str, Any]]
) -> None:
    """Losses, norms and weights are the same bits, after a resumption, too."""
    options = ["trainer.accelerator=auto", "trainer.log_every=1", "trainer.save_every=4", "model.num_layers=4"]
    results = []
    for graph in ("true", "false"):
        _, folder = run(f"graph-{graph}", *options, *GRAPHS[name], f"trainer.cuda_graph={graph}")
        resume(f"graph-{graph}", "trainer.max_steps=11")
        with (folder / "metrics.csv").open() as file:
            rows = [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in csv.DictReader(file)]
        state = read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
        results.append((rows, state))
    (rows, state), (plain_rows, plain_state) = results
    assert rows == plain_rows
    assert [name for name, value in state.items() if not torch.equal(value, plain_state[name])] == []


def test_a_task_on_the_gpu() -> None:
    """With questions at some positions alone, recorded or not: the same bits."""
    from train import train

    summaries = []
    for graph in ("true", "false"):
        words = [*TINY_TASK, "trainer.accelerator=auto", f"trainer.cuda_graph={graph}", f"run_dir=task-{graph}"]
        summary = train(compose_config("train", *words))
        assert summary["device"] == torch.cuda.get_device_name()
        summaries.append((summary["val/loss"], summary["test"]))
    assert summaries[0] == summaries[1]


def test_what_cannot_be_recorded(
    run: Callable[..., tuple[dict[str, Any], Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = LM.loss

    def reading(self: LM, *args: Any, **batch: Any) -> Any:
        nll, count = loss(self, *args, **batch)
        float(count)
        return nll, count

    monkeypatch.setattr(LM, "loss", reading)
    with pytest.raises(UserError, match=r"cannot be recorded as a CUDA graph: [^\n]*; trainer.cuda_graph=false does"):
        run("bad", "trainer.accelerator=auto", "trainer.cuda_graph=true")
