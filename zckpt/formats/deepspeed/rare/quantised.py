"""Quantised state under ZeRO: as floats, of codes of each rank's partition, and as the same codes cut for other ranks.

An optimizer under ZeRO sees a rank's partition of a group (ZeRO-3: of a sub-group) as one tensor, in the order of the
master's: a block has elements of several parameters, and begins with the partition. Where a parameter's master is, its
codes are: behind the same file's master of the same partition, at the same element. bitsandbytes keeps the moments of a
partition in a dict, torchao each in a tensor of a class of its own.

For other ranks codes are cut as they are, where blocks allow it; `requantised` makes them anew.

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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from zckpt.engine.computed import Computed
from zckpt.errors import UnsupportedError, about, listed
from zckpt.formats.deepspeed.origin import origin_of
from zckpt.formats.deepspeed.target import Target, TargetGroup
from zckpt.formats.torch_files import quantised
from zckpt.formats.torch_files.quantised import NESTED, Moment, moments_in, of_torchao, pieces_of
from zckpt.formats.torch_files.writer import NewStorage, SlotContent, new_storage, view
from zckpt.state import MASTER, Checkpoint, CutSpans, Extent, Parameter, Slot, Span, by_key, stated, without
from zckpt.state.checkpoint import RankValue, how_to_drop, keys_listed
from zckpt.state.dtypes import itemsize
from zckpt.state.views import concat
from zckpt.storage.files import opened
from zckpt.torchfile import FromFile, MetaTensor, Size, Tensor

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=Checkpoint)


Partition = tuple[str, int]
"""A file, and where in it the master of a partition begins, in bytes."""

Held = dict[Partition, dict[str, Moment]]


def is_quantised(value: RankValue) -> bool:
    """Tell whether a rank's state is quantised in a way that is known."""
    return value.key == NESTED or quantised.is_quantised(value.value)


def with_float_slots(checkpoint: AnyCheckpoint, *, keeps_files: bool = False) -> AnyCheckpoint:
    """Return a checkpoint with float32 slots in the place of what each rank has quantised of its partitions.

    Parameters
    ----------
    keeps_files : bool
        Whether it is still one of DeepSpeed's files, to be cut for other ranks; else it is written as from any other
        format.

    Raises
    ------
    UnsupportedError
        Other state that is each rank's own; or it is not certain which elements codes are of.
    DamagedFileError
        Codes, scales and map do not belong together.
    """
    if not any(map(is_quantised, checkpoint.per_rank)):
        return checkpoint
    with about(checkpoint.source):
        others = [one for one in checkpoint.per_rank if not is_quantised(one)]
        if others:
            raise UnsupportedError(
                "quantised state together with other state that each rank has for itself",
                found=keys_listed(others),
                advice="resume in the program that saved it, or write only the model with `zckpt consolidate`",
            )
        origin, held = origin_of(checkpoint), Held()
        members = {} if origin is None else {(one.mp_rank, one.rank): one for one in origin.every_member}
        for value in checkpoint.per_rank:
            member, what = members.get((value.mp_rank, value.rank)), f"group {value.group}"
            if member is None or value.part >= len(member.masters):
                raise _uncertain(what, f"partition {value.part} of rank {value.rank}, which has no master")
            found = moments_of(value, what)
            held.setdefault((member.path, member.masters[value.part].offset), {}).update(found)
        # A parameter that is one of the ranks' partitions as it is, not put together of slices, is cut.
        sliced = [
            name for name, one in checkpoint.parameters.items()
            if MASTER in (its := one.slots) and (not isinstance(its[MASTER].spans, CutSpans) or its[MASTER].replicas)
        ]  # fmt: skip
        if sliced and not keeps_files:
            raise of_slices(f"the optimizer's state of {listed(sliced)}")
        several = origin is not None and len(origin.ranks) > 1
        groups = None if origin is None or several else {value.group for value in checkpoint.per_rank}
        every = without(checkpoint.parameters, *sliced)
        parameters = {**checkpoint.parameters, **_with_floats(every, held, groups)}
        if origin is None or not keeps_files:
            return replace(checkpoint, parameters=parameters, per_rank=[], origin=None)
        ranks = []
        for rank in origin.ranks:
            of_rank = {value.group for value in rank.per_rank}
            own = _with_floats(rank.parameters, held, of_rank) if several else parameters
            ranks.append(replace(rank, parameters=own, per_rank=[]))
        return replace(checkpoint, parameters=parameters, per_rank=[], origin=replace(origin, ranks=ranks))


