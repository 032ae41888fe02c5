"""What is read of a checkpoint, held against the live objects that were saved, or against what it was made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import zckpt
from tests.logical import assert_same_tree
from zckpt.formats.account import take_inventory

Optimizers = torch.optim.Optimizer | Mapping[str | None, torch.optim.Optimizer]
"""One, or several by what the checkpoint calls them."""


def assert_holds(
    source: Path | str | zckpt.OpenedCheckpoint, model, optimizers: Optimizers | None = None, prefix=""
) -> zckpt.OpenedCheckpoint:
    """Hold what is read against a live model and its optimizers, bit for bit, and nothing is left out.

    The model's tensors, all state of each parameter and no other, and the parameters and settings of each group.
    """
    checkpoint = source if isinstance(source, zckpt.OpenedCheckpoint) else zckpt.open(source)
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert_same_tree(checkpoint.read(prefix + name, "weight"), value, name)
    names = {parameter: prefix + name for name, parameter in model.named_parameters()}
    by_name = {None: optimizers} if isinstance(optimizers, torch.optim.Optimizer) else optimizers or {}
    for called, optimizer in by_name.items():
        for group in optimizer.param_groups:
            listed = [names[parameter] for parameter in group["params"]]
            [mine] = [one for one in checkpoint.param_groups if one.parameters == listed]
            assert mine.optimizer == called
            for key in group.keys() - {"params", "param_names"}:
                found = mine.hyperparameters[key]
                assert getattr(found, "value", found) == group[key], key
            for parameter in group["params"]:
                assert_state(checkpoint, names[parameter], optimizer.state.get(parameter, {}))
    assert take_inventory(checkpoint).left_out == []
    return checkpoint


def assert_state(checkpoint, name, state: Mapping[str, Any]):
    """Hold all that is read of a parameter besides weight and master against the tensors of its state."""
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert {*checkpoint.owner(name).slots} - {"weight", "master"} == tensors.keys(), name
    for slot, value in tensors.items():
        assert_same_tree(checkpoint.read(name, slot), value, f"{slot}/{name}")


def assert_goes_on(source, model, optimizers, again, others):
    """Load into another model and its optimizers: then they hold what the live ones do."""
    zckpt.load(source, model=again, optimizer=others)
    for mine, its in zip(model.parameters(), again.parameters(), strict=True):
        assert_same_tree(its, mine)
        for optimizer, other in zip(_each(optimizers), _each(others), strict=True):
            assert_same_tree(dict(other.state.get(its, {})), dict(optimizer.state.get(mine, {})))


def _each(optimizers) -> list[torch.optim.Optimizer]:
    if isinstance(optimizers, dict):
        return [one for _, one in sorted(optimizers.items())]
    return optimizers if isinstance(optimizers, list) else [optimizers]


def converted(source: Path | str | zckpt.OpenedCheckpoint, target, to, **options) -> Path:
    """Convert, and find no difference."""
    zckpt.convert(source, target, to=to, **options)
    assert zckpt.diff(source, target).equal
    return Path(target)


def edit_json(path: Path, change: Callable[[Any], object]):
    """Change what a JSON file holds in place."""
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
