"""The whole checkpoint as the first rank knows it: what there is, and which rank has written which elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zckpt.engine.plan import fill, plan
from zckpt.engine.targets import Hole
from zckpt.formats.native.rank_file import Entry, storage_key
from zckpt.formats.native.writer import Placed, describe, lay_out_document, members_of
from zckpt.operations.target import write_target
from zckpt.operations.tensors import dtype_name
from zckpt.optim.states.several import ALONE, Snapshot
from zckpt.optim.tensors import ModelState
from zckpt.state import Checkpoint, Extent, Parameter, Slot, Span, Topology
from zckpt.torchfile import FromFile, Mentioned
from zckpt.training.parts import Part, Piece, key_of
from zckpt.training.values import Values
from zckpt.version import __version__

SCHEDULER, GRAD_SCALER, EXTRA, RANDOM, EXTRA_STATE = (
    "lr_scheduler",
    "grad_scaler",
    "extra",
    "random_states",
    "extra_state",
)
"""Under which keys a checkpoint's metadata have what goes with models and optimizers."""

SAVED_BY, SELF = "saved_by", "zckpt.save"
"""How a checkpoint's origin says that these keys are ours: others may write a file with keys of the same names."""

IN_MEMORY = ""
"""The path of what is in no file yet."""


@dataclass(slots=True)
class Whole:
    """What the first rank knows of all.

    Parameters
    ----------
    model : ModelState
    optimizers : Snapshot
        What the first rank has of them, for param groups and metadata.
    given : mapping
        What the program gave besides the model and the optimizer.
    values : Values
        That has the memory of tensors in it.
    world_size : int
    others : dict
        The metadata, as nodes.
    """

    model: ModelState
    optimizers: Snapshot
    given: Mapping[str, Any]
    values: Values
    world_size: int
    others: dict[str, object]


def other_values(given: Mapping[str, Any], model: ModelState, values: Values) -> dict[str, object]:
    """Return metadata, as nodes.

    Parameters
    ----------
    given : mapping
        With `scheduler`, `grad_scaler` and `extra`.
    model : ModelState
    values : Values

    Raises
    ------
    UnsupportedError
        Something that only a pickle could hold.
    """
    found: dict[str, Any] = {}
    for key, name in ((SCHEDULER, "scheduler"), (GRAD_SCALER, "grad_scaler")):
        if given[name] is not None:
            found[key] = values.node(given[name].state_dict(), f"{name}.state_dict()")
    if given["extra"] is not None:
        found[EXTRA] = values.node(dict(given["extra"]), "extra")
    if model.extra:
        found[EXTRA_STATE] = values.node(model.extra, "the state that modules keep")
    return {key: FromFile(value, IN_MEMORY) for key, value in found.items()}


def storage_entries(metadata: Mapping[str, object], values: Values) -> list[Entry]:
    """Return the bytes of tensors in metadata, as the first rank's file has them."""
    return entries_of(describe(Checkpoint("", "zckpt", metadata=dict(metadata))).storages, values)


def entries_of(storages: Sequence[Mentioned], values: Values) -> list[Entry]:
    """Return the bytes of storages that nodes of these values mention."""
    found = []
    for number, one in enumerate(storages):
        nbytes = one.storage.nbytes
        slot = Slot("storage", "uint8", (nbytes,), ())
        data = values.memory[one.storage]
        found.append(Entry(storage_key(number), slot, Extent.whole((nbytes,)), "uint8", (nbytes,), data=data))
    return found


def write_document(state: Whole, parts: Sequence[Part], identity: str, directory: Path) -> None:
    """Write the document of a directory in which all ranks have written their parts.

    Raises
    ------
    LayoutError
        Some element has been written by none, or by several.
    """
    checkpoint = _checkpoint(state, parts)
    placed = _placed(checkpoint, parts)
    members = members_of(checkpoint, describe(checkpoint), placed)
    document = lay_out_document(members, identity, [part.file for part in parts])
    write_target(plan([document]), directory / document.name)


def _checkpoint(state: Whole, parts: Sequence[Part]) -> Checkpoint:
    """Return the logical state; its slots are without spans."""
    optimizers = state.optimizers
    has_optimizer = bool(optimizers.classes)
    checkpoint = Checkpoint(
        "",
        "zckpt",
        f"zckpt {__version__}",
        zero_stage=optimizers.zero_stage,
        topology=Topology(dp=state.world_size),
        world_size=state.world_size,
        step=state.given["step"],
        metadata=dict(state.others),
        optimizer_metadata=dict(optimizers.metadata),
        loss_scale=optimizers.loss_scale,
        param_groups=list(optimizers.groups),
    )
    checkpoint.details[SAVED_BY] = SELF
    if has_optimizer:
        checkpoint.details["optimizer"] = optimizers.classes.get(ALONE) or dict(optimizers.classes)
    checkpoint.metadata[RANDOM] = [part.random_states for part in parts]
    groups = {name: index for index, group in enumerate(optimizers.groups) for name in group.parameters}
    for name, tensor in state.model.tensors.items():
        is_parameter = name in state.model.parameters
        group = groups.get(name)
        frozen = has_optimizer and is_parameter and group is None
        section = checkpoint.parameters if is_parameter else checkpoint.buffers
        section[name] = Parameter(name, tuple(tensor.shape), dtype_name(tensor.dtype), group=group, frozen=frozen)
    for name, owner in state.model.tied.items():
        its = checkpoint.parameters[owner]
        checkpoint.parameters[name] = Parameter(name, its.shape, its.dtype, tied_to=owner)
    for part in parts:
        _add(checkpoint, part, groups)
    return checkpoint


def _add(checkpoint: Checkpoint, part: Part, groups: Mapping[str, int]) -> None:
    for piece in part.pieces:
        parameter = _parameter(checkpoint, piece, groups)
        parameter.slots.setdefault(piece.slot, Slot(piece.slot, piece.dtype, piece.shape, ()))
    for name, values in part.values.items():
        if name in checkpoint.parameters:
            checkpoint.parameters[name].state.update(values)


def _parameter(checkpoint: Checkpoint, piece: Piece, groups: Mapping[str, int]) -> Parameter:
    if piece.name in checkpoint.buffers:
        return checkpoint.buffers[piece.name]
    if piece.name not in checkpoint.parameters:
        checkpoint.parameters[piece.name] = Parameter(
            piece.name, piece.shape, piece.dtype, group=groups.get(piece.name)
        )
    return checkpoint.parameters[piece.name]


def _placed(checkpoint: Checkpoint, parts: Sequence[Part]) -> list[Placed]:
    """Return where each slot is; every element is in one place."""
    where: dict[tuple[str, str], list[tuple[int, Extent]]] = {}
    for rank, part in enumerate(parts):
        for piece in part.pieces:
            where.setdefault((piece.slot, piece.name), []).append((rank, piece.extent))
    found = []
    for parameter in checkpoint.tensors():
        for slot in parameter.slots.values():
            pieces = tuple(where[slot.name, parameter.name])
            check_pieces(slot, parameter.name, pieces)
            found.append(Placed(slot.name, key_of(slot.name, parameter.name), slot, pieces))
    return found


def check_pieces(slot: Slot, name: str, pieces: Sequence[tuple[int, Extent]]) -> None:
    """Raise LayoutError unless the pieces have every element once."""
    spans = tuple(Span(extent, str(rank), 0, slot.dtype) for rank, extent in pieces if extent.numel)
    whole = Slot(slot.name, slot.dtype, slot.shape, spans)
    label = f"{slot.name} of {name}"
    fill(Hole(0, label, whole, Extent.whole(slot.shape), slot.dtype))
