"""The state of torch's optimizers, given to a checkpoint's parameters: by names where a file has them.

Where a file has no names, they are deduced from the model's tensors with their shapes, the shapes of the optimizer's
state, and the order of both: each param group lists its parameters in the model's order, or sorted by name. A name is
given only where both readings give the same one; a number stays a number otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from zckpt.errors import DamagedFileError, UsageError, listed
from zckpt.formats.torch_files.gathered import lost_in_gathering
from zckpt.formats.torch_files.state_dicts import OPTIMIZER, OptimizerState, agree
from zckpt.formats.torch_files.tensors import holds_tensors, read_scalars, slot_of
from zckpt.state import MASTER, Checkpoint, Parameter, ParamGroup, Slot
from zckpt.state.names import aligned
from zckpt.torchfile import FromFile, Tensor

Fits = Callable[[int, str], bool]
"""Whether the optimizer's parameter with this number can be the model's tensor with this name."""

Sample = Callable[[Tensor, str], bool]
"""Whether a master rounds to the model's tensor of this name, as far as a sample of both can tell."""


def attach(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    path: str,
    *,
    names: Sequence[str] | None = None,
    sample: Sample | None = None,
    certain: Mapping[int, str] | None = None,
    last: Collection[str] = (),
) -> None:
    """Give a checkpoint's parameters the optimizer's slots, and the checkpoint its param groups.

    A parameter whose name is not certain stays under its number in `checkpoint.unnamed`, with a warning.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already.
    optimizer : OptimizerState
    path : str
        The file that holds it.
    names : sequence of str, optional
        Names by number, from the user.
    sample : callable, optional
        Tells by values whether a master belongs to a weight.
    certain : mapping of int to str, optional
        The names that are certain, by number, where they have been found already.
    last : collection of str
        As for `deduce_names`.

    Raises
    ------
    UsageError
        `names` do not fit the file.
    """
    unnamed = []
    labels = {} if checkpoint.parameters else _labels(optimizer, names)
    found = {} if labels else certain
    if found is None:
        found = _names(checkpoint, optimizer, names, sample, path, last)
    labels |= {number: name for number, name in optimizer.names.items() if number not in found}
    for index, (group, numbers) in enumerate(zip(optimizer.groups, optimizer.numbers, strict=True)):
        members = []
        for number in numbers:
            slots, state = _slots(optimizer, number, path)
            name = found.get(number)
            if name is None:
                name = labels.get(number, str(number))
                shape = optimizer.shape(number) or ()
                if slots or state:
                    unnamed += [] if number in labels else [number]
                    checkpoint.unnamed[name] = Parameter(name, shape, "float32", slots, index, state=state)
            else:
                owner = checkpoint.parameters[name]
                owner.slots.update(slots)
                owner.group, owner.state = index, state
            members.append(name)
        of = group.get(OPTIMIZER) if isinstance(group.get(OPTIMIZER), str) else None
        known = ("params", "param_names") if of is None else ("params", "param_names", OPTIMIZER)
        hyperparameters = {key: value for key, value in group.items() if key not in known}
        common = _common(optimizer, numbers, path)
        checkpoint.param_groups.append(ParamGroup(hyperparameters, members, common, of))
    foreign = [name for name in optimizer.names.values() if name in checkpoint.unnamed and checkpoint.parameters]
    if foreign:
        checkpoint.warnings.append(
            f"the optimizer has state of {listed(foreign)}, which the model has not; it is kept under these names"
        )
    lost = lost_in_gathering(optimizer, path) if optimizer.names else None
    checkpoint.warnings += [lost] if lost else []
    if unnamed:
        shown = ", ".join(map(str, unnamed[:8])) + (" ..." if len(unnamed) > 8 else "")
        checkpoint.warnings.append(
            f"the optimizer's parameters {shown} have no names and several of the model's tensors fit them; "
            f"their state is kept under their numbers (give --names FILE, one name a line in the optimizer's order)"
        )


