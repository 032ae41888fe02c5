"""What an optimizer's `state_dict()` has beside param groups and the state of parameters, and the way back into it.

Of each parameter tensors and plain values go by their names, if their keys are texts and not what slots of weights are
called, and of param groups plain hyperparameters: the optimizer's own, or those of one that it holds, whichever the
state dict has innermost. All else is one tree, which the first rank writes, and which is in its place again when
`load_state_dict` gets it:

{"class": "Lookahead",
 "at": ["base_optimizer"],                      which keys of the state dict lead to param groups and state
 "keys": ["exp_avg"],                           of all state that goes by names: without any, it was stripped
 "names": [["0.weight"]],                       of each group's parameters, as all below numbers them
 "parameters": {"0.weight": {"GG": [tensor]}},  state of parameters that is more than tensors and plain values
 "groups": [{"d": tensor}],                     hyperparameters that are
 "rest": {"lookahead_state": {}}}               the state dict without all that
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zckpt.errors import DamagedFileError, UnsupportedError, UsageError, listed
from zckpt.formats.torch_files.optimizer import BESIDE
from zckpt.immutable import mutable
from zckpt.optim.flat_parameters import Called
from zckpt.optim.param_groups import Group, Names, hyperparameters
from zckpt.optim.values import PLAIN, inside, is_made, value_of
from zckpt.state import MASTER, WEIGHT, are_texts, dict_of, without
from zckpt.state.names import aligned
from zckpt.torchfile import Global, Object, each, node_of

STATE, GROUPS = "state", "param_groups"

Values = dict[str, Any]


@mutable
class Beside:
    """All that a state dict has beside what goes by names; `at` is None where nothing in it does."""

    at: Sequence[str] | None = ()
    keys: Sequence[str] = ()
    parameters: dict[str, Values] = field(default_factory=dict)
    groups: Sequence[Values] = ()
    rest: Values = field(default_factory=dict)

    def state_dict(self, state: Mapping[Any, Any], groups: Sequence[Group]) -> Values:
        """Return the whole state dict, with state and param groups in their place; its containers are new."""
        made: Values = _with_new_containers(self.rest)
        if self.at is None:
            return made
        place = made
        for key in self.at:
            place = place.setdefault(key, {})
        place[STATE], place[GROUPS] = {**state, **place.get(STATE, {})}, list(groups)
        return made


@mutable
class Declared:
    """What an optimizer's state dict has; `holder` is the optimizer, of those it holds, that has the state."""

    optimizer: Optimizer
    holder: Optimizer
    state: dict[torch.Tensor, Values] = field(default_factory=dict)
    odd: dict[torch.Tensor, Values] = field(default_factory=dict)
    beside: Beside = field(default_factory=Beside)

    def tree(self, called: Called) -> dict[str, Any] | None:
        """Return what is beside, to be written; None: nothing.

        Raises UnsupportedError: a tensor in it, of parameters of which ranks have shares, would be a rank's own.
        """
        if not (self.beside.rest or self.odd or any(self.beside.groups)):
            return None
        sharded = any(isinstance(one, DTensor) for one in called)
        found = each([self.beside.rest, *self.odd.values(), *self.beside.groups], inside)
        if sharded and any(isinstance(one, torch.Tensor) and one.dim() for one in found):
            self.refuse("because its parameters are sharded, each rank would have its own")
        return {
            "class": type(self.optimizer).__name__,
            "at": None if self.beside.at is None else list(self.beside.at),
            "keys": list(dict.fromkeys(key for its in self.state.values() for key in its)),
            "names": [[called[p] for p in group["params"]] for group in self.optimizer.param_groups],
            "parameters": {called[p]: its for p, its in self.odd.items()},
            "groups": [{key: _inert(value) for key, value in its.items()} for its in self.beside.groups],
            "rest": self.beside.rest,
        }

    def refuse(self, why: str) -> None:
        """Raise UnsupportedError if there is something beside."""
        keys = dict.fromkeys(key for its in (*self.odd.values(), *self.beside.groups, self.beside.rest) for key in its)
        if keys:
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} keeps {listed(list(map(str, keys)))} in addition to parameter "
                f"state: {why}",
                advice="save only the model, and the optimizer's state_dict() with torch.save",
            )

    def kept(self, node: object, names: Names) -> Beside:
        """Return what a checkpoint has beside. Raises UsageError: another class's, in another order, or not data."""
        tree, cls = value_of(node), type(self.optimizer).__name__
        if not _is_tree(tree):
            raise DamagedFileError(f"unreadable {BESIDE}", expected="what zckpt.save writes under this key")
        found = Beside(tree["at"], tree["keys"], tree["parameters"], tree["groups"], tree["rest"])
        is_own = type(self.optimizer).load_state_dict is not Optimizer.load_state_dict  # torch's looks at no rest
        if not is_made([found.parameters, found.rest if is_own else None]):
            raise UsageError(
                f"what {cls} keeps in addition to its state has an object that only a pickle can make",
                advice="give strict=False, which leaves it out",
            )
        strange = [] if tree["class"] in (cls, "") else [key for key in found.rest if key not in self.beside.rest]
        if strange or (tree["class"] != cls and list(self.beside.at or ()) != found.at):
            raise UsageError(
                f"{cls} has no place for {listed(list(map(str, found.rest)))}, which {tree['class'] or 'another'} kept "
                "in addition to its state",
                advice="give the saved optimizer, or strict=False",
            )
        saved, live = ([name for its in groups for name in its] for groups in (tree["names"], names))
        ours = aligned(live, saved)  # a state dict's may be those of a wrapper
        if is_of_save(node) and [[ours.get(name, name) for name in its] for its in tree["names"]] != names:
            raise UsageError(
                f"what {cls} keeps by parameter number is for other parameters, or in another order",
                expected=listed(saved),
                found=listed(live),
                advice="create the optimizer as it was saved, or give strict=False",
            )
        return found


