"""torchao's optimizers: codes are saved and taken back bit for bit, at any number of ranks that has whole blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zckpt
from tests.gloo import on_ranks, run
from tests.live import save_both
from tests.refusals import refusing
from tests.training.trainings import mean_over_ranks
from zckpt.errors import UnsupportedError

pytestmark = pytest.mark.nightly  # its import alone takes seconds, on each rank

STEPS = 3
BATCH = 12
CLASSES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
SLOTS = ("exp_avg", "exp_avg_sq")
QUANTISED = "quantised from the checkpoint's floats"


@pytest.fixture(scope="module", autouse=True)
def _needs_torchao() -> None:
    pytest.importorskip("torchao.optim")


class Net(nn.Module):
    """Weights whose shares are quantised at any number of ranks, at some, on some ranks only, and never."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.wide = nn.Linear(256, 64, dtype=dtype)
        self.some = nn.Linear(64, 192, dtype=dtype)  # 12288: 4096 at 3 ranks, 3072 at 4
        self.uneven = nn.Linear(192, 43, bias=False, dtype=dtype)  # never whole blocks
        self.last = nn.Linear(512, 15, bias=False, dtype=dtype)  # 8 x 512 at 2 ranks, and 7 x 512

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.uneven(torch.tanh(self.some(torch.tanh(self.wide(x)))))
        return found.square().mean() + self.last(torch.cat([x, x], dim=1)).square().mean()


def made(kind: str, cls: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    import torchao.optim

    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(seed)
    net: nn.Module = Net(dtype)
    if kind == "fsdp2":
        fully_shard(net)
    elif kind == "hsdp":
        fully_shard(
            net, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))
        )
    elif kind == "ddp":
        net = DistributedDataParallel(net)
    return net, getattr(torchao.optim, cls)(net.parameters(), lr=1e-2)


