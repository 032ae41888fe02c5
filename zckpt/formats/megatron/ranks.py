"""The legacy files of model-parallel ranks: which ranks there are, and what each has by the whole model's names.

DIR/mp_rank_TT/model_optim_rng.pt              tensor-parallel rank TT
DIR/mp_rank_TT_PPP/                            with pipeline stage PPP, or expert-parallel rank where there is one stage
DIR/mp_rank_TT_PPP_EEE/                        with both
DIR/.../distrib_optim.pt                       what the distributed optimizer has of this rank's parameters

model, or model0, model1, ... of a virtual pipeline, is the state dict of the module on the rank. Layers are numbered
from 0 in each, experts on each expert-parallel rank. Chunk v of stage p has the layers behind those of all stages'
chunks before v, and of chunks v of the stages before p.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnsupportedError, listed
from zckpt.formats.megatron.directory import FILE, FOLDER, folders
from zckpt.formats.megatron.fused import is_fused
from zckpt.formats.megatron.objects import arguments_of as attributes_of
from zckpt.formats.torch_files.tensors import as_mapping
from zckpt.torchfile import Tensor, TorchFile, read_torchfile

_CHUNK = re.compile(r"model([0-9]{0,18})")
_LAYER = re.compile(r"((?:.*?\.)?layers)\.([0-9]{1,18})(\..*)")
_LOCAL_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)([0-9]{1,18})(\..*)")
_GROUPED_EXPERT = re.compile(r"(.*\.experts\.linear_fc[12]\.(?:weight|bias))([0-9]{1,18})()")
EXPERT = re.compile(r"(?:.*\.)?experts\..*")

STAGES, EXPERTS_SIZE = "pipeline_model_parallel_size", "expert_model_parallel_size"


@dataclass(frozen=True, slots=True)
class Rank:
    """A model-parallel rank's directory."""

    tp: int
    pp: int
    ep: int
    path: Path


@dataclass(frozen=True, slots=True)
class RankFile:
    """What a rank's file holds.

    Parameters
    ----------
    rank : Rank
    file : TorchFile
    content : dict
        Its root.
    chunks : tuple of dict of str to object
        The state dict of each chunk of the model, by the names that it has there.
    keys : tuple of str
        Under which they are.
    """

    rank: Rank
    file: TorchFile
    content: Mapping[object, object]
    chunks: tuple[dict[str, object], ...]
    keys: tuple[str, ...]

    @property
    def arguments(self) -> Mapping[object, object]:
        """The program's arguments; empty where the file has none."""
        return arguments_of(self.content)


def arguments_of(content: Mapping[object, object]) -> Mapping[object, object]:
    """Return the attributes of `args`."""
    return attributes_of(content.get("args"))


def read_ranks(directory: Path, known: Mapping[str, int]) -> list[RankFile]:
    """Read the structure of all ranks' files, in the order of tensor, expert, and pipeline ranks.

    `known`: how many ranks of each kind there are, `tp`, `pp` and `ep`, where that is known otherwise than by the
    files. Raises ShardError: a rank's file is missing, or of another step; SourceError: a file is damaged, or what its
    directory's name means is not certain.
    """
    names = folders(directory)
    matches = {name: FOLDER.fullmatch(name) for name in names}
    numbers = {name: tuple(int(n) for n in match.groups() if n is not None) for name, match in matches.items() if match}
    lengths = {len(one) for one in numbers.values()}
    if len(lengths) > 1:
        raise ShardError("has directories of ranks of more than one kind", found=listed(list(names)))
    files = {name: read_torchfile(path / FILE) for name, path in names.items()}
    _check_experts_cut(files)
    second_is_expert = lengths == {2} and (
        known["ep"] > 1 if {"ep", "pp"} <= known.keys() else _second_is_expert(files)
    )
    ranks = {
        name: Rank(n[0], n[1] if len(n) > 1 and not second_is_expert else 0,
                   n[-1] if len(n) == 3 or second_is_expert else 0, names[name])
        for name, n in numbers.items()
    }  # fmt: skip
    _check_all(list(ranks.values()), files)
    found = [_rank_file(ranks[name], file) for name, file in files.items()]
    _check_alike(found)
    return sorted(found, key=lambda one: (one.rank.pp, one.rank.ep, one.rank.tp))


