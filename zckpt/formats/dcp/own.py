"""`zckpt.pt`, which zckpt puts into a directory: what torch's DCP has no place for.

{**formats.remainder,
 "dcp": {"absent": {name: about}, "unnamed": {label: about}, "hyperparameters": {index: {key: value}},
         "items": [key], "groups": [[name]]}}

with about = {"shape": [int], "dtype": str}: parameters of which the model has no tensor, parameters that the optimizer
knows by number only, and hyperparameters that torch takes apart, as they were. `items`, which may be absent, names
values besides model and optimizer that are items of the directory and nowhere else. `groups`, which may be absent, has
the names of each param group, where the keys are flat and do not tell.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from zckpt.errors import DamagedFileError, about
from zckpt.evidence import Evidence
from zckpt.formats.dcp.models import Optimizer
from zckpt.formats.dcp.tree import OPTIMIZER, Branch, carry
from zckpt.formats.dcp.write_items import expanded
from zckpt.formats.remainder import WITH_ITEMS, described, descriptions, remainder, restore_from
from zckpt.formats.torch_files.tensors import as_mapping, as_names, with_scalars
from zckpt.formats.torch_files.writer import value_node
from zckpt.state import MASTER, WEIGHT, Checkpoint, GivenNames, are_distinct, list_of
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.torchfile import TorchFile

KEY = "dcp"


def own_tree(
    checkpoint: Checkpoint, held: Collection[str], *, without: Collection[str] = (), flat: bool = False
) -> dict[str, object]:
    """Return the tree of `zckpt.pt`.

    `held`, `without`: keys of metadata that items of the directory hold, and that other files beside it do; `flat`:
    whether the keys of the optimizer do not tell its groups.
    """
    rest = {key: value for key, value in checkpoint.metadata.items() if key not in held and key not in without}
    absent = [p for p in checkpoint.parameters.values() if not {WEIGHT, MASTER} & set(checkpoint.owner(p.name).slots)]
    apart = {index: expanded(group.hyperparameters) for index, group in enumerate(checkpoint.param_groups)}
    peculiar: dict[str, object] = {
        "absent": descriptions(absent),
        "unnamed": descriptions(checkpoint.unnamed.values()),
        "hyperparameters": {
            index: {key: value_node(value) for key, value in values.items()}
            for index, values in apart.items()
            if values
        },
    }
    tree = {**remainder(replace(checkpoint, metadata=rest)), KEY: peculiar}
    if held:  # an older zckpt would miss them
        tree["version"], peculiar["items"] = WITH_ITEMS, sorted(held)
    if flat and checkpoint.param_groups:
        peculiar["groups"] = [list(group.parameters) for group in checkpoint.param_groups]
    return tree


def prepare(
    checkpoint: Checkpoint, optimizers: Sequence[Optimizer], file: TorchFile, names: GivenNames
) -> Sequence[str] | None:
    """Add the parameters of which the model has no tensor; give optimizers the groups and names that they lack.

    Return `names`, if they are not used up. Raises DamagedFileError: the file is malformed, or its param groups are not
    those of the optimizer's parameters; UsageError: too few or too many names.
    """
    with about(file.path):
        said = as_mapping(as_mapping(file.root).get(KEY))
        for name, one in described(said.get("absent", {})).items():
            if name in checkpoint.parameters or name in checkpoint.buffers:
                raise DamagedFileError(f"{name} is listed as absent, but exists")
            checkpoint.parameters[name] = one
        listed = said.get("groups")
        if listed is not None:  # of flat keys
            numbers = {name: number for one in optimizers for number, name in one.state.names.items()}
            groups = list(map(as_names, list_of(listed)))
            members = [name for group in groups for name in group]
            if len(optimizers) != 1 or not are_distinct(members) or set(members) != numbers.keys():
                raise DamagedFileError("param groups with other parameters", expected="those of the optimizer")
            state = optimizers[0].state
            values = {number: group for group in state.groups for number in group["params"]}
            state.groups[:] = [
                {**(values[numbers[its[0]]] if its else {}), "params": [numbers[name] for name in its]}
                for its in groups
            ]
    if names is None or not said.get("unnamed"):
        return names
    labels = [one.state.names.get(number, number) for one in optimizers for number in one.state.every_number]
    given = Evidence([labels], dict.fromkeys(names, ())).given(names)
    for optimizer in optimizers:
        optimizer.rename(given)
    return None


def without_carried(file: TorchFile, root: Branch) -> Branch:
    """Return a saved dict without its other values, in which there may be models and optimizers, too."""
    with about(file.path):
        said = as_mapping(file.root)
        others = {*as_mapping(said.get("metadata", {})), *as_names(as_mapping(said.get(KEY)).get("items", []))}
    others -= {"model", OPTIMIZER}
    return {key: node for key, node in root.items() if key not in others or not isinstance(node, dict)}


def restore_own(checkpoint: Checkpoint, file: TorchFile, root: Branch) -> None:
    """Give a checkpoint, whose parameters and groups are there, what the file says of it, and items by themselves.

    Raises DamagedFileError: the file is malformed, or speaks of what is not there.
    """
    with about(file.path):
        said = as_mapping(as_mapping(file.root).get(KEY))
        for label, one in described(said.get("unnamed", {})).items():
            if label in checkpoint.unnamed:
                checkpoint.unnamed[label].shape, checkpoint.unnamed[label].dtype = one.shape, one.dtype
        for index, values in as_mapping(said.get("hyperparameters", {})).items():
            if type(index) is not int or not 0 <= index < len(checkpoint.param_groups):
                raise DamagedFileError("hyperparameters for a param group that does not exist")
            checkpoint.param_groups[index].hyperparameters.update(with_scalars(as_mapping(values), file.path))
        restore_from(checkpoint, file, Rule((KEY, "**"), IMPLIED, "shapes and types of parameters without tensors"))
        keys = as_names(said.get("items", []))
        strange = next((key for key in keys if key not in root or key in checkpoint.metadata), None)
        if strange is not None:
            raise DamagedFileError(f"{strange} is listed as a separate item", found="another state")
    checkpoint.metadata |= {key: carry(root[key]) for key in keys}
