"""Which directories and files below a run are its checkpoints, each once, and what names one of them as the latest.

A directory that is called by a step is one checkpoint, with all that is in it, if there is one in it: a Trainer's
`checkpoint-500` with its `global_step500`, verl's `global_step_500` with `actor` and `critic`, a `step500` with a
`model.pt`. Not if folders or such files in it are called by other steps, as those of a run are that is called `step1`;
but for a folder that has files of a training beside it.

Any other directory is one if a format finds its files in the directory itself, or in a folder beside which files of a
training lie (`rng_state_0.pth`). Folders that none of these files is in are looked into for others: a final model lies
beside `checkpoint-500`. So are all folders of what is no checkpoint, and there each file that is one by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from zckpt.errors import SourceError, UnknownFormatError, UnsupportedError
from zckpt.formats.account.inventory import POINTERS
from zckpt.formats.companions import CARRIED, TRAINER_STATE
from zckpt.formats.format import Found, NearMiss, Search
from zckpt.formats.fsdp_rank_files.directory import OF_TRAINING
from zckpt.formats.latest import latest_name
from zckpt.formats.registry import formats
from zckpt.formats.suffixes import TORCH_SUFFIXES
from zckpt.immutable import immutable
from zckpt.state.names import is_number
from zckpt.storage.files import entries_of
from zckpt.storage.packed import is_store

_WORDS = "checkpoint|ckpt|chkpt|(?:global_?)?steps?|iter(?:ation)?s?|epoch|ba(?:tch)?|update"
_STEP = re.compile(rf"(?:.*[^a-z])?(?:{_WORDS})[-_=. ]?([0-9]{{1,18}})(?![0-9]).*|([0-9]{{1,18}})(?:\.\w+)?", re.I)
"""Names that say a step, which is the last of the numbers behind such a word; or that are a number."""

_WHOLE = ".ckpt"
"""The end of a directory that Lightning keeps all of a checkpoint in."""

TRACKERS = (*sorted(POINTERS), "latest.txt")

DEPTH = 6
"""Folders below a run that are looked into."""


@immutable
class Unit:
    """A checkpoint of a run. `states`: where formats find it, of several models several; none: no format does."""

    path: Path
    states: tuple[Path, ...]

    @property
    def number(self) -> int | None:
        """The step that its name says."""
        return called(self.path.name)

    @property
    def opened(self) -> Path:
        """What to open: itself, or the first place in it where a format finds its state."""
        return self.states[0] if self.states and not isinstance(_seen(self.path), Path) else self.path

    @property
    def series(self) -> tuple[Path, str]:
        """What those have in common that lie in one directory, and whose names differ in numbers only."""
        return self.path.parent, _pattern(self.path)


def called(name: str) -> int | None:
    """Return the step that a name says; None: it says none."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1] or match[2])


def units(run: Path, *, depth: int = DEPTH, files: bool = True) -> Iterator[Unit]:
    """Yield the checkpoints at or below a run, those beside each other as they were saved, others after them.

    Links to directories are not followed. `files`: those that are one file, too.
    """
    folders = _folders(run)
    if (called(run.name) is not None or run.name.endswith(_WHOLE)) and _is_one(run, folders):
        states = _states(run, depth)
        alone = [] if states or not files else [*_files(run)]
        if all(called(one.name) in (None, called(run.name)) for one in alone):
            if states or alone:
                yield Unit(run, tuple(states or alone))
            return
    seen = _seen(run)
    is_here = seen == run or (isinstance(seen, Path) and seen.is_dir() and _with_training(run, [seen]))
    own = _read_in(run) if is_here and folders else set()
    folders = [one for one in folders if not any(f"{one}{os.sep}" in read for read in own)]
    others = [unit for folder in folders if depth for unit in units(folder, depth=depth - 1, files=files)]
    if is_here:
        yield Unit(run, (run,))
    elif files:
        others += [Unit(one, (one,)) for one in _files(run)]
    held = {above for one in others for above in (one.path, *one.path.parents)}
    alike, said = {_pattern(one) for one in held if one.parent == run}, latest_of(run).values()
    for one in folders:  # what is left of one, or is not read
        is_alike = called(one.name) is not None and _pattern(one) in alike
        if one not in held and (is_alike or any(is_named(one, run, text) for text in said)):
            others.append(Unit(one, ()))
    if not others and isinstance(seen, SourceError):
        others = [Unit(run, (run,))]
    yield from sorted(others, key=lambda one: (str(one.path.parent), numbered(one.path.name)))


