"""From the options of the group `data` to a data module: texts, or with `task` one of data/tasks."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from data import BaseDataModule, DataConfig, DataModule
from data.tasks import TASKS, Mixture, Task, TaskConfig, TaskDataModule
from kda_lm.config import read_config
from kda_lm.errors import UserError

SourceConfig = DataConfig | TaskConfig
COMMON = ("val_samples", "test_samples", "val_batch_size", "num_workers")  # to all tasks
VARIANTS = ("mix", "weights", "test")


def read_source(options: Mapping[str, Any]) -> SourceConfig:
    """Raises UserError or DataError: see read_config; no such task; what the task objects to."""
    return read_task(options) if "task" in options else read_config(DataConfig, options, "data")


def read_task(options: Mapping[str, Any]) -> TaskConfig:
    """`task` names it; `mix` are sets of its options, of which each sample has one, by `weights`; `test` are sets of
    options to be tested, too. A set goes on top of the options beside it; so does a test's, and without `mix`.
    """
    name = options["task"]
    if name not in TASKS:
        raise UserError(f"data.task is {name!r}; it takes one of {', '.join(TASKS)}")
    own = [field.name for field in fields(TASKS[name])]  # type: ignore[arg-type]
    accepted = (*own, *COMMON, *VARIANTS)
    for option in options:
        if option != "task" and option not in accepted:
            raise UserError(f"data: unknown option '{option}'; options of the task {name} are {', '.join(accepted)}")
    base = {option: value for option, value in options.items() if option in own}

    def variants(option: str) -> list[tuple[str, Task]]:
        """Each with what sets it apart."""
        sets = options.get(option) or []
        if not isinstance(sets, list | tuple) or not all(isinstance(changed, Mapping) for changed in sets):
            raise UserError(f"data.{option} is {sets!r}; it takes a list of options, such as [{{seq_len: 512}}]")
        return [
            (", ".join(f"{k}={v}" for k, v in changed.items()), read_config(TASKS[name], {**base, **changed}, "data"))
            for changed in sets
        ]

    mix = variants("mix")
    weights = options.get("weights")
    if weights is not None and not mix:
        raise UserError("data.weights is set, and data.mix is not: they weigh what is mixed")
    if weights is not None and not all(isinstance(x, int | float) for x in weights):
        raise UserError(f"data.weights is {weights!r}; it takes a list of numbers")
    task = (
        Mixture(tuple(part for _, part in mix), None if weights is None else tuple(map(float, weights)))
        if mix
        else read_config(TASKS[name], base, "data")
    )
    common = {option: options[option] for option in COMMON if option in options}
    for option, value in common.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"data.{option} is {value!r}; it takes a whole number")
    return TaskConfig(name, task, dict(variants("test")), **common)


def open_source(
    config: SourceConfig, *, batch_size: int, micro_batch_size: int | None, max_steps: int, seed: int
) -> BaseDataModule:
    """The data module of `config`, prepared; see BaseDataModule."""
    sizes: dict[str, Any] = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "max_steps": max_steps}
    if isinstance(config, TaskConfig):
        return TaskDataModule(config, **sizes, seed=seed).prepare()
    return DataModule(config, **sizes, seed=seed).prepare()
