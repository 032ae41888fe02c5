"""Values of an optimizer that are no tensors of elements: as a file has them, and as an optimizer keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zckpt.engine.tensors import TensorRead, dtype_name, read_tensors
from zckpt.errors import UnsupportedError
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.state import Extent, Parameter, Scalar, Slot


def like(value: object, current: object) -> Any:
    """Return a hyperparameter as the optimizer keeps it: in a tensor of its own, where it has one."""
    if isinstance(current, torch.Tensor) and isinstance(value, (int, float)):
        return torch.full_like(current, value)
    return value


def as_torch(value: object) -> object:
    """Return a value that is no tensor of elements as an optimizer keeps it: a Scalar was a tensor, and is one.

    Raises UnsupportedError: it is tensors that mean nothing one without the other, such as codes and scales.
    """
    if holds_tensors(value):
        raise UnsupportedError(
            "holds state that is no plain tensor, quantised say, which cannot be given to an optimizer as floats",
            advice="dequantize=True takes the floats that it stands for; or load the model alone",
        )
    if isinstance(value, Scalar):
        return torch.tensor(value.value, dtype=getattr(torch, value.dtype))
    return value


def as_stored(value: object, key: str = "") -> object:
    """Return a value that a file can hold; a tensor of one element as its number and type. `key` is for messages.

    Raises UnsupportedError: a tensor of several elements.
    """
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise UnsupportedError(f"hyperparameter {key} is a tensor, not a number", found=tuple(value.shape))
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return Scalar(whole.item(), dtype_name(value.dtype))
    return value


def read_numbers(every: Sequence[dict[str, object]], owners: Sequence[Parameter | None]) -> None:
    """Put single numbers in the place of tensors that hold one for a whole parameter.

    A parameter that is a single number itself has one of each kind; `step` is none for each element.
    """
    pairs = [(values, owner.shape) for values, owner in zip(every, owners, strict=True) if owner is not None]
    numbers = {"step"} | {
        key
        for values, shape in pairs
        for key, value in values.items()
        if isinstance(value, Slot) and not value.shape and shape
    }
    found = [
        (values, key, value)
        for values, _ in pairs
        for key, value in values.items()
        if key in numbers and isinstance(value, Slot) and not value.shape
    ]
    for (values, key, _), number in zip(found, read_scalars([slot for _, _, slot in found]), strict=True):
        values[key] = number


def read_scalars(slots: Sequence[Slot]) -> list[Scalar]:
    """Return the numbers that slots of one element each hold."""
    tensors = [torch.empty(slot.shape, dtype=getattr(torch, slot.dtype)) for slot in slots]
    read_tensors(TensorRead(slot, Extent.whole(slot.shape), one) for slot, one in zip(slots, tensors, strict=True))
    return [Scalar(one.item(), slot.dtype) for slot, one in zip(slots, tensors, strict=True)]
