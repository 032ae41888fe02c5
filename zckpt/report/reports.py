"""What verbs found or did, as text, from their JSON documents; of `scan` also SARIF 2.1.0, which other tools show."""

from __future__ import annotations

import csv
import io
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from zckpt.errors import listed
from zckpt.formats.registry import find_format
from zckpt.report.text import (
    Document,
    Paint,
    about,
    count,
    elements,
    fitted,
    more,
    named,
    printable,
    size,
    table,
    when,
    with_warnings,
)
from zckpt.state import by_key, without
from zckpt.torchfile.grades import DATA, GRADES, KNOWN, grade
from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt.operations.show import Elements

SHOWN_RANKS = 8
"""Ranks of which the padding is listed; more are added up."""

SHOWN_LEFT_OUT = 8
"""Things left out that are listed without `--files`."""


def render_inspection(document: Document, *, parameters: bool, files: bool, with_globals: bool) -> str:
    """Return the document as text.

    `document`: from `zckpt.inspect`; `parameters`, `files`, `with_globals`: also list every parameter, file, and
    global.
    """
    slots = [
        (name, "/".join(slot["dtypes"]), slot["num_parameters"], slot["num_elements"], size(slot["nbytes"]))
        for name, slot in document["slots"].items()
    ]
    lines = [*_heading(document), ""]
    lines += table(("slot", "dtype", "parameters", "elements", "size"), slots, right=(2, 3, 4))
    lines += _groups(document["param_groups"])
    lines += _beside(document["per_rank"], document["padding"])
    if parameters:
        listed = []
        for kind, own in (("parameters", ""), ("buffers", "buffer"), ("unnamed", "no name")):
            for one in document[kind]:
                note = f"tied to {one['tied_to']}" if one["tied_to"] else "frozen" if one["frozen"] else own
                shape = "x".join(map(str, one["shape"])) or "scalar"
                listed.append((one["name"], shape, one["dtype"], one["group"], ", ".join(one["slots"]), note))
        lines += ["", *table(("parameter", "shape", "dtype", "group", "slots", ""), listed, right=(3,))]
    if files or with_globals:
        sizes = ("nbytes", "tensor_nbytes", "unreferenced_nbytes")
        rows = [
            (Path(one["path"]).name, one["role"], one["dp_rank"], one["mp_rank"], *(size(one[key]) for key in sizes))
            for one in document["files"]
        ]
        header = ("file", "role", "dp", "mp", "size", "tensors", "unused")
        lines += ["", *table(header, rows, right=(2, 3, 4, 5, 6))]
    if with_globals:
        lines += ["", *(
            f"{Path(one['path']).name}  {record}  {name}  {grade(*name.rpartition('.')[::2])[0]}"
            for one in document["files"] for record, names in one.get("globals", {}).items() for name in names
        )]  # fmt: skip
    if files and "inventory" in document:
        items = [
            (one["fate"], one["kind"], _name(one) + (f" and {one['count'] - 1} more" if one["count"] > 1 else ""),
             size(one["nbytes"]), one["about"])
            for one in document["inventory"]["items"]
        ]  # fmt: skip
        lines += ["", *table(("fate", "kind", "what", "size", "as"), items, right=(3,))]
    left = document["left_out"]
    lines += [f"left out: {_name(one)} ({one['about']})" for one in left[:SHOWN_LEFT_OUT]]
    if len(left) > SHOWN_LEFT_OUT:
        lines.append(f"left out: {len(left) - SHOWN_LEFT_OUT} more; --files lists them")
    lines += map(elements, document["missing"], repeat("missing"))
    return with_warnings(lines, document["warnings"])


def render_several(documents: Sequence[Document]) -> str:
    """Return a table of several documents, with a line for each."""
    rows = [
        (one["source"], one["format"], one["zero_stage"], one["world_size"], one["step"], one["num_parameters"],
         one["num_elements"], ", ".join(one["slots"]), size(one["nbytes"]), _saved(one))
        for one in documents
    ]  # fmt: skip
    header = ("source", "format", "stage", "ranks", "step", "parameters", "elements", "slots", "size", "saved")
    warnings = [f"{one['source']}: {warning}" for one in documents for warning in one["warnings"]]
    return with_warnings(table(header, rows, right=(2, 3, 4, 5, 6, 8)), warnings)


def _saved(document: Document) -> str | None:
    return document["saved"] and f"{when(document['saved'])} UTC"


def _name(item: Document) -> str:
    return f"{item['file']}:{item['place']}" if item["place"] else item["file"]


