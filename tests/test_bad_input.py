"""What a user can get wrong: one line on stderr that starts with `error:`, exit status 2, and nothing broken."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT, TINY, compose_config

from data.tokenizers import byte_tokenizer
from kda_lm.checkpoint import read_checkpoint
from kda_lm.cli import one_line_errors
from kda_lm.errors import UserError
from kda_lm.runs import locked
from scripts.evaluating.score import run as run_evaluate
from scripts.sample import run as run_sample

Run = Callable[..., tuple[dict[str, Any], Path]]
Resume = Callable[..., dict[str, Any]]
Refuse = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """`refused(function, …)`: calls it as a command line would, and returns the line that is printed."""

    def call(function: Callable[..., Any], *arguments: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught, one_line_errors():
            function(*arguments)
        line = capsys.readouterr().err
        assert caught.value.code == 2
        assert line.startswith("error: ") and line.count("\n") == 1 and line.endswith("\n"), line
        return line

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on bytes; tests leave it as it is."""
    from train import train

    place = tmp_path_factory.mktemp("trained")
    (place / "text.txt").write_text("\n\n".join(f"paragraph {i} of the text that it learned" for i in range(40)))
    places = [f"data.files={place / 'text.txt'}", f"data.cache_dir={place / 'cache'}", f"run_dir={place / 'run'}"]
    train(compose_config("train", "name=tiny", *TINY, *places))
    return place / "run"


@pytest.fixture
def ckpt(trained: Path) -> Path:
    return trained / "checkpoints" / "last.ckpt"


# ------------------------------------------------------------------------------ train.py


