"""What files of a checkpoint hold: trees without their tensors' bytes, and the bytes by path. And resharding one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import zckpt
from tests.formats.deepspeed.shards import FIXTURES
from zckpt.state import without
from zckpt.torchfile import FromFile, Object, Tensor, children, read_torchfile


def run_of(name) -> Path:
    """A fixture's run directory."""
    (latest,) = (FIXTURES / name).rglob("latest")
    return latest.parent


def tag_of(run) -> Path:
    return Path(run, Path(run, "latest").read_text().strip())


def cut(source, target, world_size, **options) -> Path:
    """Reshard a run directory; return the tag directory that was written."""
    zckpt.reshard(source, target, world_size=world_size, **options)
    return tag_of(target)


def alike(found, original, but: Collection[str] = ()) -> list[str]:
    """The names of the files of two tag directories, which are the same ones and of the same form, some keys aside."""
    names = sorted(path.name for path in original.glob("*.pt"))
    assert sorted(path.name for path in found.iterdir()) == names
    for one in names:
        mine, theirs = (form(without(content_of(tag / one), *but)) for tag in (found, original))
        assert mine == theirs, one
    return names


def state_of(path) -> dict[str, Any]:
    root = read_torchfile(path).root
    assert isinstance(root, dict)
    return root["optimizer_state_dict"]


def content_of(path) -> dict[str, Any]:
    root = read_torchfile(path).root
    assert isinstance(root, dict)
    return root


def form(node) -> object:
    """What a tree is but for its tensors' bytes: keys in their order, kinds of nodes, values."""
    if isinstance(node, FromFile):
        return form(node.node)
    if isinstance(node, Tensor):
        return ("Tensor", node.dtype, node.shape, node.requires_grad, node.is_parameter, node.subclass,
                form(node.attributes), node.storage.location)  # fmt: skip
    if isinstance(node, (str, int, float, bool, bytes, type(None))):
        return (type(node).__name__, node)
    head = node.qualified if isinstance(node, Object) else None
    if isinstance(node, (set, frozenset)):
        return (type(node).__name__, sorted(node, key=repr))
    below = [(key, form(child)) for key, child in children(node)]
    return (type(node).__name__, head, below or repr(node))


def tensor_bytes(path) -> dict[tuple[object, ...], bytes]:
    """The bytes of every tensor of a torch file, padding of its storage aside."""
    data = path.read_bytes()
    found = {}
    for where, tensor in every_tensor(read_torchfile(path).root):
        assert tensor.is_contiguous
        found[where] = data[tensor.offset : tensor.offset + tensor.nbytes]
    return found


def every_tensor(node, where: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], Tensor]]:
    """Every tensor by its path, a tied one under each of its names."""
    if isinstance(node, Tensor):
        yield where, node
    elif not isinstance(node, (str, bytes)):
        for step, child in children(node):
            yield from every_tensor(child, (*where, step))
