"""The optimizers of model-parallel ranks without ZeRO: which parameters each of them numbers.

Tensor-parallel ranks number their slices alike. Of a pipeline, the layers have to be found that a stage has:
A stage's model file has its optimizer and the names of its buffers, and nothing else says what the stage has: the
layers' files do not name their stage. A tied layer has one file, and every stage that uses it has state of its own of
it, under a number of its own. So the names are deduced over all layers, as those of any numbered optimizer are.

Experts without ZeRO in several model-parallel ranks: each has optimizer files of its own.

A rank's optimizers number the parameters of its stage and its slices, dense ones and those of its experts, as those of
a checkpoint of one rank do. See `experts`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.evidence import NAMES_ADVICE, NAMES_BY_STAGE_ADVICE
from zckpt.formats.deepspeed.expert_optimizers import attach_experts
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.pipeline import TIED, layer_of, tied_key, within
from zckpt.formats.deepspeed.shards import Files
from zckpt.formats.deepspeed.stage0 import Numbered, attach_optimizer, has_all_names
from zckpt.formats.deepspeed.stages import MOST_LAYERS
from zckpt.formats.deepspeed.tp_rules import Rules
from zckpt.state import Checkpoint, Parameter


def attach_to_ranks(
    source: str,
    ranks: Sequence[Rank],
    rules: Rules | None,
    info: Mapping[str, object] | None,
    tp: int,
    names: Sequence[str] | None,
    *,
    layers: bool,
) -> list[str] | None:
    """Give each model-parallel rank the optimizer in its model file, before slices and stages are put together.

    Parameters
    ----------
    rules : Rules or None
        For the slices, made of `info`.
    tp : int
        Tensor-parallel ranks.
    names : sequence of str, optional
        From the user.
    layers : bool
        Whether it is a pipeline.

    Returns
    -------
    list of str or None
        Why none has an optimizer, empty where all have. None: there is one rank, and its checkpoint is to have it.

    Raises
    ------
    DamagedFileError, UsageError, UnsupportedError
        As the functions below.
    """
    if ranks[0].model.content.get("optimizer") is None:
        return None
    if layers and names is None:
        names = names_by_themselves(ranks, tp)
    # A vocabulary's padding is in the optimizer's state, too, and is to be taken off both.
    padded = rules is not None and any(map(rules.is_vocabulary, ranks[0].parameters))
    if len(ranks) == 1 and not padded and not (layers and names is not None):
        return None
    lost = [f"{one.model.path}: holds no optimizer, as those of other ranks do; none is read"
            for one in ranks if one.model.optimizer is None]  # fmt: skip
    if layers:
        names, keys = layer_numbers(names, ranks[0])
        reasons = lost[:1] or _attach_to_stages(source, ranks, tp, names)
        name_tied_layers(ranks, keys, info, tp)
    else:
        reasons = lost[:1] or _attach_to_slices(source, ranks, names)
    return None if reasons and len(ranks) == 1 else reasons


def names_by_themselves(ranks: Sequence[Rank], tp: int) -> list[str] | None:
    """Return the names that the optimizers of all stages have recorded, stage by stage, where they are of the files.

    They tell the keys of tied layers, too. Where which layer has a key is not known, none is taken.
    """
    recorded = [
        [] if _is_idle(files) else Numbered(held, files.model.file).recorded_names
        for files in ranks
        if (held := files.model.optimizer) is not None
    ]
    alike = len(recorded) == len(ranks) and all(
        names is not None and names == recorded[number // tp * tp] for number, names in enumerate(recorded)
    )
    found = [name for names in recorded[::tp] for name in names or ()]
    try:
        whole, _ = layer_numbers(found, ranks[0])
    except (UsageError, LayoutError):
        return None
    return found if alike and set(whole or ()) <= set(ranks[0].parameters) else None


def _is_idle(files: Rank) -> bool:
    """Tell whether a stage trains nothing: DeepSpeed takes groups without parameters from its optimizer."""
    held = files.model.optimizer
    return held is not None and held.get("param_groups") == []


def layer_numbers(names: Sequence[str] | None, files: Rank) -> tuple[Sequence[str] | None, dict[int, str]]:
    """Return names that a user gave with the number of its file's layer for each tied one, and those layers' keys."""
    rests: dict[str, set[str]] = {}
    for name in names or ():
        if name.startswith(TIED):
            rests.setdefault(tied_key(name) or "", set()).add(within(name))
    given = {layer_of(name) for name in names or () if not name.startswith(TIED)}
    held: dict[int, set[str]] = {}
    for name in files.parameters:
        held.setdefault(layer_of(name), set()).add(within(name))
    numbers: dict[str, int] = {}
    for key, its in rests.items():
        found = [layer for layer, has in held.items() if its <= has and layer not in given]
        if len(found) != 1:
            raise UsageError(
                f"which layer {TIED}{key} is in is not known",
                expected=f"one file of a layer with {', '.join(sorted(its))[:80]} whose names are not given otherwise",
                found=", ".join(map(str, found)) or "none",
            )
        numbers[key] = found[0]
    whole = [f"{numbers[tied_key(n) or '']}.{within(n)}" if n.startswith(TIED) else n
             for n in names or ()]  # fmt: skip
    return (None if names is None else whole), {layer: key for key, layer in numbers.items()}


def _own(source: str, parameters: Iterable[Parameter]) -> Checkpoint:
    """Return a checkpoint of one rank's parameters, which is given its optimizer."""
    one = Checkpoint(source, "deepspeed")
    one.parameters = {p.name: replace(p, slots=dict(p.slots), frozen=False) for p in parameters}
    return one


