"""Which stage of the target has which layers of a pipeline, from what the files and the options say.

The files do not say how many layers there are: a function has no file, and a tied layer that is used by a function has
none where it is used again; its state is in each stage that uses it. So all that could be is tried, and only what all
of it agrees on is taken: the training's own stages have to be those that `partition_method` gave it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.formats.deepspeed.gpt_model import layers_told
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import Origin, RankState
from zckpt.formats.deepspeed.pipeline import TIED, layer_names
from zckpt.formats.deepspeed.stage_bounds import (
    METHODS,
    PARAMETERS,
    TYPE,
    UNIFORM,
    Layer,
    Numbers,
    balanced,
    of_type,
    parse_bounds,
    parse_layers,
    uniform,
)

UNSEEN = 3
"""So many layers more than the files tell of are thought of at the end: a head and what follows it."""

MOST_CASES = 512
"""With more ways in which tied layers could be used than this, a user has to say it."""

SAY_IT = "say how the training deals them: --partition-method, --stage-bounds, --pipeline-layers"


Weights = Mapping[int | str, int]
"""Trained elements of each layer, and of each tied one by its key."""


@dataclass(frozen=True, slots=True)
class Stages:
    """How the layers are dealt.

    Parameters
    ----------
    bounds : tuple of int
        Stage s has the layers from bounds[s] to before bounds[s + 1].
    uses : mapping of str to tuple of int
        The layers that use each tied one, by its key.
    untold : tuple of str
        What is to be said of param groups whose order no stage of the source shows.
    """

    bounds: Numbers
    uses: Mapping[str, Numbers]
    untold: tuple[str, ...] = ()

    def of(self, name: str) -> list[int]:
        """Return the stages that have a parameter or buffer."""
        layers = self.uses.get(key, ()) if (key := tied_key(name)) is not None else (layer_of(name),)
        pairs = enumerate(itertools.pairwise(self.bounds))
        return [stage for stage, (low, high) in pairs if any(low <= layer < high for layer in layers)]

    def order(self, name: str, stage: int) -> tuple[int, int]:
        """Return where a layer is among the modules of a stage, which begin with the tied ones."""
        key = tied_key(name)
        if key is None:
            return 1, layer_of(name)
        return 0, min((layer for layer in self.uses.get(key, ()) if layer >= self.bounds[stage]), default=0)


def tied_key(name: str) -> str | None:
    """Return the key of a tied layer that a parameter is of; None if it is of no such layer."""
    return name.removeprefix(TIED).partition(".")[0] if name.startswith(TIED) else None


def layer_of(name: str) -> int:
    """Return the number of the layer that a parameter is of.

    Raises
    ------
    LayoutError
        It is of none.
    """
    number = name.partition(".")[0]
    if not number.isdecimal() or len(number) > 6:
        raise LayoutError(f"{name} is in no layer of the pipeline", expected="NUMBER.NAME or tied_modules.KEY.NAME")
    return int(number)


@dataclass(slots=True)
class _Evidence:
    """What the files tell of the layers.

    Parameters
    ----------
    stage : dict of int to int
        The stage of each layer of which that is known.
    filed : set of int
        Layers that have a file.
    first_use : dict of str to list of int
        The layers whose files have a tied layer, by key.
    tied : dict of str to list of int
        The stages that have its state.
    weights : dict of int or str to int
        Trained elements of each layer in the source, and of each tied one by its key.
    """

    stages: int
    path: str
    stage: dict[int, int] = field(default_factory=dict)
    filed: set[int] = field(default_factory=set)
    first_use: dict[str, list[int]] = field(default_factory=dict)
    tied: dict[str, list[int]] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)

    @property
    def least(self) -> int:
        """The least number of layers that there are."""
        return max((*self.filed, *self.stage), default=-1) + 1

    def fits(self, stages: Stages) -> bool:
        """Tell whether the source's stages can have been these."""
        bounds = stages.bounds
        held = all(bounds[stage] <= layer < bounds[stage + 1] for layer, stage in self.stage.items())
        return held and all(stages.of(f"{TIED}{key}.") == its for key, its in self.tied.items())

    def cases(self, layers: int) -> Iterator[dict[str, Numbers]]:
        """Yield the ways in which that many layers may use the tied ones.

        Each stage that has a tied layer and no file of it has one layer that uses it.
        """
        choices: list[list[int]] = []
        owners: list[str] = []
        for key, stage in ((key, stage) for key, its in self.tied.items() for stage in its):
            low = max((layer for layer, its in self.stage.items() if its < stage), default=-1) + 1
            high = min((layer for layer, its in self.stage.items() if its > stage), default=layers)
            if not any(low <= layer < high for layer in self.first_use.get(key, ())):
                choices.append([layer for layer in range(low, high) if layer not in self.filed])
                owners.append(key)
        if math.prod(map(len, choices)) > MOST_CASES:
            raise _unsure("too many layers may use the tied ones")
        for picked in itertools.product(*choices):
            if len(set(picked)) == len(picked):
                uses = {key: set(self.first_use.get(key, ())) for key in self.tied}
                for key, layer in zip(owners, picked, strict=True):
                    uses[key].add(layer)
                yield {key: tuple(sorted(its)) for key, its in uses.items()}


