"""Every kind of damage to a real checkpoint is one finding that names the file, the ranks and the parameters."""

from __future__ import annotations

import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES
from tests.damage import (
    TAG,
    another_run,
    copy,
    edit,
    element,
    fix_checksums,
    flip,
    optimizer_file,
    patch,
    place,
    place_in,
    set_element,
    swap,
)
from tests.formats.native_files import exchange_tensors
from zckpt.codes import CODES
from zckpt.operations.verify import Finding, verify
from zckpt.torchfile import read_torchfile

RUN = "s2_bf16_dp2"
MODEL = f"{TAG}/mp_rank_00_model_states.pt"
OTHER_RANKS = ("big.0.weight", "big.2.weight", "unused.weight", "big.0.bias", "big.2.bias", "unused.bias")
"""Parameters of which rank 1 has a part."""

Mutate = Callable[[Path], Path | None]
"""Damages a copy; returns what is to be verified, if that is another path."""


@dataclass(frozen=True)
class Mutation:
    """Damage, and the only finding that there is to be.

    Parameters
    ----------
    parameters : tuple of str, or None
        None: the finding names some, of which the test asks no more.
    shallow : bool
        Whether it is found without reading tensors.
    """

    fixture: str
    mutate: Mutate
    code: str
    file: str | None = None
    ranks: tuple[int, ...] = ()
    parameters: tuple[str, ...] | None = ()
    shallow: bool = True
    expected: str | None = None
    found: str | None = None


MUTATIONS: dict[str, Mutation] = {}


def mutation(code: str, fixture: str = RUN, *, rank: int | None = None, **about: Any) -> Callable[[Mutate], Mutate]:
    """Register a function as a mutation under its name; `rank`: found in its optimizer file."""
    of_rank = {} if rank is None else {"file": (RANK_0, RANK_1)[rank], "ranks": (rank,)}

    def register(mutate: Mutate) -> Mutate:
        MUTATIONS[mutate.__name__] = Mutation(fixture, mutate, code, **of_rank, **about)
        return mutate

    return register


RANK_0 = r".*zero_pp_rank_0_mp_rank_00_optim_states\.pt"
RANK_1 = r".*zero_pp_rank_1_mp_rank_00_optim_states\.pt"


def base_state(content: Any) -> Any:
    """The base optimizer's state dict in what a rank's optimizer file holds, of any stage."""
    z = content["optimizer_state_dict"]
    return z.get("base_optimizer_state") or z["optimizer_state_dict"]


def converted(run: Path, **options: Any) -> Path:
    target = run.parent / "target"
    zckpt.convert(run, target, **options)
    return target


def flip_in(run: Path, name: str, slot: str, index: int, *, byte: int = 0, bit: int = 0) -> str:
    """Flip a bit of an element; return its file."""
    span, offset = place(run, name, slot, index)
    flip(span.path, offset + byte, bit)
    return span.path


def native(run: Path) -> Path:
    """A run in zckpt's own format, in two files."""
    return converted(run, to="zckpt", world_size=2)


def rewritten(run: Path, pattern: str, new: str | Callable[[re.Match[str]], str]) -> Path:
    """A run in zckpt's own format, of whose document one place is changed, and its checksum left out."""
    target = native(run)
    document = target / "checkpoint.json"
    text, count = re.subn(pattern, new, re.sub(r',\n"crc32":"[0-9a-f]{8}"', "", document.read_text()), count=1)
    assert count == 1
    document.write_text(text)
    return target


# what nothing reads


@mutation("ZC-131", rank=1)
def tensor_that_no_one_knows(run):
    edit(optimizer_file(run, 1), lambda content: content["optimizer_state_dict"].update(more=torch.ones(3)))


@mutation("ZC-132", rank=0)
def value_that_no_one_knows(run):
    edit(optimizer_file(run, 0), lambda content: content["optimizer_state_dict"].update(more="a word"))


# elements, with checksums that are right: only what they mean can tell


@mutation("ZC-201", rank=0, parameters=("fc1.weight",), shallow=False, found="element 50")
def one_element_of_a_master_changed(run):
    set_element(run, "fc1.weight", "master", 50, 9.0)


@mutation("ZC-201", rank=0, parameters=("fc1.weight",), found="element 0")
def first_element_of_a_master_changed(run):
    set_element(run, "fc1.weight", "master", 0, 9.0)


