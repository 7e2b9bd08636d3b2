"""Time the kernels on this machine: `python scripts/benchmark.py kernels [--length 4096] [--json FILE]`.

Every cell of rule × decay is first compared with the token-by-token reference, forward and gradients, then both are
timed, forward alone and forward with backward. The exit status is 1 if a cell is wrong.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import kernels

# ‖out − ref‖ / ‖ref‖ between two float32 computations over a few thousand tokens.
TOLERANCE = 1e-4

NAMES = {
    ("additive", "none"): "linear_attn",
    ("additive", "scalar"): "simple_gla",
    ("additive", "channel"): "gla",
    ("delta", "none"): "delta_rule",
    ("delta", "scalar"): "gated_delta_rule",
    ("delta", "channel"): "kda",
}

Row = dict[str, str | float | bool]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("kernels", help="chunk against the token-by-token reference, for every cell")
    command.set_defaults(run=benchmark_kernels)
    command.add_argument("--batch", type=int, default=2)
    command.add_argument("--length", type=int, default=1024, help="tokens in a sequence")
    command.add_argument("--heads", type=int, default=4)
    command.add_argument("--key-dim", type=int, default=64)
    command.add_argument("--value-dim", type=int, default=64)
    command.add_argument("--backend", default="auto", choices=kernels.BACKENDS, help="what is compared")
    command.add_argument("--device", default="cpu")
    command.add_argument("--repeats", type=int, default=5, help="timed runs, of which the median counts")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    arguments = parser.parse_args()
    status: int = arguments.run(arguments)
    return status


def benchmark_kernels(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    setting = {
        "backend": kernels.resolve_backend(arguments.backend, device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **{name: getattr(arguments, name) for name in ("batch", "length", "heads", "key_dim", "value_dim", "seed")},
    }
    console = Console() if sys.stdout.isatty() else Console(width=120)  # a log has no right edge
    console.print(", ".join(f"{name} {value}" for name, value in setting.items()), highlight=False)
    rows = []
    for rule, decay in NAMES:
        rows.append(measure_cell(rule, decay, arguments, device))
        console.print(f"{rows[-1]['op']}: {'ok' if rows[-1]['correct'] else 'WRONG'}", highlight=False)
    console.print(table_of(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({**setting, "ops": rows}, indent=2) + "\n")
    return 0 if all(row["correct"] for row in rows) else 1


def measure_cell(rule: str, decay: str, arguments: argparse.Namespace, device: torch.device) -> Row:
    """Largest error over o and the gradients, and median milliseconds of both implementations."""
    inputs = random_inputs(rule, decay, arguments, device)
    d_o = torch.randn_like(inputs["v"])

    def forward(backend: str) -> Tensor:
        o, _ = kernels.chunk(**inputs, rule=rule, decay=decay, backend=backend)
        return o

    def inference(backend: str) -> None:
        with torch.no_grad():
            forward(backend)

    def both(backend: str) -> list[Tensor]:
        o = forward(backend)
        return [o, *torch.autograd.grad(o, list(inputs.values()), d_o)]

    pairs = zip(both(arguments.backend), both("reference"), strict=True)
    error = torch.stack([(out - ref).norm() / ref.norm() for out, ref in pairs]).max().item()  # keeps a NaN
    row: Row = {"op": NAMES[rule, decay], "error": error, "correct": error <= TOLERANCE}
    cases: list[tuple[str, Callable[[str], object]]] = [("forward", inference), ("both", both)]
    for label, function in cases:
        fast = median_ms(partial(function, arguments.backend), arguments.repeats, device)
        slow = median_ms(partial(function, "reference"), max(1, arguments.repeats // 2), device)
        row |= {f"{label}_ms": fast, f"{label}_reference_ms": slow, f"{label}_ratio": slow / fast}
    return row


def random_inputs(rule: str, decay: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(arguments.seed)
    tokens = (arguments.batch, arguments.length, arguments.heads)
    inputs = {
        "q": F.normalize(torch.randn(*tokens, arguments.key_dim), dim=-1),
        "k": F.normalize(torch.randn(*tokens, arguments.key_dim), dim=-1),
        "v": torch.randn(*tokens, arguments.value_dim),
    }
    if decay != "none":
        inputs["g"] = -0.1 * torch.rand(*tokens, *([arguments.key_dim] if decay == "channel" else []))
    if rule == "delta":
        inputs["beta"] = torch.rand(*tokens)
    return {name: x.to(device).requires_grad_() for name, x in inputs.items()}


def median_ms(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def table_of(rows: list[Row]) -> Table:
    table = Table(title="milliseconds, median; ratio = reference / chunk")
    table.add_column("op")
    for label in ("error", "forward", "reference", "ratio", "forward + backward", "reference", "ratio"):
        table.add_column(label, justify="right")
    for row in rows:
        cells = [str(row["op"]), f"{row['error']:.1e}" if row["correct"] else f"[red]{row['error']:.1e}[/red]"]
        for label in ("forward", "both"):
            cells += [f"{row[f'{label}_ms']:.1f}", f"{row[f'{label}_reference_ms']:.1f}"]
            cells += [f"{row[f'{label}_ratio']:.1f}×"]
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
