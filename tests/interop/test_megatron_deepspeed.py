"""Pipelines of Megatron-DeepSpeed's models: read as the live optimizer is, cut for other ranks, and resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import zckpt
from tests import gloo
from tests.deepspeed_engine import Spec, resume
from tests.deepspeed_engine.gpt_pipe import FRONT, HEADS, HIDDEN, METHOD, kind_of, padded
from tests.deepspeed_engine.models import SEQUENCE, VOCABULARY
from tests.interop.cut import TOLERANCE, Cut, cut
from tests.pairwise import some
from tests.truth import Truth, assert_same, assert_state
from zckpt.errors import UnsupportedError, UsageError

pytestmark = pytest.mark.interop


def spec(kind: str, stages: int, degree: int, dp: int = 1, **changes: Any) -> Spec:
    """Describe a training of Megatron-DeepSpeed's."""
    known = {"stage": 1, "dtype": "fp32", "groups": 2, "steps": 3, "steps_after": 2, "universal_info": True}
    return Spec(
        f"mds_{kind}_pp{stages}_tp{degree}", model=f"{FRONT}{kind}", pipeline_parallel=stages, tensor_parallel=degree,
        world_size=stages * degree * dp, partition_method=METHOD, **{**known, **changes},
    )  # fmt: skip


def to(source: Spec, stages: int, degree: int, dp: int) -> Cut:
    return cut(source, dp, pipeline_parallel_size=stages, tensor_parallel_size=degree)


LLAMA = spec("llama", 2, 2, dtype="bf16")
JOINED = spec("gpt_joined", 1, 1)
MANY = [
    to(JOINED, 1, 2, 1),
    to(LLAMA, 3, 1, 2),
    to(spec("gpt", 2, 1, 2), 1, 2, 1),
    to(spec("gpt_old", 1, 2), 2, 1, 1),
    to(spec("gpt_swiglu", 1, 2), 2, 1, 1),
    to(spec("gpt_untied", 2, 2), 4, 1, 1),
    to(spec("bloom", 2, 2, universal_info=False), 1, 4, 1),
    to(spec("bloom", 1, 1, universal_info=False, dtype="bf16"), 3, 2, 1),
    to(spec("llama_joined", 1, 2), 2, 4, 1),
    to(spec("llama_mha", 2, 1), 2, 2, 1),
    to(spec("llama", 3, 1, 2, clip=1.0, scheduler=True), 2, 2, 1),
    to(spec("llama", 2, 2, dtype="bf16", bf16_optimizer=True), 3, 1, 1),
]


def assert_is(folder: Path) -> None:
    """Hold every slot against the truth."""
    checkpoint, truth = zckpt.open(folder), Truth(folder)
    assert truth.weights.keys() == checkpoint.parameters.keys()
    assert_state(checkpoint, truth)
    for name, value in truth.weights.items():
        assert_same(checkpoint.read(name, "weight"), value, name)


@pytest.mark.parametrize("case", some([to(LLAMA, 1, 1, 1)], MANY), ids=str)
def test_models_of_megatron_deepspeed_are_read_and_cut_for_other_ranks(case, made):
    folder, resumed = made(case.source), case.resumed
    assert_is(folder)
    assert not zckpt.verify(folder, deep=True).findings
    case.assert_goes_on(folder, Path("cut"))
    found = zckpt.diff(folder, "cut")
    assert found.equal, found.settings
    assert not zckpt.verify("cut", deep=True).findings
    sizes = {
        "pipeline_model_parallel_size": resumed.pipeline_parallel, "data_parallel_size": resumed.data_parallel,
        "tensor_model_parallel_size": resumed.tensor_parallel, "world_size": resumed.world_size,
    }  # fmt: skip
    for file in Path("cut").glob("*/mp_rank_*_model_states.pt"):
        arguments = vars(torch.load(file, weights_only=False)["args"])
        assert {key: arguments[key] for key in sizes} == sizes


