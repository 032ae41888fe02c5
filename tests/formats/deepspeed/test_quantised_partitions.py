"""Quantised state of ranks' partitions as floats: what the same files say with the floats in the codes' place."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zckpt
from tests.formats.deepspeed.contents import cut, tag_of
from tests.formats.deepspeed.shards import copy, edit, edit_all, optimizer_file, state_in
from tests.refusals import refusing
from zckpt.errors import UnsupportedError

NESTED = "__bnb_optimizer_quant_state__"
SLOTS = ("exp_avg", "exp_avg_sq")
BLOCK = 2  # so that parameters begin within one, and partitions do not
CLASSES = {"subclass_8bit": "OptimState8bit", "subclass_4bit": "OptimState4bit", "subclass_fp8": "OptimStateFp8"}


class Held(torch.Tensor):
    """A tensor without elements of its own, as torchao has them, with codes and scales in it."""

    @staticmethod
    def __new__(cls, numel, **_) -> Held:
        return torch.Tensor._make_wrapper_subclass(cls, (numel,))

    def __init__(self, _, **pieces):
        vars(self).update(pieces)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(args[0].numel(), **vars(args[0]))


@pytest.fixture
def torchao(monkeypatch) -> dict[str, type[Held]]:
    """Classes under the names that torchao's have."""
    found = {}
    for part in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    for module, name in CLASSES.items():
        where = f"torchao.optim.{module}"
        monkeypatch.setitem(sys.modules, where, made := ModuleType(where))
        found[name] = type(name, (Held,), {"__module__": where})
        setattr(made, name, found[name])
    return found


