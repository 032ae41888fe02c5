"""A checkpoint under the names of a map's other side, with its tensors arranged as there: parameters, slots, groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zckpt.errors import UnsupportedError, UsageError, listed
from zckpt.naming.arrange import Arrangement
from zckpt.naming.document import Map, Template
from zckpt.naming.match import Fit, Instance, fit, of_rule
from zckpt.naming.order import sorted_names
from zckpt.naming.parts import Joined, both_arranged
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
    """Return a checkpoint under the names of a map's other side.

    Parameters
    ----------
    checkpoint : Checkpoint
        Stays as it is.
    map_ : Map
        Goes in the direction that fits the names.
    config : mapping of str to int
        Numbers of the model.
    to : int, optional
        The side whose names are wanted: what has them already stays as it is.

    Raises
    ------
    UsageError
        The names or shapes do not fit the map_.
    UnsupportedError
        State that it cannot arrange.
    LayoutError
        Parts of one tensor have state that contradicts itself.
    """
    path = checkpoint.opened or checkpoint.source
    whole, checkpoint = checkpoint, _without_implied(checkpoint, map_)
    shapes = {parameter.name: parameter.shape for parameter in checkpoint.tensors()}
    found = fit(map_, shapes, path)
    if found.source == to:
        return Mapped(whole, [], to, {parameter.name: parameter.name for parameter in whole.tensors()})
    # torchtitan 0.3 has queries, keys and values of a layer in one parameter, which its optimizer's state is of, and
    # saves the model as three tensors: that state is taken apart, too.
    unnamed = dict(checkpoint.unnamed)
    shapes = {name: one.shape for name, one in unnamed.items()}
    apart = [
        (instance, unnamed.pop(instance.sources[0].name))
        for rule in map_.optimizer[found.source]
        for instance in of_rule(rule, rule.sides[found.source], dict.fromkeys(shapes), shapes)
    ]
    checkpoint = replace(checkpoint, unnamed=unnamed)
    _refuse(checkpoint, map_)
    work = _Mapping(checkpoint, map_, found, config)
    for instance in found.instances:
        work.add(instance)
    for instance, one in apart:
        work.give(instance, one)
    return work.result()


def _without_implied(checkpoint: Checkpoint, map_: Map) -> Checkpoint:
    """Return a checkpoint without further names of tensors that the other side has not."""
    names = frozenset().union(*map_.implied)
    kept = {name: one for name, one in checkpoint.parameters.items() if name not in names or one.tied_to is None}
    return replace(checkpoint, parameters=kept)


def _refuse(checkpoint: Checkpoint, map_: Map) -> None:
    """Refuse what has names that the map cannot know, or state that is no parameter's."""
    path = checkpoint.opened or checkpoint.source
    if checkpoint.unnamed:
        raise UnsupportedError(
            f"the optimizer's state of {listed(list(checkpoint.unnamed))} belongs to no tensor of the model, which the "
            f"map {map_.name} is about",
            path=path,
            advice="give --names FILE where a file only numbers them, or the model with its optimizer",
        )
    if checkpoint.per_rank:
        raise UnsupportedError(
            f"{keys_listed(checkpoint.per_rank)}: each rank has its own, of the elements that it holds, which no map "
            f"arranges",
            path=path,
        )


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the other side, where among the source's its first part was, and whether it is just that."""

    parameter: Parameter
    position: int
    is_buffer: bool
    sources: tuple[str, ...]
    is_same: bool


