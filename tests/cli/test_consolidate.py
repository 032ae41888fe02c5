"""`zckpt consolidate`: every option's effect, every error's status, and that a target appears whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.cli.console import FIXTURES, command, copy, environment, inspected, refused, run, succeeded
from tests.pairwise import each, some
from tests.truth import Truth, bits

SOURCE = FIXTURES / "s2_bf16_dp2"
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CAST = [
    "s2_bf16_dp2", "s2_fp16_dp2", "s1_fp32_dp3", "s3_bf16_dp3", "s3_fp16_dp2", "s3_fp32_dp2", "s0_fp32_dp2",
    "s0_bf16_dp2", "s2_bf16_dp2_bf16master", "s2_bf16_dp2_rr", "moe_ep2_s2_bf16_dp2", "hf_llama_s2_bf16_dp2",
    "tp2_s1_bf16_dp2",
]  # fmt: skip


def model_of(truth: Truth, dtype: str | None) -> dict[str, torch.Tensor]:
    """What a consolidated model must hold, in torch's rounding; buffers and frozen parameters as they are."""
    expected = {}
    for name, weight in truth.weights.items():
        if name in truth.buffers:
            continue
        master = truth.masters.get(name)
        if name in truth.frozen or master is None or dtype == "keep":
            expected[name] = weight
        else:
            expected[name] = master.to(TORCH_DTYPES[dtype or "float32"])
    for alias, owner in truth.tied.items():
        if owner in expected:
            expected[alias] = expected[owner]
    return expected


def assert_model(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], truth: Truth) -> None:
    assert set(found) == set(expected) | set(truth.buffers)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(bits(found[name]), bits(value)), name
    for name, value in truth.buffers.items():
        assert torch.equal(bits(found[name]), value), name


def names_of(name: str, directory: Path) -> tuple[object, ...]:
    """The option that says what the optimizer's numbers are, where a file does not tell."""
    if name != "s0_fp32_dp2":
        return ()
    path = directory / "names.txt"
    path.write_text("\n".join(Truth(FIXTURES / name).numbers.values()))
    return ("--names", path)


def nothing_in(directory: Path) -> bool:
    return not any(directory.iterdir())


# --- what is written


@pytest.mark.parametrize(("name", "dtype"), each(CAST, [None, "float32", "bfloat16", "float16", "keep"]))
@pytest.mark.every(2)
def test_dtype_is_rounded_as_torch_rounds_it(name, dtype, tmp_path):
    truth = Truth(FIXTURES / name)
    options = (*names_of(name, tmp_path), *(() if dtype is None else ("--dtype", dtype)))
    succeeded("consolidate", FIXTURES / name, tmp_path / "model.safetensors", *options)
    assert_model(load_file(tmp_path / "model.safetensors"), model_of(truth, dtype), truth)


@pytest.mark.parametrize(("dtype", "suffix"), each(["float32", "bfloat16", "keep"], ["pt", "bin", "pth"]))
def test_torch_file_holds_the_same_and_loads_weights_only(suffix, dtype, tmp_path):
    truth, path = Truth(SOURCE), tmp_path / f"model.{suffix}"
    succeeded("consolidate", SOURCE, path, "--dtype", dtype)
    assert_model(torch.load(path, weights_only=True), model_of(truth, dtype), truth)


@pytest.mark.parametrize("name", ["s3_bf16_dp4", "moe_ep2_s2_fp32_dp4", "tp2_s3_bf16_dp2", "s1_bf16_dp2_empty"])
def test_torch_file_of_any_layout_is_the_truth(name, tmp_path):
    truth = Truth(FIXTURES / name)
    succeeded("consolidate", FIXTURES / name, tmp_path / "model.pt")
    assert_model(torch.load(tmp_path / "model.pt", weights_only=True), model_of(truth, None), truth)


# --- tied parameters


@pytest.mark.parametrize("target", ["model.safetensors", "model.pt", "model"])
def test_tied_drop_writes_the_owner_only(target, tmp_path):
    done = succeeded("consolidate", SOURCE, tmp_path / target, "--tied", "drop", "--json")
    model = read_model(tmp_path / target)
    assert "emb.weight" in model
    assert "head.weight" not in model
    assert json.loads(done.stdout)["num_tensors"] == len(model)


