"""Whatever is published to get past a scanner of pickles is found, and none of it is run."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

import zckpt
from tests.cli.console import run, succeeded
from tests.gloo import forked
from tests.operations.scan import corpus
from tests.test_safety import called, named, text
from zckpt.torchfile.scanning import InMemory, Scanner

GLOBALS = {line: line.split()[-1] for line in corpus.GADGETS}

SPELLED = {
    "GLOBAL": lambda module, name: b"c" + f"{module}\n{name}\n".encode(),
    "STACK_GLOBAL": lambda module, name: b"\x80\x04" + text(module) + text(name) + b"\x93",
    "INST": lambda module, name: b"(i" + f"{module}\n{name}\n".encode(),
}


def scanned(data: bytes | None = None) -> zckpt.Scanned:
    """What is found here: of a pickle, if one is given."""
    if data is not None:
        Path("m.pkl").write_bytes(data)
    return zckpt.scan(".")


@pytest.mark.parametrize("spelled", SPELLED)
def test_globals_are_dangerous(spelled):
    """However they are spelled, called or not."""
    for gadget, place in GLOBALS.items():
        module, _, name = place.partition(":")
        opcodes = SPELLED[spelled](module, name)
        found = scanned(opcodes + b"." if spelled == "INST" else called(opcodes, text("x")) + b".")
        assert found.grade == "dangerous", gadget
        (one,) = (one for one in found.findings if one["grade"] == "dangerous")
        assert (one["global"], one["named"], one["called"]) == (f"{module}.{name}", 1, 1)
        assert scanned(opcodes + b"0N.").grade == "dangerous", gadget


@pytest.mark.parametrize("name", corpus.OTHERS)
def test_global_that_nobody_knows_is_unknown(name):
    assert scanned(called(named(name), text("x")) + b".").grade == "unknown"
    succeeded("scan .")


NOT_RUN = {
    "second pickle behind the first", "second pickle behind a first of no protocol",
    "INST that ends the file without a newline", "BUILD of an empty dict on a number",
}  # fmt: skip
"""By Python, which loads one; others go on. The last two run in the unpickler that is in Python, which dill has."""


def load_each(load: Callable[[Path], object], directory: Path) -> None:
    for path in directory.glob("*.pt"):
        with contextlib.suppress(Exception):
            load(path)


def by_pickle(path: Path) -> object:
    with path.open("rb") as file:  # one of them is about how a file is read
        return pickle.load(file)


def by_torch(path: Path) -> object:
    return torch.load(path, weights_only=False)


def run_by(load: Callable[[Path], object], cases: dict[str, Callable[[Path], bytes]], directory: Path) -> set[str]:
    """Which of the cases, which make a file of what is to run, do so when a program loads it."""
    for number, make in enumerate(cases.values()):
        (directory / f"{number}.pt").write_bytes(make(directory / f"{number}.ran"))
    forked(load_each, load, directory)
    return {case for number, case in enumerate(cases) if (directory / f"{number}.ran").exists()}


@pytest.fixture
def ran(shared) -> set[str]:
    """Which of the pickles Python runs: the tricks are real."""
    return shared("pickles-ran", partial(run_by, by_pickle, corpus.PICKLES))


@pytest.mark.parametrize("case", corpus.PICKLES)
def test_pickle_is_dangerous_and_not_run(case, ran):
    sentinel = Path("sentinel")
    Path("model").write_bytes(corpus.PICKLES[case](sentinel))
    done = run("scan . --json")
    assert (done.returncode, json.loads(done.stdout)["grade"]) == (1, "dangerous")
    assert not sentinel.exists()
    assert (case in ran) == (case not in NOT_RUN)


CLOSED = {"7z (nullifAI)", "zstd", "rar"}
"""What is in them nobody sees without another program, which torch has not either."""


@pytest.mark.parametrize("case", corpus.ARCHIVES)
def test_file_is_dangerous_and_not_run(case):
    sentinel = Path("sentinel")
    for name, data in corpus.ARCHIVES[case](corpus.system(sentinel)).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)
    found = scanned()
    assert found.grade == ("unknown" if case in CLOSED else "dangerous")
    if case not in {*CLOSED, "nested twenty times"}:
        assert any(one["global"] == "os.system" for one in found.findings)
    assert run("scan .").returncode == int(case not in CLOSED)
    assert not sentinel.exists()


RUN_BY_TORCH = [
    "pickle called .pt", "torch zip", "huntr DATA.PKL", "huntr two data.pkl, payload first",
    "CVE-2025-1944 local name that disagrees", "CVE-2025-1945 flag bits in the local header",
    "CVE-2025-10156 checksum in the local header", "deflated torch zip", "bytes before the archive",
    "pickle before an archive that counts them", "huntr legacy torch file", "huntr tar torch file",
    "tar torch file, payload in its storages", "tar torch file without magic",
]  # fmt: skip


def test_torch_runs_these(tmp_path):
    cases = {case: lambda ran, make=corpus.ARCHIVES[case]: make(corpus.system(ran))["model.pt"]
             for case in RUN_BY_TORCH}  # fmt: skip
    assert run_by(by_torch, cases, tmp_path) == {*RUN_BY_TORCH}


@pytest.mark.parametrize("case", corpus.EXTENSIONS)
def test_what_is_not_what_it_seems_is_dangerous(case):
    assert scanned(corpus.EXTENSIONS[case]).grade == "dangerous"


class Inert:
    """What the unpickler below makes of every name: it takes all that a pickle does with it."""

    def __new__(cls, *_: object, **__: object) -> Inert:
        return object.__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> Inert:
        return self

    __setstate__ = append = extend = add = __setitem__ = __call__


class Names(pickle._Unpickler):  # type: ignore[name-defined]  # the one in Python, whose memo may have any index
    """Python's own unpickler, which imports nothing and notes what it would."""

    def find_class(self, module: str, name: str) -> type:
        self.names.add((module, name))
        return Inert

    def persistent_load(self, _: object) -> object:
        return Inert()


