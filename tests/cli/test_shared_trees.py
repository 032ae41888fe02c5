"""Small files whose objects refer to each other in 2**60 ways, or to themselves: every verb does bounded work."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.console import FIXTURES, copy, in_time, printed, run, succeeded
from tests.pairwise import each
from zckpt.formats import open_checkpoint
from zckpt.operations.diff import trees
from zckpt.optim.values import value_of

DOUBLED = 60
FIRST = 1000
"""Of the memo: torch's own pickle uses a few hundred."""


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    with in_time(60):
        yield


@pytest.fixture
def fewer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time goes by in looking at as many leaves as a comparison may: one test has all of them."""
    monkeypatch.setattr(trees, "MAXIMUM_LEAVES", trees.MAXIMUM_LEAVES // 16)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def doubled(pair: Callable[[bytes], bytes]) -> bytes:
    """An object that has another twice, which has another twice, and so on."""
    made = b"](K\x07e" + b"r" + number(FIRST)
    for level in range(DOUBLED):
        made += b"0" + pair(b"j" + number(FIRST + level)) + b"r" + number(FIRST + level + 1)
    return made


TREES = {
    "lists": doubled(lambda one: b"](" + one + one + b"e"),
    "tuples": doubled(lambda one: one + one + b"\x86"),
    "dicts": doubled(lambda one: b"}(" + text("a") + one + text("b") + one + b"u"),
    "objects": doubled(lambda one: b"csome.library\nThing\n(" + one + one + b"tR"),
    "a list in itself": b"]r" + number(FIRST) + b"j" + number(FIRST) + b"a",
    "a dict in itself": b"}r" + number(FIRST) + text("self") + b"j" + number(FIRST) + b"s",
    "a tuple in itself": b"]r" + number(FIRST) + b"j" + number(FIRST) + b"\x85r" + number(FIRST + 1) + b"a0j"
    + number(FIRST + 1),
}  # fmt: skip

MARK = "put the tree here"


def mark(content: dict[str, Any], path: tuple[Any, ...]) -> None:
    at: Any = content
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = MARK


def with_tree(source: Path, target: Path, path: tuple[Any, ...], tree: bytes) -> Path:
    """Write a file of torch's with a tree in one place of it."""
    content = torch.load(source, weights_only=False)
    mark(content, path)
    torch.save(content, target)
    with zipfile.ZipFile(target) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    (name,) = [name for name in records if name.endswith("/data.pkl")]
    before, found, after = records[name].partition(text(MARK))
    assert found
    after = after[2:] if after[:1] == b"q" else after[5:] if after[:1] == b"r" else after  # what torch put in the memo
    records[name] = before + tree + after
    with zipfile.ZipFile(target, "w") as archive:
        for record, data in records.items():
            archive.writestr(record, data)
    return target


PLAIN = FIXTURES / "other/plain_adamw/ckpt.pt"
OPTIMIZER_FILE = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL_FILE = "mp_rank_00_model_states.pt"
PLACES: dict[str, tuple[Any, ...]] = {
    "beside the model": ("extra",),
    "instead of the model": ("model",),
    "in the model": ("model", "extra_state"),
    "instead of the optimizer": ("optimizer",),
    "instead of groups": ("optimizer", "param_groups"),
    "in a group": ("optimizer", "param_groups", 0, "betas"),
    "instead of a group's parameters": ("optimizer", "param_groups", 0, "params"),
    "in a parameter's state": ("optimizer", "state", 0, "extra"),
    "instead of the step": ("step",),
}


def in_one_line(*arguments: object) -> None:
    done = run(*arguments)
    assert done.returncode in (0, 1, 2, 3, 5), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1) or len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(("tree", "place"), each(TREES, ["beside the model", "in a group"]))
