"""How a pipeline's layers are dealt to stages: by DeepSpeed's rules, and of a target by what files and options say.

    layers    0 Embedding=embed   1 Block   2 relu   3 FeedForward   4 LayerNorm   5 Embedding=embed
    bounds    (0, 3, 6): stage s has the layers from bounds[s] to before bounds[s + 1]

The files do not say how many layers there are: a function has no file, and a tied layer that is used by a function has
none where it is used again; its state is in each stage that uses it. So all that could be is tried, and only what all
of it agrees on is taken: the training's own stages have to be those that `partition_method` gave it.

Source: `PipelineModule._partition_layers`, `partition_uniform`, `partition_balanced`; DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.deepspeed.axes.gpt_model import arguments_in, is_gpt
from zckpt.formats.deepspeed.axes.pipeline import TIED, layer_names, layer_of, tied_key
from zckpt.formats.deepspeed.options import RecutOptions
from zckpt.formats.deepspeed.origin import Origin, Rank
from zckpt.immutable import immutable, mutable
from zckpt.state import are_distinct, by_key
from zckpt.state.names import is_number

Numbers = tuple[int, ...]
"""The bounds of stages."""
UNIFORM = "uniform"
PARAMETERS = "parameters"
TYPE = "type:"

METHODS = f"{UNIFORM}, {PARAMETERS} or {TYPE}REGEX"

MOST_LAYERS = 4096
"""A list of more layers than this is a slip; dealing them by weight takes the square of their number."""

UNSEEN = 3
"""So many layers more than the files tell of are thought of at the end: a head and what follows it."""

MOST_CASES = 512
"""With more ways in which tied layers could be used than this, a user has to say it."""

Weights = Mapping[int | str, int]
"""Trained elements of each layer, and of each tied one by its key."""


class Layer(NamedTuple):
    """A layer as the training's `PipelineModule` gets it."""

    kind: str  # name of its class or function
    tied: str | None = None  # the key of a `TiedLayerSpec`


@immutable
class Stages:
    """How the layers are dealt."""

    bounds: Numbers  # stage s has the layers from bounds[s] to before bounds[s + 1]
    uses: Mapping[str, Sequence[int]]  # the layers that use each tied one, by its key
    untold: tuple[str, ...] = ()  # what is to be said of param groups whose order no stage of the source shows

    def __str__(self) -> str:
        """Return the bounds of stages and what uses tied layers, as a message has them."""
        bounds = ",".join(map(str, self.bounds))
        uses = [f"{key} in layers {' and '.join(map(str, numbers))}" for key, numbers in sorted(self.uses.items())]
        return f"{bounds} with {', '.join(uses)}" if uses else bounds

    def of(self, name: str) -> list[int]:
        """Return the stages that have a parameter or buffer."""
        layers = self.uses.get(key, ()) if (key := tied_key(name)) is not None else (layer_of(name),)
        return sorted({bisect_right(self.bounds, layer) - 1 for layer in layers if layer < self.bounds[-1]})

    def order(self, name: str, stage: int) -> tuple[int, int]:
        """Return where a layer is among the modules of a stage, which begin with the tied ones."""
        key = tied_key(name)
        if key is None:
            return 1, layer_of(name)
        return 0, min((layer for layer in self.uses.get(key, ()) if layer >= self.bounds[stage]), default=0)


def uniform(layers: int, stages: int) -> Numbers:
    """Return the bounds of stages that have the same number of layers, the first ones one more where it must be."""
    each, more = divmod(layers, stages)
    return tuple(stage * each + min(stage, more) for stage in range(stages + 1))


