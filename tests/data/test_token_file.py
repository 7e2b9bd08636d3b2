import json
import logging
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import data.corpora
import data.token_file
from data import TokenFile, Tokenizer
from data.corpora import FilesCorpus, Part
from data.token_file import token_file
from data.tokenizers import byte_tokenizer, train_bpe


@pytest.fixture
def part(folder: Path) -> Part:
    return Part(FilesCorpus("texts", sorted(folder.glob("*.txt"))), "train")


@pytest.fixture
def tokenizer(part: Part) -> Tokenizer:
    return train_bpe(part, 300, 50_000)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tokens").iterdir())


def test_layout(part: Part, tokenizer: Tokenizer, tmp_path: Path, speeches: list[str]) -> None:
    file = token_file(part, tokenizer, tmp_path)
    expected: list[int] = []
    starts = []
    for speech in speeches:
        starts.append(len(expected))
        expected += [tokenizer.eot_id, *tokenizer.encode(speech)]
    starts.append(len(expected))
    expected.append(tokenizer.eot_id)
    assert file.tokens.tolist() == expected
    assert file.offsets.tolist() == starts
    assert file.offsets.dtype == np.int64
    manifest = file.manifest
    assert (manifest.tokens, manifest.documents) == (len(expected), len(speeches))
    assert manifest.text_bytes == sum(len(speech.encode()) for speech in speeches)
    assert (manifest.corpus, manifest.split, manifest.vocab_size) == ("texts", "train", 300)
    assert file.path.name == f"texts-train-{manifest.key[:12]}"
    assert "=" not in file.path.name


@pytest.mark.parametrize(("extra", "dtype"), [(65_536 - 257, "<u2"), (65_537 - 257, "<u4")])
def test_dtype_follows_the_vocabulary(part: Part, tmp_path: Path, extra: int, dtype: str) -> None:
    stored = json.loads(byte_tokenizer().json)
    stored["model"]["vocab"] |= {f"unused{i}": 256 + i for i in range(extra)}
    file = token_file(part, Tokenizer(json.dumps(stored)), tmp_path)
    assert file.manifest.dtype == dtype
    assert file.tokens[:4].tolist() == [256 + extra, *part.corpus[0][:3].encode()]


def test_huge_documents_are_encoded_in_pieces(
    part: Part, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = token_file(part, tokenizer, tmp_path / "whole")
    monkeypatch.setattr(data.corpora.cut, "__defaults__", (500,))
    monkeypatch.setattr(data.token_file, "BATCH_BYTES", 1200)
    pieces = token_file(part, tokenizer, tmp_path / "pieces")
    assert pieces.tokens.tolist() == whole.tokens.tolist()
    assert pieces.offsets.tolist() == whole.offsets.tolist()
    assert pieces.manifest == whole.manifest


def test_unchanged_is_reused_and_changed_is_built_beside(
    part: Part, tokenizer: Tokenizer, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E8."""
    caplog.set_level(logging.INFO)
    first = token_file(part, tokenizer, tmp_path)
    before = (first.path / "tokens.bin").stat()
    caplog.clear()
    again = token_file(part, tokenizer, tmp_path)
    assert "reusing" in caplog.text
    assert "encoding" not in caplog.text
    assert (again.path / "tokens.bin").stat().st_ino == before.st_ino

    other = token_file(part, byte_tokenizer(), tmp_path)
    assert other.tokens[1:4].tolist() == list(part.corpus[0][:3].encode())
    (folder / "00.txt").write_text("changed")
    changed = token_file(Part(FilesCorpus("texts", sorted(folder.glob("*.txt"))), "train"), tokenizer, tmp_path)
    assert tokenizer.decode(changed.tokens[: changed.offsets[1]]) == "changed"
    assert len({first.path, other.path, changed.path}) == 3 == len(files_in(tmp_path))


@pytest.mark.parametrize("damage", ["shorter", "longer", "no offsets", "no manifest", "bad manifest", "other key"])
def test_damage_is_repaired_with_a_warning(
    part: Part, tokenizer: Tokenizer, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = token_file(part, tokenizer, tmp_path)
    tokens, manifest = first.tokens.tolist(), first.path / "manifest.json"
    stored = (first.path / "tokens.bin").read_bytes()
    if damage in ("shorter", "longer"):
        (first.path / "tokens.bin").write_bytes(stored[:-2] if damage == "shorter" else stored + b"xx")
    elif damage == "no offsets":
        (first.path / "offsets.npy").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text(manifest.read_text()[:40])
    else:
        manifest.write_text(manifest.read_text().replace(first.manifest.key, "0" * 32))
    again = token_file(part, tokenizer, tmp_path)
    assert "is damaged" in caplog.text
    assert again.tokens.tolist() == tokens
    assert files_in(tmp_path) == [first.path.name]


def test_a_killed_build_leaves_nothing_that_looks_whole(part: Part, tmp_path: Path, folder: Path) -> None:
    """SIGKILL after the tokens are written, before the folder has its name."""
    code = (
        "import os, signal, sys; from pathlib import Path; import data.token_file as t\n"
        "from data.corpora import FilesCorpus, Part; from data.tokenizers import byte_tokenizer\n"
        "t._publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "part = Part(FilesCorpus('texts', sorted(Path(sys.argv[1]).glob('*.txt'))), 'train')\n"
        "t.token_file(part, byte_tokenizer(), Path(sys.argv[2]))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(folder), str(tmp_path)], check=False)
    assert result.returncode == -signal.SIGKILL
    assert files_in(tmp_path)
    assert all(name.startswith(".") for name in files_in(tmp_path))
    file = token_file(part, byte_tokenizer(), tmp_path)
    assert len(file) == file.manifest.text_bytes + file.manifest.documents + 1


def test_an_error_while_building_leaves_nothing(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(data.token_file, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        token_file(part, byte_tokenizer(), tmp_path)
    assert files_in(tmp_path) == []


def test_two_may_build_at_once(
    part: Part, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, publish = threading.Barrier(2), data.token_file._publish

    def both_publish(*arguments: object) -> None:
        barrier.wait(30)
        publish(*arguments)

    monkeypatch.setattr(data.token_file, "_publish", both_publish)
    files: list[TokenFile] = []
    threads = [threading.Thread(target=lambda: files.append(token_file(part, tokenizer, tmp_path))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files[0].tokens.tolist() == files[1].tokens.tolist()
    assert files_in(tmp_path) == [files[0].path.name]


def test_pickles_as_its_path(part: Part, tmp_path: Path) -> None:
    file = token_file(part, byte_tokenizer(), tmp_path)
    stored = pickle.dumps(file)
    assert len(stored) < 1000
    assert pickle.loads(stored).tokens.tolist() == file.tokens.tolist()


def test_others_may_read_it(part: Part, tmp_path: Path) -> None:
    mode = token_file(part, byte_tokenizer(), tmp_path).path.stat().st_mode
    assert mode & 0o055 == 0o055
