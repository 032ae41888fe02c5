"""What `zckpt scan` prints, from its JSON document, and the same as SARIF 2.1.0, for tools that show findings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from urllib.parse import quote

from zckpt.report.text import Document, count, printable, table
from zckpt.state import by_key
from zckpt.torchfile.grades import DATA, GRADES, KNOWN
from zckpt.version import __version__

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


def render(document: Document) -> str:
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
