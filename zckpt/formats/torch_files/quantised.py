"""Quantised state as floats: what bitsandbytes and torchao keep of a parameter, as slots that are computed from it.

bitsandbytes   {state1, state2: uint8; qmap1, qmap2: 256 values; absmax1, absmax2: a scale for each block}, in
               `__bnb_optimizer_quant_state__`, or in older versions beside the step; of small tensors state1, state2 in
               float32 alone. Blocks have 256 elements, or 2048: a power of two, of which the number of scales leaves
               one, or none that matters. Two states are those of Adam, under its names; of a single one, Lion's,
               momentum and RMSprop's look alike, and it keeps its own name.
torchao        KEY: a tensor of a class of its own with `codes`, `scale` and `qmap` in it; or as `zckpt.save` writes it:
               KEY: {"torchao": CLASS, "signed": ..., "dtype": ..., "block": ..., "floats": [[start, numel], ...]}
               KEY.codes, KEY.scale, KEY.qmap, KEY.floats: slots, each of which ranks have pieces of

CLASS       codes                               map
OptimState8bit   uint8                          256 values
OptimState4bit   uint8, two in one, end to end  16 values
OptimStateFp8    float8_e4m3fn                  none

Blocks follow each other from the tensor's first element on. A rank whose share torchao does not quantise, such as a
small last one, has floats: `floats` says of which elements, whole blocks, and the slot has these end to end. Codes and
scales are zeros there.

Values are bit-equal to what the programs' own functions give (bitsandbytes 0.50; torchao 0.18, `optim/subclass_*.py`).
What is quantised in any other way is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from zckpt.engine.computed import Computed
from zckpt.errors import DamagedFileError, UnsupportedError, about
from zckpt.formats.torch_files.tensors import TORCHAO, description, holds_tensors, slot_of
from zckpt.state import MASTER, WEIGHT, Parameter, Shape, Slot, is_floating, without
from zckpt.state.views import unstacked
from zckpt.torchfile import FromFile, MetaTensor, Tensor, node_of

if TYPE_CHECKING:
    from zckpt.engine.scaled import Part, Values

NESTED = "__bnb_optimizer_quant_state__"

ADAM = {"state1": "exp_avg", "state2": "exp_avg_sq", "state3": "exp_avg_slow"}
"""What states of bitsandbytes are called in `torch.optim`: two of Adam, AdamW and LAMB; the third is the second half of
AdEMAMix's first."""

BLOCKS = tuple(1 << power for power in range(6, 13))
"""Elements of a block, of those that bitsandbytes' `quantize_blockwise` takes."""

CLASSES = {"OptimState8bit": 256, "OptimState4bit": 16, "OptimStateFp8": 0}
"""torchao's classes of tensors, and how many values their maps have."""

PACKED = "OptimState4bit"

PIECES = ("codes", "scale", "qmap", "floats")


class Moment(NamedTuple):
    """One moment of a parameter, or of a rank's partition: codes with their scales, or floats alone."""

    key: str  # what its program calls it
    codes: Slot  # or float32
    scale: Slot | None = None  # one for each block
    qmap: Slot | None = None
    block: int = 1  # elements; 1 of floats
    cls: str = ""  # torchao's class of tensors; empty of bitsandbytes
    floats: Slot | None = None  # of elements that have no codes
    ranges: tuple[tuple[int, int], ...] = ()  # first element and number of those

    @property
    def per_code(self) -> int:
        """Elements that a byte of codes is of."""
        return 2 if self.cls == PACKED else 1

    @property
    def numel(self) -> int:
        """Elements, of a partition."""
        return self.codes.numel * self.per_code

    def parts(self) -> tuple[tuple[Part, ...], Values]:
        """Return what its elements are computed from, and how."""
        from zckpt.engine.scaled import coded

        return coded(self.codes, self.scale, self.block, self.qmap, halves=self.cls == PACKED)

    def as_floats(self, name: str, shape: Shape) -> Slot:
        """Return the slot of a parameter that it stands for, in float32."""
        from zckpt.engine.scaled import Part, Portion, Scaled, as_they_are

        if self.scale is None:
            return replace(self.codes, name=name)
        portions, at, end = [], 0, 0
        for start, count in (*self.ranges, (math.prod(shape), 0)):
            portions.append(Portion(end, start - end, end, *self.parts()))
            if self.floats is not None:
                portions.append(Portion(start, count, at, (Part(self.floats),), as_they_are))
            at, end = at + count, start + count
        every = tuple(one for one in portions if one.count)
        return Computed(name, "float32", shape, (), function=Scaled(every))