def read_model(path: Path) -> dict[str, torch.Tensor]:
    if path.is_dir():
        return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def test_tied_parameters_share_their_storage_in_a_torch_file(tmp_path):
    """Which can be mapped, has names in the model's order, and without --slots is alone."""
    for tied in ("duplicate", "drop"):
        succeeded("consolidate", SOURCE, tmp_path / f"{tied}.pt", "--tied", tied)
    assert {path.name for path in tmp_path.iterdir()} == {"duplicate.pt", "drop.pt"}
    model, truth = torch.load(tmp_path / "duplicate.pt", weights_only=True, mmap=True), Truth(SOURCE)
    assert_model(model, model_of(truth, None), truth)
    shapes = truth.facts["shapes"]
    assert [name for name in model if name in shapes] == [name for name in shapes if name in model]
    assert model["head.weight"].data_ptr() == model["emb.weight"].data_ptr()
    larger, smaller = ((tmp_path / f"{tied}.pt").stat().st_size for tied in ("duplicate", "drop"))
    assert larger - smaller < model["emb.weight"].nbytes


# --- frozen parameters


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s3_bf16_dp2", "s1_fp32_dp2", "s0_bf16_dp2", "s0_fp32_dp2"])
def test_exclude_frozen_leaves_out_frozen_parameters_and_nothing_else(name, tmp_path):
    truth = Truth(FIXTURES / name)
    options = ("--exclude-frozen", *names_of(name, tmp_path))
    succeeded("consolidate", FIXTURES / name, tmp_path / "model.safetensors", *options)
    model = load_file(tmp_path / "model.safetensors")
    assert set(truth.weights) - set(model) == set(truth.frozen)
    assert set(truth.buffers) <= set(model)


def test_trained_parameters_without_certain_names_are_not_taken_for_frozen(tmp_path):
    truth, options = Truth(FIXTURES / "s0_fp32_dp2"), ("--exclude-frozen", "--dtype", "bfloat16")
    succeeded("consolidate", FIXTURES / "s0_fp32_dp2", tmp_path / "model.safetensors", *options)
    model = load_file(tmp_path / "model.safetensors")
    for name in truth.masters:
        assert model[name].dtype == torch.bfloat16


# --- a directory


@pytest.mark.parametrize("size", ["1KB", "3000", "2KiB", "1GB", "1"])
def test_directory_is_cut_into_shards_of_at_most_the_size(size, tmp_path):
    truth, limit = Truth(SOURCE), {"1KB": 1000, "3000": 3000, "2KiB": 2048, "1GB": 10**9, "1": 1}[size]
    target = tmp_path / "model"
    succeeded("consolidate", SOURCE, target, "--max-shard-size", size)
    if size == "1GB":
        assert [p.name for p in target.iterdir()] == ["model.safetensors"]
        assert_model(load_file(target / "model.safetensors"), model_of(truth, None), truth)
        return
    index = json.loads((target / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert sorted(p.name for p in target.iterdir()) == [*names, "model.safetensors.index.json"]
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    found = {}
    for name in names:
        shard = load_file(target / name)
        assert sum(t.nbytes for t in shard.values()) <= limit or len(shard) == 1
        assert all(index["weight_map"][key] == name for key in shard)
        found.update(shard)
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert_model(found, model_of(truth, None), truth)


def test_optimizer_of_a_directory_is_inside_it(tmp_path):
    succeeded("consolidate", SOURCE, tmp_path / "model", "--slots", "all")
    assert (tmp_path / "model" / "optimizer.safetensors").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


# --- slots


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--slots", "exp_avg"), {"exp_avg"}),
        (("--slots", "exp_avg_sq,exp_avg"), {"exp_avg", "exp_avg_sq"}),
        (("--slots", "exp_avg", "--slots", "exp_avg_sq"), {"exp_avg", "exp_avg_sq"}),
        (("--slots", "master"), {"master"}),
        (("--slots", "all", "--dtype", "bfloat16"), {"master", "exp_avg", "exp_avg_sq"}),
    ],
)
def test_slots_that_are_named_are_written(options, expected, tmp_path):
    succeeded("consolidate", SOURCE, tmp_path / "model.safetensors", *options)
    optimizer = load_file(tmp_path / "model.optimizer.safetensors")
    assert {key.split("/")[0] for key in optimizer} == expected
    truth = Truth(SOURCE)
    for key, value in optimizer.items():
        slot, name = key.split("/", 1)
        assert torch.equal(bits(value), bits(truth.tensors[f"{slot.replace('master', 'fp32')}/{name}"]))


