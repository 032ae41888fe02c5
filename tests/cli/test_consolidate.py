"""`zckpt consolidate`: every option's effect, every error's status, and that a target appears whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.cli.console import FIXTURES, command, copy, environment, inspected, on_terminal, printed, refused, succeeded
from tests.folders import contents, names_in
from tests.live import trained
from tests.logical import assert_same_tree
from tests.pairwise import each, some
from tests.truth import Truth, bits

SOURCE = "fixtures/s2_bf16_dp2"
TRUTH = Truth(FIXTURES / "s2_bf16_dp2")
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


def read_model(path: str) -> dict[str, torch.Tensor]:
    if Path(path).is_dir():
        files = [file for file in Path(path).glob("*.safetensors") if file.name != "optimizer.safetensors"]
        return {name: value for file in files for name, value in load_file(file).items()}
    return load_file(path) if path.lower().endswith(".safetensors") else torch.load(path, weights_only=True)


def assert_model(path: str, name: str = "s2_bf16_dp2", dtype: str | None = None) -> None:
    """A file or a directory holds what a fixture's consolidated model must, bit for bit."""
    found, truth = read_model(path), Truth(FIXTURES / name)
    assert_same_tree({key: bits(found.pop(key)) for key in truth.buffers}, truth.buffers)
    assert_same_tree(found, model_of(truth, dtype))


def names_of(name: str) -> str:
    """The option that says what the optimizer's numbers are, where a file does not tell."""
    if name != "s0_fp32_dp2":
        return ""
    Path("names.txt").write_text("\n".join(Truth(FIXTURES / name).numbers.values()))
    return "--names names.txt"


# --- what is written


@pytest.mark.parametrize(("name", "dtype"), each(CAST, [None, "float32", "bfloat16", "float16", "keep"]))
@pytest.mark.every(2)
def test_dtype_is_rounded_as_torch_rounds_it(name, dtype):
    options = f"--dtype {dtype}" if dtype else ""
    succeeded(f"consolidate fixtures/{name} model.safetensors", names_of(name), options)
    assert_model("model.safetensors", name, dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "suffix"),
    [
        *[("s2_bf16_dp2", *one) for one in (("float32", "pt"), ("bfloat16", "bin"), ("keep", "pth"))],
        *[(name, "float32", "pt") for name in ("s3_bf16_dp4", "moe_ep2_s2_fp32_dp4", "tp2_s3_bf16_dp2",
                                               "s1_bf16_dp2_empty")],
    ],
)  # fmt: skip
def test_torch_file_holds_the_same_and_loads_weights_only(name, dtype, suffix):
    succeeded(f"consolidate fixtures/{name} model.{suffix} --dtype {dtype}")
    assert_model(f"model.{suffix}", name, dtype)


# --- tied parameters


@pytest.mark.parametrize("target", ["model.safetensors", "model.pt", "model"])
def test_tied_drop_writes_the_owner_only(target):
    done = printed(f"consolidate {SOURCE} {target} --tied drop")
    model = read_model(target)
    assert {"emb.weight", "head.weight"} & model.keys() == {"emb.weight"}
    assert done["num_tensors"] == len(model)


def test_tied_parameters_share_their_storage_in_a_torch_file():
    """Which can be mapped, has names in the model's order, and without --slots is alone."""
    for tied in ("duplicate", "drop"):
        succeeded(f"consolidate {SOURCE} {tied}.pt --tied {tied}")
    assert names_in() == ["drop.pt", "duplicate.pt"]
    assert_model("duplicate.pt")
    model, shapes = torch.load("duplicate.pt", weights_only=True, mmap=True), TRUTH.facts["shapes"]
    assert [name for name in model if name in shapes] == [name for name in shapes if name in model]
    assert model["head.weight"].data_ptr() == model["emb.weight"].data_ptr()
    larger, smaller = (Path(f"{tied}.pt").stat().st_size for tied in ("duplicate", "drop"))
    assert larger - smaller < model["emb.weight"].nbytes


# --- frozen parameters


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s3_bf16_dp2", "s1_fp32_dp2", "s0_bf16_dp2", "s0_fp32_dp2"])
def test_exclude_frozen_leaves_out_frozen_parameters_and_nothing_else(name):
    truth = Truth(FIXTURES / name)
    succeeded(f"consolidate fixtures/{name} model.safetensors --exclude-frozen", names_of(name))
    model = load_file("model.safetensors")
    assert set(truth.weights) - set(model) == set(truth.frozen)
    assert set(truth.buffers) <= set(model)


