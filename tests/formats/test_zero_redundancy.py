"""Directories of torch's ZeroRedundancyOptimizer: what torch wrote, what zckpt writes, and what neither of them did.

The files in `fixtures/other/zro_*` are the real optimizer's; that the real one loads ours is in `tests/interop`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import zckpt
from tests import live
from tests.damage import fix_checksums, flip
from tests.formats.holding import assert_holds, converted
from tests.formats.some_tensors import assert_same
from tests.live import save_both
from tests.logical import assert_same_state, assert_same_tree, opened
from tests.pairwise import each
from tests.plans import write_directory
from tests.refusals import refusing
from tests.truth import Truth, bits
from zckpt.engine.plan import plan
from zckpt.engine.targets import TargetFile
from zckpt.errors import (
    DamagedFileError,
    LayoutError,
    LeftOutError,
    ShardError,
    SourceError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)
from zckpt.formats import open_checkpoint
from zckpt.formats.account import take_inventory
from zckpt.formats.format import Job, Search
from zckpt.formats.options import choose
from zckpt.formats.torch_files import reader as torch_reader
from zckpt.formats.zero_redundancy import Options, reader, writer
from zckpt.formats.zero_redundancy.directory import OWNED, find
from zckpt.operations.open import OpenedCheckpoint
from zckpt.state.inventory import COPY

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZRO = ["zro_dp2_adamw", "zro_dp3_sgdm_1g"]
FORMS = [{"world_size": 1, "per_rank": False}, {"world_size": 1, "per_rank": True}, {"world_size": 3, "per_rank": True}]


def read(path, names: list[str] | None = None) -> OpenedCheckpoint:
    directory = find(Search(path))
    assert directory is not None
    return opened(reader.read(directory, names=names))


def lay_out(checkpoint, *, world_size, per_rank) -> list[TargetFile]:
    options = choose(Options, {"world_size": world_size if per_rank else None}, "zero-redundancy")
    return list(writer.lay_out(Job(checkpoint, Path("source"), Path("target"), options)).files)


def written(checkpoint, directory, *, world_size=3, per_rank=True) -> Path:
    write_directory(plan(lay_out(checkpoint, world_size=world_size, per_rank=per_rank)), directory)
    return Path(directory)


def truth_of(name) -> Truth:
    return Truth(FIXTURES / "other" / name)


def names_of(name) -> list[str]:
    return [parameter for group in truth_of(name).facts["param_groups"] for parameter in group["params"]]


def known(model, optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in its order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def consolidated(name) -> OpenedCheckpoint:
    path = FIXTURES / "other" / name / "ckpt" / "consolidated.pt"
    return opened(torch_reader.read(path, names=names_of(name)))


def ranks(name, directory, pattern="zero_rank{}.pt", model="model.pt") -> Path:
    """What each rank of the real optimizer saved, under names of one's choice, and the model next to them."""
    source = FIXTURES / "other" / name / "ckpt"
    directory.mkdir()
    for rank in range(truth_of(name).facts["world_size"]):
        shutil.copy(source / f"zero_rank{rank}.pt", directory / pattern.format(rank))
    if model:
        torch.save(torch.load(source / "consolidated.pt")["model"], directory / model)
    return directory


def changed(path, change):
    root = torch.load(path, weights_only=False)
    change(root)
    torch.save(root, path)


def assert_truth(checkpoint, name):
    """Every weight, slot, hyperparameter and name is that of the live optimizer."""
    truth = truth_of(name)
    for parameter, value in truth.weights.items():
        assert_same(checkpoint.read(parameter, "weight"), value)
    kinds = [*truth.slots] + (["step"] if truth.kind("step") else [])
    for kind in kinds:
        of = truth.kind(kind)
        assert {p.name for p in checkpoint.parameters.values() if kind in p.slots} == of.keys()
        for parameter, value in of.items():
            assert torch.equal(bits(checkpoint.read(parameter, kind)), bits(value)), (kind, parameter)
    assert checkpoint.unnamed == {}
    assert checkpoint.step == truth.facts["step"] or not truth.kind("step")
    for group, expected in zip(checkpoint.param_groups, truth.facts["param_groups"], strict=True):
        assert group.parameters == expected["params"]
        for key, value in group.hyperparameters.items():
            assert (list(value) if isinstance(value, tuple) else value) == expected[key], key
        assert {*group.hyperparameters, "params"} == expected.keys()


