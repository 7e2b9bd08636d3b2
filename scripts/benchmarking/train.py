"""Measure training: how fast a model of each pattern trains on this machine, and in how much memory.

    python scripts/benchmark.py train                                           on a GPU against flash-linear-attention
    python scripts/benchmark.py train --patterns softmax,kda,hybrid --sizes 12x768 --seq-lens 2048 --json train.json
    python scripts/benchmark.py train --data random,real --cold --markdown
    python scripts/benchmark.py train --patterns kda optim=adamw mixers.kda.rule=additive     options of train.py

A row is a process of its own that trains as train.py does: its configuration, TrainingModule and Lightning's Trainer,
data loaded and moved step by step, gradients clipped, the default optimizer; on a GPU bf16 autocast over float32
weights, and steps from a CUDA graph (trainer.cuda_graph=false does without). Left out: logging, validation, samples
and checkpoints. One that fails says why; the others go on. The exit status is 1 if one of ours fails; a peer may.

tokens/s    tokens of a step / step ms
ratio       step ms of the peer / ours: how many times as fast ours is
MFU         3 · LM.flops_per_token(T) · tokens/s / peak; the peak (in the first line printed) is the data sheet's dense
            figure, or a measured matrix product's where kda_lm.training.callbacks.peak_flops has none
step ms     median over --steps after --warmup: from the end of a step to the end of the next, by CUDA events on a GPU
peak MiB    most that tensors took on the GPU at once during the measured steps, weights and optimizer included; with a
            CUDA graph during all steps, a tuner's memory included
activation MiB  what a micro-batch's forward leaves for its backward; the loss's own gradients are in it
first step s    from the start of building the model to the end of the first step: initialisation, compilers and the
            peer's tuner. The data are prepared, and the GPU is up, before. With --cold the caches of Triton and
            inductor are empty for every row; without, they are as found, and rows after the first find more
parameters  tied ones once

Every mixer has width / --head-dim heads, of keys and of values alike (expand_k = expand_v = 1). `random` data are
uniform ids; `real` are the configuration's (data=sotu by default), in a BPE vocabulary of --vocab, or bytes if that
is 257. The file of --json also has every step's ms, graph breaks, and the first and last loss, in nats a token.

The peer's models have the same layers, width, heads, MLP, vocabulary and tied embedding, and go through the same steps
and optimizer; peer_lm.py says what differs. They run without torch.compile, which their kernels interrupt, unless
--peer-compile says so; their steps are recorded as ours are. --peer-processes 16 --peer-ms 12 take minutes less for the
peer's tuner.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kda_lm.config import read_config
from kda_lm.device import resolve_precision
from kda_lm.training.config import TrainerConfig
from scripts.benchmarking.measure import one_line
from scripts.benchmarking.models import Size, build_lm, compose_model
from scripts.benchmarking.report import Row, failures, number, percent, plain_console, say, show, training_sheet, whole
from scripts.benchmarking.run import Result, UsageError, describe, machine, version, write_json

DATA = ("random", "real")
RESULT, PRINTED = "result.json", "printed.txt"  # in a row's folder


@dataclass(frozen=True)
class Options:
    """The command line, defaults filled in."""

    sizes: list[Size]
    patterns: list[str]
    seq_lens: list[int]
    data: list[str]
    tokens_per_step: int
    vocab: int
    head_dim: int
    steps: int
    warmup: int
    compile: bool
    checkpoint_layers: bool
    cold: bool
    peer: str | None
    peer_compile: bool
    peer_loss: str
    peer_ms: int | None
    peer_processes: int | None
    device: torch.device
    seed: int
    timeout: int  # seconds a row
    overrides: list[str]  # words of train.py's command line
    json: Path | None


@dataclass(frozen=True)
class Trial:
    """What one process measures."""

    contender: str  # ours | fla
    options: dict[str, Any]  # a composed configuration of train.py, the model's vocabulary with it
    data: str
    head_dim: int
    warmup: int
    device: str
    peer_compile: bool
    peer_loss: str
    peer_ms: int | None
    part: tuple[int, int] | None = None  # compile only this of so many parts of the peer's candidates


Measure = Callable[[Trial], Result]


def configure(options: Options, size: Size, pattern: str, seq_len: int) -> dict[str, Any]:
    """The configuration that train.py would compose, the vocabulary added to the model's options.

    Raises UsageError or UserError: sizes that don't divide, or what the overrides say cannot be.
    """
    if options.tokens_per_step % seq_len:
        raise UsageError(f"--tokens-per-step: got {options.tokens_per_step}, accepted: a multiple of T = {seq_len}")
    words = [
        f"data.seq_len={seq_len}",
        f"trainer.batch_size={options.tokens_per_step // seq_len}",
        f"trainer.max_steps={options.warmup + options.steps}",
        f"trainer.accelerator={'gpu' if options.device.type == 'cuda' else 'cpu'}",
        f"trainer.compile={options.compile}",
        f"trainer.checkpoint_layers={options.checkpoint_layers}",
        f"seed={options.seed}",
        *options.overrides,
    ]
    composed = compose_model(size, pattern, options.head_dim, options.vocab, words)
    if composed["trainer"]["devices"] != 1:
        raise UsageError(f"trainer.devices: got {composed['trainer']['devices']}, accepted: 1")
    return composed


def mfu(flops_per_token: int, tokens_per_second: float, peak: float) -> float:
    """Of a training step, whose backward does twice the forward's operations; what is computed again doesn't count."""
    return 3 * flops_per_token * tokens_per_second / peak


def run_fresh(trial: Trial, options: Options, measure: Measure | None = None) -> Result:
    """What `measure`, train_row's by default, finds in a process of its own, or why there is nothing.

    It is forked from one that has imported what a row needs and never touches a GPU: importing takes longer than a row.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "scripts.benchmarking.train_row"])
    with tempfile.TemporaryDirectory(prefix="row-") as folder:
        process = context.Process(target=_row, args=(trial, Path(folder), options.cold, measure))
        process.start()
        process.join(options.timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            return {"failed": f"no result within {options.timeout} s (--timeout)"}
        if process.exitcode:
            complaint = Path(folder, PRINTED).read_text(errors="replace").strip().splitlines()
            return {"failed": f"exit status {process.exitcode}" + (f": {complaint[-1][:200]}" if complaint else "")}
        result: Result = json.loads(Path(folder, RESULT).read_text())
    return result


def compile_ahead(trial: Trial, processes: int, options: Options) -> None:
    """Fill Triton's cache with what a peer's row compiles: one step of each of its layers, two rows long."""
    pattern = trial.options["model"]["pattern"]
    trainer = {"max_steps": 1, "batch_size": 2, "micro_batch_size": None, "cuda_graph": False}
    short = {**trial.options, "model": trial.options["model"] | {"num_layers": len(pattern)}}
    short["trainer"] = trial.options["trainer"] | trainer
    parts = [replace(trial, options=short, data="random", part=(part, processes)) for part in range(processes)]
    with ThreadPoolExecutor(processes) as pool:  # the threads wait for processes
        list(pool.map(lambda trial: run_fresh(trial, options), parts))  # the row will tell of what failed


def _row(trial: Trial, folder: Path, cold: bool, measure: Measure | None) -> None:
    """Leave what a row measured in `folder`, or why it could not, and what libraries print beside it."""
    with (folder / PRINTED).open("w") as printed:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(printed.fileno(), stream.fileno())
    if cold:
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    from scripts.benchmarking.train_row import measure_row  # here: Lightning takes seconds to import

    try:
        result = (measure or measure_row)(trial)
    except Exception as error:  # memory, a compiler, a peer: the other rows go on
        result = {"failed": one_line(error)}
    (folder / RESULT).write_text(json.dumps(result))


class TrainRun:
    """Row after row, kept in a file as they come, tables at the end."""

    def __init__(self, options: Options) -> None:
        from kda_lm.training.callbacks import peak_flops  # here: Lightning takes seconds to import

        self.options = options
        self.console = plain_console(sys.stdout.isatty())
        self.rows: list[Row] = []
        # Everything is composed before anything runs: a slip of the user's ends the run at its start.
        cells = [(size, T, pattern) for size in options.sizes for T in options.seq_lens for pattern in options.patterns]
        self.cells = [(*cell, configure(options, cell[0], cell[2], cell[1])) for cell in cells]
        with torch.device("meta"):
            models = [build_lm(composed) for *_, composed in self.cells]
        self.flops = [model.flops_per_token(T) for model, (_, T, *_) in zip(models, self.cells, strict=True)]
        trainer = read_config(TrainerConfig, self.cells[0][3]["trainer"], "trainer")
        self.precision = resolve_precision(trainer.precision, options.device)
        self.peak = peak_flops(options.device, self.precision == "bf16-mixed")
        flash = "flash_attn" if version("flash-attn", "flash_attn") else "torch's"
        self.setting = {
            **machine(options.device, options.peer),
            "precision": self.precision,
            "peak_flops": self.peak,
            "tokens_per_step": options.tokens_per_step,
            "vocabulary": options.vocab,
            "compile": options.compile,
            "checkpoint_layers": options.checkpoint_layers,
            "cuda_graph": trainer.uses_cuda_graph(self.cells[0][3]["data"]["isolate_documents"]),
            "caches": "empty for every row" if options.cold else "as found",
            "peer_softmax_attention": flash if options.peer else None,
            "peer_compile": options.peer_compile if options.peer else None,
            "peer_loss": options.peer_loss if options.peer else None,
            "peer_ms": options.peer_ms if options.peer else None,
            "seed": options.seed,
        }

    def start(self) -> int:
        """Measure everything, with a line a row; 1 if one of ours fails."""
        began = time.perf_counter()
        self.save()
        say(self.console, describe(self.setting))
        for (size, seq_len, pattern, composed), flops in zip(self.cells, self.flops, strict=True):
            for data in self.options.data:
                shape = f"{size} T={seq_len} {data}"
                row: Row = {"op": pattern, "shape": shape, "size": str(size), "seq_len": seq_len, "data": data}
                self.finish({**row, "results": self.measure(composed, data, flops)})
        self.setting["run_s"] = time.perf_counter() - began
        self.save()
        say(self.console, f"{self.setting['run_s']:.0f} s")
        return 1 if any(row["wrong"] for row in self.rows) else 0

    def measure(self, composed: dict[str, Any], data: str, flops: int) -> dict[str, Result]:
        """Of each contender."""
        o, results = self.options, {}
        for contender in ("ours", *([o.peer] if o.peer else [])):
            peer = (o.peer_compile, o.peer_loss, o.peer_ms)
            trial = Trial(contender, composed, data, o.head_dim, o.warmup, str(o.device), *peer)
            if contender != "ours" and o.peer_processes and not o.cold:
                compile_ahead(trial, o.peer_processes, o)
            result = results[contender] = run_fresh(trial, o)
            if contender == "ours" and "tokens_per_second" in result:
                result["flops_per_token"] = flops
                result["mfu"] = mfu(flops, result["tokens_per_second"], self.peak)
        return results

    def save(self) -> None:
        write_json(self.options.json, {**self.setting, "rows": self.rows})

    def finish(self, row: Row) -> None:
        """Keep and tell of a row."""
        row["wrong"] = failures(row["results"]["ours"])
        self.rows.append(row)
        self.save()
        parts = []
        for name, result in row["results"].items():
            if failed := failures(result):
                parts.append(f"{name} {', '.join(failed)}")
                continue
            words = [f"{whole(result['tokens_per_second'])} tokens/s", number(result["step_ms"], " ms")]
            words += [f"MFU {percent(result['mfu'])}"] if "mfu" in result else []
            words += [f"{whole(result['peak_mib'])} MiB"] if "peak_mib" in result else []
            parts.append(f"{name} {', '.join(words)}, first step {number(result['first_step_s'], ' s')}")
        say(self.console, f"{row['shape']} {row['op']}: {'; '.join(parts)}")

    def print_tables(self, markdown: bool) -> None:
        o, sheets = self.options, []
        for size in o.sizes:
            for seq_len in o.seq_lens:
                rows = [row for row in self.rows if (row["size"], row["seq_len"]) == (str(size), seq_len)]
                title = f"{size}, heads of {o.head_dim}, {o.tokens_per_step // seq_len}×{seq_len} tokens a step, "
                title += f"{self.precision}, median of {o.steps} steps, caches {self.setting['caches']}"
                sheets.append(training_sheet(title + (f"; ratio = {o.peer} / ours" if o.peer else ""), rows, o.peer))
        for sheet in sheets:
            show(self.console, sheet)
        if markdown:
            print("\n\n".join(sheet.markdown() for sheet in sheets))
