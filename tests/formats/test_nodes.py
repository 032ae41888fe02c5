"""Files that are still on the nodes whose ranks wrote them: `--root` adds the other nodes' to the first one's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zckpt
from tests.cli.console import FIXTURES, refused, succeeded
from zckpt.errors import ShardError, SourceError

WAYS = {
    "dcp": {"world_size": 2},
    "fsdp-rank-files": {"world_size": 2},
    "torch-checkpointing": {"world_size": 2},
    "deepspeed": {"world_size": 2, "stage": 2},
}
OF_SECOND = {
    "dcp": "__1_*",
    "torch-checkpointing": "*_1.pt",
    "megatron": "mp_rank_01*",
}
LEGACY = FIXTURES / "other" / "mcore_legacy_tp2_pp2" / "ckpt"


@pytest.fixture(params=[*WAYS, "megatron"])
def whole(request) -> tuple[Path, str]:
    """Make a checkpoint that two ranks could have written, and say which files are the second one's."""
    name, target = request.param, Path("run")
    if name == "megatron":
        shutil.copytree(LEGACY, target)
    else:
        zckpt.convert(FIXTURES / "s2_bf16_dp2", target, to=name, **WAYS[name])
    return target, OF_SECOND.get(name, "*rank_1*")


def parted(whole, node, pattern) -> list[Path]:
    """Move files to another node, where they lie in the same folders."""
    moved = sorted(whole.rglob(pattern))
    assert moved
    for one in moved:
        there = node / one.relative_to(whole)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(one, there)
    return [node / one.relative_to(whole) for one in moved]


def test_other_nodes_files_are_added(whole):
    run, pattern = whole
    kept, first, second = "kept", run, Path("second")
    shutil.copytree(run, kept)
    [moved, *_] = parted(first, second, pattern)
    refused(3, "inspect", first, words=("missing", "with --root"))
    assert zckpt.diff(kept, first, roots_b=[second]).equal
    assert zckpt.verify(first, roots=[second], deep=True).sound
    succeeded("consolidate", first, "model.safetensors", "--root", second)
    assert zckpt.fingerprint(first, roots=[second]) == zckpt.fingerprint(kept)

    file = next(one for one in (moved, *moved.rglob("*")) if one.is_file())
    twin = first / file.relative_to(second)
    twin.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, twin)
    with pytest.raises(ShardError, match="two"):
        zckpt.open(first, roots=[second])
    shutil.copytree(second, first, dirs_exist_ok=True)
    assert zckpt.open(first, roots=[first]).parameters  # the same directory again


def test_a_node_that_is_not_there_is_refused(whole):
    with pytest.raises(SourceError, match="is not a directory"):
        zckpt.open(whole[0], roots=[whole[0] / "nowhere"])
