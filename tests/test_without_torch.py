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
from tests.cli.console import COMMANDS, FIXTURES, ROOT, succeeded, words_of
from tests.folders import contents

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

SOURCE = "fixtures/s2_bf16_dp2"
ADAPTER = f"{ROOT}/tests/operations/adapters/of_s2_bf16_dp2"
PROVED = "--verify --fingerprint"
WRITE = [
    f"consolidate {SOURCE} model.safetensors --slots all",
    f"consolidate {SOURCE} model.pt --slots all",
    f"average {SOURCE} {SOURCE} --target mean.safetensors --slots all --verify",
    f"merge-adapter {SOURCE} {ADAPTER} merged.safetensors --verify",
    f"reshard {SOURCE} run3 --world-size 3 {PROVED}",
    f"strip {SOURCE} small --padding --optimizer",
    f"sanitize {SOURCE} clean",
    f"pack {SOURCE} store",
    *(f"convert {SOURCE} {to} --to {to} {PROVED}"
      for to in ("deepspeed", "universal", "consolidated", "zckpt", "dcp", "zero-redundancy")),
]  # fmt: skip
READ = [
    f"inspect {SOURCE} --json --files",
    f"verify {SOURCE} --deep --json",
    f"scan {SOURCE} --json",
    f"diff {SOURCE} {SOURCE}",
    f"diff --series {SOURCE} {SOURCE}",
    f"fingerprint {SOURCE} --json",
    f"stats {SOURCE} --json",
    f"show {SOURCE} fc1.weight --json",
    f"resume-check {SOURCE} --for deepspeed --json",
    f"pack {SOURCE} ignored --dry-run",
]
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
    return directory / "bin/python"


@pytest.fixture
def python(shared) -> Path:
    """The interpreter of an environment without torch."""
    return shared("without-torch", install)


def run(python: Path, *arguments: object, given: str = "", at: Path = Path("/")) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [python, *map(str, arguments)]
    return subprocess.run(command, input=given, capture_output=True, text=True, env=environment, cwd=at, check=False)


def run_all(python: Path, directory: Path) -> tuple[Path, list[list[Any]]]:
    done = run(python, "-c", COMMANDS, given=json.dumps([words_of(one) for one in READ + WRITE]), at=directory)
    assert done.returncode == 0, done.stderr
    return directory, json.loads(done.stdout)


@pytest.fixture
def without(python, shared) -> tuple[Path, list[list[Any]]]:
    """Where the verbs have written, and what each has said, all in one process."""
    return shared("written-without-torch", partial(run_all, python))


def test_torch_is_not_there(python):
    assert "No module named 'torch'" in run(python, "-c", "import torch").stderr


def test_verbs_that_write_write_the_same_without_torch(without, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory, said = without
    for command, (status, _, errors) in zip(WRITE, said[len(READ) :], strict=True):
        assert status == 0, (command, errors)
        succeeded(command)
    mine, its = contents(), contents(directory)
    assert mine.keys() == its.keys()
    differ = {name.partition("/")[0] for name, data in mine.items() if its[name] != data}
    assert differ <= {"zckpt"}  # whose files have a number of the save that they belong to
    assert zckpt.diff("zckpt", directory / "zckpt").equal


def test_verbs_that_read_say_the_same_without_torch(without):
    for command, (status, out, errors) in zip(READ, without[1], strict=False):
        assert (status, out) == (0, succeeded(command).stdout), errors


def test_a_map_is_drawn_without_torch_and_says_what_a_png_needs(python, tmp_path):
    done = run(python, "-m", "zckpt", "map", FIXTURES / "s2_bf16_dp2", tmp_path / "map.svg")
    assert done.returncode == 0, done.stderr
    done = run(python, "-m", "zckpt", "map", FIXTURES / "s2_bf16_dp2", tmp_path / "map.png")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "zckpt: a PNG needs matplotlib, which is not installed; pip install 'zckpt[png]', or write .svg"
    ]


def test_what_needs_torch_says_so_in_one_line(python, tmp_path):
    done = run(python, "-c", PROGRAM, FIXTURES / "s2_bf16_dp2", tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    training = "training needs torch, which is not installed; pip install 'zckpt[train]'"
    assert said == {
        "read": training.replace("training", "read()"),
        **dict.fromkeys(("save", "load", "Checkpointer"), training),
        **{name: training.replace("training", f"zckpt.{name}") for name in ("optim", "dcp", "hf", "deepspeed")},
        "import": training.replace("training", "zckpt.optim"),
    }
