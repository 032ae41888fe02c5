"""Two checkpoints of whatever formats hold the same logical state, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import zckpt
from tests.truth import bits
from zckpt.compare.logical import parameter_values
from zckpt.state import Checkpoint, Parameter, Scalar, Slot
from zckpt.torchfile import FromFile, plain, walk_tensors


def opened(checkpoint: Checkpoint) -> zckpt.OpenedCheckpoint:
    """What an adapter has read, as users have it."""
    return zckpt.OpenedCheckpoint(**{field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)})


def assert_same_tree(found: Any, expected: Any, label: str = "") -> None:
    """Two trees are the same, tensors bit for bit, tuples tuples and ints ints."""
    assert isinstance(expected, dict) or type(found) is type(expected), label
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), label
        assert torch.equal(bits(found), bits(expected)), label
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), label
        for key, value in expected.items():
            assert_same_tree(found[key], value, f"{label}.{key}")
    elif isinstance(expected, (list, tuple)):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same_tree(one, other, f"{label}.{number}")
    else:
        assert found == expected, label


def assert_same_state(
    found: zckpt.OpenedCheckpoint, expected: zckpt.OpenedCheckpoint, *, means_are_rounded: bool = False
) -> None:
    """Parameters, slots, groups, single values and what lies beside them.

    A weight may be absent where the master is there (ZeRO-3 has none), and present where `expected` has none.
    `means_are_rounded`: one that is a mean over ranks in `expected` is the rounded mean of the masters in `found`, as
    `convert` writes it, and not the mean of the weights.
    """
    assert set(found.parameters) == set(expected.parameters)
    assert set(found.buffers) == set(expected.buffers)
    assert [g.parameters for g in found.param_groups] == [g.parameters for g in expected.param_groups]
    for mine, its in zip(found.param_groups, expected.param_groups, strict=True):
        assert plain_values(mine.hyperparameters) == plain_values(its.hyperparameters)
    for parameter in expected.tensors():
        other = found.parameters.get(parameter.name) or found.buffers[parameter.name]
        about = ("shape", "dtype", "group", "frozen", "tied_to")
        assert {key: getattr(other, key) for key in about} == {key: getattr(parameter, key) for key in about}
        assert_same_slots(found, expected, parameter.name, means_are_rounded=means_are_rounded)
    assert found.step == expected.step
    assert plain_values(found.metadata) == plain_values(expected.metadata)
    assert plain_values(found.optimizer_metadata) == plain_values(expected.optimizer_metadata)
    for key, value in expected.metadata.items():
        assert tensors_below(found.metadata[key]) == tensors_below(value), key


def assert_same_slots(
    found: zckpt.OpenedCheckpoint, expected: zckpt.OpenedCheckpoint, name: str, *, means_are_rounded: bool = False
) -> None:
    """Weight, master and the optimizer's whole state of one parameter."""
    mine, its = found.owner(name), expected.owner(name)
    for slot in ("weight", "master"):
        if means_are_rounded and slot == "weight" and slot in mine.slots and is_mean_over_ranks(its):
            rounded = expected.read(name, "master").to(found.read(name, slot).dtype)
            assert torch.equal(bits(found.read(name, slot)), bits(rounded)), name
        elif slot in its.slots and (slot in mine.slots or slot == "master" or "master" not in its.slots):
            assert_same_bits(found, expected, name, slot)
    values, wanted = parameter_values(found, mine), parameter_values(expected, its)
    assert set(values) == set(wanted), name
    for key, value in wanted.items():
        if isinstance(value, Slot) and value.shape:
            assert_same_bits(found, expected, name, key)
        else:
            single = number(values[key], found, name, key), number(value, expected, name, key)
            assert single[0] == single[1], (name, key)


def is_mean_over_ranks(parameter: Parameter) -> bool:
    """Whether its weight is a mean of values that were rounded: the rounded mean of the masters may be another."""
    return "master" in parameter.slots and bool(
        parameter.slots["weight"].replicas if "weight" in parameter.slots else ()
    )


def assert_same_bits(found: zckpt.OpenedCheckpoint, expected: zckpt.OpenedCheckpoint, name: str, slot: str) -> None:
    mine, its = found.read(name, slot), expected.read(name, slot)
    assert (mine.dtype, mine.shape) == (its.dtype, its.shape), (name, slot)
    assert torch.equal(bits(mine), bits(its)), (name, slot)


def number(value: object, checkpoint: zckpt.OpenedCheckpoint, name: str, key: str) -> object:
    """A single value, whether it is a number, or a tensor of the group's or of the parameter's own."""
    if isinstance(value, Slot):
        return checkpoint.read(name, key).item()
    return value.value if isinstance(value, Scalar) else plain_values(value)


def plain_values(value: object) -> Any:
    """A tree as plain data, tensors by type, shape and where they are from left out."""
    if isinstance(value, Scalar):
        return value.value
    if isinstance(value, FromFile):
        return plain_values(value.node)
    if isinstance(value, dict):
        return {str(key): plain_values(one) for key, one in value.items()}
    return plain(value)


def tensors_below(value: object) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor in a part of a file's tree."""
    if not isinstance(value, FromFile):
        return []
    data = Path(value.path).read_bytes()
    found = []
    for _, tensor in walk_tensors(value.node):
        assert tensor.is_contiguous
        found.append((tensor.dtype, tensor.shape, data[tensor.offset : tensor.offset + tensor.nbytes]))
    return found
