"""Which dicts of a file are models, which are optimizers, and which optimizer is whose. Reads nothing.

{name: tensor}                                               a model, by itself
{"model": {...}, "optimizer": {...}, ...}                    under any keys
{"state": {"model": ..., "optimizers": {...}}, "rng": ...}   or in one dict below them, as Composer keeps them
{"optimizer": [{...}, {...}]}, {"optimizers": {"a": {...}}}  several optimizers of one model: all are read
{"generator": ..., "discriminator": ..., "optimizer_g": ..., "optimizer_d": ...}
                                                             several models: the names of each get its key in front
{"G": {"model": ..., "optimizer": ...}, "D": {...}}          several, each with its optimizer: likewise
{"models": {"G": {...}, "D": {...}}}, {"models": [{...}, {...}]}
                                                             in one dict or list: under `models.G`, `models.0`

Of several dicts of tensors one is the model if its key is a usual one and no optimizer needs another (the others are
averages of it, or targets). An optimizer belongs to the model whose parameters it can have by their number and shapes;
where these leave several, by its key; else its parameters keep their numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any, TypeGuard

from zckpt.errors import listed
from zckpt.evidence import MOST_PERMUTED, NAMES_ADVICE, agree, greatest, may_be_trained, orders_of_models
from zckpt.formats.torch_files.optimizer import (
    MASTERS,
    STATE_KEY,
    OptimizerState,
    as_torchs,
    innermost,
    joined,
    looks_flattened,
    looks_like_optimizer,
    masters_of,
    optimizer_rules,
    parse_held,
    with_rest,
)
from zckpt.formats.torch_files.tensors import identity_of
from zckpt.immutable import mutable
from zckpt.state import Shape, are_distinct, are_texts, dict_of, inside, without
from zckpt.state.inventory import STATE, Rule, exactly
from zckpt.state.names import FRONT, aligned
from zckpt.torchfile import Place, Tensor, is_leaf, is_tensor, value_at, with_value

STATE_DICT_KEYS = ("model", "module", "state_dict", "model_state_dict", "model_state", "net", "network", "weights")
"""Keys under which programs keep the model, most usual first; decides only where several dicts of tensors are there."""

OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optimizers", "optim", "optimizer_state")

AVERAGES = frozenset({"ema", "swa", "avg", "average", "averaged", "target", "shadow", "old", "best", "teacher"})
"""What keys of models say that no optimizer has."""

MOST_COMBINED = 16
"""Of models in a file, those of which every few are tried as all that an optimizer has."""

DEEPEST = 4
"""Dicts and lists in each other in which models and optimizers are looked for."""

EXTRA_STATE = "_extra_state"
"""What the name of a module's extra state ends with, be it a tensor or not (torch 2.13, `Module.get_extra_state`)."""

Node = Mapping[object, object]
Shapes = Mapping[str, Shape]
"""Of a model's parameters, by name; a tied one once."""


