"""ZeRO-3: every parameter is cut over the ranks by itself; a rank's shards lie end to end in each sub-group.

The padding of a shard is memory that nobody initialised; it is never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.flat import Slots, cut_files
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Shapes
from zckpt.formats.torch_files.tensors import span_of
from zckpt.state import MASTER, WEIGHT, CutFiles, CutSpans, Extent, Padding, PaddingSpan, Shape, Slot, Span
from zckpt.state.partition import shard_numel, shard_paddings, shard_share
from zckpt.torchfile import Tensor

if TYPE_CHECKING:
    from zckpt.state.cuts import Ranges


def cut_parameters(
    shapes: Shapes, members: Sequence[OptimizerShard], keys: Mapping[int, Set[str]]
) -> tuple[Slots, dict[str, int], list[Padding]]:
    """Return the slots of all parameters, the sub-group of each, and how much padding each rank has.

    Parameters
    ----------
    shapes : dict of str to tuple
        All trained parameters, in the order of the sub-groups.
    members : sequence of OptimizerShard
        The ranks that share the parameters, in order.
    keys : mapping of int to set of str
        Per-element state of each sub-group.

    Raises
    ------
    LayoutError
        The shards of a rank do not add up to its sub-groups.
    """
    _check_partition_groups(members)
    world = len(members)
    walk = _walk_all(shapes, members)
    paddings = _paddings(shapes, members, keys, walk)
    files: dict[tuple[int, str], _Files] = {}
    slots: Slots = {name: {} for name in shapes}
    for name, index, at in walk:
        for key in (MASTER, *sorted(keys[index])):
            if (index, key) not in files:
                files[index, key] = _Files(members, index, key)
            spans = files[index, key].spans(shapes[name], at, world)
            if spans is not None:
                slots[name][key] = Slot(key, files[index, key].dtype, shapes[name], spans)
    return slots, {name: index for name, index, _ in walk}, paddings


class _Files:
    """The tensors of one slot of one sub-group in the files of all ranks, of which some may have none."""

    def __init__(self, members: Sequence[OptimizerShard], index: int, key: str) -> None:
        tensors = [m.masters[index] if key == MASTER else m.tensors[index].get(key) for m in members]
        self._tensors = [
            (rank, member.path, tensor)
            for rank, (member, tensor) in enumerate(zip(members, tensors, strict=True))
            if tensor is not None
        ]
        self._cut: CutFiles | None = None
        if len(self._tensors) == len(members):
            self._cut = cut_files([tensor for _, _, tensor in self._tensors], [path for _, path, _ in self._tensors])

    @property
    def dtype(self) -> str:
        """Element type of the first tensor."""
        return self._tensors[0][2].dtype

    def spans(self, shape: Shape, at: int, world: int) -> Sequence[Span] | None:
        """Return where a parameter lies whose shards begin at element `at`; None if no rank has any of it."""
        numel = math.prod(shape)
        if self._cut is not None:
            return CutSpans(self._cut, shape, 0, shard_numel(numel, world), at)
        found = []
        for rank, path, tensor in self._tensors:
            start, count = shard_share(numel, world, rank)
            if count:
                found.append(span_of(tensor, path, Extent.flat(shape, start, count), first=at))
        return tuple(found) if self._tensors else None


def _walk_all(shapes: Shapes, members: Sequence[OptimizerShard]) -> list[tuple[str, int, int]]:
    """Return for each parameter its sub-group and where its shard starts there, which is one for all ranks."""
    found, sizes = _walk(shapes, members[0], len(members)), [master.numel for master in members[0].masters]
    for member in members[1:]:
        other = [master.numel for master in member.masters]
        if other != sizes and _walk(shapes, member, len(members)) != found:
            raise _mismatch(member, len(members), shapes, other)
    return found


def _paddings(
    shapes: Shapes,
    members: Sequence[OptimizerShard],
    keys: Mapping[int, Set[str]],
    walk: Sequence[tuple[str, int, int]],
) -> list[Padding]:
    """Return the padding of each rank and sub-group."""
    numels: dict[int, list[int]] = {}
    for name, index, _ in walk:
        numels.setdefault(index, []).append(math.prod(shapes[name]))
    pads = {index: shard_paddings(found, len(members)) for index, found in sorted(numels.items())}
    found = []
    for rank, member in enumerate(members):
        for index, pad in pads.items():
            tensors = member.element_tensors(index, keys[index])
            nbytes = pad[rank] * sum(tensor.itemsize for tensor in tensors.values())
            found.append(Padding(member.rank, index, pad[rank], nbytes))
    return found


def by_group(paddings: Sequence[Padding], group_of: Mapping[int, int]) -> list[Padding]:
    """Add up the padding of sub-groups by param group."""
    total: dict[tuple[int, int], tuple[int, int]] = {}
    for p in paddings:
        numel, nbytes = total.get((p.rank, group_of[p.group]), (0, 0))
        total[p.rank, group_of[p.group]] = (numel + p.numel, nbytes + p.nbytes)
    return [Padding(rank, group, *counts) for (rank, group), counts in total.items()]


FEWEST_SHARDS = 1 << 13
"""Shards of which the padding is worked out for all at once; of fewer, one by one."""


@dataclass(frozen=True, slots=True)
class ShardPadding:
    """Where the padding of all ranks' shards is: worked out again each time, for there may be millions of spans.

    Parameters
    ----------
    shapes, members, keys
        As for `cut_parameters`.
    """

    shapes: Shapes
    members: Sequence[OptimizerShard]
    keys: Mapping[int, Set[str]]
    _ranks: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    _starts: dict[int, Ranges] = field(default_factory=dict, repr=False, compare=False)

    def __iter__(self) -> Iterator[PaddingSpan]:
        """Yield what lies end to end in each slot of each sub-group of a rank."""
        if self.is_large:
            for rank, member in enumerate(self.members):
                for key, ranges in self._of(rank):
                    for low, high in ranges.tolist():
                        yield PaddingSpan(key, member.path, low, high - low)
            return
        world = len(self.members)
        for name, index, at in _walk_all(self.shapes, self.members):
            numel = math.prod(self.shapes[name])
            for rank, member in enumerate(self.members):
                _, count = shard_share(numel, world, rank)
                left = shard_numel(numel, world) - count
                for key, tensor in member.element_tensors(index, self.keys[index]).items() if left else ():
                    offset = tensor.offset + (at + count) * tensor.itemsize
                    yield PaddingSpan(key, member.path, offset, left * tensor.itemsize)

    @property
    def is_large(self) -> bool:
        """Whether it is to be asked for file by file, which takes loading numpy."""
        return len(self.shapes) * len(self.members) >= FEWEST_SHARDS

    def within(self, path: str) -> Iterator[Ranges]:
        """Yield where in a file it is, in bytes."""
        if not self._ranks:
            self._ranks.update({member.path: rank for rank, member in enumerate(self.members)})
        if path in self._ranks:
            yield from (ranges for _, ranges in self._of(self._ranks[path]))

    def _of(self, rank: int) -> Iterator[tuple[str, Ranges]]:
        """Yield the slots of a rank's sub-groups, and where padding is in the file, in bytes."""
        import numpy as np

        from zckpt.state.cuts import merged_ranges

        if not self._starts:
            found: dict[int, list[tuple[int, int]]] = {}
            for name, index, at in _walk_all(self.shapes, self.members):
                found.setdefault(index, []).append((at, math.prod(self.shapes[name])))
            self._starts.update({index: np.array(starts, np.int64).T for index, starts in found.items()})
        member, world = self.members[rank], len(self.members)
        for index, (starts, numels) in self._starts.items():
            widths = -(-numels // world)
            held = np.clip(numels - rank * widths, 0, widths)
            ranges = merged_ranges(starts + held, starts + widths)
            for key, tensor in member.element_tensors(index, self.keys[index]).items():
                yield key, tensor.offset + ranges * tensor.itemsize


@dataclass(frozen=True, slots=True)
class FrozenPadding:
    """Where the padding of frozen parameters' shards is; with one model file for each rank."""

    models: Sequence[ModelShard]

    def __iter__(self) -> Iterator[PaddingSpan]:
        """Yield it for each shard that has some."""
        world = len(self.models)
        for position, model in enumerate(self.models):
            for name, tensor in (model.frozen_fragments or {}).items():
                shape = (model.frozen_shapes or {}).get(name)
                if shape is None:
                    continue
                _, count = shard_share(math.prod(shape), world, position)
                if count < tensor.numel:
                    low = tensor.offset + count * tensor.itemsize
                    yield PaddingSpan(WEIGHT, model.path, low, (tensor.numel - count) * tensor.itemsize)


def _walk(shapes: Shapes, member: OptimizerShard, world: int) -> list[tuple[str, int, int]]:
    """Return for each parameter its sub-group and where its shard starts there, in elements."""
    sizes = [master.numel for master in member.masters]
    found, index, at = [], 0, 0
    for name, shape in shapes.items():
        numel = shard_numel(math.prod(shape), world)
        while numel and index < len(sizes) and at == sizes[index]:
            index, at = index + 1, 0
        if numel and (index == len(sizes) or at + numel > sizes[index]):
            raise _mismatch(member, world, shapes, sizes)
        found.append((name, min(index, len(sizes) - 1), at))
        at += numel
    while index < len(sizes) and at == sizes[index]:
        index, at = index + 1, 0
    if index < len(sizes):
        raise _mismatch(member, world, shapes, sizes)
    return found


def _mismatch(member: OptimizerShard, world: int, shapes: Shapes, sizes: list[int]) -> LayoutError:
    total = sum(shard_numel(math.prod(shape), world) for shape in shapes.values())
    return LayoutError(
        f"rank {member.rank}: shards of the parameters do not add up to its sub-groups",
        path=member.path,
        expected=f"{total} elements for {world} ranks",
        found=f"{sum(sizes)} in sub-groups of {sizes[:8]}",
        advice="the file belongs to another run or world size",
    )


def _check_partition_groups(members: Sequence[OptimizerShard]) -> None:
    for member in members:
        special = member.content.get("ds_zero_partition_groups") or []
        counts = (
            {g.get("partition_count") for g in special if isinstance(g, dict)} if isinstance(special, list) else {0}
        )
        if counts - {len(members), None}:
            raise UnsupportedError(
                "sub-groups that are cut over other numbers of ranks than there are, and no list of layers of experts, "
                "which are what DeepSpeed cuts so: whose elements they are is not known",
                path=member.path,
                expected=f"{len(members)} ranks",
                found=sorted(map(str, counts)),
            )


def frozen_weight(name: str, shape: Shape, models: Sequence[ModelShard]) -> Slot | None:
    """Return the weight of a frozen parameter from the shards in each rank's model file; None if there are none.

    Raises
    ------
    LayoutError
        A shard is missing or of the wrong size.
    """
    shards: list[tuple[ModelShard, Tensor]] = []
    for model in models:
        tensor = (model.frozen_fragments or {}).get(name)
        if tensor is not None:
            shards.append((model, tensor))
    if not shards:
        return None
    world, numel = len(models), math.prod(shape)
    if len(shards) != world or any(t.numel != shard_numel(numel, world) for _, t in shards):
        raise LayoutError(
            f"shards of frozen parameter {name} do not add up",
            path=shards[0][0].path,
            expected=f"{shard_numel(numel, world)} elements on each of {world} ranks",
            found=[t.numel for _, t in shards][:16],
        )
    spans = []
    for position, (model, tensor) in enumerate(shards):
        start, count = shard_share(numel, world, position)
        if count:
            extent = Extent.flat(shape, start, count)
            spans.append(span_of(tensor, model.path, extent))
    return Slot(WEIGHT, shards[0][1].dtype, shape, tuple(spans))
