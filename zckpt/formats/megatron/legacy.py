"""The legacy files of Megatron-LM and Megatron-Core as a Checkpoint: the model as one rank has it, with its optimizer.

RUN/latest_checkpointed_iteration.txt
RUN/iter_0000004/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     {"model": ..., "optimizer": ..., "args": ..., ...}
                                        distrib_optim.pt       of the distributed optimizer

Slices of tensor-parallel ranks are spans of the whole. What several ranks have whole (norms, what is no expert on
expert-parallel ranks, an embedding that the last stage keeps as its output layer) is read from the first, and the rest
are copies of it.

ranks    which ranks there are, and names
local    a rank's optimizer
cut      how ranks' slices make up a parameter

Source: megatron-core 0.16, Megatron-LM's `checkpointing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zckpt.codes import MISSING_FILE
from zckpt.errors import LayoutError, ShardError, UnsupportedError, about
from zckpt.formats.megatron.buckets import bucket_numels
from zckpt.formats.megatron.cut import CURRENT, KEPT, PARTNER, Cut, cut_of, joined, reordered, splits_of
from zckpt.formats.megatron.directory import FORMAT, OPTIMIZER_FILE
from zckpt.formats.megatron.fused import is_fused, name_of_one
from zckpt.formats.megatron.legacy_target import BOUNDS, CHUNKS, EXPERTS, FUSED, ORDER
from zckpt.formats.megatron.local import (
    GROUPS,
    MASTERS,
    OPTIMIZER,
    Part,
    attach_distributed,
    attach_plain,
    partitions,
    parts_of,
)
from zckpt.formats.megatron.names import BUFFERS, in_order
from zckpt.formats.megatron.objects import Common, topology_of
from zckpt.formats.megatron.optimizer import attach
from zckpt.formats.megatron.own import add_absent, read_own, restore_own, trim
from zckpt.formats.megatron.ranks import Numbering, RankFile, is_weight, read_ranks
from zckpt.formats.megatron.stages import BLOCK
from zckpt.formats.megatron.wholes import FURTHER, TIED, Whole, gather, label_of
from zckpt.formats.torch_files.tensors import carried, describe, slot_of
from zckpt.state import WEIGHT, Checkpoint, Duplicate, Parameter, ParamGroup, Slot, SourceFile
from zckpt.state.dtypes import is_floating
from zckpt.state.inventory import COPY, IMPLIED, REST, Claim, Rule
from zckpt.storage.files import is_file
from zckpt.torchfile import Digests, Tensor, read_torchfile, walk_tensors

UNTIED = "untie_embeddings_and_output_weights"

VERSION = "checkpoint_version"

SAME = "as in the first rank's file"


def read(directory: Path, tracker: Path | None = None) -> Checkpoint:
    """Read the structure of a directory; of a distributed optimizer, also its masters and the weights.

    Raises
    ------
    SourceError
        Files are missing or damaged, contradict each other, or hold what is not known for certain.
    """
    own = read_own(directory)
    ranks = read_ranks(directory, {} if own is None else own.ranks)
    checkpoint = Checkpoint(str(directory), FORMAT, "legacy")
    if tracker is not None:
        checkpoint.claims[str(tracker)] = Claim(IMPLIED, "which checkpoint of the run is the newest")
    numbering = Numbering(ranks)
    wholes: dict[str, Whole] = {}
    locals_, fused, expert_ranks = [], False, 1 + max(one.rank.ep for one in ranks)
    for one in ranks:
        with about(one.file.path):
            names = [dict(numbering.names(one, chunk)) for chunk in range(len(one.chunks))]
            local = _local(one, names)
            locals_.append(local)
            tied = one.arguments.get(UNTIED) is False or (own is not None and own.ranks.get("tied") == 1)
            fused |= gather(wholes, one, names, local.checkpoint, local.said, tied=tied, expert_ranks=expert_ranks)
    first = ranks[0]
    _check_groups(locals_, ranks)
    tensor_ranks = 1 + max(one.rank.tp for one in ranks)
    for whole in wholes.values():
        whole.given = own.names.get(whole.name, whole.name) if own is not None else whole.name
    _add(checkpoint, wholes, tensor_ranks, first)
    _settle_order(checkpoint, wholes, [its for one in ranks for its in _sequences(one, numbering)])
    common = Common(first.file, {str(key): value for key, value in first.content.items() if key not in first.keys})
    _add_groups(checkpoint, locals_[0], common, own.groups if own is not None else None)
    _carry(checkpoint, ranks, locals_)
    if any(local.more for local in locals_):
        checkpoint.details["optimizer sharding"] = OPTIMIZER_FILE
    checkpoint.padding_spans += [spans for local in locals_ for spans in local.checkpoint.padding_spans]
    checkpoint.topology, checkpoint.world_size = topology_of(common, checkpoint)
    kinds = {kind: 1 + max(getattr(one.rank, kind) for one in ranks) for kind in ("tp", "pp", "ep")}
    checkpoint.topology = replace(checkpoint.topology, **kinds)
    _add_stages(checkpoint, numbering, len(first.chunks))
    if fused:
        checkpoint.details[EXPERTS] = FUSED
    checkpoint.step = common.step
    if own is not None:
        trim(checkpoint, own)
        add_absent(checkpoint, own)
        restore_own(checkpoint, own)
    return checkpoint


def _sequences(one: RankFile, numbering: Numbering) -> Iterator[list[str]]:
    """Yield the names of each chunk of a rank's model in its order, of experts in one parameter the first's."""
    for chunk in range(len(one.chunks)):
        every = (renamed for _, renamed in numbering.names(one, chunk))
        yield [name_of_one(name, 0) if is_fused(name) else name for name in every]


def _settle_order(checkpoint: Checkpoint, wholes: Mapping[str, Whole], sequences: Sequence[Sequence[str]]) -> None:
    """Have parameters in the order in which the module has them, or say that it is not known.

    That of GPT's layers is known; another model has the order that its file has, where one file has all of it.
    """
    given = [[wholes[name].given for name in its if name in wholes] for its in sequences]
    given = [[name for name in its if name in checkpoint.parameters] for its in given]
    places = {name: at for at, name in enumerate(checkpoint.parameters)}
    if all([places[name] for name in its] == sorted(places[name] for name in its) for its in given):
        return
    whole = next((its for its in given if set(its) == checkpoint.parameters.keys()), None)
    if whole is None:
        checkpoint.details[ORDER] = "not known: that of each rank is not the one of GPT's layers"
        return
    checkpoint.parameters = {name: checkpoint.parameters[name] for name in whole}


def _add_stages(checkpoint: Checkpoint, numbering: Numbering, chunks: int) -> None:
    """Say how layers are dealt to stages, where there are several."""
    fronts = [front for front in numbering.fronts() if BLOCK.fullmatch(front)]
    if checkpoint.topology.pp > 1 and len(fronts) == 1:
        checkpoint.details[BOUNDS] = ",".join(map(str, numbering.bounds(fronts[0])))
    if chunks > 1:
        checkpoint.details[CHUNKS] = chunks


@dataclass(slots=True)
class Local:
    """A rank's own model and optimizer, by its own names.

    Parameters
    ----------
    checkpoint : Checkpoint
    parts : list of Part
        Its optimizers.
    plain : bool
        Whether the param groups have parameters.
    rules : list of Rule
        Of the rank's file.
    more : list of SourceFile
        Its other files.
    said : dict of str to int or None
        Along which dimension masters say that a parameter is cut.
    """

    checkpoint: Checkpoint
    parts: list[Part]
    plain: bool
    rules: list[Rule]
    more: list[SourceFile]
    said: dict[str, int | None]


def _local(one: RankFile, names: Sequence[Mapping[str, str]]) -> Local:
    """Return what a rank has. Names of chunks begin with the number of the chunk, where there are several."""
    path = one.file.path
    own = Checkpoint(path, FORMAT)
    chunks: list[list[str]] = []
    shared: list[str] = []
    rules = []
    # The copy of an embedding for further tokens has its own name; the output layer beside it is shared with none.
    further = any(FURTHER.match(name) for chunk in one.chunks for name in chunk)
    for at, chunk in enumerate(one.chunks):
        chunks.append([])
        for name, value in chunk.items():
            if not isinstance(value, Tensor) or not is_weight(name, value):
                continue
            label = label_of(at, name)
            slot = slot_of(WEIGHT, value, path)
            if _is_buffer(name, value):
                own.buffers[label] = Parameter(label, value.shape, value.dtype, {WEIGHT: slot})
                continue
            own.parameters[label] = Parameter(label, value.shape, value.dtype, {WEIGHT: slot})
            chunks[-1].append(label)
            whole = names[at][name]
            if whole in TIED.values() or (whole in TIED and not further):
                shared.append(label)
        rules += [Rule((one.keys[at], REST), IMPLIED, "modules that keep no state of their own")]
    parts = parts_of(one.content[OPTIMIZER]) if one.content.get(OPTIMIZER) else []
    plain = bool(parts) and all(part.is_plain for part in parts)
    more = []
    flat = one.rank.path / OPTIMIZER_FILE
    if plain:
        rules += attach_plain(own, parts, path)
    elif parts and is_file(flat):
        file = read_torchfile(flat)
        sizes = bucket_numels(one.arguments)
        found = attach_distributed(own, chunks, file, shared, sizes)
        more.append(describe(file, "optimizer", mp_rank=one.rank.tp, rules=found))
    elif parts:
        raise ShardError(
            "has no file of the distributed optimizer's state",
            path=one.rank.path,
            expected=OPTIMIZER_FILE,
            advice="the save did not finish, or the file was not copied",
            code=MISSING_FILE,
        )
    return Local(own, parts, plain, rules, more, partitions(own, parts))


def _is_buffer(name: str, tensor: Tensor | Parameter) -> bool:
    return not is_floating(tensor.dtype) or BUFFERS.fullmatch(name) is not None


def _add(checkpoint: Checkpoint, wholes: Mapping[str, Whole], ranks: int, first: RankFile) -> None:
    """Put the whole model's parameters together."""
    trained = any(len(p.slots) > 1 for one in wholes.values() for its in one.copies.values() for p in its.values())
    for name in in_order(wholes):
        one = wholes[name]
        sample = next(iter(next(iter(one.copies.values())).values()))
        spans, is_buffer = sample.slots[WEIGHT].spans, _is_buffer(name, sample)
        with about(spans[0].path if spans else first.file.path):
            whole = _together(checkpoint, one, wholes, ranks, first, is_buffer=is_buffer)
        whole.frozen = trained and not is_buffer and len(whole.slots) == 1
        (checkpoint.buffers if is_buffer else checkpoint.parameters)[whole.name] = whole


