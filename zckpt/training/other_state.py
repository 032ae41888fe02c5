"""Schedulers, grad scalers, random states and the program's own values, which go with a model and an optimizer.

Keys of `metadata` are ours only where `save` wrote them, which it says: a user may call anything `extra` or
`random_states`. Of other checkpoints all is `extra`, except what a scheduler or grad scaler that was given takes.
Everything is read and checked before anything is changed.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any

import numpy as np
import torch

from zckpt.engine.tensors import tensors_of
from zckpt.errors import DamagedFileError, UsageError, listed
from zckpt.formats.registry import find_format
from zckpt.formats.remainder import RANDOM, are_of_save, of_modules
from zckpt.formats.torch_files.optimizer import BESIDE, OPTIMIZERS
from zckpt.immutable import mutable
from zckpt.optim.tensors import Model, ModelState, Stateful, parts_of, takers_of_extra
from zckpt.optim.values import Values, is_made, value_of
from zckpt.state import WEIGHT, Checkpoint, list_of, without
from zckpt.torchfile import FromFile, pieces

SCHEDULER, GRAD_SCALER, EXTRA = "lr_scheduler", "grad_scaler", "extra"
EXTRA_STATE = "extra_state"
"""Under which keys a checkpoint's metadata have what goes with models and optimizers."""

SAVED_BY, SELF = "saved_by", "zckpt.save"
"""How a checkpoint's origin says that these keys are ours: others may write a file with keys of the same names."""

PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, Mapping, torch.Tensor)
"""What modules keep, as far as it is data; an object of another class is not made."""

IN_MEMORY = ""
"""The path of what is in no file yet."""


WHERE = {
    SCHEDULER: "scheduler.state_dict()",
    GRAD_SCALER: "grad_scaler.state_dict()",
    EXTRA_STATE: "the state that modules keep",
}
"""What messages call what is kept under a key, where that is not the key."""


