"""The state dict of a `torch.optim` optimizer, in each of its forms, and what it gives a checkpoint's parameters.

{state: {number: {slot: value}}, param_groups: [{params: [number, ...], ...}]}     `Optimizer.state_dict()`
{state: {name: {slot: value}}, param_groups: [{params: [name, ...], ...}]}         FSDP1's full one, `get_state_dict`
{"state.NAME.SLOT": value, "param_groups.NAME.KEY": value}                         the same, flattened
{state: [{slot: value}, ...], hypers: [{...}]}                                     fastai's, in order; with one group
{OTHER: ..., KEY: {state: ..., param_groups: ...}}                                 of one that holds another: Lookahead

Its tensors are those of a torch file, or items of DCP, whose chunks may lie in several. Numbers are counted over all
groups in order; newer files may also hold names with them (`param_names`). Names of the second form are the model's
own, without doubt. The third does not say which group a parameter is in: those with the same values are one.

Where a file has no names, they are deduced from the model's tensors with their shapes, the shapes of the optimizer's
state, and the order of both: each param group lists its parameters in the model's order, or sorted by name. A name is
given only where both readings give the same one; a number stays a number otherwise.

FSDP1 of torch 2.1 to 2.15, with `use_orig_params=True` and FULL_STATE_DICT on CPU, gathers every slot of a parameter in
one memory, and all of them come out as the last: what can be noticed of that in a file, is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from itertools import chain
from typing import Any, TypeGuard

from zckpt.codes import HYPERPARAMETERS_DIFFER
from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, UsageError, about, listed
from zckpt.evidence import Evidence, Orders, agree, in_order_or_sorted, keep_number, note_numbers, shown_shape
from zckpt.formats.torch_files.tensors import TensorItem, holds_tensors, scalars_in, slot_of, with_scalars
from zckpt.immutable import immutable
from zckpt.state import (
    MASTER,
    Checkpoint,
    GivenNames,
    ParamGroup,
    Shape,
    are_distinct,
    are_texts,
    dict_of,
    number_of,
    without,
)
from zckpt.state.inventory import CARRIED, IMPLIED, STATE, Rule
from zckpt.state.names import is_number
from zckpt.storage.files import opened
from zckpt.torchfile import (
    Digests,
    FromFile,
    MetaTensor,
    Object,
    Place,
    Tensor,
    alike,
    brief,
    is_leaf,
    node_of,
    value_at,
    walk_tensors,
)

OPTIMIZER = "optimizer"
"""Under which a param group that zckpt wrote says which of several optimizers it is of."""

STATE_KEY, GROUPS_KEY = "state", "param_groups"

FORM_KEY = "_optimizer_state_format_version"
"""Of torch-checkpointing, where groups have `param_names` and no `params`."""

OPTIMIZERS = "optimizers"
"""Under which optimizer metadata have those of several optimizers, by name."""

BESIDE = "beside_state"
"""Under which optimizer metadata have what its state dict has beside state of parameters; `optim/states/beside`."""


LBFGS = frozenset({"old_dirs", "old_stps", "prev_flat_grad"})

EMPTY: Mapping[Any, Any] = {}


@immutable
class OptimizerState:
    """A torch optimizer's state dict.

    Parameters
    ----------
    state : dict of int to dict
        Slot to value, by parameter number.
    groups : list of dict
        Param groups, `params` included.
    masters : dict of int to Tensor
        fp32 masters by parameter number, where the file has them.
    names : dict of int to str
        Of the parameters that the file has by name. They are numbered here in the order of the groups.
    scopes : dict of int to str
        What the names of parameters that are numbered are known to begin with.
    rest : dict
        What else the state dict has, also under `state`; of several optimizers by their names.
    at : dict of str to tuple
        Which keys of the state dict lead to state and param groups, of several by their names, of one by None.
    """

    state: dict[int, dict[str, object]]
    groups: list[dict[str, Any]]
    masters: dict[int, Tensor] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    scopes: dict[int, str] = field(default_factory=dict)
    rest: dict[Any, Any] = field(default_factory=dict)
    at: dict[str | None, Place] = field(default_factory=dict)

    @property
    def numbers(self) -> list[list[int]]:
        """The parameter numbers of each group."""
        return [[int(n) for n in g["params"]] for g in self.groups]

    @property
    def every_number(self) -> list[int]:
        """The parameter numbers of all groups."""
        return [number for numbers in self.numbers for number in numbers]

    @property
    def recorded_names(self) -> list[str]:
        """The names that the file gives its parameters, in the order of their numbers; some or all may be missing."""
        if len(self.names) == len(self.every_number):
            return list(self.names.values())
        found = [group.get("param_names") for group in self.groups]
        return [str(name) for names in found if isinstance(names, (list, tuple)) for name in names]

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Return the tensors in the state of a parameter, by slot."""
        return {key: value for key, value in self.state.get(number, {}).items() if isinstance(value, Tensor)}

    def shape(self, number: int, slots: Collection[object] = ()) -> Shape | None:
        """Return the shape of a parameter as its state shows it: the largest of its tensors, or of some slots."""
        state = _elementwise(self.state.get(number, {}))
        shapes = {key: list(_shapes(value)) for key, value in state.items() if not slots or key in slots}
        return shown_shape(shapes | ({MASTER: [self.masters[number].shape]} if number in self.masters else {}))

    def shapes(self, whole: Iterable[Shape]) -> dict[int, Shape | None]:
        """Return the shape of each parameter as its state shows it; `whole`: those of the model's parameters.

        Slots that have such shapes in every state, and none of them more often than the model, show it, a moment say,
        if there are any: beside them optimizers keep tensors that are larger, as Shampoo's kind does, or all alike.
        What a group's `rank` has made smaller, as GaLore's and APOLLO's, shows none.
        """
        have = Counter(whole)
        states = [_elementwise(state) for state in self.state.values() if any(map(list, map(_shapes, state.values())))]
        shown = {key: [{*_shapes(state.get(key))} for state in states] for key in (states[0] if states else ())}
        slots = {key for key, its in shown.items() if all(its) and Counter(chain(*its)) <= have} - {"step", "RMS"}
        ranks = {int(number): group.get("rank") for group in self.groups for number in group["params"]}
        found = {number: self.shape(number, slots) for number in self.every_number}
        return {number: None if ranks[number] in (shape or ()) else shape for number, shape in found.items()}


