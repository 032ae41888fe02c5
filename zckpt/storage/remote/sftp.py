"""SFTP, through fsspec and paramiko."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zckpt.storage.remote.addresses import Address
from zckpt.storage.remote.stores import Listed, Store

CHANNELS = 6
"""Of one SFTP connection; servers allow ten by default."""


class SftpStore(Store):
    """SFTP. A channel of its connection answers one thread at a time; there are a few."""

    def __init__(self, address: Address) -> None:
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()
        self._channels = threading.BoundedSemaphore(CHANNELS)
        super().__init__(address)

    def _open(self) -> tuple[Any, str]:
        self._idle = queue.LifoQueue()  # of another process, if there were any
        self._channels = threading.BoundedSemaphore(CHANNELS)
        return super()._open()

    @contextmanager
    def channel(self) -> Iterator[Any]:
        """Yield a channel that nobody else uses; one that has failed is not used again."""
        fs = self.fs
        with self._channels:
            try:
                one = self._idle.get_nowait()
            except queue.Empty:
                one = fs.client.open_sftp()
            yield one
            self._idle.put(one)

    def _fetch(self, one: Listed, offset: int, nbytes: int) -> bytes:
        with self.channel() as channel, channel.open(one.key, "rb") as file:
            return b"".join(file.readv([(offset, nbytes)]))
