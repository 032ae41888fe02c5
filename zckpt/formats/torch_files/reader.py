"""A single file written by `torch.save`: a model's state dict, or a dict that holds one and an optimizer's.

{name: tensor, ...}                                            a state dict by itself
{"model": {name: tensor}, "optimizer": {state, param_groups}, "step": 5, ...}      under any keys
{..., "zckpt": {...}}                                          what `zckpt convert` keeps besides both, see `remainder`
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from zckpt.codes import UNSUPPORTED
from zckpt.errors import SourceError, UnsupportedError, about, listed
from zckpt.evidence import may_be_trained
from zckpt.formats.fsdp_rank_files.held import refuse_share
from zckpt.formats.remainder import KEY, names_in, remainder_rules, restore
from zckpt.formats.safetensors.file import refuse_twice
from zckpt.formats.torch_files.attach import attach
from zckpt.formats.torch_files.content import content_of, dtypes_of, is_state_dict
from zckpt.formats.torch_files.optimizer import OptimizerState, optimizer_rules, parse_held, with_rest
from zckpt.formats.torch_files.tensors import by_name, carried, describe, identity_of, slot_of
from zckpt.state import WEIGHT, Checkpoint, GivenNames, Parameter, dict_of, inside, list_of, positions, without
from zckpt.state.inventory import CARRIED, IMPLIED, Rule, exactly
from zckpt.torchfile import (
    MAX_DEPTH,
    Object,
    Tensor,
    TorchFile,
    brief,
    is_leaf,
    is_tensor,
    oddity,
    read_torchfile,
    unwrapped,
    value_at,
)

STEP_KEYS = ("step", "global_step", "global_steps", "iteration")

COMPOSERS_STEP = ("timestamp", "Timestamp", "batch")
"""Where Composer has it, next to the model."""


def read(path: Path, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of a file written by `torch.save`.

    `names`: names of the optimizer's parameters, in its order. Raises UnsupportedError: it holds no state dict.
    """
    file = _read(path)
    checkpoint = Checkpoint(str(path), "torch")
    with about(path):
        root, of_objects = with_state_dicts(file.root)
    if of_objects:
        checkpoint.warnings.append(
            "holds a module or an optimizer as an object, of which its state dict is read and no more"
        )
    if isinstance(root, Object):
        error = UnsupportedError(
            f"holds an object of {root.qualified}, not a state dict",
            path=path,
            advice="save model.state_dict() in the program that wrote it",
            code=UNSUPPORTED,
        )
        error.exit_status = SourceError.exit_status  # loading it makes that object, whatever it is: it is unsafe
        raise error
    if any(isinstance(one, dict) for one in list_of(root)):
        root = inside(root)
    if not isinstance(root, dict) or not root:
        raise UnsupportedError("holds no state dict", path=path, found=type(root).__name__)
    layers = {str(key): one for key, one in root.items() if "W_q" in dict_of(one)}
    if coded := [key for key, one in layers.items() if "nbits" in {**one, **dict_of(one.get("meta"))}]:
        raise UnsupportedError(f"{listed(coded)}: layers in HQQ's codes of few bits", path=path, found="W_q",
                               expected="tensors of numbers", advice="dequantise it with HQQ")  # fmt: skip
    rest = root.get(KEY)
    content = content_of(without(root, KEY), path, spreads=True, seen={id(root)})
    if not content.models and not content.optimizers:
        strange = _without_elements(root)
        raise UnsupportedError(
            "holds no state dict",
            path=path,
            expected="a dict of tensors, or a dict that holds one"
            + (", all dense and with elements" if strange else ""),
            found=strange or f"keys {', '.join(map(str, list(root)[:8]))}",
        )
    checkpoint.warnings += content.warnings
    if len(content.models) > 1:
        checkpoint.details["models"] = [prefix.removesuffix(".") for prefix in content.models]
    add_tensors(checkpoint, content.tensors, str(path), rest)
    if content.state is not None:
        certain = names_in(rest, checkpoint, str(path)) if isinstance(rest, dict) and names is None else None
        attach(checkpoint, content.state, str(path), names=names, certain=certain, orders=content.orders)
    checkpoint.metadata = {key: carried(file, value) for key, value in by_name(content.others, file.path).items()}
    checkpoint.step = step_of(checkpoint, {**content.root, **content.base})
    if isinstance(rest, dict):
        restore(checkpoint, rest, file)
    rules = [rule for one in content.optimizers for rule in one.rules]
    if isinstance(file.root, (list, tuple)):  # single values of a list have no keys by which they are known
        rules += [Rule((key,), CARRIED, key) for key, one in checkpoint.metadata.items() if is_leaf(one)]
    checkpoint.files.append(describe(file, "model", rules=(*of_objects, *rules, *remainder_rules(KEY))))
    return checkpoint


