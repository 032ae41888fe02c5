"""A model whose tensors are computed from those of others, written as `consolidate` writes one, and proven.

What was written is opened again before it has its name: every tensor of the model is there, of its shape and type. And
every byte, if that is asked for, is what the same functions compute once more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zckpt.engine.scan import SlotSet
from zckpt.formats import open_checkpoint
from zckpt.formats.format import TargetFiles
from zckpt.operations.consolidate import OWNED, Chosen, lay_out
from zckpt.operations.proof import check_arrived, check_same
from zckpt.operations.target import How, Proof, Written, write_from
from zckpt.state import WEIGHT, Checkpoint, Slot, Span
from zckpt.state.names import like_model


@dataclass(slots=True)
class _ModelProof(Proof):
    """All of the model is there; and under `verify`, what was computed once more, `verified` bytes, is the same."""

    checkpoint: Checkpoint
    laid: TargetFiles
    target: Path
    how: How
    verify: bool
    verified: int = 0

    def of(self, written: Path, _companions: Sequence[Path], files: Sequence[Path]) -> None:
        """Open what was written; raise LayoutError unless all of the model is there."""
        holes = {hole.label: hole for one in self.laid.files for hole in one.holes}
        tensors = [one.name for one in self.checkpoint.tensors() if one.name in holes]
        found = like_model(open_checkpoint(written), tensors)
        for name in tensors:
            there = name in found.parameters or name in found.buffers
            copy = found.owner(name).slots.get(WEIGHT) if there else None
            check_arrived(name, copy, holes[name].slot.shape, self.target, holes[name].dtype)
        if not self.verify:
            return
        sets = [
            SlotSet(hole.label, (hole.slot, Slot(hole.label, hole.dtype, hole.slot.shape, spans)), (hole.dtype,) * 2)
            for path, one in zip(files, self.laid.files, strict=True)
            for hole in one.holes
            for spans in [(Span(hole.extent, str(path), hole.offset, hole.dtype),)]
        ]
        self.verified = check_same(sets, "are not what is computed", self.target, self.how)


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
) -> tuple[Written, int]:
    """Write a model whose slots are computed from those of sources, or are theirs; return its number of tensors, too.

    `verify`: compute all elements once more after writing, and compare; `without`: names of files next to the sources
    that do not go with what is written.
    """
    laid, num_tensors = lay_out(checkpoint, target, chosen, how)
    kept = [one for one in laid.files if one.name not in without]
    laid = replace(laid, files=kept, copied=frozenset(laid.copied) - frozenset(without))
    proof = _ModelProof(checkpoint, laid, target, how, verify)
    done = write_from(checkpoint, laid, target, how, owns=OWNED, proof=proof, dropped=dropped, sources=sources)
    return done, num_tensors
