"""`assert_restored`: what is being trained, held against the checkpoint that some program says it has loaded.

It asks the live objects what they have, as `save` does, and reads the same elements of the checkpoint, as `load` would;
nothing is changed. A state that is all zeros is as good as none, for that is how optimizers begin.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from zckpt.engine.tensors import TensorRead, check_tensors, dtype_name, read_tensors
from zckpt.engine.workers import batched
from zckpt.errors import NotRestoredError, UnsupportedError, UsageError, listed, shown
from zckpt.formats.torch_files.optimizer import BESIDE
from zckpt.immutable import immutable
from zckpt.naming import Config, MapSource, Naming
from zckpt.operations.places import place_of
from zckpt.optim.ranks import Ranks
from zckpt.optim.states.by_parameter import Asked, OptimizerState, Source, owner_of
from zckpt.optim.states.deepspeed import unpartition
from zckpt.optim.states.several import Given, process_group_of, workers_of
from zckpt.optim.tensors import Model, Share, Stateful
from zckpt.optim.values import read_numbers, refuse_lossy, value_of
from zckpt.state import MASTER, WEIGHT, Extent, Slot, by_key, number_of
from zckpt.training.live import TpRules
from zckpt.training.loading import ROUND_NBYTES, Meeting, Restored, weight_like

TOGETHER_NUMEL = 1 << 22
"""Elements that are compared at once."""

COMPARED = (type(None), bool, int, float, complex, str, bytes, np.ndarray, list, Mapping)
"""What two values must be to differ; of another class, a file does not say what it means."""


def assert_restored(
    path: str | os.PathLike[str],
    *,
    model: Model = None,
    optimizer: Given = None,
    scheduler: Stateful | None = None,
    grad_scaler: Stateful | None = None,
    strict: bool = True,
    allow_rounding: bool = False,
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
    """Compare a live model and optimizer with a checkpoint, after any program's own load; all ranks call it together.

    Compares as numbers every element of weights, buffers, masters and optimizer state, the settings of param groups,
    steps, loss scale, and the states of a scheduler and a grad scaler, at any number of ranks; each rank compares its
    own share. Random states are not compared, since they change.

    Parameters
    ----------
    path : path-like
        A checkpoint of any format, or a URL.
    model, optimizer, scheduler, grad_scaler : optional
        As for `save`; or DeepSpeed's engine and its optimizer (`engine.optimizer`). What is given is compared, and must
        be in the checkpoint.
    strict : bool
        Whether the model and the checkpoint must have the same tensors; otherwise, only common ones are compared.
    allow_rounding : bool
        Accept rounded values if an optimizer keeps state in a narrower type than the checkpoint, or lacks the
        checkpoint's masters. Weights of a model without optimizer may always be rounded.
    tag, names, rename, strip_prefix, add_prefix, map, map_config, dequantize, tp_rules, verify, process_group
        As for `load`.

    Returns
    -------
    Restored
        What the checkpoint has; `notes` say what could not be compared.

    Raises
    ------
    NotRestoredError
        Something differs; raised on all ranks, if on one, with the same `differences`.
    UsageError
        Nothing was given.
    SourceError
        The checkpoint cannot be read, or is damaged.
    """
    if any(one.__qualname__ == "DeepSpeedEngine" for one in type(model).__mro__):
        model = cast("Any", model).module
    given = (model, optimizer, scheduler, grad_scaler)
    if all(one is None for one in given):
        raise UsageError("nothing was given to compare with the checkpoint", path=path, advice="give model=")
    if workers_of(optimizer) is not None:
        raise UnsupportedError("the workers of a DistributedOptimizer cannot be compared", path=path)
    ranks = Ranks(process_group or process_group_of(optimizer))
    naming = Naming(rename=rename, strip_prefix=strip_prefix, add_prefix=add_prefix, map=map, map_config=map_config)
    asked = Asked(tag, names, strict, naming, dequantize)

    def prepared() -> None:
        held.open(asked, verify=verify)
        held.found = held.matched() if model is not None else {}
        held.hold_optimizers()
        held.hold_model()
        held.hold_others(scheduler, grad_scaler)
        held.check()

    with ExitStack() as stack:
        held = _Held(stack, ranks, place_of(path), model, optimizer, tp_rules)
        held.allow_rounding = allow_rounding
        unpartition(held.live.tensors)
        ranks.do(prepared)
        held.differences += held.torn()
        with torch.no_grad():
            ranks.do(held.compare)
        held.check_sums()
        ranks.do(stack.close)
    every = ranks.gather_all(held.differences)
    sayers = by_key((one, str(rank)) for rank, said in enumerate(every) for one in dict.fromkeys(said))
    if sayers:
        found = [
            said if len(those) == len(every) else f"{said} (on rank{'s' * (len(those) > 1)} {listed(those)})"
            for said, those in sayers.items()
        ]
        raise NotRestoredError([shown(one) for one in found], path=path)
    return held.reported()


@immutable
class _Pair:
    """Elements of a slot, and the live ones that they should be; `may_round`: to the type that these are kept in."""

    what: str
    slot: Slot
    extent: Extent
    tensor: torch.Tensor
    may_round: bool

    def read(self) -> TensorRead:
        """Return room for what the checkpoint has."""
        dtype = getattr(torch, self.slot.dtype)
        if self.may_round and dtype.is_floating_point and self.tensor.dtype.is_floating_point:
            dtype = self.tensor.dtype
        room = torch.empty(self.tensor.numel(), dtype=dtype, device="cpu")
        return TensorRead(self.slot, self.extent, room, self.what)

    def difference(self, read: torch.Tensor) -> str | None:
        """Return how the live elements differ from what has been read."""
        ours, count, first = self.tensor.detach().reshape(-1), 0, -1
        for start in range(0, read.numel(), TOGETHER_NUMEL):
            some = slice(start, start + TOGETHER_NUMEL)
            theirs, mine = read[some].to(ours.device), ours[some]
            if theirs.dtype != mine.dtype or mine.dtype.itemsize == 1:  # a type that has the values of both
                kinds = (theirs.dtype, mine.dtype)
                wide = torch.float64 if any(kind.is_floating_point for kind in kinds) else torch.int64
                wide = torch.complex128 if any(kind.is_complex for kind in kinds) else wide
                theirs, mine = theirs.to(wide), mine.to(wide)
            apart = (theirs != mine) & ~(theirs.isnan() & mine.isnan())
            if first < 0 and apart.any():
                first = start + int(apart.int().argmax())
            count += int(apart.sum())
        if not count:
            return None
        extent = self.extent
        index: tuple[int, ...] = ()
        if extent.sizes:
            inner = np.unravel_index(extent.start + first, extent.sizes)
            index = tuple(int(at) + offset for at, offset in zip(inner, extent.offsets, strict=True))
        types = dtype_name(ours.dtype)
        kept = "" if types == self.slot.dtype else f", {self.slot.dtype} there and {types} here"
        return (
            f"{self.what} differs in {count} of {read.numel()} elements, first at {list(index)}: "
            f"{read[first].item()!r} in the checkpoint, {ours[first].item()!r} here{kept}"
        )


class _Held(Meeting):
    """A checkpoint and what is live, piece by piece; all but elements is compared as it is found.

    `stepped`: names of the parameters whose optimizer has no masters of them; `published`: of those whose weights are
    made of masters.
    """

    allow_rounding = False

    def __init__(self, *given: Any) -> None:  # noqa: ANN401  # what a Meeting is given
        super().__init__(*given)
        self.pairs: list[_Pair] = []
        self.differences: list[str] = []
        self.stepped: set[str] = set()
        self.published: set[str] = set()

    def pair(self, what: str, slot: Slot, share: Share, *, may_round: bool) -> None:
        """Let elements be compared, if there are as many."""
        if slot.shape != share.shape:
            self.differences.append(f"{what} has shape {list(slot.shape)} in the checkpoint, {list(share.shape)} here")
        elif share.tensor.numel():
            self.pairs.append(_Pair(what, slot, share.extent, share.tensor, may_round))

    # --- what there is

    def hold_model(self) -> None:
        """Pair weights and buffers, and say which have no counterpart."""
        with_masters = self.published | self.stepped
        if self.source.asked.strict:
            self.differences += [f"{what} {listed(names)}" for what, names in self.report.unmatched()]
        for name, slot, share in self.live.tensors.shares():
            its = self.found.get(name)
            if its is None:
                continue
            source = weight_like(its, share.tensor.dtype)
            if name in with_masters:  # a master is more than a weight that was rounded of it
                source = its.master or source
            stepped = name in self.stepped and not self.allow_rounding
            self.pair(f"{slot} of {name}", source, share, may_round=not stepped)

    def hold_optimizers(self) -> None:
        """Pair the state of optimizers, and compare their settings and numbers."""
        optimizers = self.live.optimizers
        if optimizers.states and not self.source.checkpoint.param_groups:
            self.differences.append("the checkpoint has no state of an optimizer")
            return
        sources: list[tuple[OptimizerState, Source]] = []
        with self._telling():
            sources = optimizers.sources(self.source, self.everywhere.optimizers)
        for state, source in sources:
            state.source, state.notes = source, []
            self._hold_optimizer(state)
            self.report.notes += state.notes
        self.report.notes += optimizers.notes

    def _hold_optimizer(self, state: OptimizerState) -> None:
        snapshot = state.snapshot()
        beside = snapshot.metadata.get(BESIDE, {})  # which a file of torch has among state and settings
        apart = beside.get("groups") or [{}] * len(snapshot.groups)
        with self._telling():
            every = zip(state.hyperparameters(), snapshot.groups, apart, strict=True)
            for number, (settings, ours, odd) in enumerate(every):
                self._compare(f"param group {number}", settings, {**ours.hyperparameters, **odd})
        for what, value, mine in state.kept_apart(snapshot):
            self._compare(what, value, mine)
        of_group = {name: one.state for one in snapshot.groups for name in one.parameters}
        reshaped = {*self.report.reshaped}  # of which it is said already
        held = dict.fromkeys([*of_group, *(name for name, _ in state.holding())])
        owners = {name: owner_of(self.source.checkpoint, name) for name in held if name not in reshaped}
        expected = defaultdict[str, dict[str, Any]](dict)
        expected |= {name: {} if one is None else {**state.values(one)} for name, one in owners.items()}
        read_numbers(list(expected.values()), self.source.checkpoint.number_keys)
        masters = {name for name, slot, _ in snapshot.shares if slot == MASTER} | state.publishes
        self.stepped |= owners.keys() - masters
        self.published |= state.publishes
        for name, slot, share in snapshot.shares:
            if name in reshaped:
                continue
            what, owner, its = f"{slot} of {name}", owners.get(name), expected[name]
            slots = {} if owner is None else owner.slots
            theirs = slots.get(MASTER) or slots.get(WEIGHT) if slot == MASTER else slots.get(slot)
            if theirs is not None:
                self.pair(what, theirs, share, may_round=self.allow_rounding)
            elif slot in its and share.tensor.numel() == 1:
                self._compare(what, its[slot], share.tensor.item())
            elif share.tensor.count_nonzero():
                self.differences.append(f"{what} is not in the checkpoint, but the optimizer has some")
        told = [(name, one) for name, one in snapshot.values.items() if name not in reshaped]
        told += [(name, one) for name, one in of_group.items() if expected[name]]  # of others, shares tell
        for name, key, value in ((name, *one) for name, values in told for one in values.items()):
            if key in expected[name]:
                self._compare(f"{key} of {name}", expected[name][key], value)
            elif number_of(value):
                self.differences.append(f"{key} of {name} is not in the checkpoint, but {number_of(value)!r} here")
        odd_state = beside.get("parameters", {})
        for name, values in odd_state.items():
            for key in values.keys() & expected[name].keys():
                self._compare(f"{key} of {name}", value_of(expected[name][key]), values[key])
        for name, tensor in state.holding():
            if not state.is_here(tensor):
                continue
            has = {*state.values_of(tensor), *of_group.get(name, {}), *odd_state.get(name, {})}
            self.differences += [
                f"{key} of {name} is in the checkpoint, and the optimizer has none"
                for key, value in expected[name].items() if key not in has and value is not None
            ]  # fmt: skip

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Take for a difference what a load refuses."""
        try:
            yield
        except UsageError as error:
            error.path = error.advice = None
            self.differences.append(str(error))

    def hold_others(self, scheduler: Stateful | None, grad_scaler: Stateful | None) -> None:
        """Compare what goes with a model and an optimizer."""
        other = self.read_others(scheduler, grad_scaler, None, made=False)
        self.differences += [one.partition(":")[0] for one in other.missing]
        for target, state in other.states:
            self._compare("grad_scaler" if target is grad_scaler else "scheduler", state, target.state_dict())
        if self.live.model is not None:
            self._compare("the state that modules keep", other.modules, self.live.tensors.extra)

    # --- comparing

    def _compare(self, what: str, theirs: Any, ours: Any) -> None:  # noqa: ANN401  # whatever a state dict has
        """Note where a value of the checkpoint is another here; what only lives here is not looked at."""
        theirs, ours = _plain(theirs), _plain(ours)
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            for key, value in theirs.items():
                if key in ours:
                    self._compare(f"{what}: {key}", value, ours[key])
                else:
                    self.differences.append(f"{what}: {key} is in the checkpoint, but not here")
        elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
            for number, (value, its) in enumerate(zip(theirs, ours, strict=True)):
                self._compare(f"{what}[{number}]", value, its)
        elif isinstance(theirs, np.ndarray) and isinstance(ours, np.ndarray):
            if theirs.shape != ours.shape or not np.array_equal(theirs, ours):
                self.differences.append(f"{what} differs")
        elif not isinstance(theirs, COMPARED) or not isinstance(ours, COMPARED):
            self.report.notes.append(f"not compared: {what}, which is {type(theirs).__name__}, {type(ours).__name__}")
        elif theirs != ours and (theirs == theirs or ours == ours):  # noqa: PLR0124  # which NaN is not
            self.differences.append(f"{what} is {theirs!r} in the checkpoint, {ours!r} here")

    def check(self) -> None:
        """Find out all that can be known before elements are read."""
        refuse_lossy(self.source.checkpoint, self.pairs, "dequantize=True compares the numbers")
        check_tensors(one.read() for one in self.pairs)

    def compare(self) -> None:
        """Read elements, some at a time, and compare them."""
        every = (one for one in self.pairs if one.tensor.nbytes)
        for pairs in batched(every, lambda one: one.tensor.nbytes, ROUND_NBYTES, count=None):
            reads = [one.read() for one in pairs]
            read_tensors(reads)
            found = (one.difference(its.tensor) for one, its in zip(pairs, reads, strict=True))
            self.differences += [one for one in found if one is not None]


def _plain(value: Any) -> Any:  # noqa: ANN401  # whatever a state dict has
    """Return a value as numbers, texts, arrays, lists and mappings."""
    value = number_of(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.item() if not value.dim() else (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, (tuple, list, deque)) else value
