"""The list of formats, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.report.text import table


def render(document: Mapping[str, Any]) -> str:
    """Return a table of formats, then the options of each that is written."""
    every = document["formats"]
    rows = [(one["name"], one["title"], _verbs(one), "" if one["built_in"] else "of another package") for one in every]
    lines = table(["format", "is", "verbs", ""], rows)
    for one in every:
        if one["written"]:
            lines += ["", f"--to {one['name']}: {one['writes']}"]
            lines += table(["", ""], [(f"  {_flag(option)}", _help(option)) for option in one["options"]])[1:]
    return "\n".join(lines + [""] * bool(document["broken"]) + [f"broken: {text}" for text in document["broken"]])


def _verbs(one: Mapping[str, Any]) -> str:
    found = ["read", *(["convert"] if one["written"] else []), *(verb for verb in ("reshard", "strip") if one[verb])]
    return ", ".join(found)


def _flag(option: Mapping[str, Any]) -> str:
    flag = f"--{option['name'].replace('_', '-')}"
    return flag if option["type"] == "bool" else f"{flag} {'|'.join(map(str, option['choices'])) or option['type']}"


def _help(option: Mapping[str, Any]) -> str:
    default = "" if option["default"] is None else f" Default: {option['default']}."
    return str(option["help"]) + default
