"""Checkpoints of more ranks than a process may have open files: `ulimit -n 128`; macOS has 256 by default."""

from __future__ import annotations

import gc
import os
import resource

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES
from zckpt.engine.targets import TargetFile
from zckpt.formats import registry
from zckpt.formats.format import Job
from zckpt.formats.options import choose

RANKS, DESCRIPTORS = 150, 128
OF_DEEPSPEED = FIXTURES / "s2_bf16_dp3"
LAYERS = {"dcp": RANKS, "fsdp-rank-files": 1, "megatron": RANKS}
"""Whole tensors are dealt over files, but those of FSDP's ranks, which are cut for all of them."""


@pytest.fixture
def few_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def assert_same_elements(one, other):
    found = zckpt.diff(one, other)
    assert found.equal_slots
    assert not found.changed + found.only_in_a + found.only_in_b


@pytest.mark.parametrize("kind", ["zero2", "zero3", "zckpt", *LAYERS])
@pytest.mark.every(3)
def test_no_verb_has_more_files_open_than_it_may(tmp_path, few_descriptors, kind):
    source, made, again = OF_DEEPSPEED, tmp_path / "made", tmp_path / "again"
    to = {"to": "deepspeed", "stage": int(kind[-1])} if kind.startswith("zero") else {"to": kind}
    if kind in LAYERS:
        source, rows = tmp_path / "model.pt", RANKS if LAYERS[kind] == 1 else 1
        names = (f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(LAYERS[kind]))
        torch.save({name: torch.arange(2.0 * rows).reshape(rows, 2) + at for at, name in enumerate(names)}, source)
    zckpt.convert(source, made, world_size=RANKS, **to)
    assert sum(len(files) for _, _, files in os.walk(made)) > DESCRIPTORS
    assert zckpt.inspect(made).num_parameters == zckpt.inspect(source).num_parameters
    assert zckpt.verify(made, deep=True).sound
    assert zckpt.map(made)
    assert_same_elements(source, made)
    zckpt.consolidate(made, "whole.safetensors")
    zckpt.convert(made, again, world_size=2, **to)
    assert_same_elements(made, again)


@pytest.mark.parametrize("to", ["fsdp-rank-files", "torch-checkpointing"])
def test_files_of_ranks_are_laid_out_one_after_the_other(tmp_path, to):
    source, ranks = zckpt.open(OF_DEEPSPEED), 20
    written = registry.get(to)
    options = choose(written.options, {"world_size": ranks}, to)
    laid = written.lay_out(Job(source, OF_DEEPSPEED, tmp_path / "made", options))
    files = iter(laid.files)
    before = [next(files).name for _ in range(ranks)]
    assert len(before) < len([*laid.files])
    assert sum(isinstance(one, TargetFile) for one in gc.get_objects()) < ranks
