"""A checkpoint under the names of a map's other side, with its tensors arranged as there: parameters, slots, groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.naming.document import Map, Template
from zckpt.naming.match import Fit, Instance, fit, of_rule
from zckpt.naming.parts import Arrangement, Joined, both_arranged
from zckpt.naming.renames import check_different
from zckpt.naming.sizes import Sizes, Tensor
from zckpt.state import Checkpoint, Parameter, ParamGroup
from zckpt.state.checkpoint import keys_listed

MAXIMUM_TENSORS = 1 << 17
"""That one tensor is taken apart into: experts of all layers. A file may say any shape."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """What a map makes of a checkpoint.

    Parameters
    ----------
    checkpoint : Checkpoint
    notes : list of str
        What to know of it.
    side : int
        Whose names it has.
    names : dict of str to str
        The new names of tensors that have nothing but another name, by their old ones.
    """

    checkpoint: Checkpoint
    notes: list[str]
    side: int
    names: dict[str, str]


def mapped(checkpoint: Checkpoint, map_: Map, config: Mapping[str, int], to: int | None = None) -> Mapped:
    """Return a checkpoint, which stays as it is, under the names of a map's other side, as its own names tell.

    `config`: numbers of the model; `to`: the side whose names are wanted, what has them already stays as it is. Raises
    UsageError: names or shapes do not fit; UnsupportedError: state that the map cannot arrange; LayoutError: parts of
    one tensor have state that contradicts itself.
    """
    implied = frozenset().union(*(side.implied for side in map_.sides))  # names that only one side has
    whole = checkpoint
    kept = {name: one for name, one in whole.parameters.items() if name not in implied or one.tied_to is None}
    checkpoint = replace(whole, parameters=kept)
    found = fit(map_, {parameter.name: parameter.shape for parameter in checkpoint.tensors()})
    if found.source == to:
        return Mapped(whole, [], to, {parameter.name: parameter.name for parameter in whole.tensors()})
    # torchtitan 0.3 has queries, keys and values of a layer in one parameter, which its optimizer's state is of, and
    # saves the model as three tensors: that state is taken apart, too.
    unnamed = dict(checkpoint.unnamed)
    shapes = {name: one.shape for name, one in unnamed.items()}
    apart = [
        (instance, unnamed.pop(instance.sources[0].name))
        for rule in map_.sides[found.source].optimizer
        for instance in of_rule(rule, rule.sides[found.source], dict.fromkeys(shapes), shapes)
    ]
    if unnamed:
        raise UnsupportedError(
            f"the optimizer's state of {listed(list(unnamed))} belongs to no tensor of the model, which the map "
            f"{map_.name} is about",
            advice="give --names FILE where a file only numbers them, or the model with its optimizer",
        )
    if checkpoint.per_rank:
        raise UnsupportedError(
            f"{keys_listed(checkpoint.per_rank)}: each rank has its own, of the elements that it holds, which no map "
            f"arranges"
        )
    work = _Mapping(replace(checkpoint, unnamed=unnamed), map_, found, config)
    for instance in found.instances:
        work.add(instance)
    for instance, one in apart:
        work.give(instance, one)
    return work.result()


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the other side, where among the source's its first part was, and whether it is just that."""

    parameter: Parameter
    position: int
    is_buffer: bool
    sources: tuple[str, ...]
    is_same: bool = False


