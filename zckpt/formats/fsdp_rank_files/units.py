"""Which parameters FSDP1 has put into which flat parameter, and in which order they are numbered. Pure.

A unit is a module that FSDP wraps: its flat parameter has the parameters of all modules in it but those of units
within, end to end. `parameters()` yields a module's own before those of its children, so that the flat parameters come
in the order in which the units are met: the root's first.

    modules   "", "_fsdp_wrapped_module", "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module", ...
    units     "", "layers.0", ...

Which modules are units the names of modules in a model's file say (its `_metadata`). Where a program has lost those,
three ways to wrap are tried: the model as one unit, each member of a list of modules as one, and each module that PEFT
has added, too, as its policy for FSDP has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from zckpt.errors import UsageError
from zckpt.state.names import is_added, plain_name

WRAPPED = "_fsdp_wrapped_module"
"""The attribute in which FSDP1 keeps what it wraps."""

Units = list[list[str]]
"""For each unit that has any, the names of its parameters."""


def units_in(modules: Iterable[str]) -> list[str]:
    """Return the names of the modules that FSDP1 has wrapped, without what it has put into names."""
    wrapped = (module for module in modules if module.rpartition(".")[2] == WRAPPED)
    return list(dict.fromkeys(plain_name(f"{module}.x").rpartition(".")[0] for module in wrapped))


def members_of(units: Sequence[str], names: Sequence[str]) -> Units:
    """Return the parameters of each unit, in the model's order; units without any are left out.

    `units`: names of modules, in the model's order; the root's is empty; `names`: of all parameters, in the model's
    order, each once.
    """
    found: dict[str, list[str]] = {unit: [] for unit in units}
    for name in names:
        module = plain_name(name)
        while module:
            module = module.rpartition(".")[0]
            if module in found:
                break
        if module in found:
            found[module].append(name)
    return [members for members in found.values() if members]


def in_order(units: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return units in the order in which `parameters()` meets their flat parameters: that of their first modules."""

    def first(unit: str) -> tuple[int, int]:
        prefix = f"{unit}." if unit else ""
        return next((at for at, name in enumerate(names) if name.startswith(prefix)), len(names)), len(unit)

    return sorted(units, key=first)


def usual_wrappings(names: Sequence[str]) -> list[list[str]]:
    """Return the units of the ways to wrap a model that are tried where nothing says which it was.

    The outermost numbered modules of all names are the members of lists: the layers of a transformer.
    """
    layers: dict[str, None] = {}
    for name in names:
        parts = name.split(".")[:-1]
        at = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
        if at:
            layers[".".join(parts[: at + 1])] = None
    added = dict.fromkeys(name.rpartition(".")[0] for name in names if is_added(name))
    ways = [{}, layers, layers | added]
    return [in_order(["", *units], names) for at, units in enumerate(ways) if units not in ways[:at]]


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the modules that patterns name, such as `layers.*`, and the root, in the order of their flat parameters.

    `patterns`: a `*` stands for one part of a module's name; `names`: of all parameters, in the model's order. Raises
    UsageError: one names no module.
    """
    modules: dict[str, None] = {}
    for name in names:
        parts = plain_name(name).split(".")[:-1]
        modules.update(dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts) + 1)))
    found: dict[str, None] = {"": None}
    for pattern in patterns:
        stripped = pattern.strip()
        fits = [
            one
            for one in modules
            if one.count(".") == stripped.count(".") and all(map(fnmatchcase, one.split("."), stripped.split(".")))
        ]
        if not fits:
            raise UsageError("--units matches no module", expected="names such as layers.*", found=repr(pattern))
        found.update(dict.fromkeys(fits))
    return in_order(found, [plain_name(name) for name in names])
