"""What is wrong with a checkpoint, as data, and what its metadata tell: coverage, types, leftovers, steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path

from zckpt.codes import (
    BAD_PICKLE,
    CODES,
    COVERAGE,
    DTYPES_DIFFER,
    ERROR,
    GROUP_STEPS_DIFFER,
    LAYOUT,
    LEFT_OUT,
    LEFTOVER,
    MALFORMED,
    MISSING_FILE,
    OTHER_KIND,
    OTHER_RUN,
    REMARK,
    SEVERITIES,
    SLOT_MISSING,
    STATE_LEFT_OUT,
    STEPS_DIFFER,
    UNSUPPORTED,
    WEIGHT_MISMATCH,
)
from zckpt.engine.plan import check_covered
from zckpt.errors import (
    DamagedFileError,
    LayoutError,
    PickleError,
    ShardError,
    SourceError,
    UnknownFormatError,
    UnsupportedError,
    WeightMismatchError,
    listed,
)
from zckpt.formats.account import take_inventory
from zckpt.formats.registry import find_format
from zckpt.immutable import immutable
from zckpt.state import (
    MASTER,
    ZEROS,
    Brief,
    Checkpoint,
    CutSpans,
    Document,
    Parameter,
    Result,
    Slot,
    SourceFile,
    as_float,
    by_key,
    document,
    nbytes_of,
    number_of,
    values_of,
)

_BY_CLASS: tuple[tuple[type[SourceError], str], ...] = (
    (PickleError, BAD_PICKLE),
    (DamagedFileError, MALFORMED),
    (UnsupportedError, UNSUPPORTED),
    (UnknownFormatError, OTHER_KIND),
    (ShardError, OTHER_RUN),
    (LayoutError, LAYOUT),
    (WeightMismatchError, WEIGHT_MISMATCH),
)


@immutable
class Finding:
    """Something that is wrong, or worth knowing.

    Parameters
    ----------
    code : str
        One of `zckpt.codes`; the same defect has the same code in every version.
    message : str
        One line.
    file : str or None
    parameters : tuple of str
        In the model's order.
    expected, found, advice : str or None
    ranks : tuple of int, or None
        Data-parallel ranks; of a file that only model-parallel ranks have, those. None, until `in_order` says it: those
        that wrote the file.
    """

    code: str
    message: str
    file: str | None = None
    parameters: tuple[str, ...] = ()
    expected: str | None = None
    found: str | None = None
    advice: str | None = None
    ranks: tuple[int, ...] | None = None

    @property
    def severity(self) -> str:
        """`error`, `warning` or `note`."""
        return CODES[self.code].severity

    @property
    def title(self) -> str:
        """What the code means, in a few words."""
        return CODES[self.code].title

    def as_dict(self) -> Document:
        """Return the finding as JSON-able data."""
        return {
            **values_of(self, ("code", "severity", "title", "message", "file")),
            "ranks": list(self.ranks or ()),
            **{key: document(getattr(self, key)) for key in ("parameters", "expected", "found")},
            "advice": self.advice or CODES[self.code].advice,
        }


@immutable(repr=True)
class Checked(Result):
    """How much was looked at."""

    files: int = 0  # parameters and buffers with slots of their own
    parameters: int = 0
    slots: int = 0
    elements: int = 0  # whose values were looked at: a sample without `deep`
    nbytes: int = 0  # read for that
    checksums: int = 0  # that were computed and compared


@immutable
class Verification(Brief):
    """What `verify` found.

    Parameters
    ----------
    source : str
    format : str or None
        None if the source could not be opened.
    deep : bool
        Whether every byte was read.
    findings : list of Finding
        The worst first.
    checked : Checked
    fingerprint : str or None
        Of the logical state, if computed.
    checkpoint : Checkpoint or None
        None if the source could not be opened.
    looked_at : str or None
        Where it is, which may be within the source.
    """

    source: str
    format: str | None
    deep: bool
    findings: list[Finding]
    checked: Checked
    fingerprint: str | None = None
    checkpoint: Checkpoint | None = field(default=None, repr=False)
    looked_at: str | None = None

    @property
    def errors(self) -> list[Finding]:
        """The findings that are errors."""
        return [one for one in self.findings if one.severity == ERROR]

    @property
    def sound(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors

    def as_dict(self) -> Document:
        """Return the result as JSON-able data, the document of `--json`."""
        return {
            "source": self.source,
            "checkpoint": self.looked_at,
            "format": self.format,
            "sound": self.sound,
            "deep": self.deep,
            "checked": self.checked.as_dict(),
            "fingerprint": self.fingerprint,
            "findings": document(self.findings),
        }


def finding_of(error: SourceError) -> Finding:
    """Return the finding that an error of a reader is."""
    other = MISSING_FILE if isinstance(error.__cause__, FileNotFoundError) else MALFORMED
    code = error.code or next((code for kind, code in _BY_CLASS if isinstance(error, kind)), other)
    expected, found = (None if text is None else str(text) for text in (error.expected, error.found))
    return Finding(
        code,
        " ".join(error.message.split()),
        error.path,
        error.parameters,
        expected,
        found,
        error.advice,
        error.ranks,
    )


def findings_of(errors: Iterable[SourceError]) -> Iterator[Finding]:
    """Yield what errors of a reader are, and the one that their reading ends with."""
    try:
        yield from map(finding_of, errors)
    except SourceError as error:
        yield finding_of(error)


def in_order(findings: Iterable[Finding], files: Iterable[SourceFile]) -> list[Finding]:
    """Return findings with errors first, each severity by code, and each once, with the ranks of their files."""
    numbers = {file.path: file.mp_rank if file.dp_rank is None else file.dp_rank for file in files}
    ranks = {path: (number,) for path, number in numbers.items() if number is not None}
    every = (replace(one, ranks=ranks.get(one.file or "", ())) if one.ranks is None else one for one in findings)
    return sorted(dict.fromkeys(every), key=lambda one: (SEVERITIES.index(one.severity), one.code))


def structure_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield what is wrong with the structure of a checkpoint."""
    adapter = find_format(checkpoint.format)
    if adapter is not None:  # of files that need not be read for that
        yield from findings_of(adapter.contradictions(checkpoint))
    yield from _coverage(checkpoint)
    yield from _uneven(checkpoint)
    yield from _steps(checkpoint)
    yield from _left_out(checkpoint)
    for path, said in checkpoint.leftovers.items():
        name = Path(path).name
        yield Finding(LEFTOVER, f"{name} is not part of the checkpoint", path, found=said)
    for warning in checkpoint.warnings:
        if warning not in checkpoint.leftovers.values():
            yield Finding(REMARK, warning)


