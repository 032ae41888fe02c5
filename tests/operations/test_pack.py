"""A run's checkpoints as a store: bit for bit, read in place by every verb, nothing wrong after kills and damage."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import zckpt
from tests.cli.console import FIXTURES, command, environment, refused, succeeded
from tests.damage import flip
from tests.folders import names_in
from tests.pairwise import some
from tests.refusals import refusing
from zckpt.errors import TargetError
from zckpt.formats.units import Unit
from zckpt.operations.pack import as_tensors, packed_into, unpack
from zckpt.storage.packed import STORE, is_store
from zckpt.storage.packed.index import RANGE, ROW, Filed, Index, read_index
from zckpt.storage.packed.store import PackedStore, document, mounted_place
from zckpt.storage.packed.write import writing

MADE = {
    "step-1": "s2_bf16_dp2/global_step5",
    "step-2": "s2_bf16_dp4/global_step5",
    "step-3": "s3_bf16_dp2/global_step5",
    "step-4": "s1_bf16_dp2/global_step5",
    "step-5": "s2_bf16_dp2/global_step5",
    "step-6": "other/trainer_ds2_gpt2/checkpoint-4",
}


def contents(top: Path | str) -> dict[str, object]:
    """All that is below a directory: bytes, modes, times and links."""
    found: dict[str, object] = {}
    for path in sorted(Path(top).rglob("*")):
        about = path.lstat()
        what: object = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(top))] = (what, about.st_mode, None if what is None else about.st_mtime_ns)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of several formats and world sizes, and its store."""
    top = tmp_path_factory.mktemp("packed")
    for name, fixture in MADE.items():
        shutil.copytree(FIXTURES / fixture, top / "run" / name)
    zckpt.pack(top / "run", top / "s.zckpt")
    return top


@pytest.fixture
def copied(made):
    return Path(shutil.copytree(made / "s.zckpt", "s.zckpt"))


def test_unpack_gives_every_file_back_as_it_was(made):
    unpack(made / "s.zckpt", "all")
    assert contents("all") == contents(made / "run")
    unpack(made / "s.zckpt/step-2", "one")
    assert contents("one") == contents(made / "run/step-2")


def test_what_names_the_latest_comes_back_with_the_whole_run(made):
    shutil.copytree(made / "run/step-1", "run/global_step5")
    Path("run/latest").write_text("global_step5")
    zckpt.pack("run", "s")
    assert [one.latest for one in zckpt.history("s").checkpoints] == [True]
    shutil.copytree(made / "run/step-2", "run/global_step6")
    Path("run/latest").write_text("global_step6\n")
    zckpt.pack("run", "s")
    unpack("s", "again")
    assert Path("again/latest").read_bytes() == b"global_step6\n"
    assert contents("again/global_step6") == contents("run/global_step6")
    assert zckpt.open("again").world_size == 4
    unpack("s/global_step5", "one")
    assert not Path("one/latest").exists()
    Path("run/latest").write_text("elsewhere")  # of none that is packed
    zckpt.pack("run", "s")
    unpack("s", "again", overwrite=True)
    assert Path("again/latest").read_bytes() == b"global_step6\n"


def test_links_empty_directories_and_modes_come_back(made):
    """But for a mode that runs a program as its owner."""
    at = Path(shutil.copytree(made / "run/step-2", "run/step-2"))
    (at / "a note.txt").write_text("mine")
    (at / "nothing.txt").write_text("")
    (at / "empty").mkdir()
    (at / "link").symlink_to("a note.txt")
    (at / "a note.txt").chmod(0o640)
    (at / "empty").chmod(0o2750)
    (at / "program").write_text("#!/bin/sh")
    (at / "program").chmod(0o6755)
    zckpt.pack("run", "s")
    unpack("s", "again")
    assert Path("again/step-2/program").stat().st_mode & 0o7777 == 0o755
    (at / "program").chmod(0o755)
    assert contents("again") == contents("run")


