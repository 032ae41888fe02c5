"""What torchao's optimizers keep of a parameter: codes, a scale for each block, and a map.

of torch       KEY: a tensor of a class of its own with `codes`, `scale` and `qmap` in it
of zckpt.save  KEY: {"torchao": CLASS, "signed": ..., "dtype": ..., "block": ..., "floats": [[start, numel], ...]}
               KEY.codes, KEY.scale, KEY.qmap, KEY.floats: slots, each of which ranks have pieces of

CLASS       codes                               map
OptimState8bit   uint8                          256 values
OptimState4bit   uint8, two in one, end to end  16 values
OptimStateFp8    float8_e4m3fn                  none

Blocks follow each other from the tensor's first element on. A rank whose share torchao does not quantise, such as a
small last one, has floats: `floats` says of which elements, whole blocks, and the slot has these end to end. Codes and
scales are zeros there.

Source: torchao 0.18, `optim/subclass_8bit.py`, `subclass_4bit.py`, `subclass_fp8.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zckpt.engine.computed import Computed
from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.torch_files.tensors import TORCHAO, description, slot_of
from zckpt.state import Extent, Parameter, Slot
from zckpt.state.dtypes import is_floating
from zckpt.torchfile import FromFile, MetaTensor, Tensor

if TYPE_CHECKING:
    from zckpt.engine.blockwise import Blockwise
    from zckpt.engine.cast import Array
    from zckpt.engine.computed import Input

CLASSES = {"OptimState8bit": 256, "OptimState4bit": 16, "OptimStateFp8": 0}
"""The classes of tensors, and how many values their maps have."""

PACKED = "OptimState4bit"

PIECES = ("codes", "scale", "qmap", "floats")


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised slot of a parameter.

    Parameters
    ----------
    cls : str
        One of `CLASSES`.
    shape : tuple of int
        Of the parameter.
    codes, scale : Slot
    qmap, floats : Slot or None
    block : int, elements
    ranges : tuple of (int, int)
        First element and number of those that are floats.
    """

    cls: str
    shape: tuple[int, ...]
    codes: Slot
    scale: Slot
    qmap: Slot | None
    block: int
    floats: Slot | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    def as_floats(self, name: str) -> Computed:
        """Return the slot that it stands for, in float32."""
        from zckpt.engine.blockwise import Blockwise, Portion

        numel, is_packed = math.prod(self.shape), self.cls == PACKED
        every = Blockwise((Portion(0, numel, 0, self.codes, self.scale, self.block, self.qmap, is_packed),))
        function = every if self.floats is None else _SomeFloats(every, self.floats, self.ranges)
        return Computed(name, "float32", self.shape, (), function=function)


@dataclass(frozen=True, slots=True)
class _SomeFloats:
    """The values of quantised state of which some blocks are floats."""

    every: Blockwise
    floats: Slot
    ranges: tuple[tuple[int, int], ...]

    @property
    def step(self) -> int:
        """One block: it is of one kind."""
        return self.every.portions[0].block

    @property
    def width(self) -> int:
        """Bytes of a float32."""
        return self.every.width

    def inputs(self, start: int, numel: int) -> list[Input]:
        """Return the floats of a block, or what they are computed from."""
        from zckpt.engine.computed import Input

        at = 0
        for first, count in self.ranges:
            if first <= start < first + count:
                return [Input(self.floats, Extent.flat(self.floats.shape, at + start - first, numel), "float32")]
            at += count
        return self.every.inputs(start, numel)

    def compute(self, inputs: Sequence[Callable[[], Array]], start: int, numel: int) -> Array:
        """Return the values of a block."""
        return inputs[0]() if len(inputs) == 1 else self.every.compute(inputs, start, numel)


def is_quantised(value: object) -> bool:
    """Tell whether a value in a parameter's state is a slot that torchao has quantised."""
    return description(value) is not None or bool(_class(value))


def keys_in_pieces(parameter: Parameter) -> list[str]:
    """Return the keys of a parameter's slots that ranks have saved in pieces."""
    return [key for key, value in parameter.state.items() if description(value) is not None]


def slots_of(key: str, parameter: Parameter) -> list[str]:
    """Return the names of the slots that are pieces of a quantised one; none of one that is a tensor of a file."""
    return [] if description(parameter.state.get(key)) is None else [f"{key}.{piece}" for piece in PIECES]


def quantised(key: str, parameter: Parameter, path: str) -> Quantised:
    """Return a slot of a parameter that torchao has quantised, in its pieces.

    Raises UnsupportedError: it is of a class that is not known; DamagedFileError: codes, scales and map do not belong
    together.
    """
    value = parameter.state[key]
    told = description(value)
    where = value.path if isinstance(value, FromFile) else path
    if told is not None:
        found = _of_slots(key, told, parameter, where)
    elif isinstance(value, FromFile) and isinstance(value.node, MetaTensor):
        found = _of_tensor(key, value.node, parameter, where)
    else:
        raise unknown(key, parameter.name, where)
    _check(key, found, parameter.name, where)
    return found


