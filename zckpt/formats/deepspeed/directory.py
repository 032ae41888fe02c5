"""The files of a DeepSpeed checkpoint: where they are, and what their names tell.

mp_rank_MM_model_states.pt                              model: ZeRO-0, 1, 2
zero_pp_rank_R_mp_rank_MM_model_states.pt               model: ZeRO-3, one for each data-parallel rank
[bf16_|fp16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt  optimizer; before 0.3.8 `_mp_rank_MMoptim_states.pt`
layer_L_expert_E_mp_rank_MM_model_states.pt             weights of expert E, counted over all ranks; older: expert_E_...
expp_rank_R_mp_rank_MM_optim_states.pt                  optimizer of experts without ZeRO
layer_NN[-model_MM]-model_states.pt                     weights of a pipeline layer
any of them-W.N                                         the same, by writer W of N of DeepSpeed's `fast` writer

Each of the N writers writes the whole file with torch's own `torch.save`; DeepSpeed looks for none of these names when
it loads. Of those of one rank the first writer's is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from zckpt.codes import LATEST, MISSING_FILE, TWICE
from zckpt.errors import ShardError, UnknownFormatError, listed
from zckpt.formats.latest import is_tag, latest_name
from zckpt.immutable import immutable
from zckpt.storage.files import files_in, folders_in

MODEL = "model"
OPTIMIZER = "optimizer"
EXPERT = "expert"
EXPERT_OPTIMIZER = "expert optimizer"
PIPELINE_LAYER = "pipeline layer"

_WRITER = r"-(?P<writer>\d+)\.(?P<writers>\d+)"
"""Source: DeepSpeed 0.18 and 0.19, `CheckpointWriterFactory.create_writer`; not under ZeRO-3."""

_PATTERNS = tuple((role, re.compile(rf"{pattern}(?:{_WRITER})?")) for role, pattern in (
    (OPTIMIZER, r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp_rank>\d+)_mp_rank_(?P<mp_rank>\d+)_?optim_states\.pt"),
    (EXPERT_OPTIMIZER, r"expp_rank_(?P<dp_rank>\d+)_mp_rank_(?P<mp_rank>\d+)_optim_states\.pt"),
    (MODEL, r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp_rank>\d+)_mp_rank_(?P<mp_rank>\d+)_model_states\.pt"),
    (MODEL, r"mp_rank_(?P<mp_rank>\d+)_model_states\.pt"),
    (EXPERT, r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp_rank>\d+)_model_states\.pt"),
    (EXPERT, r"expert_(?P<expert>\d+)_mp_rank_(?P<mp_rank>\d+)_model_states\.pt"),
    (PIPELINE_LAYER, r"layer_(?P<layer>\d+)(?:-model_(?P<mp_rank>\d+))?-model_states\.pt"),
))  # fmt: skip


@immutable
class Shard:
    """A file of a checkpoint and what its name says."""

    path: str
    role: str  # one of the constants of this module
    dp_rank: int | None = None  # the data- and model-parallel rank that wrote it
    mp_rank: int | None = None
    layer: int | None = None
    expert: int | None = None
    writer: int | None = None  # which of how many writers of DeepSpeed's `fast` writer wrote it
    writers: int | None = None

    @property
    def name(self) -> str:
        """What DeepSpeed calls the file where it loads it."""
        return name_to_load(self.path)

    @property
    def identity(self) -> tuple[object, ...]:
        """What no two files of one checkpoint share."""
        return self.role, self.dp_rank, self.mp_rank, self.layer, self.expert

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key: ranks as numbers, not as text."""
        return tuple(-1 if x is None else x for x in (self.mp_rank, self.dp_rank, self.layer, self.expert))


def classify(name: str, path: str) -> Shard | None:
    """Return what a file name says, or None if it is not a name of a DeepSpeed checkpoint."""
    for role, pattern in _PATTERNS:
        if match := pattern.fullmatch(name):
            numbers = {key: int(value) for key, value in match.groupdict().items() if value is not None}
            return Shard(path, role, **numbers)
    return None


def name_to_load(path: str) -> str:
    """Return what DeepSpeed calls a file where it loads it."""
    return re.sub(rf"(?<=\.pt){_WRITER}\Z", "", Path(path).name)


def is_own(name: str) -> bool:
    """Tell whether a file name is one that a DeepSpeed run directory has of its own."""
    return name == "latest" or classify(name, name) is not None


