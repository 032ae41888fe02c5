"""Megatron's legacy files written anew: for the ranks that they were of, they are what Megatron-Core itself wrote."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zckpt
from tests.damage import edit
from tests.engine.test_plan import each_once, hole_of, run
from tests.formats.holding import converted
from tests.formats.test_megatron import GROUP, optimizer, write
from tests.formats.test_megatron_legacy import ITERATION, KINDS, MODEL, OTHER
from tests.refusals import refusing
from tests.truth import assert_slots_equal
from zckpt.engine.plan import fill
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.megatron.cut import KEPT, Cut, cuts_of
from zckpt.formats.megatron.objects import own_tree
from zckpt.formats.megatron.stages import bounds_of, dealt, expert_counts, on_expert_rank, order_of
from zckpt.state import Extent, Slot, Span
from zckpt.torchfile import read_torchfile

OPTIMIZER = "distrib_optim.pt"
ALONE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "expert_parallel_size": 1}


def sizes(name) -> dict[str, int]:
    tp, pp, ep = KINDS[name]
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "expert_parallel_size": ep}


def content(directory) -> dict[str, Any]:
    return {str(one.relative_to(directory)): torch.load(one, weights_only=False)
            for one in sorted(directory.glob("mp_rank_*/*.pt"))}  # fmt: skip


def assert_same(found, expected, at=""):
    """Every value, but for what is in the gaps of buffers, which is not known to be zero, and random states."""
    if isinstance(expected, torch.Tensor):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), at
        both = torch.equal(found, expected) or (
            at.startswith("distrib") and bool(((found == expected) | (found == 0)).all())
        )
        assert both, at
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key, one in expected.items():
            assert_same(found[key], one, f"{at or ''}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for number, one in enumerate(expected):
            assert_same(found[number], one, f"{at}.{number}")
    elif isinstance(expected, argparse.Namespace):
        assert vars(found) == vars(expected), at
    else:
        assert found == expected, at


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.every(2)
def test_on_other_ranks_and_back_the_files_are_those_of_megatron_core(name):
    source = OTHER / name / "ckpt"
    chunks = {"virtual_pipeline_parallel_size": 2} if name.endswith("vp2") else {}
    zckpt.reshard(source, "one", world_size=1, **ALONE)
    ranks = zckpt.open(source).topology.dp
    zckpt.reshard("one", "back", world_size=ranks, **sizes(name), **chunks)
    theirs, ours = content(source / ITERATION), content(Path(f"back/{ITERATION}"))
    assert ours.keys() == theirs.keys()
    for key, its in theirs.items():
        if key.endswith("model_optim_rng.pt"):
            its.pop("rng_state", None)
            assert_same({one: ours[key][one] for one in its}, its)
        else:
            if key.startswith("mp_rank_00_000") and chunks:
                its.pop(1)  # cut into buckets in this sample, which programs do with the first chunk only
                ours[key].pop(1)
            assert_same(ours[key], its, "distrib")


CUTS = [
    (name, *cut) for name in KINDS for cut in [(1, 1), (2, 1), (1, 2)][: 2 if "grouped" in name else 3]
]  # that has one layer


@pytest.mark.parametrize(("name", "tp", "pp"), CUTS)
@pytest.mark.every(4, 1)
def test_every_slot_arrives_at_any_cut(name, tp, pp):
    target = "cut"
    cut = ALONE | {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    zckpt.reshard(OTHER / name / "ckpt", target, world_size=1, **cut)
    opened = zckpt.open(target)
    assert (opened.topology.tp, opened.topology.pp, opened.topology.ep) == (tp, pp, 1)
    assert_slots_equal(opened, OTHER / name / "truth.safetensors")
    assert [one for one in zckpt.verify(target, deep=True).findings if one.severity == "error"] == []


def test_another_format_becomes_legacy_files():
    options = {
        "ckpt_format": "torch",
        "transformer_impl": "local",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "verify": True,
    }
    out = converted(OTHER / "mcore_bf16_plain_tp2" / "ckpt", "out", "megatron", **options)
    assert len(files_in(out)) == 4
    model = read_torchfile(next(out.glob(f"iter_*/mp_rank_01_001/{MODEL}"))).root["model"]
    assert "decoder.layers.0.input_layernorm.weight" in model
    assert model["decoder.layers.0.mlp.linear_fc1._extra_state"] is None
    zckpt.reshard(out, "one", world_size=1, verify=True, **ALONE)
    assert "decoder.layers.0.input_layernorm.weight" in read_torchfile(files_in("one")[0]).root["model"]


@pytest.mark.parametrize("cut", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("frozen", ["norm", "output_layer"])
def test_what_is_written_of_a_model_that_is_partly_frozen_is_read(frozen, cut):
    layer = {"self_attention.linear_qkv.layer_norm_weight": (4,), "self_attention.linear_qkv.weight": (12, 4),
             "self_attention.linear_proj.weight": (4, 4), "mlp.linear_fc1.layer_norm_weight": (4,),
             "mlp.linear_fc1.weight": (8, 4), "mlp.linear_fc2.weight": (4, 8)}  # fmt: skip
    shapes = {"embedding.word_embeddings.weight": (6, 4), "output_layer.weight": (6, 4),
              **{f"decoder.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}}  # fmt: skip
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    state = {f"optimizer.state.param.{name}": one.float() for name, one in tensors.items() if frozen not in name}
    groups, said = optimizer(GROUP, {**GROUP, "wd_mult": 0.0}), argparse.Namespace(transformer_impl="local")
    source = write(Path("source"), {**tensors, **state}, optimizer=groups, args=said)
    zckpt.convert(source, "out", to="megatron", ckpt_format="torch", verify=True, **cut)
    assert "decoder.layers.0.input_layernorm.weight" in read_torchfile(files_in("out")[0]).root["model"]
    opened = zckpt.open("out")
    assert [name for name, one in opened.parameters.items() if one.frozen] == [
        name for name in opened.parameters if frozen in name
    ]
    zckpt.reshard("out", "alone", world_size=1, verify=True, **ALONE)
    assert not zckpt.diff(source, "alone").changed


def test_experts_are_cut_as_the_rest_which_is_said_where_they_were_not():
    experts = "mlp.experts.experts.0"
    shapes = {"self_attention.linear_proj.weight": (4, 4), "mlp.router.weight": (1, 4),
              f"{experts}.linear_fc1.weight": (8, 4), f"{experts}.linear_fc2.weight": (4, 8)}  # fmt: skip
    tensors = {f"decoder.layers.0.{name}": torch.randn(shape) for name, shape in shapes.items()}
    source = write(Path("source"), tensors, args=argparse.Namespace(expert_tensor_parallel_size=1))
    notes = [zckpt.convert(source, str(tp), to="megatron", ckpt_format="torch", tensor_parallel_size=tp).notes
             for tp in (1, 2)]  # fmt: skip
    assert [any("experts are cut for" in one for one in its) for its in notes] == [False, True]


def files_in(run, name=MODEL) -> list[Path]:
    return sorted(Path(run).glob(f"iter_*/mp*/{name}"))


def alone(name, run) -> Path:
    """One rank's run of a fixture."""
    zckpt.reshard(OTHER / name / "ckpt", run, world_size=1, **ALONE)
    return Path(run)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory) -> Path:
    return alone("mcore_legacy_grouped_tp2_ep2", tmp_path_factory.mktemp("grouped") / "one")


