"""Real file systems, where this user may mount them: one that is full, and one that runs out in the middle."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.console import FIXTURES, refused, succeeded

SOURCE = FIXTURES / "s2_bf16_dp2"


@pytest.fixture(params=["size=32k", "nr_inodes=3"])
def small(request, tmp_path) -> Iterator[Path]:
    """A tmpfs with little room."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root mounts")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize(
    "verb",
    [
        ["consolidate", SOURCE, "m.safetensors", "--slots", "all"],
        ["reshard", SOURCE, "r", "--world-size", "3"],
        ["convert", SOURCE, "u", "--to", "universal"],
        ["pack", SOURCE, "store"],
    ],
    ids=lambda verb: verb[0],
)
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "in the middle"])
def test_a_file_system_without_room(asked, verb, small, monkeypatch):
    """Whether it says before that there is none, or when all of it is taken (as a quota does)."""
    if not asked:
        real = os.statvfs

        def unlimited(path: object) -> os.statvfs_result:
            return os.statvfs_result((*real(path)[:2], *[1 << 40] * 6, *real(path)[8:]))  # type: ignore[call-overload]

        monkeypatch.setattr(os, "statvfs", unlimited)
    monkeypatch.chdir(small)
    said = refused(4, *verb)
    assert "not enough space" in said or "no space for so many files" in said or "No space left on device" in said
    left = [path for path in small.rglob("*") if path.is_file() and path.name != "store.json"]
    assert left == []
    target = small.parent / str(verb[2])
    succeeded(*(target if word == verb[2] else word for word in verb))
