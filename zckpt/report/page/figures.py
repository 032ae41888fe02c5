"""Figures of a checkpoint's tensors as a page: by layer, by tensor, and as a histogram."""

from __future__ import annotations

from zckpt.report.page.markup import HISTOGRAM, code, facts, name_of, number, page, search, section, verdict
from zckpt.report.text import Document, about, count


def stats_page(document: Document) -> str:
    """Return the page of a checkpoint's figures. `document`: what `zckpt stats --json` prints."""
    source, slots = document["source"], document["slots"]
    odd = [one for one in slots if one["nan"] or one["inf"]]
    words = f"{count(len(odd), 'tensor')} of {len(slots):,} hold NaN or infinite elements."
    said = verdict(False, "Not finite:", words) if odd else verdict(True, "Finite.", "No element is NaN or infinite.")
    head = facts(
        [
            ("Tensors", number(len(slots))),
            ("Elements", number(sum(one["numel"] for one in slots))),
            ("Path", code(source["source"])),
        ],
        broad=("Path",),
    )
    main = (
        section("By layer", '<div id="layers"></div>', identity="layers")
        + section("How large the elements are", HISTOGRAM, identity="histogram")
        + search("tensor")
        + section(
            "Tensors",
            '<div id="tensors"></div><p class="quiet keys">Choose a row, here or above, to see its histogram.</p>',
            identity="tensors",
        )
    )
    data = {"slots": slots, "layers": document["layers"]}
    return page("stats", name_of(source["source"]), about(source), said + head, main, name="figures", data=data)
