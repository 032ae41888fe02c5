"""`dcp.load` through `zckpt.dcp.Reader`, and `dcp.save` through `zckpt.dcp.Writer`, on real ranks: bit for bit."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, default_planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zckpt
import zckpt.dcp
from tests.cli.console import FIXTURES
from tests.folders import names_in
from tests.gloo import on_ranks, run
from tests.live import trained
from tests.logical import assert_same_slots, assert_same_tree
from tests.pairwise import each, some
from tests.training.test_load_any_format import build, check, spec_of
from tests.training.trainings import BY_NAME, Training, differences, save_at, whole
from tests.truth import Truth, assert_same

pytestmark = pytest.mark.interop

SOURCES = {
    "s0_bf16_dp2": "", "s1_fp32_dp3": "", "s2_bf16_dp2_elastic": "", "s1_bf16_dp3_fused": "", "s2_bf16_dp2_sgdm": "",
    "s2_bf16_dp2_zerodim": "", "s3_bf16_dp3": "", "other/plain_adamw": "ckpt.pt", "other/zro_dp2_adamw": "ckpt",
    "other/dcp_fsdp2_dp3": "ckpt", "universal/s2_bf16_dp4": "",
}  # fmt: skip
"""Checkpoints, and where in the folder of the fixture they are."""

NUMBERED = ("other/plain_adamw", "other/zro_dp2_adamw")
"""Those in which two parameters without state cannot be told apart."""

FORMS = ["nested", "flat", "app", "bare"]


class App:
    """The program's state as one object, as torch's tutorials keep it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, form: str, reader: dcp.StorageReader) -> None:
    """Load with `dcp.load`, by state dicts of one form."""
    if form == "app":
        dcp.load({"app": App(model, optimizer)}, storage_reader=reader)
        return
    options = StateDictOptions(flatten_optimizer_state_dict=form != "nested")
    state, of_optimizer = get_state_dict(model, optimizer, options=options)
    if form == "bare":  # two loads, without a key before the names
        dcp.load(state, storage_reader=reader)
        dcp.load(of_optimizer, storage_reader=reader)
    else:
        every = {"model": state, "optimizer": of_optimizer}
        dcp.load(every, storage_reader=reader)
        state, of_optimizer = every["model"], every["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=of_optimizer, options=options)


def load_all(rank, world_size, kind: str, forms: list[str], every: int) -> int:
    checked = 0
    for number, (source, below) in list(enumerate(SOURCES.items()))[::every]:
        if kind == "fsdp" and spec_of(source).zero_dim:  # of which `fully_shard` takes none
            continue
        inner, model, optimizer, _ = build(source, kind, named=False)
        truth = Truth(FIXTURES / source.removeprefix("universal/"))
        names = list(truth.numbers.values()) if source in NUMBERED else None
        reader = zckpt.dcp.Reader(FIXTURES / source / below, names=names)
        load(model, optimizer, forms[number % len(forms)], reader)
        checked += check(inner, optimizer, truth)
    return checked


@pytest.mark.parametrize(
    ("world_size", "kind", "forms", "every"),
    some(
        [(1, "plain", FORMS, 1), (2, "adamw", FORMS[1:] + FORMS[:1], 3), (3, "fsdp", FORMS[3:] + FORMS[:3], 5)],
        [(2, "adamw", FORMS[1:] + FORMS[:1], 1), (3, "fsdp", FORMS[2:] + FORMS[:2], 1)],
    ),
)
def test_load_of_any_checkpoint_gives_the_truth(world_size, kind, forms, every):
    told = run(load_all, world_size, kind, forms, every)
    assert told[0] > 20 * (len(SOURCES) // every)


OPTIONS = {
    "adamw-fsdp-float32": StateDictOptions(),
    "adamw-ddp-float32": StateDictOptions(flatten_optimizer_state_dict=True),
    "sgd-compile-float32": StateDictOptions(),
}
"""What is saved, and how: the optimizer's state nested, or flat."""

OFTEN = {1: ["adamw-ddp-float32"], 2: ["adamw-fsdp-float32"], 3: ["sgd-compile-float32"]}
"""What every run saves at each number of ranks."""

SAVED, MORE = 2, 2


def state_of(training: Training, options: StateDictOptions, **beside: Any) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    return {"model": model, "optimizer": optimizer, "lr_scheduler": training.scheduler, **beside}


def save_all(rank, world_size, directory: Path, names: list[str]) -> dict[str, list[float]]:
    """Train, save with `dcp.save` or `dcp.async_save`, keep the truth beside it, and train on."""
    losses = {}
    for number, name in enumerate(names):
        training = Training.of(BY_NAME[name])
        training.train(range(SAVED))
        truth = training.state()
        state = state_of(
            training, OPTIONS[name], step=SAVED,
            rng=torch.get_rng_state(), count=torch.tensor(7), rest={"a": [1, "x", None], "t": (0.5, b"z")},
        )  # fmt: skip
        writer, waits = zckpt.dcp.Writer(directory / name), (number + world_size) % 2
        saving = dcp.save(state, storage_writer=writer) if waits else dcp.async_save(state, storage_writer=writer)
        if not waits:
            saving.result()  # which talks in the same process group as training does
        losses[name] = training.train(range(SAVED, SAVED + MORE))
        if rank == 0:
            torch.save(truth, directory / f"{name}.truth")
            torch.save(state["rng"], directory / "rng")
    return losses


def check_saved(
    rank, world_size, directories: dict[int, Path], names: dict[int, list[str]]
) -> list[dict[str, list[float]]]:
    """Hold what was saved against the truth, resume it in each way, and train on."""
    told = []
    for at, directory in directories.items():
        losses: dict[str, list[float]] = {}
        for name in names[at]:
            truth = torch.load(directory / f"{name}.truth", weights_only=True)
            if rank == 0:
                check_opened(zckpt.open(directory / name), truth)
            by_dcp, by_load = Training.of(BY_NAME[name], seed=1), Training.of(BY_NAME[name], seed=2)
            count, rng = torch.tensor(0), torch.zeros_like(torch.get_rng_state())
            state = state_of(by_dcp, OPTIONS[name], step=0, rng=rng, count=count, rest={"a": [], "t": None})
            dcp.load(state, storage_reader=zckpt.dcp.Reader(directory / name))
            set_state_dict(
                by_dcp.model, by_dcp.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
                options=OPTIONS[name],
            )  # fmt: skip
            assert (state["step"], state["count"].item()) == (SAVED, 7)
            assert state["rest"] == {"a": [1, "x", None], "t": (0.5, b"z")}
            assert torch.equal(state["rng"], torch.load(directory / "rng", weights_only=True))
            restored = zckpt.load(directory / name, **by_load.given)
            assert (restored.step, restored.world_size) == (SAVED, at)
            for training in (by_dcp, by_load):
                assert differences(training.state(), truth) == []
            losses[name] = by_dcp.train(range(SAVED, SAVED + MORE))
            assert by_load.train(range(SAVED, SAVED + MORE)) == losses[name]
        told.append(losses)
    return told


def check_opened(checkpoint: zckpt.OpenedCheckpoint, truth: dict[str, dict[str, torch.Tensor]]) -> None:
    """Every slot is the truth, and there is nothing else."""
    assert (checkpoint.format, checkpoint.step) == ("zckpt", SAVED)
    tied = {name: parameter.tied_to for name, parameter in checkpoint.parameters.items() if parameter.tied_to}
    assert tied == {"head.weight": "words.weight"}
    assert {one.name for one in checkpoint.tensors()} - tied.keys() == truth.keys()
    for name, slots in truth.items():
        owner = checkpoint.owner(name)
        assert slots.keys() == owner.slots.keys() | owner.state.keys()
        for slot, expected in slots.items():
            if slot in owner.slots:
                assert_same(checkpoint.read(name, slot), expected, f"{slot} of {name}")
            else:
                assert owner.state[slot] == zckpt.Scalar(expected.item(), str(expected.dtype).removeprefix("torch."))


@pytest.fixture
def saved(shared) -> Callable[[int, list[str]], tuple[Path, dict[str, list[float]]]]:
    def get(at: int, names: list[str]) -> tuple[Path, dict[str, list[float]]]:
        return shared(f"test_dcp-{len(names)}-at{at}", partial(save_at, partial(save_all, names=names), at))

    return get


@pytest.mark.parametrize(
    ("world_size", "names"), some([(3, OFTEN)], [(n, {at: list(OPTIONS) for at in (1, 2, 3)}) for n in (1, 3)])
)
def test_what_is_saved_is_the_truth_and_goes_on(world_size, names, saved):
    given = {at: saved(at, its) for at, its in names.items()}
    told = run(check_saved, world_size, {at: directory for at, (directory, _) in given.items()}, names)[0]
    for (at, (_, expected)), found in zip(given.items(), told, strict=True):
        for name, losses in found.items():
            if at == world_size:
                assert losses == expected[name]
            assert all(math.isclose(a, b, rel_tol=2e-6) for a, b in zip(losses, expected[name], strict=True)), (
                f"{name} from {at} to {world_size} ranks: {losses}, not {expected[name]}"
            )


@on_ranks(2)
def test_errors_are_one_clear_line(rank):
    training = Training.of(BY_NAME["adamw-fsdp-float32"])
    model, optimizer = get_state_dict(training.model, training.optimizer)

    def refused(expected: str, function: Any, *args: Any, **options: Any) -> None:
        with pytest.raises((CheckpointException, zckpt.ZckptError)) as told:
            function(*args, **options)
        assert expected in str(told.value).splitlines()[-1], told.value

    def load(expected: str, state: dict[str, Any], source: object = FIXTURES / "s2_bf16_dp2", **options: Any) -> None:
        refused(expected, dcp.load, state, storage_reader=zckpt.dcp.Reader(source, **options))

    def save(expected: str, state: dict[str, Any], name: str) -> None:
        refused(expected, dcp.save, state, storage_writer=zckpt.dcp.Writer(name))

    prime = {"prime": torch.zeros(7)}
    load("Missing key in checkpoint state_dict: model.no.such", {"model": {**prime, "no.such": torch.zeros(2)}})
    load("Missing key in checkpoint state_dict: ema_model.prime", {"ema_model": prime})
    load("Missing key in checkpoint state_dict: model.prime", {"model": prime}, model="net")
    load(
        "Size mismatch between saved torch.Size([7]) and current: torch.Size([8]) for model.prime",
        {"model": {"prime": torch.zeros(8)}},
    )
    load(
        "optimizer.state.0.exp_avg is state of a numbered parameter: expected names; make",
        {"optimizer": {"state": {0: {"exp_avg": torch.zeros(7)}}}},
    )
    load("none: cannot be opened: found No such file or directory", {"model": prime}, "none")
    load(
        "parameters in one param group have different values of lr in the checkpoint: found 0.02, 0.01",
        {"optimizer": {"param_groups": [{"lr": 0.0, "params": ["prime", "fc1.weight"]}]}},
    )
    refused("no checkpoint to read", dcp.load, prime, storage_reader=zckpt.dcp.Reader())
    save("holds neither a model nor an optimizer", {"a": 1}, "nothing")
    save(
        "ema.words.weight is sharded, but belongs to neither the model nor the optimizer",
        {"model": model, "optimizer": optimizer, "ema": {"words.weight": model["words.weight"]}},
        "sharded",
    )
    save("args is a pathlib", {"model": model, "args": Path("x")}, "object")
    Path("there").mkdir(exist_ok=True)
    save("already exists", {"model": model}, "there")
    one = {"model": dict(model), "odd": Path("x") if rank else 1}
    save("odd is a pathlib", one, "one")
    one["odd"] = 1
    dcp.save(one, storage_writer=zckpt.dcp.Writer("one"))
    gc.collect()
    dist.barrier()
    assert names_in() == ["one", "there"]


@on_ranks(2)
def test_kept_plans_overwriting_and_checkpoint_ids():
    """Save again with planners that keep their plans, over what is there, and to where `checkpoint_id` says."""
    weight = torch.full((3, 2), 1.0)
    state = {"model": {"w": weight, "b": torch.arange(3.0)}, "step": 0}
    for step, name in enumerate(["first", "second", "first"]):
        weight.fill_(step)
        state["step"] = step
        dcp.save(
            state, checkpoint_id=name, storage_writer=zckpt.dcp.Writer(overwrite=True),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )  # fmt: skip
    for name, step in (("first", 2), ("second", 1)):
        found = {"model": {"w": torch.zeros(3, 2), "b": torch.zeros(3), "c": torch.ones(1)}, "step": -1}
        dcp.load(
            found, checkpoint_id=name, storage_reader=zckpt.dcp.Reader(),
            planner=DefaultLoadPlanner(allow_partial_load=True),
        )  # fmt: skip
        assert found["step"] == step
        assert torch.equal(found["model"]["w"], torch.full((3, 2), float(step)))
        assert torch.equal(found["model"]["b"], torch.arange(3.0))
        assert torch.equal(found["model"]["c"], torch.ones(1))  # which the checkpoint has not
    assert names_in() == ["first", "second"]


ROWS, COLUMNS = 1500, 700


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what a process reads")
@on_ranks(3)
def test_a_rank_reads_the_bytes_of_its_own_chunks(rank, world_size):
    expected, source = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS), Path("m.pt")
    if rank == 0:
        torch.save({"weight": expected}, source)
    dist.barrier()
    mesh = init_device_mesh("cpu", (world_size,))
    model = fully_shard(torch.nn.Linear(COLUMNS, ROWS, bias=False), mesh=mesh)
    state = get_model_state_dict(model)
    zckpt.open(source)  # which loads the code that reads its format: files, too
    before = bytes_read()
    dcp.load(state, storage_reader=zckpt.dcp.Reader(source))
    read = bytes_read() - before
    set_model_state_dict(model, state)
    assert torch.equal(whole(model.weight), expected)
    own = state["weight"].to_local().nbytes
    assert own <= read < own + (150 << 10)  # the structure, its checksums, and what ranks say to each other


def bytes_read() -> int:
    """How many bytes this process has read with system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize(("at", "to"), each([2, 3], ["dcp", "consolidated", "deepspeed", "universal"]))
def test_what_is_saved_converts_to_other_formats(at, to, saved):
    source = saved(at, OFTEN[at])[0] / OFTEN[at][0]
    zckpt.convert(source, to, to=to, **({"world_size": 2, "stage": 2} if to == "deepspeed" else {}))
    zckpt.convert(to, "back", to="zckpt")
    mine, its = zckpt.open("back"), zckpt.open(source)
    assert {p.name for p in mine.tensors()} == {p.name for p in its.tensors()}
    for parameter in its.parameters.values():
        if parameter.numel or to != "deepspeed":  # of which its groups have none without elements
            assert_same_slots(mine, its, parameter.name)


@pytest.mark.parametrize("stock", [False, True])
def test_values_that_other_libraries_make_are_found(stock):
    """A scheduler's None and numpy's array; not an object, beside which all else is."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, cycle_momentum=False).state_dict()
    assert None in scheduler.values()
    rest = {"array": np.arange(3), "last": deque([1], 2), **({"object": Path("x")} if stock else {})}
    state = {"model": {"w": torch.ones(2)}, "scheduler": scheduler, "rest": rest}
    dcp.save(state, **({"checkpoint_id": "saved"} if stock else {"storage_writer": zckpt.dcp.Writer("saved")}))
    found = {"model": {"w": torch.zeros(2)}, "scheduler": dict.fromkeys(scheduler, 7), "rest": {"array": 7, "last": 7}}
    dcp.load(found, storage_reader=zckpt.dcp.Reader("saved"))
    assert found["scheduler"] == scheduler
    assert (found["rest"]["array"].tolist(), found["rest"]["last"]) == ([0, 1, 2], deque([1], 2))


@on_ranks(2)
def test_tensors_of_every_type_go_to_the_rank_that_writes_them():
    """Of some types torch's ranks cannot send each other tensors as objects."""
    kinds = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64, torch.bool, torch.complex64]
    rest = {str(kind): torch.arange(6).to(kind) for kind in kinds}
    dcp.save({"model": {"w": torch.ones(2)}, "rest": rest}, storage_writer=zckpt.dcp.Writer("saved"))
    found = {"rest": {key: torch.zeros_like(one) for key, one in rest.items()}}
    dcp.load(found, storage_reader=zckpt.dcp.Reader("saved"))
    assert_same_tree(found["rest"], rest)