def test_trained_parameters_without_certain_names_are_not_taken_for_frozen():
    succeeded("consolidate fixtures/s0_fp32_dp2 model.safetensors --exclude-frozen --dtype bfloat16")
    model = load_file("model.safetensors")
    assert {model[name].dtype for name in Truth(FIXTURES / "s0_fp32_dp2").masters} == {torch.bfloat16}


# --- a directory


def test_directory_of_one_shard_has_no_index_and_its_optimizer_inside():
    succeeded(f"consolidate {SOURCE} model --max-shard-size 1GB --slots all")
    assert names_in("model") == ["model.safetensors", "optimizer.safetensors"]
    assert names_in() == ["model"]
    assert_model("model")


@pytest.mark.parametrize(("size", "limit"), [("1KB", 1000), ("3000", 3000), ("2KiB", 2048), ("1", 1)])
def test_directory_is_cut_into_shards_of_at_most_the_size(size, limit):
    succeeded(f"consolidate {SOURCE} model --max-shard-size {size}")
    index = json.loads(Path("model/model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names_in("model") == [*names, "model.safetensors.index.json"]
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    shards = {name: load_file(f"model/{name}") for name in names}
    sizes = {name: sum(tensor.nbytes for tensor in shard.values()) for name, shard in shards.items()}
    assert all(sizes[name] <= limit or len(shard) == 1 for name, shard in shards.items())
    assert index["weight_map"] == {key: name for name, shard in shards.items() for key in shard}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert_model("model")


# --- slots


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--slots exp_avg", {"exp_avg"}),
        ("--slots exp_avg_sq,exp_avg", {"exp_avg", "exp_avg_sq"}),
        ("--slots exp_avg --slots exp_avg_sq", {"exp_avg", "exp_avg_sq"}),
        ("--slots master", {"master"}),
        ("--slots all --dtype bfloat16", {"master", "exp_avg", "exp_avg_sq"}),
    ],
)
def test_slots_that_are_named_are_written(options, expected):
    succeeded(f"consolidate {SOURCE} model.safetensors {options}")
    optimizer = load_file("model.optimizer.safetensors")
    assert {key.split("/")[0] for key in optimizer} == expected
    for key, value in optimizer.items():
        assert torch.equal(bits(value), bits(TRUTH.tensors[key.replace("master/", "fp32/")])), key


def test_optimizer_metadata_has_every_groups_hyperparameters_and_step():
    succeeded(f"consolidate {SOURCE} model.safetensors --slots all")
    with safe_open("model.optimizer.safetensors", "pt") as file:
        metadata = file.metadata()
    groups = json.loads(metadata["param_groups"])
    assert len(groups) == 3
    for found, expected, order in zip(groups, TRUTH.facts["param_groups"], TRUTH.facts["order"], strict=True):
        assert {key: found[key] for key in expected} == expected
        assert found["state"]["step"] == 5
        assert found["parameters"] == order
    assert json.loads(metadata["step"]) == 5


def test_slots_of_a_model_without_optimizer_are_refused():
    succeeded(f"consolidate {SOURCE} model.safetensors")
    refused(2, "consolidate model.safetensors again.safetensors --slots all")


@pytest.mark.parametrize("suffix", some([".safetensors", ".PT"], [".pt", ".bin", ".pth"]))
def test_the_optimizers_file_is_named_after_the_target(suffix):
    for name in ("a", "b", "optimizer"):
        succeeded(f"consolidate {SOURCE} {name}{suffix} --slots all")
    names = [f"{one}{suffix}" for name in ("a", "b", "optimizer") for one in (name, f"{name}.optimizer")]
    assert names_in() == sorted(names)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_overwriting_one_target_leaves_the_optimizer_of_another_alone(suffix):
    """Also the one that an earlier zckpt wrote, under a name that all targets shared."""
    for name in ("a", "b"):
        succeeded(f"consolidate {SOURCE} {name}{suffix} --slots all")
    Path(f"optimizer{suffix}").write_bytes(b"an earlier zckpt's")
    before = contents()
    succeeded(f"consolidate fixtures/s3_fp32_dp2 b{suffix} --slots all --overwrite")
    after = contents()
    assert before.keys() == after.keys()
    assert {name for name in after if after[name] != before[name]} == {f"b{suffix}", f"b.optimizer{suffix}"}


