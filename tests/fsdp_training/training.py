"""A small model, every way to wrap it, what verl writes of it, and what it holds as a whole."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.live import whole

STEPS = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Sizes that ranks cannot share evenly, fewer rows than ranks, tied, frozen and unused parameters, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.frozen = nn.Linear(6, 7, bias=False).requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList([Block(6), Block(6)])
        self.unused = nn.Linear(2, 5)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("count", torch.tensor(7))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        x = x + self.frozen(x).mean(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def placed(model: nn.Module, wrap: str, world_size: int) -> nn.Module:
    """Wrap a model as the words of `wrap` say."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    words = set(wrap.split())
    sizes = (2, world_size // 2) if {"hsdp", "tp"} & words else (world_size,)
    names = ("ddp", "fsdp") if "hsdp" in words else ("fsdp", "tp") if "tp" in words else ("fsdp",)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=None if "unnamed" in words else names)
    if "fsdp2" in words:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if "tp" in words:
            for layer in model.layers:  # type: ignore[union-attr]
                parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            mesh = mesh["fsdp"]
        columns = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % world_size == 0 else None}
        options = columns if "columns" in words else {}
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)
    units = None if "one" in words else ModuleWrapPolicy({Block, nn.Linear} if "fine" in words else {Block})
    strategy = ShardingStrategy.FULL_SHARD
    strategy = ShardingStrategy.HYBRID_SHARD if "hsdp" in words else strategy
    strategy = ShardingStrategy.NO_SHARD if "whole" in words else strategy
    strategy = ShardingStrategy.SHARD_GRAD_OP if "grad" in words else strategy
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=units,
        device_mesh=mesh if {"mesh", "hsdp"} & words and "groups" not in words else None,
        process_group=_groups(world_size) if "groups" in words else None,
        device_id=torch.device("cpu"),
        use_orig_params="orig" in words,
        sharding_strategy=strategy,
    )


def _groups(world_size: int) -> tuple[Any, Any]:
    """Return this rank's group of shards and its group of copies, as FSDP1 takes them where it has no mesh."""
    import torch.distributed as dist

    half, own = world_size // 2, dist.get_rank()
    every = [[range(half), range(half, world_size)], [range(at, world_size, half) for at in range(half)]]
    found = [[(ranks, dist.new_group(list(ranks))) for ranks in kind] for kind in every]
    shards, copies = (next(group for ranks, group in kind if own in ranks) for kind in found)
    return shards, copies


