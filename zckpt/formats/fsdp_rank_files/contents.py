"""What the files of all ranks have: names, buffers and ties of the model, and the optimizer's values by number.

{state: {number: {slot: DTensor, ShardedTensor, Tensor or single value}}, param_groups: [{params: [number, ...]}]}

Whose state a number (or a name) is, nothing here knows. Single values, such as `step`, are one for all ranks: of 0-d
tensors that is found out here.

FSDP1 saves both names of a tied parameter, each in bytes of its own. Equal bytes alone do not prove that two are one: a
program may have made two parameters equal. Something else has to say so too, the sizes of the optimizer's state or the
model's configuration.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from zckpt.errors import DamagedFileError, LayoutError, UnsupportedError, about, listed
from zckpt.evidence import may_be_trained
from zckpt.formats.alike_files import AlikeReader
from zckpt.formats.fsdp_rank_files.across import Across, RankFiles, add
from zckpt.formats.fsdp_rank_files.directory import HUGGINGFACE
from zckpt.formats.fsdp_rank_files.held import PLAIN, Form, Held, Piece, RankReader, elements, form_of, rules_of
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
from zckpt.formats.torch_files.tensors import as_mapping, by_name, describe, identity_of, read_scalars, with_file
from zckpt.immutable import mutable
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter, by_key, dict_of, number_of, stated, without
from zckpt.state.boxes import merge
from zckpt.state.inventory import COPY, IMPLIED, REST, STATE, Rule
from zckpt.storage.files import opened, read_json
from zckpt.torchfile import (
    OrderedMapping,
    Place,
    Record,
    Tensor,
    TorchFile,
    alike,
    brief,
    has_blanks,
    has_checksums,
    node_of,
    read_torchfile,
    value_at,
    walk_tensors,
    with_value,
)

FLAT = "_flat_param"
"""What FSDP1 calls the flat parameter of a unit, where a program saves that (LOCAL_STATE_DICT)."""


@mutable
class Model:
    """What the model's files have."""

    files: RankFiles
    held: dict[str, Across] = field(default_factory=dict)  # by name, in the model's order
    modules: tuple[str, ...] = ()
    """Names of all modules, as FSDP1 has wrapped them, in the model's order; empty where the file has none."""
    records: dict[int, Sequence[Record]] = field(default_factory=dict)  # of each rank's file, where it has checksums
    at: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each tree, the first rank of it, which record begins at an offset."""
    form: Form | None = None  # of its DTensors, where it has any
    rest: dict[int, tuple[TorchFile, dict[str, object]]] = field(default_factory=dict)
    """What modules keep besides tensors, of the ranks that have any."""

    def sum(self, rank: int, tensor: Tensor) -> tuple[int, int] | None:
        """Return size and CRC-32 of the record that a tensor of a rank's file begins with."""
        number = self.at[self.files.tree[rank]].get(tensor.offset) if rank in self.records else None
        return None if number is None else self.records[rank][number][2:]


def add_part(
    checkpoint: Checkpoint, file: TorchFile, role: str, rank: int, rules: Sequence[Rule], place: Place,
    tree: Mapping[Any, object],
) -> None:  # fmt: skip
    """Describe a file, of which the inventory is to see `tree` at a place, or more of one that is described already."""
    own = tuple(replace(rule, pattern=(*map(str, place), *rule.pattern)) for rule in rules)
    one = next((one for one in checkpoint.files if one.path == file.path), None)
    if one is None:
        one = describe(file, role, dp_rank=rank)
        checkpoint.files.append(one)
    one.tree = with_value(one.tree, place, {**as_mapping(value_at(one.tree, place), file.path), **tree})
    one.rules = (*one.rules, *own)


CLOSE = 1 << 14
"""Bytes between two numbers below which one read is cheaper than two."""


class _Singles:
    """The single numbers of files that share a tree: 0-d tensors, of which these have the bytes in the same places."""

    def __init__(self, file: TorchFile) -> None:
        every = (tensor for _, tensor in walk_tensors(file.root) if tensor.shape == ())
        ranges = sorted({(one.offset, one.offset + one.itemsize) for one in every})
        windows = merge((low, high + CLOSE) for low, high in ranges)
        self._read = by_key((windows[bisect_right(windows, (low, math.inf)) - 1], (low, high)) for low, high in ranges)
        self.data = self.of(file.path)

    def of(self, path: str) -> bytes:
        """Return those of a file."""
        with opened(path) as file:
            read = ((file.at(start, end - CLOSE - start), start, its) for (start, end), its in self._read.items())
            return b"".join(data[low - start : high - start] for data, start, its in read for low, high in its)


