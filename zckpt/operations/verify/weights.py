"""Weights that are not their masters, rounded: single damage, or a file of another step or run.

From what was read to findings. A damaged record explains whatever else is wrong with the elements in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zckpt.codes import (
    BUFFER_NAN,
    BUFFERS_DIFFER,
    CHECKSUM,
    NEGATIVE,
    NOT_FINITE,
    OTHER_RUN,
    PADDING,
    REPLICAS_DIFFER,
    TIED_DIFFER,
    WEIGHT_MISMATCH,
)
from zckpt.engine.checking import Sum
from zckpt.errors import listed
from zckpt.operations.verify.deep import Outcome
from zckpt.operations.verify.elements import Tally
from zckpt.operations.verify.findings import Finding
from zckpt.operations.verify.inventory import BUFFER, Inventory, Subject
from zckpt.operations.verify.inventory import PADDING as PADDING_KIND
from zckpt.operations.verify.structure import Ranks
from zckpt.state import Checkpoint, Slot, Span, Spans

MOST = 0.75
"""Share of a file's parameters that differ in a file of another step or run: all but those that were not trained."""

FEWEST = 3
"""Compared parameters of a file below which nothing is concluded from how many differ."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Elements of a master that were held against its weight.

    Parameters
    ----------
    parameter : str
    path, weight_path : str
        Files of the master and of the weight.
    numel : int, elements
    num_different : int, elements
    detail : str
        Of the first difference: where, what is stored and what should be.
    """

    parameter: str
    path: str
    weight_path: str
    numel: int
    num_different: int = 0
    detail: str = ""


