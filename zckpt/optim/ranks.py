"""The ranks that save or load together: what they send each other, the directory that they write, and their failures.

A failure of one is one of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zckpt.compare.twice import check_files_apart
from zckpt.engine.checking import Checks, Seen, Sum
from zckpt.errors import SourceError, TargetError, WorkerError, ZckptError, shown
from zckpt.formats.survey import ALWAYS_NBYTES, checksums_by_path
from zckpt.immutable import immutable
from zckpt.state import Checkpoint
from zckpt.storage.crc32 import crc32
from zckpt.storage.ownership import Owned

if TYPE_CHECKING:
    from zckpt.operations.shared_target import SharedTarget

T = TypeVar("T")

Place = Path | str
"""A path, or a URL."""

Failure = tuple[type[BaseException], str, dict[str, Any]]

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Under its name since torch 2.13, or before."""

ALONE = "alone"
"""The purpose of one rank that has nobody to agree with, such as the caller of RPC workers."""

BELOW = "\0"
"""Stands for what is read, which another rank may have under another name."""


@immutable
class _Unsent:
    """Comes instead of what could not be sent."""

    failure: Failure


_CONTROL: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Gloo groups of the same ranks, by the group that they were made for and what they are used for."""


class Ranks:
    """The ranks of a process group, and a group of theirs that works on the CPU; one rank where there is no group.

    `process_group`: by default the whole world; `purpose`: ranks of one purpose talk in the same order on all ranks; a
    thread of its own needs a purpose of its own. Raises ValueError: this rank is not in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, purpose: str = "") -> None:
        self.given = process_group
        if purpose == ALONE or not (dist.is_available() and dist.is_initialized()):
            self.group: dist.ProcessGroup | None = None
            self.rank, self.world_size, self.members = 0, 1, [0]
            return
        group = process_group or dist.distributed_c10d._get_default_group()
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this rank is not in the process group")
        self.members = dist.get_process_group_ranks(group)
        self.group = group
        if purpose or "gloo" not in dist.get_backend(group):  # one of its own, that is made once
            made = _CONTROL.setdefault(group, {})
            if purpose not in made:
                made[purpose] = dist.new_group(self.members, backend="gloo", use_local_synchronization=True)
            self.group = made[purpose]

    @property
    def are_gone(self) -> bool:
        """Whether their process group has been destroyed, and there may be another."""
        return self.group is not None and self.group not in dist.distributed_c10d._world.pg_map

    def gather(self, mine: T) -> list[T]:
        """Return what each rank has to say, on the first rank; an empty list on the others."""
        if self.group is None:
            return [mine]
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with answering():
            dist.gather_object(mine, gathered, dst=self.members[0], group=self.group)
        return gathered or []

    def gather_all(self, mine: T) -> list[T]:
        """Return what each rank has to say, on all ranks."""
        every: list[Any] = [mine] * self.world_size
        if self.group is not None:
            with answering():
                dist.all_gather_object(every, mine, group=self.group)
        return every

    def from_first(self, of_first: T) -> T:
        """Return what the first rank has to say; if that cannot be sent, all have failed."""
        if self.group is None:
            return of_first
        received: list[Any] = [of_first]
        with answering():
            try:
                dist.broadcast_object_list(received, src=self.members[0], group=self.group)
            except Exception as error:
                if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
                    raise
                unsent: list[Any] = [_Unsent(_packed(error))]  # it cannot be pickled, and others wait for something
                dist.broadcast_object_list(unsent, src=self.members[0], group=self.group)
                raise
        if isinstance(received[0], _Unsent):
            _raise(0, received[0].failure)
        return received[0]  # type: ignore[no-any-return]

    def scatter(self, of_first: Sequence[T]) -> T:
        """Return what the first rank has for this one; of others, `of_first` is not looked at."""
        if self.group is None:
            return of_first[0]
        received: list[Any] = [None]
        with answering():
            given = list(of_first) if self.rank == 0 else None
            dist.scatter_object_list(received, given, src=self.members[0], group=self.group)
        return received[0]  # type: ignore[no-any-return]

    def exchange(self, for_each: Sequence[T]) -> list[T]:
        """Return what each rank has for this one, given what this one has for each: what JSON can say."""
        if self.group is None:
            return list(for_each)
        given = [json.dumps(one).encode() for one in for_each]
        sent = torch.tensor([len(one) for one in given], device="cpu")
        sizes = torch.empty_like(sent)
        with answering():
            dist.all_to_all_single(sizes, sent, group=self.group)
            received = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
            data = torch.frombuffer(bytearray(b"".join(given)), dtype=torch.uint8)
            dist.all_to_all_single(received, data, sizes.tolist(), sent.tolist(), group=self.group)
        parts = received.split(sizes.tolist())  # type: ignore[no-untyped-call]
        return [json.loads(one.numpy().tobytes()) for one in parts]

    def any(self, mine: bool) -> bool:
        """Return whether it is so on any rank."""
        if self.group is None:
            return mine
        most = torch.tensor([mine], dtype=torch.int32, device="cpu")
        with answering():
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return bool(most.item())

    def do(self, step: Callable[[], T], *, spoiled: str | None = None) -> T:
        """Take a step on all ranks, and return what it makes here; if one fails, all have failed.

        Raises as `agree`. With `spoiled`, which says what has become of things, any failure here is a ZckptError.
        """
        try:
            made = step()
        except Exception as failure:  # noqa: BLE001  # all ranks learn of it
            error: Exception = failure
            if isinstance(error, ZckptError) and spoiled is not None:
                error.advice = spoiled if error.advice is None else f"{error.advice}; {spoiled}"
            elif spoiled is not None:
                error = SourceError(f"{type(failure).__name__}: {failure}", advice=spoiled)
                error.__cause__ = failure
            self._exchange(error)
            raise error  # noqa: B904  # which has its cause
        self.agree()
        return made

    def of_first(self, step: Callable[[], T]) -> T:
        """Take a step on the first rank only, and return what it makes on all; if it fails, all have failed."""
        made = self.do(lambda: step() if self.rank == 0 else None)
        return self.from_first(made)  # type: ignore[return-value]  # the first rank's is no None of ours

    def agree(self, error: BaseException | None = None) -> None:
        """Wait for all ranks, and raise on all of them if one has failed.

        Raises ZckptError: that of the first rank that has one; of this rank itself, if it has; RuntimeError: another
        rank failed in another way.
        """
        failures = self._exchange(error)
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                _raise(rank, failure)

    def _exchange(self, error: BaseException | None) -> list[Failure | None]:
        """Send all ranks the failure of this one, and return that of each; who is gone is told nothing."""
        if isinstance(error, WorkerError):
            raise error
        if not self.any(error is not None):  # hardly ever is there one, and a number is cheaper to send
            return []
        return self.gather_all(None if error is None else _packed(error))


