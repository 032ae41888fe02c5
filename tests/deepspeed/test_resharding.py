"""What `reshard` writes holds what its source held, cut as DeepSpeed cuts; read back without DeepSpeed."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.truth import Truth, assert_consolidated, bits
from zckpt.torchfile import Object, Tensor, read_torchfile

FIXTURES = Path(__file__).parents[2] / "fixtures"
DENSE = sorted(
    p.name
    for p in FIXTURES.iterdir()
    if p.name.startswith(("s1_", "s2_", "s3_", "ds0145_", "hf_")) and (p / "latest").is_file()
)


def slots(checkpoint: zckpt.OpenedCheckpoint) -> dict[str, torch.Tensor]:
    """Every slot of every parameter but the weights, which ZeRO-3 has none of."""
    return {
        f"{key}/{name}": checkpoint.read(name, key)
        for name, parameter in checkpoint.parameters.items()
        for key in parameter.slots
        if key != "weight" or parameter.frozen
    }


@pytest.mark.parametrize("world_size", [1, 3, 40])
@pytest.mark.parametrize("name", DENSE)
def test_state_is_the_truth_at_another_world_size(name: str, world_size: int, tmp_path: Path) -> None:
    zckpt.reshard(FIXTURES / name, tmp_path / "run", world_size=world_size)
    truth = Truth(FIXTURES / name)
    without = frozenset(truth.frozen) if "nofrozen" in name else frozenset()
    assert_consolidated(tmp_path / "run", truth, tmp_path, without=without)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["s1_fp32_dp3", "s2_bf16_dp4", "s3_bf16_dp3", "s2_fp16_dp2", "s3_bf16_dp2_subgroup"])
def test_state_is_the_same_at_another_stage(name: str, stage: int, tmp_path: Path) -> None:
    source = zckpt.open(FIXTURES / name)
    zckpt.reshard(FIXTURES / name, tmp_path / "run", world_size=2, stage=stage)
    target = zckpt.open(tmp_path / "run")
    assert (target.zero_stage, target.topology.dp, target.step) == (stage, 2, source.step)
    assert [g.parameters for g in target.param_groups] == [g.parameters for g in source.param_groups]
    assert [g.hyperparameters for g in target.param_groups] == [g.hyperparameters for g in source.param_groups]
    assert [g.state for g in target.param_groups] == [g.state for g in source.param_groups]
    expected = slots(source)
    found = slots(target)
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert torch.equal(bits(found[key]), bits(value)), key


def leaves(node: object, path: tuple[object, ...] = ()) -> dict[tuple[object, ...], object]:
    """The tree of a file as path -> plain value, tensors by the bits they show."""
    if isinstance(node, dict):
        found: dict[tuple[object, ...], object] = {(*path, "keys"): list(node)}
        for key, value in node.items():
            found |= leaves(value, (*path, key))
        return found
    if isinstance(node, (list, tuple)):
        return {key: value for index, one in enumerate(node) for key, value in leaves(one, (*path, index)).items()} | {
            (*path, "length"): len(node)
        }
    if isinstance(node, Object):
        return leaves({"class": node.qualified, "args": node.args, "state": node.state}, path)
    return {path: node}


def contents(file: Path) -> dict[tuple[object, ...], object]:
    data = file.read_bytes()

    def shown(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return value.dtype, value.shape, data[value.offset : value.offset + value.nbytes] if value.numel else b""

    return {path: shown(value) for path, value in leaves(read_torchfile(file).root).items()}


@pytest.mark.parametrize(
    ("name", "there"),
    [("s2_bf16_dp4", 6), ("s1_bf16_dp4", 6), ("s3_bf16_dp3", 5), ("s1_fp32_dp3_palign", 4), ("s2_bf16_dp2_lion", 7)],
)
def test_there_and_back_gives_the_first_files_again(name: str, there: int, tmp_path: Path) -> None:
    """ZeRO-3's own padding is memory that nobody initialised, ours is zero: there, what zckpt writes is compared."""
    tag = FIXTURES / name / "global_step5"
    back = zckpt.open(tag).topology.dp
    if name.startswith("s3"):
        zckpt.reshard(tag, tmp_path / "first", world_size=back)
        tag = tmp_path / "first"
    zckpt.reshard(tag, tmp_path / "there", world_size=there)
    zckpt.reshard(tmp_path / "there", tmp_path / "back", world_size=back)
    first = sorted(p.name for p in tag.iterdir())
    assert first == sorted(p.name for p in (tmp_path / "back").iterdir())
    for file in first:
        assert contents(tmp_path / "back" / file) == contents(tag / file), file


