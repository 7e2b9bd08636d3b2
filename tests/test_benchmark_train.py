"""`scripts/benchmark.py train` at toy size on a CPU: rows, real data, failures, the peer's models with a stand-in."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from support import ROOT

from kda_lm.training.optim import OptimConfig, parameter_groups
from scripts import benchmark
from scripts.benchmarking import peer_lm, train, train_row
from scripts.benchmarking.measure import one_line
from scripts.benchmarking.models import PATTERNS, Size, build_lm
from scripts.benchmarking.train import Options, TrainRun, Trial, configure, mfu

TOY = ["--sizes", "2x64", "--seq-lens", "64", "--tokens-per-step", "128", "--steps", "2", "--warmup", "1"]
TOY += ["--vocab", "300", "--device", "cpu"]
OPTIONS = Options(
    sizes=[Size(2, 64)],
    patterns=["kda"],
    seq_lens=[32],
    data=["random"],
    tokens_per_step=64,
    vocab=300,
    head_dim=32,
    steps=2,
    warmup=1,
    compile=False,
    checkpoint_layers=False,
    cold=False,
    peer=None,
    peer_compile=False,
    peer_loss="logits",
    peer_ms=None,
    peer_processes=None,
    device=torch.device("cpu"),
    seed=0,
    timeout=100,
    overrides=[],
    json=None,
)

# fla's names, but for one that is missing; a model is an embedding, linear layers and a head.
STAND_IN = """
import torch
from types import SimpleNamespace
from torch import nn

class LM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.criterion = config, None
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.model.layers = nn.ModuleList(
            nn.Linear(config["hidden_size"], config["hidden_size"]) for _ in range(config["num_hidden_layers"])
        )
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.lm_head.weight = self.model.embeddings.weight

    def forward(self, input_ids, labels, use_cache):
        x = self.model.embeddings(input_ids)
        for layer in self.model.layers:
            x = x + layer(x)
        criterion = self.criterion or nn.CrossEntropyLoss()
        return SimpleNamespace(loss=criterion(self.lm_head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

TransformerConfig = KDAConfig = GatedDeltaNetConfig = DeltaNetConfig = LinearAttentionConfig = dict
TransformerForCausalLM = KDAForCausalLM = DeltaNetForCausalLM = LinearAttentionForCausalLM = LM
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package called fla, without flash_attn."""
    texts = {"fla/__init__": "", "fla/layers/__init__": "", "fla/layers/attn": "flash_attn_func = None\n"}
    texts["fla/models/__init__"] = STAND_IN
    texts["fla/modules/__init__"] = (
        "from torch import nn\n\ndef FusedCrossEntropyLoss(inplace_backward):\n    return nn.CrossEntropyLoss()\n"
    )
    for name, text in texts.items():
        path = tmp_path / "peer" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "peer"))
    yield
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        del sys.modules[name]


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scripts/benchmark.py", "train", *words])
    return benchmark.main()


def trial_of(options: Options, pattern: str, contender: str = "ours", data: str = "random") -> Trial:
    composed = configure(options, options.sizes[0], pattern, options.seq_lens[0])
    more = (options.peer_compile, options.peer_loss, options.peer_ms)
    return Trial(contender, composed, data, options.head_dim, options.warmup, "cpu", *more)


def in_this_process(trial: Trial, options: Options) -> dict[str, Any]:
    """What a new process would find, without starting one."""
    try:
        return train_row.measure_row(trial)
    except Exception as error:
        return {"failed": one_line(error)}


def test_a_row_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert call(monkeypatch, *TOY, "--patterns", "softmax", "--cold", "--markdown", "--json", "out.json") == 0
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["precision"] == "32-true" and content["caches"] == "empty for every row"
    (row,) = content["rows"]
    assert row["wrong"] == [] and row["shape"] == "2x64 T=64 random" and row["op"] == "softmax"
    result = row["results"]["ours"]
    assert len(result["steps_ms"]) == 2 and result["step_ms"] == pytest.approx(sum(result["steps_ms"]) / 2)
    assert result["tokens_per_second"] == pytest.approx(128e3 / result["step_ms"])
    expected = 3 * result["flops_per_token"] * result["tokens_per_second"] / content["peak_flops"]
    assert result["mfu"] == pytest.approx(expected) and 0 < result["first_step_s"] < 100
    assert result["graph_breaks"] == 0 and result["parameters"] == 120128
    assert "| softmax | random |" in capsys.readouterr().out


def test_a_row_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next is measured all the same, and the exit status tells."""
    monkeypatch.setattr(train, "run_fresh", in_this_process)
    words = [*TOY, "--patterns", "kda,softmax", "--markdown", "--json", "out.json", "mixers.kda.backend=triton"]
    assert call(monkeypatch, *words) == 1
    out = capsys.readouterr().out
    failed, measured = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert failed["wrong"] == [f"failed: {failed['results']['ours']['failed']}"]
    assert "WRONG: 2x64 T=64 random kda: failed: UserError: mixers: backend" in out
    assert measured["wrong"] == [] and measured["results"]["ours"]["step_ms"] > 0
    assert "| kda | random | – |" in out


def test_both_kinds_of_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real ones are the configuration's, and the model's vocabulary may be wider than the tokenizer's."""
    monkeypatch.setattr(train, "run_fresh", in_this_process)
    data = ["data=text", f"data.files={corpus}", "data.sample_by=paragraph", "trainer.micro_batch_size=1"]
    words = [*TOY, "--seq-lens", "16", "--tokens-per-step", "32", "--data", "random,real", "--checkpoint-layers"]
    assert call(monkeypatch, *words, "--patterns", "softmax,linear", "--json", "out.json", *data) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["op"], row["data"]) for row in rows] == [(p, d) for p in ("softmax", "linear") for d in train.DATA]
    assert all(row["results"]["ours"]["loss"][1] > 0 for row in rows)
    assert rows[0]["results"]["ours"]["loss"] != rows[1]["results"]["ours"]["loss"]
    assert "2x64 T=16 real linear: ours " in capsys.readouterr().out


