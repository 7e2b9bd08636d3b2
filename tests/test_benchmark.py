"""scripts/benchmark.py: its arguments, counts and tables, and the whole GPU run with the GPU's own calls replaced."""

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import ROOT

import kernels
from scripts import benchmark
from scripts.benchmarking import attention, fused, measure, run
from scripts.benchmarking.cases import NAMES, Case, Shape, cases_of, floor_bytes, make_inputs
from scripts.benchmarking.report import build, number

CPU = torch.device("cpu")
U = 8 * 4096 * 16 * 128 * 2  # bytes of a bf16 tensor of the first shape

# A peer with fla's names, which computes with ours; its Gated DeltaNet fails.
OPS = {
    "kda": """
def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
              use_gate_in_kernel=False, safe_gate=False, lower_bound=None, A_log=None, dt_bias=None):
    if use_gate_in_kernel:
        assert safe_gate and lower_bound == -5.0
        g = lower_bound * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias.view(g.shape[2:])))
    return kernels.chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel)
fused_recurrent_kda = kernels.fused_recurrent_kda
""",
    "gated_delta_rule": """
def chunk_gated_delta_rule(**inputs):
    raise RuntimeError("refused\\nhere")
fused_recurrent_gated_delta_rule = kernels.fused_recurrent_gated_delta_rule
""",
    "delta_rule": "from kernels import chunk_delta_rule, fused_recurrent_delta_rule",
    "linear_attn": "from kernels import chunk_linear_attn, fused_recurrent_linear_attn",
    "simple_gla": "from kernels import chunk_simple_gla, fused_recurrent_simple_gla",
    "gla": """
from kernels import chunk_gla
def fused_recurrent_gla(q, k, v, gk, scale=None, initial_state=None, output_final_state=False):
    return kernels.fused_recurrent_gla(q, k, v, gk, scale, initial_state, output_final_state)
""",
}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package called fla."""
    for name, text in {"fla/__init__": "", "fla/ops/__init__": "", **{f"fla/ops/{op}": OPS[op] for op in OPS}}.items():
        path = tmp_path / "peer" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import torch\nimport kernels\n{text}", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "peer"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'peer'}:{ROOT}")
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        del sys.modules[name]


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a GPU: what asks the driver is replaced."""
    testing = pytest.importorskip("triton.testing")

    def do_bench(function, warmup: int, rep: int, return_mode: str) -> float:  # type: ignore[no-untyped-def]
        assert (warmup, rep, return_mode) == (25, 100, "median")
        function()
        return 2.0

    monkeypatch.setattr(testing, "do_bench", do_bench)
    monkeypatch.setattr(measure, "on_gpu", lambda device: True)
    monkeypatch.setattr(measure, "COPY_BYTES", 1000)
    monkeypatch.setattr(measure, "HOST_BLOCKS", 2)
    monkeypatch.setattr(benchmark, "GPU_DECODING", [Shape(4, 1, 2, 16), Shape(1, 1, 2, 16)])
    monkeypatch.setattr(benchmark, "GPU_SHAPES", "2x64x4x16,1x70x2x16")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 * 2**20)


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scripts/benchmark.py", *words])
    return benchmark.main()


