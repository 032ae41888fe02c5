"""Requests that fail for a moment are made again: which failures those are, how often, and after how long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from zckpt.errors import SourceError, TargetError, ZckptError
from zckpt.storage.remote.addresses import without_secrets

Result = TypeVar("Result")

ATTEMPTS = 7
"""Of one request: the pauses between them add up to about half a minute."""

FIRST_PAUSE = 0.25
"""Seconds before the second attempt, on average; each further one waits twice as long, up to `LONGEST_PAUSE`."""

LONGEST_PAUSE = 10.0

_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError,
          NotImplementedError, TypeError, AttributeError, KeyError, MemoryError)  # fmt: skip
"""What another attempt would not change."""

_FINAL_STATUS = frozenset({400, 401, 403, 404, 405, 409, 410, 411, 412, 413, 416, 501})


class ShortBodyError(Exception):
    """A store has sent another number of bytes than were asked for."""


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
    pause = FIRST_PAUSE
    for left in reversed(range(ATTEMPTS)):
        try:
            return function()
        except ZckptError:
            raise
        except Exception as error:  # every store's library has its own
            if left == 0 or not passes(error):
                raise failed(error, shown, writing=writing) from error
        time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  # so that workers do not come back all at once
        pause = min(2 * pause, LONGEST_PAUSE)
    raise AssertionError


def passes(error: BaseException) -> bool:
    """Tell whether a failure may be over in a moment."""
    if isinstance(error, _FINAL):
        return False
    return status_of(error) not in _FINAL_STATUS


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that a library's error carries, if it is one of HTTP."""
    for one in (error, error.__cause__):  # s3fs raises its own from botocore's
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(found, int):
                return found
    response = getattr(error, "response", None)
    for holder, name in ((error, "status"), (error, "status_code"), (error, "code"), (response, "status_code")):
        found = getattr(holder, name, None)
        if isinstance(found, int):
            return found
    return None


def failed(error: BaseException, shown: str, *, writing: bool) -> ZckptError:
    """Return what a user reads of a failure of a store's library: no credentials, one line."""
    advice = None
    if isinstance(error, PermissionError) or status_of(error) in (401, 403) or "redentials" in str(error):
        advice = "the store's own settings say who you are; docs/remote.md lists them"
    kind = TargetError if writing else SourceError
    message = "cannot be written" if writing else "cannot be read"
    if isinstance(error, FileNotFoundError):
        return kind(message, path=shown, found="nothing there")
    what = without_secrets(" ".join(str(error).split())) or "no reason given"
    return kind(message, path=shown, found=f"{type(error).__name__}: {what}", advice=advice)
