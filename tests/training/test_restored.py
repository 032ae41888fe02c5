"""What is trained is held against a checkpoint, whoever loaded it, in one process: what differs is told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import zckpt
from tests.live import save_both
from tests.refusals import refusing
from zckpt.errors import NotRestoredError, UsageError


def test_the_first_element_that_differs_is_told():
    model = torch.nn.Linear(3, 2)
    zckpt.save("saved", model=model)
    with torch.no_grad():
        model.weight[1, 0], model.weight[1, 2] = 7, torch.nan
    was = zckpt.open("saved").read("weight")[1, 0].item()
    with pytest.raises(AssertionError, match="differs in 2 of 6 elements") as error:
        zckpt.assert_restored("saved", model=model)
    assert error.value.differences == (
        f"weight of weight differs in 2 of 6 elements, first at [1, 0]: {was!r} in the checkpoint, 7.0 here",
    )


def stepped_once(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_state_that_is_rounded_is_not_restored_unless_that_is_allowed():
    model, optimizer = stepped_once(torch.float32)
    zckpt.save("saved", model=model, optimizer=optimizer)
    narrow, its = stepped_once(torch.bfloat16)
    zckpt.load("saved", model=narrow, optimizer=its)
    zckpt.assert_restored("saved", model=narrow)
    with refusing(NotRestoredError, "float32 there and bfloat16 here"):
        zckpt.assert_restored("saved", model=narrow, optimizer=its)
    zckpt.assert_restored("saved", model=narrow, optimizer=its, allow_rounding=True)


def test_what_the_checkpoint_has_not_is_not_restored():
    model, optimizer = stepped_once(torch.float32)
    zckpt.save("saved", model=model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for one, said in (
        ({"optimizer": optimizer}, "no state of an optimizer"),
        ({"scheduler": scheduler}, "no state of a scheduler"),
        ({"model": torch.nn.Sequential(model)}, "the checkpoint has no 0.weight"),
    ):
        with refusing(NotRestoredError, said):
            zckpt.assert_restored("saved", **{"model": model, **one})
    with refusing(UsageError, "nothing was given"):
        zckpt.assert_restored("saved")


def test_what_a_load_that_was_not_strict_has_left_out_is_not_restored():
    def made(how: str) -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        groups = {"one": [model], "split": model, "first": model[:1], "two": model}[how]
        its = [{"params": list(part.parameters()), "lr": 0.1} for part in groups]
        return model, [*map(torch.optim.SGD, ([one] for one in its))] if how == "two" else torch.optim.SGD(its)

    model, optimizer = made("one")
    zckpt.save("saved", model=model, optimizer=optimizer)
    for how, said in (
        ("split", "other param groups than the optimizer's: expected 2, found 1"),
        ("first", "param group 0 has other parameters than the optimizer's: found 1.bias, 1.weight"),
        ("two", "the checkpoint has 1 optimizer, but 2 were given: expected one without a name, found 0, 1"),
    ):
        model, optimizer = made(how)
        zckpt.load("saved", model=model, optimizer=optimizer, strict=False)
        zckpt.assert_restored("saved", model=model, optimizer=optimizer, strict=False)
        with torch.no_grad():
            model[0].bias.fill_(7)
        with pytest.raises(NotRestoredError) as error:
            zckpt.assert_restored("saved", model=model, optimizer=optimizer)
        assert error.value.differences[0] == said
        assert error.value.differences[1].startswith("weight of 0.bias differs in 3 of 3 elements")


@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.LBFGS, {"max_iter": 3}), (torch.optim.Adam, {"betas": (torch.tensor(0.5), torch.tensor(0.25))})],
)
def test_lists_and_tensors_of_a_state_dict_of_torch_are_compared(cls, options):
    model = torch.nn.Linear(3, 2)
    optimizer = cls(model.parameters(), **options)
    for _ in range(3):
        optimizer.zero_grad()
        (loss := model(torch.ones(1, 3)).square().sum()).backward()
        optimizer.step(lambda loss=loss: loss)
    save_both(model, optimizer, "saved.pt")
    zckpt.assert_restored("saved.pt", model=model, optimizer=optimizer)
    state = optimizer.state[model.weight]
    what, changed = ("ro of weight[0]", state["ro"][0]) if "ro" in state else ("betas[1]", options["betas"][1])
    changed.add_(1)
    with refusing(NotRestoredError, re.escape(what)) as error:
        zckpt.assert_restored("saved.pt", model=model, optimizer=optimizer)
    assert len(error.value.differences) == 1


def test_state_of_parameters_of_another_shape_is_left_out_as_they_are():
    model, optimizer = stepped_once(torch.float32)
    zckpt.save("saved", model=model, optimizer=optimizer)
    other = torch.nn.Linear(3, 4)
    its = torch.optim.AdamW(other.parameters())
    zckpt.load("saved", model=other, optimizer=its, strict=False)
    zckpt.assert_restored("saved", model=other, optimizer=its, strict=False)
    with pytest.raises(NotRestoredError) as error:
        zckpt.assert_restored("saved", model=other, optimizer=its)
    assert error.value.differences == ("another shape has weight, bias",)
