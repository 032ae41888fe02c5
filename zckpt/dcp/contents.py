"""What a state dict holds: the model and the optimizer in it by name, and the rest, found as in a directory of DCP.

A rank looks at its own state dict to know what its tensors are called; the coordinator at what all have written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zckpt.formats.dcp.items import ObjectItem, TensorItem
from zckpt.formats.dcp.metadata import Keys
from zckpt.formats.dcp.names import find_optimizers
from zckpt.formats.dcp.reader import fill
from zckpt.formats.dcp.tree import Branch, build, leaves
from zckpt.state import WEIGHT, Checkpoint, Extent, Parameter, Scalar, Span
from zckpt.state.dtypes import is_floating
from zckpt.torchfile import Tensor, TorchFile
from zckpt.training.other_state import IN_MEMORY

Found = Mapping[str, "Held | object"]
"""The leaves of a state dict by key: a tensor as `Held`, anything else as an inert node."""

Paths = Mapping[str, Keys]
"""The keys and indices that lead to each."""

_MEMORY = TorchFile(IN_MEMORY, 0, "zip", "little", None, {}, {}, 2)
"""What stands for the file of nodes that are in memory."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a state dict.

    Parameters
    ----------
    dtype : str
    shape : tuple of int
        Of the whole tensor.
    node : Tensor or None
        Its elements in memory, where it is neither the model's nor the optimizer's.
    """

    dtype: str
    shape: tuple[int, ...]
    node: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """The logical state.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its slots have one span, which has the key for a path.
    slots : dict
        Slot and parameter of each key that is of the model or the optimizer.
    lost : list of str
        Keys of tensors that are of neither, and not in memory.
    """

    checkpoint: Checkpoint
    slots: dict[str, tuple[str, str]]
    lost: list[str]


def contents(source: str, found: Found, paths: Paths) -> Contents:
    """Find the model and the optimizer in a state dict.

    Raises
    ------
    UnsupportedError
        It has neither.
    DamagedFileError
        Its parts contradict each other.
    """
    checkpoint = Checkpoint(source, "zckpt")
    lost = fill(checkpoint, _tree(source, found, paths))
    slots = {
        slot.spans[0].path: (name, parameter.name)
        for parameter in [*checkpoint.tensors(), *checkpoint.unnamed.values()]
        for name, slot in parameter.slots.items()
    }
    if checkpoint.step is None:
        checkpoint.step = _step(checkpoint)
    return Contents(checkpoint, slots, lost)


def single_numbers(source: str, found: Found, paths: Paths) -> set[str]:
    """Return the keys of an optimizer's 0-d tensors, such as steps."""
    optimizers = find_optimizers(_tree(source, found, paths))
    items = (item for part in optimizers for item in leaves(part.node))
    return {item.key for item in items if isinstance(item, TensorItem) and not item.shape}


def tie(checkpoint: Checkpoint, first: str, other: str) -> None:
    """Make one parameter another name of one that has the same weight; the optimizer's, if it has one, is the owner."""
    owner, alias = checkpoint.parameters[first], checkpoint.parameters[other]
    if alias.group is not None and owner.group is None:
        owner, alias = alias, owner
        owner.slots = {WEIGHT: alias.slots[WEIGHT], **{k: slot for k, slot in owner.slots.items() if k != WEIGHT}}
    checkpoint.parameters[alias.name] = Parameter(alias.name, owner.shape, owner.dtype, tied_to=owner.name)


def _tree(source: str, found: Found, paths: Paths) -> Branch:
    made = {key: _item(key, value) for key, value in found.items()}
    return build(made, {**{key: (key,) for key in found if key not in paths}, **paths}, source)


def _item(key: str, value: object) -> TensorItem | ObjectItem:
    if not isinstance(value, Held):
        return ObjectItem(key, _MEMORY, value)
    span = Span(Extent.whole(value.shape), key, 0, value.dtype)
    return TensorItem(key, value.dtype, value.shape, (span,), value.node, IN_MEMORY)


def _step(checkpoint: Checkpoint) -> int | None:
    """Return the most steps that any parameter has seen."""
    counted = [parameter.state.get("step") for parameter in checkpoint.parameters.values()]
    numbers = [one.value if isinstance(one, Scalar) else one for one in counted]
    return max((int(n) for n in numbers if isinstance(n, (int, float)) and n == int(n)), default=None)


def may_be_tied(held: Held) -> bool:
    """Tell whether two names of one tensor are to be one parameter: weights, and not what a module counts."""
    return len(held.shape) > 1 and is_floating(held.dtype)
