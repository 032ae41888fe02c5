"""Slices for other numbers of tensor-parallel ranks: every way of slicing, padding, what drifts, whose rules hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import zckpt
from tests.formats.deepspeed import sliced
from tests.formats.deepspeed.contents import alike, content_of, cut, run_of, state_of, tag_of, tensor_bytes
from tests.formats.deepspeed.shards import FIXTURES, copy, edit, edit_all
from tests.pairwise import each, some
from tests.refusals import refusing
from tests.truth import Truth, assert_consolidated, assert_same, assert_same_groups
from zckpt.errors import LayoutError, UnsupportedError, UsageError, WeightMismatchError

FIXED = ["tp2_s1_bf16_dp2", "tp2_s2_fp32_dp2", "tp2_s3_bf16_dp2"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Callable[..., Path]:
    """Make a run for so many ranks once, for all to read."""
    return cache(lambda degree=4, **options: sliced.make(tmp_path_factory.mktemp("sliced"), degree, 2, **options))


def ruled(**changes) -> Path:
    return sliced.make(Path("source"), 4, 2, rules=sliced.RULES | changes)


@pytest.fixture(scope="module")
def halved(source, tmp_path_factory) -> tuple[zckpt.Written, Path]:
    """What is said of a cut for half of the tensor-parallel ranks, and its tag directory."""
    run = tmp_path_factory.mktemp("halved") / "cut"
    return zckpt.reshard(source(), run, world_size=3, tensor_parallel_size=2), tag_of(run)


def sizes(tag, rank) -> dict[str, tuple[int, ...]]:
    """Shapes of a model-parallel rank's module."""
    module = content_of(tag / f"mp_rank_{rank:02d}_model_states.pt")["module"]
    return {name: tensor.shape for name, tensor in module.items()}


def loaded(tag, rank) -> dict[str, torch.Tensor]:
    path = tag / f"mp_rank_{rank:02d}_model_states.pt"
    return torch.load(path, weights_only=False)["module"]


# --- what real trainings wrote


@pytest.mark.parametrize(("name", "stage", "world_size", "degree"), each(FIXED, [1, 3], [1, 3, 4], [1, 2, 4]))
def test_everything_arrives(name, stage, world_size, degree):
    source = zckpt.open(run_of(name))
    tag = cut(run_of(name), "cut", world_size, tensor_parallel_size=degree, stage=stage)
    found = zckpt.open(tag)
    assert (found.topology.dp, found.topology.tp, found.zero_stage) == (world_size, degree, stage)
    assert list(found.parameters) == list(source.parameters)
    assert_consolidated(tag, Truth(FIXTURES / name))
    assert_same_groups(found, source)
    assert found.warnings == source.warnings


@pytest.mark.parametrize("name", FIXED)
def test_there_and_back_at_the_same_degree_gives_the_same_files(name):
    """Also what drifts apart and the rows of the padding: nothing is put together where nothing has to be."""
    original = tag_of(run_of(name))
    cut(run_of(name), "between", 3)
    back = cut("between", "back", 2)
    for one in alike(back, original):
        if "model_states" in one:
            assert tensor_bytes(back / one) == tensor_bytes(original / one), one
        elif "s3" not in name:
            key = "single_partition_of_fp32_groups"
            mine, theirs = (
                {where: data for where, data in tensor_bytes(tag / one).items() if key in where}
                for tag in (back, original)
            )
            assert theirs
            assert mine == theirs, one


def test_one_dict_of_shapes_for_all_groups_is_split():
    """As files before 2021 have it; a list that is too short cannot be split."""
    name = "tp2_s1_bf16_dp2"
    tag = copy(name)

    def merge(content):
        content["param_shapes"] = {name: shape for group in content["param_shapes"] for name, shape in group.items()}

    edit_all(tag, merge, "*model_states.pt")
    assert_consolidated(tag, Truth(FIXTURES / name))
    assert_same_groups(zckpt.open(tag), zckpt.open(run_of(name)))
    edit_all(tag, lambda content: content["param_shapes"].popitem(), "*model_states.pt")
    with refusing(LayoutError, "one param_shapes for several groups, which cannot be separated"):
        zckpt.open(tag)