def _heading(document: Document) -> list[str]:
    def listed(values: Document) -> str:
        said = {True: "yes", False: "no"}
        words = ((key, said[value] if isinstance(value, bool) else value) for key, value in values.items())
        return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in words)

    degrees = " ".join(f"{key}={value}" for key, value in document["topology"].items() if value > 1)
    ranks = count(document["world_size"], "rank")
    version = f" {document['format_version']}" if document["format_version"] else ""
    trainable = f" ({document['num_trainable_elements']:,} trainable)" if document["num_frozen"] else ""
    stage = "" if document["zero_stage"] is None else f", ZeRO stage {document['zero_stage']}"
    facts = [
        ("source", document["source"]),
        ("format", f"{document['format']}{version}{stage}"),
        ("details", listed(without(document["details"], "origin"))),
        ("origin", listed(document["details"].get("origin", {}))),
        ("topology", f"{degrees} ({ranks})" if degrees else ranks),
        ("step", document["step"]),
        ("saved", _saved(document)),
        ("loss scale", document["loss_scale"]),
        (
            "model",
            f"{count(document['num_parameters'], 'parameter')}, {count(document['num_elements'], 'element')}"
            f"{trainable}, "
            f"{document['num_frozen']} frozen, {document['num_tied']} tied, "
            f"{count(document['num_buffers'], 'buffer')}",
        ),
        (
            "files",
            f"{count(len(document['files']), 'file')}, {size(document['nbytes'])}, "
            f"{size(document['unreferenced_nbytes'])} in storages that no tensor uses",
        ),
        ("also holds", ", ".join(document["metadata"])),
    ]
    return [f"{name:<11} {value}" for name, value in facts if value not in (None, "")]


def _groups(groups: list[Document]) -> list[str]:
    def listed(values: Document) -> str:
        texts = {k: f"({', '.join(map(str, v))})" if isinstance(v, list) else str(v) for k, v in values.items()}
        return " ".join(f"{k}={v if len(v) <= 40 else f'{v[:37]}...'}" for k, v in texts.items())

    lines = []
    for index, group in enumerate(groups):
        own, of = ("state", "parameters", "optimizer"), group.get("optimizer")
        values = listed({k: v for k, v in group.items() if k not in own and v is not None and v is not False})
        lines.append(
            f"group {index}{f' of {of}' if of else ''}: {count(len(group['parameters']), 'parameter')}; "
            f"{values or '(no hyperparameters)'}" + (f"; state {listed(group['state'])}" if group["state"] else "")
        )
    return ["", *lines] if lines else []


def _beside(per_rank: list[Document], padding: Document) -> list[str]:
    """Name the state that each rank has of its own, and where it is; and padding."""
    lines = []
    if per_rank:
        keys = ", ".join(dict.fromkeys(one["key"] for one in per_rank))
        ranks = len({(one["mp_rank"], one["rank"]) for one in per_rank})
        where = sorted({one["group"] for one in per_rank})
        groups = f"{'group' if len(where) == 1 else 'groups'} {', '.join(map(str, where))}"
        lines += ["", f"each rank's own: {keys} ({count(len(per_rank), 'value')} on {count(ranks, 'rank')}, {groups}); "
                      "cannot be cut for other ranks"]  # fmt: skip
    padded = [f"rank {one['rank']}: {one['num_elements']:,}" for one in padding["ranks"] if one["num_elements"]]
    if padded:
        more = f" and {len(padded) - SHOWN_RANKS} more ranks" if len(padded) > SHOWN_RANKS else ""
        shown = f"({', '.join(padded[:SHOWN_RANKS])}{more})"
        lines += ["", f"padding: {count(padding['num_elements'], 'element')}, {size(padding['nbytes'])} {shown}"]
    return lines


Rows = list[Document]


def render_difference(document: Document, *, width: int, paint: Paint, limit: int) -> str:
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
    by_name = by_key(
        (
            one["name"],
            (one["entry"] or "there in one only")
            + ("" if one["max_abs"] is None else f" (by at most {one['max_abs']:.3g})"),
        )
        for one in document["changed"]
    )
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


COLUMNS = ("numel", "min", "max", "mean", "std", "norm", "zeros", "nan", "inf")

PRECISION = 6


def render_figures(document: Document, *, layers: bool, width: int) -> str:
    """Return the document of `stats` as text; names are cut to what `width` columns leave, and figures are not."""
    document = printable(document)
    rows = document["layers" if layers else "slots"]
    cells = [(one["slot"], one["dtype"], *(f"{v:.4g}" if isinstance(v, float) else v for v in map(one.get, COLUMNS)))
             for one in rows]  # fmt: skip
    figures = table(("slot", "dtype", *COLUMNS), cells, right=range(2, 2 + len(COLUMNS)))
    names = ["layer" if layers else "parameter", *(one["name"] for one in rows)]
    source = document["source"]
    total = sum(one["numel"] for one in rows)
    return "\n".join(
        [
            f"{source['source']}: {about(source)}",
            *named(names, figures, width),
            f"{count(len(rows), 'row')}, {count(total, 'element')}",
        ]
    )


