"""`reshard` of real checkpoints, without DeepSpeed: nothing is lost, and every file has the form DeepSpeed gives it."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.folders import contents
from tests.formats.deepspeed.contents import (
    alike,
    content_of,
    cut,
    form,
    run_of,
    state_of,
    tag_of,
    tensor_bytes,
)
from tests.formats.deepspeed.shards import FIXTURES, copy, edit, fragments, model_file, optimizer_file
from tests.pairwise import each, of_each_kind, some
from tests.truth import Truth, assert_consolidated, assert_same, assert_same_groups, assert_state, bits
from zckpt.torchfile import OrderedMapping, Tensor, plain

DENSE = sorted(
    path.name
    for path in FIXTURES.iterdir()
    if any(part in path.name.split("_")[:2] for part in ("s1", "s2", "s3"))
    and not path.name.startswith(("tp", "pp", "moe"))
)
DENSE += ["hf_llama_s2_bf16_dp2", "hf_gpt2_s1_fp32_dp2", "other/accel_ds2_bf16", "other/litsim_ds2"]
OF_FOUR = ["s1_bf16_dp4", "s2_bf16_dp4", "s2_fp32_dp4", "s1_fp32_dp4_sgdm", "s3_bf16_dp4"]
OF_THREE = ["s1_bf16_dp3_fused", "s1_fp32_dp3", "s1_fp32_dp3_palign", "s2_bf16_dp3", "s3_bf16_dp3"]
WORLD_SIZES = (1, 3, 7, 17)


# --- nothing is lost


@pytest.mark.parametrize(("name", "world_size"), each(DENSE, WORLD_SIZES))
@pytest.mark.every(11)
def test_everything_arrives_and_files_say_how_they_are_cut(name, world_size):
    source = zckpt.open(run_of(name))
    tag = cut(run_of(name), "cut", world_size)
    found = zckpt.open(tag.parent)
    assert list(found.parameters) == list(source.parameters)
    assert list(found.buffers) == list(source.buffers)
    assert found.topology.dp == world_size
    assert found.zero_stage == source.zero_stage
    for parameter in source.tensors():
        copy = found.parameters.get(parameter.name) or found.buffers[parameter.name]
        about = ("shape", "dtype", "group", "frozen", "tied_to", "state")
        assert [getattr(copy, key) for key in about] == [getattr(parameter, key) for key in about]
        assert set(copy.slots) >= set(parameter.slots) - {"weight"}, parameter.name
        for slot in set(copy.slots) & set(parameter.slots):
            expected = source.read(parameter.name, slot)
            assert found.read(parameter.name, slot).dtype == expected.dtype
            assert_same(found.read(parameter.name, slot), expected, f"{slot}/{parameter.name}")
    assert_state(found, Truth(FIXTURES / name))
    assert_same_groups(found, source)
    assert (found.step, found.loss_scale, found.warnings) == (source.step, source.loss_scale, source.warnings)
    assert form(without_config(found.metadata)) == form(without_config(source.metadata))
    (assert_cut_by_parameters if "s3" in name else assert_cut_flat)(name, tag, world_size)


def without_config(metadata) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != "ds_config"}


@pytest.mark.parametrize(
    ("name", "stage"),
    each(["s1_fp32_dp3", "s2_bf16_dp4", "s3_bf16_dp3", "s2_fp16_dp2", "s3_bf16_dp2_subgroup"], [2, 3, 1]),
)
@pytest.mark.every(2)
def test_state_is_the_same_at_another_stage(name, stage):
    source = zckpt.open(run_of(name))
    tag = cut(run_of(name), "cut", 6, stage=stage)
    target = zckpt.open(tag)
    assert (target.zero_stage, target.topology.dp, target.step) == (stage, 6, source.step)
    assert_same_groups(target, source)
    assert_state(target, Truth(FIXTURES / name))
    assert_same_bits_of_frozen(target, source)
    for path in sorted(tag.iterdir()):
        config = content_of(path)["ds_config"]
        assert config["zero_optimization"]["stage"] == stage
        assert config["train_batch_size"] == 12
        assert config["train_micro_batch_size_per_gpu"] == 2
    (argument,) = state_of(optimizer_file(tag, 5))["zero_stage"].args
    assert argument == stage


def assert_same_bits_of_frozen(found, expected):
    assert {name: set(one.slots) - {"weight"} for name, one in found.parameters.items()} == {
        name: set(one.slots) - {"weight"} for name, one in expected.parameters.items()
    }
    for name, parameter in expected.parameters.items():
        if parameter.frozen:
            assert torch.equal(bits(found.read(name, "weight")), bits(expected.read(name, "weight"))), name


def test_the_order_of_a_training_is_known_again_after_zero3():
    """A training that has its parameters in turns loads others without a word, each in another's place."""
    cut(run_of("s2_bf16_dp2_rr"), "three", 3, stage=3)
    orders = [content_of(model_file(tag))["param_shapes"]
              for tag in (tag_of(run_of("s2_bf16_dp2_rr")), cut("three", "back", 2, stage=2))]  # fmt: skip
    assert [list(group) for group in orders[0]] == [list(group) for group in orders[1]]
    cut(run_of("s2_bf16_dp2_rr"), "other", 3, stage=3, round_robin=False)
    assert not zckpt.open(cut("other", "plain", 2, stage=2)).details["round_robin_gradients"]


