"""One HTML file and what it is built of: text, facts and tables. What comes from a checkpoint is escaped by `text`.

Style sheet, scripts and data lie inside the file, and a policy lets it load and send nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import PurePath
from string import Template

from zckpt.report.text import size
from zckpt.version import __version__

STYLES = ("base", "tables", "map", "figures", "media")
"""The files of the style sheet; a later one overrides those before it."""

_MAP = ("map_model", "map_bands", "map_spans", "map_draw", "map_words", "map_tools", "map_zoom", "map", "treemap")

_OWN = {
    "inspect": _MAP,
    "diff": ("heat",),
    "series": ("curves", "series"),
    "verify": _MAP,
    "history": (),
    "stats": ("heat", "figures"),
}
SCRIPTS = {kind: ("format", "link", "search", "table", *own, "page") for kind, own in _OWN.items()}
"""The scripts of each kind of page, in the order in which they use each other."""


HISTOGRAM = (
    '<div id="histogram" aria-live="polite"></div>'
    '<p><button type="button" class="plain-button" id="histogram-all">All tensors</button></p>'
)
"""What scripts fill."""


def text(value: object) -> str:
    """Return a value as text that is safe in an element and in a quoted attribute.

    A lone surrogate, which no encoding of a page can hold, and control characters become a replacement character.
    """
    plain = "".join("\ufffd" if "\ud800" <= c <= "\udfff" or (c < " " and c not in "\t\n") else c for c in str(value))
    return escape(plain, quote=True)


def number(value: object) -> str:
    """Return a number with thousands separated, a boolean as yes or no, and a dash for None."""
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else text(value)


def nbytes(value: int) -> str:
    """Return bytes in a unit a person reads, with the exact number on hover."""
    return f'<span title="{value:,} bytes">{size(value)}</span>'


def verdict(is_good: bool, good: tuple[str, str], bad: tuple[str, str]) -> str:
    """Return what a document comes to: a word, and HTML behind it, of either."""
    word, rest = good if is_good else bad
    return f'<p class="verdict {"good" if is_good else "bad"}"><strong>{word}</strong> {rest}</p>'


def code(value: object) -> str:
    """Return a name or a path; nothing where there is none."""
    return f"<code>{text(value)}</code>" if value else ""


def quiet(value: object) -> str:
    """Return what a reader may pass over."""
    return f'<span class="quiet">{text(value)}</span>'


def facts(pairs: Iterable[tuple[str, str]], *, broad: Sequence[str]) -> str:
    """Return a list of names and values (HTML); those without a value are left out, those in `broad` get a line."""
    rows = "".join(
        f"<div{' class=broad' if name in broad else ''}><dt>{text(name)}</dt><dd>{value}</dd></div>"
        for name, value in pairs
        if value
    )
    return f'<dl class="facts">{rows}</dl>' if rows else ""


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return a table; cells are HTML, the first of each row is its heading, columns in `right` are numbers."""
    side = [' class="right"' if i in right else "" for i in range(len(header))]
    head = "".join(f'<th scope="col"{its}>{text(name)}</th>' for name, its in zip(header, side, strict=True))
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td{its}>{cell}</td>" for cell, its in zip(rest, side[1:], strict=True))
        body += f'<tr><th scope="row"{side[0]}>{first}</th>{cells}</tr>'
    return (
        f'<div class="overflow"><table class="plain"><caption class="unseen">{text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def section(title: str, body: str, *, identity: str | None = None) -> str:
    """Return a section with a heading; nothing where there is no body. `identity`: by default its title."""
    if not body:
        return ""
    identity = identity or title.lower()
    return f'<section aria-labelledby="{identity}-title"><h2 id="{identity}-title">{text(title)}</h2>{body}</section>'


def details(summary: str, body: str) -> str:
    """Return a body that opens on demand."""
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def items(values: Iterable[object], *, kind: str = "") -> str:
    """Return a list of texts; nothing where there are none."""
    listed = "".join(f"<li>{text(value)}</li>" for value in values)
    return f"<ul{f' class={kind}' if kind else ''}>{listed}</ul>" if listed else ""


def search(noun: str) -> str:
    """Return the field that searches names."""
    return (
        '<search class="search"><form autocomplete="off">'
        f'<label for="search">Find a {text(noun)}</label>'
        '<input id="search" type="search" placeholder="part of a name, * and ? allowed" spellcheck="false"'
        ' aria-describedby="search-answer">'
        '<output id="search-answer" for="search" aria-live="polite"></output></form></search>'
    )


def name_of(source: object) -> str:
    """Return the last two names of a path, which is what a person calls a checkpoint."""
    return "/".join(PurePath(str(source)).parts[-2:]) or str(source)


def page(kind: str, heading: str, subtitle: str, rest: str, main: str, *, name: str, data: object) -> str:
    """Return a page of a kind of `SCRIPTS`: what it is about, what of it, and the name of such pages, all plain text.

    `rest`, `main`: HTML in which every text from elsewhere is escaped: the rest of the head, and the contents. `data`:
    JSON-able; the scripts read it.
    """
    style = "\n".join(_asset(f"{one}.css") for one in STYLES)
    script = '"use strict";\n' + "\n".join(_asset(f"{one}.js") for one in SCRIPTS[kind])
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    body = (
        '<a class="unseen skip" href="#main">Skip to the contents</a>'
        f'<header><h1>{text(heading)}</h1><p class="quiet">{text(subtitle)}</p>{rest}</header>'
        '<noscript><p class="warnings">The maps and tables of this page need scripts.</p></noscript>'
        f'<main id="main">{main}</main>'
        f"<footer>Made by zckpt {text(__version__)}. This page is complete in itself and loads nothing.</footer>"
    )
    title = text(f"{heading}: {name}")
    return Template(_asset("page.html")).substitute(
        policy=policy, title=title, style=style, kind=kind, body=body, data=embedded(data), script=script
    )


def embedded(data: object) -> str:
    """Return JSON that is safe inside a script element: nothing in it can end the element or start a comment."""
    plain = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@lru_cache
def _asset(name: str) -> str:
    return (files("zckpt.report.page") / "assets" / name).read_text("utf-8")


def _digest(content: str) -> str:
    """Return the source expression that allows exactly this inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
