"""The dict that was saved, put together again from the paths of its items.

A branch is a dict: by text where the saved dict had one, by number where it had a list. A leaf is an item. torch
before 2.4 kept dicts and lists without tensors as one item; `branch` shows such an item as the branch it stands for.

Programs keep models and optimizers under any keys:

{"model": {name: tensor}, "optimizer": {"state": {name: {slot: value}}, "param_groups": [{"params": [name], ...}]}}
{"optimizer": {"state.<name>.<slot>": value, "param_groups.<name>.<key>": value}}             flattened
{"optimizer": {"state": {"0": {slot: value}}, "param_groups": [{"params": [0], ...}]}}        raw
{"optimizer": {"state": {name: {slot: value}}}}                                               torchrec's

An optimizer is known by its form. The model is the dict of tensors that has the optimizer's names (see `owners`); where
those are numbers, or there is no optimizer, the dict that is called as models are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeGuard

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.evidence import agree
from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.dcp.metadata import MAXIMUM_DEPTH, Keys
from zckpt.formats.torch_files.content import (
    EXTRA_STATE,
    SAME,
    STATE_DICT_KEYS,
    is_averages,
    likeness,
)
from zckpt.formats.torch_files.tensors import TensorItem, carried, holds_tensors, slot_of
from zckpt.immutable import immutable
from zckpt.state import without
from zckpt.state.names import aligned, bare_names
from zckpt.torchfile import FromFile, Tensor, TorchFile, each, node_of

Leaf = TensorItem | ObjectItem
Node = object
"""A leaf, or a dict of nodes by text or number."""

Branch = Mapping[str | int, Node]

DEEPEST = 4
"""Steps from the root below which no model and no optimizer is looked for in an item, of `flatten_state_dict=False`."""

SPARE = 64
"""Elements that a list may lack for each that it has, and then these: empty dicts and lists are not saved."""


def build(items: Mapping[str, Leaf], paths: Mapping[str, Keys], path: str) -> dict[str | int, Node]:
    """Return the tree of items.

    Parameters
    ----------
    items : mapping of str to item
        By key.
    paths : mapping of str to tuple
        Of each key, in order.
    path : str
        The file that says so.

    Raises
    ------
    DamagedFileError
        Two items have one path, or one lies within another.
    """
    root: dict[str | int, Node] = {}
    for key, steps in paths.items():
        if key not in items:
            continue
        at = root
        for step in steps[:-1]:
            child = at.setdefault(step, {})
            if not isinstance(child, dict):
                raise DamagedFileError(f"{key} lies within another item", path=path)
            at = child
        if steps[-1] in at:
            raise DamagedFileError(f"{key} has the path of another item", path=path)
        at[steps[-1]] = items[key]
    flat = {step: node for step, node in root.items() if str(step).startswith((f"{GROUPS}.", f"{STATE}."))}
    names = _flat_names(flat)
    if names and OPTIMIZER not in root and not root.keys().isdisjoint(names):  # of the tensors among which it lies
        return {**without(root, *flat), OPTIMIZER: flat}
    return root


def is_list(node: Node) -> TypeGuard[Branch]:
    """Tell whether a branch was a list."""
    return isinstance(node, dict) and bool(node) and all(type(step) is int for step in node)


def branch(node: Node) -> Branch | None:
    """Return a node as a branch; None if it is none."""
    if isinstance(node, dict):
        return node
    if isinstance(node, ObjectItem):
        key, file, value = node.key, node.file, node.node
        if isinstance(value, dict):
            return {str(k): _within(f"{key}.{k}", file, v) for k, v in value.items()}
        if isinstance(value, list):
            return {i: _within(f"{key}.{i}", file, v) for i, v in enumerate(value)}
    return None


def _within(key: str, file: TorchFile, node: object) -> Leaf:
    if not isinstance(node, Tensor):
        return ObjectItem(key, file, node)
    try:
        slot = slot_of(key, node, file.path)
    except UnsupportedError:  # whose bytes alone are not its values: it may be no one's
        return ObjectItem(key, file, node)
    return TensorItem(key, slot.dtype, slot.shape, slot.spans, node, file.path)


def leaves(node: Node) -> Iterator[Leaf]:
    """Yield the items below a node."""
    if isinstance(node, dict):
        for child in node.values():
            yield from leaves(child)
    elif isinstance(node, (TensorItem, ObjectItem)):
        yield node


def carry(node: Node, lost: list[str]) -> object:
    """Return a node as `Checkpoint.metadata` keeps it; keys of tensors in several pieces are added to `lost`.

    Raises DamagedFileError: a list with an index far beyond its length.
    """
    if isinstance(node, ObjectItem):
        return carried(node.file, node.node)
    if isinstance(node, TensorItem):
        if node.whole is not None:
            return FromFile(node.whole, node.path, node.whole.byteorder)
        lost.append(node.key)
        return None
    if not isinstance(node, dict):
        raise TypeError(f"{type(node).__name__} is no part of a tree")
    if not is_list(node):
        found = {step: carry(child, lost) for step, child in node.items()}
        gone = {step for step, one in node.items() if isinstance(one, TensorItem) and one.whole is None}
        return _of_one_file({str(step): value for step, value in found.items() if step not in gone})
    length = max(int(step) for step in node) + 1
    if length > 2 * len(node) + SPARE:
        raise DamagedFileError("most elements of a list are missing", expected=f"{length} elements", found=len(node))
    return _of_one_file([carry(node[i], lost) if i in node else None for i in range(length)])


def _of_one_file(whole: dict[str, object] | list[object]) -> object:
    """Return a dict or list as one part of a file, where all that is not plain in it lies in the same one."""
    values = list(_below(whole))
    parts = [value for value in values if isinstance(value, FromFile)]
    about = {(part.path, part.byteorder, part.numpy) for part in parts}
    others = (one for value in values if not isinstance(value, FromFile) for one in each(value, _below))
    if len(about) != 1 or any(isinstance(one, FromFile) for one in others):
        return whole
    nodes = map(node_of, values)
    return replace(parts[0], node=list(nodes) if isinstance(whole, list) else dict(zip(whole, nodes, strict=True)))


def _below(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


STATE, GROUPS, PARAMS = "state", "param_groups", "params"
OPTIMIZER = "optimizer"


@immutable
class OptimizerPart:
    """An optimizer found in the saved dict.

    `is_flat`: whether keys are joined, as `flatten_optimizer_state_dict` joins them; `names`: of its parameters; empty
    where it only numbers them.
    """

    path: Keys
    node: Branch
    is_flat: bool
    names: frozenset[str]


@immutable
class ModelPart:
    """A model found in the saved dict.

    Parameters
    ----------
    path : tuple
    tensors : mapping
        By the names of the bare model.
    prefix : str
        What is put before the names of this one.
    filed : mapping
        The name that each has in the file.
    """

    path: Keys
    tensors: Mapping[str, TensorItem]
    prefix: str = ""
    filed: Mapping[str, str] = field(default_factory=dict)


def find_optimizers(root: Branch) -> list[OptimizerPart]:
    """Return the optimizers of a tree, in its order."""
    tensors = {name for one in _dicts_of_tensors(root, (), set()) for name in one.tensors}
    return list(_optimizers(root, (), set(), tensors))


def _optimizers(node: Node, path: Keys, seen: set[int], tensors: set[str]) -> Iterator[OptimizerPart]:
    """Yield the optimizers of a part of a tree, whose `tensors` have these names.

    An object may contain itself, and is looked into once.
    """
    content = branch(node) if len(path) < MAXIMUM_DEPTH else None
    if isinstance(node, ObjectItem):
        content = None if id(node.node) in seen else content
        seen.add(id(node.node))
    if content is None:
        return
    nested = _nested_names(content) if GROUPS in content else _names_in_state(content, tensors)
    for is_flat, names in ((False, nested), (True, _flat_names(content))):
        if names is not None:
            yield OptimizerPart(path, content, is_flat, frozenset(names))
            return
    for step, child in content.items():
        yield from _optimizers(child, (*path, step), seen, tensors)


def _nested_names(node: Branch) -> list[str] | None:
    """Return the names that the groups of an optimizer have, numbers aside; None of what is no optimizer's dict."""
    groups = branch(node.get(GROUPS))
    if groups is None or not is_list(groups) or (STATE in node and branch(node[STATE]) is None):
        return None
    found = []
    for group in map(branch, groups.values()):
        if group is None or PARAMS not in group:
            return None
        params = group[PARAMS]
        listed = params.node if isinstance(params, ObjectItem) else None
        found += [name for name in listed if isinstance(name, str)] if isinstance(listed, (list, tuple)) else []
    return found