# --- what the real optimizer wrote ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZRO)
def test_consolidated_file_is_read_as_any_file_of_torch(name):
    assert_truth(consolidated(name), name)


@pytest.mark.parametrize(
    ("name", "pattern"),
    each(ZRO, ["zero_rank{}.pt", "rank_{}.pth", "optim-{}.bin", "step5.optim_states.{:03}.ckpt"]),
)
def test_ranks_files_are_read_under_any_name(name, pattern):
    checkpoint = read(ranks(name, Path("ranks"), pattern), names_of(name))
    assert_truth(checkpoint, name)
    assert (checkpoint.format, checkpoint.world_size) == ("zero-redundancy", truth_of(name).facts["world_size"])
    assert checkpoint.warnings == []


@pytest.mark.parametrize("name", ZRO)
def test_consolidated_state_beside_ranks_files_is_what_is_read(name):
    checkpoint = read(FIXTURES / "other" / name / "ckpt", names_of(name))
    assert_truth(checkpoint, name)
    assert checkpoint.warnings == []
    own = sorted(FIXTURES.joinpath("other", name, "ckpt").glob("zero_rank*"))
    assert {item.file for item in take_inventory(checkpoint).of(COPY)} == {path.name for path in own}


def assert_as_torch_wrote(mine, path):
    """The same keys, numbers, groups and bits."""
    its = torch.load(path, weights_only=True)["optimizer"]
    assert mine["param_groups"] == its["param_groups"]
    assert_same_tree(mine["state"], its["state"])


@pytest.mark.parametrize("name", ZRO)
def test_what_is_written_is_what_torch_wrote(name):
    """For each rank and consolidated, from the consolidated state."""
    world_size, theirs = truth_of(name).facts["world_size"], FIXTURES / "other" / name / "ckpt"
    out = written(consolidated(name), "out", world_size=world_size)
    for rank in range(world_size):
        mine = torch.load(out / f"optimizer_rank_{rank}.pt", weights_only=True)
        assert_as_torch_wrote(mine, theirs / f"zero_rank{rank}.pt")
    out = written(consolidated(name), "one", per_rank=False)
    mine = torch.load(out / "optimizer.pt", weights_only=True)
    assert [name for group in mine["param_groups"] for name in group.pop("param_names")] == names_of(name)
    assert_as_torch_wrote(mine, theirs / "consolidated.pt")


def ranks_without_model(name: str, path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a directory of files of ranks, and the model that was beside them."""
    directory = ranks(name, path)
    model = torch.load(directory / "model.pt")
    (directory / "model.pt").unlink()
    return directory, model


def test_model_in_every_ranks_file_is_read_from_the_first():
    """The others' are its copies."""
    name = "zro_dp3_sgdm_1g"
    directory, model = ranks_without_model(name, Path("ranks"))
    for rank in range(3):
        changed(directory / f"zero_rank{rank}.pt", lambda root: root.update(model=model, seed=rank))  # noqa: B023
    checkpoint = read(directory, names_of(name))
    assert_truth(checkpoint, name)
    assert checkpoint.warnings == ["the model is read from zero_rank0.pt"]
    assert checkpoint.metadata == {"zero_rank0.seed": 0, "zero_rank1.seed": 1, "zero_rank2.seed": 2}
    whole = zckpt.open(directory, names=names_of(name))
    converted(whole, "own", "zckpt")
    [copy] = [one for one in whole.duplicates if (one.rank, one.name) == (2, "emb.weight")]
    flip(copy.slot.spans[0].path, copy.slot.spans[0].offset)
    fix_checksums(copy.slot.spans[0].path)
    found = zckpt.verify(zckpt.open(directory, names=names_of(name)), deep=True)
    assert [one.parameters for one in found.findings if one.severity == "error"] == [("emb.weight",)]


def test_world_of_one_rank_is_read_where_its_file_says_so():
    name = "zro_dp2_adamw"
    one = torch.load(written(consolidated(name), "out", world_size=1) / "optimizer_rank_0.pt")
    directory = ranks(name, Path("ranks"))
    (directory / "zero_rank1.pt").unlink()
    torch.save({"optimizer": one, "rank": 0}, directory / "zero_rank0.pt")
    assert find(Search(directory)) is None
    torch.save({"optimizer": one, "rank": 0, "world_size": 1}, directory / "zero_rank0.pt")
    assert_truth(read(directory, names_of(name)), name)


# --- names that the model tells -------------------------------------------------------------------------------------


def trained(*, tied=False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of equal layers, all of them trained, in two groups."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)], torch.nn.Linear(4, 3))
    if tied:
        model[1].weight = model[0].weight
    groups = [[p for p in model.parameters() if (p.dim() > 1) is flag] for flag in (True, False)]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 0.5}])
    return live.trained(model, optimizer, steps=2)


