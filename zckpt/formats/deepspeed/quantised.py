"""8-bit state of bitsandbytes under ZeRO as floats: codes of each rank's partition, as slots of the parameters.

An optimizer under ZeRO sees a rank's partition of a group as one tensor, in the order of the master's: a block has
elements of several parameters, and begins with the partition. Where a parameter's master is, its codes are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from zckpt.engine.computed import Computed
from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.origin import Origin, origin_of
from zckpt.formats.torch_files.quantised import ADAM, NESTED, block_of, pieces_of
from zckpt.state import MASTER, Checkpoint, CutSpans, Extent, Parameter, Slot, Span
from zckpt.state.checkpoint import RankValue, keys_listed
from zckpt.state.dtypes import itemsize

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=Checkpoint)

Pieces = Mapping[str, Slot]


def with_float_slots(checkpoint: AnyCheckpoint, *, keeps_files: bool = False) -> AnyCheckpoint:
    """Return a checkpoint with float32 slots in the place of what each rank has quantised of its partitions.

    Parameters
    ----------
    keeps_files : bool
        Whether it is still one of DeepSpeed's files, to be cut for other ranks; else it is written as from any other
        format.

    Raises
    ------
    UnsupportedError
        Other state that is each rank's own; or it is not certain which elements codes are of.
    DamagedFileError
        Codes, scales and map do not belong together.
    """
    if not any(value.key == NESTED for value in checkpoint.per_rank):
        return checkpoint
    path = checkpoint.source
    others = [one for one in checkpoint.per_rank if one.key != NESTED or one.mp_rank]
    parts = {(one.group, one.part) for one in checkpoint.per_rank}
    if others or len(parts) > len({group for group, _ in parts}):
        raise UnsupportedError(
            "8-bit state of model-parallel ranks, or of several sub-groups: which elements its blocks are of, the "
            "files do not say",
            path=path,
            found=keys_listed(others) if others else f"{len(parts)} sub-groups",
            advice="resume in the program that saved it, or `zckpt consolidate` the model",
        )
    held: dict[int, dict[str, Pieces]] = {}
    for value in checkpoint.per_rank:
        where, pieces = _pieces(value, path)
        held.setdefault(value.group, {})[where] = pieces
    parameters = {
        name: replace(one, slots={**one.slots, **_slots(one, held[one.group], path)})
        if one.group in held and one.tied_to is None
        else one
        for name, one in checkpoint.parameters.items()
    }
    origin = _origin(checkpoint, parameters) if keeps_files else None
    return replace(checkpoint, parameters=parameters, per_rank=[], origin=origin)


def _origin(checkpoint: Checkpoint, parameters: dict[str, Parameter]) -> Origin | None:
    """Return the files of a checkpoint of one model-parallel rank, with these parameters for what they describe."""
    origin = origin_of(checkpoint)
    if origin is None or len(origin.ranks) != 1:
        return None
    [files] = origin.ranks
    state = replace(files.state, parameters=parameters, per_rank=[])
    return replace(origin, ranks=[replace(files, state=state)])


def _pieces(value: RankValue, path: str) -> tuple[str, Pieces]:
    """Return the file that a rank's state of a partition is in, and its tensors."""
    where, pieces = pieces_of(value.value, f"group {value.group}", path)
    if set(pieces) - {f"{kind}{number}" for kind in ("state", "qmap", "absmax") for number in "12"}:
        raise _uncertain(f"group {value.group}", path, ", ".join(pieces))
    return where, pieces


def _uncertain(name: str, path: str, found: object) -> UnsupportedError:
    return UnsupportedError(
        f"it is not certain what the 8-bit state of {name} is of",
        path=path,
        expected="codes of one or two moments of each rank's partition, in blocks, as bitsandbytes has them",
        found=found,
        advice="resume in the program that saved it, or `zckpt consolidate` the model",
    )


def _slots(parameter: Parameter, held: Mapping[str, Pieces], path: str) -> dict[str, Slot]:
    master = parameter.slots.get(MASTER)
    if master is None or not isinstance(master.spans, CutSpans) or master.shape != parameter.shape:
        raise _uncertain(parameter.name, path, "no master that is cut as ZeRO cuts")
    files = master.spans.files
    bases = dict(zip(files.paths, files.offsets, strict=True))
    placed = []
    for span in sorted((one for one in master.spans if one.extent.numel), key=lambda one: one.extent.start):
        position = (span.offset - bases[span.path]) // itemsize(span.dtype)
        pieces = held.get(span.path)
        if pieces is None or not ADAM.keys() & pieces.keys():
            raise _uncertain(parameter.name, path, f"none of it in {span.path}")
        placed.append((span, position, pieces))
    states = {frozenset(ADAM.keys() & pieces.keys()) for _, _, pieces in placed}
    if len(states) > 1:
        raise _uncertain(parameter.name, path, "one moment on some ranks, two on others")
    found = sorted(states.pop()) if states else []
    names = ADAM if len(found) == len(ADAM) else {key: key for key in found}  # Lion's and momentum look alike
    return {names[key]: _slot(names[key], key, parameter, placed, path) for key in found}


def _slot(name: str, key: str, parameter: Parameter, placed: Sequence[tuple[Span, int, Pieces]], path: str) -> Slot:
    """Return one moment of a parameter: computed, or where it is in float32, as it lies there."""
    from zckpt.engine.blockwise import InPortions, Portion

    number = key[-1]
    spans: list[Span] = []
    portions: list[Portion] = []
    for span, position, pieces in placed:
        codes, extent = pieces[key], span.extent
        [own] = codes.spans or (None,)
        if own is None or own.strides is not None or len(codes.shape) != 1 or position + extent.numel > codes.numel:
            raise _uncertain(parameter.name, path, f"{key} of shape {codes.shape}")
        if codes.dtype == "float32" and f"absmax{number}" not in pieces:
            offset = own.offset + position * itemsize(codes.dtype)
            spans.append(replace(own, extent=Extent.flat(parameter.shape, extent.start, extent.numel), offset=offset))
            continue
        scale, qmap = pieces.get(f"absmax{number}"), pieces.get(f"qmap{number}")
        block = block_of(name, codes, scale, qmap, parameter.name, path)
        scales = _repeated(scale, block) if scale is not None else None
        if scales is None or qmap is None:
            raise _uncertain(parameter.name, path, f"{key} without scales")
        portions.append(Portion(extent.start, extent.numel, position, codes, scales, qmap))
    if spans and portions:
        raise _uncertain(parameter.name, path, "codes on some ranks, floats on others")
    if not portions:
        return Slot(name, "float32", parameter.shape, tuple(spans))
    return Computed(name, "float32", parameter.shape, (), function=InPortions(tuple(portions)))


def _repeated(scale: Slot, block: int) -> Slot:
    """Return scales with one for each element of a block, as torch's `expand` gives them."""
    [own] = scale.spans
    step = 1 if own.strides is None else own.strides[0]
    shape = (math.prod(scale.shape), block)
    return replace(scale, shape=shape, spans=(replace(own, extent=Extent.whole(shape), strides=(step, 0)),))
