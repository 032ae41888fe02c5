"""The spare of a run: what `Checkpointer(replicate=True)` keeps in memory, between saves.

Workers die, and an agent starts all of them again; so it is in no process, but in a file system that is in memory,
which outlives them. On each node:

/dev/shm/zckpt-UID/RUN/node                                 by which ranks find out who shares this memory
/dev/shm/zckpt-UID/RUN/ID/rank-00000-of-00004.safetensors   a checkpoint in zckpt's format: the files of its ranks,
/dev/shm/zckpt-UID/RUN/ID/rank-00003-of-00004.safetensors   and of those of the node before it
/dev/shm/zckpt-UID/RUN/ID/checkpoint.json                   the document, on the first node and the next one
/dev/shm/zckpt-UID/RUN/ID/spare.json                        written when all ranks have written theirs

Files are sent to the next node while training goes on; when all have arrived, what was kept before is removed. So there
is always one that is whole without any one node.

RUN is in the run's directory (`spare.json` there): who removes that, and begins anew, meets no spare of before.
A spare is of use only if it was kept after what `latest` names, which it says (`follows`). It is not loaded from
memory: its files are copied into the run's directory, by ranks that have them, and are a checkpoint like any other.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zckpt.engine.plan import plan
from zckpt.engine.targets import TargetFile
from zckpt.errors import SourceError, TargetError, UsageError, WorkerError, ZckptError
from zckpt.formats.companions import copy_of
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED, is_own, rank_name
from zckpt.immutable import immutable
from zckpt.operations.small_file import write_text
from zckpt.operations.target import write_target
from zckpt.optim.ranks import Place, Ranks, answering, written_together
from zckpt.optim.states.several import process_group_of, workers_of
from zckpt.state import by_key, first_of
from zckpt.storage.files import read_whole
from zckpt.training.directory import new_identity, record_fingerprint, write_all
from zckpt.training.run_directory import RunPlace, document, document_text
from zckpt.training.saving import prepared_of

SPARE = "spare.json"
"""Of the run's directory, and of a spare's."""

NODE = "node"

FORMAT = "zckpt spare"
MEMORY = Path("/dev/shm")  # noqa: S108  # what is made there is this user's alone
"""Where Linux has a file system in memory."""

IDENTITY = re.compile(r"[0-9a-f]{1,64}")


@immutable
class About:
    """What a `spare.json` says of a spare.

    `follows`: what `latest` may name, as `RunPlace.latest` says it: the save before it, and one that was going on then;
    `made`: when, by the clock of the first rank.
    """

    id: str
    step: int
    world_size: int
    follows: tuple[str, ...]
    made: int


PIECE_NBYTES = 64 << 20
"""Sent at once: what fails is told, at the latest, after so many bytes."""

SENDING = "spare"
"""What ranks are for that talk in the thread that sends."""

_POOL = ThreadPoolExecutor(1, thread_name_prefix="zckpt-spare")
"""The thread that sends, of all spares of this process: two would talk at once in the same group."""


@immutable
class Found:
    """A spare that is whole, and the rank that each of its files is copied by."""

    about: About
    files: dict[str, int]


class Spare:
    """The spare of a run. All ranks make one together, and call its methods together.

    `place`: the run's directory; `within`: of each node, a directory that outlives its processes; by default, /dev/shm.
    Raises UsageError: there is no such directory; TargetError: it cannot be written, or what is there is another
    user's.
    """

    def __init__(self, ranks: Ranks, place: RunPlace, within: Path | None = None) -> None:
        self._ranks = ranks
        run = ranks.of_first(lambda: identity_of_run(place))
        self.directory = ranks.do(lambda: made_directory(within or MEMORY, run))
        nodes = ranks.gather_all(ranks.do(lambda: node_of(self.directory)))
        self._is_first_of_node = nodes.index(nodes[ranks.rank]) == ranks.rank
        self._receivers = neighbours(nodes)
        self._sending: Future[None] | None = None
        sends = any(receiver is not None for receiver in self._receivers)
        self._senders = Ranks(ranks.given, purpose=SENDING) if sends else None

    def keep(self, given: Mapping[str, Any], follows: Sequence[str]) -> None:
        """Keep what this rank has here, and let a thread send it to the next node; then forget what was kept before.

        `given`: as for `save_given`; `follows`: of the first rank: see `About`. Raises UsageError: an optimizer of RPC
        workers, or of other ranks; TargetError: there is no room, or there was none for the one before on the next
        node: what was kept before that is still there.
        """
        self.finish()
        ranks = self._ranks
        if workers_of(given["optimizer"]) is not None:
            raise UsageError("a DistributedOptimizer is not kept in memory", advice="leave replicate out")
        group = None if ranks.given is not None else process_group_of(given["optimizer"])
        if group is not None and dist.get_process_group_ranks(group) != ranks.members:
            raise UsageError("the optimizer is of fewer ranks", advice="give the Checkpointer process_group=, too")
        prepared = prepared_of(ranks, given)
        told = About(new_identity(), given["step"], ranks.world_size, tuple(follows), time.time_ns())
        about = ranks.from_first(told)
        directory = self.directory / about.id
        with _removed_if_failed(directory):
            ranks.do(lambda: _made(directory))
            write_all(ranks, directory, about.id, prepared)
        ranks.do(lambda: self._tell(directory, about))
        if self._senders is not None:
            self._sending = _POOL.submit(self._send_all, self._senders, directory)

    def _tell(self, directory: Path, about: About) -> None:
        """Say that the spare is whole, as long as all nodes are there; of a single node, remove those before."""
        if self._is_first_of_node:
            write_text(directory / SPARE, document_text(FORMAT, asdict(about)))
            if self._senders is None:
                self._remove(but=directory)

    def finish(self) -> None:
        """Wait until what was kept last has been sent. Raises as `keep`, on all ranks."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def _send_all(self, ranks: Ranks, directory: Path) -> None:
        """Send this rank's files to the next node, and forget what was kept before."""
        with _removed_if_failed(directory):
            for name in (rank_name(ranks.rank, ranks.world_size), DOCUMENT_NAME):
                self._send(ranks, directory, name)
        ranks.do(lambda: self._remove(but=directory))

    def _remove(self, *, but: Path | None = None) -> None:
        for one in spares(self.directory) if self._is_first_of_node else []:
            if one != but:
                shutil.rmtree(one, ignore_errors=True)

    def _send(self, ranks: Ranks, directory: Path, name: str) -> None:
        """Send a file of this rank, if it has it, to the next node, and write those that come from the one before."""
        receivers = self._receivers
        own = directory / name
        mine = own.stat().st_size if receivers[ranks.rank] is not None and own.exists() else None
        if name == DOCUMENT_NAME and ranks.rank:
            mine = None
        sizes: list[tuple[str, int | None]] = ranks.gather_all((name, mine))
        coming = [
            _Mapped(directory / its, size, sender)
            for sender, (its, size) in enumerate(sizes)
            if size is not None and receivers[sender] == ranks.rank
        ]
        going = None if mine is None else _Mapped(own, mine)
        most = max((size for _, size in sizes if size is not None), default=0)
        for start in range(0, most, PIECE_NBYTES):
            piece = going.piece(start) if going is not None and start < going.nbytes else None
            with answering():
                work = [dist.irecv(one.piece(start), src=ranks.members[one.sender or 0], group=ranks.group)
                        for one in coming if start < one.nbytes]  # fmt: skip
                if piece is not None:
                    work.append(dist.isend(piece, dst=ranks.members[receivers[ranks.rank] or 0], group=ranks.group))
                for one in work:
                    if one is not None:
                        one.wait()
        errors = [one.end() for one in coming] + ([] if going is None else [going.end()])
        ranks.agree(first_of(errors))

    def find(self, latest: str) -> Found | None:
        """Return the spare that may be gone on with; None if there is none that is whole and follows `latest`.

        `latest`: as `RunPlace.latest` says it.
        """
        ranks = self._ranks
        here = ranks.do(
            lambda: [
                (one.name, _read_about(one), sorted(path.name for path in one.iterdir() if is_own(path.name)))
                for one in spares(self.directory)
            ]
        )
        abouts: dict[str, About] = {}
        having: dict[str, dict[str, list[int]]] = {}
        for rank, every in enumerate(ranks.gather_all(here)):
            for identity, about, files in every:
                if about is not None:
                    abouts[identity] = about
                for name in files:
                    having.setdefault(identity, {}).setdefault(name, []).append(rank)
        whole = []
        for about in abouts.values():
            names = [DOCUMENT_NAME, *(rank_name(rank, about.world_size) for rank in range(about.world_size))]
            its = having.get(about.id, {})  # none, where a kill has cut its removal short
            if latest in about.follows and all(name in its for name in names):
                by = {name: its[name][number % len(its[name])] for number, name in enumerate(names)}
                whole.append(Found(about, by))
        return max(whole, key=lambda found: found.about.made, default=None)

    def copy(self, found: Found, path: Place, *, overwrite: bool, fingerprint: bool) -> None:
        """Copy a spare to where a checkpoint is to be; each file by one of the ranks that have it.

        With `fingerprint`, it gets one, as a save does: a step that is kept in memory does not wait for it. Raises
        TargetError: it cannot be written.
        """
        ranks, directory = self._ranks, self.directory / found.about.id
        mine = [name for name, rank in found.files.items() if rank == ranks.rank and name != DOCUMENT_NAME]
        has_document, document_at = found.files[DOCUMENT_NAME] == ranks.rank, directory / DOCUMENT_NAME
        data = ranks.do(lambda: read_whole(str(document_at), most=document_at.stat().st_size) if has_document else None)
        documents = ranks.gather(data)  # in a store, the first rank writes it

        def written(partial: Path) -> None:
            for name in mine:
                write_target(plan([copy_of(directory / name, name)]), partial / name)

        def finished(partial: Path) -> None:
            [data] = [one for one in documents if one is not None]
            write_target(plan([TargetFile.of(DOCUMENT_NAME, data)]), partial / DOCUMENT_NAME)

        with written_together(path, ranks, overwrite=overwrite, owned=OWNED, last=[DOCUMENT_NAME]) as partial:
            ranks.do(lambda: written(partial))
            ranks.of_first(lambda: finished(partial))
            if fingerprint:
                record_fingerprint(ranks, partial)

    def forget(self) -> None:
        """Remove every spare: none is gone on with any more."""
        self._ranks.do(self._remove)

    def close(self, *, keep: bool) -> None:
        """Wait until nothing is sent any more; unless what was kept is to stay, give the memory of this node back."""
        with suppress(Exception):  # of what is removed now, or beside an error that is on its way
            self.finish()
        if self._is_first_of_node and not keep:
            shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def _removed_if_failed(directory: Path) -> Iterator[None]:
    try:
        yield
    except WorkerError:  # others may have what is to be gone on with
        raise
    except ZckptError as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, TargetError):
            unwritten(directory, error)
        raise


