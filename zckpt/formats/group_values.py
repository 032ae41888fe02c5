"""Single values that all parameters of a param group have alike, such as their step: for formats with one for all."""

from __future__ import annotations

from collections.abc import Collection

from zckpt.compare.logical import number_in
from zckpt.errors import UnsupportedError, listed
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.state import Checkpoint, ParamGroup, Scalar, number_of
from zckpt.torchfile import alike, node_of


def refuse_several(checkpoint: Checkpoint, what: str) -> None:
    """Raise UnsupportedError where a checkpoint has several optimizers, and what is to be written has one."""
    names = checkpoint.optimizers()
    if names:
        raise UnsupportedError(
            f"holds several optimizers, but {what} one",
            path=checkpoint.source,
            found=listed(names),
            advice="`zckpt convert --to zckpt` or `--to=dcp` keeps them",
        )


def group_values(checkpoint: Checkpoint, group: ParamGroup, keys: Collection[str]) -> dict[str, object]:
    """Return the single values that all parameters of a group with any have, and have alike.

    Slots of these keys are numbers, which are read where the group does not have them.
    """
    present = []
    for name in group.parameters:
        one = checkpoint.parameters[name]
        slots = {key: slot for key, slot in one.slots.items() if key in keys and key not in group.state}
        numbers = {key: Scalar(number_in(slot), slot.dtype) for key, slot in slots.items() if not slot.shape}
        if one.state or numbers:
            present.append({**one.state, **numbers})
    shared = {
        key: value
        for key, value in (present[0] if present else {}).items()
        if (value is None or isinstance(value, (bool, int, float, str, Scalar)) or _is_plain(value))
        and all(key in values and same(values[key], value) for values in present)
    }
    return {**shared, **group.state}


def same(one: object, other: object) -> bool:
    """Tell whether two single values are the same, however they are stored."""
    a, b = (number_of(x) for x in (one, other))
    if _is_plain(a) and _is_plain(b):
        return alike(a, b)
    return bool(a == b)


def _is_plain(value: object) -> bool:
    """Tell whether a value is a list, a tuple or a dict without tensors."""
    node = node_of(value)
    return isinstance(node, (list, tuple, dict)) and not holds_tensors(node)
