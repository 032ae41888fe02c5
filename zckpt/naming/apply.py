"""A checkpoint under the names of a map's other side, with its tensors arranged as there: parameters, slots, groups.

Which rules the names follow, and in which direction; then each tensor of the other side is put together from those of
the source, as views of theirs:

source      (heads half two) in    ->  heads half two in  ->  narrowed, placed, padded  ->  heads half two in
target      (heads half two) in

All letters of a rule are dimensions on the way. What the parts have in common, the whole has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product

from zckpt.compare.logical import single
from zckpt.compare.slots import differences, pair
from zckpt.engine.computed import Computed
from zckpt.engine.scaled import Part, Portion, Scaled, as_they_are
from zckpt.errors import LayoutError, UnsupportedError, UsageError, listed
from zckpt.formats.low_bit import codes_in
from zckpt.formats.torch_files.tensors import holds_tensors
from zckpt.immutable import immutable
from zckpt.naming import Mapped
from zckpt.naming.axes import take
from zckpt.naming.document import Map, Rule, Template
from zckpt.naming.renames import check_different
from zckpt.naming.sizes import Sizes, Tensor
from zckpt.state import WEIGHT, Checkpoint, Parameter, ParamGroup, Shape, Slot, by_key, differ, positions
from zckpt.state.boxes import intersection, overlap, row_major
from zckpt.state.checkpoint import keys_listed
from zckpt.state.spans import ZEROS, position
from zckpt.state.views import narrow, pad, placed, reshape, transpose, zeros


@immutable
class Instance:
    """A rule for one set of tensors."""

    rule: Rule
    sources: tuple[Tensor, ...]
    shared: dict[str, int]  # the numbers that all their names have


@immutable
class Fit:
    """How the names of a checkpoint follow a map_."""

    source: int  # sides of the map_
    target: int
    instances: list[Instance]
    ignored: list[str]  # names that the other side needs not


Miss = tuple[int, int, list[str]]
"""How many names do not follow a side, its number, and the names."""


def fits(map_: Map, shapes: Mapping[str, Shape]) -> tuple[list[Fit], list[Miss]]:
    """Return in which ways names follow a map, given the shapes of all tensors by name, and which do not."""
    found: list[Fit] = []
    misses: list[Miss] = []
    for number, side in enumerate(map_.sides):
        instances: list[Instance] = []
        free = dict.fromkeys(shapes)
        for rule in map_.rules:
            for instance in of_rule(rule, rule.sides[number], free, shapes):
                if all(one.name(instance.shared) in shapes for one in rule.beside[number]):
                    instances.append(instance)
                    for one in instance.sources:
                        del free[one.name]
        ignored = [name for name in free if any(one.pattern.fullmatch(name) for one in side.ignored)]
        left = [name for name in free if name not in ignored]
        if instances and not left:
            found.append(Fit(number, 1 - number, instances, ignored))
        misses.append((len(left), number, left))
    return found, misses


def fit(map_: Map, shapes: Mapping[str, Shape], advice: str) -> Fit:
    """Return how names follow a map, given the shapes of all tensors by name, and what to do where they do not.

    Raises UsageError: they follow neither side, or both; UnsupportedError: for some the other side has no place.
    """
    found, misses = fits(map_, shapes)
    first, second = (side.name for side in map_.sides)
    if len(found) == 2:
        raise UsageError(f"{map_.name}: the names fit both {first} and {second}")
    if found:
        return found[0]
    _, number, left = min(misses)
    side = map_.sides[number]
    known = {name: why for name in left for one, why in side.refused.items() if one.pattern.fullmatch(name)}
    if left and len(known) == len(left):
        raise UnsupportedError(
            f"{map_.name}: {listed(left)}: {known[left[0]]}",
            advice=f"write your own map, like {map_.name}, with these in `ignored`",
        )
    raise UsageError(
        f"the map {map_.name} has no rule for {listed(left)}",
        expected=f"the names of {first} or {second}, with all parts of a tensor",
        found=f"{len(left)} of {len(shapes)} names that {side.name} does not have",
        advice=advice,
    )


def of_rule(
    rule: Rule, templates: Sequence[Template], names: Mapping[str, None], shapes: Mapping[str, Shape]
) -> list[Instance]:
    """Return the complete instances of a rule for templates of one of its sides, among names that are not taken yet."""
    shared = rule.shared
    met = by_key(
        (tuple(indices[one] for one in shared), Tensor(template, indices, name, shapes[name]))
        for template in templates
        for name in names
        if (indices := template.numbers(name)) is not None
    )
    return [
        Instance(rule, tuple(tensors), dict(zip(shared, key, strict=True)))
        for key, tensors in met.items()
        if _is_complete(templates, shared, tensors)
    ]


def _is_complete(templates: Sequence[Template], shared: Sequence[str], tensors: Sequence[Tensor]) -> bool:
    """Tell whether there is a tensor of each template for all numbers, from 0 on, of letters that are not shared."""
    counts: dict[str, int] = {}
    for one in tensors:
        for letter, number in one.indices.items():
            counts[letter] = max(counts.get(letter, 0), number + 1)
    for template in templates:
        letters = [letter for letter in template.indices if letter not in shared]
        own = {tuple(one.indices[letter] for letter in letters) for one in tensors if one.template is template}
        if len(own) != math.prod(counts.get(letter, 0) for letter in letters):
            return False
    return True


@immutable
class Arrangement:
    """A tensor as a box of all letters of a rule."""

    low: Shape  # the box, by letter, in one order for all tensors of the rule
    sizes: Shape
    axes: tuple[Shape, ...]  # the letters of each dimension, by number

    @classmethod
    def of(cls, letters: Sequence[str], template: Template, indices: Mapping[str, int], sizes: Sizes) -> Arrangement:
        """Return the arrangement of one tensor of a rule."""
        bounds = {letter: (indices[letter], indices[letter] + 1) for letter in letters if letter in indices}
        bounds |= {factor.name: sizes.bounds(factor) for factor in template.factors}
        number = positions(letters)
        return cls(
            tuple(bounds[letter][0] for letter in letters),
            tuple(bounds[letter][1] - bounds[letter][0] for letter in letters),
            tuple(tuple(number[factor.name] for factor in axis) for axis in template.axes or ()),
        )

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple(math.prod(self.sizes[letter] for letter in axis) for axis in self.axes)

    @property
    def order(self) -> list[int]:
        """All letters in the order in which the tensor has them, those that it has not first."""
        own = [letter for axis in self.axes for letter in axis]
        return [letter for letter in range(len(self.sizes)) if letter not in own] + own

    @property
    def seen(self) -> tuple[object, ...]:
        """What two tensors have alike whose elements are the same, in the same order."""
        return self.shape, self.low, self.sizes, [letter for letter in self.order if self.sizes[letter] != 1]


def arranged(target: Arrangement, sources: Sequence[tuple[Arrangement, Slot]]) -> Slot:
    """Return a slot whose elements are those of others; where none has them, zeros.

    `sources`: all of one type, whose boxes do not meet. What none has is before or behind all of them, along some
    letters.
    """
    parts = []
    for one, slot in sources:
        both = intersection((one.low, one.sizes), (target.low, target.sizes))
        if both is not None:
            view = reshape(slot, tuple(one.sizes[letter] for letter in one.order))
            view = transpose(view, [one.order.index(letter) for letter in range(len(one.order))])
            for letter, (low, size) in enumerate(zip(*both, strict=True)):
                view = narrow(view, letter, low - one.low[letter], size)
            parts.append((both[0], view))
    if not parts:
        return zeros(sources[0][1], target.shape)
    first = [min(lows) for lows in zip(*(low for low, _ in parts), strict=True)]
    whole = placed([(tuple(a - b for a, b in zip(low, first, strict=True)), view) for low, view in parts])
    for letter, (low, size) in enumerate(zip(target.low, target.sizes, strict=True)):
        whole = pad(whole, letter, first[letter] - low, low + size - first[letter] - whole.shape[letter])
    return reshape(transpose(whole, target.order), target.shape)


class Joined:
    """The parameters that tensors of the other side are made of: what they have in common, and their slots."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, parts: Sequence[Parameter], arrangements: Sequence[Arrangement]
    ) -> None:
        self._map, self._parts, self._arrangements = f"the map {name}", parts, arrangements
        self._names = listed([part.name for part in parts])
        self._are = f"{self._names} are parts of one tensor in {self._map}"
        for what, said in (("group", "the param group"), ("frozen", "frozen"), ("dtype", "dtype")):
            values = [getattr(one, what) for one in parts]
            if differ(values):
                raise UnsupportedError(
                    f"{self._are}, but differ in {said}",
                    expected="the same for all",
                    found=", ".join(map(str, values)),
                )
        if len({one.name in checkpoint.buffers for one in parts}) > 1:
            raise UnsupportedError(f"{parts[0].name} and others include both a buffer and a parameter")
        self._keys = self._shared_keys([list(one.slots) for one in parts])
        state = self._shared_keys([list(one.state) for one in parts])
        self._state = {key: self._value(key, [one.state[key] for one in parts]) for key in state}

    def _shared_keys(self, keys: Sequence[list[str]]) -> list[str]:
        """Return the keys that the parts have, all of them the same."""
        for one, own in zip(self._parts, keys, strict=True):
            if set(own) != set(keys[0]):
                missing = sorted(set(keys[0]) ^ set(own))
                raise LayoutError(
                    f"{self._are}, but not all have {', '.join(missing)}",
                    found=f"{one.name} has {', '.join(own) or 'none'}",
                )
        return keys[0]

    def _value(self, key: str, values: Sequence[object]) -> object:
        """Return a value that all parts have."""
        told = [single(value) for value in values] if len(values) > 1 else [None]
        if differ(told):
            raise LayoutError(f"{self._are}, but differ in {key}", found=", ".join(map(str, told)))
        return values[0]

    def parameter(self, name: str, target: Arrangement) -> Parameter:
        """Return the parameter of the other side."""
        first = self._parts[0]
        if len(self._parts) == 1 and self._arrangements[0].seen == target.seen:  # it is the part as it is
            slots = dict(first.slots)
        else:
            slots = {key: self._slot(key, target) for key in self._keys}
            for key, value in self._state.items():
                if holds_tensors(value):
                    raise self._not_arranged(key, "dequantize it, then map the result")
        return replace(first, name=name, shape=target.shape, slots=slots, state=dict(self._state))

    def check_equal(self, made: Parameter, copy: Arrangement) -> None:
        """Raise UnsupportedError unless a copy of what was made has equal bits."""
        other = self.parameter(made.name, copy)
        found = differences([pair(f"{key}/{made.name}", one, other.slots[key]) for key, one in made.slots.items()])
        if found:
            raise UnsupportedError(
                f"{self._names} are not copies of one tensor, as {self._map} requires: {found[0].label}",
                expected="equal bits",
                found=f"{found[0].figures.num_different} elements that differ",
            )

    def _slot(self, key: str, target: Arrangement) -> Slot:
        slots = [one.slots[key] for one in self._parts]
        first = slots[0]
        if any(isinstance(slot, Computed) for slot in slots):
            return self._computed(key, target, slots)
        if all(not slot.shape for slot in slots) and self._parts[0].shape:
            self._value(key, slots)
            return first
        for part, slot in zip(self._parts, slots, strict=True):
            if slot.shape != part.shape:
                raise UnsupportedError(
                    f"{key} of {part.name} does not have one number per element, so {self._map} cannot rearrange it",
                    expected=part.shape,
                    found=slot.shape,
                    advice=None
                    if key == WEIGHT
                    else "without the optimizer's state, `zckpt consolidate` maps the model",
                )
            if slot.dtype != first.dtype or len(slot.replicas) != len(first.replicas):
                raise UnsupportedError(
                    f"{key} of {self._names}, parts of one tensor in {self._map}, has several types",
                    found=f"{slot.dtype} and {first.dtype}",
                )
        return arranged(target, list(zip(self._arrangements, slots, strict=True)))

    def _computed(self, key: str, target: Arrangement, slots: Sequence[Slot]) -> Slot:
        """Return a slot of computed ones, of which ranges lie end to end, as experts do in a stack."""
        numbers = [Slot.at(str(n), 0, "uint8", slot.shape, key) for n, slot in enumerate(slots)]
        # They stand for them: of an element in a byte, a span's path is which one it is of, its offset which element.
        whole = arranged(target, list(zip(self._arrangements, numbers, strict=True)))
        portions, is_one = [], len({slot.dtype for slot in slots}) == 1
        for span in (span for span in whole.spans if span.path != ZEROS):
            own, shape = span.extent, whole.factors or whole.shape
            first = next((n for n, size in enumerate(own.sizes) if size != 1), len(shape))
            if not is_one or span.strides or own.sizes[first + 1 :] != shape[first + 1 :]:
                raise self._not_arranged(
                    key,
                    "write it without the map first (`zckpt consolidate` to x.safetensors, with --dequantize if it has "
                    "codes), then map or load the result",
                )
            at, slot = position(own.offsets, row_major(shape)) + own.start, slots[int(span.path)]
            part = Part(slot, dtype="float64" if slot.dtype == "float64" else "float32")  # rounded once, later
            portions.append(Portion(at, own.numel, span.offset, (part,), as_they_are))
        every = tuple(sorted(portions, key=lambda one: one.start))
        return Computed(key, slots[0].dtype, target.shape, (), function=Scaled(every))

    def _not_arranged(self, key: str, advice: str) -> UnsupportedError:
        return UnsupportedError(
            f"{key} of {self._names} is computed, or is or was quantised in blocks, and {self._map} splits it",
            advice=advice,
        )


