"""The state dict of a `torch.optim` optimizer, in each of its forms; `attach` gives it to a checkpoint's parameters.

{state: {number: {slot: value}}, param_groups: [{params: [number, ...], ...}]}     `Optimizer.state_dict()`
{state: {name: {slot: value}}, param_groups: [{params: [name, ...], ...}]}         FSDP1's full one, `get_state_dict`
{"state.NAME.SLOT": value, "param_groups.NAME.KEY": value}                         the same, flattened
{state: [{slot: value}, ...], hypers: [{...}]}                                     fastai's, in order; with one group
{OTHER: ..., KEY: {state: ..., param_groups: ...}}                                 of one that holds another: Lookahead

Its tensors are those of a torch file, or items of DCP, whose chunks may lie in several. Numbers are counted over all
groups in order; newer files may also hold names with them (`param_names`). Names of the second form are the model's
own, without doubt. The third does not say which group a parameter is in: those with the same values are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain
from typing import Any, TypeGuard

from zckpt.codes import HYPERPARAMETERS_DIFFER
from zckpt.compare.logical import single
from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about
from zckpt.evidence import shown_shape
from zckpt.formats.torch_files.tensors import TensorItem, refuse_taken, with_scalars
from zckpt.immutable import immutable
from zckpt.state import MASTER, Shape, are_distinct, are_texts, dict_of, first_of, is_floating, list_of, without
from zckpt.state.inventory import CARRIED, IMPLIED, STATE, Rule, exactly
from zckpt.state.names import is_number
from zckpt.torchfile import Digests, FromFile, MetaTensor, Object, Place, Tensor, alike, brief, is_leaf, value_at

OPTIMIZER = "optimizer"
"""Under which a param group that zckpt wrote says which of several optimizers it is of."""

STATE_KEY, GROUPS_KEY = "state", "param_groups"

FORM_KEY = "_optimizer_state_format_version"
"""Of torch-checkpointing, where groups have `param_names` and no `params`."""

OPTIMIZERS = "optimizers"
"""Under which optimizer metadata have those of several optimizers, by name."""

BESIDE = "beside_state"
"""Under which optimizer metadata have what its state dict has beside state of parameters; `optim/states/beside`."""


MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16", "fp32_groups")
"""Under which Megatron, Apex's FP16_Optimizer and DeepSpeed's have a list of masters for each param group of theirs."""

LBFGS = frozenset({"old_dirs", "old_stps", "prev_flat_grad"})

EMPTY: Mapping[Any, Any] = {}


@immutable
class OptimizerState:
    """A torch optimizer's state dict."""

    state: dict[int, dict[str, object]]  # slot to value, by parameter number
    groups: list[dict[str, Any]]  # param groups, `params` included
    masters: dict[int, Tensor] = field(default_factory=dict)
    """Fp32 masters by parameter number, where the file has them."""
    names: dict[int, str] = field(default_factory=dict)
    """Of the parameters that the file has by name. They are numbered here in the order of the groups."""
    scopes: dict[int, str] = field(default_factory=dict)
    """What the names of parameters that are numbered are known to begin with."""
    rest: dict[Any, Any] = field(default_factory=dict)
    """What else the state dict has, also under `state`; of several optimizers by their names."""
    at: dict[str | None, Place] = field(default_factory=dict)
    """Which keys of the state dict lead to state and param groups, of several by their names, of one by None."""

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
        return [str(name) for group in self.groups for name in list_of(group.get("param_names"))]

    def shape(self, number: int, slots: Collection[object] = ()) -> Shape | None:
        """Return the shape of a parameter as its state shows it: the largest of its tensors, or of some slots."""
        state = _elementwise(self.state.get(number, {}))
        shapes = {key: list(shapes_in(value)) for key, value in state.items() if not slots or key in slots}
        return shown_shape(shapes | ({MASTER: [self.masters[number].shape]} if number in self.masters else {}))

    def shapes(self, whole: Iterable[Shape]) -> dict[int, Shape | None]:
        """Return the shape of each parameter as its state shows it; `whole`: those of the model's parameters.

        Slots that have such shapes in every state, and none of them more often than the model, show it, a moment say,
        if there are any: beside them optimizers keep tensors that are larger, as Shampoo's kind does, or all alike.
        What a group's `rank` has made smaller, as GaLore's and APOLLO's, shows none.
        """
        have = Counter(whole)
        states = [
            _elementwise(state) for state in self.state.values() if any(map(list, map(shapes_in, state.values())))
        ]
        shown = {key: [{*shapes_in(state.get(key))} for state in states] for key in (states[0] if states else ())}
        slots = {key for key, its in shown.items() if all(its) and Counter(chain(*its)) <= have} - {"step", "RMS"}
        ranks = {int(number): group.get("rank") for group in self.groups for number in group["params"]}
        found = {number: self.shape(number, slots) for number in self.every_number}
        return {number: None if ranks[number] in (shape or ()) else shape for number, shape in found.items()}


