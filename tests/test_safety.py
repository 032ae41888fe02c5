"""A checkpoint whose pickles would run code on loading: zckpt reads around it, names it, and never runs it."""

from __future__ import annotations

import pickle
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.console import FIXTURES, copy, inspected, refused, run, succeeded
from tests.folders import names_in
from tests.truth import Truth, assert_same

MODEL = "global_step5/mp_rank_00_model_states.pt"
OPTIMIZER = "global_step5/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def named(name: str) -> bytes:
    """The GLOBAL opcode for `module:name`."""
    module, _, attribute = name.partition(":")
    return f"c{module}\n{attribute}\n".encode()


def called(function: bytes, *arguments: bytes) -> bytes:
    """REDUCE."""
    return function + b"(" + b"".join(arguments) + b"tR"


def created(cls: bytes, *arguments: bytes) -> bytes:
    """NEWOBJ."""
    return cls + b"(" + b"".join(arguments) + b"t\x81"


def shell(sentinel: Path | str) -> bytes:
    return text(f"touch {sentinel}")


RAN = Path("sentinel")
"""What each payload leaves in the directory in which it runs."""
TOUCH, CODE = shell(RAN), text("open('sentinel', 'w').close()")
IMPORT_OS = called(named("builtins:__import__"), text("os"))
OS_SYSTEM = called(named("os:system"), TOUCH)
ARGUMENTS = b"(" + text("touch") + text("sentinel") + b"t"
NESTED = b"B" + struct.pack("<I", len(OS_SYSTEM) + 1) + OS_SYSTEM + b"."

RUNS: dict[str, tuple[str, bytes]] = {
    # case: (global that is named, opcodes that leave one object on the stack)
    "os.system": ("os.system", OS_SYSTEM),
    "posix.system": ("posix.system", called(named("posix:system"), TOUCH)),
    "os.popen": ("os.popen", called(named("builtins:getattr"), called(named("os:popen"), TOUCH), text("read"))),
    "subprocess.Popen": ("subprocess.Popen", called(named("subprocess:Popen"), ARGUMENTS)),
    "subprocess.check_call": ("subprocess.check_call", called(named("subprocess:check_call"), ARGUMENTS)),
    "builtins.eval": ("builtins.eval", called(named("builtins:eval"), CODE)),
    "builtins.exec": ("builtins.exec", called(named("builtins:exec"), CODE)),
    "__builtin__.eval": ("__builtin__.eval", called(named("__builtin__:eval"), CODE)),
    "chain of getattr": (
        "builtins.getattr",
        called(called(named("builtins:getattr"), IMPORT_OS, text("system")), TOUCH),
    ),
    "operator.attrgetter": (
        "operator.attrgetter",
        called(called(called(named("operator:attrgetter"), text("system")), IMPORT_OS), TOUCH),
    ),
    "operator.methodcaller": (
        "operator.methodcaller",
        called(called(named("operator:methodcaller"), text("system"), TOUCH), IMPORT_OS),
    ),
    "functools.partial": (
        "functools.partial",
        called(called(named("functools:partial"), named("os:system"), TOUCH)),
    ),
    "runpy.run_path": ("runpy.run_path", called(named("runpy:run_path"), text("script.py"))),
    "timeit.timeit": (
        "timeit.timeit",
        called(named("timeit:timeit"), CODE, text("pass"), named("time:perf_counter"), b"K\x01"),
    ),
    "pickle.loads": ("pickle.loads", called(named("pickle:loads"), NESTED)),
    "shutil.copyfile": ("shutil.copyfile", called(named("shutil:copyfile"), text("/dev/null"), text("sentinel"))),
    "builtins.open": ("builtins.open", called(named("builtins:open"), text("sentinel"), text("w"))),
    "STACK_GLOBAL": ("os.system", called(text("os") + text("system") + b"\x93", TOUCH)),
    "dotted STACK_GLOBAL": (
        "shutil.os.system",
        b"\x80\x04" + called(text("shutil") + text("os.system") + b"\x93", TOUCH),
    ),
    "NEWOBJ of map": (
        "builtins.map",
        created(named("builtins:tuple"), created(named("builtins:map"), named("os:system"), TOUCH + b"\x85")),
    ),
    "INST": ("os.system", b"(" + TOUCH + b"ios\nsystem\n"),
    "OBJ": ("os.system", b"(" + named("os:system") + TOUCH + b"o"),
}

