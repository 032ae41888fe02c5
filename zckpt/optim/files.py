"""Sharded optimizers in files, and checkpoints opened for a live model and optimizer.

    save(optimizer, "run/step500", model=model)     on every rank of a ZeroRedundancyOptimizer
    load(optimizer, "run/step500", model=model)     the same, at any number of ranks

    save(optimizer, "run/step500")                  on the caller of a DistributedOptimizer: each of its workers writes
    load(optimizer, "run/step500")                  and reads its own, and no state goes through the caller

    save(optimizer, "run/global_step500", model=model)      on every rank of a ZeroOptimizer: a checkpoint that
    load(optimizer, "run/global_step500", model=model)      DeepSpeed loads, too

`load` takes a checkpoint of any format that zckpt reads. Parameters are found by name, and only their bytes are read.

Files of `torch.optim` number their parameters, in the order in which the optimizer was given them. The live optimizer's
order says which number is which, as in torch. The names that shapes and the model's order leave are second: where that
order contradicts shapes, or masters that can be compared with weights have given the names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, cast

import torch
from torch.optim import Optimizer

from zckpt.engine.checking import Checks, watching
from zckpt.errors import LayoutError, UnsupportedError, UsageError, ZckptError
from zckpt.evidence import agree
from zckpt.formats.floats import with_floats
from zckpt.naming import TRANSFORMERS
from zckpt.operations.open import OpenedCheckpoint
from zckpt.operations.open import open as open_checkpoint
from zckpt.operations.places import place_of
from zckpt.optim.ranks import ALONE, Ranks, check_together, find_checksums
from zckpt.optim.states.by_parameter import Asked, OptimizerState, Source, Target
from zckpt.optim.states.several import Optimizers, process_group_of, workers_of
from zckpt.optim.tensors import Model, bare, unwrapped
from zckpt.optim.values import number_of_steps
from zckpt.state import alias_of
from zckpt.state.checkpoint import keys_listed
from zckpt.state.names import aligned, is_number, like_model

SPOILED = "the optimizer is in part the checkpoint's and must not be used: load a sound checkpoint, or make another"


def save(
    optimizer: Optimizer,
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    step: int | None = None,
    beside: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a sharded optimizer and its parameters; each rank or worker writes its own. It appears whole or not at all.

    Parameters
    ----------
    optimizer : ZeroRedundancyOptimizer, ZeroOptimizer or DistributedOptimizer
        For the first two, all ranks call this together.
    path : path-like
        A directory that does not exist, on a file system that all ranks or workers share; or, for ranks, its URL in a
        store. For a ZeroOptimizer, it is a DeepSpeed tag directory, and `latest` next to it will name it.
    model : Module, optional
        Supplies the buffers, and parameter names if the optimizer has none.
    step : int, optional
        Number of steps trained.
    beside : mapping, optional
        What else to save, by key: `lr_scheduler`, a scheduler's state; `extra`, DeepSpeed's client state.
    overwrite : bool
        Replace a directory of the same format.

    Raises
    ------
    UsageError
        The parameters have no names, `step` is no number of steps, or a DistributedOptimizer would be saved to a store.
    TargetError
        The target exists or cannot be written.
    """
    [state] = Optimizers(optimizer, {} if model is None else bare(model).names()).states.values()
    state.write(Target(place_of(path), model, number_of_steps(step), beside or {}, overwrite))


def load(
    optimizer: Optimizer,
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    names: Sequence[str] | None = None,
    verify: bool = True,
) -> None:
    """Load state and hyperparameters from a checkpoint of any format.

    Parameters keep their values, except that a ZeroOptimizer's are set from its masters.

    Parameters
    ----------
    optimizer : ZeroRedundancyOptimizer, ZeroOptimizer or DistributedOptimizer
    path : path-like
    model : Module, optional
        Supplies parameter names, if the optimizer has none.
    names, verify : optional
        As for `zckpt.load`.

    Raises
    ------
    UsageError
        The checkpoint has other parameters; the message names some.
    SourceError
        It cannot be read; raised on all ranks, if on one. The optimizer is unchanged, unless the message says
        otherwise.
    """
    asked, of_model = Asked(names=names), None if model is None else bare(model)
    optimizers = Optimizers(optimizer, {} if of_model is None else of_model.names())
    ranks = Ranks(process_group_of(optimizer), purpose="" if workers_of(optimizer) is None else ALONE)
    checks = Checks()

    def prepared() -> OptimizerState:
        known = () if of_model is None else of_model.parameters
        tied = {} if of_model is None else of_model.roles({})[0]
        checkpoint = open_for(path, known, optimizers.order, asked, tied, model=model)
        if verify:
            find_checksums(checks, checkpoint, ranks)
        [state] = optimizers.restore(Source.of(checkpoint, os.fspath(path), asked))
        state.check()
        return state

    with watching(checks):
        state = ranks.do(prepared)
        ranks.do(state.read)
        check_together(checks, ranks, os.fspath(path))
    ranks.do(state.take, spoiled=SPOILED)
    ranks.do(state.share, spoiled=SPOILED)


# --- opening

Order = Sequence[Sequence[str]]
"""Names of the parameters of each param group, in the optimizer's order."""

NONE: Mapping[str, str] = {}


