"""Standard output and error as they may be found: closed, full, left by their reader, or of an encoding of few letters.

What a verb finds out is its exit status, whoever listens: `zckpt verify x | head -1` says unsound of an unsound one.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import click

from zckpt.engine import Reporter
from zckpt.errors import CONTROLS


class CannotPrintError(Exception):
    """Standard output does not take what is printed; the reason is the message."""


class Output:
    """Standard output for `click`, which goes on when nobody reads any more.

    Parameters
    ----------
    stream : file
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._wrong: CannotPrintError | None = None

    def write(self, text: str) -> int:
        """Print, or leave it where nobody reads.

        Raises
        ------
        CannotPrintError
            It cannot be printed for any other reason.
        """
        if self._wrong is not None:  # again and again: click tries a stream out, and lets errors pass
            raise self._wrong
        self._call(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Let what was printed be seen; errors are those of `write`."""
        self._call(self._stream.flush)

    def _call(self, function: Callable[[], object]) -> None:
        try:
            function()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # takes the rest, at the end as well
            if not isinstance(error, BrokenPipeError):
                self._wrong = CannotPrintError(error.strerror)
                raise self._wrong from error

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def standard_streams() -> None:
    """Make standard output and error fit for printing, and take the descriptors of those that are closed.

    A target that got the descriptor of a closed standard output would hold whatever is printed.
    """
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):  # writing to 1 is an error then
        try:
            os.fstat(descriptor)
        except OSError:
            taken = os.open(os.devnull, flags)
            if taken != descriptor:
                os.dup2(taken, descriptor)
                os.close(taken)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  # a descriptor, to the end
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names and paths may hold what no encoding has
    if not isinstance(sys.stdout, Output):
        sys.stdout = cast("TextIO", Output(sys.stdout))


COLOURS = {"error": "red", "warning": "yellow", "note": "cyan", "good": "green"}

PRINTED_WIDTH = 160
"""Columns where standard output is no terminal and `COLUMNS` does not say."""


SURROGATES = range(0xD800, 0xE000)
"""Halves of characters, which a name in a file may hold and no encoding has."""

_ESCAPED = {code: f"\\u{code:04x}" for code in (*CONTROLS, *SURROGATES) if code >= 0x7F}
"""JSON may say any character by its number, within strings, where alone these can be."""


MANY_ENTRIES = 100
"""A list of more in a document has a line for each, which takes a quarter of the time."""


def json_text(document: object, *, indent: int | None = 1) -> str:
    """Return a document as JSON that drives no terminal, and that every encoding of Unicode has."""
    line = json.JSONEncoder(ensure_ascii=False).encode
    whole = json.JSONEncoder(ensure_ascii=False, indent=indent).encode
    if indent is None or not isinstance(document, dict) or not document:
        return whole(document).translate(_ESCAPED)
    entries = []
    for key, value in document.items():
        is_long = isinstance(value, list) and len(value) > MANY_ENTRIES
        text = "[\n " + ",\n ".join(map(line, value)) + "\n]" if is_long else whole(value)
        entries.append(f"{line(key)}: {text}".replace("\n", "\n "))
    return ("{\n " + ",\n ".join(entries) + "\n}").translate(_ESCAPED)


def width() -> int:
    """Return the columns of a line."""
    import shutil

    return shutil.get_terminal_size((PRINTED_WIDTH, 0)).columns


def paint() -> Callable[[str, str], str]:
    """Return what colours a text by what it means, a key of `COLOURS`; where there are no colours, it stays as it is.

    Notes
    -----
    Source: no-color.org. `NO_COLOR`, if it is set and not empty, turns colours off.
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return lambda text, _: text
    return lambda text, meaning: click.style(text, fg=COLOURS[meaning], bold=meaning == "error")


class BarReporter:
    """A reporter that draws a tqdm bar."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None

    def begin(self, nbytes: int) -> None:
        """Show an empty bar."""
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread that watches: a process with another thread is not forked
        self._bar = tqdm(total=nbytes, desc=self._what, unit="B", unit_scale=True, file=sys.stderr)

    def advance(self, nbytes: int) -> None:
        """Move the bar."""
        self._bar.update(nbytes)

    def end(self) -> None:
        """Close the bar."""
        self._bar.close()


def reporter(what: str, *, quiet: bool) -> Reporter | None:
    """Return a bar if standard error is a terminal and `quiet` is false; else None."""
    return None if quiet or not sys.stderr.isatty() else BarReporter(what)


def check_file(file: Path | None, *, overwrite: bool) -> None:
    """Raise TargetError if a page, or a picture, cannot be written, before the work for it is done."""
    from zckpt.storage.ownership import check_target

    if file is not None:
        check_target(file, overwrite=overwrite)


def write_file(file: Path, content: str | bytes, *, overwrite: bool) -> None:
    """Write a page or a picture, whole or not at all."""
    from zckpt.storage.durable import written

    with written([file], overwrite=overwrite) as [partial]:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
