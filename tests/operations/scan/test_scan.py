"""`zckpt scan`: what it says of files that are none of an attacker's, how it counts, and its documents."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from tests.cli.console import FIXTURES, ROOT, inspected, refused, run, succeeded
from tests.operations.scan import corpus
from tests.pairwise import some
from tests.test_safety import called, named, poisoned, text
from zckpt.torchfile.grades import DATA_GLOBALS, grade


@pytest.mark.parametrize("under", some(["other"], [""]))
def test_real_checkpoints_have_data_and_known_classes_of_the_program_that_wrote_it_only(under):
    found = zckpt.scan(FIXTURES / under)
    assert found.grade in ("data", "known"), [one for one in found.findings if one["grade"] not in ("data", "known")]
    needed = {one["program"] for one in found.findings if one["grade"] == "known"}
    assert needed == {"Accelerate", "DeepSpeed", "Megatron", "OLMo-core", "nanotron", "torch.distributed.checkpoint",
                      "torchao", "transformers"}  # fmt: skip
    assert not [one for one in found.findings if one["message"]]


SOUND = {
    "numpy": pickle.dumps({"rng": np.random.default_rng(0), "old": np.random.RandomState(0), "a": np.arange(5)}),
    "protocol 0": pickle.dumps({"a": [1, 2.5, "x", None, (1,)]}, 0),
    "large frames": pickle.dumps([list(range(100_000)), b"x" * 100_000, {"a": "b" * 70_000}], 5),
    "containers": pickle.dumps([OrderedDict(a=1), Counter("abc"), {1, 2}, frozenset({3}), Path("/x"), 1 + 2j]),
    "text": b"import os\nos.system('true')\n",
    "text like GLOBAL": b"curl -L\nwget\n",
    "list of words": b"cat\ndog\nbird\n",
    "README": (ROOT / "README.md").read_bytes(),
    "empty": b"",
    "zeros": bytes(1000),
    "JSON": b'{"a": "cos\\nsystem\\n"}',
    "random": np.random.default_rng(1).bytes(100_000),
    "gzip of text": gzip.compress(b"hello\n" * 100),
    "npy": corpus.npy(b"")[:-1].replace(b"|O", b"<i") + bytes(8),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_is_harmless_is_not_told_of(case):
    Path("file.bin").write_bytes(SOUND[case])
    found = zckpt.scan(".")
    assert found.grade == ("known" if case == "numpy" else "data"), found.findings


@pytest.mark.parametrize(("at", "new", "grade"), [(124, b"9" * 11, "unknown"), (148, b"000000", "dangerous")])
def test_what_lies_behind_a_tar_archives_header_that_is_none_is_looked_at(at, new, grade):
    """Its size is no number; or its checksum is wrong, and readers may go on to the next one."""
    root = b"N." if grade == "unknown" else b"cos\nsystem\n(S'x'\ntR."
    Path("file.tar").write_bytes(corpus.patched(corpus.tar(root), b"storages", at, new))
    assert zckpt.scan(".").grade == grade


def test_streams_and_dictionaries_take_no_time_or_memory_beyond_their_data():
    """Thousands of streams, one behind another; and a record that asks LZMA for four gigabytes."""
    Path("many.gz").write_bytes(gzip.compress(b"hello\n" * 100) * 3000)
    assert zckpt.scan(".").grade == "data"
    Path("xz").write_bytes(b"\x5d" + b"\xff" * 12 + bytes(64))
    assert zckpt.scan("xz").grade in ("data", "unknown")


def test_tensors_of_any_bits_are_no_pickles():
    """Storages of random bytes, with all opcodes first in some of them."""
    generator = np.random.default_rng(0)
    tensors = [torch.from_numpy(generator.integers(0, 256, 64, dtype=np.uint8)) for _ in range(1000)]
    for number in range(256):
        tensors[number][0] = number
    for is_zip in (True, False):
        torch.save(tensors, "m.pt", _use_new_zipfile_serialization=is_zip)
        found = zckpt.scan("m.pt")
        assert found.grade == "data", found.findings
    Path("raw").mkdir()
    for number, one in enumerate(tensors[:300]):
        Path("raw", str(number)).write_bytes(one.numpy().tobytes())
    assert zckpt.scan("raw").grade == "data"


def test_names_and_calls_are_counted():
    again = b"q\x01]h\x01a" + b"0h\x01(" + text("x") + b"tR" * 1
    Path("m.pkl").write_bytes(named("a.b:C") + again + named("a.b:C") + b"0" + named("a.b:d") + b"00" + b"N.")
    found = {one["global"]: (one["named"], one["called"], one["grade"]) for one in zckpt.scan(".").findings
             if one["global"]}  # fmt: skip
    assert found == {"a.b.C": (2, 1, "unknown"), "a.b.d": (1, 0, "unknown")}


@pytest.mark.parametrize(
    ("module", "name", "program"),
    [
        ("torch.torch_version", "TorchVersion", "torch"),
        ("sentence_transformers.sentence_transformer.training_args", "SentenceTransformerTrainingArguments",
         "sentence-transformers"),
        ("sentence_transformers.training_args", "SentenceTransformerTrainingArguments", "sentence-transformers"),
        ("sentence_transformers.base.sampler", "BatchSamplers", "sentence-transformers"),
        ("llamafactory.hparams.training_args", "TrainingArguments", "LLaMA-Factory"),
        ("swift.trainers.arguments", "Seq2SeqTrainingArguments", "ms-swift"),
        ("axolotl.core.training_args", "AxolotlTrainingArguments", "axolotl"),
        ("trl.trainer.grpo_config", "GRPOConfig", "TRL"),
    ],
)  # fmt: skip
def test_what_programs_put_into_every_checkpoint_is_known(module, name, program):
    Path("training_args.bin").write_bytes(called(named(f"{module}:{name}")) + b".")
    (found,) = zckpt.scan(".").findings
    assert (found["grade"], found["program"]) == ("known", program)
    Path("training_args.bin").write_bytes(called(named(f"{module}:{name.lower()}")) + b".")
    assert zckpt.scan(".").grade == "unknown"


def test_attributes_of_classes_are_classes_and_getattr_says_nothing():
    inner = called(named("__builtin__:getattr"), named("torch.distributed._shard.sharded_tensor.api:ShardedTensor"),
                   text("ProcessGroupState"))  # fmt: skip
    Path("m.pkl").write_bytes(called(inner) + b".")
    found = zckpt.scan(".")
    assert (found.grade, [one["called"] for one in found.findings]) == ("known", [0, 1])
    for what in (named("torch.nn:functional"), called(named("builtins:object"))):
        Path("m.pkl").write_bytes(called(named("builtins:getattr"), what, text("__globals__")) + b".")
        assert zckpt.scan(".").grade == "dangerous"


@pytest.mark.filterwarnings("ignore")
def test_items_of_dcp_are_found_where_metadata_says_and_between():
    dcp.save({"w": torch.ones(3), "o": {1, 2}}, checkpoint_id="dcp", no_dist=True)
    found = zckpt.scan("dcp")
    assert found.grade == "known"
    records = {one["record"].partition(":")[0] for one in found.findings if one["file"].endswith(".distcp")}
    assert records == {"w", "o"}
    (items,) = Path("dcp").glob("*.distcp")
    items.write_bytes(items.read_bytes() + corpus.archive(corpus.system("sentinel") + b"."))
    assert zckpt.scan("dcp").grade == "dangerous"
    Path("dcp/.metadata").unlink()
    assert zckpt.scan("dcp").grade == "dangerous"


def test_what_cannot_be_looked_at_is_told():
    Path("there").mkdir()
    Path("link").symlink_to("there")
    os.mkfifo("pipe")
    Path("gone").symlink_to("nowhere")
    found = zckpt.scan(".")
    assert {one["file"]: one["grade"] for one in found.findings} == dict.fromkeys(("link", "pipe", "gone"), "unknown")


def test_names_of_files_are_any_bytes():
    name = os.fsdecode(b"\xff \n.pkl")
    Path(name).write_bytes(corpus.system("sentinel") + b".")
    for options in ("", "--json", "--sarif ../s.sarif --overwrite"):
        assert run("scan .", options).returncode == 1
    assert "%FF%20%0A.pkl" in Path("../s.sarif").read_text()


def test_what_is_too_large_to_be_followed_is_dangerous(monkeypatch):
    monkeypatch.setattr("zckpt.torchfile.scanning.MAX_PICKLE", 1 << 12)
    Path("m.pkl").write_bytes(b"N0" * 5000 + corpus.system("sentinel") + b".")
    assert zckpt.scan(".").grade == "dangerous"


def test_archives_of_numpy():
    np.savez("a.npz", a=np.arange(3))
    assert zckpt.scan(".").grade == "data"
    np.savez_compressed("a.npz", a=np.arange(3))
    assert zckpt.scan(".").grade == "unknown"
    np.savez_compressed("a.npz", a=np.array([corpus.Path("x"), print], dtype=object))
    assert zckpt.scan(".").grade == "dangerous"


def test_links_to_files_are_followed():
    Path("blob").write_bytes(corpus.system("sentinel") + b".")
    Path("snapshot").mkdir()
    Path("snapshot/model.bin").symlink_to("../blob")
    assert zckpt.scan("snapshot").grade == "dangerous"


def test_exit_statuses_and_text():
    source = poisoned(called(named("os:system"), text("true")))
    done = run(f"scan {source}")
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if line.startswith("dangerous"))
    assert line.split()[:4] == ["dangerous", "os.system", "2", "2"]
    assert line.endswith("data.pkl and 1 more")
    assert (run(f"scan {source} --quiet").stdout, run(f"scan {source} -q").returncode) == ("", 1)
    assert succeeded("scan fixtures/s2_bf16_dp2").stdout.splitlines()[0].endswith(": known")
    refused(3, "scan", "absent", words="absent")
    assert json.loads(run(f"scan {source} --json").stdout) == zckpt.scan(source).as_dict()


def test_sarif():
    """The members that SARIF 2.1.0 requires, and how they refer to each other."""
    source = poisoned(called(named("os:system"), text("true")))
    (source / "odd name.pkl").write_bytes(called(named("evil:Class")) + b"." + b"tail")
    assert run(f"scan {source} --sarif s.sarif").returncode == 1
    refused(4, "scan", source, "--sarif", "s.sarif", words="exists")
    assert run(f"scan {source} --sarif s.sarif --overwrite").returncode == 1
    document = json.loads(Path("s.sarif").read_text())
    assert document["version"] == "2.1.0"
    assert document["$schema"].endswith("sarif-schema-2.1.0.json")
    (one,) = document["runs"]
    rules = one["tool"]["driver"]["rules"]
    assert one["tool"]["driver"]["name"]
    assert [rule["id"] for rule in rules] == ["known", "unknown", "dangerous"]
    assert all(rule["shortDescription"]["text"] for rule in rules)
    levels = Counter(result["level"] for result in one["results"])
    assert (levels["error"], levels["warning"]) == (2, 2)
    assert levels.keys() == {"error", "warning", "note"}
    for result in one["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        for location in result["locations"]:
            uri = location["physicalLocation"]["artifactLocation"]["uri"]
            assert " " not in uri
    assert any(result["message"]["text"] == "calls os.system" for result in one["results"])


def test_inspect_shows_the_grades_of_globals():
    source = poisoned(called(named("os:system"), text("true")))
    text_ = succeeded(f"inspect {source} --globals").stdout
    assert "os.system  dangerous" in text_
    assert "deepspeed.runtime.fp16.loss_scaler.LossScaler  known" in text_
    assert "os.system" in inspected(f"{source} --globals")["files"][0]["globals"]["data.pkl"]


def test_names_of_data_lead_to_no_other_object():
    """No name of data has a dot, and every one that this Python has makes values and calls nothing it is given."""
    assert all("." not in name for _, name in DATA_GLOBALS)
    assert grade("torch", "float32") == ("data", None)
    assert grade("torch", "float32.__class__") == ("dangerous", None)
    assert grade("collections", "OrderedDict.fromkeys")[0] == "unknown"


def test_hostile_names_of_records_and_globals_are_shown_as_they_are():
    Path("m.pt").write_bytes(corpus.archive(b"N.", **{"x/\x1b[31m\nx.pkl": called(b"ca\x1b[2J\nb\n") + b"."}))
    done = run("scan . --sarif out.sarif")
    assert "\x1b" not in done.stdout
    assert "\x1b" not in Path("out.sarif").read_text()
