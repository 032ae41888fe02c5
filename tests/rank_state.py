"""What a test may leave behind in a rank. Only a rank that is as it was before is used again.

The environment, the working directory and what DeepSpeed knows of its world are put back. What cannot be put back with
certainty is found out: variables of the modules of DeepSpeed and of these tests, threads (an engine of DeepSpeed never
lets go of its process groups, and each has some), children, handlers of signals, limits, settings and hooks of torch,
what it compiled, functions of `torch.distributed` that are not its own, and libraries that keep what they were first
given.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

WATCHED = ("deepspeed.", "tests.")
PUT_BACK = "deepspeed.comm."
LASTING = ("accelerate.state",)
"""Modules that keep what they were first given."""


class State:
    """What a rank is before a test."""

    def __init__(self) -> None:
        self.variables = {module: dict(vars(module)) for module in _watched()}
        self.environment = dict(os.environ)
        self.directory = Path.cwd()
        self.settings = _settings()

    def restored(self) -> bool:
        """Put back what can be put back; whether all is as it was."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        gc.collect()
        changed = [
            (module, name, value)
            for module, variables in self.variables.items()
            for name, value in variables.items()
            if vars(module).get(name) is not value
        ]
        for module, name, value in changed:
            if module.__name__.startswith(PUT_BACK):
                setattr(module, name, value)
        return _settings() == self.settings and all(one.__name__.startswith(PUT_BACK) for one, *_ in changed)


def _watched() -> list[ModuleType]:
    modules = list(sys.modules.items())
    return [module for name, module in modules if name.startswith(WATCHED) and isinstance(module, ModuleType)]


def _settings() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    hooks = vars(torch.nn.modules.module)
    return {
        "threads": {thread for thread in threading.enumerate() if thread.is_alive()},
        "threads of the system": len(list(Path("/proc/self/task").iterdir())),
        "children": len(multiprocessing.active_children()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "limits": [resource.getrlimit(which) for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)],
        "dtype": torch.get_default_dtype(),
        "gradients": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compiled": dict(counters["frames"]),
        "hooks": {name: len(value) for name, value in hooks.items() if name.startswith("_global_") and value},
        "functions": {name: value for name, value in vars(dist).items() if callable(value)},
        "module": {name: value for name, value in vars(torch.nn.Module).items() if callable(value)},
        "lasting": [name for name in LASTING if name in sys.modules],
    }
