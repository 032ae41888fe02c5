"""zckpt: open, inspect, consolidate, reshard and convert the checkpoints of sharded optimizers; executes no pickle.

    import zckpt

    checkpoint = zckpt.open("run/global_step500")         # any format; reads structure only
    checkpoint.parameters["wte.weight"].shape
    checkpoint.read("wte.weight", "exp_avg")               # a torch.Tensor; reads only those bytes
    zckpt.inspect(checkpoint)                              # what is in it; every result has a JSON-able .as_dict()
    zckpt.consolidate("run/global_step500", "model.safetensors")
    zckpt.reshard("run", "run6", world_size=6)
    zckpt.convert("run/global_step500", "dcp", to="dcp")
    zckpt.strip("run/global_step500", "small", optimizer=True)
    zckpt.merge_adapter("base", "adapter", "merged")
    zckpt.average(["run/global_step400", "run/global_step500"], "mean.safetensors")
    zckpt.diff("run/global_step500", "dcp").equal          # by parameter and slot, whatever the formats
    zckpt.fingerprint("dcp").text                          # one line, the same in every format
    zckpt.stats("dcp").distributions                       # of each slot: min, max, mean, deviation, norm, NaN
    zckpt.show("dcp", "wte.weight", slice="0:4,:").values  # some elements, as a NumPy array
    zckpt.map("dcp").rows                                  # what lies where: the data of pages and pictures
    zckpt.verify("dcp", deep=True).sound                   # is it whole, and does it make sense?
    zckpt.resume_check("run", program="deepspeed", world_size=4).verdict   # does it resume there, completely?
    zckpt.history("run").checkpoints                       # all checkpoints of a run: step, size, sound, latest
    zckpt.prune("run", keep_last=3).freed_nbytes           # what can be removed; delete=True removes it
    for one in zckpt.watch("run"): one.findings            # each checkpoint as it appears

    zckpt.save("run/step7", model=model, optimizer=optimizer, step=7)      # in training, on every rank
    zckpt.load("run/step7", model=model, optimizer=optimizer)              # any format, at any number of ranks

    zckpt.assert_restored("run/step7", model=model, optimizer=optimizer)   # after any program's own load

    zckpt.optim, zckpt.dcp, zckpt.hf       the sharded optimizers, torch.distributed.checkpoint, Hugging Face's Trainer
    zckpt.deepspeed                        lets stock DeepSpeed resume from any of them, in place

The names below are the whole public API. They are loaded when first used, so importing zckpt is cheap. Without torch
(`pip install zckpt` alone) everything works except `read()`, `save`, `load`, `Checkpointer` and these modules.
"""

from __future__ import annotations

import sys
from importlib import import_module

from zckpt.version import __version__

TYPE_CHECKING = False  # of `typing`, which takes longer to import than all of this; checkers know the name

if TYPE_CHECKING:
    from zckpt import dcp, deepspeed, hf, optim
    from zckpt.compare.digests import Fingerprint
    from zckpt.errors import (
        DamagedFileError,
        LayoutError,
        LeftOutError,
        MissingPackageError,
        NotRestoredError,
        PickleError,
        ShardError,
        SourceError,
        TargetError,
        TargetExistsError,
        UnknownFormatError,
        UnsupportedError,
        UsageError,
        WeightMismatchError,
        WorkerError,
        ZckptError,
    )
    from zckpt.operations.average import Averaged, average
    from zckpt.operations.consolidate import Consolidated, consolidate
    from zckpt.operations.convert import convert
    from zckpt.operations.diff import Compared, diff
    from zckpt.operations.fingerprint import fingerprint
    from zckpt.operations.history import History, Recorded, history
    from zckpt.operations.inspect import Inspection, inspect
    from zckpt.operations.map import Map, map  # noqa: A004
    from zckpt.operations.merge_adapter import Merged, merge_adapter
    from zckpt.operations.open import OpenedCheckpoint, open  # noqa: A004
    from zckpt.operations.pack import Packed, Unpacked, pack, unpack
    from zckpt.operations.parting import Parting, parting
    from zckpt.operations.patch import Patched, apply, patch
    from zckpt.operations.prune import Pruned, prune
    from zckpt.operations.reshard import reshard
    from zckpt.operations.resume_check import ResumeCheck, resume_check
    from zckpt.operations.sanitize import Sanitized, sanitize
    from zckpt.operations.scan import Scanned, scan
    from zckpt.operations.series import Series, series
    from zckpt.operations.show import Elements, show
    from zckpt.operations.stats import Distribution, Statistics, stats
    from zckpt.operations.strip import Stripped, strip
    from zckpt.operations.target import Written
    from zckpt.operations.verify import Finding, Verification, verify
    from zckpt.operations.watch import Appeared, watch
    from zckpt.state import Checkpoint, Extent, Parameter, ParamGroup, Scalar, Slot, Span, Topology
    from zckpt.training.checkpointer import Checkpointer
    from zckpt.training.loading import Restored, load
    from zckpt.training.restored import assert_restored
    from zckpt.training.saving import Saving, save