def quantised(cls: type[Held], numel) -> tuple[Held, torch.Tensor]:
    """A tensor of random codes, and what they stand for."""
    scale = torch.rand(numel // BLOCK)
    if cls.__name__ == "OptimStateFp8":
        codes = torch.randn(numel).to(torch.float8_e4m3fn)
        return cls(numel, codes=codes, scale=scale), codes.float() * scale.repeat_interleave(BLOCK)
    packed = cls.__name__ == "OptimState4bit"
    qmap = torch.linspace(-1, 1, 16 if packed else 256)
    codes = torch.randint(len(qmap), (numel,), dtype=torch.uint8)
    stored = codes[::2] << 4 | codes[1::2] if packed else codes
    return cls(numel, codes=stored, scale=scale, qmap=qmap), qmap[codes.long()] * scale.repeat_interleave(BLOCK)


def assert_alike(codes, floats, **options):
    """Read one by one, and cut for other ranks."""
    one, other = zckpt.open(codes), zckpt.open(floats)
    for name, parameter in other.parameters.items():
        for slot in SLOTS if "exp_avg" in parameter.slots else ():
            assert torch.equal(one.read(name, slot), other.read(name, slot)), (name, slot)
    zckpt.reshard(codes, "cut_codes", dequantize=True, verify=True, **options)
    zckpt.reshard(floats, "cut_floats", **options)
    assert zckpt.diff("cut_codes", "cut_floats").equal


@pytest.mark.parametrize("cls", CLASSES.values())
@pytest.mark.every(3)
def test_state_of_torchao(cls, torchao):
    codes, floats = (copy("s2_fp32_dp2", kind) for kind in ("codes", "floats"))
    for rank in range(2):
        made = {}

        def replace(content, which, made=made):
            for slot in SLOTS:
                state = state_in(content)[0]  # the other groups are small ones, in floats
                made.setdefault((0, slot), quantised(torchao[cls], state[slot].numel()))
                state[slot] = made[0, slot][which]

        edit(optimizer_file(codes, rank), lambda content: replace(content, 0))
        edit(optimizer_file(floats, rank), lambda content: replace(content, 1))
    assert_alike(codes, floats, world_size=3, stage=3)
    with refusing(UnsupportedError, "--dequantize"):
        zckpt.reshard(codes, "none", world_size=3, stage=3)
    for world_size in (1, 3):  # whose partitions begin with blocks
        again, back, plain = (Path(f"{kind}{world_size}") for kind in ("codes", "back", "plain"))
        zckpt.reshard(codes, again, world_size=world_size)
        assert {value.key for value in zckpt.open(again).per_rank} == set(SLOTS)
        zckpt.reshard(again, back, world_size=2, dequantize=True)
        zckpt.reshard(floats, plain, world_size=2)
        assert zckpt.diff(back, plain).equal
    zckpt.reshard(codes, "same", world_size=2)
    assert zckpt.diff(codes, "same").equal


def _small_sub_groups(content):
    content["ds_config"]["zero_optimization"]["sub_group_size"] = 600


def _as_floats(content, block=256):
    for state in state_in(content).values():
        pieces = state.pop(NESTED)
        for number, slot in zip("12", SLOTS, strict=True):
            value = pieces[f"state{number}"]
            if value.dtype == torch.uint8:
                scale = pieces[f"absmax{number}"].repeat_interleave(block)[: value.numel()]
                value = pieces[f"qmap{number}"][value.long()] * scale
            state[slot] = value


def test_sub_groups_of_zero_3():
    """Each has codes of its own, in blocks from its first element on."""
    source = copy("own_blockwise_s3_fp32_dp2", "source")
    edit_all(source, _small_sub_groups, "*model_states.pt")
    codes = cut(source.parent, "parts", 2, requantize=True, verify=True)
    held = zckpt.open(codes).per_rank
    assert len({one.part for one in held}) > len({one.group for one in held})
    before, after = zckpt.open(source), zckpt.open(codes)
    trained = [name for name, parameter in before.parameters.items() if "master" in parameter.slots]
    for slot in SLOTS:
        wanted = {name: before.read(name, slot) for name in trained}
        half_a_step = max(float(value.abs().max()) for value in wanted.values()) / 254  # of the map, and a large scale
        for name, value in wanted.items():
            assert torch.allclose(after.read(name, slot), value, rtol=0, atol=half_a_step), name
    floats = copy_of(codes, "floats", _as_floats)
    assert_alike(codes, floats, world_size=3, stage=2)
    again = cut(codes.parent, "again", 3, requantize=True, verify=True)
    assert zckpt.verify(again, deep=True).sound


def copy_of(tag, directory, change: Callable[[dict[str, Any]], object]) -> Path:
    run = Path(shutil.copytree(tag.parent, directory))
    edit_all(tag_of(run), change)
    return tag_of(run)


def both(name, cls: type[Held]) -> list[Path]:
    """Run directories with codes, and with the floats that they stand for."""
    runs = []
    for kind in ("codes", "floats"):
        tag = copy(name, kind)
        edit_all(tag, lambda content: _all_codes(content, cls, floats=kind == "floats"))  # noqa: B023
        runs.append(tag.parent)
    return runs


def _all_codes(content, cls: type[Held], *, floats):
    """Make each state of a rank's partitions codes, or the floats that these stand for; the same ones each time."""
    for state in state_in(content).values():
        for slot in SLOTS:
            torch.manual_seed(int(state[slot].abs().sum() * 1e6))
            state[slot] = quantised(cls, state[slot].numel())[floats]


def _blocks(content):
    """Make codes of each state that is not small, in blocks as bitsandbytes has them."""
    for state in state_in(content).values():
        nested = {}
        for number, slot in zip("12", SLOTS, strict=True):
            value = state.pop(slot)
            nested[f"state{number}"] = value
            if value.numel() > 64:
                blocks = -(-value.numel() // 64)
                nested[f"state{number}"] = torch.randint(256, value.shape, dtype=torch.uint8)
                nested[f"absmax{number}"], nested[f"qmap{number}"] = torch.rand(blocks), torch.linspace(-1, 1, 256)
        state[NESTED] = nested


@pytest.mark.parametrize(("name", "stage"), [("tp2_s2_fp32_dp2", 3), ("pp2_s1_fp32_dp2", 1)])
@pytest.mark.every(2)
def test_slices_and_stages_have_blocks_of_their_own(name, stage, torchao):
    """Codes are cut for other data-parallel ranks; for slices of another number there are floats."""
    codes, floats = both(name, torchao["OptimState8bit"])
    zckpt.reshard(codes, "again", world_size=3)
    zckpt.reshard(floats, "plain", world_size=3)
    zckpt.reshard("again", "back", world_size=3, dequantize=True)
    assert zckpt.diff("back", "plain").equal
    zckpt.reshard(codes, "three", world_size=3, stage=stage, dequantize=True)
    zckpt.reshard(floats, "three_floats", world_size=3, stage=stage)
    assert zckpt.diff("three", "three_floats").equal
    if name.startswith("pp2"):
        zckpt.convert(codes, "z", to="zckpt", dequantize=True)
        assert zckpt.diff("z", floats, ignore_metadata=True).equal
        return
    for options in ({}, {"dequantize": True}):
        with refusing(UnsupportedError, "reshard --dequantize` at that size"):
            zckpt.reshard(codes, "whole", world_size=1, tensor_parallel_size=1, **options)
    with refusing(UnsupportedError, "in blocks of each tensor-parallel rank's slice"):
        zckpt.convert(codes, "z", to="zckpt", dequantize=True)
    for one, whole in ((Path("three"), "from_codes"), (floats, "from_floats")):
        zckpt.reshard(one, whole, world_size=1, stage=2, tensor_parallel_size=1)
    assert zckpt.diff("from_codes", "from_floats").equal


@pytest.mark.parametrize(
    ("cls", "name", "stage"),
    [*((cls, "s2_fp32_dp2", 3) for cls in CLASSES.values()), ("OptimState8bit", "tp2_s2_fp32_dp2", 2)],
)
@pytest.mark.every(3)
def test_state_of_torchao_is_made_anew(cls, name, stage, torchao, monkeypatch):
    """Where partitions have whole blocks; elsewhere there are floats, which torchao takes, too."""
    monkeypatch.setattr("zckpt.formats.deepspeed.rare.requantised.SMALLEST_NUMEL", 32)
    codes, floats = both(name, torchao[cls])
    options = {"world_size": 3, "stage": stage}
    if stage == 2 and name.startswith("tp2"):
        options["world_size"], options["round_robin"] = 2, True
    step = {"OptimState8bit": 1 / 255, "OptimState4bit": 1 / 15, "OptimStateFp8": 1 / 16}[cls]
    assert_made_anew(codes, floats, step, **options)
    per_rank = zckpt.open("anew").per_rank
    assert per_rank
    assert {one.key for one in per_rank} <= set(SLOTS)


def assert_made_anew(codes, floats, step, **options):
    """Hold what is quantised again to be within a step of what the floats are cut to."""
    done = zckpt.reshard(codes, "anew", requantize=True, verify=True, **options)
    assert any("quantised again" in note for note in done.notes)
    zckpt.reshard("anew", "back", dequantize=True, **options)
    zckpt.reshard(floats, "plain", **options)
    back, plain = zckpt.open("back"), zckpt.open("plain")
    for parameter, its in plain.parameters.items():
        for slot in SLOTS if "exp_avg" in its.slots else ():
            wanted = plain.read(parameter, slot)
            least = max(float(wanted.abs().max()), 1.0) * step * 1.1
            assert torch.allclose(back.read(parameter, slot), wanted, rtol=0, atol=least), (parameter, slot)


def test_blocks_of_slices_are_made_anew():
    tag = copy("tp2_s2_fp32_dp2", "codes")
    edit_all(tag, _blocks)
    floats = copy_of(tag, "floats", lambda content: _as_floats(content, block=64))
    assert_made_anew(tag.parent, floats.parent, 1 / 255, world_size=3)
    with refusing(UnsupportedError, "blocks of each tensor-parallel rank's slice"):
        zckpt.reshard(tag.parent, "whole", world_size=2, tensor_parallel_size=1, requantize=True)