@pytest.mark.parametrize("beside", ["m.optimizer.safetensors", "m.safetensors.fingerprint.json"])
def test_what_belongs_to_the_old_target_is_not_left_beside_a_new_one(beside):
    succeeded(f"consolidate {SOURCE} m.safetensors --slots all")
    succeeded("fingerprint m.safetensors --write")
    (other,) = {"m.optimizer.safetensors", "m.safetensors.fingerprint.json"} - {beside}
    Path(other).unlink()
    before = contents()
    words = (beside, "would be taken for the new file's")
    refused(4, "consolidate fixtures/s3_fp32_dp2 m.safetensors --overwrite", words=words)
    assert contents() == before


@pytest.mark.parametrize(
    ("verb", "name", "options"),
    [
        ("consolidate", "m.safetensors", ""), ("consolidate", "m", ""), ("convert", "m.pt", "--to consolidated"),
        ("convert", "m", "--to zckpt"), ("reshard", "m", "--world-size 3"), ("strip", "m", "--optimizer"),
    ],
)  # fmt: skip
def test_a_fifo_is_not_replaced(verb, name, options):
    os.mkfifo(name)
    for more in ("", "--dry-run"):
        command = f"{verb} {SOURCE} {name} {options} --overwrite {more}"
        refused(4, command, words=("cannot be replaced", "found a FIFO"))
    assert Path(name).is_fifo()


OTHERS = ["gguf", "onnx", "h5", "npz", "ckpt", "pkl", "GGUF", "tar.gz", "msgpack", "json", "safetensor"]


@pytest.mark.parametrize(("suffix", "verb"), each(OTHERS, ["consolidate", "convert --to consolidated"]))
def test_names_of_other_programs_files_are_refused(verb, suffix):
    words = (Path(f"m.{suffix}").suffix.lower(), "x.safetensors", "x.pt", "directory")
    refused(2, f"{verb} {SOURCE} m.{suffix}", words=words)
    assert names_in() == []


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "v1.5", "run.2024-01-01", "gguf", ".hidden"])
def test_names_with_a_dot_are_names_of_directories(name):
    succeeded(f"consolidate {SOURCE} {name}")
    assert Path(name).is_dir()


@pytest.mark.parametrize(("name", "kind"), [("M.SafeTensors", "safetensors"), ("M.PT", "torch")])
def test_case_of_a_suffix_does_not_matter(name, kind):
    succeeded(f"consolidate {SOURCE} {name}")
    assert Path(name).is_file()
    assert inspected(name)["format"] == kind


# --- names


def test_names_file_names_the_optimizers_parameters():
    truth = Truth(FIXTURES / "s0_fp32_dp2")
    assert inspected("fixtures/s0_fp32_dp2")["unnamed"]
    succeeded("consolidate fixtures/s0_fp32_dp2 model.safetensors --slots all", names_of("s0_fp32_dp2"))
    optimizer = load_file("model.optimizer.safetensors")
    for slot in truth.slots:
        for name, value in truth.kind(slot).items():
            assert torch.equal(bits(optimizer[f"{slot}/{name}"]), bits(value)), name


def test_names_that_do_not_fit_are_refused():
    option, listed = names_of("s0_fp32_dp2"), Path("names.txt")
    names = listed.read_text().split()
    for others in (names[:-1], [names[0], *names[:-1]], ["nobody", *names[1:]], [names[1], names[0], *names[2:]]):
        listed.write_text("\n".join(others))
        refused(2, "consolidate fixtures/s0_fp32_dp2 m.safetensors --slots all", option)
        assert names_in() == ["names.txt"]


# --- the weight check


