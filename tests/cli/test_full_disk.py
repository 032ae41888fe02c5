"""A disk that is full: one line, exit status 4, and nothing left behind. On a tmpfs that is really mounted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.console import environment

SCRIPT = 'mount -t tmpfs -o "$1" none "$2" || exit 99; exec "$3" -c "$4" "$2"'
"""$1 the mount options, $2 the mount point, $3 Python, $4 a program."""
PROGRAM = """
import json, os, sys
from tests.cli.console import run

place = sys.argv[1]
said = []
for command in json.load(sys.stdin):
    done = run(command)
    said.append([done.returncode, done.stdout, done.stderr, os.listdir(place)])
print(json.dumps(said))
"""
"""Runs commands, and says of each what it said, and what was there when it had ended."""

VERBS = [
    "reshard --world-size 12",
    "convert --to universal",
    "convert --to zckpt --world-size 12",
    "convert --to dcp --world-size 12",
    "convert --to consolidated",
    "convert --to zero-redundancy --world-size 12",
    "consolidate --slots all",
]


def on_tmpfs(options: str, place: Path) -> list[tuple[int, str, str, list[str]]]:
    """Run the verbs, one after the other, with a tmpfs at `place`, which only that process sees."""
    place.mkdir()
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SCRIPT, "sh", options, place]
    commands = [f"{verb} fixtures/s2_bf16_dp4 {place}/out" for verb in VERBS]
    done = subprocess.run(
        [*command, sys.executable, PROGRAM], input=json.dumps(commands),
        capture_output=True, text=True, env=environment(), timeout=120, check=False,
    )  # fmt: skip
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


@pytest.mark.parametrize(
    ("options", "words"),
    [("size=16k", "not enough space"), ("size=8m,nr_inodes=3", "no space for that many files: expected ")],
)
def test_nothing_is_left_on_a_full_disk(options, words, tmp_path):
    """Both are seen before anything is written: too few bytes, or no room for so many files."""
    for status, out, errors, left in on_tmpfs(options, tmp_path / "disk"):
        assert (status, out, left) == (4, "", []), errors
        assert len(errors.splitlines()) == 1, errors
        assert words in errors
