"""The shapes that a model file of DeepSpeed has by name, `param_shapes` and its kin."""

from __future__ import annotations

from zckpt.errors import DamagedFileError
from zckpt.formats.torch_files.tensors import as_mapping
from zckpt.torchfile import brief

Shapes = dict[str, tuple[int, ...]]


def param_shapes_of(node: object, path: str) -> list[Shapes] | None:
    """Return shapes by group; before 2021 a file held one dict for all groups."""
    if node is None:
        return None
    if isinstance(node, dict):
        return [shapes_of(node, path)]
    if not isinstance(node, (list, tuple)):
        raise DamagedFileError(
            "unreadable param_shapes", path=path, expected="a list of dicts", found=type(node).__name__
        )
    return [shapes_of(group, path) for group in node]


def shapes_of(node: object, path: str) -> Shapes:
    """Return the shapes of one dict."""
    found = {}
    for name, shape in as_mapping(node, path, "a dict of shapes").items():
        if not isinstance(shape, (tuple, list)) or not all(type(n) is int and n >= 0 for n in shape):
            raise DamagedFileError(f"unreadable shape of {name}", path=path, found=brief(shape))
        found[str(name)] = tuple(int(n) for n in shape)
    return found