@pytest.mark.usefixtures("fewer_leaves")
@pytest.mark.every(3)
def test_every_verb_reads_a_file_with_such_a_tree(tree, place):
    with_tree(PLAIN, Path("a.pt"), PLACES[place], TREES[tree])
    in_one_line("inspect a.pt --parameters --globals")
    in_one_line("verify a.pt --deep")
    in_one_line("diff fixtures/other/plain_adamw/ckpt.pt a.pt")
    in_one_line("strip a.pt stripped.pt --optimizer")
    for name in ("consolidated.pt", "consolidated.safetensors"):
        in_one_line(f"consolidate a.pt {name} --slots all --quiet --overwrite")
    for to in ("zckpt", "dcp", "universal"):
        in_one_line(f"convert a.pt {to} --to {to} --quiet")
    in_one_line("convert a.pt deepspeed --to deepspeed --stage 2 --world-size 2 --quiet")


@pytest.mark.parametrize(("place", "tree"), each(PLACES, ["dicts", "a list in itself"]))
@pytest.mark.every(2)
def test_such_a_tree_may_be_anywhere_in_a_file(tree, place):
    with_tree(PLAIN, Path("a.pt"), PLACES[place], TREES[tree])
    in_one_line("inspect a.pt")
    in_one_line("verify a.pt")
    in_one_line("consolidate a.pt consolidated.pt --slots all --quiet")


SHARDS = {
    "a model file": (MODEL_FILE, ("extra",)),
    "the configuration": (MODEL_FILE, ("ds_config",)),
    "shapes": (MODEL_FILE, ("param_shapes",)),
    "the step": (MODEL_FILE, ("global_steps",)),
    "the loss scaler": (OPTIMIZER_FILE, ("optimizer_state_dict", "loss_scaler")),
    "the stage": (OPTIMIZER_FILE, ("optimizer_state_dict", "zero_stage")),
    "a group": (
        OPTIMIZER_FILE,
        ("optimizer_state_dict", "base_optimizer_state", "param_groups", 0, "betas"),
    ),
}


@pytest.mark.parametrize(("place", "tree"), each(SHARDS, ["lists", "a dict in itself"]))
@pytest.mark.every(2)
def test_such_a_tree_may_be_anywhere_in_deepspeeds_files(tree, place):
    name, path = SHARDS[place]
    file = copy("s2_bf16_dp2") / "global_step5" / name
    with_tree(file, file, path, TREES[tree])
    in_one_line("inspect s2_bf16_dp2")
    in_one_line("reshard s2_bf16_dp2 resharded --world-size 3 --quiet")
    in_one_line("convert s2_bf16_dp2 universal --to universal --quiet")


@pytest.mark.usefixtures("fewer_leaves")
@pytest.mark.parametrize("tree", ["lists", "objects", "a dict in itself"])
def test_what_is_carried_comes_back_as_it_was(tree):
    """Through zckpt's own format and back into a file of torch's, which torch loads."""
    with_tree(PLAIN, Path("a.pt"), ("extra",), TREES[tree])
    succeeded("convert a.pt zckpt --to zckpt --quiet")
    succeeded("convert zckpt back --to consolidated --quiet")
    for again in ("zckpt", "back"):
        assert printed(f"diff a.pt {again}")["equal"] is True


def test_a_difference_far_below_is_found():
    for name, tree in (("a.pt", TREES["lists"]), ("b.pt", TREES["lists"].replace(b"K\x07", b"K\x08"))):
        with_tree(PLAIN, Path(name), ("extra",), tree)
    done = run("diff a.pt b.pt --json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["equal"] is False


def test_program_gets_the_tree_that_was_saved():
    source = with_tree(PLAIN, Path("a.pt"), ("extra",), TREES["a list in itself"])
    tree = value_of(open_checkpoint(source).metadata["extra"])
    assert tree[0] is tree
    source = with_tree(PLAIN, Path("a.pt"), ("extra",), TREES["lists"])
    tree = value_of(open_checkpoint(source).metadata["extra"])
    for _ in range(DOUBLED):
        assert tree[0] is tree[1]
        tree = tree[0]
    assert tree == [7]