def test_optimizer_metadata_has_every_groups_hyperparameters_and_step(tmp_path):
    succeeded("consolidate", SOURCE, tmp_path / "model.safetensors", "--slots", "all")
    with safe_open(tmp_path / "model.optimizer.safetensors", "pt") as file:
        metadata = file.metadata()
    facts = Truth(SOURCE).facts
    groups = json.loads(metadata["param_groups"])
    assert len(groups) == 3
    for found, expected, order in zip(groups, facts["param_groups"], facts["order"], strict=True):
        assert {key: found[key] for key in expected} == expected
        assert found["state"]["step"] == 5
        assert found["parameters"] == order
    assert json.loads(metadata["step"]) == 5


@pytest.mark.parametrize("slots", ["momentum", "exp_avg,momentum", "weight", "all,momentum"])
def test_unknown_slot_is_refused_with_the_slots_there_are(slots, tmp_path):
    refused(2, "consolidate", SOURCE, tmp_path / "model.safetensors", "--slots", slots, words=("exp_avg", "exp_avg_sq"))
    assert nothing_in(tmp_path)


def test_slots_of_a_model_without_optimizer_are_refused(tmp_path):
    succeeded("consolidate", SOURCE, tmp_path / "model.safetensors")
    refused(2, "consolidate", tmp_path / "model.safetensors", tmp_path / "again.safetensors", "--slots", "all")


@pytest.mark.parametrize("suffix", some([".safetensors", ".PT"], [".pt", ".bin", ".pth"]))
def test_the_optimizers_file_is_named_after_the_target(suffix, tmp_path):
    for name in ("a", "b", "optimizer"):
        succeeded("consolidate", SOURCE, tmp_path / f"{name}{suffix}", "--slots", "all")
    names = {f"{one}{suffix}" for name in ("a", "b", "optimizer") for one in (name, f"{name}.optimizer")}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_overwriting_one_target_leaves_the_optimizer_of_another_alone(suffix, tmp_path):
    """Also the one that an earlier zckpt wrote, under a name that all targets shared."""
    for name in ("a", "b"):
        succeeded("consolidate", SOURCE, tmp_path / f"{name}{suffix}", "--slots", "all")
    (tmp_path / f"optimizer{suffix}").write_bytes(b"an earlier zckpt's")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    succeeded("consolidate", FIXTURES / "s3_fp32_dp2", tmp_path / f"b{suffix}", "--slots", "all", "--overwrite")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == after.keys()
    assert {name for name in after if after[name] != before[name]} == {f"b{suffix}", f"b.optimizer{suffix}"}


@pytest.mark.parametrize("beside", ["m.optimizer.safetensors", "m.safetensors.fingerprint.json"])
def test_what_belongs_to_the_old_target_is_not_left_beside_a_new_one(beside, tmp_path):
    succeeded("consolidate", SOURCE, tmp_path / "m.safetensors", "--slots", "all")
    succeeded("fingerprint", tmp_path / "m.safetensors", "--write")
    others = {"m.optimizer.safetensors", "m.safetensors.fingerprint.json"} - {beside}
    for other in others:
        (tmp_path / other).unlink()
    before = (tmp_path / "m.safetensors").read_bytes()
    words = (beside, "would be taken for the new file's")
    refused(4, "consolidate", FIXTURES / "s3_fp32_dp2", tmp_path / "m.safetensors", "--overwrite", words=words)
    assert (tmp_path / "m.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        (("consolidate",), "m.safetensors"), (("consolidate",), "m"),
        (("convert", "--to", "consolidated"), "m.pt"), (("convert", "--to", "zckpt"), "m"),
        (("reshard", "--world-size", 3), "m"), (("strip", "--optimizer"), "m"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dry", [False, True])
def test_a_fifo_is_not_replaced(dry, verb, name, tmp_path):
    os.mkfifo(tmp_path / name)
    options = (*verb[1:], "--overwrite", *(["--dry-run"] if dry else []))
    refused(4, verb[0], SOURCE, tmp_path / name, *options, words=("cannot be replaced", "found a FIFO"))
    assert (tmp_path / name).is_fifo()


OTHERS = ["gguf", "onnx", "h5", "npz", "ckpt", "pkl", "GGUF", "tar.gz", "msgpack", "json", "safetensor"]


@pytest.mark.parametrize(("suffix", "verb"), each(OTHERS, [("consolidate",), ("convert", "--to", "consolidated")]))
def test_names_of_other_programs_files_are_refused(verb, suffix, tmp_path):
    words = (Path(f"m.{suffix}").suffix.lower(), "x.safetensors", "x.pt", "directory")
    refused(2, verb[0], SOURCE, tmp_path / f"m.{suffix}", *verb[1:], words=words)
    assert nothing_in(tmp_path)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "v1.5", "run.2024-01-01", "gguf", ".hidden"])
