"""`zckpt diff` and `zckpt fingerprint`: what they print, their statuses, and each error in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.console import printed, refused, run, succeeded
from tests.operations.diff.checkpoints import copied, rewrite

SOURCE, LION = "fixtures/s2_bf16_dp2", "fixtures/s2_bf16_dp2_lion"


def told(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = run("diff", *arguments, "--json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def changed() -> Path:
    """A copy with one element of a master and all of a moment's sign changed."""
    copy = copied("s2_bf16_dp2")
    rewrite(copy, "fc1.weight", "master", 7, lambda x: x + 0.5)
    rewrite(copy, "emb.weight", "exp_avg", 0, lambda x: x + 1e-6)
    return copy


def test_equal_is_zero_and_different_is_one(changed):
    succeeded(f"diff {SOURCE} {SOURCE}")
    done = run(f"diff {SOURCE} {changed}")
    assert done.returncode == 1
    assert done.stdout.endswith("\ndifferent: 2 slots\n")
    assert "fc1.weight" in done.stdout
    assert run(f"diff {SOURCE} {changed} --quiet").stdout == ""
    succeeded(f"diff {SOURCE} {changed} --atol 1")
    succeeded(f"diff {SOURCE} {changed} --slots exp_avg_sq,weight")
    assert run(f"diff {SOURCE} {changed} --slots master --slots weight").returncode == 1
    succeeded(f"diff {SOURCE} {changed} --parameters big.* --parameters ln1*")
    assert run(f"diff {SOURCE} {changed} --parameters fc1.*").returncode == 1


def test_weights_are_told_first_and_how_much_of_each_slot_differs(changed):
    rewrite(changed, "fc1.weight", "weight", 3, lambda x: x + 1)
    lines = run(f"diff {SOURCE} {changed} --limit 2").stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("slot"))
    slots = {line.split()[0]: line.split()[1:3] for line in lines[at + 1 : at + 4]}
    equal = len(told(f"{SOURCE} {changed}")[1]["equal_slots"])
    assert list(slots) == ["weight", "master", "exp_avg"]
    assert [one[0] for one in slots.values()] == ["1", "1", "1"]
    assert sum(int(one[1]) for one in slots.values()) < equal
    table = lines[next(number for number, line in enumerate(lines) if line.startswith("parameter")) :]
    assert [line.split()[:2] for line in table[1:3]] == [["fc1.weight", "weight"], ["fc1.weight", "master"]]
    assert "  and 1 more; --limit 3 or --json lists all" in lines


def test_document_has_all_figures(changed):
    status, document = told(f"{SOURCE} {changed}")
    assert status == 1
    assert [(one["name"], one["slot"]) for one in document["different"]] == [
        ("fc1.weight", "master"),
        ("emb.weight", "exp_avg"),
    ]
    first = document["different"][0]
    assert set(first) == {
        "name", "slot", "num_different", "numel", "max_abs", "max_rel", "rel_l2", "cosine", "max_ulp", "nan_a", "nan_b",
        "inf_a", "inf_b", "first", "dtype_a", "dtype_b", "shape_a", "shape_b", "histogram",
    }  # fmt: skip
    assert (first["num_different"], first["first"], first["shape_a"]) == (1, 7, [13, 8])
    assert first["max_abs"] == pytest.approx(0.5)
    assert first["rel_l2"] > 0
    assert sum(first["histogram"]["counts"]) == 1
    assert len(document["equal_slots"]) + 2 == document["compared"]["slots"]
    assert (document["equal"], document["only_in_a"], document["only_in_b"], document["metadata"]) == (
        False,
        [],
        [],
        [],
    )
    assert document["a"]["format"] == "deepspeed"
    assert told(f"{SOURCE} {SOURCE}")[1]["equal"] is True


def test_names_that_wrappers_change_are_matched():
    succeeded(f"consolidate {SOURCE} plain.safetensors")
    tensors = load_file("plain.safetensors")
    save_file({f"module._orig_mod.{name}": one for name, one in tensors.items()}, "wrapped.safetensors")
    save_file({f"model.{name}": one for name, one in tensors.items()}, "renamed.safetensors")
    succeeded("diff plain.safetensors wrapped.safetensors")
    one = succeeded("fingerprint plain.safetensors").stdout
    assert succeeded("fingerprint wrapped.safetensors").stdout == one
    assert succeeded("fingerprint renamed.safetensors").stdout != one
    status, document = told("renamed.safetensors plain.safetensors")
    assert (status, len(document["only_in_a"])) == (1, len(tensors))
    succeeded("diff renamed.safetensors plain.safetensors", r"--rename ^model\.=")


def test_metadata_may_be_ignored():
    succeeded(f"consolidate {SOURCE} model --slots all")
    succeeded(f"diff {SOURCE} model --slots weight,master --ignore metadata")
    assert told(f"{SOURCE} model --slots weight,master")[1]["metadata"] != []


