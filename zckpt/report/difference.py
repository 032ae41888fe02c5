"""What `zckpt diff` found between two checkpoints, or over a series of them, as text; from the JSON documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zckpt.errors import shortened
from zckpt.report.text import count, fitted, printable, size, table

SHOWN_ROWS = 40
"""Rows of a table of the text; `--json` has all."""

NAME_WIDTH = 20
"""A name is not cut to less than this, however narrow the terminal is."""

Paint = Callable[[str, str], str]
"""Return a text in the colour of what it means: `good`, `error`."""

Rows = list[dict[str, Any]]


def render(document: dict[str, Any], *, width: int, paint: Paint | None = None) -> str:
    """Return a document as text that fits `width` columns; `paint` colours what it comes to."""
    document = printable(document)
    lines = [f"{side}  {_about(document[side])}" for side in ("a", "b")]
    compared = document["compared"]
    what = f"{count(compared['parameters'], 'parameter')}, {count(compared['slots'], 'slot')}, "
    lines.append(f"compared: {what}{count(compared['elements'], 'element')}, {size(compared['nbytes'])} of each")
    for side in ("a", "b"):
        lines += _only(document[f"only_in_{side}"], side)
    lines += _different(document["different"], width)
    lines += _metadata(document["metadata"], width)
    lines += [f"warning: {text}" for text in document["warnings"]]
    verdict = _verdict(document)
    lines += ["", verdict if paint is None else paint(verdict, "good" if document["equal"] else "error")]
    return "\n".join(lines)


def _about(one: dict[str, Any]) -> str:
    stage = "" if one["zero_stage"] is None else f", ZeRO stage {one['zero_stage']}"
    step = "" if one["step"] is None else f", step {one['step']}"
    return f"{one['source']}: {one['format']}{stage}, {count(one['world_size'], 'rank')}{step}"


def _only(found: Rows, side: str) -> list[str]:
    if not found:
        return []
    lines = ["", f"only in {side}: {len(found):,}"]
    lines += [f"  {one['name']}" + (f" {one['slot']}" if one["slot"] else "") for one in found[:SHOWN_ROWS]]
    return lines + _more(len(found))


def _different(found: Rows, width: int) -> list[str]:
    if not found:
        return []
    header = ("slot", "different", "share", "rel L2", "max abs", "max rel", "cosine", "ULP", "")
    rows = [_row(one) for one in found[:SHOWN_ROWS]]
    figures = table(header, rows, right=tuple(range(1, len(header) - 1)))
    names = ["parameter", *(one["name"] for one in found[:SHOWN_ROWS])]
    room = max(min(max(map(len, names)), width - max(map(len, figures)) - 2), NAME_WIDTH)
    lines = [f"{shortened(name, room):<{room}}  {line}" for name, line in zip(names, figures, strict=True)]
    return [
        "",
        f"different: {count(len(found), 'slot')}",
        *(fitted(line, width) for line in lines),
        *_more(len(found)),
    ]


def _row(one: dict[str, Any]) -> tuple[object, ...]:
    note = ""
    if one["shape_a"] != one["shape_b"]:
        note = f"shape {one['shape_a']} and {one['shape_b']}"
    elif one["dtype_a"] != one["dtype_b"]:
        note = f"{one['dtype_a']} and {one['dtype_b']}"
    for key, word in (("nan", "NaN"), ("inf", "Inf")):
        if one[f"{key}_a"] or one[f"{key}_b"]:
            note += f" {word} {one[f'{key}_a']:,} and {one[f'{key}_b']:,}"
    share = None if one["num_different"] is None else f"{one['num_different'] / max(one['numel'], 1):.2%}"
    figures = (_short(one[key]) for key in ("rel_l2", "max_abs", "max_rel"))
    cosine = one["cosine"]
    cosine = f"{cosine:.6f}" if isinstance(cosine, float) else cosine
    return (one["slot"], one["num_different"], share, *figures, cosine, one["max_ulp"], note.strip())


def _short(value: object) -> object:
    return f"{value:.3g}" if isinstance(value, float) else value


def _metadata(found: Rows, width: int) -> list[str]:
    if not found:
        return []
    rows = [(one["key"], _value(one["a"]), _value(one["b"])) for one in found[:SHOWN_ROWS]]
    lines = [fitted(line, width) for line in table(("setting", "a", "b"), rows)]
    return ["", *lines, *_more(len(found))]


def _value(value: object) -> object:
    return value if value is None or isinstance(value, str) else repr(value)


def _more(total: int) -> list[str]:
    return [f"  and {total - SHOWN_ROWS:,} more; --json lists all"] if total > SHOWN_ROWS else []


def _verdict(document: dict[str, Any]) -> str:
    if document["equal"]:
        return "equal"
    words = [
        f"{len(document[key]):,} {text}"
        for key, text in (
            ("different", "slots"),
            ("only_in_a", "only in a"),
            ("only_in_b", "only in b"),
            ("metadata", "settings"),
        )
        if document[key]
    ]
    return "different: " + ", ".join(words)


def render_series(document: dict[str, Any], *, width: int) -> str:
    """Return a document as text that fits `width` columns: the relative change of each slot, step by step."""
    document = printable(document)
    steps = [f"step {step}" if step is not None else f"#{i}" for i, step in enumerate(document["steps"])]
    rows = sorted(document["series"], key=lambda one: -max(map(_height, one["change"]), default=0.0))
    cells = [(one["slot"], *map(_figure, one["change"][1:]), one["name"]) for one in rows[:SHOWN_ROWS]]
    lines = [f"{len(document['sources'])} checkpoints, from {document['sources'][0]['source']}"]
    lines.append("L2 norm of the change since the checkpoint before, relative to the norm there")
    lines += table(("slot", *steps[1:], "parameter"), cells, right=tuple(range(1, len(steps))))
    if len(rows) > SHOWN_ROWS:
        lines.append(f"  and {len(rows) - SHOWN_ROWS:,} more; --json lists all")
    return "\n".join(fitted(line, width) for line in lines)


def _height(value: object) -> float:
    return float(value) if isinstance(value, (int, float, str)) else 0.0


def _figure(value: object) -> str:
    return "-" if value is None else f"{float(str(value)):.3g}"
