"""What stock DeepSpeed saves, written by zckpt: durable, whole or not at all, while training goes on.

`save_checkpoint` is led to an empty temporary folder, and a checkpoint engine that keeps, of each file that it is
given, the pickle and the tensors, or copies of them. The ranks then write these files into one new directory, which
gets the name of the tag when all of them are on disk; `latest` is written after that.

What an engine saves holds objects of its own, which only their own pickling knows: they are pickled as `torch.save`
does, bytes of tensors apart. This writes pickles, and reads none.

Source: `_save` of torch/serialization.py, 2.5 to 2.13.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from pickle import Pickler
from typing import Any

import torch
from torch.serialization import location_tag, normalize_storage_type

from zckpt.deepspeed import native
from zckpt.deepspeed.engine import names_folder, replaced_method
from zckpt.engine.plan import plan
from zckpt.engine.targets import TargetFile
from zckpt.engine.tensors import memory_of
from zckpt.engine.write import write as write_plan
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.directory import is_own
from zckpt.formats.latest import LATEST
from zckpt.formats.native.files import OWNED as OWNED_NATIVE
from zckpt.formats.torch_files.writer import ValueContent, lay_out_pickled, new_storage
from zckpt.immutable import immutable, mutable
from zckpt.operations.small_file import write_text
from zckpt.optim.ranks import Ranks, written_together
from zckpt.storage.disk import sync_all
from zckpt.storage.durable import remove_leftovers, written
from zckpt.storage.ownership import Owned
from zckpt.torchfile import Mentioned, Pickled
from zckpt.training.directory import Staging
from zckpt.training.saving import BACKGROUND, SAVE

PROTOCOL = 2
"""That of `torch.save`."""


@immutable
class Captured:
    """A file that is to be written: its pickle, and the bytes of each storage that it mentions, in their order."""

    name: str
    pickle: bytes
    contents: list[memoryview]

    def laid_out(self) -> TargetFile:
        """Return the file."""
        storages = tuple(
            Mentioned(new_storage("uint8", len(data), [ValueContent(0, data)]), None, "little")
            for data in self.contents
        )
        return lay_out_pickled(self.name, Pickled(self.pickle, storages))


def capture(name: str, root: object, staging: Staging | None) -> Captured:
    """Return the file that `torch.save` would write of a tree.

    `root`: whatever can be pickled; `staging`: where tensors are copied to; without it, those on the CPU are written
    from where they are. Raises UnsupportedError: tensors of several types lie in the same memory; Exception: what
    pickling an object raises.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(root)
    storages = pickler.storages.values()
    found = [torch.empty(0, dtype=torch.uint8, device=one.device).set_(one) for one in storages]  # their bytes
    contents = [memory_of(one.cpu()) for one in found] if staging is None else staging.copy(found)
    return Captured(name, file.getvalue(), contents)


