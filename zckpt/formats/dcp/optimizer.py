"""The state that a DCP directory holds of an optimizer, given to the checkpoint's parameters by name.

By name where the file has names, which is usual; else by number, with names found as for any file of `torch.save`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zckpt.errors import DamagedFileError, UnsupportedError, about
from zckpt.evidence import shown_shape
from zckpt.formats.dcp.items import ObjectItem, TensorItem
from zckpt.formats.dcp.tree import GROUPS, PARAMS, STATE, Node, OptimizerPart, branch, carry
from zckpt.formats.torch_files.state_dicts import shared_values
from zckpt.formats.torch_files.tensors import read_scalars
from zckpt.state import Parameter, Scalar
from zckpt.torchfile import Digests, FromFile, Tensor, walk_tensors

Label = str | int
"""A parameter as the file names it: a name, or a number."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(slots=True)
class Group:
    """A param group: hyperparameters, and its parameters in order."""

    hyperparameters: dict[str, object]
    members: list[Label]


@dataclass(slots=True)
class OptimizerState:
    """An optimizer of whatever form.

    Parameters
    ----------
    path : str
        Where it is, for messages.
    state : dict
        By parameter, each a dict of nodes by slot.
    groups : list of Group
    others : dict
        What else it holds.
    prefix : str
        Put before its names where several models are read as one.
    name : str, optional
        What it is called, where several were saved together.
    """

    path: str
    state: dict[Label, dict[str, Node]]
    groups: list[Group]
    others: dict[str, Node] = field(default_factory=dict)
    prefix: str = ""
    name: str | None = None

    @property
    def is_numbered(self) -> bool:
        """Whether its parameters have numbers and no names."""
        return any(isinstance(label, int) for group in self.groups for label in group.members)

    def rename(self, names: Mapping[Any, str]) -> None:
        """Give parameters other names, by those that they have."""
        self.state = {names.get(label, label): slots for label, slots in self.state.items()}
        for group in self.groups:
            group.members = [names.get(label, label) for label in group.members]


def read_optimizer(part: OptimizerPart, names: Sequence[str], source: str) -> OptimizerState:
    """Bring an optimizer to one form.

    `names`: the model's, which tell a name from a slot in keys that are joined; `source`: the directory. Raises
    DamagedFileError: it is malformed.
    """
    where = f"{source}: {'.'.join(map(str, part.path))}" if part.path else source
    with about(where):
        return _flat(part, frozenset(names), where) if part.is_flat else _nested(part, where)


def _nested(part: OptimizerPart, where: str) -> OptimizerState:
    groups = []
    for _, node in sorted((branch(part.node[GROUPS]) or {}).items()):
        content = dict(branch(node) or {})
        params = content.pop(PARAMS)
        listed = params.node if isinstance(params, ObjectItem) else None
        if not isinstance(listed, (list, tuple)) or {type(one) for one in listed} not in ({str}, {int}, set()):
            raise DamagedFileError("unreadable param group", expected="names or numbers in `params`")
        groups.append(Group(hyperparameters(content), list(listed)))
    found = OptimizerState(where, {}, groups)
    labels = [label for group in groups for label in group.members]
    if len(set(labels)) != len(labels) or len(set(map(type, labels))) > 1:
        raise DamagedFileError("param groups have a parameter twice, or names and numbers")
    numbered = found.is_numbered
    for label, node in (branch(part.node.get(STATE, {})) or {}).items():
        slots = branch(node)
        if slots is None or (numbered and not _NUMBER.fullmatch(str(label))):
            raise DamagedFileError("unreadable state", expected="a dict by slot", found=str(label)[:80])
        found.state[int(label) if numbered else str(label)] = {str(key): value for key, value in slots.items()}
    found.others = {str(key): node for key, node in part.node.items() if key not in (STATE, GROUPS)}
    return found


