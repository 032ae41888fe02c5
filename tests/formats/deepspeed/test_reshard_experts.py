"""Experts over other numbers of ranks: what real checkpoints hold, and the form of the files. Without DeepSpeed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from tests.formats.deepspeed.contents import alike, content_of, cut, run_of, state_of, tag_of, tensor_bytes
from tests.formats.deepspeed.shards import FIXTURES, copy, edit, fragments, model_file, optimizer_file
from tests.pairwise import each
from tests.refusals import refusing
from tests.truth import Truth, assert_consolidated, assert_same, assert_state
from zckpt.errors import LayoutError, ShardError, UnsupportedError, UsageError
from zckpt.formats.deepspeed import target_groups
from zckpt.formats.deepspeed.axes.experts import check_split, of_experts, spread_experts
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.target_groups import dealt
from zckpt.state import Parameter, ParamGroup

NAMES = ["moe_ep1_s2_bf16_dp2", "moe_ep2_s2_bf16_dp2", "moe_ep2_s2_fp32_dp4"]
EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts."


@pytest.mark.parametrize(("name", "spread"), each(NAMES, [(1, 1), (2, 2), (4, 4), (6, 2), (3, 1), (8, 4), (40, 4)]))
@pytest.mark.every(3)
def test_everything_arrives(name, spread):
    world_size, experts = spread
    source = zckpt.open(run_of(name))
    tag = cut(run_of(name), "cut", world_size, expert_parallel_size=experts)
    found = zckpt.open(tag)
    assert (found.topology.dp, found.topology.ep) == (world_size, experts)
    assert set(found.parameters) == set(source.parameters)
    assert_consolidated(tag, Truth(FIXTURES / name))
    assert [g.state for g in found.param_groups] == [g.state for g in source.param_groups]
    for group, old, name in zip(found.param_groups, source.param_groups, ("dense", f"ep_size_{experts}"), strict=True):
        assert set(group.parameters) == set(old.parameters)
        assert group.hyperparameters == {**old.hyperparameters, "name": name}  # from which torch takes it


@pytest.mark.parametrize("experts", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every(3)
def test_files_say_how_they_are_cut(name, experts):
    world_size = 8
    tag = cut(run_of(name), "cut", world_size, expert_parallel_size=experts)
    model = content_of(model_file(tag))
    dense, sparse = model["param_shapes"]
    assert all(type(shape) is tuple for shape in [*dense.values(), *sparse.values()])
    assert {int(key.removeprefix(EXPERT).split(".")[0]) for key in sparse} == set(range(4 // experts))
    assert not any(key.startswith(EXPERT) for key in model["module"])
    for rank in range(world_size):
        state = state_of(optimizer_file(tag, rank))
        assert state["partition_count"] == [world_size, world_size // experts]
        for group, shapes in enumerate((dense, sparse)):
            share = world_size // (experts if group else 1)
            position = rank // (experts if group else 1)
            numels = {key: math.prod(shape) for key, shape in shapes.items()}
            total = sum(numels.values())
            partition = 2 * math.ceil(total / (2 * share))
            padding = min(max((position + 1) * partition - total, 0), partition)
            assert state["group_paddings"][group] == padding
            assert state["single_partition_of_fp32_groups"][group].shape == (partition - padding,)
            assert len(state["param_alignment_paddings"][group]) == len(shapes)
            wanted = fragments(numels, position * partition, (position + 1) * partition)
            mapping = state["param_slice_mappings"][group]
            assert {key: (a.get("numel"), a.get("start")) for key, a in mapping.items()} == wanted


@pytest.mark.parametrize(
    ("name", "ranks", "between"),
    [
        ("moe_ep1_s2_bf16_dp2", 2, {"world_size": 8, "expert_parallel_size": 4}),
        ("moe_ep2_s2_bf16_dp2", 2, {"world_size": 3, "expert_parallel_size": 1, "stage": 1}),
        ("moe_ep2_s2_fp32_dp4", 4, {"world_size": 6}),
        ("moe_ep2_s2_fp32_dp4", 4, {"world_size": 4, "expert_parallel_size": 4, "round_robin": True}),
    ],
)
@pytest.mark.every(3)
def test_there_and_back_gives_the_same_files(name, ranks, between):
    original = tag_of(run_of(name))
    zckpt.reshard(run_of(name), "between", **between)
    experts = 1 if "ep1" in name else 2
    back = cut("between", "back", ranks, expert_parallel_size=experts, stage=2, round_robin=False)
    # ZeRO-1 does not tell whether frozen parameters were left out, so that there is no list of them any more.
    lists = ("frozen_param_shapes", "frozen_param_fragments") if between.get("stage") == 1 else ()
    for one in alike(back, original, lists):
        mine, theirs = tensor_bytes(back / one), tensor_bytes(original / one)
        assert list(mine) == list(theirs)
        for where, data in theirs.items():
            unpadded = len(data)
            if "base_optimizer_state" in where and where[-1] != "step":
                group = next(step for step in where if type(step) is int)
                unpadded -= 4 * state_of(original / one)["group_paddings"][group]
            assert mine[where][:unpadded] == data[:unpadded], (one, where)


@pytest.mark.parametrize("name", ["moe_ep2_s2_bf16_dp2", "moe_ep2_s2_fp32_dp4"])
def test_files_of_experts_are_the_same_at_any_degree(name):
    tag = cut(run_of(name), "cut", 3, expert_parallel_size=1)
    files = sorted(path.name for path in tag_of(run_of(name)).glob("layer_*"))
    assert len(files) == 4
    assert sorted(path.name for path in tag.glob("layer_*")) == files
    for one in files:
        assert tensor_bytes(tag / one) == tensor_bytes(tag_of(run_of(name)) / one)


OTHER_EXPERTS = "choose another --expert-parallel-size"


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("moe_ep2_s2_fp32_dp4", {"world_size": 3}, UsageError, OTHER_EXPERTS),
        ("moe_ep2_s2_fp32_dp4", {"expert_parallel_size": 3}, UsageError, OTHER_EXPERTS),
        ("moe_ep2_s2_fp32_dp4", {"world_size": 8, "expert_parallel_size": 8}, UsageError,
         r"4 experts of .* cannot be spread over 8 ranks"),
        ("moe_ep2_s2_fp32_dp4", {"expert_parallel_size": 0}, UsageError, "at least 1"),
        ("s2_bf16_dp2", {"expert_parallel_size": 2}, UsageError, "no experts"),
        ("moe_ep2_s2_fp32_dp4", {"stage": 3}, UnsupportedError, "ZeRO-3"),
        ("moe_ep2_s2_fp32_dp4", {"tensor_parallel_size": 2}, UnsupportedError, "no rules how to cut"),
    ],
)  # fmt: skip
def test_degree_that_divides_nothing_is_refused(name, options, error, words, tmp_path):
    with refusing(error, words):
        zckpt.reshard(run_of(name), tmp_path / "cut", **{"world_size": 4, **options})
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_are_numbered_otherwise_are_refused():
    """With `use_data_before_expert_parallelism` other ranks share an expert: read as usual, it would be wrong."""
    tag = copy("moe_ep2_s2_fp32_dp4")
    edit(model_file(tag), lambda content: content["ds_config"].update(use_data_before_expert_parallelism=True))
    with refusing(LayoutError, "holds another rank's share"):
        zckpt.open(tag)


# --- under tensor parallelism: experts are spread over its ranks, too

SLICED = "moe_tp2_ep2_s1_bf16_dp2"


@pytest.mark.parametrize(
    "options",
    [
        None,
        {"world_size": 1},
        {"world_size": 2, "expert_parallel_size": 4},
        {"world_size": 3, "expert_parallel_size": 1, "stage": 2},
        {"world_size": 7, "tensor_parallel_size": 1, "expert_parallel_size": 1},
        {"world_size": 2, "tensor_parallel_size": 4},
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_whole_experts_beside_slices(options):
    """Whatever the degrees, and with more ranks than some groups have elements."""
    source, truth = run_of(SLICED), Truth(FIXTURES / SLICED)
    if options is not None:
        zckpt.reshard(source, "cut", verify=True, **options)
        source = Path("cut")
    found = zckpt.open(source)
    assert found.warnings == []
    assert found.topology.tp == (options or {}).get("tensor_parallel_size", 2)
    assert_state(found, truth)
    for slot in truth.slots:
        assert truth.kind(slot).keys() == {name for name, p in found.parameters.items() if slot in p.slots}
    verified = zckpt.verify(source, deep=True)
    assert verified.sound, verified.findings


@pytest.mark.parametrize(("experts", "files"), [(1, 8), (2, 4), (4, 4)])
def test_files_of_experts_are_under_each_rank_that_looks_for_them(experts, files):
    tag = cut(run_of(SLICED), "cut", 4, expert_parallel_size=experts)
    found = {path.name.removesuffix("_model_states.pt") for path in tag.glob("layer_*")}
    wanted = {(e, rank % 2) for rank in range(8) for e in range(4) if e // (4 // experts) == rank % experts}
    assert found == {f"layer_0_expert_{e}_mp_rank_{lane:02d}" for e, lane in wanted}
    assert len(found) == files


def test_copies_of_an_expert_are_compared():
    tag = cut(run_of(SLICED), "cut", 4, expert_parallel_size=1)
    edit(tag / "layer_0_expert_2_mp_rank_01_model_states.pt", lambda content: next(iter(content.values())).add_(1))
    verified = zckpt.verify(tag, deep=True)
    assert {name for one in verified.findings for name in one.parameters} == {f"experts.{EXPERT}2.0.weight"}


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("mp_rank_01_model_states.pt", r"no model file of mp_rank 1: .*DeepSpeed does not write it"),
        ("layer_0_expert_3_mp_rank_01_model_states.pt", "weights of expert 3"),
    ],
)
def test_files_that_are_lost_are_named(lost, words):
    tag = copy(SLICED)
    (tag / lost).unlink()
    with refusing(ShardError, words):
        zckpt.open(tag)


def test_experts_of_ranks_in_another_order_are_refused():
    tag = copy(SLICED)
    for lane, experts in ((1, (0, 1)), (0, (2, 3))):
        for e in experts:
            name = f"layer_0_expert_{e}_mp_rank_{1 - lane:02d}_model_states.pt"
            (tag / name).rename(tag / name.replace(f"rank_{1 - lane:02d}", f"rank_{lane:02d}"))
    with refusing(UnsupportedError, "not in its rank's file"):
        zckpt.open(tag)


# --- from another format


@pytest.mark.parametrize("to", ["zckpt", "universal"])
@pytest.mark.every(2)
def test_experts_of_another_format_are_written(to):
    truth = Truth(FIXTURES / SLICED)
    notes = zckpt.convert(run_of(SLICED), "other", to=to).notes
    assert any("experts" in note for note in notes) == (to == "universal")
    zckpt.convert("other", "run", to="deepspeed", world_size=4, stage=2, expert_parallel_size=4)
    found = zckpt.open("run")
    assert (found.topology.dp, found.topology.tp, found.topology.ep) == (4, 1, 4)
    for key, value in truth.masters.items():
        assert_same(found.read(key, "master"), value, key)
    model = content_of(model_file(tag_of("run")))
    assert model["num_experts"] == [4]
    zckpt.convert("other", "same", to="deepspeed", world_size=4, stage=1)
    assert zckpt.open("same").topology.ep == 2
    with refusing(UsageError, "choose another --expert-parallel-size"):
        zckpt.convert("other", "odd", to="deepspeed", world_size=3, stage=1)
    with refusing(UnsupportedError, "does not run under ZeRO-3"):
        zckpt.convert("other", "odd", to="deepspeed", world_size=2, stage=3)


def test_experts_among_other_parameters_are_refused():
    group = ParamGroup({}, ["a", f"{EXPERT}0.weight"], {})
    with refusing(UnsupportedError, "mixes experts and other parameters"):
        of_experts(group, {EXPERT: 1})


# --- several degrees


def degrees_of(names: list[tuple[str, int | None]], size) -> list[list[str]]:
    """The groups of the target, given layer and degree of the source's."""
    state = Rank("", "deepspeed", degrees=[degree for _, degree in names])
    for layer in ("a", "b"):
        for e in range(4):
            name = f"{layer}.deepspeed_experts.{e}.weight"
            state.parameters[name] = Parameter(name, (2,), "float32")
    for layer, degree in names:
        members = [name for name in state.parameters if name.startswith(layer)]
        hyperparameters = {"lr": 0.1, "name": f"ep_size_{degree}"}
        state.param_groups.append(ParamGroup(hyperparameters, members, {}))
    options = RecutOptions(world_size=4, expert_parallel_size=size)
    return [[name for names in ranks for name in names] for _, _, ranks, _ in dealt(state, options, 1)]


