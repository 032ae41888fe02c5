"""Names of tensors inside what a checkpoint carries along, of tensors that are called otherwise now. Pure.

A text is the name of a tensor for sure if it has a dot and is, in full, such a name: in a table of averages by names,
in a list of what is frozen. These get the new names. A tensor may also be called `scale`, and so may something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.axes.tp_rules import INFO_KEY
from zckpt.state import Checkpoint, without
from zckpt.torchfile import DefaultMapping, FromFile, OrderedMapping, children, each

MAPPINGS = (dict, OrderedMapping, DefaultMapping)


def follow_names(changed: Checkpoint, before: Checkpoint, names: Mapping[str, str]) -> tuple[str, ...]:
    """Give names in a checkpoint's metadata the new ones, and leave out patterns of names; return what to know of it.

    `changed` has its new names and `before` the source's; `names`: of tensors that have nothing but another name.
    Raises UnsupportedError: metadata has a name of a tensor that is arranged otherwise now, or where it may be
    something else.
    """
    notes: list[str] = []
    if INFO_KEY in changed.metadata:
        changed.metadata = without(changed.metadata, INFO_KEY)
        notes.append(f"{INFO_KEY} has patterns for the source's names, and is left out")
    others = {name for name in before.names if names.get(name) != name}
    new = {name: names[name] for name in others if name in names and "." in name}
    for section in ("metadata", "optimizer_metadata"):
        found = {}
        for key, value in getattr(changed, section).items():
            told = _texts(value) & others
            found[key], missed = _followed(value, new) if told else (value, None)
            wrong = missed or min(told - new.keys(), default=None)
            if wrong is not None:
                raise UnsupportedError(
                    f"{key} refers to {wrong}, which would be renamed",
                    path=before.named,
                    advice="`zckpt consolidate` writes model and optimizer with the new names, without it",
                )
            if told:
                notes.append(f"{key} refers to tensors, now by their new names")
        setattr(changed, section, found)
    return tuple(notes)


def _followed(tree: object, names: Mapping[str, str]) -> tuple[object, str | None]:
    """Return a tree whose dicts, lists and tuples have new names by old ones; what was one object twice stays one.

    And a name that stays, as it is in an object of a class that is not known, or would be there twice.
    """
    done, missed = dict[int, object](), list[str]()

    def of(node: object) -> object:
        if isinstance(node, str):
            return names.get(node, node)
        if isinstance(node, FromFile):
            return replace(node, node=of(node.node))
        if id(node) in done:
            return done[id(node)]
        made: object = node
        if type(node) is tuple:
            made = tuple(of(one) for one in node)
        elif type(node) is list:
            made = found = done[id(node)] = list[object]()  # which may be below itself
            found += [of(one) for one in node]
        elif isinstance(node, dict) and type(node) in MAPPINGS:
            made = done[id(node)] = copy(node)
            made.clear()
            for key, value in node.items():
                new = of(key) if isinstance(key, (str, tuple)) else key
                if new in made:
                    missed.append(str(key))
                made[new] = of(value)
        else:
            missed.extend(sorted(_texts(node) & names.keys()))
        done[id(node)] = made
        return made

    return of(tree), missed[0] if missed else None


def _texts(value: object) -> set[str]:
    """Return all texts in a tree, keys included."""

    def below(node: object) -> Iterator[object]:
        if isinstance(node, FromFile):
            yield node.node
        if isinstance(node, dict):
            yield from node
        yield from (child for _, child in children(node))

    return {one for one in each(value, below) if isinstance(one, str)}
