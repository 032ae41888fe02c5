"""What verbs return: frozen, and as data the document that the command line prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.cli.console import FIXTURES, run
from tests.refusals import refusing

SOURCE, OTHER = FIXTURES / "s2_bf16_dp2", FIXTURES / "s2_bf16_dp3"
ADAPTER = Path(__file__).parent / "adapters" / "of_s2_bf16_dp2"
SLOTS = ("--slots", "all")
VERBS: dict[str, tuple[Callable[[Path], Any], list[object]]] = {
    "inspect": (lambda _: zckpt.inspect(SOURCE, include_inventory=True), [SOURCE, "--files"]),
    "map": (lambda _: zckpt.map(SOURCE, slots=["exp_avg"]), [SOURCE, "--slots", "exp_avg"]),
    "diff": (lambda _: zckpt.diff(SOURCE, OTHER), [SOURCE, OTHER]),
    "diff --series": (lambda _: zckpt.series([SOURCE, OTHER]), [SOURCE, OTHER]),
    "verify": (lambda _: zckpt.verify(str(SOURCE), deep=True), [SOURCE, "--deep"]),
    "fingerprint": (lambda _: zckpt.fingerprint(SOURCE), [SOURCE]),
    "stats": (lambda _: zckpt.stats(SOURCE, slots=["exp_avg"]), [SOURCE, "--slots", "exp_avg"]),
    "show": (lambda _: zckpt.show(SOURCE, "fc1.weight", slice="0:2,1"), [SOURCE, "fc1.weight", "--slice", "0:2,1"]),
    "resume-check": (lambda _: zckpt.resume_check(SOURCE, program="fsdp2"), [SOURCE, "--for", "fsdp2"]),
    "list": (lambda _: zckpt.history(SOURCE), [SOURCE]),
    "prune": (lambda _: zckpt.prune(SOURCE, keep_last=1), [SOURCE, "--keep-last", 1]),
    "pack": (lambda at: zckpt.pack(SOURCE, at / "st"), [SOURCE, "st"]),
    "patch": (lambda at: zckpt.patch(SOURCE, OTHER / "global_step5", at / "p"), [SOURCE, OTHER / "global_step5", "p"]),
    "consolidate": (lambda at: zckpt.consolidate(SOURCE, at / "m.pt", slots="all"), [SOURCE, "m.pt", *SLOTS]),
    "average": (
        lambda at: zckpt.average([SOURCE, OTHER], at / "m.pt", weights=[1, 3]),
        [SOURCE, OTHER, "--target", "m.pt", "--weights", "1,3"],
    ),
    "merge-adapter": (
        lambda at: zckpt.merge_adapter(SOURCE, ADAPTER, at / "m.pt", verify=True),
        [SOURCE, ADAPTER, "m.pt", "--verify"],
    ),
    "convert": (lambda at: zckpt.convert(SOURCE, at / "dcp", to="dcp"), [SOURCE, "dcp", "--to", "dcp"]),
    "reshard": (lambda at: zckpt.reshard(SOURCE, at / "r", world_size=3), [SOURCE, "r", "--world-size", 3]),
    "strip": (lambda at: zckpt.strip(SOURCE, at / "s", padding=True), [SOURCE, "s", "--padding"]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_result_is_frozen_and_the_document_of_the_command_line(verb, tmp_path, monkeypatch):
    call, arguments = VERBS[verb]
    done = call(tmp_path)
    with pytest.raises(FrozenInstanceError):
        setattr(done, fields(done)[0].name, None)
    Path("again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    printed = run(*verb.split(), *arguments, "--json")
    assert printed.returncode in (0, 1), printed.stderr
    expected = json.loads(json.dumps(done.as_dict()).replace(f'"{tmp_path}/', '"'))
    assert json.loads(printed.stdout) == expected


def test_a_map_without_a_target_is_printed_or_refused():
    done = run("map", SOURCE)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no TARGET for the map" in done.stderr


def test_a_map_of_a_slot_that_is_not_there_is_refused():
    with refusing(zckpt.UsageError, "no such slot: expected some of weight, master"):
        zckpt.map(SOURCE, slots=["momentum"])