@pytest.mark.parametrize(("legacy", "engine", "name"), [
    (True, True, "weight1"), (False, False, "weight1"), (False, True, "linear_fc1.weight1"), (None, True, ""),
])  # fmt: skip
def test_grouped_experts_are_what_the_arguments_say(legacy, engine, name, grouped):
    run = Path(shutil.copytree(grouped, "one"))

    def change(content):
        del content["args"].moe_use_legacy_grouped_gemm
        if legacy is not None:
            content["args"].moe_use_legacy_grouped_gemm = legacy

    (file,) = files_in(run)
    edit(file, change)
    zckpt.convert(run, "dist", to="megatron")
    options = {"to": "megatron", "ckpt_format": "torch", "expert_parallel_size": 2,
               "transformer_impl": "transformer_engine" if engine else "local"}  # fmt: skip
    if not name:
        with refusing(UnsupportedError, "their names there are unknown"):
            zckpt.convert("dist", "out", **options)
        return
    zckpt.convert("dist", "out", **options)
    model = torch.load(files_in("out")[1], weights_only=False)["model"]
    assert f"decoder.layers.0.mlp.experts.{name}" in model
    assert not zckpt.diff(OTHER / "mcore_legacy_grouped_tp2_ep2" / "ckpt", "out").changed


def test_buffers_keep_the_type_of_gradients():
    """Megatron looks for a buffer by the types of weights and of gradients, which are of 16 bits if summed so."""
    source, bf16 = alone("mcore_legacy_dist_vp2", "source"), torch.bfloat16
    for file in files_in(source, OPTIMIZER):
        edit(file, lambda content: content.update({0: {(bf16, bf16): content[0][bf16, torch.float32]}}))
    zckpt.reshard(source, "two", world_size=2, tensor_parallel_size=2)
    written = [torch.load(file, weights_only=False) for file in files_in("two", OPTIMIZER)]
    assert [list(one[0]) for one in written] == [[(bf16, bf16)]] * 2


