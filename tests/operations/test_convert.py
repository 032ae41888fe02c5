"""`convert`: every readable format in every writable one, without losing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from tests.live import trained
from tests.logical import assert_same_state
from tests.pairwise import each, some
from tests.refusals import refusing
from tests.truth import Truth, assert_consolidated, bits

FIXTURES = Path(__file__).parents[2] / "fixtures"
DENSE = sorted(
    path.name
    for path in FIXTURES.iterdir()
    if path.name.startswith(("s1_", "s2_", "s3_", "ds0145_", "hf_")) and (path / "latest").is_file()
)
TARGETS: dict[str, dict[str, Any]] = {
    "universal": {},
    "consolidated": {},
    "zckpt": {"world_size": 3},
    "dcp": {"world_size": 2},
    "zero-redundancy": {"world_size": 3},
    "fsdp-rank-files": {"world_size": 3},
    "torch-checkpointing": {"world_size": 3},
}
ORDERED = {"z": (5, 3), "b": (4, 4), "a": (4, 4)}  # as a model lists them, and as a file sorts them, are two orders
RING = [*TARGETS, "deepspeed"]
RUNG = ["s2_bf16_dp2_client", "s3_bf16_dp4", "s1_fp32_dp4_sgdm", "s2_bf16_dp2_zerodim"]
"""Sent around the ring, each from another place of it."""


def but_for_the_cut(checkpoint: zckpt.OpenedCheckpoint) -> zckpt.OpenedCheckpoint:
    """Without what depends on stage and ranks: the configuration, and clipping, which files of ZeRO-3 do not hold."""
    assert checkpoint.metadata.pop("ds_config") is not None
    checkpoint.optimizer_metadata.pop("clip_grad", None)
    return checkpoint


@pytest.mark.parametrize(("name", "to"), each(DENSE, TARGETS))
@pytest.mark.every(8)
def test_state_is_that_of_the_source(name, to):
    zckpt.convert(FIXTURES / name, "out", to=to, **TARGETS[to])
    assert_same_state(zckpt.open("out"), zckpt.open(FIXTURES / name))


@pytest.mark.parametrize(
    ("name", "to"),
    each(["s2_bf16_dp2_rr", "s1_fp32_dp3", "s3_bf16_dp3", "s2_bf16_dp2_lion", "s1_fp32_dp4_sgdm"], TARGETS),
)
@pytest.mark.every(2, 1)
def test_what_is_written_is_the_truth(name, to):
    zckpt.convert(FIXTURES / name, "out", to=to, **TARGETS[to])
    assert_consolidated(Path("out"), Truth(FIXTURES / name), Path())


@pytest.mark.parametrize(
    ("name", "to", "stage"),
    each(["s2_bf16_dp2_client", "s3_bf16_dp3", "ds0145_s1_fp32_dp2", "s2_fp16_dp2"], TARGETS, [1, 2, 3]),
)
@pytest.mark.every(2)
def test_deepspeed_is_rewritten_from_any_format(name, to, stage):
    zckpt.convert(FIXTURES / name, "out", to=to, **TARGETS[to])
    zckpt.convert("out", "back", to="deepspeed", world_size=3, stage=stage)
    back = zckpt.open("back")
    assert (back.format, back.zero_stage, back.topology.dp) == ("deepspeed", stage, 3)
    assert_same_state(but_for_the_cut(back), but_for_the_cut(zckpt.open(FIXTURES / name)))


@pytest.mark.parametrize(
    ("name", "first"),
    some(
        zip(RUNG, (0, 2, 4, 6), strict=True),
        ((name, first) for number, name in enumerate(RUNG) for first in range(len(RING)) if first != 2 * number),
    ),
)
@pytest.mark.every(4, 2)
def test_the_ring_of_all_formats_loses_nothing(name, first):
    at = FIXTURES / name
    for number, to in enumerate(RING[first:] + RING[:first]):
        options = {"world_size": 3, "stage": 2} if to == "deepspeed" else TARGETS[to]
        zckpt.convert(at, str(number), to=to, **options)
        at = str(number)
    assert_same_state(but_for_the_cut(zckpt.open(at)), but_for_the_cut(zckpt.open(FIXTURES / name)))


@pytest.mark.parametrize(
    ("name", "to"), each(["tp2_s1_bf16_dp2", "tp2_s3_bf16_dp2", "pp2_s1_fp32_dp2", "moe_ep2_s2_bf16_dp2"], TARGETS)
)
@pytest.mark.every(3)
def test_slices_stages_and_experts_come_together(name, to):
    zckpt.convert(FIXTURES / name, "out", to=to, **TARGETS[to])
    assert_same_state(zckpt.open("out"), zckpt.open(FIXTURES / name), means_are_rounded=True)


@pytest.mark.parametrize(
    ("name", "to"),
    each(
        ["plain_mixed", "plain_bf16", "plain_adamw", "plain_legacy"],
        ["zckpt", "consolidated", "dcp", "zero-redundancy", "fsdp-rank-files"],
    ),
)
@pytest.mark.every(2)
def test_file_of_torch_save_is_a_source_like_any(name, to):
    source = FIXTURES / "other" / name / "ckpt.pt"
    names = list(Truth(source.parent).numbers.values())
    zckpt.convert(source, "out", to=to, names=names, **TARGETS[to])
    assert_same_state(zckpt.open("out", names=names), zckpt.open(source, names=names))


@pytest.mark.parametrize("name", ["s2_bf16_dp2_elastic", "ds0145_s2_bf16_dp2_elastic_fused"])
def test_elastic_source_has_no_hyperparameters_to_write(name):
    zckpt.convert(FIXTURES / name, "out", to="zckpt")
    assert not any(group.hyperparameters for group in zckpt.open("out").param_groups)
    with refusing(zckpt.UnsupportedError, "hyperparameters"):
        zckpt.convert("out", "back", to="deepspeed", world_size=2, stage=2)


@pytest.mark.parametrize(
    ("name", "to"), each(["s2_bf16_dp4", "s3_bf16_dp3"], ["consolidated", "dcp", "zero-redundancy"])
)
def test_float32_model_of_a_16_bit_run_holds_its_masters(name, to):
    zckpt.convert(FIXTURES / name, "out", to=to, dtype="float32", verify=True)
    found, source = zckpt.open("out"), zckpt.open(FIXTURES / name)
    for parameter in source.parameters.values():
        if parameter.group is not None:
            weight, master = found.read(parameter.name, "weight"), source.read(parameter.name, "master")
            assert (weight.dtype, master.dtype) == (torch.float32, torch.float32)
            assert torch.equal(bits(weight), bits(master)), parameter.name


def test_optimizer_without_a_model_is_no_directory_of_a_model():
    _, optimizer = trained(torch.nn.Linear(3, 2))
    torch.save(optimizer.state_dict(), "optimizer.pt")
    with refusing(zckpt.UnsupportedError, r"holds only optimizer state.* a \.pt file"):
        zckpt.convert("optimizer.pt", "out", to="consolidated")
    zckpt.convert("optimizer.pt", "out.pt", to="consolidated")
    assert_same_state(zckpt.open("out.pt"), zckpt.open("optimizer.pt"))


@pytest.mark.parametrize("target", ["out", "out.pt"])
def test_names_that_only_the_source_tells_arrive_with_a_consolidated_one(target):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(*sizes, bias=False) for name, sizes in ORDERED.items()})
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    source = Path("state")
    source.mkdir()
    save_file({name: one.clone() for name, one in sorted(model.state_dict().items())}, source / "model.safetensors")
    torch.save(optimizer.state_dict(), source / "optimizer.bin")
    found = zckpt.open(source)
    assert found.param_groups[0].parameters == ["z.weight", "1", "2"]
    zckpt.convert(source, target, to="consolidated")
    assert_same_state(zckpt.open(target), found)
    zckpt.convert(target, "named", to="zckpt", names=[f"{name}.weight" for name in ORDERED])
    read = zckpt.open("named").read("b.weight", "exp_avg")
    assert torch.equal(read, optimizer.state[model["b"].weight]["exp_avg"])
