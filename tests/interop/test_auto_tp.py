"""Models that DeepSpeed's AutoTP slices: its maps are read as it reads them, and stock DeepSpeed goes on.

Bits are compared as in `test_reshard`; the truth is gathered with DeepSpeed's own reading of its maps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zckpt
from tests.deepspeed_engine import Spec, resume, train
from tests.plans import read_slot
from tests.truth import Truth, assert_consolidated
from zckpt.errors import UnsupportedError
from zckpt.formats.deepspeed.axes.tensor_parallel import cut, merge
from zckpt.formats.deepspeed.axes.tp_rules import Rules
from zckpt.formats.deepspeed.origin import Rank
from zckpt.state import Extent, Parameter, Slot, Span

pytestmark = pytest.mark.interop

SLICED = {"tensor_parallel": 2, "auto_tp": True, "dtype": "fp32", "groups": 2, "steps": 2, "steps_after": 2}
LLAMA = Spec("llama_heads", model="llama_heads", **SLICED)
CODEGEN = Spec("codegen", model="codegen", stage=1, **SLICED)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return train(LLAMA, tmp_path_factory.mktemp("auto_tp"))


def goes_on(run: Path, source: Path, spec: Spec, ranks: int, degree: int, *, universal: bool = False) -> None:
    training = spec.at(ranks * degree, tensor_parallel=degree, auto_tp=degree > 1)
    verdict = resume(run, training, source, universal=universal)
    verdict.assert_goes_on(2e-5)


def test_a_model_sliced_by_heads_is_read_and_resharded(llama, tmp_path):
    assert_consolidated(llama, Truth(llama), tmp_path)
    for ranks, degree in ((2, 2), (1, 1)):
        target = tmp_path / f"{ranks}x{degree}"
        zckpt.reshard(llama, target, world_size=ranks, tensor_parallel_size=degree)
        assert zckpt.diff(llama, target).equal
        goes_on(target, llama, LLAMA, ranks, degree)


def test_it_is_universal(llama, tmp_path):
    (tmp_path / "run").mkdir()
    zckpt.convert(llama, tmp_path / "run" / "universal", to="universal")
    (tmp_path / "run" / "latest_universal").write_text("universal")
    (tmp_path / "run" / "latest").write_text("universal")
    goes_on(tmp_path / "run", llama, LLAMA, 1, 2, universal=True)


@pytest.mark.nightly
def test_blocks_in_an_order_of_their_own(tmp_path):
    made = train(CODEGEN, tmp_path)
    assert_consolidated(made, Truth(made), tmp_path)
    zckpt.reshard(made, tmp_path / "target", world_size=1, tensor_parallel_size=1)
    goes_on(tmp_path / "target", made, CODEGEN, 1, 1)
    with pytest.raises(UnsupportedError, match="cut in a special order"):
        zckpt.reshard(made, tmp_path / "four", world_size=1, tensor_parallel_size=4)


def _maps() -> dict[str, Any]:
    from deepspeed.checkpoint import affine

    return {
        "rows": affine.contiguous_split_map((7, 3), [3, 0, 4], 0),
        "columns": affine.contiguous_split_map((2, 7), [3, 2, 2], 1),
        "vector": affine.contiguous_split_map((6,), [2, 2, 2], 0),
        "fused": affine.sub_param_map((14, 3), [8, 6], [[4, 2, 2], [2, 2, 2]], 0),
        "key and value whole": affine.segmented_map((9, 2), [(6, False), (3, True)], 0, 3, [[2, 2, 2]]),
        "whole between": affine.segmented_map((2, 9), [(2, True), (6, False), (1, True)], 1, 3, [[3, 2, 1]]),
        "blocks": affine.block_gather_map((12, 2), {0: [0, 3], 1: [1, 2], 2: [5, 4]}, 2, 0),
        "replicated": affine.replicated_map((3, 2), 3),
    }


@pytest.mark.parametrize("kind", list(_maps()))
def test_a_map_is_read_and_written_as_deepspeed_does(kind, tmp_path):
    from deepspeed.checkpoint.affine import ParamAffineMap

    made = _maps()[kind]
    whole = torch.arange(float(made.numel)).reshape(made.logical_shape)
    slices = [made.extract(whole, rank).contiguous() for rank in range(3)]
    info = {"affine_map": {"version": 1, "params": {r"^a\.b$": made.to_dict()}}}
    rules = Rules(info, "rules")
    merged = merge([_state(rank, one, tmp_path) for rank, one in enumerate(slices)], rules)
    parameter = merged.parameters["a.b"]
    assert np.array_equal(read_slot(parameter.slots["master"]), whole.numpy())
    for one in merged.duplicates:
        assert np.array_equal(read_slot(one.slot), read_slot(one.original))
    copied = sum(one.slot.numel for one in merged.duplicates)
    assert copied + whole.numel() == sum(one.numel() for one in slices)
    rule = rules.cut("a.b", tuple(whole.shape), 3)
    again = ParamAffineMap.from_dict(rules.maps_for(["a.b"], 3)["params"][r"^a\.b$"])
    again.validate_coverage()
    for rank, one in enumerate(slices):
        assert np.array_equal(read_slot(cut(parameter, rule, rank).slots["master"]), one.numpy())
        assert torch.equal(again.extract(whole, rank), one)


def _state(rank, value: torch.Tensor, directory: Path) -> Rank:
    file = directory / str(rank)
    file.write_bytes(value.numpy().tobytes())
    span = Span(Extent.whole(tuple(value.shape)), str(file), 0, "float32")
    slot = Slot("master", "float32", tuple(value.shape), (span,) if value.numel() else ())
    return Rank(
        "", "deepspeed", mp_rank=rank, parameters={"a.b": Parameter("a.b", slot.shape, "float32", {"master": slot})}
    )
