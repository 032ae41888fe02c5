"""What an optimizer's state dict gives a checkpoint's parameters: names for its numbers, slots, param groups, the rest.

Where a file has no names, they are deduced from the model's tensors with their shapes, the shapes of the optimizer's
state, and the order of both: each param group lists its parameters in the model's order, or sorted by name. A name is
given only where both readings give the same one; a number stays a number otherwise.

FSDP1 of torch 2.1 to 2.15, with `use_orig_params=True` and FULL_STATE_DICT on CPU, gathers every slot of a parameter in
one memory, and all of them come out as the last: what can be noticed of that in a file, is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache

from zckpt.errors import DamagedFileError, UsageError, about, listed
from zckpt.evidence import Evidence, Orders, can_be_of, in_order_or_sorted, keep_number, note_numbers
from zckpt.formats.torch_files.optimizer import (
    BESIDE,
    OPTIMIZER,
    OPTIMIZERS,
    STATE_KEY,
    OptimizerState,
    shapes_in,
    shared_values,
)
from zckpt.formats.torch_files.tensors import TensorItem, holds_tensors, scalars_in, slot_of
from zckpt.state import MASTER, Checkpoint, GivenNames, ParamGroup, dict_of, list_of, most_steps, without
from zckpt.state.names import is_number
from zckpt.storage.files import opened
from zckpt.torchfile import FromFile, Tensor, has_tensors, node_of


def attach(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    path: str,
    *,
    names: GivenNames = None,
    certain: Mapping[int, str] | None = None,
    orders: Orders = in_order_or_sorted,
    known: Collection[str] = ("params", "param_names"),
    front: str = "",
) -> None:
    """Give a checkpoint's parameters the optimizer's slots, and the checkpoint its param groups.

    A parameter whose name is not certain stays under its number in `checkpoint.unnamed`, with a warning.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already.
    optimizer : OptimizerState
    path : str
        The file that holds it.
    names : sequence of str, optional
        Names by number, from the user.
    certain : mapping of int to str, optional
        The names that are certain, by number, where they have been found already.
    orders : callable
        In which groups may have their parameters, as for `Evidence.certain`.
    known : collection of str
        Keys of a group that are no hyperparameters.
    front : str
        Put before numbers that stay, where several optimizers have the same.

    Raises
    ------
    UsageError
        `names` do not fit the file.
    """
    unnamed: list[int] = []
    counted: list[object] = []  # steps of parameters, which a group's need not have alike
    labels = {} if checkpoint.parameters else _labels(optimizer, names)
    found = {} if labels else certain
    if any(str(number) in checkpoint.parameters for number in optimizer.every_number):  # as of a ParameterList
        front = front or "optimizer."
    if found is None:
        with about(path):
            found = names_of(checkpoint, optimizer, path, names, orders=orders)
    labels |= without(optimizer.names, *found)
    for group, numbers in zip(optimizer.groups, optimizer.numbers, strict=True):
        index, members = len(checkpoint.param_groups), []
        for number in numbers:
            slots, name = optimizer.state.get(number, {}), found.get(number)
            is_held = bool(slots) or number in optimizer.masters
            if name is None:
                name = labels.get(number, f"{front}{number}")
                unnamed += [number] if is_held and number not in labels else []
                owner = keep_number(checkpoint, name, optimizer.shape(number), is_kept=is_held)
            else:
                owner = checkpoint.parameters[name]
            owner.group, owner.state = index, {}
            if number in optimizer.masters:
                owner.slots[MASTER] = slot_of(MASTER, optimizer.masters[number], path)
            for key, value in slots.items():
                if isinstance(value, (Tensor, TensorItem)):
                    owner.slots[key] = slot_of(key, value, path) if isinstance(value, Tensor) else value.slot(key)
                else:  # quantised, say: its tensors mean nothing by themselves
                    owner.state[key] = FromFile(value, path) if has_tensors(value) else value
            members.append(name)
        of = group.get(OPTIMIZER)
        of, gone = (of, (*known, OPTIMIZER)) if isinstance(of, str) else (None, known)
        own = without(group, *gone)
        hyperparameters = {key: FromFile(one, path) if holds_tensors(one) else one for key, one in own.items()}
        present = {number: optimizer.state[number] for number in numbers if number in optimizer.state}
        steps = scalars_in({number: slots.get("step") for number, slots in present.items()}, path)
        counted += [steps.get(number, slots.get("step")) for number, slots in present.items()]
        singles = [
            ({"step": steps[number]} if number in steps else {})
            | {key: value for key, value in slots.items() if isinstance(value, (int, float))}
            for number, slots in present.items()
        ]
        checkpoint.param_groups.append(ParamGroup(hyperparameters, members, shared_values(singles), of))
    checkpoint.step = most_steps(counted) if checkpoint.step is None else checkpoint.step
    _attach_rest(checkpoint, optimizer, path)
    foreign = [name for name in optimizer.names.values() if name in checkpoint.unnamed and not is_number(name)]
    if foreign and checkpoint.parameters:
        checkpoint.warnings.append(
            f"the optimizer has state for {listed(foreign)}, which the model lacks; it keeps these names"
        )
    lost = lost_in_gathering(optimizer, path)
    checkpoint.warnings += [lost] if lost else []
    largest = max((one.numel for one in checkpoint.parameters.values()), default=math.inf)
    shapes = {number: optimizer.shape(number) for number in unnamed}
    flat = [number for number, shape in shapes.items() if shape and len(shape) == 1 and shape[0] > largest]
    if flat:
        checkpoint.warnings.append(
            f"the optimizer's state of {listed(flat)} has more elements than any of the model's tensors: it is of "
            "several parameters end to end, as fairseq's 16-bit optimizers have them, and keeps its number"
        )
    note_numbers(checkpoint, [number for number in unnamed if number not in flat])


def _attach_rest(checkpoint: Checkpoint, optimizer: OptimizerState, path: str) -> None:
    """Carry what else a state dict has as `zckpt.save` does, but for the optimizer's class, which no file says."""
    groups = checkpoint.param_groups[-len(optimizer.groups) :]
    keys = list(dict.fromkeys(key for slots in optimizer.state.values() for key in slots))

    def tree(rest: object, of: str | None) -> dict[str, object]:
        names = [list(group.parameters) for group in groups if of in (None, group.optimizer)]
        return {
            "class": "",
            "at": list(optimizer.at.get(of, ())),
            "keys": keys,
            "names": names,
            "parameters": {},
            "groups": [],
            "rest": rest,
        }

    if optimizer.rest and optimizer.rest.keys() <= {group.optimizer for group in groups}:
        each = {name: {BESIDE: tree(rest, name)} for name, rest in optimizer.rest.items()}
        checkpoint.optimizer_metadata[OPTIMIZERS] = FromFile(each, path)
    elif optimizer.rest:
        checkpoint.optimizer_metadata[BESIDE] = FromFile(tree(optimizer.rest, None), path)


