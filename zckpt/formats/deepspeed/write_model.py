"""The model files of a DeepSpeed checkpoint that is to be written, as trees. See `shards` for their form.

The files of experts in a DeepSpeed checkpoint that is to be written. See `expert_ranks` for who looks for which.

What a source's file holds goes along as it is, under the mp_rank of every rank that looks for it, unless experts are
sliced and cut anew; from another format files are made.

The files of a pipeline's layers that are to be written, as trees.

A layer has the same number in any number of stages, so that its file stays what it is until it is sliced otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.auto_ep import alone, auto_experts, auto_layers, listed_layers
from zckpt.formats.deepspeed.directory import Shard
from zckpt.formats.deepspeed.expert_ranks import Placement, is_data_first
from zckpt.formats.deepspeed.experts import expert_number, in_order, is_expert, layer_of, numbers_of_experts
from zckpt.formats.deepspeed.gpt_model import ARGUMENTS, SHARED, arguments_in, with_degrees
from zckpt.formats.deepspeed.nested import is_nested, renested, unwrapped
from zckpt.formats.deepspeed.pipeline import TIED, layer_names, within
from zckpt.formats.deepspeed.shards import ModelShard
from zckpt.formats.deepspeed.stages import layer_of as layer_number
from zckpt.formats.deepspeed.stages import tied_key
from zckpt.formats.deepspeed.target import Target, TargetGroup, TargetRank
from zckpt.formats.deepspeed.tp_rules import INFO_KEY
from zckpt.formats.deepspeed.write_optimizer import config_tree, slot_contents
from zckpt.formats.deepspeed.zenflow import transposed, upright
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.formats.torch_files.writer import FromFile, SlotContent, SlotTensor, new_storage, view
from zckpt.state import MASTER, WEIGHT, Parameter, Slot
from zckpt.state.partition import shard_numel, shard_share
from zckpt.torchfile import OrderedMapping, Size, Tensor, TorchFile


def model_tree(target: Target, mp: TargetRank, rank: int) -> object:
    """Return the content of a model-parallel rank's model file: the only one, or under ZeRO-3 that of one rank."""
    source = carried_from(mp, rank)
    written = {
        "module": _module(target, mp, source),
        "param_shapes": _param_shapes(target, mp),
        "shared_params": _shared(source, mp, rank),
        "dp_world_size": target.world_size,
        "mp_world_size": len(target.ranks),
        "ds_config": config_tree(target),
    }
    dimensions = source.content.get("checkpoint_parallel_dimensions")
    if isinstance(dimensions, dict):
        degrees = {"pp_degree": target.pp, "tp_degree": target.tp}
        known = {key: degree for key, degree in degrees.items() if key in dimensions}
        written["checkpoint_parallel_dimensions"] = {**dimensions, **known}
    if is_filed(target):
        written["module"] = None
    if mp.members:
        written["optimizer"] = None  # BF16_Optimizer of stage 0 has a copy of one rank's there
    if target.stages is not None:
        written["buffer_names"] = list(mp.buffers)
        written["num_experts"] = numbers_of_experts(mp.parameters)
    in_files = {name for name in mp.parameters if is_expert(name)} | auto_experts(source).keys()
    frozen = [p for p in mp.parameters.values() if p.frozen and p.name not in in_files]
    if target.transposed and target.stage == 3:
        frozen = [transposed(p) for p in frozen]
    # DeepSpeed has one list of these for all ranks, under rank 0's numbers of experts: each rank would load rank 0's.
    # Without it, all ranks have loaded what is frozen with the rest of the model, from their experts' files.
    listed_anew = target.stage == 3 or not any(p.frozen and p.name in in_files for p in mp.parameters.values())
    if (
        target.stage in (0, 1)
        or not target.lists_frozen
        or not (listed_anew and (frozen or mp.model.frozen_shapes is not None or mp.members[0].stage == 1))
    ):
        written["frozen_param_shapes"] = written["frozen_param_fragments"] = None
    else:
        written["frozen_param_shapes"] = _shapes(frozen)
        written["frozen_param_fragments"] = _frozen_shards(target, frozen, rank if target.stage == 3 else None)
    content = {key: written[key] if key in written else FromFile.of(source.file, value)
               for key, value in source.content.items()}  # fmt: skip
    if ARGUMENTS in content:
        content[ARGUMENTS] = with_degrees(content[ARGUMENTS], _degrees(target, source))
    if target.rules is not None:
        content[INFO_KEY] = FromFile.of(mp.model.file, target.rules)
    layers = _expert_ranks(target, mp, rank)
    return content | listed_layers(source, layers, target.world_size, sharded=target.stage == 3)


