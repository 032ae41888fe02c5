"""ZeroOptimizer in files: DeepSpeed's checkpoint directories are written, and any checkpoint is loaded.

Each rank writes its own file, and reads only the bytes of its own partition.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zckpt.durable import written_files
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.optimizer_values import parameter_values
from zckpt.opened import OpenedCheckpoint
from zckpt.opened import open as open_checkpoint
from zckpt.optim.named_groups import group_hyperparameters, group_names
from zckpt.optim.together import written_together
from zckpt.optim.torch_file import write_torch_file
from zckpt.optim.zero.deepspeed_objects import with_objects
from zckpt.optim.zero.flat_group import FlatGroup
from zckpt.optim.zero.loss_scale import adopt
from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.state_dicts import VERSION
from zckpt.read import read_extent
from zckpt.state import MASTER, WEIGHT, Extent, Parameter, Scalar, Slot
from zckpt.storage import Sources
from zckpt.torchfile import FromFile, plain

MODEL_NAME = "mp_rank_00_model_states.pt"

_PREFIXES = {torch.bfloat16: "bf16_"}


def save(
    optimizer: ZeroOptimizer, path: Path, *, model: torch.nn.Module | None, step: int | None, overwrite: bool
) -> None:
    """Write a tag's directory that DeepSpeed loads at the same world size, and `latest` beside it.

    Parameters and errors are those of `zckpt.optim.files.save`; UnsupportedError for experts and parts of models.
    """
    _refuse_parts(optimizer)
    names = _names(optimizer, model)
    with written_together(path, optimizer.process_group, overwrite=overwrite) as partial:
        prefix = _PREFIXES.get(optimizer.groups[0].flat.dtype, "")
        state = with_objects(optimizer.make_state_dict(names))
        root = {"optimizer_state_dict": state, "ds_config": _config(optimizer), "ds_version": VERSION}
        write_torch_file(root, partial / f"{prefix}zero_pp_rank_{optimizer.rank}_mp_rank_00_optim_states.pt")
        if optimizer.rank == 0:
            write_torch_file(_model(optimizer, model, names, step), partial / MODEL_NAME)
    if optimizer.rank == 0:
        with written_files([path.parent / "latest"], overwrite=True) as [latest]:
            latest.write_text(path.name)


def _refuse_parts(optimizer: ZeroOptimizer) -> None:
    model_parallel = optimizer.model_parallel
    if model_parallel is not None and model_parallel.get_model_parallel_world_size() > 1:
        raise UnsupportedError("a model whose parts lie on several ranks is not saved yet; save state_dict() instead")
    if any(group.is_expert for group in optimizer.groups):
        raise UnsupportedError("experts are not saved yet; save state_dict() instead")


def _names(optimizer: ZeroOptimizer, model: torch.nn.Module | None) -> dict[torch.Tensor, str]:
    """Return the name of each parameter."""
    every = group_names(optimizer.param_groups, model)
    pairs = zip(optimizer.param_groups, every, strict=True)
    return {p: name for group, names in pairs for p, name in zip(group["params"], names, strict=True)}


def _config(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """Return what DeepSpeed's configuration would say of what decides about the form of a checkpoint."""
    found: dict[str, Any] = {
        "zero_optimization": {
            "stage": optimizer.stage,
            "elastic_checkpoint": optimizer.elastic_checkpoint,
            "round_robin_gradients": optimizer.round_robin_gradients,
            "parameter_alignment": optimizer.parameter_alignment,
        },
        "gradient_accumulation_steps": optimizer.gradient_accumulation_steps,
        "gradient_clipping": optimizer.clip_grad,
    }
    sections = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    section = sections.get(optimizer.groups[0].flat.dtype)
    if section is not None:
        found[section] = {"enabled": True}
    return found


def _model(
    optimizer: ZeroOptimizer,
    model: torch.nn.Module | None,
    names: Mapping[torch.Tensor, str],
    step: int | None,
) -> dict[str, Any]:
    """Return the content of the model's file."""
    shapes = [
        OrderedDict((names[p], p.shape) for p in group["params"] if p in optimizer._place)
        for group in optimizer.param_groups
    ]
    tensors: dict[str, torch.Tensor] = OrderedDict((name, p.detach()) for p, name in names.items())
    tied: dict[str, str] = {}
    frozen = {name: p for p, name in names.items() if p not in optimizer._place}
    buffers: list[str] = []
    if model is not None:
        tensors = OrderedDict((key.removeprefix("module."), value) for key, value in model.state_dict().items())
        parameters = {name.removeprefix("module."): p for name, p in model.named_parameters(remove_duplicate=False)}
        owners = {p: name for p, name in names.items() if p in optimizer._place}
        for name, parameter in parameters.items():
            owner = owners.setdefault(parameter, name)
            if owner != name:
                tied[name] = owner
            elif parameter not in optimizer._place:
                frozen[name] = parameter
        buffers = [name for name in tensors if name not in parameters]
    return {
        "module": tensors,
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict((name, p.shape) for name, p in frozen.items()) or None,
        "shared_params": tied,
        "frozen_param_fragments": OrderedDict((name, p.detach()) for name, p in frozen.items()) or None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": step or 0,
        "global_samples": 0,
        "dp_world_size": optimizer.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(optimizer),
        "ds_version": VERSION,
    }


