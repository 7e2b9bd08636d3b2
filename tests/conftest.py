"""What several test files need: a small corpus on disk, and runs of train.py's own `train` on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from support import TINY, compose_config

CORPUS = "the state of the union is strong and we must keep it so for all people of every county"

torch.set_num_threads(1)  # small tensors, and several tests at once


@pytest.fixture(autouse=True)
def private_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's cache, account or run folders."""
    monkeypatch.setenv("KDA_LM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("KDA_LM_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    HydraConfig.instance().cfg = None  # a command line that another test ran: its directory is not ours


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A text file of 60 short paragraphs that a model can learn something from."""
    words = CORPUS.split()
    paragraphs = [" ".join(words[(i * j) % len(words)] for j in range(1, 30)) + "." for i in range(1, 61)]
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def run(corpus: Path) -> Callable[..., tuple[dict[str, Any], Path]]:
    """`run("name", "option=value", …)`: a tiny run in the folder `name`; returns its summary and the folder."""
    from train import train

    def start(folder: str, *overrides: str) -> tuple[dict[str, Any], Path]:
        words = [*TINY, f"data.files={corpus}", f"run_dir={folder}", *overrides]
        return train(compose_config("train", "name=tiny", *words)), Path(folder).absolute()

    return start


@pytest.fixture
def resume() -> Callable[..., dict[str, Any]]:
    """`resume("name", "option=value", …)`: continue the run in the folder `name`."""
    from train import train

    def start(folder: str, *overrides: str) -> dict[str, Any]:
        words = [f"resume={folder}", *overrides]
        return train(compose_config("train", "name=tiny", *words), words)

    return start
