"""Checkpoints for stock DeepSpeed, in place.

`load_checkpoint` is led to a folder of empty files with the names that the engine looks for, and a checkpoint engine
that gives it, for each of those names, a file that is planned and never written (`zckpt.engine.read`): its own
rank's, laid out as `reshard` would write it. DeepSpeed loads that as it loads its own.

What it can load as it is it opens itself, through the same checkpoint engine: whatever is read is held against the
checksums in the files, and nothing is unpickled but data.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from datetime import date, datetime, timedelta
from functools import partial
from pathlib import Path, PosixPath, PurePosixPath
from types import SimpleNamespace
from typing import Any

import torch

from zckpt.compare.twice import check_files_apart
from zckpt.deepspeed.engine import (
    ENGINE,
    check_goes_on,
    experts_over,
    has_cores,
    kind_that_keeps,
    names_folder,
    replaced_method,
    training_of,
)
from zckpt.engine.checking import Checks, watching
from zckpt.engine.read import VirtualFile, check_reads
from zckpt.errors import LeftOutError, SourceError, UnsupportedError, UsageError, about, listed
from zckpt.formats import open_checkpoint
from zckpt.formats.account import take_inventory
from zckpt.formats.companions import copy_of
from zckpt.formats.consolidated.model import model_tree, trained_tensors
from zckpt.formats.deepspeed.directory import MODEL, OPTIMIZER, classify
from zckpt.formats.deepspeed.in_place import Served, is_as_it_is, serve
from zckpt.formats.survey import checksums_by_path
from zckpt.formats.torch_files.writer import lay_out
from zckpt.immutable import mutable
from zckpt.optim.files import open_for
from zckpt.optim.ranks import Ranks, check_together
from zckpt.optim.states.by_parameter import Asked
from zckpt.state import Checkpoint, Extent
from zckpt.state.context import during
from zckpt.state.inventory import FILE
from zckpt.storage.files import is_file
from zckpt.torchfile import plain
from zckpt.torchfile.torch_file import NUMPY
from zckpt.training.loading import differing

_CONSOLIDATE = "get_fp32_state_dict_from_zero_checkpoint"
"""What a ZeRO-3 engine calls to load a model without its optimizer; it opens files of its own."""

_MENTIONED = re.compile(r"GLOBAL ([\w.]+)")
"""What torch says that it does not load."""

_OWN_CLASSES = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
)
"""What DeepSpeed's files mention, whoever wrote them."""

_DATA_CLASSES = (
    argparse.Namespace, SimpleNamespace, defaultdict, deque, PurePosixPath, PosixPath, date, datetime, timedelta,
    bool, int, float, str, bytes, list, dict, tuple, frozenset,
)  # fmt: skip
"""What programs keep in client state of which making one runs nothing of theirs."""

SPOILED = "the engine is in part the checkpoint's and must not be used: load a sound checkpoint, or make another engine"

_UNPICKLING: ContextVar[bool] = ContextVar("unpickling", default=False)
"""Whether a context around a load lets client state be unpickled; one within another need not say it again."""


@mutable
class Loading:
    """What was loaded in place, on this rank.

    Parameters
    ----------
    read_nbytes : int, bytes
        Of tensors.
    notes : list of str
        What did not arrive unchanged.
    in_place : list of str
        Checkpoints that were laid out for the engine (not those that it could load as they are).
    """

    read_nbytes: int = 0
    notes: list[str] = field(default_factory=list)
    in_place: list[str] = field(default_factory=list)


