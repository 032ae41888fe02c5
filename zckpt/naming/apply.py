"""A checkpoint under the names of a map's other side, with its tensors arranged as there: parameters, slots, groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zckpt.compare.logical import single
from zckpt.engine.computed import Computed
from zckpt.errors import LayoutError, UnsupportedError, UsageError, listed
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.naming.arrange import Arrangement, arranged
from zckpt.naming.document import Map, Template
from zckpt.naming.match import Fit, Instance, fit
from zckpt.naming.order import sorted_names
from zckpt.naming.renames import check_different
from zckpt.naming.sizes import Sizes, Tensor
from zckpt.state import WEIGHT, Checkpoint, Parameter, ParamGroup, Slot
from zckpt.state.checkpoint import keys_listed

MAXIMUM_TENSORS = 1 << 17
"""That one tensor is taken apart into: experts of all layers. A file may say any shape."""


def mapped(checkpoint: Checkpoint, map_: Map, config: Mapping[str, int]) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint under the names of a map's other side, and what to know of it.

    Parameters
    ----------
    checkpoint : Checkpoint
        Stays as it is.
    map_ : Map
        Goes in the direction that fits the names.
    config : mapping of str to int
        Numbers of the model.

    Raises
    ------
    UsageError
        The names or shapes do not fit the map_.
    UnsupportedError
        State that it cannot arrange.
    LayoutError
        Parts of one tensor have state that contradicts itself.
    """
    _refuse(checkpoint, map_)
    shapes = {parameter.name: parameter.shape for parameter in checkpoint.tensors()}
    found = fit(map_, shapes, checkpoint.opened or checkpoint.source)
    work = _Mapping(checkpoint, map_, found, config)
    for instance in found.instances:
        work.add(instance)
    return work.result()


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
        sizes = Sizes(self._map, instance.rule, self._config, instance.sources)
        targets = list(_targets(templates, instance, sizes))
        letters = tuple(dict.fromkeys(letter for one in [*instance.sources, *targets] for letter in _letters(one)))
        letters = tuple(letter for letter in letters if letter not in instance.shared)
        sources = [Arrangement.of(letters, one.template, one.indices, sizes) for one in instance.sources]
        made = [Arrangement.of(letters, one.template, one.indices, sizes) for one in targets]
        self._check(instance, letters, sizes, (sources, made))
        if any(one.tied_to is not None for one in parameters):
            self._add_alias(parameters, targets, made)
            return
        joined = _Joined(self._checkpoint, self._map.name, parameters, sources)
        for one, arrangement in zip(targets, made, strict=True):
            self._keep(joined.parameter(one.name, arrangement), names, is_same=False)

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

    def _check(
        self, instance: Instance, letters: tuple[str, ...], sizes: Sizes,
        sides: tuple[Sequence[Arrangement], Sequence[Arrangement]],
    ) -> None:  # fmt: skip
        """Raise unless each element of either side is one of the other, but for padding; note what is padding."""
        shared = dict.fromkeys(letters, 1)
        whole = {letter: sizes.total(letter) for letter in shared}
        numel = math.prod(whole.values())
        counts = [sum(math.prod(one.sizes) for one in side) for side in sides]
        for side, count in zip(sides, counts, strict=True):
            twice = any(_meet(one, other) for i, one in enumerate(side) for other in side[:i])
            if twice or count > numel or (count < numel and not instance.rule.padded):
                raise UsageError(
                    f"{self._map.name}: not every element of {instance.sources[0].name} is on both sides once",
                    expected=f"{numel} with {', '.join(f'{name}={size}' for name, size in whole.items())}",
                    found="some are there twice" if twice else count,
                )
        for padded in instance.rule.padded:
            before, after = (
                max(one.low[i] + one.sizes[i] for one in side) for i in [letters.index(padded)] for side in sides
            )
            if before != after:
                what = "are left out as padding" if after < before else "are added as padding, zero"
                low, high = sorted((before, after))
                self._notes.append(
                    f"{self._map.name}: {padded} {low} to {high - 1} of {instance.sources[0].name} {what}"
                )

    def result(self) -> tuple[Checkpoint, list[str]]:
        """Return the checkpoint, and the notes."""
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
        return changed, self._notes

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


def _letters(one: Tensor) -> Iterator[str]:
    yield from one.template.indices
    for axis in one.template.axes or ():
        yield from (factor.name for factor in axis)


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


def _meet(a: Arrangement, b: Arrangement) -> bool:
    return all(x < y + n and y < x + m for x, m, y, n in zip(a.low, a.sizes, b.low, b.sizes, strict=True))


