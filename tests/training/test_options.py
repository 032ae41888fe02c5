"""What `zckpt.save` and `zckpt.load` take and give beside models and optimizers."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, deque
from contextlib import nullcontext
from inspect import signature
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zckpt
from tests.folders import names_in
from tests.gloo import on_ranks, run
from tests.live import equal, trained
from tests.logical import assert_same_tree
from tests.refusals import refusing
from tests.training.trainings import whole
from zckpt.errors import UnsupportedError, UsageError
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer
from zckpt.training import loading as loading_module
from zckpt.training import saving as saving_module
from zckpt.training.directory import write

pytestmark = pytest.mark.interop


# --- what is written, and by whom


@on_ranks(3)
def test_what_all_ranks_have_is_written_once_and_evenly():
    torch.manual_seed(0)
    model, optimizer = trained(nn.Sequential(nn.Linear(64, 1000), nn.Linear(1000, 3)))
    zckpt.save("replicated", model=model, optimizer=optimizer)
    sizes = [path.stat().st_size for path in Path("replicated").glob("rank-*")]
    elements = 64 * 1000 + 1000 + 3000 + 3
    assert len(sizes) == 3
    assert 3 * 4 * elements < sum(sizes) < 3 * 4 * elements + 3 * 4000
    assert max(sizes) - min(sizes) < 2000


class Counting(nn.Module):
    """Has a buffer that each rank has its own of, as batch norms have, and state that is no tensor."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.full((64,), float(start)))
        self.more = {"start": start}

    def get_extra_state(self) -> dict[str, int]:
        return self.more

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.more = state


@on_ranks(3)
def test_buffers_and_extra_are_those_of_the_first_rank(rank):
    zckpt.save("c", model=Counting(rank + 5), extra={"rank": rank})
    model = Counting(99)
    restored = zckpt.load("c", model=model)
    assert (model.seen == 5).all()
    assert (model.more, restored.extra) == ({"start": 5}, {"rank": 0})


class Scaled(Counting):
    """Keeps a tensor, as Transformer Engine's modules do."""

    def get_extra_state(self) -> Any:
        return torch.tensor([self.more["start"]])

    def set_extra_state(self, state: Any) -> None:
        self.more = {"start": state.item()}


@pytest.mark.parametrize("program", ["torch.save", "dcp", "zckpt"])
def test_what_modules_keep_comes_back_from_any_programs_file(program):
    saved, model = (nn.ModuleDict({"a": Counting(start), "b": Scaled(start + 1)}) for start in (3, 50))
    if program == "torch.save":
        torch.save({"model": saved.state_dict(), "epoch": 1}, "c")
    elif program == "dcp":
        dcp.save({"model": saved.state_dict()}, checkpoint_id="c", no_dist=True)
    else:
        zckpt.save("c", model=saved)
    with pytest.raises(zckpt.NotRestoredError) as error:
        zckpt.assert_restored("c", model=model)
    assert sum("the state that modules keep" in one for one in error.value.differences) == 2
    restored = zckpt.load("c", model=model)
    assert (restored.missing, restored.unexpected) == ([], [])
    assert (model["a"].more, model["b"].more) == ({"start": 3}, {"start": 4})
    zckpt.assert_restored("c", model=model)


@pytest.mark.parametrize("gives", [False, True])
def test_what_no_module_takes_any_more_is_left_out_with_a_note(gives):
    saved, model = nn.ModuleDict({"a": Counting(3)}), nn.ModuleDict({"a": Counting(50)})
    zckpt.save("c", model=saved, optimizer=torch.optim.SGD(saved.parameters(), lr=0.5))
    model["a"].__class__ = type("Other", (nn.Module,), {"get_extra_state": lambda _: 3} if gives else {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    restored = zckpt.load("c", model=model, optimizer=optimizer)
    assert restored.notes == ["left out: a._extra_state, which no module of the model takes"]
    assert (model["a"].seen[0].item(), optimizer.param_groups[0]["lr"]) == (3.0, 0.5)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    assert zckpt.load("c", optimizer=named).notes == []


def test_what_a_module_keeps_and_no_checkpoint_has_is_not_changed_with_a_note():
    saved, model = nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"a": Counting(50)})
    zckpt.save("c", model=saved)
    restored = zckpt.load("c", model=model, strict=False)
    assert restored.notes == ["not changed: a._extra_state, of which the checkpoint has nothing"]
    assert model["a"].more == {"start": 50}


