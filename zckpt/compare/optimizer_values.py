"""The whole state that an optimizer has of one parameter, whichever way a format keeps it."""

from __future__ import annotations

from zckpt.errors import UnsupportedError
from zckpt.state import MASTER, WEIGHT, Checkpoint, Parameter, Slot
from zckpt.torchfile import Tensor


def parameter_values(checkpoint: Checkpoint, parameter: Parameter) -> dict[str, object]:
    """Return a parameter's state as `torch.optim` keeps it in `state[parameter]`: slots and single values by key.

    A single value that a file keeps once for a whole param group (`step` of a flat ZeRO buffer) is a value of each
    of its parameters. A parameter that no step has reached has no state at all: where others of its group have
    tensors and it has none, the group's values are not its own.

    Returns
    -------
    dict of str to Slot, Scalar, number, bool or inert node
        Without weight and master. Empty for a parameter that no optimizer owns.

    Raises
    ------
    UnsupportedError
        A tensor that belongs to a whole param group, which no single parameter can hold.
    """
    if parameter.group is None:
        return {}
    group = checkpoint.param_groups[parameter.group]
    own: dict[str, object] = {**parameter.state, **_slots(parameter)}
    if not group.state:
        return own
    if not own and any(_has_state(checkpoint, name) for name in group.parameters):
        return {}
    for key, value in group.state.items():
        if isinstance(value, Tensor):
            raise UnsupportedError(
                f"{key} is a tensor for a whole param group, which no single parameter's state can hold",
                path=checkpoint.source,
            )
    return {**group.state, **own}


def _slots(parameter: Parameter) -> dict[str, Slot]:
    return {key: slot for key, slot in parameter.slots.items() if key not in (WEIGHT, MASTER)}


def _has_state(checkpoint: Checkpoint, name: str) -> bool:
    parameter = checkpoint.parameters.get(name) or checkpoint.unnamed.get(name)
    return parameter is not None and bool(parameter.state or _slots(parameter))
