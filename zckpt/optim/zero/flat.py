"""An optimizer over flat buffers: which group lies where, and the local optimizer of this rank's partitions.

The local optimizer sees one rank's range of a whole param group as one tensor. That is the same training where each
element is stepped by itself, and another one where a norm, a row, a matrix or the whole model decides. Which classes
those are is known here by their names, whoever's they are and whatever is derived from them.

Source: their papers and code. LAMB, LARS, NovoGrad, AdamP, SGDP, Nero: norms of a tensor. Adafactor, CAME, SM3,
Adam-mini: rows, columns or blocks. Muon, Shampoo, SOAP, Kron, GaLore, APOLLO, Dion, Scion: matrices. L-BFGS, Prodigy,
D-Adaptation: all tensors together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zckpt.optim import param_groups
from zckpt.optim.param_groups import Group
from zckpt.optim.zero.flat_group import FlatGroup, broadcast_first, make_group

STAGES = (1, 2)


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
        is_expert = bool(group.get("moe", False))
        process_group = self.process_group
        if is_expert:
            name = group.get("name")
            if name not in self.expert_data_parallel_groups:
                raise ValueError(
                    f"a param group of experts, {name!r}, whose process group is not among expert_data_parallel_groups"
                )
            process_group = self.expert_data_parallel_groups[name]
        on_gpu = any(parameter.is_cuda for parameter in trained)
        return make_group(
            trained,
            process_group,
            is_expert=is_expert,
            round_robin=self.round_robin_gradients,
            alignment=self.parameter_alignment,
            master_dtype=None if self.fp16_master_weights_and_gradients else torch.float32,
            master_device=torch.device("cpu") if self.offload else None,
            pin=self.offload and on_gpu,
            broadcast=self.broadcast_weights,
        )

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
