"""S3, and what speaks as it does, through s3fs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from zckpt.storage.remote.addresses import Address
from zckpt.storage.remote.attempts import status_of
from zckpt.storage.remote.stores import Listed, Store, changed

CONNECTIONS = 32
"""Open at once to one store; as many requests are under way at most."""


def _settings() -> tuple[tuple[str, str], ...]:
    """Return what the environment says of who we are, and where S3 is."""
    return tuple(sorted((key, value) for key, value in os.environ.items() if key.startswith(("AWS_", "FSSPEC_"))))


@lru_cache(maxsize=4)
def _file_system(_pid: int, _environment: tuple[tuple[str, str], ...]) -> Any:  # noqa: ANN401  # fsspec has no types
    """Return one for each process and each environment, with its connections; opening one takes a while."""
    import s3fs
    from botocore.config import Config

    config: dict[str, Any] = {"max_pool_connections": CONNECTIONS, "retries": {"total_max_attempts": 1}}
    if hasattr(Config, "OPTION_DEFAULTS") and "response_checksum_validation" in Config.OPTION_DEFAULTS:
        config["response_checksum_validation"] = "when_required"  # some servers send that of the object with a range
    found = s3fs.S3FileSystem(config_kwargs=config, skip_instance_cache=True)
    found.retries = 1  # `attempt` makes them
    return found


class S3Store(Store):
    """S3, and what speaks as it does. Every range is asked for of the version that was listed, by its ETag."""

    checks_versions = True

    def __init__(self, address: Address) -> None:
        self._asking = threading.Lock()
        self._copies: bool | None = None
        super().__init__(address)

    def _open(self) -> tuple[Any, str]:
        return _file_system(os.getpid(), _settings()), "/".join([self.address.host, *self.address.parts])

    def _find(self) -> Mapping[str, Mapping[str, Any]]:
        self.fs.invalidate_cache()
        found: Mapping[str, Mapping[str, Any]] = self.fs.find(self.root, detail=True)
        return found

    def same_as(self, other: S3Store) -> bool:
        """Tell whether the other is the same server, and who we are there: it copies from one to the other."""
        return self.fs is other.fs

    def copies(self, ask: Callable[[], bool]) -> bool:
        """Tell whether it makes parts of ranges of its objects; `ask` finds out, and is called once."""
        with self._asking:
            if self._copies is None:
                self._copies = ask()
            return self._copies

    def call(self, method: str, **arguments: object) -> Any:  # noqa: ANN401  # what botocore returns
        """Make one request; errors are those of s3fs."""
        from fsspec.asyn import sync

        return sync(self.fs.loop, self.fs._call_s3, method, **arguments)

    def place(self, key: str) -> dict[str, str]:
        """Return the bucket and key of what s3fs calls `key`."""
        bucket, _, rest = key.partition("/")
        return {"Bucket": bucket, "Key": rest}

    def _remove(self, key: str) -> None:
        self.call("delete_object", **self.place(key))

    def remove_folder(self, key: str) -> None:
        """Do nothing: there are objects only."""

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        from fsspec.asyn import sync

        data: bytes = sync(self.fs.loop, self._body, one, offset, nbytes)
        return data

    async def _body(self, one: Listed, offset: int, nbytes: int) -> bytes:
        etag = one.version.strip('"')
        try:
            found = await self.fs._call_s3(
                "get_object", self.fs.req_kw, **self.place(one.key),
                Range=f"bytes={offset}-{offset + nbytes - 1}", IfMatch=f'"{etag}"',
            )  # fmt: skip
        except Exception as error:
            if is_precondition(error):
                raise changed(one.key) from error
            raise
        async with found["Body"] as body:
            if found.get("ETag", etag).strip('"') != etag:  # of servers that do not know If-Match
                raise changed(one.key)
            data: bytes = await body.read()
            return data


def is_precondition(error: BaseException) -> bool:
    """Tell whether a request was refused since an object is another one by now."""
    return status_of(error) == 412 or "PreconditionFailed" in str(error) or "pre-conditions" in str(error)