@mutation("ZC-201", rank=1, parameters=("big.2.weight",), shallow=False)
def one_bit_of_a_weight_flipped(run):
    fix_checksums(flip_in(run, "big.2.weight", "weight", 140))


@mutation("ZC-202", rank=0, parameters=("fc1.weight",), shallow=False, found="1, first at element 50")
def nan_in_first_moment(run):
    set_element(run, "fc1.weight", "exp_avg", 50, float("nan"))


@mutation("ZC-202", file=".*mp_rank_00_model_states.pt", ranks=(0,), parameters=("fc1.weight",), shallow=False)
def inf_in_a_weight(run):
    set_element(run, "fc1.weight", "weight", 50, float("inf"))


@mutation("ZC-202", "s3_bf16_dp3", ranks=(1,), parameters=("fc1.weight",), shallow=False)
def inf_in_a_master_of_stage_3(run):
    set_element(run, "fc1.weight", "master", 40, float("-inf"))


@mutation("ZC-203", rank=0, parameters=("fc1.weight",), shallow=False)
def second_moment_negative(run):
    set_element(run, "fc1.weight", "exp_avg_sq", 50, -1.0)


@mutation("ZC-205", rank=1, shallow=False, expected="zeros")
def padding_not_zero(run):
    (first, *_) = [z for p in zckpt.open(run).padding for z in p.zeros if z.slot == "exp_avg"]
    patch(first.path, first.offset, element(1.0, "float32"))
    fix_checksums(first.path)


@mutation("ZC-208", "s3_bf16_dp2", ranks=(0,), parameters=("pos",), shallow=False)
def nan_in_a_buffer_on_every_rank(run):
    for path in (run / TAG).glob("*model_states.pt"):
        edit(path, lambda content: content["module"]["pos"].fill_(float("nan")))


@mutation("ZC-207", "s3_bf16_dp2", file=".*rank_1_.*model_states.pt", ranks=(1,), parameters=("pos",), shallow=False)
def buffer_of_one_rank_differs(run):
    (path,) = (run / TAG).glob("*rank_1_*model_states.pt")
    edit(path, lambda content: content["module"]["pos"].add_(1))


@mutation("ZC-206", "tp2_s1_bf16_dp2", ranks=(1,), parameters=("alpha",), shallow=False)
def copies_of_tensor_parallel_ranks_differ(run):
    in_a_copy(run, 3.0, "alpha")


def in_a_copy(run: Path, value: float, name: str = "") -> None:
    """Change an element of a tensor that several files have, in one of them."""
    one = next(d for d in zckpt.open(run).duplicates if d.slot.name == "exp_avg" and name in d.name)
    span, offset = place_in(one.slot, 0)
    patch(span.path, offset, element(value, span.dtype))
    fix_checksums(span.path)


@mutation("ZC-209", "pp2_s1_fp32_dp2", ranks=(1,), parameters=("tied_modules.embed.weight",), shallow=False)
def copies_of_stages_differ(run):
    in_a_copy(run, 0.0)


@mutation("ZC-206", "pp2_s1_fp32_dp2", ranks=(1,), parameters=("tied_modules.embed.weight",), shallow=False)
def a_stage_has_another_value_than_rounding_gives(run):
    in_a_copy(run, 3.0)


@mutation("ZC-204", parameters=("emb.weight", "head.weight"), shallow=False, found="element 3")
def copy_of_a_tied_parameter_differs(run):
    target = converted(run, to="consolidated")
    (one,) = zckpt.open(target).duplicates
    span, offset = place_in(one.slot, 3)
    flip(span.path, offset)
    return target


@mutation("ZC-204", "other/trainer_ds2_gpt2/checkpoint-4", parameters=None, shallow=False)
def tied_weight_of_a_model_file_differs(run):
    (path,) = run.glob("global_step*/mp_rank_00_model_states.pt")
    tied = next(p for p in zckpt.open(run).parameters.values() if p.tied_to is not None)

    def separate(content):
        content["module"][tied.name] = content["module"][tied.name].clone().add_(1)

    edit(path, separate)


# bytes


@mutation("ZC-107", rank=0, parameters=("fc1.weight",), shallow=False)
def one_bit_of_a_master_flipped(run):
    flip_in(run, "fc1.weight", "master", 50, byte=2, bit=6)