@mutable
class Held:
    """An optimizer of a file: where it is, what it is called among several, its state, and what its names begin with.

    Those of several models begin with any of `several`.
    """

    path: Place
    state: OptimizerState
    is_flat: bool
    name: str = ""
    scope: str = ""
    several: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name, or else its key."""
        return self.name or str(self.path[-1] if self.path else "")

    @property
    def rules(self) -> tuple[Rule, ...]:
        """What is known of the values in it."""
        place = tuple(map(exactly, self.path))
        if self.is_flat:
            return (Rule((*place, "**"), STATE, "hyperparameters"),)
        return optimizer_rules(*place, rest=self.state.rest, at=self.state.at.get(None, ()))


@mutable
class Content:
    """What a file has."""

    models: dict[str, Node] = field(default_factory=dict)  # by what is put before names; of one model nothing is
    keys: set[object] = field(default_factory=set)  # under which the models are
    optimizers: list[Held] = field(default_factory=list)
    root: Node = field(default_factory=dict)
    base: Node = field(default_factory=dict)
    """The whole file, and the dict in which all these are: the same, or what is at `place` in it."""
    place: Place = ()
    beside: dict[object, Node] = field(default_factory=dict)
    """Where models lie in dicts with their optimizers, what else is in these."""
    warnings: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> dict[object, object]:
        """All models' tensors, by the names that they get."""
        if list(self.models) == [""]:
            return dict(self.models[""])
        return {f"{prefix}{name}": one for prefix, model in self.models.items() for name, one in model.items()}

    @property
    def state(self) -> OptimizerState | None:
        """All optimizers as one."""
        if not self.optimizers:
            return None
        [first, *others] = self.optimizers
        if not others and not first.scope:
            return first.state
        return joined((one.name if others else None, one.scope, one.state) for one in self.optimizers)

    def orders(self, group: int, names: Sequence[str]) -> Sequence[Sequence[str]]:
        """Return the orders that a param group may have: of several models one after another, in any order."""
        held = [one for one in self.optimizers for _ in one.state.groups][group]
        models = [{f"{prefix}{name}" for name in self.models[prefix]} for prefix in held.several]
        return orders_of_models(models, group, names)

    @property
    def others(self) -> dict[object, object]:
        """What the file holds besides the tensors of models and the optimizers: every value once.

        What a model's dict has that is no tensor stays under the name that the dict has in the file.
        """
        if any(not one.path for one in self.optimizers):
            return {}  # the file is an optimizer, and nothing else
        return dict_of(with_value(self.root, self.place, self._rest))

    @property
    def _rest(self) -> dict[object, object]:
        """What the base has of that."""
        if self.beside:
            return {key: self.beside.get(key, value) for key, value in self.base.items() if self.beside.get(key) != {}}
        first = len(self.place)
        gone = {one.path[first] for one in self.optimizers}
        inner = {one.path[first : first + 2] for one in self.optimizers}
        rest: dict[object, object] = {}
        for key, value in self.base.items():
            if key in self.keys:
                read = self.models.get("", self.models.get(f"{key}.", {}))
                extra = {name: one for name, one in dict_of(value).items() if not is_tensor(one) or name not in read}
                rest.update({key: extra} if extra else {})
            elif key not in gone and not (None in self.keys and is_tensor(value)):
                rest[key] = value
            elif key in gone and (key,) not in inner:  # beside those read
                masters = MASTERS if any(one.state.masters for one in self.optimizers) else ()
                others = without(inside(value), *masters)
                beside = {step: one for step, one in others.items() if (key, step) not in inner}
                rest.update({key: beside} if beside else {})
        return rest


def content_of(root: Node, path: Path, *, spreads: bool = False, seen: set[int] | None = None) -> Content:
    """Find models and optimizers.

    `spreads`: models in a list, or in a dict of them alone, are several; `seen`: dicts of dicts that were looked into,
    each once, since some may lie in themselves. Raises DamagedFileError: what looks like an optimizer is none.
    """
    seen = set() if seen is None else seen
    node = root
    top = base = _one_by_one(root) if spreads else root
    place: Place = ()
    models: dict[object, Node] = {}
    optimizers: dict[object, list[Held]] = {}
    while id(node) not in seen:
        models, optimizers = _models(base), _optimizers(base, place, path)
        is_usual = not models.keys().isdisjoint(STATE_DICT_KEYS)
        others = [base[key] for key in _no_averages(base)]
        if optimizers or (_trained(models) and (is_usual or not _holds(others, _is_pair))):
            break
        seen.add(id(node))
        below = _below(base, models, seen)
        if len(below) > 1:
            parts = {key: content_of(dict_of(base[key]), path, seen=seen) for key in below}
            keys = [part.keys for part in parts.values() if part.models and part.optimizers]
            if keys:  # beside which models of the same keys have none
                parts = {k: part for k, part in parts.items() if part.models and (part.optimizers or part.keys in keys)}
                if len(parts) > 1:
                    return _together(Content(root=top, base=base, place=place), parts)
                [(key, part)] = parts.items()
                for held in part.optimizers:
                    held.path = (*place, key, *held.path)
                part.root, part.place = top, (*place, key, *part.place)
                return _warned_of_rest(part)
        if len(below) != 1:
            break
        node = dict_of(base[below[0]])
        base, place = _one_by_one(node) if spreads else node, (*place, below[0])
    if place and not models:  # of a rank's file of another program, say
        optimizers = {}
    found = Content(root=top, base=base, place=place)
    shapes = {key: shapes_of(model) for key, model in models.items()}
    _choose_optimizers(found, optimizers, shapes)
    _choose_models(found, models, shapes)
    for held in found.optimizers:
        its = value_at(root, held.path)
        held.state = with_rest(held.state, its, *(found.keys if its is base else ()))
    return _warned_of_rest(found, models)


