"""Quantised state of a param group for other ranks: cut as it is where blocks allow it; `requantised` makes it anew.

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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zckpt.errors import UnsupportedError, about
from zckpt.formats.deepspeed.rare.quantised import is_quantised, moments_of, of_slices
from zckpt.formats.deepspeed.target import Target, TargetGroup
from zckpt.formats.torch_files.quantised import NESTED, Moment
from zckpt.formats.torch_files.writer import NewStorage, SlotContent, new_storage, view
from zckpt.state import Checkpoint, Slot, by_key, stated
from zckpt.state.checkpoint import RankValue, how_to_drop
from zckpt.state.dtypes import itemsize
from zckpt.state.views import concat
from zckpt.storage.files import opened
from zckpt.torchfile import FromFile, MetaTensor, Size, Tensor

CODES, SCALE = "codes", "scale"
PIECES = {"state": CODES, "absmax": SCALE}
"""What bitsandbytes calls them, before the number of the moment."""

FLOATS = "--requantize quantises it again; --dequantize writes it as float32, which torchao's optimizers also load"
HINT = "--requantize quantises it again; --dequantize writes it as float32, for an optimizer that keeps floats"


class Kept(NamedTuple):
    """How a program keeps the moments of a param group."""

    values: Mapping[str, FromFile]  # where they are, by key of the state, as a rank has it that has codes
    moments: Mapping[str, Sequence[Moment]]
    """As each rank and sub-group has them, by the names that they have as floats."""

    @classmethod
    def of(cls, own: Sequence[RankValue], what: str) -> Kept:
        """Return how values of ranks are kept; errors are those of `moments_of`, and of two moments in one."""
        values: dict[str, FromFile] = {}
        moments: dict[str, list[Moment]] = {}
        for one in sorted(own, key=lambda one: (one.part, one.rank)):
            found = moments_of(one, what)
            if any(moment.key == "state3" for moment in found.values()):
                raise UnsupportedError(
                    f"the state of {what} has two moments in one tensor, as of bitsandbytes' AdEMAMix, and is not cut",
                    advice="--dequantize writes it as float32, for an optimizer that keeps floats",
                )
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


class Codes(NamedTuple):
    """The quantised state of a param group on all ranks of the source, end to end, to be cut as it is."""

    kept: Kept
    pieces: Mapping[str, Mapping[str, tuple[Slot, int]]]
    """Codes and scales of each moment, and of how many elements one of their values is."""

    def of(self, tensors: Mapping[object, object], rank: int, partition: int) -> dict[object, object]:
        """Return the state of a rank of the target whose partition has so many elements, by key."""

        def cut(slot: Slot, unit: int) -> NewStorage:
            start, numel = rank * (partition // unit), -(-partition // unit)
            count = min(numel, slot.numel - start)
            contents = [SlotContent(0, slot, slot.name, slot.flat(start, count))] if count > 0 else []
            return new_storage(slot.dtype, numel, contents)

        made = {
            name: {kind: cut(slot, unit) for kind, (slot, unit) in its.items()} for name, its in self.pieces.items()
        }
        return {**tensors, **self.kept.put(made, partition)}


def cut_codes(target: Target) -> str | None:
    """Cut quantised state for a target's ranks, if that can be; else return what to do instead, if there is something.

    Raises UnsupportedError: it is not known what the state is; DamagedFileError: codes, scales and map do not belong
    together.
    """
    checkpoint = target.checkpoint
    values = checkpoint.per_rank
    quantised = any(value.key == NESTED for value in values)
    if not any(map(is_quantised, values)):
        return how_to_drop(values)
    is_in_order = not (target.stage == 3 or target.elastic or target.round_robin)
    alike = all(map(is_quantised, values)) and target.keeps_form and is_in_order
    held = by_group(checkpoint) if alike else {}
    groups = {(rank.mp_rank, group.index): (group, len(rank.members)) for rank in target.ranks for group in rank.groups}
    with about(checkpoint.source):
        kept = {key: Kept.of(its, f"group {key[1]}") for key, its in held.items()}
    found = {key: _cut(*groups[key], its) for key, its in kept.items() if key in groups}
    cut = stated(found)
    if held and cut.keys() == held.keys():
        target.coded.update(cut)
        return None
    of_one = target.tp == checkpoint.topology.tp
    return (HINT if quantised else FLOATS) if of_one else of_slices("").advice


def by_group(checkpoint: Checkpoint) -> dict[tuple[int, int], list[RankValue]]:
    """Return what ranks have of their own, by model-parallel rank and param group."""
    return by_key(((value.mp_rank, value.group), value) for value in checkpoint.per_rank)


def _cut(group: TargetGroup, members: int, kept: Kept) -> Codes | None:
    """Return the state of a group that every rank has in the same form, if its blocks are blocks of the target.

    What is more in the target is padding of whole ones.
    """
    partitions, blocks = set(), set()
    for alike in kept.moments.values():
        first = alike[0]
        own = {(one.cls, one.codes.dtype, one.codes.shape, one.block, one.scale is None, bytes_of(one.qmap))
               for one in alike}  # fmt: skip
        if len(alike) != members or len(own) > 1 or len(first.codes.shape) != 1:
            return None
        partitions.add(first.numel)
        blocks |= {first.block} if first.scale is not None else set()
    if len(partitions) != 1 or len(blocks) > 1 or len(group.experts) != 1:
        return None
    (partition,), (block,), after = partitions, blocks or {1}, group.shared_by
    end = members * partition
    of_whole_blocks = any(alike[0].cls for alike in kept.moments.values())  # torchao's, on one rank, too
    fits = (
        (members == 1 or partition % block == 0)
        and ((after == 1 and not of_whole_blocks) or group.partition % block == 0)
        and (after * group.partition <= end or end % block == 0)
    )
    if not fits:
        return None
    pieces = {}
    for name, alike in kept.moments.items():
        scales = [one.scale for one in alike if one.scale is not None]
        pieces[name] = {CODES: (concat([one.codes for one in alike], 0), alike[0].per_code)}
        pieces[name] |= {SCALE: (concat(scales, 0), block)} if scales else {}
    return Codes(kept, pieces)


def bytes_of(slot: Slot | None) -> bytes:
    """Return the bytes of a small tensor; none where there is none."""
    if slot is None:
        return b""
    [span] = slot.spans
    with opened(span.path) as file:
        return file.at(span.offset, slot.nbytes)