def _flat(part: OptimizerPart, names: frozenset[str], where: str) -> OptimizerState:
    """Read joined keys. They do not say which group a parameter is in: those with the same values are one group."""
    state: dict[Label, dict[str, Node]] = {}
    options: dict[str, dict[str | int, Node]] = {}
    for key, node in part.node.items():
        kind, _, rest = str(key).partition(".")
        name, slot = split_key(rest, names | part.names)
        if kind == GROUPS:
            options.setdefault(name, {})[slot] = node
        else:
            state.setdefault(name, {})[slot] = node
    groups: dict[bytes, Group] = {}
    digests = Digests()
    for name, content in options.items():
        values = hyperparameters(content)
        groups.setdefault(digests.of(values), Group(values, [])).members.append(name)
    return OptimizerState(where, state, list(groups.values()))


def split_key(joined: str, names: frozenset[str]) -> tuple[str, str]:
    """Cut a joined key after the longest name that it begins with; after the last dot where none is known."""
    at = joined.rfind(".")
    while at > 0:
        if joined[:at] in names:
            return joined[:at], joined[at + 1 :]
        at = joined.rfind(".", 0, at)
    name, _, slot = joined.rpartition(".")
    return name, slot


def hyperparameters(content: Mapping[str | int, Node]) -> dict[str, object]:
    """Return a param group's values, with single numbers that are tensors read.

    Raises UnsupportedError: a tensor that is no single number and is in several pieces.
    """
    found: dict[str, object] = {}
    for key, node in content.items():
        if isinstance(node, TensorItem) and not node.shape and node.whole is not None:
            found[str(key)] = read_scalars(node.spans[0].path, [node.whole])[0]
        else:
            found[str(key)] = _value(node, f"{key} of a param group")
    return found


def _value(node: Node, what: str) -> object:
    """Return what is no slot, an object with its file only where tensors are below it."""
    if isinstance(node, ObjectItem):
        held = next(walk_tensors(node.node), None)
        return node.node if held is None else FromFile.of(node.file, node.node)
    lost: list[str] = []
    value = carry(node, lost)
    if lost:
        raise UnsupportedError(f"{what} holds tensors in several pieces", found=", ".join(lost[:4]))
    return value


def place(parameter: Parameter, slots: Mapping[str, Node]) -> None:
    """Give a parameter its state: tensors are slots, anything else is state.

    Raises UnsupportedError: tensors in several pieces, in something other than a slot.
    """
    for key, node in slots.items():
        if isinstance(node, TensorItem):
            parameter.slots[key] = node.slot(key)
        else:
            parameter.state[key] = _value(node, f"{key} of {parameter.name}")


def shape_of(slots: Mapping[str, Node]) -> tuple[int, ...] | None:
    """Return a parameter's shape as its state shows it."""
    return shown_shape({key: [node.shape] for key, node in slots.items() if isinstance(node, TensorItem)})


def common_values(optimizers: Sequence[OptimizerState]) -> list[dict[str, object]]:
    """Return, for each group, the single values that all of its parameters with any state share, as their step."""
    held: dict[str, dict[int, Tensor]] = {}
    for node in (slots.get("step") for optimizer in optimizers for slots in optimizer.state.values()):
        if isinstance(node, TensorItem) and node.shape == () and node.whole is not None:
            held.setdefault(node.spans[0].path, {})[id(node)] = node.whole
    steps: dict[int, Scalar] = {}
    for path, its in held.items():  # file by file
        steps.update(zip(its, read_scalars(path, list(its.values())), strict=True))

    def single(slots: Mapping[str, Node]) -> dict[str, object]:
        values = {
            key: node.node if isinstance(node, ObjectItem) else steps.get(id(node)) for key, node in slots.items()
        }
        return {key: value for key, value in values.items() if isinstance(value, (int, float, bool, Scalar))}

    return [
        shared_values([single(slots) for label in group.members if (slots := optimizer.state.get(label))])
        for optimizer in optimizers
        for group in optimizer.groups
    ]
