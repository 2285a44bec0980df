"""What a plan answers: figures with units, tables, notes; as text for people and as one JSON object.

The only place where the planner's numbers become text. Invariant: every figure has a unit of `Unit`; sizes in memory are written
in bytes, binary and decimal side by side, rates and traffic in decimal units alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Value = int | float | str | None
OPTIMISTIC = "optimistic bound, not a measurement"


class Unit(StrEnum):
    """Every unit that the planner writes."""

    BYTES = "B"
    BYTES_PER_TOKEN = "B/token"
    BYTES_PER_SEQUENCE = "B/sequence"
    BYTES_PER_BLOCK = "B/block"
    BYTES_PER_SECOND = "B/s"
    GIGABYTES = "GB"
    GIGABYTES_PER_SECOND = "GB/s"
    FLOP = "FLOP"
    GIGAFLOP = "GFLOP"
    FLOP_PER_TOKEN = "FLOP/token"
    FLOP_PER_BYTE = "FLOP/B"
    FLOP_PER_SECOND = "FLOP/s"
    TERAFLOP_PER_SECOND = "TFLOP/s"
    TOKENS = "tokens"
    TOKENS_PER_BLOCK = "tokens/block"
    TOKENS_PER_SEQUENCE = "tokens/sequence"
    TOKENS_PER_REQUEST = "tokens/request"
    TOKENS_PER_STEP = "tokens/step"
    TOKENS_PER_SECOND = "tokens/s"
    SEQUENCES = "sequences"
    REQUESTS = "requests"
    REQUESTS_PER_SECOND = "requests/s"
    BLOCKS = "blocks"
    BLOCKS_PER_SEQUENCE = "blocks/sequence"
    BITS = "bit"
    LAYERS = "layers"
    PARAMETERS = "parameters"
    EXPERTS = "experts"
    ITERATIONS = "iterations"
    STEPS_PER_SECOND = "steps/s"
    MILLISECONDS = "ms"
    SECONDS = "s"
    TIMES = "×"
    PERCENT = "%"
    PROBABILITY = "probability"
    PLAIN_STEPS = "plain steps"
    WORD = "word"


@dataclass(frozen=True, slots=True)
class Figure:
    """`name` is for programs, `label` for people. `value` None: not defined for this input, and `equation` says why."""

    name: str
    label: str
    value: Value
    unit: Unit
    equation: str


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    label: str
    unit: Unit


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in the order of `columns`."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    equation: str = ""


@dataclass(slots=True)
class Report:
    """One plan's answer. `picture` is text that stands under the figures (a Gantt chart)."""

    plan: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    picture: list[str] = field(default_factory=list)

    def add(self, name: str, label: str, value: Value, unit: Unit, equation: str) -> None:
        self.figures.append(Figure(name, label, value, unit, equation))

    def value(self, name: str) -> Any:
        """The value of the figure of that name."""
        return next(figure.value for figure in self.figures if figure.name == name)

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "title": self.title,
            "figures": {
                figure.name: {
                    "value": figure.value,
                    "unit": str(figure.unit),
                    "label": figure.label,
                    "equation": figure.equation,
                }
                for figure in self.figures
            },
            "tables": {
                table.name: {
                    "title": table.title,
                    "units": {column.name: str(column.unit) for column in table.columns},
                    "rows": [
                        {c.name: v for c, v in zip(table.columns, row, strict=True)}
                        for row in table.rows
                    ],
                    "equation": table.equation,
                }
                for table in self.tables
            },
            "notes": self.notes,
        }

    def as_text(self, explain: bool = False) -> list[str]:
        """Lines for people; with `explain` each figure is followed by its equation."""
        lines = [self.title]
        width = max((len(figure.label) for figure in self.figures), default=0)
        for figure in self.figures:
            lines.append(f"  {figure.label:<{width}}  {show(figure.value, figure.unit)}")
            if explain:
                lines.append(f"  {'':<{width}}    = {figure.equation}")
        for table in self.tables:
            lines += ["", *_table_text(table)]
            if explain and table.equation:
                lines.append(f"    where {table.equation}")
        if self.picture:
            lines += ["", *self.picture]
        if self.notes:
            lines += ["", *self.notes]
        return lines


def show(value: Value, unit: Unit) -> str:
    """512 KiB and the like: 524,288 B = 512 KiB = 524.288 kB, 2 TB/s, 142.857 steps/s, 3 requests."""
    if value is None:
        return "not defined"
    if isinstance(value, str):
        return value
    if unit is Unit.BYTES_PER_SECOND:
        return _prefixed(value, str(unit))
    if unit.startswith("FLOP") and unit is not Unit.FLOP_PER_BYTE:
        return _prefixed(value, str(unit))
    if unit.startswith("B"):
        return _size(value, str(unit))
    return f"{number(value)}{unit}" if unit is Unit.TIMES else f"{number(value)} {unit}"


def number(value: int | float, digits: int = 6) -> str:
    """Whole numbers in full, others to `digits` significant digits; commas between thousands."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1e15 or abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _size(num_bytes: int | float, unit: str) -> str:
    suffix = unit[1:]  # "", "/token", "/sequence", "/block"
    if num_bytes < 1000:
        return f"{number(num_bytes)} {unit}"
    binary = _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    decimal = _scaled(num_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))
    return f"{number(num_bytes)} {unit} = {binary}{suffix} = {decimal}{suffix}"


def _prefixed(value: int | float, unit: str) -> str:
    scaled, prefix = float(value), ""
    for larger in ("k", "M", "G", "T", "P", "E"):
        if scaled < 1000:
            break
        scaled, prefix = scaled / 1000, larger
    return f"{number(scaled)} {prefix}{unit}"


def _scaled(value: float, base: int, names: Sequence[str]) -> str:
    index = 0
    while value >= base and index < len(names) - 1:
        value /= base
        index += 1
    return f"{number(value)} {names[index]}"


def _table_text(table: Table) -> list[str]:
    """Right-aligned columns under their names and units; words are left-aligned."""
    heads = [[column.label for column in table.columns], [_heading(c) for c in table.columns]]
    cells = [
        ["—" if v is None else v if isinstance(v, str) else number(v) for v in row]
        for row in table.rows
    ]
    widths = [max(map(len, texts)) for texts in zip(*heads, *cells, strict=True)]
    lines = [f"  {table.title}"]
    for row in [*heads, *cells]:
        padded = [
            text.ljust(width) if column.unit is Unit.WORD else text.rjust(width)
            for text, width, column in zip(row, widths, table.columns, strict=True)
        ]
        lines.append("    " + "  ".join(padded).rstrip())
    return lines


def _heading(column: Column) -> str:
    return "" if column.unit is Unit.WORD else f"({column.unit})"
