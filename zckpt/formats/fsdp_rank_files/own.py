"""`zckpt.pt`, which zckpt puts beside the files of ranks: what those have no place for.

{**formats.remainder, "fsdp": {"names": [[name, ...], ...], "units": [module, ...] or None, "dtypes": {name: dtype}}}

with the names of the parameters of each param group in the optimizer's order, the modules that FSDP1 wraps, and the
types that weights had whose masters are the weights here: FSDP trains what it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.errors import DamagedFileError
from zckpt.formats.fsdp_rank_files.units import members_of
from zckpt.formats.remainder import remainder, remainder_rules
from zckpt.formats.torch_files.tensors import as_mapping, as_names
from zckpt.state import MASTER, WEIGHT, Checkpoint
from zckpt.state.dtypes import DTYPES
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.torchfile import TorchFile

KEY = "fsdp"

RULES = (*remainder_rules(), Rule((KEY, "**"), IMPLIED, "the order of the optimizer's parameters"))


def own_tree(checkpoint: Checkpoint, units: Sequence[str] | None) -> dict[str, object]:
    """Return the tree of `zckpt.pt`."""
    names = [list(group.parameters) for group in checkpoint.param_groups]
    masters = {name: checkpoint.owner(name).slots.get(MASTER) for name in checkpoint.parameters}
    types = {name: one.dtype for name, one in checkpoint.parameters.items()}
    dtypes = {name: types[name] for name, one in masters.items() if one is not None and one.dtype != types[name]}
    about = {"names": names, "units": None if units is None else list(units), "dtypes": dtypes}
    return {**remainder(checkpoint), KEY: about}


def give_masters(checkpoint: Checkpoint, file: TorchFile) -> None:
    """Give a checkpoint, whose names are those of `zckpt.pt`, masters for weights that had another type than these.

    Raises
    ------
    DamagedFileError
        The file is malformed.
    """
    about = as_mapping(as_mapping(file.root, file.path).get(KEY), file.path)
    for name, dtype in as_mapping(about.get("dtypes", {}), file.path).items():
        one = checkpoint.parameters.get(str(name))
        if one is None or dtype not in DTYPES:
            raise DamagedFileError("unexpected content", path=file.path, expected=f"the type of {name}", found=dtype)
        one.dtype = str(dtype)
        weight = one.slots.pop(WEIGHT, None)
        if weight is not None:
            one.slots = {MASTER: replace(weight, name=MASTER), **one.slots}


def recorded_names(file: TorchFile, parameters: Sequence[str]) -> list[str] | None:
    """Return the names of the optimizer's parameters as its files number them: those in flat parameters in turn.

    Parameters
    ----------
    file : TorchFile
    parameters : sequence of str
        The model's tensors, in its order.

    Raises
    ------
    DamagedFileError
        It is no such file, or malformed.
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