def _class(value: object) -> str:
    """Return the name of the class of torchao's that a tensor of a file of torch has, else nothing."""
    if not isinstance(value, FromFile) or not isinstance(value.node, MetaTensor) or value.node.subclass is None:
        return ""
    own = value.node.subclass
    return str(own.name) if own.module.startswith("torchao.") and own.name in CLASSES else ""


def _of_tensor(key: str, node: MetaTensor, parameter: Parameter, path: str) -> Quantised:
    attributes = node.attributes or {}
    tensors = {name: attributes.get(name) for name in PIECES[:3]}
    pieces = {
        name: slot_of(name, tensor, path) if isinstance(tensor, Tensor) else None for name, tensor in tensors.items()
    }
    codes, scale, qmap = pieces["codes"], pieces["scale"], pieces["qmap"]
    numel = math.prod(node.shape)
    if codes is None or scale is None:
        raise unknown(key, parameter.name, path)
    if node.shape != parameter.shape:
        raise other_sizes(key, parameter.name, path, f"codes of {parameter.shape}", node.shape)
    if not scale.numel or numel % scale.numel:
        raise other_sizes(key, parameter.name, path, f"a number of scales that divides {numel}", scale.shape)
    cls = "" if node.subclass is None else str(node.subclass.name)
    return Quantised(cls, node.shape, codes, scale, qmap, numel // scale.numel)


def _of_slots(key: str, told: Mapping[str, Any], parameter: Parameter, path: str) -> Quantised:
    codes, scale, qmap, floats = (parameter.slots.get(f"{key}.{piece}") for piece in PIECES)
    cls, block, ranges = told[TORCHAO], told.get("block"), told.get("floats", [])
    if cls not in CLASSES or codes is None or scale is None:
        raise unknown(key, parameter.name, path)
    numel = math.prod(parameter.shape)
    if type(block) is not int or block < 1 or not _are_ranges(ranges, block, numel):
        raise other_sizes(key, parameter.name, path, f"whole blocks of {numel} elements", f"{block}, floats {ranges}")
    found = tuple((start, count) for start, count in ranges)
    count = sum(count for _, count in found)
    if bool(found) != (floats is not None) or (floats is not None and floats.shape != (count,)):
        raise other_sizes(key, parameter.name, path, f"{count} floats", None if floats is None else floats.shape)
    if floats is not None and not is_floating(floats.dtype):
        raise unknown(key, parameter.name, path)
    return Quantised(cls, parameter.shape, codes, scale, qmap, block, floats, found)


def _are_ranges(found: object, block: int, numel: int) -> bool:
    """Tell whether these are ranges of whole blocks, in order, that leave whole blocks."""
    if type(found) is not list or not all(type(one) is list and len(one) == 2 for one in found):
        return False
    end = 0
    for start, count in found:
        if type(start) is not int or type(count) is not int or start < end or start % block or count < 1:
            return False
        end = start + count
        if end > numel or (end % block and end != numel):
            return False
    return end == numel or not numel % block


def _check(key: str, found: Quantised, name: str, path: str) -> None:
    """Raise an error unless codes, scales and map are as their class has them."""
    numel, values = math.prod(found.shape), CLASSES[found.cls]
    is_packed = found.cls == PACKED
    dtype = "uint8" if values else "float8_e4m3fn"
    if found.codes.dtype != dtype or (found.qmap is None) != (not values):
        raise unknown(key, name, path)
    shape = (-(-numel // 2),) if is_packed else found.shape
    if found.codes.shape != shape and not (is_packed and found.codes.numel == shape[0]):
        raise other_sizes(key, name, path, f"codes of {shape}", found.codes.shape)
    if is_packed and found.block % 2:
        raise other_sizes(key, name, path, "blocks of an even number of elements", found.block)
    for one, its in ((found.scale, (-(-numel // found.block),)), (found.qmap, (values,))):
        if one is not None and (one.dtype, one.shape) != ("float32", its):
            raise other_sizes(key, name, path, f"float32 {its}", f"{one.dtype} {one.shape}")


def unknown(what: str, name: str, path: str) -> UnsupportedError:
    """Return the error of state that is quantised in a way that is not known."""
    return UnsupportedError(
        f"{what} of {name} is quantised in a way that is not known",
        path=path,
        expected=f"blocks of bitsandbytes, or torchao's {', '.join(CLASSES)}",
        advice="load the model alone, or everything in the program that saved it",
    )


def other_sizes(key: str, name: str, path: str, expected: object, found: object) -> DamagedFileError:
    """Return the error of codes, scales and a map that do not belong together."""
    return DamagedFileError(
        f"{key} of {name}: codes, scales and map do not belong together",
        path=path,
        expected=expected,
        found=found,
    )
