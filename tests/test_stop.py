"""Runs that are stopped, and several jobs of one command line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT, TINY

from kda_lm.training.module import TrainingModule
from kda_lm.training.stop import Stopped

Run = Callable[..., tuple[dict[str, Any], Path]]
Resume = Callable[..., dict[str, Any]]


def weights(folder: str) -> dict[str, torch.Tensor]:
    contents: dict[str, Any] = torch.load(Path(folder) / "checkpoints" / "last.ckpt", weights_only=True)
    state: dict[str, torch.Tensor] = contents["state_dict"]
    return state


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [5, 8])  # between validations, and at one
def test_a_signal_saves_and_the_run_goes_on_exactly(
    run: Run, resume: Resume, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, step: int
) -> None:
    options = ("trainer.max_steps=12", "trainer.save_every=100")
    run("whole", *options)
    original = TrainingModule.training_step

    def training_step(self: TrainingModule, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step + 1 == step and self.trainer.default_root_dir.endswith("parts"):
            os.kill(os.getpid(), signum)
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", training_step)
        with pytest.raises(Stopped, match=f"{signum.name} after step {step}; go on with resume=") as stopped:
            run("parts", *options)
    assert stopped.value.exit_status == 128 + signum
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert resume("parts")["steps"] == 12
    for name, tensor in weights("whole").items():
        assert torch.equal(tensor, weights("parts")[name]), name


def test_options_of_a_resumed_run_take_effect(run: Run, resume: Resume) -> None:
    """A changed learning rate is used, not only written down."""
    for folder in ("a", "b"):
        run(folder, "optim.schedule=constant")
    start = weights("a")
    resume("a", "trainer.max_steps=12")
    resume("b", "trainer.max_steps=12", "optim.lr=0.00012", "optim.adamw_lr=0.00024")
    name = "model.blocks.0.mixer.q_proj.weight"
    fast, slow = ((weights(folder)[name] - start[name]).norm() for folder in ("a", "b"))
    assert 0 < slow < fast / 10


def test_the_command_line_of_a_stopped_run(corpus: Path, tmp_path: Path) -> None:
    words = [*TINY, f"data.files={corpus}", "run_dir=stopped", "trainer.max_steps=100000", "trainer.val_every=100000"]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "stopped" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not metrics.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.strip().splitlines()[-1].startswith("error: stopped by SIGTERM after step ")
    assert (tmp_path / "stopped" / "checkpoints" / "last.ckpt").is_file()


def test_a_multirun_outlives_a_bad_job(corpus: Path, tmp_path: Path) -> None:
    """Case F2: three jobs, the middle one fails; the others run, and the exit status says so."""
    words = [*TINY, f"data.files={corpus}", "trainer.max_steps=2", "mixers.kda.num_heads=2,3,4"]
    words.remove("mixers.kda.num_heads=2")
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "-m", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [
        "error: mixers.kda: expand_k × dim = 16 must be a positive multiple of num_heads = 3"
    ]
    finished = [json.loads(path.read_text())["steps"] for path in (tmp_path / "runs").glob("*/summary.json")]
    assert finished == [2, 2]
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "corpus.txt", "runs"}
