"""Which formats there are: zckpt's own in order of certainty, then those that other packages add. Loads lazily.

A package adds a format by an entry point in the group `zckpt.formats`, whose name is the format's and whose value is an
object that implements `Format`. Entry points are looked up only when no format of zckpt's own will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from zckpt.errors import UsageError
from zckpt.formats.format import Format

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "zckpt.formats"

BUILT_IN = {
    "zckpt": "zckpt.formats.native",
    "universal": "zckpt.formats.universal",  # it has a model file as a tag directory of DeepSpeed has
    "fsdp-rank-files": "zckpt.formats.fsdp_rank_files",  # a tag may be of one of its runs
    "deepspeed": "zckpt.formats.deepspeed",
    "megatron": "zckpt.formats.megatron",  # its directories are torch's, and its keys are not
    "torch-checkpointing": "zckpt.formats.torch_checkpointing",  # ranks' files under any names are torch's
    "colossalai": "zckpt.formats.colossalai",
    "nanotron": "zckpt.formats.nanotron",
    "nanochat": "zckpt.formats.nanochat",  # its ranks' files are like those of zero-redundancy
    "transformers-trainer": "zckpt.formats.transformers_trainer",  # models by themselves are the next one's
    "accelerate": "zckpt.formats.accelerate",  # which leaves its directories to the formats of their files
    "safetensors": "zckpt.formats.safetensors",  # sure of files and shards; of directories the next three may be sure
    "dcp": "zckpt.formats.dcp",
    "consolidated": "zckpt.formats.consolidated",
    "zero-redundancy": "zckpt.formats.zero_redundancy",
    "meta": "zckpt.formats.meta",  # a file of its several is one of torch's
    "torch": "zckpt.formats.torch_files",
}
"""The module of each format, which has it in `FORMATS`. The order is that in which they are asked."""

TRIED_LAST = next(reversed(BUILT_IN))
"""The format that may be of any file, if no other one claims it."""


class BrokenPluginError(UsageError):
    """A format of another package cannot be loaded."""


@cache
def _built_in(name: str) -> Format:
    every: tuple[Format, ...] = import_module(BUILT_IN[name]).FORMATS
    return next(one for one in every if one.name == name)


@cache
def plugins() -> dict[str, EntryPoint]:
    """Return the formats that other packages add, by name; none has the name of one of zckpt's own."""
    from importlib.metadata import entry_points

    return {one.name: one for one in sorted(entry_points(group=GROUP)) if one.name not in BUILT_IN}


@cache
def _plugin(name: str) -> Format:
    entry = plugins()[name]
    package = f" of {entry.dist.name}" if entry.dist is not None else ""
    try:
        found = entry.load()
        missing = [one for one in ("title", "find", "read") if not hasattr(found, one)]
        problem = f"{entry.value} has no {missing[0]}" if missing else None
        if getattr(found, "name", name) != name:
            problem = f"{entry.value} is called {found.name!r}"
        if isinstance(found, type):
            problem = f"{entry.value} is a class, not an object"
    except Exception as error:  # noqa: BLE001  # whatever another package does when it is imported
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise BrokenPluginError(f"the format {name}{package} cannot be loaded", found=problem,
                                advice="update that package, or remove it")  # fmt: skip
    return found  # type: ignore[no-any-return]  # it has what a format has


def names() -> list[str]:
    """Return the names of all formats, broken ones included."""
    return [*BUILT_IN, *plugins()]


def formats(broken: list[BrokenPluginError] | None = None) -> Iterator[Format]:
    """Yield all formats in the order in which they are asked; others' are not looked up before zckpt's own are through.

    `broken`: gets the errors about those that cannot be loaded.
    """
    yield from map(_built_in, BUILT_IN)
    for name in plugins():
        try:
            yield _plugin(name)
        except BrokenPluginError as error:
            if broken is not None:
                broken.append(error)


def find_format(name: str) -> Format | None:
    """Return the format of a name; None if there is none.

    Raises UsageError: it cannot be loaded.
    """
    if name in BUILT_IN:
        return _built_in(name)
    return _plugin(name) if name in plugins() else None


def get(name: str) -> Format:
    """Return the format of a name.

    Raises UsageError: there is none, or it cannot be loaded.
    """
    found = find_format(name)
    if found is not None:
        return found
    raise UsageError("unknown format", expected=", ".join(names()), found=repr(name))