WRAPPED = "torch._utils._rebuild_wrapper_subclass"


def _read(path: Path) -> TorchFile:
    """Return a file of a model, in it the tensors that wrappers are to hold in the place of these."""
    file = read_torchfile(path)
    refuse_share(file)
    return replace(file, root=_bare(file.root)) if any(WRAPPED in names for names in file.globals.values()) else file


def _bare(node: object, deep: int = 3) -> object:
    if not isinstance(node, dict) or not deep:
        return unwrapped(node)
    found = {key: _bare(one, deep - 1) for key, one in node.items()}
    if all(one is node[key] for key, one in found.items()):
        return node
    made = copy(node)
    made.update(found)
    return made


def _without_elements(root: Mapping[object, object], deep: int = 2) -> str | None:
    """Say which entry of a dict, or of one so deep in it, is no plain tensor."""
    for key, value in root.items():
        if (odd := oddity(value)) is not None:
            return f"{key}, {odd}"
        if isinstance(value, dict) and deep and (inside := _without_elements(value, deep - 1)) is not None:
            return f"{key}.{inside}"
    return None


def add_tensors(checkpoint: Checkpoint, model: Mapping[object, object], path: str, rest: object) -> None:
    """Turn the entries of a state dict into parameters and buffers; two names of the same bytes are tied.

    A file does not say which entries are buffers. Integers and bools cannot be trained, so they are, and so are the
    running statistics of a batch norm; the rest are taken for parameters. Nor does it say which of two names is the
    owner's: the first, or as `rest` has it, what zckpt keeps besides.
    """
    aliases = dict_of(dict_of(rest).get("tied"))
    dtypes = dtypes_of(model)
    tensors = {name: one for name, one in by_name(model, path).items() if isinstance(one, Tensor)}
    owners: dict[tuple[object, ...], str] = {}
    for name in sorted(tensors, key=aliases.__contains__):
        if may_be_trained(name, dtypes):
            owners.setdefault(identity_of(tensors[name]), name)
    for name, tensor in tensors.items():
        is_trained, weight = may_be_trained(name, dtypes), slot_of(WEIGHT, tensor, path)
        owner = owners[identity_of(tensor)] if is_trained and tensor.numel else name
        if owner == name:
            checkpoint.place(name, weight, trained=is_trained)
        else:
            checkpoint.parameters[name] = Parameter(name, tensor.shape, tensor.dtype, tied_to=owner)


def add_model(checkpoint: Checkpoint, path: Path, rest: object = None) -> None:
    """Read a file of a model by itself, one of several files perhaps. What is no tensor in it is carried.

    `rest`: as of `add_tensors`. Raises UnsupportedError: it is no state dict; DamagedFileError: a name is in two files.
    """
    file = _read(path)
    root = file.root
    if not is_state_dict(root):
        raise UnsupportedError(
            "holds no state dict", path=path, expected="a dict of tensors by name", found=brief(root, 60)
        )
    refuse_twice(checkpoint, by_name(root, str(path)), path)
    add_tensors(checkpoint, root, str(path), rest)
    checkpoint.metadata |= {str(key): carried(file, value) for key, value in root.items() if not is_tensor(value)}
    checkpoint.files.append(describe(file, "model"))


