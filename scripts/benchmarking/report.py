"""Rows of numbers as a table, for the terminal and as Markdown."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# op, shape, floor_ms, "results": what was measured of each contender by name, "wrong": what is the matter with ours
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
    console.print(sheet.title, highlight=False, markup=False, soft_wrap=True)
    console.print(sheet.table())
    for note in sheet.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def plain_console(terminal: bool) -> Console:
    return Console() if terminal else Console(width=WIDTH)


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 4)}f}{unit}"


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


def timing_sheet(title: str, rows: list[Row], peer: str | None) -> Sheet:
    names = ["ours"] + ([peer] if peer else [])
    columns: list[Column] = [("op", lambda row: row["op"])]

    def of_each(heading: str, key: str, form: Callable[[float | None], str]) -> None:
        for name in names:
            columns.append((f"{heading}\n{name}", lambda row, name=name: form(value_of(row, name, key))))  # type: ignore[misc]

    of_each("error", "error", scientific)
    for short, label in (("forward", "fwd ms"), ("both", "fwd+bwd ms")):
        of_each(label, f"{short}_ms", number)
        if peer:
            columns.append((f"{label}\nratio", ratio_cell(peer, f"{short}_ms")))
        columns.append((f"{label}\nfloor", floor_cell(short)))
    of_each("extra MiB", "extra_mib", lambda value: MISSING if value is None else f"{value:,.0f}")
    of_each("host µs", "host_us", lambda value: MISSING if value is None else f"{value:,.0f}")
    of_each("cold s", "cold_s", number)
    return build(title, rows, columns)


def decode_sheet(title: str, rows: list[Row], peer: str | None) -> Sheet:
    names = ["ours"] + ([peer] if peer else [])
    columns: list[Column] = [("op", lambda row: row["op"]), ("B", lambda row: row["shape"].split("x")[0])]
    for heading, key, form in (
        ("error", "error", scientific),
        ("ms", "step_ms", number),
        ("host µs", "host_us", number),
    ):
        for name in names:
            columns.append((f"{heading}\n{name}", lambda row, n=name, k=key, f=form: f(value_of(row, n, k))))  # type: ignore[misc]
        if key == "step_ms":
            if peer:
                columns.append(("ms\nratio", ratio_cell(peer, key)))
            columns.append(("ms\nfloor", floor_cell("step")))
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