def test_the_weight_check_comes_before_a_dry_run_too_and_without_it_masters_are_taken_as_they_are():
    name, directory = "unused.weight", copy("s2_bf16_dp2")
    shard = directory / "global_step5/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    value, changed = TRUTH.masters[name], TRUTH.masters[name] + 1
    data = shard.read_bytes()
    assert data.count(value.numpy().tobytes()) == 1
    shard.write_bytes(data.replace(value.numpy().tobytes(), changed.numpy().tobytes()))
    refused(3, "consolidate s2_bf16_dp2 m.safetensors --dry-run", words=name)
    succeeded("consolidate s2_bf16_dp2 m.safetensors --no-weight-check --no-checksums")
    assert torch.equal(load_file("m.safetensors")[name], changed)


# --- memory


def test_memory_bound_changes_nothing_in_the_result_and_is_reported():
    command = f"consolidate {SOURCE} --dtype bfloat16"
    succeeded(command, "default.safetensors")
    for memory, nbytes in (("1", 1), ("100KB", 100_000), ("1GiB", 1 << 30)):
        assert printed(command, f"{memory}.safetensors --memory {memory}")["memory_nbytes"] == nbytes
        assert Path(f"{memory}.safetensors").read_bytes() == Path("default.safetensors").read_bytes()


# --- the target


@pytest.mark.parametrize("target", ["model.safetensors", "model.pt", "model"])
def test_overwrite_replaces_the_target(target):
    succeeded(f"consolidate fixtures/s3_fp32_dp2 {target} --max-shard-size 1KB --slots all")
    names = names_in()
    succeeded(f"consolidate {SOURCE} {target} --overwrite", "" if target == "model" else "--slots all")
    assert_model(target)
    assert names_in() == names


def test_existing_optimizer_file_is_refused_before_the_model_is_written():
    Path("m.optimizer.safetensors").write_bytes(b"precious")
    refused(4, f"consolidate {SOURCE} m.safetensors --slots all", words="m.optimizer.safetensors")
    assert contents() == {"m.optimizer.safetensors": b"precious"}


# --- what is printed where


def test_warnings_are_shown_and_in_the_document():
    elastic = "consolidate fixtures/s2_bf16_dp2_elastic"
    assert "warning: " in succeeded(elastic, "a.safetensors").stderr
    document = printed(elastic, "b.safetensors")
    assert any("elastic" in warning for warning in document["warnings"])


def test_bar_is_drawn_on_a_terminal_only_and_does_not_disturb_the_document():
    assert "100%" in on_terminal(f"consolidate {SOURCE} a.safetensors --json", output="said")
    assert json.loads(Path("said").read_text())["dry_run"] is False
    assert "%" not in succeeded(f"consolidate {SOURCE} b.safetensors").stderr
    assert on_terminal(f"consolidate {SOURCE} c.safetensors --quiet", output="said") == Path("said").read_text() == ""
    assert names_in() == [*(f"{name}.safetensors" for name in "abc"), "said"]


def test_what_takes_long_before_there_is_a_bar_is_told_on_a_terminal():
    command, said = f"consolidate {SOURCE} a.safetensors --map transformers", "takes some seconds"  # and then fails
    assert said in on_terminal(command, output="said")
    assert said not in on_terminal(command, "--quiet", output="said")
    assert said not in refused(2, command, words="config.json")


# --- errors


@pytest.mark.parametrize("target", ["m.safetensors", "m.pt", "m"])
def test_source_that_was_cut_short_is_status_3_and_leaves_nothing(target):
    succeeded(f"consolidate {SOURCE} model.safetensors")
    os.truncate("model.safetensors", Path("model.safetensors").stat().st_size - 100)
    refused(3, f"consolidate model.safetensors {target}", words="model.safetensors")
    assert names_in() == ["model.safetensors"]


SIZES = ("0", "-1", "abc", "1XB", "", "9" * 400, "9" * 5000 + "GB", "1e5", "0.0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[(f"--slots {one}", ("exp_avg", "exp_avg_sq"))
          for one in ("momentum", "exp_avg,momentum", "weight", "all,momentum")],
        *[(f"{option}={size}", option) for option in ("--memory", "--max-shard-size") for size in SIZES],
        *[(options, ()) for options in ("--dtype int8", "--tied both", "--frobnicate", "--dtype", "more",
                                        "--tag x --tag")],
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_and_nothing_is_written(options, words):
    refused(2, f"consolidate {SOURCE} m.safetensors {options}", words=words)
    assert names_in() == []


