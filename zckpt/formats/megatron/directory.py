"""Which checkpoint of Megatron-Core a path is, or holds; told by names and a few bytes.

RUN/latest_checkpointed_iteration.txt     "4" for iter_0000004, or "release"; no newline
DIR/metadata.json                         {"sharded_backend": "torch_dist", ...}: the mark of such a directory
DIR/weights/, DIR/model_weights/          NeMo 2 and 1, with the mark in there
DIR/.metadata with these keys             fsdp_dtensor: "optimizer.param_to_group_meta.", or of a model by itself
DIR/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     legacy: the directories of ranks are the mark
DIR/train_state.pt, train_dataloader_dprank000.pt     Megatron-Bridge; RUN/latest_train_state.pt is a copy of the last
DIR/run_config.yaml, tokenizer/                       Megatron-Bridge, which looks there for what it was run with
"""

from __future__ import annotations

import re
from pathlib import Path

from zckpt.codes import LATEST, MISSING_FILE
from zckpt.errors import ShardError, UnknownFormatError, UnsupportedError
from zckpt.formats.dcp.directory import HEAD_NBYTES, has_megatrons_mark, rank_of
from zckpt.formats.dcp.directory import NAME as METADATA_NAME
from zckpt.formats.format import NearMiss, Search
from zckpt.formats.latest import TRACKER, folder_of, is_name, latest_name
from zckpt.formats.suffixes import OWN_NAME
from zckpt.immutable import immutable
from zckpt.storage.files import is_file, json_object, read_head
from zckpt.storage.nodes import on_each, wherever

MARK = "metadata.json"
COMMON = "common.pt"

FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"

