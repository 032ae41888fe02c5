"""Which gradients are reduced together, and where each lies in the buffer that is sent. Pure arithmetic.

A bucket is filled with whole parameters in the order in which their gradients become ready. Of each process group and
element type that it has parameters of, it has a message: a contiguous range of elements. Where owners get what they own
and nobody the rest, a message has the extents of one owner after those of another.

    by parameter   | a0 a0 | b0 b1 | c1 c1 |       for all-reduce     (a0: of parameter a, owned by rank 0)
    by owner       | a0 a0 b0 | b1 c1 c1 |         for a reduction to each owner
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from zckpt.optim.zero.flat import FlatGroup


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A parameter whose gradient is reduced: which one of a group, in the order of its buffer."""

    group: FlatGroup
    position: int

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter itself."""
        return self.group.parameters[self.position]

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.group.numels[self.position]


@dataclass(frozen=True, slots=True, eq=False)
class OwnedExtent:
    """A range of one parameter's gradient that one rank owns.

    Parameters
    ----------
    owner : int
        Rank in the group's process group.
    start, numel : int, elements
        Within the flattened parameter.
    position : int, elements
        Within the owner's partition.
    offset : int, elements
        Within the message.
    """

    member: Member
    owner: int
    start: int
    numel: int
    position: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What one process group reduces of a bucket, as one range of elements of one type.

    Parameters
    ----------
    rank : int
        This rank's, in the process group.
    dtype : torch.dtype
        What is sent.
    extents : list of OwnedExtent
        By offset.
    owned : list of (int, int, int)
        Each owner, with offset and number of elements; where all ranks get all, one of the whole.
    """

    process_group: dist.ProcessGroup
    rank: int
    dtype: torch.dtype
    device: torch.device
    numel: int
    extents: list[OwnedExtent]
    owned: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Parameters that are reduced together."""

    members: list[Member]
    messages: list[Message]


def fill(members: Sequence[Member], size: int) -> Iterator[list[Member]]:
    """Yield the members of each bucket: at most `size` elements, or one parameter that is larger."""
    bucket: list[Member] = []
    numel = 0
    for member in members:
        if not member.numel:
            continue
        if bucket and numel + member.numel > size:
            yield bucket
            bucket, numel = [], 0
        bucket.append(member)
        numel += member.numel
    if bucket:
        yield bucket


def make_bucket(members: Sequence[Member], *, dtype: torch.dtype | None, by_owner: bool) -> Bucket:
    """Lay out a bucket that is sent as `dtype`, by default the parameters' own; `by_owner`, if only owners get it."""
    kinds: dict[tuple[int, torch.dtype, torch.device], list[Member]] = {}
    for member in members:
        parameter = member.parameter
        key = (id(member.group.process_group), dtype or parameter.dtype, parameter.device)
        kinds.setdefault(key, []).append(member)
    messages = [_message(its, sent, device, by_owner=by_owner) for (_, sent, device), its in kinds.items()]
    return Bucket(list(members), messages)


def _message(members: Sequence[Member], dtype: torch.dtype, device: torch.device, *, by_owner: bool) -> Message:
    group = members[0].group
    found = [extent for member in members for extent in _owned_extents(member)]
    if by_owner:
        found.sort(key=lambda extent: extent.owner)  # stable
    offsets = list(itertools.accumulate((extent.numel for extent in found), initial=0))
    extents = [replace(extent, offset=offset) for extent, offset in zip(found, offsets, strict=False)]
    owned = [(group.rank, 0, offsets[-1])]
    if by_owner:
        each = [list(its) for _, its in itertools.groupby(extents, key=lambda extent: extent.owner)]
        owned = [(its[0].owner, its[0].offset, sum(extent.numel for extent in its)) for its in each]
    return Message(group.process_group, group.rank, dtype, device, offsets[-1], extents, owned)


def _owned_extents(member: Member) -> Iterator[OwnedExtent]:
    """Yield what each rank owns of a parameter."""
    group = member.group
    begin = group.starts[member.position]
    at = 0
    while at < member.numel:
        owner, position = divmod(begin + at, group.partition)
        numel = min(member.numel - at, group.partition - position)
        yield OwnedExtent(member, owner, at, numel, position, offset=0)
        at += numel


def members_of(groups: Iterable[FlatGroup]) -> list[Member]:
    """Return all parameters of flat groups, in the optimizer's order, not that of the buffers."""
    found = []
    for group in groups:
        order = sorted(range(len(group.parameters)), key=group.numbers.__getitem__)
        found += [Member(group, position) for position in order]
    return found