def float_slots(parameter: Parameter, path: str) -> dict[str, Slot]:
    """Return the slots that quantised state of a parameter is as floats; empty if it has none.

    Raises UnsupportedError: state that is quantised in a way that is not known; DamagedFileError: codes, scales and map
    do not belong together.
    """
    slots: dict[str, Slot] = {}
    with about(path):
        for key, value in parameter.state.items():
            if isinstance(value, FromFile) and key == NESTED:
                with about(value.path):
                    slots |= _of_bitsandbytes(pieces_of(value, parameter.name), parameter)
            elif is_quantised(value):
                slots[key] = of_torchao(key, parameter).as_floats(key, parameter.shape)
            elif holds_tensors(value):
                raise _unknown(key, parameter.name)
        beside = parameter.optimizer_slots
        if "absmax1" in beside or "max1" in beside:
            slots |= _of_bitsandbytes(beside, parameter)
    return slots


def as_floats(parameter: Parameter, path: str) -> Parameter:
    """Return a parameter with float32 slots in the place of quantised state. Errors as of `float_slots`."""
    slots = float_slots(parameter, path)
    if not slots:
        return parameter
    is_beside = any(key in parameter.slots for key in ("absmax1", "max1"))
    pieces = {piece for key in parameter.state for piece in slots_of(key, parameter)}
    kept = {
        key: slot
        for key, slot in parameter.slots.items()
        if key in (WEIGHT, MASTER) or not (is_beside or key in pieces)
    }
    state = {key: value for key, value in parameter.state.items() if not holds_tensors(value)}
    return replace(parameter, slots={**kept, **slots}, state=state)


def is_quantised(value: object) -> bool:
    """Tell whether a value in a parameter's state is a slot that torchao has quantised."""
    return description(value) is not None or is_torchaos(node_of(value))


def is_torchaos(node: object) -> bool:
    """Tell whether a node is a tensor of one of torchao's classes."""
    own = node.subclass if isinstance(node, MetaTensor) else None
    return own is not None and own.module.startswith("torchao.") and own.name in CLASSES


def _unknown(what: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} of {name} is quantised in an unknown way",
        expected=f"bitsandbytes' blocks, or torchao's {', '.join(CLASSES)}",
        advice="load only the model, or load everything in the program that saved it",
    )


def _other_sizes(key: str, name: str, expected: object, found: object) -> DamagedFileError:
    what = f"{key} of {name}: codes, scales and map do not belong together"
    return DamagedFileError(what, expected=expected, found=found)


def _check_sizes(key: str, name: str, scale: Slot, blocks: int, qmap: Slot | None, values: int) -> None:
    """Raise DamagedFileError unless there are so many scales, and values in a map; both in float32."""
    for one, numel in ((scale, blocks), (qmap, values)):
        if one is not None and (one.dtype, one.shape) != ("float32", (numel,)):
            raise _other_sizes(key, name, f"float32 {(numel,)}", f"{one.dtype} {one.shape}")


# --- bitsandbytes. As all errors below these name no file: the caller does.


def pieces_of(value: object, name: str) -> dict[str, Slot]:
    """Return the tensors of bitsandbytes' dict; raise UnsupportedError if it is none."""
    if not isinstance(value, FromFile) or not isinstance(value.node, dict):
        raise _unknown(NESTED, name)
    found: dict[str, Slot] = {}
    for key, tensor in value.node.items():
        if not isinstance(tensor, Tensor):
            raise _unknown(f"{NESTED}.{key}", name)
        found[str(key)] = slot_of(str(key), tensor, value.path)
    return found


