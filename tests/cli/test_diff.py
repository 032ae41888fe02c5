"""`zckpt diff` and `zckpt fingerprint`: what they print, their statuses, and each error in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.console import FIXTURES, refused, run, succeeded
from tests.operations.diff.checkpoints import copied, rewrite

SOURCE = FIXTURES / "s2_bf16_dp2"


def told(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = run("diff", *arguments, "--json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy with one element of a master and all of a moment's sign changed."""
    copy = copied("s2_bf16_dp2", tmp_path)
    rewrite(copy, "fc1.weight", "master", 7, lambda x: x + 0.5)
    rewrite(copy, "emb.weight", "exp_avg", 0, lambda x: x + 1e-6)
    return copy


def test_equal_is_zero_and_different_is_one(changed, tmp_path):
    assert run("diff", SOURCE, SOURCE).returncode == 0
    done = run("diff", SOURCE, changed)
    assert done.returncode == 1
    assert done.stdout.endswith("\ndifferent: 2 slots\n")
    assert "fc1.weight" in done.stdout
    assert run("diff", SOURCE, changed, "--quiet").stdout == ""
    assert run("diff", SOURCE, changed, "--atol", "1").returncode == 0
    assert run("diff", SOURCE, changed, "--slots", "exp_avg_sq,weight").returncode == 0
    assert run("diff", SOURCE, changed, "--slots", "master", "--slots", "weight").returncode == 1
    assert run("diff", SOURCE, changed, "--parameters", "big.*", "--parameters", "ln1*").returncode == 0
    assert run("diff", SOURCE, changed, "--parameters", "fc1.*").returncode == 1


def test_weights_are_told_first_and_how_much_of_each_slot_differs(changed, tmp_path):
    rewrite(changed, "fc1.weight", "weight", 3, lambda x: x + 1)
    lines = run("diff", SOURCE, changed, "--limit", "2").stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("slot"))
    slots = {line.split()[0]: line.split()[1:3] for line in lines[at + 1 : at + 4]}
    equal = len(told(SOURCE, changed)[1]["equal_slots"])
    assert list(slots) == ["weight", "master", "exp_avg"]
    assert [one[0] for one in slots.values()] == ["1", "1", "1"]
    assert sum(int(one[1]) for one in slots.values()) < equal
    table = lines[next(number for number, line in enumerate(lines) if line.startswith("parameter")) :]
    assert [line.split()[:2] for line in table[1:3]] == [["fc1.weight", "weight"], ["fc1.weight", "master"]]
    assert "  and 1 more; --limit 3 or --json lists all" in lines


def test_document_has_all_figures(changed):
    status, document = told(SOURCE, changed)
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
    assert told(SOURCE, SOURCE)[1]["equal"] is True


def test_names_that_wrappers_change_are_matched(tmp_path):
    succeeded("consolidate", SOURCE, tmp_path / "plain.safetensors")
    tensors = load_file(tmp_path / "plain.safetensors")
    save_file({f"module._orig_mod.{name}": one for name, one in tensors.items()}, tmp_path / "wrapped.safetensors")
    save_file({f"model.{name}": one for name, one in tensors.items()}, tmp_path / "renamed.safetensors")
    assert run("diff", tmp_path / "plain.safetensors", tmp_path / "wrapped.safetensors").returncode == 0
    one = succeeded("fingerprint", tmp_path / "plain.safetensors").stdout
    assert succeeded("fingerprint", tmp_path / "wrapped.safetensors").stdout == one
    assert succeeded("fingerprint", tmp_path / "renamed.safetensors").stdout != one
    status, document = told(tmp_path / "renamed.safetensors", tmp_path / "plain.safetensors")
    assert (status, len(document["only_in_a"])) == (1, len(tensors))
    rename = ("--rename", r"^model\.=")
    assert run("diff", tmp_path / "renamed.safetensors", tmp_path / "plain.safetensors", *rename).returncode == 0


def test_metadata_may_be_ignored(tmp_path):
    succeeded("consolidate", SOURCE, tmp_path / "model", "--slots", "all")
    a, b = SOURCE, tmp_path / "model"
    assert run("diff", a, b, "--slots", "weight,master", "--ignore", "metadata").returncode == 0
    assert told(a, b, "--slots", "weight,master")[1]["metadata"] != []


