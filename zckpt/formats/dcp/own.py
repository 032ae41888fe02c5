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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from zckpt.errors import DamagedFileError
from zckpt.evidence import Evidence
from zckpt.formats.dcp.optimizer import Group, OptimizerState
from zckpt.formats.dcp.write_items import expanded
from zckpt.formats.remainder import WITH_ITEMS, remainder, remainder_rules, restore
from zckpt.formats.torch_files.tensors import as_mapping, describe, with_scalars
from zckpt.formats.torch_files.writer import value_node
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter
from zckpt.state.dtypes import DTYPES
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.torchfile import TorchFile

KEY = "dcp"

RULES = (*remainder_rules(), Rule((KEY, "**"), IMPLIED, "shapes and types of what has no tensor"))


def own_tree(
    checkpoint: Checkpoint, held: Collection[str], *, without: Collection[str] = (), flat: bool = False
) -> dict[str, object]:
    """Return the tree of `zckpt.pt`.

    Parameters
    ----------
    checkpoint : Checkpoint
    held, without : collection of str
        Keys of metadata that items of the directory hold, and that other files beside it do.
    flat : bool
        Whether the keys of the optimizer do not tell its groups.
    """
    rest = {key: value for key, value in checkpoint.metadata.items() if key not in held and key not in without}
    tree = remainder(replace(checkpoint, metadata=rest))
    version = {"version": WITH_ITEMS} if held else {}  # an older zckpt would miss them
    peculiar = _peculiar(checkpoint)
    if held:
        peculiar["items"] = sorted(held)
    if flat:
        peculiar["groups"] = [list(group.parameters) for group in checkpoint.param_groups]
    return {**tree, **version, KEY: peculiar}


def _peculiar(checkpoint: Checkpoint) -> dict[str, object]:
    absent = [p for p in checkpoint.parameters.values() if not {WEIGHT, MASTER} & set(checkpoint.owner(p.name).slots)]
    hyperparameters = {
        index: {key: value_node(value) for key, value in expanded(group.hyperparameters).items()}
        for index, group in enumerate(checkpoint.param_groups)
    }
    return {
        "absent": {p.name: _shape_and_dtype(p) for p in absent},
        "unnamed": {label: _shape_and_dtype(p) for label, p in checkpoint.unnamed.items()},
        "hyperparameters": {index: values for index, values in hyperparameters.items() if values},
    }


def _about(file: TorchFile) -> Mapping[object, object]:
    return as_mapping(as_mapping(file.root, file.path).get(KEY), file.path)


def _shape_and_dtype(parameter: Parameter) -> dict[str, object]:
    return {"shape": list(parameter.shape), "dtype": parameter.dtype}


def complete(checkpoint: Checkpoint, file: TorchFile) -> None:
    """Add the parameters of which the model has no tensor. Raises DamagedFileError: the file is malformed."""
    for name, (shape, dtype) in _abouts(file, "absent").items():
        if name in checkpoint.parameters or name in checkpoint.buffers:
            raise DamagedFileError(f"{name} is said to be absent, and is there", path=file.path)
        checkpoint.parameters[name] = Parameter(name, shape, dtype)


def name_unnamed(optimizers: Sequence[OptimizerState], file: TorchFile, names: Sequence[str]) -> bool:
    """Give an optimizer's parameters these names, where some have none; tell whether any had none.

    Raises UsageError: too few or too many names.
    """
    if not _abouts(file, "unnamed"):
        return False
    labels = [label for optimizer in optimizers for group in optimizer.groups for label in group.members]
    given = Evidence([labels], dict.fromkeys(names, ())).given(names)
    for optimizer in optimizers:
        optimizer.rename(given)
    return True


def regroup(optimizers: Sequence[OptimizerState], file: TorchFile) -> None:
    """Give an optimizer of flat keys its param groups.

    Raises DamagedFileError: they are not those of the optimizer's parameters.
    """
    listed = _about(file).get("groups")
    if listed is None:
        return
    values = {label: group.hyperparameters for one in optimizers for group in one.groups for label in group.members}
    groups = [group for group in listed if isinstance(group, list)] if isinstance(listed, list) else []
    names = [name for group in groups for name in group]
    if len(optimizers) != 1 or len(names) != len(set(names)) or set(names) != values.keys():
        raise DamagedFileError("param groups of other parameters", path=file.path, expected="those of the optimizer")
    optimizers[0].groups = [Group(dict(values[group[0]]) if group else {}, list(group)) for group in groups]


def restore_own(checkpoint: Checkpoint, file: TorchFile) -> None:
    """Give a checkpoint, whose parameters and groups are there, what the file says of it.

    Raises DamagedFileError: the file is malformed, or speaks of what is not there.
    """
    checkpoint.files.append(describe(file, "metadata", rules=RULES))
    for label, (shape, dtype) in _abouts(file, "unnamed").items():
        if label in checkpoint.unnamed:
            checkpoint.unnamed[label].shape, checkpoint.unnamed[label].dtype = shape, dtype
    for index, values in as_mapping(_about(file).get("hyperparameters", {}), file.path).items():
        if type(index) is not int or not 0 <= index < len(checkpoint.param_groups):
            raise DamagedFileError("hyperparameters of a param group that is not there", path=file.path)
        checkpoint.param_groups[index].hyperparameters.update(with_scalars(as_mapping(values, file.path), file.path))
    restore(checkpoint, file.root, file)


def held_items(file: TorchFile) -> list[str]:
    """Return the keys of values that the directory's items hold. Raises DamagedFileError: the file is malformed."""
    found = _about(file).get("items", [])
    if not isinstance(found, list) or not all(isinstance(key, str) for key in found):
        raise DamagedFileError("unexpected content", path=file.path, expected="keys of items")
    return found


def _abouts(file: TorchFile, key: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shapes and element types under a key, by name."""
    found = {}
    for name, node in as_mapping(_about(file).get(key, {}), file.path).items():
        one = as_mapping(node, file.path)
        shape, dtype = one.get("shape"), one.get("dtype")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or dtype not in DTYPES:
            raise DamagedFileError("unexpected content", path=file.path, expected=f"shape and type of {name}")
        found[str(name)] = (tuple(shape), str(dtype))
    return found
