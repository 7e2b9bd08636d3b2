"""`python scripts/evaluate.py lm_eval ckpt=… tasks=[…]`: tasks of the lm-evaluation-harness."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from kda_lm.cli import print_table
from kda_lm.config import plain, read_config
from kda_lm.device import arithmetic, resolve_device
from kda_lm.errors import UserError
from kda_lm.evaluation.text import TextConfig
from kda_lm.runs import from_launch_dir, write_json
from scripts.evaluating.common import opened


@dataclass(frozen=True)
class LmEvalConfig(TextConfig):
    """Options; see configs/lm_eval.yaml."""

    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    max_length: int = 2048
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks:
            raise ValueError("tasks is empty; it takes names of the harness, such as [lambada_openai]")
        for name, least in (("limit", 1), ("num_fewshot", 0), ("max_length", 2), ("batch_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it takes at least {least}")


def run_lm_eval(options: DictConfig) -> dict[str, dict[str, Any]]:
    """Evaluate as configs/lm_eval.yaml says, print the table, and return the harness's results by task.

    Raises UserError: the harness is not installed; it has no such task, or cannot load its data.
    """
    config = read_config(LmEvalConfig, plain(options), "lm_eval")
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm_eval needs the package lm-eval: pip install 'kda-lm[lm-eval]'")
    import lm_eval
    from lm_eval.tasks import TaskManager

    from kda_lm.evaluation.harness import Harness

    device = resolve_device(config.accelerator)
    path, checkpoint = opened(config)
    model = Harness(checkpoint.model, checkpoint.text_tokenizer(), config.max_length, config.batch_tokens)
    include = None if config.include_path is None else str(from_launch_dir(config.include_path))
    manager = TaskManager(include_path=include)
    known = set(manager.all_tasks)
    for name in config.tasks:
        if name not in known:
            raise UserError(f"tasks: the harness has no '{name}'; include_path names a folder with tasks of your own")
    with arithmetic(config.precision, device):
        try:
            found = lm_eval.simple_evaluate(
                model,
                tasks=list(config.tasks),
                num_fewshot=config.num_fewshot,
                limit=config.limit,
                task_manager=manager,
            )
        except ConnectionError as error:
            raise UserError(f"cannot load the data of {', '.join(config.tasks)}: {error}") from None

    results: dict[str, dict[str, Any]] = found["results"]
    print_table("lm-evaluation-harness", {"checkpoint": f"{path}, step {checkpoint.step:,}"})
    for name, values in results.items():
        numbers = {metric: value for metric, value in values.items() if isinstance(value, int | float)}
        print_table(name, {metric.removesuffix(",none"): f"{value:.4f}" for metric, value in numbers.items()})
    if config.json is not None:
        about = {"checkpoint": str(path), "step": checkpoint.step, "versions": found["versions"]}
        write_json(from_launch_dir(config.json), {**about, "results": results})
    return results