def _degrees(target: Target, source: ModelShard) -> dict[str, int | None]:
    """Return what Megatron-DeepSpeed's arguments say of ranks, and of the rows of its vocabulary."""
    words = f".{SHARED}"
    every = (p for mp in target.ranks for p in mp.parameters.values())
    rows = next((p.shape[0] * target.tp for p in every if p.name.endswith(words)), None)
    apart = (arguments_in(source.content) or {}).get("ds_sequence_parallel_size") in (None, 1)
    return {
        "tensor_model_parallel_size": target.tp,
        "pipeline_model_parallel_size": target.pp,
        "transformer_pipeline_model_parallel_size": target.pp,
        "data_parallel_size": target.world_size if apart else None,
        "world_size": target.world_size * len(target.ranks),
        "padded_vocab_size": rows,
    }


def is_filed(target: Target) -> bool:
    """Tell whether a target is a pipeline whose layers have files of their own: one without experts."""
    if target.origin.layers or target.origin.ranks or target.stages is None:
        return bool(target.origin.layers)
    return "num_experts" not in target.origin.model.content


def _expert_ranks(target: Target, mp: TargetRank, rank: int) -> dict[str, tuple[int, int, int]]:
    """Return for each layer of AutoEP, by its prefix: over how many ranks it is, this one's number, and its place."""
    own = auto_experts(target.origin.model)
    found = {}
    for group in mp.groups:
        degree = len(group.experts)
        for p in group.experts[0]:
            if p.name in own:
                found[own[p.name].prefix] = degree, group.placement.expert_rank(rank, degree), group.position(rank)
    return found


def alike(target: Target, mp: TargetRank, rank: int) -> object:
    """Return what the model files of two ranks have in common if they hold the same; None if each has its own.

    Under ZeRO-3 a rank's file has all names and shapes, and no elements but its own of frozen parameters and buffers.
    """
    if target.stage != 3 or mp.buffers or any(p.frozen for p in mp.parameters.values()):
        return None
    source = carried_from(mp, rank)
    if auto_experts(source):  # each rank says which experts it has
        return None
    return id(source.file.root), mp.mp_rank == 0 and rank == 0, source is mp.model


def carried_from(mp: TargetRank, rank: int) -> ModelShard:
    """Return the source's model file that a rank carries everything from that does not depend on the cut."""
    return mp.models[rank] if rank < len(mp.models) else mp.models[0]


def _shared(source: ModelShard, mp: TargetRank, rank: int) -> object:
    """Return the list of tied parameters; DeepSpeed lets the first rank of all write it, others have an empty one."""
    listed = source.content.get("shared_params")
    first = mp.mp_rank == 0 and rank == 0
    if listed == {} and first and source is mp.model:  # some writers leave it empty where parameters are tied
        return {p.name: p.tied_to for p in mp.parameters.values() if p.tied_to is not None}
    return listed if first or listed is None or source is not mp.model else {}


def _param_shapes(target: Target, mp: TargetRank) -> list[OrderedMapping]:
    """Return shapes by group, under ZeRO-3 by sub-group; plain tuples where the source has those."""
    old = mp.model.content.get("param_shapes")
    first = old[0] if isinstance(old, list) and old and isinstance(old[0], dict) else {}
    groups = [group.experts[0] for group in mp.groups]
    if target.stage == 3:
        groups = [parameters for group in mp.groups for parameters in target.sub_groups(group)]
    elif target.transposed:
        groups = [[transposed(p) for p in parameters] for parameters in groups]
    return [_shapes(parameters, tuples=any(type(shape) is tuple for shape in first.values())) for parameters in groups]


def _shapes(parameters: Sequence[Parameter], *, tuples: bool = False) -> OrderedMapping:
    shapes = OrderedMapping()
    for p in parameters:
        shapes[p.name] = p.shape if tuples else Size(p.shape)
    return shapes


def _weight(parameter: Parameter) -> Slot:
    """Return what a parameter's weight is written from.

    It is rounded from the master where no file has it, and where both are means over ranks: the mean of rounded
    values need not be the rounded mean.
    """
    slot = parameter.slots.get(WEIGHT) or parameter.slots.get(MASTER)
    if slot is None:
        raise UnsupportedError(f"no file holds the values of {parameter.name}")
    return parameter.slots.get(MASTER, slot) if slot.replicas else slot


