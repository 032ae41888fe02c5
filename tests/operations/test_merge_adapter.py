"""LoRA adapters that PEFT saved, merged: what `merge_and_unload` makes of them, but for one rounding; or one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import FIXTURES, in_time, run
from tests.refusals import refusing
from tests.truth import Truth, bits

ADAPTERS = Path(__file__).parent / "adapters"
"""Of `make.py` there."""

MERGED = sorted({path.parent.name for path in ADAPTERS.glob("*/merged.safetensors")} - {"several"})
PEFT = "base_model.model."


def assert_close(found: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    """Of one type and shape, and no element further away than a step of its type: PEFT may round twice.

    In float32 the products themselves differ by some steps, for libraries sum them in their own ways.
    """
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), label
    sizes = expected.float().abs().clamp(min=1.0)
    step = torch.finfo(found.dtype).eps * (4 * sizes.max() if found.dtype == torch.float32 else sizes)
    assert ((found.float() - expected.float()).abs() <= step).all(), label


def assert_equal(found: Path, expected: Path) -> None:
    """The same tensors in two files, bit for bit."""
    mine, its = load_file(found), load_file(expected)
    assert mine.keys() == its.keys()
    assert all(torch.equal(bits(mine[key]), bits(tensor)) for key, tensor in its.items())


@pytest.mark.parametrize("name", MERGED)
def test_what_peft_merges(name, tmp_path):
    source = ADAPTERS / name
    done = zckpt.merge_adapter(source / "base.safetensors", source, tmp_path / "m.safetensors", verify=True)
    found, expected = load_file(tmp_path / "m.safetensors"), load_file(source / "merged.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_close(found[key], tensor, key)
    changed = [key for key, tensor in load_file(source / "base.safetensors").items() if not tensor.equal(found[key])]
    assert len(changed) == done.num_merged + done.num_replaced
    assert done.verified == sum(tensor.nbytes for tensor in found.values())


def test_a_model_and_an_adapter_that_are_swapped_are_told(tmp_path):
    source = ADAPTERS / "plain"
    with refusing(zckpt.UsageError, "is an adapter.*swap them"):
        zckpt.merge_adapter(source, source / "base.safetensors", tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize("name", ["plain", "saved", "embedding", "experts", "dora", "lora_bias", "tokens"])
@pytest.mark.every(3)
def test_a_whole_model_with_its_adapter_is_its_own_base(name, tmp_path):
    whole = ADAPTERS / name / "whole.safetensors"
    zckpt.convert(whole, tmp_path / "dcp", to="dcp")
    zckpt.merge_adapter(ADAPTERS / name / "base.safetensors", ADAPTERS / name, tmp_path / "n.safetensors")
    config = ADAPTERS / name
    for number, sources in enumerate([(whole, whole), (tmp_path / "dcp",) * 2, (config / "base.safetensors", whole)]):
        target = tmp_path / f"{number}.safetensors"
        zckpt.merge_adapter(*sources, target, adapter_config=config)
        assert_equal(target, tmp_path / "n.safetensors")


def test_one_of_several_adapters_is_named(tmp_path):
    """In a directory of PEFT, which has the first one in itself, and in a whole model."""
    source = ADAPTERS / "several"
    base, whole = source / "base.safetensors", source / "whole.safetensors"
    for adapter in (source, whole):
        with refusing((zckpt.UsageError, zckpt.UnsupportedError), r"holds .*adapters: .*default.*other.*--adapter"):
            zckpt.merge_adapter(base, adapter, tmp_path / "m.safetensors", adapter_config=source)
        with refusing(zckpt.UsageError, "default.*other"):
            zckpt.merge_adapter(base, adapter, tmp_path / "m.safetensors", adapter_config=source, adapter_name="x")
    for name, path in (("default", source), ("other", source / "other")):
        expected = load_file(path / "merged.safetensors")
        for number, (one, adapter) in enumerate([(base, source), (base, whole), (whole, whole)]):
            target = tmp_path / f"{name}{number}.safetensors"
            arguments = ("--adapter", name, *(("--adapter-config", path) if number else ()))
            assert run("merge-adapter", one, adapter, target, *arguments).returncode == 0
            found = load_file(target)
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                assert_close(found[key], tensor, key)


def test_verls_actor_is_base_and_adapter_and_says_its_scale(tmp_path):
    """Ranks' files of verl: a whole model of PEFT, beside the configuration of the bare one, and r and alpha."""
    source, whole = ADAPTERS / "plain", tmp_path / "whole"
    actor = tmp_path / "run" / "global_step_2" / "actor"
    actor.parent.mkdir(parents=True)
    zckpt.convert(source / "whole.safetensors", actor, to="fsdp-rank-files", world_size=2)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    (actor / "huggingface").mkdir(exist_ok=True)
    (actor / "huggingface" / "config.json").write_text('{"model_type": "llama"}')
    with refusing(zckpt.UsageError, "has an adapter in it.*from_pretrained would load none.*zckpt merge-adapter"):
        zckpt.consolidate(actor, whole)
    zckpt.consolidate(actor, tmp_path / "as_it_is.safetensors")
    with refusing(zckpt.UsageError, "holds no adapter_config.json"):
        zckpt.merge_adapter(actor, actor, whole)
    (actor / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    zckpt.merge_adapter(tmp_path / "run", tmp_path / "run", whole)
    assert (whole / "config.json").is_file()
    zckpt.merge_adapter(source / "base.safetensors", source, tmp_path / "n.safetensors")
    assert_equal(whole / "model.safetensors", tmp_path / "n.safetensors")
    (actor / "lora_adapter").mkdir()  # as verl has it there, too
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(source / name, actor / "lora_adapter")
    shutil.rmtree(whole)
    zckpt.merge_adapter(actor, actor, whole)
    assert_equal(whole / "model.safetensors", tmp_path / "n.safetensors")
    (actor / "lora_train_meta.json").unlink()  # before verl had it
    shutil.rmtree(whole)
    zckpt.merge_adapter(actor, actor, whole)
    assert_equal(whole / "model.safetensors", tmp_path / "n.safetensors")
    (actor / "lora_train_meta.json").write_text('{"r": 4}')
    with refusing(zckpt.DamagedFileError, "has no lora_alpha"):
        zckpt.merge_adapter(actor, actor, tmp_path / "m")


def test_experts_that_the_base_has_one_by_one_are_merged_as_a_map_has_them(tmp_path):
    """In blocks that hold parts of experts, too; and back under the names of the files."""
    mlp = "model.layers.0.block_sparse_moe"
    base = {f"{mlp}.experts.{e}.w{n}.weight": torch.randn(700, 300) if n != 2 else torch.randn(300, 700)
            for e in range(3) for n in (1, 2, 3)}  # fmt: skip
    save_file(base, tmp_path / "base.safetensors")
    module = "model.layers.0.mlp.experts"
    gate, down = factors(f"{module}.base_layer", 1400, 300, 6), factors(module, 300, 700, 6)
    path = adapter(tmp_path / "a", {**gate, **down}, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    with refusing(zckpt.UsageError, "do not fit the model's parameters.*--map"):
        zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "live.safetensors")
    mixtral = "mixtral-huggingface-fused"
    live = tmp_path / "live.safetensors"
    done = zckpt.merge_adapter(tmp_path / "base.safetensors", path, live, map=mixtral, verify=True, memory=1)
    assert done.num_merged == 2
    zckpt.consolidate(live, tmp_path / "m.safetensors", map=mixtral)
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == base.keys()
    for e in range(3):
        products = []
        for one in (gate, down):
            a, b = one.values()
            products.append(1.5 * b[:, e::3] @ a[2 * e : 2 * e + 2])
        for n, added in zip((1, 3, 2), (*products[0].chunk(2), products[1]), strict=True):
            key = f"{mlp}.experts.{e}.w{n}.weight"
            assert_close(found[key], base[key] + added, key)

    # the same adapter, one of each expert's matrices, whichever way PEFT took the tensors to lie; and back
    sizes = {"model_type": "mixtral", "num_local_experts": 3, "hidden_size": 300, "intermediate_size": 700}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    split = {"map": "peft-experts-mixtral", "map_config": tmp_path / "config.json"}
    zckpt.consolidate(path, tmp_path / "split", **split)
    told = json.loads((tmp_path / "split" / "adapter_config.json").read_text())
    assert (told["target_modules"], told["target_parameters"]) == (["w1", "w2", "w3"], None)
    zckpt.merge_adapter(tmp_path / "base.safetensors", tmp_path / "split", tmp_path / "s.safetensors")
    for key, tensor in load_file(tmp_path / "s.safetensors").items():
        assert_close(tensor, found[key], key)
    zckpt.consolidate(tmp_path / "split", tmp_path / "back.safetensors", **split)
    assert_equal(tmp_path / "back.safetensors", path / "adapter_model.safetensors")
    fused = load_file(path / "adapter_model.safetensors")
    turned = {}
    for a, b in zip(*(sorted(key for key in fused if f"lora_{one}" in key) for one in "AB"), strict=True):
        of_a, of_b = fused[a].reshape(3, 2, -1), fused[b].reshape(-1, 2, 3)
        turned |= {a: of_b.permute(2, 1, 0).flatten(0, 1), b: of_a.permute(2, 1, 0).flatten(1)}
    save_file({key: one.contiguous() for key, one in turned.items()}, tmp_path / "turned.safetensors")
    zckpt.consolidate(tmp_path / "turned.safetensors", tmp_path / "t.safetensors",
                      map="peft-experts-transposed", map_config=tmp_path / "config.json")  # fmt: skip
    names = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    wanted = load_file(tmp_path / "split" / "adapter_model.safetensors")
    found = load_file(tmp_path / "t.safetensors")
    renamed = {".".join(names.get(part, part) for part in key.split(".")): one for key, one in wanted.items()}
    assert found.keys() == renamed.keys()
    assert all(torch.equal(found[key], one) for key, one in renamed.items())
    with refusing(zckpt.UsageError, "another shape"):
        zckpt.consolidate(tmp_path / "turned.safetensors", tmp_path / "u.safetensors", **split)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_base_of_few_bits_is_merged_as_the_numbers_that_it_stands_for(dtype, tmp_path):
    """As `consolidate` makes them: in its type, and in parts of rows and of experts."""
    fp8, mxfp4 = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8)
    tensors = {
        "q.weight": fp8, "q.weight_scale_inv": torch.rand(3, 2), "wte.weight": torch.randn(9, 4).bfloat16(),
        "experts.up_blocks": mxfp4, "experts.up_scales": torch.randint(120, 130, (3, 40, 5), dtype=torch.uint8),
    }  # fmt: skip
    base = tmp_path / "base"
    base.mkdir()
    save_file(tensors, base / "model.safetensors")
    config = {
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (base / "config.json").write_text(json.dumps(config))
    added = {**factors("q", 300, 200), **factors("experts", 40, 160, 6), "wte.weight": torch.ones(9, 4)}
    added["q.lora_magnitude_vector"] = torch.rand(300)
    for key in ("q", "experts"):
        path = adapter(tmp_path / key, {name: one for name, one in added.items() if name.startswith((key, "wte"))},
                       target_parameters=["experts.up"], target_modules=["q"], use_dora=key == "q")  # fmt: skip
        with refusing(zckpt.UnsupportedError, f"{key}.*nothing can be added to low-bit codes; --dequantize"):
            zckpt.merge_adapter(base, path, tmp_path / "m")
        zckpt.consolidate(base, tmp_path / "plain", dequantize=True, dtype=dtype, overwrite=True)
        zckpt.merge_adapter(base, path, tmp_path / "one", dequantize=True, dtype=dtype, verify=True, overwrite=True)
        zckpt.merge_adapter(tmp_path / "plain", path, tmp_path / "two", dtype=dtype, overwrite=True)
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        assert "quantization_config" not in (tmp_path / "one" / "config.json").read_text()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_base_in_words_gets_what_is_added_to_its_numbers(method, tmp_path):
    """And is written in block FP8, if that is asked for, as what is merged without it."""
    words = torch.randint(-(2**31), 2**31, (32, 256) if method == "gptq" else (256, 32), dtype=torch.int32)
    name = "layers.0.up_proj"
    zeros = torch.full((2, 32), 0x33333333, dtype=torch.int32)
    tensors = {f"{name}.qweight": words, f"{name}.qzeros": zeros, f"{name}.scales": torch.rand(2, 256).half()}
    base = tmp_path / "base"
    base.mkdir()
    save_file(tensors, base / "model.safetensors")
    settings = {"quant_method": method, "bits": 4, "group_size": 128}
    config = {"model_type": "llama", "torch_dtype": "float16", "quantization_config": settings}
    (base / "config.json").write_text(json.dumps(config))
    path = adapter(tmp_path / "a", factors(name, 256, 256), target_modules=["up_proj"])
    zckpt.consolidate(base, tmp_path / "plain", dequantize=True)
    added = load_file(tmp_path / "plain" / "model.safetensors")[f"{name}.weight"].float()
    for at, quantize in enumerate((None, "fp8-block")):
        zckpt.merge_adapter(base, path, tmp_path / f"one{at}", dequantize=True, quantize=quantize, verify=True)
        zckpt.merge_adapter(tmp_path / "plain", path, tmp_path / f"two{at}", quantize=quantize)
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / f"one{at}" / file).read_bytes() == (tmp_path / f"two{at}" / file).read_bytes()
    merged = load_file(tmp_path / "one0" / "model.safetensors")[f"{name}.weight"]
    assert merged.dtype == torch.float16
    assert not torch.equal(merged.float(), added)
    assert "weight_block_size" in (tmp_path / "one1" / "config.json").read_text()


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        ({"down_proj": (3, 4, 4)}, {}, "is square, and may lie"),
        ({"up_proj": (3, 4, 5), "gate_proj": (3, 4, 5)}, {}, "fit its parameters in several orders"),
        ({"up_proj": (3, 4, 5), "down_proj": (3, 5, 4), "x": (3, 4, 4)}, {}, "do not fit the model's parameters"),
        ({"down_proj": (3, 4, 5)}, {"target_modules": ["experts"]}, "is in both target_modules and target_parameters"),
        ({"down_proj": (3, 4, 5)}, {"target_parameters": ["other.down_proj"]}, "do not fit|factors of .* do not fit"),
        ({"down_proj": (3, 4, 5)}, {"target_parameters": 5}, "unusable target_parameters"),
    ],
)
def test_experts_whose_factors_may_be_of_others_are_refused(shapes, settings, message, tmp_path):
    save_file({f"experts.{name}": torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "base.safetensors")
    added: dict[str, torch.Tensor] = {}
    for depth, (_, rows, columns) in enumerate(list(shapes.values())[:2]):
        added |= factors("experts" + ".base_layer" * depth, rows, columns, 6)
    targets = [f"experts.{name}" for name in shapes]
    path = adapter(tmp_path / "a", added, **{"target_parameters": targets, **settings})
    with refusing((zckpt.SourceError, zckpt.UsageError), message):
        zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "m.safetensors")


