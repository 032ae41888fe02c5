"""A checkpoint whose pickles would run code on loading: zckpt reads around it, names it, and never runs it."""

from __future__ import annotations

import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.console import FIXTURES, inspected, run, succeeded
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


def shell(sentinel: Path) -> bytes:
    return text(f"touch {sentinel}")


def code(sentinel: Path) -> bytes:
    return text(f"open({str(sentinel)!r}, 'w').close()")


def script(sentinel: Path) -> bytes:
    path = sentinel.with_name("script.py")
    path.write_text(f"open({str(sentinel)!r}, 'w').close()\n")
    return text(str(path))


def nested(sentinel: Path) -> bytes:
    data = called(named("os:system"), shell(sentinel)) + b"."
    return b"B" + struct.pack("<I", len(data)) + data


IMPORT_OS = called(named("builtins:__import__"), text("os"))

RUNS: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    # case: (global that is named, opcodes that leave one object on the stack)
    "os.system": ("os.system", lambda s: called(named("os:system"), shell(s))),
    "posix.system": ("posix.system", lambda s: called(named("posix:system"), shell(s))),
    "os.popen": (
        "os.popen",
        lambda s: called(named("builtins:getattr"), called(named("os:popen"), shell(s)), text("read")),
    ),
    "subprocess.Popen": (
        "subprocess.Popen",
        lambda s: called(named("subprocess:Popen"), b"(" + text("touch") + text(str(s)) + b"t"),
    ),
    "subprocess.check_call": (
        "subprocess.check_call",
        lambda s: called(named("subprocess:check_call"), b"(" + text("touch") + text(str(s)) + b"t"),
    ),
    "builtins.eval": ("builtins.eval", lambda s: called(named("builtins:eval"), code(s))),
    "builtins.exec": ("builtins.exec", lambda s: called(named("builtins:exec"), code(s))),
    "__builtin__.eval": ("__builtin__.eval", lambda s: called(named("__builtin__:eval"), code(s))),
    "chain of getattr": (
        "builtins.getattr",
        lambda s: called(called(named("builtins:getattr"), IMPORT_OS, text("system")), shell(s)),
    ),
    "operator.attrgetter": (
        "operator.attrgetter",
        lambda s: called(called(called(named("operator:attrgetter"), text("system")), IMPORT_OS), shell(s)),
    ),
    "operator.methodcaller": (
        "operator.methodcaller",
        lambda s: called(called(named("operator:methodcaller"), text("system"), shell(s)), IMPORT_OS),
    ),
    "functools.partial": (
        "functools.partial",
        lambda s: called(called(named("functools:partial"), named("os:system"), shell(s))),
    ),
    "runpy.run_path": ("runpy.run_path", lambda s: called(named("runpy:run_path"), script(s))),
    "timeit.timeit": (
        "timeit.timeit",
        lambda s: called(named("timeit:timeit"), code(s), text("pass"), named("time:perf_counter"), b"K\x01"),
    ),
    "pickle.loads": ("pickle.loads", lambda s: called(named("pickle:loads"), nested(s))),
    "shutil.copyfile": ("shutil.copyfile", lambda s: called(named("shutil:copyfile"), text("/dev/null"), text(str(s)))),
    "builtins.open": ("builtins.open", lambda s: called(named("builtins:open"), text(str(s)), text("w"))),
    "STACK_GLOBAL": ("os.system", lambda s: called(text("os") + text("system") + b"\x93", shell(s))),
    "dotted STACK_GLOBAL": (
        "shutil.os.system",
        lambda s: b"\x80\x04" + called(text("shutil") + text("os.system") + b"\x93", shell(s)),
    ),
    "NEWOBJ of map": (
        "builtins.map",
        lambda s: created(
            named("builtins:tuple"), created(named("builtins:map"), named("os:system"), shell(s) + b"\x85")
        ),
    ),
    "INST": ("os.system", lambda s: b"(" + shell(s) + b"ios\nsystem\n"),
    "OBJ": ("os.system", lambda s: b"(" + named("os:system") + shell(s) + b"o"),
}

REFUSED: dict[str, Callable[[Path], bytes]] = {
    "BUILD with a __setstate__ of its own": lambda s: (
        created(named("argparse:Namespace"))
        + b"}"
        + text("__setstate__")
        + named("os:system")
        + b"sb"
        + shell(s)
        + b"b"
    ),
}

