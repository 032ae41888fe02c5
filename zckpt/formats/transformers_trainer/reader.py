"""All of a directory as a Checkpoint: models, optimizers, what zckpt wrote besides. Reads no tensor.

Files of safetensors have their tensors sorted by type and name. Shards are filled in the model's order, but for a
tensor that is larger than a shard may be: that has one to itself, with the number that was next. Torch files are in
the model's order. But transformers 5 sorts what it saves of a model that it had loaded: an order in which the names are
sorted tells nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress, permutations
from pathlib import Path

from zckpt.errors import SourceError, UnsupportedError, about, listed
from zckpt.evidence import MOST_PERMUTED, may_be_trained
from zckpt.evidence.order import put_in_order, tells_order
from zckpt.formats import lerobot
from zckpt.formats.assets import CONFIG_NAME
from zckpt.formats.remainder import models_of_optimizers, names_of_models, restore_from
from zckpt.formats.safetensors.file import (
    SHARD,
    add_file,
    aliases_in,
    indexed_files,
    read_header,
    shards_in,
    take_index,
)
from zckpt.formats.torch_files.attach import attach
from zckpt.formats.torch_files.content import can_have
from zckpt.formats.torch_files.optimizer import BESIDE, OPTIMIZERS, OptimizerState
from zckpt.formats.torch_files.reader import add_model, read_optimizer
from zckpt.formats.transformers_trainer.architectures import architecture, is_converted
from zckpt.formats.transformers_trainer.directory import ADAPTER_STEM, STATE_NAME, Directory, ModelFiles, Part
from zckpt.formats.transformers_trainer.readings import Weights, model_order, read_names
from zckpt.state import Checkpoint, GivenNames, alias_of
from zckpt.state.names import renamed
from zckpt.storage.files import read_json
from zckpt.torchfile import read_torchfile


def read_model(checkpoint: Checkpoint, files: ModelFiles, prefix: str, directory: Directory) -> Weights:
    """Give a checkpoint the tensors of one model; return what its files tell of its parameters.

    `prefix`: put before all names, where there are several models. Raises SourceError: a file is damaged or missing, or
    the index says otherwise than the files.
    """
    paths = indexed_files(files.path) if files.is_indexed else [files.path]
    if SHARD.fullmatch(files.path.name):
        paths = shards_in(files.path.parent, files.path.suffix[1:])
    one = Checkpoint(str(directory.path), "")
    place_of: dict[str, int] = {}
    for number, path in enumerate(paths):
        (_read_safetensors if path.suffix == ".safetensors" else add_model)(one, path)
        for name in (*one.parameters, *one.buffers):
            place_of.setdefault(name, number)
    if files.is_indexed:
        take_index(one, files.path, {name: paths[number].name for name, number in place_of.items()})
    renamed(one, {name: f"{prefix}{name}" for name in place_of})
    weights = _weights(one, {f"{prefix}{name}": place for name, place in place_of.items()}, paths)
    config = read_json(directory.path / CONFIG_NAME)
    if config is None and directory.is_adapter:  # that of the model it is added to
        base = directory.adapter_config.get("base_model_name_or_path")
        if isinstance(base, str) and "\0" not in base:
            config = read_json(directory.path / base / CONFIG_NAME)
    weights.known = architecture((config or {}).get("model_type"))
    weights.is_converted = files.stem == "model" and is_converted(config)
    one.metadata = {f"{prefix}{key}": value for key, value in one.metadata.items()}
    _add(checkpoint, one)
    return weights


def _add(checkpoint: Checkpoint, one: Checkpoint) -> None:
    """Give a checkpoint all that was read of a model by itself."""
    checkpoint.files += one.files
    checkpoint.claims |= one.claims
    checkpoint.metadata |= one.metadata
    checkpoint.parameters |= one.parameters
    checkpoint.buffers |= one.buffers


def _with_part(checkpoint: Checkpoint, weights: Weights, part: Part, directory: Directory) -> Weights:
    """Give a checkpoint what one more file has of its model, and return what both tell; a copy is left to others."""
    found = Checkpoint(checkpoint.source, "")
    own = read_model(found, ModelFiles(part.path.stem, part.path), part.prefix, directory)
    if found.parameters.keys() & checkpoint.parameters.keys() or found.buffers.keys() & checkpoint.buffers.keys():
        return weights
    _add(checkpoint, found)
    if part.is_last:
        both = _joined([weights, own])
        return replace(weights, shapes=both.shapes, places=both.places, is_ordered=both.is_ordered)
    return replace(weights, shapes=weights.shapes | own.shapes, is_ordered=False)


def _weights(one: Checkpoint, place_of: Mapping[str, int], paths: list[Path]) -> Weights:
    shapes = {p.name: p.shape for p in one.owners}
    counts = Counter(place_of.values())
    shared = [name for name in shapes if counts[place_of[name]] > 1 or len(paths) == 1]
    if all(path.suffix != ".safetensors" for path in paths):
        if shared == sorted(shared):
            return Weights(shapes)
        known = frozenset(shared)
        return Weights(shapes, {name: at for at, name in enumerate(shapes) if name in known}, shared == [*shapes])
    places = {name: place_of[name] for name in shared}
    in_turn = [places[name] for name in sorted(shared)]
    return Weights(shapes, {} if in_turn == sorted(in_turn) else places)


def _read_safetensors(one: Checkpoint, path: Path) -> None:
    slots, texts = add_file(one, path)
    dtypes = {name: slot.dtype for name, slot in slots.items()}
    for name, slot in slots.items():
        one.place(name, slot, trained=may_be_trained(name, dtypes))
    for alias, owner in aliases_in(texts, slots).items():
        if owner in one.parameters:
            one.parameters[alias] = alias_of(one.parameters[owner], alias)


FORMAT = "transformers-trainer"

NAMES_ADVICE = (
    "give --names FILE with the names of all parameters in the model's order, one a line; a program that has the model "
    "prints them with print(*dict(model.named_parameters()), sep='\\n')"
)


def read(directory: Directory, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of a directory.

    Parameters
    ----------
    directory : Directory
    names : sequence of str, optional
        Of the optimizer's parameters in its order, or of the model's in the model's order; of several models with
        their prefixes.

    Raises
    ------
    SourceError
        Files are damaged or missing, or it is not known which model an optimizer is of.
    UsageError
        `names` do not fit.
    """
    checkpoint = Checkpoint(str(directory.path), FORMAT)
    own = read_torchfile(directory.own) if directory.own is not None else None
    prefixes = [""]
    if len(directory.models) > 1:
        models = names_of_models(own, [one.stem for one in directory.models])
        checkpoint.details["models"], prefixes = models, [f"{name}." for name in models]
    named = zip(directory.models, prefixes, strict=True)
    weights = [read_model(checkpoint, files, prefix, directory) for files, prefix in named]
    for part in directory.parts:
        weights = [_with_part(checkpoint, weights[0], part, directory)]
    if directory.is_adapter:  # what says how it is added to its model, as far as it is not the default of nothing
        told = {key: value for key, value in directory.adapter_config.items() if value not in (None, {}, [], False, "")}
        checkpoint.details["adapter"] = told
    if others := [one.name for one in directory.other_adapters]:
        checkpoint.warnings.append(f"adapters in folders are not read: {listed(others)}; give each folder by itself")
    if directory.optimizers:
        model_of = models_of_optimizers(own, len(directory.optimizers))
        _read_optimizers(checkpoint, directory, weights, names, prefixes, model_of)
    if len(weights) == 1 and directory.optimizers:
        every = checkpoint.parameters  # which files of safetensors do not have in order; other formats go by it
        checkpoint.parameters = {name: every[name] for name in (*model_order(weights[0]), *every) if name in every}
        if names is not None and tells_order(checkpoint, names):
            put_in_order(checkpoint, names)
    said = (read_json(directory.path / STATE_NAME) or {}).get("global_step")
    checkpoint.step = said if type(said) is int else checkpoint.most_steps
    if own is not None:
        restore_from(checkpoint, own)
    return checkpoint


