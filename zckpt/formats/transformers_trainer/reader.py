"""All of a directory as a Checkpoint: models, optimizers, what zckpt wrote besides. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.errors import UnsupportedError
from zckpt.formats.fsdp_rank_files.held import refuse_share
from zckpt.formats.remainder import remainder_rules, restore
from zckpt.formats.torch_files.optimizer import attach
from zckpt.formats.torch_files.state_dicts import OptimizerState, optimizer_rules, parse
from zckpt.formats.torch_files.tensors import describe
from zckpt.formats.transformers_trainer.directory import ADAPTER_CONFIG, STATE_NAME, Directory
from zckpt.formats.transformers_trainer.model import read_model
from zckpt.formats.transformers_trainer.readings import Weights, model_order, read_names
from zckpt.state import Checkpoint
from zckpt.state.order import put_in_order, tells_order
from zckpt.storage.files import read_json
from zckpt.torchfile import TorchFile, read_torchfile

FORMAT = "transformers-trainer"

NAMES_ADVICE = (
    "give --names FILE with the names of all parameters in the model's order, one a line; a program that has the model "
    "prints them with print(*dict(model.named_parameters()), sep='\\n')"
)


def read(directory: Directory, *, names: Sequence[str] | None = None) -> Checkpoint:
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
    several = len(directory.models) > 1
    own = read_torchfile(directory.own) if directory.own is not None else None
    prefixes = [f"{name}." for name in _names_of_models(directory, own)] if several else [""]
    weights = [
        read_model(checkpoint, one, prefix, directory) for one, prefix in zip(directory.models, prefixes, strict=True)
    ]
    if several:
        checkpoint.details["models"] = [prefix.removesuffix(".") for prefix in prefixes]
        weights = [_prefixed(one, prefix) for one, prefix in zip(weights, prefixes, strict=True)]
    if directory.is_adapter:
        checkpoint.details["adapter"] = _adapter(directory)
    _read_optimizers(checkpoint, directory, weights, names, prefixes)
    if len(weights) == 1 and directory.optimizers:
        _arrange(checkpoint, model_order(weights[0]))
        if names is not None and tells_order(checkpoint, names):
            put_in_order(checkpoint, names)
    _read_state(checkpoint, directory, own)
    return checkpoint


def _names_of_models(directory: Directory, own: TorchFile | None) -> list[str]:
    """Return what several models are called: as their files are, unless zckpt has written what they were before."""
    known = own.root.get("models") if own is not None and isinstance(own.root, dict) else None
    if isinstance(known, list) and len(known) == len(directory.models) and all(isinstance(one, str) for one in known):
        return known
    return [one.stem for one in directory.models]


def _arrange(checkpoint: Checkpoint, order: Sequence[str]) -> None:
    """Put parameters in the model's order, which files of safetensors do not have: other formats number them by it."""
    every = checkpoint.parameters
    checkpoint.parameters = {name: every[name] for name in (*order, *every) if name in every}


def _prefixed(weights: Weights, prefix: str) -> Weights:
    shapes = {f"{prefix}{name}": shape for name, shape in weights.shapes.items()}
    places = {f"{prefix}{name}": place for name, place in weights.places.items()}
    return replace(weights, shapes=shapes, places=places)


def _adapter(directory: Directory) -> dict[str, object]:
    """Return what says how an adapter is added to its model, as far as it is not the default of nothing."""
    config = read_json(directory.path / ADAPTER_CONFIG) or {}
    return {key: value for key, value in config.items() if value not in (None, {}, [], False, "")}


