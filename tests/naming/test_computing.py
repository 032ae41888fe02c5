"""Means and merges of checkpoints whose names differ: what they are under the same names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import refused, succeeded
from tests.logical import assert_same_tree
from tests.operations.test_merge_adapter import ADAPTERS
from tests.refusals import refusing
from zckpt.errors import UsageError

MAP = {
    "sides": ["apart", "joined"],
    "sizes": {"three": "3", "heads": "n_head"},
    "rules": [
        {
            "apart": {f"{one}.weight": f"(heads three[{i}] d) in" for i, one in enumerate("qkv")},
            "joined": {"qkv": "in (heads three d)"},
        },
        {"apart": "norm", "joined": "ln"},
    ],
}
MAPPED = {"map": MAP, "map_config": {"n_head": 4}}


def saved(path: Path, seed: int, prefix: str = "") -> Path:
    drawn = torch.Generator().manual_seed(seed)
    tensors = {f"{prefix}{one}.weight": torch.randn(12, 5, generator=drawn) for one in "qkv"}
    save_file({**tensors, f"{prefix}norm": torch.randn(5, generator=drawn)}, path)
    return path


def assert_alike(found: Path, expected: Path) -> None:
    assert_same_tree(load_file(found), load_file(expected))


def test_a_mean_of_two_arrangements_is_that_of_one():
    a, b = (saved(f"{seed}.safetensors", seed) for seed in range(2))
    joined = Path("joined.safetensors")
    zckpt.consolidate(b, joined, **MAPPED)
    zckpt.average([a, b], "mean.safetensors", weights=[1, 3])
    zckpt.consolidate("mean.safetensors", "expected.safetensors", **MAPPED)

    # all of them get the names that the first has not; what has them already stays
    done = zckpt.average([a, joined], "m.safetensors", weights=[1, 3], verify=True, **MAPPED)
    assert_alike("m.safetensors", "expected.safetensors")
    assert done.notes[0] == "the map: names of apart become those of joined"
    zckpt.average([joined, a], "back.safetensors", weights=[3, 1], **MAPPED)
    assert_alike("back.safetensors", "mean.safetensors")


def test_a_prefix_that_some_sources_have_is_taken_off_those():
    a = saved("a.safetensors", 0)
    b = saved("b.safetensors", 1, "model.")
    plain = saved("c.safetensors", 1)
    zckpt.average([a, plain], "expected.safetensors")
    for number, sources in enumerate(((a, b), (b, a))):
        target = Path(f"{number}.safetensors")
        succeeded("average", *sources, "--target", target, "--strip-prefix", "model.", "--rename", "^norm=ln",
                  "--rename", "^ln=norm")  # fmt: skip
        assert_alike(target, "expected.safetensors")
    no = ("--target", Path("no.safetensors"))
    refused(2, "average", a, plain, *no, "--strip-prefix", "model.",
            words=("--strip-prefix model. matches no name", "in any of the sources"))  # fmt: skip
    refused(2, "average", a, b, *no, "--rename", "^norm=q.weight", words=("norm and q.weight the same",))
    assert not Path("no.safetensors").exists()


def test_an_adapter_is_merged_into_a_base_of_other_names():
    source = ADAPTERS / "plain"
    base = source / "base.safetensors"
    zckpt.merge_adapter(base, source, "expected.safetensors")
    zckpt.consolidate(base, "wrapped.safetensors", add_prefix="policy.")
    with refusing(UsageError, "give the model that the adapter was trained on"):
        zckpt.merge_adapter("wrapped.safetensors", source, "m.safetensors")
    succeeded("merge-adapter", "wrapped.safetensors", source, "m.safetensors",
              "--strip-prefix", "policy.", "--verify")  # fmt: skip
    assert_alike("m.safetensors", "expected.safetensors")


def test_an_adapter_is_merged_into_a_base_that_is_arranged_otherwise():
    base = saved("base.safetensors", 0)
    zckpt.consolidate(base, "joined.safetensors", **MAPPED)
    Path("adapter").mkdir()
    drawn = torch.Generator().manual_seed(2)
    factors = {}
    for one in "qv":
        factors[f"base_model.model.{one}.lora_A.weight"] = torch.randn(2, 5, generator=drawn)
        factors[f"base_model.model.{one}.lora_B.weight"] = torch.randn(12, 2, generator=drawn)
    save_file(factors, "adapter/adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q", "v"]}
    Path("adapter/adapter_config.json").write_text(json.dumps(about))
    zckpt.merge_adapter(base, "adapter", "expected.safetensors")
    done = zckpt.merge_adapter("joined.safetensors", "adapter", "m.safetensors", verify=True, **MAPPED)
    assert_alike("m.safetensors", "expected.safetensors")
    assert (done.num_merged, done.notes[0]) == (2, "the map: names of joined become those of apart")