def _warned_of_rest(found: Content, known: Iterable[object] = ()) -> Content:
    """Warn of models and optimizers in what is carried; of those `known` it has been said."""
    others = without(found.others, *found.keys, *known)
    if carried := [str(key) for key, value in others.items() if _holds({key: value}, _is_more)]:
        found.warnings.append(f"more models or optimizers are carried as they are, and not read: {listed(carried)}")
    return found


def _below(base: Node, models: Mapping[object, Node], seen: set[int]) -> list[object]:
    """Return what of a dict has models in it, beside some of which none is trained, or else an optimizer further in.

    A model with its optimizer, further in, comes before tensors without one, a replay buffer's say.
    """
    new = {key: value for key, value in base.items() if key not in models and id(value) not in seen}
    dicts = {key: value for key, value in new.items() if isinstance(value, dict)}
    every = [key for key, value in dicts.items() if _models(value)]
    trained = [key for key, value in dicts.items() if _holds(value, _is_optimizer)]
    if not {*every} & {*trained}:
        every = [key for key in trained if _holds([dicts[key]], _is_pair)] or every or trained
    return every if models else _no_averages(every) or every


def _trained(models: Mapping[object, Node]) -> bool:
    """Tell whether some of these is a model that may be trained, not an average or random states."""
    return any(not is_averages(key) and _has_elements(model) for key, model in models.items())


def _has_elements(model: Node) -> bool:
    return any(shapes_of(model).values())


def _no_averages(keys: Iterable[object]) -> list[object]:
    return [key for key in keys if not is_averages(key)]


def _holds(node: object, what: Callable[[object], bool]) -> bool:
    """Tell whether something is somewhere in dicts and lists, not too deep; each is looked at once."""
    level, seen = [node], {id(node)}
    for _ in range(DEEPEST):
        below: list[object] = []
        for one in level:
            for child in inside(one).values():
                if isinstance(child, (dict, list, tuple)) and id(child) not in seen:
                    seen.add(id(child))
                    below.append(child)
        if any(map(what, below)):
            return True
        level = below
    return False


def _is_pair(node: object) -> bool:
    values = dict_of(node).values()
    return any(map(is_state_dict, values)) and any(map(_is_optimizer, values))


def _is_more(node: object) -> bool:
    """Tell a model of more than single numbers, or an optimizer."""
    return _is_optimizer(node) or _has_elements(dict_of(node))


