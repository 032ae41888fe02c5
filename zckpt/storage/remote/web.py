"""Servers that speak HTTP: those of web pages, and WebDAV's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zckpt.errors import UnsupportedError
from zckpt.state.names import is_number
from zckpt.storage.remote.attempts import ShortBodyError
from zckpt.storage.remote.stores import Listed, Store, changed

ASKED_AT_ONCE = 16
"""Files whose sizes are asked for at once where a listing has none."""

CONNECT_SECONDS, SILENT_SECONDS = 10, 20
"""What a server may take to answer at all, and between two bytes that it sends."""

MOST_FOLDERS = 32
"""In each other: a server that has one page for every name has no end."""


class HttpStore(Store):
    """A web server: a file, or the pages with links that it makes of a directory. For reading."""

    checks_versions = True

    def _open(self) -> tuple[Any, str]:
        from aiohttp import ClientTimeout
        from fsspec.implementations.http import HTTPFileSystem

        root, _, query = self.address.url.partition("#")[0].partition("?")
        timeout = ClientTimeout(total=300, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
        given = {"params": query} if query else {}  # for what lies below, too
        return HTTPFileSystem(asynchronous=False, client_kwargs={"timeout": timeout}, **given), root

    def _find(self) -> Mapping[str, Mapping[str, Any]]:
        self.fs.invalidate_cache()
        if not self.address.url.partition("?")[0].endswith("/"):
            try:
                found = self._info(self.root)
            except FileNotFoundError:  # some servers have a directory under its name with a slash only
                found = {"html": True}
            if not found["html"]:
                return {self.root: found}
        return self._sizes(sorted(self._links(self.root + "/")))

    def _info(self, url: str) -> dict[str, Any]:
        from fsspec.asyn import sync

        found: dict[str, Any] = sync(self.fs.loop, self._head, url)
        return found

    async def _head(self, url: str) -> dict[str, Any]:
        session = await self.fs.set_session()
        headers = {"Accept-Encoding": "identity"}
        async with session.head(
            self.fs.encode_url(url), headers=headers, allow_redirects=True, **self.fs.kwargs
        ) as found:
            if found.status == 404:
                raise FileNotFoundError(url)
            if found.status >= 400:
                raise AnswerError(found.status)
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
            raise UnsupportedError("has directories in directories without an end", path=self.address.shown, found=url,
                                   advice="download it, and read it from there")  # fmt: skip
        for info in self.fs.ls(url, detail=True):
            name: str = info["name"].replace("/./", "/")
            rest = name.removeprefix(url)
            if name == rest or not rest or "?" in rest or "#" in rest or "/" in rest.rstrip("/"):
                continue  # up, elsewhere, or the same in another order
            if rest.endswith("/"):
                yield from self._links(name, depth + 1)
            else:
                yield name

    def _sizes(self, urls: list[str]) -> dict[str, Any]:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return dict(zip(urls, pool.map(self._info, urls), strict=True))

    def _listed(self, key: str, info: Mapping[str, Any], root: str | None = None) -> Listed:
        from urllib.parse import unquote

        found = super()._listed(key, info, root)
        if not info["ranges"]:
            raise UnsupportedError(
                "the server sends whole files only", path="/".join([self.address.shown, *map(unquote, found.parts)]),
                expected="one that answers ranges", advice="download it, and read it from there",
            )  # fmt: skip
        return Listed(tuple(map(unquote, found.parts)), key, found.nbytes, found.version, found.modified)

    def listed_beside(self) -> list[Listed]:
        """Return nothing: who serves one file need not serve lists."""
        return []

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        from fsspec.asyn import sync

        data: bytes = sync(self.fs.loop, self._body, one, offset, nbytes)
        return data

    async def _body(self, one: Listed, offset: int, nbytes: int) -> bytes:
        session = await self.fs.set_session()
        headers = {"Range": f"bytes={offset}-{offset + nbytes - 1}", "Accept-Encoding": "identity"}
        async with session.get(self.fs.encode_url(one.key), headers=headers, **self.fs.kwargs) as found:
            check_range(found.status, found.headers, one, offset)
            data: bytes = await found.read()
            return data


def check_range(status: int, headers: Mapping[str, str], one: Listed, offset: int) -> None:
    """Raise unless an answer is of the range that was asked for, of the version that was listed."""
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
        raise ShortBodyError(f"another range than was asked for: {headers.get('Content-Range')}")


class AnswerError(Exception):
    """A server has answered a request with something else; `status` says what."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}{' to a request for a range' if status == 200 else ''}")
        self.status = 501 if status == 200 else status


class WebdavStore(Store):
    """WebDAV: `webdav://` by http, `webdavs://` by https. User and password of the URL, or fsspec's settings."""

    checks_versions = False

    def _open(self) -> tuple[Any, str]:
        from webdav4.fsspec import WebdavFileSystem

        authority = self.address.url.partition("://")[2].partition("/")[0]
        user, _, password = authority.rpartition("@")[0].partition(":")
        scheme = "https" if self.address.scheme in ("webdavs", "davs") else "http"
        auth = {"auth": (user, password)} if user else {}
        return WebdavFileSystem(f"{scheme}://{self.address.host}", **auth), "/".join(self.address.parts)

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        headers = {"Range": f"bytes={offset}-{offset + nbytes - 1}", "Accept-Encoding": "identity"}
        client = self.fs.client
        found = client.http.request("GET", client.join_url(one.key), headers=headers)
        check_range(found.status_code, found.headers, one, offset)
        data: bytes = found.content
        return data
