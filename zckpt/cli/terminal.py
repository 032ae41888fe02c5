"""What standard output can show: how wide it is, whether in colour, and a document as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import click

from zckpt.errors import CONTROLS

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan", "good": "green"}

PRINTED_WIDTH = 160
"""Columns where standard output is no terminal and `COLUMNS` does not say."""


SURROGATES = range(0xD800, 0xE000)
"""Halves of characters, which a name in a file may hold and no encoding has."""

_ESCAPED = {code: f"\\u{code:04x}" for code in (*CONTROLS, *SURROGATES) if code >= 0x7F}
"""JSON may say any character by its number, within strings, where alone these can be."""


def json_text(document: object) -> str:
    """Return a document as JSON that drives no terminal, and that every encoding of Unicode has."""
    return json.dumps(document, indent=1, ensure_ascii=False).translate(_ESCAPED)


def width() -> int:
    """Return the columns of a line."""
    import shutil

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
