"""Lay out the files of a ZeroRedundancyOptimizer: consolidated, or one for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zckpt.engine.targets import TargetFile
from zckpt.errors import UnsupportedError
from zckpt.evidence import NAMES_ADVICE
from zckpt.evidence.order import order_notes
from zckpt.formats.consolidated.model import model_tensors, model_tree, optimizer_slots
from zckpt.formats.consolidated.optimizer import optimizer_tree
from zckpt.formats.format import Job, TargetFiles
from zckpt.formats.remainder import remainder
from zckpt.formats.torch_files import writer as torch_writer
from zckpt.formats.zero_redundancy.directory import KEY, METADATA_NAME, MODEL_NAME, OPTIMIZER_NAME, rank_name
from zckpt.state import WEIGHT, Checkpoint, without
from zckpt.state.partition import greedy_partition


def lay_out(job: Job) -> TargetFiles:
    """Return the model, the optimizer's state for all or for each rank, and the rest.

    Raises UnsupportedError: state that no single parameter can hold, or a parameter that cannot be assigned because its
    size is not known.
    """
    checkpoint, world_size, dtype = job.checkpoint, job.options.world_size, job.options.dtype
    tensors = model_tensors(checkpoint, dtype)
    files = [torch_writer.lay_out(MODEL_NAME, model_tree(checkpoint, tensors))] if tensors else []
    if checkpoint.param_groups:
        tree = optimizer_tree(checkpoint, optimizer_slots(checkpoint, dtype))
        if world_size is not None:
            files += _per_rank(checkpoint, tree, world_size)
        else:
            files.append(torch_writer.lay_out(OPTIMIZER_NAME, tree))
    owned = {**checkpoint.unnamed, **checkpoint.parameters}
    names = [list(group.parameters) for group in checkpoint.param_groups]
    outside = [name for group in names for name in group if name not in tensors and name in owned]
    about = {  # the order of the optimizer's parameters, which ranks' files do not tell, and shapes the model has not
        "world_size": world_size if checkpoint.param_groups else None,
        "names": names,
        "shapes": {name: list(owned[name].shape) for name in outside},
        "unnamed": list(checkpoint.unnamed),
    }
    files.append(torch_writer.lay_out(METADATA_NAME, {**remainder(checkpoint), KEY: about}))
    return TargetFiles(files, notes=order_notes(checkpoint))


def _per_rank(checkpoint: Checkpoint, tree: dict[object, Any], world_size: int) -> Iterator[TargetFile]:
    """Yield each rank's file: what its local optimizer's `state_dict` returns, parameters numbered by themselves."""
    numels = [[_numel(checkpoint, name) for name in group.parameters] for group in checkpoint.param_groups]
    for rank, held in enumerate(greedy_partition(numels, world_size)):
        state, groups, local = {}, [], 0
        for group, indices in zip(tree["param_groups"], held, strict=True):
            numbers = [group["params"][index] for index in indices]
            for number in numbers:
                if number in tree["state"]:
                    state[local] = tree["state"][number]
                local += 1
            # A rank's optimizer does not know names: torch would copy those of its share over those of all.
            own = without(group, "param_names")
            groups.append({**own, "params": list(range(local - len(numbers), local))})
        yield torch_writer.lay_out(rank_name(rank), {"state": state, "param_groups": groups})


def _numel(checkpoint: Checkpoint, name: str) -> int:
    """Return a parameter's size; for one that is known by number only, as all tensors of its state show it."""
    if name in checkpoint.parameters:
        return checkpoint.parameters[name].numel
    parameter = checkpoint.unnamed.get(name)
    slots = {} if parameter is None else without(parameter.slots, WEIGHT, "step")
    shapes = {slot.shape for slot in slots.values() if slot.shape} or {slot.shape for slot in slots.values()}
    if parameter is None or shapes != {parameter.shape}:
        raise UnsupportedError(
            f"the size of the optimizer's parameter {name} is unknown, but parameters are assigned to ranks by size",
            advice=f"{NAMES_ADVICE}, or write the consolidated form",
        )
    return parameter.numel