def test_a_vocabulary_of_bytes() -> None:
    composed = configure(replace(OPTIONS, vocab=257), Size(2, 64), "kda", 32)
    assert composed["data"]["tokenizer"] == "bytes" and composed["model"]["vocab_size"] == 257


def test_random_steps() -> None:
    """A target is the next id, micro-batches are the rows of a step in order, and steps differ."""
    shape = train_row.Shape(16, 6, 2)
    steps = train_row.RandomSteps(shape, 50, 3, seed=1)
    assert len(steps) == 3 and [micro["tokens"].shape for micro in steps[0]] == [(2, 16)] * 3
    assert all(torch.equal(micro["tokens"][:, 1:], micro["targets"][:, :-1]) for micro in steps[0])
    assert not torch.equal(steps[0][0]["tokens"], steps[1][0]["tokens"])
    assert torch.equal(steps[1][2]["targets"], steps[1][2]["targets"]) and steps[0][0]["tokens"].max() < 50


def test_every_head_is_as_wide() -> None:
    """Gated DeltaNet's published layer has other head sizes; here all patterns have the same, and the same width."""
    for pattern in PATTERNS:
        for mixer in build_lm(configure(OPTIONS, Size(4, 64), pattern, 32)).layers():
            assert mixer.sizes == (64, 64, 64) and mixer.config.num_heads == 2


def test_blocks_compile_whole() -> None:
    """As training compiles them, under autocast, each run again in the backward: once for all, no graph breaks."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = build_lm(configure(OPTIONS, Size(2, 64), "linear", 32)).train()
    model.checkpoint_layers = True
    model.compile_blocks(backend="aot_eager", fullgraph=True)
    tokens = torch.randint(300, (2, 40))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model.loss(tokens, tokens)
    loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mfu() -> None:
    """A million operations a token forward, three a step; 1e9 tokens/s of them are 3e15 a second."""
    assert mfu(1_000_000, 1e9, 6e15) == pytest.approx(0.5)


def test_the_peer_trains(stand_in: None) -> None:
    options = replace(OPTIONS, peer="fla")
    result = train_row.measure_row(trial_of(options, "hybrid", "fla"))
    assert result["loss"][1] > 0 and result["parameters"] == 300 * 64 + 2 * (64 * 64 + 64)
    with pytest.raises(AttributeError, match="GatedDeltaNetForCausalLM"):
        train_row.measure_row(trial_of(options, "gated_delta", "fla"))


def test_the_peers_candidates_are_compiled_before(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of each kind of layer, in as many processes as asked for; the row after them is whole."""
    trials: list[Trial] = []

    def kept(trial: Trial, options: Options) -> dict[str, Any]:
        trials.append(trial)
        return in_this_process(trial, options) if trial.part is None else {"failed": "one step has no median"}

    monkeypatch.setattr(train, "run_fresh", kept)
    options = replace(OPTIONS, patterns=["hybrid"], peer="fla", peer_processes=3)
    assert TrainRun(options).start() == 0
    first, *parts, last = trials
    assert first.contender == "ours" and last.part is None and last.contender == "fla"
    assert sorted(trial.part for trial in parts) == [(0, 3), (1, 3), (2, 3)]  # type: ignore[type-var]
    assert {trial.options["model"]["num_layers"] for trial in parts} == {4}
    assert {trial.options["trainer"]["max_steps"] for trial in parts} == {1}


