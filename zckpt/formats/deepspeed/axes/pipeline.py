"""Pipeline parallelism: weights in a file for each layer, optimizer state by stage.

    mp_rank = stage x tp + tensor-parallel rank
    layer_NN-model_TT-model_states.pt    {name within the layer: tensor}; NN counts over the whole model
    param_shapes of a stage              `NN.<name>`, and `tied_modules.<key>.<name>` for a layer used in several stages

A tied layer's weights lie in the file of its first use only; every stage that uses it has its optimizer state.

With DeepSpeed's experts there are no layer files: a stage's model file has its weights, under the names of the groups,
and numbers the layers of experts by itself. Every stage has such layers: DeepSpeed waits for ever where one has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import LayoutError, ShardError, UnsupportedError, listed
from zckpt.formats.deepspeed.axes.experts import by_rank
from zckpt.formats.deepspeed.directory import Shard
from zckpt.formats.deepspeed.nested import ATTRIBUTE, unwrapped
from zckpt.formats.deepspeed.origin import Rank, gathered
from zckpt.formats.deepspeed.ranks import check_stages_alike
from zckpt.formats.deepspeed.shards import Files, ModelShard, OptimizerShard, Shapes, Weights, mapped_numels, weights_of
from zckpt.formats.deepspeed.values import copies_of
from zckpt.state import ParamGroup, Shape, Slot, dict_of, size_of
from zckpt.torchfile import Digests, TorchFile

TIED = "tied_modules."

Copy = tuple[int, str, Slot]
"""Model-parallel rank, parameter name and weight."""


def is_of_layer(name: str) -> bool:
    """Tell whether a parameter has a name that only a pipeline has for it."""
    return name.startswith(TIED) or name.partition(".")[0].isdecimal()


def within(name: str) -> str:
    """Return a parameter's name within its layer."""
    return name.removeprefix(TIED).partition(".")[2]


def tied_key(name: str) -> str | None:
    """Return the key of a tied layer that a parameter is of; None if it is of no such layer."""
    return name.removeprefix(TIED).partition(".")[0] if name.startswith(TIED) else None


def layer_of(name: str) -> int:
    """Return the number of the layer that a parameter is of.

    Raises LayoutError: it is of none.
    """
    number = name.partition(".")[0]
    if not number.isdecimal() or len(number) > 6:
        raise LayoutError(
            f"{name} does not belong to a layer of the pipeline", expected="NUMBER.NAME or tied_modules.KEY.NAME"
        )
    return int(number)


def degrees(models: Sequence[ModelShard], layers: Sequence[Shard]) -> tuple[int, int]:
    """Return (pipeline, tensor) parallel degrees.

    Newer model files record them; in older ones the layer files tell how many tensor-parallel ranks there are, and
    where there are none, the names in the model files.

    `models`: of each model-parallel rank the first. Raises LayoutError: they do not multiply to the number of
    model-parallel ranks.
    """
    recorded, mp_ranks = models[0].content.get("checkpoint_parallel_dimensions"), len(models)
    tp = size_of(dict_of(recorded), "tp_degree") or len({layer.mp_rank or 0 for layer in layers})
    if not tp:  # ranks have parameters of the same names, all but in a pipeline with experts
        tp = sum(model.module.keys() == models[0].module.keys() for model in models)
        tp = tp if len(models) % tp == 0 and are_stages(models, tp) else len(models)
    if mp_ranks % tp or (not layers and tp != mp_ranks and not are_stages(models, tp)):
        raise LayoutError(
            "model-parallel ranks do not form a grid of stages and tensor-parallel ranks",
            path=models[0].path,
            expected=f"a multiple of {tp} ranks and, with several stages, layer files or experts in each",
            found=mp_ranks,
        )
    return mp_ranks // tp, tp


