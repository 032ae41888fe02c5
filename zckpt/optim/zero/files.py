"""ZeroOptimizer in files: DeepSpeed's checkpoint directories, and which files have which experts.

    zero_pp_rank_D_mp_rank_MM_optim_states.pt           each rank: masters and state of its partitions
    mp_rank_MM_model_states.pt                          the first of the ranks that have slice MM of the model
    layer_L_expert_E_mp_rank_MM_model_states.pt         the first of the ranks that have expert E of expert layer L

Experts have local numbers in a rank's model, and global ones in files. Which rank of the expert-parallel ones this is,
follows from the ranks that hold the same experts; DeepSpeed has two ways of assigning experts to dp ranks, ep by ep:

    0 1 2 3 4 5   ep = 2: expert ranks     0 1 0 1 0 1     or, data before experts,     0 0 0 1 1 1

Source: `deepspeed.utils.groups`, 0.19, and the files that its engine writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zckpt.engine.plan import plan
from zckpt.engine.tensors import dtype_name, memory_of
from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.axes.expert_ranks import Placement
from zckpt.formats.deepspeed.axes.experts import expert_number, experts_per_rank, global_name, is_expert, layer_of
from zckpt.formats.deepspeed.directory import classify
from zckpt.formats.torch_files.writer import NewStorage, ValueContent, lay_out, new_storage, view
from zckpt.immutable import immutable
from zckpt.operations.small_file import beside_it, check_text, name_of, write_text
from zckpt.operations.target import write_target
from zckpt.optim.flat_parameters import Bare, Called
from zckpt.optim.ranks import Ranks, written_together
from zckpt.optim.states.by_parameter import Target
from zckpt.optim.tensors import bare
from zckpt.optim.values import Values
from zckpt.optim.zero.deepspeed_state import VERSION, with_objects
from zckpt.optim.zero.flat import FlatOptimizer
from zckpt.optim.zero.optimizer import ZeroOptimizer
from zckpt.optim.zero.stepping import model_rank
from zckpt.state import without
from zckpt.storage.ownership import Owned
from zckpt.torchfile import Tensor

OWNED = Owned(lambda name: classify(name, name) is not None)
"""The directories of a tag."""

_SECTIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def save(optimizer: ZeroOptimizer, names: Called, target: Target) -> None:
    """Write a tag's directory that DeepSpeed loads at the same world size, and `latest` beside it.

    `names` are those of all parameters. Experts are written once each, and each slice of a model-parallel model by its
    ranks. Errors are those of `zckpt.optim.files.save`; UnsupportedError for experts without DeepSpeed's names.
    """
    path, model, beside = target.path, target.model, target.beside
    mp_rank, slices = model_rank(optimizer.model_parallel)
    ranks = every_rank(optimizer.process_group, slices)
    latest = beside_it(path, "latest")
    ranks.of_first(lambda: check_text(latest))
    with written_together(path, ranks, overwrite=target.overwrite, owned=OWNED) as partial:
        parameters = {name: p for p, name in names.items()}
        its = Bare({name: p.detach() for name, p in parameters.items()}, parameters) if model is None else bare(model)
        experts = experts_of(optimizer, names, list(its.state))
        config = _config(optimizer, experts)
        prefix = "bf16_" if optimizer.groups[0].flat.dtype == torch.bfloat16 else ""
        state = with_objects(optimizer.make_state_dict(names))
        files: dict[str, dict[str, Any]] = {
            f"{prefix}zero_pp_rank_{optimizer.rank}_mp_rank_{mp_rank:02d}_optim_states.pt": {
                "optimizer_state_dict": state, "ds_config": config, "ds_version": VERSION,
            },
        }  # fmt: skip
        dense = OrderedDict[str, torch.Tensor]()
        for name, tensor in its.state.items():
            layer, number = experts.file_of(name)
            if layer is None:
                dense[name] = tensor
            elif experts.places[layer].is_first:
                file = f"layer_{list(experts.per_rank).index(layer)}_expert_{number}_mp_rank_{mp_rank:02d}"
                # of its own memory: a file has all of a tensor's, and that of parameters is a whole group's
                of_expert = files.setdefault(f"{file}_model_states.pt", OrderedDict())
                of_expert[experts.named(name)] = tensor.detach().clone()
        if optimizer.rank == 0:
            # what DeepSpeed gives back as the client's state; what it keeps itself goes before it
            client = without(beside, "lr_scheduler", "extra")
            about = {**_model(optimizer, its, names, target.step, beside, dense), "ds_config": config}
            if experts.per_rank:
                counts = experts.per_rank.items()
                about["num_experts"] = [count * experts.places[layer].degree for layer, count in counts]
            root = {**client, **beside.get("extra", {}), **about}
            files[f"mp_rank_{mp_rank:02d}_model_states.pt"] = root
        for name, content in files.items():
            write_torch_file(content, partial / name)
    ranks.of_first(lambda: write_text(latest, name_of(path)))


def refuse_parts(optimizer: ZeroOptimizer) -> None:
    """Raise UnsupportedError for slices of models of which nothing says what they are of."""
    if optimizer.is_model_parallel:
        raise UnsupportedError(
            "a model-parallel model needs rules that say how tensors are cut",
            advice="give tp_rules= in the form of universal_checkpoint_info",
        )


def _config(optimizer: ZeroOptimizer, experts: Experts) -> dict[str, Any]:
    """Return what DeepSpeed's configuration would say of what decides about the form of a checkpoint."""
    found: dict[str, Any] = {
        "zero_optimization": {
            "stage": optimizer.stage,
            "elastic_checkpoint": optimizer.elastic_checkpoint,
            "round_robin_gradients": optimizer.round_robin_gradients,
            "parameter_alignment": optimizer.parameter_alignment,
        },
        "gradient_accumulation_steps": optimizer.gradient_accumulation_steps,
        "gradient_clipping": optimizer.clip_grad,
    }
    if any(place.data_first and place.degree > 1 for place in experts.places.values()):
        found["use_data_before_expert_parallelism"] = True
    section = _SECTIONS.get(optimizer.groups[0].flat.dtype)
    if section is not None:
        found[section] = {"enabled": True}
    return found


