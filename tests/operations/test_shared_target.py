"""A directory that several processes write together, without torch's process groups."""

from __future__ import annotations

import os

from tests.folders import names_in
from tests.refusals import refusing
from zckpt.errors import TargetError
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED
from zckpt.operations.shared_target import shared_target


def test_others_join_what_the_first_has_begun_and_what_a_kill_has_left_gives_way(tmp_path):
    place = tmp_path / "new/step1"
    with refusing(TargetError, "no save to it is running"):
        shared_target(place).noted()
    child = os.fork()
    if not child:
        begun = shared_target(place)
        begun.begin(overwrite=False, owned=OWNED, note=b"killed")
        os._exit(0)
    os.waitpid(child, 0)
    first = shared_target(place)
    first.begin(overwrite=False, owned=OWNED, note=b"id")
    other = shared_target(place)
    assert other.noted() == first.noted() == b"id"
    (other.path / DOCUMENT_NAME).write_bytes(b"{}")
    other.abort(InterruptedError())  # removes nothing of the first's
    first.commit([other.sent()])
    assert [path.name for path in place.parent.rglob("*")] == ["step1", DOCUMENT_NAME]


def test_a_failure_leaves_nothing(tmp_path):
    first = shared_target(tmp_path / "step1")
    first.begin(overwrite=False, owned=OWNED, note=b"id")
    first.abort(InterruptedError())
    assert names_in() == []
