"""Gradients on their way to where they are accumulated: in place, or from a GPU into pinned memory of its host.

Copies off a GPU run on a stream of their own, while backward goes on.
"""

from __future__ import annotations

import torch


class Deliveries:
    """Copies of reduced gradients into the partitions they are accumulated in."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._under_way: set[torch.device] = set()

    def deliver(self, received: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
        """Copy reduced gradients into a partition, or add them there.

        Parameters
        ----------
        received : Tensor, (n,)
            May be overwritten only after `stream_of` its device has been waited for, or `finish`.
        into : Tensor, (n,)
        add : bool
        """
        if received.device == into.device:
            if add:
                into.add_(received.to(into.dtype))
            else:
                into.copy_(received)
            return
        if not add and received.dtype == into.dtype:
            self._copy(received, into)
            return
        staged = torch.empty(received.shape, dtype=received.dtype, pin_memory=True)
        self._copy(received, staged)
        if not add:
            into.zero_()
        self._staged.append((staged, into))

    def _copy(self, received: torch.Tensor, into: torch.Tensor) -> None:
        device = received.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            into.copy_(received, non_blocking=True)
        received.record_stream(stream)
        self._under_way.add(device)

    def before_reuse(self, device: torch.device) -> None:
        """Let a device's current stream wait until what was sent from it has been read."""
        if device in self._under_way:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    def finish(self) -> None:
        """Wait for all copies and add what had to be added."""
        for device in self._under_way:
            self._streams[device].synchronize()
        self._under_way.clear()
        for staged, into in self._staged:
            into.add_(staged.to(into.dtype))
        self._staged.clear()
