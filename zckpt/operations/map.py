"""Where every element of a checkpoint lies, as compact plain data that a page or a picture is drawn from.

The map has a row for each rank, and one for the files that no single rank owns; its columns are the parameters, each
as wide as it has elements. What a row holds of a parameter is an extent:

    columns       | a a a a a | b b b | c c c c c c c c | padding
    model file    | = = = = = | = = = | = = = = = = = = |            weight
    rank 0        | = = = = = | =     |                 |            master, exp_avg, ...
    rank 1        |           |   = = | = = = =         |
    rank 2        |           |       |         = = = = | . .

Ranks that hold equal shares one after the other, as in ZeRO-3, are one extent whatever their number, so that the data
grows with the number of parameters plus the number of ranks and not with their product.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import field
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from zckpt.errors import UsageError
from zckpt.immutable import immutable, mutable
from zckpt.operations.open import Source, opened
from zckpt.operations.options import Salvaged, Unpack, shares
from zckpt.state import (
    ZEROS,
    Checkpoint,
    CutFiles,
    CutSpans,
    Document,
    Extent,
    Parameter,
    Result,
    Shape,
    Slot,
    SourceFile,
    by_key,
    itemsize,
    nbytes_of,
    positions,
    values_of,
)
from zckpt.state.boxes import Box, bounds, row_major
from zckpt.state.spans import LOST

SEVERAL = -2
NONE = -1


@immutable
class Map(Result):
    """Which elements of every slot lie on which rank, or in which file if there are no ranks; JSON-able.

    Parameters
    ----------
    source, format : str
    zero_stage, step : int or None
    slots : list of str
        In the order of colours.
    dtypes : list of [name, bytes of an element]
    root : str
        What `paths` are relative to.
    paths : list of str
    rows : list of dict
        `label`, `dp` and `mp` rank or None, `held` (bytes by slot), `padding` (bytes), `file_nbytes`, `paths` (by slot
        an index into `paths`; -1: holds none of it, -2: several files).
    parameters : list of dict
        `name`, `shape`, `numel`, `kind` (parameter, frozen, buffer, unnamed, tied), `group`, `owner` (of a tied one),
        `cuts`: [slots, dtypes, numel, extents] where `slots` are cut in the same way and `extents` is a flat list of
        row, count, start, share, stop, box: row + i holds elements [start + i * share, start + (i + 1) * share), the
        last one up to `stop`. Elements count along the flattened tensor; in a box that is not one range of it (`box` is
        an index into `boxes`, else -1), along the boxes, each flattened in turn.
    boxes : list of [offsets, sizes, start]
    padding : list of [group, row, elements, bytes]
    """

    source: str
    format: str
    zero_stage: int | None
    step: int | None
    slots: list[str]
    dtypes: list[list[object]]
    root: str
    paths: list[str]
    rows: list[Document]
    parameters: list[Document]
    boxes: list[list[object]]
    padding: list[list[int]]


@shares(Salvaged)
def map(  # noqa: A001  # the verb's name, as `open`
    source: Source,
    *,
    slots: Collection[str] | None = None,
    **shared: Unpack[Salvaged],
) -> Map:
    """Return which elements of every slot lie on which rank, or in which file. Reads no tensor.

    Parameters
    ----------
    source : path-like or Checkpoint
    slots : collection of str, optional
        Only these slots.
    **shared

    Raises
    ------
    UsageError
        There is no such slot, or an option cannot be used.
    SourceError
        The source cannot be opened.
    """
    checkpoint = opened(source, **shared)
    there = checkpoint.slot_names()
    unknown = [name for name in slots or () if name not in there]
    if unknown:
        raise UsageError(
            "no such slot", path=checkpoint.named, expected=f"some of {', '.join(there)}", found=", ".join(unknown)
        )
    rows = _Rows(checkpoint.files)
    chosen = [name for name in there if slots is None or name in slots]
    drawing = _Drawing(rows, positions(chosen))
    kinds = ("parameter", checkpoint.parameters), ("buffer", checkpoint.buffers), ("unnamed", checkpoint.unnamed)
    parameters = [drawing.parameter(one, kind) for kind, some in kinds for one in some.values()]
    drawing.count_cut()
    padding = _padding(checkpoint, rows)
    padded: Counter[int] = Counter()
    for _, row, _, nbytes in padding:
        padded[row] += nbytes
    order = rows.order(drawing.held)
    position = positions(order)
    for cut in (cut for one in parameters for cut in cast("list[list[Any]]", one["cuts"])):
        moved: list[int] = []
        for at in range(0, len(cut[3]), EXTENT_NUMBERS):
            row, *extent = cut[3][at : at + EXTENT_NUMBERS]
            _add_extent(moved, position[row], *extent)
        cut[3] = moved
    paths = sorted({path for path in drawing.sources.values() if path is not None})
    number: dict[str | None, int] = {None: SEVERAL, "": NONE, **positions(paths)}
    paths = [path.removeprefix(LOST) for path in paths]
    root = os.path.commonpath([Path(path).parent for path in paths]) if paths else ""
    lines: list[Document] = []
    for row in order:
        files = rows.files[row]
        lines.append({
            "label": rows.label(row),
            "dp": files[0].dp_rank,
            "mp": files[0].mp_rank,
            "held": drawing.held.get(row) or [0] * len(chosen),
            "padding": padded[row],
            "file_nbytes": nbytes_of(files),
            "paths": [number[drawing.sources.get((row, slot), "")] for slot in range(len(chosen))],
        })  # fmt: skip
    return Map(
        **values_of(checkpoint, ("source", "format", "zero_stage", "step")),
        slots=chosen,
        dtypes=[[name, itemsize(name)] for name in drawing.dtypes],
        root=root,
        paths=[os.path.relpath(path, root) if root else path for path in paths],
        rows=lines,
        parameters=parameters,
        boxes=[[list(offsets), list(sizes), start] for (offsets, sizes), (_, start) in drawing.boxes.items()],
        padding=[[group, position[row], numel, nbytes] for group, row, numel, nbytes in padding],
    )


@mutable
class _Drawing:
    """What is gathered while the spans of all slots are walked once."""

    rows: _Rows
    slots: dict[str, int]
    dtypes: dict[str, int] = field(default_factory=dict)
    boxes: dict[Box, tuple[int, int]] = field(default_factory=dict)
    """Of those that are not one range, the number, and where it starts."""
    held: dict[int, list[int]] = field(default_factory=dict)
    sources: dict[tuple[int, int], str | None] = field(default_factory=dict)
    """By row and slot, the file; None: several."""
    _cut: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _rows_of_files: dict[int, tuple[CutFiles, list[int], list[int]]] = field(default_factory=dict)

    def parameter(self, parameter: Parameter, kind: str) -> Document:
        if kind == "parameter" and parameter.tied_to is not None:
            kind = "tied"
        elif kind == "parameter" and parameter.frozen:
            kind = "frozen"
        cuts: list[tuple[list[int], list[int], int, list[int]]] = []
        for slot in parameter.slots.values():
            if slot.name not in self.slots:
                continue
            number, dtype = self.slots[slot.name], self.dtypes.setdefault(slot.dtype, len(self.dtypes))
            extents = self._extents(slot, number)
            for slots, dtypes, numel, same in cuts:
                if (numel, same) == (slot.numel, extents):
                    slots.append(number)
                    dtypes.append(dtype)
                    break
            else:
                cuts.append(([number], [dtype], slot.numel, extents))
        return {
            "name": parameter.name,
            "shape": list(parameter.shape),
            "dtype": parameter.dtype,
            "numel": parameter.numel,
            "kind": kind,
            "group": parameter.group,
            "cuts": [list(cut) for cut in cuts],
            **({} if parameter.tied_to is None else {"owner": parameter.tied_to}),
        }

    def _extents(self, slot: Slot, number: int) -> list[int]:
        extents: list[int] = []
        for spans in slot.sets:
            if isinstance(spans, CutSpans) and spans.shape == slot.shape:
                self._add_cut(extents, spans, number)
                continue
            for span in (one for one in spans if one.path != ZEROS):
                row, numel = self.rows.of(span.path), span.extent.numel
                self._count(row, number, span.path, numel * itemsize(span.dtype))
                if numel:
                    start, box = self._position(span.extent, slot.shape)
                    _add_extent(extents, row, 1, start, numel, start + numel, box)
        return extents

    def _add_cut(self, extents: list[int], spans: CutSpans, number: int) -> None:
        """Append what a rule says, which is one extent for all files whose rows follow one another."""
        files, width, origin = spans.files, spans.width, spans.origin
        if id(files) not in self._rows_of_files:
            rows = [self.rows.of(path) for path in files.paths]
            ends = list(range(1, len(rows) + 1))  # where those end that go on counting from each
            for at in reversed(range(len(rows) - 1)):
                if rows[at] + 1 == rows[at + 1]:
                    ends[at] = ends[at + 1]
            self._rows_of_files[id(files)] = files, rows, ends
        _, rows, ends = self._rows_of_files[id(files)]
        steps = self._cut.setdefault((id(files), number), [0] * (len(rows) + 1))
        at, end = spans.files_of(0, spans.numel)
        while at < end:
            stop = at + 1 if at * width < origin else min(end, ends[at])
            low, high = max(at * width - origin, 0), min(stop * width - origin, spans.numel)
            share = min(width, high - low)
            last = high - low - (stop - at - 1) * share
            for place, change in ((at, share), (stop - 1, last - share), (stop, -last)):
                steps[place] += change
            _add_extent(extents, rows[at], stop - at, low, share, high, NONE)
            at = stop

    def count_cut(self) -> None:
        """Count what files hold by rules, which have noted from which file on they hold more or less."""
        for (key, number), steps in self._cut.items():
            files, rows, _ = self._rows_of_files[key]
            for row, path, numel in zip(rows, files.paths, accumulate(steps)):  # noqa: B905  # one step more than files
                if numel:
                    self._count(row, number, path, numel * itemsize(files.dtype))

    def _count(self, row: int, slot: int, path: str, nbytes: int) -> None:
        self.held.setdefault(row, [0] * len(self.slots))[slot] += nbytes
        if self.sources.setdefault((row, slot), path) != path:
            self.sources[row, slot] = None

    def _position(self, extent: Extent, shape: Shape) -> tuple[int, int]:
        """Return where an extent starts on the parameter's axis, and the number of its box or -1 if that is one range.

        A box starts after the elements of those before it, if the tensor is cut in a grid of such boxes.
        """
        if extent.sizes == shape:
            return extent.start, NONE
        start, numel = 0, 1
        for offset, size, step in zip(extent.offsets, extent.sizes, row_major(shape), strict=True):
            start += numel * offset * step
            numel *= size
        low, high = bounds(Extent(extent.offsets, extent.sizes, 0, numel), shape)
        if high - low == numel:
            return start + extent.start, NONE
        box, _ = self.boxes.setdefault((extent.offsets, extent.sizes), (len(self.boxes), start))
        return start + extent.start, box


EXTENT_NUMBERS = 6
"""How many numbers each of the `extents` has: row, count, start, share, stop, box."""


def _add_extent(extents: list[int], row: int, count: int, start: int, share: int, stop: int, box: int) -> None:
    """Append an extent, or let the one before it cover its rows, or the first of them, too."""
    if extents:
        first, rows, begin, size, end, last_box = extents[-EXTENT_NUMBERS:]
        follows = (row, start, box) == (first + rows, end, last_box)
        if follows and end - begin == rows * size and share <= size:
            joined = count if share == size else 1
            extents[-EXTENT_NUMBERS + 1] += joined
            extents[-EXTENT_NUMBERS + 4] = stop if joined == count else start + share
            row, count, start = row + joined, count - joined, start + share
            share = min(share, stop - start)
    if count:
        extents += (row, count, start, share, stop, box)


def _padding(checkpoint: Checkpoint, rows: _Rows) -> list[tuple[int, int, int, int]]:
    """Return (group, row, elements, bytes) of padding; entries of one rank and group are its slices in their order."""
    met: Counter[tuple[int, int]] = Counter()
    of_ranks = by_key((files[0].dp_rank, row) for row, files in enumerate(rows.files) if files)  # slice by slice
    found = []
    for one in checkpoint.padding:
        slices, nth = of_ranks.get(one.rank, []), met[one.rank, one.group]
        met[one.rank, one.group] += 1
        if slices and one.numel:
            found.append((one.group, slices[min(nth, len(slices) - 1)], one.numel, one.nbytes))
    return found


def _ranks(files: Sequence[SourceFile]) -> tuple[bool, int, int]:
    """Return what rows are sorted by."""
    return files[0].dp_rank is not None, files[0].mp_rank or 0, files[0].dp_rank or 0


MOST_FILE_ROWS = 4096
"""Files without a rank have a row each up to this number; more are added up by role."""


class _Rows:
    """The rows of the map, files of no rank first, then slice by slice; `order` says which of them are shown."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        ranked = [file for file in files if file.dp_rank is not None]
        names = {file.name for file in files}
        self._each_file = not ranked and len(names) == len(files) <= MOST_FILE_ROWS
        self._slices = len({file.mp_rank for file in ranked}) > 1
        rows: dict[tuple[object, ...], list[SourceFile]] = {}
        for file in files:
            if file.dp_rank is not None:
                key: tuple[object, ...] = ("rank", file.dp_rank, file.mp_rank)
            else:
                key = ("file", file.path) if self._each_file else ("role", file.role, file.mp_rank)
            rows.setdefault(key, []).append(file)
        self.files = sorted(rows.values(), key=_ranks)
        self._by_path = {file.path: row for row, some in enumerate(self.files) for file in some}

    def of(self, path: str) -> int:
        """Return the row of a file in which elements lie."""
        if path not in self._by_path:  # an adapter that does not list all it reads: a row that follows no other
            self.files += [[], [SourceFile(path, 0, "file")]]
            self._by_path[path] = len(self.files) - 1
        return self._by_path[path]

    def order(self, held: Collection[int]) -> list[int]:
        """Return the rows that hold something or belong to a rank."""
        rows = [row for row, files in enumerate(self.files) if row in held or (files and _ranks(files)[0])]
        return sorted(rows, key=lambda row: _ranks(self.files[row]))

    def label(self, row: int) -> str:
        """Return what a person calls the row."""
        files = self.files[row]
        first = files[0]
        if first.path.startswith(LOST):
            return f"{first.name} (lost)"
        if first.dp_rank is not None:
            return f"dp {first.dp_rank} mp {first.mp_rank or 0}" if self._slices else f"rank {first.dp_rank}"
        if self._each_file or first.role == "file":
            return first.name
        label = f"{first.role} file" if len(files) == 1 else f"{first.role} files ({len(files)})"
        return f"{label} mp {first.mp_rank}" if first.mp_rank is not None and self._slices else label