NEVER_RUNS = {  # what this machine cannot run, or not without torch
    "nt.system": ("nt.system", lambda s: called(named("nt:system"), shell(s))),
    "torch.hub.load": ("torch.hub.load", lambda s: called(named("torch.hub:load"), text("x/y"), text("z"))),
    "torch.storage._load_from_bytes": (
        "torch.storage._load_from_bytes",
        lambda s: called(named("torch.storage:_load_from_bytes"), nested(s)),
    ),
    "torch.load": ("torch.serialization.load", lambda s: called(named("torch.serialization:load"), script(s))),
    "numpy.load": ("numpy.load", lambda s: called(named("numpy:load"), script(s))),
    "webbrowser.open": ("webbrowser.open", lambda s: called(named("webbrowser:open"), text("https://example.org"))),
    "__setstate__ of a class": (
        "evil.Class",
        lambda s: created(named("evil:Class")) + b"}" + text("x") + called(named("os:system"), shell(s)) + b"sb",
    ),
}


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


def poisoned(directory: Path, payload: bytes) -> Path:
    """A valid checkpoint in which every kind of file has the payload."""
    run_directory = Path(shutil.copytree(FIXTURES / "s2_bf16_dp2", directory / "run"))
    for name in (MODEL, OPTIMIZER):
        poison(run_directory / name, payload)
    return run_directory


@pytest.mark.parametrize("case", [*RUNS, *REFUSED])
def test_payload_is_one_that_pickle_would_run(case, tmp_path):
    sentinel = tmp_path / "sentinel"
    payload = RUNS[case][1](sentinel) if case in RUNS else REFUSED[case](sentinel)
    (tmp_path / "payload").write_bytes(payload + b".")
    program = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    subprocess.run([sys.executable, "-c", program, tmp_path / "payload"], capture_output=True, check=False)
    if case == "subprocess.Popen":  # nobody waits for it
        for _ in range(1000):
            if sentinel.exists():
                break
            subprocess.run(["sleep", "0.01"], check=True)
    assert sentinel.exists()


@pytest.mark.parametrize("case", [*RUNS, *NEVER_RUNS])
def test_checkpoint_is_read_and_the_payload_named_and_not_run(case, tmp_path):
    sentinel = tmp_path / "sentinel"
    name, make = {**RUNS, **NEVER_RUNS}[case]
    source = poisoned(tmp_path, make(sentinel))
    document = inspected(source, "--globals")
    mentioned = {Path(f["path"]).name: set().union(*f["globals"].values()) for f in document["files"]}
    for file in (MODEL, OPTIMIZER):
        assert name in mentioned[Path(file).name]
    target = tmp_path / "model.safetensors"
    succeeded("consolidate", source, target, "--slots", "all", "--drop", "*optim_states.pt:extra*")
    assert not sentinel.exists()
    truth = Truth(FIXTURES / "s2_bf16_dp2")
    model = load_file(tmp_path / "model.safetensors")
    for parameter, value in truth.masters.items():
        assert_same(model[parameter], value, parameter)


@pytest.mark.parametrize("case", REFUSED)
def test_object_that_no_program_writes_is_refused_and_not_run(case, tmp_path):
    sentinel = tmp_path / "sentinel"
    source = poisoned(tmp_path, REFUSED[case](sentinel))
    for verb in (("inspect", source, "--globals"), ("consolidate", source, tmp_path / "m.safetensors")):
        done = run(*verb)
        assert done.returncode == 3
        assert len(done.stderr.splitlines()) == 1
    assert not sentinel.exists()
    assert not (tmp_path / "m.safetensors").exists()


PERSISTENT = {
    "of a call": lambda s: called(named("os:system"), shell(s)) + b"Q",
    "with a call for its storage class": lambda s: (
        b"(" + text("storage") + called(named("os:system"), shell(s)) + text("0") + text("cpu") + b"K\x04tQ"
    ),
    "with a global for its storage class": lambda s: (
        b"(" + text("storage") + named("os:system") + text("0") + text("cpu") + b"K\x04tQ"
    ),
    "as text": lambda s: b"Pos.system\n",
}


