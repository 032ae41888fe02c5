"""One server of each kind for all tests of a worker, each on a directory of its own, and S3 behind a proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.storage.remote.servers import PASSWORD, USER, Proxy, proxied, serving


@dataclass(frozen=True)
class Served:
    """A directory, and the URL under which a server has it."""

    directory: Path
    url: str
    port: int


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Start a server when it is first asked for."""
    found: dict[str, Served] = {}
    with ExitStack() as stack:

        def get(kind: str) -> Served:
            if kind not in found:
                root = tmp_path_factory.mktemp(kind)
                directory = root / "bucket"
                directory.mkdir()
                port = stack.enter_context(serving(kind, root))
                user = f"{USER}:{PASSWORD}@" if kind in ("sftp", "webdav") else ""
                url = "s3://bucket" if kind == "s3" else f"{kind}://{user}127.0.0.1:{port}/bucket"
                found[kind] = Served(directory, url, port)
            return found[kind]

        yield get


@pytest.fixture(scope="session")
def s3_proxy(served: Callable[[str], Served]) -> Iterator[Proxy]:
    with proxied(served("s3").port) as proxy:
        yield proxy


@pytest.fixture
def s3(served: Callable[[str], Served], s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """S3, through a proxy that does nothing until it is told to."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", USER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PASSWORD)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3_proxy.requests.clear()
    yield served("s3")
    s3_proxy.fault = lambda _method, _path: None
    s3_proxy.before = lambda _method, _path: None