@mutation("ZC-107", rank=0, parameters=None, shallow=False)
def one_bit_of_a_moment_flipped(run):
    flip_in(run, "fc1.weight", "exp_avg", 50)


@mutation("ZC-107", file=r".*rank-00000-of-00002\.safetensors", ranks=(0,), parameters=("fc1.weight",), shallow=False)
def one_bit_of_zckpts_own_format_flipped(run):
    target = native(run)
    flip_in(target, "fc1.weight", "exp_avg", 50, byte=1)
    return target


@mutation("ZC-107", file=r".*checkpoint\.json")
def document_of_zckpts_own_format_edited(run):
    target = native(run)
    document = target / "checkpoint.json"
    document.write_text(document.read_text().replace('"step":5', '"step":6'))
    return target


@mutation("ZC-107", "other/dcp_fsdp2_dp3/ckpt", file=".*distcp", ranks=(0,), parameters=("fc1.weight",), shallow=False)
def one_bit_of_a_dcp_item_flipped(checkpoint):
    span = zckpt.open(checkpoint).parameters["fc1.weight"].slots["exp_avg"].spans[0]
    flip(span.path, span.offset)


@mutation(
    "ZC-107", "universal/s2_bf16_dp4", file=r".*fc1\.weight/exp_avg\.pt", parameters=("fc1.weight",), shallow=False
)
def one_bit_of_a_universal_slot_flipped(checkpoint):
    flip_in(checkpoint, "fc1.weight", "exp_avg", 7)


def overwrite_pickle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"param_shapes")
    data[at + 40 : at + 60] = b"\xff" * 20
    path.write_bytes(data)


@mutation("ZC-107", file=f".*{MODEL}")
def pickle_overwritten(run):
    overwrite_pickle(run / MODEL)


@mutation("ZC-104", file=f".*{MODEL}")
def pickle_written_wrong(run):
    """As its writer might have done it: its checksum is that of what is there."""
    overwrite_pickle(run / MODEL)
    with zipfile.ZipFile(run / MODEL) as archive:
        (record,) = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
    data = (run / MODEL).read_bytes()
    start = record.header_offset + 30 + sum(struct.unpack_from("<HH", data, record.header_offset + 26))
    found = zlib.crc32(data[start : start + record.file_size])
    (run / MODEL).write_bytes(data.replace(record.CRC.to_bytes(4, "little"), found.to_bytes(4, "little")))


@mutation("ZC-103", rank=1)
def file_holds_something_else(run):
    edit(optimizer_file(run, 1), lambda content: content["optimizer_state_dict"].pop("partition_count"))


@mutation("ZC-102", "other/trainer_ds2_gpt2/checkpoint-4/model.safetensors", file=r".*model\.safetensors")
def safetensors_truncated(file):
    file.write_bytes(file.read_bytes()[:-5])


@mutation("ZC-102", "other/dcp_fsdp2_dp3/ckpt", file=r".*__1_0\.distcp", ranks=(1,))
def dcp_file_truncated(checkpoint):
    file = checkpoint / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1000])


@mutation("ZC-102", "universal/s2_bf16_dp4", file=r".*fc1\.weight/exp_avg_sq\.pt", parameters=("fc1.weight",))
def universal_slot_truncated(checkpoint):
    file = checkpoint / "zero/fc1.weight/exp_avg_sq.pt"
    file.write_bytes(file.read_bytes()[:500])


@mutation("ZC-105", file=r".*metadata\.pt")
def text_in_place_of_a_torch_file(run):
    target = converted(run, to="consolidated")
    (target / "metadata.pt").write_text("not a torch file")
    return target


@mutation("ZC-106", rank=1)
def unknown_stage(run):
    edit(optimizer_file(run, 1), lambda content: content["optimizer_state_dict"].update(zero_stage=7))


# files that are missing, or do not belong together


@mutation("ZC-101", file=f".*{TAG}", ranks=(1,))
def rank_missing(run):
    optimizer_file(run, 1).unlink()


@mutation("ZC-101", "s3_bf16_dp2", file=f".*{TAG}", ranks=(1,))
def model_file_of_a_rank_missing(run):
    next((run / TAG).glob("*rank_1_*model_states.pt")).unlink()