def test_layers_of_several_degrees_become_one_group_in_the_models_order():
    """DeepSpeed's groups of several degrees are in the order of a set of their names, which no file tells."""
    for order in ([("a", 4), ("b", 2)], [("b", 2), ("a", 4)]):
        (group,) = degrees_of(order, 2)
        assert [name[0] + name.split(".")[2] for name in group] == ["a0", "a1", "b0", "b1", "a2", "a3", "b2", "b3"]


def test_groups_that_cannot_be_told_apart_are_refused():
    with refusing(UnsupportedError, "which of them form one group"):
        degrees_of([("a", 2), ("b", 4), ("a", 2)], 1)


# --- param groups that are split by size


def layers(experts, ranks) -> list[list[str]]:
    """The experts' parameters of each rank, in the model's order."""
    share = experts // ranks
    return [
        [
            f"{layer}.deepspeed_experts.{number}.{kind}"
            for layer in ("a", "b")
            for number in range(rank * share, (rank + 1) * share)
            for kind in ("weight", "bias")
        ]
        for rank in range(ranks)
    ]


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_experts_are_dealt_layer_by_layer(ranks, others):
    assert spread_experts(layers(12, ranks), others) == layers(12, others)


def test_other_orders_are_refused():
    names = [sorted(one, key=lambda name: name.rpartition(".")[2]) for one in layers(4, 2)]
    with refusing(UnsupportedError, "neither layer by layer"):
        spread_experts(names, 4)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_groups_are_split_as_deepspeed_splits_them(numels):
    """Its own loop, as a list of sizes: a group ends before the parameter that makes it too large."""
    expected = []
    group = []
    size = 0
    for index, numel in enumerate(numels):
        if size + numel <= 40:
            group.append(index)
            size += numel
        else:
            expected.append(group)
            group, size = [index], numel
    expected.append(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_groups, "EXPERT_GROUP_NUMEL", 40)
        assert target_groups.expert_groups(numels) == expected


