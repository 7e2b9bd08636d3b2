"""Token files: a part of a corpus as one memory-mapped stream of ids.

Layout of a folder `<corpus>-<split>-<key>` (little-endian):

    tokens.bin     [eot] doc₁ [eot] doc₂ … [eot] doc_D [eot]; uint16 if the vocabulary has at most 65,536 ids,
                   else uint32. Every document begins with the end-of-text token; a last one closes the
                   stream, so that the end of the last document is predicted too.
    offsets.npy    int64 [D + 1]: position of each document's eot, then of the closing one
    manifest.json  the fields of `Manifest`

The key is a hash of all that decides the content, so a changed text, split or tokenizer is built beside the
old file. A folder is written under another name and renamed when complete: a killed build leaves nothing that
could be taken for whole, and processes that build the same file at once do not disturb each other.
"""

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from data.corpora import Part, digest
from data.tokenizers import Tokenizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
BATCH_BYTES = 1 << 22  # text encoded at once


@dataclass(frozen=True)
class Manifest:
    """What a token file holds."""

    format: int
    key: str
    corpus: str
    split: str
    part_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    eot_id: int
    dtype: str  # numpy name, little-endian: <u2 or <u4
    tokens: int  # end-of-text tokens included
    documents: int
    text_bytes: int  # UTF-8 bytes of the documents


class TokenFile:
    """A token file opened for reading. Pickles as its path, so that loader workers map it themselves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest(**json.loads((path / "manifest.json").read_text(encoding="utf-8")))
        self.tokens: NDArray[np.unsignedinteger] = np.memmap(
            path / "tokens.bin", dtype=self.manifest.dtype, mode="r", shape=(self.manifest.tokens,)
        )

    def __reduce__(self) -> tuple[type["TokenFile"], tuple[Path]]:
        return TokenFile, (self.path,)

    def __len__(self) -> int:
        return self.manifest.tokens

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Positions of each document's eot and of the closing one, [documents + 1]."""
        offsets: NDArray[np.int64] = np.load(self.path / "offsets.npy", mmap_mode="r")
        return offsets


def token_file(part: Part, tokenizer: Tokenizer, cache_dir: Path) -> TokenFile:
    """The token file of a part of a corpus under `cache_dir/tokens`: reused if it is there, else built."""
    key = digest("tokens", str(FORMAT_VERSION), part.fingerprint(), tokenizer.fingerprint())
    path = cache_dir / "tokens" / f"{part.corpus.name}-{part.split}-{key[:12]}"
    if path.exists():
        fault = _fault(path, key)
        if not fault:
            file = TokenFile(path)
            log.info("%s tokens: reusing %s (%s)", part.split, path, _sizes(file.manifest))
            return file
        log.warning("%s tokens: building again, %s is damaged: %s", part.split, path, fault)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        _build(part, tokenizer, key, scratch)
        _publish(scratch, path, key)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    file = TokenFile(path)
    log.info("%s tokens: wrote %s (%s)", part.split, path, _sizes(file.manifest))
    return file


def _sizes(manifest: Manifest) -> str:
    return (
        f"{manifest.tokens:,} tokens, {manifest.documents:,} documents, "
        f"{manifest.text_bytes / 1e6:.2f} MB of text, vocabulary {manifest.vocab_size:,}"
    )


def _fault(path: Path, key: str) -> str:
    """Why the folder is not a whole token file of this key; empty if it is."""
    try:
        entries = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if set(entries) != {field.name for field in fields(Manifest)}:
            return "its manifest has other fields"
        manifest = Manifest(**entries)
        if manifest.key != key:
            return "its key differs"
        size = (path / "tokens.bin").stat().st_size
        expected = manifest.tokens * np.dtype(manifest.dtype).itemsize
        if size != expected:
            return f"tokens.bin has {size} bytes, its manifest says {expected}"
        if np.load(path / "offsets.npy", mmap_mode="r").shape != (manifest.documents + 1,):
            return "offsets.npy disagrees with its manifest"
    except (OSError, ValueError, TypeError, EOFError) as error:
        return str(error)
    return ""


def _publish(scratch: Path, path: Path, key: str) -> None:
    """Moves a complete folder to its name; one that another process has put there meanwhile stays."""
    scratch.chmod(0o755)  # mkdtemp's folders are private
    for _ in range(3):
        try:
            scratch.rename(path)
            return
        except OSError:  # something is there
            if not _fault(path, key):
                return
            aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-damaged-"))
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    scratch.rename(path)


def _build(part: Part, tokenizer: Tokenizer, key: str, folder: Path) -> None:
    """Writes the three files into `folder`. Memory: a few times BATCH_BYTES, and 8 bytes a document."""
    rows = part.rows()
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    starts: list[NDArray[np.int64]] = []
    position = text_bytes = 0
    with (
        (folder / "tokens.bin").open("wb") as out,
        _Meter(part, int(part.corpus.sizes()[rows].sum())) as meter,
    ):
        for firsts, texts in _batches(part.corpus.pieces(rows)):
            pieces = tokenizer.encode_batch(texts)
            counts = np.array([len(piece) for piece in pieces])
            ends = np.cumsum(counts + firsts)
            starts.append((position + ends - counts - 1)[firsts])
            stream = np.empty(ends[-1], dtype=dtype)
            for first, piece, end in zip(firsts, pieces, ends, strict=True):
                if first:
                    stream[end - len(piece) - 1] = tokenizer.eot_id
                stream[end - len(piece) : end] = piece
            _write(out, stream)
            position += len(stream)
            size = sum(len(text.encode()) for text in texts)
            text_bytes += size
            meter.advance(size)
        _write(out, np.array([tokenizer.eot_id], dtype=dtype))
        out.flush()
        os.fsync(out.fileno())
    offsets = np.concatenate([*starts, np.array([position])]).astype(np.int64)
    np.save(folder / "offsets.npy", offsets)
    manifest = Manifest(
        format=FORMAT_VERSION,
        key=key,
        corpus=part.corpus.name,
        split=part.split,
        part_fingerprint=part.fingerprint(),
        tokenizer_fingerprint=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        dtype=dtype.str,
        tokens=position + 1,
        documents=len(offsets) - 1,
        text_bytes=text_bytes,
    )
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")


def _write(out: BinaryIO, ids: NDArray[Any]) -> None:
    out.write(ids.tobytes())


def _batches(pieces: Iterator[tuple[bool, str]]) -> Iterator[tuple[NDArray[np.bool_], list[str]]]:
    """Groups pieces into batches of about BATCH_BYTES characters."""
    firsts: list[bool] = []
    texts: list[str] = []
    size = 0
    for first, text in pieces:
        firsts.append(first)
        texts.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield np.array(firsts), texts
            firsts, texts, size = [], [], 0
    if texts:
        yield np.array(firsts), texts


class _Meter:
    """Encoding progress: a bar with MB/s and time left on a terminal, otherwise two log lines."""

    def __init__(self, part: Part, total: int) -> None:
        self._title, self._total, self._done, self._start = (
            f"encoding {part.split}",
            total,
            0,
            time.monotonic(),
        )
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "_Meter":
        log.info("%s: %.2f MB", self._title, self._total / 1e6)
        self._progress.start()
        self._task = self._progress.add_task(self._title, total=self._total, speed="")
        return self

    def advance(self, size: int) -> None:
        self._done += size
        self._progress.update(self._task, advance=size, speed=self._speed())

    def _speed(self) -> str:
        return f"{self._done / 1e6 / max(time.monotonic() - self._start, 1e-9):.1f} MB/s"

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        log.info("%s: %.2f MB at %s", self._title, self._done / 1e6, self._speed())
