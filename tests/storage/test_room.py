"""Room of file systems, as the system tells it: what does not fit is refused before anything is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.folders import names_in
from tests.refusals import refusing
from zckpt.errors import SourceError, TargetError
from zckpt.storage import room as rooms
from zckpt.storage.room import Room, check_room, read_rate, room, write_errors, write_rate


def test_room_is_what_the_system_says(tmp_path):
    found, said = room(tmp_path), os.statvfs(tmp_path)
    assert found.nbytes == pytest.approx(said.f_bavail * said.f_frsize, rel=0.2)
    assert (found.files is None) == (said.f_files == 0)


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "room", lambda _: Room(1000, 10))
    check_room(tmp_path, 1000, 10)
    with refusing(TargetError, "not enough space: expected 1001 bytes free, found 1000; free some or write"):
        check_room(tmp_path, 1001, 1)
    with refusing(TargetError, "no space for that many files: expected 11 inodes free, found 10"):
        check_room(tmp_path, 1000, 11)


def test_what_is_replaced_needs_room_until_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "room", lambda _: Room(0, None))
    with refusing(TargetError, "the old target stays until the new one is renamed"):
        check_room(tmp_path, 1, 1, replaced=True)


def test_a_file_system_without_a_table_of_files_takes_any_number(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "room", lambda _: Room(1 << 40, None))
    check_room(tmp_path, 1, 1 << 40)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_is_named_where_there_was_room(number):
    with refusing(TargetError, "a quota leaves less"), write_errors("t"):
        raise OSError(number, os.strerror(number))


def test_no_memory_is_an_error_about_the_target():
    with (
        refusing(TargetError, "t: cannot be written: found not enough memory"),
        write_errors("t"),
    ):
        raise MemoryError


def test_a_sample_is_gone_when_it_is_measured(tmp_path):
    rate = write_rate(tmp_path, 3 << 20)
    assert rate is not None
    assert rate > 0
    assert names_in() == []


def test_a_sample_that_cannot_be_written_is_none():
    assert write_rate("nowhere", 100) is None


def test_a_sample_of_a_source_reads_what_is_there():
    Path("a").write_bytes(bytes(5000))
    rate = read_rate([("a", 1000, 4000)])
    assert rate is not None
    assert rate > 0
    assert read_rate([]) is None
    with refusing(SourceError, "ends too early"):
        read_rate([("a", 1000, 4001)])
