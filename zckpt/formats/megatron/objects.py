"""Values that are no tensors: what `common.pt` holds, and the objects that modules and ranks have saved for themselves.

common.pt   {"args": Namespace, "iteration": 4, "checkpoint_version": 3.0, "optimizer": ..., "opt_param_scheduler": ...,
             "content_metadata": {...}, ...}
NeMo        {"global_step": 4, "optimizer": [...], "lr_schedulers": [...], "loops": ..., ...}

<module>._extra_state/shard_0_2      of layer 0 of 2: [None], or a list with the state of Transformer Engine's FP8
rng_state/shard_0.1_1.2              of pipeline stage 0 of 1, tensor-parallel rank 1 of 2
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.megatron.names import BUFFERS
from zckpt.formats.torch_files.tensors import arguments_of, carried
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Topology, is_floating, size_of, stated
from zckpt.torchfile import TorchFile

OPTIMIZER, ARGUMENTS = "optimizer", "args"
STEP_KEYS = ("iteration", "global_step")
VERSION = "checkpoint_version"

SHARD = re.compile(r"(.+)/shard_((?:[0-9]+(?:\.[0-9]+)*)?_(?:[0-9]+(?:\.[0-9]+)*)?)")
"""The key of an object: which of how many along each axis."""

FLAT = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.distributed\..+")
"""Keys of the distributed optimizer's flat buffers, and of the objects beside them."""

EXTRA_STATE = "_extra_state"

Arguments = Mapping[object, object]
"""A program's, by name."""

_ATTENTION = re.compile(r"(.+attention)\.linear_proj\.weight")

RANKS = (
    ("data_parallel_size", "dp"),
    ("tensor_model_parallel_size", "tp"),
    ("pipeline_model_parallel_size", "pp"),
    ("expert_model_parallel_size", "ep"),
)


@immutable
class Common:
    """What `common.pt` holds. `content`: by key."""

    file: TorchFile
    content: dict[str, object]

    @property
    def step(self) -> int | None:
        """The iterations of the run."""
        return next((value for key in STEP_KEYS if type(value := self.content.get(key)) is int), None)

    @property
    def arguments(self) -> Arguments:
        """The program's arguments; empty where it has none."""
        return arguments_of(self.content.get(ARGUMENTS))


def topology_of(arguments: Arguments, checkpoint: Checkpoint) -> tuple[Topology, int]:
    """Return how many ranks of each kind a program's arguments say, and how many in all: or wrote the files."""
    sizes = {name: size_of(arguments, key) for key, name in RANKS}
    return Topology(**stated(sizes)), size_of(arguments, "world_size") or checkpoint.world_size


def settle(checkpoint: Checkpoint) -> None:
    """Tell buffers, and what is frozen, from what is trained."""
    is_trained = any(len(one.slots) > 1 for one in checkpoint.parameters.values())
    for name, one in list(checkpoint.parameters.items()):
        is_alone = len(one.slots) == 1
        if not is_floating(one.dtype) or (is_alone and BUFFERS.fullmatch(name)):
            checkpoint.buffers[name] = checkpoint.parameters.pop(name)
        else:
            one.frozen = is_trained and is_alone


def carry_objects(checkpoint: Checkpoint, objects: Mapping[str, ObjectItem]) -> None:
    """Keep the objects under the keys that they were saved with, those of a module's layers together.

    The state of modules that have none is `[None]`, and follows from the model. State of an optimizer is `attach`'s.
    """
    kept: dict[str, dict[str, object]] = {}
    for key, item in objects.items():
        match = SHARD.fullmatch(key)
        name, shard = (match[1], match[2]) if match is not None else (key, "")
        if FLAT.fullmatch(key) or (name.endswith(EXTRA_STATE) and _is_empty(item.node)):
            continue
        kept.setdefault(name, {})[shard] = carried(item.file, item.node)
    for name, shards in kept.items():
        checkpoint.metadata[name] = shards[""] if list(shards) == [""] else shards


def states_by(name: str, modules: re.Pattern[str], *, attention: bool = True) -> list[str]:
    """Return what the modules call a state of their own that a tensor, by its name, is of, or of what is before it.

    `modules`: those that ask for one; `attention`: whether attention asks for one, too.
    """
    every = (modules.fullmatch(name), ""), (_ATTENTION.fullmatch(name) if attention else None, ".core_attention")
    return [f"{match[1]}{inner}.{EXTRA_STATE}" for match, inner in every if match is not None]


def _is_empty(node: object) -> bool:
    return node is None or (isinstance(node, list) and all(_is_empty(one) for one in node))
