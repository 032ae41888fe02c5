"""Which state an optimizer's step wants, and whether what a checkpoint has is that: known before anything is changed.

A class of `torch.optim` makes its state in the first step, and later ones take for granted that it is there: one with
other keys breaks there, or in `load_state_dict`, when weights have been loaded. Of the classes in `WANTED` the keys are
known. Any other class takes the state first in a copy of its object: with what it holds and copies of parameters, where
`load_state_dict` is its own.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import field
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.errors import UsageError, listed
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.immutable import immutable
from zckpt.optim.flat_parameters import Called
from zckpt.optim.param_groups import Group, hyperparameters, parameters_of
from zckpt.optim.states.beside import Beside
from zckpt.state import positions, without

STEP = "step"
"""Which torch casts by rules of its own."""

HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
"""Dicts as torch has them: `load_state_dict` may add a hook to its own object."""


@immutable
class Keys:
    """What a class wants: always, where a param group has a setting, of matrices, of all but matrices; and may have.

    What it may have, its step makes itself: tensors, and lists of them.
    """

    always: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    matrices: str = ""
    others: str = ""
    optional: str = ""
    lists: str = ""

    def required(self, group: Group, dim: int) -> set[str]:
        """Return the keys of a parameter without which no step can go on.

        `group`: the settings that the optimizer will have; `dim`: the number of the parameter's dimensions.
        """
        more = [key for setting, key in self.settings.items() if group.get(setting)]
        return {*self.always.split(), *more, *(self.matrices if dim > 1 else self.others).split()}


MOMENTS = "step exp_avg exp_avg_sq"

WANTED = {
    "Adam": Keys(MOMENTS, {"amsgrad": "max_exp_avg_sq"}),
    "AdamW": Keys(MOMENTS, {"amsgrad": "max_exp_avg_sq"}),
    "Adadelta": Keys("step square_avg acc_delta"),
    "Adafactor": Keys("step", matrices="row_var col_var", others="variance"),
    "Adagrad": Keys("step sum"),
    "Adamax": Keys("step exp_avg exp_inf"),
    "ASGD": Keys("step eta mu ax"),
    "Muon": Keys(optional="momentum_buffer"),
    "NAdam": Keys(f"{MOMENTS} mu_product"),
    "RAdam": Keys(MOMENTS),
    "RMSprop": Keys("step square_avg", {"momentum": "momentum_buffer", "centered": "grad_avg"}),
    "Rprop": Keys("step prev step_size"),
    "SGD": Keys(optional="momentum_buffer"),
    "SparseAdam": Keys(MOMENTS),
    "LBFGS": Keys(  # of its first parameter
        "func_evals n_iter", optional="d t H_diag prev_flat_grad prev_loss", lists="al old_dirs old_stps ro"
    ),
    "FusedAdam": Keys(MOMENTS),
    "DeepSpeedCPUAdam": Keys(MOMENTS),
    "DeepSpeedCPUAdagrad": Keys("step exp_avg_sq"),
    "FusedLion": Keys("step exp_avg"),
    "DeepSpeedCPULion": Keys("step exp_avg"),
}
"""By the class whose step it is.

torch 2.5 to 2.13, where a test holds it against the classes, and DeepSpeed 0.19.
"""


def wanted(optimizer: Optimizer) -> Keys | None:
    """Return what an optimizer's step wants; None of a class that is not known."""
    step = inspect.unwrap(type(optimizer).step)  # torch wraps it to profile it
    is_known = step.__module__.startswith(("torch.optim.", "deepspeed.ops."))
    return WANTED.get(step.__qualname__.partition(".")[0]) if is_known else None


def check_keys(optimizer: Optimizer, group: Group, name: str, dim: int, values: Mapping[str, object]) -> None:
    """Raise UsageError if an optimizer cannot go on with the state that a checkpoint has of a parameter.

    `group`, `dim`: as for `Keys.required`; `values`: by key. No state at all is none that is wrong: the optimizer makes
    it in the next step. What is quantised is refused by who makes room for it.
    """
    found = [key for key, value in values.items() if value is not None]
    its = wanted(optimizer)
    if its is None or not found or any(map(holds_tensors, values.values())):
        return
    required = its.required(group, dim)
    usable = {*required, *its.optional.split(), *its.lists.split()}
    if required <= set(found) and not usable.isdisjoint(found):
        return
    raise _another(optimizer, name, found, expected=listed(sorted(usable)))


def _another(optimizer: Optimizer, name: str, found: Collection[str], *, expected: str) -> UsageError:
    return UsageError(
        f"{type(optimizer).__name__} cannot continue from the state of {name}",
        expected=expected,
        found=listed(list(found)),
        advice="give the saved optimizer, or load only the model",
    )