def _together(
    checkpoint: Checkpoint, one: Whole, wholes: Mapping[str, Whole], ranks: int, first: RankFile, *, is_buffer: bool
) -> Parameter:
    """Return a parameter from the slices and copies that ranks have of it; copies are noted."""
    for copy in one.copies.values():
        if len(copy) != ranks:
            raise LayoutError(f"{one.name} is not on all tensor-parallel ranks", expected=f"{ranks} ranks",
                              found=len(copy))  # fmt: skip
    shape, kind, rule = next(iter(one.copies.values()))[0].shape, "buffer" if is_buffer else "parameter", KEPT
    if ranks > 1 and not is_buffer:
        rule = cut_of(one.name, shape, gated=_gated(one, wholes, first))
        if one.said is not None and one.said != rule.dimension:
            raise LayoutError(f"the masters of {one.name} say that it is cut another way",
                              expected=f"dimension {rule.dimension}", found=one.said)  # fmt: skip
    found: dict[str, Slot] = {}
    group = None
    state: dict[str, object] = {}
    for copy in one.copies.values():
        parameters = [copy[rank] for rank in range(ranks)]
        group = parameters[0].group if group is None else group
        state = state or parameters[0].state
        for key in parameters[0].slots:
            slots = [p.slots.get(key) for p in parameters]
            own = [slot for slot in slots if slot is not None]
            if len(own) != ranks:
                raise LayoutError(f"{key} of {one.name} is not on all tensor-parallel ranks")
            its = own[0].shape
            if its != shape and own[0].numel != 1 and ranks > 1:
                raise UnsupportedError(f"{key} of {one.name} has not the shape of its weight, and is cut",
                                       expected=shape, found=its)  # fmt: skip
            cut = rule if its == shape else KEPT
            whole = _whole(one.name, own, cut, first)
            original = found.setdefault(key, whole)
            if original is not whole:
                _note_copy(checkpoint, kind, one.given, whole, original, None)
            if cut.dimension is None:
                for rank, slot in enumerate(own[1:], 1):
                    _note_copy(checkpoint, kind, one.given, slot, whole, rank)
    weight = found[WEIGHT]
    return Parameter(one.given, weight.shape, weight.dtype, found, group, state=state)


