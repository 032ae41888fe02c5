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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnsupportedError, listed
from zckpt.formats.megatron.directory import FILE, FOLDER, folders
from zckpt.formats.megatron.fused import is_fused
from zckpt.formats.megatron.names import BLOCK, Name, is_expert
from zckpt.formats.megatron.objects import size_of
from zckpt.formats.torch_files.tensors import arguments_of, as_mapping
from zckpt.immutable import immutable
from zckpt.torchfile import Tensor, TorchFile, read_torchfile

_CHUNK = re.compile(r"model([0-9]{0,18})")

TENSORS, STAGES, EXPERTS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
)  # fmt: skip


@immutable
class RankFile:
    """What a rank's file holds.

    Parameters
    ----------
    tp, pp, ep : int
        The rank's numbers.
    folder : Path
        Its directory.
    file : TorchFile
    content : dict
        Its root.
    chunks : tuple of dict of str to object
        The state dict of each chunk of the model, by the names that it has there.
    keys : tuple of str
        Under which they are.
    """

    tp: int
    pp: int
    ep: int
    folder: Path
    file: TorchFile
    content: Mapping[object, object]
    chunks: tuple[dict[str, object], ...]
    keys: tuple[str, ...]

    @property
    def arguments(self) -> Mapping[object, object]:
        """The program's arguments; empty where the file has none."""
        return arguments_of(self.content.get("args"))


def read_ranks(directory: Path, known: Mapping[str, int]) -> list[RankFile]:
    """Read the structure of all ranks' files, in the order of tensor, expert, and pipeline ranks.

    `known`: how many ranks of each kind there are, `tp`, `pp` and `ep`, where that is known otherwise than by the
    files. Raises ShardError: a rank's file is missing, or of another step; SourceError: a file is damaged, or what its
    directory's name means is not certain.
    """
    paths = folders(directory)
    numbers = {name: [int(n) for n in match.groups() if n is not None]
               for name in paths if (match := FOLDER.fullmatch(name))}  # fmt: skip
    lengths = {len(one) for one in numbers.values()}
    if len(lengths) > 1:
        raise ShardError("has rank directories of more than one kind", found=listed(list(paths)))
    files = {name: read_torchfile(path / FILE) for name, path in paths.items()}
    first = next(iter(files.values()))
    content = as_mapping(first.root, first.path)
    arguments = arguments_of(content.get("args"))
    _check_experts_cut(content, arguments)
    is_second_expert = lengths == {2} and (
        known["ep"] > 1 if {"ep", "pp"} <= known.keys() else _is_second_expert(arguments, list(paths))
    )
    found = []
    for name, (tp, *rest) in numbers.items():
        stages, experts = ([], rest) if is_second_expert else (rest[:1], rest[1:])
        found.append(_rank_file(tp, sum(stages), sum(experts), paths[name], files[name]))
    _check_all(found, arguments)
    _check_alike(found)
    return sorted(found, key=lambda one: (one.pp, one.ep, one.tp))


def _check_experts_cut(content: Mapping[object, object], arguments: Mapping[object, object]) -> None:
    """Raise UnsupportedError where experts are cut for other ranks than the rest: which have them, no file says."""
    tp, own = size_of(arguments, TENSORS), size_of(arguments, "expert_tensor_parallel_size")
    states = [its for key, its in content.items() if isinstance(key, str) and _CHUNK.fullmatch(key)]
    has_experts = any(is_expert(str(name)) for its in states if isinstance(its, dict) for name in its)
    if has_experts and tp is not None and own not in (None, tp):
        raise UnsupportedError("experts are cut for another number of tensor-parallel ranks than the rest",
                               expected=f"expert_tensor_parallel_size {tp}", found=own,
                               advice="save it as torch_dist with the program that wrote it")  # fmt: skip


def _is_second_expert(arguments: Mapping[object, object], names: list[str]) -> bool:
    """Tell whether the second number of directories is that of expert parallelism."""
    stages, experts = size_of(arguments, STAGES), size_of({EXPERTS: 1, **arguments}, EXPERTS)
    if stages is not None and experts is not None and (stages > 1) != (experts > 1):
        return experts > 1
    if stages is not None and stages > 1:
        raise ShardError("the names of its directories lack the number of the expert-parallel rank",
                         expected=f"{stages} stages of {experts} ranks", found=listed(names))  # fmt: skip
    raise UnsupportedError("it is unknown whether its ranks are pipeline- or expert-parallel",
                           expected=f"{STAGES} in the saved arguments",
                           found=listed(names))  # fmt: skip


