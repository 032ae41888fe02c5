"""A target appears whole or not at all: whatever is there already, whatever goes wrong, whoever else is writing."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.folders import names_in
from tests.gloo import WorkerError, forked
from tests.plans import file_of, hole_of, in_file, slot_of, write_directory
from tests.refusals import refusing
from zckpt.engine import SilentReporter, workers
from zckpt.engine import write as engine_write
from zckpt.engine.plan import Plan, plan
from zckpt.engine.targets import TargetFile
from zckpt.errors import TargetError, TargetExistsError, ZckptError
from zckpt.operations.target import write_target
from zckpt.storage.durable import written
from zckpt.storage.ownership import Owned, partial_name

BATCH_NBYTES = 1 << 16
NBYTES = 3 * BATCH_NBYTES
"""Enough for several batches, so that something can go wrong between them."""

OLD = b"the old target"

ANYTHING = Owned(lambda _: True)
"""A format that has files of any name of its own."""


def small_batches(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    for module in (workers, engine_write):
        set_attribute(module, "BATCH_NBYTES", BATCH_NBYTES)


@pytest.fixture(autouse=True)
def of_small_batches(monkeypatch) -> None:
    small_batches(monkeypatch.setattr)


CONTENT = bytes(i * 7 % 251 for i in range(251)) * (NBYTES // 251 + 1)


def copying(*names: str) -> Plan:
    """Return a plan that copies one source, which it makes, to files of these names."""
    Path("source").write_bytes(CONTENT[:NBYTES])
    slot = slot_of(in_file("source", (NBYTES,), "uint8"))
    return plan([file_of(hole_of(slot), name=name) for name in names])


def write(made: Plan, target: str, *, directory: bool = False, **options: object) -> None:
    if directory:
        write_directory(made, target, owned=ANYTHING, **options)
    else:
        write_target(made, target, **options)


def listing(directory: str = ".") -> list[str]:
    """Return all names in a directory, hidden ones too, but for the source."""
    return [name for name in names_in(directory) if name != "source"]


def is_whole(path: str) -> bool:
    return Path(path).read_bytes() == CONTENT[:NBYTES]


class Raises(SilentReporter):
    """Raises an exception at a certain moment."""

    def __init__(self, moment: str, error: BaseException) -> None:
        def trouble(*_: object) -> None:
            raise error

        setattr(self, moment, trouble)


class Begins(SilentReporter):
    """Does something while a run writes."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then

    def begin(self, nbytes: int) -> None:
        self.then()


# --- what is there already --------------------------------------------------------------------------------------


@pytest.fixture
def old(directory) -> Path:
    """The file that is the old target, or in it."""
    path = Path("t/below/old" if directory else "t")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(OLD)
    return path


def assert_kept(old: Path) -> None:
    assert old.read_bytes() == OLD
    assert listing() == ["t"]


def test_what_is_there_is_refused_and_untouched(old, directory):
    for new in (False, True):
        with refusing(TargetExistsError, r"t: already exists; .*--overwrite"):
            write(copying("t"), "t", directory=new)
    with refusing(TargetExistsError, f"be replaced: .*found a {'directory' if directory else 'file'}"):
        write(copying("t"), "t", directory=not directory, overwrite=True)
    assert_kept(old)


def test_one_existing_target_of_several_is_refused_before_anything_is_written():
    Path("b").write_bytes(OLD)
    with pytest.raises(TargetExistsError):
        write_target(copying("a", "b"), "b")
    assert listing() == ["b"]


def test_link_to_nothing_counts_as_there():
    Path("t").symlink_to("nowhere")
    with pytest.raises(TargetExistsError):
        write_target(copying("t"), "t")
    assert listing() == ["t"]


@pytest.mark.usefixtures("old")
def test_overwriting_replaces_the_old_target_as_a_whole(directory):
    write(copying("t"), "t", directory=directory, overwrite=True)
    assert listing() == ["t"]
    assert not directory or listing("t") == ["t"]
    assert is_whole("t/t" if directory else "t")


def test_overwriting_that_fails_keeps_the_old_target(old, directory):
    made = copying("t")
    os.truncate("source", 10)
    with refusing(ZckptError, "ends too early"):
        write(made, "t", directory=directory, overwrite=True)
    assert_kept(old)