def _one_by_one(root: Node) -> dict[object, object]:
    """Return a dict with each model of a list, or of a dict of models alone, under a key of its own, `models.0`.

    Where there is no other model, or only an average; nor, further in, one with its optimizer.
    """
    found: dict[object, object] = {}
    if _trained(_models(root)) or _is_optimizer(root) or _holds(root, _is_pair):
        return dict(root)
    for key, value in root.items():
        several = inside(value)
        its = {step: one for step, one in several.items() if is_state_dict(one) and key != STATE_KEY}
        rest: Node = without(several, *its)
        is_usual = not {key, str(key).removesuffix("s")}.isdisjoint(STATE_DICT_KEYS)
        if its and not is_averages(key) and (not rest or (is_usual and all(map(is_leaf, rest.values())))):
            found |= {f"{key}.{step}": one for step, one in its.items()} | ({key: rest} if rest else {})
        elif _trained(_models(dict_of(value))) and not is_averages(key):
            return dict(root)  # each with something else, an optimizer say
        else:
            found[key] = value
    return found


def _together(found: Content, parts: dict[object, Content]) -> Content:
    found.beside = {key: part.others for key, part in parts.items()}
    for key, part in parts.items():
        found.models |= {f"{key}.{prefix}": model for prefix, model in part.models.items()}
        for held in part.optimizers:
            held.path, held.scope = (*found.place, key, *held.path), f"{key}.{held.scope}"
            held.name = f"{key}.{held.name}" if held.name else str(key)
            held.several = tuple(f"{key}.{prefix}" for prefix in held.several)
        found.optimizers += part.optimizers
        found.warnings += part.warnings
    return _warned_of_rest(_warned(found, parts))


# --- what is there


def is_state_dict(node: object) -> TypeGuard[dict[Any, Any]]:
    """Tell a dict of tensors, of which some are dense; what a module keeps as its extra state may be anything."""
    if not isinstance(node, dict) or not are_texts(node):
        return False
    values = [value for key, value in node.items() if isinstance(value, Tensor) or not key.endswith(EXTRA_STATE)]
    return any(isinstance(value, Tensor) for value in values) and all(map(is_tensor, values))


def dtypes_of(model: Node) -> dict[str, str]:
    """Return the element types of a state dict's tensors."""
    return {str(name): one.dtype for name, one in model.items() if isinstance(one, Tensor)}


def shapes_of(model: Node) -> dict[str, Shape]:
    """Return the shapes of what an optimizer could have of a model."""
    found: dict[object, tuple[str, Shape]] = {}
    dtypes = dtypes_of(model)
    for name, one in model.items():
        if isinstance(one, Tensor) and may_be_trained(str(name), dtypes):
            found.setdefault(identity_of(one) if one.numel else (name,), (str(name), one.shape))
    return dict(found.values())


def _models(base: Node) -> dict[object, Node]:
    """Return dicts of tensors by key; what is mostly tensors itself is one, under None."""
    if is_state_dict(base):
        return {None: base}
    found: dict[object, Node] = {key: one for key, one in base.items() if is_state_dict(one)}
    found = found or {key: dict_of(base.get(key)) for key in STATE_DICT_KEYS if _tensors_mostly(dict_of(base.get(key)))}
    if found:
        return found
    tensors = _tensors_mostly(base)
    return {None: tensors} if tensors else {}


def _tensors_mostly(node: Node) -> Node:
    """Return the tensors of a dict that has little else, and is no optimizer's; of any other none."""
    tensors = {key: value for key, value in node.items() if is_tensor(value)}
    mostly = any(isinstance(one, Tensor) for one in tensors.values()) and len(tensors) * 2 > len(node)
    return tensors if mostly and not _is_optimizer(node) else {}


def _optimizers(base: Node, at: Place, path: Path) -> dict[object, list[Held]]:
    """Return optimizers by key: one under it, or a list or a dict of them, in which single values may be beside them.

    A base that is one is under None.
    """
    if _is_optimizer(base):
        return {None: [_held(base, at, path)]}
    found: dict[object, list[Held]] = {}
    for key, value in ((key, as_torchs(value)) for key, value in base.items()):
        several = inside(value).items()
        places: dict[Place, object] = {(): value} if _is_optimizer(value) else {(step,): one for step, one in several}
        taken = {step: one for step, one in places.items() if _is_optimizer(one)}
        if taken and all(map(is_leaf, without(places, *taken).values())):
            found[key] = [_held(one, (*at, key, *step), path, *map(str, step)) for step, one in taken.items()]
        elif words(key) & _OPTIMIZERS and (way := innermost(value)):
            found[key] = [_held(value, (*at, key), path)]
            if len(way) == 1 and masters_of(value, value_at(value, way)):  # of which a plain optimizer takes all
                found[key][0].path += way
    return found