def test_the_peers_models(stand_in: None) -> None:
    """Sizes of ours, in fla's words; the optimizer tells embedding and head apart; softmax attention is torch's."""
    model = configure(OPTIONS, Size(8, 64), "hybrid", 32)["model"]
    peer = peer_lm.build(model, 32, 128)
    config = peer.lm.config
    assert config["attn"] == {"layers": [3, 7], "num_heads": 2} and config["head_dim"] == 32
    assert (config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]) == (64, 8, 176)
    assert not config["fuse_cross_entropy"] and "fuse_linear_cross_entropy" not in config
    groups = parameter_groups(peer, OptimConfig())  # type: ignore[arg-type]
    assert [(len(group["params"]), group["muon"]) for group in groups] == [(9, False), (8, True)]
    kda = peer_lm.build({**model, "pattern": ["kda"]}, 32, 128, "linear").lm
    assert kda.config["fuse_cross_entropy"] and kda.criterion is None and "attn" not in kda.config
    delta = peer_lm.build({**model, "pattern": ["delta"]}, 32, 128, "linear").lm
    assert delta.config["fuse_linear_cross_entropy"] and not delta.config["fuse_cross_entropy"]
    with pytest.raises(peer_lm.UserError, match="fla has no model of kda, delta"):
        peer_lm.build({**model, "pattern": ["kda", "delta"]}, 32, 128)

    from fla.layers import attn  # type: ignore[import-not-found]

    q, k, v = (torch.randn(2, 5, 3, 8) for _ in range(3))
    scores = (torch.einsum("bthd,bshd->bhts", q, k) * 8**-0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    expected = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
    o = attn.flash_attn_func(q, k, v, causal=True, window_size=(-1, -1))
    assert torch.allclose(o, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--patterns", "nope"], "argument --patterns: got 'nope', accepted: softmax, kda, hybrid"),
        (["--sizes", "3"], "argument --sizes: got '3', accepted: LAYERSxWIDTH, such as 12x768"),
        (["--data", "some"], "argument --data: got 'some', accepted: random, real"),
        (["--seq-lens", "48"], "--tokens-per-step: got 128, accepted: a multiple of T = 48"),
        (["--head-dim", "48"], "--head-dim: got 48, accepted: a divisor of the width, 64"),
        (["--vocab", "200", "--data", "real"], "--vocab: got 200, accepted with real data: 257 (bytes) or more"),
        (["--peer", "fla"], "--peer: got 'fla' on a CPU; accepted: auto, none"),
        (["--json", "no/where.json"], "--json: [Errno 2]"),
        (["optim=nope"], "In 'train': Could not find 'optim/nope'"),
        (["optim.nope=1"], "Could not override 'optim.nope'"),
        (["mixers.kda.rule=nope"], "mixers.kda.rule is 'nope'; it takes one of additive, delta"),
        (["trainer.devices=2"], "trainer.devices: got 2, accepted: 1"),
        (["kda"], "Error parsing override 'kda'"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "run_fresh", lambda trial, options: pytest.fail("nothing is to be measured"))
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, *TOY, "--patterns", "kda", *words)
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {message}") and line.count("\n") == 1
    assert not GlobalHydra.instance().is_initialized()


def _out_of_paper(trial: Trial) -> dict[str, Any]:
    print("a warning", file=sys.stderr)
    sys.exit("out of paper")


def _killed(trial: Trial) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _hanging(trial: Trial) -> dict[str, Any]:
    time.sleep(60)
    return {}


def _out_of_memory(trial: Trial) -> dict[str, Any]:
    raise RuntimeError("out of memory\nand more")


@pytest.mark.parametrize(
    ("measure", "timeout", "why"),
    [
        (_out_of_paper, 100, "exit status 1: out of paper"),
        (_killed, 100, "exit status -9"),
        (_hanging, 2, "no result within 2 s (--timeout)"),
        (_out_of_memory, 100, "RuntimeError: out of memory"),
    ],
)
def test_a_process_that_dies_or_hangs(measure: train.Measure, timeout: int, why: str) -> None:
    options = replace(OPTIONS, timeout=timeout)
    assert train.run_fresh(trial_of(options, "kda"), options, measure) == {"failed": why}


def test_help_explains_the_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, "--help")
    out = capsys.readouterr().out
    assert not end.value.code
    assert all(f"\n{column}" in out for column in ("tokens/s", "ratio", "MFU", "step ms", "peak MiB", "first step s"))