def read_optimizer(checkpoint: Checkpoint, path: Path) -> OptimizerState:
    """Read a file of an optimizer by itself, and add it to a checkpoint's files; errors are those of `parse`."""
    file = read_torchfile(path)
    refuse_share(file)
    state = with_rest(parse_held(file.root, str(path)), file.root)
    rules = optimizer_rules(rest=state.rest, at=state.at.get(None, ()))
    checkpoint.files.append(describe(file, "optimizer", rules=rules))
    return state


def step_of(checkpoint: Checkpoint, root: Mapping[Any, object]) -> int | None:
    """Return the step that a program has counted, or else the optimizer."""
    found = (value_at(root, way) for way in (*((key,) for key in STEP_KEYS), COMPOSERS_STEP))
    return next((one for one in found if type(one) is int), checkpoint.most_steps)


KINDS = ("_parameters", "_buffers")

MAXIMUM_MODULES = 1_000_000
"""Of one file: modules may hold others, or themselves, without end."""


def with_state_dicts(root: object) -> tuple[object, list[Rule]]:
    """Return what a file holds with a state dict in the place of each such object; and what all else of these is.

    Raises UnsupportedError: modules hold each other without end.
    """
    if _is_module(root):
        return _of_module(root), [_rule()]
    if not isinstance(root, dict):
        return root, []
    models = {key: _of_module(one) for key, one in root.items() if _is_module(one)}
    tensors = [(name, one) for model in models.values() for name, one in model.items() if isinstance(one, Tensor)]
    names = {id(one): name for name, one in reversed(tensors)}
    found: dict[object, object] = {**models}
    for key, one in root.items():
        state = dict_of(one.state) if isinstance(one, Object) else {}
        its = state.get("param_groups") if isinstance(state.get("state"), dict) else None
        if not isinstance(its, list) or not all(isinstance(dict_of(group).get("params"), list) for group in its):
            continue  # it is no optimizer
        numbers = positions(dict.fromkeys(id(p) for group in its for p in group["params"]))
        groups = []
        for group in its:
            own = [id(p) for p in group["params"]]
            named = {"param_names": [names[of] for of in own]} if numbers.keys() <= names.keys() else {}
            groups.append({**group, **named, "params": [numbers[of] for of in own]})
        states = {numbers.get(id(p), p): held for p, held in state["state"].items()}
        found[key] = {"state": states, "param_groups": groups}
    return {**root, **found} if found else root, [_rule(exactly(key)) for key in found]


def _rule(*place: str) -> Rule:
    return Rule((*place, "**"), IMPLIED, "what an object has besides its state dict", tensors=True)


def _is_module(node: object) -> bool:
    state = node.state if isinstance(node, Object) else None
    return isinstance(state, dict) and all(isinstance(state.get(key), dict) for key in (*KINDS, "_modules"))


def _of_module(module: object) -> dict[str, object]:
    found: dict[str, object] = {}
    waiting: list[tuple[str, Any, int]] = [("", module, 0)]
    for _ in range(MAXIMUM_MODULES):
        if not waiting:
            return found
        prefix, one, depth = waiting.pop()
        if depth > MAX_DEPTH:
            break
        named = one.state.get("_non_persistent_buffers_set")
        gone = named if isinstance(named, (set, frozenset)) else ()
        for kind in KINDS:
            for name, value in one.state[kind].items():
                if value is not None and (kind != "_buffers" or name not in gone):
                    found[f"{prefix}{name}"] = value
        inside = [(name, its) for name, its in one.state["_modules"].items() if _is_module(its)]
        waiting += [(f"{prefix}{name}.", its, depth + 1) for name, its in reversed(inside)]
    raise UnsupportedError("holds modules that hold each other without end", advice="save model.state_dict()")
