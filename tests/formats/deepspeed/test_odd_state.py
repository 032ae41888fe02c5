"""Optimizers nobody has seen: state that is one tensor twice, or of some groups only; and ranks that do not agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.formats.deepspeed.contents import cut, tag_of
from tests.formats.deepspeed.shards import copy, edit, edit_all, optimizer_file, state_in
from tests.refusals import refusing
from zckpt.errors import LeftOutError, ShardError, UnsupportedError


def changed(name, change: Callable[[dict[str, Any]], object], files="*optim_states.pt") -> Path:
    """A copy of a fixture with other content of some of its files; returns the run directory."""
    tag = copy(name)
    edit_all(tag, change, files)
    return tag.parent


def loaded(run, rank) -> dict[int, dict[str, Any]]:
    found = []
    edit(optimizer_file(tag_of(run), rank), lambda content: found.append(state_in(content)))
    return found[0]


def _again(content):
    for state in state_in(content).values():
        state["again"] = state["exp_avg"]


@pytest.mark.parametrize(("name", "options"), [("s2_fp32_dp2", {"stage": 3}), ("s3_fp32_dp2", {})])
def test_two_keys_of_one_tensor_stay_one(name, options):
    """torch gives back one tensor, and an optimizer that changes it under one key sees that under the other."""
    run = changed(name, _again)
    assert "exp_avg, again" in zckpt.open(run).warnings[0]
    cut(run, "cut", 3, **options)
    for state in loaded("cut", 1).values():
        assert state["again"].data_ptr() == state["exp_avg"].data_ptr() != state["exp_avg_sq"].data_ptr()
    assert zckpt.diff(run, "cut").equal


def _one_step(content):
    states = state_in(content)
    for state in states.values():
        state["step"] = states[0]["step"]


def test_a_number_that_groups_share_stays_one_or_is_refused():
    run = changed("s2_fp32_dp2", _one_step)
    cut(run, "cut", 3)
    pointers = {state["step"].data_ptr() for state in loaded("cut", 2).values()}
    assert len(pointers) == 1
    own = {state["step"].data_ptr() for state in loaded(copy("s2_fp32_dp2", "own").parent, 0).values()}
    assert len(own) > 1
    sub = changed("s3_fp32_dp2", _one_step)
    small = {"sub_group_size": 100}
    edit_all(tag_of(sub), lambda content: content["ds_config"]["zero_optimization"].update(small), "*model_states.pt")
    with refusing(UnsupportedError, "step: several of a rank's partitions share one tensor"):
        cut(sub, "subs", 3)


def _factored(content):
    state_in(content)[1]["exp_avg"] = torch.arange(3.0)


def test_a_key_may_be_in_full_in_some_groups_only():
    """What has a value for each element is read; what has not is each rank's own."""
    run = changed("s2_fp32_dp2", _factored)
    opened = zckpt.open(run)
    first, second = (group.parameters[0] for group in opened.param_groups[:2])
    assert "exp_avg" in opened.parameters[first].slots
    assert "exp_avg" not in opened.parameters[second].slots
    assert {(one.key, one.group) for one in opened.per_rank} == {("exp_avg", 1)}
    cut(run, "same", 2, verify=True)
    assert torch.equal(loaded("same", 1)[1]["exp_avg"], torch.arange(3.0))
    with refusing(UnsupportedError, "exp_avg: each rank has its own"):
        cut(run, "cut", 3)
    edit(optimizer_file(tag_of(run), 0), lambda content: state_in(content)[0].update(exp_avg=torch.zeros(5)))
    with refusing(zckpt.LayoutError, "rank 0, group 0: exp_avg does not have one value per element"):
        zckpt.open(run)