# --- every way of slicing


@pytest.mark.parametrize(
    ("degrees", "stage"),
    each([(4, 2), (4, 1), (2, 4), (1, 4), (1, 2), (2, 1), (4, 4), (1, 1)], [1, 2, 3]),
)
@pytest.mark.every(3)
def test_each_rank_has_what_torch_would_cut(degrees, stage, source):
    degree, other = degrees
    tag = cut(source(degree), "cut", 3, tensor_parallel_size=other, stage=stage)
    assert_whole(zckpt.open(tag), degree, *sliced.SLOTS)
    if stage == 3:
        return
    for rank in range(other):
        module = loaded(tag, rank)
        for name in sliced.WAYS:
            expected = sliced.local(name, "weight" if "frozen" in name else "master", rank, other)
            if name == sliced.DRIFTING and degree != other:
                expected = sliced.mean("master", degree)
            assert torch.equal(module[name], expected), (rank, name)
        assert module["head.weight"].data_ptr() == module["embedding.weight"].data_ptr()
        assert module["counter"] == 7


@pytest.mark.parametrize(("between", "stages"), each([1, 2], [(2, 2), (3, 2), (1, 3)]))
@pytest.mark.every(3, 1)
def test_there_and_back_gives_the_same_state(between, stages, source):
    zckpt.reshard(source(), "between", world_size=3, tensor_parallel_size=between, stage=stages[0])
    zckpt.reshard("between", "stage", world_size=2, stage=stages[1])
    back = cut("stage", "back", 2, tensor_parallel_size=4, stage=2)
    original = tag_of(source())
    assert sorted(path.name for path in back.iterdir()) == sorted(path.name for path in original.iterdir())
    for path in sorted(original.iterdir()):
        mine, theirs = tensor_bytes(back / path.name), tensor_bytes(path)
        assert set(mine) == set(theirs)
        if "model" in path.name:
            differing = {where for where in theirs if mine[where] != theirs[where]}
            assert {where[-1] for where in differing} <= {sliced.DRIFTING, "rng_state"}
        else:
            drifts = where_it_drifts(original, path)
            for where, data in theirs.items():
                parts = zip(elements(mine[where]), elements(data), strict=True)
                assert {at for at, (a, b) in enumerate(parts) if a != b} <= drifts.get(group_of(where), set()), where


def elements(data) -> list[bytes]:
    return [data[at : at + 4] for at in range(0, len(data), 4)]


def group_of(where: tuple[object, ...]) -> object:
    return next((step for step in where if type(step) is int), None)


def where_it_drifts(tag, path) -> dict[object, set[int]]:
    """Positions, by group, of the elements of one rank's partition that are those of the parameter that drifts."""
    dp_rank, mp_rank = int(path.name.split("_")[3]), int(path.name.split("_")[6])
    shapes = content_of(tag / f"mp_rank_{mp_rank:02d}_model_states.pt")["param_shapes"][1]
    begin = 0
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        if name == sliced.DRIFTING:
            state = state_of(path)
            size = state["base_optimizer_state"]["state"][1]["exp_avg"].numel
            return {1: {at - dp_rank * size for at in range(begin, begin + numel)}}
        begin += numel
    raise AssertionError(sliced.DRIFTING)


def test_model_files_are_true_of_the_target(halved):
    for rank in range(2):
        content = content_of(halved[1] / f"mp_rank_{rank:02d}_model_states.pt")
        assert (content["dp_world_size"], content["mp_world_size"]) == (3, 2)
        assert content["checkpoint_parallel_dimensions"] == {"pp_degree": 1, "tp_degree": 2}
        assert content["shared_params"] == (sliced.TIED if rank == 0 else {})
        shapes = {name: shape for group in content["param_shapes"] for name, shape in group.items()}
        assert shapes["layer.row.weight"] == (7, 4)
        assert shapes["layer.qkv.weight"] == (14, 6)
        assert content["frozen_param_shapes"] == {"frozen.column": (4, 3), "frozen.norm": (3,)}


