"""Real file systems, where this user may mount them: one that is full, and one that runs out in the middle."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.console import FIXTURES, refused, succeeded
from tests.pairwise import each

SOURCE = FIXTURES / "s2_bf16_dp2"

VERBS = {
    "consolidate": ["consolidate", SOURCE, "m.safetensors", "--slots", "all"],
    "reshard": ["reshard", SOURCE, "r", "--world-size", "3"],
    "universal": ["convert", SOURCE, "u", "--to", "universal"],
    "pack": ["pack", SOURCE, "store"],
}


@pytest.fixture(params=["size=32k", "nr_inodes=3"])
def small(request, tmp_path) -> Iterator[Path]:
    """A tmpfs with little room."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root mounts")
    yield place
    os.chdir(tmp_path)  # a test may have gone there
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize(("verb", "asked"), each(VERBS, [True, False]))
def test_a_file_system_without_room(verb, asked, small, monkeypatch):
    """Whether it says before that there is none, or when all of it is taken (as a quota does)."""
    if not asked:
        real = os.statvfs

        def unlimited(path: object) -> os.statvfs_result:
            return os.statvfs_result((*real(path)[:2], *[1 << 40] * 6, *real(path)[8:]))

        monkeypatch.setattr(os, "statvfs", unlimited)
    monkeypatch.chdir(small)
    words = VERBS[verb]
    said = refused(4, *words)
    assert "not enough space" in said or "no space for that many files" in said or "No space left on device" in said
    left = [path for path in small.rglob("*") if path.is_file() and path.name != "store.json"]
    assert left == []
    succeeded(*(small.parent / str(word) if word == words[2] else word for word in words))