@pytest.mark.parametrize("name", [*OF_FOUR, *OF_THREE, "s2_bf16_dp2_lion"])
@pytest.mark.every(4)
def test_there_and_back_gives_the_same_files(name):
    ranks, between = (4, 6) if name in OF_FOUR else (3, 5) if name in OF_THREE else (2, 7)
    cut(run_of(name), "between", between)
    back = cut("between", "back", ranks)
    original = tag_of(run_of(name))
    assert Path("back/latest").read_text() == (run_of(name) / "latest").read_text().strip()
    for one in alike(back, original):
        mine, theirs = tensor_bytes(back / one), tensor_bytes(original / one)
        assert list(mine) == list(theirs)
        if "s3" in name:
            mine, theirs = (without_shard_padding(x, original / one, ranks) for x in (mine, theirs))
        elif "_optim_" in one:
            mine, theirs = (without_group_padding(x, original / one) for x in (mine, theirs))
        assert mine == theirs, one


def without_group_padding(found: dict[tuple[object, ...], bytes], path) -> dict[tuple[object, ...], bytes]:
    """The tensors of a flat file without the elements that the file itself says are padding."""
    paddings = state_of(path)["group_paddings"]
    shown = {}
    for where, data in found.items():
        group = next((step for step in where if type(step) is int), None)
        padded = "base_optimizer_state" in where and where[-1] != "step"
        cut_off = 4 * paddings[group] if padded and group is not None else 0
        shown[where] = data[: len(data) - cut_off]
    return shown


def without_shard_padding(found: dict[tuple[object, ...], bytes], path, ranks) -> dict[tuple[object, ...], bytes]:
    """The tensors of a ZeRO-3 file without the last elements of each parameter's last shards."""
    rank = int(path.name.split("zero_pp_rank_")[1].split("_")[0])
    shapes = content_of(model_file(path.parent, rank))["param_shapes"]
    frozen = content_of(model_file(path.parent, rank))["frozen_param_shapes"] or {}
    shown = {}
    for where, data in found.items():
        if "frozen_param_fragments" in where:
            numel = math.prod(frozen[where[-1]])
            size = len(data) // max(math.ceil(numel / ranks), 1)
            kept = data[: size * min(max(numel - rank * math.ceil(numel / ranks), 0), math.ceil(numel / ranks))]
        elif where[-1] != "step" and ("fp32_flat_groups" in where or "state" in where):
            group = next(step for step in where if type(step) is int)
            kept, at = b"", 0
            for shape in shapes[group].values():
                shard = math.ceil(math.prod(shape) / ranks)
                real = min(max(math.prod(shape) - rank * shard, 0), shard)
                kept += data[4 * at : 4 * (at + real)]
                at += shard
            assert 4 * at == len(data)
        else:
            kept = data
        shown[where] = kept
    return shown


# --- the form of the files