def _unsure(found: str) -> UnsupportedError:
    return UnsupportedError(
        "the files do not say how a pipeline's layers are dealt to that many stages",
        found=found, advice=SAY_IT,
    )  # fmt: skip


def stages_of(
    origin: Origin, source: Sequence[RankState], target: Sequence[RankState], options: RecutOptions, path: str
) -> Stages | None:
    """Return how the target's stages have the layers; None if each stage keeps what it has.

    Parameters
    ----------
    source, target : sequence of RankState
        Of each stage of the source the state of one tensor-parallel rank, as the source and as the target slices it.

    Raises
    ------
    UsageError
        Options that cannot be, or contradict the files.
    UnsupportedError
        Neither files nor options say it.
    """
    count = len(source) if options.pipeline_parallel_size is None else options.pipeline_parallel_size
    given = options.partition_method, options.stage_bounds, options.pipeline_layers
    _check(options, count)
    bounds = None if options.stage_bounds is None else parse_bounds(options.stage_bounds)
    if bounds is not None and len(bounds) - 1 != count:
        if options.pipeline_parallel_size is not None:
            raise UsageError("bounds of another number of stages", expected=f"{count + 1} numbers", found=len(bounds))
        count = len(bounds) - 1
    if count == len(source) and given == (None, None, None):
        return None
    seen = _evidence(origin, source, path)
    if count == 1 and bounds is None:
        if len(seen.tied) > 1 and seen.tied.keys() != seen.first_use.keys():
            raise _unsure("several tied layers without files, in an order that is not known")
        return Stages((0, max(seen.least, 1)), {key: tuple(seen.first_use.get(key, (0,))) for key in seen.tied})
    layers, method = _layers(origin, source, seen, options)
    if bounds is not None and bounds[-1] < seen.least:
        raise UsageError(
            "bounds of too few layers", path=path, expected=f"at least {seen.least} last", found=bounds[-1]
        )
    after = _weights(target)

    def dealt(number: int, uses: dict[str, Numbers]) -> Iterator[Stages]:
        """Yield the target's stages if so many layers use the tied ones so: by what is given, or as the source's."""
        if bounds is not None:
            if bounds[-1] != number:
                raise UsageError("bounds of another number of layers", expected=f"{number} last", found=bounds[-1])
            yield Stages(bounds, uses)
            return
        for one in (UNIFORM, PARAMETERS) if method is None else (method,):
            was = _by_method(one, number, uses, layers, seen.stages, seen.weights)
            if seen.fits(was) or (layers is not None and method is not None):
                yield _by_method(one, number, uses, layers, count, after)

    names = [f"{layer}." for layer in sorted(seen.filed | seen.stage.keys())]
    names += [f"{TIED}{key}." for key in sorted(seen.tied)]
    found: dict[object, Stages] = {}
    unseen = range(seen.least, seen.least + UNSEEN + 1)
    for number in [len(layers)] if layers is not None else unseen if bounds is None else [bounds[-1]]:
        for uses in seen.cases(number) if layers is None else [_uses(layers)]:
            for one in dealt(number, uses):
                found.setdefault((len(one.bounds), *(tuple(one.of(name)) for name in names)), one)
    once = [key for key in seen.tied if any(len(one.uses.get(key, ())) < 2 for one in found.values())]
    if layers is None and count > 1 and once:
        raise _unsure(f"tied layer {once[0]}, of which one use is known")
    if len(found) != 1:
        several = " or ".join(sorted(_shown(one) for one in found.values())[:4])
        methods = method or f"{UNIFORM} or {PARAMETERS}"
        raise _unsure(several or f"stages that are not by {methods}")
    (one,) = found.values()
    if not origin.is_plain:
        _check_trained(one, seen)
    return one


def _check(options: RecutOptions, count: int) -> None:
    method = options.partition_method
    if count < 1:
        raise UsageError("unusable pipeline-parallel size", expected="at least 1", found=count)
    if method is not None and method.lower() not in (UNIFORM, PARAMETERS) and not method.lower().startswith(TYPE):
        raise UsageError("unknown partition method", expected=METHODS, found=method)
    if method is not None and options.stage_bounds is not None:
        raise UsageError("a partition method and the bounds that it would give", expected="one of both", found=method)


def _layers(
    origin: Origin, source: Sequence[RankState], seen: _Evidence, options: RecutOptions
) -> tuple[Sequence[Layer] | None, str | None]:
    """Return the layers and how they are dealt, as options say it or else the program's arguments.

    Those are Megatron-DeepSpeed's, where the source's stages are those that they give its models.
    """
    method = options.partition_method
    layers: Sequence[Layer] | None = None
    if options.pipeline_layers is not None:
        layers = parse_layers(options.pipeline_layers)
        _hold_against(layers, seen)
    else:
        names = [name for state in source for name in state.parameters]
        told = layers_told(origin.model.content, names, seen.first_use)
        if told is not None and len(told[0]) >= seen.least:
            uses = _uses(told[0])
            was = _by_method(told[1], len(told[0]), uses, told[0], seen.stages, seen.weights)
            if seen.fits(was):
                layers = told[0]
                method = told[1] if method is None and options.stage_bounds is None else method
    if method is not None and method.lower().startswith(TYPE) and layers is None:
        raise UsageError(
            "the files do not say of which type a layer is", expected="--pipeline-layers with it", found=method
        )
    return layers, method


