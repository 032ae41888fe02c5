"""Aligned tables and units a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from zckpt.errors import shortened, without_controls

Value = TypeVar("Value")

SHOWN_CHARACTERS = 1200
"""Of a name, a path or a line; `--json` has all of them."""

SHOWN_CELL = 200
"""Characters of a cell of a table, whose other rows are filled to the same width."""

_LINES = {ord("\n"): "\ufffd", ord("\t"): "\ufffd"}


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
    """Return a document, or a text of one line, in which no name can drive a terminal, add a line or fill the screen.

    Control characters are replaced, line feeds too, and what is longer than any name that people give is cut.
    """
    cleaned: object = value
    if isinstance(value, str):
        cleaned = shortened(without_controls(value.translate(_LINES)), SHOWN_CHARACTERS)
    elif isinstance(value, dict):
        cleaned = _with_printable_keys(value)
    elif isinstance(value, list):
        cleaned = [printable(one) for one in value]
    return cast("Value", cleaned)


def _with_printable_keys(found: dict[object, object]) -> dict[object, object]:
    cleaned: dict[object, object] = {}
    for key, value in found.items():
        text = printable(key)
        while text in cleaned:  # of another key that differs in what is not shown
            text = f"{text}'"
        cleaned[text] = printable(value)
    return cleaned


def fitted(line: str, width: int) -> str:
    """Return a line cut to a width."""
    return line if len(line) <= width else line[: max(width - 3, 1)] + "..."


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
    return f"{value:,}" if type(value) is int else shortened(str(value), SHOWN_CELL)
