"""Weights of few bits as numbers: bit for bit what the programs that made them have, and a plain model's config.

Matrices have more elements than are computed at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import run
from tests.folders import names_in, write_model
from tests.pairwise import each
from tests.refusals import refusing

FP8 = torch.float8_e4m3fn
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def made(folder, tensors, **settings):
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": settings}
    return write_model(folder, {**tensors, "norm.weight": torch.ones(4).bfloat16()}, config)


def refused(source, kind, words):
    with refusing(kind, words):
        zckpt.consolidate(source, "refused", dequantize=True)


def floats(source, target, dtype="float32"):
    zckpt.consolidate(source, target, dequantize=True, dtype=dtype)
    found = load_file(Path(target, "model.safetensors"))
    config = json.loads(Path(target, "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == (dtype or "bfloat16")
    assert found.pop("norm.weight").tolist() == [1] * 4
    return found


@pytest.mark.parametrize("block", [(128, 128), (32, 48)])
@pytest.mark.parametrize("shape", [(1000, 600), (2, 70, 130), (128, 256), (1, 1)])
def test_block_fp8(block, shape):
    codes = torch.randn(shape).to(FP8)
    scale = torch.rand(*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])) + 0.1
    name = "q.weight" if len(shape) == 2 else "experts.up"
    source = made("s", {name: codes, f"{name}_scale_inv": scale}, quant_method="fp8", weight_block_size=[*block])
    grid = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[-2], : shape[-1]]
    wanted = codes.float() * grid
    assert torch.equal(floats(source, "a")[name], wanted)
    assert torch.equal(floats(source, "b", None)[name], wanted.bfloat16())
    assert zckpt.inspect(source).details["quantised_weights"] == f"block FP8, {block[0]} x {block[1]}"
    assert zckpt.diff(source, "b", dequantize=True).equal


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(kind, nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    for number, (dtype, storage) in enumerate([(torch.bfloat16, torch.uint8), (torch.float16, torch.bfloat16)]):
        weight = torch.randn(1200, 256).to(dtype)
        codes, state = functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested, quant_storage=storage, blocksize=64
        )
        beside = {f"q.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        source = made(f"s{number}", {"q.weight": codes, **beside}, quant_method="bitsandbytes")
        found = floats(source, f"m{number}")
        assert list(found) == ["q.weight"]
        assert torch.equal(found["q.weight"], functional.dequantize_4bit(codes, state).float())
        with refusing(zckpt.UnsupportedError, "low-bit codes"):
            zckpt.consolidate(source, "x.pt", dtype="float32")
    codes, scale, _ = functional.int8_vectorwise_quant(torch.randn(37, 65).half())
    source = made("i", {"q.weight": codes, "q.SCB": scale}, quant_method="bitsandbytes")
    assert torch.equal(floats(source, "j")["q.weight"], functional.int8_vectorwise_dequant(codes, scale))


@pytest.mark.parametrize("odd", [{"model_type": []}, {"text_config": {"model_type": {}}}])
def test_a_type_of_model_that_is_no_text_is_none(odd):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, scale, _ = functional.int8_vectorwise_quant(torch.randn(37, 65).half())
    source = made("i", {"q.weight": codes, "q.SCB": scale}, quant_method="bitsandbytes")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **odd}))
    assert floats(source, "j")["q.weight"].shape == (37, 65)


@pytest.mark.parametrize("bits", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_a_gpt_2_of_bitsandbytes_is_loaded_again(bits):
    """Its Conv1D are Linear there, whose weights lie the other way; some are square."""
    transformers = pytest.importorskip("transformers")
    bitsandbytes = pytest.importorskip("bitsandbytes")
    config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=64, n_layer=1, n_head=2, bos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(Path("whole"))
    settings = transformers.BitsAndBytesConfig(**bits)
    made = transformers.GPT2LMHeadModel.from_pretrained(Path("whole"), quantization_config=settings)
    made.save_pretrained(Path("few"))
    zckpt.consolidate("few", "plain", dequantize=True, dtype="float32")
    found = transformers.GPT2LMHeadModel.from_pretrained(Path("plain")).state_dict()
    for name, own in made.named_modules():
        if isinstance(own, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
            values = (bitsandbytes.functional.dequantize_4bit(own.weight.data, own.weight.quant_state)
                      if "load_in_4bit" in bits else
                      bitsandbytes.functional.int8_vectorwise_dequant(own.weight.data, own.weight.SCB))  # fmt: skip
            assert torch.equal(found[f"{name}.weight"], values.float().T), name


def test_experts_of_mxfp4():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (3, 1200, 5, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 1200, 5), dtype=torch.uint8)
    source = made("s", {"up_blocks": blocks, "up_scales": scales}, quant_method="mxfp4")
    wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(floats(source, "m")["up"], wanted)


def test_nvfp4_of_modelopt():
    codes = torch.randint(0, 256, (6000, 32), dtype=torch.uint8)
    scale, whole = torch.rand(6000, 4).to(FP8), torch.tensor(0.3)
    source = made("s", {"q.weight": codes, "q.weight_scale": scale, "q.weight_scale_2": whole}, quant_algo="NVFP4")
    values = FP4[torch.stack([codes & 15, codes >> 4], -1).long()].reshape(6000, 64)
    wanted = values * (scale.float() * whole).repeat_interleave(16, 1)
    assert torch.equal(floats(source, "m")["q.weight"], wanted)
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(64, 6000, bias=False), "norm": torch.nn.RMSNorm(4)}).double()
    zckpt.load(source, model=model, dequantize=True)
    assert torch.equal(model.q.weight, wanted.double())


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.rand(6, 1).bfloat16(), torch.rand(6, 1)])
def test_fp8_of_rows_and_tensors(scale):
    codes = torch.randn(6, 50).to(FP8)
    tensors = {"q.weight": codes, "q.weight_scale": scale, "q.input_scale": torch.ones(1)}
    source = made("s", tensors, quant_method="compressed-tensors")
    assert torch.equal(floats(source, "m")["q.weight"], (codes.to(scale.dtype) * scale).float())


def test_a_live_model_gets_numbers():
    codes, scale = torch.randn(4, 4).to(FP8), torch.rand(1, 1)
    source = made("s", {"q.weight": codes, "q.weight_scale_inv": scale}, quant_method="fp8")
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(4, 4, bias=False), "norm": torch.nn.RMSNorm(4)})
    zckpt.load(source, model=model, dequantize=True)
    assert torch.equal(model.q.weight, codes.float() * scale)


def test_what_is_not_known_is_refused():
    words = torch.ones(4, 8, dtype=torch.int32)
    source = made("s", {"q.qweight": words, "q.scales": torch.ones(1, 8).half()}, quant_method="gptq")
    done = run("consolidate", source, Path("m"), "--dequantize")
    assert (done.returncode, done.stderr.count("\n")) == (5, 1)
    assert "q.qweight" in done.stderr
    tensors = {"q.weight": torch.ones(4, 4).to(FP8), "q.weight_scale_inv": torch.ones(3, 3)}
    source = made("t", tensors, quant_method="fp8")
    refused(source, zckpt.SourceError, "its scales do not fit any blocks")


def packed(codes, bits, dim):
    """Codes end to end along a dimension, in words of 32 bits, lowest bits first."""
    codes = codes.movedim(dim, -1)
    stream = (codes[..., None] >> torch.arange(bits)) & 1
    words = (stream.reshape(*codes.shape[:-1], -1, 32) << torch.arange(32)).sum(-1).to(torch.int32)
    return words.movedim(-1, dim).contiguous()


@pytest.mark.parametrize(("bits", "sorted_columns"), each([2, 3, 4, 8], [False, True]))
def test_gptq(bits, sorted_columns):
    """As AutoGPTQ 0.7 and GPTQModel 7.7 have it; in the first format zeros are kept less one."""
    rows, columns, size = 2112, 160, 64  # the last group is short
    codes, zeros = torch.randint(1 << bits, (rows, columns)), torch.randint(1, 1 << bits, (rows, 3))
    scale = (torch.rand(rows, 3) * 0.02).half()
    order = torch.arange(columns) // size
    order = order[torch.randperm(columns)] if sorted_columns else order
    wanted = (codes - zeros[:, order]).half() * scale[:, order]
    for number, (kept, more) in enumerate(
        [
            (1, {}),
            (1, {"checkpoint_format": "gptq"}),
            (1, {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
            (0, {"quant_method": "auto-round", "packing_format": "auto_round"}),
            (0, {"checkpoint_format": "gptq_v2"}),
        ]
    ):
        tensors = {"q.qweight": packed(codes.T, bits, 0), "q.qzeros": packed(zeros.T - kept, bits, 1)}
        tensors |= {"q.scales": scale.T.contiguous(), "q.g_idx": order.int(), "q.bias": torch.ones(rows).half()}
        if number == 0 and not sorted_columns:
            del tensors["q.g_idx"]
        source = made(f"{number}", tensors, **{"quant_method": "gptq", "bits": bits, "group_size": size, **more})
        found = floats(source, f"{number}m")
        assert sorted(found) == ["q.bias", "q.weight"]
        assert torch.equal(found["q.weight"], wanted.float())
    tensors["q.qzeros"] = packed(zeros.T * 0 + (1 << bits) - 1, bits, 1)
    source = made("1", tensors, quant_method="gptq", bits=bits, group_size=size)
    refused(source, zckpt.UnsupportedError, "which programs interpret differently")
    tensors["q.g_idx"] = order.int() + 1
    source = made("1", tensors, quant_method="gptq", bits=bits, group_size=size)
    refused(source, zckpt.SourceError, "does not state the group of each column")


def test_products_of_a_float16_are_rounded_to_it_and_then_to_bfloat16():
    scale = torch.arange(0x6BE0, dtype=torch.int16).view(torch.float16)[:, None]  # up to 4032, of which 15 are a number
    codes, zeros = torch.arange(32).expand(len(scale), -1) % 16, torch.randint(16, scale.shape)
    tensors = {"q.qweight": packed(codes.T, 4, 0), "q.qzeros": packed(zeros.T, 4, 1), "q.scales": scale.T.contiguous()}
    how = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    found = floats(made("s", tensors, **how), "m", "bfloat16")["q.weight"]
    assert torch.equal(found, ((codes - zeros).half() * scale).bfloat16())


def test_awq():
    """As AutoAWQ 0.2.9 has it."""
    rows, columns, size = 1632, 192, 64
    codes, zeros = torch.randint(16, (rows, columns)), torch.randint(16, (rows, 3))
    scale = (torch.rand(rows, 3) * 0.02).half()
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    words = [packed(one.T.reshape(-1, rows // 8, 8)[..., order].reshape(-1, rows), 4, 1) for one in (codes, zeros)]
    tensors = {"q.qweight": words[0], "q.qzeros": words[1], "q.scales": scale.T.contiguous()}
    how = {"quant_method": "awq", "bits": 4, "group_size": size}
    auto = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}
    plain = auto | {"extra_config": {"lm_head": {"bits": 16}}}
    for number, more in enumerate(({}, {"version": "gemm"}, {"version": "GEMM"}, {"format": "gemm"}, plain)):
        found = floats(made(f"{number}", tensors, **(how | more)), f"{number}m")
        wanted = (codes - zeros.repeat_interleave(size, 1)).half() * scale.repeat_interleave(size, 1)
        assert torch.equal(found["q.weight"], wanted.float())
    other = auto | {"extra_config": {"q": {"bits": 8}}}
    for number, more in enumerate(({"version": "gemv"}, {"bits": 8}, {"quant_method": "auto-round"}, other)):
        source = made(f"r{number}", tensors, **{**how, **more})
        refused(source, zckpt.UnsupportedError, "of a kind that zckpt cannot dequantise")
    tensors["q.qzeros"] = words[0].clone()
    refused(made("s", tensors, **how), zckpt.SourceError, "do not fit together")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "bits", "size", "symmetric"),
    [*((*one, symmetric) for one in (("pack", 4, 32), ("pack", 3, 32), ("pack", 8, None), ("int", 8, 32))
       for symmetric in (True, False)),
     ("mxfp8", 8, 32, True), ("nvfp4", 4, 16, True), ("mxfp4", 4, 32, True)],
)  # fmt: skip
@pytest.mark.every(2)
def test_compressed_tensors(kind, bits, size, symmetric, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    classes = {"pack": "PackedQuantizationCompressor", "int": "NaiveQuantizationCompressor",
               "mxfp8": "MXFP8QuantizationCompressor", "nvfp4": "NVFP4PackedCompressor",
               "mxfp4": "MXFP4PackedCompressor"}  # fmt: skip
    own = getattr(compressors, classes[kind])
    is_float = kind in ("mxfp8", "nvfp4", "mxfp4")
    rows, columns = 2800, 96
    groups = columns // (size or columns)
    strategy = {"nvfp4": "tensor_group"}.get(kind, "group" if size else "channel")
    told = {"num_bits": bits, "symmetric": symmetric, "type": "float" if is_float else "int", "group_size": size,
            "strategy": strategy}  # fmt: skip
    if kind[:2] == "mx":
        told["scale_dtype"] = torch.uint8
    args = QuantizationArgs(**told)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {
        "weight": torch.randn(rows, columns).to(dtype),
        "weight_scale": (torch.rand(rows, groups) + 0.01).to(dtype),
    }
    if kind[:2] == "mx":
        state["weight_scale"] = 2.0 ** torch.randint(-9, 3, (rows, groups)).to(dtype)
    if kind == "nvfp4":
        state["weight_global_scale"] = torch.tensor([1.7])
    if not symmetric:
        state["weight_zero_point"] = torch.randint(-(1 << bits - 1), 1 << bits - 1, (rows, groups)).to(torch.int8)
    kept = own.compress(dict(state), scheme)
    wanted = own.decompress(dict(kept), scheme)["weight"]
    settings = {"config_groups": {"g": {"weights": json.loads(args.model_dump_json())}}}
    tensors = {f"q.{name}": one.contiguous() for name, one in kept.items()}
    source = made("s", tensors, quant_method="compressed-tensors", **settings)
    found = floats(source, "m")
    assert list(found) == ["q.weight"]
    assert torch.equal(found["q.weight"], wanted.float())


def of_mlx(tensors, **told):
    """A directory of mlx-lm 0.31: its `quantization`, which it also calls `quantization_config`."""
    source = made("s", tensors, **told)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization": told}))
    return source


@pytest.mark.parametrize(("bits", "dtype"), each([1, 2, 3, 4, 5, 6, 8], [torch.float16, torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("is_metal", [False, True])
def test_mlx(bits, dtype, is_metal):
    """As mlx 0.32 has it on a CPU, in which products are rounded; and as transformers has it for Metal."""
    if is_metal and 32 % bits:
        return
    codes = torch.randint(1 << bits, (3, 70, 128))
    scale, bias = ((torch.rand(3, 70, 2) * 0.1).to(dtype) for _ in range(2))
    tensors = {"q.weight": packed(codes, bits, -1).view(torch.uint32), "q.scales": scale}
    tensors |= {"q.qbiases" if is_metal else "q.biases": bias, "q.bias": torch.ones(70)}
    told = {"group_size": 64, "bits": bits, **({"quant_method": "metal"} if is_metal else {"mode": "affine"})}
    wide = torch.float32 if is_metal else dtype
    scale, bias = (one.to(wide).repeat_interleave(64, -1) for one in (scale, bias))
    source = of_mlx(tensors, **told)
    found = floats(source, "m")
    assert list(found) == ["q.bias", "q.weight"]
    assert torch.equal(found["q.weight"], (codes.to(wide) * scale + bias).to(dtype).float())
    assert "quantization" not in json.loads(Path("m/config.json").read_text())
    assert zckpt.inspect(source).details["quantised_weights"].startswith("metal" if is_metal else "mlx affine")


def test_modules_of_mlx_have_modes_of_their_own():
    codes, fp8 = torch.randint(256, (40, 64), dtype=torch.uint8), torch.randn(40, 64).to(FP8)
    tables = {"mxfp4": torch.randint(110, 140, (40, 4)), "nvfp4": torch.rand(40, 8).to(FP8).view(torch.uint8),
              "mxfp8": torch.randint(110, 140, (40, 2))}  # fmt: skip
    tensors, wanted = {}, {}
    values = FP4[torch.stack((codes & 15, codes >> 4), -1).long()].reshape(40, 128)
    for mode, scale in tables.items():
        words = fp8.view(torch.uint8) if mode == "mxfp8" else codes
        tensors |= {f"{mode}.weight": words.clone().view(torch.uint32), f"{mode}.scales": scale.to(torch.uint8)}
        factor = scale.view(FP8).float() if mode == "nvfp4" else 2.0 ** (scale - 127)
        whole = fp8.float() if mode == "mxfp8" else values
        wanted[f"{mode}.weight"] = whole * factor.repeat_interleave(whole.shape[1] // factor.shape[1], 1)
    told = {"mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
            "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"}}  # fmt: skip
    source = of_mlx(tensors, group_size=16, bits=4, mode="nvfp4", **told)
    found = floats(source, "m")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    elsewhere = {f"model.{name}": one for name, one in told.items()}
    renamed = of_mlx(tensors, group_size=16, bits=4, mode="nvfp4", **elsewhere)
    refused(renamed, zckpt.UnsupportedError, r"mxfp4\.weight: what is said of model\.mxfp4 may be of it")
    told["mxfp4"]["global_scale"] = True
    refused(of_mlx(tensors, group_size=16, bits=4, mode="nvfp4", **told), zckpt.UnsupportedError, r"mxfp4\.weight")
    refused(of_mlx(tensors, group_size=32, bits=4, mode="nvfp4"), zckpt.SourceError, "do not fit together")


def test_columns_that_are_not_in_groups_as_they_lie_are_refused():
    tensors = {"q.weight": torch.ones(4, 64, dtype=torch.int8), "q.weight_scale": torch.ones(4, 2)}
    tensors["q.weight_g_idx"] = torch.randint(2, (64,), dtype=torch.int32)
    refused(made("s", tensors, quant_method="compressed-tensors"), zckpt.UnsupportedError, r"q\.weight_g_idx: changes")
    alone = {name.removeprefix("q."): one for name, one in tensors.items()}
    refused(made("t", alone, quant_method="compressed-tensors"), zckpt.UnsupportedError, "weight_g_idx: changes")


def test_what_a_file_in_a_quantised_models_directory_has_is_told_by_its_config():
    tensors = {"q.trellis2": torch.ones(4, 64, dtype=torch.int16), "w": torch.ones(4).half()}
    source = made("s", tensors, quant_method="odd")
    with refusing(zckpt.UnsupportedError, r"q\.trellis2: low-bit codes"):
        zckpt.consolidate(source / "model.safetensors", "m.safetensors", dtype="float32")


def test_integers_that_are_no_codes_stay():
    table = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    tensors = {"q.weight": torch.randn(4, 4).to(FP8), "q.weight_scale_inv": torch.ones(1, 1), "gate.tid2eid": table,
               "mask": table.to(torch.int8)}  # fmt: skip
    found = floats(made("s", tensors, quant_method="fp8"), "m")
    assert torch.equal(found["gate.tid2eid"], table)
    assert torch.equal(found["mask"], table.to(torch.int8))
    refused(made("t", tensors, quant_method="hqq"), zckpt.UnsupportedError, r"gate\.tid2eid, mask")


def test_scales_of_a_cache_are_left_out_and_named():
    tensors = {"q.weight": torch.randn(4, 4).to(FP8), "q.weight_scale": torch.ones(4, 1)}
    tensors |= {"attn.k_scale": torch.ones(1), "attn.v_scale": torch.tensor(1.0)}
    source = made("s", tensors, quant_method="compressed-tensors")
    done = run("consolidate", source, Path("m"), "--dequantize")
    assert "attn.k_scale, attn.v_scale: scales of a cache in FP8" in done.stderr
    assert sorted(load_file("m/model.safetensors")) == ["norm.weight", "q.weight"]
    assert sorted(load_file(source / "model.safetensors")) == sorted([*tensors, "norm.weight"])


def test_groups_of_modules_that_are_packed_or_cut_otherwise():
    """What each weight has is told by its shape, where that fits one group alone; modelopt's grids have four sizes."""
    bits, blocks = {"a": 3, "b": 8}, {"c": (16, 32), "d": (32, 16)}
    tensors, wanted = {}, {}
    for name, count in bits.items():
        codes, scale = torch.randint(1 << count, (64, 96)), torch.rand(64, 3) + 0.1
        shape = torch.tensor([64, 96])
        tensors |= {f"{name}.weight_packed": packed(codes, count, 1), f"{name}.weight_scale": scale,
                    f"{name}.weight_shape": shape}  # fmt: skip
        wanted[f"{name}.weight"] = (codes - (1 << count - 1)) * scale.repeat_interleave(32, 1)
    for name, (rows, columns) in blocks.items():
        codes, scale = torch.randn(64, 64).to(FP8), torch.rand(64 // rows, 1, 64 // columns, 1) + 0.1
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale if name == "c" else scale[:, 0, :, 0]}
        grid = scale[:, 0, :, 0].repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        wanted[f"{name}.weight"] = codes.float() * grid
    told = [{"num_bits": one} for one in bits.values()] + [{"block_structure": [*one]} for one in blocks.values()]
    groups = {str(number): {"weights": one} for number, one in enumerate(told)}
    source = made("s", tensors, quant_method="compressed-tensors", config_groups=groups)
    found = floats(source, "m")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    tensors = {"c.weight": torch.randn(40, 40).to(FP8), "c.weight_scale": torch.ones(2, 2)}
    groups["2"], groups["3"] = ({"weights": {"block_structure": one}} for one in ([24, 24], [32, 32]))
    source = made("t", tensors, quant_method="compressed-tensors", config_groups=groups)
    refused(source, zckpt.UnsupportedError, "its scales may be of several blocks")
    tensors = {"c.weight": torch.randn(20, 48).to(FP8), "c.weight_scale": torch.tensor([[1.0, 2.0]])}
    groups["3"] = {"weights": {"block_structure": [32, 24]}}  # which is the same of so few rows
    found = floats(made("u", tensors, quant_method="compressed-tensors", config_groups=groups), "m2")
    assert torch.equal(found["c.weight"], tensors["c.weight"].float() * torch.tensor([1.0, 2.0]).repeat_interleave(24))


