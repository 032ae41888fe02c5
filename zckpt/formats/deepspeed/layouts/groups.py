"""What the files say of param groups: their order, that of their parameters in the optimizer, and other names of these.

DeepSpeed goes through a set of names where it makes groups of experts over several numbers of ranks (`ep_size_1`,
`ep_size_2`), so that their order is that of a process's hash seed, and each rank's is its own. Groups are told by what
they say: their names and hyperparameters. Of those that say the same, all have the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from zckpt.errors import LayoutError
from zckpt.formats.deepspeed.shards import ModelShard, OptimizerShard
from zckpt.formats.torch_files.tensors import identity_of
from zckpt.state import Parameter, without
from zckpt.state.partition import round_robin_order
from zckpt.torchfile import Digests


def optimizer_order(names: Sequence[str], model: ModelShard, world_size: int) -> list[str]:
    """Return a group's names in the optimizer's order, which round robin changes for the flat buffer only."""
    if not model.zero_option("round_robin_gradients"):
        return list(names)
    order = round_robin_order(len(names), world_size)
    return [name for _, name in sorted(zip(order, names, strict=True))]


def tied_names(
    models: Sequence[ModelShard], trained: Set[str], others: Mapping[str, str], *, parameterwise: bool
) -> dict[str, str]:
    """Return alias to owner.

    Parameters
    ----------
    models : sequence of ModelShard
        Of one model-parallel rank.
    trained : set of str
        Parameters that a param group has.
    others : mapping of str to str
        What the files of other model-parallel ranks list.
    parameterwise : bool
        ZeRO-3, where a model file holds no weights.

    Notes
    -----
    DeepSpeed takes empty parameters for aliases of each other, for they share no memory at the same address;
    they are not. It lists no two names that one module has for a parameter (`named_parameters` in its
    `_get_shared_params`); files before 2023 have no `shared_params`, and what its own Python writer writes has an empty
    one. So two names of the same bytes are one parameter, too. Under ZeRO-3 the weights in a model file are empty, but
    each parameter's has a storage of its own, which all of its names have.
    """
    found: dict[str, str] = dict(others)
    module = models[0].module
    for model in models:
        found.update(model.shared)
    alike: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, t in module.items():
        tells = not t.numel if parameterwise else bool(t.numel)
        if tells and name not in models[0].buffer_names:
            alike[identity_of(t)].append(name)
    known = trained | models[0].frozen.keys()
    for names in alike.values():
        if not parameterwise or len(known.intersection(names)) == 1:  # else they only share what is empty
            owner, *aliases = sorted(names, key=lambda name: (name not in trained, name not in known, name in found))
            found |= {name: owner for name in aliases if name not in found}
    result = {}
    for pair in found.items():
        alias, owner = pair if pair[0] not in trained or pair[1] in trained else pair[::-1]
        empty = alias in module and not parameterwise and not module[alias].numel
        if alias not in trained and not empty and alias not in models[0].frozen:
            result[alias] = owner
    return {alias: result.get(owner, owner) for alias, owner in result.items()}


def complete_aliases(parameters: Mapping[str, Parameter]) -> None:
    """Give tied parameters the shape and dtype of their owners.

    Raises LayoutError: there is no owner.
    """
    for name, parameter in parameters.items():
        if parameter.tied_to is None:
            continue
        owner = parameters.get(parameter.tied_to)
        if owner is None or owner.tied_to is not None:
            raise LayoutError(f"{name} is tied to a parameter that does not exist", found=parameter.tied_to)
        parameter.shape, parameter.dtype = owner.shape, owner.dtype


def in_one_order(optimizers: Sequence[OptimizerShard]) -> list[OptimizerShard]:
    """Return optimizer files with their groups as the first one of their model-parallel rank has them.

    Those whose groups are others stay as they are, and are found to be different later.
    """
    firsts: dict[int | None, OptimizerShard] = {}
    found: list[OptimizerShard] = []
    for one in optimizers:
        first, order = firsts.setdefault(one.mp_rank, one), None
        several = {group.get("name") for group in one.groups if group.get("moe") is True}
        if one is not first and len(several) > 1 and len(one.groups) == len(one.masters):
            order = order_like(first.groups, one.groups)
        if order is None or order == sorted(order):
            found.append(one)
            continue
        by_group = ("masters", "tensors", "scalars", "partition_count", "paddings", "alignment_paddings", "mappings")
        moved: dict[str, Any] = {name: (its := getattr(one, name)) and [its[at] for at in order] for name in by_group}
        groups = [{**one.groups[at], "params": first.groups[index].get("params")} for index, at in enumerate(order)]
        found.append(replace(one, **moved, groups=groups, order=tuple(order)))
    return found


def order_like(wanted: Sequence[dict[str, object]], own: Sequence[dict[str, object]]) -> list[int] | None:
    """Return the places of the same groups among a rank's own; None if it has others."""
    digests = Digests()
    keys, left = ([digests.of(without(group, "params")) for group in groups] for groups in (wanted, own))
    found: list[int] = []
    for key in keys:
        at = next((at for at, other in enumerate(left) if other == key and at not in found), None)
        if at is None:
            return None
        found.append(at)
    return found if len(found) == len(own) else None
