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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.evidence import NAMES_ADVICE, NAMES_BY_STAGE_ADVICE
from zckpt.formats.deepspeed.axes.expert_optimizers import attach_experts
from zckpt.formats.deepspeed.axes.pipeline import TIED, layer_of, tied_key, within
from zckpt.formats.deepspeed.axes.stages import MOST_LAYERS
from zckpt.formats.deepspeed.layouts.stage0 import Numbered, attach_optimizer
from zckpt.formats.deepspeed.origin import Rank
from zckpt.formats.deepspeed.shards import Files
from zckpt.state import Checkpoint, GivenNames, Parameter, by_key
from zckpt.state.names import renamed


def attach_to_ranks(
    ranks: list[Rank],
    of_experts: Files,
    info: Mapping[str, object] | None,
    tp: int,
    names: GivenNames,
    *,
    layers: bool,
) -> list[str]:
    """Give each model-parallel rank its optimizer, before slices and stages are put together.

    Parameters
    ----------
    ranks : list of Rank
        Changed. Of several, all get an optimizer or none; one alone keeps under numbers what is not certain.
    of_experts : sequence of (Shard, TorchFile)
        The files of expert ranks' optimizers; without them the model files have the optimizers.
    info : mapping or None
        The rules for slices.
    tp : int
        Tensor-parallel ranks.
    names : sequence of str, optional
        From the user: stage by stage, those of a rank in its optimizer's order, experts under their local numbers.
    layers : bool
        Whether layers have files of their own, which do not tell their stage.

    Returns
    -------
    list of str
        Why none has an optimizer.

    Raises
    ------
    DamagedFileError, ShardError, UsageError, UnsupportedError
        As the functions below.
    """
    several, held = len(ranks) > 1, by_key((shard.mp_rank or 0, (shard, file)) for shard, file in of_experts)
    if not of_experts and ranks[0].model.content.get("optimizer") is None:
        return []
    for one in ranks:
        if several and one.lanes > 1:
            return ["without ZeRO, the experts of several tensor-parallel ranks are numbered by each rank's own; the "
                    "optimizer's state is left out"]  # fmt: skip
        if of_experts and one.mp_rank not in held:
            return [f"{one.source}: no optimizer files of experts of mp_rank {one.mp_rank}; none is read"]
        if several and not of_experts and one.model.optimizer is None:
            return [f"{one.model.path}: holds no optimizer, as those of other ranks do; none is read"]
    keys: dict[int, str] = {}
    if layers:
        names, keys = layer_numbers(names_by_themselves(ranks, tp) if names is None else names, ranks[0])
    given = _by_stage(names, ranks[::tp])
    every = [ranks[number % tp if layers else number].parameters for number in range(len(ranks))]

    def attached(allowed: Sequence[Collection[str]]) -> list[Rank]:
        found = []
        for number, rank in enumerate(ranks):
            own = {n: replace(p, slots=dict(p.slots)) for n, p in every[number].items() if n in allowed[number]}
            found.append(replace(rank, parameters=own, param_groups=[], warnings=[*rank.warnings], unnamed={},
                                 duplicates=[*rank.duplicates], optimizer_metadata={}))  # fmt: skip
            if of_experts:
                attach_experts(found[-1], held[rank.mp_rank], given[number // tp])
            else:
                attach_optimizer(found[-1], given[number // tp])
        return found

    found, reasons = attached(every), []
    if layers and names is None and any(one.unnamed for one in found):  # what is certain tells what others can have
        found = attached(_between(found, every, tp))
    for number, one in enumerate(found if several else ()):
        own = one.grouped
        known = (own and one.parameters.keys() >= set(own)) or _is_idle(one)
        groups, firsts = ([group.parameters for group in its.param_groups] for its in (one, found[number // tp * tp]))
        alike = groups == firsts
        if not (known and alike and (not layers or _follow(own, found[number % tp : number : tp]))):
            reasons = [
                f"{(held[one.mp_rank][0][1].path if of_experts else one.model.path)}: which parameters the "
                f"optimizer of {(f'stage {number // tp}' if len(ranks) > tp else f'mp_rank {number}')} numbers is "
                "uncertain; its state is not read, and `zckpt reshard` to the same stages and slices copies it "
                f"({(NAMES_BY_STAGE_ADVICE if len(ranks) > tp else NAMES_ADVICE)})"
            ]
            break
    else:
        if layers and len(ranks) > tp:
            _deal(found, every, tp)
        ranks[:] = found
    if layers:
        _name_tied_layers(ranks, keys, info, tp)
    return reasons


def names_by_themselves(ranks: Sequence[Rank], tp: int) -> list[str] | None:
    """Return the names that the optimizers of all stages have recorded, stage by stage, where they are of the files.

    They tell the keys of tied layers, too. Where which layer has a key is not known, none is taken.
    """
    recorded = [
        [] if _is_idle(files) else Numbered(files.model.file).recorded_names
        for files in ranks
        if files.model.optimizer is not None
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


def layer_numbers(names: GivenNames, files: Rank) -> tuple[GivenNames, dict[int, str]]:
    """Return names that a user gave with the number of its file's layer for each tied one, and those layers' keys."""
    rests = by_key((str(tied_key(name)), within(name)) for name in names or () if name.startswith(TIED))
    given = {layer_of(name) for name in names or () if not name.startswith(TIED)}
    held = by_key((layer_of(name), within(name)) for name in files.parameters)
    numbers: dict[str, int] = {}
    for key, its in rests.items():
        found = [layer for layer, has in held.items() if {*its} <= {*has} and layer not in given]
        if len(found) != 1:
            raise UsageError(
                f"it is unknown which layer {TIED}{key} is in",
                expected=f"one layer file with {', '.join(sorted({*its}))[:80]} whose names are not given otherwise",
                found=", ".join(map(str, found)) or "none",
            )
        numbers[key] = found[0]
    whole = [f"{numbers[tied_key(n) or '']}.{within(n)}" if n.startswith(TIED) else n
             for n in names or ()]  # fmt: skip
    return (None if names is None else whole), {layer: key for key, layer in numbers.items()}


def _between(found: Sequence[Checkpoint], every: Sequence[Collection[str]], tp: int) -> list[set[str]]:
    """Return the parameters that each rank can have: of layers between those of other stages, or its own for certain.

    Layers are dealt in order.
    """
    certain = [one.parameters.keys() & one.grouped for one in found]
    own = [[layer_of(n) for n in names.difference(*certain[number % tp : number : tp])]
           for number, names in enumerate(certain)]  # fmt: skip
    allowed = []
    for number, names in enumerate(every):
        low = max((layer for layers in own[number % tp : number : tp] for layer in layers), default=-1)
        high = min((layer for layers in own[number + tp :: tp] for layer in layers), default=MOST_LAYERS)
        allowed.append({n for n in names if low < layer_of(n) < high} | certain[number])
    return allowed


def _by_stage(names: GivenNames, stages: Sequence[Rank]) -> list[GivenNames]:
    """Return the names that a user gave, for each stage as many as its optimizer has parameters."""
    if names is None or len(stages) == 1:
        return [names] * len(stages)
    numels = {name: parameter.numel for name, parameter in stages[0].parameters.items()}
    found: list[GivenNames] = []
    at = 0
    for one in stages:
        left = [numels.get(name, 0) for name in names[at:]]
        count = 0 if one.model.optimizer is None else Numbered(one.model.file).count(left)
        found.append(names[at : at + count])
        at += count
    if at != len(names):
        raise UsageError(
            "unusable parameter names",
            path=stages[0].source,
            expected=f"{' + '.join(str(len(one or ())) for one in found)} names, stage by stage",
            found=len(names),
        )
    return found


def _follow(names: Sequence[str], before: Sequence[Checkpoint]) -> bool:
    """Tell whether a stage's layers follow those of the stages before it, but for layers that are tied to one of them.

    A stage's layers follow each other. Those that an earlier stage has, too, are tied.
    """
    known = {layer_of(name) for one in before for name in one.grouped}
    own = set(map(layer_of, names)) - known
    return not known or not own or min(own) > max(known)


def _deal(found: Sequence[Rank], every: Sequence[Mapping[str, Parameter]], tp: int) -> None:
    """Give each rank its parameters; what no optimizer has goes to the stage of the layers around it."""
    owned = [set(one.grouped) for one in found]
    for lane in range(tp):
        of_lane = range(lane, len(found), tp)
        firsts = [min(map(layer_of, owned[n] - set().union(*owned[lane:n:tp])), default=None) for n in of_lane]
        own: dict[int, dict[str, Parameter]] = {number: {} for number in of_lane}
        for name, parameter in every[lane].items():
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
            found[number].parameters = parameters
            found[number].tied = frozenset(
                name for name in owned[number] if sum(name in owned[other] for other in of_lane) > 1
            )


_TIED_KEY = re.compile(r"tied_modules\\*\.(\w+)")
"""A key of a tied layer, in a pattern."""


def _name_tied_layers(ranks: list[Rank], keys: Mapping[int, str], info: Mapping[str, object] | None, tp: int) -> None:
    """Give tied layers the names that files of ZeRO have for them, where their keys are known."""
    mentioned = set() if info is None else set(_TIED_KEY.findall(json.dumps(info, default=str)))
    layers = {layer_of(name) for one in ranks for name in one.tied}
    if not keys and len(mentioned) == len(layers) == 1:
        keys = {layers.pop(): mentioned.pop()}
    if keys:
        ranks[:] = with_tied_names(ranks, keys)
    elif mentioned and tp > 1:
        raise UnsupportedError(
            "it is unknown which layer the rules mean by a tied one, and so how it is sliced",
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
    every = {name for files in ranks for name in files.parameters if not name.startswith(TIED)}
    known = {
        name: f"{TIED}{keys.get(layer_of(name), layer_of(name))}.{name.partition('.')[2]}"
        for name in every
        if name in tied or (keys and layer_of(name) in keys)
    }
    found = []
    for files in ranks:
        one = replace(files)
        renamed(one, {name: new for name, new in known.items() if name in files.parameters})
        shapes = [{name: one.parameters[name].shape for name in group.parameters} for group in one.param_groups]
        frozen = {name: p.shape for name, p in one.parameters.items() if p.group is None}
        one.model_files = [replace(files.model, param_shapes=[*shapes, frozen])]
        one.tied = files.tied.union(name for name in one.parameters if name.startswith(TIED))
        found.append(one)
    return found
