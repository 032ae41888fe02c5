"""Servers that speak HTTP: those of web pages, and WebDAV's."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from zckpt.errors import UnsupportedError
from zckpt.state.names import is_number
from zckpt.storage.remote.attempts import ShortBodyError
from zckpt.storage.remote.fsspec_stores import FsspecStore
from zckpt.storage.remote.stores import Entries, Listed, Store, changed

ASKED_AT_ONCE = 16
"""Files whose sizes are asked for at once where a listing has none."""

CONNECT_SECONDS, SILENT_SECONDS = 10, 20
"""What a server may take to answer at all, and between two bytes that it sends."""

MOST_FOLDERS = 32
"""In each other: a server that has one page for every name has no end."""

_AS_IT_IS = {"Accept-Encoding": "identity"}

_LINK = re.compile(r"""<a\s[^>]*?href=["']([^"']+)|(https?://[-\w@:%+.~#?&/=]+)""", re.IGNORECASE)


class HttpStore(Store):
    """A web server: a file, or the pages with links that it makes of a directory. For reading."""

    checks_versions = True

    def _open(self) -> tuple[Any, str]:
        import httpx

        root, _, query = self.address.url.partition("#")[0].partition("?")
        self._query = f"?{query}" if query else ""  # for what lies below, too
        timeout = httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
        return httpx.Client(timeout=timeout, headers=_AS_IT_IS, follow_redirects=True), root

    def _find(self) -> Entries:
        if not self.address.url.partition("?")[0].endswith("/"):
            found = self._info(self.root)
            if found is not None and not found["html"]:
                return {self.root: found}  # else a directory: some servers have it under its name with a slash only
        from concurrent.futures import ThreadPoolExecutor

        urls = sorted(self._links(self.root + "/"))
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            every = zip(urls, pool.map(self._info, urls), strict=True)
            return {url: info for url, info in every if info is not None}

    def close(self) -> None:
        """Close all connections."""
        self.client.close()

    def _beside(self, folder: str) -> Entries:  # noqa: ARG002
        return {}  # who serves one file need not serve lists

    def _info(self, url: str) -> dict[str, Any] | None:
        found = self.client.head(url + self._query)
        if found.status_code == 404:
            return None
        if found.status_code >= 400:
            raise AnswerError(found.status_code)
        size, version = found.headers.get("Content-Length"), found.headers.get("ETag")
        return {
            "html": "html" in found.headers.get("Content-Type", ""),
            "size": int(size) if size and is_number(size) else None,
            "etag": version or found.headers.get("Last-Modified"),
            "ranges": found.headers.get("Accept-Ranges") != "none",
        }

    def _links(self, url: str, depth: int = 0) -> Iterator[str]:
        """Yield the files that pages link to, below a URL that ends in a slash."""
        if depth > MOST_FOLDERS:
            raise UnsupportedError("has an endless chain of directories", path=self.address.shown, found=url,
                                   advice="download it, and read the copy")  # fmt: skip
        page = self.client.get(url + self._query)
        if page.status_code >= 400:
            raise AnswerError(page.status_code)
        is_page = "html" in page.headers.get("Content-Type", "html")
        links = {urljoin(url, html.unescape(one[0] or one[1])) for one in _LINK.findall(page.text)} if is_page else ()
        for name in links:
            rest = name.removeprefix(url)
            if name == rest or not rest or "?" in rest or "#" in rest or "/" in rest.rstrip("/"):
                continue  # up, elsewhere, or the same in another order
            if rest.endswith("/"):
                yield from self._links(name, depth + 1)
            else:
                yield name

    def _name(self, key: str) -> str:
        return unquote(key)

    def _listed(self, key: str, info: Mapping[str, Any], root: str | None = None) -> Listed:
        found = super()._listed(key, info, root)
        if not info["ranges"]:
            raise UnsupportedError(
                "the server only sends whole files", path="/".join([self.address.shown, *found.parts]),
                expected="a server that supports ranges", advice="download it, and read the copy",
            )  # fmt: skip
        return found

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        return _fetched(self.client, one.key + self._query, one, offset, nbytes)


def _fetched(client: Any, url: Any, one: Listed, offset: int, nbytes: int) -> bytes:  # noqa: ANN401  # httpx's
    """Return a range of what a URL is of. Raise unless it is that which was asked for, of the version listed."""
    found = client.get(url, headers={"Range": f"bytes={offset}-{offset + nbytes - 1}", **_AS_IT_IS})
    status, headers = found.status_code, found.headers
    if status in (404, 410):
        raise changed(one.key)
    if status != 206:
        raise AnswerError(status)
    size, etag = headers.get("Content-Range", "").partition("/")[2], headers.get("ETag")
    if is_number(size) and int(size) != one.nbytes:
        raise changed(one.key)
    if one.version and one.version not in (etag, headers.get("Last-Modified"), (etag or "").strip('"')):
        raise changed(one.key)
    if not headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
        raise ShortBodyError(f"the server sent another range than requested: {headers.get('Content-Range')}")
    data: bytes = found.content
    return data


class AnswerError(Exception):
    """A server has answered a request with something else; `status` says what."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}{' to a request for a range' if status == 200 else ''}")
        self.status = 501 if status == 200 else status


class WebdavStore(FsspecStore):
    """WebDAV: `webdav://` by http, `webdavs://` by https. User and password of the URL, or fsspec's settings."""

    moves_folders = True

    def _open(self) -> tuple[Any, str]:
        from webdav4.fsspec import WebdavFileSystem

        user, password = self.address.credentials
        scheme = "https" if self.address.scheme in ("webdavs", "davs") else "http"
        auth = {"auth": (user, password)} if user else {}
        return WebdavFileSystem(f"{scheme}://{self.address.host}", **auth), "/".join(self.address.parts)

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        client = self.client.client
        return _fetched(client.http, client.join_url(one.key), one, offset, nbytes)

    def _write(self, key: str, nbytes: int, parts: Iterable[bytearray]) -> None:
        client = self.client.client
        headers = {"Content-Length": str(nbytes)}
        found = client.http.request("PUT", client.join_url(key), content=map(bytes, parts), headers=headers)
        found.raise_for_status()

    def move(self, one: str, other: str) -> None:
        """As for any; the server replaces what is there."""
        self.client.client.move(one, other, overwrite=True)