def test_a_file_is_a_checkpoint():
    save_file({"w": np.arange(12.0)}, "m.safetensors")
    zckpt.pack("m.safetensors", "s")
    zckpt.pack("m.safetensors", "s", name="other/m")
    assert zckpt.pack("m.safetensors", "s").present == ["m.safetensors", "other/m"]
    assert zckpt.open("s/other/m").read("w").tolist() == [*range(12)]
    unpack("s/m.safetensors", "again")
    assert Path("again").read_bytes() == Path("m.safetensors").read_bytes()


def test_a_link_in_a_packed_checkpoint_is_read():
    Path("run/step-1").mkdir(parents=True)
    save_file({"w": np.arange(12.0)}, "run/step-1/model.safetensors")
    Path("run/step-1/best.safetensors").symlink_to("model.safetensors")
    zckpt.pack("run", "s")
    assert zckpt.open("s/step-1/best.safetensors").read("w").tolist() == [*range(12)]


def test_a_link_to_a_file_elsewhere_is_that_file_and_one_to_nothing_a_link():
    """As Hugging Face's cache has every file."""
    Path("run/step-1").mkdir(parents=True)
    save_file({"w": np.arange(12.0)}, "blob")
    Path("run/step-1/model.safetensors").symlink_to(Path("blob").resolve())
    Path("run/step-1/gone").symlink_to("/nowhere/at/all")
    zckpt.pack("run", "s")
    Path("blob").rename("away")
    assert zckpt.open("s/step-1").read("w").tolist() == [*range(12)]
    unpack("s", "again")
    assert Path("again/step-1/model.safetensors").read_bytes() == Path("away").read_bytes()
    assert Path("again/step-1/gone").readlink() == Path("/nowhere/at/all")


def test_a_link_to_a_folder_elsewhere_stays_one_and_that_is_said():
    for step in ("step-1/tokenizer", "step-2"):
        Path("run", step).mkdir(parents=True)
        save_file({"w": np.arange(12.0)}, Path("run", step.partition("/")[0], "model.safetensors"))
    Path("run/step-1/tokenizer/vocab.txt").write_text("a")
    Path("run/step-1/same").symlink_to("tokenizer")
    Path("run/step-2/tokenizer").symlink_to("../step-1/tokenizer")
    said = "run/step-2/tokenizer is packed as a link to ../step-1/tokenizer: that folder is not in this checkpoint"
    assert [note.partition(", and")[0] for note in zckpt.pack("run", "s").notes] == [said]
    unpack("s", "again")
    assert Path("again/step-2/tokenizer/vocab.txt").read_text() == "a"


@pytest.mark.parametrize(("first", "name"), [("step-1", "step-1/more"), ("runs/step-1", "runs")])
def test_no_checkpoint_of_a_store_lies_below_another(made, first, name):
    zckpt.pack(made / "run/step-1", "s", name=first)
    with refusing(zckpt.UsageError, f"cannot lie below another: expected a name apart from {first}"):
        zckpt.pack(made / "run/step-2", "s", name=name)
    assert unpack("s", "all").checkpoints == [first]


def test_a_run_with_a_checkpoint_below_another_is_refused_before_it_is_packed():
    for step in ("a", "a/b", "c"):
        Path("run", step).mkdir(parents=True)
        save_file({"w": np.arange(12.0)}, f"run/{step}/model.safetensors")
    with refusing(zckpt.UsageError, "cannot lie below another: expected a name apart from a/b, found a;"):
        zckpt.pack("run", "s")
    zckpt.pack("run/a/b", "s")
    assert unpack("s", "all").checkpoints == ["b"]


def store_of(*files: Filed) -> None:
    """Make this directory a store of a checkpoint `c` with these files."""
    Path("store.json").write_bytes(document(STORE))
    Path("000001.index").write_bytes(Index("c", False, files, np.empty(0, ROW), np.empty(0, RANGE)).to_bytes())


