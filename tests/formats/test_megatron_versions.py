"""Megatron-Core from 0.8 on: what each version wrote, in each way to share out an optimizer, is read as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import zckpt
from tests.damage import patch
from tests.formats.holding import converted
from tests.refusals import refusing
from tests.truth import assert_slots_equal
from zckpt.errors import (
    DamagedFileError,
    LayoutError,
    ShardError,
    SourceError,
    UnknownFormatError,
    UnsupportedError,
)
from zckpt.formats.account import take_inventory
from zckpt.formats.megatron.buckets import between
from zckpt.formats.megatron.cut import Cut, cut_of
from zckpt.formats.megatron.stages import order_of, orders
from zckpt.state import Extent, Slot, Span

OTHER = Path(__file__).parents[2] / "fixtures" / "other"
KINDS = {
    "mcore08_buckets_pp2": (1, 2, 1),
    "mcore08_zarr_tp2": (2, 1, 1),
    "mcore09_gathered_pp2_ep2": (1, 2, 2),
    "mcore10_model_tp2": (2, 1, 1),
    "mcore11_gathered_fp16_dp2": (1, 1, 1),
    "mcore12_grouped_ep2": (1, 1, 2),
    "mcore16_fsdp_dp2": (1, 1, 1),
    "mcore16_fsdp_tp2": (2, 1, 1),
    "mcore16_grouped_tp2_ep2": (2, 1, 2),
    "mcore16_mamba_tp2": (2, 1, 1),
    "mcore16_mtp_pp2": (1, 2, 1),
}
STEP = 2


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.every(3)
def test_every_slot_is_bit_equal_to_what_the_ranks_had(name):
    source = OTHER / name / "ckpt"
    opened = zckpt.open(source)
    assert_slots_equal(opened, OTHER / name / "truth.safetensors")
    topology = opened.topology
    assert (topology.tp, topology.pp, topology.ep) == KINDS[name]
    assert opened.step == STEP
    assert sum(len(group.parameters) for group in opened.param_groups) == len(opened.parameters)
    assert all(float(getattr(step, "value", step)) == STEP for g in opened.param_groups for step in [g.state["step"]])
    assert take_inventory(opened).left_out == []
    assert opened.warnings == []
    assert zckpt.verify(source, deep=True).findings == []
    converted(source, "own", "zckpt")
    assert zckpt.fingerprint(source).text == zckpt.fingerprint("own").text


def test_the_loss_scaler_beside_flat_buffers_is_carried():
    opened = zckpt.open(OTHER / "mcore11_gathered_fp16_dp2" / "ckpt")
    assert opened.loss_scale == 1024.0
    assert list(opened.optimizer_metadata) == ["grad_scaler"]


def run_of(name) -> Path:
    """A copy of a fixture."""
    return Path(shutil.copytree(OTHER / name / "ckpt", "run"))


def set_weight(run, name, data):
    """Set the first bytes of a weight."""
    [span] = zckpt.open(run).parameters[name].slots["weight"].spans[:1]
    patch(span.path, span.offset, data)


def test_gathered_buffers_of_other_values_are_left_out():
    """A weight that is no longer its master: what lies where is not proven."""
    run = run_of("mcore11_gathered_fp16_dp2")
    set_weight(run, "decoder.final_layernorm.weight", b"\x00\x00")
    opened = zckpt.open(run)
    assert [one for one in opened.warnings if "does not round to its weight" in one]
    assert all(list(one.slots) == ["weight"] for one in opened.parameters.values())
    with refusing(zckpt.LeftOutError, "would be lost"):
        zckpt.convert(run, "out", to="zckpt")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"compressor": null', '"compressor": {"id": "blosc"}', "compressor blosc.*as torch_dist"),
        ('"order": "C"', '"order": "F"', "order F"),
        ('"<f4"', '">f4"', "an unknown type.*>f4"),
        ('"shape": [', '"shape": [ -1,', "does not describe an array"),
        ("{", "", "expected JSON"),
        ("        4,", "        2,", "chunks of an array are missing|does not have the size"),
    ],
)
def test_an_array_of_zarr_that_is_not_as_megatron_writes_it(old, new, message):
    run = run_of("mcore08_zarr_tp2")
    array = run / "iter_0000002" / "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight" / ".zarray"
    assert old in array.read_text()
    array.write_text(array.read_text().replace(old, new, 1))
    with refusing(SourceError, message):
        zckpt.open(run)


def test_a_chunk_of_zarr_that_is_missing_or_short():
    run = run_of("mcore08_zarr_tp2")
    chunk = run / "iter_0000002" / "embedding.word_embeddings.weight" / "1.0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1])
    with refusing(DamagedFileError, r"1\.0: does not have the size of a chunk"):
        zckpt.open(run)
    chunk.rename(chunk.with_name("2.0"))
    with refusing(ShardError, r"file 1\.0 is missing"):
        zckpt.open(run)
    chunk.with_name("2.0").unlink()
    with refusing(ShardError, "chunks of an array are missing"):
        zckpt.open(run)


def test_an_array_that_ends_within_a_chunk():
    """Its last chunk is as large as the others, and the rest of it is nothing."""
    run = run_of("mcore08_zarr_tp2")
    folder = run / "iter_0000002" / "embedding.word_embeddings.weight"
    about = json.loads((folder / ".zarray").read_text())
    name, (rows, columns) = "embedding.word_embeddings.weight", about["shape"]
    assert about["chunks"] == [rows // 2, columns]
    before = zckpt.open(run).read(name, slot="weight")
    about["chunks"] = [20, 5]
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        chunk = torch.full((20, 5), 7.0, dtype=before.dtype)
        part = before[row * 20 : row * 20 + 20, column * 5 : column * 5 + 5]
        chunk[: part.shape[0], : part.shape[1]] = part
        (folder / f"{row}.{column}").write_bytes(chunk.view(torch.uint8).numpy().tobytes())
    (folder / ".zarray").write_text(json.dumps(about))
    assert torch.equal(zckpt.open(run).read(name, slot="weight"), before)


def test_a_slice_in_boxes_is_cut_where_its_halves_are_apart():
    """Rows 0 to 2 and 3 of a rank's four, the first two of which are gates: of the whole they are 0, 1, 4 and 5."""
    boxes = [Span(Extent((0, 0), (3, 5), 0, 15), "f", 100, "float32", (1, 4)),
             Span(Extent((3, 0), (1, 5), 0, 5), "g", 200, "float32", (1, 4))]  # fmt: skip
    one = Slot("master", "float32", (4, 5), tuple(boxes))
    whole = Cut(0, 2).joined("linear_fc1.weight", [one, one])
    assert whole.shape == (8, 5)
    assert [(span.path, span.offset, span.extent.offsets[0], span.extent.sizes) for span in whole.spans] == [
        ("f", 100, 0, (2, 5)), ("f", 100, 2, (2, 5)), ("f", 108, 4, (1, 5)), ("g", 200, 5, (1, 5)),
        ("f", 108, 6, (1, 5)), ("g", 200, 7, (1, 5)),
    ]  # fmt: skip