SETSTATE_OF_ITS_OWN = (
    created(named("argparse:Namespace")) + b"}" + text("__setstate__") + named("os:system") + b"sb" + TOUCH + b"b"
)
"""No program writes it."""

NEVER_RUNS = {  # what this machine cannot run, or not without torch
    "nt.system": ("nt.system", called(named("nt:system"), TOUCH)),
    "torch.hub.load": ("torch.hub.load", called(named("torch.hub:load"), text("x/y"), text("z"))),
    "torch.storage._load_from_bytes": (
        "torch.storage._load_from_bytes",
        called(named("torch.storage:_load_from_bytes"), NESTED),
    ),
    "torch.load": ("torch.serialization.load", called(named("torch.serialization:load"), text("script.py"))),
    "numpy.load": ("numpy.load", called(named("numpy:load"), text("script.py"))),
    "webbrowser.open": ("webbrowser.open", called(named("webbrowser:open"), text("https://example.org"))),
    "__setstate__ of a class": (
        "evil.Class",
        created(named("evil:Class")) + b"}" + text("x") + OS_SYSTEM + b"sb",
    ),
}


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test here run where there is only the script that a payload may run."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("open('sentinel', 'w').close()\n")


def poison(path: Path, payload: bytes, key: str = "extra") -> None:
    """Put an object under one more key of the dict that a torch file holds."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    (pickled,) = [name for name in records if name.endswith("/data.pkl")]
    assert records[pickled].endswith(b".")
    records[pickled] = records[pickled][:-1] + text(key) + payload + b"s."
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def poisoned(payload: bytes, directory: str = ".") -> Path:
    """A valid checkpoint in which every kind of file has the payload."""
    run_directory = copy("s2_bf16_dp2", directory)
    for name in (MODEL, OPTIMIZER):
        poison(run_directory / name, payload)
    return run_directory


LOAD = """
import os, pickle, sys

for number in range(int(sys.argv[1])):
    os.makedirs(f"ran/{number}")
    os.chdir(f"ran/{number}")
    try:
        pickle.load(open(f"../../{number}.pkl", "rb"))
    except Exception:
        pass
    os.chdir("../..")
