"""What the files say of the parameters of a group: their order in the flat buffer, and their other names.

The order is that of `param_shapes`, or follows from the slice mappings where a file has no shapes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.expert_ranks import Spread, sharing
from zckpt.formats.deepspeed.flat import FlatGroup
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard, Shapes
from zckpt.formats.torch_files.tensors import identity_of
from zckpt.state import Parameter, Shape
from zckpt.state.partition import flat_partition_numel, round_robin_order


def flat_groups(
    model: ModelShard,
    members: Sequence[OptimizerShard],
    known: Mapping[str, Shape],
    spread: Spread[OptimizerShard] | None = None,
) -> list[FlatGroup]:
    """Return the groups as their flat buffers hold them.

    Parameters
    ----------
    members : sequence of OptimizerShard
        All data-parallel ranks, in order.
    known : mapping of str to tuple
        Shapes of weights found elsewhere, for files without `param_shapes`.
    spread : Spread, optional
        The ranks over which experts are spread; by default these.

    Raises
    ------
    LayoutError
        The groups do not follow from what the files hold.
    """
    reordered = model.zero_option("round_robin_gradients") and not model.zero_option("parameter_alignment")
    first = members[0]
    if model.param_shapes is None:
        if reordered:
            raise UnsupportedError("no param_shapes, and slice mappings are wrong under round_robin_gradients")
        every = spread or Spread(members)
        shapes = [_shapes_from_mappings(members, index, known, every) for index in range(len(first.masters))]
    elif len(model.param_shapes) == 1 < len(first.masters):
        shapes = _split(model.param_shapes[0], members)
    else:
        shapes = model.param_shapes
    if len(shapes) != len(first.masters):
        raise LayoutError(
            "param_shapes and the optimizer have different numbers of groups",
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
    if not model.zero_option("round_robin_gradients"):
        return list(names)
    order = round_robin_order(len(names), world_size)
    return [name for _, name in sorted(zip(order, names, strict=True))]


def _shapes_from_mappings(
    members: Sequence[OptimizerShard],
    index: int,
    known: Mapping[str, Shape],
    spread: Spread[OptimizerShard],
) -> Shapes:
    """Rebuild a group's order from the shares of the ranks that share it."""
    numels: dict[str, int] = {}
    named = [name for member in members for name in (member.mappings[index] if member.mappings else ())]
    for member in sharing(members, spread, index, named)[0]:
        if member.mappings is None:
            raise LayoutError(
                "neither param_shapes nor param_slice_mappings",
                path=member.path,
                advice="the order of the flat buffer is not known",
            )
        shares = sorted(member.mappings[index].items(), key=lambda item: item[1][0])
        for name, (_, numel) in shares:
            numels[name] = numels.get(name, 0) + numel
    for name, numel in numels.items():
        if name not in known or math.prod(known[name]) != numel:
            raise LayoutError(
                f"the shape of {name} is not known",
                path=members[0].path,
                expected=f"a weight of {numel} elements",
                found=known.get(name),
            )
    return {name: known[name] for name in numels}


def _split(shapes: Shapes, members: Sequence[OptimizerShard]) -> list[Shapes]:
    """Cut one dict of all shapes (files before 2021) where the partitions of the groups say; the one way or none."""
    world = len(members)
    largest = [max(m.masters[g].numel for m in members) for g in range(len(members[0].masters))]
    numels = [math.prod(shape) for shape in shapes.values()]
    ways: list[Shape] = [()]
    for partition in largest:
        ways = [(*way, end) for way in ways for end in _ends(numels, way[-1] if way else 0, partition, world)]
    ways = [way for way in ways if way[-1] == len(numels)]
    if len(ways) != 1:
        raise LayoutError(
            "one param_shapes for several groups, which nothing tells apart",
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


def tied_names(
    models: Sequence[ModelShard], trained: Collection[str], others: Mapping[str, str], *, parameterwise: bool
) -> dict[str, str]:
    """Return alias to owner.

    Parameters
    ----------
    models : sequence of ModelShard
        Of one model-parallel rank.
    trained : collection of str
        Parameters that a param group has.
    others : mapping of str to str
        What the files of other model-parallel ranks list.
    parameterwise : bool
        ZeRO-3, where a model file holds no weights.

    Notes
    -----
    DeepSpeed takes empty parameters for aliases of each other, for they share no memory at the same address;
    they are not. Files before 2023 have no `shared_params`, and what DeepSpeed's own Python writer writes has an empty
    one: there, two names of the same bytes are one parameter.
    """
    found: dict[str, str] = dict(others)
    recorded = [model.shared for model in models if model.shared is not None]
    module = models[0].module
    for shared in recorded:
        found.update(shared)
    if not any(recorded) and not parameterwise:
        owners: dict[tuple[object, ...], str] = {}
        ordered = sorted(module, key=lambda name: name not in trained)
        for name in ordered:
            t = module[name]
            if t.numel and name not in models[0].buffer_names:
                owner = owners.setdefault(identity_of(t), name)
                if owner != name and name not in trained:
                    found[name] = owner
    result = {}
    for pair in found.items():
        alias, owner = pair if pair[0] not in trained or pair[1] in trained else pair[::-1]
        empty = alias in module and not parameterwise and not module[alias].numel
        if alias not in trained and not empty and alias not in (models[0].frozen_shapes or {}):
            result[alias] = owner
    return {alias: result.get(owner, owner) for alias, owner in result.items()}


def complete_aliases(parameters: Mapping[str, Parameter]) -> None:
    """Give tied parameters the shape and dtype of their owners.

    Raises
    ------
    LayoutError
        There is no owner.
    """
    for name, parameter in parameters.items():
        if parameter.tied_to is None:
            continue
        owner = parameters.get(parameter.tied_to)
        if owner is None or owner.tied_to is not None:
            raise LayoutError(f"{name} is tied to a parameter that is not there", found=parameter.tied_to)
        parameter.shape, parameter.dtype = owner.shape, owner.dtype
