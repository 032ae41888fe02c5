"""Settings of the whole test run, and what is made once for all of its workers."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import io
import itertools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import settings

from tests import gloo
from zckpt.errors import ZckptError
from zckpt.naming import installed, traced

# Tests start many processes: what they import is compiled once, whatever the caller's setting.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What PEFT imports would import torch's compiler, too, which takes seconds and compiles for no test; ranks are told so.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

ZckptError.names_flags = True
"""Texts are those of the command line, whoever calls; `test_errors.py` is about those of Python."""

# How long an example takes is no property of the product. `make test-all` draws more of them.
settings.register_profile("zckpt", deadline=None, max_examples=20)
settings.register_profile("nightly", deadline=None, max_examples=200)
settings.load_profile("zckpt")

# A shell that starts the suite in the background has it ignore Ctrl-C, and processes that tests interrupt with it.
signal.signal(signal.SIGINT, signal.default_int_handler)

T = TypeVar("T")


def _synced(descriptor: int) -> None:
    """Stand for `os.fsync` and `fdatasync`: no test pulls the plug, and waiting for the disk is much of the time.

    Processes that tests start wait for it, all but the ranks.
    """
    os.fstat(descriptor)


os.fsync = os.fdatasync = _synced


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test run in `tmp_path`, so that a name alone is one of its files."""
    monkeypatch.chdir(tmp_path)


def pytest_configure(config: pytest.Config) -> None:
    """Collect no garbage while test modules are imported: what they make stays, and there is ever more of it."""
    gc.disable()
    if server := getattr(config, "workerinput", {}).get("server"):
        gloo.use_server(server)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start one fork server for all workers: what it imports takes seconds."""
    gloo.start_server()
    node.workerinput["server"] = gloo.server_address()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import all test modules, each worker from another one on: what one has compiled is read by the others."""
    config = session.config
    if (worker := getattr(config, "workerinput", None)) is None or config.args_source != config.ArgsSource.TESTPATHS:
        return
    names = [
        ".".join(path.relative_to(config.rootpath).with_suffix("").parts)
        for path in sorted(config.rootpath.glob("tests/**/test_*.py"))
    ]
    first = len(names) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for name in names[first:] + names[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collection imports it again, and says so
            importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `nightly` be all but each n-th case of a test that is marked `every(n, first)`."""
    numbers = Counter[str]()
    for item in items:
        if (mark := item.get_closest_marker("every")) is not None and item.get_closest_marker("nightly") is None:
            test = item.nodeid.partition("[")[0]
            n, first = (*mark.args, 0)[:2]
            if numbers[test] % n != first:
                item.add_marker("nightly")
            numbers[test] += 1


def pytest_collection_finish() -> None:
    """Let no collection of garbage during the tests look at what every test module imported, and let them be few."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def maps_made_here() -> Iterator[None]:
    """Make maps of transformers here: to import it again takes seconds. `test_transformers_map.py` starts a process."""

    def run(command: list[str], *, input: str, **_: object) -> subprocess.CompletedProcess[str]:  # noqa: A002
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = traced.main(lambda: input)
        return subprocess.CompletedProcess(command, status, out.getvalue(), "")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(installed, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
        yield


_numbers = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an empty directory; to number its own, pytest looks through those of all tests before."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}-{next(_numbers)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def torch_file(tmp_path: Path) -> Callable[..., Path]:
    """What saves a tree as torch does, in one file of the test's own, and returns where that is."""

    def save(root: Any, **options: Any) -> Path:
        import torch

        torch.save(root, tmp_path / "c.pt", **options)
        return tmp_path / "c.pt"

    return save


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], T]], T]:
    """Give what `make(directory)` returns, by name: the worker that asks first makes it, the others wait for it.

    What is in the directory is for all to read and for none to change.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    root.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], T]) -> T:
        directory, done = root / name, root / f"{name}.pickle"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(directory, ignore_errors=True)  # of a worker that failed
                directory.mkdir()
                done.write_bytes(pickle.dumps(make(directory)))
        result: T = pickle.loads(done.read_bytes())
        return result

    return get
