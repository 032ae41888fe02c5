"""Muon's matrices, of which DeepSpeed keeps, under ZeRO-1 and 2, the momentum whole.

Every rank that holds elements of one has it:

partition of rank r       |..AAAA|BBBBBB|CC....|       cut anywhere
momentum_buffer           all of A, B, C, end to end   a matrix that lies on two ranks is on both of them in full

Its sizes tell it from an ordinary partition; where both are alike on all ranks, no matrix is cut and both say the
same of every element. Under ZeRO-3, with the optimizer offloaded and in BF16_Optimizer, it is an ordinary partition.

Source: DeepSpeed 0.19.8, `DeepSpeedZeroOptimizer._muon_momentum_buffer` and `_apply_muon_updates_cpu_offload`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zckpt.formats.deepspeed.shards import section
from zckpt.formats.deepspeed.values import copies_of
from zckpt.formats.torch_files.tensors import span_of
from zckpt.state import Checkpoint, Duplicate, Extent, Slot

if TYPE_CHECKING:
    from zckpt.formats.deepspeed.layouts.flat import Partitions

MOMENTUM = "momentum_buffer"


def uses_muon(hyperparameters: Mapping[str, object]) -> bool:
    """Tell whether a param group is one of matrices that DeepSpeed's Muon steps."""
    return hyperparameters.get("use_muon") is True


def is_of_muon(checkpoint: Checkpoint, config: Mapping[str, object]) -> bool:
    """Tell whether a training used DeepSpeed's Muon, as its groups or, where a form has none, its configuration say."""
    kind = section(config, "optimizer").get("type")
    named = isinstance(kind, str) and kind.lower() == "muon"
    return named or any(uses_muon(group.hyperparameters) for group in checkpoint.param_groups)


def keeps_whole_matrices(
    hyperparameters: Mapping[str, object], config: Mapping[str, object], *, partition: bool
) -> bool:
    """Tell whether DeepSpeed keeps the momentum of a group as whole matrices.

    `hyperparameters`: of the param group; `config`: DeepSpeed's configuration; `partition`: whether the training is one
    of ZeRO-3 or of BF16_Optimizer.
    """
    device = section(section(config, "zero_optimization"), "offload_optimizer").get("device")
    return uses_muon(hyperparameters) and not partition and device in (None, "none")


def is_whole(cut: Partitions) -> bool:
    """Tell whether each rank's momentum of a group consists of the whole matrices of which it holds elements."""
    tensors = cut.tensors(MOMENTUM)
    if all(tensor is None or tensor.shape == (cut.partition,) for tensor in tensors):
        return False
    for tensor, shares in zip(tensors, cut.shares, strict=True):
        if (0 if tensor is None else tensor.numel) != sum(cut.numels[share.index] for share in shares):
            return False
        if tensor is not None and (len(tensor.shape) != 1 or not tensor.is_contiguous):
            return False
    return True


def whole_slots(cut: Partitions) -> tuple[dict[str, Slot], list[Duplicate]]:
    """Return the momentum of each parameter, from the first rank that has it, and the copies on other ranks."""
    found: dict[str, Slot] = {}
    copies: list[Duplicate] = []
    for member, shares in zip(cut.members, cut.shares, strict=True):
        at = 0
        for share in shares:
            tensor = member.tensors[cut.index][MOMENTUM]
            name, shape = cut.names[share.index], cut.shapes[cut.names[share.index]]
            span = span_of(tensor, member.path, Extent.whole(shape), first=at)
            slot = Slot(MOMENTUM, tensor.dtype, shape, (span,))
            first = found.setdefault(name, slot)
            copies += copies_of(name, {MOMENTUM: slot}, {MOMENTUM: first}, member.rank)
            at += slot.numel
    return found, copies
