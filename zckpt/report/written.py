"""The text and the JSON document of the verbs that write a checkpoint or a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zckpt.report.text import count, printable, size, table

if TYPE_CHECKING:
    from zckpt.operations.consolidate import Consolidated
    from zckpt.operations.convert import Converted
    from zckpt.operations.reshard import Resharded
    from zckpt.operations.strip import Stripped

    Done = Consolidated | Converted | Resharded | Stripped

SHOWN_FILES = 8
"""More files than this are counted, not listed."""

_KEYS = {
    "num_tensors": "num_tensors",
    "read_nbytes": "read_nbytes",
    "write_nbytes": "write_nbytes",
    "saved": "saved_nbytes",
    "memory": "memory_nbytes",
    "compared": "checked_elements",
    "checksummed": "checksummed_nbytes",
    "verified": "verified_nbytes",
    "notes": "notes",
    "dropped": "dropped",
    "warnings": "warnings",
}
"""A field of a result, if it has it, and its key in the document."""


def document(done: Done, *, dry_run: bool) -> dict[str, object]:
    """Return what was written as JSON-able data."""
    found: dict[str, object] = {"dry_run": dry_run, "files": [str(path) for path in done.files]}
    for field, key in _KEYS.items():
        if hasattr(done, field):
            value = getattr(done, field)
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def render(done: Done, *, dry_run: bool) -> str:
    """Return what was written as text."""
    verb = "would write" if dry_run else "wrote"
    lines = [f"{verb} {path}" for path in done.files[:SHOWN_FILES]]
    if len(done.files) > SHOWN_FILES:
        lines.append(f"... and {len(done.files) - SHOWN_FILES} more files")
    num_tensors = getattr(done, "num_tensors", None)
    lines.append(
        f"{count(len(done.files), 'file') if num_tensors is None else count(num_tensors, 'tensor')}, "
        f"{size(done.write_nbytes)}; {size(done.read_nbytes)} read, at most {size(done.memory)} of buffers"
    )
    if done.compared:
        lines.append(f"{count(done.compared, 'element')} of masters agree with their weights")
    if done.checksummed:
        lines.append(f"{size(done.checksummed)} of the source agree with the checksums in its files")
    if getattr(done, "verified", 0):
        lines.append(f"{size(getattr(done, 'verified', 0))} compared with the source, byte for byte")
    saved: dict[str, int] | None = getattr(done, "saved", None)
    if saved is not None:
        rows = [*sorted(saved.items(), key=lambda one: -one[1]), ("in all", sum(saved.values()))]
        lines += table(["saved", "bytes"], rows, right=(1,))
    lines += [f"dropped {one}" for one in done.dropped]
    lines += [f"note: {note}" for note in getattr(done, "notes", ())]
    return "\n".join(map(printable, [*lines, *(f"warning: {warning}" for warning in done.warnings)]))
