"""What is saved from a wrapped model is the bare model's, and back: by torch, by zckpt, and on the command line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zckpt
import zckpt.dcp
from tests import live
from tests.gloo import on_ranks
from tests.live import equal, save_both
from tests.pairwise import some
from tests.refusals import refusing
from tests.training.trainings import compiled, traced_if
from zckpt.errors import UnsupportedError
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer

Made = Callable[[], nn.Module]


class Net(nn.Module):
    """A child of any name, a buffer and layers of one shape."""

    def __init__(self, child: str = "body") -> None:
        super().__init__()
        self.add_module(child, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6)))
        self.head = nn.Linear(6, 6)
        self.register_buffer("n", torch.zeros(3))
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.get_submodule(self.child)(x)).sum() + self.n.sum()


class Only(nn.Module):
    """Nothing but a child that is called as a wrapper's is."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).sum()


def within(model: nn.Module) -> nn.Module:
    model.head = checkpoint_wrapper(model.head)
    child = model.get_submodule(model.child)
    child[0] = compiled(child[0])
    return model


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "ddp": DistributedDataParallel,
    "dp": nn.DataParallel,
    "compile": compiled,
    "ddp-compile": lambda model: DistributedDataParallel(compiled(model)),
    "compile-ddp": lambda model: compiled(DistributedDataParallel(model)),
    "checkpointed": checkpoint_wrapper,
    "within": within,
    "ddp-within": lambda model: DistributedDataParallel(within(model)),
    "fsdp": sharded,
    "fsdp-within": lambda model: sharded(within(model)),
    "compile-fsdp": lambda model: compiled(sharded(model)),
}
MODELS: dict[str, Made] = {"net": Net, "child": lambda: Net("module"), "only": Only}


def build(model: str, wrapper: str, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    made = WRAPPERS[wrapper](MODELS[model]())
    return made, torch.optim.AdamW(made.parameters(), lr=0.1 * seed)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all without names, which wrappers change."""
    return [*live.state(model, optimizer).values()]


def save_all(rank, model: str, wrappers: list[str], traced: bool, folder: Path) -> dict[str, list[torch.Tensor]]:
    """Save from each wrapper, by torch into a file and by zckpt; return what was saved."""
    saved = {}
    for name in wrappers:
        made, optimizer = build(model, name, seed=1)
        with traced_if(traced):
            made(torch.ones(2, 4)).backward()
        optimizer.step()
        zckpt.save(folder / f"{name}.z", model=made, optimizer=optimizer)
        if rank == 0 and "fsdp" not in name:
            save_both(made, optimizer, folder / f"{name}.pt")
        saved[name] = state(made, optimizer)
    torch.distributed.barrier()
    return saved


SOME = [("net", list(WRAPPERS), False), ("only", ["bare", "ddp", "compile-ddp"], True)]
MORE = [("net", list(WRAPPERS), True), ("child", ["bare", "ddp", "compile-ddp", "within", "fsdp"], True)]


@on_ranks(2, each=some(SOME, MORE))
def test_a_checkpoint_of_any_wrapper_is_loaded_into_any(rank, model, wrappers, every):
    """From each wrapper into the next; with `every`, also into itself, and the bare one's into all."""
    folder = Path(model)
    saved = save_all(rank, model, wrappers, every and model == "net", folder)
    pairs = {*itertools.pairwise([*wrappers, wrappers[0]])}
    if every:
        pairs |= {pair for name in wrappers for pair in (("bare", name), (name, "bare"), (name, name))}
    for (name, into), suffix in itertools.product(sorted(pairs), (".pt", ".z")):
        if suffix == ".pt" and "fsdp" in name:
            continue
        made, optimizer = build(model, into, seed=2)
        restored = zckpt.load(folder / f"{name}{suffix}", model=made, optimizer=optimizer)
        assert not restored.missing + restored.unexpected + restored.reshaped
        for found, expected in zip(state(made, optimizer), saved[name], strict=True):
            assert torch.equal(found, expected), (name, into, suffix)
        assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("form", ["deepspeed", "zero-redundancy"])
@on_ranks(2)
@pytest.mark.every(3)
def test_formats_of_other_programs_are_loaded_into_the_compiled_model(rank, form, named):
    def made(seed: int) -> tuple[nn.Module, ZeroOptimizer | ZeroRedundancyOptimizer]:
        torch.manual_seed(seed)
        model = compiled(Net())
        parameters = list(model.named_parameters()) if named else list(model.parameters())
        if form == "deepspeed":
            return model, ZeroOptimizer(parameters, torch.optim.AdamW, lr=0.1 * seed, stage=2)
        return model, ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1 * seed)

    model, optimizer = made(1)
    with traced_if(named):
        loss = model(torch.ones(2, 4))
    optimizer.backward(loss) if isinstance(optimizer, ZeroOptimizer) else loss.backward()
    optimizer.step()
    target = Path("run/step1")
    zckpt.save(target, model=model, optimizer=optimizer, format=form)
    other, its = made(2)
    zckpt.load(target, model=other, optimizer=its)
    bare = Net()
    zckpt.load(target, model=bare)
    assert equal(other, model)
    assert equal(bare, model)
    assert its.param_groups[0]["lr"] == 0.1
    if form == "zero-redundancy" and rank == 0:
        assert list(torch.load(target / "model.pt")) == list(bare.state_dict())


