"""The order of a model's parameters, where someone says it and files do not have it. Pure.

Files of safetensors have their tensors sorted. Formats that number parameters do so in the model's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from zckpt.errors import UsageError, listed
from zckpt.state.checkpoint import Checkpoint, ParamGroup
from zckpt.state.mappings import are_distinct, by_key, positions
from zckpt.state.names import aligned

GIVEN = "parameter order"
"""Which of a checkpoint's details says that its parameters are in the order that was given."""


MOST_MODULES = 100
"""That one is in, each in the next: names of more are no model's, and are not looked into."""


def put_in_order(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """Put a checkpoint's parameters in the order of names, those of all of them.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : sequence of str
        As the model has them, whatever wrappers it is in; aliases and buffers may be among them.

    Raises
    ------
    UsageError
        They are not the names of all of the parameters, each once.
    """
    order, every = _known(checkpoint, names), {*checkpoint.names}
    missing = [one.name for one in checkpoint.owners if one.name not in order]
    strange = [name for name in order if name not in every]
    if missing or strange or not are_distinct(order):
        wrong = f"without {listed(missing)}" if missing else f"with {listed(strange)}" if strange else "some twice"
        raise UsageError(
            "the names do not match the model's parameters",
            path=checkpoint.source,
            expected=f"all {len(checkpoint.parameters)} names in the model's order, each once",
            found=f"{len(names)} names, {wrong}",
        )
    arranged = [name for name in order if name in checkpoint.parameters]
    checkpoint.parameters = {name: checkpoint.parameters[name] for name in (*arranged, *checkpoint.parameters)}
    checkpoint.details[GIVEN] = "as --names says"


def tells_order(checkpoint: Checkpoint, names: Sequence[str]) -> bool:
    """Tell whether names of all parameters that an optimizer was read by are in the model's order for sure.

    Those of several groups, one group after the other, are in the optimizer's order, which may be another.
    """
    members, order = checkpoint.grouped, _known(checkpoint, names)
    owners = {one.name for one in checkpoint.owners}
    if not owners <= {*order} <= {*checkpoint.names}:
        return False
    return len(checkpoint.param_groups) < 2 or [name for name in order if name in members] != members


def is_sorted(checkpoint: Checkpoint, names: Sequence[str]) -> bool:
    """Tell whether names are sorted within each element type, as safetensors have them: in no model's order."""
    by_type = by_key((checkpoint.parameters[name].dtype, name) for name in names)
    return len(names) > 1 and all(its == sorted(its) for its in by_type.values())


def put_units_in_order(checkpoint: Checkpoint, groups: Sequence[ParamGroup]) -> None:
    """Put the members of param groups that are in the order of FSDP1's flat parameters in the model's.

    Of a flat one, FSDP1's state dicts list the members where it was, and the root's comes first. That is no order of an
    optimizer's parameters, which programs without flat ones number in the model's order.
    """
    order = [one.name for one in checkpoint.owners]
    place = positions(order)

    def is_cut(names: Sequence[str]) -> bool:
        end = next((at for at, (one, other) in enumerate(pairwise(names), 1) if place[one] > place[other]), None)
        if end is None:
            return True
        taken = {module for name in names[:end] for module in _modules(name)}
        rest = groupby(names[end:], lambda name: next((one for one in _modules(name) if one not in taken), None))
        units = [(unit, [*its]) for unit, its in rest]
        firsts = [min(place[name] for name in its) for _, its in units]
        is_unit = firsts == sorted(firsts) and are_distinct([unit for unit, _ in units]) and None not in dict(units)
        return is_unit and all(is_cut(its) for _, its in units)

    for group in groups if not is_sorted(checkpoint, order) else []:
        arranged = sorted(group.parameters, key=lambda name: place.get(name, 0))
        if arranged == group.parameters or not place.keys() >= {*arranged} or max(map(_depth, arranged)) > MOST_MODULES:
            continue
        if is_cut(group.parameters):
            group.parameters[:] = arranged
            checkpoint.details["param_groups"] = "in the model's order, not that of FSDP1's flat parameters"


def _depth(name: str) -> int:
    return name.count(".")


def _modules(name: str) -> list[str]:
    """Return the modules that a parameter is in, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _known(checkpoint: Checkpoint, names: Sequence[str]) -> list[str]:
    """Return names as the checkpoint has them; strange ones as they are."""
    known = aligned(checkpoint.names, names)
    return [known.get(name, name) for name in names]
