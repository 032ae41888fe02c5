"""The text and the JSON document of `zckpt reshard`."""

from __future__ import annotations

from zckpt.operations.reshard import Resharded
from zckpt.report.text import count, size

SHOWN_FILES = 8
"""More files than this are counted, not listed."""


def document(done: Resharded, *, dry_run: bool) -> dict[str, object]:
    """Return what was done as JSON-able data."""
    return {
        "dry_run": dry_run,
        "files": [str(path) for path in done.files],
        "read_nbytes": done.read_nbytes,
        "write_nbytes": done.write_nbytes,
        "memory_nbytes": done.memory,
        "checked_elements": done.compared,
        "notes": list(done.notes),
        "warnings": list(done.warnings),
    }


def render(done: Resharded, *, dry_run: bool) -> str:
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
    lines += [f"note: {note}" for note in done.notes]
    return "\n".join(lines + [f"warning: {warning}" for warning in done.warnings])
