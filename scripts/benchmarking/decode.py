"""Measure decoding: what a token of every row of a batch takes, after contexts of several lengths.

    python scripts/benchmark.py decode
    python scripts/benchmark.py decode --patterns kda,hybrid --batches 256 --contexts 1k,128k --json decode.json

A model with random weights is decoded as kda_lm.decoding does: in place, a CUDA graph a step on a GPU, matrices and
caches in bf16 there, recurrent states in float32. The context is not computed: states and caches have random numbers
and rows their length, which is all that the time depends on. A row that the GPU has no memory for says so, and the
others go on.

ms/token    of a step, all rows at once: median of blocks of steps, each ended by the GPU (CUDA events)
tokens/s    batch / that
floor ms    what a step has to move, at the speed of a large copy on this machine: the matrices and the head once, each
            recurrent state read and written, the context's keys and values read
ratio       ms/token / floor
host µs     of the calling thread for a step, while the GPU has others to do
state, cache MiB  of the batch: of recurrent layers, whatever the context, and of softmax layers' keys and values at it
record s    the first step: compiling what has not been, and recording the graph

Every mixer has width / --head-dim heads, as in `benchmark.py train`.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kda_lm.decoding import Decoder
from kda_lm.device import arithmetic
from kda_lm.layers import JointLinear
from kda_lm.mixers import SoftmaxState
from kda_lm.model import LM
from scripts.benchmarking import measure
from scripts.benchmarking.models import Size, build_lm, compose_model
from scripts.benchmarking.report import MISSING, Column, Row, build, number, plain_console, say, show, value_of, whole
from scripts.benchmarking.run import describe, machine, write_json

BLOCKS, STEPS = 9, 20  # of timed steps
HOST_STEPS = 50
ROOM = 2 + (BLOCKS + 1) * STEPS + HOST_STEPS  # tokens that are decoded after the context


@dataclass(frozen=True)
class Options:
    """The command line, defaults filled in."""

    sizes: list[Size]
    patterns: list[str]
    batches: list[int]
    contexts: list[int]
    vocab: int
    head_dim: int
    device: torch.device
    seed: int
    overrides: list[str]  # words of train.py's command line
    json: Path | None


class DecodeRun:
    """Row after row, kept in a file as they come, tables at the end."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.console = plain_console(sys.stdout.isatty())
        self.rows: list[Row] = []
        cells = [(size, pattern) for size in options.sizes for pattern in options.patterns]
        self.cells = [
            (*cell, compose_model(*cell, options.head_dim, options.vocab, options.overrides)) for cell in cells
        ]
        self.bandwidth = measure.copy_bandwidth(options.device)
        self.setting = {
            **machine(options.device, None),
            "copy_bytes_per_s": self.bandwidth,
            "vocabulary": options.vocab,
            "head_dim": options.head_dim,
            "seed": options.seed,
        }

    def start(self) -> int:
        """Measure everything, with a line a row; 1 if one fails for another reason than memory."""
        o = self.options
        say(self.console, describe(self.setting))
        for size, pattern, composed in self.cells:
            torch.manual_seed(o.seed)
            model = build_lm(composed).to(o.device).eval()
            for batch in o.batches:
                for context in o.contexts:
                    row: Row = {"op": pattern, "shape": f"{size} B={batch} T={context}", "size": str(size)}
                    self.finish({**row, "batch": batch, "context": context, "results": {}}, model)
        return 1 if any(row["wrong"] for row in self.rows) else 0

    def finish(self, row: Row, model: LM) -> None:
        """Measure, keep and tell of a row."""
        row["wrong"] = []
        try:
            row["results"]["ours"] = measure_decoding(model, row["batch"], row["context"], self.bandwidth)
            result = row["results"]["ours"]
            words = f"{number(result['step_ms'], ' ms')}, {number(result['ratio'], '×')} the floor"
            words += f", host {number(result['host_us'], ' µs')}"
        except torch.OutOfMemoryError as error:
            row["results"]["ours"] = {"memory": measure.one_line(error)}
            words = "more than the memory"
        except Exception as error:  # the other rows go on
            words = measure.one_line(error)
            row["results"]["ours"] = {"failed": words}
            row["wrong"] = [words]
        self.rows.append(row)
        write_json(self.options.json, {**self.setting, "rows": self.rows})
        say(self.console, f"{row['shape']} {row['op']}: {words}")
        measure.release_memory(self.options.device)

    def print_tables(self, markdown: bool) -> None:
        sheets = []
        for size in self.options.sizes:
            rows = [row for row in self.rows if row["size"] == str(size)]
            title = f"{size}, heads of {self.options.head_dim}, decoding"
            sheets.append(build(title, rows, COLUMNS))
        for sheet in sheets:
            show(self.console, sheet)
        if markdown:
            print("\n\n".join(sheet.markdown() for sheet in sheets))