def _module(target: Target, mp: TargetRank, source: ModelShard) -> object:
    """Return the module in the source's order: views of one storage for each group, or empty under ZeRO-3.

    Experts are in files of their own, and their model's other tensors do not share storages.
    """
    module = OrderedMapping()
    old = source.content.get("module")
    if isinstance(old, OrderedMapping):
        module.state = old.state
    weights: dict[str, Tensor] = {}
    apart = "num_experts" in source.content
    elsewhere = auto_experts(target.origin.model)
    for group in mp.groups if target.stage in (1, 2) and not apart else []:
        weights.update(_views(group, columns=target.transposed))
    for name in dict.fromkeys([*source.module, *mp.parameters, *mp.buffers]):
        if name in mp.buffers:
            slot = _buffer(target, mp, source, name)
            module[name] = SlotTensor(slot, slot.dtype, name)
        elif name in mp.parameters and (name in source.module or not (is_expert(name) or name in elsewhere)):
            owner = mp.owner(name)
            if owner.name not in weights and not apart:
                weights[owner.name] = single(target, owner)
            # Each name gets a tensor of its own, as a view of what it shares with others.
            module[name] = replace(weights[owner.name]) if not apart else single(target, owner)
    filed = {name: own for files in target.origin.ranks for name, own in files.models[0].filed.items()}
    if not target.origin.ranks:  # of another format
        filed = {name: unwrapped(name) for name in (*mp.parameters, *mp.buffers)}
    if filed:
        listed, module = module, OrderedMapping()
        module.state = listed.state
        module.update({filed.get(str(name), name): value for name, value in listed.items()})
    if isinstance(old, dict) and is_nested(old):
        return renested(old, module, source.file)
    for name, value in source.extra.items():
        module[name] = FromFile.of(source.file, value)
    return module


def _buffer(target: Target, mp: TargetRank, source: ModelShard, name: str) -> Slot:
    """Return a buffer; under ZeRO-3 every rank has written its own, and they may differ."""
    slot = mp.buffers[name].slots[WEIGHT]
    own = source.module.get(name)
    if target.stage == 3 and source is not mp.model and own is not None and own.shape == slot.shape:
        return slot_of(WEIGHT, own, source.path)
    return slot


def single(target: Target, parameter: Parameter) -> Tensor:
    """Return a weight that lies in a storage of its own; under ZeRO-3 an empty one."""
    if target.stage == 3:
        return view(new_storage(parameter.dtype, 0), (0,))
    columns = target.transposed and parameter.group is not None
    stored = transposed(parameter) if columns else parameter
    contents = slot_contents(_weight(stored), stored.name, 0, 0, stored.numel)
    made = view(new_storage(stored.dtype, stored.numel, list(contents)), stored.shape)
    return upright(made, columns=columns)


def _views(group: TargetGroup, *, columns: bool) -> dict[str, Tensor]:
    """Return the weights of a group as views of its flat buffer, as DeepSpeed keeps them."""
    parameters, starts = group.experts[0], group.starts
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) != 1:
        return {}
    contents: list[SlotContent] = []
    for start, p in zip(starts, parameters, strict=False):
        contents += slot_contents(_weight(p), p.name, 0, start, p.numel)
    storage = new_storage(dtypes.pop(), group.partition * group.shared_by, contents)
    return {
        p.name: upright(view(storage, p.shape, start=start), columns=columns)
        for start, p in zip(starts, parameters, strict=False)
    }


def _frozen_shards(target: Target, frozen: Sequence[Parameter], rank: int | None) -> OrderedMapping:
    """Return the frozen parameters: whole, or under ZeRO-3 one rank's shards."""
    shards = OrderedMapping()
    for parameter in frozen:
        slot, numel = _weight(parameter), parameter.numel
        if rank is None:
            contents = slot_contents(slot, parameter.name, 0, 0, numel)
            shards[parameter.name] = view(new_storage(slot.dtype, numel, list(contents)), parameter.shape)
            continue
        start, count = shard_share(numel, target.world_size, rank)
        held = shard_numel(numel, target.world_size)
        contents = slot_contents(slot, parameter.name, start, 0, count)
        shards[parameter.name] = view(new_storage(slot.dtype, held, list(contents)), (held,))
    return shards


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """One file: its name, and what it holds: the source's file, or these parameters of a model-parallel rank."""

    name: str
    mp_rank: int
    file: TorchFile | None
    parameters: Sequence[str] = ()

    def tree(self, target: Target) -> object:
        """Return its content."""
        if self.file is not None and not self.parameters:
            return FromFile.of(self.file, self.file.root)
        own = target.ranks[self.mp_rank].parameters
        auto = auto_experts(target.origin.model)
        found: dict[object, object] = {}
        for name in self.parameters:
            whole, _, number = name.rpartition(".")
            one = alone(own[whole], auto[whole], int(number)) if whole in auto else own[name]
            found[name] = single(target, one)
        root = self.file.root if self.file is not None and isinstance(self.file.root, dict) else {}
        rest = {key: FromFile.of(self.file, value) for key, value in root.items() if self.file and key not in found}
        return {**found, **rest}