def test_only_the_weights_are_compared(changed):
    assert told(f"{SOURCE} {changed} --only weights")[0] == 0
    status, document = told(f"{SOURCE} {LION} --only weights")
    assert (status, {one["slot"] for one in document["different"]}, document["metadata"]) == (1, {"weight"}, [])
    assert told(f"{SOURCE} {SOURCE} --slots step")[0] == 0
    status, document = told(f"{SOURCE} {LION} --slots weight")
    assert {one["key"].rpartition(".")[2] for one in document["metadata"]} >= {"eps"}


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_text_fits_the_width(columns, changed, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = run(f"diff {SOURCE} {changed}")
    table = [line for line in done.stdout.splitlines() if "fc1.weight" in line or line.startswith("parameter")]
    assert len(table) == 2
    assert all(len(line) <= columns for line in table)


def test_series_tells_how_slots_moved(changed):
    done = printed(f"diff --series {SOURCE} {SOURCE} {changed} --slots master")
    assert done["steps"] == [5, 5, 5]
    moved = {one["name"]: one["change"] for one in done["series"] if any(one["change"][1:])}
    assert set(moved) == {"fc1.weight"}
    assert moved["fc1.weight"][:2] == [None, 0.0]
    assert {one["slot"] for one in done["series"]} == {"master"}
    assert all(len(one["norm"]) == 3 and None not in one["norm"] for one in done["series"])
    assert "fc1.weight" in succeeded(f"diff --series {SOURCE} {changed}").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (SOURCE, "two checkpoints"),
        (f"{SOURCE} {SOURCE} {SOURCE}", ("two checkpoints", "3 given")),
        (f"{SOURCE} {SOURCE} --rtol -1", ("rtol", "0 or more")),
        (f"{SOURCE} {SOURCE} --atol nan", "atol"),
        (f"{SOURCE} {SOURCE} --rename (=x", ("--rename", "regular expression")),
        (f"{SOURCE} {SOURCE} --rename x", "OLD=NEW"),
        (f"{SOURCE} {SOURCE} --rename .*=x", ("--rename .*=x would give", "the same name")),
        (f"{SOURCE} {SOURCE} --parameters nothing*", "nothing to compare"),
        (f"{SOURCE} {SOURCE} --slots master,weights", ("no such slot", "exp_avg", "found weights")),
        (f"{SOURCE} {SOURCE} --only weights --slots master", "--only and --slots"),
        (f"--series {SOURCE} {SOURCE} --slots weights", "no such slot"),
        (f"--series {SOURCE}", "two checkpoints or more"),
        (f"--series {SOURCE} {SOURCE} --rtol 1", "--series"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(arguments, words):
    refused(2, f"diff {arguments}", words=words)


def test_what_is_not_there_is_not_compared_and_a_page_that_is_there_stays():
    refused(3, f"diff {SOURCE} none", words=("none", "cannot be opened"))
    Path("page.html").write_text("kept")
    refused(4, f"diff {SOURCE} {SOURCE} --html page.html", words="already exists")
    assert Path("page.html").read_text() == "kept"


def test_fingerprint_is_one_line_and_can_be_stored():
    copy = copied("s2_bf16_dp2")
    done = succeeded("fingerprint", copy, "--write")
    assert done.stdout.startswith("zckpt1:")
    assert len(done.stdout.strip()) == len("zckpt1:") + 32
    (stored,) = copy.rglob("fingerprint.json")
    document = json.loads(stored.read_text())
    assert document["fingerprint"] == done.stdout.strip()
    assert document == printed(f"fingerprint {SOURCE}")
    assert document["entries"]["fc1.weight"]["master"].startswith("float32 [13, 8] ")
    refused(4, "fingerprint", copy, "--write", words=("fingerprint.json", "already exists"))
    assert succeeded("fingerprint", copy, "--write --overwrite").stdout == done.stdout
    assert succeeded("fingerprint", copy, "--output own.json").stdout == done.stdout
    assert Path("own.json").read_bytes() == stored.read_bytes()
    refused(3, "fingerprint none", words="cannot be opened")


def test_writers_record_the_fingerprint():
    expected = succeeded(f"fingerprint {SOURCE}").stdout.strip()

    def recorded(path: str) -> bool:
        return json.loads(Path(path).read_text())["fingerprint"] == expected

    succeeded(f"convert {SOURCE} own --to zckpt")
    assert recorded("own/fingerprint.json")
    succeeded(f"convert {SOURCE} own --to zckpt --no-fingerprint --overwrite")
    assert not Path("own/fingerprint.json").exists()
    succeeded(f"convert {SOURCE} dcp --to dcp --fingerprint")
    assert recorded("dcp/fingerprint.json")
    succeeded(f"convert {SOURCE} all.pt --to consolidated --fingerprint")
    assert recorded("all.pt.fingerprint.json")
    succeeded(f"reshard {SOURCE} cut --world-size 3 --fingerprint")
    (place,) = Path("cut").rglob("fingerprint.json")
    assert recorded(place)
    succeeded(f"reshard {SOURCE} cut --world-size 4 --overwrite")
    assert not list(Path("cut").rglob("fingerprint.json"))