def test_names_with_a_dot_are_names_of_directories(name, tmp_path):
    succeeded("consolidate", SOURCE, tmp_path / name)
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("name", ["M.SafeTensors", "M.PT"])
def test_case_of_a_suffix_does_not_matter(name, tmp_path):
    succeeded("consolidate", SOURCE, tmp_path / name)
    assert (tmp_path / name).is_file()
    assert inspected(tmp_path / name)["format"] == ("torch" if name == "M.PT" else "safetensors")


# --- names, root and tag


def test_names_file_names_the_optimizers_parameters(tmp_path):
    directory = FIXTURES / "s0_fp32_dp2"
    truth = Truth(directory)
    assert inspected(directory)["unnamed"]
    names = names_of("s0_fp32_dp2", tmp_path)
    succeeded("consolidate", directory, tmp_path / "model.safetensors", "--slots", "all", *names)
    optimizer = load_file(tmp_path / "model.optimizer.safetensors")
    for slot in truth.slots:
        for name, value in truth.kind(slot).items():
            assert torch.equal(bits(optimizer[f"{slot}/{name}"]), bits(value)), name


def test_names_that_do_not_fit_are_refused(tmp_path):
    source, target = FIXTURES / "s0_fp32_dp2", tmp_path / "m.safetensors"
    option, listed = names_of(source.name, tmp_path)
    names = listed.read_text().split()
    for others in (names[:-1], [names[0], *names[:-1]], ["nobody", *names[1:]], [names[1], names[0], *names[2:]]):
        listed.write_text("\n".join(others))
        refused(2, "consolidate", source, target, "--slots", "all", option, listed)
        assert list(tmp_path.iterdir()) == [listed]


# --- the weight check


def damaged_master(tmp_path: Path) -> tuple[Path, str]:
    """A checkpoint in which the first master of rank 1 is changed, in bytes."""
    directory = copy("s2_bf16_dp2", tmp_path)
    truth = Truth(SOURCE)
    shard = directory / "global_step5" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    value = truth.masters["unused.weight"].numpy().tobytes()
    data = shard.read_bytes()
    assert data.count(value) == 1
    shard.write_bytes(data.replace(value, (truth.masters["unused.weight"] + 1).numpy().tobytes()))
    return directory, "unused.weight"


def test_no_weight_check_takes_masters_as_they_are(tmp_path):
    directory, name = damaged_master(tmp_path)
    succeeded("consolidate", directory, tmp_path / "m.safetensors", "--no-weight-check", "--no-checksums")
    model = load_file(tmp_path / "m.safetensors")
    assert torch.equal(model[name], Truth(SOURCE).masters[name] + 1)


def test_weight_check_comes_before_a_dry_run_too(tmp_path):
    directory, name = damaged_master(tmp_path)
    refused(3, "consolidate", directory, tmp_path / "m.safetensors", "--dry-run", words=(name,))


# --- memory


def test_memory_bound_changes_nothing_in_the_result_and_is_reported(tmp_path):
    options = ("--dtype", "bfloat16", "--json")
    succeeded("consolidate", SOURCE, tmp_path / "default.safetensors", *options)
    for memory, nbytes in (("1", 1), ("100KB", 100_000), ("1GiB", 1 << 30)):
        target = tmp_path / f"{memory}.safetensors"
        done = succeeded("consolidate", SOURCE, target, *options, "--memory", memory)
        assert target.read_bytes() == (tmp_path / "default.safetensors").read_bytes()
        assert json.loads(done.stdout)["memory_nbytes"] == nbytes


@pytest.mark.parametrize("size", ["0", "-1", "abc", "1XB", "", "9" * 400, "9" * 5000 + "GB", "1e5", "0.0"])
@pytest.mark.parametrize("option", ["--memory", "--max-shard-size"])
def test_size_that_is_none_is_refused(option, size, tmp_path):
    done = run("consolidate", SOURCE, tmp_path / "m.safetensors", f"{option}={size}")
    assert done.returncode == 2
    assert option in done.stderr
    assert nothing_in(tmp_path)


# --- the target


