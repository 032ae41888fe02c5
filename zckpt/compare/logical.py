"""The logical state of a checkpoint under names and values that do not depend on what wrote it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zckpt.engine.read import read_extent
from zckpt.errors import UsageError
from zckpt.state import MASTER, WEIGHT, Checkpoint, Extent, Parameter, Scalar, Slot
from zckpt.state.names import canonical_names
from zckpt.storage.files import Sources
from zckpt.torchfile import plain


def named(checkpoint: Checkpoint, rename: Sequence[tuple[str, str]] = ()) -> dict[str, Parameter]:
    """Return all parameters and buffers by canonical name; those without a name by `#` and their number."""
    every = {parameter.name: parameter for parameter in checkpoint.tensors()}
    names = {name: _renamed(short, rename) for name, short in canonical_names(every).items()}
    found: dict[str, Parameter] = {}
    for name, parameter in every.items():
        if names[name] in found:
            raise UsageError(
                f"--rename makes {found[names[name]].name} and {name} one", found=names[name], advice="narrow it"
            )
        found[names[name]] = parameter
    found.update({f"#{number}": parameter for number, parameter in checkpoint.unnamed.items()})
    return found


def _renamed(name: str, rename: Sequence[tuple[str, str]]) -> str:
    for old, new in rename:
        try:
            name = re.sub(old, new, name)
        except re.error as error:
            raise UsageError("--rename is no regular expression", expected="OLD=NEW", found=f"{old}: {error}") from None
    return name


def own_weight(parameter: Parameter) -> Slot | None:
    """Return the weight of a parameter, if it says anything.

    Where ranks' values are averaged, the weight is the rounded mean of the masters, not the mean of the weights.
    """
    weight = parameter.slots.get(WEIGHT)
    return None if weight is not None and weight.replicas and MASTER in parameter.slots else weight


def single(value: object) -> object:
    """Return a single value as JSON-able data, however it is stored: a tensor of no dimension, a number, a node."""
    if isinstance(value, Slot):
        if value.shape:
            return f"tensor of {value.dtype} {list(value.shape)}"
        with Sources() as sources:
            number: object = read_extent(value, Extent.whole(()), sources)[0].item()
            return number
    return plain(value.value if isinstance(value, Scalar) else value)
