"""Which folders and files of a directory make up a checkpoint of torch's DCP.

DIR/.metadata, __R_N.distcp                               one folder holds all
DIR/.metadata, __R_N.distcp, meta.pt                      Lightning: the rest of its dict is in `meta.pt`
DIR/.metadata, __R_N.distcp, zckpt.pt                     zckpt: what the dict has no place for
DIR/{pytorch_model_fsdp_0,optimizer_0}/.metadata ...      Accelerate and the Trainer: a folder for each, and the rest;
                                                          further models have further numbers; pytorch_model_0
                                                          is Accelerate's before 0.25
DIR/shard-R-model-N-of-M.safetensors, optimizer/.metadata transformers: its model, and `save_optimizer_distributed`
DIR/model_and_optim/.metadata ..., train/rankR.pt         OLMo-core, others by other names (`INNER`): one folder holds
                                                          all of these, and values lie around it
DIR/{model,weights,...}/, {optim,optimizer}/.metadata     NeMo Automodel, NeMo RL and loops of one's own: a folder for
                                                          each, or below it, the model's of DCP or safetensors,
                                                          or an adapter's
DIR/pretrained_model/..., training_state/optimizer_0/     LeRobot: the same two
DIR/model/, optim/, scheduler/, trainer/                  Cosmos: values, too, have a folder each
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from zckpt.formats.suffixes import ADAPTER_NAME, OWN_NAME
from zckpt.immutable import immutable
from zckpt.storage.files import entries_of, folders_in, is_file, read_head

NAME = ".metadata"
"""Of the pickle that says what is where, in each folder."""

LIGHTNING_NAME = "meta.pt"
MEGATRON_NAMES = ("common.pt", "metadata.json")
"""What Megatron-Core's `torch_dist` has next to `.metadata`: state that is not sharded, and which backend it is."""

MEGATRON_MARK = b'"sharded_backend"'
"""A member of its `metadata.json`, which begins with it."""

HEAD_NBYTES = 4096

OLMO_NAME = "model_and_optim"

SEVERAL = "distributed_checkpoint"
"""Where FastVideo has a model and its optimizer, or a folder for each pair of several."""

INNER = ("weights", "trainer", "dcp", SEVERAL, "policy")
"""Folders of a step that XTuner, prime-rl, FastVideo (two) and NeMo RL keep its checkpoint in."""

MODEL = "model"

_OWN = re.compile(r"\.metadata|zckpt\.pt|__(0|[1-9][0-9]*)_(0|[1-9][0-9]*)\.distcp")
FOLDER = re.compile(r"(?:pytorch_model(?:_fsdp)?|optimizer)_([0-9]{1,4})")  # without `_fsdp` up to 0.24
_RANK = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp")
_OPTIMIZER = re.compile(".*optim.*|training_state")


@immutable
class Directory:
    """The folders with a `.metadata`, by name where there are several, and Lightning's file next to it.

    One of several may have a model in safetensors.

    `unfinished`: names of later ones of the same run that are not whole; `is_sure`: False where it is a folder's, and
    the directory may be another checkpoint.
    """

    path: Path
    folders: dict[str, Path]
    own: Path | None = None
    lightning: Path | None = None
    unfinished: tuple[str, ...] = ()
    is_sure: bool = True

    def by_number(self) -> list[list[str]]:
        """Return the names of Accelerate's folders, those of a model and its optimizer together, by their numbers."""
        found: dict[int, list[str]] = {}
        for name in self.folders:
            if (match := FOLDER.fullmatch(name)) is not None:
                found.setdefault(int(match[1]), []).append(name)
        return [found[number] for number in sorted(found)]


def find(path: Path) -> Directory | None:
    """Find the checkpoint that a directory holds, or a folder of it where nothing else there is one; else None.

    Raises SourceError: the directory cannot be read.
    """
    if not path.is_dir():
        return None
    if not is_whole(path) and is_whole(path / OLMO_NAME):
        return Directory(path, {"": path / OLMO_NAME})
    if (own := _find_there(path)) is not None:
        return own
    inner = _inner(path)
    if len(inner) != 1 or is_model(path):
        return None
    others = (one for one in folders_in(path) if one.name not in INNER)
    has_others = any(_find_there(one) or is_whole(one / OLMO_NAME) or _inner(one) for one in others)
    return None if has_others else replace(inner[0], path=path, is_sure=False)


