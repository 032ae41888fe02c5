"""All of a directory as a Checkpoint: models, optimizers, what zckpt wrote besides. Reads no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.errors import UnsupportedError, about
from zckpt.evidence.order import put_in_order, tells_order
from zckpt.formats.assets import ADAPTER_CONFIG
from zckpt.formats.remainder import remainder_rules, restore
from zckpt.formats.torch_files.optimizer import attach
from zckpt.formats.torch_files.reader import read_optimizer
from zckpt.formats.torch_files.state_dicts import OptimizerState
from zckpt.formats.torch_files.tensors import describe
from zckpt.formats.transformers_trainer.directory import STATE_NAME, Directory
from zckpt.formats.transformers_trainer.model import read_model
from zckpt.formats.transformers_trainer.readings import Weights, model_order, read_names
from zckpt.state import Checkpoint
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
    own = read_torchfile(directory.own) if directory.own is not None else None
    prefixes = [""]
    if len(directory.models) > 1:
        models = checkpoint.details["models"] = _names_of_models(directory, own)
        prefixes = [f"{name}." for name in models]
    weights: list[Weights] = []
    for files, prefix in zip(directory.models, prefixes, strict=True):
        one = read_model(checkpoint, files, prefix, directory)
        shapes = {f"{prefix}{name}": shape for name, shape in one.shapes.items()}
        places = {f"{prefix}{name}": place for name, place in one.places.items()}
        weights.append(replace(one, shapes=shapes, places=places))
    if directory.is_adapter:  # what says how it is added to its model, as far as it is not the default of nothing
        config = read_json(directory.path / ADAPTER_CONFIG) or {}
        told = {key: value for key, value in config.items() if value not in (None, {}, [], False, "")}
        checkpoint.details["adapter"] = told
    if directory.optimizers:
        _read_optimizers(checkpoint, directory, weights, names, prefixes)
    if len(weights) == 1 and directory.optimizers:
        every = (
            checkpoint.parameters
        )  # which files of safetensors do not have in order: other formats number them by it
        checkpoint.parameters = {name: every[name] for name in (*model_order(weights[0]), *every) if name in every}
        if names is not None and tells_order(checkpoint, names):
            put_in_order(checkpoint, names)
    checkpoint.step = checkpoint.most_steps
    said = (read_json(directory.path / STATE_NAME) or {}).get("global_step")
    if type(said) is int:
        checkpoint.step = said
    if own is not None:
        checkpoint.files.append(describe(own, "metadata", rules=remainder_rules()))
        restore(checkpoint, own.root, own)
    return checkpoint


def _names_of_models(directory: Directory, own: TorchFile | None) -> list[str]:
    """Return what several models are called: as their files are, unless zckpt has written what they were before."""
    known = own.root.get("models") if own is not None and isinstance(own.root, dict) else None
    if isinstance(known, list) and len(known) == len(directory.models) and all(isinstance(one, str) for one in known):
        return known
    return [one.stem for one in directory.models]


def _read_optimizers(
    checkpoint: Checkpoint,
    directory: Directory,
    weights: Sequence[Weights],
    names: Sequence[str] | None,
    prefixes: Sequence[str],
) -> None:
    """Read all optimizers, and give the models' parameters their state."""
    paths = directory.optimizers
    states = [read_optimizer(checkpoint, path) for path in paths]
    counts = [len(state.every_number) for state in states]
    is_cut = len(states) > 1 and names is not None and len(names) == sum(counts)
    is_open = False
    for number, (state, path) in enumerate(zip(states, paths, strict=True)):
        model = _joined(weights) if is_cut or len(states) == 1 else None
        if not is_cut and len(states) == len(weights):
            model = weights[number]
        given = names
        if is_cut and names is not None:
            given = names[sum(counts[:number]) : sum(counts[: number + 1])]
        given = given or _recorded(state, model, prefixes[number] if len(prefixes) == len(states) else "")
        with about(path):
            found = read_names(state, model, given) if model is not None else {}
        if len(found) < counts[number] and len(states) > 1:
            raise UnsupportedError(
                "does not fit the model that was prepared as the same one",
                path=path,
                expected=f"state of the parameters of model {number} of {len(weights)}, in their order",
                found=f"{counts[number]} parameters, of which {len(found)} can be told",
                advice="give --names FILE: the names of all optimizers' parameters in their order, one a line",
            )
        before = len(checkpoint.param_groups)
        attach(checkpoint, state, str(path), certain=found)
        is_open = is_open or len(found) < counts[number]
        if len(states) > 1:
            for group in checkpoint.param_groups[before:]:
                group.optimizer = path.stem
            for name in found.values():
                checkpoint.parameters[name].group = (checkpoint.parameters[name].group or 0) + before
    checkpoint.is_numbered = not all(state.recorded_names for state in states)
    if is_open:
        base = "put config.json of the model that the adapter is added to there, or " if directory.is_adapter else ""
        checkpoint.warnings.append(f"{paths[0].name}: {base}{NAMES_ADVICE}")


def _joined(weights: Sequence[Weights]) -> Weights:
    """Return several models as one, one after the other."""
    shapes = {name: shape for one in weights for name, shape in one.shapes.items()}
    places: dict[str, int] = {}
    for one in weights:
        first = max(places.values(), default=-1) + 1
        places |= {name: first + one.places.get(name, 0) for name in one.shapes}
    return Weights(shapes, places, all(one.is_ordered for one in weights))


def _recorded(state: OptimizerState, model: Weights | None, prefix: str) -> list[str] | None:
    """Return the names in the file of one of several optimizers, which are those that the bare model has."""
    found = [f"{prefix}{name}" for name in state.recorded_names] if prefix else []
    whole = len(found) == len(state.every_number) and model is not None and model.shapes.keys() >= set(found)
    return found if found and whole else None
