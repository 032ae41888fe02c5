"""What a disk may hold after a loss of power: recorded from the system calls of a run, and played again.

The model, which promises no more than POSIX does and file systems keep (that of ALICE, "All File Systems Are Not
Created Equal", OSDI 2014):

- what is written to a file is on disk once that file was synced after it; of what was written since then, any of it may
  be: nothing, a first part, all;
- a name (made, renamed, removed) is on disk once its directory was synced after that; of names that changed since then
  in one directory, the first ones may be, in the order in which they changed; different directories know nothing of
  each other;
- a rename is on disk as a whole or not at all, from one directory to another, too, and so is an exchange of two names;
- a name on disk says nothing of what is in the file, and a synced file need not have its name.

Modes and times are not looked at.
"""

from __future__ import annotations

import copy
import errno
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.faults.system_calls import HINTS, READING, SYNCING, Answer, Call
from tests.faults.verbs import Tree

MOST_COMBINED = 64
"""States of directories, or of files, at one moment that are combined with each other; of more, each by itself."""

_LOOKING = READING | HINTS | {
    "close", "stat", "fstat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "flock", "statfs",
    "fstatfs", "readlink", "readlinkat", "chmod", "fchmod", "fchmodat", "utimensat",
}  # fmt: skip
_NOREPLACE, _EXCHANGE, _REMOVEDIR = 1, 2, 0x200

Names = tuple[tuple[int, str, int | None], ...]
"""Of a directory, by number, a name, and what it stands for from now on; None: nothing. All in one step."""


@dataclass(frozen=True)
class Op:
    """What a call did: `names` change; or `data` is written to a file `at` an offset, which None cuts; or it syncs."""

    file: int = 0
    at: int | None = None
    data: bytes | int = b""
    names: Names = ()
    syncs: bool = False


@dataclass
class State:
    """Files, by number, as bytes; directories as what their names stand for; links, too, as their targets."""

    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    links: dict[int, bytes] = field(default_factory=dict)

    def tree(self) -> Tree:
        """What is to be seen."""
        found: Tree = {}
        waiting = [("", 0)]
        while waiting:
            front, number = waiting.pop()
            for name, one in self.folders[number].items():
                if one in self.folders:
                    found[front + name] = None
                    waiting.append((f"{front}{name}/", one))
                else:
                    found[front + name] = self.files[one] if one in self.files else self.links[one]
        return found

    def rename(self, names: Names) -> None:
        for folder, name, one in names:
            if one is None:
                self.folders[folder].pop(name, None)
            else:
                self.folders[folder][name] = one


def written(before: bytes, op: Op) -> bytes:
    """A file after a write, or a cut."""
    if isinstance(op.data, int):
        return before[: op.data].ljust(op.data, b"\0")
    at = op.at or 0
    return before[:at].ljust(at, b"\0") + op.data + before[at + len(op.data) :]


def is_unread(path: str) -> bool:
    """What has such a name is removed, and of what is in it names are looked at."""
    return ".zckpt-partial" in path or ".zckpt-removed" in path