def test_widths_of_parts_are_those_of_the_target():
    """Without them, version 0.4 of DeepSpeed's own converter refuses; those of another degree would be wrong."""
    widths = {r"layer\.qkv\.weight$": [[4] * 4, [2] * 4, [1] * 4]}
    tag = cut(ruled(sub_param_shard_widths=widths), "cut", 1, tensor_parallel_size=2)
    info = content_of(tag / "mp_rank_01_model_states.pt")["universal_checkpoint_info"]
    assert info["sub_param_shard_widths"] == {r"layer\.qkv\.weight$": [[8, 8], [4, 4], [2, 2]]}
    assert info["parameter_with_sub_params"] == sliced.RULES["parameter_with_sub_params"]
    assert_same(zckpt.open(tag).read("layer.qkv.weight", "exp_avg"), sliced.whole("layer.qkv.weight", "exp_avg"), "")


# --- the vocabulary's padding


def test_padding_rows_keep_their_values(halved):
    rows = torch.cat([loaded(halved[1], rank)["embedding.weight"] for rank in range(2)])
    assert torch.equal(rows, sliced.whole("embedding.weight", "master"))
    assert rows[sliced.VOCABULARY :].abs().sum() > 0


def test_tp1_keeps_its_padding_rows():
    """A training that was never sliced may have a padded vocabulary all the same, and its model expects it."""
    edits = {"original_vocab_size": 30, "vocabulary_parameter_patterns": ["emb.weight"]}
    original = copy("s2_bf16_dp2_ucinfo")
    run, model = original.parent, original / "mp_rank_00_model_states.pt"
    edit(model, lambda content: content["universal_checkpoint_info"].update(edits))
    assert zckpt.open(run).parameters["emb.weight"].shape[0] == 30
    tag = cut(run, "cut", 3)
    written = content_of(tag / model.name)
    assert written["module"]["emb.weight"].shape[0] == written["param_shapes"][0]["emb.weight"][0] == 37
    mine, theirs = tensor_bytes(tag / model.name), tensor_bytes(model)
    assert mine["module", "emb.weight"] == theirs["module", "emb.weight"]
    back = cut("cut", "back", 2)
    for path in original.glob("*optim*"):
        mine, theirs = tensor_bytes(back / path.name), tensor_bytes(path)
        masters = [where for where in theirs if "single_partition_of_fp32_groups" in where]
        assert masters
        assert all(mine[where] == theirs[where] for where in masters)


@pytest.mark.parametrize(("degree", "rows"), [(1, 37), (1, 40), (1, 64), (2, 38), (4, 40), (4, 128)])
@pytest.mark.every(3)
def test_padded_size_is_as_asked(degree, rows, source):
    options = {"tensor_parallel_size": degree, "padded_vocab_size": rows}
    tag = cut(source(), "cut", 3, **options)
    found = torch.cat([loaded(tag, rank)["embedding.weight"] for rank in range(degree)])
    expected = torch.zeros(rows, 6)
    kept = min(rows, sliced.PADDED)
    expected[:kept] = sliced.whole("embedding.weight", "master")[:kept]
    assert torch.equal(found, expected)
    info = content_of(tag / "mp_rank_00_model_states.pt")["universal_checkpoint_info"]
    assert info["padded_vocab_size"] == rows
    opened = zckpt.open(tag)
    for slot in sliced.SLOTS:
        whole = sliced.whole("embedding.weight", slot)[: sliced.VOCABULARY]
        assert_same(opened.read("embedding.weight", slot), whole, slot)
    if degree == 4:  # the same degree: all else stays what it was, on each rank
        for rank in range(4):
            assert torch.equal(loaded(tag, rank)[sliced.DRIFTING], sliced.local(sliced.DRIFTING, "master", rank, 4))


