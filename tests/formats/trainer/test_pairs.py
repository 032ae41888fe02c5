"""A model and its optimizer, each in a file of `torch.save`, as loops of one's own leave them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from tests.formats.holding import assert_holds
from tests.live import step
from tests.logical import assert_same_tree
from tests.refusals import refusing
from zckpt.errors import LeftOutError, SourceError
from zckpt.formats.account import take_inventory


def trained(folder, model_name, optimizer_name):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    parts = [[one for one in model.parameters() if (one.dim() > 1) == decayed] for decayed in (True, False)]
    optimizer = torch.optim.AdamW([{"params": parts[0]}, {"params": parts[1], "weight_decay": 0.0}], lr=0.01)
    step(model, optimizer, (4, 3))
    folder.mkdir(exist_ok=True)
    save = save_file if model_name.endswith(".safetensors") else torch.save
    save(model.state_dict(), folder / model_name)
    torch.save(optimizer.state_dict(), folder / optimizer_name)
    return model, optimizer


@pytest.mark.parametrize(
    ("model_name", "optimizer_name"),
    [
        ("model.pt", "optimizer.pt"),
        ("weights.pth", "optim.pth"),
        ("model.ckpt", "optimizer.ckpt"),
        ("model.bin", "optimizer.bin"),
        ("model.safetensors", "optim.pt"),
        ("params.pt", "optimizer.pt"),  # skorch
        ("model_state_e1_b0.th", "adam.th"),
        ("net.safetensors", "state of adam.pth"),
    ],
)
def test_a_model_and_an_optimizer_are_one_checkpoint(model_name, optimizer_name):
    model, optimizer = trained(Path("c"), model_name, optimizer_name)
    torch.save({"last_epoch": 1}, "c/scheduler.pt")
    checkpoint = assert_holds("c", model, optimizer)
    assert not checkpoint.unnamed
    assert set(checkpoint.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert zckpt.verify("c", deep=True).sound
    zckpt.convert("c", "whole.pt", to="consolidated")
    assert_same_tree(torch.load("whole.pt")["optimizer"]["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize(("more", "of"), [("weights.pt", "model.pt"), ("optim.pt", "optimizer.pt")])
def test_two_of_a_kind_are_not_chosen_from(more, of, tmp_path):
    trained(tmp_path, "model.pt", "optimizer.pt")
    (tmp_path / more).write_bytes((tmp_path / of).read_bytes())
    with refusing(SourceError, "not recognised as a checkpoint.* found model.pt, optim"):
        zckpt.open(tmp_path)


def test_a_number_in_a_file_of_its_own_is_carried():  # SpeechBrain's
    run = Path("run")
    trained(run, "model.ckpt", "optimizer.ckpt")
    (run / "counter.ckpt").write_text("3\n")
    (run / "mean.ckpt").write_text("0.5")
    checkpoint = zckpt.open(run)
    assert (checkpoint.metadata["counter"], checkpoint.metadata["mean"]) == (3, 0.5)
    zckpt.convert(run, "dcp", to="dcp")
    (run / "word.ckpt").write_text('"3"')
    with refusing(LeftOutError, "word.ckpt"):
        zckpt.convert(run, "again", to="dcp")


def test_an_average_in_a_file_of_its_own_is_carried():
    run = Path("run")
    model, _ = trained(run, "model.pt", "optimizer.pt")
    mean = {f"module.{name}": one.detach() / 2 for name, one in model.named_parameters()}
    torch.save(mean, run / "ema.pt")
    assert not take_inventory(zckpt.open(run)).left_out
    zckpt.convert(run, "whole.pt", to="consolidated")
    zckpt.convert(run, "dcp", to="dcp")
    zckpt.convert("dcp", "back.pt", to="consolidated")
    for path in ("whole.pt", "back.pt"):
        assert_same_tree(torch.load(path, weights_only=False)["zckpt"]["metadata"]["ema"], mean)
    torch.save({**mean, "module.0.bias": torch.zeros(4)}, run / "ema.pt")  # of another model
    with refusing(LeftOutError, "ema.pt"):
        zckpt.convert(run, "again", to="dcp")


def test_an_optimizer_of_some_parameters_is_only_paired_by_names(tmp_path):
    model, _ = trained(tmp_path, "net.pt", "adam.pt")
    some = torch.optim.AdamW(list(model.parameters())[2:])
    torch.save(some.state_dict(), tmp_path / "adam.pt")
    with refusing(SourceError, "not recognised as a checkpoint"):
        zckpt.open(tmp_path)


@pytest.mark.parametrize("names", [("model.pt", "optim_1.pt"), ("net_rank0.pt", "adam.pt"), ("net.tp0.pt", "adam.pt")])
def test_files_of_one_rank_are_no_pair(names, tmp_path):
    trained(tmp_path, *names)
    with refusing(SourceError, "not recognised as a checkpoint"):
        zckpt.open(tmp_path)
