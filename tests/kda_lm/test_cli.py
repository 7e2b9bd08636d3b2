"""What command lines share: one line an error, and its exit status; tables; prompts as they were typed."""

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from support import compose_config

from data import DataError
from kda_lm.cli import one_line_errors, print_table, required_path
from kda_lm.errors import UserError
from kda_lm.training.stop import Stopped
from scripts.sample import plain_prompt
from scripts.sample import run as run_sample


@pytest.mark.parametrize(
    "error, status, line",
    [
        (UserError("no such thing"), 2, "error: no such thing\n"),
        (UserError("two\nlines"), 2, "error: two lines\n"),
        (DataError("no\n  text"), 2, "error: no text\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=repr,
)
def test_one_line_and_a_status(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, one_line_errors():
        raise error
    assert caught.value.code == status
    assert capsys.readouterr() == ("", line)


def test_faults_of_ours_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError
    with one_line_errors():
        pass


def test_tables_show_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Paths and names are not markup."""
    rows = {"text": "['a.txt', 'b.txt']", "folder": "/tmp/[bold]x[/bold]", "odd": "runs/[/x]", "long": "x" * 140}
    print_table("title [1]", rows)
    out = capsys.readouterr().out
    assert all(value in out for value in rows.values()) and "title [1]" in out
    assert "\x1b" not in out


def test_required_path(tmp_path: Path) -> None:
    assert required_path("ckpt", "a.ckpt") == tmp_path / "a.ckpt"
    for nothing in (None, ""):
        with pytest.raises(UserError, match=r"^ckpt is not set; give ckpt=PATH$"):
            required_path("ckpt", nothing)


# ------------------------------------------------------------------------------ prompts


def through_hydra(prompt: str) -> Any:
    """What the configuration holds after Hydra and OmegaConf have read the quoted argument."""
    (argument,) = plain_prompt([f"prompt={prompt}"])
    (override,) = OverridesParser.create().parse_overrides([argument])
    assert override.key_or_group == "prompt"
    config = OmegaConf.create({"prompt": ""})
    config.prompt = override.value()
    return OmegaConf.to_container(config, resolve=True)["prompt"]  # type: ignore[call-overload, index]


PROMPTS = [
    "",
    "The state of the Union is strong.",
    "a, b: c; (d) [e] {f}",
    "it's",
    "'quoted'",
    '"double"',
    "both ' and \"",
    "a=b",
    "prompt=x",
    "${x}",
    "$x ${x:y} $${z}",
    "\\${x}",
    "\\\\${x}",
    "back\\slash",
    "\\",
    "\\\\",
    "ends in \\",
    "\\'",
    "\\\\'",
    "'",
    "''",
    "\\n stays",
    "null",
    "true",
    "1",
    "1e3",
    "[1,2]",
    "{a: 1}",
    "  spaces  ",
    "tab\there",
    "two\nlines",
    "ends in a line\n",
    "backslash, line\\\n",
    "Ünïcode — 語 🙂",
    "%s @ # ! ~ + * ? | & < >",
    "glob(*)",
    "choice(a,b)",
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=repr)
def test_a_prompt_arrives_as_it_was_typed(prompt: str) -> None:
    assert through_hydra(prompt) == prompt


def test_any_prompt_arrives_as_it_was_typed() -> None:
    generator, wrong = random.Random(0), []
    for _ in range(300):
        prompt = "".join(generator.choices("a \\'\"${}=,:[]()\n", k=generator.randint(0, 6)))
        try:
            if through_hydra(prompt) != prompt:
                wrong.append(prompt)
        except (OverrideParseException, Exception) as error:
            wrong.append(f"{prompt!r}: {type(error).__name__}")
    assert not wrong, wrong[:10]


def test_other_arguments_are_left_to_hydra() -> None:
    words = ["ckpt=a,b", "num_samples=2", "--help", "+x=1"]
    assert plain_prompt(words) == words


def test_sampling_prints_prompt_and_text(
    run: Callable[..., tuple[dict[str, Any], Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    """All samples are returned and printed, the prompt before each; a seed gives the same texts again."""
    _, folder = run("trained")
    capsys.readouterr()
    prompt = "it's, \\ ${x} = "
    words = [f"ckpt={folder}/checkpoints/last.ckpt", "accelerator=cpu", "max_new_tokens=12", "num_samples=3"]
    options = compose_config("sample", *words, *plain_prompt([f"prompt={prompt}"]))
    texts = run_sample(options)
    out = capsys.readouterr().out
    assert len(texts) == 3 and all(text.startswith(prompt) for text in texts)
    assert out == texts[0] + "".join(f"\n\n--- sample {i} ---\n{texts[i - 1]}" for i in (2, 3)) + "\n"
    assert run_sample(options) == texts
    greedy = run_sample(compose_config("sample", *words, "temperature=0", "top_k=1000"))
    assert greedy[0] == greedy[1] == greedy[2]


def test_a_signal_ends_all_jobs() -> None:
    """With `go_on` a bad job is reported and the next one starts; a signal is no bad job."""
    with one_line_errors(go_on=True):
        raise UserError("a bad job")
    with pytest.raises(SystemExit) as caught, one_line_errors(go_on=True):
        raise Stopped(signal.SIGTERM, 3, Path("runs/x"))
    assert caught.value.code == 128 + signal.SIGTERM