def _may_be_of(folder: Path, states: Sequence[OptimizerState]) -> bool:
    """Tell whether optimizers may be of an adapter, by its shapes, where it is in safetensors."""
    try:
        slots, _, _ = read_header(folder / f"{ADAPTER_STEM}.safetensors")
    except SourceError:
        return True
    shapes = {name: slot.shape for name, slot in slots.items()}
    return any(can_have(shapes, [one]) for one in states)


def _read_optimizers(
    checkpoint: Checkpoint,
    directory: Directory,
    weights: Sequence[Weights],
    names: GivenNames,
    prefixes: Sequence[str],
    model_of: Sequence[int],
) -> None:
    """Read all optimizers, and give the models' parameters their state."""
    paths = directory.optimizers
    own = [not is_average for is_average in directory.averages]
    weights, prefixes = list(compress(weights, own)), list(compress(prefixes, own))
    if names is not None and len(prefixes) == 1:  # the model's own, as its program prints them
        names = [full if (full := f"{prefixes[0]}{name}") in weights[0].shapes else name for name in names]
    states = [
        (lerobot.read_optimizer if path.suffix == ".safetensors" else read_optimizer)(checkpoint, path)
        for path in paths
    ]
    several, counts = len(states) > 1, [len(state.every_number) for state in states]
    is_cut = several and names is not None and len(names) == sum(counts)
    placed = directory.models[0].path.parent == directory.path  # folders have no order
    models = _models_of(states, weights, is_cut=is_cut, placed=placed)
    if len(model_of) == len(weights) and not is_cut:
        models = [weights[at] for at in model_of]
    others = names is None and any(_may_be_of(one, states) for one in directory.other_adapters)
    if others:
        models = [None] * len(states)
    fronts = {id(one): prefix for one, prefix in zip(weights, prefixes, strict=True)}
    is_open = False
    beside: dict[str, dict[str, object]] = {}
    for number, (state, path, model) in enumerate(zip(states, paths, models, strict=True)):
        given = names
        if is_cut and names is not None:
            given = names[sum(counts[:number]) : sum(counts[: number + 1])]
        given = given or (_recorded(state, model, fronts.get(id(model), "")) if len(weights) > 1 else None)
        with about(path):
            if not several and 1 < len(weights) <= MOST_PERMUTED and given is None:
                found = _in_any_order(state, weights, placed=placed)
            else:
                found = read_names(state, model, given) if model is not None else {}
        if several and len(found) < counts[number]:
            if names is not None or not any(can_have(one.shapes, [state]) for one in weights):
                raise UnsupportedError(
                    "does not match a model",
                    path=path,
                    expected=f"state of the parameters of one of {len(weights)} models, in their order",
                    found=f"{counts[number]} parameters, of which {len(found)} can be identified",
                    advice="give --names FILE: the names of all optimizers' parameters in their order, one per line",
                )
            found = {}  # it may be another model's, after all
        before = len(checkpoint.param_groups)
        attach(checkpoint, state, str(path), certain=found, front=f"{path.stem}." * several)
        is_open = is_open or len(found) < counts[number]
        if several:
            for group in checkpoint.param_groups[before:]:
                group.optimizer = path.stem
            if state.rest:
                beside[path.stem] = {BESIDE: checkpoint.optimizer_metadata.pop(BESIDE)}
    checkpoint.optimizer_metadata |= {OPTIMIZERS: beside} if beside else {}
    checkpoint.is_numbered = not all(state.recorded_names for state in states)
    if is_open and several:
        checkpoint.warnings.append(
            "give --names FILE: the names of all optimizers' parameters in their order, one a line"
        )
    elif is_open:
        base = "put config.json of the model that the adapter is added to there, or " if directory.is_adapter else ""
        base = "add --map=transformers, or " if any(one.is_converted for one in weights) else base
        base = "may be of an adapter in a folder; " if others else base
        checkpoint.warnings.append(f"{paths[0].name}: {base}{NAMES_ADVICE}")