@mutation("ZC-101", "other/dcp_fsdp2_dp3/ckpt", ranks=(1,))
def dcp_file_missing(checkpoint):
    (checkpoint / "__1_0.distcp").unlink()


@mutation("ZC-101", "other/dcp_fsdp2_dp3/ckpt", expected=".metadata")
def dcp_metadata_missing(checkpoint):
    (checkpoint / ".metadata").unlink()


@mutation("ZC-101", ranks=(1,), file=r".*rank-00001-of-00002\.safetensors")
def rank_of_zckpts_own_format_missing(run):
    target = native(run)
    (target / "rank-00001-of-00002.safetensors").unlink()
    return target


@mutation("ZC-101", "universal/s2_bf16_dp4", file=r".*fc1\.weight/fp32\.pt", parameters=("fc1.weight",))
def universal_master_missing(checkpoint):
    (checkpoint / "zero/fc1.weight/fp32.pt").unlink()


@mutation("ZC-123", "universal/s2_bf16_dp4", parameters=("fc1.weight",))
def universal_slot_missing(checkpoint):
    (checkpoint / "zero/fc1.weight/exp_avg.pt").unlink()


@mutation("ZC-101", "other/zro_dp3_sgdm_1g/ckpt", ranks=(1,))
def rank_of_zero_redundancy_missing(checkpoint):
    (checkpoint / "consolidated.pt").unlink()
    (checkpoint / "zero_rank1.pt").unlink()


@mutation("ZC-111", rank=1, expected="2 ranks")
def rank_of_another_world_size(run):
    name = optimizer_file(run, 1).name
    shutil.copy(FIXTURES / "s2_bf16_dp3" / TAG / name, run / TAG / name)


@mutation("ZC-112", rank=1, parameters=OTHER_RANKS)
def rank_of_another_run(run):
    another_run(optimizer_file(run, 1))


@mutation("ZC-112", file=f".*{MODEL}", parameters=None)
def model_of_another_run(run):
    for rank in (0, 1):
        another_run(optimizer_file(run, rank))


@mutation("ZC-112", file=RANK_1, ranks=(0, 1))
def rank_of_another_form(run):
    name = optimizer_file(run, 1).name
    shutil.copy(FIXTURES / "s2_bf16_dp2_elastic" / TAG / name, run / TAG / name)


@mutation("ZC-113", rank=1)
def rank_there_twice(run):
    name = optimizer_file(run, 1).name
    shutil.copy(run / TAG / name, run / TAG / name.removeprefix("bf16_"))


@mutation("ZC-113", "s3_bf16_dp3", rank=1, found="bf16_zero_pp_rank_0")
def rank_of_stage_3_there_as_another(run):
    shutil.copy(optimizer_file(run, 0), optimizer_file(run, 1))


@mutation("ZC-116", "s3_bf16_dp3", file=RANK_0, ranks=(0, 1))
def two_ranks_of_stage_3_swapped(run):
    two_ranks_swapped(run)


@mutation("ZC-114", file=".*zero_pp_rank_2_mp_rank_00_optim_states.pt", ranks=(2,))
def rank_left_over_from_a_larger_run(run):
    name = optimizer_file(run, 1).name.replace("rank_1_", "rank_2_")
    shutil.copy(FIXTURES / "s2_bf16_dp3" / TAG / name, run / TAG / name)


@mutation("ZC-114", "other/dcp_fsdp2_dp3/ckpt", file=r".*__9_0\.distcp")
def dcp_file_left_over(checkpoint):
    shutil.copy(checkpoint / "__1_0.distcp", checkpoint / "__9_0.distcp")


@mutation("ZC-115", file=".*latest", found="global_step99")
def latest_names_nothing(run):
    (run / "latest").write_text("global_step99")


@mutation("ZC-116", file=RANK_0, ranks=(0, 1))
def two_ranks_swapped(run):
    swap(optimizer_file(run, 0), optimizer_file(run, 1))


@mutation("ZC-116", "s2_fp32_dp4", file=RANK_1, ranks=(1, 2))
def two_ranks_with_parts_of_one_size_swapped(run):
    swap(optimizer_file(run, 1), optimizer_file(run, 2))


@mutation("ZC-121", rank=1, parameters=("big.0.weight",))
def mapping_disagrees_with_shapes(run):
    def move(content):
        content["optimizer_state_dict"]["param_slice_mappings"][0]["big.0.weight"].start += 1

    edit(optimizer_file(run, 1), move)