@pytest.mark.parametrize("is_dist", [False, True])
def test_megatrons_lora_is_pefts(is_dist, tmp_path):
    """As Megatron-Bridge merges it: linear_out @ linear_in x alpha / dim, where Megatron has the weight."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 5}))
    shapes = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8),
              "self_attn.o_proj": (8, 8), "mlp.gate_proj": (6, 8), "mlp.up_proj": (6, 8),
              "mlp.down_proj": (8, 6)}  # fmt: skip
    base = {f"model.layers.{n}.{name}.weight": torch.randn(shape) for n in range(2) for name, shape in shapes.items()}
    base |= {f"model.layers.{n}.{name}_layernorm.weight": torch.ones(8) for n in range(2)
             for name in ("input", "post_attention")}  # fmt: skip
    base |= {"model.embed_tokens.weight": torch.ones(5, 8), "model.norm.weight": torch.ones(8)}
    save_file(base | {"lm_head.weight": torch.ones(5, 8)}, tmp_path / "base.safetensors")
    of_weights = {"map": "llama-huggingface-megatron" + "-dist" * is_dist, "map_config": tmp_path / "config.json"}
    zckpt.consolidate(tmp_path / "base.safetensors", tmp_path / "megatron.safetensors", **of_weights)
    whole, added = load_file(tmp_path / "megatron.safetensors"), {}
    for name, weight in whole.items():
        if "linear_" in name and weight.ndim > 1 and "layer_norm" not in name:
            *lead, rows, columns = weight.shape
            a, b = torch.randn(*lead, 3, columns), torch.randn(*lead, rows, 3)
            module = name.removesuffix(".weight")
            added |= {f"{module}.adapter.linear_in.weight": a, f"{module}.adapter.linear_out.weight": b}
            whole[name] = weight + 2 * (b @ a)
    save_file(whole, tmp_path / "megatron.safetensors")
    save_file(added, tmp_path / "adapter.safetensors")
    zckpt.consolidate(tmp_path / "megatron.safetensors", tmp_path / "expected.safetensors", **of_weights)
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 6}')
    of_lora = {"map": "llama-megatron-peft" + "-dist" * is_dist, "map_config": tmp_path / "config.json"}
    zckpt.consolidate(tmp_path / "adapter.safetensors", tmp_path / "a", **of_lora, config=tmp_path / "settings")
    zckpt.merge_adapter(tmp_path / "base.safetensors", tmp_path / "a", tmp_path / "m.safetensors")
    found, expected = load_file(tmp_path / "m.safetensors"), load_file(tmp_path / "expected.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_close(found[key], tensor, key)
    zckpt.consolidate(tmp_path / "a", tmp_path / "back.safetensors", **of_lora)
    assert_equal(tmp_path / "back.safetensors", tmp_path / "adapter.safetensors")


def adapter(
    directory: Path, tensors: dict[str, torch.Tensor], *, suffix: str = ".safetensors", **settings: Any
) -> Path:
    """Save an adapter as PEFT does."""
    directory.mkdir(parents=True)
    named = {f"{PEFT}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    if suffix == ".bin":
        torch.save(named, directory / "adapter_model.bin")
    else:
        save_file(named, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def factors(module: str, rows: int, columns: int, rank: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(rows + columns)
    return {f"{module}.lora_A.weight": torch.randn(rank, columns), f"{module}.lora_B.weight": torch.randn(rows, rank)}


def product(tensors: dict[str, torch.Tensor], module: str, scale: float = 1.5) -> torch.Tensor:
    return (tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]) * scale


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "keep"])
@pytest.mark.every(3)
def test_masters_of_ranks_are_merged_into_and_rounded_once(dtype, suffix, tmp_path):
    source = FIXTURES / "s2_bf16_dp3"
    truth = Truth(source)
    name = next(key for key, one in truth.masters.items() if one.ndim == 2 and key not in truth.tied.values())
    module, shape = name.removesuffix(".weight"), truth.masters[name].shape
    added = factors(module, *shape)
    path = adapter(tmp_path / "a", added, suffix=suffix)
    zckpt.merge_adapter(source, path, tmp_path / "m.safetensors", dtype=dtype, verify=True)
    zckpt.consolidate(source, tmp_path / "n.safetensors", dtype=dtype)
    found, base = load_file(tmp_path / "m.safetensors"), load_file(tmp_path / "n.safetensors")
    kind = torch.bfloat16 if dtype else torch.float32
    assert_close(found.pop(name), (truth.masters[name] + product(added, module)).to(kind), name)
    base.pop(name)
    assert found.keys() == base.keys()
    for key, tensor in base.items():
        assert torch.equal(bits(found[key]), bits(tensor)), key


def test_a_tied_weight_stays_one(tmp_path):
    source = FIXTURES / "s2_bf16_dp2"
    truth = Truth(source)
    (alias, owner), *_ = truth.tied.items()
    added = factors(alias.removesuffix(".weight"), *truth.masters[owner].shape)
    zckpt.merge_adapter(source, adapter(tmp_path / "a", added), tmp_path / "m.pt")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found[alias].data_ptr() == found[owner].data_ptr()
    assert_close(found[owner], truth.masters[owner] + product(added, alias.removesuffix(".weight")), owner)
    both = {**added, **factors(owner.removesuffix(".weight"), *truth.masters[owner].shape)}
    with refusing(zckpt.UnsupportedError, "are one tied weight, and both have an adapter"):
        zckpt.merge_adapter(source, adapter(tmp_path / "b", both), tmp_path / "n.pt")


@pytest.mark.parametrize("replaced", ["owner", "alias"])
def test_a_tied_tensor_that_is_replaced_is_tied_no_more(replaced, tmp_path):
    source = FIXTURES / "s2_bf16_dp2"
    truth = Truth(source)
    (alias, owner), *_ = truth.tied.items()
    name, other = (owner, alias) if replaced == "owner" else (alias, owner)
    new = torch.randn(truth.masters[owner].shape)
    path = adapter(tmp_path / "a", {name: new}, modules_to_save=[name.removesuffix(".weight")])
    done = zckpt.merge_adapter(source, path, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found[name], new)
    assert torch.equal(found[other], truth.masters[owner])
    assert (done.num_merged, done.num_replaced, done.num_added) == (0, 1, 0)


def test_an_embedding_that_was_saved_beside_its_adapter_stays_tied(tmp_path):
    """PEFT saves the base of embeddings that have an adapter, and loads it into the tied weight."""
    base, added = torch.randn(5, 3), torch.randn(5, 3)
    torch.save({"embed.weight": base, "head.weight": base}, tmp_path / "base.pt")
    a, b = torch.randn(2, 5), torch.randn(3, 2)
    tensors = {"embed.base_layer.weight": base, "embed.lora_embedding_A": a, "embed.lora_embedding_B": b}
    zckpt.merge_adapter(tmp_path / "base.pt", adapter(tmp_path / "a", tensors), tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["embed.weight"], found["head.weight"])
    assert_close(found["head.weight"], base + 1.5 * (b @ a).T, "head")

    # a module of its own: tied no more, as transformers is to know; which cannot be said of a head that is in no file
    path = adapter(tmp_path / "b", {"embed.weight": added}, modules_to_save=["embed"], task_type="CAUSAL_LM")
    for name, tied in (("both", {"head.weight": base}), ("one", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 5, "tie_word_embeddings": true}')
        save_file({"embed.weight": base.clone(), **tied}, tmp_path / name / "model.safetensors")
    zckpt.merge_adapter(tmp_path / "both", path, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"] is False
    with refusing(zckpt.UnsupportedError, r"embed\.weight replaces a tied tensor.*in no file"):
        zckpt.merge_adapter(tmp_path / "one", path, tmp_path / "n")


def test_a_head_that_the_base_lacks_is_added(tmp_path):
    save_file({"w.weight": torch.ones(3, 4)}, tmp_path / "base.safetensors")
    tensors = {**factors("w", 3, 4), "score.weight": torch.ones(2, 3)}
    path = adapter(tmp_path / "a", tensors, modules_to_save=["score"], task_type="SEQ_CLS")
    done = zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "m")
    assert (done.num_merged, done.num_replaced, done.num_added) == (1, 1, 1)
    assert zckpt.open(tmp_path / "m").read("score.weight").tolist() == [[1.0] * 3] * 2
    path = adapter(tmp_path / "b", tensors)
    with refusing(zckpt.UsageError, r"score\.weight: not in .*base\.safetensors"):
        zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "n")


def test_large_weights_are_merged_in_blocks(tmp_path):
    base, added = torch.randn(3000, 500).half(), factors("w", 3000, 500)
    save_file({"w.weight": base}, tmp_path / "base.safetensors")
    path = adapter(tmp_path / "a", added)
    for memory in (1, 64 << 20):
        target = tmp_path / f"{memory}.safetensors"
        zckpt.merge_adapter(tmp_path / "base.safetensors", path, target, memory=memory)
        assert_close(load_file(target)["w.weight"], (base.float() + product(added, "w")).half(), "w")
    assert (tmp_path / "1.safetensors").read_bytes() == target.read_bytes()


# --- which way a weight lies


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_a_square_weight_lies_as_the_configuration_or_others_say(fan_in_fan_out, tmp_path):
    added = {**factors("a.c_proj", 4, 4), **factors("b.c_proj", 4, 6), **factors("c", 4, 4)}
    base = {"a.c_proj.weight": torch.ones(4, 4), "c.weight": torch.ones(4, 4)}
    base["b.c_proj.weight"] = torch.ones(6, 4) if fan_in_fan_out else torch.ones(4, 6)
    save_file(base, tmp_path / "base.safetensors")
    path = adapter(tmp_path / "a", added, fan_in_fan_out=fan_in_fan_out)
    zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    for module in ("a.c_proj", "b.c_proj", "c"):
        one = product(added, module)
        assert_close(found[f"{module}.weight"], 1 + (one.T if fan_in_fan_out else one), module)
    path = adapter(tmp_path / "b", added, fan_in_fan_out=not fan_in_fan_out)
    with refusing(zckpt.UnsupportedError, r"c\.weight is square"):
        zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "n.safetensors")
    zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "n.safetensors", fan_in_fan_out=fan_in_fan_out)
    assert (tmp_path / "n.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "began as 'pissa_niter_4' belongs to a base that this changed"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
        ({"lora_bias": True}, r"w has only lora_A, lora_B: expected lora_A, lora_B, lora_B\.bias"),
        ({"use_dora": True}, "w has only lora_A, lora_B"),
        ({"use_qalora": True}, "use_qalora: does not merge as weight"),
        ({"something_new": "x"}, "something_new"),
        ({"r": 4}, r"the factors of w do not fit.*a rank of 4.*A \(2, 4\), B \(3, 2\)"),
        ({"rank_pattern": {"w": 8}}, "a rank of 8"),
        ({"rank_pattern": {"(": 8}}, "unusable pattern"),
        ({"lora_alpha": "big"}, "unusable lora_alpha: expected a number of float32, found 'big'"),
        ({"lora_alpha": 1e300}, "unusable lora_alpha: expected a number of float32"),
        ({"lora_alpha": 10**401}, "unusable lora_alpha: expected a number of float32"),
        ({"lora_alpha": float("nan")}, "unusable lora_alpha"),
        ({"r": 10**401}, "unusable r: expected a number of float32"),
        ({"r": 0}, "unusable r: expected a number above 0"),
        ({"lora_alpha": 0}, "unusable lora_alpha: expected a number above 0"),
        ({"rank_pattern": ["w"]}, "unusable rank_pattern: expected an object"),
        ({"rank_pattern": "w"}, "unusable rank_pattern: expected an object"),
        ({"alpha_pattern": 5}, "unusable alpha_pattern: expected an object"),
        ({"modules_to_save": 5}, "unusable modules_to_save: expected a list"),
        ({"alpha_pattern": {r"(w)\1": 8}}, r"unusable pattern, it has groupref.*\(w\)"),
        ({"target_modules": ["q_proj"]}, "w is not in target_modules"),
        ({"target_modules": "layers.*"}, "w is not in target_modules"),
        ({"target_modules": ["v"], "ensure_weight_tying": True}, "w is tied to another module, and both have"),
    ],
)
def test_configurations_that_mean_something_else_are_refused(settings, message, tmp_path):
    save_file({"w.weight": torch.ones(3, 4)}, tmp_path / "base.safetensors")
    path = adapter(tmp_path / "a", factors("w", 3, 4), **settings)
    with refusing(zckpt.SourceError, message):
        zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"v.lora_A.weight": torch.ones(2, 4)}, "v has only lora_A"),
        ({"w.lora_magnitude_vector": torch.ones(3)}, r"w\.lora_magnitude_vector: cannot be added to weights"),
        ({"w.lora_B.bias": torch.ones(3)}, r"w\.lora_B\.bias: cannot be added to weights"),
        ({"w.hada_w1_a": torch.ones(3)}, r"w\.hada_w1_a: cannot be added to weights"),
        ({"x.weight": torch.ones(3)}, r"x\.weight: not in .*base\.safetensors.*expected names as"),
        ({"w.bias": torch.ones(4)}, r"w\.bias has another shape"),
        (factors("x", 3, 4), r"x: not in .*base\.safetensors"),
        (factors("v", 3, 4), r"the adapter of v does not fit"),
        (factors("n", 2, 2), r"n\.weight is not a weight that numbers can be added to.*found int8"),
        ({"w.lora_A.other.weight": torch.ones(2, 4), "w.lora_A.default.weight": torch.ones(2, 4)}, "several adapters"),
        ({"w.lora_A.b.weight": torch.ones(2, 4)}, "several adapters: b, one without a name"),
        ({"w.bias": torch.ones(3), "w.base_layer.bias": torch.ones(3)}, r"has w\.bias twice"),
        ({"w.modules_to_save.a.bias": torch.ones(3), "w.modules_to_save.b.bias": torch.ones(3)}, "twice|several"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(changed, message, tmp_path):
    base = {"w.weight": torch.ones(3, 4), "w.bias": torch.ones(3), "v.weight": torch.ones(5, 4)}
    save_file({**base, "n.weight": torch.ones(2, 2).to(torch.int8)}, tmp_path / "base.safetensors")
    path = adapter(tmp_path / "a", {**factors("w", 3, 4), **changed})
    with refusing((zckpt.SourceError, zckpt.UsageError), message):
        zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "target_modules"])
def test_patterns_that_would_take_for_ever_do_not(key, tmp_path):
    module, hostile = "a" * 50 + "b", "(a+)+(a|aa)*c|" + "a" * 50 + "b"
    save_file({f"{module}.weight": torch.ones(3, 4)}, tmp_path / "base.safetensors")
    settings: dict[str, Any] = {key: hostile if key == "target_modules" else {hostile: 2}}
    path = adapter(tmp_path / "a", factors(module, 3, 4), **settings)
    with in_time():
        zckpt.merge_adapter(tmp_path / "base.safetensors", path, tmp_path / "m.safetensors")


def test_what_is_no_adapter_is_refused(tmp_path):
    base = ADAPTERS / "plain" / "base.safetensors"
    shutil.copy(ADAPTERS / "plain" / "adapter_model.safetensors", tmp_path / "adapter_model.safetensors")
    with refusing(zckpt.UsageError, r"holds no adapter_config\.json.*--adapter-config"):
        zckpt.merge_adapter(base, tmp_path, tmp_path / "m.safetensors")
    config = ADAPTERS / "plain" / "adapter_config.json"
    zckpt.merge_adapter(base, tmp_path, tmp_path / "m.safetensors", adapter_config=config)
    with refusing(zckpt.UsageError, "holds adapters: "):
        zckpt.merge_adapter(base, ADAPTERS, tmp_path / "n.safetensors")
    (tmp_path / "adapter_config.json").write_text("[")
    with refusing(zckpt.DamagedFileError, "unreadable configuration"):
        zckpt.merge_adapter(base, tmp_path, tmp_path / "n.safetensors")


def test_an_adapter_is_never_the_target(tmp_path):
    shutil.copytree(ADAPTERS / "plain", tmp_path / "a")
    with refusing(zckpt.UsageError, "the target is, or contains, the source"):
        zckpt.merge_adapter(ADAPTERS / "plain" / "base.safetensors", tmp_path / "a", tmp_path / "a", overwrite=True)


# --- the command line


def test_the_command_prints_its_document_and_dry_runs(tmp_path):
    source, target = ADAPTERS / "plain", tmp_path / "m.safetensors"
    arguments = ("merge-adapter", source / "base.safetensors", source, target)
    done = run(*arguments, "--json", "--dry-run")
    document = json.loads(done.stdout)
    assert (done.returncode, document["dry_run"], document["num_merged"], target.exists()) == (0, True, 6, False)
    assert run(*arguments, "-q", "--verify").returncode == 0
    again = run(*arguments)
    assert (again.returncode, again.stderr.count("\n")) == (4, 1)
    ia3 = run("merge-adapter", source / "base.safetensors", ADAPTERS / "ia3", target, "--overwrite")
    assert (ia3.returncode, ia3.stderr.count("\n")) == (5, 1)
    assert "is not a LoRA adapter: expected peft_type LORA, found IA3" in ia3.stderr


def test_an_adapter_in_memory_becomes_one_in_files(tmp_path):
    """As what DeepSpeed keeps of a Trainer's run (TRL 1.16): what is trained, masters too, under names in memory."""
    run, live = tmp_path / "run", f"{PEFT}model.layers.0."
    tensors = {f"{live}q_proj.lora_A.default.weight": torch.randn(2, 4), f"{live}q_proj.lora_B.default.weight":
               torch.randn(4, 2), f"{PEFT}score.modules_to_save.default.weight": torch.randn(1, 4)}  # fmt: skip
    dcp.save({"model": tensors}, checkpoint_id=run)
    (run / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    zckpt.consolidate(run, tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    files = {name.replace(".modules_to_save", "").replace(".default", ""): one for name, one in tensors.items()}
    assert found.keys() == files.keys()
    assert all(torch.equal(found[name], one) for name, one in files.items())
    save_file(tensors, tmp_path / "as_it_is.safetensors")
    zckpt.consolidate(run, tmp_path / "one.safetensors")
    assert_equal(tmp_path / "one.safetensors", tmp_path / "as_it_is.safetensors")