def train(net: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = next(net.parameters()).dtype
    for step in steps:
        every = torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = net(every[rank * BATCH // world_size : (rank + 1) * BATCH // world_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.double()))
    return losses


def local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def floats_of(value: Any) -> torch.Tensor:
    """Return what this rank has of a tensor, in floats."""
    value = local(value)
    return value.dequantize() if hasattr(value, "codes") else value.clone()


def pieces(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    """Return what this rank has, codes as they are."""
    found = []
    for state in optimizer.state.values():
        its: dict[str, torch.Tensor] = {"step": state["step"].clone()}
        for key in SLOTS:
            its[key] = floats_of(state[key])
            for name in ("codes", "scale", "qmap"):
                if hasattr(local(state[key]), name):
                    its[f"{key}.{name}"] = getattr(local(state[key]), name).view(torch.uint8).clone()
        found.append(its)
    return found


def floats(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    """Return the values of the whole state."""
    found = []
    for parameter, state in optimizer.state.items():
        its = {}
        for key in SLOTS:
            value = floats_of(state[key])
            if isinstance(parameter, DTensor):
                value = DTensor.from_local(
                    value, parameter.device_mesh, parameter.placements, run_check=False,
                    shape=parameter.shape, stride=parameter.stride(),
                ).full_tensor()  # fmt: skip
            its[key] = value
        found.append(its)
    return found


def save(rank, _: int, path: Path, kind: str, cls: str) -> tuple[Any, Any, list[float]]:
    net, optimizer = made(kind, cls)
    train(net, optimizer, range(STEPS))
    saving = zckpt.save(path, model=net, optimizer=optimizer, step=STEPS, async_=True)
    found = pieces(optimizer), floats(optimizer)
    losses = train(net, optimizer, range(STEPS, STEPS + 2))
    saving.result()
    return *found, losses


def load(rank, _: int, path: Path, kind: str, cls: str) -> tuple[Any, Any, list[float], list[str]]:
    net, optimizer = made(kind, cls, seed=1)
    restored = zckpt.load(path, model=net, optimizer=optimizer, random_states=False)
    found = pieces(optimizer), floats(optimizer)
    return *found, train(net, optimizer, range(STEPS, STEPS + 2)), restored.notes


def same(found: Any, expected: Any) -> list[str]:
    return [
        f"{number} {key}"
        for number, (mine, its) in enumerate(zip(found, expected, strict=True))
        for key in its.keys() | mine.keys()
        if key not in mine or key not in its or not torch.equal(mine[key], its[key])
    ]


@pytest.mark.parametrize(
    ("kind", "ranks", "cls"),
    [
        ("plain", 1, "AdamW4bit"),
        ("ddp", 2, "AdamWFp8"),
        ("hsdp", 4, "AdamW8bit"),
        *(("fsdp2", 2, cls) for cls in CLASSES),
    ],
)
def test_at_the_same_ranks_codes_come_back_and_losses_go_on(cls, kind, ranks):
    saved = run(save, ranks, "saved", kind, cls)
    loaded = run(load, ranks, "saved", kind, cls)
    for (expected, _, losses), (found, _, then, notes) in zip(saved, loaded, strict=True):
        assert any("exp_avg.codes" in one for one in expected)
        assert same(found, expected) == []
        assert then == losses
        assert notes == []


@pytest.mark.parametrize(
    ("kind", "ranks", "into", "other", "cls"),
    [("fsdp2", 2, "fsdp2", 4, "AdamW8bit"), ("ddp", 2, "fsdp2", 3, "AdamW4bit")],
)
def test_to_more_ranks_values_are_the_same(cls, kind, ranks, into, other):
    [(_, expected, losses), *_] = run(save, ranks, "saved", kind, cls)
    for _, found, then, notes in run(load, other, "saved", into, cls):
        assert same(found, expected) == []
        assert notes == []
        assert then[0] == pytest.approx(losses[0], rel=1e-5)  # of the next, some shares are floats from here on


@pytest.mark.parametrize("cls", CLASSES)
def test_to_fewer_ranks_blocks_stay_and_what_was_floats_is_quantised(cls):
    [(_, expected, losses), *_] = run(save, 2, "saved", "fsdp2", cls)
    opened = zckpt.open("saved")
    names = list(dict(Net().named_parameters()))
    for number, name in enumerate(names):
        for key in SLOTS:
            assert torch.equal(opened.read(name, key), expected[number][key]), (name, key)
    [(_, found, then, notes)] = run(load, 1, "saved", "plain", cls)
    last = names.index("last.weight")  # 8 of 15 rows were quantised, and 7 were not
    assert {one.split()[0] for one in same(found, expected)} == {str(last)}
    for key in SLOTS:
        assert torch.equal(found[last][key][:8], expected[last][key][:8])
    rounded = "exp_avg of last.weight, exp_avg_sq of last.weight"
    assert notes == [f"{QUANTISED}, which rounds: {rounded}"]
    assert then[0] == pytest.approx(losses[0], rel=1e-5)


@on_ranks(1)
def test_other_sources_and_other_optimizers():
    """What one rank can tell: files of torch, other blocks, floats, a run's directory, bfloat16, other cuts."""
    net, optimizer = made("plain", "AdamW8bit")
    train(net, optimizer, range(STEPS))
    expected = pieces(optimizer)
    save_both(net, optimizer, "torch.pt")
    with zckpt.Checkpointer("run", async_=True) as checkpointer:
        checkpointer.save(STEPS, model=net, optimizer=optimizer)
    for path in (Path("torch.pt"), Path("run")):
        other, its = made("plain", "AdamW8bit", seed=1)
        assert zckpt.load(path, model=other, optimizer=its).notes == []
        assert same(pieces(its), expected) == [], path
        assert its.param_groups[0]["lr"].dtype == torch.float32

        four_net, other_blocks = made("plain", "AdamW4bit")
        with refusing(UnsupportedError, "quantised in other blocks"):
            zckpt.load(path, model=four_net, optimizer=other_blocks)
        plain = Net()
        adam = torch.optim.AdamW(plain.parameters())
        with refusing(UnsupportedError, "dequantize=True"):
            zckpt.load(path, model=plain, optimizer=adam)
        zckpt.load(path, model=plain, optimizer=adam, dequantize=True)
        for mine, one in zip(adam.state.values(), expected, strict=True):
            assert torch.equal(mine["exp_avg"], one["exp_avg"])

        net4, four = made("plain", "AdamW4bit")
        restored = zckpt.load(path, model=net4, optimizer=four, dequantize=True)
        assert any(QUANTISED in note for note in restored.notes)
        assert type(four.state[net4.wide.weight]["exp_avg"]).__name__ == "OptimState4bit"
        train(net4, four, range(1))
    zckpt.save("floats", model=plain, optimizer=adam)
    net8, eight = made("plain", "AdamW8bit")
    assert any(QUANTISED in note for note in zckpt.load("floats", model=net8, optimizer=eight).notes)
    for mine, one in zip(floats(eight), expected, strict=True):
        assert torch.allclose(mine["exp_avg"], one["exp_avg"], atol=1e-2 * float(one["exp_avg"].abs().max()))

    zckpt.convert("run", "dcp", to="dcp")
    assert zckpt.diff("run", "dcp").equal
    net_dcp, optimizer = made("plain", "AdamW8bit", seed=1)
    zckpt.load("dcp", model=net_dcp, optimizer=optimizer)
    assert same(pieces(optimizer), expected) == []
    for to in ("zero-redundancy", "consolidated"):
        with refusing(UnsupportedError, "in pieces per rank"):
            zckpt.convert("run", to, to=to)
        zckpt.convert("run", to, to=to, dequantize=True)

    half, optimizer = made("plain", "AdamW8bit", dtype=torch.bfloat16)
    train(half, optimizer, range(1))
    zckpt.save("half", model=half, optimizer=optimizer)
    other, its = made("plain", "AdamW8bit", seed=1, dtype=torch.bfloat16)
    zckpt.load("half", model=other, optimizer=its)
    assert same(pieces(its), pieces(optimizer)) == []


@on_ranks(2)
def test_blocks_that_are_not_those_of_the_whole_parameter_are_refused():
    import torchao.optim
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.compiler.set_stance("force_eager")
    net = nn.Linear(256, 64, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(1)]))
    optimizer = torchao.optim.AdamW8bit(net.parameters())
    net.weight.grad = DTensor.from_local(torch.ones(64, 128), mesh, [Shard(1)])
    optimizer.step()
    with refusing(UnsupportedError, "shard by rows only"):
        zckpt.save("saved", model=net, optimizer=optimizer)