def are_stages(models: Sequence[ModelShard], tp: int) -> bool:
    """Tell whether model files are of stages that have their own weights, and experts."""
    names = [set(model.module) for model in models]
    numbered = all(is_of_layer(name) for one in names for name in one)
    if not numbered or any(not model.content.get("num_experts") for model in models):
        return False
    stages = [{name for name in one if not name.startswith(TIED)} for one in names[::tp]]
    apart = sum(map(len, stages)) == len(set().union(*stages))
    return apart and all(names[number] == names[number // tp * tp] for number in range(len(names)))


def stage_weights(files: Files, models: Sequence[ModelShard], tp: int) -> tuple[dict[int, Weights], list[Copy]]:
    """Return the weights of each model-parallel rank, under the names that its groups have for them, and their copies.

    A tied layer that no function wraps has a file for each of its uses: of these the first is read.

    What no stage's groups or buffers name (frozen parameters) goes to the first stage.

    `files`: the layer files; `models`: by model-parallel rank; `tp`: tensor-parallel degree. Raises UnsupportedError: a
    layer's weights could be those of several tied layers; ShardError: a layer's file is missing: what a stage has
    trained is in none.
    """
    found: dict[int, Weights] = {rank: {} for rank in range(len(models))}
    copies: list[Copy] = []
    named = [_names(model) for model in models]
    for shard, file in files:
        tp_rank = shard.mp_rank or 0
        if tp_rank >= tp:
            continue
        weights, stages = weights_of(file), range(tp_rank, len(models), tp)
        for key, name in layer_names(shard, file, models[tp_rank::tp]).items():
            owners = [rank for rank in stages if name in named[rank]] or [tp_rank]
            if name in found[owners[0]]:
                copies.append((owners[0], name, weights[key]))
                continue
            for rank in owners:
                found[rank][name] = weights[key]
    for rank, model in enumerate(models):
        lost = [name for name in named[rank] if name not in found[rank]]
        if lost:
            raise ShardError(
                f"no layer file has {listed(lost)}, which {Path(model.path).name} lists",
                path=Path(model.path).parent,
                expected="a file for each layer with weights",
                found=listed([Path(shard.path).name for shard, _ in files]),
                code=MISSING_FILE,
                parameters=lost,
            )
    return found, copies


def with_shapes(
    models: Sequence[ModelShard],
    optimizers: Sequence[OptimizerShard],
    layers: Files,
    tp: int,
) -> list[ModelShard]:
    """Return the model files, each with the shapes by group where it has none, and the optimizer's files have names.

    Those of BF16_Optimizer do at stage 0, too, with numbers of elements: shapes are those of the layers' weights.

    Raises UnsupportedError: a tied layer could be several of the files'.
    """
    found = []
    for model in models:
        members = sorted((o for o in optimizers if o.mp_rank == model.mp_rank), key=lambda one: one.rank)
        if model.param_shapes is None and members and all(member.mappings is not None for member in members):
            weights = {
                f"{shard.layer}.{key}": slot.shape
                for shard, file in layers
                if (shard.mp_rank or 0) == model.mp_rank % tp
                for key, slot in weights_of(file).items()
            }
            shapes: list[Shapes] = []
            for index in range(len(members[0].masters)):
                shapes.append({})
                for name, numel in mapped_numels(members, index).items():
                    filed = unwrapped(name)
                    key = within(filed)
                    fitting = {weights[filed]} if filed in weights else {
                        shape for n, shape in weights.items() if (n.partition(".")[2], math.prod(shape)) == (key, numel)
                    }  # fmt: skip
                    if len(fitting) != 1:
                        raise UnsupportedError(
                            f"the shape of {name} is unknown",
                            expected=f"one weight {key} of {numel} elements in the layer files",
                            found=", ".join(map(str, sorted(fitting))) or "none",
                        )
                    (shapes[-1][name],) = fitting
            model = replace(model, param_shapes=shapes)  # noqa: PLW2901
        found.append(model)
    return found


def layer_names(shard: Shard, file: TorchFile, models: Sequence[ModelShard]) -> dict[str, str]:
    """Return the model's name for each tensor of a layer file, by its key there.

    `models`: one for each stage, of the file's tensor-parallel rank. Raises UnsupportedError: the weights could be
    those of several tied layers.
    """
    known = {name: shape for model in models for name, shape in _names(model).items()}
    found = {}
    for key, slot in weights_of(file).items():
        name = f"{shard.layer}.{key}"
        names = [name] if name in known else [n for n in known if ATTRIBUTE in n and unwrapped(n) == name]
        if not names:  # tied_modules.<layer's key>.<key>
            of_shape = (n for n, shape in known.items() if n.startswith(TIED) and shape == slot.shape)
            names = [n for n in of_shape if key in (rest := within(n), unwrapped(rest))]
            if len(names) > 1:
                raise UnsupportedError(
                    f"{key} could be the weight of several tied layers", path=shard.path, found=", ".join(sorted(names))
                )
        found[key] = names[0] if names else name
    return found


def _names(model: ModelShard) -> dict[str, Shape | None]:
    return {**dict.fromkeys(model.buffer_names), **model.trained}


def align_groups(stages: Sequence[Sequence[ParamGroup]]) -> list[list[ParamGroup | None]]:
    """Return the param groups of all stages: for each group of the training what each stage has of it.

    A stage of which a group would be empty may lack it. So what has the same hyperparameters is the same group, and
    where several have, the one in the same place.
    """
    digests = Digests()
    rows: list[list[ParamGroup | None]] = []
    marks: list[bytes] = []
    for number, groups in enumerate(stages):
        for index, group in enumerate(groups):
            mark = digests.of(group.hyperparameters)
            free = [row for row, known in enumerate(marks) if known == mark and len(rows[row]) == number]
            row = index if index in free else next(iter(free), len(rows))
            if row == len(rows):
                rows.append([None] * number)
                marks.append(mark)
            rows[row].append(group)
        for one in rows:
            one.extend([None] * (number + 1 - len(one)))
    return rows


def join(stages: Sequence[Rank]) -> Rank:
    """Return one state for all stages; of a tied layer, the first stage's.

    Raises LayoutError: a parameter that is not tied is in two stages; ShardError: stages have taken other steps.
    """
    from zckpt.formats.deepspeed.axes.gpt_model import SHARED, is_gpt

    joined = gathered(stages)
    is_of_gpt = is_gpt(name for stage in stages for name in stage.parameters)
    for stage in stages:
        joined.buffers.update(stage.buffers)
        for name, parameter in stage.parameters.items():
            first = joined.parameters.get(name)
            if first is None:
                joined.parameters[name] = parameter
                continue
            if not name.startswith(TIED) and name not in stage.tied:
                raise LayoutError(f"{name} is in two pipeline stages")
            for one in copies_of(name, parameter.slots, first.slots, stage.mp_rank, kind="layer"):
                shared = (
                    not is_of_gpt or not name.startswith(f"{TIED}embed.") or name.endswith(f".{SHARED}")
                )  # else against itself
                joined.duplicates.append(one if shared else replace(one, original=one.slot))
    degrees = {id(g): degree for one in stages for g, degree in zip(one.param_groups, one.degrees, strict=False)}
    rows = align_groups([stage.param_groups for stage in stages])
    check_stages_alike(stages, rows)
    for row, groups in enumerate(rows):
        own = [group for group in groups if group is not None]
        known = {degrees.get(id(group)) or 1 for group in own}
        count = known.pop() if len(known) == 1 else 1  # of experts, expert rank by expert rank, as in one stage
        of_ranks = zip(*(by_rank(group.parameters, count) for group in own), strict=True)
        names = list(dict.fromkeys(name for of_rank in of_ranks for its in of_rank for name in its))
        joined.param_groups.append(ParamGroup(own[0].hyperparameters, names, own[0].state))
        for name in names:
            if joined.parameters[name].group != row:
                joined.parameters[name] = replace(joined.parameters[name], group=row)
    return joined
