"""What a checkpoint holds besides tensors and param groups, as one tree for formats that have no place of their own.

{"version": 1, "origin": {"format", "format_version", "zero_stage", "world_size", ...}, "step", "loss_scale",
 "frozen": [name], "tied": {alias: owner}, "buffers": [name], "masters": bool, "metadata", "optimizer_metadata",
 "optimizers": [name],        of each param group, where several optimizers were saved together
 "models": [name],            with which names of tensors begin, where several models were
 "dtypes": {name: dtype},     of weights, where their masters, of another type, are in the place of the model's tensors
 "numbers": {number: name}}   of an optimizer's parameters, those with a name, where some have none

A program that does not know it can leave it alone: none of it is the model or the optimizer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from zckpt.errors import DamagedFileError, about
from zckpt.formats.torch_files.content import EXTRA_STATE, STATE_DICT_KEYS
from zckpt.formats.torch_files.optimizer import BESIDE, OPTIMIZERS
from zckpt.formats.torch_files.tensors import as_mapping, as_names, carried, describe
from zckpt.state import (
    MASTER,
    WEIGHT,
    Checkpoint,
    Duplicate,
    Parameter,
    Scalar,
    are_sizes,
    are_texts,
    as_float,
    by_key,
    dict_of,
    list_of,
    stated,
)
from zckpt.state.dtypes import DTYPES
from zckpt.state.inventory import COPY, IMPLIED, Rule
from zckpt.state.names import is_number
from zckpt.torchfile import Renderer, Tensor, TorchFile, brief, node_of, put_back
from zckpt.torchfile.plain import LIMIT

KEY = "zckpt"
"""Under which the tree is kept in a dict that others read too."""

VERSION = 1

RANDOM = "random_states"
"""Under which metadata have the random states of all ranks that `zckpt.save` wrote: see `are_of_save`."""

NUMBERS = "numbers"

WITH_ITEMS = 2
"""The version where some of the metadata is not in the tree, and the tree says which."""


def remainder_rules(*place: str) -> tuple[Rule, ...]:
    """Return the inventory's rules for the tree, which lies at some place in a file's own."""
    keys = (
        "version",
        "origin",
        "step",
        "loss_scale",
        "frozen",
        "tied",
        "buffers",
        "masters",
        "optimizers",
        "models",
        "model_of",
        "dtypes",
        NUMBERS,
    )
    return tuple(Rule((*place, key, "**"), IMPLIED, "descriptions of parameters and of the source") for key in keys)


def remainder(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the tree."""
    optimizers = [group.optimizer for group in checkpoint.param_groups]
    return {
        **stated({"optimizers": optimizers if any(optimizers) else None, "models": checkpoint.models() or None}),
        "version": VERSION,
        "origin": origin(checkpoint),
        "step": checkpoint.step,
        "loss_scale": checkpoint.loss_scale,
        "frozen": [p.name for p in checkpoint.parameters.values() if p.frozen],
        "tied": checkpoint.aliases,
        "buffers": list(checkpoint.buffers),
        "masters": checkpoint.has_masters,
        "metadata": dict(checkpoint.metadata),
        "optimizer_metadata": dict(checkpoint.optimizer_metadata),
    }


def names_of_models(own: TorchFile | None, usual: list[str]) -> list[str]:
    """Return what several models are called: as usual, unless zckpt has written what they were before."""
    known = list_of(dict_of(own and own.root).get("models"))
    return known if len(known) == len(usual) and are_texts(known) else usual


def models_of_optimizers(own: TorchFile | None, count: int) -> list[int]:
    """Return the number of the model that each of so many optimizers is of, as zckpt has written it; else nothing."""
    known = list_of(dict_of(own and own.root).get("model_of"))
    return known if all(type(one) is int for one in known) and sorted(known) == [*range(count)] else []


