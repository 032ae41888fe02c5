"""`zckpt.load` of what other programs wrote, into every optimizer family, at other numbers of ranks: bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zckpt
from tests.cli.console import FIXTURES
from tests.deepspeed_engine import SPECS, Spec, models
from tests.gloo import on_ranks, run
from tests.live import whole
from tests.pairwise import some
from tests.refusals import refusing
from tests.training.trainings import slots_of
from tests.truth import Truth, assert_same, bits
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer

pytestmark = pytest.mark.interop

SOURCES = [
    "s0_bf16_dp2", "s1_fp32_dp3", "s2_bf16_dp4", "s2_bf16_dp2_elastic", "s2_bf16_dp2_rr", "s1_fp32_dp3_palign",
    "s2_bf16_dp2_zerodim",
    "s3_bf16_dp3", "s3_fp32_dp2", "hf_gpt2_s1_fp32_dp2",
]  # fmt: skip
FAMILIES = ["zero1", "zero2", "redundancy", "adamw", "fsdp"]


def load_fixture(rank, world_size, every: int) -> int:
    """Load sources into families, of all pairs one in `every`; check every slot of every parameter; return how many."""
    checked = 0
    for row, source in enumerate(SOURCES):
        truth = Truth(FIXTURES / source)
        for column, family in enumerate(FAMILIES):
            has_none = family == "fsdp" and SPECS[source].zero_dim  # of which `fully_shard` takes none
            if not has_none and (row + column + world_size // 2) % every == 0:
                checked += load_one(source, family, truth)
    return checked


def load_one(source: str, family: str, truth: Truth) -> int:
    inner, model, optimizer, dtype = build(source, family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = zckpt.load(FIXTURES / source, model=model, optimizer=optimizer, random_states=False)
    assert not restored.missing + restored.unexpected + restored.reshaped
    assert restored.step
    return check(inner, optimizer, truth, dtype)


def spec_of(source: str) -> Spec:
    return SPECS.get(source.rpartition("/")[2], Spec("other"))


def build(source: str, family: str, *, named: bool = True) -> tuple[torch.nn.Module, torch.nn.Module, Any, torch.dtype]:
    """Return a fixture's model, bare and as it is trained, an optimizer of a family, and the type of its weights.

    The weights are others than were saved. A family is one of `FAMILIES`, or "plain": AdamW, and the bare model.
    """
    spec = spec_of(source)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.dtype if family[:4] == "zero" else "fp32"]
    inner = models.build_model(spec, seed=99).to(dtype)
    names = {parameter: name for name, parameter in inner.named_parameters()}
    groups = [
        {**group, "lr": 1.0, "params": [names[p] for p in group["params"] if p.requires_grad]}
        for group in models.param_groups(spec, inner)
    ]
    model: torch.nn.Module = inner
    if family == "fsdp":
        model = fully_shard(inner, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif family not in ("zero1", "plain"):
        model = DistributedDataParallel(inner)
    parameters = dict(inner.named_parameters())
    for group in groups:
        group["params"] = [(name, parameters[name]) if named else parameters[name] for name in group["params"]]
    return inner, model, make(family, groups, spec), dtype


def make(family: str, groups: list[dict[str, Any]], spec: Spec) -> Any:
    if family[:4] == "zero":
        return ZeroOptimizer(groups, torch.optim.AdamW, lr=1.0, stage=int(family[-1]))
    if family == "redundancy":
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1.0)
    if spec.optimizer == "sgdm":
        return torch.optim.SGD(groups, lr=1.0, momentum=0.5)
    return torch.optim.AdamW(groups, lr=1.0, fused=family == "fsdp")


def check(model: torch.nn.Module, optimizer: Any, truth: Truth, dtype: torch.dtype = torch.float32) -> int:
    """Hold a model and an optimizer against the truth; return how many slots there were."""
    checked = 0
    steps = (truth.facts.get("scalar_state_per_group") or [{}])[0].get("step", {"value": 5})["value"]
    for name, parameter in model.named_parameters():
        exact = truth.masters.get(name, truth.weights.get(name))
        if parameter.requires_grad or dtype == torch.float32:
            assert_same(whole(parameter), exact.to(dtype), name)
        slots = slots_of(optimizer, name, parameter)
        assert bool(slots) == parameter.requires_grad
        never = name in truth.facts.get("no_state", [])  # no step has reached it
        for slot in [slot for slot in truth.slots if slots]:
            assert_same(
                slots[slot], torch.zeros_like(slots[slot]) if never else truth.kind(slot)[name], f"{slot} of {name}"
            )
            checked += 1
        if "step" in slots:
            assert slots["step"].item() == (0 if never else steps), name
        if "master" in slots:
            assert_same(slots["master"], truth.masters[name], f"master of {name}")
    for name, buffer in model.named_buffers():
        if name in truth.buffers and buffer.nbytes == truth.buffers[name].numel():  # of the type that was saved
            assert torch.equal(bits(buffer), truth.buffers[name]), name
    if not truth.facts["spec"].get("elastic"):  # which keeps none
        check_hyperparameters(model, optimizer, truth)
    return checked


def check_hyperparameters(model: torch.nn.Module, optimizer: Any, truth: Truth) -> None:
    groups = truth.facts["param_groups"]
    by_name = {name: group for group in groups for name in group.get("params", [])}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for name in (names[parameter] for parameter in group["params"]):
            its = by_name[name] if name in by_name else groups[index]  # of DeepSpeed, whose groups are the model's
            assert (group["lr"], group["weight_decay"]) == (its["lr"], its["weight_decay"]), name


@pytest.mark.parametrize(("world_size", "every"), some([(1, 5), (3, 5)], [(1, 1), (3, 1)]))
def test_every_family_gets_the_state_that_was_saved(world_size, every):
    told = run(load_fixture, world_size, every)
    assert sum(told) > 50 * world_size / every * len(SOURCES)


@on_ranks(1)
def test_state_that_was_each_ranks_own_is_refused_by_name_and_the_model_is_loaded_without():
    source = "own_lamb_s2_fp32_dp2"
    model = models.build_model(SPECS[source])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with refusing(zckpt.UnsupportedError, "trust_ratio, weight_norm, adam_norm"):
        zckpt.load(FIXTURES / source, model=model, optimizer=optimizer)
    assert all(torch.equal(bits(value), bits(before[name])) for name, value in model.state_dict().items())
    zckpt.load(FIXTURES / source, model=model)
    truth = Truth(FIXTURES / source)
    for name, value in truth.masters.items():
        assert_same(model.state_dict()[name], value, name)


def test_param_groups_in_which_nothing_is_trained_need_not_be_in_a_checkpoint():
    """DeepSpeed files none, and neither need those that load one have those that a checkpoint has."""

    def training(*, more: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 4)
        model.bias.requires_grad_(False)
        others = [{"params": [], "lr": 5.0}, {"params": [model.bias], "lr": 6.0}] if more else []
        return model, torch.optim.AdamW([*others, {"params": [model.weight], "lr": 1e-2}])

    model, optimizer = training(more=True)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    zckpt.save("saved", model=model, optimizer=optimizer, step=1)
    zckpt.convert("saved", "filed", to="deepspeed", stage=2, world_size=2)
    for path in (Path("saved"), Path("filed")):
        for more in (True, False):
            model, optimizer = training(more=more)
            zckpt.load(path, model=model, optimizer=optimizer)
            zckpt.assert_restored(path, model=model, optimizer=optimizer)
            assert [group["lr"] for group in optimizer.param_groups] == [5.0, 6.0] * more + [1e-2]
