"""The figure of docs/derivation.md: the numbers that the page says, and the file."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from scripts import derivation

PAGE = (ROOT / "docs" / "derivation.md").read_text(encoding="utf-8")


def test_additive_writes_double_and_delta_writes_replace() -> None:
    assert derivation.again() == {"additive": [1, 2, 3, 4, 5], "delta": [1, 1, 1, 1, 1]}
    found = derivation.replaced()
    assert found["additive, old value"] == [1, 1, 1, 1, 1] and found["additive, new value"] == [0, 0, 1, 1, 1]
    assert found["delta, old value"] == [1, 1, 0, 0, 0] and found["delta, new value"] == [0, 0, 1, 1, 1]
    assert "5 times its value" in PAGE


def test_orthogonal_reads_are_untouched() -> None:
    """1 − c² of its own value under the delta rule, all of it under the additive one; c of the other's under both."""
    found = derivation.untouched()
    cosines = derivation.OVERLAPS.double().tolist()
    assert found["delta, own value"] == pytest.approx([1 - c * c for c in cosines])
    assert found["additive, own value"] == pytest.approx([1.0] * len(cosines))
    assert found["delta, other value"] == found["additive, other value"] == pytest.approx(cosines)
    assert "0.75 is left at c = 0.5" in PAGE


def test_scalar_and_channel_forgetting() -> None:
    found = derivation.forgotten()
    faded = [math.exp(derivation.SCALAR * t) for t in range(10)]
    assert found["scalar, second key"] == pytest.approx(faded[:9])
    assert found["scalar, first key"] == found["channel, first key"] == pytest.approx(faded[1:])
    assert found["channel, second key"] == pytest.approx([1.0] * 9)
    assert f"{faded[8]:.2f} of the second and {faded[9]:.2f} of the first" in PAGE


def test_the_script(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "derivation.py"), "--out"]
    done = subprocess.run([*script, "figures/d.svg"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "wrote figures/d.svg" in done.stdout
    assert "<svg" in (tmp_path / "figures" / "d.svg").read_text() and "](derivation.svg)" in PAGE
    assert (ROOT / "docs" / "derivation.svg").is_file()
    bad = subprocess.run([*script, "d.gif"], cwd=tmp_path, capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "'d.gif'" in bad.stderr
