"""A progress bar in bytes on standard error, only where someone can see it."""

from __future__ import annotations

import sys
from typing import Any

from zckpt.engine import Reporter, SilentReporter


class BarReporter:
    """A reporter that draws a tqdm bar."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None

    def begin(self, nbytes: int) -> None:
        """Show an empty bar."""
        from tqdm import tqdm

        self._bar = tqdm(total=nbytes, desc=self._what, unit="B", unit_scale=True, file=sys.stderr)

    def advance(self, nbytes: int) -> None:
        """Move the bar."""
        self._bar.update(nbytes)

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


def reporter(what: str, *, quiet: bool) -> Reporter:
    """Return a bar if standard error is a terminal and `quiet` is false, else a silent reporter."""
    return SilentReporter() if quiet or not sys.stderr.isatty() else BarReporter(what)