def weight_findings(compared: Iterable[Comparison], ranks: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Yield a finding for each file in which masters do not round to their weights.

    Parameters
    ----------
    compared : iterable of Comparison
    ranks : mapping of str to tuple of int
        Ranks that wrote each file.
    """
    by_file: dict[str, dict[str, list[Comparison]]] = {}
    for one in compared:
        by_file.setdefault(one.path, {}).setdefault(one.parameter, []).append(one)
    wrong = {path: _different(parameters) for path, parameters in by_file.items()}
    foreign = [
        path
        for path, names in wrong.items()
        if len(by_file[path]) >= FEWEST and len(names) >= MOST * len(by_file[path])
    ]
    if foreign and len(foreign) == len(by_file):
        names = list(dict.fromkeys(name for path in foreign for name in wrong[path]))
        first = by_file[foreign[0]][names[0]][0]
        yield Finding(
            OTHER_RUN,
            f"the weights of this file are not the masters of the optimizer's {len(foreign)} files, rounded: "
            f"{len(names)} parameters differ",
            first.weight_path,
            parameters=tuple(names),
            expected="a model and an optimizer of one step",
            found=first.detail,
        )
        return
    for path, names in wrong.items():
        if not names:
            continue
        found = [one for name in names for one in by_file[path][name] if one.num_different]
        if path in foreign:
            yield Finding(
                OTHER_RUN,
                f"masters of {len(names)} of {len(by_file[path])} parameters do not round to their weights",
                path,
                ranks.get(path, ()),
                tuple(names),
                "a file of this step and run",
                found[0].detail,
            )
            continue
        count, total = sum(one.num_different for one in found), sum(one.numel for one in found)
        yield Finding(
            WEIGHT_MISMATCH,
            f"{listed(names)}: {count} of {total} elements of the weight are not the master, rounded",
            path,
            ranks.get(path, ()),
            tuple(names),
            None,
            found[0].detail,
            f"one of the two is damaged, here or in {found[0].weight_path}",
        )


def _different(parameters: Mapping[str, list[Comparison]]) -> list[str]:
    return [name for name, found in parameters.items() if any(one.num_different for one in found)]


class Damage:
    """The records that are damaged, and what lies in them.

    Parameters
    ----------
    sums : sequence of Sum
    wrong : mapping of int to int
        Index of each damaged record to the CRC-32 of what is there.
    checkpoint : Checkpoint or None
        None where it could not be opened.
    """

    def __init__(self, sums: Sequence[Sum], wrong: Mapping[int, int], checkpoint: Checkpoint | None) -> None:
        self.sums = sums
        self.wrong = wrong
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        for number in wrong:
            one = sums[number]
            self._ranges.setdefault(one.path, []).append((one.offset, one.offset + one.nbytes))
        self._checkpoint = checkpoint
        self._held: dict[str, list[tuple[int, int, str, str]]] | None = None

    def explains(self, spans: Iterable[Span]) -> bool:
        """Tell whether any of these bytes lie in a damaged record."""
        return any(
            low < end and begin < high
            for span in spans
            for begin, end in [span.reach]
            for low, high in self._ranges.get(span.path, ())
        )

    def findings(self, suspects: Mapping[int, set[str]], ranks: Ranks) -> Iterator[Finding]:
        """Yield a finding for each damaged record.

        Parameters
        ----------
        suspects : mapping of int to set of str
            Parameters in a record in whose elements something is wrong.
        ranks : mapping
        """
        for number, found in sorted(self.wrong.items()):
            one = self.sums[number]
            inside = self._inside(one)
            names = [name for name in inside if name in suspects.get(number, ())] or list(inside)
            what = f": {', '.join(dict.fromkeys(inside[name] for name in names))} of {listed(names)}" if names else ""
            yield Finding(
                CHECKSUM,
                f"{one.name} is damaged{what}",
                one.path,
                ranks.get(one.path, ()),
                tuple(names),
                f"CRC-32 {one.crc32:08x}",
                f"{found:08x}",
            )

    def _inside(self, one: Sum) -> dict[str, str]:
        """Return the parameters and buffers that have elements in a record, with the slot."""
        if self._checkpoint is None:
            return {}
        if self._held is None:
            self._held = _held(self._checkpoint, self._ranges)
        low, high = one.offset, one.offset + one.nbytes
        found: dict[str, str] = {}
        for begin, end, name, key in self._held.get(one.path, ()):
            if begin < high and low < end:
                found.setdefault(name, key)
        return found


def _held(checkpoint: Checkpoint, paths: Collection[str]) -> dict[str, list[tuple[int, int, str, str]]]:
    """Return what lies in some files, in the checkpoint's order: first and last byte, parameter or buffer, slot."""
    found: dict[str, list[tuple[int, int, str, str]]] = {}
    for parameter in checkpoint.holders():
        for key, slot in parameter.slots.items():
            for span in _spans(slot, paths):
                found.setdefault(span.path, []).append((*span.reach, parameter.name, key))
    return found


def _spans(slot: Slot, paths: Collection[str] | None = None) -> list[Span]:
    """Return the spans of a slot that hold any elements: all, or those in some files."""
    return [
        span
        for spans in (slot.spans, *slot.replicas)
        for span in (spans.within(paths) if paths is not None and isinstance(spans, Spans) else spans)
        if span.extent.numel and (paths is None or span.path in paths)
    ]


def damage_findings(outcome: Outcome, inventory: Inventory, damage: Damage, ranks: Ranks) -> Iterator[Finding]:
    """Yield findings about checksums, elements, weights and copies."""
    suspects: dict[int, set[str]] = {}
    for (subject, checksum), _ in outcome.tallies.items():
        if checksum in damage.wrong:
            suspects.setdefault(checksum, set()).add(inventory.subjects[subject].name)
    compared = []
    for (subject, path, weight_path, mine, its), (numel, unequal) in outcome.compared.items():
        name, wrong = inventory.subjects[subject].name, {mine, its} & damage.wrong.keys()
        for checksum in wrong if unequal.count else ():
            suspects.setdefault(checksum, set()).add(name)
        if not wrong:
            compared.append(Comparison(name, path, weight_path, numel, unequal.count, unequal.detail))
    yield from damage.findings(suspects, ranks)
    yield from _elements(outcome, inventory, damage, ranks)
    yield from weight_findings(compared, ranks)
    yield from _copies(outcome, inventory, damage)


Group = tuple[str, str, str | None]
"""Code, slot and file."""


def _elements(outcome: Outcome, inventory: Inventory, damage: Damage, ranks: Ranks) -> Iterator[Finding]:
    """Yield a finding for each file and slot in which elements are not what they can be."""
    groups: dict[Group, list[tuple[Subject, Tally]]] = {}
    unsummed = {number for number, checksum in outcome.tallies if checksum < 0}
    files: dict[int, str] = {}
    for where in sorted(inventory.pieces) if unsummed else ():
        for one in inventory.pieces[where]:
            many = one.many
            if many is None or unsummed.isdisjoint(many.subjects):
                files.setdefault(one.subject, where)
                continue
            for index, *_ in many.within(one.first, one.first + one.numel).tolist():
                files.setdefault(many.subjects[index], where)
    for (number, checksum), tally in sorted(outcome.tallies.items()):
        if checksum in damage.wrong:
            continue
        subject = inventory.subjects[number]
        path = damage.sums[checksum].path if checksum >= 0 else files.get(number)
        for code in _codes(subject, tally):
            groups.setdefault((code, subject.slot, path), []).append((subject, tally))
    for (code, slot, path), found in groups.items():
        names = tuple(dict.fromkeys(subject.name for subject, _ in found if subject.name))
        counts = [(s.name, _count(code, t), t.first) for s, t in found]
        first = next(((name, at) for name, _, at in counts), ("", 0))
        total = sum(count for _, count, _ in counts)
        yield Finding(
            code,
            _message(code, slot, names, [tally for _, tally in found], total),
            path,
            ranks.get(path or "", ()),
            names,
            "zeros" if code == PADDING else "none",
            "; ".join(f"{name} {count}" for name, count, _ in counts[:8]) + (" ..." if len(counts) > 8 else "")
            if len(names) > 1
            else f"{total}, first at {'byte' if code == PADDING else 'element'} {first[1]}",
        )


def _codes(subject: Subject, tally: Tally) -> Iterator[str]:
    if subject.kind == PADDING_KIND:
        yield PADDING
    if subject.kind == BUFFER and tally.nan:
        yield BUFFER_NAN
    if subject.kind not in (BUFFER, PADDING_KIND) and (tally.nan or tally.inf):
        yield NOT_FINITE
    if tally.negative:
        yield NEGATIVE


def _count(code: str, tally: Tally) -> int:
    return {PADDING: tally.nonzero, NEGATIVE: tally.negative}.get(code, tally.nan + tally.inf)


def _message(code: str, slot: str, names: Sequence[str], tallies: Sequence[Tally], total: int) -> str:
    if code == PADDING:
        return f"padding of {slot}: {total} bytes are not zero"
    of = f"{slot} of {listed(names)}"
    if code == NEGATIVE:
        return f"{of}: {total} negative {'element' if total == 1 else 'elements'}"
    nan, inf = sum(tally.nan for tally in tallies), sum(tally.inf for tally in tallies)
    return f"{of}: {' and '.join(f'{n} {what}' for n, what in ((nan, 'NaN'), (inf, 'Inf')) if n)}"


def _copies(outcome: Outcome, inventory: Inventory, damage: Damage) -> Iterator[Finding]:
    codes = {"tied": TIED_DIFFER, "parameter": REPLICAS_DIFFER, "buffer": BUFFERS_DIFFER}
    for number, unequal in sorted(outcome.duplicates.items()):
        one = inventory.duplicates[number]
        if not unequal.count or damage.explains([*_spans(one.slot), *_spans(one.original)]):
            continue
        path, original = one.slot.spans[0].path, one.original.spans[0].path
        names = (one.name,) if one.name == one.of else (one.of, one.name)
        of = f" and {one.of}" if one.name != one.of else f" here and in {original}" if original != path else ""
        yield Finding(
            codes[one.kind],
            f"{one.slot.name} of {one.name}{of}: {unequal.count} of {one.slot.numel} elements differ",
            path,
            () if one.rank is None else (one.rank,),
            names,
            "equal bytes" if one.slot.dtype == one.original.dtype else f"its {one.original.name} as {one.slot.dtype}",
            f"first at element {unequal.first}",
        )
