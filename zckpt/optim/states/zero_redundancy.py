"""Optimizers that keep whole parameters on ranks or RPC workers, each of which writes its own files of a directory.

optimizer_rank_R.pt          what the local optimizer of a rank, or of a worker, has: {state, param_groups}
model.pt, model_rank_R.pt    the model's tensors, by the first rank; or by each worker its own parameters
metadata.pt                  what these do not say: the order of names, and which worker had which parameter
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zckpt.engine.checking import Checks, Seen, Sum, watched_by, watching
from zckpt.errors import UsageError
from zckpt.formats.remainder import remainder
from zckpt.formats.survey import checksums_by_path
from zckpt.formats.zero_redundancy.directory import KEY, METADATA_NAME, MODEL_NAME, OWNED, rank_name
from zckpt.optim.distributed import DistributedOptimizer, LocalOptimizer
from zckpt.optim.files import open_for
from zckpt.optim.flat_parameters import Bare, Called
from zckpt.optim.param_groups import Names, numbers_of, sync
from zckpt.optim.ranks import Ranks, written_together
from zckpt.optim.states.beside import declared
from zckpt.optim.states.by_parameter import Asked, OptimizerState, Snapshot, Source, Target, stored_groups
from zckpt.optim.states.several import check_file_system
from zckpt.optim.tensors import bare, world_rank
from zckpt.optim.zero.files import write_torch_file
from zckpt.optim.zero_redundancy import ZeroRedundancyOptimizer
from zckpt.state import Checkpoint, ParamGroup, without
from zckpt.storage.durable import written
from zckpt.version import __version__


class PerRank(OptimizerState):
    """The state of an optimizer that is cut by parameter."""

    optimizer: ZeroRedundancyOptimizer

    @property
    def local(self) -> torch.optim.Optimizer:
        """The optimizer that steps this rank's parameters."""
        return self.optimizer.optim

    def is_here(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank has the state of a parameter."""
        return self.optimizer._param_to_rank[parameter] == self.optimizer.rank

    def snapshot(self) -> Snapshot:
        """Return what this rank has, and no other."""
        found = super().snapshot()
        found.shares = [(name, key, replace(one, ranks=(world_rank(),))) for name, key, one in found.shares]
        return found


class ZeroRedundancyState(PerRank):
    """The state of zckpt's own class, which has a format of files."""

    writes = "zero-redundancy"

    def write(self, target: Target) -> None:
        """Write a directory of each rank's share; all ranks call it together."""
        optimizer, names = self.optimizer, self.names()
        ranks = Ranks(optimizer.process_group)
        optimizer._to_local()
        write = write_torch_file if isinstance(target.path, str) else torch.save  # a store gets what has no pickle
        with written_together(target.path, ranks, overwrite=target.overwrite, owned=OWNED) as partial:
            write(_local_state(optimizer.optim), partial / rank_name(optimizer.rank))
            if optimizer.rank == 0:
                trained = dict(self.members())
                its = Bare(trained, trained) if target.model is None else bare(target.model)
                tied, frozen, buffers = its.roles(self.called)
                about = {"tied": tied, "frozen": list(frozen), "buffers": buffers}
                tensors = {
                    key: one.detach() if isinstance(one, torch.Tensor) else one for key, one in its.state.items()
                }
                write(tensors, partial / MODEL_NAME)
                write(_metadata(target, optimizer.world_size, names) | about, partial / METADATA_NAME)


class TorchState(PerRank):
    """The state of torch's class, which keeps what it had of a parameter that a state dict says nothing of."""

    def take(self) -> None:
        """Give the optimizer what was read, and nothing else."""
        self.local.state.clear()
        super().take()


# --- the directory


def _metadata(target: Target, world_size: int, names: Names, **more: object) -> dict[str, Any]:
    """Return the content of `metadata.pt`."""
    saved_by: dict[str, object] = {"origin": {"format": "zero-redundancy", "format_version": f"zckpt {__version__}"}}
    kept = Checkpoint("", "zero-redundancy", step=target.step, details=saved_by, metadata=dict(target.beside))
    about = {"world_size": world_size, "names": names, "shapes": {}, "unnamed": [], **more}
    return {**remainder(kept), KEY: about}


def _local_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = declared(optimizer)
    if found.beside.rest:
        found.refuse("files of this format have no place for it")
    state_dict = optimizer.state_dict()
    groups = [without(group, "param_names") for group in state_dict["param_groups"]]
    return {"state": state_dict["state"], "param_groups": groups}


# --- RPC workers


class WorkersState(OptimizerState):
    """The state of a DistributedOptimizer, whose workers have it all."""

    is_remote = True
    writes = "zero-redundancy"

    def __init__(self, optimizer: DistributedOptimizer, known: Called) -> None:
        del known  # of tensors of this process
        self.optimizer = optimizer

    def names(self) -> Names:
        """Return the names that it was given, which its workers know. Raises UsageError: it was given none."""
        groups = self.optimizer.param_groups
        if not all("param_names" in group for group in groups):
            raise UsageError(
                "the optimizer's parameters have no names", advice="create the optimizer from (name, RRef) pairs"
            )
        return [list(group["param_names"]) for group in groups]

    def groups(self) -> list[ParamGroup]:
        """Return the param groups."""
        return stored_groups(self.optimizer, self.names())

    def snapshot(self) -> Snapshot:
        """Return the param groups: workers have the rest."""
        return Snapshot(self.groups())

    def write(self, target: Target) -> None:
        """Let each worker write its files of a directory; the caller calls it."""
        names = self.names()
        with written([check_file_system(target.path)], overwrite=target.overwrite, owned=OWNED) as [partial]:
            arguments = [(str(partial.resolve()), rank) for rank in range(self.optimizer.num_workers)]
            numbers = self.optimizer.call_each(_save_worker, arguments)
            every = numbers_of(self.optimizer.param_groups)
            held = [
                [[its.index(number) for number in mine] for mine, its in zip(one, every, strict=True)]
                for one in numbers
            ]
            torch.save(_metadata(target, len(held), names, held=held), partial / METADATA_NAME)

    def prepare(self) -> None:
        """Compare the param groups with the checkpoint's."""
        self.settings = self.hyperparameters()

    def read(self) -> None:
        """Let each worker read the state of its parameters into memory of its own."""
        checks, source = watched_by(), self.source
        given = source.path, self.names(), replace(source.asked, strict=True), checks.find is not None
        for parts in self.optimizer.call(_read, *given):
            for one, seen in parts:
                checks.take_over(one, seen)

    def take(self) -> None:
        """Let each worker take what it has read, and take the hyperparameters here."""
        self.optimizer.call(_take)
        sync(self.settings, self.optimizer.param_groups)


def _save_worker(local: LocalOptimizer, directory: str, rank: int) -> list[list[int]]:
    """Write a worker's files; return the numbers of its parameters by group."""
    with local.lock:
        torch.save(_local_state(local.optimizer), Path(directory) / rank_name(rank))
        tensors = {name: p.detach() for name, p in local.named().items()}
        torch.save(tensors, Path(directory) / f"model_rank_{rank}.pt")
    return local.numbers


def _read(local: LocalOptimizer, path: str, order: Names, asked: Asked, verify: bool) -> list[tuple[Sum, list[Seen]]]:
    """Read the state of a worker's parameters, which `_take` takes when all have read theirs; return what was seen."""
    checkpoint = open_for(path, (), order, asked)
    checks = Checks()
    checks.find = checksums_by_path([checkpoint]) if verify else None
    state = OptimizerState(local.optimizer, {})
    elsewhere = frozenset(name for names in order for name in names).difference(*state.names())
    state.restore(Source(checkpoint, path, checkpoint.param_groups, {}, elsewhere=elsewhere))
    state.check()
    with watching(checks):
        state.read()
    local.waiting = state
    checks.refuse()
    return checks.hand_over()


def _take(local: LocalOptimizer) -> None:
    with local.lock:
        local.waiting.take()
        local.waiting = None
