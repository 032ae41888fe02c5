"""The history of a run as a page: a picture of what was saved when, and a table of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import PurePosixPath

from zckpt.report.page.markup import code, facts, items, name_of, nbytes, number, page, section, table, text, verdict
from zckpt.report.reports import remarks
from zckpt.report.text import Document, count, size, when
from zckpt.state import are_distinct

WIDTH, HEIGHT, TOP, LABEL = 1000, 96, 8, 22
"""Of a picture, in units of its own: all of it, its bars, what is free above them, and the line of text below."""

LEAST_BAR, MOST_BAR = 2, 28

KINDS = {"sound": "sound", "bad": "not sound", "latest": "latest"}


def history_page(document: Document) -> str:
    """Return the page of a run. `document`: what `zckpt list --json` prints."""
    every = document["checkpoints"]
    bad = [one for one in every if not one["sound"]]
    words = text(f"{count(len(bad), 'checkpoint')} of {len(every):,}.")
    said = verdict(not bad, ("Sound.", "No error was found in any checkpoint."), ("Not sound:", words))
    head = facts(
        [
            ("Checkpoints", number(len(every))),
            ("Size", nbytes(document["nbytes"])),
            ("Latest", ", ".join(code(one["name"]) for one in every if one["latest"])),
            ("Path", code(document["run"])),
        ],
        broad=("Path",),
    )
    drawn = "".join(
        f"<h3>{code(place)}</h3>{_picture(place, list(some))}"
        for place, some in groupby(every, key=lambda one: str(PurePosixPath(one["name"]).parent))
    )
    kinds = ", ".join(f'<span class="bar-{kind}">{words}</span>' for kind, words in KINDS.items())
    legend = f'<p class="quiet">A bar is a checkpoint, as high as its files are large: {kinds}.</p>'
    header = ("Checkpoint", "Step", "Saved (UTC)", "Size", "Format", "Ranks", "State")
    rows = []
    for one in every:
        badge = "" if one["sound"] else '<span class="badge error">not sound</span>'
        rows.append(
            (
                code(one["name"]),
                number(one["step"]),
                text(when(one["saved"])),
                nbytes(one["nbytes"]),
                text(one["format"] or ""),
                number(one["world_size"]),
                badge + text("; ".join([*(["sound"] if one["sound"] else []), *remarks(one)])),
            )
        )
    main = (
        section("What was saved when", drawn + legend, identity="history")
        + section("Checkpoints", table("Checkpoints", header, rows, right=(1, 3, 5)))
        + section("Left by interruptions", items(document["leftovers"]), identity="left")
    )
    subtitle = f"{count(len(every), 'checkpoint')}, {size(document['nbytes'])}"
    return page("history", name_of(document["run"]), subtitle, said + head, main, name="history", data={})


def _picture(place: str, every: Sequence[Document]) -> str:
    """Return the checkpoints of one directory as bars: along the steps if all have one, else side by side."""
    steps = [one["step"] for one in every]
    at = steps if None not in steps and are_distinct(steps) else [*range(len(every))]
    low, span = min(at), max(max(at) - min(at), 1)
    gaps = [b - a for a, b in zip(sorted(at), sorted(at)[1:], strict=False)] or [span]
    wide = min(max(0.8 * min(gaps) * (WIDTH - MOST_BAR) / span, LEAST_BAR), MOST_BAR)
    largest = max(one["nbytes"] for one in every) or 1
    bars = ""
    for where, one in zip(at, every, strict=True):
        high = max(HEIGHT * one["nbytes"] / largest, LEAST_BAR)
        x = MOST_BAR / 2 + (where - low) * (WIDTH - MOST_BAR) / span - wide / 2
        kind = "bad" if not one["sound"] else "latest" if one["latest"] else "sound"
        what = "sound" if one["sound"] else f"not sound: {one['why']}"
        said = f"{one['name']}, {when(one['saved'])}, {size(one['nbytes'])}, {what}"
        bars += (
            f'<rect class="bar-{kind}" x="{x:.1f}" y="{TOP + HEIGHT - high:.1f}" width="{wide:.1f}" '
            f'height="{high:.1f}"><title>{text(said)}</title></rect>'
        )
    ends = [f"step {step:,}" if at is steps else str(every[i]["name"]) for i, step in ((0, at[0]), (-1, at[-1]))]
    labels = f'<text x="0" y="{TOP + HEIGHT + LABEL - 6}">{text(ends[0])}</text>'
    if len(every) > 1:
        labels += f'<text class="end" x="{WIDTH}" y="{TOP + HEIGHT + LABEL - 6}">{text(ends[1])}</text>'
    about = f"{count(len(every), 'checkpoint')} in {place}, {ends[0]} to {ends[1]}, at most {size(largest)}"
    return (
        f'<svg class="bars" viewBox="0 0 {WIDTH} {TOP + HEIGHT + LABEL}" role="img" aria-label="{text(about)}">'
        f'<line x1="0" x2="{WIDTH}" y1="{TOP + HEIGHT}" y2="{TOP + HEIGHT}"/>{bars}{labels}</svg>'
    )