class Packed(nn.Linear):
    """Has a state dict of its own making: copies of its buffer, and of what is no tensor."""

    def __init__(self, start: int) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", torch.full((2,), float(start)))
        self.start = start

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = {key: one.detach().clone() for key, one in super().state_dict(*args, **kwargs).items()}
        return {**found, "start": torch.tensor([self.start])}


def test_what_a_state_dict_copies_is_loaded_and_what_it_makes_is_told():
    saved, model = Packed(3), Packed(50)
    zckpt.save("c", model=saved)
    assert zckpt.load("c", model=model).notes == ["not changed: start, which state_dict() makes anew"]
    assert (model.seen.tolist(), model.start, equal(saved, model)) == ([3.0, 3.0], 50, True)
    model.start = 3
    assert zckpt.load("c", model=model).notes == []
    zckpt.assert_restored("c", model=model)


def test_a_parameter_that_only_the_optimizer_has_is_saved_and_loaded():
    def made(start: float) -> dict[str, Any]:
        model, scale = nn.Linear(2, 2), nn.Parameter(torch.full((2,), start))
        optimizer = torch.optim.AdamW([*model.named_parameters(), ("loss.scale", scale)])
        (model(torch.ones(1, 2)) * scale).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    mine, its = made(3.0), made(5.0)
    zckpt.save("c", **mine)
    assert zckpt.load("c", **its).notes == []
    ours, theirs = (one["optimizer"].param_groups[0]["params"] for one in (mine, its))
    assert all(map(torch.equal, ours, theirs))
    zckpt.assert_restored("c", **its)
    model, frozen = mine["model"], ("loss.scale", nn.Parameter(torch.ones(2), requires_grad=False))
    zckpt.save("without", model=model, optimizer=torch.optim.AdamW(model.named_parameters()))
    more = torch.optim.AdamW([*model.named_parameters(), frozen])
    notes = zckpt.load("without", model=model, optimizer=more).notes
    assert any("loss.scale, which the optimizer alone has" in note for note in notes)
    with refusing(zckpt.NotRestoredError, "the checkpoint has no loss.scale"):
        zckpt.assert_restored("without", model=model, optimizer=more)


@pytest.mark.parametrize(
    ("stride", "shares"),
    [*((one, True) for one in [(0, 1), (1, 1), (1, 2), (2, 1)]), *((one, False) for one in [(1, 3), (2, 5), (2, 3)])],
)
def test_a_buffer_of_any_strides_is_loaded_and_refused_before_a_change_if_elements_share_memory(stride, shares):
    saved, model = nn.Linear(3, 3), nn.Linear(3, 3)
    saved.register_buffer("mask", torch.arange(9.0).reshape(3, 3))
    model.register_buffer("mask", torch.zeros(15).as_strided((3, 3), stride))
    zckpt.save("c", model=saved)
    before = model.weight.detach().clone()
    with refusing(UsageError, "elements of mask share memory") if shares else nullcontext():
        zckpt.load("c", model=model)
    assert torch.equal(model.weight, before if shares else saved.weight)
    assert shares or torch.equal(model.mask, saved.mask)


@pytest.mark.parametrize("step", [-1, 2.5, "7", 1 << 63])
def test_a_step_that_no_file_could_hold_is_refused_before_anything_is_written(step):
    model = nn.Linear(2, 2)
    with refusing(UsageError, "step is not a number of steps"):
        zckpt.save("c", model=model, step=step)
    with zckpt.Checkpointer("run") as checkpointer, refusing(UsageError, "number of steps"):
        checkpointer.save(step, model=model)
    assert not Path("c").exists()


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 7])
def test_a_step_may_be_of_any_whole_type(step):
    zckpt.save("c", model=nn.Linear(2, 2), step=step)
    assert zckpt.load("c", strict=False).step == 7


def test_what_is_no_number_takes_the_place_of_a_hyperparameter_in_a_tensor():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["limit"] = None
    zckpt.save("c", model=model, optimizer=optimizer)
    optimizer.param_groups[0]["limit"] = torch.tensor(1.0)
    zckpt.load("c", model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["limit"] is None


def apart(seed: int) -> nn.Module:
    """Make tensors that lie apart in memory, and views that are computed when they are read."""
    torch.manual_seed(seed)
    model = nn.Module()
    model.column = nn.Parameter(torch.randn(4, 3)[:, 1])
    model.turned = nn.Parameter(torch.randn(4, 3).T)
    model.register_buffer("every_second", torch.randn(2, 6)[:, ::2])
    model.register_buffer("every_third_of_one", torch.randn(1)[::3].clone())
    model.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())
    model.register_buffer("negated", torch.randn(3, dtype=torch.complex64).conj().imag)
    return model


