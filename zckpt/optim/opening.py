"""A checkpoint opened for a live model and optimizer: under the model's names, and with names for numbered parameters.

Files of `torch.optim` number their parameters, in the order in which the optimizer was given them. The live optimizer's
order says which number is which, as in torch. The names that shapes and the model's order leave are second: where that
order contradicts shapes, or masters that can be held against weights have given the names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from zckpt.errors import LayoutError, UnsupportedError, UsageError, ZckptError
from zckpt.operations.open import OpenedCheckpoint
from zckpt.operations.open import open as open_checkpoint
from zckpt.state import MASTER
from zckpt.state.checkpoint import keys_listed
from zckpt.state.names import like_model

Order = Sequence[Sequence[str]]
"""Names of the parameters of each param group, in the optimizer's order."""


def open_for(
    path: str | os.PathLike[str],
    live: Collection[str],
    order: Order,
    *,
    tag: str | None = None,
    names: Sequence[str] | None = None,
    strict: bool = True,
) -> OpenedCheckpoint:
    """Open a checkpoint under the names of a live model, as far as they are in it.

    Parameters
    ----------
    path : path-like
    live : collection of str
        Names of the model's tensors.
    order : sequence of sequence of str
        Of the live optimizer; empty: there is none.
    tag : str, optional
        As for `open`.
    names : sequence of str, optional
        Given by the user, in the order of the optimizer that was saved.
    strict : bool
        Raise where numbers have no certain names, and do not leave them without names.

    Raises
    ------
    UsageError
        Its optimizer's parameters are only numbered, and neither order nor shapes give all names.
    SourceError
        It cannot be read; or (UnsupportedError) has state of an optimizer that is each rank's own.
    """
    found = _open(path, live, order, tag=tag, names=names, strict=strict)
    if found.per_rank and order:
        raise UnsupportedError(
            f"{keys_listed(found.per_rank)}: each rank had its own, of the elements that it held, and no optimizer "
            f"here can take it over",
            path=path,
            advice="load the model alone, or resume in the program that saved it",
        )
    return found


def _open(
    path: str | os.PathLike[str],
    live: Collection[str],
    order: Order,
    *,
    tag: str | None,
    names: Sequence[str] | None,
    strict: bool,
) -> OpenedCheckpoint:
    every = list(dict.fromkeys([*live, *(name for group in order for name in group)]))
    if names is not None:
        return _like(open_checkpoint(path, tag=tag, names=names), every)
    own = [name for group in order for name in group]
    try:
        found = open_checkpoint(path, tag=tag)
    except (UnsupportedError, LayoutError) as error:
        if not own:
            raise
        try:
            return _like(open_checkpoint(path, tag=tag, names=own), every)
        except ZckptError:
            raise error from None
    if not own or not found.is_numbered:
        return _like(found, every)
    try:
        return _like(_numbered(found, path, order, tag), every)
    except UsageError:
        if strict:
            raise
        return _like(found, every)


def _like(found: OpenedCheckpoint, names: Sequence[str]) -> OpenedCheckpoint:
    like_model(found, names)
    return found


def _numbered(found: OpenedCheckpoint, path: str | os.PathLike[str], order: Order, tag: str | None) -> OpenedCheckpoint:
    """Return a checkpoint with the optimizer's names for numbers, unless what is known already says otherwise."""
    known_by_values = any(MASTER in one.slots for one in found.parameters.values())
    theirs, ours = [len(group.parameters) for group in found.param_groups], [len(group) for group in order]
    if not found.unnamed and (theirs != ours or known_by_values):
        return found
    if theirs != ours:
        raise UsageError(
            "the optimizer's parameters are only numbered, and this optimizer's param groups are of other sizes",
            path=os.fspath(path),
            expected=", ".join(map(str, ours)),
            found=", ".join(map(str, theirs)),
            advice="make the optimizer of the parameters that were saved",
        )
    try:
        return open_checkpoint(path, tag=tag, names=[name for group in order for name in group])
    except ZckptError as error:
        if not found.unnamed:
            return found
        raise UsageError(
            f"the optimizer's parameters are only numbered, and this optimizer's order does not fit: {error.message}",
            path=os.fspath(path),
            expected=error.expected,
            found=error.found,
            advice="give names=, those of all parameters in the order in which they were saved",
        ) from error