def _slots(optimizer: OptimizerState, number: int, path: str) -> tuple[dict[str, Slot], dict[str, object]]:
    slots: dict[str, Slot] = {}
    state: dict[str, object] = {}
    if number in optimizer.masters:
        slots[MASTER] = slot_of(MASTER, optimizer.masters[number], path)
    for key, value in optimizer.state.get(number, {}).items():
        if isinstance(value, Tensor):
            slots[key] = slot_of(key, value, path)
        else:  # quantised, say: its tensors mean nothing by themselves
            state[key] = FromFile(value, path) if holds_tensors(value) else value
    return slots, state


def _common(optimizer: OptimizerState, numbers: Sequence[int], path: str) -> dict[str, object]:
    """Return the single values that all parameters of a group share, such as their step."""
    values: dict[str, list[object]] = {}
    present = [n for n in numbers if n in optimizer.state]
    tensors = [(key, t) for n in present for key, t in optimizer.tensors(n).items() if t.shape == () and key == "step"]
    for (key, _), scalar in zip(tensors, read_scalars(path, [t for _, t in tensors]), strict=True):
        values.setdefault(key, []).append(scalar)
    for n in present:
        for key, value in optimizer.state[n].items():
            if isinstance(value, (int, float, bool)):
                values.setdefault(key, []).append(value)
    return {k: v[0] for k, v in values.items() if len(v) == len(present) and all(one == v[0] for one in v)}


def _names(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    names: Sequence[str] | None,
    sample: Sample | None,
    path: str,
    last: Collection[str] = (),
) -> dict[int, str]:
    numbers = optimizer.every_number
    if len(optimizer.names) == len(numbers):
        return _by_name(checkpoint, optimizer, names, path)
    recorded = _aligned(checkpoint, optimizer.recorded_names)
    if names is None and len(recorded) == len(numbers) and _are_those(checkpoint, optimizer, recorded):
        names = recorded
    candidates = {p.name: p for p in checkpoint.parameters.values() if p.tied_to is None}
    if names is None:
        checkpoint.is_numbered = True
        fits = _fits(checkpoint, optimizer, candidates, sample)
        return deduce_names(optimizer.numbers, list(candidates), fits, last=last)
    if len(names) != len(numbers) or len(set(names)) != len(names):
        raise UsageError(
            "unusable parameter names",
            path=path,
            expected=f"{len(numbers)} different names",
            found=f"{len(set(names))} different ones of {len(names)}",
        )
    found = {}
    for number, name in zip(numbers, _aligned(checkpoint, names), strict=True):
        owner = candidates.get(name) or _owner(checkpoint, name, path)
        shape = optimizer.shape(number)
        if shape is not None and not agree(shape, owner.shape):
            raise UsageError(
                f"parameter {number} of the optimizer is not {name}",
                path=path,
                expected=f"shape {owner.shape}",
                found=shape,
            )
        found[number] = owner.name
    return found


def _by_name(
    checkpoint: Checkpoint, optimizer: OptimizerState, names: Sequence[str] | None, path: str
) -> dict[int, str]:
    """Return the model's names of parameters that the file has by name; what the model has not is not among them."""
    own = list(optimizer.names.values())
    if names is not None and _aligned(checkpoint, names) != _aligned(checkpoint, own):
        raise UsageError("the file has names of its optimizer's parameters", path=path, advice="leave --names out")
    found: dict[int, str] = {}
    for number, name in zip(optimizer.names, _aligned(checkpoint, own), strict=True):
        if name not in checkpoint.parameters:
            continue
        owner, shape = checkpoint.owner(name), optimizer.shape(number)
        if owner.name in found.values() or (shape is not None and not agree(shape, owner.shape)):
            raise DamagedFileError(
                f"the optimizer's state of {name} is not that of the model's parameter",
                path=path,
                expected=f"shape {owner.shape}, once",
                found=shape,
            )
        found[number] = owner.name
    return found


def _aligned(checkpoint: Checkpoint, names: Sequence[str]) -> list[str]:
    """Return names as the model's file has them, whatever wrappers either was in."""
    known = aligned(checkpoint.parameters, names)
    return [known.get(name, name) for name in names]


def _labels(optimizer: OptimizerState, names: Sequence[str] | None) -> dict[int, str]:
    """Return the names of parameters of which no model is there: the user's or the file's; empty if it gives none."""
    numbers = optimizer.every_number
    recorded = names or optimizer.recorded_names
    complete = len(recorded) == len(numbers) == len(set(recorded))
    return dict(zip(numbers, recorded, strict=True)) if complete else {}