@pytest.mark.parametrize("async_", [False, True])
def test_tensors_are_saved_and_loaded_whatever_lies_in_memory(async_):
    model, other = apart(1), apart(2)
    assert (model.conjugated.is_conj(), model.negated.is_neg()) == (True, True)
    assert model.every_third_of_one.stride() == (3,)  # and contiguous, as one element always is
    saving = zckpt.save("c", model=model, async_=async_)
    if saving is not None:
        saving.result()
    zckpt.load("c", model=other)
    opened = zckpt.open("c")
    for name, one in model.state_dict().items():
        assert torch.equal(one, other.state_dict()[name])
        assert torch.equal(one, opened.read(name))


def test_a_model_without_memory_is_neither_loaded_nor_said_to_be():
    model, optimizer = trained(nn.Linear(2, 2))
    zckpt.save("c", model=model, optimizer=optimizer)
    for call in (zckpt.load, zckpt.assert_restored):
        for made, said in (
            (nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
            (nn.LazyLinear(2), "weight is not initialised"),
        ):
            with refusing(UnsupportedError, said):
                call("c", model=made)
    its = torch.optim.AdamW(nn.Linear(2, 2, device="meta").named_parameters())
    with refusing(UsageError, "exp_avg is for a tensor on the meta device"):
        zckpt.load("c", optimizer=its)
    assert not its.state


class ByRank(torch.optim.SGD):
    """Keeps state of each parameter on one rank, as Muon in its author's distributed version."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = self.param_groups[0]["params"]
        for parameter in every[dist.get_rank() :: dist.get_world_size()]:
            self.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)


@on_ranks(2)
def test_state_that_one_rank_alone_has_is_refused_and_not_lost():
    model = nn.Linear(4, 4)
    optimizer = ByRank(model.named_parameters())
    optimizer.step()
    with refusing(UnsupportedError, r"only on some ranks momentum_buffer of bias \[4\], momentum_buffer of w"):
        zckpt.save("c", model=model, optimizer=optimizer)
    assert not Path("c").exists()


@on_ranks(2)
def test_ranks_may_have_parameters_in_another_order(rank):
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(sorted(model.named_parameters(), reverse=bool(rank)))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    zckpt.save("c", model=model, optimizer=optimizer)
    zckpt.assert_restored("c", model=model, optimizer=optimizer)


@on_ranks(2)
def test_a_stage_that_is_no_part_of_a_list_is_told_to_be_given_in_one(rank):
    with refusing(UnsupportedError, r"only on some ranks weight of .*0\.weight .*in a list, model=\[stage\]"):
        zckpt.save("c", model=nn.ModuleDict({str(rank): nn.Linear(2, 2)}))


def test_what_cannot_be_saved_is_refused():
    of_bits = nn.Linear(2, 2)
    of_bits.register_buffer("bits", torch.zeros(4, dtype=torch.uint8).view(torch.bits8))
    of_complex = torch.optim.SGD([{"params": nn.Linear(2, 2).named_parameters(), "phase": torch.tensor(1j)}])
    for given, kind, said in (
        ({"extra": [1]}, UsageError, "unusable extra: expected a dict, found list"),
        ({"scheduler": 3}, UsageError, r"unusable lr_scheduler: expected an object with state_dict\(\), found int"),
        ({"model": nn.Linear(2, 2, device="meta")}, UnsupportedError, "weight is on the meta device"),
        ({"model": nn.LazyLinear(3)}, UnsupportedError, "weight is not initialised"),
        ({"optimizer": of_complex}, UnsupportedError, "phase is a tensor, not a real number"),
        ({"model": of_bits}, UnsupportedError, "unknown element type"),
    ):
        with refusing(kind, said):
            zckpt.save("c", **{"model": nn.Linear(2, 2), **given})
        assert names_in() == []


@on_ranks(2)
def test_a_zero_optimizer_is_saved_and_loaded_with_groups_of_which_it_steps_nothing():
    def made(seed: int) -> tuple[nn.Module, ZeroOptimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
        model.none = nn.ParameterList([torch.empty(0, 3)])  # which has no elements
        model.forward = lambda x: model[1](model[0](x)) + model.none[0].sum()
        groups = [{"params": list(one.named_parameters(prefix=name))} for name, one in model.named_children()]
        return model, ZeroOptimizer(groups, torch.optim.Adam, lr=0.1)

    (model, optimizer), (other, its) = made(1), made(2)
    trained(model, optimizer)
    zckpt.save("c", model=model, optimizer=optimizer)
    zckpt.load("c", model=other, optimizer=its)
    zckpt.assert_restored("c", model=other, optimizer=its)
    for _ in range(2):
        assert torch.equal(its.full_state("0.weight", "exp_avg"), optimizer.full_state("0.weight", "exp_avg"))
        assert equal(other, model)
        for one in ((model, optimizer), (other, its)):
            torch.manual_seed(3)
            trained(*one)


# --- beside


EXTRA = {
    "text": "naïve \u2713", "numbers": [1, 2.5, -(2**70), True, None, float("inf")], "pair": (1, (2, "x")),
    "tensor": torch.arange(6).reshape(2, 3).T, "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "empty": torch.empty(0, 3), "scalar": torch.tensor(7), "array": np.arange(6.0).reshape(2, 3)[:, ::-1],
    "number": np.float32(0.1), "dtype": torch.float16, "device": torch.device("cpu"), "size": torch.Size([2, 3]),
    "bytes": b"\x00\xff", "set": {1, 2}, "ordered": OrderedDict(b=1, a=2), 3: "a number for a key",
    "count": Counter("aab"),
}  # fmt: skip


@on_ranks(2)
def test_what_is_beside_comes_back():
    def made(scale: float) -> dict[str, Any]:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "grad_scaler": scaler}

    mine, its = made(64.0), made(2.0)
    mine["optimizer"].step()
    mine["scheduler"].step()
    zckpt.save("c", **mine, extra=EXTRA)
    expected = (random.random(), np.random.rand(), torch.rand(3).tolist())
    restored = zckpt.load("c", **its)
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == expected
    assert its["scheduler"].state_dict().keys() == mine["scheduler"].state_dict().keys()
    assert its["scheduler"].get_last_lr() == mine["scheduler"].get_last_lr()
    assert its["grad_scaler"].state_dict() == mine["grad_scaler"].state_dict()
    assert its["optimizer"].param_groups[0]["lr"] == mine["optimizer"].param_groups[0]["lr"]
    found = restored.extra
    assert (list(found), restored.notes) == (list(EXTRA), [])
    assert list(map(type, found.values())) == list(map(type, EXTRA.values()))
    assert list(found["ordered"]) == list(EXTRA["ordered"])
    assert_same_tree(*({**one, "array": one["array"].tolist()} for one in (found, EXTRA)))


def random_numbers(rank, world_size, what: str) -> tuple[Any, list[str]]:
    model = nn.Linear(1, 1)
    torch.manual_seed(100 + rank)
    if what == "save":
        zckpt.save("c", model=model)
        return torch.rand(2).tolist(), []
    restored = zckpt.load("c", model=model, random_states=what == "load")
    return torch.rand(2).tolist(), restored.notes


def test_each_rank_goes_on_with_its_own_random_numbers():
    saved = run(random_numbers, 2, "save")
    loaded = run(random_numbers, 3, "load")
    assert [numbers for numbers, _ in loaded[:2]] == [numbers for numbers, _ in saved]
    assert loaded[2][1] == ["no random states for rank 2: only 2 ranks saved theirs"]
    torch.manual_seed(101)
    assert run(random_numbers, 2, "leave")[1][0] == torch.rand(2).tolist()


SIZED = {"deepspeed": {"world_size": 2, "stage": 2}, "fsdp-rank-files": {"world_size": 2}}


@pytest.mark.parametrize(
    "to", [None, "zckpt", "deepspeed", "universal", "dcp", "consolidated", "zero-redundancy", "fsdp-rank-files"]
)
def test_what_save_kept_comes_back_from_every_format_whatever_the_user_calls_his_own(to):
    torch.manual_seed(7)
    model, optimizer = trained(nn.Linear(3, 5), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    extra = {"epoch": 4, "extra": "hello", "random_states": 7}
    source = Path("c")
    zckpt.save(source, model=model, optimizer=optimizer, scheduler=scheduler, step=1, extra=extra)
    expected = torch.rand(2)
    if to is not None:
        zckpt.convert(source, source := Path(to), to=to, **SIZED.get(to, {}))
    restored = zckpt.load(source, model=model, optimizer=optimizer, scheduler=scheduler)
    assert (restored.extra, restored.notes) == (extra, [])
    assert torch.equal(torch.rand(2), expected)
    assert zckpt.resume_check(source, program="zckpt", world_size=1).as_dict()["verdict"] == "whole"


# --- models that differ


@on_ranks(2)
def test_models_that_differ_are_refused_or_loaded_as_far_as_they_go():
    torch.manual_seed(0)
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 4), "c": nn.Linear(2, 2)})
    optimizer = ZeroOptimizer(list(saved.named_parameters()), torch.optim.AdamW, lr=0.5)
    optimizer.backward(sum(p.square().sum() for p in saved.parameters()))
    optimizer.step()
    zckpt.save("c", model=saved, optimizer=optimizer, step=1)
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 5), "d": nn.Linear(1, 1)})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    other = ZeroOptimizer(list(model.named_parameters()), torch.optim.AdamW, lr=0.25)
    for options in ({}, {"optimizer": other}):
        with refusing(UsageError, r"not a checkpoint of this model.*strict=False"):
            zckpt.load("c", model=model, **options)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    restored = zckpt.load("c", model=model, optimizer=other, strict=False)
    assert torch.equal(model["a"].weight, saved["a"].weight)
    assert torch.equal(other.full_state("a.weight", "exp_avg"), optimizer.full_state("a.weight", "exp_avg"))
    for name in ("b.weight", "d.bias"):
        assert torch.equal(dict(model.named_parameters())[name], before[name])
        assert not other.full_state(name, "exp_avg").any()
    assert other.param_groups[0]["lr"] == 0.25
    assert restored.missing == ["d.weight", "d.bias"]
    assert restored.unexpected == ["c.weight", "c.bias"]
    assert restored.reshaped == ["b.weight", "b.bias"]
    assert "hyperparameters are not changed" in restored.notes[0]


# --- sharded models, subgroups, and what is read by one


@on_ranks(4)
def test_boxes_are_saved_once_and_loaded_into_other_boxes():
    """Shard along one dimension of a mesh and replicate along the other; rows and columns; load into other cuts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    model, optimizer = trained(fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), mesh=mesh), lr=0.1)
    zckpt.save("hybrid", model=model, optimizer=optimizer, step=1)
    opened = zckpt.open("hybrid")
    for name, parameter in model.named_parameters():
        assert torch.equal(opened.read(name), whole(parameter))
        assert torch.equal(opened.read(name, "exp_avg"), whole(optimizer.state[parameter]["exp_avg"]))
    for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Replicate()]):
        other = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        for layer in other:
            layer.weight = nn.Parameter(distribute_tensor(torch.zeros_like(layer.weight), mesh, placements))
        zckpt.load("hybrid", model=other, random_states=False)
        for name, parameter in other.named_parameters():
            assert torch.equal(whole(parameter), opened.read(name)), (name, placements)
        zckpt.save("other", model=other, overwrite=True)
        again = zckpt.open("other")
        assert all(torch.equal(again.read(name), opened.read(name)) for name in opened.parameters)
        dist.barrier()


