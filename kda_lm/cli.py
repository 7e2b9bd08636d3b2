"""What every command line of this project shares: one-line errors, quiet libraries, small tables."""

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


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user can mend becomes `error: …` and exit status 2; an interrupt, 130; everything else stays a fault."""
    try:
        yield
    except (UserError, DataError) as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def quiet_libraries() -> None:
    """Keep the log to what this project says itself."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("lightning.pytorch", "lightning.fabric", "datasets", "wandb", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Advice for loops that Lightning's defaults describe; ours differ on purpose.
    warnings.filterwarnings("ignore", message=r".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=r".*dataloader is not resumable.*|.*not\s+resumable.*")
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\).*")


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
