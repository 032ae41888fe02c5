"""Files of a checkpoint are lost: what is left is written, what is not is listed, and nothing is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import FIXTURES, copy, inspected, printed, refused, succeeded
from tests.logical import assert_same_state, assert_same_tree
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.errors import ShardError, UnsupportedError, UsageError

NAME = "model.layers.1.mlp.up_proj.weight"
LLAMA = "hf_llama_s2_bf16_dp2"
LOST = [
    ("ds0145_s3_bf16_dp2", "*rank_1_*model_states.pt"),  # frozen shards
    ("ds0145_s3_bf16_dp2", "*rank_0_*model_states.pt"),
    ("ds0145_s3_bf16_dp2", "*rank_0_*optim_states.pt"),
    ("ds0145_s2_bf16_dp4", "*rank_3_*optim_states.pt"),
    ("s1_bf16_dp2_elastic", "*rank_0_*optim_states.pt"),
    ("other/dcp_fsdp2_dp3/ckpt", "__0_0.distcp"),
    ("other/dcp_fsdp2_dp2/ckpt", "__1_0.distcp"),  # with the optimizer's param groups
]


def lose(source: Path, pattern: str) -> list[str]:
    files = list(source.rglob(pattern))
    assert files
    for one in files:
        one.unlink()
    return [one.name for one in files]


def assert_same(one: str, other: str) -> None:
    """Two files have the same tensors, bit for bit."""
    assert_same_tree(load_file(one), load_file(other))


@pytest.mark.parametrize(("name", "pattern"), LOST, ids=[f"{name}-{pattern}" for name, pattern in LOST])
@pytest.mark.every(2)
def test_what_is_left_is_bit_for_bit_and_what_is_filled_too(name, pattern):
    source = copy(name)
    aliases = zckpt.open(source).aliases
    zckpt.consolidate(source, "whole.safetensors", dtype="float32")
    lose(source, pattern)
    refused(3, "consolidate", source, "no.safetensors", words=("missing", "--salvage"))
    missing = {one["name"] for one in inspected(source, "--salvage")["missing"]}
    assert missing
    done = zckpt.consolidate(source, "left.safetensors", dtype="float32", salvage=True)
    before, left = load_file("whole.safetensors"), load_file("left.safetensors")
    said = {str(one["name"]) for one in done.missing}
    assert said <= missing
    assert all(one in said or aliases.get(one) in said for one in before.keys() - left.keys())
    untouched = {one for one in left if aliases.get(one, one) not in missing}
    assert untouched
    assert all(torch.equal(left[one], before[one]) for one in untouched)
    options = {"dtype": "float32", "salvage": True, "fill_from": "whole.safetensors", "fill_masters": True}
    assert zckpt.consolidate(source, "full.safetensors", **options).filled
    assert_same("whole.safetensors", "full.safetensors")


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_of_four_is_left_out_with_its_ranges(lost):
    source = copy("ds0145_s2_bf16_dp4")
    before = zckpt.open(source).parameters
    shares = {name: [span for span in one.slots["master"].spans if f"rank_{lost}_" in span.path]
              for name, one in before.items() if "master" in one.slots}  # fmt: skip
    lose(source, f"*rank_{lost}_*optim_states.pt")
    missing = printed("consolidate --salvage", source, "left.safetensors")["missing"]
    said = {one["name"]: one["ranges"] for one in missing}
    want = {name: [(span.extent.start, span.extent.numel) for span in its] for name, its in shares.items() if its}
    assert {name: [(one["start"], one["numel"]) for one in its] for name, its in said.items()} == want


def test_a_training_goes_on_with_what_another_checkpoint_has_or_not_at_all():
    source = copy("ds0145_s2_bf16_dp4")
    zckpt.convert(source, "backup", to="zckpt")
    zckpt.consolidate(source, "whole.safetensors")
    lose(source, "*rank_1_*optim_states.pt")
    whole = {"fill_from": "whole.safetensors"}
    for more in ({}, whole, {**whole, "fill_masters": True}):  # none has moments
        with refusing(ShardError, "exp_avg"):
            zckpt.convert(source, "target", to="deepspeed", salvage=True, **more)
    assert not Path("target").exists()
    more = {"world_size": 4, "stage": 2, "fill_from": "backup", "verify": True}
    done = zckpt.convert(source, "target", to="deepspeed", salvage=True, **more)
    assert {str(one["slot"]) for one in done.filled} == {"master", "exp_avg", "exp_avg_sq"}
    assert zckpt.diff("target", FIXTURES / "ds0145_s2_bf16_dp4").equal


def test_masters_come_from_weights_only_where_the_user_says_so():
    source = copy("s1_bf16_dp4")
    lose(source, "*rank_2_*optim_states.pt")
    zckpt.consolidate(source, "weights.safetensors", salvage=True)
    zckpt.consolidate(source, "masters.safetensors", salvage=True, fill_masters=True)
    weights, masters = load_file("weights.safetensors"), load_file("masters.safetensors")
    changed = [name for name, one in weights.items() if one.dtype != masters[name].dtype]
    assert changed
    for name in changed:
        assert (weights[name].dtype, masters[name].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(masters[name].bfloat16(), weights[name])
    assert any(not torch.equal(masters[name], weights[name].float()) for name in changed)  # those that are there stay


def test_a_shard_is_known_by_the_names_in_the_index():
    model = {f"layers.{n}.weight": torch.full((4, 4), float(n)) for n in range(4)}
    save_file(model, "whole.safetensors")
    zckpt.consolidate("whole.safetensors", "source", max_shard_size=100)
    index = json.loads(Path("source/model.safetensors.index.json").read_text())["weight_map"]
    Path("source", index["layers.2.weight"]).unlink()
    refused(3, "consolidate source no.safetensors", words=("is missing", "index"))
    done = zckpt.consolidate("source", "left.safetensors", salvage=True)
    assert [one["name"] for one in done.missing] == ["layers.2.weight"]
    assert load_file("left.safetensors").keys() == model.keys() - {"layers.2.weight"}
    with refusing(ShardError, r"layers\.2"):
        zckpt.convert("source", "dcp", to="dcp", salvage=True)
    zckpt.consolidate("source", "full.safetensors", salvage=True, fill_from="whole.safetensors")
    assert_same("whole.safetensors", "full.safetensors")


def test_what_was_never_saved_comes_from_the_base_and_is_listed():
    trained, tower = {"head.weight": torch.ones(2, 2)}, {"tower.weight": torch.zeros(3)}
    save_file(trained, "trained.safetensors")
    save_file({**tower, "head.weight": torch.full((2, 2), 7.0)}, "base.safetensors")
    done = zckpt.consolidate("trained.safetensors", "all.safetensors", fill_from="base.safetensors")
    assert [one["name"] for one in done.filled] == ["tower.weight"]
    assert_same_tree(load_file("all.safetensors"), trained | tower)


def test_another_model_fills_nothing():
    source = copy("ds0145_s3_bf16_dp2")
    zckpt.consolidate(source, "whole.safetensors")
    lose(source, "*rank_1_*optim_states.pt")
    tensors = load_file("whole.safetensors")
    save_file({name: torch.zeros(1, 1, *one.shape) for name, one in tensors.items()}, "shape.safetensors")
    save_file({"strange": torch.zeros(1)}, "names.safetensors")
    save_file({name: one.to(torch.int32) for name, one in tensors.items()}, "codes.safetensors")
    for base, error in (("shape", UsageError), ("names", UsageError), ("codes", UnsupportedError)):
        with pytest.raises(error):
            zckpt.consolidate(source, "x.safetensors", salvage=True, fill_from=f"{base}.safetensors")
    assert not Path("x.safetensors").exists()
    with refusing(UsageError, "nothing is lost"):
        zckpt.consolidate("whole.safetensors", "x.safetensors", fill_masters=True)


@pytest.mark.parametrize(("version", "lost"), [(2, 0), (2, 1), (1, 2)])
@pytest.mark.every(2)
def test_a_rank_of_fsdp_that_is_lost(version, lost):
    options = {"fsdp_version": version, "units": "model.layers.*" if version == 1 else None, "groups": "one"}
    zckpt.convert(FIXTURES / LLAMA, "run", to="fsdp-rank-files", world_size=3, **options)
    zckpt.convert("run", "backup", to="zckpt")
    assert len(lose(Path("run"), f"*_rank_{lost}.pt")) > 1
    refused(3, "inspect run", words=(f"rank {lost}", "missing", "--salvage"))
    with refusing(ShardError, "fill-from"):
        zckpt.convert("run", "new", to="dcp", salvage=True)
    zckpt.convert("run", "new", to="dcp", salvage=True, fill_from="backup")
    assert_same_state(zckpt.open("new"), zckpt.open("backup"))


@pytest.mark.parametrize(
    ("pattern", "slots"),
    some(
        [(f"{NAME}/*", {"master", "exp_avg", "exp_avg_sq"}), (f"{NAME}/fp32.pt", {"master"})],
        [(f"{NAME}/exp_avg.pt", {"exp_avg"})],
    ),
)
def test_files_of_a_universal_checkpoint_are_lost(pattern, slots):
    source = copy(f"universal/{LLAMA}")
    lose(source, f"zero/{pattern}")
    refused(3, "consolidate", source, "no.safetensors", words=("of this parameter", "--salvage"))
    found = inspected(source, "--salvage")["missing"]
    assert {(one["name"], one["slot"]) for one in found} == {(NAME, slot) for slot in slots}
    done = zckpt.consolidate(source, "left.safetensors", salvage=True)
    assert {(one["name"], one["slot"]) for one in done.missing} == ({(NAME, "master")} if "master" in slots else set())
    with refusing(ShardError, "is incomplete"):
        zckpt.convert(source, "target", to="zckpt", salvage=True)
    zckpt.convert(source, "target", to="zckpt", salvage=True, fill_from=FIXTURES / LLAMA)
    assert zckpt.diff("target", FIXTURES / "universal" / LLAMA).equal


def test_a_step_that_is_lost_with_its_folder_is_its_groups():
    source = copy(f"universal/{LLAMA}")
    lose(source, f"zero/{NAME}/step.pt")
    zckpt.convert(source, "target", to="zckpt", salvage=True)
    assert zckpt.diff("target", FIXTURES / "universal" / LLAMA).equal


@pytest.mark.parametrize("lost", [0, 1])
def test_a_ranks_file_of_zckpts_own_format_is_lost(lost):
    zckpt.convert(FIXTURES / LLAMA, "saved", to="zckpt", world_size=3)
    assert not json.loads(Path("saved/checkpoint.json").read_text())["storages"]
    lose(Path("saved"), f"rank-0000{lost}-*")
    refused(3, "consolidate saved no.safetensors", words=("is missing", "--salvage"))
    done = zckpt.consolidate("saved", "left.safetensors", salvage=True)
    assert done.missing
    zckpt.consolidate(FIXTURES / LLAMA, "whole.safetensors")
    left, whole = load_file("left.safetensors"), load_file("whole.safetensors")
    assert 0 < len(left) < len(whole)
    missing = inspected("saved --salvage")["missing"]
    gone = {"lm_head.weight", *(one["name"] for one in missing)}
    assert all(torch.equal(value, whole[name]) for name, value in left.items() if name not in gone)
    succeeded("inspect saved --salvage --html page.html")
    page = Path("page.html").read_text()
    assert f"missing: {missing[0]['slot']} of {missing[0]['name']}: elements" in page
    assert f"rank-0000{lost}-of-00003.safetensors (lost)" in page
    refused(3, "map saved --json", words=("is missing", "--salvage"))
    succeeded("map saved --salvage map.svg")
    zckpt.convert("saved", "target", to="zckpt", salvage=True, fill_from=FIXTURES / LLAMA)
    assert zckpt.diff("target", FIXTURES / LLAMA).equal


def test_a_first_file_with_what_is_no_slot_is_not_done_without():
    zckpt.convert(FIXTURES / "s2_bf16_dp2_client", "saved", to="zckpt", world_size=2)
    assert json.loads(Path("saved/checkpoint.json").read_text())["storages"]
    lose(Path("saved"), "rank-00000-*")
    with refusing(ShardError, "is missing"):
        zckpt.consolidate("saved", "left.safetensors", salvage=True)


def test_nothing_is_missing_of_zero_3_where_only_the_first_ranks_model_file_was_saved():
    source = copy("s3_bf16_dp2_nofrozen")
    zckpt.consolidate(source, "whole.safetensors")
    lose(source, "*rank_1_*model_states.pt")
    done = zckpt.consolidate(source, "left.safetensors", salvage=True)
    assert not done.missing
    assert_same("whole.safetensors", "left.safetensors")
    zckpt.convert(source, "target", to="deepspeed", world_size=3, stage=3, salvage=True)
    assert zckpt.diff("target", FIXTURES / "s3_bf16_dp2_nofrozen").equal


def test_a_file_that_nothing_stands_for_is_refused_by_name():
    source = copy("other/mcore_legacy_tp2_pp2/ckpt")
    lose(source, "mp_rank_01_001/*.pt")
    words = ("found none of rank 1 of stage 1", "--salvage does not do without it")
    refused(3, "consolidate --salvage", source, "no.safetensors", words=words)