def as_others_save_it(model, optimizer, world_size=2) -> Path:
    """Each rank's share of an optimizer, as torch assigns it, in files without a word about names."""
    path = save_both(model, optimizer, "c.pt")
    source = torch_reader.read(path, names=known(model, optimizer))
    directory = written(source, "own", world_size=world_size)
    (directory / "metadata.pt").unlink()
    return directory


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_names_follow_from_shapes_and_the_models_order(tied, world_size):
    model, optimizer = trained(tied=tied)
    [warning] = assert_holds(as_others_save_it(model, optimizer, world_size), model, optimizer).warnings
    assert warning.startswith("the files do not state the order of the optimizer's parameters")


def test_shares_that_fairscale_assigns_are_read_too(tmp_path):
    """Its OSS assigns parameters in their order, torch the largest first."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 3))
    model, optimizer = live.trained(layers)
    state = optimizer.state_dict()
    held = [[], []]
    elements = [0, 0]
    for number, parameter in enumerate(model.parameters()):
        rank = elements.index(min(elements))
        held[rank].append(number)
        elements[rank] += parameter.numel()
    for rank, numbers in enumerate(held):
        own = {at: state["state"][number] for at, number in enumerate(numbers)}
        groups = [{**state["param_groups"][0], "params": list(range(len(numbers)))}]
        saved = {"model": model.state_dict(), "optimizer": {"state": own, "param_groups": groups}}
        torch.save(saved, tmp_path / f"r_rank{rank}.pt")
    assert_holds(tmp_path, model, optimizer)


def test_group_of_all_parameters_needs_no_state():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    assert_holds(as_others_save_it(model, optimizer), model, optimizer)


@pytest.mark.parametrize("name", ZRO)
def test_parameter_without_state_leaves_names_untold(name):
    directory = ranks(name, Path("ranks"))
    with refusing(UnsupportedError, r"rank \d's parameter \d has no state to show its shape.*--names"):
        read(directory)


def test_tensor_that_could_be_a_trained_one_leaves_names_untold():
    model, optimizer = trained()
    directory = as_others_save_it(model, optimizer)
    changed(directory / "model.pt", lambda root: root.update(table=torch.ones(4, 4)))
    with refusing(UnsupportedError, r"of shape \(4, 4\), has no certain name; give --names FILE"):
        read(directory)


def test_without_a_model_nothing_tells_which_parameter_is_which():
    directory = ranks("zro_dp2_adamw", Path("ranks"), model="")
    for names in (None, names_of("zro_dp2_adamw")):
        with refusing(UnsupportedError, r"only the sizes .* put the model's state dict next to them"):
            read(directory, names)


def test_state_that_every_rank_has_whole_is_not_taken_for_shares(tmp_path):
    """Programs without a sharded optimizer save the same state on every rank."""
    model, optimizer = trained()
    for rank in range(2):
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer_rank{rank}.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    words = r"expected 8 parameters on 2 ranks, found 16; give one of them, such as .*optimizer_rank0\.pt"
    for names in (None, known(model, optimizer)):
        with refusing(UnsupportedError, words):
            read(tmp_path, names)


def test_pieces_of_state_are_not_taken_for_copies(tmp_path):
    """A whole model and the optimizer's own `state_dict()` on each rank of FSDP1: one file alone is not all of it."""
    model, optimizer = trained()
    whole = optimizer.state_dict()
    for rank in range(2):
        state = {
            number: {key: one.flatten().tensor_split(2)[rank] if one.dim() else one for key, one in its.items()}
            for number, its in whole["state"].items()
        }
        torch.save(
            {"model": model.state_dict(), "optimizer": {**whole, "state": state}}, tmp_path / f"ck_rank{rank}.pt"
        )
    with refusing(UnsupportedError, "each rank has pieces of the optimizer's state, as FSDP1's.*FSDP.optim_state_dict"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"0": 4}, "only ckpt_rank0.pt has 1.bias"),  # a pipeline's last stage
        ({"0": 4, "1": 3}, r"1.weight has shape \(4, 4\), and \(3, 4\) in ckpt_rank1.pt"),  # FSDP
        ({"0": 4, "1": 4}, "0.weight has other values in ckpt_rank1.pt"),  # tensor parallelism
    ],
)
def test_each_ranks_share_of_a_model_is_not_taken_for_the_whole(sizes, why, tmp_path):
    for rank, its in enumerate(({"0": 4, "1": 4}, sizes)):
        model = torch.nn.ModuleDict({key: torch.nn.Linear(4, size) for key, size in its.items()})
        saved = {"model": model.state_dict(), "optimizer": torch.optim.AdamW(model.parameters()).state_dict()}
        torch.save(saved, tmp_path / f"ckpt_rank{rank}.pt")
    with pytest.raises(UnsupportedError, match=f"each rank's file has a model of its own.* found {why}"):
        zckpt.open(tmp_path)
    for rank in range(2):
        [warning] = zckpt.open(tmp_path / f"ckpt_rank{rank}.pt").warnings
        assert "it is one of 2 ranks' files, and may hold only a share of the model" in warning
    same = tmp_path / "ckpt_rank1.pt", tmp_path / "ckpt_rank0.pt"
    shutil.copy(*same)
    assert not zckpt.open(same[1]).warnings


