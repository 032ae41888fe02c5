"""Param groups as ZeRO keeps them: one flat buffer for each, cut in equal partitions, of which each rank steps one.

All ranks have the whole buffer. Its weights come from the first rank at the beginning, and after each step from the
ranks that have stepped them: in pieces, while other groups are stepped.

The local optimizer sees one rank's partition of a whole param group as one tensor. That is the same training where each
element is stepped by itself, and another one where a norm, a row, a matrix or the whole model decides. Those classes
are known here by their names, whoever's they are and whatever is derived from them.

Source: their papers and code. LAMB, LARS, NovoGrad, AdamP, SGDP, Nero: norms of a tensor. Adafactor, CAME, SM3,
Adam-mini: rows, columns or blocks. Muon, Shampoo, SOAP, Kron, GaLore, APOLLO, Dion, Scion: matrices. L-BFGS, Prodigy,
D-Adaptation: all tensors together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zckpt.optim import param_groups
from zckpt.optim.param_groups import Group
from zckpt.state.partition import (
    PARAMETER_ALIGNMENT_NBYTES,
    FlatShare,
    alignment_padding,
    flat_padding,
    flat_partition_numel,
    flat_shares,
    flat_starts,
    round_robin_order,
)

PIECE = 1 << 20  # elements that weights and masters are compared in: at most 4 MiB of what masters round to
PIECE_OF_GPU = 1 << 25  # each of them is waited for


@dataclass(eq=False)
class FlatGroup:
    """One param group's flat buffer, of which the parameters are views, and this rank's partition of its masters.

    Parameters
    ----------
    parameters : list of Tensor
        Those that are trained, in the order of the buffer.
    numbers : list of int
        Which of the param group's trained parameters each of these is.
    process_group : ProcessGroup
        The ranks that share the buffer.
    pads : list of int, elements
        After each parameter.
    partition : int, elements
        Of each rank, padding included.
    flat : Tensor, (world size x partition,)
        Of the model's element type.
    master : Parameter, (partition,)
        What the local optimizer steps.
    gradient : Tensor or None, (partition,)
        Averaged gradients of this rank's partition, of the type they are accumulated in; made when they first come.
    """

    parameters: list[torch.Tensor]
    numbers: list[int]
    process_group: dist.ProcessGroup
    rank: int
    world_size: int
    is_expert: bool
    pads: list[int]
    partition: int
    flat: torch.Tensor
    master: torch.nn.Parameter
    gradient: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.numels = [shape.numel() for shape in self.shapes]
        self.starts = flat_starts(self.numels, self.pads)
        self.own = self.shares_of(self.rank)

    @property
    def total(self) -> int:
        """Elements of the buffer up to the padding at its end."""
        return self.starts[-1]

    @property
    def padding(self) -> int:
        """Elements at the end of this rank's partition that belong to no parameter."""
        return flat_padding(self.total, self.partition, self.rank)

    @property
    def weights(self) -> torch.Tensor:
        """The partition of this rank."""
        return self.weights_of(self.rank)

    def weights_of(self, rank: int) -> torch.Tensor:
        """Return one rank's partition of the buffer."""
        return self.flat[rank * self.partition : (rank + 1) * self.partition]

    def shares_of(self, rank: int) -> list[FlatShare]:
        """Return the extents of parameters in one rank's partition."""
        return list(flat_shares(self.numels, self.starts, self.partition, rank))

    def point(self, position: int | None = None) -> None:
        """Make parameters, or one of them, views of the buffer, if something has moved them; their values go along."""
        for index in range(len(self.parameters)) if position is None else (position,):
            parameter, start, shape = self.parameters[index], self.starts[index], self.shapes[index]
            view = self.flat[start : start + shape.numel()].view(shape)
            if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype:
                view.copy_(parameter.detach())
                parameter.data = view

    @torch.no_grad()
    def take_weights(self, position: int | None = None) -> None:
        """Copy weights that somebody has set since the last step into the masters: all, or those of one parameter.

        A master whose weight is what it rounds to stays: it has what rounding has lost.
        """
        self.point(position)
        extents = [(0, self.partition)]
        if position is not None:
            extents = [(share.position, share.position + share.numel) for share in self.own if share.index == position]
        master = self.master.detach()
        piece = PIECE_OF_GPU if master.is_cuda else PIECE
        for begin, end in extents:
            for start in range(begin, end, piece):
                where = slice(start, min(start + piece, end))
                kept, found = master[where], self.weights[where].to(master.device)
                rounded = kept.to(found.dtype)
                if not torch.equal(rounded, found):
                    is_set = (rounded != found) & ~(rounded.isnan() & found.isnan())
                    kept.copy_(torch.where(is_set, found.to(kept.dtype), kept))