def neighbours(nodes: Sequence[str]) -> list[int | None]:
    """Return the rank of the next node that each rank sends its share to; None where there is one node only.

    `nodes`: the node of each rank.
    """
    on = by_key((node, rank) for rank, node in enumerate(nodes))
    if len(on) == 1:
        return [None] * len(nodes)
    order = list(on)
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [on[following[node]][on[node].index(rank) % len(on[following[node]])] for rank, node in enumerate(nodes)]


class _Mapped:
    """A file that is sent, or comes from another rank, as memory.

    What fails is told at the end, so that no rank is left waiting; what comes gets its name then.
    """

    def __init__(self, path: Path, nbytes: int, sender: int | None = None) -> None:
        self.nbytes, self.sender = nbytes, sender
        self._path = path
        self._partial = path if sender is None else path.with_name(f".{path.name}.zckpt-partial")
        self._error: Exception | None = None
        self._memory: torch.Tensor | None = None
        try:
            with self._partial.open("r+b" if sender is None else "w+b") as file:
                if sender is not None:
                    os.posix_fallocate(file.fileno(), 0, nbytes)  # memory without room would end the process
                self._memory = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        except (OSError, ValueError) as error:  # ValueError: it is shorter
            self._error = SourceError("cannot be read", path=path, expected=f"{nbytes} bytes", found=str(error))
            if sender is not None and isinstance(error, OSError):
                self._error = unwritten(self._partial, error)

    def piece(self, start: int) -> torch.Tensor:
        """Return the memory of bytes from `start` on; some other, if there is none."""
        count = min(PIECE_NBYTES, self.nbytes - start)
        if self._memory is None:
            return torch.zeros(count, dtype=torch.uint8, device="cpu")
        return self._memory[start : start + count]

    def end(self) -> Exception | None:
        """Give the file its name; return what has failed."""
        if self._error is None:
            try:
                self._partial.rename(self._path)
            except OSError as error:
                self._error = unwritten(self._partial, error)
        return self._error


