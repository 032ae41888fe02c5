"""The pages of `zckpt diff --html`: of two checkpoints, and of a series of them."""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.report.page.markup import (
    code,
    details,
    facts,
    items,
    name_of,
    nbytes,
    number,
    page,
    quiet,
    search,
    section,
    table,
    text,
    verdict,
)
from zckpt.report.text import Document, about, count

DIFFERENT = (
    '<div class="columns">'
    + section("Change by layer", '<div id="heat"></div>', identity="heat")
    + section(
        "How large the differences are",
        '<div id="histogram" aria-live="polite"></div>'
        '<p><button type="button" class="plain-button" id="histogram-all">All tensors</button></p>',
        identity="histogram",
    )
    + "</div>"
    + search("tensor")
    + section(
        "Tensors that differ",
        '<div id="different"></div><p class="quiet keys">Choose a row to see its histogram.</p>',
        identity="different",
    )
)
"""What scripts fill, where tensors differ."""


def diff_page(document: Document) -> str:
    """Return the page of a diff. `document`: what `zckpt diff --json` prints."""
    a, b = document["a"], document["b"]
    different, equal, metadata = document["different"], document["equal_slots"], document["metadata"]
    only = {side.upper(): document[f"only_in_{side}"] for side in ("a", "b")}
    counts = [
        (len(different), "tensor", "changed"),
        (sum(map(len, only.values())), "tensor", "on one side only"),
        (len(metadata), "metadata value", "changed"),
    ]
    words = ", ".join(f"{count(n, noun)} {what}" for n, noun, what in counts if n)
    said = (
        verdict(True, "Equal.", "Nothing that was compared differs.")
        if document["equal"]
        else verdict(False, "Different:", f"{words}.")
    )
    compared = document["compared"]
    head = facts(
        [
            *((side, f"{code(one['source'])} {quiet(about(one))}") for side, one in (("A", a), ("B", b))),
            ("Parameters compared", number(compared.get("parameters"))),
            ("Tensors compared", number(compared.get("slots"))),
            ("Elements", number(compared.get("elements"))),
            ("Bytes", nbytes(compared.get("nbytes"))),
        ],
        broad=("A", "B"),
    )
    alone = "".join(
        details(f"Only in {side} ({len(found):,})", table(f"Only in {side}", ("Name", "Slot"), (
            (text(one["name"]), text(one["slot"] or "the whole parameter")) for one in found
        )))
        for side, found in only.items() if found
    )  # fmt: skip
    same = details(count(len(equal), "tensor"), '<div id="equal"></div>')
    rows = [
        (code(one["key"]), *(quiet("not there") if one[side] is None else text(one[side]) for side in ("a", "b")))
        for one in metadata
    ]
    changed = table("Metadata that differs", ("Key", "A", "B"), rows) if rows else ""
    main = (
        items(document.get("warnings", ()), kind="warnings")
        + section("On one side only", alone, identity="only")
        + (DIFFERENT if different else "")
        + section("Equal", same if equal else "<p>No tensor is equal on both sides.</p>", identity="equal")
        + section("Metadata", changed, identity="metadata")
    )
    title = f"{name_of(a['source'])} and {name_of(b['source'])}"
    data = {"different": different, "equal_slots": equal}
    return page("diff", title, "What differs between two checkpoints", said + head, main, name="diff", data=data)


def series_page(document: Document) -> str:
    """Return the page of a series. `document`: what `zckpt diff --series --json` prints."""
    sources: Sequence[Document] = document["sources"]
    rows = [(code(one["source"]), text(about(one))) for one in sources]
    listed = table("Checkpoints", ("Checkpoint", "What it is"), rows)
    main = (
        search("tensor")
        + section(
            "Curves",
            '<ul class="lines" id="lines" aria-label="Lines drawn"></ul><div class="columns even">'
            '<div id="change"></div><div id="norm"></div></div>',
            identity="curves",
        )
        + section(
            "Tensors",
            '<p class="quiet keys">Choose rows to draw them or take them away. '
            '<button type="button" class="plain-button" id="lines-none">Draw none</button> '
            '<output id="lines-answer" aria-live="polite"></output></p><div id="moved"></div>',
            identity="moved",
        )
        + section("Checkpoints", details(f"All {len(sources)}", listed), identity="sources")
    )
    names = [name_of(one["source"]) for one in sources]
    steps = zip(names, document["steps"], strict=True)
    labels = [name if step is None else f"step {step:,}" for name, step in steps]
    subtitle = f"{count(len(sources), 'checkpoint')} of a run, {count(len(document['series']), 'tensor')}"
    data = {"labels": labels, "series": document["series"]}
    return page("series", f"{names[0]} to {names[-1]}", subtitle, "", main, name="series", data=data)
