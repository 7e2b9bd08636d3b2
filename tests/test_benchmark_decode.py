"""`benchmark.py decode` at toy size on a CPU: what it counts, what it writes, what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT, small_options, tiny_lm

from kda_lm.decoding import Decoder
from scripts.benchmarking.decode import carried_bytes, weight_bytes

TOY = ["--sizes", "2x64", "--head-dim", "32", "--vocab", "300", "--device", "cpu", "--batches", "2"]


def benchmark(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "decode", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run(tmp_path: Path) -> None:
    done = benchmark(*TOY, "--patterns", "kda,softmax", "--contexts", "8,1k", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    assert "ms/token" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(row["op"], row["context"]) for row in found["rows"]] == [
        (pattern, context) for pattern in ("kda", "softmax") for context in (8, 1024)
    ]
    for row in found["rows"]:
        result = row["results"]["ours"]
        assert result["ratio"] == pytest.approx(result["step_ms"] / result["floor_ms"])
        assert result["tokens_per_second"] == pytest.approx(2e3 / result["step_ms"])
    kda, longer_kda, softmax, longer_softmax = (row["results"]["ours"] for row in found["rows"])
    assert kda["state_mib"] == longer_kda["state_mib"] > 0 and kda["cache_mib"] == 0
    assert longer_softmax["cache_mib"] == 128 * softmax["cache_mib"] > 0


def test_bytes() -> None:
    """Every matrix once, in the dtype that decoding keeps it in; states and the context's rows."""
    for kind, window in (("kda", None), ("softmax", None), ("softmax", 4)):
        options = small_options(kind, **({} if window is None else {"window": window}))
        model = tiny_lm(options, layers=2, dim=32)
        matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "conv" not in name)
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                decoder = Decoder(model, 20)
            decoder.prefill([[1, 2]] * 3)
            padding = sum(sum(m.in_proj.rows) - sum(m.in_proj.sizes) for m in decoder.model.layers()) * 32
            assert weight_bytes(decoder.model) == (matrices + padding) * dtype.itemsize
            states, cached = carried_bytes(decoder, 10)
            assert states + cached == 3 * model.state_bytes(10, dtype), (kind, window, dtype)
            assert (cached == 0) == (kind == "kda")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--patterns", "rnn"], "error: argument --patterns: got 'rnn', accepted: softmax, kda, hybrid"),
        (["--contexts", "1q"], "error: argument --contexts: got '1q', accepted: a whole number from 1 on"),
        (["--sizes", "3"], "error: argument --sizes: got '3', accepted: LAYERSxWIDTH, such as 12x768"),
        (["--head-dim", "7"], "error: --head-dim: got 7, accepted: a divisor of the width"),
    ],
)
def test_bad_input(words: list[str], message: str) -> None:
    done = benchmark(*TOY, *words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
