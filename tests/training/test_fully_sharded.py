"""Models in FullyShardedDataParallel: each rank saves its elements, and takes them back at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision

import zckpt
from tests.fsdp_training.training import STEPS, Net, made, step, trained, truth, truth_and_losses
from tests.gloo import on_ranks, run
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.errors import UnsupportedError, UsageError

Found = dict[str, torch.Tensor]

PAIRS = [
    ("fsdp1 orig", 2, "fsdp1", 3),
    ("fsdp1", 3, "fsdp1 grad", 2),
    ("fsdp1 grad orig", 2, "fsdp2", 3),
    ("fsdp2", 2, "fsdp1 orig", 3),
    ("fsdp1 hsdp orig", 4, "fsdp1 whole orig", 2),
    ("fsdp1 whole", 2, "fsdp1 hsdp", 4),
    ("fsdp1 fine mesh orig", 3, "fsdp1 fine orig", 1),
]
"""How a model is wrapped that is saved, at how many ranks, and into what it is loaded."""


def train_and_save(rank, world_size, wrap: str) -> tuple[Found, list[float]]:
    torch.set_num_threads(1)
    model, optimizer, scheduler = trained(wrap, world_size)
    zckpt.save("saved", model=model, optimizer=optimizer, scheduler=scheduler, step=STEPS)
    return truth_and_losses(model, optimizer, scheduler)


def load_and_train(rank, world_size, wrap: str) -> tuple[Found, list[float]]:
    torch.set_num_threads(1)
    model, optimizer, scheduler = made(wrap, world_size, seed=1)
    model(torch.zeros(1, 3, dtype=torch.int64))  # leaves whole parameters in memory, which are old afterwards
    restored = zckpt.load("saved", model=model, optimizer=optimizer, scheduler=scheduler)
    assert restored.step == STEPS
    return truth_and_losses(model, optimizer, scheduler)


def different(found: Found, expected: Found) -> list[str]:
    """Return the keys of what is expected that are not there, or are otherwise."""
    return [key for key, one in expected.items() if key not in found or not torch.equal(found[key], one)]


@pytest.mark.parametrize(("wrap", "ranks", "into", "other"), some(PAIRS[2:5], [*PAIRS[:2], *PAIRS[5:]]))
def test_training_goes_on_under_any_strategy_at_any_number_of_ranks(wrap, ranks, into, other):
    [(expected, losses), *_] = run(train_and_save, ranks, wrap)
    [(found, then), *_] = run(load_and_train, other, into)
    slots_of_frozen = ("step/frozen", "exp_avg/frozen", "exp_avg_sq/frozen")  # a unit is trained as a whole
    assert [key for key in different(found, expected) if not key.startswith(slots_of_frozen)] == []
    alike = "fsdp2" in wrap + into or ("orig" in wrap) == ("orig" in into)
    assert then[: 2 if alike else 1] == pytest.approx(losses[: 2 if alike else 1], rel=1e-6)
    opened = zckpt.open("saved")
    for key, one in expected.items():
        slot, _, name = key.partition("/")
        if slot != "step" and "head.weight" not in name:
            assert torch.equal(opened.read(name, slot), one), key


def test_numbers_of_the_bare_models_optimizer_are_units_members():
    """Those of a file of torch's, of a training in one process."""
    torch.manual_seed(0)
    net = Net()
    del net.frozen
    net.frozen = nn.Linear(6, 7, bias=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for number in range(STEPS):
        step(net, optimizer, scheduler, number)
    root = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**root, "step": STEPS}, "saved")
    expected = truth(net, optimizer)
    found, _ = run(load_and_train, 2, "fsdp1")[0]
    assert different(found, expected) == []


class Pieces(nn.Module):
    """A unit, and a parameter that is in none; a frozen one, one of one element, and a buffer that is kept low."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1, bias=False))
        self.body[1].requires_grad_(requires_grad=False)
        self.alone = nn.Linear(1, 3)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("gone", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.alone(self.body(x).float()) * self.scale + self.mean).square().mean()


def pieces(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Mixed precision, a module that is left out, several param groups."""
    torch.manual_seed(seed)
    net = Pieces()
    model = FullyShardedDataParallel(
        net,
        ignored_modules=[net.alone],
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
        cpu_offload=CPUOffload(offload_params=False),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    groups = [
        {"params": [p for name, p in model.named_parameters() if "bias" in name], "lr": 0.01},
        {"params": [p for name, p in model.named_parameters() if "bias" not in name], "lr": 0.02},
    ]
    return model, torch.optim.Adam(groups)


def own_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of what this rank has, by torch's names."""
    every = dict(model.named_parameters()) | dict(model.named_buffers())
    found = {name: one.detach().clone() for name, one in every.items()}
    for name, one in model.named_parameters():
        for key, value in optimizer.state.get(one, {}).items():
            if one.numel():
                found[f"{key} {name}"] = value.clone()
    return found


@on_ranks(3)
def test_units_beside_parameters_that_are_in_none():
    model, optimizer = pieces(0)
    data = torch.rand(6, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(data).backward()
        optimizer.step()
        optimizer.zero_grad()
    zckpt.save("saved", model=model, optimizer=optimizer)
    other, its = pieces(1)
    zckpt.load("saved", model=other, optimizer=its)
    found, saved = own_state(other, its), own_state(model, optimizer)
    assert found.keys() == saved.keys()
    assert different(found, saved) == [name for name in saved if name.endswith("gone")]
    assert [group["lr"] for group in its.param_groups] == [0.01, 0.02]
    model(data).backward()
    other(data).backward()
    optimizer.step()
    its.step()
    assert all(name.endswith("gone") for name in different(own_state(other, its), own_state(model, optimizer)))
    opened = zckpt.open("saved")
    assert [sorted(group.parameters) for group in opened.param_groups] == [
        ["alone.bias", "body.0.bias"], ["alone.weight", "body.0.weight", "body.1.weight", "scale"]
    ]  # fmt: skip
    assert opened.parameters["body.0.weight"].shape == (3, 5)


@on_ranks(2)
def test_what_cannot_be_told_is_refused(world_size):
    model, optimizer, _ = made("fsdp1", world_size)
    with refusing(UsageError, "give the optimizer's model"):
        zckpt.save("saved", optimizer=optimizer)
    with (
        FullyShardedDataParallel.summon_full_params(model),
        refusing(UsageError, "outside of forward, backward and summon_full_params"),
    ):
        zckpt.save("saved", model=model)
    assert not Path("saved").exists()
    other, its, scheduler = made("fsdp1 orig", world_size)
    step(other, its, scheduler, 0)
    for name, parameter in other.named_parameters():
        if name.endswith("norm.weight") and parameter in its.state:
            its.state[parameter]["step"] += 1
    zckpt.save("steps", model=other, optimizer=its)
    with refusing(UsageError, "whose flat parameter can have only one"):
        zckpt.load("steps", model=model, optimizer=optimizer, strict=False)


class Own(nn.Linear):
    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)


@on_ranks(2)
def test_a_state_dict_of_a_modules_own_making_is_refused():
    model = FullyShardedDataParallel(nn.Sequential(Own(2, 2)), device_id=torch.device("cpu"))
    with refusing(UnsupportedError, "has a custom state dict"):
        zckpt.save("saved", model=model)
