"""`verify --against`: what is no longer as it was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zckpt
from tests.cli.console import succeeded
from tests.damage import copy, set_element
from tests.refusals import refusing
from zckpt.compare.digests import FILE_NAME, Fingerprint, bytes_of, digests_path_of_file, read_digests, root
from zckpt.errors import SourceError
from zckpt.operations.fingerprint import fingerprint
from zckpt.operations.verify import verify

RUN = "s2_bf16_dp2"


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and the file of its digests."""
    run = copy(RUN, tmp_path)
    digests = tmp_path / FILE_NAME
    digests.write_bytes(bytes_of(fingerprint(zckpt.open(run))))
    return run, digests


def test_same_checkpoint_agrees(recorded):
    run, digests = recorded
    found = verify(run, against=digests)
    assert found.findings == []
    assert found.fingerprint == json.loads(digests.read_text())["fingerprint"]


def test_every_format_agrees(recorded):
    run, digests = recorded
    zckpt.convert(run, "own", to="zckpt", world_size=3)
    assert verify("own", against=digests, deep=True).findings == []


def test_a_checkpoint_has_its_digests_also_in_a_store(recorded):
    run, digests = recorded[0] / "global_step5", recorded[1]
    with refusing(SourceError, "holds no digests; record them"):
        zckpt.verify(run, against=run)
    digests.rename(run / FILE_NAME)
    digests_path_of_file(run).write_text("{}")  # of a file called so
    zckpt.pack(run, "store")
    for a, b in ((run, Path("store", run.name)), (Path("store", run.name), run), (run, run)):
        assert zckpt.verify(a, against=b).findings == []


def test_a_run_and_a_file_have_the_digests_that_were_written_of_them(recorded):
    run, _ = recorded
    zckpt.consolidate(run, "m.safetensors")
    for one in (run, Path("m.safetensors")):
        succeeded("fingerprint", one, "--write")
        assert zckpt.verify(one, against=one).findings == []


def test_change_that_nothing_else_shows_is_found(recorded):
    run, digests = recorded
    set_element(run, "fc1.weight", "exp_avg", 50, 0.125)
    assert verify(run, deep=True).findings == []
    (finding,) = verify(run, against=digests).findings
    assert (finding.code, finding.parameters) == ("ZC-301", ("fc1.weight",))
    assert "exp_avg" in finding.message
    assert finding.expected != finding.found


def test_missing_and_added_values_are_found(recorded):
    run, digests = recorded
    entries = read_digests(digests).entries
    entries["another"] = entries.pop("fc1.weight")
    del entries["fc2.weight"]["exp_avg"]
    digests.write_bytes(bytes_of(Fingerprint(root(entries), entries)))
    found = {(f.code, f.parameters) for f in verify(run, against=digests).findings}
    assert found == {("ZC-302", ("another",)), ("ZC-303", ("fc1.weight",)), ("ZC-303", ("fc2.weight",))}


def test_file_that_holds_no_digests_is_refused(recorded):
    run, digests = recorded
    digests.write_text("{}")
    with pytest.raises(zckpt.DamagedFileError):
        verify(run, against=digests)
