"""Copies of one parameter that have drifted apart: every verb that writes one of them says so, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zckpt
from tests.formats.deepspeed.contents import run_of, tag_of
from tests.formats.deepspeed.shards import copy, edit, optimizer_file

TIED = "tied_modules.embed.weight"


def _moved(content):
    z = content["optimizer_state_dict"]
    for masters, shares in zip(z["single_partition_of_fp32_groups"], z["param_slice_mappings"], strict=True):
        if TIED in shares:
            masters.data[shares[TIED].start : shares[TIED].start + shares[TIED].numel] += 1e-3


@pytest.fixture
def drifted(tmp_path) -> Path:
    """A pipeline whose last stage has trained its copy of the embedding to other values."""
    run = copy("pp2_s1_fp32_dp2", tmp_path).parent
    for rank in range(2):
        edit(optimizer_file(tag_of(run), rank, 1), _moved)
    return run


def test_what_makes_one_of_them_says_which(drifted):
    done = zckpt.consolidate(drifted, "model.safetensors")
    [note] = [note for note in done.notes if TIED in note]
    assert "ranks' copies of tied_modules.embed.weight differ" in note
    assert "mp_rank_00_optim_states.pt" in note
    first = zckpt.open(run_of("pp2_s1_fp32_dp2")).read(TIED)
    assert torch.equal(zckpt.open("model.safetensors").read(TIED), first)
    assert any(TIED in note for note in zckpt.convert(drifted, "z", to="zckpt").notes)
    assert not any(TIED in note for note in zckpt.consolidate(drifted, "n", weight_check=False).notes)
    found = zckpt.verify(drifted, deep=True)
    assert found.sound, "DeepSpeed's own stages round a tied layer's gradients differently"
    assert {one.code for one in found.findings if one.parameters == (TIED,)} == {"ZC-209"}


def test_stages_that_stay_keep_their_own(drifted):
    """As DeepSpeed gives each stage its own back."""
    zckpt.reshard(drifted, "cut", world_size=1)
    for one in (drifted, Path("cut")):
        [copy] = [each for each in zckpt.open(one).duplicates if each.slot.name == "master"]
        assert copy.rank == 1
    assert zckpt.diff(drifted, "cut").equal
    assert "ZC-209" in {one.code for one in zckpt.verify("cut", deep=True).findings}


def test_copies_that_are_alike_are_not_mentioned():
    for name in ("pp2_s1_fp32_dp2", "tp2_s2_fp32_dp2"):
        assert not any("copies" in note for note in zckpt.consolidate(run_of(name), name).notes)
