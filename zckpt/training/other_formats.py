"""What a training loop saves in formats of other programs, which an optimizer writes as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zckpt.errors import UsageError
from zckpt.optim.ranks import Place
from zckpt.optim.states import Target, state_class
from zckpt.optim.states.several import Given, Optimizers, named
from zckpt.optim.tensors import Model, model_state, parts_of
from zckpt.training.other_state import EXTRA, GRAD_SCALER, SCHEDULER


def save_as(
    form: str,
    path: Place,
    model: Model,
    optimizer: Given,
    given: Mapping[str, Any],
    *,
    async_: bool,
    overwrite: bool,
) -> None:
    """Save in a format of another program.

    Raises UsageError: the format is not one for this optimizer, or has room for one only.
    """
    every = named(optimizer)
    if len(every) > 1:
        raise UsageError(
            f"format {form} has room for one optimizer", found=f"{len(every)} optimizers", advice="save as zckpt"
        )
    for one in every.values():
        if state_class(one).writes != form:
            raise UsageError(
                f"format {form} does not suit {type(one).__name__}", advice="save as zckpt, and use zckpt convert"
            )
    if isinstance(model, (list, tuple)):
        raise UsageError(f"format {form} is not written of a model in parts", advice="save as zckpt")
    if not every:
        raise UsageError(f"format {form} is written of an optimizer, and none is given", advice="save as zckpt")
    if given["tp_rules"] is not None:
        raise UsageError(
            f"tp_rules are for zckpt's own format, not {form}", advice="give universal_checkpoint_info in extra"
        )
    if async_:
        raise UsageError(f"format {form} is not written while training goes on", advice="save as zckpt")
    others = {
        key: given[name].state_dict()
        for key, name in ((SCHEDULER, "scheduler"), (GRAD_SCALER, "grad_scaler"))
        if given[name] is not None
    }
    if given["extra"] is not None:
        others[EXTRA] = dict(given["extra"])
    tensors = model_state(model)
    whole = next(iter(parts_of(model)), None)
    for state in Optimizers(optimizer, tensors.names(), tensors.members).states.values():
        state.write(Target(path, whole, given["step"], others, overwrite))
