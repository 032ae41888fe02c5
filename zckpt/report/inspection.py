"""The text of `zckpt inspect`, from its JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

from zckpt.report.text import Document, count, elements, size, table, when, with_warnings
from zckpt.state import without
from zckpt.torchfile.grades import grade

SHOWN_RANKS = 8
"""Ranks of which the padding is listed; more are added up."""

SHOWN_LEFT_OUT = 8
"""Things left out that are listed without `--files`."""


def render(document: Document, *, parameters: bool, files: bool, with_globals: bool) -> str:
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