def test_gpu_run(
    pretend_gpu: None,
    stand_in: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Everything that a GPU run does, on a CPU: each column filled, a peer that fails beside one that doesn't."""
    compared = []
    monkeypatch.setattr(measure, "CHECKED", {"B": 1, "T": 20})
    monkeypatch.setattr(run, "setting_of", lambda options, resolved, f=run.setting_of: f(options, "triton"))
    whole = measure.errors_at_shape
    monkeypatch.setattr(measure, "errors_at_shape", lambda *xs: compared.append(whole(*xs)) or compared[-1])
    monkeypatch.setattr(benchmark, "read_backend", lambda name, device: "triton")
    cold = []
    seconds = measure.cold_seconds
    monkeypatch.setattr(
        measure, "cold_seconds", lambda s, words: cold.append(words) or (seconds(s, words) if len(cold) < 3 else 1.5)
    )
    monkeypatch.setattr(measure, "kernel_ms", lambda function: {"a_kernel": 1.5, "b_kernel": 0.25, "c_kernel": 0.001})
    words = ("kernels", "--device", "cpu", "--cold-peer", "--profile", "--markdown", "--json", "out.json")
    assert call(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["device"] == "a GPU" and content["dtype"] == "bfloat16"
    assert content["copy_bytes_per_s"] == pytest.approx(2 * 1000 / 2e-3)
    assert [row["op"] for row in content["ops"][:7]] == [*NAMES.values(), "kda, gate and norm in kernel"]
    assert len(content["ops"]) == 14 and len(content["decoding"]) == 12
    for i, row in enumerate(content["ops"]):
        mine, theirs = row["results"]["ours"], row["results"]["fla"]
        assert mine["forward_ms"] == mine["both_ms"] == 2.0 and mine["extra_mib"] == 4.0 and mine["host_us"] > 0
        assert ("cold_s" in mine) == (i < 7)
        assert mine["errors_at_shape"].keys() == mine["errors"].keys() - {
            "state",
            "dinitial_state",
            "dA_log",
            "ddt_bias",
        }
        assert row["floor_ms"]["both"] > 2 * row["floor_ms"]["forward"] > 0
        if row["op"] == "gated_delta_rule":
            assert (
                theirs["check_failed"] == theirs["both_failed"] == "RuntimeError: refused" and "both_ms" not in theirs
            )
        else:
            assert theirs["both_ms"] == 2.0 and theirs["error"] < 4e-3
    assert len(compared) == 14 and all(measure.worst(errors) < 5e-3 for errors in compared)
    assert sum("--in-kernel" in words for words in cold) == 2 and sum("fla" in words for words in cold) == 7
    for row in content["decoding"]:
        assert row["results"]["fla"]["step_ms"] == 2.0 and row["floor_ms"]["step"] > 0
        assert row["results"]["ours"]["host_us"] > 0 and row["results"]["fla"]["error"] < 4e-3
    assert content["ops"][0]["results"]["ours"]["kernel_ms"]["c_kernel"] == 0.001
    assert out.count("\n    kernels of ours: 1.75 ms = a_kernel 1.50, b_kernel 0.250\n") == 14
    assert "| op | error, ours | error, fla | fwd ms, ours |" in out
    assert "fla: 2x64x4x16 gated_delta_rule: both failed: RuntimeError: refused" in out
    assert max(len(line) for line in out.splitlines() if line.startswith(" kda")) <= 160


def test_wrong_and_failing_ops(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN is wrong, an exception is, and the rest of the run goes on."""
    true = kernels.chunk_kda

    def nan(*args, **options):  # type: ignore[no-untyped-def]
        o, state = true(*args, **options)
        return (o * float("nan") if options["backend"] == "auto" else o), state

    def broken(*args, **options):  # type: ignore[no-untyped-def]
        if options["backend"] == "auto":
            raise torch.OutOfMemoryError("out of memory")
        return kernels.chunk(*args, **options, rule="additive", decay="channel")

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "fla" else find(name, *more))
    monkeypatch.setattr(kernels, "chunk_kda", nan)
    monkeypatch.setattr(kernels, "chunk_gla", broken)
    monkeypatch.setattr(measure, "CHECKED", {"B": 1, "T": 20})
    words = (
        "kernels",
        "--device",
        "cpu",
        "--ops",
        "gla,delta_rule,kda",
        "--no-cold",
        "--no-decode",
        "--shapes",
        "1x64x1x16",
    )
    assert call(monkeypatch, *words) == 1
    out = capsys.readouterr().out
    assert "fla is not installed: only our times" in out and "ratio" not in out
    assert "WRONG: 1x64x1x16 gla: check failed: OutOfMemoryError: out of memory" in out
    assert "WRONG: 1x64x1x16 kda: o nan, limit 4e-03" in out
    assert "1x64x1x16 delta_rule: ok" in out


def test_cpu_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("kernels", "--device", "cpu", "--shapes", "1x64x1x16", "--ops", "kda", "--repeats", "1", "--cold")
    assert call(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert "reference" in out and "cold" in out and "floor" not in out and "fla" not in out


def test_what_surrounds_the_recurrence(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside plain torch; the recurrence only if it is named, too."""
    monkeypatch.setattr(fused, "VOCAB", 50)
    monkeypatch.setattr(measure, "CHECKED", {"B": 1, "T": 20})
    words = ("--device", "cpu", "--shapes", "1x30x2x16", "--ops", ",".join(fused.NAMES), "--dtype", "float32")
    assert call(monkeypatch, "kernels", *words, "--json", "out.json") == 0
    content = json.loads((tmp_path / "out.json").read_text())
    assert [row["op"] for row in content["fused"]] == [*fused.NAMES] and content["ops"] == content["decoding"] == []
    for row in content["fused"]:
        for result in row["results"].values():
            assert result["error"] < 1e-5 and result["forward_ms"] == result["both_ms"] == 2.0
        assert row["floor_ms"]["both"] > row["floor_ms"]["forward"] > 0
    assert "ratio = torch / ours" in capsys.readouterr().out
    assert call(monkeypatch, "kernels", *words, "--check-only") == 0
    assert "dgate" in capsys.readouterr().out


def test_bytes_around_the_recurrence() -> None:
    """A convolution of bf16 reads one tensor and writes one, and reads two and writes one in its backward."""
    x = torch.empty(2, 100, 64, dtype=torch.bfloat16)
    found = fused.floor_bytes("short_convolution", {"x": x})
    assert found == {"forward": 2 * x.nbytes, "both": 5 * x.nbytes}


def test_bytes_of_a_sum_and_of_a_gate() -> None:
    """x y → s z and s ds dz → dx dy, with s as wide as x and z as y, and one gradient in one dtype; gate and up are as
    large as y twice."""
    stream, added = torch.empty(2, 100, 64), torch.empty(2, 100, 64, dtype=torch.bfloat16)
    found = fused.floor_bytes("add_rms_norm", {"x": stream, "y": added})
    assert found == {"forward": 6 * added.nbytes, "both": 14 * added.nbytes}
    found = fused.floor_bytes("add_rms_norm", {"x": added, "y": added})
    assert found == {"forward": 4 * added.nbytes, "both": 8 * added.nbytes}
    assert fused.floor_bytes("swiglu", {"x": added}) == {"forward": 1.5 * added.nbytes, "both": 4 * added.nbytes}


def test_check_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--device", "cpu", "--shapes", "1x64x1x16,2x9x1x16", "--ops", "kda", "--check-only", "--dtype", "bf16")
    assert call(monkeypatch, "kernels", *words) == 0
    out = capsys.readouterr().out
    assert "dinitial_state" in out and "ddt_bias" in out and "fwd ms" not in out and "2x9x1x16 kda" not in out


def test_attention_beside_torchs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of its own after the recurrence's, here of none; ours wrong is an exit status, torch's is not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attention, "DECODING_ON_CPU", [Shape(2, 40, 8, 16)])
    words = ("kernels", "--device", "cpu", "--shapes", "1x64x2x16", "--ops", "softmax_attention", "--repeats", "1")
    assert call(monkeypatch, *words, "--json", "out.json") == 0
    content = json.loads((tmp_path / "out.json").read_text())
    (row,), (decoded,) = content["attention"], content["attention_decoding"]
    assert content["ops"] == content["decoding"] == []
    for result in row["results"].values():
        assert result["errors"].keys() == {"o", "dq", "dk", "dv"} and result["both_ms"] > 0 < result["forward_ms"]
    assert decoded["results"].keys() == {"ours", "sdpa"} and decoded["results"]["ours"]["step_ms"] > 0
    assert "ratio = sdpa / ours" in capsys.readouterr().out

    monkeypatch.setattr(attention, "errors", lambda call, *rest: {"o": math.nan})
    assert call(monkeypatch, *words, "--peer", "none", "--check-only", "--no-decode") == 1
    assert "WRONG: 1x64x2x16 softmax_attention: o nan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--shapes", "1x2x3"], "BxTxHxD"),
        (["--shapes", "1x0x3x4"], "BxTxHxD"),
        (
            ["--ops", "kda,mamba"],
            "kda, softmax_attention, short_convolution, rms_norm, gated_rms_norm",
        ),
        (["--ops", "kda,mamba"], "linear_attn, simple_gla, gla, delta_rule, gated_delta_rule, kda"),
        (["--dtype", "float8"], "bfloat16"),
        (["--device", "tpu"], "cpu, cuda, cuda:N"),
        (["--device", "cuda:99"], "accepted: cpu"),
        (["--device", "cpu", "--peer", "fla"], "auto, none"),
        (["--device", "cpu", "--profile"], "a CUDA GPU"),
        (["--repeats", "0"], "a whole number from 1 on"),
        (["--device", "cpu", "--json", "no/such/folder"], "--json"),
    ],
)
def test_errors_are_one_line(
    words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, "kernels", *words)
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.count("\n") == 1 and message.startswith("error: ") and expected in message


