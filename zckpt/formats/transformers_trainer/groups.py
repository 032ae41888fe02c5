"""A checkpoint's param groups as the Trainer makes them: decayed and not, each in the model's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.errors import UnsupportedError
from zckpt.evidence.modules import Search, TooManyOrdersError
from zckpt.formats.transformers_trainer.architectures import Architecture
from zckpt.formats.transformers_trainer.readings import DECAYED, UNDECAYED, group_of, shortened
from zckpt.state import Checkpoint, ParamGroup

Members = list[list[str]]
"""Names by the Trainer's group."""


def as_the_trainer_has_them(checkpoint: Checkpoint, known: Architecture, notes: list[str]) -> Checkpoint:
    """Return a checkpoint with the two param groups that the Trainer has, one of which may be empty.

    Groups that are the Trainer's stay as they are. Others are parted and joined by its rule, where those that come to
    be in one group have the same hyperparameters. `known`: of the model; `notes`: gets what was done. Raises
    UnsupportedError: the Trainer's groups cannot be told, or have no hyperparameters that hold for all in one.
    """
    groups = checkpoint.param_groups
    members = [list(group.parameters) for group in groups]
    if len(groups) == 1 and not any(group_of(name, known) == UNDECAYED for name in members[0]):
        members.append([])
    if not _are_the_trainers(checkpoint, members, known):
        members = _parted(checkpoint, known)
        count = f"{len(groups)} param groups were" if len(groups) > 1 else "the param group was"
        notes.append(f"{count} made the Trainer's two: decayed, and norms and biases")
    _check_order(members, known)
    return _regrouped(checkpoint, members)


def _are_the_trainers(checkpoint: Checkpoint, members: Members, known: Architecture) -> bool:
    """Tell whether groups are the Trainer's; one-dimensional tensors of classes that are not known may be in either."""
    if len(members) != 2:
        return False
    for at, names in enumerate(members):
        for name in names:
            sure = group_of(name, known) == UNDECAYED or len(checkpoint.parameters[name].shape) != 1
            if sure and group_of(name, known) != at:
                return False
    return True


def _parted(checkpoint: Checkpoint, known: Architecture) -> Members:
    """Return the Trainer's groups of all that an optimizer has."""
    groups = checkpoint.param_groups
    owned = {name for group in groups for name in group.parameters}
    order = groups[0].parameters if len(groups) == 1 else [name for name in checkpoint.parameters if name in owned]
    shapes = {name: checkpoint.parameters[name].shape for name in order}
    unsure = [
        name
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 1 and shapes.get(f"{name[:-7]}.bias") == shape
        and not known.siblings and group_of(name, known) == DECAYED
    ]  # fmt: skip
    if unsure:
        raise UnsupportedError(
            "which parameters the Trainer decays depends on the classes of modules, which are not known",
            expected="the Trainer's two param groups, or a config.json of a known model_type with the source",
            found=f"{len(groups)} param groups, and {unsure[0][:-7]}, which may be a LayerNorm",
        )
    return [[name for name in order if group_of(name, known) == at] for at in (DECAYED, UNDECAYED)]


def _check_order(members: Members, known: Architecture) -> None:
    """Raise unless a model may have its parameters in the order of these groups."""
    at = {(group, number): name for group, names in enumerate(members) for number, name in enumerate(names)}
    short = {name: shortened(name) for name in at.values()}
    groups = {short[name]: group for (group, _), name in at.items()}

    def fits(name: str, group: int, number: int) -> bool:
        return short.get(at.get((group, number), "")) == name

    try:
        fine = bool(Search(groups, fits, len(members), {}, known.order).possible()) or not groups
    except TooManyOrdersError:
        fine = True
    if not fine:
        raise UnsupportedError(
            "the optimizer's parameters are in no order that the model can have, so the Trainer would take one's state "
            "for another's",
            expected="the order of model.named_parameters()",
            found=f"{members[0][0] if members[0] else members[1][0]} first",
        )


def _regrouped(checkpoint: Checkpoint, members: Members) -> Checkpoint:
    group_of_name = {name: group for group in checkpoint.param_groups for name in group.parameters}
    made: list[ParamGroup] = []
    for names in members:
        sources = list({id(group_of_name[name]): group_of_name[name] for name in names}.values())
        made.append(_joined(sources or checkpoint.param_groups[:1], names))
    number_of = {name: at for at, names in enumerate(members) for name in names}
    parameters = {
        name: replace(one, group=number_of[name]) if name in number_of else one
        for name, one in checkpoint.parameters.items()
    }
    return replace(checkpoint, param_groups=made, parameters=parameters)


def _joined(sources: Sequence[ParamGroup], names: list[str]) -> ParamGroup:
    first = sources[0]
    for other in sources[1:]:
        keys = {**first.hyperparameters, **other.hyperparameters}
        unlike = [k for k in keys if first.hyperparameters.get(k) != other.hyperparameters.get(k)]
        unlike += [k for k in {**first.state, **other.state} if first.state.get(k) != other.state.get(k)]
        if unlike:
            raise UnsupportedError(
                "param groups that the Trainer has as one differ",
                expected="the same hyperparameters for all decayed parameters, and for all others",
                found=f"{unlike[0]} {first.hyperparameters.get(unlike[0])} and {other.hyperparameters.get(unlike[0])}",
            )
    return ParamGroup(dict(first.hyperparameters), names, dict(first.state))
