"""Where the files of ranks are, and what their names tell.

RUN/latest_checkpointed_iteration.txt            verl: the step that was saved last; SkyRL: latest_ckpt_global_step.txt
RUN/global_step_N/data.pt, trainer_state.pt      of all of the training; verl's SFT trainer: data_R.pt of rank R
RUN/global_step_N/ROLE/                          actor, critic, policy, ...; or the files are in global_step_N itself
    {model,optim,extra_state}_world_size_W_rank_R.pt
    fsdp_config.json, huggingface/                       where no rank has the model, it is there, or here (AReaL)

STATE/pytorch_model_fsdp[_I]_rankR.bin, optimizer_I_rankR.bin        Accelerate, without DCP
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from zckpt.codes import LATEST
from zckpt.errors import ShardError, UnknownFormatError, UnsupportedError, listed
from zckpt.formats.format import NearMiss, Search
from zckpt.formats.latest import is_tag, latest_name
from zckpt.formats.suffixes import OWN_NAME
from zckpt.immutable import immutable
from zckpt.storage.files import files_in, folders_in, is_file, read_json
from zckpt.storage.nodes import ADVICE, on_each, wherever
from zckpt.storage.ownership import Owned

if TYPE_CHECKING:
    from zckpt.formats.transformers_trainer.directory import Directory as ModelDirectory
    from zckpt.torchfile import Place

FORMAT = "fsdp-rank-files"
CONFIG_NAME = "fsdp_config.json"
HUGGINGFACE = "huggingface"
LORA_NAME = "lora_train_meta.json"
TRACKERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
OF_TRAINING = re.compile(r"(?:data(?:_([0-9]{1,7}))?|trainer_state|fully_async_state)\.pt")
"""Files of a step's folder that hold state of all of the training; with a number, where a rank is in the data."""

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"

MAX_TEXT_NBYTES = 1 << 16
"""Of a configuration."""

_RANK_FILE = re.compile(r"(model|optim|extra_state)_world_size_([0-9]{1,7})_rank_([0-9]{1,7})\.pt")
_ACCELERATE = (
    (MODEL, re.compile(r"pytorch_model(?:_fsdp)?(?:_([0-9]{1,4}))?_rank([0-9]{1,7})\.bin")),
    (OPTIMIZER, re.compile(r"optimizer_([0-9]{1,4})_rank([0-9]{1,7})\.bin")),
)
STEP = re.compile(r"global_step_([0-9]{1,18})")


@immutable
class Directory:
    """The files of one checkpoint."""

    path: Path  # the folder that they are in
    world_size: int
    models: tuple[Path, ...]  # by rank; this and the last may be empty
    optimizers: tuple[Path, ...] = ()
    extras: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    """Files of each rank that hold other state, by its key; those of verl and SkyRL, under "", have several."""
    beside: tuple[Path, ...] = ()
    """State of all of the training: in it, or in the step's folder above it, where that was opened."""
    trackers: tuple[Path, ...] = ()  # files that say which step is the last
    others: tuple[Path, ...] = ()  # files of ranks of another world size, which were left from an earlier save
    step: int | None = None  # as a folder's name says
    config: dict[str, object] = field(default_factory=dict)  # `fsdp_config.json`
    own: Path | None = None  # `zckpt.pt`, where zckpt wrote the files
    places: tuple[Place, Place] = ((), ())
    """The keys under which files have the model and the optimizer, where they hold more than one of both."""
    format: str = FORMAT
    whole: ModelDirectory | None = None  # where the model is, if no rank's file has any of it


