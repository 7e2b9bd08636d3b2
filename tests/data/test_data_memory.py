"""Memory stays bounded whatever the size of a document."""

import subprocess
import sys
from pathlib import Path

import pytest

MEGABYTES = 50
CODE = """
import resource, sys
from pathlib import Path
from data.corpora import Part, file_corpus
from data.token_file import token_file
from data.tokenizers import byte_tokenizer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

source, cache = sys.argv[1:]
if source.endswith("jsonl"):
    import datasets
before = peak()
file = token_file(Part(file_corpus(source, cache_dir=Path(cache)), "train"), byte_tokenizer(), Path(cache))
print(file.manifest.text_bytes, file.manifest.documents, peak() - before)
"""


@pytest.mark.parametrize(("suffix", "limit"), [("txt", 120), ("jsonl", 450)])
def test_one_huge_document(tmp_path: Path, suffix: str, limit: int) -> None:
    """50 MB as one document: held whole, its ids alone would take 400 MB.

    JSON rows are held whole by `datasets` while it writes its Arrow copy, the reason for the higher limit.
    """
    source = tmp_path / f"huge.{suffix}"
    line = "words in a line of a very long document, é 👋 "
    with source.open("w", encoding="utf-8") as file:
        file.write('{"text": "' if suffix == "jsonl" else "")
        for _ in range(MEGABYTES):
            file.write(line * (1_000_000 // len(line.encode())))
        file.write('"}\n' if suffix == "jsonl" else "")
    result = subprocess.run(
        [sys.executable, "-c", CODE, str(source), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    size, documents, grown = map(int, result.stdout.split())
    assert size > 0.99 * MEGABYTES * 1_000_000
    assert documents == 1
    assert grown < limit, f"{grown} MB for one document of {MEGABYTES} MB"