def _elements(root: object) -> dict[object, object]:
    """Return what a state dict has, of DTensors and ShardedTensors their elements."""
    found = {key: elements(value) for key, value in dict_of(root).items()}
    state = found.get(STATE_KEY)
    if isinstance(state, dict):
        found[STATE_KEY] = {
            key: {slot: elements(value) for slot, value in slots.items()} if isinstance(slots, dict) else slots
            for key, slots in state.items()
        }
    return found


def _each(
    checkpoint: Checkpoint, files: RankFiles, place: Place, *, singles: bool = False
) -> Iterator[tuple[int, TorchFile, RankReader | None, dict[object, object]]]:
    """Yield each rank's file, what reads its tree, and that to describe: neither for the tree of a rank before.

    The first rank's is a tree of its own: what all ranks have once is carried from it. `singles`: whether files that
    are to share a tree need to have the same single numbers.
    """
    reader = AlikeReader(blanks=not place)  # beside which no file holds anything that is described as it is
    numbers: dict[int, _Singles] = {}
    described = {one.path: number for number, one in enumerate(checkpoint.files)}
    for rank in files.there:
        path = files.paths[rank]
        file = reader.read(path) if rank != files.there[0] else read_torchfile(path)
        with about(path):
            first, of_tree = files.begin(rank, file)
            if first != rank and not (singles and numbers[first].of(path) != numbers[first].data):
                like, number = described[files.paths[first]], described.setdefault(path, len(described))
                one = replace(checkpoint.files[like], path=path, nbytes=file.nbytes, archive=file.archive)
                checkpoint.files[number : number + 1] = [replace(one, dp_rank=rank, records=file.records)]
                yield rank, file, None, {}
                continue
            tree = _elements(value_at(file.root, place))
            if first != rank or has_blanks(tree):
                file = read_torchfile(path)
                first, of_tree = files.begin(rank, file)
                tree = _elements(value_at(file.root, place))
            if singles:
                numbers[rank] = _Singles(file)
        yield rank, file, of_tree, tree
        described.setdefault(path, len(described))
        file.root = None  # with its meshes and placements: what is described is the rest


def read_models(checkpoint: Checkpoint, paths: Sequence[Path], place: Place = ()) -> Model:
    """Give a checkpoint the parameters and buffers of all ranks' files.

    `place`: where in each file they are; what is there besides is not described. Raises SourceError: a file is
    damaged, has other names than rank 0's, or ranks do not have every element once.
    """
    files = RankFiles([str(path) for path in paths])
    model = Model(files)
    for rank, file, reader, tree in _each(checkpoint, files, place):
        with about(file.path):
            if has_checksums(file.records):
                model.records[rank] = file.records
            if reader is None:
                if (like := model.rest.get(files.tree[rank])) is not None:
                    model.rest[rank] = file, like[1]
                continue
            root = value_at(file.root, place)
            if not isinstance(root, dict) or not root:
                raise DamagedFileError("unexpected content", expected="a state dict", found=brief(root, 60))
            add_part(checkpoint, file, "model", rank, rules_of("*"), place, tree)
            model.at[rank] = {record.offset: number for number, record in enumerate(file.records)}
            nodes = by_name(root, file.path)
            held = {name: reader.held(node) for name, node in nodes.items()}
            tensors = stated(held)
            rest = without(nodes, *tensors)
            if rest:
                model.rest[rank] = file, rest
            if rank == files.there[0]:
                strange = [name for name in rest if not name.endswith(EXTRA_STATE)]
                if strange:
                    raise UnsupportedError("holds something other than tensors", expected="a model's state dict",
                                           found=listed(strange))  # fmt: skip
                # `state_dict` sets the names of modules on its result.
                state = root.state if isinstance(root, OrderedMapping) else None
                model.modules = tuple(map(str, dict_of(dict_of(state).get("_metadata"))))
                model.held = {name: Across(files) for name in tensors}
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
                model.held[name].by_tree[rank] = one
    for its in model.held.values() if files.lost else ():
        its.by_tree[files.lost[0]] = replace(its.first, pieces=(), mesh=None, local=None)
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
    is_shown = any(across.first.is_parameter for across in model.held.values())
    dtypes = {name: across.first.dtype for name, across in model.held.items()}
    for name, held in model.held.items():
        found = model.files.joined(WEIGHT, name, held)
        is_buffer = not held.first.is_parameter and (is_shown or not may_be_trained(name, dtypes))
        # Two names of one tensor have the storage in the first rank's file in common that has any of it.
        key = next(((rank, one.shape, *(identity_of(piece.tensor) for piece in one.pieces))
                    for rank, one in held if one.pieces), None)  # fmt: skip
        owner = name if is_buffer or key is None else owners.setdefault(key, name)
        parameter = Parameter(name, found[0][1].shape, found[0][1].dtype)
        (checkpoint.buffers if is_buffer else checkpoint.parameters)[name] = parameter
        if owner != name:
            parameter.tied_to = owner
        else:
            add(checkpoint, parameter, WEIGHT, found, "buffer" if is_buffer else "parameter")


