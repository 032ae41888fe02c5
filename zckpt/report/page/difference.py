"""The pages of `zckpt diff --html`: of two checkpoints, and of a series of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.report.page.inspection import described, footer, header
from zckpt.report.page.markup import (
    details,
    facts,
    items,
    name_of,
    nbytes,
    number,
    page,
    search,
    section,
    table,
    text,
)
from zckpt.report.text import count


def diff_page(document: Mapping[str, Any]) -> str:
    """Return the page of a diff. `document`: what `zckpt diff --json` prints."""
    a, b = document["a"], document["b"]
    title = f"{name_of(a['source'])} and {name_of(b['source'])}"
    body = (
        header(title, "What differs between two checkpoints", _verdict(document) + _facts(document))
        + '<main id="main">'
        + items(document.get("warnings", ()), kind="warnings")
        + _only(document)
        + _different(document)
        + _equal(document["equal_slots"])
        + section("Metadata", _metadata(document["metadata"]), identity="metadata")
        + "</main>"
        + footer()
    )
    different = document["different"]
    data = {"different": different, "equal_slots": document["equal_slots"]}
    return page("diff", title=f"{title}: diff", body=body, data=data)


def _verdict(document: Mapping[str, Any]) -> str:
    if document["equal"]:
        return '<p class="verdict good"><strong>Equal.</strong> Nothing that was compared differs.</p>'
    alone = len(document["only_in_a"]) + len(document["only_in_b"])
    counts = [
        (len(document["different"]), "tensor", "changed"),
        (alone, "tensor", "on one side only"),
        (len(document["metadata"]), "metadata value", "changed"),
    ]
    words = [f"{count(n, noun)} {what}" for n, noun, what in counts if n]
    return f'<p class="verdict bad"><strong>Different:</strong> {", ".join(words)}.</p>'


def _facts(document: Mapping[str, Any]) -> str:
    compared = document["compared"]
    sides = [(f"{side.upper()}", _side(document[side])) for side in ("a", "b")]
    return facts(
        [
            *sides,
            ("Parameters compared", number(compared.get("parameters"))),
            ("Tensors compared", number(compared.get("slots"))),
            ("Elements", number(compared.get("elements"))),
            ("Bytes", nbytes(compared.get("nbytes"))),
        ],
        broad=("A", "B"),
    )


def _side(about: Mapping[str, Any]) -> str:
    return f'<code>{text(about["source"])}</code> <span class="quiet">{text(described(about))}</span>'


def _only(document: Mapping[str, Any]) -> str:
    found_only = ""
    for side in ("a", "b"):
        found = document[f"only_in_{side}"]
        if found:
            rows = [(text(one["name"]), text(one["slot"] or "the whole parameter")) for one in found]
            shown = table(f"Only in {side.upper()}", ("Name", "Slot"), rows)
            found_only += details(f"Only in {side.upper()} ({len(found):,})", shown)
    return section("On one side only", found_only, identity="only")


def _different(document: Mapping[str, Any]) -> str:
    if not document["different"]:
        return ""
    return (
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


def _equal(slots: Sequence[Mapping[str, Any]]) -> str:
    if not slots:
        return section("Equal", "<p>No tensor is equal on both sides.</p>", identity="equal")
    return section("Equal", details(f"{count(len(slots), 'tensor')}", '<div id="equal"></div>'), identity="equal")


def _metadata(changes: Sequence[Mapping[str, Any]]) -> str:
    rows = [(f"<code>{text(one['key'])}</code>", _value(one["a"]), _value(one["b"])) for one in changes]
    return table("Metadata that differs", ("Key", "A", "B"), rows) if rows else ""


def _value(value: object) -> str:
    return '<span class="quiet">not there</span>' if value is None else text(value)


def series_page(document: Mapping[str, Any]) -> str:
    """Return the page of a series. `document`: what `zckpt diff --series --json` prints."""
    sources, steps = document["sources"], document["steps"]
    first, last = name_of(sources[0]["source"]), name_of(sources[-1]["source"])
    rows = [(f"<code>{text(one['source'])}</code>", text(described(one))) for one in sources]
    listed = table("Checkpoints", ("Checkpoint", "What it is"), rows)
    subtitle = f"{count(len(sources), 'checkpoint')} of a run, {count(len(document['series']), 'tensor')}"
    body = (
        header(f"{first} to {last}", subtitle, "")
        + f'<main id="main">{search("tensor")}'
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
        + "</main>"
        + footer()
    )
    data = {"labels": _labels(sources, steps), "series": document["series"]}
    return page("series", title=f"{first} to {last}: series", body=body, data=data)


def _labels(sources: Sequence[Mapping[str, Any]], steps: Sequence[int | None]) -> list[str]:
    return [
        name_of(source["source"]) if step is None else f"step {step:,}"
        for source, step in zip(sources, steps, strict=True)
    ]
