"""Quantised state of a param group for other ranks: cut as it is where blocks allow it, or made codes anew of floats.

    flat buffer   |block |block |block |block |block |...
    rank          |0             |1             |...         a partition's first block begins with it
    codes         of a rank's partition                      } of other ranks: the same, cut elsewhere
    scales        one for each of its blocks                 }
    map           what codes stand for: the same on all ranks

Blocks of all ranks are blocks of the flat buffer if every partition begins with a multiple of a block, before and
after; that of a single rank always does. Otherwise a block would have elements with two scales, and what can be written
is floats, `--dequantize`, or codes anew, `--requantize`, which rounds once more where a block has other elements, as
each step of such an optimizer does. What a longer buffer has at its end is padding of whole blocks, of scale 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zckpt.engine.computed import Computed
from zckpt.formats.deepspeed.quantised import moments_of
from zckpt.formats.torch_files.quantised import Moment
from zckpt.formats.torch_files.writer import NewStorage, SlotContent, new_storage, view
from zckpt.state import Extent, Slot
from zckpt.state.checkpoint import RankValue
from zckpt.state.dtypes import itemsize
from zckpt.storage.files import opened, read_at
from zckpt.torchfile import FromFile, MetaTensor, Size, Tensor

CODES, SCALE = "codes", "scale"
PIECES = {"state": CODES, "absmax": SCALE}
"""What bitsandbytes calls them, before the number of the moment."""

TOGETHER_NUMEL = 1 << 16
"""Elements, about, that are quantised at once: of a share's codes, no more floats than these are in memory."""

SMALLEST_NUMEL = 4096
"""Elements of a tensor that torchao quantises, if they are whole blocks."""


class Kept(NamedTuple):
    """How a program keeps the moments of a param group.

    Parameters
    ----------
    values : mapping of str to FromFile
        Where they are, by key of the state, as a rank has it that has codes.
    moments : mapping of str to sequence of Moment
        As each rank and sub-group has them, by the names that they have as floats.
    """

    values: Mapping[str, FromFile]
    moments: Mapping[str, Sequence[Moment]]

    @classmethod
    def of(cls, own: Sequence[RankValue], what: str, path: str) -> Kept:
        """Return how values of ranks are kept; errors are those of `moments_of`."""
        values: dict[str, FromFile] = {}
        moments: dict[str, list[Moment]] = {}
        for one in sorted(own, key=lambda one: (one.part, one.rank)):
            found = moments_of(one, what, path)
            for name, moment in found.items():
                moments.setdefault(name, []).append(moment)
            if isinstance(one.value, FromFile):
                known = values.setdefault(one.key, one.value)
                if isinstance(known.node, dict) and not any(str(key).startswith("absmax") for key in known.node):
                    values[one.key] = one.value  # of which the pieces tell more
        return cls(values, moments)

    def put(self, made: Mapping[str, Mapping[str, Tensor | NewStorage]], numel: int) -> dict[object, object]:
        """Return the state that holds new moments of so many elements: codes and scales, or codes that are floats."""
        found: dict[object, object] = {}
        names = {held[0].key: name for name, held in self.moments.items()}
        for key, value in self.values.items():
            node = value.node
            if isinstance(node, MetaTensor) and key in made:
                if SCALE not in made[key]:
                    found[key] = made[key][CODES]
                    continue
                attributes = dict(node.attributes or {})
                attributes |= {piece: _tensor(new, attributes[piece]) for piece, new in made[key].items()}
                if "_shape" in attributes:
                    attributes["_shape"] = Size((numel,))
                found[key] = replace(value, node=replace(node, shape=(numel,), attributes=attributes))
            elif isinstance(node, dict):
                nested: dict[object, object] = {}
                for piece, like in node.items():
                    kind, new = str(piece)[:-1], made.get(names.get(f"state{str(piece)[-1]}", ""), {})
                    if PIECES.get(kind) in new:
                        nested[piece] = _tensor(new[PIECES[kind]], like)
                    elif kind == "qmap" and SCALE in new:
                        nested[piece] = like
                if nested:
                    found[key] = replace(value, node=nested)
        return found


