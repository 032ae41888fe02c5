"""Which gradients are reduced together, and where each lies in the buffer that is sent. Pure arithmetic.

A bucket is filled with whole parameters in the order in which their gradients become ready. Of each process group and
element type that it has parameters of, it has a message: a contiguous range of elements. Where owners get their parts
and nobody the rest, a message has the parts of one owner after those of another.

    by parameter   | a0 a0 | b0 b1 | c1 c1 |       for all-reduce     (a0: of parameter a, owned by rank 0)
    by owner       | a0 a0 b0 | b1 c1 c1 |         for a reduction to each owner
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zckpt.optim.zero.flat import FlatGroup


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A parameter whose gradient is reduced.

    Parameters
    ----------
    group : FlatGroup
    position : int
        Which parameter of the group, in the order of the buffer.
    """

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
    member : Member
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
    process_group : ProcessGroup
    rank : int
        This rank's, in the process group.
    dtype : torch.dtype
        What is sent.
    device : torch.device
    numel : int, elements
    extents : list of OwnedExtent
        By offset.
    spans : list of (int, int, int)
        Owner, offset and number of elements of what is reduced to one rank; where all ranks get all, of the whole.
    """

    process_group: dist.ProcessGroup
    rank: int
    dtype: torch.dtype
    device: torch.device
    numel: int
    extents: list[OwnedExtent]
    spans: list[tuple[int, int, int]]


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
    """Lay out a bucket.

    Parameters
    ----------
    members : sequence of Member
    dtype : torch.dtype or None
        What is sent; by default the parameters' own type.
    by_owner : bool
        Whether owners get their parts, and nobody the rest.
    """
    kinds: dict[tuple[int, torch.dtype, torch.device], list[Member]] = {}
    for member in members:
        parameter = member.parameter
        key = (id(member.group.process_group), dtype or parameter.dtype, parameter.device)
        kinds.setdefault(key, []).append(member)
    messages = [_message(its, sent, device, by_owner=by_owner) for (_, sent, device), its in kinds.items()]
    return Bucket(list(members), messages)


def _message(members: Sequence[Member], dtype: torch.dtype, device: torch.device, *, by_owner: bool) -> Message:
    group = members[0].group
    parts = [part for member in members for part in _parts(member)]
    if by_owner:
        parts.sort(key=lambda part: part[1])  # stable
    extents: list[OwnedExtent] = []
    spans: list[tuple[int, int, int]] = []
    offset = 0
    for member, owner, start, numel, position in parts:
        extents.append(OwnedExtent(member, owner, start, numel, position, offset))
        if by_owner and spans and spans[-1][0] == owner:
            spans[-1] = (owner, spans[-1][1], spans[-1][2] + numel)
        else:
            spans.append((owner, offset, numel))
        offset += numel
    if not by_owner:
        spans = [(group.rank, 0, offset)]
    return Message(group.process_group, group.rank, dtype, device, offset, extents, spans)


def _parts(member: Member) -> Iterator[tuple[Member, int, int, int, int]]:
    """Yield owner, start, number of elements and position in the owner's partition of each part of a parameter."""
    group = member.group
    begin = group.starts[member.position]
    at = 0
    while at < member.numel:
        owner, position = divmod(begin + at, group.partition)
        numel = min(member.numel - at, group.partition - position)
        yield member, owner, at, numel, position
        at += numel


def members_of(groups: Iterable[FlatGroup]) -> list[Member]:
    """Return all parameters of flat groups, in the optimizer's order, not that of the buffers."""
    found = []
    for group in groups:
        order = sorted(range(len(group.parameters)), key=group.numbers.__getitem__)
        found += [Member(group, position) for position in order]
    return found
