"""Models in parts: a pipeline's stages, several on a rank, on meshes of pipeline x data x tensor ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zckpt
from tests import live
from tests.gloo import run
from tests.pairwise import some
from zckpt.errors import LayoutError, UnsupportedError, UsageError

LAYERS = 3
Found = dict[str, torch.Tensor]


class Layer(nn.Module):
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


def stages(pp: int, stage: int) -> list[list[int]]:
    """Return the layers of each part of a stage: layer by layer in turns, two parts where there are enough."""
    mine = [number for number in range(LAYERS) if number % pp == stage]
    return [mine[:1], mine[1:]] if len(mine) > 1 else [mine]


def made(degrees: tuple[int, int, int], scale: float) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return this rank's parts and an optimizer of each, as torchtitan has them; of one rank the whole model."""
    pp, _, tp = degrees
    if degrees == (1, 1, 1):
        parts: list[nn.Module] = [Part(list(range(LAYERS)))]
    else:
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("pp", "dp", "tp"))
        parts = [Part(numbers) for numbers in stages(pp, mesh["pp"].get_local_rank())]
        for part in parts:
            for layer in part.layers.values():  # type: ignore[operator]  # a ModuleDict
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
    return [{"params": [one for one in part.parameters() if one.dim() > 1]}, {"params": flat, "weight_decay": 0.0}]


def train(parts: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Take two steps of each layer, as if it were alone: the same, wherever it is."""
    for number in range(2):
        data = torch.rand(4, 5, generator=torch.Generator().manual_seed(number))
        for part, optimizer in zip(parts, optimizers, strict=True):
            for layer in part.layers.values():  # type: ignore[operator]
                (layer(data) - data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def state(parts: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Found:
    """Return what this rank has, by name, whole."""
    found = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        found |= live.state(part, optimizer)
        found |= {f"weight/{name}": buffer.clone() for name, buffer in part.named_buffers()}
    return found


def save(rank, world_size, degrees: tuple[int, int, int], folder: Path) -> Found:
    parts, optimizers = made(degrees, 1.0)
    train(parts, optimizers)
    saving = zckpt.save(folder / "saved", model=parts, optimizer=optimizers, step=2, async_=True, fingerprint=True)
    assert saving is not None
    found = state(parts, optimizers)
    train(parts, optimizers)
    saving.result()
    return found


def load(rank, world_size, degrees: tuple[int, int, int], folder: Path) -> Found:
    parts, optimizers = made(degrees, 2.0)
    restored = zckpt.load(folder / "saved", model=parts, optimizer=optimizers)
    assert not restored.missing + restored.unexpected
    assert {group["lr"] for one in optimizers for group in one.param_groups} == {0.01}
    with zckpt.Checkpointer(folder / "run", on_sigterm=False) as checkpointer:
        checkpointer.save(2, model=parts, optimizer=optimizers)
        again, its = made(degrees, 3.0)
        assert checkpointer.resume(model=again, optimizer=its) is not None
    return state(again, its)


@pytest.mark.parametrize(
    ("degrees", "others"),
    some([((2, 2, 1), [(1, 1, 1)])], [((2, 1, 1), [(2, 2, 1)]), ((2, 2, 2), [(3, 1, 1), (1, 2, 2)])]),
)
def test_parts_are_saved_as_the_whole_and_loaded_into_any_parts(degrees, others, tmp_path):
    of_ranks = run(save, degrees[0] * degrees[1] * degrees[2], degrees, tmp_path)
    expected = {key: value for one in of_ranks for key, value in one.items()}
    opened = zckpt.open(tmp_path / "saved")
    assert len(opened.parameters) == LAYERS * 5
    assert sorted(opened.buffers) == ["layers.0.seen", "layers.1.seen", "layers.2.seen", "turns"]
    assert [len(group.parameters) for group in opened.param_groups] == [LAYERS * 2, LAYERS * 3]
    assert not [one.name for one in opened.parameters.values() if one.frozen]
    for key, value in expected.items():
        slot, _, name = key.partition("/")
        if slot != "step" and name != "turns":
            assert torch.equal(opened.read(name, slot), value), key
    for other in others:
        found = run(load, other[0] * other[1] * other[2], other, tmp_path)
        both = {key: value for one in found for key, value in one.items()}
        assert both.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(both[key], expected[key])] == [], other


def in_backward(rank, world_size, folder: Path) -> None:
    """Each rank has optimizers of other names: those of its parameters."""
    [part] = parts = [Part([rank])]
    optimizers = {name: torch.optim.Adam([one], lr=0.1) for name, one in part.named_parameters()}
    for name, parameter in part.named_parameters():
        parameter.square().sum().backward()
        optimizers[name].step()
    zckpt.save(folder / "saved", model=parts, optimizer=optimizers)
    again = Part([1 - rank])
    its = {name: torch.optim.Adam([one]) for name, one in again.named_parameters()}
    zckpt.load(folder / "saved", model=[again], optimizer=its)
    opened = zckpt.open(folder / "saved")
    for name, one in again.named_parameters():
        assert torch.equal(opened.read(name), one)
        assert torch.equal(opened.read(name, "exp_avg"), its[name].state[one]["exp_avg"])
        assert its[name].param_groups[0]["lr"] == 0.1
    dist.barrier()


def refused(rank, world_size, folder: Path) -> None:
    def save(match: str, kind: type[Exception], parts: list[nn.Module], optimizer: Any = None) -> None:
        with pytest.raises(kind, match=match):
            zckpt.save(folder / "refused", model=parts, optimizer=optimizer)

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
    save("not a model", UsageError, [part if rank else 7])  # type: ignore[list-item]
    zckpt.save(folder / "saved", model=[part], optimizer=[sgd])
    with pytest.raises(UsageError, match=r"the model has no layers\.1"):
        zckpt.load(folder / "saved", model=[Part([0])])
    with pytest.raises(UsageError, match="broadcast only applies to a model that all ranks have whole"):
        zckpt.load(folder / "saved", model=[part], broadcast=True)


def test_optimizers_by_name_and_what_is_refused(tmp_path):
    run(in_backward, 2, tmp_path / "named")
    run(refused, 2, tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["named", "saved"]