@on_ranks(2)
def test_ranks_of_a_mesh_in_another_order_than_torch_cuts_by_are_refused(rank):
    def sharded(**options: Any) -> nn.Module:
        return fully_shard(nn.Linear(4, 4), mesh=DeviceMesh("cpu", [1, 0], mesh_dim_names=("shards",), **options))

    with refusing(UnsupportedError, "in another order than in its process groups.*ranks ascend"):
        zckpt.save("no", model=sharded())
    (folder := Path("files")).mkdir(exist_ok=True)
    torch.save(sharded().state_dict(), folder / f"model_world_size_2_rank_{rank}.pt")
    dist.barrier()
    with refusing(UnsupportedError, "whose ranks do not ascend: torch cuts"):
        zckpt.open(folder)
    if "preserve_rank_order" in signature(DeviceMesh).parameters:  # since torch 2.15
        zckpt.save("yes", model=(model := sharded(preserve_rank_order=True)))
        assert torch.equal(zckpt.open("yes").read("weight"), whole(model.weight))
    (model := nn.Linear(4, 4)).weight = nn.Parameter(
        DTensor.from_local(torch.ones(2, 4), DeviceMesh("cpu", [0, 1], _init_backend=False), [Shard(0)])
    )
    with refusing(UnsupportedError, "on a mesh without process groups"):
        zckpt.save("no", model=model)


