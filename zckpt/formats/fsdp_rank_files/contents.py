"""What the files of all ranks have: names, buffers and ties of the model, and the optimizer's values by number.

{state: {number: {slot: DTensor, ShardedTensor, Tensor or single value}}, param_groups: [{params: [number, ...]}]}

Whose state a number (or a name) is, nothing here knows. Single values, such as `step`, are one for all ranks: of 0-d
tensors that is found out here.

FSDP1 saves both names of a tied parameter, each in bytes of its own. Equal bytes alone do not prove that two are one: a
program may have made two parameters equal. Something else has to say so too, the sizes of the optimizer's state or the
model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about, listed
from zckpt.evidence import may_be_trained
from zckpt.formats.fsdp_rank_files.directory import HUGGINGFACE
from zckpt.formats.fsdp_rank_files.held import (
    PLAIN,
    Box,
    Form,
    Held,
    RankFiles,
    RankReader,
    add,
    elements,
    form_of,
    rules_of,
)
from zckpt.formats.lost import tensor_of
from zckpt.formats.torch_files.content import EXTRA_STATE
from zckpt.formats.torch_files.optimizer import (
    GROUPS_KEY,
    STATE_KEY,
    check_hyperparameters,
    looks_flattened,
    optimizer_rules,
    parse_either,
)
from zckpt.formats.torch_files.tensors import (
    as_mapping,
    by_name,
    carried,
    describe,
    identity_of,
    read_scalars,
)
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter, dict_of, number_of, stated, without
from zckpt.state.inventory import COPY, IMPLIED, REST, STATE, Rule
from zckpt.storage.files import opened, read_json
from zckpt.torchfile import (
    OrderedMapping,
    Place,
    Tensor,
    TorchFile,
    alike,
    brief,
    has_checksums,
    read_torchfile,
    value_at,
)

FLAT = "_flat_param"
"""What FSDP1 calls the flat parameter of a unit, where a program saves that (LOCAL_STATE_DICT)."""


@dataclass(slots=True)
class Model:
    """What the model's files have.

    Parameters
    ----------
    files : RankFiles
    held : dict of str to list of Held
        By name, in the model's order; what each rank has, by rank.
    modules : tuple of str
        Names of all modules, as FSDP1 has wrapped them, in the model's order; empty where the file has none.
    sums : list of dict of int to (int, int)
        For each rank, size and CRC-32 of each record of the file by its offset, where the file has them.
    form : tuple of int or None
        Of its DTensors, where it has any.
    """

    files: RankFiles
    held: dict[str, list[Held]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    sums: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    form: Form | None = None


def _put(root: object, place: Place, value: object) -> object:
    if not place:
        return value
    inner = _put(value_at(root, place[:1]), place[1:], value)
    if isinstance(root, list):
        return [inner if number == place[0] else one for number, one in enumerate(root)]
    return {**as_mapping(root), place[0]: inner}


def add_part(
    checkpoint: Checkpoint, file: TorchFile, role: str, rank: int, rules: Sequence[Rule], place: Place,
    tree: Mapping[Any, object],
) -> None:  # fmt: skip
    """Describe a file, of which the inventory is to see `tree` at a place, or more of one that is described already."""
    own = tuple(replace(rule, pattern=(*map(str, place), *rule.pattern)) for rule in rules)
    known = next(
        (number for number, one in enumerate(checkpoint.files) if one.path == file.path), len(checkpoint.files)
    )
    if known == len(checkpoint.files):
        checkpoint.files.append(describe(file, role, dp_rank=rank))
    one = checkpoint.files[known]
    whole = _put(one.tree, place, {**as_mapping(value_at(one.tree, place), file.path), **tree})
    checkpoint.files[known] = replace(one, tree=whole, rules=(*one.rules, *own))


def read_models(checkpoint: Checkpoint, paths: Sequence[Path], place: Place = ()) -> Model:
    """Give a checkpoint the parameters and buffers of all ranks' files.

    `place`: where in each file they are; what is there besides is not described. Raises SourceError: a file is
    damaged, has other names than rank 0's, or ranks do not have every element once.
    """
    model = Model(RankFiles([str(path) for path in paths]))
    model.sums = [{} for _ in paths]
    for rank in model.files.there:
        path = paths[rank]
        with about(path):
            file = read_torchfile(path)
            root = value_at(file.root, place)
            if not isinstance(root, dict) or not root:
                raise DamagedFileError("unexpected content", expected="a state dict", found=brief(root, 60))
            tree = {name: elements(node) for name, node in root.items()}
            add_part(checkpoint, file, "model", rank, rules_of("*"), place, tree)
            records = file.records if has_checksums(file.records) else ()
            model.sums[rank] = {record.offset: (record.nbytes, record.crc32) for record in records}
            reader = RankReader()
            nodes = by_name(root, file.path)
            held = {name: reader.held(node) for name, node in nodes.items()}
            tensors = stated(held)
            if rank == model.files.there[0]:
                rest = without(nodes, *tensors)
                strange = [name for name in rest if not name.endswith(EXTRA_STATE)]
                if strange:
                    raise UnsupportedError("holds something other than tensors", expected="a model's state dict",
                                           found=listed(strange))  # fmt: skip
                checkpoint.metadata |= {name: carried(file, value) for name, value in rest.items()}
                # `state_dict` sets the names of modules on its result.
                state = root.state if isinstance(root, OrderedMapping) else None
                versions = dict_of(state).get("_metadata")
                model.modules = tuple(map(str, versions)) if isinstance(versions, dict) else ()
                model.held = {name: [] for name in tensors}
                model.form = form_of(file)
            elif tensors.keys() != model.held.keys():
                strange = sorted(tensors.keys() ^ model.held.keys())
                raise LayoutError(
                    "has other tensors than rank 0's file",
                    expected=f"{len(model.held)} names",
                    found=f"{len(tensors)}; {listed(strange)} are only in one",
                    ranks=[rank],
                )
            for name, one in tensors.items():
                model.held[name].append(one)
    for rank in model.files.lost:
        for its in model.held.values():
            its.insert(rank, replace(its[0], boxes=(), mesh=None))
    _place(checkpoint, model)
    flat = [name for name in model.held if name.rpartition(".")[2] == FLAT]
    if flat:
        checkpoint.warnings.append(
            f"{listed(flat)}: FSDP1's flat parameters, and no file says which parameters are in them (save "
            "SHARDED_STATE_DICT or FULL_STATE_DICT)"
        )
    return model


def _place(checkpoint: Checkpoint, model: Model) -> None:
    """Turn tensors into parameters and buffers.

    Where FSDP tells, what it has left alone is a buffer. Otherwise, as in any state dict, integers and bools are
    buffers and so are the running statistics of a batch norm.
    """
    owners: dict[tuple[object, ...], str] = {}
    is_shown = any(one[0].is_parameter for one in model.held.values())
    dtypes = {name: held[0].dtype for name, held in model.held.items()}
    for name, held in model.held.items():
        found = model.files.joined(WEIGHT, name, list(enumerate(held)))
        is_buffer = not held[0].is_parameter and (is_shown or not may_be_trained(name, dtypes))
        key = _identity(held)
        owner = name if is_buffer or key is None else owners.setdefault(key, name)
        parameter = Parameter(name, found[0][1].shape, found[0][1].dtype)
        (checkpoint.buffers if is_buffer else checkpoint.parameters)[name] = parameter
        if owner != name:
            parameter.tied_to = owner
        else:
            add(checkpoint, parameter, WEIGHT, found, "buffer" if is_buffer else "parameter")


def _identity(held: Sequence[Held]) -> tuple[object, ...] | None:
    """Return what two names of one tensor have in common: the storage in the first rank's file that has any of it."""
    for rank, one in enumerate(held):
        if one.boxes:
            return (rank, one.shape, *(identity_of(box.tensor) for box in one.boxes))
    return None


