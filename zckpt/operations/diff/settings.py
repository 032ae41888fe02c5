"""What two checkpoints say beside their tensors: hyperparameters, steps, and all that was carried along."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from zckpt.compare.logical import single
from zckpt.compare.slots import Pair, differences
from zckpt.errors import listed
from zckpt.formats.registry import formats
from zckpt.operations.diff.match import Matches
from zckpt.operations.diff.trees import Leaf, leaves
from zckpt.state import Checkpoint, Parameter, ParamGroup

SHOWN_NAMES = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """Something that is no tensor and differs; JSON-able values, None where a side has none."""

    key: str
    a: object
    b: object


def compare_settings(a: Checkpoint, b: Checkpoint, matches: Matches, *, memory: int) -> list[Setting]:
    """Return what differs beside the tensors.

    Not compared is what a world size, a stage or a format decides: ranks, files, which names share one tensor, and
    the keys that `_of_layout` tells.

    Raises
    ------
    SourceError
        A tensor that was carried along cannot be read.
    """
    found = [Setting(key, x, y) for key, x, y in _facts(a, b) if x != y]
    found += _groups(a, b, matches)
    found += _state(matches)
    found += _trained(matches, a, b)
    found += _carried("per_rank", _of_ranks(a), _of_ranks(b), memory)
    found += _carried("metadata", a.metadata, b.metadata, memory)
    found += _carried("optimizer", a.optimizer_metadata, b.optimizer_metadata, memory)
    return [one for one in found if not _of_layout(one, a, b)]


def _of_layout(setting: Setting, a: Checkpoint, b: Checkpoint) -> bool:
    """Tell whether a setting follows from how state is cut, as any format knows that has ever held it."""
    return any(one.follows(setting.key, (setting.a, setting.b), (a, b)) for one in formats())


def _facts(a: Checkpoint, b: Checkpoint) -> list[tuple[str, object, object]]:
    scales = [single(1.0 if one.loss_scale is None else one.loss_scale) for one in (a, b)]  # 1: losses as they are
    return [("step", a.step, b.step), ("loss_scale", scales[0], scales[1])]


def _of_ranks(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the state that is each rank's own by where it belongs."""
    return {
        f"{one.key}[group {one.group}, part {one.part}, rank {one.rank}, mp_rank {one.mp_rank}]": one.value
        for one in checkpoint.per_rank
    }


def _groups(a: Checkpoint, b: Checkpoint, matches: Matches) -> list[Setting]:
    if len(a.param_groups) != len(b.param_groups):
        return [Setting("param_groups", f"{len(a.param_groups)} groups", f"{len(b.param_groups)} groups")]
    found = []
    for index, (ours, theirs) in enumerate(zip(a.param_groups, b.param_groups, strict=True)):
        key = f"param_groups[{index}]"
        found += _leaves(key, leaves(ours.hyperparameters), leaves(theirs.hyperparameters))
        if ours.optimizer != theirs.optimizer:
            found.append(Setting(f"{key}.optimizer", ours.optimizer, theirs.optimizer))
        names = _members(ours, matches.ours), _members(theirs, matches.theirs)
        if names[0] != names[1]:
            found.append(Setting(f"{key}.params", *_shown_members(*names)))
    return found


def _members(group: ParamGroup, named: Mapping[str, Parameter]) -> list[str]:
    names = {parameter.name: name for name, parameter in named.items()}
    return [names.get(name, name) for name in group.parameters]


def _shown_members(a: list[str], b: list[str]) -> tuple[str, str]:
    if sorted(a) == sorted(b):
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        return f"{a[at]} at {at}", f"{b[at]} at {at}"
    ours, theirs = set(a), set(b)
    gone, come = [name for name in a if name not in theirs], [name for name in b if name not in ours]
    return listed(gone, most=SHOWN_NAMES) or "none", listed(come, most=SHOWN_NAMES) or "none"


def _leaves(key: str, a: Mapping[str, Leaf], b: Mapping[str, Leaf]) -> list[Setting]:
    found = []
    for path in dict.fromkeys([*a, *b]):
        x, y = (side[path].value if path in side else None for side in (a, b))
        if x != y or (path in a) != (path in b):
            found.append(Setting(f"{key}.{path}" if path else key, x, y))
    return found


def _state(matches: Matches) -> list[Setting]:
    """Return single values of parameters that differ; what all of a group have alike comes once."""
    ours = matches.ours
    groups: dict[tuple[int | None, str], list[tuple[str, object, object]]] = defaultdict(list)
    for name, key, x, y in matches.singles:
        group = ours[name].group if name in ours else None
        groups[group, key].append((name, x, y))
    found = []
    sizes = Counter(parameter.group for parameter in ours.values() if parameter.tied_to is None)
    for (group, key), values in groups.items():
        if group is not None and len(values) == sizes[group] and len({repr(value[1:]) for value in values}) == 1:
            found.append(Setting(f"param_groups[{group}].state.{key}", *values[0][1:]))
        else:
            found += [Setting(f"state[{name}].{key}", x, y) for name, x, y in values]
    return found


def _trained(matches: Matches, a: Checkpoint, b: Checkpoint) -> list[Setting]:
    """Return which parameters only one optimizer trains; a model alone does not say."""
    if not (a.param_groups and b.param_groups):
        return []
    both = [
        (name, *(side[name].group is not None for side in (matches.ours, matches.theirs))) for name in matches.names
    ]
    return [Setting(f"trained[{name}]", x, y) for name, x, y in both if x != y]


def _carried(key: str, a: Mapping[str, object], b: Mapping[str, object], memory: int) -> list[Setting]:
    """Compare trees, and the tensors in them."""
    ours, theirs = (
        {f"{name}.{path}" if path else name: leaf for name in side for path, leaf in leaves(side[name]).items()}
        for side in (a, b)
    )
    found = _leaves(key, ours, theirs)
    pairs = [
        Pair(f"{key}.{path}", one.slot, other.slot)
        for path, one in ours.items()
        for other in [theirs.get(path)]
        if other is not None and one.value == other.value and one.slot is not None and other.slot is not None
    ]
    for one in differences(pairs, memory=memory):
        text = str(ours[one.label.removeprefix(f"{key}.")].value)
        found.append(Setting(one.label, text, f"differs in {one.figures.num_different} of {one.figures.numel}"))
    return found
