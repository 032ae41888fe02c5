"""Options of the engine that change how it computes or saves: its state is cut, and DeepSpeed goes on."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zckpt
from tests import gloo
from tests.deepspeed_engine import Spec, resume, train
from tests.formats.deepspeed.contents import run_of
from tests.truth import Truth, assert_consolidated

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
NODE_LOCAL = {"checkpoint": {"use_node_local_storage": True}}
HPZ = {"zero_hpz_partition_size": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 1, "dtype": "fp32", "config": AUTOCAST},
        {"stage": 3, "dtype": "fp32", "config": AUTOCAST},
        {"stage": 3, "config": STATES},
        {"stage": 2, "config": NODE_LOCAL},
        {"stage": 3, "zero": HPZ},
        {"stage": 1, "named": True},
    ],
    ids=["autocast1", "autocast3", "states_in_bf16", "node_local", "hpz", "named"],
)
def test_deepspeed_resumes_it(changes, tmp_path):
    spec = Spec("options", groups=2, steps=2, steps_after=2, **changes)
    made = train(spec, tmp_path)
    assert zckpt.verify(made, deep=True).sound
    zckpt.reshard(made, tmp_path / "cut", world_size=3, verify=True)
    hpz = changes.get("zero") is HPZ
    verdict = resume(tmp_path / "cut", spec.at(3, zero={"zero_hpz_partition_size": 3} if hpz else {}), made)
    assert verdict.differences == []
    # under hpZ, DeepSpeed 0.19 goes on as far off after loading its own files at the same number of ranks
    assert hpz or verdict.loss_difference <= 3e-3


@pytest.mark.parametrize(("stage", "serialization"), [(2, True), (0, False)])
def test_files_of_the_fast_writer_are_read_and_get_the_names_that_deepspeed_loads(stage, serialization, tmp_path):
    """`checkpoint.writer` of type `fast` writes `NAME-WRITER.WRITERS`, which DeepSpeed itself does not find again."""
    writer = {"type": "fast", "io_buffer_size": 1 << 20, "data_parallel": "replica"}
    checkpoint = {"checkpoint_serialization": serialization, "writer": writer}
    spec = Spec("fast", stage=stage, groups=2, steps=2, steps_after=2, config={"checkpoint": checkpoint})
    made = tmp_path / "made"
    made.mkdir()
    gloo.run(_produce_fast, spec.world_size, spec, made, fresh=True)
    assert (made / "global_step2" / "mp_rank_00_model_states.pt-1.2").exists()
    verified = zckpt.verify(made, deep=True)
    assert verified.sound
    assert [Path(str(one.file)).name for one in verified.findings] == ["mp_rank_00_model_states.pt-1.2"]
    (tmp_path / "read").mkdir()
    assert_consolidated(made, Truth(made), tmp_path / "read")
    for world_size in (2, 3):
        cut = tmp_path / f"cut{world_size}"
        zckpt.reshard(made, cut, world_size=world_size, verify=True)
        assert resume(cut, spec.at(world_size, config={}), made).ok


def _produce_fast(rank, world_size, spec: Spec, folder: Path) -> None:
    """Train with DeepSpeed's own writer over a file descriptor, in the place of its kernel for asynchronous writes."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.io import fast_file_writer
    from deepspeed.runtime.model_checkpointing import writer_factory

    from tests.deepspeed_engine import training

    os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}
    type(get_accelerator()).is_pinned = lambda self, tensor: True
    handle = SimpleNamespace(aio_handle=lambda **_: _Handle())
    writer_factory.AsyncIOBuilder = lambda: SimpleNamespace(load=lambda: handle)
    fast_file_writer.UtilsBuilder = lambda: SimpleNamespace(load=lambda: SimpleNamespace(cast_to_byte_tensor=None))
    training._produce(rank, world_size, spec, folder)


class _Handle:
    def get_alignment(self) -> int:
        return 4096

    def async_pwrite(self, tensor: Any, descriptor: int, offset: int) -> int:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        os.pwrite(descriptor, tensor.numpy().tobytes(), offset)
        return 0

    def wait(self) -> int:
        return 1


# --- ZenFlow, with its optimizer's C++ extension replaced

TRANSPOSED = run_of("versions/ds0189_zenflow_s2_bf16_dp2")
OFFLOAD = {"device": "cpu", "pin_memory": False}
SELECTED = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 4, "update_interval": 2,
            "overlap_step": False}  # fmt: skip


def zenflow(stage: int, **options: Any) -> Spec:
    zero = {"offload_optimizer": OFFLOAD, **({"zenflow": {**SELECTED, **options}} if options else {})}
    return Spec(f"zenflow_s{stage}", stage, model="tiny", optimizer="adamw_offloaded", groups=1, zero=zero,
                config={"zero_force_ds_cpu_optimizer": True})  # fmt: skip


@pytest.mark.parametrize(("stage", "warm_up"), [(2, 0), (3, 100)])
def test_deepspeed_resumes_zenflow_at_other_ranks(stage, warm_up, tmp_path):
    """At ZeRO-3 it selects on CUDA only, so that all rounds are those before."""
    spec = zenflow(stage, full_warm_up_rounds=warm_up)
    made = train(spec, tmp_path)
    assert_consolidated(made, Truth(made), tmp_path)
    zckpt.reshard(made, tmp_path / "cut", world_size=3, verify=True)
    assert resume(tmp_path / "cut", spec.at(3), made).differences == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_engine_without_zenflow_loads_it_in_place(world_size):
    """Also at the same ranks, where its files would load as they are, with matrices transposed."""
    assert resume(TRANSPOSED, zenflow(2).at(world_size), TRANSPOSED, in_place=True).differences == []