def test_experts_of_deepseek_v4():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes = torch.randint(-128, 128, (1200, 48), dtype=torch.int8)
    scale = (2.0 ** torch.randint(-9, 3, (1200, 3))).to(torch.float8_e8m0fnu)
    source = made("s", {"w1.weight": codes, "w1.scale": scale}, quant_method="fp8", scale_fmt="ue8m0")
    wanted = fp8.Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    found = floats(source, "m")
    assert list(found) == ["w1.weight"]
    assert torch.equal(found["w1.weight"], wanted)


@pytest.mark.parametrize(
    ("more", "group", "words"),
    [
        ({"q.pre_quant_scale": torch.ones(50)}, {}, r"q\.pre_quant_scale: changes what a layer computes with"),
        ({"q.svdquant_lora_a": torch.ones(2, 50)}, {}, r"q\.svdquant_lora_a: changes what a layer computes with"),
        ({}, {"apply": [{"location": "input"}]}, "transform_config r3: changes what"),
        ({}, {"apply": [{"location": ["odd"]}]}, "transform_config r3: changes what"),
        ({}, {"apply": [{"location": "weight_input"}]}, None),
        ({}, {}, None),
    ],
)
def test_weights_whose_inputs_are_scaled_or_rotated_are_refused(more, group, words):
    """A plain model would compute something else. A transform without any places is applied nowhere."""
    tensors = {"q.weight": torch.randn(6, 50).to(FP8), "q.weight_scale": torch.rand(6, 1), **more}
    transforms = {"config_groups": {"r3": group}}
    source = made("s", tensors, quant_method="compressed-tensors", transform_config=transforms)
    if words is None:
        assert list(floats(source, "m")) == ["q.weight"]
    else:
        refused(source, zckpt.UnsupportedError, words)


