"""The inert nodes that stand for what a pickle would have made of Python objects.

A pickle names classes and says what to call with what. Nothing here is ever called: each node keeps
what the pickle said, so that it can be shown and written back. Plain data (numbers, strings, lists,
dicts, tuples, sets, bytes) needs no node and is itself.

Nodes are compared by identity unless they are plain values (`Global`, `DType`, `Device`, ...).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that a pickle names; it is never imported.

    Parameters
    ----------
    module, name : str
        As the pickle spells them; `name` may be dotted.
    """

    module: str
    name: str

    @property
    def qualified(self) -> str:
        """Both names, joined with a dot."""
        return f"{self.module}.{self.name}"

    def __str__(self) -> str:
        return self.qualified


@dataclass(slots=True, eq=False)
class Object:
    """An object of a class this package knows nothing about.

    Parameters
    ----------
    cls : Global or Object
        What the pickle would call: a class, a function, or the inert result of another such call.
    args : tuple
        Positional arguments of that call.
    kwargs : dict or None
        Keyword arguments; only `how == "newobj_ex"` has any.
    state : object or None
        What the pickle sets afterwards: usually a dict of attributes.
    items : list
        What the pickle appends to it, as to a list.
    entries : list of (key, value)
        What the pickle sets in it, as in a dict.
    how : str
        The kind of call: `reduce`, `newobj`, `newobj_ex`, `inst`, `obj` or `reconstructor`.
    has_state : bool
        Whether `state` was set: a pickle may set it to None.
    """

    cls: Global | Object
    args: tuple[object, ...] = ()
    kwargs: dict[object, object] | None = None
    state: object | None = None
    items: list[object] = field(default_factory=list)
    entries: list[tuple[object, object]] = field(default_factory=list)
    how: str = "reduce"
    has_state: bool = False

    @property
    def qualified(self) -> str:
        """Dotted name of the class, or of the innermost callable that the pickle names."""
        callee = self.cls
        while isinstance(callee, Object):
            callee = callee.cls
        return callee.qualified

    def get(self, name: str, default: object = None) -> object:
        """Return an attribute that the pickle set, whether from `__dict__` or from `__slots__`."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        for part in parts:
            if isinstance(part, dict) and name in part:
                return part[name]
        return default

    def __repr__(self) -> str:
        return f"Object({self.qualified}, how={self.how!r})"


@dataclass(frozen=True, slots=True)
class DType:
    """A torch dtype, `torch.float32`, by its name without `torch.`."""

    name: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A torch layout by its full name, `torch.sparse_coo`."""

    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """A torch memory format by its name without `torch.`, `channels_last`."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device, `cuda:1`."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Size(tuple[int, ...]):
    """A `torch.Size`: a shape, in elements."""

    __slots__ = ()


class OrderedMapping(dict[object, object]):
    """A `collections.OrderedDict`; `state` is what the pickle set on it (torch: `_metadata`)."""

    __slots__ = ("state",)
    state: object | None

    def __init__(self) -> None:
        super().__init__()
        self.state = None


class DefaultMapping(dict[object, object]):
    """A `collections.defaultdict`; `factory` names its default factory."""

    __slots__ = ("factory", "state")
    factory: object | None
    state: object | None

    def __init__(self, factory: object | None = None) -> None:
        super().__init__()
        self.factory = factory
        self.state = None


class Namespace(dict[object, object]):
    """An `argparse.Namespace`: its attributes by name."""

    __slots__ = ()