def _read_optimizers(
    checkpoint: Checkpoint,
    directory: Directory,
    weights: Sequence[Weights],
    names: Sequence[str] | None,
    prefixes: Sequence[str],
) -> None:
    """Read all optimizers, and give the models' parameters their state."""
    states = [_read_optimizer(checkpoint, path) for path in directory.optimizers]
    counts = [len(state.every_number) for state in states]
    found: list[dict[int, str]] = []
    for number, (state, path) in enumerate(zip(states, directory.optimizers, strict=True)):
        own = sum(counts[:number])
        is_cut = len(states) > 1 and names is not None and len(names) == sum(counts)
        given = names[own : own + counts[number]] if is_cut and names is not None else names
        model = _joined(weights) if is_cut else _model_of(number, len(states), weights)
        given = given or _recorded(state, model, prefixes[number] if len(prefixes) == len(states) else "")
        found.append(read_names(state, model, given, path=str(path)) if model is not None else {})
        if len(found[-1]) < counts[number] and len(states) > 1:
            raise UnsupportedError(
                "does not fit the model that was prepared as the same one",
                path=path,
                expected=f"state of the parameters of model {number} of {len(weights)}, in their order",
                found=f"{counts[number]} parameters, of which {len(found[-1])} can be told",
                advice="give --names FILE: the names of all optimizers' parameters in their order, one a line",
            )
    if states:
        _attach(checkpoint, directory.optimizers, states, found, is_adapter=directory.is_adapter)


def _attach(
    checkpoint: Checkpoint,
    paths: Sequence[Path],
    states: Sequence[OptimizerState],
    found: Sequence[Mapping[int, str]],
    *,
    is_adapter: bool,
) -> None:
    """Give parameters their state, and say whose is not known."""
    if len(states) == 1:
        attach(checkpoint, states[0], str(paths[0]), certain=found[0])
    for state, path, certain in zip(states, paths, found, strict=True) if len(states) > 1 else ():
        _attach_further(checkpoint, state, path, certain)
    checkpoint.is_numbered = not all(state.recorded_names for state in states)
    if any(len(certain) < len(state.every_number) for state, certain in zip(states, found, strict=True)):
        base = "put config.json of the model that the adapter is added to there, or " if is_adapter else ""
        checkpoint.warnings.append(f"{paths[0].name}: {base}{NAMES_ADVICE}")


def _attach_further(checkpoint: Checkpoint, state: OptimizerState, path: Path, certain: Mapping[int, str]) -> None:
    """Attach one optimizer of several, each of which has a file of its own."""
    before = len(checkpoint.param_groups)
    attach(checkpoint, state, str(path), certain=certain)
    for group in checkpoint.param_groups[before:]:
        group.optimizer = path.stem
    for name in certain.values() if before else ():
        checkpoint.parameters[name].group = (checkpoint.parameters[name].group or 0) + before


def _model_of(number: int, num_optimizers: int, weights: Sequence[Weights]) -> Weights | None:
    """Return the model that an optimizer is of, by its number; of one optimizer all of them, one after the other."""
    if num_optimizers == len(weights):
        return weights[number]
    return _joined(weights) if num_optimizers == 1 else None


def _joined(weights: Sequence[Weights]) -> Weights:
    """Return several models as one, one after the other."""
    shapes = {name: shape for one in weights for name, shape in one.shapes.items()}
    places: dict[str, int] = {}
    for one in weights:
        first = max(places.values(), default=-1) + 1
        places |= {name: first + one.places.get(name, 0) for name in one.shapes}
    return Weights(shapes, places, all(one.is_ordered for one in weights))


def _read_optimizer(checkpoint: Checkpoint, path: Path) -> OptimizerState:
    file = read_torchfile(path)
    refuse_share(file)
    checkpoint.files.append(describe(file, "optimizer", rules=optimizer_rules()))
    return parse(file.root, str(path))


def _recorded(state: OptimizerState, model: Weights | None, prefix: str) -> list[str] | None:
    """Return the names in the file of one of several optimizers, which are those that the bare model has."""
    found = [f"{prefix}{name}" for name in state.recorded_names] if prefix else []
    whole = len(found) == len(state.every_number) and model is not None and model.shapes.keys() >= set(found)
    return found if found and whole else None


def _read_state(checkpoint: Checkpoint, directory: Directory, own: TorchFile | None) -> None:
    """Read the step, and what zckpt has written besides."""
    checkpoint.step = checkpoint.most_steps
    said = (read_json(directory.path / STATE_NAME) or {}).get("global_step")
    if type(said) is int:
        checkpoint.step = said
    if own is not None:
        checkpoint.files.append(describe(own, "metadata", rules=remainder_rules()))
        restore(checkpoint, own.root, own)
