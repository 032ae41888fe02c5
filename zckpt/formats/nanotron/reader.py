"""The parts of all ranks put together: of a weight as its headers say, of the optimizer's state as of its weight."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from zckpt.codes import MISSING_FILE
from zckpt.errors import DamagedFileError, LayoutError, ShardError, UnsupportedError, about, listed
from zckpt.evidence import note_not_used
from zckpt.formats.companions import MAXIMUM_JSON_NBYTES, carry, files_below
from zckpt.formats.lost import MOST_RANKS
from zckpt.formats.nanotron import METADATA
from zckpt.formats.safetensors import file as safetensors
from zckpt.formats.torch_files.optimizer import (
    check_hyperparameters,
    optimizer_rules,
    parse,
    shared_values,
)
from zckpt.formats.torch_files.tensors import as_mapping, describe, scalars_in, slot_of, with_file
from zckpt.immutable import immutable
from zckpt.state import (
    MASTER,
    Checkpoint,
    Duplicate,
    GivenNames,
    Parameter,
    ParamGroup,
    Shape,
    Slot,
    Topology,
    dict_of,
    differ,
    size_of,
    without,
)
from zckpt.state.boxes import overlap
from zckpt.state.inventory import CARRIED, COPY, FOREIGN, IMPLIED, Claim, Rule
from zckpt.state.names import natural_order
from zckpt.state.views import concat, narrow, placed, plain, reshape
from zckpt.storage.files import json_object
from zckpt.torchfile import Digests, Tensor, TorchFile, read_torchfile

VERSION = "1."
MASTERS = "gradient_accumulator"
OF_SHARD = ("version", "local_global_slices_pairs", "unsharded_shape")

_WEIGHT = re.compile(
    r"model_(.+?)(?:_pp-rank-([0-9]{1,5})-of-([0-9]{1,5})_tp-rank-([0-9]{1,5})-of-([0-9]{1,5})(?:_exp-rank-([0-9]{1,5})-of-([0-9]{1,5}))?)?"
    r"\.safetensors"
)
_OPTIMIZER = re.compile(
    r"optimizer_pp-([0-9]{1,5})-of-([0-9]{1,5})(?:_dp-([0-9]{1,5})-of-([0-9]{1,5}))?_tp-([0-9]{1,5})-of-([0-9]{1,5})"
    r"(?:_exp-([0-9]{1,5})-of-([0-9]{1,5}))?\.pt"
)

Part = tuple[int, int | None] | None
"""The tensor- and the expert-parallel rank that has a part; the second None: experts are not what it is cut by. None:
all ranks have the whole."""


@immutable
class Piece:
    """A part of a tensor of the model, or all of it."""

    slot: Slot
    whole: Shape  # the shape of the tensor
    boxes: Sequence[tuple[Shape, Shape, Shape]]  # where each begins in the part, and in the whole, and its sizes
    ranks: tuple[Sequence[int], Sequence[int | None]] = ((), ())  # tensor- and expert-parallel ones that have parts


Pieces = dict[Part, Piece]

Place = tuple[int, int, int]
"""A pipeline-, tensor- and expert-parallel rank."""


@immutable
class Rank:
    """An optimizer file, and the ranks that it is of."""

    place: Place
    dp: int | None  # None without ZeRO
    file: TorchFile
    groups: Sequence[Mapping[str, Any]]  # param groups, with the numbers of their parameters, and the names of those
    names: Mapping[int, str]
    values: Sequence[tuple[str, str, object]]  # each with the name of its parameter and the slot's; masters, too


def read(path: Path, *, names: GivenNames = None) -> Checkpoint:
    """Read the structure of all files.

    `names`: are not needed. Raises ShardError: a rank's file is missing; LayoutError: files contradict each other;
    UnsupportedError: it is of another version.
    """
    checkpoint = Checkpoint(str(path), "nanotron")
    note_not_used(checkpoint, names)
    said = json_object(path / METADATA, "nanotron's metadata", most=MAXIMUM_JSON_NBYTES)
    version, metas = str(said.get("version")), said.get("metas")
    if not version.startswith(VERSION) or not isinstance(metas, dict):
        raise UnsupportedError("has an unsupported version", path=path / METADATA, expected=f"{VERSION}x, metas",
                               found=version)  # fmt: skip
    checkpoint.format_version, checkpoint.metadata["nanotron"] = version, said
    step = metas.get("last_train_step")
    checkpoint.step = step if type(step) is int else None
    checkpoint.claims[str(path / METADATA)] = Claim(CARRIED, "nanotron")
    weights: dict[str, Pieces] = {}
    others = []
    for name, file in files_below(path):
        folder, _, last = name.rpartition("/")
        match = _WEIGHT.fullmatch(last) if folder.split("/")[0] == "model" else None
        if match is not None:
            part, piece = _piece(checkpoint, file, match)
            weights.setdefault(".".join([*folder.split("/")[1:], match[1]]), {})[part] = piece
        elif folder in ("lr_scheduler", "random") and file.suffix == ".pt":
            carry(checkpoint, file)
        elif folder == "optimizer" and (match := _OPTIMIZER.fullmatch(last)) is not None:
            others.append((file, match))
        elif name in ("config.yaml", "model_config.json"):
            checkpoint.claims[str(file)] = Claim(FOREIGN, "the configuration of the run")
    ranks = _ranks(checkpoint, path / "optimizer", others)
    order = dict.fromkeys(name for one in ranks for name in one.names.values())
    rest = sorted(weights.keys() - order.keys(), key=natural_order)
    for name in [*(name for name in order if name in weights), *rest]:
        with about(path / "model"):
            held = {part: piece.slot for part, piece in weights[name].items()}
            checkpoint.parameters[name] = Parameter.of(name, _whole(name, weights[name], held))
    _attach(checkpoint, weights, ranks)
    _groups(checkpoint, ranks)
    _note_gaps(checkpoint, path, [file.name for file, _ in others])
    return checkpoint


def _piece(checkpoint: Checkpoint, file: Path, match: re.Match[str]) -> tuple[Part, Piece]:
    """Return what a file has of a tensor, and which part that is.

    A header says slices of the part and of the whole: `0,4,None|None,None,None#8,12,None|...`, with `;` between them.
    """
    slots, texts, nbytes = safetensors.read_header(file)
    rules = [Rule((safetensors.METADATA_KEY, key), IMPLIED, "the place of the part in the whole") for key in OF_SHARD]
    checkpoint.files.append(safetensors.source_file(file, slots, texts, nbytes, rules))
    with about(file):
        if [*slots] != ["data"]:
            raise DamagedFileError("unexpected content", expected="one tensor, `data`", found=listed([*slots]))
        slot = slots["data"]
        if match[2] is None:
            zero = (0,) * len(slot.shape)
            return None, Piece(slot, slot.shape, [(zero, zero, slot.shape)])
        try:
            shape = re.sub(r"np\.int[0-9]+\(([0-9]+)\)", r"\1", texts["unsharded_shape"])
            whole = tuple(int(size) for size in shape.strip("()").split(",") if size.strip())
            pairs = [
                [_ranges(text, size) for text, size in zip(pair.split("#"), (slot.shape, whole), strict=True)]
                for pair in texts["local_global_slices_pairs"].split(";")
            ]
        except (KeyError, ValueError) as error:
            raise DamagedFileError("does not state where its part lies in the whole", expected=", ".join(OF_SHARD[1:]),
                                   found=f"{type(error).__name__}: {error}") from error  # fmt: skip
        if any(sizes != its for (_, sizes), (_, its) in pairs):
            raise DamagedFileError(
                "the slices of the part and of the whole differ", found=texts["local_global_slices_pairs"]
            )
        exp, experts = (None, [None]) if match[6] is None else (int(match[6]), range(int(match[7])))
        boxes = [(low, to, sizes) for (low, sizes), (to, _) in pairs]
        return (int(match[4]), exp), Piece(slot, whole, boxes, (range(int(match[5])), experts))


def _ranges(text: str, shape: Shape) -> tuple[Shape, Shape]:
    """Return where slices begin, and their sizes. Raises ValueError: they are not within a shape, or have steps."""
    found = []
    for one, size in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if part == "None" else int(part) for part in one.split(","))
        low, high = start or 0, size if stop is None else stop
        if step not in (None, 1) or not 0 <= low <= high <= size:
            raise ValueError(f"{one} of {size}")
        found.append((low, high - low))
    return tuple(low for low, _ in found), tuple(size for _, size in found)


def _whole(name: str, pieces: Pieces, held: Mapping[Part, Slot]) -> Slot:
    """Return the whole of what ranks have of a tensor. Raises ShardError: a part is missing; LayoutError: or twice."""
    every = [*pieces.values()]
    whole, (tp, exp) = every[0].whole, every[-1].ranks
    for at in product(tp, exp):
        if at not in pieces:
            raise ShardError(f"the part of {name} of tensor-parallel rank {at[0]} is missing", code=MISSING_FILE,
                             expected=f"{len(tp) * len(exp)} files", found=len(pieces))  # fmt: skip
    boxes = []
    for part, piece in pieces.items():
        for low, to, sizes in piece.boxes:
            box = held[part]
            for axis, (start, size) in enumerate(zip(low, sizes, strict=True)):
                box = narrow(box, axis, start, size)
            boxes.append((to, box))
    unlike = differ([piece.whole for piece in every]) or overlap([(to, slot.shape) for to, slot in boxes])
    if unlike or sum(slot.numel for _, slot in boxes) != math.prod(whole):
        raise LayoutError(f"the parts of {name} do not cover it exactly once", expected=whole, parameters=[name])
    return plain(placed(boxes))


def _ranks(checkpoint: Checkpoint, folder: Path, files: Sequence[tuple[Path, re.Match[str]]]) -> list[Rank]:
    """Read the optimizer's files. Raises ShardError: one is missing; LayoutError: ranks have other hyperparameters."""
    sizes = {tuple(int(one or 1) for one in match.groups()[1::2]) for _, match in files}
    if len(sizes) > 1:
        raise LayoutError("holds files of different world sizes", path=folder, found=listed(sorted(map(str, sizes))))
    counts = next(iter(sizes), (1, 1, 1, 1))
    found: list[Rank] = []
    firsts: dict[int, list[dict[str, object]]] = {}  # of each stage the param groups of the first file
    every = sorted((tuple(int(n or 0) for n in match.groups()[::2]), path, match[3]) for path, match in files)
    for (pp, dp, tp, exp), path, cut in every:
        file = read_torchfile(path)
        root = as_mapping(file.root, file.path)
        own = parse(root, file.path)
        numbers = as_mapping(root.get("names", {}), file.path)
        names = {number: str(name) for number, name in numbers.items() if isinstance(number, int)}
        if unnamed := own.state.keys() - names.keys():
            raise DamagedFileError("has state for parameters without names", path=path, found=listed(sorted(unnamed)))
        values = [(names[number], key, value) for number, its in own.state.items() for key, value in its.items()]
        values += ((str(name), MASTER, one) for name, one in as_mapping(root.get(MASTERS, {}), file.path).items())
        groups = [with_file(file, group) for group in own.groups]
        rules = (Rule(("names", "**"), IMPLIED, "names of the parameters"), *optimizer_rules())
        if pp in firsts:
            with about(path):
                check_hyperparameters(firsts[pp], groups, len(found))
            rules = (Rule(("param_groups", "**"), COPY, "found to be the first rank's", tensors=True), *rules)
        firsts.setdefault(pp, groups)
        rank = Rank((pp, tp, exp), None if cut is None else dp, file, own.groups, names, values)
        checkpoint.files.append(describe(file, "optimizer", dp_rank=rank.dp, rules=rules))
        found.append(rank)
    there = {at for at, *_ in every}
    beyond = any(rank >= count for at in there for rank, count in zip(at, counts, strict=True))
    if beyond or len(there) < len(found):
        raise LayoutError("holds more than one optimizer file of each rank", path=folder,
                          expected=f"{math.prod(counts)} files", found=len(found))  # fmt: skip
    if len(found) not in (0, math.prod(counts)):
        gone = next(at for at in product(*map(range, counts)) if at not in there)
        raise ShardError(
            "a rank's optimizer file is missing", path=folder, expected=f"{math.prod(counts)} files",
            found=f"{len(found)}, none of pp {gone[0]}, dp {gone[1]}, tp {gone[2]}, exp {gone[3]}", code=MISSING_FILE,
        )  # fmt: skip
    pp, dp, tp, exp = counts
    dp = size_of(dict_of(checkpoint.metadata["nanotron"]), "dp") or dp
    if dp > MOST_RANKS:
        raise DamagedFileError("states too many data-parallel ranks", path=folder.parent / METADATA,
                               expected=f"at most {MOST_RANKS}", found=dp)  # fmt: skip
    checkpoint.topology, checkpoint.world_size = Topology(dp, tp, pp, exp), dp * tp * pp
    if found:
        checkpoint.claims[str(folder / "optimizer_config.json")] = Claim(IMPLIED, "how ranks have cut the state")
    return found


