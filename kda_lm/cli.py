"""What every command line of this project shares: one-line errors, quiet libraries, small tables."""

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data import DataError
from kda_lm.errors import UserError
from kda_lm.runs import from_launch_dir

_failed = False  # whether a job of a multirun failed


@contextmanager
def one_line_errors(go_on: bool = False) -> Iterator[None]:
    """What the user can mend becomes `error: …` and exit status 2, everything else stays a fault of ours.

    With `go_on`, for a job among several, the message is printed and the others run; see `exit_status`.
    """
    global _failed
    try:
        yield
    except (UserError, DataError) as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr, flush=True)
        _failed = True
        status = getattr(error, "exit_status", UserError.exit_status)
        if not go_on or status != UserError.exit_status:  # a signal is meant for all jobs
            sys.exit(status)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def exit_status() -> int:
    """Of a command line whose jobs are done."""
    return UserError.exit_status if _failed else 0


def quiet_libraries() -> None:
    """Keep the log to what this project says itself, and have no character stop it that a console can't show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    for name in ("lightning.pytorch", "lightning.fabric", "datasets", "wandb", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of every try of a download
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Advice for loops that Lightning's defaults describe; ours differ on purpose.
    warnings.filterwarnings("ignore", message=r".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=r".*not\s+resumable.*")
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=r".*FLOPs not found for.*")  # then the peak is measured


def required_path(option: str, value: str | None) -> Path:
    """The path that `option` names, relative to where the user started from.

    Raises UserError if it was not given.
    """
    if not value:
        raise UserError(f"{option} is not set; give {option}=PATH")
    return from_launch_dir(value)


def print_table(title: str, rows: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text(value))  # as it is: a path may look like markup
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log has no right edge
    console.print(table)