Key = int | str
"""A parameter's number, or its name where the program saved that."""

MEMBERS = ("params", "param_names")


@dataclass(slots=True)
class Optimizer:
    """What the optimizer's files have.

    Parameters
    ----------
    files : RankFiles
    groups : list of dict
        Param groups, `params` included.
    tensors : dict of (Key, dict of str to list of (int, Held))
        By parameter and slot, the ranks that have any of it, in order.
    values : dict of (Key, dict of str to object)
        What is no tensor with dimensions, of which ranks have the same.
    """

    files: RankFiles
    groups: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[Key, dict[str, list[tuple[int, Held]]]] = field(default_factory=dict)
    values: dict[Key, dict[str, object]] = field(default_factory=dict)

    @property
    def keys(self) -> list[list[Key]]:
        """The parameters of each group."""
        return [list(group["params"]) for group in self.groups]

    def has_state(self, key: Key) -> bool:
        """Tell whether a parameter has any state."""
        return bool(self.tensors.get(key) or self.values.get(key))

    def cut(self, key: Key) -> dict[str, list[tuple[int, Held]]]:
        """Return the slots of a parameter that have dimensions."""
        return {slot: held for slot, held in self.tensors.get(key, {}).items() if held[0][1].shape != ()}


def read_optimizers(checkpoint: Checkpoint, paths: Sequence[Path], place: Place) -> Optimizer:
    """Read the optimizer's files of all ranks, and hold against each other what they must agree on.

    `place`: as of `read_models`. Raises DamagedFileError: a file does not hold an optimizer's state dict;
    LayoutError: ranks have other param groups,
    or other single values.
    """
    found = Optimizer(RankFiles([str(path) for path in paths]))
    there = found.files.there
    for rank in there:
        path, first = paths[rank], rank == there[0]
        file = read_torchfile(path)
        with about(path):
            node = value_at(file.root, place)
            groups, state = _parsed(node, file.path)
            if first:
                found.groups = groups
            else:
                _check_groups(found.groups, groups, rank)
            single = _add(found, rank, file, state)
        root, rules = as_mapping(node, file.path), _rules(single, first=first)
        tree: dict[object, object] = {key: elements(value) for key, value in root.items()}
        if looks_flattened(node):
            ends = tuple(f".{slot}" for slot in single)
            rules = (*rules_of("*"), *(Rule((key, REST), STATE if first else COPY, "single values", tensors=not first)
                     for key in map(str, root) if key.startswith(GROUPS_KEY) or key.endswith(ends)))  # fmt: skip
        else:
            tree[STATE_KEY] = {
                key: {slot: elements(value) for slot, value in slots.items()} if isinstance(slots, dict) else slots
                for key, slots in as_mapping(root.get(STATE_KEY, {})).items()
            }
        add_part(checkpoint, file, "optimizer", rank, rules, place, tree)
    for rank in found.files.lost:  # of flat parameters all ranks have as much
        for held in (held for slots in found.tensors.values() for held in slots.values()):
            one = held[0][1]
            if one.kind == PLAIN and len(one.shape) == 1 and len(held) >= len(there):
                box = Box((0,), one.shape, tensor_of(one.dtype, one.shape))
                held.insert(rank, (rank, replace(one, boxes=(box,) if one.boxes else ())))
    return found


