"""All of a directory as a Checkpoint: models, optimizers, what zckpt wrote besides. Reads no tensor but a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.errors import DamagedFileError, UnsupportedError
from zckpt.formats.remainder import remainder_rules, restore
from zckpt.formats.torch_files.optimizer import OptimizerState, attach, looks_like_optimizer, optimizer_rules, parse
from zckpt.formats.torch_files.tensors import describe
from zckpt.formats.transformers_trainer.directory import ADAPTER_CONFIG, FULL_STEM, STATE_NAME, Directory
from zckpt.formats.transformers_trainer.model import read_json, read_model
from zckpt.formats.transformers_trainer.readings import Weights, read_names
from zckpt.state import Checkpoint, Scalar
from zckpt.storage.files import opened, read_at
from zckpt.torchfile import Tensor, TorchFile, brief, read_torchfile

FORMAT = "transformers-trainer"

SAMPLE_NBYTES = 4096
SAMPLED = 8
"""Parameters of which a sample of both moments is compared."""

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
    prefixes = [f"{one.stem}." if several else "" for one in directory.models]
    weights = [
        read_model(checkpoint, one, prefix, directory) for one, prefix in zip(directory.models, prefixes, strict=True)
    ]
    if several:
        checkpoint.details["models"] = [prefix.removesuffix(".") for prefix in prefixes]
        weights = [_prefixed(one, prefix) for one, prefix in zip(weights, prefixes, strict=True)]
    if directory.is_adapter:
        checkpoint.details["adapter"] = _adapter(directory)
    _read_optimizers(checkpoint, directory, weights, names)
    _read_state(checkpoint, directory)
    return checkpoint


def _prefixed(weights: Weights, prefix: str) -> Weights:
    shapes = {f"{prefix}{name}": shape for name, shape in weights.shapes.items()}
    places = {f"{prefix}{name}": place for name, place in weights.places.items()}
    return replace(weights, shapes=shapes, places=places)


def _adapter(directory: Directory) -> dict[str, object]:
    """Return what says how an adapter is added to its model, as far as it is not the default of nothing."""
    config = read_json(directory.path / ADAPTER_CONFIG) or {}
    return {key: value for key, value in config.items() if value not in (None, {}, [], False, "")}


def _read_optimizers(
    checkpoint: Checkpoint, directory: Directory, weights: Sequence[Weights], names: Sequence[str] | None
) -> None:
    states = [_read_optimizer(checkpoint, path) for path in directory.optimizers]
    every = sum(len(state.every_number) for state, _ in states)
    one = len(states) == 1
    left = list(names or ())
    for number, ((state, own), path) in enumerate(zip(states, directory.optimizers, strict=True)):
        count = len(state.every_number)
        given = names if one or names is None else left[:count] if len(left) == every else names
        left = left[count:] if len(left) == every and not one else left
        every -= count if not one and len(left) == every - count else 0
        model = weights[0] if len(weights) == 1 else _model_of(number, len(states), weights)
        found = read_names(state, model, own or given, path=str(path)) if model is not None else {}
        if len(found) < count and not one:
            raise UnsupportedError(
                "does not fit the model that was prepared as the same one",
                path=path,
                expected=f"state of the parameters of model {number}, in their order",
                found=f"{count} parameters, of which {len(found)} can be told",
                advice="give --names FILE: the names of all optimizers' parameters in their order, one a line",
            )
        _attach(checkpoint, state, found, path, None if one else path.stem)


def _model_of(number: int, num_optimizers: int, weights: Sequence[Weights]) -> Weights | None:
    """Return the model that an optimizer is of, by its number; of one optimizer all of them, one after the other."""
    if num_optimizers > 1:
        return weights[number] if num_optimizers == len(weights) else None
    shapes = {name: shape for one in weights for name, shape in one.shapes.items()}
    places: dict[str, int] = {}
    for one in weights:
        first = max(places.values(), default=-1) + 1
        places |= {name: first + one.places.get(name, 0) for name in one.shapes}
    return Weights(shapes, places, all(one.is_ordered for one in weights))


def _attach(
    checkpoint: Checkpoint, state: OptimizerState, found: Mapping[int, str], path: Path, optimizer: str | None
) -> None:
    """Give parameters their state, and say whose is not known."""
    before = len(checkpoint.param_groups)
    attach(checkpoint, state, str(path), known=found)
    for group in checkpoint.param_groups[before:]:
        group.optimizer = optimizer or group.optimizer
    for name in found.values() if before else ():
        checkpoint.parameters[name].group = (checkpoint.parameters[name].group or 0) + before
    if not state.recorded_names:
        checkpoint.is_numbered = True
    if len(found) < len(state.every_number):
        checkpoint.warnings.append(f"{path.name}: {NAMES_ADVICE}")


def _read_optimizer(checkpoint: Checkpoint, path: Path) -> tuple[OptimizerState, list[str] | None]:
    """Return an optimizer's state by number, and the names of its parameters where the file goes by names."""
    file = read_torchfile(path)
    root = file.root
    if not isinstance(root, dict) or not looks_like_optimizer(root):
        raise DamagedFileError(
            "unexpected content", path=path, expected="an optimizer's state dict", found=brief(root, 60)
        )
    checkpoint.files.append(describe(file, "optimizer", rules=optimizer_rules()))
    names = _names_in(root)
    if names is None:
        return parse(root, str(path)), None
    state = parse(_numbered(root, names, path), str(path))
    if (path.parent / f"{FULL_STEM}.bin").is_file() and _moments_are_one(state, file):
        checkpoint.warnings.append(
            f"{path.name}: exp_avg and exp_avg_sq are the same bit for bit: FSDP1 on CPU gathers all state into one "
            f"buffer, and has saved the last of it under every name; the first moments are lost"
        )
    return state, names


