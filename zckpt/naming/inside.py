"""Names of tensors inside what a checkpoint carries along: of tensors that are called otherwise now. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.tp_rules import INFO_KEY
from zckpt.state import Checkpoint
from zckpt.torchfile import FromFile
from zckpt.torchfile.nodes import Object


def leave_old_names(changed: Checkpoint, before: Checkpoint) -> tuple[str, ...]:
    """Leave out metadata that is about the source's names only; return what to know of it.

    Parameters
    ----------
    changed : Checkpoint
        Under its new names.
    before : Checkpoint
        The same under the source's.

    Raises
    ------
    UnsupportedError
        Other metadata has a name that is none any more.
    """
    notes: tuple[str, ...] = ()
    if INFO_KEY in changed.metadata:
        changed.metadata = {key: value for key, value in changed.metadata.items() if key != INFO_KEY}
        notes = (f"{INFO_KEY} has patterns of the source's names and is left out",)
    gone = {one.name for one in before.tensors()} - {one.name for one in changed.tensors()}
    for key, value in [*changed.metadata.items(), *changed.optimizer_metadata.items()]:
        for name in _texts(value):
            if name in gone:
                raise UnsupportedError(
                    f"{key} speaks of {name}, which would have another name",
                    path=before.opened or before.source,
                    advice="`zckpt consolidate` writes model and optimizer under other names, without it",
                )
    return notes


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a tree, keys included."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            yield node
            continue
        if isinstance(node, FromFile):
            node = node.node
        if id(node) in seen:
            continue
        if isinstance(node, dict):
            stack += [*node, *node.values()]
        elif isinstance(node, (list, tuple, set, frozenset)):
            stack += node
        elif isinstance(node, Object):
            stack += [*node.args, node.kwargs, node.state, node.items, node.entries]
        else:
            continue
        seen.add(id(node))