def test_target_that_appears_while_a_run_writes_is_not_replaced_unasked(directory):
    other = Begins(lambda: Path("t").mkdir() if directory else Path("t").write_bytes(OLD))
    with pytest.raises(TargetExistsError):
        write(copying("t"), "t", directory=directory, reporter=other)
    assert listing() == ["t"]
    assert listing("t") == [] if directory else Path("t").read_bytes() == OLD


# --- places where nothing can be written ------------------------------------------------------------------------


def test_directories_above_are_made_and_stay_only_if_the_target_does(directory):
    fails = Raises("advance", RuntimeError())
    with pytest.raises(RuntimeError):
        write(copying("t"), "one/two/t", directory=directory, reporter=fails)
    assert listing() == []
    write(copying("t"), "one/two/t", directory=directory)
    assert listing("one") == ["two"]
    assert listing("one/two") == ["t"]


def test_parent_that_is_a_file_is_refused(directory):
    Path("file").write_bytes(OLD)
    with refusing(TargetError, "expected a directory"):
        write(copying("t"), "file/t", directory=directory)
    assert Path("file").read_bytes() == OLD


@pytest.mark.parametrize("target", ["x" * 300, "x" * 300 + "/t"], ids=["name", "parent"])
def test_name_that_is_too_long_is_refused(target, directory):
    with refusing(TargetError, "File name too long"):
        write(copying("t"), target, directory=directory)
    assert listing() == []


@pytest.mark.parametrize("target", [".", "/", "..", "a/.."])
def test_target_without_a_name_of_its_own_is_refused(target):
    for directory in (False, True):
        with pytest.raises(TargetError):
            write(copying("t"), target, directory=directory, overwrite=True)
    assert listing() == []


def test_device_that_takes_no_files_is_refused():
    with pytest.raises(TargetError):
        write_target(copying("t"), "/proc/self/t")


def test_file_system_without_room_is_refused_before_anything_is_written():
    huge = plan([TargetFile("t", 1 << 60)])
    with refusing(TargetError, "not enough space: expected 1152921504606846976 bytes free"):
        write_target(huge, "t")
    assert listing() == []


def fill_up(directory: bool) -> str:
    """Write in the middle of a run to a disk for which a limit on the size of files stands; return what is said."""
    small_batches()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    made = copying("t")
    resource.setrlimit(resource.RLIMIT_FSIZE, (BATCH_NBYTES, BATCH_NBYTES))
    with pytest.raises(TargetError) as error:
        write(made, "t", directory=directory)
    return str(error.value)


def test_disk_that_fills_up_leaves_nothing_behind(directory):
    found = forked(fill_up, directory)
    assert found == "t: cannot be written: found File too large; nothing was left behind"
    assert listing() == []


def test_what_the_system_says_is_an_error_about_the_target_whoever_writes(directory, monkeypatch):
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    owned = ANYTHING if directory else None
    with (
        refusing(TargetError, r"t: cannot be written: found Input/output error; nothing was left behind"),
        written([Path("t")], overwrite=False, owned=owned),
    ):
        pass
    assert listing() == []


# --- runs that end too early ------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["begin", "advance", "end"])
@pytest.mark.parametrize(
    "error", [RuntimeError("bar"), KeyboardInterrupt(), SystemExit(1)], ids=lambda e: type(e).__name__
)
def test_whatever_is_raised_leaves_nothing_behind(error, moment, directory):
    with pytest.raises(type(error)):
        write(copying("t"), "t", directory=directory, reporter=Raises(moment, error))
    assert listing() == []


