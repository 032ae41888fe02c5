"""The text of `zckpt verify`, from its JSON document."""

from __future__ import annotations

import textwrap
from collections import Counter

from zckpt.report.text import Document, Paint, count, printable, size

MINIMUM_WIDTH = 40

LABEL_WIDTH = 9
"""Of `parameter`, the longest label, with no colon after it."""

SHOWN_NAMES = 8
SHOWN_FINDINGS = 200
"""More of them are counted, not listed; `--json` has all."""


def render(document: Document, *, width: int, paint: Paint) -> str:
    """Return the document as text.

    Parameters
    ----------
    document : dict
        From `Verification.document`.
    width : int, columns
        Of the terminal; longer lines are wrapped. No path and no name is cut that people give.
    paint : callable
        Colours a text.
    """
    document = printable(document)
    width = max(width, MINIMUM_WIDTH)
    lines = _heading(document, width, paint)
    findings = document["findings"]
    for one in findings[:SHOWN_FINDINGS]:
        severity = one["severity"]
        lines += ["", f"{paint(f'{severity:<8}', severity)} {one['code']}  {one['title']}"]
        names, ranks = one["parameters"], one["ranks"]
        more = f" and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else ""
        facts = [
            ("what", one["message"]),
            ("file", one["file"]),
            ("rank" if len(ranks) == 1 else "ranks", ", ".join(map(str, ranks))),
            ("parameter" if len(names) == 1 else "of", ", ".join(names[:SHOWN_NAMES]) + more),
            ("expected", one["expected"]),
            ("found", one["found"]),
            ("to do", one["advice"]),
        ]
        for label, text in facts:
            if text is not None:
                lines += _wrapped(text, width, f"  {label:<{LABEL_WIDTH}}  ")
    if len(findings) > SHOWN_FINDINGS:
        lines += ["", f"and {count(len(findings) - SHOWN_FINDINGS, 'more finding')}"]
    return "\n".join(lines)


def _heading(document: Document, width: int, paint: Paint) -> list[str]:
    severities = Counter(finding["severity"] for finding in document["findings"])
    counts = ", ".join(count(severities[kind], kind) for kind in ("error", "warning", "note") if severities[kind])
    verdict = paint("sound", "good") if document["sound"] else paint("unsound", "error")
    kind = f" ({document['format']})" if document["format"] else ""
    checked = document["checked"]
    facts = [count(checked[f"{noun}s"], noun) for noun in ("file", "parameter", "slot")]
    if document["deep"]:
        facts += [
            f"{count(checked['elements'], 'element')} looked at",
            f"{size(checked['nbytes'])} read",
            count(checked["checksums"], "checksum"),
        ]
    elif checked["elements"]:
        facts.append(f"a sample of {count(checked['elements'], 'element')} of masters compared with weights")
    lines = [f"{verdict}  {document['source']}{kind}", *_wrapped(", ".join(facts), width, "checked  ")]
    if document["checkpoint"] not in (None, document["source"]):
        others = f"{document['checkpoint']} only; zckpt list {document['source']} looks at each checkpoint"
        lines += _wrapped(others, width, "of       ")
    if not document["deep"]:
        lines.append("         structure only: --deep reads every byte")
    if document["fingerprint"]:
        lines.append(f"digest   {document['fingerprint']}")
    return [*lines, f"found    {counts}"] if counts else lines


def _wrapped(text: str, width: int, label: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
