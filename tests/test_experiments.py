"""Every file of configs/experiment: a question, its command, and a run of two steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support import ROOT, compose_config

FILES = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))
SMALL = [
    "model.dim=16",
    "trainer.batch_size=2",
    "trainer.max_steps=2",
    "trainer.val_every=2",
    "trainer.accelerator=cpu",
    "samples.max_new_tokens=2",
    "wandb=false",
]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_there_are_experiments() -> None:
    assert len(FILES) >= 10


@each_file
def test_it_fits_on_a_screen_and_says_what_it_asks(path: Path) -> None:
    """At most 15 lines: the package, the question, the command, the overrides."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = " ".join(line for line in lines if line.startswith("#"))
    assert len(lines) <= 15
    assert lines[0] == "# @package _global_"
    assert "?" in comments
    assert f"python train.py experiment={path.stem}" in comments


@each_file
def test_it_changes_something_and_is_named_after_its_file(path: Path) -> None:
    default = OmegaConf.to_container(compose_config("train", "name=x"))
    config = compose_config("train", f"experiment={path.stem}")
    assert config.name == path.stem
    config.name = "x"
    assert OmegaConf.to_container(config) != default


@each_file
def test_it_runs(path: Path, corpus: Path) -> None:
    from train import train

    if "task" in compose_config("train", f"experiment={path.stem}").data:
        data = ["data.val_samples=4", "data.test_samples=4", "data.num_workers=0"]
    elif "override /data" in path.read_text(encoding="utf-8"):  # its own options, but not its own text
        data = ["data.seq_len=16", "data.corpus=text", f"+data.files={corpus}", "+data.sample_by=paragraph"]
    else:
        data = [
            "data=text",
            "data.seq_len=16",
            f"data.files={corpus}",
            "data.sample_by=paragraph",
            "data.vocab_size=300",
        ]
    summary: dict[str, Any] = train(compose_config("train", f"experiment={path.stem}", *data, *SMALL, "run_dir=run"))
    assert summary["steps"] == 2 and summary["val/loss"] < 10
    assert OmegaConf.load("run/config.yaml").name == path.stem  # type: ignore[union-attr]


def test_the_default_runs(run: Callable[..., tuple[dict[str, Any], Path]]) -> None:
    """configs/train.yaml as it is, but for sizes."""
    summary, _ = run("default", "trainer.max_steps=2", "model.pattern=[kda,kda,kda,softmax]", "model.num_layers=4")
    assert summary["steps"] == 2
