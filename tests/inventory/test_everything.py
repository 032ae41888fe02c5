"""Every file, record, leaf and byte of every fixture has a fate, and an adapter that forgets something is caught."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.inventory.sources import LEFT_OUT, SOURCES
from tests.pairwise import each, some
from zckpt.formats import open_checkpoint
from zckpt.formats.account import take_inventory
from zckpt.state import Checkpoint, Extent, Parameter, Slot, SourceFile, Span
from zckpt.state.inventory import CARRIED, COPY, FATES, FILE, FOREIGN, IMPLIED, KINDS, STATE, Inventory, Rule
from zckpt.torchfile import read_torchfile, walk_tensors

ONE_OF_EACH = [
    "s0_fp32_dp2", "s1_bf16_dp2_bf16opt", "s1_fp32_dp3_palign", "s2_bf16_dp2_client", "s2_bf16_dp2_elastic",
    "s3_bf16_dp3", "moe_ep2_s2_fp32_dp4", "tp2_s1_bf16_dp2", "pp2_tp2_s1_bf16_dp1", "universal/s2_bf16_dp4",
    "universal/s3_bf16_dp2", "other/dcp_fsdp2_dp3", "other/dcp_fsdp2_dp2_stformat", "other/dcphf_consolidated_dp2",
    "other/lightning_fsdp2", "other/plain_adamw", "other/plain_legacy", "other/trainer_ds2_gpt2", "other/zro_dp2_adamw",
    "other/accel_ds2_bf16",
]  # fmt: skip


def lost(inventory: Inventory, name) -> list[str]:
    """What is left out that is not known to be."""
    expected = LEFT_OUT.get(name)
    return [item.name for item in inventory.left_out if expected is None or not item.is_named([f"*:{expected}"])]


KEPT = [*ONE_OF_EACH, "other/lerobot_adamw", "other/mcore013_bf16_model_dp2", "other/nanochat_dp2",
        "other/nanotron_zero1_tp2_dp2", "other/zckpt_v1"]  # fmt: skip


@pytest.mark.parametrize("name", some(KEPT, [name for name in SOURCES if name not in KEPT]))
def test_nothing_of_a_real_checkpoint_is_left_out(name):
    """Each file, each byte of those that are read, and each byte of every tensor has a fate."""
    source = SOURCES[name]
    checkpoint = open_checkpoint(source)
    inventory = take_inventory(checkpoint)
    root = source if source.is_dir() else source.parent
    assert lost(inventory, name) == []
    assert {item.fate for item in inventory.items} <= set(FATES)
    assert {item.kind for item in inventory.items} <= set(KINDS)
    assert all(item.about for item in inventory.items)
    on_disk = [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
    named = {item.file for item in inventory.items}
    assert named == {path.relative_to(root).as_posix() for path in on_disk}
    for file, shares in inventory.nbytes.items():
        assert sum(shares.values()) == (root / file).stat().st_size, file
        assert all(count > 0 for count in shares.values())
    whole = {item.file: item.nbytes for item in inventory.items if item.kind == FILE}
    for file in named - set(inventory.nbytes):
        assert whole[file] == (root / file).stat().st_size
    assert_tensors_are_accounted_for(checkpoint, inventory, root)


def assert_tensors_are_accounted_for(checkpoint, inventory: Inventory, root):
    """The tensors of torch files are found by another way; implied are their padding and the format's own bytes."""
    padding = {}
    for run in (run for runs in checkpoint.padding_spans for run in runs):
        padding[run.path] = padding.get(run.path, 0) + run.nbytes
    trees = {os.path.realpath(file.path): file.tree for file in checkpoint.files}
    for file, shares in inventory.nbytes.items():
        path = root / file
        if not any(walk_tensors(trees[os.path.realpath(path)])):
            continue  # its tree has none: it is no torch file, or holds many (a LazyTree)
        used = set().union(*(_bytes_of(tensor) for _, tensor in walk_tensors(read_torchfile(path).root)))
        held = sum(count for fate, count in shares.items() if fate != IMPLIED)
        single = sum(item.nbytes for item in inventory.items
                     if item.file == file and item.fate == IMPLIED and item.kind == "tensor")  # fmt: skip
        assert held <= len(used) <= held + padding.get(str(path), 0) + single, file


