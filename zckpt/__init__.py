"""zckpt: open, inspect, consolidate, reshard and convert the checkpoints of sharded optimizers; runs no pickle.

    import zckpt

    checkpoint = zckpt.open("run/global_step500")         # any format; reads structure only
    checkpoint.parameters["wte.weight"].shape
    checkpoint.read("wte.weight", "exp_avg")               # a torch.Tensor; reads only those bytes
    zckpt.inspect(checkpoint)                              # what is in it, as JSON-able data
    zckpt.consolidate("run/global_step500", "model.safetensors")
    zckpt.reshard("run/global_step500", "run6/global_step500", world_size=6)
    zckpt.convert("run/global_step500", "dcp", to="dcp")
    zckpt.strip("run/global_step500", "small", optimizer=True)

    zckpt.save("run/step7", model=model, optimizer=optimizer, step=7)      # in training, on every rank
    zckpt.load("run/step7", model=model, optimizer=optimizer)              # any format, at any number of ranks

The names below are the whole public face; they are loaded when first used, so that importing zckpt is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from zckpt.version import __version__

if TYPE_CHECKING:
    from zckpt.errors import (
        DamagedFileError,
        LayoutError,
        PickleError,
        ShardError,
        SourceError,
        TargetError,
        TargetExistsError,
        UnknownFormatError,
        UnsupportedError,
        UsageError,
        WeightMismatchError,
        ZckptError,
    )
    from zckpt.opened import OpenedCheckpoint, open  # noqa: A004
    from zckpt.operations.consolidate import Consolidated, consolidate
    from zckpt.operations.convert import Converted, convert
    from zckpt.operations.inspect import inspect
    from zckpt.operations.reshard import Resharded, reshard
    from zckpt.operations.strip import Stripped, strip
    from zckpt.state import Checkpoint, Extent, Parameter, ParamGroup, Scalar, Slot, Span, Topology
    from zckpt.training import Checkpointer, Restored, Saving, load, save


_HOMES = {
    "zckpt.opened": ("OpenedCheckpoint", "open"),
    "zckpt.operations.consolidate": ("Consolidated", "consolidate"),
    "zckpt.operations.convert": ("Converted", "convert"),
    "zckpt.operations.inspect": ("inspect",),
    "zckpt.operations.reshard": ("Resharded", "reshard"),
    "zckpt.operations.strip": ("Stripped", "strip"),
    "zckpt.training": ("Checkpointer", "Restored", "Saving", "load", "save"),
    "zckpt.state": ("Checkpoint", "Extent", "ParamGroup", "Parameter", "Scalar", "Slot", "Span", "Topology"),
    "zckpt.errors": (
        "DamagedFileError",
        "LayoutError",
        "PickleError",
        "ShardError",
        "SourceError",
        "TargetError",
        "TargetExistsError",
        "UnknownFormatError",
        "UnsupportedError",
        "UsageError",
        "WeightMismatchError",
        "ZckptError",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Consolidated",
    "Converted",
    "DamagedFileError",
    "Extent",
    "LayoutError",
    "OpenedCheckpoint",
    "ParamGroup",
    "Parameter",
    "PickleError",
    "Resharded",
    "Restored",
    "Saving",
    "Scalar",
    "ShardError",
    "Slot",
    "SourceError",
    "Span",
    "Stripped",
    "TargetError",
    "TargetExistsError",
    "Topology",
    "UnknownFormatError",
    "UnsupportedError",
    "UsageError",
    "WeightMismatchError",
    "ZckptError",
    "__version__",
    "consolidate",
    "convert",
    "inspect",
    "load",
    "open",
    "reshard",
    "save",
    "strip",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'zckpt' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