def test_more_groups_where_a_rank_has_more_experts(monkeypatch):
    """One expert has 195 elements: at four expert ranks one group is enough, at one rank there are four, and back."""
    monkeypatch.setattr(target_groups, "EXPERT_GROUP_NUMEL", 200)
    source, truth = run_of("moe_ep2_s2_fp32_dp4"), Truth(FIXTURES / "moe_ep2_s2_fp32_dp4")
    zckpt.reshard(source, "four", world_size=4, expert_parallel_size=4)
    monkeypatch.setattr(target_groups, "EXPERT_GROUP_NUMEL", 390)
    zckpt.reshard("four", "two", world_size=4, expert_parallel_size=2)
    monkeypatch.setattr(target_groups, "EXPERT_GROUP_NUMEL", 200)
    zckpt.reshard("four", "one", world_size=2, expert_parallel_size=1)
    zckpt.reshard("one", "back", world_size=8, expert_parallel_size=4)
    zckpt.reshard("one", "halves", world_size=4, expert_parallel_size=2)
    counts = {"four": 2, "two": 2, "one": 5, "back": 2, "halves": 3}
    for place, count in counts.items():
        found = zckpt.open(place)
        assert len(found.param_groups) == count, place
        for key, value in truth.masters.items():
            assert_same(found.read(key, "master"), value, key)
        names = [group.parameters for group in found.param_groups[1:]]
        assert sorted(name for group in names for name in group) == sorted(
            name for name in truth.masters if "deepspeed_experts" in name
        )