@pytest.mark.parametrize(
    ("codes", "scale"),
    [("q.weight._data", "q.weight._scale"), ("q.weight._data._data", "q.weight._scale"),
     ("q._weight_qdata", "q._weight_scale")],
)  # fmt: skip
def test_codes_of_quanto_and_torchao_are_no_numbers(codes, scale):
    kind = torch.uint8 if codes.endswith("_data._data") else FP8
    source = made("s", {codes: torch.ones(8, 8).to(kind), scale: torch.ones(8, 1)})
    with refusing(zckpt.UnsupportedError, f"low-bit codes, which only mean something .* expected {scale} in float32"):
        zckpt.consolidate(source, "m", dtype="bfloat16")
    refused(source, zckpt.UnsupportedError, "of a kind that zckpt cannot dequantise")


def test_what_says_how_codes_are_made_goes_with_them():
    tensors = {"q.weight": torch.randn(6, 50).to(FP8), "q.weight_scale": torch.ones(6, 1)}
    source = made("s", tensors, quant_method="modelopt")
    save_file(tensors, source / "model.safetensors", {"q.weight": "of a class"})
    (source / "hf_quant_config.json").write_text("{}")
    zckpt.consolidate(source, "m")
    zckpt.consolidate(source, "f", dequantize=True)
    with safe_open("m/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "q.weight": "of a class"}
    assert names_in("m") == ["config.json", "hf_quant_config.json", "model.safetensors"]
    assert names_in("f") == ["config.json", "model.safetensors"]
    zckpt.consolidate("f/model.safetensors", "p", config=source)  # numbers, to which that does not apply
    assert names_in("p") == names_in("f")
    assert "quantization_config" not in json.loads(Path("p/config.json").read_text())
    with safe_open("f/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # which is no code any more


def test_texts_that_shards_have_otherwise_are_of_none():
    Path("s").mkdir()
    index = {"metadata": {}, "weight_map": {}}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        texts = {"hash": "abc", "shard": str(number), f"w{number}": "of this shard"}
        save_file({f"w{number}": torch.ones(8)}, f"s/{name}", texts)
        index["weight_map"][f"w{number}"] = name
    Path("s/model.safetensors.index.json").write_text(json.dumps(index))
    zckpt.consolidate("s", "m.safetensors")
    zckpt.convert("s", "z", to="zckpt")
    zckpt.consolidate("z", "back.safetensors")
    with safe_open("m.safetensors", "pt") as file, safe_open("back.safetensors", "pt") as back:
        assert (
            back.metadata()
            == file.metadata()
            == {"format": "pt", "hash": "abc", "w1": "of this shard", "w2": "of this shard"}
        )