@contextmanager
def any_world_size(
    engine: Any = None, *, verify: bool = True, unpickle_client_state: bool = False
) -> Iterator[Loading]:
    """Within this context, let `load_checkpoint` load any checkpoint that zckpt reads.

    The checkpoint can have another world size, another ZeRO stage or another format: state is found by the names of the
    engine's parameters. Each rank reads only the bytes of its own part, and what DeepSpeed gives every rank of the
    model. What the engine can load as it is, it loads from the checkpoint's files. Arguments of `load_checkpoint` keep
    their meaning. A missing or empty directory is left to DeepSpeed, and so is a universal checkpoint that its
    configuration asks for.

    Only data is unpickled: numbers, texts, containers, tensors, arrays, `argparse.Namespace`, times, paths and
    DeepSpeed's own loss scalers. Other objects in client state are refused, unless requested.

    Parameters
    ----------
    engine : DeepSpeedEngine, optional
        Default: every engine, for programs that create theirs in the call that loads.
    verify : bool
        Compare what is read with the checksums in the files; ranks combine checksums of what they read in parts. The
        engine already has the data by then: the error says that it must not be used.
    unpickle_client_state : bool
        Let torch unpickle files as DeepSpeed itself does, which executes what their pickles name.

    Yields
    ------
    Loading

    Raises
    ------
    UsageError
        From `load_checkpoint`, on all ranks: the checkpoint is for another model or other param groups, or the engine's
        optimizer cannot continue from its state.
    UnsupportedError
        The engine only loads what such an engine saved (experts, pipelines without ZeRO, NVMe), or the checkpoint holds
        something that DeepSpeed's files cannot.
    SourceError
        The checkpoint cannot be read, or (UnsupportedError) holds objects that must not be unpickled.
    DamagedFileError
        From `load_checkpoint`, on all ranks: bytes have changed since they were written.
    MissingPackageError
        Without an engine argument: DeepSpeed is not installed.
    """
    loading = Loading()
    unpickles = during(_UNPICKLING, unpickle_client_state or _UNPICKLING.get())
    with unpickles, replaced_method(engine, "load_checkpoint", partial(_load, loading, verify)):
        yield loading


