"""Rows of numbers as a table, for the terminal and as Markdown."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# op (of `train`: pattern), shape, "results": what was measured of each contender by name, "wrong": what is the matter
# with ours; of kernels floor_ms, of training data
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]  # heading (two lines), cell

MISSING = "–"
WIDTH = 160  # where the output is no terminal


@dataclass(frozen=True)
class Sheet:
    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]
    wrong: frozenset[int] = frozenset()  # indices of rows to show in red

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for i, heading in enumerate(self.header):
            lines = heading.replace("+", "+\n").replace(" ", "\n")  # as narrow as the numbers
            table.add_column(lines, justify="right" if i else "left", vertical="bottom", no_wrap=True)
        for i, cells in enumerate(self.rows):
            table.add_row(*(Text(cell) for cell in cells), style="red" if i in self.wrong else None)
        return table

    def markdown(self) -> str:
        lines = [self.title, "", "| " + " | ".join(heading.replace("\n", ", ") for heading in self.header) + " |"]
        lines.append("|" + "|".join(["---"] + ["---:"] * (len(self.header) - 1)) + "|")
        lines += ["| " + " | ".join(cells) + " |" for cells in self.rows]
        return "\n".join(lines + (["", *self.notes] if self.notes else []))


def show(console: Console, sheet: Sheet) -> None:
    say(console, sheet.title)
    console.print(sheet.table())
    for note in sheet.notes:
        say(console, note)


def plain_console(terminal: bool) -> Console:
    return Console() if terminal else Console(width=WIDTH)


def say(console: Console, line: str) -> None:
    """A line as it is, however long."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 4)}f}{unit}"


def whole(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def scientific(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1e}".replace("e-0", "e-")


def value_of(row: Row, name: str, key: str) -> float | None:
    value: float | None = row["results"].get(name, {}).get(key)
    return value


def ratio(row: Row, peer: str, key: str) -> float | None:
    """How many times as fast ours is."""
    mine, theirs = value_of(row, "ours", key), value_of(row, peer, key)
    return theirs / mine if mine and theirs else None


def build(title: str, rows: list[Row], columns: list[Column]) -> Sheet:
    """Columns that no row has a value for are left out."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    kept = [i for i in range(len(columns)) if i == 0 or any(line[i] != MISSING for line in cells)]
    return Sheet(
        title,
        [columns[i][0] for i in kept],
        [[line[i] for i in kept] for line in cells],
        notes_of(rows),
        frozenset(i for i, row in enumerate(rows) if row["wrong"]),
    )


def failures(result: dict[str, Any]) -> list[str]:
    return [f"{key.replace('_', ' ')}: {line}" for key, line in result.items() if key.endswith("failed")]


def notes_of(rows: list[Row]) -> list[str]:
    """Who was wrong, or failed, and how."""
    notes = []
    for row in rows:
        notes += [f"WRONG: {row['shape']} {row['op']}: {line}" for line in row["wrong"]]
        for name, result in row["results"].items():
            if name != "ours":
                notes += [f"{name}: {row['shape']} {row['op']}: {line}" for line in failures(result)]
    return notes


def add_of_each(
    columns: list[Column], names: list[str], heading: str, key: str, form: Callable[[float | None], str]
) -> None:
    """A column of `key` for every contender."""
    for name in names:
        columns.append((f"{heading}\n{name}", lambda row, name=name: form(value_of(row, name, key))))  # type: ignore[misc]


def timing_sheet(title: str, rows: list[Row], peer: str | None) -> Sheet:
    columns: list[Column] = [("op", lambda row: row["op"])]
    of_each = partial(add_of_each, columns, ["ours"] + ([peer] if peer else []))
    of_each("error", "error", scientific)
    for short, label in (("forward", "fwd ms"), ("both", "fwd+bwd ms")):
        of_each(label, f"{short}_ms", number)
        if peer:
            columns.append((f"{label}\nratio", ratio_cell(peer, f"{short}_ms")))
        columns.append((f"{label}\nfloor", floor_cell(short)))
    of_each("extra MiB", "extra_mib", whole)
    of_each("host µs", "host_us", whole)
    of_each("cold s", "cold_s", number)
    return build(title, rows, columns)


def decode_sheet(title: str, rows: list[Row], peer: str | None) -> Sheet:
    columns: list[Column] = [("op", lambda row: row["op"]), ("B", lambda row: row["shape"].split("x")[0])]
    for heading, key, form in (
        ("error", "error", scientific),
        ("ms", "step_ms", number),
        ("host µs", "host_us", number),
    ):
        add_of_each(columns, ["ours"] + ([peer] if peer else []), heading, key, form)
        if key == "step_ms":
            if peer:
                columns.append(("ms\nratio", ratio_cell(peer, key)))
            columns.append(("ms\nfloor", floor_cell("step")))
    return build(title, rows, columns)


def training_sheet(title: str, rows: list[Row], peer: str | None) -> Sheet:
    columns: list[Column] = [("pattern", lambda row: row["op"]), ("data", lambda row: row["data"])]
    of_each = partial(add_of_each, columns, ["ours"] + ([peer] if peer else []))
    of_each("tokens/s", "tokens_per_second", whole)
    if peer:
        columns.append(("tokens/s\nratio", ratio_cell(peer, "step_ms")))
    columns.append(("MFU", lambda row: percent(value_of(row, "ours", "mfu"))))
    of_each("step ms", "step_ms", number)
    of_each("peak MiB", "peak_mib", whole)
    of_each("activation MiB", "activation_mib", whole)
    of_each("first step s", "first_step_s", number)
    of_each("parameters", "parameters", whole)
    return build(title, rows, columns)


def error_sheet(title: str, rows: list[Row]) -> Sheet:
    """A line for each op and contender, a column for each tensor."""
    flat = [
        {"op": row["op"] if name == "ours" else f"{row['op']} ({name})", "errors": result.get("errors", {})}
        for row in rows
        for name, result in row["results"].items()
    ]
    tensors = list(dict.fromkeys(tensor for line in flat for tensor in line["errors"]))
    cells = [[line["op"], *(scientific(line["errors"].get(tensor)) for tensor in tensors)] for line in flat]
    return Sheet(title, ["op", *tensors], cells, notes_of(rows))


def ratio_cell(peer: str, key: str) -> Callable[[Row], str]:
    return lambda row: number(ratio(row, peer, key), "×")


def floor_cell(key: str) -> Callable[[Row], str]:
    return lambda row: number(row.get("floor_ms", {}).get(key))
