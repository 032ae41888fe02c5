"""Which dicts of tensors of a saved dict are models, which optimizer is whose, and what it has of each parameter.

The model is what has the optimizer's names; where those are numbers, or there is no optimizer, what is called as models
are.

State is given by name where the file has names, which is usual; else by number, with names found as for any file of
`torch.save`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from operator import itemgetter
from typing import Any

from zckpt.compare.copies import MOST_EXTENTS, sampled
from zckpt.engine.read import read_all
from zckpt.engine.targets import Hole
from zckpt.errors import DamagedFileError, UnsupportedError, about, listed
from zckpt.evidence import Evidence, greatest, note_not_used, orders_of_models
from zckpt.formats.dcp.items import ObjectItem
from zckpt.formats.dcp.metadata import Keys
from zckpt.formats.dcp.tree import GROUPS, PARAMS, STATE, ModelPart, Node, OptimizerPart, branch, carry, dotted
from zckpt.formats.torch_files.attach import attach as attach_state
from zckpt.formats.torch_files.attach import names_of
from zckpt.formats.torch_files.content import STATE_DICT_KEYS, calls, can_have, is_averages
from zckpt.formats.torch_files.optimizer import OptimizerState, joined, parse, unflattened
from zckpt.formats.torch_files.tensors import TensorItem, with_scalars
from zckpt.formats.torch_files.writer import in_pieces
from zckpt.immutable import mutable
from zckpt.state import MASTER, WEIGHT, Checkpoint, GivenNames, are_distinct, by_key, list_of
from zckpt.state.names import aligned, bare_names
from zckpt.torchfile import FromFile, has_tensors


@mutable
class Optimizer:
    """An optimizer of whatever form."""

    path: Keys
    names: frozenset[str]  # of its parameters, as the file has them; empty where it only numbers them
    where: str  # where it is, for messages
    state: OptimizerState
    others: dict[str, Node] = field(default_factory=dict)  # what else it holds
    prefix: str = ""  # put before its names where several models are read as one
    name: str | None = None  # what it is called, where several were saved together

    def rename(self, names: Mapping[Any, str]) -> None:
        """Give parameters other names, by those or the numbers that they have."""
        labels = {number: self.state.names.get(number, number) for number in self.state.every_number}
        self.state.names.update({number: names[label] for number, label in labels.items() if label in names})


def read_optimizer(part: OptimizerPart, names: Collection[str], source: str, warnings: list[str]) -> Optimizer:
    """Bring an optimizer to one form.

    `names`: of tensors, which tell a name from a slot in keys that are joined; `source`: the directory; `warnings`:
    gets what was decided without certainty. Raises DamagedFileError: it is malformed; UnsupportedError: it has state of
    a parameter of which no param group is known.
    """
    where = f"{source}: {'.'.join(map(str, part.path))}" if part.path else source
    others: dict[str, Node] = {}
    with about(where):
        if part.is_flat:  # which does not say which group a parameter is in: those with the same values are one
            leaves = {str(key): _leaf(node, key) for key, node in part.node.items()}
            tree = unflattened(leaves, where, {*names, *part.names})
        else:
            groups: list[dict[str, object]] = [] if GROUPS in part.node else [{PARAMS: sorted(part.names)}]
            for _, node in sorted((branch(part.node.get(GROUPS)) or {}).items()):
                content = dict(branch(node) or {})
                params = content.pop(PARAMS)
                groups.append({**hyperparameters(content), PARAMS: getattr(params, "node", None)})
            state: dict[str, dict[str, object]] = {}
            for label, node in (branch(part.node.get(STATE, {})) or {}).items():
                slots = branch(node)
                if slots is None:
                    raise DamagedFileError("unreadable state", expected="a dict by slot", found=str(label)[:80])
                state[str(label)] = {str(key): _leaf(one, STATE) for key, one in slots.items()}
            tree = {STATE: state, GROUPS: groups}
            others = {str(key): node for key, node in part.node.items() if key not in (STATE, GROUPS)}
        # Pipeline stages each list their own parameters under the same key, of which torch saves one rank's list only:
        # parameters that have state and are in no group are put into the only group that there is.
        members = [one for group in tree[GROUPS] for one in list_of(group[PARAMS])]
        known = set(map(str, members))
        absent = [label for label in tree[STATE] if label not in known]
        if absent:
            shown = listed(absent, most=8)
            if len(tree[GROUPS]) != 1 or any(type(one) is int for one in members):
                raise UnsupportedError(f"state of parameters that are in no param group: {shown}")
            tree[GROUPS][0][PARAMS] = [*members, *absent]
            warnings.append(f"no param group lists {shown}, which have state; they are added to the only group")
        masters = [in_pieces(item.key, item.slot(MASTER)) for item in part.masters.values()]
        return Optimizer(part.path, part.names, where, parse(tree, where, masters), others)


def hyperparameters(content: Mapping[str | int, Node]) -> dict[str, object]:
    """Return a param group's values, with single numbers that are tensors read."""
    return with_scalars({key: _leaf(node, GROUPS) for key, node in content.items()}, "")