def _tensor(new: Tensor | NewStorage, like: object) -> Tensor:
    if isinstance(new, Tensor):
        return new
    return view(new, (new.nbytes // itemsize(new.dtype),), like=like if isinstance(like, Tensor) else None)


@dataclass(frozen=True, slots=True)
class Codes:
    """The quantised state of a param group on all ranks of the source, in order, to be cut as it is.

    Parameters
    ----------
    kept : Kept
    count : int
        The ranks of the source.
    partition, block : int, elements
        A block of 1, where all of it is float32.
    """

    kept: Kept
    count: int
    partition: int
    block: int

    def of(self, rank: int, partition: int) -> dict[object, object]:
        """Return the state of a rank of the target whose partition has so many elements, by key."""
        made: dict[str, dict[str, Tensor | NewStorage]] = {}
        for name, held in self.kept.moments.items():
            its = made[name] = {CODES: self._cut([one.codes for one in held], held[0].per_code, rank, partition)}
            scales = [one.scale for one in held if one.scale is not None]
            if scales:
                its[SCALE] = self._cut(scales, self.block, rank, partition)
        return self.kept.put(made, partition)

    def _cut(self, held: Sequence[Slot], unit: int, rank: int, partition: int) -> NewStorage:
        """Return a rank's part of tensors that lie end to end, each of whose values is of so many elements."""
        numel, own = -(-partition // unit), -(-self.partition // unit)
        start, contents = rank * (partition // unit), []
        for source, slot in enumerate(held):
            low, high = max(start, source * own), min(start + numel, (source + 1) * own)
            if low < high:
                extent = Extent.flat(slot.shape, low - source * own, high - low)
                contents.append(SlotContent(low - start, slot, f"{slot.name} of rank {source}", extent))
        return new_storage(held[0].dtype, numel, contents)


class Form(NamedTuple):
    """How the moments of a param group are made codes anew.

    Parameters
    ----------
    kept : Kept
    blocks : mapping of str to int, elements
        Of moments that were codes, by the names that they have as floats.
    """

    kept: Kept
    blocks: Mapping[str, int]

    def of(self, tensors: dict[object, object]) -> dict[object, object]:
        """Return a share's slots with the moments among them in the form in which the program keeps them."""
        made: dict[str, dict[str, Tensor | NewStorage]] = {}
        numel = 0
        for name, held in self.kept.moments.items():
            moment = tensors.get(name)
            if isinstance(moment, Tensor):
                numel, block = moment.numel, self.blocks.get(name)
                like = next((one for one in held if one.scale is not None), held[0])
                made[name] = {CODES: moment}
                contents = _contents(moment)
                # The program has codes of a share: bitsandbytes of what was some, or is padding alone.
                of_codes = not contents or any(isinstance(one.slot, Computed) for one in contents)
                if like.cls and block is not None:
                    of_codes = numel >= SMALLEST_NUMEL and numel % block == 0
                if block is not None and of_codes:
                    made[name] = {kind: _made_anew(moment, like, block, kind) for kind in (CODES, SCALE)}
        found = self.kept.put(made, numel)
        return {key: found.get(key, value) for key, value in tensors.items() if key not in made or key in found} | found


def _made_anew(moment: Tensor, like: Moment, block: int, kind: str) -> NewStorage:
    from zckpt.engine.means import Mean
    from zckpt.engine.requantise import Portion, Requantised, by_bitsandbytes, by_torchao

    dtype = "float32" if kind == SCALE else like.codes.dtype
    rule = by_torchao if like.cls else by_bitsandbytes
    contents, at = [], 0
    for content in _together(moment, block * max(TOGETHER_NUMEL // block, 1)):
        portions = tuple(
            Portion(numel, start, slot)
            if slot is None or isinstance(slot, Computed)
            else Portion(
                numel, start, Computed(slot.name, "float32", slot.shape, (), function=Mean((slot,), "float32", (1.0,)))
            )
            for slot, start, numel in content
        )
        function = Requantised(portions, block, like.qmap, kind == SCALE, rule, like.per_code == 2)
        slot = Computed(like.key, dtype, (function.step,), (), function=function)
        contents.append(SlotContent(at // function.unit, slot, f"{like.key}, quantised anew"))
        at += function.numel
    unit = block if kind == SCALE else like.per_code
    return new_storage(dtype, -(-moment.numel // unit), contents)


def _contents(moment: Tensor) -> list[SlotContent]:
    """Return what lies in a tensor that is to be written, in order."""
    contents = moment.storage.contents if isinstance(moment.storage, NewStorage) else ()
    ordered = [one for one in contents if isinstance(one, SlotContent)]
    if len(ordered) < len(contents):
        raise ValueError("a share of quantised state has contents that are no slots")
    return ordered


def _together(moment: Tensor, most: int) -> Iterator[list[tuple[Slot | None, int, int]]]:
    """Yield what a tensor is to hold, `most` elements at once: slots, or zeros, with start and number."""
    runs: list[tuple[Slot | None, int, int]] = []
    end = 0
    for one in _contents(moment):
        runs += [(None, 0, one.start - end), (one.slot, one.covered.start, one.covered.numel)]
        end = one.start + one.covered.numel
    runs.append((None, 0, moment.numel - end))
    found: list[tuple[Slot | None, int, int]] = []
    left = most
    for slot, start, numel in runs:
        while numel:
            count = min(numel, left)
            found.append((slot, start, count))
            start, numel, left = start + count, numel - count, left - count  # noqa: PLW2901
            if not left:
                yield found
                found, left = [], most
    if found:
        yield found


def bytes_of(slot: Slot | None) -> bytes:
    """Return the bytes of a small tensor; none where there is none."""
    if slot is None:
        return b""
    [span] = slot.spans
    with opened(span.path) as descriptor:
        return read_at(descriptor, span.offset, slot.nbytes, path=span.path)
