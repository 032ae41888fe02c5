"""One param group of all of the model's parameters, as verl and SkyRL have it, of the several of a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.errors import UnsupportedError, listed
from zckpt.state import Checkpoint, ParamGroup
from zckpt.torchfile import brief

ONE, KEEP = "one", "keep"


def one_group(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint whose only param group has all parameters in the model's order, and what to say of it.

    Its hyperparameters are those of the first group.

    Raises
    ------
    UnsupportedError
        The order in which the checkpoint has its parameters is not the model's: groups have them in another.
    """
    groups = checkpoint.param_groups
    order = [one.name for one in checkpoint.parameters.values() if one.tied_to is None]
    strange = next((group for group in groups if not _follows(group.parameters, order)), None)
    if strange is not None:
        raise UnsupportedError(
            "the order of the model's parameters is not known: the files have another than the optimizer",
            path=checkpoint.source,
            found=f"{listed(strange.parameters, most=3)} in the optimizer",
            advice="give --groups keep, or convert from a format of training",
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
    return replace(checkpoint, parameters=parameters, param_groups=[merged]), notes


def _follows(names: Sequence[str], order: Sequence[str]) -> bool:
    """Tell whether names are among others in the same order."""
    rest = iter(order)
    return all(name in rest for name in names)
