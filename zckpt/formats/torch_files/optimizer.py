"""The state dict of a `torch.optim` optimizer: {state: {number: {slot: value}}, param_groups: [{params, ...}]}.

Its parameters are numbers, counted over all groups in order; newer files may also hold their names (`param_names`).
Where a file has no names, they are deduced from the model's tensors with their shapes, the shapes of the optimizer's
state, and the order of both: each param group lists its parameters in the model's order, or sorted by name. A name is
given only where both readings give the same one; a number stays a number otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zckpt.errors import DamagedFileError, UsageError
from zckpt.formats.torch_files.tensors import read_scalars, slot_of, with_scalars
from zckpt.state import MASTER, Checkpoint, Parameter, ParamGroup, Slot
from zckpt.state.inventory import IMPLIED, STATE, Rule
from zckpt.state.names import aligned
from zckpt.torchfile import Tensor, brief

Fits = Callable[[int, str], bool]
"""Whether the optimizer's parameter with this number can be the model's tensor with this name."""

OPTIMIZER = "optimizer"
"""Under which a param group that zckpt wrote says which of several optimizers it is of."""

Sample = Callable[[Tensor, str], bool]
"""Whether a master rounds to the model's tensor of this name, as far as a sample of both can tell."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A torch optimizer's state dict.

    Parameters
    ----------
    state : dict of int to dict
        Slot to value, by parameter number.
    groups : list of dict
        Param groups, `params` included.
    masters : dict of int to Tensor
        fp32 masters by parameter number, where the file has them.
    """

    state: dict[int, dict[str, object]]
    groups: list[dict[str, Any]]
    masters: dict[int, Tensor]

    @property
    def numbers(self) -> list[list[int]]:
        """The parameter numbers of each group."""
        return [[int(n) for n in g["params"]] for g in self.groups]

    @property
    def every_number(self) -> list[int]:
        """The parameter numbers of all groups."""
        return [number for numbers in self.numbers for number in numbers]

    @property
    def recorded_names(self) -> list[str]:
        """The names that the file gives its parameters, in the order of their numbers; some or all may be missing."""
        found = [group.get("param_names") for group in self.groups]
        return [str(name) for names in found if isinstance(names, (list, tuple)) for name in names]

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Return the tensors in the state of a parameter, by slot."""
        return {key: value for key, value in self.state.get(number, {}).items() if isinstance(value, Tensor)}


def optimizer_rules(*path: str) -> tuple[Rule, ...]:
    """Return the inventory's rules for an optimizer's state dict that lies under some keys of a file's tree."""
    return (
        Rule((*path, "state", "*", "*"), STATE, "single values of a parameter"),
        Rule((*path, "param_groups", "*", "params", "**"), IMPLIED, "numbers of the parameters"),
        Rule((*path, "param_groups", "*", "param_names", "**"), IMPLIED, "names of the parameters"),
        Rule((*path, "param_groups", "*", "*", "**"), STATE, "hyperparameters"),
    )


def looks_like_optimizer(node: object) -> bool:
    """Tell whether a node is a torch optimizer's state dict."""
    return isinstance(node, dict) and isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def parse(node: object, path: str, masters: Sequence[Tensor] = ()) -> OptimizerState:
    """Bring a state dict to one form.

    Parameters
    ----------
    node : object
        The state dict.
    path : str
    masters : sequence of Tensor
        One for each parameter, in order; empty where there are none.

    Raises
    ------
    DamagedFileError
        It is not the state dict of a torch optimizer.
    """
    if not isinstance(node, dict) or not looks_like_optimizer(node):
        raise DamagedFileError(
            "unexpected content", path=path, expected="an optimizer's state dict", found=type(node).__name__
        )
    groups: list[dict[str, Any]] = []
    for group in node["param_groups"]:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, (list, tuple)) or not all(type(n) is int for n in params):
            raise DamagedFileError(
                "unreadable param group", path=path, expected="a list of numbers in `params`", found=brief(params)
            )
        groups.append(with_scalars(group, path))
    numbers = [n for group in groups for n in group["params"]]
    known = set(numbers)
    state = {}
    for key, slots in node["state"].items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key  # as `dcp_to_torch_save` leaves them
        if number not in known or not isinstance(slots, dict):
            raise DamagedFileError("state of a parameter that is in no group", path=path, found=brief(key))
        state[int(number)] = {str(key): value for key, value in slots.items()}
    if len(set(numbers)) != len(numbers) or (masters and len(masters) != len(numbers)):
        raise DamagedFileError(
            "masters and param groups disagree", path=path, expected=f"{len(numbers)} parameters", found=len(masters)
        )
    return OptimizerState(state, groups, dict(zip(numbers, masters, strict=True)) if masters else {})


