"""What `zckpt diff` found between two checkpoints, or over a series of them, as text; from the JSON documents."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from zckpt.report.text import Document, Paint, about, count, fitted, more, named, printable, size, table

Rows = list[Document]


def render(document: Document, *, width: int, paint: Paint, limit: int) -> str:
    """Return a document as text that fits `width` columns; `paint` colours what it comes to, `limit` bounds tables."""
    document = printable(document)
    lines = [f"{side}  {document[side]['source']}: {about(document[side])}" for side in ("a", "b")]
    compared = document["compared"]
    different = sorted(document["different"], key=lambda one: one["slot"] != "weight")  # then as it is
    listed = partial(_listed, limit=limit)
    what = f"{count(compared['parameters'], 'parameter')}, {count(compared['slots'], 'slot')}, "
    lines.append(f"compared: {what}{count(compared['elements'], 'element')}, {size(compared['nbytes'])} of each")
    for side in ("a", "b"):
        only = document[f"only_in_{side}"]
        names = (f"  {one['name']}" + (f" {one['slot']}" if one["slot"] else "") for one in only[:limit])
        lines += listed(only, f"only in {side}: {len(only):,}", names)
    if different:
        rows = []
        for slot in dict.fromkeys(["weight", *(one["slot"] for one in different)]):
            own, same = ([one for one in some if one["slot"] == slot] for some in (different, document["equal_slots"]))
            known = [one for one in own if one["num_different"] is not None]
            elements = sum(one["num_different"] for one in known), sum(one["numel"] for one in (*known, *same))
            worst = max((float(one["rel_l2"]) for one in known if one["rel_l2"] is not None), default=None)
            share = f"{elements[0] / max(elements[1], 1):.2%}"
            rows.append((slot, len(own), len(same), share, worst and f"{worst:.3g}"))
        header = ("slot", "different", "equal", "elements", "worst rel L2")
        lines += ["", *table(header, [row for row in rows if row[1] or row[2]], right=(1, 2, 3, 4))]
    lines += listed(different, f"different: {count(len(different), 'slot')}", _different(different[:limit], width))
    if document["metadata"]:
        values = ("a", "b")
        rows = [
            (one["key"], *(v if v is None or isinstance(v, str) else repr(v) for v in map(one.get, values)))
            for one in document["metadata"][:limit]
        ]
        first, *rest = (fitted(line, width) for line in table(("setting", *values), rows))
        lines += listed(document["metadata"], first, rest)
    lines += [f"warning: {text}" for text in document["warnings"]]
    kinds = {"different": "slots", "only_in_a": "only in a", "only_in_b": "only in b", "metadata": "settings"}
    counts = {key: (len(document[key]), text) for key, text in kinds.items() if document[key]}
    found = ", ".join(f"{n:,} {text.removesuffix('s') if n == 1 else text}" for n, text in counts.values())
    verdict = "equal" if document["equal"] else f"different: {found}"
    lines += ["", paint(verdict, "good" if document["equal"] else "error")]
    return "\n".join(lines)


def _listed(found: Rows, first: str, lines: Iterable[str], *, limit: int) -> list[str]:
    """Return what is said of all rows, of which there are lines for some."""
    return ["", first, *lines, *more(found, limit)] if found else []


def _different(found: Rows, width: int) -> list[str]:
    header = ("slot", "different", "share", "rel L2", "max abs", "max rel", "cosine", "ULP", "")
    digits = {"rel_l2": ".3g", "max_abs": ".3g", "max_rel": ".3g", "cosine": ".6f"}
    rows = []
    for one in found:
        note = ""
        if one["shape_a"] != one["shape_b"]:
            note = f"shape {one['shape_a']} and {one['shape_b']}"
        elif one["dtype_a"] != one["dtype_b"]:
            note = f"{one['dtype_a']} and {one['dtype_b']}"
        for key, word in (("nan", "NaN"), ("inf", "Inf")):
            if one[f"{key}_a"] or one[f"{key}_b"]:
                note += f" {word} {one[f'{key}_a']:,} and {one[f'{key}_b']:,}"
        share = None if one["num_different"] is None else f"{one['num_different'] / max(one['numel'], 1):.2%}"
        its = (f"{one[key]:{said}}" if isinstance(one[key], float) else one[key] for key, said in digits.items())
        rows.append((one["slot"], one["num_different"], share, *its, one["max_ulp"], note.strip()))
    figures = table(header, rows, right=tuple(range(1, len(header) - 1)))
    names = ["parameter", *(one["name"] for one in found)]
    return [fitted(line, width) for line in named(names, figures, width)]


def render_parting(document: Document, *, limit: int) -> str:
    """Return what is found of two runs as text."""
    document = printable(document)
    by_name: dict[str, list[str]] = {}
    for one in document["changed"]:
        most = "" if one["max_abs"] is None else f" (by at most {one['max_abs']:.3g})"
        by_name.setdefault(one["name"], []).append((one["entry"] or "there in one only") + most)
    said = f"equal at step {document['equal']:,}" if document["equal"] is not None else "equal at no step"
    if document["different"] is not None:
        said += f", different at step {document['different']:,}: {count(len(by_name), 'parameter')}"
    shown = [f"  {name}  {', '.join(entries)}" for name, entries in [*by_name.items()][:limit]]
    alone = [
        f"only in {side}: {count(len(document[f'only_in_{side}']), 'step')}"
        for side in "ab"
        if document[f"only_in_{side}"]
    ]
    common = f"{count(len(document['steps']), 'step')} of both, {document['steps'][0]:,} to {document['steps'][-1]:,}"
    first = [f"a  {document['a']}", f"b  {document['b']}", common, *alone, ""]
    return "\n".join([*first, said, *shown, *more(by_name, limit)])


def render_series(document: Document, *, width: int, limit: int) -> str:
    """Return a document as text that fits `width` columns: the relative change of each slot, step by step."""
    document = printable(document)
    steps = [f"step {step}" if step is not None else f"#{i}" for i, step in enumerate(document["steps"])]
    rows = sorted(
        document["series"], key=lambda one: -max((float(v) for v in one["change"] if v is not None), default=0)
    )
    cells = [
        (one["slot"], *("-" if v is None else f"{float(v):.3g}" for v in one["change"][1:]), one["name"])
        for one in rows[:limit]
    ]
    table_ = table(("slot", *steps[1:], "parameter"), cells, right=tuple(range(1, len(steps))))
    title = "L2 norm of the change since the checkpoint before, relative to the norm there"
    _, *lines = _listed(rows, title, table_, limit=limit)
    first = f"{len(document['sources'])} checkpoints, from {document['sources'][0]['source']}"
    return "\n".join(fitted(line, width) for line in [first, *lines])