def edited(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy whose model files have been changed."""
    shutil.copytree(folder, target)
    for file in target.glob("*/mp_rank_*_model_states.pt"):
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)
    return target


def test_what_only_the_arguments_tell_is_refused_without_them(made):
    bare = edited(made(LLAMA), Path("bare"), lambda content: content.pop("args"))
    with pytest.raises(UnsupportedError, match=r"the order of queries, keys and values .* --tp-rules FILE"):
        zckpt.open(bare)
    whole = edited(made(JOINED), Path("whole"), lambda content: content.pop("args"))
    with pytest.raises(UnsupportedError, match="do not say which parameters each rank has whole"):
        zckpt.reshard(whole, "out", world_size=1, tensor_parallel_size=2)
    with pytest.raises((UnsupportedError, UsageError), match=r"partition-method|stage-bounds"):
        zckpt.reshard(whole, "out", world_size=1, pipeline_parallel_size=2)

    def old(content: dict[str, Any]) -> None:
        del content["universal_checkpoint_info"]

    own = zckpt.diff(made(LLAMA), edited(made(LLAMA), Path("old"), old), parameters=["[2-5].*"])
    assert own.equal_slots
    assert not own.changed
    with pytest.raises(UnsupportedError, match="attention heads would be split between two of 4"):
        zckpt.reshard(made(LLAMA), "out", world_size=1, tensor_parallel_size=4)
    assert not Path("out").exists()


def test_fewer_keys_than_heads_where_those_of_a_rank_are_end_to_end_are_refused(made):
    def newer(content: dict[str, Any]) -> None:
        content["args"].ds_sequence_parallel_fpdt = False

    with pytest.raises(UnsupportedError, match="the order of queries, keys and values"):
        zckpt.open(edited(made(LLAMA), Path("newer"), newer))


def assert_same_state(a: Path, b: Path) -> None:
    found = zckpt.diff(a, b)
    assert found.equal_slots
    assert [found.changed, found.only_in_a, found.only_in_b] == [[], [], []]


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["universal", "consolidated", "zckpt", "dcp"])
def test_state_goes_through_other_formats_and_back(to, made):
    folder = made(LLAMA)
    zckpt.convert(folder, "between", to=to)
    assert_same_state(folder, "between")
    options = {"pipeline_parallel_size": 3, "stage_bounds": "0,3,4,7"}
    layers = "f,EmbeddingPipe,ParallelTransformerLayerPipe*3,LayerNorm,LMHeadPipe"
    zckpt.convert("between", "back", to="deepspeed", world_size=1, stage=1,
                  pipeline_layers=layers, **options)  # fmt: skip
    assert_same_state(folder, "back")


def model_of(source: Spec) -> type[hf.PreTrainedModel]:
    """Return Hugging Face's class of a model."""
    classes = {"llama": hf.LlamaForCausalLM, "gpt": hf.GPT2LMHeadModel, "bloom": hf.BloomForCausalLM}
    return classes[source.model.removeprefix(FRONT).partition("_")[0]]


def config_of(source: Spec) -> hf.PretrainedConfig:
    """Return Hugging Face's configuration of a model."""
    kind, its = kind_of(source), model_of(source)
    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": kind.tied}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    if its is hf.LlamaForCausalLM:
        return hf.LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=kind.feed_forward, num_hidden_layers=kind.layers, rms_norm_eps=1e-5,
            num_attention_heads=HEADS, num_key_value_heads=kind.groups, **common,
        )  # fmt: skip
    if its is hf.BloomForCausalLM:
        return hf.BloomConfig(hidden_size=HIDDEN, n_layer=kind.layers, n_head=HEADS, **common)
    return hf.GPT2Config(
        n_embd=HIDDEN, n_inner=kind.feed_forward, n_layer=kind.layers, n_head=HEADS, n_positions=SEQUENCE + 3,
        activation_function="gelu", **none, **common,
    )  # fmt: skip


IDS = torch.arange(2 * SEQUENCE).reshape(2, SEQUENCE) * 7 % VOCABULARY


def logits(rank, world_size, source: Spec, run: Path) -> torch.Tensor:
    """Return the logits of a checkpoint in DeepSpeed's engine."""
    from tests.deepspeed_engine.training import build_engine

    engine = build_engine(source, seed=99)
    engine.load_checkpoint(str(run))
    with torch.no_grad():
        return engine.module(IDS).float()


NEWER, OLDER = "gpt2-huggingface-megatron-deepspeed-joined", "gpt2-huggingface-megatron-deepspeed"
LLAMAS = "llama-huggingface-megatron-deepspeed"
MAPS = [
    (spec("llama", 2, 2), LLAMAS),
    (spec("llama_mha", 1, 1), LLAMAS),
    (spec("llama_joined", 1, 2), f"{LLAMAS}-joined"),
    (spec("gpt", 2, 1), OLDER),
    (spec("gpt_old", 2, 2), f"{OLDER}-2023"),
    (spec("gpt_untied", 2, 1), OLDER),
    (spec("bloom", 2, 2), "bloom-huggingface-megatron-deepspeed"),
]


