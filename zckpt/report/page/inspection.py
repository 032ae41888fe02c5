"""The pages of one checkpoint: of `zckpt inspect --html` and `zckpt verify --html`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.report.page.markup import details, facts, items, name_of, nbytes, number, page, search, section, table, text
from zckpt.report.text import count

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


def inspect_page(document: Mapping[str, Any], map_data: Mapping[str, Any]) -> str:
    """Return the page of one checkpoint. `document`: from `zckpt.inspect`; `map_data`: from `zckpt.map`."""
    source = name_of(document["source"])
    listed = _files(document, str(map_data.get("root", "")))
    more = _groups(document) + MAP_TABLE
    if listed:
        more += details(f"Files ({len(listed):,})", '<div id="files"></div>')
    body = (
        header(source, _subtitle(document), _facts(document) + items(_warnings(document), kind="warnings"))
        + f'<main id="main">{search("parameter")}'
        + MAP_SECTIONS
        + section("Slots", _slots(document), identity="slots")
        + section("More", more, identity="more")
        + "</main>"
        + footer()
    )
    return page("inspect", title=f"{source}: checkpoint", body=body, data={"map": map_data, "files": listed})


def _warnings(document: Mapping[str, Any]) -> list[str]:
    """Return what is to be known, and what nothing has read."""
    lost = [
        f"Left out: {one['file']}{':' if one['place'] else ''}{one['place']} ({one['about']})"
        for one in document["left_out"]
    ]
    more = [f"Left out: {len(lost) - SHOWN_LEFT_OUT:,} more"] if len(lost) > SHOWN_LEFT_OUT else []
    return [*document["warnings"], *lost[:SHOWN_LEFT_OUT], *more]


def header(title: str, subtitle: str, rest: str) -> str:
    """Return the head of a page; `rest` is HTML."""
    return (
        '<a class="unseen skip" href="#main">Skip to the contents</a>'
        f'<header><h1>{text(title)}</h1><p class="quiet">{text(subtitle)}</p>{rest}</header>'
        '<noscript><p class="warnings">The maps and tables of this page need scripts.</p></noscript>'
    )


def footer() -> str:
    """Return the foot of a page."""
    from zckpt.version import __version__

    return f"<footer>Made by zckpt {text(__version__)}. This page is complete in itself and loads nothing.</footer>"


def described(about: Mapping[str, Any]) -> str:
    """Return format, stage, ranks and step of a checkpoint in a few words."""
    stage = about.get("zero_stage")
    ranks, step = about.get("world_size"), about.get("step")
    words = [
        str(about.get("format") or ""),
        "" if stage is None else f"ZeRO stage {stage}",
        "" if ranks is None else count(ranks, "rank"),
        "" if step is None else f"step {step:,}",
    ]
    return ", ".join(filter(None, words))


def _subtitle(document: Mapping[str, Any]) -> str:
    degrees = [f"{key} {value}" for key, value in document["topology"].items() if value > 1]
    several = len(degrees) > 1  # one alone is the number of ranks
    return described(document) + (f" ({', '.join(degrees)})" if several else "")


def _facts(document: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in document["details"].items() if value and not isinstance(value, dict)}
    unused = document["unreferenced_nbytes"]
    return facts(
        [
            ("Parameters", number(document["num_parameters"])),
            ("Elements", number(document["num_elements"])),
            ("Files", f"{number(len(document['files']))}, {nbytes(document['nbytes'])}"),
            ("Frozen", number(document["num_frozen"]) if document["num_frozen"] else ""),
            ("Tied", number(document["num_tied"]) if document["num_tied"] else ""),
            ("Buffers", number(document["num_buffers"]) if document["num_buffers"] else ""),
            ("Padding", nbytes(document["padding"]["nbytes"]) if document["padding"]["nbytes"] else ""),
            ("In storages no tensor uses", nbytes(unused) if unused else ""),
            ("Loss scale", number(document["loss_scale"]) if document["loss_scale"] is not None else ""),
            ("Written by", text(document["format_version"] or "")),
            *((key.replace("_", " ").capitalize(), _plain(value)) for key, value in rest.items()),
            ("Also holds", text(", ".join(document["metadata"]))),
            ("Path", f"<code>{text(document['source'])}</code>"),
        ],
        broad=("Path", "Also holds"),
    )


def _plain(value: object) -> str:
    return text(", ".join(map(str, value))) if isinstance(value, list) else number(value)


def _slots(document: Mapping[str, Any]) -> str:
    found = document["slots"]
    rows = [
        (
            text(name),
            text(", ".join(slot["dtypes"])),
            number(slot["num_parameters"]),
            number(slot["num_elements"]),
            nbytes(slot["nbytes"]),
        )
        for name, slot in found.items()
    ]
    return table("Slots", ("Slot", "Type", "Parameters", "Elements", "Size"), rows, right=(2, 3, 4)) if rows else ""


def _groups(document: Mapping[str, Any]) -> str:
    groups = document["param_groups"]
    if not groups:
        return ""
    keys = list(dict.fromkeys(key for group in groups for key in group if key not in ("state", "parameters")))
    rows = [
        ("Parameters", *(number(len(group["parameters"])) for group in groups)),
        *((text(key), *(_plain(group.get(key)) for group in groups)) for key in keys),
        ("State", *(text(", ".join(f"{key} {value}" for key, value in group["state"].items())) for group in groups)),
    ]
    numbers = [str(index) for index in range(len(groups))]
    if len(groups) <= FEW_GROUPS:
        shown = table("Param groups", ("Group", *numbers), rows)
    else:
        columns = [row[1:] for row in rows]
        shown = table("Param groups", ("Group", "Parameters", *keys, "State"), zip(numbers, *columns, strict=True))
    return details(f"Param groups ({len(groups)})", shown)


def _files(document: Mapping[str, Any], root: str) -> list[dict[str, object]]:
    keys = ("role", "dp_rank", "mp_rank", "nbytes", "tensor_nbytes", "unreferenced_nbytes")
    return [{"path": _below(file["path"], root), **{key: file[key] for key in keys}} for file in document["files"]]


def _below(path: str, root: str) -> str:
    return os.path.relpath(path, root) if root and path.startswith(root + os.sep) else path


def verify_page(document: Mapping[str, Any], map_data: Mapping[str, Any] | None = None) -> str:
    """Return the page of a verification.

    `document`: what `zckpt verify --json` prints; `map_data`: from `zckpt.map`, if the checkpoint could be read;
    findings are marked in it.
    """
    source = name_of(document["source"])
    findings = sorted(document["findings"], key=lambda one: SEVERITIES.index(one["severity"]))
    body = (
        header(
            source,
            f"Verification of a {document['format'] or 'damaged'} checkpoint",
            _verdict(document) + _verify_facts(document),
        )
        + '<main id="main">'
        + section("Findings", _findings(findings), identity="findings")
        + (search("parameter") + MAP_SECTIONS + section("More", MAP_TABLE, identity="more") if map_data else "")
        + "</main>"
        + footer()
    )
    kept = ("severity", "ranks", "parameters", "file")
    marks = [{key: one.get(key) for key in kept} for one in findings]
    return page("verify", title=f"{source}: verification", body=body, data={"map": map_data, "findings": marks})


def _verdict(document: Mapping[str, Any]) -> str:
    counts = {kind: sum(one["severity"] == kind for one in document["findings"]) for kind in SEVERITIES}
    words = ", ".join(count(n, kind) for kind, n in counts.items() if n)
    how = "Every byte was read." if document["deep"] else "Its structure was checked; --deep reads every byte."
    if document["sound"]:
        tail = f" {words.capitalize()}." if words else ""
        return f'<p class="verdict good"><strong>Sound.</strong> {text(how)}{text(tail)}</p>'
    return f'<p class="verdict bad"><strong>Not sound:</strong> {text(words)}. {text(how)}</p>'


def _verify_facts(document: Mapping[str, Any]) -> str:
    checked = dict(document["checked"])
    size = checked.pop("nbytes", None)
    pairs = [(f"{key.replace('_', ' ').capitalize()} checked", number(value)) for key, value in checked.items()]
    fingerprint = document.get("fingerprint")
    return facts(
        [
            *pairs,
            ("Bytes checked", "" if size is None else nbytes(size)),
            ("Fingerprint", f"<code>{text(fingerprint)}</code>" if fingerprint else ""),
            ("Path", f"<code>{text(document['source'])}</code>"),
        ],
        broad=("Path", "Fingerprint"),
    )


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    if not findings:
        return "<p>None.</p>"
    present = [kind for kind in SEVERITIES if any(one["severity"] == kind for one in findings)]
    choices = "".join(
        f'<label class="choice"><input type="checkbox" checked data-severity="{kind}">'
        f'<span class="badge {kind}">{kind}</span>{sum(one["severity"] == kind for one in findings):,}</label>'
        for kind in present
    )
    return (
        f'<fieldset class="legend severities"><legend class="unseen">Severities shown</legend>{choices}</fieldset>'
        '<p class="unseen" id="findings-answer" aria-live="polite"></p>' + "".join(_finding(one) for one in findings)
    )


def _finding(one: Mapping[str, Any]) -> str:
    severity = one["severity"] if one["severity"] in SEVERITIES else "note"
    pairs = [
        ("Expected", _optional(one.get("expected"))),
        ("Found", _optional(one.get("found"))),
        ("File", f"<code>{text(one['file'])}</code>" if one.get("file") else ""),
        ("Ranks", _named([str(rank) for rank in one.get("ranks") or ()])),
        ("Parameters", _named(one.get("parameters") or ())),
        ("What to do", _optional(one.get("advice"))),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs if value)
    return (
        f'<article class="finding {severity}"><h3><span class="badge {severity}">{severity}</span>'
        f'<span class="mono">{text(one["code"])}</span>{text(one["title"])}</h3>'
        f"<p>{text(one['message'])}</p>{f'<dl>{rows}</dl>' if rows else ''}</article>"
    )


def _optional(value: object) -> str:
    return "" if value is None else text(value)


def _named(values: Sequence[object]) -> str:
    shown = ", ".join(f"<code>{text(value)}</code>" for value in values[:SHOWN_NAMES])
    left = len(values) - SHOWN_NAMES
    return f"{shown} and {left:,} more" if left > 0 else shown