def _names_in_state(node: Branch, tensors: set[str]) -> list[str] | None:
    """Return the names under which an optimizer without groups has dicts; None of what has others, or none."""
    state = node.get(STATE)
    if not isinstance(state, dict) or is_list(state):
        return None
    found = [str(name) for name, slots in state.items() if branch(slots) is not None]
    return found if len(found) == len(state) and tensors.issuperset(found) else None


def _flat_names(node: Branch) -> list[str] | None:
    """Return the names in joined keys of an optimizer's groups; None of what has others, or none."""
    if not all(isinstance(key, str) and key.startswith((f"{GROUPS}.", f"{STATE}.")) for key in node):
        return None
    found = [key.removeprefix(f"{GROUPS}.") for key in map(str, node) if key.startswith(f"{GROUPS}.")]
    return [key.rpartition(".")[0] for key in found] or None


def find_models(root: Branch, optimizers: list[OptimizerPart], warnings: list[str], *, front: bool) -> list[ModelPart]:
    """Return the models of a tree: one almost always, none where it holds only an optimizer.

    Parameters
    ----------
    root : mapping
    optimizers : list of OptimizerPart
        Those of the same tree.
    warnings : list of str
        To which is added what was decided without certainty.
    front : bool
        As for `bare_names`.
    """
    candidates = list(_dicts_of_tensors(root, (), {part.path for part in optimizers}))
    found = owners(optimizers, candidates)
    is_one = len(found) == 1 and not optimizers[0].names  # beside whose model are others, too
    chosen = [one for one in candidates if any(one is best for best in found) and not is_one]
    if not chosen and candidates:  # the one that is called as models are; or else all with more than single numbers
        usual = [one for one in candidates if one.path and one.path[-1] in STATE_DICT_KEYS]
        large = [one for one in candidates if any(tensor.shape for tensor in one.tensors.values())]
        plain = [one for one in large if not is_average(one)]
        chosen = [min(usual, key=_unusual)] if usual else large
        if len(optimizers) > 1 and not _may_have(chosen, optimizers) and _may_have(plain, optimizers):
            chosen = plain
        elif is_one and found[0] is not None and not any(one is found[0] for one in chosen):
            chosen = plain if any(one is found[0] for one in plain) else large
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


