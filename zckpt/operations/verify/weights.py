"""Weights that are not their masters, rounded: single damage, or a file of another step or run.

From what was read to findings. A damaged record explains whatever else is wrong with the elements in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from zckpt.codes import (
    BUFFER_NAN,
    BUFFERS_DIFFER,
    CHECKSUM,
    NEGATIVE,
    NOT_FINITE,
    OTHER_RUN,
    PADDING,
    REPLICAS_DIFFER,
    STAGES_DIFFER,
    TIED_DIFFER,
    WEIGHT_MISMATCH,
)
from zckpt.compare.weights import Comparison
from zckpt.engine.checking import Sum
from zckpt.errors import listed
from zckpt.operations.verify.deep import Outcome, Tally
from zckpt.operations.verify.findings import Finding
from zckpt.operations.verify.inventory import BUFFER, Inventory, Subject
from zckpt.operations.verify.inventory import PADDING as PADDING_KIND
from zckpt.state import Checkpoint, Duplicate, Slot, Span, Spans, by_key

MOST = 0.75
"""Share of a file's parameters that differ in a file of another step or run: all but those that were not trained."""

FEWEST = 3
"""Compared parameters of a file below which nothing is concluded from how many differ."""


COUNTED = {PADDING: ("nonzero",), NEGATIVE: ("negative",), BUFFER_NAN: ("nan",), NOT_FINITE: ("nan", "inf")}
"""What of a tally a finding counts."""

_OF_KINDS = {PADDING_KIND: PADDING, BUFFER: BUFFER_NAN}


def weight_findings(compared: Iterable[Comparison]) -> Iterator[Finding]:
    """Yield a finding for each file in which masters do not round to their weights."""
    by_file = by_key((one.path, one) for one in compared)
    counts = {path: len({one.parameter for one in some}) for path, some in by_file.items()}
    wrong = {path: [one for one in some if one.num_different] for path, some in by_file.items()}
    names = {path: tuple(dict.fromkeys(one.parameter for one in found)) for path, found in wrong.items()}
    foreign = [path for path, count in counts.items() if count >= FEWEST and len(names[path]) >= MOST * count]
    if foreign and len(foreign) == len(by_file):
        every = tuple(dict.fromkeys(name for path in foreign for name in names[path]))
        first = wrong[foreign[0]][0]
        yield Finding(
            OTHER_RUN,
            f"the weights of this file are not the masters of the optimizer's {len(foreign)} files, rounded: "
            f"{len(every)} parameters differ",
            first.weight_path,
            every,
            "a model and an optimizer of one step",
            first.detail,
            ranks=(),
        )
        return
    for path, found in wrong.items():
        if not found:
            continue
        first, its = found[0], names[path]
        if path in foreign:
            what = f"masters of {len(its)} of {counts[path]} parameters do not round to their weights"
            yield Finding(OTHER_RUN, what, path, its, "a file of this step and run", first.detail)
            continue
        count, total = sum(one.num_different for one in found), sum(one.numel for one in found)
        what = f"{listed(its)}: {count} of {total} elements of the weight are not the master, rounded"
        advice = f"one of the two is damaged, here or in {first.weight_path}"
        yield Finding(WEIGHT_MISMATCH, what, path, its, None, first.detail, advice)


def damage_findings(
    outcome: Outcome, inventory: Inventory, wrong: Mapping[Sum, int], checkpoint: Checkpoint | None
) -> Iterator[Finding]:
    """Yield findings about checksums, elements, weights and copies.

    `wrong`: damaged records, each with the CRC-32 of what is there; no checkpoint: it could not be opened.
    """
    suspects: dict[Sum | None, set[str]] = {}  # by damaged record, in whose elements something is wrong
    for subject, checksum in outcome.tallies:
        if checksum in wrong:
            suspects.setdefault(checksum, set()).add(subject.name)
    compared = []
    for (subject, path, weight_path, *checksums), unequal in outcome.compared.items():
        damaged = [one for one in checksums if one in wrong]
        for checksum in damaged if unequal.count else ():
            suspects.setdefault(checksum, set()).add(subject.name)
        if not damaged:
            compared.append(Comparison(subject.name, path, weight_path, unequal.numel, unequal.count, unequal.detail))
    yield from _damaged(wrong, suspects, checkpoint)
    yield from _elements(outcome, inventory, wrong)
    yield from weight_findings(compared)
    yield from _copies(outcome, [] if checkpoint is None else checkpoint.duplicates, wrong)