@pytest.mark.parametrize(
    "words, said",
    [
        ("model.pattern=[kda,mamba]", "'mamba' kinds softmax linear delta gated_delta kda"),
        ("model.pattern=[]", "pattern empty"),
        ("model.pattern=kda", "model.pattern list"),
        ("+model.depth=3", "model 'depth' num_layers pattern"),
        ("+mixers.kda.heads=2", "mixers.kda 'heads' num_heads"),
        ("+optim.nesterov=true", "optim 'nesterov' momentum"),
        ("+trainer.epochs=2", "trainer 'epochs' max_steps"),
        ("+data.shuffle=true", "data 'shuffle' seq_len"),
        ("+samples.beams=2", "samples 'beams' top_k"),
        ("model.init=xavier", "model.init 'xavier' fan_in normal"),
        ("mixers.kda.decay=row", "mixers.kda.decay 'row' none scalar channel"),
        ("mixers.kda.mixer=conv", "mixers.kda.mixer 'conv' recurrent softmax"),
        ("optim.optimizer=sgd", "optim.optimizer 'sgd' adamw muon"),
        ("optim.schedule=linear", "optim.schedule 'linear' cosine wsd constant"),
        ("trainer.precision=fp8", "trainer.precision 'fp8' bf16-mixed"),
        ("trainer.cuda_graph=maybe", "trainer.cuda_graph 'maybe'"),
        ("trainer.accelerator=tpu", "trainer.accelerator 'tpu' auto cpu gpu"),
        ("data.tokenizer=words", "data.tokenizer 'words' bytes bpe file"),
        ("data.sample_by=verse", "data.sample_by 'verse' document paragraph line"),
        ("data.corpus=wiki", "data.corpus 'wiki' sotu text"),
        ("model.dim=15", "mixers.kda 15 num_heads"),
        ("model.dim=0", "dim is 0"),
        ("mixers.kda.num_heads=5", "num_heads 5 16"),
        ("mixers.softmax.num_kv_heads=3", "num_kv_heads 3 num_heads 2"),
        ("mixers.kda=null", "mixers.kda"),
        ("mixers.kda.backend=triton", "mixers 'triton' auto torch reference"),  # on a CPU
        ("mixers.softmax.backend=triton", "mixers 'triton' auto torch reference"),  # on a CPU
        ("mixers.softmax.backend=cudnn", "mixers.softmax.backend 'cudnn' auto triton torch reference"),
        ("mixers.softmax.window=0", "mixers.softmax window 0 positive null"),
        ("optim.lr=-1", "lr positive"),
        ("optim.lr=.nan", "lr"),
        ("optim.lr=fast", "optim.lr 'fast' number"),
        ("optim.eps=-1", "eps"),
        ("optim.warmup_steps=-1", "warmup_steps"),
        ("trainer.max_steps=0", "max_steps 0"),
        ("trainer.max_steps=1.5", "trainer.max_steps 1.5 whole number"),
        ("trainer.batch_size=0", "batch_size 0"),
        ("trainer.micro_batch_size=3", "batch_size 4 3"),
        ("trainer.micro_batch_size=0", "micro_batch_size 0"),
        ("trainer.devices=0", "devices 0"),
        ("trainer.ema_decay=1.5", "ema_decay 1.5"),
        ("trainer.val_every=0", "val_every 0"),
        ("samples.max_new_tokens=0", "max_new_tokens 0 at least 1"),
        ("samples.prompts=the", "samples.prompts"),
        ("samples.prompts=[1]", "samples.prompts"),
        ("samples.prompts=null", "samples.prompts"),
        ("seed=-1", "seed -1"),
        ("seed=half", "seed"),
        ("wandb=maybe", "wandb"),
        ("data.seq_len=100000", "seq_len 100001"),
        ("data.seq_len=0", "seq_len 0"),
        ("data.seq_len=long", "data.seq_len 'long'"),
        ("data.val_fraction=0", "val_fraction 0"),
        ("data.num_workers=-1", "num_workers -1"),
        ("data.tokenizer=file", "tokenizer_file"),
        ("data.tokenizer=file data.tokenizer_file=none.json", "none.json"),
        ("data.tokenizer=bpe data.vocab_size=10", "vocab_size 10"),
        ("data.files=none.txt", "none.txt"),
        ("data.files='*.none'", "*.none"),
        ("data.files=[]", "data files"),
        ("data.files=null", "data files"),
        ("data.val_files=none.txt", "none.txt"),
        ("resume=nowhere", "resume=nowhere config.yaml"),
    ],
)
def test_train(run: Run, refused: Refuse, words: str, said: str) -> None:
    """The line names what was given and what is taken; no run folder is left behind."""
    line = refused(run, "bad", *words.split())
    assert all(word in line for word in said.split()), line
    assert not Path("bad").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(run: Run, refused: Refuse, ckpt: Path) -> None:
    assert "no CUDA GPU" in refused(run, "bad", "trainer.accelerator=gpu")
    line = refused(run, "bad", "trainer.cuda_graph=true", "data.isolate_documents=true")
    assert "trainer.cuda_graph is true, but needs a GPU and data.isolate_documents=false" in line
    for script, function in (("sample", run_sample), ("evaluate", run_evaluate)):
        line = refused(function, compose_config(script, f"ckpt={ckpt}", "accelerator=gpu"))
        assert "no CUDA GPU" in line and line.startswith(f"error: {script}")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "empty"),
        (b" \n\n \n", ""),
        (b"caf\xe9 " * 100, "UTF-8"),
        (b"\xff\xfe" + "text".encode("utf-16-le") * 50, "UTF-8"),
        (b"one paragraph " * 50, "val_files"),
        (b"short\n\ntext", "seq_len"),
        (b"long enough for training " * 20 + b"\n\nno", "validation"),
    ],
    ids=["empty", "blank", "latin-1", "utf-16", "one-document", "short", "short-validation"],
)
def test_text(run: Run, refused: Refuse, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "odd.txt").write_bytes(content)
    words = [f"data.files={tmp_path / 'odd.txt'}"]
    if said == "validation":
        (tmp_path / "val.txt").write_text("no")
        words.append("data.val_files=val.txt")
    line = refused(run, "bad", *words)
    assert said in line and not Path("bad").exists()