@mutation("ZC-121", file=r".*checkpoint\.json")
def header_of_zckpts_own_format_listed_wrong(run):
    """The document says of a rank's file what neither follows from its parameters nor is in the file."""
    return rewritten(run, r'"header_crc32":"[0-9a-f]{8}"', '"header_crc32":"00000000"')


@mutation("ZC-121", file=r".*rank-00001-of-00002\.safetensors", ranks=(1,))
def header_of_zckpts_own_format_rewritten(run):
    """A program has moved two tensors of a rank's file, checksums and all: the file alone is sound."""
    target = native(run)
    exchange_tensors(target / "rank-00001-of-00002.safetensors")
    return target


@mutation("ZC-122", "s3_bf16_dp2", ranks=(), parameters=None)
def layout_of_zckpts_own_format_leaves_an_element_out(run):
    """Two pieces of one layout overlap by an element and leave one out: as many elements as there should be."""
    return rewritten(run, r'("file":1,"start":)(\d+)', lambda m: f"{m[1]}{int(m[2]) - 1}")


@mutation("ZC-123", rank=1)
def slot_dropped_on_one_rank(run):
    edit(optimizer_file(run, 1), lambda content: [s.pop("exp_avg") for s in base_state(content)["state"].values()])


@mutation("ZC-123", "s3_bf16_dp2", rank=1, parameters=None)
def slot_dropped_on_one_rank_of_stage_3(run):
    slot_dropped_on_one_rank(run)


@mutation("ZC-124", ranks=(0, 1), found="float64")
def wrong_type_on_one_rank(run):
    def widen(content):
        for state in base_state(content)["state"].values():
            state["exp_avg"] = state["exp_avg"].double()

    edit(optimizer_file(run, 1), widen)


@mutation("ZC-124", "s3_bf16_dp3", rank=1, parameters=None, found="float64")
def wrong_type_on_one_rank_of_stage_3(run):
    wrong_type_on_one_rank(run)


# values that all ranks have in common


def previous_step(content):
    for state in base_state(content)["state"].values():
        state["step"].fill_(4.0)


@mutation("ZC-211", rank=1, expected="5.0", found="4.0")
def stale_step_on_one_rank(run):
    edit(optimizer_file(run, 1), previous_step)


@mutation("ZC-211", rank=0, expected="5.0", found="4.0")
def stale_step_on_the_first_rank(run):
    edit(optimizer_file(run, 0), previous_step)


@mutation("ZC-211", "s3_bf16_dp2", file=".*rank_1_.*model_states.pt", ranks=(1,))
def stale_model_file(run):
    (path,) = (run / TAG).glob("*rank_1_*model_states.pt")
    edit(path, lambda content: content.update(global_steps=4))


@mutation("ZC-212", "s2_bf16_dp2", parameters=None, expected="5", found="4")
def stale_step_of_one_group(run):
    for rank in (0, 1):
        edit(optimizer_file(run, rank), lambda content: base_state(content)["state"][1]["step"].fill_(4.0))


def doubled_rate(content):
    base_state(content)["param_groups"][0]["lr"] *= 2


@mutation("ZC-213", file=RANK_1, ranks=(0, 1), expected="'lr': 0.01", found="'lr': 0.02")
def rate_changed_on_one_of_two_ranks(run):
    edit(optimizer_file(run, 1), doubled_rate)


@mutation("ZC-213", "s2_bf16_dp3", rank=0, expected="'lr': 0.01", found="'lr': 0.02")
def rate_changed_on_one_of_three_ranks(run):
    edit(optimizer_file(run, 0), doubled_rate)


@mutation("ZC-214", "s2_bf16_dp3", rank=1)
def loss_scale_changed_on_one_rank(run):
    def scale(content):
        content["optimizer_state_dict"]["loss_scaler"].cur_scale = 2.0

    edit(optimizer_file(run, 1), scale)


