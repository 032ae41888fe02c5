"""The text of `zckpt inspect`, from its JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zckpt.report.text import count, printable, size, table

SHOWN_RANKS = 8
"""Ranks of which the padding is listed; more are added up."""


SHOWN_LEFT_OUT = 8
"""Things left out that are listed without `--files`."""


def render(document: dict[str, Any], *, parameters: bool, files: bool, with_globals: bool) -> str:
    """Return the document as text.

    Parameters
    ----------
    document : dict
        From `zckpt.inspect`.
    parameters, files, with_globals : bool
        Also list every parameter, file, and global.
    """
    document = printable(document)
    lines = _heading(document)
    lines += ["", *_slots(document)]
    lines += _groups(document)
    lines += _per_rank(document)
    lines += _padding(document)
    if parameters:
        lines += ["", *_parameters(document)]
    if files or with_globals:
        lines += ["", *_files(document)]
    if with_globals:
        lines += ["", *_globals(document)]
    if files and "inventory" in document:
        lines += ["", *_inventory(document["inventory"]["items"])]
    lines += _left_out(document["left_out"])
    lines += [f"warning: {warning}" for warning in document["warnings"]]
    return "\n".join(lines)


def _heading(document: dict[str, Any]) -> list[str]:
    topology = " ".join(f"{key}={value}" for key, value in document["topology"].items())
    version = f" {document['format_version']}" if document["format_version"] else ""
    stage = "" if document["zero_stage"] is None else f", ZeRO stage {document['zero_stage']}"
    facts = [
        ("source", document["source"]),
        ("format", f"{document['format']}{version}{stage}"),
        ("details", _facts({key: value for key, value in document["details"].items() if key != "origin"})),
        ("origin", _facts(document["details"].get("origin", {}))),
        ("topology", f"{topology} ({count(document['world_size'], 'rank')})"),
        ("step", document["step"]),
        ("loss scale", document["loss_scale"]),
        (
            "model",
            f"{count(document['num_parameters'], 'parameter')}, {count(document['num_elements'], 'element')}, "
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


def _facts(values: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {_yes(value)}" for key, value in values.items())


def _yes(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _slots(document: dict[str, Any]) -> list[str]:
    rows = [
        (name, "/".join(slot["dtypes"]), slot["num_parameters"], slot["num_elements"], size(slot["nbytes"]))
        for name, slot in document["slots"].items()
    ]
    return table(("slot", "dtype", "parameters", "elements", "size"), rows, right=(2, 3, 4))


def _groups(document: dict[str, Any]) -> list[str]:
    lines = []
    for index, group in enumerate(document["param_groups"]):
        state = " ".join(f"{k}={_short(v)}" for k, v in group["state"].items())
        own, of = ("state", "parameters", "optimizer"), group.get("optimizer")
        rest = {k: v for k, v in group.items() if k not in own and v is not None and v is not False}
        values = " ".join(f"{k}={_short(v)}" for k, v in rest.items())
        lines.append(
            f"group {index}{f' of {of}' if of else ''}: {count(len(group['parameters']), 'parameter')}; "
            f"{values or '(no hyperparameters)'}" + (f"; state {state}" if state else "")
        )
    return ["", *lines] if lines else []


def _per_rank(document: dict[str, Any]) -> list[str]:
    """Name the state that each rank has of its own, and where it is."""
    values = document.get("per_rank", [])
    if not values:
        return []
    keys = ", ".join(dict.fromkeys(one["key"] for one in values))
    ranks = len({(one["mp_rank"], one["rank"]) for one in values})
    where = sorted({one["group"] for one in values})
    groups = f"{'group' if len(where) == 1 else 'groups'} {', '.join(map(str, where))}"
    return ["", f"each rank's own: {keys} ({count(len(values), 'value')} on {count(ranks, 'rank')}, {groups}); "
            "cannot be cut for other ranks"]  # fmt: skip


def _short(value: object) -> str:
    text = "(" + ", ".join(map(str, value)) + ")" if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _padding(document: dict[str, Any]) -> list[str]:
    padding = document["padding"]
    if not padding["num_elements"]:
        return []
    ranks = [rank for rank in padding["ranks"] if rank["num_elements"]]
    shown = ", ".join(f"rank {rank['rank']}: {rank['num_elements']:,}" for rank in ranks[:SHOWN_RANKS])
    more = f" and {len(ranks) - SHOWN_RANKS} more ranks" if len(ranks) > SHOWN_RANKS else ""
    return [
        "",
        f"padding: {count(padding['num_elements'], 'element')}, {size(padding['nbytes'])} ({shown}{more})",
    ]


def _parameters(document: dict[str, Any]) -> list[str]:
    rows = []
    for kind in ("parameters", "buffers", "unnamed"):
        for one in document[kind]:
            note = "buffer" if kind == "buffers" else "no name" if kind == "unnamed" else ""
            note = f"tied to {one['tied_to']}" if one["tied_to"] else "frozen" if one["frozen"] else note
            shape = "x".join(map(str, one["shape"])) or "scalar"
            rows.append((one["name"], shape, one["dtype"], one["group"], ", ".join(one["slots"]), note))
    return table(("parameter", "shape", "dtype", "group", "slots", ""), rows, right=(3,))


def _files(document: dict[str, Any]) -> list[str]:
    rows = [
        (
            Path(one["path"]).name,
            one["role"],
            one["dp_rank"],
            one["mp_rank"],
            size(one["nbytes"]),
            size(one["tensor_nbytes"]),
            size(one["unreferenced_nbytes"]),
        )
        for one in document["files"]
    ]
    return table(("file", "role", "dp", "mp", "size", "tensors", "unused"), rows, right=(2, 3, 4, 5, 6))


def _inventory(items: list[dict[str, Any]]) -> list[str]:
    rows = []
    for one in items:
        name = f"{one['file']}:{one['place']}" if one["place"] else one["file"]
        more = f" and {one['count'] - 1} more" if one["count"] > 1 else ""
        rows.append((one["fate"], one["kind"], f"{name}{more}", size(one["nbytes"]), one["about"]))
    return table(("fate", "kind", "what", "size", "as"), rows, right=(3,))


def _left_out(items: list[dict[str, Any]]) -> list[str]:
    """Name what no one has read; with `--files` it is in the list above, too."""
    names = [f"{one['file']}:{one['place']}" if one["place"] else one["file"] for one in items]
    lines = [f"left out: {name} ({one['about']})" for name, one in zip(names, items, strict=True)][:SHOWN_LEFT_OUT]
    if len(items) > SHOWN_LEFT_OUT:
        lines.append(f"left out: {len(items) - SHOWN_LEFT_OUT} more; --files lists them")
    return lines


def _globals(document: dict[str, Any]) -> list[str]:
    return [
        f"{Path(one['path']).name}  {record}  {name}"
        for one in document["files"]
        for record, names in one.get("globals", {}).items()
        for name in names
    ]
