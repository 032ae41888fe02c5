"""Files of a checkpoint are lost: what is left is written, what is not is listed, and nothing is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import FIXTURES, copy, inspected, refused, succeeded
from tests.pairwise import some
from zckpt.errors import ShardError, UnsupportedError, UsageError

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


def same(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(("name", "pattern"), LOST, ids=[f"{name}-{pattern}" for name, pattern in LOST])
@pytest.mark.every(2)
def test_what_is_left_is_bit_for_bit_and_what_is_filled_too(name: str, pattern: str, tmp_path: Path) -> None:
    source = copy(name, tmp_path)
    whole, aliases = tmp_path / "whole.safetensors", zckpt.open(source).aliases
    zckpt.consolidate(source, whole, dtype="float32")
    lose(source, pattern)
    refused(3, "consolidate", source, tmp_path / "no.safetensors", words=("missing", "--salvage"))
    missing = {one["name"] for one in inspected(source, "--salvage")["missing"]}
    assert missing
    done = zckpt.consolidate(source, tmp_path / "left.safetensors", dtype="float32", salvage=True)
    before, left = load_file(whole), load_file(tmp_path / "left.safetensors")
    said = {str(one["name"]) for one in done.missing}
    assert said <= missing
    assert all(one in said or aliases.get(one) in said for one in before.keys() - left.keys())
    untouched = {one for one in left if aliases.get(one, one) not in missing}
    assert untouched
    assert all(torch.equal(left[one], before[one]) for one in untouched)
    done = zckpt.consolidate(
        source, tmp_path / "full.safetensors", dtype="float32", salvage=True, fill_from=whole, fill_masters=True
    )
    assert done.filled
    assert same(whole, tmp_path / "full.safetensors")


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_of_four_is_left_out_with_its_ranges(lost: int, tmp_path: Path) -> None:
    source = copy("ds0145_s2_bf16_dp4", tmp_path)
    before = zckpt.open(source).parameters
    shares = {name: [span for span in one.slots["master"].spans if f"rank_{lost}_" in span.path]
              for name, one in before.items() if "master" in one.slots}  # fmt: skip
    lose(source, f"*rank_{lost}_*optim_states.pt")
    done = succeeded("consolidate", "--salvage", "--json", source, tmp_path / "left.safetensors")
    said = {one["name"]: one["ranges"] for one in json.loads(done.stdout)["missing"]}
    want = {name: [(span.extent.start, span.extent.numel) for span in its] for name, its in shares.items() if its}
    assert {name: [(one["start"], one["numel"]) for one in its] for name, its in said.items()} == want


def test_a_training_goes_on_with_what_another_checkpoint_has_or_not_at_all(tmp_path: Path) -> None:
    source = copy("ds0145_s2_bf16_dp4", tmp_path)
    backup, whole, target = tmp_path / "backup", tmp_path / "whole.safetensors", tmp_path / "target"
    zckpt.convert(source, backup, to="zckpt")
    zckpt.consolidate(source, whole)
    lose(source, "*rank_1_*optim_states.pt")
    for more in ({}, {"fill_from": whole}, {"fill_from": whole, "fill_masters": True}):  # none has moments
        with pytest.raises(ShardError, match="exp_avg"):
            zckpt.convert(source, target, to="deepspeed", salvage=True, **more)
    assert not target.exists()
    done = zckpt.convert(
        source, target, to="deepspeed", world_size=4, stage=2, salvage=True, fill_from=backup, verify=True
    )
    assert {str(one["slot"]) for one in done.filled} == {"master", "exp_avg", "exp_avg_sq"}
    assert zckpt.diff(target, FIXTURES / "ds0145_s2_bf16_dp4").equal


def test_masters_come_from_weights_only_where_the_user_says_so(tmp_path: Path) -> None:
    source = copy("s1_bf16_dp4", tmp_path)
    lose(source, "*rank_2_*optim_states.pt")
    zckpt.consolidate(source, tmp_path / "weights.safetensors", salvage=True)
    zckpt.consolidate(source, tmp_path / "masters.safetensors", salvage=True, fill_masters=True)
    weights, masters = load_file(tmp_path / "weights.safetensors"), load_file(tmp_path / "masters.safetensors")
    changed = [name for name, one in weights.items() if one.dtype != masters[name].dtype]
    assert changed
    for name in changed:
        assert (weights[name].dtype, masters[name].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(masters[name].bfloat16(), weights[name])
    assert any(not torch.equal(masters[name], weights[name].float()) for name in changed)  # those that are there stay


def test_a_shard_is_known_by_the_names_in_the_index(tmp_path: Path) -> None:
    model = {f"layers.{n}.weight": torch.full((4, 4), float(n)) for n in range(4)}
    source = tmp_path / "source"
    save_file(model, tmp_path / "whole.safetensors")
    zckpt.consolidate(tmp_path / "whole.safetensors", source, max_shard_size=100)
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    (source / index["layers.2.weight"]).unlink()
    refused(3, "consolidate", source, tmp_path / "no.safetensors", words=("is missing", "index"))
    done = zckpt.consolidate(source, tmp_path / "left.safetensors", salvage=True)
    assert [one["name"] for one in done.missing] == ["layers.2.weight"]
    assert load_file(tmp_path / "left.safetensors").keys() == model.keys() - {"layers.2.weight"}
    with pytest.raises(ShardError, match=r"layers\.2"):
        zckpt.convert(source, tmp_path / "dcp", to="dcp", salvage=True)
    zckpt.consolidate(source, tmp_path / "full.safetensors", salvage=True, fill_from=tmp_path / "whole.safetensors")
    assert same(tmp_path / "whole.safetensors", tmp_path / "full.safetensors")


def test_what_was_never_saved_comes_from_the_base_and_is_listed(tmp_path: Path) -> None:
    trained, tower = {"head.weight": torch.ones(2, 2)}, {"tower.weight": torch.zeros(3)}
    save_file(trained, tmp_path / "trained.safetensors")
    save_file({**tower, "head.weight": torch.full((2, 2), 7.0)}, tmp_path / "base.safetensors")
    done = zckpt.consolidate(tmp_path / "trained.safetensors", tmp_path / "all.safetensors",
                             fill_from=tmp_path / "base.safetensors")  # fmt: skip
    assert [one["name"] for one in done.filled] == ["tower.weight"]
    found = load_file(tmp_path / "all.safetensors")
    assert torch.equal(found["head.weight"], trained["head.weight"])
    assert torch.equal(found["tower.weight"], tower["tower.weight"])


def test_another_model_fills_nothing(tmp_path: Path) -> None:
    source = copy("ds0145_s3_bf16_dp2", tmp_path)
    whole = tmp_path / "whole.safetensors"
    zckpt.consolidate(source, whole)
    lose(source, "*rank_1_*optim_states.pt")
    tensors = load_file(whole)
    save_file({name: torch.zeros(1, 1, *one.shape) for name, one in tensors.items()}, tmp_path / "shape.safetensors")
    save_file({"strange": torch.zeros(1)}, tmp_path / "names.safetensors")
    save_file({name: one.to(torch.int32) for name, one in tensors.items()}, tmp_path / "codes.safetensors")
    for base, error in (("shape", UsageError), ("names", UsageError), ("codes", UnsupportedError)):
        with pytest.raises(error):
            zckpt.consolidate(source, tmp_path / "x.safetensors", salvage=True,
                              fill_from=tmp_path / f"{base}.safetensors")  # fmt: skip
    assert not (tmp_path / "x.safetensors").exists()
    with pytest.raises(UsageError, match="nothing is lost"):
        zckpt.consolidate(whole, tmp_path / "x.safetensors", fill_masters=True)


@pytest.mark.parametrize(("version", "lost"), [(2, 0), (2, 1), (1, 2)])
@pytest.mark.every(2)
def test_a_rank_of_fsdp_that_is_lost(version: int, lost: int, tmp_path: Path) -> None:
    source, run, backup = FIXTURES / "hf_llama_s2_bf16_dp2", tmp_path / "run", tmp_path / "backup"
    units = "model.layers.*" if version == 1 else None
    zckpt.convert(source, run, to="fsdp-rank-files", world_size=3, fsdp_version=version, units=units, groups="one")
    zckpt.convert(run, backup, to="zckpt")
    assert len(lose(run, f"*_rank_{lost}.pt")) > 1
    refused(3, "inspect", run, words=(f"rank {lost}", "missing", "--salvage"))
    with pytest.raises(ShardError, match="fill-from"):
        zckpt.convert(run, tmp_path / "new", to="dcp", salvage=True)
    zckpt.convert(run, tmp_path / "new", to="dcp", salvage=True, fill_from=backup)
    one, other = zckpt.open(tmp_path / "new"), zckpt.open(backup)
    for slot in ("weight", "master", "exp_avg", "exp_avg_sq"):
        for name, parameter in other.parameters.items():
            if slot in parameter.slots:
                assert torch.equal(one.read(name, slot), other.read(name, slot))


NAME = "model.layers.1.mlp.up_proj.weight"
LLAMA = "hf_llama_s2_bf16_dp2"


@pytest.mark.parametrize(
    ("pattern", "slots"),
    some(
        [(f"{NAME}/*", {"master", "exp_avg", "exp_avg_sq"}), (f"{NAME}/fp32.pt", {"master"})],
        [(f"{NAME}/exp_avg.pt", {"exp_avg"})],
    ),
)
def test_files_of_a_universal_checkpoint_are_lost(pattern: str, slots: set[str], tmp_path: Path) -> None:
    source = copy(f"universal/{LLAMA}", tmp_path)
    lose(source, f"zero/{pattern}")
    refused(3, "consolidate", source, tmp_path / "no.safetensors", words=("of this parameter", "--salvage"))
    found = inspected(source, "--salvage")["missing"]
    assert {(one["name"], one["slot"]) for one in found} == {(NAME, slot) for slot in slots}
    done = zckpt.consolidate(source, tmp_path / "left.safetensors", salvage=True)
    assert {(one["name"], one["slot"]) for one in done.missing} == ({(NAME, "master")} if "master" in slots else set())
    with pytest.raises(ShardError, match="is incomplete"):
        zckpt.convert(source, tmp_path / "target", to="zckpt", salvage=True)
    zckpt.convert(source, tmp_path / "target", to="zckpt", salvage=True, fill_from=FIXTURES / LLAMA)
    assert zckpt.diff(tmp_path / "target", FIXTURES / "universal" / LLAMA).equal


def test_a_step_that_is_lost_with_its_folder_is_its_groups(tmp_path: Path) -> None:
    source = copy(f"universal/{LLAMA}", tmp_path)
    lose(source, f"zero/{NAME}/step.pt")
    zckpt.convert(source, tmp_path / "target", to="zckpt", salvage=True)
    assert zckpt.diff(tmp_path / "target", FIXTURES / "universal" / LLAMA).equal


@pytest.mark.parametrize("lost", [0, 1])
def test_a_ranks_file_of_zckpts_own_format_is_lost(lost: int, tmp_path: Path) -> None:
    source, page = tmp_path / "saved", tmp_path / "page.html"
    zckpt.convert(FIXTURES / LLAMA, source, to="zckpt", world_size=3)
    assert not json.loads((source / "checkpoint.json").read_text())["storages"]
    lose(source, f"rank-0000{lost}-*")
    refused(3, "consolidate", source, tmp_path / "no.safetensors", words=("is missing", "--salvage"))
    done = zckpt.consolidate(source, tmp_path / "left.safetensors", salvage=True)
    left, whole = load_file(tmp_path / "left.safetensors"), tmp_path / "whole.safetensors"
    zckpt.consolidate(FIXTURES / LLAMA, whole)
    assert 0 < len(left) < len(load_file(whole))
    before, missing = load_file(whole), inspected(source, "--salvage")["missing"]
    gone = {one["name"] for one in missing}
    assert all(
        torch.equal(value, before[name]) for name, value in left.items() if name not in gone | {"lm_head.weight"}
    )
    succeeded("inspect", source, "--salvage", "--html", page)
    refused(3, "map", source, "--json", words=("is missing", "--salvage"))
    succeeded("map", source, "--salvage", tmp_path / "map.svg")
    assert done.missing
    assert f"missing: {missing[0]['slot']} of {missing[0]['name']}: elements" in page.read_text()
    assert f"rank-0000{lost}-of-00003.safetensors (lost)" in page.read_text()
    zckpt.convert(source, tmp_path / "target", to="zckpt", salvage=True, fill_from=FIXTURES / LLAMA)
    assert zckpt.diff(tmp_path / "target", FIXTURES / LLAMA).equal


def test_a_first_file_with_what_is_no_slot_is_not_done_without(tmp_path: Path) -> None:
    source = tmp_path / "saved"
    zckpt.convert(FIXTURES / "s2_bf16_dp2_client", source, to="zckpt", world_size=2)
    assert json.loads((source / "checkpoint.json").read_text())["storages"]
    lose(source, "rank-00000-*")
    with pytest.raises(ShardError, match="is missing"):
        zckpt.consolidate(source, tmp_path / "left.safetensors", salvage=True)


def test_nothing_is_missing_of_zero_3_where_only_the_first_ranks_model_file_was_saved(tmp_path: Path) -> None:
    source = copy("s3_bf16_dp2_nofrozen", tmp_path)
    zckpt.consolidate(source, tmp_path / "whole.safetensors")
    lose(source, "*rank_1_*model_states.pt")
    done = zckpt.consolidate(source, tmp_path / "left.safetensors", salvage=True)
    assert not done.missing
    assert same(tmp_path / "whole.safetensors", tmp_path / "left.safetensors")
    zckpt.convert(source, tmp_path / "target", to="deepspeed", world_size=3, stage=3, salvage=True)
    assert zckpt.diff(tmp_path / "target", FIXTURES / "s3_bf16_dp2_nofrozen").equal


def test_a_file_that_nothing_stands_for_is_refused_by_name(tmp_path: Path) -> None:
    source = copy("other/mcore_legacy_tp2_pp2/ckpt", tmp_path)
    lose(source, "mp_rank_01_001/*.pt")
    words = ("found none of rank 1 of stage 1", "--salvage does not do without it")
    refused(3, "consolidate", "--salvage", source, tmp_path / "no.safetensors", words=words)