def test_rows_are_added_where_they_do_not_divide(source):
    zckpt.reshard(source(), "one", world_size=1, tensor_parallel_size=1, padded_vocab_size=37)
    tag = cut("one", "two", 1, tensor_parallel_size=2)
    assert [sizes(tag, rank)["embedding.weight"] for rank in range(2)] == [(19, 6), (19, 6)]
    assert loaded(tag, 1)["embedding.weight"][-1].tolist() == [0] * 6


def test_another_format_has_the_rows_that_it_states_on_one_rank_too(source):
    zckpt.convert(source(), "own", to="zckpt")
    for rows, options in ((sliced.VOCABULARY, {}), (sliced.PADDED, {"tensor_parallel_size": 1})):
        zckpt.convert("own", f"{rows}", to="deepspeed", world_size=1, **options)
        assert len(loaded(tag_of(f"{rows}"), 0)["embedding.weight"]) == rows


def test_stage_3_pads_as_well(source):
    options = {"stage": 3, "tensor_parallel_size": 2, "padded_vocab_size": 64}
    zckpt.reshard(source(), "three", world_size=2, **options)
    tag = cut("three", "one", 1, tensor_parallel_size=1, stage=1)
    found = loaded(tag, 0)["embedding.weight"]
    assert torch.equal(found[:40], sliced.whole("embedding.weight", "master"))
    assert found[40:].shape == (24, 6)
    assert not found[40:].any()


@pytest.mark.parametrize("rows", [36, 39, 0, -4])
def test_padded_size_that_cannot_be(rows, source):
    with refusing(UsageError, "padded size"):
        zckpt.reshard(source(), "cut", world_size=2, tensor_parallel_size=2, padded_vocab_size=rows)
    assert not Path("cut").exists()


# --- whose rules hold


def rules_file(**changes) -> Path:
    path = Path("rules.json")
    path.write_text(json.dumps(sliced.RULES | changes))
    return path


def assert_whole(found, degree, *slots):
    """Hold what is read against what was cut: the mean of what drifts, and no rows of padding."""
    for name in sliced.names():
        for slot in slots:
            expected = sliced.mean(slot, degree) if name == sliced.DRIFTING else sliced.whole(name, slot)
            rows = sliced.VOCABULARY if name == "embedding.weight" else None
            assert_same(found.read(name, slot), expected[:rows] if rows else expected, f"{slot}/{name}")


@pytest.mark.parametrize("other", some([2], [1, 4]))
def test_rules_from_a_file(other, source):
    tag = cut(source(rules=None), "cut", 3, tensor_parallel_size=other, tp_rules=rules_file())
    assert_whole(zckpt.open(tag), 4, "exp_avg")
    info = content_of(tag / "mp_rank_00_model_states.pt")["universal_checkpoint_info"]
    assert info["parameter_with_sub_params"] == sliced.RULES["parameter_with_sub_params"]  # tuples, as DeepSpeed asks


def test_file_is_used_instead_of_the_checkpoints_own():
    wrong = sliced.RULES["parameter_with_row_parallelism_patterns"] + [r"layer\.column"]
    run = ruled(parameter_with_row_parallelism_patterns=wrong)
    with refusing(LayoutError, r"layer\.column\.bias"):
        zckpt.open(run)
    tag = cut(run, "cut", 1, tensor_parallel_size=1, tp_rules=rules_file())
    assert torch.equal(loaded(tag, 0)["layer.column.weight"], sliced.whole("layer.column.weight", "master"))
    assert zckpt.open(tag).parameters["layer.column.weight"].shape == (12, 5)


@pytest.mark.parametrize("degree", [None, 1, 2, 4])
def test_without_rules_slices_are_refused(degree, source):
    words = r"17 parameters have tensor-parallel slices \(embedding.weight, layer.qkv.weight, .*no rules"
    with refusing(UnsupportedError, words):
        zckpt.reshard(source(rules=None), "cut", world_size=3, tensor_parallel_size=degree)
    assert not Path("cut").exists()


