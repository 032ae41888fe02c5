"""A checkpoint as the state dict that `torch.distributed.checkpoint.state_dict.get_state_dict` makes, item by item.

{"model": {name: tensor},
 "optimizer": {"state": {name: {key: tensor or value}}, "param_groups": [{key: value, ..., "params": [name]}]},
 "lr_scheduler": ..., "step": ...}

torch stores each leaf by itself, under its path: a dict is always opened, a list where it holds a dict or a tensor,
a tuple never. Masters that the model does not hold exactly are in the optimizer's state, under `master`.

With flat keys, the model's names are at the top, and the optimizer's dict is that of `flatten_optimizer_state_dict`,
which has no groups: `state.NAME.KEY` and `param_groups.NAME.KEY`.

Source: `_traverse.traverse_state_dict` of torch 2.4 to 2.15, `state_dict._flatten_optim_state_dict`, and torchtitan's
`ModelWrapper`, whose names are at the top.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt.errors import UnsupportedError
from zckpt.formats.consolidated.model import model_tensors, model_tree, optimizer_slots
from zckpt.formats.consolidated.optimizer import optimizer_tree
from zckpt.formats.remainder import of_modules
from zckpt.formats.torch_files.optimizer import flattened, with_names
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.formats.torch_files.writer import (
    MAPPINGS,
    MAXIMUM_DEPTH,
    MAXIMUM_NODES,
    VALUES,
    SlotTensor,
    ValueTensor,
    is_readable,
)
from zckpt.immutable import immutable
from zckpt.state import Checkpoint, stated, without
from zckpt.torchfile import FromFile, Tensor, each, node_of, walk_tensors

Path = tuple[str | int, ...]

TENSORS = (SlotTensor, ValueTensor, Tensor)


@immutable
class Item:
    """A leaf of the state dict: a SlotTensor or ValueTensor, or anything else, which becomes bytes."""

    key: str  # the name that torch gives it: the path, joined with dots
    path: Path  # keys of dicts, all as text, and indices of lists
    value: object
    whole_of: str | None = None
    """Key of the value besides model and optimizer that such items are all of: nothing else needs to hold it."""


NESTED, FLAT = "nested", "flat"


def items(checkpoint: Checkpoint, dtype: str = "keep", keys: str = NESTED, *, readable: bool = True) -> list[Item]:
    """Return all leaves of the state dict, in its order.

    Trained parameters of the model are written as `dtype`; "keep": as they are. `keys`: NESTED or FLAT. Values besides
    the model and the optimizer are left out where a program that does not know zckpt, or the library that made them,
    could not read them, if all must be `readable`.

    Raises UnsupportedError: state that no single parameter can hold, or names that make one key of two leaves.
    """
    model = model_tree(checkpoint, model_tensors(checkpoint, dtype))
    root: dict[str, object] = {"model": model} if keys == NESTED else {str(name): one for name, one in model.items()}
    if checkpoint.param_groups:
        if "optimizer" in root:
            raise UnsupportedError("a tensor of the model has the optimizer's key")
        optimizer: dict[str, Any] = named_tree(checkpoint, optimizer_slots(checkpoint, dtype))
        for group in optimizer["param_groups"] if keys != NESTED else ():
            nested = [key for key, value in group.items() if isinstance(value, MAPPINGS) or _has_elements(value)]
            if nested or not group["params"]:
                what = f"{nested[0]} of a param group" if nested else "a param group without parameters"
                raise UnsupportedError(f"flat keys cannot hold {what}", advice="use nested keys")
        root["optimizer"] = optimizer if keys == NESTED else flattened(optimizer)
    found = {item.key: item for item in items_of(root)}
    others: dict[str, object] = {**stated({"step": checkpoint.step})}
    modules, of_modules_alone = of_modules(checkpoint)
    others |= without(checkpoint.metadata, *(of_modules_alone if modules.keys() <= model.keys() else ()))
    for key, value in others.items():
        is_named = keys == NESTED or not isinstance(node_of(value), TENSORS)  # else it would be one of the model's
        if key not in root and is_readable(value, strictly=readable) and is_named:
            more = list(_opened((key,), value, None))
            new = {item.key for item in more}
            if len(new) == len(more) and not new & found.keys():
                whole_of = key if _is_exact(value) else None
                found.update((item.key, replace(item, whole_of=whole_of)) for item in more)
    return list(found.values())


def _has_elements(value: object) -> bool:
    """Tell whether a hyperparameter has a tensor of more than a number, whose copies nothing would tell to be alike."""
    return any(tensor.numel > 1 for _, tensor in walk_tensors(node_of(value)))


def items_of(root: dict[str, object]) -> list[Item]:
    """Return all leaves of a state dict, in its order. Raises UnsupportedError: names make one key of two leaves."""
    found: dict[str, Item] = {}
    for item in _opened((), root, None):
        if item.key in found:
            raise UnsupportedError(f"two tensors or values have the key {item.key}")
        found[item.key] = item
    return list(found.values())


def named_tree(checkpoint: Checkpoint, slots: Sequence[str]) -> dict[str, object]:
    """Return the optimizer's state dict of some slots, with names where torch's own has numbers.

    Raises UnsupportedError: state that no single parameter can hold, or more values than a file should have.
    """
    tree: dict[object, Any] = optimizer_tree(checkpoint, slots, in_pieces=True)
    budget = 2 * MAXIMUM_NODES  # of values that torch would store leaf by leaf, and that may have no end
    waiting = [value for one in (*tree["state"].values(), *tree["param_groups"]) for value in one.values()]
    while waiting:
        node = waiting.pop()
        if isinstance(node, MAPPINGS) or type(node) is list:
            below = list(node.values() if isinstance(node, MAPPINGS) else node)
            budget -= len(below) + 1
            waiting += below
        if budget < 0:
            raise UnsupportedError(
                "the optimizer has too many values in addition to its tensors",
                expected=f"at most {2 * MAXIMUM_NODES}",
            )
    _refuse_keys(checkpoint, tree["state"].values(), "a parameter", (str,))
    _refuse_keys(checkpoint, tree["param_groups"], "a param group", VALUES)  # numbers come back from `expanded`
    named = with_names(tree, checkpoint.grouped)
    for group, its in zip(named["param_groups"], checkpoint.param_groups, strict=True):
        if "param_names" in its.hyperparameters:  # an optimizer made of named parameters asks for them, no other does
            group["param_names"] = group["params"]
    return named


def _refuse_keys(
    checkpoint: Checkpoint, values: Iterable[Mapping[str, object]], whose: str, kinds: Container[type]
) -> None:
    """Raise UnsupportedError for a value that has a dict with keys of other kinds, of which DCP makes texts."""
    for key, value in ((key, value) for its in values for key, value in its.items()):
        every = each(node_of(value), lambda node: node.values() if isinstance(node, MAPPINGS) else _listed(node))
        if any(type(name) not in kinds for one in every if isinstance(one, MAPPINGS) for name in one):
            raise UnsupportedError(
                f"{key}, which the optimizer keeps of {whose}, has keys that are no texts, which DCP makes of them",
                path=checkpoint.source,
                advice="`zckpt convert --to zckpt` keeps them",
            )


def _listed(node: object) -> list[object]:
    return node if type(node) is list else []


def _opened(path: Path, node: object, file: FromFile | None) -> Iterator[Item]:
    """Yield the leaves of a part of the state dict; `file` is where the tensors below it are, if in one."""
    if isinstance(node, FromFile):
        yield from _opened(path, node.node, node)
        return
    if len(path) > MAXIMUM_DEPTH:
        raise UnsupportedError(f"{'.'.join(map(str, path[:4]))} is nested too deeply")
    if isinstance(node, MAPPINGS):
        for key, value in node.items():
            yield from _opened((*path, str(key)), value, file)
    elif type(node) is list and _is_opened(node):
        for index, value in enumerate(node):
            yield from _opened((*path, index), value, file)
    else:
        key = ".".join(map(str, path))
        if file is not None and isinstance(node, Tensor):
            node = SlotTensor(slot_of(key, node, file.path), node.dtype, key)
        elif file is not None and not isinstance(node, (bool, int, float, str)):
            node = replace(file, node=node)
        yield Item(key, path, node)


def _is_opened(values: list[object]) -> bool:
    """Tell whether torch stores the members of a list one by one."""
    below = each(values, _listed)
    return any(isinstance(value, (*MAPPINGS, *TENSORS)) for value in below)


def _is_exact(value: object) -> bool:
    """Tell whether a value that is readable, and has tensors, comes back from its items as it is."""
    waiting = [value.node] if isinstance(value, FromFile) else []
    storages: set[str] = set()
    while waiting:
        node = waiting.pop()
        if type(node) is dict and node and all(type(key) is str for key in node):
            waiting.extend(node.values())
        elif type(node) is list and _is_opened(node):
            waiting.extend(node)
        elif isinstance(node, Tensor):
            plain = not (node.requires_grad or node.is_parameter or node.attributes)
            whole = node.is_contiguous and node.numel > 0 and node.nbytes == node.storage.nbytes
            if not (plain and whole) or node.storage.key in storages:
                return False
            storages.add(node.storage.key)
        elif type(node) is tuple:  # which is one item, as it is
            below = {tensor.storage.key for _, tensor in walk_tensors(node)}
            if below & storages:
                return False
            storages |= below
        elif type(node) not in VALUES:
            return False
    return bool(storages)


def expanded(hyperparameters: Mapping[str, object]) -> dict[str, object]:
    """Return those hyperparameters that torch stores leaf by leaf, which loses kinds of keys and empty dicts."""
    return {
        key: value
        for key, value in hyperparameters.items()
        if isinstance(value, MAPPINGS) or (type(value) is list and _is_opened(value))
    }
