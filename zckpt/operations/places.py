"""URLs among what a verb is given: each is mounted while the verb runs, and what it returns names URLs again."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from zckpt.errors import UsageError, ZckptError, shown, stands_for_urls
from zckpt.state import Checkpoint
from zckpt.storage.packed import is_store
from zckpt.storage.remote import is_url
from zckpt.storage.stand_ins import is_remote

Result = TypeVar("Result")

SOURCES = frozenset({
    "source", "sources", "a", "b", "base", "adapter", "adapter_config", "roots", "roots_b", "config", "map_config",
    "against", "tp_rules", "tp_rules_b", "fill_from",
})  # fmt: skip
"""Parameters of verbs that say where something is."""


def called(
    function: Callable[..., Result], verb: Callable[..., Result], given: tuple[Any, ...], named: dict[str, Any]
) -> Result:
    """Call a function with what a verb was given, whose signature says what is a place."""
    if not any(map(_is_elsewhere, (*given, *named.values()))):
        if not stands_for_urls():
            return function(*given, **named)
        with _shown_errors():
            return shown_in(function(*given, **named))
    import inspect

    from zckpt.storage.packed.store import PackedMount, mounted_place, place_in
    from zckpt.storage.remote.mount import Mount

    with _shown_errors(), ExitStack() as stack:
        bound = inspect.signature(verb).bind(*given, **named)
        mounts: list[Mount | PackedMount] = []

        def mounted(value: Any, *, missing: bool = False) -> Any:  # noqa: ANN401  # a path, or several
            if isinstance(value, list | tuple):
                return [mounted(one) for one in value]
            place = place_of(value) if is_url(value) else value
            mount: Mount | PackedMount | None = None
            if is_url(place):
                mount = Mount(str(place), missing=missing)
            elif not missing:
                mount = mounted_place(place)
            elif place_in(place) is not None:
                raise UsageError("is in a store of checkpoints, which only `zckpt pack` writes to", path=place)
            if mount is None:
                return place
            mounts.append(mount)
            stack.callback(mount.close)
            return mount.path

        for name, value in bound.arguments.items():
            if (name in SOURCES or name == "target") and _is_elsewhere(value):
                bound.arguments[name] = mounted(value, missing=name == "target")
        result = function(*bound.args, **bound.kwargs)
        for mount in mounts:
            if not mount.is_target:
                mount.check_unchanged()
        if not isinstance(result, Checkpoint):
            return shown_in(result)
        weakref.finalize(result, stack.pop_all().close)  # as long as it is open, so is what it is read from
        # it names URLs where it says what it is; its spans stay paths, by which it is read
        result.places = result.source, result.opened, result.roots
        for name in ("source", "opened", "roots", "warnings"):
            setattr(result, name, shown_in(getattr(result, name)))
        return result


def place_of(path: str | os.PathLike[str]) -> Path | str:
    """Return a URL of a store as it is, and anything else as a path."""
    if not is_url(path):
        return Path(path)
    from zckpt.storage.remote.mount import local_of

    url = str(path)
    return local_of(url) or url


def on_disk(path: str | os.PathLike[str]) -> Path:
    """Return the path of what must be on a file system. Raises UsageError: it is in a store."""
    place = place_of(path)
    if isinstance(place, str) or is_remote(place):
        raise UsageError("cannot be in a store such as S3", path=path, expected="a path on a file system")
    return place


def lasting_place_of(path: str | os.PathLike[str]) -> Path | str:
    """Return the same as `place_of`, and the same place wherever the program goes (`os.chdir`)."""
    place = place_of(path)
    return place.absolute() if isinstance(place, Path) else place


@contextmanager
def at_path(place: Path | str, *, missing: bool = False) -> Iterator[Path]:
    """Yield the path of what is to be read, which is mounted while the context lasts if it is a URL.

    `missing`: there may be nothing, and what is there may change: a target. Raises SourceError: there is nothing; or it
    has changed while it was read.
    """
    if isinstance(place, Path):
        yield place
        return
    from zckpt.storage.remote.mount import mounted

    with _shown_errors(), mounted(place, missing=missing) as mount:
        yield mount.path
        if not missing:
            mount.check_unchanged()


def _is_elsewhere(value: object) -> bool:
    """Tell whether this is a URL, or a place in a store of checkpoints, or some are."""
    if isinstance(value, list | tuple):
        return any(map(_is_elsewhere, value))
    return is_url(value) or (isinstance(value, str | os.PathLike) and _is_packed(value))


def _is_packed(value: str | os.PathLike[str]) -> bool:
    """Tell whether a path is of a store of checkpoints, or in one."""
    path = os.path.abspath(value)  # noqa: PTH100  # pathlib follows links
    try:
        while not os.path.lexists(path) and (above := os.path.dirname(path)) != path:  # noqa: PTH120
            path = above
    except ValueError:
        return False
    return is_store(path)


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Let errors that leave a verb name URLs."""
    try:
        yield
    except ZckptError as error:
        error.path = error.path and shown(error.path)
        raise


def shown_in(value: Result) -> Result:
    """Return data in which paths that stand for URLs are these URLs, as texts."""
    return cast("Result", _shown(value))


def _shown(value: Any) -> Any:  # noqa: ANN401  # data of any kind
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, os.PathLike):
        text = shown(str(value))
        return value if text == str(value) else text
    if isinstance(value, dict):
        return {_shown(key): _shown(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_shown, value))
    if isinstance(value, ZckptError):
        for name in ("path", "message", "advice"):
            setattr(value, name, _shown(getattr(value, name)))
    elif is_dataclass(value) and not isinstance(value, type | Checkpoint):
        value = copy.copy(value)
        for one in fields(value):
            object.__setattr__(value, one.name, _shown(getattr(value, one.name)))
    return value