@pytest.mark.parametrize("to", ["zckpt", "dcp", "universal"])
@pytest.mark.every(2)
def test_groups_that_were_split_by_size_come_back_from_other_formats(to, monkeypatch):
    """DeepSpeed loads only groups as it makes them, over any number of expert ranks."""
    monkeypatch.setattr(target_groups, "EXPERT_GROUP_NUMEL", 200)
    source = run_of("moe_ep2_s2_fp32_dp4")
    zckpt.reshard(source, "one", world_size=2, expert_parallel_size=1)
    zckpt.reshard("one", "two", world_size=2, expert_parallel_size=2)
    zckpt.convert("two", to, to=to)
    for name, degree in (("two", None), ("one", 1)):
        zckpt.convert(to, f"{name}_back", to="deepspeed", world_size=2, stage=2,
                      expert_parallel_size=degree, verify=True)  # fmt: skip
        groups, back = (zckpt.open(one).param_groups for one in (name, f"{name}_back"))
        assert [one.parameters for one in groups] == [one.parameters for one in back]


@pytest.mark.parametrize("name", ["ep_size_2", "mine"])
def test_split_groups_have_the_order_of_the_degree_that_they_say(name):
    groups = [ParamGroup({"name": name}, [f"{EXPERT}{number}.w" for number in numbers]) for numbers in ((0, 2), (1, 3))]
    ordered = [replace(one, parameters=of_experts(one, {EXPERT: 4})) for one in groups]
    if name == "ep_size_2":
        check_split(ordered)
        return
    with refusing(UnsupportedError, "that DeepSpeed does not use on 1 rank"):
        check_split(ordered)


