"""The shares of all ranks put together: rows of AdamW's moments, and matrices of Muon's stacks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from zckpt.errors import LayoutError, UnsupportedError, about
from zckpt.evidence import NAMES_ADVICE, Evidence, agree
from zckpt.formats.companions import MAXIMUM_JSON_NBYTES
from zckpt.formats.nanochat.directory import Step
from zckpt.formats.torch_files.optimizer import shared_values
from zckpt.formats.torch_files.reader import add_model, step_of
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.formats.zero_redundancy.reader import RankFile, read_ranks
from zckpt.state import Checkpoint, Duplicate, GivenNames, Parameter, ParamGroup, Shape, Slot, differ, without
from zckpt.state.inventory import CARRIED, FOREIGN, Claim
from zckpt.state.partition import rows_of_rank, stack_of_rank
from zckpt.state.spans import PaddingSpan
from zckpt.state.views import concat, narrow, reshape
from zckpt.storage.files import json_object
from zckpt.torchfile import Tensor, read_torchfile

KIND, ADAMW, MUON = "kind", "adamw", "muon"

COMPILED = "_orig_mod."

MATRICES = "transformer.h."

ORDER = ("lm_head.", "transformer.wte.", "value_embeds.", "resid_lambdas", "x0_lambdas", "smear_gate.", "smear_lambda",
         "backout_lambda")  # fmt: skip
"""What the names of AdamW's parameters begin with, in the order of its groups."""