def _check(trained: Sequence[torch.Tensor]) -> None:
    dtypes = {str(parameter.dtype) for parameter in trained}
    devices = {str(parameter.device) for parameter in trained}
    for what, found in (("element types", dtypes), ("devices", devices)):
        if len(found) > 1:
            raise ValueError(
                f"a param group of several {what}, {', '.join(sorted(found))}, which one flat buffer cannot hold; "
                f"give each its own group"
            )
    if any(isinstance(parameter, DTensor) for parameter in trained):
        raise ValueError(
            "DTensors, which know by themselves how they are cut: use fully_shard, or give the slices as plain tensors "
            "and model_parallel="
        )
    if any(not parameter.dtype.is_floating_point for parameter in trained):
        raise ValueError(f"parameters must be of a floating-point type, not {', '.join(sorted(dtypes))}")


def broadcast_first(tensors: Iterable[torch.Tensor], process_group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the elements that its first one has, of whatever type. All of them call it together."""
    if dist.get_world_size(process_group) == 1:
        return
    first = dist.get_global_rank(process_group, 0)
    for tensor in tensors:
        if not tensor.numel():
            continue
        here = tensor.detach()
        wire = here.contiguous().view(-1).view(torch.uint8)
        dist.broadcast(wire, src=first, group=process_group)
        if not here.is_contiguous():
            here.copy_(wire.view(here.dtype).view(here.shape))


class FlatOptimizer(Optimizer):
    """Param groups of the model's parameters, and a local optimizer of this rank's partition of each."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        *,
        process_group: dist.ProcessGroup | None,
        expert_data_parallel_groups: Mapping[str, dist.ProcessGroup] | None,
        round_robin_gradients: bool,
        parameter_alignment: bool,
        fp16_master_weights_and_gradients: bool,
        offload: bool,
        broadcast_weights: bool,
        allow_per_tensor: bool,
        defaults: dict[str, Any],
    ) -> None:
        if not allow_per_tensor:
            refuse_per_tensor(optimizer_class)
        given = param_groups.read_groups(params)
        self.process_group = param_groups.read_process_group(process_group)
        self.world_size = dist.get_world_size(self.process_group)
        self.rank = dist.get_rank(self.process_group)
        self.expert_data_parallel_groups = dict(expert_data_parallel_groups or {})
        self.round_robin_gradients = round_robin_gradients
        self.parameter_alignment = parameter_alignment
        self.fp16_master_weights_and_gradients = fp16_master_weights_and_gradients
        self.offload = offload
        self.broadcast_weights = broadcast_weights
        self.groups: list[FlatGroup] = []
        self._place: dict[torch.Tensor, tuple[FlatGroup, int]] = {}
        self._names: dict[str, torch.Tensor] | None = None
        self._is_made = False
        super().__init__(given, dict(defaults))
        local = [self._local_group(group, flat) for group, flat in zip(self.param_groups, self.groups, strict=True)]
        self.optim = optimizer_class(local, **defaults)
        if not isinstance(self.optim, Optimizer):
            raise ValueError(  # noqa: TRY004  # as torch
                f"optimizer_class must make a torch.optim.Optimizer, not {torch.typename(self.optim)}"
            )
        if not allow_per_tensor:
            refuse_per_tensor(type(self.optim))  # which a function may have made
        self.defaults = self.optim.defaults
        self.state = self.optim.state
        param_groups.sync(self.optim.param_groups, self.param_groups)
        self._is_made = True

    # --- groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group. All ranks must add the same, between steps; they get the weights of the first.

        Parameters that were frozen when their group was made are left out of it; unfrozen, they can be added here.

        Raises
        ------
        TypeError, ValueError
            As `torch.optim.Optimizer`; ValueError for several element types or devices in one group.
        """
        made = param_groups.read_group(param_group)
        trained = [parameter for parameter in made["params"] if parameter.requires_grad]
        self._let_go(trained)
        super().add_param_group(made)
        self._names = None
        self.groups.append(self._flat_group(self.param_groups[-1], trained))
        flat = self.groups[-1]
        if self.broadcast_weights:
            broadcast_first([p for p in made["params"] if p not in set(trained)], flat.process_group)
        self._place |= {parameter: (flat, position) for position, parameter in enumerate(flat.parameters)}
        if self._is_made:
            self.optim.add_param_group(self._local_group(self.param_groups[-1], flat))
            param_groups.sync(self.optim.param_groups, self.param_groups)

    def _let_go(self, trained: list[torch.Tensor]) -> None:
        """Take parameters that no flat buffer has out of the groups they were frozen in."""
        for parameter in trained:
            if parameter in self._place:
                continue
            for group in self.param_groups:
                for index, member in enumerate(group["params"]):
                    if member is parameter:
                        del group["params"][index]
                        if "param_names" in group:
                            del group["param_names"][index]
                        break

    def _flat_group(self, group: Group, trained: list[torch.Tensor]) -> FlatGroup:
        """Move a group's trained parameters into a flat buffer, and make this rank's masters of them."""
        is_expert = bool(group.get("moe", False))
        process_group = self._process_group_of(group) if is_expert else self.process_group
        _check(trained)
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        numbers = list(range(len(trained)))
        if self.round_robin_gradients:
            numbers = round_robin_order(len(trained), world_size)
        parameters = [trained[number] for number in numbers]
        dtype = parameters[0].dtype if parameters else torch.float32
        device = parameters[0].device if parameters else torch.device("cpu")
        multiple = max(PARAMETER_ALIGNMENT_NBYTES // dtype.itemsize, 1) if self.parameter_alignment else 1
        numels = [parameter.numel() for parameter in parameters]
        pads = alignment_padding(numels, multiple)
        partition = flat_partition_numel(sum(numels) + sum(pads), world_size)
        flat = torch.zeros(partition * world_size, dtype=dtype, device=device)
        master = torch.empty(
            partition,
            dtype=dtype if self.fp16_master_weights_and_gradients else torch.float32,
            device="cpu" if self.offload else device,
            pin_memory=self.offload and device.type == "cuda" and partition > 0,
        )
        made = FlatGroup(
            parameters, numbers, process_group, rank, world_size, is_expert, pads, partition, flat,
            torch.nn.Parameter(master),
        )  # fmt: skip
        made.point()
        if self.broadcast_weights:
            broadcast_first([flat], process_group)
        master.copy_(made.weights)
        return made

    def _process_group_of(self, group: Group) -> dist.ProcessGroup:
        """Return the process group of a param group of experts."""
        name = group.get("name")
        if name not in self.expert_data_parallel_groups:
            raise ValueError(
                f"a param group of experts, {name!r}, whose process group is not among expert_data_parallel_groups"
            )
        return self.expert_data_parallel_groups[name]

    @staticmethod
    def _local_group(group: Group, flat: FlatGroup) -> Group:
        return {**param_groups.hyperparameters(group), "params": [flat.master]}

    # --- names

    def names(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, those that are frozen too. Raises ValueError if they have none."""
        if self._names is None:
            found: dict[str, torch.Tensor] = {}
            for group in self.param_groups:
                if "param_names" not in group:
                    raise ValueError("the parameters have no names: make the optimizer of (name, parameter) pairs")
                found |= zip(group["param_names"], group["params"], strict=True)
            self._names = found
        return dict(self._names)

    def find(self, name: str) -> tuple[FlatGroup, int]:
        """Return the group of a parameter and its position there. Raises ValueError for a strange or frozen name."""
        parameter = (self._names or self.names()).get(name)
        if parameter is None:
            raise ValueError(f"no parameter {name}")
        if parameter not in self._place:
            raise ValueError(f"{name} was frozen when the optimizer was made, and has no state")
        return self._place[parameter]

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(_BOUND)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_BOUND)


