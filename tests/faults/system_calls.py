"""The system calls of a process, each of which a test may see, let fail, or let do a part of what it is asked to.

The kernel asks (seccomp, `SECCOMP_RET_USER_NOTIF`): so it does not matter who calls, Python, ctypes or a library, in
which thread, and what retries what (EINTR). It needs Linux 5.6 or later on x86-64, and no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_BY_ARGUMENTS: dict[tuple[int | None, tuple[tuple[int | None, int], ...]], dict[str, int]] = {
    (0, ()): {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20,
        "sendfile": 40, "flock": 73, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "fchmod": 91, "fstatfs": 138,
        "getdents64": 217, "fadvise64": 221, "sync_file_range": 277, "fallocate": 285, "preadv": 295, "pwritev": 296,
        "preadv2": 327, "pwritev2": 328,
    },
    (2, ()): {"copy_file_range": 326},
    (4, ()): {"mmap": 9},
    (None, ((None, 0),)): {
        "open": 2, "stat": 4, "lstat": 6, "access": 21, "truncate": 76, "mkdir": 83, "rmdir": 84, "unlink": 87,
        "readlink": 89, "chmod": 90, "statfs": 137,
    },
    (None, ((None, 1),)): {"symlink": 88},
    (None, ((None, 0), (None, 1))): {"rename": 82, "link": 86},
    (None, ((0, 1),)): {
        "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "readlinkat": 267, "fchmodat": 268,
        "faccessat": 269, "utimensat": 280, "statx": 332, "faccessat2": 439,
    },
    (None, ((1, 2),)): {"symlinkat": 266},
    (None, ((0, 1), (2, 3))): {"renameat": 264, "linkat": 265, "renameat2": 316},
}  # fmt: skip
"""Numbers on x86-64, by the argument that is a descriptor, and those that are paths, each behind its directory's."""

CALLS = {name: (number, *given) for given, named in _BY_ARGUMENTS.items() for name, number in named.items()}
"""Number, descriptor and paths of each."""

_NAMES = {number: name for name, (number, _, _) in CALLS.items()}

READING = {"read", "pread64", "readv", "preadv", "preadv2", "getdents64", "mmap"}
WRITING = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range", "ftruncate",
           "truncate", "fallocate"}  # fmt: skip
SYNCING = {"fsync", "fdatasync"}
NAMING = {"rename", "renameat", "renameat2", "mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat"}
REMOVING = {"unlink", "unlinkat", "rmdir"}
HINTS = {"sync_file_range", "fadvise64"}
ONE_BUFFER = {"read", "write", "pread64", "pwrite64"}
SEVERAL = {"readv", "writev", "preadv", "pwritev", "preadv2", "pwritev2"}