@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_partitions_paddings_and_mappings_follow_the_format(world_size: int, tmp_path: Path) -> None:
    zckpt.reshard(FIXTURES / "s2_bf16_dp4", tmp_path / "run", world_size=world_size)
    tag = tmp_path / "run" / "global_step5"
    shapes = read_torchfile(tag / "mp_rank_00_model_states.pt").root["param_shapes"]
    totals = [sum(math.prod(shape) for shape in group.values()) for group in shapes]
    sizes = [2 * math.ceil(total / (2 * world_size)) for total in totals]
    for rank in range(world_size):
        z: Any = read_torchfile(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").root
        z = z["optimizer_state_dict"]
        assert z["partition_count"] == [world_size] * len(totals)
        padding = [min(max((rank + 1) * p - n, 0), p) for n, p in zip(totals, sizes, strict=True)]
        assert z["group_paddings"] == padding
        assert [t.numel for t in z["single_partition_of_fp32_groups"]] == [
            p - pad for p, pad in zip(sizes, padding, strict=True)
        ]
        assert [s["exp_avg"].numel for s in z["base_optimizer_state"]["state"].values()] == sizes
        for mapping, p, pad in zip(z["param_slice_mappings"], sizes, padding, strict=True):
            assert sum(address.get("numel") for address in mapping.values()) == p - pad


def test_model_file_and_configuration_are_true_of_the_target(tmp_path: Path) -> None:
    zckpt.reshard(FIXTURES / "s2_bf16_dp2_client", tmp_path / "run", world_size=3, stage=1)
    content: Any = read_torchfile(tmp_path / "run/global_step5/mp_rank_00_model_states.pt").root
    source: Any = read_torchfile(FIXTURES / "s2_bf16_dp2_client/global_step5/mp_rank_00_model_states.pt").root
    assert list(content) == list(source)
    assert content["dp_world_size"] == 3
    assert content["ds_config"]["zero_optimization"]["stage"] == 1
    assert content["ds_config"]["train_micro_batch_size_per_gpu"] * 3 == content["ds_config"]["train_batch_size"]
    assert content["frozen_param_shapes"] is None
    for key in ("lr_scheduler", "global_steps", "note", "args", "py_rng", "dtype", "dev", "epoch"):
        assert content[key] == source[key], key


def test_archives_are_sound_and_the_model_loads_without_running_anything(tmp_path: Path) -> None:
    zckpt.reshard(FIXTURES / "s2_bf16_dp4", tmp_path / "run", world_size=3)
    for file in (tmp_path / "run").rglob("*.pt"):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None, file
    model = torch.load(tmp_path / "run/global_step5/mp_rank_00_model_states.pt", weights_only=True, mmap=True)
    assert model["module"]["head.weight"].data_ptr() == model["module"]["emb.weight"].data_ptr()
    storages = {model["module"][n].untyped_storage().data_ptr() for n in ("emb.weight", "fc1.weight", "conv.weight")}
    assert len(storages) == 1


@pytest.mark.parametrize("there", [True, False])
def test_round_robin_can_be_switched(there: bool, tmp_path: Path) -> None:
    name = "s2_bf16_dp4" if there else "s2_bf16_dp2_rr"
    zckpt.reshard(FIXTURES / name, tmp_path / "run", world_size=3, round_robin=there)
    target = zckpt.open(tmp_path / "run")
    assert target.details["round_robin_gradients"] is there
    assert_consolidated(tmp_path / "run", Truth(FIXTURES / name), tmp_path)
    order = list(read_torchfile(tmp_path / "run/global_step5/mp_rank_00_model_states.pt").root["param_shapes"][0])
    assert (order == target.param_groups[0].parameters) is not there


@pytest.mark.parametrize("there", [True, False])
def test_parameter_alignment_can_be_switched(there: bool, tmp_path: Path) -> None:
    name = "s1_fp32_dp3" if there else "s1_fp32_dp3_palign"
    zckpt.reshard(FIXTURES / name, tmp_path / "run", world_size=2, parameter_alignment=there)
    file = tmp_path / "run/global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    pads = read_torchfile(file).root["optimizer_state_dict"]["param_alignment_paddings"]
    assert any(any(group) for group in pads) is there
    assert_consolidated(tmp_path / "run", Truth(FIXTURES / name), tmp_path)


def test_the_same_run_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        zckpt.reshard(FIXTURES / "s2_bf16_dp2_client", tmp_path / name, world_size=3)
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