def _leaf(node: Node, key: object) -> object:
    """Return a slot or a single number as its item; an object with its file only where tensors are below it."""
    if isinstance(node, TensorItem) and (str(key).startswith(STATE) or (not node.shape and node.whole is not None)):
        return node
    if isinstance(node, ObjectItem):
        return FromFile.of(node.file, node.node) if has_tensors(node.node) else node.node
    return carry(node)


def attach(
    checkpoint: Checkpoint, optimizers: Sequence[Optimizer], names: GivenNames, models: Sequence[Collection[str]]
) -> list[Optimizer]:
    """Give a checkpoint's parameters the optimizers' slots, and the checkpoint their param groups.

    Return those that it got: not one that has parameters of an earlier one.

    `checkpoint`: has its parameters already; `names`: of the parameters that are only numbered, in the optimizers'
    order; `models`: the names of each model, of which an optimizer may have several one after another, in any order.
    Raises UsageError: `names` do not fit.
    """
    numbered = [one for one in optimizers if not one.state.names]
    if optimizers and not numbered:
        note_not_used(checkpoint, names)
    given: dict[tuple[int, int], str] = {}
    if names is not None and numbered:
        groups = [[(at, number) for number in its] for at, one in enumerate(numbered) for its in one.state.numbers]
        whole = [one.shape for one in checkpoint.parameters.values()]
        every = [one.state.shapes(whole) for one in numbered]
        shapes = {(at, number): every[at][number] for its in groups for at, number in its}
        given = Evidence.of(checkpoint, groups, shapes, factored=True).given(names)
    taken: set[str] = set()
    before: set[str] = set()  # which the numbers of those before are
    orders = None if checkpoint.is_sorted else partial(orders_of_models, models)  # a dict has the model's
    attached = []
    for one in optimizers:
        state = one.state
        if one.prefix or one.name is not None:
            state = joined([(one.name, one.prefix if state.names else "", state)])
        found = dict(state.names)
        if not one.state.names:
            own = {number: name for (at, number), name in given.items() if numbered[at] is one}
            own = own or names_of(checkpoint, one.state, one.where, taken=before, orders=orders)
            alike = _alike(checkpoint) if len(own) < (count := len(one.state.every_number)) else []
            if alike and count == len(checkpoint.parameters) - len(alike[1:]):
                own = names_of(checkpoint, one.state, one.where, taken=alike[1:], orders=orders)
                said = f"{listed(alike[1:])} has the elements of {alike[0]}, and is taken for another name of it"
                checkpoint.warnings.append(said)
            before |= set(own.values())
            pairs = zip(state.every_number, one.state.every_number, strict=True)
            found = {number: own[old] for number, old in pairs if old in own}
        if taken & set(found.values()):
            checkpoint.warnings.append(f"{one.where} has parameters of an earlier optimizer; it is carried as it is")
            continue
        attached.append(one)
        taken |= set(found.values())
        for name in found.values():
            if name in checkpoint.buffers:  # an optimizer has it, so that it is none
                checkpoint.parameters[name] = checkpoint.buffers.pop(name)
        found = {number: name for number, name in found.items() if name in checkpoint.parameters}
        attach_state(checkpoint, state, one.where, certain=found, known=(PARAMS,), front=one.prefix)
    return attached


