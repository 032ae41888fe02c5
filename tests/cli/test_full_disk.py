"""A disk that is full: one line, exit status 4, and nothing left behind. On a tmpfs that is really mounted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.console import environment

DISKS = {"size=16k": "not enough space", "size=8m,nr_inodes=3": "no space for that many files: expected "}
"""Too few bytes, or no room for so many files: both are seen before anything is written."""

SCRIPT = "".join(f"mkdir {at}; mount -t tmpfs -o {options} none {at} || exit 99; " for at, options in enumerate(DISKS))
PROGRAM = """
import json, os, sys
from tests.cli.console import run

said = []
for verb, *options in json.load(sys.stdin):
    for place in sys.argv[1:]:
        done = run(verb, "fixtures/s2_bf16_dp4", f"{place}/out", *options)
        said.append([place, done.returncode, done.stdout, done.stderr, os.listdir(place)])
print(json.dumps(said))
"""
"""Runs verbs, and says of each where it wrote, what it said, and what was there when it had ended."""

VERBS = [
    ("reshard", "--world-size 12"),
    ("convert", "--to universal"),
    ("convert", "--to zckpt --world-size 12"),
    ("convert", "--to dcp --world-size 12"),
    ("convert", "--to consolidated"),
    ("convert", "--to zero-redundancy --world-size 12"),
    ("consolidate", "--slots all"),
]


def test_nothing_is_left_on_a_full_disk():
    """On a tmpfs that only the process sees which runs the verbs."""
    words = [sys.executable, "-c", PROGRAM, *map(str, range(len(DISKS)))]
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{SCRIPT} exec "$@"', "sh", *words]
    done = subprocess.run(
        command, input=json.dumps(VERBS), capture_output=True, text=True, env=environment(), timeout=120, check=False
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    for place, status, out, errors, left in json.loads(done.stdout):
        assert (status, out, left) == (4, "", []), errors
        assert len(errors.splitlines()) == 1, errors
        assert [*DISKS.values()][int(place)] in errors