def test_optimizer_without_model_is_refused():
    _, optimizer = trained(torch.nn.Linear(3, 1))
    torch.save(optimizer.state_dict(), "optimizer.pt")
    refused(2, "consolidate optimizer.pt m.safetensors", words="no model")
    assert names_in() == ["optimizer.pt"]


# --- interruption


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose conversion in the smallest pieces takes a while."""
    path = tmp_path_factory.mktemp("large") / "large.pt"
    torch.save({f"layer{i}.weight": torch.zeros(1_000_000) for i in range(20)}, path)
    return path


def started(*arguments: object, target: str) -> subprocess.Popen[str]:
    """A process that has begun to write its target."""
    process = subprocess.Popen(
        command(*arguments, target, "--dtype bfloat16 --memory 1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        # a test run in the background ignores interrupts, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    partial = Path(f".{target}.zckpt-partial")
    while not any(path.is_file() and path.stat().st_size for path in [partial, *partial.glob("*")]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    return process


@pytest.mark.parametrize(("kind", "name"), each([signal.SIGINT, signal.SIGTERM], ["m.safetensors", "m"]))
def test_interrupted_run_leaves_in_order_and_says_what_is_left(name, kind, large):
    process = started("consolidate", large, target=name)
    process.send_signal(kind)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 128 + kind
    assert output == ""
    assert len(error.strip().splitlines()) == 1  # after the line that the terminal has the ^C in
    if "nothing was left behind" in error:
        assert names_in() == []
    else:
        assert names_in() == [f".{name}.zckpt-journal", f".{name}.zckpt-partial"]
        assert f"kept in .{name}.zckpt-partial: --resume continues with them, --restart starts over" in error
    succeeded(f"consolidate {SOURCE} {name} --restart")
    assert names_in() == [name]
    assert_model(name)


def test_reader_that_goes_away_does_not_undo_the_work():
    read, write = os.pipe()
    os.close(read)
    words = command(f"consolidate {SOURCE} m.safetensors --json")
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, env=environment(), check=False)
    assert done.stderr == b""
    assert Path("m.safetensors").is_file()


def test_a_directory_without_a_configuration_says_so():
    Path("config.json").write_text("{}")
    said = "no config.json was found"
    assert said in succeeded(f"consolidate {SOURCE} model").stderr
    assert said not in succeeded(f"consolidate {SOURCE} other --config .").stderr
    assert said not in succeeded(f"consolidate {SOURCE} one.safetensors").stderr


@pytest.mark.parametrize(
    ("name", "key", "more"),
    [
        ("own_blockwise_s3_fp32_dp2", "--dequantize", "--dequantize"),
        ("own_lamb_s2_fp32_dp2", "--drop", "--drop=trust_ratio --drop=*_norm"),
    ],
)
def test_an_optimizer_of_which_each_rank_has_its_own_state_is_not_written_without_it(name, key, more):
    for target in ("x.pt", "x.safetensors", "x"):
        words = ("each rank has its own", key)
        refused(5, f"consolidate fixtures/{name} {target} --slots all", words=words)
    refused(5, f"average fixtures/{name} fixtures/{name} --target x.pt --slots all", words="each rank has its own")
    assert names_in() == []
    succeeded(f"consolidate fixtures/{name} x.safetensors --slots all {more}")
    assert {one.partition("/")[0] for one in load_file("x.optimizer.safetensors")} == {"exp_avg", "exp_avg_sq"}


def test_param_groups_without_hyperparameters_are_not_written_for_torch():
    elastic, given = "fixtures/s2_bf16_dp2_elastic", "--hyperparameters groups.json"
    refused(5, f"consolidate {elastic} x.pt --slots all", words=("hyperparameters", "FILE"))
    assert names_in() == []
    expected = Truth(FIXTURES / "s2_bf16_dp2_elastic").facts["param_groups"]
    Path("groups.json").write_text(json.dumps(expected))
    succeeded(f"consolidate {elastic} x.pt --slots all {given}")
    groups = torch.load("x.optimizer.pt", weights_only=True)["param_groups"]
    assert [tuple(one["betas"]) for one in groups] == [tuple(one["betas"]) for one in expected]
    refused(2, f"consolidate {SOURCE} y.pt --slots all {given}")
    refused(2, f"consolidate {elastic} y.pt {given}")
    assert "torch's optimizers" in succeeded(f"convert {elastic} dcp --to dcp").stderr
