"""The state of torch's optimizers, given to a checkpoint's parameters: by names where a file has them.

Where a file has no names, they are deduced from the model's tensors with their shapes, the shapes of the optimizer's
state, and the order of both: each param group lists its parameters in the model's order, or sorted by name. A name is
given only where both readings give the same one; a number stays a number otherwise.

FSDP1 of torch 2.1 to 2.15, with `use_orig_params=True` and FULL_STATE_DICT on CPU, gathers every slot of a parameter in
one memory, and all of them come out as the last: what can be noticed of that in a file, is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

from zckpt.errors import DamagedFileError, UsageError, about, listed
from zckpt.evidence import Evidence, Orders, in_order_or_sorted, keep_number, note_numbers
from zckpt.formats.torch_files.state_dicts import OPTIMIZER, OptimizerState, shared_values
from zckpt.formats.torch_files.tensors import TensorItem, scalars_in, slot_of
from zckpt.state import MASTER, Checkpoint, ParamGroup
from zckpt.state.names import is_number
from zckpt.storage.files import opened
from zckpt.torchfile import FromFile, Tensor, walk_tensors

Sample = Callable[[Tensor, str], bool]
"""Whether a master rounds to the model's tensor of this name, as far as a sample of both can tell."""


def attach(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    path: str,
    *,
    names: Sequence[str] | None = None,
    sample: Sample | None = None,
    certain: Mapping[int, str] | None = None,
    orders: Orders = in_order_or_sorted,
    known: Collection[str] = ("params", "param_names"),
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
    sample : callable, optional
        Tells by values whether a master belongs to a weight.
    certain : mapping of int to str, optional
        The names that are certain, by number, where they have been found already.
    orders : callable
        In which groups may have their parameters, as for `Evidence.certain`.
    known : collection of str
        Keys of a group that are no hyperparameters.

    Raises
    ------
    UsageError
        `names` do not fit the file.
    """
    unnamed = []
    labels = {} if checkpoint.parameters else _labels(optimizer, names)
    found = {} if labels else certain
    if found is None:
        with about(path):
            found = _names(checkpoint, optimizer, names, sample, orders)
    labels |= {number: name for number, name in optimizer.names.items() if number not in found}
    for index, (group, numbers) in enumerate(zip(optimizer.groups, optimizer.numbers, strict=True)):
        members = []
        for number in numbers:
            slots, name = optimizer.state.get(number, {}), found.get(number)
            is_held = bool(slots) or number in optimizer.masters
            if name is None:
                name = labels.get(number, str(number))
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
                    owner.state[key] = FromFile(value, path) if any(True for _ in walk_tensors(value)) else value
            members.append(name)
        of = group.get(OPTIMIZER) if isinstance(group.get(OPTIMIZER), str) else None
        gone = known if of is None else (*known, OPTIMIZER)
        hyperparameters = {key: value for key, value in group.items() if key not in gone}
        common = _common(optimizer, numbers, path)
        checkpoint.param_groups.append(ParamGroup(hyperparameters, members, common, of))
    foreign = [name for name in optimizer.names.values() if name in checkpoint.unnamed and not is_number(name)]
    if foreign and checkpoint.parameters:
        checkpoint.warnings.append(
            f"the optimizer has state of {listed(foreign)}, which the model has not; it is kept under these names"
        )
    lost = lost_in_gathering(optimizer, path) if optimizer.names else None
    checkpoint.warnings += [lost] if lost else []
    note_numbers(checkpoint, unnamed)


def _common(optimizer: OptimizerState, numbers: Sequence[int], path: str) -> dict[str, object]:
    """Return the single values that all parameters of a group with any state share."""
    present = [number for number in numbers if number in optimizer.state]
    steps = scalars_in({n: optimizer.state[n].get("step") for n in present}, path)
    return shared_values(
        [
            ({"step": steps[n]} if n in steps else {})
            | {key: value for key, value in optimizer.state[n].items() if isinstance(value, (int, float, bool))}
            for n in present
        ]
    )


def _names(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    names: Sequence[str] | None,
    sample: Sample | None,
    orders: Orders,
) -> dict[int, str]:
    numbers = optimizer.every_number
    shapes = {number: optimizer.shape(number) for number in numbers}
    said = Evidence.of(checkpoint, optimizer.numbers, shapes, factored=True)
    if len(optimizer.names) == len(numbers):
        own = list(optimizer.names.values())
        if names is not None and said.known(names) != said.known(own):
            raise UsageError("the file has names of its optimizer's parameters", advice="leave --names out")
        return _by_name(said, optimizer)
    if names is not None:
        return said.given(names)
    if recorded := said.recorded(optimizer.recorded_names):
        return recorded
    checkpoint.is_numbered = True
    own_name = dict(zip(optimizer.names, said.known(list(optimizer.names.values())), strict=True))

    def is_of(number: int, name: str) -> bool:
        return name.startswith(optimizer.scopes.get(number, "")) and own_name.get(number, name) == name

    @cache
    def rounds(number: int, name: str) -> bool:
        master = optimizer.masters.get(number)
        return master is None or sample is None or sample(master, name)

    return replace(said, factored=False, rules=(is_of, rounds)).certain(orders)


def _by_name(said: Evidence[int], optimizer: OptimizerState) -> dict[int, str]:
    """Return the model's names of parameters that the file has by name; what the model has not is not among them."""
    own = said.known(list(optimizer.names.values()))
    found = {number: name for number, name in zip(optimizer.names, own, strict=True) if name in said.candidates}
    uses = Counter(found.values())
    for number, name in found.items():
        if uses[name] > 1 or not said.fits(number, name):
            raise DamagedFileError(
                f"the optimizer's state of {name} is not that of the model's parameter",
                expected=f"shape {said.candidates[name]}, once",
                found=said.shapes[number],
            )
    return found


def _labels(optimizer: OptimizerState, names: Sequence[str] | None) -> dict[int, str]:
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

    `optimizer`: with names; `path`: the file that has it.
    """
    several = {}
    for number, name in optimizer.names.items():
        slots = {
            key: tensor
            for key, tensor in optimizer.tensors(number).items()
            if tensor.shape and tensor.numel > 1 and tensor.is_contiguous
        }
        if len(slots) > 1 and len({(one.shape, one.dtype) for one in slots.values()}) == 1:
            several[name] = slots
    largest = sorted(several, key=lambda name: -max(one.numel for one in several[name].values()))[:SAMPLED]
    for name in largest:
        with opened(path) as file:
            sizes = [(one.offset, min(one.numel * one.itemsize, SAMPLE_NBYTES)) for one in several[name].values()]
            begun = {bytes(file.at(*one)) for one in sizes}
        if len(begun) == 1 and any(begun.pop()):  # and not only with zeros
            return (
                f"{' and '.join(several[name])} of {name} are equal bit for bit: FSDP1 with use_orig_params=True "
                f"gathers state wrongly on CPU, and all slots but the last are lost (save it sharded, or by zckpt.save)"
            )
    return None
