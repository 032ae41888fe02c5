"""The order of a model's parameters, where someone says it and files do not have it. Pure.

Files of safetensors have their tensors sorted. Formats that number parameters do so in the model's order.
"""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.errors import UsageError, listed
from zckpt.state.checkpoint import Checkpoint
from zckpt.state.mappings import are_distinct
from zckpt.state.names import aligned

DCP = "dcp"
"""The format whose files have a model in the order of its state dict."""

GIVEN = "parameter order"
"""Which of a checkpoint's details says that its parameters are in the order that was given."""


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


def follows(names: Sequence[str], order: Sequence[str]) -> bool:
    """Tell whether names are among others in the same order."""
    rest = iter(order)
    return all(name in rest for name in names)


def other_order(checkpoint: Checkpoint, *formats: str) -> Sequence[str]:
    """Return the names of a param group that files of formats have in another order than the model; none: ()."""
    source = checkpoint.converted_from.get("format", checkpoint.format)
    order = list(checkpoint.parameters)
    is_sorted = checkpoint.is_sorted and not checkpoint.converted_from
    is_told = source in formats and not (checkpoint.unnamed or is_sorted or order == sorted(order))
    every = (group.parameters for group in checkpoint.param_groups if is_told)
    return next((names for names in every if not follows(names, order)), ())


def order_notes(checkpoint: Checkpoint) -> list[str]:
    """Return what to say where an optimizer's parameters get numbers in another order than the model's."""
    names = other_order(checkpoint, DCP, "torch")
    said = (
        f"the optimizer's parameters are numbered as the source lists them ({listed(names, most=3)}), not in the "
        "model's order, as FSDP1 lists flat ones: an optimizer with another order would get others' state; "
        "`zckpt.load` goes by name"
    )
    return [said] if names else []


def _known(checkpoint: Checkpoint, names: Sequence[str]) -> list[str]:
    """Return names as the checkpoint has them; strange ones as they are."""
    known = aligned(checkpoint.names, names)
    return [known.get(name, name) for name in names]
