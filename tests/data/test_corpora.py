import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data import DataError
from data.corpora import PIECE_CHARS, READ_BYTES, Corpus, FilesCorpus, Part, cut, file_corpus, sotu_corpus

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(name, text or bytes): a file."""

    def make(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def open_files(tmp_path: Path, *files: Path | str, **options: str) -> Corpus:
    return file_corpus([str(file) for file in files], cache_dir=tmp_path / "cache", **options)


def test_sotu_is_249_documents_without_importing_the_package() -> None:
    code = "import sys, data.corpora as c; print(len(c.sotu_corpus()), 'sotu' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["249", "False"]
    assert sotu_corpus()[0].startswith("Fellow-Citizens of the Senate")


def test_every_format_gives_the_same_documents(tmp_path: Path, write: Write) -> None:
    import pyarrow
    import pyarrow.parquet

    documents = ["first é", "second\nwith two lines", "третий 👋"]
    rows = [{"id": i, "text": document} for i, document in enumerate(documents)]
    files = [write(f"{i}.txt", document) for i, document in enumerate(documents)]
    jsonl = write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for source in (files, [jsonl], [tmp_path / "rows.parquet"], [tmp_path / "*.txt"]):
        corpus = open_files(tmp_path, *source)
        assert list(corpus) == documents
        assert [corpus[i] for i in range(len(corpus))] == documents
        assert corpus[-1] == documents[-1]
        assert corpus.sizes().tolist() == [len(document.encode()) for document in documents]


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", ["one\ntwo\n\nthree\n\n \n"]),
        ("paragraph", ["one\ntwo", "three"]),
        ("line", ["one", "two", "three"]),
    ],
)
def test_sample_by(tmp_path: Path, write: Write, sample_by: str, expected: list[str]) -> None:
    """Documents of white space only are dropped."""
    file = write("a.md", "one\ntwo\n\nthree\n\n \n")
    assert list(open_files(tmp_path, file, sample_by=sample_by)) == expected


def test_rows_come_in_groups_and_huge_ones_in_pieces(tmp_path: Path, write: Write) -> None:
    huge = "wörd " * (READ_BYTES // 5)
    documents = [*(f"row {i}" for i in range(2500)), huge, "last"]
    corpus = open_files(tmp_path, write("a.jsonl", "".join(json.dumps({"text": d}) + "\n" for d in documents)))
    assert list(corpus) == documents
    rows = np.array([3, 5, 2400, 2500, 2501])
    pieces = list(corpus.pieces(rows))
    assert max(len(text) for _, text in pieces) <= PIECE_CHARS
    assert [first for first, _ in pieces].count(True) == len(rows)
    assert "".join(text for _, text in pieces) == "".join(documents[row] for row in rows)


def test_fingerprint_is_of_the_content(tmp_path: Path, write: Write) -> None:
    a = write("a.txt", "some text")
    same = write("elsewhere/b.txt", "some text")
    os.utime(same, (1, 1))
    first = open_files(tmp_path, a).fingerprint()
    assert open_files(tmp_path, same).fingerprint() == first
    assert open_files(tmp_path, a, sample_by="line").fingerprint() != first
    stat = a.stat()
    write("a.txt", "same size")
    os.utime(a, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_files(tmp_path, a).fingerprint() != first


def test_a_changed_file_is_not_served_from_the_arrow_cache(tmp_path: Path, write: Write) -> None:
    path = write("a.jsonl", '{"text": "old"}\n')
    stat = path.stat()
    assert list(open_files(tmp_path, path)) == ["old"]
    write("a.jsonl", '{"text": "new"}\n')
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert list(open_files(tmp_path, path)) == ["new"]


def test_relative_paths_start_in_base_dir(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: whatever the working directory becomes."""
    write("a.txt", "here")
    write("other/a.txt", "not here")
    monkeypatch.chdir(tmp_path / "other")
    for pattern in ("a.txt", "*.txt", "../" + tmp_path.name + "/a.txt"):
        assert list(file_corpus(pattern, cache_dir=tmp_path / "cache", base_dir=tmp_path)) == ["here"]
    assert list(file_corpus("a.txt", cache_dir=tmp_path / "cache")) == ["not here"]