def _note_copy(checkpoint: Checkpoint, kind: str, name: str, slot: Slot, original: Slot, rank: int | None) -> None:
    if (slot.shape, slot.dtype) != (original.shape, original.dtype):
        raise LayoutError(f"ranks have copies of {name} that differ",
                          expected=f"{original.dtype} {original.shape}",
                          found=f"{slot.dtype} {slot.shape}")  # fmt: skip
    if slot.numel:
        checkpoint.duplicates.append(Duplicate(kind, name, name, slot, original, rank))


def _whole(name: str, slots: Sequence[Slot], cut: Cut, first: RankFile) -> Slot:
    version, splits = first.content.get(VERSION, 0), splits_of(name)
    if splits is None or not isinstance(version, (int, float)) or version >= CURRENT or not slots[0].shape:
        return joined(name, slots, cut)
    heads = first.arguments.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        raise UnsupportedError(f"the order of the rows of {name} is not known",
                               expected="num_attention_heads in the arguments")  # fmt: skip
    return reordered(name, slots, splits, heads, float(version))


def _gated(one: Whole, wholes: Mapping[str, Whole], first: RankFile) -> bool | None:
    """Tell whether a first layer of two has two halves: as many rows as its partner has columns, or twice as many."""
    module = next((module for module in PARTNER if f".{module}." in one.name), None)
    if module is None:
        return None
    partner = wholes.get(one.name.replace(f".{module}.", f".{PARTNER[module]}.").replace(".bias", ".weight"))
    mine = next(iter(one.copies.values()))[0].shape
    if partner is None:
        said = first.arguments.get("swiglu")
        return said if isinstance(said, bool) else None
    its = next(iter(partner.copies.values()))[0].shape
    if len(its) == 2 and mine and mine[0] in (its[1], 2 * its[1]):
        return mine[0] == 2 * its[1]
    raise LayoutError(f"{one.name} does not fit {partner.name}",
                      expected=f"{its[-1]} rows, or twice as many", found=mine)  # fmt: skip


