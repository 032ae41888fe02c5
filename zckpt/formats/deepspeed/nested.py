"""A model's state dict in dicts of dicts, as Megatron-DeepSpeed's modules give it where there is no pipeline. Pure.

module = {"language_model": {"embedding": {"word_embeddings": {"weight": ...}},
                             "encoder": {"layers.0.input_layernorm.weight": ..., ...}, "moe_state_dict": {}}}

Names are the keys on the way, joined by dots, where `param_shapes`, `frozen_param_shapes` or `buffer_names` have one of
them, or all of the model is nested. What else is in a dict is what a module keeps for itself.

Source: Megatron-DeepSpeed's `state_dict_for_save_checkpoint`, which takes the place of `module.state_dict`.

Parameters of modules that torch's `checkpoint_wrapper` wraps, for activations to be computed again.

DeepSpeed lists them (`param_shapes`, `param_slice_mappings`, `frozen_param_fragments`, `buffer_names`) as
`named_parameters()` has them, with the wrapper's attribute. The wrapper takes that out of the module's state dict, so
that `module` and the files of a pipeline's layers have them without. Here they are called as they are listed.

Source: `ActivationWrapper._post_state_dict_hook`, torch 2.5 to 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from zckpt.errors import DamagedFileError
from zckpt.torchfile import FromFile, OrderedMapping, Tensor, TorchFile, is_tensor

Node = Mapping[object, object]

EXTRA_STATE = "_extra_state"


def flattened(
    module: Node, known: Collection[str], *, is_listed: bool
) -> tuple[dict[object, object], dict[str, object]]:
    """Return a state dict's values by name, and what of it is none of the model's, as it is nested.

    Parameters
    ----------
    module : mapping
    known : collection of str
        Names of parameters and buffers, not all of them in every version.
    is_listed : bool
        Whether parameters are among these. If not, what is nested is taken where nothing else is there.

    Raises
    ------
    DamagedFileError
        Two tensors have one name.
    """
    leaves = [(name, value) for name, value in _leaves(module, "") if isinstance(value, Tensor)]
    nested = [name for name, _ in leaves if name not in module]
    alone = not is_listed and len(nested) == len(leaves)
    every = alone or any(name in known for name in nested)
    found: dict[object, object] = {}
    for name, tensor in leaves:
        if name in module or (every and EXTRA_STATE not in name):
            if name in found:
                raise DamagedFileError(f"two tensors are named {name}", expected="one in the modules' dicts")
            found[name] = tensor
    rest = {str(key): value for key, value in module.items() if not (is_tensor(value) or isinstance(value, dict))}
    for key, value in module.items():
        if isinstance(value, dict):
            left = _without(value, f"{key}.", found)
            rest |= {str(key): left} if left or not value else {}
    return found, rest


def _leaves(node: Node, front: str) -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{front}{key}.")
        else:
            yield f"{front}{key}", value


def _without(node: Node, front: str, found: Collection[object]) -> dict[object, object]:
    """Return what of a dict has not been found, without dicts of which nothing else is left."""
    rest: dict[object, object] = {}
    for key, value in node.items():
        if isinstance(value, dict):
            left = _without(value, f"{front}{key}.", found)
            if left:
                rest[key] = left
        elif f"{front}{key}" not in found:
            rest[key] = value
    return rest


def renested(module: Node, values: Mapping[object, object], file: TorchFile) -> OrderedMapping:
    """Return a state dict as another was nested, with other values by name; what has none stays as it is.

    `module`: as it was; `values`: by name; `file`: that the rest is from.
    """
    there = {name for name, _ in _leaves(module, "")}

    def nested(node: Node, front: str) -> OrderedMapping:
        made = ordered((), node)
        for key, value in node.items():
            name = f"{front}{key}"
            if isinstance(value, dict):
                made[key] = nested(value, f"{name}.")
            else:
                made[key] = values[name] if name in values else FromFile.of(file, value)
        return made

    more = {n: v for n, v in values.items() if n not in there and not isinstance(module.get(n), dict)}
    return ordered((nested(module, "") | more).items(), values)


def ordered(items: Iterable[tuple[object, object]], like: object = None) -> OrderedMapping:
    """Return an ordered dict, with what a pickle has set on another one."""
    made = OrderedMapping()
    made.update(items)
    if isinstance(like, OrderedMapping):
        made.state = like.state
    return made


ATTRIBUTE = "_checkpoint_wrapped_module."


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
    for own in filed:
        of = max((module for module in wrapped if own.startswith(module)), key=len, default=None)
        if of is not None and own not in listed:
            found[wrapped[of] + own.removeprefix(of)] = own
    return found
