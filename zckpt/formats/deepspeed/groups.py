"""What the files say of the parameters of a group: their order in the optimizer, and their other names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from zckpt.errors import LayoutError
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.torch_files.tensors import identity_of
from zckpt.state import Parameter
from zckpt.state.partition import round_robin_order


def optimizer_order(names: Sequence[str], model: ModelShard, world_size: int) -> list[str]:
    """Return a group's names in the optimizer's order, which round robin changes for the flat buffer only."""
    if not model.zero_option("round_robin_gradients"):
        return list(names)
    order = round_robin_order(len(names), world_size)
    return [name for _, name in sorted(zip(order, names, strict=True))]


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
