"""Reading checkpoints: the model, and all that sampling and evaluation need beside it.

A checkpoint is one of Lightning's, of plain values and tensors only (it loads with `weights_only=True`). Its key
"kda_lm" holds the model's options, the tokenizer and the data options, so that the file is enough by itself. What was
trained on a task has no tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data import DataError, Tokenizer, load_tokenizer
from kda_lm.errors import UserError
from kda_lm.model import LM

# What must be as it was for a resumed run to be the same run: the model, its data, and the order of its batches.
RESUMED_AS_IT_WAS = ["tokenizer", "model", "mixers", "text", "optimizer"]
RESUMED_AS_IT_WAS += ["seed", "batch_size", "seq_len", "isolate_documents"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint ready for use."""

    model: LM  # in evaluation mode; with weight averaging, the averaged weights
    tokenizer: Tokenizer | None  # None: it was trained on a task
    data: dict[str, Any]  # options of the data it was trained on
    text: tuple[str, ...]  # what identifies them: keys of token files, or the task
    step: int  # finished optimizer steps

    def text_tokenizer(self) -> Tokenizer:
        """Raises UserError: it was trained on a task."""
        if self.tokenizer is None:
            raise UserError(f"the checkpoint was trained on the task {self.data['task']}: it knows no text")
        return self.tokenizer


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint's contents, on the CPU.

    Raises UserError: no such file, damaged, or not written by this project.
    """
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist{_suggestion(path)}")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # what a damaged file makes torch raise is any of a dozen
        raise UserError(f"checkpoint {path} is damaged or no checkpoint: it cannot be read") from None
    if not isinstance(contents, dict) or not isinstance(contents.get("kda_lm"), dict):
        raise UserError(f"checkpoint {path} was not written by this project's train.py")
    return contents


def open_checkpoint(path: Path, device: torch.device, tokenizer_file: Path | None = None) -> Checkpoint:
    """The model on `device`, with its own tokenizer or that of `tokenizer_file`.

    Raises UserError: see read_checkpoint; a tokenizer whose vocabulary is not the model's; kernels that `device` lacks.
    """
    contents = read_checkpoint(path)
    about = contents["kda_lm"]
    weights = {name.removeprefix("model."): value for name, value in contents["state_dict"].items()}
    try:
        model = LM.from_hyperparameters(about)
        model.load_state_dict(weights)
    except (KeyError, RuntimeError):
        raise UserError(f"checkpoint {path} does not fit the model that it describes") from None
    tokenizer = None
    try:
        if tokenizer_file is not None:
            tokenizer = load_tokenizer(tokenizer_file, about["eot_token"])
        elif about["tokenizer"] is not None:
            tokenizer = Tokenizer(about["tokenizer"], about["eot_token"])
    except DataError as error:
        raise UserError(str(error)) from None
    if tokenizer is not None and tokenizer.vocab_size != model.config.vocab_size:
        raise UserError(
            f"vocabulary mismatch: the tokenizer has {tokenizer.vocab_size} ids and the model of {path} "
            f"{model.config.vocab_size}; use the tokenizer it was trained with"
        )
    model.backends(device)  # refuses what is not to be had there
    return Checkpoint(model.eval().to(device), tokenizer, about["data"], tuple(about["text"]), contents["global_step"])


def check_resumable(path: Path, now: Mapping[str, Any]) -> int:
    """The finished steps of the checkpoint at `path`, whose run is to go on with what `now` says of it.

    Raises UserError: no checkpoint yet; see read_checkpoint; anything of RESUMED_AS_IT_WAS that differs.
    """
    if not path.is_file():
        raise UserError(f"{path.parents[1]} has no checkpoint: it stopped before its first; start a new run instead")
    contents = read_checkpoint(path)
    saved = {**contents["kda_lm"], **contents["kda_lm"].get("batches", {})}
    for name, value in {**now, **now["batches"]}.items():
        if name in RESUMED_AS_IT_WAS and saved.get(name) != value:
            raise UserError(
                f"cannot resume from {path}: its {name} differs from what is configured now; a resumed run keeps its "
                "model, tokenizer, text, optimizer, seed, batch_size, seq_len and isolate_documents"
            )
    step: int = contents["global_step"]
    return step


def _suggestion(path: Path) -> str:
    """Checkpoints where the user may have meant to point."""
    folder = path if path.is_dir() else path.parent
    found = sorted(folder.glob("**/*.ckpt"))[:3] if folder.is_dir() else []
    return f"; there is {', '.join(map(str, found))}" if found else ""
