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
from tests.cli.console import FIXTURES, copy, refused, run, succeeded
from tests.folders import contents
from tests.gloo import forked
from tests.refusals import refusing
from zckpt.engine import SilentReporter
from zckpt.errors import TargetError

SOURCE, OTHER = FIXTURES / "s2_bf16_dp2", FIXTURES / "s2_bf16_dp3"
ADAPTER = Path(__file__).parents[1] / "operations" / "adapters" / "of_s2_bf16_dp2"
VERBS: dict[str, list[object]] = {
    "consolidate": ["consolidate", SOURCE, "m.safetensors", "--slots", "all"],
    "consolidate-torch": ["consolidate", SOURCE, "m.pt", "--dtype", "bfloat16"],
    "reshard": ["reshard", SOURCE, "r", "--world-size", "3"],
    "reshard-3": ["reshard", FIXTURES / "s3_bf16_dp2", "r", "--world-size", "3"],
    "universal": ["convert", SOURCE, "u", "--to", "universal"],
    "dcp": ["convert", SOURCE, "dcp", "--to", "dcp", "--fingerprint"],
    "strip": ["strip", SOURCE, "s", "--padding"],
    "sanitize": ["sanitize", SOURCE, "clean"],
    "average": ["average", SOURCE, OTHER, "--target", "m", "--weights", "1,3", "--slots", "all"],
    "merge-adapter": ["merge-adapter", SOURCE, ADAPTER, "m.safetensors"],
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
        again = done(here, "resumed", *arguments, "--resume", "--overwrite")
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


def after(number: int, act: Callable[[], object], call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does something before its call of that number, which may be to raise."""
    count = itertools.count()

    def counting(*arguments: Any) -> Any:
        if next(count) == number:
            act()
        return call(*arguments)

    return counting


def at_write(patched: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Do something before a run's write of that number."""
    count = after(number, act, lambda: None)
    for name in ("pwrite", "pwritev"):
        patched.setattr(os, name, counted(count, getattr(os, name)))


def counted(count: Callable[[], object], call: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*arguments: Any) -> Any:
        count()
        return call(*arguments)

    return counting


def fail(number: int) -> Callable[[], object]:
    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


MODEL = "m.safetensors"
REMAINS = {f".{MODEL}.zckpt-partial", f".{MODEL}.zckpt-journal"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return copy("s2_bf16_dp2", tmp_path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def failed_writing(source: Path | str, out: Path, *arguments: object, number: int = errno.ENOSPC, at: int = 10) -> str:
    """Let a run fail at its tenth write, or another; return what it says."""
    with pytest.MonkeyPatch.context() as patched:
        at_write(patched, at, fail(number))
        return refused(4, "consolidate", source, out / MODEL, *arguments)


def expected(source: Path, out: Path, *arguments: object) -> bytes:
    whole = out.parent / f"whole-{MODEL}"
    succeeded("consolidate", source, whole, "--no-checksums", *arguments)
    return whole.read_bytes()


@pytest.mark.usefixtures("small_tasks")
def test_a_remote_source_is_known_by_its_url(source, out):
    """And not by the path that it has in one process."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.put(str(source), "/resumed", recursive=True)
    url = "memory://resumed"
    assert "--resume continues" in failed_writing(url, out)
    said = refused(4, "consolidate", source, out / MODEL, "--resume", words=("from other files",))
    assert "zckpt-remote" not in said
    succeeded("consolidate", url, out / MODEL, "--resume")
    assert (out / MODEL).read_bytes() == expected(source, out)
    failed_writing(url, out, "--overwrite")
    file = next(name for name in memory.find("/resumed") if "zero_pp_rank_0_" in name)
    memory.pipe(file, memory.cat(file))
    words = ("has changed since: memory://",)
    refused(4, "consolidate", url, out / MODEL, "--resume", "--overwrite", words=words)


class InterruptedReporter(SilentReporter):
    """Interrupts a run when some of it is done."""

    def __init__(self) -> None:
        self.left = 8

    def advance(self, nbytes: int) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("small_tasks")
def test_what_other_processes_have_done_is_gone_on_with(source, out, monkeypatch):
    from zckpt.engine import tasks

    monkeypatch.setattr(tasks, "LEAST_TASK_NBYTES", 1 << 10)
    with ProcessPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt, match="bytes are written and kept in"):
        zckpt.consolidate(source, out / MODEL, executor=pool, reporter=InterruptedReporter())
    assert names_in(out) == REMAINS
    with refusing(TargetError, "did not finish"):
        zckpt.consolidate(source, out / MODEL)
    with ProcessPoolExecutor(2) as pool:
        zckpt.consolidate(source, out / MODEL, executor=pool, resume=True)
    assert (out / MODEL).read_bytes() == expected(source, out)
    assert names_in(out) == {MODEL}


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_keeps_what_is_done_and_says_how_to_go_on(number, source, out):
    said = failed_writing(source, out, number=number)
    assert f"cannot be written: found {os.strerror(number)}; " in said
    assert f"bytes are written and kept in .{MODEL}.zckpt-partial: --resume continues with them" in said
    assert names_in(out) == REMAINS
    said = refused(4, "consolidate", source, out / MODEL, words=("did not finish", "--resume", "--restart"))
    assert f"in .{MODEL}.zckpt-partial" in said
    assert names_in(out) == REMAINS
    succeeded("consolidate", source, out / MODEL, "--resume")
    assert (out / MODEL).read_bytes() == expected(source, out)
    assert names_in(out) == {MODEL}


@pytest.mark.usefixtures("small_tasks")
def test_restart_begins_anew(source, out):
    failed_writing(source, out)
    succeeded("consolidate", source, out / MODEL, "--restart", "--dtype", "keep")
    assert (out / MODEL).read_bytes() == expected(source, out, "--dtype", "keep")
    assert names_in(out) == {MODEL}
    succeeded("consolidate", source, out / "all.safetensors")
    failed_writing(source, out, "--slots", "all", "--overwrite")
    succeeded("consolidate", source, out / MODEL, "--restart", "--overwrite")
    assert names_in(out) == {MODEL, "all.safetensors"}  # and nothing of the optimizer, which is not written now
    refused(2, "consolidate", source, out / "n.pt", "--restart", "--resume", words=("expected one of them",))


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("options", [(), ("--no-checksums",)])
def test_a_source_that_cannot_be_read_for_a_while(options, source, out, monkeypatch):
    from zckpt.storage import files

    with monkeypatch.context() as patched:
        real = files.os.preadv
        begun = write_begun(out)
        bad = itertools.count()

        def preadv(*arguments: Any):
            if begun() and next(bad) >= 5:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments)

        patched.setattr(files.os, "preadv", preadv)
        said = refused(3, "consolidate", source, out / MODEL, *options)
    assert "cannot be read: found Input/output error; " in said
    assert "--resume continues" in said
    succeeded("consolidate", source, out / MODEL, "--resume", *options)
    assert (out / MODEL).read_bytes() == expected(source, out)
    assert names_in(out) == {MODEL}


def write_begun(out: Path) -> Callable[[], bool]:
    return lambda: bool(names_in(out))


@pytest.mark.usefixtures("small_tasks")
def test_short_reads_and_writes_are_only_slow(source, out, monkeypatch):
    whole = expected(source, out)
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, at: read(file, [buffers[0][: 1 + len(buffers[0]) // 2]], at)
    )
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[: 1 + len(data) // 2], at))
    monkeypatch.setattr(os, "pwritev", lambda file, views, at: write(file, views[0][: 1 + len(views[0]) // 2], at))
    succeeded("consolidate", source, out / MODEL)
    assert (out / MODEL).read_bytes() == whole


def optimizer_file(source: Path) -> Path:
    return next(source.rglob("*zero_pp_rank_0_*"))


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("name", ["*rank_0_*_optim_states.pt", "*rank_1_*_model_states.pt"])  # of the latter, no tensor
def test_a_source_that_has_changed_is_not_gone_on_with(name, out, tmp_path):
    source = copy("s3_bf16_dp2_nofrozen", tmp_path)
    failed_writing(source, out)
    file = next(source.rglob(name))
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    said = refused(4, "consolidate", source, out / MODEL, "--resume")
    assert f"started from a file that has changed since: {file}; --restart starts over" in said
    assert names_in(out) == REMAINS


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("before_checks", [False, True])
def test_a_source_that_changes_while_it_is_read(before_checks, source, out, monkeypatch):
    """Where it states no checksums, too: nobody can say which of its bytes belong together."""
    file = optimizer_file(source)

    def change():
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))

    at_write(monkeypatch, 10, change)
    options = ("--no-checksums",) if before_checks else ()
    refused(3, "consolidate", source, out / MODEL, *options, words=(str(file), "changed while it was read"))
    assert not names_in(out)


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--dtype", "bfloat16"), "dtype was not given and is bfloat16"),
        (("--no-checksums",), "checksums was not given and is none"),
        (("--add-prefix", "x."), "add_prefix was not given and is x."),
    ],
)
def test_another_run_is_not_gone_on_with(options, word, source, out):
    failed_writing(source, out)
    said = refused(4, "consolidate", source, out / MODEL, "--resume", *options)
    assert f"started with other options: {word}; --restart starts over" in said
    assert names_in(out) == REMAINS


@pytest.mark.usefixtures("small_tasks")
def test_bytes_that_a_loss_of_power_took_are_written_again(source, out):
    failed_writing(source, out)
    with (out / f".{MODEL}.zckpt-partial").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) // 2)
    journal = out / f".{MODEL}.zckpt-journal"
    lines = journal.read_bytes()
    journal.write_bytes(lines.replace(b"0", b"1", 1000)[:100] + lines[100:-7])  # no purpose: nothing to go on with
    whole = expected(source, out)
    succeeded("consolidate", source, out / MODEL, "--resume")
    assert (out / MODEL).read_bytes() == whole
    (out / MODEL).unlink()
    failed_writing(source, out)
    partial = out / f".{MODEL}.zckpt-partial"
    partial.write_bytes(bytes(partial.stat().st_size))
    journal.write_bytes(journal.read_bytes()[:-7])
    succeeded("consolidate", source, out / MODEL, "--resume")
    assert (out / MODEL).read_bytes() == whole


@pytest.mark.usefixtures("small_tasks")
def test_what_could_be_anybodys_is_not_written_into(source, out, tmp_path):
    failed_writing(source, out)
    os.link(out / f".{MODEL}.zckpt-partial", tmp_path / "precious")
    precious = (tmp_path / "precious").read_bytes()
    refused(4, "consolidate", source, out / MODEL, "--resume", words=("with several names", "--restart"))
    succeeded("consolidate", source, out / MODEL, "--restart")
    assert (tmp_path / "precious").read_bytes() == precious


@pytest.mark.usefixtures("small_tasks")
def test_a_link_in_a_directory_that_is_gone_on_with(source, out, tmp_path):
    (tmp_path / "precious").write_text("precious")
    with pytest.MonkeyPatch.context() as patched:
        at_write(patched, 10, fail(errno.ENOSPC))
        refused(4, "reshard", source, out / "r", "--world-size", 3)
    partial = out / ".r.zckpt-partial"
    file = next(path for path in partial.rglob("*") if path.is_file())
    file.unlink()
    file.symlink_to(tmp_path / "precious")
    refused(
        4,
        "reshard",
        source,
        out / "r",
        "--world-size",
        3,
        "--resume",
        words=(str(file), "was changed since a run left it"),
    )
    assert (tmp_path / "precious").read_text() == "precious"
    file.unlink()
    (partial / "stranger").write_text("none of the target's")
    succeeded("reshard", source, out / "r", "--world-size", 3, "--resume")
    succeeded("reshard", source, tmp_path / "whole", "--world-size", 3)
    assert contents(out / "r") == contents(tmp_path / "whole")
    assert names_in(out) == {"r"}


@pytest.mark.usefixtures("small_tasks")
def test_a_disk_that_fails_to_sync_is_not_trusted(source, out, monkeypatch):
    """The system says so once, and a later sync of the same bytes says that all is well."""
    monkeypatch.setattr(os, "fsync", after(0, fail(errno.EIO), os.fsync))
    said = refused(4, "consolidate", source, out / MODEL)
    assert "nothing was left behind" in said
    assert not names_in(out)


def test_resume_without_remains_begins(source, out):
    succeeded("consolidate", source, out / MODEL, "--resume")
    assert (out / MODEL).read_bytes() == expected(source, out)


def test_little_work_is_not_kept(source, out):
    assert "nothing was left behind" in failed_writing(source, out, at=0)
    assert not names_in(out)


# --- kills


@pytest.mark.parametrize("verb", KILLED)
def test_killed_at_random_times_and_gone_on_with(verb, tmp_path):
    assert forked(kill_and_resume, verb, 2, 1, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("verb", VERBS)
def test_killed_a_hundred_times(verb, tmp_path):
    assert forked(kill_and_resume, verb, 100, 2, tmp_path, timeout=600) == []


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("arguments", [[], ["--restart"]])
def test_a_link_at_the_journals_name_is_named(arguments, source, out, tmp_path):
    if arguments:
        failed_writing(source, out)
        (out / f".{MODEL}.zckpt-journal").unlink()
    (out / f".{MODEL}.zckpt-journal").symlink_to(tmp_path / "precious")
    said = refused(4, "consolidate", source, out / MODEL, *arguments)
    assert f".{MODEL}.zckpt-journal: cannot be created: found a symbolic link in its place; remove it" in said
    assert names_in(out) == {f".{MODEL}.zckpt-journal"}
    assert not (tmp_path / "precious").exists()
