"""Prove `--map transformers` by tiny models of families of the installed transformers, and write docs/families.md.

    python bench/transformers_families.py                       writes the table
    python bench/transformers_families.py --check FAMILY ...    prints the rows of some

A model of each family is trained two steps, and what is in memory is saved by torch, and by `save_pretrained` with the
optimizer's numbers beside it as a Trainer has them. Then:

`loads`: of the first, `consolidate` makes a directory that `from_pretrained` takes whole, nothing missing and nothing
unexpected, and whose model gives equal outputs; all that `save_pretrained` writes is in it, bit-equal.
`trains on`: the second is loaded by `zckpt.load` into a fresh model and optimizer, whose next two losses are those of
the run that went on.
`there and back`: all slots of the first under the file's names are what transformers' own code makes of them, and under
the names in memory again what they were.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

import zckpt
from zckpt.errors import ZckptError
from zckpt.naming import traced

FAILED = "FAILED"
TABLE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
PAGE = """# Families of transformers

How `--map transformers`, `consolidate` and `zckpt.load` handle {number} families of transformers {version}.
`bench/transformers_families.py` makes this page with tiny models of random weights, trained for two steps.

- **in file / in memory**: the number of tensors that `save_pretrained` writes / that the model has, or "the same
  names" if nothing differs.
- **loads**: the state in memory (`torch.save` of model and optimizer), consolidated into a directory, is bit-equal
  to what `save_pretrained` writes; `from_pretrained` finds all of it and nothing else, and outputs are equal.
- **there and back**: under the file's names, weights and both AdamW moments are what transformers' own code makes
  of them; back under the names in memory, they are what they were, in the model's order.
- **trains on**: `zckpt.load` fills a fresh model and optimizer from a Trainer's directory, whose optimizer only numbers
  its parameters; their losses equal those of the uninterrupted run.

"""
SLOTS = ("exp_avg", "exp_avg_sq")
VOCABULARY, IMAGE, SIDE, PATCH = 40, 31, 8, 4
"""How many tokens, which of them stands for an image's part, and pixels on a side of an image and of a part."""

SMALL = {
    16: (
        "hidden_size d_model n_embd embed_dim word_embed_proj_dim ffn_dim encoder_ffn_dim decoder_ffn_dim "
        "text_embed_dim vision_embed_dim d_ff lru_width embedding_size projection_dim projection_size "
        "out_hidden_size num_position_embeddings attention_hidden_size rotary_dim"
    ),
    2: (
        "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers "
        "num_attention_heads num_key_value_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_experts_per_tok depth moe_k mamba_n_heads mamba_n_groups n_mamba_heads "
        "mamba_ngroups linear_num_key_heads linear_num_value_heads eos_token_id"
    ),
    4: (
        "num_experts num_local_experts n_routed_experts moe_num_experts mamba_d_state mamba_dt_rank "
        "qk_rope_head_dim state_size ssm_state_size time_step_rank qk_nope_head_dim mamba_d_ssm d_kv "
        "patch_size"
    ),
    8: (
        "head_dim v_head_dim kv_lora_rank q_lora_rank moe_intermediate_size shared_expert_intermediate_size "
        "mamba_head_dim mamba_headdim chunk_size kv_channels mamba_chunk_size linear_key_head_dim "
        "linear_value_head_dim image_size"
    ),
    1: "first_k_dense_replace n_group topk_group bos_token_id decoder_start_token_id",
    24: "intermediate_size ffn_hidden_size",
    0: "pad_token_id",
    64: "max_position_embeddings",
    40: "vocab_size decoder_vocab_size",
    31: "image_token_index image_token_id",
}
TINY = {name: number for number, names in SMALL.items() for name in names.split()}
IMPLIED = {"layer_types", "layers_block_type", "out_features", "out_indices", "stage_names", "architectures",
           "no_rope_layers", "moe_layers"}  # fmt: skip
"""What a configuration makes of its numbers."""

CAUSAL, IMAGES = "AutoModelForCausalLM", "AutoModelForImageClassification"
BOTH, SEQUENCES, WORDS = "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
SOUND = {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2}  # fmt: skip
STAGES = {"image_size": 32, "depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "window_size": 2,
          "num_heads": [2, 2], "num_layers": 2}  # fmt: skip

