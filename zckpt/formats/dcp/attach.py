"""Parameters, and what optimizers hold of them: by name, or by number and a name that is found for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt.errors import UnsupportedError, about, listed
from zckpt.evidence import Evidence, keep_number, note_not_used, note_numbers
from zckpt.formats.dcp.optimizer import Label, OptimizerState, common_values, place, shape_of
from zckpt.state import Checkpoint, ParamGroup


def attach(checkpoint: Checkpoint, optimizers: Sequence[OptimizerState], names: Sequence[str] | None) -> None:
    """Give a checkpoint's parameters the optimizers' slots, and the checkpoint their param groups.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already.
    optimizers : sequence of OptimizerState
    names : sequence of str, optional
        Of the parameters that are only numbered, in the optimizers' order.

    Raises
    ------
    UsageError
        `names` do not fit.
    UnsupportedError
        State of a parameter of which no param group is known.
    """
    known = _names_of_numbers(checkpoint, optimizers, names)
    taken: set[str] = set()
    kept: list[OptimizerState] = []
    unnamed: list[str] = []
    for at, optimizer in enumerate(optimizers):
        _complete(checkpoint, optimizer)
        found = {label: known.get((at, label), f"{optimizer.prefix}{label}") for group in optimizer.groups
                 for label in group.members}  # fmt: skip
        if taken & set(found.values()):
            checkpoint.warnings.append(
                f"{optimizer.path} has parameters of an optimizer before it; its state is not read"
            )
            continue
        taken.update(found.values())
        kept.append(optimizer)
        for group in optimizer.groups:
            index, its = len(checkpoint.param_groups), [found[label] for label in group.members]
            checkpoint.param_groups.append(ParamGroup(group.hyperparameters, its, {}, optimizer.name))
            for label, name in zip(group.members, its, strict=True):
                slots = optimizer.state.get(label, {})
                if name in checkpoint.buffers:  # an optimizer has it, so that it is none
                    checkpoint.parameters[name] = checkpoint.buffers.pop(name)
                parameter = checkpoint.parameters.get(name)
                parameter = parameter or keep_number(checkpoint, name, shape_of(slots), is_kept=bool(slots))
                parameter.group = index
                with about(optimizer.path):
                    place(parameter, slots)
                unnamed += [str(label)] if name in checkpoint.unnamed and isinstance(label, int) else []
    for one, shared in zip(checkpoint.param_groups, common_values(kept), strict=True):
        one.state = shared
    note_numbers(checkpoint, unnamed)


def _complete(checkpoint: Checkpoint, optimizer: OptimizerState) -> None:
    """Put parameters that have state and are in no group into the only group that there is.

    Pipeline stages each list their own parameters under the same key, of which torch saves one rank's list only.
    """
    members = {label for group in optimizer.groups for label in group.members}
    others = [label for label in optimizer.state if label not in members]
    if not others:
        return
    shown = listed(others, most=8)
    if len(optimizer.groups) != 1 or optimizer.is_numbered:
        raise UnsupportedError(f"state of parameters that are in no param group: {shown}", path=optimizer.path)
    optimizer.groups[0].members += others
    checkpoint.warnings.append(f"no list names {shown}, which have state; they are put into the only param group")


def _names_of_numbers(
    checkpoint: Checkpoint, optimizers: Sequence[OptimizerState], names: Sequence[str] | None
) -> dict[tuple[int, Label], str]:
    """Return names for the parameters of which only numbers are known, by the optimizer's place and the number."""
    numbered = {at: one for at, one in enumerate(optimizers) if one.is_numbered}
    if optimizers and not numbered:
        note_not_used(checkpoint, names)
    groups = {at: [[(at, label) for label in group.members] for group in one.groups] for at, one in numbered.items()}
    shapes = {(at, label): shape_of(slots) for at, one in numbered.items() for label, slots in one.state.items()}
    said = Evidence.of(checkpoint, [group for its in groups.values() for group in its], shapes, factored=True)
    if names is not None:
        return said.given(names) if numbered else {}
    found: dict[tuple[int, Label], str] = {}
    for at, one in numbered.items():
        free = {name: shape for name, shape in said.candidates.items() if name not in found.values()}
        own = replace(said, groups=groups[at], candidates=free, factored=False)
        recorded = [(group.hyperparameters.get("param_names"), len(group.members)) for group in one.groups]
        known = own.recorded(
            [str(n) for its, count in recorded if isinstance(its, (list, tuple)) and len(its) == count for n in its]
        )
        checkpoint.is_numbered = checkpoint.is_numbered or not known
        found |= known or own.certain()
    return found
