"""How elements get from spans to holes: planned exactly, moved in large reads, cast, checked, summed.

It knows bytes, boxes and element types; no format, and not what a parameter means. Workers, buffers and batches are
decided here and nowhere else.

    plan        spans x holes -> copies, every element once         boxes
    copy        copies -> pieces that fit a buffer -> elements      cast
    workers     pieces -> batches -> threads, or tasks for other processes
    write, read, scan       the three things that a batch may do: fill a file, fill memory, show elements to a function
    checking    the checksums of what was read, and of what was written
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

DEFAULT_MEMORY_NBYTES = 64 * 10**6
"""Bytes that all buffers together may take."""

DEFAULT_MAX_SHARD_NBYTES = 5 * 10**9
"""Of a file of a model that is written as several."""


class Reporter(Protocol):
    """Hears of progress, in the thread that began the work: `begin` once, `advance` often, `end` once."""

    def begin(self, nbytes: int) -> None:
        """Start; `nbytes` bytes will be written, or read."""

    def advance(self, nbytes: int) -> None:
        """Note that `nbytes` more bytes have been."""

    def end(self) -> None:
        """Finish, successfully or not."""


class SilentReporter:
    """A reporter that does nothing."""

    def begin(self, nbytes: int) -> None:
        """Do nothing."""

    def advance(self, nbytes: int) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@contextmanager
def reporting(reporter: Reporter | None, nbytes: int) -> Iterator[Reporter]:
    """Let a reporter hear of work on so many bytes, that it begins, and in any case that it ends."""
    progress = reporter or SilentReporter()
    progress.begin(nbytes)
    try:
        yield progress
    finally:
        progress.end()
