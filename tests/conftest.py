"""What several test files need: a small corpus on disk, and runs of train.py's own `train` on it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # train.py is no package

torch.set_num_threads(1)  # small tensors, and several tests at once

TINY = [
    "data=text",
    "data.tokenizer=bytes",
    "data.seq_len=16",
    "data.sample_by=paragraph",
    "data.val_fraction=0.1",
    "data.val_batch_size=4",
    "model.dim=16",
    "model.num_layers=2",
    "model.pattern=[kda,softmax]",
    "mixers.kda.num_heads=2",
    "mixers.softmax.num_heads=2",
    "trainer.batch_size=4",
    "trainer.max_steps=8",
    "trainer.val_every=4",
    "trainer.save_every=4",
    "trainer.log_every=1",
    "trainer.accelerator=cpu",
    "optim.warmup_steps=2",
    "samples.prompts=[the]",
    "samples.max_new_tokens=4",
    "wandb=false",
]


@pytest.fixture(autouse=True)
def private_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's cache, account or run folders."""
    monkeypatch.setenv("KDA_LM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("KDA_LM_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A text file of 60 short paragraphs that a model can learn something from."""
    words = "the state of the union is strong and we must keep it so for all people of every county".split()
    paragraphs = [" ".join(words[(i * j) % len(words)] for j in range(1, 30)) + "." for i in range(1, 61)]
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    return path


def compose_config(name: str, *overrides: str) -> DictConfig:
    """A configuration as the command line would compose it."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose(name, overrides=list(overrides), return_hydra_config=False)


def mixer_options(name: str, **changes: Any) -> dict[str, Any]:
    """The options of configs/mixer/<name>.yaml, changed."""
    options = OmegaConf.to_container(compose_config(f"mixer/{name}").mixer)
    assert isinstance(options, dict)
    return {**{str(key): value for key, value in options.items()}, **changes}


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
