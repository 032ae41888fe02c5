"""Bytes that live loads read are held against the checksums in the files, at whatever ranks read them in parts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

import zckpt
from tests.cli.console import FIXTURES
from tests.gloo import on_ranks, run
from tests.live import everything, same
from tests.pairwise import some
from tests.refusals import refusing
from tests.training.test_load_any_format import build, check
from tests.training.test_load_failures import build as build_small
from tests.training.test_load_failures import step
from tests.truth import Truth
from zckpt.codes import CHECKSUM
from zckpt.engine.checking import Sum
from zckpt.errors import DamagedFileError, ShardError, ZckptError
from zckpt.formats.registry import find_format
from zckpt.formats.survey import checksums
from zckpt.optim import files

pytestmark = pytest.mark.interop

FLIPPED_NBYTES = 64
AT_MOST = 6  # records of a checkpoint that are damaged; `make test-all` damages all


def records(path: Path) -> list[Sum]:
    """Return what holds tensors and has a checksum, of all files of a checkpoint."""
    opened = zckpt.open(path)
    every = [one for file in opened.files for one in checksums(file, find_format(opened.format))]
    return [one for one in every if one.nbytes and ("/data/" in one.name or opened.format == "zckpt")]


@contextmanager
def flipped(one: Sum, rank: int) -> Iterator[None]:
    """Let up to 64 bytes in the middle of a record be others, for all ranks."""
    path = Path(one.path)
    dist.barrier()
    before = path.read_bytes()
    if rank == 0:
        data, count = bytearray(before), min(one.nbytes, FLIPPED_NBYTES)
        at = one.offset + (one.nbytes - count) // 2
        data[at : at + count] = bytes(255 - byte for byte in data[at : at + count])
        path.write_bytes(data)
    dist.barrier()
    yield
    dist.barrier()
    if rank == 0:
        path.write_bytes(before)
    dist.barrier()


def damage_each(rank, world_size, path: Path, source: str, family: str, most: int) -> tuple[int, int]:
    """Damage one record after the other; return how many were refused, and how many a load does not depend on."""
    truth, refused, unread = Truth(FIXTURES / source), 0, 0
    every = records(path)
    for one in every[:: -(-len(every) // most)]:
        inner, model, optimizer, dtype = build(source, family)
        with flipped(one, rank):
            try:
                zckpt.load(path, model=model, optimizer=optimizer, random_states=False)
            except ZckptError as error:  # of a step, it may be that it differs
                refused += error.code == CHECKSUM
                continue
        check(inner, optimizer, truth, dtype)
        unread += 1
    return refused, unread


CASES = [
    ("s2_bf16_dp4", None, "zero2", 3),
    ("s2_bf16_dp4", "zckpt", "zero1", 3),
    ("s2_bf16_dp4", "dcp", "redundancy", 2),
]
MORE = [
    ("s3_bf16_dp3", None, "fsdp", 2), ("s1_fp32_dp3", None, "adamw", 2), ("s2_bf16_dp4", "universal", "zero2", 2),
    ("s2_bf16_dp4", "zckpt", "fsdp", 2),
]  # fmt: skip


@pytest.mark.parametrize("most", some([AT_MOST], [1000]))
@pytest.mark.parametrize(("source", "to", "family", "world_size"), some(CASES, MORE))
def test_every_record_that_is_damaged_is_refused_or_not_needed(source, to, family, world_size, most):
    path = Path("x")
    if to is None:
        shutil.copytree(FIXTURES / source, path)
    else:
        zckpt.convert(FIXTURES / source, path, to=to)
    told = run(damage_each, world_size, path, source, family, most)
    [(refused, unread)] = set(told)
    assert refused >= 4
    assert refused > 2 * unread


def load_by_dcp(rank, world_size, path: Path, members: list[int] | None, every: int) -> int:
    """Damage one record after the other for `dcp.load`; return how many were refused by all that load."""
    refused = 0
    group = None if members is None else dist.new_group(members)
    _, model, optimizer, _ = build("s2_bf16_dp4", "fsdp" if members is None else "adamw")
    for one in [one for one in records(path) if one.nbytes > FLIPPED_NBYTES][::every]:
        with flipped(one, rank):
            if members is not None and rank not in members:
                continue
            weights, state = get_state_dict(model, optimizer)
            given = {"state_dict": {"model": weights, "optimizer": state}, "process_group": group}
            failures = []
            try:
                dcp.load(**given, storage_reader=zckpt.dcp.Reader(path))
            except CheckpointException as error:
                failures = [str(each) for each, _ in error.failures.values()]
            refused += len(failures) == len(members or range(world_size))
            assert all("changed since it was written" in each for each in failures)
            if refused == 1:
                dcp.load(**given, storage_reader=zckpt.dcp.Reader(path, verify=False))
    return refused


@pytest.mark.parametrize("every", some([10], [1]))
@pytest.mark.parametrize("members", [None, [1, 2]])
def test_ranks_of_dcp_put_together_what_they_read(members, every):
    zckpt.convert(FIXTURES / "s2_bf16_dp4", "x", to="zckpt", world_size=2)
    told = run(load_by_dcp, 3, "x", members, every)
    assert all(count >= 3 for rank, count in enumerate(told) if members is None or rank in members), told


@on_ranks(2)
def test_a_step_in_a_file_of_its_own_is_checked_although_it_was_read_when_the_source_was_opened(rank):
    path = Path("universal")
    if rank == 0:
        zckpt.convert(FIXTURES / "s2_bf16_dp4", path, to="universal")
    dist.barrier()
    _, model, optimizer, _ = build("s2_bf16_dp4", "adamw")
    before = everything(model, optimizer)
    [step_count] = [one for one in records(path) if one.path.endswith("alpha/step.pt")]
    with flipped(step_count, rank):
        for load in (zckpt.load, zckpt.assert_restored):
            with refusing(DamagedFileError, r"step\.pt: .*changed since it was written"):
                load(path, model=model, optimizer=optimizer)
    assert same(before, everything(model, optimizer))
    zckpt.load(path, model=model, optimizer=optimizer)


@on_ranks(2, each=[("redundancy",), ("adamw",)])
def test_state_that_is_damaged_changes_nothing_and_weights_leave_the_optimizer(rank, family):
    """What damage to state and to weights leaves of the model and the optimizer, and what says so."""
    model, optimizer = build_small(family, 1)
    step(model, optimizer)
    path = Path(family)
    zckpt.save(path, model=model, optimizer=optimizer, step=1)
    other, its = build_small(family, 2)
    step(other, its)
    before, weights = everything(other, its), len(list(other.parameters()))
    for kind in ("exp_avg", "weight"):
        one = next(one for one in records(path) if one.name.startswith(f"{kind}/"))
        with flipped(one, rank):
            with refusing(DamagedFileError, "changed since it was written") as told:
                zckpt.load(path, model=other, optimizer=its)
            after = everything(other, its)
            assert same(before[weights:], after[weights:])
            assert ("weights are in part the checkpoint's and must not be used" in str(told.value)) == (
                kind == "weight"
            )
            if kind == "exp_avg":
                assert same(before, after)
            if family == "redundancy" and kind == "exp_avg":
                with refusing(DamagedFileError, "changed since it was written"):
                    files.load(its, path, model=other)
    zckpt.load(path, model=other, optimizer=its)
    assert same(everything(model, optimizer)[:-1], everything(other, its)[:-1])


@on_ranks(2)
def test_one_ranks_file_under_two_names_is_not_loaded(rank):
    path = Path("run")
    if rank == 0:
        shutil.copytree(FIXTURES / "s3_bf16_dp3", path)
        one, other = sorted(path.glob("global_step5/*_optim_states.pt"))[:2]
        shutil.copyfile(one, other)
    dist.barrier()
    other = sorted(path.glob("global_step5/*_optim_states.pt"))[1]
    _, model, optimizer, _ = build("s3_bf16_dp3", "adamw")
    before = everything(model, optimizer)
    for load in (lambda: zckpt.load(path, model=model, optimizer=optimizer), lambda: files.load(optimizer, path)):
        with refusing(ShardError, f"{other.name}.*verify=False"):
            load()
    with pytest.raises(CheckpointException, match=other.name):
        dcp.load({"model": model.state_dict()}, storage_reader=zckpt.dcp.Reader(path))
    assert same(before, everything(model, optimizer))
    zckpt.load(path, model=model, optimizer=optimizer, verify=False)
