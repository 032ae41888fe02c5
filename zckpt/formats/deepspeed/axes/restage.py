"""The state of each stage and slice of a pipeline that is to be written: the layers, dealt to other stages.

At unchanged stages nothing is put together: each keeps its own state of a tied layer. At others all of them get the
first one's. A stage's parameters are in the order of its modules, as trainings have them: tied layers by their first
use, then the others by their number; within a layer as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.axes.experts import SLICED_EXPERTS, by_rank, is_expert
from zckpt.formats.deepspeed.axes.experts import layer_of as expert_layer_of
from zckpt.formats.deepspeed.axes.gpt_model import padded_rows
from zckpt.formats.deepspeed.axes.pipeline import TIED, align_groups, are_stages, tied_key
from zckpt.formats.deepspeed.axes.stage_order import Orders, is_ordered, known_orders, untold_orders
from zckpt.formats.deepspeed.axes.stages import Stages, parse_layers, stages_of, uses_of
from zckpt.formats.deepspeed.axes.tensor_parallel import local_states
from zckpt.formats.deepspeed.options import Options, RecutOptions
from zckpt.formats.deepspeed.origin import Origin, Rank, by_stage
from zckpt.formats.deepspeed.target_groups import expert_groups, joined_experts
from zckpt.formats.remainder import origin as origin_of_state
from zckpt.state import Checkpoint, ParamGroup, by_key, positions
from zckpt.state.names import renamed
from zckpt.torchfile import Digests


def stage_states(
    checkpoint: Checkpoint, origin: Origin, degree: int, options: RecutOptions
) -> tuple[list[list[Rank]], Stages | None]:
    """Return the state of each stage and tensor-parallel rank of the target, and how its layers are dealt anew.

    Of a checkpoint that is no pipeline's there is one stage. The ranks' numbers are still those of the source.

    `degree`: tensor-parallel ranks of the target. Raises UsageError, UnsupportedError, LayoutError: as `local_states`
    and `stages_of`.
    """
    if degree < 1:
        raise UsageError("unusable --tensor-parallel-size", expected="at least 1", found=degree)
    as_slices = options.sliced_experts
    if as_slices is None and isinstance(said := origin_of_state(checkpoint).get(SLICED_EXPERTS), bool):
        as_slices = said
    rows = options.padded_vocab_size
    is_asked = options.tensor_parallel_size is not None if origin.is_foreign else degree != checkpoint.topology.tp
    if rows is None and is_asked and origin.rules_path is None:
        parameters = checkpoint.parameters if origin.is_foreign else {}
        rows = padded_rows(origin.model.content, origin.rules, degree, parameters)
    tp, staged = checkpoint.topology.tp, is_staged(checkpoint, origin, options)
    asked = stages_asked(options)
    if asked and not staged:
        raise UsageError(f"the checkpoint is not a pipeline, so --{asked[0].replace('_', '-')} does not apply")
    orders: Orders = []
    if origin.is_foreign and staged:
        orders = known_orders(checkpoint)
        for known, group in zip_longest(orders, checkpoint.param_groups):
            if known is None and not any(map(is_expert, group.parameters)) and not is_ordered(group.parameters, {}):
                raise UnsupportedError(
                    "a param group is not in the order of the pipeline's modules (tied layers, then the others by "
                    "number), and nothing says what each stage had",
                    found=", ".join(group.parameters[:8]),
                )
    source = by_stage(origin.ranks, tp)
    sliced = [local_states(checkpoint, origin, degree, rows, ranks, sliced_experts=as_slices) for ranks in source]
    if not staged:
        return sliced, None
    before, after = ([ranks[0] for ranks in every] for every in (source, sliced))
    stages = stages_of(origin, before, after, options, checkpoint.source)
    if stages is None and degree == tp:
        return sliced, None
    if stages is not None:
        lanes = list(map(list, zip(*sliced, strict=True)))
        slices = [_dealt(origin, states, stages, orders) for states in lanes]
        sliced = list(map(list, zip(*slices, strict=True)))
        stages = replace(stages, untold=tuple(untold_orders(lanes[0], slices[0], orders)))
    held = [any(map(is_expert, states[0].parameters)) for states in sliced]
    if any(held) and not all(held):
        raise UnsupportedError(
            f"stage {held.index(False)} would have no experts, and DeepSpeed waits forever if a stage has none",
            expected="experts in each stage",
            found=f"in stages {', '.join(str(stage) for stage, one in enumerate(held) if one)}",
        )
    first = origin.ranks[0]
    return [[replace(one, model_files=first.model_files, members=first.members) for one in of_stage]
            for of_stage in sliced], stages  # fmt: skip


def is_staged(checkpoint: Checkpoint, origin: Origin, options: RecutOptions) -> bool:
    """Tell whether a checkpoint is a pipeline's: with experts there are no layer files, nor a mark of one stage."""
    if origin.layers or checkpoint.topology.pp > 1:
        return True
    if origin.is_foreign:
        return bool(stages_asked(options))
    given = options.pipeline_layers is not None or options.stage_bounds is not None
    return given and are_stages([files.model for files in origin.ranks], len(origin.ranks))


def stages_asked(options: Options) -> list[str]:
    """Return the options which say that layers are to be dealt to stages."""
    names = ("pipeline_parallel_size", "partition_method", "stage_bounds", "pipeline_layers")
    return [name for name in names if getattr(options, name) not in (None, 1)]