class Recorder:
    """What a run does to the disk, from its calls: it answers them, and no sync is waited for.

    `exchanges`: whether the file system can exchange two names.
    """

    def __init__(self, before: Tree, *, exchanges: bool = True) -> None:
        self._exchanges = exchanges
        self.ops: list[Op] = []
        self.first = State()
        self._numbers = itertools.count(1)
        for path, data in sorted(before.items()):
            folder, name = self._place(path, self.first)
            number = next(self._numbers)
            self.first.folders[folder][name] = number
            if data is None:
                self.first.folders[number] = {}
            else:
                self.first.files[number] = data
        self.now = copy.deepcopy(self.first)

    def _place(self, path: str, state: State) -> tuple[int, str]:
        """The directory of a path, and its last name."""
        *above, name = PurePosixPath(path).parts or ("",)
        folder = 0
        for one in above:
            folder = state.folders[folder][one]
        return folder, name

    def _found(self, path: str) -> int | None:
        if path == ".":
            return 0
        try:
            folder, name = self._place(path, self.now)
            return self.now.folders[folder].get(name)
        except KeyError:
            return None

    def _do(self, op: Op) -> None:
        self.ops.append(op)
        self.now.rename(op.names)
        if not op.names and not op.syncs:
            self.now.files[op.file] = written(self.now.files[op.file], op)

    def _make(self, path: str, *, is_folder: bool = False, link: bytes | None = None) -> int:
        number = next(self._numbers)
        folder, name = self._place(path, self.now)
        if is_folder:
            self.now.folders[number] = {}
        elif link is not None:
            self.now.links[number] = link
        else:
            self.now.files[number] = b""
        self._do(Op(names=((folder, name, number),)))
        return number

    def __call__(self, call: Call) -> Answer:
        """Note what a call is going to do, unless it is going to fail."""
        name, found, given = call.name, self._found(call.path), call.arguments
        if call.path != "." and self._found(str(PurePosixPath(call.path).parent)) is None:
            return None
        if name in _LOOKING:
            if name == "mmap":
                assert not (given[2] & 2 and given[3] & 1), "written through a mapping"
            return None
        if name in SYNCING:
            if found is not None:
                self.ops.append(Op(found, syncs=True))
            return 0
        if name in ("open", "openat"):
            flags = given[1 if name == "open" else 2]
            if found is None and flags & os.O_CREAT:
                self._make(call.path)
            elif found is not None and flags & os.O_TRUNC and not (flags & os.O_EXCL and flags & os.O_CREAT):
                self._do(Op(found, None, 0))
        elif name in ("write", "pwrite64", "writev", "pwritev", "pwritev2"):
            if found is not None:
                self._do(Op(found, call.offset(), call.data()))
        elif name in ("ftruncate", "truncate"):
            if found is not None:
                self._do(Op(found, None, given[1]))
        elif name in ("mkdir", "mkdirat"):
            if found is None:
                self._make(call.path, is_folder=True)
        elif name in ("unlink", "unlinkat", "rmdir"):
            if found is not None and not self.now.folders.get(found):
                is_folder = name == "rmdir" or (name == "unlinkat" and bool(given[2] & _REMOVEDIR))
                if is_folder == (found in self.now.folders):
                    self._do(Op(names=((*self._place(call.path, self.now), None),)))
        elif name in ("rename", "renameat", "renameat2"):
            flags = given[4] if name == "renameat2" else 0
            if flags & _EXCHANGE and not self._exchanges:
                return -errno.EINVAL
            self._rename(call, flags)
        else:
            raise AssertionError(f"{name} of {call.path} is not known here")
        return None

    def _rename(self, call: Call, flags: int) -> None:
        paths = [str(path.relative_to(call.process.under)) for path in call.paths]
        source, target = map(self._found, paths)
        places = [self._place(path, self.now) for path in paths]
        if source is None or (flags & _NOREPLACE and target is not None) or (flags & _EXCHANGE and target is None):
            return
        if flags & _EXCHANGE:
            self._do(Op(names=((*places[0], target), (*places[1], source))))
        elif target is None or not self.now.folders.get(target):
            self._do(Op(names=((*places[0], None), (*places[1], source))))


