"""URLs: what of them is shown, and where below a directory a file of that URL has its name."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from zckpt.errors import UsageError, shown
from zckpt.immutable import immutable

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://")

_OF_WEB = frozenset({"http", "https"})
"""Schemes whose paths are written with per cent signs, and may have a query."""


def is_url(text: object) -> bool:
    """Tell whether this is a URL, and not the name of a local file."""
    return isinstance(text, str) and _URL.match(text) is not None


@immutable
class Address:
    """A URL, taken apart."""

    scheme: str
    host: str  # or bucket, or container; without a user's name and password
    parts: tuple[str, ...]  # of the path, as names
    url: str  # all of it, with what must not be shown

    @property
    def credentials(self) -> tuple[str, str]:
        """User and password of the URL, in which other characters are written with per cent signs."""
        authority = self.url.partition("://")[2].partition("/")[0]
        user, _, password = authority.rpartition("@")[0].partition(":")
        return unquote(user), unquote(password)

    @property
    def shown(self) -> str:
        """The URL without credentials: no user, password or query."""
        return "/".join([f"{self.scheme}://{self.host}", *self.parts])


def address_of(url: str) -> Address:
    """Take a URL apart.

    Raises UsageError: it names nothing that zckpt could go to.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if "::" in scheme or "::" in rest:
        raise UsageError("chained URLs are not supported", path=url, advice="give the store's own URL")
    if scheme in _OF_WEB:
        split = urlsplit(url)
        authority, path = split.netloc, unquote(split.path)
    else:
        authority, _, path = rest.partition("/")
    parts = tuple(part for part in path.split("/") if part)
    host = authority.rpartition("@")[2]
    if not host or any(part in (".", "..") or "\0" in part for part in parts):
        raise UsageError("no such place", path=url, expected="SCHEME://HOST/PATH, or SCHEME://BUCKET/KEY")
    return Address(scheme, host, parts, url)


_HEADER = re.compile(
    r"(?i)\b(authorization|signature|credential|token|secret|password)\b([\'\"]?\s*[:=]\s*[\'\"]?)[^\s,\'\"&]+"
)


def without_secrets(text: str) -> str:
    """Return what a store's library says without users, passwords, queries and signatures."""
    return _HEADER.sub(r"\1\2...", shown(text))
