"""What is built of this tree is all of it: the wheel and the source distribution have each file that git knows."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.cli.console import FIXTURES, ROOT, environment

BUILD = "import setuptools.build_meta as build, sys; print(getattr(build, f'build_{sys.argv[1]}')(sys.argv[2]))"

AS_A_MODULE = "import runpy, zckpt; print(zckpt.__file__); runpy.run_module('zckpt', run_name='__main__')"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> tuple[Path, list[str]]:
    """A copy of what git knows, since building leaves files; and their names."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    top = tmp_path_factory.mktemp("tree")
    for name in names:
        if not name.startswith(("fixtures/", "tests/", "bench/")):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_bytes((ROOT / name).read_bytes())
    return top, names


def built(kind: str, tree: Path, target: Path) -> Path:
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(command, cwd=tree, capture_output=True, check=True, text=True)
    return target / done.stdout.splitlines()[-1]


def test_a_wheel_has_all_of_the_package_and_runs_by_itself(tree, tmp_path):
    with zipfile.ZipFile(built("wheel", tree[0], tmp_path)) as wheel:
        wheel.extractall(tmp_path / "installed")
    packed = {one.relative_to(tmp_path / "installed").as_posix() for one in (tmp_path / "installed").rglob("*")}
    assert {name for name in tree[1] if name.startswith("zckpt/")} <= packed
    command = [sys.executable, "-c", AS_A_MODULE, "inspect", str(FIXTURES / "s2_bf16_dp2"), "--html", "page.html"]
    run_in = environment() | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, cwd=tmp_path, env=run_in, capture_output=True, check=True, text=True)
    assert done.stdout.startswith(str(tmp_path / "installed"))
    assert "deepspeed" in done.stdout
    assert (tmp_path / "page.html").stat().st_size > 50_000


def test_a_source_distribution_has_what_a_wheel_is_built_of(tree, tmp_path):
    with tarfile.open(built("sdist", tree[0], tmp_path)) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    assert {name for name in tree[1] if name.startswith("zckpt/")} | {"pyproject.toml", "README.md", "LICENSE"} <= names