def shapes_in(value: object) -> Iterator[Shape]:
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
        return {**without(tree, *(MASTERS if optimizer.masters else ())), at[0]: rest_of(tree[at[0]], at[1:])}

    at = innermost(node)
    if not at and not looks_like_optimizer(node):
        return optimizer
    return replace(optimizer, rest=rest_of(dict_of(node), at), at={None: at})


def innermost(node: object, deep: int = 4) -> Place:
    """Return the keys that lead to the state dict of the optimizer that another holds, as SAM and Lookahead do.

    Not where lists lie beside it, or objects, and no masters: those of DeepSpeed are partitions.
    """
    others = without(dict_of(node), STATE_KEY, GROUPS_KEY).items() if deep else ()
    held = [(key, *at) for key, one in others if (at := innermost(one, deep - 1)) or looks_like_optimizer(one)]
    if len(held) != 1:
        return ()
    [way] = held
    if looks_like_optimizer(node):
        is_its = _sizes(node) == _sizes(value_at(node, way))
    else:
        has_masters = bool(masters_of(value_at(node, way[:-1]), value_at(node, way)))
        is_its = has_masters or all(isinstance(one, dict) or is_leaf(one) for _, one in others)
    return way if is_its else ()


def masters_of(outer: object, optimizer: object) -> list[Any]:
    """Return the masters beside an optimizer, in the order of its groups; none if some parameter has none."""
    lists = list(map(list_of, list_of(first_of(map(dict_of(outer).get, MASTERS)))))
    every = list(chain(*lists))
    is_each = list(map(len, lists)) == _sizes(optimizer)
    return (
        every
        if is_each and all(isinstance(one, (Tensor, TensorItem)) and is_floating(one.dtype) for one in every)
        else []
    )


def _sizes(optimizer: object) -> list[int]:
    """Return how many parameters each param group of a state dict has."""
    return [len(list_of(dict_of(group).get("params"))) for group in list_of(dict_of(optimizer).get(GROUPS_KEY))]


