"""Hugging Face's Trainer, with and without DeepSpeed, resumes at another number of processes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.folders import contents, names_in
from tests.gloo import on_ranks, run
from tests.pairwise import each, some
from tests.refusals import refusing
from tests.truth import Truth, assert_same
from zckpt.errors import ShardError, SourceError, TargetError, TargetExistsError, UsageError
from zckpt.hf import any_world_size, prepare_resume

pytestmark = pytest.mark.interop

FIXTURE = Path(__file__).parents[2] / "fixtures/other/trainer_ds2_gpt2"
CHECKPOINT = FIXTURE / "checkpoint-4"
ROWS = 12  # of a batch, for 1, 2 and 3 processes
STEPS, SAVED = 4, 2
WORDS, LENGTH = 17, 8

DEEPSPEED = {
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


@dataclass
class Trained:
    """What a Trainer did: what it resumed from, at which step, and what it logged by step."""

    resumed: str | None
    began: int
    losses: dict[int, float]
    rates: dict[int, float]


def trainer_of(world_size: int, output: Path, *, deepspeed: bool) -> Any:
    """Return a Trainer of a tiny GPT-2 with the same batches at any number of processes."""
    from accelerate.state import AcceleratorState, PartialState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    AcceleratorState._reset_state()
    PartialState._reset_state()
    torch.manual_seed(3)
    starts = torch.randint(WORDS, (ROWS * STEPS,), generator=torch.Generator().manual_seed(1))
    ids = [(start + torch.arange(LENGTH)) % WORDS for start in starts]
    arguments = TrainingArguments(
        output_dir=str(output), per_device_train_batch_size=ROWS // world_size, max_steps=STEPS, save_steps=SAVED,
        logging_steps=1, learning_rate=5e-2, warmup_steps=2, use_cpu=True, ddp_backend="gloo", report_to=[], seed=5,
        disable_tqdm=True, dataloader_pin_memory=False, deepspeed=DEEPSPEED if deepspeed else None,
    )  # fmt: skip
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows)


def train(rank, world_size, output: Path, kinds: tuple[str, ...], resumes: bool) -> dict[str, Trained]:
    """Train to the last step, in a folder of each kind; with DeepSpeed, or without."""
    from transformers import TrainerCallback

    class Beginning(TrainerCallback):
        step = -1

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.step = state.global_step

    done = {}
    for kind in kinds:
        trainer = trainer_of(world_size, output / kind, deepspeed=kind in ("deepspeed", "in place"))
        beginning = Beginning()
        trainer.add_callback(beginning)
        if kind == "in place":
            with any_world_size() as loading:
                trainer.train(resume_from_checkpoint=True)
            [resumed] = loading.in_place
        else:
            trainer.add_callback(zckpt.hf.callback(check=True))  # on each resumption
            resumed = prepare_resume(output / kind) if resumes else None
            trainer.train(resume_from_checkpoint=resumed)
        logged = [one for one in trainer.state.log_history if "loss" in one]
        done[kind] = Trained(
            resumed, beginning.step,
            {one["step"]: one["loss"] for one in logged}, {one["step"]: one["learning_rate"] for one in logged},
        )  # fmt: skip
    return done


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict[str, Trained]]:
    """Trainings of 2 processes that nothing happened to, and what they have saved halfway."""
    output = tmp_path_factory.mktemp("whole")
    trained = run(train, 2, output, ("plain", "deepspeed"), False)[0]
    for kind in trained:
        shutil.rmtree(output / kind / f"checkpoint-{STEPS}")
    return output, trained


@pytest.mark.parametrize("world_size", some([3], [1]))
def test_trainer_resumes_at_another_number_of_processes(world_size, whole, tmp_path):
    """Without and with DeepSpeed, from a copy and in place; and without it from what it has saved."""
    saved, expected = whole
    name = f"checkpoint-{SAVED}"
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shutil.copytree(saved / "deepspeed", "in place")
    done = zckpt.convert(
        saved / "deepspeed" / name, tmp_path / "converted" / name, to="transformers-trainer", verify=True
    )
    assert done.notes == ()
    places = {
        "plain": tmp_path / "plain" / name,
        "converted": tmp_path / "converted" / name,
        "deepspeed": tmp_path / "deepspeed" / f"_resharded-{world_size}" / name,
        "in place": tmp_path / "in place" / name,
    }  # DeepSpeed last: Accelerate stays with it
    told = run(train, world_size, tmp_path, tuple(places), True)
    for kind, place in places.items():
        assert {one[kind].resumed for one in told} == {str(place)}
        found, its = told[0][kind], expected.get(kind, expected["deepspeed"])
        assert (found.began, its.began) == (SAVED, 0)
        assert found.losses.keys() == its.losses.keys() == set(range(1, STEPS + 1))
        assert found.rates == its.rates  # the scheduler goes on, too
        assert its.losses[STEPS] < 0.95 * its.losses[SAVED] < 0.95 * its.losses[1]
        for step, loss in its.losses.items():
            assert found.losses[step] == pytest.approx(loss, rel=1e-4), (kind, step)
        assert (tmp_path / kind / f"checkpoint-{STEPS}" / "trainer_state.json").is_file()
    assert not [path for path in Path("in place").iterdir() if not path.name.startswith("checkpoint-")]


def resume_without_state(rank, world_size, output: Path, original: Path) -> list[str]:
    """Return what is said of a Trainer that goes on without its optimizer's state, as it does without a word."""
    trainer = trainer_of(world_size, output, deepspeed=False)
    trainer.add_callback(zckpt.hf.callback(check=original))
    with pytest.raises(zckpt.NotRestoredError) as error:
        trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{SAVED}"))
    return list(error.value.differences)


