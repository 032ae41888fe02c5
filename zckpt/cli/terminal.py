"""What standard output can show: how wide it is, and whether in colour."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

import click

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan", "good": "green"}

PRINTED_WIDTH = 160
"""Columns where standard output is no terminal and `COLUMNS` does not say."""


def width() -> int:
    """Return the columns of a line."""
    return shutil.get_terminal_size((PRINTED_WIDTH, 0)).columns


def paint() -> Callable[[str, str], str] | None:
    """Return what colours a text by what it means, a key of `COLOURS`; None where there are no colours.

    Notes
    -----
    Source: no-color.org. `NO_COLOR`, if it is set and not empty, turns colours off.
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return None
    return lambda text, meaning: click.style(text, fg=COLOURS[meaning], bold=meaning == "error")