def _is_optimizer(node: object) -> bool:
    return looks_like_optimizer(node) or looks_flattened(node)


def _held(node: object, place: Place, path: Path, name: str = "") -> Held:
    return Held(place, parse_held(node, str(path)), looks_flattened(node), name)


# --- what belongs together


def _choose_optimizers(
    found: Content, optimizers: Mapping[object, list[Held]], models: Mapping[object, Shapes]
) -> None:
    """Take all optimizers that the models can have together: those of a usual key first, then the largest."""
    if not optimizers:
        return
    key = next((key for key in OPTIMIZER_KEYS if key in optimizers), next(iter(optimizers)))
    every = [
        one
        for where, several in optimizers.items()
        for one in several
        if where == key or one.state.names or any(one.state.shape(n) is not None for n in one.state.every_number)
    ]  # of others, which do not show anything of their parameters, these cannot be told
    own = {key: models[key] for key in _no_averages(models)} or models
    union, sizes = _union(own), {len(model) for model in models.values()}
    is_apart = bool(models) and None not in {*models, *optimizers}  # the file is neither a model nor an optimizer
    loose = {str(key): one.shape for key, one in found.base.items() if isinstance(one, Tensor) and is_apart}
    every = [
        one for one in every if len(one.state.every_number) in sizes or not can_have(loose, [one.state], named=False)
    ]  # without those of tensors beside the models, a temperature's say
    if models and not can_have(union, [one.state for one in every], named=False):
        usual = optimizers[key] if key in OPTIMIZER_KEYS else []
        every.sort(key=lambda one: (one not in usual, -len(one.state.every_number)))
        fitting: list[Held] = []
        for one in every:
            if can_have(union, [held.state for held in (*fitting, one)], named=False):
                fitting.append(one)
        every = fitting or every[:1]
    found.optimizers = [one for several in optimizers.values() for one in several if one in every]
    if len(optimizers) > 1:
        for where, several in optimizers.items():
            for one in several:
                one.name = f"{where}.{one.name}" if one.name else str(where)


def _choose_models(found: Content, models: Mapping[object, Node], shapes: Mapping[object, Shapes]) -> None:
    """Take the model that is meant, or all of them; and say of each optimizer what names of it begin with.

    What has nothing that may be trained but single numbers, such as random states, is none beside a model.
    """
    models = {key: model for key, model in models.items() if any(shapes[key].values())} or models
    swapped = [key for key in _swapped(found.base) if key in models]
    usual = swapped or [key for key in STATE_DICT_KEYS if key in models]
    plain = _no_averages(models)
    one = next(iter(usual or (plain if len(plain) == 1 else [])), None)
    several = [held for held in found.optimizers if len(models) > 1]
    if one is not None and several:
        states = [held.state for held in several]
        together = len(several) > 1 or can_have(_union({key: shapes[key] for key in plain}), states)
        one = None if together and not can_have(shapes[one], states) else one
        called = _called(several[0]) if len(several) == 1 else ""
        if any(key != one and likeness(called, str(key)) and can_have(shapes[key], states) for key in plain):
            one = None  # `optim_q` beside `module` and `q`
    if len(models) == 1 or one is not None:
        key = next(iter(models)) if one is None else one
        counted = swapped and any(str(name).startswith(FRONT) for name in models[key])  # mmengine's `steps` beside it
        its = {name: it for name, it in models[key].items() if not counted or str(name).startswith(FRONT)}
        found.models, found.keys = {"": its}, {key}
        if len(models) > 1:
            average = ": the program swapped the weights in training with their average" if swapped else ""
            every = ", ".join(map(str, models))
            found.warnings.append(
                f"there are several dicts of tensors ({every}); {key!r} is used as the model{average}"
            )
        elif found.optimizers and is_averages(key):
            found.warnings.append(
                f"the only model is called {key!r}, as averages are: the optimizer's state is of other weights"
            )
        _by_children(found.optimizers, shapes[key])
        return
    found.models, found.keys = {f"{key}.": model for key, model in models.items()}, set(models)
    if models:
        _warned(found, models)
        for held in found.optimizers:
            _find_model(found, held, shapes)