Key = int | str
"""A parameter's number, or its name where the program saved that."""

MEMBERS = ("params", "param_names")


@mutable
class Optimizer:
    """What the optimizer's files have."""

    files: RankFiles
    groups: list[dict[str, Any]] = field(default_factory=list)  # param groups, `params` included
    tensors: dict[Key, dict[str, Across]] = field(default_factory=dict)
    """By parameter and slot; what has no dimensions is the first rank's."""
    values: dict[Key, dict[str, object]] = field(default_factory=dict)
    """What is no tensor with dimensions, of which ranks have the same."""

    @property
    def keys(self) -> list[Key]:
        """The parameters of all groups."""
        return [key for group in self.groups for key in group["params"]]

    def has_state(self, key: Key) -> bool:
        """Tell whether a parameter has any state."""
        return bool(self.tensors.get(key) or self.values.get(key))

    def cut(self, key: Key) -> dict[str, Across]:
        """Return the slots of a parameter that have dimensions."""
        return {slot: held for slot, held in self.tensors.get(key, {}).items() if held.first.shape != ()}


def read_optimizers(checkpoint: Checkpoint, paths: Sequence[Path], place: Place) -> Optimizer:
    """Read the optimizer's files of all ranks, and hold against each other what they must agree on.

    `place`: as of `read_models`. Raises DamagedFileError: a file does not hold an optimizer's state dict;
    LayoutError: ranks have other param groups,
    or other single values.
    """
    found = Optimizer(RankFiles([str(path) for path in paths]))
    there = found.files.there
    later: list[tuple[int, TorchFile, Key, dict[str, object], RankReader]] = []
    for rank, file, reader, tree in _each(checkpoint, found.files, place, singles=True):
        if reader is None:
            continue
        first = rank == there[0]
        with about(file.path):
            node = value_at(file.root, place)
            parsed = parse_either(node, file.path)
            label: dict[int, Key] = {number: parsed.names.get(number, number) for number in parsed.every_number}
            groups: list[dict[str, Any]] = [
                {**with_file(file, group), "params": [label[number] for number in group["params"]]}
                for group in parsed.groups
            ]
            if first:
                found.groups = groups
            else:
                mine, its = ([group["params"] for group in one] for one in (found.groups, groups))
                if mine != its:
                    raise LayoutError(
                        "has other param groups than rank 0",
                        expected=" + ".join(str(len(members)) for members in mine),
                        found=" + ".join(str(len(members)) for members in its),
                        ranks=[rank],
                    )
                check_hyperparameters(found.groups, groups, rank)
            state = {label[number]: slots for number, slots in parsed.state.items()}
            idle = {key: _idle(slots, reader) for key, slots in state.items()}
            later += [(rank, file, key, its, reader) for key, its in idle.items() if its]
            single = _add(found, rank, file, {key: without(its, *idle[key]) for key, its in state.items()}, reader)
        idle_keys = {slot for its in idle.values() for slot in its}
        root, rules = as_mapping(node, file.path), _rules(single, idle_keys, first=first)
        if looks_flattened(node):
            ends = tuple(f".{slot}" for slot in single)
            rules = (*rules_of("*"), *(Rule((key, REST), STATE if first else COPY, "single values", tensors=not first)
                     for key in map(str, root) if key.startswith(GROUPS_KEY) or key.endswith(ends)))  # fmt: skip
        add_part(checkpoint, file, "optimizer", rank, rules, place, tree)
    for rank, file, key, slots, reader in later:  # of a parameter without any elements
        _add(found, rank, file, {key: without(slots, *found.values.get(key, {}))}, reader)
    for rank in found.files.lost[:1]:  # of flat parameters all ranks have as much
        for held in (held for slots in found.tensors.values() for held in slots.values()):
            one = held.first
            if one.kind == PLAIN and len(one.shape) == 1 and len(list(held)) >= len(there):
                piece = Piece(((0,), one.shape), tensor_of(one.dtype, one.shape))
                held.by_tree[rank] = replace(one, pieces=(piece,) if one.pieces else ())
    return found


def _idle(slots: Mapping[str, object], reader: RankReader) -> dict[str, object]:
    """Return the single values of a rank that has no elements of a parameter: its step was never taken (Adagrad's)."""
    held = {slot: reader.held(value) for slot, value in slots.items()}
    if not any(one is not None and one.kind == PLAIN and one.shape == (0,) for one in held.values()):
        return {}
    return {slot: slots[slot] for slot, one in held.items() if one is None or one.shape == ()}


