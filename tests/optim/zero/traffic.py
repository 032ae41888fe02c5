"""What a rank sends: collectives of `torch.distributed` that take note of their calls before they run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

NAMES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter_tensor")


@dataclass
class Traffic:
    """Calls of collectives, and the events of their work handles, in order."""

    calls: list[tuple[str, int, torch.dtype]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    elements: Counter[str] = field(default_factory=Counter)
    """Of gradients and weights, by collective. Norms and flags have no dimensions, or are integers."""

    def of(self, *names: str) -> list[tuple[str, int, torch.dtype]]:
        return [call for call in self.calls if call[0] in names]

    @property
    def reductions(self) -> list[tuple[str, int, torch.dtype]]:
        """Those of gradients; norms and flags are single numbers."""
        return [call for call in self.of("all_reduce", "reduce") if call[1] > 1]


class Noted:
    """A work handle whose waits are noted."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self, *args: Any) -> Any:
        self.events.append("wait")
        return self.work.wait(*args)


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Take note of what this rank sends meanwhile."""
    seen = Traffic()
    real = {name: getattr(dist, name) for name in NAMES}

    def noting(name: str) -> Callable[..., Any]:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            work = real[name](tensor, *args, **kwargs)
            if not isinstance(tensor, torch.Tensor):
                return work
            seen.calls.append((name, tensor.numel(), tensor.dtype))
            if tensor.is_floating_point() and tensor.dim():
                seen.elements[name] += tensor.numel()
            if tensor.numel() == 1 or name == "broadcast":
                return work
            seen.events.append("send")
            return Noted(work, seen.events)

        return call

    with contextlib.ExitStack() as kept:
        for name in NAMES:
            kept.callback(setattr, dist, name, real[name])
            setattr(dist, name, noting(name))
        yield seen
