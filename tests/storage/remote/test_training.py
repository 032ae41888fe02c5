"""Training saves to stores and resumes from them: each rank sends and reads its own, and nothing partial is seen."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import zckpt
from tests.folders import contents, names_in
from tests.gloo import run
from tests.pairwise import some
from tests.storage.remote.conftest import unfinished
from tests.storage.remote.servers import PASSWORD, USER
from tests.training.trainings import BY_NAME, Training, differences
from zckpt.storage.remote import attempts

pytestmark = pytest.mark.interop

Settings = dict[str, str]


@pytest.fixture
def s3_kind() -> str:
    return "s3-alone"


@pytest.fixture
def settings(s3) -> Settings:
    return {key: value for key, value in os.environ.items() if key.startswith("AWS_")} | {"bucket": s3.url}


def in_s3(rank, world_size, step: Callable[..., Any], settings: Settings, *arguments: Any) -> Any:
    """Run a function on a rank as who may write to the store."""
    before = dict(os.environ)
    os.environ.update(settings)
    attempts.FIRST_PAUSE, attempts.ATTEMPTS = 0.01, 2
    try:
        return step(rank, settings["bucket"], *arguments)
    finally:
        attempts.FIRST_PAUSE, attempts.ATTEMPTS = 0.25, 7
        os.environ.clear()
        os.environ.update(before)


def trained(kind: str = "zero2-plain-float32") -> tuple[Training, dict[str, Any]]:
    training = Training.of(BY_NAME[kind])
    training.train(range(2))
    return training, training.given


def save_and_load(rank, bucket: str) -> dict[str, Any]:
    training, everything = trained()
    zckpt.save(f"{bucket}/step2", **everything, step=2, extra={"seen": 2}, fingerprint=True)
    again = Training.of(BY_NAME["zero2-plain-float32"], seed=1)
    restored = zckpt.load(f"{bucket}/step2", **again.given)
    found = differences(again.state(), training.state())
    training.train([2])
    saving = zckpt.save(f"{bucket}/step3", **everything, step=3, async_=True)
    assert saving is not None
    saving.result()
    zckpt.save(f"{bucket}/step3", **everything, step=3, overwrite=True)
    refused = ""
    try:
        zckpt.save(f"{bucket}/step3", **everything)
    except zckpt.TargetExistsError as error:
        refused = str(error)
    return {"differences": found, "path": restored.path, "extra": restored.extra, "refused": refused}


def test_ranks_save_to_a_store_and_load_from_it(s3, settings):
    for told in run(in_s3, 2, save_and_load, settings):
        assert told["differences"] == []
        assert (told["path"], told["extra"]) == ("s3://bucket/step2", {"seen": 2})
        assert "s3://bucket/step3" in told["refused"]
        assert "already exists" in told["refused"]
    there = {"checkpoint.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"}
    assert contents(s3.directory / "step2").keys() == {*there, "fingerprint.json"}
    assert contents(s3.directory / "step3").keys() == there
    assert unfinished() == []
    assert zckpt.verify(f"{s3.url}/step2", deep=True).sound
    assert zckpt.open(f"{s3.url}/step3").step == 3
    assert zckpt.open(f"{s3.url}/step3").source == "s3://bucket/step3"


def save_as(rank, bucket: str, here: str) -> list[str]:
    _, everything = trained()
    everything["extra"] = {"seen": 2}
    refused = []
    for place in (bucket, here):
        zckpt.save(f"{place}/ds/global_step2", **everything, step=2, format="deepspeed")
        zckpt.save(f"{place}/ds/global_step3", **everything, step=3, format="deepspeed")
        zckpt.save(f"{place}/ds/global_step3", **everything, step=3, format="deepspeed", overwrite=True)
        _, redundant = trained("redundancy-ddp-float32")
        zckpt.save(f"{place}/redundant", **redundant, step=2, format="zero-redundancy")
        for name in ("ds/global_step3", ""):
            try:
                zckpt.save(f"{place}/{name}" if name else "s3://bucket", **everything, format="deepspeed")
            except zckpt.ZckptError as error:
                refused.append(str(error))
    again = Training.of(BY_NAME["zero2-plain-float32"], seed=1)
    zckpt.load(f"{bucket}/ds", **again.given)
    return refused + differences(again.state(), trained()[0].state())


def test_ranks_save_formats_of_other_programs_to_a_store(s3, settings, tmp_path):
    for told in run(in_s3, 2, save_as, settings, str(tmp_path)):
        assert "s3://bucket/ds/global_step3" in told[0]
        assert "already exists" in told[0]
        assert "not a directory with a name" in told[1]
        assert len(told) == 4
    found = contents(s3.directory / "ds")
    assert len(found) == 7
    assert found == contents("ds")
    assert (s3.directory / "ds/latest").read_text() == "global_step3"
    assert zckpt.diff(s3.directory / "redundant", "redundant").equal
    assert unfinished() == []


def failing(rank, bucket: str, options: dict[str, Any]) -> str:
    _, everything = trained()
    try:
        zckpt.save(f"{bucket}/failing/step2", **everything, step=2, **options)
    except zckpt.TargetError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", some(["rank-00001", "checkpoint.json"], ["zero_pp_rank_1"]))
def test_a_rank_that_fails_leaves_nothing(what, s3, s3_proxy, settings):
    s3_proxy.fault = lambda method, path: "503" if what in path and method == "PUT" else None
    for line in run(in_s3, 2, failing, settings, {"format": "deepspeed"} if "zero" in what else {}):
        assert f"s3://bucket/failing/step2/{what}" in line
        assert "zckpt-remote" not in line
        assert PASSWORD not in line
        assert USER not in line
    s3_proxy.mend()
    assert contents(s3.directory / "failing") == {}
    assert unfinished() == []


def a_run(rank, bucket: str, last: int, async_: bool) -> dict[str, Any]:
    training = Training.of(BY_NAME["zero2-plain-float32"])
    with (
        warnings.catch_warnings(record=True) as warned,
        zckpt.Checkpointer(f"{bucket}/run", keep=2, every=1, async_=async_) as checkpointer,
    ):
        restored = checkpointer.resume(**training.given, verify=True)
        first = restored.step if restored and restored.step else 0
        for step in range(first, last):
            training.train([step])
            checkpointer.step(step + 1, **training.given)
    return {"first": first, "warned": [str(one.message) for one in warned], "notes": restored and restored.notes}


def test_a_checkpointer_prunes_and_resumes_in_a_store(s3, settings):
    assert [told["first"] for told in run(in_s3, 2, a_run, settings, 3, True)] == [0, 0]
    assert names_in(s3.directory / "run") == ["checkpointer.json", "latest", "step-00000002", "step-00000003"]
    assert (s3.directory / "run/latest").read_text() == "step-00000003"
    (s3.directory / "run/step-00000003/rank-00001-of-00002.safetensors").unlink()
    told = run(in_s3, 2, a_run, settings, 4, False)
    assert [one["first"] for one in told] == [2, 2]
    assert "skipped step-00000003" in told[0]["warned"][0]
    assert "s3://bucket/run/step-00000003" in told[0]["warned"][0]
    assert names_in(s3.directory / "run") == ["checkpointer.json", "latest", "step-00000003", "step-00000004"]
    assert zckpt.open(f"{s3.url}/run").step == 4
    assert unfinished() == []


def by_dcp(rank, bucket: str) -> bool:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    training, _ = trained("adamw-fsdp-float32")
    state = dict(zip(("model", "optimizer"), get_state_dict(training.model, training.optimizer), strict=True))
    dcp.save({**state, "step": 2}, storage_writer=zckpt.dcp.Writer(f"{bucket}/dcp"))
    other = Training.of(BY_NAME["adamw-fsdp-float32"], seed=1)
    other.train([7])
    there = dict(zip(("model", "optimizer"), get_state_dict(other.model, other.optimizer), strict=True))
    dcp.load(there, storage_reader=zckpt.dcp.Reader(f"{bucket}/dcp"))
    dist.barrier()
    return all(
        torch.equal(one.to_local(), there["model"][name].to_local())
        for name, one in state["model"].items()
        if hasattr(one, "to_local")
    )


def test_dcp_writes_to_a_store_and_reads_from_it(s3, settings):
    assert run(in_s3, 2, by_dcp, settings) == [True, True]
    assert names_in(s3.directory / "dcp") == [
        "checkpoint.json",
        *(f"rank-0000{n}-of-00003.safetensors" for n in range(3)),
    ]
    assert not list(s3.directory.rglob("*zckpt-partial/*"))
    assert unfinished() == []