def optimizer_rules(*path: str, rest: Mapping[Any, Any] = EMPTY, at: Place = ()) -> tuple[Rule, ...]:
    """Return the inventory's rules for an optimizer's state dict that lies under some keys of a file's tree.

    `rest`: what of it is carried as it is; `at`: as of `OptimizerState`.
    """
    if at:
        return (
            *optimizer_rules(*path, *map(exactly, at)),
            *(Rule((*path, exactly(key), "**"), CARRIED, BESIDE) for key in rest),
        )
    carried = [
        *([exactly(key)] for key in rest if key != STATE_KEY),
        *([STATE_KEY, exactly(key)] for key in rest.get(STATE_KEY, ())),
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
    states, hypers = (dict_of(node).get(key) for key in (STATE_KEY, "hypers"))
    groups = hypers.get("items") if isinstance(hypers, Object) else hypers
    if not isinstance(states, list) or not isinstance(groups, list) or len(groups) != 1:
        return node
    state = dict(enumerate(states))
    return {STATE_KEY: state, GROUPS_KEY: [{**dict_of(groups[0]), "params": list(state)}]}


def looks_flattened(node: object) -> TypeGuard[dict[str, Any]]:
    """Tell whether a node is one whose keys are joined."""
    if not isinstance(node, dict) or not are_texts(node):
        return False
    kinds = {key.partition(".")[0] if key.count(".") > 1 else "" for key in node}
    return GROUPS_KEY in kinds and kinds <= {STATE_KEY, GROUPS_KEY}


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
            is_text = isinstance(key, str) and not digits and not names
            if is_text and carries:
                others[key] = slots
                continue
            if is_text:
                raise UnsupportedError(
                    f"the optimizer has state under {brief(key)}, which is not a parameter's: zckpt cannot store it",
                    expected="state under parameter numbers; common values belong in the param group",
                    advice="remove it from `state` before saving, or save it outside the optimizer",
                )
            if not isinstance(number, int) or not isinstance(slots, dict):
                raise DamagedFileError("state for a parameter that is in no group", found=brief(key))
            refuse_taken(slots)
            state[number] = {str(slot): value for slot, value in slots.items()}
        if masters and len(masters) != len(labels):
            raise DamagedFileError(
                "masters and param groups disagree", expected=f"{len(labels)} parameters", found=len(masters)
            )
        its = dict(zip(by_label.values(), masters, strict=False))
        return OptimizerState(state, groups, its, names, rest={STATE_KEY: others} if others else {})


def parse_either(node: object, path: str, *, carries: bool = False) -> OptimizerState:
    """Bring a state dict to one form, whether or not its keys are joined; errors are those of `parse`."""
    return parse(unflattened(node, path) if looks_flattened(node) else node, path, carries=carries)


def parse_held(node: object, path: str) -> OptimizerState:
    """Bring an optimizer to one form, or the one that it holds, with masters beside that; errors as of `parse`."""
    at = innermost(node)
    if not at:
        return parse_either(node, path, carries=True)
    held = value_at(node, at)
    return parse(held, path, masters_of(value_at(node, at[:-1]), held), carries=True)


def check_hyperparameters(mine: Sequence[Mapping[str, Any]], its: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Raise LayoutError unless a rank has the param groups of the first one, whatever their parameters are.

    `mine`, `its`: tensors in them with their files, as `with_file` has them.
    """
    if len(mine) != len(its):
        raise LayoutError("has other param groups than rank 0", expected=len(mine), found=len(its), ranks=[rank])
    for number, (one, two) in enumerate(zip(mine, its, strict=True)):
        for key in sorted((one.keys() | two.keys()) - {"params", "param_names"}):
            expected, found = one.get(key), two.get(key)
            is_same = single(expected) == single(found) if isinstance(expected, FromFile) else alike(expected, found)
            if not is_same:
                raise LayoutError(
                    f"param group {number} has another {key} than rank 0's",
                    expected=brief(single(expected)),
                    found=brief(single(found)),
                    advice="the files may be from different steps or runs",
                    code=HYPERPARAMETERS_DIFFER,
                    ranks=[rank],
                )


def _group(node: object) -> dict[object, object]:
    own = dict_of(node)
    params = own.get("params", own.get("param_names"))
    if not isinstance(params, (list, tuple)) or not all(type(one) in (int, str) for one in params):
        raise DamagedFileError(
            "unreadable param group", expected="a list of numbers or names in `params`", found=brief(params)
        )
    return {**own, "params": params}


def split_key(joined: str, names: Collection[str]) -> tuple[str, str]:
    """Cut a joined key after the longest name that it begins with; after the last dot where none is known."""
    at = joined.rfind(".")
    while at > 0:
        if joined[:at] in names:
            return joined[:at], joined[at + 1 :]
        at = joined.rfind(".", 0, at)
    name, _, slot = joined.rpartition(".")
    return name, slot


Values = dict[str, dict[str, object]]
"""By parameter and key."""


def apart(node: Mapping[str, object], names: Collection[str] = ()) -> tuple[Values, Values]:
    """Return the state and the hyperparameters that a state dict has whose keys are joined."""
    state: Values = {}
    values: Values = {}
    for key, value in node.items():
        kind, _, rest = key.partition(".")
        name, last = split_key(rest, names)
        (state if kind == STATE_KEY else values).setdefault(name, {})[last] = value
    return state, values


def unflattened(node: Mapping[str, object], path: str, names: Collection[str] = ()) -> dict[str, Any]:
    """Return a state dict whose keys are joined as one of names; what it keeps once a parameter is once a group.

    `names`: those that are known, by which a name is told from a slot.
    """
    state, values = apart(node, names)
    groups: dict[bytes, dict[str, Any]] = {}
    digests = Digests()
    for name, its in values.items():
        read = with_scalars(its, path)
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
            found |= {
                f"{GROUPS_KEY}.{name}.{key}": value for key, value in without(group, "params", "param_names").items()
            }
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
            if scope and (names := list_of(group.get("param_names"))):
                its["param_names"] = [f"{scope}{name}" for name in names]
            found.groups.append(its)
        found.at[optimizer] = one.at.get(None, ())
        if one.rest:
            found.rest.update(one.rest if optimizer is None else {optimizer: one.rest})
    return found