def test_a_distributed_optimizer_stays_one_through_other_formats():
    source = alone("mcore_legacy_dist_vp2", "source")
    (file,) = files_in(source)
    edit(file, lambda content: delattr(content["args"], "use_distributed_optimizer"))
    zckpt.convert(source, "own", to="zckpt")
    zckpt.convert("own", "dist", to="megatron")
    zckpt.convert("dist", "back", to="megatron", ckpt_format="torch")
    (file,) = files_in("back", OPTIMIZER)
    optimizer = torch.load(file.with_name(MODEL), weights_only=False)["optimizer"]["optimizer"]
    assert optimizer["param_groups"][0]["step"] == 3


def test_a_source_without_arguments_is_told_apart_by_what_is_beside_it():
    source = OTHER / "mcore_legacy_dist_tp2_pp2_tied" / "ckpt"
    zckpt.convert(source, "own", to="consolidated")
    zckpt.convert("own", "out", to="megatron", ckpt_format="torch", pipeline_parallel_size=2)
    for file in files_in("out"):
        edit(file, lambda content: content.pop("args", None))
    assert zckpt.open("out").topology.pp == 2
    assert not zckpt.diff(source, "out").changed


def test_a_vocabulary_gets_rows_of_zeros_for_a_model_that_has_more():
    source = OTHER / "mcore_legacy_tp2_pp2" / "ckpt"
    zckpt.reshard(source, "out", world_size=1, verify=True, padded_vocab_size=20, **ALONE)
    (file,) = files_in("out")
    assert read_torchfile(file).root["model"]["output_layer.weight"].shape == (20, 12)
    opened = zckpt.open("out")
    assert (opened.parameters["output_layer.weight"].shape, opened.details["padded vocabulary"]) == ((16, 12), 20)
    assert zckpt.diff(source, "out").equal
    zckpt.reshard("out", "again", world_size=1, tensor_parallel_size=4)
    assert zckpt.open("again").details["padded vocabulary"] == 20
    with refusing(UsageError, "SOURCE's 16 rows, which are all trained, found 12"):
        zckpt.reshard(source, "less", world_size=1, padded_vocab_size=12)
    with refusing(UsageError, r"embedding.*multiple of them"):
        zckpt.reshard(source, "odd", world_size=1, tensor_parallel_size=3)


def test_a_vocabulary_without_rows_is_none():
    """Neither in a source nor in files that say how many rows it had."""
    weights = {
        "embedding.word_embeddings.weight": torch.ones(8, 4),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(4, 16),
        "output_layer.bias": torch.tensor(1.0),
    }
    torch.save(weights, "x.pt")
    with refusing(UnsupportedError, r"output_layer.bias has no rows, which a vocabulary has: found \(\)"):
        zckpt.convert("x.pt", "out", to="megatron", ckpt_format="torch")
    torch.save(weights | {"output_layer.bias": torch.ones(8)}, "x.pt")
    zckpt.convert("x.pt", "out", to="megatron", ckpt_format="torch", padded_vocab_size=16)
    path = f"out/release/mp_rank_00/{MODEL}"
    edit(path, lambda content: content["model"].update({"output_layer.bias": torch.tensor(1.0)}))
    assert zckpt.open("out").read("output_layer.bias", "weight") == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 3}, "expected --stage-bounds"),
        ({"pipeline_parallel_size": 2, "stage_bounds": "0,3"}, "unusable stage bounds"),
        ({"pipeline_parallel_size": 1, "virtual_pipeline_parallel_size": 2}, "needs several stages"),
        ({"expert_parallel_size": 2}, "unusable --expert-parallel-size"),
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"ddp_bucket_size": -5}, "unusable --ddp-bucket-size: expected at least 0, found -5"),
    ],
)
def test_ranks_that_cannot_be_are_refused(options, words):
    with refusing(UsageError, words):
        zckpt.reshard(OTHER / "mcore_legacy_tp2_pp2" / "ckpt", "out", world_size=1, **options)
    assert not Path("out").exists()