def expert_files(target: Target) -> list[ExpertFile]:
    """Return the files of all experts, in the order of layers, experts and model-parallel ranks."""
    if target.stage == 3:
        return []  # AutoEP's, which are sub-groups
    if target.origin.experts:
        return list(_from_files(target))
    return [
        ExpertFile(_name(layer, expert, stage * target.tp + lane), stage * target.tp + lane, None, names)
        for stage in range(target.pp)
        for layer, expert, names in _made(target, stage)
        for lane in _lanes(target, stage, layer_of(names[0]), expert)
    ]


def optimizer_files(target: Target) -> list[tuple[str, TorchFile]]:
    """Return the files for the optimizer of experts, which hold nothing: DeepSpeed before 0.19 looks for them."""
    known = target.origin.expert_optimizers
    degree = max((len(group.experts) for mp in target.ranks for group in mp.groups), default=1)
    found: list[tuple[str, TorchFile]] = []
    for rank in range(degree if known else 0):
        for first in range(0, len(target.ranks), target.tp):
            for lane in _lanes_of_rank(target, rank, degree):
                _, file = known[min(rank, len(known) - 1)]
                found.append((f"expp_rank_{rank}_mp_rank_{first + lane:02d}_optim_states.pt", file))
    return found


def _from_files(target: Target) -> Iterator[ExpertFile]:
    """Yield the files of a source's experts. Those of a pipeline are numbered by stage."""
    origin, tp = target.origin, target.checkpoint.topology.tp
    files: dict[tuple[int, int, int], dict[int, tuple[Shard, TorchFile]]] = {}
    for shard, file in origin.experts:
        stage, lane = divmod(shard.mp_rank or 0, tp)
        key = stage, -1 if shard.layer is None else shard.layer, shard.expert or 0
        files.setdefault(key, {})[lane] = shard, file
    whole = target.ranks[0].lanes > 1 or any(one.state.lanes > 1 for one in origin.ranks)
    same = target.tp == tp
    for (source, _, expert), by_lane in sorted(files.items(), key=lambda item: item[0]):
        first = by_lane[min(by_lane)]
        root = first[1].root if isinstance(first[1].root, dict) else {}
        names = [str(key) for key, value in root.items() if isinstance(value, Tensor)]
        prefix = next(map(layer_of, filter(is_expert, names)), "")
        stage, layer = (source, first[0].layer) if target.stages is None else _place(target, prefix)
        for lane in _lanes(target, stage, prefix, expert):
            mp_rank = stage * target.tp + lane
            shard, file = by_lane.get(lane, first) if same else first
            kept = (layer, mp_rank) == (shard.layer, shard.mp_rank)
            name = shard.name if kept else _name(layer, expert, mp_rank)
            if whole or (same and lane in by_lane):
                yield ExpertFile(name, mp_rank, file)
            else:
                here = target.ranks[mp_rank].parameters
                yield ExpertFile(name, mp_rank, file, [one for one in names if one in here])


def _place(target: Target, layer: str) -> tuple[int, int]:
    """Return the stage that has a layer of experts, and the layer's number among the stage's own."""
    for stage, mp in enumerate(target.ranks[:: target.tp]):
        own = sorted({layer_of(name) for name in mp.parameters if is_expert(name)}, key=in_order)
        if layer in own:
            return stage, own.index(layer)
    raise LayoutError(f"no stage has the experts of {layer}")