# --- what of it is on a node


def unwritten(path: Path, error: OSError) -> TargetError:
    """Return an error of a file system in memory as one that says what a spare needs."""
    told = error
    if not isinstance(told, TargetError):
        told = TargetError("cannot be written", path=path, found=error.strerror)
    told.advice = "a copy needs twice what the ranks of this node and of the one before it save; or see replicate_in="
    return told


def made_directory(within: Path, run: str) -> Path:
    """Return the directory of a run's spares, which this user alone can read."""
    if not within.is_dir():
        raise UsageError(
            "there is no such directory for copies",
            path=within,
            advice="give replicate_in=, a directory that outlives the workers",
        )
    mine = _made(within / f"zckpt-{os.getuid()}")
    found = mine.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TargetError("is not a directory that only this user can access", path=mine, advice="remove it")
    return _made(mine / run)


def _made(path: Path) -> Path:
    """Make a directory that this user alone can read, if it is not there."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise unwritten(path, error) from error
    return path


def node_of(directory: Path) -> str:
    """Return what tells this node from others: all who see this directory get the same."""
    path = directory / NODE
    own = directory / f".{NODE}-{secrets.token_hex(8)}"
    try:
        write_text(own, secrets.token_hex(16))
        with suppress(FileExistsError):
            os.link(own, path)
        return path.read_text()
    finally:
        own.unlink(missing_ok=True)


def spares(directory: Path) -> list[Path]:
    """Return the directories of spares, whole or not."""
    every = directory.iterdir() if directory.is_dir() else ()
    return sorted(path for path in every if IDENTITY.fullmatch(path.name) and path.is_dir())


def _read_about(directory: Path) -> About | None:
    """Return what is said of a spare that is whole; None: it is not, or this version does not know."""
    with suppress(SourceError), document(directory / SPARE, FORMAT, "is none of a spare", "remove it") as found:
        follows = tuple(str(one) for one in found["follows"])
        return About(directory.name, int(found["step"]), int(found["world_size"]), follows, int(found["made"]))
    return None


def identity_of_run(place: RunPlace) -> str:
    """Return the run that a directory is of, which it gets when it is asked first."""
    place.make()
    with place.seen() as directory:
        path = directory / SPARE
        if os.path.lexists(path):
            with document(path, FORMAT, "does not name a run", "remove it") as found:
                if not IDENTITY.fullmatch(found["run"]):
                    raise ValueError(found["run"])
                return str(found["run"])
    run = secrets.token_hex(16)
    write_text(place.checkpoint(SPARE), document_text(FORMAT, {"run": run}))
    return run
