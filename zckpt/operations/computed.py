"""A model whose tensors are computed from those of others, written as `consolidate` writes one, and proven.

What was written is opened again before it has its name: every tensor of the model is there, of its shape and type. And
every byte, if that is asked for, is what the same functions compute once more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zckpt.engine.scan import SlotSet
from zckpt.errors import LayoutError, UsageError
from zckpt.formats import open_checkpoint
from zckpt.formats.account import take_inventory
from zckpt.formats.format import TargetFiles
from zckpt.operations.consolidate import Chosen, check_model_apart, lay_out, owned_with
from zckpt.operations.losses import check_nothing_lost
from zckpt.operations.open import named
from zckpt.operations.target import How, Written, write_from
from zckpt.state import Checkpoint, Slot, Span
from zckpt.state.names import like_model


@dataclass(slots=True)
class _Proof:
    """What is done with the files before they get their names; `verified` is what was computed once more, in bytes."""

    checkpoint: Checkpoint
    laid: TargetFiles
    target: Path
    how: How
    verify: bool
    verified: int = 0

    def of_model(self, written: Path, _more: Sequence[Path]) -> None:
        """Open what was written under a temporary name; raise LayoutError unless all of the model is there."""
        names = {hole.label: hole for one in self.laid.files for hole in one.holes}
        tensors = [one.name for one in self.checkpoint.tensors() if one.name in names]
        found = like_model(open_checkpoint(written), tensors)
        for name in tensors:
            if name not in found.parameters and name not in found.buffers:
                raise LayoutError(f"{name} did not arrive", path=self.target, advice="please report this")
            one, hole = found.owner(name), names[name]
            if (one.shape, one.dtype) != (hole.slot.shape, hole.dtype):
                raise LayoutError(
                    f"{name} arrived as another tensor",
                    path=self.target,
                    expected=f"{hole.dtype} {hole.slot.shape}",
                    found=f"{one.dtype} {one.shape}",
                    advice="please report this",
                )

    def of_files(self, written: Sequence[Path]) -> None:
        """Compute all elements once more, and raise LayoutError unless they are those of the files."""
        if not self.verify:
            return
        from zckpt.compare.slots import differences

        sets = [
            SlotSet(hole.label, (hole.slot, Slot(hole.label, hole.dtype, hole.slot.shape, spans)), (hole.dtype,) * 2)
            for path, one in zip(written, self.laid.files, strict=True)
            for hole in one.holes
            for spans in [(Span(hole.extent, str(path), hole.offset, hole.dtype),)]
        ]
        found = differences(sets, memory=self.how.memory, reporter=self.how.reporter, direct=self.how.direct)
        if found:
            raise LayoutError(
                f"{len(found)} tensors are not what is computed: {found[0].label} in {found[0].figures.num_different} "
                f"of {found[0].figures.numel} elements",
                path=self.target,
                advice="please report this",
            )
        self.verified = sum(hole.nbytes for one in self.laid.files for hole in one.holes)


def write_computed(
    checkpoint: Checkpoint,
    sources: Sequence[Checkpoint],
    target: Path,
    chosen: Chosen,
    how: How,
    *,
    verify: bool,
    dropped: tuple[str, ...],
    without: Collection[str] = (),
) -> tuple[Written, int, int]:
    """Write a model that has computed slots.

    Parameters
    ----------
    checkpoint : Checkpoint
        Of slots that are computed from those of the sources, or are theirs.
    sources : sequence of Checkpoint
    target : Path
    chosen : Chosen
    how : How
    verify : bool
        Compute all elements once more after writing, and compare.
    dropped : tuple of str
        What of the sources may be lost.
    without : collection of str
        Names of files next to the sources that do not go with what is written.

    Returns
    -------
    (Written, int, int)
        With the number of the model's tensors, and of bytes that were compared.

    Raises
    ------
    SourceError
        A source contradicts itself, or a file is damaged.
    TargetError
        The target exists or cannot be written.
    """
    laid, num_tensors = lay_out(checkpoint, target, chosen)
    kept = [one for one in laid.files if one.name not in without]
    laid = replace(laid, files=kept, copied=frozenset(laid.copied) - frozenset(without))
    check_model_apart(sources, target, laid, overwrite=how.overwrite)
    proof = _Proof(checkpoint, laid, target, how, verify)
    done = write_from(
        checkpoint, laid, target, how, owned=owned_with(laid), prove=proof.of_model, prove_files=proof.of_files,
        dropped=dropped, sources=sources,
    )  # fmt: skip
    return done, num_tensors, proof.verified


def check_none_lost(sources: Sequence[Checkpoint], drop: Sequence[str]) -> tuple[str, ...]:
    """Raise unless everything in several sources arrives or is to be dropped; see `check_nothing_lost`."""
    if not drop:
        return tuple(one for source in sources for one in check_nothing_lost(source, ()))
    idle = [set(take_inventory(source).without(drop)[2]) for source in sources]
    unused = set.intersection(*idle)
    if unused:
        raise UsageError(
            f"--drop {min(unused)!r} names nothing that would be lost",
            path=named(sources[0]),
            expected="FILE or FILE:PLACE of something that is left out, as `zckpt inspect --files` shows it",
        )
    return tuple(
        dropped
        for source, some in zip(sources, idle, strict=True)
        for dropped in check_nothing_lost(source, [one for one in drop if one not in some])
    )
