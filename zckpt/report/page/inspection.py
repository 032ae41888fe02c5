"""The pages of one checkpoint: of `zckpt inspect --html` and `zckpt verify --html`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

from zckpt.report.page.markup import (
    code,
    details,
    facts,
    items,
    name_of,
    nbytes,
    number,
    page,
    search,
    section,
    table,
    text,
    verdict,
)
from zckpt.report.text import Document, about, count

MAP_SECTIONS = (
    section("Map", '<div id="map"></div>', identity="map")
    + '<section id="chosen" hidden aria-labelledby="chosen-name"><h2 id="chosen-name"></h2>'
    + '<div id="chosen-spans"></div></section>'
    + section("Size by module", '<div id="treemap"></div>', identity="sizes")
    + section("Parameters", '<div id="parameters"></div>', identity="parameters")
)
"""Sections that the scripts of the map fill."""

MAP_TABLE = details("The map as a table", '<div id="rows"></div>')

SHOWN_LEFT_OUT = 12
"""Things left out that a page names; the others are counted."""

FEW_GROUPS = 6
"""Param groups that are columns of their table; more of them are its rows."""

SEVERITIES = ("error", "warning", "note")
SHOWN_NAMES = 12
"""Parameters or ranks of a finding that are listed; more are counted."""


def inspect_page(document: Document, map_data: Document) -> str:
    """Return the page of one checkpoint. `document`: from `zckpt.inspect`; `map_data`: from `zckpt.map`."""
    source, root = name_of(document["source"]), str(map_data.get("root", ""))
    degrees = [f"{key} {value}" for key, value in document["topology"].items() if value > 1]
    several = f" ({', '.join(degrees)})" if len(degrees) > 1 else ""  # one alone is the number of ranks
    keys = ("role", "dp_rank", "mp_rank", "nbytes", "tensor_nbytes", "unreferenced_nbytes")
    listed = [{"path": _below(one["path"], root), **{key: one[key] for key in keys}} for one in document["files"]]
    more = _groups(document["param_groups"]) + MAP_TABLE
    if listed:
        more += details(f"Files ({len(listed):,})", '<div id="files"></div>')
    slots = [
        (
            text(name),
            text(", ".join(slot["dtypes"])),
            number(slot["num_parameters"]),
            number(slot["num_elements"]),
            nbytes(slot["nbytes"]),
        )
        for name, slot in document["slots"].items()
    ]
    header = ("Slot", "Type", "Parameters", "Elements", "Size")
    main = (
        search("parameter")
        + MAP_SECTIONS
        + section("Slots", table("Slots", header, slots, right=(2, 3, 4)) if slots else "", identity="slots")
        + section("More", more, identity="more")
    )
    lost = [
        f"Left out: {one['file']}{':' if one['place'] else ''}{one['place']} ({one['about']})"
        for one in document["left_out"]
    ]
    lost[SHOWN_LEFT_OUT:] = [f"Left out: {len(lost) - SHOWN_LEFT_OUT:,} more"] * (len(lost) > SHOWN_LEFT_OUT)
    rest = _facts(document) + items([*document["warnings"], *lost], kind="warnings")
    data = {"map": map_data, "files": listed}
    return page("inspect", source, about(document) + several, rest, main, name="checkpoint", data=data)


def _facts(document: Document) -> str:
    def given(key: str) -> str:
        return number(document[key]) if document[key] else ""

    rest = {key: value for key, value in document["details"].items() if value and not isinstance(value, dict)}
    unused, padding = document["unreferenced_nbytes"], document["padding"]["nbytes"]
    return facts(
        [
            ("Parameters", number(document["num_parameters"])),
            ("Elements", number(document["num_elements"])),
            ("Files", f"{number(len(document['files']))}, {nbytes(document['nbytes'])}"),
            *((word, given(f"num_{word.lower()}")) for word in ("Frozen", "Tied", "Buffers")),
            ("Padding", nbytes(padding) if padding else ""),
            ("In storages no tensor uses", nbytes(unused) if unused else ""),
            ("Loss scale", number(document["loss_scale"]) if document["loss_scale"] is not None else ""),
            ("Written by", text(document["format_version"] or "")),
            *((key.replace("_", " ").capitalize(), _plain(value)) for key, value in rest.items()),
            ("Also holds", text(", ".join(document["metadata"]))),
            ("Path", code(document["source"])),
        ],
        broad=("Path", "Also holds"),
    )


def _plain(value: object) -> str:
    return text(", ".join(map(str, value))) if isinstance(value, list) else number(value)


def _groups(groups: Sequence[Document]) -> str:
    if not groups:
        return ""
    keys = list(dict.fromkeys(key for group in groups for key in group if key not in ("state", "parameters")))
    columns = [
        (
            str(index),
            number(len(group["parameters"])),
            *(_plain(group.get(key)) for key in keys),
            text(", ".join(f"{key} {value}" for key, value in group["state"].items())),
        )
        for index, group in enumerate(groups)
    ]
    header = ("Group", "Parameters", *keys, "State")
    if len(groups) > FEW_GROUPS:
        shown = table("Param groups", header, columns)
    else:
        (group, *numbers), *rows = zip(map(text, header), *columns, strict=True)
        shown = table("Param groups", (group, *numbers), rows)
    return details(f"Param groups ({len(groups)})", shown)


def _below(path: str, root: str) -> str:
    return os.path.relpath(path, root) if root and path.startswith(root + os.sep) else path


def verify_page(document: Document, map_data: Document | None = None) -> str:
    """Return the page of a verification.

    `document`: what `zckpt verify --json` prints; `map_data`: from `zckpt.map`, if the checkpoint could be read;
    findings are marked in it.
    """
    findings = sorted(document["findings"], key=lambda one: SEVERITIES.index(one["severity"]))
    counts = Counter(one["severity"] for one in findings)
    words = ", ".join(count(counts[kind], kind) for kind in SEVERITIES if counts[kind])
    how = "Every byte was read." if document["deep"] else "Its structure was checked; --deep reads every byte."
    said = (
        verdict(True, "Sound.", text(how + (f" {words.capitalize()}." if words else "")))
        if document["sound"]
        else verdict(False, "Not sound:", f"{text(words)}. {text(how)}")
    )
    checked = dict(document["checked"])
    size = checked.pop("nbytes", None)
    head = facts(
        [
            *((f"{key.replace('_', ' ').capitalize()} checked", number(value)) for key, value in checked.items()),
            ("Bytes checked", "" if size is None else nbytes(size)),
            ("Fingerprint", code(document.get("fingerprint"))),
            ("Path", code(document["source"])),
        ],
        broad=("Path", "Fingerprint"),
    )
    main = section("Findings", _findings(findings, counts), identity="findings")
    if map_data:
        main += search("parameter") + MAP_SECTIONS + section("More", MAP_TABLE, identity="more")
    kept = ("severity", "ranks", "parameters", "file")
    data = {"map": map_data, "findings": [{key: one.get(key) for key in kept} for one in findings]}
    subtitle = f"Verification of a {document['format'] or 'damaged'} checkpoint"
    source = name_of(document["source"])
    return page("verify", source, subtitle, said + head, main, name="verification", data=data)


def _findings(findings: Sequence[Document], counts: Mapping[str, int]) -> str:
    if not findings:
        return "<p>None.</p>"
    choices = "".join(
        f'<label class="choice"><input type="checkbox" checked data-severity="{kind}">'
        f'<span class="badge {kind}">{kind}</span>{counts[kind]:,}</label>'
        for kind in SEVERITIES
        if counts[kind]
    )
    return (
        f'<fieldset class="legend severities"><legend class="unseen">Severities shown</legend>{choices}</fieldset>'
        '<p class="unseen" id="findings-answer" aria-live="polite"></p>' + "".join(_finding(one) for one in findings)
    )


def _finding(one: Document) -> str:
    def given(key: str) -> str:
        return "" if one.get(key) is None else text(one[key])

    def named(key: str) -> str:
        values = one.get(key) or ()
        left = len(values) - SHOWN_NAMES
        return ", ".join(f"<code>{text(value)}</code>" for value in values[:SHOWN_NAMES]) + (
            f" and {left:,} more" if left > 0 else ""
        )

    severity = one["severity"]
    pairs = {
        "Expected": given("expected"),
        "Found": given("found"),
        "File": code(one.get("file")),
        "Ranks": named("ranks"),
        "Parameters": named("parameters"),
        "What to do": given("advice"),
    }
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs.items() if value)
    return (
        f'<article class="finding {severity}"><h3><span class="badge {severity}">{severity}</span>'
        f'<span class="mono">{text(one["code"])}</span>{text(one["title"])}</h3>'
        f"<p>{text(one['message'])}</p>{f'<dl>{rows}</dl>' if rows else ''}</article>"
    )
