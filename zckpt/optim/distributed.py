"""An optimizer of parameters that live on several RPC workers; each worker steps its own.

    with dist_autograd.context() as context_id:
        loss = ...
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)

The caller has the param groups, with RRefs for parameters, and numbers all parameters in their order. What it changes
in a group (a learning rate) goes along with the next step. State stays where its parameter is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.optim import Optimizer

from zckpt.errors import ZckptError
from zckpt.optim.param_groups import (
    Group,
    by_tensor,
    check_shapes,
    copied_to_cpu,
    local_dict,
    matched,
    numbered,
    numbers_of,
    parameters_of,
    selected,
    sync,
    with_names,
)
from zckpt.optim.param_groups import hyperparameters as hyperparameters_of
from zckpt.optim.tensors import with_gradients
from zckpt.state import positions

State = dict[int, dict[str, Any]]
Worker = Any
"""A `torch.distributed.rpc.WorkerInfo`, of which torch has no type information."""


class DistributedOptimizer(Optimizer):
    """Step parameters on the workers that own them.

    Parameters
    ----------
    optimizer_class : type
        A `torch.optim.Optimizer`, created on each worker for its parameters.
    params_rref : iterable
        RRefs of parameters, (name, RRef) pairs, or dicts of param groups whose `params` are one of these.
    *args, **kwargs
        Passed to `optimizer_class`.

    Raises
    ------
    Exception
        What the constructor raised on a worker, when all workers have answered.

    Notes
    -----
    Each worker performs steps of several callers one after another; there is no order between workers. Learning rate
    schedulers work as with any optimizer.
    """

    def __init__(
        self, optimizer_class: Callable[..., Optimizer], params_rref: Iterable[Any], *args: Any, **kwargs: Any
    ) -> None:
        given = list(params_rref)
        if not given:
            raise ValueError("an empty parameter list")
        groups = [with_names(group) for group in (given if isinstance(given[0], dict) else [{"params": given}])]
        self.__setstate__({"defaults": {}, "state": {}, "param_groups": groups})
        made = [
            rpc.rpc_async(worker, _make, args=(optimizer_class, self._groups_of(worker), args, kwargs))
            for worker in dict.fromkeys(parameter.owner() for parameter in parameters_of(groups))
        ]
        self.remote_optimizers: list[Any] = _wait(made)
        for defaults, theirs in self.call(LocalOptimizer.hyperparameters)[:1]:
            self.defaults = defaults
            sync(theirs, self.param_groups)

    def _groups_of(self, worker: Worker) -> list[Group]:
        """Return the param groups with the parameters of one worker, and their numbers."""
        groups = []
        for group, numbers in zip(self.param_groups, numbers_of(self.param_groups), strict=True):
            mine = [i for i, parameter in enumerate(group["params"]) if parameter.owner() == worker]
            groups.append({**selected(group, mine), "numbers": [numbers[i] for i in mine]})
        return groups

    @property
    def num_workers(self) -> int:
        """Number of workers that own a parameter."""
        return len(self.remote_optimizers)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function with each worker's LocalOptimizer, on that worker.

        Raises
        ------
        Exception
            What a worker raised, when all workers have answered; an error for the user as it was.
        """
        return self.call_each(function, [args] * self.num_workers)

    def call_each(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a function as `call` does, with separate arguments for each worker."""
        return _wait(
            [
                rpc.rpc_async(one.owner(), _on_worker, args=(one, function, *mine))
                for one, mine in zip(self.remote_optimizers, arguments, strict=True)
            ]
        )

    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient in a context of `torch.distributed.autograd`.

        Parameters
        ----------
        context_id : int

        Raises
        ------
        Exception
            What a worker raised, when all workers have answered; an error for the user as it was.
        """
        dist_autograd._is_valid_context(context_id)  # type: ignore[attr-defined]
        hyperparameters = list(map(hyperparameters_of, self.param_groups))
        for theirs in self.call(LocalOptimizer.step, context_id, hyperparameters)[:1]:
            sync(theirs, self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `grad` of all parameters. Gradients of `torch.distributed.autograd` are in its contexts, not there."""
        self.call(LocalOptimizer.zero_grad, set_to_none)

    def add_param_group(self, param_group: Group) -> None:  # noqa: ARG002
        """Raise: workers get all parameters in the constructor."""
        raise RuntimeError("give all param groups to the constructor: create a new optimizer and load this one's state")

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on the caller's CPU, as in `torch.optim`, numbered over all groups."""
        state: State = {}
        for theirs in self.call(LocalOptimizer.state):
            state.update(theirs)
        return {"state": dict(sorted(state.items())), "param_groups": numbered(self.param_groups)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the whole state; each worker gets that of its own parameters.

        Raises
        ------
        ValueError
            It belongs to another optimizer; nothing has changed on any worker.
        """
        numbers = positions(matched(state_dict, self.param_groups, by_name=False))
        state = {numbers[number]: values for number, values in state_dict["state"].items()}
        held = [self._groups_of(one.owner()) for one in self.remote_optimizers]
        shares = [{n: state[n] for group in its for n in group["numbers"] if n in state} for its in held]
        hyperparameters = list(map(hyperparameters_of, state_dict["param_groups"]))
        for function in (LocalOptimizer.check, LocalOptimizer.load):
            self.call_each(function, [(share, hyperparameters) for share in shares])
        sync(hyperparameters, self.param_groups)


class LocalOptimizer:
    """The optimizer of one worker's parameters, on that worker."""

    lock = threading.Lock()
    """Of this process: several callers may step the same parameters."""

    def __init__(
        self, optimizer_class: Callable[..., Optimizer], groups: list[Group], args: Sequence[Any], kwargs: Group
    ) -> None:
        self.numbers = [group.pop("numbers") for group in groups]
        for group in groups:
            group["params"] = [parameter.local_value() for parameter in group["params"]]
        self.optimizer = optimizer_class(groups, *args, **kwargs)
        self.waiting: Any = None
        """State that has been read, until all workers have read theirs."""

    def named(self) -> dict[str, torch.Tensor]:
        """Return this worker's parameters by name."""
        groups = self.optimizer.param_groups
        return dict(
            zip(chain.from_iterable(group["param_names"] for group in groups), parameters_of(groups), strict=True)
        )

    def numbered(self) -> dict[torch.Tensor, int]:
        """Return the number of each of this worker's parameters."""
        return by_tensor(self.optimizer.param_groups, self.numbers)

    def step(self, context_id: int, hyperparameters: list[Group]) -> list[Group]:
        """Step with the gradients of a context; `grad` of no parameter is changed."""
        gradients = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        with self.lock:
            sync(hyperparameters, self.optimizer.param_groups)
            with with_gradients({parameter: gradients.get(parameter) for parameter in self.numbered()}):
                self.optimizer.step()
            return list(map(hyperparameters_of, self.optimizer.param_groups))

    def hyperparameters(self) -> tuple[Group, list[Group]]:
        """Return the defaults, and what the param groups say besides their parameters."""
        return dict(self.optimizer.defaults), list(map(hyperparameters_of, self.optimizer.param_groups))

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear `grad` of this worker's parameters."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state(self) -> State:
        """Return this worker's state on the CPU."""
        with self.lock:
            return {
                number: copied_to_cpu(self.optimizer.state[parameter])
                for parameter, number in self.numbered().items()
                if parameter in self.optimizer.state
            }

    def check(self, state: State, hyperparameters: list[Group]) -> None:  # noqa: ARG002  # as `load`
        """Raise ValueError unless state fits this worker's parameters."""
        check_shapes(state, self.numbered())

    def load(self, state: State, hyperparameters: list[Group]) -> None:
        """Load state by number, laid out in memory as its parameter is; what is not there is cleared."""
        with self.lock:
            own = self.optimizer.param_groups
            saved = [{**hyperparameters_of(its), **new} for its, new in zip(own, hyperparameters, strict=True)]
            given = {"state": state, "param_groups": saved}
            self.optimizer.load_state_dict(local_dict(given, self.numbered(), own))


def _make(optimizer_class: Callable[..., Optimizer], groups: list[Group], args: Sequence[Any], kwargs: Group) -> Any:
    return rpc.RRef(LocalOptimizer(optimizer_class, groups, args, kwargs))


@dataclass(frozen=True)
class _Refused:
    """An error for the user, which RPC would send as a text with the worker's stack."""

    error: ZckptError


def _on_worker(optimizer: Any, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(optimizer.local_value(), *args)
    except ZckptError as error:
        return _Refused(error)


def _wait(futures: Sequence[Any]) -> list[Any]:
    """Return all results, or raise the first error when all have answered."""
    results: list[Any] = []
    errors: list[Exception] = []
    for future in futures:
        try:
            result = future.wait()
            if isinstance(result, _Refused):
                errors.append(result.error)
            results.append(result)
        except Exception as error:  # noqa: BLE001  # whatever a worker's optimizer raises
            errors.append(error)
    if errors:
        raise errors[0]
    return results