def assert_cut_flat(name, tag, world_size):
    model = content_of(model_file(tag))
    assert model["dp_world_size"] == world_size
    itemsize = 4 if "fp32" in name or "gpt2" in name else 2
    for rank in range(world_size):
        state = state_of(optimizer_file(tag, rank))
        assert state["partition_count"] == [world_size] * len(model["param_shapes"])
        for group, shapes in enumerate(model["param_shapes"]):
            numels = [math.prod(shape) for shape in shapes.values()]
            pads = [0] * len(numels)
            if "palign" in name:
                pads = [-n % (16 // itemsize) for n in numels[:-1]] + [0]
            total = sum(numels) + sum(pads)
            partition = 2 * math.ceil(total / (2 * world_size))
            padding = min(max((rank + 1) * partition - total, 0), partition)
            assert state.get("param_alignment_paddings", [pads] * (group + 1))[group] == pads
            is_last = rank == world_size - 1
            whole = (world_size * partition - total) * is_last
            assert state["group_paddings"][group] == (whole if "bf16opt" in name else padding)
            master = state["single_partition_of_fp32_groups"][group]
            assert master.shape == ((partition,) if "bf16opt" in name else (partition - padding,))
            assert master.storage.nbytes == partition * master.itemsize
            lengths = dict(zip(shapes, numels, strict=True))
            wanted = fragments(lengths, rank * partition, (rank + 1) * partition, pads)
            mapping = state["param_slice_mappings"][group]
            assert type(mapping) is OrderedMapping
            assert list(mapping) == list(wanted)
            assert {key: (a.get("numel"), a.get("start")) for key, a in mapping.items()} == wanted
            base = state["base_optimizer_state"]
            slots = base[group] if isinstance(base, list) else base["state"].get(group, {})
            length = partition - padding if isinstance(base, list) else partition
            matrices = isinstance(base, dict) and base["param_groups"][group].get("use_muon")
            if matrices:  # whole ones
                length = sum(n for key, n in zip(shapes, numels, strict=True) if key in wanted)
            tensors = [v for v in slots.values() if isinstance(v, Tensor) and v.shape != ()]
            assert tensors or (matrices and not wanted)
            assert {tensor.shape for tensor in tensors} <= {(length,)}


def assert_cut_by_parameters(_name, tag, world_size):
    numels = {}
    for rank in range(world_size):
        model = content_of(model_file(tag, rank))
        state = state_of(optimizer_file(tag, rank))
        assert model["dp_world_size"] == state["partition_count"] == world_size
        numels = {key: math.prod(shape) for shapes in model["param_shapes"] for key, shape in shapes.items()}
        held = sum(math.ceil(n / world_size) for n in numels.values())
        assert sum(master.numel for master in state["fp32_flat_groups"]) == held
        inner = state["optimizer_state_dict"]
        for number, master in enumerate(state["fp32_flat_groups"]):
            for tensor in inner["state"][number].values():
                assert not isinstance(tensor, Tensor) or tensor.shape in ((), master.shape)
        assert [n for g in inner["param_groups"] for n in g["params"]] == list(range(len(state["fp32_flat_groups"])))
        for key, fragment in (model["frozen_param_fragments"] or {}).items():
            assert fragment.shape == (math.ceil(math.prod(model["frozen_param_shapes"][key]) / world_size),)
        assert all(model["module"][key].shape == (0,) for key in numels if key in model["module"])
    assert numels


@pytest.mark.parametrize("there", [True, False])
def test_round_robin_can_be_switched(there):
    name = "s2_bf16_dp4" if there else "s2_bf16_dp2_rr"
    tag = cut(run_of(name), "cut", 3, round_robin=there)
    target = zckpt.open(tag)
    assert target.details["round_robin_gradients"] is there
    assert_consolidated(tag, Truth(FIXTURES / name))
    order = list(content_of(model_file(tag))["param_shapes"][0])
    assert (order == target.param_groups[0].parameters) is not there


@pytest.mark.parametrize("there", [True, False])
def test_parameter_alignment_can_be_switched(there):
    name = "s1_fp32_dp3" if there else "s1_fp32_dp3_palign"
    tag = cut(run_of(name), "cut", 2, parameter_alignment=there)
    pads = state_of(optimizer_file(tag, 0))["param_alignment_paddings"]
    assert any(any(group) for group in pads) is there
    assert_consolidated(tag, Truth(FIXTURES / name))


@pytest.mark.parametrize("name", of_each_kind(DENSE))
@pytest.mark.every(4)
def test_archives_are_sound_and_the_same_each_time_and_a_model_comes_out_of_them(name):
    first, second = (cut(run_of(name), which, 3) for which in ("first", "second"))
    assert contents(first) == contents(second)
    for path in first.iterdir():
        assert zipfile.ZipFile(path).testzip() is None
    truth = Truth(FIXTURES / name)
    without = frozenset(truth.frozen) if "nofrozen" in name else frozenset()
    assert_consolidated(first.parent, truth, without=without)


@pytest.mark.parametrize("name", ["s1_bf16_dp4", "s2_fp16_dp2", "s2_bf16_dp2_rr", "s2_bf16_dp2_zerodim"])
def test_torch_loads_the_model_file_weights_only(name):
    tag = cut(run_of(name), "cut", 3)
    expected = torch.load(model_file(tag_of(run_of(name))), weights_only=True)["module"]
    for mmap in (False, True):
        module = torch.load(model_file(tag), weights_only=True, mmap=mmap)["module"]
        assert list(module) == list(expected)
        for key, value in expected.items():
            assert module[key].dtype == value.dtype
            assert module[key].shape == value.shape
            assert torch.equal(bits(module[key]), bits(value)), key
        assert module["head.weight"].data_ptr() == module["emb.weight"].data_ptr()
        assert len({module[key].untyped_storage().data_ptr() for key in ("emb.weight", "fc1.weight", "odd3d")}) == 1


@pytest.mark.parametrize("name", ["s1_bf16_dp2", "s2_bf16_dp2", "s3_bf16_dp2", "s1_bf16_dp2_empty"])
@pytest.mark.every(2)
def test_tied_weights_are_two_views_of_one_storage(name):
    """As DeepSpeed has them: two tensors, so that neither goes where the other is put."""
    tag = cut(run_of(name), "cut", 3)
    content = content_of(model_file(tag, 0 if "s3" in name else None))
    one, other = content["module"]["head.weight"], content["module"]["emb.weight"]
    assert one is not other
    assert one.storage is other.storage
    assert (one.shape, one.storage_offset) == (other.shape, other.storage_offset)


@pytest.mark.parametrize(("world_size", "options"), [(5, {}), (3, {"stage": 1})])
def test_the_clients_own_keys_stay_as_they_are(world_size, options):
    run = run_of("s2_bf16_dp2_client")
    old = content_of(model_file(tag_of(run)))
    new = content_of(model_file(cut(run, "cut", world_size, **options)))
    assert list(new) == list(old)
    frozen = new["frozen_param_shapes"], new["frozen_param_fragments"]
    assert (frozen == (None, None)) is (options == {"stage": 1})
    for key in ("epoch", "consumed", "rng", "np_rng", "py_rng", "args", "note", "arr", "nested", "lr_scheduler",
                "global_steps", "dtype", "dev"):  # fmt: skip
        assert form(new[key]) == form(old[key])
    assert plain(new["nested"]["set"]) == plain(old["nested"]["set"])


@pytest.mark.parametrize("name", ["s1_bf16_dp2", "s2_bf16_dp2"])
def test_frozen_parameters_of_files_without_lists_arrive_at_stage_3(name):
    """DeepSpeed 0.8 lists neither these nor tied ones, and ZeRO-3 has the former nowhere else."""
    tag = copy(name)
    keys = ("frozen_param_shapes", "frozen_param_fragments", "shared_params")
    edit(model_file(tag), lambda content: [content.pop(key) for key in keys])
    found = zckpt.open(cut(tag.parent, "cut", 3, stage=3))
    truth = Truth(FIXTURES / name)
    assert {one for one, p in found.parameters.items() if p.frozen} == set(truth.frozen)
    for one in truth.frozen:
        assert_same(found.read(one), truth.weights[one], one)


def test_client_keys_that_are_numbers_and_sparse_tensors_arrive():
    tag = copy("s2_fp32_dp2")
    edit(model_file(tag), lambda content: content.update({7: torch.ones(2), "mask": torch.eye(3).to_sparse()}))
    zckpt.reshard(tag.parent, "cut", world_size=3)
    zckpt.convert("cut", "sharded", to="deepspeed", stage=3)
    zckpt.convert("sharded", "again", to="deepspeed", stage=2, world_size=2)
    zckpt.convert(tag.parent, "u", to="universal")
    for name in ("cut", "sharded", "again"):
        for path in tag_of(name).glob("*model_states.pt"):
            content = torch.load(path, weights_only=False)
            assert torch.equal(content["mask"].to_dense(), torch.eye(3))
            assert torch.equal(content[7], torch.ones(2))
    assert "mask" in zckpt.open("u").metadata


# --- what every rank of ZeRO-3 saved for itself


def personal() -> Path:
    """A checkpoint of four ranks, each with a random state, an epoch and a buffer of its own."""
    tag = copy("s3_bf16_dp4")
    for rank in range(4):

        def change(content, rank=rank):
            content["random_state"] = torch.full((9,), rank, dtype=torch.uint8)
            content["sampler"] = {"position": 10 * rank}
            content["note"] = "of all"
            content["module"]["counter"] = torch.tensor(rank)

        edit(model_file(tag, rank), change)
    return tag.parent


def saved_by(tag, rank) -> tuple[int, int, int]:
    content, tensors = content_of(model_file(tag, rank)), tensor_bytes(model_file(tag, rank))
    counter = int.from_bytes(tensors["module", "counter"], "little")
    return tensors["random_state",][8], content["sampler"]["position"] // 10, counter


@pytest.mark.parametrize(
    ("world_size", "expected", "fate"),
    [
        (4, [0, 1, 2, 3], None),
        (2, [0, 1], "ranks below 2 keep theirs, the others' are left out"),
        (6, [0, 1, 2, 3, 0, 0], "ranks below 4 keep theirs, the new ones get rank 0's"),
    ],
)
def test_each_rank_keeps_what_it_saved(world_size, expected, fate):
    done = zckpt.reshard(personal(), "cut", world_size=world_size)
    tag = tag_of("cut")
    assert [saved_by(tag, rank) for rank in range(world_size)] == [(rank, rank, rank) for rank in expected]
    named = ["random_state", "sampler", "buffer counter"] if fate else []
    assert sorted(done.notes) == sorted(f"{key} differs between ranks: {fate}" for key in named)


def test_one_model_file_holds_one_rank_of_it():
    done = zckpt.reshard(personal(), "cut", world_size=4, stage=2)
    content = content_of(model_file(tag_of("cut")))
    assert content["sampler"] == {"position": 0}
    fate = "rank 0's is carried and the others' are left out, because there is one model file"
    named = ["random_state", "sampler", "buffer counter"]
    assert sorted(done.notes) == sorted(f"{key} differs between ranks: {fate}" for key in named)


@pytest.mark.parametrize(("name", "world_size"), some([("s2_bf16_dp4", 3)], [("s3_bf16_dp4", 6), ("s3_fp32_dp2", 2)]))
def test_first_rank_alone_lists_tied_parameters(name, world_size):
    tag = cut(run_of(name), "cut", world_size, stage=3)
    listed = [content_of(model_file(tag, rank))["shared_params"] for rank in range(world_size)]
    assert listed == [{"head.weight": "emb.weight"}, *[{}] * (world_size - 1)]
    assert zckpt.open(tag).parameters["head.weight"].tied_to == "emb.weight"


def test_sub_groups_are_listed_and_bear_their_own_ids():
    run = run_of("s3_bf16_dp2_subgroup")
    tag = cut(run, "cut", 2)
    for rank in range(2):
        mine, theirs = (content_of(model_file(at, rank))["param_shapes"] for at in (tag, tag_of(run)))
        assert form(mine) == form(theirs)
        ids = [
            [tensor.attributes for tensor in state_of(optimizer_file(at, rank))["fp32_flat_groups"]]
            for at in (tag, tag_of(run))
        ]
        assert len({str(one) for one in ids[0]}) == 7
        assert ids[0] == ids[1]


@pytest.mark.parametrize("name", ["s2_bf16_dp2_rr", "s2_bf16_dp2_palign"])
def test_order_comes_back_from_another_format(name):
    """DeepSpeed loads the elements of other parameters without a word where its setting is not that of the files."""
    zckpt.convert(run_of(name), "zckpt", to="zckpt")
    zckpt.convert("zckpt", "run", to="deepspeed", world_size=2)
    source, back = zckpt.open(run_of(name)).details, zckpt.open("run").details
    assert source["round_robin_gradients"] or source["parameter_alignment"]
    assert {key: back[key] for key in source} == source
