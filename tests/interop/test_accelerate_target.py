"""`convert --to accelerate`: Accelerate takes it back, several models and all it keeps besides; nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import zckpt
from tests import live
from tests.cli.console import FIXTURES, refused
from tests.interop.test_accelerate import (
    Counter,
    Odd,
    assert_is,
    pair,
    prepared,
    trained,
    truth_of,
    truth_of_pair,
    two_models,
)
from tests.logical import assert_same_state, assert_same_tree
from tests.pairwise import each
from zckpt.formats.accelerate.writer import DEFAULTS

pytestmark = pytest.mark.interop

FORMS: list[dict[str, Any]] = [{}, {"fsdp": "sharded", "world_size": 2}, {"fsdp": "full"}]


@pytest.mark.parametrize(("name", "form"), each(["s2_bf16_dp2_client", "s3_bf16_dp3"], FORMS), ids=str)
def test_a_checkpoint_comes_back_as_it_was(name, form, tmp_path):
    zckpt.convert(FIXTURES / name, tmp_path / "state", to="accelerate", verify=True, **form)
    found, expected = zckpt.open(tmp_path / "state"), zckpt.open(FIXTURES / name)
    found.metadata.pop("scheduler")
    for mine, its in zip(found.param_groups, expected.param_groups, strict=True):
        added = set(mine.hyperparameters) - set(its.hyperparameters)
        assert added <= ({"initial_lr", *DEFAULTS} if form else set())
        for key in added:
            del mine.hyperparameters[key]
    assert_same_state(found, expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_several_models_stay_apart_and_keep_their_names(form, tmp_path):
    state, truth = two_models(tmp_path)
    zckpt.convert(state, tmp_path / "again", to="accelerate", verify=True, **form)
    found = assert_is(tmp_path / "again", truth)
    assert found.optimizers() == ["optimizer", "optimizer_1"]
    (tmp_path / "again" / "zckpt.pt").unlink()  # then as Accelerate itself has saved it
    if form.get("fsdp") != "full":
        assert_is(tmp_path / "again", truth)
    if not form:
        accelerator = prepared(tmp_path / "new")
        models, optimizers = pair()
        for model, optimizer in zip(models, optimizers, strict=True):
            accelerator.prepare(model, optimizer)
        accelerator.load_state(str(tmp_path / "again"))
        assert_same_tree(truth_of_pair(models, optimizers), truth)


@pytest.mark.parametrize("kind", ["two", "two alike", "one"])
def test_optimizers_stay_in_the_order_in_which_they_were_prepared(kind, tmp_path):
    """Which need not be that of the models; or one has all parameters of models that are alike."""
    accelerator = prepared(tmp_path)
    models = [nn.Linear(3, 5), nn.Linear(3, 4 if kind == "two" else 5)]
    first, second = ([*model.parameters()] for model in models)
    of = [[*first, *second]] if kind == "one" else [second, first]
    optimizers = [torch.optim.Adam(its, lr=1e-2) for its in of]
    accelerator.prepare(*models, *optimizers)
    sum(model(torch.rand(4, 3)).square().mean() for model in models).backward()
    for optimizer in optimizers:
        optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    expected = [optimizer.state_dict() for optimizer in optimizers]
    order = ("model", "model_1") if kind == "one" else ("model_1", "model")
    names = [f"{model}.{name}" for model in order for name in ("weight", "bias")]
    zckpt.convert(tmp_path / "state", tmp_path / "dcp", to="dcp", names=None if kind == "two" else names)
    zckpt.convert(tmp_path / "dcp", tmp_path / "again", to="accelerate", verify=True)
    for optimizer in optimizers:
        optimizer.state.clear()
    accelerator.load_state(str(tmp_path / "again"))
    assert_same_tree([one.state_dict()["state"] for one in optimizers], [one["state"] for one in expected])


def test_models_of_another_program_are_paired_with_their_optimizers(tmp_path):
    models = {"generator": nn.Linear(3, 5), "discriminator": nn.Linear(5, 2)}
    made = {name: live.trained(model, torch.optim.Adam)[1] for name, model in models.items()}
    saved = {name: model.state_dict() for name, model in models.items()}
    saved |= {f"optimizer_{name[0]}": made[name].state_dict() for name in ("discriminator", "generator")}
    torch.save(saved, tmp_path / "gan.pt")
    for form in FORMS:
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        zckpt.convert(tmp_path / "gan.pt", target, to="accelerate", verify=True, **form)
        found = zckpt.open(target)
        assert found.models() == ["generator", "discriminator"]
        assert found.optimizers() == ["optimizer_g", "optimizer_d"]
        moment = made["discriminator"].state[models["discriminator"].weight]["exp_avg"]
        assert torch.equal(found.read("discriminator.weight", "exp_avg"), moment)
    del saved["optimizer_g"]
    torch.save(saved, tmp_path / "half.pt")
    refused(5, "convert", tmp_path / "half.pt", tmp_path / "t", "--to", "accelerate", "--fsdp", "full",
            words=("one optimizer for each model",))  # fmt: skip


def test_ties_buffers_and_all_that_accelerate_keeps_go_along(tmp_path):
    accelerator = prepared(tmp_path)
    model = Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50))
    accelerator.register_for_checkpointing(counter := Counter(7))
    trained(model, optimizer, accelerator, torch.randint(13, (5, 4)))
    scheduler.step()
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=False)
    expected, truth = random.random(), truth_of(model, optimizer)
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    zckpt.convert(tmp_path / "state", tmp_path / "again", to="accelerate", names=names, verify=True)
    counter.count, last = 0, scheduler.state_dict()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    optimizer.state.clear()
    scheduler.step()
    accelerator.load_state(str(tmp_path / "again"))
    assert counter.count == 7
    assert scheduler.state_dict() == last
    assert random.random() == expected
    assert_same_tree(truth_of(model, optimizer), truth)


def test_folders_hold_the_keys_that_torch_looks_for(tmp_path):
    zckpt.convert(FIXTURES / "ds0145_s2_bf16_dp2_elastic_fused", tmp_path / "none", to="accelerate", fsdp="sharded")
    zckpt.convert(FIXTURES / "s2_bf16_dp4", tmp_path / "state", to="accelerate", fsdp="sharded")
    metadata = FileSystemReader(tmp_path / "state" / "optimizer_0").read_metadata()
    groups = len(zckpt.open(FIXTURES / "s2_bf16_dp4").param_groups)
    for key in (*torch.optim.AdamW([torch.zeros(1)]).param_groups[0], "initial_lr"):
        assert all(f"optimizer.param_groups.{number}.{key}" in metadata.planner_data for number in range(groups)), key
    steps = _load_state_dict_from_keys("optimizer.state", checkpoint_id=tmp_path / "state" / "optimizer_0")
    found = [slots["step"] for slots in steps["optimizer"]["state"].values()]
    assert {(type(step), step.dtype) for step in found} == {(torch.Tensor, torch.float32)}


def test_what_accelerate_could_not_take_is_refused_by_name(tmp_path):
    source = FIXTURES / "s2_bf16_dp2"
    refused(2, "convert", source, tmp_path / "t", "--to", "accelerate", "--world-size", 2, words=("--fsdp=sharded",))
    unnamed = FIXTURES / "other" / "plain_adamw" / "ckpt.pt"
    refused(5, "convert", unnamed, tmp_path / "t", "--to", "accelerate", words=("give --names FILE",))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    _, optimizer = live.trained(model, torch.optim.AdamW(model[1].parameters()))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    refused(5, "convert", tmp_path / "dcp", tmp_path / "t", "--to", "accelerate", words=("give --names FILE",))
    fsdp1 = FIXTURES / "other" / "accel_fsdp2_dp2" / "state"
    zckpt.convert(fsdp1, tmp_path / "native", to="zckpt")
    opened = zckpt.open(tmp_path / "native")
    opened.param_groups[0].parameters.reverse()
    with pytest.raises(zckpt.UnsupportedError, match="another order than the model"):
        zckpt.convert(opened, tmp_path / "t", to="accelerate")
    assert not (tmp_path / "t").exists()


def test_a_scheduler_of_a_source_without_a_step_begins_at_zero(torch_file, tmp_path):
    model = nn.Linear(3, 2)
    _, optimizer = live.trained(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    done = zckpt.convert(torch_file(live.both(model, optimizer)), tmp_path / "state", to="accelerate")
    assert any("a LambdaLR after 0 steps" in note for note in done.notes)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    scheduler.load_state_dict(torch.load(tmp_path / "state" / "scheduler.bin", weights_only=True))
    scheduler.step()
    assert scheduler.last_epoch == 1
