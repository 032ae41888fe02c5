"""Quantised state under ZeRO as floats: codes of each rank's partition, as slots of the parameters.

An optimizer under ZeRO sees a rank's partition of a group (ZeRO-3: of a sub-group) as one tensor, in the order of the
master's: a block has elements of several parameters, and begins with the partition. Where a parameter's master is, its
codes are: behind the same file's master of the same partition, at the same element. bitsandbytes keeps the moments of a
partition in a dict, torchao each in a tensor of a class of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from zckpt.engine.computed import Computed
from zckpt.errors import UnsupportedError, about, listed
from zckpt.formats.deepspeed.origin import origin_of
from zckpt.formats.torch_files import quantised
from zckpt.formats.torch_files.quantised import NESTED, Moment, moments_in, of_torchao, pieces_of
from zckpt.state import MASTER, Checkpoint, CutSpans, Extent, Parameter, Slot, Span, without
from zckpt.state.checkpoint import RankValue, keys_listed
from zckpt.state.dtypes import itemsize
from zckpt.torchfile import FromFile, MetaTensor

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
