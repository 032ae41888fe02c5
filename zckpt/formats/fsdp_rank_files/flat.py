"""The optimizer's state of FSDP1, to be written: flat parameters of its units, cut into a shard for each rank.

A parameter that no step has reached has no state of its own; as part of a flat parameter its state is zero, as torch
fills it in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zckpt.errors import UnsupportedError, listed
from zckpt.formats.fsdp_rank_files.dtensors import plain_tensor
from zckpt.formats.fsdp_rank_files.units import Units
from zckpt.formats.torch_files.writer import SlotTensor, ValueTensor
from zckpt.state import Checkpoint, Slot
from zckpt.state.dtypes import itemsize
from zckpt.state.views import concat, reshape, zeros
from zckpt.storage.files import opened, read_at


def flat_state(checkpoint: Checkpoint, tree: dict[object, Any], units: Units) -> dict[int, dict[str, object]]:
    """Return the state of each unit: lines of its parameters, end to end, and values that all of them share.

    Raises UnsupportedError: members of a unit have other state than each other, or are of several param groups.
    """
    if len(checkpoint.param_groups) != 1:
        raise _refused("the optimizer has several param groups", f"{len(checkpoint.param_groups)}",
                       "give --groups one, or --fsdp-version 2")  # fmt: skip
    numbers = {name: number for number, name in enumerate(checkpoint.param_groups[0].parameters)}
    found: dict[int, dict[str, object]] = {}
    for unit, members in enumerate(units):
        states = {name: tree["state"].get(numbers.get(name, -1)) for name in members}
        known = [state for state in states.values() if state]
        if not known:
            continue
        if any(state.keys() != known[0].keys() for state in known):
            raise _refused(f"parameters of the unit of {members[0]} have different state", members[0])
        found[unit] = {
            key: _end_to_end(checkpoint, key, states)
            if isinstance(value, SlotTensor) and value.slot.shape
            else _shared(key, members[0], [state[key] for state in known])
            for key, value in known[0].items()
        }
    return found


def _end_to_end(checkpoint: Checkpoint, key: str, states: Mapping[str, Mapping[str, object] | None]) -> SlotTensor:
    """Return one state of all parameters of a unit as a line; where no step has reached one, it is zero."""
    found: dict[str, Slot | None] = {}
    for name, state in states.items():
        value = state[key] if state else None
        found[name] = value.slot if isinstance(value, SlotTensor) else None
        if value is not None and getattr(found[name], "shape", None) != checkpoint.parameters[name].shape:
            raise _refused(f"{key} of {name} is not one value for each of its elements", key)
    known = [slot for slot in found.values() if slot is not None]
    dtypes = {slot.dtype for slot in known}
    if len(dtypes) > 1:
        raise _refused(f"{key} of {next(iter(states))} and others is of several types", listed(sorted(dtypes)))
    shapes = {name: (checkpoint.parameters[name].numel,) for name in found}
    line = concat([zeros(known[0], shapes[name]) if slot is None else reshape(slot, shapes[name])
                   for name, slot in found.items()], 0)  # fmt: skip
    return SlotTensor(line, line.dtype, f"{key} of the unit of {next(iter(states))}")


def _shared(key: str, member: str, values: Sequence[object]) -> object:
    """Return the one value that all members of a unit have."""
    if len({_content(value) for value in values}) > 1:
        raise _refused(f"parameters of the unit of {member} have different values of {key}", key)
    first = values[0]
    return plain_tensor(first.slot, first.dtype, first.label) if isinstance(first, SlotTensor) else first


def _content(value: object) -> object:
    """Return what equal single values have in common."""
    if isinstance(value, ValueTensor):
        return value.dtype, value.data
    if not isinstance(value, SlotTensor):
        return repr(value)
    (span,) = value.slot.spans
    with opened(span.path) as descriptor:
        return value.dtype, read_at(descriptor, span.offset, itemsize(span.dtype), path=span.path)


def _refused(message: str, found: str, advice: str = "give --fsdp-version 2") -> UnsupportedError:
    return UnsupportedError(
        f"{message}, and FSDP1 has one state for all of a unit",
        found=found,
        advice=advice,
    )