@on_ranks(3)
def test_a_part_of_the_world_saves_and_loads(rank):
    pair = dist.new_group([0, 2])
    other = dist.new_group([1])
    if rank == 1:
        zckpt.save("alone", model=nn.Linear(2, 2), process_group=other)
        return
    torch.manual_seed(0)
    model, again = nn.Linear(30, 30), nn.Linear(30, 30)
    optimizer, its = (
        ZeroRedundancyOptimizer(one.named_parameters(), torch.optim.AdamW, process_group=pair, lr=0.1)
        for one in (model, again)
    )
    trained(model, optimizer)
    saving = zckpt.save("pair", model=model, optimizer=optimizer, async_=True)
    saving.result()
    for broadcast in (False, True):
        nn.init.zeros_(again.weight)
        zckpt.load("pair", model=again, optimizer=its, broadcast=broadcast)
        assert equal(again, model)
    names = ["checkpoint.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"]
    assert names_in("pair") == names


# --- one process


@on_ranks(2, fresh=True)
def test_the_next_process_group_knows_nothing_of_a_save_in_the_one_before(rank, world_size, tmp_path):
    model = nn.Linear(2, 2)
    saving = zckpt.save("first", model=model, async_=True)
    assert saving is not None
    saving.result()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=rank, world_size=world_size)
    zckpt.save("second", model=model)
    assert zckpt.load("second", model=model).notes == []


