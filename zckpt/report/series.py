"""How slots moved over several checkpoints, as a JSON document and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.report.difference import about, number
from zckpt.report.text import fitted, printable, table

if TYPE_CHECKING:
    from zckpt.operations.series import Series

SHOWN_ROWS = 40
"""Rows of the text, of those that moved most; `--json` has all."""


def document(done: Series) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "sources": [about(one) for one in done.checkpoints],
        "steps": [one.step for one in done.checkpoints],
        "series": [
            {
                "name": one.name,
                "slot": one.slot,
                "norm": [number(value) for value in one.norm],
                "change": [number(value) for value in one.change],
            }
            for one in done.moved
        ],
    }


def render(document: dict[str, Any], *, width: int) -> str:
    """Return a document as text that fits `width` columns: the relative change of each slot, step by step."""
    document = printable(document)
    steps = [f"step {step}" if step is not None else f"#{i}" for i, step in enumerate(document["steps"])]
    rows = sorted(document["series"], key=lambda one: -max(map(_height, one["change"]), default=0.0))
    cells = [(one["slot"], *map(_short, one["change"][1:]), one["name"]) for one in rows[:SHOWN_ROWS]]
    lines = [f"{len(document['sources'])} checkpoints, from {document['sources'][0]['source']}"]
    lines.append("L2 norm of the change since the checkpoint before, relative to the norm there")
    lines += table(("slot", *steps[1:], "parameter"), cells, right=tuple(range(1, len(steps))))
    if len(rows) > SHOWN_ROWS:
        lines.append(f"  and {len(rows) - SHOWN_ROWS:,} more; --json lists all")
    return "\n".join(fitted(line, width) for line in lines)


def _height(value: object) -> float:
    return float(value) if isinstance(value, (int, float, str)) else 0.0


def _short(value: object) -> str:
    return "-" if value is None else f"{float(str(value)):.3g}"