def balanced(weights: Sequence[int], stages: int) -> Numbers:
    """Return the bounds of stages of which the heaviest is least heavier than the lightest, given each layer's weight.

    Of equal ones that with the latest bounds, from the last stage on: the first stages get the layers of no weight.
    """
    layers = len(weights)
    if layers <= stages:
        return uniform(layers, stages)
    before = [0, *itertools.accumulate(weights)]
    # heaviest and lightest stage of the best way to deal the first i layers to some stages; one stage to begin with
    best = [(total, total) for total in before]
    bounds = [[0] * (layers + 1)]
    for stage in range(2, stages + 1):
        following, chosen = list(best), [0] * (layers + 1)
        for end in range(stage, layers + 1):
            ways = []
            for start in range(stage - 1, end):
                own = before[end] - before[start]
                heaviest, lightest = max(best[start][0], own), min(best[start][1], own)
                ways.append((heaviest - lightest, -start, (heaviest, lightest)))
            _, latest, following[end] = min(ways)
            chosen[end] = -latest
        best = following
        bounds.append(chosen)
    found = [layers]
    for chosen in reversed(bounds):
        found.append(chosen[found[-1]])
    return tuple(reversed(found))


def parse_layers(text: str | None) -> list[Layer]:
    """Return the layers that a text lists: `Embedding=embed,Block*24,relu,LayerNorm,Embedding=embed`; of None, none.

    Raises UsageError: it is not such a list.
    """
    found: list[Layer] = []
    for item in () if text is None else text.split(","):
        match = re.fullmatch(r"\s*([^=*]+?)\s*(?:=\s*([^=*]+?)\s*)?(?:\*\s*(\d{1,4})\s*)?", item)
        times = int(match[3] or 1) if match else 0
        if match is None or not times or len(found) + times > MOST_LAYERS:
            raise UsageError(
                "unusable list of pipeline layers",
                expected="Embedding=KEY,Block*24,LayerNorm,... as PipelineModule gets them, with the KEY of a "
                "TiedLayerSpec",
                found=item.strip()[:80],
            )
        found += [Layer(match[1], match[2])] * times
    return found


def uses_of(layers: Iterable[Layer]) -> dict[str, list[int]]:
    """Return which layers use each tied one, by its key."""
    return by_key((layer.tied, number) for number, layer in enumerate(layers) if layer.tied is not None)


def _dealt(method: str | Numbers, layers: Sequence[Layer], count: int, weights: Weights) -> Stages:
    """Return the stages that a method makes of layers, or bounds.

    Raises UsageError: it names layers of a type and is no regular expression, or matches none of them.
    """
    uses = uses_of(layers)
    if not isinstance(method, str):
        return Stages(method, uses)
    if method.lower() == UNIFORM:
        return Stages(uniform(len(layers), count), uses)
    if method.lower() == PARAMETERS:
        tied = [weights.get(layer.tied, 0) if layer.tied is not None else 0 for layer in layers]
        return Stages(balanced([weights.get(number, 0) + its for number, its in enumerate(tied)], count), uses)
    pattern = method[len(TYPE) :]
    try:
        found = re.compile(pattern.lower().split(":")[0], re.IGNORECASE)  # as DeepSpeed does
    except re.error as error:
        raise UsageError("unusable layer type", expected="a regular expression", found=str(error)) from error
    of_type = [int(found.search(layer.kind) is not None) for layer in layers]
    if not any(of_type):
        kinds = dict.fromkeys(layer.kind for layer in layers)
        raise UsageError("no layer has that type", expected=", ".join(kinds), found=pattern)
    return Stages(balanced(of_type, count), uses)


