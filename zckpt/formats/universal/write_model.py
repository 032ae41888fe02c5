"""The model files of a universal checkpoint, as trees; their form is that of `deepspeed.shards`.

DeepSpeed loads no weight from them, only what stands beside the module; the whole weights are there for those who
want the model by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from zckpt.formats.remainder import KEY
from zckpt.formats.torch_archive import SlotTensor, new_storage, view
from zckpt.formats.universal.folders import weight
from zckpt.formats.universal.slices import INFO_KEY
from zckpt.state import WEIGHT, Checkpoint, Parameter
from zckpt.torchfile import OrderedMapping, Size

DEEPSPEED_VERSION = "0.19.8"
"""The version whose form this is, where the source is not DeepSpeed's."""

UNIVERSAL_VERSION = 0.2
"""Of `universal_checkpoint_info`, where the source has none: rules for equal slices, of which there are none."""

STRUCTURE = frozenset(
    {
        "module", "model", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_version", KEY,
    }
)  # fmt: skip
"""Keys of a model file that describe the model or how it was cut, and are made anew."""


def carried_keys(checkpoint: Checkpoint) -> list[str]:
    """Return the keys of `metadata` that a model file can have at its top level."""
    return [key for key in checkpoint.metadata if key not in STRUCTURE]


def filled_in(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what DeepSpeed's loaders look for and the source does not have."""
    needed: dict[str, object] = {
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": checkpoint.step or 0,
        "ds_config": {},
        INFO_KEY: {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }
    return {key: value for key, value in needed.items() if key not in checkpoint.metadata}


def model_tree(checkpoint: Checkpoint, *, parameterwise: bool) -> dict[str, object]:
    """Return the content of a model file: with whole weights, or under ZeRO-3 without any.

    Raises
    ------
    UnsupportedError
        A parameter whose values no file holds.
    """
    parameters = checkpoint.parameters.values()
    module = _module(checkpoint, parameterwise=parameterwise)
    frozen = [p for p in parameters if p.frozen and p.tied_to is None]
    fragments = OrderedMapping()
    for parameter in frozen:
        fragments[parameter.name] = module[parameter.name]
    groups = [[checkpoint.parameters[name] for name in group.parameters] for group in checkpoint.param_groups]
    structure: dict[str, object] = {
        "module": module,
        "buffer_names": list(checkpoint.buffers),
        "optimizer": None,
        "param_shapes": [_shapes(group) for group in groups],
        "frozen_param_shapes": None if parameterwise else _shapes(frozen),
        "shared_params": {p.name: p.tied_to for p in parameters if p.tied_to is not None},
        "frozen_param_fragments": None if parameterwise else fragments,
    }
    version = checkpoint.format_version if checkpoint.format in ("deepspeed", "universal") else None
    return {
        **structure,
        **filled_in(checkpoint),
        **{key: checkpoint.metadata[key] for key in carried_keys(checkpoint)},
        "dp_world_size": checkpoint.topology.dp,
        "mp_world_size": 1,
        "ds_version": version or DEEPSPEED_VERSION,
    }


def _module(checkpoint: Checkpoint, *, parameterwise: bool) -> OrderedMapping:
    """Return the state dict; names of one parameter share its storage."""
    module = OrderedMapping()
    made: dict[str, object] = {}
    for parameter in checkpoint.parameters.values():
        owner = checkpoint.owner(parameter.name)
        if owner.name not in made:
            made[owner.name] = view(new_storage(owner.dtype, 0), (0,)) if parameterwise else _whole(owner)
        module[parameter.name] = made[owner.name]
    for buffer in checkpoint.buffers.values():
        slot = buffer.slots[WEIGHT]
        module[buffer.name] = SlotTensor(slot, slot.dtype, buffer.name)
    return module


def _whole(parameter: Parameter) -> SlotTensor:
    return SlotTensor(weight(parameter), parameter.dtype, parameter.name)


def _shapes(parameters: Iterable[Parameter]) -> OrderedMapping:
    shapes = OrderedMapping()
    for parameter in parameters:
        shapes[parameter.name] = Size(parameter.shape)
    return shapes