def test_only_the_weights_are_compared(changed):
    lion = FIXTURES / "s2_bf16_dp2_lion"
    assert told(SOURCE, changed, "--only", "weights")[0] == 0
    status, document = told(SOURCE, lion, "--only", "weights")
    assert (status, {one["slot"] for one in document["different"]}, document["metadata"]) == (1, {"weight"}, [])
    assert told(SOURCE, SOURCE, "--slots", "step")[0] == 0
    status, document = told(SOURCE, lion, "--slots", "weight")
    assert {one["key"].rpartition(".")[2] for one in document["metadata"]} >= {"eps"}


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_text_fits_the_width(columns, changed, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = run("diff", SOURCE, changed)
    table = [line for line in done.stdout.splitlines() if "fc1.weight" in line or line.startswith("parameter")]
    assert len(table) == 2
    assert all(len(line) <= columns for line in table)


def test_series_tells_how_slots_moved(changed):
    done = json.loads(succeeded("diff", "--series", SOURCE, SOURCE, changed, "--slots", "master", "--json").stdout)
    assert done["steps"] == [5, 5, 5]
    moved = {one["name"]: one["change"] for one in done["series"] if any(one["change"][1:])}
    assert set(moved) == {"fc1.weight"}
    assert moved["fc1.weight"][:2] == [None, 0.0]
    assert {one["slot"] for one in done["series"]} == {"master"}
    assert all(len(one["norm"]) == 3 and None not in one["norm"] for one in done["series"])
    assert "fc1.weight" in succeeded("diff", "--series", SOURCE, changed).stdout


def test_what_cannot_be_compared_is_refused_in_a_line(tmp_path):
    refused(2, "diff", SOURCE, words=("two checkpoints",))
    refused(2, "diff", SOURCE, SOURCE, SOURCE, words=("two checkpoints", "3 given"))
    refused(2, "diff", SOURCE, SOURCE, "--rtol", "-1", words=("rtol", "0 or more"))
    refused(2, "diff", SOURCE, SOURCE, "--atol", "nan", words=("atol",))
    refused(2, "diff", SOURCE, SOURCE, "--rename", "(=x", words=("--rename", "regular expression"))
    refused(2, "diff", SOURCE, SOURCE, "--rename", "x", words=("OLD=NEW",))
    refused(2, "diff", SOURCE, SOURCE, "--rename", ".*=x", words=("--rename .*=x would give", "the same name"))
    refused(2, "diff", SOURCE, SOURCE, "--parameters", "nothing*", words=("nothing to compare",))
    refused(2, "diff", SOURCE, SOURCE, "--slots", "master,weights", words=("no such slot", "exp_avg", "found weights"))
    refused(2, "diff", "--series", SOURCE, SOURCE, "--slots", "weights", words=("no such slot",))
    refused(2, "diff", SOURCE, SOURCE, "--only", "weights", "--slots", "master", words=("--only and --slots",))
    refused(2, "diff", "--series", SOURCE, words=("two checkpoints or more",))
    refused(2, "diff", "--series", SOURCE, SOURCE, "--rtol", "1", words=("--series",))
    refused(3, "diff", SOURCE, tmp_path / "none", words=("none", "cannot be opened"))
    (tmp_path / "page.html").write_text("kept")
    refused(4, "diff", SOURCE, SOURCE, "--html", tmp_path / "page.html", words=("already exists",))
    assert (tmp_path / "page.html").read_text() == "kept"


def test_fingerprint_is_one_line_and_can_be_stored(tmp_path):
    copy = copied("s2_bf16_dp2", tmp_path)
    done = succeeded("fingerprint", copy, "--write")
    assert done.stdout.startswith("zckpt1:")
    assert len(done.stdout.strip()) == len("zckpt1:") + 32
    (stored,) = copy.rglob("fingerprint.json")
    document = json.loads(stored.read_text())
    assert document["fingerprint"] == done.stdout.strip()
    assert document == json.loads(succeeded("fingerprint", SOURCE, "--json").stdout)
    assert document["entries"]["fc1.weight"]["master"].startswith("float32 [13, 8] ")
    refused(4, "fingerprint", copy, "--write", words=("fingerprint.json", "already exists"))
    assert succeeded("fingerprint", copy, "--write", "--overwrite").stdout == done.stdout
    assert succeeded("fingerprint", copy, "--output", tmp_path / "own.json").stdout == done.stdout
    assert (tmp_path / "own.json").read_bytes() == stored.read_bytes()
    refused(3, "fingerprint", tmp_path / "none", words=("cannot be opened",))


def test_writers_record_the_fingerprint(tmp_path):
    expected = succeeded("fingerprint", SOURCE).stdout.strip()

    def recorded(path):
        return json.loads(path.read_text())["fingerprint"]

    succeeded("convert", SOURCE, tmp_path / "own", "--to", "zckpt")
    assert recorded(tmp_path / "own" / "fingerprint.json") == expected
    succeeded("convert", SOURCE, tmp_path / "own", "--to", "zckpt", "--no-fingerprint", "--overwrite")
    assert not (tmp_path / "own" / "fingerprint.json").exists()
    succeeded("convert", SOURCE, tmp_path / "dcp", "--to", "dcp", "--fingerprint")
    assert recorded(tmp_path / "dcp" / "fingerprint.json") == expected
    succeeded("convert", SOURCE, tmp_path / "all.pt", "--to", "consolidated", "--fingerprint")
    assert recorded(tmp_path / "all.pt.fingerprint.json") == expected
    succeeded("reshard", SOURCE, tmp_path / "cut", "--world-size", "3", "--fingerprint")
    (place,) = (tmp_path / "cut").rglob("fingerprint.json")
    assert recorded(place) == expected
    succeeded("reshard", SOURCE, tmp_path / "cut", "--world-size", "4", "--overwrite")
    assert not list((tmp_path / "cut").rglob("fingerprint.json"))