def _shapes(value: object) -> Iterator[Shape]:
    """Yield the shapes of what an optimizer keeps under a key: a tensor of any class, or a dict, as bitsandbytes'."""
    if isinstance(value, (Tensor, MetaTensor, TensorItem)):
        yield value.shape
    elif isinstance(value, dict):
        yield from (one.shape for one in _elementwise(value).values() if isinstance(one, Tensor))


def _elementwise(state: Mapping[Any, object]) -> Mapping[Any, object]:
    """Return of bitsandbytes' state what has a value for each element: its maps of 256 may be larger.

    Of torch's LBFGS nothing: its first parameter has the state of all, end to end.
    """
    if state.keys() >= LBFGS:
        return {}
    own = next((key for key in ("state2", "state1") if key in state), None)  # AdEMAMix has two for each in state1
    return state if own is None else {own: state[own]}


def shared_values(present: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the single values that are alike in all of several states, such as their step."""
    first = present[0] if present else {}
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in present)}


def with_rest(optimizer: OptimizerState, node: object, *others: object) -> OptimizerState:
    """Return an optimizer with what its state dict has beside param groups and state; nothing of `others`."""

    def rest_of(tree: Mapping[Any, Any], at: Place) -> dict[Any, Any]:
        if not at:
            return without(tree, STATE_KEY, GROUPS_KEY, FORM_KEY, *others) | optimizer.rest
        return {**tree, at[0]: rest_of(tree[at[0]], at[1:])}

    at = innermost(node)
    if not at and not looks_like_optimizer(node):
        return optimizer
    return replace(optimizer, rest=rest_of(dict_of(node), at), at={None: at})


def innermost(node: object, deep: int = 4) -> Place:
    """Return the keys that lead to the state dict of the optimizer that another holds, as SAM and Lookahead do.

    Not where lists lie beside it, or objects: those of DeepSpeed, Megatron and Apex are masters, or partitions.
    """
    others = without(node, STATE_KEY, GROUPS_KEY).items() if isinstance(node, dict) and deep else ()
    held = [(key, *at) for key, one in others if (at := innermost(one, deep - 1)) or looks_like_optimizer(one)]
    if len(held) != 1:
        return ()

    def sizes(tree: object) -> list[int]:
        return [len(dict_of(group).get("params", ())) for group in dict_of(tree).get(GROUPS_KEY, ())]

    if looks_like_optimizer(node):
        is_its = sizes(node) == sizes(value_at(node, held[0]))
    else:
        is_its = all(isinstance(one, dict) or is_leaf(one) for _, one in others)
    return held[0] if is_its else ()


def optimizer_rules(*path: str, rest: Mapping[Any, Any] = EMPTY, at: Place = ()) -> tuple[Rule, ...]:
    """Return the inventory's rules for an optimizer's state dict that lies under some keys of a file's tree.

    `rest`: what of it is carried as it is; `at`: as of `OptimizerState`.
    """
    if at:
        return (
            *optimizer_rules(*path, *map(str, at)),
            *(Rule((*path, str(key), "**"), CARRIED, BESIDE) for key in rest),
        )
    carried = [
        *([str(key)] for key in rest if key != STATE_KEY),
        *([STATE_KEY, str(key)] for key in rest.get(STATE_KEY, ())),
    ]
    return (
        *(Rule((*path, *keys, "**"), CARRIED, BESIDE) for keys in carried),
        Rule((*path, STATE_KEY, "*", "*"), STATE, "single values of a parameter"),
        Rule((*path, STATE_KEY, "factory"), IMPLIED, "what a defaultdict begins with"),
        Rule((*path, GROUPS_KEY, "*", "params", "**"), IMPLIED, "numbers or names of the parameters"),
        Rule((*path, GROUPS_KEY, "*", "param_names", "**"), IMPLIED, "names of the parameters"),
        Rule((*path, GROUPS_KEY, "*", "*", "**"), STATE, "hyperparameters"),
        Rule((*path, "hypers", "**"), STATE, "hyperparameters, as fastai has them"),
        Rule((*path, FORM_KEY), IMPLIED, "that state is under names"),
    )


def looks_like_optimizer(node: object) -> TypeGuard[dict[Any, Any]]:
    """Tell whether a node is a torch optimizer's state dict."""
    return (
        isinstance(node, dict)
        and isinstance(node.get(STATE_KEY), dict)
        and isinstance(node.get(GROUPS_KEY), (list, tuple))
    )


def as_torchs(node: object) -> object:
    """Return the state of fastai's optimizers as torch's; of several groups it does not say whose parameters are."""
    hypers = node.get("hypers") if isinstance(node, dict) and isinstance(node.get(STATE_KEY), list) else None
    groups = hypers.get("items") if isinstance(hypers, Object) else hypers
    if not isinstance(node, dict) or not isinstance(groups, list) or len(groups) != 1:
        return node
    state = dict(enumerate(node[STATE_KEY]))
    return {STATE_KEY: state, GROUPS_KEY: [{**dict_of(groups[0]), "params": list(state)}]}


def looks_flattened(node: object) -> TypeGuard[dict[str, Any]]:
    """Tell whether a node is one whose keys are joined."""
    if not isinstance(node, dict) or not node or not are_texts(node):
        return False
    kinds = {key.partition(".")[0] for key in node if key.count(".") > 1}
    return kinds <= {STATE_KEY, GROUPS_KEY} and GROUPS_KEY in kinds and all(key.count(".") > 1 for key in node)


def parse(node: object, path: str, masters: Sequence[Tensor] = (), *, carries: bool = False) -> OptimizerState:
    """Bring a state dict to one form.

    `node`: the state dict; `masters`: one for each parameter, in order; empty where there are none. Raises
    DamagedFileError: it is not the state dict of a torch optimizer; UnsupportedError: state under a text, which torch
    allows, where parameters have numbers, unless the caller `carries` it.
    """
    with about(path):
        if not looks_like_optimizer(node):
            raise DamagedFileError(
                "unexpected content", expected="an optimizer's state dict", found=type(node).__name__
            )
        groups: list[dict[str, Any]] = [{**with_scalars(_group(group), path)} for group in node[GROUPS_KEY]]
        labels = [label for group in groups for label in group["params"]]
        if len({type(label) for label in labels}) > 1 or not are_distinct(labels):
            raise DamagedFileError("param groups list a parameter twice, or mix names and numbers")
        names = dict(enumerate(label for label in labels if isinstance(label, str)))
        by_label: dict[object, int] = {label: number for number, label in names.items()}
        by_label = by_label or {label: label for label in labels}
        for group in groups:
            group["params"] = [by_label[label] for label in group["params"]]
        state, others = {}, {}
        for key, slots in node[STATE_KEY].items():
            digits = isinstance(key, str) and is_number(key) and not names  # as `dcp_to_torch_save` leaves them
            number = by_label.get(int(key) if digits else key)
            if isinstance(key, str) and not digits and not names and carries:
                others[key] = slots
                continue
            if isinstance(key, str) and not digits and not names:
                raise UnsupportedError(
                    f"the optimizer has state under {brief(key)}, which is not a parameter's: zckpt cannot store it",
                    expected="state under parameter numbers; common values belong in the param group",
                    advice="remove it from `state` before saving, or save it outside the optimizer",
                )
            if not isinstance(number, int) or not isinstance(slots, dict):
                raise DamagedFileError("state for a parameter that is in no group", found=brief(key))
            state[number] = {str(slot): value for slot, value in slots.items()}
        if masters and len(masters) != len(labels):
            raise DamagedFileError(
                "masters and param groups disagree", expected=f"{len(labels)} parameters", found=len(masters)
            )
        found = dict(zip(by_label.values(), masters, strict=True)) if masters else {}
        return OptimizerState(state, groups, found, names, rest={STATE_KEY: others} if others else {})


def parse_either(node: object, path: str, *, carries: bool = False) -> OptimizerState:
    """Bring a state dict to one form, whether or not its keys are joined; errors are those of `parse`."""
    return parse(unflattened(node, path) if looks_flattened(node) else node, path, carries=carries)


def check_hyperparameters(mine: Sequence[Mapping[str, Any]], its: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Raise LayoutError unless a rank has the param groups of the first one, whatever their parameters are."""
    if len(mine) != len(its):
        raise LayoutError("has other param groups than rank 0", expected=len(mine), found=len(its), ranks=[rank])
    for number, (one, two) in enumerate(zip(mine, its, strict=True)):
        for key in sorted((one.keys() | two.keys()) - {"params", "param_names"}):
            expected, found = one.get(key), two.get(key)
            if not alike(expected, found) and not any(True for _ in walk_tensors([expected, found])):
                raise LayoutError(
                    f"param group {number} has another {key} than rank 0's",
                    expected=brief(number_of(expected)),
                    found=brief(number_of(found)),
                    advice="the files may be from different steps or runs",
                    code=HYPERPARAMETERS_DIFFER,
                    ranks=[rank],
                )


def _group(node: object) -> dict[object, object]:
    params = node.get("params", node.get("param_names")) if isinstance(node, dict) else None
    if (
        not isinstance(node, dict)
        or not isinstance(params, (list, tuple))
        or not all(type(one) in (int, str) for one in params)
    ):
        raise DamagedFileError(
            "unreadable param group", expected="a list of numbers or names in `params`", found=brief(params)
        )
    return {**node, "params": params}


def split_key(joined: str, names: Collection[str]) -> tuple[str, str]:
    """Cut a joined key after the longest name that it begins with; after the last dot where none is known."""
    at = joined.rfind(".")
    while at > 0:
        if joined[:at] in names:
            return joined[:at], joined[at + 1 :]
        at = joined.rfind(".", 0, at)
    name, _, slot = joined.rpartition(".")
    return name, slot


def unflattened(node: Mapping[str, object], path: str, names: Collection[str] = ()) -> dict[str, Any]:
    """Return a state dict whose keys are joined as one of names; what it keeps once a parameter is once a group.

    `names`: those that are known, by which a name is told from a slot.
    """
    state: dict[str, dict[str, object]] = {}
    values: dict[str, dict[str, object]] = {}
    for key, value in node.items():
        kind, _, rest = key.partition(".")
        name, last = split_key(rest, names)
        (state if kind == STATE_KEY else values).setdefault(name, {})[last] = value
    groups: dict[bytes, dict[str, Any]] = {}
    digests = Digests()
    for name, its in values.items():
        read = with_scalars({str(key): value for key, value in its.items()}, path)
        groups.setdefault(digests.of(read), {**read, "params": []})["params"].append(name)
    return {STATE_KEY: state, GROUPS_KEY: list(groups.values())}


def with_names(tree: Mapping[Any, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the state dict of an optimizer with the names of its parameters where it has their numbers."""
    groups = [
        {**without(one, "param_names"), "params": [names[number] for number in one["params"]]}
        for one in tree[GROUPS_KEY]
    ]
    return {STATE_KEY: {names[number]: slots for number, slots in tree[STATE_KEY].items()}, GROUPS_KEY: groups}


def flattened(named: Mapping[str, Any]) -> dict[str, object]:
    """Return a state dict of names with joined keys, one for each value of each parameter: see `unflattened`."""
    found = {f"{STATE_KEY}.{name}.{key}": one for name, its in named[STATE_KEY].items() for key, one in its.items()}
    for group in named[GROUPS_KEY]:
        for name in group["params"]:
            found |= {f"{GROUPS_KEY}.{name}.{key}": value for key, value in group.items() if key != "params"}
    return found


def joined(several: Iterable[tuple[str | None, str, OptimizerState]]) -> OptimizerState:
    """Return several optimizers as one, their parameters numbered from the first on; groups say of which they are.

    `several`: the name of each, and what the names of its parameters are to begin with.
    """
    found = OptimizerState({}, [])
    for optimizer, scope, one in several:
        first = len(found.every_number)
        new = {number: first + at for at, number in enumerate(one.every_number)}
        found.state.update({new[number]: slots for number, slots in one.state.items()})
        found.masters.update({new[number]: master for number, master in one.masters.items()})
        found.names.update({new[number]: scope + name for number, name in one.names.items()})
        found.scopes.update(dict.fromkeys(new.values(), scope))
        for group in one.groups:
            its = {**group, "params": [new[number] for number in group["params"]]}
            if optimizer is not None:
                its[OPTIMIZER] = optimizer
            if scope and isinstance(group.get("param_names"), (list, tuple)):
                its["param_names"] = [f"{scope}{name}" for name in group["param_names"]]
            found.groups.append(its)
        found.at[optimizer] = one.at.get(None, ())
        if one.rest:
            found.rest.update(one.rest if optimizer is None else {optimizer: one.rest})
    return found


Sample = Callable[[Tensor, str], bool]
"""Whether a master rounds to the model's tensor of this name, as far as a sample of both can tell."""


def attach(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    path: str,
    *,
    names: GivenNames = None,
    sample: Sample | None = None,
    certain: Mapping[int, str] | None = None,
    orders: Orders = in_order_or_sorted,
    known: Collection[str] = ("params", "param_names"),
    front: str = "",
) -> None:
    """Give a checkpoint's parameters the optimizer's slots, and the checkpoint its param groups.

    A parameter whose name is not certain stays under its number in `checkpoint.unnamed`, with a warning.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has its parameters already.
    optimizer : OptimizerState
    path : str
        The file that holds it.
    names : sequence of str, optional
        Names by number, from the user.
    sample : callable, optional
        Tells by values whether a master belongs to a weight.
    certain : mapping of int to str, optional
        The names that are certain, by number, where they have been found already.
    orders : callable
        In which groups may have their parameters, as for `Evidence.certain`.
    known : collection of str
        Keys of a group that are no hyperparameters.
    front : str
        Put before numbers that stay, where several optimizers have the same.

    Raises
    ------
    UsageError
        `names` do not fit the file.
    """
    unnamed = []
    labels = {} if checkpoint.parameters else _labels(optimizer, names)
    found = {} if labels else certain
    if found is None:
        with about(path):
            found = names_of(checkpoint, optimizer, names, sample=sample, orders=orders)
    labels |= without(optimizer.names, *found)
    for group, numbers in zip(optimizer.groups, optimizer.numbers, strict=True):
        index, members = len(checkpoint.param_groups), []
        for number in numbers:
            slots, name = optimizer.state.get(number, {}), found.get(number)
            is_held = bool(slots) or number in optimizer.masters
            if name is None:
                name = labels.get(number, f"{front}{number}")
                unnamed += [number] if is_held and number not in labels else []
                owner = keep_number(checkpoint, name, optimizer.shape(number), is_kept=is_held)
            else:
                owner = checkpoint.parameters[name]
            owner.group, owner.state = index, {}
            if number in optimizer.masters:
                owner.slots[MASTER] = slot_of(MASTER, optimizer.masters[number], path)
            for key, value in slots.items():
                if isinstance(value, (Tensor, TensorItem)):
                    owner.slots[key] = slot_of(key, value, path) if isinstance(value, Tensor) else value.slot(key)
                else:  # quantised, say: its tensors mean nothing by themselves
                    owner.state[key] = FromFile(value, path) if any(True for _ in walk_tensors(value)) else value
            members.append(name)
        of = group.get(OPTIMIZER) if isinstance(group.get(OPTIMIZER), str) else None
        gone = known if of is None else (*known, OPTIMIZER)
        own = without(group, *gone)
        hyperparameters = {key: FromFile(one, path) if holds_tensors(one) else one for key, one in own.items()}
        common = _common(optimizer, numbers, path)
        checkpoint.param_groups.append(ParamGroup(hyperparameters, members, common, of))
    _attach_rest(checkpoint, optimizer, path)
    foreign = [name for name in optimizer.names.values() if name in checkpoint.unnamed and not is_number(name)]
    if foreign and checkpoint.parameters:
        checkpoint.warnings.append(
            f"the optimizer has state for {listed(foreign)}, which the model lacks; it keeps these names"
        )
    lost = lost_in_gathering(optimizer, path)
    checkpoint.warnings += [lost] if lost else []
    largest = max((one.numel for one in checkpoint.parameters.values()), default=math.inf)
    shapes = {number: optimizer.shape(number) for number in unnamed}
    flat = [number for number, shape in shapes.items() if shape and len(shape) == 1 and shape[0] > largest]
    if flat:
        checkpoint.warnings.append(
            f"the optimizer's state of {listed(flat)} has more elements than any of the model's tensors: it is of "
            "several parameters end to end, as fairseq's 16-bit optimizers have them, and keeps its number"
        )
    note_numbers(checkpoint, [number for number in unnamed if number not in flat])


def _attach_rest(checkpoint: Checkpoint, optimizer: OptimizerState, path: str) -> None:
    """Carry what else a state dict has as `zckpt.save` does, but for the optimizer's class, which no file says."""
    groups = checkpoint.param_groups[-len(optimizer.groups) :]
    keys = list(dict.fromkeys(key for slots in optimizer.state.values() for key in slots))

    def tree(rest: object, of: str | None) -> dict[str, object]:
        names = [list(group.parameters) for group in groups if of in (None, group.optimizer)]
        return {
            "class": "",
            "at": list(optimizer.at.get(of, ())),
            "keys": keys,
            "names": names,
            "parameters": {},
            "groups": [],
            "rest": rest,
        }

    if optimizer.rest and optimizer.rest.keys() <= {group.optimizer for group in groups}:
        each = {name: {BESIDE: tree(rest, name)} for name, rest in optimizer.rest.items()}
        checkpoint.optimizer_metadata[OPTIMIZERS] = FromFile(each, path)
    elif optimizer.rest:
        checkpoint.optimizer_metadata[BESIDE] = FromFile(tree(optimizer.rest, None), path)


def further_keys(kept: Mapping[str, object]) -> list[str]:
    """Return the keys under which optimizers have what is kept besides state, as their state dicts say them."""
    found = list(without(kept, BESIDE, OPTIMIZERS))
    for one in (kept, *dict_of(node_of(kept.get(OPTIMIZERS))).values()):
        tree = dict_of(node_of(dict_of(one).get(BESIDE)))
        rest, groups = dict_of(tree.get("rest")), tree.get("groups")
        inside = [rest, rest.get(STATE_KEY), *dict_of(tree.get("parameters")).values()]
        inside += groups if isinstance(groups, list) else []
        found += [str(key) for part in inside for key in dict_of(part) if key != STATE_KEY]
    return list(dict.fromkeys(found))


def _common(optimizer: OptimizerState, numbers: Sequence[int], path: str) -> dict[str, object]:
    """Return the single values that all parameters of a group with any state share."""
    present = [number for number in numbers if number in optimizer.state]
    steps = scalars_in({n: optimizer.state[n].get("step") for n in present}, path)
    return shared_values(
        [
            ({"step": steps[n]} if n in steps else {})
            | {key: value for key, value in optimizer.state[n].items() if isinstance(value, (int, float, bool))}
            for n in present
        ]
    )


MOST_PAIRS = 1 << 15
"""Of masters and weights of one shape that are held against each other in any order: each takes 0.1 ms."""


def names_of(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    names: GivenNames = None,
    *,
    taken: Collection[str] = (),
    sample: Sample | None = None,
    orders: Orders = in_order_or_sorted,
) -> dict[int, str]:
    """Return the names that are certain, by number; parameters are as of `attach`, those `taken` are another's."""
    numbers = optimizer.every_number
    shapes = optimizer.shapes(one.shape for one in checkpoint.parameters.values())
    said = Evidence.of(checkpoint, optimizer.numbers, shapes, factored=True)
    if taken:
        said = replace(said, candidates=without(said.candidates, *taken))
    if len(optimizer.names) == len(numbers):
        own = list(optimizer.names.values())
        if names is not None and said.known(names) != said.known(own):
            raise UsageError("the file already names its optimizer's parameters", advice="omit --names")
        return _by_name(said, optimizer)
    if names is not None:
        return said.given(names)
    if recorded := said.recorded(optimizer.recorded_names):
        return recorded
    checkpoint.is_numbered = True
    own_name = dict(zip(optimizer.names, said.known(list(optimizer.names.values())), strict=True))

    def is_of(number: int, name: str) -> bool:
        return name.startswith(optimizer.scopes.get(number, "")) and own_name.get(number, name) == name

    @cache
    def rounds(number: int, name: str) -> bool:
        master = optimizer.masters.get(number)
        return master is None or sample is None or sample(master, name)

    said = replace(said, factored=False, rules=(is_of, rounds))
    found = said.certain(orders)
    is_all = len(optimizer.groups) == 1 and len(numbers) == len(said.candidates)
    if is_all and not optimizer.masters and not any(optimizer.state.values()):
        return dict(zip(numbers, said.candidates, strict=True))  # any order is right of what has no state
    pairs = sum(count**2 for count in Counter(shapes.values()).values())
    has_masters = sample is not None and optimizer.masters.keys() >= {*numbers}
    if len(found) < len(numbers) and has_masters and pairs <= MOST_PAIRS:
        found |= said.alone()
    return found


def _by_name(said: Evidence[int], optimizer: OptimizerState) -> dict[int, str]:
    """Return the model's names of parameters that the file has by name; what the model has not is not among them."""
    own = said.known(list(optimizer.names.values()))
    found = {number: name for number, name in zip(optimizer.names, own, strict=True) if name in said.candidates}
    uses = Counter(found.values())
    every, same = Counter[object](), Counter[object]()  # per key, of which those of most parameters have their shape
    shown = [
        (name, key, shape)
        for number, name in found.items()
        for key, value in optimizer.state.get(number, {}).items()
        for shape in _shapes(value)
    ]
    for name, key, shape in shown:
        every[key] += 1
        same[key] += shape == said.candidates[name]
    told = {key for key in every if 2 * same[key] > every[key]} or every.keys()
    wrong = [(name, said.shapes[number]) for number, name in found.items() if uses[name] > 1]
    wrong += [
        (name, shape)
        for name, key, shape in shown
        if key in told and not agree(shape, said.candidates[name]) and not _is_per_row(shape, said.candidates[name])
    ]
    if wrong:
        name, seen = wrong[0]
        raise DamagedFileError(
            f"the optimizer's state of {name} does not match the model's parameter",
            expected=f"shape {said.candidates[name]}, once",
            found=seen,
        )
    return found


def _is_per_row(state: Shape, parameter: Shape) -> bool:
    """Tell whether state is of rows, once for each shard of their columns, as torchrec's row-wise optimizers have."""
    return len(state) == 1 and len(parameter) == 2 and state[0] >= parameter[0] > 0 and not state[0] % parameter[0]


def _labels(optimizer: OptimizerState, names: GivenNames) -> dict[int, str]:
    """Return the names of parameters of which no model is there: the user's or the file's; empty if it gives none."""
    numbers = optimizer.every_number
    recorded = names or optimizer.recorded_names
    complete = len(recorded) == len(numbers) == len(set(recorded))
    return dict(zip(numbers, recorded, strict=True)) if complete else {}


SAMPLED = 4
"""Parameters that are looked at, those with the most elements."""

SAMPLE_NBYTES = 4096
"""Of each slot of them, from its beginning."""


def lost_in_gathering(optimizer: OptimizerState, path: str) -> str | None:
    """Return a warning if slots of an optimizer are equal, bit for bit, which are never equal in training.

    `path`: the file that has the optimizer, under names or, with `FSDP.rekey_optim_state_dict`, under numbers.
    """
    several = {}
    for number in optimizer.state:
        name = optimizer.names.get(number, f"parameter {number}")
        slots = {
            key: tensor
            for key, tensor in optimizer.tensors(number).items()
            if tensor.shape and tensor.numel > 1 and tensor.is_contiguous
        }
        if len(slots) > 1 and len({(one.shape, one.dtype) for one in slots.values()}) == 1:
            several[name] = slots
    largest = sorted(several, key=lambda name: -max(one.numel for one in several[name].values()))[:SAMPLED]
    for name in largest:
        with opened(path) as file:
            sizes = [(one.offset, min(one.numel * one.itemsize, SAMPLE_NBYTES)) for one in several[name].values()]
            begun = {bytes(file.at(*one)) for one in sizes}
        if len(begun) == 1 and any(begun.pop()):  # and not only with zeros
            return (
                f"{' and '.join(several[name])} of {name} are equal bit for bit: FSDP1 with use_orig_params=True "
                f"gathers state wrongly on CPU, and all slots but the last are lost (save it sharded, or by zckpt.save)"
            )
    return None
