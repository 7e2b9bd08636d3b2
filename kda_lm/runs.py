"""The run folder: everything that one training run leaves behind.

runs/2026-01-31_12-00-00_kda3-softmax/
    config.yaml      the resolved configuration
    run.json         the run's id in wandb, start, and git revision ("dirty" if the work tree differed from it)
    tokenizer.json   what turned text into tokens; a task has none
    metrics.csv      one row a logged step
    summary.json     the table printed at the end
    checkpoints/     last.ckpt (latest step), best.ckpt (lowest validation loss)
    samples/         texts written at every validation; of a task none
    wandb/           wandb's own files
"""

import json
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import YAMLError

from kda_lm.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CONFIGS = Path(__file__).parents[1] / "configs"  # absolute, so that command lines start from anywhere
RUN_DIR_VARIABLE = "KDA_LM_RUN_DIR"  # how the processes that a multi-device run starts find their run's folder


def is_first_process() -> bool:
    """False in the processes that a run on several devices starts beside the first."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def launch_dir() -> Path:
    """The directory that the user started from; relative paths are relative to it, whatever hydra.job.chdir says."""
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized():
        return Path(HydraConfig.get().runtime.cwd)
    return Path.cwd()


def from_launch_dir(path: str) -> Path:
    return launch_dir() / Path(path).expanduser()


def absolute_paths(data: dict[str, Any]) -> dict[str, Any]:
    """The data options with their paths made absolute, so that a run can be resumed and scored from anywhere."""
    paths = ("files", "val_files", "tokenizer_file", "cache_dir")

    def absolute(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [absolute(item) for item in value]
        return str(from_launch_dir(value)) if isinstance(value, str) and value else value

    return {name: absolute(value) if name in paths else value for name, value in data.items()}


def create_run_folder(run_dir: str | None, name: str) -> Path:
    """A new folder: `run_dir`, or runs/<time>_<name>, numbered if runs start within one second.

    Raises UserError: `run_dir` exists, or the folder can't be made.
    """
    if not is_first_process():
        if RUN_DIR_VARIABLE not in os.environ:
            raise UserError("another launcher started several processes; start one, and set trainer.devices")
        return Path(os.environ[RUN_DIR_VARIABLE])
    try:
        if run_dir is not None:
            folder = from_launch_dir(run_dir)
            folder.mkdir(parents=True)
        else:
            folder = _new_folder(launch_dir() / "runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}")
    except FileExistsError:
        raise _exists(run_dir) from None
    except OSError as error:
        raise UserError(f"cannot make the run folder: {error}") from None
    os.environ[RUN_DIR_VARIABLE] = str(folder)
    return folder


def identity(folder: Path) -> dict[str, str]:
    """What run.json says; written when the run is new, so that a resumed run keeps its id."""
    path = folder / "run.json"
    if path.is_file():
        try:
            values: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
            if {"id", "revision"} <= values.keys():
                return values
        except (OSError, ValueError, AttributeError):
            pass
        raise UserError(f"{path} is damaged; delete it to go on under a new id in wandb")
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    values = {"id": secrets.token_hex(4), "started": started, "revision": git_revision()}
    write_json(path, values)
    return values


def refuse_existing(run_dir: str | None) -> None:
    """Raise UserError if `run_dir` exists: better now than after minutes of preparing data."""
    if run_dir is not None and is_first_process() and from_launch_dir(run_dir).exists():
        raise _exists(run_dir)


def _exists(run_dir: str | None) -> UserError:
    resumable = (from_launch_dir(run_dir or "") / "checkpoints" / "last.ckpt").is_file()
    also = f", or continue that run with resume={run_dir}" if resumable else ""
    return UserError(f"run_dir {run_dir} exists already; choose another{also}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep the run folder for this process; UserError if another trains in it."""
    if fcntl is None or not is_first_process():
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is training in {folder}") from None
        yield
    finally:
        os.close(handle)


def _new_folder(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}_{number}")
        try:
            folder.mkdir()  # fails if another run was quicker, however close
            return folder
        except FileExistsError:
            number += 1


def git_revision() -> str:
    """The code's commit, " dirty" if files differ from it; "unknown" outside a git checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Raises UserError if `path` can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def resume_config(config: DictConfig, overrides: Sequence[str]) -> tuple[DictConfig, Path]:
    """The configuration of the run that `config.resume` names, changed by `overrides`, and its folder.

    `config` is what the command line composed, `overrides` its words; the words count, for this run may have options
    that the default configuration lacks. Raises UserError: no such run, a damaged one, or an override that is not an
    `option=value` of an option that the run has.
    """
    folder = from_launch_dir(config.resume)
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"resume={config.resume}: {folder} is not a run folder (it has no config.yaml)")
    resumed: DictConfig | ListConfig | None
    try:
        resumed = OmegaConf.load(path)
    except (OSError, YAMLError):
        resumed = None
    if not isinstance(resumed, DictConfig) or not {"data", "trainer"} <= resumed.keys():
        raise UserError(f"resume={config.resume}: {path} is damaged")
    unknown = object()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        name = override.key_or_group
        if name == "resume":
            continue
        old = OmegaConf.select(resumed, name, default=unknown)
        if old is unknown or isinstance(old, DictConfig) or override.is_delete() or name == "run_dir":
            raise UserError(
                f"'{override.input_line}' cannot go with resume; single options of the run can, such as "
                "trainer.max_steps=1000 (with + before those that the default configuration lacks)"
            )
        OmegaConf.update(resumed, name, override.value())
    if "cache_dir" in resumed.data and "cache_dir" in config.data:
        resumed.data.cache_dir = config.data.cache_dir  # the user's place for caches now, not then
    return resumed, folder
