"""State that is each rank's own: read, shown, compared, carried where the cut is the same, and refused elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zckpt
from tests.formats.deepspeed.contents import cut, run_of, state_of, tag_of, tensor_bytes
from tests.formats.deepspeed.shards import copy, edit, edit_all, model_file, optimizer_file, state_in
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.formats.account import take_inventory

LAMB, CODES, MUON = "own_lamb_s2_fp32_dp2", "own_blockwise_s3_fp32_dp2", "muon_s2_bf16_dp3"
KEYS = {LAMB: {"trust_ratio", "weight_norm", "adam_norm"}, CODES: {"__bnb_optimizer_quant_state__"}}


@pytest.mark.parametrize("name", KEYS)
def test_inspect_lists_it(name):
    values = zckpt.inspect(run_of(name)).per_rank
    assert {one["key"] for one in values} == KEYS[name]
    assert {one["rank"] for one in values} == {0, 1}


@pytest.mark.parametrize("name", KEYS)
def test_it_is_carried_byte_for_byte_at_the_same_cut(name):
    tag = cut(run_of(name), "cut", 2)
    for rank in range(2):
        source = optimizer_file(run_of(name) / "global_step5", rank)
        before, after = tensor_bytes(source), tensor_bytes(optimizer_file(tag, rank))
        own = {where: data for where, data in before.items() if KEYS[name] & set(map(str, where))}
        assert own
        assert {where: after[where] for where in own} == own
    assert zckpt.diff(run_of(name), tag).equal


@pytest.mark.parametrize(
    "options",
    [{"world_size": 1}, {"world_size": 3}, {"round_robin": True}, {"parameter_alignment": True}, {"stage": 3}],
)
def test_any_other_cut_is_refused_by_name(options):
    with pytest.raises(zckpt.UnsupportedError) as error:
        zckpt.reshard(run_of(LAMB), "cut", **{"world_size": 2, **options})
    assert all(key in str(error.value) for key in KEYS[LAMB])
    assert not Path("cut").exists()


def test_single_values_can_be_dropped():
    """LAMB's are computed anew in each step before they are used."""
    drop = ["trust_ratio", "*_norm"]
    written = zckpt.reshard(run_of(LAMB), "cut", world_size=3, drop=drop, verify=True)
    assert [one.split(" ")[0] for one in written.dropped] == ["trust_ratio", "weight_norm", "adam_norm"]
    states = state_of(optimizer_file(Path("cut/global_step5"), 0))["base_optimizer_state"]["state"]
    assert {key for one in states.values() for key in one} == {"step", "exp_avg", "exp_avg_sq"}
    for to in ("zckpt", "universal"):
        zckpt.convert(run_of(LAMB), to, to=to, drop=drop)
        assert zckpt.fingerprint(to).text == zckpt.fingerprint("cut").text
    with refusing(zckpt.UnsupportedError, "--drop 'trust_ratio'"):
        zckpt.reshard(run_of(LAMB), "other", world_size=3, drop=["*_norm"])
    with refusing(zckpt.UsageError, "nothing"):
        zckpt.reshard(run_of(LAMB), "other", world_size=3, drop=[*drop, "nothing"])


def test_moments_are_not_dropped_by_themselves():
    with refusing(zckpt.UnsupportedError, "state itself"):
        zckpt.reshard(run_of(CODES), "cut", world_size=3, drop=["__bnb*"])


def test_codes_of_zero_3_are_made_anew():
    """A sub-group of several blocks, with padding between parameters; two others are in float32."""
    tag = cut(run_of(CODES), "cut", 1, requantize=True, verify=True)
    floats = cut(run_of(CODES), "floats", 1, dequantize=True)
    assert zckpt.verify(tag, deep=True).sound
    anew, values = (torch.load(optimizer_file(one, 0), weights_only=False)["optimizer_state_dict"]
                    ["optimizer_state_dict"]["state"] for one in (tag, floats))  # fmt: skip
    for number, slot, steps in (("1", "exp_avg", 2 / 255), ("2", "exp_avg_sq", 1 / 255)):  # of the linear maps
        its = anew[0]["__bnb_optimizer_quant_state__"]
        scales = its[f"absmax{number}"].repeat_interleave(256)[: values[0][slot].numel()]
        found = its[f"qmap{number}"][its[f"state{number}"].long()] * scales
        assert ((found - values[0][slot]).abs() <= scales * steps / 2 * 1.001).all()
        assert torch.equal(anew[2]["__bnb_optimizer_quant_state__"][f"state{number}"], values[2][slot])
    with refusing(zckpt.UsageError, "no quantised state to quantise again"):
        zckpt.reshard(run_of(LAMB), "other", world_size=3, requantize=True)


def test_stage_1_is_cut_as_stage_2():
    tag = cut(run_of(LAMB), "cut", 2, stage=1)
    assert len(zckpt.open(tag).per_rank) == len(zckpt.open(run_of(LAMB)).per_rank)