FAMILIES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "dense": dict.fromkeys(
        ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "bloom",
         "olmo2", "glm4", "cohere2", "starcoder2", "stablelm"], (CAUSAL, {})),
    "MoE": {
        **dict.fromkeys(["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "olmoe", "granitemoe", "phimoe", "minimax",
                         "minimax_m2", "ernie4_5_moe", "glm4_moe", "gpt_oss", "flex_olmo", "jetmoe", "hunyuan_v1_moe",
                         "afmoe", "llama4_text"], (CAUSAL, {})),
        "deepseek_v3": (CAUSAL, {"head_dim": 4}),
        "dots1": (CAUSAL, {"n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}),
        "dbrx": (CAUSAL, {"attn_config.rope_theta": 1e4, "attn_config.kv_n_heads": 1, "attn_config.clip_qkv": 8.0})},
    "vision": {
        **dict.fromkeys(["vit", "vit_msn", "ijepa", "dinov2", "beit"], (IMAGES, {})),
        **dict.fromkeys(["convnext", "swin"], (IMAGES, STAGES)), "vit_mae": ("AutoModel", {}),
        "deit": (IMAGES, {"architectures": ["DeiTForImageClassification"]})},
    "vision and text": {
        **dict.fromkeys(["clip", "siglip"], ("AutoModel", {})),
        **dict.fromkeys(["llava", "idefics", "paligemma"], (BOTH, {})),
        "idefics3": (BOTH, {"scale_factor": 1}),
        "mllama": (BOTH, {"vision_config.intermediate_layers_indices": [0], "vision_config.vision_output_dim": 32,
                          "vision_config.num_global_layers": 1, "text_config.cross_attention_layers": [1]}),
        **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"], (BOTH, {
            "vision_config.depth": 2, "vision_config.fullatt_block_indexes": [1],
            "vision_config.deepstack_visual_indexes": [0], "vision_config.spatial_merge_size": 1,
            "text_config.rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}})),
        "gemma3": (BOTH, {"mm_tokens_per_image": 4}),
        "internvl": (BOTH, {"vision_config.image_size": [8, 8], "vision_config.patch_size": [2, 2]})},
    "encoder": dict.fromkeys(["bert", "roberta", "electra", "deberta-v2"], (WORDS, {})),
    "encoder-decoder": {
        **dict.fromkeys(["bart", "mbart", "marian", "pegasus"], (SEQUENCES, {})),
        "t5": (SEQUENCES, {"decoder_start_token_id": 0}),
        "whisper": ("AutoModelForSpeechSeq2Seq", {"max_source_positions": 8, "num_mel_bins": 8})},
    "audio": dict.fromkeys(["wav2vec2", "hubert"], ("AutoModelForCTC", SOUND)),
    "state space": {
        **dict.fromkeys(["mamba", "falcon_mamba", "rwkv"], (CAUSAL, {})),
        "mamba2": (CAUSAL, {"num_heads": 4, "n_groups": 1})},
    "hybrid": {
        "jamba": (CAUSAL, {"attn_layer_period": 2, "attn_layer_offset": 1}),
        "bamba": (CAUSAL, MAMBA | {"attn_layer_indices": [1]}),
        "zamba2": (CAUSAL, {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
                            "hybrid_layer_ids": [1, 2], "n_mamba_heads": 4, "num_mem_blocks": 1,
                            "attention_hidden_size": 32, "attention_head_dim": 16, "mamba_ngroups": 1}),
        "recurrent_gemma": (CAUSAL, {"num_hidden_layers": 3}),
        "falcon_h1": (CAUSAL, MAMBA | {"mamba_d_ssm": 32}),
        "granitemoehybrid": (CAUSAL, MAMBA | {"layer_types": ["mamba", "attention"]}),
        **dict.fromkeys(["qwen3_next", "qwen3_5_text"], (CAUSAL, {
            "layer_types": ["linear_attention", "full_attention"]})),
        **dict.fromkeys(["lfm2", "lfm2_moe"], (CAUSAL, {
            "layer_types": ["conv", "full_attention"], "num_dense_layers": 1})),
        "nemotron_h": (CAUSAL, {})},
}  # fmt: skip


def tiny(config: PreTrainedConfig, own: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return a configuration as JSON, with small numbers and a family's own."""
    said = {key: value for key, value in config.to_dict().items() if key not in IMPLIED}
    for key, value in said.items():
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            said[key] = tiny(part, own, f"{path}{key}.")
        elif key in TINY and (type(value) is int or value is None):
            said[key] = TINY[key]
    return said | {key.removeprefix(path): value for key, value in own.items()
                   if key.startswith(path) and "." not in key.removeprefix(path)}  # fmt: skip


def model_of(family: str) -> PreTrainedModel:
    """Return a tiny model of a family, with a fixed seed."""
    head, own = next(families[family] for families in FAMILIES.values() if family in families)
    config = CONFIG_MAPPING[family].from_dict(tiny(CONFIG_MAPPING[family](), own))
    torch.manual_seed(0)
    return getattr(transformers, head).from_config(config).float()


PATCHES = {
    "pixel_values": torch.ones(8, 3 * 2 * PATCH * PATCH),
    "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
    "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]] * 2),
}
IMAGED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"], PATCHES),
    "idefics": {"pixel_values": torch.ones(2, 1, 3, SIDE, SIDE), "image_attention_mask": torch.ones(2, 12, 1)},
    "idefics3": {"pixel_values": torch.ones(2, 1, 3, SIDE, SIDE)},
    "mllama": {"pixel_values": torch.ones(2, 1, 4, 3, SIDE, SIDE), "aspect_ratio_ids": torch.ones(2, 1).long(),
               "aspect_ratio_mask": torch.ones(2, 1, 4).long(), "cross_attention_mask": torch.ones(2, 12, 1, 4)},
}  # fmt: skip
"""Images of families that take them otherwise."""


def batch_of(model: PreTrainedModel, family: str) -> dict[str, Any]:
    """Return what a model is trained on."""
    takes = inspect.signature(model.forward).parameters
    seen = getattr(model.config, "vision_config", model.config)
    side = seen.image_size if isinstance(getattr(seen, "image_size", None), int) else SIDE
    ids, pixels = torch.randint(3, 30, (2, 12)), torch.randn(2, 3, side, side)
    main = {
        "pixel_values": pixels, "input_values": torch.randn(2, 400), "input_features": torch.randn(2, 8, 16)
    }.get(model.main_input_name, ids)  # fmt: skip
    batch = {model.main_input_name: main}
    if main is ids and family in FAMILIES["vision and text"]:
        batch["pixel_values"] = pixels
        batch |= IMAGED.get(family, {})
        ids[:, 2:6] = IMAGE
    if "labels" in takes:
        batch["labels"] = torch.tensor([0, 1]) if "ForImageClassification" in type(model).__name__ else ids
    return batch | ({"return_loss": True} if "return_loss" in takes else {})


def in_training(family: str) -> tuple[PreTrainedModel, torch.optim.Optimizer, Callable[[int], float]]:
    """Return a model, an optimizer with the Trainer's groups, and what makes a step of both and returns its loss."""
    model = model_of(family).train()
    decayed = {*transformers.Trainer.get_decay_parameter_names(None, model)}
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [[(name, one) for name, one in trained if (name in decayed) == is_in] for is_in in (True, False)]
    optimizer = torch.optim.AdamW([{"params": own, "weight_decay": 0.1 * (own is groups[0])} for own in groups if own],
                                  lr=1e-3)  # fmt: skip
    torch.manual_seed(1)
    batch = batch_of(model, family)

    def step(number: int) -> float:
        transformers.set_seed(number)  # dropout and the like
        optimizer.zero_grad()
        done = model(**batch)
        loss = done.loss if getattr(done, "loss", None) is not None else done[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, optimizer, step


class Saved(NamedTuple):
    """A model in training, and where it was saved: as a Trainer does, and as it is in memory."""

    family: str
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    step: Callable[[int], float]
    run: Path
    memory: Path

    @classmethod
    def of(cls, family: str, place: Path) -> Saved:
        """Train two steps and save."""
        model, optimizer, step = in_training(family)
        for number in range(2):
            step(number)
        made = cls(family, model, optimizer, step, place / "checkpoint-2", place / "memory.pt")
        model.save_pretrained(made.run)
        (made.run / "trainer_state.json").write_text('{"global_step": 2}')
        state = optimizer.state_dict()
        torch.save({"model": model.state_dict(), "optimizer": state}, made.memory)
        for group in state["param_groups"]:
            del group["param_names"]
        torch.save(state, made.run / "optimizer.pt")
        return made


def outputs(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """Return logits, or what the model has."""
    transformers.set_seed(0)
    with torch.no_grad():
        done = model.eval()(**batch)
    return (
        done.logits
        if "logits" in done
        else next(one for one in done.values() if isinstance(one, torch.Tensor) and one.ndim)
    )


def loads(saved: Saved, place: Path) -> None:
    """Hold what `consolidate` makes of memory against what `from_pretrained` wants, and `save_pretrained` writes."""
    place /= "model"
    zckpt.consolidate(saved.memory, place, config=saved.run)
    truth, found = (load_file(one / "model.safetensors") for one in (saved.run, place))
    assert {*truth} <= {*found}, f"{min({*truth} - {*found})} is missing"
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), f"{name} differs"
    model, info = type(saved.model).from_pretrained(place, output_loading_info=True)
    assert not any(info.values()), info
    batch = batch_of(saved.model, saved.family)
    assert torch.equal(outputs(model, batch), outputs(saved.model, batch)), "outputs differ"


def trains_on(saved: Saved, _: Path) -> None:
    """Hold the losses of what is loaded into fresh objects against those of the run that goes on."""
    model, optimizer, step = in_training(saved.family)
    zckpt.load(saved.run, model=model, optimizer=optimizer)
    saved.model.train()
    for number in (2, 3):
        loss, its = step(number), saved.step(number)
        assert loss == its, f"loss {loss} for {its}"


def there_and_back(saved: Saved, place: Path) -> None:
    """Hold all slots under the file's names against what transformers makes of them, and memory's against memory."""
    with_map = {"to": "zckpt", "map": "transformers", "map_config": saved.run}
    every = dict(saved.model.named_parameters())
    state_of = saved.optimizer.state
    state = {slot: {name: state_of[one][slot] for name, one in every.items() if one in state_of} for slot in SLOTS}
    zckpt.convert(saved.memory, place / "there", **with_map)
    there = zckpt.open(place / "there")
    for name, tensor in load_file(saved.run / "model.safetensors").items():
        assert torch.equal(there.read(name, "weight"), tensor), f"{name} differs"
    for slot, moments in state.items():
        for name, tensor in revert_weight_conversion(saved.model, dict(moments)).items():
            assert torch.equal(there.read(name, slot), tensor), f"{slot} of {name} differs"
    zckpt.convert(place / "there", place / "back", **with_map)
    back = zckpt.open(place / "back")
    assert [name for name in back.parameters if name in every] == [*every], "another order"
    for slot, tensors in {"weight": every, **state}.items():
        for name, tensor in tensors.items():
            assert torch.equal(back.read(name, slot), tensor), f"{slot} of {name} differs, back"


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Make maps here: to import transformers again for each takes seconds."""

    def made(command, *, input, **_):  # noqa: A002
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = traced.main(lambda: input)
        return subprocess.CompletedProcess(command, code, out.getvalue(), "")

    with mock.patch.object(subprocess, "run", made):
        yield


PROOFS: dict[str, Callable[[Saved, Path], None]] = {
    "loads": loads, "there and back": there_and_back, "trains on": trains_on  # the last goes on with the run
}  # fmt: skip


def row(family: str) -> dict[str, str]:
    """Return what a family's row says."""
    kind = next(kind for kind, families in FAMILIES.items() if family in families)
    said = {"family": family, "class": "", "kind": kind, "in file / in memory": ""}
    with tempfile.TemporaryDirectory() as directory:
        try:
            saved = Saved.of(family, Path(directory))
        except Exception as error:  # noqa: BLE001  # transformers' own
            return said | dict.fromkeys(PROOFS, f"{FAILED}: {type(error).__name__}: {error}")
        file = load_file(saved.run / "model.safetensors")
        own = saved.model.state_dict()
        same = all(name in own and torch.equal(tensor, own[name]) for name, tensor in file.items())
        said |= {
            "class": type(saved.model).__name__,
            "in file / in memory": "the same names" if same else f"{len(file)} / {len(own)}",
        }
        for name, proof in PROOFS.items():
            try:
                place = Path(directory) / name.replace(" ", "_")
                place.mkdir()
                proof(saved, place)
                said[name] = "yes"
            except ZckptError as error:
                said[name] = f"refused: {error.message}"
            except Exception as error:  # noqa: BLE001
                said[name] = f"{FAILED}: {type(error).__name__}: {error}"
    return said


def page(rows: Sequence[dict[str, str]]) -> str:
    """Return the page of a table of rows."""
    lines = [" | ".join(one) for one in ([*rows[0]], ["---"] * len(rows[0]), *(own.values() for own in rows))]
    version = transformers.__version__
    return PAGE.format(version=version, number=len(rows)) + "".join(f"| {line} |\n" for line in lines)


def main() -> int:
    """Print rows, and write the page of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", metavar="FAMILY", help="print the rows of these, write nothing")
    asked = parser.parse_args().check
    rows = []
    transformers.utils.logging.disable_progress_bar()
    with in_this_process():
        for family in asked or [family for families in FAMILIES.values() for family in families]:
            rows.append(row(family))
            print(" | ".join(one.partition("\n")[0][:200] for one in rows[-1].values()), flush=True)
    if not asked:
        TABLE.write_text(page(rows), encoding="utf-8")
    return int(any(one.startswith(FAILED) for own in rows for one in own.values()))


if __name__ == "__main__":
    sys.exit(main())
