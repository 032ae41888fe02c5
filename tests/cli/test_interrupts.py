"""A signal ends a command with one line, whatever it is about to import, and without one when it was about to end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.cli.console import FIXTURES, environment

PROGRAM = """
import atexit, os, runpy, signal, sys

number, at = int(sys.argv[1]), int(sys.argv[2])
imported = []

def hook(event, arguments):
    if event == "import" and (imported or arguments[0] == "zckpt.cli"):
        imported.append(arguments[0])
        if len(imported) == at:
            os.kill(os.getpid(), number)

sys.addaudithook(hook)
if not at:
    atexit.register(os.kill, os.getpid(), number)
sys.argv[1:3] = []
runpy.run_module("zckpt", run_name="__main__", alter_sys=True)
"""


def interrupted(number: int, at: int) -> subprocess.CompletedProcess[str]:
    """Run `inspect`, which gets a signal as it imports its `at`-th module; 0: as Python ends."""
    words = [sys.executable, "-c", PROGRAM, str(number), str(at), "inspect", str(FIXTURES / "s2_bf16_dp2")]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=60)


SOME = (1, 12, 60)
LAST = 90
"""What is imported later may be the last: all may be done before the signal is looked at again."""

EVERY = [at if at in SOME else pytest.param(at, marks=pytest.mark.nightly) for at in range(1, 141)]


@pytest.mark.parametrize("at", EVERY)
def test_one_line_whatever_is_imported(at):
    done = interrupted(signal.SIGINT, at)
    if at > LAST and done.returncode == 0:
        assert (done.stdout[:6], done.stderr) == ("source", "")
        return
    assert (done.returncode, done.stderr) == (130, "zckpt: interrupted; nothing was left behind\n")
    assert done.stdout == ""


def test_so_does_a_scheduler_that_ends_a_job():
    done = interrupted(signal.SIGTERM, 12)
    assert (done.returncode, done.stderr) == (143, "zckpt: terminated; nothing was left behind\n")


def test_nothing_is_said_when_all_is_done():
    done = interrupted(signal.SIGINT, 0)
    assert done.stdout.startswith("source")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
