"""Means of checkpoints of several formats and world sizes: torch's float32 sum, rounded once, or one clear line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import FIXTURES, printed, refused, succeeded
from tests.folders import contents, files_in, names_in, write_model
from tests.logical import assert_same_tree
from tests.refusals import refusing
from tests.truth import Truth

SAME = [FIXTURES / name for name in ("s2_bf16_dp2", "s2_bf16_dp3", "s3_bf16_dp4")]
"""One model, at several stages and world sizes, all with fp32 masters."""


def values(source: Path) -> dict[str, torch.Tensor]:
    """What a mean is computed from, by name: masters, else weights; as the live optimizer had them."""
    truth = Truth(source)
    found = {**truth.weights, **truth.masters}
    return {**found, **{alias: found[owner] for alias, owner in truth.tied.items()}}


def mean(tensors: list[torch.Tensor], weights: list[float], dtype: torch.dtype) -> torch.Tensor:
    alike = len(set(weights)) == 1
    shares = [1.0 if alike else weight / sum(weights) for weight in weights]
    total = shares[0] * tensors[0].float()
    for share, tensor in zip(shares[1:], tensors[1:], strict=True):
        total = total + share * tensor.float()
    return (total / len(weights) if alike else total).to(dtype)


def averaged(paths: list[Any], **options: Any) -> dict[str, torch.Tensor]:
    zckpt.average(paths, "m.safetensors", overwrite=True, **options)
    return load_file("m.safetensors")


@pytest.mark.parametrize("dtype", [None, "bfloat16", "keep"])
def test_stages_and_world_sizes_are_averaged(dtype):
    done = zckpt.average(SAME, "m.safetensors", weights=[5, 2, 3], dtype=dtype, verify=True)
    found, sources, truth = load_file("m.safetensors"), [values(one) for one in SAME], Truth(SAME[0])
    for name in sources[0]:
        own = torch.float32 if dtype is None else torch.bfloat16
        kind = truth.weights[name].dtype if name in truth.frozen else own
        assert_same_tree(found[name], mean([one[name] for one in sources], [5, 2, 3], kind), name)
    assert done.verified == sum(tensor.nbytes for tensor in found.values())
    assert [one["weight"] for one in done.sources] == [0.5, 0.2, 0.3]


def test_moments_and_masters_are_averaged_and_the_rest_is_the_last_ones():
    zckpt.average(SAME, "m.safetensors", slots="all", dtype="bfloat16")
    slots, truths = load_file("m.optimizer.safetensors"), [Truth(one) for one in SAME]
    for kind in ("exp_avg", "exp_avg_sq"):
        for name in truths[0].kind(kind):
            expected = mean([truth.kind(kind)[name] for truth in truths], [1, 1, 1], torch.float32)
            assert_same_tree(slots[f"{kind}/{name}"], expected, name)
    for name in truths[0].masters:
        assert_same_tree(slots[f"master/{name}"], mean([t.masters[name] for t in truths], [1, 1, 1], torch.float32))


def test_moments_of_formats_are_averaged_wherever_those_keep_the_step():
    """A step is one number; so is a moment of a 0-d parameter, and is averaged."""
    source = FIXTURES / "s2_bf16_dp2_zerodim"
    zckpt.convert(source, "dcp", to="dcp")
    zckpt.convert(source, "ranks", to="fsdp-rank-files", world_size=2)
    Path("ranks/zckpt.pt").unlink()
    names = [name for group in zckpt.open(source).param_groups for name in group.parameters]
    truth = Truth(source).kind("exp_avg")
    scalar = next(name for name, one in truth.items() if not one.shape)
    for last in (source, "dcp", zckpt.open("ranks", names=names)):
        averaged(["dcp", source, last], slots="all", weights=[-1, 1, 1], verify=True)
        assert torch.equal(load_file("m.optimizer.safetensors")[f"exp_avg/{scalar}"], truth[scalar])


def test_an_exponential_average_is_torchs():
    from torch.optim.swa_utils import get_ema_avg_fn

    zckpt.average(SAME, "m.pt", ema=0.9)
    found, step = torch.load("m.pt", weights_only=True), get_ema_avg_fn(0.9)
    first, *others = [values(one) for one in SAME]
    for name, kept in first.items():
        expected = kept.float()
        for one in others:
            expected = step(expected, one[name].float(), 1)
        assert_same_tree(found[name], expected.to(found[name].dtype), name)


def test_formats_are_mixed():
    """DeepSpeed's ranks, a DCP directory, a universal one, zckpt's own, a torch file and a Hugging Face directory."""
    source = SAME[0]
    for to in ("dcp", "universal", "zckpt", "consolidated"):
        zckpt.convert(SAME[1], to, to=to)
    zckpt.consolidate(SAME[1], "hf", max_shard_size=2000)
    zckpt.consolidate(SAME[1], "m.pt")
    done = zckpt.average([source, "dcp", "universal", "zckpt", "consolidated", "hf", "m.pt"], "mean")
    found = {name: tensor for file in files_in("mean") if file.suffix == ".safetensors"
             for name, tensor in load_file(file).items()}  # fmt: skip
    ours, theirs = values(source), values(SAME[1])
    frozen = Truth(source).frozen
    for name in ours:
        kind = found[name].dtype if name in frozen else torch.float32
        assert_same_tree(found[name], mean([ours[name], *[theirs[name]] * 6], [1] * 7, kind), name)
    assert len({one["format"] for one in done.sources}) == 7
    assert zckpt.verify("mean").sound


def test_tied_names_stay_one_tensor():
    done = zckpt.average(SAME, "m.pt")
    owners = [one for one in zckpt.open(SAME[0]).tensors() if one.tied_to is None]
    assert done.num_averaged + done.num_equal + done.num_from_last == len(owners)
    assert done.num_equal == sum(one.dtype in ("int64", "bool", "uint8") for one in owners)
    found, tied = torch.load("m.pt", weights_only=True), Truth(SAME[0]).tied
    assert tied
    for alias, owner in tied.items():
        assert found[alias].data_ptr() == found[owner].data_ptr()
    assert not tied.keys() & averaged(SAME, tied="drop").keys()


def test_a_tied_name_may_be_missing_or_a_tensor_of_its_own():
    zckpt.consolidate(SAME[1], "without.safetensors", tied="drop")
    zckpt.consolidate(SAME[1], "twice.safetensors", tied="duplicate")
    zckpt.average([SAME[0], "without.safetensors"], "a.pt")
    zckpt.average([SAME[0], "twice.safetensors"], "b.pt")
    a, b = (torch.load(f"{name}.pt", weights_only=True) for name in "ab")
    (alias, owner), *_ = Truth(SAME[0]).tied.items()
    assert_same_tree(a[alias], b[alias])
    assert a[alias].data_ptr() == a[owner].data_ptr()
    assert b[alias].data_ptr() != b[owner].data_ptr()


# --- plain files


def saved(name: str, **tensors: torch.Tensor) -> str:
    save_file(tensors, f"{name}.safetensors")
    return f"{name}.safetensors"


def pair(a: torch.Tensor, b: torch.Tensor) -> list[str]:
    return [saved(name, w=torch.ones(3), x=one) for name, one in (("a", a), ("b", b))]


@pytest.mark.parametrize(
    ("a", "b", "dtype"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float64", "bfloat16", "float64"),
    ],
)
def test_the_type_is_the_sources_or_one_that_holds_both(a, b, dtype):
    x, y = (torch.randn(50, dtype=torch.float64).to(getattr(torch, one)) for one in (a, b))
    wide = torch.float64 if dtype == "float64" else torch.float32
    expected = ((x.to(wide) + y.to(wide)) / 2).to(getattr(torch, dtype))
    assert_same_tree(averaged(pair(x, y))["x"], expected)


def test_task_arithmetic_subtracts():
    tensors = [torch.randn(9) for _ in range(3)]
    found = averaged([saved(str(i), w=one) for i, one in enumerate(tensors)], weights=[1, 0.5, -0.5])
    assert_same_tree(found, {"w": tensors[0] + 0.5 * tensors[1] + -0.5 * tensors[2]})


@pytest.mark.parametrize(
    "tensor", [torch.arange(6), torch.tensor([True, False]), torch.ones(2).to(torch.float8_e4m3fn)]
)
def test_what_is_no_number_must_be_the_same_or_be_named(tensor):
    other = tensor.roll(1) if tensor.dtype != torch.float8_e4m3fn else -tensor.float()
    paths = pair(tensor, other.to(tensor.dtype))
    with refusing(zckpt.UsageError, r"b\.safetensors: x: differs from .*a\.safetensors"):
        zckpt.average(paths, "m.safetensors")
    done = zckpt.average(paths, "m.safetensors", from_last=["x"])
    assert_same_tree(load_file("m.safetensors")["x"], other.to(tensor.dtype))
    assert (done.num_averaged, done.num_equal, done.num_from_last) == (1, 0, 1)
    done = zckpt.average([paths[0], paths[0]], "n.safetensors")
    assert_same_tree(load_file("n.safetensors")["x"], tensor)
    assert (done.num_averaged, done.num_equal, done.num_from_last) == (1, 1, 0)


def test_names_that_a_wrapper_adds_are_no_difference():
    a = saved("a", **{"w": torch.ones(3), "v.x": torch.ones(2)})
    torch.save({"module.w": torch.zeros(3), "module.v._orig_mod.x": torch.zeros(2)}, "b.pt")
    assert averaged([a, "b.pt"])["v.x"].tolist() == [0.5, 0.5]


def test_an_open_checkpoint_is_a_source():
    assert_same_tree(averaged([zckpt.open(SAME[0]), SAME[1], zckpt.open(SAME[2])]), averaged(SAME))


@pytest.mark.parametrize("of", [np.array, torch.tensor])
def test_weights_are_numbers_of_any_kind(of):
    paths = pair(torch.zeros(2), torch.ones(2))
    zckpt.average(paths, "m.safetensors", weights=of([1.0, 3.0]))
    assert load_file("m.safetensors")["x"].tolist() == [0.75, 0.75]
    zckpt.average(paths, "m.safetensors", ema=of(0.25), overwrite=True)
    assert load_file("m.safetensors")["x"].tolist() == [0.75, 0.75]


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1]}, "--weights needs one number per checkpoint: expected 2, found 1"),
        ({"weights": [1, float("nan")]}, "unusable --weights: expected finite numbers"),
        ({"weights": "13"}, "unusable --weights: expected finite numbers"),
        ({"weights": {0: 1, 1: 3}}, "unusable --weights: expected finite numbers"),
        ({"weights": torch.ones(2, 2)}, "unusable --weights: expected finite numbers"),
        ({"ema": "half"}, "unusable --ema: expected finite numbers"),
        ({"weights": [1, -1]}, "the weights add up to zero"),
        ({"ema": 1.5}, "unusable --ema: expected a number from 0 to 1, found 1.5"),
        ({"ema": 0.5, "weights": [1, 1]}, "exclude each other"),
        ({"from_last": ["y*"]}, r"no tensor is called 'y\*'"),
        ({"slots": ["exp_avg"]}, "no slot exp_avg"),
        ({"slots": "all"}, "expected a checkpoint that has an optimizer"),
        ({"dtype": "int8"}, "unusable --dtype"),
        ({"drop": ["x"]}, "--drop 'x' names nothing that would be lost"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    paths = pair(torch.ones(2), torch.ones(2))
    with refusing(zckpt.UsageError, message):
        zckpt.average(paths, "m.safetensors", **options)  # type: ignore[arg-type]
    assert names_in() == ["a.safetensors", "b.safetensors"]


def test_other_models_are_refused_by_name():
    a, b = pair(torch.ones(2), torch.ones(3))
    with refusing(zckpt.UsageError, r"b\.safetensors: x has another shape than in .*a\.safetensors.*\(2,\)"):
        zckpt.average([a, b], "m.safetensors")
    c = saved("c", w=torch.ones(3), y=torch.ones(2))
    with refusing(zckpt.UsageError, r"c\.safetensors: lacks 1 of the tensors of .*a\.safetensors: x"):
        zckpt.average([a, c], "m.safetensors")
    with refusing(zckpt.UsageError, "averaging needs several checkpoints"):
        zckpt.average([a], "m.safetensors")


def test_adapters_that_are_scaled_otherwise_are_refused():
    for name, alpha in (("a", 8), ("b", 8), ("c", 16)):
        Path(name).mkdir()
        factors = {f"base_model.model.w.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}
        save_file(factors, f"{name}/adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha}
        Path(f"{name}/adapter_config.json").write_text(json.dumps(settings))
    zckpt.average(["a", "b"], "m")
    assert names_in("m") == ["adapter_config.json", "adapter_model.safetensors"]
    with refusing(zckpt.UsageError, "the adapter's scale differs from"):
        zckpt.average(["a", "c"], "n")
    for name in "abc":  # what a training has of it, which says nothing of scales itself
        zckpt.convert(name, f"{name}.live", to="dcp", rename=[(r"(lora_[AB])\.", r"\1.default.")])
        shutil.copy(f"{name}/adapter_config.json", f"{name}.live")
    zckpt.average(["a.live", "b.live"], "live")
    with refusing(zckpt.UsageError, "the adapter's scale differs from"):
        zckpt.average(["a.live", "c.live"], "n")
    Path("c.live/adapter_config.json").unlink()
    with refusing(zckpt.UsageError, r"the adapter's scale differs from.*found no adapter_config\.json"):
        zckpt.average(["a.live", "c.live"], "n")


def test_a_slot_that_one_lacks_is_refused_by_name():
    zckpt.consolidate(SAME[1], "b.safetensors")
    with refusing(zckpt.UsageError, r"b\.safetensors: exp_avg of .* is missing, or has another shape"):
        zckpt.average([SAME[0], "b.safetensors"], "m.safetensors", slots=["exp_avg"])


def test_a_source_is_never_the_target():
    paths = pair(torch.ones(2), torch.zeros(2))
    before = contents()
    for path in paths:
        with refusing(zckpt.UsageError, "the target is, or contains, the source"):
            zckpt.average(paths, path, overwrite=True)
    assert contents() == before


def test_damage_in_any_source_is_found():
    for name in "ab":
        torch.save({"w": torch.randn(10_000)}, f"{name}.pt")
    data = bytearray(Path("b.pt").read_bytes())
    data[20_000] ^= 1
    Path("b.pt").write_bytes(data)
    with refusing(zckpt.DamagedFileError, r"b\.pt"):
        zckpt.average(["a.pt", "b.pt"], "m.safetensors")
    assert not Path("m.safetensors").exists()
    zckpt.average(["a.pt", "b.pt"], "m.safetensors", checksums=False)


def test_memory_does_not_change_the_bits():
    x, y = torch.randn(300_000), torch.randn(300_000)
    paths = pair(x, y)
    for memory in (1, 1 << 20):
        assert_same_tree(averaged(paths, weights=[0.3, 0.7], memory=memory)["x"], 0.3 * x + 0.7 * y)


# --- the command line


def test_the_command_prints_its_document_and_dry_runs():
    command = ("average", *SAME, "--target m.safetensors")
    document = printed(*command, "--weights 1,1,2 --dry-run")
    assert (document["dry_run"], names_in()) == (True, [])
    assert [one["weight"] for one in document["sources"]] == [0.25, 0.25, 0.5]
    succeeded("average", *SAME, "-t m.safetensors --ema 0.99 -q")
    refused(4, *command)
    for arguments in ((), SAME[:2], (*SAME[:2], "-t x.safetensors --weights a,b")):
        refused(2, "average", *arguments)


def test_roots_are_folders_that_hold_all_of_several_sources():
    for source in SAME[:2]:
        for path in (source / "global_step5").iterdir():
            first = "zero_pp_rank" not in path.name or "zero_pp_rank_0" in path.name
            to = Path("node0" if first else "node1", source.name, "global_step5", path.name)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
        Path("node0", source.name, "latest").write_text("global_step5")
    sources = [f"node0/{source.name}" for source in SAME[:2]]
    assert_same_tree(averaged(sources, roots=["node1"]), averaged(SAME[:2]))


def test_weights_of_few_bits_are_averaged_as_numbers_or_refused():
    """Also where one source has them as floats, and where all codes are the same but not their scales."""
    codes = torch.randn(130, 70).to(torch.float8_e4m3fn)
    values = []
    for number in range(2):
        scale = torch.rand(2, 1) + number
        tensors = {"q.weight": codes, "q.weight_scale_inv": scale, "norm.weight": torch.full((3,), float(number))}
        method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        write_model(str(number), tensors, {"torch_dtype": "float32", "quantization_config": method})
        values.append(codes.float() * scale.repeat_interleave(128, 0)[:130])
    zckpt.consolidate("1", "plain", dequantize=True)
    for last in ("1", "plain"):
        with refusing(zckpt.UnsupportedError, r"q\.weight: low-bit codes have no mean.*--dequantize"):
            zckpt.average(["0", last], "m")
        zckpt.average(["0", last], "m", dequantize=True, verify=True, overwrite=True)
        found = load_file("m/model.safetensors")
        assert torch.equal(found.pop("q.weight"), (values[0] + values[1]) / 2)
        assert {name: one.tolist() for name, one in found.items()} == {"norm.weight": [0.5] * 3}
        assert json.loads(Path("m/config.json").read_text()) == {"torch_dtype": "float32"}


def test_a_mean_is_written_in_block_fp8():
    for number in range(2):
        tensors = {"layers.0.up_proj.weight": torch.randn(128, 256), "layers.0.up_proj.k_scale": torch.ones(1)}
        write_model(str(number), tensors, {"model_type": "llama", "torch_dtype": "float32"})
    zckpt.average(["0", "1"], "plain")
    zckpt.consolidate("plain", "wanted", quantize="fp8-block")
    zckpt.average(["0", "1"], "m", quantize="fp8-block", verify=True)
    assert contents("m") == contents("wanted")
    found = zckpt.average(["m", "m"], "again", dequantize=True)
    assert any("scales of a cache in FP8" in note for note in found.notes)