class Killed(SilentReporter):
    """Kills its own process between two batches."""

    def advance(self, nbytes: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def write_and_be_killed(directory: bool) -> None:
    small_batches()
    write(copying("t"), "t", directory=directory, overwrite=True, reporter=Killed())


@pytest.mark.parametrize("is_old", [False, True])
def test_killed_run_leaves_no_target_or_the_old_one_and_the_next_one_cleans_up(is_old, directory, request):
    """Its lock does not outlive it."""
    old = request.getfixturevalue("old") if is_old else None
    with pytest.raises(WorkerError, match="ended without a result"):
        forked(write_and_be_killed, directory)
    assert listing() == [".t.zckpt-partial", *(["t"] if is_old else [])]
    assert old is None or old.read_bytes() == OLD
    write(copying("t"), "t", directory=directory, overwrite=is_old)
    assert listing() == ["t"]
    assert is_whole("t/t" if directory else "t")


def test_what_a_killed_run_left_is_emptied_before_it_is_used():
    partial_name(Path("t")).write_bytes(OLD)
    with written([Path("t")], overwrite=False) as [partial]:
        assert partial.read_bytes() == b""


def test_what_a_run_may_have_left_in_its_directory_is_removed_and_all_else_is_refused():
    partial = partial_name(Path("t"))
    (partial / "below/it").mkdir(parents=True)
    (partial / "file").write_bytes(OLD)
    (partial / ".other.zckpt-partial").write_bytes(OLD)
    with refusing(TargetError, r"holds files that zckpt did not write.* found file; move it away"):
        write_directory(copying("new"), "t", owned=Owned(lambda name: name == "new"))
    Path("elsewhere").mkdir()
    Path("elsewhere/keep").write_bytes(OLD)
    (partial / "link").symlink_to(Path("elsewhere").absolute())
    with refusing(TargetError, "found link; move it away"):
        write_directory(copying("new"), "t", owned=ANYTHING)
    assert listing(partial) == [".other.zckpt-partial", "below", "file", "link"]
    (partial / "link").unlink()
    write_directory(copying("new"), "t", owned=ANYTHING)
    assert listing("t") == ["new"]
    assert listing("elsewhere") == ["keep"]


def test_old_directory_of_a_run_that_was_killed_after_the_rename_is_removed():
    for name in (".t.zckpt-old", "t"):
        Path(name).mkdir()
        Path(name, "file").write_bytes(OLD)
    write_directory(copying("new"), "t", overwrite=True, owned=ANYTHING)
    assert listing() == ["t"]
    assert listing("t") == ["new"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_old_directory_of_a_run_that_was_killed_before_the_rename_is_the_target_again(overwrite):
    """It is the only one there is; whether it is replaced is for this run to say."""
    Path(".t.zckpt-old").mkdir()
    Path(".t.zckpt-old/file").write_bytes(OLD)
    made = copying("new")
    if overwrite:
        write_directory(made, "t", overwrite=True, owned=ANYTHING)
    else:
        with pytest.raises(TargetExistsError):
            write_directory(made, "t")
    assert listing() == ["t"]
    assert listing("t") == (["new"] if overwrite else ["file"])


def test_partial_name_that_is_taken_by_something_else_is_refused():
    partial_name(Path("t")).mkdir()
    with refusing(TargetError, r"\.t\.zckpt-partial: cannot be created"):
        write_target(copying("t"), "t")
    partial_name(Path("u")).write_bytes(b"")
    with refusing(TargetError, r"\.u\.zckpt-partial: cannot be created"):
        write_directory(copying("t"), "u")


# --- several runs at once ---------------------------------------------------------------------------------------


def write_until_told(here: Path, signs: Path) -> None:
    """Write to the file `t` and the directory `d`, and say so; end when that is allowed."""

    def wait() -> None:
        (signs / "writing").touch()
        while not (signs / "told").exists():
            time.sleep(0.01)

    os.chdir(here)
    made = copying("t")
    both = Begins(lambda: write_directory(made, "d", reporter=Begins(wait)))
    write_target(made, "t", reporter=both)


def processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("forkserver"))


def test_second_run_to_one_target_is_refused_and_does_not_disturb_the_first(tmp_path, tmp_path_factory):
    """Nor does it leave anything of another target; a run to another target alone is not refused."""
    signs = tmp_path_factory.mktemp("signs")
    with processes(1) as pool:
        other = pool.submit(write_until_told, tmp_path, signs)
        while not (signs / "writing").exists() and not other.done():
            time.sleep(0.01)
        try:
            for target, overwrite in product(["t", "d"], [False, True]):
                with refusing(TargetError, "another run is writing to this target"):
                    write(copying("t"), target, directory=target == "d", overwrite=overwrite)
            with refusing(TargetError, "another run"):
                write_target(copying("a", "t"), "t")
            assert listing() == [".d.zckpt-partial", ".t.zckpt-partial"]
            write_target(copying("u"), "u")
        finally:
            (signs / "told").touch()
        other.result()
    assert listing() == ["d", "t", "u"]
    assert all(is_whole(name) for name in ("t", "d/t", "u"))


def test_one_target_given_twice_is_refused():
    with refusing(TargetError, "another run"):
        write_target(copying("t", "t"), "t")
    assert listing() == []


def test_run_that_ends_just_before_ours_takes_the_lock_keeps_its_target(directory, monkeypatch):
    """Between opening and locking the partial name, the other run renames what we opened to the target."""
    target, partial = Path("t"), partial_name(Path("t"))
    flock = fcntl.flock

    def later(descriptor: int, operation: int) -> None:
        if not target.exists():
            (partial / "file" if directory else partial).write_bytes(OLD)
            partial.replace(target)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", later)
    with pytest.raises(TargetExistsError):
        write(copying("new"), target, directory=directory)
    assert (target / "file" if directory else target).read_bytes() == OLD
    assert listing() == ["t"]


def test_run_that_fails_just_before_ours_takes_the_lock_leaves_us_a_new_one(directory, monkeypatch):
    """Between opening and locking, the other run removes what we opened: a lock on it would keep nobody out."""
    partial = partial_name(Path("t"))
    flock, removed = fcntl.flock, []

    def later(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(partial.rmdir() if directory else partial.unlink())
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", later)
    with written([Path("t")], overwrite=False, owned=ANYTHING if directory else None) as [found]:
        assert removed
        with refusing(TargetError, "another run"):
            write(copying("t"), "t", directory=directory)
        (found / "file" if directory else found).write_bytes(OLD)
    assert Path("t/file" if directory else "t").read_bytes() == OLD


def write_often(own: str, here: Path) -> None:
    os.chdir(here)
    for _ in range(60):
        with suppress(TargetError), written([Path("t")], overwrite=True) as [partial]:
            partial.write_text(own * 1000)
        with suppress(TargetError), written([Path("d")], overwrite=True, owned=Owned("file".__eq__)) as [partial]:
            (partial / "file").write_text(own * 1000)


def test_runs_that_race_for_a_target_never_leave_it_empty_or_mixed(tmp_path):
    """Locking and renaming are several steps; whatever their order, the target is one run's, whole."""
    with processes(4) as pool:
        runs = [pool.submit(write_often, own, tmp_path) for own in "abcd"]
        seen = set()
        while not all(run.done() for run in runs):
            if Path("t").exists():
                seen.add(Path("t").read_text())
        for run in runs:
            run.result()
    assert seen <= {own * 1000 for own in "abcd"}
    assert seen
    assert Path("d/file").read_text() in {own * 1000 for own in "abcd"}
    assert listing() == ["d", "t"]


# --- the order in which things appear ---------------------------------------------------------------------------


def test_files_appear_only_when_all_of_them_are_written():
    targets = [Path("optimizer"), Path("model")]
    with written(targets, overwrite=False) as partials:
        for partial in partials:
            partial.write_bytes(OLD)
        assert listing() == [".model.zckpt-partial", ".optimizer.zckpt-partial"]
    assert listing() == ["model", "optimizer"]


def test_last_file_is_not_there_where_an_earlier_one_could_not_be_renamed():
    Path("optimizer").mkdir()
    with pytest.raises(OSError), written([Path("optimizer"), Path("model")], overwrite=True):  # noqa: PT011
        pass
    assert listing() == ["optimizer"]


def test_directory_appears_only_when_all_of_it_is_written():
    with written([Path("d")], overwrite=False, owned=ANYTHING) as [partial]:
        (partial / "file").write_bytes(OLD)
        assert listing() == [".d.zckpt-partial"]
    assert listing() == ["d"]
    assert Path("d/file").read_bytes() == OLD


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("mode", [0o600, 0o440])
def test_what_replaces_something_may_be_read_by_those_who_could_read_that(mode, old, directory):
    old.chmod(mode)
    if directory:
        Path("t").chmod(0o750)
    with written([Path("t")], overwrite=True, owned=ANYTHING if directory else None) as [partial]:
        assert mode_of(partial) == (0o750 if directory else mode | 0o600)
        new = partial / "below/old" if directory else partial
        new.parent.mkdir(exist_ok=True)
        new.write_bytes(b"new")
    assert mode_of(Path("t")) == (0o750 if directory else mode)
    assert mode_of(old) == mode
    assert old.read_bytes() == b"new"