def _evidence(origin: Origin, source: Sequence[RankState], path: str) -> _Evidence:
    seen = _Evidence(len(source), path, weights=_weights(source))
    for number, state in enumerate(source):
        for name in (*(name for group in state.groups for name in group.parameters), *state.buffers):
            key = tied_key(name)
            if key is None:
                seen.stage[layer_of(name)] = number
            elif number not in seen.tied.setdefault(key, []):
                seen.tied[key].append(number)
    models = [files.models[0] for files in origin.ranks[:: max(len(origin.ranks) // len(source), 1)]]
    if not origin.layers:  # with experts the stages' own files have the weights
        seen.filed.update(seen.stage)
    for shard, file in origin.layers:
        if (shard.mp_rank or 0) == 0 and shard.layer is not None:
            seen.filed.add(shard.layer)
            for key in {tied_key(name) for name in layer_names(shard, file, models).values()} - {None}:
                seen.first_use.setdefault(str(key), []).append(shard.layer)
    return seen


def _weights(states: Sequence[RankState]) -> Weights:
    found: Counter[int | str] = Counter()
    for number, state in enumerate(states):
        own = [name for group in state.groups for name in group.parameters]
        for name in own:
            key = tied_key(name)
            if key is None or not any(name in g.parameters for before in states[:number] for g in before.groups):
                found[layer_of(name) if key is None else key] += state.parameters[name].numel
    return found


def _hold_against(layers: Sequence[Layer], seen: _Evidence) -> None:
    """Raise where a list of layers is not that of the files."""
    uses = _uses(layers)
    problems: list[tuple[str, object]] = []
    if len(layers) < seen.least:
        problems.append((f"at least {seen.least} layers", len(layers)))
    elif not seen.tied.keys() <= uses.keys():
        problems.append((f"tied layers {', '.join(sorted(seen.tied))}", ", ".join(sorted(uses)) or "none"))
    else:
        for key, numbers in seen.first_use.items():
            if not set(numbers) <= set(uses.get(key, ())):
                problems.append((f"{key} in layer {min(numbers)}", ", ".join(map(str, uses.get(key, ())))))
        for layer in sorted(layer for its in uses.values() for layer in its if layer in seen.weights):
            own = f"{layers[layer].kind}={layers[layer].tied}"
            problems.append((f"layer {layer} with parameters of its own", own))
    if problems:
        raise UsageError("--pipeline-layers is not the list of the checkpoint's layers", path=seen.path,
                         expected=problems[0][0], found=problems[0][1])  # fmt: skip


def _uses(layers: Sequence[Layer]) -> dict[str, Numbers]:
    found: dict[str, Numbers] = {}
    for number, layer in enumerate(layers):
        if layer.tied is not None:
            found[layer.tied] = (*found.get(layer.tied, ()), number)
    return found


def _by_method(
    method: str,
    number: int,
    uses: Mapping[str, Numbers],
    layers: Sequence[Layer] | None,
    count: int,
    weights: Weights,
) -> Stages:
    if method.lower() == UNIFORM:
        return Stages(uniform(number, count), uses)
    if method.lower() == PARAMETERS:
        tied = {layer: weights.get(key, 0) for key, numbers in uses.items() for layer in numbers}
        each = [weights.get(layer, 0) + tied.get(layer, 0) for layer in range(number)]
        return Stages(balanced(each, count), uses)
    return Stages(of_type(layers or [], method[len(TYPE) :], count), uses)


def _shown(stages: Stages) -> str:
    """Return the bounds of stages and what uses tied layers, as a message has them."""
    bounds = ",".join(map(str, stages.bounds))
    uses = [f"{key} in layers {' and '.join(map(str, numbers))}" for key, numbers in sorted(stages.uses.items())]
    return f"{bounds} with {', '.join(uses)}" if uses else bounds


def _check_trained(stages: Stages, seen: _Evidence) -> None:
    """Raise where a stage would have nothing to train: the optimizers of ZeRO and of 16 bits raise there."""
    names = [f"{TIED}{layer}." if isinstance(layer, str) else f"{layer}." for layer in seen.weights]
    trained = {stage for name in names for stage in stages.of(name)}
    empty = sorted(set(range(len(stages.bounds) - 1)) - trained)
    if empty:
        raise UsageError(
            f"stage {empty[0]} would have nothing to train, and DeepSpeed's optimizers of ZeRO and 16 bits raise there",
            expected="parameters in each stage", found=_shown(stages),
        )  # fmt: skip
