"""What is wrong with a checkpoint, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field, replace

from zckpt.codes import (
    BAD_PICKLE,
    CODES,
    ERROR,
    LAYOUT,
    MALFORMED,
    MISSING_FILE,
    OTHER_KIND,
    OTHER_RUN,
    SEVERITIES,
    UNSUPPORTED,
    WEIGHT_MISMATCH,
)
from zckpt.errors import (
    DamagedFileError,
    LayoutError,
    PickleError,
    ShardError,
    SourceError,
    UnknownFormatError,
    UnsupportedError,
    WeightMismatchError,
)
from zckpt.immutable import immutable
from zckpt.state import Brief, Checkpoint, Document, Result, SourceFile, document, values_of

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