@immutable
class TagDirectory:
    """The files of one checkpoint."""

    path: Path  # the tag directory; with several roots, the first one's
    tag: str
    shards: tuple[Shard, ...]  # sorted by rank, as numbers
    further: tuple[Shard, ...] = ()  # what other writers wrote of the same, which is not read

    def of(self, role: str) -> list[Shard]:
        """Return the shards of one role."""
        return [shard for shard in self.shards if shard.role == role]


def find(source: Path, *, roots: Sequence[Path] = (), tag: str | None = None) -> TagDirectory | None:
    """Find the checkpoint that `source` is or holds; None if it is no DeepSpeed checkpoint.

    Parameters
    ----------
    source : Path
        A run directory, a tag directory, or a wrapper's directory that contains one.
    roots : sequence of Path
        The same directory on other nodes; their files are merged.
    tag : str, optional
        Which checkpoint of a run directory; by default the one that `latest` names.

    Raises
    ------
    ShardError
        Two roots hold different files for the same rank.
    UnknownFormatError
        `latest` names nothing, or several checkpoints are there and nothing says which.
    """
    directory = _tag_directory(source, tag, roots)
    if directory is None:
        return None
    # The name of a tag directory within its run's, as `latest` has it; of a tag directory alone, its own.
    own = directory.relative_to(source).as_posix() if source in directory.parents else directory.name
    own = own if is_tag(own) else directory.name
    shards: dict[object, Shard] = {}
    further: list[Shard] = []
    every = shards_in(directory)
    for root in roots:
        candidate = root / own
        is_run = root.name != candidate.name and candidate.is_dir()
        held = (is_run and shards_in(candidate)) or shards_in(root)
        if not held:
            raise ShardError(
                "holds no files of the checkpoint", path=root, expected=f"files of {directory.name}", code=MISSING_FILE
            )
        every += held
    for shard in sorted(every, key=lambda shard: (shard.writer or 0, shard.writers or 0)):
        known = shards.setdefault(shard.identity, shard)
        if known.writers == shard.writers and (known.writer or 0) < (shard.writer or 0):
            further.append(shard)
        elif known is not shard and not Path(known.path).samefile(shard.path):
            numbers = zip(("rank", "mp_rank", "layer", "expert"), shard.identity[1:], strict=True)
            whose = ", ".join(f"{name} {number}" for name, number in numbers if number is not None)
            raise ShardError(
                f"there are two {shard.role} files of {whose}",
                path=shard.path,
                expected="one file for each rank",
                found=known.path,
                advice="remove the one that does not belong to this run",
                code=TWICE,
                ranks=[] if shard.dp_rank is None else [shard.dp_rank],
            )
    found = tuple(sorted(shards.values(), key=lambda s: s.order))
    return TagDirectory(directory, own, found, tuple(further))


def shards_in(directory: Path) -> list[Shard]:
    """Return the files of a directory that have names of a DeepSpeed checkpoint."""
    return list(filter(None, (classify(name, str(directory / name)) for name in files_in(directory))))


def _is_tag_directory(directory: Path) -> bool:
    return any(shard.role in (MODEL, OPTIMIZER) for shard in shards_in(directory))


def _tag_directory(source: Path, tag: str | None, roots: Sequence[Path]) -> Path | None:
    if tag is not None:
        if os.path.isdir(source / tag) and (roots or shards_in(source / tag)):  # noqa: PTH112  # false of too long a name
            return source / tag
        return source if source.name == tag and _is_tag_directory(source) else None
    if _is_tag_directory(source):
        return source
    name = latest_name(source)
    if name is not None and is_tag(name) and os.path.isdir(source / name):  # noqa: PTH112
        return source / name
    tags = [one.name for one in folders_in(source) if _is_tag_directory(one)]
    shown = listed(tags, most=8) or "no checkpoint"
    if name is not None:
        raise UnknownFormatError(
            "names no checkpoint",
            path=source / "latest",
            expected="the name of a directory next to it",
            found=repr(name[:80]),
            advice=f"give --tag: {shown}",
            code=LATEST,
        )
    if len(tags) > 1:
        raise UnknownFormatError(
            "several checkpoints, but no file `latest`", path=source, found=shown, advice="give --tag"
        )
    return source / tags[0] if tags else None