def _bytes_of(tensor) -> range:
    if not tensor.numel:
        return range(0)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    return range(tensor.offset, tensor.offset + (last + 1) * tensor.itemsize)


def of_another_format(directory) -> Checkpoint:
    """As the docstrings of `SourceFile.tree` and `Rule` say: files that are neither torch's nor safetensors."""
    path, slots = directory / "model.msgpack", {}
    path.write_bytes(bytes(40))
    for at, name in enumerate(("weight", "exp_avg")):
        slots[name] = Slot(name, "float32", (4,), (Span(Extent.whole((4,)), str(path), 16 * at, "float32"),))
    tree = {"w": slots["weight"], "epoch": 3, "version": 2, "layout": {"offsets": [0, 16]},
            "state": {0: {"step": 7, "exp_avg": slots["exp_avg"]}}}  # fmt: skip
    rules = (
        Rule(("version",), IMPLIED, "the version of the layout"),
        Rule(("layout", "**"), IMPLIED, "offsets"),
        Rule(("state", "#", "*"), STATE, "single values of a parameter"),
    )
    parameter = Parameter("w", (4,), "float32", slots, state={"step": 7})
    file = SourceFile(str(path), 40, "model", tensor_nbytes=32, tree=tree, rules=rules)
    return Checkpoint(str(directory), "other", parameters={"w": parameter}, metadata={"epoch": 3}, files=[file],
                      opened=str(directory))  # fmt: skip


def test_files_of_another_format_are_accounted_for(tmp_path):
    checkpoint = of_another_format(tmp_path)
    inventory = take_inventory(checkpoint)
    assert inventory.left_out == []
    assert inventory.nbytes == {"model.msgpack": {STATE: 32, IMPLIED: 8}}
    assert {item.place: item.fate for item in inventory.items} == {
        "w": STATE, "epoch": CARRIED, "version": IMPLIED, "layout/offsets/0": IMPLIED, "state/0/step": STATE,
        "state/0/exp_avg": STATE,
    }  # fmt: skip
    del checkpoint.metadata["epoch"], checkpoint.parameters["w"].state["step"]
    checkpoint.files[0] = replace(checkpoint.files[0], rules=checkpoint.files[0].rules[1:])
    left = [item.place for item in take_inventory(checkpoint).left_out]
    assert left == ["epoch", "version", "state/0/step"]


def test_a_file_that_ends_as_those_that_were_read_is_no_other_programs(tmp_path):
    checkpoint = of_another_format(tmp_path)
    for name in ("model-2.msgpack", "model.gguf"):
        (tmp_path / name).write_bytes(b"x")
    inventory = take_inventory(checkpoint)
    assert [item.name for item in inventory.left_out] == ["model-2.msgpack"]
    assert ("model.gguf", FOREIGN) in {(item.file, item.fate) for item in inventory.items}


# --- an adapter that forgets ----------------------------------------------------------------------------------------


def forget_a_slot(checkpoint, chance: random.Random) -> str:
    parameters = [p for p in [*checkpoint.tensors(), *checkpoint.unnamed.values()]
                  if any(slot.spans for slot in p.slots.values())]  # fmt: skip
    parameter = chance.choice(parameters)
    shared = {span for p in parameters if p is not parameter for slot in p.slots.values() for span in slot.spans}
    keys = [key for key, slot in parameter.slots.items()
            if slot.spans and not shared & set(slot.spans)
            and not any(slot.spans == other.spans for k, other in parameter.slots.items() if k != key)]  # fmt: skip
    if not keys:
        return ""
    key = chance.choice(keys)
    del parameter.slots[key]
    return f"{key} of {parameter.name}"


def forget_a_span(checkpoint, chance: random.Random) -> str:
    found = [
        (parameter, key)
        for parameter in checkpoint.parameters.values()
        for key, slot in parameter.slots.items()
        if len(slot.spans) > 1
    ]
    if not found:
        return ""
    parameter, key = chance.choice(found)
    slot = parameter.slots[key]
    if any(slot.spans == other.spans for k, other in parameter.slots.items() if k != key):
        return ""
    left = chance.randrange(len(slot.spans))
    parameter.slots[key] = replace(slot, spans=(*slot.spans[:left], *slot.spans[left + 1 :]))
    return f"span {left} of {key} of {parameter.name}"