def open_for(
    path: str | os.PathLike[str],
    live: Collection[str],
    order: Order,
    asked: Asked,
    tied: Mapping[str, str] = NONE,
    *,
    model: Model = None,
    notes: list[str] | None = None,
) -> OpenedCheckpoint:
    """Open a checkpoint under the names of a live model, as far as they are in it.

    Parameters
    ----------
    live : collection of str
        Names of the model's tensors.
    order : sequence of sequence of str
        Of the live optimizer; empty: there is none.
    asked : Asked
    tied : mapping of str to str, optional
        Further names of the model's parameters, with the first of each; the checkpoint may have any.
    model : Module, optional
        Where it is one of transformers, names of its files, those that a map gives too, become those in memory.
    notes : list of str, optional
        Gets what to know of that.

    Raises
    ------
    UsageError
        Its optimizer's parameters are only numbered, and neither order nor shapes give all names.
    SourceError
        It cannot be read; or (UnsupportedError) has state of an optimizer that is each rank's own.
    """
    own = [*chain(*order)]
    names, naming = asked.names, asked.naming
    renamed = names is not None or naming.changes
    found = _open_renamed(path, order, asked, tied) if renamed else _open(path, order, asked, tied)
    if asked.dequantize:
        [found] = with_floats(found)
    if renamed:
        found = cast("OpenedCheckpoint", naming.of(found)[0])  # which is of the same class
    lacks = {*live} - {*found.names}
    if isinstance(model, torch.nn.Module) and naming.map != TRANSFORMERS and lacks:
        from zckpt.naming.installed import as_live

        changed, told = as_live(found, unwrapped(model), order=bool(own), told=names is not None)
        found = cast("OpenedCheckpoint", changed)
        if notes is not None:
            notes += told
    like_model(found, list(dict.fromkeys([*live, *own])))
    for alias, name in tied.items():
        if alias in found.parameters and name not in found.parameters:
            found.parameters[name] = alias_of(found.owner(alias), name)
    if found.per_rank and order:
        raise UnsupportedError(
            f"{keys_listed(found.per_rank)}: each rank had its own, for the elements that it held, and no optimizer "
            "here can load it",
            path=path,
            advice="load only the model, or resume in the program that saved it",
        )
    return found


def _in_order(found: OpenedCheckpoint, order: Order) -> OpenedCheckpoint:
    """Give numbers that were carried along, as `convert` does, the names at their places in the optimizer's groups."""
    groups = [group.parameters for group in found.param_groups]
    if all(name in found.parameters for some in groups for name in some):
        return found
    filed = {ours: its for its, ours in aligned(chain(*order), found.parameters).items()}
    order = [[filed.get(name, name) for name in own] for own in order]  # an adapter's have other names in files
    if [len(some) for some in groups] != [len(own) for own in order]:
        return found
    for its, ours in zip(chain(*groups), chain(*order), strict=True):
        one, number = found.parameters.get(ours), found.unnamed.get(its)
        is_numbered = its not in found.parameters and is_number(its.rpartition(".")[2])  # behind an optimizer's name
        fits = one is not None and (number is None or agree(number.shape, one.shape))
        if one is None or (its != ours and not (is_numbered and one.group is None and fits)):
            return found
    for index, (group, own) in enumerate(zip(found.param_groups, order, strict=True)):
        for its, ours in zip(group.parameters, own, strict=True):
            owner, number = found.parameters[ours], found.unnamed.pop(its, None)
            owner.group = index
            if number is not None:
                owner.slots |= number.slots
                owner.state |= number.state
        group.parameters = list(own)
    return found


def _as_filed(order: Order, tied: Mapping[str, str], names: Iterable[str]) -> Order:
    """Return an order with the further name of each tied parameter of which a file has no other."""
    there = {*aligned([*chain(*order), *tied], names).values()}
    others = {name: alias for alias, name in tied.items() if alias in there and name not in there}
    return [[others.get(name, name) for name in own] for own in order]


def _open_renamed(
    path: str | os.PathLike[str], order: Order, asked: Asked, tied: Mapping[str, str]
) -> OpenedCheckpoint:
    """Open a checkpoint that is to be renamed; the live order says of numbers what it does where names are the same.

    It says nothing where names are given, or a map arranges live parameters otherwise.
    """
    found = open_checkpoint(path, tag=asked.tag, names=asked.names)
    if asked.names is not None or not (found.is_numbered or found.unnamed):
        return found
    told = {new: old for old, new in asked.naming.traced(found).names.items()}
    order = _as_filed(order, tied, told)
    theirs = {ours: told[new] for new, ours in aligned(chain(*order), told).items()}
    if not all(name in theirs for name in chain(*order)):
        return found
    return _open(path, [[theirs[name] for name in own] for own in order], asked, NONE)


def _open(path: str | os.PathLike[str], order: Order, asked: Asked, tied: Mapping[str, str]) -> OpenedCheckpoint:
    """Open a checkpoint; where it has only numbers, under the optimizer's names, unless what it has says otherwise."""
    own = [*chain(*order)]
    try:
        found = open_checkpoint(path, tag=asked.tag)
    except (UnsupportedError, LayoutError):
        if own:
            with suppress(ZckptError):
                return open_checkpoint(path, tag=asked.tag, names=own)
        raise
    order = _as_filed(order, tied, found.parameters) if tied else order
    own = [*chain(*order)]
    if not own or not found.is_numbered:
        return _in_order(found, order)
    known_by_values = any(one.master for one in found.parameters.values())
    theirs, ours = [len(group.parameters) for group in found.param_groups], [len(group) for group in order]
    if not found.unnamed and (theirs != ours or known_by_values):
        return found
    try:
        if theirs == ours:
            return open_checkpoint(path, tag=asked.tag, names=own)
        raise UsageError(
            "param groups have other sizes", expected=", ".join(map(str, ours)), found=", ".join(map(str, theirs))
        )
    except ZckptError as error:
        if not asked.strict or not found.unnamed:
            return found
        raise UsageError(
            "the checkpoint only numbers the optimizer's parameters, and this optimizer's order does not fit: "
            f"{error.message}",
            path=os.fspath(path),
            expected=error.expected,
            found=error.found,
            advice="create the optimizer as it was saved, or give names=, all parameter names in the saved order",
        ) from error