def _inert(value: object) -> object:
    """Return an Enum as the node that `torch.save` makes of it: the optimizer to load it into knows its class."""
    if not isinstance(value, Enum) or type(value.value) not in PLAIN:
        return value
    return Object(Global(type(value).__module__, type(value).__qualname__), (value.value,))


def is_of_save(node: object) -> bool:
    """Tell whether `zckpt.save` has written what is beside; else it was read from a state dict, in the same form."""
    return bool(dict_of(node_of(node)).get("class"))


def _is_tree(tree: object) -> bool:
    kinds: dict[str, Any] = {"class": str, "at": list | None, "parameters": dict, "rest": dict}
    kinds |= dict.fromkeys(("keys", "names", "groups"), list)
    if not isinstance(tree, Mapping) or not all(key in tree and isinstance(tree[key], kinds[key]) for key in kinds):
        return False
    dicts = [*tree["groups"], *tree["parameters"].values()]
    return (
        all(isinstance(one, dict) for one in dicts)
        and len(tree["groups"]) in (0, len(tree["names"]))
        and all(isinstance(its, list) and are_texts(its) for its in tree["names"])
        and all(isinstance(key, (str, int)) for key in (*tree["keys"], *(tree["at"] or ())))
    )


def declared(optimizer: Optimizer) -> Declared:
    """Return what an optimizer's state dict has. Raises UnsupportedError: it has state that this has not."""
    cls = type(optimizer).__name__
    groups = [list(group["params"]) for group in optimizer.param_groups]
    known = {parameter for its in groups for parameter in its}
    strange = sum(isinstance(key, torch.Tensor) and key not in known for key in optimizer.state)
    if strange:
        raise UnsupportedError(f"{cls} has state for {strange} tensors that are not its parameters, and have no names")
    whole = optimizer.state_dict()
    at = _innermost(whole, list(map(len, groups)))
    if at is None:
        return Declared(optimizer, optimizer, beside=Beside(None, rest=dict(whole)))
    its: Any = whole
    for key in at:
        its = its[key]
    numbers = {
        number: parameter
        for group, members in zip(its[GROUPS], groups, strict=True)
        for number, parameter in zip(group["params"], members, strict=True)
    }
    found = Declared(optimizer, optimizer)
    for _ in at:
        found.holder = next(iter(_held(found.holder).values()), found.holder)
    others = {}
    for number, values in its[STATE].items():
        if number not in numbers:
            others[number] = values
            continue
        for key, value in values.items():
            goes_by_name = isinstance(key, str) and key not in (WEIGHT, MASTER)  # which a slot's name can be
            is_plain = _is_plain(value) and value != []  # which LBFGS will fill with tensors
            is_usual = goes_by_name and (isinstance(value, torch.Tensor) or is_plain)
            where = found.state if is_usual else found.odd
            where.setdefault(numbers[number], {})[key] = value
    odd = [
        {
            key: value
            for key, value in hyperparameters(group).items()
            if not isinstance(key, str)
            or not (_is_plain(value) or (isinstance(value, torch.Tensor) and not value.dim()))
        }
        for group in its[GROUPS]
    ]
    found.beside = Beside(at, groups=odd, rest=_without(whole, at, others))
    told = {id(value) for own in found.state.values() for value in own.values()}
    # torch's own `state_dict` knows nothing of an optimizer that this one holds
    for name, held in _held(optimizer).items() if type(optimizer).state_dict is Optimizer.state_dict else ():
        tensors = [value for own in held.state.values() for value in own.values() if isinstance(value, torch.Tensor)]
        if any(id(value) not in told for value in tensors):
            raise UnsupportedError(
                f"{cls} holds {type(held).__name__} in `{name}`, whose state is not in its state_dict()",
                advice="give the inner optimizer, or let its class's state_dict() and load_state_dict() include "
                "everything",
            )
    return found


def _is_plain(value: object) -> bool:
    every = list(each(value, inside))
    keys = [key for one in every if isinstance(one, Mapping) for key in one]
    return all(type(one) in (*PLAIN, list, tuple, dict) for one in every) and all(type(key) in PLAIN for key in keys)


def _with_new_containers(value: Any) -> Any:  # whatever a state dict has
    if type(value) is dict:
        return {key: _with_new_containers(one) for key, one in value.items()}
    return [_with_new_containers(one) for one in value] if type(value) is list else value


def _innermost(tree: object, sizes: Sequence[int]) -> tuple[str, ...] | None:
    """Return the keys that lead to the innermost state and param groups, of these sizes, in a state dict."""
    if not isinstance(tree, Mapping):
        return None
    for key, value in tree.items():
        if isinstance(key, str) and key not in (STATE, GROUPS):
            inner = _innermost(value, sizes)
            if inner is not None:
                return (key, *inner)
    state, groups = tree.get(STATE), tree.get(GROUPS)
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return None
    found = [len(group["params"]) for group in groups if isinstance(group, Mapping) and "params" in group]
    return () if found == list(sizes) else None


def _held(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that one holds, by attribute."""
    return {key: one for key, one in vars(optimizer).items() if isinstance(one, Optimizer)}


def _without(tree: Mapping[str, Any], at: Sequence[str], others: Mapping[Any, Any]) -> Values:
    """Return a state dict without param groups, and without the state of parameters."""
    if at:
        return {**tree, at[0]: _without(tree[at[0]], at[1:], others)}
    rest = without(tree, STATE, GROUPS)
    return {**rest, STATE: others} if others else rest