def _left_out(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield what nothing has read, by file."""
    root = Path(checkpoint.named)
    left_out = take_inventory(checkpoint).left_out
    yield from (finding_of(item.error) for item in left_out if item.error is not None)
    by_file = by_key(((item.file, item.trained), item) for item in left_out if item.error is None)
    for (file, trained), items in by_file.items():
        path = str(root / file) if root.is_dir() else str(root)
        names = [item.place for item in items if item.place]
        what = f"{listed(names)}: " if names else ""
        yield Finding(
            STATE_LEFT_OUT if trained else LEFT_OUT,
            f"{what}{items[0].about}",
            path,
            found=f"{nbytes_of(items)} bytes",
        )


def _coverage(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Look where every slot is, as for a copy of it: each element must be there once, in the slot's own type."""
    said = {
        SLOT_MISSING: "no {} for {}, although it holds some elements",
        COVERAGE: "{} of {} is not there, every element once",
        DTYPES_DIFFER: "{} of {} has another element type here than elsewhere",
    }
    holes: list[tuple[tuple[str, str, str | None], tuple[str, str]]] = []
    for parameter in checkpoint.holders():
        for key, slot in parameter.slots.items():
            for spans in slot.sets:
                one = replace(slot, spans=spans, replicas=())
                if odd := _other_dtype(one):
                    holes.append(((DTYPES_DIFFER, key, odd[0]), (parameter.name, odd[1])))
                try:
                    check_covered(one, f"{key}/{parameter.name}")
                except LayoutError as error:
                    lacking = _without(parameter, one)
                    code = SLOT_MISSING if lacking else COVERAGE
                    holes.append(((code, key, lacking), (parameter.name, str(error))))
    for (code, key, path), found in by_key(holes).items():
        names = tuple(dict.fromkeys(name for name, _ in found))
        what = said[code].format(key, listed(names))
        yield Finding(code, what, path, names, None, found[0][1])


def _other_dtype(slot: Slot) -> tuple[str, str] | None:
    """Return the file in which a slot has another type than in most, and what types there are."""
    if isinstance(slot.spans, CutSpans):
        return None
    counts = Counter(span.dtype for span in slot.spans)
    if len(counts) < 2:
        return None
    usual = max(counts, key=lambda dtype: (counts[dtype], dtype == slot.dtype))
    odd = next(span for span in slot.spans if span.dtype != usual)
    return odd.path, f"{odd.dtype}, elsewhere {usual}"


def _without(parameter: Parameter, slot: Slot) -> str | None:
    """Return a file that has elements of a parameter's master and none of a slot."""
    master = parameter.master
    if master is None or slot.name == MASTER:
        return None
    present = {span.path for span in slot.spans}
    return next((span.path for span in master.spans if span.extent.numel and span.path not in present), None)


def _uneven(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield parameters that have only some of the slots that most others of their group have.

    One that has none at all was never stepped. One that has other slots as well is of an optimizer that keeps different
    ones for different shapes. Prodigy keeps a number in the place of a slot that is zero.
    """
    lacking: dict[str, list[tuple[str, str | None]]] = {}
    for group in checkpoint.param_groups:
        members = [p for name in group.parameters if (p := checkpoint.parameters.get(name)) is not None]
        kept = {
            p.name: frozenset(key for key, slot in p.optimizer_slots.items() if slot.shape == p.shape)
            for p in members
            if p.numel
        }
        usual = Counter(keys for keys in kept.values() if keys)
        if len(usual) < 2:
            continue
        most = max(usual, key=lambda keys: (usual[keys], len(keys)))
        full = {key for p in members if kept.get(p.name) == most for key in p.optimizer_slots}
        for parameter in members:
            own = kept.get(parameter.name, frozenset())
            if own and own < most and parameter.optimizer_slots.keys() <= full:
                path = next((span.path for key in sorted(own) for span in parameter.slots[key].spans), None)
                for key in sorted(most - own - parameter.slots.keys() - parameter.state.keys()):
                    lacking.setdefault(key, []).append((parameter.name, path))
    for key, found in lacking.items():
        names, path = tuple(name for name, _ in found), found[0][1]
        what = f"no {key} for {listed(names)}, which others of the param group have"
        yield Finding(SLOT_MISSING, what, path, names)


def _steps(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Hold the steps of parameters and groups against each other; that ranks agree, a reader has seen to."""

    def number(state: Mapping[str, object]) -> float | None:
        plain = number_of(state.get("step"))
        return as_float(plain) if not isinstance(plain, bool) else None

    steps: dict[str, float] = {}
    for index, group in enumerate(checkpoint.param_groups):
        shared = number(group.state)
        for name in group.parameters:
            parameter = checkpoint.find(name)
            own = None if parameter is None else number(parameter.state)
            step = shared if own is None else own
            if step is not None and parameter is not None and parameter.group == index:
                steps[name] = step
    if len(set(steps.values())) < 2:
        return
    usual = Counter(steps.values()).most_common(1)[0][0]
    odd = [name for name, step in steps.items() if step != usual]
    files: dict[str, str | None] = {}  # the only one that holds a parameter's optimizer state
    for name in steps:
        parameter = checkpoint.parameters.get(name) or checkpoint.unnamed[name]
        slots = parameter.optimizer_slots.values()
        paths = {span.path for slot in slots for span in slot.spans} - {ZEROS}
        files[name] = paths.pop() if len(paths) == 1 else None
    path = files[odd[0]]
    of_file = [name for name in steps if files[name] == path]
    whole = path is not None and set(of_file) == set(odd)
    of = {name: group.optimizer for group in checkpoint.param_groups for name in group.parameters}
    whole = whole and any(of[name] in {of[one] for one in odd} for name in steps.keys() - {*odd})  # else it is its own
    yield Finding(
        STEPS_DIFFER if whole else GROUP_STEPS_DIFFER,
        f"{listed(odd)}: {('the rank has' if whole else 'they have')} taken another number of steps than the others",
        path if whole else None,
        tuple(odd),
        f"{usual:g}",
        ", ".join(f"{step:g}" for step in sorted({steps[name] for name in odd})[:4]),
    )
