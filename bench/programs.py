"""Programs whose checkpoints zckpt reads and writes, the versions that are tried, and what is tried of each.

A kind of checkpoint is a function of a `Cell`: it lets the program make one, zckpt read and write it, and the program
go on from what zckpt wrote. It runs in a process that finds one version of the program first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
YES = "yes"
COLUMNS = ("made", "read", "written", "resumed")
REASON_LENGTH = 300


class Cell:
    """What came of each column of one kind by one version: `yes`, or why not."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.columns: dict[str, str] = {}

    def column(self, name: str, action: Callable[[], Any]) -> bool:
        """Do what a column stands for; it fails by an exception, or by differences that it returns."""
        try:
            different = action()
            self.columns[name] = f"differs: {different}" if different else YES
        except Exception as error:  # noqa: BLE001 (a cell that fails is a result)
            self.columns[name] = self.reason(error)
        return self.columns[name] == YES

    def reason(self, error: Exception) -> str:
        """Return the line of an error that says what it is, of the first rank for those of ranks, without paths."""
        lines = [line for line in str(error).splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
        lines = [line for line in lines if "gloo/transport" not in line] or lines  # said by the other ranks
        text = lines[0] if lines else f"{type(error).__name__}: {' '.join(str(error).split())}"
        text = text.replace(f"{self.place}/", "").replace(f"{ROOT}/", "")
        return re.sub(r"(?<![:/\w])/[\w./-]+/", "", text)[:REASON_LENGTH]  # whatever lies elsewhere, by its name


class Kind(NamedTuple):
    """A kind of checkpoint."""

    name: str
    about: str
    run: Callable[[Cell], None]


class Program(NamedTuple):
    """A package, and what is tried of it."""

    name: str
    versions: tuple[str, ...]
    kinds: tuple[Kind, ...]
    beside: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """For versions before one, in ascending order: packages that they need in other versions than are installed."""
    alone: bool = True
    """It is installed without what it depends on, which is there."""
    about: str = ""
    """What the page says of it."""
    causes: tuple[tuple[str, str, str], ...] = ()
    """Versions, kinds, and the cause that was found of what fails."""


def number(version: str) -> tuple[int, ...]:
    """Return what versions are sorted by."""
    return tuple(int(one) for one in re.findall(r"\d+", version))


# --- ranks


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `function(rank, world_size, *args)` on new gloo ranks, without DeepSpeed; return what each returns."""
    import tempfile

    import torch

    with tempfile.TemporaryDirectory(prefix="zckpt-ranks-") as name:
        scratch = Path(name)
        start = torch.multiprocessing.start_processes  # torch has been imported for all of them
        start(_rank, (world_size, scratch, function, args), nprocs=world_size, start_method="fork")
        return [torch.load(scratch / str(rank), **_trusting()) for rank in range(world_size)]


def _trusting() -> dict[str, Any]:
    """Options of `torch.load` for what the caller itself has saved."""
    return {"weights_only": False}


def _rank(rank: int, world_size: int, scratch: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import datetime
    import random

    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                   "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    sys.stdout = sys.stderr  # the caller's is read
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    rendezvous = f"file://{scratch}/rendezvous"
    wait = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=wait)
    try:
        result = function(rank, world_size, *args)
    except dist.checkpoint.api.CheckpointException as error:  # which is no Exception
        raise RuntimeError(f"CheckpointException: {error}") from error
    dist.barrier()
    torch.save(result, scratch / str(rank))
    dist.destroy_process_group()


def _equal(found: Any, wanted: Any) -> str:
    return "" if found == wanted else f"{found} and not {wanted}"


def _near(losses: list[float], wanted: list[float], within: float = 1e-5) -> str:
    near = len(losses) == len(wanted) and all(
        abs(a - b) <= within * abs(b) for a, b in zip(losses, wanted, strict=True)
    )
    return "" if near else f"losses {losses} and not {wanted}"


def _assert_read(source: Path, truth: dict[str, Any], names: list[str] | None = None) -> None:
    """Hold what zckpt reads against tensors by `slot/name`."""
    import zckpt
    from tests.truth import assert_same

    opened = zckpt.open(source, names=names)
    for key, value in truth.items():
        slot, _, name = key.partition("/")
        if slot != "step":
            assert_same(opened.read(name, slot), value, key)


# --- DeepSpeed


def _deepspeed(spec_name: str, ranks: int, groups: int, cell: Cell) -> None:
    import importlib.metadata

    import zckpt
    from tests.deepspeed_engine import SPECS, resume, train
    from tests.truth import Truth, assert_consolidated

    spec = SPECS[spec_name]
    if groups:
        spec = spec.at(spec.world_size, groups=groups)
    wider = spec.at(ranks * spec.tensor_parallel * spec.pipeline_parallel)
    folder, cut, converted = (cell.place / name for name in (spec.name, "cut", "converted"))

    def make() -> None:
        about = json.loads((train(spec, cell.place) / "truth.json").read_text())
        if about["deepspeed"] != importlib.metadata.version("deepspeed"):  # what its ranks imported
            raise SystemExit(f"the ranks run DeepSpeed {about['deepspeed']}")

    def read(source: Path, scratch: str) -> None:
        (cell.place / scratch).mkdir()
        assert_consolidated(source, Truth(folder), cell.place / scratch)

    def write() -> None:
        zckpt.reshard(folder, cut, world_size=ranks)
        zckpt.convert(folder, converted, to="zckpt")
        read(converted, "again")

    def go_on() -> str:
        verdict = resume(cut, wider, folder)
        for what in ("slots", "weights", "hyperparameters", "steps"):
            if found := getattr(verdict, what):
                return f"{what}: {found[0]} and {len(found) - 1} more"
        off = f"losses by {verdict.loss_difference:.2g}, allowed are {verdict.loss_tolerance:.2g}"
        return "" if verdict.ok else off

    if cell.column("made", make):
        cell.column("read", lambda: read(folder, "read"))
        cell.column("written", write)
        if cut.exists():
            cell.column("resumed", go_on)


def _of_deepspeed(spec: str, ranks: int, about: str, groups: int = 0) -> Kind:
    """Make a kind of a checkpoint of `tests.deepspeed_engine.SPECS`, and the data-parallel ranks that it is cut for."""
    parts = ", every rank has a part of each group" if groups else ""
    name = f"{spec}_{groups}groups" if groups else spec
    return Kind(name, f"{about}{parts}; for {ranks}", partial(_deepspeed, spec, ranks, groups))


# --- torch


def _plain(name: str, cell: Cell) -> None:
    """`torch.save` of one process; the next losses are those that torch has after its own file."""
    import torch

    import zckpt
    from tests.truth import Truth, assert_consolidated

    sys.path.append(str(ROOT / "fixtures"))
    import plain

    source, target = cell.place / name / "ckpt.pt", cell.place / "again.pt"

    def losses(path: Path) -> list[float]:
        model, optimizer, loss_at = plain.MAKERS[name][0]()
        state = torch.load(path, **({} if path == source else {"weights_only": True}))
        if hasattr(model, "expanded"):
            model.expanded = model.expanded.clone()  # torch loads nothing into a tensor that repeats one element
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        found = []
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_at(plain.STEPS + step)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def write() -> None:
        names = list(Truth(source.parent).numbers.values())
        zckpt.convert(source, target, to="consolidated", names=names, verify=True)

    if cell.column("made", lambda: plain.make(name, cell.place) and None):
        cell.column("read", lambda: assert_consolidated(source, Truth(source.parent), cell.place))
        if cell.column("written", write):
            cell.column("resumed", lambda: _equal(losses(target), losses(source)))


def _redundancy(cell: Cell) -> None:
    import zckpt
    from tests.interop import test_zero_redundancy as known

    folder, target = cell.place / "saved", cell.place / "target"
    folder.mkdir()
    names = known.names("adamw")
    saved: list[Any] = []

    def make() -> None:
        saved.extend(on_ranks(known.save_and_go_on, 2, "adamw", True, folder))
        (folder / "all.pt").unlink()  # the same, for one rank

    def read() -> None:
        truth = {
            f"{slot}/{name}": one for _, state in saved for name, its in state.items() for slot, one in its.items()
        }
        _assert_read(folder, truth, names)

    def go_on() -> None:
        known.assert_goes_on(on_ranks(known.load_and_go_on, 3, "adamw", True, target), saved)

    if cell.column("made", make):
        cell.column("read", read)
        wanted = {"to": "zero-redundancy", "world_size": 3, "names": names, "verify": True}
        if cell.column("written", lambda: zckpt.convert(folder, target, **wanted) and None):
            cell.column("resumed", go_on)


def _on_torch_ranks(wrap: str, to: str, how: tuple[Callable[..., Any], Callable[..., Any]], cell: Cell) -> None:
    """Write what two ranks save, with the truth and the next losses, for three."""
    import zckpt

    folder, target = cell.place / "global_step_2", cell.place / "target"
    saved: list[Any] = []
    if cell.column("made", lambda: saved.extend(on_ranks(how[0], 2, wrap, folder))):
        truth, losses = saved[0]
        cell.column("read", lambda: _assert_read(folder, truth))
        convert = partial(zckpt.convert, folder, target, to=to, world_size=3, verify=True)
        if cell.column("written", lambda: convert() and None):
            cell.column("resumed", lambda: _near(on_ranks(how[1], 3, wrap, target)[0], losses))


def _rank_files(wrap: str, cell: Cell) -> None:
    from tests.fsdp_training.versions import rank_files_resumed, rank_files_saved

    _on_torch_ranks(wrap, "fsdp-rank-files", (rank_files_saved, rank_files_resumed), cell)


def _saved(wrap: str, to: str, cell: Cell) -> None:
    from tests.fsdp_training.versions import resumed, saved

    _on_torch_ranks(wrap, to, (saved, resumed), cell)


# --- Hugging Face


def _trainer(model: str, cell: Cell, **options: Any) -> None:
    import zckpt
    from tests.hf_training.training import SAVED, build, train, unbroken
    from tests.interop.test_trainer import assert_is_truth

    target = cell.place / "again" / f"checkpoint-{SAVED}"
    found: list[Any] = []
    if cell.column("made", lambda: found.append(unbroken(model, cell.place / "run", **options))):
        [run] = found
        cell.column("read", lambda: assert_is_truth(zckpt.open(run.directory), run.truth))
        convert = partial(zckpt.convert, run.directory, target, to="transformers-trainer", verify=True)
        if cell.column("written", lambda: convert() and None):
            again = partial(train, build(model, seed=9), cell.place / "again", resume=target, **options)
            cell.column("resumed", lambda: _equal(again()[0], run.losses))


def _resumed(kind: str, ranks: int, to: str, program: str, others: int, cell: Cell, **options: Any) -> None:
    """Write what a program of `tests.resuming` saves in a format that it resumes from, on so many other ranks."""
    import torch

    import zckpt
    from tests.resuming import PLACES, resume, save

    folder, target = cell.place / "saved", cell.place / "again"
    source = folder / PLACES[kind]

    def truth() -> dict[str, Any]:
        found: dict[str, Any] = torch.load(folder / "truth.pt", **_trusting())["tensors"]
        return found

    def names() -> list[str]:  # alike parameters that the file numbers only
        return [key.removeprefix("weight/") for key in truth() if key.startswith("weight/")]

    def read() -> None:
        opened = zckpt.open(source, names=names())
        for key, value in truth().items():
            slot, _, name = key.partition("/")
            if not torch.equal(opened.read(name, slot).reshape(-1), value):
                raise ValueError(f"{key} is not what it was")

    def write() -> None:
        zckpt.convert(source, target / PLACES[kind], to=to, names=names(), verify=True, **options)
        shutil.copy(folder / "truth.pt", target)

    def go_on() -> str:
        found = on_ranks(resume, others, program, {kind: target})[0][kind]
        if isinstance(found, str):
            raise RuntimeError(found)  # noqa: TRY004 (what the program said)
        return ", ".join(part for part, same in found.items() if not same)

    if cell.column("made", lambda: on_ranks(save, ranks, kind, folder) and None):
        cell.column("read", read)
        if cell.column("written", write):
            cell.column("resumed", go_on)


def _accelerate_door(cell: Cell) -> None:
    """`zckpt.accelerate` saves with two processes, and loads with three."""
    from tests.interop.test_integrations import SAVED, STEPS, accelerated

    place, found = cell.place / "state", list[Any]()

    def go_on() -> str:
        [run, *_], [again, *_] = found, on_ranks(accelerated, 3, "plain", place, place, False)
        _assert_same(again.held, run.held)
        return _near(again.losses, run.losses[SAVED:]) or _equal(again.count, STEPS)

    if cell.column("made", lambda: found.extend(on_ranks(accelerated, 2, "plain", place, None, False))):
        cell.column("read", lambda: _assert_read(place, found[0].held))
        cell.column("resumed", go_on)


def _lightning(stock: bool, cell: Cell) -> None:
    """Lightning's own file, or what `zckpt.lightning` saves, by two processes; `zckpt.lightning` loads it with one."""
    import zckpt
    from tests.interop.test_lightning import PER_EPOCH, fit

    whole, again, target = (cell.place / name for name in ("whole", "resumed", "converted.ckpt"))
    source = whole / "step=2.ckpt"
    found: list[Any] = []

    def go_on() -> str:
        run, resumed = found[0], on_ranks(fit, 1, "ddp", again, target, False, False, 1)[0]
        _assert_same(resumed.began, run.saved)
        return _near(resumed.losses, run.losses[PER_EPOCH:]) or _equal(
            (resumed.rate, resumed.steps), (run.rate, run.steps)
        )

    if cell.column("made", lambda: found.extend(on_ranks(fit, 2, "ddp", whole, None, stock))):
        cell.column("read", lambda: _assert_read(source, found[0].saved))
        if cell.column("written", lambda: zckpt.convert(source, target, to="zckpt", verify=True) and None):
            cell.column("resumed", go_on)


def _assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    from tests.truth import assert_same

    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert_same(found[key], value, key)


def _megatron(options: dict[str, Any], cell: Cell) -> None:
    """Write what two data-parallel ranks save; the truth is what Megatron loads of its own files with one rank."""
    import zckpt
    from tests.megatron_core import Spec, loaded, saved

    spec = Spec(**options)
    step = "iter_0000002"
    source, target = cell.place / "run" / step, cell.place / "again" / step
    alone: list[Any] = []

    def make() -> None:
        on_ranks(saved, 2, spec, cell.place / "run")
        alone.extend(on_ranks(loaded, 1, [(spec.alone(), source)])[0][0])

    def go_on() -> str:
        state, losses = on_ranks(loaded, 1, [(spec.alone(), target)])[0][0]
        _assert_same(state, alone[0])
        return _equal(losses, alone[1])

    if cell.column("made", make):
        cell.column("read", lambda: _assert_read(source, alone[0]))
        if cell.column("written", lambda: zckpt.convert(source, target.parent, to="megatron", verify=True) and None):
            cell.column("resumed", go_on)


def _adapter(options: dict[str, Any], cell: Cell) -> None:
    """Let PEFT train and save an adapter; what is written is merged, and transformers loads it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    import zckpt
    from tests.hf_training.training import CONFIGS

    base, saved, target = (cell.place / name for name in ("base", "adapter", "merged"))
    tokens = torch.arange(10).reshape(2, 5)
    adapter: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    logits = []

    def make() -> None:
        torch.manual_seed(3)
        model = LlamaForCausalLM(CONFIGS["llama"])
        model.save_pretrained(base)
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **options))
        optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], lr=0.1)
        for _ in range(3):
            adapted(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        adapted.save_pretrained(saved)
        adapter.update(
            {
                re.sub(
                    r"(?<=magnitude_vector)\.default\.weight|(\.modules_to_save)?\.default", "", name
                ): one.detach().clone()
                for name, one in adapted.named_parameters()
                if one.requires_grad
            }
        )
        whole = adapted.merge_and_unload()
        merged.update({name: one.detach().clone() for name, one in whole.state_dict().items()})
        logits.append(whole(input_ids=tokens).logits.detach())

    def near(found: torch.Tensor, wanted: torch.Tensor, steps: int) -> bool:
        return bool((found - wanted).abs().max() <= steps * torch.finfo(wanted.dtype).eps * wanted.abs().max())

    def write() -> str:
        zckpt.merge_adapter(base, saved, target, verify=True)
        opened = zckpt.open(target)
        return ", ".join(name for name, one in merged.items() if not near(opened.read(name), one, 4))

    def go_on() -> str:
        loaded = AutoModelForCausalLM.from_pretrained(target)
        return "" if near(loaded(input_ids=tokens).logits.detach(), logits[0], 64) else "logits"

    if cell.column("made", make):
        cell.column("read", lambda: _assert_read(saved, {f"weight/{name}": one for name, one in adapter.items()}))
        if cell.column("written", write):
            cell.column("resumed", go_on)


# --- the table

_LOSSES = (
    "The loaded state is bit-equal, and so are the losses at the same number of ranks (tried): only the order of"
    " 16-bit rounding differs."
)
_SLICES = (
    "The loaded state is bit-equal, and in fp32 (`tp2_s2_fp32_dp2`) losses are within 2e-5: only the order of 16-bit"
    " rounding differs."
)

_OLDER = ("transformers==4.46.3", "tokenizers==0.20.3", "huggingface_hub==0.26.5")
_OLDEST = ("transformers==4.40.2", "tokenizers==0.19.1", "huggingface_hub==0.23.5")

PROGRAMS = (
    Program(
        "deepspeed",
        ("0.10.3", "0.11.2", "0.12.6", "0.13.5", "0.14.0", "0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.9", "0.19.8"),
        (
            _of_deepspeed("s1_fp32_dp2", 3, "ZeRO-1, fp32"),
            _of_deepspeed("s1_fp32_dp2", 3, "ZeRO-1, fp32", groups=2),
            _of_deepspeed("s2_bf16_dp2", 3, "ZeRO-2, bf16"),
            _of_deepspeed("s2_bf16_dp2", 3, "ZeRO-2, bf16", groups=2),
            _of_deepspeed("s3_bf16_dp2", 3, "ZeRO-3, bf16"),
            _of_deepspeed("s2_bf16_dp2_elastic_fused", 3, "ZeRO-2, elastic, FusedAdam's layout"),
            _of_deepspeed("s0_bf16_dp2", 3, "stage 0, bf16"),
            _of_deepspeed("pp2_s1_bf16_dp1", 2, "pipeline of two stages, ZeRO-1, bf16"),
            _of_deepspeed("s3_bf16_dp2_subgroup", 3, "ZeRO-3, small sub-groups"),
            _of_deepspeed("moe_ep2_s2_bf16_dp2", 4, "experts over two ranks, ZeRO-2, bf16"),
            _of_deepspeed("s1_bf16_dp2_bf16opt", 3, "BF16_Optimizer, ZeRO-1"),
            _of_deepspeed("s2_fp16_dp2", 3, "ZeRO-2, fp16"),
            _of_deepspeed("tp2_s1_bf16_dp2", 1, "tensor parallel over two ranks, ZeRO-1, bf16"),
            _of_deepspeed("s2_bf16_dp2_rr", 3, "ZeRO-2, round robin gradients"),
            _of_deepspeed("s2_bf16_dp2_elastic_fused", 3, "ZeRO-2, elastic", groups=2),
            _of_deepspeed("s2_fp16_dp2", 3, "ZeRO-2, fp16", groups=2),
            _of_deepspeed("s2_bf16_dp2_rr", 3, "ZeRO-2, round robin", groups=2),
            _of_deepspeed("tp2_s2_fp32_dp2", 1, "tensor parallel over two ranks, ZeRO-2, fp32"),
        ),
        causes=(
            ("all", "tp2_s1_bf16_dp2", _SLICES),
            (
                "0.12.6, 0.14.0",
                "s1_fp32_dp2_2groups, s2_bf16_dp2, s3_bf16_dp2, s0_bf16_dp2",
                "On a CPU, DeepSpeed up to 0.14.0 wants intel_extension_for_pytorch, made for old torch only. By hand,"
                " with torch 2.2.2, an empty package of that name, and gloo: what 0.10.3, 0.12.6 and 0.14.0 save of"
                " ZeRO-1, ZeRO-2 (elastic, round robin, Lion) and ZeRO-3 is read bit for bit, and they load it so when"
                " it is cut for other ranks; but their own elastic form 0.10.3 and 0.12.6 do not load as it was.",
            ),
            (
                "0.17.6",
                "s1_fp32_dp2, s2_bf16_dp2, s2_bf16_dp2_elastic_fused, s2_fp16_dp2, s2_bf16_dp2_rr",
                "DeepSpeed's `get_flat_partition` raises on a rank that holds nothing of a group; here one group has"
                " one element. With two groups (also listed), it trains.",
            ),
            (
                "0.17.6",
                "s0_bf16_dp2, s1_bf16_dp2_bf16opt",
                "DeepSpeed saves no optimizer: the model file has None in its place, and there is no other file. zckpt"
                " reads the weights, and at stage 0 copies them for other ranks; DeepSpeed itself cannot load the"
                " checkpoint.",
            ),
            (
                "0.18.9",
                "pp2_s1_bf16_dp1",
                "DeepSpeed's step gathers tensors that require gradients, and gloo's `all_gather_into_tensor` refuses"
                " them (also with torch 2.7.1, tried on `s1_fp32_dp2_2groups`). The bench runs all steps under"
                " `torch.no_grad()`, which works.",
            ),
            ("0.18.9", "s1_bf16_dp2_bf16opt", _LOSSES),
        ),
        about=(
            "Each is made in five steps of a small model, cut for the ranks that are named, and resumed with five "
            "steps, whose losses are within 2e-5 in fp32 and 3e-3 in 16 bits. "
            "As for all programs but torch, `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1` is set: without it torch 2.6 and "
            "newer refuse what old versions load, whoever wrote it."
        ),
    ),
    Program(
        "torch",
        ("2.2.2", "2.4.1", "2.6.0", "2.8.0", "2.9.1", "2.13.0", "2.15.0"),
        (
            Kind("plain", "`torch.save`: model and AdamW, fp32", partial(_plain, "plain_adamw")),
            Kind("plain_bf16", "`torch.save`: model and AdamW, bf16", partial(_plain, "plain_bf16")),
            Kind("plain_mixed", "`torch.save`: every dtype and stride", partial(_plain, "plain_mixed")),
            Kind("plain_legacy", "`torch.save` before it made zip files", partial(_plain, "plain_legacy")),
            Kind("zero_redundancy", "ZeroRedundancyOptimizer's files of 2 ranks; for 3", _redundancy),
            Kind("dcp_dtensors", "DCP of DTensors on 2 ranks; for 3", partial(_saved, "dtensors", "dcp")),
            Kind("dcp_fsdp1", "DCP of FSDP1 on 2 ranks; for 3", partial(_saved, "fsdp1 orig", "dcp")),
            Kind("dcp_fsdp2", "DCP of FSDP2 on 2 ranks; for 3", partial(_saved, "fsdp2", "dcp")),
            Kind("ranks_fsdp1", "rank files of FSDP1 on 2 ranks; for 3", partial(_rank_files, "fsdp1 mesh")),
            Kind("ranks_fsdp2", "rank files of FSDP2 on 2 ranks; for 3", partial(_rank_files, "fsdp2")),
            Kind("zckpt", "`zckpt.save`, ZeroOptimizer on 2 ranks; for 3", partial(_saved, "zckpt", "zckpt")),
        ),
        beside=(("2.3", ("numpy<2",)),),
        alone=False,
        about=(
            "Names that a version has elsewhere are put where newer ones have them, and gloo is given a "
            "`reduce_scatter_tensor` where it has none. Neither changes what is written."
        ),
        causes=(
            (
                "2.2.2, 2.4.1, 2.6.0",
                "dcp_fsdp2, ranks_fsdp2",
                "torch itself: 2.2 has no FSDP2; in 2.4 it asks for CUDA, in 2.6 for streams, which CPUs have not.",
            ),
            (
                "2.2.2",
                "dcp_dtensors",
                "zckpt writes `.metadata` as newer torch does; 2.2 lacks `_MEM_FORMAT_ENCODING`, which it names.",
            ),
            (
                "2.8.0",
                "dcp_fsdp2, ranks_fsdp2",
                "torch itself: over gloo its FSDP2 sums gradients and does not average them, so that the moments of 2"
                " ranks are too small for 3. The same files on as many ranks go on with equal losses.",
            ),
            ("2.2.2", "dcp_fsdp1", "torch itself: to save FSDP1 with DCP it asks for a driver of NVIDIA's."),
            (
                "2.2.2",
                "ranks_fsdp1",
                "zckpt writes DTensors in the forms of torch 2.3 and newer; 2.2 keeps the groups of a mesh otherwise.",
            ),
            ("2.2.2, 2.4.1", "zckpt", "To train with zckpt takes torch 2.5 or newer."),
        ),
    ),
    Program(
        "transformers",
        ("4.40.2", "4.44.2", "4.48.3", "4.52.4", "4.57.6", "5.0.0", "5.23.0", "5.24.0"),
        (
            Kind("llama", "Trainer, Llama", partial(_trainer, "llama")),
            Kind("gpt2", "Trainer, GPT-2", partial(_trainer, "gpt2")),
            Kind("qwen2", "Trainer, Qwen2, tied", partial(_trainer, "qwen2")),
            Kind("bert", "Trainer, BERT", partial(_trainer, "bert")),
            Kind("llama_adafactor", "Trainer, Llama, Adafactor", partial(_trainer, "llama", optim="adafactor")),
        ),
        beside=(
            ("4.45", (*_OLDEST[1:], "accelerate==0.34.2", "peft==0.10.0")),
            ("4.52", ("tokenizers==0.21.4", "huggingface_hub==0.36.0", "accelerate==1.1.1", "peft==0.13.2")),
            ("5", ("tokenizers==0.22.1", "huggingface_hub==0.36.0", "accelerate==1.6.0", "peft==0.17.1")),
            ("5.1", ("tokenizers==0.22.1", "huggingface_hub==1.3.0")),
        ),
    ),
    Program(
        "accelerate",
        ("0.21.0", "0.27.2", "0.34.2", "1.1.1", "1.6.0", "1.15.0"),
        (
            Kind("state", "`save_state` of 2 processes; for 1",
                 partial(_resumed, "Accelerate", 2, "accelerate", "accelerate", 1)),
            Kind("zckpt.accelerate", "`zckpt.accelerate` with 2 processes; for 3", _accelerate_door),
        ),
        beside=(("0.28", (*_OLDEST, "peft==0.10.0")), ("1.6", (*_OLDER, "peft==0.13.2"))),
        causes=(
            (
                "0.21.0",
                "state",
                "Accelerate 0.21 loads `pytorch_model.bin` only, and zckpt writes `model.safetensors`, which newer ones"
                " look for first. `zckpt.accelerate` works with both.",
            ),
        ),
    ),
    Program(
        "lightning",
        ("2.0.9", "2.2.5", "2.4.0", "2.5.5", "2.6.6"),
        (
            Kind("ddp", "its own file, DDP of 2; `zckpt.lightning` resumes it", partial(_lightning, True)),
            Kind("zckpt.lightning", "`zckpt.lightning`, DDP of 2; for 1", partial(_lightning, False)),
        ),
        about=(
            "zckpt writes no file of Lightning's: it converts to its own format, and a strategy of "
            "`zckpt.lightning` resumes."
        ),
        causes=(("2.0.9", "ddp", "Lightning 2.0 imports its app, whose packages are not installed."),),
    ),
    Program(
        "peft",
        ("0.7.1", "0.10.0", "0.13.2", "0.15.2", "0.17.1", "0.21.2"),
        (
            Kind("lora", "LoRA, ranks that differ",
                 partial(_adapter, {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2}})),
            Kind("embedding", "LoRA of an embedding, and a saved head",
                 partial(_adapter, {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head"]})),
            Kind("dora", "DoRA, rank-stabilised",
                 partial(_adapter, {"target_modules": ["v_proj"], "use_dora": True, "use_rslora": True})),
        ),
        beside=(("0.17", (*_OLDER, "accelerate==1.1.1")),),
        about=(
            "read: the adapter's tensors. written: `zckpt merge-adapter`, as near to `merge_and_unload` as four "
            "times the spacing of the largest number. resumed: transformers loads the merged model, with the same "
            "logits."
        ),
        causes=(("0.7.1", "dora", "There is no DoRA in PEFT 0.7."),),
    ),
    Program(
        "megatron-core",
        ("0.8.0", "0.9.0", "0.10.0", "0.11.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1"),
        (
            Kind(
                "torch_dist",
                "`torch_dist`, distributed optimizer, bf16, 2 ranks; for 1",
                partial(_megatron, {"dp": 2, "llama": False, "groups": 4}),
            ),
            Kind(
                "torch_dist_plain",
                "`torch_dist`, every rank has the optimizer, bf16, 2 ranks; for 1",
                partial(_megatron, {"dp": 2, "llama": False, "groups": 4, "distributed": False}),
            ),
        ),
        beside=(("0.10", ("setuptools==80.9.0",)),),  # for pkg_resources
        about=(
            "The truth is what Megatron itself loads, with one rank, of what two have saved. It is given the CPU "
            "where it asks for CUDA."
        ),
        causes=(
            ("0.8.0", "torch_dist", "Megatron 0.8 wants Apex or Transformer Engine, which need CUDA."),
            ("0.8.0", "torch_dist_plain", "Megatron fails to save or load its own files with this torch."),
            (
                "0.10.0, 0.12.3, 0.14.0",
                "torch_dist, torch_dist_plain",
                "What makes these cells calls Megatron as 0.14 (plain) or 0.16 (distributed optimizer) is called. Tests"
                " read checkpoints that 0.8 to 0.13 made, which are fixtures.",
            ),
        ),
    ),
)  # fmt: skip