def test_one_process_without_a_group_saves_and_loads():
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(2, 2))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    saving = zckpt.save("run/c", model=model, optimizer=optimizer, async_=True)
    with torch.no_grad():
        expected = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.zero_()  # what has been staged is no longer looked at
    saving.result()
    assert saving.done()
    assert zckpt.load("run/c", model=model, optimizer=optimizer).world_size == 1
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("name", ["saved", "saved.pt"])
def test_the_users_default_device_is_for_the_users_tensors(name):
    (model, optimizer), its = trained(nn.Linear(2, 2), torch.optim.NAdam), nn.Linear(2, 2)
    given, other = (
        {"model": model, "optimizer": optimizer, "extra": {"kept": torch.ones(2)}},
        torch.optim.NAdam(its.parameters()),
    )
    path = Path(name)
    with torch.device("meta"):
        if name == "saved":
            zckpt.save(path, **given)
            saving = zckpt.save(path, **given, async_=True, overwrite=True)
            assert saving is not None
            saving.result()
        else:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **given["extra"]}, path)
        assert zckpt.load(path, model=its, optimizer=other).extra["kept"].tolist() == [1.0, 1.0]
        zckpt.assert_restored(path, model=its, optimizer=other)
        assert zckpt.open(path).read("weight", "weight").tolist() == model.weight.tolist()
    assert equal(its, model)


def test_what_a_disabled_grad_scaler_has_not_is_not_loaded():
    model = nn.Linear(2, 2)
    zckpt.save("c", model=model, grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert zckpt.load("c", model=model, grad_scaler=torch.amp.GradScaler("cpu", enabled=False)).notes == []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.warns(UserWarning, match="no state of a grad_scaler: it is not changed"):
        zckpt.load("c", model=model, grad_scaler=scaler)
    assert scaler.get_scale() == 8.0


def test_a_model_alone_has_no_optimizer_to_load():
    model = nn.Linear(2, 2)
    zckpt.save("c", model=model)
    optimizer = torch.optim.AdamW(model.parameters())
    with refusing(UsageError, "param groups"):
        zckpt.load("c", model=model, optimizer=optimizer)
    notes = zckpt.load("c", model=model, optimizer=optimizer, strict=False).notes
    assert any("param groups" in note for note in notes)
    with pytest.warns(UserWarning, match="no state of a scheduler"):
        zckpt.load("c", model=model, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))