_HOMES = {
    "zckpt.operations.open": ("OpenedCheckpoint",),
    "zckpt.operations.average": ("Averaged",),
    "zckpt.operations.consolidate": ("Consolidated",),
    "zckpt.operations.diff": ("Compared",),
    "zckpt.compare.digests": ("Fingerprint",),
    "zckpt.operations.history": ("History", "Recorded"),
    "zckpt.operations.inspect": ("Inspection",),
    "zckpt.operations.map": ("Map",),
    "zckpt.operations.merge_adapter": ("Merged",),
    "zckpt.operations.pack": ("Packed", "Unpacked", "unpack"),
    "zckpt.operations.parting": ("Parting",),
    "zckpt.operations.patch": ("Patched", "apply"),
    "zckpt.operations.prune": ("Pruned",),
    "zckpt.operations.resume_check": ("ResumeCheck",),
    "zckpt.operations.target": ("Written",),
    "zckpt.operations.sanitize": ("Sanitized",),
    "zckpt.operations.scan": ("Scanned",),
    "zckpt.operations.series": ("Series",),
    "zckpt.operations.show": ("Elements",),
    "zckpt.operations.stats": ("Distribution", "Statistics"),
    "zckpt.operations.strip": ("Stripped",),
    "zckpt.operations.verify": ("Finding", "Verification"),
    "zckpt.operations.watch": ("Appeared",),
    "zckpt.training.checkpointer": ("Checkpointer",),
    "zckpt.training.loading": ("Restored", "load"),
    "zckpt.training.restored": ("assert_restored",),
    "zckpt.training.saving": ("Saving", "save"),
    "zckpt.state": ("Checkpoint", "Extent", "ParamGroup", "Parameter", "Scalar", "Slot", "Span", "Topology"),
}
"""The module of each name that is loaded when it is first used, but for errors and verbs, whose names say it."""

_MODULES = ("dcp", "deepspeed", "errors", "hf", "optim")
"""Modules that are there without a further import; all but `errors` need torch."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Appeared",
    "Averaged",
    "Checkpoint",
    "Checkpointer",
    "Compared",
    "Consolidated",
    "DamagedFileError",
    "Distribution",
    "Elements",
    "Extent",
    "Finding",
    "Fingerprint",
    "History",
    "Inspection",
    "LayoutError",
    "LeftOutError",
    "Map",
    "Merged",
    "MissingPackageError",
    "NotRestoredError",
    "OpenedCheckpoint",
    "Packed",
    "ParamGroup",
    "Parameter",
    "Parting",
    "Patched",
    "PickleError",
    "Pruned",
    "Recorded",
    "Restored",
    "ResumeCheck",
    "Sanitized",
    "Saving",
    "Scalar",
    "Scanned",
    "Series",
    "ShardError",
    "Slot",
    "SourceError",
    "Span",
    "Statistics",
    "Stripped",
    "TargetError",
    "TargetExistsError",
    "Topology",
    "UnknownFormatError",
    "Unpacked",
    "UnsupportedError",
    "UsageError",
    "Verification",
    "WeightMismatchError",
    "WorkerError",
    "Written",
    "ZckptError",
    "__version__",
    "apply",
    "assert_restored",
    "average",
    "consolidate",
    "convert",
    "dcp",
    "deepspeed",
    "diff",
    "fingerprint",
    "hf",
    "history",
    "inspect",
    "load",
    "map",
    "merge_adapter",
    "open",
    "optim",
    "pack",
    "parting",
    "patch",
    "prune",
    "reshard",
    "resume_check",
    "sanitize",
    "save",
    "scan",
    "series",
    "show",
    "stats",
    "strip",
    "unpack",
    "verify",
    "watch",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"zckpt.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'zckpt' has no attribute {name!r}")
    home = "zckpt.errors" if name.endswith("Error") else _HOME_OF.get(name, f"zckpt.operations.{name}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if (_ipython := sys.modules.get("IPython")) is not None and (_shell := _ipython.get_ipython()) is not None:
    import_module("zckpt.notebook").load_ipython_extension(_shell)
