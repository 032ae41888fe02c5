"""Weights lead: ranks begin with the same ones, and what anybody writes into them is what is trained and saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as all of its documentation has it

import zckpt
from tests.gloo import on_ranks
from tests.optim.zero.reference import Net, Unsharded, assert_alike, bits, both_step, is_unchanged, make, stepped
from tests.pairwise import each
from zckpt.optim import ZeroOptimizer

pytestmark = pytest.mark.interop

DTYPES = (torch.float32, torch.bfloat16)


def seeded(rank, dtype: torch.dtype = torch.float32, *, freeze: bool = True) -> Net:
    """Return a model whose weights each rank has drawn for itself; one layer may be frozen."""
    net = Net(dtype)
    generator = torch.Generator().manual_seed(rank)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    net.spare.weight.data = net.spare.weight.data.t()  # not contiguous
    net.spare.requires_grad_(not freeze)
    return net


BEGINNINGS = ({"stage": 1}, {"stage": 2, "offload": True}, {"round_robin_gradients": True, "elastic_checkpoint": True})


@on_ranks(3, each=each(DTYPES, BEGINNINGS))
def test_ranks_begin_with_the_same_weights(rank, dtype, options):
    """All get the weights of the first rank; a step at a rate of zero changes nothing."""
    net = seeded(rank, dtype)
    first = bits(seeded(0, dtype))
    ours = make(net, lr=0.0, **options)
    for group in ours.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    assert is_unchanged(net, first)
    stepped(ours, net, 0)
    assert is_unchanged(net, first)
    added = torch.nn.Parameter(torch.full((3,), float(rank + 1)))
    ours.add_param_group({"params": [("added", added)]})
    assert added.tolist() == [1.0] * 3


@on_ranks(2)
def test_ranks_that_are_left_alone(rank):
    """On one's own word nothing is sent; what DDP has made of the weights is then what is trained."""
    net = seeded(rank, freeze=False)
    mine = bits(net)
    ours = make(net, broadcast_weights=False)
    assert is_unchanged(net, mine)
    model = DDP(net)
    assert is_unchanged(net, bits(seeded(0, freeze=False)))
    ours.attach(model)
    twin = Unsharded(net)
    both_step(ours, model, twin, range(2))
    assert_alike(net)


@on_ranks(4)
def test_weights_in_subgroups(rank):
    """The first rank of a group is not the first of all; experts come from the first that holds the same."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dense, expert = (torch.nn.Parameter(torch.full((5,), float(rank))) for _ in range(2))
    ZeroOptimizer(
        [{"params": [("d", dense)]}, {"params": [("e", expert)], "moe": True, "name": "e"}],
        torch.optim.SGD, lr=1.0, expert_data_parallel_groups={"e": groups[rank % 2]},
    )  # fmt: skip
    assert dense.tolist() == [0.0] * 5
    assert expert.tolist() == [float(rank % 2)] * 5


Write = Callable[[Net], None]


def by_load_state_dict(net: Net) -> None:
    net.load_state_dict({name: torch.full_like(value, 0.25) for name, value in net.state_dict().items()})


def by_data(net: Net) -> None:
    for parameter in net.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def by_other_memory(net: Net) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clone().fill_(0.125)


def of_one_element(net: Net) -> None:
    with torch.no_grad():
        net.twice.weight[3, 4] = 2.0


WRITES: list[Write] = [by_load_state_dict, by_data, by_other_memory, of_one_element]


OPTIONS = ({"stage": 1}, {"stage": 2, "offload": True, "parameter_alignment": True})


@on_ranks(2, each=each(WRITES, DTYPES, OPTIONS))
def test_weights_that_somebody_writes_are_trained(write, dtype, options):
    """The next step goes on from what was written; other masters keep what rounding has lost."""
    net = Net(dtype)
    ours = make(net, **options)
    for step in range(2):
        stepped(ours, net, step)
    was = {name: ours.full_state(name, "master") for name in ours.names()}
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    write(net)
    written = bits(net)
    expected = {
        name: torch.where(p.detach() == before[name], was[name], p.detach().float())
        for name, p in net.named_parameters()
    }
    for group in ours.param_groups:
        group["lr"], group["weight_decay"], group["momentum"] = 0.0, 0.0, 0.0
    stepped(ours, net, 2)
    assert is_unchanged(net, written)
    for name in ours.names():
        assert torch.equal(ours.full_state(name, "master"), expected[name]), name


@on_ranks(2)
def test_saved_before_the_next_step():
    net = Net(torch.bfloat16)
    ours = make(net)
    stepped(ours, net, 0)
    by_data(net)
    for group, master in zip(ours.groups, ours.state_dict()["single_partition_of_fp32_groups"], strict=True):
        assert torch.equal(master.bfloat16(), group.weights[: master.numel()])
    by_other_memory(net)
    zckpt.save("own", model=net, optimizer=ours)
    checkpoint = zckpt.open("own")
    assert (checkpoint.read("last.bias", "master") == 0.125).all()


@on_ranks(2)
def test_loaded_beside(rank):
    """A checkpoint that is loaded into the model alone is where training goes on."""
    source = Net()
    by_data(source)
    if rank == 0:
        torch.save(source.state_dict(), "model.pt")
    dist.barrier()
    net = Net()
    ours = make(net)
    stepped(ours, net, 0)
    zckpt.load("model.pt", model=net)
    twin = Unsharded(net, torch.optim.SGD, momentum=0.0)
    for group in ours.param_groups:
        group["momentum"] = 0.0
    both_step(ours, net, twin, range(2))


@on_ranks(2)
def test_masters_that_are_set():
    """With a master its weight is set, rounded once."""
    net = Net(torch.bfloat16)
    ours = make(net)
    value = torch.tensor(1.0 + 2**-8 + 2**-40, dtype=torch.float64)  # in bfloat16 a tie, or just above it
    ours.set_full_state("scale", "master", value)
    assert torch.equal(net.scale.detach(), ours.full_state("scale", "master").bfloat16())
    assert ours.full_state("scale", "master") != net.scale
    ours.refresh_masters()
    assert ours.full_state("scale", "master") == net.scale
