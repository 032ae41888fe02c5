"""The history of a run as text, from the documents of `list` and `prune`."""

from __future__ import annotations

from zckpt.report.text import Document, count, printable, size, table, when


def render(document: Document) -> str:
    """Return the document of `list` as text."""
    document = printable(document)
    every = document["checkpoints"]
    rows = [(*cells(one), "sound" if one["sound"] else "not sound", "; ".join(remarks(one))) for one in every]
    header = ["checkpoint", "step", "saved (UTC)", "size", "format", "ranks", "", ""]
    total = f"{count(len(every), 'checkpoint')}, {size(document['nbytes'])}"
    return "\n".join([*table(header, rows, right=(1, 3, 5)), total, *left(document)])


def render_pruned(document: Document) -> str:
    """Return the document of `prune` as text."""
    document = printable(document)
    every, done = document["checkpoints"], document["deleted"]
    words = ("stays", "gone" if done else "goes")
    rows = [(*cells(one)[:4], words[one["goes"]], one["because"]) for one in every]
    number = count(sum(one["goes"] for one in every), "checkpoint")
    total = f"{'freed' if done else 'would free'} {size(document['freed_nbytes'])} of {number}"
    advice = [] if done or not document["freed_nbytes"] else ["nothing was removed: give --delete"]
    failed = [f"cannot be removed: {one}" for one in document["failed"]]
    lines = table(["checkpoint", "step", "saved (UTC)", "size", "", ""], rows, right=(1, 3))
    return "\n".join([*lines, total, *advice, *failed, *left(document)])


def cells(one: Document) -> tuple[object, ...]:
    """Return what a table says of a checkpoint: its name, step, date, size, format and ranks."""
    step = None if one["step"] is None else f"{one['step']:,}"
    return one["name"], step, when(one["saved"]), size(one["nbytes"]), one["format"], one["world_size"]


def left(document: Document) -> list[str]:
    """Return lines of what interrupted writes and removals have left."""
    return [f"left by an interruption, or being written: {one}" for one in document["leftovers"]]


def remarks(one: Document) -> list[str]:
    """Return what is to be said of a checkpoint: whether it is the latest, which are its equals, what is wrong."""
    equal = [f"equal to {', '.join(one['equal'])}"] if one["equal"] else []
    links = [] if one["latest"] or not one["named_by"] else [f"linked by {', '.join(one['named_by'])}"]
    return [*(["latest"] if one["latest"] else links), *equal, *([one["why"]] if one["why"] else [])]