def _names_in(root: Mapping[object, object]) -> list[str] | None:
    """Return the names of an optimizer's parameters, where its groups list names (FSDP, FULL_STATE_DICT)."""
    groups = root["param_groups"]
    members = [group.get("params") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    every = [name for one in members if isinstance(one, (list, tuple)) for name in one]
    return every if every and all(isinstance(name, str) for name in every) else None


def _numbered(root: Mapping[object, object], names: Sequence[str], path: Path) -> dict[object, object]:
    """Return a state dict by numbers of one that goes by names."""
    number_of = {name: number for number, name in enumerate(names)}
    state, groups = root["state"], root["param_groups"]
    strange = [name for name in state if name not in number_of] if isinstance(state, dict) else [state]
    if strange or len(number_of) != len(names) or not isinstance(state, dict) or not isinstance(groups, list):
        raise DamagedFileError("state of a parameter that is in no group", path=path, found=brief(strange, 60))
    numbered = [{**group, "params": [number_of[name] for name in group["params"]]} for group in groups]
    return {"state": {number_of[name]: slots for name, slots in state.items()}, "param_groups": numbered}


def _moments_are_one(state: OptimizerState, file: TorchFile) -> bool:
    """Tell from a sample whether first and second moments are the same: squares are, where all is zero or one."""
    with opened(file.path) as descriptor:
        for first, second in _moments(state):
            nbytes = min(first.numel * first.itemsize, SAMPLE_NBYTES)
            samples = [read_at(descriptor, one.offset, nbytes, path=file.path) for one in (first, second)]
            if samples[0] != samples[1]:
                return False
            if any(samples[0]):
                return True
    return False


def _moments(state: OptimizerState) -> Iterator[tuple[Tensor, Tensor]]:
    found = 0
    for number in state.every_number:
        tensors = state.tensors(number)
        first, second = tensors.get("exp_avg"), tensors.get("exp_avg_sq")
        if first is not None and second is not None and first.numel and first.shape == second.shape:
            yield first, second
            found += 1
            if found == SAMPLED:
                return


def _read_state(checkpoint: Checkpoint, directory: Directory) -> None:
    """Read the step, and what zckpt has written besides."""
    steps = [group.state.get("step") for group in checkpoint.param_groups]
    numbers = [step.value if isinstance(step, Scalar) else step for step in steps]
    checkpoint.step = max((int(n) for n in numbers if isinstance(n, (int, float))), default=None)
    said = (read_json(directory.path / STATE_NAME) or {}).get("global_step")
    if type(said) is int:
        checkpoint.step = said
    if directory.own is not None:
        own = read_torchfile(directory.own)
        checkpoint.files.append(describe(own, "metadata", rules=remainder_rules()))
        restore(checkpoint, own.root, own)
