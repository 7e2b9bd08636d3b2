"""Run folders: never shared, never overwritten, found from anywhere; and what a resume takes."""

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from data import DataError
from kda_lm import runs
from kda_lm.config import read_config
from kda_lm.errors import UserError
from kda_lm.runs import create_run_folder, from_launch_dir, git_revision, identity, locked, resume_config
from kda_lm.training.config import RunConfig

Run = Callable[..., tuple[dict[str, Any], Path]]
Resume = Callable[..., dict[str, Any]]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_folders_are_named_by_time_and_name() -> None:
    folder = create_run_folder(None, "hybrid")
    assert folder.is_dir() and folder.parent == Path.cwd() / "runs"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_hybrid", folder.name)


def test_runs_of_one_second_get_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty at once (F5)."""

    class Stopped(runs.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2026, 1, 31, 12, 0, 0)

    monkeypatch.setattr(runs, "datetime", Stopped)
    with ThreadPoolExecutor(20) as pool:
        folders = list(pool.map(lambda _: create_run_folder(None, "x"), range(20)))
    assert len(set(folders)) == 20 and all(folder.is_dir() for folder in folders)
    assert {f.name for f in folders} == {"2026-01-31_12-00-00_x", *(f"2026-01-31_12-00-00_x_{i}" for i in range(2, 21))}


def test_two_runs_cannot_take_one_explicit_folder() -> None:
    """The second of two that start at once is refused, before either has written anything (F5)."""
    taken, refused = [], []

    def take(_: int) -> None:
        try:
            taken.append(create_run_folder("same", "x"))
        except UserError as error:
            refused.append(str(error))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, range(8)))
    assert len(taken) == 1 and len(refused) == 7


@pytest.mark.parametrize("name", ["a=b", "lr=0.1,seed=2", "a/b", "../up", "", "two words"])
def test_names_are_single_folders_without_equals_signs(name: str) -> None:
    """Hydra and lightning read `=` in a path as an assignment; a slash would put the run elsewhere."""
    with pytest.raises(UserError, match=r"name is .*; it takes letters") as refusal:
        read_config(RunConfig, {"name": name}, "train")
    assert "\n" not in str(refusal.value)


def test_an_existing_folder_is_refused_and_left_alone(run: Run) -> None:
    _, folder = run("taken")
    before = contents(folder)
    with pytest.raises(UserError, match=r"exists already.*resume=taken"):
        run("taken", "seed=5")
    assert contents(folder) == before


def test_a_nested_folder_is_fine() -> None:
    assert create_run_folder("a/b/c", "x").is_dir()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_way(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError):
        create_run_folder(place, "x")
    assert (tmp_path / "file").read_text() == "x"


def test_processes_of_one_run_share_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run sets for the processes that it starts counts there, and not in the next run (F1)."""
    first = create_run_folder(None, "x")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert create_run_folder(None, "x") == first == create_run_folder(str(first), "x")
    monkeypatch.delenv("LOCAL_RANK")
    assert create_run_folder(None, "x") != first


def test_paths_start_where_the_user_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_launch_dir("a/b") == tmp_path / "a" / "b"
    assert from_launch_dir("/a/b") == Path("/a/b")
    monkeypatch.setenv("HOME", "/somebody")
    assert from_launch_dir("~/x") == Path("/somebody/x")


def test_identity_is_kept(tmp_path: Path) -> None:
    first = identity(tmp_path)
    assert identity(tmp_path) == first == json.loads((tmp_path / "run.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{8}", first["id"])
    (tmp_path / "other").mkdir()
    assert identity(tmp_path / "other")["id"] != first["id"]


def test_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}( dirty)?|unknown", git_revision())
    monkeypatch.setenv("PATH", "")
    assert git_revision() == "unknown"


# ------------------------------------------------------------------------------ resuming


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    config = {"seed": 0, "run_dir": "old", "trainer": {"max_steps": 8}, "data": {"files": ["a"], "cache_dir": "then"}}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    return folder