@pytest.mark.parametrize("target", ["model.safetensors", "model.pt", "model"])
def test_overwrite_replaces_the_target(target, tmp_path):
    path = tmp_path / target
    succeeded("consolidate", FIXTURES / "s3_fp32_dp2", path, "--max-shard-size", "1KB", "--slots", "all")
    names = {p.name for p in tmp_path.iterdir()}
    succeeded("consolidate", SOURCE, path, "--overwrite", *(("--slots", "all") if path.is_file() else ()))
    truth = Truth(SOURCE)
    assert_model(read_model(path), model_of(truth, None), truth)
    assert {p.name for p in tmp_path.iterdir()} == names


def test_existing_optimizer_file_is_refused_before_the_model_is_written(tmp_path):
    (tmp_path / "m.optimizer.safetensors").write_bytes(b"precious")
    refused(4, "consolidate", SOURCE, tmp_path / "m.safetensors", "--slots", "all", words=("m.optimizer.safetensors",))
    assert [p.name for p in tmp_path.iterdir()] == ["m.optimizer.safetensors"]
    assert (tmp_path / "m.optimizer.safetensors").read_bytes() == b"precious"


# --- what is printed where


def test_warnings_are_shown_and_in_the_document(tmp_path):
    elastic = FIXTURES / "s2_bf16_dp2_elastic"
    assert "warning: " in succeeded("consolidate", elastic, tmp_path / "a.safetensors").stderr
    document = json.loads(succeeded("consolidate", elastic, tmp_path / "b.safetensors", "--json").stdout)
    assert any("elastic" in warning for warning in document["warnings"])


def on_a_terminal(*arguments: object, status: int = 0) -> tuple[str, str]:
    """Standard output of a process whose standard error is a terminal, and what the terminal got."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=slave, env=environment()) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            shown += chunk
        output, _ = process.communicate()
    os.close(master)
    assert process.returncode == status, shown
    return output.decode(), shown.decode()


def test_bar_is_drawn_on_a_terminal_only_and_does_not_disturb_the_document(tmp_path):
    output, shown = on_a_terminal("consolidate", SOURCE, tmp_path / "a.safetensors", "--json")
    assert json.loads(output)["dry_run"] is False
    assert "100%" in shown
    assert "%" not in succeeded("consolidate", SOURCE, tmp_path / "b.safetensors").stderr
    assert on_a_terminal("consolidate", SOURCE, tmp_path / "c.safetensors", "--quiet") == ("", "")


def test_what_takes_long_before_there_is_a_bar_is_told_on_a_terminal(tmp_path):
    arguments = ("consolidate", SOURCE, tmp_path / "a.safetensors", "--map", "transformers")  # it has no config.json
    assert "takes some seconds" in on_a_terminal(*arguments, status=2)[1]
    assert "takes some seconds" not in on_a_terminal(*arguments, "--quiet", status=2)[1]
    assert "takes some seconds" not in run(*arguments).stderr


# --- errors


@pytest.mark.parametrize("target", ["m.safetensors", "m.pt", "m"])
def test_source_that_was_cut_short_is_status_3_and_leaves_nothing(target, tmp_path):
    path = tmp_path / "model.safetensors"
    succeeded("consolidate", SOURCE, path)
    os.truncate(path, path.stat().st_size - 100)
    refused(3, "consolidate", path, tmp_path / target, words=(str(path),))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "arguments",
    [("--dtype", "int8"), ("--tied", "both"), ("--frobnicate",), ("--dtype",), ("more",), ("--tag", "x", "--tag")],
)
def test_unusable_arguments_have_status_2_and_one_line(arguments, tmp_path):
    refused(2, "consolidate", SOURCE, tmp_path / "m.safetensors", *arguments)
    assert nothing_in(tmp_path)


def test_optimizer_without_model_is_refused(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    refused(2, "consolidate", tmp_path / "optimizer.pt", tmp_path / "m.safetensors", words=("no model",))
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer.pt"]


# --- interruption


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose conversion in the smallest pieces takes a while."""
    path = tmp_path_factory.mktemp("large") / "large.pt"
    torch.save({f"layer{i}.weight": torch.zeros(1_000_000) for i in range(20)}, path)
    return path


