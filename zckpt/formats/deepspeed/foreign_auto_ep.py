"""AutoEP's experts of a checkpoint of another format: one tensor for all of a layer, and which layers those are.

`universal_checkpoint_info`, which every format carries, lists them as `ds_autoep_layers` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.auto_ep import KEY, layer_from
from zckpt.formats.deepspeed.experts import is_expert
from zckpt.formats.deepspeed.foreign_experts import of_auto_ep
from zckpt.formats.deepspeed.tp_rules import INFO_KEY
from zckpt.state import Checkpoint
from zckpt.torchfile import node_of


def listed_entries(checkpoint: Checkpoint) -> list[Mapping[str, object]]:
    """Return what a checkpoint lists of AutoEP's layers; none where it has none.

    Raises
    ------
    UnsupportedError
        It has experts that AutoEP has as one tensor, and what it lists is not of them.
    """
    listed = _listed(checkpoint)
    if not listed:
        if of_auto_ep(checkpoint):
            raise _unknown(f"no {KEY} in {INFO_KEY}")
        return []
    for entry in listed:
        layer = layer_from(entry)
        for name in layer.names:
            parameter = checkpoint.parameters.get(name)
            if parameter is None or len(parameter.shape) != 3 or parameter.shape[0] != layer.experts:
                raise _unknown(f"{name}: {None if parameter is None else parameter.shape}")
    if any(is_expert(name) for name in checkpoint.parameters):
        raise _unknown("experts of DeepSpeed's own layer as well")
    return listed


def _listed(checkpoint: Checkpoint) -> list[Mapping[str, object]]:
    info = checkpoint.metadata.get(INFO_KEY)
    node = node_of(info)
    listed = node.get(KEY) if isinstance(node, dict) else None
    return list(listed) if isinstance(listed, list) else [listed] if isinstance(listed, dict) else []


def expert_counts(checkpoint: Checkpoint) -> dict[str, int]:
    """Return how many experts each tensor has that AutoEP has made of them, as far as they are listed as they are."""
    layers = [layer_from(entry) for entry in _listed(checkpoint)]
    counts = {name: layer.experts for layer in layers for name in layer.names}
    shapes = {name: checkpoint.parameters[name].shape for name in counts if name in checkpoint.parameters}
    return {name: counts[name] for name, shape in shapes.items() if len(shape) == 3 and shape[0] == counts[name]}


def _unknown(found: str) -> UnsupportedError:
    return UnsupportedError(
        "experts that AutoEP has as one tensor, and not what DeepSpeed lists of their layers",
        expected=f"{KEY} in {INFO_KEY}, of tensors under these names",
        found=found,
        advice="`zckpt reshard` of DeepSpeed's own checkpoint writes them for other ranks",
    )
