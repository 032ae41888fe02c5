"""Weights that are codes with scales are written as they are, and never cast or loaded as if they were numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import FIXTURES, run
from tests.logical import assert_same_tree
from tests.refusals import refusing

FP8 = torch.randn(4, 4).to(torch.float8_e4m3fn)
CODES = torch.randint(0, 255, (4, 4), dtype=torch.uint8)
KINDS: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "blocks of fp8": ({"q.weight": FP8, "q.weight_scale_inv": torch.ones(1, 1)}, {"quant_method": "fp8"}),
    "fused experts of fp8": ({"experts.up": FP8, "experts.up_scale_inv": torch.ones(1, 1)}, {"quant_method": "fp8"}),
    "compressed": ({"q.weight": FP8, "q.weight_scale": torch.ones(4, 1)}, {"quant_method": "compressed-tensors"}),
    "packed": ({"q.weight_packed": CODES.int(), "q.weight_scale": torch.ones(4, 1)}, {"quant_method": "x"}),
    "nvfp4": (
        {"q.weight": CODES, "q.weight_scale": FP8[:, :1].clone(), "q.weight_scale_2": torch.tensor(1.0)},
        {"quant_algo": "NVFP4"},
    ),
    "mxfp4": ({"up_blocks": CODES, "up_scales": CODES[:, 0].clone()}, {"quant_method": "mxfp4"}),
    "bitsandbytes": (
        {
            "q.weight": CODES,
            "q.weight.absmax": torch.ones(1),
            "q.weight.quant_state.bitsandbytes__nf4": CODES[0].clone(),
        },
        {"quant_method": "bitsandbytes"},
    ),
    "int8": ({"q.weight": CODES.to(torch.int8), "q.SCB": torch.ones(4)}, {"quant_method": "bitsandbytes"}),
    "gptq": ({"q.qweight": CODES.int(), "q.scales": torch.ones(1, 4).half()}, {"quant_method": "gptq"}),
    "hqq": ({"q.W_q": CODES, "q.scale": torch.ones(8, 1)}, {"quant_method": "hqq"}),
    "mlx": ({"q.weight": CODES.int().view(torch.uint32), "q.scales": torch.ones(4, 1)}, {"bits": 4, "group_size": 32}),
    "mistral": ({"q.weight": FP8, "q.qscale_weight": torch.tensor(1.0)}, {}),
    "exl3": ({"q.trellis": CODES.short(), "q.suh": torch.ones(4).half()}, {"quant_method": "exl3"}),
    "aqlm": (
        {"q.codes": CODES.short(), "q.codebooks": torch.ones(1, 4).half(), "q.scales": torch.ones(4, 1).half()},
        {"quant_method": "aqlm"},
    ),
    "higgs": ({"q.weight": CODES.short(), "q.scales": torch.ones(4, 1).half()}, {"quant_method": "higgs"}),
    "spqr": ({"q.dense_weights": CODES[0].long(), "q.col_vals": CODES[0].int()}, {"quant_method": "spqr"}),
    "sparse": ({"q.weight.compressed": FP8[0].clone(), "q.weight_scale": torch.ones(4, 1)}, {"quant_method": "x"}),
    "scaled fp8": ({"q.weight": FP8, "q.scale_weight": torch.tensor(1.0)}, {}),
    "svdquant": ({"q.qweight": CODES.to(torch.int8), "q.wscales": torch.ones(1, 4).half()}, {}),
    "quip": ({"q.Qidxs": CODES.short(), "q.SU": torch.ones(4).half()}, {}),
    "without scales": ({"q.weight": FP8}, {"quant_method": "fp8"}),
}


SCALED = [kind for kind, (tensors, _) in KINDS.items() if len(tensors) > 1]


def made(folder, kind, *, config) -> Path:
    folder.mkdir()
    tensors, settings = KINDS[kind]
    save_file({**tensors, "norm.weight": torch.ones(4).bfloat16()}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(
            json.dumps({"model_type": "llama", "quantization_config": settings or None})
        )
    return folder


@pytest.mark.parametrize(("kind", "config"), [*((kind, True) for kind in KINDS), *((kind, False) for kind in SCALED)])
def test_codes_are_kept_and_not_cast(kind, config, tmp_path):
    source = made(tmp_path / "source", kind, config=config)
    for target, how in (("m.safetensors", {"dtype": "float32"}), ("m.pt", {"dtype": "float16"})):
        with refusing(zckpt.UnsupportedError, r"low-bit codes.*--dtype=keep"):
            zckpt.consolidate(source, tmp_path / target, **how)
    with refusing(zckpt.UnsupportedError, "low-bit codes"):
        zckpt.convert(source, tmp_path / "dcp", to="dcp", dtype="float32")
    assert [one.name for one in tmp_path.iterdir()] == ["source"]
    for number, dtype in enumerate((None, "keep")):
        zckpt.consolidate(source, tmp_path / f"{number}.safetensors", dtype=dtype)
        found = load_file(tmp_path / f"{number}.safetensors")
        assert_same_tree({name: found[name] for name in KINDS[kind][0]}, KINDS[kind][0])


def test_a_model_that_says_it_is_quantised_and_is_not_is_cast():
    source = made(Path("source"), "blocks of fp8", config=True)
    save_file({"q.weight": torch.ones(4, 4).bfloat16(), "ids": torch.arange(4)}, source / "model.safetensors")
    zckpt.consolidate(source, "m.safetensors", dtype="float32")


def test_fp8_without_scales_is_a_number():
    save_file({"w": FP8, "b.scale": torch.ones(4)}, "x.safetensors")
    zckpt.consolidate("x.safetensors", "m.safetensors", dtype="bfloat16")
    assert load_file("m.safetensors")["w"].equal(FP8.bfloat16())


def test_what_is_trained_beside_frozen_codes_is_cast():
    source = FIXTURES / "s2_bf16_dp2"
    zckpt.consolidate(source, "m.pt", slots="all", dtype="keep")
    optimizer = torch.load("m.optimizer.pt")
    model = {**torch.load("m.pt"), "q.weight": CODES, "q.weight.absmax": torch.ones(3)}
    torch.save({"model": model, "optimizer": optimizer}, "x.pt")
    checkpoint = zckpt.open("x.pt")
    assert checkpoint.param_groups
    with refusing(zckpt.UnsupportedError, r"q\.weight: low-bit codes.*found bfloat16"):
        zckpt.consolidate(checkpoint, "o.pt", dtype="bfloat16")
    model["q.weight.absmax"] = torch.ones(3).bfloat16()
    torch.save({"model": model, "optimizer": optimizer}, "x.pt")
    zckpt.consolidate("x.pt", "o.pt", dtype="bfloat16")
    assert torch.load("o.pt")["q.weight"].equal(CODES)


def test_codes_do_not_become_weights_of_a_live_model():
    import torch.distributed.checkpoint as dcp

    source = made(Path("source"), "blocks of fp8", config=True)
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(4, 4, bias=False), "norm": torch.nn.LayerNorm(4, bias=False)})
    model.bfloat16()
    before = model.q.weight.detach().clone()
    with refusing(zckpt.UnsupportedError, "low-bit codes"):
        zckpt.load(source, model=model, strict=False)
    state = model.state_dict()
    with pytest.raises(dcp.api.CheckpointException, match="low-bit codes"):
        dcp.load(state, storage_reader=zckpt.dcp.Reader(source))
    assert model.q.weight.equal(before)
    live = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.zeros(4, 4).to(FP8.dtype), requires_grad=False)})
    zckpt.load(source, model=torch.nn.ModuleDict({"q": live}), strict=False)
    assert_same_tree(live["weight"].data, FP8)


def test_the_command_says_so_on_one_line(tmp_path):
    source = made(tmp_path / "source", "mxfp4", config=True)
    done = run("consolidate", source, tmp_path / "m.pt", "--dtype", "float32")
    assert (done.returncode, done.stderr.count("\n")) == (5, 1)


def test_layers_that_hqq_keeps_in_dicts_are_not_left_out(tmp_path):
    layer = {"W_q": CODES, "nbits": 4, "scale": torch.ones(8, 1), "zero": torch.ones(8, 1)}
    torch.save({"embed": {"weight": torch.ones(4, 4)}, "layers.0.q_proj": layer}, tmp_path / "qmodel.pt")
    with refusing(zckpt.UnsupportedError, "layers.0.q_proj: layers in HQQ's codes of few bits.*dequantise it"):
        zckpt.open(tmp_path / "qmodel.pt")
    torch.save({"attn": {"W_q": torch.ones(4, 4), "W_k": torch.ones(4, 4), "meta": {"heads": 2}}}, tmp_path / "m.pt")
    assert {*zckpt.open(tmp_path / "m.pt").parameters} == {"W_q", "W_k"}


def test_positions_and_settings_of_other_things_are_no_codes(tmp_path):
    table = torch.arange(8).reshape(2, 4)
    beside = {"vq.codebooks": torch.ones(2, 2), "of.centroids.weight": torch.ones(2, 2), "pos_s": torch.ones(2)}
    save_file({"vq.codes": table.int(), "of.indices": table, "pos": table.int(), **beside}, tmp_path / "a.safetensors")
    save_file({"x.table": table.int(), "w": torch.ones(2, 2)}, tmp_path / "b.safetensors")
    (tmp_path / "config.json").write_text('{"quantization": {"codebook_size": 1024}}')
    for name in ("a", "b"):
        zckpt.consolidate(tmp_path / f"{name}.safetensors", tmp_path / f"{name}.pt", dtype="float16")
