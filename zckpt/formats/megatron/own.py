"""`zckpt.pt` beside the files of a `torch_dist` directory: what those have no place for. Megatron-Core leaves it alone.

{**formats.remainder,
 "megatron": {"groups": [[name]],        of each param group of `common.pt`, in its order
              "names": {name: name},     in the files, and here, where they differ
              "absent": {name: {"shape": [int], "dtype": str}}}}     of further names of tied parameters
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zckpt.errors import DamagedFileError
from zckpt.formats.megatron.directory import OWN_NAME
from zckpt.formats.remainder import remainder, remainder_rules, restore
from zckpt.formats.torch_files.tensors import as_mapping, as_names, describe
from zckpt.state import Checkpoint, Parameter
from zckpt.state.dtypes import DTYPES
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.storage.files import is_file
from zckpt.torchfile import TorchFile, read_torchfile

KEY = "megatron"

RULES = (*remainder_rules(), Rule((KEY, "**"), IMPLIED, "names, and whose each param group is"))


def own_tree(
    checkpoint: Checkpoint, *, held: Collection[str], groups: Sequence[Sequence[str]], names: Mapping[str, str]
) -> dict[str, object]:
    """Return the tree.

    Parameters
    ----------
    checkpoint : Checkpoint
    held : collection of str
        Keys of metadata, and of the optimizer's, that the other files have.
    groups : sequence of sequence of str
        Names of each group's parameters.
    names : mapping of str to str
        Names here by those in the files.
    """
    rest = {key: value for key, value in checkpoint.metadata.items() if key not in held}
    others = {key: value for key, value in checkpoint.optimizer_metadata.items() if key not in held}
    aliases = [one for one in checkpoint.parameters.values() if one.tied_to is not None]
    return {
        **remainder(replace(checkpoint, metadata=rest, optimizer_metadata=others)),
        KEY: {
            "groups": [list(its) for its in groups],
            "names": {filed: name for filed, name in names.items() if filed != name},
            "absent": {one.name: {"shape": list(one.shape), "dtype": one.dtype} for one in aliases},
        },
    }


@dataclass(frozen=True, slots=True)
class Own:
    """What the file says that is needed before the rest."""

    file: TorchFile
    names: dict[str, str] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)


def read_own(directory: Path) -> Own | None:
    """Read the file of a directory; None where there is none, as Megatron-Core leaves it.

    Raises
    ------
    DamagedFileError
        It is malformed.
    """
    path = directory / OWN_NAME
    if not is_file(path):
        return None
    file = read_torchfile(path)
    about = as_mapping(as_mapping(file.root, file.path).get(KEY), file.path)
    names = as_mapping(about.get("names", {}), file.path)
    listed = about.get("groups", [])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in names.values()):
        raise DamagedFileError("unexpected content", path=file.path, expected="names, and param groups as lists")
    return Own(file, {str(key): str(name) for key, name in names.items()}, [as_names(its, file.path) for its in listed])


def add_absent(checkpoint: Checkpoint, own: Own) -> None:
    """Add the further names of tied parameters.

    Raises
    ------
    DamagedFileError
        One of them is there, or the file is malformed.
    """
    path = own.file.path
    about = as_mapping(as_mapping(own.file.root, path).get(KEY), path)
    for key, node in as_mapping(about.get("absent", {}), path).items():
        name, one = str(key), as_mapping(node, path)
        shape, dtype = one.get("shape"), one.get("dtype")
        known = name in checkpoint.parameters or name in checkpoint.buffers
        if known or not isinstance(shape, list) or not all(type(n) is int for n in shape) or dtype not in DTYPES:
            raise DamagedFileError("unexpected content", path=path, expected=f"shape and type of {name}, not there")
        checkpoint.parameters[name] = Parameter(name, tuple(shape), str(dtype))


def restore_own(checkpoint: Checkpoint, own: Own) -> None:
    """Give a checkpoint, whose parameters and groups are there, what the file says of it.

    Raises
    ------
    DamagedFileError
        The file is malformed, or speaks of what is not there.
    """
    checkpoint.files.append(describe(own.file, "metadata", rules=RULES))
    metadata, of_optimizer, scale = checkpoint.metadata, checkpoint.optimizer_metadata, checkpoint.loss_scale
    restore(checkpoint, own.file.root, own.file)
    checkpoint.metadata = {**metadata, **checkpoint.metadata}
    checkpoint.optimizer_metadata = {**of_optimizer, **checkpoint.optimizer_metadata}
    checkpoint.loss_scale = scale if checkpoint.loss_scale is None else checkpoint.loss_scale
