"""The text of `zckpt verify`, from its JSON document."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from zckpt.report.text import count, printable, size

Paint = Callable[[str, str], str]
"""Return a text in the colour of a severity, or of `good`; as it is where there are no colours."""

MINIMUM_WIDTH = 40

LABEL_WIDTH = 9
"""Of `parameter`, the longest label, with no colon after it."""

SHOWN_NAMES = 8
SHOWN_FINDINGS = 200
"""More of them are counted, not listed; `--json` has all."""


def render(document: dict[str, Any], *, width: int, paint: Paint | None = None) -> str:
    """Return the document as text.

    Parameters
    ----------
    document : dict
        From `Verification.document`.
    width : int, columns
        Of the terminal; longer lines are wrapped. No path and no name is cut that people give.
    paint : callable, optional
        Colours a text.
    """
    painted = paint or _plain
    document = printable(document)
    width = max(width, MINIMUM_WIDTH)
    lines = _heading(document, width, painted)
    findings = document["findings"]
    for finding in findings[:SHOWN_FINDINGS]:
        lines += ["", *_finding(finding, width, painted)]
    if len(findings) > SHOWN_FINDINGS:
        lines += ["", f"and {count(len(findings) - SHOWN_FINDINGS, 'more finding')}"]
    return "\n".join(lines)


def _plain(text: str, _: str) -> str:
    return text


def _heading(document: dict[str, Any], width: int, paint: Paint) -> list[str]:
    severities = Counter(finding["severity"] for finding in document["findings"])
    counts = ", ".join(count(severities[kind], kind) for kind in ("error", "warning", "note") if severities[kind])
    verdict = paint("sound", "good") if document["sound"] else paint("unsound", "error")
    kind = f" ({document['format']})" if document["format"] else ""
    lines = [f"{verdict}  {document['source']}{kind}"]
    checked = document["checked"]
    facts = [
        count(checked[key], noun) for key, noun in (("files", "file"), ("parameters", "parameter"), ("slots", "slot"))
    ]
    if document["deep"]:
        facts += [
            f"{count(checked['elements'], 'element')} looked at",
            f"{size(checked['nbytes'])} read",
            count(checked["checksums"], "checksum"),
        ]
    elif checked["elements"]:
        facts.append(f"{count(checked['elements'], 'element')} of masters held against weights")
    lines += _wrapped(", ".join(facts), width, "checked  ")
    if not document["deep"]:
        lines.append("         structure only: --deep reads every byte")
    if document["fingerprint"]:
        lines.append(f"digest   {document['fingerprint']}")
    if counts:
        lines.append(f"found    {counts}")
    return lines


def _finding(finding: dict[str, Any], width: int, paint: Paint) -> list[str]:
    severity = finding["severity"]
    lines = [f"{paint(f'{severity:<8}', severity)} {finding['code']}  {finding['title']}"]
    for label, text in _facts(finding):
        lines += _wrapped(text, width, f"  {label:<{LABEL_WIDTH}}  ")
    return lines


def _wrapped(text: str, width: int, label: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _facts(finding: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "what", finding["message"]
    if finding["file"]:
        yield "file", finding["file"]
    if finding["ranks"]:
        yield "rank" if len(finding["ranks"]) == 1 else "ranks", ", ".join(map(str, finding["ranks"]))
    names = finding["parameters"]
    if names:
        more = f" and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else ""
        yield "parameter" if len(names) == 1 else "of", ", ".join(names[:SHOWN_NAMES]) + more
    for key in ("expected", "found"):
        if finding[key] is not None:
            yield key, finding[key]
    if finding["advice"]:
        yield "to do", finding["advice"]