def _damaged(
    wrong: Mapping[Sum, int], suspects: Mapping[Sum | None, set[str]], checkpoint: Checkpoint | None
) -> Iterator[Finding]:
    """Yield a finding for each damaged record, with the parameters and buffers that have elements in it."""
    paths = {one.path for one in wrong}
    held = by_key(
        (span.path, (*span.reach, parameter.name, key))
        for parameter in (checkpoint.holders() if checkpoint is not None and wrong else ())
        for key, slot in parameter.slots.items()
        for span in _spans(slot, paths)
    )
    for one, crc in sorted(wrong.items(), key=lambda item: (item[0].path, item[0].offset)):
        inside: dict[str, str] = {}
        for begin, end, name, key in held.get(one.path, ()):
            if begin < one.offset + one.nbytes and one.offset < end:
                inside.setdefault(name, key)
        names = [name for name in inside if name in suspects.get(one, ())] or list(inside)
        what = f": {', '.join(dict.fromkeys(inside[name] for name in names))} of {listed(names)}" if names else ""
        yield Finding(
            CHECKSUM,
            f"{one.name} is damaged{what}",
            one.path,
            tuple(names),
            f"CRC-32 {one.crc32:08x}",
            f"{crc:08x}",
        )


def _spans(slot: Slot, paths: Collection[str] | None = None) -> list[Span]:
    """Return the spans of a slot that hold any elements: all, or those in some files."""
    return [
        span
        for spans in slot.sets
        for span in (spans.within(paths) if paths is not None and isinstance(spans, Spans) else spans)
        if span.extent.numel and (paths is None or span.path in paths)
    ]


def _elements(outcome: Outcome, inventory: Inventory, wrong: Collection[Sum | None]) -> Iterator[Finding]:
    """Yield a finding for each file and slot in which elements are not what they can be."""
    unsummed = {subject for subject, checksum in outcome.tallies if checksum is None}
    files: dict[Subject, str] = {}
    for where in sorted(inventory.pieces) if unsummed else ():
        for one in inventory.pieces[where]:
            many = one.many
            if many is None or unsummed.isdisjoint(many.subjects):
                files.setdefault(one.subject, where)
                continue
            for index, *_ in many.within(one.first, one.first + one.numel).tolist():
                files.setdefault(many.subjects[index], where)
    groups = by_key(
        ((code, subject.slot, files.get(subject) if checksum is None else checksum.path), (subject.name, tally))
        for (subject, checksum), tally in sorted(outcome.tallies.items(), key=lambda item: item[0][0])
        if checksum not in wrong
        for code in (_OF_KINDS.get(subject.kind, NOT_FINITE), NEGATIVE)
        if any(getattr(tally, one) for one in COUNTED[code])
    )
    for (code, slot, path), found in groups.items():
        names = tuple(dict.fromkeys(name for name, _ in found if name))
        tallies = [tally for _, tally in found]
        counts = [sum(getattr(tally, one) for one in COUNTED[code]) for tally in tallies]
        total = sum(counts)
        if len(names) > 1:
            each = [f"{name} {count}" for (name, _), count in zip(found, counts, strict=True)]
            said = "; ".join(each[:8]) + (" ..." if len(each) > 8 else "")
        else:
            said = f"{total}, first at {'byte' if code == PADDING else 'element'} {tallies[0].first}"
        expected = "zeros" if code == PADDING else "none"
        what = _message(code, slot, names, tallies, total)
        yield Finding(code, what, path, names, expected, said)


def _message(code: str, slot: str, names: Sequence[str], tallies: Sequence[Tally], total: int) -> str:
    if code == PADDING:
        return f"padding of {slot}: {total} bytes are not zero"
    of = f"{slot} of {listed(names)}"
    if code == NEGATIVE:
        return f"{of}: {total} negative {'element' if total == 1 else 'elements'}"
    kinds = ((sum(getattr(tally, kind.lower()) for tally in tallies), kind) for kind in ("NaN", "Inf"))
    return f"{of}: {' and '.join(f'{n} {kind}' for n, kind in kinds if n)}"


def _copies(outcome: Outcome, duplicates: Sequence[Duplicate], damaged: Collection[Sum]) -> Iterator[Finding]:
    codes = {
        "tied": TIED_DIFFER,
        "parameter": REPLICAS_DIFFER,
        "layer": STAGES_DIFFER,
        "buffer": BUFFERS_DIFFER,
    }
    for number, unequal in sorted(outcome.duplicates.items()):
        one = duplicates[number]
        if not unequal.count or any(
            record.path == span.path and span.reach[0] < record.offset + record.nbytes and record.offset < span.reach[1]
            for span in [*_spans(one.slot), *_spans(one.original)]
            for record in damaged
        ):
            continue
        path, original = one.slot.spans[0].path, one.original.spans[0].path
        is_rounding = unequal.apart <= unequal.size / 4  # of many steps, too; two others differ by double their size
        names = (one.name,) if one.name == one.of else (one.of, one.name)
        of = f" and {one.of}" if one.name != one.of else f" here and in {original}" if original != path else ""
        yield Finding(
            codes[one.kind if one.kind != "layer" or is_rounding else "parameter"],
            f"{one.slot.name} of {one.name}{of}: {unequal.count} of {one.slot.numel} elements differ",
            path,
            names,
            "equal bytes" if one.slot.dtype == one.original.dtype else f"its {one.original.name} as {one.slot.dtype}",
            f"first at element {unequal.first}",
            ranks=() if one.rank is None else (one.rank,),
        )
