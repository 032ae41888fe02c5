"""A ZeroRedundancyOptimizer's or DistributedOptimizer's own directory: each rank or worker writes its part.

optimizer_rank_R.pt          what the local optimizer of a rank, or of a worker, has: {state, param_groups}
model.pt, model_rank_R.pt    the model's tensors, by the first rank; or by each worker its own parameters
metadata.pt                  what these do not say: the order of names, and which worker had which parameter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zckpt.formats.remainder import VERSION
from zckpt.formats.zero_redundancy.directory import KEY, METADATA_NAME, MODEL_NAME, OWNED, rank_name
from zckpt.optim import param_groups
from zckpt.optim.distributed import DistributedOptimizer, LocalOptimizer
from zckpt.optim.model_state import bare
from zckpt.optim.param_groups import Names, remote_names
from zckpt.optim.ranks import Ranks, written_together
from zckpt.optim.states.protocol import Target
from zckpt.optim.zero_redundancy.optimizer import ZeroRedundancyOptimizer
from zckpt.storage.durable import written_directory
from zckpt.version import __version__


def save(optimizer: ZeroRedundancyOptimizer, names: Names, target: Target) -> None:
    """Write a directory together with the other ranks; see `zckpt.optim.files.save`."""
    ranks = Ranks(optimizer.process_group)
    param_groups.sync(optimizer.param_groups, optimizer.optim.param_groups)  # a scheduler may have changed them
    with written_together(target.path, ranks, overwrite=target.overwrite, owned=OWNED) as partial:
        torch.save(_without_names(optimizer.optim.state_dict()), partial / rank_name(optimizer.rank))
        if optimizer.rank == 0:
            tensors, about = _model(names, optimizer.param_groups, target.model)
            torch.save(tensors, partial / MODEL_NAME)
            about |= {"step": target.step, "metadata": dict(target.beside)}
            about[KEY] = {"world_size": optimizer.world_size, "names": names, "shapes": {}, "unnamed": []}
            torch.save(about, partial / METADATA_NAME)


def _model(
    names: Names, groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the model's tensors, and what is to be said of them."""
    trained = {
        name: p
        for ours, group in zip(names, groups, strict=True)
        for name, p in zip(ours, group["params"], strict=True)
    }
    if model is None:
        return {name: p.detach() for name, p in trained.items()}, _about({}, [], [])
    its = bare(model)
    tensors = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in its.state.items()}
    owners = {parameter: name for name, parameter in trained.items()}
    tied: dict[str, str] = {}
    frozen: list[str] = []
    for name, parameter in its.parameters.items():
        owner = owners.setdefault(parameter, name)
        if owner != name:
            tied[name] = owner
        elif name not in trained:
            frozen.append(name)
    return tensors, _about(tied, frozen, [name for name in tensors if name not in its.parameters])


def _about(tied: dict[str, str], frozen: list[str], buffers: list[str]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "origin": {"format": "zero-redundancy", "format_version": f"zckpt {__version__}"},
        "step": None,
        "loss_scale": None,
        "frozen": frozen,
        "tied": tied,
        "buffers": buffers,
        "masters": False,
        "metadata": {},
        "optimizer_metadata": {},
    }


def _without_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return {"state": state_dict["state"], "param_groups": groups}


def save_workers(optimizer: DistributedOptimizer, target: Target) -> None:
    """Let each worker write its part of a directory; see `zckpt.optim.files.save`."""
    names = remote_names(optimizer.param_groups)
    with written_directory(target.path, overwrite=target.overwrite, owned=OWNED) as partial:
        held = optimizer.call_each(
            _save_worker, [(str(partial.resolve()), rank) for rank in range(optimizer.num_workers)]
        )
        first = [sum(len(group) for group in names[:index]) for index in range(len(names))]
        shares = [[[number - start for number in mine] for mine, start in zip(one, first, strict=True)] for one in held]
        about = {**_about({}, [], []), "step": target.step, "metadata": dict(target.beside)}
        about[KEY] = {"world_size": len(held), "names": names, "shapes": {}, "unnamed": [], "held": shares}
        torch.save(about, partial / METADATA_NAME)


def _save_worker(local: LocalOptimizer, directory: str, rank: int) -> list[list[int]]:
    """Write a worker's part; return the numbers of its parameters by group."""
    with local.lock:
        torch.save(_without_names(local.optimizer.state_dict()), Path(directory) / rank_name(rank))
        names = [name for group in local.optimizer.param_groups for name in group["param_names"]]
        tensors = {name: p.detach() for name, p in zip(names, local.by_number().values(), strict=True)}
        torch.save(tensors, Path(directory) / f"model_rank_{rank}.pt")
    return local.numbers
