"""Stage 0 for other ranks: the same state in the same files, which say how many ranks there are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.formats.deepspeed.contents import run_of

NAMES = ["s0_bf16_dp2", "s0_fp32_dp2", "pp2_s0_fp32_dp2", "moe_ep2_s0_fp32_dp4"]


def load(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=False)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else repr(one) == repr(other)


@pytest.mark.parametrize("name", NAMES)
def test_everything_but_the_number_of_ranks_stays(name: str, tmp_path: Path) -> None:
    written = zckpt.reshard(run_of(name), tmp_path / "cut", world_size=6, verify=True)
    assert any("stage 0" in note for note in written.notes)
    before, after = run_of(name) / "global_step5", tmp_path / "cut" / "global_step5"
    assert {path.name for path in after.iterdir()} == {path.name for path in before.iterdir()}
    for path in before.iterdir():
        if "mp_rank" not in path.name or "model_states" not in path.name or path.name.startswith("layer"):
            assert (after / path.name).read_bytes() == path.read_bytes()
            continue
        old, new = load(path), load(after / path.name)
        assert new["dp_world_size"] == 6
        assert new["ds_config"]["train_micro_batch_size_per_gpu"] == 2
        for content in (old, new):
            content.pop("dp_world_size")
            content["ds_config"].pop("train_micro_batch_size_per_gpu")
        assert same(old, new)
    assert (tmp_path / "cut" / "latest").read_text() == "global_step5"
    assert zckpt.diff(run_of(name), tmp_path / "cut").equal
    assert zckpt.open(tmp_path / "cut").topology.dp == 6


def test_a_tag_comes_out_as_a_tag(tmp_path: Path) -> None:
    zckpt.reshard(run_of("s0_bf16_dp2") / "global_step5", tmp_path / "tag", world_size=1)
    assert [path.name for path in (tmp_path / "tag").iterdir()] == ["mp_rank_00_model_states.pt"]


def test_other_changes_are_refused_by_name(tmp_path: Path) -> None:
    for options in ({"stage": 1}, {"elastic": True}):
        with pytest.raises(zckpt.UnsupportedError, match=next(iter(options))):
            zckpt.reshard(run_of("s0_fp32_dp2"), tmp_path / "cut", world_size=2, **options)
    for name, options in (
        ("s0_fp32_dp2", {"tensor_parallel_size": 2}),
        ("pp2_s0_fp32_dp2", {"pipeline_parallel_size": 1}),
    ):
        with pytest.raises(zckpt.UnsupportedError, match="optimizer of each rank numbers is not certain"):
            zckpt.reshard(run_of(name), tmp_path / "cut", world_size=2, **options)
    with pytest.raises(zckpt.UsageError, match="experts spread over 2 ranks"):
        zckpt.reshard(run_of("moe_ep2_s0_fp32_dp4"), tmp_path / "cut", world_size=3)
    assert not (tmp_path / "cut").exists()
