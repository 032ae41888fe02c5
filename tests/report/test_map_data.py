"""The map's data: every element of every slot once, in the rows that hold it, and small whatever the size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.pairwise import some
from tests.report.documents import layout_map
from tests.report.synthetic import flat, large, per_parameter
from zckpt.formats import open_checkpoint
from zckpt.state import Checkpoint, CutSpans
from zckpt.state.partition import shard_share

FIXTURES = Path(__file__).parents[2] / "fixtures"
READ = [
    "s0_bf16_dp2", "s1_fp32_dp3_palign", "s2_bf16_dp2_rr", "s2_bf16_dp4", "s2_bf16_dp2_zerodim", "s1_bf16_dp2_empty",
    "s3_bf16_dp3", "s3_bf16_dp2_nofrozen", "tp2_s1_bf16_dp2", "tp2_s3_bf16_dp2", "moe_ep2_s2_fp32_dp4",
    "pp2_tp2_s1_bf16_dp1", "universal/s2_bf16_dp4", "other/dcp_fsdp2_dp2_2dtp/ckpt", "other/dcp_fsdp2_dp3/ckpt",
    "other/dcphf_sharded_dp3/ckpt", "other/zro_dp2_adamw/ckpt", "other/plain_mixed/ckpt.pt",
    "other/accel_fsdp2_dp2/state",
]  # fmt: skip


def shares(runs: list[int]) -> Iterator[tuple[int, range]]:
    """Each row that holds a part of a cut, and the places of the cut's axis that it holds."""
    for at in range(0, len(runs), 6):
        row, number, start, share, stop, _ = runs[at : at + 6]
        for i in range(number):
            yield row + i, range(start + i * share, min(start + (i + 1) * share, stop))


def elements(cut: list[Any]) -> Counter[int]:
    """How often each place of a cut's axis is held by some row."""
    return Counter(place for _, places in shares(cut[3]) for place in places)


def by_row(data: dict[str, Any], slot: int) -> list[int]:
    """Bytes of a slot that the runs place in each row."""
    found = [0] * len(data["rows"])
    for parameter in data["parameters"]:
        for slots, dtypes, _, runs in parameter["cuts"]:
            if slot not in slots:
                continue
            itemsize = data["dtypes"][dtypes[slots.index(slot)]][1]
            for row, places in shares(runs):
                found[row] += itemsize * len(places)
    return found


def opened(name: str) -> tuple[Checkpoint, dict[str, Any]]:
    checkpoint = open_checkpoint(FIXTURES / name)
    return checkpoint, json.loads(json.dumps(layout_map(checkpoint)))


@pytest.mark.parametrize("name", READ)
def test_every_element_of_every_slot_is_in_the_map_once(name):
    """In the rows that hold it, which name the file that its span is in."""
    checkpoint, data = opened(name)
    found = {one["name"]: one for one in data["parameters"]}
    for parameter in [*checkpoint.tensors(), *checkpoint.unnamed.values()]:
        slots = [data["slots"][s] for cut in found[parameter.name]["cuts"] for s in cut[0]]
        assert sorted(slots) == sorted(parameter.slots)
        for cut in found[parameter.name]["cuts"]:
            copies = 1 + len(parameter.slots[data["slots"][cut[0][0]]].replicas)
            assert elements(cut) == Counter(dict.fromkeys(range(cut[2]), copies)), parameter.name
    for slot in range(len(data["slots"])):
        assert by_row(data, slot) == [row["held"][slot] for row in data["rows"]]
    for parameter in checkpoint.parameters.values():
        for slot in parameter.slots.values():
            number = data["slots"].index(slot.name)
            rows = [row for row in data["rows"] if row["held"][number]]
            shown = {str(Path(data["root"], data["paths"][p])) for row in rows if (p := row["paths"][number]) >= 0}
            several = any(row["paths"][number] == -2 for row in rows)
            assert several or {span.path for span in slot.spans} <= shown


def test_rows_are_the_model_file_and_the_ranks():
    _, data = opened("s2_bf16_dp4")
    assert [row["label"] for row in data["rows"]] == ["model file", "rank 0", "rank 1", "rank 2", "rank 3"]
    assert [row["dp"] for row in data["rows"]] == [None, 0, 1, 2, 3]


def test_rows_of_tensor_parallel_ranks_name_both():
    _, data = opened("tp2_s3_bf16_dp2")
    assert [row["label"] for row in data["rows"]] == ["dp 0 mp 0", "dp 1 mp 0", "dp 0 mp 1", "dp 1 mp 1"]


def test_rows_are_in_order_whatever_the_order_of_the_files():
    checkpoint = flat({"a": (30, 10), "b": (25,)}, 12)
    expected = layout_map(checkpoint)
    checkpoint.files.reverse()
    found = layout_map(checkpoint)
    assert [row["label"] for row in found["rows"]] == ["model file", *(f"rank {rank}" for rank in range(12))]
    assert found == expected