class Placed:
    """A scheduler with a state of any class."""

    step: Any = PurePath("a")

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize("name", ["saved", "saved.pt"])
def test_a_scheduler_gets_what_it_had_or_nothing(name):
    """MultiStepLR counts milestones, and an object of any class is not made."""
    model, optimizer = trained(nn.Linear(2, 2))
    made = (torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones) for milestones in ([2, 2, 3], [9]))
    scheduler, other = made
    if name == "saved":
        zckpt.save(name, model=model, scheduler=scheduler)
    else:
        torch.save({"model": model.state_dict(), "lr_scheduler": scheduler.state_dict()}, name)
    zckpt.load(name, model=model, scheduler=other)
    assert other.milestones == Counter({2: 2, 3: 1})
    zckpt.assert_restored(name, model=model, scheduler=other)
    torch.save({"model": model.state_dict(), "lr_scheduler": Placed().state_dict()}, "object.pt")
    its = Placed()
    its.step = "as it was"
    with pytest.warns(UserWarning, match="the state of a scheduler has an object that only a pickle can make"):
        zckpt.load("object.pt", model=model, scheduler=its)
    assert its.step == "as it was"


class Noting(torch.optim.SGD):
    """Keeps for each parameter what torch would cast: texts, integers, a limit, and a complex number."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                its = self.state[parameter]
                its["note"], its["phase"] = "warming up", torch.tensor(1 + 2j)
                its["more"] = {"texts": ["a", "b"], "codes": [torch.arange(3), torch.ones(2)], "last": deque([1], 4)}
        return super().step(closure)


def test_texts_in_the_state_of_an_optimizer_are_loaded_as_they_are():
    model, optimizer = trained(nn.Linear(3, 2), Noting, lr=0.1, momentum=0.9)
    zckpt.save("saved", model=model, optimizer=optimizer)
    other = Noting(model.parameters(), lr=0.1, momentum=0.9)
    zckpt.load("saved", model=model, optimizer=other)
    assert [other.state[p]["note"] for p in model.parameters()] == ["warming up", "warming up"]
    assert other.state[model.weight]["more"]["last"].maxlen == 4
    assert_same_tree(other.state_dict()["state"], optimizer.state_dict()["state"])
    zckpt.assert_restored("saved", model=model, optimizer=other)
    zckpt.convert("saved", "again", to="zckpt")
    assert zckpt.diff("saved", "again").equal


def test_extra_is_as_it_was_when_an_asynchronous_save_returned(monkeypatch):
    is_changed = threading.Event()

    def write_later(*args: Any, **options: Any) -> None:
        is_changed.wait()
        write(*args, **options)

    monkeypatch.setattr(saving_module, "write", write_later)
    average, count = torch.ones(3), bytearray(b"1")
    saving = zckpt.save("c", extra={"average": average, "count": count}, async_=True)
    average.zero_()
    count[:] = b"2"
    is_changed.set()
    saving.result()
    extra = zckpt.load("c").extra
    assert extra["average"].tolist() == [1, 1, 1]
    assert extra["count"] == bytearray(b"1")


class TwoEnds(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.last.weight = self.first.weight


def two(first: torch.Tensor, last: torch.Tensor) -> str:
    """The name of a file that has the two weights of `TwoEnds`."""
    torch.save({"first.weight": first, "last.weight": last}, "two.pt")
    return "two.pt"


def tie_what_differs(rank, world_size, path: Path) -> None:
    tied, what = TwoEnds(tied=True), "last.weight is the same tensor as first.weight here, but not in the checkpoint"
    with refusing(UsageError, what):
        zckpt.load(path, model=tied)
    assert f"left out: {what}" in zckpt.load(path, model=tied, strict=False).notes
    with refusing(zckpt.NotRestoredError, what):
        zckpt.assert_restored(path, model=tied, strict=False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_tensors_that_differ_do_not_become_one_in_silence(world_size):
    model = TwoEnds(tied=False)
    zckpt.save("saved", model=model, optimizer=torch.optim.AdamW(model.parameters()))
    run(tie_what_differs, world_size, "saved")


@pytest.mark.parametrize("strip_prefix", [None, "net."])
@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
def test_a_numbered_optimizer_beside_any_name_of_a_tied_parameter(name, strip_prefix):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(TwoEnds(tied=True), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        groups = [{"params": [one for one in model.parameters() if one.dim() == dim]} for dim in (2, 1)]
        return model, torch.optim.AdamW(groups)

    model, optimizer = made()
    model[2](model[1](model[0].last(torch.ones(1, 3)))).square().sum().backward()
    optimizer.step()
    held = {key: one for key, one in model.state_dict().items() if not key.startswith("0.") or key == f"0.{name}"}
    held = {f"{strip_prefix or ''}{key}": one for key, one in held.items()}
    torch.save({"model": held, "optimizer": optimizer.state_dict()}, "saved.pt")
    other, its = made()
    zckpt.load("saved.pt", model=other, optimizer=its, strip_prefix=strip_prefix)
    assert_same_tree(its.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
def test_a_file_may_have_any_name_of_a_tied_parameter(name):
    saved, model = TwoEnds(tied=True), TwoEnds(tied=True)
    torch.save({name: saved.first.weight.detach()}, "model.pt")
    assert not zckpt.load("model.pt", model=model).missing
    zckpt.assert_restored("model.pt", model=model)
    assert torch.equal(model.first.weight, saved.first.weight)


def test_a_second_name_with_other_bits_or_sizes_is_no_difference_after_loading():
    weight, tied = torch.randn(3, 3), TwoEnds(tied=True)
    for other, strict in ((weight.bfloat16(), True), (torch.randn(4, 3), False)):
        zckpt.load(two(weight, other), model=tied, strict=strict)
        zckpt.assert_restored("two.pt", model=tied, strict=strict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tied_tensors_of_two_types_that_differ_do_not_become_one_in_silence(dtype):
    two(torch.randn(3, 3), torch.randn(3, 3).bfloat16())
    tied = TwoEnds(tied=True).to(dtype)
    with refusing(UsageError, "the same tensor as first.weight here"):
        zckpt.load("two.pt", model=tied)
    zckpt.load("two.pt", model=tied, strict=False)
    with refusing(zckpt.NotRestoredError, "the same tensor as first.weight here"):
        zckpt.assert_restored("two.pt", model=tied, strict=False)


def test_buffers_that_differ_and_are_one_here_do_not_become_one_in_silence():
    def made(*tables: torch.Tensor) -> nn.Module:
        model = nn.Linear(3, 3)
        for name, table in zip("ab", tables, strict=True):
            model.register_buffer(name, table)
        return model

    zckpt.save("other", model=made(torch.zeros(3), torch.ones(3)))
    zckpt.save("same", model=made(torch.ones(3), torch.ones(3)))
    model = made(*[torch.zeros(3)] * 2)
    with refusing(UsageError, "b is the same tensor as a here, but not in the checkpoint"):
        zckpt.load("other", model=model)
    assert not model.b.any()
    zckpt.load("same", model=model)
    zckpt.assert_restored("same", model=model)


def count_what_is_read(rank, world_size, path: str) -> int:
    read, read_tensors = list[int](), loading_module.read_tensors

    def counting(reads: Any) -> None:
        read.extend(one.tensor.nbytes for one in reads)
        read_tensors(reads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading_module, "read_tensors", counting)
        zckpt.load(path, model=TwoEnds(tied=True), broadcast=True)
    return sum(read)


def test_with_broadcast_one_rank_compares_tied_tensors():
    weight = torch.randn(3, 3)
    assert (
        sum(run(count_what_is_read, 2, two(weight, weight.clone()))) == 3 * weight.nbytes
    )  # two to compare, and one to load


@on_ranks(2)
def test_with_broadcast_all_ranks_must_have_the_same_tensors(rank):
    model = TwoEnds(tied=True)
    zckpt.save("c", model=model)
    with refusing(UsageError, r"that all ranks have alike: expected torch\.float32 last"):
        zckpt.load("c", model=TwoEnds(tied=rank == 1), broadcast=True)


def test_tied_tensors_are_compared_piece_by_piece(monkeypatch):
    monkeypatch.setattr(loading_module, "TOGETHER_NUMEL", 4)
    weight, tied = torch.randn(3, 3), TwoEnds(tied=True)
    other = weight.clone()
    zckpt.load(two(weight, other), model=tied)
    other[2, 2] += 1
    with refusing(UsageError, "the same tensor as first.weight here"):
        zckpt.load(two(weight, other), model=tied)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_was_frozen_after_steps_is_trained_in_a_checkpoint(stage):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW([{"params": one.parameters()} for one in model])
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model[1].requires_grad_(False)
    zckpt.save("saved", model=model, optimizer=optimizer)
    first = torch.optim.AdamW(model[0].parameters())
    with refusing(UsageError, "other param groups than the optimizer's"):  # of which one has state
        zckpt.load("saved", model=model, optimizer=first)
    zckpt.convert("saved", "run", to="deepspeed", world_size=2, stage=stage)
    assert not [one.name for one in zckpt.open("run").parameters.values() if one.frozen]
