"""The lean form of ZeRO-1 and 2 files: without the padding at the end of each rank's partition.

rigid   base_optimizer_state = {state: {group: {slot: p elements, step}}, param_groups}
lean    base_optimizer_state = [{slot: p - padding elements, step}, ...]      as DeepSpeed's elastic option writes it
        base_optimizer_state_step                   without which no DeepSpeed loads a list
        base_optimizer_param_groups                 hyperparameters: DeepSpeed has no place for them, and no need

Each rank loads its own file and pads what it finds. What DeepSpeed 0.19.8 makes of a lean file is not always what
was saved, and then the slots stay as they are and only the masters lose their padding, which it always gives back:

- it makes every tensor a float32 of padded length, so that a step that is a 0-d tensor (AdamW of torch) or a 16-bit
  state comes out wrong;
- it takes the keys of the first group for those of all, and one step for all groups;
- it takes learning rates from the training's configuration, not from the checkpoint: another one than was saved,
  where a scheduler had changed it;
- BF16_Optimizer does not know the form.

Source: DeepSpeed 0.19.8, `DeepSpeedZeroOptimizer._restore_base_optimizer_state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zckpt.formats.deepspeed.experts import expert_parallel_size
from zckpt.formats.deepspeed.flat import flat_cases
from zckpt.formats.deepspeed.groups import flat_groups
from zckpt.formats.deepspeed.origin import Origin, RankFiles
from zckpt.formats.deepspeed.shards import OptimizerShard
from zckpt.formats.stripping import Edited
from zckpt.state.partition import flat_padding, flat_starts
from zckpt.torchfile import Tensor, TorchFile

PARAM_GROUPS = "base_optimizer_param_groups"
STEP = "base_optimizer_state_step"


@dataclass(frozen=True, slots=True)
class Layout:
    """What of one file is padding.

    Parameters
    ----------
    partitions, paddings : list of int, elements
        Of this rank, by group: the whole, and what of its end is padding.
    lean : bool
        Whether the slots become lean, too.
    """

    partitions: list[int]
    paddings: list[int]
    lean: bool = False

    def length(self, group: int) -> int:
        """Return how many elements are no padding."""
        return self.partitions[group] - self.paddings[group]


def decide(origin: Origin) -> tuple[dict[str, Layout], str | None]:
    """Return what of each optimizer file is padding, by path, and what to tell the user."""
    members = [member for one in origin.ranks for member in one.members]
    if not members:
        return {}, "without ZeRO there is no padding"
    if members[0].stage == 3:
        return {}, "ZeRO-3 pads each parameter, and DeepSpeed loads it with that padding only: it stays"
    layouts = {member.path: layout for one in origin.ranks for member, layout in _layouts(one)}
    elastic = members[0].elastic
    reason = None if elastic else _reason(origin, members, layouts)
    if reason is not None:
        return layouts, f"the optimizer's slots keep their padding: {reason}"
    lean = {path: replace(layout, lean=True) for path, layout in layouts.items()}
    note = "DeepSpeed takes hyperparameters from the training's configuration when it loads the lean form"
    return lean, None if elastic else note


def _layouts(one: RankFiles) -> Iterator[tuple[OptimizerShard, Layout]]:
    """Yield the layout of each data-parallel rank's file."""
    members = one.members
    found = [Layout([0] * len(m.masters), [0] * len(m.masters)) for m in members]
    known = {name: parameter.shape for name, parameter in one.state.parameters.items()}
    for group in flat_groups(one.models[0], members, known):
        total = flat_starts(group.numels, group.pads)[-1]
        step = expert_parallel_size(len(members), members[0].partition_count[group.index], group.shapes)
        for first in range(step):
            for position, case in enumerate(flat_cases(group, members[first::step])):
                layout = found[first + position * step]
                layout.partitions[group.index] = case.high
                layout.paddings[group.index] = flat_padding(total, case.high, position)
    return zip(members, found, strict=True)


