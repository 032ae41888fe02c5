"""The models of a checkpoint, each with its own names and its own optimizer, in the order that they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zckpt.errors import UnsupportedError, listed
from zckpt.evidence import refuse_unnamed
from zckpt.state import Checkpoint, Parameter


@dataclass(frozen=True, slots=True)
class Parts:
    """What Accelerate prepares.

    Parameters
    ----------
    whole : Checkpoint
        All of it, with the param groups in the order of `optimizers`.
    models : list of Checkpoint
        Only the tensors count.
    optimizers : list of Checkpoint
        Only the param groups count, and the parameters that are in them.
    """

    whole: Checkpoint
    models: list[Checkpoint]
    optimizers: list[Checkpoint]


def parts_of(checkpoint: Checkpoint, *, paired: bool) -> Parts:
    """Split a checkpoint into what Accelerate has prepared.

    `paired`: whether each optimizer has to be of one model, as under FSDP, whose optimizers have names. Raises
    UnsupportedError: optimizers of some of the models only, or of several at once.
    """
    refuse_unnamed(checkpoint, "so that it is not known whose state Accelerate is to find where")
    models = checkpoint.models()
    if not models:
        if checkpoint.optimizers():
            raise _unpaired(checkpoint, "one model, or which parameters are of which")
        return Parts(checkpoint, [checkpoint], [checkpoint] if checkpoint.param_groups else [])
    apart = [_of_model(checkpoint, name) for name in models]
    if not checkpoint.optimizers() and not paired:
        return Parts(checkpoint, apart, [checkpoint] if checkpoint.param_groups else [])
    if sum(len(one.param_groups) for one in apart) != len(checkpoint.param_groups):
        raise _unpaired(checkpoint, "an optimizer for each model")
    if checkpoint.param_groups and any(len({g.optimizer for g in one.param_groups}) != 1 for one in apart):
        raise _unpaired(checkpoint, "one optimizer for each model")
    return Parts(_arranged(checkpoint, models), apart, apart if checkpoint.param_groups else [])


def _unpaired(checkpoint: Checkpoint, expected: str) -> UnsupportedError:
    return UnsupportedError(
        "Accelerate pairs models and optimizers by their numbers, and these cannot be paired",
        expected=expected,
        found=f"{listed(checkpoint.models()) or 'one model'}; {listed(checkpoint.optimizers()) or 'one optimizer'}",
        advice="`--to zckpt` holds all of them",
    )


def _of_model(checkpoint: Checkpoint, model: str) -> Checkpoint:
    """Return what is of one model under its own names; param groups only where all of their parameters are."""
    prefix = f"{model}."
    groups = [
        at
        for at, one in enumerate(checkpoint.param_groups)
        if one.parameters and all(name.startswith(prefix) for name in one.parameters)
    ]
    new = {old: at for at, old in enumerate(groups)}

    def bare(one: Parameter) -> Parameter:
        tied = None if one.tied_to is None else one.tied_to.removeprefix(prefix)
        group = None if one.group is None else new.get(one.group)
        return replace(one, name=one.name.removeprefix(prefix), tied_to=tied, group=group)

    own = [bare(one) for name, one in checkpoint.parameters.items() if name.startswith(prefix)]
    buffers = [bare(one) for name, one in checkpoint.buffers.items() if name.startswith(prefix)]
    return replace(
        checkpoint,
        parameters={one.name: one for one in own},
        buffers={one.name: one for one in buffers},
        param_groups=[
            replace(group, parameters=[name.removeprefix(prefix) for name in group.parameters])
            for group in map(checkpoint.param_groups.__getitem__, groups)
        ],
    )


def _arranged(checkpoint: Checkpoint, models: Sequence[str]) -> Checkpoint:
    """Return a checkpoint whose param groups follow each other as its models do."""

    def model_of(at: int) -> int:
        name = checkpoint.param_groups[at].parameters[0]
        return next(number for number, model in enumerate(models) if name.startswith(f"{model}."))

    order = sorted(range(len(checkpoint.param_groups)), key=model_of)
    new = {old: at for at, old in enumerate(order)}
    parameters = {
        name: one if one.group is None else replace(one, group=new[one.group])
        for name, one in checkpoint.parameters.items()
    }
    return replace(checkpoint, parameters=parameters, param_groups=[checkpoint.param_groups[at] for at in order])