def _rules(single: Sequence[str], idle: Collection[str], *, first: bool) -> tuple[Rule, ...]:
    """Return the inventory's rules for a rank's file: what is one for all ranks is a copy of the first's."""
    inside = rules_of("state", "*", "*")
    inside += tuple(Rule(("state", "*", key), COPY, "of no element", tensors=True) for key in idle)
    if first:
        return (*inside, *optimizer_rules())
    about = "found to be rank 0's"
    same = tuple(Rule(("state", "*", key), COPY, about, tensors=True) for key in single)
    same += tuple(Rule(("state", "*", key, "**"), COPY, about) for key in single)  # of a tuple, what is in it
    listed = tuple(Rule(("param_groups", "*", key, "**"), IMPLIED, "which parameters they are") for key in MEMBERS)
    return (*inside, *same, *listed, Rule(("param_groups", "*", "**"), COPY, about, tensors=True), *optimizer_rules())


def _add(
    found: Optimizer, rank: int, file: TorchFile, state: Mapping[Key, Mapping[str, object]], reader: RankReader
) -> list[str]:
    """Add a rank's state; return the keys of what is no tensor with dimensions."""
    single: dict[str, None] = {}
    scalars: list[tuple[Key, str, Held]] = []
    for key, slots in state.items():
        for slot, value in slots.items():
            held = reader.held(value)
            if held is None:
                single[slot] = None
                _agree(found, key, slot, with_file(file, {slot: value})[slot], rank)
                continue
            across = found.tensors.setdefault(key, {}).setdefault(slot, Across(found.files))
            if held.kind == PLAIN and held.shape == ():
                single[slot] = None
                scalars.append((key, slot, held))
                if across.by_tree:
                    continue
            across.by_tree[rank] = held
    values = read_scalars(file.path, [held.pieces[0].tensor for _, _, held in scalars])
    for (key, slot, _), scalar in zip(scalars, values, strict=True):
        _agree(found, key, slot, scalar, rank)
    return list(single)


def _agree(found: Optimizer, key: Key, slot: str, value: object, rank: int) -> None:
    """Keep a single value, which is the same on all ranks that have it."""
    kept = found.values.setdefault(key, {}).setdefault(slot, value)
    if not alike(node_of(kept), node_of(value)):
        raise LayoutError(
            f"state {slot} of the optimizer's parameter {key} differs from the first rank's",
            expected=brief(number_of(node_of(kept))),
            found=brief(number_of(node_of(value))),
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
        held, paths = model.held[name], model.files.paths
        heads = ((one.shape, one.dtype, _read(paths[rank], piece.tensor, 0, HEAD_NBYTES))
                 for rank, one in held for piece in one.pieces)  # fmt: skip
        alike = seen.setdefault(next(heads, (held.first.shape, held.first.dtype, b"")), [])
        owner = next((one for one in alike if is_same(model, name, one)), None)
        if owner is None:
            alike.append(name)
        else:
            found.append((name, owner))
    return found


def is_same(model: Model, name: str, other: str) -> bool:
    """Tell whether two names have the same bytes on every rank: by the checksums in the files, or else by reading."""
    ours, theirs = model.held[name], model.held[other]
    if (ours.first.shape, ours.first.dtype) != (theirs.first.shape, theirs.first.dtype):
        return False
    return all(
        [x.box for x in a.pieces] == [y.box for y in b.pieces]
        and all(_is_equal(model, rank, x.tensor, y.tensor) for x, y in zip(a.pieces, b.pieces, strict=True))
        for (rank, a), (_, b) in zip(ours, theirs, strict=True)
    )


def _is_equal(model: Model, rank: int, one: Tensor, other: Tensor) -> bool:
    if identity_of(one) == identity_of(other):
        return True
    if not (one.is_contiguous and other.is_contiguous):
        return False
    a, b, path = model.sum(rank, one), model.sum(rank, other), model.files.paths[rank]
    if a is not None and b is not None and a[0] == b[0] == one.nbytes and a[1] and b[1]:  # 0: none is stated
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
    copy, original = one.weight, other.slots[WEIGHT]
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
    parts = config, dict_of(config.get("text_config"))
    sizes = [one["vocab_size"] for one in parts if type(one.get("vocab_size")) is int
             and one.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True]  # fmt: skip
    found = [one.name for one in checkpoint.owners if len(one.shape) == 2 and one.shape[0] in sizes[:1]]
    if len(found) == 2 and checkpoint.parameters[found[1]].group is None and is_same(model, *found):
        tie(checkpoint, found[1], found[0])
