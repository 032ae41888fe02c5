"""What stock engines save through zckpt: the files that they would have written, whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zckpt
from tests.deepspeed_engine import SPECS, Spec
from tests.folders import files_in, names_in
from tests.gloo import WorkerError, on_ranks, run
from tests.pairwise import some
from tests.storage.test_naming import kill_before, killed
from zckpt.deepspeed import saving
from zckpt.deepspeed.native import Held, names_of, sent
from zckpt.deepspeed.saving import capture
from zckpt.errors import TargetExistsError, UnsupportedError, ZckptError
from zckpt.optim.ranks import ALONE, Ranks

pytestmark = pytest.mark.interop

EVERY = (
    "s2_bf16_dp2_client", "moe_ep2_s2_bf16_dp2", "s3_fp16_dp2", "pp2_s1_bf16_dp1",
    "s0_fp16_dp2", "s0_fp32_dp2", "s1_bf16_dp2_bf16opt", "s2_bf16_dp2_elastic_fused", "s2_bf16_dp2_cpuadam",
    "moe_ep2_s0_bf16_dp2", "hf_llama_s2_bf16_dp2", "s3_bf16_dp2_subgroup",
)  # fmt: skip
FEW = 2
"""Client state, scheduler and ZeRO-2, and experts; the rest is nightly."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is in a file, and where."""
    if isinstance(value, dict):
        yield path, list(value)
        for key, one in value.items():
            yield from leaves(one, f"{path}/{key}")
    elif isinstance(value, (list, tuple, set)):
        yield path, (type(value), len(value))
        for number, one in enumerate(value):
            yield from leaves(one, f"{path}/{number}")
    elif isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8)
        yield path, (value.dtype, value.shape, value.stride(), value.requires_grad, bits.tolist())
    else:
        yield path, repr(getattr(value, "__dict__", value))


def assert_same_files(found: Path, expected: Path, *, padded: bool = False) -> None:
    """Hold all that is in files against others; `padded` leaves out the values of tensors in which ZeRO-3 pads."""
    paths = files_in(expected)
    names = [path.relative_to(expected) for path in paths]
    assert [path.relative_to(found) for path in files_in(found)] == names
    for name, path in zip(names, paths, strict=True):
        if path.suffix != ".pt":
            assert (found / name).read_bytes() == path.read_bytes(), name
            assert (found / name).stat().st_mode == path.stat().st_mode
            continue
        loaded = [dict(leaves(torch.load(one, weights_only=False))) for one in (found / name, path)]
        for told in loaded if padded else ():
            for where, one in told.items():
                if any(key in where for key in ("/frozen_param_fragments/", "/optimizer_state_dict/")):
                    told[where] = one[:-1] if isinstance(one, tuple) and len(one) == 5 else one
        assert loaded[0] == loaded[1], name


def save(rank, world_size, spec: Spec, directory: Path) -> list[list[str]]:
    """Save with DeepSpeed alone, with zckpt, and while training goes on; return what zckpt says that it saved."""
    from tests.deepspeed_engine import training
    from tests.deepspeed_engine.offloaded import without_extension

    with without_extension() if spec.optimizer == "cpuadam" else nullcontext():
        engine = training.build_engine(spec)
    stock = SimpleNamespace(save_checkpoint=engine.save_checkpoint)
    for step in (1, 2):
        training.train_step(engine, spec, step)
    training.save(stock, spec, directory / "stock2", tag=None)
    with zckpt.deepspeed.durable_saves(engine) as synced:
        training.save(engine, spec, directory / "sync2", tag=None)
    told = []
    plain = spec.at(world_size, client_state={key: one for key, one in spec.client_state.items() if key != "args"})
    training.save(stock, plain, directory / "plain2", tag=None)
    for async_ in (False, True):
        try:
            with zckpt.deepspeed.durable_saves(engine, async_=async_, format="zckpt"):
                training.save(engine, plain, directory / f"zckpt{async_:d}", tag=None)
                training.train_step(engine, spec, 3)  # while it is written
        except UnsupportedError as error:
            told.append(str(error))
        with zckpt.deepspeed.any_world_size(engine):
            engine.load_checkpoint(str(directory / ("sync2" if told else f"zckpt{async_:d}")))
    training.save(stock, plain, directory / "again2", tag=None)
    with zckpt.deepspeed.durable_saves(engine, async_=True) as saves:
        training.save(engine, spec, directory / "async2", tag=None)
        training.train_step(engine, spec, 3)  # while it is written
        training.save(stock, spec, directory / "stock3", tag=None)
        training.save(engine, spec, directory / "async3", tag=None)
        assert len(saves.saved) == 1
        if rank == 0:  # as of a save that was killed long ago
            left = directory / "async3" / ".gone.zckpt-partial"
            left.mkdir(parents=True)
            os.utime(left, (0, 0))
        path, _ = engine.load_checkpoint(str(directory / "async3"))
        assert path is not None
        assert len(saves.saved) == 2
        training.save(engine, spec, directory / "async2", tag="again")
    assert engine.save_checkpoint == stock.save_checkpoint
    return [synced.saved, saves.saved, told, [] if told else names_of(engine)]


