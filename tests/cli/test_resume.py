"""Conversions that are killed or fail, and are gone on with: bit-equal, nothing left, little done twice."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.cli.console import copy, refused, run, succeeded
from tests.folders import contents, files_in, names_in
from tests.gloo import forked
from tests.refusals import refusing
from zckpt.engine import SilentReporter
from zckpt.errors import TargetError

ADAPTER = Path(__file__).parents[1] / "operations/adapters/of_s2_bf16_dp2"
SOURCE = "fixtures/s2_bf16_dp2"
VERBS: dict[str, list[object]] = {
    "consolidate": [f"consolidate {SOURCE} m.safetensors --slots all"],
    "consolidate-torch": [f"consolidate {SOURCE} m.pt --dtype bfloat16"],
    "reshard": [f"reshard {SOURCE} r --world-size 3"],
    "reshard-3": ["reshard fixtures/s3_bf16_dp2 r --world-size 3"],
    "universal": [f"convert {SOURCE} u --to universal"],
    "dcp": [f"convert {SOURCE} dcp --to dcp --fingerprint"],
    "strip": [f"strip {SOURCE} s --padding"],
    "sanitize": [f"sanitize {SOURCE} clean"],
    "average": [f"average {SOURCE} fixtures/s2_bf16_dp3 --target m --weights 1,3 --slots all"],
    "merge-adapter": [f"merge-adapter {SOURCE}", ADAPTER, "m.safetensors"],
}
KILLED = ("consolidate", "universal", "sanitize")
"""Of the verbs, in every run: a file, a directory, files that are copied."""

WORKERS = 8
"""More than there are threads."""


def in_small_tasks(log: Path) -> None:
    """Let everything be worth a journal, and a batch be small; note each task that begins to write in a file.

    A task is a batch, or those that read together: they are recorded together, and a kill loses all of them.
    """
    from zckpt.engine import workers, write
    from zckpt.storage import journal

    workers.BATCH_NBYTES = write.BATCH_NBYTES = 1 << 9
    journal.LEAST_NBYTES = 0
    given = write.run_task
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def run_task(work: Callable[[write.Batch], Any], task: Sequence[write.Batch]) -> Any:
        first = iter(b".")  # of which the second batch finds nothing left

        def noted(batch: write.Batch) -> Any:
            os.write(file, bytes(first))
            return work(batch)

        return given(noted, task)

    write.run_task = run_task


def started(here: Path, log: str, *arguments: object) -> int:
    """A process, forked from this one, that runs zckpt in a directory; its exit status is zckpt's."""
    here.mkdir(exist_ok=True)
    child = os.fork()
    if not child:
        status = 70
        try:
            in_small_tasks(here.with_name(f"{here.name}.{log}"))
            os.chdir(here)
            done = run(*arguments)
            here.with_name(f"{here.name}.{log}.said").write_text(done.stdout + done.stderr)
            status = done.returncode
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def done(here: Path, log: str, *arguments: object) -> int:
    """Run zckpt in a process of its own; return how many tasks began to write."""
    status = status_of(started(here, log, *arguments))
    said = here.with_name(f"{here.name}.{log}.said").read_text()
    assert status == 0, said
    return begun(here, log)


def begun(here: Path, log: str) -> int:
    path = here.with_name(f"{here.name}.{log}")
    return path.stat().st_size if path.exists() else 0