def further_keys(kept: Mapping[str, object]) -> list[str]:
    """Return the keys under which optimizers have what is kept besides state, as their state dicts say them."""
    found = list(without(kept, BESIDE, OPTIMIZERS))
    for one in (kept, *dict_of(node_of(kept.get(OPTIMIZERS))).values()):
        tree = dict_of(node_of(dict_of(one).get(BESIDE)))
        rest = dict_of(tree.get("rest"))
        inside = [rest, rest.get(STATE_KEY), *dict_of(tree.get("parameters")).values()]
        inside += list_of(tree.get("groups"))
        found += [str(key) for part in inside for key in dict_of(part) if key != STATE_KEY]
    return list(dict.fromkeys(found))


MOST_PAIRS = 1 << 15
"""Of masters and weights of one shape that are held against each other in any order: each takes 0.1 ms."""


MANY_GROUPS = 8
"""Groups of one parameter each that a program makes in a loop over all: they are as one group, which may be reversed.

Fewer may have been written one by one, in any order.
"""


def names_of(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    path: str,
    names: GivenNames = None,
    *,
    taken: Collection[str] = (),
    orders: Orders | None = in_order_or_sorted,
) -> dict[int, str]:
    """Return the names that are certain, by number; parameters are as of `attach`, those `taken` are another's.

    Where shapes leave a choice, a sample of masters tells: each rounds to its weight.
    `orders`: none where the checkpoint has the parameters in an order that is not the model's.
    """
    numbers = optimizer.every_number
    shapes = optimizer.shapes(one.shape for one in checkpoint.parameters.values())
    is_each = len(numbers) == len(optimizer.groups) >= MANY_GROUPS and all(optimizer.numbers)
    if is_each and not any(OPTIMIZER in group for group in optimizer.groups):
        groups, orders = [numbers], orders and _or_reversed(orders)
    else:
        groups = optimizer.numbers
    said = Evidence.of(checkpoint, groups, shapes, factored=True)
    if taken:
        said = replace(said, candidates=without(said.candidates, *taken))
    own_name = dict(zip(optimizer.names, said.known(list(optimizer.names.values())), strict=True))
    if len(own_name) == len(numbers):
        if names is not None and said.known(names) != [*own_name.values()]:
            raise UsageError("the file already names its optimizer's parameters", advice="omit --names")
        return _by_name(said, optimizer, own_name)
    if names is not None:
        return said.given(names)
    if recorded := said.recorded(optimizer.recorded_names):
        return recorded
    checkpoint.is_numbered = True

    def is_of(number: int, name: str) -> bool:
        return name.startswith(optimizer.scopes.get(number, "")) and own_name.get(number, name) == name

    @cache
    def rounds(number: int, name: str) -> bool:
        from zckpt.compare.weights import rounds_to

        master, weight = optimizer.masters.get(number), checkpoint.parameters[name].weight
        return master is None or (weight is not None and rounds_to(slot_of(MASTER, master, path), weight))

    said = replace(said, factored=False, rules=(is_of, rounds))
    found = said.alone() if orders is None else said.certain(orders)
    is_all = len(optimizer.groups) == 1 and len(numbers) == len(said.candidates)
    if is_all and not optimizer.masters and not any(optimizer.state.values()):
        return dict(zip(numbers, said.candidates, strict=True))  # any order is right of what has no state
    pairs = sum(count**2 for count in Counter(shapes.values()).values())
    if len(found) < len(numbers) and optimizer.masters.keys() >= {*numbers} and pairs <= MOST_PAIRS:
        found |= said.alone()
    return found


