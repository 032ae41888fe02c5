"""Models in FullyShardedDataParallel (FSDP1): which elements of which parameter this rank has, and in which memory.

It alone knows how that class keeps parameters: those of a unit lie end to end in one flat parameter, of which each rank
has a share. torch keeps, for each parameter of a unit, where it begins in this rank's share and with which of its
elements (`_shard_param_infos`; torch 2.0 to 2.13). With `use_orig_params` the optimizer has the parameters, views of
the share, and else the flat parameter.

Nothing is gathered, and no state dict is asked for: that would bring every unit together on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from zckpt.errors import UnsupportedError, UsageError
from zckpt.immutable import immutable, mutable
from zckpt.state import Extent, by_key
from zckpt.state.names import bare_names

EXTRA_STATE = "_extra_state"
"""The end of the key under which a module keeps what is no tensor."""


Called = Mapping[torch.Tensor, str]
"""The name of each parameter."""


@immutable(eq=False)
class Member:
    """A parameter of a unit, as this rank has it."""

    shape: torch.Size  # of the whole parameter
    extent: Extent | None  # what this rank has of it; None: nothing
    tensor: torch.Tensor  # those elements, flat, in the memory of the rank's share
    offset: int
    """Elements; where they begin in what the optimizer steps: the rank's share of the unit, or of the parameter."""
    ranks: tuple[int, ...] | None  # the ranks, in the world, that have the same; None: all
    requires_grad: bool

    @property
    def dtype(self) -> torch.dtype:
        """Its element type."""
        return self.tensor.dtype

    def within(self, stepped: torch.Tensor) -> torch.Tensor:
        """Return its elements of a tensor that is as large as what the optimizer steps; of a contiguous one, a view."""
        return stepped.reshape(-1)[self.offset : self.offset + (self.extent.numel if self.extent is not None else 0)]

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer has anything of it, on some rank."""
        return self.requires_grad and self.shape.numel() > 0


@immutable
class Members:
    """What each tensor that an optimizer steps has the elements of, with names; and all names in the model's order."""

    held: Mapping[torch.Tensor, list[tuple[str, Member]]] = field(default_factory=dict)
    order: tuple[str, ...] = ()


@mutable
class Bare:
    """A model's own tensors, not copies: what `state_dict` has, and parameters under all of their names.

    Of one in FullyShardedDataParallel, `state` has no parameters, and `steps` is what an optimizer has instead of them.
    """

    state: dict[str, Any]
    parameters: dict[str, Any]
    steps: dict[torch.Tensor, list[Member]] = field(default_factory=dict)

    def without_wrappers(self) -> Bare:
        """Return the same, without what wrappers have put into names."""
        for its in ("state", "parameters"):  # of which one may have names that wrappers have mended themselves
            names = bare_names(found := getattr(self, its), front=False)
            setattr(self, its, {names[key]: value for key, value in found.items()})
        return self

    def names(self) -> dict[torch.Tensor, str]:
        """Return the first name of each parameter."""
        return {parameter: name for name, parameter in self.roles({})[1].items()}

    def roles(self, trained: Called) -> tuple[dict[str, str], dict[str, Any], list[str]]:
        """Return further names of parameters, with the first of each; what is not trained; and names of buffers."""
        owners, tied, frozen = dict(trained), dict[str, str](), dict[str, Any]()
        for name, parameter in self.parameters.items():
            owner = owners.setdefault(parameter, name)
            if owner != name:
                tied[name] = owner
            elif parameter not in trained:
                frozen[name] = parameter
        return tied, frozen, [name for name in self.state if name not in self.parameters]


def is_flat(model: nn.Module) -> bool:
    """Tell whether FullyShardedDataParallel is in a model, or around it."""
    return any(isinstance(one, FullyShardedDataParallel) for one in model.modules())