@pytest.mark.parametrize(
    ("source", "map_"),
    some([(JOINED, NEWER)], MAPS),
    ids=lambda one: getattr(one, "name", one),
)
def test_mapped_models_have_the_logits_of_hugging_face_and_train_on(source, map_, made, tmp_path):
    folder, kind, alone = made(source), kind_of(source), source.at(1, pipeline_parallel=1, tensor_parallel=1)
    run = folder
    if source.world_size > 1:
        run = tmp_path / "alone"
        zckpt.reshard(folder, run, world_size=1, pipeline_parallel_size=1, tensor_parallel_size=1)
    (tmp_path / "config.json").write_text(json.dumps({**config_of(source).to_dict(), "padded_vocab_size": padded(1)}))
    given = {"map": map_, "map_config": tmp_path / "config.json"}
    zckpt.consolidate(folder, tmp_path / "hf", slots="all", tied="drop", **given)
    config_of(source).save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        found = model_of(source).from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()(IDS).logits
    torch.testing.assert_close(found, gloo.run(logits, 1, alone, run)[0], rtol=0, atol=5e-6)
    zckpt.consolidate(folder, tmp_path / "by_arguments", map=map_, tied="drop")
    assert not zckpt.diff(tmp_path / "by_arguments", tmp_path / "hf", slots=["weight"], ignore_metadata=True).changed
    words = "EmbeddingPipe=embed" if kind.tied else "EmbeddingPipe"
    turn = "f," * (kind.first - 2)
    layers = f"f,{words},{turn}ParallelTransformerLayerPipe*{kind.layers},{turn}LayerNorm,"
    zckpt.convert(
        tmp_path / "hf", tmp_path / "back", to="deepspeed", world_size=1, stage=1, partition_method=METHOD,
        pipeline_parallel_size=2, pipeline_layers=layers + (words if kind.tied else "LMHeadPipe"), **given,
    )  # fmt: skip
    verdict = resume(tmp_path / "back", source.at(2, pipeline_parallel=2, tensor_parallel=1), folder)
    verdict.assert_goes_on(TOLERANCE["fp32"])


def test_a_map_of_another_order_or_another_age_is_refused(made):
    joined = made(JOINED)
    Path("config.json").write_text(json.dumps(config_of(JOINED).to_dict()))
    for config in (None, "config.json"):
        with pytest.raises(
            UnsupportedError, match=r"does not apply to models with this query_key_value: .* found end to end"
        ):
            zckpt.consolidate(joined, "out", map=OLDER, map_config=config)
    with pytest.raises(UnsupportedError, match="does not apply to models with this query_key_value"):
        zckpt.consolidate(made(LLAMA), "out", map=f"{LLAMAS}-joined")
    bare = edited(joined, Path("bare"), lambda content: content.pop("args"))
    with pytest.raises(UsageError, match=r"names contain .*layers.*, whose values are unknown.* --map-config FILE"):
        zckpt.consolidate(bare, "out", map=NEWER)
    with pytest.raises(UsageError, match="has no rule for"):
        zckpt.consolidate(bare, "out", map=f"{OLDER}-2023", map_config="config.json")


def test_universal_folders_say_how_the_program_cuts_them(made):
    """Of fewer keys than heads, for one rank. What no rule says is known: DeepSpeed cuts by rows what has no key."""

    def shared(content: dict[str, Any]) -> None:
        content["args"].num_key_value_heads = 1

    source = edited(made(JOINED), Path("shared"), shared)
    done = zckpt.convert(source, "universal", to="universal")
    assert [note for note in done.notes if "right for one tensor-parallel rank" in note]
    assert "one block of rows" not in str(zckpt.convert(made(JOINED), "one", to="universal").notes)
    zckpt.convert("one", "two", to="universal")
    for folder in (Path("one"), Path("two")):
        of = {key: torch.load(next(folder.glob(f"zero/2.{key}.weight/fp32.pt")), weights_only=False)
              for key in ("self_attention.dense", "mlp.dense_4h_to_h", "self_attention.query_key_value")}  # fmt: skip
        assert [one.get("cat_dim") for one in of.values()] == [1, 1, None]
        cut = of["self_attention.query_key_value"]["sub_param_shape"]
        assert (tuple(cut.shape), cut.partition_dim) == (((HIDDEN,) * 3, HIDDEN), 0)
