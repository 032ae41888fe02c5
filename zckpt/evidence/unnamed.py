"""What is said, and refused, where no name is certain for an optimizer's numbers, and what would settle it."""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.errors import UnsupportedError, listed
from zckpt.evidence.solver import Shape
from zckpt.state import Checkpoint, Parameter

NAMES_ADVICE = "give --names FILE, one name a line in the optimizer's order"

NAMES_BY_STAGE_ADVICE = "give --names FILE, one name a line: stage by stage, in the order of each optimizer"

NAMES_OF_RANK_ADVICE = f"{NAMES_ADVICE}, experts by their number on a rank"


MOST_SHOWN = 8


def refuse_unnamed(checkpoint: Checkpoint, why: str) -> None:
    """Raise UnsupportedError unless all parameters of the optimizer have names; `why` says who needs them."""
    every = [name for group in checkpoint.param_groups for name in group.parameters]
    unknown = list(dict.fromkeys([*checkpoint.unnamed, *(name for name in every if name not in checkpoint.parameters)]))
    if unknown:
        raise UnsupportedError(
            f"the names of some of the optimizer's parameters are not known, {why}",
            found=listed(unknown, most=MOST_SHOWN),
            advice=NAMES_ADVICE,
        )


def keep_number(checkpoint: Checkpoint, label: str, shape: Shape | None, *, is_kept: bool = True) -> Parameter:
    """Return what stands for a parameter that the model has not, or that has no certain name: kept if it has state."""
    one = Parameter(label, shape or (), "float32")
    if is_kept:
        checkpoint.unnamed[label] = one
    return one


def note_numbers(checkpoint: Checkpoint, numbers: Sequence[object], *, advice: str = NAMES_ADVICE) -> None:
    """Warn of parameters that have no certain names and stay numbers, if there are any."""
    if numbers:
        checkpoint.warnings.append(
            f"the optimizer's parameters {listed(numbers, most=MOST_SHOWN)} have no names and several of the model's "
            f"tensors fit them; their state is kept under their numbers ({advice})"
        )


def note_not_used(checkpoint: Checkpoint, names: Sequence[str] | None, whose: str = "the directory has") -> None:
    """Warn of names that were given where a file has them all."""
    if names is not None:
        checkpoint.warnings.append(f"--names is not used: {whose} the names of the parameters")
