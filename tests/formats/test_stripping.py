"""Files without the bytes that no tensor uses and without optimizer state: real torch loads the same values."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import zckpt
from tests.cli.console import FIXTURES
from tests.live import save_both, step, trained
from tests.logical import assert_same_tree
from tests.refusals import refusing
from tests.truth import bits
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.stripping import kept_ranges, shares
from zckpt.operations.strip import strip
from zckpt.state.boxes import without

RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)).map(lambda one: (one[0], sum(one))), max_size=12)


# --- which bytes go


@given(RANGES, st.sampled_from([1, 2, 4, 8, 16]))
def test_every_used_byte_is_kept_in_order_and_on_its_alignment(used, alignment):
    kept = kept_ranges(used, 256, alignment)
    wanted = sorted({byte for low, high in used for byte in range(low, high)})
    places = [kept.place(byte) for byte in wanted]
    assert all(b - a <= y - x for a, b, x, y in zip(places, places[1:], wanted, wanted[1:], strict=False))
    assert len(set(places)) == len(places)
    assert all(place % alignment == byte % alignment for place, byte in zip(places, wanted, strict=True))
    for low, high in used:
        if low < high:
            assert kept.place(high - 1) - kept.place(low) == high - 1 - low
    removed = without([(0, 256)], kept.ranges)
    assert kept.nbytes + sum(high - low for low, high in removed) == 256
    if alignment == 1:
        assert kept.nbytes == len(wanted)


@given(RANGES, st.lists(st.tuples(RANGES, st.sampled_from("abc")), max_size=4))
def test_each_byte_is_counted_for_one_owner(kept, owners):
    removed = without([(0, 256)], kept_ranges(kept, 256, 1).ranges)
    owned = [(low, high, name) for ranges, name in owners for low, high in ranges if low < high]
    found = shares(removed, owned)
    bytes_removed = {byte for low, high in removed for byte in range(low, high)}
    everyones = {byte for low, high, _ in owned for byte in range(low, high)} & bytes_removed
    assert sum(found.values()) == len(everyones)
    for name, count in found.items():
        assert 0 < count <= len({b for low, high, n in owned if n == name for b in range(low, high)} & bytes_removed)


# --- bytes that no tensor uses


def stripped(*, weights_only=True, **options) -> tuple[Any, Any]:
    """Strip `whole.pt`, and return what torch loads and what was said, which is what is saved."""
    source, target = Path("whole.pt"), Path("thin.pt")
    done = strip(source, target, **options)
    assert sum(done.saved.values()) == source.stat().st_size - target.stat().st_size
    return torch.load(target, weights_only=weights_only), done


def unreferenced(tree, **options) -> tuple[Any, Any]:
    """Save a tree, strip it, and return what torch loads and what was said."""
    torch.save(tree, "whole.pt", **options)
    loaded, done = stripped(unreferenced=True, weights_only=False)
    assert zckpt.open("thin.pt").files[0].unreferenced_nbytes == 0
    return loaded, done


def test_views_of_a_large_buffer_keep_what_they_reach():
    buffer = torch.randn(100_000)
    tree = {
        "first": buffer[10:20].view(2, 5),
        "again": buffer[10:20],
        "overlapping": buffer[15:30],
        "transposed": buffer[1000:1012].view(3, 4).t(),
        "every_third": buffer[2000:2030:3],
        "expanded": buffer[3000:3001].expand(7),
        "point": buffer[4000],
        "empty": buffer[5000:5000],
        "last": buffer[-3:],
    }
    loaded, done = unreferenced(tree)
    for name, value in tree.items():
        assert torch.equal(bits(loaded[name]), bits(value)), name
        assert loaded[name].stride() == value.stride(), name
    reach = 20 + 12 + 28 + 1 + 1 + 3
    assert done.saved["unreferenced"] == (100_000 - reach) * 4
    assert loaded["first"].untyped_storage().nbytes() == reach * 4


def test_tensors_that_share_memory_still_do():
    buffer = torch.arange(1000.0)
    loaded, _ = unreferenced({"a": buffer[100:110], "b": buffer[105:115], "c": buffer[900:910]})
    loaded["a"][5:] = -1
    assert loaded["b"].tolist() == [-1.0] * 5 + [110.0, 111, 112, 113, 114]
    assert loaded["c"].tolist() == list(range(900, 910))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64,
                                   torch.uint16, torch.float8_e4m3fn], ids=str)  # fmt: skip
def test_every_type_is_cut(dtype):
    buffer = torch.randint(0, 2, (500,)).to(dtype)
    loaded, done = unreferenced({"w": buffer[33:40], "x": torch.ones(1)})
    assert torch.equal(bits(loaded["w"]), bits(buffer[33:40]))
    assert done.saved["unreferenced"] == 493 * buffer.element_size()


def test_tensors_are_found_wherever_they_are():
    buffer = torch.arange(1000.0)
    shared = (buffer[1:3], [buffer[5:7]])
    parameter = torch.nn.Parameter(buffer[10:12])
    parameter.note = {"inner": buffer[20:22]}
    linear = torch.nn.Linear(2, 1)
    linear.weight = torch.nn.Parameter(buffer[40:42].view(1, 2))
    loop = [buffer[30:31]]
    loop.append(loop)
    tree = {
        "tuples": (shared, (shared,)),
        "parameter": parameter,
        "module": linear,
        "ordered": OrderedDict(a=buffer[50:51]),
        "sparse": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), buffer[60:62], (3,)),
        "quantized": torch.quantize_per_tensor(torch.arange(9.0), 0.5, 1, torch.quint8)[3:6],
        "conjugate": torch.complex(buffer, buffer)[70:72].conj(),
        "loop": loop,
        "keys": {buffer[90:91]: {buffer[95:96]}},
        "model": {"w": buffer[80:81]},
    }
    loaded, done = unreferenced(tree)
    assert done.saved["unreferenced"] > 3000
    first, (second,) = loaded["tuples"]
    assert first is second
    assert first[0].tolist() == [1, 2]
    assert first[1][0].tolist() == [5, 6]
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert loaded["parameter"].tolist() == [10, 11]
    assert loaded["parameter"].note["inner"].tolist() == [20, 21]
    assert loaded["module"].weight.tolist() == [[40, 41]]
    assert loaded["ordered"]["a"].tolist() == [50]
    assert torch.equal(loaded["sparse"].to_dense(), tree["sparse"].to_dense())
    assert torch.equal(loaded["quantized"].dequantize(), tree["quantized"].dequantize())
    assert torch.equal(loaded["conjugate"].resolve_conj(), tree["conjugate"].resolve_conj())
    assert loaded["loop"][0].tolist() == [30]
    assert loaded["loop"][1] is loaded["loop"]
    assert [(key.tolist(), [one.tolist() for one in its]) for key, its in loaded["keys"].items()] == [([90], [[95]])]
    whole = loaded["tuples"][0][0].untyped_storage().data_ptr()
    assert loaded["ordered"]["a"].untyped_storage().data_ptr() == whole


def test_a_storage_by_itself_is_all_used():
    buffer = torch.arange(100.0)
    torch.save({"model": {"w": buffer[:2]}, "bare": buffer._typed_storage()}, "whole.pt")
    loaded, done = stripped(unreferenced=True)
    assert done.saved == {}
    assert loaded["bare"].nbytes() == 400
    assert loaded["model"]["w"].tolist() == [0, 1]


def test_a_file_of_which_nothing_goes_is_copied():
    torch.save({"w": torch.ones(3)}, "whole.pt", _use_new_zipfile_serialization=True)
    _, done = stripped(unreferenced=True, padding=True)
    assert done.saved == {}
    assert Path("thin.pt").read_bytes() == Path("whole.pt").read_bytes()
    assert any("no padding" in note for note in done.notes)


def test_files_of_the_time_before_zip_archives_are_stripped():
    buffer = torch.randn(50_000)
    loaded, done = unreferenced({"w": buffer[7:9]}, _use_new_zipfile_serialization=False)
    assert torch.equal(loaded["w"], buffer[7:9])
    assert done.saved["unreferenced"] == 49_998 * 4


def test_bytes_of_the_other_order_come_out_right(torch_file):
    """A machine with the most significant byte first wrote the file; what is left of it is written as here."""
    values, counts = torch.arange(100.0), torch.arange(100, dtype=torch.int32).to(torch.uint32)
    tree = {"w": values[3:6], "n": counts[7:9]}
    path = torch_file({"w": swapped(values)[3:6], "n": swapped(counts)[7:9]})
    with zipfile.ZipFile(path) as before, zipfile.ZipFile("big.pt", "w") as after:
        for name in before.namelist():
            after.writestr(name, b"big" if name.endswith("/byteorder") else before.read(name))
    done = strip(Path("big.pt"), Path("thin.pt"), unreferenced=True)
    assert_same_tree(torch.load("thin.pt", weights_only=True), tree)
    assert done.saved["unreferenced"] == 97 * 4  # an untyped storage is not cut up


def swapped(tensor) -> torch.Tensor:
    return torch.from_numpy(tensor.numpy().byteswap().copy())


@pytest.mark.parametrize("name", ["plain_adamw", "plain_bf16", "plain_mixed", "plain_proto4"])
def test_plain_files_lose_nothing_that_counts(name, tmp_path):
    source = next((FIXTURES / "other" / name).glob("*.pt"))
    strip(source, tmp_path / "thin.pt", unreferenced=True)
    thin, whole = (torch.load(path, weights_only=False) for path in (tmp_path / "thin.pt", source))
    assert list(thin) == list(whole)
    assert_same_tree(thin, whole)


# --- optimizer state


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model after three steps, saved with its optimizer."""
    model, optimizer = trained(torch.nn.Linear(3, 2), lr=0.25, steps=3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save({**state, "rest": ["as", {"it": torch.arange(2)}]}, "whole.pt")
    return model, optimizer


def test_optimizer_state_goes_and_hyperparameters_stay():
    model, optimizer = training()
    loaded, done = stripped(optimizer=True)
    assert {key: done.saved[key] for key in ("exp_avg", "exp_avg_sq", "step")} == {
        "exp_avg": 32, "exp_avg_sq": 32, "step": 8,
    }  # fmt: skip
    assert_same_tree(loaded["model"], dict(model.state_dict()))
    assert loaded["optimizer"]["state"] == {}
    assert_same_tree(loaded["rest"], ["as", {"it": torch.arange(2)}])
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not optimizer.state
    step(model, optimizer, (2, 3))
    assert {float(one["step"]) for one in optimizer.state.values()} == {1.0}


def test_slots_by_name_stay_with_the_step():
    _, optimizer = training()
    found, before = stripped(keep_slots=["exp_avg"])[0]["optimizer"], optimizer.state_dict()
    wanted = {at: {key: one[key] for key in ("step", "exp_avg")} for at, one in before["state"].items()}
    assert_same_tree(found["state"], wanted)
    assert found["param_groups"] == before["param_groups"]
    assert stripped(keep_slots=["master"], overwrite=True)[0]["optimizer"]["state"] == {}  # no slots at all


def test_every_optimizer_of_a_file_is_stripped():
    """Lightning keeps a list of them; here one more is deep in another dict."""
    model, optimizer = training()
    state = optimizer.state_dict()
    tree = {"state_dict": model.state_dict(), "optimizer_states": [state, state], "loops": {"deep": {"opt": state}}}
    torch.save(tree, "whole.pt")
    loaded, _ = stripped(optimizer=True)
    assert [one["state"] for one in (*loaded["optimizer_states"], loaded["loops"]["deep"]["opt"])] == [{}, {}, {}]
    assert_same_tree(loaded["state_dict"], dict(model.state_dict()))


def test_slots_of_parameters_without_dimensions_are_slots():
    model = torch.nn.ParameterDict({"p": torch.tensor(1.0), "o": torch.ones(2)})
    optimizer = torch.optim.Adam(model.parameters())
    (model["p"] * model["o"].sum()).backward()
    optimizer.step()
    save_both(model, optimizer, "whole.pt")
    loaded, _ = stripped(keep_slots=["exp_avg_sq"])
    assert [set(one) for one in loaded["optimizer"]["state"].values()] == [{"exp_avg_sq", "step"}] * 2


# --- directories


def test_a_consolidated_directory_keeps_the_model_as_it_is():
    zckpt.convert(FIXTURES / "s2_bf16_dp2", "whole", to="consolidated")
    strip(Path("whole"), Path("thin"), keep_slots=["exp_avg"])
    whole, thin = zckpt.open("whole"), zckpt.open("thin")
    assert set(whole.slot_names()) - set(thin.slot_names()) >= {"exp_avg_sq"}
    assert list(thin.parameters) == list(whole.parameters)
    for name, parameter in thin.parameters.items():
        for slot in set(parameter.slots) & {"weight", "exp_avg", "master"}:
            assert torch.equal(bits(thin.read(name, slot)), bits(whole.read(name, slot)))


def test_slots_of_a_safetensors_file_beside_a_model():
    source = Path("whole/optimizer.safetensors")
    zckpt.consolidate(FIXTURES / "s2_bf16_dp2", "whole", slots="all")
    Path("whole/notes.txt").write_text("kept")
    done = strip(Path("whole"), Path("thin"), optimizer=True)
    assert not Path("thin", source.name).exists()
    assert Path("thin/notes.txt").read_text() == "kept"
    assert sum(done.saved.values()) == source.stat().st_size
    assert done.saved["exp_avg"] == done.saved["exp_avg_sq"] > 0
    strip(Path("whole"), Path("one"), keep_slots=["exp_avg"])
    kept = {key: one for key, one in load_file(source).items() if key.startswith("exp_avg/")}
    assert_same_tree(load_file(Path("one", source.name)), kept)


@pytest.mark.parametrize("name", ["zro_dp2_adamw", "zro_dp3_sgdm_1g"])
def test_files_of_a_zero_redundancy_optimizer(name):
    source = FIXTURES / "other" / name / "ckpt"
    strip(source, Path("thin"), optimizer=True)
    for path in source.glob("*.pt"):
        loaded = torch.load(Path("thin", path.name), weights_only=False)
        whole = torch.load(path, weights_only=False)
        for one, other in zip(optimizers(loaded), optimizers(whole), strict=True):
            assert one["state"] == {}
            assert one["param_groups"] == other["param_groups"]


def optimizers(node) -> list[Any]:
    if isinstance(node, dict) and {"state", "param_groups"} <= node.keys():
        return [node]
    below = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return [found for one in below for found in optimizers(one)]


# --- refusals


def test_nothing_and_unknown_slots_are_answered_with_what_could_go():
    training()
    with refusing(UsageError, r"--padding \(0 bytes\), --optimizer \(.* bytes\).*exp_avg, exp_avg_sq"):
        stripped()
    with refusing(UsageError, r"no slot momentum: expected .*exp_avg, exp_avg_sq"):
        stripped(keep_slots=["exp_avg", "momentum"])


def test_a_format_that_nothing_is_taken_out_of_is_refused(tmp_path):
    source = next(path for path in (FIXTURES / "other" / "mcore_bf16_plain_tp2").iterdir() if path.is_dir())
    with refusing(UnsupportedError, "found megatron"):
        strip(source, tmp_path / "thin", optimizer=True)
    assert list(tmp_path.iterdir()) == []