def flat_model(model: nn.Module) -> Bare:
    """Return the tensors of a model; what forward has gathered is let go.

    Raises UsageError: whole parameters are gathered right now, as in `summon_full_params`; UnsupportedError: parameters
    are DTensors in units, or a module has a state dict of its own making.
    """
    parameters: dict[str, Any] = {}
    state: dict[str, Any] = {}
    steps: dict[torch.Tensor, list[Member]] = {}
    held: dict[tuple[int, str], Member] = {}
    for wrapper in model.modules():
        if isinstance(wrapper, FullyShardedDataParallel) and wrapper._handle is not None:
            held.update(_members(wrapper, steps))
    names_in = by_key(held)
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
            raise UnsupportedError(
                f"{prefix} has a custom state dict, and is in FullyShardedDataParallel",
                found=torch.typename(module),
                advice="use fully_shard",
            )
        names = names_in.get(id(module), [])
        for name in names:
            parameters[_joined(prefix, name)] = held[id(module), name]
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in names and not _is_flattened(parameter):
                parameters[_joined(prefix, name)] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                state[_joined(prefix, name)] = buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state[_joined(prefix, EXTRA_STATE)] = module.get_extra_state()
    return Bare(state, parameters, steps).without_wrappers()


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _is_flattened(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter is a unit's flat one, or a view of it."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def check_named(parameter: torch.Tensor) -> None:
    """Raise UsageError where FullyShardedDataParallel has a parameter whose model is not given."""
    if _is_flattened(parameter):
        raise UsageError(
            "a parameter of the optimizer is in FullyShardedDataParallel, but no model is given",
            advice="give the optimizer's model",
        )


def _members(
    wrapper: FullyShardedDataParallel, steps: dict[torch.Tensor, list[Member]]
) -> Iterator[tuple[tuple[int, str], Member]]:
    """Yield a unit's parameters by module and name there, tied ones under every name; note what the optimizer has."""
    handle: Any = wrapper._handle
    flat = handle.flat_param
    local = _local(wrapper)
    ranks: tuple[int, ...] | None  # in the world, that have the same elements; None for all
    if handle.uses_sharded_strategy:
        between = getattr(wrapper, "_inter_node_pg", None)  # of the hybrid strategies
        ranks = (dist.get_rank(),) if between is None else tuple(sorted(dist.get_process_group_ranks(between)))
    else:
        same = dist.get_process_group_ranks(handle.process_group)
        ranks = None if len(same) == dist.get_world_size() else tuple(sorted(same))
    stepped = flat._params
    firsts: dict[tuple[int, str], Member] = {}
    for index, (its, shape, info) in enumerate(
        zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
    ):
        start, count, first = 0, 0, 0  # in this rank's share, how many there, and the first of them
        if info.in_shard:
            start, count = int(info.offset_in_shard), max(int(info.numel_in_shard), 0)
            first = int(info.intra_param_start_idx)
        extent = Extent((0,) * len(shape), tuple(shape), first, count) if count or not shape.numel() else None
        parameter = flat if stepped is None else stepped[index]
        offset = start if stepped is None else 0
        elements = local[start : start + count]
        one = Member(torch.Size(shape), extent, elements, offset, ranks, parameter.requires_grad)
        firsts[id(its.module), its.param_name] = one
        steps.setdefault(parameter, []).append(one)
    yield from firsts.items()
    for tied in flat._shared_param_infos:
        yield (id(tied.module), tied.param_name), firsts[id(tied.prim_module), tied.prim_param_name]


def _local(wrapper: FullyShardedDataParallel) -> torch.Tensor:
    """Return this rank's share of a unit's flat parameter, which parameters are views of from now on."""
    from torch.distributed.fsdp._common_utils import HandleTrainingState
    from torch.distributed.fsdp._runtime_utils import _reshard

    handle: Any = wrapper._handle
    flat = handle.flat_param
    if any(extension is not None for extension in flat._param_extensions):
        raise UnsupportedError("FullyShardedDataParallel has DTensor parameters", advice="use fully_shard on the mesh")
    if handle._training_state != HandleTrainingState.IDLE:
        raise UsageError(
            "FullyShardedDataParallel's parameters are gathered at the moment",
            found=handle._training_state.name,
            advice="save and load outside of forward, backward and summon_full_params",
        )
    local: torch.Tensor = getattr(flat, "_local_shard", flat)  # before the first forward it is the flat one itself
    if local is not flat:
        _reshard(wrapper, handle, handle.uses_sharded_strategy)  # a forward may have left whole parameters in memory
        if handle._use_orig_params:
            handle._writeback_orig_params()  # a program may have given a parameter other memory
    return local.detach().view(-1)
