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
from tests.cli.console import FIXTURES, in_time, printed, refused, succeeded
from tests.folders import contents, names_in, write_model
from tests.logical import assert_same_tree
from tests.refusals import refusing
from tests.truth import Truth

ADAPTERS = Path(__file__).parent / "adapters"
"""Of `make.py` there."""

MERGED = sorted({path.parent.name for path in ADAPTERS.glob("*/merged.safetensors")} - {"several"})
PEFT = "base_model.model."


Tensors = dict[str, torch.Tensor]


def merged(base: Path | str, path: Path | str, target: str = "m.safetensors", **options: Any) -> Tensors:
    zckpt.merge_adapter(base, path, target, **options)
    return load_file(target)


def assert_close(found: Tensors, expected: Tensors) -> None:
    """Of the same names, types and shapes, and no element further away than a step of its type: PEFT may round twice.

    In float32 the products themselves differ by some steps, for libraries sum them in their own ways.
    """
    assert found.keys() == expected.keys()
    for name, its in expected.items():
        mine = found[name]
        assert (mine.dtype, mine.shape) == (its.dtype, its.shape), name
        sizes = its.float().abs().clamp(min=1.0)
        step = torch.finfo(its.dtype).eps * (4 * sizes.max() if its.dtype == torch.float32 else sizes)
        assert ((mine.float() - its.float()).abs() <= step).all(), name


@pytest.mark.parametrize("name", MERGED)
def test_what_peft_merges(name):
    source = ADAPTERS / name
    done = zckpt.merge_adapter(source / "base.safetensors", source, "m.safetensors", verify=True)
    found = load_file("m.safetensors")
    assert_close(found, load_file(source / "merged.safetensors"))
    changed = [key for key, tensor in load_file(source / "base.safetensors").items() if not tensor.equal(found[key])]
    assert len(changed) == done.num_merged + done.num_replaced
    assert done.verified == sum(tensor.nbytes for tensor in found.values())


def test_a_model_and_an_adapter_that_are_swapped_are_told():
    source = ADAPTERS / "plain"
    with refusing(zckpt.UsageError, "is an adapter.*swap them"):
        zckpt.merge_adapter(source, source / "base.safetensors", "m.safetensors")
    assert not Path("m.safetensors").exists()


@pytest.mark.parametrize("name", ["plain", "saved", "embedding", "experts", "dora", "lora_bias", "tokens"])
@pytest.mark.every(3)
def test_a_whole_model_with_its_adapter_is_its_own_base(name):
    source = ADAPTERS / name
    base, whole = source / "base.safetensors", source / "whole.safetensors"
    zckpt.convert(whole, "dcp", to="dcp")
    expected = merged(base, source)
    for number, sources in enumerate([(whole, whole), ("dcp", "dcp"), (base, whole)]):
        assert_same_tree(merged(*sources, f"{number}.safetensors", adapter_config=source), expected)


def test_one_of_several_adapters_is_named():
    """In a directory of PEFT, which has the first one in itself, and in a whole model."""
    source = ADAPTERS / "several"
    base, whole = source / "base.safetensors", source / "whole.safetensors"
    for adapter in (source, whole):
        with refusing((zckpt.UsageError, zckpt.UnsupportedError), r"holds .*adapters: .*default.*other.*--adapter"):
            zckpt.merge_adapter(base, adapter, "m.safetensors", adapter_config=source)
        with refusing(zckpt.UsageError, "default.*other"):
            zckpt.merge_adapter(base, adapter, "m.safetensors", adapter_config=source, adapter_name="x")
    for name, path in (("default", source), ("other", source / "other")):
        expected = load_file(path / "merged.safetensors")
        for number, (one, adapter) in enumerate([(base, source), (base, whole), (whole, whole)]):
            target, config = f"{name}{number}.safetensors", ["--adapter-config", path] if number else []
            succeeded("merge-adapter", one, adapter, target, f"--adapter {name}", *config)
            assert_close(load_file(target), expected)