class _Mapping:
    """The tensors of the other side as they are made."""

    def __init__(self, checkpoint: Checkpoint, map_: Map, found: Fit, config: Mapping[str, int]) -> None:
        self._checkpoint, self._map, self._fit, self._config = checkpoint, map_, found, config
        self._positions = {name: number for number, name in enumerate(one.name for one in checkpoint.tensors())}
        self._made: dict[str, _Made] = {}
        self._aliases: dict[str, str] = {}
        self._notes = [
            f"{map_.name}: from the names of {map_.sides[found.source]} to those of {map_.sides[found.target]}"
        ]
        if found.ignored:
            self._notes.append(f"{map_.name}: {listed(found.ignored)} follows from the configuration and is left out")

    def _of(self, name: str) -> Parameter:
        return self._checkpoint.parameters.get(name) or self._checkpoint.buffers[name]

    def add(self, instance: Instance) -> None:
        """Make the tensors that the tensors of a rule are on the other side."""
        templates = instance.rule.sides[self._fit.target]
        names = [one.name for one in instance.sources]
        parameters = [self._of(name) for name in names]
        if templates[0].axes is None:
            (template,), (parameter,) = templates, parameters
            self._keep(replace(parameter, name=template.name(instance.shared)), names, is_same=True)
            return
        targets, sources, made, notes = self._arranged(instance)
        self._notes += notes
        if any(one.tied_to is not None for one in parameters):
            self._add_alias(parameters, targets, made)
            return
        joined = Joined(self._checkpoint, self._map.name, parameters, sources)
        for one, arrangement in zip(targets, made, strict=True):
            self._keep(joined.parameter(one.name, arrangement), names, is_same=False)

    def _arranged(self, instance: Instance) -> tuple[list[Tensor], list[Arrangement], list[Arrangement], list[str]]:
        sizes = Sizes(self._map, instance.rule, self._config, instance.sources)
        targets = list(_targets(instance.rule.sides[self._fit.target], instance, sizes))
        return targets, *both_arranged(self._map.name, instance, targets, sizes)

    def _add_alias(
        self, parameters: Sequence[Parameter], targets: Sequence[Tensor], made: Sequence[Arrangement]
    ) -> None:
        if len(parameters) > 1 or len(targets) > 1:
            raise UnsupportedError(
                f"{listed([one.name for one in parameters])} is in part another name of another tensor, which the map "
                f"{self._map.name} takes apart",
                path=self._checkpoint.source,
            )
        self._keep(
            replace(parameters[0], name=targets[0].name, shape=made[0].shape), [parameters[0].name], is_same=False
        )

    def _keep(self, parameter: Parameter, sources: Sequence[str], *, is_same: bool) -> None:
        before = self._made.get(parameter.name)
        if before is not None:
            check_different(dict.fromkeys((*before.sources, *sources), parameter.name), f"--map {self._map.name}")
        is_buffer = sources[0] in self._checkpoint.buffers
        position = min(self._positions[name] for name in sources)
        self._made[parameter.name] = _Made(parameter, position, is_buffer, tuple(sources), is_same)
        if parameter.tied_to is not None:
            self._aliases[parameter.name] = parameter.tied_to

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
                    path=self._checkpoint.source,
                    expected=f"{taken.name} of shape {taken.shape}",
                    found=None if own is None else own.shape,
                )
            if own.group is not None:
                raise UnsupportedError(
                    f"the optimizer has state of {listed(made.sources)} and of {whole.name}, of which it is a part",
                    path=self._checkpoint.source,
                )
            slots = {**own.slots, **taken.slots, **own.slots}
            parameter = replace(own, slots=slots, group=taken.group, frozen=False, state=taken.state)
            self._made[taken.name] = replace(
                made, parameter=parameter, sources=(*made.sources, whole.name), is_buffer=False, is_same=False
            )

    def result(self) -> Mapped:
        """Return the checkpoint, and what to know of it."""
        names = {source: one.parameter.name for one in self._made.values() for source in one.sources}
        parameters: dict[str, Parameter] = {}
        buffers: dict[str, Parameter] = {}
        self._add_tied()
        order = sorted_names(
            {name: one.position for name, one in self._made.items()}, self._map.order[self._fit.target]
        )
        for name in order:
            one = self._made[name]
            parameter = one.parameter
            if parameter.tied_to is not None and one.sources:
                parameter = self._tied(parameter, names)
            (buffers if one.is_buffer else parameters)[name] = parameter
        groups = [self._group(number, group, order) for number, group in enumerate(self._checkpoint.param_groups)]
        same = {one.sources[0]: name for name, one in self._made.items() if one.is_same and one.sources}
        duplicates = [
            replace(one, name=same[one.name], of=same[one.of])
            for one in self._checkpoint.duplicates
            if one.name in same and one.of in same
        ]
        changed = replace(
            self._checkpoint, parameters=parameters, buffers=buffers, param_groups=groups, duplicates=duplicates
        )
        return Mapped(changed, self._notes, self._fit.target, same)

    def _tied(self, parameter: Parameter, names: Mapping[str, str]) -> Parameter:
        """Return an alias of the tensor that its owner has become, which must have become the same."""
        owner = names.get(str(parameter.tied_to))
        its = None if owner is None else self._made[owner].parameter
        if owner is None or its is None or its.shape != parameter.shape:
            raise UnsupportedError(
                f"{parameter.name} is another name of {parameter.tied_to}, which {self._map.name} arranges otherwise",
                path=self._checkpoint.source,
            )
        return replace(parameter, tied_to=owner)

    def _add_tied(self) -> None:
        """Add the names that the other side has for tensors of other names, where no rule has given them."""
        for alias, name in self._map.tied[self._fit.target].items():
            owner = self._made.get(name)
            if alias in self._made or owner is None or owner.is_buffer or owner.parameter.tied_to is not None:
                continue
            parameter = replace(owner.parameter, name=alias, slots={}, group=None, state={}, tied_to=name)
            self._made[alias] = _Made(parameter, len(self._positions), False, (), is_same=False)

    def _group(self, number: int, group: ParamGroup, order: Sequence[str]) -> ParamGroup:
        members = {name for name, one in self._made.items() if one.parameter.group == number}
        members = {name for name in members if self._made[name].parameter.tied_to is None}
        sources = {source for name in members for source in self._made[name].sources}
        rest = [name for name in group.parameters if name not in sources]
        if rest:
            raise UnsupportedError(
                f"param group {number} has {listed(rest)}, which the map {self._map.name} has not",
                path=self._checkpoint.source,
            )
        return replace(group, parameters=[name for name in order if name in members])


def _targets(templates: Sequence[Template], instance: Instance, sizes: Sizes) -> Iterator[Tensor]:
    for template in templates:
        own = [letter for letter in template.indices if letter not in instance.shared]
        if math.prod(map(sizes.total, own)) > MAXIMUM_TENSORS:
            raise UsageError(
                f"{instance.sources[0].name} would be more tensors than a model has",
                expected=f"at most {MAXIMUM_TENSORS}",
                found=", ".join(f"{letter}={sizes.total(letter)}" for letter in own),
            )
        for numbers in product(*(range(sizes.total(letter)) for letter in own)):
            indices = {**instance.shared, **dict(zip(own, numbers, strict=True))}
            yield Tensor(template, indices, template.name(indices))