def test_factored_state_of_slices_is_left_out(tmp_path):
    """Without ZeRO each tensor-parallel rank has its own; of what all have whole, it is the same on all."""
    whole = {"gate.weight": torch.rand(6, 8), "column.weight": torch.rand(12, 5), "row.weight": torch.rand(4, 10)}
    dims = {"column.weight": 0, "row.weight": 1}
    rules = {"tp_replicated_parameter_patterns": ["gate"], "parameter_with_row_parallelism_patterns": ["row"]}
    for rank in range(2):
        module = {
            name: value.chunk(2, dims[name])[rank].clone() if name in dims else value for name, value in whole.items()
        }
        state = {
            number: {"step": torch.tensor(5.0), "exp_avg_sq_row": value.mean(1), "exp_avg_sq_col": value.mean(0)}
            for number, value in enumerate(module.values())
        }
        content = {
            "module": module, "buffer_names": [], "dp_world_size": 1, "mp_world_size": 2, "global_steps": 5,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2}, "universal_checkpoint_info": rules,
            "ds_config": {"zero_optimization": {"stage": 0}},
            "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]},
        }  # fmt: skip
        torch.save(content, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    opened = zckpt.open(tmp_path)
    assert opened.parameters["gate.weight"].slots["exp_avg_sq_col"].shape == (8,)
    assert [[*opened.parameters[name].slots] for name in dims] == [["weight", "step"]] * 2
    [warning] = opened.warnings
    assert warning.startswith("exp_avg_sq_row of column.weight, exp_avg_sq_col of column.weight")
    zckpt.consolidate(tmp_path, tmp_path / "model.safetensors", drop=["mp_rank_0*"])
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    with refusing(zckpt.LeftOutError, "things in it would be lost"):
        zckpt.convert(tmp_path, tmp_path / "written", to="zckpt")


def _strided(content):
    state = state_in(content)[0]
    state["exp_avg"] = torch.zeros(1).expand(state["exp_avg"].numel())


def test_a_view_with_strides_is_refused_as_such():
    with refusing(UnsupportedError, "exp_avg is a strided view"):
        zckpt.open(changed("s2_fp32_dp2", _strided))


@pytest.mark.parametrize("value", [0.5, [1, 0.5], {"norms": (2, 0.5)}], ids=str)
def test_computed_numbers_of_a_single_rank_are_its_own(value):
    """Of the elements that it holds: no other rank shows that they are not alike on all."""
    run = changed("s1_fp32_dp1", lambda content: [one.update(n=value) for one in state_in(content).values()])
    assert {one.key for one in zckpt.open(run).per_rank} == {"n"}
    with refusing(UnsupportedError, "n: each rank has its own"):
        cut(run, "cut", 2)


def _other_rate(content):
    content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 0.5


def _other_step(content):
    for state in state_in(content).values():
        state["step"] = torch.tensor(99.0)


SECOND = "*mp_rank_01_optim_states.pt"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("tp2_s2_fp32_dp2", _other_rate, "lr of its param group 0 differs .* expected 0.01, found 0.5"),
        ("tp2_s2_fp32_dp2", _other_step, "step of its param group 0 differs: expected 5.0, found 99.0"),
        ("pp2_s1_fp32_dp2", _other_step, "step of its param group 0 differs"),
        ("pp2_s1_fp32_dp2", lambda c: (_other_step(c), _other_rate(c)), "step of its param group"),
    ],
)
def test_model_parallel_ranks_that_do_not_agree(name, change, said):
    run = changed(name, change, SECOND)
    with refusing(ShardError, f"mp_rank 1 .* {said}"):
        zckpt.open(run)
    assert not zckpt.verify(run).sound


def test_stages_may_have_rates_of_their_own():
    run = changed("pp2_s1_fp32_dp2", _other_rate, SECOND)
    assert sorted(group.hyperparameters["lr"] for group in zckpt.open(run).param_groups) == [0.01, 0.02, 0.5]


def test_a_model_file_of_another_step():
    one = "mp_rank_01_model_states.pt"
    run = changed("tp2_s2_fp32_dp2", lambda content: content.update(global_steps=9), one)
    with refusing(ShardError, "model file of mp_rank 1 is from another step"):
        zckpt.open(run)


def test_single_values_that_slices_have_otherwise_are_each_ones_own():
    run = changed("tp2_s2_fp32_dp2", lambda content: state_in(content)[0].update(count=4))
    edit_all(tag_of(run), lambda content: state_in(content)[0].update(count=5), SECOND)
    assert {(one.mp_rank, one.value) for one in zckpt.open(run).per_rank} == {(0, 4), (1, 5)}
    with refusing(UnsupportedError, "count: each rank has its own"):
        cut(run, "cut", 2, tensor_parallel_size=1)


def _moved_padding(content, *, eps):
    z = content["optimizer_state_dict"]
    if not eps:
        for group in z["base_optimizer_state"]["param_groups"]:
            del group["eps"]
    for master, padding in zip(z["single_partition_of_fp32_groups"], z["group_paddings"], strict=True):
        master.data.as_strided((master.numel() + padding,), (1,))[master.numel() :] = 0.25