def _made(target: Target, stage: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yield layer, expert and names of its parameters, of a stage and a checkpoint of another format.

    DeepSpeed numbers layers in the model's order. Of names alone that is not known, and does not matter: every file
    says whose weights it has, and all of them are loaded. Those of AutoEP are looked up by the number that is listed.
    """
    for auto in auto_layers(target.origin.model):
        for expert in range(auto.experts):
            yield auto.number, expert, [f"{name}.{expert}" for name in auto.names]
    layers: dict[str, dict[int, list[str]]] = {}
    for name in target.ranks[stage * target.tp].parameters:
        number = expert_number(name)
        if number is not None:
            layers.setdefault(layer_of(name), {}).setdefault(number, []).append(name)
    for index, layer in enumerate(sorted(layers, key=in_order)):
        for expert in sorted(layers[layer]):
            yield index, expert, layers[layer][expert]


def _lanes(target: Target, stage: int, layer: str, expert: int) -> list[int]:
    """Return the tensor-parallel ranks of a stage that look for the files of an expert under their number."""
    for group in target.ranks[stage * target.tp].groups:
        numbers = {expert_number(p.name) for p in group.experts[0] if layer_of(p.name) == layer and is_expert(p.name)}
        if numbers:
            return _lanes_of_rank(target, expert // len(numbers), len(group.experts))
    return list(range(target.tp))


def _lanes_of_rank(target: Target, expert_rank: int, degree: int) -> list[int]:
    lanes = target.ranks[0].lanes
    if lanes == 1:
        return list(range(target.tp))
    placement = Placement(target.world_size * lanes, is_data_first(target.origin.model))
    count = placement.ranks // degree
    return sorted({placement.rank(expert_rank, position, degree) % lanes for position in range(count)})


def _name(layer: int | None, expert: int, mp_rank: int) -> str:
    before = "" if layer is None else f"layer_{layer}_"
    return f"{before}expert_{expert}_mp_rank_{mp_rank:02d}_model_states.pt"


def layer_count(target: Target) -> int:
    """Return the number of layers' files."""
    if is_filed(target) and not target.origin.layers:
        return len(_layers_made(target, 0)) * target.tp
    return sum((shard.mp_rank or 0) == 0 for shard, _ in target.origin.layers) * target.tp


def _layers_made(target: Target, rank: int) -> dict[int, dict[str, Parameter]]:
    """Return what a tensor-parallel rank has of each layer by its keys, of a checkpoint of another format.

    A tied layer has a file for each of its uses: DeepSpeed reads one where no function wraps the layer, and elsewhere
    does not look for it.
    """
    uses = target.stages.uses if target.stages is not None else {}
    found: dict[int, dict[str, Parameter]] = {}
    for mp in target.ranks[rank :: target.tp]:
        for name, one in {**mp.parameters, **mp.buffers}.items():
            key = tied_key(name)
            for number in (layer_number(name),) if key is None else uses[key]:
                found.setdefault(number, {}).setdefault(unwrapped(within(name)), one)
    return dict(sorted(found.items()))


def layer_files(target: Target) -> Iterator[tuple[str, object]]:
    """Yield the name and the content of each layer's files."""
    tp = target.checkpoint.topology.tp
    layers = target.origin.layers
    if is_filed(target) and not layers:
        for rank in range(target.tp):
            middle = f"-model_{rank:02d}" if target.tp > 1 else ""
            for number, its in _layers_made(target, rank).items():
                tree = OrderedMapping()
                tree.update((key, single(target, one)) for key, one in its.items())
                yield f"layer_{number:02d}{middle}-model_states.pt", tree
        return
    if target.tp == tp and target.rules is None:
        for shard, file in layers:
            yield shard.name, FromFile.of(file, file.root)
        return
    sliced = any("-model_" in shard.name.partition("-model_states")[0] for shard, _ in layers)
    for rank in range(target.tp):
        own: dict[str, Parameter] = {}
        for mp in target.ranks[rank :: target.tp]:
            own = {**mp.buffers, **mp.parameters, **own}
        like = rank if target.tp == tp else 0
        for shard, file in layers:
            if (shard.mp_rank or 0) == like:
                middle = f"-model_{rank:02d}" if sliced or target.tp > 1 else ""
                yield f"layer_{shard.layer:02d}{middle}-model_states.pt", _tree(target, shard, file, own)


def _tree(target: Target, shard: Shard, file: TorchFile, own: Mapping[str, Parameter]) -> object:
    """Return a layer's content with the slices of one tensor-parallel rank."""
    if not isinstance(file.root, dict):
        return FromFile.of(file, file.root)
    tp = target.checkpoint.topology.tp
    models = [files.models[0] for files in target.origin.ranks[shard.mp_rank or 0 :: tp]]
    names = layer_names(shard, file, models)
    tree = OrderedMapping()
    if isinstance(file.root, OrderedMapping):
        tree.state = file.root.state
    for key, value in file.root.items():
        name = names.get(str(key), "")
        tree[key] = single(target, own[name]) if name in own else FromFile.of(file, value)
    return tree


def stage_notes(target: Target) -> list[str]:
    """Return how layers were dealt anew."""
    stages = target.stages
    if stages is None:
        return []
    pairs = list(zip(stages.bounds, stages.bounds[1:], strict=False))
    notes = ["stages of layers " + "; ".join(f"{low} to {high - 1}" for low, high in pairs)]
    for key in stages.uses if target.pp > 1 else ():
        its = ", ".join(map(str, stages.of(f"{TIED}{key}.")))
        notes.append(f"tied layer {key} is taken to be used in stages {its}, which get its first stage's state")
    return [*notes, *stages.untold]
