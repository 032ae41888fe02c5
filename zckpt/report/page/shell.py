"""One HTML file: style sheet, scripts and data inside, and a policy that lets it load and send nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from importlib.resources import files
from string import Template

from zckpt.report.page.markup import text

STYLES = ("base", "tables", "map", "figures", "media")
"""The style sheet's parts; a later one overrides those before it."""

_MAP = ("map_model", "map_bands", "map_runs", "map_draw", "map_words", "map_tools", "map_zoom", "map", "treemap")

SCRIPTS = {
    "inspect": ("format", "search", "table", *_MAP, "page"),
    "diff": ("format", "search", "table", "heat", "page"),
    "series": ("format", "search", "table", "curves", "series", "page"),
    "verify": ("format", "search", "table", *_MAP, "page"),
}
"""The scripts of each kind of page, in the order in which they use each other."""


def page(kind: str, *, title: str, body: str, data: object) -> str:
    """Return a page.

    Parameters
    ----------
    kind : {"inspect", "diff", "series", "verify"}
    title : str
        Plain text.
    body : str
        HTML in which every text from elsewhere is escaped.
    data : object
        JSON-able; the scripts read it.
    """
    style = "\n".join(_asset(f"{name}.css") for name in STYLES)
    script = '"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in SCRIPTS[kind])
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_asset("page.html")).substitute(
        policy=policy, title=text(title), style=style, kind=kind, body=body, data=embedded(data), script=script
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