# --- loading


@torch.no_grad()
def load(optimizer: ZeroOptimizer, path: str | os.PathLike[str], *, model: torch.nn.Module | None) -> None:
    """Load masters, state and hyperparameters from a checkpoint of any format, and make the weights of the masters.

    Parameters and errors are those of `zckpt.optim.files.load`. Masters that the checkpoint does not have are made of
    its weights.
    """
    names = _names(optimizer, model)
    checkpoint = open_checkpoint(path)
    trained = [
        [name for p, name in zip(group["params"], ours, strict=True) if p in optimizer._place]
        for group, ours in zip(optimizer.param_groups, group_names(optimizer.param_groups, model), strict=True)
    ]
    hyperparameters = group_hyperparameters(checkpoint, trained, path)
    owners = [[_owner(checkpoint, names[p], p, path) for p in group.parameters] for group in optimizer.groups]
    with Sources() as sources:
        masters = [
            _partition(group, its, _master, torch.empty_like(group.master), sources)
            for group, its in zip(optimizer.groups, owners, strict=True)
        ]
        state = {
            index: values
            for index, (group, its) in enumerate(zip(optimizer.groups, owners, strict=True))
            if (values := _state(checkpoint, group, its, path, sources))
        }
    groups = [{**its, "params": [index]} for index, its in enumerate(hyperparameters)]
    known = optimizer.optim.state_dict()["param_groups"]
    groups = [{**ours, **its} for ours, its in zip(known, groups, strict=True)]
    optimizer.load_local(state, groups)
    for group, master in zip(optimizer.groups, masters, strict=True):
        group.master.copy_(master)
    found = checkpoint.optimizer_metadata.get("loss_scaler")
    node = found.node if isinstance(found, FromFile) else found
    optimizer.loss_scaler = adopt(optimizer.loss_scaler, getattr(node, "state", plain(node)))
    optimizer.publish_masters()


def _owner(checkpoint: OpenedCheckpoint, name: str, tensor: torch.Tensor, path: str | os.PathLike[str]) -> Parameter:
    found = checkpoint.owner(name)
    if found.shape != tuple(tensor.shape):
        raise UsageError(f"{name} has another shape", path=path, expected=tuple(tensor.shape), found=found.shape)
    return found


def _master(parameter: Parameter) -> Slot | None:
    return parameter.slots.get(MASTER) or parameter.slots.get(WEIGHT)


def _state(
    checkpoint: OpenedCheckpoint,
    group: FlatGroup,
    owners: list[Parameter],
    path: str | os.PathLike[str],
    sources: Sources,
) -> dict[str, Any]:
    """Return the state of a group's flat master: this rank's part of each slot, and what is one value for all.

    Raises
    ------
    UsageError
        A value is not the same for all parameters, or a tensor not one value for each element.
    """
    every = [parameter_values(checkpoint, owner) for owner in owners]
    having = [values for values in every if values]
    made: dict[str, Any] = {}
    for key in dict.fromkeys(key for values in having for key in values):
        first = next(values[key] for values in having if key in values)
        if isinstance(first, Slot):
            for owner, values in zip(owners, every, strict=True):
                slot = values.get(key)
                if isinstance(slot, Slot) and slot.shape != owner.shape:
                    raise UsageError(f"{key} of {owner.name} is not one value for each element", path=path)
            empty = torch.zeros(group.partition, dtype=getattr(torch, first.dtype), device=group.master.device)
            made[key] = _partition(group, owners, lambda owner, key=key: owner.slots.get(key), empty, sources)
            continue
        values_found = {_plain(values.get(key)) for values in having}
        if len(values_found) > 1:
            raise UsageError(
                f"{key} is not the same for all parameters of a group, which a flat group has only one for",
                path=path,
                found=", ".join(map(str, sorted(values_found, key=str))),
            )
        if isinstance(first, Scalar):
            made[key] = torch.tensor(first.value, dtype=getattr(torch, first.dtype))
        else:
            made[key] = first
    return made


def _plain(value: object) -> Any:
    return value.value if isinstance(value, Scalar) else value


def _partition(
    group: FlatGroup, owners: list[Parameter], slot_of: Any, into: torch.Tensor, sources: Sources
) -> torch.Tensor:
    """Fill a partition with this rank's part of a slot; padding, and what has no such slot, is zero."""
    into.zero_()
    dtype = str(into.dtype).removeprefix("torch.")
    for f in group.own:
        owner = owners[f.index]
        slot = slot_of(owner)
        if slot is None:
            continue
        array = read_extent(slot, Extent.flat(owner.shape, f.start, f.numel), sources, dtype=dtype)
        values = torch.frombuffer(bytearray(array.tobytes()), dtype=into.dtype)
        into[f.position : f.position + f.numel].copy_(values)
    return into
