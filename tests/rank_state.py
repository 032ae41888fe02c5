"""What a test may leave behind in a rank. Only a rank that is as it was before is used again.

The environment, the working directory, and what DeepSpeed and Accelerate leave in their modules and in torch's
functions are put back. What cannot be put back with certainty is found out: variables of these tests, threads (a
process group that something still holds has some), children, handlers of signals, limits, settings and hooks of torch,
what it compiled, and functions of `torch.distributed` that are not its own.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import resource
import signal
import sys
import threading
from operator import is_
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

WATCHED = "tests."
PUT_BACK = ("deepspeed.", "accelerate.", "transformers.integrations.deepspeed.", "torch.nn.functional.")
"""ZeRO-3 leaves a `linear` of its own in the last; what else trainings change is in the modules of what trains."""
OF_TRANSFORMERS = "smart_apply"
"""A method of modules that Transformers adds, again for each model."""
THREADS = "threads of the system"
MOST_THREADS = 128
"""ZeRO-3's engine is not let go of, and has two threads for each process group, which then do nothing."""


class State:
    """What a rank is before a test."""

    def __init__(self) -> None:
        self.variables: dict[ModuleType, dict[str, Any]] = {}
        self.kept: dict[object, dict[str, Any]] = {}
        self.contents: dict[int, tuple[Any, Any]] = {}
        self.environment = dict(os.environ)
        self.directory = Path.cwd()
        self.settings: dict[str, Any] = {}
        self._known: dict[str, Any] = {}

    def learn(self) -> None:
        """Take in what was imported since, before a test."""
        self.settings = _settings()
        modules = dict(sys.modules)
        if all(map(is_, map(self._known.get, modules), modules.values())):
            return
        for name, module in modules.items():
            if self._known.get(name) is module:
                continue
            self._known[name] = module
            if not isinstance(module, ModuleType) or module in self.variables or module in self.kept:
                continue
            if name.startswith(WATCHED):
                self.variables[module] = dict(vars(module))
            elif f"{name}.".startswith(PUT_BACK):
                self._keep(module)
                for one in self.kept[module].values():
                    if isinstance(one, type) and one.__module__ == name:
                        self._keep(one)

    def _keep(self, owner: object) -> None:
        """Keep the variables of a module or class, and what is in them and in defaults of functions that can change."""
        self.kept[owner] = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
        for value in self.kept[owner].values():
            function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
            for one in (value, *(getattr(function, "__defaults__", None) or ())):
                if isinstance(one, (dict, list, set)):
                    self.contents[id(one)] = one, one.copy()

    def _put_back(self) -> None:
        for owner, variables in self.kept.items():
            now = vars(owner).get
            if all(map(is_, map(now, variables), variables.values())):
                continue
            for name, value in [item for item in variables.items() if now(item[0]) is not item[1]]:
                setattr(owner, name, value)
        for value, before in self.contents.values():
            if isinstance(value, list):
                value[:] = before
            else:
                value.clear()
                value.update(before)

    def restored(self) -> bool:
        """Put back what can be put back; whether all is as it was."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        self._put_back()
        _let_go_of_engines()
        gc.collect()
        gc.collect()  # what tensors held, which torch lets go of after Python does
        changed = any(
            vars(module).get(name) is not value
            for module, variables in self.variables.items()
            for name, value in variables.items()
        )
        now = _settings()
        if self.settings[THREADS] < now[THREADS] < MOST_THREADS and _engines():
            now[THREADS] = self.settings[THREADS]
        gc.freeze()  # what is left of engines that are not let go of is not looked through again and again
        return now == self.settings and not changed


def _let_go_of_engines() -> None:
    """Take away the hooks by which parameters hold DeepSpeed's optimizers, and these their process groups, for ever."""
    for one in _engines():
        for hook in getattr(one, "_grad_acc_hooks", ()):
            hook.remove()


def _engines() -> list[Any]:
    """What there is of DeepSpeed's engines, and of what they are made of."""
    return [one for one in gc.get_objects() if type(one).__module__.startswith("deepspeed.runtime.")]


def _settings() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    hooks = vars(torch.nn.modules.module)
    return {
        "threads": {thread for thread in threading.enumerate() if thread.is_alive()},
        THREADS: len(list(Path("/proc/self/task").iterdir())),
        "children": len(multiprocessing.active_children()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "limits": [resource.getrlimit(which) for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)],
        "dtype": torch.get_default_dtype(),
        "gradients": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compiled": dict(counters["frames"]),
        "hooks": {name: len(value) for name, value in hooks.items() if name.startswith("_global_") and value},
        "functions": {name: value for name, value in vars(dist).items() if callable(value)},
        "module": {
            name: value for name, value in vars(torch.nn.Module).items() if callable(value) and name != OF_TRANSFORMERS
        },
    }