def verified(path: Path, *, deep: bool) -> list[Finding]:
    return [f for f in verify(path, deep=deep).findings if f.code != "ZC-130"]


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found_and_nothing_else(name):
    one = MUTATIONS[name]
    path = copy(one.fixture)
    path = one.mutate(path) or path
    (finding,) = verified(path, deep=True)
    assert finding.code == one.code
    if one.file is not None:
        assert finding.file is not None
        assert re.fullmatch(one.file, finding.file)
    assert finding.ranks == one.ranks
    if one.parameters is None:
        assert finding.parameters
    else:
        assert set(finding.parameters) == set(one.parameters)
    assert one.expected is None or one.expected in str(finding.expected)
    assert one.found is None or one.found in str(finding.found)
    found = verified(path, deep=False)  # structure and a sample show what they can
    assert [f.code for f in found] == ([one.code] if one.shallow else [])


def test_every_code_is_found_in_a_real_checkpoint():
    elsewhere = {
        "ZC-130",  # in test_fixtures
        "ZC-301", "ZC-302", "ZC-303",  # in test_against
        "ZC-401", "ZC-402", "ZC-403", "ZC-404", "ZC-405",  # in test_watch
    }  # fmt: skip
    assert {one.code for one in MUTATIONS.values()} | elsewhere == set(CODES)


@pytest.mark.parametrize("nbytes", [0, 10, 100, 5000, -5000, -100, -1])
def test_file_truncated_at_any_length(nbytes):
    run = copy(RUN)
    file = optimizer_file(run, 1)
    data = file.read_bytes()
    file.write_bytes(data[: nbytes if nbytes >= 0 else len(data) + nbytes])
    (finding,) = verify(run, deep=True).findings
    assert (finding.code, finding.file, finding.ranks) == ("ZC-102", str(file), (1,))


def test_each_of_several_damaged_files_is_found():
    run = copy("s2_bf16_dp4")
    flip_in(run, "fc1.weight", "weight", 50)
    optimizer_file(run, 1).write_bytes(optimizer_file(run, 1).read_bytes()[:5000])
    optimizer_file(run, 2).write_bytes(b"")
    optimizer_file(run, 3).unlink()
    found = [(f.code, f.ranks) for f in verify(run, deep=True).findings]
    assert found == [("ZC-101", (3,)), ("ZC-102", (1,)), ("ZC-102", (2,)), ("ZC-107", ())]


def test_several_kinds_of_damage_are_each_found():
    run = copy(RUN)
    set_element(run, "fc1.weight", "exp_avg", 50, float("nan"))
    set_element(run, "fc2.weight", "exp_avg", 5, float("inf"))
    set_element(run, "emb.weight", "master", 5, 7.0)
    flip_in(run, "big.2.weight", "master", 140, byte=2, bit=6)
    found = verify(run, deep=True)
    assert not found.sound
    assert [(f.code, f.parameters) for f in found.findings] == [
        ("ZC-107", ("big.2.weight",)),
        ("ZC-201", ("emb.weight",)),
        ("ZC-202", ("fc1.weight", "fc2.weight")),
    ]


def test_padding_of_stage_3_may_hold_anything():
    run = copy("s3_bf16_dp2")
    checkpoint = zckpt.open(run)
    assert checkpoint.padding
    used = {(s.path, s.offset) for s in checkpoint.parameters["prime"].slots["master"].spans}
    (path,) = {path for path, _ in used if "rank_1_" in path}
    (offset,) = {offset for name, offset in used if name == path}
    patch(path, offset + 4 * 3, element(float("nan"), "float32"))  # 7 elements on 2 ranks: the second has 3 of 4
    fix_checksums(path)
    assert verify(run, deep=True).findings == []


def test_masks_of_inf_are_buffers_that_are_meant_so():
    run = copy(RUN)
    edit(run / MODEL, lambda content: content["module"]["pos"].fill_(float("-inf")))
    assert verify(run, deep=True).findings == []


def test_findings_are_the_same_in_small_pieces():
    run = copy(RUN)
    set_element(run, "fc1.weight", "exp_avg", 50, float("nan"))
    set_element(run, "emb.weight", "master", 5, 7.0)
    whole, pieces = verify(run, deep=True), verify(run, deep=True, memory=1)
    assert whole.findings == pieces.findings
    assert len(whole.findings) == 2


def test_records_that_no_tensor_uses_are_checked_too():
    run = copy(RUN)
    record = next(r for r in read_torchfile(run / MODEL).records if r.name.endswith("serialization_id"))
    flip(run / MODEL, record.offset)
    (finding,) = verify(run, deep=True).findings
    assert (finding.code, finding.parameters) == ("ZC-107", ())
    assert record.name in finding.message