def broadcast(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> dist.Work:
    """Begin to send what one rank of a group has to all of it; what is returned is to be waited for."""
    source = dist.get_global_rank(group, rank)
    return dist.broadcast(tensor, src=source, group=group, async_op=True)  # type: ignore[no-any-return]


def wait_for(handles: Iterable[dist.Work]) -> None:
    """Wait for what was begun."""
    for handle in handles:
        handle.wait()


@contextmanager
def answering() -> Iterator[None]:
    """Turn what a process group raises whose ranks are gone, or silent, into a WorkerError.

    Others wait for this rank in the same call, and learn of it only when this process ends: nobody can be told more.
    """
    try:
        yield
    except RuntimeError as error:
        found = str(error).partition("\n")[0]
        raise WorkerError("another rank has ended, or does not answer", found=found) from error


def _packed(error: BaseException) -> Failure:
    """Return an error as what any process group can send."""
    if isinstance(error, ZckptError):
        every = ((key, getattr(error, key)) for key in ("path", "expected", "found", "advice", "code"))
        return type(error), shown(error.message), {key: shown(str(value)) for key, value in every if value}
    return RuntimeError, shown(f"{type(error).__name__}: {error}"), {}


def _raise(rank: int, failure: Failure) -> NoReturn:
    kind, message, fields = failure
    if issubclass(kind, ZckptError):
        raise kind(f"on rank {rank}, {message}", **fields)
    raise RuntimeError(f"rank {rank} failed: {message}")


def find_checksums(checks: Checks, checkpoint: Checkpoint, ranks: Ranks, *, of_optimizer: bool = True) -> None:
    """Let checks find what a checkpoint's files say of themselves, which the first rank holds against each other.

    Of an optimizer small files are checked, too: a step count was read when the source was opened.
    """
    checks.find = checksums_by_path([checkpoint])
    if ranks.rank == 0:
        check_files_apart(checkpoint)
        checks.expect(file.path for file in checkpoint.files if of_optimizer and file.nbytes <= ALWAYS_NBYTES)


def check_together(checks: Checks, ranks: Ranks, root: str, *, spoiled: str | None = None) -> None:
    """Hold what all ranks have read against the checksums of the files that it is from.

    What several have read of one record is put together by one of them, which reads what little is missing. Without
    `find`, which all ranks have or none, nothing is checked. `root` is what is read, as this rank calls it. Raises
    DamagedFileError: a record is damaged, on all ranks, if on one.
    """
    if checks.find is None:
        return
    if ranks.world_size > 1:
        for_each: list[list[Any]] = [[] for _ in range(ranks.world_size)]
        for one, seen in checks.hand_over():
            told = _moved(one, root, BELOW)
            to = crc32(f"{told.path}:{told.offset}".encode("utf-8", "surrogateescape")) % ranks.world_size
            for_each[to].append((astuple(told), [(each.offset, each.nbytes, each.crc32) for each in seen]))
        for fields, parts in (each for some in ranks.exchange(for_each) for each in some):
            one = _moved(Sum(*fields), BELOW, root)
            checks.take_over(one, [Seen(one.path, *part) for part in parts])
    ranks.do(checks.finish, spoiled=spoiled)


def _moved(one: Sum, was: str, now: str) -> Sum:
    return replace(one, path=now + one.path.removeprefix(was)) if one.path.startswith(was) else one


@contextmanager
def written_together(
    path: Place, ranks: Ranks, *, overwrite: bool, owned: Owned, last: Sequence[str] = ()
) -> Iterator[Path]:
    """Let all ranks write into one new directory, which the first rank makes and names; a failure of one is one of all.

    With `overwrite`, it replaces a directory that `owned` recognises. In a store, only `write_target` writes into it;
    files that are called as in `last` are the first rank's, and come last. Raises TargetError: it exists, or cannot be
    written.
    """
    from zckpt.operations.shared_target import shared_target  # what only loads does without

    with ExitStack() as stack:

        def opened() -> SharedTarget:
            found = shared_target(path, last=last)
            stack.callback(found.close)
            return found

        shared = ranks.do(opened)
        error: Exception | None = None
        try:
            ranks.of_first(lambda: shared.begin(overwrite=overwrite, owned=owned))
            shared.join(Path(ranks.from_first(str(shared.path))))
            try:
                yield shared.path
            except Exception as failure:  # noqa: BLE001  # all ranks learn of it
                error = failure
                if isinstance(failure, OSError) and not isinstance(failure, ZckptError):
                    error = TargetError("cannot be written", path=path, found=failure.strerror or str(failure))
            ranks.agree(error)
            every = ranks.gather(shared.sent())
            ranks.of_first(lambda: shared.commit(every))
        except BaseException as failure:
            shared.abort(failure)
            raise


@contextmanager
def read_together(partial: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield a directory in which each rank reads what all have written into one that has no name yet.

    Raises TargetError: a store cannot be written.
    """
    from zckpt.operations.shared_target import SHARED

    shared = SHARED[partial]
    every = ranks.gather(shared.sent())
    ranks.of_first(lambda: shared.finish(every))
    shared.in_memory = ranks.from_first(shared.in_memory)
    with ExitStack() as stack:
        yield ranks.do(lambda: stack.enter_context(shared.readable()))
