"""The files of a DeepSpeed checkpoint when some are missing, there twice, old, stale, swapped or damaged."""

from __future__ import annotations

import math
import os
import random
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zckpt
import zckpt.formats.deepspeed.shards as shards
from tests.cli.console import command, environment
from tests.damage import swap
from tests.formats.deepspeed.shards import (
    FIXTURES,
    address,
    copy,
    edit,
    edit_all,
    model_file,
    optimizer_file,
    recut,
    state_in,
)
from tests.pairwise import each, some
from tests.refusals import refusing
from tests.truth import Truth, assert_consolidated, assert_same, assert_state
from zckpt import LayoutError, ShardError, SourceError, UnsupportedError, WeightMismatchError, ZckptError
from zckpt.torchfile import plain


def assert_still_the_truth(tag, name, **options):
    output = Path("output")
    output.mkdir()
    assert_consolidated(tag, Truth(FIXTURES / name), output, **options)


def outcome(*steps: Callable[[], object]) -> ZckptError | None:
    """Run steps; return zckpt's own error, one line long. Any other exception is a failure of the test."""
    try:
        for step in steps:
            step()
    except ZckptError as error:
        found = error
    else:
        return None
    assert len(str(found).splitlines()) == 1
    return found


def refused(kind, source, *words, **options):
    """Hold opening, or else consolidating, to fail with an error of that kind, in one line that has these words."""
    target = source.parent / "unwritten.safetensors"
    with pytest.raises(kind) as caught:
        zckpt.consolidate(zckpt.open(source, **options), target)
    assert type(caught.value) is kind or kind in (SourceError, ZckptError)
    assert not target.exists()
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    for word in words:
        assert re.search(word, text), text


def any_of(names):
    return "|".join(map(re.escape, names))


# --- missing files


def optimizers(*ranks):
    return [f"*zero_pp_rank_{rank}_mp_rank_00_optim*" for rank in ranks]


def named(ranks):
    return rf"missing for ranks? {', '.join(map(str, ranks))}:"