def test_rows_of_state_on_each_rank_are_not_taken_for_copies(tmp_path):
    """As nanochat saves them: the model in one file, on each rank as many rows of every moment."""
    weight = torch.randn(4, 3)
    torch.save({"weight": weight, "head": weight * 2}, tmp_path / "model_000010.pt")
    torch.save({"position": 7}, tmp_path / "data.pt")
    for rank in range(2):
        state = {number: {"step": 10, "exp_avg": torch.randn(2, 3)} for number in range(2)}
        optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        torch.save(optimizer, tmp_path / f"optim_000010_rank{rank}.pt")
    with refusing(UnsupportedError, r"optimizers that cut rows .*for the model alone give .*model_000010\.pt"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: names[:-1], "expected 17 different names, found 16 different ones of 16"),
        (lambda names: [names[0], *names[:-1]], "found 16 different ones of 17"),
        (lambda names: ["no such", *names[1:]], "the model has no parameter no such"),
        (lambda names: ["head.weight", *names[1:]], "two of the names belong to one tied parameter"),
    ],
)
def test_names_that_do_not_fit_are_refused(change, message):
    with refusing(UsageError, message):
        read(ranks("zro_dp2_adamw", Path("ranks")), change(names_of("zro_dp2_adamw")))


def test_names_in_another_order_are_refused():
    with refusing(LayoutError, r"zero_rank\d.pt: "):
        read(ranks("zro_dp2_adamw", Path("ranks")), names_of("zro_dp2_adamw")[::-1])


# --- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form"),
    each([
        "s1_fp32_dp3", "s2_bf16_dp2_client", "s2_bf16_dp2_frozengroup", "s2_bf16_dp2_zerodim", "s1_bf16_dp2_empty",
        "ds0145_s2_bf16_dp2_elastic_fused", "s2_fp16_dp2", "s3_bf16_dp3", "s3_bf16_dp2_nofrozen", "s0_bf16_dp2",
        "s1_fp32_dp4_sgdm", "moe_ep2_s2_bf16_dp2", "tp2_s1_bf16_dp2", "hf_llama_s2_bf16_dp2",
    ], FORMS),
    ids=str,
)  # fmt: skip
@pytest.mark.every(5)
def test_nothing_of_a_deepspeed_checkpoint_is_lost(name, form):
    source = opened(open_checkpoint(FIXTURES / name))
    assert_same_state(read(written(source, "out", **form)), source)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ZRO)
def test_nothing_of_torchs_own_is_lost(name, form):
    source = consolidated(name)
    assert_same_state(read(written(source, "out", **form)), source)


