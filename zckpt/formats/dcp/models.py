"""Which dicts of tensors of a saved dict are models, and which optimizer is whose.

The model is what has the optimizer's names; where those are numbers, or there is no optimizer, what is called as models
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from zckpt.errors import UnsupportedError
from zckpt.evidence import greatest
from zckpt.formats.dcp.metadata import Keys
from zckpt.formats.dcp.optimizer import Optimizer
from zckpt.formats.dcp.tree import ModelPart, joined
from zckpt.formats.torch_files.content import STATE_DICT_KEYS, calls, can_have, is_averages
from zckpt.state import are_distinct
from zckpt.state.names import aligned, bare_names


def find_models(
    candidates: Sequence[ModelPart], optimizers: Sequence[Optimizer], warnings: list[str], *, front: bool
) -> list[ModelPart]:
    """Return the models of a tree: one almost always, none where it holds only an optimizer.

    `candidates`: its dicts of tensors; `optimizers`: those of the same tree; `warnings`: to which is added what was
    decided without certainty; `front`: as for `bare_names`.
    """
    found = owners(optimizers, candidates)
    is_one = len(found) == 1 and not optimizers[0].names  # beside whose model are others, too
    chosen = [one for one in candidates if one in found and not is_one]
    if not chosen and candidates:  # the one that is called as models are; or else all with more than single numbers
        usual = [one for one in candidates if one.path and one.path[-1] in STATE_DICT_KEYS]
        large = [one for one in candidates if any(tensor.shape for tensor in one.tensors.values())]
        plain = [one for one in large if not is_average(one)]
        chosen = [max(usual, key=_usual)] if usual else large
        if len(optimizers) > 1 and not _may_have(chosen, optimizers) and _may_have(plain, optimizers):
            chosen = plain
        elif is_one and found[0] is not None and found[0] not in chosen:
            chosen = plain if found[0] in plain else large
        elif len(usual) > 1:
            shown = ", ".join(joined(one.path) for one in usual)
            used = joined(chosen[0].path)
            warnings.append(f"there are several dicts of tensors ({shown}); {used} is used as the model")
    for at, one in enumerate(chosen):
        names = bare_names(one.tensors, front=front)
        tensors = {names[name]: tensor for name, tensor in one.tensors.items()}
        chosen[at] = replace(one, tensors=tensors, filed={new: old for old, new in names.items()})
    if len(chosen) > 1:
        shown = " and ".join(joined(one.path) or "the rest" for one in chosen)
        warnings.append(f"{shown} are read as one model; tensor names begin with these names")
        return [replace(one, prefix=f"{joined(one.path)}." if one.path else "") for one in chosen]
    return chosen


def without_modules(optimizers: Sequence[Optimizer], models: Sequence[ModelPart]) -> None:
    """Take from an optimizer's names that of a module around its model, where the model's key ends with that.

    FastVideo has `roles.student.transformer`, and in `optimizers.student` the state of `transformer.NAME`.
    """
    for part in optimizers:
        fronts = {name.partition(".")[0] for name in part.names}
        around = [one for one in models if fronts == {joined(one.path).rpartition(".")[2]}]
        if around and not any(aligned(one.tensors, part.names) for one in around):
            names = {name: name.partition(".")[2] for name in part.names}
            part.rename(names)
            part.names = frozenset(names.values())


def owners(optimizers: Sequence[Optimizer], models: Sequence[ModelPart]) -> list[ModelPart | None]:
    """Return the model of each optimizer: what has most of its names, whatever wrappers they have.

    Two models may have the same names: then its is the one beside it, or of a key like its own (`opt_gen`: `gen`), or
    that is called as models are and not as their averages. None where none has any of them, and of those without names
    unless each has another model that is nearest, or called like it; of one alone, nearer than any other. Raises
    UnsupportedError: that leaves several.
    """
    if optimizers and not any(part.names for part in optimizers):
        near = [
            its[0] if len(its) == 1 and _may_have(its, [part]) else None
            for part in optimizers
            for its in [_nearest(part, models)]
        ]
        places = {part.path[-1:]: part for part in models if part.path and type(part.path[-1]) is int}
        if len(places) == len(models) and places.keys() == {part.path[-1:] for part in optimizers}:
            return [places[part.path[-1:]] for part in optimizers]  # of lists that are as long
        if None not in near and are_distinct(near) and len(near) > 1:
            return near
        if len(near) == 1 and near[0] is not None:
            others = [_nearness(optimizers[0], one)[::3] for one in models if one != near[0]]
            is_nearer = all(_nearness(optimizers[0], near[0])[::3] > one for one in others)
            return near if is_nearer else [None]
    found = [_owner(part, models) if part.names else None for part in optimizers]
    for at, (part, model) in enumerate(zip(optimizers, found, strict=True)):
        alike = [one for one in _most_alike(part, models) if not is_average(one)] if model is not None else []
        if len(alike) > 1 and any(
            one == model and part.names & other.names for one, other in zip(found[:at], optimizers, strict=False)
        ):
            raise _open(part, alike)
    return found


def is_average(part: ModelPart) -> bool:
    """Tell a dict that is called as averages are."""
    return any(is_averages(step) for step in part.path)


def _nearness(optimizer: Optimizer, model: ModelPart) -> tuple[int, bool, bool, int]:
    """Return how near a model lies to an optimizer, if it is called the same, not as averages are, or at least like it.

    Without names, a place in a list says nothing.
    """
    at = _common(optimizer.path, model.path)
    ours, theirs = (
        [str(step) for step in one.path[at:] if optimizer.names or isinstance(step, str)] for one in (optimizer, model)
    )
    return at, *calls(ours, theirs)


def _nearest(optimizer: Optimizer, models: Sequence[ModelPart]) -> list[ModelPart]:
    return greatest(models, partial(_nearness, optimizer))


def _may_have(models: Sequence[ModelPart], optimizers: Sequence[Optimizer]) -> bool:
    """Tell whether optimizers' parameters can be models', by their number and the shapes of their state."""
    shapes = {f"{at}.{name}": one.shape for at, its in enumerate(models) for name, one in its.tensors.items()}
    return can_have(shapes, [one.state for one in optimizers], named=False)


def _most_alike(optimizer: Optimizer, models: Sequence[ModelPart]) -> list[ModelPart]:
    """Return the models that have most of an optimizer's names."""
    some = [(its, one) for one in models if (its := len(aligned(one.tensors, optimizer.names)))]
    return [one for _, one in greatest(some, itemgetter(0))]


def _owner(optimizer: Optimizer, models: Sequence[ModelPart]) -> ModelPart | None:
    best = greatest(_nearest(optimizer, _most_alike(optimizer, models)), _usual)
    if len(best) > 1:
        raise _open(optimizer, best)
    return best[0] if best else None


def _open(optimizer: Optimizer, models: Sequence[ModelPart]) -> UnsupportedError:
    return UnsupportedError(
        f"{joined(optimizer.path)} could be the optimizer of several models",
        found=" and ".join(joined(one.path) for one in models),
        advice="save it under a key that begins like its model's key",
    )


def _common(one: Keys, other: Keys) -> int:
    """Return how many steps two paths have in common before they part."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _usual(part: ModelPart) -> tuple[int, int]:
    """Sort dicts that are called as models are behind others, and those near the root behind those deep in it."""
    last = part.path[-1] if part.path else None
    return -STATE_DICT_KEYS.index(last) if last in STATE_DICT_KEYS else -len(STATE_DICT_KEYS), -len(part.path)