MAXIMUM_TENSORS = 1 << 17
"""That one tensor is taken apart into: experts of all layers. A file may say any shape."""


def mapped(checkpoint: Checkpoint, map_: Map, config: Mapping[str, int], to: int | None = None) -> Mapped:
    """Return a checkpoint, which stays as it is, under the names of a map's other side, as its own names tell.

    `config`: numbers of the model; `to`: the side whose names are wanted, what has them already stays as it is. Raises
    UsageError: names or shapes do not fit; UnsupportedError: state that the map cannot arrange; LayoutError: parts of
    one tensor have state that contradicts itself.
    """
    if map_.taken:
        _check_arrangeable(checkpoint, map_)
        taken, notes = take(checkpoint, map_.taken, map_.name)
        same = {one.name: one.name for one in checkpoint.tensors() if taken.find(one.name) is one}
        return Mapped(taken, notes, 1, same)
    implied = frozenset().union(*(side.implied for side in map_.sides))  # names that only one side has
    whole = checkpoint
    kept = {name: one for name, one in whole.parameters.items() if name not in implied or one.tied_to is None}
    copies = [
        (name, owner)
        for side in map_.sides
        for template, of in side.copies.items()
        for name in whole.parameters
        if (numbers := template.numbers(name)) is not None and (owner := of.name(numbers)) in kept
    ]
    for name, of in copies:
        one, own = kept.pop(name), kept[of]
        is_alike = list(one.slots) == [WEIGHT] and own.weight and one.shape == own.shape
        if one.tied_to != of and not (is_alike and not differences([pair(name, one.slots[WEIGHT], own.slots[WEIGHT])])):
            raise UnsupportedError(
                f"{name} is not a copy of {of}, and the map {map_.name} has no other place for it",
                expected="equal bits",
            )
    checkpoint = replace(whole, parameters=kept)
    advice = "--strip-prefix and --rename come before the map; or write a map of your own"
    if codes_in(checkpoint):
        advice = "`zckpt consolidate --dequantize` writes numbers in the place of codes, and these can be mapped"
    found = fit(map_, {parameter.name: parameter.shape for parameter in checkpoint.tensors()}, advice)
    if found.source == to:
        return Mapped(whole, [], to, {name: name for name in whole.names})
    # torchtitan 0.3 has queries, keys and values of a layer in one parameter, which its optimizer's state is of, and
    # saves the model as three tensors: that state is taken apart, too.
    unnamed = dict(checkpoint.unnamed)
    shapes = {name: one.shape for name, one in unnamed.items()}
    apart = [
        (instance, unnamed.pop(instance.sources[0].name))
        for rule in map_.sides[found.source].optimizer
        for instance in of_rule(rule, rule.sides[found.source], dict.fromkeys(shapes), shapes)
    ]
    checkpoint = replace(checkpoint, unnamed=unnamed)
    _check_arrangeable(checkpoint, map_)
    work = _Mapping(checkpoint, map_, found, config)
    for instance in found.instances:
        work.add(instance)
    for instance, one in apart:
        work.give(instance, one)
    done = work.result()
    if copies:
        done.notes.append(f"{map_.name}: {listed([name for name, _ in copies])} are equal copies, and left out")
    return done