def _check_experts_cut(files: Mapping[str, TorchFile]) -> None:
    """Raise UnsupportedError where experts are cut for other ranks than the rest: which have them, no file says."""
    file = next(iter(files.values()))
    content = as_mapping(file.root, file.path)
    arguments = arguments_of(content)
    tp, own = (arguments.get(key) for key in ("tensor_model_parallel_size", "expert_tensor_parallel_size"))
    states = [its for key, its in content.items() if isinstance(key, str) and _CHUNK.fullmatch(key)]
    has_experts = any(EXPERT.fullmatch(str(name)) for its in states if isinstance(its, dict) for name in its)
    if has_experts and type(tp) is int and type(own) is int and own != tp:
        raise UnsupportedError("experts are cut for other tensor-parallel ranks than the rest",
                               expected=f"expert_tensor_parallel_size {tp}", found=own,
                               advice="write it as torch_dist with the program that wrote it")  # fmt: skip


def _second_is_expert(files: Mapping[str, TorchFile]) -> bool:
    """Tell whether the second number of directories is that of expert parallelism."""
    file = next(iter(files.values()))
    arguments = arguments_of(as_mapping(file.root, file.path))
    stages, experts = arguments.get(STAGES), arguments.get(EXPERTS_SIZE, 1)
    if type(stages) is int and type(experts) is int and (stages > 1) != (experts > 1):
        return experts > 1
    if type(stages) is int and stages > 1:
        raise ShardError("has no number of the expert-parallel rank in the names of its directories",
                         expected=f"{stages} stages of {experts} ranks", found=listed(list(files)))  # fmt: skip
    raise UnsupportedError(
        "whether its ranks are those of pipeline or of expert parallelism is not known",
        expected=f"{STAGES} in the arguments that are saved with it",
        found=listed(list(files)),
    )


def _check_all(ranks: Sequence[Rank], files: Mapping[str, TorchFile]) -> None:
    tp, pp, ep = (max(getattr(one, kind) for one in ranks) + 1 for kind in ("tp", "pp", "ep"))
    file = next(iter(files.values()))
    arguments = arguments_of(as_mapping(file.root, file.path))
    said = [arguments.get(key) for key in ("tensor_model_parallel_size", STAGES, EXPERTS_SIZE)]
    tp, pp, ep = (max(n, s) if type(s) is int else n for n, s in zip((tp, pp, ep), said, strict=True))
    there = {(one.tp, one.pp, one.ep) for one in ranks}
    missing = [(t, p, e) for p in range(pp) for e in range(ep) for t in range(tp) if (t, p, e) not in there]
    if missing:
        t, p, e = missing[0]
        raise ShardError(
            "files of ranks are missing",
            expected=f"{tp} tensor-parallel ranks, {pp} stages, {ep} expert-parallel ranks",
            found=f"none of rank {t} of stage {p}" + (f" and experts {e}" if ep > 1 else ""),
            code=MISSING_FILE,
        )


def _rank_file(rank: Rank, file: TorchFile) -> RankFile:
    content = as_mapping(file.root, file.path)
    keys = {key: _CHUNK.fullmatch(key) for key in content if isinstance(key, str)}
    chunks = sorted((int(match[1] or 0), key) for key, match in keys.items() if match is not None)
    if not chunks or [number for number, _ in chunks] != list(range(len(chunks))):
        raise DamagedFileError("unexpected content", path=file.path, expected="the rank's model under `model`",
                               found=listed([str(key) for key in content]))  # fmt: skip
    names = tuple(key for _, key in chunks)
    return RankFile(rank, file, content, tuple(_flat(content[key], file.path) for key in names), names)