def test_diff_tells_another_value():
    tag = copy(LAMB)
    edit(optimizer_file(tag, 1), lambda content: state_in(content)[0].update(trust_ratio=7.0))
    found = zckpt.diff(run_of(LAMB), tag)
    assert not found.equal
    assert [one.b for one in found.settings] == [7.0]


def test_steps_must_agree_all_the_same():
    tag = copy(LAMB)
    edit(optimizer_file(tag, 1), lambda content: [state.update(step=6) for state in state_in(content).values()])
    with refusing(zckpt.ShardError, "step of group 0"):
        zckpt.open(tag)


def test_codes_without_a_dict_around_them_are_not_taken_for_elements():
    """Older versions of bitsandbytes save codes and scales beside the step."""
    tag = copy("s2_bf16_dp2")

    def change(content):
        for state in state_in(content).values():
            numel = state.pop("exp_avg").numel()
            del state["exp_avg_sq"]
            state.update(state1=torch.zeros(numel, dtype=torch.uint8), qmap1=torch.zeros(256),
                         absmax1=torch.zeros(-(-numel // 256)))  # fmt: skip

    edit_all(tag, change)
    found = zckpt.open(tag)
    assert {one.key for one in found.per_rank} == {"state1", "qmap1", "absmax1"}
    assert set(found.slot_names()) == {"weight", "master"}
    with refusing(zckpt.UnsupportedError, "state1"):
        zckpt.reshard(tag, "cut", world_size=3)


def test_muon_is_written_as_whole_matrices(tmp_path):
    """A partition of two ranks is two matrices of 310; of four, each rank has those of which it holds a part."""

    def sizes(tag, world_size) -> list[int]:
        states = [state_of(optimizer_file(tag, rank))["base_optimizer_state"]["state"][0] for rank in range(world_size)]
        return [state["momentum_buffer"].numel for state in states]

    for world_size, expected in ((1, [1240]), (2, [620, 620]), (4, [310, 310, 310, 310])):
        tag = cut(run_of(MUON), tmp_path / str(world_size), world_size, verify=True)
        assert sizes(tag, world_size) == expected
        assert zckpt.fingerprint(tag).text == zckpt.fingerprint(run_of(MUON)).text
    tag = cut(tmp_path / "2", tmp_path / "3", 3)
    assert sizes(tag, 3) == [620, 620, 620]
    assert zckpt.verify(tag, deep=True).sound


def test_copies_of_a_matrix_on_two_ranks_are_compared():
    tag = copy(MUON)
    edit(optimizer_file(tag, 1), lambda content: state_in(content)[0]["momentum_buffer"][:310].add_(1))
    assert {name for one in zckpt.verify(tag, deep=True).findings for name in one.parameters} == {"up.1.weight"}


@pytest.mark.parametrize("to", some(["universal"], ["zckpt", "consolidated"]))
def test_a_tensor_that_each_rank_has_otherwise_stays_each_ones_own(to):
    """As the random state of a client's own; files that say the same are read as one tree."""
    tag = copy("s3_bf16_dp3", "run")
    for rank in range(3):
        own = {"random": torch.full((5,), rank), "large": torch.arange(200_000) // 199_999 * rank}
        edit(model_file(tag, rank), lambda content, own=own: content.update(own))
    zckpt.convert(tag, "out", to=to)
    found = zckpt.open("out").metadata
    assert len([key for key in found if key.endswith(("random", "large"))]) == 6
    assert zckpt.diff(tag, "out").equal
    for expected in ((0, 1, 2, 0), (0, 1)):
        back, ranks = f"back{len(expected)}", range(len(expected))
        zckpt.convert("out", back, to="deepspeed", world_size=len(ranks), stage=3)
        found = [torch.load(model_file(tag_of(back), rank))["random"].tolist() for rank in ranks]
        assert found == [[rank] * 5 for rank in expected]
        assert zckpt.diff(tag, back).equal


@pytest.mark.parametrize("to", ["zckpt", "dcp"])
def test_plain_values_and_extra_state_of_ranks_are_theirs_again_after_another_format(to):
    """What a module keeps is in the rank's module, and a number or a text of a rank's own is accounted for."""
    tag, extra = copy("s3_bf16_dp3", "run"), "ln1._extra_state"
    for rank in range(3):

        def change(content, rank=rank):
            content.update(counter=rank // 2 + 1005, name=f"rank {rank}")
            content["module"][extra] = {"scale": torch.full((2,), rank + 1.0)}

        edit(model_file(tag, rank), change)
    assert not take_inventory(zckpt.open(tag)).left_out
    zckpt.convert(tag, "out", to=to)
    zckpt.convert("out", "back", to="deepspeed", world_size=2, stage=3)
    for rank in range(2):
        found = torch.load(model_file(tag_of("back"), rank), weights_only=False)
        assert (found["counter"], found["name"]) == (1005, f"rank {rank}")
        assert found["module"][extra]["scale"].tolist() == [rank + 1] * 2
        assert extra not in found
    assert zckpt.diff(tag, "back").equal


@pytest.mark.parametrize("values", [(1, 1), (1, 2)])
@pytest.mark.parametrize("key", ["*", "**"])
def test_a_clients_key_that_looks_like_a_pattern_speaks_for_its_own_value_only(key, values):
    tag = copy("s3_bf16_dp2")
    for rank, value in enumerate(values):
        own = {key: value, "optimizer": {"odd": torch.ones(3)}}
        edit(model_file(tag, rank), lambda content, own=own: content.update(own))
    lost = take_inventory(zckpt.open(tag)).left_out
    assert [one.file.rpartition("/")[2] for one in lost] == [model_file(tag, rank).name for rank in range(2)]


@pytest.mark.parametrize("case", ["no sums", "sums of one", "legacy", "other order"])
def test_large_client_state_is_compared_where_files_state_no_checksums_too(case):
    tag = copy("s3_bf16_dp2")

    def write(rank, last):
        same, own = torch.arange(400_000), torch.arange(400_000)
        own[-1] = last
        large = [own, same]
        more = {"other": same, "large": large} if rank else {"large": large, "other": same}
        torch.serialization.set_crc32_options(case != "no sums" and (case != "sums of one" or not rank))
        try:
            edit(model_file(tag, rank), lambda content: content.update(more), legacy=rank == 1 and case == "legacy")
        finally:
            torch.serialization.set_crc32_options(True)

    write(0, 7)
    for last, expected in ((7, []), (8, ["zero_pp_rank_1_mp_rank_00_model_states.large"])):
        write(1, last)
        found = zckpt.open(tag)
        assert [key for key in found.metadata if key.endswith((".large", ".other"))] == expected
        assert not take_inventory(found).left_out


@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_parallel_ranks_have_theirs_again_too(stage, tmp_path):
    tag = copy(f"tp2_s{stage}_bf16_dp2", tmp_path / "run")
    for path in tag.glob("*mp_rank_*_model_states.pt"):
        edit(path, lambda content, path=path: content.update(who=path.name, rng=torch.full((2,), len(path.name))))
    zckpt.convert(tag, tmp_path / "out", to="zckpt")
    zckpt.convert(
        tmp_path / "out", tmp_path / "back", to="deepspeed", world_size=2, stage=stage, tensor_parallel_size=2
    )
    files = [*tag_of(tmp_path / "back").glob("*mp_rank_*_model_states.pt")]
    assert len(files) == 2 * max(stage - 1, 1)
    assert all(torch.load(path, weights_only=False)["who"] == path.name for path in files)
    assert zckpt.diff(tag, tmp_path / "back").equal
    zckpt.convert(
        tmp_path / "out", tmp_path / "other", to="deepspeed", world_size=2, stage=4 - stage, tensor_parallel_size=2
    )  # files of another kind keep them all
    assert zckpt.diff(tag, tmp_path / "other").equal


@pytest.mark.parametrize("rank", [0, 2])
def test_what_a_module_keeps_on_another_rank_alone_is_not_the_models(rank, tmp_path):
    tag, extra = copy("s3_bf16_dp3", tmp_path / "run"), "ln1._extra_state"
    edit(model_file(tag, rank), lambda content: content["module"].update({extra: 7}))
    zckpt.convert(tag, tmp_path / "out", to="dcp")
    zckpt.convert(tmp_path / "out", tmp_path / "back", to="deepspeed", world_size=3, stage=3)
    for one in range(3):
        found = torch.load(model_file(tag_of(tmp_path / "back"), one), weights_only=False)
        assert (extra in found["module"], extra in found) == (rank in (0, one), False)
    assert zckpt.diff(tag, tmp_path / "back").equal


def test_tensor_parallel_ranks_that_were_not_have_what_the_firsts_have():
    tag = copy("s3_bf16_dp2", "run")
    for rank in range(2):
        edit(model_file(tag, rank), lambda content, rank=rank: content.update(own=rank))
    Path("rules.json").write_text(json.dumps({"tp_replicated_parameter_patterns": [".*"]}))
    zckpt.convert(tag, "out", to="zckpt")
    done = zckpt.convert(
        "out", "back", to="deepspeed", world_size=2, stage=3, tensor_parallel_size=2, slice_rules="rules.json"
    )
    assert not [note for note in done.notes if "--dtype" in note]  # DeepSpeed reads the masters
    found = {path.name: torch.load(path, weights_only=False) for path in tag_of("back").glob("*model_states.pt")}
    expected = {f"zero_pp_rank_{rank}_mp_rank_0{mp}_model_states.pt": rank for rank in (0, 1) for mp in (0, 1)}
    assert {name: content["own"] for name, content in found.items()} == expected
