"""Which optimizers step each element by itself: the table is held against the classes, which are run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.gloo import on_ranks
from tests.optim.zero.reference import Net, bits, is_unchanged, make, stepped
from zckpt.optim import ZeroOptimizer, ZeroRedundancyOptimizer
from zckpt.optim.zero.flat import NAMES, is_per_tensor

SHAPE = (6, 8)


def matrix_of(optimizer_class: Callable[..., torch.optim.Optimizer], cuts: list[int] | None) -> torch.Tensor:
    """Return a matrix after some steps, as it is, or flat and cut in slices, each with an optimizer of its own."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(SHAPE, generator=generator)
    parts = [values] if cuts is None else list(torch.split(values.reshape(-1), cuts))
    parameters = [torch.nn.Parameter(part.clone()) for part in parts]
    optimizers = [optimizer_class([parameter]) for parameter in parameters]
    for _ in range(4):
        gradient = torch.randn(SHAPE, generator=generator)
        its = [gradient] if cuts is None else torch.split(gradient.reshape(-1), cuts)
        for parameter, one, optimizer in zip(parameters, its, optimizers, strict=True):
            parameter.grad = one.clone()
            optimizer.step(lambda: 1.0) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def is_elementwise(optimizer_class: Callable[..., torch.optim.Optimizer]) -> bool:
    """Tell whether slices of a tensor end where the tensor ends."""
    whole = matrix_of(optimizer_class, None)
    try:
        cut = matrix_of(optimizer_class, [20, 28])
    except ValueError:  # a class may take matrices only
        return False
    return torch.allclose(whole, cut, rtol=1e-5, atol=1e-6)


def classes() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Return every class of torch, but that of sparse gradients, and those of others that run here."""
    from torch.optim import Optimizer

    found: dict[str, Any] = {
        name: partial(one, lr=0.01)
        for name, one in vars(torch.optim).items()
        if isinstance(one, type) and issubclass(one, Optimizer) and one not in (Optimizer, torch.optim.SparseAdam)
    }
    transformers = pytest.importorskip("transformers")
    found["transformers.Adafactor"] = transformers.Adafactor
    return found


@pytest.mark.parametrize("name", classes())
def test_table_is_what_the_classes_do(name):
    made = classes()[name]
    cls = made.func if isinstance(made, partial) else made
    assert is_per_tensor(cls) == (not is_elementwise(made))


@pytest.mark.interop
def test_names_of_deepspeed():
    """They run on GPUs only, or within its engine; what they are called is what the table has."""
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

    known = (FusedLamb, muon_optimizer.MuonWithAuxAdam, original_muon.Muon, original_muon.SingleDeviceMuon)
    assert all(map(is_per_tensor, known))
    assert all(name == name.lower().replace("_", "") for name in NAMES)


class Derived(torch.optim.Adafactor):
    """Somebody's own."""


@pytest.mark.interop
@on_ranks(2)
def test_what_looks_at_whole_tensors_is_refused_unless_told():
    """Before anything is moved; unless told; and by the optimizer that steps whole tensors not at all."""
    for cls in (torch.optim.Adafactor, Derived, partial(Derived, eps=(1e-9, 1e-3))):
        net = Net()
        before = [p.data_ptr() for p in net.parameters()]
        with pytest.raises(ValueError, match=r"at whole tensors.*ZeroRedundancyOptimizer\(.*allow_per_tensor=True"):
            make(net, cls)
        assert isinstance(cls, partial) or [p.data_ptr() for p in net.parameters()] == before
        ours = make(Net(), cls, allow_per_tensor=True)
        assert isinstance(ours.optim, torch.optim.Adafactor)
    model = Net()
    before_step = bits(model)
    ours = make(model, torch.optim.Adafactor, allow_per_tensor=True)
    stepped(ours, model, 0)
    assert not is_unchanged(model, before_step)
    ZeroRedundancyOptimizer(Net().named_parameters(), torch.optim.Adafactor, lr=0.01)
    with pytest.raises(ValueError, match="LBFGS looks at whole tensors"):
        ZeroOptimizer(Net().named_parameters(), torch.optim.LBFGS)
