"""Several devices: two processes train as one does, in one run folder (cases D11, D14, F1)."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, TINY


@pytest.mark.parametrize("options", [["trainer.micro_batch_size=1", "data.isolate_documents=true"]])
def test_two_processes_equal_one(corpus: Path, tmp_path: Path, options: list[str]) -> None:
    """The same batch cut over two ranks: the same losses up to the order of float32 sums."""
    for devices in (1, 2):
        words = [*TINY, *options, f"data.files={corpus}", f"trainer.devices={devices}", f"run_dir=devices{devices}"]
        subprocess.run([sys.executable, str(ROOT / "train.py"), *words], check=True, timeout=240, cwd=tmp_path)
    one, two = (tmp_path / f"devices{n}" for n in (1, 2))
    for a, b in zip(*(csv.DictReader((folder / "metrics.csv").open()) for folder in (one, two)), strict=True):
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            assert bool(a[name]) == bool(b[name])
            if a[name]:
                assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-4), (a["step"], name)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, two)]
    assert summaries[0]["val/targets"] == summaries[1]["val/targets"]
    assert summaries[0]["val/loss"] == pytest.approx(summaries[1]["val/loss"], rel=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["cache", "devices1", "devices2"]
