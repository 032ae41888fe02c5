"""What sharded optimizers have in common: param groups that all ranks know, and a local optimizer of a rank's share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from zckpt.optim import param_groups
from zckpt.optim.param_groups import Group


class ShardedOptimizer(Optimizer, Joinable, JoinHook):
    """An optimizer of which each rank steps its share, with `optim`, and has the state of that."""

    optim: Optimizer

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None,
        defaults: dict[str, Any],
    ) -> None:
        self._optimizer_class = optimizer_class
        self._is_made = False
        Joinable.__init__(self)
        found = dist.group.WORLD if process_group is None else process_group
        if found is None:
            raise ValueError("no process group: call torch.distributed.init_process_group first")
        self.process_group, self.rank, self.world_size = found, dist.get_rank(found), dist.get_world_size(found)
        if self.rank < 0:
            raise ValueError("this process is not in the process group")
        self._given_defaults = defaults
        Optimizer.__init__(self, params, dict(defaults))  # which adds each param group
        if len({"param_names" in group for group in self.param_groups}) > 1:  # as torch since 2.6
            raise ValueError("either all param groups must name their parameters, or none")

    def _make_local(self, groups: Sequence[Group]) -> None:
        """Make the local optimizer, whose defaults and hyperparameters are everyone's."""
        self.optim = self._optimizer_class(groups, **self._given_defaults)
        if not isinstance(self.optim, Optimizer):
            raise ValueError(  # noqa: TRY004  # as torch
                f"optimizer_class must create a torch.optim.Optimizer, not {torch.typename(self.optim)}"
            )
        self.defaults = {**self.optim.defaults, **self._given_defaults}
        self._from_local()

    def _to_local(self) -> None:
        """Give the local optimizer the hyperparameters that the param groups have, which a scheduler may have set."""
        param_groups.sync(self.param_groups, self.optim.param_groups)

    def _from_local(self) -> None:
        """Give the param groups the hyperparameters that the local optimizer has, which a step may have changed."""
        param_groups.sync(self.optim.param_groups, self.param_groups)

    @property
    def state(self) -> Any:
        """State of this rank's share: that of its local optimizer."""
        return self.optim.state if "optim" in self.__dict__ else {}

    @state.setter
    def state(self, value: Any) -> None:
        if "optim" in self.__dict__:  # torch's constructor sets it before
            self.optim.state = value

    def _through(self, hooks: Mapping[int, Any], *given: Any) -> Any:
        """Call hooks of state dicts, and return what they make of what they are given."""
        for hook in hooks.values():
            made = hook(self, *given)
            given = given if made is None else (made,)
        return given[0] if given else None

    # --- uneven inputs

    @abstractmethod
    def main_hook(self) -> None:
        """Take part in a step of ranks that still have inputs."""

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002  # for all that join together
        """Return what a rank without inputs does while others train: it takes part in their steps."""
        return self

    @property
    def join_device(self) -> torch.device:
        """The device that ranks agree on: that of the first parameter."""
        devices = (parameter.device for parameter in param_groups.parameters_of(self.param_groups))
        return next(devices, torch.device("cpu"))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that join."""
        return self.process_group

    # --- what cannot be

    def __deepcopy__(self, _: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is bound to its process group and its parameters' memory, so it cannot be "
            "copied or pickled: create a new one from the copied parameters and load this one's state_dict()"
        )

    __reduce_ex__ = __deepcopy__
