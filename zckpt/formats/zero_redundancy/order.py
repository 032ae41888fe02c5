"""The names of the optimizer's parameters in its order, for files that only number each rank's share of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.formats.parameter_names import deduce_names
from zckpt.formats.torch_optimizer import OptimizerState
from zckpt.state import Checkpoint
from zckpt.state.names import aligned
from zckpt.state.partition import greedy_order
from zckpt.torchfile import Tensor

Order = list[list[str]]
"""For each param group, the names of its parameters."""

Shape = tuple[int, ...]


def told_by_names(names: Sequence[str], lengths: Sequence[int], checkpoint: Checkpoint, path: str) -> Order:
    """Return a list of names, group by group.

    Parameters
    ----------
    names : sequence of str
        Of all parameters, in the optimizer's order.
    lengths : sequence of int
        How many parameters each group has.
    checkpoint : Checkpoint
        Has the model's parameters.
    path : str

    Raises
    ------
    UsageError
        Too few or too many names, or one that the model has not.
    """
    if len(names) != sum(lengths) or len(set(names)) != len(names):
        raise UsageError(
            "unusable parameter names",
            path=path,
            expected=f"{sum(lengths)} different names",
            found=f"{len(set(names))} different ones of {len(names)}",
        )
    known = aligned(checkpoint.parameters, names)
    names = [known.get(name, name) for name in names]
    missing = [name for name in names if name not in checkpoint.parameters]
    if missing:
        raise UsageError(f"the model has no parameter {missing[0]}", path=path)
    owners = [checkpoint.owner(name).name for name in names]
    if len(set(owners)) != len(owners):
        raise UsageError("two of the names are of one tied parameter", path=path)
    starts = [sum(lengths[:group]) for group in range(len(lengths))]
    return [owners[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def told_by_the_model(ranks: Sequence[OptimizerState], checkpoint: Checkpoint, path: str) -> Order:
    """Return the only names that the shapes of the ranks' state leave, if each group is in the model's order.

    That order is the one of `model.parameters()`, which nothing in the files can prove: parameters of one size were
    dealt in the optimizer's order, and of those of different sizes no order is kept. An optimizer of one group that
    has all of the model's parameters needs no shapes.

    Parameters
    ----------
    ranks : sequence of OptimizerState
        Each rank's own.
    checkpoint : Checkpoint
        Has the model's parameters.
    path : str

    Raises
    ------
    LayoutError
        The ranks' shares are not those that torch deals.
    UnsupportedError
        A parameter has no state that tells its size, or several of the model's tensors fit.
    """
    candidates = [p.name for p in checkpoint.parameters.values() if p.tied_to is None]
    if all(len(state.groups) == 1 for state in ranks) and sum(len(s.numbers[0]) for s in ranks) == len(candidates):
        return [candidates]
    shapes = [
        [[_shape(state, number, rank, path) for number in group] for group in state.numbers]
        for rank, state in enumerate(ranks)
    ]
    try:
        dealt = greedy_order([[[math.prod(s) for s in group] for group in rank] for rank in shapes])
    except LayoutError as error:
        raise LayoutError(error.message, path=path, found=error.found, advice=_ADVICE) from error
    of = [[shapes[rank][group][at] for rank, at in order] for group, order in enumerate(dealt)]
    names = _names(of, checkpoint, candidates)
    for group, order in enumerate(dealt):
        for at, (rank, position) in enumerate(order):
            if (group, at) not in names:
                raise UnsupportedError(
                    f"parameter {position} of group {group} of rank {rank}, of shape {of[group][at]}, "
                    f"has no name that is certain",
                    path=path,
                    advice=_ADVICE,
                )
    place = {name: at for at, name in enumerate(checkpoint.parameters)}
    return [
        sorted((names[group, at] for at in range(len(order))), key=place.__getitem__)
        for group, order in enumerate(dealt)
    ]


_ADVICE = "give --names FILE, one name a line in the optimizer's order"


def _shape(state: OptimizerState, number: int, rank: int, path: str) -> Shape:
    """Return the shape of a parameter, which all tensors of its state have."""
    tensors = {key: v.shape for key, v in state.state.get(number, {}).items() if isinstance(v, Tensor)}
    found = {shape for key, shape in tensors.items() if key != "step"}
    if len(found) != 1:
        raise UnsupportedError(
            f"rank {rank}'s parameter {number} has no state that tells its shape, and without it the others' "
            f"names cannot be told either",
            path=path,
            advice=_ADVICE,
        )
    return found.pop()


def _names(
    groups: Sequence[Sequence[Shape]], checkpoint: Checkpoint, candidates: Sequence[str]
) -> dict[tuple[int, int], str]:
    """Return certain names by (group, position in the order of dealing)."""
    items = [(group, at) for group, members in enumerate(groups) for at in range(len(members))]
    shapes = [groups[group][at] for group, at in items]
    by_size: dict[int, list[list[int]]] = {}
    for number, (group, _) in enumerate(items):
        by_size.setdefault(math.prod(shapes[number]), [[] for _ in groups])[group].append(number)
    of_size: dict[int, dict[str, str]] = {}
    for at, name in enumerate(candidates):  # under their places, which sort as the model has them: no other order
        of_size.setdefault(checkpoint.parameters[name].numel, {})[f"{at:012d}"] = name

    def fits(number: int, place: str) -> bool:
        return checkpoint.parameters[candidates[int(place)]].shape == shapes[number]

    found: dict[int, str] = {}
    for numel, numbers in by_size.items():
        names = of_size.get(numel, {})
        found |= {number: names[place] for number, place in deduce_names(numbers, list(names), fits).items()}
    return {items[number]: name for number, name in found.items()}
