"""`zckpt.pt`, which zckpt puts beside the files of ranks: what those have no place for.

{**formats.remainder, "fsdp": {"names": [[name, ...], ...], "units": [module, ...] or None, "dtypes": {name: dtype}}}

with the names of the parameters of each param group in the optimizer's order, the modules that FSDP1 wraps, and the
types that weights had whose masters are the weights here: FSDP trains what it saves.
"""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.errors import DamagedFileError
from zckpt.formats.fsdp_rank_files.units import members_of
from zckpt.formats.remainder import as_masters, remainder, remainder_rules, types_of_weights
from zckpt.formats.torch_files.tensors import as_mapping, as_names
from zckpt.state import Checkpoint
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.torchfile import TorchFile

KEY = "fsdp"

RULES = (*remainder_rules(), Rule((KEY, "**"), IMPLIED, "the order of the optimizer's parameters"))


def own_tree(checkpoint: Checkpoint, units: Sequence[str] | None) -> dict[str, object]:
    """Return the tree of `zckpt.pt`."""
    names = [list(group.parameters) for group in checkpoint.param_groups]
    units = None if units is None else list(units)
    about = {"names": names, "units": units, "dtypes": types_of_weights(checkpoint)}
    return {**remainder(checkpoint), KEY: about}


def give_masters(checkpoint: Checkpoint, file: TorchFile) -> None:
    """Give a checkpoint, whose names are those of `zckpt.pt`, masters for weights that had another type than these.

    Raises DamagedFileError: the file is malformed.
    """
    about = as_mapping(as_mapping(file.root, file.path).get(KEY), file.path)
    as_masters(checkpoint, as_mapping(about.get("dtypes", {}), file.path), file.path)


def recorded_names(file: TorchFile, parameters: Sequence[str]) -> list[str] | None:
    """Return the names of the optimizer's parameters as its files number them: those in flat parameters in turn.

    `parameters`: the model's tensors, in its order. Raises DamagedFileError: it is no such file, or malformed.
    """
    tree = as_mapping(file.root, file.path)
    about = as_mapping(tree.get(KEY), file.path)
    groups = about.get("names")
    if not isinstance(groups, list):
        raise DamagedFileError("unexpected content", path=file.path, expected="lists of names", found=KEY)
    names = [name for group in groups for name in as_names(group, file.path)]
    if about.get("units") is None or not names:
        return names or None
    others = {*as_names(tree.get("buffers", []), file.path), *as_mapping(tree.get("tied", {}), file.path)}
    owners = [name for name in parameters if name not in others]
    return [name for unit in members_of(as_names(about["units"], file.path), owners) for name in unit]
