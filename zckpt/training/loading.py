"""`load`: whatever checkpoint there is, into what is being trained; each rank reads the bytes of its own share.

Of weights that all ranks have whole, one rank can read each and send it to the others.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zckpt.engine.checking import Checks, watching
from zckpt.engine.tensors import TensorRead, check_tensors, read_tensors, slot_like
from zckpt.errors import UsageError, as_called, listed, shown
from zckpt.formats.native.files import headers_shared
from zckpt.immutable import mutable
from zckpt.naming import Config, MapSource, Naming
from zckpt.operations.places import at_path, place_of
from zckpt.optim.files import open_for
from zckpt.optim.ranks import ALONE, Place, Ranks, check_together, find_checksums
from zckpt.optim.states.by_parameter import Asked, OptimizerState, Source, owner_of
from zckpt.optim.states.several import Given, process_group_of, workers_of
from zckpt.optim.tensors import Model, Stateful, model_state, parts_of, share_of, takers_of_extra, unwrapped
from zckpt.optim.values import refuse_lossy
from zckpt.state import MASTER, WEIGHT, Brief, Checkpoint, Extent, Parameter, Slot
from zckpt.training.live import Live, TpRules, everywhere_of, slices_of
from zckpt.training.other_state import OtherState, read_other_state

SPOILED = "weights are in part the checkpoint's and must not be used: load a sound checkpoint, or make another model"
"""What has become of a model when reading fails, though all was there when it was checked."""

LEFT_OVER = "model and optimizer are the checkpoint's already; a scheduler, a grad scaler or a module is not"


@mutable
class Restored(Brief):
    """What a checkpoint had, and what was restored.

    Parameters
    ----------
    path : str
    format : str
        Of the checkpoint.
    step : int or None
        Number of steps trained.
    extra : dict
        What `save` got as `extra`; from other formats, the client state.
    world_size : int
        The number of ranks that saved.
    missing : list of str
        Tensors of the model that the checkpoint lacks; they keep their values.
    unexpected : list of str
        Tensors of the checkpoint that the model lacks.
    reshaped : list of str
        Tensors with another shape in the checkpoint; they keep their values.
    notes : list of str
        What else was not restored, and why.
    """

    path: str
    format: str
    step: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def unmatched(self) -> list[tuple[str, list[str]]]:
        """Return what to say of tensors that only one side has, or the other in another shape, and their names."""
        said = (
            ("the checkpoint has no", self.missing),
            ("the model has no", self.unexpected),
            ("another shape has", self.reshaped),
        )
        return [(what, names) for what, names in said if names]


def load(
    path: str | os.PathLike[str],
    *,
    model: Model = None,
    optimizer: Given = None,
    scheduler: Stateful | None = None,
    grad_scaler: Stateful | None = None,
    strict: bool = True,
    broadcast: bool = False,
    random_states: bool = True,
    tag: str | None = None,
    names: Sequence[str] | None = None,
    rename: Sequence[tuple[str, str]] = (),
    strip_prefix: str | None = None,
    add_prefix: str | None = None,
    map: MapSource | None = None,  # noqa: A002
    map_config: Config | None = None,
    dequantize: bool = False,
    tp_rules: TpRules = None,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Restored:
    """Load a checkpoint of any format into a live model and optimizer; all ranks call it together.

    Parameters are found by name. A rank reads only what it needs: its share of sharded tensors and state, and all of
    what it holds whole. Elements are rounded if types differ.

    Parameters
    ----------
    path : path-like
        A path or a URL; from a store, each rank reads what it needs.
    model : Module, or list of them, optional
        As for `save`; it can be in other parts than were saved, or whole.
    optimizer : Optimizer, or list or mapping of them, optional
        Any of zckpt's or torch's, created for this model; its hyperparameters become the checkpoint's. If several were
        saved, give as many, under the same names.
    scheduler, grad_scaler : optional
        Their saved state, if any, is passed to `load_state_dict`.
    strict : bool
        Raise if the model and the checkpoint do not have the same tensors with the same shapes.
    broadcast : bool
        Let one rank read what all ranks hold whole, and send it to the others: for a file system that is slower than
        the network.
    random_states : bool
        Restore the random states of the rank with the same number, if the checkpoint has them.
    tag : str, optional
        Which checkpoint of a run directory.
    names : sequence of str, optional
        Names of the saved optimizer's parameters in its order, for files that only number them. Default: the order of
        `optimizer`, as in torch.
    rename, strip_prefix, add_prefix, map, map_config
        As for `consolidate`: names and arrangement of the checkpoint's tensors in this model. The optimizer's state
        follows.
    dequantize : bool
        Load low-bit weights as the floats that they stand for, and quantised optimizer state (bitsandbytes' 8-bit;
        torchao's 8-bit, 4-bit and fp8) as floats, under torch's names for Adam.
    tp_rules : path-like or mapping, optional
        As for `save`: how this rank's slices are cut from the checkpoint's parameters, at any degree.
    verify : bool
        Compare ranks' files with each other, and what is read with the checksums in the files: optimizer state before
        anything is changed, weights before the optimizer is changed. Ranks combine checksums of what they read in
        parts.
    process_group : ProcessGroup, optional
        The ranks that load. Default: the optimizer's, or the whole world (also for slices).

    Returns
    -------
    Restored

    Raises
    ------
    UsageError
        The checkpoint is for another model; nothing has been changed.
    SourceError
        It cannot be read, or is damaged: on all ranks, if on one. Nothing has been changed, unless the message says
        that weights must not be used: then weight bytes were damaged, or a file failed after all ranks had checked it.
    """
    is_remote = workers_of(optimizer) is not None
    ranks = Ranks(process_group or process_group_of(optimizer), purpose=ALONE if is_remote else "")
    place = place_of(path)
    naming = Naming(rename=rename, strip_prefix=strip_prefix, add_prefix=add_prefix, map=map, map_config=map_config)
    asked = Asked(tag, names, strict, naming, dequantize)
    if is_remote and (naming.changes or dequantize):
        raise UsageError(
            "the workers of a DistributedOptimizer read their state unchanged, by the names in the files",
            path=path,
            advice="`zckpt convert` writes the checkpoint with other names, and with floats",
        )
    if is_remote and isinstance(place, str):
        raise UsageError(
            "a DistributedOptimizer can only be loaded from a file system",
            path=place,
            advice="copy the checkpoint to one",
        )

    def prepared() -> None:
        loading.open(asked, verify=verify)
        if model is not None:
            loading.match()
        loading.states = loading.live.optimizers.restore(loading.source, loading.everywhere.optimizers)
        of_rank = ranks.rank if random_states else None
        loading.prepare(loading.read_others(scheduler, grad_scaler, of_rank))

    with ExitStack() as stack:
        loading = _Loading(stack, ranks, place, model, optimizer, tp_rules, broadcast=broadcast)
        ranks.do(prepared)
        torn = loading.torn(broadcast=broadcast)  # tensors that differ and are one here
        if torn and strict:
            raise UsageError(torn[0], path=loading.report.path, advice="untie them, or strict=False leaves it out")
        loading.report.notes += [f"left out: {what}" for what in torn]
        if broadcast:
            loading.check_alike()
        with torch.no_grad():
            ranks.do(lambda: loading.each("read"))
            loading.check_sums()
            ranks.do(lambda: loading.read_weights(broadcast=broadcast), spoiled=SPOILED)
        loading.check_sums(spoiled=SPOILED)
        for step in ("take", "share"):
            ranks.do(partial(loading.each, step), spoiled=SPOILED)
        ranks.do(lambda: loading.other.restore(model), spoiled=LEFT_OVER)
        ranks.do(loading.note_lost, spoiled=LEFT_OVER)
        ranks.do(stack.close, spoiled=SPOILED)
    return loading.reported()


class Meeting:
    """What is live, and a checkpoint that is opened for it by all ranks together. Nothing is changed.

    `path`: what is read, mounted as long as the stack is open; `source`: what of it all optimizers take; `found`: what
    it has of the model's tensors.
    """

    source: Source
    report: Restored
    found: Mapping[str, Parameter] = {}
    may_lack = False
    """Whether the checkpoint need not have what an optimizer alone has, and no model."""

    def __init__(
        self, stack: ExitStack, ranks: Ranks, place: Place, model: Model, optimizer: Given, tp_rules: TpRules,
        *, broadcast: bool = False,
    ) -> None:  # fmt: skip
        self.ranks, self.checks = ranks, Checks()
        stack.enter_context(watching(self.checks))
        self.path = ranks.do(lambda: stack.enter_context(at_path(place)))
        self.slices = slices_of(ranks, tp_rules, optimizer)
        self.live = ranks.do(lambda: Live.of(model, optimizer, self.slices))
        self.everywhere = everywhere_of(self.live, ranks, broadcast=broadcast)

    @property
    def known(self) -> Sequence[str]:
        """The names of the model's tensors, on all ranks."""
        return self.everywhere.tensors or (*self.live.tensors.tensors, *self.live.tensors.tied)

    def open(self, asked: Asked, *, verify: bool) -> None:
        """Open the checkpoint under the names of what is live, on this rank."""
        order, notes = self.live.optimizers.order, list[str]()
        with headers_shared(self.ranks.rank, self.ranks.world_size):
            found = open_for(
                self.path, self.known, order, asked, self.live.tensors.tied, model=self.live.model, notes=notes
            )
            if verify:
                find_checksums(self.checks, found, self.ranks, of_optimizer=bool(self.live.optimizers.states))
            if self.slices is not None:
                self.slices.cut(found, [*self.known, *(name for its in order for name in its)])
        path = os.fspath(self.path)
        self.source = Source.of(found, path, asked, self.everywhere.parameters)
        self.report = Restored(path, found.format, found.step, world_size=found.world_size, notes=notes)

    def matched(self) -> dict[str, Parameter]:
        """Return the checkpoint's tensor for each of the model's, and note in the report what has none."""
        live, checkpoint, report = self.live, self.source.checkpoint, self.report
        model = unwrapped(live.model) if isinstance(live.model, torch.nn.Module) else None
        computed = getattr(model, "_keys_to_ignore_on_save", None) or ()  # by a model of transformers, for itself
        found: dict[str, Parameter] = {}
        for name, tensor in live.tensors.tensors.items():
            there = name in checkpoint.parameters or name in checkpoint.buffers
            its = checkpoint.owner(name) if there else None
            if its is None or not its.slots.keys() & {WEIGHT, MASTER}:
                if self.may_lack and name in live.tensors.added:
                    report.notes.append(f"not changed: {name}, which the optimizer alone has")
                elif name not in computed or tensor.requires_grad:
                    report.missing.append(name)
            elif its.shape != tuple(tensor.shape):
                report.reshaped.append(name)
            else:
                found[name] = its
        aliases = untied(checkpoint, live.tensors.tied)
        report.reshaped += [name for name, _, its, one in aliases if its.shape != one.shape]
        ours = {*self.known, *live.tensors.extra}
        report.unexpected = [name for name in checkpoint.names if name not in ours]
        return found

    def firsts(self) -> dict[str, str]:
        """Return further names of tensors that have several here, with the first of each."""
        live, firsts = self.live.tensors, dict[int, str]()
        every = {name: firsts.setdefault(id(one), name) for name, one in live.tensors.items()}  # buffers, too
        return {name: first for name, first in every.items() if name != first} | live.tied

    def torn(self, *, broadcast: bool = False) -> list[str]:
        """Return what `differing` says of them on some rank; with `broadcast`, one compares what all have whole.

        All ranks call it together.
        """

        def held(name: str) -> tuple[Extent, torch.dtype] | None:
            share = share_of(self.live.tensors.tensors[name], name)
            if share is None or (broadcast and share.ranks is None and self.ranks.rank != 0):
                return None
            return share.extent, share.tensor.dtype

        here = self.ranks.do(lambda: list(differing(self.source.checkpoint, self.firsts(), held)))
        return list(dict.fromkeys(chain(*self.ranks.gather_all(here))))

    def read_others(
        self, scheduler: Stateful | None, grad_scaler: Stateful | None, rank: int | None, *, made: bool = True
    ) -> OtherState:
        """Read what the checkpoint has besides the model's tensors and the optimizers."""
        kept = self.live.tensors.extra
        return read_other_state(self.source.checkpoint, scheduler, grad_scaler, rank, kept, made=made)

    def check_sums(self, *, spoiled: str | None = None) -> None:
        """Hold what all ranks have read against the checksums of the files; see `check_together`."""
        check_together(self.checks, self.ranks, os.fspath(self.path), spoiled=spoiled)

    def reported(self) -> Restored:
        """Return the report as the user is to see it."""
        self.report.path = shown(self.report.path)
        self.report.notes = [shown(as_called(note)) for note in self.report.notes]
        return self.report


class _Loading(Meeting):
    """One checkpoint on its way into one model and its optimizers. Until something is read, nothing is changed."""

    states: Sequence[OptimizerState]
    other: OtherState
    may_lack = True

    def match(self) -> None:
        """Find the checkpoint's tensor for each of the model's, and note what has none."""
        self.found = self.matched()
        for what, names in self.report.unmatched():
            if self.source.asked.strict:
                several = listed(self.source.checkpoint.models())
                raise UsageError(
                    f"not a checkpoint of this model: {what} {listed(names)}",
                    path=self.report.path,
                    advice=f"give one module, such as an nn.ModuleDict, that has all models in it: {several}"
                    if several
                    else "give the model that was saved, or strict=False",
                )

    def prepare(self, other: OtherState) -> None:
        """Find out what is to be read, and check all that can be known of it before."""
        self.other, self.report.extra = other, other.extra
        self.report.notes += [
            *self.live.optimizers.notes, *(note for one in self.states for note in one.notes),
            *other.missing, *other.notes,
        ]  # fmt: skip
        if self.live.model is not None and not self.everywhere.tensors:  # else other ranks have more modules
            takers = {key for part in parts_of(self.live.model) for key, _ in takers_of_extra(part)}
            if strange := sorted(other.modules.keys() - takers):
                self.report.notes.append(f"left out: {listed(strange)}, which no module of the model takes")
        held = {key for key, value in self.live.tensors.extra.items() if value is not None}
        if lacking := sorted(held - other.modules.keys()):
            self.report.notes.append(f"not changed: {listed(lacking)}, of which the checkpoint has nothing")
        for note in other.missing:
            warnings.warn(f"{shown(self.report.path)}: {note}", stacklevel=3)
        made_of_masters = {name for one in self.states for name in one.publishes}
        self.replicated: list[TensorRead] = []
        self.sharded: list[TensorRead] = []
        firsts = self.firsts()
        for name, its in self.found.items():
            if firsts.get(name) in self.found:  # which is read, into the same memory
                continue
            tensor = self.live.tensors.tensors[name]
            share = None if name in made_of_masters else share_of(tensor, name)
            if share is not None and share.tensor.numel():
                read = TensorRead(weight_like(its, tensor.dtype), share.extent, share.tensor, name)
                (self.replicated if share.ranks is None else self.sharded).append(read)
        reads = [*self.replicated, *self.sharded]
        advice = "dequantize=True loads the numbers; or load a model in these types, with scales"
        refuse_lossy(self.source.checkpoint, reads, advice)
        check_tensors(reads)
        self.each("check")

    def each(self, step: str) -> None:
        """Take a step of all optimizers' states."""
        for one in self.states:
            getattr(one, step)()

    def check_alike(self) -> None:
        """Refuse to read for all ranks what some have otherwise, such as tied. All ranks call it together."""
        ours = [f"{one.tensor.dtype} {one.name} {list(one.tensor.shape)}" for one in self.replicated]
        firsts = self.ranks.from_first(ours)

        def compare() -> None:
            for mine, its in zip_longest(ours, firsts, fillvalue="nothing more"):
                if mine != its:
                    raise UsageError(
                        "broadcast only applies to a model that all ranks have alike",
                        path=self.report.path, expected=its, found=mine, advice="omit it",
                    )  # fmt: skip

        self.ranks.do(compare)

    def read_weights(self, *, broadcast: bool) -> None:
        """Read weights into the model: what all ranks read alike, and this rank's shares of what is sharded."""
        if broadcast and self.ranks.world_size > 1:
            ranks = self.ranks
            for turn in _rounds(self.replicated, ranks.world_size):  # the same on all ranks
                ranks.do(partial(read_tensors, [one for reader, one in turn if reader == ranks.rank]))
                for reader, one in turn:
                    there = one.tensor.contiguous()
                    dist.broadcast(there, src=ranks.members[reader], group=ranks.given or dist.group.WORLD)
                    if there is not one.tensor:
                        one.tensor.copy_(there)
            self.replicated = []
        read_tensors([*self.replicated, *self.sharded])
        for name, copy in self.live.tensors.copies:  # buffers of further parts of the model
            source = self.live.tensors.tensors[name]
            if isinstance(source, torch.Tensor):
                copy.copy_(source)

    def note_lost(self) -> None:
        """Note what a state dict has that is not the model's own memory, and that it has otherwise than it was read."""
        own = {id(one) for part in parts_of(self.live.model) for one in chain(part.parameters(), part.buffers())}
        every = ((name, self.live.tensors.tensors[name]) for name in self.found)
        made = {name: one for name, one in every if isinstance(one, torch.Tensor) and id(one) not in own}
        now: dict[str, Any] = model_state(self.live.model).tensors if made else {}
        if lost := [name for name, one in made.items() if name in now and _differ(now[name], one)]:
            self.report.notes.append(f"not changed: {listed(lost)}, which state_dict() makes anew")


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return False
    if isinstance(one, DTensor) or one.shape != other.shape:
        return True
    return not bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124  # NaN is no other NaN


def untied(checkpoint: Checkpoint, same: Mapping[str, str]) -> Iterator[tuple[str, str, Parameter, Parameter]]:
    """Yield names of one tensor that is two in a checkpoint, and what that has under both."""
    for alias, name in same.items():
        its, one = (owner_of(checkpoint, key) for key in (alias, name))
        if its and one and its is not one and all(both.slots.keys() & {WEIGHT, MASTER} for both in (its, one)):
            yield alias, name, its, one


def differing(
    checkpoint: Checkpoint, same: Mapping[str, str], held: Callable[[str], tuple[Extent, torch.dtype] | None]
) -> Iterator[str]:
    """Yield what to say of two tensors that are one here, if neither is the other, rounded.

    `same`: further names here, with the first of each; `held`: returns what of one is compared, and its type.
    """
    for alias, name, *both in untied(checkpoint, same):
        its = held(name)
        if its is None or both[0].shape != both[1].shape:
            continue
        slots = [weight_like(one, its[1]) for one in both]
        if not all(_are_alike(slots, part, its[1]) for part in _cut(its[0])):
            yield f"{alias} is the same tensor as {name} here, but not in the checkpoint"


def weight_like(parameter: Parameter, dtype: torch.dtype) -> Slot:
    """Return the slot that a weight of an element type is read from: one of the type, or the most exact."""
    return slot_like([parameter.slots[name] for name in (WEIGHT, MASTER) if name in parameter.slots], dtype)


TOGETHER_NUMEL = 1 << 22
"""Elements of two tensors that are compared at once."""


def _cut(extent: Extent) -> Iterator[Extent]:
    for at in range(0, extent.numel, TOGETHER_NUMEL):
        yield replace(extent, start=extent.start + at, numel=min(TOGETHER_NUMEL, extent.numel - at))


def _are_alike(slots: Sequence[Slot], extent: Extent, dtype: torch.dtype) -> bool:
    """Tell whether two slots have the same bits there, in an element type, or where one is rounded to the other's."""
    types = {getattr(torch, slot.dtype) for slot in slots}
    are_floats = all(one.is_floating_point for one in (dtype, *types))
    if len(types) > 1 and not are_floats:
        return False
    compared = types if not are_floats else {dtype} if len(types) == 1 else {dtype, *types}
    for one in compared:
        room = [torch.empty(extent.numel, dtype=one, device="cpu") for _ in slots]
        read_tensors([TensorRead(slot, extent, its) for slot, its in zip(slots, room, strict=True)])
        if torch.equal(*(its.view(torch.uint8) for its in room)):
            return True
    return False


ROUND_NBYTES = 64 << 20
"""Read by each rank before all of it is sent: what a rank needs besides the weights."""


def _rounds(reads: Sequence[TensorRead], world_size: int) -> Iterator[list[tuple[int, TensorRead]]]:
    """Yield who reads what; in each round every rank reads about as much."""
    turn: list[tuple[int, TensorRead]] = []
    loads = [0] * world_size
    for one in reads:
        reader = loads.index(min(loads))
        turn.append((reader, one))
        loads[reader] += one.tensor.nbytes
        if min(loads) >= ROUND_NBYTES:
            yield turn
            turn, loads = [], [0] * world_size
    if turn:
        yield turn
