"""A run of `benchmark.py kernels`: row after row, kept in a file as they come, tables at the end."""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarking import attention, fused, measure
from scripts.benchmarking.cases import Case, Contender, Shape, cases_of, floor_bytes, make_inputs, ours
from scripts.benchmarking.measure import Problem
from scripts.benchmarking.report import (
    Row,
    Sheet,
    decode_sheet,
    error_sheet,
    failures,
    number,
    plain_console,
    say,
    scientific,
    show,
    timing_sheet,
)

Result = dict[str, Any]

KERNEL_SHARE = 0.01  # of a call's time: kernels that take less are only in the JSON


class UsageError(Exception):
    """What the user can mend, in one line."""


@dataclass(frozen=True)
class Options:
    """The command line, defaults filled in."""

    shapes: list[Shape]
    decoding: list[Shape]
    ops: list[str]
    attention: bool  # softmax attention
    fused: list[str]  # ops around the mixers
    dtype: torch.dtype
    device: torch.device
    backend: str
    peer: Contender | None  # of the recurrence
    beside_torch: bool  # the others
    repeats: int
    seed: int
    check_only: bool
    cold: bool
    cold_peer: bool
    peer_ms: int | None
    profile: bool
    script: str
    json: Path | None


def version(*packages: str) -> str | None:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return None


def machine(device: torch.device, peer: str | None) -> dict[str, Any]:
    """What any numbers depend on beside the code and the command's options."""
    gpu = measure.on_gpu(device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if gpu else f"cpu {platform.processor()}".strip(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "fla": version("fla-core", "flash-linear-attention") if peer == "fla" else None,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "command": shlex.join(["python", *sys.argv]),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("TRITON_", "FLA_"))} or None,
    }


def setting_of(options: Options, resolved: str) -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    peer = options.peer.name if options.peer else None
    return {
        **machine(options.device, peer),
        "backend": resolved,
        "dtype": str(options.dtype).removeprefix("torch."),
        "peer_ms": options.peer_ms if peer == "fla" else None,
        "seed": options.seed,
    }


def describe(setting: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items() if value is not None)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Nothing without a path. Raises UsageError where it can't be written."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json: {error}") from None