def others_given(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what goes with models and optimizers, by its key; of a scheduler and a grad scaler, `state_dict()`."""
    names = ((SCHEDULER, "scheduler"), (GRAD_SCALER, "grad_scaler"))
    there = {key: given[name] for key, name in names if given[name] is not None}
    for key, one in there.items():
        if not hasattr(one, "state_dict"):
            raise UsageError(f"unusable {key}", expected="an object with state_dict()", found=type(one).__name__)
    found = {key: one.state_dict() for key, one in there.items()}
    if given["extra"] is None:
        return found
    if not isinstance(given["extra"], Mapping):
        raise UsageError("unusable extra", expected="a dict", found=type(given["extra"]).__name__)
    return {**found, EXTRA: dict(given["extra"])}


def other_values(
    given: Mapping[str, Any], model: ModelState, of_optimizers: Mapping[str, Any], values: Values
) -> tuple[dict[str, object], dict[str, object]]:
    """Return metadata, and what optimizers keep besides their state, as nodes.

    `given`: with `scheduler`, `grad_scaler` and `extra`. Raises UnsupportedError: something that only a pickle could
    hold.
    """

    def nodes(found: Mapping[str, Any]) -> dict[str, object]:
        return {key: FromFile(values.node(one, WHERE.get(key, key)), IN_MEMORY) for key, one in found.items()}

    kept = others_given(given) | ({EXTRA_STATE: model.extra} if model.extra else {})
    trees = {key: of_optimizers[key] for key in (BESIDE, OPTIMIZERS) if key in of_optimizers}
    return nodes(kept), {**of_optimizers, **nodes(trees)}


@mutable
class OtherState:
    """Values that were read, and what was not there."""

    states: list[tuple[Stateful, dict[str, Any]]] = field(default_factory=list)
    """Schedulers and grad scalers, and the state of each."""
    modules: dict[str, Any] = field(default_factory=dict)  # what modules keep besides tensors, by key
    extra: dict[str, Any] = field(default_factory=dict)  # what the program had kept
    random: Mapping[str, Any] | None = None  # the states of this rank's random number generators
    notes: list[str] = field(default_factory=list)  # what is not restored, and why
    missing: list[str] = field(default_factory=list)  # notes of what was asked for

    def restore(self, model: Model) -> None:
        """Give each object the state that was read for it."""
        for target, state in self.states:
            target.load_state_dict(state)
        for part in parts_of(model):
            for key, module in takers_of_extra(part):
                if key in self.modules:
                    module.set_extra_state(self.modules[key])
        if self.random is not None:
            set_random_states(self.random)


def read_other_state(
    checkpoint: Checkpoint,
    scheduler: Stateful | None,
    grad_scaler: Stateful | None,
    rank: int | None,
    modules: Collection[str] = (),
    *,
    made: bool = True,
) -> OtherState:
    """Read what a checkpoint has besides the model and the optimizer.

    `scheduler`, `grad_scaler`: they get their state; `rank`: whose random states are read; `modules`: keys of what the
    model's modules keep besides tensors; `made`: state with an object of another class is left out. Raises SourceError:
    it cannot be read, or what `save` wrote is not as it was.
    """
    found = OtherState()
    values = {key: value_of(node) for key, node in checkpoint.metadata.items() if not any(pieces(node))}
    if away := checkpoint.metadata.keys() - values.keys():
        said = f"{listed(sorted(away))} is not restored: ranks share its tensors"
        found.notes.append(f"{said}; `zckpt consolidate --model` writes them, and zckpt.load loads what it wrote")
    taken = set[str]()
    for keys, target, name in (
        ((SCHEDULER, "scheduler"), scheduler, "scheduler"),
        ((GRAD_SCALER, "scaler"), grad_scaler, "grad_scaler"),
    ):
        if target is None:
            continue
        key = next((one for one in keys if isinstance(values.get(one), Mapping)), keys[0])  # the second of HF's files
        state = values.get(key)
        if made and isinstance(state, Mapping) and not is_made(state):
            found.missing.append(f"the state of a {name} has an object that only a pickle can make: it is not changed")
        elif isinstance(state, Mapping) and (state or not target.state_dict()):  # a disabled grad scaler has none
            found.states.append((target, dict(state)))
            taken.add(key)
        else:
            found.missing.append(f"the checkpoint has no state of a {name}: it is not changed")
    if not saved_by_us(checkpoint):
        by = find_format(checkpoint.format)
        taken |= by.own_metadata if by is not None else set()
        found.extra = without(values, *taken)
        found.modules = _of_modules(checkpoint, modules)
        return found
    found.extra = _mapping(values, EXTRA, checkpoint)
    found.modules = _mapping(values, EXTRA_STATE, checkpoint)
    states = list_of(values.get(RANDOM))
    if rank is None or RANDOM not in values:
        return found
    if rank >= len(states) or not states[rank]:
        found.notes.append(f"no random states for rank {rank}: only {len(states)} ranks saved theirs")
        return found
    try:
        set_random_states(states[rank], here=False)
    except Exception as error:  # whatever generators say of states that are none
        raise DamagedFileError(
            f"unusable random states of rank {rank}",
            path=checkpoint.source,
            found=f"{type(error).__name__}: {error}",
            advice="load with random_states=False",
        ) from error
    found.random = states[rank]
    return found


def saved_by_us(checkpoint: Checkpoint) -> bool:
    """Tell whether `save` wrote the values that go with the model and the optimizer, even if it was converted since."""
    origin = checkpoint.converted_from
    if origin and not str(origin.get("format_version", "")).startswith("zckpt "):
        return False
    if SAVED_BY in origin or origin.get("format") == "zero-redundancy":
        return bool(origin.get(SAVED_BY, SELF) == SELF)
    return are_of_save(checkpoint.metadata.get(RANDOM))  # by a version that did not say so, or in DeepSpeed's files


def _of_modules(checkpoint: Checkpoint, keys: Collection[str]) -> dict[str, Any]:
    """Return what modules keep, from another program's file: a tensor of the model, or a value by its key."""
    found: dict[str, Any] = {}
    kept = {name: value_of(node) for name, node in of_modules(checkpoint)[0].items()}
    for key in keys:
        its = checkpoint.buffers.get(key)
        if its is not None:
            [found[key]] = tensors_of([its.slots[WEIGHT]])
            continue
        [first, *others] = [one for name, one in kept.items() if f".{name}".endswith(f".{key}")] or [Ellipsis]
        if not others and isinstance(first, PLAIN) and is_made(first):
            found[key] = first
    return found


def _mapping(values: Mapping[str, Any], key: str, checkpoint: Checkpoint) -> dict[str, Any]:
    found = values.get(key, {})
    if not isinstance(found, Mapping):
        raise DamagedFileError(f"unreadable {key}", path=checkpoint.source, expected="a dict", found=type(found))
    return dict(found)


def random_states() -> dict[str, Any]:
    """Return the states of this rank's generators of random numbers, as plain data: Python, numpy, torch, its GPU."""
    version, words, following = random.getstate()
    kind, key, position, has_gauss, gauss = np.random.get_state()
    found: dict[str, Any] = {
        "python": [version, np.array(words, "<u4").tobytes(), following],
        "numpy": [kind, np.asarray(key, "<u4").tobytes(), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


def set_random_states(states: Mapping[str, Any], *, here: bool = True) -> None:
    """Continue from states that `random_states` returned; that of a GPU is left out where there is none.

    Without `here`, generators of no use get them, which raise what those here would.
    """
    python: Any = random if here else random.Random()  # noqa: S311  # not for secrets
    numpy: Any = np.random if here else np.random.RandomState()
    set_torch = torch.set_rng_state if here else torch.Generator().set_state
    version, words, following = states["python"]
    python.setstate((version, tuple(np.frombuffer(words, "<u4").tolist()), following))
    kind, key, position, has_gauss, gauss = states["numpy"]
    numpy.set_state((kind, np.frombuffer(key, "<u4"), position, has_gauss, gauss))
    set_torch(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if here and "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8))
