"""Adapters in what DeepSpeed and FSDP2 save of a training of PEFT's: merged, they are what PEFT merges, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.deepspeed_engine.spec import plain_config
from tests.gloo import run
from tests.pairwise import some
from tests.refusals import refusing

pytestmark = pytest.mark.interop

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "rank_pattern": {"down_proj": 2}},
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"target_modules": ["v_proj"], "use_dora": True, "use_rslora": True, "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["o_proj"], "trainable_token_indices": [3, 9, 4]},
}


def _adapted(folder: Path, kind: str, dtype: torch.dtype) -> torch.nn.Module:
    """Return a model with an adapter, and save its base and PEFT's configuration, which a program has anyway."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=kind == "lora")).to(dtype)
    if not torch.distributed.get_rank():
        model.save_pretrained(folder / "base")
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, init_lora_weights="gaussian", **ADAPTERS[kind]))
    if not torch.distributed.get_rank():
        adapted.peft_config["default"].save_pretrained(folder)
    return adapted


def _step(model: torch.nn.Module, rank: int) -> torch.Tensor:
    ids = torch.arange(12).reshape(2, 6) + 7 * rank
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _merged(adapted: torch.nn.Module, folder: Path, rank: int) -> None:
    merged = adapted.merge_and_unload()
    if not rank:
        save_file({name: one.clone() for name, one in merged.state_dict().items()}, folder / "truth.safetensors")


def _by_deepspeed(rank: int, _world_size: int, folder: Path, kind: str, stage: int, excluded: bool) -> None:
    import deepspeed

    adapted = _adapted(folder, kind, torch.float32)
    trained = [one for one in adapted.parameters() if one.requires_grad]
    config = plain_config(stage, train_micro_batch_size_per_gpu=2)
    engine, *_ = deepspeed.initialize(model=adapted, optimizer=torch.optim.AdamW(trained, lr=0.1), config=config)
    for _ in range(2):
        engine.backward(_step(engine, rank))
        engine.step()
    engine.save_checkpoint(str(folder / "run"), exclude_frozen_parameters=excluded)
    with deepspeed.zero.GatheredParameters(list(adapted.parameters()), modifier_rank=0, enabled=stage == 3):
        _merged(adapted, folder, rank)


def _by_fsdp(rank: int, _world_size: int, folder: Path, kind: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    adapted = _adapted(folder, kind, torch.float32)
    for layer in adapted.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(adapted)
    optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], lr=0.1)
    for _ in range(2):
        _step(adapted, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"model": adapted.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "run")
    (folder / "ranks").mkdir(exist_ok=True)
    torch.save(adapted.state_dict(), folder / "ranks" / f"model_world_size_2_rank_{rank}.pt")
    whole = get_model_state_dict(adapted, options=StateDictOptions(full_state_dict=True))
    if not rank:
        bare = _adapted(folder, kind, torch.float32)
        bare.load_state_dict(whole)
        _merged(bare, folder, rank)


def _check(folder: Path, source: Path, tmp_path: Path, *, base: Path | None = None) -> None:
    """It is base and adapter at once, whatever wrote it; and `from_pretrained` loads what comes out."""
    from transformers import AutoModelForCausalLM

    truth = load_file(folder / "truth.safetensors")
    target = tmp_path / "merged"
    zckpt.merge_adapter(base or source, source, target, adapter_config=folder, config=folder / "base")
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found = model.state_dict()
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        step = 4 * torch.finfo(tensor.dtype).eps * tensor.abs().max()
        assert (found[name] - tensor).abs().max() <= step, name
    if base is None:
        with refusing(zckpt.UsageError, "has an adapter in it.*merge-adapter"):
            zckpt.consolidate(source, tmp_path / "whole", config=folder / "base")


@pytest.mark.parametrize(
    ("kind", "stage", "excluded"),
    some(
        [("lora", 3, False)],
        [("lora", 1, False), ("lora", 2, True), ("dora", 2, False), ("dora", 3, True), ("tokens", 1, False),
         ("tokens", 2, False), ("dora", 3, False)],
    ),
)  # fmt: skip
def test_what_deepspeed_saves(kind, stage, excluded, tmp_path):
    run(_by_deepspeed, 2, tmp_path, kind, stage, excluded)
    _check(tmp_path, tmp_path / "run", tmp_path, base=tmp_path / "base" if excluded else None)