class Crashes:
    """What the disk may hold after a loss of power in a run that was recorded."""

    def __init__(self, recorded: Recorder) -> None:
        self._recorded = recorded
        self.count = 0
        """How many states there were, the same one at several moments counted each time."""

    def every(self) -> Iterator[tuple[Tree, bool]]:
        """Yield each state once, and whether it is one after the end of the run: those come last.

        Of what has a temporary name, only names tell states apart: it is removed unread.
        """
        ops, known = self._recorded.ops, set[int]()
        for end in range(len(ops) + 1):
            if end == len(ops):
                known.clear()
            for found in self._after(ops[:end]):
                self.count += 1
                key = hash(frozenset((name, b"" if is_unread(name) else data) for name, data in found.items()))
                if key not in known:
                    known.add(key)
                    yield found, end == len(ops)

    def _after(self, ops: Sequence[Op]) -> Iterator[Tree]:
        lasting, now = self._lasting(ops), self._recorded.now
        named = [(at, op) for at, op in enumerate(ops) if op.names]
        waiting = [(at, op) for at, op in named if at not in lasting]
        changed = defaultdict[int, list[int]](list)
        for at, op in enumerate(ops):
            if not op.names and not op.syncs and at not in lasting:
                changed[op.file].append(at)
        for kept in self._kept(waiting):
            known = self._recorded.first.folders
            state = State({}, {number: dict(known.get(number, {})) for number in now.folders}, now.links)
            for at, op in named:
                if at in lasting or at in kept:
                    state.rename(op.names)
            reached = self._reached(state)
            for data in self._data([file for file in changed if file in reached], changed):
                state.files = self._files(ops, lasting, data)
                yield state.tree()

    def _files(
        self, ops: Sequence[Op], lasting: set[int], data: dict[int, tuple[set[int], int | None]]
    ) -> dict[int, bytes]:
        files = dict.fromkeys(self._recorded.now.files, b"") | self._recorded.first.files
        for at, op in enumerate(ops):
            if op.names or op.syncs:
                continue
            kept, torn = data.get(op.file, (set[int](), None))
            if at in lasting or at in kept:
                files[op.file] = written(files[op.file], op)
            elif at == torn and isinstance(op.data, bytes):
                part = Op(op.file, op.at, op.data[: len(op.data) // 2])
                files[op.file] = written(files[op.file], part)
        return files

    @staticmethod
    def _lasting(ops: Sequence[Op]) -> set[int]:
        """Which of what was done is on disk for certain."""
        synced, found = set[int](), set[int]()
        for at in range(len(ops) - 1, -1, -1):
            op = ops[at]
            folders = {folder for folder, _, _ in op.names}
            if op.syncs:
                synced.add(op.file)
            elif op.names and folders & synced:
                found.add(at)
                synced |= folders  # what was before it in the other directory is, too
            elif not op.names and op.file in synced:
                found.add(at)
        return found

    @staticmethod
    def _reached(state: State) -> set[int]:
        """What has a name that is read."""
        found, waiting = set[int](), [0]
        while waiting:
            for name, one in state.folders[waiting.pop()].items():
                if not is_unread(name):
                    found.add(one)
                    if one in state.folders:
                        waiting.append(one)
        return found

    @staticmethod
    def _kept(waiting: Sequence[tuple[int, Op]]) -> Iterator[set[int]]:
        """Yield which of the names that wait are on disk: of each directory the first ones."""
        by_folder = defaultdict[int, list[int]](list)
        for at, op in waiting:
            for folder in {folder for folder, _, _ in op.names}:
                by_folder[folder].append(at)
        for counts in combined([range(len(some) + 1) for some in by_folder.values()]):
            kept = [set(some[:count]) for some, count in zip(by_folder.values(), counts, strict=True)]
            every = set().union(*kept)
            if all(every & set(some) == its for some, its in zip(by_folder.values(), kept, strict=True)):
                yield every

    @staticmethod
    def _data(files: Sequence[int], changed: dict[int, list[int]]) -> Iterator[dict[int, tuple[set[int], int | None]]]:
        """Yield which writes of each file are on disk, and which one in part."""
        choices: list[list[tuple[set[int], int | None]]] = []
        for file in files:
            some = changed[file]
            choices.append(
                [(set(some), None), (set(), None), (set(some[:-1]), some[-1]), (set(some[: len(some) // 2]), None)]
            )
        for picked in combined(choices):
            yield dict(zip(files, picked, strict=True))


def combined(choices: Sequence[Sequence[object]]) -> Iterator[tuple]:
    """Yield all combinations; where they are too many, those in which all but one are at the first or last choice."""
    if math.prod(map(len, choices)) <= MOST_COMBINED:
        yield from itertools.product(*choices)
        return
    for end in (0, -1):
        for at, some in enumerate(choices):
            for one in some:
                yield tuple(one if at == here else each[end] for here, each in enumerate(choices))
