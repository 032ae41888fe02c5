"""SFTP, through fsspec and paramiko."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from zckpt.storage.remote.addresses import Address
from zckpt.storage.remote.attempts import attempt
from zckpt.storage.remote.stores import Listed, Store

CHANNELS = 6
"""Of one SFTP connection; servers allow ten by default."""

SILENT_SECONDS = 20
"""Without a byte from the server, after which something is asked for again."""


class SftpStore(Store):
    """SFTP. A channel of its connection answers one thread at a time; there are a few."""

    settings: ClassVar = {"timeout": 10}

    def __init__(self, address: Address) -> None:
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()
        self._channels = threading.BoundedSemaphore(CHANNELS)
        super().__init__(address)

    def _open(self) -> tuple[Any, str]:
        self._idle = queue.LifoQueue()  # of another process, if there were any
        self._channels = threading.BoundedSemaphore(CHANNELS)
        fs, root = attempt(super()._open, self.address.shown)
        fs.ftp.get_channel().settimeout(SILENT_SECONDS)
        return fs, root

    @contextmanager
    def channel(self) -> Iterator[Any]:
        """Yield a channel that nobody else uses; one that has failed is not used again."""
        fs = self.fs
        with self._channels:
            try:
                one = self._idle.get_nowait()
            except queue.Empty:
                one = fs.client.open_sftp()
                one.get_channel().settimeout(SILENT_SECONDS)
            yield one
            self._idle.put(one)

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        with self.channel() as channel, channel.open(one.key, "rb") as file:
            return b"".join(file.readv([(offset, nbytes)]))
