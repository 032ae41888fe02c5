"""What a program keeps besides tensors of models and optimizers, as inert nodes, and back. No pickle either way.

And values of an optimizer that are no tensors of elements: as a file has them, and as an optimizer keeps them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from numbers import Number
from operator import index
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from zckpt.engine.tensors import dtype_name, memory_of, tensors_of
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.low_bit import refuse_casts
from zckpt.formats.torch_files.tensors import description, holds_tensors, slot_of
from zckpt.state import Checkpoint, Scalar, Slot
from zckpt.state.boxes import torch_strides
from zckpt.torchfile import (
    MAX_DEPTH,
    DefaultMapping,
    Device,
    DType,
    FromFile,
    Global,
    NumpyArray,
    NumpyDType,
    NumpyScalar,
    Object,
    OrderedMapping,
    Size,
    Storage,
    Tensor,
    brief,
    each,
    node_of,
)

PLAIN = (type(None), bool, int, float, str, bytes, complex, range, slice)
KEPT = (Scalar, Device, DType, Object)

Value = Any
"""What a program keeps."""

Node = Any
"""What stands for it in a checkpoint."""


DEQUE, COUNTER = Global("collections", "deque"), Global("collections", "Counter")


class Values:
    """Turns values into nodes.

    `copied`: whether tensors are copied, so that the program may change them before they are written. `memory`: the
    bytes of each storage that the nodes mention.
    """

    def __init__(self, *, copied: bool = False) -> None:
        self.memory: dict[Storage, memoryview] = {}
        self._copied = copied
        self._open: set[int] = set()

    def node(self, value: Value, where: str) -> object:
        """Return a value as a node.

        `value`: plain data, containers, tensors, numpy arrays, element types and devices; `where`: for messages. Raises
        UnsupportedError: an object of another class.
        """
        if type(value) in PLAIN or isinstance(value, KEPT):
            return value
        if isinstance(value, torch.Tensor):
            return self.tensor(value, where)
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject or value.dtype.fields is not None or value.dtype.kind not in "biufcSU":
                raise UnsupportedError(f"{where} is a numpy array of {value.dtype}, which cannot be saved")
            array = np.ascontiguousarray(value, _little(value.dtype))
            dtype = NumpyDType(array.dtype.str[1:], (False, True), (3, "<", None, None, None, -1, -1, 0))
            node = NumpyArray(cls=Global("numpy", "ndarray"))
            node.fill(value.shape, dtype, array.tobytes())
            return node
        for kind, rule in _LEAVES.items():
            if isinstance(value, kind):
                return rule(value)
        if id(value) in self._open or len(self._open) > MAX_DEPTH:
            raise UnsupportedError(f"{where:.200} contains itself, or is nested too deeply")
        self._open.add(id(value))
        cls: Any = type(value)
        found: Any
        if cls in (dict, OrderedDict, defaultdict):
            found = {} if cls is not OrderedDict else OrderedMapping()
            found.update((key, self.node(one, f"{where}[{key!r}]")) for key, one in value.items())
        elif cls in (list, tuple, set, frozenset):
            found = cls(self.node(one, f"{where}[{index}]") for index, one in enumerate(value))
        elif cls is deque:
            items = [self.node(one, f"{where}[{index}]") for index, one in enumerate(value)]
            found = Object(DEQUE, () if value.maxlen is None else ((), value.maxlen), items=items)
        elif cls is Counter:  # the milestones of MultiStepLR
            found = Object(COUNTER, (self.node(dict(value), where),))
        else:
            raise UnsupportedError(
                f"{where} is a {cls.__module__}.{cls.__qualname__}, which only a pickle can hold",
                advice="save its parts: its state_dict(), or its numbers and names",
            )
        self._open.remove(id(value))
        return found

    def tensor(self, value: torch.Tensor, where: str) -> Tensor:
        """Return a tensor as a node.

        Raises UnsupportedError: it is sparse, or of a class of its own.
        """
        if value.layout != torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedError(
                f"{where} is a {type(value).__name__} with layout {value.layout}; only dense ones can be saved"
            )
        here = value.detach().cpu().resolve_conj().resolve_neg()
        strides, laid = here.stride(), here.permute(_by_stride(here.stride()))
        if here.is_contiguous() or not laid.is_contiguous():
            laid = here.contiguous()
            strides = laid.stride()
        if self._copied:
            laid = laid.clone()
        dtype = dtype_name(laid.dtype)
        storage = Storage(str(len(self.memory)), dtype, laid.nbytes, "cpu", 0)
        self.memory[storage] = memory_of(laid)
        return Tensor(storage, dtype, tuple(value.shape), strides, 0, "little")


def _by_stride(strides: Sequence[int]) -> list[int]:
    """Return dimensions in the order in which memory has them: of matrices by columns, the second comes first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    found: np.dtype[Any] = dtype.newbyteorder("<")
    return found


