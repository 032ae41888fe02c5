"""Every error a user can cause.

    ZckptError
    |-- UsageError              unusable arguments                      exit status 2
    |   `-- MissingPackageError     an optional package is not installed
    |-- SourceError             the source cannot be used               exit status 3
    |   |-- UnknownFormatError      no adapter recognises it
    |   |-- DamagedFileError        truncated, malformed, inconsistent
    |   |   `-- PickleError             a pickle that is malformed or hostile
    |   |-- UnsupportedError        intact, but not something zckpt can do correctly; exit status 5
    |   |-- ShardError              a rank's file is missing, there twice, or from another step
    |   |-- LayoutError             two accounts of where elements lie disagree
    |   |-- LeftOutError            it holds something that would not arrive in the target
    |   `-- WeightMismatchError     a master does not round to its weight
    |-- TargetError             the target cannot be written            exit status 4
    |   `-- TargetExistsError       it already exists
    |-- WorkerError             processes that were to work are lost    exit status 6
    `-- NotRestoredError        what is being trained is not what the checkpoint has

An error carries its data (`path`, `expected`, `found`, `advice`) and formats it only in `__str__`,
as one line: file, what was expected, what was found, what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from signal import SIGINT

CONTROLS = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that make a terminal do something, or turn the order of others; names in a file may hold any."""

_REPLACED = {code: "\ufffd" for code in CONTROLS if chr(code) not in "\n\t"}

SHOWN_NAMES = 4
"""More names than this are counted in a message."""

SHOWN_CHARACTERS = 600
"""Of each item of a message: a name in a file may have any length."""

SHOWN_PATH = 1200
"""Characters of a path; what a message says of a file is useless without all of its name."""


def without_controls(text: str) -> str:
    """Return a text that is safe to print: control characters, line feeds and tabs aside, are replaced."""
    return text.translate(_REPLACED)


def shortened(text: str, width: int) -> str:
    """Return a text cut in its middle to a width: its beginning and its end tell most."""
    half = max(width - 3, 2) // 2
    return text if len(text) <= width else f"{text[:half]}...{text[-(max(width - 3, 2) - half) :]}"


_AS_URLS: list[Callable[[str], str]] = []


@cache  # of each directory it is told once
def show_as_urls(base: str) -> None:
    """Let `shown` know of a directory in which BASE/NUMBER/SCHEME/REST stands for SCHEME://REST."""
    pattern = re.compile(re.escape(base) + r"/\d+/([a-z][a-z0-9+.\-]*)(?:/|(?![a-z0-9+.\-]))")
    _AS_URLS.append(lambda text: pattern.sub(r"\1://", text) if base in text else text)


@cache
def show_as_stored(base: str, scheme: str) -> None:
    """Let `shown` know that BASE/NUMBER/SCHEME/STORE/REST stands for STORE/REST, a path whose slashes are quoted."""
    pattern = re.compile(re.escape(base) + rf"/\d+/{scheme}/([^/\s'\"]+)")

    def as_paths(text: str) -> str:
        from urllib.parse import unquote

        return pattern.sub(lambda found: unquote(found[1]), text) if base in text else text

    _AS_URLS.insert(0, as_paths)


_USER = re.compile(r"(\w://)[^/\s'\"]*@")
_QUERY = re.compile(r"(https?://[^\s'\"?]*|\w://[^\s'\"?]*(?=\?[^\s'\"/]*=))\?[^\s'\"]*")
"""Of stores whose names may have a question mark, what has values."""


def shown(text: str) -> str:
    """Return a text in which paths that stand for URLs are these URLs, and URLs have no user, password or query."""
    for as_urls in _AS_URLS:
        text = as_urls(text)
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text)) if "://" in text else text


_OPTION = re.compile(
    r"`\w[^`]*`|(?<![\w-])--(?P<flag>[a-z]+(?:-[a-z]+)*)"
    r"(?:=(?P<literal>[^\s;:)`]*[^\s;:)`,.])|\x20(?P<value>'[^']*'|(?:[A-Z]+|\d+)(?:=[A-Z]+|[A-Z0-9,]*,\.\.\.)?(?![\w-])))?"
)
"""A command, which stays as it is, or an option of the command line with its value: =WORD, 'WORD', WORD or a number."""

