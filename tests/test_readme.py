"""Every command of the README runs, made small; and its map names what is there."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

from data.tasks import TASKS

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
]
SMALL = [
    "model.dim=16",
    "model.num_layers=2",
    "data.seq_len=16",
    "data.max_val_windows=4",
    "trainer.batch_size=2",
    "trainer.max_steps=2",
    "trainer.val_every=2",
    "trainer.accelerator=cpu",
    "samples.max_new_tokens=3",
    "wandb=false",
]
SMALL_TASK = [word for word in SMALL if word not in ("data.seq_len=16", "data.max_val_windows=4")]
SMALL_TASK += ["data.val_samples=4", "data.test_samples=4"]
SMALL_TRAINING = ["--sizes", "2x64", "--seq-lens", "64", "--tokens-per-step", "64", "--vocab", "300"]
SMALL_TRAINING += ["--patterns", "linear", "--steps", "1", "--warmup", "1", "--device", "cpu"]
SMALL_DECODING = ["--sizes", "1x32", "--head-dim", "16", "--vocab", "300", "--batches", "2", "--contexts", "4"]
SMALL_DECODING += ["--patterns", "kda"]
SMALL_BENCHMARK = {"kernels": ["--shapes", "1x64x1x16"], "train": SMALL_TRAINING, "decode": SMALL_DECODING}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the reader is: a folder with some text, and a run called FOLDER; one cache for all commands."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "my" / "folder").mkdir(parents=True)
    for i in range(5):
        (folder / "my" / "folder" / f"{i}.txt").write_text("A line of somebody's own text, with words in it.\n" * 20)
    (folder / "questions.jsonl").write_text('{"text": "It was the best of times"}\n')
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times.\n" * 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("KDA_LM_CACHE", str(folder / "cache"))
        call(patch, "train.py", ["run_dir=runs/FOLDER", *SMALL])
    yield folder


def call(patch: pytest.MonkeyPatch, script: str, arguments: list[str]) -> None:
    """What `python script arguments` does, in this process."""
    import train
    from scripts import benchmark, evaluate, sample

    if script == "scripts/sample.py":
        arguments = sample.plain_prompt(arguments)
    patch.setattr(sys, "argv", [script, *arguments])
    module = {"train": train, "evaluate": evaluate, "sample": sample, "benchmark": benchmark}[Path(script).stem]
    module.main()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python ")])
def test_python_commands(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("KDA_LM_CACHE", str(home / "cache"))
    _, script, *arguments = shlex.split(command)
    if script == "train.py" and "--help" not in arguments:
        resumed = any(argument.startswith("resume=") for argument in arguments)
        on_a_task = any(argument.removeprefix("data=") in TASKS for argument in arguments)
        arguments += ["trainer.max_steps=3"] if resumed else SMALL_TASK if on_a_task else SMALL
    if script == "scripts/sample.py":
        arguments.append("max_new_tokens=3")
    if arguments[0] == "needle":
        arguments += ["lengths=[100]", "samples=2"]
    if script == "scripts/benchmark.py":
        arguments += SMALL_BENCHMARK[arguments[0]]
    try:
        call(monkeypatch, script, arguments)
    except SystemExit as end:
        assert not end.code
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "expected"), [("train", "python train.py"), ("test", "python -m pytest -n 2"), ("lint", "mypy")]
)
def test_make(target: str, expected: str) -> None:
    """What make would run; the set-up before it is too long for a test."""
    dry = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert expected in dry.stdout
    assert any(command.startswith(f"make {target}") for command in COMMANDS) or target == "lint"


def test_every_bash_line_is_tested() -> None:
    assert all(command.startswith(("python ", "make ", ". .venv/bin/activate")) for command in COMMANDS if command)


def test_map_names_what_is_there() -> None:
    the_map = README[README.index("## The map") :].split("```")[1]
    for name in re.findall(r"\b[\w/]+\.py\b", the_map):
        assert list(ROOT.glob(f"**/{name}")), name
    for folder in re.findall(r"^\s*(\w+)/", the_map, re.M):
        assert list(ROOT.glob(f"**/{folder}/")), folder