def forget_a_buffer(checkpoint, chance: random.Random) -> str:
    if not checkpoint.buffers:
        return ""
    name = chance.choice(list(checkpoint.buffers))
    if not checkpoint.buffers.pop(name).numel:
        return ""
    checkpoint.duplicates = [one for one in checkpoint.duplicates if one.name != name]
    return name


def forget_a_file(checkpoint, chance: random.Random) -> str:
    if len(checkpoint.files) < 2 or not Path(checkpoint.opened).is_dir():
        return ""
    shards = [file for file in checkpoint.files if file.role in ("optimizer", "shard", "expert") and file.tensor_nbytes]
    if not shards:
        return ""
    gone = chance.choice(shards)
    checkpoint.files.remove(gone)
    return gone.path


def forget_metadata(checkpoint, chance: random.Random) -> str:
    keys = [key for key, value in checkpoint.metadata.items() if value is not None and value != {}]
    if not keys:
        return ""
    key = chance.choice(sorted(keys))
    del checkpoint.metadata[key]
    return key


def forget_padding(checkpoint, chance: random.Random) -> str:
    stripped = checkpoint.details.get("optimizer_form") == "elastic"  # then no tensor reaches over it
    if stripped or not sum(padding.nbytes for padding in checkpoint.padding):
        return ""
    checkpoint.padding_spans = []
    return "padding"


def forget_copies(checkpoint, chance: random.Random) -> str:
    owned = {span for p in checkpoint.tensors() for slot in p.slots.values() for span in slot.spans}
    owned |= {span for p in checkpoint.tensors() for slot in p.slots.values() for one in slot.replicas for span in one}
    if not any(span not in owned for one in checkpoint.duplicates for span in one.slot.spans if span.extent.numel):
        return ""
    checkpoint.duplicates = []
    return "copies"


FORGETFUL: list[Callable[[Checkpoint, random.Random], str]] = [
    forget_a_slot, forget_a_span, forget_a_buffer, forget_a_file, forget_metadata, forget_padding, forget_copies,
]  # fmt: skip


@pytest.mark.parametrize(("name", "forget"), each(ONE_OF_EACH, FORGETFUL))
def test_what_an_adapter_forgets_is_left_out(name, forget):
    for seed in range(3):
        checkpoint = open_checkpoint(SOURCES[name])
        forgotten = forget(checkpoint, random.Random(seed))
        if forgotten:
            assert lost(take_inventory(checkpoint), name), forgotten


def test_a_single_number_of_a_model_is_not_taken_for_an_optimizers():
    checkpoint = open_checkpoint(SOURCES["other/dcp_fsdp2_dp3"])
    assert checkpoint.buffers.pop("counter").numel == 1
    assert lost(take_inventory(checkpoint), "other/dcp_fsdp2_dp3") == ["__2_0.distcp:model.counter/[]"]


def test_each_way_to_forget_was_tried():
    """A way that finds nothing to forget in any fixture would prove nothing."""
    for forget in FORGETFUL:
        tried = (name for name in ONE_OF_EACH if forget(open_checkpoint(SOURCES[name]), random.Random(0)))
        assert len([*itertools.islice(tried, 2)]) == 2, forget.__name__


def test_the_inventory_of_a_run_says_what_it_should():
    inventory = take_inventory(open_checkpoint(SOURCES["s2_bf16_dp2_multitag"]))
    fates = {(item.file, item.fate, item.about) for item in inventory.items if item.kind == FILE}
    assert ("latest", IMPLIED, "which checkpoint of the run is the newest") in fates
    assert any(file.startswith("global_step3/") and about == "another checkpoint" for file, _, about in fates)
    states = {item.about for item in inventory.of(STATE) if item.kind == "tensor"}
    assert {"weight", "master", "exp_avg", "exp_avg_sq"} <= states


def test_copies_are_told_from_state():
    inventory = take_inventory(open_checkpoint(SOURCES["other/trainer_ds2_gpt2"]))
    assert {item.file for item in inventory.of(COPY) if item.kind == "tensor"} == {"model.safetensors"}