@pytest.mark.parametrize("name", some(EVERY[:FEW], EVERY[FEW:]))
def test_files_are_those_that_deepspeed_writes(name, tmp_path):
    spec = SPECS[name]
    told = run(save, spec.world_size, spec, tmp_path)
    two, three = ((tmp_path / run / "latest").read_text() for run in ("stock2", "stock3"))
    written = [f"sync2/{two}", f"async2/{two}", f"async3/{three}", "async2/again"]
    assert all(synced + asynced == [str(tmp_path / one) for one in written] for synced, asynced, *_ in told)
    assert_same_files(tmp_path / "sync2", tmp_path / "stock2")
    assert not (tmp_path / "async3" / ".gone.zckpt-partial").exists()
    assert_same_files(tmp_path / "async3", tmp_path / "stock3")
    assert (tmp_path / "async2" / "latest").read_text() == "again"
    assert_same_files(tmp_path / "async2" / two, tmp_path / "stock2" / two, padded=spec.stage == 3)
    assert_same_files(tmp_path / "async2" / "again", tmp_path / "stock3" / three)
    assert {path.name for path in tmp_path.rglob(".*")} == set()
    assert zckpt.verify(tmp_path / "async3", deep=True).sound
    again, plain = tmp_path / "again2", tmp_path / "plain2"  # what was loaded from zckpt's format, and what was saved
    assert_same_files(again, plain, padded=spec.stage == 3)
    assert zckpt.diff(again, plain).equal
    if any(kind in name for kind in ("moe", "pp2")):
        assert all(len(refused) == 2 and "loads DeepSpeed's own format" in refused[0] for _, _, refused, _ in told)
        return
    assert not any(refused for _, _, refused, _ in told)
    converted = tmp_path / "converted"
    zckpt.convert(plain, converted, to="zckpt", names=told[0][3] if zckpt.open(plain).unnamed else None)
    for run_directory in (tmp_path / "zckpt0", tmp_path / "zckpt1"):
        assert (run_directory / "latest").read_text() == two
        assert not list(run_directory.rglob("*.p[ty]"))
        assert len(list(run_directory.rglob("*.safetensors"))) == spec.world_size
        assert zckpt.verify(run_directory, deep=True).sound
        assert zckpt.diff(run_directory, converted).equal


# --- kills

NOWHERE = Path("/nowhere")


def write(here: Path, tag: str, value: int) -> None:
    """Write what one rank of an engine has given."""
    found = saving.Collected(None, None)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        found.save({"value": torch.full((3,), value)}, str(NOWHERE / tag / name))
    found.take_others(NOWHERE, tag)
    saving.write(Ranks(purpose=ALONE), here, tag, found, save_latest=True)


first = partial(write, tag="one", value=1)
second = partial(write, tag="two", value=2)
first_again = partial(write, tag="one", value=2)


@pytest.mark.parametrize(("act", "every"), some([("second", 2)], [("second", 1), ("first_again", 1)]))
def test_whenever_a_save_is_killed_latest_names_a_whole_checkpoint(act, every, tmp_path):
    left = killed("first", act, tmp_path, module=__name__, every=every)
    assert len(left) > 15 / every
    found = []
    for here in left:
        tag = here / (here / "latest").read_text()
        values = {int(torch.load(path)["value"][0]) for path in tag.iterdir()}
        assert len(list(tag.iterdir())) == 2
        assert len(values) == 1
        found += values
        beside = here / "epoch" / ".of.zckpt-partial"
        beside.mkdir(parents=True)
        for path in here.rglob("*"):
            os.utime(path, (0, 0))  # long ago
        write(here, "three", 3)
        assert [path.name for path in here.iterdir() if path.name.startswith(".")] == []  # of whatever tag
        write(here, "epoch/four", 4)
        assert not beside.exists()
        write(here, tag.name, 4)
    assert set(found) == {1, 2}
    assert found == sorted(found)


