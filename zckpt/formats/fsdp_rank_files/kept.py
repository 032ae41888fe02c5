"""What files have besides tensors: other state of all ranks and of each, param groups, and what only zckpt keeps.

`zckpt.pt`, which zckpt puts beside the files of ranks, holds what those have no place for:

{**formats.remainder, "fsdp": {"names": [[name, ...], ...], "units": [module, ...] or None, "dtypes": {name: dtype}}}

with the names of the parameters of each param group in the optimizer's order, the modules that FSDP1 wraps, and the
types that weights had whose masters are the weights here: FSDP trains what it saves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from zckpt.errors import DamagedFileError, UnsupportedError, about, listed
from zckpt.evidence.order import DCP, GIVEN, follows
from zckpt.formats.fsdp_rank_files.directory import EXTRA, rank_name
from zckpt.formats.fsdp_rank_files.units import members_of
from zckpt.formats.remainder import remainder, types_of_weights
from zckpt.formats.torch_files.tensors import as_mapping, as_names
from zckpt.formats.transformers_trainer.states import PER_GROUP, scheduler
from zckpt.state import Checkpoint, ParamGroup, by_key, list_of
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.torchfile import FromFile, TorchFile, brief

OF_ITS_RANK = ("rank", "world_size")
"""What a rank's file says of itself."""

SCHEDULERS = ("lr_scheduler", "scheduler")
"""Keys of metadata under which programs have the scheduler's state; the files have it under the first."""

_OF_ONE = re.compile(r"extra_state_world_size_([0-9]{1,7})_rank_([0-9]{1,7})\.(.+)")
"""Keys of metadata for what only one rank has; the first rank's are under their own."""

KEYS = "extra_state"
"""Under which the details have the keys of the files."""


def keys_of(checkpoint: Checkpoint) -> list[str]:
    """Return the keys of the source's further files; of another format those of which ranks had values of their own."""
    return list(map(str, list_of(checkpoint.details.get(KEYS)))) or _own_keys(checkpoint)


def of_single_ranks(checkpoint: Checkpoint) -> list[str]:
    """Return the keys of which some rank has a value of its own."""
    own = _own_keys(checkpoint)
    return [key for key in keys_of(checkpoint) if key in own]


def _own_keys(checkpoint: Checkpoint) -> list[str]:
    matches = filter(None, map(_OF_ONE.fullmatch, checkpoint.metadata))
    return list(dict.fromkeys(match[3] for match in matches))


def ranks_with_state(checkpoint: Checkpoint) -> int:
    """Return how many ranks the values of single ranks are of: those of the files that a program wrote first."""
    found = {int(match[1]) for match in map(_OF_ONE.fullmatch, checkpoint.metadata) if match is not None}
    return max(found, default=checkpoint.world_size)


def scheduler_of(checkpoint: Checkpoint, notes: list[str]) -> object:
    """Return the state of the scheduler; where a source that was trained has none, one at its step: SkyRL needs it."""
    found = [checkpoint.metadata[key] for key in SCHEDULERS if key in checkpoint.metadata]
    if found or checkpoint.step is None or not checkpoint.param_groups:
        return next(iter(found), None)
    return scheduler(checkpoint, notes, name="lr_scheduler")


def extra_state(checkpoint: Checkpoint, rank: int, world_size: int, scheduler: object) -> dict[str, object]:
    """Return what a rank's further file holds: what the source's has, without what is of ranks that it had not."""
    metadata, ranks = checkpoint.metadata, ranks_with_state(checkpoint)
    found: dict[str, object] = {"lr_scheduler": scheduler}
    single = of_single_ranks(checkpoint)
    for key in keys_of(checkpoint):
        own = of_rank(EXTRA, ranks, rank, key)
        if key in OF_ITS_RANK:
            found[key] = rank if key == "rank" else world_size
        elif own in metadata:
            found[key] = metadata[own]
        elif key in metadata and (key not in single or rank < ranks):
            found[key] = metadata[key]
    return found


def of_rank(kind: str, world_size: int, rank: int, key: str) -> str:
    """Return the key of metadata for what one rank's file of a kind has otherwise than the first."""
    return f"{Path(rank_name(kind, world_size, rank)).stem}.{key}"


ONE = "one"