def test_trainer_that_lost_its_optimizer_is_stopped(whole):
    saved, _ = whole
    target = Path(shutil.copytree(saved / "plain", "plain")) / f"checkpoint-{SAVED}"
    (target / "optimizer.pt").unlink()
    said = run(resume_without_state, 2, target.parent, saved / "plain" / target.name)
    assert said[0] == said[1]
    lost = {one.partition(" ")[0] for one in said[0] if "optimizer has none" in one}
    assert lost == {"step", "exp_avg", "exp_avg_sq"}
    assert any(one.startswith("param group 0: lr is ") for one in said[0])
    assert any(one.startswith(f"scheduler: last_epoch is {SAVED}") for one in said[0])
    with refusing(UsageError, "nothing to do"):
        zckpt.hf.callback()


# --- the files


TWO = {name: name for name in ("rng_state_0.pth", "rng_state_1.pth")}
STATES = [
    (1, {"rng_state.pth": "rng_state_0.pth"}, "rng_state_1.pth is left out: there is no rank 1"),
    (2, TWO, None),
    (3, TWO, "no random states for rank 2"),
]


@pytest.mark.parametrize(("case", "to_stage"), each(STATES, [None, 3]))
def test_another_number_of_ranks_keeps_all_that_the_trainer_has(case, to_stage, tmp_path):
    world_size, states, note = case
    source = Path(shutil.copytree(CHECKPOINT, "checkpoint-4"))
    (source / "zero_to_fp32.py").write_text("print()\n")
    (source / "adapter").mkdir()
    (source / "adapter/empty.txt").touch()
    if to_stage is None:
        done = zckpt.reshard(source, "new", world_size=world_size, verify=True)
    else:
        done = zckpt.convert(source, "new", to="deepspeed", world_size=world_size, stage=to_stage)
    before, after = contents(source), contents("new")
    assert set(done.files) == {Path("new", name) for name in after}
    beside = {name: data for name, data in after.items() if not name.startswith("global_step4/")}
    expected = {n: d for n, d in before.items() if not n.startswith(("global_step4/", "rng_state"))}
    assert beside == expected | {name: before[old] for name, old in states.items()}
    assert beside["latest"] == b"global_step4"
    assert sum(name.endswith("optim_states.pt") for name in after) == world_size
    told = [one for one in done.notes if "rng" in one or "random" in one]
    assert [one[: len(note or "")] for one in told] == ([note] if note else [])
    truth, opened = Truth(FIXTURE), zckpt.open("new")
    assert opened.world_size == world_size
    for slot in ("master", "exp_avg", "exp_avg_sq"):
        for name, value in truth.kind(slot).items():
            assert_same(opened.read(name, slot), value, f"{slot}/{name}")


def test_random_states_of_one_process_become_those_of_the_first():
    zckpt.reshard(CHECKPOINT, "one", world_size=1)
    zckpt.reshard("one", "two", world_size=2)
    states = {path.name: path.read_bytes() for path in Path("two").glob("rng*")}
    assert states == {"rng_state_0.pth": (CHECKPOINT / "rng_state_0.pth").read_bytes()}