def of_slices(what: str) -> UnsupportedError:
    """Return the error of quantised state that would have to be put together of slices, or sliced."""
    return UnsupportedError(
        f"{what} is quantised in blocks of each tensor-parallel rank's slice",
        expected="the source's tensor-parallel size",
        advice="`zckpt reshard --dequantize` at that size writes floats, which can then be cut or converted",
    )


def _with_floats(
    parameters: Mapping[str, Parameter], held: Held, groups: Collection[int] | None
) -> dict[str, Parameter]:
    """Return parameters with float slots, where they are in one of some groups, which have quantised state."""
    found = dict(parameters)
    for name, one in parameters.items():
        master = one.master
        if one.tied_to is not None or not master or not (groups is None or one.group in groups):
            continue
        if not isinstance(master.spans, CutSpans) or master.shape != one.shape:
            raise _uncertain(name, "no master that is cut as ZeRO cuts")
        files = master.spans.files
        bases = dict(zip(files.paths, files.offsets, strict=True))
        placed = []
        for span in sorted((its for its in master.spans if its.extent.numel), key=lambda its: its.extent.start):
            position = (span.offset - bases[span.path]) // itemsize(span.dtype)
            placed.append((span, position, held.get((span.path, bases[span.path]), {})))
        keys = {frozenset(moments) for _, _, moments in placed}
        if len(keys) > 1:
            raise _uncertain(name, "other moments on other ranks")
        moments = sorted(keys.pop()) if keys else []
        if placed and not moments and not one.slots.keys() - {MASTER}:
            raise _uncertain(name, f"none of it in {placed[0][0].path}")
        own = {key: _slot(key, one, [(span, at, its[key]) for span, at, its in placed]) for key in moments}
        found[name] = replace(one, slots={**one.slots, **own})
    return found


def moments_of(value: RankValue, what: str) -> dict[str, Moment]:
    """Return the moments in a rank's quantised state of a partition, by the names that they have as floats.

    Raises UnsupportedError: it is quantised in a way that is not known; DamagedFileError: codes, scales and map do not
    belong together.
    """
    if value.key == NESTED:
        pieces = pieces_of(value.value, what)
        moments, others = moments_in(pieces, what)
        if others:
            raise _uncertain(what, ", ".join(pieces))
        return moments
    node = value.value.node if isinstance(value.value, FromFile) else None
    if not isinstance(node, MetaTensor):
        raise _uncertain(what, value.key)
    partition = Parameter(what, node.shape, node.dtype, state={value.key: value.value})
    return {value.key: of_torchao(value.key, partition)}


def _uncertain(name: str, found: object) -> UnsupportedError:
    return UnsupportedError(
        f"it is uncertain what the quantised state of {name} stands for",
        expected="codes for moments of each rank's partition, in blocks, as in bitsandbytes and torchao",
        found=found,
        advice="resume in the program that saved it, or write only the model with `zckpt consolidate`",
    )


def _slot(name: str, parameter: Parameter, placed: Sequence[tuple[Span, int, Moment]]) -> Slot:
    """Return one moment of a parameter: computed, or where it is in float32, as it lies there."""
    from zckpt.engine.scaled import Portion, Scaled

    spans: list[Span] = []
    portions: list[Portion] = []
    forms: set[tuple[bool, int]] = set()
    for span, position, moment in placed:
        codes, extent = moment.codes, span.extent
        [own] = codes.spans or (None,)
        if own is None or own.strides is not None or len(codes.shape) != 1 or position + extent.numel > moment.numel:
            raise _uncertain(parameter.name, f"{name} of shape {codes.shape}")
        if moment.scale is None:
            offset = own.offset + position * itemsize(codes.dtype)
            spans.append(replace(own, extent=Extent.flat(parameter.shape, extent.start, extent.numel), offset=offset))
        else:
            portions.append(Portion(extent.start, extent.numel, position, *moment.parts()))
            forms.add((moment.qmap is None, moment.per_code))
    if (spans and portions) or len(forms) > 1:
        raise _uncertain(parameter.name, "codes on some ranks, others or floats on others")
    if not portions:
        return Slot(name, "float32", parameter.shape, tuple(spans))
    return Computed(name, "float32", parameter.shape, (), function=Scaled(tuple(portions)))


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
