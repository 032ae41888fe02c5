"""ZeroRedundancyOptimizer, zckpt's and torch's: each rank has the state of whole parameters in a local optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from zckpt.optim.shares import Share, world_rank
from zckpt.optim.states.by_parameter import ByParameter, ByParameterRestoring
from zckpt.optim.states.protocol import Restoring, Source, Target
from zckpt.optim.zero_redundancy import ZeroRedundancyOptimizer, files


class PerRank(ByParameter):
    """The state of an optimizer that is cut by parameter."""

    optimizer: ZeroRedundancyOptimizer

    def _state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        return self.optimizer.optim.state

    def _is_here(self, parameter: torch.Tensor) -> bool:
        return self.optimizer._param_to_rank[parameter] == self.optimizer.rank

    def slots(self, name: str) -> dict[str, Share]:
        """Return each slot of a parameter, if it is this rank's: no other has it."""
        return {key: replace(share, ranks=(world_rank(),)) for key, share in super().slots(name).items()}


class ZeroRedundancyState(PerRank):
    """The state of zckpt's own class, which has a format of files."""

    writes = "zero-redundancy"

    def write(self, target: Target) -> None:
        """Write a directory of each rank's part; all ranks call it together."""
        files.save(self.optimizer, self.names(), target)


class TorchState(PerRank):
    """The state of torch's class, which keeps what it had of a parameter that a state dict says nothing of."""

    def restore(self, source: Source) -> Restoring:
        """Find out what the optimizer needs of a checkpoint."""
        return _TorchRestoring(source, self.optimizer, self._called, is_here=self._is_here)


class _TorchRestoring(ByParameterRestoring):
    def take(self) -> None:
        """Give the optimizer what was read, and nothing else."""
        local: torch.optim.Optimizer = self.optimizer.optim  # type: ignore[attr-defined]  # torch's class has it
        local.state.clear()
        super().take()
