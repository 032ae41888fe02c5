"""The order of each flat group: from `param_shapes`, and from the slice mappings where a file has no shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.flat import FlatGroup
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Shapes
from zckpt.state.partition import flat_partition_numel, round_robin_order


def zero_option(model: ModelShard, name: str) -> bool:
    """Return a boolean option of `zero_optimization` in DeepSpeed's configuration; false where absent."""
    zero = model.config.get("zero_optimization")
    return isinstance(zero, dict) and zero.get(name) is True


def flat_groups(
    model: ModelShard, members: Sequence[OptimizerShard], known: Mapping[str, tuple[int, ...]]
) -> list[FlatGroup]:
    """Return the groups as their flat buffers hold them.

    Parameters
    ----------
    model : ModelShard
    members : sequence of OptimizerShard
        All data-parallel ranks, in order.
    known : mapping of str to tuple
        Shapes of weights found elsewhere, for files without `param_shapes`.

    Raises
    ------
    LayoutError
        The groups cannot be told from what the files hold.
    """
    reordered = zero_option(model, "round_robin_gradients") and not zero_option(model, "parameter_alignment")
    first = members[0]
    if model.param_shapes is None:
        if reordered:
            raise UnsupportedError(
                "no param_shapes, and slice mappings are wrong under round_robin_gradients", path=model.shard.path
            )
        shapes = [_shapes_from_mappings(members, index, known) for index in range(len(first.masters))]
    elif len(model.param_shapes) == 1 < len(first.masters):
        shapes = _split(model.param_shapes[0], members, model.shard.path)
    else:
        shapes = model.param_shapes
    if len(shapes) != len(first.masters):
        raise LayoutError(
            "param_shapes and the optimizer have different numbers of groups",
            path=model.shard.path,
            expected=len(first.masters),
            found=len(shapes),
        )
    pads = first.alignment_paddings
    for index, group in enumerate(shapes):
        if pads is not None and (index >= len(pads) or len(pads[index]) != len(group)):
            raise LayoutError(
                f"group {index}: param_alignment_paddings do not fit param_shapes",
                path=first.path,
                expected=f"{len(group)} paddings",
            )
    return [FlatGroup(index, group, pads[index] if pads else None, not reordered) for index, group in enumerate(shapes)]


def optimizer_order(names: Sequence[str], model: ModelShard, world_size: int) -> list[str]:
    """Return a group's names in the optimizer's order, which round robin changes for the flat buffer only."""
    if not zero_option(model, "round_robin_gradients"):
        return list(names)
    order = round_robin_order(len(names), world_size)
    return [name for _, name in sorted(zip(order, names, strict=True))]


def _shapes_from_mappings(
    members: Sequence[OptimizerShard], index: int, known: Mapping[str, tuple[int, ...]]
) -> Shapes:
    """Rebuild a group's order from the fragments of the ranks that share it."""
    shared = members[0].partition_count[index]
    step = len(members) // max(shared, 1)
    numels: dict[str, int] = {}
    for member in members[::step][:shared]:
        if member.mappings is None:
            raise LayoutError(
                "neither param_shapes nor param_slice_mappings",
                path=member.path,
                advice="the order of the flat buffer cannot be told",
            )
        fragments = sorted(member.mappings[index].items(), key=lambda item: item[1][0])
        for name, (_, numel) in fragments:
            numels[name] = numels.get(name, 0) + numel
    for name, numel in numels.items():
        if name not in known or math.prod(known[name]) != numel:
            raise LayoutError(
                f"the shape of {name} cannot be told",
                path=members[0].path,
                expected=f"a weight of {numel} elements",
                found=known.get(name),
            )
    return {name: known[name] for name in numels}


def _split(shapes: Shapes, members: Sequence[OptimizerShard], path: str) -> list[Shapes]:
    """Cut one dict of all shapes (files before 2021) where the partitions of the groups say; the one way or none."""
    world = len(members)
    wanted = [max(m.masters[g].numel for m in members) for g in range(len(members[0].masters))]
    numels = [math.prod(shape) for shape in shapes.values()]
    ways: list[tuple[int, ...]] = [()]
    for partition in wanted:
        ways = [(*way, end) for way in ways for end in _ends(numels, way[-1] if way else 0, partition, world)]
    ways = [way for way in ways if way[-1] == len(numels)]
    if len(ways) != 1:
        raise LayoutError(
            "one param_shapes for several groups, which cannot be told apart",
            path=path,
            expected="one way to cut it",
            found=f"{len(ways)} ways",
        )
    items, begin, found = list(shapes.items()), 0, []
    for end in ways[0]:
        found.append(dict(items[begin:end]))
        begin = end
    return found


def _ends(numels: list[int], begin: int, partition: int, world: int) -> list[int]:
    """Return where a group that starts at `begin` may end, given the size of its largest partition."""
    total, found = 0, []
    for end in range(begin, len(numels) + 1):
        if (
            min(flat_partition_numel(total, world), total) == partition
            or flat_partition_numel(total, world) == partition
        ):
            found.append(end)
        if end < len(numels):
            total += numels[end]
    return found
