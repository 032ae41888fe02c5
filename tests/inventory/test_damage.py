"""Each file of each real checkpoint as a crash, a full disk or a careless hand leaves it: found and refused, or listed.

What nothing can tell is in `SILENT`, with the reason; of all else that nobody says a word of, nothing may be lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import zckpt
from tests.inventory.sources import LEFT_OUT, SOURCES
from zckpt.errors import SourceError, ZckptError
from zckpt.formats.account import take_inventory
from zckpt.state.inventory import FOREIGN

OPERATIONS: dict[str, Callable[[bytes], bytes | None]] = {
    "removed": lambda data: None,
    "emptied": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
}
"""What is left of a file."""

SAMPLE = ["pp2_s1_bf16_dp1", "other/dcp_fsdp2_dp2", "other/plain_adamw", "other/zckpt_v1"]
"""In every run: files of all kinds."""

SILENT = {
    (
        "removed",
        "*/random_states_*.pkl",
        "*/rng_state_*.pth",
        "*/train/rank*.pt",
    ): "no file says how many ranks there were; of one before others a warning says it",
    (
        "removed",
        "other/lerobot_adamw/*/rng_state.*",
        "other/lerobot_adamw/*/scheduler_state.json",
        "other/lerobot_adamw/*/training_step.json",
    ): "a training may have none",
    ("removed", "*/scheduler.*", "*/training_args.bin", "*/trainer_state.json"): "a training may have none",
    (
        "removed",
        "other/nanotron*/lr_scheduler/*",
        "other/nanotron*/random/*",
    ): "a warning says it",
    ("removed", "pp2_s0_fp32_dp2/*/layer_*"): "stages do not list their parameters, and their optimizers were dropped",
    ("removed", "other/lightning_fsdp2/meta.pt"): "without it, it is what torch by itself writes",
    (
        "removed",
        "other/dcphf_sharded_dp3/*00003-*",
    ): "the files do not say how many shards there were; verify notes that",
    ("zeros", "other/mcore08_zarr_tp2/*.exp_avg*"): "chunks have no checksums, and a moment may be zero",
}
"""What may be lost without a finding: what is done to which files (`FIXTURE/NAME`), and why nothing can tell."""


def files_of(source) -> Iterator[Path]:
    return (path for path in sorted(source.rglob("*") if source.is_dir() else [source]) if path.is_file())


def is_listed(operation, file) -> bool:
    return any(done == operation and any(fnmatchcase(file, one) for one in patterns) for done, *patterns in SILENT)


def held(source) -> object:
    """What a checkpoint has, as far as the loss of a file would show in it."""
    found = zckpt.open(source)
    slots = {one.name: (one.shape, sorted(one.slots), sorted(one.state)) for one in found.tensors()}
    groups = [(sorted(group.hyperparameters), group.parameters, sorted(group.state)) for group in found.param_groups]
    return slots, groups, sorted(found.metadata), sorted(found.optimizer_metadata), found.step, found.loss_scale


def is_sound(source) -> bool:
    try:
        return zckpt.verify(source, deep=True).sound
    except SourceError:
        return False


def is_taken(source, drop: list[str], *, writes) -> bool:
    """Whether a verb writes from it, or would as far as structure and a sample of the weights tell."""
    target = source.with_name("target")
    try:
        zckpt.convert(source, target, to="zckpt", drop=drop, overwrite=True, dry_run=not writes)
    except ZckptError:
        return False
    return True


def failures(name, directory, *, writes) -> Iterator[str]:
    """Do everything to every file of a fixture; yield what should not be."""
    source = directory / SOURCES[name].name
    if SOURCES[name].is_dir():
        shutil.copytree(SOURCES[name], source, ignore=shutil.ignore_patterns("truth.*"))
    else:
        shutil.copy(SOURCES[name], source)
    drop = [f"*:{LEFT_OUT[name]}"] if name in LEFT_OUT else []
    whole, sound = held(source), is_sound(source)
    foreign = {item.file: item.about for item in take_inventory(zckpt.open(source)).of(FOREIGN) if not item.place}
    for path in files_of(source):
        data, file = path.read_bytes(), path.relative_to(source if source.is_dir() else directory).as_posix()
        for operation, change in OPERATIONS.items():
            left = change(data)
            if left == data or (left is None and path == source):
                continue
            path.unlink() if left is None else path.write_bytes(left)
            said = sound and not is_sound(source)
            taken = is_taken(source, drop, writes=writes)
            if said and taken:
                yield f"{file} {operation}: verify finds it, and a verb writes from it"
            elif foreign.get(file) == "another checkpoint" or not taken or is_listed(operation, f"{name}/{file}"):
                pass
            elif left is not None or held(source) != whole:
                yield f"{file} {operation}: nothing says a word"
            path.write_bytes(data)


@pytest.mark.parametrize("name", SAMPLE)
def test_what_a_crash_leaves_is_found_and_refused(name, tmp_path):
    assert list(failures(name, tmp_path, writes=False)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", SOURCES)
def test_what_a_crash_leaves_of_every_fixture_is_found_and_refused_by_a_verb(name, tmp_path):
    few = len(list(files_of(SOURCES[name]))) <= 40
    assert list(failures(name, tmp_path, writes=few)) == []


def test_what_is_said_of_files_of_which_nothing_can_tell_is_of_files_that_are_there():
    every = [f"{name}/{path.relative_to(source).as_posix()}"
             for name, source in SOURCES.items() if source.is_dir() for path in files_of(source)]  # fmt: skip
    for _, *patterns in SILENT:
        for pattern in patterns:
            assert any(fnmatchcase(file, pattern) for file in every), pattern