def test_experts_that_are_one_parameter_in_memory_are_among_the_orders():
    names = [f"decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc{at}.weight" for e in range(2) for at in (1, 2)]
    grouped = [names[0], names[2], names[1], names[3]]
    assert orders(names) == [(names, False), (grouped, False), (grouped, True)]
    assert not any(fused for _, fused in orders([*names, names[0].replace("weight", "bias")]))


def test_layers_that_predict_further_tokens_are_before_the_output_layer():
    inner = ["transformer_layer.input_layernorm.weight", "transformer_layer.self_attention.linear_qkv.weight",
             "transformer_layer.mlp.linear_fc2.weight"]  # fmt: skip
    own = ["enorm.weight", "hnorm.weight", "eh_proj.weight", *inner, "final_layernorm.weight"]
    further = [f"mtp.layers.{n}.{name}" for n in range(2) for name in own]
    names = ["decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight", *further,
             "output_layer.weight"]  # fmt: skip
    assert order_of(reversed(names), engine=False) == names
    assert order_of([*names, "mtp.layers.0.other.weight"], engine=False) is None
    assert orders([*names, "mtp.layers.0.transformer_layer.other.weight"]) == []
    assert cut_of(names[4], {names[4]: (8, 32)}) == Cut(0)


@pytest.mark.parametrize(("down", "norm", "cut"), [((4, 16), "", Cut(0)), ((8, 16), "", Cut(None)),
                                                   ((8, 16), "kv_layernorm.weight", Cut(0))])  # fmt: skip