def _load(loading: Loading, verify: bool, engine: Any, call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Load a checkpoint into an engine as it is, or in place."""
    if isinstance(engine.checkpoint_engine, _CheckpointEngine):  # another context has led it here
        return call(**arguments)
    directory, tag = arguments["load_dir"], arguments["tag"]
    path = Path(directory) if tag is None else Path(directory, str(tag))
    ranks = Ranks()
    if engine.load_universal_checkpoint() or not ranks.any(ranks.do(lambda: _holds_something(path))):
        return call(**arguments)
    module_only = arguments["load_module_only"]
    wants_optimizer = arguments["load_optimizer_states"] and not module_only and engine.optimizer is not None
    wants_scheduler = not module_only and arguments["load_lr_scheduler_states"] and engine.lr_scheduler is not None
    checkpoint = ranks.of_first(lambda: _opened(engine, path))  # which costs more than to send it
    served = ranks.do(
        lambda: _served(engine, checkpoint, loading.notes, optimizer=wants_optimizer, scheduler=wants_scheduler)
    )
    if served is not None:
        loading.notes += served.notes
        loading.in_place.append(str(path))
        for note in served.notes if ranks.rank == 0 else ():
            warnings.warn(f"{path}: {note}", stacklevel=4)
    checks = Checks()
    checks.find = checksums_by_path([checkpoint if served is None else served.target.checkpoint]) if verify else None
    stand_in = _CheckpointEngine(engine.checkpoint_engine, served, str(path))
    engine.checkpoint_engine = stand_in
    try:
        with watching(checks):
            if served is None:
                found = call(**arguments)
            else:
                if module_only and served.training.stage == 3:
                    arguments["load_optimizer_states"] = False  # else it takes weights from a file that has none
                with (
                    _folder(engine, served) as (folder, name),
                    _consolidating(served, loading, optimizer=wants_optimizer),
                ):
                    loaded, client_state = call(**{**arguments, "load_dir": folder, "tag": name})
                found = None if loaded is None else str(path), client_state
    finally:
        engine.checkpoint_engine = stand_in.stock
        loading.read_nbytes += stand_in.read_nbytes
    check_together(checks, ranks, str(path), spoiled=SPOILED)
    return found


def _holds_something(path: Path) -> bool:
    try:
        return path.exists() and any(path.iterdir())
    except OSError as error:
        raise SourceError("cannot be read", path=path, expected="a directory", found=error.strerror) from error


def _opened(engine: Any, path: Path) -> Checkpoint:
    """Open a checkpoint; if it has names and is one to be cut for the engine, nothing in it would be lost."""
    checkpoint = open_checkpoint(path)
    if kind_that_keeps(engine) is None and not checkpoint.unnamed and not is_as_it_is(checkpoint, training_of(engine)):
        _check_nothing_lost(checkpoint)
        check_files_apart(checkpoint)
    return checkpoint


def _served(
    engine: Any, checkpoint: Checkpoint, notes: list[str], *, optimizer: bool, scheduler: bool
) -> Served | None:
    """Return a checkpoint that `_opened` has opened cut for an engine; None where the engine can load it as it is."""
    path = checkpoint.named
    kind = kind_that_keeps(engine)
    if kind is not None:
        topology, over = checkpoint.topology, experts_over(engine)
        stages = int(getattr(engine, "num_stages", 1))
        has_same = (topology.dp, topology.pp) == (engine.dp_world_size, stages)
        if checkpoint.format == "deepspeed" and has_same and over in (None, topology.ep):
            if optimizer:
                check_goes_on(engine, checkpoint)
            return None

        staged = max(topology.pp, stages) > 1

        def ranks(name: str, dp: int, pp: int, ep: int | None) -> str:
            of_stages = f" of each of {pp} stages" if staged else ""
            return f"{name} on {dp} data-parallel ranks{of_stages}" + ("" if over is None else f", experts over {ep}")

        raise UnsupportedError(
            f"an engine with {kind} only loads what such an engine saved",
            path=path,
            found=ranks(checkpoint.format, topology.dp, topology.pp, topology.ep),
            expected=ranks("deepspeed", engine.dp_world_size, stages, over),
            advice="`zckpt reshard` or `zckpt convert` writes it for this engine, if possible",
        )
    training = training_of(engine)
    if is_as_it_is(checkpoint, training):  # of ZeRO-3's weights alone, a script of DeepSpeed's would open the files
        if not (check_goes_on(engine, checkpoint) if optimizer else training.stage == 3):
            return None
        if Ranks().rank == 0:  # which has opened it: what was sent no longer tells one value from an equal one
            _check_nothing_lost(checkpoint)
    live = [name for names in training.names for name in names]
    tied = {name: names[0] for names in training.names for name in names[1:]}
    if checkpoint.unnamed or {*live} - {*checkpoint.names}:
        # Its optimizer has numbers, which the engine's order gives names; or transformers has other names in files.
        order = [list(names) for names in training.numbered]
        checkpoint = open_for(path, live, order, Asked(), tied, model=engine.module, notes=notes)
        _check_nothing_lost(checkpoint)

    def whole(name: str) -> tuple[Extent, torch.dtype]:
        return Extent.whole(checkpoint.owner(name).shape), getattr(torch, training.dtype, torch.float32)

    for what in differing(checkpoint, tied, whole) if Ranks().rank == 0 else ():
        raise UsageError(what, path=path, advice="untie them in the model, or make them equal in the checkpoint")
    with about(checkpoint.source):
        served = serve(checkpoint, training, optimizer=optimizer)
    if optimizer:
        served.complete(check_goes_on(engine, served.target.checkpoint))
    check_reads(hole for file in served.of_rank(optimizer=optimizer) for hole in file.holes)
    content = served.target.ranks[training.mp_rank].model.content
    if scheduler and plain(content.get("lr_scheduler")) is None:
        raise UsageError(
            "has no learning-rate scheduler state, but the engine has a scheduler",
            path=path,
            advice="load_checkpoint(..., load_lr_scheduler_states=False) leaves the engine's unchanged",
        )
    return served


def _check_nothing_lost(checkpoint: Checkpoint) -> None:
    """Raise where something in a file that is loaded would not arrive; others stay, as those beside a tag do."""
    opened = checkpoint.named
    tag = Path(os.path.relpath(os.path.realpath(checkpoint.source), os.path.realpath(opened)))
    left = [item for item in take_inventory(checkpoint).left_out if item.kind != FILE]
    if tag != Path():
        left = [item for item in left if tag in Path(item.file).parents or Path(item.file).is_absolute()]
    if left:
        raise LeftOutError(
            f"{listed([f'{item.name} ({item.about})' for item in left])} would be lost",
            path=opened,
            advice="`zckpt reshard` or `zckpt convert` writes it without them, with --drop",
            names=[item.name for item in left],
        )


class _CheckpointEngine:
    """Stands in for an engine's checkpoint engine while it loads; all but loading is the other's.

    It gives the files of `served`, which are not there, or else those that are. A model file is asked for twice, first
    for one number in it: it is made once.
    """

    def __init__(self, stock: Any, served: Served | None, source: str) -> None:
        self.stock, self.served = stock, served
        self.read_nbytes = 0
        self._source = source
        self._kept: dict[str, Any] = {}

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of a file."""
        if path in self._kept:
            return self._kept.pop(path)
        if self.served is not None:
            file = VirtualFile(self.served.file(path), threads=has_cores())
        elif is_file(path):
            file = VirtualFile(copy_of(Path(path), path), threads=False)
        else:  # it has files of its own
            return self.stock.load(path, map_location=map_location)
        if _UNPICKLING.get():
            content = torch.load(file, map_location=map_location, weights_only=False)  # type: ignore[arg-type]
        else:
            content = load_plain(file, map_location, source=self._source)
        if self.served is not None:
            self.read_nbytes += file.read_nbytes
            shard = classify(Path(path).name, path)
            if shard is not None and shard.role == MODEL:
                self._kept[path] = content
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)