def joined(path: Keys) -> str:
    """Return the key of what lies at a path."""
    return ".".join(map(str, path))


def _dicts_of_tensors(node: Node, path: Keys, taken: set[Keys]) -> Iterator[ModelPart]:
    pickled = node.node if isinstance(node, ObjectItem) and len(path) <= DEEPEST else None
    node = branch(node) if isinstance(pickled, dict) else node
    if not isinstance(node, dict) or path in taken or (pickled is not None and not holds_tensors(pickled)):
        return
    tensors = {str(step): child for step, child in node.items() if isinstance(child, TensorItem)}
    if tensors and not is_list(node):
        yield ModelPart(path, tensors)
    for step, child in node.items():
        if not str(step).endswith(EXTRA_STATE):  # a module's own
            yield from _dicts_of_tensors(child, (*path, step), taken)


def owners(optimizers: Sequence[OptimizerPart], models: Sequence[ModelPart]) -> list[ModelPart | None]:
    """Return the model of each optimizer: what has most of its names, whatever wrappers they have.

    Two models may have the same names: then its is the one beside it, or of a key like its own (`opt_gen`: `gen`), or
    that is called as models are and not as their averages. None where none has any of them, and of those without names
    unless each has another model that is nearest, or called like it; of one alone, nearer than any other. Raises
    UnsupportedError: that leaves several.
    """
    if optimizers and not any(part.names for part in optimizers):
        near = [_nearest(part, models) for part in optimizers]
        places = {part.path[-1:]: part for part in models if part.path and type(part.path[-1]) is int}
        if len(places) == len(models) and places.keys() == {part.path[-1:] for part in optimizers}:
            return [places[part.path[-1:]] for part in optimizers]  # of lists that are as long
        if None not in near and len({id(one) for one in near}) == len(near) > 1:
            return near
        if len(near) == 1 and near[0] is not None:
            others = [one for one in models if one is not near[0]]
            is_nearer = all(_nearness(optimizers[0], near[0]) > _nearness(optimizers[0], one) for one in others)
            return near if is_nearer else [None]
    found = [_owner(part, models) if part.names else None for part in optimizers]
    for at, (part, model) in enumerate(zip(optimizers, found, strict=True)):
        alike = [one for one in _most_alike(part, models) if not is_average(one)] if model is not None else []
        if len(alike) > 1 and any(
            one is model and part.names & other.names for one, other in zip(found[:at], optimizers, strict=False)
        ):
            raise _open(part, alike)
    return found


