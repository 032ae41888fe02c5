"""The text and the JSON document of a verb that wrote a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from zckpt.report.text import count, printable, size

SHOWN_FILES = 8
"""More files than this are counted, not listed."""


class Done(Protocol):
    """What an operation returns that wrote a checkpoint, or under `dry_run` would have."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the target."""

    @property
    def read_nbytes(self) -> int:
        """Bytes of tensors read."""

    @property
    def write_nbytes(self) -> int:
        """Bytes of the files."""

    @property
    def memory(self) -> int:
        """Upper bound of the copy buffers, in bytes."""

    @property
    def compared(self) -> int:
        """Elements of masters that were held against their weights."""

    @property
    def verified(self) -> int:
        """Bytes of the target that were compared with the source."""

    @property
    def checksummed(self) -> int:
        """Bytes of the source that were held against the checksums in it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about the target."""

    @property
    def dropped(self) -> tuple[str, ...]:
        """What the source holds, nothing has read, and the user has named."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know about the source."""


def document(done: Done, *, dry_run: bool) -> dict[str, object]:
    """Return what was done as JSON-able data."""
    return {
        "dry_run": dry_run,
        "files": [str(path) for path in done.files],
        "read_nbytes": done.read_nbytes,
        "write_nbytes": done.write_nbytes,
        "memory_nbytes": done.memory,
        "checked_elements": done.compared,
        "checksummed_nbytes": done.checksummed,
        "verified_nbytes": done.verified,
        "notes": list(done.notes),
        "dropped": list(done.dropped),
        "warnings": list(done.warnings),
    }


def render(done: Done, *, dry_run: bool) -> str:
    """Return what was done as text."""
    verb = "would write" if dry_run else "wrote"
    lines = [f"{verb} {path}" for path in done.files[:SHOWN_FILES]]
    if len(done.files) > SHOWN_FILES:
        lines.append(f"... and {len(done.files) - SHOWN_FILES} more files")
    lines.append(
        f"{count(len(done.files), 'file')}, {size(done.write_nbytes)}; {size(done.read_nbytes)} read, "
        f"at most {size(done.memory)} of buffers"
    )
    if done.compared:
        lines.append(f"{count(done.compared, 'element')} of masters agree with the weights beside them")
    if done.checksummed:
        lines.append(f"{size(done.checksummed)} of the source agree with the checksums in its files")
    if done.verified:
        lines.append(f"{size(done.verified)} compared with the source, byte for byte")
    lines += [f"dropped {one}" for one in done.dropped]
    lines += [f"note: {note}" for note in done.notes]
    return "\n".join(map(printable, [*lines, *(f"warning: {warning}" for warning in done.warnings)]))
