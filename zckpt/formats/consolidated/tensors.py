"""Which tensors a whole model has, from which slots and of which types, in whatever form it is written."""

from __future__ import annotations

from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot, is_floating

Tensors = dict[str, tuple[Slot, str]]
"""What is written under each name: a slot and its element type in the target."""


def model_tensors(
    checkpoint: Checkpoint, dtype: str | None, *, tied: str = "duplicate", exclude_frozen: bool = False
) -> Tensors:
    """Return what a whole model holds under each name; see `consolidate` for the parameters."""
    tensors: Tensors = {}
    for parameter in checkpoint.parameters.values():
        if parameter.tied_to is not None and tied == "drop":
            continue
        owner = checkpoint.owner(parameter.name)
        if owner.frozen and exclude_frozen:
            continue
        chosen = chosen_slot(owner, dtype)
        if chosen is not None:
            tensors[parameter.name] = chosen
    for buffer in checkpoint.buffers.values():
        tensors[buffer.name] = (buffer.slots[WEIGHT], buffer.slots[WEIGHT].dtype)
    return tensors


def trained_tensors(checkpoint: Checkpoint, *, tied: str = "duplicate") -> Tensors:
    """Return what a whole model holds for programs without masters: these in the place of weights, as they are."""
    found = model_tensors(checkpoint, None, tied=tied)
    return {name: (slot, slot.dtype) for name, (slot, _) in found.items()}


def chosen_slot(parameter: Parameter, dtype: str | None) -> tuple[Slot, str] | None:
    """Return the slot that a parameter is written from, and its element type in the target."""
    weight, master = parameter.weight, parameter.master
    best = master or weight
    if best is None:
        return None
    if parameter.frozen or not is_floating(best.dtype):
        return best, best.dtype
    if dtype == "keep":
        if weight is not None and weight.dtype != best.dtype:
            return weight, weight.dtype
        return best, parameter.dtype
    if dtype is None:
        return best, "float32" if master is not None else best.dtype
    return best, dtype


def optimizer_slots(checkpoint: Checkpoint, dtype: str | None) -> list[str]:
    """Return the slots that the optimizer's file needs: all, but for masters that the model's file holds exactly."""
    found = [name for name in checkpoint.slot_names() if name != WEIGHT]
    chosen = [chosen_slot(one, dtype) for one in checkpoint.parameters.values() if one.master]
    exact = all(one is not None and one[0].name == MASTER and one[1] == one[0].dtype for one in chosen)
    return [name for name in found if name != MASTER or not exact]