def _check_groups(every: Sequence[Local], ranks: Sequence[RankFile]) -> None:
    """Raise ShardError where ranks' optimizers differ in anything but their parameters."""
    first = [(group.hyperparameters, group.state) for group in every[0].checkpoint.param_groups]
    for local, one in zip(every[1:], ranks[1:], strict=True):
        own = [(group.hyperparameters, group.state) for group in local.checkpoint.param_groups]
        if len(own) != len(first) or any(repr(a[0]) != repr(b[0]) for a, b in zip(own, first, strict=True)):
            raise ShardError(f"has other param groups than {ranks[0].rank.path.name}", path=one.file.path,
                             advice="the files may be of two steps or runs")  # fmt: skip


def _add_groups(checkpoint: Checkpoint, local: Local, common: Common, members: Sequence[Sequence[str]] | None) -> None:
    """Give the checkpoint its param groups, and what else the first rank's file holds."""
    if not local.plain:
        attach(checkpoint, common, members)
        checkpoint.files.clear()
        return
    for number, group in enumerate(local.checkpoint.param_groups):
        its = [p.name for p in checkpoint.parameters.values() if p.group == number]
        checkpoint.param_groups.append(ParamGroup(group.hyperparameters, its, group.state))
    attach(checkpoint, Common(common.file, {key: value for key, value in common.content.items() if key != OPTIMIZER}))
    checkpoint.files.clear()
    for part in local.parts:
        for key, value in (part.outer or {}).items():
            if key not in (OPTIMIZER, MASTERS):
                checkpoint.optimizer_metadata[str(key)] = carried(common.file, value)


def _carry(checkpoint: Checkpoint, ranks: Sequence[RankFile], every: Sequence[Local]) -> None:
    """Describe the files, and keep what only some rank's file says, under the name of its directory."""
    first, digests = ranks[0], Digests()
    for one, local in zip(ranks, every, strict=True):
        rules = list(local.rules)
        for chunk, names in enumerate(one.chunks):
            for name, value in names.items():
                if not is_weight(name, value) and value is not None:
                    checkpoint.metadata[f"{one.rank.path.name}.{label_of(chunk, name)}"] = carried(one.file, value)
        for part in local.parts:
            rules += [Rule((*part.steps, GROUPS, REST), COPY if one is not first else "state", "hyperparameters")]
            others = [str(key) for key in part.outer or {} if key not in (OPTIMIZER, MASTERS)]
            if one is not first:
                rules += [Rule((*part.outer_steps, key, REST), COPY, SAME, tensors=True) for key in others]
        for key, value in one.content.items():
            if one is first or key in (*one.keys, OPTIMIZER):
                continue
            known = first.content.get(key)
            if digests.of(known) == digests.of(value) and not any(True for _ in walk_tensors(value)):
                rules.append(Rule((str(key), REST), COPY, SAME))
            else:
                checkpoint.metadata[f"{one.rank.path.name}.{key}"] = carried(one.file, value)
        checkpoint.files.append(describe(one.file, "model", mp_rank=one.rank.tp, rules=rules))
        checkpoint.files += local.more
