"""A run that is killed at any moment leaves the old target or the new one: never neither, never some of each."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.folders import names_in
from tests.gloo import forked
from tests.refusals import refusing
from zckpt.engine.plan import plan
from zckpt.errors import SourceError, TargetError, TargetExistsError
from zckpt.formats import open_checkpoint
from zckpt.formats.safetensors import layout as safetensors_layout
from zckpt.operations.target import write_target
from zckpt.storage.durable import interrupted, recover, written
from zckpt.storage.ownership import Owned

FILES = ("file", "below/file")
OURS = Owned(FILES.__contains__)


def pretend_there_is_no_exchange() -> None:
    from zckpt.storage import disk

    disk.of_libc = lambda _name, _kinds: None  # type: ignore[assignment]


def kill_before(number: int) -> None:
    """Kill this process before its call of that number that changes a name or makes one last."""
    from zckpt.storage import disk

    left = [number]

    def count() -> None:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        changing = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
        made = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if event in changing or made:
            count()

    def counting(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            count()
            return function(*arguments)

        return call

    os.fsync, os.write = counting(os.fsync), counting(os.write)  # type: ignore[assignment]
    function = disk.of_libc("renameat2", "isisI")
    if function is not None:
        counted = counting(function)
        disk.of_libc = lambda name, _kinds: counted if name == "renameat2" else None  # type: ignore[assignment]
    sys.addaudithook(audit)


def killed(
    prepare: str, act: str, directory: Path, *, without_exchange: bool = False, module: str = __name__, every: int = 1
) -> list[Path]:
    """Let runs be killed so many calls later each, until one comes to its end; return what each has left, it last."""
    last = forked(kill_one_after_the_other, module, prepare, act, directory, without_exchange, every)
    return [directory / str(number) for number in range(0, last + 1, every)]


def kill_one_after_the_other(
    module: str, prepare: str, act: str, directory: Path, without_exchange: bool, every: int
) -> int:
    """Return how many were killed; a process forked for each spares it the start of an interpreter."""
    functions = vars(importlib.import_module(module))
    if without_exchange:
        pretend_there_is_no_exchange()
    prepared = directory / "prepared"
    prepared.mkdir()
    functions[prepare](prepared)
    for number in range(0, 1000, every):
        here = directory / str(number)
        shutil.copytree(prepared, here, symlinks=True)
        child = os.fork()
        if not child:
            try:
                kill_before(number)
                functions[act](here)
            finally:
                os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            return number
    raise AssertionError("it comes to no end")


# --- a directory


def old_directory(here: Path) -> None:
    write_directory(here, content="old")


def nothing(here: Path) -> None:
    pass


def write_directory(here: Path, *, content: str = "new") -> None:
    with written([here / "t"], overwrite=True, owned=OURS) as [partial]:
        (partial / "below").mkdir()
        for name in FILES:
            (partial / name).write_text(content)


def content_of(directory: Path) -> str | None:
    """The content that all files of a directory have."""
    if not directory.is_dir():
        return None
    found = {(directory / name).read_text() for name in FILES}
    assert len(found) == 1
    return found.pop()


def test_a_directory_is_there_at_every_moment_while_it_is_replaced(tmp_path):
    left = killed("old_directory", "write_directory", tmp_path)
    assert len(left) > 12
    found = [content_of(here / "t") for here in left]
    assert set(found) == {"old", "new"}
    assert found == sorted(found, reverse=True)  # the old one, until it is the new one
    assert names_in(left[-1]) == ["t"]
    for here in left:
        assert interrupted(here / "t") is None
        write_directory(here, content="newer")
        assert content_of(here / "t") == "newer"
        assert names_in(here) == ["t"]


def test_without_an_exchange_the_old_directory_is_kept_and_comes_back(tmp_path):
    left = killed("old_directory", "write_directory", tmp_path, without_exchange=True)
    missing = [here for here in left if not (here / "t").exists()]
    assert len(missing) in (1, 2)  # between two renames, and no more
    for here in left:
        if here in missing:
            assert str(here / ".t.zckpt-old") in (interrupted(here / "t") or "")
            assert content_of(here / ".t.zckpt-old") == "old"
        else:
            assert content_of(here / "t") in ("old", "new")
        was = content_of(here / "t")
        recover(here / "t", OURS)
        assert content_of(here / "t") == (was or "old")
        with pytest.raises(TargetExistsError), written([here / "t"], overwrite=False, owned=OURS):
            pass
        write_directory(here, content="newer")
        assert names_in(here) == ["t"]


def test_a_new_directory_is_there_whole_or_not_at_all(tmp_path):
    found = [content_of(here / "t") for here in killed("nothing", "write_directory", tmp_path)]
    assert set(found) == {None, "new"}
    assert found[-1] == "new"


# --- a pair of files

PAIR = ("m.optimizer", "m")


def old_pair(here: Path) -> None:
    write_pair(here, content="old")


def write_pair(here: Path, *, content: str = "new", overwrite: bool = True) -> None:
    with written([here / name for name in PAIR], overwrite=overwrite) as partials:
        for partial in partials:
            partial.write_text(content)


def pair_of(here: Path) -> tuple[str | None, str | None]:
    """The contents of the optimizer and of the model."""
    optimizer, model = ((here / name).read_text() if (here / name).exists() else None for name in PAIR)
    return optimizer, model


@pytest.mark.parametrize("without_exchange", [False, True])
def test_no_new_file_is_ever_beside_an_old_one(without_exchange, tmp_path):
    left = killed("old_pair", "write_pair", tmp_path, without_exchange=without_exchange)
    assert len(left) > 12
    found = [pair_of(here) for here in left]
    assert set(found) == {("old", "old"), (None, "old"), (None, "new"), ("new", "new")}
    for here, pair in zip(left, found, strict=True):
        if None in pair:
            assert "killed while it was naming" in (interrupted(here / "m") or "")
        with pytest.raises(TargetExistsError), written([here / "m"], overwrite=False):
            pass
        settled = pair_of(here)
        assert settled in {("old", "old"), ("new", "new")}
        assert None not in pair or settled == ("new", "new")
        assert interrupted(here / "m") is None
        write_pair(here, content="newer")
        assert names_in(here) == sorted(PAIR)
        assert pair_of(here) == ("newer", "newer")


def test_of_a_new_pair_the_target_appears_last(tmp_path):
    left = killed("nothing", "write_pair", tmp_path)
    assert {pair_of(here) for here in left} == {(None, None), ("new", None), ("new", "new")}
    for here in left:
        was = pair_of(here)
        try:
            write_pair(here, content="newer", overwrite=False)
        except TargetExistsError:
            assert pair_of(here) == ("new", "new")
        else:
            assert was == (None, None)
            assert pair_of(here) == ("newer", "newer")


def test_an_interrupt_while_files_are_named_names_them_all(tmp_path, monkeypatch):
    from zckpt.storage import durable

    old_pair(tmp_path)
    name_one, seen = durable._name_one, []

    def interrupts(directory: Path, one: durable._Waiting) -> None:
        name_one(directory, one)
        if len(seen) < 1:
            seen.append(one)
            raise KeyboardInterrupt

    monkeypatch.setattr(durable, "_name_one", interrupts)
    with pytest.raises(KeyboardInterrupt):
        write_pair(tmp_path)
    assert pair_of(tmp_path) == ("new", "new")
    assert names_in(tmp_path) == sorted(PAIR)


def test_a_disk_that_fails_while_files_are_named_is_told_and_the_next_run_goes_on(tmp_path, monkeypatch):
    from zckpt.storage import durable

    old_pair(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_name_one", failing)
        with refusing(TargetError, r"could not be renamed: .*it is kept"):
            write_pair(tmp_path)
    assert pair_of(tmp_path) == (None, "old")
    with pytest.raises(TargetExistsError), written([tmp_path / "m"], overwrite=False):
        pass
    assert pair_of(tmp_path) == ("new", "new")


def failing(*_: object) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    "listed",
    [
        b"", b"[", b"{}", b"[]", b"7", b'[["m.optimizer"]]', b'[["../x", 3, 1], ["m", 3, 1]]', b'[[7, 3, 1]]',
        json.dumps([["m.optimizer", 3, 1], ["m", 3, 1]]).encode(),
    ],
)  # fmt: skip
def test_a_list_that_is_torn_or_somebody_elses_names_nothing(listed, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    old_pair(here)
    for name in (".m.zckpt-partial", ".m.optimizer.zckpt-partial", "../.x.zckpt-partial"):
        (here / name).write_bytes(b"new")
    (tmp_path / "x").write_text("precious")
    (here / ".m.zckpt-naming").write_bytes(listed)
    with pytest.raises(TargetExistsError), written([here / "m"], overwrite=False):
        pass
    assert pair_of(here) == ("old", "old")
    assert (tmp_path / "x").read_text() == "precious"
    assert not (here / ".m.zckpt-naming").exists()


def test_files_of_several_directories_are_not_named_together(tmp_path):
    (tmp_path / "d").mkdir()
    with (
        refusing(TargetError, "several directories"),
        written([tmp_path / "d/a", tmp_path / "b"], overwrite=False),
    ):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["d"]


# --- what who opens it is told


def test_opening_a_target_that_a_kill_left_nameless_says_where_it_is(tmp_path):
    (tmp_path / ".t.zckpt-old").mkdir()
    with refusing(SourceError, rf"the old one is {tmp_path}/\.t\.zckpt-old"):
        open_checkpoint(tmp_path / "t")


def test_opening_a_file_whose_companion_is_not_named_yet_warns(tmp_path):
    model = tmp_path / "m.safetensors"
    write_target(plan([safetensors_layout.lay_out(model.name, [])]), model)
    assert open_checkpoint(model).warnings == []
    (tmp_path / ".m.safetensors.zckpt-naming").touch()
    assert "names the rest" in open_checkpoint(model).warnings[0]