def started(*arguments: object, target: Path) -> subprocess.Popen[str]:
    """A process that has begun to write its target."""
    process = subprocess.Popen(
        command(*arguments, target, "--dtype", "bfloat16", "--memory", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        # a test run in the background ignores interrupts, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    partial = target.with_name(f".{target.name}.zckpt-partial")
    while not any(path.is_file() and path.stat().st_size for path in [partial, *partial.glob("*")]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    return process


@pytest.mark.parametrize(("kind", "name"), each([signal.SIGINT, signal.SIGTERM], ["m.safetensors", "m"]))
def test_interrupted_run_leaves_in_order_and_says_what_is_left(name, kind, large, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    process = started("consolidate", large, target=out / name)
    process.send_signal(kind)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 128 + kind
    assert output == ""
    assert len(error.strip().splitlines()) == 1  # after the line that the terminal has the ^C in
    left = {path.name for path in out.iterdir()}
    if "nothing was left behind" in error:
        assert not left
    else:
        assert left == {f".{name}.zckpt-partial", f".{name}.zckpt-journal"}
        assert f"kept in .{name}.zckpt-partial: --resume continues with them, --restart starts over" in error
    succeeded("consolidate", SOURCE, out / name, "--restart")
    assert [p.name for p in out.iterdir()] == [name]
    truth = Truth(SOURCE)
    assert_model(read_model(out / name), model_of(truth, None), truth)


def test_reader_that_goes_away_does_not_undo_the_work(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(
            command("consolidate", SOURCE, tmp_path / "m.safetensors", "--json"),
            stdout=pipe,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    assert done.stderr == b""
    assert (tmp_path / "m.safetensors").is_file()


def test_a_directory_without_a_configuration_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    said = "no config.json was found"
    assert said in succeeded("consolidate", FIXTURES / "s2_bf16_dp2", tmp_path / "model").stderr
    options = ("--config", tmp_path)
    assert said not in succeeded("consolidate", FIXTURES / "s2_bf16_dp2", tmp_path / "other", *options).stderr
    assert said not in succeeded("consolidate", FIXTURES / "s2_bf16_dp2", tmp_path / "one.safetensors").stderr


@pytest.mark.parametrize("target", ["x.pt", "x.safetensors", "x"])
@pytest.mark.parametrize(
    ("name", "key"), [("own_blockwise_s3_fp32_dp2", "--dequantize"), ("own_lamb_s2_fp32_dp2", "--drop")]
)
def test_an_optimizer_of_which_each_rank_has_its_own_state_is_not_written_without_it(name, key, target, tmp_path):
    refused(
        5, "consolidate", FIXTURES / name, tmp_path / target, "--slots", "all", words=("each rank has its own", key)
    )
    assert not list(tmp_path.iterdir())
    more = ("--dequantize",) if key == "--dequantize" else tuple(f"--drop={one}" for one in ("trust_ratio", "*_norm"))
    succeeded("consolidate", FIXTURES / name, tmp_path / "x.safetensors", "--slots", "all", *more)
    assert {one.partition("/")[0] for one in load_file(tmp_path / "x.optimizer.safetensors")} == {
        "exp_avg",
        "exp_avg_sq",
    }


def test_an_average_of_such_optimizers_is_not_written_either(tmp_path):
    source = FIXTURES / "own_blockwise_s3_fp32_dp2"
    words = ("each rank has its own",)
    refused(5, "average", source, source, "--target", tmp_path / "x.pt", "--slots", "all", words=words)
    assert not list(tmp_path.iterdir())


def test_param_groups_without_hyperparameters_are_not_written_for_torch(tmp_path):
    source, given = FIXTURES / "s2_bf16_dp2_elastic", tmp_path / "groups.json"
    refused(5, "consolidate", source, tmp_path / "x.pt", "--slots", "all", words=("hyperparameters", "FILE"))
    assert not list(tmp_path.iterdir())
    given.write_text(json.dumps(Truth(source).facts["param_groups"]))
    succeeded("consolidate", source, tmp_path / "x.pt", "--slots", "all", "--hyperparameters", given)
    groups = torch.load(tmp_path / "x.optimizer.pt", weights_only=True)["param_groups"]
    assert [tuple(one["betas"]) for one in groups] == [
        tuple(one["betas"]) for one in Truth(source).facts["param_groups"]
    ]
    for name, more in (("s2_bf16_dp2", ("--slots", "all")), ("s2_bf16_dp2_elastic", ())):
        refused(2, "consolidate", FIXTURES / name, tmp_path / "y.pt", *more, "--hyperparameters", given)
    assert "torch's optimizers" in succeeded("convert", source, tmp_path / "dcp", "--to", "dcp").stderr