def test_more_ranks_than_parameters_leave_some_without_any():
    source = consolidated("zro_dp3_sgdm_1g")
    out = written(source, "out", world_size=20)
    assert [torch.load(out / f"optimizer_rank_{rank}.pt")["param_groups"][0]["params"] for rank in (17, 19)] == [[], []]
    back = read(out)
    assert (back.world_size, back.topology.dp) == (20, 20)
    assert_same_state(back, source)


def test_masters_that_weights_do_not_hold_are_state():
    source = opened(open_checkpoint(FIXTURES / "s2_bf16_dp2"))
    out = written(source, "out", per_rank=False)
    state = torch.load(out / "optimizer.pt", weights_only=True)["state"]
    assert_same(state[0]["master"], source.read(source.param_groups[0].parameters[0], "master"))
    assert state[0]["step"].shape == ()
    exact = written(opened(open_checkpoint(FIXTURES / "s1_fp32_dp2")), "exact", per_rank=False)
    assert "master" not in torch.load(exact / "optimizer.pt", weights_only=True)["state"][0]


def test_owner_may_come_after_its_alias():
    source = consolidated("zro_dp2_adamw")
    source.parameters = dict(sorted(source.parameters.items(), key=lambda item: item[0] != "head.weight"))
    assert source.parameters["head.weight"].tied_to == "emb.weight"
    assert_same_state(read(written(source, "out")), source)
    zckpt.convert(source, "whole.pt", to="consolidated")
    assert_same_state(opened(torch_reader.read(Path("whole.pt"))), source)


def test_checkpoint_without_optimizer_comes_back_as_one():
    torch.save(torch.nn.Linear(3, 2).state_dict(), "m.pt")
    source = opened(torch_reader.read(Path("m.pt")))
    out = written(source, "out")
    assert sorted(path.name for path in out.iterdir()) == ["metadata.pt", "model.pt"]
    assert_same_state(read(out), source)


def test_names_are_not_needed_where_they_are_known():
    out = written(consolidated("zro_dp2_adamw"), "out")
    assert read(out, ["a", "b"]).warnings == ["--names is ignored: the directory has the names of the parameters"]


# --- parameters known by number only --------------------------------------------------------------------------------