class _Joined:
    """The parameters that tensors of the other side are made of: what they have in common, and their slots."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, parts: Sequence[Parameter], arrangements: Sequence[Arrangement]
    ) -> None:
        self._checkpoint, self._name, self._parts, self._arrangements = checkpoint, name, parts, arrangements
        self._identity = False
        first = parts[0]
        for what in ("group", "frozen", "dtype"):
            values = [getattr(one, what) for one in parts]
            if any(value != values[0] for value in values):
                raise UnsupportedError(
                    f"{listed([one.name for one in parts])} are parts of one tensor in the map {name}, and differ in "
                    f"{'the param group' if what == 'group' else what}",
                    path=checkpoint.source,
                    expected="one that all have",
                    found=", ".join(map(str, values)),
                )
        if any((one.name in checkpoint.buffers) != (first.name in checkpoint.buffers) for one in parts):
            raise UnsupportedError(f"{first.name} and others are a buffer and a parameter", path=checkpoint.source)
        self._state = {key: self._value(key, [one.state.get(key) for one in parts]) for key in self._keys("state")}

    def _names(self) -> str:
        return listed([part.name for part in self._parts])

    def _keys(self, what: str) -> list[str]:
        """Return the keys that the parts have, all of them the same."""
        keys = [list(getattr(one, what)) for one in self._parts]
        for one, own in zip(self._parts, keys, strict=True):
            if set(own) != set(keys[0]):
                missing = sorted(set(keys[0]) ^ set(own))
                raise LayoutError(
                    f"{self._names()} are parts of one tensor in {self._name}, and not all have {', '.join(missing)}",
                    path=self._checkpoint.source,
                    found=f"{one.name} has {', '.join(own) or 'none'}",
                )
        return keys[0]

    def _value(self, key: str, values: Sequence[object]) -> object:
        """Return a value that all parts have."""
        told = [single(value) for value in values] if len(values) > 1 else [None]
        if any(one != told[0] for one in told):
            raise LayoutError(
                f"{self._names()} are parts of one tensor in the map {self._name}, and differ in {key}",
                path=self._checkpoint.source,
                found=", ".join(map(str, told)),
            )
        return values[0]

    def parameter(self, name: str, target: Arrangement) -> Parameter:
        """Return the parameter of the other side."""
        slots = {key: self._slot(key, target) for key in self._keys("slots")}
        whole = [key for key, value in self._state.items() if holds_tensors(value)]
        if whole and not self._is_alike(target):
            raise self._not_arranged(whole[0], "dequantize it, and map what was written")
        return replace(self._parts[0], name=name, shape=target.shape, slots=slots, state=dict(self._state))

    def _slot(self, key: str, target: Arrangement) -> Slot:
        slots = [one.slots[key] for one in self._parts]
        first = slots[0]
        if self._is_alike(target):
            return first
        if any(isinstance(slot, Computed) for slot in slots):
            raise self._not_arranged(key, "write it without the map, and map what was written")
        if all(not slot.shape for slot in slots) and self._parts[0].shape:
            self._value(key, slots)
            return first
        for part, slot in zip(self._parts, slots, strict=True):
            if slot.shape != part.shape:
                raise UnsupportedError(
                    f"{key} of {part.name} is not one number for each element, which the map {self._name} arranges",
                    path=self._checkpoint.source,
                    expected=part.shape,
                    found=slot.shape,
                    advice=None
                    if key == WEIGHT
                    else "without the optimizer's state, `zckpt consolidate` maps the model",
                )
            if slot.dtype != first.dtype or len(slot.replicas) != len(first.replicas):
                raise UnsupportedError(
                    f"{key} of {self._names()}, parts of one tensor in the map {self._name}, is of several types",
                    path=self._checkpoint.source,
                    found=f"{slot.dtype} and {first.dtype}",
                )
        return arranged(first, target, list(zip(self._arrangements, slots, strict=True)))

    def _not_arranged(self, key: str, advice: str) -> UnsupportedError:
        return UnsupportedError(
            f"{key} of {self._names()} is or was quantised, in blocks that the map {self._name} takes apart",
            path=self._checkpoint.source,
            advice=advice,
        )

    def _is_alike(self, target: Arrangement) -> bool:
        """Tell whether the parameter of the other side is the only part as it is."""
        return len(self._parts) == 1 and self._is_same(target)

    def _is_same(self, target: Arrangement) -> bool:
        """Tell whether the only part has the elements of the target in the same order, and no others."""
        (source,) = self._arrangements
        return (source.shape, source.low, source.sizes, source.order) == (
            target.shape, target.low, target.sizes, target.order,
        )  # fmt: skip