def _alike(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the only matrix that has several, as far as a sample tells; of any other none.

    A dict has each name of a tied tensor, and the optimizer only the first.
    """
    slots = {name: one.slots[WEIGHT] for name, one in checkpoint.parameters.items() if len(one.shape) > 1}
    same_shape = by_key(((slot.shape, slot.dtype), name) for name, slot in slots.items() if slot.numel).values()
    reads: list[tuple[Hole, memoryview]] = []
    some = [name for names in same_shape if len(names) > 1 for name in names]
    seen = {name: sampled(slots[name], MOST_EXTENTS, reads) for name in some}
    read_all(reads)
    same = by_key((one.tobytes(), name) for name, one in seen.items() if (one != one[0]).any())
    several = [names for names in same.values() if len(names) > 1]
    return several[0] if len(several) == 1 else []


def find_models(
    candidates: Sequence[ModelPart], optimizers: Sequence[Optimizer], warnings: list[str], *, front: bool
) -> list[ModelPart]:
    """Return the models of a tree: one almost always, none where it holds only an optimizer.

    `candidates`: its dicts of tensors; `optimizers`: those of the same tree; `warnings`: to which is added what was
    decided without certainty; `front`: as for `bare_names`.
    """
    found = owners(optimizers, candidates)
    is_one = len(found) == 1 and not optimizers[0].names  # beside whose model are others, too
    chosen = [one for one in candidates if one in found and not is_one]
    if not chosen and candidates:  # the one that is called as models are; or else all with more than single numbers
        usual = [one for one in candidates if one.path and one.path[-1] in STATE_DICT_KEYS]
        large = [one for one in candidates if any(tensor.shape for tensor in one.tensors.values())]
        plain = [one for one in large if not is_average(one)]
        chosen = [max(usual, key=_usual)] if usual else large
        if len(optimizers) > 1 and not _may_have(chosen, optimizers) and _may_have(plain, optimizers):
            chosen = plain
        elif is_one and found[0] is not None and found[0] not in chosen:
            chosen = plain if found[0] in plain else large
        elif len(usual) > 1:
            shown = ", ".join(dotted(one.path) for one in usual)
            used = dotted(chosen[0].path)
            warnings.append(f"there are several dicts of tensors ({shown}); {used} is used as the model")
    for at, one in enumerate(chosen):
        names = bare_names(one.tensors, front=front)
        tensors = {names[name]: tensor for name, tensor in one.tensors.items()}
        chosen[at] = replace(one, tensors=tensors, filed={new: old for old, new in names.items()})
    if len(chosen) > 1:
        shown = " and ".join(dotted(one.path) or "the rest" for one in chosen)
        warnings.append(f"{shown} are read as one model; tensor names begin with these names")
        return [replace(one, prefix=f"{dotted(one.path)}." if one.path else "") for one in chosen]
    return chosen


def without_modules(optimizers: Sequence[Optimizer], models: Sequence[ModelPart]) -> None:
    """Take from an optimizer's names that of a module around its model, where the model's key ends with that.

    FastVideo has `roles.student.transformer`, and in `optimizers.student` the state of `transformer.NAME`.
    """
    for part in optimizers:
        fronts = {name.partition(".")[0] for name in part.names}
        around = [one for one in models if fronts == {dotted(one.path).rpartition(".")[2]}]
        if around and not any(aligned(one.tensors, part.names) for one in around):
            names = {name: name.partition(".")[2] for name in part.names}
            part.rename(names)
            part.names = frozenset(names.values())


def owners(optimizers: Sequence[Optimizer], models: Sequence[ModelPart]) -> list[ModelPart | None]:
    """Return the model of each optimizer: what has most of its names, whatever wrappers they have.

    Two models may have the same names: then its is the one beside it, or of a key like its own (`opt_gen`: `gen`), or
    that is called as models are and not as their averages. None where none has any of them, and of those without names
    unless each has another model that is nearest, or called like it; of one alone, nearer than any other. Raises
    UnsupportedError: that leaves several.
    """
    if optimizers and not any(part.names for part in optimizers):
        near = [
            its[0] if len(its) == 1 and _may_have(its, [part]) else None
            for part in optimizers
            for its in [_nearest(part, models)]
        ]
        places = {part.path[-1:]: part for part in models if part.path and type(part.path[-1]) is int}
        if len(places) == len(models) and places.keys() == {part.path[-1:] for part in optimizers}:
            return [places[part.path[-1:]] for part in optimizers]  # of lists that are as long
        if None not in near and are_distinct(near) and len(near) > 1:
            return near
        if len(near) == 1 and near[0] is not None:
            others = [_nearness(optimizers[0], one)[::3] for one in models if one != near[0]]
            is_nearer = all(_nearness(optimizers[0], near[0])[::3] > one for one in others)
            return near if is_nearer else [None]
    found = [_owner(part, models) if part.names else None for part in optimizers]
    for at, (part, model) in enumerate(zip(optimizers, found, strict=True)):
        alike = [one for one in _most_alike(part, models) if not is_average(one)] if model is not None else []
        if len(alike) > 1 and any(
            one == model and part.names & other.names for one, other in zip(found[:at], optimizers, strict=False)
        ):
            raise _open(part, alike)
    return found


def is_average(part: ModelPart) -> bool:
    """Tell a dict that is called as averages are."""
    return any(is_averages(step) for step in part.path)


def _nearness(optimizer: Optimizer, model: ModelPart) -> tuple[int, bool, bool, int]:
    """Return how near a model lies to an optimizer, if it is called the same, not as averages are, or at least like it.

    Without names, a place in a list says nothing.
    """
    at = _common(optimizer.path, model.path)
    ours, theirs = (
        [str(step) for step in one.path[at:] if optimizer.names or isinstance(step, str)] for one in (optimizer, model)
    )
    return at, *calls(ours, theirs)


def _nearest(optimizer: Optimizer, models: Sequence[ModelPart]) -> list[ModelPart]:
    return greatest(models, partial(_nearness, optimizer))


def _may_have(models: Sequence[ModelPart], optimizers: Sequence[Optimizer]) -> bool:
    """Tell whether optimizers' parameters can be models', by their number and the shapes of their state."""
    shapes = {f"{at}.{name}": one.shape for at, its in enumerate(models) for name, one in its.tensors.items()}
    return can_have(shapes, [one.state for one in optimizers], named=False)


def _most_alike(optimizer: Optimizer, models: Sequence[ModelPart]) -> list[ModelPart]:
    """Return the models that have most of an optimizer's names."""
    some = [(its, one) for one in models if (its := len(aligned(one.tensors, optimizer.names)))]
    return [one for _, one in greatest(some, itemgetter(0))]


def _owner(optimizer: Optimizer, models: Sequence[ModelPart]) -> ModelPart | None:
    best = greatest(_nearest(optimizer, _most_alike(optimizer, models)), _usual)
    if len(best) > 1:
        raise _open(optimizer, best)
    return best[0] if best else None


def _open(optimizer: Optimizer, models: Sequence[ModelPart]) -> UnsupportedError:
    return UnsupportedError(
        f"{dotted(optimizer.path)} could be the optimizer of several models",
        found=" and ".join(dotted(one.path) for one in models),
        advice="save it under a key that begins like its model's key",
    )


def _common(one: Keys, other: Keys) -> int:
    """Return how many steps two paths have in common before they part."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _usual(part: ModelPart) -> tuple[int, int]:
    """Sort dicts that are called as models are behind others, and those near the root behind those deep in it."""
    last = part.path[-1] if part.path else None
    return -STATE_DICT_KEYS.index(last) if last in STATE_DICT_KEYS else -len(STATE_DICT_KEYS), -len(part.path)
