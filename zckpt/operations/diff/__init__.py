"""Compare the logical state of two checkpoints, whatever wrote them: by parameter name and slot, never by file."""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.compare.slots import DECADES, Difference, Tolerance, differences, pair
from zckpt.errors import UsageError
from zckpt.executors.using import using
from zckpt.formats.floats import with_floats
from zckpt.immutable import immutable
from zckpt.operations.diff.match import Filter, Match, match
from zckpt.operations.diff.trees import Setting, compare_settings
from zckpt.operations.open import Source, opened
from zckpt.operations.options import ComparedTwo, ReadingB, Unpack, how_read, naming_of, only, shares
from zckpt.operations.target import summary
from zckpt.state import Brief, Checkpoint, Document, document, number
from zckpt.state.names import canonical_names, renamed

__all__ = ["Changed", "Compared", "Setting", "diff"]


@immutable
class Changed:
    """A slot that differs; without a difference in numbers where the shapes do."""

    match: Match
    difference: Difference | None

    def as_dict(self) -> Document:
        """Return the slot and its figures as JSON-able data; None where there is no figure."""
        match, figures = self.match, self.difference.figures if self.difference is not None else None
        counts = ("num_different", "max_ulp", "nan_a", "nan_b", "inf_a", "inf_b", "first")
        floats = ("max_abs", "max_rel", "rel_l2", "cosine")
        return {
            "name": match.name,
            "slot": match.slot,
            "numel": match.a.numel,
            **{key: getattr(figures, key, None) for key in counts},
            **{key: number(getattr(figures, key, None)) for key in floats},
            "histogram": {"decades": list(DECADES), "counts": list(figures.decades)} if figures else None,
            "dtype_a": match.a.dtype,
            "dtype_b": match.b.dtype,
            "shape_a": list(match.a.shape),
            "shape_b": list(match.b.shape),
        }


@immutable
class Compared(Brief):
    """What `diff` found.

    Parameters
    ----------
    a, b : Checkpoint
    changed : list of Changed
        The largest changes first.
    equal_slots : list of Match
    only_in_a, only_in_b : list of (name, slot or None)
        None: the whole parameter.
    settings : list of Setting
    warnings : list of str
        What could not be compared.
    num_parameters, num_elements, nbytes : int
        What was compared, counted on one side.
    """

    a: Checkpoint
    b: Checkpoint
    changed: list[Changed]
    equal_slots: list[Match]
    only_in_a: list[tuple[str, str | None]]
    only_in_b: list[tuple[str, str | None]]
    settings: list[Setting]
    warnings: list[str]
    num_parameters: int
    num_elements: int
    nbytes: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.changed or self.only_in_a or self.only_in_b or self.settings)

    def as_dict(self) -> Document:
        """Return the result as JSON-able data, the document of `--json`."""
        return {
            "a": summary(self.a),
            "b": summary(self.b),
            "equal": self.equal,
            "compared": {
                "parameters": self.num_parameters,
                "slots": len(self.changed) + len(self.equal_slots),
                "elements": self.num_elements,
                "nbytes": self.nbytes,
            },
            **{
                side: [{"name": name, "slot": slot} for name, slot in getattr(self, side)]
                for side in ("only_in_a", "only_in_b")
            },
            "different": document(self.changed),
            "equal_slots": [{"name": one.name, "slot": one.slot, "numel": one.a.numel} for one in self.equal_slots],
            "metadata": document(self.settings),
            "warnings": self.warnings,
        }


@shares(ComparedTwo)
def diff(
    a: Source,
    b: Source,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    slots: Sequence[str] = (),
    parameters: Sequence[str] = (),
    ignore_metadata: bool = False,
    **shared: Unpack[ComparedTwo],
) -> Compared:
    """Compare two checkpoints of any formats, stages and world sizes.

    Bytes are compared first; what differs is read again for its statistics, in parallel and in bounded memory. Renaming
    options apply to `a`; wrappers' prefixes are always ignored.

    Parameters
    ----------
    a, b : path-like or Checkpoint
    rtol, atol : float
        Elements with |a - b| <= atol + rtol * |b| are equal; element types may then differ. Default: compare bits.
    slots : sequence of str
        Compare only these: `weight`, `master`, `exp_avg`, ...
    parameters : sequence of str
        Compare only parameters whose names match one of these shell patterns.
    ignore_metadata : bool
        Compare only tensors, not hyperparameters, steps and other metadata.
    **shared

    Raises
    ------
    UsageError
        A tolerance is negative, nothing is selected, or a rename cannot be used.
    SourceError
        A checkpoint cannot be read.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not value >= 0:
            raise UsageError(f"--{name} is not a tolerance", expected="0 or more", found=value)
    ours = opened(a, **shared)
    theirs = opened(b, **{key[:-2]: value for key, value in only(ReadingB, shared).items()})
    naming = naming_of(shared)
    notes: tuple[str, ...] = ()
    if shared["dequantize"]:
        ours, theirs = with_floats(ours, theirs)
    if naming.changes:
        ours, notes = naming.of(renamed(ours, canonical_names(ours.names)))
    chosen = Filter(slots, parameters)
    chosen.check(ours, theirs)
    matches = match(ours, theirs, chosen)
    there = matches.slots or matches.only_in_a or matches.only_in_b or matches.num_singles
    if not there and (slots or parameters):
        raise UsageError("nothing to compare: no slot of either checkpoint is selected", found=[*slots, *parameters])
    alike = [one for one in matches.slots if one.a.shape == one.b.shape]
    pairs = [pair(f"{one.slot}/{one.name}", one.a, one.b, one.dtype) for one in alike]
    with using(shared["executor"]):
        found = {one.index: one for one in differences(pairs, tolerance=Tolerance(rtol, atol), **how_read(shared))}
        settings = [] if ignore_metadata else compare_settings(ours, theirs, matches, memory=shared["memory"])
    changed = [Changed(alike[index], one) for index, one in found.items()]
    changed += [Changed(one, None) for one in matches.slots if one.a.shape != one.b.shape]
    return Compared(
        ours,
        theirs,
        sorted(changed, key=_how_much),
        [one for index, one in enumerate(alike) if index not in found],
        matches.only_in_a,
        matches.only_in_b,
        settings,
        [*notes, *matches.warnings],
        num_parameters=len(matches.names),
        num_elements=sum(one.a.numel for one in matches.slots),
        nbytes=sum(one.a.nbytes for one in matches.slots),
    )


def _how_much(one: Changed) -> tuple[float, float]:
    """Return what sorts slots that changed most first."""
    if one.difference is None:
        return (float("-inf"), 0.0)
    figures = one.difference.figures
    return (-(figures.rel_l2 or 0.0), -figures.num_different / max(figures.numel, 1))
