"""What a rule cuts finely: a few elements in each of many files, which is worth reading with others. Pure."""

from __future__ import annotations

from zckpt.immutable import immutable
from zckpt.state import CutSpans, Extent, Slot, itemsize

FEWEST_FILES = 4
"""What is in fewer files is read by itself."""

MOST_NBYTES = 1 << 14
"""Of what a file has: more is read by itself, too."""


@immutable
class Cut:
    """Elements [start, start + numel) of a flattened tensor, and at which byte of some memory they are to be."""

    spans: CutSpans
    start: int
    numel: int
    position: int = 0

    @property
    def end(self) -> int:
        """The byte of that memory behind them."""
        return self.position + self.numel * itemsize(self.spans.files.dtype)

    def paths(self) -> tuple[str, ...]:
        """Return the files that have them."""
        first, end = self.spans.files_of(self.start, self.start + self.numel)
        return self.spans.files.paths[first:end]


def fine_cut(slot: Slot, extent: Extent) -> CutSpans | None:
    """Return the rule by which an extent of a slot is cut, if that is so and nothing else is to be done to it."""
    rule = slot.spans
    if (
        isinstance(rule, CutSpans)
        and type(slot) is Slot
        and not slot.replicas
        and rule.shape == slot.shape == extent.sizes
        and rule.files.byteorder == "little"
        and rule.width * itemsize(rule.files.dtype) <= MOST_NBYTES
    ):
        first, end = rule.files_of(extent.start, extent.start + extent.numel)
        return rule if end - first >= FEWEST_FILES else None
    return None