def test_a_model_is_packed_without_the_checkpoints_beside_it(tmp_path):
    """A Trainer's final model lies around its checkpoints, of which more may come; links lead there."""
    run, steps = tmp_path / "run", [f"checkpoint-{number}" for number in (4, 8)]
    (run / "logs").mkdir(parents=True)
    save_file({"w": np.ones(9, np.float32)}, run / "model.safetensors")
    for name, target in (("best.json", "trainer_state.json"), ("last", "")):
        (run / name).symlink_to(Path("checkpoint-4", target))
    shutil.copytree(FIXTURES / "other/trainer_ds2_gpt2/checkpoint-4", run / steps[0])
    with writing(old := tmp_path / "old") as into:  # as it was packed: with all that is in it
        for path in (run, run / steps[0]):
            packed_into(into, [(path.name, Unit(path, (path,)))], 3, None)
        assert len(into.index(1).files) > 9
    for step in steps:
        if step != steps[0]:
            shutil.copytree(run / steps[0], run / step)
        assert zckpt.pack(run, tmp_path / "store").packed
        zckpt.pack(run, old)
    there = zckpt.history(run).checkpoints
    own = [run / "best.json", *(one for one in run.rglob("*") if one.is_file() and not one.is_symlink())]
    assert sum(one.nbytes for one in there) == sum(one.lstat().st_size for one in own) + len("checkpoint-4")
    assert {one.name for one in zckpt.history(tmp_path / "store").checkpoints} == {"run", *steps}
    unpack(tmp_path / "store/run", tmp_path / "again")
    assert names_in(tmp_path / "again") == ["best.json", "last", "logs", "model.safetensors"]
    assert (tmp_path / "again/best.json").read_bytes() == (run / "best.json").read_bytes()
    kept = {one.checkpoint.name: one.why for one in zckpt.prune(run, keep_last=1, settle=0).checkpoints}
    assert kept["."] == "its name has no step"


def test_a_link_within_a_checkpoint_beside_a_model_stays_one():
    """But one that leads from the model into another checkpoint, which may be a file, is what it leads to."""
    for name in ("model", "checkpoint-4/model", "others/step-1", "others/step-2"):
        Path("run", name).parent.mkdir(parents=True, exist_ok=True)
        save_file({"w": np.ones(9, np.float32)}, f"run/{name}.safetensors")
    Path("run/checkpoint-4/same").symlink_to("model.safetensors")
    Path("run/best").symlink_to("others/step-2.safetensors")
    assert zckpt.pack("run", "s").packed[0].name == "run"
    for name in ("run/best", "checkpoint-4/same"):
        unpack(f"s/{name.split('/')[0]}", Path(name).parent.name + "-again")
    assert Path("checkpoint-4-again/same").readlink() == Path("model.safetensors")
    assert not Path("run-again/best").is_symlink()
    assert Path("run-again/best").exists()


def test_a_store_in_its_run_is_no_checkpoint_of_it_and_none_is_in_a_checkpoint():
    run = Path("run")
    shutil.copytree(FIXTURES / "s2_bf16_dp2/global_step5", run / "step4")
    save_file({"w": np.ones(9, np.float32)}, run / "model.safetensors")
    (run / "latest").write_text("step4")
    assert zckpt.pack(run, run / "store").packed
    assert not zckpt.pack(run, run / "store").packed
    assert len(zckpt.history(run).checkpoints) == len(zckpt.history(run / "store").checkpoints) == 2
    shutil.copytree(FIXTURES / MADE["step-6"], "model/checkpoint-4")
    save_file({"w": np.ones(9, np.float32)}, "model/model.safetensors")
    for store in ("run/step4/store", "model/store"):
        with refusing(zckpt.UsageError, "the store is inside a checkpoint"):
            zckpt.pack(store.split("/")[0], store)


