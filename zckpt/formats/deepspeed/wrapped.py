"""Parameters of modules that torch's `checkpoint_wrapper` wraps, for activations to be computed again.

DeepSpeed lists them (`param_shapes`, `param_slice_mappings`, `frozen_param_fragments`, `buffer_names`) as
`named_parameters()` has them, with the wrapper's attribute. The wrapper takes that out of the module's state dict, so
that `module` and the files of a pipeline's layers have them without. Here they are called as they are listed.

Source: `ActivationWrapper._post_state_dict_hook`, torch 2.5 to 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

ATTRIBUTE = "_checkpoint_wrapped_module."

T = TypeVar("T")


def unwrapped(name: str) -> str:
    """Return the name that a state dict has for a parameter."""
    return name.replace(ATTRIBUTE, "")


def filed_names(listed: Collection[str], filed: Collection[str]) -> dict[str, str]:
    """Return the name in the state dict, by the one that is listed, of all that have another there.

    ZeRO-1 does not list what is frozen: it is in the same wrapper as all else of its module.
    """
    wrapped: dict[str, str] = {}
    for name in listed:
        parts = name.split(ATTRIBUTE) if name not in filed else [name]
        for count in range(1, len(parts)):
            wrapped["".join(parts[:count])] = ATTRIBUTE.join(parts[:count]) + ATTRIBUTE
    found: dict[str, str] = {}
    for own in filed if wrapped else ():
        of = max((module for module in wrapped if own.startswith(module)), key=len, default=None)
        if of is not None and own not in listed:
            found[wrapped[of] + own.removeprefix(of)] = own
    return found


def as_listed(filed: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """Return what a state dict holds, by the names that are listed."""
    listed = {own: name for name, own in names.items()}
    return {listed.get(name, name): value for name, value in filed.items()}
