"""Requests that fail for a moment are made again: which failures those are, how often, and after how long."""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from zckpt.errors import Interrupted, SourceError, TargetError, ZckptError
from zckpt.storage.remote.addresses import without_secrets

Result = TypeVar("Result")

ATTEMPTS = 7
"""Of one request: the pauses between them add up to about half a minute."""

FIRST_PAUSE = 0.25
"""Seconds before the second attempt, on average; each further one waits twice as long, up to `LONGEST_PAUSE`."""

LONGEST_PAUSE = 10.0

PATIENCE_SECONDS = 60.0
"""No attempt begins later, of a request that waits long for each."""

UNKNOWN_SECONDS = 3.0
"""The same, of a server that has never answered: it is not there, as a rule, or has another name."""

GONE_SECONDS = 60.0
"""After all attempts have failed, a server's further requests are made once each: who tidies up need not wait again."""

TOLD_SECONDS = 5.0
"""After which a user hears that something is waited for."""

_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError,
          NotImplementedError, TypeError, AttributeError, KeyError, MemoryError)  # fmt: skip
"""What another attempt would not change."""

_FINAL_NAMES = frozenset({"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ValueError"})
"""Nor of these: ValueError itself is of settings, and classes derived from it are of answers that were cut, too."""

_ENDPOINT = re.compile(r"(endpoint URL: \"\w+://[^/\"]+)[^\"]*")
"""Where botocore names a key, which may be none that a user knows."""

_FINAL_STATUS = frozenset({400, 401, 403, 404, 405, 409, 410, 411, 412, 413, 416, 501})


class ShortBodyError(Exception):
    """A store has sent another number of bytes than were asked for."""


@dataclass
class _Server:
    """What is known of who answers: whether it ever has, until when it counts as gone, whether a user was told."""

    answers: bool = False
    gone_until: float = 0.0
    is_told: bool = False


_SERVERS: dict[str, _Server] = {}
"""By scheme and host, or bucket."""


def attempt(function: Callable[[], Result], shown: str, *, writing: bool = False) -> Result:
    """Return what a request returns, which is made again where its failure may pass.

    Parameters
    ----------
    function : callable
        Makes the request; doing so twice must do no harm.
    shown : str
        The URL concerned, for messages.
    writing : bool
        Whether what fails is a target, else a source.

    Raises
    ------
    SourceError, TargetError
        It fails for good, or every time.
    """
    name = "/".join(shown.split("/")[:3])
    server = _SERVERS.setdefault(name, _Server())
    begun, pause = time.monotonic(), FIRST_PAUSE
    for number in range(1, ATTEMPTS + 1):
        try:
            found = function()
        except (ZckptError, ImportError):
            raise
        except Exception as error:  # every store's library has its own
            server.answers |= status_of(error) is not None
            if not passes(error):
                raise failed(error, shown, writing=writing) from error
            now, patience = time.monotonic(), PATIENCE_SECONDS if server.answers else UNKNOWN_SECONDS
            is_late = number == ATTEMPTS or (number > 1 and now + pause > begun + patience)
            if is_late or now < server.gone_until or Interrupted.came:
                server.gone_until = now + GONE_SECONDS
                raise failed(error, shown, writing=writing, tried=(number, now - begun)) from error
            if now > begun + TOLD_SECONDS and not server.is_told:
                server.is_told = True
                warnings.warn(f"waiting for {name}: {_told(error)}", stacklevel=2)
        else:
            server.answers, server.gone_until, server.is_told = True, 0.0, False
            return found
        time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  # so that workers do not come back all at once
        pause = min(2 * pause, LONGEST_PAUSE)
    raise AssertionError


def passes(error: BaseException) -> bool:
    """Tell whether a failure may be over in a moment."""
    if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES:
        return False
    return status_of(error) not in _FINAL_STATUS


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that a library's error carries, if it is one of HTTP."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return response if isinstance(response, int) else None
    for holder, name in ((error, "status"), (error, "status_code"), (error, "code"), (response, "status_code")):
        found = getattr(holder, name, None)
        if isinstance(found, int):
            return found
    return None


def failed(error: BaseException, shown: str, *, writing: bool, tried: tuple[int, float] = (1, 0)) -> ZckptError:
    """Return what a user reads of a failure of a store's library, `tried` so often in so many seconds: one line."""
    advice = None
    if isinstance(error, PermissionError) or status_of(error) in (401, 403) or "redentials" in str(error):
        advice = "the store's own settings say who you are; docs/remote.md lists them"
    elif "to a request for a range" in str(error):
        advice = "use a server that answers range requests (`rclone serve http` does, `python -m http.server` does not)"
    kind = TargetError if writing else SourceError
    message = "cannot be written" if writing else "cannot be read"
    if isinstance(error, FileNotFoundError) or status_of(error) == 404:
        return kind(message, path=shown, found="nothing there")
    often = f" (asked {tried[0]} times in {tried[1]:.0f} s)" if tried[0] > 1 else ""
    return kind(message, path=shown, found=_told(error) + often, advice=advice)


def _told(error: BaseException) -> str:
    text = _ENDPOINT.sub(r"\1", without_secrets(" ".join(str(error).split())))
    name = type(error).__name__
    return f"{name}: {text or ('no answer in time' if 'Timeout' in name else 'no reason given')}"
