"""Muon under ZeRO-1 and 2: the momentum of whole matrices, on every rank that holds a part of one.

partition of rank r       |..AAAA|BBBBBB|CC....|       cut anywhere
momentum_buffer           all of A, B, C, end to end   a matrix that lies on two ranks is on both of them in full

Its sizes tell it from an ordinary partition; where both are alike on all ranks, no matrix is cut and both say the
same of every element. Under ZeRO-3, with the optimizer offloaded and in BF16_Optimizer, it is an ordinary partition.

Source: DeepSpeed 0.19.8, `DeepSpeedZeroOptimizer._muon_momentum_buffer` and `_apply_muon_updates_cpu_offload`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from zckpt.formats.deepspeed.shards import OptimizerShard
from zckpt.state import Checkpoint, Duplicate, Extent, Slot, Span
from zckpt.state.partition import flat_shares
from zckpt.torchfile import Tensor

MOMENTUM = "momentum_buffer"


def uses_muon(hyperparameters: Mapping[str, object]) -> bool:
    """Tell whether a param group is one of matrices that DeepSpeed's Muon steps."""
    return hyperparameters.get("use_muon") is True


def is_of_muon(checkpoint: Checkpoint, config: Mapping[str, object]) -> bool:
    """Tell whether a training used DeepSpeed's Muon, as its groups or, where a form has none, its configuration say."""
    optimizer = config.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    named = isinstance(kind, str) and kind.lower() == "muon"
    return named or any(uses_muon(group.hyperparameters) for group in checkpoint.param_groups)


def keeps_whole_matrices(
    hyperparameters: Mapping[str, object], config: Mapping[str, object], *, partition: bool
) -> bool:
    """Tell whether DeepSpeed keeps the momentum of a group as whole matrices.

    Parameters
    ----------
    hyperparameters : mapping
        Of the param group.
    config : mapping
        DeepSpeed's configuration.
    partition : bool
        Whether the training is one of ZeRO-3 or of BF16_Optimizer.
    """
    zero = config.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    device = offload.get("device") if isinstance(offload, dict) else None
    return uses_muon(hyperparameters) and not partition and device in (None, "none")


def held_matrices(numels: Sequence[int], starts: Sequence[int], partition: int, position: int) -> list[int]:
    """Return which parameters a rank holds a part of, in order."""
    return [fragment.index for fragment in flat_shares(numels, starts, partition, position)]


def is_whole(tensors: Sequence[Tensor | None], numels: Sequence[int], starts: Sequence[int], partition: int) -> bool:
    """Tell whether each rank's tensor of a group is made of the whole matrices of which it holds a part.

    Parameters
    ----------
    tensors : sequence of Tensor or None
        Of each rank that shares the group.
    numels, starts : sequence of int, elements
        Of the parameters in the flat buffer.
    partition : int, elements
    """
    if all(tensor is None or tensor.shape == (partition,) for tensor in tensors):
        return False
    for position, tensor in enumerate(tensors):
        wanted = sum(numels[index] for index in held_matrices(numels, starts, partition, position))
        if (0 if tensor is None else tensor.numel) != wanted or (tensor is not None and len(tensor.shape) != 1):
            return False
        if tensor is not None and not tensor.is_contiguous:
            return False
    return True


def whole_slots(
    shapes: Mapping[str, tuple[int, ...]],
    members: Sequence[OptimizerShard],
    group: int,
    starts: Sequence[int],
    partition: int,
) -> tuple[dict[str, Slot], list[Duplicate]]:
    """Return the momentum of each parameter, from the first rank that has it, and the copies on other ranks."""
    names = list(shapes)
    numels = [math.prod(shape) for shape in shapes.values()]
    found: dict[str, Slot] = {}
    copies: list[Duplicate] = []
    for position, member in enumerate(members):
        at = 0
        for index in held_matrices(numels, starts, partition, position):
            name = names[index]
            tensor = member.tensors[group][MOMENTUM]
            extent = Extent.whole(shapes[name])
            offset = tensor.offset + at * tensor.itemsize
            span = Span(extent, member.path, offset, tensor.dtype, None, tensor.byteorder)
            slot = Slot(MOMENTUM, tensor.dtype, shapes[name], (span,) if extent.numel else ())
            if name not in found:
                found[name] = slot
            elif slot.spans:
                copies.append(Duplicate("parameter", name, name, slot, found[name], member.rank))
            at += extent.numel
    return found, copies
