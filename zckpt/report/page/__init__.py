"""Reports as HTML pages: one file each, that loads nothing, for the screen, the keyboard, screen readers and paper.

Here is what a page says, from a plain document: of `zckpt diff --html`, of two checkpoints or a series of them, and of
one checkpoint, of `zckpt inspect --html`, `zckpt verify --html` and `zckpt stats --html`.

history.py   the page of `zckpt list --html`
markup.py    a page's one file, with scripts and data; text and tables as HTML
assets/      the style sheet and the scripts
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from zckpt.report.page.markup import (
    HISTOGRAM,
    code,
    details,
    facts,
    items,
    name_of,
    nbytes,
    number,
    page,
    quiet,
    search,
    section,
    table,
    text,
    verdict,
)
from zckpt.report.text import Document, about, count, elements

DIFFERENT = (
    '<div class="columns">'
    + section("Change by layer", '<div id="heat"></div>', identity="heat")
    + section("How large the differences are", HISTOGRAM, identity="histogram")
    + "</div>"
    + search("tensor")
    + section(
        "Tensors that differ",
        '<div id="different"></div><p class="quiet keys">Choose a row to see its histogram.</p>',
        identity="different",
    )
)
"""What scripts fill, where tensors differ."""


def diff_page(document: Document) -> str:
    """Return the page of a diff. `document`: what `zckpt diff --json` prints."""
    a, b = document["a"], document["b"]
    different, equal, metadata = document["different"], document["equal_slots"], document["metadata"]
    only = {side.upper(): document[f"only_in_{side}"] for side in ("a", "b")}
    counts = [
        (len(different), "tensor", "changed"),
        (sum(map(len, only.values())), "tensor", "on one side only"),
        (len(metadata), "metadata value", "changed"),
    ]
    words = ", ".join(f"{count(n, noun)} {what}" for n, noun, what in counts if n)
    good = ("Equal.", "Nothing that was compared differs.")
    said = verdict(document["equal"], good, ("Different:", f"{words}."))
    compared = document["compared"]
    head = facts(
        [
            *((side, f"{code(one['source'])} {quiet(about(one))}") for side, one in (("A", a), ("B", b))),
            ("Parameters compared", number(compared.get("parameters"))),
            ("Tensors compared", number(compared.get("slots"))),
            ("Elements", number(compared.get("elements"))),
            ("Bytes", nbytes(compared["nbytes"])),
        ],
        broad=("A", "B"),
    )
    alone = "".join(
        details(f"Only in {side} ({len(found):,})", table(f"Only in {side}", ("Name", "Slot"), (
            (text(one["name"]), text(one["slot"] or "the whole parameter")) for one in found
        )))
        for side, found in only.items() if found
    )  # fmt: skip
    same = details(count(len(equal), "tensor"), '<div id="equal"></div>')
    rows = [
        (code(one["key"]), *(quiet("not there") if one[side] is None else text(one[side]) for side in ("a", "b")))
        for one in metadata
    ]
    changed = table("Metadata that differs", ("Key", "A", "B"), rows) if rows else ""
    main = (
        items(document.get("warnings", ()), kind="warnings")
        + section("On one side only", alone, identity="only")
        + (DIFFERENT if different else "")
        + section("Equal", same if equal else "<p>No tensor is equal on both sides.</p>")
        + section("Metadata", changed)
    )
    title = f"{name_of(a['source'])} and {name_of(b['source'])}"
    data = {"different": different, "equal_slots": equal}
    return page("diff", title, "What differs between two checkpoints", said + head, main, name="diff", data=data)


def series_page(document: Document) -> str:
    """Return the page of a series. `document`: what `zckpt diff --series --json` prints."""
    sources: Sequence[Document] = document["sources"]
    rows = [(code(one["source"]), text(about(one))) for one in sources]
    listed = table("Checkpoints", ("Checkpoint", "What it is"), rows)
    main = (
        search("tensor")
        + section(
            "Curves",
            '<ul class="lines" id="lines" aria-label="Lines drawn"></ul><div class="columns even">'
            '<div id="change"></div><div id="norm"></div></div>',
        )
        + section(
            "Tensors",
            '<p class="quiet keys">Choose rows to draw them or take them away. '
            '<button type="button" class="plain-button" id="lines-none">Draw none</button> '
            '<output id="lines-answer" aria-live="polite"></output></p><div id="moved"></div>',
            identity="moved",
        )
        + section("Checkpoints", details(f"All {len(sources)}", listed), identity="sources")
    )
    names = [name_of(one["source"]) for one in sources]
    steps = zip(names, document["steps"], strict=True)
    labels = [name if step is None else f"step {step:,}" for name, step in steps]
    subtitle = f"{count(len(sources), 'checkpoint')} of a run, {count(len(document['series']), 'tensor')}"
    data = {"labels": labels, "series": document["series"]}
    return page("series", f"{names[0]} to {names[-1]}", subtitle, "", main, name="series", data=data)


MAP_SECTIONS = (
    section("Map", '<div id="map"></div>')
    + '<section id="chosen" hidden aria-labelledby="chosen-name"><h2 id="chosen-name"></h2>'
    + '<div id="chosen-spans"></div></section>'
    + section("Size by module", '<div id="treemap"></div>', identity="sizes")
    + section("Parameters", '<div id="parameters"></div>')
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
    paths = [one["path"] for one in document["files"]]
    paths = [os.path.relpath(path, root) if root and path.startswith(root + os.sep) else path for path in paths]
    listed = [
        {"path": path, **{key: one[key] for key in keys}} for path, one in zip(paths, document["files"], strict=True)
    ]
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
        + section("Slots", table("Slots", header, slots, right=(2, 3, 4)) if slots else "")
        + section("More", more)
    )
    lost = [
        f"Left out: {one['file']}{':' if one['place'] else ''}{one['place']} ({one['about']})"
        for one in document["left_out"]
    ]
    lost[SHOWN_LEFT_OUT:] = [f"Left out: {len(lost) - SHOWN_LEFT_OUT:,} more"] * (len(lost) > SHOWN_LEFT_OUT)
    gone = [elements(one, "missing") for one in document["missing"]]
    gone[SHOWN_LEFT_OUT:] = [f"missing: {len(gone) - SHOWN_LEFT_OUT:,} more"] * (len(gone) > SHOWN_LEFT_OUT)
    rest = _facts(document) + items([*document["warnings"], *gone, *lost], kind="warnings")
    data = {"map": map_data, "files": listed}
    return page("inspect", source, about(document) + several, rest, main, name="checkpoint", data=data)


def _facts(document: Document) -> str:
    rest = {key: value for key, value in document["details"].items() if value and not isinstance(value, dict)}
    unused, padding = document["unreferenced_nbytes"], document["padding"]["nbytes"]
    return facts(
        [
            ("Parameters", number(document["num_parameters"])),
            ("Elements", number(document["num_elements"])),
            ("Files", f"{number(len(document['files']))}, {nbytes(document['nbytes'])}"),
            *(
                (word, number(count) if (count := document[f"num_{word.lower()}"]) else "")
                for word in ("Frozen", "Tied", "Buffers")
            ),
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


def verify_page(document: Document, map_data: Document | None = None) -> str:
    """Return the page of a verification.

    `document`: what `zckpt verify --json` prints; `map_data`: from `zckpt.map`, if the checkpoint could be read;
    findings are marked in it.
    """
    findings = sorted(document["findings"], key=lambda one: SEVERITIES.index(one["severity"]))
    counts = Counter(one["severity"] for one in findings)
    words = ", ".join(count(counts[kind], kind) for kind in SEVERITIES if counts[kind])
    how = "Every byte was read." if document["deep"] else "Its structure was checked; --deep reads every byte."
    good = ("Sound.", text(how + (f" {words.capitalize()}." if words else "")))
    said = verdict(document["sound"], good, ("Not sound:", f"{text(words)}. {text(how)}"))
    checked = dict(document["checked"])
    size = checked.pop("nbytes")
    head = facts(
        [
            *((f"{key.replace('_', ' ').capitalize()} checked", number(value)) for key, value in checked.items()),
            ("Bytes checked", nbytes(size)),
            ("Fingerprint", code(document.get("fingerprint"))),
            ("Path", code(document["source"])),
        ],
        broad=("Path", "Fingerprint"),
    )
    choices = "".join(
        f'<label class="choice"><input type="checkbox" checked data-severity="{kind}">'
        f'<span class="badge {kind}">{kind}</span>{counts[kind]:,}</label>'
        for kind in SEVERITIES
        if counts[kind]
    )
    listed = (
        f'<fieldset class="legend severities"><legend class="unseen">Severities shown</legend>{choices}</fieldset>'
        '<p class="unseen" id="findings-answer" aria-live="polite"></p>' + "".join(_finding(one) for one in findings)
    )
    main = section("Findings", listed if findings else "<p>None.</p>")
    if map_data:
        main += search("parameter") + MAP_SECTIONS + section("More", MAP_TABLE)
    kept = ("severity", "ranks", "parameters", "file")
    data = {"map": map_data, "findings": [{key: one.get(key) for key in kept} for one in findings]}
    subtitle = f"Verification of a {document['format'] or 'damaged'} checkpoint"
    source = name_of(document["source"])
    return page("verify", source, subtitle, said + head, main, name="verification", data=data)


def _finding(one: Document) -> str:
    def named(key: str) -> str:
        values = one.get(key) or ()
        left = len(values) - SHOWN_NAMES
        return ", ".join(f"<code>{text(value)}</code>" for value in values[:SHOWN_NAMES]) + (
            f" and {left:,} more" if left > 0 else ""
        )

    severity = one["severity"]
    pairs = {
        "Expected": text(one.get("expected") or ""),
        "Found": text(one.get("found") or ""),
        "File": code(one.get("file")),
        "Ranks": named("ranks"),
        "Parameters": named("parameters"),
        "What to do": text(one.get("advice") or ""),
    }
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs.items() if value)
    return (
        f'<article class="finding {severity}"><h3><span class="badge {severity}">{severity}</span>'
        f'<span class="mono">{text(one["code"])}</span>{text(one["title"])}</h3>'
        f"<p>{text(one['message'])}</p>{f'<dl>{rows}</dl>' if rows else ''}</article>"
    )


def stats_page(document: Document) -> str:
    """Return the page of a checkpoint's figures. `document`: what `zckpt stats --json` prints."""
    source, slots = document["source"], document["slots"]
    odd = [one for one in slots if one["nan"] or one["inf"]]
    words = f"{count(len(odd), 'tensor')} of {len(slots):,} hold NaN or infinite elements."
    said = verdict(not odd, ("Finite.", "No element is NaN or infinite."), ("Not finite:", words))
    head = facts(
        [
            ("Tensors", number(len(slots))),
            ("Elements", number(sum(one["numel"] for one in slots))),
            ("Path", code(source["source"])),
        ],
        broad=("Path",),
    )
    main = (
        section("By layer", '<div id="layers"></div>', identity="layers")
        + section("How large the elements are", HISTOGRAM, identity="histogram")
        + search("tensor")
        + section(
            "Tensors",
            '<div id="tensors"></div><p class="quiet keys">Choose a row, here or above, to see its histogram.</p>',
            identity="tensors",
        )
    )
    data = {"slots": slots, "layers": document["layers"]}
    return page("stats", name_of(source["source"]), about(source), said + head, main, name="figures", data=data)
