"""What killed runs have left is removed, and nothing else."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from zckpt.storage import ownership
from zckpt.storage.durable import QUIET_S, remove_leftovers
from zckpt.storage.ownership import Owned, claimed

OWNED = Owned(lambda name: name.endswith(".own"), lambda _: False)


def made(directory: Path, *names: str, age: float = 2 * QUIET_S) -> Path:
    directory.mkdir()
    for name in names:
        (directory / name).write_text("")
    for path in (*directory.iterdir(), directory):
        os.utime(path, (time.time() - age,) * 2)
    return directory


def test_what_no_run_holds_is_removed_and_all_else_stays(tmp_path):
    made(Path(".one.zckpt-partial"), "a.own", ".b.own.zckpt-partial")
    made(Path(".two.zckpt-partial"))
    written = made(Path(".written.zckpt-partial"), "a.own", "b.own")  # by another node
    before = written.stat().st_mtime
    (written / "b.own").write_text("more")
    os.utime(written, (before, before))
    stays = {
        written,
        made(Path(".other.zckpt-partial"), "a.own", "notes.txt"),
        made(Path(".resumed.zckpt-partial"), "a.own"),
        made(Path("whole"), "a.own"),
        made(Path(".zckpt-partial")),
        made(Path("...zckpt-partial")),  # of no name, either
    }
    Path(".resumed.zckpt-journal").write_text("")
    Path(".file.zckpt-partial").write_text("")
    Path(".link.zckpt-partial").symlink_to("whole")
    alive = Path(".alive.zckpt-partial")
    with claimed(alive, directory=True):
        os.utime(alive, (0, 0))
        remove_leftovers(tmp_path, OWNED)
        assert alive.is_dir()
    assert not Path(".one.zckpt-partial").exists()
    assert not Path(".two.zckpt-partial").exists()
    assert all(path.is_dir() for path in stays)
    assert Path("whole/a.own").is_file()
    assert Path(".file.zckpt-partial").is_file()
    assert Path(".link.zckpt-partial").is_symlink()
    remove_leftovers(Path("nowhere"), OWNED)


def test_where_there_are_no_locks_nothing_is_removed(tmp_path, monkeypatch):
    left = made(Path(".one.zckpt-partial"), "a.own")

    def without_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(ownership.fcntl, "flock", without_locks)
    remove_leftovers(tmp_path, OWNED)
    assert left.is_dir()
