"""Any value that a checkpoint holds beside its parameters, as a list of leaves that can be compared one by one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from zckpt.formats.tensors import slot_of
from zckpt.state import Scalar, Slot
from zckpt.torchfile import FromFile, Object, Tensor, plain
from zckpt.torchfile.arrays import NumpyArray
from zckpt.torchfile.walk import LEAVES, MAX_DEPTH, children

SHOWN_CHARACTERS = 200
"""A longer value is shown by its beginning and a digest, by which it is compared."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value with nothing below it.

    Parameters
    ----------
    value : JSON-able
        What it is compared by, and shown as.
    slot : Slot or None
        The elements of a tensor, which are compared too.
    """

    value: object
    slot: Slot | None = None


def leaves(value: object, path: str = "") -> dict[str, Leaf]:
    """Return the leaves below a value by their path, `client.args[0].name`.

    Lists and tuples are alike, and a single value is what it is however it is stored; tensors are compared by their
    elements wherever they lie.
    """
    found: dict[str, Leaf] = {}
    _collect(value, path, "", found, 0, set())
    return found


def _collect(node: object, path: str, file: str, found: dict[str, Leaf], depth: int, inside: set[int]) -> None:
    if isinstance(node, FromFile):
        _collect(node.node, path, node.path, found, depth, inside)
        return
    if isinstance(node, Scalar):
        node = node.value
    if isinstance(node, Tensor):
        slot = slot_of(path, node, file) if file else None
        found[path] = Leaf(f"tensor of {node.dtype} {list(node.shape)}", slot)
        return
    if type(node) in LEAVES or (isinstance(node, NumpyArray) and node.items is None):
        found[path] = Leaf(_shown(node))
        return
    if depth > MAX_DEPTH or id(node) in inside:
        found[path] = Leaf("<cycle>")
        return
    below = list(children(node))
    if isinstance(node, Object):
        found[f"{path}.class"] = Leaf(_shown(node.cls))
        below = [(step, child) for step, child in below if step != "cls" and child not in ((), [], None)]
    elif not below:
        found[path] = Leaf("{}" if isinstance(node, dict) else "[]")
    around = inside | {id(node)}
    for step, child in below:
        _collect(child, _step(path, step, node), file, found, depth + 1, around)


def _step(path: str, step: object, node: object) -> str:
    if isinstance(node, dict) or isinstance(step, str):
        return f"{path}.{step}" if path else str(step)
    return f"{path}[{step}]"


def _shown(node: object) -> object:
    if isinstance(node, NumpyArray):
        return f"array of {node.dtype} {list(node.shape)}, sha256 {hashlib.sha256(node.data).hexdigest()[:16]}"
    if isinstance(node, (bytes, bytearray)):
        return f"{len(node)} bytes, sha256 {hashlib.sha256(node).hexdigest()[:16]}"
    value = plain(node)
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
        return f"{value[:SHOWN_CHARACTERS]}..., sha256 {hashlib.sha256(value.encode()).hexdigest()[:16]}"
    return value