def makes_state(optimizer: Optimizer, group: Group, dim: int) -> bool:
    """Tell whether an optimizer that goes on without state of a parameter may do other than one that had it."""
    its = wanted(optimizer)
    return its is None or bool(its.required(group, dim))


def rehearse(
    optimizer: Optimizer,
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    settings: Sequence[Group],
    called: Called,
    beside: Beside,
) -> None:
    """Raise UsageError if an optimizer's `load_state_dict` fails, which is called on a copy.

    One that cannot be copied, since it holds a lock or a process group, is not asked.

    `state`: by parameter, with tensors; `settings`: each param group's hyperparameters; `called`: names of parameters,
    for a message; `beside`: what else is in the state dict.
    """
    cls = type(optimizer)
    of_torch = cls.load_state_dict is Optimizer.load_state_dict
    if of_torch and (not state or wanted(optimizer) is not None):
        return
    numbers = positions(parameters_of(optimizer.param_groups))
    groups = [
        {**group, **its, "params": [numbers[one] for one in group["params"]]}
        for group, its in zip(optimizer.param_groups, map(hyperparameters, settings), strict=True)
    ]
    try:
        if of_torch:  # which changes nothing that it shares with this copy
            copy = object.__new__(cls)
            vars(copy).update(vars(optimizer), **{hook: OrderedDict() for hook in HOOKS}, state=defaultdict(dict))
            copy.param_groups = [dict(group) for group in optimizer.param_groups]
        else:
            memo = {id(one): torch.nn.Parameter(one.detach().clone(), one.requires_grad) for one in numbers}
            copy = _whole_copy(optimizer, memo)
    except Exception:  # noqa: BLE001  # whatever an object of a user's says that is not to be copied
        return
    given = {numbers[one]: dict(its) for one, its in state.items() if one in numbers}
    try:
        copy.load_state_dict(beside.state_dict(given, groups))
    except Exception as error:
        keys = list(dict.fromkeys(key for its in given.values() for key in its))
        why = f"what its load_state_dict accepts ({type(error).__name__}: {error})"
        name = next((called[one] for one in state if one in called), "its parameters")
        raise _another(optimizer, name, keys, expected=why) from error


def _whole_copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy of all that an optimizer has, which its own `__getstate__` need not tell.

    `memo` has copies by the ids of what they are of, as in `copy.deepcopy`.
    """
    made = memo[id(optimizer)] = object.__new__(type(optimizer))
    for one in vars(optimizer).values():
        if isinstance(one, Optimizer) and id(one) not in memo:
            _whole_copy(one, memo)
    held = without(vars(optimizer), *HOOKS)
    vars(made).update(deepcopy(held, memo), **{hook: OrderedDict() for hook in HOOKS})
    return made


def single_numbers(state: Mapping[torch.Tensor, Mapping[str, Any]]) -> set[str]:
    """Return the keys of which a parameter has one number: of a parameter that is one, its shape does not say which."""
    every = ((key, value) for parameter, its in state.items() if parameter.dim() for key, value in its.items())
    return {key for key, value in every if isinstance(value, torch.Tensor) and not value.dim()}


def keep_types(optimizer: Optimizer, given: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """Give back what `load_state_dict` has made of values that it must not cast: they stay as they were.

    torch casts all tensors to the parameter's type, integers too, and single numbers of a whole parameter (NAdam's
    `mu_product`, in float32 beside parameters in 16 bits); and makes anew whatever can be iterated over: of a text the
    name of a generator, of a deque one without a limit. `given`: what the optimizer was given, by parameter.
    """
    single = single_numbers(given)
    for parameter, its in given.items():
        loaded = optimizer.state.get(parameter, {})
        for key in its.keys() & loaded.keys() - {STEP}:
            loaded[key] = _kept(its[key], loaded[key], parameter.is_complex(), may_cast=key not in single)


def _kept(value: Any, now: Any, is_complex: bool, *, may_cast: bool = True) -> Any:  # whatever a state dict has
    """Return `now`, in whose lists and dicts, which the optimizer may hold elsewhere, is put back what was cast."""
    if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
        is_cast = may_cast and (value.is_floating_point() or (value.is_complex() and is_complex))
        return now if is_cast or now.dtype == value.dtype else value.to(now.device)
    if isinstance(value, dict) and isinstance(now, dict) and value.keys() == now.keys():
        for key, one in value.items():
            if (its := _kept(one, now[key], is_complex)) is not now[key]:
                now[key] = its
        return now
    if type(value) in (list, tuple, deque) and type(now) is type(value) and len(now) == len(value):
        made = [_kept(*pair, is_complex) for pair in zip(value, now, strict=True)]
        if isinstance(now, list):
            now[:] = made
        elif not all(map(is_, made, now)) or (isinstance(now, deque) and now.maxlen != value.maxlen):
            return deque(made, value.maxlen) if isinstance(now, deque) else tuple(made)
        return now
    return value if isinstance(value, str) else now
