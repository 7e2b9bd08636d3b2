"""Small real corpora for the tests of `data`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data import DataConfig, DataModule
from data.corpora import sotu_corpus

TRICKY = (
    "Emoji 👩‍👩‍👧‍👦🏽 and 中文, naïve café, tabs\t and  double  spaces\r\n"
    "combining e\u0301, zero\u200bwidth, NUL \x00, BOM \ufeff, "
    "replacement \ufffd, private \ue000, max \U0010ffff\n"
    "looks special: <|endoftext|> </s> [SEP] <pad>\n\n\n   end   "
)


@pytest.fixture(scope="session")
def speeches() -> list[str]:
    """Twelve short addresses."""
    return sorted(sotu_corpus(), key=len)[:12]


@pytest.fixture
def folder(tmp_path: Path, speeches: list[str]) -> Path:
    """A folder of twelve text files."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i, speech in enumerate(speeches):
        (texts / f"{i:02}.txt").write_bytes(speech.encode())
    return texts


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Callable[..., DataModule]:
    """make(steps=…, batch_size=…, **options): a byte-level DataModule over `folder`."""

    def build(
        steps: int = 10,
        batch_size: int = 4,
        micro_batch_size: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> DataModule:
        defaults = {"corpus": "text", "files": str(folder), "tokenizer": "bytes", "seq_len": 64}
        config = DataConfig(**{"cache_dir": str(tmp_path / "cache"), **defaults, **options})
        return DataModule(config, batch_size=batch_size, micro_batch_size=micro_batch_size, max_steps=steps, seed=seed)

    return build
