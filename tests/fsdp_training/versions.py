"""What ranks do with torch of any version: they save with its DCP, or with zckpt, and go on from what is there.

Names that a version has elsewhere are put where newer ones have them, and gloo reduces and scatters where it could
not. Neither changes what is written.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.fsdp_training import training
from tests.fsdp_training.training import STEPS, Block, load_by_dcp, made, states, step, truth

AFTER = 2


def at_home() -> None:
    """Put names where torch 2.6 has them, and let gloo do what it learned later."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # a package before it had the names
    from torch.distributed import _tensor

    for name in ("DTensor", "Replicate", "Shard", "distribute_tensor"):
        if not hasattr(torch.distributed.tensor, name):
            setattr(torch.distributed.tensor, name, getattr(_tensor, name))
    with suppress(ImportError):  # before torch 2.3, which has no FSDP2
        if not hasattr(torch.distributed.fsdp, "fully_shard"):
            from torch.distributed._composable import fsdp

            torch.distributed.fsdp.fully_shard = fsdp.fully_shard
    group = dist.group.WORLD
    try:
        dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(dist.get_world_size()), group=group)
    except (RuntimeError, ValueError):
        dist.reduce_scatter_tensor = _reduce_scatter


def _reduce_scatter(output: torch.Tensor, given: torch.Tensor, *rest: Any, **others: Any) -> None:
    op, group = (*rest, None, None)[:2]
    op, group = others.get("op", op), others.get("group", group)
    whole = given.clone()
    average = op is not None and op == dist.ReduceOp.AVG
    dist.all_reduce(whole, op=dist.ReduceOp.SUM if average or op is None else op, group=group)
    whole = whole / dist.get_world_size(group) if average else whole
    output.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].reshape(output.shape))


class Pieces(nn.Module):
    """Parameters that are DTensors, cut unevenly, without FSDP; their loss is the sum of what they are."""

    def __init__(self, world_size: int, seed: int) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        torch.manual_seed(seed)
        self.layers = nn.ModuleList([Block(6), Block(6)])
        self.mesh, self.placements = init_device_mesh("cpu", (world_size,)), [Shard(0)]
        for module in list(self.modules()):
            for name, one in list(module.named_parameters(recurse=False)):
                whole = distribute_tensor(one.detach(), self.mesh, self.placements)
                module.register_parameter(name, nn.Parameter(whole))

    def step(self, optimizer: torch.optim.Optimizer, seed: int) -> float:
        """Step with gradients of noise."""
        from torch.distributed.tensor import distribute_tensor

        noise = torch.Generator().manual_seed(seed)
        for one in self.parameters():
            one.grad = distribute_tensor(torch.randn(one.shape, generator=noise), self.mesh, self.placements)
        optimizer.step()
        return float(sum(one.detach().full_tensor().double().sum() for one in self.parameters()))


def _made(wrap: str, world_size: int, seed: int) -> tuple[Any, Any, Any]:
    if wrap != "zckpt":
        at_home()
    if wrap == "dtensors":
        model: Any = Pieces(world_size, seed)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), foreach=False)
        return model, optimizer, None
    if wrap != "zckpt":
        model, optimizer, scheduler = made(wrap, world_size, seed)
        for one in model.parameters():
            one.grad = torch.zeros_like(one) if one.requires_grad else None
        optimizer.step()  # so that there is state of all parameters: DCP makes as much to load into
        optimizer.zero_grad()
        return model, optimizer, scheduler
    from zckpt.optim import ZeroOptimizer

    torch.manual_seed(seed)
    model = training.Net()
    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.01 * (seed + 1), stage=2)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _steps(model: Any, optimizer: Any, scheduler: Any, numbers: range) -> list[float]:
    if isinstance(model, Pieces):
        return [model.step(optimizer, number) for number in numbers]
    return [step(model, optimizer, scheduler, number) for number in numbers]


def saved(rank: int, world_size: int, wrap: str, folder: Path) -> Any:
    """Train and save; return the truth, and the losses of the steps after it."""
    import torch.distributed.checkpoint as dcp

    model, optimizer, scheduler = _made(wrap, world_size, 0)
    _steps(model, optimizer, scheduler, range(STEPS))
    if wrap == "zckpt":
        import zckpt

        zckpt.save(folder, model=model, optimizer=optimizer, scheduler=scheduler, step=STEPS)
        held = {f"weight/{name}": one.detach().clone() for name, one in model.state_dict().items()}
    else:
        dcp.save(states(model, optimizer), storage_writer=dcp.FileSystemWriter(folder))
        held = truth(model, optimizer)
    return held, _steps(model, optimizer, scheduler, range(STEPS, STEPS + AFTER))


def resumed(rank: int, world_size: int, wrap: str, folder: Path) -> list[float]:
    """Load into a model and an optimizer that differ in everything; return the losses of the steps after it."""
    import torch.distributed.checkpoint as dcp

    model, optimizer, scheduler = _made(wrap, world_size, 1)
    if wrap == "zckpt":
        import zckpt

        zckpt.load(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    else:
        load_by_dcp(model, optimizer, storage_reader=dcp.FileSystemReader(folder))
        if scheduler is not None:
            scheduler.last_epoch = STEPS
    return _steps(model, optimizer, scheduler, range(STEPS, STEPS + AFTER))


def rank_files_saved(rank: int, world_size: int, wrap: str, folder: Path) -> Any:
    """Do what verl does to save."""
    at_home()
    return training.train_and_save(rank, world_size, wrap, folder)


def rank_files_resumed(rank: int, world_size: int, wrap: str, folder: Path) -> list[float]:
    """Do what verl does to resume."""
    at_home()
    return training.resume(rank, world_size, wrap, folder)


WHOLE = {"a": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0), "c": torch.ones(4, 2, dtype=torch.bfloat16)}


def dtensors_saved(rank: int, world_size: int, folder: Path) -> None:
    """Save `WHOLE` as DTensors of a mesh of these ranks; of 2 copies where they are four."""
    at_home()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    copies = world_size == 4
    mesh = init_device_mesh(
        "cpu", (2, 2) if copies else (world_size,), mesh_dim_names=("ddp", "fsdp") if copies else ("fsdp",)
    )
    placements = [Replicate(), Shard(0)] if copies else [Shard(0)]
    held = {name: distribute_tensor(whole, mesh, placements) for name, whole in WHOLE.items()}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(held, folder / f"model_world_size_{world_size}_rank_{rank}.pt")
