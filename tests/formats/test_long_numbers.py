"""Numbers of thousands of digits in names: names like others, or refused. Python makes no number of so many digits."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from tests.cli.console import FIXTURES, in_time, run
from tests.inventory.sources import SOURCES
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.naming.document import read_map

LONG = "1" * 5000
DAILY = (
    "moe_ep2_s2_bf16_dp2",
    "pp2_s1_bf16_dp1",
    "other/plain_adamw",
    "other/mcore_legacy_tp2_pp2",
    "other/zro_dp2_adamw",
)
WHICH = [r"\d+$", r"\d+", r"(?<=\.)\d+(?=\.(?!\d))"]


def lengthened(node, pattern: re.Pattern[str]):
    """Return a tree with a long number in the place of one in every key and text."""
    if isinstance(node, dict):
        made = {lengthened(key, pattern): lengthened(value, pattern) for key, value in node.items()}
        if type(node) is dict:
            return made
        node.clear()
        node.update(made)
        return node
    if type(node) in (list, tuple):
        return type(node)(lengthened(one, pattern) for one in node)
    return pattern.sub(LONG, node, count=1) if isinstance(node, str) else node


@pytest.mark.parametrize(
    ("name", "which"),
    some(itertools.product(DAILY, WHICH), itertools.product(sorted(SOURCES.keys() - set(DAILY)), WHICH)),
)
@pytest.mark.every(4)
def test_names_in_files_may_have_long_numbers(name, which, tmp_path):
    source = SOURCES[name]
    if not any(path.suffix in (".pt", ".bin", ".pth") for path in source.rglob("*")):
        return
    shutil.copytree(source, tmp_path / "a")
    for path in (tmp_path / "a").rglob("*"):
        if path.suffix in (".pt", ".bin", ".pth"):
            try:
                content = torch.load(path, weights_only=False)
            except Exception:  # another program's classes, which are not here
                continue
            torch.save(lengthened(content, re.compile(which)), path)
    with in_time(60):
        for arguments in (
            ("inspect", tmp_path / "a"),
            ("verify", tmp_path / "a"),
            ("consolidate", tmp_path / "a", tmp_path / "m.pt", "--slots", "all", "--drop", "*"),
            ("convert", tmp_path / "a", tmp_path / "own", "--to", "zckpt", "--drop", "*"),
            ("convert", tmp_path / "a", tmp_path / "ds", "--to", "deepspeed", "--world-size", 2, "--stage", 2),
            ("convert", tmp_path / "a", tmp_path / "tr", "--to", "transformers-trainer"),
            ("convert", tmp_path / "a", tmp_path / "mc", "--to", "megatron"),
            ("reshard", tmp_path / "a", tmp_path / "re", "--world-size", 3),
        ):
            assert run(*arguments).returncode in (0, 1, 2, 3, 5), arguments


def test_maps_and_trainers_take_long_numbers():
    save_file({f"model.layers.{LONG}.mlp.up_proj.weight": torch.ones(2, 2)}, "x.safetensors")
    with refusing(zckpt.UsageError, "has no rule for"):
        zckpt.consolidate("x.safetensors", "m.safetensors", map="llama-huggingface-meta")
    document = {"sides": ["a", "b"], "rules": [{"a": "x.{l}.w", "b": "y.{l}.w"}], "sizes": {"h": LONG}}
    Path("map.json").write_text(json.dumps(document))
    with pytest.raises(zckpt.ZckptError):
        zckpt.consolidate("x.safetensors", "m.safetensors", map="map.json")
    for text in ("x.{a}{b}.w", "x.{a}1{b}.w", "x.{a}0"):
        with refusing(zckpt.UsageError, "what follows it cannot be told apart"):
            read_map({"sides": ["a", "b"], "rules": [{"a": text, "b": text}]})


@pytest.mark.parametrize("text", [LONG, "²", "1" * 19])
def test_what_names_a_checkpoint_may_be_no_number(text, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert run("inspect", tmp_path).returncode in (2, 3)
    shutil.copytree(FIXTURES / "other" / "mcore_legacy_tp2_pp2", tmp_path / "run")
    for path in (tmp_path / "run").rglob("latest_checkpointed_iteration.txt"):
        path.write_text(text)
        assert run("inspect", path.parent).returncode in (2, 3)


def replaced(node, key, value):
    """Return a tree with another number wherever one is under a key."""
    if isinstance(node, dict):
        for one in node:
            number = isinstance(node[one], (int, float)) or (isinstance(node[one], torch.Tensor) and not node[one].ndim)
            node[one] = value if one == key and number else replaced(node[one], key, value)
    return [replaced(one, key, value) for one in node] if type(node) is list else node


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("s2_fp16_dp2", "global_steps"), ("s0_fp16_dp2", "cur_scale"), ("other/plain_adamw", "step"),
        ("other/zro_dp2_adamw", "step"), ("universal/s2_bf16_dp4", "skipped_steps"),
    ],
)  # fmt: skip
@pytest.mark.every(3)
def test_numbers_in_files_may_be_beyond_all_floats(name, key, value):
    shutil.copytree(SOURCES[name], "a") if SOURCES[name].is_dir() else shutil.copy(SOURCES[name], "a")
    for path in [Path("a")] if Path("a").is_file() else Path("a").rglob("*.pt"):
        torch.save(replaced(torch.load(path, weights_only=False), key, value), path)
    for arguments in (
        ("inspect", Path("a")),
        ("verify", Path("a")),
        ("consolidate", Path("a"), Path("m.safetensors"), "--slots", "all"),
        ("convert", Path("a"), Path("ds"), "--to", "deepspeed", "--world-size", 2, "--stage", 2),
    ):
        assert run(*arguments).returncode in (0, 1, 2, 3, 5), arguments