def _by_verl(rank: int, world_size: int, folder: Path, version: int, resumed: Path | None) -> list[float]:
    """Train and save as verl does with `save_lora_only`, beside all of it; or load, and return the next losses."""
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

    model: Any = _adapted(folder, "plain", torch.float32)
    if version == 1:
        policy = fsdp_auto_wrap_policy(model)
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    else:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # of frozen ones, too
    name = f"world_size_{world_size}_rank_{rank}.pt"
    if resumed:
        model.load_state_dict(torch.load(resumed / f"model_{name}", weights_only=False), strict=False)
        optimizer.load_state_dict(torch.load(resumed / f"optim_{name}", weights_only=False))
    losses = []
    for number in range(2 if resumed else 0, 4):
        if number == 2 and not resumed:
            every = model.state_dict()
            for at, some in (("all", every), ("alone", {key: one for key, one in every.items() if "lora_" in key})):
                (folder / at).mkdir(exist_ok=True)
                torch.save(some, folder / at / f"model_{name}")
                torch.save(optimizer.state_dict(), folder / at / f"optim_{name}")
        loss = _step(model, number % 2)  # the same on all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("version", [1, 2])
def test_an_adapter_alone_of_verl_has_its_state_and_goes_on(version, tmp_path):
    [losses, *_] = run(_by_verl, 2, tmp_path, version, None)
    expected, found = zckpt.open(tmp_path / "all"), zckpt.open(tmp_path / "alone")
    assert found.parameters.keys() == {name for name in expected.parameters if "lora_" in name}
    for name in found.parameters:
        for slot in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found.read(name, slot), expected.read(name, slot))
    (tmp_path / "alone/huggingface").mkdir()
    (tmp_path / "alone/huggingface/config.json").write_bytes((tmp_path / "base/config.json").read_bytes())
    noted = zckpt.consolidate(tmp_path / "alone", tmp_path / "adapter").notes  # from_pretrained took it for a new model
    assert any("no adapter_config.json was found" in one for one in noted)
    assert {*load_file(tmp_path / "adapter/adapter_model.safetensors")} == {
        name.replace(".default", "") for name in found.parameters
    }
    compared = zckpt.diff(tmp_path / "adapter", tmp_path / "alone")
    assert not compared.only_in_a
    assert not compared.changed
    if version == 2:
        zckpt.convert(tmp_path / "alone", tmp_path / "3", to="fsdp-rank-files", world_size=3)
        [again, *_] = run(_by_verl, 3, tmp_path, version, tmp_path / "3")
        assert again == pytest.approx(losses[2:], abs=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ADAPTERS)
def test_what_fsdp2_saves(kind, tmp_path):
    run(_by_fsdp, 2, tmp_path, kind)
    for number, source in enumerate(("run", "ranks")):
        (tmp_path / str(number)).mkdir()
        _check(tmp_path, tmp_path / source, tmp_path / str(number))


OTHERS: dict[str, dict[str, Any]] = {
    "Vera": {"target_modules": ["q_proj"], "r": 4},  # what all modules share is a buffer of the whole
    "VBLoRA": {"target_modules": ["q_proj"], "num_vectors": 10, "vector_length": 4, "topk": 2},
    "C3A": {"target_modules": ["q_proj"], "block_size": 8},
    "Glora": {"target_modules": ["q_proj"]},  # a part of it has parts of its own
    "PromptTuning": {"num_virtual_tokens": 3},
}


@pytest.mark.parametrize("kind", some(["Vera", "PromptTuning"], ["VBLoRA", "C3A", "Glora"]))
def test_other_kinds_are_adapters_too(kind, tmp_path):
    """What is trained of one is PEFT's file, and `diff` knows it; with the model around it, it is no model's."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    base = LlamaForCausalLM(LlamaConfig(**SIZES))
    base.save_pretrained(tmp_path / "base")
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **OTHERS[kind])
    adapted: Any = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "saved")
    frozen = {name for name, one in adapted.named_parameters() if not one.requires_grad}
    every = {name: one.clone() for name, one in adapted.state_dict().items()}
    torch.save(every, tmp_path / "whole.pt")
    some_of = {name: one for name, one in every.items() if name not in frozen}
    torch.save(some_of, tmp_path / "some.pt")
    with refusing(zckpt.UsageError, "has an adapter in it.*merge-adapter"):
        zckpt.consolidate(tmp_path / "whole.pt", tmp_path / "whole", config=tmp_path / "base")
    if kind not in ("Vera", "VBLoRA"):
        return
    checkpoint = zckpt.open(tmp_path / "some.pt")
    bias = "base_model.model.gate.e_score_correction_bias"  # as DeepSeek's, which DeepSpeed saves of a frozen base, too
    checkpoint.buffers[bias] = replace(checkpoint.owner(next(iter(some_of))), name=bias)
    [note, _] = zckpt.consolidate(checkpoint, tmp_path / "adapter").notes
    assert f"{bias}: buffers of the base" in note
    saved = load_file(tmp_path / "saved/adapter_model.safetensors")
    found = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert bias not in found
    assert all(torch.equal(found[name], one) for name, one in saved.items())
    compared = zckpt.diff(tmp_path / "some.pt", tmp_path / "saved")
    assert not compared.changed
    assert not compared.only_in_b
