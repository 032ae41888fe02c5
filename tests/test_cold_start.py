"""What each command loads before it answers. What is heavy is loaded by those that need it, and by no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.console import FIXTURES, ROOT, environment
from zckpt.cli import cli

SOURCE = str(FIXTURES / "s2_bf16_dp2")
ADAPTER = str(ROOT / "tests" / "operations" / "adapters" / "of_s2_bf16_dp2")

HEAVY = frozenset(
    {
        "asyncio", "concurrent.futures", "dask", "deepspeed", "fsspec", "http", "importlib.metadata", "isal",
        "matplotlib", "ml_dtypes", "mpi4py", "multiprocessing", "numpy", "ray", "safetensors", "socket", "torch",
        "tqdm", "transformers", "xxhash",
    }
)  # fmt: skip
"""What takes milliseconds to load, or seconds."""

PLUGINS = {"importlib.metadata", "socket"}
"""The options of other packages' formats are theirs to say."""

STRUCTURE = {"isal"}
"""The index of a torch file has a checksum."""

ELEMENTS = STRUCTURE | {"numpy", "ml_dtypes", "concurrent.futures"}

LOADED: dict[str, set[str]] = {
    "--version": set(),
    "--help": set(),
    f"inspect {SOURCE}": STRUCTURE,
    f"inspect {SOURCE} --json --files --globals": STRUCTURE,
    f"map {SOURCE} --json": STRUCTURE,
    f"scan {SOURCE} --json": STRUCTURE,
    "formats": PLUGINS,
    f"diff {SOURCE} {SOURCE}": ELEMENTS,
    f"verify {SOURCE} --deep": ELEMENTS,
    f"stats {SOURCE}": ELEMENTS,
    f"show {SOURCE} fc1.weight": ELEMENTS,
    f"fingerprint {SOURCE}": ELEMENTS | {"xxhash"},
    f"consolidate {SOURCE} model.safetensors --slots all": ELEMENTS,
    f"consolidate {SOURCE} model.pt": ELEMENTS,
    f"consolidate {SOURCE} dry.safetensors --dry-run": ELEMENTS,
    f"convert {SOURCE} dcp --to dcp": ELEMENTS | PLUGINS,
    f"reshard {SOURCE} of3 --world-size 3": ELEMENTS | PLUGINS,
    f"strip {SOURCE} small --optimizer": ELEMENTS,
    f"sanitize {SOURCE} clean": ELEMENTS,
    f"average {SOURCE} {SOURCE} --target mean.safetensors": ELEMENTS,
    f"merge-adapter {SOURCE} {ADAPTER} merged.safetensors": ELEMENTS,
} | {f"{verb} --help": PLUGINS if verb in ("convert", "reshard") else set() for verb in cli.commands}

SHOWN_WITHOUT_FORMATS = 20
"""Modules of zckpt, of some 250, of which no help that is not about formats loads more."""

PROGRAM = """
import json, os, sys
from zckpt.cli import main  # once for all: every command needs it

found = {}
for commands in json.load(sys.stdin):
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        said = {}
        for command in commands:
            sys.argv = ["zckpt", *command.split()]
            try:
                main()
            except SystemExit as error:
                said[command] = error.code, list(sys.modules)
        with os.fdopen(writes, "w") as pipe:
            json.dump(said, pipe)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        found |= json.load(pipe)
    os.wait()
print(json.dumps(found))
"""
"""Runs commands, each help and those that may load the same in a process that has loaded only what calls them; says
after each one what is loaded then."""


def load(folder: Path) -> dict[str, Any]:
    alike: dict[object, list[str]] = {}
    for command, needed in LOADED.items():
        key = command if command.endswith(("--help", "--version")) else frozenset(needed)
        alike.setdefault(key, []).append(command)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([*alike.values()]),
        capture_output=True, text=True, env=environment(), check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {command: status for command, (status, _) in found.items()} == dict.fromkeys(LOADED, 0), done.stderr
    return found


@pytest.fixture
def loaded(shared) -> dict[str, Any]:
    """The exit status of each command, and the modules that it has loaded."""
    return shared("cold-start", load)


def test_a_command_loads_what_it_needs(loaded):
    for command, needed in LOADED.items():
        surplus = HEAVY.intersection(loaded[command][1]) - needed
        assert not surplus, f"zckpt {command} loads {', '.join(sorted(surplus))}"


def test_help_loads_the_command_line_and_nothing_below_it(loaded):
    for command in ("--version", "--help", *(f"{verb} --help" for verb in cli.commands)):
        if LOADED[command] == set():
            own = [one for one in loaded[command][1] if one.partition(".")[0] == "zckpt"]
            assert len(own) <= SHOWN_WITHOUT_FORMATS, f"zckpt {command} loads {own}"


def test_a_list_of_formats_or_of_their_options_opens_none(loaded):
    for command in ("convert --help", "reshard --help", "formats"):
        found = loaded[command][1]
        assert not {"zckpt.torchfile", "zckpt.engine.plan"}.intersection(found)
        assert "zckpt.state.checkpoint" not in found or command == "formats"  # the maps, too, are listed


def test_what_only_reads_structure_loads_nothing_that_writes(loaded):
    for command in (f"inspect {SOURCE}", f"map {SOURCE} --json"):
        found = set(loaded[command][1])
        writing = {"zckpt.engine.write", "zckpt.engine.copy", "zckpt.formats.stripping", "zckpt.storage.durable"}
        assert not writing & found
        assert not [one for one in found if one.startswith("zckpt.") and one.endswith((".writer", ".strip"))], command