OPCODES = [bytes([code]) for code in b"()]}NIJKLMFGSTUVXBCPQc.\x80\x81\x82\x85\x86\x87\x88\x8a\x8b\x8c\x8d\x8e\x8f\x90"
           b"\x91\x92\x93\x94\x95\x960123abdeghijlopqstu"]  # fmt: skip
TOKENS = [*OPCODES, b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"(ios\nsystem\n", b"I1\n", b"q\0", b"h\0",
          b"K\1", b")R", b"(t", b"0", b"\x80\x04"]  # fmt: skip


def programs(generator: random.Random) -> Iterator[bytes]:
    """Pickles of any opcodes, and others that were changed in a few places."""
    known = [make(Path("x")) for case, make in corpus.PICKLES.items() if "MB" not in case and "00" not in case]
    while True:
        yield b"".join(generator.choices(TOKENS, k=generator.randint(1, 25))) + b"."
        data = bytearray(generator.choice(known))
        for _ in range(generator.randint(1, 5)):
            at = generator.randrange(len(data) + 1)
            data[at : at + generator.randint(0, 2)] = generator.choice(
                [*TOKENS, b"", bytes([generator.randrange(256)])]
            )
        yield bytes(data)


@pytest.mark.filterwarnings("ignore")
def test_whatever_python_would_import_is_found():
    """A scanner that stops, or reads on elsewhere, where Python does not, is one that is got past."""
    found = 0
    for data in islice(programs(random.Random(0)), 8_000):
        unpickler = Names(io.BytesIO(data))
        unpickler.names = set()
        with contextlib.suppress(Exception):
            unpickler.load()
        if ("os", "system") in unpickler.names:
            found += 1
            scanner = Scanner()
            scanner.look(InMemory(data, "m.pkl"))
            assert any(one.name == "system" for one in scanner.mentions) or scanner.oddities, data
    assert found > 600
