"""Small trainings of every optimizer family and kind of model, the same at any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.gloo import run
from tests.live import groups_of, of_all_ranks, whole
from tests.truth import bits
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer

ROWS = 12  # of a batch, for 1, 2, 3 and 4 ranks
WORDS = 11

State = dict[str, dict[str, torch.Tensor]]


class Net(nn.Module):
    """Odd sizes, a tied pair, a frozen parameter, one without elements, a buffer, and more ranks than elements."""

    def __init__(self, *, empty: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6, bias=False))
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.tensor([1.0]))
        self.none = nn.Parameter(torch.empty(0 if empty else 1, 3).fill_(0.1))
        self.fixed = nn.Parameter(torch.linspace(-1, 1, 6), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return self.head(self.body(self.words(ids)) * self.scale + self.fixed + self.none.sum())


@dataclass(frozen=True)
class Kind:
    """What is trained, and with what."""

    optimizer: str  # zero1, zero2, redundancy, adamw, sgd
    model: str = "plain"  # ddp, compile, fsdp
    dtype: torch.dtype = torch.float32

    @property
    def has_empty(self) -> bool:
        """Whether a parameter is without elements; `fully_shard` takes none."""
        return self.optimizer in ("zero1", "sgd") or (self.optimizer, self.model) == ("redundancy", "compile")

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.model}-{str(self.dtype).removeprefix('torch.')}"


BF16 = torch.bfloat16
KINDS = [
    Kind("zero1"), Kind("zero2"), Kind("zero2", dtype=BF16), Kind("zero2", "ddp"), Kind("redundancy", "ddp"),
    Kind("redundancy", "compile"), Kind("adamw", "ddp"), Kind("sgd", "compile"), Kind("adamw", "fsdp"),
]  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass
class Training:
    """A model, its optimizer and scheduler on this rank."""

    kind: Kind
    inner: nn.Module
    model: nn.Module
    optimizer: Any
    scheduler: Any

    @classmethod
    def of(cls, kind: Kind, *, seed: int = 0) -> Training:
        torch.manual_seed(seed)
        inner = Net(empty=kind.has_empty)
        if kind.dtype != torch.float32:
            inner = inner.to(kind.dtype)
        model = _wrapped(inner, kind)
        optimizer = _optimizer(kind, groups_of(inner, named=True, frozen=kind.optimizer[:4] == "zero"))
        if kind.optimizer[:4] == "zero" and kind.model == "ddp":
            optimizer.attach(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return cls(kind, inner, model, optimizer, scheduler)

    @property
    def given(self) -> dict[str, Any]:
        """What is given to `save` and `load`."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, steps: Iterable[int]) -> list[float]:
        """Train and return each step's loss over all ranks; only one rank alone traces what is compiled: it is slow."""
        with traced_if(dist.get_world_size() == 1):
            return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        ids, expected = share_of_batch(step)
        loss = nn.functional.cross_entropy(self.model(ids).float(), expected)
        if isinstance(self.optimizer, ZeroOptimizer) and self.kind.model != "ddp":
            self.optimizer.backward(loss)
        else:
            loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return mean_over_ranks(loss)

    def state(self) -> State:
        """Return everything by name, whole, on every rank, without zckpt's means to save."""
        found: State = {}
        for name, parameter in self.inner.named_parameters():
            found[name] = {"weight": whole(parameter), **slots_of(self.optimizer, name, parameter)}
        for name, buffer in self.inner.named_buffers():
            found[name] = {"weight": buffer.clone()}
        return found


def share_of_batch(step: int) -> torch.Tensor:
    """Return what this rank is given in a step, and what is expected of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(WORDS, (2, ROWS), generator=torch.Generator().manual_seed(step))
    return ids[:, rank * ROWS // world_size : (rank + 1) * ROWS // world_size]


def mean_over_ranks(loss: torch.Tensor) -> float:
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


def slots_of(optimizer: Any, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a parameter, whole, on every rank, whichever has it."""
    if isinstance(optimizer, ZeroOptimizer):
        if not parameter.requires_grad:
            return {}
        slots = ["master", *optimizer.optim.state[optimizer.groups[0].master]]
        return {slot: torch.as_tensor(optimizer.full_state(name, slot)).clone() for slot in slots}
    mine = whole(getattr(optimizer, "optim", optimizer).state.get(parameter, {}))
    if not hasattr(optimizer, "optim"):
        return mine
    return next(filter(None, of_all_ranks(mine)), {})


def compiled(model: nn.Module) -> nn.Module:
    """Compile a model, in a process that was started without the compiler."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    made = torch.compile(model, backend="eager")
    assert all(name.startswith("_orig_mod.") for name, _ in made.named_parameters())
    return made


def traced_if(traced: bool) -> Any:
    """Within this, a compiled model is called as ever, and its code is that which was compiled or the model's own."""
    return torch.compiler.set_stance("default" if traced else "force_eager")


def _wrapped(inner: nn.Module, kind: Kind) -> nn.Module:
    if kind.model == "ddp":
        return DistributedDataParallel(inner)
    if kind.model == "compile":
        return DistributedDataParallel(compiled(inner))
    if kind.model == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(inner.body, mesh=mesh)
        return fully_shard(inner, mesh=mesh)
    return inner


def _optimizer(kind: Kind, groups: list[dict[str, Any]]) -> Any:
    if kind.optimizer in ("zero1", "zero2"):
        return ZeroOptimizer(groups, torch.optim.AdamW, lr=1e-2, stage=int(kind.optimizer[-1]))
    if kind.optimizer == "redundancy":
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-2)
    if kind.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, fused=kind.model == "fsdp")  # one operation on DTensors, which are slow


def differences(found: State, expected: State) -> list[str]:
    """Return what is not bit-equal."""
    lines = [f"{name} only on one side" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        ours, its = found[name], expected[name]
        lines += [f"{slot} of {name} only on one side" for slot in ours.keys() ^ its.keys()]
        for slot in ours.keys() & its.keys():
            a, b = ours[slot], its[slot]
            if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(bits(a), bits(b)):
                lines.append(f"{slot} of {name} differs")
    return lines


def save_at(save_all: Callable[..., dict[str, list[float]]], world_size: int, directory: Path) -> tuple[Path, Any]:
    """Let ranks train and save; return where, and their losses thereafter, which are all ranks'."""
    losses = run(save_all, world_size, directory)
    assert all(one == losses[0] for one in losses)
    return directory, losses[0]
