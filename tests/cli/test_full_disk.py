"""A disk that is full: one line, exit status 4, and nothing left behind. On a tmpfs that is really mounted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.console import FIXTURES, environment
from tests.pairwise import each, some

SCRIPT = 'mount -t tmpfs -o "$1" none "$2" || exit 99; shift 2; "$@"; status=$?; find "$0" -mindepth 1; exit $status'
"""$0 the mount point again, $1 the mount options, $2 the mount point, then a command; prints what is left there."""

VERBS = {
    "reshard": ("reshard", "--world-size", "12"),
    "universal": ("convert", "--to", "universal"),
    "zckpt": ("convert", "--to", "zckpt", "--world-size", "12"),
    "dcp": ("convert", "--to", "dcp", "--world-size", "12"),
    "consolidated": ("convert", "--to", "consolidated"),
    "zero-redundancy": ("convert", "--to", "zero-redundancy", "--world-size", "12"),
    "consolidate": ("consolidate", "--slots", "all"),
}


def on_tmpfs(options: str, place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run zckpt with a tmpfs at `place`, which only that process sees."""
    place.mkdir()
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SCRIPT, str(place), options, str(place)]
    done = subprocess.run(
        [*command, sys.executable, "-m", "zckpt", *arguments],
        capture_output=True, text=True, env=environment(), timeout=120, check=False,
    )  # fmt: skip
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    return done


@pytest.mark.parametrize(("verb", "options"), each(VERBS, ["size=16k", "size=8m,nr_inodes=3"]))
def test_nothing_is_left_on_a_full_disk(verb: str, options: str, tmp_path: Path) -> None:
    """Both are seen before anything is written: too few bytes, or no room for so many files."""
    place = tmp_path / "disk"
    first, *rest = VERBS[verb]
    done = on_tmpfs(options, place, first, str(FIXTURES / "s2_bf16_dp4"), str(place / "out"), *rest)
    assert done.returncode == 4, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert ("not enough space" if options == "size=16k" else "no space for so many files: expected ") in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("verb", some(["reshard"], VERBS.keys() - {"reshard"}))
def test_the_same_disk_with_room_is_written(verb: str, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    first, *rest = VERBS[verb]
    done = on_tmpfs("size=8m", place, first, str(FIXTURES / "s2_bf16_dp4"), str(place / "out"), *rest)
    assert done.returncode == 0, done.stderr
    assert str(place / "out") in done.stdout