FOLDER = re.compile(r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?(?:_([0-9]{3,}))?")
"""The directory of a model-parallel rank, and what is in it."""

TRAIN_STATE = "train_state"
OF_TRAINING = re.compile(rf"({TRAIN_STATE}|train_dataloader_dprank[0-9]{{3,7}})\.pt")
"""Files that Megatron-Bridge keeps beside the rest, and metadata have under their stems."""

AS_IT_IS = re.compile(r"(?:[^/]+/)?(?:run_config\.yaml|tokenizer/.+)")
"""Files that Megatron-Bridge reads, and zckpt does not."""

INSIDE = ("weights", "model_weights")
"""Where NeMo 2 and NeMo 1 keep the directory."""

FORMAT = "megatron"

TORCH_DIST, LEGACY, FSDP_DTENSOR, ZARR = "torch_dist", "legacy", "fsdp_dtensor", "zarr"

BACKENDS = (TORCH_DIST, ZARR)
"""The kinds of directories, each called as the module that reads it; and those of them that have `MARK`."""

_KEYS = ((b"optimizer.param_to_group_meta.",), (b"model.module.", b"checkpoint_version"))
"""What Megatron-FSDP's keys are known by: all of one of these are in `.metadata`."""

METADATA_NBYTES = 1 << 28
"""Of `.metadata` that keys are looked for in."""

RELEASE = "release"
"""The directory of a model that no training has saved."""

_WRITTEN = re.compile(
    rf"{re.escape(TRACKER)}|latest_{TRAIN_STATE}\.pt|(?:iter_[0-9]+|{RELEASE})/"
    r"(?:\.metadata|metadata\.json|common\.pt|zckpt\.pt|__[0-9]+_0\.distcp|"
    rf"{OF_TRAINING.pattern}|{FOLDER.pattern}/(?:{re.escape(FILE)}|{re.escape(OPTIMIZER_FILE)}))"
)


@immutable
class Place:
    """Where a checkpoint is."""

    path: Path  # the directory with the files
    tracker: Path | None = None  # the file that named it
    kind: str = TORCH_DIST  # {"torch_dist", "legacy", "fsdp_dtensor", "zarr"}


def find(search: Search) -> Place | NearMiss | None:
    """Return where the checkpoint is that a path is or holds; None if it is none of Megatron-Core's.

    A tag is the name of a directory of a run. Raises SourceError: it is one for certain, and a file that is needed is
    missing or unreadable.
    """
    path, tag = search.path, search.tag
    if path.is_file() or FOLDER.fullmatch(path.name):
        return _around(path)
    if not path.is_dir():
        return None
    if tag is not None:
        return _here(path / tag) if is_name(tag) else None
    inside = (_place(path / name) for name in INSIDE if has_megatrons_mark(path / name))
    return _here(path) or next(inside, None) or _tracked(path)


def _around(path: Path) -> Place | NearMiss | None:
    """Return the checkpoint of which a path is the only rank's directory, or a file in it; or say what it is of."""
    is_own = path.is_file()
    folder = path.parent if is_own else path
    if FOLDER.fullmatch(folder.name) and (not is_own or path.name in (FILE, OPTIMIZER_FILE)) and is_file(folder / FILE):
        count = len(folders(folder.parent))
        if count == 1:
            return Place(folder.parent, kind=LEGACY)
        raise ShardError(
            f"is one rank's part of a Megatron checkpoint of {count}",
            path=path,
            advice=f"give its directory, {folder.parent}",
        )
    is_known = path.name in (METADATA_NAME, COMMON, MARK) or rank_of(path.name) is not None
    if is_own and is_known and has_megatrons_mark(folder):
        return NearMiss("is one file of a Megatron-Core checkpoint", f"give its directory, {folder}")
    return None


def _here(directory: Path, tracker: Path | None = None) -> Place | None:
    """Return the checkpoint that a directory is; None if it is none."""
    if has_megatrons_mark(directory):
        return _place(directory, tracker)
    if is_fsdp(directory):
        return Place(directory, tracker, FSDP_DTENSOR)
    return Place(directory, tracker, LEGACY) if folders(directory) else None


def is_fsdp(directory: Path) -> bool:
    """Tell whether Megatron-FSDP has written a directory of torch's DCP, and not another program, nor zckpt."""
    metadata = directory / METADATA_NAME
    if not is_file(metadata) or is_file(directory / OWN_NAME) or is_file(directory / COMMON):
        return False
    content = read_head(str(metadata), METADATA_NBYTES)
    return any(all(one in content for one in keys) for keys in _KEYS)


def folders(directory: Path) -> dict[str, Path]:
    """Return the directories of model-parallel ranks in a directory that have a rank's file, by name."""
    if not directory.is_dir():
        return {}
    names = sorted(path.name for one in on_each(directory) for path in one.iterdir() if FOLDER.fullmatch(path.name))
    files = {name: wherever(directory / name / FILE) for name in names}
    return {name: path.parent for name, path in files.items() if is_file(path)}


def names_own(name: str) -> bool:
    """Tell whether a file name within a run's directory is one that zckpt writes."""
    return _WRITTEN.fullmatch(name) is not None


def is_written(run: Path) -> bool:
    """Tell whether all that a run's directory holds was written by zckpt."""
    return all(is_file(one / OWN_NAME) for one in run.iterdir() if one.is_dir())


def _tracked(run: Path) -> Place | None:
    """Return the checkpoint that a run's file names; None where it names none of this kind.

    Megatron-DeepSpeed has such a file, too, beside DeepSpeed's `latest`.
    """
    tracker = run / TRACKER
    text = latest_name(run, TRACKER)
    if text is None:
        return None
    folder = folder_of(text)
    here = _here(run / folder, tracker) if is_name(folder) else None
    if here is not None or (is_name(folder) and (run / folder).is_dir()) or (run / "latest").exists():
        return here
    others = sorted(one.name for one in run.iterdir() if has_megatrons_mark(one) or folders(one) or is_fsdp(one))
    if not others:
        return None
    raise UnknownFormatError(
        "names no checkpoint",
        path=tracker,
        expected=" or ".join(others[-2:]),
        found=folder[:80],
        advice=f"give the one that you mean, such as {run / others[-1]}",
        code=LATEST,
    )


def missing(what: str, path: Path, expected: str) -> ShardError:
    """Return the error for a directory without all of its files."""
    advice = "the save did not finish, or the file was not copied"
    return ShardError(what, path=path, expected=expected, advice=advice, code=MISSING_FILE)


def _place(path: Path, tracker: Path | None = None) -> Place:
    mark = path / MARK
    found = json_object(mark, "mark of Megatron-Core", most=HEAD_NBYTES)
    backend, version = found.get("sharded_backend"), found.get("sharded_backend_version", 1)
    if backend not in BACKENDS or version != 1:
        raise UnsupportedError(
            f"is a Megatron-Core checkpoint in the format {str(backend)[:40]} {str(version)[:8]}",
            path=path,
            expected=", or ".join(f"{one} 1" for one in BACKENDS),
            advice="save it as torch_dist with the program that wrote it",
        )
    needed = (METADATA_NAME, COMMON) if backend == TORCH_DIST else (COMMON,)
    for name in needed:
        if not is_file(path / name):
            raise missing(f"file {name} is missing", path, f"{' and '.join(needed)} beside {MARK}")
    return Place(path, tracker, backend)