def _rank_file(tp: int, pp: int, ep: int, folder: Path, file: TorchFile) -> RankFile:
    content = as_mapping(file.root, file.path)
    keys = {key: _CHUNK.fullmatch(key) for key in content if isinstance(key, str)}
    chunks = sorted((int(match[1] or 0), key) for key, match in keys.items() if match is not None)
    if not chunks or [number for number, _ in chunks] != list(range(len(chunks))):
        raise DamagedFileError("unexpected content", path=file.path, expected="the rank's model under `model`",
                               found=listed(list(content)))  # fmt: skip
    names = tuple(key for _, key in chunks)
    return RankFile(tp, pp, ep, folder, file, content, tuple(_flat(content[key], file.path) for key in names), names)


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


def _check_all(ranks: Sequence[RankFile], arguments: Mapping[object, object]) -> None:
    there = {(one.pp, one.ep, one.tp) for one in ranks}
    kinds = zip(zip(*there, strict=True), (STAGES, EXPERTS, TENSORS), strict=True)
    pp, ep, tp = (max(1 + max(numbers), size_of(arguments, key) or 0) for numbers, key in kinds)
    every = ((p, e, t) for p in range(pp) for e in range(ep) for t in range(tp))
    missing = next((one for one in every if one not in there), None)
    if missing is not None:
        p, e, t = missing
        raise ShardError(
            "rank files are missing",
            expected=f"{tp} tensor-parallel ranks, {pp} stages, {ep} expert-parallel ranks",
            found=f"none of rank {t} of stage {p}" + (f" and experts {e}" if ep > 1 else ""),
            code=MISSING_FILE,
        )


def _check_alike(ranks: Sequence[RankFile]) -> None:
    """Raise ShardError where ranks are of different steps, or have other numbers of chunks."""
    first = ranks[0]
    for one in ranks[1:]:
        for key in ("iteration", "checkpoint_version"):
            if one.content.get(key) != first.content.get(key):
                raise ShardError(f"has another {key} than {first.folder.name}", path=one.file.path,
                                 expected=first.content.get(key), found=one.content.get(key))  # fmt: skip
        if one.keys != first.keys:
            raise LayoutError(f"has other chunks of the model than {first.folder.name}", path=one.file.path,
                              expected=", ".join(first.keys), found=", ".join(one.keys))  # fmt: skip


def is_weight(name: str, value: object) -> bool:
    """Tell whether a value of a state dict is of the model, and not what a module keeps for itself (FP8's scales)."""
    return isinstance(value, Tensor) and "_extra_state" not in name


class Numbering:
    """The numbers that layers and experts of ranks have in the whole model."""

    def __init__(self, ranks: Sequence[RankFile]) -> None:
        self._stages, self._chunks = 1 + max(one.pp for one in ranks), len(ranks[0].chunks)
        self._parallel = any(one.ep for one in ranks)
        counts: dict[tuple[int, int, str], int] = {}
        for one in ranks:
            for chunk, names in enumerate(one.chunks):
                for name in map(Name.of, names):
                    if name.layer is not None:
                        key = (chunk, one.pp, name.block)
                        counts[key] = max(counts.get(key, 0), name.layer + 1)
        self._first: dict[tuple[int, int, str], int] = {}
        self._ends: dict[str, int] = {}
        for key in sorted(counts):
            self._first[key] = self._ends.get(key[2], 0)
            self._ends[key[2]] = self._first[key] + counts[key]

    def bounds(self) -> list[int] | None:
        """Return the first layer of each chunk, in the model's order, and how many layers there are.

        A chunk without any begins where the next one does. None: there is not one block of layers.
        """
        blocks = [block for block in self._ends if BLOCK.fullmatch(block)]
        if len(blocks) != 1:
            return None
        found = [self._ends[blocks[0]]]
        for chunk in reversed(range(self._chunks)):
            for stage in reversed(range(self._stages)):
                found.insert(0, self._first.get((chunk, stage, blocks[0]), found[0]))
        return found

    def names(self, one: RankFile, chunk: int) -> dict[str, str]:
        """Return the names of what is in a chunk in the whole model, by those in the file.

        Raises
        ------
        UnsupportedError
            Experts of several ranks that are not told apart.
        """
        own = {text: Name.of(text) for text in one.chunks[chunk]}
        count = 1 + max((name.expert for name in own.values() if name.expert is not None), default=-1)
        found = {}
        for text, name in own.items():
            is_odd = name.expert is None and is_expert(text) and not is_fused(text)
            if is_odd and self._parallel and is_weight(text, one.chunks[chunk][text]):
                raise UnsupportedError(f"it is unknown which experts {text} has", path=one.file.path,
                                       expected="a tensor for each expert")  # fmt: skip
            expert = None if name.expert is None else one.ep * count + name.expert
            layer = None if name.layer is None else name.layer + self._first[chunk, one.pp, name.block]
            found[text] = str(replace(name, expert=expert, layer=layer))
        return found