_LEAVES: dict[type, Callable[[Any], object]] = {
    bytearray: bytearray,
    torch.Size: Size,
    torch.dtype: lambda value: DType(dtype_name(value)),
    torch.device: lambda value: Device(value.type, value.index),
    np.generic: lambda value: NumpyScalar(_little(value.dtype).str, value.astype(_little(value.dtype)).tobytes()),
}


def inside(value: object) -> Iterable[object]:
    """Return what a container holds, keys included."""
    if isinstance(value, Mapping):
        return chain(value.keys(), value.values())
    if is_deque(value):
        return value.items
    return value if isinstance(value, (list, tuple, set, frozenset, deque)) else ()


def value_of(node: Node) -> Value:
    """Return what a node stands for; an object of a class that is not known stays a node.

    Raises SourceError: the tensors cannot be read.
    """
    made: dict[int, Value] = {}  # what is shared in a tree, or leads back to itself, does so in its values

    def value(node: Node, file: FromFile | None) -> Value:
        if isinstance(node, FromFile):
            return value(node.node, node)
        if id(node) in made:
            return made[id(node)]
        if isinstance(node, Tensor) and file is not None:
            found: Value = _read(node, file)
        elif (rule := _RULES.get(type(node))) is not None:
            return rule(node)
        elif isinstance(node, Mapping):
            is_ordered = isinstance(node, (OrderedMapping, DefaultMapping, OrderedDict))  # a value is one, too
            found = made[id(node)] = OrderedDict() if is_ordered else {}
            found.update((value(key, file), value(one, file)) for key, one in node.items())
        elif type(node) is list:
            found = made[id(node)] = []
            found.extend(value(one, file) for one in node)
        elif is_deque(node):
            most: Value = node.args[1] if node.args else None
            found = made[id(node)] = deque(maxlen=most)
            found.extend(value(one, file) for one in node.items)
        elif isinstance(node, Object) and node.cls == COUNTER and [type(one) for one in node.args] == [dict]:
            found = Counter(value(node.args[0], file))
        elif type(node) in (tuple, set, frozenset):
            values = [value(one, file) for one in node]
            found = made.get(id(node), type(node)(values))  # a tuple within itself exists by now
        else:
            return node
        made[id(node)] = found
        return found

    return value(node, None)


def is_deque(node: object) -> TypeGuard[Object]:
    """Tell a node that stands for a deque."""
    if not isinstance(node, Object) or node.cls != DEQUE or node.entries or node.has_state:
        return False
    match node.args:
        case () | ((), None):
            return True
        case ((), int(most)):
            return most >= len(node.items)
    return False


def _read(node: Tensor, file: FromFile) -> torch.Tensor:
    def turned(order: Sequence[int]) -> Tensor:
        shape, strides = (tuple(some[dim] for dim in order) for some in (node.shape, node.strides))
        return replace(node, shape=shape, strides=strides)

    order = _by_stride(node.strides)
    if turned(order).strides != torch_strides(turned(order).shape):
        order.sort()
    [found] = tensors_of([slot_of("tensor", turned(order), file.path)])
    return found.permute([order.index(dim) for dim in range(len(order))])


_RULES: dict[type, Callable[[Any], Any]] = {
    Scalar: lambda node: node.value,
    Size: torch.Size,
    DType: lambda node: getattr(torch, node.name),
    Device: lambda node: torch.device(str(node)),
    NumpyScalar: lambda node: np.frombuffer(node.data, node.dtype)[0],
    NumpyArray: lambda node: (
        np.frombuffer(node.data, node.dtype).reshape(node.shape, order="F" if node.fortran_order else "C").copy()
        if node.items is None
        else node
    ),
}