def test_models_in_one_module_may_have_wrappers_of_their_own(tmp_path):
    def made(around: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"gen": around(Net()), "disc": Net()})
        optimizer = torch.optim.AdamW(model.parameters())
        (model["gen"](torch.ones(2, 4)) + model["disc"](torch.ones(2, 4))).backward()
        optimizer.step()
        return model, optimizer

    kinds = (nn.DataParallel, lambda net: net)
    for source, target in (kinds, kinds[::-1]):
        saved, its = made(source)
        path = Path(f"{len(list(tmp_path.iterdir()))}")
        zckpt.save(path, model=saved, optimizer=its)
        model, optimizer = made(target)
        assert zckpt.load(path, model=model, optimizer=optimizer).notes == []
        assert equal(model, saved)
        zckpt.assert_restored(path, model=model, optimizer=optimizer)


@on_ranks(2)
def test_what_fully_sharded_data_parallel_saved_is_loaded_into_the_bare_model_and_itself(rank):
    torch.manual_seed(1)
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        told = {name: one.detach().clone() for name, one in model.module.named_parameters()}
    told["n"] = torch.zeros(3)
    if rank == 0:
        inside = {f"_fsdp_wrapped_module.{name}": one for name, one in told.items()}
        torch.save({"model": inside}, "inside.pt")
        torch.save({"model": told}, "whole.pt")
    torch.distributed.barrier()
    torch.manual_seed(1)
    expected = Net()
    for name in ("inside.pt", "whole.pt"):
        torch.manual_seed(2)
        bare = Net()
        zckpt.load(name, model=bare)
        assert equal(bare, expected)
    torch.manual_seed(3)
    other = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    zckpt.load("inside.pt", model=other)
    assert equal(other, model)
    with refusing(UnsupportedError, r"use zckpt.save and zckpt.load"):
        zckpt.optim.files.load(torch.optim.SGD(model.parameters()), "whole.pt", model=model)


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory) -> Path:
    """A file of a compiled model in DataParallel, whose optimizer has names of its own."""
    tmp_path = tmp_path_factory.mktemp("wrapped")
    torch.manual_seed(1)
    model = nn.DataParallel(compiled(Net()))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model.module(torch.ones(2, 4)).backward()
    optimizer.step()
    save_both(model, optimizer, tmp_path / "wrapped.pt")
    bare = {name.removeprefix("module._orig_mod."): one for name, one in model.state_dict().items()}
    told = optimizer.state_dict()
    for group in told["param_groups"]:
        group["param_names"] = [name.removeprefix("module._orig_mod.") for name in group["param_names"]]
    torch.save({"model": bare, "optimizer": told}, tmp_path / "bare.pt")
    return tmp_path


def test_consolidate_writes_names_that_the_bare_model_takes(wrapped):
    zckpt.consolidate(wrapped / "wrapped.pt", wrapped / "model.pt")
    model = Net()
    model.load_state_dict(torch.load(wrapped / "model.pt"))
    assert torch.equal(model.head.weight, torch.load(wrapped / "bare.pt")["model"]["head.weight"])


def test_what_was_left_out_is_kept(wrapped):
    checkpoint = zckpt.open(wrapped / "wrapped.pt")
    assert checkpoint.wrapped["head.weight"] == "module._orig_mod.head.weight"
    assert torch.equal(checkpoint.read("head.weight"), checkpoint.read("module._orig_mod.head.weight"))
    assert zckpt.open(wrapped / "bare.pt").wrapped == {}


def test_wrapped_and_bare_are_equal(wrapped):
    assert zckpt.diff(wrapped / "wrapped.pt", wrapped / "bare.pt").equal
    prints = [zckpt.fingerprint(wrapped / name).text for name in ("wrapped.pt", "bare.pt")]
    assert prints[0] == prints[1]


def test_names_may_be_given_with_what_a_wrapper_put_there(wrapped):
    told = torch.load(wrapped / "wrapped.pt")
    names = told["optimizer"]["param_groups"][0].pop("param_names")
    torch.save(told, wrapped / "numbered.pt")
    for listed in (names, [name.removeprefix("module._orig_mod.") for name in names]):
        assert zckpt.open(wrapped / "numbered.pt", names=listed).param_groups[0].parameters[-1] == "head.bias"


def test_dcp_reads_and_writes_bare_names(wrapped):
    source = torch.load(wrapped / "wrapped.pt")["model"]
    dcp.save({"model": source}, checkpoint_id=str(wrapped / "of torch"))
    dcp.save({"model": source}, storage_writer=zckpt.dcp.Writer(wrapped / "ours"))
    bare = torch.load(wrapped / "bare.pt")["model"]
    for name in ("of torch", "ours", "wrapped.pt"):
        assert {one.name for one in zckpt.open(wrapped / name).tensors()} == bare.keys()
        for keys in (bare, source):
            state = {"model": {key: torch.zeros_like(value) for key, value in keys.items()}}
            dcp.load(state, storage_reader=zckpt.dcp.Reader(wrapped / name))
            assert all(torch.equal(state["model"][key], value) for key, value in keys.items())


def test_dcp_gives_no_tensor_to_two_keys(wrapped):
    bare = torch.load(wrapped / "bare.pt")["model"]
    state = {"model": {**bare, "module.n": torch.ones(3)}}
    for tree in (state, {"app": state}):
        with pytest.raises(CheckpointException, match="would both be n"):
            dcp.load(tree, storage_reader=zckpt.dcp.Reader(wrapped / "bare.pt"))
        assert state["model"]["module.n"].sum() == 3
