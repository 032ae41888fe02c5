"""`Writer`: `torch.distributed.checkpoint.save` in zckpt's own format.

coordinator     makes the partial directory when all plans are there
every rank      writes its file, and tells what is in it
coordinator     writes the first file, which has tensors beside the model and the optimizer, and the document; renames
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zckpt.dcp.contents import Held, Part, contents, part_of, tie
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.native.files import DOCUMENT_NAME, OWNED
from zckpt.formats.suffixes import check_directory
from zckpt.operations.places import place_of
from zckpt.operations.shared_target import SharedTarget, shared_target
from zckpt.optim.ranks import Place
from zckpt.optim.values import Values
from zckpt.state import Checkpoint, Topology, by_key
from zckpt.training.directory import new_identity, storage_entries, write_document, write_rank
from zckpt.version import __version__

_WRITING: WeakValueDictionary[Place, Writer] = WeakValueDictionary()
"""By target, who has a partial directory of it: DCP does not tell a coordinator that another rank has failed."""


class Writer(StorageWriter):
    """Write a checkpoint in zckpt's format with `dcp.save` or `dcp.async_save`; each rank writes its own part.

        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.save(state | {"step": step}, storage_writer=zckpt.dcp.Writer("run/step-500"))

    The model and the optimizer are recognised in the state dict by their form, under any keys: as from `get_state_dict`
    of `torch.distributed.checkpoint.state_dict`, nested or flattened, or as from their own `state_dict`. Everything
    else is saved, too: plain data, numpy arrays and unsharded tensors, which should be small, since the coordinator
    writes them. Replicas are written once, as DCP's planner assigns them.

    The checkpoint appears whole or not at all. `zckpt.open`, `load`, `convert` and so on read it, and so does
    `dcp.load` with `zckpt.dcp.Reader`.

    Parameters
    ----------
    path : path-like, optional
        A directory that does not exist, on a file system that all ranks share, or its URL in a store. Default: the
        `checkpoint_id` given to `dcp.save`.
    overwrite : bool
        Replace an existing directory of zckpt's format.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> None:
        self.path = None if path is None else os.fspath(path)
        self._overwrite = overwrite
        self._made: SharedTarget | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The path, as DCP calls it."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path on a file system, or a URL."""
        try:
            place_of(checkpoint_id)
        except UsageError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start over; called on each rank."""
        self._abandon()
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: object, use_collectives: bool = True, **kwargs: object
    ) -> None:
        """Start a save; called on each rank.

        Raises
        ------
        UsageError
            No path was given, or that of a file; or ranks would save without communicating.
        """
        del is_coordinator, args, kwargs  # torch gives what it sees that there is a place for
        self._abandon()
        if self.path is None:
            raise UsageError("no checkpoint to write", advice="give Writer a path, or dcp.save a checkpoint_id")
        check_directory(Path(self._target()))
        if not use_collectives:
            raise UsageError("zckpt's format has one document for all ranks", advice="do not change use_collectives")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the partial directory and tell each rank its file; called on the coordinator.

        Raises
        ------
        TargetError
            The directory exists or cannot be written.
        """
        target = self._target()
        before = _WRITING.pop(target, None)
        if before is not None:
            before._abandon()
        made = shared_target(target, last=[DOCUMENT_NAME])
        identity = new_identity()
        try:  # it is noted there: planners that keep their plans give ranks the `storage_data` of an earlier save
            made.begin(overwrite=self._overwrite, owned=OWNED, note=identity.encode())
        except BaseException as error:
            _end(made, error)
            raise
        self._made = made
        _WRITING[target] = self
        count = len(plans) + 1
        return [replace(plan, storage_data=(rank + 1, count)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file.

        Raises
        ------
        UnsupportedError
            The format cannot hold something.
        TargetError
            It cannot be written.
        """
        target, (file, count) = self._target(), plan.storage_data
        part, entries = part_of(plan, planner, str(self.path))
        shared = self._made or shared_target(target)
        error: BaseException | None = None
        try:
            part.file = write_rank(shared.path, file, count, entries, shared.noted().decode())
            part.sent = shared.sent()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if shared is not self._made:
                _end(shared, error)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(part.file.name), part.file.nbytes, part)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the document and make the checkpoint appear; called on the coordinator.

        Raises
        ------
        UsageError
            No save has been planned with this writer.
        ZckptError
            It cannot be written; nothing has been.
        """
        made, self._made = self._made, None
        if made is None:
            raise UsageError("this writer has not planned a save", advice="use it through dcp.save")
        _WRITING.pop(self._target(), None)
        parts: list[Part] = [one.storage_data for of_rank in results for one in of_rank]
        try:
            directory, identity, values = made.path, made.noted().decode(), Values()
            checkpoint = _whole(metadata, parts, values, str(self.path))
            checkpoint.format_version = f"zckpt {__version__}"
            checkpoint.world_size = len(parts)
            checkpoint.topology = Topology(dp=len(parts))
            stored = storage_entries(checkpoint, values)
            files = [write_rank(directory, 0, len(parts) + 1, stored, identity), *(part.file for part in parts)]
            where = by_key((key, (rank, one)) for rank, part in enumerate(parts, 1) for key, one in part.pieces.items())
            write_document(checkpoint, where, identity, files, directory)
            made.commit([made.sent(), *(part.sent for part in parts)])
        except BaseException as error:
            _end(made, error)
            raise
        _end(made)

    def _target(self) -> Place:
        target = place_of(str(self.path))
        return target.absolute() if isinstance(target, Path) else target

    def _abandon(self) -> None:
        """Remove what a save that failed on another rank has left."""
        made, self._made = self._made, None
        if made is not None:
            _end(made, InterruptedError("another rank has failed"))


def _end(shared: SharedTarget, error: BaseException | None = None) -> None:
    """Let go of a directory; with an error, remove what has been written."""
    if error is not None:
        shared.abort(error)
    shared.close()


def _whole(metadata: Metadata, parts: list[Part], values: Values, source: str) -> Checkpoint:
    """Return the logical state of what all ranks have written."""
    found: dict[str, object] = {}
    tied: dict[str, str] = {}
    for part in parts:
        tied.update(part.tied)
        found.update({key: Held(piece.dtype, piece.shape) for key, piece in part.pieces.items()})
        found.update({key: values.node(value, key) for key, value in part.values.items()})
        for key, tensor in part.tensors.items():
            node = values.tensor(tensor, key)
            found[key] = Held(node.dtype, node.shape, node)
    found.update({alias: found[owner] for alias, owner in tied.items() if owner in found})
    paths = {key: path for key, path in (metadata.planner_data or {}).items() if key in found}
    whole = contents(source, found, paths)
    if whole.lost:
        raise UnsupportedError(f"there is no information about {', '.join(whole.lost[:4])}", path=source)
    for alias, owner in tied.items():
        names = [whole.slots[key][1] for key in (owner, alias)]
        if set(names) <= whole.checkpoint.parameters.keys():
            tie(whole.checkpoint, *names)
    return whole.checkpoint
