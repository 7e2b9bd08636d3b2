"""Starts the tests that need Triton's interpreter, each file in a process of its own: see interpreter.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import interpreter
import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(interpreter.MISSING, reason="needs the package triton")
@pytest.mark.skipif(interpreter.ACTIVE, reason="TRITON_INTERPRET=1: the files themselves run here")
@pytest.mark.parametrize("file", interpreter.FILES)
def test_in_the_interpreter(file: str) -> None:
    """Every test of the file passes; none is skipped."""
    clean = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(HERE / file), "-p", "no:xdist", "-p", "no:cacheprovider"],
        env={**clean, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    print(done.stdout)
    summary = done.stdout.rstrip().rpartition("\n")[2]
    passed = re.match(r"(\d+) passed\b", summary)
    assert done.returncode == 0 and passed and int(passed[1]) > 0 and "skipped" not in summary, summary
