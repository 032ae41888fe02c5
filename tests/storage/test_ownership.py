"""What is there already: only a regular file, or a directory that is shown to be of the format, is ever replaced."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.folders import names_in
from tests.gloo import forked
from tests.refusals import refusing
from zckpt.errors import TargetError, TargetExistsError
from zckpt.storage.durable import written
from zckpt.storage.ownership import Owned, check_target

OURS = Owned(lambda name: name in ("a.bin", "zero/b.bin"))


@pytest.fixture(params=["FIFO", "socket", "character device", "link to a file", "link to a directory", "broken link"])
def odd(request, tmp_path, monkeypatch) -> Iterator[Path]:
    """Something that is neither a regular file nor a directory."""
    path = tmp_path / "t"
    (tmp_path / "file").write_text("precious")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory/a.bin").write_text("precious")
    if request.param == "FIFO":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            monkeypatch.chdir(tmp_path)  # a socket's address is short
            one.bind("t")
    elif request.param == "character device":
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        path.symlink_to({"link to a file": "file", "link to a directory": "directory"}.get(request.param, "nowhere"))
    yield path
    assert (tmp_path / "file").read_text() == (tmp_path / "directory/a.bin").read_text() == "precious"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_file_and_no_directory_stays(overwrite, directory, odd):
    before = odd.lstat()
    with pytest.raises(TargetExistsError) as caught:
        write(odd, directory=directory, overwrite=overwrite)
    after = odd.lstat()  # who follows a link has looked at it
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    if overwrite:
        assert any(word in str(caught.value) for word in ("FIFO", "socket", "device", "symbolic link"))
    assert names_in(odd.parent) == ["directory", "file", "t"]


def write(path: str | Path, *, directory: bool, overwrite: bool = False) -> None:
    with written([Path(path)], overwrite=overwrite, owned=OURS if directory else None) as [partial]:
        (partial / "a.bin" if directory else partial).write_text("new")


@pytest.mark.parametrize(
    "foreign", ["src/train.py", "notes.txt", "a.bin.bak", "zero/notes.txt", ".git/", "zero/cache/", "b.bin"]
)
def test_a_directory_with_anything_else_in_it_stays(foreign, tmp_path):
    write("t", directory=True)
    path = tmp_path / "t" / foreign
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if foreign.endswith("/") else path.write_text("precious")
    with refusing(TargetExistsError, "holds other files") as caught:
        write("t", directory=True, overwrite=True)
    assert foreign in str(caught.value)
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_link_in_a_directory_is_something_else_whatever_its_name(kind, tmp_path):
    write("t", directory=True)
    Path("elsewhere").mkdir()
    name = "a.bin" if kind == "file" else "zero"
    (tmp_path / "t" / name).unlink(missing_ok=True)
    (tmp_path / "t" / name).symlink_to(tmp_path / "elsewhere" / ("x" if kind == "file" else ""))
    with refusing(TargetExistsError, f"found {name};"):
        write("t", directory=True, overwrite=True)


def test_a_directory_of_the_format_or_an_empty_one_is_replaced(tmp_path):
    Path("t").mkdir()
    write("t", directory=True, overwrite=True)
    Path("t/zero").mkdir()
    for name in ("a.bin", "zero/b.bin", "fingerprint.json"):
        (tmp_path / "t" / name).write_text("old")
    write("t", directory=True, overwrite=True)
    assert [path.name for path in Path("t").rglob("*")] == ["a.bin"]
    assert Path("t/a.bin").read_text() == "new"


def test_names_are_not_enough_where_a_format_has_a_mark():
    marked = Owned(OURS.is_own, lambda path: (path / "a.bin").read_text() == "ours")
    Path("t").mkdir()
    check_target(Path("t"), overwrite=True, owned=marked)
    Path("t/a.bin").write_text("theirs")
    with refusing(TargetExistsError, r"a\.bin"):
        check_target(Path("t"), overwrite=True, owned=marked)
    Path("t/a.bin").write_text("ours")
    check_target(Path("t"), overwrite=True, owned=marked)


def test_what_is_put_there_while_a_run_writes_is_not_removed():
    write("t", directory=True)
    made = written([Path("t")], overwrite=True, owned=OURS)
    (made.__enter__()[0] / "a.bin").write_text("newer")
    Path("t/thesis.tex").write_text("precious")
    with refusing(TargetExistsError, r"thesis\.tex"):
        made.__exit__(None, None, None)
    assert names_in("t") == ["a.bin", "thesis.tex"]
    assert names_in() == ["t"]


@pytest.mark.parametrize("way", ["mkdir", "write_bytes"])
def test_what_appears_in_the_last_moment_is_not_replaced_unasked(way, directory, monkeypatch):
    """Between the last look and the rename; an empty directory would be replaced by a plain rename of another."""
    from zckpt.storage import durable

    def check_and_make(path: Path, **options: object) -> None:
        if not path.exists():
            path.mkdir() if way == "mkdir" else path.write_bytes(b"precious")

    monkeypatch.setattr(durable, "check_target", check_and_make)
    with pytest.raises(TargetError):
        write("t", directory=directory)
    assert names_in() == ["t"]
    assert Path("t").read_bytes() == b"precious" if way == "write_bytes" else not any(Path("t").iterdir())


# --- two users of one directory


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_what_is_new_has_the_modes_that_the_umask_leaves(umask):
    before = os.umask(umask)
    try:
        write("new/t", directory=True)
        write("f", directory=False)
    finally:
        os.umask(before)
    for path in (Path("new"), Path("new/t")):
        assert mode_of(path) == 0o777 & ~umask
    for path in (Path("f"), Path("new/t/a.bin")):
        assert mode_of(path) == 0o666 & ~umask


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def written_by(user: int, path: Path, directory: bool) -> str:
    os.setgid(user)
    os.setuid(user)
    try:
        write(path, directory=directory, overwrite=True)
    except TargetError as error:
        return str(error)
    return "written"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is several users")
@pytest.mark.parametrize("sticky", [False, True])
def test_another_user_replaces_what_the_directory_lets_them_and_leaves_nothing(sticky, directory):
    with tempfile.TemporaryDirectory(prefix="zckpt-users-") as folder:
        Path(folder).chmod(0o1777 if sticky else 0o777)
        target = Path(folder, "t")
        assert forked(written_by, 12345, target, directory) == "written"
        target.chmod(0o755 if directory else 0o640)
        said = forked(written_by, 12346, target, directory)
        owner = target.stat().st_uid
        assert mode_of(target) == (0o755 if directory else 0o640)
        assert names_in(Path(folder)) == ["t"]
        if directory:  # what is in it, they could not remove: it would be in the way of the next run
            assert owner == 12345
            assert "holds files that this user may not remove" in said
        elif sticky:
            assert owner == 12345
            assert "cannot be written: found Operation not permitted" in said
        else:
            assert (said, owner) == ("written", 12346)
