"""What `resume-check` found, as text, from its document."""

from __future__ import annotations

from zckpt.formats.registry import find_format
from zckpt.report.text import Document, count, printable

VERDICTS = {
    "whole": "resumes, and all of it comes back",
    "partly": "resumes, and this does not come back",
    "no": "does not resume",
    "unknown": "is not known to resume",
}


def render(document: Document) -> str:
    """Return the document of `resume-check` as text."""
    document = printable(document)
    ranks = count(document["world_size"], "rank")
    form = find_format(document["format"])
    lines = [f"{document['source']} ({document['format'] if form is None else form.title}) in {document['title']}, "
             f"{ranks}: {VERDICTS[document['verdict']]}"]  # fmt: skip
    lines += [f"  {one['part']}: {one['why']}" for one in document["not_back"]]
    lines += [f"  because {one}" for one in document["why"]]
    if document["comes_back"]:
        lines.append("comes back: " + ", ".join(one["part"] for one in document["comes_back"]))
    said = (
        ("with", document["call"]), ("set up", document["given"]), ("not kept by it", document["yours"]),
        ("otherwise", document["advice"]),
    )  # fmt: skip
    lines += [f"{name}: {text}" for name, text in said if text]
    lines += [f"run: {one}" for one in document["commands"]]
    if document["commands"]:
        lost = ", ".join(dict.fromkeys(one["part"] for one in document["not_back_after"]))
        lines.append(f"after that, does not come back: {lost}" if lost else "after that, all of it comes back")
    return "\n".join(lines)
