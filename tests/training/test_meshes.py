"""Models cut in two ways at once, by `fully_shard` and tensor parallelism; and an optimizer for each parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zckpt
from tests.gloo import run
from tests.live import state
from tests.pairwise import some
from zckpt.errors import LayoutError

Found = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two matrices that are cut by different dimensions; with a norm, which no tensor-parallel plan has."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(5, 12)
        self.down = nn.Linear(12, 5, bias=False)
        self.norm = nn.LayerNorm(5) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x).tanh()))


def made(degrees: tuple[int, int] | None, seed: int, *, norm: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model on a mesh of data- and tensor-parallel ranks, or a whole one."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Net(norm=norm)
    if degrees is not None:
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=not norm)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, number: int) -> float:
    """Take a step with the same data on all ranks."""
    data = torch.rand(4, 5, generator=torch.Generator().manual_seed(number))
    loss = (model(data) - data.flip(1)).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def save(rank, world_size, degrees: tuple[int, int] | None, folder: Path) -> tuple[Found, list[float]]:
    model, optimizer = made(degrees, 0)
    for number in range(2):
        train(model, optimizer, number)
    zckpt.save(folder / "saved", model=model, optimizer=optimizer, step=2)
    return state(model, optimizer), [train(model, optimizer, number) for number in (2, 3)]


def load(rank, world_size, degrees: tuple[int, int] | None, folder: Path) -> tuple[Found, list[float]]:
    model, optimizer = made(degrees, 1)
    with zckpt.Checkpointer(folder / f"run at {world_size}", on_sigterm=False) as checkpointer:
        zckpt.load(folder / "saved", model=model, optimizer=optimizer)
        checkpointer.save(2, model=model, optimizer=optimizer)
    again, its = made(degrees, 2)
    restored = checkpointer.resume(model=again, optimizer=its)
    assert restored is not None
    return state(again, its), [train(again, its, number) for number in (2, 3)]


@pytest.mark.parametrize(
    ("degrees", "others"), some([((2, 2), [(1, 3), None])], [((1, 2), [(2, 2)]), ((3, 1), [(2, 2)])])
)
def test_a_mesh_of_two_dimensions_resumes_on_any_other(degrees, others, tmp_path):
    [(expected, losses), *_] = run(save, degrees[0] * degrees[1], degrees, tmp_path)
    for other in others:
        ranks = 1 if other is None else other[0] * other[1]
        for found, then in run(load, ranks, other, tmp_path):
            assert found.keys() == expected.keys()
            assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], other
            assert then == pytest.approx(losses, rel=1e-5), other
    opened = zckpt.open(tmp_path / "saved")
    for key, one in expected.items():
        slot, _, name = key.partition("/")
        assert slot == "step" or torch.equal(opened.read(name, slot), one), key


def not_in_the_plan(rank, world_size, folder: Path) -> None:
    model, optimizer = made((2, 2), 0, norm=True)
    train(model, optimizer, 0)
    zckpt.save(folder / "saved", model=model, optimizer=optimizer)
    other, its = made((2, 2), 1, norm=True)
    zckpt.load(folder / "saved", model=other, optimizer=its)
    expected, found = state(model, optimizer), state(other, its)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    opened = zckpt.open(folder / "saved")
    assert torch.equal(opened.read("norm.weight", "exp_avg_sq"), expected["exp_avg_sq/norm.weight"])
    if rank == 1:
        model.get_parameter("norm.weight").to_local().data += 1
    with pytest.raises(LayoutError, match=r"weight of norm\.weight has different values on ranks"):
        zckpt.save(folder / "other", model=model, optimizer=optimizer)


def test_what_a_mesh_of_one_dimension_has_beside_another_is_saved_if_it_is_the_same(tmp_path):
    """Only bytes say whether ranks of the other dimension have the same, or something else of the same name."""
    run(not_in_the_plan, 4, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]


def in_backward(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model whose backward steps an optimizer of each parameter, and these by name."""
    torch.manual_seed(seed)
    model = Net(norm=True)
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
    return model, {name: one._in_backward_optimizers[0] for name, one in model.named_parameters()}


def test_optimizers_that_step_in_backward_are_saved_by_name(tmp_path):
    model, optimizers = in_backward(0)
    for number in range(2):
        train(model, None, number)
    zckpt.save(tmp_path / "saved", model=model, optimizer=optimizers)
    other, its = in_backward(1)
    zckpt.load(tmp_path / "saved", model=other, optimizer=its)
    assert [train(other, None, number) for number in (2, 3)] == [train(model, None, number) for number in (2, 3)]
    for name, one in model.named_parameters():
        assert torch.equal(one, other.get_parameter(name))
