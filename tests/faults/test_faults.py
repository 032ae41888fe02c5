"""Each system call of each verb that writes fails, one after the other: one line, nothing torn, nothing lost.

A verb is run once to see its calls on the files that it reads and writes. Then it is run again for each of them, in
which the kernel says of that call what it may say (`errors_of`), or does it in part. After each:

- it has succeeded, with the right bytes; or failed with one line that names a file, and the exit status of its kind;
- what it read is as it was; the target is what it was, or whole and right (`Verb.whole`, `Verb.allowed`);
- what it has left is removed by the next run, which is given the same and succeeds.

A signal, and a call that does less than it is asked to, are no failures: the run succeeds.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from errno import EACCES, EBUSY, EDQUOT, EIO, ENOLCK, ENOSPC, EROFS, ESTALE
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import gloo
from tests.faults.system_calls import (
    CALLS,
    NAMING,
    READING,
    REMOVING,
    SYNCING,
    WRITING,
    Answer,
    Call,
    Supervised,
    can_ask,
    real_syncs,
)
from tests.faults.verbs import VERBS, Tree, Verb, put, stored, tree
from tests.pairwise import some
from zckpt.errors import ZckptError

pytestmark = can_ask

Key = tuple[str, str, int]
T = TypeVar("T")
IN_PART, SIGNAL = 0, errno.EINTR
LISTED = {"getdents64", "mmap"}
CUTTING = {"ftruncate", "truncate", "fallocate"}
INTERRUPTED = READING - LISTED | WRITING - {"sendfile"} | SYNCING | {"open", "openat", "flock"}
"""What signal(7), or its own page, says that a signal ends before it has done anything. Of opening a directory, which
Python does not try again, no local file system says so."""

SAID: list[tuple[set[str], tuple[int, ...]]] = [
    (WRITING - CUTTING, (ENOSPC, EIO, EDQUOT, ESTALE, IN_PART)),
    (CUTTING, (ENOSPC, EIO)),
    (SYNCING, (EIO, ENOSPC, EDQUOT)),
    (NAMING | {"creates"}, (ENOSPC, EIO, EDQUOT, ESTALE, EROFS)),
    ({"close"}, (EIO, ENOSPC, EDQUOT)),
    (REMOVING, (EIO, ESTALE, EBUSY)),
    (READING - LISTED, (EIO, ESTALE, IN_PART)),
    ({"flock"}, (EIO, ENOLCK)),
    ({"stat", "newfstatat", "lstat", "fstat", "statx", "access", "readlink"}, (EIO, ESTALE, EACCES)),
]
"""What the kernel may say to calls, others than to any; `IN_PART`: it does some of it."""


def errors_of(name: str, *, creates: bool) -> tuple[int, ...]:
    """What the kernel may say to a call."""
    kind = "creates" if creates else name
    errors = next((errors for names, errors in SAID if kind in names), (EIO, ESTALE))
    return (*errors, SIGNAL) if name in INTERRUPTED else errors


def explore(name: str, base: Path, wanted: Callable[[bool, bool], bool], every: int) -> tuple[Counter[str], list[str]]:
    """Run a verb with the faults that are wanted of each n-th call; return what came of how many, and what was wrong.

    `wanted`: tells by whether it is a call's turn to have this error, and whether it is about the target.
    """
    run = prepared(name, base)
    counts, wrong = Counter[str](), list[str]()
    for number, (key, (creates, is_folder)) in enumerate([*run.calls()][::every]):
        errors = [one for one in errors_of(key[0], creates=creates) if not (is_folder and one == SIGNAL)]
        for at, error in enumerate(errors):
            if wanted(number % len(errors) == at, key[1].startswith("out")):
                outcome, found = run.faulted(key, error)
                counts[outcome] += 1
                wrong += [f"{key} {errno.errorcode.get(error, 'in part')}: {one}" for one in found]
    return counts, wrong


def prepared(name: str, base: Path) -> Run:
    """A verb in a directory that has an `in`, run once to know what it makes."""
    real_syncs()
    verb = VERBS[name]
    (base / "out").mkdir()
    verb.before(base / "out")
    source, before, was = tree(base / "in"), tree(base / "out"), verb.whole(base / "out")
    done = verb.act(base)  # here, so that those that are forked import nothing
    assert done.returncode == 0, done.stderr
    return Run(verb, base, source, before, was, tree(base / "out"), verb.whole(base / "out"))


@dataclass
class Run:
    """A verb in its directory, which is as it was before each fault."""

    verb: Verb
    base: Path
    source: Tree
    before: Tree
    was: Any
    after: Tree
    willbe: Any

    @property
    def said(self) -> Path:
        return self.base.with_name(f"{self.base.name}.said")

    def reset(self, found: Tree | None = None) -> None:
        """Put what is in `out` back to what was there before, or something else."""
        content = self.before if found is None else found
        if tree(self.base / "out") != content:
            put(self.base / "out", content)

    def calls(self) -> Iterator[tuple[Key, tuple[bool, bool]]]:
        """The calls of a run in which nothing fails."""
        found: dict[Key, tuple[bool, bool]] = {}

        def note(call: Call) -> Answer:
            at = {"open": 1, "openat": 2}.get(call.name)
            is_folder = at is not None and bool(call.arguments[at] & os.O_DIRECTORY)  # Python tries no second time
            found.setdefault(call.key, (call.creates, is_folder))
            return 0 if call.name in SYNCING else None

        self.reset()
        assert self.supervised(note) == 0
        yield from found.items()

    def supervised(self, decide: Callable[[Call], Answer], names: Collection[str] = CALLS) -> int:
        """Run the verb; its exit status."""

        def act() -> int:
            try:
                done = self.verb.act(self.base)
                self.said.write_text(done.stderr or done.stdout)
            except BaseException:
                self.said.write_text(traceback.format_exc())
                return 70
            return done.returncode

        return Supervised(act, self.base, decide, names).run()

    def faulted(self, key: Key, error: int) -> tuple[str, list[str]]:
        """Run the verb with a fault; return what came of it, and what of that is wrong."""
        hit = []

        def decide(call: Call) -> Answer:
            if call.key != key:
                return None
            hit.append(call)
            if error != IN_PART:
                return -error
            return call.process.in_part(call, (call.nbytes + 1) // 2) if call.nbytes > 1 else None

        self.reset()
        status = self.supervised(decide, {key[0]})
        if not hit:
            return "not reached", []
        wrong, said = [], self.said.read_text()
        stays = self.verb.may_stay and re.search("not sound|(?:could|is) not remove", said)
        if status == 0 and not (self.is_done() or stays):
            wrong.append("success, and not what it should be")
        elif status:
            wrong += self.told(status, said)
            if error in (IN_PART, SIGNAL):
                wrong.append(f"it failed, {status}: {said[-400:]}")
        if tree(self.base / "in") != self.source:
            wrong.append("the source has changed")
            put(self.base / "in", self.source)
        wrong += self.left()
        return ("tolerated" if status == 0 else f"status {status}"), wrong

    def is_done(self) -> bool:
        try:
            return bool(self.verb.whole(self.base / "out") == self.willbe)
        except ZckptError:
            return False

    def told(self, status: int, said: str) -> list[str]:
        lines = said.splitlines()
        if self.verb.may_stay:  # of which a table says the rest
            lines = [line for line in lines if line.startswith(("zckpt:", "cannot be"))]
        if status not in (2, 3, 4) or len(lines) != 1 or str(self.base) not in said:
            return [f"status {status}: {said[-600:]}"]
        return []

    def left(self) -> list[str]:
        """What is wrong with what there is now, and after the next run."""
        out = self.base / "out"
        now = tree(out)
        if now == self.before:
            return []
        try:
            found = self.verb.whole(out)
        except Exception as error:
            return [f"{type(error).__name__} of what is said to be whole: {error}; {sorted(now)}"]
        wrong = [] if self.verb.allowed(self.was, found, self.willbe) else [f"neither old nor new: {sorted(now)}"]
        if found == self.willbe and not self.leftovers(out):
            return wrong
        more = () if callable(self.verb.arguments) or "--overwrite" in self.verb.arguments else self.verb.again
        done = self.verb.act(self.base, *more)
        if done.returncode and "already exists" in done.stderr and found.items() <= self.willbe.items():
            done = self.verb.act(self.base, "--overwrite")
        if done.returncode:
            wrong.append(f"the next run fails: {done.stderr[-400:]}; {sorted(now)}")
        elif not self.is_done() or self.leftovers(out):
            wrong.append(f"the next run makes {sorted(tree(out))} of {sorted(now)}")
        return wrong

    def leftovers(self, out: Path) -> set[str]:
        """What is there and would not be without a fault; a store may have a checkpoint twice."""
        found = tree(out)
        if self.verb.whole is not stored:
            return found.keys() - self.after.keys()
        return {
            name for name in found.keys() - self.after.keys() if f"{name.removesuffix('.chunks')}.index" not in found
        }


def spawned(function: Callable[..., T], name: str, source: Path, *more: object) -> T:
    """Call a function with a verb and a directory, in a process that has torch only if the verb needs it.

    It is forked for each fault.
    """
    with tempfile.TemporaryDirectory(prefix="zckpt-faults-") as folder:
        shutil.copytree(source, Path(folder, "in"), symlinks=True)
        if callable(VERBS[name].arguments):
            found: T = gloo.forked(function, name, Path(folder), *more)
            return found
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(function, name, Path(folder), *more).result()


def of_target(in_turn: bool, at_target: bool) -> bool:
    """For each call about the target one of its errors, another one each time."""
    return in_turn and at_target


def each_of_target(in_turn: bool, at_target: bool) -> bool:
    """Each error of each call about the target, and one of each call about a source: these are alike in all verbs."""
    return in_turn or at_target


def without_wrong(name: str, source: Path, wanted: Callable[[bool, bool], bool], every: int = 1) -> None:
    counts, wrong = spawned(explore, name, source, wanted, every)
    print(name, dict(counts))
    assert wrong == []
    assert counts.total() > 10


@pytest.mark.parametrize("name", ["consolidate-deep"])
def test_each_call_about_a_target_fails(name, made_inputs):
    """A file with checksums, in new directories; each sixth call."""
    without_wrong(name, made_inputs, of_target, 6)


def looked_at(name: str, base: Path, file: str, error: int, every: int) -> tuple[int, list[str]]:
    """Let each n-th look at a file of a verb fail; return how many there are, and what was wrong."""
    run, wrong = prepared(name, base), list[str]()
    keys = [key for key, _ in run.calls() if key[0] == "newfstatat" and key[1] == file]
    for key in keys[::every]:
        wrong += [f"{key}: {one}" for one in run.faulted(key, error)[1]]
    return len(keys), wrong


@pytest.mark.parametrize("every", some([6], [1]))
@pytest.mark.parametrize(
    ("name", "file", "error"),
    [
        ("consolidate-pair-over", "out/.m.optimizer.safetensors.zckpt-partial", EIO),  # which are named together
        ("strip", "in/tiny/latest", EIO),
        ("pack-more", "out/store/000001.index", EACCES),
        ("Checkpointer-first", "out/run", ESTALE),
    ],
)
def test_what_cannot_be_looked_at_is_not_taken_for_what_is_not_there(name, file, error, every, made_inputs):
    """Success was told, and a file was not named or not written, or a checkpoint was packed twice."""
    count, wrong = spawned(looked_at, name, made_inputs, file, error, every)
    assert wrong == []
    assert count > 3


@pytest.mark.nightly
@pytest.mark.parametrize("name", VERBS)
def test_each_call_fails_in_every_way(name, made_inputs):
    without_wrong(name, made_inputs, each_of_target)
