"""What verbs return: frozen, and as data the document that the command line prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.cli.console import FIXTURES, refused, run
from tests.refusals import refusing

SOURCE, OTHER = FIXTURES / "s2_bf16_dp2", FIXTURES / "s2_bf16_dp3"
ADAPTER = Path(__file__).parent / "adapters/of_s2_bf16_dp2"
FIXTURE = "fixtures/s2_bf16_dp2"
VERBS: dict[str, Callable[[], Any]] = {
    f"inspect {FIXTURE} --files": lambda: zckpt.inspect(SOURCE, include_inventory=True),
    f"map {FIXTURE} --slots exp_avg": lambda: zckpt.map(SOURCE, slots=["exp_avg"]),
    f"diff {FIXTURE} fixtures/s2_bf16_dp3": lambda: zckpt.diff(SOURCE, OTHER),
    f"diff --series {FIXTURE} fixtures/s2_bf16_dp3": lambda: zckpt.series([SOURCE, OTHER]),
    f"verify {FIXTURE} --deep": lambda: zckpt.verify(str(SOURCE), deep=True),
    f"fingerprint {FIXTURE}": lambda: zckpt.fingerprint(SOURCE),
    f"stats {FIXTURE} --slots exp_avg": lambda: zckpt.stats(SOURCE, slots=["exp_avg"]),
    f"show {FIXTURE} fc1.weight --slice 0:2,1": lambda: zckpt.show(SOURCE, "fc1.weight", slice="0:2,1"),
    f"resume-check {FIXTURE} --for fsdp2": lambda: zckpt.resume_check(SOURCE, program="fsdp2"),
    f"list {FIXTURE}": lambda: zckpt.history(SOURCE),
    f"prune {FIXTURE} --keep-last 1": lambda: zckpt.prune(SOURCE, keep_last=1),
    f"pack {FIXTURE} store": lambda: zckpt.pack(SOURCE, "store"),
    f"patch {FIXTURE} fixtures/s2_bf16_dp3/global_step5 p": lambda: zckpt.patch(SOURCE, OTHER / "global_step5", "p"),
    f"consolidate {FIXTURE} m.pt --slots all": lambda: zckpt.consolidate(SOURCE, "m.pt", slots="all"),
    f"average {FIXTURE} fixtures/s2_bf16_dp3 --target m.pt --weights 1,3": lambda: zckpt.average(
        [SOURCE, OTHER], "m.pt", weights=[1, 3]
    ),
    f"merge-adapter {FIXTURE} {ADAPTER} m.pt --verify": lambda: zckpt.merge_adapter(
        SOURCE, ADAPTER, "m.pt", verify=True
    ),
    f"convert {FIXTURE} dcp --to dcp": lambda: zckpt.convert(SOURCE, "dcp", to="dcp"),
    f"reshard {FIXTURE} r --world-size 3": lambda: zckpt.reshard(SOURCE, "r", world_size=3),
    f"strip {FIXTURE} s --padding": lambda: zckpt.strip(SOURCE, "s", padding=True),
}


@pytest.mark.parametrize("command", VERBS, ids=lambda command: command.partition(" fix")[0])
def test_a_result_is_frozen_and_the_document_of_the_command_line(command, monkeypatch):
    done = VERBS[command]()
    with pytest.raises(FrozenInstanceError):
        setattr(done, fields(done)[0].name, None)
    Path("again").mkdir()
    monkeypatch.chdir("again")
    printed = run(command, "--json")
    assert printed.returncode in (0, 1), printed.stderr
    assert json.loads(printed.stdout) == json.loads(json.dumps(done.as_dict()))


def test_a_map_without_a_target_is_printed_or_refused():
    refused(2, f"map {FIXTURE}", words="no TARGET for the map")


def test_a_map_of_a_slot_that_is_not_there_is_refused():
    with refusing(zckpt.UsageError, "no such slot: expected some of weight, master"):
        zckpt.map(SOURCE, slots=["momentum"])
