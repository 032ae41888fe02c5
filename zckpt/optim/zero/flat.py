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
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zckpt.engine.tensors import as_bytes
from zckpt.optim import param_groups
from zckpt.optim.param_groups import Group
from zckpt.optim.ranks import broadcast
from zckpt.optim.sharded import ShardedOptimizer
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

PIECE = 1 << 20
"""Elements that are compared, or stepped, at once: at most 4 MiB fit caches, and begin where vector instructions do."""

PIECE_OF_GPU = 1 << 25  # each of them is waited for; takes longer than its kernels' launches


class FlatGroup:
    """One param group's flat buffer, of which the parameters are views, and this rank's partition of its masters.

    Parameters
    ----------
    trained : sequence of Tensor
        In the param group's order. `parameters` has them in the order of the buffer, and `numbers` which of the param
        group's trained parameters each of those is.
    process_group : ProcessGroup
        The ranks that share the buffer.
    optimizer : FlatOptimizer
        Whose options say how it is cut, and where masters are.

    Attributes
    ----------
    pads : list of int, elements
        After each parameter.
    partition : int, elements
        Of each rank, padding included.
    extents : list of list of (int, FlatShare)
        Of each parameter, which rank has which of its elements.
    own : list of FlatShare
        What this rank has.
    flat : Tensor, (world size x partition,)
        Of the model's element type.
    master : Parameter, (partition,)
        What the local optimizer steps.
    gradient : Tensor or None, (partition,)
        Averaged gradients of this rank's partition, of the type they are accumulated in; made when they first come.
    """

    def __init__(
        self,
        trained: Sequence[torch.Tensor],
        process_group: dist.ProcessGroup,
        optimizer: FlatOptimizer,
        *,
        is_expert: bool,
    ) -> None:
        _check(trained)
        self.process_group, self.is_expert = process_group, is_expert
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.numbers = list(range(len(trained)))
        if optimizer.round_robin_gradients:
            self.numbers = round_robin_order(len(trained), self.world_size)
        self.parameters = [trained[number] for number in self.numbers]
        dtype = trained[0].dtype if trained else torch.float32
        device = trained[0].device if trained else torch.device("cpu")
        multiple = max(PARAMETER_ALIGNMENT_NBYTES // dtype.itemsize, 1) if optimizer.parameter_alignment else 1
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.numels = [shape.numel() for shape in self.shapes]
        self.pads = alignment_padding(self.numels, multiple)
        self.starts = flat_starts(self.numels, self.pads)
        self.partition = flat_partition_numel(self.total, self.world_size)
        self.extents: list[list[tuple[int, FlatShare]]] = [[] for _ in self.parameters]
        for rank in range(self.world_size):
            for share in flat_shares(self.numels, self.starts, self.partition, rank):
                self.extents[share.index].append((rank, share))
        self.own = [share for its in self.extents for rank, share in its if rank == self.rank]
        self.gradient: torch.Tensor | None = None
        self.flat = torch.zeros(self.partition * self.world_size, dtype=dtype, device=device)
        master = torch.empty(
            self.partition,
            dtype=dtype if optimizer.fp16_master_weights_and_gradients else torch.float32,
            device="cpu" if optimizer.offload else device,
            pin_memory=optimizer.offload and device.type == "cuda" and self.partition > 0,
        )
        self.point()
        if optimizer.broadcast_weights:
            broadcast_first([self.flat], process_group)
        self.master = torch.nn.Parameter(master.copy_(self.weights))

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
        extents = [slice(0, self.partition)]
        if position is not None:
            extents = [share.of_partition for share in self.own if share.index == position]
        master = self.master.detach()
        piece = PIECE_OF_GPU if master.is_cuda else PIECE
        for one in extents:
            for start in range(one.start, one.stop, piece):
                where = slice(start, min(start + piece, one.stop))
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
                f"a param group has several {what} ({', '.join(sorted(found))}), which one flat buffer cannot hold; "
                "give each its own group"
            )
    if any(isinstance(parameter, DTensor) for parameter in trained):
        raise ValueError(
            "DTensors are not supported: use fully_shard, or give the slices as plain tensors with model_parallel="
        )
    if any(not parameter.dtype.is_floating_point for parameter in trained):
        raise ValueError(f"parameters must have a floating-point type, not {', '.join(sorted(dtypes))}")


