"""The text and the JSON document of `zckpt strip`."""

from __future__ import annotations

from zckpt.operations.strip import Stripped
from zckpt.report.text import count, printable, size, table

SHOWN_FILES = 8
"""More files than this are counted, not listed."""


def document(done: Stripped, *, dry_run: bool) -> dict[str, object]:
    """Return what was done as JSON-able data."""
    return {
        "dry_run": dry_run,
        "files": [str(path) for path in done.files],
        "read_nbytes": done.read_nbytes,
        "write_nbytes": done.write_nbytes,
        "saved_nbytes": done.saved,
        "memory_nbytes": done.memory,
        "checked_elements": done.compared,
        "checksummed_nbytes": done.checksummed,
        "notes": list(done.notes),
        "dropped": list(done.dropped),
        "warnings": list(done.warnings),
    }


def render(done: Stripped, *, dry_run: bool) -> str:
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
    rows = [(kind, nbytes) for kind, nbytes in sorted(done.saved.items(), key=lambda one: -one[1])]
    lines += table(["saved", "bytes"], [*rows, ("in all", sum(done.saved.values()))], right=(1,))
    lines += [f"dropped {one}" for one in done.dropped]
    lines += [f"note: {note}" for note in done.notes]
    return "\n".join(map(printable, [*lines, *(f"warning: {warning}" for warning in done.warnings)]))