class _Mapping:
    """The tensors of the other side as they are made."""

    def __init__(self, checkpoint: Checkpoint, map_: Map, found: Fit, config: Mapping[str, int]) -> None:
        self._checkpoint, self._map, self._fit, self._config = checkpoint, map_, found, config
        self._side = map_.sides[found.target]
        self._positions = {name: number for number, name in enumerate(one.name for one in checkpoint.tensors())}
        self._made: dict[str, _Made] = {}
        self._notes = [f"{map_.name}: from the names of {map_.sides[found.source].name} to those of {self._side.name}"]
        if found.ignored:
            self._notes.append(f"{map_.name}: {listed(found.ignored)} follows from the configuration and is left out")

    def add(self, instance: Instance) -> None:
        """Make the tensors that the tensors of a rule are on the other side."""
        templates = instance.rule.sides[self._fit.target]
        names = [one.name for one in instance.sources]
        parameters = [self._checkpoint.parameters.get(name) or self._checkpoint.buffers[name] for name in names]
        if templates[0].axes is None:
            (template,), (parameter,) = templates, parameters
            self._keep(replace(parameter, name=template.name(instance.shared)), names, is_same=True)
            return
        targets, sources, made, notes = self._arranged(instance)
        self._notes += notes
        if all(one.tied_to is None for one in parameters):
            joined = Joined(self._checkpoint, self._map.name, parameters, sources)
            for one, arrangement in zip(targets, made, strict=True):
                self._keep(joined.parameter(one.name, arrangement), names)
        elif len(parameters) > 1 or len(targets) > 1:
            raise UnsupportedError(
                f"{listed(names)} is in part another name of another tensor, which the map {self._map.name} takes apart"
            )
        else:
            self._keep(replace(parameters[0], name=targets[0].name, shape=made[0].shape), names)

    def _arranged(self, instance: Instance) -> tuple[list[Tensor], list[Arrangement], list[Arrangement], list[str]]:
        """Return the tensors of the other side, how those of both sides are arranged, and what to know of that."""
        sizes = Sizes(self._map, instance.rule, self._config, instance.sources)
        targets = []
        for template in instance.rule.sides[self._fit.target]:
            own = {letter: sizes.total(letter) for letter in template.indices if letter not in instance.shared}
            if math.prod(own.values()) > MAXIMUM_TENSORS:
                raise UsageError(
                    f"{instance.sources[0].name} would be more tensors than a model has",
                    expected=f"at most {MAXIMUM_TENSORS}",
                    found=", ".join(f"{letter}={size}" for letter, size in own.items()),
                )
            for numbers in product(*map(range, own.values())):
                indices = {**instance.shared, **dict(zip(own, numbers, strict=True))}
                targets.append(Tensor(template, indices, template.name(indices)))
        return targets, *both_arranged(self._map.name, instance, targets, sizes)

    def _keep(self, parameter: Parameter, sources: Sequence[str], *, is_same: bool = False) -> None:
        before = self._made.get(parameter.name)
        if before is not None:
            check_different(dict.fromkeys((*before.sources, *sources), parameter.name), f"--map {self._map.name}")
        is_buffer = sources[0] in self._checkpoint.buffers
        position = min(self._positions[name] for name in sources)
        self._made[parameter.name] = _Made(parameter, position, is_buffer, tuple(sources), is_same)

    def give(self, instance: Instance, whole: Parameter) -> None:
        """Give tensors of the other side, which are made already, the optimizer's state of what they are parts of."""
        targets, sources, arrangements, _ = self._arranged(instance)
        joined = Joined(self._checkpoint, self._map.name, [whole], sources)
        for target, arrangement in zip(targets, arrangements, strict=True):
            taken = joined.parameter(target.name, arrangement)
            made = self._made.get(taken.name)
            own = None if made is None else made.parameter
            if made is None or own is None or own.tied_to is not None or own.shape != taken.shape:
                raise UnsupportedError(
                    f"the optimizer's state of {whole.name} is in part that of {taken.name}, which the model has not",
                    expected=f"{taken.name} of shape {taken.shape}",
                    found=None if own is None else own.shape,
                )
            if own.group is not None:
                raise UnsupportedError(
                    f"the optimizer has state of {listed(made.sources)} and of {whole.name}, of which it is a part"
                )
            slots = {**own.slots, **taken.slots, **own.slots}
            parameter = replace(own, slots=slots, group=taken.group, frozen=False, state=taken.state)
            self._made[taken.name] = _Made(parameter, made.position, False, (*made.sources, whole.name))

    def result(self) -> Mapped:
        """Return the checkpoint, and what to know of it."""
        names = {source: one.parameter.name for one in self._made.values() for source in one.sources}
        for alias, name in self._side.tied.items():  # names that no rule has given
            owner = self._made.get(name)
            if alias in self._made or owner is None or owner.is_buffer or owner.parameter.tied_to is not None:
                continue
            parameter = replace(owner.parameter, name=alias, slots={}, group=None, state={}, tied_to=name)
            self._made[alias] = _Made(parameter, len(self._positions), False, ())
        order = sorted_names({name: one.position for name, one in self._made.items()}, self._side.order)
        parameters: dict[str, Parameter] = {}
        buffers: dict[str, Parameter] = {}
        for name in order:
            one = self._made[name]
            parameter = one.parameter
            if parameter.tied_to is not None and one.sources:
                owner_name = names.get(parameter.tied_to)
                its = None if owner_name is None else self._made[owner_name].parameter
                if its is None or its.shape != parameter.shape:
                    raise UnsupportedError(
                        f"{name} is another name of {parameter.tied_to}, which {self._map.name} arranges otherwise"
                    )
                parameter = replace(parameter, tied_to=owner_name)
            (buffers if one.is_buffer else parameters)[name] = parameter
        groups = [self._group(number, group, order) for number, group in enumerate(self._checkpoint.param_groups)]
        same = {one.sources[0]: name for name, one in self._made.items() if one.is_same}
        duplicates = [
            replace(one, name=same[one.name], of=same[one.of])
            for one in self._checkpoint.duplicates
            if one.name in same and one.of in same
        ]
        changed = replace(
            self._checkpoint, parameters=parameters, buffers=buffers, param_groups=groups, duplicates=duplicates
        )
        return Mapped(changed, self._notes, self._fit.target, same)

    def _group(self, number: int, group: ParamGroup, order: Sequence[str]) -> ParamGroup:
        made = ((name, self._made[name]) for name in order)
        members = {
            name: one.sources for name, one in made if one.parameter.group == number and one.parameter.tied_to is None
        }
        sources = {source for own in members.values() for source in own}
        rest = [name for name in group.parameters if name not in sources]
        if rest:
            raise UnsupportedError(f"param group {number} has {listed(rest)}, which the map {self._map.name} has not")
        return replace(group, parameters=list(members))


def sorted_names(positions: Mapping[str, int], templates: Sequence[Template]) -> list[str]:
    """Return names, which have positions, in the order of templates; those that none fits come after them."""
    blocks = list(_blocks(templates, 0))

    def key(name: str) -> tuple[tuple[int, int], ...]:
        for one, numbers in zip(templates, blocks, strict=True):
            match = one.pattern.fullmatch(name)
            if match is not None:
                indices = [int(match[letter]) for letter in one.indices]
                return tuple((0, part) for pair in zip(numbers, [*indices, 0], strict=True) for part in pair)
        return ((1, positions[name]),)

    return sorted(positions, key=key)


def _blocks(templates: Sequence[Template], depth: int) -> Iterator[tuple[int, ...]]:
    """Yield for each template the numbers of the blocks that it is in, outermost first.

    Templates that follow each other and begin with the same letter are a block, repeated for each of its numbers.
    """

    def letter(numbered: tuple[int, Template]) -> str | int:
        at, one = numbered
        return one.indices[depth] if len(one.indices) > depth else at  # a block of its own

    for block, (key, some) in enumerate(groupby(enumerate(templates), letter)):
        if isinstance(key, int):
            yield (block,)
        else:
            yield from ((block, *rest) for rest in _blocks([one for _, one in some], depth + 1))