def known_names(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what a tree has to say where only some of an optimizer's parameters have names.

    Which these are was found in the source's files (their order, a configuration), and may not be seen in a target's.
    """
    names = checkpoint.grouped
    known = {str(number): name for number, name in enumerate(names) if name in checkpoint.parameters}
    return {} if len(known) == len(names) else {NUMBERS: known}


def names_in(node: object, checkpoint: Checkpoint, path: str) -> dict[int, str] | None:
    """Return the names by number that a tree says; None where it says none.

    Raises DamagedFileError: it speaks of parameters that are not there.
    """
    found = as_mapping(node, path).get(NUMBERS)
    if found is None:
        return None
    known = {str(number): str(name) for number, name in as_mapping(found, path).items()}
    if not all(is_number(number) and name in checkpoint.parameters for number, name in known.items()):
        raise DamagedFileError("unexpected content", path=path, expected=f"names of parameters in `{NUMBERS}`")
    return {int(number): name for number, name in known.items()}


def descriptions(parameters: Iterable[Parameter]) -> dict[str, object]:
    """Return shapes and types of what has no tensor in a target's files, by name."""
    return {one.name: {"shape": list(one.shape), "dtype": one.dtype} for one in parameters}


def described(node: object) -> dict[str, Parameter]:
    """Return parameters without any slots, as `descriptions` says them. Raises DamagedFileError: it is malformed."""
    found = {}
    for name, said in as_mapping(node).items():
        one = as_mapping(said)
        shape, dtype = one.get("shape"), one.get("dtype")
        if not isinstance(shape, list) or not are_sizes(shape) or dtype not in DTYPES:
            raise DamagedFileError("unexpected content", expected=f"shape and type of {name}")
        found[str(name)] = Parameter(str(name), tuple(shape), str(dtype))
    return found


def types_of_weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the types of weights whose masters have another: in a file that has masters only, nothing else says it."""
    masters = {name: checkpoint.owner(name).master for name in checkpoint.parameters}
    types = {name: one.dtype for name, one in checkpoint.parameters.items()}
    return {name: types[name] for name, one in masters.items() if one is not None and one.dtype != types[name]}


def as_masters(checkpoint: Checkpoint, types: Mapping[object, object]) -> None:
    """Take weights for masters whose weights had these types.

    Raises DamagedFileError: there is no such parameter or type.
    """
    for name, dtype in types.items():
        one = checkpoint.parameters.get(str(name))
        if one is None or dtype not in DTYPES:
            raise DamagedFileError("unexpected content", expected=f"the type of {name}", found=dtype)
        one.dtype = str(dtype)
        weight = one.slots.pop(WEIGHT, None)
        if weight is not None:
            one.slots = {MASTER: replace(weight, name=MASTER), **one.slots}


_OF_MODEL = frozenset([*STATE_DICT_KEYS, "module_extra_state"])
"""What keys of metadata that are of the model begin with; the last is that of DeepSpeed's reader."""


_OF_A_RANK = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states|model_world_size_\d+_rank_\d+")
"""What keys of metadata begin with of which a rank has another value than the first: the stem of its file."""


_OF_ANOTHER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_[1-9]|model_world_size_\d+_rank_[1-9]")
"""Those of ranks that have the same modules as the first, which has nothing there: it is not the model's."""


def of_modules(checkpoint: Checkpoint) -> tuple[dict[str, object], set[str]]:
    """Return what modules keep besides tensors, by its name in the model's state dict, and the metadata that are that.

    Readers keep it under its name, behind the model's key in their file or not, or in a dict under that key. What two
    models have is that of the one with a usual key, not of a mean beside it; or of none.
    """
    held: list[tuple[str, str, object]] = []
    left = Counter[str]()
    for key, value in checkpoint.metadata.items():
        inside = {key: value} if is_extra(key) else dict_of(node_of(value))
        its = [place for place in inside if isinstance(place, str) and is_extra(place)]
        left[key] = len(inside) if its else 1
        held += [(key, place, value if place == key else put_back(value, inside[place])) for place in its]
    modules = {""}
    for name in checkpoint.names if held else ():
        while (name := name.rpartition(".")[0]) and name not in modules:
            modules.add(name)
    found = by_key((known_as, one) for one in held if (known_as := _in_model(one[1], modules)) is not None)
    values: dict[str, object] = {}
    for known_as, several in found.items():
        best = [one for one in several if one[0] == known_as or one[0].partition(".")[0] in _OF_MODEL]
        best = best or [one for one in several if _OF_ANOTHER.match(one[0]) is None]
        if len(best) == 1:
            [(key, _, values[known_as])] = best
            left[key] -= 1
    return values, {key for key, count in left.items() if not count}


def is_extra(key: str) -> bool:
    """Tell whether a name is that of what a module keeps besides tensors."""
    return f".{key}".endswith(f".{EXTRA_STATE}")


def _in_model(place: str, modules: Container[str]) -> str | None:
    """Return the name in the model: that of a module which the model has, or which is in one that it has."""
    parts = place.split(".")
    is_front = parts[0] in STATE_DICT_KEYS or _OF_A_RANK.fullmatch(parts[0]) is not None
    for at in range(is_front and parts[0] not in modules, len(parts)):
        module = parts[at:-1]
        if (module and ".".join(module) in modules) or ".".join(module[:-1]) in modules:
            return ".".join(parts[at:])
    return None


def origin(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what the state was read from in the first place, before any conversion; plain data."""
    known = checkpoint.details.get("origin")
    if isinstance(known, dict):
        return known
    facts = {
        "format": checkpoint.format,
        "format_version": checkpoint.format_version,
        "zero_stage": checkpoint.zero_stage,
        "world_size": checkpoint.world_size,
        **checkpoint.details,
    }
    return {key: jsonable(value) for key, value in stated(facts).items()}


def restore_from(checkpoint: Checkpoint, file: TorchFile, *rules: Rule) -> None:
    """Add a file that is the tree to those of a checkpoint, and give the checkpoint what it says: see `restore`.

    `rules`: of what the file has besides. What modules keep is in the model once more, for those who read that alone;
    and so is in the optimizer's file what its state dict has besides.
    """
    models, of_model = [one for one in checkpoint.files if one.role == "model"], of_modules(checkpoint)[0]
    checkpoint.files.append(describe(file, "metadata", rules=(*remainder_rules(), *rules)))
    restore(checkpoint, file.root, file)
    about_it = f"what the module keeps, as in {Path(file.path).name}"
    again = [Rule((name, "**"), COPY, about_it, tensors=True) for name in of_modules(checkpoint)[0] if name in of_model]
    for one in models:
        one.rules = (*one.rules, *again)
    for one in checkpoint.files if checkpoint.optimizer_metadata.keys() & {BESIDE, OPTIMIZERS} else ():
        kept = [replace(rule, fate=COPY, tensors=True) for rule in one.rules if rule.about == BESIDE]
        one.rules = (*kept, *one.rules) if one.role == "optimizer" else one.rules


def restore(checkpoint: Checkpoint, node: object, file: TorchFile) -> None:
    """Give a checkpoint, whose parameters and groups are there, what the tree says of it.

    Raises DamagedFileError: the tree is malformed, of another version, or speaks of parameters that are not there.
    """
    with about(file.path):
        tree = as_mapping(node)
        if tree.get("version") not in (VERSION, WITH_ITEMS):
            raise DamagedFileError(
                "unknown version", expected=f"version {VERSION}", found=brief(tree.get("version"), 40)
            )
        for key in ("metadata", "optimizer_metadata"):
            found = {str(name): carried(file, value) for name, value in as_mapping(tree.get(key, {})).items()}
            setattr(checkpoint, key, found)
        checkpoint.details["origin"] = dict(as_mapping(tree.get("origin", {})))
        step, scale = tree.get("step"), tree.get("loss_scale")
        checkpoint.step = step if type(step) is int else checkpoint.step
        checkpoint.loss_scale = as_float(scale)
        _mark(checkpoint, tree)
        optimizers = tree.get("optimizers")
        if optimizers is not None:
            if not isinstance(optimizers, list) or len(optimizers) != len(checkpoint.param_groups):
                raise DamagedFileError("does not state the optimizer of each param group")
            for group, name in zip(checkpoint.param_groups, optimizers, strict=True):
                group.optimizer = name if isinstance(name, str) else None
        models = tree.get("models")
        if models is not None:
            checkpoint.details["models"] = as_names(models)
        for one in checkpoint.parameters.values() if tree.get("masters") is True else ():
            weight = one.slots.get(
                WEIGHT
            )  # one without a master is one: only what is not exact in the model is there twice
            if one.group is not None and weight is not None:
                one.slots.setdefault(MASTER, replace(weight, name=MASTER))
        as_masters(checkpoint, as_mapping(tree.get("dtypes", {})))


def _mark(checkpoint: Checkpoint, tree: Mapping[object, object]) -> None:
    """Say which parameters are buffers, frozen, or other names of one."""
    buffers = as_names(tree.get("buffers", []))
    known = set(buffers)
    for name in buffers:
        if name in checkpoint.parameters:
            checkpoint.buffers[name] = checkpoint.parameters.pop(name)
        elif name not in checkpoint.buffers:
            raise DamagedFileError(f"buffer {name} does not exist")
    for name in [name for name in checkpoint.buffers if name not in known]:
        checkpoint.parameters[name] = checkpoint.buffers.pop(name)
    for name in as_names(tree.get("frozen", [])):
        _parameter(checkpoint, name).frozen = True
    for alias, owner in as_mapping(tree.get("tied", {})).items():
        parameter, other = _parameter(checkpoint, alias), _parameter(checkpoint, owner)
        if parameter.shape != other.shape or other.tied_to is not None or set(parameter.slots) - {WEIGHT}:
            raise DamagedFileError(f"{alias} cannot be another name of {owner}")
        copy, own = parameter.weight, other.weight
        if copy is not None and own is not None and copy.spans != own.spans:
            checkpoint.duplicates.append(Duplicate("tied", parameter.name, other.name, copy, own))
        parameter.tied_to, parameter.slots = other.name, {}


def _parameter(checkpoint: Checkpoint, name: object) -> Parameter:
    if name not in checkpoint.parameters:
        raise DamagedFileError(f"parameter {name} does not exist")
    return checkpoint.parameters[str(name)]


MAXIMUM_VALUES = 1 << 17
"""Values within values that are said of all groups, or of all parameters: a file may repeat a tree without end."""


def jsonables(groups: Iterable[Mapping[str, object]], renderer: Renderer | None = None) -> list[dict[str, object]]:
    """Return the values of groups, or of whatever has many, as JSON-able data.

    `renderer`: limits how many there are in all; by default to `MAXIMUM_VALUES`, with `...` for the rest.
    """
    renderer = renderer or Renderer(MAXIMUM_VALUES)
    return [{key: jsonable(value, renderer) for key, value in group.items()} for group in groups]


def jsonable(value: object, renderer: Renderer | None = None) -> object:
    """Return a value as JSON-able data: single values as numbers, tensors by type and shape, NaN and Inf as text.

    `renderer`: limits what several values become together.
    """
    if isinstance(value, Scalar):
        return jsonable(value.value)
    if isinstance(value, Tensor):
        return {"tensor": value.dtype, "shape": list(value.shape)}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    renderer = renderer or Renderer(LIMIT)
    if isinstance(value, dict) and any(isinstance(one, Scalar) for one in value.values()):
        return {str(key): jsonable(one, renderer) for key, one in value.items()}
    return renderer.render(value)


def are_of_save(states: object) -> bool:
    """Tell random states that `zckpt.save` wrote: files without room for an origin (DeepSpeed's) keep these, too."""
    every = node_of(states)
    return isinstance(every, list) and any(every) and all(
        isinstance(one, Mapping) and (not one or {"python", "numpy", "torch"} <= one.keys()) for one in every
    )  # fmt: skip
