"""Models that are cut: in parts, a pipeline's stages, and in each of these by `fully_shard` and tensor parallelism."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zckpt
from tests import live
from tests.folders import names_in
from tests.gloo import on_ranks, run
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.errors import LayoutError, UnsupportedError, UsageError

Degrees = tuple[int, int, int]
"""Of pipeline, data and tensor parallelism."""
Found = dict[str, torch.Tensor]
Losses = dict[str, float]


class Layer(nn.Module):
    """Two matrices that are cut by different dimensions, and a norm, which no tensor-parallel plan has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 12)
        self.down = nn.Linear(12, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.down(self.up(x).tanh()))


class Part(nn.Module):
    """Some layers, under their names in the whole model; a buffer that every part has."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in numbers})
        self.register_buffer("turns", torch.zeros(3))
        for number, layer in self.layers.items():
            torch.manual_seed(int(number))
            for parameter in layer.parameters():
                nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def stages(layers: int, pp: int, stage: int) -> list[list[int]]:
    """Return the layers of each part of a stage: layer by layer in turns, two parts where a stage has some of them."""
    mine = [number for number in range(layers) if number % pp == stage]
    return [mine[:1], mine[1:]] if 1 < len(mine) < layers else [mine]


def made(layers: int, degrees: Degrees, scale: float) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return this rank's parts and an optimizer of each, as torchtitan has them; of one rank the whole model."""
    pp, _, tp = degrees
    if degrees == (1, 1, 1):
        parts: list[nn.Module] = [Part(list(range(layers)))]
    else:
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("pp", "dp", "tp"))
        parts = [Part(numbers) for numbers in stages(layers, pp, mesh["pp"].get_local_rank())]
        for part in parts:
            for layer in part.layers.values():
                if tp > 1:
                    parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                fully_shard(layer, mesh=mesh["dp"])
    with torch.no_grad():
        for part in parts:
            for parameter in part.parameters():
                parameter.mul_(scale)
            for number, buffer in enumerate(part.buffers()):
                buffer.fill_(scale + number)
    return parts, [torch.optim.AdamW(groups_of(part), lr=0.01 * scale) for part in parts]


def groups_of(part: nn.Module) -> list[dict[str, Any]]:
    flat = [one for one in part.parameters() if one.dim() < 2]
    matrices = [one for one in part.parameters() if one.dim() > 1]  # in one operation: those on DTensors are slow
    return [{"params": matrices, "fused": True}, {"params": flat, "weight_decay": 0.0}]


