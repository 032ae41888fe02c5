"""What every target of Megatron's has, whatever its files: the model's tensors, param groups, and what is no tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from zckpt.engine.targets import Literal, TargetFile
from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.evidence import refuse_unnamed
from zckpt.formats.consolidated.model import model_tensors
from zckpt.formats.megatron.directory import FOLDER, FORMAT, OPTIMIZER_FILE, RELEASE, folder_of
from zckpt.formats.megatron.keys import check_names
from zckpt.formats.megatron.objects import OPTIMIZER, arguments_of
from zckpt.formats.megatron.optimizer import EXPERTS, SCALER, STEP
from zckpt.formats.megatron.write_groups import Group, groups_of
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot
from zckpt.torchfile import node_of, put_back

DISTRIBUTED, FLATTENED, PLAIN = "distributed", "flattened", "plain"
"""Whose state it is: the distributed optimizer's, in either form, or another's."""

SHARDED = "optimizer sharding"
"""Under which `Checkpoint.details` say how a distributed optimizer's state was cut."""

SCALERS = (SCALER, f"1.{SCALER}")
"""Under which `Checkpoint.optimizer_metadata` have the loss scalers, that of experts where it is another."""

CONTENT, VERSION, ITERATION = "content_metadata", "checkpoint_version", "iteration"
CURRENT = 3.0
"""The version of a checkpoint whose queries, keys and values are ordered as everything here has them."""

OF_PROGRAM = frozenset({"args", "num_floating_point_operations_so_far", "opt_param_scheduler", "rerun_state_machine"})
"""Keys of `common.pt` that are Megatron-LM's, wherever a checkpoint has been in between."""

RESTATED = frozenset({CONTENT, VERSION, ITERATION})

_SHARDS = re.compile(r"[0-9.]*_[0-9.]*")


def model_for(checkpoint: Checkpoint, dtype: str) -> dict[str, tuple[Slot, str]]:
    """Return what the model has under each name, without further names of tied parameters."""
    refuse_unnamed(checkpoint, "which Megatron-Core has for its state")
    if checkpoint.optimizers() or checkpoint.models():
        raise UnsupportedError("Megatron-Core has one model and one optimizer",
                               found=listed(checkpoint.optimizers() or checkpoint.models()))  # fmt: skip
    check_names([one.name for one in checkpoint.tensors()])
    tensors = model_tensors(checkpoint, dtype, tied="drop", exclude_frozen=False)
    absent = [one.name for one in checkpoint.parameters.values() if one.tied_to is None and one.name not in tensors]
    if absent:
        raise UnsupportedError("the model lacks some of its tensors", found=listed(absent))
    return tensors


def optimizer_for(checkpoint: Checkpoint) -> str:
    """Return whose state a source has: as its arguments say, or else as its files do where they are Megatron-Core's."""
    said = arguments_of(checkpoint.metadata.get("args")).get("use_distributed_optimizer")
    if isinstance(said, bool):
        return DISTRIBUTED if said else PLAIN
    origin = checkpoint.details.get("origin")
    facts = origin if isinstance(origin, Mapping) else {"format": checkpoint.format, **checkpoint.details}
    flat = any(Path(file.path).name == OPTIMIZER_FILE for file in checkpoint.files)
    distributed = facts.get("format") != FORMAT or SHARDED in {**facts, **checkpoint.details} or flat
    return DISTRIBUTED if distributed or not checkpoint.param_groups else PLAIN


def state_of(one: Parameter, model: tuple[Slot, str], *, plain: bool) -> Iterator[tuple[str, Slot]]:
    """Yield the slots that the optimizer has of a parameter by their keys, the master first.

    `model`: what the model has of it, and the type that this will have; `plain`: of an optimizer without masters of
    32-bit weights: that of others has a copy of these, too. Raises UnsupportedError: a slot is not of its parameter's
    shape.
    """
    written, dtype = model
    if not plain or dtype != "float32":
        yield MASTER, one.slots.get(MASTER) or written
    for key, slot in one.slots.items():
        if key in (WEIGHT, MASTER) or (key == STEP and not slot.shape):
            continue
        if slot.shape != one.shape:
            raise UnsupportedError(f"Megatron has no place for {key} of {one.name}",
                                   expected=f"its shape, {one.shape}", found=slot.shape)  # fmt: skip
        yield key, slot