def test_a_whole_checkpoint_becomes_a_torch_file():
    """As `dcp_to_torch_save` does: a state dict made of what the checkpoint has."""
    planner = default_planner._EmptyStateDictLoadPlanner()
    state = {}
    _load_state_dict(state, zckpt.dcp.Reader(FIXTURES / "s2_bf16_dp2_client"), planner=planner, no_dist=True)
    truth = Truth(FIXTURES / "s2_bf16_dp2_client")
    for name, expected in truth.weights.items():
        assert_same(state["model"][name], expected, name)
    for slot in ("exp_avg", "exp_avg_sq", "master"):
        for name, expected in (truth.masters if slot == "master" else truth.kind(slot)).items():
            assert_same(state["optimizer"]["state"][name][slot], expected, f"{slot} of {name}")
    assert [group["params"] for group in state["optimizer"]["param_groups"]] == truth.facts["order"]
    expected = [group["lr"] for group in truth.facts["param_groups"]]
    assert [group["lr"] for group in state["optimizer"]["param_groups"]] == expected


class Fused(torch.nn.Linear):
    """A weight that its state dict has in two parts, as torchtitan's attention has queries, keys and values."""

    def __init__(self) -> None:
        super().__init__(3, 4, bias=False)
        self.register_state_dict_post_hook(Fused._split)
        self.register_load_state_dict_pre_hook(Fused._join)

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}first"], state[f"{prefix}last"] = state.pop(f"{prefix}weight").split(2)

    @staticmethod
    def _join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}first"), state.pop(f"{prefix}last")])


def test_an_optimizer_keeps_names_that_the_models_state_dict_has_not():
    def flat_state(steps: int) -> dict[str, Any]:
        torch.manual_seed(steps)
        model, optimizer = trained(torch.nn.Sequential(Fused(), torch.nn.Linear(4, 2)), steps=steps)
        names = [name for name, _ in model.named_parameters()]
        state = optimizer.state_dict()["state"]
        flat = {f"state.{names[n]}.{key}": one for n, its in state.items() for key, one in its.items()}
        groups = {f"param_groups.{name}.lr": 0.1 * steps for name in names}
        return {**model.state_dict(), "optimizer": {**flat, **groups}}

    saved, found = flat_state(2), flat_state(1)
    dcp.save(saved, storage_writer=zckpt.dcp.Writer("saved"), no_dist=True)
    dcp.load(found, storage_reader=zckpt.dcp.Reader("saved"), no_dist=True)
    assert_same_tree(found, saved)
