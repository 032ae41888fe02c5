"""Tensors of any element type with any bits, and slots of them."""

from __future__ import annotations

import math

import numpy as np
import torch

from zckpt.state import WEIGHT, Extent, Slot, Span
from zckpt.state.dtypes import itemsize


def random_tensor(dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bits: NaNs and subnormals too."""
    kind = getattr(torch, dtype)
    nbytes = itemsize(dtype) * math.prod(shape)
    if not nbytes:
        return torch.empty(shape, dtype=kind)
    data = np.random.default_rng(nbytes).integers(0, 2 if dtype == "bool" else 256, nbytes, np.uint8)
    return torch.from_numpy(data).view(kind).reshape(shape)


def as_bytes(tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def stored(path, tensor, *, before=5) -> Slot:
    """Put a tensor's bytes in a file of their own, after `before` others, and return a slot of it."""
    path.write_bytes(bytes(before) + as_bytes(tensor))
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    spans = (Span(Extent.whole(shape), str(path), before, dtype),) if tensor.numel() else ()
    return Slot(WEIGHT, dtype, shape, spans)


def assert_same(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert as_bytes(found) == as_bytes(expected)


class Wrapped(torch.Tensor):
    """A tensor that is to be cast in some way, as torchao's training in 8 bits has weights."""

    @staticmethod
    def __new__(cls, inner) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner):
        self.inner, self.cast_to = inner, torch.float8_e4m3fn

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        made = function(*(one.inner if isinstance(one, cls) else one for one in args), **(kwargs or {}))
        return cls(made) if isinstance(made, torch.Tensor) else made