def _swapped(base: Node) -> list[str]:
    """Return where the weights in training are if a program puts their average under the model's key for inference.

    Lightning's WeightAveraging and mmengine's EMAHook do so, and swap both when they resume.
    """
    mmengine = "mmengine_version" in dict_of(base.get("meta"))
    return ["current_model_state", *(["ema_state_dict"] if mmengine else [])]


def _warned(found: Content, models: Iterable[object]) -> Content:
    said = f"there are several models ({', '.join(map(str, models))}); tensor names begin with their keys"
    found.warnings.append(said)
    return found


def _union(models: Mapping[object, Shapes]) -> dict[str, Shape]:
    return {f"{key}.{name}": shape for key, model in models.items() for name, shape in model.items()}


def _find_model(found: Content, held: Held, models: Mapping[object, Shapes]) -> None:
    """Say which of several models an optimizer is of, or warn."""
    fitting = [key for key, shapes in models.items() if can_have(shapes, [held.state])]
    total, called = len(held.state.every_number), _called(held)
    beside = [one for one in found.optimizers if one.path[:-1] == held.path[:-1]]
    in_lists = _is_place(held) and len(beside) == len(models) and all(str(key)[-1:].isdecimal() for key in models)
    named = [words(key) - _USUAL for key in models]
    numbers = [own for one in found.optimizers if all(map(str.isdecimal, own := words(_called(one)) - _USUAL))]
    if not all(own in named for own in numbers) and words(called) - _USUAL in numbers:
        called = ""  # counted from another number than models are

    def nearness(key: object) -> tuple[bool, bool, bool, int, bool]:
        is_there = in_lists and str(key).endswith(f".{held.path[-1]}")
        return is_there, *calls([called], [key]), len(models[key]) == total

    fitting = greatest(fitting, nearness)
    if len(fitting) == 1:
        held.scope = f"{fitting[0]}."
    elif fitting or not can_have(_union(models), [held.state]):
        found.warnings.append(
            f"{held.label} could be the optimizer of several models: {', '.join(map(str, fitting or models))} "
            f"({NAMES_ADVICE})"
        )
    else:
        held.several = tuple(f"{key}." for key in _whole(held, models) or _no_averages(models) or models)


def _is_place(held: Held) -> bool:
    return bool(held.path) and type(held.path[-1]) is int


def _called(held: Held) -> str:
    """Return what an optimizer is called: in a list as that is, for a place in it is no name."""
    if _is_place(held):
        return str(held.path[-2]) if len(held.path) > 1 else ""
    return held.label


def _whole(held: Held, models: Mapping[object, Shapes]) -> Sequence[object] | None:
    """Return the few models that an optimizer has whole, if those are the only ones; of so many models none."""
    own = _no_averages(models)
    most = MOST_PERMUTED if len(own) <= MOST_COMBINED else 0
    each = (several for n in range(2, most + 1) for several in combinations(own, n))
    total = len(held.state.every_number)
    whole = (
        several
        for several in each
        if sum(len(models[key]) for key in several) == total
        and can_have(_union({key: models[key] for key in several}), [held.state])
    )
    found = [*islice(whole, 2)]
    return found[0] if len(found) == 1 else None