def test_files_without_ranks_are_rows_and_those_of_one_role_together_where_names_repeat():
    _, plain = opened("other/plain_adamw/ckpt.pt")
    assert [row["label"] for row in plain["rows"]] == ["ckpt.pt"]
    checkpoint, universal = opened("universal/s2_bf16_dp4")
    optimizer = sum(file.role == "optimizer" for file in checkpoint.files)
    assert [row["label"] for row in universal["rows"]] == ["model file", f"optimizer files ({optimizer})"]


@pytest.mark.parametrize("name", ["s2_bf16_dp4", "s3_bf16_dp3", "tp2_s2_fp32_dp2", "moe_ep2_s2_fp32_dp4"])
def test_padding_is_that_of_the_checkpoint(name):
    checkpoint, data = opened(name)
    expected = Counter({(p.group, p.rank): 0 for p in checkpoint.padding})
    for one in checkpoint.padding:
        expected[one.group, one.rank] += one.numel
    found: Counter[tuple[int, int]] = Counter()
    for group, row, numel, _ in data["padding"]:
        found[group, data["rows"][row]["dp"]] += numel
    assert found == +expected
    assert sum(row["padding"] for row in data["rows"]) == sum(p.nbytes for p in checkpoint.padding)


def test_kinds_groups_and_tied_names():
    checkpoint, data = opened("s2_bf16_dp2")
    found = {one["name"]: one for one in data["parameters"]}
    for name, parameter in checkpoint.parameters.items():
        kind = "tied" if parameter.tied_to else "frozen" if parameter.frozen else "parameter"
        assert (found[name]["kind"], found[name]["group"]) == (kind, parameter.group)
        assert found[name].get("owner") == parameter.tied_to
    assert {one["name"] for one in data["parameters"] if one["kind"] == "buffer"} == set(checkpoint.buffers)


def test_a_box_that_is_no_run_is_named():
    checkpoint, data = opened("tp2_s1_bf16_dp2")
    boxes = {(tuple(offsets), tuple(sizes)) for offsets, sizes, _ in data["boxes"]}
    spans = [s for p in checkpoint.parameters.values() for slot in p.slots.values() for s in slot.spans]
    row_parallel = {(s.extent.offsets, s.extent.sizes) for s in spans if s.extent.offsets[1:] not in ((), (0,))}
    assert row_parallel
    assert row_parallel <= boxes


def test_slots_may_be_chosen():
    data = layout_map(open_checkpoint(FIXTURES / "s2_bf16_dp2"), slots=["exp_avg"])
    assert data["slots"] == ["exp_avg"]
    assert all(len(row["held"]) == 1 for row in data["rows"])


@pytest.mark.parametrize("name", ["s1_fp32_dp3_palign", "s2_bf16_dp4", "s3_bf16_dp3", "tp2_s1_bf16_dp2"])
def test_what_a_rule_says_is_drawn_without_its_spans(name, monkeypatch):
    checkpoint, data = opened(name)
    listed = open_checkpoint(FIXTURES / name)
    for parameter in listed.parameters.values():
        for key, slot in parameter.slots.items():
            parameter.slots[key] = replace(slot, spans=tuple(slot.spans))
    assert json.loads(json.dumps(layout_map(listed))) == data
    assert any(isinstance(slot.spans, CutSpans) for p in checkpoint.parameters.values() for slot in p.slots.values())
    for parameter in checkpoint.parameters.values():
        for key, slot in parameter.slots.items():
            if not isinstance(slot.spans, CutSpans):  # put together from slices
                parameter.slots[key] = replace(slot, spans=tuple(slot.spans))
    monkeypatch.delattr(CutSpans, "_span")
    assert json.loads(json.dumps(layout_map(checkpoint))) == data


def test_equal_shares_of_many_ranks_are_one_entry():
    shapes = {f"layers.{i}.weight": (7 + i, 11) for i in range(20)}
    data = layout_map(per_parameter(shapes, 64))
    for one in data["parameters"]:
        [[_, _, numel, runs]] = one["cuts"]
        held = [shard_share(numel, 64, rank)[1] for rank in range(64)]
        assert runs == [0, sum(n > 0 for n in held), 0, held[0], numel, -1]


@pytest.mark.parametrize("layers", some([20], [100]))
def test_data_of_many_parameters_on_many_ranks_stays_small(layers):
    checkpoint = large(layers=layers, per_layer=100, ranks=1024)
    data = layout_map(checkpoint)
    assert (len(data["parameters"]), len(data["rows"])) == (100 * layers, 1025)
    assert len(json.dumps(data)) < 40_000 * layers
    assert sum(row["held"][1] for row in data["rows"]) == 4 * sum(p.numel for p in checkpoint.parameters.values())


def test_parameters_without_elements_or_slots_do_no_harm():
    data = layout_map(flat({"empty": (0, 4), "one": (1,), "w": (5, 5)}, 3))
    assert [one["numel"] for one in data["parameters"]] == [0, 1, 25]
    assert layout_map(Checkpoint(source="none", format="deepspeed"))["rows"] == []