def _check_arrangeable(checkpoint: Checkpoint, map_: Map) -> None:
    """Raise UnsupportedError if a checkpoint has state that is of no tensor of the model, or of what a rank holds."""
    if checkpoint.unnamed:
        raise UnsupportedError(
            f"the optimizer's state of {listed(list(checkpoint.unnamed))} belongs to no tensor of the model, so the "
            f"map {map_.name} does not apply",
            advice="give --names FILE if the file only numbers them, or the model with its optimizer",
        )
    if checkpoint.per_rank:
        raise UnsupportedError(
            f"{keys_listed(checkpoint.per_rank)}: each rank has its own, for the elements that it holds, which a "
            "map cannot rearrange"
        )


@immutable
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
        self._positions = positions(checkpoint.names)
        self._made: dict[str, _Made] = {}
        self._notes = [f"{map_.name}: names of {map_.sides[found.source].name} become those of {self._side.name}"]
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
        sources, targets = self._arranged(instance)
        if all(one.tied_to is None for one in parameters):
            times = len(sources) // len(parameters)
            joined = Joined(
                self._checkpoint, self._map.name, [one for one in parameters for _ in range(times)], sources
            )
            for one, (arrangement, *others) in targets:
                parameter = joined.parameter(one.name, arrangement)
                for other in others:
                    joined.check_equal(parameter, other)
                self._keep(parameter, names)
        elif len(parameters) > 1 or len(targets) > 1:
            raise UnsupportedError(
                f"{listed(names)} is partly another name of a tensor that the map {self._map.name} splits"
            )
        else:
            one, (arrangement, *_) = targets[0]
            self._keep(replace(parameters[0], name=one.name, shape=arrangement.shape), names)

    def _arranged(self, instance: Instance) -> tuple[list[Arrangement], list[tuple[Tensor, list[Arrangement]]]]:
        """Return how the tensors of a rule are arranged, and those of the other side, which have the same elements.

        Sources that are to be copied are there for each of their copies. A tensor of the other side has further
        arrangements where the source has copies of it. Raises UsageError: an element of one side is not once on the
        other, and no padding.
        """
        rule, first, own = instance.rule, instance.sources[0].name, self._map.name
        sizes = Sizes(self._map, rule, self._config, instance.sources)
        targets = []
        for template in rule.sides[self._fit.target]:
            counts = {letter: sizes.value(letter) for letter in template.indices if letter not in instance.shared}
            if math.prod(counts.values()) > MAXIMUM_TENSORS:
                raise UsageError(
                    f"{first} would become too many tensors",
                    expected=f"at most {MAXIMUM_TENSORS}",
                    found=", ".join(f"{letter}={size}" for letter, size in counts.items()),
                )
            for numbers in product(*map(range, counts.values())):
                indices = {**instance.shared, **dict(zip(counts, numbers, strict=True))}
                targets.append(Tensor(template, indices, template.name(indices)))
        every = dict.fromkeys(letter for one in [*instance.sources, *targets] for letter in one.template.letters)
        letters = tuple(letter for letter in every if letter not in instance.shared)
        whole = {letter: sizes.value(letter) for letter in letters}
        numel = math.prod(whole.values())

        def copies(one: Tensor) -> list[Arrangement]:
            extra = [letter for letter in rule.copied if letter not in one.template.letters]
            values = product(*(range(whole[letter]) for letter in extra))
            numbered = ({**one.indices, **dict(zip(extra, value, strict=True))} for value in values)
            return [Arrangement.of(letters, one.template, indices, sizes) for indices in numbered]

        if math.prod(whole[letter] for letter in rule.copied) > MAXIMUM_TENSORS:
            raise UsageError(f"{own}: {first} has too many copies", expected=f"at most {MAXIMUM_TENSORS}")
        made = [(one, copies(one)) for one in targets]
        sides = [[copy for one in instance.sources for copy in copies(one)], [copy for _, its in made for copy in its]]
        for side in sides:
            count = sum(math.prod(one.sizes) for one in side)
            twice = overlap([(one.low, one.sizes) for one in side])
            if twice or count > numel or (count < numel and not rule.padded):
                raise UsageError(
                    f"{own}: not every element of {first} is on both sides exactly once",
                    expected=f"{numel} with {', '.join(f'{letter}={size}' for letter, size in whole.items())}",
                    found="some appear twice" if twice else count,
                )
        for padded in rule.padded:
            at = letters.index(padded)
            before, after = (max(one.low[at] + one.sizes[at] for one in side) for side in sides)
            if before != after:
                what = "are left out as padding" if after < before else "are added as padding, zero"
                low, high = sorted((before, after))
                self._notes.append(f"{own}: {padded} {low} to {high - 1} of {first} {what}")
        return sides[0], made

    def _keep(self, parameter: Parameter, sources: Sequence[str], *, is_same: bool = False) -> None:
        before = self._made.get(parameter.name)
        if before is not None:
            check_different(dict.fromkeys((*before.sources, *sources), parameter.name), f"--map={self._map.name}")
        is_buffer = sources[0] in self._checkpoint.buffers
        position = min(self._positions[name] for name in sources)
        self._made[parameter.name] = _Made(parameter, position, is_buffer, tuple(sources), is_same)

    def give(self, instance: Instance, whole: Parameter) -> None:
        """Give tensors of the other side, which are made already, the optimizer's state of what they are parts of."""
        sources, targets = self._arranged(instance)
        joined = Joined(self._checkpoint, self._map.name, [whole], sources)
        for target, (arrangement, *_) in targets:
            taken = joined.parameter(target.name, arrangement)
            made = self._made.get(taken.name)
            own = None if made is None else made.parameter
            if made is None or own is None or own.tied_to is not None or own.shape != taken.shape:
                raise UnsupportedError(
                    f"the optimizer's state of {whole.name} is partly that of {taken.name}, which the model lacks",
                    expected=f"{taken.name} of shape {taken.shape}",
                    found=None if own is None else own.shape,
                )
            if own.group is not None:
                raise UnsupportedError(
                    f"the optimizer has state both for {listed(made.sources)} and for {whole.name}, which includes it"
                )
            slots = {**own.slots, **taken.slots, **own.slots}
            parameter = replace(own, slots=slots, group=taken.group, frozen=False, state=taken.state)
            self._made[taken.name] = _Made(parameter, made.position, False, (*made.sources, whole.name))

    def result(self) -> Mapped:
        """Return the checkpoint, and what to know of it."""
        names = {source: one.parameter.name for one in self._made.values() for source in one.sources}
        ties = [  # names that no rule has given
            (alias.name(numbers), name)
            for alias, of in self._side.tied.items()
            for name, owner in self._made.items()
            if (numbers := of.numbers(name)) is not None and not owner.is_buffer and owner.parameter.tied_to is None
        ]
        for alias, name in ties:
            if alias not in self._made:
                parameter = replace(
                    self._made[name].parameter, name=alias, slots={}, group=None, state={}, tied_to=name
                )
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
                        f"{name} is another name of {parameter.tied_to}, which {self._map.name} rearranges differently"
                    )
                parameter = replace(parameter, tied_to=owner_name)
            (buffers if one.is_buffer else parameters)[name] = parameter
        members = by_key((one.group, one.name) for one in parameters.values() if one.tied_to is None)
        groups = [
            self._group(number, group, members.get(number, []))
            for number, group in enumerate(self._checkpoint.param_groups)
        ]
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

    def _group(self, number: int, group: ParamGroup, members: list[str]) -> ParamGroup:
        sources = {source for name in members for source in self._made[name].sources}
        rest = [name for name in group.parameters if name not in sources]
        if rest:
            raise UnsupportedError(
                f"param group {number} has {listed(rest)}, which the map {self._map.name} does not have"
            )
        return replace(group, parameters=members)


def sorted_names(positions: Mapping[str, int], templates: Sequence[Template]) -> list[str]:
    """Return names, which have positions, in the order of templates; those that none fits come after them."""
    blocks = list(_blocks(templates, 0))
    every = [*zip(templates, blocks, strict=True)]
    known = {one.text: numbers for one, numbers in reversed(every) if not one.indices}  # a map may name each tensor
    general = [(one, numbers) for one, numbers in every if one.indices]

    def key(name: str) -> tuple[tuple[int, int], ...]:
        own, indices = known.get(name), list[int]()
        for one, numbers in general:
            if own is not None and own < numbers:
                break
            match = one.pattern.fullmatch(name)
            if match is not None:
                own, indices = numbers, [int(match[letter]) for letter in one.indices]
                break
        if own is None:
            return ((1, positions[name]),)
        return tuple((0, part) for pair in zip(own, [*indices, 0], strict=True) for part in pair)

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
