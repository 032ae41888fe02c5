"""nanotron: what its own functions saved, with the truth beside it; and every damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zckpt
from tests.damage import edit
from tests.formats.holding import converted, edit_json
from tests.interop.test_fsdp_rank_files import assert_is
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnsupportedError
from zckpt.formats.account import take_inventory

OTHER = Path(__file__).parents[2] / "fixtures" / "other"
CASES = {"nanotron_zero1_tp2_dp2": (2, 2, 1), "nanotron_pp2_tp2": (1, 2, 2)}
NORM, QKV = "model.final_layer_norm.pp_block.weight", "model.decoder.1.pp_block.attn.qkv_proj.weight"


@pytest.fixture
def saved():
    return Path(shutil.copytree(OTHER / "nanotron_zero1_tp2_dp2" / "ckpt", "run/2"))


@pytest.mark.parametrize("case", CASES)
def test_every_element_is_where_it_was(case):
    checkpoint = zckpt.open(OTHER / case / "ckpt")
    assert_is(checkpoint, load_file(OTHER / case / "truth.safetensors"))
    topology = checkpoint.topology
    assert ((topology.dp, topology.tp, topology.pp), checkpoint.step) == (CASES[case], 2)
    [group] = checkpoint.param_groups
    assert (group.state["step"].value, group.hyperparameters["weight_decay"]) == (2.0, 0.01)
    assert sorted(group.parameters) == sorted(checkpoint.parameters)
    assert (NORM, "exp_avg") in [(one.name, one.slot.name) for one in checkpoint.duplicates]
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(OTHER / case / "ckpt", deep=True).sound
    converted(OTHER / case / "ckpt", "zckpt", "zckpt")


def test_a_run_is_its_last_step(saved):
    (saved.parent / "latest.txt").write_text("2")
    assert zckpt.open(saved.parent).step == 2


@pytest.mark.parametrize(("gone", "said"), [
    ("model/model/decoder/1/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors",
     f"the part of {QKV} of tensor-parallel rank 1 is missing"),
    ("optimizer/optimizer_pp-0-of-1_dp-1-of-2_tp-0-of-2_exp-0-of-1.pt", "found 3, none of pp 0, dp 1, tp 0, exp 0"),
])  # fmt: skip
def test_a_lost_file_is_named(gone, said, saved):
    (saved / gone).unlink()
    with refusing(ShardError, said):
        zckpt.open(saved)


def test_one_optimizer_file_alone_is_no_checkpoint(saved):
    _, *others = sorted((saved / "optimizer").glob("*.pt"))
    for path in others:
        path.unlink()
    with refusing(ShardError, "found 1, none of pp 0, dp 0, tp 1, exp 0"):
        zckpt.open(saved)


def test_names_say_numbers_of_ranks_that_can_be(saved):
    """Nothing is made of as many as a name says, and superscript digits are no number."""
    [path] = saved.glob("model/model/decoder/1/pp_block/attn/qkv_proj/*_tp-rank-1-*")
    other = path.with_name(path.name.replace("tp-rank-1-of-2", "tp-rank-1-of-99999"))
    path = path.rename(other)
    with refusing(ShardError, "expected 99999 files, found"):
        zckpt.open(saved)
    other.rename(path.with_name(path.name.replace("1-of-99999", "1-of-999999999")))
    with refusing(ShardError, "tensor-parallel rank 1 is missing"):
        zckpt.open(saved)


def test_nothing_is_made_of_as_many_ranks_as_the_metadata_say(saved):
    edit_json(saved / "checkpoint_metadata.json", lambda said: said.update(dp=10**12))
    with refusing(DamagedFileError, "too many data-parallel ranks: expected at most 65536, found 1000000000000"):
        zckpt.open(saved)


def test_a_folder_may_be_called_by_what_is_no_number(saved):
    [path] = saved.glob("model/model/final_layer_norm/pp_block/*")
    (saved / "model/model/\u00b2").mkdir()
    shutil.copy(path, saved / "model/model/\u00b2" / "model_weight.safetensors")
    assert "model.\u00b2.weight" in zckpt.open(saved)


def test_a_lost_file_of_a_scheduler_or_random_state_is_said(saved):
    assert not zckpt.open(saved).warnings
    gone = ["lr_scheduler/lr_scheduler_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt", "random/tp-0-of-2_dp-1-of-2_pp-0-of-1.pt"]
    for name in gone:
        (saved / name).unlink()
    assert zckpt.open(saved).warnings == [
        f"{gone[0]}, {gone[1]}: missing, although other ranks' files exist: was it lost?"
    ]


def part(saved, tp):
    [path] = saved.glob(f"model/model/decoder/1/pp_block/attn/qkv_proj/*_tp-rank-{tp}-*")
    with safe_open(path, "pt") as file:
        return path, file.get_tensor("data"), file.metadata()


def test_a_part_that_lies_nowhere_or_where_another_does_is_refused(saved):
    path, data, said = part(saved, 1)
    save_file({"data": data}, path)
    with refusing(DamagedFileError, "does not state where its part lies"):
        zckpt.open(saved)
    for wrong in ("0,4,2|None,None,None#4,6,2|None,None,None", "0,4,None|None,None,None#14,18,None|None,None,None"):
        save_file({"data": data}, path, metadata={**said, "local_global_slices_pairs": wrong})
        with refusing(DamagedFileError, "does not state where its part lies"):
            zckpt.open(saved)
    save_file({"data": data}, path, metadata=part(saved, 0)[2])
    with refusing(LayoutError, f"the parts of {QKV} do not cover it exactly once"):
        zckpt.open(saved)
    flat = {"unsharded_shape": f"({data.numel()},)", "local_global_slices_pairs": "None,None,None#None,None,None"}
    save_file({"data": data.flatten()}, path, metadata={**said, **flat})
    with refusing(LayoutError, f"the parts of {QKV} do not cover it exactly once"):
        zckpt.open(saved)


def test_an_optimizer_that_does_not_fit_is_refused(saved):
    path = saved / "optimizer/optimizer_pp-0-of-1_dp-1-of-2_tp-0-of-2_exp-0-of-1.pt"
    whole = torch.load(path)

    def refused(kind, said, **changes):
        torch.save({**whole, **changes}, path)
        with refusing(kind, said):
            zckpt.open(saved)

    shorter = {number: {**slots, "exp_avg": slots["exp_avg"][1:]} for number, slots in whole["state"].items()}
    refused(LayoutError, "is not what these ranks should hold", state=shorter)
    refused(DamagedFileError, "parameters without names", names={})
    strange = {number: f"other.{name}" for number, name in whole["names"].items()}
    refused(LayoutError, "which the model lacks", names=strange)
    groups = [{**group, "lr": 0.5} for group in whole["param_groups"]]
    refused(LayoutError, "has another lr than rank 0's", param_groups=groups)
    first = path.with_name("optimizer_pp-0-of-1_dp-0-of-2_tp-0-of-2_exp-0-of-1.pt")
    for at, file in enumerate((first, path)):  # tensors, which are alike but for their elements
        content = torch.load(file)
        content["param_groups"][0]["lr"] = torch.tensor([0.1, 0.2 + at])
        torch.save(content, file)
    with refusing(LayoutError, "has another lr than rank 0's"):
        zckpt.open(saved)
    torch.save(whole, path.with_name("optimizer_pp-0-of-1_dp-2-of-3_tp-0-of-2_exp-0-of-1.pt"))
    with refusing(LayoutError, "different world sizes"):
        zckpt.open(saved)


@pytest.mark.parametrize(("own", "other"), [("_tp-0", "_dp-0-of-1_tp-0"), ("_tp-0-of-2", "_tp-2-of-2")])
def test_a_second_file_of_a_rank_and_one_of_no_rank_are_refused(own, other, tmp_path):
    saved = shutil.copytree(OTHER / "nanotron_pp2_tp2" / "ckpt", tmp_path / "2")
    [path] = saved.glob("optimizer/optimizer_pp-0-*_tp-0-*.pt")
    shutil.copy(path, path.with_name(path.name.replace(own, other)))
    with refusing(LayoutError, "more than one optimizer file of each rank.*expected 4 files, found 5"):
        zckpt.open(saved)


def test_state_of_ranks_and_groups_of_parameters_that_the_model_lacks_are_refused(saved):
    def name_another(whole):
        whole["names"][99] = "other.weight"
        whole["param_groups"][0]["params"].append(99)

    paths = [*saved.glob("optimizer/optimizer_pp-*.pt")]
    for path in paths:
        edit(path, name_another)
    with refusing(LayoutError, "param groups have other.weight, which the model lacks"):
        zckpt.open(saved)
    for path in paths:
        for tp in range(2):
            name = path.name.replace(f"tp-{tp}-of-2", "tp-{}-of-4")
            for other in (tp, tp + 2) if name != path.name else ():
                shutil.copy(path, path.with_name(name.format(other)))
        path.unlink()
    with refusing(LayoutError, "has state of a part of .* that the model lacks"):
        zckpt.open(saved)


def test_a_copy_that_differs_is_found(saved):
    def change(whole):
        [number] = [number for number, name in whole["names"].items() if name == NORM]
        whole["state"][number]["exp_avg"] += 1

    edit(saved / "optimizer/optimizer_pp-0-of-1_dp-0-of-2_tp-1-of-2_exp-0-of-1.pt", change)
    found = zckpt.verify(saved, deep=True)
    assert not found.sound
    assert NORM in str(found.findings)


def test_another_version_is_refused(saved):
    edit_json(saved / "checkpoint_metadata.json", lambda said: said.update(version="2.0"))
    with refusing(UnsupportedError, "has an unsupported version"):
        zckpt.open(saved)
