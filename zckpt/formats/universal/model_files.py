"""The model files of a universal checkpoint, whoever wrote them: names, kinds, and the weights that they hold whole.

zckpt            mp_rank_00 with whole weights (and one for ZeRO-3, which says nothing more)
DeepSpeed        those of the source as they were: one for each model-parallel rank; of ZeRO-3 one for each rank,
                 in which parameters are empty, and frozen ones cut
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import LayoutError, ShardError, SourceError
from zckpt.formats.deepspeed.directory import MODEL, Shard, classify
from zckpt.formats.deepspeed.per_parameter import frozen_weight
from zckpt.formats.deepspeed.ranks import missing_ranks, ranks_text
from zckpt.formats.deepspeed.shards import ModelShard, Shapes, read_model
from zckpt.formats.torch_files.tensors import identity_of, slot_of, span_of
from zckpt.state import WEIGHT, Extent, Parameter, Slot
from zckpt.torchfile import Tensor


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model files.

    Parameters
    ----------
    ranks : list of list of ModelShard
        By model-parallel rank those of all data-parallel ranks; of ZeRO-1 and 2 one each.
    parameterwise : bool
        Whether they are of ZeRO-3: without whole weights.
    unused : list of ModelShard
        Those of ZeRO-3 that say nothing more, where there are also files with whole weights.
    """

    ranks: list[list[ModelShard]]
    parameterwise: bool
    unused: list[ModelShard]

    @property
    def firsts(self) -> list[ModelShard]:
        """The first file of each model-parallel rank."""
        return [models[0] for models in self.ranks]

    @property
    def first(self) -> ModelShard:
        """The file that stands for all in what they have in common."""
        return self.ranks[0][0]

    def names(self) -> list[str]:
        """Return all names of the module, in its order."""
        return list(dict.fromkeys(name for model in self.firsts for name in model.module))

    def is_buffer(self, name: str) -> bool:
        """Tell whether a name is a buffer's."""
        return any(name in model.buffer_names for model in self.firsts)

    def tensor(self, name: str) -> tuple[ModelShard, Tensor] | None:
        """Return the file and tensor of a name, where no other model-parallel rank has one; else None."""
        holders = [model for model in self.firsts if name in model.module]
        return (holders[0], holders[0].module[name]) if len(holders) == 1 else None

    def buffer(self, name: str) -> Parameter:
        """Return a buffer; every rank has the same."""
        model = next(model for model in self.firsts if name in model.module)
        tensor = model.module[name]
        return Parameter(name, tensor.shape, tensor.dtype, {WEIGHT: slot_of(WEIGHT, tensor, model.shard.path)})

    def dtype(self, name: str) -> str:
        """Return the element type of a parameter's weight."""
        found = next((model.module[name].dtype for model in self.firsts if name in model.module), None)
        if found is not None:
            return found
        for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
            section = self.first.config.get(key)
            if isinstance(section, dict) and section.get("enabled") is True:
                return dtype
        return "float32"

    def weight(self, name: str, shape: tuple[int, ...], *, padded: bool) -> Slot | None:
        """Return the weight of a trained parameter, where a file has it whole.

        Parameters
        ----------
        name : str
        shape : tuple of int
            Of the parameter.
        padded : bool
            Whether the model may have more rows than the parameter: those that pad a vocabulary.

        Raises
        ------
        LayoutError
            The weight has another shape.
        """
        held = None if self.parameterwise else self.tensor(name)
        if held is None:
            return None
        model, tensor = held
        path = model.shard.path
        if tensor.shape == shape:
            return slot_of(WEIGHT, tensor, path)
        if len(self.ranks) > 1:
            return None
        if padded and tensor.shape[1:] == shape[1:] and shape[0] <= tensor.shape[0]:
            span = span_of(tensor, path, Extent.whole(shape))
            return Slot(WEIGHT, tensor.dtype, shape, (span,))
        raise LayoutError(f"{name} has two shapes", path=path, expected=shape, found=tensor.shape)

    def frozen(self, name: str) -> Slot | None:
        """Return the weight of a parameter that is not trained; None if no file has it whole."""
        held = self.tensor(name)
        if held is None:
            return None
        model, tensor = held
        if not self.parameterwise:
            return slot_of(WEIGHT, tensor, model.shard.path)
        shape = (model.frozen_shapes or {}).get(name)
        if shape is None:
            return None
        if 0 in shape:
            return Slot(WEIGHT, tensor.dtype, shape, ())
        return frozen_weight(name, shape, next(models for models in self.ranks if models[0] is model))

    def aliases(self, trained: Mapping[str, object]) -> dict[str, str]:
        """Return alias to owner. DeepSpeed takes empty parameters for aliases of each other; they are not.

        Files before 2023 do not record aliases: there, two names of the same bytes are one parameter.
        """
        found: dict[str, str] = {}
        everyone = [model for models in self.ranks for model in models]
        for model in everyone:
            found.update(model.shared or self._sharing(model, trained))
        result = {}
        for pair in found.items():
            alias, owner = pair if pair[0] not in trained or pair[1] in trained else pair[::-1]
            empty = any(alias in m.module and not m.module[alias].numel for m in self.firsts)
            if self.parameterwise:
                empty = any(alias in (m.frozen_shapes or {}) for m in self.firsts)
            if alias not in trained and not empty:
                result[alias] = owner
        return {alias: result.get(owner, owner) for alias, owner in result.items()}

    def _sharing(self, model: ModelShard, trained: Mapping[str, object]) -> dict[str, str]:
        found: dict[str, str] = {}
        if model.shared is not None or self.parameterwise:
            return found
        owners: dict[tuple[object, ...], str] = {}
        for name in sorted(model.module, key=lambda name: name not in trained):
            t = model.module[name]
            if t.numel and name not in model.buffer_names:
                owner = owners.setdefault(identity_of(t), name)
                if owner != name:
                    found[name] = owner
        return found

    def group_shapes(self) -> list[Shapes]:
        """Return shapes by name for each param group (of ZeRO-3: sub-group), in the order of the flat buffers.

        With several model-parallel ranks they are those of slices.

        Raises
        ------
        LayoutError
            The files do not say.
        """
        groups: list[Shapes] = []
        for model in self.firsts:
            if model.param_shapes is None:
                raise LayoutError("no param_shapes", path=model.shard.path,
                                  advice="without it nothing says which parameters a group has")  # fmt: skip
            groups += [{} for _ in range(len(model.param_shapes) - len(groups))]
            for group, shapes in zip(groups, model.param_shapes, strict=False):
                group.update(shapes)
        return groups