def rank_name(kind: str, world_size: int, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


OWNED = Owned(
    lambda name: (
        name in (CONFIG_NAME, OWN_NAME, LORA_NAME)
        or any(one.fullmatch(name) is not None for one in (_RANK_FILE, OF_TRAINING))
    ),
    lambda directory: any(True for _ in _rank_files(directory)),
)
"""The directories of this format."""


def find(search: Search) -> Directory | NearMiss | None:
    """Find the files of ranks that a path is, or holds.

    Raises ShardError: a rank's file is missing; UnknownFormatError: a run says that a step is its last that is not
    there.
    """
    path = search.path
    if not path.is_dir():
        if _is_of_a_rank(path.name):
            return NearMiss("is one rank's file of an FSDP checkpoint", f"give its directory, {path.parent}")
        return None
    return _below(path, search.tag, ())


def has_rank_files(directory: Path) -> bool:
    """Tell by names whether a directory has files of ranks."""
    return directory.is_dir() and any(map(_is_of_a_rank, files_in(directory)))


def _below(path: Path, tag: str | None, trackers: tuple[Path, ...]) -> Directory | NearMiss | None:
    """Return the checkpoint of a folder: of a role, of a step, or of a run."""
    if tag is not None:
        named = is_tag(tag) and (path / tag).is_dir()
        return _below(path / tag, None, _trackers(path)) if named else None
    if has_rank_files(path):
        return _read(path, (), trackers)
    last = _last(path)
    if last is not None:
        return last
    roles = sorted(one.name for one in folders_in(path) if has_rank_files(one))
    if len(roles) == 1:
        return _read(path / roles[0], _of_training(path), trackers)
    if roles:
        return NearMiss(
            f"holds the checkpoints of several models: {listed(roles)}",
            f"give one of them: {path / roles[0]}, or --tag={roles[0]}",
        )
    return None


def _last(path: Path) -> Directory | NearMiss | None:
    """Return the last step of a run; None where no folder of a step has files of ranks."""
    steps = {int(match[1]): one for one in folders_in(path) if (match := STEP.fullmatch(one.name)) is not None}
    steps = {n: one for n, one in steps.items() if has_rank_files(one) or any(map(has_rank_files, folders_in(one)))}
    if not steps:
        return None
    from zckpt.state.names import is_number

    trackers = _trackers(path)
    shown = listed([steps[n].name for n in sorted(steps)])
    for tracker in trackers:
        text = latest_name(path, tracker.name) or ""
        found = steps.get(int(text)) if is_number(text) else None
        if found is None:
            raise UnknownFormatError(
                "names no checkpoint",
                path=tracker,
                expected=f"the number of a folder beside it: {shown}",
                found=repr(text[:40]),
                advice=f"give the step's folder, or --tag={steps[max(steps)].name}",
                code=LATEST,
            )
        return _below(found, None, trackers)
    if len(steps) > 1:
        return NearMiss(
            f"holds checkpoints of several steps, and nothing says which is the last: {shown}",
            f"give one of them, or --tag={steps[max(steps)].name}",
        )
    return _below(next(iter(steps.values())), None, ())


def _trackers(run: Path) -> tuple[Path, ...]:
    return tuple(run / name for name in TRACKERS if is_file(run / name))


def _of_training(step: Path) -> tuple[Path, ...]:
    return tuple(step / name for name in files_in(step) if OF_TRAINING.fullmatch(name))


def _read(path: Path, beside: tuple[Path, ...], trackers: tuple[Path, ...]) -> Directory:
    config = read_json(path / CONFIG_NAME, most=MAX_TEXT_NBYTES) or {}
    by_size: dict[int, dict[str, dict[int, Path]]] = {}
    for kind, size, rank, name in chain.from_iterable(map(_rank_files, on_each(path))):
        by_size.setdefault(size, {}).setdefault(kind, {})[rank] = wherever(path / name)
    step = next((int(m[1]) for one in (path, path.parent) if (m := STEP.fullmatch(one.resolve().name))), None)
    beside = (*_of_training(path), *beside)  # of a step without roles: its own
    said = config.get("world_size")
    if type(said) is not int or said not in by_size:
        if len(by_size) > 1:
            raise ShardError(
                "rank files of several world sizes",
                path=path,
                expected="files of one save",
                found=listed(sorted(by_size)),
                advice="remove the files of the earlier save",
            )
        said = next(iter(by_size))
    size = said  # 0 for Accelerate's, whose names do not have it
    files = by_size.pop(size)
    world_size = size or 1 + max(rank for ranks in files.values() for rank in ranks)
    whole = None if MODEL in files else whole_model(path)
    if MODEL not in files and whole is None:
        raise UnsupportedError(
            "holds rank files of an optimizer without the model's, which have the names and shapes of the parameters",
            path=path,
            expected=rank_name(MODEL, world_size, 0),
            advice="add the model's files from the same run",
        )
    ranks = {kind: complete(path, kind, files.get(kind, {}), world_size) for kind in (MODEL, OPTIMIZER, EXTRA)}
    others = tuple(one for kinds in by_size.values() for found in kinds.values() for one in found.values())
    return Directory(
        path, world_size, ranks[MODEL], ranks[OPTIMIZER], {"": ranks[EXTRA]}, beside, trackers, others, step, config,
        path / OWN_NAME if is_file(path / OWN_NAME) else None, whole=whole,
    )  # fmt: skip


def whole_model(path: Path) -> ModelDirectory | None:
    """Return a model in files of its own beside ranks' optimizers: verl's, if it is told to write no other, AReaL's."""
    from zckpt.formats.transformers_trainer.directory import Directory as ModelDirectory
    from zckpt.formats.transformers_trainer.directory import model_beside_optimizer

    folders = path / HUGGINGFACE, path
    found = ((folder, model_beside_optimizer(folder, files_in(folder, lenient=True))) for folder in folders)
    return next((ModelDirectory(folder, (model,)) for folder, model in found if model is not None), None)


def complete(path: Path, kind: str, found: dict[int, Path], world_size: int) -> tuple[Path, ...]:
    """Return the files of all ranks, or none where there are none."""
    from zckpt.formats.lost import MOST_RANKS, missing, stand_in

    error = missing(path, f"{kind} file", found, world_size) if found else None
    if error is not None:
        error.advice = ADVICE
        if max(found) >= world_size or world_size > MOST_RANKS:
            raise error
        known, like = min(found), found[min(found)].name
        for rank in (rank for rank in range(world_size) if rank not in found):
            name = re.sub(rf"(.*rank_?){known}\.", rf"\g<1>{rank}.", like)
            found[rank] = Path(stand_in(error, path / name))
    return tuple(found[rank] for rank in sorted(found))


def _rank_files(directory: Path) -> Iterator[tuple[str, int, int, str]]:
    """Yield kind, world size, rank and name of each file of a rank; 0 is a world size that names do not say."""
    indexes: dict[str, set[str]] = {}
    for name in files_in(directory):
        match = _RANK_FILE.fullmatch(name)
        if match is not None:
            yield match[1], int(match[2]), int(match[3]), name
            continue
        for kind, pattern in _ACCELERATE:
            match = pattern.fullmatch(name)
            if match is not None:
                indexes.setdefault(kind, set()).add(match[1] or "0")
                yield kind, 0, int(match[2]), name
    several = next((found for found in indexes.values() if len(found) > 1), None)
    if several is not None:
        raise UnsupportedError(
            "holds files of several models that Accelerate prepared",
            path=directory,
            expected="one model",
            found=f"models {listed(sorted(several))}",
            advice="put the files of each into a separate directory",
        )


def _is_of_a_rank(name: str) -> bool:
    match = _RANK_FILE.fullmatch(name)
    if match is not None:
        return match[1] != EXTRA
    return any(pattern.fullmatch(name) is not None for _, pattern in _ACCELERATE)