@mutable
class _Evidence:
    """What the files tell of the layers."""

    stages: int
    weights: Weights  # trained elements of each layer in the source, and of each tied one by its key
    stage: dict[int, int] = field(default_factory=dict)  # the stage of each layer of which that is known
    filed: set[int] = field(default_factory=set)  # layers that have a file
    first_use: dict[str, list[int]] = field(default_factory=dict)  # the layers whose files have a tied layer, by key
    tied: dict[str, list[int]] = field(default_factory=dict)  # the stages that have its state

    @property
    def least(self) -> int:
        """The least number of layers that there are."""
        return max((*self.filed, *self.stage), default=-1) + 1

    def fits(self, method: str | Numbers, layers: Sequence[Layer]) -> bool:
        """Tell whether a method deals layers as the source has them."""
        was = _dealt(method, layers, self.stages, self.weights)
        held = all(was.bounds[stage] <= layer < was.bounds[stage + 1] for layer, stage in self.stage.items())
        return held and all(was.of(f"{TIED}{key}.") == its for key, its in self.tied.items())

    def cases(self, count: int, options: RecutOptions) -> Iterator[list[Layer]]:
        """Yield what that many layers may be: the ways in which they may use the tied ones.

        Each stage that has a tied layer and no file of it has one layer that uses it.
        """
        choices: list[list[int]] = []
        owners: list[str] = []
        for key, stages in self.tied.items():
            for stage in stages:
                low = max((layer for layer, its in self.stage.items() if its < stage), default=-1) + 1
                high = min((layer for layer, its in self.stage.items() if its > stage), default=count)
                if not any(low <= layer < high for layer in self.first_use.get(key, ())):
                    choices.append([layer for layer in range(low, high) if layer not in self.filed])
                    owners.append(key)
        if math.prod(map(len, choices)) > MOST_CASES:
            raise _unsure("too many layers may use the tied ones", options)
        known = {layer: key for key in self.tied for layer in self.first_use.get(key, ())}
        for picked in itertools.product(*choices):
            if are_distinct(picked):
                tied = known | dict(zip(picked, owners, strict=True))
                yield [Layer("", tied.get(number)) for number in range(count)]


def _unsure(found: str, options: RecutOptions) -> UnsupportedError:
    """Return the error that asks for what options do not say."""
    asked = [("--partition-method or --stage-bounds", options.partition_method or options.stage_bounds),
             ("--pipeline-layers", options.pipeline_layers)]  # fmt: skip
    return UnsupportedError(
        "the files do not say how to distribute the pipeline's layers over that many stages",
        found=found, advice=f"say how the training does: {' and '.join(flag for flag, said in asked if not said)}",
    )  # fmt: skip


def stages_of(
    origin: Origin, source: Sequence[Rank], target: Sequence[Rank], options: RecutOptions, path: str
) -> Stages | None:
    """Return how the target's stages have the layers; None if each stage keeps what it has.

    `source`, `target`: of each stage of the source the state of one tensor-parallel rank, as the source and as the
    target slices it. Raises UsageError: options that cannot be, or contradict the files; UnsupportedError: neither
    files nor options say it.
    """
    count, bounds = _asked(options, len(source))
    if count == len(source) and (options.partition_method, bounds, options.pipeline_layers) == (None, None, None):
        return None
    seen = _evidence(origin, source)
    if count == 1 and bounds is None:
        if len(seen.tied) > 1 and seen.tied.keys() != seen.first_use.keys():
            raise _unsure("several tied layers without files, in an order that is not known", options)
        return Stages((0, max(seen.least, 1)), {key: seen.first_use.get(key, [0]) for key in seen.tied})
    layers, method = _layers(origin, source, seen, options, path)
    if bounds is not None and bounds[-1] < seen.least:
        raise UsageError(
            "stage bounds for too few layers",
            path=path,
            expected=f"at least {seen.least} as the last number",
            found=bounds[-1],
        )
    if bounds is not None and layers is not None and bounds[-1] != len(layers):
        raise UsageError(
            "stage bounds for another number of layers", expected=f"{len(layers)} as the last number", found=bounds[-1]
        )
    weights, names = _weights(target), [f"{layer}." for layer in seen.filed | seen.stage.keys()]
    names += [f"{TIED}{key}." for key in seen.tied]
    way = method if bounds is None else bounds
    is_said = bounds is not None or (layers is not None and method is not None)
    counts = range(seen.least, seen.least + UNSEEN + 1) if bounds is None else [bounds[-1]]
    found: dict[object, Stages] = {}
    for case in (one for number in counts for one in seen.cases(number, options)) if layers is None else [layers]:
        for one in (UNIFORM, PARAMETERS) if way is None else [way]:
            if is_said or seen.fits(one, case):
                dealt = _dealt(one, case, count, weights)
                found.setdefault(tuple(tuple(dealt.of(name)) for name in names), dealt)
    once = [key for key in seen.tied if any(len(one.uses.get(key, ())) < 2 for one in found.values())]
    if layers is None and count > 1 and once:
        raise _unsure(f"tied layer {once[0]}, with one known use", options)
    if len(found) != 1:
        several = " or ".join(sorted(map(str, found.values()))[:4])
        raise _unsure(several or f"stages that are not by {method or f'{UNIFORM} or {PARAMETERS}'}", options)
    (stages,) = found.values()
    trained = (f"{TIED}{layer}." if isinstance(layer, str) else f"{layer}." for layer in seen.weights)
    empty = sorted(set(range(len(stages.bounds) - 1)).difference(*map(stages.of, trained)))
    # Torch's optimizer steps by itself, in float32 and without ZeRO: it may have nothing in a stage.
    is_plain = not origin.members and all("param_groups" in (one.model.optimizer or {}) for one in origin.ranks)
    if empty and not is_plain:
        raise UsageError(
            f"stage {empty[0]} would have nothing to train, and DeepSpeed's ZeRO and 16-bit optimizers then raise",
            expected="parameters in each stage", found=str(stages),
        )  # fmt: skip
    return stages