def broadcast_first(tensors: Iterable[torch.Tensor], process_group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the elements that its first one has, of whatever type. All of them call it together."""
    if dist.get_world_size(process_group) == 1:
        return
    for tensor in tensors:
        if not tensor.numel():
            continue
        here = tensor.detach()
        wire = as_bytes(here.contiguous())
        broadcast(wire, 0, process_group).wait()
        if not here.is_contiguous():
            here.copy_(wire.view(here.dtype).view(here.shape))


class Member(NamedTuple):
    """A parameter that is trained: which one of a group, in the order of its buffer."""

    group: FlatGroup
    position: int

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter itself."""
        return self.group.parameters[self.position]

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.group.numels[self.position]


class FlatOptimizer(ShardedOptimizer):
    """Param groups of the model's parameters, and a local optimizer of this rank's partition of each.

    Options are those of ZeroOptimizer, and are there before this is made.
    """

    stage: int
    model_parallel: Any
    norm_type: float
    expert_data_parallel_groups: Mapping[str, dist.ProcessGroup]
    round_robin_gradients: bool
    parameter_alignment: bool
    fp16_master_weights_and_gradients: bool
    reduce_bucket_size: int
    reduce_scatter: bool
    overlap_comm: bool
    communication_data_type: torch.dtype | None
    gradient_predivide_factor: float | None
    gradient_accumulation_steps: int
    gradient_accumulation_dtype: torch.dtype | None
    offload: bool
    broadcast_weights: bool
    allow_per_tensor: bool

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        *more: Any,  # of what ShardedOptimizer is given
    ) -> None:
        self._refuse_per_tensor(optimizer_class)
        self.groups: list[FlatGroup] = []
        self._place: dict[torch.Tensor, Member] = {}
        """Where the parameters are that are trained, in the optimizer's order, not that of the buffers."""

        super().__init__(params, optimizer_class, *more)
        self._make_local(list(map(_local_group, self.param_groups, self.groups)))
        self._refuse_per_tensor(type(self.optim))  # which a function may have made
        self._is_made = True

    def _refuse_per_tensor(self, optimizer_class: Any) -> None:
        """Raise ValueError for a class that is known to train otherwise on slices."""
        is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
        if is_class and not self.allow_per_tensor and is_per_tensor(optimizer_class):
            raise ValueError(
                f"{optimizer_class.__name__} looks at whole tensors, but a ZeroOptimizer steps slices of a flat "
                "buffer: training would differ from unsharded training. "
                f"ZeroRedundancyOptimizer({optimizer_class.__name__}) steps whole tensors; allow_per_tensor=True "
                "accepts slices"
            )

    # --- groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group. All ranks must add the same, between steps; they get the weights of the first.

        Parameters that were frozen when their group was made are left out of it; unfrozen, they can be added here.

        Raises
        ------
        TypeError, ValueError
            As `torch.optim.Optimizer`; ValueError for several element types or devices in one group.
        """
        group = param_groups.read_group(param_group)
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        new = set(trained)
        for one in self.param_groups if self._is_made else ():  # where some were frozen, and no flat buffer has them
            kept = [index for index, p in enumerate(one["params"]) if p in self._place or p not in new]
            one.update(param_groups.selected(one, kept))
        super().add_param_group(group)
        self.__dict__.pop("_names", None)
        is_expert, process_group = bool(group.get("moe", False)), self.process_group
        if is_expert:
            name: Any = group.get("name")
            if name not in self.expert_data_parallel_groups:
                raise ValueError(
                    f"the param group of experts {name!r} has no process group in expert_data_parallel_groups"
                )
            process_group = self.expert_data_parallel_groups[name]
        flat = FlatGroup(trained, process_group, self, is_expert=is_expert)
        self.groups.append(flat)
        if self.broadcast_weights:
            broadcast_first([p for p in group["params"] if p not in new], process_group)
        for position in sorted(range(len(trained)), key=flat.numbers.__getitem__):
            self._place[flat.parameters[position]] = Member(flat, position)
        if self._is_made:
            self.optim.add_param_group(_local_group(group, flat))
            self._from_local()

    def adopt_weights(self) -> None:
        """Copy weights that were set since the last step into the masters, as the next step would; others stay."""
        for group in self.groups:
            group.take_weights()

    # --- names

    @cached_property
    def _names(self) -> dict[str, torch.Tensor]:
        if not all("param_names" in group for group in self.param_groups):
            raise ValueError("the parameters have no names: create the optimizer from (name, parameter) pairs")
        pairs = (zip(group["param_names"], group["params"], strict=True) for group in self.param_groups)
        return dict(chain.from_iterable(pairs))

    def names(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, those that are frozen too. Raises ValueError if they have none."""
        return dict(self._names)

    def find(self, name: str) -> Member:
        """Return the group of a parameter and its position there. Raises ValueError for a strange or frozen name."""
        parameter = self._names.get(name)
        if parameter is None:
            raise ValueError(f"no parameter {name}")
        if parameter not in self._place:
            raise ValueError(f"{name} was frozen when the optimizer was created, and has no state")
        return self._place[parameter]


def _local_group(group: Group, flat: FlatGroup) -> Group:
    return {**param_groups.hyperparameters(group), "params": [flat.master]}


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
