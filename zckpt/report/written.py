"""The text of what a verb wrote, from its document."""

from __future__ import annotations

from typing import Any

from zckpt.report.text import count, printable, size, table

SHOWN_FILES = 8
"""More files than this are counted, not listed."""


def render(document: dict[str, Any]) -> str:
    """Return the document of a result, `Written.as_dict()`, as text."""
    verb, files = "would write" if document["dry_run"] else "wrote", document["files"]
    lines = [f"{verb} {path}" for path in files[:SHOWN_FILES]]
    if len(files) > SHOWN_FILES:
        lines.append(f"... and {len(files) - SHOWN_FILES} more files")
    what = count(document["num_tensors"], "tensor") if "num_tensors" in document else count(len(files), "file")
    lines.append(
        f"{what}, {size(document['write_nbytes'])}; {size(document['read_nbytes'])} read, "
        f"at most {size(document['memory_nbytes'])} of buffers"
    )
    if document["checked_elements"]:
        lines.append(f"{count(document['checked_elements'], 'element')} of masters agree with their weights")
    if document["checksummed_nbytes"]:
        lines.append(f"{size(document['checksummed_nbytes'])} of the source agree with the checksums in its files")
    if document["verified_nbytes"]:
        lines.append(f"{size(document['verified_nbytes'])} compared with the source, byte for byte")
    if "saved_nbytes" in document:
        saved = document["saved_nbytes"]
        rows = sorted(saved.items(), key=lambda one: -one[1])
        lines += table(["saved", "bytes"], [*rows, ("in all", sum(saved.values()))], right=(1,))
    lines += [f"dropped {one}" for one in document["dropped"]]
    lines += [f"note: {note}" for note in document["notes"]]
    return "\n".join(map(printable, [*lines, *(f"warning: {warning}" for warning in document["warnings"])]))
