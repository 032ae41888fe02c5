"""`zckpt sanitize`: the same checkpoint without what pickles would make of classes that nobody knows."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from tests.cli.console import FIXTURES, printed, refused, succeeded
from tests.folders import contents
from tests.logical import assert_same_tree
from tests.operations.scan import corpus
from tests.test_safety import MODEL, NEVER_RUNS, OPTIMIZER, RUNS, called, created, named, poison, poisoned, text
from tests.truth import Truth, assert_same


def grades(path: str) -> set[str]:
    return {one["grade"] for one in zckpt.scan(path).findings}


@pytest.mark.parametrize("case", [*RUNS, *NEVER_RUNS])
@pytest.mark.every(5)
def test_payload_goes_and_all_else_stays(case):
    source, target = poisoned({**RUNS, **NEVER_RUNS}[case][1]), Path("clean")
    done = succeeded(f"sanitize {source} {target}")
    assert "left out" in done.stderr
    assert grades("clean") == {"data", "known"}
    assert contents(source).keys() == contents(target).keys()
    truth = Truth(FIXTURES / "s2_bf16_dp2")
    opened = zckpt.open(target)
    for name, value in truth.masters.items():
        assert_same(opened.read(name, "master"), value, name)
    assert "extra" not in torch.load(target / MODEL, weights_only=False)
    assert not Path("sentinel").exists()


def test_what_goes_is_listed_where_it_was():
    source = poisoned(called(named("os:system"), text("true")))
    poison(source / MODEL, b"](" + named("evil:function") + called(named("evil:Class")) + b"K\x07e", key="several")
    document = printed(f"sanitize {source} clean")
    assert sorted(map(tuple, (one.values() for one in document["removed"]))) == [
        (OPTIMIZER, "extra", "dangerous", "os.system"),
        (MODEL, "extra", "dangerous", "os.system"),
        (MODEL, "several.0", "unknown", "evil.function"),
        (MODEL, "several.1", "unknown", "evil.Class"),
    ]
    assert torch.load(f"clean/{MODEL}", weights_only=False)["several"] == [None, None, 7]


def test_clean_files_are_copied_byte_for_byte():
    for name in ("s2_bf16_dp2", "hf_llama_s2_bf16_dp2"):
        succeeded(f"sanitize fixtures/{name} {name} --quiet")
        assert contents(name) == contents(FIXTURES / name)


def test_dry_run_says_what_would_go_and_writes_nothing():
    source = poisoned(RUNS["os.system"][1])
    done = succeeded(f"sanitize {source} clean --dry-run")
    assert f"left out {MODEL}:extra: os.system (dangerous)" in done.stdout
    assert not Path("clean").exists()


def test_the_program_that_needs_the_known_classes_loads_them(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    source = poisoned(RUNS["os.system"][1])
    succeeded(f"sanitize {source} clean --quiet")
    found = torch.load(f"clean/{OPTIMIZER}", weights_only=False)["optimizer_state_dict"]
    assert type(found["loss_scaler"]).__module__ == "deepspeed.runtime.fp16.loss_scaler"
    assert not Path("sentinel").exists()


class Unknown:
    def __init__(self, value: object) -> None:
        self.value = value


class Odd(torch.Tensor):
    pass


def saved(path: str, value: object, *, is_legacy: bool = False) -> str:
    torch.save(value, path, _use_new_zipfile_serialization=not is_legacy)
    return path


def base() -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}, "step": 3}


TREES = {
    "value of a dict": (lambda: base() | {"x": Unknown(1)}, base),
    "key of a dict": (lambda: base() | {"x": {torch.nn.functional.gelu: 1, "y": 2}}, lambda: base() | {"x": {"y": 2}}),
    "member of a list": (lambda: base() | {"x": [1, Unknown(1), 3]}, lambda: base() | {"x": [1, None, 3]}),
    "member of a tuple": (lambda: base() | {"x": (1, Unknown(1))}, lambda: base() | {"x": (1, None)}),
    "within a tuple in a list": (lambda: base() | {"x": [(1, [Unknown(1)])]}, lambda: base() | {"x": [(1, [None])]}),
    "what holds a tensor": (lambda: base() | {"x": Unknown(torch.ones(2))}, base),
    "twice the same": (lambda: base() | dict.fromkeys("xy", Unknown(1)), base),
    "function": (lambda: base() | {"x": torch.nn.functional.gelu}, base),
    "class of a tensor": (
        lambda: base() | {"x": torch.ones(2).as_subclass(Odd)}, lambda: base() | {"x": torch.ones(2)}
    ),
    "bytes that are a pickle": (
        lambda: base() | {"x": pickle.dumps(print), "y": b"data"}, lambda: base() | {"y": b"data"}
    ),
    "BytesIO with a pickle": (lambda: base() | {"x": io.BytesIO(pickle.dumps(print))}, base),
    "tensor that is a pickle": (
        lambda: base() | {"x": torch.frombuffer(bytearray(pickle.dumps(print)), dtype=torch.uint8)}, base
    ),
    "nested 150 deep": (lambda: base() | {"x": deep(150, Unknown(1))}, lambda: base() | {"x": deep(150, None)}),
}  # fmt: skip


def deep(levels: int, value: object) -> object:
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("is_legacy", [False, True])
@pytest.mark.parametrize("case", TREES)
def test_objects_go_from_a_tree_and_where_only_data_is_left_weights_only_loads_it(case, is_legacy):
    make, expected = TREES[case]
    source = saved("m.pt", make(), is_legacy=is_legacy)
    assert not grades(source) <= {"data"}
    succeeded(f"sanitize {source} clean.pt --quiet")
    assert grades("clean.pt") == {"data"}
    assert_same_tree(torch.load("clean.pt", weights_only=True), expected())


def test_what_was_shared_is_shared_still():
    one = torch.ones(4)
    inner = [Unknown(1)]
    source = saved("m.pt", {"a": one, "b": one[1:], "list": inner, "same": inner, "model": base()["model"]})
    succeeded(f"sanitize {source} clean.pt --quiet")
    found = torch.load("clean.pt", weights_only=True)
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()
    assert found["list"] is found["same"]
    assert found["list"] == [None]


def test_records_beside_the_tree_go_and_are_listed():
    source = saved("m.pt", base())
    with zipfile.ZipFile(source, "a") as file:
        file.writestr("m/extra.pkl", corpus.system("sentinel") + b".")
    document = printed(f"sanitize {source} clean.pt")
    assert [one["place"] for one in document["removed"]] == ["extra.pkl"]
    assert_same_tree(torch.load("clean.pt", weights_only=True), base())


@pytest.mark.filterwarnings("ignore")
def test_items_of_dcp_go_as_a_whole():
    state = {"model": base()["model"], "bad": Unknown(1), "good": {"a": [1, 2]}}
    dcp.save(state, checkpoint_id="dcp", no_dist=True)
    found = zckpt.scan("dcp")
    assert {one["record"].partition(":")[0] for one in found.findings if one["grade"] == "unknown"} == {"bad"}
    document = printed("sanitize dcp clean")
    assert [one["place"] for one in document["removed"]] == ["bad"]
    assert grades("clean") == {"data", "known"}
    loaded = {"model": {key: torch.zeros_like(one) for key, one in base()["model"].items()}}
    dcp.load(loaded, checkpoint_id="clean", no_dist=True)
    assert_same_tree(loaded["model"], base()["model"])


def test_files_that_cannot_be_followed_go_as_a_whole():
    source = Path(shutil.copytree(FIXTURES / "s2_bf16_dp2", "run"))
    for name, data in {
        "broken.pkl": corpus.PICKLES["nullifAI broken behind the payload"](Path("sentinel")),
        "packed.pt": b"7z\xbc\xaf\x27\x1c" + bytes(30),
        "twice.pt": corpus.twice(corpus.HARMLESS, corpus.system("sentinel") + b"."),
    }.items():
        (source / name).write_bytes(data)
    document = printed(f"sanitize {source} clean")
    assert {one["file"] for one in document["removed"]} == {"broken.pkl", "packed.pt", "twice.pt"}
    assert contents("clean") == contents(FIXTURES / "s2_bf16_dp2")
    assert not Path("sentinel").exists()


def test_a_checkpoint_that_is_none_without_it_is_refused():
    Path("m.pt").write_bytes(corpus.archive(corpus.system("sentinel") + b"."))
    refused(3, "sanitize m.pt clean.pt", words="m.pt")
    saved("n.pt", {"w": torch.frombuffer(bytearray(pickle.dumps(print)), dtype=torch.uint8)})
    refused(5, "sanitize n.pt clean.pt", words=("n.pt", "no checkpoint without"))
    assert not Path("clean.pt").exists()


def test_objects_of_known_classes_that_hold_others_stay_without_them():
    scaler, evil = named("deepspeed.runtime.fp16.loss_scaler:LossScaler"), called(named("evil:Class"))
    source = poisoned(created(scaler) + b"}(" + text("a") + evil + text("b") + b"K\x02ub")
    document = printed(f"sanitize {source} clean")
    assert {one["place"] for one in document["removed"]} == {"extra.state.a"}
    source = poisoned(called(scaler, evil), "other")
    succeeded(f"sanitize {source} clean2 --quiet")
    assert "extra" not in zckpt.open("clean2").metadata