def one_group(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint whose only param group has all parameters in the model's order, and what to say of it.

    Its hyperparameters, and what the scheduler has for it, are those of the first group. Raises UnsupportedError: the
    order in which the checkpoint has its parameters is not the model's: groups have them in another.
    """
    groups = checkpoint.param_groups
    order = [one.name for one in checkpoint.owners]
    strange = next((group for group in groups if not follows(group.parameters, order)), None)
    # A program's own DCP files say the model's order, whatever the optimizer's is.
    of_state_dict = checkpoint.format == DCP and "origin" not in checkpoint.details
    if strange is not None and not of_state_dict:
        raise UnsupportedError(
            "the order of the model's parameters is unknown: the files and the optimizer have different orders",
            found=f"{listed(strange.parameters, most=3)} in the optimizer",
            advice="give --groups=keep, or for safetensors --names FILE with the names in the model's order",
        )
    # Names that are sorted within each element type, as safetensors have them, are in no model's order.
    by_type = by_key((checkpoint.parameters[name].dtype, name) for name in order)
    is_sorted = len(order) > 1 and all(names == sorted(names) for names in by_type.values())
    if len(groups) > 1 and GIVEN not in checkpoint.details and is_sorted:
        raise UnsupportedError(
            "the order of the model's parameters is unknown: the files have them sorted by name, in several groups",
            found=listed(order, most=3),
            advice="give --names FILE with the names of all parameters in the model's order, --groups=keep, or add "
            "the config.json of a known model_type to the source",
        )
    parameters = dict(checkpoint.parameters)
    for name in order:
        one = parameters[name]
        state = groups[one.group].state if one.group is not None and (one.state or len(one.slots) > 1) else {}
        parameters[name] = replace(one, group=0, state={**state, **one.state})
    first = groups[0]
    notes = [
        f"{key} of all parameters is {brief(first.hyperparameters.get(key))}, which was {brief(value)} of some"
        for group in groups[1:]
        for key, value in group.hyperparameters.items()
        if key != "param_names" and repr(first.hyperparameters.get(key)) != repr(value)
    ]
    unsure = [one.name for one in checkpoint.owners if one.group is None and not one.frozen]
    if unsure:
        notes.append(
            f"{listed(unsure)}, which the source's optimizer does not have, {'is' if len(unsure) == 1 else 'are'} "
            "counted among the parameters: a model that has buffers with these names does not load the optimizer"
        )
    merged = ParamGroup(first.hyperparameters, order)
    metadata = {
        key: _of_first(value, len(groups)) if key in SCHEDULERS else value for key, value in checkpoint.metadata.items()
    }
    return replace(checkpoint, parameters=parameters, param_groups=[merged], metadata=metadata), notes


def _of_first(scheduler: object, count: int) -> object:
    """Return the state of a scheduler of one param group: what it has for each group, for the first only."""
    if isinstance(scheduler, FromFile):
        return replace(scheduler, node=_of_first(scheduler.node, count))
    if isinstance(scheduler, list):
        return [_of_first(one, count) for one in scheduler]
    if not isinstance(scheduler, dict):
        return scheduler
    found = {}
    for key, value in scheduler.items():
        is_cut = key in PER_GROUP and isinstance(value, (list, tuple)) and len(value) == count
        found[key] = value[:1] if is_cut else _of_first(value, count) if key == "_schedulers" else value
    return found


KEY = "fsdp"

RULE = Rule((KEY, "**"), IMPLIED, "the order of the optimizer's parameters")


def own_tree(checkpoint: Checkpoint, units: Sequence[str] | None) -> dict[str, object]:
    """Return the tree of `zckpt.pt`."""
    names = [list(group.parameters) for group in checkpoint.param_groups]
    own = {"names": names, "units": None if units is None else list(units), "dtypes": types_of_weights(checkpoint)}
    return {**remainder(checkpoint), KEY: own}


def recorded_names(file: TorchFile, parameters: Sequence[str]) -> list[str] | None:
    """Return the names of the optimizer's parameters as its files number them: those in flat parameters in turn.

    `parameters`: the model's tensors, in its order. Raises DamagedFileError: it is no such file, or malformed.
    """
    with about(file.path):
        tree = as_mapping(file.root)
        said = as_mapping(tree.get(KEY))
        groups = said.get("names")
        if not isinstance(groups, list):
            raise DamagedFileError("unexpected content", expected="lists of names", found=KEY)
        names = [name for group in groups for name in as_names(group)]
        if said.get("units") is None or not names:
            return names or None
        others = {*as_names(tree.get("buffers", [])), *as_mapping(tree.get("tied", {}))}
        owners = [name for name in parameters if name not in others]
        return [name for unit in members_of(as_names(said["units"]), owners) for name in unit]


def as_grouped(checkpoint: Checkpoint, groups: Sequence[list[str]]) -> None:
    """Give a checkpoint the param groups that were written: flat keys merge those whose values are equal."""
    own = {name: group for group in checkpoint.param_groups for name in group.parameters}
    if sorted(own) == sorted(chain(*groups)) and groups != [group.parameters for group in checkpoint.param_groups]:
        found = checkpoint.regrouped(replace(own[its[0]], parameters=its) for its in groups if its)
        checkpoint.param_groups, checkpoint.parameters = found.param_groups, found.parameters
