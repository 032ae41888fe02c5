"""Every verb takes a path or an open checkpoint, and the same words for where the rest of it is."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES, refused, succeeded
from tests.folders import contents, names_in
from tests.live import trained
from tests.refusals import refusing
from zckpt.cli import cli

SOURCE = FIXTURES / "s2_bf16_dp2"
ADAPTER = Path(__file__).parent / "adapters/of_s2_bf16_dp2"

Verb = Callable[..., Any]
READING: dict[str, Verb] = {
    "diff": lambda source, _, **where: zckpt.diff(source, SOURCE, **where).equal,
    "inspect": lambda source, _, **where: zckpt.inspect(source, **where).as_dict(),
    "map": lambda source, _, **where: zckpt.map(source, **where).as_dict(),
    "fingerprint": lambda source, _, **where: zckpt.fingerprint(source, **where).text,
    "show": lambda source, _, **where: zckpt.show(source, "fc1.weight", **where).as_dict(),
    "stats": lambda source, _, **where: zckpt.stats(source, **where).as_dict(),
    "resume-check": lambda source, _, **where: zckpt.resume_check(source, program="deepspeed", **where).as_dict(),
    "verify": lambda source, _, **where: zckpt.verify(source, deep=True, **where).as_dict(),
}
WRITING: dict[str, Verb] = {
    "merge-adapter": lambda source, target, **where: zckpt.merge_adapter(source, ADAPTER, target / "m.pt", **where),
    "average": lambda source, target, **where: zckpt.average(
        [source] * 2 if isinstance(source, zckpt.Checkpoint) else [source, zckpt.open(SOURCE)], target / "m.pt", **where
    ),
    "consolidate": lambda source, target, **where: zckpt.consolidate(source, target / "m.pt", **where),
    "convert": lambda source, target, **where: zckpt.convert(source, target / "d", to="dcp", **where),
    "convert to deepspeed": lambda source, target, **where: zckpt.convert(
        source, target / "d", to="deepspeed", **where
    ),
    "reshard": lambda source, target, **where: zckpt.reshard(source, target / "d", world_size=3, **where),
    "strip": lambda source, target, **where: zckpt.strip(source, target / "d", padding=True, optimizer=True, **where),
}
VERBS = READING | WRITING


def looked(verb: str, source: object, name: str, **where: Any) -> object:
    """What a verb returns, or what it wrote."""
    target = Path(name)
    target.mkdir()
    found = VERBS[verb](source, target, **where)
    return found if verb in READING else contents(target)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["s2_bf16_dp2", "s2_bf16_dp2/global_step5"])
@pytest.mark.every(2)
def test_an_open_checkpoint_gives_what_its_path_gives_and_stays_as_it_was(place, verb):
    source = FIXTURES / place
    opened = zckpt.open(source)
    before = json.dumps(zckpt.inspect(opened, include_inventory=True).as_dict())
    parameters = {name: dict(one.slots) for name, one in opened.parameters.items()}
    assert looked(verb, opened, "open") == looked(verb, source, "path")
    assert json.dumps(zckpt.inspect(opened, include_inventory=True).as_dict()) == before
    assert {name: one.slots for name, one in opened.parameters.items()} == parameters


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "where", [{"tag": "global_step5"}, {"roots": ["x"]}, {"names": ["a"]}, {"tp_rules": "rules.json"}]
)
@pytest.mark.every(4)
def test_an_open_checkpoint_and_where_to_find_it_are_refused(verb, where):
    with refusing(zckpt.UsageError, f"{next(iter(where))}: the checkpoint is open already"):
        VERBS[verb](zckpt.open(SOURCE), Path(), **where)
    assert names_in() == []


@pytest.mark.parametrize("name", ["open", *dict.fromkeys(verb.partition(" ")[0].replace("-", "_") for verb in VERBS)])
def test_every_verb_has_the_same_words_for_where(name):
    assert {"roots", "tag", "names", "tp_rules"} <= inspect.signature(getattr(zckpt, name)).parameters.keys()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.every(2)
def test_shards_on_two_nodes_and_a_tag(verb):
    first, second = Path("node0"), Path("node1")
    shutil.copytree(SOURCE, first)
    (first / "latest").write_text("gone")
    [moved] = first.glob("*/*_1_*optim_states.pt")
    (second / moved.parent.name).mkdir(parents=True)
    moved.rename(second / moved.parent.name / moved.name)
    with pytest.raises(zckpt.ZckptError):
        zckpt.open(first, tag="global_step5")
    where: dict[str, Any] = {"roots": [second], "tag": "global_step5"}
    from_paths = looked(verb, first, "paths", **where)
    assert looked(verb, zckpt.open(first, **where), "open") == from_paths


def test_both_sides_of_a_diff_may_need_words():
    for name in ("a", "b"):
        shutil.copytree(SOURCE, name)
        Path(name, "latest").write_text("gone")
    tag = "global_step5"
    assert zckpt.diff("a", "b", tag=tag, tag_b=tag).equal
    succeeded(f"diff a b --tag {tag} --tag-b {tag}")
    with pytest.raises(zckpt.SourceError):
        zckpt.diff("a", "b", tag=tag)
    refused(3, f"diff a b --tag {tag}")
    refused(2, f"diff --series a b --tag {tag}")
    with refusing(zckpt.UsageError, "open already"):
        zckpt.diff("a", zckpt.open(SOURCE), tag=tag, tag_b=tag)


def test_names_that_were_given_are_those_of_what_is_written():
    _, optimizer = trained(torch.nn.Linear(3, 2))
    torch.save(optimizer.state_dict(), "optimizer.pt")
    names = ["weight", "bias"]
    opened = zckpt.open("optimizer.pt", names=names)
    zckpt.strip("optimizer.pt", "a.pt", keep_slots=["exp_avg"], names=names)
    zckpt.strip(opened, "b.pt", keep_slots=["exp_avg"])
    assert Path("a.pt").read_bytes() == Path("b.pt").read_bytes()
    kept = zckpt.open("a.pt", names=names)
    assert torch.equal(kept.read("weight", "exp_avg"), opened.read("weight", "exp_avg"))


# formats opens nothing, scan any file, list, prune and pack all checkpoints, unpack none; patch and apply open one.
@pytest.mark.parametrize("name", sorted(cli.commands.keys() - {"formats", "list", "prune", "pack", "scan", "unpack"}))
def test_every_verb_of_the_command_line_has_the_same_options_for_where(name):
    options = {one for parameter in cli.commands[name].params for one in parameter.opts}
    assert {"--tag", "--root", "--names", "--tp-rules"} <= options
    assert "--drop" in options or "--dry-run" not in options or name in ("patch", "apply")  # of all files, or none


WITH_FOLDERS = ["s2_bf16_dp2", "universal/s2_bf16_dp4", "other/zro_dp2_adamw/ckpt", "other/accel_fsdp2_dp2/state",
                "other/dcphf_sharded_dp3/ckpt", "other/nanotron_zero1_tp2_dp2/ckpt"]  # fmt: skip


@pytest.mark.parametrize("name", WITH_FOLDERS)
@pytest.mark.every(2)
def test_what_macos_leaves_beside_each_file_is_no_part_of_a_checkpoint(name, tmp_path):
    """Where the file system of a copy has no place for attributes; tar archives have them, too."""
    shutil.copytree(FIXTURES / name, tmp_path / "c", ignore=shutil.ignore_patterns("truth.*"))
    expected = zckpt.verify(tmp_path / "c", deep=True).as_dict()
    for file in [one for one in (tmp_path / "c").rglob("*") if one.is_file()]:
        file.with_name(f"._{file.name}").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X        ")
    assert zckpt.verify(tmp_path / "c", deep=True).as_dict() == expected
    zckpt.convert(tmp_path / "c", tmp_path / "native", to="zckpt", verify=True)
