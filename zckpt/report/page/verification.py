"""The page of `zckpt verify --html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.report.page.inspection import MAP_SECTIONS, MAP_TABLE, footer, header
from zckpt.report.page.markup import facts, name_of, nbytes, number, page, search, section, text
from zckpt.report.text import count

SEVERITIES = ("error", "warning", "note")
SHOWN_NAMES = 12
"""Parameters or ranks of a finding that are listed; more are counted."""


def verify_page(document: Mapping[str, Any], map_data: Mapping[str, Any] | None = None) -> str:
    """Return the page of a verification.

    Parameters
    ----------
    document : dict
        What `zckpt verify --json` prints.
    map_data : dict, optional
        From `zckpt.map`, if the checkpoint could be read; findings are marked in it.
    """
    source = name_of(document["source"])
    findings = sorted(document["findings"], key=lambda one: SEVERITIES.index(one["severity"]))
    body = (
        header(
            source,
            f"Verification of a {document['format'] or 'damaged'} checkpoint",
            _verdict(document) + _facts(document),
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


def _facts(document: Mapping[str, Any]) -> str:
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
        ("Expected", _text(one.get("expected"))),
        ("Found", _text(one.get("found"))),
        ("File", f"<code>{text(one['file'])}</code>" if one.get("file") else ""),
        ("Ranks", _listed([str(rank) for rank in one.get("ranks") or ()])),
        ("Parameters", _listed(one.get("parameters") or ())),
        ("What to do", _text(one.get("advice"))),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs if value)
    return (
        f'<article class="finding {severity}"><h3><span class="badge {severity}">{severity}</span>'
        f'<span class="mono">{text(one["code"])}</span>{text(one["title"])}</h3>'
        f"<p>{text(one['message'])}</p>{f'<dl>{rows}</dl>' if rows else ''}</article>"
    )


def _text(value: object) -> str:
    return "" if value is None else text(value)


def _listed(values: Sequence[object]) -> str:
    shown = ", ".join(f"<code>{text(value)}</code>" for value in values[:SHOWN_NAMES])
    left = len(values) - SHOWN_NAMES
    return f"{shown} and {left:,} more" if left > 0 else shown