def _by_children(optimizers: Sequence[Held], shapes: Shapes) -> None:
    """Where each of several optimizers has all parameters of one child of the model, alone or of its name, say so.

    One for each parameter, which steps in the backward pass, say, may be called by its name, or by the end of it.
    """
    if len(optimizers) < 2:
        return
    if all(len(one.state.every_number) == 1 for one in optimizers):
        ends = [[name for name in shapes if f".{name}".endswith(f".{one.name}")] for one in optimizers]
        called = [[one.name] if one.name in shapes else names for one, names in zip(optimizers, ends, strict=True)]
        if _scoped(optimizers, called):
            return
    children: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        child, dot, rest = name.partition(".")
        children.setdefault(f"{child}{dot}", {})[rest or child] = shape
    if any(held.state.recorded_names for held in optimizers):
        return
    found = []
    for held in optimizers:
        whole = {child: its for child, its in children.items() if len(its) == len(held.state.every_number)}
        fitting = [child for child, its in whole.items() if can_have(its, [held.state])]
        found.append([child for child in fitting if likeness(held.name, child) == SAME] or fitting)
    _scoped(optimizers, found)


def _scoped(optimizers: Sequence[Held], scopes: Sequence[Sequence[str]]) -> bool:
    """Say what names of optimizers begin with, if there is one way for each of them, and each another's."""
    is_told = all(len(one) == 1 for one in scopes) and are_distinct([*chain(*scopes)])
    for held, [scope] in zip(optimizers, scopes, strict=True) if is_told else ():
        held.scope = scope
    return is_told


def can_have(shapes: Shapes, optimizers: Iterable[OptimizerState], *, named: bool = True) -> bool:
    """Tell whether optimizers' parameters can all be different ones of a model, by their number, shapes and names."""
    needed: Counter[Shape] = Counter()
    free = 0
    have = Counter(shapes.values())
    for one in optimizers:
        own = list(one.names.values())
        if named and own and not aligned(shapes, own):
            return False
        for shape in one.shapes(shapes.values()).values():
            if shape is None:
                free += 1
            elif shape in have:
                needed[shape] += 1
            elif any(agree(shape, whole) for whole in have):
                free += 1
            else:
                return False
    return needed <= have and needed.total() + free <= have.total()


_OPTIMIZERS = frozenset({"optimizer", "optimizers", "optim", "opt"})

_USUAL = _OPTIMIZERS | {"optims", "opts", "state", "states", "dict", "sd"}
_USUAL |= {"model", "models", "net", "nets", "network", "networks"}


def words(key: object) -> set[str]:
    """Return the words of a key: `netG_state` has "net", "g" and "state"."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", str(key))}


def is_averages(key: object) -> bool:
    """Tell a key under which averages are."""
    return bool(words(key) & AVERAGES)


SAME = 2


def likeness(optimizer: str, model: str) -> int:
    """Return how far an optimizer's key says of which model it is: `optimizer_d`, `optD`, `disc_opt`; `discriminator`.

    SAME where both have the same words (`critic2_opt`, `critic2`). A number alone may be a place in a list.
    """
    ours, theirs = words(optimizer) - _USUAL, words(model) - _USUAL
    if (ours and ours == theirs) or words(optimizer) - _OPTIMIZERS == words(model) != set():
        return SAME
    return int(
        any(a.startswith(b) or b.startswith(a) for a in filter(str.isalpha, ours) for b in filter(str.isalpha, theirs))
    )


def calls(optimizer: Iterable[str], model: Iterable[object]) -> tuple[bool, bool, int]:
    """Return whether keys of an optimizer call a model the same, whether its own are not averages', and how alike."""
    keys = list(model)
    like = max((likeness(one, str(key)) for one in optimizer for key in keys), default=0)
    return like == SAME, not any(map(is_averages, keys)), like