SOME_OF_FOUR = [[0], [1], [3], [0, 3], [1, 2, 3]]
OF_FOUR = ["s2_bf16_dp4", "s1_bf16_dp4", "s3_bf16_dp4", "s1_fp32_dp4_sgdm", "ds0145_s2_bf16_dp4"]
MISSING = [
    *((name, optimizers(*some), [named(some), "4 ranks", "--root"]) for name in OF_FOUR for some in SOME_OF_FOUR),
    *(("s3_bf16_dp4", [f"*rank_{rank}_*model*" for rank in some], [rf"ranks? {', '.join(map(str, some))}:"])
      for some in ([1], [2, 3], [0])),
    ("s2_bf16_dp2", ["*model*"], ["mp_rank_00_model_states.pt"]),
    ("s2_bf16_dp2", optimizers(0, 1), ["ranks 0, 1:"]),
    *(("tp2_s1_bf16_dp2", [f"*mp_rank_{rank:02d}_*"], [rf"model-parallel ranks? {rank}\b"]) for rank in (0, 1)),
    ("tp2_s1_bf16_dp2", ["*rank_0_mp_rank_01_optim*"], ["mp_rank 1", named([0])]),
    *((name, ["layer_0_expert_2_*"], [r"expert.* 2\b"]) for name in ("moe_ep1_s2_bf16_dp2", "moe_ep2_s2_bf16_dp2")),
    # Masters of a layer are in the optimizer's files; its buffers, among others, are nowhere else.
    ("pp2_s1_bf16_dp1", ["layer_00-*"], ["no layer file has tied_modules.embed.weight"]),
    ("pp2_s1_bf16_dp1", ["layer_01-*"], ["no layer file has 1.scale"]),
    ("pp2_tp2_s1_bf16_dp1", ["layer_02-model_01-*"], [r"no layer file has 2\."]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gone", "words"), MISSING)
def test_missing_files_are_named(name, gone, words):
    tag = copy(name)
    for path in [path for pattern in gone for path in tag.glob(pattern)]:
        path.unlink()
    refused(ShardError, tag, *words)


def test_directory_without_files_is_no_checkpoint(tmp_path):
    with refusing(SourceError, "not recognised as a checkpoint"):
        zckpt.open(tmp_path)


@pytest.fixture
def tag():
    """A copy of two ranks of stage 2."""
    return copy("s2_bf16_dp2")


def assert_refused_with_little_memory(tag):
    """What a file claims must not decide how much is taken."""
    done = subprocess.run(
        command("inspect", tag),
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
    )
    assert done.returncode == 3, done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("size", some([0, 10**9], [-1, 1 << 40, 1 << 70]))
def test_number_of_ranks_that_cannot_be_is_refused(size, tag):
    edit(model_file(tag), lambda content: content.update(dp_world_size=size))
    edit_all(tag, lambda content: content["optimizer_state_dict"].update(partition_count=[size] * 3))
    assert_refused_with_little_memory(tag)


@pytest.mark.parametrize("size", some([1 << 70], [10**9]))
def test_number_of_model_parallel_ranks_that_cannot_be_is_refused(size, tag):
    edit(model_file(tag), lambda content: content.update(mp_world_size=size))
    assert_refused_with_little_memory(tag)


# --- several roots


def test_two_roots_are_merged():
    tag = copy("s3_bf16_dp4")
    node = Path("node", tag.name)
    node.mkdir(parents=True)
    for rank in (1, 3):
        for path in tag.glob(f"*rank_{rank}_mp*"):
            path.rename(node / path.name)
    opened = zckpt.open(tag.parent, roots=[node.parent])
    assert opened.topology.dp == 4
    zckpt.consolidate(tag.parent, "model.safetensors", roots=[node.parent])
    model = load_file("model.safetensors")
    for name, value in Truth(FIXTURES / "s3_bf16_dp4").masters.items():
        assert torch.equal(model[name], value)


def test_root_may_be_the_run_or_the_tag_directory_of_the_other_node(tag):
    node = Path("node", tag.name)
    node.mkdir(parents=True)
    shard = optimizer_file(tag, 1)
    shard.rename(node / shard.name)
    for source, root in ((tag, node), (tag.parent, node), (tag.parent, node.parent)):
        assert zckpt.open(source, roots=[root]).topology.dp == 2


def test_rank_that_two_roots_have_is_named(tag):
    other = Path(shutil.copytree(tag.parent, "other"))
    model_file(other / tag.name).unlink()
    optimizer_file(other / tag.name, 0).unlink()
    refused(ShardError, tag.parent, "rank 1", "there are two optimizer files", str(tag), str(other), roots=[other])


def test_rank_that_is_there_under_two_names_is_named(tag):
    shard = optimizer_file(tag, 1)
    shutil.copy(shard, shard.with_name(shard.name.removeprefix("bf16_")))
    refused(ShardError, tag, "rank 1")


def test_the_same_file_reached_twice_is_no_duplicate(tag):
    link = Path("link")
    link.symlink_to(tag.parent)
    assert zckpt.open(tag.parent, roots=[tag.parent, link]).topology.dp == 2


def test_files_that_are_links_are_followed(tag):
    for path in list(tag.iterdir()):
        blob = path.rename(Path(f"blob-{path.name}"))
        path.symlink_to(blob.absolute())
    assert_still_the_truth(tag, "s2_bf16_dp2")


# --- leftovers and stale files


def test_ranks_left_over_from_a_larger_run_are_named_and_not_used(tag):
    for rank in (2, 3):
        shutil.copy(optimizer_file(FIXTURES / "s2_bf16_dp4" / "global_step5", rank), tag)
    (warning,) = zckpt.open(tag).warnings
    assert "ranks 2, 3" in warning
    assert_still_the_truth(tag, "s2_bf16_dp2")


def test_rank_of_another_world_size_in_the_place_of_one_is_named(tag):
    shutil.copy(optimizer_file(FIXTURES / "s2_bf16_dp4" / "global_step5", 1), optimizer_file(tag, 1))
    refused(ShardError, tag, "rank 1", "2 ranks")


@pytest.mark.parametrize("rank", [0, 1])
def test_file_of_an_earlier_step_is_named(rank):
    tag = copy("s2_bf16_dp2_multitag")
    shutil.copy(optimizer_file(tag.parent / "global_step3", rank), tag)
    refused(ShardError, tag, str(optimizer_file(tag, rank)), f"rank {rank} ", "step")


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("name", ["s2_bf16_dp4", "s1_bf16_dp4", "s3_bf16_dp4"])
@pytest.mark.every(2)
def test_rank_with_another_step_is_named_among_many(name, rank):
    tag = copy(name)

    def one_step_back(content):
        for state in state_in(content).values():
            state["step"] = torch.tensor(4.0)

    edit(optimizer_file(tag, rank), one_step_back)
    refused(ShardError, tag, f"rank {rank} ", "found.*4")


def test_all_optimizer_files_of_an_earlier_step_than_the_model_are_an_error():
    tag = copy("s2_bf16_dp2_multitag")
    for rank in (0, 1):
        shutil.copy(optimizer_file(tag.parent / "global_step3", rank), tag)
    refused(SourceError, tag)


def test_without_zero_masters_tell_the_names_in_whatever_order_the_groups_have_them():
    name = "s0_bf16_dp2"
    tag = copy(name)

    def shuffle(content):
        optimizer = content["optimizer"]
        base, masters = optimizer["optimizer_state_dict"], [one for some in optimizer["fp32_groups"] for one in some]
        order = random.Random(0).sample(range(len(masters)), len(masters))
        optimizer["fp32_groups"] = [[masters[number] for number in order]]
        base["state"] = {at: base["state"][number] for at, number in enumerate(order)}
        base["param_groups"] = [base["param_groups"][0] | {"params": [*range(len(order))]}]

    edit(model_file(tag), shuffle)
    found = zckpt.open(tag)
    assert_state(found, Truth(FIXTURES / name))
    assert [*found.param_groups[0].parameters] != [*found.parameters]
    assert not found.unnamed


@pytest.mark.parametrize(("params", "words"), [
    (10**9, "sub-group 0 is in no param group"),
    (["x"], "a param group names a sub-group that does not exist"),
    ([[0]], "a param group names a sub-group that does not exist"),
    ([0, 7], "a param group names a sub-group that does not exist: expected below 3, found 7"),
])  # fmt: skip
def test_zero3_groups_have_numbers_of_sub_groups(params, words):
    tag = copy("s3_bf16_dp2")
    edit_all(tag, lambda content: content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0].update(
        params=params))  # fmt: skip
    refused(LayoutError, tag, words)


def test_without_zero_a_master_for_each_parameter_is_needed():
    tag = copy("s0_bf16_dp2")
    edit(model_file(tag), lambda content: content["optimizer"]["fp32_groups"][0].pop())
    refused(SourceError, tag, "masters and param groups disagree", "expected 17 parameters, found 16")
    edit(model_file(tag), lambda content: content["optimizer"]["fp32_groups"].append(True))  # no list of a group's
    refused(SourceError, tag, "masters and param groups disagree", "expected 17 parameters, found 16")


def drift(content):
    for master in content["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
        master.data.mul_(1.125)


@pytest.mark.parametrize("name", ["s2_bf16_dp2_sgdm", "s2_bf16_dp2_lion"])
def test_stale_rank_without_a_step_is_found_by_the_weights(name):
    tag = copy(name)

    edit(optimizer_file(tag, 1), drift)
    about = f"master of ({any_of(Truth(FIXTURES / name).masters)}) "
    refused(WeightMismatchError, tag, about, str(optimizer_file(tag, 1)), "--no-weight-check")


@pytest.mark.parametrize("position", ["first", "last"])
@pytest.mark.parametrize("parameter", sorted(Truth(FIXTURES / "s2_bf16_dp4").masters))
@pytest.mark.every(3)
def test_weight_check_samples_every_parameter(parameter, position):
    """An element at either end of any parameter that does not fit is found, whatever rank holds it."""
    tag = copy("s2_bf16_dp4")

    def change(content):
        weight = content["module"][parameter].reshape(-1)
        weight[0 if position == "first" else -1] += 1

    edit(model_file(tag), change)
    refused(WeightMismatchError, tag, f"master of {parameter} ")


# --- a layout that contradicts itself


@pytest.mark.parametrize(
    "name",
    [
        "s2_bf16_dp2", "s1_bf16_dp2", "s2_fp32_dp2", "s1_fp32_dp2", "s2_bf16_dp2_rr", "s2_bf16_dp2_palign",
        "s2_bf16_dp2_elastic", "s1_bf16_dp2_bf16opt", "s2_bf16_dp2_sgdm", "ds0145_s1_fp32_dp2",
        "moe_ep1_s2_bf16_dp2", "moe_ep2_s2_bf16_dp2",
    ],
)  # fmt: skip
@pytest.mark.every(3)
def test_swapped_ranks_are_refused(name):
    tag = copy(name)
    swap(optimizer_file(tag, 0), optimizer_file(tag, 1))
    refused(SourceError, tag)


def of_optimizer(change):
    return lambda content: change(content["optimizer_state_dict"])


def fc1_last(content):
    content["param_shapes"][0].move_to_end("fc1.weight")


def pad(by):
    return of_optimizer(lambda state: state["group_paddings"].__setitem__(0, state["group_paddings"][0] + by))


def shorten(state):
    masters = state["single_partition_of_fp32_groups"]
    masters[0] = masters[0][:-10].clone()


MODELS = "*model_states.pt"
OF_ALL = any_of(Truth(FIXTURES / "s2_bf16_dp2").masters)
CONTRADICTIONS = {
    "another order": ("s2_bf16_dp2", "mp_rank*", fc1_last, LayoutError, "slice_mappings disagree on", OF_ALL),
    "another order, round robin": ("s2_bf16_dp2_rr", "mp_rank*", fc1_last, WeightMismatchError),
    **{f"padding of rank {rank}, {by}": ("s2_bf16_dp2", f"*rank_{rank}_mp*", pad(by), LayoutError, f"rank {rank}",
                                         "padding") for rank in (0, 1) for by in (-2, 2, 1000)},
    "a short partition": ("s2_bf16_dp2", "*rank_0_mp*", of_optimizer(shorten), LayoutError),
    "shards of ZeRO-3 that do not add up": (
        "s3_bf16_dp2", MODELS, lambda content: content["param_shapes"][0].update(odd3d=torch.Size([1, 1, 9])),
        LayoutError, "rank 0",
    ),
    "another step": (
        "s3_bf16_dp2", f"*rank_1_mp{MODELS}", lambda content: content.update(global_steps=4), ShardError, "rank 1",
    ),
    **{f"no shapes, {name}": (name, MODELS, lambda content: content.pop("param_shapes"), kind, word)
       for name, kind, word in (("s2_bf16_dp2_rr", SourceError, "round_robin"), ("s3_bf16_dp2", LayoutError,
                                                                                 "param_shapes"))},
}  # fmt: skip
"""By what is changed: the fixture, its files, the change, and the error with its words."""


@pytest.mark.parametrize(("name", "files", "change", "kind", "words"),
                         [(*one[:4], one[4:]) for one in CONTRADICTIONS.values()], ids=CONTRADICTIONS)  # fmt: skip
def test_files_that_contradict_each_other_are_refused(name, files, change, kind, words):
    tag = copy(name)
    edit_all(tag, change, files)
    refused(kind, tag, *words)


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s2_bf16_dp4", "s1_fp32_dp3", "s2_bf16_dp2_palign"])
def test_wrong_slice_mapping_names_the_parameter_and_the_rank(name):
    tag = copy(name)
    chosen = []

    def shift(content):
        mapping = content["optimizer_state_dict"]["param_slice_mappings"][0]
        parameter = list(mapping)[-1]
        chosen.append(parameter)
        mapping[parameter] = address(mapping[parameter].numel, mapping[parameter].start + 2)

    edit(optimizer_file(tag, 1), shift)
    refused(LayoutError, tag, chosen[0], "rank 1", str(optimizer_file(tag, 1)))


@pytest.mark.parametrize("name", ["moe_ep2_s2_bf16_dp2", "moe_ep2_s2_fp32_dp4"])
def test_experts_of_which_old_versions_list_only_the_first_are_told_apart_from_damage(name):
    tag = copy(name)

    def as_before(state):  # took a rank's partition for as many times smaller as experts are spread over ranks
        state.pop("param_alignment_paddings", None)
        for mapping, master in zip(
            state["param_slice_mappings"], state["single_partition_of_fp32_groups"], strict=True
        ):
            if any("deepspeed_experts" in parameter for parameter in mapping):
                kept = [(own, at) for own, at in mapping.items() if at.start < master.numel() // 2]
                mapping.clear()
                mapping.update(
                    (own, address(min(at.numel, master.numel() // 2 - at.start), at.start)) for own, at in kept
                )

    edit(model_file(tag), lambda content: content.pop("param_shapes"))
    edit_all(tag, of_optimizer(as_before), "*zero_pp_rank_*")
    refused(UnsupportedError, tag, "DeepSpeed up to 0.14.0", "load it with DeepSpeed 0.14.5 or newer")
    for path in tag.glob("*zero_pp_rank_*"):
        path.unlink()
    torch.save({"optimizer": None}, tag / "expp_rank_0_mp_rank_00_optim_states.pt")
    edit(model_file(tag), lambda content: content.pop("ds_config"))
    refused(ShardError, tag, "no optimizer state, as beside ZeRO's files, but there are none", "for the weights alone")
    (tag / "expp_rank_0_mp_rank_00_optim_states.pt").unlink()
    found, truth = zckpt.open(tag), Truth(FIXTURES / name)
    for parameter, value in truth.weights.items():
        assert_same(found.read(parameter), value, parameter)


def test_wrong_mapping_under_round_robin_is_what_deepspeed_writes():
    assert_still_the_truth(copy("s2_bf16_dp2_rr"), "s2_bf16_dp2_rr")


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s3_bf16_dp2"])
def test_optimizer_state_that_is_too_short_is_refused(name):
    tag = copy(name)

    def halve(content):
        for state in state_in(content).values():
            state["exp_avg"] = state["exp_avg"][: len(state["exp_avg"]) // 2].clone()

    edit(optimizer_file(tag, 0), halve)
    with refusing(SourceError, "exp_avg"):
        zckpt.consolidate(tag, "m.safetensors", slots="all")


# --- damage


def files_of(name) -> list[str]:
    return sorted(p.name for p in (FIXTURES / name / "global_step5").iterdir())


CUTS = [0.0, 0.0001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.9999]


@pytest.mark.parametrize(
    ("path", "cut"),
    each([f"{n} {f}" for n in ("s2_bf16_dp2", "s3_bf16_dp2", "moe_ep1_s2_bf16_dp2") for f in files_of(n)], CUTS),
)
def test_truncated_file_is_named(path, cut):
    name, file = path.split()
    tag = copy(name)
    size = (tag / file).stat().st_size
    os.truncate(tag / file, int(size * cut))
    refused(SourceError, tag, str(tag / file))


def test_file_that_grew_is_named_or_still_right(tag):
    with optimizer_file(tag, 0).open("ab") as file:
        file.write(bytes(100_000))
    refused(SourceError, tag, str(optimizer_file(tag, 0)))


FLIPS = some([8], [400])


@pytest.mark.parametrize("flips", FLIPS)
@pytest.mark.parametrize("file", files_of("s2_bf16_dp2"))
def test_flipped_bytes_are_an_error_or_do_no_harm(file, flips, tag):
    whole = (tag / file).read_bytes()
    generator = random.Random(file)
    refused = 0
    for _ in range(flips):
        data = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 8))):
            data[generator.randrange(len(data))] ^= generator.randrange(1, 256)
        (tag / file).write_bytes(data)
        refused += bool(
            outcome(
                lambda: zckpt.consolidate(tag, "m.safetensors", slots="all", dry_run=True),
                lambda: zckpt.inspect(zckpt.open(tag), include_globals=True),
            )
        )
    assert refused


@pytest.mark.parametrize("flips", FLIPS)
@pytest.mark.parametrize("file", files_of("s3_bf16_dp2"))
def test_flipped_bytes_of_the_pickle_are_an_error_or_do_no_harm(file, flips):
    tag = copy("s3_bf16_dp2")
    whole = (tag / file).read_bytes()
    begin = whole.index(b"data.pkl")
    end = whole.index(b"PK\x07\x08") if b"PK\x07\x08" in whole else begin + 4000
    generator = random.Random(file)
    for _ in range(flips):
        data = bytearray(whole)
        data[generator.randrange(begin, end)] ^= generator.randrange(1, 256)
        (tag / file).write_bytes(data)
        outcome(lambda: zckpt.inspect(zckpt.open(tag), include_globals=True))


@pytest.mark.parametrize("content", [{}, [], None, 3, {"module": None}, {"module": {}}, {"module": {"a": 1}}])
def test_model_file_with_something_else_in_it_is_refused(content, tag):
    torch.save(content, model_file(tag))
    refused(SourceError, tag)


KEYS = [
    "base_optimizer_state", "single_partition_of_fp32_groups", "partition_count", "group_paddings",
    "param_slice_mappings", "loss_scaler", "zero_stage", "param_alignment_paddings",
]  # fmt: skip
OTHER = [None, [], {}, "x", -1, [None], [[]], {"state": {}}, [torch.zeros(())], 10**6, float("nan")]


@pytest.mark.parametrize("value", OTHER, ids=[repr(v)[:20] for v in OTHER])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.every(4)
def test_optimizer_entry_of_another_kind_is_an_error_or_does_no_harm(key, value, tag):
    edit(optimizer_file(tag, 0), lambda content: content["optimizer_state_dict"].update({key: value}))
    unharmed_or_refused(tag, "s2_bf16_dp2")


MODEL_ENTRIES = [
    "module", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes", "frozen_param_fragments",
    "dp_world_size", "mp_world_size", "global_steps", "ds_config", "optimizer", "checkpoint_parallel_dimensions",
    "universal_checkpoint_info", "ds_version",
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value"), each(["s2_bf16_dp2", "s3_bf16_dp2"], MODEL_ENTRIES, OTHER))
def test_model_entry_of_another_kind_is_an_error_or_does_no_crash(name, key, value):
    tag = copy(name)
    edit(model_file(tag, 0 if name.startswith("s3") else None), lambda content: content.update({key: value}))
    outcome(
        lambda: zckpt.inspect(zckpt.open(tag)),
        lambda: zckpt.consolidate(tag, "m.safetensors", dry_run=True),
    )


def unharmed_or_refused(tag, name):
    """Either an error, or every master as it was."""
    if outcome(lambda: zckpt.inspect(zckpt.open(tag)), lambda: zckpt.consolidate(tag, "m.safetensors")):
        return
    model = load_file("m.safetensors")
    for parameter, value in Truth(FIXTURES / name).masters.items():
        assert torch.equal(model[parameter], value), parameter


# --- names of files


@pytest.mark.parametrize("world", some([12], [5, 11, 101]))
def test_ranks_are_sorted_as_numbers(world):
    tag = copy("s2_bf16_dp1")
    recut(tag, world)
    opened = zckpt.open(tag)
    assert opened.topology.dp == world
    assert [f.dp_rank for f in opened.files if f.role == "optimizer"] == list(range(world))
    assert_still_the_truth(tag, "s2_bf16_dp1")


def test_many_missing_ranks_are_counted():
    tag = copy("s2_bf16_dp1")
    recut(tag, 40)
    for rank in range(5, 40):
        optimizer_file(tag, rank).unlink()
    refused(ShardError, tag, "5, 6, 7", "more")


@pytest.mark.parametrize(
    ("old", "new", "ranks"),
    [
        ("_optim_states.pt", "optim_states.pt", (0, 1)),
        ("bf16_", "fp16_", (0, 1)),
        ("bf16_", "", (0, 1)),
        ("bf16_", "", (1,)),
    ],
)
def test_old_names_are_known_and_may_be_mixed(old, new, ranks, tag):
    for rank in ranks:
        path = optimizer_file(tag, rank)
        path.rename(path.with_name(path.name.replace(old, new)))
    assert_still_the_truth(tag, "s2_bf16_dp2")


def test_other_files_are_let_be(tag):
    (tag / "zero_to_fp32.py").write_text("raise SystemExit")
    (tag / "zero_pp_rank_7_mp_rank_00_optim_states.pt.tmp").write_bytes(b"")
    (tag / "zero_pp_rank_8_mp_rank_00_optim_states.pt").mkdir()
    assert_still_the_truth(tag, "s2_bf16_dp2")
    (tag / "notes.pt").write_bytes(b"no checkpoint")
    with refusing(zckpt.LeftOutError, r"notes\.pt"):
        zckpt.consolidate(tag, "m.safetensors")
    zckpt.consolidate(tag, "m.safetensors", drop=["notes.pt"])


# --- files of older versions


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s2_bf16_dp3", "s1_fp32_dp2", "s2_bf16_dp2_adagrad1g"])
def test_param_shapes_as_one_dict_of_all_groups(name):
    tag = copy(name)

    def join(content):
        content["param_shapes"] = {k: v for group in content["param_shapes"] for k, v in group.items()}

    edit(model_file(tag), join)
    assert_still_the_truth(tag, name)


OF_EXPERTS = ["moe_ep1_s2_bf16_dp2", "moe_ep2_s2_bf16_dp2", "moe_ep2_s2_fp32_dp4"]
OF_OLDER_VERSIONS = {
    "shared_params": ["s2_bf16_dp2", "s1_fp32_dp3", "s2_bf16_dp2_rr", "hf_llama_s2_bf16_dp2"],  # told by the storage
    "param_shapes": ["s2_bf16_dp2", "s1_bf16_dp4", "s2_fp32_dp4", *OF_EXPERTS],  # slice mappings give the order
    "buffer_names": ["s2_bf16_dp2"],
    "frozen_param_shapes": ["s2_bf16_dp2"],
    "dp_world_size": ["s2_bf16_dp2"],
    "mp_world_size": ["s2_bf16_dp2"],
    "ds_config": ["s2_bf16_dp2"],
}


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in OF_OLDER_VERSIONS.items() for name in names])
@pytest.mark.every(2)
def test_keys_that_older_versions_lack_are_not_needed(key, name):
    tag = copy(name)
    edit(model_file(tag), lambda content: content.pop(key, None))
    assert_still_the_truth(tag, name)


def without_padding(state):
    masters = state["single_partition_of_fp32_groups"]
    masters[:] = [master.detach().clone() for master in masters]


OLD_OPTIMIZERS = [
    *(lambda state, key=key: state.pop(key, None)
      for key in ("group_paddings", "param_alignment_paddings", "param_slice_mappings", "ds_version")),
    lambda state: state.update(partition_count=2),
    without_padding,
]  # fmt: skip


@pytest.mark.parametrize("change", OLD_OPTIMIZERS)
def test_optimizers_of_older_versions_are_read(change, tag):
    edit_all(tag, of_optimizer(change))
    assert_still_the_truth(tag, "s2_bf16_dp2")


@pytest.mark.parametrize("name", ["s2_bf16_dp3", "s2_bf16_dp4"])
def test_padding_may_be_written_for_the_last_rank_only(name):
    tag = copy(name)
    world = int(name[-1])
    facts = Truth(FIXTURES / name).facts
    totals = [sum(math.prod(facts["shapes"][one]) for one in names) for names in facts["order"]]
    last = [-total % (2 * world) for total in totals]
    for rank in range(world):
        paddings = last if rank == world - 1 else [0] * len(last)
        edit(optimizer_file(tag, rank), of_optimizer(lambda state: state.update(group_paddings=paddings)))  # noqa: B023
    assert_still_the_truth(tag, name)


# --- files of DeepSpeed's `fast` writer


def test_files_of_several_writers_are_those_of_the_first():
    name = "s2_bf16_dp4"
    tag = copy(name)
    for rank in range(4):
        own = optimizer_file(tag, rank)
        own.rename(f"{own}-{rank}.4")
        shutil.copy(model_file(tag), f"{model_file(tag)}-{rank}.4")
    model_file(tag).unlink()
    assert_still_the_truth(tag, name)
    (node := Path("node", tag.parent.name, tag.name)).mkdir(parents=True)
    Path(f"{model_file(tag)}-0.4").rename(node / f"{model_file(tag).name}-0.4")
    roots = [node.parent]
    first = zckpt.open(tag.parent, roots=roots)
    assert first.files[0].path == f"{node / model_file(tag).name}-0.4"
    assert set(first.leftovers) == {f"{model_file(tag)}-{writer}.4" for writer in (1, 2, 3)}
    zckpt.reshard(tag.parent, "cut", world_size=2, roots=roots)
    written = {path.name for path in Path("cut", tag.name).iterdir()}
    assert "mp_rank_00_model_states.pt" in written
    assert not any(re.search(r"-\d+\.\d+$", one) for one in written)
    shutil.copy(
        f"{model_file(tag)}-1.4", f"{model_file(tag)}-0.2"
    )  # of another save, or of writers that met in one file
    refused(ShardError, tag, "there are two model files of mp_rank 0")


def test_empty_files_of_nebula_are_refused_by_name():
    tag = copy("s2_bf16_dp4")
    torch.save("", model_file(tag))
    refused(zckpt.UnsupportedError, tag, "Nebula")


@pytest.mark.parametrize("name", ["s1_fp32_dp2", "s2_fp32_dp4", "s3_fp32_dp2"])
def test_a_configuration_is_not_gone_through_for_each_parameter(monkeypatch, name):
    calls = []
    monkeypatch.setattr(shards, "plain", lambda node: calls.append(node) or plain(node))
    checkpoint = zckpt.open(FIXTURES / name)
    found = sum(one is checkpoint.origin.model.configuration for one in calls)
    assert 0 < found < len(checkpoint.parameters)