def test_options_of_the_other_kind_of_files_are_refused():
    source, out = OTHER / "mcore_legacy_tp2_pp2" / "ckpt", Path("out")
    with refusing(UsageError, "--tensor-parallel-size only applies to legacy files"):
        zckpt.convert(source, out, to="megatron", tensor_parallel_size=2)
    for only in ({"optimizer": "flattened"}, {"layers": "apart"}):
        with refusing(UsageError, "only applies to torch_dist"):
            zckpt.convert(source, out, to="megatron", ckpt_format="torch", **only)
    with refusing(UnsupportedError, "any number of ranks can load"):
        zckpt.reshard(OTHER / "mcore_bf16_plain_tp2" / "ckpt", out, world_size=1)
    assert not out.exists()


def test_uneven_stages_stay_as_they_are_until_their_number_changes():
    source = OTHER / "mcore_legacy_dist_vp2" / "ckpt"
    four = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 1, "stage_bounds": "0,1,4"}
    zckpt.reshard(source, "uneven", world_size=1, **four)
    zckpt.reshard("uneven", "again", world_size=1)
    assert zckpt.open("again").details["stage bounds"] == "0,1,4"
    assert zckpt.diff(source, "again").equal


# --- arithmetic


def test_layers_go_to_chunks_that_take_turns_on_the_stages():
    names = ["embedding.word_embeddings.weight", *(f"decoder.layers.{n}.mlp.w" for n in range(4)),
             "decoder.final_layernorm.weight"]  # fmt: skip
    tied = {names[0]: "output_layer.weight"}
    [[first, third], [second, last]] = dealt(names, (0, 1, 2, 3, 4), stages=2, tied=tied)
    assert [one.local for one in first] == [names[0], "decoder.layers.0.mlp.w"]
    assert [(one.name, one.local) for one in third] == [("decoder.layers.2.mlp.w", "decoder.layers.0.mlp.w")]
    assert [one.name for one in second] == ["decoder.layers.1.mlp.w"]
    assert [one.local for one in last] == ["decoder.layers.0.mlp.w", names[-1], "output_layer.weight"]
    assert [one.shared for one in last] == [False, False, True]
    assert bounds_of(None, 4, 2) == (0, 2, 4)
    with refusing(UnsupportedError, "it is unknown which pipeline stage has it: found head"):
        dealt([*names, "head.x"], (0, 2, 4), stages=2, tied={})


def test_a_model_of_another_order_keeps_that_of_its_file():
    run = alone("mcore_legacy_mtp_pp2", "one")
    (file,) = files_in(run)
    (own,) = run.glob("iter_*/zckpt.pt")
    own.unlink()
    norm = "decoder.final_layernorm.weight"

    def norm_first(content):
        model = {name: one for name, one in content["model"].items() if one is not None}
        content["model"] = {norm: model.pop(norm), **model}
        del content["optimizer"]

    edit(file, norm_first)
    file.with_name(OPTIMIZER).unlink()
    assert list(zckpt.open(run).parameters) == list(torch.load(file, weights_only=False)["model"])
    zckpt.reshard(run, "two", world_size=1, **ALONE | {"pipeline_parallel_size": 2})
    for part in files_in("two"):
        edit(part, lambda content: content.update(model=dict(reversed(content["model"].items()))))
    assert "not known" in str(zckpt.open("two").details["order of parameters"])


