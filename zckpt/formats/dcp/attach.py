"""Parameters, and what optimizers hold of them: by name, or by number and a name that is found for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.dcp.optimizer import Label, OptimizerState, common_values, place, shape_of
from zckpt.formats.torch_files.optimizer import deduce_names
from zckpt.state import Checkpoint, Parameter, ParamGroup
from zckpt.state.names import aligned

SHOWN_NAMES = 8


def attach(checkpoint: Checkpoint, optimizers: Sequence[OptimizerState], names: Sequence[str] | None) -> None:
    """Give a checkpoint's parameters the optimizers' slots, and the checkpoint their param groups.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already.
    optimizers : sequence of OptimizerState
    names : sequence of str, optional
        Of the parameters that are only numbered, in the optimizers' order.

    Raises
    ------
    UsageError
        `names` do not fit.
    UnsupportedError
        State of a parameter of which no param group is known.
    """
    known = _names_of_numbers(checkpoint, optimizers, names)
    taken: set[str] = set()
    kept: list[OptimizerState] = []
    members: list[list[str]] = []
    unnamed: list[str] = []
    for at, optimizer in enumerate(optimizers):
        _complete(checkpoint, optimizer)
        found = {label: _name(optimizer, label, known.get((at, label))) for group in optimizer.groups
                 for label in group.members}  # fmt: skip
        if taken & set(found.values()):
            checkpoint.warnings.append(
                f"{optimizer.path} has parameters of an optimizer before it; its state is not read"
            )
            continue
        taken.update(found.values())
        kept.append(optimizer)
        for group in optimizer.groups:
            index = len(members)
            members.append([found[label] for label in group.members])
            for label in group.members:
                _give(checkpoint, optimizer, label, found[label], index)
            unnamed += [str(label) for label in group.members if found[label] in checkpoint.unnamed and _bare(label)]
    groups = [(group, optimizer.name) for optimizer in kept for group in optimizer.groups]
    for (group, name), listed, shared in zip(groups, members, common_values(kept), strict=True):
        checkpoint.param_groups.append(ParamGroup(group.hyperparameters, listed, shared, name))
    if unnamed:
        shown = ", ".join(unnamed[:SHOWN_NAMES]) + (" ..." if len(unnamed) > SHOWN_NAMES else "")
        checkpoint.warnings.append(
            f"the optimizer's parameters {shown} have no names and several of the model's tensors fit them; "
            f"their state is kept under their numbers (give --names FILE, one name a line in the optimizer's order)"
        )


def _bare(label: Label) -> bool:
    return isinstance(label, int)


def _complete(checkpoint: Checkpoint, optimizer: OptimizerState) -> None:
    """Put parameters that have state and are in no group into the only group that there is.

    Pipeline stages each list their own parameters under the same key, of which torch saves one rank's list only.
    """
    listed = {label for group in optimizer.groups for label in group.members}
    others = [label for label in optimizer.state if label not in listed]
    if not others:
        return
    shown = ", ".join(map(str, others[:SHOWN_NAMES])) + (" ..." if len(others) > SHOWN_NAMES else "")
    if len(optimizer.groups) != 1 or optimizer.is_numbered:
        raise UnsupportedError(f"state of parameters that are in no param group: {shown}", path=optimizer.path)
    optimizer.groups[0].members += others
    checkpoint.warnings.append(f"no list names {shown}, which have state; they are put into the only param group")


def _name(optimizer: OptimizerState, label: Label, found: str | None) -> str:
    """Return the name of a parameter; where there is none, its number."""
    if found is not None:
        return found
    return optimizer.prefix + str(label)


def _give(checkpoint: Checkpoint, optimizer: OptimizerState, label: Label, name: str, index: int) -> None:
    slots = optimizer.state.get(label, {})
    if name in checkpoint.buffers:  # an optimizer has it, so that it is none
        checkpoint.parameters[name] = checkpoint.buffers.pop(name)
    parameter = checkpoint.parameters.get(name)
    if parameter is None:
        parameter = Parameter(name, shape_of(slots) or (), "float32")
        if slots:
            checkpoint.unnamed[name] = parameter
    parameter.group = index
    place(parameter, slots, optimizer.path)


def _names_of_numbers(
    checkpoint: Checkpoint, optimizers: Sequence[OptimizerState], names: Sequence[str] | None
) -> dict[tuple[int, Label], str]:
    """Return names for the parameters of which only numbers are known, by the optimizer's place and the number."""
    numbered = [(at, one) for at, one in enumerate(optimizers) if one.is_numbered]
    if names is not None and not numbered:
        if optimizers:
            checkpoint.warnings.append("--names is not used: the directory has the names of the parameters")
        return {}
    every = [(at, label) for at, one in numbered for group in one.groups for label in group.members]
    if names is not None:
        return _given(checkpoint, optimizers, every, names)
    found: dict[tuple[int, Label], str] = {}
    for at, one in numbered:
        used = set(found.values())
        free = {name: p for name, p in checkpoint.parameters.items() if name not in used}
        recorded = _recorded(one, free)
        checkpoint.is_numbered = checkpoint.is_numbered or not recorded
        numbers = [[label for label in group.members if isinstance(label, int)] for group in one.groups]
        certain = recorded or deduce_names(numbers, list(free), _fits(one, free))
        found.update({(at, number): name for number, name in certain.items()})
    return found


