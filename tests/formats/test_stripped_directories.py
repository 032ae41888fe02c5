"""Directories of zckpt, of torch's DCP and universal ones without optimizer state: what stays is there, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import zckpt
from tests.cli.console import FIXTURES
from tests.folders import contents, nbytes_in
from tests.inventory.sources import SOURCES
from tests.live import trained
from tests.pairwise import some
from tests.refusals import refusing
from tests.truth import bits
from zckpt.errors import UnsupportedError
from zckpt.formats.account import take_inventory
from zckpt.operations.strip import strip

Made = Callable[[str, str], Path]
READ = ["other/dcp_fsdp2_dp2_raw", "other/zckpt_v1", "universal/s3_bf16_dp2"]
MORE = ["other/accel_fsdp2_dp2", "other/dcp_fsdp1_dp2", "other/dcp_fsdp2_dp3", "other/dcp_fsdp2_dp2_flatopt",
        "other/lightning_fsdp2", "universal/s2_bf16_dp4"]  # fmt: skip
WRITTEN = [("zckpt", {"world_size": 3}), ("dcp", {"keys": "flat"}), ("universal", {})]


def assert_stays(whole, thin, slots: set[str]):
    """Hold every slot that is left against the source; nothing else is there, and all of it has a meaning."""
    before, after = zckpt.open(whole), zckpt.open(thin)
    assert set(after.slot_names()) - {"step"} == slots
    for one in after.tensors():
        for key in one.slots:
            assert torch.equal(bits(after.read(one.name, key)), bits(before.read(one.name, key))), f"{key}/{one.name}"
    assert [g.hyperparameters for g in after.param_groups] == [g.hyperparameters for g in before.param_groups]
    assert zckpt.verify(thin, deep=True).sound
    assert not take_inventory(after).left_out


@pytest.mark.parametrize("name", some(READ, MORE))
def test_what_other_programs_wrote(name):
    source = SOURCES[name]
    model = {"weight"} | ({"master"} if name.startswith("universal") else set())
    done = strip(source, Path("model"), optimizer=True)
    assert sum(done.saved.values()) == nbytes_in(source) - nbytes_in("model")
    assert done.saved["exp_avg"] > 0
    assert_stays(source, "model", model)
    assert not any(group.state for group in zckpt.open("model").param_groups)
    strip(source, Path("some"), keep_slots=["exp_avg"])
    kept = model | {"exp_avg"} | ({"master"} if name == "other/zckpt_v1" else set())
    assert_stays(source, "some", kept)
    assert zckpt.open("some").param_groups[0].state == zckpt.open(source).param_groups[0].state


@pytest.mark.parametrize(("to", "options"), some(WRITTEN, [("dcp", {"world_size": 3})]))
def test_what_is_written_here(to, options):
    whole = Path("run/whole")
    whole.parent.mkdir()
    zckpt.convert(FIXTURES / "s2_bf16_dp2", whole, to=to, fingerprint=True, **options)
    strip(whole, Path("model"), optimizer=True)
    assert_stays(whole, "model", {"weight", "master"} if to == "universal" else {"weight"})
    assert not Path("model/fingerprint.json").exists()
    strip(whole, Path("masters"), keep_slots=["master"])
    assert set(zckpt.open("masters").slot_names()) - {"step"} == {"weight", "master"}
    strip(whole, Path("same"), unreferenced=True, padding=True)
    assert contents(whole) == contents("same")


def test_a_directory_of_other_files_keeps_a_fingerprint_that_is_true():
    zckpt.convert(FIXTURES / "s2_bf16_dp4", "whole", to="consolidated", fingerprint=True)
    assert Path("whole/fingerprint.json").exists()
    strip(Path("whole"), Path("model"), optimizer=True)
    assert not Path("model/fingerprint.json").exists()
    strip(Path("whole"), Path("same"), unreferenced=True)
    assert Path("same/fingerprint.json").exists()


@pytest.mark.parametrize("keys", ["nested", "flat"])
def test_torch_loads_every_item_that_is_left(keys):
    zckpt.convert(FIXTURES / "s2_bf16_dp4", "whole", to="dcp", keys=keys, world_size=3)
    strip(Path("whole"), Path("thin"), keep_slots=["exp_avg"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a process without a group
        whole, thin = (_load_state_dict_from_keys(checkpoint_id=Path(one)) for one in ("whole", "thin"))
        some = {"model": {k: torch.empty_like(v) for k, v in whole.get("model", {}).items()}}
        if keys == "nested":
            dcp.load(some, checkpoint_id="thin")
            assert all(torch.equal(value, whole["model"][key]) for key, value in some["model"].items())
    before, after = leaves(whole), leaves(thin)
    assert before.keys() - after.keys() == {path for path in before if "exp_avg_sq" in path[-1]}
    for path, value in after.items():
        same = torch.equal(value, before[path]) if isinstance(value, torch.Tensor) else value == before[path]
        assert same, path


def leaves(node, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if below is None:
        return {path: node}
    return {key: value for step, child in below for key, value in leaves(child, (*path, str(step))).items()}


def test_an_optimizer_starts_afresh_from_a_model_alone():
    torch.manual_seed(3)
    model, optimizer = trained(torch.nn.Linear(3, 2), lr=0.25)
    zckpt.save("run/step-1", model=model, optimizer=optimizer, step=1)
    Path("run/latest").write_text("step-1")
    done = strip(Path("run"), Path("thin"), optimizer=True)
    assert any("only this checkpoint" in note for note in done.notes)
    fresh = torch.nn.Linear(3, 2)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    zckpt.load("thin", model=fresh, optimizer=other)
    assert torch.equal(fresh.weight, model.weight)
    assert other.param_groups[0]["lr"] == 0.25
    assert not any(other.state.values())
    other.step()


def test_a_run_of_universal_checkpoints_stays_one():
    source = Path("run/universal")
    source.parent.mkdir()
    zckpt.convert(FIXTURES / "s2_bf16_dp4", source, to="universal")
    strip(source.parent, Path("thin"), optimizer=True)
    assert Path("thin/latest_universal").read_text() == "universal"
    assert_stays(source, "thin", {"weight", "master"})


def test_files_that_torch_itself_does_not_read_back_are_refused(tmp_path):
    with refusing(UnsupportedError, "safetensors"):
        strip(SOURCES["other/dcp_fsdp2_dp2_stformat"], tmp_path / "thin", optimizer=True)
    assert list(tmp_path.iterdir()) == []