def _models_of(
    states: Sequence[OptimizerState], weights: Sequence[Weights], *, is_cut: bool, placed: bool
) -> Sequence[Weights | None]:
    """Return the model of each optimizer: that of its number, or else the only one that can have it, and no other.

    `is_cut`: the user has named all parameters; then, and of one optimizer, that is all models as one.
    """
    if is_cut or len(states) == 1:
        whole = weights[0] if len(weights) == 1 else _joined(weights)
        return [whole if placed or len(weights) == 1 else replace(whole, places={})] * len(states)
    found: list[Weights | None] = []
    for number, state in enumerate(states):
        fitting = [one for one in weights if can_have(one.shapes, [state], named=False)]
        same = [one for one in fitting if len(states) == len(weights) and one is weights[number]]
        found.append(next(iter(same or (fitting if len(fitting) == 1 else [])), None))
    return [one if sum(one is other for other in found) == 1 else None for one in found]


def _in_any_order(state: OptimizerState, weights: Sequence[Weights], *, placed: bool) -> dict[int, str]:
    """Return the names that are certain of an optimizer of several models, one after another in any order.

    Of models that are alike none are: each may be in the other's place.
    """
    forms = {id(one): tuple(one.shapes.values()) for one in weights}
    alike = {name for one in weights if [*forms.values()].count(forms[id(one)]) > 1 for name in one.shapes}
    orders = {tuple(forms[id(one)] for one in order): order for order in permutations(weights)}
    common: dict[int, str] | None = None
    for order in orders.values():
        whole = _joined(order)
        found = read_names(state, whole if placed else replace(whole, places={}))
        if found:
            common = found if common is None else dict(common.items() & found.items())
    return {number: name for number, name in (common or {}).items() if name not in alike}


def _joined(weights: Sequence[Weights]) -> Weights:
    """Return several models as one, one after the other."""
    shapes = {name: shape for one in weights for name, shape in one.shapes.items()}
    places: dict[str, int] = {}
    for one in weights:
        first = max(places.values(), default=-1) + 1
        places |= {name: first + one.places.get(name, 0) for name in one.shapes}
    return Weights(shapes, places, all(one.is_ordered for one in weights))


def _recorded(state: OptimizerState, model: Weights | None, prefix: str) -> list[str] | None:
    """Return the names in the file of an optimizer: those that the bare model has, or of several models full ones."""
    found = [f"{prefix}{name}" for name in state.recorded_names]
    whole = len(found) == len(state.every_number) and model is not None and model.shapes.keys() >= set(found)
    return found if found and whole else None
