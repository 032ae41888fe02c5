"""What is trained, as this rank has it, and models of which ranks have different parts: stages of a pipeline, meshes.

Whether a save or load is of such a model, all ranks agree first. Names are those of the whole model. What ranks have of
a name and slot, they tell each other by digests: the same elements are the same thing, which they write together, if
its bytes are equal. Of what is on a mesh all bytes are compared; of a plain parameter the first `SAMPLE_NBYTES`, which
tells names that are a part's own from those of the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from zckpt.engine.tensors import dtype_name
from zckpt.errors import LayoutError, UnsupportedError, UsageError
from zckpt.immutable import immutable, mutable
from zckpt.optim.ranks import Ranks
from zckpt.optim.states.by_parameter import NamedShare, Snapshot
from zckpt.optim.states.several import Given, Optimizers, merged_groups, named, one_class
from zckpt.optim.tensors import DIGEST_NBYTES, SAMPLE_NBYTES, Model, ModelState, digest_of, model_state
from zckpt.state import WEIGHT, Checkpoint, Parameter, alias_of, by_key
from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt.training.slices import Slices

TpRules = str | os.PathLike[str] | Mapping[str, Any] | None
"""What `save` and `load` take as `tp_rules`."""


def slices_of(ranks: Ranks, given: TpRules, optimizer: Given) -> Slices | None:
    """Return which slices of its model's parameters this rank has; None: it has whole parameters.

    All ranks call it together; errors are those of `zckpt.training.slices.read_slices`.
    """
    every = list(named(optimizer).values())
    if given is None and not any(getattr(one, "is_model_parallel", False) for one in every):
        return None
    from zckpt.training.slices import read_slices

    return read_slices(ranks, given, every)


@immutable
class Live:
    """A model and its optimizers on this rank; `slices`: parameters are slices."""

    model: Model
    tensors: ModelState
    optimizers: Optimizers
    slices: Slices | None

    @classmethod
    def of(cls, model: Model, optimizer: Given, slices: Slices | None = None) -> Live:
        """Find out what there is; nothing is copied."""
        tensors = model_state(model)
        optimizers = Optimizers(
            optimizer, tensors.names(), tensors.members,
            in_parts=isinstance(model, (list, tuple)), is_sliced=slices is not None,
        )  # fmt: skip
        found = tensors.renamed(optimizers.renamed)
        if model is not None:  # which need not have all that an optimizer trains
            found.add(optimizers.parameters())
        return cls(model, found, optimizers, slices)

    def is_in_parts(self, ranks: Ranks) -> bool:
        """Tell whether this rank knows that ranks have different parts."""
        its = [*self.tensors.tensors.values(), *self.optimizers.parameters().values()]
        on_some = any(isinstance(one, DTensor) and one.device_mesh.size() < ranks.world_size for one in its)
        are_experts = any(one.renamed is not None for one in self.optimizers.states.values())
        return on_some or are_experts or self.slices is not None or isinstance(self.model, (list, tuple))


@mutable
class Part:
    """What a rank has of a model and its optimizers; of a model in parts, each rank something else."""

    checkpoint: Checkpoint  # parameters, buffers and param groups, without slots
    classes: dict[str, str]  # of its optimizers
    extra: set[str]  # keys of what its modules keep besides tensors

    @classmethod
    def of(cls, model: ModelState, optimizers: Snapshot) -> Part:
        """Return what a rank has; tied parameters come last."""
        made = Checkpoint("", "zckpt", f"zckpt {__version__}", param_groups=list(optimizers.groups))
        for name, one in model.tensors.items():
            is_parameter = name in model.parameters
            section = made.parameters if is_parameter else made.buffers
            frozen = is_parameter and not one.requires_grad
            section[name] = Parameter(name, tuple(one.shape), dtype_name(one.dtype), frozen=frozen)
        for name, owner in model.tied.items():
            made.parameters[name] = alias_of(made.parameters[owner], name)
        return cls(made, dict(optimizers.classes), set(model.extra))

    def join(self, others: Sequence[Part]) -> None:
        """Add the parts of the ranks that follow.

        Raises LayoutError: ranks have tensors of one name that differ in shape or type; UsageError: parts of one
        optimizer are not alike; UnsupportedError: modules keep something besides tensors that the first rank has not.
        """
        whole = self.checkpoint
        for one in others:
            self.classes = one_class(self.classes, one.classes)
        whole.param_groups = merged_groups(one.checkpoint.param_groups for one in (self, *others))
        apart: set[str] = set()
        for rank, one in enumerate(others, 1):
            its = one.checkpoint
            for section, found in ((whole.parameters, its.parameters), (whole.buffers, its.buffers)):
                for name, here in found.items():
                    known = section.setdefault(name, here)
                    if (known.shape, known.dtype) != (here.shape, here.dtype):
                        raise LayoutError(
                            f"{name} on rank {rank} differs from earlier ranks",
                            expected=(known.shape, known.dtype), found=(here.shape, here.dtype),
                            advice="give parts with the names of the whole model",
                        )  # fmt: skip
                    if (known.tied_to is None) != (here.tied_to is None):
                        apart.add(name)
            strange = sorted(one.extra - self.extra)
            if strange:
                raise UnsupportedError(
                    f"{strange[0]}: a module on rank {rank} keeps more than tensors, which only the first rank can "
                    "write",
                    advice="keep it in a buffer",
                )
        apart |= whole.parameters.keys() & whole.buffers.keys()
        if apart:
            raise LayoutError(
                f"{min(apart)} is a separate parameter only on some ranks",
                advice="tie the same parameters and register the same buffers on all ranks",
            )
        whole.parameters = dict(sorted(whole.parameters.items(), key=lambda one: one[1].tied_to is not None))


# --- saving


NOT_THE_SAME = (
    "names must be those of the whole model; replicate what all ranks share: put it into the plan of "
    "parallelize_module, or use DistributedDataParallel"
)


def settled(
    ranks: Ranks, shares: Sequence[NamedShare], buffers: Collection[str], advice: str = NOT_THE_SAME
) -> list[NamedShare]:
    """Return what this rank has, with the ranks that have the same. All ranks call it together.

    `buffers`: of plain ones that several ranks have, the first one's is written; `advice`: if ranks have other values
    of the same. Raises LayoutError: ranks have other values of the same name.
    """
    keyed: dict[bytes, NamedShare] = {}
    for name, slot, share in sorted(shares, key=lambda one: (one[1], one[0])):
        told = repr((name, slot, share.shape, share.tensor.dtype, share.extent))
        keyed[blake2b(told.encode(), digest_size=DIGEST_NBYTES).digest()] = name, slot, share
    here = zip(ranks.members, ranks.gather_all(list(keyed)), strict=True)
    having = by_key((key, member) for member, keys in here for key in keys)
    found: list[NamedShare] = []
    digests: dict[bytes, bytes] = {}
    for key, (name, slot, share) in keyed.items():
        those = having[key]
        if share.ranks is None and name in buffers:
            those = those[:1]
        elif share.ranks is None:
            if len(those) > 1 and slot == WEIGHT:
                digests[key] = digest_of(share, SAMPLE_NBYTES)
        else:
            of_mesh = set(share.ranks) & set(ranks.members)
            if not of_mesh >= set(those):
                digests[key] = digest_of(share)
            those = sorted(of_mesh.union(those))
        found.append((name, slot, replace(share, ranks=tuple(those))))
    every = ranks.gather_all(digests)
    for key, (name, slot, _) in keyed.items():
        if key in digests and len({one[key] for one in every if key in one}) > 1:
            raise LayoutError(
                f"{slot} of {name} has different values on ranks that hold the same elements",
                advice=advice,
            )
    return found


SHOWN = 8
"""Names of tensors that each rank tells of, of those that the first one has not, or it."""


def refuse_unlike(ranks: Ranks, alike: Collection[str]) -> None:
    """Raise UnsupportedError, on all ranks: they have different tensors, which were taken to be on each.

    `alike`: what this rank has of these. All ranks call it together.
    """
    others = sorted({*ranks.from_first(alike)}.symmetric_difference(alike))
    told = ranks.gather_all((len(others), others[:SHOWN]))
    some, most = [*dict.fromkeys(chain(*(names for _, names in told)))], max(count for count, _ in told)
    is_models = any(one.startswith(f"{WEIGHT} of ") for one in some)
    raise UnsupportedError(
        "ranks have different tensors, each of which would be taken to be on all of them",
        found=f"only on some ranks {', '.join(some[:SHOWN])}" + (f", of {most}" if most > SHOWN else ""),
        advice="give each rank's part of the model in a list, model=[stage], or all ranks the same" if is_models
        else "use an optimizer that keeps all state on each rank (torch.optim.Muon), or fully_shard",
    )  # fmt: skip


# --- loading


@immutable
class Everywhere:
    """What some rank has; empty where all ranks have the same model."""

    tensors: tuple[str, ...] = ()  # all names of tensors
    parameters: frozenset[str] = frozenset()  # those that optimizers have
    optimizers: tuple[str, ...] = ()  # their names


def everywhere_of(live: Live, ranks: Ranks, *, broadcast: bool) -> Everywhere:
    """Tell the other ranks what is here, if they have different parts. All ranks call it together.

    Raises UsageError: one rank is to read for all, which have different parts.
    """
    if not ranks.any(live.is_in_parts(ranks)):
        return Everywhere()
    if broadcast:
        raise UsageError("broadcast only applies to a model that all ranks have whole", advice="omit it")
    names = [*live.tensors.tensors, *live.tensors.tied]
    every = ranks.gather_all((names, list(live.optimizers.parameters()), live.optimizers.called))
    return Everywhere(
        tuple(dict.fromkeys(name for one in every for name in one[0])),
        frozenset(name for one in every for name in one[1]),
        tuple(dict.fromkeys(name for one in every for name in one[2])),
    )