@pytest.mark.parametrize("case", PERSISTENT)
@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
def test_persistent_id_is_a_storage_or_refused(case, file, tmp_path):
    sentinel = tmp_path / "sentinel"
    source = Path(shutil.copytree(FIXTURES / "s2_bf16_dp2", tmp_path / "run"))
    poison(source / file, PERSISTENT[case](sentinel))
    done = run("inspect", source)
    assert done.returncode == 3
    assert str(source / file) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not sentinel.exists()


@pytest.mark.parametrize(
    ("file", "key"),
    [
        (MODEL, "module"),
        (MODEL, "param_shapes"),
        (MODEL, "buffer_names"),
        (MODEL, "shared_params"),
        (MODEL, "ds_config"),
        (MODEL, "global_steps"),
        (MODEL, "dp_world_size"),
        (MODEL, "optimizer"),
        (OPTIMIZER, "optimizer_state_dict"),
        (OPTIMIZER, "ds_version"),
    ],
)
def test_payload_in_the_place_of_what_zckpt_reads_is_not_run(file, key, tmp_path):
    sentinel = tmp_path / "sentinel"
    source = Path(shutil.copytree(FIXTURES / "s2_bf16_dp2", tmp_path / "run"))
    poison(source / file, called(named("os:system"), shell(sentinel)), key=key)
    done = run("inspect", source)
    assert done.returncode in (0, 3), done.stderr
    assert len(done.stderr.splitlines()) == (1 if done.returncode else 0), done.stderr
    assert not sentinel.exists()


def test_plain_file_is_read_and_its_payload_not_run(tmp_path):
    sentinel = tmp_path / "sentinel"
    path = Path(shutil.copy(FIXTURES / "other" / "plain_adamw" / "ckpt.pt", tmp_path))
    poison(path, called(named("os:system"), shell(sentinel)))
    (file,) = inspected(path, "--globals")["files"]
    assert "os.system" in file["globals"]["data.pkl"]
    succeeded("consolidate", path, tmp_path / "model.pt", "--slots", "all")
    assert not sentinel.exists()


def test_file_that_is_one_payload_is_refused_and_names_it(tmp_path):
    sentinel = tmp_path / "sentinel"
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", called(named("os:system"), shell(sentinel)) + b".")
    done = run("inspect", path)
    assert done.returncode == 3
    assert "os.system" in done.stderr
    assert not sentinel.exists()


def test_bare_pickle_is_refused_and_not_run(tmp_path):
    sentinel = tmp_path / "sentinel"
    path = tmp_path / "x.pt"
    path.write_bytes(b"\x80\x02" + called(named("os:system"), shell(sentinel)) + b".")
    assert run("inspect", path).returncode == 3
    assert not sentinel.exists()


def test_optimizers_state_dict_that_was_written_holds_no_global_but_torchs(tmp_path):
    sentinel = tmp_path / "sentinel"
    source = poisoned(tmp_path, RUNS["os.system"][1](sentinel))
    target = tmp_path / "model.pt"
    succeeded("consolidate", source, target, "--slots", "all", "--drop", "*optim_states.pt:extra*")
    for name in ("model.pt", "model.optimizer.pt"):
        with zipfile.ZipFile(tmp_path / name) as archive:
            data = archive.read(f"{name.removesuffix('.pt')}/data.pkl")
        assert b"system" not in data
        with pytest.raises(pickle.UnpicklingError, match="persistent"):
            pickle.loads(data)


def test_verify_finds_what_a_file_would_run(tmp_path):
    """A file is no better than a directory: that it is hostile is a finding, not a source that is none."""
    payload = called(named("os:system"), shell(tmp_path / "sentinel")) + b"."
    with zipfile.ZipFile(tmp_path / "root.pt", "w") as archive:
        archive.writestr("root/data.pkl", payload)
    with zipfile.ZipFile(tmp_path / "extension.pt", "w") as archive:
        archive.writestr("extension/data.pkl", b"\x80\x02\x82\x01.")
    (tmp_path / "bare.pt").write_bytes(b"\x80\x02" + payload)
    for name in ("root.pt", "extension.pt", "bare.pt"):
        done = run("verify", tmp_path / name)
        assert done.returncode == 1, (name, done.stderr)
        assert "ZC-106" in done.stdout
    assert not (tmp_path / "sentinel").exists()


def test_verify_says_that_a_harmless_file_is_no_checkpoint(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing\n")
    assert run("verify", tmp_path / "notes.txt").returncode == 3