def test_a_folder_without_text(run: Run, refused: Refuse, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89PNG")
    assert "folder" in refused(run, "bad", "data.files=folder")


def test_a_run_folder_that_exists(run: Run, refused: Refuse, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years of work")
    before = (tmp_path / "taken").stat().st_mtime_ns
    line = refused(run, "taken")
    assert "taken exists already" in line and "resume" not in line  # there is nothing to go on with
    assert [p.name for p in (tmp_path / "taken").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "taken").stat().st_mtime_ns == before
    (tmp_path / "file").write_text("")
    assert "file" in refused(run, "file")
    assert "file" in refused(run, "file/run")


# ------------------------------------------------------------------------------ resume


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_resuming_what_is_no_run(resume: Resume, refused: Refuse, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for place in ("empty", "file", "nowhere"):
        assert f"resume={place}" in refused(resume, place)
        assert "not a run folder" in refused(resume, place)


def test_resuming_before_the_first_checkpoint(resume: Resume, refused: Refuse, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    assert "copy has no checkpoint" in refused(resume, "copy")


def test_fewer_steps_than_the_run_has(resume: Resume, refused: Refuse, copy: Path) -> None:
    before = (copy / "config.yaml").read_text()
    assert "trainer.max_steps is 1; the run has" in refused(resume, "copy", "trainer.max_steps=1")
    assert (copy / "config.yaml").read_text() == before


def test_two_processes_in_one_run(resume: Resume, refused: Refuse, copy: Path) -> None:
    with locked(copy):
        assert "another process is training in" in refused(resume, "copy", "trainer.max_steps=100")


def test_text_that_changed_is_not_scored_as_the_runs_own(run: Run, refused: Refuse, corpus: Path) -> None:
    """The split is by documents: one more of them, and some that were trained on would validate."""
    _, folder = run("scored")
    corpus.write_text(corpus.read_text() + "\n\na paragraph more\n")
    line = refused(run_evaluate, compose_config("evaluate", f"ckpt={folder / 'checkpoints' / 'last.ckpt'}"))
    assert "has changed since" in line and "text=" in line


@pytest.mark.parametrize("name, content", [("config.yaml", "{a: ["), ("config.yaml", ""), ("run.json", "{"),
                                           ("checkpoints/last.ckpt", "x")])  # fmt: skip
def test_resuming_a_damaged_run(resume: Resume, refused: Refuse, copy: Path, name: str, content: str) -> None:
    (copy / name).write_text(content)
    assert Path(name).name in refused(resume, "copy", "trainer.max_steps=10")


@pytest.mark.parametrize(
    "word",
    [
        "model.dim=32",
        "model.num_layers=3",
        "mixers.kda.conv_width=2",
        "optim.optimizer=adamw",
        "trainer.max_steps=0",
        "trainer=default",
        "optim=adamw",
        "run_dir=new",
    ],
)
def test_resuming_with_what_cannot_change(resume: Resume, refused: Refuse, copy: Path, word: str) -> None:
    """And the folder's configuration is still the run's own."""
    config = (copy / "config.yaml").read_text()
    refused(resume, "copy", word)
    assert (copy / "config.yaml").read_text() == config


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_resuming_on_other_text(run: Run, resume: Resume, refused: Refuse, corpus: Path, tokenizer: str) -> None:
    """Other text is another run: half of its curve would be of one and half of the other."""
    run("run", f"data.tokenizer={tokenizer}", "data.vocab_size=300")
    text = corpus.read_text()
    corpus.write_text(text.replace("state", "steak").replace("people", "apples"))
    assert "text" in refused(resume, "run", "trainer.max_steps=12")
    corpus.write_text(text)
    assert resume("run", "trainer.max_steps=12")["steps"] == 12


# ------------------------------------------------------------------------------ sample.py, evaluate.py

SCRIPTS = {"sample": run_sample, "evaluate": run_evaluate}
each_script = pytest.mark.parametrize("script", SCRIPTS)


@each_script
def test_checkpoint_not_given_or_not_there(script: str, refused: Refuse, trained: Path) -> None:
    function = SCRIPTS[script]
    assert "ckpt is not set" in refused(function, compose_config(script))
    assert "ckpt is not set" in refused(function, compose_config(script, "ckpt=''"))
    assert "none.ckpt does not exist" in refused(function, compose_config(script, "ckpt=none.ckpt"))
    line = refused(function, compose_config(script, f"ckpt={trained}"))
    assert "does not exist" in line and "best.ckpt" in line
    assert "typo.ckpt" in refused(function, compose_config(script, f"ckpt={trained}/checkpoints/typo.ckpt"))


class Foreign:
    """Something that weights_only=True will not make."""


@each_script
@pytest.mark.parametrize("what", ["empty", "text", "random", "half", "dict", "tensor", "list", "object", "key"])
def test_what_is_no_checkpoint(script: str, what: str, refused: Refuse, ckpt: Path, tmp_path: Path) -> None:
    path, content = tmp_path / "odd.ckpt", ckpt.read_bytes()
    plain = {
        "empty": b"",
        "text": b"hello\n",
        "random": random.Random(0).randbytes(5000),
        "half": content[: len(content) // 2],
    }
    things: dict[str, Any] = {
        "dict": OrderedDict(weight=torch.zeros(2)), "tensor": torch.zeros(3), "list": [1], "object": Foreign(),
        "key": {"kda_lm": 1, "state_dict": {}},
    }  # fmt: skip
    if what in plain:
        path.write_bytes(plain[what])
    else:
        torch.save(things[what], path)
    assert "odd.ckpt" in refused(SCRIPTS[script], compose_config(script, f"ckpt={path}"))


def test_no_bytes_at_all_make_a_traceback(ckpt: Path, tmp_path: Path) -> None:
    """Noise behind the first bytes of a pickle, of a zip file and of nothing, and files cut anywhere."""
    generator, content, path = random.Random(0), ckpt.read_bytes(), tmp_path / "odd.ckpt"
    noise = [
        start + generator.randbytes(40) for start in (b"", b"\x80\x02", b"PK\x03\x04", b"\x80\x02}(") for _ in range(60)
    ]
    cut = [content[: generator.randrange(len(content))] for _ in range(10)]
    wrong = []
    for data in noise + cut:
        path.write_bytes(data)
        try:
            read_checkpoint(path)
        except UserError as refusal:
            assert "\n" not in str(refusal)
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {data[:8]!r}")
        else:
            wrong.append(f"read: {data[:8]!r}")
    assert not wrong, wrong[:10]


@each_script
def test_a_tokenizer_of_another_size(script: str, refused: Refuse, ckpt: Path, tmp_path: Path) -> None:
    larger = json.loads(byte_tokenizer().json)
    larger["added_tokens"].append({**larger["added_tokens"][0], "id": 257, "content": "<|more|>"})
    (tmp_path / "other.json").write_text(json.dumps(larger))
    line = refused(SCRIPTS[script], compose_config(script, f"ckpt={ckpt}", "tokenizer=other.json"))
    assert all(word in line for word in ("vocabulary mismatch", "258", "257")), line
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "none.json"):
        assert name in refused(SCRIPTS[script], compose_config(script, f"ckpt={ckpt}", f"tokenizer={name}"))


@pytest.mark.parametrize(
    "words, said",
    [
        ("max_new_tokens=0", "max_new_tokens 0 at least 1"),
        ("num_samples=0", "num_samples 0"),
        ("temperature=-1", "temperature -1"),
        ("top_k=0", "top_k 0"),
        ("top_p=2", "top_p 2"),
        ("precision=fp8", "precision 'fp8' bf16-mixed"),
        ("+beams=3", "'beams'"),
    ],
)
def test_sample_options(refused: Refuse, ckpt: Path, words: str, said: str) -> None:
    line = refused(run_sample, compose_config("sample", f"ckpt={ckpt}", *words.split()))
    assert all(word in line for word in said.split()), line


@pytest.mark.parametrize(
    "words, said",
    [
        ("text=none.txt", "none.txt"),
        ("text=blank.txt", "blank"),
        ("text=latin.txt", "UTF-8"),
        ("seq_len=0", "seq_len 0"),
        ("batch_size=0", "batch_size 0"),
        ("json=latin.txt/result.json", "latin.txt/result.json"),
        ("+windows=3", "'windows'"),
    ],
)
def test_evaluate_options(refused: Refuse, ckpt: Path, tmp_path: Path, words: str, said: str) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    line = refused(run_evaluate, compose_config("evaluate", f"ckpt={ckpt}", *words.split()))
    assert all(word in line for word in said.split()), line


# ------------------------------------------------------------------------------ the real command lines


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=120)


def test_the_train_command(corpus: Path) -> None:
    found = command(str(ROOT / "train.py"), "model.pattern=[mamba]", "data=text", f"data.files={corpus}",
                    "data.tokenizer=bytes", "data.sample_by=paragraph", "wandb=false")  # fmt: skip
    assert found.returncode == 2
    assert [line for line in found.stderr.splitlines() if not line.startswith("tokens:")] == [
        "error: model.pattern: unknown layer kind 'mamba'; kinds are softmax, linear, delta, gated_delta, kda"
    ]
    assert not Path("runs").exists() and not Path("outputs").exists()


def test_an_option_that_hydra_itself_refuses() -> None:
    """A misspelt option without `+` never reaches the program, but ends without a traceback too."""
    found = command(str(ROOT / "train.py"), "model.depth=3")
    assert found.returncode != 0
    assert "depth" in found.stderr and "Traceback" not in found.stderr


def test_the_sample_command(ckpt: Path) -> None:
    """A prompt with everything that a shell and Hydra might read something into."""
    prompt = 'It\'s "so", a=b: \\ ${x} [1, 2] {c} (d) #'
    found = command(str(ROOT / "scripts" / "sample.py"), f"ckpt={ckpt}", f"prompt={prompt}", "max_new_tokens=3",
                    "accelerator=cpu")  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(prompt) and found.stderr == ""
