"""One rank's file copied over another's: no verb writes from that, and `verify` finds it without reading it all.

A copy is the file itself, or what was saved again under the other's name (`torch.load` and `torch.save`, a program that
writes through a buffer), which the archive's own name does not tell from what belongs there. Of that, nothing tells a
file from which no parameter is read: what a rank has there is what all have, or random states, of which one is as good
as another. What is written is right. Nor does it tell a file from which one parameter's weight is read and no more; nor
of files that each have one slot, as OLMo-core's, one slot from another: two may have equal elements.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from itertools import groupby, permutations
from pathlib import Path

import pytest

import zckpt
from tests.inventory.sources import SOURCES
from tests.pairwise import some

SAMPLE = [
    "s2_bf16_dp2_elastic", "s3_bf16_dp3", "own_blockwise_s3_fp32_dp2", "moe_ep2_s0_fp32_dp4", "tp2_s1_bf16_dp2",
    "pp2_s1_bf16_dp1", "other/mcore_legacy_tp2_pp2", "other/mcore_legacy_dist_ep2", "other/mcore08_zarr_tp2",
    "other/dcp_fsdp2_dp3", "other/trainer_ds2_gpt2", "universal/hf_llama_s2_bf16_dp2",
]  # fmt: skip
MORE = [
    "s2_bf16_dp4", "s1_bf16_dp2_bf16opt", "s3_bf16_dp2_nofrozen", "moe_ep2_s2_bf16_dp2", "tp2_s3_bf16_dp2",
    "pp2_tp2_s1_bf16_dp1", "other/zro_dp2_adamw", "universal/moe_ep1_s2_bf16_dp2",
]  # fmt: skip
"""Of which fixtures every run tries a pair of each kind of file; all pairs of all are nightly's."""


def pairs(name: str) -> list[tuple[str, str]]:
    """Files of a fixture's checkpoint whose names differ in numbers only, and whose content differs."""
    source = SOURCES[name]
    latest = source / "latest"
    own = latest.read_text().strip() if latest.is_file() else ""
    every = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    files = [one for one in every if not one.startswith("global_step") or one.startswith(own)]

    def but_for_numbers(one: str) -> str:
        return re.sub(r"\d+", "#", one)

    files.sort(key=lambda one: (but_for_numbers(one), one))
    alike = (list(some) for _, some in groupby(files, but_for_numbers))
    found = [pair for some in alike for pair in permutations(some, 2)]
    return [(a, b) for a, b in found if (source / a).read_bytes() != (source / b).read_bytes()]


def kind(file: str) -> str:
    """What a file is, whatever its folder and numbers."""
    return re.sub(r".*/|\d+", "", file)


def one_of_each_kind(name: str) -> list[tuple[str, str]]:
    found = pairs(name)
    kinds = {kind(a): [pair for pair in found if kind(pair[0]) == kind(a)] for a, _ in found}
    return [some[len(some) // 2] for some in kinds.values()]


def saved_again(source: Path, target: Path) -> bool:
    """Write a copy whose archive is called as the file is; tell whether that holds anything else."""
    data, names = source.read_bytes(), [f"{one.stem}/".encode() for one in (source, target)]
    if names[0] == names[1] or len(names[0]) != len(names[1]) or names[0] not in data[:512]:
        return False
    with zipfile.ZipFile(source) as mine, zipfile.ZipFile(target) as its:
        sums = [{one.CRC for one in archive.infolist() if "/data" in one.filename} for archive in (mine, its)]
    target.write_bytes(data.replace(*names))
    return sums[0] != sums[1]


def files_of_parameters(directory: Path) -> tuple[set[Path], dict[Path, set[str]]]:
    """Files with the optimizer's state, or weights of several parameters, of which one may repeat itself; slots."""
    found, held = zckpt.open(directory), dict[Path, set[tuple[str, str]]]()
    for one in [*found.parameters.values(), *found.unnamed.values()]:
        for key, span in [(key, span) for key, slot in one.slots.items() for span in slot.spans if span.extent.numel]:
            held.setdefault(Path(span.path), set()).add((one.name, key))
    slots = {path: {key for _, key in its} for path, its in held.items()}
    several = {path for path, its in held.items() if len({name for name, _ in its}) > 1}
    return several | {path for path, its in slots.items() if "exp_avg" in its}, slots


def missed(directory: Path, target: Path) -> list[str]:
    """What does not notice that something is wrong with a checkpoint."""
    found = ["verify"] if zckpt.verify(directory).sound else []
    try:
        zckpt.convert(directory, target, to="zckpt")
    except zckpt.SourceError:
        return found
    shutil.rmtree(target)
    return [*found, "convert"]


def test_the_sample_tries_every_kind_of_file_that_ranks_have():
    tried = {kind(a) for name in SAMPLE for a, _ in one_of_each_kind(name)}
    assert {"bf_zero_pp_rank__mp_rank__optim_states.pt", "zero_pp_rank__mp_rank__model_states.pt", "distrib_optim.pt",
            "expp_rank__mp_rank__optim_states.pt", "layer_-model_states.pt", "model_optim_rng.pt", "___.distcp",
            "rng_state_.pth", "mp_rank__model_states.pt", "exp_avg.pt"} <= tried  # fmt: skip


@pytest.mark.parametrize("name", some(SAMPLE, MORE))
def test_a_copy_is_found_and_nothing_is_written_from_it(name, tmp_path):
    assert_found(name, one_of_each_kind(name), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.is_dir()])
def test_every_copy_is_found(name, tmp_path):
    assert_found(name, pairs(name), tmp_path)


def assert_found(name: str, copies: list[tuple[str, str]], tmp_path: Path) -> None:
    directory, target, wrong = tmp_path / "copy", tmp_path / "target", []
    shutil.copytree(SOURCES[name], directory)
    of_parameters, slots = files_of_parameters(directory)
    for a, b in copies:
        mine, its = slots.get(directory / a), slots.get(directory / b)
        if mine and its and mine.isdisjoint(its):
            continue
        if b.endswith(".safetensors") and directory / b not in of_parameters:
            continue  # nanotron's one weight, which two layers may have alike, and whose file does not say whose it is
        kept = (directory / b).read_bytes()
        shutil.copyfile(directory / a, directory / b)
        wrong += [f"{a} over {b}: {what}" for what in missed(directory, target)]
        (directory / b).write_bytes(kept)
        if saved_again(directory / a, directory / b) and directory / b in of_parameters:
            found = missed(directory, target)
            if found and zckpt.verify(directory, deep=True).sound:  # slices, tied layers
                wrong += [f"{a} saved as {b}: {what}" for what in found]
        (directory / b).write_bytes(kept)
    assert not wrong