def _attach(checkpoint: Checkpoint, weights: Mapping[str, Pieces], ranks: Sequence[Rank]) -> None:
    """Give the parameters their state, of which ranks have further copies.

    Raises LayoutError: they have not all of it as often, or those that share a part do not cut it as ZeRO-1 does.
    """
    held: dict[tuple[str, str], dict[Place, list[tuple[Rank, Slot]]]] = {}
    for rank in ranks:
        for name, key, value in rank.values:
            if name not in weights:
                raise LayoutError(f"has state for {name}, which the model lacks", path=rank.file.path)
            if isinstance(value, Tensor):
                slot = slot_of(key, value, rank.file.path)
                held.setdefault((name, key), {}).setdefault(rank.place, []).append((rank, slot))
            else:
                checkpoint.parameters[name].state.setdefault(key, value)
    for (name, key), by_place in held.items():
        first, *copies = [slot for its in by_place.values() for _, slot in its]
        if first.shape or any(slot.shape for slot in copies):
            first, *copies = _joined(checkpoint, name, weights[name], key, by_place)
        checkpoint.parameters[name].slots[key] = first
        checkpoint.duplicates += [Duplicate("parameter", name, name, copy, first) for copy in copies]


def _joined(
    checkpoint: Checkpoint, name: str, pieces: Pieces, key: str,
    by_place: Mapping[Place, Sequence[tuple[Rank, Slot]]],
) -> list[Slot]:  # fmt: skip
    """Return a slot of a parameter as often as ranks have it.

    Raises LayoutError: they have not all of it as often, or those that share a part do not cut it as ZeRO-1 does.
    """
    copies: dict[Part, list[Slot]] = {}
    dp = checkpoint.topology.dp
    for (_, tp, exp), its in by_place.items():
        part: Part = next((one for one in ((tp, exp), (tp, None)) if one in pieces), None)
        path = its[0][0].file.path
        if part not in pieces:
            raise LayoutError(f"has state of a part of {name} that the model lacks", path=path)
        slot = pieces[part].slot
        cuts = 1 if its[0][0].dp is None else dp
        found = [one.numel for _, one in its]
        expected = [size for rank in range(cuts) if (size := slot.numel // cuts + (rank < slot.numel % cuts))]
        if found != expected:
            raise LayoutError(f"{key} of {name} is not what these ranks should hold", path=path,
                              expected=listed([*map(str, expected)]), found=listed([*map(str, found)]))  # fmt: skip
        whole = concat([reshape(one, (one.numel,)) for _, one in its], 0)
        copies.setdefault(part, []).append(reshape(whole, slot.shape))
    counts = {len(every) for every in copies.values()}
    if copies.keys() != pieces.keys() or len(counts) != 1:
        raise LayoutError(
            f"parts of {key} of {name} are missing on the ranks", path=checkpoint.source, parameters=[name]
        )
    return [_whole(name, pieces, {part: own[n] for part, own in copies.items()}) for n in range(counts.pop())]


def _note_gaps(checkpoint: Checkpoint, path: Path, optimizers: Sequence[str]) -> None:
    """Warn of the schedulers' and random states' files that ranks should have, where others have theirs."""
    at = checkpoint.topology
    random = [f"random/tp-{tp}-of-{at.tp}_dp-{dp}-of-{at.dp}_pp-{pp}-of-{at.pp}.pt"
              for tp, dp, pp in product(range(at.tp), range(at.dp), range(at.pp))]  # fmt: skip
    schedulers = [f"lr_scheduler/lr_{re.sub('_dp-[0-9]+-of-[0-9]+', '', name).replace('optimizer', 'scheduler')}"
                  for name in optimizers]  # fmt: skip
    there = {Path(one.path) for one in checkpoint.files}
    gone = [
        name
        for name in dict.fromkeys(schedulers + random)
        if path / name not in there and (path / name).parent.is_dir()
    ]
    if gone:
        checkpoint.warnings.append(f"{listed(gone)}: missing, although other ranks' files exist: was it lost?")


def _groups(checkpoint: Checkpoint, ranks: Sequence[Rank]) -> None:
    """Give the checkpoint its param groups: nanotron makes one for each parameter, those that say the same are one."""
    groups: dict[bytes, tuple[dict[str, Any], dict[str, None]]] = {}
    digests = Digests()
    for rank in ranks:
        for group in rank.groups:
            said = without(group, "params")
            members = groups.setdefault(digests.of(said), (said, {}))[1]
            members |= {rank.names[number]: None for number in group["params"] if number in rank.names}
    steps: dict[str, object] = {}
    for rank in ranks:
        found = {name: value for name, key, value in rank.values if key == "step" and name not in steps}
        steps |= scalars_in(found, rank.file.path)
    for index, (said, members) in enumerate(groups.values()):
        for name in members:
            if name not in checkpoint.parameters:
                raise LayoutError(f"param groups have {name}, which the model lacks", path=checkpoint.source)
            checkpoint.parameters[name].group = index
        common = shared_values([{"step": steps[name]} for name in members if name in steps])
        checkpoint.param_groups.append(ParamGroup(said, [*members], common))
