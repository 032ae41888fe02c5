"""The dict that was saved, put together again from the paths of its items.

A branch is a dict: by text where the saved dict had one, by number where it had a list. A leaf is an item. torch
before 2.4 kept dicts and lists without tensors as one item; `branch` shows such an item as the branch it stands for.

Programs keep models and optimizers under any keys:

{"model": {name: tensor}, "optimizer": {"state": {name: {slot: value}}, "param_groups": [{"params": [name], ...}]}}
{"optimizer": {"state.<name>.<slot>": value, "param_groups.<name>.<key>": value}}             flattened
{"optimizer": {"state": {"0": {slot: value}}, "param_groups": [{"params": [0], ...}]}}        raw
{"optimizer": {"state": {name: {slot: value}}}}                                               torchrec's

An optimizer is known by its form; which dicts of tensors are models, `models` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from itertools import chain
from typing import TypeGuard

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.dcp.metadata import MAXIMUM_DEPTH, Keys
from zckpt.formats.torch_files.content import EXTRA_STATE
from zckpt.formats.torch_files.optimizer import MASTERS, masters_of
from zckpt.formats.torch_files.tensors import TensorItem, carried, holds_tensors, slot_of
from zckpt.formats.torch_files.writer import in_pieces
from zckpt.immutable import immutable
from zckpt.state import list_of, without
from zckpt.torchfile import FromFile, Tensor, TorchFile, each, node_of

Leaf = TensorItem | ObjectItem
Node = object
"""A leaf, or a dict of nodes by text or number."""

Tree = dict[str | int, Node]
Branch = Mapping[str | int, Node]

DEEPEST = 4
"""Steps from the root below which no model and no optimizer is looked for in an item, of `flatten_state_dict=False`."""

SPARE = 64
"""Elements that a list may lack for each that it has, and then these: empty dicts and lists are not saved."""


def build(items: Mapping[str, Leaf], paths: Mapping[str, Keys], path: str) -> Tree:
    """Return the tree of items.

    `items`: by key; `paths`: of each key, in order; `path`: the file that says so. Raises DamagedFileError: two items
    have one path, or one lies within another.
    """
    root: Tree = {}
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


def carry(node: Node) -> object:
    """Return a node as `Checkpoint.metadata` keeps it.

    Raises DamagedFileError: a list with an index far beyond its length.
    """
    if isinstance(node, ObjectItem):
        return carried(node.file, node.node)
    if isinstance(node, TensorItem):
        whole = node.whole or in_pieces(node.key, node.slot(node.key))
        return FromFile(whole, node.path, whole.byteorder)
    if not isinstance(node, dict):
        raise TypeError(f"{type(node).__name__} is no part of a tree")
    if not is_list(node):
        return _of_one_file({str(step): carry(child) for step, child in node.items()})
    length = max(int(step) for step in node) + 1
    if length > 2 * len(node) + SPARE:
        raise DamagedFileError("most elements of a list are missing", expected=f"{length} elements", found=len(node))
    return _of_one_file([carry(node[i]) if i in node else None for i in range(length)])


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
    """An optimizer found in the saved dict."""

    path: Keys
    node: Branch
    is_flat: bool  # whether keys are joined, as `flatten_optimizer_state_dict` joins them
    names: frozenset[str]  # of its parameters; empty where it only numbers them
    masters: Mapping[str, TensorItem] = field(default_factory=dict)  # by number or name, of those beside it


@immutable(eq=False)
class ModelPart:
    """A model found in the saved dict."""

    path: Keys
    tensors: Mapping[str, TensorItem]  # by the names of the bare model
    prefix: str = ""  # what is put before the names of this one
    filed: Mapping[str, str] = field(default_factory=dict)  # the name that each has in the file


def find_optimizers(root: Branch) -> list[OptimizerPart]:
    """Return the optimizers of a tree, in its order."""
    tensors = {name for one in dicts_of_tensors(root) for name in one.tensors}
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
        for part in _optimizers(child, (*path, step), seen, tensors):
            yield replace(part, masters=_masters(part.node, content)) if part.path == (*path, step) else part


def _masters(optimizer: Branch, outer: Branch) -> dict[str, TensorItem]:
    """Return the masters that a dict has beside its optimizer, by number or name; none if some parameter has none."""
    groups = [branch(group) or {} for group in _elements(optimizer.get(GROUPS))]
    labels = [list_of(getattr(group.get(PARAMS), "node", None)) for group in groups]
    beside = {key: list(map(_elements, _elements(outer[key]))) for key in MASTERS if key in outer}
    items = masters_of(beside, {GROUPS: [{PARAMS: its} for its in labels]})
    return dict(zip(map(str, chain(*labels)), items, strict=bool(items)))


def _elements(node: Node) -> list[Node]:
    """Return what a list has, in its order; of anything else nothing."""
    node = branch(node)
    return [one for _, one in sorted(node.items())] if is_list(node) else []


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
        found += [name for name in list_of(listed) if isinstance(name, str)]
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


def dotted(path: Keys) -> str:
    """Return the key of what lies at a path."""
    return ".".join(map(str, path))


def dicts_of_tensors(node: Node, *taken: Keys, path: Keys = ()) -> Iterator[ModelPart]:
    """Yield the dicts of tensors in a part of a tree, but for what lies at the paths that are `taken`."""
    pickled = node.node if isinstance(node, ObjectItem) and len(path) <= DEEPEST else None
    node = branch(node) if isinstance(pickled, dict) else node
    if not isinstance(node, dict) or path in taken or (pickled is not None and not holds_tensors(pickled)):
        return
    tensors = {str(step): child for step, child in node.items() if isinstance(child, TensorItem)}
    if tensors and not is_list(node):
        yield ModelPart(path, tensors)
    for step, child in node.items():
        if not str(step).endswith(EXTRA_STATE):  # a module's own
            yield from dicts_of_tensors(child, *taken, path=(*path, step))