def test_without_rules_nothing_is_sliced(tmp_path):
    with refusing(UnsupportedError, r"emb\.weight.*no rules how to cut"):
        zckpt.reshard(run_of("s2_bf16_dp2"), tmp_path / "cut", world_size=3, tensor_parallel_size=2)
    with refusing(UnsupportedError, "which parameters each rank has whole"):
        zckpt.reshard(run_of("s2_bf16_dp2_ucinfo"), tmp_path / "cut", world_size=3, tensor_parallel_size=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", [r".*\.norm", "scale$"])
def test_copies_that_no_rule_names_are_noticed(missing):
    """In shapes alone, two copies of a norm are slices of one twice as long."""
    patterns = [pattern for pattern in sliced.RULES["tp_replicated_parameter_patterns"] if pattern != missing]
    run = ruled(tp_replicated_parameter_patterns=patterns)
    with refusing((WeightMismatchError, LayoutError), r"layer\.norm\.weight is the same|scale"):
        zckpt.reshard(run, "cut", world_size=2, tensor_parallel_size=2)
    assert not Path("cut").exists()


def test_copies_that_differ_are_noticed():
    patterns = [*sliced.RULES["tp_replicated_parameter_patterns"], ".*drifting"]
    run = ruled(tp_replicated_parameter_patterns=patterns)
    with refusing(WeightMismatchError, r"layer\.drifting\.weight differs"):
        zckpt.reshard(run, "cut", world_size=2, tensor_parallel_size=2)
    assert not Path("cut").exists()
    zckpt.reshard(run, "same", world_size=1)
    tag = cut(run, "taken", 1, tensor_parallel_size=1, weight_check=False)
    assert torch.equal(loaded(tag, 0)[sliced.DRIFTING], sliced.local(sliced.DRIFTING, "master", 0, 4))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a JSON document"),
        ("[" * 100_000, "not a JSON document"),
        ("[]", "no tensor-parallel rules"),
        ('{"tp_replicated_patterns": []}', "unknown tensor-parallel rules"),
        ('{"tp_replicated_parameter_patterns": "x"}', "unreadable"),
        ('{"tp_replicated_parameter_patterns": ["("]}', "unreadable"),
        ('{"tp_replicated_parameter_patterns": ["(a*)*b"]}', "take forever"),
        ('{"parameter_with_sub_params": [{}]}', "sub-parameters"),
        ('{"parameter_with_sub_params": [{"patterns": ["a"], "shape": [1000000000], "partition_dim": 0}]}', "too many"),
        (" " * (1 << 21), "too large"),
    ],
)
def test_rules_that_cannot_be_used(text, words, source):
    path = Path("rules.json")
    path.write_text(text)
    with refusing(UsageError, words):
        zckpt.reshard(source(), "cut", world_size=2, tp_rules=path)
    with refusing(UsageError, "cannot be opened"):
        zckpt.reshard(source(), "cut", world_size=2, tp_rules="no")


def test_padded_size_without_a_vocabulary_is_refused(source):
    rules = rules_file(vocabulary_parameter_patterns=[])
    with refusing(UsageError, "--padded-vocab-size does not apply"):
        zckpt.reshard(source(), "cut", world_size=2, padded_vocab_size=40, tp_rules=rules)
    assert not Path("cut").exists()


# --- what ranks saved for themselves


def test_what_differs_between_slices_is_named(halved):
    done, tag = halved
    assert done.notes == ("rng_state differs between model-parallel ranks: mp_rank 0's is carried to all",)
    states = [tensor_bytes(tag / f"mp_rank_{rank:02d}_model_states.pt")["rng_state",] for rank in range(2)]
    assert states == [bytes(8)] * 2


def test_ranks_at_the_same_degree_keep_what_is_theirs(source):
    """DeepSpeed lets the first rank alone say what is tied; on the others it is no frozen parameter for that."""
    same = zckpt.reshard(source(), "four", world_size=3)
    assert same.notes == ("rng_state is carried over as it was saved at another number of ranks",)
    for rank in range(4):
        path = tag_of("four") / f"mp_rank_{rank:02d}_model_states.pt"
        assert tensor_bytes(path)["rng_state",] == bytes([rank]) * 8
        assert list(content_of(path)["frozen_param_shapes"]) == ["frozen.column", "frozen.norm"]