def test_folders_lists_and_duplicates(tmp_path: Path, write: Write) -> None:
    for name in ("b.txt", "a.txt", "deep/c.md", ".hidden/d.txt", "notes.pdf"):
        write(f"folder/{name}", name)
    both = open_files(tmp_path, tmp_path / "folder" / "b.txt", tmp_path / "folder")
    assert list(both) == ["b.txt", "a.txt", "deep/c.md"]
    assert both.name == "folder"


BAD = {
    "missing file": ("nowhere.txt", {}, "no such file"),
    "folder without usable files": ("empty_folder", {}, "accepted are .txt .md .jsonl .json .parquet"),
    "unknown format": ("a.pdf", {}, "accepted are .txt"),
    "empty file": ("empty.txt", {}, "no text in"),
    "empty rows": ("empty.jsonl", {}, "no text in"),
    "only blank rows": ("blank.jsonl", {}, "no documents in"),
    "white space": ("blank.txt", {}, "no text in"),
    "not UTF-8": ("latin.txt", {}, "latin.txt is not UTF-8 text: bad byte at offset 4194305"),
    "cut-off character": ("cut.txt", {}, "bad byte at offset 3"),
    "no such key": ("rows.jsonl", {"text_key": "body"}, "set data.text_key to one of id, text"),
    "key is a number": ("rows.jsonl", {"text_key": "id"}, "holds int64"),
    "broken JSON": ("broken.jsonl", {}, "cannot read"),
    "broken Parquet": ("broken.parquet", {}, "cannot read"),
    "sample_by": ("rows.jsonl", {"sample_by": "word"}, "choose one of document, paragraph, line"),
    "mixed formats": ("*.*", {}, "mixes formats (json, parquet, text)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(tmp_path: Path, write: Write, case: str) -> None:
    (tmp_path / "empty_folder").mkdir()
    write("a.pdf", "x")
    write("empty.txt", "")
    write("empty.jsonl", "")
    write("blank.txt", " \n\t\n")
    write("blank.jsonl", '{"text": " "}\n{"text": null}\n{"text": ""}\n')
    write("latin.txt", b"x" * READ_BYTES + b"y\xe9 z")
    write("cut.txt", b"abc\xf0\x9f\x91")
    write("rows.jsonl", '{"id": 1, "text": "a"}\n')
    write("broken.jsonl", '{"text": "a"}\n{"text": \n')
    write("broken.parquet", "PAR1 no")
    pattern, options, expected = BAD[case]
    with pytest.raises(DataError) as caught:
        len(open_files(tmp_path, tmp_path / pattern, **options))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_split_by_whole_documents(tmp_path: Path) -> None:
    files = [tmp_path / f"{i:03}.txt" for i in range(100)]
    for i, file in enumerate(files):
        file.write_text(f"document {i}")
    corpus = FilesCorpus("many", files)
    train, val = (Part(corpus, split, 0.03, seed=1).rows().tolist() for split in ("train", "val"))
    assert len(val) == 3
    assert sorted(train + val) == list(range(100))
    assert train == sorted(train)
    assert Part(corpus, "val", 0.03, seed=2).rows().tolist() != val
    assert len(Part(corpus, "val", 0.0001).rows()) == 1
    assert len(Part(corpus, "train", 0.9999).rows()) == 1
    assert Part(corpus, "train").rows().tolist() == list(range(100))


def test_a_single_document_cannot_be_split(tmp_path: Path, write: Write) -> None:
    corpus = open_files(tmp_path, write("one.txt", "only one"))
    with pytest.raises(DataError, match=r"give data\.val_files, or set data\.sample_by to paragraph or line$"):
        Part(corpus, "val", 0.03).rows()


@pytest.mark.parametrize("limit", [1, 7, 50, 10_000])
def test_cut_loses_nothing(limit: int) -> None:
    text = "several words  and\n\nlines of_one_very_long_word_without_any_space " * 9
    for block in (3, 40, 5000):
        pieces = list(cut((text[i : i + block] for i in range(0, len(text), block)), limit))
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= limit


@pytest.mark.parametrize("limit", [40, 50])
def test_cut_falls_at_the_end_of_words(limit: int) -> None:
    pieces = list(cut(["several words  and\n\nmore of those, and so on " * 9], limit))
    assert all(piece[0].isspace() and not piece[-1].isspace() for piece in pieces[1:-1])