_KEYWORDS = {
    "root": "roots=", "root-b": "roots_b=", "for": "program=", "adapter": "adapter_name=",
    "rigid": "elastic=False", "spread-experts": "sliced_experts=False",
    **{f"no-{one}": f"{one.replace('-', '_')}=False" for one in (
        "weight-check", "checksums", "fingerprint", "round-robin", "parameter-alignment", "requantize",
        "fan-in-fan-out",
    )},
    **{one: f"{one.replace('-', '_')}=True" for one in (
        "overwrite", "resume", "restart", "dry-run", "salvage", "fill-masters", "direct", "dequantize", "requantize",
        "sliced-experts", "elastic", "deep", "verify", "exclude-frozen", "fan-in-fan-out", "delete", "unsound",
    )},
}  # fmt: skip
"""What options are called in Python, where that is not their name with an equals sign."""

_SEVERAL = frozenset({"names", "drop", "slots", "keep_slots", "from_last", "roots"})


def as_keywords(text: str) -> str:
    """Return a text that names options as Python does, `world_size=N`, not as the command line does."""

    def keyword(found: re.Match[str]) -> str:
        flag, literal, value = found["flag"], found["literal"], found["value"]
        if flag is None:
            return found[0]
        name = _KEYWORDS.get(flag, f"{flag.replace('-', '_')}=")
        if literal is not None:
            value = literal if literal.isdecimal() else ", ".join(f'"{one}"' for one in literal.split(","))
        if value is None or not name.endswith("="):
            return name if value is None else f"{name} {value}"
        if name[:-1] not in _SEVERAL:
            return f"{name}{value}"
        stands_for_some = value.isupper() and not value.startswith("'")
        return f"{name}[{'...' if stands_for_some else value}]"

    return _OPTION.sub(keyword, text)


def as_called(text: str) -> str:
    """Return a text that names options as whoever runs zckpt does: on its command line, or in Python."""
    return text if ZckptError.names_flags else as_keywords(text)


def stands_for_urls() -> bool:
    """Tell whether there are paths that stand for URLs."""
    return bool(_AS_URLS)


def require_torch(what: str, *, since: tuple[int, int] = (2, 5)) -> None:
    """Raise MissingPackageError unless torch can be imported, which the tools do without.

    Parameters
    ----------
    what : str
        What needs it.
    since : tuple of int and int
        The first version that has what it needs; training needs `torch.distributed.tensor`.
    """
    try:
        found = str(import_module("torch").__version__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingPackageError(
            f"{what} needs torch, which is not installed", advice="pip install 'zckpt[train]'"
        ) from error
    if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < since:
        wanted = f"{what} needs torch {since[0]}.{since[1]} or newer"
        raise MissingPackageError(wanted, found=f"torch {found}", advice=f"pip install 'torch>={since[0]}.{since[1]}'")


def require(package: str, executor: str) -> None:
    """Raise MissingPackageError unless a package can be imported; the extra that has it is called as the executor."""
    try:
        import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"--executor={executor} needs the package {package}, which cannot be imported",
            found=str(error),
            advice=f"pip install 'zckpt[{executor}]'",
        ) from error