def comma_separated(document: Document, *, layers: bool) -> str:
    """Return the document of `stats` as lines of comma-separated values, the first with the names of the columns."""
    columns = ("name", "slot", "dtype", *(() if layers else ("shape",)), *COLUMNS)
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    for one in document["layers" if layers else "slots"]:
        values = one | {"shape": "x".join(map(str, one["shape"] or ()))}
        lines.writerow([values[key] for key in columns])
    return text.getvalue()


def render_elements(found: Elements, *, width: int) -> str:
    """Return elements as NumPy prints them, under a line that says which they are."""
    import numpy as np

    what = f"{found.slot} of {found.name}: {found.dtype} {list(found.shape)}"
    part = "" if found.slice is None else f" [{found.slice}]"
    if found.values is None:
        return printable(f"wrote {found.file}: {what}{part}")
    wide = found.values if found.values.dtype.kind in "biufcV" else found.values.astype("float32")
    return "\n".join([printable(what + part), np.array2string(wide, max_line_width=width, precision=PRECISION)])


def render_history(document: Document) -> str:
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


SHOWN_DIFFERENCES = 6


def packed(document: Document) -> str:
    """Return the document of `pack` as text."""
    document = printable(document)
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
    document = printable(document)
    done = "would write" if document["dry_run"] else "wrote"
    return f"{done} {count(document['files'], 'file')}, {size(document['nbytes'])}, to {document['target']}"


def patched(document: Document) -> str:
    """Return the document of `patch` as text."""
    document = printable(document)
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


VERDICTS = {
    "whole": "resumes, and all of it comes back",
    "partly": "resumes, and this does not come back",
    "no": "does not resume",
    "unknown": "is not known to resume",
}


def render_resume_check(document: Document) -> str:
    """Return the document of `resume-check` as text."""
    document = printable(document)
    ranks = count(document["world_size"], "rank")
    form = find_format(document["format"])
    lines = [f"{document['source']} ({document['format'] if form is None else form.title}) in {document['title']}, "
             f"{ranks}: {VERDICTS[document['verdict']]}"]  # fmt: skip
    lines += [f"  {one['part']}: {one['why']}" for one in document["not_back"]]
    lines += [f"  because {one}" for one in document["why"]]
    if document["comes_back"]:
        lines.append("comes back: " + ", ".join(one["part"] for one in document["comes_back"]))
    said = (
        ("with", document["call"]), ("set up", document["given"]), ("not kept by it", document["yours"]),
        ("otherwise", document["advice"]),
    )  # fmt: skip
    lines += [f"{name}: {text}" for name, text in said if text]
    lines += [f"run: {one}" for one in document["commands"]]
    if document["commands"]:
        lost = ", ".join(dict.fromkeys(one["part"] for one in document["not_back_after"]))
        lines.append(f"after that, does not come back: {lost}" if lost else "after that, all of it comes back")
    return "\n".join(lines)


SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

RULES = {
    "known": "A pickle names a class that a framework puts into checkpoints.",
    "unknown": "A pickle names what no list has, or a file cannot be looked into.",
    "dangerous": "A pickle names what runs code, or a file shows programs different things.",
}
MEANS = {
    "known": "no code is known to run; torch.load(weights_only=True) refuses classes that are not torch's",
    "unknown": "torch.load(weights_only=False) would run code of what is unknown here: look at it first, or let "
    "`zckpt sanitize` write the checkpoint without it",
    "dangerous": "do not load it with torch.load(weights_only=False) or pickle; `zckpt sanitize` writes the "
    "checkpoint without it",
}
LEVELS = {"known": "note", "unknown": "warning", "dangerous": "error"}


def render_scan(document: Document) -> str:
    """Return the document of `zckpt.scan` as text: each global once, with where it is first."""
    rows = by_key(((one["grade"], one["global"] or one["message"]), one) for one in document["findings"])
    lines = [
        f"{document['source']}: {document['grade']}",
        f"{count(document['files'], 'file')}, {count(document['pickles'], 'pickle')}",
    ]
    shown = sorted((key for key in rows if key[0] != DATA), key=lambda key: (-GRADES.index(key[0]), key[1]))
    if shown:
        header = ("grade", "what", "needed by", "named", "called", "in")
        cells = []
        for key in shown:
            first, more = rows[key][0], len(rows[key]) - 1
            named, called = (sum(one[name] for one in rows[key]) for name in ("named", "called"))
            where = ": ".join(filter(None, (first["file"], first["record"]))) + (f" and {more} more" if more else "")
            cells.append((*key, first["program"] or "", named or "", called or "", where))
        lines += ["", *table(header, cells, right=(3, 4))]
    data = sum(1 for found, _ in rows if found == DATA)
    lines += ["", f"besides, {count(data, 'name')} of plain data"] if data else []
    lines += ["", MEANS[document["grade"]]] if document["grade"] in MEANS else []
    return "\n".join(map(printable, lines))