def number_of_steps(step: Any) -> int | None:
    """Return a number of steps as files have it, of whatever type. Raises UsageError: it is no number of steps."""
    if step is None:
        return None
    with suppress(TypeError):
        found = index(step)  # which takes numpy's and torch's, too
        if 0 <= found < 1 << 63:
            return found
    raise UsageError("step is not a number of steps", expected="an integer from 0 to 2**63-1", found=repr(step))


# --- values of an optimizer that are no tensors of elements


def like(value: Value, current: object) -> Value:
    """Return a hyperparameter as the optimizer keeps it: a number in a tensor of its own, where it has one."""
    if not isinstance(current, torch.Tensor) or not isinstance(value, (torch.Tensor, Number)):
        return value
    return value.to(current.device) if isinstance(value, torch.Tensor) else torch.full_like(current, value)  # type: ignore[arg-type]  # numpy's are numbers


def is_made(value: Value) -> bool:
    """Tell whether nothing in what `value_of` returned is a node still."""
    return not any(type(one).__module__.startswith("zckpt.torchfile") for one in each(value, inside))


def are_tensors(value: object) -> bool:
    """Tell whether a value is a list or a dict of plain tensors, or of lists and dicts of them."""
    node = node_of(value)
    plain = (Tensor, list, tuple, dict, Scalar, *PLAIN)
    is_container = (isinstance(node, (list, tuple, dict)) or is_deque(node)) and description(value) is None
    return is_container and all(isinstance(one, plain) or is_deque(one) for one in each(node, inside))


def as_torch(value: object, what: str) -> object:
    """Return a value that is no tensor of elements as an optimizer keeps it: a Scalar was a tensor, and is one.

    `what`: for messages. Raises UnsupportedError: it is tensors that mean nothing one without the other, such as codes
    and scales; or an object of any class.
    """
    node = node_of(value)
    if isinstance(node, Object) and description(value) is None:
        raise UnsupportedError(
            f"{what} is an object that only a pickle can make", found=node.qualified, advice="load only the model"
        )
    if holds_tensors(value):
        raise UnsupportedError(
            f"{what} is not a plain tensor (for example quantised), and cannot be loaded as one",
            advice="dequantize=True loads the floats that it stands for; or load only the model",
        )
    if isinstance(value, Scalar):
        return torch.tensor(value.value, dtype=getattr(torch, value.dtype), device="cpu")
    found = value_of(value)
    if not is_made(found):
        raise UnsupportedError(f"{what} is an object that only a pickle can make", found=brief(value))
    return found


def as_stored(value: object, key: str = "a value") -> object:
    """Return a value that a file can hold; a tensor of one element as its number and type. `key` is for messages.

    Raises UnsupportedError: a tensor of several elements, or of a complex one.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() or value.is_complex():
            found = f"{tuple(value.shape)} of {dtype_name(value.dtype)}"
            raise UnsupportedError(f"{key} is a tensor, not a real number", found=found)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return Scalar(whole.item(), dtype_name(value.dtype))
    return value


def read_numbers(every: Sequence[dict[str, object]], keys: Collection[str]) -> None:
    """Put single numbers in the place of tensors that hold one for a whole parameter, which have these keys."""
    found = [
        (values, key, value)
        for values in every
        for key, value in values.items()
        if key in keys and isinstance(value, Slot) and not value.shape
    ]
    for (values, key, _), number in zip(found, read_scalars([slot for _, _, slot in found]), strict=True):
        values[key] = number


def refuse_lossy(checkpoint: Checkpoint, reads: Iterable[Any], advice: str) -> None:
    """Refuse to read elements into tensors of types that cannot hold them; of each there are `slot` and `tensor`."""
    refuse_casts(checkpoint, ((one.slot, dtype_name(one.tensor.dtype)) for one in reads), advice)


def read_scalars(slots: Sequence[Slot]) -> list[Scalar]:
    """Return the numbers that slots of one element each hold."""
    return [Scalar(tensor.item(), one.dtype) for one, tensor in zip(slots, tensors_of(slots), strict=True)]