def test_further_tokens_are_on_the_last_stage_with_a_copy_of_the_embedding():
    names = ["embedding.word_embeddings.weight", "vision_model.conv1.weight", "decoder.layers.0.x",
             "decoder.final_layernorm.weight", "mtp.layers.0.eh_proj.weight", "output_layer.weight"]  # fmt: skip
    [[first], [last]] = dealt(names, (0, 1, 1), stages=2, tied={})
    assert [one.local for one in first] == names[:4]
    assert [one.local for one in last] == [names[0], *names[4:]]
    assert [one.shared for one in last] == [True, False, False]
    for odd, tied in (("embedding.position_embeddings.weight", {}), ("decoder.layers.0.y", {names[0]: "output_layer"})):
        with refusing(UnsupportedError, "multi-token prediction needs word embeddings alone"):
            dealt([*names, odd], (0, 1, 1), stages=2, tied=tied)


def test_experts_are_numbered_from_0_on_each_rank():
    names = [f"decoder.layers.1.mlp.experts.local_experts.{n}.linear_fc1.weight" for n in range(4)]
    [[chunk], _] = dealt(["decoder.layers.0.x", *names], (0, 2, 2), stages=2, tied={})
    own = on_expert_rank(chunk, expert_counts(names, 2), 1, 2)
    assert [(one.name, one.local) for one in own[1:]] == [(names[2], names[0]), (names[3], names[1])]
    with refusing(UsageError, "a divisor of 4, found 3"):
        expert_counts(names, 3)


def test_a_rank_has_rows_columns_or_a_part_of_each_half():
    elements = np.arange(24)

    def sliced(shape, cut, rank, ranks, size=None):
        """The elements of a rank's slice of 0, 1, 2, ..."""
        spans = (Span(Extent.whole(shape), "f", 0, "float32"),)
        found = cut.slice(Slot("weight", "float32", shape, spans), rank, ranks, size)
        assert cut.shape(shape, ranks, size) == found.shape
        return run(fill(hole_of(found, dtype="float32")), {"f": elements, "": np.zeros(1, int)}, found.numel, "float32")

    whole = elements.reshape(8, 3)
    assert sliced((8, 3), Cut(0, 2), 1, 2) == each_once(np.concatenate([whole[2:4], whole[6:]]).ravel())
    assert sliced((4, 6), Cut(1), 1, 3) == each_once(elements.reshape(4, 6)[:, 2:4].ravel())
    assert sliced((4, 6), KEPT, 1, 3) == each_once(elements)
    assert sliced((5, 2), Cut(0), 1, 2, 8) == each_once(np.array([8, 9, 0, 0, 0, 0, 0, 0]))
    shapes = {"l.mlp.linear_fc1.weight": (8, 3), "l.mlp.linear_fc2.weight": (3, 4), "l.norm.weight": (3,)}
    assert list(cuts_of(shapes, 2, None).values()) == [Cut(0, 2), Cut(1), KEPT]
    with refusing(UsageError, "cannot be cut evenly for 3"):
        cuts_of(shapes, 3, None)


def test_transformer_engine_has_the_norm_in_the_layer_behind_it():
    front = "decoder.layers.0."
    merged = [f"{front}self_attention.linear_qkv.layer_norm_weight", f"{front}self_attention.linear_proj.weight"]
    assert order_of(merged, engine=True) == merged[::-1]
    assert order_of([f"{front}input_layernorm.weight", merged[1]], engine=False)[1] == merged[1]
    grouped = [f"{front}mlp.experts.linear_fc{at}.weight{n}" for at in (1, 2) for n in range(11)]
    assert order_of(reversed(grouped), engine=True) == grouped
    assert order_of(["vision.patch.weight"], engine=True) is None


def test_what_is_written_does_not_depend_on_how_names_were_found():
    """They come from sets, whose order is another in each process."""
    checkpoint = zckpt.open(OTHER / "mcore_legacy_tp2_pp2" / "ckpt")
    names = {"b.weight": "y", "a.weight": "x", "same": "same"}
    told = [
        list(own_tree(checkpoint, held=(), groups=[], names=dict(its))["megatron"]["names"])
        for its in (names.items(), reversed(names.items()))
    ]
    assert told == [["a.weight", "b.weight"]] * 2