def test_random_states_of_another_node_come_along():
    here = Path(shutil.copytree(CHECKPOINT, "here"))
    there = Path("there")
    (there / "global_step4").mkdir(parents=True)
    for name in ("rng_state_1.pth", "global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        (here / name).rename(there / name)
    done = zckpt.reshard(here, "new", world_size=3, roots=[there])
    assert Path("new/rng_state_1.pth").read_bytes() == (CHECKPOINT / "rng_state_1.pth").read_bytes()
    assert [one for one in done.notes if "random states" in one] == [
        "no random states for rank 2: the Trainer continues without them"
    ]
    zckpt.convert(here, "own", to="zckpt", roots=[there])
    assert {"rng_state_0", "rng_state_1"} <= zckpt.open("own").metadata.keys()
    (there / "rng_state_1.pth").write_bytes(b"")
    with refusing(zckpt.SourceError, r"rng_state_1\.pth.*cannot be read"):
        zckpt.convert(here, "damaged", to="zckpt", roots=[there])
    shutil.copy(CHECKPOINT / "rng_state_1.pth", there / "rng_state_1.pth")
    shutil.copy(there / "rng_state_1.pth", there / "rng_state_0.pth")  # which each node counts by itself
    (warning,) = zckpt.open(here, roots=[there]).warnings
    assert warning.startswith(f"{there / 'rng_state_0.pth'} differs from {here / 'rng_state_0.pth'}, which is")


def test_tag_directory_comes_out_alone():
    zckpt.reshard(CHECKPOINT / "global_step4", "new", world_size=1)
    assert {name.rpartition("_")[2] for name in contents("new")} == {"states.pt"}


def test_other_checkpoints_beside_it_are_left_out():
    source = Path(shutil.copytree(CHECKPOINT, "checkpoint-4"))
    shutil.copytree(source / "global_step4", source / "global_step2")
    done = zckpt.reshard(source, "new", world_size=1)
    assert not Path("new/global_step2").exists()
    assert any("global_step2" in note for note in done.notes)


def test_copy_is_replaced_but_not_what_somebody_put_there():
    target = Path("new")
    zckpt.reshard(CHECKPOINT, target, world_size=2)
    zckpt.reshard(CHECKPOINT, target, world_size=1, overwrite=True)
    assert sorted(path.name for path in target.glob("rng*")) == ["rng_state.pth"]
    (target / "precious").touch()
    with refusing(TargetExistsError, "precious"):
        zckpt.reshard(CHECKPOINT, target, world_size=2, overwrite=True)
    assert (target / "precious").exists()


# --- what is prepared


@pytest.fixture
def output(tmp_path) -> Path:
    """A Trainer's output directory."""
    shutil.copytree(CHECKPOINT, tmp_path / "out/checkpoint-4")
    return tmp_path / "out"


def test_checkpoint_of_as_many_processes_or_without_deepspeed_is_taken_as_it_is(output):
    place = output / "checkpoint-4"
    assert prepare_resume(place, world_size=2) == str(place)
    shutil.rmtree(place / "global_step4")
    (place / "latest").unlink()
    assert prepare_resume(output, world_size=5) == str(place)
    assert names_in(output) == ["checkpoint-4"]


def test_copy_is_made_once(output):
    made = prepare_resume(output, world_size=3)
    assert made == str(output / "_resharded-3/checkpoint-4")
    first = {path.stat().st_ino for path in Path(made).rglob("*")}
    assert zckpt.open(made).world_size == 3
    assert prepare_resume(output, world_size=3) == made
    assert {path.stat().st_ino for path in Path(made).rglob("*")} == first


@pytest.mark.parametrize("how", ["source", "unfinished", "removed"])
def test_copy_is_made_again_where_it_may_not_be_of_this_checkpoint(how, output):
    made = Path(prepare_resume(output, world_size=3) or "")
    (made / "scheduler.pt").write_bytes(b"of another run")
    if how == "source":
        os.utime(output / "checkpoint-4/model.safetensors", ns=(1, 1))
    elif how == "unfinished":
        made.with_name("checkpoint-4.json").unlink()
    else:
        shutil.rmtree(made)
    assert prepare_resume(output, world_size=3) == str(made)
    assert (made / "scheduler.pt").read_bytes() == (CHECKPOINT / "scheduler.pt").read_bytes()
    assert json.loads(made.with_name("checkpoint-4.json").read_text())["latest"][0] == len("global_step4")


def test_newest_checkpoint_that_was_saved_to_its_end_is_taken(output):
    shutil.copytree(output / "checkpoint-4", output / "checkpoint-10")
    assert prepare_resume(output, world_size=2) == str(output / "checkpoint-10")
    (output / "checkpoint-10/trainer_state.json").unlink()
    with pytest.warns(UserWarning, match="checkpoint-10"):
        assert prepare_resume(output, world_size=2) == str(output / "checkpoint-4")
    for name in ("checkpoint-10", "checkpoint-5"):  # which is not there
        with refusing(SourceError, name):
            prepare_resume(output / name, world_size=2)


def test_output_directory_without_checkpoints_has_none(tmp_path):
    assert prepare_resume(tmp_path, world_size=2) is None
    assert prepare_resume("absent", world_size=2) is None


def test_processes_that_are_not_joined_cannot_wait(output, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with refusing(UsageError, "TrainingArguments"):
        prepare_resume(output)


@on_ranks(3)
def test_all_processes_are_told_the_same(rank, tmp_path):
    good, damaged, occupied = (tmp_path / name for name in ("good", "damaged", "occupied"))
    if rank == 0:
        for one in (good, damaged, occupied):
            shutil.copytree(CHECKPOINT, one / "checkpoint-4")
        (shard,) = (damaged / "checkpoint-4/global_step4").glob("*rank_1_mp*")
        shard.unlink()
        (occupied / "_resharded-3").touch()
    torch.distributed.barrier()
    assert prepare_resume(good) == str(good / "_resharded-3/checkpoint-4")
    with pytest.raises(ShardError):
        prepare_resume(damaged)
    with pytest.raises(TargetError):
        prepare_resume(occupied)