def test_bytes() -> None:
    """U is one tensor of q's size: forward 5U and backward 9U with a gate in q's dtype, more with a float32 gate."""
    shape = Shape(8, 4096, 16, 128)
    with torch.device("meta"):
        like = {name: torch.empty(8, 4096, 16, 128, dtype=torch.bfloat16) for name in "qkvg"}
        wide = {**like, "g": torch.empty(8, 4096, 16, 128)}
    assert floor_bytes(like) == {"forward": 5 * U, "both": 14 * U}
    assert floor_bytes(wide) == {"forward": 6 * U, "both": 17 * U}
    assert measure.decode_bytes(Shape(256, 1, 16, 128)) == 2 * 256 * 16 * 128 * 128 * 4
    assert str(shape) == "8x4096x16x128" and Shape.parse(str(shape)) == shape


@pytest.mark.parametrize("case", cases_of(list(NAMES.values())), ids=lambda case: case.label)
def test_inputs(case: Case) -> None:
    """The gates are mild on average and the initial dt lies in its range; the same seed gives the same tensors."""
    inputs = make_inputs(case, Shape(2, 300, 4, 32), torch.bfloat16, CPU, seed=3)
    again = make_inputs(case, Shape(2, 300, 4, 32), torch.bfloat16, CPU, seed=3)
    assert all(torch.equal(inputs[name], again[name]) for name in inputs)
    if "beta" in inputs:
        assert inputs["beta"].dtype == torch.bfloat16 and 0 < inputs["beta"].min() < inputs["beta"].max() < 1
    if case.in_kernel:
        dt = torch.nn.functional.softplus(inputs["dt_bias"])
        assert inputs["g"].dtype == torch.bfloat16 and dt.min() > 0.99e-3 and dt.max() < 0.101
        assert 1 <= inputs["A_log"].exp().min() < inputs["A_log"].exp().max() <= 16.01
    elif "g" in inputs:
        assert inputs["g"].dtype == torch.float32 and inputs["g"].max() < 0 and -2 < inputs["g"].mean() < 0
        assert torch.allclose(inputs["q"].float().norm(dim=-1), torch.ones(()), atol=1e-2)


def test_numbers() -> None:
    assert [number(x) for x in (0.01234, 0.1234, 1.234, 12.34, 123.4, 12345.6, 0.0, None)] == [
        "0.0123",
        "0.123",
        "1.23",
        "12.3",
        "123",
        "12,346",
        "0",
        "–",
    ]
    assert math.isnan(measure.worst({"a": 1.0, "b": float("nan")}))
    assert measure.beyond({"o": 3e-3, "dq": float("nan"), "dk": 4.5e-3}, torch.bfloat16) == ["dq nan, limit 5e-03"]


def test_empty_columns_are_left_out() -> None:
    rows = [{"op": "kda", "shape": "1x1x1x1", "results": {"ours": {}}, "wrong": []}]
    sheet = build("title", rows, [("op", lambda row: row["op"]), ("a\nb", lambda row: "1"), ("c", lambda row: "–")])
    assert sheet.markdown() == "title\n\n| op | a, b |\n|---|---:|\n| kda | 1 |"
