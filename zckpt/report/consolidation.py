"""The text and the JSON document of `zckpt consolidate`."""

from __future__ import annotations

from zckpt.operations.consolidate import Consolidated
from zckpt.report.text import count, printable, size


def document(done: Consolidated, *, dry_run: bool) -> dict[str, object]:
    """Return what was done as JSON-able data."""
    return {
        "dry_run": dry_run,
        "files": [str(path) for path in done.files],
        "num_tensors": done.num_tensors,
        "read_nbytes": done.read_nbytes,
        "write_nbytes": done.write_nbytes,
        "memory_nbytes": done.memory,
        "checked_elements": done.compared,
        "checksummed_nbytes": done.checksummed,
        "dropped": list(done.dropped),
        "warnings": list(done.warnings),
    }


def render(done: Consolidated, *, dry_run: bool) -> str:
    """Return what was done as text."""
    verb = "would write" if dry_run else "wrote"
    lines = [f"{verb} {path}" for path in done.files]
    lines.append(
        f"{count(done.num_tensors, 'tensor')}, {size(done.write_nbytes)}; {size(done.read_nbytes)} read, "
        f"at most {size(done.memory)} of buffers"
    )
    if done.compared:
        lines.append(f"{count(done.compared, 'element')} of masters agree with the weights beside them")
    if done.checksummed:
        lines.append(f"{size(done.checksummed)} of the source agree with the checksums in its files")
    lines += [f"dropped {one}" for one in done.dropped]
    return "\n".join(map(printable, [*lines, *(f"warning: {warning}" for warning in done.warnings)]))