def _asked(options: RecutOptions, stages: int) -> tuple[int, Numbers | None]:
    """Return how many stages options ask for, and their bounds."""
    method, text = options.partition_method, options.stage_bounds
    count = stages if options.pipeline_parallel_size is None else options.pipeline_parallel_size
    if count < 1:
        raise UsageError("unusable --pipeline-parallel-size", expected="at least 1", found=count)
    if method is not None and method.lower() not in (UNIFORM, PARAMETERS) and not method.lower().startswith(TYPE):
        raise UsageError("unknown partition method", expected=METHODS, found=method)
    if method is not None and text is not None:
        raise UsageError("a partition method and stage bounds exclude each other", expected="one of them", found=method)
    if text is None:
        return count, None
    items = [item.strip() for item in text.split(",")]
    bounds = tuple(int(item) for item in items if re.fullmatch(r"\d{1,4}", item))
    rising = all(low < high for low, high in itertools.pairwise(bounds))
    if len(bounds) != len(items) or len(bounds) < 2 or bounds[0] != 0 or not rising:
        raise UsageError(
            "unusable stage bounds", expected="0, the first layer of each further stage, then the number of layers",
            found=text[:80],
        )  # fmt: skip
    if len(bounds) - 1 != count and options.pipeline_parallel_size is not None:
        raise UsageError(
            "stage bounds for another number of stages", expected=f"{count + 1} numbers", found=len(bounds)
        )
    return len(bounds) - 1, bounds


def _layers(
    origin: Origin, source: Sequence[Rank], seen: _Evidence, options: RecutOptions, path: str
) -> tuple[list[Layer] | None, str | None]:
    """Return the layers and how they are dealt, as options say it or else the program's arguments."""
    method = options.partition_method
    layers = parse_layers(options.pipeline_layers) or None
    if layers is not None:
        for expected, found in _misfits(layers, seen):
            raise UsageError("--pipeline-layers does not match the checkpoint's layers", path=path,
                             expected=expected, found=found)  # fmt: skip
    else:
        names = [name for state in source for name in state.parameters]
        told = _layers_told(origin.model.content, names, seen.first_use)
        if told is not None and len(told[0]) >= seen.least and seen.fits(told[1], told[0]):
            layers, of_program = told
            method = of_program if method is None and options.stage_bounds is None else method
    if method is not None and method.lower().startswith(TYPE) and layers is None:
        raise UsageError(
            "the files do not say which type a layer has", expected="--pipeline-layers as well", found=method
        )
    return layers, method


