"""Where metrics go: metrics.csv in the run folder, and wandb.

wandb is offline unless the user is logged in or says otherwise (WANDB_MODE), and never makes a run wait for a network.
"""

import csv
import netrc
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from kda_lm.runs import is_first_process

WANDB_INIT_TIMEOUT = 15  # seconds that a logged-in user's run may wait for the server before it goes on offline


class CSVMetrics(Logger):
    """One row a step in `path`, a column a metric, empty where a step has no value.

    A resumed run goes on in the same file: the rows after `resumed_step`, whose steps are run again, are dropped.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        super().__init__()
        self.path = path
        self._rows: list[dict[str, Any]] = []
        self._columns = ["step"]
        self._resumed_step = resumed_step
        self._started = False

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder holds the whole configuration already."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        if not self._started:
            self._started = True
            self._read()
        if self._rows and self._rows[-1]["step"] == step:
            self._rows[-1].update(metrics)
            rewrite = True
        else:
            self._rows.append({"step": step, **metrics})
            rewrite = False
        new_columns = [name for name in metrics if name not in self._columns]
        self._columns += new_columns
        if rewrite or new_columns or len(self._rows) == 1:
            self._write_all()
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(self._rows[-1])

    def _read(self) -> None:
        """Earlier rows of a run that is resumed."""
        if self.path.is_file():
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                whole = [row for row in reader if (row.get("step") or "").isdigit()]  # a kill may have cut the last one
                kept = [row for row in whole if int(row["step"]) <= self._resumed_step]
                self._rows = [{**row, "step": int(row["step"])} for row in kept]
                self._columns = list(reader.fieldnames or ["step"])
            self._write_all()

    def _write_all(self) -> None:
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows)
        temporary.replace(self.path)


@contextmanager
def open_loggers(
    folder: Path, project: str | None, run_id: str, config: dict[str, Any], resumed_step: int
) -> Iterator[tuple[list[Logger], Callable[[dict[str, Any]], None]]]:
    """The loggers of the run in `folder`, and a function that takes its summary; wandb's run ends with the block.

    `project` None is without wandb.
    """
    loggers: list[Logger] = [CSVMetrics(folder / "metrics.csv", resumed_step)]
    if project is None or not is_first_process():
        yield loggers, lambda summary: None
        return
    run = _wandb_run(project, folder, run_id, config)
    succeeded = False
    try:
        yield [*loggers, WandbLogger(experiment=run)], run.summary.update
        succeeded = True
    finally:
        run.finish(exit_code=0 if succeeded else 1)


def _wandb_run(project: str, folder: Path, run_id: str, config: dict[str, Any]) -> Any:
    """A wandb run that continues `run_id` if that exists; its files lie under `folder`/wandb.

    WANDB_MODE decides if set; otherwise online for a logged-in user and offline for everybody else. A server that
    does not answer within WANDB_INIT_TIMEOUT seconds makes the run offline, not late.
    """
    import wandb  # here: it takes a second, and a run without wandb should not pay for it

    # None leaves it to wandb: WANDB_MODE, `wandb offline`, or online.
    mode: Any = None if "WANDB_MODE" in os.environ or _logged_in() else "offline"
    settings = wandb.Settings(init_timeout=WANDB_INIT_TIMEOUT, silent=True, console="off")
    options: dict[str, Any] = {"project": project, "name": folder.name, "id": run_id, "dir": folder, "config": config}
    try:
        return wandb.init(**options, mode=mode, resume="allow", settings=settings)
    except wandb.errors.Error as error:
        print(f"wandb: {str(error).splitlines()[0]} — logging offline (`wandb sync` uploads it later)", flush=True)
        wandb.teardown()  # the attempt still holds the run's id
        return wandb.init(**options, mode="offline", settings=settings)


def _logged_in() -> bool:
    """Whether an API key for the wandb server is at hand, looked up without asking anybody."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