def _or_reversed(orders: Orders) -> Orders:
    return lambda group, names: [way for one in orders(group, names) for way in (one, one[::-1])]


def _by_name(said: Evidence[int], optimizer: OptimizerState, own_name: Mapping[int, str]) -> dict[int, str]:
    """Return the model's names of parameters that the file has by name; what the model has not is not among them."""
    found = {number: name for number, name in own_name.items() if name in said.candidates}
    uses = Counter(found.values())
    shown = [
        (name, key, shape)
        for number, name in found.items()
        for key, value in optimizer.state.get(number, {}).items()
        for shape in shapes_in(value)
    ]
    every = Counter(key for _, key, _ in shown)  # of which those told have the shape of most parameters
    same = Counter(key for name, key, shape in shown if shape == said.candidates[name])
    told = {key for key in every if 2 * same[key] > every[key]} or every.keys()
    wrong = [(name, said.shapes[number]) for number, name in found.items() if uses[name] > 1]
    wrong += [
        (name, shape) for name, key, shape in shown if key in told and not can_be_of(shape, said.candidates[name])
    ]
    if wrong:
        name, seen = wrong[0]
        raise DamagedFileError(
            f"the optimizer's state of {name} does not match the model's parameter",
            expected=f"shape {said.candidates[name]}, once",
            found=seen,
        )
    return found


def _labels(optimizer: OptimizerState, names: GivenNames) -> dict[int, str]:
    """Return the names of parameters of which no model is there: the user's or the file's; empty if it gives none."""
    numbers = optimizer.every_number
    recorded = names or optimizer.recorded_names
    complete = len(recorded) == len(numbers) == len(set(recorded))
    return dict(zip(numbers, recorded, strict=True)) if complete else {}


SAMPLED = 4
"""Parameters that are looked at, those with the most elements."""

SAMPLE_NBYTES = 4096
"""Of each slot of them, from its beginning."""


def lost_in_gathering(optimizer: OptimizerState, path: str) -> str | None:
    """Return a warning if slots of an optimizer are equal, bit for bit, which are never equal in training.

    `path`: the file that has the optimizer, under names or, with `FSDP.rekey_optim_state_dict`, under numbers.
    """
    several = []
    for number, state in optimizer.state.items():
        slots = {
            key: value
            for key, value in state.items()
            if isinstance(value, Tensor) and value.numel > 1 and value.is_contiguous
        }
        if len(slots) > 1 and len({(one.shape, one.dtype) for one in slots.values()}) == 1:
            several.append((number, slots))
    largest = sorted(several, key=lambda its: -max(one.numel for one in its[1].values()))[:SAMPLED]
    for number, slots in largest:
        with opened(path) as file:
            sizes = [(one.offset, min(one.nbytes, SAMPLE_NBYTES)) for one in slots.values()]
            begun = {bytes(file.at(*one)) for one in sizes}
        if len(begun) == 1 and any(begun.pop()):  # and not only with zeros
            name = optimizer.names.get(number, f"parameter {number}")
            return (
                f"{' and '.join(slots)} of {name} are equal bit for bit: FSDP1 with use_orig_params=True "
                f"gathers state wrongly on CPU, and all slots but the last are lost (save it sharded, or by zckpt.save)"
            )
    return None
