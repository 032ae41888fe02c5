"""ZeRO-3: every parameter is cut over the ranks by itself; a rank's shards lie end to end in each sub-group.

The padding of a shard is memory that nobody initialised; it is never read.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from zckpt.errors import LayoutError
from zckpt.formats.deepspeed.axes.expert_ranks import Spread
from zckpt.formats.deepspeed.layouts.layout import Layout
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Shapes
from zckpt.formats.deepspeed.values import Case, Line, Slots, copies_of_buffers, element_slots, quantised_keys
from zckpt.immutable import immutable, mutable
from zckpt.state import MASTER, WEIGHT, Padding, PaddingSpan, Parameter, Slot, Topology, by_key, first_of, list_of
from zckpt.state.partition import shard_numel, shard_paddings, shard_share

if TYPE_CHECKING:
    from zckpt.state.cuts import Ranges


@mutable
class Cut:
    """What the shards of all ranks make up: shape, slots and sub-group of each parameter, and the padding."""

    shapes: Shapes
    slots: Slots
    sub_groups: dict[str, int]
    padding: list[Padding]
    spans: list[Iterable[PaddingSpan]]
    degree: int = 1


def cut_parameters(shapes: Shapes, members: Sequence[OptimizerShard], keys: Mapping[int, Set[str]]) -> Cut:
    """Return what the shards of ranks make up.

    `shapes`: all trained parameters, in the order of the sub-groups; `members`: the ranks that share the parameters, in
    order; `keys`: per-element state of each sub-group. Raises LayoutError: the shards of a rank do not add up to its
    sub-groups.
    """
    world, walk = len(members), _walk(shapes, members[0], len(members))
    for member in members[1:]:
        if [one.numel for one in member.masters] != [one.numel for one in members[0].masters]:
            _walk(shapes, member, world, walk)
    places = by_key((index, (at, math.prod(shapes[name]))) for name, index, at in walk)
    lines: dict[tuple[int, str], Line] = {}
    slots: Slots = {name: {} for name in shapes}
    for name, index, at in walk:
        shape, numel = shapes[name], math.prod(shapes[name])
        for key in (MASTER, *sorted(keys[index])):
            if (index, key) not in lines:
                held = [member.tensor(index, key) for member in members]
                lines[index, key] = Line(held, [member.path for member in members])
            line = lines[index, key]
            tensor = first_of(line.tensors)
            if tensor is not None:
                slots[name][key] = Slot(key, tensor.dtype, shape, line.spans(shape, 0, shard_numel(numel, world), at))
    paddings = []
    pads = {index: shard_paddings([numel for _, numel in its], world) for index, its in sorted(places.items())}
    for rank, member in enumerate(members):
        for index, pad in pads.items():
            itemsizes = sum(tensor.itemsize for tensor in member.element_tensors(index, keys[index]).values())
            paddings.append(Padding(member.rank, index, pad[rank], pad[rank] * itemsizes))
    sub_groups = {name: index for name, index, _ in walk}
    return Cut(dict(shapes), slots, sub_groups, paddings, [ShardPadding(members, keys, places)])


FEWEST_SHARDS = 1 << 13
"""Shards of which the padding is worked out for all at once; of fewer, one by one."""


@dataclass(frozen=True)
class ShardPadding:
    """Where the padding of all ranks' shards is: worked out again each time, for there may be millions of spans."""

    members: Sequence[OptimizerShard]  # as for `cut_parameters`
    keys: Mapping[int, Set[str]]
    places: Mapping[int, Sequence[tuple[int, int]]]
    """Of each sub-group where shards begin in it, and how many elements their parameters have."""

    def __iter__(self) -> Iterator[PaddingSpan]:
        """Yield what lies in each slot of each sub-group of a rank."""
        world = len(self.members)
        for rank, member in enumerate(self.members):
            for index, places in self.places.items():
                shares = [(at, shard_numel(numel, world), shard_share(numel, world, rank)[1]) for at, numel in places]
                for key, tensor in member.element_tensors(index, self.keys[index]).items():
                    for at, width, count in shares:
                        if count < width:
                            offset = tensor.offset + (at + count) * tensor.itemsize
                            yield PaddingSpan(key, member.path, offset, (width - count) * tensor.itemsize)

    @property
    def is_large(self) -> bool:
        """Whether it is to be asked for file by file, which takes loading numpy."""
        return sum(map(len, self.places.values())) * len(self.members) >= FEWEST_SHARDS

    def within(self, path: str) -> Iterator[Ranges]:
        """Yield where in a file it is, in bytes; what lies end to end in a slot of a sub-group is one."""
        import numpy as np

        from zckpt.state.cuts import merged_ranges

        ranks, columns, full = self._known
        rank = ranks.get(path, -1)
        for index, (starts, numels, widths) in columns.items() if rank >= 0 else ():
            if rank < full[index]:
                continue
            held = np.clip(numels - rank * widths, 0, widths)
            ranges = merged_ranges(starts + held, starts + widths)
            for tensor in self.members[rank].element_tensors(index, self.keys[index]).values():
                yield tensor.offset + ranges * tensor.itemsize

    @cached_property
    def _known(self) -> tuple[dict[str, int], dict[int, Ranges], dict[int, int]]:
        """The rank of each file, and by sub-group the places and how many ranks, the first ones, have no padding.

        Places are columns, with the elements that a rank's shard has room for.
        """
        import numpy as np

        columns = {
            index: np.array([(at, numel, shard_numel(numel, len(self.members))) for at, numel in places], np.int64).T
            for index, places in self.places.items()
        }
        full = {index: int((numels // widths.clip(1)).min()) for index, (_, numels, widths) in columns.items()}
        return {member.path: rank for rank, member in enumerate(self.members)}, columns, full


@immutable
class FrozenPadding:
    """Where the padding of frozen parameters' shards is; with one model file for each rank."""

    models: Sequence[ModelShard]

    def __iter__(self) -> Iterator[PaddingSpan]:
        """Yield it for each shard that has some."""
        world = len(self.models)
        for position, model in enumerate(self.models):
            for name, tensor in model.frozen_fragments.items():
                shape = model.frozen.get(name)
                if shape is None:
                    continue
                _, count = shard_share(math.prod(shape), world, position)
                if count < tensor.numel:
                    low = tensor.offset + count * tensor.itemsize
                    yield PaddingSpan(WEIGHT, model.path, low, (tensor.numel - count) * tensor.itemsize)


def _walk(
    shapes: Shapes, member: OptimizerShard, world: int, like: Sequence[object] | None = None
) -> list[tuple[str, int, int]]:
    """Return for each parameter its sub-group and where its shard starts there, in elements: as another rank has it."""
    sizes = [master.numel for master in member.masters]
    numels = [shard_numel(math.prod(shape), world) for shape in shapes.values()]
    ends, found, begin = list(accumulate(sizes)), [], 0
    fits = sum(numels) == sum(sizes) and len(sizes) >= min(len(numels), 1)
    for name, numel in zip(shapes, numels, strict=True) if fits else ():
        index = min((bisect_right if numel else bisect_left)(ends, begin), len(sizes) - 1)
        fits = fits and begin + numel <= ends[index]
        found.append((name, index, begin - ends[index] + sizes[index]))
        begin += numel
    if not fits or (like is not None and found != like):
        raise LayoutError(
            f"rank {member.rank}: parameter shards do not add up to its sub-groups",
            path=member.path,
            expected=f"{sum(numels)} elements for {world} ranks",
            found=f"{sum(sizes)} in sub-groups of {sizes[:8]}",
            advice="the file may belong to another run or world size",
        )
    return found


def frozen_weight(name: str, dtype: str, models: Sequence[ModelShard]) -> Slot | None:
    """Return the weight of a frozen parameter from the shards in each rank's model file; None if there are none.

    `dtype`: of one without elements, of which there are no shards.

    Raises LayoutError: a shard is missing or of the wrong size.
    """
    held, shape = [model.frozen_fragments.get(name) for model in models], models[0].frozen.get(name)
    shards = [tensor for tensor in held if tensor is not None]
    if shape is not None and 0 in shape:
        return Slot(WEIGHT, dtype, shape, ())
    if not shards or shape is None:
        return None
    width = shard_numel(math.prod(shape), len(models))
    if len(shards) != len(models) or any(tensor.numel != width for tensor in shards):
        raise LayoutError(
            f"shards of frozen parameter {name} do not add up",
            path=next(model.path for model, tensor in zip(models, held, strict=True) if tensor is not None),
            expected=f"{width} elements on each of {len(models)} ranks",
            found=[tensor.numel for tensor in shards][:16],
        )
    return Slot(WEIGHT, shards[0].dtype, shape, Line(held, [model.path for model in models]).spans(shape, 0, width))


class ShardedLayout(Layout):
    """That of ZeRO-3, whose model files have no weights of what is trained, and shards of what is not."""

    parameterwise = True

    def read(self, spread: Spread) -> None:  # noqa: ARG002
        """Read the optimizer's files."""
        rank, model, members = self.rank, self.model, self.members
        if model.param_shapes is None:
            raise LayoutError("no param_shapes", advice="the order of the shards is unknown")
        shapes = model.trained
        if len(shapes) != sum(map(len, model.param_shapes)):
            raise LayoutError("a parameter is in two param groups")
        rank.transposed = model.uses_zenflow
        keys = element_slots(
            Case(member, index, master.numel, master.numel, quantised_keys(member.tensors[index]))
            for member in members
            for index, master in enumerate(member.masters)
        )
        read = {sub: keys[sub] - quantised_keys(tensors) for sub, tensors in enumerate(members[0].tensors)}
        cut = self.cut(shapes, read)
        rank.topology, rank.padding_spans = Topology(ep=cut.degree), [*cut.spans, FrozenPadding(rank.model_files)]
        subs = [list_of(group.get("params", [index])) for index, group in enumerate(members[0].groups)]
        absent = [sub for one in subs for sub in one if type(sub) is not int or not 0 <= sub < len(members[0].masters)]
        if absent:
            raise LayoutError(
                "a param group names a sub-group that does not exist",
                path=members[0].path,
                expected=f"below {len(members[0].masters)}",
                found=absent[0],
            )
        group_of = {sub: index for index, one in enumerate(subs) for sub in one}
        dtype = model.dtype
        for name, shape in cut.shapes.items():
            if cut.sub_groups[name] not in group_of:
                raise LayoutError(f"sub-group {cut.sub_groups[name]} is in no param group", path=members[0].path)
            group = group_of[cut.sub_groups[name]]
            self.trained[name] = Parameter(name, shape, dtype, cut.slots[name], group)
        for index, its_subs in enumerate(subs):
            names = [name for name, one in self.trained.items() if one.group == index]
            self.add_group(index, its_subs, names)
        self.add_values(group_of, read)
        of_groups = by_key(((p.rank, group_of[p.group]), p) for p in cut.padding)
        rank.padding = [
            Padding(*key, sum(p.numel for p in its), sum(p.nbytes for p in its)) for key, its in of_groups.items()
        ]

    def cut(self, shapes: Shapes, keys: Mapping[int, Set[str]]) -> Cut:
        """Return what the shards of all ranks make up; parameters are those of `cut_parameters`."""
        return cut_parameters(shapes, self.members, keys)

    def frozen(self, name: str, slot: Slot) -> Slot | None:
        """Return the weight of a parameter that is not trained, from the shards in each rank's model file."""
        if name not in self.model.module:
            return slot
        found = frozen_weight(name, slot.dtype, self.rank.model_files)
        if found is None or not self.rank.transposed:
            return found
        from zckpt.formats.deepspeed.rare.zenflow import transposed_slot

        return transposed_slot(found)

    def is_beside(self, name: str, slot: Slot) -> bool:
        """Tell whether a tensor is none of a parameter's, which are empty."""
        return slot.numel > 0 and name not in self.model.frozen

    def note_copies(self) -> None:
        """Note the copies of buffers that other ranks' files hold."""
        self.rank.duplicates += copies_of_buffers(self.rank.model_files[1:], self.rank.buffers)
