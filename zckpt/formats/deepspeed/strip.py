"""What can go from a DeepSpeed checkpoint, such that DeepSpeed still loads what stays.

optimizer state   ZeRO-1, 2: the optimizer's files, for the weights are in the model's. DeepSpeed then starts an
                  optimizer from the weights, as it does under `load_optimizer_states=False`. Not under pipeline
                  parallelism, where only what goes with these files tells the names of tied layers.
                  ZeRO-3: the weights are the masters, so these stay, and the slots go.
slots by name     out of every file; the masters stay.
padding           ZeRO-1, 2: the masters' always. The slots' where DeepSpeed takes the lean form:

rigid   base_optimizer_state = {state: {group: {slot: p elements, step}}, param_groups}
lean    base_optimizer_state = [{slot: p - padding elements, step}, ...]      as DeepSpeed's elastic option writes it
        base_optimizer_state_step                   without which no DeepSpeed loads a list
        base_optimizer_param_groups                 hyperparameters: DeepSpeed does not look for them, and no need

Each rank loads its own file and pads what it finds. What DeepSpeed 0.19.8 makes of a lean file is not always what
was saved, and then the slots stay as they are and only the masters lose their padding, which it always gives back:

- it makes every tensor a float32 of padded length, so that a step that is a 0-d tensor (AdamW of torch) or a 16-bit
  state comes out wrong;
- it takes the keys of the first group for those of all, and one step for all groups;
- it takes learning rates from the training's configuration, not from the checkpoint: another one than was saved,
  where a scheduler had changed it;
- BF16_Optimizer does not know the form.

Source: DeepSpeed 0.19.8, `_load_legacy_checkpoint`, `DeepSpeedZeroOptimizer._restore_base_optimizer_state`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.directory import MODEL, OPTIMIZER, PIPELINE_LAYER, Shard
from zckpt.formats.deepspeed.origin import Origin, origin_of
from zckpt.formats.deepspeed.other_files import LATEST, beside_tag
from zckpt.formats.deepspeed.shards import OptimizerShard
from zckpt.formats.stripping import Edited, Request, Rewritten, Stripping, as_it_is, completed, rewrite
from zckpt.formats.torch_files.strip import drop_slots, optimizer_edit
from zckpt.state import MASTER, Checkpoint, Padding, by_key, dict_of, differ, list_of
from zckpt.torchfile import Tensor, TorchFile, walk_tensors


def strip(checkpoint: Checkpoint, source: Path, request: Request) -> Stripping:
    """Return what becomes of the files of a run or tag directory.

    Files that are no shards of the checkpoint are copied. Other checkpoints of a run directory are left out.

    Parameters
    ----------
    checkpoint : Checkpoint
        As read from `source`.
    source : Path
        The directory as the user named it.

    Raises
    ------
    SourceError
        A file cannot be read, or holds what cannot be written.
    """
    origin = origin_of(checkpoint)
    if origin is None:
        raise TypeError("not a checkpoint that was read from DeepSpeed's files")
    directory, members, slots = origin.directory, origin.every_member, checkpoint.optimizer_slot_names()
    without_files = (
        request.optimizer
        and any(member.stage != 3 for member in members)
        and not directory.of(PIPELINE_LAYER)  # there, `param_shapes` alone has the names of tied layers
        and all(p.weight for p in checkpoint.owners)
    )
    layouts, lean, notes = dict[str, list[Padding]](), False, list[str]()
    if without_files:
        notes.append(
            "the optimizer's files, with the masters, are removed: load this with load_optimizer_states=False, "
            "and DeepSpeed starts from the weights (--keep-slots=master keeps a form that loads without that)"
        )
    elif request.padding:
        layouts, lean, notes = lean_layouts(origin)
    if request.slots and members and not without_files:
        kept = ", ".join(name for name in slots if not request.drops(name))
        notes.append(
            f"an optimizer that needs more than {kept} loads this and then fails to step; "
            f"load_optimizer_states=False lets it start afresh"
            if kept
            else "the masters stay; without slots the optimizer starts afresh"
        )

    def edit(shard: Shard, file: TorchFile) -> Edited:
        if without_files and shard.role == OPTIMIZER:
            return Edited(None, [
                (str(path[-1]) if "base_optimizer_state" in path else MASTER, tensor)
                for path, tensor in walk_tensors(file.root)
            ])  # fmt: skip
        if without_files and shard.role == MODEL:  # which announces the optimizer's files
            root = dict_of(file.root)
            announced = root.get("param_shapes") is not None
            if announced:
                root["param_shapes"] = None  # as DeepSpeed writes it where there are none
            return Edited(file.root, changed=announced)
        edited = optimizer_edit(request, slots)(file)  # stage 0 has it in the model's file
        if shard.role == OPTIMIZER:
            z = dict_of(dict_of(file.root).get("optimizer_state_dict"))
            if request.slots:  # of the elastic form
                drop_slots(list_of(z.get("base_optimizer_state")), request, slots, edited)
            if shard.path in layouts:
                drop_padding(z, layouts[shard.path], slots if lean else None, edited)
        return edited

    files: list[Rewritten] = []
    trees = {file.path: id(file.tree) for file in checkpoint.files}
    unchanged: set[int] = set()  # of files with one tree, as ZeRO-3's model files, one tells for all
    for shard in directory.shards:
        path, tree = Path(shard.path), trees.get(shard.path, 0)
        if tree in unchanged:
            files.append(as_it_is(path, shard.name))
            continue
        files.append(rewrite(path, shard.name, partial(edit, shard), unreferenced=request.unreferenced))
        if (written := files[-1].file) is not None and not written.literals:
            unchanged.add(tree)
    is_run = source.resolve() != directory.path.resolve()
    beside, left_out = beside_tag(source, directory.path) if is_run else ([], [])
    if left_out:
        notes.append(f"other checkpoints of the run are not copied: {', '.join(left_out)}")
    return completed(source, directory.path, files, pointer=LATEST, beside=beside, notes=notes)


PARAM_GROUPS = "base_optimizer_param_groups"
STEP = "base_optimizer_state_step"


def lean_layouts(origin: Origin) -> tuple[dict[str, list[Padding]], bool, list[str]]:
    """Return what of each optimizer file is padding, by path, whether slots become lean, too, and what to tell."""
    members = origin.every_member
    if not members:
        return {}, False, ["without ZeRO there is no padding"]
    if members[0].stage == 3:
        return {}, False, ["ZeRO-3 pads each parameter, and DeepSpeed loads it with that padding only: it stays"]
    odd = next((m for m in members if m.order is not None), None)
    if odd is not None:
        raise UnsupportedError(
            "ranks have the param groups, with padding, in different orders", path=odd.path,
            expected="one order", advice="`zckpt reshard` writes them in one order",
        )  # fmt: skip
    paths = {(one.mp_rank, member.rank): member.path for one in origin.ranks for member in one.members}
    layouts = by_key(
        (paths[one.mp_rank, padding.rank], padding)
        for one in origin.ranks
        for padding in sorted(one.padding, key=lambda padding: padding.group)
    )
    if members[0].elastic:
        return layouts, True, []
    reason = _reason(origin, members, layouts)
    if reason is not None:
        return layouts, False, [f"the optimizer's slots keep their padding: {reason}"]
    told = "DeepSpeed takes hyperparameters from the training's configuration when it loads the lean form"
    return layouts, True, [told]


def _reason(origin: Origin, members: Sequence[OptimizerShard], layouts: Mapping[str, Sequence[Padding]]) -> str | None:
    """Return why DeepSpeed would not load the lean form as it was saved; None if it would."""
    if members[0].bf16_optimizer:
        return "BF16_Optimizer loads whole partitions only"
    scheduled = any("initial_lr" in group for member in members for group in member.groups)
    if scheduled or origin.model.content.get("lr_scheduler") is not None:
        return "a scheduler sets the learning rate, which DeepSpeed does not load from the lean form"
    for member in members:
        states = [{**tensors, **values} for tensors, values in zip(member.tensors, member.scalars, strict=True)]
        if differ([state.keys() for state in states]):
            return "the param groups have different slots"
        if any(group.get("step") != members[0].groups[0].get("step") for group in member.groups):
            return "the param groups are at different steps"
        for index, state in enumerate(states):
            for key, value in state.items():
                whole = (layouts[member.path][index].partition,)
                is_loaded = (
                    value.dtype == "float32" and value.shape == whole
                    if isinstance(value, Tensor)
                    else value is None or isinstance(value, (int, float, str))
                )
                if not is_loaded:
                    return f"DeepSpeed cannot load {key} without padding"
    return None


def drop_padding(z: dict[Any, Any], layout: Sequence[Padding], slots: Sequence[str] | None, edited: Edited) -> None:
    """Take the padding off what an optimizer's file holds, off slots if they are given; note which storages had it."""

    def cut(tensor: object, padding: Padding) -> object:
        if not isinstance(tensor, Tensor):
            return tensor
        edited.trimmed.add(tensor.storage.key)
        length = padding.partition - padding.numel
        return replace(tensor, shape=(length,), strides=(1,)) if tensor.numel > length else tensor

    masters, base = list_of(z["single_partition_of_fp32_groups"]), z.get("base_optimizer_state")
    short = list(map(cut, masters, layout))
    if any(now is not before for now, before in zip(short, masters, strict=True)):
        z["single_partition_of_fp32_groups"] = short
        if "zero_stage" in z:  # DeepSpeed 0.14 has all the padding of a group with the last rank
            z["group_paddings"] = [padding.numel for padding in layout]
        edited.changed = True
    if slots is None:
        return
    rigid = dict_of(base)
    held = [rigid["state"].get(group, {}) for group in range(len(layout))] if rigid else list_of(base)
    states = [
        {key: cut(value, padding) if key in slots else value for key, value in state.items()}
        for padding, state in zip(layout, held, strict=True)
    ]
    edited.changed |= any(now[key] is not old[key] for now, old in zip(states, held, strict=True) for key in old)
    lean: dict[str, object] = {"base_optimizer_state": states}
    if rigid:
        edited.changed, groups = True, rigid["param_groups"]
        lean |= {STEP: groups[0].get("step") if groups else None, PARAM_GROUPS: groups}
    for key in list(z):  # what is added follows the states
        z[key] = z.pop(key)
        if key == "base_optimizer_state":
            z |= lean
