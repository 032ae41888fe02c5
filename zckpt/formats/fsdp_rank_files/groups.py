"""One param group of all of the model's parameters, as verl and SkyRL have it, of the several of a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.errors import UnsupportedError, listed
from zckpt.evidence.order import GIVEN
from zckpt.formats.fsdp_rank_files.extra import SCHEDULERS
from zckpt.formats.transformers_trainer.states import PER_GROUP
from zckpt.state import Checkpoint, ParamGroup
from zckpt.torchfile import FromFile, brief

ONE, KEEP = "one", "keep"

DCP = "dcp"
"""The format whose files have a model in the order of its state dict."""


def one_group(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint whose only param group has all parameters in the model's order, and what to say of it.

    Its hyperparameters, and what the scheduler has for it, are those of the first group. Raises UnsupportedError: the
    order in which the checkpoint has its parameters is not the model's: groups have them in another.
    """
    groups = checkpoint.param_groups
    order = [one.name for one in checkpoint.parameters.values() if one.tied_to is None]
    strange = next((group for group in groups if not follows(group.parameters, order)), None)
    # A program's own DCP files say the model's order: FSDP1's optimizer has that of flat parameters.
    of_state_dict = checkpoint.format == DCP and "origin" not in checkpoint.details
    if strange is not None and not of_state_dict:
        raise UnsupportedError(
            "the order of the model's parameters is not known: the files have another than the optimizer",
            found=f"{listed(strange.parameters, most=3)} in the optimizer",
            advice="give --groups keep, or of safetensors --names FILE with the names in the model's order",
        )
    if len(groups) > 1 and GIVEN not in checkpoint.details and _is_sorted(checkpoint, order):
        raise UnsupportedError(
            "the order of the model's parameters is not known: the files have them sorted by name, in several groups",
            found=listed(order, most=3),
            advice="give --names FILE with the names of all parameters in the model's order, --groups keep, or put the "
            "config.json of a known model_type with the source",
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
        if repr(first.hyperparameters.get(key)) != repr(value)
    ]
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


def _is_sorted(checkpoint: Checkpoint, order: Sequence[str]) -> bool:
    """Tell whether names are sorted within each element type, as safetensors have them: that is no model's order."""
    by_type: dict[str, list[str]] = {}
    for name in order:
        by_type.setdefault(str(checkpoint.parameters[name].dtype), []).append(name)
    return len(order) > 1 and all(names == sorted(names) for names in by_type.values())


def follows(names: Sequence[str], order: Sequence[str]) -> bool:
    """Tell whether names are among others in the same order."""
    rest = iter(order)
    return all(name in rest for name in names)