def test_what_cannot_be_looked_at_is_no_store(monkeypatch):
    """A folder of another user in a run, say: formats say then what is wrong."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", denied)
        assert not is_store("run/closed")


def test_links_of_a_store_lead_nowhere_else():
    """Not by way of other links, either; and what only looks so is read."""
    links = {
        "a/b/c/up": "../../../top",
        "out": "a/b/c/up/../../../../x",
        "far": "/etc/hostname",
        "over": "../x",
        "in": "..data/model",
        "round": "round",
        "none": "nothing",
    }
    files = [Filed("top", "folder", 0o755, 0), Filed("..data/model", "file", 0o644, 0)]
    files += [Filed(name, "link", 0o777, 0, 0, target) for name, target in links.items()]
    store_of(*files)
    mount = mounted_place(Path("c").absolute())
    assert mount is not None
    found = {name for name in links if (mount.path / name).is_symlink()}
    mount.close()
    assert found == {"a/b/c/up", "in", "round", "none"}


def test_a_link_of_a_store_to_no_name_is_damage():
    store_of(Filed("l", "link", 0o777, 0, 0, "a\0b"))
    with refusing(zckpt.SourceError, "the index of a checkpoint in this store is damaged"):
        zckpt.inspect("c")


def test_what_is_packed_again_takes_no_room_and_the_store_is_smaller_than_the_files(made):
    sizes = {one.stem: one.stat().st_size for one in (made / "s.zckpt").glob("*.chunks")}
    assert sizes["000005"] == 0
    whole = sum(one.stat().st_size for one in (made / "run").rglob("*") if one.is_file())
    assert sum(sizes.values()) < whole / 2
    again = zckpt.pack(made / "run", made / "s.zckpt")
    assert (again.packed, len(again.present)) == ([], len(list((made / "run").iterdir())))


@pytest.mark.parametrize("name", some(["step-3", "step-5", "step-6"], ["step-1", "step-2", "step-4"]))
def test_every_verb_reads_it_in_place_as_from_the_directory(made, name):
    inside, outside = made / "s.zckpt" / name, made / "run" / name
    assert zckpt.diff(inside, outside).equal
    assert zckpt.fingerprint(inside).text == zckpt.fingerprint(outside).text
    found = zckpt.verify(inside, deep=True).as_dict(), zckpt.verify(outside, deep=True).as_dict()
    assert found[0]["findings"] == found[1]["findings"]
    shown = zckpt.inspect(inside).as_dict(), zckpt.inspect(outside).as_dict()
    assert str(shown[0]).replace(str(inside), "") == str(shown[1]).replace(str(outside), "")
    zckpt.consolidate(inside, "a.safetensors")
    zckpt.consolidate(outside, "b.safetensors")
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()


def test_an_open_checkpoint_of_a_store_reads_tensors_and_names_the_store(made):
    with refusing(zckpt.SourceError, "the store has no such checkpoint"):
        zckpt.open(made / "s.zckpt/step-100")
    opened = zckpt.open(made / "s.zckpt/step-1")
    name = next(iter(opened.parameters))
    assert opened.read(name).equal(zckpt.open(made / "run/step-1").read(name))
    assert opened.source == str(made / "s.zckpt/step-1")


def test_a_store_is_listed_as_its_run_is(made):
    inside, outside = zckpt.history(made / "s.zckpt"), zckpt.history(made / "run")
    assert [(one.name, one.step, one.sound) for one in inside.checkpoints] == [
        (one.name, one.step, one.sound) for one in outside.checkpoints
    ]


def test_workers_in_other_processes_go_to_the_store_themselves(made):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        zckpt.consolidate(made / "s.zckpt/step-2", "m.safetensors", executor=pool)
    zckpt.consolidate(made / "run/step-2", "n.safetensors")
    assert Path("m.safetensors").read_bytes() == Path("n.safetensors").read_bytes()


def test_a_later_checkpoint_is_predicted_from_the_store_without_the_run(made, copied):
    shutil.copytree(FIXTURES / "s2_bf16_dp3/global_step5", "run/step-9")
    zckpt.pack("run", copied)
    unpack(copied / "step-9", "again")
    assert contents("again") == contents("run/step-9")


def test_one_checkpoint_may_have_another_name():
    source = FIXTURES / "s2_bf16_dp2/global_step5"
    zckpt.pack(source, "store", name="runs/first")
    assert zckpt.diff("store/runs/first", source).equal
    for given, name in ((source, "../first"), (FIXTURES / "s2_bf16_dp2_multitag", "first")):
        with refusing(zckpt.UsageError, "--name only applies to one checkpoint, and must lie within the store"):
            zckpt.pack(given, "store", name=name)


def test_other_programs_resume_from_what_is_unpacked_and_nothing_is_pruned():
    source, store = FIXTURES / "s2_bf16_dp2/global_step5", Path("store").absolute()
    zckpt.pack(source, store)
    for one in (store / "global_step5", zckpt.open(store / "global_step5")):
        said = zckpt.resume_check(one, program="deepspeed")
        assert (said.verdict, said.commands) == ("no", [f"zckpt unpack {store}/global_step5 TARGET"])
        assert zckpt.resume_check(one, program="zckpt").resumes
    zckpt.unpack(store / "global_step5", "global_step5")
    assert zckpt.resume_check("global_step5", program="deepspeed").resumes
    with refusing(zckpt.UsageError, "a store of checkpoints cannot be pruned"):
        zckpt.prune(store, keep_last=1)


def test_another_checkpoint_of_a_name_is_refused(made, copied):
    shutil.copytree(FIXTURES / "s2_bf16_dp3/global_step5", "run/step-1")
    with refusing(zckpt.UsageError, "another checkpoint with this name"):
        zckpt.pack("run", copied)


def test_a_directory_of_something_else_is_no_store_and_is_not_made_one():
    Path("x").mkdir()
    Path("x/thesis.txt").write_text("mine")
    with refusing(zckpt.TargetError, "holds something else"):
        zckpt.pack(FIXTURES / "s2_bf16_dp2", "x")
    assert names_in("x") == ["thesis.txt"]
    with refusing(zckpt.SourceError, "is not a store"):
        unpack("x", "y")


def test_nothing_else_is_written_into_a_store(made):
    with refusing(zckpt.UsageError, "only `zckpt pack` writes to"):
        zckpt.consolidate(made / "run/step-1", made / "s.zckpt/m.safetensors")


def test_dry_runs_write_nothing(made):
    assert len(zckpt.pack(made / "run", "new", dry_run=True).packed) == len(list((made / "run").iterdir()))
    assert unpack(made / "s.zckpt", "out", dry_run=True).files
    assert names_in() == []


def flipped(directory: Path, seed: int) -> Path:
    """Flip a bit of a file of a store, and return the file."""
    chance = random.Random(seed)
    every = [one for one in sorted(directory.iterdir()) if one.stat().st_size]
    path = chance.choice(every)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("part", some([0], range(1, 36)))
def test_no_flip_gives_a_wrong_file(made, part):
    right = contents(made / "run")
    survivors = 0
    for seed in range(10 * part, 10 * part + 10):
        store = Path(f"{seed}.zckpt")
        shutil.copytree(made / "s.zckpt", store)
        flipped(store, seed)
        for name in names_in(made / "run"):
            out = Path(f"{seed}-{name}")
            try:
                unpack(store / name, out)
            except zckpt.SourceError:
                assert not out.exists()
                continue
            survivors += 1
            assert {f"{name}/{one}": what for one, what in contents(out).items()} == {
                one: what for one, what in right.items() if one.startswith(f"{name}/")
            }
            shutil.rmtree(out)
        shutil.rmtree(store)
    assert survivors > 6


@pytest.mark.parametrize("part", some([0], range(1, 30)))
def test_no_flip_of_a_patch_gives_a_wrong_file(made, part):
    base, result = made / "run/step-4", made / "run/step-2"
    zckpt.patch(base, result, "p")
    for seed in range(10 * part, 10 * part + 10):
        shutil.copytree("p", "q")
        flipped(Path("q"), seed)
        try:
            zckpt.apply(base, "q", "out")
        except zckpt.ZckptError:
            assert not Path("out").exists()
        else:
            assert contents("out") == contents(result)
            shutil.rmtree("out")
        shutil.rmtree("q")


def test_a_damaged_chunk_is_named_and_costs_the_checkpoints_that_need_it_only(made, copied):
    path = copied / "000007.chunks" if (copied / "000007.chunks").exists() else copied / "000006.chunks"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    last = max(names_in(made / "run"))
    for name in names_in(made / "run"):
        if name != last:
            unpack(copied / name, name)
            assert contents(name) == contents(made / "run" / name)
    with refusing(zckpt.DamagedFileError, "are damaged"):
        unpack(copied / last, "out")


def test_a_list_names_what_has_a_damaged_index(made, copied):
    flip(copied / "000002.index", 100)
    rewritten(copied, 3, ranges=np.array([(9, 0, 0, 1)], RANGE))
    (copied / "000007.index").symlink_to("nowhere")
    found = zckpt.history(copied).checkpoints
    names = names_in(made / "run")
    assert [one.name for one in found] == [*names[:1], *names[3:], "000002.index", "000003.index", "000007.index"]
    assert all(not one.sound and "the index of a checkpoint" in str(one.why) for one in found[-3:-1])
    assert found[-1].why == f"{copied.absolute()}/000007.index: cannot be opened: found No such file or directory"
    with refusing(zckpt.SourceError, "step-1/none: the store has no such file"):  # which nothing damaged may have
        zckpt.open(copied / "step-1/none")


def rewritten(store: Path, number: int, **changed) -> None:
    """Let the index of a checkpoint say something else, as who makes a hostile store would."""
    path = store / f"{number:06d}.index"
    path.write_bytes(replace(read_index(path), **changed).to_bytes())


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_bytes_are_written_to_files_only(copied, tmp_path, kind):
    Path("mine").write_bytes(b"mine")
    files = list(read_index(copied / "000001.index").files)
    at = next(at for at, one in enumerate(files) if one.kind == "file" and one.nbytes)
    files[at] = replace(files[at], kind=kind, target=str(tmp_path / "mine"))
    rewritten(copied, 1, files=tuple(files))
    with refusing(zckpt.DamagedFileError, "the index of a checkpoint in this store is damaged"):
        unpack(copied / "step-1", "out")
    assert Path("mine").read_bytes() == b"mine"


def test_a_checkpoint_that_is_a_file_has_no_other(copied):
    rewritten(copied, 1, is_file=True)
    with refusing(zckpt.DamagedFileError, "the index of a checkpoint in this store is damaged"):
        unpack(copied, "out")


@pytest.mark.parametrize("name", ["step-1/out", "step-1/out/more", "latest"])
def test_no_link_of_a_checkpoint_leads_another_out_of_the_target(copied, tmp_path, name):
    Path("mine").mkdir()
    (copied / "latest").write_text("step-1")
    link = Filed("out", "link", 0o777, 0, 0, str(tmp_path / "mine"))
    rewritten(copied, 1, files=(*read_index(copied / "000001.index").files, link))
    rewritten(copied, 2, name=name)
    with refusing(zckpt.UnsupportedError, "two checkpoints of the store have files in one place"):
        unpack(copied, "out")
    assert not list(Path("mine").iterdir())
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("a", "b"), [("step-1", "step-2"), ("step-2", "step-3"), ("step-3", "step-4"), ("step-4", "step-1")]
)
@pytest.mark.every(2)
def test_a_patch_is_applied_to_the_same_state_in_any_format(made, a, b):
    base, result = made / "run" / a, made / "run" / b
    done = zckpt.patch(base, result, "p")
    zckpt.convert(base, "native", to="zckpt")
    zckpt.convert(base, "dcp", to="dcp")  # steps are tensors
    zckpt.convert(base, "stage-3", to="deepspeed", world_size=3, stage=3)  # there are no weights
    for source in (base, "native", "dcp", "stage-3", made / "s.zckpt" / a):
        zckpt.apply(source, "p", "out")
        assert contents("out") == contents(result)
        shutil.rmtree("out")
    assert done.equal + done.changed > 0
    assert done.stored_nbytes < done.nbytes


def test_a_patch_of_zckpt_0_2_0_is_applied(made):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("zckpt.operations.patch.as_tensors", partial(as_tensors, alike=False))
        zckpt.patch(made / "run/step-1", made / "run/step-2", "p")
    details = read_index(Path("p/000001.index")).details
    rewritten(Path("p"), 1, details={key: details[key] for key in ("base", "result")})
    zckpt.apply(made / "run/step-1", "p", "out")
    assert contents("out") == contents(made / "run/step-2")


def test_a_patch_to_a_link_has_the_bytes_of_its_file():
    for name, fixture in (("a", "s2_bf16_dp2"), ("b", "s2_bf16_dp4")):
        zckpt.consolidate(FIXTURES / fixture, f"{name}.safetensors")
    Path("link.safetensors").symlink_to("b.safetensors")
    zckpt.patch("a.safetensors", "link.safetensors", "patch")
    zckpt.apply("a.safetensors", "patch", "made.safetensors")
    assert Path("made.safetensors").read_bytes() == Path("b.safetensors").read_bytes()


def test_a_patch_to_another_base_is_refused(made):
    zckpt.patch(made / "run/step-1", made / "run/step-2", "p")
    other = FIXTURES / "s2_fp16_dp2"
    with refusing(zckpt.UsageError, "for another checkpoint"):
        zckpt.apply(other, "p", "out")
    assert not Path("out").exists()
    with refusing(zckpt.UnsupportedError, "p: is a zckpt patch; `zckpt apply A p TARGET`"):
        zckpt.open("p")


def killed(words: list[str], delay: float) -> None:
    """Run a command and kill it after some time, if it has not ended by then."""
    with subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(delay)
        process.kill()


@pytest.mark.parametrize("part", some([0], range(1, 25)))
def test_kills_of_pack_and_apply_lose_nothing(made, part):
    chance = random.Random(part)
    begin = time.monotonic()
    zckpt.patch(made / "run/step-1", made / "run/step-2", "p")
    subprocess.run(command("pack", made / "run", "timed -q"), env=environment(), check=True)
    most = time.monotonic() - begin
    for _ in range(4 if part else 1):
        killed(command("pack", made / "run", "s.zckpt -q"), chance.uniform(0.2, 1.1) * most)
        if Path("s.zckpt/store.json").exists():
            for one in PackedStore(Path("s.zckpt")).names()[0]:
                unpack(f"s.zckpt/{one}", "out")
                assert contents("out") == contents(made / "run" / one)
                shutil.rmtree("out")
        killed(command("apply", made / "run/step-1", "p applied -q"), chance.uniform(0.2, 1.1) * most)
        if Path("applied").exists():
            assert contents("applied") == contents(made / "run/step-2")
            shutil.rmtree("applied")
    zckpt.pack(made / "run", "s.zckpt")
    unpack("s.zckpt", "all")
    assert contents("all") == contents(made / "run")


def test_the_command_line_packs_unpacks_patches_and_applies(made):
    succeeded("pack", made / "run", "s")
    succeeded("unpack s/step-1 one")
    succeeded("patch one", made / "run/step-2", "p")
    succeeded("apply s/step-1 p two")
    assert contents("two") == contents(made / "run/step-2")
    succeeded("inspect s/step-2")
    shutil.copytree("one", odd := Path("step\n1"))
    for words in (("pack", odd, "o", "--dry-run"), ("pack", odd, "o"), ("unpack", Path("o", odd), "back\n1")):
        assert "\n1" not in succeeded(*words).stdout


@pytest.mark.parametrize(
    "words",
    [
        "pack run/step-1 memory://m/store", "unpack s.zckpt memory://m/out", "unpack memory://m/store out",
        "patch run/step-1 run/step-2 memory://m/p", "apply run/step-1 memory://m/p out",
        "apply run/step-1 s.zckpt memory://m/out", "inspect run/step-1 --html memory://m/page.html",
    ],
)  # fmt: skip
def test_what_only_a_file_system_can_hold_is_refused_elsewhere(made, monkeypatch, words):
    monkeypatch.chdir(made)
    refused(2, words, words=("a path on",))
    assert not Path("memory:").exists()


def test_urls_of_files_are_paths(made):
    here = f"file://{Path.cwd()}"
    succeeded(f"pack file://{made}/run {here}/store")
    succeeded(f"unpack {here}/store/step-1 {here}/one")
    assert contents("one") == contents(made / "run/step-1")
    succeeded(f"prune file://{made}/run --keep-last 1")
    succeeded(f"inspect one --html {here}/page.html")
    assert names_in() == ["one", "page.html", "store"]


def test_a_first_pack_that_a_disk_ends_leaves_nothing(monkeypatch):
    from zckpt.storage import durable

    def failing(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(durable, "rename_new", failing)
    with refusing(TargetError, "cannot be written: found Disk quota exceeded"):
        zckpt.pack(FIXTURES / "s2_bf16_dp2", "new/store")
    assert names_in() == []
