"""Whose state each number of an optimizer is, and that state given to its parameters.

Of all readings of the files that fit their sizes one may be left:

whole    number i is a parameter, whose state ranks hold as they hold its weight (FSDP2), or whole
pieces   number i is a parameter, of which each rank has a piece, or none (FSDP1, use_orig_params=True)
flat     number i is a unit's flat parameter, of which each rank has as many elements (FSDP1)

A flat parameter is the unit's parameters end to end, cut into shards of ceil(n / ranks) elements, the last one filled
with zeros. So its size is known up to as many elements as there are ranks, and every element has to be some
parameter's. Names come from the model's file, in its order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import TYPE_CHECKING

from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.evidence import NAMES_ADVICE, Evidence, factored_shape, keep_number, note_numbers, shown_shape, ways
from zckpt.formats.fsdp_rank_files.across import add
from zckpt.formats.fsdp_rank_files.contents import MEMBERS, Key, Model, Optimizer, Ties, equal_names, tie
from zckpt.formats.fsdp_rank_files.held import PLAIN, Held
from zckpt.formats.fsdp_rank_files.units import members_of, units_in, usual_wrappings
from zckpt.formats.torch_files.optimizer import OptimizerState, shared_values
from zckpt.formats.torch_files.tensors import slot_of
from zckpt.immutable import immutable
from zckpt.state import (
    Checkpoint,
    CutSpans,
    GivenNames,
    PaddingSpan,
    Parameter,
    ParamGroup,
    Shape,
    Slot,
    are_distinct,
    is_floating,
    itemsize,
    positions,
    without,
)
from zckpt.state.names import aligned, is_added
from zckpt.state.views import concat, reshape
from zckpt.torchfile import MetaTensor

if TYPE_CHECKING:
    from zckpt.formats.transformers_trainer.readings import Weights

WHOLE, PIECES, FLAT = "whole", "pieces", "flat"

ADVICE = f"{NAMES_ADVICE} (of flat parameters, those in each one in turn)"

MOST_ALIASES = 12
"""Of other names of tied parameters in one unit, which are tried in all combinations: models have one or two."""


@immutable
class Reading:
    """Whose state it is.

    `names`: the parameters of each number; one that is missing has no certain name; `ties`: names of parameters that
    are other names of ones before them, by the sizes of their units.
    """

    kind: str
    names: dict[Key, tuple[str, ...]]
    ties: tuple[tuple[str, str], ...] = ()


def readings(
    checkpoint: Checkpoint, model: Model, optimizer: Optimizer, ranks: Sequence[int], names: GivenNames
) -> Reading:
    """Return the only reading that the files leave.

    `checkpoint`: has the model's parameters; `ranks`: ranks that together have everything once, in the order of their
    shards; `names`: from the user, in the optimizer's order. Raises UnsupportedError: none fits, or several do;
    UsageError: `names` fit none.
    """
    solver = _Solver(checkpoint, model, optimizer, frozenset(ranks), names)
    if solver.keys and isinstance(solver.keys[0], str):
        return solver.named()
    found = solver.every()
    different = {tuple(sorted(one.names.items())): one for one in found}
    if len(different) == 1:
        return solver.with_ties(next(iter(different.values())))
    count = len(solver.keys)
    if names is not None:
        raise UsageError(
            "the names do not match the optimizer's state",
            expected=f"names of {count} parameters, or of those in {count} flat ones",
            found=f"{len(names)} names",
        )
    raise UnsupportedError(
        "the files do not say which parameters the optimizer's numbers stand for"
        if not found
        else "the sizes of the optimizer's state fit the model in several ways",
        expected="state for the model's parameters in their order, or for units that are the model or its layers",
        found=f"{count} numbers for {len(solver.owners)} parameters",
        advice=ADVICE,
    )


def beside_whole(optimizer: Optimizer, weights: Weights, names: GivenNames) -> Reading | None:
    """Return the reading of numbers whose model lies beside in one piece, in no order; None of names.

    Raises UnsupportedError: ranks have pieces of which nothing says what they are; UsageError: `names` do not fit.
    """
    from zckpt.formats.transformers_trainer.readings import read_names

    if any(isinstance(key, str) for key in optimizer.keys):
        return None
    held = {key: {slot: one.first for slot, one in optimizer.cut(key).items()} for key in optimizer.keys}
    if any(one.kind == PLAIN for slots in held.values() for one in slots.values()):
        raise UnsupportedError(
            "pieces of an optimizer's state beside a whole model, which says nothing of how FSDP1 has cut it",
            path=optimizer.files.paths[0],
            expected="DTensors, or the model's files of ranks",
            advice="add the model's files of ranks from the same run",
        )
    state: dict[int, dict[str, object]] = {
        int(key): {slot: MetaTensor(one.dtype, one.shape, ()) for slot, one in slots.items()}
        for key, slots in held.items()
    }
    found = read_names(OptimizerState(state, optimizer.groups), weights, names)
    return Reading(WHOLE, _one_each(found.items()))


@dataclass
class _Solver:
    """Holds the sizes of an optimizer's state against the model's shapes; fields are the parameters of `readings`."""

    checkpoint: Checkpoint
    model: Model
    optimizer: Optimizer
    ranks: Collection[int]
    names: GivenNames

    @cached_property
    def keys(self) -> list[Key]:
        """All numbers, in the optimizer's order; of an adapter alone, those with state if it has as many parameters."""
        keys = self.optimizer.keys
        if self.plain or not self.owners or not all(map(is_added, self.owners)):
            return keys
        trained = [key for key in keys if self.optimizer.cut(key)]
        return trained if len(trained) == len(self.owners) else keys

    @cached_property
    def given(self) -> GivenNames:
        """The user's names of these numbers."""
        every, known = self.optimizer.keys, {*self.keys}
        if self.names is None or len(self.names) != len(every):
            return self.names
        return [name for key, name in zip(every, self.names, strict=True) if key in known]

    @cached_property
    def groups(self) -> list[list[Key]]:
        """Those of each param group."""
        known = {*self.keys}
        return [[key for key in group["params"] if key in known] for group in self.optimizer.groups]

    @cached_property
    def owners(self) -> dict[str, Shape]:
        """The shapes of parameters that are not other names of one, in the model's order."""
        return {one.name: one.shape for one in self.checkpoint.owners}

    @cached_property
    def plain(self) -> dict[str, Shape]:
        """Those of what every rank has whole and may yet be parameters, which a program has kept out of FSDP."""
        return {one.name: one.shape for one in self.checkpoint.buffers.values() if is_floating(one.dtype)}

    def every(self) -> list[Reading]:
        """Return all readings that fit; of those of flat parameters first."""
        held = [self.held(key) for key in self.keys if self.optimizer.cut(key)]
        line = all(map(_is_line, held))
        found = self.by_number(PIECES if line and held and len(self.ranks) > 1 else WHOLE)
        if line and (held or len(self.keys) != len(self.owners)):
            found = [*self.flat(), *found]
        return found

    @cached_property
    def counts(self) -> Counter[int]:
        """How many of the ranks share each tree."""
        return Counter(self.optimizer.files.tree[rank] for rank in self.ranks)

    def held(self, key: Key) -> list[tuple[Held, int]]:
        """Return what so many ranks have of the slot that shows a parameter's shape.

        It is one that is cut as weights are, or else the one of most dimensions.
        """
        slots = self.optimizer.cut(key).values()
        found = [
            [(one, self.counts[tree]) for tree, one in held.by_tree.items() if self.counts[tree]] for held in slots
        ]
        return max(
            found,
            key=lambda held: max((one.kind != PLAIN, len(one.shape), math.prod(one.shape)) for one, _ in held),
            default=[],
        )

    def fits(self, kind: str, key: Key, shape: Shape) -> bool:
        """Tell whether a parameter of some shape, or a flat one of so many elements, may have the state."""
        held = self.held(key)
        if not held or kind == WHOLE:
            own = factored_shape({slot: [one.first.shape] for slot, one in self.optimizer.cut(key).items()})
            return own == shape if own is not None else all(one.shape == shape for one, _ in held)
        if not _is_line(held):
            return False
        if kind == PIECES:
            return sum(one.shape[0] * ranks for one, ranks in held) == math.prod(shape)
        width, count = held[0][0].shape[0], len(self.ranks)
        is_whole = sum(ranks for _, ranks in held) == count
        return is_whole and {one.shape for one, _ in held} == {(width,)} and -(-shape[0] // count) == width

    def named(self) -> Reading:
        """Return the names that the program saved, as the model's files have them."""
        parameters = self.checkpoint.parameters
        known = aligned([*parameters, *self.checkpoint.buffers], [str(key) for key in self.keys])
        found: dict[Key, tuple[str, ...]] = {}
        for key in self.keys:
            name = known.get(str(key), str(key))
            one = parameters.get(name)
            # State of several shapes is factored, and none of them need be the parameter's.
            factored = len({held.first.shape for held in self.optimizer.cut(key).values()}) > 1
            if one is not None and not factored and not self.fits(WHOLE, key, one.shape):
                raise UnsupportedError(
                    f"the state of {name} has another shape than the parameter",
                    expected=one.shape,
                    found=self.held(key)[0][0].shape,
                )
            found[key] = (name if one is None else one.tied_to or name,)
        return Reading(WHOLE, found)

    def by_number(self, kind: str) -> list[Reading]:
        """Return the reading in which each number is one parameter, if there is one."""
        every, groups = {**self.owners, **self.plain}, self.groups
        said: Evidence[Key] = Evidence.of(self.checkpoint, groups, {}, rules=(
            lambda key, name: self.fits(kind, key, every[name]),
            lambda key, name: not (self.optimizer.cut(key) and said.is_original(name)),
        ))  # fmt: skip
        if self.given is not None or len(self.keys) > len(self.owners):
            said = replace(said, candidates={name: every[name] for name in self.model.held if name in every})
        if self.given is not None:
            given = said.recorded(self.given)
            return [Reading(kind, _one_each(given.items()))] if given else []
        certain = said.certain()
        alone = Reading(kind, _one_each(certain.items()))
        if len(groups) == 1:
            names, ties = self.in_turn()
            found = dict(zip(self.keys, names or (), strict=names is not None))
            if names is not None and all(self.fits(kind, key, every[name]) for key, name in found.items()):
                contradicted = any(found[number] != name for number, name in certain.items() if ties)
                return [Reading(kind, _one_each(found.items()), tuple(ties)), *([alone] if contradicted else [])]
        fits = all(any(self.fits(kind, key, shape) for shape in said.candidates.values()) for key in self.keys)
        return [alone] if fits and (kind == WHOLE or len(certain) == len(self.keys)) else []

    def in_turn(self) -> tuple[list[str] | None, Ties]:
        """Return the parameters that an optimizer of all of them may number in turn: as many as it has."""
        more = len(self.owners) - len(self.keys)
        if more > 0:
            ties = equal_names(self.model, [name for name, shape in self.owners.items() if len(shape) > 1])
            gone = dict(ties)
            return ([name for name in self.owners if name not in gone] if len(gone) == more else None), ties
        if more == 0:
            return list(self.owners), []
        every = {*self.owners, *self.plain}
        return ([name for name in self.model.held if name in every] if len(every) == len(self.keys) else None), []

    def with_ties(self, reading: Reading) -> Reading:
        """Return a reading that knows other names of trained parameters: matrices with no number, of the same bytes."""
        if len(reading.names) < len(self.keys):
            return reading
        trained = {name for key, names in reading.names.items() if self.optimizer.cut(key) for name in names}
        known = {*chain(*reading.names.values()), *dict(reading.ties)}
        shapes = {name: held.first.shape for name, held in self.model.held.items()}
        if all(name in known or len(shape) < 2 for name, shape in shapes.items()):
            return reading
        more = [
            (alias, owner)
            for alias, owner in equal_names(self.model, list(shapes))
            if alias not in known and owner in trained and len(shapes[alias]) > 1
        ]
        return replace(reading, ties=(*reading.ties, *more))

    def flat(self) -> Iterator[Reading]:
        """Yield the readings in which each number is a flat parameter."""
        if self.given is not None:
            known = aligned(self.checkpoint.parameters, self.given)
            given = [known.get(name, name) for name in self.given]
            if are_distinct(given) and all(name in self.owners for name in given):
                yield from self.cut_names(given)
            return
        wrapped = units_in(self.model.modules)
        for units in [wrapped] if wrapped else usual_wrappings(list(self.owners)):
            members = members_of(units, list(self.owners))
            reading = self.of_units(members) if len(members) == len(self.keys) else None
            if reading is not None:
                yield reading

    def numel(self, names: Iterable[str]) -> int:
        """Return how many elements parameters have together."""
        return sum(math.prod(self.owners[name]) for name in names)

    def cut_names(self, given: Sequence[str]) -> Iterator[Reading]:
        """Yield the only way to cut a list of names into as many flat parameters, if there is one."""

        def units(number: int, begin: int) -> Iterator[tuple[tuple[str, ...], int]]:
            key, numel = self.keys[number], 0
            held = self.held(key)
            for end, name in enumerate(given[begin:], begin + 1):
                numel += self.numel([name])
                if held and numel > held[0][0].shape[0] * len(self.ranks):
                    break
                if self.fits(FLAT, key, (numel,)):
                    yield tuple(given[begin:end]), end

        count, cut = ways(len(self.keys), 0, len(given), units)
        if count == 1:
            yield Reading(FLAT, dict(zip(self.keys, cut, strict=True)))

    def of_units(self, members: Sequence[Sequence[str]]) -> Reading | None:
        """Return the reading of some units; None where their sizes do not fit, or fit in several ways."""
        found: dict[Key, tuple[str, ...]] = {}
        ties: Ties = []
        for key, names in zip(self.keys, members, strict=True):
            numel = self.numel(names)
            gone: dict[str, str] = {}
            if not self.fits(FLAT, key, (numel,)):
                aliases = equal_names(self.model, names)[:MOST_ALIASES]
                fitting = [
                    dict(some)
                    for count in range(1, len(aliases) + 1)
                    for some in combinations(aliases, count)
                    if self.fits(FLAT, key, (numel - self.numel(alias for alias, _ in some),))
                ]
                if len(fitting) != 1:
                    return None
                gone = fitting[0]
            ties += gone.items()
            found[key] = tuple(name for name in names if name not in gone)
        return Reading(FLAT, found, tuple(ties))


def _is_line(held: Sequence[tuple[Held, int]]) -> bool:
    return all(one.kind == PLAIN and len(one.shape) == 1 for one, _ in held)


def _one_each(pairs: Iterable[tuple[Key, str]]) -> dict[Key, tuple[str, ...]]:
    return {key: (name,) for key, name in pairs}


def attach(
    checkpoint: Checkpoint, model: Model, optimizer: Optimizer, names: GivenNames, *, ties_are_known: bool,
    reading: Reading | None = None,
) -> None:  # fmt: skip
    """Give a checkpoint's parameters the optimizer's slots, and the checkpoint its param groups.

    `checkpoint`: has the model's parameters; `names`: in the optimizer's order; `ties_are_known`: whether a file says
    which names are of one parameter: then equal bytes do not; `reading`: where it is known. Raises SourceError,
    UsageError: as `readings`; or the files do not hold every element once.
    """
    copies = shard_groups(model, len(optimizer.files.paths))
    reading = reading or readings(checkpoint, model, optimizer, copies[0], names)
    for alias, owner in () if ties_are_known else reading.ties:
        tie(checkpoint, alias, owner)
    checkpoint.is_numbered = names is None and all(isinstance(key, int) for key in optimizer.keys)
    checkpoint.details["optimizer_state"] = reading.kind
    giving = _Giving(checkpoint, optimizer, reading, copies)
    order = positions(model.held)
    for index, group in enumerate(optimizer.groups):
        keys: list[Key] = group["params"]
        for key in keys:
            giving.give(key, index)
        members = [name for key in keys for name in reading.names.get(key) or (str(key),)]
        if reading.kind == FLAT:  # which has no order of parameters but the model's
            members.sort(key=lambda name: order.get(name, len(order)))
        values: list[dict[str, object]] = []  # single ones: the moments of a 0-d parameter are tensors like its step
        for key in filter(optimizer.has_state, keys):
            tensors, its = optimizer.tensors.get(key, {}), optimizer.values.get(key, {})
            values.append({k: value for k, value in its.items() if k == "step" or k not in tensors})
        checkpoint.param_groups.append(ParamGroup(without(group, *MEMBERS), members, shared_values(values)))
    unnamed = [key for key in optimizer.keys if not reading.names.get(key) and optimizer.has_state(key)]
    note_numbers(checkpoint, unnamed, advice=ADVICE)


def shard_groups(model: Model, world_size: int) -> list[list[int]]:
    """Return the groups of ranks that have everything once, each in the order of its shards; the first is read from.

    The last dimension of FSDP's mesh is the one that cuts, one before it copies. Where tensors have meshes of several
    forms, as under tensor parallelism, all ranks are one group, in which no flat parameter will fit.
    """
    sharded = [held for held in model.held.values() if held.first.kind != PLAIN]
    if not sharded:
        return [[rank] for rank in range(world_size)]
    meshes = [one.mesh for _, one in sharded[0]]
    groups: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, mesh in enumerate(meshes):
        if mesh is not None:
            groups.setdefault(mesh.coordinate[:-1], {})[mesh.coordinate[-1]] = rank
    size = max((mesh.sizes[-1] for mesh in meshes if mesh is not None), default=0)
    alike = {held.first.mesh.sizes for held in sharded if held.first.mesh is not None}
    if len(alike) != 1 or {len(shards) for shards in groups.values()} != {size} or size * len(groups) != world_size:
        return [list(range(world_size))]
    return [[shards[at] for at in range(size)] for _, shards in sorted(groups.items())]


@immutable
class _Giving:
    """Gives parameters what ranks have under the optimizer's numbers."""

    checkpoint: Checkpoint
    optimizer: Optimizer
    reading: Reading
    copies: Sequence[Sequence[int]]

    def give(self, key: Key, group: int) -> None:
        """Give parameters the slots and single values of one number; one under it where no name is certain."""
        files, tensors = self.optimizer.files, self.optimizer.tensors.get(key, {})
        checkpoint, names = self.checkpoint, self.reading.names.get(key, ())
        for name in names:
            if name in checkpoint.buffers:
                checkpoint.parameters[name] = checkpoint.buffers.pop(name)
                checkpoint.duplicates = [
                    replace(one, kind="parameter") if one.name == name else one for one in checkpoint.duplicates
                ]
        owners: list[Parameter] = []
        if names or self.optimizer.has_state(key):
            shape = shown_shape({slot: [held.first.shape] for slot, held in self.optimizer.cut(key).items()})
            numbered = names or (str(key),)
            owners = [checkpoint.parameters.get(one) or keep_number(checkpoint, one, shape) for one in numbered]
        for owner in owners:
            owner.group = group
        for slot, held in tensors.items():
            if held.first.shape == () and held.first.kind == PLAIN:
                path = files.paths[next(iter(held.by_tree))]
                for owner in owners:
                    owner.slots[slot] = slot_of(slot, held.first.pieces[0].tensor, path)
            elif self.reading.kind in (FLAT, PIECES):
                self._give_line(slot, dict(held), owners)
            else:
                add(checkpoint, owners[0], slot, files.joined(slot, f"{owners[0].name} ({slot})", held))
        for slot, value in self.optimizer.values.get(key, {}).items():
            for owner in owners if slot not in tensors else ():
                owner.state[slot] = value

    def _give_line(self, slot: str, held: Mapping[int, Held], owners: Sequence[Parameter]) -> None:
        """Give parameters their elements of what ranks have end to end; behind those of a flat one is padding.

        Pieces of one parameter are as long as it is; of one without a name, it is as long as they are.
        """
        checkpoint, files, is_flat = self.checkpoint, self.optimizer.files, self.reading.kind == FLAT
        shapes = [owner.shape for owner in owners]
        if not is_flat and owners[0].name not in checkpoint.parameters:
            shapes = [(sum(held[rank].shape[0] for rank in self.copies[0] if rank in held),)]
        numel = sum(map(math.prod, shapes))
        found: list[list[tuple[int, Slot]]] = [[] for _ in owners]
        for ranks in self.copies:
            tensors = [(rank, piece.tensor) for rank in ranks if rank in held for piece in held[rank].pieces]
            sizes = [one.numel for _, one in tensors]
            total = sum(sizes)
            is_cut = [rank for rank, _ in tensors] == list(ranks) and len(set(sizes)) == 1 and total >= numel
            if not is_cut if is_flat else total != numel:
                raise LayoutError(
                    f"rank files do not have every element of {slot} of {owners[0].name} exactly once",
                    path=files.paths[0],
                    expected=f"{numel} elements",
                    found=total,
                    parameters=[owners[0].name],
                )
            if not is_flat:
                parts = [reshape(slot_of(slot, one, files.paths[rank]), (one.numel,)) for rank, one in tensors]
                whole = concat(parts, 0) if parts else Slot(slot, next(iter(held.values())).dtype, (0,), ())
                found[0].append((ranks[0], reshape(whole, shapes[0])))
                continue
            cut, start = files.cut(tuple(ranks), tensors), 0
            if cut is None:
                raise UnsupportedError("a flat parameter whose shards are not contiguous",
                                       path=files.paths[ranks[0]])  # fmt: skip
            for shape, its in zip(shapes, found, strict=True):
                its.append((ranks[0], Slot(slot, cut.dtype, shape, CutSpans(cut, shape, start, sizes[0]))))
                start += math.prod(shape)
            rest, size = CutSpans(cut, (total - numel,), numel, sizes[0]), itemsize(cut.dtype)
            checkpoint.padding_spans.append([PaddingSpan(slot, x.path, x.offset, x.extent.numel * size) for x in rest])
        for owner, its in zip(owners, found, strict=True):
            add(checkpoint, owner, slot, its)