def is_average(part: ModelPart) -> bool:
    """Tell a dict that is called as averages are."""
    return any(is_averages(step) for step in part.path)


def _nearness(optimizer: OptimizerPart, model: ModelPart) -> tuple[int, int]:
    at = _common(optimizer.path, model.path)
    ours, theirs = ([step for step in part.path[at:] if isinstance(step, str)] for part in (optimizer, model))
    return at, max((likeness(a, b) for a in ours for b in theirs), default=0)


def _nearest(optimizer: OptimizerPart, models: Sequence[ModelPart]) -> ModelPart | None:
    def nearness(one: ModelPart) -> tuple[int, int, bool]:
        at, like = _nearness(optimizer, one)
        return at, like, not any(is_averages(step) for step in one.path[at:])

    best = max(map(nearness, models), default=None)
    found = [one for one in models if nearness(one) == best]
    return found[0] if len(found) == 1 and _may_have(found, [optimizer]) else None


def _may_have(models: Sequence[ModelPart], optimizers: Sequence[OptimizerPart]) -> bool:
    """Tell whether optimizers' parameters can be models', by their number and the shapes of their state."""

    def values(key: str) -> Iterator[Branch]:
        for part in optimizers:
            yield from (branch(one) or {} for one in (branch(part.node.get(key)) or {}).values())

    listed = [one.node for group in values(GROUPS) if isinstance(one := group.get(PARAMS), ObjectItem)]
    count = sum(len(one) for one in listed if isinstance(one, list))
    shapes = {
        one.shape for state in values(STATE) for one in state.values() if isinstance(one, TensorItem) and one.shape
    }
    tensors = [tensor for one in models for tensor in one.tensors.values()]
    have = {one.shape for one in tensors}
    return count <= len(tensors) and all(any(agree(shape, whole) for whole in have) for shape in shapes - have)


def _most_alike(optimizer: OptimizerPart, models: Sequence[ModelPart]) -> list[ModelPart]:
    """Return the models that have most of an optimizer's names."""
    counts = [len(aligned(one.tensors, optimizer.names)) for one in models]
    most = max(counts, default=0)
    return [one for one, count in zip(models, counts, strict=True) if count == most > 0]


def _owner(optimizer: OptimizerPart, models: Sequence[ModelPart]) -> ModelPart | None:
    best = _most_alike(optimizer, models)
    if len(best) < 2:
        return best[0] if best else None
    nearest = max(_common(optimizer.path, one.path) for one in best)
    best = [one for one in best if _common(optimizer.path, one.path) == nearest]
    shared = set.intersection(*(set(one.path) for one in best))
    narrower: list[Callable[[Keys], bool]] = [
        lambda path: any(likeness(str(a), str(b)) == SAME for a in optimizer.path for b in path if b not in shared),
        lambda path: not any(is_averages(step) for step in path if step not in shared),
        lambda path: any(likeness(str(a), str(b)) for a in optimizer.path for b in path if b not in shared),
    ]
    for rule in narrower:
        best = [one for one in best if rule(one.path)] or best
    first = min(map(_unusual, best))
    best = [one for one in best if _unusual(one) == first]
    if len(best) > 1:
        raise _open(optimizer, best)
    return best[0]


def _open(optimizer: OptimizerPart, models: Sequence[ModelPart]) -> UnsupportedError:
    return UnsupportedError(
        f"{joined(optimizer.path)} could be the optimizer of several models",
        found=" and ".join(joined(one.path) for one in models),
        advice="save it under a key that begins like its model's key",
    )


def _common(one: Keys, other: Keys) -> int:
    """Return how many steps two paths have in common before they part."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _unusual(part: ModelPart) -> tuple[int, int]:
    """Sort dicts that are called as models are before others, and those near the root before those deep in it."""
    last = part.path[-1] if part.path else None
    return (STATE_DICT_KEYS.index(last) if last in STATE_DICT_KEYS else len(STATE_DICT_KEYS), len(part.path))