def test_down_projections_of_latent_attention_are_cut_as_their_layers_say(down, norm, cut):
    """Whole where Transformer Engine has them; of a rank's slice, the layer behind it has more columns."""
    front = "decoder.layers.0.self_attention."
    shapes = {f"{front}linear_q_down_proj.weight": down, f"{front}linear_q_up_proj.weight": (12, 8)}
    assert cut_of(f"{front}linear_q_down_proj.weight", {**shapes, **({f"{front}{norm}": (8,)} if norm else {})}) == cut


def test_whole_down_projections_of_ranks_are_copies_whatever_norms_there_are(tmp_path):
    """ModelOpt's layers have norms apart, as Megatron-Core's own, and whole down projections, as Transformer Engine."""
    front = "decoder.layers.0.self_attention."
    sizes = {"linear_q_down_proj": (8, 16), "q_layernorm": (8,), "linear_q_up_proj": (12, 8), "kv_layernorm": (4,),
             "linear_kv_down_proj": (6, 16), "linear_kv_up_proj": (10, 4)}  # fmt: skip
    whole = {f"{front}{name}.weight": torch.rand(shape) for name, shape in sizes.items()}
    for rank in range(2):
        file = tmp_path / f"iter_0000001/mp_rank_{rank:02}/model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        own = {name: one.chunk(2)[rank] if "_up_proj" in name else one for name, one in whole.items()}
        torch.save({"model": own, "checkpoint_version": 3.0, "iteration": 1}, file)
    found = zckpt.open(tmp_path / "iter_0000001")
    for name, one in whole.items():
        assert torch.equal(found.read(name), one)


def test_state_of_grouped_experts_that_fits_neither_way_is_refused():
    run = run_of("mcore12_grouped_ep2")
    set_weight(run, "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", b"\x00\x41")
    with refusing(UnsupportedError, r"is GroupedMLP's, transposed.*in none"):
        zckpt.open(run)


def test_gaps_of_a_line_are_between_its_ranges():
    assert between([(64, 10), (0, 64), (128, 2)], 200) == [(74, 54), (130, 70)]
    assert between([], 3) == [(0, 3)]


def test_a_run_of_megatron_fsdp_and_a_directory_of_it():
    run = OTHER / "mcore16_fsdp_dp2" / "ckpt"
    opened = zckpt.open(run)
    assert (opened.format, opened.format_version) == ("megatron", "fsdp_dtensor")
    assert zckpt.fingerprint(run / "iter_0000002").text == zckpt.fingerprint(run).text
    assert {"args", "opt_param_scheduler", "rng_state"} <= opened.metadata.keys()
    assert sorted(group.hyperparameters["wd_mult"] for group in opened.param_groups) == [0.0, 1.0]
    shutil.copytree(run, "run")
    Path("run/latest_checkpointed_iteration.txt").write_text("7")
    with refusing(UnknownFormatError, r"names no checkpoint.*iter_0000002"):
        zckpt.open("run")


def test_a_part_of_a_gated_layer_that_is_missing_is_noticed():
    """Without its other half `weight_w` is a parameter of its own, of which the group has no hyperparameters."""
    import torch.distributed.checkpoint as dcp

    at = "module.decoder.layers.0.mlp.linear_fc1.weight"
    state = {
        "args": None, "checkpoint_version": 3.0, "iteration": 1,
        "model": {f"{at}_w": torch.ones(2, 2), f"{at}_v": torch.zeros(2, 2)},
        "optimizer": {
            "state": {f"module.{at}_w": {"exp_avg": torch.ones(2, 2)}},
            "param_to_group_meta": {f"module.{at}": {"lr": 1.0}},
        },
    }  # fmt: skip
    dcp.save(state, storage_writer=dcp.FileSystemWriter(Path("d")), no_dist=True)
    with refusing((LayoutError, UnsupportedError), "linear_fc1"):
        zckpt.open("d")
