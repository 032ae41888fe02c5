"""`pip install zckpt`: what it declares to need is enough for everything but training, which says what it lacks.

The environment has zckpt and the packages that pyproject.toml names, with those that they need, and no others.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import zckpt
from tests.cli import console
from tests.cli.console import FIXTURES, ROOT
from tests.folders import contents

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

SOURCE = FIXTURES / "s2_bf16_dp2"
ADAPTER = ROOT / "tests" / "operations" / "adapters" / "of_s2_bf16_dp2"
PROVED = ("--verify", "--fingerprint")
TARGETS = {
    "consolidate": ("model.safetensors", "--slots", "all"),
    "consolidate torch": ("model.pt", "--slots", "all"),
    "average": ("model.safetensors", SOURCE, "--slots", "all", "--verify"),
    "merge-adapter": ("model.safetensors", "--verify"),
    "reshard": ("run3", "--world-size", "3", *PROVED),
    "strip": ("small", "--padding", "--optimizer"),
    "sanitize": ("clean",),
    "pack": ("store",),
    "convert deepspeed": ("out", "--to", "deepspeed", *PROVED),
    "convert universal": ("out", "--to", "universal", *PROVED),
    "convert consolidated": ("out", "--to", "consolidated", *PROVED),
    "convert zckpt": ("out", "--to", "zckpt", *PROVED),
    "convert dcp": ("out", "--to", "dcp", *PROVED),
    "convert zero-redundancy": ("out", "--to", "zero-redundancy", *PROVED),
}
READ = [
    ("inspect", SOURCE, "--json", "--files"),
    ("verify", SOURCE, "--deep", "--json"),
    ("scan", SOURCE, "--json"),
    ("diff", SOURCE, SOURCE),
    ("diff", "--series", SOURCE, SOURCE),
    ("fingerprint", SOURCE, "--json"),
    ("stats", SOURCE, "--json"),
    ("show", SOURCE, "fc1.weight", "--json"),
    ("resume-check", SOURCE, "--for", "deepspeed", "--json"),
    ("pack", SOURCE, "ignored", "--dry-run"),
]
COMMANDS = """
import contextlib, io, json, sys
from zckpt.cli import main

said = []
for command in json.load(sys.stdin):
    sys.argv, out, errors, status = ["zckpt", *command], io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as error:
        status = error.code
    said.append([status, out.getvalue(), errors.getvalue()])
print(json.dumps(said))
"""
PROGRAM = """
import json, sys
import zckpt

source, directory = sys.argv[1:]
opened = zckpt.open(source)
zckpt.inspect(opened)
zckpt.convert(opened, f"{directory}/zckpt", to="zckpt")
assert zckpt.diff(opened, f"{directory}/zckpt").equal
assert zckpt.verify(opened, deep=True).sound
assert zckpt.fingerprint(opened).text == zckpt.fingerprint(f"{directory}/zckpt").text
zckpt.series([opened, f"{directory}/zckpt"])
lacks = {
    "read": lambda: opened.read("fc1.weight"),
    "save": lambda: zckpt.save,
    "load": lambda: zckpt.load,
    "Checkpointer": lambda: zckpt.Checkpointer,
    "optim": lambda: zckpt.optim,
    "dcp": lambda: zckpt.dcp,
    "hf": lambda: zckpt.hf,
    "deepspeed": lambda: zckpt.deepspeed,
    "import": lambda: __import__("zckpt.optim.zero"),
}
said = {}
for name, call in lacks.items():
    try:
        call()
    except zckpt.MissingPackageError as error:
        assert isinstance(error, ImportError) and error.exit_status == 2
        said[name] = str(error)
print(json.dumps(said))
"""


def install(directory: Path) -> Path:
    venv.create(directory, symlinks=True)
    [site] = directory.glob("lib/python*/site-packages")
    (site / "zckpt").symlink_to(ROOT / "zckpt")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    todo, seen = [Requirement(one) for one in declared], set()
    while todo:
        needed = todo.pop()
        name = canonicalize_name(needed.name)
        if name in seen or (needed.marker is not None and not needed.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        todo += [Requirement(one) for one in found.requires or ()]
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(found.locate_file(top)))
    assert not {"torch", "deepspeed", "matplotlib", "transformers"} & seen
    return directory / "bin" / "python"


@pytest.fixture
def python(shared) -> Path:
    """The interpreter of an environment without torch."""
    return shared("without-torch", install)


def run(python: Path, *arguments: object, given: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [python, *map(str, arguments)]
    return subprocess.run(command, input=given, capture_output=True, text=True, env=environment, cwd="/", check=False)


def arguments_of(verb: str, directory: Path) -> list[object]:
    """A command of `TARGETS` that writes into a directory."""
    target, *options = TARGETS[verb]
    before = {"average": ["--target"], "merge-adapter": [ADAPTER]}.get(verb, [])
    return [verb.split(maxsplit=1)[0], SOURCE, *before, directory / target, *options]


def write(python: Path, directory: Path) -> tuple[Path, list[list[Any]]]:
    for verb in TARGETS:
        (directory / verb).mkdir()
    commands = [*READ, *(arguments_of(verb, directory / verb) for verb in TARGETS)]
    listed = json.dumps([[str(word) for word in command] for command in commands])
    done = run(python, "-c", COMMANDS, given=listed)
    assert done.returncode == 0, done.stderr
    return directory, json.loads(done.stdout)


@pytest.fixture
def without(python, shared) -> tuple[Path, list[list[Any]]]:
    """Where each verb has written, and what the verbs that read, and then these, have said, all in one process."""
    return shared("written-without-torch", partial(write, python))


def test_torch_is_not_there(python):
    assert "No module named 'torch'" in run(python, "-c", "import torch").stderr


@pytest.mark.parametrize("verb", TARGETS)
def test_verbs_that_write_write_the_same_without_torch(verb, without, tmp_path):
    directory, said = without
    status, _, errors = said[len(READ) + list(TARGETS).index(verb)]
    assert status == 0, errors
    console.succeeded(*arguments_of(verb, tmp_path))
    if verb == "convert zckpt":  # whose files have a number of the save that they belong to
        target = TARGETS[verb][0]
        assert zckpt.diff(tmp_path / target, directory / verb / target).equal
        return
    assert contents(tmp_path) == contents(directory / verb)


def test_verbs_that_read_say_the_same_without_torch(without):
    for arguments, (status, out, errors) in zip(READ, without[1], strict=False):
        assert (status, out) == (0, console.succeeded(*arguments).stdout), errors


def test_a_map_is_drawn_without_torch_and_says_what_a_png_needs(python, tmp_path):
    done = run(python, "-m", "zckpt", "map", SOURCE, tmp_path / "map.svg")
    assert done.returncode == 0, done.stderr
    done = run(python, "-m", "zckpt", "map", SOURCE, tmp_path / "map.png")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "zckpt: a PNG needs matplotlib, which is not installed; pip install 'zckpt[png]', or write .svg"
    ]


def test_what_needs_torch_says_so_in_one_line(python, tmp_path):
    done = run(python, "-c", PROGRAM, SOURCE, tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    training = "training needs torch, which is not installed; pip install 'zckpt[train]'"
    assert said == {
        "read": training.replace("training", "read()"),
        **dict.fromkeys(("save", "load", "Checkpointer"), training),
        **{name: training.replace("training", f"zckpt.{name}") for name in ("optim", "dcp", "hf", "deepspeed")},
        "import": training.replace("training", "zckpt.optim"),
    }
