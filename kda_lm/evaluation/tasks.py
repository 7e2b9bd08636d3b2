"""Accuracy on the tasks of data/tasks: of all questions, of whole samples, and of questions of one kind.

accuracy     questions whose most probable token is the answer / questions
exact match  samples of which all questions are so / samples
slices       accuracy of the questions with one number of pairs, gap, length, depth, … each; where there are more
             than MOST_VALUES, of those between successive powers of two
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from data.tasks import TaskDataModule
from kda_lm.evaluation.text import Tally, add_batches
from kda_lm.model import LM

MOST_VALUES = 12


@dataclass(frozen=True)
class TaskScore:
    """The result of an evaluation on a task; `loss` in nats a question."""

    loss: float
    accuracy: float
    exact_match: float
    targets: int
    samples: int
    slices: dict[str, dict[str, float]]  # accuracy by what it is sliced by, then by value

    def metrics(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}/{name}": getattr(self, name) for name in ("loss", "accuracy", "exact_match")}

    @property
    def brief(self) -> str:
        """For a progress line."""
        return f"{self.loss:.3f}, {100 * self.accuracy:.1f} % right"

    def rows(self, prefix: str) -> dict[str, str]:
        """For a table."""
        found = {
            f"{prefix} loss": f"{self.loss:.4f} nats a question, of {self.targets:,}",
            f"{prefix} accuracy": f"{100 * self.accuracy:.2f} % of them",
            f"{prefix} exact match": f"{100 * self.exact_match:.2f} % of {self.samples:,} samples",
        }
        for name, values in self.slices.items():
            if len(values) > 1:
                parts = [f"{value}: {100 * accuracy:.1f}" for value, accuracy in values.items()]
                found[f"{prefix} accuracy by {name}, %"] = ", ".join(parts)
        return found


class TaskTally(Tally):
    """Running record of answers, of batches as data/tasks/module.py has them."""

    def __init__(self, slice_names: Sequence[str] = ()) -> None:
        super().__init__()
        self.slice_names = tuple(slice_names)
        self._right: list[Tensor] = []  # [b, Q]: 1 right, 0 wrong, −1 nothing asked
        self._slices: list[Tensor] = []  # [b, Q, S]

    def add_batch(self, model: LM, batch: dict[str, Tensor]) -> None:
        at, targets = batch["at"], batch["targets"]
        x, _ = model.hidden_states(batch["tokens"], keep_states=False)
        logits = model.logits(model.outputs_at(x, at))
        asked = targets != -100
        self.add(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), asked.sum())
        right = (logits.argmax(-1) == targets).to(torch.int8)
        self._right.append(torch.where(asked, right, -1))
        self._slices.append(batch["slices"])

    def over_ranks(self, device: torch.device) -> None:
        super().over_ranks(device)
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return
        parts: list[tuple[list[Tensor], list[Tensor]]] = [([], [])] * dist.get_world_size()
        dist.all_gather_object(parts, ([x.cpu() for x in self._right], [x.cpu() for x in self._slices]))
        self._right = [x for right, _ in parts for x in right]
        self._slices = [x for _, slices in parts for x in slices]

    def score(self, num_bytes: int | None = None) -> TaskScore:  # type: ignore[override]
        text = super().score()
        right = np.concatenate([x.cpu().numpy() for x in self._right]) if self._right else np.zeros((0, 1), np.int8)
        slices = (
            np.concatenate([x.cpu().numpy() for x in self._slices])
            if self._slices
            else np.zeros((0, 1, len(self.slice_names)), np.int64)
        )
        asked = right >= 0
        whole = (right != 0).all(axis=1)[asked.any(axis=1)]
        return TaskScore(
            loss=text.loss,
            accuracy=_mean(right[asked]),
            exact_match=_mean(whole),
            targets=text.targets,
            samples=len(right),
            slices={
                name: accuracy_by(slices[..., i][asked], right[asked] == 1) for i, name in enumerate(self.slice_names)
            },
        )


def score_tests(model: LM, data: TaskDataModule, device: torch.device) -> dict[str, TaskScore]:
    """The scores of all of `data.tests`, by name."""
    return {
        name: add_batches(TaskTally(task.slice_names), model, data.test_dataloader(name), device).score()
        for name, task in data.tests.items()
    }


def accuracy_by(values: NDArray[np.int64], right: NDArray[np.bool_]) -> dict[str, float]:
    """The share of `right` for each value, or range of values; negative ones are none."""
    values, right = values[values >= 0], right[values >= 0]
    distinct = np.unique(values)
    if len(distinct) <= MOST_VALUES:
        return {str(value): _mean(right[values == value]) for value in distinct.tolist()}
    power = np.where(values > 0, np.floor(np.log2(np.maximum(values, 1))), -1).astype(np.int64)
    found = {}
    for p in np.unique(power).tolist():
        low, high = (0, 0) if p < 0 else (2**p, 2 ** (p + 1) - 1)
        found[str(low) if low == high else f"{low}–{high}"] = _mean(right[power == p])
    return found


def _mean(values: NDArray[np.generic]) -> float:
    return float(values.mean()) if len(values) else float("nan")
