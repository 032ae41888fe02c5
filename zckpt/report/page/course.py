"""The page of `zckpt diff --series --html`: how parameters moved over the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.report.page.inspection import described, footer, header
from zckpt.report.page.markup import details, name_of, search, section, table, text
from zckpt.report.page.shell import page
from zckpt.report.text import count


def series_page(document: Mapping[str, Any]) -> str:
    """Return the page of a series.

    Parameters
    ----------
    document : dict
        What `zckpt diff --series --json` prints.
    """
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