def _reason(origin: Origin, members: Sequence[OptimizerShard], layouts: dict[str, Layout]) -> str | None:
    """Return why DeepSpeed would not load the lean form as it was saved; None if it would."""
    if members[0].bf16_optimizer:
        return "BF16_Optimizer loads whole partitions only"
    scheduled = any("initial_lr" in group for member in members for group in member.groups)
    if scheduled or origin.model.content.get("lr_scheduler") is not None:
        return "a scheduler sets the learning rate, which DeepSpeed does not load from the lean form"
    for member in members:
        states = [{**tensors, **values} for tensors, values in zip(member.tensors, member.scalars, strict=True)]
        if any(state.keys() != states[0].keys() for state in states):
            return "the param groups have different slots"
        if any(group.get("step") != members[0].groups[0].get("step") for group in member.groups):
            return "the param groups are at different steps"
        for index, state in enumerate(states):
            for key, value in state.items():
                if not _is_loaded(value, layouts[member.path].partitions[index]):
                    return f"DeepSpeed does not load {key} from the lean form as it is"
    return None


def _is_loaded(value: object, partition: int) -> bool:
    """Tell whether DeepSpeed loads a value of an optimizer's state from the lean form as it was."""
    if isinstance(value, Tensor):
        return value.dtype == "float32" and value.shape == (partition,)
    return value is None or isinstance(value, (int, float, str))


def content(file: TorchFile) -> dict[object, object]:
    """Return the optimizer's part of an optimizer file; empty where there is none."""
    top = file.root.get("optimizer_state_dict") if isinstance(file.root, dict) else None
    return top if isinstance(top, dict) else {}


def edit(file: TorchFile, layout: Layout, slots: Sequence[str], edited: Edited) -> None:
    """Take the padding off the tensors of a file, and note which storages have it behind them.

    Parameters
    ----------
    file : TorchFile
    layout : Layout
    slots : sequence of str
        Keys that have one value per element.
    edited : Edited
    """
    z = content(file)
    masters = z["single_partition_of_fp32_groups"]
    if isinstance(masters, (list, tuple)):
        cut = [_cut(master, layout.length(index), edited) for index, master in enumerate(masters)]
        if any(now is not before for now, before in zip(cut, masters, strict=True)):
            z["single_partition_of_fp32_groups"] = cut
            if "zero_stage" in z:  # DeepSpeed 0.14 has all the padding of a group with the last rank
                z["group_paddings"] = list(layout.paddings)
            edited.changed = True
    if layout.lean:
        _edit_slots(z, layout, slots, edited)


def _edit_slots(z: dict[object, object], layout: Layout, slots: Sequence[str], edited: Edited) -> None:
    base = z["base_optimizer_state"]
    rigid = isinstance(base, dict)
    states = [base["state"].get(group, {}) if rigid else base[group] for group in range(len(layout.partitions))]  # type: ignore[index]
    states = [
        {key: _cut(value, layout.length(group), edited) if key in slots else value for key, value in state.items()}
        for group, state in enumerate(states)
    ]
    if isinstance(base, list):
        edited.changed |= any(now[key] is not old[key] for now, old in zip(states, base, strict=True) for key in old)
        base[:] = states
        return
    edited.changed = True
    made: dict[object, object] = {}
    for key, value in z.items():
        made[key] = states if key == "base_optimizer_state" else value
        if key == "base_optimizer_state" and isinstance(base, dict):
            groups = base["param_groups"]
            made |= {STEP: groups[0].get("step") if groups else None, PARAM_GROUPS: groups}
    z.clear()
    z.update(made)


def _cut(tensor: object, length: int, edited: Edited) -> object:
    """Return a tensor of at most `length` elements, with a storage of no more."""
    if not isinstance(tensor, Tensor):
        return tensor
    edited.trimmed.add(tensor.storage.key)
    return replace(tensor, shape=(length,), strides=(1,)) if tensor.numel > length else tensor