def attach(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    path: str,
    *,
    names: Sequence[str] | None = None,
    sample: Sample | None = None,
    known: Mapping[int, str] | None = None,
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
    known : mapping of int to str, optional
        The names that are certain, by number, if they have been found already.

    Raises
    ------
    UsageError
        `names` do not fit the file.
    """
    unnamed = []
    labels = {} if checkpoint.parameters or known is not None else _labels(optimizer, names)
    if known is None:
        known = {} if labels else _names(checkpoint, optimizer, names, sample, path)
    for index, (group, numbers) in enumerate(zip(optimizer.groups, optimizer.numbers, strict=True)):
        members = []
        for number in numbers:
            slots, state = _slots(optimizer, number, path)
            name = known.get(number)
            if name is None:
                name = labels.get(number, str(number))
                shape = _shape(optimizer, number) or ()
                if slots or state:
                    unnamed += [] if number in labels else [number]
                    checkpoint.unnamed[name] = Parameter(name, shape, "float32", slots, index, state=state)
            else:
                owner = checkpoint.parameters[name]
                owner.slots.update(slots)
                owner.group, owner.state = index, state
            members.append(name)
        of = group.get(OPTIMIZER) if isinstance(group.get(OPTIMIZER), str) else None
        not_values = ("params", "param_names") if of is None else ("params", "param_names", OPTIMIZER)
        hyperparameters = {key: value for key, value in group.items() if key not in not_values}
        common = _common(optimizer, numbers, path)
        checkpoint.param_groups.append(ParamGroup(hyperparameters, members, common, of))
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
        else:
            state[key] = value
    return slots, state


def _shape(optimizer: OptimizerState, number: int) -> tuple[int, ...] | None:
    """Return the shape of a parameter as its state shows it: the largest of its tensors."""
    if number in optimizer.masters:
        return optimizer.masters[number].shape
    tensors = optimizer.tensors(number)
    shapes = [t.shape for key, t in tensors.items() if key != "step"] or [t.shape for t in tensors.values()]
    return max(shapes, key=lambda s: (len(s), s), default=None)


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
) -> dict[int, str]:
    numbers = optimizer.every_number
    recorded = _aligned(checkpoint, optimizer.recorded_names)
    if names is None and len(recorded) == len(numbers) and _are_those(checkpoint, optimizer, recorded):
        names = recorded
    candidates = {p.name: p for p in checkpoint.parameters.values() if p.tied_to is None}
    if names is None:
        checkpoint.is_numbered = True
        return deduce_names(optimizer.numbers, list(candidates), _fits(optimizer, candidates, sample))
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
        shape = _shape(optimizer, number)
        if shape is not None and not _agree(shape, owner.shape):
            raise UsageError(
                f"parameter {number} of the optimizer is not {name}",
                path=path,
                expected=f"shape {owner.shape}",
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
        shape = _shape(optimizer, number)
        if name not in checkpoint.parameters:
            return False
        if shape is not None and not _agree(shape, checkpoint.parameters[name].shape):
            return False
    return True


def _owner(checkpoint: Checkpoint, name: str, path: str) -> Parameter:
    if name not in checkpoint.parameters:
        raise UsageError(f"the model has no parameter {name}", path=path)
    return checkpoint.owner(name)


def _agree(state: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Tell whether state of this shape can belong to a parameter: per element, or factored over some dimensions."""
    if len(state) == len(parameter):
        return all(own in (1, whole) for own, whole in zip(state, parameter, strict=True))
    return len(state) < max(len(parameter), 1) and set(state) <= set(parameter)


def _fits(
    optimizer: OptimizerState, candidates: Mapping[str, Parameter], sample: Sample | None
) -> Callable[[int, str], bool]:
    known: dict[tuple[int, str], bool] = {}
    shapes = {n: _shape(optimizer, n) for n in optimizer.every_number}

    def fits(number: int, name: str) -> bool:
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
    groups: Sequence[Sequence[int]], names: Sequence[str], fits: Fits, *, sorted_too: bool = True
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
    """
    certain: dict[int, str] = {}
    while True:
        found = dict(certain)
        taken = set(certain.values())
        for group in groups:
            own = {certain[number] for number in group if number in certain}
            free = [name for name in names if name not in taken or name in own]
            found.update(_deduce_group(group, [free, sorted(free)] if sorted_too else [free], fits))
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
