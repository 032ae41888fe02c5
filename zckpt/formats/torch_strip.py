"""Take optimizer state out of any torch file: every dict in it that is a `torch.optim` state dict, wherever it is.

{state: {number: {slot: tensor, step}}, param_groups}  ->  {state: {}, param_groups}        the whole state
                                                           {state: {number: {kept slots, step}}, param_groups}

The dict itself and its hyperparameters stay, so that `load_state_dict` takes it: without state, as at the start of
a training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from zckpt.formats.stripping import Edit, Edited, Request, Rewritten, rewrite
from zckpt.formats.torch_optimizer import looks_like_optimizer
from zckpt.torchfile import Tensor, TorchFile, children, is_leaf, walk_tensors


def strip_file(path: Path, name: str, request: Request, slots: Collection[str] = ()) -> Rewritten:
    """Return a torch file without what is to go.

    Parameters
    ----------
    path : Path
    name : str
        Within the target.
    request : Request
    slots : collection of str
        The names of slots, as far as they are known: a 0-d tensor of any other name is a single value.
    """
    return rewrite(path, name, optimizer_edit(request, slots), unreferenced=request.unreferenced)


def optimizer_edit(request: Request, slots: Collection[str]) -> Edit:
    """Return the edit that takes slots out of every optimizer in a tree."""

    def edit(file: TorchFile) -> Edited:
        edited = Edited(file.root)
        if request.slots:
            for state in _states(file.root):
                before = {number for number, one in state.items() if one}
                drop_slots(list(state.values()), request, slots, edited)
                for number in [number for number, one in state.items() if number in before and not one]:
                    del state[number]
        return edited

    return edit


def drop_slots(states: list[object], request: Request, slots: Collection[str], edited: Edited) -> None:
    """Take slots out of the states of an optimizer's parameters.

    What is no tensor and what is a single value (a step) stays where a slot does, and goes with the last one: an
    optimizer takes a state that is not empty for one that is complete.
    """
    dicts = [one for one in states if isinstance(one, dict)]
    names = {str(key) for one in dicts for key, value in one.items() if any(t.shape for t in _tensors(value))}
    names |= set(slots)
    for one in dicts:
        present = {str(key) for key, value in one.items() if str(key) in names and _tensors(value)}
        gone = {key for key in present if request.drops(key)}
        whole = request.optimizer or (gone and gone == present)
        for key in [key for key in one if whole or str(key) in gone]:
            edited.dropped += [(str(key), tensor) for tensor in _tensors(one.pop(key))]
            edited.changed = True


def _tensors(value: object) -> list[Tensor]:
    return [tensor for _, tensor in walk_tensors(value)]


def _states(root: object) -> Iterator[dict[object, object]]:
    """Yield the state of every optimizer in a tree, by parameter."""
    seen = {id(root)}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict) and looks_like_optimizer(node):
            yield node["state"]
            continue
        for _, child in children(node):
            if not is_leaf(child) and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
