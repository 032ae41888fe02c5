"""What is known of optimizers' keys, held against the real classes: stepped as ZeRO steps them, on odd partitions.

Two ranks see other elements of one flat buffer. What is alike on both may be kept once; what is not is each rank's own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from zckpt.formats.deepspeed.layouts.flat import ZERO_WITHOUT_GRADIENTS
from zckpt.formats.deepspeed.values import BEGINS_AT_A_VALUE, OF_ONE_RANK, OF_ONE_RANK_IN_GROUPS, quantised_keys
from zckpt.formats.torch_files.quantised import NESTED
from zckpt.state import FOLLOWS_FROM_STEPS

KNOWN = frozenset(f"{kind}{number}" for kind in ("state", "qmap", "absmax") for number in "12")
"""Of bitsandbytes, by blocks: what is cut as it is."""

NUMEL = 5122
"""Of a partition: no multiple of a block, and enough for bitsandbytes to quantise it."""

NOT_FLAT = {"LBFGS", "Muon", "SparseAdam"}
"""Of torch, those that ZeRO cannot step: with a closure, matrices only, sparse gradients only."""

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def _of_torch() -> Iterator[tuple[str, Make]]:
    for name, one in vars(torch.optim).items():
        if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer) and name not in {"Optimizer", *NOT_FLAT}:
            yield name, lambda p, one=one: one(p, lr=1e-2)
    yield "SGD-momentum", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)
    yield "Adam-amsgrad", lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True)
    yield "RMSprop-all", lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True)


def _of_transformers(parameters: list[torch.nn.Parameter], **options) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, **options)


MAKES: dict[str, Make] = {
    **dict(_of_torch()),
    "transformers-Adafactor": _of_transformers,
    "transformers-Adafactor-beta1": lambda p: _of_transformers(p, lr=1e-2, relative_step=False, beta1=0.9),
}


def states(make: Make) -> list[dict[str, Any]]:
    """The state that each of two ranks has after three steps."""
    found = []
    for rank in range(2):
        torch.manual_seed(rank)
        parameter = torch.nn.Parameter(torch.randn(NUMEL))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = make([parameter])
            for _ in range(3):
                parameter.grad = torch.randn(NUMEL) * (rank + 1)
                optimizer.step()
        found.append(optimizer.state_dict()["state"].get(0, {}))
    return found


def test_estimates_of_prodigy_are_known():
    """It keeps in its param groups what it has found out about the elements that it has."""
    prodigyopt = pytest.importorskip("prodigyopt")
    groups = []
    for rank in range(2):
        torch.manual_seed(rank)
        optimizer = prodigyopt.Prodigy([parameter := torch.nn.Parameter(torch.randn(NUMEL))], d0=1e-3)
        for _ in range(3):
            parameter.grad = torch.randn(NUMEL) * (rank + 1)
            optimizer.step()
        groups.append(optimizer.state_dict()["param_groups"][0])
    different = {key for key, value in groups[0].items() if value != groups[1][key]}
    assert {"d_numerator", "d_denom"} <= different <= OF_ONE_RANK_IN_GROUPS


@pytest.mark.parametrize("name", MAKES)
def test_single_values_are_what_their_keys_say(name):
    first, second = states(MAKES[name])
    for key, value in first.items():
        if torch.is_tensor(value) and value.dim():
            assert value.shape == (NUMEL,), "one value for each element, or it could not be cut"
            continue
        assert (key in FOLLOWS_FROM_STEPS) != (key in OF_ONE_RANK)
        assert (float(value) == float(second[key])) == (key in FOLLOWS_FROM_STEPS)


@pytest.mark.parametrize("name", MAKES)
def test_state_that_is_said_to_stay_zero_does_where_gradients_are_zero(name):
    parameter = torch.nn.Parameter(torch.zeros(6))
    optimizer = MAKES[name]([parameter])
    for _ in range(3):
        parameter.grad = torch.tensor([1.0, -2, 3, 0, 0, 0])
        optimizer.step()
    state = optimizer.state_dict()["state"].get(0, {})
    for key in ZERO_WITHOUT_GRADIENTS & state.keys():
        if "RMS" not in state:
            assert not state[key][3:].any(), key


@pytest.mark.parametrize("name", MAKES)
def test_state_begins_at_zero_unless_it_is_said_to_begin_elsewhere(name):
    optimizer = MAKES[name]([parameter := torch.nn.Parameter(torch.zeros(6))])
    parameter.grad = torch.zeros(6)
    optimizer.step()
    state = optimizer.state_dict()["state"].get(0, {})
    begun = {key for key, value in state.items() if torch.is_tensor(value) and value.dim() and (value > 1e-6).any()}
    assert begun == BEGINS_AT_A_VALUE & state.keys()


@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit", "LAMB8bit", "AdEMAMix8bit", "AdamW32bit"])
def test_quantised_state_of_bitsandbytes(kind):
    """Codes of partitions can be cut, if nothing of another kind is among them."""
    import bitsandbytes

    first, _ = states(lambda p: getattr(bitsandbytes.optim, kind)(p, lr=1e-2))
    assert first.keys() == {"step", NESTED}
    pieces = first[NESTED]
    assert bool(quantised_keys(pieces)) == (kind != "AdamW32bit")
    flat = all(value.dim() == 1 for value in pieces.values())
    assert (pieces.keys() <= KNOWN and flat) == (kind not in {"LAMB8bit", "AdEMAMix8bit"})
    if kind in ("AdamW8bit", "Lion8bit"):
        assert pieces["absmax1"].numel() == -(-NUMEL // 256)
