"""Megatron's legacy files: ranks' slices are the whole model with its optimizer, and what is not proven is refused."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.damage import edit, flip
from tests.refusals import refusing
from tests.truth import assert_slots_equal
from zckpt.compare.weights import rounds_to
from zckpt.engine.copy import read_extent
from zckpt.errors import DamagedFileError, LayoutError, LeftOutError, ShardError, UnsupportedError
from zckpt.formats.account import take_inventory
from zckpt.formats.megatron.buckets import Layout, Member, between, fit, lay_out
from zckpt.formats.megatron.stages import orders
from zckpt.naming.apply import mapped
from zckpt.naming.document import parse_map
from zckpt.state import Checkpoint, Extent
from zckpt.storage.files import Sources

OTHER = Path(__file__).parents[2] / "fixtures" / "other"
KINDS = {
    "mcore_legacy_tp2_pp2": (2, 2, 1),
    "mcore_legacy_dist_tp2_pp2_tied": (2, 2, 1),
    "mcore_legacy_dist_ep2": (1, 1, 2),
    "mcore_legacy_dist_vp2": (1, 2, 1),
    "mcore_legacy_grouped_tp2_ep2": (2, 1, 2),
    "mcore_legacy_mtp_pp2": (1, 2, 1),
}
ITERATION = "iter_0000003"


def copied(name) -> Path:
    return Path(shutil.copytree(OTHER / name / "ckpt" / ITERATION, "run"))


def saved_by_ranks(folder, *contents, name="mp_rank_{:02d}") -> Path:
    for rank, content in enumerate(contents):
        (folder / name.format(rank)).mkdir()
        torch.save(content, folder / name.format(rank) / "model_optim_rng.pt")
    return folder


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.every(2)
def test_every_slot_is_bit_equal_to_the_live_optimizer_and_nothing_is_left_out(name):
    source = OTHER / name / "ckpt"
    opened = zckpt.open(source)
    assert_slots_equal(opened, OTHER / name / "truth.safetensors")
    topology = opened.topology
    assert (topology.tp, topology.pp, topology.ep) == KINDS[name]
    assert opened.step == 3
    assert sum(len(group.parameters) for group in opened.param_groups) == len(opened.parameters)
    assert all(float(getattr(step, "value", step)) == 3 for g in opened.param_groups for step in [g.state["step"]])
    assert take_inventory(opened).left_out == []
    assert [one for one in zckpt.verify(source, deep=True).findings if one.severity == "error"] == []


def test_a_run_goes_to_one_file_and_back():
    source = OTHER / "mcore_legacy_dist_tp2_pp2_tied" / "ckpt"
    zckpt.convert(source, "own", to="zckpt")
    compared = zckpt.diff(source, "own")
    assert (compared.changed, compared.only_in_a, compared.only_in_b) == ([], [], [])


def gaps(layout: Layout, members: list[Member]) -> list[tuple[int, int]]:
    numel = {one.name: one.numel for one in members}
    return between([(start, numel[name]) for name, start in layout.starts().items()], layout.numel)


def test_a_buffer_is_laid_out_from_its_end():
    members = [Member("embedding", 192), Member("norm", 12), Member("fc", 240)]
    layout = lay_out(members)
    assert layout == Layout({"fc": (0, 0), "norm": (0, 256), "embedding": (0, 320)}, (512,))
    assert gaps(layout, members) == [(240, 16), (268, 52)]
    assert fit(members, layout.sizes) == layout


def test_a_bucket_ends_where_it_has_reached_its_size_and_is_not_padded():
    members = [Member(str(at), 100) for at in range(5)]
    layout = lay_out(members, 200)
    assert [*layout.places.values()] == [(0, 0), (0, 128), (1, 0), (1, 128), (2, 0)]
    assert layout.sizes == (228, 228, 100)
    assert fit(members, layout.sizes) == layout
    assert fit(members, (228, 228, 101)) is None
    assert fit(members[1:], layout.sizes) is None


def test_a_shared_embedding_has_a_bucket_of_its_own():
    members = [Member("embedding", 192, alone=True), Member("norm", 12)]
    layout = lay_out(members)
    assert layout == Layout({"norm": (0, 0), "embedding": (1, 0)}, (64, 192))
    assert layout.starts() == {"norm": 0, "embedding": 64}
    assert gaps(layout, members) == [(12, 52)]
    assert fit(members, layout.sizes) == layout
    last = [Member("norm", 12), Member("output", 192, alone=True)]
    assert lay_out(last).sizes == (192, 12)


BUCKETS = OTHER / "mcore_bf16_buckets_tp2_dp2"


def test_flat_buffers_of_torch_dist_are_slots_of_parameters():
    opened = zckpt.open(BUCKETS / "ckpt")
    assert_slots_equal(opened, BUCKETS / "truth.safetensors")
    assert [len(group.parameters) for group in opened.param_groups] == [10, 5]
    assert [group.state for group in opened.param_groups] == [{"step": 3.0}] * 2
    assert not [warning for warning in opened.warnings if "buffers" in warning]


def test_flat_buffers_that_prove_nothing_are_not_read():
    run = Path(shutil.copytree(BUCKETS / "ckpt", "run"))
    (span,) = zckpt.open(run).parameters["decoder.final_layernorm.weight"].slots["weight"].spans
    flip(span.path, span.offset + 1, bit=6)
    broken = zckpt.open(run)
    (said,) = [warning for warning in broken.warnings if "flat buffers" in warning]
    assert "decoder.final_layernorm.weight does not round to its weight at element 0" in said
    assert broken.slot_names() == ["weight"]
    with refusing(LeftOutError, "would be lost"):
        zckpt.convert(run, "own", to="zckpt")


def test_orders_of_parameters_put_the_input_norm_before_attention_or_into_it():
    front = "decoder.layers.0."
    names = [f"{front}mlp.linear_fc2.weight", f"{front}self_attention.linear_proj.weight", "output_layer.weight",
             f"{front}self_attention.linear_qkv.layer_norm_weight", "embedding.word_embeddings.weight"]  # fmt: skip
    local, engine = orders(names)
    assert local == ([names[4], names[3], names[1], names[0], names[2]], False)
    assert engine == ([names[4], names[1], names[3], names[0], names[2]], False)
    assert orders([*names, f"{front}mixer.in_proj.weight"]) == []


def shift(content):
    flat = next(iter(content[1][0].values()))["param"]
    flat.copy_(flat.roll(1))


def turn(content):
    model = content["model0"]
    name = next(name for name in model if name.endswith("linear_proj.weight"))
    model[name] = model[name].flip(0)


MODEL = "model_optim_rng.pt"
DAMAGE = {
    "masters that are not the weights": (
        "mcore_legacy_dist_ep2", "mp_rank_00_001/distrib_optim.pt", shift, UnsupportedError,
        r"not proven: that of .* does not round to its weight at element",
    ),
    "two parameters in the other order": (
        "mcore_legacy_dist_vp2", f"mp_rank_00_000/{MODEL}", turn, UnsupportedError, "not proven",
    ),
    "buffers that the model does not fill": (
        "mcore_legacy_dist_tp2_pp2_tied", f"mp_rank_00_000/{MODEL}",
        lambda content: content["model"].pop("decoder.layers.0.mlp.linear_fc1.bias"), LayoutError, "do not fill",
    ),
    "another step": (
        "mcore_legacy_tp2_pp2", f"mp_rank_01_000/{MODEL}", lambda content: content.update(iteration=4), ShardError,
        "has another iteration",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "file", "change", "error", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_rank_that_contradicts_the_others_is_refused(name, file, change, error, words):
    run = copied(name)
    edit(run / file, change)
    with refusing(error, words):
        zckpt.open(run)


def test_a_rank_that_is_missing_is_named():
    run = copied("mcore_legacy_tp2_pp2")
    shutil.rmtree(run / "mp_rank_01_001")
    with refusing(ShardError, "none of rank 1 of stage 1"):
        zckpt.open(run)
    for path in run.glob("*/model_optim_rng.pt"):  # nothing is made of as many as arguments say
        edit(path, lambda content: setattr(content["args"], "tensor_model_parallel_size", 10**12))
    with refusing(ShardError, "expected 1000000000000 tensor-parallel ranks.*none of rank 2 of stage 0"):
        zckpt.open(run)


def test_state_of_the_distributed_optimizer_that_is_missing_is_named():
    run = copied("mcore_legacy_dist_ep2")
    (run / "mp_rank_00_001" / "distrib_optim.pt").unlink()
    with refusing(ShardError, r"no file of the distributed optimizer's state.*distrib_optim\.pt"):
        zckpt.open(run)


def test_numbers_that_may_be_several_parameters_are_refused():
    run = copied("mcore_legacy_tp2_pp2")

    def thin(content):
        inner = content["optimizer"].pop("optimizer")
        content["optimizer"] = inner  # no masters
        for group in inner["param_groups"]:
            if group["wd_mult"] == 0:
                del inner["state"][group["params"].pop(0)]

    for path in sorted(run.glob("mp_rank_*/model_optim_rng.pt")):
        edit(path, thin)
    with refusing(UnsupportedError, "it is uncertain which parameters the optimizer's numbers .* stand for"):
        zckpt.open(run)


def test_ranks_of_which_the_cut_or_the_kind_is_not_known_are_refused(tmp_path):
    saved_by_ranks(tmp_path, *[{"model": {"adapter.weight": torch.ones(2, 2)}}] * 2)
    with refusing(UnsupportedError, r"it is unknown how tensor parallelism cuts adapter\.weight"):
        zckpt.open(tmp_path)
    (numbered := tmp_path / "numbered").mkdir()
    saved_by_ranks(numbered, *[{"model": {"a": torch.ones(2)}}] * 2, name="mp_rank_00_{:03d}")
    with refusing(UnsupportedError, "pipeline- or expert-parallel"):
        zckpt.open(numbered)


def test_a_rank_alone_is_no_checkpoint():
    folder = OTHER / "mcore_legacy_tp2_pp2" / "ckpt" / ITERATION / "mp_rank_00_000"
    for path in (folder, folder / "model_optim_rng.pt"):
        with refusing(ShardError, "one rank's part of a Megatron checkpoint of 4"):
            zckpt.open(path)


HEADS, WIDTH, HIDDEN = 4, 3, 8


def old_model(version, tp, whole) -> list[torch.Tensor]:
    """Cut rows [heads, 3, width] for ranks and bring each rank's into the order of an old version."""
    found = []
    for part in whole.view(HEADS, 3, WIDTH, -1).chunk(tp, 0):
        rows = part.permute(1, 0, 2, 3) if version == 0 else part.permute(0, 2, 1, 3) if version == 1 else part
        found.append(rows.reshape(-1, part.shape[-1]).contiguous())
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.every(3)
def test_old_orders_of_query_key_and_value_come_out_as_todays(version, tp, tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(3 * HEADS * WIDTH, HIDDEN).bfloat16()
    bias, dense, words = torch.randn(3 * HEADS * WIDTH, 1), torch.randn(HIDDEN, HEADS * WIDTH), torch.randn(8, HIDDEN)
    first, second = torch.randn(4 * HIDDEN, HIDDEN), torch.randn(HIDDEN, 4 * HIDDEN)
    arguments = argparse.Namespace(num_attention_heads=HEADS, tensor_model_parallel_size=tp)
    contents = []
    for rank in range(tp):
        layer = "layers.0"
        encoder = {
            f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.attention.query_key_value.weight": old_model(version, tp, weight)[rank],
            f"{layer}.attention.query_key_value.bias": old_model(version, tp, bias)[rank][:, 0].contiguous(),
            f"{layer}.attention.dense.weight": dense.chunk(tp, 1)[rank].contiguous(),
            f"{layer}.mlp.dense_h_to_4h.weight": first.chunk(tp, 0)[rank].contiguous(),
            f"{layer}.mlp.dense_4h_to_h.weight": second.chunk(tp, 1)[rank].contiguous(),
        }
        embedding = {"word_embeddings": {"weight": words.chunk(tp, 0)[rank].contiguous()}}
        model = {"language_model": {"embedding": embedding, "encoder": encoder}}
        contents.append({"args": arguments, "checkpoint_version": version, "iteration": 1, "model": model})
    opened = zckpt.open(saved_by_ranks(tmp_path, *contents))
    front = "language_model.encoder.layers.0"
    assert torch.equal(opened.read(f"{front}.attention.query_key_value.weight"), weight)
    assert torch.equal(opened.read(f"{front}.attention.query_key_value.bias"), bias[:, 0])
    own = opened.parameters[f"{front}.attention.query_key_value.weight"]
    assert rounds_to(own.slots["weight"], own.slots["weight"])
    others = {"q": "in (three[0] heads d)", "kv": "(three[1:3] d heads) in"}
    rule = {"megatron": {own.name: "(heads three d) in"}, "other": others}
    sizes = {"three": "3", "heads": str(HEADS)}
    map_ = parse_map({"sides": ["megatron", "other"], "sizes": sizes, "rules": [rule]}, "m")
    made = mapped(Checkpoint(str(tmp_path), "megatron", parameters={own.name: own}), map_, {}).checkpoint
    parts = weight.view(HEADS, 3, WIDTH, HIDDEN)
    queries, rest = parts[:, 0].reshape(-1, HIDDEN).T, parts[:, 1:].permute(1, 2, 0, 3).reshape(-1, HIDDEN)
    for name, expected in (("q", queries), ("kv", rest)):
        found = read_extent(made.parameters[name].slots["weight"], Extent.whole(tuple(expected.shape)), Sources())
        assert found.tobytes() == expected.contiguous().view(torch.uint16).numpy().tobytes()
    assert torch.equal(opened.read(f"{front}.attention.dense.weight"), dense)
    assert torch.equal(opened.read(f"{front}.mlp.dense_h_to_4h.weight"), first)
    assert torch.equal(opened.read(f"{front}.mlp.dense_4h_to_h.weight"), second)
    assert torch.equal(opened.read("language_model.embedding.word_embeddings.weight"), words)
    zckpt.consolidate(tmp_path, tmp_path / "one.safetensors")
    assert torch.equal(load_file(tmp_path / "one.safetensors")[f"{front}.attention.query_key_value.weight"], weight)


def test_what_modules_keep_for_themselves_is_each_ranks_own(tmp_path):
    weights = [torch.full((2, 2), float(rank)) for rank in range(2)]
    states = [torch.full((3 + rank,), rank, dtype=torch.uint8) for rank in range(2)]
    saved_by_ranks(tmp_path, *({"model": {"output_layer.weight": weight, "output_layer._extra_state": state}}
                               for weight, state in zip(weights, states, strict=True)))  # fmt: skip
    opened = zckpt.open(tmp_path)
    assert torch.equal(opened.read("output_layer.weight"), torch.cat(weights))
    assert not opened.buffers
    assert [key for key in opened.metadata if "_extra_state" in key] == [
        f"mp_rank_0{rank}.output_layer._extra_state" for rank in range(2)
    ]
    assert take_inventory(opened).left_out == []


def test_a_model_that_is_none_is_damage(tmp_path):
    with refusing(DamagedFileError, "state dict"):
        zckpt.open(saved_by_ranks(tmp_path, {"model": 1}))


@pytest.mark.parametrize(("router", "error", "said"), [
    (None, UnsupportedError, "how many experts"),
    (torch.zeros(5, 8), LayoutError, "does not have its router's experts"),
])  # fmt: skip
def test_experts_in_one_parameter_are_as_many_as_the_router_has(router, error, said):
    def change(content):
        model = content["model"]
        model["decoder.layers.0.mlp.router.weight"] = router
        if router is None:
            del model["decoder.layers.0.mlp.router.weight"]
        content.pop("optimizer")

    run = copied("mcore_legacy_grouped_tp2_ep2")
    for file in run.glob("*/model_optim_rng.pt"):
        edit(file, change)
    with pytest.raises(error, match=said):
        zckpt.open(run)


def test_experts_that_are_cut_otherwise_than_the_rest_are_refused():
    run = copied("mcore_legacy_dist_ep2")
    for file in run.glob(f"*/{MODEL}"):
        edit(file, lambda content: setattr(content["args"], "expert_tensor_parallel_size", 2))
    with refusing(UnsupportedError, "experts are cut for another number of tensor-parallel ranks than the rest"):
        zckpt.open(run)
