"""Megatron-Core's own loader takes what zckpt writes for it, whatever it was cut from, and trains on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zckpt
from tests import gloo
from tests.logical import assert_same_tree
from tests.megatron_core import Spec, filed, loaded, saved, saved_by_torch
from tests.truth import Truth, assert_same

pytestmark = pytest.mark.interop

OTHER = Path(__file__).parents[2] / "fixtures" / "other"
STEP = "iter_0000002"
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 4,
         "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 64, "padded_vocab_size": 64}  # fmt: skip


def slots_of(checkpoint: zckpt.OpenedCheckpoint) -> dict[str, torch.Tensor]:
    return {f"{slot}/{one.name}": checkpoint.read(one.name, slot) for one in checkpoint.tensors() for slot in one.slots}


def filed_keys(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give tensors the names that they have in files, steps left out."""
    parts = [(*key.partition("/"), one) for key, one in tensors.items()]
    return {f"{slot}/{filed(name)}": one for slot, _, name, one in parts if slot != "step"}


def test_what_another_version_and_other_ranks_wrote_is_loaded(tmp_path):
    """A distributed optimizer's flattened slices of 0.13, two data-parallel ranks; and a plain one's, tp 2."""
    specs = {
        "mcore013_bf16_model_dp2": Spec(),
        "mcore_bf16_plain_tp2": Spec(distributed=False, llama=False, groups=4),
    }
    for name in specs:
        zckpt.convert(OTHER / name / "ckpt", tmp_path / name, to="megatron", verify=True, world_size=2)
    wanted = [(spec, tmp_path / name / "iter_0000004") for name, spec in specs.items()]
    [results] = gloo.run(loaded, 1, wanted, fresh=True)
    for name, (state, losses) in zip(specs, results, strict=True):
        truth = {key: one for key, one in Truth(OTHER / name).tensors.items() if not key.startswith("step/")}
        assert state.keys() == truth.keys()
        for key, value in truth.items():
            assert_same(state[key], value, key)
        assert all(0 < one < 10 for one in losses)


def test_an_optimizer_without_masters_is_none_within_another(tmp_path):
    spec = Spec(distributed=False, bf16=False)
    gloo.run(saved, 1, spec, tmp_path / "run", fresh=True)
    zckpt.convert(tmp_path / "run", tmp_path / "again", to="megatron", verify=True, world_size=2)
    folders = [tmp_path / name / STEP for name in ("run", "again")]
    [[(theirs, before), (ours, after)]] = gloo.run(loaded, 1, [(spec, one) for one in folders], fresh=True)
    assert_same_tree(ours, theirs)
    assert after == before


def test_what_its_fsdp2_saved_by_torchs_dcp_is_loaded_as_its_own_format(tmp_path):
    """Masters lie in lists beside an optimizer that numbers its parameters; norms alike are told by what these are."""
    specs = {"llama": Spec(), "gpt": Spec(llama=False, groups=4)}
    wanted = [(spec, tmp_path / name) for name, spec in specs.items()]
    truths = gloo.run(saved_by_torch, 2, wanted, fresh=True)[0]
    for (_, run), truth in zip(wanted, truths, strict=True):
        source = zckpt.open(run)
        assert_same_tree(slots_of(source), truth)
        zckpt.convert(source, run / "again", to="megatron", verify=True)
    [found] = gloo.run(loaded, 1, [(spec, run / "again" / STEP) for spec, run in wanted], fresh=True)
    for (state, losses), truth in zip(found, truths, strict=True):
        assert_same_tree(state, filed_keys(truth))
        assert all(0 < one < 10 for one in losses)


@pytest.mark.nightly
def test_a_run_goes_to_hugging_face_and_back_to_one_rank(tmp_path):
    spec = Spec(tp=2, pp=2, layers=4)
    gloo.run(saved, 4, spec, tmp_path / "run", fresh=True)
    names = {"map": "llama-huggingface-megatron", "map_config": LLAMA}
    zckpt.convert(tmp_path / "run", tmp_path / "llama", to="consolidated", **names)
    zckpt.convert(tmp_path / "llama", tmp_path / "back", to="megatron", verify=True, **names)
    assert zckpt.diff(tmp_path / "run", tmp_path / "back").equal
    folders = [tmp_path / "run" / STEP, tmp_path / "back" / STEP]
    [[(theirs, before), (ours, after)]] = gloo.run(loaded, 1, [(spec.alone(), one) for one in folders], fresh=True)
    assert_same_tree(ours, theirs)
    assert after == before
    for other in (spec, spec.alone(tp=2, dp=2)):
        results = gloo.run(loaded, 4, [(other, one) for one in folders], fresh=True)
        assert all(before == after for [(_, before), (_, after)] in results)


@pytest.mark.nightly
@pytest.mark.parametrize("moe_layers", [None, (0, 1)], ids=["stacked", "apart"])
def test_experts_of_two_ranks_are_loaded_by_one(moe_layers, tmp_path):
    spec = Spec(dp=2, ep=2, experts=4, moe_layers=moe_layers)
    gloo.run(saved, 2, spec, tmp_path / "run", fresh=True)
    source = zckpt.open(tmp_path / "run")
    for size in (1, 2):
        zckpt.convert(source, tmp_path / str(size), to="megatron", verify=True, expert_parallel_size=size)
    [[(state, losses)]] = gloo.run(loaded, 1, [(spec.alone(), tmp_path / "1" / STEP)], fresh=True)
    assert_same_tree(state, slots_of(source))
    assert all(0 < one < 10 for one in losses)
    folders = [tmp_path / "run" / STEP, tmp_path / "2" / STEP]
    for [(_, before), (_, after)] in gloo.run(loaded, 2, [(spec, one) for one in folders], fresh=True):
        assert before == after
        assert losses == pytest.approx(before, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [Spec(tp=2, pp=2), Spec(tp=2, pp=2, llama=False, groups=4, distributed=False)])
def test_legacy_files_of_other_ranks_are_loaded(spec, tmp_path):
    run = tmp_path / "run" / STEP
    gloo.run(saved, 4, spec, run, True, fresh=True)
    for tp in (1, 2):
        zckpt.reshard(
            run, tmp_path / f"tp{tp}", world_size=1, verify=True, tensor_parallel_size=tp, pipeline_parallel_size=1
        )
    wanted = {tp: [(spec.alone(tp=tp), tmp_path / f"tp{tp}" / STEP)] for tp in (1, 2)}
    [[(state, losses)]] = gloo.run(loaded, 1, wanted[1], True, fresh=True)
    assert_same_tree(state, filed_keys(slots_of(zckpt.open(run))))
    for [(_, sliced)] in gloo.run(loaded, 2, wanted[2], True, fresh=True):
        assert sliced == pytest.approx(losses, rel=1e-2)
