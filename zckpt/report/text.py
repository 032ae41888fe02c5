"""Aligned tables and units a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from zckpt.errors import without_controls

Value = TypeVar("Value")


def size(nbytes: int) -> str:
    """Return bytes with a decimal unit: `4.21 GB`."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return str(nbytes)


def count(number: int, noun: str) -> str:
    """Return a number with thousands separated and a noun that agrees with it."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(value: Value) -> Value:
    """Return a document or a text without control characters, by which a name in a file could drive a terminal."""
    cleaned: object = value
    if isinstance(value, str):
        cleaned = without_controls(value)
    elif isinstance(value, dict):
        cleaned = {key: printable(one) for key, one in value.items()}
    elif isinstance(value, list):
        cleaned = [printable(one) for one in value]
    return cast("Value", cleaned)


def fitted(line: str, width: int) -> str:
    """Return a line cut to a width."""
    return line if len(line) <= width else line[: max(width - 3, 1)] + "..."


def shortened(name: str, width: int) -> str:
    """Return a name cut in its middle to a width: its beginning and its end tell most."""
    half = max(width - 3, 2) // 2
    return name if len(name) <= width else f"{name[:half]}...{name[-(max(width - 3, 2) - half) :]}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table; columns in `right` are aligned to the right."""
    text = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in text
    ]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if type(value) is int else str(value)
