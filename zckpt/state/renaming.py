"""A checkpoint's tensors under other names: those of the bare model, of a live one, or those that its files have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from zckpt.state import Checkpoint, Parameter
from zckpt.state.names import aligned, bare_names


def bare(checkpoint: Checkpoint) -> Checkpoint:
    """Give a checkpoint the names that its bare model has; `canonical` says which these are.

    What zckpt wrote, or converted, had bare names when it was written; and an adapter may have known better.
    """
    front = "origin" not in checkpoint.details and not checkpoint.wrapped
    names = bare_names(_names(checkpoint), front=front)
    return renamed(checkpoint, names)


def like_model(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """Give a checkpoint the names that a live model has for its tensors, as far as it has them."""
    return renamed(checkpoint, aligned(names, _names(checkpoint)))


def as_filed(checkpoint: Checkpoint) -> Checkpoint:
    """Give a checkpoint the names that its files have, for formats whose program looks for them."""
    return renamed(checkpoint, checkpoint.wrapped)


def renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Give the tensors of a checkpoint new names, by their old ones, and keep which name each has in the files.

    Tensors that are in what the adapter keeps for itself have the names that they had there.
    """
    changed = {old: new for old, new in names.items() if old != new}
    if not changed:
        return checkpoint
    new = {name: changed.get(name, name) for name in _names(checkpoint)}
    filed = {new[name]: checkpoint.wrapped.get(name, name) for name in new}
    for section in ("parameters", "buffers", "unnamed"):  # which the adapter may have kept for itself, too
        made = [_renamed(one, new) for one in getattr(checkpoint, section).values()]
        setattr(checkpoint, section, {one.name: one for one in made})
    checkpoint.param_groups = [
        replace(group, parameters=[new.get(name, name) for name in group.parameters])
        for group in checkpoint.param_groups
    ]
    checkpoint.duplicates = [
        replace(one, name=new.get(one.name, one.name), of=new.get(one.of, one.of)) for one in checkpoint.duplicates
    ]
    checkpoint.wrapped = {name: its for name, its in filed.items() if name != its}
    return checkpoint


def _renamed(parameter: Parameter, new: Mapping[str, str]) -> Parameter:
    tied_to = None if parameter.tied_to is None else new.get(parameter.tied_to, parameter.tied_to)
    return replace(parameter, name=new.get(parameter.name, parameter.name), tied_to=tied_to)


def _names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all tensors; where there is no model, those by which the optimizer calls its parameters."""
    if checkpoint.parameters or checkpoint.buffers:
        return [*checkpoint.parameters, *checkpoint.buffers]
    listed = [name for group in checkpoint.param_groups for name in group.parameters]
    return [name for name in dict.fromkeys([*checkpoint.unnamed, *listed]) if not name.isdecimal()]
