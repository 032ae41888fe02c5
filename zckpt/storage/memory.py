"""What memory this process may still take: of its address space, of its control group, of the machine.

    RLIMIT_AS        limit - what it has mapped            with all that is mapped: libraries, stacks, arenas
    cgroup, v1, v2   limit - what cannot be given back     the page cache can
    MemAvailable     of the machine

Sources: proc(5), getrlimit(2), mallopt(3); cgroup-v1/memory.rst, cgroup-v2.rst of Linux. Where a system says none of
it, nothing is known, and nothing is refused.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zckpt.errors import UsageError
from zckpt.storage.disk import of_libc

RESERVED_NBYTES = 24 << 20
"""For what is no buffer: modules that are still to be loaded, plans, the proof of what was written."""

LEAST_NBYTES = 1 << 20
"""Of buffers together; with less, a run would take for ever, or fail in its middle."""

STACK_NBYTES = 1 << 20
"""Of a thread where address space is scarce; the system's default is 8 MiB."""

_ARENA_MAX = -8
"""M_ARENA_MAX: how many arenas malloc has, of 64 MiB of address space for each thread; from malloc.h of glibc."""

_MMAP_THRESHOLD, MAPPED_NBYTES = -3, 128 << 10
"""M_MMAP_THRESHOLD: from this size on, the default's first, memory goes back to the system as soon as it is free."""

KEPT_NBYTES = 16 << 20
"""Buffers of up to this are taken from what was freed: glibc's own limit is 32 MiB."""

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

_UNLIMITED = 1 << 60
"""From here on a limit is none: version 1 says the largest multiple of a page, version 2 `max`."""


def check_memory() -> None:
    """Raise unless the process may take what the smallest run needs. Raises UsageError: a limit leaves less."""
    needed, found = RESERVED_NBYTES + LEAST_NBYTES, free_memory()
    if found is not None and found[1] < needed:
        raise UsageError(
            f"not enough memory under {found[0]}",
            expected=f"{needed} free bytes",
            found=max(found[1], 0),
            advice="raise the limit, or stop other programs",
        )


def buffers_within(memory: int) -> int:
    """Return how much of a budget for buffers the process can take: all of it, or less where a limit leaves less.

    Parameters
    ----------
    memory : int, bytes

    Returns
    -------
    int, bytes
        Of a budget that is not smaller itself, at least `LEAST_NBYTES`: a run that has begun goes on with that.
    """
    found = free_memory()
    return memory if found is None else min(memory, max(found[1] - RESERVED_NBYTES, LEAST_NBYTES))


class Room:
    """Memory that threads share: who finds too little of it waits; who wants more than there is gets all."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = self._free = nbytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Take some of it."""
        nbytes = min(nbytes, self._nbytes)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify_all()


def free_memory() -> tuple[str, int] | None:
    """Return the limit that leaves least, and the bytes it leaves; None: nothing is known."""
    return min(limits(), key=lambda one: one[1], default=None)


def limits(proc: Path = _PROC, groups: Path = _CGROUPS) -> Iterator[tuple[str, int]]:
    """Yield every limit that there is by its name, with the bytes that it leaves.

    `proc`, `groups`: where the system tells of processes and control groups.
    """
    most = address_space()
    mapped = _fields(proc / "self" / "statm").get("")
    if most is not None and mapped is not None:
        yield "RLIMIT_AS (ulimit -v)", most - mapped * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        is_second = number == "0" and not controllers
        if not is_second and "memory" not in controllers.split(","):
            continue
        steps = [step for step in path.split("/") if step not in ("", "..")]
        for count in range(len(steps), -1, -1):  # in a container, the outermost that it sees is its own
            name = "/".join(steps[:count])
            group = (groups if is_second else groups / "memory") / name
            about = _fields(group / "memory.stat")
            limit, used = (_fields(group / f"memory.{which}").get("") for which in ("max", "current"))
            if is_second and limit is not None and used is not None:
                kept = used - about.get("active_file", 0) - about.get("inactive_file", 0)
                yield f"memory.max of cgroup /{name}", limit - max(kept, 0)
            first = about.get("hierarchical_memory_limit")
            if not is_second and first is not None:  # it counts those that the group is in
                if first < _UNLIMITED:
                    kept = about.get("total_rss", 0) + about.get("total_shmem", 0)
                    yield f"memory.limit_in_bytes of cgroup /{name}", first - kept
                break
    about = _fields(proc / "meminfo")
    if "MemAvailable" in about:
        yield "the machine's available memory", (about["MemAvailable"] + about.get("SwapFree", 0)) << 10


def address_space() -> int | None:
    """Return how many bytes the process may map; None: any number."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY or soft >= _UNLIMITED else soft


def confine_threads() -> None:
    """Let threads that begin from now on take little address space, if the process may not map what it likes.

    A thread of a usual Linux maps 72 MiB, of which it uses some kilobytes. Buffers are given back when they are free.
    Where there is no such limit, they are kept until `give_back`: memory that is new to a process costs more than what
    most functions do with it.
    """
    if address_space() is None:
        if sys.platform == "linux":  # glibc keeps what is freed, up to the size of a mapping that was freed
            import ctypes

            library = ctypes.CDLL(None)
            library.malloc.restype = ctypes.c_void_p
            library.free(ctypes.c_void_p(library.malloc(ctypes.c_size_t(KEPT_NBYTES))))
        return
    before = threading.stack_size(STACK_NBYTES)
    if before not in (0, STACK_NBYTES):  # somebody has chosen
        threading.stack_size(before)
    _call("mallopt", _ARENA_MAX, 1)
    _call("mallopt", _MMAP_THRESHOLD, MAPPED_NBYTES)


def give_back() -> None:
    """Let malloc give what is free to the system: of threads that have ended, it keeps what they used."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Call a function of glibc, where there is one."""
    function = of_libc(name, "i" * len(arguments))
    if function is not None:
        function(*arguments)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of names and numbers, a pair a line; of one that begins with one, that as ''."""
    lines = (line.replace(":", " ").split() for line in _lines(path))
    pairs = (["", *words] if words and words[0].isdigit() else words for words in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}
