"""LeRobot: what the functions of 0.4.4 saved of a training without shards; with shards, what it has Accelerate save."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.formats.holding import converted
from tests.interop.test_fsdp_rank_files import assert_is
from tests.logical import assert_same_slots
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, SourceError, UnknownFormatError
from zckpt.formats.account import take_inventory

OTHER = Path(__file__).parents[2] / "fixtures" / "other"
TRUTH = load_file(OTHER / "lerobot_adamw" / "truth.safetensors")
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "3.weight", "3.bias"]
CARRIED = {"rng_state", "scheduler_state", "training_step"}
OPTIMIZER = "training_state/optimizer_state.safetensors"


@pytest.fixture
def saved():
    """A step, whose optimizer has two param groups, so that shapes do not tell its numbers."""
    found = Path(shutil.copytree(OTHER / "lerobot_adamw" / "ckpt", "checkpoints/000003"))
    beside = found / "training_state" / "optimizer_param_groups.json"
    [group] = json.loads(beside.read_text())
    beside.write_text(json.dumps([{**group, "params": [0, 1]}, {**group, "params": [2, 3, 4, 5, 6], "name": "other"}]))
    return found


def model() -> torch.nn.Module:
    every = [torch.nn.Linear(6, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 12), torch.nn.Linear(12, 3)]
    every[2].bias.requires_grad_(requires_grad=False)
    return torch.nn.Sequential(*every)


def test_every_element_is_where_it_was(saved):
    checkpoint = zckpt.open(saved, names=NAMES)
    assert_is(checkpoint, TRUTH)
    assert (checkpoint.step, {*checkpoint.metadata}) == (3, CARRIED)
    assert [group.parameters for group in checkpoint.param_groups] == [NAMES[:2], NAMES[2:]]
    assert checkpoint.param_groups[1].hyperparameters["betas"] == (0.9, 0.999)
    assert not take_inventory(checkpoint).left_out
    converted(checkpoint, "zckpt", "zckpt")
    assert {*zckpt.open("zckpt").metadata} == CARRIED


def test_where_one_order_fits_numbers_have_names():
    checkpoint = zckpt.open(OTHER / "lerobot_adamw" / "ckpt")
    assert (checkpoint.param_groups[0].parameters, checkpoint.warnings) == (NAMES, [])


def test_a_live_model_says_whose_the_state_is(saved):
    live = model()
    parameters = [one for one in live.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    zckpt.load(saved, model=live, optimizer=optimizer)
    for name, one in zip(NAMES, parameters, strict=True):
        assert torch.equal(one, TRUTH[f"weight/{name}"])
        assert all(torch.equal(value, TRUTH[f"{key}/{name}"]) for key, value in optimizer.state[one].items())
    assert [group["name"] for group in optimizer.param_groups[1:]] == ["other"]


@pytest.mark.parametrize("both", [False, True])
def test_a_sharded_run_keeps_both_by_dcp(both, saved):
    state = OTHER / "accel_fsdp2_dp2" / "state"
    (saved / "training_state" / "optimizer_param_groups.json").unlink()
    (saved / OPTIMIZER).unlink()
    shutil.copytree(state / "optimizer_0", saved / "training_state" / "optimizer_0")
    if both:
        zckpt.consolidate(state, saved / "pretrained_model" / "model.safetensors", overwrite=True)
    else:
        (saved / "pretrained_model" / "model.safetensors").unlink()
        shutil.copytree(state / "pytorch_model_fsdp_0", saved / "pretrained_model" / "pytorch_model_fsdp_0")
    save_file({"mean": torch.ones(4)}, saved / "pretrained_model" / "policy_preprocessor_step_3_normalizer.safetensors")
    original, checkpoint = zckpt.open(state), zckpt.open(saved)
    assert checkpoint.parameters.keys() == original.parameters.keys()
    for name in original.parameters:
        assert_same_slots(checkpoint, original, name)
    assert {*checkpoint.metadata} >= {*CARRIED, "policy_preprocessor_step_3_normalizer"}
    assert not take_inventory(checkpoint).left_out


@pytest.mark.parametrize("keep", [None, ["exp_avg"]])
def test_slots_are_stripped_where_they_lie(keep, saved):
    zckpt.strip(saved, "less", optimizer=keep is None, keep_slots=keep)
    kept = {key for key in TRUTH if keep and key.partition("/")[0] in ("exp_avg", "step")}
    assert load_file(f"less/{OPTIMIZER}").keys() == {
        f"state/{NAMES.index(name)}/{slot}" for slot, _, name in (key.partition("/") for key in kept)
    }
    checkpoint = zckpt.open("less", names=NAMES)
    assert {*checkpoint.optimizer_slot_names()} == {key.partition("/")[0] for key in kept}


def test_an_adapters_configuration_is_beside_it(saved):
    folder = saved / "pretrained_model"
    save_file({f"base_model.model.{name}.lora_A.weight": torch.zeros(2, 6) for name in "ab"},
              folder / "adapter_model.safetensors")  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "base_model_name_or_path": "elsewhere"}))
    (folder / "model.safetensors").unlink()
    assert zckpt.open(saved).details["adapter"] == {"r": 2, "base_model_name_or_path": "elsewhere"}


@pytest.mark.parametrize(("file", "content", "error", "said"), [
    ("training_state/optimizer_param_groups.json", b'{"lr": 1}', DamagedFileError, "expected a JSON list"),
    ("training_state/optimizer_param_groups.json", None, SourceError, "cannot be opened"),
    ("training_state/optimizer_param_groups.json", b"[1]", DamagedFileError, "unreadable param group"),
    (OPTIMIZER, b"\0" * 64, DamagedFileError, "unreadable header"),
    ("pretrained_model/model.safetensors", None, UnknownFormatError, "is LeRobot's, without the model's files"),
])  # fmt: skip
def test_damage_is_named(file, content, error, said, saved):
    (saved / file).unlink() if content is None else (saved / file).write_bytes(content)
    with refusing(error, said):
        zckpt.open(saved)


def test_state_under_another_key_is_refused(saved):
    save_file({"state/first/exp_avg": torch.zeros(2)}, saved / OPTIMIZER)
    with refusing(DamagedFileError, "expected state/NUMBER/SLOT"):
        zckpt.open(saved)


def test_what_cannot_be_read_beside_it_is_left_out(saved):
    (saved / "training_state" / "rng_state.safetensors").write_bytes(b"?")
    [left] = take_inventory(zckpt.open(saved)).left_out
    assert left.file == "training_state/rng_state.safetensors"