def _flat(node: object, path: str) -> dict[str, object]:
    """Return a state dict whose dicts may hold dicts as one, names joined by dots."""
    found: dict[str, object] = {}
    waiting: list[tuple[str, object]] = [("", as_mapping(node, path, "a state dict"))]
    while waiting:
        front, value = waiting.pop()
        if isinstance(value, dict) and (value or not front):
            waiting += [(f"{front}.{key}" if front else str(key), below) for key, below in reversed(value.items())]
        elif front in found:
            raise DamagedFileError(f"has {front} twice")
        else:
            found[front] = value
    return found


def _check_alike(ranks: Sequence[RankFile]) -> None:
    """Raise ShardError where ranks are of different steps, or have other numbers of chunks."""
    first = ranks[0]
    for one in ranks[1:]:
        for key in ("iteration", "checkpoint_version"):
            if one.content.get(key) != first.content.get(key):
                raise ShardError(f"is of another {key} than {first.rank.path.name}", path=one.file.path,
                                 expected=first.content.get(key), found=one.content.get(key))  # fmt: skip
        if one.keys != first.keys:
            raise LayoutError(f"has other chunks of the model than {first.rank.path.name}", path=one.file.path,
                              expected=", ".join(first.keys), found=", ".join(one.keys))  # fmt: skip


def is_weight(name: str, value: object) -> bool:
    """Tell whether a value of a state dict is of the model, and not what a module keeps for itself (FP8's scales)."""
    return isinstance(value, Tensor) and "_extra_state" not in name


class Numbering:
    """The numbers that layers and experts of ranks have in the whole model."""

    def __init__(self, ranks: Sequence[RankFile]) -> None:
        self._stages = 1 + max(one.rank.pp for one in ranks)
        self._first: dict[tuple[int, int, str], int] = {}
        counts: dict[tuple[int, int, str], int] = {}
        for one in ranks:
            for chunk, names in enumerate(one.chunks):
                for match in filter(None, map(_LAYER.fullmatch, names)):
                    key = (chunk, one.rank.pp, match[1])
                    counts[key] = max(counts.get(key, 0), int(match[2]) + 1)
        ends: dict[str, int] = {}
        for chunk, stage, front in sorted(counts):
            self._first[chunk, stage, front] = ends.get(front, 0)
            ends[front] = ends.get(front, 0) + counts[chunk, stage, front]
        self._ends, self._chunks = ends, len(ranks[0].chunks)
        self._parallel = any(one.rank.ep for one in ranks)

    def bounds(self, front: str) -> list[int]:
        """Return the first layer of each chunk, in the model's order, and how many layers there are.

        `front`: what the layers' names begin with. A chunk without any begins where the next one does.
        """
        found: list[int] = [self._ends.get(front, 0)]
        for chunk in reversed(range(self._chunks)):
            for stage in reversed(range(self._stages)):
                found.insert(0, self._first.get((chunk, stage, front), found[0]))
        return found

    def fronts(self) -> list[str]:
        """Return what names of layers begin with."""
        return list(self._ends)

    def names(self, one: RankFile, chunk: int) -> Iterator[tuple[str, str]]:
        """Yield the names of what is in a chunk: in the file, and in the whole model.

        Raises
        ------
        UnsupportedError
            Experts of several ranks that are not told apart.
        """
        own = one.chunks[chunk]
        experts = [match for name in own for match in [_expert(name)] if match is not None]
        count = 1 + max((int(match[2]) for match in experts), default=-1)
        for name in own:
            match, renamed = _expert(name), name
            if match is not None:
                renamed = f"{match[1]}{one.rank.ep * count + int(match[2])}{match[3]}"
            elif self._parallel and EXPERT.fullmatch(name) and is_weight(name, own[name]) and not is_fused(name):
                raise UnsupportedError(f"which experts {name} has is not known", path=one.file.path,
                                       expected="a tensor for each expert")  # fmt: skip
            layer = _LAYER.fullmatch(renamed)
            if layer is not None:
                number = int(layer[2]) + self._first[chunk, one.rank.pp, layer[1]]
                renamed = f"{layer[1]}.{number}{layer[3]}"
            yield name, renamed


def _expert(name: str) -> re.Match[str] | None:
    return _LOCAL_EXPERT.fullmatch(name) or _GROUPED_EXPERT.fullmatch(name)