def save_and_die(rank, world_size, spec: Spec, directory: Path, victim: int, calls: int, written: str) -> None:
    from tests.deepspeed_engine import training

    engine = training.build_engine(spec)
    training.train_step(engine, spec, 1)
    with zckpt.deepspeed.durable_saves(engine, async_=True, format=written) as saves:
        training.save(engine, spec, directory, tag=None)
        training.train_step(engine, spec, 2)
        saves.wait()
        if rank == victim:
            kill_before(calls)
        training.save(engine, spec, directory, tag=None)
        training.train_step(engine, spec, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("written", ["deepspeed", "zckpt"])
@pytest.mark.parametrize(("victim", "calls"), [(0, 3), (1, 3), (0, 9), (1, 7), (0, 14), (0, 18)])
def test_a_rank_that_is_killed_leaves_the_checkpoint_before(victim, calls, written, tmp_path):
    spec = SPECS["s2_bf16_dp2"]
    with pytest.raises(WorkerError):
        run(save_and_die, 2, spec, tmp_path, victim, calls, written, fresh=True)
    tag = tmp_path / (tmp_path / "latest").read_text()
    assert zckpt.verify(tag, deep=True).sound
    assert zckpt.open(tag).step == int(tag.name.removeprefix("global_step"))


# --- failures


@on_ranks(2)
def test_what_cannot_be_saved_is_said_on_all_ranks_and_leaves_what_was_there(rank, world_size, tmp_path):
    from tests.deepspeed_engine import training

    here, spec = tmp_path / "run", SPECS["s2_bf16_dp2"]
    (here / "taken").mkdir(parents=True, exist_ok=True)
    (here / "taken" / "notes.txt").write_text("mine")
    engine = training.build_engine(spec)

    def attempt(tag: str, *, async_: bool = False, written: str = "deepspeed", **given: Any) -> None:
        stock = engine.checkpoint_engine
        try:
            with zckpt.deepspeed.durable_saves(engine, async_=async_, format=written):
                engine.save_checkpoint(str(here), tag=tag, **given)
                training.train_step(engine, spec, 1)
        finally:
            assert engine.checkpoint_engine is stock

    attempt("before")
    for async_ in (False, True):
        with pytest.raises(Exception, match="cannot pickle"):
            attempt("x", async_=async_, client_state={"lock": threading.Lock()} if rank == 0 else {})
        with pytest.raises(TargetExistsError):
            attempt("taken", async_=async_)
    for written, words in (("zckpt", "fractions.Fraction"), ("dcp", "unknown format dcp")):
        with pytest.raises(ZckptError, match=words):
            attempt("x", written=written, client_state={"a": Fraction(1, 2)})
    engine.checkpoint_engine = SimpleNamespace()
    with pytest.raises(UnsupportedError, match="SimpleNamespace"):
        attempt("x")
    assert [one for one in names_in(here) if not one.endswith(".py")] == ["before", "latest", "taken"]
    assert (here / "latest").read_text() == "before"


def test_pickles_are_sent_however_long_and_tensors_are_not():
    kept = capture("x.pt", {"note": "x" * 5000, "tensor": torch.zeros(5000), "step": torch.ones(1)}, None).laid_out()
    pieces = sent(kept, 1000)
    asked = []
    held = Held(pieces, asked.append)
    found = bytearray(6000)
    held.read_into(0, memoryview(found))
    assert b"x" * 5000 in found
    absent = {at: one for at, one in pieces.items() if isinstance(one, int)}
    assert list(absent.values()) == [20000]
    held.read_into(next(iter(absent)) + 1, memoryview(found))
    assert asked == [20000]
    assert sum(one if isinstance(one, int) else len(one) for one in pieces.values()) == kept.nbytes


def test_engine_of_one_context_and_not_of_the_other_is_refused():
    """The replaced method of one engine would hide that of all."""

    class Engine:
        def save_checkpoint(self, save_dir: str) -> str:
            return save_dir

        def load_checkpoint(self, load_dir: str) -> str:
            return load_dir

    one = Engine()
    refusal = pytest.raises(zckpt.UsageError, match="give both contexts the engine, or neither")
    with saving.durable_saves(one), refusal, saving.durable_saves():
        pass
    assert "save_checkpoint" not in vars(one)