def _rules(single: Sequence[str], *, first: bool) -> tuple[Rule, ...]:
    """Return the inventory's rules for a rank's file: what is one for all ranks is a copy of the first's."""
    inside = rules_of("state", "*", "*")
    if first:
        return (*inside, *optimizer_rules())
    about = "found to be rank 0's"
    same = tuple(Rule(("state", "*", key), COPY, about, tensors=True) for key in single)
    same += tuple(Rule(("state", "*", key, "**"), COPY, about) for key in single)  # of a tuple, what is in it
    listed = tuple(Rule(("param_groups", "*", key, "**"), IMPLIED, "which parameters they are") for key in MEMBERS)
    return (*inside, *same, *listed, Rule(("param_groups", "*", "**"), COPY, about, tensors=True), *optimizer_rules())


def _parsed(node: object, path: str) -> tuple[list[dict[str, Any]], dict[Key, dict[str, object]]]:
    found = parse_either(node, path)
    label: dict[int, Key] = {number: found.names.get(number, number) for number in found.every_number}
    groups = [{**group, "params": [label[number] for number in group["params"]]} for group in found.groups]
    return groups, {label[number]: slots for number, slots in found.state.items()}


def _check_groups(mine: Sequence[Mapping[str, Any]], its: Sequence[Mapping[str, Any]], rank: int) -> None:
    if [group["params"] for group in mine] != [group["params"] for group in its]:
        raise LayoutError(
            "has other param groups than rank 0",
            expected=" + ".join(str(len(group["params"])) for group in mine),
            found=" + ".join(str(len(group["params"])) for group in its),
            ranks=[rank],
        )
    check_hyperparameters(mine, its, rank)


def _add(found: Optimizer, rank: int, file: TorchFile, state: Mapping[Key, Mapping[str, object]]) -> list[str]:
    """Add a rank's state; return the keys of what is no tensor with dimensions."""
    reader = RankReader()
    single: dict[str, None] = {}
    scalars: list[tuple[Key, str, Held]] = []
    for key, slots in state.items():
        for slot, value in slots.items():
            held = reader.held(value)
            if held is None:
                single[slot] = None
                _agree(found, key, slot, value, rank)
                continue
            ranks = found.tensors.setdefault(key, {}).setdefault(slot, [])
            if held.kind == PLAIN and held.shape == ():
                single[slot] = None
                scalars.append((key, slot, held))
                if ranks:
                    continue
            ranks.append((rank, held))
    values = read_scalars(file.path, [held.boxes[0].tensor for _, _, held in scalars])
    for (key, slot, _), scalar in zip(scalars, values, strict=True):
        _agree(found, key, slot, scalar, rank)
    return list(single)


