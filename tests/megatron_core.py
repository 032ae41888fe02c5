"""Megatron-Core itself, on gloo ranks: a GPTModel with its optimizer that saves, loads and trains on.

It asks for CUDA devices by name. `OnCpu` gives it the CPU, so that the package is as it was installed.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import multiprocessing
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.overrides import TorchFunctionMode

from tests.megatron_families import FAMILIES
from tests.megatron_families import layers as family_layers

VOCABULARY, LENGTH = 64, 8


@dataclass(frozen=True)
class Spec:
    """A model, its optimizer, and how both are spread over ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    layers: int = 2
    experts: int = 0
    groups: int = 2
    distributed: bool = True
    llama: bool = True
    moe_layers: tuple[int, ...] | None = None
    width: int = 24
    family: str = ""
    bf16: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.bfloat16 if self.bf16 else torch.float32

    def alone(self, **changes: Any) -> Spec:
        """The same model on one rank."""
        return replace(self, **{"tp": 1, "pp": 1, "dp": 1, "ep": 1, **changes})


class Live:
    """What a rank trains."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.state = spec, grid(spec)
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import get_megatron_optimizer

        self.model = self._model()
        cut = DistributedDataParallelConfig(use_distributed_optimizer=spec.distributed, grad_reduce_in_fp32=True)
        self.ddp = DistributedDataParallel(self.model.config, cut, self.model)
        options = settings(spec, use_distributed_optimizer=spec.distributed)
        self.optimizer = get_megatron_optimizer(options, [self.ddp])
        self._step(lambda _: None)  # makes the state that is loaded into

    def _model(self) -> Any:
        from megatron.core.models.gpt import GPTModel, gpt_layer_specs
        from megatron.core.transformer import transformer_config

        spec = self.spec
        about: dict[str, Any] = {
            "num_layers": spec.layers, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": spec.groups,
            "ffn_hidden_size": spec.width, "tensor_model_parallel_size": spec.tp,
            "pipeline_model_parallel_size": spec.pp, "expert_model_parallel_size": spec.ep,
            "use_cpu_initialization": True, "params_dtype": spec.dtype, "pipeline_dtype": spec.dtype,
            "bf16": spec.bf16, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
            "bias_activation_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
            "persist_layer_norm": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
            "add_bias_linear": not spec.llama, "gated_linear_unit": spec.llama,
            "activation_func": torch.nn.functional.silu if spec.llama else torch.nn.functional.gelu,
            "normalization": "RMSNorm" if spec.llama else "LayerNorm",
        }  # fmt: skip
        if spec.experts:
            about |= {"num_moe_experts": spec.experts, "moe_router_topk": 2, "moe_ffn_hidden_size": spec.width,
                      "moe_token_dispatcher_type": "allgather", "moe_router_score_function": "sigmoid",
                      "moe_router_enable_expert_bias": True,
                      "moe_layer_freq": list(spec.moe_layers) if spec.moe_layers else 1}  # fmt: skip
        family = FAMILIES[spec.family] if spec.family else None
        if family:
            about |= {"hidden_size": 24, "num_attention_heads": 6, "kv_channels": 8, "ffn_hidden_size": 20,
                      "layernorm_epsilon": 1e-6, **family.settings}  # fmt: skip
        latent = about.get("multi_latent_attention")
        config = getattr(transformer_config, "MLATransformerConfig" if latent else "TransformerConfig")(**about)
        norm = about["normalization"]
        if family:
            layers = family_layers(config, spec.family)
        elif spec.moe_layers:
            make = gpt_layer_specs.get_gpt_decoder_block_spec
            layers = make(config, use_transformer_engine=False, normalization=norm)
        else:
            make = gpt_layer_specs.get_gpt_layer_local_spec
            norms = {"normalization": norm} if "normalization" in inspect.signature(make).parameters else {}
            layers = make(spec.experts or None, moe_grouped_gemm=False, **norms)
        more = {"share_embeddings_and_output_weights": not spec.llama,
                "position_embedding_type": "rope" if spec.llama else "learned_absolute"}  # fmt: skip
        if about.get("mtp_num_layers"):
            make = gpt_layer_specs.get_gpt_mtp_block_spec
            more["mtp_block_spec"] = make(config, layers, use_transformer_engine=False)
        model = GPTModel(config, layers, VOCABULARY, LENGTH, pre_process=self.state.is_pipeline_first_stage(),
                         post_process=self.state.is_pipeline_last_stage(),
                         **{**more, **(family.model if family else {})})  # fmt: skip
        if family:
            family.wrap(model)
        model = model.to(spec.dtype)
        for name, buffer in model.named_buffers():
            if "expert_bias" in name or "local_tokens" in name:
                buffer.data = buffer.data.float()
        return model

    def _sharded(self, *, loading: bool) -> dict[str, Any]:
        from megatron.core.transformer import utils

        about: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self.spec.distributed:
            about |= {"distrib_optim_sharding_type": "fully_reshardable",
                      "distrib_optim_fully_reshardable_mem_efficient": False}  # fmt: skip
        metadata = getattr(utils, "ensure_metadata_has_dp_cp_group", dict)(about)
        model = self.model.sharded_state_dict(metadata=metadata)
        cut = self.optimizer.sharded_state_dict
        more = {"metadata": metadata} if {"metadata", "kwargs"} & {*inspect.signature(cut).parameters} else {}
        optimizer = cut(model, is_loading=loading, **more)
        rest = {} if loading else {"content_metadata": about, "iteration": 2, "checkpoint_version": 3.0}
        return {"model": model, "optimizer": optimizer, **rest}

    def save(self, run: Path) -> None:
        """Write `run` as Megatron-LM lays it out."""
        from megatron.core.dist_checkpointing import save

        folder = run / "iter_0000002"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
            (run / "latest_checkpointed_iteration.txt").write_text("2")
        dist.barrier()
        with writers():
            save(self._sharded(loading=False), str(folder))
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Load a directory; nothing that the model or the optimizer asks for may be missing."""
        from megatron.core.dist_checkpointing import load

        found = load(self._sharded(loading=True), str(folder))
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self._part_steps()

    def _part_steps(self) -> None:
        """Give each parameter a step of its own: where it finds neither Apex nor Transformer Engine, one tensor is that
        of all, to which torch's Adam adds one for every parameter that the rank has. How many these are depends on
        the numbers of ranks, and so would what is learned.
        """
        for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for state in one.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].clone()

    def legacy_folder(self, iteration: Path) -> Path:
        """Return this rank's directory, named as Megatron-LM does."""
        ranks = (self.state.get_pipeline_model_parallel_rank(), self.state.get_expert_model_parallel_rank())
        more = "".join(
            f"_{rank:03d}" for rank, size in zip(ranks, (self.spec.pp, self.spec.ep), strict=True) if size > 1
        )
        return iteration / f"mp_rank_{self.state.get_tensor_model_parallel_rank():02d}{more}"

    def save_legacy(self, iteration: Path) -> None:
        """Write this rank's legacy files."""
        folder = self.legacy_folder(iteration)
        folder.mkdir(parents=True, exist_ok=True)
        about = argparse.Namespace(
            tensor_model_parallel_size=self.spec.tp,
            pipeline_model_parallel_size=self.spec.pp,
            expert_model_parallel_size=self.spec.ep,
            untie_embeddings_and_output_weights=self.spec.llama,
        )
        content = {
            "args": about,
            "checkpoint_version": 3.0,
            "iteration": 2,
            "model": self.model.state_dict_for_save_checkpoint(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(content, folder / "model_optim_rng.pt")
        if self.spec.distributed:
            self.optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
        dist.barrier()

    def load_legacy(self, iteration: Path) -> None:
        """Load this rank's legacy files."""
        folder = self.legacy_folder(iteration)
        content = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        self.model.load_state_dict(content["model"], strict=True)
        self.optimizer.load_state_dict(content["optimizer"])
        if self.spec.distributed:
            self.optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
        self._part_steps()

    def train_at_random(self, steps: int) -> None:
        """Step with gradients of noise, for which no stage needs another."""
        ranks = (self.state.get_tensor_model_parallel_rank(), self.state.get_pipeline_model_parallel_rank(),
                 self.state.get_expert_model_parallel_rank())  # fmt: skip
        noise = torch.Generator().manual_seed(sum(rank * 10**at for at, rank in enumerate(ranks)) + 5)
        for _ in range(steps):
            self._step(lambda one: one.main_grad.copy_(torch.randn(one.shape, generator=noise)))

    def _step(self, give: Any) -> None:
        self.ddp.zero_grad_buffer()
        for one in self.ddp.parameters():
            one.grad = None
            give(one)
        self.ddp.finish_grad_sync()
        self.optimizer.step()

    def train(self, steps: int, rows: int = VOCABULARY) -> list[float]:
        """Train on the same tokens on every rank; return the losses. Without pipeline stages."""
        tokens = torch.Generator().manual_seed(11)
        losses = []
        for _ in range(steps):
            drawn = torch.randint(0, rows, (2, LENGTH + 1), generator=tokens)
            self.ddp.zero_grad_buffer()
            mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
            places = torch.arange(LENGTH).expand(2, LENGTH)
            loss = self.ddp(drawn[:, :-1], places, mask, labels=drawn[:, 1:]).mean()
            loss.backward()
            losses.append(loss.item())
            self.ddp.finish_grad_sync()
            self.optimizer.step()
        return losses

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every slot of every parameter as `SLOT/NAME`, names as in the files; on one rank."""
        found = {}
        for name, one in self.model.named_parameters():
            found[f"weight/{filed(name)}"] = one.detach().clone()
        for name, one in self.model.named_buffers():
            if "expert_bias" in name:
                found[f"weight/{filed(name)}"] = one.detach().clone()
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for name, one in self.model.named_parameters():
                for slot, value in self._state(optimizer, one).items():
                    if slot != "step":
                        found[f"{slot}/{filed(name)}"] = value.detach().clone().reshape(one.shape)
        return found

    def _state(self, optimizer: Any, one: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.spec.distributed:
            if not hasattr(optimizer, "_get_main_param_and_optimizer_states"):  # before 0.12
                group, place = optimizer.model_param_group_index_map[one]
                main = optimizer.optimizer.param_groups[group]["params"][place]
                return {"master": main, **optimizer.optimizer.state[main]}
            state: dict[str, torch.Tensor] = dict(optimizer._get_main_param_and_optimizer_states(one))
            return {"master" if key == "param" else key: value for key, value in state.items()}
        if not hasattr(optimizer, "float16_groups"):  # FP32Optimizer has no masters
            return dict(optimizer.optimizer.state.get(one, {}))
        for groups, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for mine, master in zip(groups, masters, strict=True):
                if mine is one:
                    return {"master": master, **optimizer.optimizer.state[master]}
        return {}


def grid(spec: Spec) -> Any:
    """Spread the ranks; return Megatron-Core's state of them."""
    patch()
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(spec.tp, spec.pp, expert_model_parallel_size=spec.ep)
    torch.manual_seed(3)
    return parallel_state


def settings(spec: Spec, **more: Any) -> Any:
    """Return the optimizer's."""
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, bf16=spec.bf16, clip_grad=0.0,
                           params_dtype=spec.dtype, **more)  # fmt: skip


def filed(name: str) -> str:
    """Return the name that `torch_dist` has for a parameter."""
    name = re.sub(r"(layers\.\d+)\.input_layernorm\.", r"\1.self_attention.linear_qkv.layer_norm_", name)
    return re.sub(r"(layers\.\d+)\.pre_mlp_layernorm\.", r"\1.mlp.linear_fc1.layer_norm_", name)


class OnCpu(TorchFunctionMode):
    """Every tensor that is asked for on a CUDA device is on the CPU."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1:
            return function(*args).replace("torch.", "torch.cuda.")
        if function is torch.Tensor.to:
            args = tuple("cpu" if isinstance(one, (str, torch.device)) else one for one in args)
        return function(*args, **kwargs)


def patch() -> None:
    """Let it do on a CPU what it does on a GPU. None of it changes what is written."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import megatron.core.tensor_parallel.random as of_random
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.moe import moe_utils

    if torch.cuda.Stream.__module__ == __name__:
        return

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None: ...

    OnCpu().__enter__()  # to the end of the process
    torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None
    np.product = np.prod  # type: ignore[attr-defined]  # which it calls, and newer NumPy has not
    of_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    whole = getattr(DistributedOptimizer, "_set_main_param_and_optimizer_states", None)  # since 0.12

    def with_step(self: Any, one: Any, tensors: Any) -> None:
        """Torch's Adam has a step for each parameter, of which the files have one and this asks for its tensor."""
        own = self._get_main_param_and_optimizer_states(one)
        assert whole is not None
        whole(self, one, {**({"step": own["step"]} if "step" in own else {}), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@contextlib.contextmanager
def writers() -> Iterator[None]:
    """Let a rank have the processes that write its files, and end the one that stays."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    yield
    if filesystem_async._results_queue is not None:  # a rank that had nothing to write has none
        filesystem_async._results_queue._manager.shutdown()


# --- what ranks run


def saved(rank: int, world: int, spec: Spec, run: Path, legacy: bool = False) -> None:
    """Train a model and save it; in legacy files where it is asked for, of which `run` is the iteration."""
    live = Live(spec)
    live.train_at_random(2)
    (live.save_legacy if legacy else live.save)(run)


def saved_by_torch(rank: int, world: int, wanted: list[tuple[Spec, Path]]) -> list[dict[str, torch.Tensor]]:
    """Train each model under FSDP2 and save it by torch's DCP (`--ckpt-format torch_dcp`); return what it has."""
    return [_saved_by_torch(rank, world, spec, run) for spec, run in wanted]


def _saved_by_torch(rank: int, world: int, spec: Spec, run: Path) -> dict[str, torch.Tensor]:
    live: Any = object.__new__(Live)
    live.spec, live.state = spec, grid(spec)
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp
    from megatron.core.optimizer import get_megatron_optimizer

    model = live._model()
    model.config.transformer_impl = "local"  # so that it does not shard linear layers within sharded layers
    with mock.patch.object(fsdp.DeviceMesh, "from_group", return_value=init_device_mesh("cpu", (world,))):
        wrapped = fsdp.TorchFullyShardedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(settings(spec), [wrapped])
    noise = torch.Generator().manual_seed(5)
    for _ in range(2):
        for one in model.parameters():
            drawn = torch.randn(one.shape, generator=noise).to(one.dtype)
            one.grad = distribute_tensor(drawn, one.device_mesh, one.placements)
        optimizer.step()
    content = {
        "args": argparse.Namespace(ckpt_format="torch_dcp", num_layers=spec.layers),
        "checkpoint_version": 3.0,
        "iteration": 2,
        "model": wrapped.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.state_dict(),
    }
    folder = run / "iter_0000002"
    dcp.save(state_dict=content, storage_writer=dcp.FileSystemWriter(str(folder)))
    if rank == 0:
        (run / "latest_checkpointed_iteration.txt").write_text("2")
    [only] = getattr(optimizer, "chained_optimizers", [optimizer])
    names = {one: name for name, one in model.named_parameters()}
    found = {f"weight/{name}": one for one, name in names.items()}
    for ones, masters in zip(only.float16_groups, only.fp32_from_float16_groups, strict=True):
        for one, master in zip(ones, masters, strict=True):
            found[f"master/{names[one]}"] = master
            found |= {f"{slot}/{names[one]}": value for slot, value in only.optimizer.state[master].items()}
    return {key: getattr(one.detach(), "full_tensor", one.detach)() for key, one in found.items()}


def loaded(
    rank: int, world: int, wanted: list[tuple[Spec, Path]], legacy: bool = False
) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    """Load each folder into a model of its own; return what that holds on one rank, and its losses as it goes on."""
    found = []
    for spec, folder in wanted:
        live = Live(spec)
        (live.load_legacy if legacy else live.load)(folder)
        found.append((live.tensors() if world == 1 else {}, live.train(2) if spec.pp == 1 else []))
    return found
