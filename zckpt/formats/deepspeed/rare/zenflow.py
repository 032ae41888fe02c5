"""ZenFlow, which steps some columns of a matrix on the accelerator and the rest later, in masters on the CPU.

Knows in which order it stores matrices, and nothing of what it selects, for that it saves nothing of.

    ZeRO-1, 2    flat buffer of 0.17.5 to 0.19.5  |aaaa|bbbb|...   column by column; the weights are views with strides
                 of 0.19.8                        |abab|...        in order, as without ZenFlow; the weights are, too
    ZeRO-3       shapes, shards, frozen ones      of the transposed matrix

A flat buffer and the weights of the model file are one tensor when DeepSpeed makes masters of them, so the strides of
the weights tell the order of both.

Source: DeepSpeed 0.17.6, 0.18.9 and 0.19.8, `zenflow_utils._flatten_dense_tensors`, `_update_model_bit16_weights` and
`_initialize_zenflow_stage3_prologue`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.errors import LayoutError
from zckpt.formats.deepspeed.shards import Shapes, section
from zckpt.formats.deepspeed.values import viewed
from zckpt.state import Checkpoint, Parameter, Slot
from zckpt.state.views import transpose
from zckpt.torchfile import Tensor

DETAIL = "transposed_matrices"
"""Among a checkpoint's details: whether its optimizer's files hold matrices transposed."""

WARNING = (
    "ZenFlow steps selected columns and vectors in the model's weights first, so that masters are behind those; "
    "`consolidate --dtype keep` writes the weights that the model computes with"
)


def notes(config: Mapping[str, object], stage: int) -> list[str]:
    """Say how a ZenFlow training that another format has kept is written at a stage."""
    if section(config, "zero_optimization").get("zenflow") is None:
        return []
    if stage == 3:
        return ["matrices are stored as ZeRO-3 has them: ZenFlow at ZeRO-3 takes them for transposed ones"]
    return [
        "matrices are stored in order, as ZeRO and ZenFlow of DeepSpeed 0.19.8 have them: ZenFlow of earlier versions "
        "takes them for transposed ones"
    ]


def are_transposed(weights: Mapping[str, Slot], groups: Sequence[Shapes]) -> bool:
    """Tell whether the flat buffers of a ZenFlow training hold matrices column by column.

    `weights`: as the model's files have them; `groups`: shapes of the parameters of each group. Raises LayoutError: the
    weights do not say so, or contradict each other.
    """
    matrices = [
        (name, shape) for group in groups for name, shape in group.items() if len(shape) == 2 and min(shape) > 1
    ]
    found: dict[bool, str] = {}
    for name, shape in matrices:
        slot = weights.get(name)
        strides = slot.spans[0].strides if slot is not None and slot.numel else None
        if slot is None or slot.shape != shape or strides not in (None, (1, shape[0])):
            raise LayoutError(
                f"ZenFlow: the weight of {name}, which shows the order of its master, is not stored as in DeepSpeed",
                expected=f"shape {shape}, stored row by row or column by column",
                found="none" if slot is None else f"shape {slot.shape}, strides {strides}",
            )
        found.setdefault(strides is not None, name)
    if len(found) == 2:
        raise LayoutError(
            "ZenFlow: some weights are stored row by row and others column by column, but it stores all in one way",
            found=f"{found[False]} by rows, {found[True]} by columns",
        )
    return True in found


def keeps_zenflow(checkpoint: Checkpoint, source: int, stage: int) -> bool:
    """Tell whether a checkpoint of ZenFlow is one still when it is cut for a stage; of ZeRO-3 it is another kind."""
    return DETAIL in checkpoint.details and (source == 3) == (stage == 3)


def flipped(shapes: Shapes) -> Shapes:
    """Return shapes with those of matrices transposed."""
    return {name: shape[::-1] if len(shape) == 2 else shape for name, shape in shapes.items()}


def transposed(parameter: Parameter) -> Parameter:
    """Return a matrix with its rows as columns, in all its slots; any other parameter as it is."""
    if len(parameter.shape) != 2:
        return parameter
    return viewed(parameter, parameter.shape[::-1], transposed_slot)


def transposed_slot(slot: Slot) -> Slot:
    """Return the slot of a matrix with its rows as columns; any other as it is."""
    return transpose(slot, (1, 0)) if len(slot.shape) == 2 else slot


def upright(tensor: Tensor, *, columns: bool) -> Tensor:
    """Return the view of a matrix that is stored column by column, of that of what is stored."""
    if not columns or len(tensor.shape) != 2:
        return tensor
    return replace(tensor, shape=tensor.shape[::-1], strides=tensor.strides[::-1])