def kill_and_resume(verb: str, times: int, seed: int, directory: Path) -> list[str]:
    """Kill a verb at random times, each time resume it; return what was wrong."""
    arguments = VERBS[verb]
    whole = directory / "whole"
    whole.mkdir()
    os.chdir(whole)
    succeeded(*arguments)  # here, so that those that are forked need not import anything
    expected = contents(whole)
    begin = time.monotonic()
    number = done(directory / "counted", "all", *arguments)
    duration = time.monotonic() - begin
    chance = random.Random(seed)
    wrong, resumed = [], 0
    for index in range(times):
        here = directory / str(index)
        child = started(here, "killed", *arguments)
        time.sleep(chance.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
        status_of(child)
        found = {path.name for path in here.iterdir()} if here.is_dir() else set()
        named = any(name.endswith("-naming") or not name.startswith(".") for name in found)  # it was at its end
        left = not named and any(name.endswith("-journal") for name in found)
        again = done(here, "resumed", *arguments, "--resume --overwrite")
        if contents(here) != expected:
            wrong.append(f"{index}: {sorted(contents(here))}")
        first = begun(here, "killed")
        if left and first + again > number + WORKERS:
            wrong.append(f"{index}: {first} + {again} tasks of {number}")
        resumed += again < number
        shutil.rmtree(here)
    return wrong if resumed or times < 10 else [*wrong, f"none of {times} was gone on with"]


# --- what fails, and what has changed


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.engine import workers, write
    from zckpt.storage import journal

    for module in (workers, write):
        monkeypatch.setattr(module, "BATCH_NBYTES", 1 << 9)
    monkeypatch.setattr(journal, "LEAST_NBYTES", 0)


def at_write(patched: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Do something before a run's write of that number, which may be to raise."""
    numbers = itertools.count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            if next(numbers) == number:
                act()
            return call(*arguments)

        return counting

    for name in ("pwrite", "pwritev"):
        patched.setattr(os, name, counted(getattr(os, name)))


def fail(number: int) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return act


MODEL = "m.safetensors"
COMMAND = f"consolidate s2_bf16_dp2 out/{MODEL}"
PARTIAL, JOURNAL = Path(f"out/.{MODEL}.zckpt-partial"), Path(f"out/.{MODEL}.zckpt-journal")
REMAINS = sorted([PARTIAL.name, JOURNAL.name])


@pytest.fixture
def out(small_tasks) -> Path:
    """A directory to write to in small tasks, beside a copy of a source."""
    copy("s2_bf16_dp2")
    Path("out").mkdir()
    return Path("out")


def failed_writing(command: str = COMMAND, *, number: int = errno.ENOSPC, at: int = 10) -> str:
    """Let a run fail at its tenth write, or another; return what it says."""
    with pytest.MonkeyPatch.context() as patched:
        at_write(patched, at, fail(number))
        return refused(4, command)


def assert_whole(*, options: str = "") -> None:
    """The target is what a run makes that nothing ended."""
    if not Path(MODEL).exists():
        succeeded(f"consolidate {SOURCE} {MODEL} --no-checksums {options}")
    assert Path("out", MODEL).read_bytes() == Path(MODEL).read_bytes()


def test_a_remote_source_is_known_by_its_url(out):
    """And not by the path that it has in one process."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.put("s2_bf16_dp2", "/resumed", recursive=True)
    command = f"consolidate memory://resumed out/{MODEL}"
    assert "--resume continues" in failed_writing(command)
    assert "zckpt-remote" not in refused(4, COMMAND, "--resume", words="from other files")
    succeeded(command, "--resume")
    assert_whole()
    failed_writing(f"{command} --overwrite")
    file = next(name for name in memory.find("/resumed") if "zero_pp_rank_0_" in name)
    memory.pipe(file, memory.cat(file))
    refused(4, command, "--resume --overwrite", words="has changed since: memory://")


class InterruptedReporter(SilentReporter):
    """Interrupts a run when some of it is done."""

    def __init__(self) -> None:
        self.left = 8

    def advance(self, nbytes: int) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_what_other_processes_have_done_is_gone_on_with(out, monkeypatch):
    from zckpt.engine import workers

    monkeypatch.setattr(workers, "LEAST_TASK_NBYTES", 1 << 10)
    paths = "s2_bf16_dp2", out / MODEL
    with ProcessPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt, match="bytes are written and kept in"):
        zckpt.consolidate(*paths, executor=pool, reporter=InterruptedReporter())
    assert names_in(out) == REMAINS
    with refusing(TargetError, "did not finish"):
        zckpt.consolidate(*paths)
    with ProcessPoolExecutor(2) as pool:
        zckpt.consolidate(*paths, executor=pool, resume=True)
    assert_whole()
    assert names_in(out) == [MODEL]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_keeps_what_is_done_and_says_how_to_go_on(number, out):
    said = failed_writing(number=number)
    assert f"cannot be written: found {os.strerror(number)}; " in said
    assert f"bytes are written and kept in {PARTIAL.name}: --resume continues with them" in said
    assert names_in(out) == REMAINS
    refused(4, COMMAND, words=("did not finish", "--resume", "--restart", f"in {PARTIAL.name}"))
    assert names_in(out) == REMAINS
    succeeded(COMMAND, "--resume")
    assert_whole()
    assert names_in(out) == [MODEL]


def test_restart_begins_anew(out):
    failed_writing()
    succeeded(COMMAND, "--restart --dtype keep")
    assert_whole(options="--dtype keep")
    assert names_in(out) == [MODEL]
    succeeded("consolidate s2_bf16_dp2 out/all.safetensors")
    failed_writing(f"{COMMAND} --slots all --overwrite")
    succeeded(COMMAND, "--restart --overwrite")
    assert names_in(out) == ["all.safetensors", MODEL]  # and nothing of the optimizer, which is not written now
    refused(2, "consolidate s2_bf16_dp2 out/n.pt --restart --resume", words="expected one of them")


@pytest.mark.parametrize("options", ["", "--no-checksums"])
def test_a_source_that_cannot_be_read_for_a_while(options, out, monkeypatch):
    from zckpt.storage import files

    with monkeypatch.context() as patched:
        real, bad = files.os.preadv, itertools.count()

        def preadv(*arguments: Any):
            if names_in(out) and next(bad) >= 5:
                fail(errno.EIO)()
            return real(*arguments)

        patched.setattr(files.os, "preadv", preadv)
        refused(3, COMMAND, options, words=("cannot be read: found Input/output error; ", "--resume continues"))
    succeeded(COMMAND, "--resume", options)
    assert_whole()
    assert names_in(out) == [MODEL]


@pytest.mark.usefixtures("out")
def test_short_reads_and_writes_are_only_slow(monkeypatch):
    read, write = os.preadv, os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr(
            os, "preadv", lambda file, buffers, at: read(file, [buffers[0][: 1 + len(buffers[0]) // 2]], at)
        )
        patched.setattr(os, "pwrite", lambda file, data, at: write(file, data[: 1 + len(data) // 2], at))
        patched.setattr(os, "pwritev", lambda file, views, at: write(file, views[0][: 1 + len(views[0]) // 2], at))
        succeeded(COMMAND)
    assert_whole()


@pytest.mark.parametrize("name", ["*rank_0_*_optim_states.pt", "*rank_1_*_model_states.pt"])  # of the latter, no tensor
def test_a_source_that_has_changed_is_not_gone_on_with(name, out):
    source, command = copy("s3_bf16_dp2_nofrozen"), f"consolidate s3_bf16_dp2_nofrozen out/{MODEL}"
    failed_writing(command)
    file = next(source.rglob(name))
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    words = ("started from a file that has changed since: /", f"{file}; --restart starts over")
    refused(4, command, "--resume", words=words)
    assert names_in(out) == REMAINS


@pytest.mark.parametrize("options", ["", "--no-checksums"])
def test_a_source_that_changes_while_it_is_read(options, out, monkeypatch):
    """Where it states no checksums, too: nobody can say which of its bytes belong together."""
    file = next(Path("s2_bf16_dp2").rglob("*zero_pp_rank_0_*"))
    at_write(monkeypatch, 10, lambda: os.utime(file, ns=(0, file.stat().st_mtime_ns + 1)))
    refused(3, COMMAND, options, words=(str(file), "changed while it was read"))
    assert names_in(out) == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--dtype bfloat16", "dtype was not given and is bfloat16"),
        ("--no-checksums", "checksums was not given and is none"),
        ("--add-prefix x.", "add_prefix was not given and is x."),
    ],
)
def test_another_run_is_not_gone_on_with(options, word, out):
    failed_writing()
    words = f"started with other options: {word}; --restart starts over"
    refused(4, COMMAND, "--resume", options, words=words)
    assert names_in(out) == REMAINS


def test_bytes_that_a_loss_of_power_took_are_written_again(out):
    failed_writing()
    os.truncate(PARTIAL, PARTIAL.stat().st_size // 2)
    lines = JOURNAL.read_bytes()
    JOURNAL.write_bytes(lines.replace(b"0", b"1", 1000)[:100] + lines[100:-7])  # no purpose: nothing to go on with
    succeeded(COMMAND, "--resume")
    assert_whole()
    (out / MODEL).unlink()
    failed_writing()
    PARTIAL.write_bytes(bytes(PARTIAL.stat().st_size))
    JOURNAL.write_bytes(JOURNAL.read_bytes()[:-7])
    succeeded(COMMAND, "--resume")
    assert_whole()


@pytest.mark.usefixtures("out")
def test_what_could_be_anybodys_is_not_written_into():
    failed_writing()
    precious = Path("precious")
    precious.hardlink_to(PARTIAL)
    before = precious.read_bytes()
    refused(4, COMMAND, "--resume", words=("with several names", "--restart"))
    succeeded(COMMAND, "--restart")
    assert precious.read_bytes() == before


def test_a_link_in_a_directory_that_is_gone_on_with(out, tmp_path):
    command, precious = "reshard s2_bf16_dp2 out/r --world-size 3", tmp_path / "precious"
    precious.write_text("precious")
    failed_writing(command)
    partial = out / ".r.zckpt-partial"
    file = files_in(partial)[0]
    file.unlink()
    file.symlink_to(precious)
    refused(4, command, "--resume", words=(str(file), "was changed since a run left it"))
    assert precious.read_text() == "precious"
    file.unlink()
    (partial / "stranger").write_text("none of the target's")
    succeeded(command, "--resume")
    succeeded("reshard s2_bf16_dp2 whole --world-size 3")
    assert contents("out/r") == contents("whole")
    assert names_in(out) == ["r"]


def test_a_disk_that_fails_to_sync_is_not_trusted(out, monkeypatch):
    """The system says so once, and a later sync of the same bytes says that all is well."""
    failing = iter([fail(errno.EIO)])
    monkeypatch.setattr(os, "fsync", lambda file, real=os.fsync: next(failing, real)(file))
    refused(4, COMMAND, words="nothing was left behind")
    assert names_in(out) == []


def test_resume_without_remains_begins(out):
    succeeded(COMMAND, "--resume")
    assert_whole()


def test_little_work_is_not_kept():
    copy("s2_bf16_dp2")
    assert "nothing was left behind" in failed_writing(at=0)
    assert not Path("out").exists()


# --- kills


@pytest.mark.parametrize("verb", KILLED)
def test_killed_at_random_times_and_gone_on_with(verb, tmp_path):
    assert forked(kill_and_resume, verb, 2, 1, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("verb", VERBS)
def test_killed_a_hundred_times(verb, tmp_path):
    assert forked(kill_and_resume, verb, 100, 2, tmp_path, timeout=600) == []


@pytest.mark.parametrize("options", ["", "--restart"])
def test_a_link_at_the_journals_name_is_named(options, out, tmp_path):
    if options:
        failed_writing()
        JOURNAL.unlink()
    JOURNAL.symlink_to(tmp_path / "precious")
    words = f"{JOURNAL.name}: cannot be created: found a symbolic link in its place; remove it"
    refused(4, COMMAND, options, words=words)
    assert names_in(out) == [JOURNAL.name]
    assert not (tmp_path / "precious").exists()
