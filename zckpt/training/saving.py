"""`save`: every rank writes its share of a checkpoint in zckpt's format; the first makes it whole, at the end.

    first rank      creates the partial directory and sends its name
    every rank      writes its file there, and says to the first what is in it
    first rank      writes `checkpoint.json`, which says where everything is, and renames the directory

If a rank fails, all are informed; then none has saved, and nothing is left behind.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zckpt.errors import UsageError, WorkerError
from zckpt.formats.suffixes import check_directory
from zckpt.immutable import mutable
from zckpt.operations.places import lasting_place_of, place_of
from zckpt.optim import files
from zckpt.optim.ranks import Place, Ranks
from zckpt.optim.states import state_class
from zckpt.optim.states.by_parameter import NamedShare, Snapshot
from zckpt.optim.states.several import Given, check_file_system, named, process_group_of, workers_of
from zckpt.optim.tensors import Model, ModelState, Stateful, parts_of, world_rank
from zckpt.optim.values import Values, number_of_steps
from zckpt.state import differ
from zckpt.training.directory import Prepared, RankState, Staging, divide, entries, of_first, save_workers, write
from zckpt.training.live import NOT_THE_SAME, Live, Part, TpRules, refuse_unlike, settled, slices_of
from zckpt.training.other_state import others_given, random_states

if TYPE_CHECKING:
    from zckpt.training.slices import Sliced

FORMATS = ("zckpt", "deepspeed", "zero-redundancy")


class Saving:
    """A save that runs while training goes on.

    `result` raises its errors, or else the next save does, on all ranks.
    """

    def __init__(self, future: Future[None], path: Place, ranks: Ranks) -> None:
        self.path = path
        self.ranks = ranks
        self._future = future
        self._is_raised = False

    def done(self) -> bool:
        """Return whether the save has finished or failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is whole.

        Parameters
        ----------
        timeout : float, seconds

        Raises
        ------
        TimeoutError
            It is not finished yet.
        ZckptError
            It could not be written, and does not exist.
        """
        try:
            self._future.result(timeout)
        finally:
            self._is_raised = self._is_raised or self._future.done()

    def unseen_error(self) -> Exception | None:
        """Wait until the checkpoint is whole; return its error, if it has one that `result` has not raised yet."""
        if self._is_raised:
            return None
        try:
            self.result()
        except Exception as error:  # noqa: BLE001  # whatever it is, all ranks learn of it
            return error
        return None


@mutable
class _Background:
    """The thread that writes, the save that it has, and the memory from which it writes."""

    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="zckpt-save"))
    saving: Saving | None = None
    staging: Staging = field(default_factory=Staging)

    def finish(self) -> None:
        """Wait for the save that is going on, and raise its error unless all ranks have seen it."""
        saving, self.saving = self.saving, None
        if saving is not None:
            error = saving.unseen_error()
            if not saving.ranks.are_gone:
                saving.ranks.agree(error)
            elif error is not None:
                warnings.warn(f"{saving.path} was not saved: {error}", stacklevel=4)

    def start(self, written: Callable[[], None], path: Place, ranks: Ranks) -> Saving:
        """Let the thread write, with ranks of the purpose `SAVE`; `ranks` are those of the thread that trains."""
        self.saving = Saving(self.pool.submit(written), path, ranks)
        return self.saving


BACKGROUND = _Background()
"""Of this process, whatever is saved: one save after the other."""

SAVE = "save"
"""What ranks are for that talk in the thread that writes."""


def save(
    path: str | os.PathLike[str],
    *,
    model: Model = None,
    optimizer: Given = None,
    step: int | None = None,
    scheduler: Stateful | None = None,
    grad_scaler: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
    format: str = "zckpt",  # noqa: A002  # as elsewhere
    async_: bool = False,
    overwrite: bool = False,
    fingerprint: bool = False,
    tp_rules: TpRules = None,
    process_group: dist.ProcessGroup | None = None,
) -> Saving | None:
    """Save a live model and optimizer; all ranks call it together, and each writes its share.

    Ranks that hold the same data share the work. The checkpoint appears whole or not at all, and includes each rank's
    random states.

    Parameters
    ----------
    path : path-like
        A directory that does not exist, on a file system that all ranks share; or its URL in a store, to which each
        rank sends its part.
    model : Module, or list of them, optional
        Plain, in DistributedDataParallel or `torch.compile`, or sharded by `fully_shard`. A list holds this rank's
        parts of one model, such as pipeline stages, with the names of the whole model.
    optimizer : Optimizer, or list or mapping of them, optional
        Any of zckpt's or torch's; several, for different parameters, in a list or by name. With a list of parts, a list
        of optimizers is one optimizer in parts. For a DistributedOptimizer, only its caller calls this, and the workers
        write.
    step : int, optional
        Number of steps trained.
    scheduler, grad_scaler : optional
        Their `state_dict()` is saved.
    extra : mapping, optional
        Plain data, tensors and numpy arrays; the first rank's are written.
    format : {"zckpt", "deepspeed", "zero-redundancy"}
        "deepspeed", for a ZeroOptimizer: DeepSpeed loads it at the same number of ranks. "zero-redundancy": for a
        ZeroRedundancyOptimizer or DistributedOptimizer (the latter only on file systems). `zckpt convert` writes
        others.
    async_ : bool
        Return as soon as everything has been copied to host memory. Only one save runs at a time: the next one waits
        for it. Let it finish before the process group is destroyed.
    overwrite : bool
        Replace the directory if it exists and holds only a checkpoint of the same format.
    fingerprint : bool
        Store the fingerprint with it (only in zckpt's format): each rank reads back part of what was written.
    tp_rules : path-like or mapping, optional
        How the ranks' tensor-parallel slices form parameters: `universal_checkpoint_info`, or a JSON file with it. For
        a ZeroOptimizer with `model_parallel`.
    process_group : ProcessGroup, optional
        The ranks that save. Default: the optimizer's, or the whole world (also for slices).

    Returns
    -------
    Saving or None
        With `async_`, an object to wait for.

    Raises
    ------
    UsageError
        Something has no name, a parameter is in two optimizers, `step` is no number, or the format does not fit the
        optimizer.
    UnsupportedError
        Only a pickle could hold something.
    TargetError
        The directory exists or cannot be written; raised on all ranks, if on one.
    """
    given = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "grad_scaler": grad_scaler, "extra": extra,
        "step": number_of_steps(step), "tp_rules": tp_rules,
    }  # fmt: skip
    return save_given(
        lasting_place_of(path) if async_ else place_of(path), given, process_group,
        format=format, async_=async_, overwrite=overwrite, fingerprint=fingerprint,
    )  # fmt: skip


def save_given(
    path: Place,
    given: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
    *,
    format: str = "zckpt",  # noqa: A002  # as elsewhere
    async_: bool,
    overwrite: bool,
    fingerprint: bool,
    identity: str | None = None,
    then: Callable[[], None] | None = None,
) -> Saving | None:
    """Save as `save` does, with the id of the checkpoint given.

    Parameters
    ----------
    path : Path or str
        A string is a URL.
    given : mapping
        What is trained, `step` and `tp_rules`.
    process_group, format, async_, overwrite, fingerprint
        As for `save`.
    identity : str, optional
        The id that the document gets, of the first rank; by default a new one.
    then : callable, optional
        What the first rank does when the checkpoint is there; if it fails, all have failed.
    """
    BACKGROUND.finish()
    check_directory(Path(path))
    if format not in FORMATS:
        raise UsageError(
            f"unknown format {format}",
            expected=", ".join(FORMATS),
            advice="save in zckpt's format, and use `zckpt convert`",
        )
    optimizer = given["optimizer"]
    workers = workers_of(optimizer)
    if workers is not None:
        check_file_system(path)
    if fingerprint and (format != "zckpt" or workers is not None):
        raise UsageError(
            "a fingerprint is recorded by ranks that write zckpt's format",
            found=f"format {format}" if format != "zckpt" else "a DistributedOptimizer",
            advice="use zckpt fingerprint --write",
        )
    if format != "zckpt":
        _save_as(format, path, given, async_=async_, overwrite=overwrite)
        return None
    if workers is not None:
        if async_:
            raise UsageError("a DistributedOptimizer cannot be saved while training goes on", advice="leave async_ out")
        save_workers(Path(path), workers, given, overwrite=overwrite, identity=identity)
        if then is not None:
            then()
        return None
    group = process_group or process_group_of(optimizer)
    ranks = Ranks(group, purpose=SAVE if async_ else "")
    prepared = prepared_of(ranks, given, BACKGROUND.staging if async_ else None)

    def written() -> None:
        write(ranks, path, prepared, overwrite=overwrite, fingerprint=fingerprint, identity=identity)
        if then is not None:
            ranks.of_first(then)

    if async_:
        return BACKGROUND.start(written, path, Ranks(group))
    written()
    return None


def _save_as(form: str, path: Place, given: Mapping[str, Any], *, async_: bool, overwrite: bool) -> None:
    """Save in a format of another program, which the optimizer writes as a whole.

    Raises UsageError: the format is not one for this optimizer, or has room for one only.
    """
    model, every = given["model"], named(given["optimizer"])
    if len(every) > 1:
        raise UsageError(
            f"format {form} has room for one optimizer", found=f"{len(every)} optimizers", advice="save as zckpt"
        )
    for one in every.values():
        if state_class(one).writes != form:
            raise UsageError(
                f"format {form} does not suit {type(one).__name__}",
                advice="save in zckpt's format, and use `zckpt convert`",
            )
    for is_so, message, advice in (
        (isinstance(model, (list, tuple)), f"format {form} is not written of a model in parts", "save as zckpt"),
        (not every, f"format {form} is written of an optimizer, and none is given", "save as zckpt"),
        (
            given["tp_rules"] is not None,
            f"tp_rules are for zckpt's own format, not {form}",
            "give universal_checkpoint_info in extra",
        ),
        (async_, f"format {form} cannot be written while training goes on", "save as zckpt"),
    ):
        if is_so:
            raise UsageError(message, advice=advice)
    [optimizer], whole = every.values(), next(iter(parts_of(model)), None)
    files.save(optimizer, path, model=whole, step=given["step"], beside=others_given(given), overwrite=overwrite)


@mutable
class _Own:
    """What this rank has; `in_parts`: other ranks have other parts of the model; `sliced`: of slices, what it has."""

    tensors: ModelState = field(default_factory=ModelState)
    state: Snapshot = field(default_factory=Snapshot)
    shares: list[NamedShare] = field(default_factory=list)
    in_parts: bool = False
    sliced: Sliced | None = None

    @classmethod
    def of(cls, ranks: Ranks, given: Mapping[str, Any]) -> _Own:
        """Find it out."""
        slices = slices_of(ranks, given["tp_rules"], given["optimizer"])
        live = Live.of(given["model"], given["optimizer"], slices)
        tensors = ModelState.of_parameters(live.optimizers.parameters()) if live.model is None else live.tensors
        state = live.optimizers.snapshot()
        shares = tensors.shares() + state.shares
        own = cls(tensors, state, shares, live.is_in_parts(ranks))
        if slices is not None:
            own.sliced = slices.sliced(tensors, shares)
            own.tensors, own.shares = slices.whole(tensors), own.sliced.shares
        return own

    def agree(self, ranks: Ranks, *, failed: bool) -> None:
        """Find out which ranks have the same; `failed`: this rank does not know what it has."""
        buffers = self.tensors.tensors.keys() - self.tensors.parameters
        alike = [
            f"{slot} of {name} {list(share.shape)}" for name, slot, share in self.shares
            if share.ranks is None and name not in buffers
        ]  # fmt: skip
        digests = () if failed else tuple(blake2b(repr(one).encode()).digest() for one in (alike, sorted(alike)))
        told = ranks.gather_all((self.in_parts, digests))
        self.in_parts = any(one for one, _ in told)
        if self.in_parts:
            advice = NOT_THE_SAME
            if ranks.any(self.sliced is not None):
                from zckpt.training.slices import NOT_COPIES, Sliced, collected

                advice = NOT_COPIES if self.sliced is not None else advice
                if not ranks.any(failed):
                    self.shares += collected(ranks, self.sliced or Sliced())
            self.shares = settled(ranks, self.shares, buffers, advice)
            return
        every = [its for _, its in told]
        if all(every) and differ([ordered for ordered, _ in every]):
            if differ([whole for _, whole in every]):
                refuse_unlike(ranks, alike)
            self.shares.sort(key=lambda one: (one[1], one[0]))
        first = (ranks.members[0],)  # other ranks may have updated their buffers, and DDP takes the first's
        self.shares = [
            (name, slot, replace(share, ranks=first) if share.ranks is None and name in buffers else share)
            for name, slot, share in self.shares
        ]


def prepared_of(ranks: Ranks, given: Mapping[str, Any], staging: Staging | None = None) -> Prepared | Exception:
    """Return what this rank writes, or why it cannot: all ranks learn of that when they write.

    All call it together; arguments are those of `save_given`. Without staging, it has the tensors' own memory.
    """
    own, failure = _Own(), None
    try:
        own = _Own.of(ranks, given)
    except WorkerError:
        raise
    except Exception as error:  # noqa: BLE001  # kept for when the others, who go on, are told
        failure = error
    try:
        own.agree(ranks, failed=failure is not None)
        if failure is not None:
            return failure
        held = divide(own.shares, world_rank(), ranks.members)
        told = RankState([piece for piece, _ in held], own.state.values, random_states())
        if ranks.rank == 0:
            part, stored = of_first(own.tensors, own.state, given, ranks.world_size, Values(copied=staging is not None))
        else:
            part, stored = Part.of(own.tensors, own.state), []
            told.part = part if own.in_parts else None
        return Prepared(told, [*stored, *entries(held, staging)], part)
    except WorkerError:
        raise
    except Exception as error:  # noqa: BLE001  # all ranks learn of it
        return failure or error
