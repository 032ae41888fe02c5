"""Text: aligned tables, units a person reads, and two short reports: what a verb wrote, and which formats there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from math import prod
from typing import Any, TypeVar, cast

from zckpt.errors import shortened, without_controls

Value = TypeVar("Value")

Document = Mapping[str, Any]
"""What `--json` prints of a result, or a part of it."""

Paint = Callable[[str, str], str]
"""Return a text in the colour of what it means: a severity, or `good`; as it is where there are no colours."""

SHOWN_CHARACTERS = 1200
"""Of a name, a path or a line; `--json` has all of them."""

SHOWN_CELL = 200
"""Characters of a cell of a table, whose other rows are filled to the same width."""

SHOWN_FILES = 8
"""More files than this are counted, not listed."""

_LINES = {ord("\n"): "\ufffd", ord("\t"): "\ufffd"}


def size(nbytes: int) -> str:
    """Return bytes with a decimal unit: `4.21 GB`."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def count(number: int, noun: str) -> str:
    """Return a number with thousands separated and a noun that agrees with it."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(value: Value) -> Value:
    """Return a document, or a text of one line, in which no name can drive a terminal, add a line or fill the screen.

    Control characters are replaced, line feeds too, and what is longer than any name that people give is cut.
    """
    cleaned: object = value
    if isinstance(value, str):
        if not value.isprintable() or len(value) > SHOWN_CHARACTERS:
            cleaned = shortened(without_controls(value.translate(_LINES)), SHOWN_CHARACTERS)
    elif isinstance(value, dict):
        cleaned = found = {}
        for key, one in value.items():
            text = printable(key)
            while text in found:  # of another key that differs in what is not shown
                text = f"{text}'"
            found[text] = printable(one)
    elif isinstance(value, list):
        cleaned = [printable(one) for one in value]
    return cast("Value", cleaned)


def fitted(line: str, width: int) -> str:
    """Return a line cut to a width."""
    return line if len(line) <= width else line[: max(width - 3, 1)] + "..."


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table; columns in `right` are aligned to the right."""

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:,}" if type(value) is int else shortened(str(value), SHOWN_CELL)

    text = [list(header), *([cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return [
        "  ".join(f"{one:{'>' if i in right else '<'}{widths[i]}}" for i, one in enumerate(row)).rstrip()
        for row in text
    ]


NAME_WIDTH = 20
"""A name is not cut to less than this, however narrow the terminal is."""


def named(names: Sequence[str], lines: Sequence[str], width: int) -> list[str]:
    """Return lines with names before them, which are cut to what `width` columns leave."""
    room = max(min(max(map(len, names)), width - max(map(len, lines)) - 2), NAME_WIDTH)
    return [f"{shortened(name, room):<{room}}  {line}" for name, line in zip(names, lines, strict=True)]


def more(found: Sized, limit: int) -> list[str]:
    """Return a line that says how many rows are not shown."""
    left = len(found) - limit
    return [f"  and {left:,} more; --limit {len(found)} or --json lists all"] if left > 0 else []


def when(date: str) -> str:
    """Return a date of ISO 8601, to the minute."""
    return date[:16].replace("T", " ")


def about(one: Document) -> str:
    """Return format, stage, ranks and step of a checkpoint in a few words."""
    words = [
        str(one.get("format") or ""),
        "" if one.get("zero_stage") is None else f"ZeRO stage {one['zero_stage']}",
        "" if one.get("world_size") is None else count(one["world_size"], "rank"),
        "" if one.get("step") is None else f"step {one['step']:,}",
    ]
    return ", ".join(filter(None, words))


def written(document: Document) -> str:
    """Return the document of a result, `Written.as_dict()`, as text."""
    verb, files = "would write" if document["dry_run"] else "wrote", document["files"]
    lines = [f"{verb} {path}" for path in files[:SHOWN_FILES]]
    if len(files) > SHOWN_FILES:
        lines.append(f"... and {len(files) - SHOWN_FILES} more files")
    what = count(document["num_tensors"], "tensor") if "num_tensors" in document else count(len(files), "file")
    lines.append(
        f"{what}, {size(document['write_nbytes'])}; {size(document['read_nbytes'])} read, "
        f"at most {size(document['memory_nbytes'])} of buffers"
    )
    if document["foresight"] is not None:
        lines += foresight(document["foresight"])
    if document["checked_elements"]:
        lines.append(f"masters agree with their weights in the {document['checked_elements']:,} elements compared")
    if document["checksummed_nbytes"]:
        lines.append(f"{size(document['checksummed_nbytes'])} of the source agree with the checksums in its files")
    if document["verified_nbytes"]:
        lines.append(f"{size(document['verified_nbytes'])} compared with the source, byte for byte")
    if "saved_nbytes" in document:
        saved = document["saved_nbytes"]
        rows = sorted(saved.items(), key=lambda one: -one[1])
        lines += table(["saved", "bytes"], [*rows, ("in all", sum(saved.values()))], right=(1,))
    lines += [f"dropped {one}" for one in document["dropped"]]
    lines += [
        f"left out {one['file']}{one['place'] and ':'}{one['place']}: {one['what']} ({one['grade']})"
        for one in document.get("removed", ())
    ]
    lines += [elements(one, key) for key in ("missing", "filled") for one in document[key]]
    lines += [f"note: {note}" for note in document["notes"]]
    return with_warnings(lines, document["warnings"])


def with_warnings(lines: Iterable[str], warnings: Iterable[str]) -> str:
    """Return lines, and warnings behind them, as a text."""
    return "\n".join(map(printable, [*lines, *(f"warning: {warning}" for warning in warnings)]))


def elements(document: Document, what: str) -> str:
    """Return elements that are missing, or were filled, as a line: their ranges, or where these are within a box."""
    said = []
    for one in document["ranges"]:
        numbers = f"{one['start']:,} to {one['start'] + one['numel'] - 1:,}"
        is_whole = one["sizes"] == tuple(document["shape"])
        box = ", ".join(f"{low}:{low + n}" for low, n in zip(one["offsets"], one["sizes"], strict=True))
        inner = f"[{box}]" if one["numel"] == prod(one["sizes"]) else f"{numbers} of [{box}]"
        said.append(numbers if is_whole else inner)
    ranges = f"elements {'; '.join(said)} of {prod(document['shape']):,}" if said else f"all, from {document['file']}"
    return f"{what}: {document['slot']} of {document['name']}: {ranges}"


def foresight(document: Document) -> list[str]:
    """Return what a run will take, `Foresight.as_dict()`, as lines."""
    made = [count(document["num_files"], "file")]
    if document["num_directories"]:
        made.append(f"{document['num_directories']:,} director{'y' if document['num_directories'] == 1 else 'ies'}")
    there = [] if document["free_nbytes"] is None else [size(document["free_nbytes"])]
    there += [] if document["free_inodes"] is None else [count(document["free_inodes"], "inode")]
    lines = [f"makes {' and '.join(made)}" + (f"; {' and '.join(there)} are free" if there else "")]
    if document["free_memory_nbytes"] is not None:
        free, limit = size(document["free_memory_nbytes"]), document["memory_limit"]
        lines.append(f"buffers may take {size(document['buffers_nbytes'])}; {free} of memory are free by {limit}")
    requests, files = count(document["read_requests"], "byte range"), count(len(document["reads"]), "file")
    lines.append(f"reads {size(document['requested_nbytes'])} in {requests} of {files}")
    if document["seconds"] is not None:
        rates = [f"written and synced at {size(round(document['write_nbytes_per_second']))}/s"]
        if document["read_nbytes_per_second"] is not None:
            rates.insert(0, f"read at {size(round(document['read_nbytes_per_second']))}/s")
        lines.append(f"takes about {document['seconds']:.2g} s, by a sample that was {' and '.join(rates)}")
    return lines


def formats(document: Document) -> str:
    """Return a table of formats, then the options of each that is written."""
    every = document["formats"]
    verbs = (
        ["read", *(["convert"] if one["written"] else []), *(verb for verb in ("reshard", "strip") if one[verb])]
        for one in every
    )
    rows = [
        (one["name"], one["title"], ", ".join(its), "" if one["built_in"] else "of another package")
        for one, its in zip(every, verbs, strict=True)
    ]
    lines = table(["format", "is", "verbs", ""], rows)
    for one in every:
        options = []
        for option in one["options"] if one["written"] else ():
            kind = "" if option["type"] == "bool" else f" {'|'.join(map(str, option['choices'])) or option['type']}"
            default = "" if option["default"] is None else f" Default: {option['default']}."
            options.append((f"  --{option['name'].replace('_', '-')}{kind}", f"{option['help']}{default}"))
        if one["written"]:
            lines += ["", f"--to {one['name']}: {one['writes']}", *table(["", ""], options)[1:]]
    lines += ["", *(f"--map {one['name']}: {one['about']}" for one in document["maps"])]
    return "\n".join(lines + [""] * bool(document["broken"]) + [f"broken: {text}" for text in document["broken"]])