def test_experts_that_were_slices_are_slices_again(tmp_path):
    """Every format carries it; DeepSpeed's files of one tensor-parallel rank do not say it."""
    zckpt.reshard(run_of(SLICED), tmp_path / "one", world_size=2, tensor_parallel_size=1, expert_parallel_size=2)

    def name(content):
        content["universal_checkpoint_info"]["tp_replicated_parameter_patterns"].append(".*deepspeed_experts.*")

    edit(model_file(tag_of(tmp_path / "one")), name)
    options = {"world_size": 2, "tensor_parallel_size": 2}
    for sliced, lanes in ((None, 2), (True, 1), (False, 2)):
        run = tmp_path / str(sliced)
        zckpt.reshard(tmp_path / "one", run, sliced_experts=sliced, **options)
        assert zckpt.open(run).details["sliced_experts"] is bool(sliced)
        assert len(list(run.glob("*/*expert_0_mp_rank_*"))) == (1 if lanes == 2 else 2)
        if sliced is None:
            continue
        zckpt.convert(run, tmp_path / f"{sliced}_dcp", to="dcp")
        back = zckpt.convert(tmp_path / f"{sliced}_dcp", tmp_path / f"{sliced}_back", to="deepspeed", **options)
        assert zckpt.open(tmp_path / f"{sliced}_back").details["sliced_experts"] is bool(sliced)
        assert any("--sliced-experts" in note for note in back.notes) is not bool(sliced)
        assert zckpt.diff(tmp_path / "one", tmp_path / f"{sliced}_back").equal
    with refusing(UnsupportedError, "keeps experts that are spread over tensor-parallel ranks"):
        zckpt.reshard(tmp_path / "False", tmp_path / "no", world_size=2, sliced_experts=True)
    with refusing(UsageError, "the target is not sliced"):
        zckpt.reshard(tmp_path / "one", tmp_path / "no", world_size=2, sliced_experts=True)
    with refusing(UsageError, "has no experts"):
        zckpt.reshard(run_of("s2_bf16_dp2"), tmp_path / "no", world_size=2, sliced_experts=False)