def _evidence(origin: Origin, source: Sequence[Rank]) -> _Evidence:
    seen = _Evidence(len(source), _weights(source))
    for number, state in enumerate(source):
        for name in (*state.grouped, *state.buffers):
            key = tied_key(name)
            if key is None:
                seen.stage[layer_of(name)] = number
            elif number not in seen.tied.setdefault(key, []):
                seen.tied[key].append(number)
    models = [files.model for files in origin.ranks[:: max(len(origin.ranks) // len(source), 1)]]
    if not origin.layers:  # with experts the stages' own files have the weights
        seen.filed.update(seen.stage)
    for shard, file in origin.layers:
        if (shard.mp_rank or 0) == 0 and shard.layer is not None:
            seen.filed.add(shard.layer)
            for key in {tied_key(name) for name in layer_names(shard, file, models).values()} - {None}:
                seen.first_use.setdefault(str(key), []).append(shard.layer)
    return seen


def _weights(states: Sequence[Rank]) -> Weights:
    numels = {name: state.parameters[name].numel for state in reversed(states) for name in state.grouped}
    found: Counter[int | str] = Counter()
    for name, numel in numels.items():  # of a tied layer the first stage's
        key = tied_key(name)
        found[layer_of(name) if key is None else key] += numel
    return found


def _misfits(layers: Sequence[Layer], seen: _Evidence) -> Iterator[tuple[str, object]]:
    """Yield in what a list of layers is not that of the files: what it should have, and what it has."""
    uses = uses_of(layers)
    if len(layers) < seen.least:
        yield f"at least {seen.least} layers", len(layers)
    if not seen.tied.keys() <= uses.keys():
        yield f"tied layers {', '.join(sorted(seen.tied))}", ", ".join(sorted(uses)) or "none"
    for key, numbers in seen.first_use.items():
        if not set(numbers) <= set(uses.get(key, ())):
            yield f"{key} in layer {min(numbers)}", ", ".join(map(str, uses.get(key, ())))
    for layer in sorted(layer for its in uses.values() for layer in its if layer in seen.weights):
        yield f"layer {layer} with its own parameters", f"{layers[layer].kind}={layers[layer].tied}"


_BLOCK = "ParallelTransformerLayerPipe"


def _layers_told(
    content: Mapping[str, object], names: Sequence[str], first_use: Mapping[str, Sequence[int]]
) -> tuple[list[Layer], str] | None:
    """Return the layers of a pipeline of Megatron-DeepSpeed's models, and how it deals them; None where not known.

    `content`: of a model file; `names`: of the parameters of all stages; `first_use`: the layers whose files have a
    tied layer, by its key.
    """
    arguments = arguments_in(content)
    if arguments is None or not is_gpt(names):
        return None
    of: dict[int, str] = {}
    for name in names:
        number, _, rest = name.partition(".")
        if is_number(number):
            if ".self_attention." in name:
                of[int(number)] = _BLOCK
            of.setdefault(int(number), rest)
    blocks = sorted(number for number, kind in of.items() if kind == _BLOCK)
    norms = [number for number, kind in of.items() if kind in ("weight", "bias")]
    tied = any(name.startswith(f"{TIED}embed.") for name in names)
    embeds = first_use.get("embed", ()) if tied else [n for n, kind in of.items() if "_embeddings" in kind]
    heads = [number for number, kind in of.items() if kind == "lm_head.weight"]
    if not blocks or len(embeds) != 1 or len(norms) != 1 or (not tied and heads != [norms[0] + 1]):
        return None
    low, high = blocks[0], blocks[-1] + 1
    if blocks != list(range(low, high)) or not embeds[0] < low < high <= norms[0]:
        return None
    embed = Layer("EmbeddingPipe", "embed" if tied else None)
    layers = [*[Layer("function")] * norms[0], Layer("LayerNorm"), embed if tied else Layer("LMHeadPipe")]
    layers[embeds[0]] = embed
    layers[low:high] = [Layer(_BLOCK)] * len(blocks)
    if arguments.get("fp16") is True or arguments.get("bf16") is True:
        layers.append(Layer("function"))
    method = arguments.get("pp_partition_method")
    return layers, method if isinstance(method, str) else "type:transformer"
