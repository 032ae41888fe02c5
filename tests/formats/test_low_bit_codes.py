"""`--quantize fp8-block`: codes, scales and a config.json as transformers has them of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.cli.console import run
from tests.folders import write_model
from tests.logical import assert_same_tree
from tests.refusals import refusing
from zckpt.engine.quantise import InBlocks
from zckpt.state import Extent, Slot, Span
from zckpt.storage.recent import Recent

FP8 = torch.float8_e4m3fn


def made(folder, tensors, **config):
    return write_model(folder, tensors, {"model_type": "x", "hidden_size": 64, **config})


def quantised(source, target, how="fp8-block:32x32", **options):
    zckpt.consolidate(source, target, quantize=how, **options)
    settings = json.loads(Path(target, "config.json").read_text())["quantization_config"]
    return load_file(Path(target, "model.safetensors")), settings


def by_transformers(name, weight, block):
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=block, scale_fmt="float")
    return Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one(name, weight)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_model_is_what_transformers_makes_of_it(kind):
    transformers = pytest.importorskip("transformers")
    from accelerate import init_empty_weights
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": 96}  # fmt: skip
    if kind == "dense":  # some weights are no whole number of blocks
        config = transformers.LlamaConfig(**sizes, intermediate_size=80, attention_bias=True, tie_word_embeddings=True)
        cls = transformers.LlamaForCausalLM
    else:
        config = transformers.Qwen3MoeConfig(**sizes, head_dim=16, moe_intermediate_size=32, num_experts=4)
        cls = transformers.Qwen3MoeForCausalLM
    model = cls(config).bfloat16()
    model.save_pretrained(Path("in"))
    plain = load_file("in/model.safetensors")
    found, settings = quantised("in", "out")
    wanted = {}
    for name, weight in plain.items():
        is_linear = "_proj.weight" in name and not any(size % 32 for size in weight.shape)
        wanted |= by_transformers(name, weight, (32, 32)) if is_linear else {name: weight}
    assert_same_tree(found, wanted)
    assert len(found) > len(plain) + 4

    quantiser = transformers.FineGrainedFP8Config(**settings)  # a GPU gets these modules
    with init_empty_weights():
        live = replace_with_fp8_linear(cls(config), settings["modules_to_not_convert"], quantiser, pre_quantized=True)
    state = {name: (one.shape, one.dtype == FP8) for name, one in live.state_dict().items()}
    if kind == "dense":
        del state["lm_head.weight"]
        assert {name: (one.shape, one.dtype == FP8) for name, one in found.items()} == state
    else:
        assert state["model.layers.1.mlp.experts.gate_up_proj_scale_inv"] == ((4, 2, 2), False)
    again, info = cls.from_pretrained(Path("out"), dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    for dtype in (torch.bfloat16, torch.float32):
        loaded = cls(config).to(dtype)  # whose experts are one tensor
        zckpt.load("out", model=loaded, dequantize=True)
        zckpt.consolidate("out", f"{dtype}", dequantize=True, dtype=str(dtype).removeprefix("torch."))
        expected = cls.from_pretrained(Path(f"{dtype}"), dtype=dtype)
        assert_same_tree(dict(loaded.state_dict()), dict(expected.state_dict()))
    zckpt.consolidate("out", "back", dequantize=True, dtype="bfloat16")
    back = cls.from_pretrained(Path("back"), dtype=torch.bfloat16)
    assert_same_tree(dict(back.state_dict()), dict(again.state_dict()))


NAME = "model.layers.0.mlp.up_proj.weight"


def test_numbers_stay_within_half_a_step_and_codes_come_back():
    weight = torch.randn(256, 384) * torch.logspace(-6, 2, 256)[:, None]
    weight[:128, :128] = 0
    weight[0, 0] = 1e-40
    source = made("in", {NAME: weight})
    found, settings = quantised(source, "out", "fp8-block")
    assert settings["weight_block_size"] == [128, 128]
    codes, scale = found[NAME], found[f"{NAME}_scale_inv"]
    assert scale[0, 0] == 1 and not codes[:128, :128].float().any()  # noqa: PT018
    zckpt.consolidate("out", "floats", dequantize=True, dtype="float32")
    floats = load_file("floats/model.safetensors")[NAME]
    grid = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    step = grid * torch.maximum(2.0 ** (torch.floor(torch.log2((weight / grid).abs())) - 3), torch.tensor(2.0**-9))
    assert ((floats - weight).abs() <= step * 0.5001).all()
    for name in ("floats", "out"):
        again, _ = quantised(name, f"{name}2", "fp8-block", dequantize=name == "out")
        assert_same_tree(again[NAME], codes)
        assert torch.allclose(again[f"{NAME}_scale_inv"], scale, rtol=2e-7, atol=0)


def test_numbers_are_rounded_to_nearest_and_ties_to_even():
    weight = torch.arange(0, 0x43E00000, 1085, dtype=torch.int32)[: 1024 * 1024].view(torch.float32)
    weight = torch.cat([weight, torch.arange(1 << 16, dtype=torch.int32).bitwise_left_shift(15).view(torch.float32)])
    weight = weight.masked_fill(~(weight < 448), 0).reshape(-1, 1024) * torch.tensor([1, -1] * 512)
    weight[::32, ::32] = 448
    found, _ = quantised(made("in", {NAME: weight}), "out")
    assert_same_tree(found[NAME], weight.to(FP8))
    assert (found[f"{NAME}_scale_inv"] == 1).all()


def test_scales_are_found_on_the_way_to_codes():
    numbers, kept = np.random.default_rng(0).normal(size=64 * 64).astype(np.float32), Recent(1 << 20)
    slot = Slot("weight", "float32", (64, 64), (Span(Extent.whole((64, 64)), "", 0, "float32"),))
    codes, scales = (InBlocks(slot, (32, 32), "it", one, kept) for one in (False, True))
    codes.compute([numbers.copy], 0, 64 * 64, "float8_e4m3fn")
    found = scales.compute([], 0, 4, "float32")  # nothing is read
    assert found.tolist() == scales.compute([numbers.copy], 0, 4, "float32").tolist()


def test_last_blocks_are_short_as_in_a_release_whose_configuration_is_given():
    weight, settings = torch.randn(70, 50), {"quant_method": "fp8", "weight_block_size": [32, 32]}
    source = made("in", {NAME: weight}, quantization_config=settings)
    found, _ = quantised(source, "out")
    codes, scale = by_transformers(NAME, torch.nn.functional.pad(weight, (0, 14, 0, 26)), (32, 32)).values()
    assert_same_tree(found[NAME], codes[:70, :50])
    assert found[f"{NAME}_scale_inv"].equal(scale)
    zckpt.consolidate("out", "floats", dequantize=True, dtype="float32")
    zckpt.consolidate("floats", "again", quantize="fp8-block:32x32", config="in")
    assert_same_tree(load_file("again/model.safetensors")[NAME], found[NAME])


def test_experts_in_one_tensor():
    up, down = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
    tensors = {up: torch.randn(3, 128, 64).bfloat16(), down: torch.randn(3, 64, 64).bfloat16()}
    found, settings = quantised(made("in", tensors), "out")
    wanted = {k: v for name, one in tensors.items() for k, v in by_transformers(name, one, (32, 32)).items()}
    assert_same_tree(found, wanted)
    assert settings["modules_to_not_convert"] == ["lm_head"]
    tensors |= {NAME: torch.ones(64, 64), f"{up}_bias": torch.ones(3, 64)}  # transformers has none with biases
    found, settings = quantised(made("in2", tensors), "out2")
    assert found[up].equal(tensors[up])
    assert settings["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.experts"]
    moe = "model.layers.0.block_sparse_moe"  # GraniteMoe's in files; in memory `experts` and `router`
    tensors = {f"{moe}.input_linear.weight": torch.ones(3, 128, 64), NAME: torch.ones(64, 64)}
    assert quantised(made("in5", tensors), "out5")[1]["modules_to_not_convert"][-1] == moe
    tensors = {up: torch.randn(3, 64, 128), down: torch.randn(3, 96, 64), NAME: torch.ones(64, 64)}  # (in, out)
    assert quantised(made("in3", tensors), "out3")[0][up].equal(tensors[up])
    tensors = {up: torch.randn(3, 96, 64), NAME: torch.ones(64, 64)}  # no whole blocks of the gate, nor of the rest
    assert quantised(made("in4", tensors), "out4")[0][up].equal(tensors[up])


def test_what_is_refused():
    weight, blocks = torch.ones(64, 64), "fp8-block:32x32"
    source = made("in", {NAME: weight, "model.embed_tokens.weight": weight.clone()})

    def refused(kind, words, given=source, target="out", **how):
        with refusing(kind, words):
            zckpt.consolidate(given, target, **how)

    for how in ("int4", "fp8-block:0x3"):
        refused(zckpt.UsageError, "expected fp8-block", quantize=how)
    words = "no linear layer has a weight that is a whole number of blocks"
    refused(zckpt.UnsupportedError, words, quantize="fp8-block")
    refused(zckpt.UsageError, r"needs a config\.json", target="out.safetensors", quantize=blocks)
    zckpt.consolidate(source, "codes", quantize=blocks)
    refused(zckpt.UsageError, "--dequantize", "codes", quantize=blocks)
    config = Path("config")
    config.mkdir()
    for wrong in ("{", "[1]", "\xff"):
        (config / "config.json").write_text(wrong)
        words = r"config\.json: unreadable configuration"
        refused(zckpt.DamagedFileError, words, quantize=blocks, config=config)
        refused(zckpt.DamagedFileError, words, "codes", dequantize=True, config=config)
    for number, strange in enumerate((float("nan"), float("inf"), -float("inf"))):
        weight[40, 3] = strange
        source = made(f"{number}", {NAME: weight})
        done = run("consolidate", source, Path("out"), "--quantize", blocks)
        assert (done.returncode, done.stderr.count("\n")) == (5, 1)
        assert NAME in done.stderr
        assert not Path("out").exists()
