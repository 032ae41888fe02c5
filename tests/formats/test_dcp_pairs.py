"""A model in safetensors, or an adapter, with its optimizer in a folder of DCP beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zckpt
from tests.folders import contents, names_in
from tests.formats.holding import assert_holds, assert_state, converted
from tests.logical import assert_same_tree
from tests.refusals import refusing
from zckpt.errors import UnknownFormatError
from zckpt.formats.account import take_inventory

NAMES = ("q", "k", "v", "o")  # which no file of safetensors has in this order


class Lora(nn.Module):
    """As a program has it that puts an adapter into a model itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)


def trained(made=lambda: nn.Linear(4, 4, bias=False)) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleDict({name: made() for name in NAMES})
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.randn_like(one)
    optimizer.step()
    return model, optimizer


def save(run, file, tensors, optimizer) -> Path:
    dcp.save({"optim": optimizer, "sched": {"last_epoch": 1}}, checkpoint_id=run / "optim")
    (run / "model").mkdir()
    save_file(tensors, run / "model" / file)
    return run


@pytest.fixture
def run(tmp_path) -> Path:
    model, optimizer = trained()
    return save(tmp_path / "run", "model.safetensors", model.state_dict(), get_optimizer_state_dict(model, optimizer))


def test_an_adapter_is_read_with_its_optimizer(tmp_path):
    model, optimizer = trained(Lora)
    tensors = {f"base_model.model.{k}": one.detach() for k, one in model.named_parameters() if one.requires_grad}
    run = save(tmp_path / "run", "adapter_model.safetensors", tensors, get_optimizer_state_dict(model, optimizer))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(NAMES)}
    (run / "model" / "adapter_config.json").write_text(json.dumps(config))

    checkpoint = zckpt.open(run)
    assert {*checkpoint.parameters} == {*tensors}
    for name, one in model.named_parameters():
        if one.requires_grad:
            assert_state(checkpoint, f"base_model.model.{name}", optimizer.state[one])
    assert not checkpoint.warnings
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(run, deep=True).sound

    zckpt.consolidate(run, tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*names_in(tmp_path / "adapter")}
    again, its = trained(Lora)
    zckpt.load(run, model=again, optimizer=its, strict=False)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other), name
        assert_same_tree(dict(its.state.get(other, {})), dict(optimizer.state.get(one, {})), name)


def test_values_with_folders_of_their_own_are_carried(tmp_path):
    """As Cosmos has it: `model`, `optim`, `scheduler` and `trainer` by DCP, for each iteration."""
    model, optimizer = trained(lambda: nn.Linear(3, 2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    parts = {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
        "scheduler": {"last_epoch": 7},
        "trainer": {"iteration": 7, "grad_scaler": {"scale": 2.0}, "rng": torch.arange(5)},
    }
    source = tmp_path / "checkpoints"
    for name, part in parts.items():
        dcp.save(part, checkpoint_id=source / "iter_000000007" / name)
    (source / "latest_checkpoint.txt").write_text("iter_000000007")
    assert {*assert_holds(source, model, optimizer).metadata} == {"scheduler", "trainer"}
    assert zckpt.verify(source, deep=True).sound
    converted(source, tmp_path / "dcp", "dcp")


def test_iterations_of_megatron_are_not_those_of_cosmos(tmp_path):
    """Whose tracker is lost: which of them was saved last, it said."""
    dcp.save({"model": nn.Linear(3, 2).state_dict()}, checkpoint_id=tmp_path / "run" / "iter_0000007")
    with refusing(UnknownFormatError, "iter_0000007"):
        zckpt.open(tmp_path / "run")


@pytest.mark.parametrize(("made", "file"), [
    (lambda: nn.Linear(4, 4, bias=False), "model.safetensors"), (Lora, "adapter_model.safetensors"),
])  # fmt: skip
def test_the_order_of_safetensors_tells_no_numbers(made, file, tmp_path):
    model, optimizer = trained(made)
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    weights = {name: one.detach() for name, one in model.named_parameters() if name in names}
    save(tmp_path / "run", file, weights, optimizer.state_dict())

    checkpoint = zckpt.open(tmp_path / "run")
    assert list(checkpoint.parameters) == sorted(names)
    assert not any("exp_avg" in one.slots for one in checkpoint.parameters.values())
    assert "keeps its number" in checkpoint.warnings[0]
    told = zckpt.open(tmp_path / "run", names=names)
    for name in names:
        assert_state(told, name, optimizer.state[model.get_parameter(name)])


def test_a_shape_that_one_parameter_has_tells_its_number(tmp_path):
    model, optimizer = trained()
    model["o"] = nn.Linear(4, 5, bias=False)
    optimizer.add_param_group({"params": list(model["o"].parameters())})
    model["o"].weight.grad = torch.ones(5, 4)
    optimizer.step()
    checkpoint = zckpt.open(save(tmp_path / "run", "model.safetensors", model.state_dict(), optimizer.state_dict()))
    assert_state(checkpoint, "o.weight", optimizer.state[model["o"].weight])
    assert [name for name, one in checkpoint.parameters.items() if "exp_avg" in one.slots] == ["o.weight"]


def test_a_damaged_model_beside_it_is_all_that_verify_finds(run):
    file = run / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert [one.file for one in zckpt.verify(run).findings] == [str(file)]


def test_each_file_is_stripped_where_it_lies(run, tmp_path):
    (run / "optim").rename(run / "deep")
    (run / "optim").mkdir()
    (run / "deep").rename(run / "optim" / "deep")
    zckpt.strip(run, tmp_path / "model", optimizer=True)
    assert {*contents(tmp_path / "model")} == {*contents(run)}
    found = zckpt.open(tmp_path / "model")
    assert found.slot_names() == ["weight"]
    assert not take_inventory(found).left_out


def test_the_mark_of_another_program_is_no_part_of_it(run):
    (run / "COMPLETED").write_text("COMPLETED")
    assert not take_inventory(zckpt.open(run)).left_out


def test_parts_of_megatrons_are_not_a_pair(tmp_path):
    """verl 0.9 has `model/dist_ckpt`, `optimizer/dist_ckpt` and more, each as Megatron-Core saves it."""
    model, optimizer = trained()
    for name, state in (
        ("model", model.state_dict()),
        ("optimizer", {"optimizer": get_optimizer_state_dict(model, optimizer)}),
    ):
        dcp.save(state, checkpoint_id=tmp_path / "run" / name / "dist_ckpt")
        torch.save({"iteration": 1}, tmp_path / "run" / name / "dist_ckpt" / "common.pt")
    with refusing(UnknownFormatError, "did you mean .*/dist_ckpt"):
        zckpt.open(tmp_path / "run")