def given(degrees: Degrees, parts: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what is given to `save` and `load`: parts, or a model that is whole by itself."""
    if degrees[0] > 1:
        return {"model": parts, "optimizer": optimizers}
    return {"model": parts[0], "optimizer": optimizers[0]}


def train(parts: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Losses:
    """Take a step of each layer, as if it were alone: the same, wherever it is; return the losses."""
    losses = {}
    data = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    for part, optimizer in zip(parts, optimizers, strict=True):
        for name, layer in part.layers.items():
            loss = (layer(data) - data).square().mean()
            loss.backward()
            losses[name] = loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state(parts: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Found:
    """Return what this rank has, by name, whole."""
    found = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        found |= live.state(part, optimizer)
        found |= {f"weight/{name}": buffer.clone() for name, buffer in part.named_buffers()}
    return found


def save(rank, world_size, layers: int, degrees: Degrees) -> tuple[Found, Losses]:
    both = made(layers, degrees, 1.0)
    train(*both)
    saving = zckpt.save("saved", **given(degrees, *both), step=1, async_=True, fingerprint=True)
    found = state(*both)
    losses = train(*both)
    saving.result()
    return found, losses


def load(rank, world_size, layers: int, degrees: Degrees) -> tuple[Found, Losses]:
    both = made(layers, degrees, 2.0)
    restored = zckpt.load("saved", **given(degrees, *both))
    assert not restored.missing + restored.unexpected
    assert {group["lr"] for one in both[1] for group in one.param_groups} == {0.01}
    with zckpt.Checkpointer(f"run at {world_size}", on_sigterm=False) as checkpointer:
        checkpointer.save(1, **given(degrees, *both))
        again = made(layers, degrees, 3.0)
        assert checkpointer.resume(**given(degrees, *again)) is not None
    return state(*again), train(*again)


def of_all(told: list[tuple[Found, Losses]]) -> tuple[Found, Losses]:
    """Put together what ranks have; what several have is the same."""
    found, losses = dict[str, torch.Tensor](), dict[str, float]()
    for its, its_losses in told:
        assert all(torch.equal(found[key], its[key]) for key in found.keys() & its.keys())
        found |= its
        losses |= its_losses
    return found, losses


@pytest.mark.parametrize(
    ("layers", "degrees", "others"),
    some(
        [(3, (2, 2, 1), [(1, 1, 1)]), (1, (1, 2, 2), [(1, 1, 3)])],
        [
            (3, (2, 1, 1), [(2, 2, 1)]),
            (3, (2, 2, 2), [(3, 1, 1), (1, 2, 2)]),
            (3, (1, 1, 2), [(1, 2, 2)]),
            (3, (1, 3, 1), [(1, 2, 2)]),
        ],
    ),
)
def test_what_is_cut_is_saved_as_the_whole_and_loaded_into_any_cut(layers, degrees, others):
    expected, losses = of_all(run(save, math.prod(degrees), layers, degrees))
    opened = zckpt.open("saved")
    assert len(opened.parameters) == layers * 5
    assert sorted(opened.buffers) == [*(f"layers.{number}.seen" for number in range(layers)), "turns"]
    assert [len(group.parameters) for group in opened.param_groups] == [layers * 2, layers * 3]
    assert not [one.name for one in opened.parameters.values() if one.frozen]
    for key, value in expected.items():
        slot, _, name = key.partition("/")
        if slot != "step" and name != "turns":
            assert torch.equal(opened.read(name, slot), value), key
    for other in others:
        found, then = of_all(run(load, math.prod(other), layers, other))
        assert found.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], other
        assert then == pytest.approx(losses, rel=1e-5), other


@on_ranks(2)
def test_optimizers_that_step_in_backward_are_saved_by_name(rank):
    """Each rank has optimizers of other names: those of its parameters."""

    def made(number: int, lr: float) -> tuple[nn.Module, dict[str, Any]]:
        part = Part([number])
        _apply_optimizer_in_backward(torch.optim.AdamW, part.parameters(), {"lr": lr})
        return part, {name: one._in_backward_optimizers[0] for name, one in part.named_parameters()}

    def train(part: nn.Module) -> float:
        loss = (part(torch.ones(2, 5)) - 2).square().mean()
        loss.backward()
        return loss.item()

    part, optimizers = made(rank, 0.1)
    train(part)
    zckpt.save("saved", model=[part], optimizer=optimizers)
    opened = zckpt.open("saved")
    for number in (1 - rank, rank):
        again, its = made(number, 0.5)
        zckpt.load("saved", model=[again], optimizer=its)
        for name, one in again.named_parameters():
            assert torch.equal(opened.read(name), one)
            assert torch.equal(opened.read(name, "exp_avg"), its[name].state[one]["exp_avg"])
            assert its[name].param_groups[0]["lr"] == 0.1
    assert [train(again), train(again)] == [train(part), train(part)]


@on_ranks(2)
def test_what_does_not_fit_together_is_refused(rank):
    """Only bytes say whether ranks of another dimension of a mesh have the same, or something else of the same name."""

    def save(match: str, kind: type[Exception], parts: Any, optimizer: Any = None) -> None:
        with pytest.raises(kind, match=match):
            zckpt.save("refused", model=parts, optimizer=optimizer)

    torch.manual_seed(rank)
    save(r"weight of 0\.bias has different values on ranks", LayoutError, [nn.Sequential(nn.Linear(2, 2))])
    save("on rank 1 differs from earlier ranks", LayoutError, [nn.Sequential(nn.Linear(2, 2 + rank))])
    save("two parts of the model have a parameter bias", UsageError, [nn.Linear(2, 2), nn.Linear(2, 2)])
    part = Part([rank])
    adam = torch.optim.Adam(part.parameters(), lr=0.1 + rank)
    save("param group 0 differs between parts of an optimizer: lr", UsageError, [part], [adam])
    sgd = torch.optim.SGD(part.parameters(), lr=0.1)
    save("have different classes", UsageError, [part], [adam if rank else sgd])
    redundant = zckpt.optim.ZeroRedundancyOptimizer(part.parameters(), torch.optim.SGD, lr=0.1)
    save("for a model in parts", UnsupportedError, [part], [redundant])
    save("not a model", UsageError, [part if rank else 7])
    [cut], _ = made(2, (1, 1, 2), 1.0)
    if rank == 1:
        cut.get_parameter("layers.1.norm.weight").to_local().data += 1
    save(r"weight of layers\.1\.norm\.weight has different values on ranks", LayoutError, cut)
    zckpt.save("saved", model=[part], optimizer=[sgd])
    with refusing(UsageError, r"the model has no layers\.1"):
        zckpt.load("saved", model=[Part([0])])
    with refusing(UsageError, "broadcast only applies to a model that all ranks have whole"):
        zckpt.load("saved", model=[part], broadcast=True)
    assert names_in() == ["saved"]