def read(place: Step, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of a step.

    `names`: of the optimizer's parameters in its order, where they are not nanochat's. Raises UnsupportedError: param
    groups are not nanochat's; LayoutError: ranks have other shares than theirs, or contradict each other.
    """
    checkpoint = Checkpoint(str(place.path), "nanochat", origin=place)
    add_model(checkpoint, place.model)
    checkpoint.metadata["meta"] = meta = json_object(place.meta, "nanochat's metadata", most=MAXIMUM_JSON_NBYTES)
    checkpoint.claims[str(place.meta)] = Claim(CARRIED, "meta")
    checkpoint.claims |= {str(path): Claim(FOREIGN, "of another step") for path in place.others}
    if place.ranks and isinstance(read_torchfile(place.ranks[0]).root, list):
        checkpoint.warnings.append(
            "the files of ranks have several optimizers each, as nanochat saved them before 29 January 2026: these are "
            "not read, and the model is"
        )
    elif place.ranks:
        with about(place.path):
            _attach(checkpoint, read_ranks(checkpoint, place.ranks), names)
    checkpoint.step = step_of(checkpoint, meta)
    return checkpoint


def _attach(checkpoint: Checkpoint, ranks: Sequence[RankFile], names: GivenNames) -> None:
    groups = ranks[0].state.groups
    numbers = ranks[0].state.numbers
    if differ([rank.state.numbers for rank in ranks]) or any(one.get(KIND) not in (ADAMW, MUON) for one in groups):
        raise UnsupportedError(
            "the optimizer is not nanochat's", expected=f"groups of {ADAMW} and {MUON}, alike for all"
        )
    if names is not None:
        known = Evidence.of(checkpoint, numbers, {}).given(names)
    else:
        known = _named(checkpoint, numbers, [one[KIND] == MUON for one in groups])
    for index, (group, own) in enumerate(zip(groups, numbers, strict=True)):
        members = [checkpoint.parameters[known[number]] for number in own]
        for number, parameter in zip(own, members, strict=True):
            parameter.group = index
            if group[KIND] == ADAMW:
                _add_rows(checkpoint, parameter, ranks, number)
        if group[KIND] == MUON and own:
            _add_stack(checkpoint, members, ranks, own)
        common = shared_values([one.state for one in members])
        checkpoint.param_groups.append(ParamGroup(without(group, "params"), [one.name for one in members], common))


def _named(checkpoint: Checkpoint, numbers: Sequence[Sequence[int]], are_muons: Sequence[bool]) -> dict[int, str]:
    """Return the names of numbers as `setup_optimizer` orders the model's parameters."""
    shapes: dict[Shape, list[str]] = {}
    rows = []
    for name, parameter in checkpoint.parameters.items():
        bare = name.removeprefix(COMPILED)
        place = next((at for at, front in enumerate(ORDER) if bare.startswith(front)), len(ORDER))
        if bare.startswith(MATRICES):
            shapes.setdefault(parameter.shape, []).append(name)
        else:
            rows.append((place, name))
    rows.sort(key=lambda one: one[0])
    stacks = [shapes[shape] for shape in sorted(shapes)]
    found = [
        [own for own, is_muon in zip(numbers, are_muons, strict=True) if is_muon is wanted] for wanted in (False, True)
    ]
    fits = list(map(len, found[1])) == list(map(len, stacks)) and sum(map(len, found[0])) == len(rows)
    if not fits or (rows and rows[-1][0] == len(ORDER)):
        raise UnsupportedError(
            "the param groups are not those that nanochat makes of this model",
            expected=f"{len(rows)} parameters of AdamW, and stacks of {[*map(len, stacks)]}",
            found=f"{sum(map(len, found[0]))}, and {[*map(len, found[1])]}",
            advice=NAMES_ADVICE,
        )
    return dict(zip(chain(*found[0], *found[1]), [*(name for _, name in rows), *chain(*stacks)], strict=True))


def _held(ranks: Sequence[RankFile], number: int) -> tuple[dict[str, object], dict[str, list[Slot]]]:
    """Return the values that all ranks have of a number, and each rank's tensors, by slot.

    Raises LayoutError: ranks have different ones.
    """
    states = [rank.state.state.get(number, {}) for rank in ranks]
    tensors = [{key: one for key, one in state.items() if isinstance(one, Tensor)} for state in states]
    values = [without(state, *its) for state, its in zip(states, tensors, strict=True)]
    if differ(values) or differ([its.keys() for its in tensors]):
        raise LayoutError(f"ranks have different state of parameter {number}")
    return values[0], {
        key: [slot_of(key, its[key], rank.file.path) for its, rank in zip(tensors, ranks, strict=True)]
        for key in tensors[0]
    }


def _check(name: str, held: Sequence[Slot], expected: Shape) -> None:
    found = next((slot.shape for slot in held if slot.shape != expected), None)
    if found is not None:
        raise LayoutError(f"a rank's {held[0].name} of {name} is not its share", expected=expected, found=found)


def _add_rows(checkpoint: Checkpoint, parameter: Parameter, ranks: Sequence[RankFile], number: int) -> None:
    """Give a parameter its moments: each rank's rows of them, or all of them, of which other ranks have copies."""
    values, tensors = _held(ranks, number)
    parameter.state |= values
    rows = rows_of_rank(parameter.shape, len(ranks))
    for key, held in tensors.items():
        _check(parameter.name, held, parameter.shape if rows is None else (rows, *parameter.shape[1:]))
        parameter.slots[key] = held[0] if rows is None else concat(held, 0)
        for rank, copy in enumerate(held[1:] if rows is None else (), 1):
            checkpoint.duplicates.append(
                Duplicate("parameter", parameter.name, parameter.name, copy, parameter.slots[key], rank)
            )


def _add_stack(
    checkpoint: Checkpoint, members: Sequence[Parameter], ranks: Sequence[RankFile], numbers: Sequence[int]
) -> None:
    """Give the matrices of a group theirs of each stack, which lies under the number of the first."""
    values, tensors = _held(ranks, numbers[0])
    if values or any(rank.state.state.get(number) for rank in ranks for number in numbers[1:]):
        raise LayoutError(f"a group of {MUON} has other state than stacks of all its matrices", found=[*values])
    for key, held in tensors.items():
        length = stack_of_rank(len(members), len(ranks))
        shape = held[0].shape[1:]
        _check(members[0].name, held, (length, *shape))
        for at, parameter in enumerate(members):
            if not agree(shape, parameter.shape):
                raise LayoutError(f"{key} is not of {parameter.name}", expected=parameter.shape, found=shape)
            parameter.slots[key] = reshape(narrow(held[at // length], 0, at % length, 1), shape)
        for rank, slot in enumerate(held):
            owned = min(max(len(members) - rank * length, 0), length)
            if owned < length:
                rest = narrow(slot, 0, owned, length - owned)
                checkpoint.padding_spans.append(
                    [PaddingSpan(key, one.path, one.offset, rest.nbytes) for one in rest.spans if one.is_contiguous]
                )