def test_overrides_change_the_old_configuration(saved: Path) -> None:
    data = {"files": ["b"], "cache_dir": "now"}
    now = OmegaConf.create({"resume": "old", "seed": 7, "trainer": {"max_steps": 12}, "data": data})
    config, folder = resume_config(now, ["resume=old", "trainer.max_steps=12"])
    assert folder == saved and config.trainer.max_steps == 12
    assert config.seed == 0 and config.data.files == ["a"]  # what was not asked for stays
    assert config.data.cache_dir == "now"  # but for the place of caches, which is the machine's


@pytest.mark.parametrize(
    "override", ["trainer=fast", "+trainer.x=1", "~seed", "experiment=kda", "run_dir=new", "typo=1"]
)
def test_what_cannot_go_with_resume(saved: Path, override: str) -> None:
    now = OmegaConf.create({"resume": "old", "trainer": {"max_steps": 8}})
    with pytest.raises(UserError) as caught:
        resume_config(now, ["resume=old", override])
    assert override in str(caught.value) and "\n" not in str(caught.value)


def test_a_resume_from_another_directory(
    run: Run, resume: Resume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths of the old run mean what they meant (F6)."""
    run("old", "data.files=corpus.txt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resume("../old", "trainer.max_steps=10")["steps"] == 10
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_refused_resume_changes_nothing(run: Run, resume: Resume) -> None:
    """Whatever is wrong with the words, the run can be resumed without them afterwards."""
    _, folder = run("old")
    before = contents(folder)
    for word in ("model.dim=32", "optim.lr=-1", "trainer.batch_size=0", "data.seq_len=100000", "optim.optimizer=adamw"):
        try:
            resume("old", word)
        except UserError as refusal:
            assert "\n" not in str(refusal)
            assert contents(folder) == before, word
        except ValueError as refusal:  # the data room's
            assert type(refusal).__name__ == "DataError", (word, refusal)
            assert contents(folder) == before, word
    assert resume("old", "trainer.max_steps=10")["steps"] == 10


def test_resuming_with_fewer_steps_than_are_done(run: Run, resume: Resume) -> None:
    """There is nothing to do: say so, or end as the run ended; not a traceback and not a shorter history."""
    whole, folder = run("old")
    try:
        again = resume("old", "trainer.max_steps=4")
    except UserError as refusal:
        assert "\n" not in str(refusal)
    else:
        assert again["steps"] == 8 and again["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-6)
    assert len((folder / "metrics.csv").read_text().splitlines()) == 9


def test_resuming_a_finished_run(run: Run, resume: Resume) -> None:
    whole, folder = run("old")
    table = (folder / "metrics.csv").read_text()
    again = resume("old")
    assert again["steps"] == 8 and again["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-6)
    assert (folder / "metrics.csv").read_text() == table


def test_run_folders_follow_the_environment_of_each_test() -> None:
    assert runs.RUN_DIR_VARIABLE not in os.environ


def test_a_resume_after_the_text_moved(run: Run, resume: Resume, corpus: Path) -> None:
    """The words of the command line count, `+` included: the default configuration has no data.files."""
    run("moved", "trainer.max_steps=4")
    corpus.rename("elsewhere.txt")
    with pytest.raises(DataError, match="no such file"):
        resume("moved", "trainer.max_steps=6")
    assert resume("moved", "trainer.max_steps=6", "+data.files=elsewhere.txt")["steps"] == 6


def test_metrics_survive_a_cut_line(run: Run, resume: Resume) -> None:
    _, folder = run("cut")
    with (folder / "metrics.csv").open("a") as file:
        file.write("9,3.1")
        file.write("\n,\n")
    resume("cut", "trainer.max_steps=12")
    steps = [line.split(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
    assert steps == [str(step) for step in range(1, 13)]


def test_a_finished_run_keeps_its_speed(run: Run, resume: Resume) -> None:
    summary, _ = run("done")
    again = resume("done")
    assert again["tokens_per_second"] == summary["tokens_per_second"] is not None
    assert again["val/loss"] == summary["val/loss"]


def test_the_lock_speaks_of_itself_only(tmp_path: Path) -> None:
    """A blocked write of the run's own is not another process's run."""
    with pytest.raises(BlockingIOError), locked(tmp_path):
        raise BlockingIOError
    with locked(tmp_path), pytest.raises(UserError, match="another process"), locked(tmp_path):
        pass