class _Pickler(Pickler):
    """Writes a number for each storage, which are kept in the order of theirs."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._numbers: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, value: Any) -> tuple[object, ...] | None:
        """Return what stands for a storage; None for anything else."""
        storage: Any
        if isinstance(value, torch.storage.TypedStorage):
            storage, dtype = value._untyped_storage, value.dtype
            kind = getattr(torch, value._pickle_storage_type())  # type: ignore[no-untyped-call]
            count = value._size()  # type: ignore[no-untyped-call]
        elif torch.is_storage(value):
            storage, dtype = value, torch.uint8
            kind, count = normalize_storage_type(type(value)), value.nbytes()  # type: ignore[no-untyped-call]
        else:
            return None
        if storage.data_ptr() and self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise UnsupportedError(
                "tensors of several types share memory, which a torch file cannot express",
                found=f"{self._dtypes[storage.data_ptr()]} and {dtype}",
            )
        key = self._numbers.setdefault(storage._cdata, str(len(self._numbers)))
        self.storages[storage._cdata] = storage  # as long as it is kept, no other has this number
        return "storage", kind, key, location_tag(storage), count


_STOCK = "TorchCheckpointEngine"
"""The checkpoint engine that writes one file for each that it is given, with `torch.save`."""

WRITTEN = ("deepspeed", "zckpt")
"""Formats."""

OWNED = Owned(is_own)


@mutable
class Saves:
    """What engines save within the context, on this rank.

    `saved`: the directories that have been written, in order; with `async_`, only those that were waited for.
    """

    async_: bool
    format: str = "deepspeed"
    saved: list[str] = field(default_factory=list)
    _staging: list[Staging] = field(default_factory=list)
    _writing: Path | None = None

    def wait(self) -> None:
        """Wait until the running save is finished. All ranks call it together; a load does so by itself.

        Raises
        ------
        ZckptError
            On all ranks: it could not be written, and does not exist.
        """
        path, self._writing = self._writing, None
        BACKGROUND.finish()
        if path is not None:
            self.saved.append(str(path))

    def _give_up(self) -> None:
        """Wait where another error is on its way, of which other ranks may not know."""
        path, self._writing, saving = self._writing, None, BACKGROUND.saving
        if path is None or saving is None:
            return
        error = saving.unseen_error()
        if error is None:
            self.saved.append(str(path))
        else:
            warnings.warn(f"{path} was not saved: {error}", stacklevel=4)


@contextmanager
def durable_saves(
    engine: Any = None,
    *,
    async_: bool = False,
    format: str = "deepspeed",  # noqa: A002  # as elsewhere
) -> Iterator[Saves]:
    """Within this context, let zckpt write what `save_checkpoint` saves; stock DeepSpeed loads it.

    The files have the same contents. But a checkpoint appears whole or not at all: if a save is killed, or fails on any
    rank, the previous checkpoint and `latest` stay as they were. An existing tag is replaced as a whole. Everything is
    synced to disk before it is renamed, and every tensor has a checksum, which `zckpt verify` reads.

    Parameters
    ----------
    engine : DeepSpeedEngine, optional
        Default: every engine, for programs that create their own.
    async_ : bool
        `save_checkpoint` returns as soon as everything has been copied to host memory. Only one save runs at a time:
        the next one, `load_checkpoint`, `wait` and the end of the context wait for it, and raise its error on all
        ranks.
    format : {"deepspeed", "zckpt"}
        "zckpt": zckpt's own format, without a pickle, one file per rank. The engine can only load it in
        `any_world_size`, at any number of ranks and any stage.

    Yields
    ------
    Saves

    Raises
    ------
    UsageError
        There is no such format.
    TargetError
        From `save_checkpoint`, on all ranks: it cannot be written, or something else has that name.
    UnsupportedError
        From `save_checkpoint`: the engine has its own checkpoint engine, node-local storage, or an optimizer on NVMe.
        In zckpt's format: it has experts, a pipeline, tensor parallelism, or state that each rank has for itself.
    MissingPackageError
        Without an engine argument: DeepSpeed is not installed.
    """
    if format not in WRITTEN:
        raise UsageError(f"unknown format {format}", expected=" or ".join(WRITTEN))
    saves = Saves(async_, format)
    with ExitStack() as stack:
        stack.enter_context(replaced_method(engine, "save_checkpoint", partial(_save, saves)))
        stack.enter_context(replaced_method(engine, "load_checkpoint", partial(_load, saves)))
        try:
            yield saves
        except BaseException:
            saves._give_up()
            raise
        saves.wait()


def _load(saves: Saves, _engine: Any, call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Load when what is being written is there, and what killed saves have left is gone."""
    saves.wait()
    ranks, directory = Ranks(), arguments["load_dir"]
    if directory:  # one rank does it, and others wait: what was set aside has its name again
        ranks.do(lambda: _remove_leftovers(Path(directory), arguments["tag"]) if ranks.rank == 0 else None)
    return call(**arguments)


