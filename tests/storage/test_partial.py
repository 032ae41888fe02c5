"""Temporary names: what is under one already is never written into, whatever it is a name of."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from tests.folders import names_in
from tests.refusals import refusing
from tests.storage.test_ownership import write
from zckpt.errors import TargetError
from zckpt.storage.durable import written
from zckpt.storage.ownership import Owned, partial_name

ANYTHING = Owned(lambda _: True)


def test_a_link_is_not_followed(directory):
    """Else a linked file would be overwritten, a linked directory emptied, and the target be a link."""
    precious = Path("elsewhere/precious")
    precious.parent.mkdir()
    precious.write_text("precious")
    link = partial_name(Path("t"))
    link.symlink_to(precious.parent if directory else precious)
    with refusing(TargetError, r"\.t\.zckpt-partial: cannot be created: found a symbolic link in its place"):
        write("t", directory=directory)
    assert precious.read_text() == "precious"
    assert link.is_symlink()
    assert not os.path.lexists("t")


def test_another_name_of_a_file_is_removed_and_the_file_left_alone():
    Path("precious").write_text("precious")
    os.link("precious", partial_name(Path("t")))
    write("t", directory=False)
    assert Path("precious").read_text() == "precious"
    assert Path("t").read_text() == "new"


def test_a_fifo_is_refused_and_does_not_hang(directory):
    os.mkfifo(partial_name(Path("t")))
    with refusing(TargetError, "cannot be created: found a FIFO in its place; remove it"):
        write("t", directory=directory)
    assert stat.S_ISFIFO(partial_name(Path("t")).lstat().st_mode)


def test_what_another_user_has_put_there_is_refused(directory):
    partial = partial_name(Path("t"))
    partial.mkdir() if directory else partial.write_text("theirs")
    try:
        os.chown(partial, 12345, 12345)
    except PermissionError:
        pytest.skip("only root gives files to others")
    with refusing(TargetError, "one of another user's in its place"):
        write("t", directory=directory)
    assert partial.exists()


def test_a_file_system_without_locks_is_written_to(directory, monkeypatch):
    """Then a run whose temporary name another one took fails at its end, and writes nothing."""

    def without_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    write("t", directory=directory)
    assert names_in() == ["t"]
    first = written([Path("u")], overwrite=False, owned=ANYTHING)
    first.__enter__()
    write("u", directory=True)
    with refusing(TargetError, "has disappeared, or something else has its name"):
        first.__exit__(None, None, None)
    assert names_in() == ["t", "u"]


def test_a_link_that_takes_the_place_of_what_is_written_is_not_named(directory, tmp_path):
    """Nobody but this user could do that; the link is what is renamed, and what it points to stays."""
    Path("elsewhere").mkdir()
    Path("elsewhere/precious").write_text("precious")
    made = written([Path("t")], overwrite=False, owned=ANYTHING if directory else None)
    made.__enter__()
    partial = partial_name(Path("t"))
    partial.rmdir() if directory else partial.unlink()
    partial.symlink_to(tmp_path / "elsewhere" / ("" if directory else "precious"))
    with refusing(TargetError, "something else has its name"):
        made.__exit__(None, None, None)
    assert Path("elsewhere/precious").read_text() == "precious"
    assert not os.path.lexists("t")