def _members(checkpoint: Checkpoint) -> list[list[str]]:
    return [group.parameters for group in checkpoint.param_groups]


def _attach_to_slices(source: str, ranks: Sequence[Rank], names: Sequence[str] | None) -> list[str]:
    """Give each tensor-parallel rank the optimizer in its model file, under the names of its slices.

    Every rank numbers its own slices, which are alike on all of them. Where the names on one rank are not certain,
    none of them gets an optimizer.
    """
    found = [_own(source, files.parameters.values()) for files in ranks]
    for files, one in zip(ranks, found, strict=True):
        attach_optimizer(one, files.model, names)
        if not has_all_names(one) or _members(one) != _members(found[0]):
            return [
                f"{files.model.path}: which slices the optimizer's parameters are is not certain; its state is "
                f"left out ({NAMES_ADVICE})"
            ]
    for files, one in zip(ranks, found, strict=True):
        files.parameters.update(one.parameters)
        files.param_groups[:] = one.param_groups
    return []


def _attach_to_stages(source: str, ranks: Sequence[Rank], tp: int, names: Sequence[str] | None) -> list[str]:
    """Give each model-parallel rank of a pipeline the optimizer in its model file, and the parameters of its stage."""
    given = names_by_stage(names, ranks[::tp], source)
    every = [ranks[number % tp].parameters for number in range(len(ranks))]

    def attached(allowed: Sequence[Collection[str]]) -> list[Checkpoint]:
        found = []
        for number, files in enumerate(ranks):
            found.append(_own(source, [p for name, p in every[number].items() if name in allowed[number]]))
            attach_optimizer(found[-1], files.model, given[number // tp])
        return found

    found = attached(every)
    if names is None and any(one.unnamed for one in found):  # what is certain tells which layers the others can have
        found = attached(_between(found, every, tp))
    for number, one in enumerate(found):
        known = has_all_names(one) or _is_idle(ranks[number])
        alike = _members(one) == _members(found[number // tp * tp])
        if not known or not alike or not _follow(_members(one), found[number % tp : number : tp]):
            return [
                f"{ranks[number].model.path}: which layers' parameters the optimizer of stage {number // tp} "
                f"numbers is not certain; its state is not read, and `zckpt reshard` to the same stages copies it "
                f"({NAMES_BY_STAGE_ADVICE})"
            ]
    _deal(ranks, found, tp)
    return []


def _between(found: Sequence[Checkpoint], every: Sequence[Collection[str]], tp: int) -> list[set[str]]:
    """Return the parameters that each rank can have: of layers between those of other stages, or its own for certain.

    Layers are dealt in order.
    """
    certain = [{n for names in _members(one) for n in names if n in one.parameters} for one in found]
    own = [[layer_of(n) for n in names.difference(*certain[number % tp : number : tp])]
           for number, names in enumerate(certain)]  # fmt: skip
    allowed = []
    for number, names in enumerate(every):
        low = max((layer for layers in own[number % tp : number : tp] for layer in layers), default=-1)
        high = min((layer for layers in own[number + tp :: tp] for layer in layers), default=MOST_LAYERS)
        allowed.append({n for n in names if low < layer_of(n) < high} | certain[number])
    return allowed


def names_by_stage(names: Sequence[str] | None, stages: Sequence[Rank], source: str) -> list[Sequence[str] | None]:
    """Return the names that a user gave, for each stage as many as its optimizer has parameters."""
    if names is None:
        return [None] * len(stages)
    numels = {name: parameter.numel for name, parameter in stages[0].parameters.items()}
    found: list[Sequence[str] | None] = []
    at = 0
    for files in stages:
        held, left = files.model.optimizer, [numels.get(name, 0) for name in names[at:]]
        count = 0 if held is None else Numbered(held, files.model.file).count(left)
        found.append(names[at : at + count])
        at += count
    if at != len(names):
        raise UsageError(
            "unusable parameter names",
            path=source,
            expected=f"{' + '.join(str(len(one or ())) for one in found)} names, stage by stage",
            found=len(names),
        )
    return found


def _follow(groups: Sequence[Sequence[str]], before: Sequence[Checkpoint]) -> bool:
    """Tell whether a stage's layers follow those of the stages before it, but for layers that are tied to one of them.

    A stage's layers follow each other. Those that an earlier stage has, too, are tied.
    """
    known = {layer_of(name) for one in before for names in _members(one) for name in names}
    own = {layer_of(name) for names in groups for name in names} - known
    return not known or not own or min(own) > max(known)


def _deal(ranks: Sequence[Rank], found: Sequence[Checkpoint], tp: int) -> None:
    """Give each rank its parameters and groups; what no optimizer has goes to the stage of the layers around it."""
    owned = [{name for names in _members(one) for name in names} for one in found]
    for lane in range(tp):
        of_lane = range(lane, len(ranks), tp)
        firsts = [min(map(layer_of, owned[n] - set().union(*owned[lane:n:tp])), default=None) for n in of_lane]
        own: dict[int, dict[str, Parameter]] = {number: {} for number in of_lane}
        for name, parameter in ranks[lane].parameters.items():
            owner = parameter.tied_to or name
            its = [number for number in of_lane if owner in owned[number]]
            if not its:
                begun = [n for n, first in zip(of_lane, firsts, strict=True)
                         if first is not None and first <= layer_of(name)]  # fmt: skip
                its = begun[-1:] or [lane]
            for number in its:
                one = found[number].parameters.get(name, parameter)
                own[number][name] = replace(one, frozen=one.tied_to is None and name not in owned[number])
        for number, parameters in own.items():
            rank = ranks[number]
            rank.parameters, rank.param_groups = parameters, found[number].param_groups
            rank.tied = frozenset(n for n in owned[number] if sum(n in owned[other] for other in of_lane) > 1)


_TIED_KEY = re.compile(r"tied_modules\\*\.(\w+)")
"""A key of a tied layer, in a pattern."""


def name_tied_layers(
    ranks: Sequence[Rank], keys: Mapping[int, str], info: Mapping[str, object] | None, tp: int
) -> None:
    """Give tied layers the names that files of ZeRO have for them, where their keys are known."""
    mentioned = set() if info is None else set(_TIED_KEY.findall(json.dumps(info, default=str)))
    layers = {layer_of(name) for files in ranks for name in files.tied}
    if not keys and len(mentioned) == len(layers) == 1:
        keys = {layers.pop(): mentioned.pop()}
    if keys:
        named = with_tied_names(ranks, keys)
        for files, one in zip(ranks, named, strict=True):
            files.parameters, files.param_groups = one.parameters, one.param_groups
            files.tied = frozenset(name for name in one.parameters if name.startswith(TIED)) | files.tied
    elif mentioned and tp > 1:
        raise UnsupportedError(
            "which layer the rules mean by a tied one is not known, nor so how it is sliced",
            expected="one tied layer",
            found=f"rules for {', '.join(sorted(mentioned))}, and {len(layers)} layers that several stages train",
            advice=NAMES_BY_STAGE_ADVICE,
        )


def with_tied_names(ranks: Sequence[Rank], keys: Mapping[int, str]) -> list[Rank]:
    """Return the ranks of a pipeline with the names that files of ZeRO have for tied layers, and the shapes by group.

    Parameters
    ----------
    keys : mapping of int to str
        The key of a tied layer by its number. It is in no file of stage 0; the number stands for it.
    """
    tied = {name for files in ranks for name in files.tied}
    if keys:
        every = [name for files in ranks for name in files.parameters]
        tied |= {name for name in every if not name.startswith(TIED) and layer_of(name) in keys}
    tied = {name for name in tied if not name.startswith(TIED)}
    known = {name: f"{TIED}{keys.get(layer_of(name), layer_of(name))}.{name.partition('.')[2]}" for name in tied}
    found = []
    for files in ranks:
        parameters = {
            known.get(name, name): replace(p, name=known.get(name, name), tied_to=known.get(p.tied_to or "", p.tied_to))
            for name, p in files.parameters.items()
        }
        groups = [replace(g, parameters=[known.get(n, n) for n in g.parameters]) for g in files.param_groups]
        shapes = [{name: parameters[name].shape for name in group.parameters} for group in groups]
        frozen = {name: p.shape for name, p in parameters.items() if p.group is None}
        models = [replace(files.model, param_shapes=[*shapes, frozen])]
        found.append(replace(files, model_files=models, parameters=parameters, param_groups=groups))
    return found


def attach_experts_to_ranks(
    source: str, ranks: Sequence[Rank], files: Files, tp: int, names: Sequence[str] | None
) -> list[str]:
    """Give each model-parallel rank the optimizers of its expert ranks, before slices and stages are put together.

    Parameters
    ----------
    files : sequence of (Shard, TorchFile)
        By model-parallel rank, and then by expert rank.
    tp : int
        Tensor-parallel ranks.
    names : sequence of str, optional
        Stage by stage, those of a rank's parameters in its optimizer's order, experts under their local numbers.

    Returns
    -------
    list of str
        Why none has an optimizer; empty where all have.

    Raises
    ------
    ShardError, UnsupportedError
        As `attach_experts`.
    """
    if any(one.lanes > 1 for one in ranks):
        return ["without ZeRO, the experts of several tensor-parallel ranks are numbered by each rank's own; the "
                "optimizer's state is left out"]  # fmt: skip
    given = names_by_stage(names, ranks[::tp], source)
    found: list[Checkpoint] = []
    for number, one in enumerate(ranks):
        own = _own(source, one.parameters.values())
        its = [(shard, file) for shard, file in files if (shard.mp_rank or 0) == one.mp_rank]
        if not its:
            return [f"{source}: no optimizer files of experts of mp_rank {one.mp_rank}; none is read"]
        attach_experts(own, its, one.model, given[number // tp])
        if not has_all_names(own):
            return [
                f"{its[0][1].path}: which parameters the optimizer numbers is not certain; its state is left out "
                f"({NAMES_BY_STAGE_ADVICE})"
            ]
        found.append(own)
    for one, own in zip(ranks, found, strict=True):
        one.parameters, one.param_groups[:] = own.parameters, own.param_groups
        one.duplicates += own.duplicates
        one.topology = own.topology
        one.warnings += own.warnings
    return []