def _model(
    optimizer: ZeroOptimizer,
    its: Bare,
    names: Called,
    step: int | None,
    beside: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Return the content of the model's file, but for the configuration."""
    # In the order of the flat buffers, which `round_robin_gradients` makes another one than the groups'.
    shapes = [OrderedDict((names[p], p.shape) for p in group.parameters) for group in optimizer.groups]
    slices = model_rank(optimizer.model_parallel)[1]
    trained = {p: name for p, name in names.items() if p in optimizer._place}
    tied, rest, buffers = its.roles(trained)
    every = {name: p for p, name in names.items() if p not in trained} | rest
    frozen = {name: p for name, p in every.items() if not is_expert(name)}
    return {
        "module": tensors,
        "buffer_names": [name for name in buffers if name in tensors],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict((name, p.shape) for name, p in frozen.items()) or None,
        "shared_params": tied,
        "frozen_param_fragments": OrderedDict((name, p.detach()) for name, p in frozen.items()) or None,
        "lr_scheduler": beside.get("lr_scheduler"),
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": step or 0,
        "global_samples": 0,
        "dp_world_size": optimizer.world_size,
        "mp_world_size": slices,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": slices},
        "ds_version": VERSION,
    }


# --- one file


def write_torch_file(root: object, path: Path) -> None:
    """Write a tree of plain data, tensors and inert nodes; it appears whole or not at all.

    `root`: dicts, lists, tuples, sets, numbers, strings, tensors, shapes, element types, and nodes of
    `zckpt.torchfile`. Tensors share memory in the file as they do here, and bring all of it along. Raises
    UnsupportedError: something else, which only a pickle could hold; TargetError: it cannot be written.
    """
    write_target(plan([lay_out(path.name, _Sharing().node(root, path.name))]), path)


class _Sharing(Values):
    """Turns values into nodes of which tensors share memory as they do here, and bring all of it along."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, NewStorage] = {}

    def tensor(self, value: torch.Tensor, where: str) -> Tensor:
        """Return a tensor as a node. Raises UnsupportedError: it is sparse."""
        here = value.detach().cpu()
        if here.layout != torch.strided:
            raise UnsupportedError(f"{where}: a tensor with layout {here.layout} cannot be written")
        storage, dtype = here.untyped_storage(), dtype_name(here.dtype)
        known = self._storages.get(storage.data_ptr()) if storage.nbytes() else None
        if known is None or known.dtype != dtype:
            values = [ValueContent(0, memory_of(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)))]
            known = new_storage(dtype, storage.nbytes() // here.element_size(), values if storage.nbytes() else ())
            self._storages[storage.data_ptr()] = known
        return view(known, tuple(here.shape), start=int(here.storage_offset()), strides=tuple(here.stride()))


# --- experts


@immutable
class Place:
    """Where a rank is among those that hold different experts of some layers."""

    rank: int  # among so many expert-parallel ranks
    degree: int
    is_first: bool  # whether no rank before it holds the same experts
    data_first: bool  # whether neighbours hold the same experts


def place_of(sharing: list[int], every: list[int]) -> Place:
    """Return a rank's place, from the ranks that hold the same experts and all data-parallel ranks."""
    positions = sorted(every.index(rank) for rank in sharing)
    degree = len(every) // len(positions)
    for data_first in (False, True):
        placement = Placement(len(every), data_first)
        rank = placement.expert_rank(positions[0], degree)
        if positions == [placement.rank(rank, position, degree) for position in range(len(positions))]:
            return Place(rank, degree, dist.get_rank() == every[positions[0]], data_first)
    raise UnsupportedError(
        "experts are assigned to ranks in a way that DeepSpeed's files cannot express",
        expected=f"every {degree}th rank, or {len(positions)} neighbours",
        found=f"data-parallel ranks {', '.join(map(str, positions))} of {len(every)}",
    )


@immutable
class Experts:
    """The experts that a rank has: how many of each layer, by its names' prefix, in the model's order; and where."""

    per_rank: dict[str, int]
    places: dict[str, Place]

    def named(self, name: str) -> str:
        """Return the name that a parameter has in files."""
        layer = layer_of(name)
        return global_name(name, self.places[layer].rank, self.per_rank) if layer else name

    def file_of(self, name: str) -> tuple[str | None, int | None]:
        """Return the layer and the number of the expert that a parameter is of; None for the dense."""
        return layer_of(name) or None, expert_number(self.named(name))


def experts_of(optimizer: FlatOptimizer, names: Called, order: list[str] | None = None) -> Experts:
    """Return the experts that this rank has.

    `names`: of its parameters, as this rank's model has them; `order`: the names of all parameters of the model; by
    default the optimizer's. Raises UnsupportedError: they are not those of DeepSpeed's expert layers, whose names say
    which is meant; or are assigned otherwise.
    """
    every = dist.get_process_group_ranks(optimizer.process_group)
    places: dict[str, Place] = {}
    for flat in optimizer.groups:
        if not flat.is_expert:
            continue
        place = place_of(dist.get_process_group_ranks(flat.process_group), every)
        for parameter in flat.parameters:
            layer = layer_of(names[parameter])
            if not layer:
                raise UnsupportedError(
                    f"{names[parameter]} belongs to an expert, but its name does not say to which",
                    expected="a name of DeepSpeed's MoE layer, ….deepspeed_moe.experts.deepspeed_experts.NUMBER.…",
                    advice="save each rank's state_dict() instead",
                )
            places[layer] = place
    known = [name for name in (order or list(names.values())) if is_expert(name)]
    per_rank = experts_per_rank(known)
    for layer in per_rank:
        if layer not in places:
            raise UnsupportedError(
                f"no param group with moe=True has experts of {layer.rstrip('.')}: it is unknown which they are"
            )
    return Experts(per_rank, places)


def every_rank(process_group: dist.ProcessGroup, slices: int) -> Ranks:
    """Return the ranks that save together: those of all slices of the model, which must be the whole world."""
    if slices == 1:
        return Ranks(process_group)
    ranks = Ranks()
    expected = dist.get_world_size(process_group) * slices
    if ranks.world_size != expected:
        raise UnsupportedError(
            "all ranks of the world must save a model in parts together",
            expected=f"{expected} ranks, {expected // slices} for each of {slices} parts",
            found=ranks.world_size,
        )
    return ranks
