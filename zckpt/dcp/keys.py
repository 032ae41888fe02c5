"""What a key of a program's state dict stands for in a checkpoint, whichever way the program nests and flattens it.

model.NAME                          under a key that models usually have, or NAME itself
optimizer.state.NAME.SLOT           as `get_optimizer_state_dict` nests it
optimizer.param_groups.N.KEY        the same; N counts the program's groups, not the checkpoint's
optimizer.param_groups.NAME.KEY     as `flatten_optimizer_state_dict` joins it
KEY ...                             anything that the checkpoint has beside

All of them may be below `app`. Nothing is read here.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from zckpt.compare.logical import parameter_values
from zckpt.errors import UsageError
from zckpt.formats.dcp.tree import GROUPS, PARAMS, STATE
from zckpt.formats.dcp.write_items import items
from zckpt.formats.torch_files.content import OPTIMIZER_KEYS, STATE_DICT_KEYS
from zckpt.formats.torch_files.optimizer import split_key
from zckpt.formats.torch_files.writer import SlotTensor, is_readable
from zckpt.immutable import immutable
from zckpt.operations.open import OpenedCheckpoint
from zckpt.optim.values import is_made, value_of
from zckpt.state import MASTER, WEIGHT, Parameter, ParamGroup, Slot, number_of
from zckpt.state.names import bare_names, is_number, plain_name, without_wrappers
from zckpt.state.views import zeros

APP = "app."
"""Under which a program may keep model and optimizer together."""

ZERO_AT_FIRST = frozenset({"step", "exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer"})
"""State that is zero of a parameter that no step has reached, and of which there is none in a checkpoint then."""

StorageEntry = TensorStorageMetadata | BytesStorageMetadata


@immutable
class Elements:
    """A tensor of the checkpoint: the slots that it can be read from; the last is the most exact.

    `name`: what the checkpoint calls a tensor of the model.
    """

    slots: tuple[Slot, ...]
    name: str | None = None


@immutable
class Value:
    """A value that is no tensor of elements: an inert node, or a slot of a single number."""

    node: object


@immutable
class Option:
    """A hyperparameter.

    `name`: of the parameter whose group's it is; `group`: the number of the program's group, where that is known
    instead.
    """

    key: str
    name: str | None = None
    group: int | None = None


Meaning = Elements | Value | Option


class Keys(dict[str, StorageEntry]):
    """What DCP's planner sees of a checkpoint: it has every key that stands for something, and lists the usual ones.

    Parameters
    ----------
    checkpoint : OpenedCheckpoint
    model, optimizer : str or None
        Under which key the program keeps it, dots between several; "": at the root. None: under any usual one.
    """

    def __init__(self, checkpoint: OpenedCheckpoint, model: str | None, optimizer: str | None) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self._models = _prefixes(model, STATE_DICT_KEYS)
        self._optimizers = _prefixes(optimizer, OPTIMIZER_KEYS)
        self._is_usual = model is None and optimizer is None
        self._names = frozenset([*checkpoint.parameters, *checkpoint.unnamed])
        self._bare = {short: one for one, short in bare_names(checkpoint.names).items()}
        self._values: dict[str, dict[str, object]] = {}
        self._beside: dict[str, Meaning] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}

        # All that there is, under the keys that were told, or the most usual ones.
        roots = {"model": self._models[0], "optimizer": self._optimizers[0]}
        for item in items(checkpoint, readable=False):
            root = roots.get(str(item.path[0])) if len(item.path) > 1 else None
            key, path, value = item.key, item.path, item.value
            if root is not None:
                key = f"{root}{'.'.join(map(str, path[1:]))}"
                path = (*root.split(".")[:-1], *path[1:])
            elif isinstance(value, SlotTensor):
                self._beside[key] = Elements((value.slot,))
            elif is_readable(value) or is_made(value_of(value)):
                self._beside[key] = Value(value)
            else:
                continue
            with suppress(UsageError):  # of parameters without names
                if (entry := self.get(key)) is not None:
                    self[key], self.paths[key] = entry, path

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and self.get(key) is not None)

    def __missing__(self, key: str) -> StorageEntry:
        entry: StorageEntry | None = self.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401  # any default will do
        """Return what DCP is to know of a key; of a tensor one chunk, of which each rank reads the box it wants."""
        meaning = self.find(key)
        if meaning is None:
            return default
        if not isinstance(meaning, Elements):
            return BytesStorageMetadata()
        shape, dtype = torch.Size(meaning.slots[0].shape), getattr(torch, meaning.slots[0].dtype)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [chunk])

    def find(self, key: str) -> Meaning | None:
        """Return what a key stands for; None: the checkpoint has nothing of it.

        Raises UsageError: state of a parameter that is told by number.
        """
        found = self._find(key)
        if found is None and self._is_usual and key.startswith(APP):
            found = self._find(key.removeprefix(APP))
        return found

    def _find(self, key: str) -> Meaning | None:
        for prefix in self._models:
            name = self._name(key.removeprefix(prefix)) if key.startswith(prefix) else None
            if name is not None:
                held = self.checkpoint.owner(name).slots
                slots = tuple(held[one] for one in (WEIGHT, MASTER) if one in held)
                return Elements(slots, name) if slots else None
        for prefix in self._optimizers:
            kind, _, rest = key.removeprefix(prefix).partition(".") if key.startswith(prefix) else ("", "", "")
            if kind == STATE and rest:
                return self._state(rest, key)
            if kind == GROUPS and rest:
                return self._option(rest)
        return self._beside.get(key)

    def _tensor(self, name: str) -> Parameter | None:
        """Return a parameter or buffer by a name that may have what wrappers add to it.

        An optimizer may know one under a name that the model's state dict has not: a hook takes it apart there, as
        torchtitan's does with fused weights.
        """
        found = self._name(name)
        if found is None:
            return None if name.isdecimal() else self.checkpoint.unnamed.get(name)
        return self.checkpoint.owner(found)

    def _name(self, name: str) -> str | None:
        """Return what the checkpoint calls a tensor."""
        short = without_wrappers(name)
        for one in (name, plain_name(name), self._bare.get(short, short)):
            if one in self.checkpoint.parameters or one in self.checkpoint.buffers:
                return one
        return None

    def _state(self, joined: str, key: str) -> Meaning | None:
        name, slot = split_key(joined, self._names)
        parameter = self._tensor(name)
        if parameter is None:
            if name.isdecimal():
                raise UsageError(
                    f"{key} is state of a numbered parameter",
                    path=self.checkpoint.source,
                    expected="names",
                    advice="make the state dict with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
                )
            return None
        if slot in (WEIGHT, MASTER):
            return Elements((parameter.slots[slot],)) if slot in parameter.slots else None
        if parameter.name not in self._values:
            self._values[parameter.name] = parameter_values(self.checkpoint, parameter)
        values = self._values[parameter.name]
        if slot in values:
            value = values[slot]
            return Elements((value,)) if isinstance(value, Slot) and value.shape else Value(value)
        if values or parameter.group is None or slot not in ZERO_AT_FIRST:
            return None
        if slot == "step":
            return Value(0)
        return Elements((zeros(Slot(slot, parameter.dtype, parameter.shape, ()), parameter.shape),))

    def _option(self, joined: str) -> Meaning | None:
        name, option = split_key(joined, self._names)
        if self._tensor(name) is not None:
            return Option(option, name=name)
        number, _, option = joined.partition(".")
        if not is_number(number) or not option or not self.checkpoint.param_groups:
            return None
        return Option(option, group=int(number))

    def option(self, option: Option, listed: object) -> object:
        """Return a hyperparameter; KeyError: the checkpoint has none, and the program's own is to stay.

        `listed`: the names that the program has in its group; anything but a list of text: it has no groups of its own.
        Raises UsageError: the parameters of the program's group have several values in the checkpoint, or are told by
        number.
        """
        groups = self.checkpoint.param_groups
        names = [option.name] if option.name is not None else listed
        if not isinstance(names, (list, tuple)):
            group = groups[option.group or 0] if (option.group or 0) < len(groups) else ParamGroup({}, [])
            return list(group.parameters) if option.key == PARAMS else group.hyperparameters[option.key]
        if option.key in (PARAMS, "param_names"):
            raise KeyError(option.key)
        if any(isinstance(name, int) for name in names):
            raise UsageError(
                f"{PARAMS} of param group {option.group} are numbers",
                path=self.checkpoint.source,
                expected="names",
                advice="make the state dict with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
            )
        every = (self._tensor(str(name)) for name in names)
        numbers = dict.fromkeys(one.group for one in every if one is not None and one.group is not None)
        found = [groups[number].hyperparameters[option.key] for number in numbers]
        if not found:
            raise KeyError(option.key)
        values = [number_of(one) for one in found]
        if any(value != values[0] for value in values):
            raise UsageError(
                f"parameters in one param group have different values of {option.key} in the checkpoint",
                path=self.checkpoint.source,
                found=", ".join(map(str, values)),
                advice="give the optimizer the param groups that were saved",
            )
        return found[0]


def _prefixes(told: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return what may be before a name, with a dot; the first is that of keys that are listed."""
    if told is None:
        return (*(f"{key}." for key in usual), "")
    return (f"{told}." if told else "",)