class ZckptError(Exception):
    """Base of every error that zckpt raises on purpose.

    Parameters
    ----------
    message : str
        What is wrong, in one clause. It, and the others, name options as the command line does: `--world-size N`.
    path : path-like, optional
        The file or directory concerned.
    expected, found : object, optional
        What was expected, and what was found.
    advice : str, optional
        What the user can do about it.
    code : str, optional
        The code of `zckpt verify`, if it is more specific than the class; see `codes`.
    ranks : sequence of int
        Ranks concerned.
    parameters : sequence of str
        Parameters concerned.
    """

    exit_status = 1
    names_flags = False
    """Whether options are named as on the command line, which sets it; else as in Python."""

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        expected: object = None,
        found: object = None,
        advice: str | None = None,
        code: str | None = None,
        ranks: Sequence[int] = (),
        parameters: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.expected = expected
        self.found = found
        self.advice = advice
        self.code = code
        self.ranks = tuple(ranks)
        self.parameters = tuple(parameters)

    @classmethod
    def kind(cls) -> str:
        """Return the class's stable name in documents: `damaged-file`."""
        public = next(one for one in cls.__mro__ if one.__module__ == __name__)
        return re.sub("(?<!^)(?=[A-Z])", "-", public.__name__.removesuffix("Error")).lower()

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON-able data, as `--json` prints it; see docs/errors.md."""

        def text(value: object) -> str | None:
            return None if value is None else without_controls(self._said(value))

        return {
            "code": self.kind(),
            "finding": self.code,
            "exit_status": self.exit_status,
            "path": None if self.path is None else without_controls(shown(self.path)),
            "message": text(self.message),
            "expected": text(self.expected),
            "found": text(self.found),
            "advice": text(self.advice),
        }

    def _said(self, value: object) -> str:
        return shown(as_called(str(value)))

    def __str__(self) -> str:
        def said(value: object, most: int = SHOWN_CHARACTERS) -> str:
            return shortened(self._said(value), most)

        text = said(self.message)
        if self.path is not None:
            text = f"{shortened(shown(self.path), SHOWN_PATH)}: {text}"
        if self.expected is not None:
            text += f": expected {said(self.expected)}"
        if self.found is not None:
            text += f"{',' if self.expected is not None else ':'} found {said(self.found)}"
        if self.advice is not None:
            text += f"; {said(self.advice, SHOWN_PATH + SHOWN_CHARACTERS)}"
        return without_controls(" ".join(text.split()))


class about:  # noqa: N801  # a context, named for how it reads
    """Let errors that leave without a path name this one: who finds something wrong need not know in which file."""

    __slots__ = ("path",)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ZckptError) and error.path is None:
            error.path = os.fspath(self.path)


class UsageError(ZckptError, ValueError):
    """An argument or option cannot be used."""

    exit_status = 2


class MissingPackageError(UsageError, ImportError):
    """An optional package that this needs is not installed."""


class SourceError(ZckptError, ValueError):
    """The source cannot be read, is damaged or is unsafe."""

    exit_status = 3


class UnknownFormatError(SourceError):
    """No adapter recognises the source."""


class DamagedFileError(SourceError):
    """A file is truncated, malformed, or its sizes disagree."""


class PickleError(DamagedFileError):
    """A pickle is malformed, or built to exhaust the machine that reads it."""


class UnsupportedError(SourceError):
    """The source is intact, but zckpt cannot do correctly what was asked.

    If another verb does it instead, the advice names that verb.
    """

    exit_status = 5


class ShardError(SourceError):
    """A rank's file is missing, duplicated, or from another step."""


class LayoutError(SourceError):
    """The metadata contradicts itself about where a parameter's elements lie."""


class LeftOutError(SourceError):
    """The source holds something that zckpt does not read, so it would be lost silently.

    Parameters
    ----------
    names : sequence of str
        What would be lost: `FILE`, or `FILE:PLACE`, as `drop` takes them.
    """

    def __init__(
        self,
        message: str,
        *,
        names: Sequence[str] = (),
        path: str | os.PathLike[str] | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message, path=path, advice=advice)
        self.names = tuple(names)


class WeightMismatchError(SourceError):
    """A parameter's master does not round to its model weight."""


class TargetError(ZckptError, OSError):
    """The target cannot be written."""

    exit_status = 4


class TargetExistsError(TargetError, FileExistsError):
    """The target already exists."""


class WorkerError(ZckptError, ConnectionError):
    """Worker processes were lost, cannot be reached, or see other files than the driver does."""

    exit_status = 6


class NotRestoredError(ZckptError, AssertionError):
    """The live model or optimizer is not what the checkpoint holds.

    Parameters
    ----------
    differences : sequence of str
        Each thing that differs, and where; the same on all ranks.
    """

    def __init__(
        self, differences: Sequence[str], *, path: str | os.PathLike[str] | None = None, advice: str | None = None
    ) -> None:
        self.differences = tuple(differences)
        super().__init__(f"not restored: {listed(differences, by='; ')}", path=path, advice=advice)


class Interrupted(KeyboardInterrupt):
    """A signal ended it in order.

    Parameters
    ----------
    said : str
        What is left of it, and what to do.
    signal : int
        Which one.
    """

    came = False
    """Whether a signal has come, and what is done is to be ended: nothing is waited for that may fail."""

    def __init__(self, said: str = "nothing was left behind", *, signal: int = SIGINT) -> None:
        super().__init__(said)
        self.said = said
        self.signal = int(signal)

    @classmethod
    def of(cls, error: KeyboardInterrupt, said: str) -> Interrupted:
        """Return the same interrupt, with what is left."""
        return cls(said, signal=error.signal if isinstance(error, Interrupted) else SIGINT)


def listed(names: Sequence[object], *, most: int = SHOWN_NAMES, by: str = ", ") -> str:
    """Return names as text, those beyond the first `most` counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return by.join(map(str, names[:most])) + more