def moments_in(pieces: Mapping[str, Slot], of: str) -> tuple[dict[str, Moment], dict[str, Slot]]:
    """Return bitsandbytes' moments, by the names that they have as floats, and what else there is.

    Raises UnsupportedError: these are no codes with scales and a map; DamagedFileError: they do not belong together.
    """
    pairs = [(f"{kind}1", f"{kind}2") for kind in ("state", "absmax") if {f"{kind}1", f"{kind}2"} <= pieces.keys()]
    halves = {one: unstacked(pieces[one]) for one, two in pairs if pieces[one].shape == (2, *pieces[two].shape)}
    if "state1" in halves:  # AdEMAMix has two moments there
        slow = {f"{key[:-1]}3": its[(1,)] for key, its in halves.items()}
        pieces = {**pieces, **{key: its[(0,)] for key, its in halves.items()}, **slow}
        pieces |= {"qmap3": pieces["qmap1"]} if "qmap1" in pieces else {}
    keys = [key for key in ADAM if key in pieces]
    found = {}
    for key in keys:
        codes, scale, qmap = pieces[key], pieces.get(f"absmax{key[-1]}"), pieces.get(f"qmap{key[-1]}")
        name = ADAM[key] if len(keys) > 1 else key  # Lion's and momentum look alike
        found[name] = Moment(key, codes)
        if codes.dtype == "float32" and scale is None:
            continue
        if scale is None or qmap is None or codes.dtype != "uint8":
            raise _unknown(key, of)
        _check_sizes(key, of, scale, scale.numel, qmap, 256)
        block = next((one for one in BLOCKS if -(-codes.numel // one) == scale.numel), None)
        if block is None:
            raise DamagedFileError(
                f"{key} of {of}: its scales do not fit any block size",
                expected=f"one for each block of {BLOCKS[0]} to {BLOCKS[-1]} elements (a power of two) out of "
                f"{codes.numel}",
                found=scale.numel,
            )
        found[name] = Moment(key, codes, scale, qmap, block)
    used = {f"{kind}{key[-1]}" for key in keys for kind in ("state", "qmap", "absmax")}
    return found, without(pieces, *used)


def _of_bitsandbytes(pieces: Mapping[str, Slot], parameter: Parameter) -> dict[str, Slot]:
    strange = [key for key in pieces if key.startswith(("max", "new_max"))]  # of whole tensors, not of blocks
    if not strange:
        found, others = moments_in(pieces, parameter.name)  # others such as LAMB's norms
        strange = [one.key for one in found.values() if one.codes.shape != parameter.shape]
    if strange:
        raise _unknown(strange[0], parameter.name)
    return {**others, **{name: one.as_floats(name, parameter.shape) for name, one in found.items()}}


# --- torchao


def slots_of(key: str, parameter: Parameter) -> list[str]:
    """Return the names of the slots that are pieces of a quantised one; none of one that is a tensor of a file."""
    return [] if description(parameter.state.get(key)) is None else [f"{key}.{piece}" for piece in PIECES]


def of_torchao(key: str, parameter: Parameter) -> Moment:
    """Return a slot of a parameter that torchao has quantised, in its pieces.

    Raises UnsupportedError: it is of a class that is not known; DamagedFileError: codes, scales and map do not belong
    together.
    """
    value, name = parameter.state[key], parameter.name
    told = description(value)
    if told is not None:  # by zckpt, in slots of their own
        codes, scale, qmap, floats = (parameter.slots.get(f"{key}.{piece}") for piece in PIECES)
        cls, block, ranges = str(told[TORCHAO]), told.get("block"), told.get("floats", [])
        if cls not in CLASSES or codes is None or scale is None:
            raise _unknown(key, name)
        numel = parameter.numel
        if type(block) is not int or block < 1 or not _are_ranges(ranges, block, numel):
            raise _other_sizes(key, name, f"whole blocks of {numel} elements", f"{block}, floats {ranges}")
        found = tuple((start, count) for start, count in ranges)
        count = sum(count for _, count in found)
        if bool(found) != (floats is not None) or (floats is not None and floats.shape != (count,)):
            raise _other_sizes(key, name, f"{count} floats", None if floats is None else floats.shape)
        if floats is not None and not is_floating(floats.dtype):
            raise _unknown(key, name)
        return _checked(Moment(key, codes, scale, qmap, block, cls, floats, found), parameter)
    if not isinstance(value, FromFile) or not isinstance(value.node, MetaTensor):
        raise _unknown(key, name)
    node, path = value.node, value.path
    attributes = node.attributes or {}
    with about(path):
        tensors = (attributes.get(piece) for piece in PIECES[:3])
        codes, scale, qmap = (slot_of(key, one, path) if isinstance(one, Tensor) else None for one in tensors)
        numel = math.prod(node.shape)
        if codes is None or scale is None:
            raise _unknown(key, name)
        if node.shape != parameter.shape:
            raise _other_sizes(key, name, f"codes of {parameter.shape}", node.shape)
        if not scale.numel or numel % scale.numel:
            raise _other_sizes(key, name, f"a number of scales that divides {numel}", scale.shape)
        cls = "" if node.subclass is None else str(node.subclass.name)
        return _checked(Moment(key, codes, scale, qmap, numel // scale.numel, cls), parameter)


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


def _checked(found: Moment, parameter: Parameter) -> Moment:
    """Return a moment whose codes, scales and map are as its class has them; raise an error for any other."""
    key, name, numel, values = found.key, parameter.name, parameter.numel, CLASSES[found.cls]
    dtype = "uint8" if values else "float8_e4m3fn"
    if found.scale is None or found.codes.dtype != dtype or (found.qmap is None) != (not values):
        raise _unknown(key, name)
    is_packed = found.cls == PACKED
    shape = (-(-numel // 2),) if is_packed else parameter.shape
    if found.codes.shape != shape and not (is_packed and found.codes.numel == shape[0]):
        raise _other_sizes(key, name, f"codes of {shape}", found.codes.shape)
    if is_packed and found.block % 2:
        raise _other_sizes(key, name, "blocks of an even number of elements", found.block)
    _check_sizes(key, name, found.scale, -(-numel // found.block), found.qmap, values)
    return found
