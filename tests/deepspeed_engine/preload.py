"""What the fork server imports before it forks: DeepSpeed on CPU, and what it would import in every rank.

Only ranks import this; it sets the environment of its process.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import logging
import os
import sys
import warnings

from tests.rank_state import State
from zckpt.formats.registry import BUILT_IN

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # Muon would compile its update, for minutes
}

_SLOW_IMPORTS = (  # each costs seconds where it is first needed, which would be in every rank
    "accelerate.state",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_repack",
    "deepspeed.moe.fused_expert_layout",
    "deepspeed.moe.layer",
    "deepspeed.runtime.lr_schedules",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # newer DeepSpeed imports it to look at any optimizer
    "lightning.pytorch",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.distributed.torch_fully_sharded_data_parallel",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "numpy.ctypeslib",
    "peft",
    "pytest",  # the module of a test, in which what a rank runs is found, imports it
    "safetensors.torch",
    "tests.cli.console",
    "tests.deepspeed_engine.resume",
    "tests.deepspeed_engine.tensor_parallel",
    "tests.deepspeed_engine.training",
    "tests.deepspeed_engine.truth",
    "tests.folders",
    "tests.hf_training.distributed",
    "tests.hf_training.training",
    "tests.logical",
    "tests.optim.zero.reference",
    "tests.training.trainings",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "torch._dynamo",  # torch's optimizers import it when they are built
    "torch._dynamo.backends.debugging",  # and it imports these when it compiles
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch.compilers",
    "torch._inductor.sizevars",
    "torch.distributed.tensor.experimental._attention",
    "torch.export._trace",
    "transformers.integrations.deepspeed",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "zckpt.dcp",
    "zckpt.formats.account.values",
    "zckpt.formats.deepspeed.layouts.flat",
    "zckpt.formats.deepspeed.layouts.per_parameter",
    "zckpt.formats.deepspeed.rare.unsaved",
    "zckpt.formats.deepspeed.reader",
    "zckpt.formats.torch_files.beside",
    "zckpt.formats.transformers_trainer.directory",
    "zckpt.formats.universal.reader",
    "zckpt.hf",
    "zckpt.operations.consolidate",
    "zckpt.operations.convert",
    "zckpt.operations.reshard",
    "zckpt.optim.states.zero",
    "zckpt.optim.states.zero_redundancy",
    "zckpt.training.checkpointer",
    *BUILT_IN.values(),
)
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says what it could be faster with
gc.disable()  # nothing of what is imported is garbage
for _name in _SLOW_IMPORTS:
    with contextlib.suppress(Exception), warnings.catch_warnings():  # older versions fail in ways of their own
        warnings.simplefilter("ignore")
        importlib.import_module(_name)


def patch() -> None:
    """Let a rank not wait for disks, and its process groups share what looks after them."""
    os.fsync = os.fdatasync = lambda descriptor: None  # no test pulls the plug
    _share_gloo_device()


def _patch_deepspeed() -> None:
    """Let DeepSpeed do on a plain CPU what it does on a GPU. None of it changes what is written."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    comm = sys.modules["deepspeed.comm.torch"]
    if hasattr(comm, "build_shm_op"):  # a shared-memory kernel, compiled on first use
        comm.build_shm_op = lambda: None
    # DeepSpeed asks oneDNN about fp16 and refuses; torch itself computes fp16 on any CPU.
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda self: True
    _patch_fused_adam()
    _patch_zero_dim_broadcast()
    _patch_auto_ep()
    _patch_stage3()


def _patch_stage3() -> None:
    """Let ZeRO-3 print few numbers of each parameter into a message that nobody is shown."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
    from torch._tensor_str import printoptions

    original = Stage3.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):  # noqa: N807
        with printoptions(threshold=0, edgeitems=1):
            original(self, *args, **kwargs)

    Stage3.__init__ = __init__


def _share_gloo_device() -> None:
    """Let all process groups of a rank have one device.

    Each has a thread that looks a hundred times a second for something to do. Groups that something holds for ever, as
    ZeRO-3's engine does, kept a tenth of a machine busy.
    """
    from torch.distributed import ProcessGroupGloo

    original, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()

    @functools.wraps(original)
    def __init__(self, store, rank, size, *rest, **others):  # noqa: N807
        timeout = rest[0] if rest else others.get("timeout")
        further = rest[1:] or [value for name, value in others.items() if name != "timeout" and value]
        if isinstance(timeout, datetime.timedelta) and not further:
            with contextlib.suppress(AttributeError, TypeError):  # these names are torch's own, of some versions
                options = ProcessGroupGloo._Options()
                options._devices, options._threads, options._timeout = [device], 2, timeout
                return original(self, store, rank, size, options)
        return original(self, store, rank, size, *rest, **others)

    ProcessGroupGloo.__init__ = __init__


def _patch_auto_ep() -> None:
    """Let AutoEP leave Transformers' recorders of router outputs alone, whose registry it does not fit."""
    try:
        from deepspeed.module_inject import auto_ep
    except ImportError:  # before DeepSpeed 0.19
        return
    auto_ep.AutoEP._retarget_transformers_output_recorders = lambda *_, **__: None


def _patch_fused_adam() -> None:
    """Serve FusedAdam, which Muon has beside it, without the minutes that compiling its kernel takes."""
    import types

    from deepspeed.ops.adam import fused_adam

    from tests.deepspeed_engine.optimizers import adamw

    def multi_tensor_adam(chunk, overflow, tensors, lr, beta1, beta2, eps, step, decoupled, correction, weight_decay):
        del chunk, overflow
        for reduced, p, first, second in zip(*tensors, strict=True):
            gradient = reduced if decoupled else reduced.add(p, alpha=weight_decay)
            decay = weight_decay if decoupled else 0.0
            adamw(p, gradient, first, second, step, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay,
                  bias_correction=correction)  # fmt: skip

    kernel = types.SimpleNamespace(multi_tensor_adam=multi_tensor_adam)
    fused_adam.FusedAdamBuilder = lambda: types.SimpleNamespace(load=lambda: kernel)


def _patch_zero_dim_broadcast() -> None:
    """Serve `p.data.view(torch.uint8)`, with which DeepSpeed 0.19 broadcasts, to 0-d parameters, too."""
    import torch

    original = torch.Tensor.view

    def view(self, *args, **kwargs):
        if args and args[0] is torch.uint8 and self.dim() == 0:
            return original(original(self, 1), torch.uint8)
        return original(self, *args, **kwargs)

    torch.Tensor.view = view


_patch_deepspeed()
BEFORE = State()
"""What a rank is before its first test; it looks only at what it imports itself."""
BEFORE.learn()
gc.enable()
gc.freeze()  # a rank that collected the garbage of all these modules would copy their memory, too