@pytest.mark.parametrize("eps", [True, False])
def test_padding_of_masters_that_lion_moves_is_sound(eps):
    """Its groups have betas and no eps: the sign of a zero moves what has no gradient."""
    run = changed("s2_fp32_dp2", lambda content: _moved_padding(content, eps=eps))
    assert sum(one.numel for one in zckpt.open(run).padding)
    assert ("ZC-205" in {one.code for one in zckpt.verify(run, deep=True).findings}) == eps


MODEL = "mp_rank_00_model_states.pt"


def test_a_number_in_the_place_of_a_slot_is_sound():
    """Prodigy keeps one for a parameter that began as zeros."""

    def change(content):
        next(iter(content["optimizer"]["state"].values()))["exp_avg"] = torch.tensor(0.0)

    run = changed("s0_fp32_dp2", change, MODEL)
    assert "ZC-123" not in {one.code for one in zckpt.verify(run).findings}


def _sized(content):
    for state in state_in(content).values():
        state["numel"] = state["exp_avg"].numel()


def test_the_size_of_a_partition_is_not_that_of_others():
    """All ranks of the source have the same one, and ranks of another number have another."""
    run = changed("s2_fp32_dp2", _sized)
    assert {one.key for one in zckpt.open(run).per_rank} == {"numel"}
    cut(run, "same", 2, verify=True)
    with refusing(UnsupportedError, "numel: each rank has its own"):
        cut(run, "cut", 3)
    cut(run, "cut", 3, drop=["numel"])


def _of_texts(content):
    state_in(content)["global"] = {"step": 7, "count": 3}


@pytest.mark.parametrize("name", ["s1_fp32_dp2", "s3_fp32_dp2"])
def test_state_under_a_text_is_not_lost_in_silence(name):
    """torch's optimizers may keep some in `state["global"]`, under keys that parameters have, too."""
    run = changed(name, _of_texts)
    with refusing(LeftOutError, "global/step"):
        zckpt.convert(run, "out", to="zckpt")


def test_state_under_a_text_at_stage_0_is_refused_as_such():
    more = {"global": {"k": 7}}
    run = changed("s0_fp32_dp2", lambda content: content["optimizer"]["state"].update(more), MODEL)
    with refusing(UnsupportedError, "has state under 'global', which is not a parameter's"):
        zckpt.open(run)


def _listed(content):
    for state in state_in(content).values():
        state["window"], state["last"] = (1, 2.5, None), [1, {"of": (2,)}]


@pytest.mark.parametrize("to", ["dcp", "fsdp-rank-files"])
def test_lists_and_tuples_in_state_come_back(to):
    run = changed("s2_fp32_dp2", _listed)
    zckpt.convert(run, "between", to=to, world_size=2)
    zckpt.convert("between", "back", to="deepspeed", stage=2, world_size=2)
    assert loaded("back", 1)[0]["window"] == (1, 2.5, None)
    assert loaded("back", 1)[1]["last"] == [1, {"of": (2,)}]
    assert zckpt.diff(run, "between").equal
    assert zckpt.diff(run, "back").equal


@pytest.mark.parametrize("name", ["s2_fp32_dp2", "s3_fp32_dp2"])
def test_hyperparameters_that_are_tensors_of_several_elements_come_back(name):
    """Every rank files them, and all have the same."""

    def groups_in(content: dict[str, Any]) -> list[dict[str, Any]]:
        z = content["optimizer_state_dict"]
        found: list[dict[str, Any]] = (z.get("base_optimizer_state") or z["optimizer_state_dict"])["param_groups"]
        return found

    run = changed(name, lambda content: groups_in(content)[1].update(scales=torch.arange(3.0)))
    assert zckpt.verify(run, deep=True).sound
    cut(run, "cut", 3)
    for to in ("universal", "dcp"):
        zckpt.convert(run, to, to=to)
        zckpt.convert(to, f"{to}-back", to="deepspeed", world_size=3, stage=int(name[1]))
    for folder in ("cut", "universal-back", "dcp-back"):
        assert zckpt.diff(run, folder).equal
        content = torch.load(optimizer_file(tag_of(folder), 2), weights_only=False)
        assert torch.equal(groups_in(content)[1]["scales"], torch.arange(3.0))
