"""Every way to save in a training: it comes back, and replaces a checkpoint of its own format only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
import zckpt.dcp
from tests.folders import names_in, snapshot
from tests.gloo import on_ranks
from tests.refusals import refusing
from tests.training.trainings import BY_NAME, Training, differences
from zckpt.errors import TargetError, TargetExistsError, UsageError

pytestmark = pytest.mark.interop

TRAININGS = {
    "zckpt": "zero2-plain-float32",
    "deepspeed": "zero2-plain-float32",
    "zero-redundancy": "redundancy-ddp-float32",
}


@on_ranks(2, each=[(form,) for form in TRAININGS])
def test_a_checkpoint_of_each_format_is_loaded_and_replaced_and_nothing_else(rank, form):
    directory = Path(form)
    training = Training.of(BY_NAME[TRAININGS[form]])
    training.train([0])

    def save() -> None:
        zckpt.save(
            directory / "c", **training.given, step=1, extra={"epoch": 3}, format=form, overwrite=True,
            fingerprint=form == "zckpt",
        )  # fmt: skip

    save()
    save()  # over its own
    assert zckpt.open(directory / "c").format == form
    other = Training.of(BY_NAME[TRAININGS[form]], seed=2)
    restored = zckpt.load(directory / "c", **other.given)
    assert (restored.step, restored.extra["epoch"]) == (1, 3)
    assert differences(other.state(), training.state()) == []
    assert other.train(range(1, 3)) == training.train(range(1, 3))
    if rank == 0:
        (directory / "c/notes.txt").write_text("precious")
    torch.distributed.barrier()
    with refusing(TargetExistsError, r"holds other files, which would be removed.*notes\.txt"):
        save()
    torch.distributed.barrier()
    if rank == 0:
        (directory / "c/notes.txt").unlink()
        (directory / "latest").unlink(missing_ok=True)
        (directory / "latest").symlink_to("elsewhere")
    torch.distributed.barrier()
    if form == "deepspeed":
        with refusing(TargetExistsError, "latest: (on rank 0, )?is a symbolic link, which zckpt does not replace"):
            save()
    assert names_in(directory) == ["c", "latest"]


def test_a_checkpoint_of_another_format_is_not_replaced():
    zckpt.save("c", model=torch.nn.Linear(2, 2))
    zckpt.convert("c", "d", to="dcp")
    with refusing(TargetExistsError, r"\.metadata"):
        zckpt.save("d", model=torch.nn.Linear(2, 2), overwrite=True)
    with refusing(TargetExistsError, r"checkpoint\.json"):
        zckpt.convert("d", "c", to="dcp", overwrite=True)
    assert zckpt.open("c").format == "zckpt"
    assert zckpt.open("d").format == "dcp"


def by_save(path: Path) -> None:
    zckpt.save(path, model=torch.nn.Linear(2, 2), overwrite=True)


def by_dcp(path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, storage_writer=zckpt.dcp.Writer(path, overwrite=True))


@pytest.mark.parametrize("save", [by_save, by_dcp])
def test_a_checkpoint_of_zckpts_format_is_replaced_and_nothing_else(save):
    save("c")
    save("c")
    for name, content in (
        ("project/src/train.py", "precious"),
        ("none/checkpoint.json", "{}"),
        ("another/checkpoint.json", '{"format": "another"}'),
        ("nothing/checkpoint.json", ""),
    ):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text(content)
    Path("link").symlink_to("c")
    Path(".new.zckpt-partial").symlink_to("project")
    before = snapshot()
    for name, expected in (
        ("project", r"holds other files, .*src/train\.py"),
        *((name, r"checkpoint\.json") for name in ("none", "another", "nothing")),
        ("link", "symbolic link"),
        ("new", "a symbolic link in its place"),
        *((f"m.{end}", "is a directory, but its name ends like a file's") for end in ("pt", "safetensors", "gguf")),
    ):
        with pytest.raises((TargetError, UsageError, dcp.api.CheckpointException), match=expected):
            save(name)
    assert snapshot() == before
    assert Path("link").is_symlink()