def master_type(one: Parameter) -> str:
    """Return the type that a parameter's master is written in."""
    master = one.slots.get(MASTER)
    return "float32" if master is None else master.dtype


def groups_for(checkpoint: Checkpoint, expert_parallel_size: int | None, notes: list[str]) -> list[Group]:
    """Return the groups to write, once it is certain that they hold all that is trained.

    Raises UsageError: a size that cannot be; UnsupportedError: which group a parameter is in is not known, or some lack
    state that others have.
    """
    if expert_parallel_size is not None and expert_parallel_size < 1:
        raise UsageError("unusable expert-parallel-size", expected="at least 1", found=expert_parallel_size)
    grouped = {name for group in checkpoint.param_groups for name in group.parameters}
    lost = [one.name for one in checkpoint.parameters.values()
            if set(one.slots) - {WEIGHT} and one.name not in grouped]  # fmt: skip
    if lost:
        raise UnsupportedError("which parameters each param group has is not known", found=listed(lost),
                               advice="`zckpt consolidate` writes the model")  # fmt: skip
    trained = [one for name in grouped if (one := checkpoint.parameters[name])]
    most = {key for one in trained for key in one.slots if key not in (WEIGHT, MASTER)}
    lacking = next(((one.name, key) for one in trained for key in sorted(most) if key not in one.slots), None)
    if lacking is not None:
        raise UnsupportedError(f"{lacking[0]} has no {lacking[1]}, which others have",
                               expected="state of all trained parameters")  # fmt: skip
    as_source = checkpoint.topology.ep > 1 or any(
        group.hyperparameters.get(EXPERTS) is True for group in checkpoint.param_groups
    )
    chained = as_source if expert_parallel_size is None else expert_parallel_size > 1
    return groups_of(checkpoint, chained=chained, notes=notes)


def folder_for(checkpoint: Checkpoint, iteration: int | None, *, trained: bool) -> str:
    """Return the name of the directory within the run.

    Raises UsageError: nothing says at which iteration a trained model was saved.
    """
    chosen = checkpoint.step if iteration is None else iteration
    if chosen is None:
        if trained:
            raise UsageError("SOURCE does not say at which iteration it was saved", expected="--iteration N")
        return RELEASE
    if chosen < 0:
        raise UsageError("unusable iteration", expected="at least 0", found=chosen)
    return folder_of(str(chosen))


def common_tree(checkpoint: Checkpoint, folder: str, held: set[str]) -> dict[object, object]:
    """Return what `common.pt` holds but for the optimizer; the keys of metadata that are there go to `held`."""
    origin = checkpoint.details.get("origin")
    formats = (checkpoint.format, origin.get("format") if isinstance(origin, Mapping) else None)
    tree: dict[object, object] = {}
    for key, value in checkpoint.metadata.items():
        own = FORMAT in formats and not FOLDER.match(key) and key != OPTIMIZER
        if key not in held and key not in RESTATED and (own or key in OF_PROGRAM):
            tree[key] = value
    held |= {str(key) for key in tree} | RESTATED
    tree[VERSION] = CURRENT
    if folder != RELEASE:
        tree[ITERATION] = int(folder.rpartition("_")[2])
    return tree


def missing_notes(checkpoint: Checkpoint, folder: str, tree: Mapping[object, object]) -> list[str]:
    """Say what a program that goes on from here will look for and not find."""
    if folder == RELEASE or FORMAT in (checkpoint.format,):
        return []
    lacks = [what for key, what in (("args", "--no-load-rng"), ("opt_param_scheduler", "a scheduler of its own"))
             if key not in tree]  # fmt: skip
    return [f"SOURCE has no state of Megatron-LM's own: it starts with {' and '.join(lacks)}"] if lacks else []


def text_file(name: str, text: str) -> TargetFile:
    """Return a small file of text."""
    data = text.encode()
    return TargetFile(name, len(data), [Literal(0, data)])


def shards_of(value: object) -> dict[str, object]:
    """Return what ranks have of an object, by the keys that they have for it; nothing for other values."""
    node = node_of(value)
    if not isinstance(node, dict) or not all(isinstance(key, str) and _SHARDS.fullmatch(key) for key in node):
        return {}
    return {key: put_back(value, one) for key, one in node.items()}