_NR_SECCOMP, _NR_PIDFD_OPEN, _NR_PIDFD_GETFD = 317, 434, 438
_NO_NEW_PRIVS, _SET_FILTER, _NEW_LISTENER = 38, 1, 8
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
AT_FDCWD = 0xFFFFFF9C
PAGE = 4096

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Call:
    """A call of a process that is stopped before it.

    `path`: what it is about, the last one of two, relative to the directory that is looked at; `nth`: of this name
    about this path, from 0 on.
    """

    name: str
    path: str
    nth: int
    paths: tuple[Path, ...]
    arguments: tuple[int, ...]
    process: Supervised

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is in every run alike, whatever the threads do."""
        return self.name, self.path, self.nth

    @property
    def creates(self) -> bool:
        at = {"open": 1, "openat": 2}.get(self.name)
        return at is not None and bool(self.arguments[at] & os.O_CREAT)

    @property
    def nbytes(self) -> int:
        """Of what it is to move."""
        if self.name in ONE_BUFFER:
            return self.arguments[2]
        return sum(nbytes for _, nbytes in self.buffers())

    def buffers(self) -> list[tuple[int, int]]:
        """Address and bytes of each buffer."""
        if self.name in ONE_BUFFER:
            return [(self.arguments[1], self.arguments[2])]
        if self.name not in SEVERAL:
            return []
        table = self.process.memory(self.arguments[1], 16 * self.arguments[2])
        return list(struct.iter_unpack("QQ", table))

    def data(self) -> bytes:
        """What it is to write."""
        return b"".join(self.process.memory(at, nbytes) for at, nbytes in self.buffers())

    def offset(self) -> int:
        """Where in the file it begins."""
        if self.name in ("pwrite64", "pwritev", "pwritev2", "pread64", "preadv", "preadv2"):
            return self.arguments[3]
        lines = Path(f"/proc/{self.process.pid}/fdinfo/{self.arguments[0]}").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        if int(fields["flags"], 8) & os.O_APPEND:
            return self.paths[-1].stat().st_size
        return int(fields["pos"])


Answer = int | None
"""None: the kernel does what it is asked to. Negative: an error. Else what the call returns, and nothing is done."""


class Supervised:
    """A process that is stopped before each of its calls about something below a directory; of some names, if given."""

    def __init__(
        self, act: Callable[[], object], under: Path, decide: Callable[[Call], Answer], names: Collection[str] = CALLS
    ) -> None:
        self.under, self._decide, self._counts = under, decide, Counter[tuple[str, str]]()
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            status = 70
            try:
                ours.close()
                listener = _installed(names)
                socket.send_fds(theirs, [b"f"], [listener])
                theirs.recv(1)
                status = int(act() or 0)
            finally:
                os._exit(status)
        theirs.close()
        _, [self._listener], _, _ = socket.recv_fds(ours, 1, 1)
        self._pidfd = os.pidfd_open(self.pid)
        self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR)
        ours.send(b"g")
        ours.close()
        self.status: int | None = None
        """Its exit status, or less a signal; None: it has not ended."""
        self._waiting = select.poll()
        self._waiting.register(self._listener, select.POLLIN)
        self._waiting.register(self._pidfd, select.POLLIN)

    def run(self) -> int:
        """Answer until it ends; return its exit status, or less a signal."""
        while self.status is None:
            self.advance()
        return self.status

    def advance(self) -> None:
        """Answer once, or wait until it has ended."""
        try:
            ready = dict(self._waiting.poll())
            if ready.get(self._listener, 0) & select.POLLIN:
                self._answer()
            elif self._pidfd in ready:
                self._ended()
            else:  # it asks no more, and ends: to look until it has would keep it from that
                self._waiting.unregister(self._listener)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill it, in the middle of what it asks for."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._ended()

    def _ended(self) -> None:
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        for one in (self._listener, self._pidfd, self._memory):
            os.close(one)

    def memory(self, address: int, nbytes: int) -> bytes:
        return os.pread(self._memory, nbytes, address)

    def _answer(self) -> None:
        asked = bytearray(80)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, asked, True)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return
            raise
        number, thread, _, nr, _, _, *arguments = struct.unpack("QIIiIQ6Q", asked)
        answer: Answer = None
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            call = self._call(_NAMES[nr], thread, tuple(arguments))
            answer = None if call is None else self._decide(call)
        value, error = (0, 0) if answer is None else (max(answer, 0), min(answer, 0))
        reply = struct.pack("QqiI", number, value, error, _CONTINUE if answer is None else 0)
        try:
            fcntl.ioctl(self._listener, _SEND, reply)
        except OSError as error:
            if error.errno != errno.ENOENT:  # it was killed
                raise

    def _call(self, name: str, thread: int, arguments: tuple[int, ...]) -> Call | None:
        _, descriptor, places = CALLS[name]
        if descriptor is not None:
            found = [str(Path(f"/proc/{thread}/fd/{arguments[descriptor] & 0xFFFFFFFF}").readlink())]
        else:
            found = [self._path(thread, arguments, *one) for one in places]
        paths = tuple(Path(os.path.normpath(one)) for one in found)
        if not paths[-1].is_relative_to(self.under):
            return None
        path = str(paths[-1].relative_to(self.under))
        nth = self._counts[name, path]
        self._counts[name, path] += 1
        return Call(name, path, nth, paths, arguments, self)

    def _path(self, thread: int, arguments: tuple[int, ...], folder: int | None, at: int) -> str:
        given = os.fsdecode(self._text(arguments[at])) if arguments[at] else ""
        if given.startswith("/"):
            return given
        descriptor = AT_FDCWD if folder is None else arguments[folder] & 0xFFFFFFFF
        base = Path(f"/proc/{thread}/cwd" if descriptor == AT_FDCWD else f"/proc/{thread}/fd/{descriptor}").readlink()
        return str(base / given)

    def _text(self, address: int) -> bytes:
        text = b""
        while b"\0" not in text:
            text += self.memory(address + len(text), PAGE - (address + len(text)) % PAGE)
        return text.partition(b"\0")[0]

    def in_part(self, call: Call, nbytes: int) -> int:
        """Do a read or write of fewer bytes than were asked for, as the process would; return how many."""
        file = _checked(_libc.syscall(_NR_PIDFD_GETFD, self._pidfd, call.arguments[0], 0))
        try:
            return self._in_part(call, file, nbytes)
        except OSError as error:
            return -error.errno
        finally:
            os.close(file)

    def _in_part(self, call: Call, file: int, nbytes: int) -> int:
        at = call.arguments[3] if call.name.startswith("p") else None
        if call.name in WRITING:
            data = call.data()[:nbytes]
            return os.write(file, data) if at is None else os.pwrite(file, data, at)
        data = os.read(file, nbytes) if at is None else os.pread(file, nbytes, at)
        done = 0
        for address, size in call.buffers():
            part = data[done : done + size]
            if part:
                os.pwrite(self._memory, part, address)
            done += size
        return len(data)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _installed(names: Collection[str]) -> int:
    """Let this process ask from now on; return what it is answered by."""
    numbers = [CALLS[name][0] for name in names if name != "mmap"]
    notify_mapped = len(numbers) + ("mmap" in names)
    program = [
        (_LOAD, 0, 0, 0),  # the number
        (_EQUAL, 0, 2, CALLS["mmap"][0]),
        (_LOAD, 0, 0, 16 + 8 * 4),  # of what is mapped; memory is of none
        (_EQUAL, len(numbers), notify_mapped, 0xFFFFFFFF),
        *((_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NOTIFY),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    given = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    return _checked(_libc.syscall(_NR_SECCOMP, _SET_FILTER, _NEW_LISTENER, given))


def _why_not() -> str | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "calls are numbered as Linux on x86-64 numbers them"
    try:
        Supervised(lambda: 0, Path("/nowhere"), lambda call: None).run()
    except OSError as error:
        return f"the kernel does not ask: {error}"
    return None


WHY_NOT = _why_not()
"""Why this machine lets no process be looked at so; None: it does."""

can_ask = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")


def real_syncs() -> None:
    """Undo what `tests/conftest.py` did to syncs, where calls are to be seen."""
    import posix

    system: Any = os
    system.fsync, system.fdatasync = posix.fsync, posix.fdatasync
