"""Weights of few bits as numbers: bit for bit what the programs that made them have, and a plain model's config."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import run
from tests.refusals import refusing

FP8 = torch.float8_e4m3fn


def made(folder, tensors, **settings: Any):
    folder.mkdir(exist_ok=True)
    save_file({**tensors, "norm.weight": torch.ones(4).bfloat16()}, folder / "model.safetensors")
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def floats(source, target, dtype="float32"):
    zckpt.consolidate(source, target, dequantize=True, dtype=dtype)
    found = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == (dtype or "bfloat16")
    assert found.pop("norm.weight").tolist() == [1] * 4
    return found


@pytest.mark.parametrize("block", [(128, 128), (32, 48)])
@pytest.mark.parametrize("shape", [(300, 200), (2, 70, 130), (128, 256), (1, 1)])
def test_block_fp8(block, shape, tmp_path):
    codes = torch.randn(shape).to(FP8)
    scale = torch.rand(*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])) + 0.1
    name = "q.weight" if len(shape) == 2 else "experts.up"
    source = made(
        tmp_path / "s", {name: codes, f"{name}_scale_inv": scale}, quant_method="fp8", weight_block_size=[*block]
    )
    grid = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[-2], : shape[-1]]
    wanted = codes.float() * grid
    assert torch.equal(floats(source, tmp_path / "a")[name], wanted)
    assert torch.equal(floats(source, tmp_path / "b", None)[name], wanted.bfloat16())
    assert zckpt.inspect(source).details["quantised_weights"] == f"block FP8, {block[0]} x {block[1]}"
    assert zckpt.diff(source, tmp_path / "b", dequantize=True).equal


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(kind, nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    for number, (dtype, storage) in enumerate([(torch.bfloat16, torch.uint8), (torch.float16, torch.bfloat16)]):
        weight = torch.randn(300, 256).to(dtype)
        codes, state = functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested, quant_storage=storage, blocksize=64
        )
        beside = {f"q.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        source = made(tmp_path / f"s{number}", {"q.weight": codes, **beside}, quant_method="bitsandbytes")
        found = floats(source, tmp_path / f"m{number}")
        assert list(found) == ["q.weight"]
        assert torch.equal(found["q.weight"], functional.dequantize_4bit(codes, state).float())
        with refusing(zckpt.UnsupportedError, "codes of few bits"):
            zckpt.consolidate(source, tmp_path / "x.pt", dtype="float32")
    codes, scale, _ = functional.int8_vectorwise_quant(torch.randn(37, 65).half())
    source = made(tmp_path / "i", {"q.weight": codes, "q.SCB": scale}, quant_method="bitsandbytes")
    assert torch.equal(floats(source, tmp_path / "j")["q.weight"], functional.int8_vectorwise_dequant(codes, scale))


def test_experts_of_mxfp4(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 40, 5), dtype=torch.uint8)
    source = made(tmp_path / "s", {"up_blocks": blocks, "up_scales": scales}, quant_method="mxfp4")
    wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(floats(source, tmp_path / "m")["up"], wanted)


def test_nvfp4_of_modelopt(tmp_path):
    codes = torch.randint(0, 256, (24, 32), dtype=torch.uint8)
    scale, whole = torch.rand(24, 4).to(FP8), torch.tensor(0.3)
    source = made(
        tmp_path / "s", {"q.weight": codes, "q.weight_scale": scale, "q.weight_scale_2": whole}, quant_algo="NVFP4"
    )
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = table[torch.stack([codes & 15, codes >> 4], -1).long()].reshape(24, 64)
    wanted = values * (scale.float() * whole).repeat_interleave(16, 1)
    assert torch.equal(floats(source, tmp_path / "m")["q.weight"], wanted)


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.rand(6, 1).bfloat16(), torch.rand(6, 1)])
def test_fp8_of_rows_and_tensors(scale, tmp_path):
    codes = torch.randn(6, 50).to(FP8)
    tensors = {"q.weight": codes, "q.weight_scale": scale, "q.input_scale": torch.ones(1)}
    source = made(tmp_path / "s", tensors, quant_method="compressed-tensors")
    assert torch.equal(floats(source, tmp_path / "m")["q.weight"], (codes.to(scale.dtype) * scale).float())


def test_a_live_model_gets_numbers(tmp_path):
    codes, scale = torch.randn(4, 4).to(FP8), torch.rand(1, 1)
    source = made(tmp_path / "s", {"q.weight": codes, "q.weight_scale_inv": scale}, quant_method="fp8")
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(4, 4, bias=False), "norm": torch.nn.RMSNorm(4)})
    zckpt.load(source, model=model, dequantize=True)
    assert torch.equal(model.q.weight, codes.float() * scale)


def test_what_is_not_known_is_refused(tmp_path):
    words = torch.ones(4, 8, dtype=torch.int32)
    source = made(tmp_path / "s", {"q.qweight": words, "q.scales": torch.ones(1, 8).half()}, quant_method="gptq")
    done = run("consolidate", source, tmp_path / "m", "--dequantize")
    assert (done.returncode, done.stderr.count("\n")) == (5, 1)
    assert "q.qweight" in done.stderr
    scale = torch.ones(3, 3)
    source = made(
        tmp_path / "t", {"q.weight": torch.ones(4, 4).to(FP8), "q.weight_scale_inv": scale}, quant_method="fp8"
    )
    with refusing(zckpt.SourceError, "its scales fit no blocks"):
        zckpt.consolidate(source, tmp_path / "m", dequantize=True)
