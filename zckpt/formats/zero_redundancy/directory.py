"""Which files of a directory hold the optimizer's state of which rank.

Programs choose the names. A file is taken for a rank's if its name says so: several names that differ in one
number only, next to a word that speaks of ranks or optimizers, and what they hold is an optimizer's state dict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.errors import ShardError, UnknownFormatError
from zckpt.formats.format import Search
from zckpt.formats.suffixes import READ_SUFFIXES
from zckpt.immutable import immutable
from zckpt.storage.files import files_in
from zckpt.storage.ownership import Owned, called

if TYPE_CHECKING:
    from zckpt.torchfile import TorchFile

FORMAT = "zero-redundancy"
MODEL_NAME = "model.pt"
OPTIMIZER_NAME = "optimizer.pt"
METADATA_NAME = "metadata.pt"
KEY = "zero_redundancy"
"""Under which `metadata.pt` says how the optimizer's parameters are numbered and assigned."""

_OWN = re.compile(r"model\.pt|optimizer\.pt|metadata\.pt|(?:model_rank_[0-9]+|optimizer_rank_(0|[1-9][0-9]*))\.pt")
_MODEL = re.compile(r"model(_rank_[0-9]+)?\.pt")
_ABOUT_RANKS = re.compile(r"rank|optim|zero|shard|zro", re.IGNORECASE)
_ABOUT_TIME = re.compile(r"(step|epoch|iter|iteration|batch)[-_.=]?$", re.IGNORECASE)
_RANK = re.compile(r"(rank|zero|shard|zro)[-_.=]?$", re.IGNORECASE)


@immutable
class Directory:
    """The files of one checkpoint."""

    path: Path
    ranks: tuple[Path, ...]  # the file of each rank; empty where the optimizer's state is consolidated
    others: tuple[Path, ...]  # further torch files, sorted by name
    metadata: TorchFile | None = None  # `metadata.pt`, where zckpt wrote the directory
    models: tuple[Path, ...] = ()  # then also the model's files


OWNED = Owned(called(_OWN.pattern))
"""The directories of this format."""


def rank_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"optimizer_rank_{rank}.pt"


def find(search: Search) -> Directory | None:
    """Find the files of ranks, of which the first has to be read, or the `metadata.pt` that zckpt writes.

    Raises ShardError: a rank's file is missing; UnknownFormatError: two sets of files may be the optimizer's.
    """
    path = search.path
    if not path.is_dir():
        return None
    names = [name for name in files_in(path) if name.endswith(READ_SUFFIXES)]
    if METADATA_NAME in names:
        from zckpt.state import dict_of
        from zckpt.torchfile import read_torchfile

        metadata = read_torchfile(path / METADATA_NAME)
        if KEY in dict_of(metadata.root):
            models = tuple(path / name for name in names if _MODEL.fullmatch(name))
            world_size = dict_of(dict_of(metadata.root).get(KEY)).get("world_size")
            found = {int(match[1]): path / match[0] for match in map(_OWN.fullmatch, names) if match and match[1]}
            if world_size is None:
                return Directory(path, (), (), metadata, models)
            if type(world_size) is not int or not 1 <= world_size >= len(found):
                raise ShardError(
                    "the rank files do not match the metadata",
                    path=path,
                    expected=f"{world_size} ranks",
                    found=f"{len(found)} files",
                )
            return Directory(path, _of_all(path, found, world_size), (), metadata, models)
    families = [family for family in _families(path, names) if _holds_optimizer(family)]
    if len(families) > 1:
        raise UnknownFormatError(
            "several sets of files hold an optimizer's state",
            path=path,
            expected="one file for each rank",
            found=" and ".join(family[min(family)].name for family in families),
        )
    if not families:
        return None
    ranks = _of_all(path, families[0], max(families[0]) + 1)
    return Directory(path, ranks, tuple(path / name for name in names if path / name not in ranks))


def optimizer_place(root: object) -> tuple[object, ...] | None:
    """Return the key under which a file's only optimizer is, none if it is the file itself; None: there is not one."""
    from zckpt.formats.torch_files.optimizer import looks_like_optimizer
    from zckpt.state import dict_of

    if looks_like_optimizer(root):
        return ()
    found = [key for key, value in dict_of(root).items() if looks_like_optimizer(value)]
    return (*found,) if len(found) == 1 else None


def _of_all(path: Path, found: Mapping[int, Path], world_size: int) -> tuple[Path, ...]:
    """Return the files of all ranks. Raises ShardError: one is missing."""
    from zckpt.formats.lost import missing

    if (error := missing(path, "file", found, world_size)) is not None:
        raise error
    return tuple(found[rank] for rank in sorted(found))


def _families(path: Path, names: list[str]) -> list[dict[int, Path]]:
    """Return the sets of files whose names differ in one number only, which can be the rank, by that number."""
    from zckpt.state import by_key

    cut = ((re.split(r"([0-9]+)", name), name) for name in names)
    by_words = by_key((tuple(parts[::2]), (tuple(map(int, parts[1::2])), name)) for parts, name in cut)
    found = []
    for words, members in by_words.items():
        columns = list(zip(*(numbers for numbers, _ in members), strict=True))
        varying = [at for at, column in enumerate(columns) if len(set(column)) > 1]
        if len(members) == 1:
            varying = [at for at, word in enumerate(words[:-1]) if _RANK.search(word)]
        if len(varying) != 1 or _ABOUT_TIME.search(words[varying[0]]) or not _ABOUT_RANKS.search("".join(words)):
            continue
        family = {numbers[varying[0]]: path / name for numbers, name in members}
        complete = max(family) == len(family) - 1
        if len(family) == len(members) and (complete or _RANK.search(words[varying[0]])):
            found.append(family)
    return found


def _holds_optimizer(family: Mapping[int, Path]) -> bool:
    """Tell by its first file whether a set of files is what it seems; a file by itself has to say that it is whole."""
    from zckpt.formats.fsdp_rank_files.held import is_share
    from zckpt.state import dict_of
    from zckpt.torchfile import read_torchfile

    file = read_torchfile(family[min(family)])
    if is_share(file):
        return False
    return optimizer_place(file.root) is not None and (len(family) > 1 or dict_of(file.root).get("world_size") == 1)
