"""A directory in a store that several processes write together; nothing of it is seen before one of them names it all.

first       checks what is there, removes what a killed run has left, and begins
every       sends its files, straight from memory, and says what it has sent
first       makes objects of all of that, or names of temporary names; then the small files that make a checkpoint of it
failure     each removes what it has sent, and the first whatever is left of a process that is gone

To who writes a file it is a directory like any other: `write_target` sends what goes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.engine import Reporter
from zckpt.errors import TargetError, ZckptError
from zckpt.storage.ownership import Owned, check_target
from zckpt.storage.stand_ins import InMemory

if TYPE_CHECKING:
    from zckpt.engine.checking import Checked, Checks
    from zckpt.engine.plan import Plan
    from zckpt.storage.remote.uploads import Sent

_SHARED: dict[Path, SharedTarget] = {}
"""By their directories."""


def shared_at(path: Path) -> SharedTarget | None:
    """Return the target that a path is in or below of; None: in none."""
    return next((_SHARED[one] for one in (path, *path.parents) if one in _SHARED), None) if _SHARED else None


class SharedTarget:
    """What one process writes of a directory in a store.

    Parameters
    ----------
    url : str
    last : sequence of str
        Names of files that the first process writes and that come last; small enough for memory.

    Raises
    ------
    SourceError, TargetError
        The store cannot be reached, or is read only.
    """

    def __init__(self, url: str, *, last: Sequence[str] = ()) -> None:
        from zckpt.storage.remote.mount import Mount
        from zckpt.storage.remote.schemes import uploads_of

        self._mount = Mount(url, missing=True)
        try:
            self.path = self._mount.path
            self._uploads = uploads_of(self._mount.store, self._mount.store.root, is_directory=True)
        except BaseException:
            self._mount.close()
            raise
        self._last = last
        self.in_memory: dict[str, bytes] = {}
        """Small files by name, which come last, in this order."""
        self._old: list[str] = []
        self._finished: list[str] = []
        self._is_first = False
        _SHARED[self.path] = self

    def begin(self, *, overwrite: bool, owned: Owned, note: bytes | None = None) -> None:
        """Begin, on the first process, before any other sends something.

        Raises
        ------
        TargetError
            Something is there that is not to be replaced, or the store refuses.
        """
        check_target(self.path, overwrite=overwrite, owned=owned)
        self._is_first = True
        self._old = self._mount.keys_below(self.path)
        self._uploads.begin()
        if note is not None:
            self._uploads.note(note)

    def noted(self) -> bytes:
        """Return the note with which the first process has begun.

        Raises
        ------
        TargetError
            There is none.
        """
        found = self._uploads.noted()
        if found is None:
            raise TargetError("no save to it is going on", path=self.path)
        return found

    def write(
        self,
        plan: Plan,
        path: Path,
        *,
        memory: int,
        reporter: Reporter | None = None,
        checks: Checks | None = None,
        direct: bool = False,
    ) -> Checked:
        """Send a file; one that comes last waits in memory."""
        from zckpt.engine.checking import Checked
        from zckpt.engine.upload import upload, whole

        name = path.relative_to(self.path).as_posix()
        if name in self._last:
            (one,) = plan.files
            self.in_memory[name] = whole(one)
            return Checked()
        sinks = [self._uploads.sink(name)]
        return upload(plan, sinks, memory=memory, reporter=reporter, checks=checks, direct=direct)

    def sent(self) -> Sent:
        """Return what this process has sent, for the first."""
        return self._uploads.sent()

    def finish(self, every: Sequence[Sent]) -> None:
        """Make what all have sent readable, on the first process; `every` is in the order of the processes.

        The first one's last file comes last: of formats without a document, it is the one that says most.
        """
        backwards = [item for sent in reversed(every) for item in sent.items()]
        waiting = {name: one for name, one in backwards if name not in self._finished}
        self._uploads.adopt(waiting)
        names = list(waiting)
        self._uploads.finish(names, [] if self._finished else self._old)
        self._finished += names

    @contextmanager
    def readable(self) -> Iterator[Path]:
        """Yield a directory in which this process reads what was finished, and what is in its memory."""
        from zckpt.storage.remote.mount import mounted

        with mounted(self._uploads.url(), missing=True) as there:
            there.path.mkdir(exist_ok=True)
            for name, data in self.in_memory.items():
                there.add(there.path / name, InMemory(data), len(data))
            yield there.path

    def add(self, name: str, data: bytes) -> None:
        """Let a small file come before those that come last."""
        self.in_memory = {name: data, **self.in_memory}

    def commit(self, every: Sequence[Sent]) -> None:
        """Finish what is not finished, and name all, on the first process."""
        self.finish(every)
        for name, data in self.in_memory.items():
            self._uploads.put(name, data)
        self._uploads.name([*self._finished, *self.in_memory], self._old)

    def abort(self) -> None:
        """Remove what this process has sent; on the first, all."""
        with suppress(ZckptError):  # the store cannot be reached: what is left is no checkpoint, and the next run's
            self._uploads.abort(everything=self._is_first)

    def close(self) -> None:
        """Let go of the store."""
        _SHARED.pop(self.path, None)
        self._mount.close()