def _agree(found: Optimizer, key: Key, slot: str, value: object, rank: int) -> None:
    """Keep a single value, which is the same on all ranks that have it."""
    values = found.values.setdefault(key, {})
    if slot not in values:
        values[slot] = value
    elif not alike(values[slot], value):
        raise LayoutError(
            f"state {slot} of the optimizer's parameter {key} differs from the first rank's",
            expected=brief(number_of(values[slot])),
            found=brief(number_of(value)),
            advice="the files may be from different steps or runs",
            ranks=[rank],
        )


HEAD_NBYTES = 256
"""Of the first rank's, by which tensors are sorted that may be equal."""

READ_NBYTES = 1 << 20
"""Read at once, where bytes have to be compared."""

Ties = list[tuple[str, str]]
"""A name, and the one before it that is another name of the same parameter."""


def equal_names(model: Model, names: Sequence[str]) -> Ties:
    """Return names whose tensors equal that of a name before them, in every rank's file."""
    found: Ties = []
    seen: dict[object, list[str]] = {}
    for name in names:
        alike = seen.setdefault(_signature(model, name), [])
        owner = next((one for one in alike if is_same(model, name, one)), None)
        if owner is None:
            alike.append(name)
        else:
            found.append((name, owner))
    return found


def _signature(model: Model, name: str) -> tuple[object, ...]:
    held = model.held[name]
    for path, one in zip(model.files.paths, held, strict=True):
        for box in one.boxes:
            return (one.shape, one.dtype, _read(path, box.tensor, 0, HEAD_NBYTES))
    return held[0].shape, held[0].dtype, b""


def is_same(model: Model, name: str, other: str) -> bool:
    """Tell whether two names have the same bytes on every rank: by the checksums in the files, or else by reading."""
    ours, theirs = model.held[name], model.held[other]
    if (ours[0].shape, ours[0].dtype) != (theirs[0].shape, theirs[0].dtype):
        return False
    for path, sums, a, b in zip(model.files.paths, model.sums, ours, theirs, strict=True):
        if [(x.offsets, x.sizes) for x in a.boxes] != [(x.offsets, x.sizes) for x in b.boxes]:
            return False
        if not all(_is_equal(path, sums, x.tensor, y.tensor) for x, y in zip(a.boxes, b.boxes, strict=True)):
            return False
    return True


def _is_equal(path: str, sums: dict[int, tuple[int, int]], one: Tensor, other: Tensor) -> bool:
    if identity_of(one) == identity_of(other):
        return True
    if not (one.is_contiguous and other.is_contiguous):
        return False
    a, b = sums.get(one.offset), sums.get(other.offset)
    if a is not None and b is not None and a[0] == b[0] == one.nbytes:
        return a == b
    starts = range(0, one.nbytes, READ_NBYTES)
    return all(_read(path, one, at, READ_NBYTES) == _read(path, other, at, READ_NBYTES) for at in starts)


def _read(path: str, tensor: Tensor, at: int, nbytes: int) -> bytes:
    with opened(path) as file:
        return file.at(tensor.offset + at, min(nbytes, tensor.nbytes - at))


def tie(checkpoint: Checkpoint, alias: str, owner: str) -> None:
    """Make a parameter another name of one before it, of which the files have a copy of its own."""
    one, other = checkpoint.parameters[alias], checkpoint.parameters[owner]
    if one.tied_to is not None:
        return
    copy, original = one.slots.get(WEIGHT), other.slots[WEIGHT]
    if copy is not None:
        checkpoint.duplicates = [
            Duplicate("tied", alias, owner, two.slot, original, two.rank) if two.name == alias else two
            for two in checkpoint.duplicates
        ]
        checkpoint.duplicates.append(Duplicate("tied", alias, owner, copy, original))
    one.tied_to, one.slots = owner, {}


def tie_as_configured(checkpoint: Checkpoint, model: Model, directory: Path) -> None:
    """Tie the output's embedding to the input's where the model's configuration says that they are one.

    They are the two tensors of as many rows as the vocabulary has, and equal; where there are not just two such,
    nothing is tied.
    """
    config = read_json(directory / HUGGINGFACE / "config.json") or {}
    parts = [one for one in (config, config.get("text_config")) if isinstance(one, dict)]
    sizes = [one["vocab_size"] for one in parts if type(one.get("vocab_size")) is int
             and one.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True]  # fmt: skip
    found = [
        one.name for one in checkpoint.parameters.values()
        if one.tied_to is None and len(one.shape) == 2 and one.shape[0] in sizes[:1]
    ]  # fmt: skip
    if len(found) == 2 and checkpoint.parameters[found[1]].group is None and is_same(model, *found):
        tie(checkpoint, found[1], found[0])