def made(wrap: str, world_size: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return model, optimizer and scheduler as verl makes them: one param group of all parameters."""
    torch.manual_seed(seed)
    net = Net()
    if "fine" in wrap:
        net.head = nn.Linear(6, 13, bias=False)  # FSDP1 has tied parameters in one unit only
    if ("fsdp2" not in wrap and "orig" not in wrap) or "trained" in wrap:
        del net.frozen  # a unit of FSDP1 is trained as a whole, or not
        net.frozen = nn.Linear(6, 7, bias=False)
    model = placed(net, wrap, world_size)
    optimizer: Any = torch.optim.AdamW
    if "adagrad" in wrap:
        optimizer = torch.optim.Adagrad  # has state from the beginning, also where a rank has no elements
    optimizer = optimizer(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, seed: int) -> float:
    """Train one step on tokens that are the same on every rank; return the loss."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 13, (4, 5), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(1))
    getattr(optimizer, "backward", torch.Tensor.backward)(loss)  # ZeRO's
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    return loss.item()


def state_context(model: nn.Module) -> Any:
    """What verl enters to save and load the state of a model."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

    if not isinstance(model, FullyShardedDataParallel):
        return nullcontext()
    return FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    )


def save(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any, folder: Path, rank: int, ranks: int
) -> None:
    """Write what verl's checkpoint manager writes."""
    folder.mkdir(parents=True, exist_ok=True)
    with state_context(model):
        torch.save(model.state_dict(), folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        if optimizer is not None:
            torch.save(optimizer.state_dict(), folder / f"optim_world_size_{ranks}_rank_{rank}.pt")
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.full((9,), rank, dtype=torch.uint8)}}
    torch.save(extra, folder / f"extra_state_world_size_{ranks}_rank_{rank}.pt")
    if not rank:
        config = {"FSDP_version": 2 if hasattr(model, "set_requires_gradient_sync") else 1, "world_size": ranks}
        (folder / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def load(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, folder: Path, rank: int, ranks: int
) -> None:
    """Do what verl's checkpoint manager does to resume."""
    with state_context(model):
        model.load_state_dict(torch.load(folder / f"model_world_size_{ranks}_rank_{rank}.pt", weights_only=False))
        state = torch.load(folder / f"optim_world_size_{ranks}_rank_{rank}.pt", weights_only=False)
        optimizer.load_state_dict(state)
    extra = torch.load(folder / f"extra_state_world_size_{ranks}_rank_{rank}.pt", weights_only=False)
    scheduler.load_state_dict(extra["lr_scheduler"])


def truth(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return whole copies of the live model's and optimizer's tensors, by `slot/name`; every rank has to call it."""
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    if not isinstance(model, FullyShardedDataParallel):
        found = {f"weight/{name}": whole(one) for name, one in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            for slot, value in optimizer.state.get(parameter, {}).items():
                found[f"{slot}/{name}"] = whole(value)
        return found
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        found = {f"weight/{name}": one.clone() for name, one in model.state_dict().items()}
        if not any("_flat_param" in name for name, _ in model.named_parameters()):
            return found | _of_pieces(model, optimizer, found)
        state = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return found | {f"{slot}/{name}": one.clone() for name, slots in state.items() for slot, one in slots.items()}


def _of_pieces(model: nn.Module, optimizer: torch.optim.Optimizer, known: dict[str, torch.Tensor]) -> Any:
    """Return the optimizer's state of a model with its own parameters, of which each rank has a piece, or none.

    torch 2.13 puts such a state together wrongly on CPU: every slot of a parameter comes out as the last.
    """
    import torch.distributed as dist

    group = model.process_group  # type: ignore[union-attr]
    pieces = {
        name.replace("_fsdp_wrapped_module.", ""): dict(optimizer.state.get(parameter, {}))
        for name, parameter in model.named_parameters()
    }
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, pieces, group=group)
    found = {}
    for name in pieces:
        slots = dict.fromkeys(slot for rank in every for slot in rank[name])
        for slot in slots:
            parts = [rank[name][slot] for rank in every if slot in rank[name]]
            shape = known[f"weight/{name}"].shape
            whole = max(parts) if parts[0].dim() == 0 else parts[0] if parts[0].shape == shape else torch.cat(parts)
            found[f"{slot}/{name}"] = (whole if whole.dim() == 0 else whole.reshape(shape)).clone()
    return found


def trained(wrap: str, world_size: int) -> tuple[Any, Any, Any]:
    model, optimizer, scheduler = made(wrap, world_size)
    for number in range(STEPS):
        step(model, optimizer, scheduler, number)
    return model, optimizer, scheduler


def truth_and_losses(model: Any, optimizer: Any, scheduler: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    held = truth(model, optimizer)
    return held, [step(model, optimizer, scheduler, STEPS + number) for number in range(2)]


def train_and_save(rank: int, world_size: int, wrap: str, folder: Path) -> Any:
    """Train and save in a rank; rank 0 returns the truth, and the losses of two steps more."""
    torch.set_num_threads(1)
    model, optimizer, scheduler = trained(wrap, world_size)
    save(model, None if "alone" in wrap else optimizer, scheduler, folder, rank, world_size)
    found = truth_and_losses(model, optimizer, scheduler)
    return found if not rank else None


def resume(rank: int, world_size: int, wrap: str, folder: Path) -> list[float]:
    """Load in a rank and return the losses of two steps."""
    torch.set_num_threads(1)
    model, optimizer, scheduler = made(wrap, world_size, seed=1)
    load(model, optimizer, scheduler, folder, rank, world_size)
    return [step(model, optimizer, scheduler, STEPS + number) for number in range(2)]


def train_and_save_freely(rank: int, world_size: int, wrap: str, folder: Path) -> Any:
    """Train and save as a program of one's own: one file for each rank, with all in it."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer, _ = trained(wrap, world_size)
    with state_context(model):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": STEPS, "args": {"lr": 0.01}}, folder / f"ckpt_rank{rank}.pt")
    held = truth(model, optimizer)
    return held if not rank else None


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what torch's DCP saves and loads, by name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load_by_dcp(model: Any, optimizer: Any, **source: Any) -> None:
    """Load as torch's documentation says, from a `checkpoint_id` or by a `storage_reader`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    found = states(model, optimizer)
    dcp.load(found, **source)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