def with_tied_keys(checkpoint: Checkpoint, options: Options) -> list[str]:
    """Give tied layers that have the number of their file the names that a list of layers has for them; say which.

    No file of stage 0 has their keys, so that a model read from there, and whatever it was converted to, has numbers.
    What is frozen keeps them, for ZeRO-1 lists the trained only.
    """
    known = checkpoint.grouped
    names: dict[str, str] = {}
    for key, numbers in uses_of(parse_layers(options.pipeline_layers)).items():
        prefixes = [f"{number}." for number in numbers]
        numbered = [prefix for prefix in prefixes if any(name.startswith(prefix) for name in known)]
        if numbered == prefixes[:1] and not any(name.startswith(f"{TIED}{key}.") for name in known):
            own = [name for name in known if name.startswith(numbered[0])]
            names |= {name: f"{TIED}{key}.{name.removeprefix(numbered[0])}" for name in own}
    renamed(checkpoint, names)
    return [f"{old} is called {new}, as --pipeline-layers says" for old, new in names.items()]


def _dealt(origin: Origin, source: Sequence[Rank], stages: Stages, orders: Orders) -> list[Rank]:
    """Return the state of each stage of the target, of one tensor-parallel rank.

    A param group of which a stage has nothing is not there: DeepSpeed removes it from the training's optimizer.
    """
    count = len(stages.bounds) - 1
    by_groups = bool(origin.members) and not origin.members[0].bf16_optimizer
    whole = frozenset[str]().union(*(one.whole for one in source))
    found = [source[0].emptied(lanes=source[0].lanes, whole=whole) for _ in range(count)]
    parameters = {name: p for state in reversed(source) for name, p in state.parameters.items()}
    buffers = {name: p for state in reversed(source) for name, p in state.buffers.items()}
    has = {name: stages.of(name) for name in (*parameters, *buffers)}
    places = {} if origin.is_foreign else positions(name for one in source for name in one.parameters)
    joined = [joined_experts(state) for state in source]
    by_size = origin.is_foreign or all(fits for *_, fits in joined)
    digests = Digests()
    for stage, state in enumerate(found):
        for known, own in ((parameters, state.parameters), (buffers, state.buffers)):
            names = [name for name in known if stage in has[name]]
            own.update((name, known[name]) for name in sorted(names, key=lambda name: stages.order(name, stage)))
    spread = {name: degree for groups, degrees, _ in joined for group, degree in zip(groups, degrees, strict=True)
              for name in group.parameters}  # fmt: skip
    for number, row in enumerate(align_groups([groups for groups, *_ in joined])):
        groups = [group for group in row if group is not None]
        if len({digests.of(group.state) for group in groups if group.parameters}) > 1:
            raise UnsupportedError(
                f"stages have their own values in the state of param group {number}, which other stages cannot take",
                found=", ".join(sorted({key for group in groups for key in group.state})),
                advice="keep the source's stages",
            )
        every = list(dict.fromkeys(name for group in groups for name in group.parameters))
        for stage, state in enumerate(found):
            its = [name for name in every if stage in has[name]]
            if its:
                degree = spread.get(its[0])
                if degree is None:
                    members = [_in_order(its, groups, dict(enumerate(orders)).get(number), stages, stage, places)]
                else:
                    ordered = _experts_in_order(its, degree, stages, stage)
                    ranks = by_rank(ordered, degree)
                    cuts = expert_groups([parameters[name].numel for name in ranks[0]])
                    members = [[own[i] for own in ranks for i in one] for one in cuts] if by_size else [ordered]
                for one in members:
                    state.param_groups.append(ParamGroup(groups[0].hyperparameters, one, groups[0].state))
                    state.degrees.append(degree)
            elif len(groups) == len(row) and by_groups:  # no stage of the source lacks it, either
                raise UnsupportedError(
                    f"stage {stage} would train no parameter of param group {number}; DeepSpeed's ZeRO-1 then waits "
                    "forever, because it sums gradient norms group by group over all stages",
                    expected="stages that each train part of every group",
                    found=",".join(map(str, stages.bounds)),
                )
    return found


def _in_order(
    names: Sequence[str],
    groups: Sequence[ParamGroup],
    known: Sequence[Sequence[str]] | None,
    stages: Stages,
    stage: int,
    places: Mapping[str, int],
) -> list[str]:
    """Return the parameters that a stage has of a group in the order in which the training has them there.

    `known`: each stage's, as the source's origin says them; else the order is that of modules.
    """
    if known is not None:
        if len(known) == len(stages.bounds) - 1 and set(known[stage]) == set(names):
            return list(known[stage])
        if not is_ordered(list(dict.fromkeys(name for one in known for name in one)), {}):  # as far as stages show it
            raise UnsupportedError(
                "a param group is not in the order of the pipeline's modules, so its order is only known for the "
                "stages that it was saved in",
                expected=f"{len(known)} stages, the first with {', '.join(known[0][:4])}",
                found=",".join(map(str, stages.bounds)),
            )
    tied = {key for name in names if (key := tied_key(name)) is not None}
    for group in groups:
        if len(tied) < 2 and set(names) <= set(group.parameters):
            return [name for name in group.parameters if name in set(names)]
    for group in groups:
        if not is_ordered(group.parameters, places):
            raise UnsupportedError(
                "a param group is not in the order of the stage's modules, so its order in another stage is unknown",
                found=", ".join(group.parameters[:8]),
                advice="keep the source's stages",
            )
    return sorted(names, key=lambda name: stages.order(name, stage))


def _experts_in_order(names: Sequence[str], degree: int, stages: Stages, stage: int) -> list[str]:
    """Return the experts that a stage has, expert rank by expert rank, each in the order of the stage's modules."""
    layers = by_key((expert_layer_of(name), name) for name in names)
    shares = {layer: len(its) // degree for layer, its in layers.items()}  # experts of a layer follow their ranks
    return [
        name
        for rank in range(degree)
        for layer in sorted(layers, key=lambda layer: stages.order(layer, stage))
        for name in layers[layer][rank * shares[layer] : (rank + 1) * shares[layer]]
    ]
