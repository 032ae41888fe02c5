"""Values that are no tensors: what `common.pt` holds, and the objects that modules and ranks have saved for themselves.

common.pt   {"args": Namespace, "iteration": 4, "checkpoint_version": 3.0, "optimizer": ..., "opt_param_scheduler": ...,
             "content_metadata": {...}, ...}
NeMo        {"global_step": 4, "optimizer": [...], "lr_schedulers": [...], "loops": ..., ...}

<module>._extra_state/shard_0_2      of layer 0 of 2: [None], or a list with the state of Transformer Engine's FP8
rng_state/shard_0.1_1.2              of pipeline stage 0 of 1, tensor-parallel rank 1 of 2

`zckpt.pt` has what these have no place for. Megatron-Core leaves it alone.

{**formats.remainder,
 "megatron": {"groups": [[name]],        of each param group of `common.pt`, in its order
              "names": {name: name},     in the files, and here, where they differ
              "absent": {name: {"shape": [int], "dtype": str}},      of further names of tied parameters
              "ranks": {"tp": int, "pp": int, "ep": int, "tied": bool,
                        "rows": int}}}     of legacy files; of a vocabulary that has zeros behind these
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from zckpt.errors import DamagedFileError, about
from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.megatron.cut import VOCABULARY
from zckpt.formats.megatron.names import BUFFERS
from zckpt.formats.remainder import described, descriptions, remainder, remainder_rules, restore
from zckpt.formats.suffixes import OWN_NAME
from zckpt.formats.torch_files.tensors import arguments_of, as_mapping, as_names, carried, describe
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, Parameter, Topology, are_texts, is_floating, size_of, stated, without
from zckpt.state.inventory import IMPLIED, Rule
from zckpt.storage.files import is_file
from zckpt.torchfile import TorchFile, read_torchfile

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


KEY = "megatron"

ROWS = "padded vocabulary"
"""Under which `Checkpoint.details` have the rows of a target's vocabulary, where they are more than the source's."""

RULES = (*remainder_rules(), Rule((KEY, "**"), IMPLIED, "names, and the parameters of each param group"))


def own_tree(
    checkpoint: Checkpoint,
    *,
    held: Collection[str],
    groups: Sequence[Sequence[str]],
    names: Mapping[str, str],
    ranks: Mapping[str, int] | None = None,
) -> dict[str, object]:
    """Return the tree.

    `held`: keys of metadata, and of the optimizer's, that the other files have; `groups`: names of each group's
    parameters; `names`: names here by those in the files; `ranks`: of legacy files: how many of each kind.
    """
    rest = without(checkpoint.metadata, *held)
    others = without(checkpoint.optimizer_metadata, *held)
    return {
        **remainder(replace(checkpoint, metadata=rest, optimizer_metadata=others)),
        KEY: {
            "groups": [list(its) for its in groups],
            "names": {filed: name for filed, name in sorted(names.items()) if filed != name},
            "absent": descriptions(map(checkpoint.parameters.__getitem__, checkpoint.aliases)),
            **({} if ranks is None else {"ranks": dict(ranks)}),
        },
    }


@immutable
class Own:
    """What the file says that is needed before the rest; nothing where there is none."""

    file: TorchFile | None = None
    names: dict[str, str] = field(default_factory=dict)
    groups: list[list[str]] | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    absent: dict[str, Parameter] = field(default_factory=dict)


def read_own(directory: Path) -> Own:
    """Read the file of a directory, if zckpt wrote it. Raises DamagedFileError: it is malformed."""
    path = directory / OWN_NAME
    if not is_file(path):
        return Own()
    file = read_torchfile(path)

    with about(file.path):

        def has(key: str) -> dict[object, object]:
            return as_mapping(node.get(key, {}))

        node = as_mapping(as_mapping(file.root).get(KEY))
        names, listed = has("names"), node.get("groups", [])
        if not isinstance(listed, list) or not are_texts(names.values()):
            raise DamagedFileError("unexpected content", expected="names, and param groups as lists")
        return Own(
            file,
            {str(key): str(name) for key, name in names.items()},
            [as_names(its) for its in listed],
            {str(key): n for key, n in has("ranks").items() if isinstance(n, int)},
            described(has("absent")),
        )


def restore_own(checkpoint: Checkpoint, own: Own) -> None:
    """Give a checkpoint, whose parameters and groups are there, what the file says of it.

    A vocabulary loses the rows of zeros that it was given for this target. Raises DamagedFileError: the file is
    malformed, or speaks of what is not there.
    """
    if own.file is None:
        return
    rows = own.ranks.get("rows")
    for one in checkpoint.tensors():
        if rows is not None and one.name.endswith(VOCABULARY) and one.shape[:1] > (rows,):
            checkpoint.details[ROWS] = one.shape[0]
            # Spans may reach over the end of a slot with fewer rows; what is not there is not read.
            one.slots = {key: replace(slot, shape=(rows, *slot.shape[1:])) if slot.shape == one.shape else slot
                         for key, slot in one.slots.items()}  # fmt: skip
            one.shape = (rows, *one.shape[1:])
    for name in own.absent:
        if name in checkpoint.parameters or name in checkpoint.buffers:
            raise DamagedFileError("unexpected content", path=own.file.path, expected=f"no {name}")
    checkpoint.parameters |= own.absent
    checkpoint.files.append(describe(own.file, "metadata", rules=RULES))
    metadata, of_optimizer, scale = checkpoint.metadata, checkpoint.optimizer_metadata, checkpoint.loss_scale
    restore(checkpoint, own.file.root, own.file)
    checkpoint.metadata = {**metadata, **checkpoint.metadata}
    checkpoint.optimizer_metadata = {**of_optimizer, **checkpoint.optimizer_metadata}
    checkpoint.loss_scale = scale if checkpoint.loss_scale is None else checkpoint.loss_scale
