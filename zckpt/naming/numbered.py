"""Names for the numbers of an optimizer that trained what is in memory, where the files have other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zckpt.errors import UsageError
from zckpt.evidence import Evidence
from zckpt.formats.transformers_trainer.architectures import Architecture
from zckpt.formats.transformers_trainer.readings import Weights, names_in_order
from zckpt.state import Checkpoint
from zckpt.state.names import is_number

NO_SHAPE = {"step", "RMS"}


def numbers_alone(checkpoint: Checkpoint) -> bool:
    """Tell whether one optimizer of a Trainer only numbers its parameters, and the files told the name of none."""
    members = [name for group in checkpoint.param_groups for name in group.parameters]
    is_one = checkpoint.format == "transformers-trainer" and not checkpoint.optimizers()
    return is_one and bool(checkpoint.unnamed) and all(map(is_number, members))


def named_as_live(
    mapped: Checkpoint, source: Checkpoint, live: Mapping[str, Any], version: object
) -> Checkpoint | None:
    """Return what is mapped, without an optimizer, with the source's, whose numbers are live parameters.

    None if that is not certain: names that the user gave tell it, or that transformers of the same version made the
    model. `live`: as the map has it; `version`: of transformers that saved the source. Raises UsageError: given names
    do not fit.
    """
    names = [name for name in live["trained"] if name in mapped.parameters]
    candidates = {one.name: one.shape for one in map(mapped.owner, names)}
    groups = [[*map(int, group.parameters)] for group in source.param_groups]
    unnamed = {int(number): one for number, one in source.unnamed.items()}
    shapes = {
        number: one.shape if one.shape or one.slots.keys() - NO_SHAPE else None for number, one in unnamed.items()
    }
    said = Evidence(groups, candidates, shapes)
    known = Weights(candidates, is_ordered=True, known=Architecture(layer_norms=frozenset(live["layer_norms"])))
    given = source.given_names
    if given is not None:
        order = said.known(given)
        found = said.recorded(order)
        if not found and {*order} >= {*candidates}:
            found = names_in_order(said, [name for name in dict.fromkeys(order) if name in candidates], known)
        if len(found) < len(said.numbers):
            raise UsageError(
                "the names do not fit the optimizer",
                path=source.named,
                expected=f"{len(said.numbers)} names in its order, or all of the model in memory, in the model's order",
                found=f"{len(given)} names, {len({*order} & {*candidates})} of the model's in memory",
            )
    elif str(version).split(".")[:2] == live["transformers"].split(".")[:2] and len(names) == len(live["trained"]):
        found = names_in_order(said, [*candidates], known)
    else:
        found = {}
    if len(found) < len(said.numbers):
        return None
    source.warnings[:] = [one for one in source.warnings if "give --names FILE" not in one]  # what they ask is known
    parameters = dict(mapped.parameters)
    for index, group in enumerate(groups):
        for number in group:
            one, own = parameters[found[number]], unnamed.get(number)
            slots, state = ({}, {}) if own is None else (own.slots, own.state)
            parameters[one.name] = replace(one, slots={**one.slots, **slots}, group=index, state=dict(state))
    named = [
        replace(group, parameters=[found[number] for number in own])
        for group, own in zip(source.param_groups, groups, strict=True)
    ]
    return replace(mapped, parameters=parameters, param_groups=named)