def read_models(directory: Path) -> ModelFiles:
    """Read the model files of a directory.

    Raises
    ------
    ShardError
        There is none, or one is missing.
    """
    try:
        found = [classify(entry.name, entry.path) for entry in os.scandir(directory) if entry.is_file()]
    except OSError as error:
        raise SourceError("cannot be read", path=directory, found=error.strerror) from error
    shards = sorted((s for s in found if s is not None and s.role == MODEL), key=lambda s: s.order)
    whole = [s for s in shards if s.dp_rank is None]
    if not shards:
        raise ShardError("no model file", path=directory, expected="mp_rank_00_model_states.pt", code=MISSING_FILE)
    by_rank: dict[int, list[Shard]] = {}
    for shard in whole or shards:
        by_rank.setdefault(shard.mp_rank or 0, []).append(shard)
    _check(directory, by_rank)
    ranks = [[read_model(shard) for shard in one] for one in by_rank.values()]
    if not whole:
        _check_complete(ranks)
    return ModelFiles(ranks, not whole, [read_model(s) for s in shards if s.dp_rank is not None] if whole else [])


def _check(directory: Path, by_rank: Mapping[int, list[Shard]]) -> None:
    absent = missing_ranks(len(by_rank), by_rank)
    if absent or len({len(one) for one in by_rank.values()}) > 1:
        raise ShardError("model files of some ranks are missing", path=directory,
                         found=f"model-parallel ranks {sorted(by_rank)[:16]}", code=MISSING_FILE)  # fmt: skip


def _check_complete(ranks: list[list[ModelShard]]) -> None:
    """Raise unless every data-parallel rank's file is there; only ranks with cut frozen parameters are needed."""
    for models in ranks:
        world = models[0].content.get("dp_world_size")
        numbers = [model.shard.dp_rank or 0 for model in models]
        missing = missing_ranks(world if type(world) is int else len(models), numbers)
        if missing and models[0].frozen_fragments:
            raise ShardError(f"model files are missing for {ranks_text(missing)}", path=models[0].shard.path,
                             expected=f"{world} ranks", code=MISSING_FILE)  # fmt: skip