class Run:
    def __init__(self, options: Options, resolved: str) -> None:
        self.options, self.dtype, self.device = options, options.dtype, options.device
        self.gpu = measure.on_gpu(options.device)
        self.compares_at_shape = self.gpu and resolved != "torch"  # which is what a slice is compared with
        self.contenders = [ours(options.backend)] + ([options.peer] if options.peer else [])
        self.peer = options.peer.name if options.peer else None
        self.setting = setting_of(options, resolved)
        self.console = plain_console(sys.stdout.isatty())
        self.bandwidth: float | None = None
        self.checked: dict[tuple[Case, int, int], dict[str, Result]] = {}
        self.rows: list[Row] = []
        self.decoding: list[Row] = []
        self.fused: list[Row] = []
        self.attention: list[Row] = []
        self.attention_decoding: list[Row] = []

    def start(self) -> int:
        """Measure everything, with a line a row; 1 if one of ours is wrong."""
        began = time.perf_counter()
        self.save()
        self.say(describe(self.setting))
        if self.gpu and not self.options.check_only:
            self.bandwidth = self.setting["copy_bytes_per_s"] = measure.copy_bandwidth(self.device)
            self.say(f"copy {self.bandwidth / 1e12:.2f} TB/s")
        cases = cases_of(self.options.ops)
        for shape in self.options.shapes:
            for case in cases:
                self.finish(self.rows, self.chunk_row(case, shape))
        for shape in self.options.decoding:
            for case in cases:
                if not case.in_kernel:
                    self.finish(self.decoding, self.decode_row(case, shape))
        for shape in self.options.shapes:
            for op in self.options.fused:
                self.finish(self.fused, self.fused_row(op, shape))
        if self.options.attention:
            self.measure_attention()
        self.setting["run_s"] = time.perf_counter() - began
        self.save()
        self.say(f"{self.setting['run_s']:.0f} s")
        return 1 if any(row["wrong"] for rows in self.all_rows().values() for row in rows) else 0

    def all_rows(self) -> dict[str, list[Row]]:
        return {
            "ops": self.rows,
            "decoding": self.decoding,
            "fused": self.fused,
            "attention": self.attention,
            "attention_decoding": self.attention_decoding,
        }

    def say(self, line: str) -> None:
        say(self.console, line)

    def save(self) -> None:
        write_json(self.options.json, {**self.setting, **self.all_rows()})

    def finish(self, rows: list[Row], row: Row) -> None:
        """Judge, keep and tell of a row."""
        row["wrong"] = self.wrong(row["results"]["ours"])
        rows.append(row)
        self.save()
        parts = [f"{row['shape']} {row['op']}: {'WRONG, ' + ', '.join(row['wrong']) if row['wrong'] else 'ok'}"]
        for name, result in row["results"].items():
            times = [number(result[key], " ms") for key in ("forward_ms", "both_ms", "step_ms") if key in result]
            failed = failures(result) if name != "ours" else []  # ours are told already
            parts.append(f"{name} " + ", ".join([f"error {scientific(result.get('error'))}", *times, *failed]))
        self.say("; ".join(parts))
        for name, result in row["results"].items():
            if times := result.get("kernel_ms"):
                total = sum(times.values())
                each = [f"{kernel[:40]} {number(ms)}" for kernel, ms in times.items() if ms >= KERNEL_SHARE * total]
                self.say(f"    kernels of {name}: {number(total, ' ms')} = {', '.join(each)}")
        measure.release_memory(self.device)

    def wrong(self, result: Result) -> list[str]:
        """What is the matter with ours, nothing if all is well."""
        wrong = measure.beyond(result.get("errors", {}), self.dtype)
        for name, error in result.get("errors_at_shape", {}).items():
            if not error <= measure.LIMIT_AT_SHAPE:
                wrong.append(f"{name} at the timed shape {error:.1e}, limit {measure.LIMIT_AT_SHAPE:.0e}")
        return wrong + failures(result)

    def attempt(self, result: Result, stage: str, function: Callable[[], Result]) -> None:
        """Add what `function` measures; if it fails, add why, and let the run go on."""
        try:
            result |= function()
        except Exception as error:
            result[f"{stage}_failed"] = measure.one_line(error)
        if f"{stage}_failed" in result:
            measure.release_memory(self.device)  # now that the error is gone, whose traceback held tensors

    # The chunkwise ops

    def chunk_row(self, case: Case, shape: Shape) -> Row:
        if self.gpu and self.options.peer and not self.options.check_only:
            self.attempt({}, "tuning", partial(self.tune, self.options.peer, case, shape))
        results = {name: dict(result) for name, result in self.chunk_errors(case, shape.H, shape.D).items()}
        row: Row = {"op": case.label, "shape": str(shape), "results": results}
        if not self.options.check_only:
            self.attempt(results["ours"], "inputs", lambda: self.time_row(row, case, shape))
        return row

    def tune(self, peer: Contender, case: Case, shape: Shape) -> Result:
        """A first call, so that the peer's autotuner chooses for the shape that is timed, and not for that of the
        errors: it does not tell their B and T apart."""
        Problem.of(make_inputs(case, shape, self.dtype, self.device, self.options.seed)).both(peer.bind(case, "chunk"))
        return {}

    def chunk_errors(self, case: Case, H: int, D: int) -> dict[str, Result]:
        """Of each contender by name; measured once for every H and D."""
        if (case, H, D) not in self.checked:
            found = measure.chunk_errors(self.contenders, case, H, D, self.dtype, self.device, self.options.seed)
            self.checked[case, H, D] = {
                contender.name: {"check_failed": errors}
                if isinstance(errors, str)
                else {"errors": errors, "error": measure.worst(errors)}
                for contender, errors in zip(self.contenders, found, strict=True)
            }
        return self.checked[case, H, D]

    def time_row(self, row: Row, case: Case, shape: Shape) -> Result:
        """Add the floor and what is timed of every contender to the row."""
        seed = self.options.seed
        inputs = make_inputs(case, shape, self.dtype, self.device, seed)
        if self.bandwidth:
            row["floor_ms"] = {key: 1e3 * n / self.bandwidth for key, n in floor_bytes(inputs).items()}
        short = Shape(1, measure.HOST_TOKENS, shape.H, shape.D)
        problem, tiny = Problem.of(inputs), Problem.of(make_inputs(case, short, self.dtype, self.device, seed))
        for contender in self.contenders:
            self.time_chunk(contender, case, problem, tiny, row["results"][contender.name])
            if shape == self.options.shapes[0] and self.wants_cold(contender):
                self.attempt(row["results"][contender.name], "cold", partial(self.cold, contender, case, shape))
        return {}

    def time_chunk(self, contender: Contender, case: Case, problem: Problem, tiny: Problem, result: Result) -> None:
        """What is timed of one op of one contender, added to the result."""
        repeats = max(1, self.options.repeats // 2) if contender.name == "reference" else self.options.repeats
        try:
            call = contender.bind(case, "chunk")
        except Exception as error:
            result["import_failed"] = measure.one_line(error)
            return
        forward, both = partial(problem.forward, call), partial(problem.both, call)
        if self.compares_at_shape and contender.name == "ours":
            self.attempt(
                result, "check_at_shape", lambda: {"errors_at_shape": measure.errors_at_shape(call, case, problem)}
            )
        self.time_problem(forward, both, result, repeats)
        if self.gpu:
            self.attempt(result, "host", lambda: {"host_us": measure.host_us(partial(tiny.both, call))})

    def time_problem(
        self, forward: Callable[[], object], both: Callable[[], object], result: Result, repeats: int | None = None
    ) -> None:
        """Times and memory of a call, added to the result."""
        repeats = repeats or self.options.repeats
        self.attempt(result, "forward", lambda: {"forward_ms": measure.median_ms(forward, repeats, self.device)})
        self.attempt(result, "both", lambda: {"both_ms": measure.median_ms(both, repeats, self.device)})
        if self.gpu:
            self.attempt(result, "memory", lambda: {"extra_mib": measure.extra_mib(both)})
        if self.options.profile:
            self.attempt(result, "profile", lambda: {"kernel_ms": measure.kernel_ms(both)})

    def wants_cold(self, contender: Contender) -> bool:
        return self.options.cold if contender.name == "ours" else self.options.cold_peer and contender.name == "fla"

    def cold(self, contender: Contender, case: Case, shape: Shape) -> Result:
        measure.release_memory(self.device)
        words = ["--op", case.op, "--shape", str(shape), "--contender", contender.name]
        words += ["--dtype", self.setting["dtype"], "--backend", self.options.backend]
        words += ["--device", str(self.device), "--seed", str(self.options.seed)]
        words += ["--in-kernel"] if case.in_kernel else []
        return {"cold_s": measure.cold_seconds(self.options.script, words)}

    # Decoding

    def decode_row(self, case: Case, shape: Shape) -> Row:
        results: dict[str, Result] = {contender.name: {} for contender in self.contenders}
        row: Row = {"op": case.op, "shape": str(shape), "results": results}
        for contender in self.contenders:
            result = results[contender.name]
            self.attempt(result, "check", partial(self.decode_errors, contender, case, shape))
            if not self.options.check_only:
                self.attempt(result, "times", partial(self.decode_times, contender, case, shape))
        if self.bandwidth:
            row["floor_ms"] = {"step": 1e3 * measure.decode_bytes(shape) / self.bandwidth}
        return row

    def decode_errors(self, contender: Contender, case: Case, shape: Shape) -> Result:
        errors = measure.decode_errors(contender, case, shape.D, self.dtype, self.device, self.options.seed)
        return {"errors": errors, "error": measure.worst(errors)}

    def decode_times(self, contender: Contender, case: Case, shape: Shape) -> Result:
        inputs, state = measure.decode_inputs(case, shape, self.dtype, self.device, self.options.seed)
        step = measure.decode_step(contender.bind(case, "fused_recurrent"), inputs, state)
        result = {"step_ms": measure.median_ms(step, self.options.repeats, self.device)}
        return {**result, "host_us": measure.host_us(step)} if self.gpu else result

    # The ops around the recurrence, beside plain torch

    def fused_row(self, op: str, shape: Shape) -> Row:
        backends = {"ours": self.options.backend} | ({"torch": "torch"} if self.options.beside_torch else {})
        results: dict[str, Result] = {name: {} for name in backends}
        row: Row = {"op": op, "shape": str(shape), "results": results}
        for name, backend in backends.items():
            self.attempt(results[name], "check", partial(self.fused_errors, op, backend, shape))
        if self.options.check_only:
            return row
        inputs = fused.make_inputs(op, shape, self.dtype, self.device, self.options.seed)
        problem = Problem.of(inputs, *fused.d_outputs(op, inputs))
        if self.bandwidth:
            row["floor_ms"] = {key: 1e3 * n / self.bandwidth for key, n in fused.floor_bytes(op, inputs).items()}
        for name, backend in backends.items():
            call = fused.bind(op, backend, inputs, self.options.seed)
            self.time_problem(partial(problem.forward, call), partial(problem.both, call), results[name])
        return row

    def fused_errors(self, op: str, backend: str, shape: Shape) -> Result:
        short = Shape(measure.CHECKED["B"], measure.CHECKED["T"], shape.H, shape.D)
        inputs = fused.make_inputs(op, short, self.dtype, self.device, self.options.seed)
        exact = {name: x.double() for name, x in inputs.items()}
        d_o, d_second = fused.d_outputs(op, inputs)
        d_exact = d_o.double(), None if d_second is None else d_second.double()
        found = Problem.of(inputs, d_o, d_second).both(fused.bind(op, backend, inputs, self.options.seed))
        wanted = Problem.of(exact, *d_exact).both(fused.bind(op, "torch", exact, self.options.seed))
        names = ("o", *([] if d_second is None else ["sum"]), *(f"d{x}" for x in inputs))
        pairs = zip(names, found, wanted, strict=True)
        errors = {name: measure.relative_error(out, ref) for name, out, ref in pairs}
        return {"errors": errors, "error": measure.worst(errors)}

    # Softmax attention

    def measure_attention(self) -> None:
        o = self.options
        common: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "backend": o.backend,
            "repeats": o.repeats,
        }
        common |= {"peer": o.beside_torch, "seed": o.seed, "check_only": o.check_only}
        for shape in o.shapes:
            self.finish(self.attention, attention.row(shape, **common, profile=o.profile))
        if o.decoding:
            for shape in attention.DECODING if self.gpu else attention.DECODING_ON_CPU:
                row = attention.decode_row(shape, **common, bandwidth=self.bandwidth)
                self.finish(self.attention_decoding, row)

    # Tables

    def attention_sheets(self) -> list[Sheet]:
        dtype, peer = self.setting["dtype"], attention.PEER if self.options.beside_torch else None
        if self.options.check_only:
            rows = self.attention + self.attention_decoding
            return [error_sheet(f"‖out − ref‖ / ‖ref‖, {dtype}", rows)] if rows else []
        sheets = []
        for row in self.attention:
            title = f"{row['shape']} {dtype}, medians" + (f"; ratio = {peer} / ours" if peer else "")
            sheets.append(timing_sheet(title, [row], peer))
        for row in self.attention_decoding:
            title = f"decoding a token over a cache, {row['shape']} {dtype}, {attention.GROUP} queries a key, medians"
            sheets.append(decode_sheet(title, [row], peer))
        return sheets

    def sheets(self) -> list[Sheet]:
        dtype = self.setting["dtype"]
        sheets: list[Sheet] = []
        if self.options.check_only:
            for shape in self.options.shapes if self.rows else []:
                rows = [row for row in self.rows if row["shape"] == str(shape)]
                sheets.append(error_sheet(f"‖out − ref‖ / ‖ref‖ at D={shape.D}, {dtype}", rows))
            if self.decoding:
                sheets.append(error_sheet(f"‖out − ref‖ / ‖ref‖ of a decoded token, {dtype}", self.decoding))
            if self.fused:
                sheets.append(error_sheet(f"‖out − ref‖ / ‖ref‖ around the recurrence, {dtype}", self.fused))
            return sheets + self.attention_sheets()
        for shape in self.options.shapes:
            rows = [row for row in self.rows if row["shape"] == str(shape)]
            title = f"{shape} {dtype}, medians" + (f"; ratio = {self.peer} / ours" if self.peer else "")
            sheets.append(timing_sheet(title, rows, self.peer))
            beside = [row for row in self.fused if row["shape"] == str(shape)]
            torch_too = "torch" if self.options.beside_torch else None
            sheets.append(timing_sheet(f"{shape} {dtype}, medians; ratio = torch / ours", beside, torch_too))
        sheets = [sheet for sheet in sheets if sheet.rows]
        if self.decoding:
            shape = self.options.decoding[0]
            title = f"decoding a token, H={shape.H} D={shape.D} {dtype}, float32 state, medians"
            sheets.append(decode_sheet(title, self.decoding, self.peer))
        return sheets + self.attention_sheets()

    def print_tables(self, markdown: bool) -> None:
        sheets = self.sheets()
        for sheet in sheets:
            show(self.console, sheet)
        if markdown:
            print("\n\n".join(sheet.markdown() for sheet in sheets))
