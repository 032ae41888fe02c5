"""Processes that a command forks: what they write, and that they end with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import zckpt
from tests.cli.console import command, environment, succeeded
from tests.executors.conftest import wait_until
from tests.executors.dying import MARK
from tests.folders import names_in
from tests.refusals import refusing
from zckpt.errors import WorkerError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has forks")

TARGET = Path("out/t.safetensors")
UNASKED = "from zckpt.cli import main; from zckpt.executors import using; using.FORKED_NBYTES = {}; main()"


def begun(source: Path) -> subprocess.Popen[str]:
    """Begin a command whose workers do as `dying` says, in a session of its own."""
    TARGET.parent.mkdir()
    words = [sys.executable, "-m", "tests.executors.dying", "consolidate", source, TARGET, "--executor", "processes"]
    given = {**environment(), MARK: "mark", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=given, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_forks_write_what_threads_write(source, written):
    words = command("consolidate", source, "t.safetensors", "--executor", "processes")
    subprocess.run(words, env=environment(), check=True)
    assert Path("t.safetensors").read_bytes() == written


@pytest.mark.parametrize("least", [1, 1 << 40])
def test_much_that_is_computed_is_unasked_for_forks(least, source):
    words = ["-X", "importtime", "-c", UNASKED.format(least), "average", source, source, "forks"]
    done = subprocess.run([sys.executable, *words], env=environment(), capture_output=True, text=True, check=True)
    assert ("zckpt.executors.on_forks" in done.stderr) == (least == 1)
    zckpt.average([source, source], "threads")
    assert Path("forks/model.safetensors").read_bytes() == Path("threads/model.safetensors").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_forks_end_with_the_command(number, source):
    Path("held").touch()
    process = begun(source)
    Path("batches").touch()
    wait_until(lambda: Path("batches").stat().st_size >= 2 or process.poll() is not None)
    forks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)
        Path("go").touch()
    said = process.communicate(timeout=60)[1]
    wait_until(lambda: not any(Path("/proc", one, "exe").exists() for one in forks))
    assert len(forks) >= 2
    assert not TARGET.exists()
    if number != signal.SIGKILL:
        assert re.fullmatch(r"zckpt: (interrupted|terminated); .*\n", said)
        assert process.returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_that_comes_while_they_are_forked_ends_them(number, source):
    Path("slow").touch()
    process = begun(source)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text():
        pass
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert re.fullmatch(r"zckpt: (interrupted|terminated); .*\n", said)
    assert (process.returncode, names_in("out")) == (128 + number, [])


def test_lost_fork_is_said_and_what_the_others_wrote_is_gone_on_with(source, written):
    said = begun(source).communicate(timeout=60)[1]
    assert re.fullmatch(r"zckpt: workers were lost: found process \d is gone; .*\n", said)
    succeeded("consolidate", source, TARGET, *(["--resume"] if "--resume continues" in said else []))
    assert names_in("out") == [TARGET.name]
    assert TARGET.read_bytes() == written


def test_process_with_other_threads_is_not_forked(source):
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        with refusing(WorkerError, "no processes can be forked: found not Linux, or .*; use --executor=threads"):
            zckpt.consolidate(source, "t.safetensors", executor="processes")
    finally:
        end.set()
        other.join()
    assert names_in(".") == []
