"""What of a run goes, what stays whatever the rule, and that a kill leaves no half of a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.cli.console import FIXTURES, printed, refused, run, succeeded
from tests.damage import flip, optimizer_file
from tests.operations.test_history import TAG, put
from tests.pairwise import some
from tests.refusals import refusing
from tests.storage.test_naming import killed

TRAINER = "other/trainer_ds2_gpt2/checkpoint-4"


def steps(*numbers: int, source: str = TAG, stem: str = "global_step", at: Path | str = "run") -> Path:
    """A run with a checkpoint for each step; nothing says which is the latest."""
    return put(at, **{f"{stem}{number}": source for number in numbers})


def pruned(at: Path = Path("run"), **given: Any) -> zckpt.Pruned:
    return zckpt.prune(at, **{"keep_last": 1, "settle": 0.0, **given})


def gone(**given: Any) -> set[str]:
    """The names of what goes of the run, which is what is gone from the directory then, and nothing else."""

    def there() -> dict[str, dict[str, bytes]]:
        return {path.name: files(path) for path in Path("run").iterdir()}

    before = there()
    said = pruned(**given)
    assert there() == before
    done = pruned(**given, delete=True)
    after = there()
    goes = {one.checkpoint.name for one in said.checkpoints if one.goes}
    assert goes == {one.checkpoint.name for one in done.checkpoints if one.goes}
    assert after == {name: its for name, its in before.items() if name not in goes}
    assert done.freed_nbytes == sum(len(data) for name in goes for data in before[name].values())
    return goes


def files(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in (path, *path.rglob("*")) if one.is_file()}


def why(**given: Any) -> dict[str, str]:
    return {one.checkpoint.name: one.why for one in pruned(**given).checkpoints}


def test_the_last_ones_and_those_of_some_steps_stay():
    at = steps(50, 100, 150, 200, 1000)
    (at / "latest").write_text("global_step1000")
    assert gone(keep_last=2, keep_every=100) == {"global_step50", "global_step150"}
    assert gone(keep_last=1) == {"global_step100", "global_step200"}
    assert gone(keep_last=1) == set()


def test_what_is_not_sound_does_not_count_and_stays_unless_that_is_asked_for():
    at = steps(1, 2, 3, 4)
    for broken in ("global_step2", "global_step4"):
        (at / broken / "mp_rank_00_model_states.pt").unlink()
    (at / "global_step5").mkdir()
    os.utime(at / "global_step5", (1e9, 1e9))
    assert gone() == {"global_step1"}
    assert "not sound, and --unsound is not given: " in why()["global_step2"]
    (at / "global_step4/mine.txt").write_text("notes")
    assert gone(unsound=True) == {"global_step2", "global_step5"}
    assert why(unsound=True)["global_step4"] == "not sound, and holds mine.txt, as no sound one does"


def test_what_is_damaged_deep_within_counts_unless_every_byte_is_read():
    at = steps(1, 2)
    shard = optimizer_file(at / "global_step2", 0)
    flip(shard, shard.stat().st_size // 2)
    assert why()["global_step1"] == ""
    assert why(deep=True)["global_step1"] == "the last"


@pytest.mark.parametrize(
    "tracker", ["latest", "latest_checkpointed_iteration.txt", "link", "link into", "another's link", "trainer"]
)
def test_what_is_named_stays(tracker):
    at = steps(1, 2, 3)
    if tracker == "latest":
        (at / tracker).write_text("global_step1\n")
    elif tracker == "latest_checkpointed_iteration.txt":
        (at / tracker).write_text("1")
    elif tracker == "link":
        (at / "exports").mkdir()
        (at / "exports/good").symlink_to("../global_step1")
    elif tracker == "another's link":
        (shard := at / "global_step3/mp_rank_00_model_states.pt").unlink()
        shard.symlink_to(Path("../global_step1", shard.name))
    elif tracker == "link into":
        (at / "weights.pt").symlink_to("global_step1/mp_rank_00_model_states.pt")
    else:
        (at / "global_step3/trainer_state.json").write_text('{"best_model_checkpoint": "/old/place/global_step1"}')
    assert gone() == {"global_step2"}


def test_links_are_named_once_where_a_model_lies_around_its_checkpoints():
    at = steps(4, 8, source=TRAINER, stem="checkpoint-")
    shutil.copy(at / "checkpoint-8/model.safetensors", at)
    (at / "best").symlink_to("checkpoint-4")
    (at / "checkpoint-8/link").symlink_to("../checkpoint-4/model.safetensors")
    assert why()["checkpoint-4"] == "named by best, checkpoint-8/link"


@pytest.mark.parametrize(
    "kind", ["symbolic", "hard", "new", "notes", "empty file", "another checkpoint", "unread tensors"]
)
def test_what_is_linked_or_new_or_holds_what_may_be_ours_stays(kind, tmp_path):
    at = steps(1, 2, 3)
    one = at / "global_step1"
    shard = one / "mp_rank_00_model_states.pt"
    if kind == "symbolic":
        shard.rename(tmp_path / "elsewhere.pt")
        shard.symlink_to(tmp_path / "elsewhere.pt")
    elif kind == "hard":
        os.link(shard, tmp_path / "elsewhere.pt")
    elif kind == "new":
        shard.touch()
    elif kind == "notes":
        (one / "README.md").write_text("keep this one")
    elif kind == "empty file":
        (one / "KEEP").touch()
    elif kind == "another checkpoint":
        shutil.copytree(FIXTURES / "other/dcp_fsdp2_dp2/ckpt", one / "mine")
    else:
        shutil.copy(FIXTURES / "other/plain_adamw/ckpt.pt", one / "mine.pt")
    for path in (at / "global_step2").iterdir():
        os.utime(path, (1e9, 1e9))
    os.utime(at / "global_step2", (1e9, 1e9))
    assert gone(settle=60.0 if kind == "new" else 0.0) == {"global_step2"}


def test_files_that_may_be_ours_go_if_we_say_so_and_peft_card_is_not_ours():
    at = steps(1, 2, 3)
    (at / "global_step1/notes").mkdir()
    (at / "global_step1/notes/a.txt").write_text("notes")
    (at / "global_step2/README.md").write_text("---\nbase_model: llama\nlibrary_name: peft\n---\n")
    assert "holds notes/a.txt, which may be yours" in why()["global_step1"]
    assert gone(also=["notes/*"]) == {"global_step1", "global_step2"}


def test_only_checkpoints_called_by_a_step_go_each_series_by_itself():
    at = steps(1, 2)
    steps(7, 8, stem="checkpoint_to_", source=TRAINER)
    put(at, best=TAG, final=TAG, other__global_step1=TAG)
    (at / "logs").mkdir()
    (at / "logs/step_1.log").write_text("log")
    assert gone() == {"global_step1", "checkpoint-7"}
    assert why()["best"] == "its name has no step"


def test_a_file_goes_with_the_digests_that_lie_beside_it():
    at = Path("run")
    at.mkdir()
    for step in (1, 2):
        shutil.copy(FIXTURES / "other/plain_adamw/ckpt.pt", at / f"ckpt_{step}.pt")
        succeeded("fingerprint", at / f"ckpt_{step}.pt", "--write")
    pruned(delete=True)
    assert {path.name for path in at.iterdir()} == {"ckpt_2.pt", "ckpt_2.pt.fingerprint.json"}


def test_models_of_one_step_go_together():
    at = Path("run")
    zckpt.convert(FIXTURES / "hf_llama_s2_bf16_dp2", "actor", to="fsdp-rank-files")
    for step in (5, 10):
        for role in ("actor", "critic"):
            shutil.copytree("actor", at / f"global_step_{step}" / role)
        shutil.copy(FIXTURES / "other/plain_adamw/ckpt.pt", at / f"global_step_{step}" / "data.pt")
    assert gone() == {"global_step_5"}


def trained(at: Path, **losses: float) -> None:
    for name, loss in losses.items():
        path = at / name.replace("_to_", "-") / "trainer_state.json"
        number = int(path.parent.name.partition("-")[2])
        log = [{"step": 1, "loss": 9.0, "eval_loss": 0.0}, {"step": number, "eval_loss": loss, "eval_bleu": -loss}]
        path.write_text(json.dumps({"global_step": number, "log_history": log}))


def test_the_best_by_what_a_trainer_logged_stays():
    at = steps(10, 20, 30, 40, stem="checkpoint_to_", source=TRAINER)
    trained(at, checkpoint_to_10=3.0, checkpoint_to_20=2.0, checkpoint_to_30=2.5, checkpoint_to_40=float("nan"))
    assert why(keep_best="eval_loss")["checkpoint-20"] == "the best by eval_loss: 2"
    assert why(keep_best="eval_loss:max")["checkpoint-10"] == "the best by eval_loss: 3"
    with refusing(
        zckpt.UsageError, "it is unknown whether higher or lower is better: expected eval_bleu:min or eval_bleu:max"
    ):
        pruned(keep_best="eval_bleu")
    with refusing(zckpt.UsageError, "no checkpoint has a value of accuracy for its step: expected"):
        pruned(keep_best="accuracy:max")
    assert gone(keep_best="eval_bleu:max") == {"checkpoint-10", "checkpoint-30"}


def test_the_best_by_our_own_metadata_stays():
    import torch

    at = Path("run")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        torch.save({"model": {"w": torch.ones(3)}, "val_loss": loss}, "x.pt")
        at.mkdir(exist_ok=True)
        zckpt.convert("x.pt", at / f"step-{step}", to="zckpt")
    assert gone(keep_best="val_loss") == {"step-1"}


def test_a_series_whose_names_and_steps_are_in_different_orders_stays():
    put(
        global_step1="s2_bf16_dp2_multitag/global_step5",
        global_step2="s2_bf16_dp2_multitag/global_step3",
    )
    assert [one.checkpoint.step for one in pruned().checkpoints] == [5, 3]
    assert gone() == set()


def test_a_series_that_stays_as_a_whole_changes_nothing_of_how_many_stay_of_others():
    steps(1, 2, 3, 4, 5)
    for stem in ("a", "b"):  # whichever of the three series is looked at first
        steps(1, stem=f"{stem}_step", source="s2_bf16_dp2_multitag/global_step5")
        steps(2, stem=f"{stem}_step", source="s2_bf16_dp2_multitag/global_step3")
    assert gone(keep_last=4) == {"global_step1"}


def test_what_cannot_be_removed_is_said_and_stays():
    at = steps(1, 2)
    (at / ".zckpt-removed").write_text("something of mine")
    done = run("prune run --keep-last 1 --settle 0 --delete --json")
    assert done.returncode == 4
    document = json.loads(done.stdout)
    assert document["freed_nbytes"] == 0
    assert document["failed"] == ["run/global_step1: File exists"]
    assert (at / ".zckpt-removed").read_text() == "something of mine"
    assert (at / "global_step1").is_dir()


def test_the_document_is_what_is_printed():
    steps(1, 2)
    command = "prune run --keep-last 1 --settle 0"
    assert printed(command) == pruned().as_dict()
    text = succeeded(command).stdout
    assert "would free 46.2 kB of 1 checkpoint\nnothing was removed: give --delete" in text
    assert "freed 46.2 kB of 1 checkpoint\n" in succeeded(command, "--delete").stdout


@pytest.mark.parametrize(
    ("status", "arguments", "words"),
    [
        (2, ". --keep-last 0", "--keep-last must be at least 1"),
        (2, ".", "keep-last"),
        (2, "s3://bucket/run --keep-last 1", "cannot be in a store such as S3"),
        (3, ". --keep-last 1", "no checkpoint"),
    ],
)
def test_what_cannot_be_is_refused(status, arguments, words):
    refused(status, f"prune {arguments}", words=words)


# --- kills


def three(here: Path) -> None:
    steps(1, 2, 3, at=here)
    (here / "latest").write_text("global_step3")
    (here / "global_step2/mine.txt").write_text("notes")


def prune_all(here: Path) -> None:
    pruned(here, delete=True, also=["mine.txt"])


@pytest.mark.parametrize("step", some([4], [1]))
def test_whenever_a_removal_is_killed_what_has_a_name_is_whole_and_the_next_one_ends_it(step, tmp_path):
    left = killed("three", "prune_all", tmp_path, module=__name__, every=step)
    assert len(left) > 16 / step
    whole = files(FIXTURES / TAG)
    found = []
    for here in left:
        history = zckpt.history(here)
        found.append({one.name for one in history.checkpoints})
        assert "global_step3" in found[-1]
        for one in history.checkpoints:
            assert one.sound
            assert {name: data for name, data in files(Path(one.path)).items() if name != "mine.txt"} == whole
        hidden = here / ".zckpt-removed"
        assert history.leftovers == ([str(hidden)] if hidden.exists() else [])
        prune_all(here)
        assert {path.name for path in here.iterdir()} == {"global_step3", "latest"}
    assert [len(one) for one in found] == sorted((len(one) for one in found), reverse=True)
    assert {len(one) for one in found} == {1, 2, 3}