def _are_those(checkpoint: Checkpoint, optimizer: OptimizerState, names: Sequence[str]) -> bool:
    """Tell whether the names that a file gives its optimizer's parameters are names of its model."""
    if len(set(names)) != len(names):
        return False
    for number, name in zip(optimizer.every_number, names, strict=True):
        shape = optimizer.shape(number)
        if name not in checkpoint.parameters:
            return False
        if shape is not None and not agree(shape, checkpoint.parameters[name].shape):
            return False
    return True


def _owner(checkpoint: Checkpoint, name: str, path: str) -> Parameter:
    if name not in checkpoint.parameters:
        raise UsageError(f"the model has no parameter {name}", path=path)
    return checkpoint.owner(name)


def _fits(
    checkpoint: Checkpoint, optimizer: OptimizerState, candidates: Mapping[str, Parameter], sample: Sample | None
) -> Callable[[int, str], bool]:
    known: dict[tuple[int, str], bool] = {}
    shapes = {n: optimizer.shape(n) for n in optimizer.every_number}
    own = dict(zip(optimizer.names, _aligned(checkpoint, list(optimizer.names.values())), strict=True))

    def fits(number: int, name: str) -> bool:
        if not name.startswith(optimizer.scopes.get(number, "")) or own.get(number, name) != name:
            return False
        shape = shapes[number]
        if shape is None:
            return True
        if shape != candidates[name].shape:
            return False
        master = optimizer.masters.get(number)
        if master is None or sample is None:
            return True
        if (number, name) not in known:
            known[number, name] = sample(master, name)
        return known[number, name]

    return fits


def deduce_names(
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
    fits: Fits,
    *,
    sorted_too: bool = True,
    last: Collection[str] = (),
) -> dict[int, str]:
    """Return the names that are certain, by the optimizer's number.

    Parameters
    ----------
    groups : sequence of sequence of int
        The numbers in each param group, in order.
    names : sequence of str
        The model's tensors that an optimizer could own, in the model's order.
    fits : callable
    sorted_too : bool
        Whether groups may also list their parameters sorted by name.
    last : collection of str
        Names that groups may also list after all others.
    """
    certain: dict[int, str] = {}
    while True:
        found = dict(certain)
        taken = set(certain.values())
        for group in groups:
            own = {certain[number] for number in group if number in certain}
            free = [name for name in names if name not in taken or name in own]
            orders = [free, sorted(free)] if sorted_too else [free]
            if last:
                orders.append(sorted(free, key=lambda name: name in last))
            found.update(_deduce_group(group, orders, fits))
        if len(set(found.values())) < len(found):
            return _without_conflicts(found)
        if found == certain:
            return certain
        certain = found


def _without_conflicts(found: Mapping[int, str]) -> dict[int, str]:
    """Drop the names that two groups have."""
    counts = Counter(found.values())
    return {number: name for number, name in found.items() if counts[name] == 1}


def _deduce_group(group: Sequence[int], orders: Sequence[Sequence[str]], fits: Fits) -> dict[int, str]:
    readings = []
    for order in orders:
        earliest = _leftmost(group, order, fits)
        if earliest is None:
            continue
        backwards = _leftmost(group[::-1], order[::-1], fits) or []
        latest = [len(order) - 1 - at for at in backwards[::-1]]
        readings.append([order[a] if a == b else None for a, b in zip(earliest, latest, strict=True)])
    if not readings:
        return {}
    return {
        number: reading[0]
        for number, *reading in zip(group, *readings, strict=True)
        if reading[0] is not None and all(name == reading[0] for name in reading)
    }


def _leftmost(group: Sequence[int], order: Sequence[str], fits: Fits) -> list[int] | None:
    """Return the leftmost positions at which the group can be found in order, or None if it cannot."""
    found: list[int] = []
    at = 0
    for number in group:
        while at < len(order) and not fits(number, order[at]):
            at += 1
        if at == len(order):
            return None
        found.append(at)
        at += 1
    return found