def latest_of(directory: Path) -> dict[str, str]:
    """Return what each file of a directory that names the latest checkpoint says."""
    return {name: text for name in TRACKERS if (text := latest_name(directory, name))}


def is_named(unit: Path, directory: Path, text: str) -> bool:
    """Tell whether what such a file of a directory says is a checkpoint below it, or in that: by name or step."""
    named = Path(os.path.normpath(directory / text))
    return unit == named or unit in named.parents or (
        is_number(text) and unit.parent == directory and called(unit.name) == int(text)
    )  # fmt: skip


def _pattern(path: Path) -> str:
    return re.sub("[0-9]+", "#", path.name)


def numbered(name: str) -> tuple[bool, int, tuple[int, ...], int, str]:
    """Return what orders the names of checkpoints as they were saved: by their step, then by all of their numbers."""
    step = called(name)
    return step is None, step or 0, tuple(map(int, re.findall(r"[0-9]+", name))), len(name), name


def _is_one(path: Path, folders: list[Path]) -> bool:
    """Tell whether what is in a directory that is called by a step is of that step."""
    inner = [one for one in folders if called(one.name) is not None and _states(one, 2)]
    return all(called(one.name) == called(path.name) for one in inner) or _with_training(path, inner)


def _with_training(path: Path, inner: list[Path]) -> bool:
    """Tell whether files of a training lie beside the only folder that a directory's state is in."""
    names = (entry.name for entry in entries_of(path, lenient=True))
    return inner == [_seen(path)] and any(map(is_of_training, names))


def is_of_training(name: str) -> bool:
    """Tell whether programs keep a file of a training beside the directory of its model."""
    return name == TRAINER_STATE or any(one.fullmatch(name) for one in (OF_TRAINING, CARRIED))


def _states(path: Path, depth: int) -> list[Path]:
    """Return the directory itself where `open` takes it, or else the directories in it that it takes."""
    seen = _seen(path)
    if isinstance(seen, Path):
        return [path]
    inner = [one for folder in _folders(path) if depth for one in _states(folder, depth - 1)]
    return inner or ([path] if seen is not None else [])


def _seen(path: Path) -> Path | SourceError | None:
    """Return where a format finds a directory's checkpoint: in itself, or below; or what is wrong with it."""
    answer: Path | SourceError | None = None
    for one in formats():
        try:
            found = one.find(Search(path))
        except SourceError as error:
            return error
        if isinstance(found, NearMiss) and found.code is not None:
            answer = answer or found.error(path)
        elif isinstance(found, Found):
            place = getattr(found.place, "path", found.place)
            at = place if isinstance(place, Path) else path
            if found.sure:
                return at
            answer = answer if isinstance(answer, Path) else at
    return answer


def _read_in(path: Path) -> set[str]:
    """Return all files that opening a directory reads; where it cannot be opened, all that are in its folders."""
    from zckpt.formats import open_checkpoint

    try:
        checkpoint = open_checkpoint(path)
    except SourceError:
        return {f"{folder}{os.sep}" for folder in _folders(path) if called(folder.name) is None}
    return {*(file.path for file in checkpoint.files), *checkpoint.claims}


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a directory that are checkpoints by themselves, and damaged ones."""
    from zckpt.formats import open_checkpoint

    for entry in entries_of(path, lenient=True):
        one = Path(entry.path)
        known = one.suffix in (".safetensors", *TORCH_SUFFIXES, _WHOLE) and not CARRIED.fullmatch(one.name)
        if not known or one.name.startswith(".") or entry.is_symlink() or not entry.is_file():
            continue
        try:
            if any(parameter.slots for parameter in open_checkpoint(one).holders()):
                yield one
        except UnsupportedError:
            continue
        except SourceError as error:
            if not isinstance(error, UnknownFormatError) or called(one.name) is not None:
                yield one


def _folders(path: Path) -> list[Path]:
    """Return the directories in one, but links, stores, and hidden ones: what is being written has such a name."""
    entries = entries_of(path, lenient=True)
    some = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    return [one for one in some if not is_store(one)]