def unnamed(path, *, model=True, optimizer=torch.optim.AdamW) -> OpenedCheckpoint:
    """Two of three equal layers are trained, and the file does not tell which."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(3)], torch.nn.Linear(4, 3))
    its = optimizer([network[0].weight, network[2].weight, *network[3].parameters()])
    _, trained = live.trained(network, its)
    root = {"model": network.state_dict(), "optimizer": trained.state_dict()}
    torch.save(root if model else root["optimizer"], path)
    return opened(torch_reader.read(path))


@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_number_stays_a_number(form, model):
    source = unnamed(Path("c.pt"), model=model)
    assert len(source.unnamed) == (2 if model else 4)
    back = read(written(source, "out", **form))
    assert_same_state(back, source)
    assert back.unnamed.keys() == source.unnamed.keys()
    for number, parameter in source.unnamed.items():
        for slot in parameter.slots:
            assert_same(back.read(number, slot), source.read(number, slot))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_names_from_the_user_name_it_later(form):
    out = written(unnamed(Path("c.pt")), "out", **form)
    names = ["0.weight", "2.weight", "3.weight", "3.bias"]
    back = read(out, names)
    assert back.unnamed == {}
    assert back.param_groups[0].parameters == names
    assert_same_state(back, opened(torch_reader.read(Path("c.pt"), names=names)))


def test_parameter_of_unknown_size_cannot_be_assigned():
    for optimizer in (torch.optim.SGD, torch.optim.Adafactor):
        source = unnamed(Path("c.pt"), model=False, optimizer=optimizer)
        with refusing(UnsupportedError, "the size of the optimizer's parameter 0 is unknown.*--names"):
            lay_out(source, world_size=2, per_rank=True)
        assert lay_out(source, world_size=2, per_rank=False)


# --- directories that are something else, or damaged ----------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ["epoch_0.pt", "epoch_1.pt"],
        ["optim_step_0.pt", "optim_step_1.pt"],
        ["optimizer-100.pt", "optimizer-200.pt"],
        ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
        ["rank0_step1.pt", "rank1_step2.pt"],
        ["rank0.pt", "rank00.pt"],
        ["c.pt"],
        ["rank0.pt"],
        [],
    ],
    ids=str,
)
def test_other_files_are_not_taken_for_ranks(names, tmp_path):
    model, optimizer = trained()
    for name in names:
        save_both(model, optimizer, tmp_path / name)
    assert find(Search(tmp_path)) is None


def test_ranks_files_of_something_else_are_not_taken(tmp_path):
    for rank in range(2):
        torch.save({"cpu": torch.get_rng_state()}, tmp_path / f"rng_rank{rank}.pt")
    assert find(Search(tmp_path)) is None
    assert find(Search(tmp_path / "rng_rank0.pt")) is None


def test_a_key_that_looks_like_a_pattern_speaks_for_itself_only():
    name = "zro_dp3_sgdm_1g"
    directory, model = ranks_without_model(name, Path("ranks"))
    for rank in range(3):
        own = {"model": {**model, **({"odd": "text"} if rank else {})}, "**": rank}
        changed(directory / f"zero_rank{rank}.pt", lambda root: root.update(own))  # noqa: B023
    checkpoint = zckpt.open(directory, names=names_of(name))
    assert checkpoint.metadata == {f"zero_rank{rank}.**": rank for rank in range(3)}
    with refusing(LeftOutError, "2 things in it would be lost: .*zero_rank1.pt:model/odd"):
        zckpt.convert(checkpoint, "out", to="zckpt")


def test_metadata_and_files_of_something_else_are_carried(three):
    torch.save({"epoch": 3}, three / "metadata.pt")
    torch.save({"last_epoch": 3, "base_lrs": [0.1]}, three / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, three / "rng.pt")
    checkpoint = zckpt.open(three, names=names_of("zro_dp3_sgdm_1g"))
    assert_truth(checkpoint, "zro_dp3_sgdm_1g")
    assert {"metadata", "scheduler", "rng"} <= checkpoint.metadata.keys()
    assert not take_inventory(checkpoint).left_out


@pytest.fixture
def three() -> Path:
    return ranks("zro_dp3_sgdm_1g", Path("ranks"))


def test_two_sets_of_files_are_refused(three):
    for rank in range(2):
        shutil.copy(three / "zero_rank0.pt", three / f"old_rank{rank}.pt")
    with refusing(UnknownFormatError, r"several sets .* found old_rank0.pt and zero_rank0.pt"):
        find(Search(three))


def test_two_models_are_refused(three):
    shutil.copy(three / "model.pt", three / "ema.pt")
    with refusing(UnknownFormatError, r"several files hold a model.* found ema.pt, model.pt"):
        read(three)


def test_missing_rank_is_named(three):
    (three / "zero_rank1.pt").unlink()
    with refusing(ShardError, "the file of rank 1 is missing: expected 3 files, found 2"):
        find(Search(three))
    shutil.copy(three / "zero_rank2.pt", three / "zero_rank1.pt")
    with refusing(ShardError, "zero_rank1.pt: has another rank: expected 1, found 2"):
        read(three)


def test_last_rank_that_is_missing_is_told_by_the_others(three):
    (three / "zero_rank2.pt").unlink()
    with refusing(ShardError, "has another world_size: expected 2, found 3"):
        read(three)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_missing_rank_of_ours_is_named(rank):
    out = written(consolidated("zro_dp2_adamw"), "out")
    (out / f"optimizer_rank_{rank}.pt").unlink()
    with refusing(ShardError, f"the file of rank {rank} is missing: expected 3 files, found 2"):
        read(out)


def test_ranks_of_different_steps_are_told():
    directory = ranks("zro_dp2_adamw", Path("ranks"))

    def older(root):
        for slots in root["optimizer"]["state"].values():
            slots["step"] -= 1

    changed(directory / "zero_rank1.pt", older)
    checkpoint = read(directory, names_of("zro_dp2_adamw"))
    assert checkpoint.warnings == [f"ranks have different steps for param group {g}" for g in (0, 1)]
    assert [group.state for group in checkpoint.param_groups] == [{}, {}]


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt"])
def test_missing_file_of_ours_is_refused(name):
    out = written(consolidated("zro_dp2_adamw"), "out", per_rank=False)
    (out / name).unlink()
    with pytest.raises(SourceError):
        read(out)


def test_ranks_that_changed_places_are_refused():
    out = written(consolidated("zro_dp2_adamw"), "out")
    (out / "optimizer_rank_0.pt").rename(out / "x")
    (out / "optimizer_rank_1.pt").rename(out / "optimizer_rank_0.pt")
    (out / "x").rename(out / "optimizer_rank_1.pt")
    with refusing(LayoutError, r"optimizer_rank_0.pt: "):
        read(out)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda o: o["param_groups"][0].update(lr=7.0), LayoutError, "param group 0 has another lr than rank 0's"),
        (lambda o: o["param_groups"][0].update(maximize=0), LayoutError, "has another maximize than rank 0's"),
        (
            lambda o: (o["param_groups"].pop(), o["state"].pop(5)),
            LayoutError,
            "other param groups than rank 0: expected 2",
        ),
        (
            lambda o: o["param_groups"][0]["params"].append(o["param_groups"][1]["params"].pop()),
            LayoutError,
            r"zero_rank\d.pt: does not hold the share of parameters that it was assigned",
        ),
        (lambda o: o["state"][0].update(exp_avg=torch.ones(5)), LayoutError, r"found \(5,\)|found \(64, 8\)"),
        (lambda o: o["state"].update({77: {}}), DamagedFileError, "state for a parameter that is in no group"),
        (lambda o: o.clear(), DamagedFileError, "expected one optimizer's state dict, as in rank 0's file"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(change, error, message):
    directory = ranks("zro_dp2_adamw", Path("ranks"))

    def both_slots(root):
        change(root["optimizer"])
        if 0 in root["optimizer"].get("state", {}):
            state = root["optimizer"]["state"][0]
            state["exp_avg_sq"] = state["exp_avg"]

    changed(directory / "zero_rank1.pt", both_slots)
    with pytest.raises(error, match=message):
        read(directory, names_of("zro_dp2_adamw"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.update(names=5), "a list of names"),
        (lambda about: about.update(names=[[5]]), "a list of names"),
        (lambda about: about["names"][0].append(about["names"][0][0]), "the optimizer has a parameter twice"),
        (lambda about: about["names"][0].reverse(), "optimizer_rank_0.pt: "),
        (lambda about: about["names"].pop(), "optimizer_rank_0.pt: "),
        (lambda about: about.update(shapes=[]), "expected a dict"),
        (lambda about: about.update(shapes={"a": [-1]}), "the shape of a"),
        (lambda about: about.update(held=[[[*range(len(about["names"][0]))]]]), "lists of parameters by rank"),
        (lambda about: about.update(names=[about["names"][0][:1]], held=[[0]]), "lists of parameters by rank"),
        (lambda about: about.update(world_size=2), "expected 2 ranks, found 3 files"),
        (lambda about: about.update(world_size=10**15), "the file of rank 3 is missing"),
        (lambda about: about.update(world_size=0), "expected 0 ranks"),
        (lambda about: about.update(world_size="3"), "expected 3 ranks"),
        (lambda about: about.update(world_size=None), "optimizer.pt"),
        (lambda about: about.clear(), "optimizer|a list of names"),
    ],
)
def test_metadata_that_is_wrong_is_refused(change, message):
    out = written(consolidated("zro_dp2_adamw"), "out")
    changed(out / "metadata.pt", lambda root: change(root["zero_redundancy"]))
    with refusing(SourceError, message):
        read(out)


@pytest.mark.parametrize("content", [5, [], None, "text"], ids=repr)
def test_metadata_of_another_type_is_refused(content):
    out = written(consolidated("zro_dp2_adamw"), "out", per_rank=False)
    changed(out / "metadata.pt", lambda root: root.update(zero_redundancy=content))
    with refusing(DamagedFileError, "expected a dict"):
        read(out)


def test_world_without_ranks_is_refused():
    with refusing(UsageError, "expected at least 1, found 0"):
        lay_out(consolidated("zro_dp2_adamw"), world_size=0, per_rank=True)


def test_own_names_are_those_that_are_written():
    source = consolidated("zro_dp2_adamw")
    for form in FORMS:
        assert all(OWNED.is_own(file.name) for file in lay_out(source, **form))
    for name in ("model.safetensors", "optimizer_rank_.pt", "zero_rank0.pt", "a/model.pt", "notes.txt"):
        assert not OWNED.is_own(name), name