def _given(
    checkpoint: Checkpoint,
    optimizers: Sequence[OptimizerState],
    every: Sequence[tuple[int, Label]],
    names: Sequence[str],
) -> dict[tuple[int, Label], str]:
    if len(names) != len(every) or len(set(names)) != len(names):
        raise UsageError(
            "unusable parameter names",
            path=checkpoint.source,
            expected=f"{len(every)} different names",
            found=f"{len(set(names))} different ones of {len(names)}",
        )
    known = aligned(checkpoint.parameters, names)
    names = [known.get(name, name) for name in names]
    for (at, label), name in zip(every, names, strict=True):
        if name not in checkpoint.parameters:
            raise UsageError(f"the model has no parameter {name}", path=checkpoint.source)
        shape, own = shape_of(optimizers[at].state.get(label, {})), checkpoint.parameters[name].shape
        if shape is not None and not _agree(shape, own):
            raise UsageError(
                f"parameter {label} of the optimizer is not {name}",
                path=checkpoint.source,
                expected=f"shape {own}",
                found=shape,
            )
    return dict(zip(every, names, strict=True))


def _recorded(optimizer: OptimizerState, free: Mapping[str, Parameter]) -> dict[int, str]:
    """Return the names that groups have as `param_names`, where they are the model's; empty where they are not."""
    found: dict[int, str] = {}
    for group in optimizer.groups:
        names = group.hyperparameters.get("param_names")
        if not isinstance(names, (list, tuple)) or len(names) != len(group.members):
            return {}
        found.update({int(label): str(name) for label, name in zip(group.members, names, strict=True)})
    known = aligned(free, found.values())
    found = {number: known.get(name, name) for number, name in found.items()}
    fits = _fits(optimizer, free)
    plausible = all(name in free and fits(number, name) for number, name in found.items())
    return found if plausible and len(set(found.values())) == len(found) else {}


def _fits(optimizer: OptimizerState, parameters: Mapping[str, Parameter]) -> Callable[[int, str], bool]:
    shapes = {label: shape_of(slots) for label, slots in optimizer.state.items()}
    return lambda number, name: shapes.get(number) is None or shapes[number] == parameters[name].shape


def _agree(state: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Tell whether state of this shape can belong to a parameter: per element, or factored over some dimensions."""
    if len(state) == len(parameter):
        return all(own in (1, whole) for own, whole in zip(state, parameter, strict=True))
    return len(state) < max(len(parameter), 1) and set(state) <= set(parameter)
