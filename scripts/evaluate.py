"""Score a checkpoint, or see whether it gives one answer whichever way it is computed.

    python scripts/evaluate.py ckpt=…            loss, perplexity and bits per byte; of a task accuracy
    python scripts/evaluate.py context ckpt=…    loss by position, and on what the context has shown
    python scripts/evaluate.py questions ckpt=…  the last word of a passage, facts of the document before
    python scripts/evaluate.py needle ckpt=…     needles in haystacks, by length and depth
    python scripts/evaluate.py memory ckpt=…     what the state of each recurrent layer does with a text
    python scripts/evaluate.py lm_eval ckpt=…    tasks of the lm-evaluation-harness
    python scripts/evaluate.py parity ckpt=…     prefill, decoding, splits, batches

Each shows its options with `--help`; they are those of configs/evaluate.yaml, context.yaml, and so on.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds what lies beside it, not its own package

from kda_lm.cli import one_line_errors, quiet_libraries
from kda_lm.errors import UserError
from kda_lm.runs import CONFIGS
from scripts.evaluating.context import run_context
from scripts.evaluating.lm_eval import run_lm_eval
from scripts.evaluating.memory import run_memory
from scripts.evaluating.needle import run_needle
from scripts.evaluating.parity import run_parity
from scripts.evaluating.questions import run_questions
from scripts.evaluating.score import run

# By their configurations.
COMMANDS: dict[str, Callable[[DictConfig], object]] = {
    "evaluate": run,
    "context": run_context,
    "questions": run_questions,
    "needle": run_needle,
    "memory": run_memory,
    "lm_eval": run_lm_eval,
    "parity": run_parity,
}


def main() -> None:
    command = "evaluate"
    with one_line_errors():
        if len(sys.argv) > 1 and "=" not in sys.argv[1] and not sys.argv[1].startswith("-"):
            command = sys.argv.pop(1)
            if command not in COMMANDS:
                raise UserError(f"unknown command '{command}'; commands are {', '.join(COMMANDS)}")

    def start(options: DictConfig) -> None:
        quiet_libraries()
        with one_line_errors():
            COMMANDS[command](options)

    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=command)(start)()


if __name__ == "__main__":
    main()