_BOUND = (
    "a ZeroOptimizer is bound to its process group and to its parameters' memory and cannot be copied or pickled: make "
    "a new one of the copied parameters and give it this one's state_dict()"
)


# --- optimizers that look at whole tensors

NAMES = frozenset(
    [
        "adafactor", "adafactorbigvision", "adammini", "adamp", "adamuon", "apollo", "came", "dadaptadagrad",
        "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd", "dion", "distributedmuon", "distributedshampoo",
        "fusedlamb", "fusedlars", "fusedmixedprecisionlamb", "fusednovograd", "galoreadafactor", "galoreadamw",
        "galoreadamw8bit", "kron", "lamb", "lamb32bit", "lamb8bit", "lars", "lars32bit", "lars8bit", "lbfgs", "muon",
        "muonwithauxadam", "nero", "novograd", "nvnovograd", "onebitlamb", "prodigy", "pytorchlars", "scalableshampoo",
        "scion", "sgdp", "shampoo", "singledevicemuon", "singledevicemuonwithauxadam", "sm3", "soap",
    ]
)  # fmt: skip
"""Names of classes, in lower case and without underscores."""


def is_per_tensor(optimizer_class: type) -> bool:
    """Tell whether a class is known, or derived from one that is known, to step elements that depend on each other."""
    return any(base.__name__.lower().replace("_", "") in NAMES for base in optimizer_class.__mro__)


def refuse_per_tensor(optimizer_class: object) -> None:
    """Raise ValueError for a class that is known to train otherwise on slices."""
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
        return
    if is_per_tensor(optimizer_class):
        raise ValueError(
            f"{optimizer_class.__name__} looks at whole tensors, and a ZeroOptimizer steps slices of a flat buffer: "
            f"it would train otherwise than unsharded. ZeroRedundancyOptimizer({optimizer_class.__name__}) steps whole "
            f"tensors; allow_per_tensor=True takes the slices for what they are"
        )
