"""What `pack`, `unpack`, `patch` and `apply` did, as text, from their documents."""

from __future__ import annotations

from zckpt.errors import listed
from zckpt.report.text import Document, count, size, table

SHOWN_DIFFERENCES = 6


def packed(document: Document) -> str:
    """Return the document of `pack` as text."""
    what = f"{count(len(document['packed']), 'checkpoint')}, {size(document['nbytes'])},"
    if document["dry_run"]:
        would = [(one["name"], size(one["nbytes"])) for one in document["packed"]]
        lines = table(["checkpoint", "size"], would, right=(1,)) if would else []
        return "\n".join([*lines, f"would pack {what}"])
    rows = [
        (one["name"], size(one["nbytes"]), size(one["stored_nbytes"]), share(one["stored_nbytes"], one["nbytes"]))
        for one in document["packed"]
    ]
    lines = table(["checkpoint", "size", "packed", ""], rows, right=(1, 2, 3)) if rows else []
    kept = document["stored_nbytes"], document["nbytes"]
    total = f"packed {what} into {size(kept[0])} ({share(*kept)})" if rows else "nothing to pack"
    return "\n".join([*document["notes"], *lines, total])


def unpacked(document: Document) -> str:
    """Return the document of `unpack` as text."""
    done = "would write" if document["dry_run"] else "wrote"
    return f"{done} {count(document['files'], 'file')}, {size(document['nbytes'])}, to {document['target']}"


def patched(document: Document) -> str:
    """Return the document of `patch` as text."""
    kept = document["stored_nbytes"], document["nbytes"]
    some = listed(document["differences"], most=SHOWN_DIFFERENCES)
    differ = f"{count(document['changed'], 'tensor')} changed, {document['equal']} equal"
    done = f"wrote {document['target']}: {size(kept[0])} for {size(kept[1])} ({share(*kept)})"
    if document["dry_run"]:
        done = f"would write {document['target']}, which makes {size(kept[1])}"
    return "\n".join([done, f"{differ}: {some}" if some else differ])


def share(part: int, whole: int) -> str:
    """Return what part of a whole something is."""
    return f"{part / whole:.1%}" if whole else "-"