def test_verls_actor_is_base_and_adapter_and_says_its_scale():
    """Ranks' files of verl: a whole model of PEFT, beside the configuration of the bare one, and r and alpha."""
    source, whole, actor = ADAPTERS / "plain", Path("whole"), Path("run/global_step_2/actor")
    actor.parent.mkdir(parents=True)
    zckpt.convert(source / "whole.safetensors", actor, to="fsdp-rank-files", world_size=2)
    Path("run/latest_checkpointed_iteration.txt").write_text("2")
    (actor / "huggingface").mkdir(exist_ok=True)
    (actor / "huggingface/config.json").write_text('{"model_type": "llama"}')
    with refusing(zckpt.UsageError, "has an adapter in it.*from_pretrained would load none.*zckpt merge-adapter"):
        zckpt.consolidate(actor, whole)
    zckpt.consolidate(actor, "as_it_is.safetensors")
    with refusing(zckpt.UsageError, "holds no adapter_config.json"):
        zckpt.merge_adapter(actor, actor, whole)
    (actor / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    zckpt.merge_adapter("run", "run", whole)
    assert (whole / "config.json").is_file()
    expected = merged(source / "base.safetensors", source)
    assert_same_tree(load_file(whole / "model.safetensors"), expected)
    (actor / "lora_adapter").mkdir()  # as verl has it there, too
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(source / name, actor / "lora_adapter")
    assert_same_tree(merged(actor, actor, "beside.safetensors"), expected)
    (actor / "lora_train_meta.json").unlink()  # before verl had it
    assert_same_tree(merged(actor, actor, "without.safetensors"), expected)
    assert_same_tree(merged("run", "run", "of_the_run.safetensors"), expected)
    (actor / "lora_train_meta.json").write_text('{"r": 4}')
    with refusing(zckpt.DamagedFileError, "has no lora_alpha"):
        zckpt.merge_adapter(actor, actor, "m")


def test_experts_that_the_base_has_one_by_one_are_merged_as_a_map_has_them(monkeypatch):
    """In blocks that hold parts of experts, too; and back under the names of the files."""
    monkeypatch.setattr("zckpt.engine.sums.BLOCK_NBYTES", 1 << 19)  # of 873 rows, of which an expert has 700
    mlp = "model.layers.0.block_sparse_moe"
    base = {f"{mlp}.experts.{e}.w{n}.weight": torch.randn(350, 150) if n != 2 else torch.randn(150, 350)
            for e in range(3) for n in (1, 2, 3)}  # fmt: skip
    save_file(base, "base.safetensors")
    module = "model.layers.0.mlp.experts"
    gate, down = factors(f"{module}.base_layer", 700, 150, 6), factors(module, 150, 350, 6)
    path = adapter({**gate, **down}, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    with refusing(zckpt.UsageError, "do not fit the model's parameters.*--map"):
        zckpt.merge_adapter("base.safetensors", path, "live.safetensors")
    mixtral = "mixtral-huggingface-fused"
    done = zckpt.merge_adapter("base.safetensors", path, "live.safetensors", map=mixtral, verify=True, memory=1)
    assert done.num_merged == 2
    zckpt.consolidate("live.safetensors", "m.safetensors", map=mixtral)
    found, expected = load_file("m.safetensors"), {}
    for e in range(3):
        products = []
        for one in (gate, down):
            a, b = one.values()
            products.append(1.5 * b[:, e::3] @ a[2 * e : 2 * e + 2])
        for n, added in zip((1, 3, 2), (*products[0].chunk(2), products[1]), strict=True):
            key = f"{mlp}.experts.{e}.w{n}.weight"
            expected[key] = base[key] + added
    assert_close(found, expected)

    # the same adapter, one of each expert's matrices, whichever way PEFT took the tensors to lie; and back
    sizes = {"model_type": "mixtral", "num_local_experts": 3, "hidden_size": 150, "intermediate_size": 350}
    Path("config.json").write_text(json.dumps(sizes))
    split = {"map": "peft-experts-mixtral", "map_config": "config.json"}
    zckpt.consolidate(path, "split", **split)
    told = json.loads(Path("split/adapter_config.json").read_text())
    assert (told["target_modules"], told["target_parameters"]) == (["w1", "w2", "w3"], None)
    assert_close(merged("base.safetensors", "split", "s.safetensors"), found)
    zckpt.consolidate("split", "back.safetensors", **split)
    fused = load_file(path / "adapter_model.safetensors")
    assert_same_tree(load_file("back.safetensors"), fused)
    turned = {}
    for a, b in zip(*(sorted(key for key in fused if f"lora_{one}" in key) for one in "AB"), strict=True):
        of_a, of_b = fused[a].reshape(3, 2, -1), fused[b].reshape(-1, 2, 3)
        turned |= {a: of_b.permute(2, 1, 0).flatten(0, 1), b: of_a.permute(2, 1, 0).flatten(1)}
    save_file({key: one.contiguous() for key, one in turned.items()}, "turned.safetensors")
    zckpt.consolidate("turned.safetensors", "t.safetensors",
                      map="peft-experts-transposed", map_config="config.json")  # fmt: skip
    names = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    wanted = load_file("split/adapter_model.safetensors")
    renamed = {".".join(names.get(part, part) for part in key.split(".")): one for key, one in wanted.items()}
    assert_same_tree(load_file("t.safetensors"), renamed)
    with refusing(zckpt.UsageError, "another shape"):
        zckpt.consolidate("turned.safetensors", "u.safetensors", **split)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_base_of_few_bits_is_merged_as_the_numbers_that_it_stands_for(dtype):
    """As `consolidate` makes them: in its type, and in parts of rows and of experts."""
    fp8, mxfp4 = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8)
    tensors = {
        "q.weight": fp8, "q.weight_scale_inv": torch.rand(3, 2), "wte.weight": torch.randn(9, 4).bfloat16(),
        "experts.up_blocks": mxfp4, "experts.up_scales": torch.randint(120, 130, (3, 40, 5), dtype=torch.uint8),
    }  # fmt: skip
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    base = write_model("base", tensors, {"torch_dtype": "bfloat16", "quantization_config": method})
    added = {**factors("q", 300, 200), **factors("experts", 40, 160, 6), "wte.weight": torch.ones(9, 4)}
    added["q.lora_magnitude_vector"] = torch.rand(300)
    for key in ("q", "experts"):
        path = adapter({name: one for name, one in added.items() if name.startswith((key, "wte"))}, at=key,
                       target_parameters=["experts.up"], target_modules=["q"], use_dora=key == "q")  # fmt: skip
        with refusing(zckpt.UnsupportedError, f"{key}.*nothing can be added to low-bit codes; --dequantize"):
            zckpt.merge_adapter(base, path, "m")
        zckpt.consolidate(base, "plain", dequantize=True, dtype=dtype, overwrite=True)
        zckpt.merge_adapter(base, path, "one", dequantize=True, dtype=dtype, verify=True, overwrite=True)
        zckpt.merge_adapter("plain", path, "two", dtype=dtype, overwrite=True)
        assert contents("one") == contents("two")
        assert "quantization_config" not in Path("one/config.json").read_text()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_base_in_words_gets_what_is_added_to_its_numbers(method):
    """And is written in block FP8, if that is asked for, as what is merged without it."""
    words = torch.randint(-(2**31), 2**31, (32, 256) if method == "gptq" else (256, 32), dtype=torch.int32)
    name = "layers.0.up_proj"
    zeros = torch.full((2, 32), 0x33333333, dtype=torch.int32)
    tensors = {f"{name}.qweight": words, f"{name}.qzeros": zeros, f"{name}.scales": torch.rand(2, 256).half()}
    settings = {"quant_method": method, "bits": 4, "group_size": 128}
    config = {"model_type": "llama", "torch_dtype": "float16", "quantization_config": settings}
    base = write_model("base", tensors, config)
    path = adapter(factors(name, 256, 256), target_modules=["up_proj"])
    zckpt.consolidate(base, "plain", dequantize=True)
    added = load_file("plain/model.safetensors")[f"{name}.weight"].float()
    for at, quantize in enumerate((None, "fp8-block")):
        zckpt.merge_adapter(base, path, f"one{at}", dequantize=True, quantize=quantize, verify=True)
        zckpt.merge_adapter("plain", path, f"two{at}", quantize=quantize)
        assert contents(f"one{at}") == contents(f"two{at}")
    found = load_file("one0/model.safetensors")[f"{name}.weight"]
    assert found.dtype == torch.float16
    assert not torch.equal(found.float(), added)
    assert "weight_block_size" in Path("one1/config.json").read_text()


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
def test_experts_whose_factors_may_be_of_others_are_refused(shapes, settings, message):
    save_file({f"experts.{name}": torch.ones(shape) for name, shape in shapes.items()}, "base.safetensors")
    added: dict[str, torch.Tensor] = {}
    for depth, (_, rows, columns) in enumerate(list(shapes.values())[:2]):
        added |= factors("experts" + ".base_layer" * depth, rows, columns, 6)
    targets = [f"experts.{name}" for name in shapes]
    path = adapter(added, **{"target_parameters": targets, **settings})
    with refusing((zckpt.SourceError, zckpt.UsageError), message):
        zckpt.merge_adapter("base.safetensors", path, "m.safetensors")


@pytest.mark.parametrize("is_dist", [False, True])
def test_megatrons_lora_is_pefts(is_dist):
    """As Megatron-Bridge merges it: linear_out @ linear_in x alpha / dim, where Megatron has the weight."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": 8}
    Path("config.json").write_text(json.dumps({**sizes, "vocab_size": 5}))
    shapes = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8),
              "self_attn.o_proj": (8, 8), "mlp.gate_proj": (6, 8), "mlp.up_proj": (6, 8),
              "mlp.down_proj": (8, 6)}  # fmt: skip
    base = {f"model.layers.{n}.{name}.weight": torch.randn(shape) for n in range(2) for name, shape in shapes.items()}
    base |= {f"model.layers.{n}.{name}_layernorm.weight": torch.ones(8) for n in range(2)
             for name in ("input", "post_attention")}  # fmt: skip
    base |= {"model.embed_tokens.weight": torch.ones(5, 8), "model.norm.weight": torch.ones(8)}
    save_file(base | {"lm_head.weight": torch.ones(5, 8)}, "base.safetensors")
    of_weights = {"map": "llama-huggingface-megatron" + "-dist" * is_dist, "map_config": "config.json"}
    zckpt.consolidate("base.safetensors", "megatron.safetensors", **of_weights)
    whole, added = load_file("megatron.safetensors"), {}
    for name, weight in whole.items():
        if "linear_" in name and weight.ndim > 1 and "layer_norm" not in name:
            *lead, rows, columns = weight.shape
            a, b = torch.randn(*lead, 3, columns), torch.randn(*lead, rows, 3)
            module = name.removesuffix(".weight")
            added |= {f"{module}.adapter.linear_in.weight": a, f"{module}.adapter.linear_out.weight": b}
            whole[name] = weight + 2 * (b @ a)
    save_file(whole, "megatron.safetensors")
    save_file(added, "adapter.safetensors")
    zckpt.consolidate("megatron.safetensors", "expected.safetensors", **of_weights)
    Path("settings").mkdir()
    Path("settings/adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 6}')
    of_lora = {"map": "llama-megatron-peft" + "-dist" * is_dist, "map_config": "config.json"}
    zckpt.consolidate("adapter.safetensors", "a", **of_lora, config="settings")
    assert_close(merged("base.safetensors", "a"), load_file("expected.safetensors"))
    zckpt.consolidate("a", "back.safetensors", **of_lora)
    assert_same_tree(load_file("back.safetensors"), added)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_of_mlx_lm_is_merged_as_it_fuses_it(dora):
    """scale * lora_a @ lora_b, which lie as (in, out), as mlx-lm 0.32 writes and fuses them."""
    base = {"layers.0.q.weight": torch.randn(6, 4), "embed.weight": torch.randn(9, 4), "wte.weight": torch.randn(4, 4)}
    save_file(base, "base.safetensors")
    added: Tensors = {"layers.0.q.lora_a": torch.randn(4, 2), "layers.0.q.lora_b": torch.randn(2, 6)}
    expected = base["layers.0.q.weight"] + 20 * (added["layers.0.q.lora_a"] @ added["layers.0.q.lora_b"]).T
    if dora:
        added["layers.0.q.m"] = torch.rand(6)
        expected *= (added["layers.0.q.m"] / expected.norm(dim=1))[:, None]
    else:
        for name, rows in (("embed", 9), ("wte", 4)):  # a square one is known by its name
            added |= {f"{name}.lora_a": torch.randn(rows, 2), f"{name}.lora_b": torch.randn(2, 4)}
            base[f"{name}.weight"] = base[f"{name}.weight"] + 20 * (added[f"{name}.lora_a"] @ added[f"{name}.lora_b"])
    Path("a").mkdir()
    save_file(added, "a/adapters.safetensors")
    settings = {"fine_tune_type": "dora" if dora else "lora", "num_layers": 1,
                "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0}}  # fmt: skip
    Path("a/adapter_config.json").write_text(json.dumps(settings))
    assert_close(merged("base.safetensors", "a"), {**base, "layers.0.q.weight": expected})
    del settings["lora_parameters"]
    Path("a/adapter_config.json").write_text(json.dumps(settings))
    with refusing(zckpt.DamagedFileError, "unusable r"):
        zckpt.merge_adapter("base.safetensors", "a", "n.safetensors")
    for odd in ({"fine_tune_type": "other"}, {"lora_parameters": {"rank": 2, "alpha": 16, "scale": 20.0}}):
        Path("a/adapter_config.json").write_text(json.dumps(settings | odd))
        with refusing(zckpt.UnsupportedError, "an adapter of mlx-lm"):
            zckpt.merge_adapter("base.safetensors", "a", "n.safetensors")


def adapter(tensors: Tensors, *, at: str = "a", suffix: str = ".safetensors", **settings: Any) -> Path:
    """Save an adapter as PEFT does."""
    directory = Path(at)
    directory.mkdir()
    named = {f"{PEFT}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    if suffix == ".bin":
        torch.save(named, directory / "adapter_model.bin")
    else:
        save_file(named, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def factors(module: str, rows: int, columns: int, rank: int = 2) -> Tensors:
    torch.manual_seed(rows + columns)
    return {f"{module}.lora_A.weight": torch.randn(rank, columns), f"{module}.lora_B.weight": torch.randn(rows, rank)}


def product(tensors: Tensors, module: str, scale: float = 1.5) -> torch.Tensor:
    return (tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]) * scale


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "keep"])
@pytest.mark.every(3)
def test_masters_of_ranks_are_merged_into_and_rounded_once(dtype, suffix):
    source = FIXTURES / "s2_bf16_dp3"
    truth = Truth(source)
    name = next(key for key, one in truth.masters.items() if one.ndim == 2 and key not in truth.tied.values())
    module, shape = name.removesuffix(".weight"), truth.masters[name].shape
    added = factors(module, *shape)
    path = adapter(added, suffix=suffix)
    zckpt.merge_adapter(source, path, "m.safetensors", dtype=dtype, verify=True)
    zckpt.consolidate(source, "n.safetensors", dtype=dtype)
    found, base = load_file("m.safetensors"), load_file("n.safetensors")
    kind = torch.bfloat16 if dtype else torch.float32
    assert_close({name: found.pop(name)}, {name: (truth.masters[name] + product(added, module)).to(kind)})
    base.pop(name)
    assert_same_tree(found, base)


def test_a_tied_weight_stays_one():
    source = FIXTURES / "s2_bf16_dp2"
    truth = Truth(source)
    (alias, owner), *_ = truth.tied.items()
    added = factors(alias.removesuffix(".weight"), *truth.masters[owner].shape)
    zckpt.merge_adapter(source, adapter(added), "m.pt")
    found = torch.load("m.pt", weights_only=True)
    assert found[alias].data_ptr() == found[owner].data_ptr()
    expected = truth.masters[owner] + product(added, alias.removesuffix(".weight"))
    assert_close({owner: found[owner]}, {owner: expected})
    both = {**added, **factors(owner.removesuffix(".weight"), *truth.masters[owner].shape)}
    with refusing(zckpt.UnsupportedError, "are one tied weight, and both have an adapter"):
        zckpt.merge_adapter(source, adapter(both, at="b"), "n.pt")


@pytest.mark.parametrize("replaced", ["owner", "alias"])
def test_a_tied_tensor_that_is_replaced_is_tied_no_more(replaced):
    source = FIXTURES / "s2_bf16_dp2"
    truth = Truth(source)
    (alias, owner), *_ = truth.tied.items()
    name, other = (owner, alias) if replaced == "owner" else (alias, owner)
    new = torch.randn(truth.masters[owner].shape)
    path = adapter({name: new}, modules_to_save=[name.removesuffix(".weight")])
    done = zckpt.merge_adapter(source, path, "m.safetensors")
    found = load_file("m.safetensors")
    assert torch.equal(found[name], new)
    assert torch.equal(found[other], truth.masters[owner])
    assert (done.num_merged, done.num_replaced, done.num_added) == (0, 1, 0)


def test_an_embedding_that_was_saved_beside_its_adapter_stays_tied():
    """PEFT saves the base of embeddings that have an adapter, and loads it into the tied weight."""
    base, added = torch.randn(5, 3), torch.randn(5, 3)
    torch.save({"embed.weight": base, "head.weight": base}, "base.pt")
    a, b = torch.randn(2, 5), torch.randn(3, 2)
    tensors = {"embed.base_layer.weight": base, "embed.lora_embedding_A": a, "embed.lora_embedding_B": b}
    found = merged("base.pt", adapter(tensors))
    assert torch.equal(found["embed.weight"], found["head.weight"])
    assert_close(found, dict.fromkeys(("embed.weight", "head.weight"), base + 1.5 * (b @ a).T))

    # a module of its own: tied no more, as transformers is to know; which cannot be said of a head that is in no file
    path = adapter({"embed.weight": added}, modules_to_save=["embed"], task_type="CAUSAL_LM", at="b")
    for name, tied in (("both", {"head.weight": base}), ("one", {})):
        config = {"vocab_size": 5, "tie_word_embeddings": True}
        write_model(name, {"embed.weight": base.clone(), **tied}, config)
    zckpt.merge_adapter("both", path, "m")
    assert json.loads(Path("m/config.json").read_text())["tie_word_embeddings"] is False
    with refusing(zckpt.UnsupportedError, r"embed\.weight replaces a tied .*in no file.*--map=transformers gives"):
        zckpt.merge_adapter("one", path, "n")
    # PEFT then keeps them tied, and saves it under both names: the base has one
    options: dict[str, Any] = {"modules_to_save": ["embed"], "ensure_weight_tying": True, "task_type": "CAUSAL_LM"}
    path = adapter({"embed.weight": added, "head.weight": added.clone()}, at="c", **options)
    found = merged("one", path, "o.safetensors")
    assert list(found) == ["embed.weight"]
    assert torch.equal(found["embed.weight"], added)


def test_a_head_that_the_base_lacks_is_added():
    save_file({"w.weight": torch.ones(3, 4)}, "base.safetensors")
    tensors = {**factors("w", 3, 4), "score.weight": torch.ones(2, 3)}
    path = adapter(tensors, modules_to_save=["score"], task_type="SEQ_CLS")
    done = zckpt.merge_adapter("base.safetensors", path, "m")
    assert (done.num_merged, done.num_replaced, done.num_added) == (1, 1, 1)
    assert zckpt.open("m").read("score.weight").tolist() == [[1.0] * 3] * 2
    path = adapter(tensors, at="b")
    with refusing(zckpt.UsageError, r"score\.weight: not in .*base\.safetensors"):
        zckpt.merge_adapter("base.safetensors", path, "n")


def test_large_weights_are_merged_in_blocks():
    base, added = torch.randn(3000, 500).half(), factors("w", 3000, 500)
    save_file({"w.weight": base}, "base.safetensors")
    path = adapter(added)
    one, whole = (merged("base.safetensors", path, f"{n}.safetensors", memory=n) for n in (1, 64 << 20))
    assert_close(one, {"w.weight": (base.float() + product(added, "w")).half()})
    assert_same_tree(one, whole)


# --- which way a weight lies


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_a_square_weight_lies_as_the_configuration_or_others_say(fan_in_fan_out):
    added = {**factors("a.c_proj", 4, 4), **factors("b.c_proj", 4, 6), **factors("c", 4, 4)}
    base = {"a.c_proj.weight": torch.ones(4, 4), "c.weight": torch.ones(4, 4)}
    base["b.c_proj.weight"] = torch.ones(6, 4) if fan_in_fan_out else torch.ones(4, 6)
    save_file(base, "base.safetensors")
    path = adapter(added, fan_in_fan_out=fan_in_fan_out)
    found = merged("base.safetensors", path)
    products = {module: product(added, module) for module in ("a.c_proj", "b.c_proj", "c")}
    assert_close(found, {f"{key}.weight": 1 + (one.T if fan_in_fan_out else one) for key, one in products.items()})
    path = adapter(added, fan_in_fan_out=not fan_in_fan_out, at="b")
    with refusing(zckpt.UnsupportedError, r"c\.weight is square"):
        zckpt.merge_adapter("base.safetensors", path, "n.safetensors")
    assert_same_tree(merged("base.safetensors", path, "n.safetensors", fan_in_fan_out=fan_in_fan_out), found)


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
def test_configurations_that_mean_something_else_are_refused(settings, message):
    save_file({"w.weight": torch.ones(3, 4)}, "base.safetensors")
    path = adapter(factors("w", 3, 4), **settings)
    with refusing(zckpt.SourceError, message):
        zckpt.merge_adapter("base.safetensors", path, "m.safetensors")


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
        (factors("n", 2, 2), r"n\.weight is not a weight that numbers can be added to.*found int64"),
        ({"w.lora_A.other.weight": torch.ones(2, 4), "w.lora_A.default.weight": torch.ones(2, 4)}, "several adapters"),
        ({"w.lora_A.b.weight": torch.ones(2, 4)}, "several adapters: b, one without a name"),
        ({"w.bias": torch.ones(3), "w.base_layer.bias": torch.ones(3)}, r"has w\.bias twice"),
        ({"w.modules_to_save.a.bias": torch.ones(3), "w.modules_to_save.b.bias": torch.ones(3)}, "twice|several"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(changed, message):
    base = {"w.weight": torch.ones(3, 4), "w.bias": torch.ones(3), "v.weight": torch.ones(5, 4)}
    save_file({**base, "n.weight": torch.ones(2, 2).to(torch.int64)}, "base.safetensors")
    path = adapter({**factors("w", 3, 4), **changed})
    with refusing((zckpt.SourceError, zckpt.UsageError), message):
        zckpt.merge_adapter("base.safetensors", path, "m.safetensors")
    assert not Path("m.safetensors").exists()


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "target_modules"])
def test_patterns_that_would_take_for_ever_do_not(key):
    module, hostile = "a" * 50 + "b", "(a+)+(a|aa)*c|" + "a" * 50 + "b"
    save_file({f"{module}.weight": torch.ones(3, 4)}, "base.safetensors")
    settings: dict[str, Any] = {key: hostile if key == "target_modules" else {hostile: 2}}
    path = adapter(factors(module, 3, 4), **settings)
    with in_time():
        zckpt.merge_adapter("base.safetensors", path, "m.safetensors")


def test_what_is_no_adapter_is_refused():
    base = ADAPTERS / "plain/base.safetensors"
    shutil.copy(ADAPTERS / "plain/adapter_model.safetensors", "adapter_model.safetensors")
    with refusing(zckpt.UsageError, r"holds no adapter_config\.json.*--adapter-config"):
        zckpt.merge_adapter(base, ".", "../m.safetensors")
    config = ADAPTERS / "plain/adapter_config.json"
    zckpt.merge_adapter(base, "adapter_model.safetensors", "m.safetensors", adapter_config=config)
    with refusing(zckpt.UsageError, "holds adapters: "):
        zckpt.merge_adapter(base, ADAPTERS, "n.safetensors")
    Path("adapter_config.json").write_text("[")
    with refusing(zckpt.DamagedFileError, "unreadable configuration"):
        zckpt.merge_adapter(base, ".", "../n.safetensors")


def test_an_adapter_is_never_the_target():
    shutil.copytree(ADAPTERS / "plain", "a")
    with refusing(zckpt.UsageError, "the target is, or contains, the source"):
        zckpt.merge_adapter(ADAPTERS / "plain/base.safetensors", "a", "a", overwrite=True)


# --- the command line


def test_the_command_prints_its_document_and_dry_runs():
    source = ADAPTERS / "plain"
    arguments = ("merge-adapter", source / "base.safetensors", source, "m.safetensors")
    document = printed(*arguments, "--dry-run")
    assert (document["dry_run"], document["num_merged"], names_in()) == (True, 6, [])
    succeeded(*arguments, "-q --verify")
    refused(4, *arguments)
    words = "is not a LoRA adapter: expected peft_type LORA, found IA3"
    refused(5, *arguments[:2], ADAPTERS / "ia3", "m.safetensors --overwrite", words=words)
    Path("prompt").mkdir()
    Path("prompt/adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}')
    save_file({"prompt_embeddings": torch.ones(4, 8)}, "prompt/adapter_model.safetensors")
    words = "no weights of the model can hold it: load it with PEFT beside the model"
    refused(5, *arguments[:2], "prompt", "m.safetensors --overwrite", words=words)


def test_an_adapter_in_memory_becomes_one_in_files():
    """As what DeepSpeed keeps of a Trainer's run (TRL 1.16): what is trained, masters too, under names in memory."""
    run, live = Path("run"), f"{PEFT}model.layers.0."
    tensors = {f"{live}q_proj.lora_A.default.weight": torch.randn(2, 4), f"{live}q_proj.lora_B.default.weight":
               torch.randn(4, 2), f"{PEFT}score.modules_to_save.default.weight": torch.randn(1, 4)}  # fmt: skip
    dcp.save({"model": tensors}, checkpoint_id=run)
    (run / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    zckpt.consolidate(run, "adapter")
    files = {name.replace(".modules_to_save", "").replace(".default", ""): one for name, one in tensors.items()}
    assert_same_tree(load_file("adapter/adapter_model.safetensors"), files)
    zckpt.consolidate(run, "one.safetensors")
    assert_same_tree(load_file("one.safetensors"), tensors)