def _inner(path: Path) -> list[Directory]:
    """Find the checkpoints of folders that a step may have its own in; Megatron's are another format's."""
    folders = (path / name for name in INNER)
    return [found for one in folders if not has_megatrons_mark(one) and (found := _find_there(one)) is not None]


def _find_there(path: Path) -> Directory | None:
    """Find the checkpoint of a directory: itself, several of FastVideo, Accelerate's folders, a model and optimizer."""
    if not path.is_dir():
        return None
    folders = {"": path} if is_whole(path) else {
        one.name: one for one in folders_in(path)
        if (path.name == SEVERAL or FOLDER.fullmatch(one.name)) and is_whole(one)
    } or _pair(path)  # fmt: skip
    own, lightning = (one if is_file(one) else None for one in (path / OWN_NAME, path / LIGHTNING_NAME))
    return Directory(path, folders, own, lightning if "" in folders else None) if folders else None


def _pair(path: Path) -> dict[str, Path]:
    """Return the folders of an optimizer and of its model, which may lie around it, and of values beside `model`."""
    below = {one.name: one for one in folders_in(path)}
    optimizer = {name: found for name, one in below.items() if _OPTIMIZER.fullmatch(name) and (found := _part(one))}
    if len(optimizer) != 1 or not is_whole(next(iter(optimizer.values()))):
        return {}
    models = {MODEL: path} if is_model(path) else {
        name: found for name, one in below.items() if name not in optimizer and (found := _part(one))
    }  # fmt: skip
    return {**models, **optimizer} if len(models) == 1 or MODEL in models else {}


def _part(folder: Path) -> Path | None:
    """Return the folder, or the only one in it, that DCP or a model's safetensors are in; of an adapter the file."""
    every = (folder, *folders_in(folder, lenient=True))
    own = [one for one in every if (is_whole(one) and not is_megatrons(one)) or is_model(one)]
    own = own or [one / ADAPTER_NAME for one in every if is_file(one / ADAPTER_NAME)]
    return own[0] if own[:1] == [folder] or len(own) == 1 else None


def is_model(path: Path) -> bool:
    """Tell whether a folder has a model in safetensors: whole, or in torch's shards."""
    from zckpt.formats.safetensors import file

    return file.is_sharded(path) or file.is_safetensors(path)


def is_whole(path: Path) -> bool:
    """Tell whether a folder is a checkpoint by itself, and was written to the end."""
    return is_file(path / NAME)


def is_own(name: str) -> bool:
    """Tell whether a file name is one that a directory of this format has of its own, as zckpt writes it."""
    return _OWN.fullmatch(name) is not None


def lacks_metadata(path: Path) -> bool:
    """Tell whether a directory, or one of Accelerate's folders in it, has items and nothing that says what they are."""
    inner = (one for one in folders_in(path, lenient=True) if FOLDER.fullmatch(one.name))
    without = [one for one in (path, *inner) if not is_file(one / NAME)]
    return any(rank_of(entry.name) is not None for one in without for entry in entries_of(one, lenient=True))


def is_megatrons(path: Path) -> bool:
    """Tell whether Megatron-Core has written a directory: its keys are not those of a model and an optimizer."""
    return is_file(path / MEGATRON_NAMES[0]) or has_megatrons_mark(path)


def has_megatrons_mark(path: Path) -> bool:
    """Tell whether a directory has the file by which Megatron-Core knows its own."""
    about = path / MEGATRON_NAMES[1]
    return is_file(about) and MEGATRON_MARK in read_head(str(about), HEAD_NBYTES)


def rank_of(path: str) -> int | None:
    """Return the rank that wrote a file, as its name tells; None if it does not."""
    found = _RANK.fullmatch(Path(path).name)
    return int(found[1]) if found is not None else None
