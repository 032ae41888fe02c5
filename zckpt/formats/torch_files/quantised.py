"""Quantised state as floats: what bitsandbytes and torchao keep of a parameter, as slots that are computed from it.

bitsandbytes   {state1, state2: uint8; qmap1, qmap2: 256 values; absmax1, absmax2: a scale for each block}, in
               `__bnb_optimizer_quant_state__`, or in older versions beside the step; of small tensors state1, state2 in
               float32 alone. Blocks have 256 elements, or 2048: a power of two, of which the number of scales leaves
               one, or none that matters. Two states are those of Adam, under its names; of a single one, Lion's,
               momentum and RMSprop's look alike, and it keeps its own name.
torchao        see `torchao`

Values are bit-equal to what the programs' own functions give (bitsandbytes 0.50, torchao 0.18). What is quantised in
any other way is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zckpt.engine.computed import Computed
from zckpt.errors import DamagedFileError
from zckpt.formats.torch_files import torchao
from zckpt.formats.torch_files.tensors import holds_tensors, slot_of
from zckpt.formats.torch_files.torchao import other_sizes, unknown
from zckpt.state import MASTER, WEIGHT, Parameter, Slot
from zckpt.torchfile import FromFile, Tensor

NESTED = "__bnb_optimizer_quant_state__"

ADAM = {"state1": "exp_avg", "state2": "exp_avg_sq"}
"""What two states of bitsandbytes are called in `torch.optim`: those of Adam, AdamW and LAMB."""

BLOCKS = tuple(1 << power for power in range(6, 13))
"""Elements of a block, of those that bitsandbytes' `quantize_blockwise` takes."""


def float_slots(parameter: Parameter, path: str) -> dict[str, Slot]:
    """Return the slots that quantised state of a parameter is as floats; empty if it has none.

    Raises UnsupportedError: state that is quantised in a way that is not known; DamagedFileError: codes, scales and map
    do not belong together.
    """
    slots: dict[str, Slot] = {}
    for key, value in parameter.state.items():
        if isinstance(value, FromFile) and key == NESTED:
            where, pieces = pieces_of(value, parameter.name, path)
            slots |= _of_bitsandbytes(pieces, parameter, where)
        elif torchao.is_quantised(value):
            slots[key] = torchao.quantised(key, parameter, path).as_floats(key)
        elif holds_tensors(value):
            raise unknown(key, parameter.name, path)
    beside = {key: slot for key, slot in parameter.slots.items() if key not in (WEIGHT, MASTER)}
    if "absmax1" in beside or "max1" in beside:
        slots |= _of_bitsandbytes(beside, parameter, path)
    return slots


def as_floats(parameter: Parameter, path: str) -> Parameter:
    """Return a parameter with float32 slots in the place of quantised state. Errors as of `float_slots`."""
    slots = float_slots(parameter, path)
    if not slots:
        return parameter
    is_beside = any(key in parameter.slots for key in ("absmax1", "max1"))
    pieces = {piece for key in parameter.state for piece in torchao.slots_of(key, parameter)}
    kept = {
        key: slot
        for key, slot in parameter.slots.items()
        if key in (WEIGHT, MASTER) or not (is_beside or key in pieces)
    }
    state = {key: value for key, value in parameter.state.items() if not holds_tensors(value)}
    return replace(parameter, slots={**kept, **slots}, state=state)


# --- bitsandbytes


def pieces_of(value: object, name: str, path: str) -> tuple[str, dict[str, Slot]]:
    """Return the file in which bitsandbytes' dict of tensors is, and those; raise UnsupportedError if it is none."""
    if not isinstance(value, FromFile) or not isinstance(value.node, dict):
        raise unknown(NESTED, name, path)
    found: dict[str, Slot] = {}
    for key, tensor in value.node.items():
        if not isinstance(tensor, Tensor):
            raise unknown(f"{NESTED}.{key}", name, value.path)
        found[str(key)] = slot_of(str(key), tensor, value.path)
    return value.path, found


def block_of(key: str, codes: Slot, scale: Slot | None, qmap: Slot | None, name: str, path: str) -> int:
    """Return how many elements a block of bitsandbytes has.

    Raises UnsupportedError: these are no codes with scales and a map; DamagedFileError: they do not belong together.
    """
    if scale is None or qmap is None or codes.dtype != "uint8":
        raise unknown(key, name, path)
    _check_sizes(key, scale, qmap, 256, name, path)
    block = next((one for one in BLOCKS if -(-codes.numel // one) == scale.numel), None)
    if block is None:
        raise DamagedFileError(
            f"{key} of {name}: its scales fit no size of blocks",
            path=path,
            expected=f"one for each {BLOCKS[0]} to {BLOCKS[-1]} of {codes.numel} elements, a power of two",
            found=scale.numel,
        )
    return block


def _of_bitsandbytes(pieces: Mapping[str, Slot], parameter: Parameter, path: str) -> dict[str, Slot]:
    strange = [key for key in pieces if key.startswith(("max", "new_max"))]  # of whole tensors, not of blocks
    if strange:
        raise unknown(strange[0], parameter.name, path)
    states = [key for key in ADAM if key in pieces]
    names = ADAM if len(states) == len(ADAM) else {}
    used = {f"{kind}{key[-1]}" for key in states for kind in ("state", "qmap", "absmax")}
    found = {key: slot for key, slot in pieces.items() if key not in used}  # such as LAMB's norms
    for key in states:
        number, name = key[-1], names.get(key, key)
        codes = pieces[key]
        if codes.shape != parameter.shape:  # AdEMAMix has two in one
            raise unknown(key, parameter.name, path)
        if codes.dtype == "float32" and f"absmax{number}" not in pieces:
            found[name] = replace(codes, name=name)
            continue
        scale, qmap = pieces.get(f"absmax{number}"), pieces.get(f"qmap{number}")
        block = block_of(key, codes, scale, qmap, parameter.name, path)
        if scale is not None:
            found[name] = _computed(name, codes, scale, qmap, block, parameter)
    return found


def _computed(name: str, codes: Slot, scale: Slot, qmap: Slot | None, block: int, parameter: Parameter) -> Computed:
    from zckpt.engine.blockwise import Blockwise, Portion

    function = Blockwise((Portion(0, parameter.numel, 0, codes, scale, block, qmap),))
    return Computed(name, "float32", parameter.shape, (), function=function)


def _check_sizes(key: str, scale: Slot, qmap: Slot | None, values: int, name: str, path: str) -> None:
    """Raise DamagedFileError unless scales are flat, and a map has so many values; both in float32."""
    for one, shape in ((scale, scale.shape[:1]), (qmap, (values,))):
        if one is not None and (one.dtype, one.shape, len(one.shape)) != ("float32", shape, 1):
            raise other_sizes(key, name, path, f"float32 {shape or '(blocks,)'}", f"{one.dtype} {one.shape}")
