"""Runs to stores that are killed at random times, and gone on with: bit-equal, nothing left, little sent twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.console import FIXTURES, run, succeeded
from tests.folders import contents
from tests.gloo import forked
from tests.storage.remote.conftest import unfinished

SOURCE = FIXTURES / "s2_bf16_dp4"
VERBS: dict[str, list[object]] = {
    "consolidate": ["consolidate", SOURCE, "T/m", "--slots", "all", "--max-shard-size", "2kB"],
    "reshard": ["reshard", SOURCE, "T/r", "--world-size", "3"],
    "universal": ["convert", SOURCE, "T/u", "--to", "universal"],
    "dcp": ["convert", SOURCE, "T/d", "--to", "dcp", "--world-size", "24"],
    "strip": ["strip", SOURCE, "T/s", "--padding"],
    "average": ["average", SOURCE, SOURCE, "--target", "T/a", "--max-shard-size", "2kB"],
}
SENDERS = 16
"""More than there are at once."""


def noted(log: Path) -> None:
    """Let everything be worth going on with; note what is sent with a byte in a file."""
    from zckpt.storage import journal
    from zckpt.storage.remote import named_uploads
    from zckpt.storage.remote.s3 import S3Sink

    journal.LEAST_NBYTES = named_uploads.RECORD_NBYTES = 0
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def noting(call: Callable[..., Any], counts: Callable[[Any], bool]) -> Callable[..., Any]:
        def noted(one: Any, *arguments: Any, **named: Any) -> Any:
            if counts((one, *arguments)):
                os.write(file, b".")
            return call(one, *arguments, **named)

        return noted

    own = named_uploads.NamedUploads
    own.record = noting(own.record, lambda given: given[2] is not None)  # type: ignore[method-assign]
    S3Sink._call = noting(S3Sink._call, lambda given: given[1] == "upload_part")  # type: ignore[method-assign]


def started(log: Path, *arguments: object) -> int:
    """A process, forked from this one, that runs zckpt; its exit status is zckpt's."""
    child = os.fork()
    if not child:
        status = 70
        try:
            noted(log)
            done = run(*arguments)
            log.with_suffix(".said").write_text(done.stdout + done.stderr)
            status = done.returncode
        finally:
            os._exit(status)
    return child


def done(log: Path, *arguments: object) -> int:
    """Run zckpt in a process of its own; return what it sent."""
    status = os.waitstatus_to_exitcode(os.waitpid(started(log, *arguments), 0)[1])
    assert status == 0, log.with_suffix(".said").read_text()
    return begun(log)


def begun(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def kill_and_resume(verb: str, url: str, served: Path, settings: dict[str, str], times: int, tmp: Path) -> list[str]:
    """Kill a verb at random times, each time resume it; return what was wrong."""
    import botocore.session  # noqa: F401  # here, so that those that are forked need not

    os.environ.update(settings)

    def to(place: str) -> list[object]:
        return [one.replace("T/", f"{place}/") if isinstance(one, str) else one for one in VERBS[verb]]

    (tmp / "here").mkdir()
    succeeded(*to(str(tmp / "here")))
    expected = contents(tmp / "here")
    done(tmp / "warm", *to(f"{url}/{verb}-warm"))
    number = done(tmp / "counted", *to(f"{url}/{verb}-counted"))
    chance = random.Random(3)
    wrong, sent = [], []
    for index in range(times):
        name = f"{verb}-{index}"
        log, most = tmp / f"{name}.killed", chance.randint(0, number)
        child = started(log, *to(f"{url}/{name}"))
        while begun(log) < most and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        time.sleep(2 * (begun(log) >= number))  # the server may be about to name all
        named = contents(served / name).keys() >= expected.keys()  # it was at its end
        again = done(tmp / f"{name}.resumed", *to(f"{url}/{name}"), "--resume", "--overwrite")
        found, first = contents(served / name), begun(log)
        if found != expected:
            wrong.append(f"{index}: {sorted(found)}")
        if not named and first + again > number + SENDERS:
            wrong.append(f"{index}: {first} + {again} sent of {number}")
        sent.append((first, again))
    resumed = any(again < number for _, again in sent)
    return wrong if resumed else [*wrong, f"none was gone on with, of {number} each: {sent}"]


@pytest.fixture
def s3_kind() -> str:
    return "s3-alone"


@pytest.mark.nightly
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["s3", "webdav", "sftp"])
def test_killed_and_gone_on_with(kind, verb, served, request, tmp_path):
    place = request.getfixturevalue("s3") if kind == "s3" else served(f"{kind}-alone")
    settings = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    assert forked(kill_and_resume, verb, place.url, place.directory, settings, 20, tmp_path, timeout=600) == []
    if kind == "s3":
        assert unfinished() == []
