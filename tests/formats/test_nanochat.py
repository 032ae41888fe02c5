"""nanochat: what its own model, optimizer and functions saved on two ranks, cut for other numbers; and every damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zckpt
from tests.damage import edit
from tests.folders import names_in
from tests.formats.holding import converted, edit_json
from tests.interop.test_fsdp_rank_files import assert_is
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnknownFormatError, UnsupportedError, UsageError
from zckpt.formats.account import take_inventory

SAVED = Path(__file__).parents[2] / "fixtures" / "other" / "nanochat_dp2"
TRUTH = load_file(SAVED / "truth.safetensors")
with safe_open(SAVED / "truth.safetensors", "pt") as file:
    ORDER = file.metadata()["order"].split()


@pytest.fixture
def saved():
    return Path(shutil.copytree(SAVED / "ckpt", "d3"))


def rank_file(directory, rank):
    return directory / f"optim_000003_rank{rank}.pt"


def test_every_element_is_where_it_was(saved):
    checkpoint = zckpt.open(saved)
    assert_is(checkpoint, TRUTH)
    assert [name for group in checkpoint.param_groups for name in group.parameters] == ORDER
    assert [group.hyperparameters["kind"] for group in checkpoint.param_groups] == ["adamw"] * 6 + ["muon"] * 5
    assert checkpoint.param_groups[0].state == {"step": 3}
    assert (checkpoint.step, checkpoint.world_size, checkpoint.metadata["meta"]["val_bpb"]) == (3, 2, 1.5)
    assert not take_inventory(checkpoint).left_out
    assert zckpt.verify(saved, deep=True).sound
    converted(saved, "zckpt", "zckpt")
    zckpt.consolidate(saved, "m.safetensors")
    model = load_file("m.safetensors")
    assert all(torch.equal(one, TRUTH[f"weight/{name}"]) for name, one in model.items())
    assert len(model) == len(ORDER)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_each_rank_gets_its_share(world_size, saved):
    """Rows of AdamW's moments from 1,024 elements on, and matrices of each stack with zeros behind the last."""
    target = Path("target")
    zckpt.reshard(saved, target, world_size=world_size, verify=True)
    names = [f"optim_000003_rank{rank}.pt" for rank in range(world_size)]
    assert names_in(target) == ["meta_000003.json", "model_000003.pt", *names]
    for name in ("meta_000003.json", "model_000003.pt"):
        assert (target / name).read_bytes() == (saved / name).read_bytes()
    groups = torch.load(rank_file(saved, 0), weights_only=True)["param_groups"]
    for rank in range(world_size):
        own = torch.load(rank_file(target, rank), weights_only=True)
        assert own["param_groups"] == groups
        for group in groups:
            numbers = group["params"]
            if group["kind"] == "muon":
                assert not own["state"].keys() & {*numbers[1:]}
                for slot, found in own["state"][numbers[0]].items():
                    whole = torch.stack([TRUTH[f"{slot}/{ORDER[number]}"] for number in numbers])
                    length = -(-len(numbers) // world_size)
                    padded = torch.cat([whole, torch.zeros(length * world_size - len(whole), *whole.shape[1:])])
                    assert torch.equal(found, padded[rank * length :][:length])
                continue
            for number in numbers:
                assert own["state"][number].pop("step") == 3
                for slot, found in own["state"][number].items():
                    whole = TRUTH[f"{slot}/{ORDER[number]}"]
                    expected = whole if whole.numel() < 1024 else whole.chunk(world_size)[rank]
                    assert torch.equal(found, expected)
    assert zckpt.diff(saved, target).equal


def test_rows_are_shared_evenly_or_not_at_all(saved):
    with refusing(LayoutError, "rows cannot be shared evenly: expected a multiple of 3, found 64"):
        zckpt.reshard(saved, "target", world_size=3)
    with refusing(UsageError, "world"):
        zckpt.reshard(saved, "target", world_size=0)
    assert not Path("target").exists()


def test_a_model_by_itself_is_any_numbers(saved):
    for rank in (0, 1):
        rank_file(saved, rank).unlink()
    assert torch.equal(zckpt.open(saved).read("lm_head.weight"), TRUTH["weight/lm_head.weight"])
    with refusing(UnsupportedError, "any number of ranks can load it"):
        zckpt.reshard(saved, "target", world_size=2)


def test_the_last_step_is_read_or_that_of_the_tag(saved):
    for path in [*saved.iterdir()]:
        shutil.copy(path, saved / path.name.replace("000003", "000012"))
    edit_json(saved / "meta_000012.json", lambda said: said.update(step=12))
    shutil.copy(saved / "model_000003.pt", saved / "model_000020.pt")  # a save that did not end
    assert zckpt.open(saved).step == 12
    assert zckpt.open(saved, tag="3").step == 3
    assert not take_inventory(zckpt.open(saved)).left_out
    zckpt.reshard(saved, "target", world_size=1, tag="000003")
    assert names_in("target") == ["meta_000003.json", "model_000003.pt", "optim_000003_rank0.pt"]
    with refusing(UnknownFormatError, "holds no such step: expected 000003, 000012, found 20"):
        zckpt.open(saved, tag="20")


def test_a_compiled_models_names_are_its_own(saved):
    model = torch.load(saved / "model_000003.pt", weights_only=True)
    torch.save({f"_orig_mod.{name}": one for name, one in model.items()}, saved / "model_000003.pt")
    assert [name for group in zckpt.open(saved).param_groups for name in group.parameters] == ORDER
    zckpt.reshard(saved, "target", world_size=4)
    assert zckpt.diff(saved, "target").equal


def test_names_may_be_given(saved):
    """Two parameters of one shape in another order, as a fork may have them."""
    given = [*ORDER]
    given[0], given[1] = given[1], given[0]
    checkpoint = zckpt.open(saved, names=given)
    assert torch.equal(checkpoint.read(ORDER[1], "exp_avg"), TRUTH[f"exp_avg/{ORDER[0]}"])
    given[0], given[2] = given[2], given[0]
    with refusing(LayoutError, "a rank's exp_avg of"):
        zckpt.open(saved, names=given)


@pytest.mark.parametrize(("rank", "said"), [
    (0, "the optimizer file of rank 0 is missing"),
    (1, "a rank's exp_avg of lm_head.weight is not its share"),
])  # fmt: skip
def test_a_lost_file_is_noticed(rank, said, saved):
    rank_file(saved, rank).unlink()
    with refusing((ShardError, LayoutError), said):
        zckpt.open(saved)


def muon(*shape, number=9):
    """A change of the state of a stack of matrices."""
    return lambda one: one["state"].setdefault(number, {}).update(momentum_buffer=torch.zeros(shape))


@pytest.mark.parametrize(("change", "ranks", "kind", "said"), [
    (lambda one: one["param_groups"][0].update(kind="sgd"), (0, 1), UnsupportedError, "groups of adamw and muon"),
    (lambda one: one["param_groups"][0].update(kind="muon"), (0, 1), UnsupportedError, "not those that nanochat"),
    (lambda one: one["param_groups"][0].update(lr=1.0), (1,), LayoutError, "lr"),
    (lambda one: one["state"][0].update(step=4), (1,), LayoutError, "ranks have different state of parameter 0"),
    (lambda one: one["state"].pop(9), (1,), LayoutError, "ranks have different state of parameter 9"),
    (lambda one: one["state"][9].update(step=4), (0, 1), LayoutError, "other state than stacks"),
    (muon(1, 1, 12, number=10), (0, 1), LayoutError, "other state than stacks"),
    (muon(5, 1, 12), (1,), LayoutError, "is not its share"),
    (muon(1, 1, 6), (0, 1), LayoutError, "momentum_buffer is not of transformer.h.0.attn.ve_gate.weight"),
    (muon(1, 2, 12), (0, 1), LayoutError, "momentum_buffer is not of transformer.h.0.attn.ve_gate.weight"),
])  # fmt: skip
def test_what_is_not_nanochats_is_refused(change, ranks, kind, said, saved):
    for rank in ranks:
        edit(rank_file(saved, rank), change)
    with refusing(kind, said):
        zckpt.open(saved)


def test_metadata_are_json(saved):
    (saved / "meta_000003.json").write_text("{")
    with refusing(DamagedFileError, "unreadable nanochat's metadata"):
        zckpt.open(saved)


def test_copies_on_other_ranks_are_held_against_the_first(saved):
    edit(rank_file(saved, 1), lambda one: one["state"][7]["exp_avg"].add_(1))
    assert not zckpt.verify(saved, deep=True).sound


def test_of_two_optimizers_in_a_file_the_model_is_read(saved):
    """As nanochat saved them before 29 January 2026, which is sound, and no rank's file is lost in silence."""
    for rank in (0, 1):
        whole = torch.load(rank_file(saved, rank))
        torch.save([whole, whole], rank_file(saved, rank))
    checkpoint = zckpt.open(saved)
    assert "before 29 January 2026" in checkpoint.warnings[0]
    assert len(take_inventory(checkpoint).left_out) == 2
    zckpt.consolidate(saved, "m.safetensors", drop=["optim_*"])
    assert all(torch.equal(one, TRUTH[f"weight/{name}"]) for name, one in load_file("m.safetensors").items())
    with refusing(UnsupportedError, "has no optimizer's state"):
        zckpt.reshard(saved, "target", world_size=1, drop=["optim_*"])