"""


def test_payloads_are_such_that_pickle_would_run():
    payloads = [*(payload for _, payload in RUNS.values()), SETSTATE_OF_ITS_OWN]
    for number, payload in enumerate(payloads):
        Path(f"{number}.pkl").write_bytes(payload.replace(text("script.py"), text("../../script.py")) + b".")
    subprocess.run([sys.executable, "-c", LOAD, str(len(payloads))], capture_output=True, check=True)
    left = set(range(len(payloads)))
    for _ in range(1000):
        left = {number for number in left if not Path(f"ran/{number}/sentinel").exists()}
        if not left:
            break
        time.sleep(0.01)  # nobody waits for what `subprocess.Popen` starts
    assert not left


@pytest.mark.parametrize("case", [*RUNS, *NEVER_RUNS])
def test_checkpoint_is_read_and_the_payload_named_and_not_run(case):
    name, payload = {**RUNS, **NEVER_RUNS}[case]
    poisoned(payload)
    document = inspected("s2_bf16_dp2 --globals")
    mentioned = {Path(f["path"]).name: set().union(*f["globals"].values()) for f in document["files"]}
    for file in (MODEL, OPTIMIZER):
        assert name in mentioned[Path(file).name]
    succeeded("consolidate s2_bf16_dp2 model.safetensors --slots all --drop *optim_states.pt:extra*")
    assert not RAN.exists()
    truth = Truth(FIXTURES / "s2_bf16_dp2")
    model = load_file("model.safetensors")
    for parameter, value in truth.masters.items():
        assert_same(model[parameter], value, parameter)


def test_object_that_no_program_writes_is_refused_and_not_run():
    poisoned(SETSTATE_OF_ITS_OWN)
    refused(3, "inspect s2_bf16_dp2 --globals")
    refused(3, "consolidate s2_bf16_dp2 m.safetensors")
    assert names_in() == ["s2_bf16_dp2", "script.py"]


PERSISTENT = {
    "of a call": OS_SYSTEM + b"Q",
    "with a call for its storage class": b"(" + text("storage") + OS_SYSTEM + text("0") + text("cpu") + b"K\x04tQ",
    "with a global for its storage class": (
        b"(" + text("storage") + named("os:system") + text("0") + text("cpu") + b"K\x04tQ"
    ),
    "as text": b"Pos.system\n",
}


@pytest.mark.parametrize("case", PERSISTENT)
@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
def test_persistent_id_is_a_storage_or_refused(case, file):
    source = copy("s2_bf16_dp2")
    poison(source / file, PERSISTENT[case])
    refused(3, "inspect s2_bf16_dp2", words=str(source / file))
    assert not RAN.exists()


@pytest.mark.parametrize(
    ("file", "key"),
    [
        *[(MODEL, key) for key in ("module", "param_shapes", "buffer_names", "shared_params", "ds_config",
                                   "global_steps", "dp_world_size", "optimizer")],
        *[(OPTIMIZER, key) for key in ("optimizer_state_dict", "ds_version")],
    ],
)  # fmt: skip
def test_payload_in_the_place_of_what_zckpt_reads_is_not_run(file, key):
    poison(copy("s2_bf16_dp2") / file, OS_SYSTEM, key=key)
    done = run("inspect s2_bf16_dp2")
    assert done.returncode in (0, 3), done.stderr
    assert len(done.stderr.splitlines()) == (1 if done.returncode else 0), done.stderr
    assert not RAN.exists()


def test_plain_file_is_read_and_its_payload_not_run():
    shutil.copy(FIXTURES / "other/plain_adamw/ckpt.pt", "ckpt.pt")
    poison(Path("ckpt.pt"), OS_SYSTEM)
    (file,) = inspected("ckpt.pt --globals")["files"]
    assert "os.system" in file["globals"]["data.pkl"]
    succeeded("consolidate ckpt.pt model.pt --slots all")
    assert not RAN.exists()


def archive(name: str, pickled: bytes) -> None:
    with zipfile.ZipFile(f"{name}.pt", "w") as file:
        file.writestr(f"{name}/data.pkl", pickled)


def test_what_is_one_payload_is_refused_named_and_found_and_not_run():
    """For `verify` a file is no better than a directory: that it is hostile is a finding, not a source that is none."""
    archive("root", OS_SYSTEM + b".")
    archive("extension", b"\x80\x02\x82\x01.")
    Path("bare.pt").write_bytes(b"\x80\x02" + OS_SYSTEM + b".")
    refused(3, "inspect root.pt", words="os.system")
    refused(3, "inspect bare.pt")
    for name in ("root.pt", "extension.pt", "bare.pt"):
        done = run(f"verify {name}")
        assert done.returncode == 1, (name, done.stderr)
        assert "ZC-106" in done.stdout
    assert not RAN.exists()


def test_optimizers_state_dict_that_was_written_holds_no_global_but_torchs():
    poisoned(OS_SYSTEM)
    succeeded("consolidate s2_bf16_dp2 model.pt --slots all --drop *optim_states.pt:extra*")
    for name in ("model", "model.optimizer"):
        with zipfile.ZipFile(f"{name}.pt") as file:
            data = file.read(f"{name}/data.pkl")
        assert b"system" not in data
        with pytest.raises(pickle.UnpicklingError, match="persistent"):
            pickle.loads(data)


def test_verify_says_that_a_harmless_file_is_no_checkpoint():
    Path("notes.txt").write_text("nothing\n")
    refused(3, "verify notes.txt")