def load_plain(file: VirtualFile, map_location: Any = None, *, source: str) -> Any:
    """Return the content of a file, of which nothing is run; `source` is the checkpoint that it was laid out from.

    Raises UnsupportedError: it holds more than data, tensors, arrays and DeepSpeed's own loss scalers.
    """
    try:
        modules = [(importlib.import_module(module), name) for module, name in _OWN_CLASSES]
        own = [getattr(module, name) for module, name in modules if hasattr(module, name)]
        of_numpy: list[Any] = []  # what pickles of arrays and numbers mention, under its names of before 2.0 and since
        if hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):  # not before torch 2.6
            import numpy as np

            multiarray = np.ndarray.__reduce__(np.zeros(0))[0].__module__
            functions = __import__(multiarray, fromlist=["scalar"])
            kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}
            named = ((getattr(functions, name), f"{package}.multiarray.{name}") for package in NUMPY
                     for name in ("_reconstruct", "scalar"))  # fmt: skip
            of_numpy = [np.ndarray, np.dtype, *kinds, *named]
        with torch.serialization.safe_globals([*own, *of_numpy, *_DATA_CLASSES]):
            return torch.load(file, map_location=map_location, weights_only=True)  # type: ignore[arg-type]
    except Exception as error:  # which is pickle's
        if type(error).__name__ != "UnpicklingError":
            raise
        mentioned = _MENTIONED.search(str(error))
        raise UnsupportedError(
            "holds objects that are neither tensors nor data; only unpickling can create them, which executes what "
            "they name",
            path=source,
            found=None if mentioned is None else mentioned[1],
            advice="`zckpt inspect --globals` names them; if you trust them, "
            "any_world_size(unpickle_client_state=True) unpickles them as DeepSpeed does",
        ) from error


@contextmanager
def _folder(engine: Any, served: Served) -> Iterator[tuple[str, str]]:
    """Make a run directory of empty files, under the names that the engine looks for; yield it, and the tag."""
    prefix = "bf16_" if engine.bfloat16_enabled() else ""
    tag = served.target.origin.directory.tag
    with names_folder() as folder:
        Path(folder, tag).mkdir(parents=True)
        for shard, _ in served.files.values():
            own = prefix if shard.role == OPTIMIZER else ""
            Path(folder, tag, own + shard.name.removeprefix("bf16_")).touch()
        yield folder, tag


@contextmanager
def _consolidating(served: Served, loading: Loading, *, optimizer: bool) -> Iterator[None]:
    """Let a ZeRO-3 engine that loads a model alone have it from zckpt."""
    module = sys.modules.get(ENGINE)
    if optimizer or served.training.stage != 3 or not hasattr(module, _CONSOLIDATE):
        yield
        return
    original = getattr(module, _CONSOLIDATE)

    def whole_model(*_: object, **__: object) -> dict[str, torch.Tensor]:
        """Return the model: masters of what is trained, all else as it is."""
        checkpoint = served.target.checkpoint
        tensors = trained_tensors(checkpoint)
        absent = [name for name in checkpoint.names if name not in tensors]
        if absent:
            raise UnsupportedError(f"no file holds the values of {listed(absent)}", path=checkpoint.source)
        file = VirtualFile(lay_out("model.pt", model_tree(checkpoint, tensors)), threads=has_cores())
        found: dict[str, torch.Tensor] = load_plain(file, source=checkpoint.source)
        loading.read_nbytes += file.read_nbytes
        return dict(found)

    setattr(module, _CONSOLIDATE, whole_model)
    try:
        yield
    finally:
        setattr(module, _CONSOLIDATE, original)
