"""One server of each kind for all tests of a worker, each on a directory of its own, and S3 behind a proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.storage.remote.servers import PASSWORD, USER, Proxy, proxied, serving
from zckpt.storage.remote import attempts


@pytest.fixture(autouse=True)
def hurried(monkeypatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.01)


@dataclass(frozen=True)
class Served:
    """A directory, and the URL under which a server has it."""

    directory: Path
    url: str
    port: int


@pytest.fixture(scope="session")
def served(tmp_path_factory) -> Iterator[Callable[[str], Served]]:
    """Start a server when it is first asked for."""
    found: dict[str, Served] = {}
    with ExitStack() as stack:

        def get(kind: str) -> Served:
            if kind not in found:
                root = tmp_path_factory.mktemp(kind)
                directory = root / "bucket"
                directory.mkdir()
                port = stack.enter_context(serving(kind, root))
                scheme = kind.partition("-")[0]
                user = f"{USER}:{PASSWORD}@" if scheme in ("sftp", "webdav") else ""
                url = "s3://bucket" if scheme == "s3" else f"{scheme}://{user}127.0.0.1:{port}/bucket"
                found[kind] = Served(directory, url, port)
            return found[kind]

        yield get


@pytest.fixture(scope="session")
def proxies(served) -> Iterator[Callable[[str], Proxy]]:
    """Start a proxy of a server when it is first asked for."""
    found: dict[str, Proxy] = {}
    with ExitStack() as stack:

        def get(kind: str) -> Proxy:
            if kind not in found:
                found[kind] = stack.enter_context(proxied(served(kind).port))
            return found[kind]

        yield get


@pytest.fixture
def s3_kind() -> str:
    """Which server S3 is; a module that writes has another one."""
    return "s3"


@pytest.fixture
def s3_proxy(proxies, s3_kind) -> Proxy:
    return proxies(s3_kind)


@pytest.fixture
def s3(served, s3_proxy, s3_kind, monkeypatch) -> Iterator[Served]:
    """S3, through a proxy that does nothing until it is told to."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", USER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PASSWORD)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3_proxy.requests.clear()
    yield served(s3_kind)
    s3_proxy.mend()


def store(url: str) -> Any:
    from zckpt.storage.remote.addresses import address_of
    from zckpt.storage.remote.schemes import store_of

    return store_of(address_of(url))


def unfinished() -> list[Any]:
    """The uploads in S3 that are not at their end."""
    found: list[Any] = store("s3://bucket/x").call("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
    return found
