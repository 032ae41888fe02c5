"""Several models of Accelerate's, each in a folder, and the optimizer of the same number with it.

Every model has its own names, which may be those of another: they begin with what the model is called, `model` and
`model_1` as where Accelerate writes them as files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.errors import UnsupportedError
from zckpt.formats.dcp.optimizer import OptimizerState, read_optimizer
from zckpt.formats.dcp.tree import Branch, ModelPart, OptimizerPart, find_models, find_optimizers, names_of_model
from zckpt.state import Checkpoint
from zckpt.torchfile import TorchFile


@dataclass(slots=True)
class Found:
    """What is in the folders, in the order of their numbers.

    Parameters
    ----------
    names : list of str
        What each model is called.
    models, optimizers, states : list
        Of the last two, as many as there are optimizers.
    """

    names: list[str]
    models: list[ModelPart]
    optimizers: list[OptimizerPart]
    states: list[OptimizerState]


def find_several(checkpoint: Checkpoint, root: Branch, pairs: Sequence[Sequence[str]], own: TorchFile | None) -> Found:
    """Return the models and optimizers of several pairs of folders.

    Parameters
    ----------
    checkpoint : Checkpoint
        Gets warnings.
    root : mapping
        By the folders' names.
    pairs : sequence of sequence of str
        Names of folders.
    own : TorchFile or None
        What zckpt has written besides.

    Raises
    ------
    UnsupportedError
        A pair has no model, or more in it than one and its optimizer.
    SourceError
        As `read_optimizer`.
    """
    found = Found(_names(own, len(pairs)), [], [], [])
    for name, folders in zip(found.names, pairs, strict=True):
        tree: Branch = {folder: root[folder] for folder in folders}
        optimizers = find_optimizers(tree)
        models = find_models(tree, optimizers, checkpoint.warnings, front=own is None)
        if len(models) != 1 or len(optimizers) > 1:
            raise UnsupportedError(
                "does not hold a model and its optimizer under each number",
                path=checkpoint.source,
                expected=f"one model and at most one optimizer in {' and '.join(folders)}",
                found=f"{len(models)} and {len(optimizers)}",
            )
        found.models.append(replace(models[0], prefix=f"{name}."))
        found.optimizers += optimizers
        for part in optimizers:
            state = read_optimizer(part, list(models[0].tensors), checkpoint.source)
            state.prefix = f"{name}."
            state.rename(names_of_model(found.models[-1], part.names))
            found.states.append(state)
    return found


def _names(own: TorchFile | None, count: int) -> list[str]:
    known = own.root.get("models") if own is not None and isinstance(own.root, Mapping) else None
    if isinstance(known, list) and len(known) == count and all(isinstance(name, str) for name in known):
        return known
    return [f"model_{number}" if number else "model" for number in range(count)]


def name_optimizers(checkpoint: Checkpoint, found: Found) -> None:
    """Say of each param group which optimizer it is of, and what the models are called."""
    checkpoint.details["models"] = found.names
    at = 0
    for number, state in enumerate(found.states):
        for group in checkpoint.param_groups[at : at + len(state.groups)]:
            group.optimizer = f"optimizer_{number}" if number else "optimizer"
        at += len(state.groups)