def sarif(document: Document) -> Document:
    """Return all findings but data as one run of SARIF."""
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "zckpt scan",
                        "version": __version__,
                        "rules": [{"id": key, "shortDescription": {"text": text}} for key, text in RULES.items()],
                    }
                },
                "results": list(_results(document["findings"])),
            }
        ],
    }


def _results(findings: Iterable[Document]) -> Iterable[Document]:
    for one in findings:
        if one["grade"] == DATA:
            continue
        says = one["message"] or f"{'calls' if one['called'] else 'names'} {one['global']}"
        says += f", as {one['program']} does" if one["grade"] == KNOWN else ""
        place = {"artifactLocation": {"uri": quote(os.fsencode(one["file"]))}}
        where: dict[str, object] = {"physicalLocation": place}
        if one["record"]:
            where["logicalLocations"] = [{"fullyQualifiedName": printable(one["record"]), "kind": "member"}]
        yield {
            "ruleId": one["grade"],
            "ruleIndex": list(RULES).index(one["grade"]),
            "level": LEVELS[one["grade"]],
            "message": {"text": printable(says)},
            "locations": [where],
            "properties": {"global": printable(one["global"] or ""), "named": one["named"], "called": one["called"]},
        }


MINIMUM_WIDTH = 40

LABEL_WIDTH = 9
"""Of `parameter`, the longest label, with no colon after it."""

SHOWN_NAMES = 8
SHOWN_FINDINGS = 200
"""More of them are counted, not listed; `--json` has all."""


def render_verification(document: Document, *, width: int, paint: Paint) -> str:
    """Return the document as text.

    Parameters
    ----------
    document : dict
        From `Verification.document`.
    width : int, columns
        Of the terminal; longer lines are wrapped. No path and no name is cut that people give.
    paint : callable
        Colours a text.
    """
    document = printable(document)
    width = max(width, MINIMUM_WIDTH)
    lines = _verified(document, width, paint)
    findings = document["findings"]
    for one in findings[:SHOWN_FINDINGS]:
        severity = one["severity"]
        lines += ["", f"{paint(f'{severity:<8}', severity)} {one['code']}  {one['title']}"]
        names, ranks = one["parameters"], one["ranks"]
        more = f" and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else ""
        facts = [
            ("what", one["message"]),
            ("file", one["file"]),
            ("rank" if len(ranks) == 1 else "ranks", ", ".join(map(str, ranks))),
            ("parameter" if len(names) == 1 else "of", ", ".join(names[:SHOWN_NAMES]) + more),
            ("expected", one["expected"]),
            ("found", one["found"]),
            ("to do", one["advice"]),
        ]
        for label, text in facts:
            if text is not None:
                lines += _wrapped(text, width, f"  {label:<{LABEL_WIDTH}}  ")
    if len(findings) > SHOWN_FINDINGS:
        lines += ["", f"and {count(len(findings) - SHOWN_FINDINGS, 'more finding')}"]
    return "\n".join(lines)


def _verified(document: Document, width: int, paint: Paint) -> list[str]:
    severities = Counter(finding["severity"] for finding in document["findings"])
    counts = ", ".join(count(severities[kind], kind) for kind in ("error", "warning", "note") if severities[kind])
    verdict = paint("sound", "good") if document["sound"] else paint("unsound", "error")
    kind = f" ({document['format']})" if document["format"] else ""
    checked = document["checked"]
    facts = [count(checked[f"{noun}s"], noun) for noun in ("file", "parameter", "slot")]
    if document["deep"]:
        facts += [
            f"{count(checked['elements'], 'element')} looked at",
            f"{size(checked['nbytes'])} read",
            count(checked["checksums"], "checksum"),
        ]
    elif checked["elements"]:
        facts.append(f"a sample of {count(checked['elements'], 'element')} of masters compared with weights")
    lines = [f"{verdict}  {document['source']}{kind}", *_wrapped(", ".join(facts), width, "checked  ")]
    if document["checkpoint"] not in (None, document["source"]):
        others = f"{document['checkpoint']} only; zckpt list {document['source']} looks at each checkpoint"
        lines += _wrapped(others, width, "of       ")
    if not document["deep"]:
        lines.append("         structure only: --deep reads every byte")
    if document["fingerprint"]:
        lines.append(f"digest   {document['fingerprint']}")
    return [*lines, f"found    {counts}"] if counts else lines


def _wrapped(text: str, width: int, label: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