def _cell(key: str, unit: str = "") -> Any:
    return lambda row: number(value_of(row, "ours", key), unit)


COLUMNS: list[Column] = [
    ("pattern", lambda row: row["op"]),
    ("batch", lambda row: str(row["batch"])),
    ("context", lambda row: f"{row['context']:,}"),
    ("ms/token", _cell("step_ms")),
    ("tokens/s", lambda row: whole(value_of(row, "ours", "tokens_per_second"))),
    ("floor ms", _cell("floor_ms")),
    ("ratio", _cell("ratio", "×")),
    ("host µs", _cell("host_us")),
    ("state MiB", _cell("state_mib")),
    ("cache MiB", _cell("cache_mib")),
    ("record s", _cell("record_s")),
    ("", lambda row: "no memory" if "memory" in row["results"]["ours"] else MISSING),
]


@torch.inference_mode()
def measure_decoding(model: LM, batch: int, context: int, bandwidth: float) -> dict[str, float]:
    """Of one step; `bandwidth` in bytes a second."""
    device = model.embedding.weight.device
    gpu = measure.on_gpu(device)
    with arithmetic("auto", device):
        decoder = Decoder(model, context + ROOM)
    tokens = torch.zeros(batch, dtype=torch.int64, device=device)
    decoder.prefill([[0]] * batch)
    for cache in decoder.caches:
        for x in cache:
            if x is not None:
                x.normal_()
    decoder.pretend(context)

    def synchronise() -> None:
        if gpu:
            torch.cuda.synchronize()

    start = time.perf_counter()
    decoder.step(tokens)
    synchronise()
    record_s = time.perf_counter() - start

    def steps(count: int) -> float:
        """Milliseconds a step."""
        if not gpu:
            start = time.perf_counter()
            for _ in range(count):
                decoder.step(tokens)
            return 1e3 * (time.perf_counter() - start) / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            decoder.step(tokens)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    steps(STEPS)
    step_ms = statistics.median(steps(STEPS) for _ in range(BLOCKS))
    synchronise()
    times = []
    for _ in range(HOST_STEPS):
        start = time.perf_counter()
        decoder.step(tokens)
        times.append(1e6 * (time.perf_counter() - start))
    synchronise()
    states, cached = carried_bytes(decoder, context)
    floor_ms = 1e3 * (weight_bytes(decoder.model) + 2 * states + cached) / bandwidth
    return {
        "step_ms": step_ms,
        "tokens_per_second": 1e3 * batch / step_ms,
        "floor_ms": floor_ms,
        "ratio": step_ms / floor_ms,
        "host_us": statistics.median(times),
        "state_mib": states / 2**20,
        "cache_mib": cached / 2**20,
        "record_s": record_s,
    }


def weight_bytes(model: LM) -> int:
    """Of all that a step multiplies by, in the dtype that it is kept in."""
    joint = [module for module in model.modules() if isinstance(module, JointLinear)]
    inside = {id(layer) for module in joint for layer in module.layers}
    alone = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and id(layer) not in inside]
    return sum(module.fixed.nbytes for module in joint if module.fixed is not None) + sum(
        layer.weight.nbytes for layer in alone
    )


def carried_bytes(decoder: Decoder, context: int) -> tuple[int, int]:
    """States, which are written at every step, and the context's keys and values, which are read."""
    state = cache = 0
    for mixer, kept in zip(decoder.model.layers(), decoder.caches, strict=True):
        total = sum(x.nbytes for x in kept if x is not None)
        if isinstance(kept, SoftmaxState):
            grown = kept.keys.nbytes + kept.values.nbytes
            total -= grown
            cache += grown // decoder.capacity * min(mixer.config.window or context, context)
        state += total
    return state, cache
