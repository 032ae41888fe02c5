"""The 1-bit optimizers: what they keep of parameters is state, the errors of their compression are not."""

from __future__ import annotations

import pytest
import torch

import zckpt
from tests.formats.deepspeed.contents import run_of
from tests.formats.deepspeed.shards import copy, edit, model_file
from tests.formats.holding import converted
from tests.refusals import refusing
from tests.truth import Truth, assert_consolidated

ZERO_ONE, LAMB = "versions/ds0189_zero_one_adam_s0_fp16_dp2", "versions/ds0189_one_bit_lamb_s0_fp16_dp2"
SLOTS = {
    ZERO_ONE: {"exp_avg", "exp_avg_sq", "momentum_accumulator"},
    LAMB: {"exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"},
}


@pytest.mark.parametrize("name", SLOTS)
def test_all_state_of_parameters_is_read(name):
    checkpoint, truth = zckpt.open(run_of(name)), Truth(run_of(name))
    assert checkpoint.warnings == []
    assert (
        {*truth.slots} == {"exp_avg", "exp_avg_sq", *SLOTS[name]} == {*checkpoint.slot_names()} - {"weight", "master"}
    )
    assert_consolidated(run_of(name), truth)
    converted(run_of(name), "zckpt", "zckpt", verify=True)


def test_errors_of_compression_do_not_hide_which_parameter_it_is():
    """They are larger than the parameter, and would be taken for its shape."""
    tag = copy("s0_fp32_dp2")
    before = zckpt.fingerprint(tag).text

    def compress(content):
        for state in content["optimizer"]["state"].values():
            numel = state["exp_avg"].numel()
            state.update(tensor_size=numel, corrected_tensor_size=numel + 7, server_chunk_size=(numel + 7) // 2,
                         worker_error=torch.ones(numel + 7), server_error=torch.ones((numel + 7) // 2))  # fmt: skip

    edit(model_file(tag), compress)
    assert zckpt.fingerprint(tag).text == before
    assert not zckpt.inspect(tag).left_out


def test_an_error_without_its_sizes_is_not_taken_for_one():
    tag = copy(ZERO_ONE)

    def strange(content):
        for state in content["optimizer"]["optimizer_state_dict"]["state"].values():
            del state["server_chunk_size"]

    edit(model_file(tag), strange)
    with refusing(zckpt.LeftOutError, "would be lost: .*optimizer_state_dict/state/0"):
        zckpt.convert(tag, "out", to="zckpt")