def _save(saves: Saves, engine: Any, call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Save a checkpoint of an engine."""
    if not arguments["save_dir"]:
        return call(**arguments)  # which refuses it
    saves.wait()
    ranks = Ranks(purpose=SAVE if saves.async_ else "")
    names = Ranks().do(lambda: _check(engine, saves.format))
    tag = f"global_step{engine.global_steps}" if arguments["tag"] is None else str(arguments["tag"])
    found = Collected(engine.checkpoint_engine, saves._staging if saves.async_ else None)
    with names_folder() as folder:
        engine.checkpoint_engine = found
        try:
            told = call(**{**arguments, "save_dir": folder, "tag": tag})
        finally:
            engine.checkpoint_engine = found.stock
        found.take_others(Path(folder), tag)
    directory = Path(arguments["save_dir"])
    writes = partial(write, ranks, directory, tag, found, save_latest=arguments["save_latest"], names=names)
    if saves.async_:
        saves._writing = directory / tag
        BACKGROUND.start(writes, directory / tag, Ranks())
    else:
        writes()
        saves.saved.append(str(directory / tag))
    return told


def _check(engine: Any, written: str) -> list[str] | None:
    """Raise unless an engine can be saved; return what `native.write` is to be given, None where that does not."""
    stock = type(engine.checkpoint_engine).__name__
    if stock != _STOCK:
        raise UnsupportedError(
            "a checkpoint engine that zckpt does not replace writes the engine's files",
            expected=_STOCK,
            found=stock,
            advice="take it out of `checkpoint` in its configuration, or save without this context",
        )
    for has, what in (
        (engine.use_node_local_storage(), "node-local storage: no directory that all ranks write"),
        (getattr(engine.optimizer, "swap_optimizer", False), "an optimizer on NVMe, whose files DeepSpeed copies"),
    ):
        if has:
            raise UnsupportedError(f"the engine has {what}", advice="save without this context")
    return native.names_of(engine) if written == "zckpt" else None


class Collected:
    """Stands in for an engine's checkpoint engine while it saves: keeps what it is given.

    What fails is kept, too, for ranks that leave one after the other would wait for each other.
    """

    def __init__(self, stock: Any, staging: list[Staging] | None) -> None:
        self.stock = stock
        self.files: dict[str, Captured] = {}
        self.others: dict[str, tuple[bytes, int]] = {}
        self.error: Exception | None = None
        self._staging = staging

    def save(self, state_dict: object, path: str) -> None:
        """Keep a file."""
        if self.error is not None:
            return
        staging = None
        if self._staging is not None:  # one for each file: the next save has the same, of the same size
            while len(self._staging) <= len(self.files):
                self._staging.append(Staging())
            staging = self._staging[len(self.files)]
        try:
            self.files[path] = capture(Path(path).name, state_dict, staging)
        except Exception as error:  # noqa: BLE001  # all ranks learn of it
            self.error = error

    def create(self, _: object) -> None:
        """Begin."""

    def commit(self, _: object) -> bool:
        """End."""
        return True

    def is_decoupled(self) -> bool:
        """Tell the engine that nothing is left to be done when it comes to the next step."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Let the engine clone what is a view of more than it, as for `torch.save`."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def take_others(self, folder: Path, tag: str) -> None:
        """Take what DeepSpeed has written by itself, such as its scripts, and name all by where it belongs."""
        self.files = {os.path.relpath(path, folder / tag): one for path, one in self.files.items()}
        if any(name.startswith(os.pardir) for name in self.files):
            self.error = UnsupportedError("the engine saves files outside its directory", found=", ".join(self.files))
        for path in folder.rglob("*"):
            if path.is_file() and path != folder / LATEST:
                self.others[os.path.relpath(path, folder)] = path.read_bytes(), path.stat().st_mode

    def laid_out(self) -> list[TargetFile]:
        """Return the files, named from the checkpoint's directory."""
        return [replace(one.laid_out(), name=name) for name, one in self.files.items()]


def write(
    ranks: Ranks, directory: Path, tag: str, found: Collected, *, save_latest: bool, names: Sequence[str] | None = None
) -> None:
    """Write a checkpoint together with the other ranks; given the parameters' names, in zckpt's format."""
    if ranks.rank == 0:
        _remove_leftovers(directory, tag)
    if names is None:
        with written_together(directory / tag, ranks, overwrite=True, owned=OWNED) as target:
            if found.error is not None:
                raise found.error
            paths = [target / name for name in found.files]
            write_plan(plan([one.laid_out() for one in found.files.values()]), paths)
            sync_all(paths)  # by who has written them: where the directory is remote, nobody else can
        ranks.do(lambda: _write_others(directory, found.others))
    else:
        ranks.agree(found.error)
        native.write(ranks, directory / tag, ranks.do(found.laid_out), list(found.others), names)
    if save_latest:
        ranks.of_first(lambda: write_text(directory / LATEST, tag))


def _remove_leftovers(directory: Path, tag: object) -> None:
    """Remove what killed saves have left, in whichever form, beside a tag and in its run's directory."""
    for folder in {directory, (directory / str(tag)).parent} if tag else {directory}:
        for owned in (OWNED, OWNED_NATIVE):
            remove_leftovers(folder, owned)


def _write_others(directory: Path, others: dict[str, tuple[bytes, int]]) -> None:
    for name, (data, mode) in others.items():
        path = directory / name
        if path.is_file() and path.read_bytes() == data:
            continue
        with written([path], overwrite=True) as [partial]:
            partial.write_bytes(data)
            partial.chmod(mode)
