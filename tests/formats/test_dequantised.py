"""Quantised optimizer state as floats: bit for bit what bitsandbytes and torchao make of it, wherever it goes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import zckpt
from tests.cli.console import FIXTURES, run
from tests.formats.test_quantised_states import State8bit
from tests.gloo import run as on_ranks
from tests.pairwise import each
from tests.refusals import refusing
from zckpt.engine.computed import BLOCK_NBYTES
from zckpt.errors import DamagedFileError, UnsupportedError, UsageError
from zckpt.formats.dcp.quantised import Chunk, pieces_of
from zckpt.optim import ZeroOptimizer
from zckpt.state.boxes import row_major
from zckpt.torchfile import Global, MetaTensor, Storage, Tensor, read_torchfile

NAMES = {"state1": "exp_avg", "state2": "exp_avg_sq"}
SLOW = ("exp_avg", "exp_avg_slow")
ADAM = ["bnb_adamw8bit", "ao_adamw8bit", "ao_adamw4bit", "ao_adamwfp8"]
IN_DCP = ["dcp_ao_8bit", "dcp_ao_4bit"]
"""Of two ranks, the second of which has floats of some."""
KINDS = [*ADAM, *IN_DCP, "bnb_lion8bit"]


def source(kind) -> Path:
    return FIXTURES / "other" / f"quantised_{kind}" / ("ckpt" if kind in IN_DCP else "ckpt.pt")


def truth(kind) -> dict[tuple[str, str], str]:
    """The digest of each slot of each parameter, as the program has its values."""
    told = json.loads((source(kind).parent / "truth.json").read_text())
    parts = [(*key.split("/"), digest) for key, digest in told.items()]
    own = {} if kind == "bnb_lion8bit" else NAMES
    return {(name, own.get(slot, slot)): digest for slot, name, digest in parts}


def digest(tensor) -> str:
    assert tensor.dtype in (torch.float32, torch.bfloat16)  # small states have the parameter's type
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()


def assert_is_truth(path, kind) -> zckpt.OpenedCheckpoint:
    opened = zckpt.open(path)
    for (name, slot), wanted in truth(kind).items():
        assert digest(opened.read(name, slot)) == wanted, (name, slot)
    return opened


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_is_read_as_the_program_reads_it(kind):
    with refusing(UsageError, r"no slot x: expected weight, .*(exp_avg|state1)"):
        assert_is_truth(source(kind), kind).read("0.weight", "x")


FLOATS: list[tuple[str, dict[str, Any]]] = [
    ("zckpt", {"world_size": 3}), ("dcp", {"world_size": 2}), ("universal", {}),
    ("deepspeed", {"world_size": 3, "stage": 2}), ("fsdp-rank-files", {"world_size": 2}),
    ("zero-redundancy", {"world_size": 2}), ("consolidated", {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), each([*ADAM, *IN_DCP], FLOATS))
def test_every_target_that_holds_floats_gets_them(kind, how):
    to, options = how
    zckpt.convert(source(kind), to, to=to, dequantize=True, **options)
    assert_is_truth(to, kind)
    assert zckpt.diff(source(kind), to, dequantize=True, ignore_metadata=True, atol=1e-45).equal
    if to in ("zckpt", "dcp"):
        assert zckpt.fingerprint(source(kind), dequantize=True).text == zckpt.fingerprint(to).text


@pytest.mark.parametrize("kind", IN_DCP)
def test_codes_of_dcp_stay_codes_and_all_is_accounted_for(kind):
    assert not zckpt.inspect(source(kind), include_inventory=True).left_out
    assert zckpt.verify(source(kind), deep=True).sound
    assert zckpt.map(source(kind))
    zckpt.convert(source(kind), "own", to="zckpt", world_size=2)
    assert_is_truth("own", kind)
    assert zckpt.diff(source(kind), "own", ignore_metadata=True).equal
    with refusing(UnsupportedError, "quantised slots, whose items cannot be taken out"):
        zckpt.strip(source(kind), "s", optimizer=True)


def chunk(row, column=0, cls="OptimState8bit", scales=4) -> Chunk:
    """A chunk of 16 rows of a slot of (32, 128), or of the half of these."""
    sizes = 16, 64 if column else 128
    tensors = {"codes": ("uint8", sizes), "scale": ("float32", (scales,)), "qmap": ("float32", (256,))}
    nodes = {
        name: Tensor(Storage(name, dtype, 4096, "cpu", 0), dtype, shape, row_major(shape), 0, "little")
        for name, (dtype, shape) in tensors.items()
    }
    node = MetaTensor("float32", sizes, row_major(sizes), subclass=Global("torchao.optim", cls), attributes=nodes)
    return Chunk(((row, column), sizes), node, "x.distcp", read_torchfile(source("ao_adamw8bit")))


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (chunk(0, 64, scales=2), "cut within them: expected chunks of whole rows that begin with a block"),
        (chunk(15), "cut within them: expected chunks of whole rows that begin with a block"),
        (chunk(16, scales=2), "in different or unknown ways"),
        (chunk(16, scales=3), "in different or unknown ways"),
        (chunk(16, cls="OptimStateFp8"), "in different or unknown ways"),
    ],
)
def test_chunks_that_are_not_blocks_of_one_slot_are_refused(second, match):
    with refusing(UnsupportedError, match):
        pieces_of("exp_avg", (32, 128), [chunk(0), second])


@pytest.mark.parametrize("kind", ADAM)
def test_a_plain_adamw_resumes_from_the_file_and_from_load(kind):
    zckpt.consolidate(source(kind), "x.pt", slots="all", dequantize=True)
    zckpt.consolidate(source(kind), "x.safetensors", slots="all", dequantize=True)
    net = model(kind)
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(torch.load("x.optimizer.pt"))
    assert_loaded(kind, net, optimizer)
    net = model(kind)
    optimizer = torch.optim.AdamW(net.parameters())
    zckpt.load(source(kind), model=net, optimizer=optimizer, dequantize=True)
    assert_loaded(kind, net, optimizer)


def model(kind) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 72 if kind.startswith("ao") else 67))


def assert_loaded(kind, net, optimizer):
    for (name, slot), wanted in truth(kind).items():
        assert digest(optimizer.state[net.get_parameter(name)][slot]) == wanted, (name, slot)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


def test_a_plain_adamw_resumes_from_deepspeeds():
    opened = zckpt.open(FIXTURES / "own_blockwise_s3_fp32_dp2")
    net = nn.Module()
    for one in opened.parameters.values():
        *path, last = one.name.split(".")
        module = net
        for step in path:
            module = module._modules.setdefault(step, nn.Module())
        if one.tied_to is None:
            module.register_parameter(last, nn.Parameter(torch.zeros(one.shape), requires_grad=one.group is not None))
    groups = [{"params": [net.get_parameter(name) for name in one.parameters]} for one in opened.param_groups]
    optimizer = torch.optim.AdamW(groups)
    with refusing(UnsupportedError, "each rank had its own"):
        zckpt.load(opened.source, model=net, optimizer=optimizer, strict=False)
    zckpt.load(opened.source, model=net, optimizer=optimizer, strict=False, dequantize=True)
    for parameter, state in optimizer.state.items():
        [name] = [name for name, one in net.named_parameters() if one is parameter]
        assert torch.equal(state["exp_avg_sq"], opened.read(name, "exp_avg_sq"))
    assert optimizer.state


def shares(rank, world_size):
    """ZeRO's partitions and the rows of `fully_shard` are read of their blocks."""
    for kind in ("bnb_adamw8bit", "ao_adamw4bit"):
        wanted = {key: zckpt.open(source(kind)).read(*key).float() for key in truth(kind)}
        net = model(kind)
        zero = ZeroOptimizer(net.named_parameters(), torch.optim.AdamW, stage=1)
        zckpt.load(source(kind), model=net, optimizer=zero, dequantize=True)
        for (name, slot), value in wanted.items():
            assert torch.equal(torch.as_tensor(zero.full_state(name, slot)), value), (kind, name, slot)
        sharded = fully_shard(model(kind))
        optimizer = torch.optim.AdamW(sharded.parameters())
        zckpt.load(source(kind), model=sharded, optimizer=optimizer, dequantize=True)
        for (name, slot), value in wanted.items():
            its = optimizer.state[sharded.get_parameter(name)][slot]
            assert torch.equal(its.full_tensor(), value), (kind, name, slot)
    dist.barrier()


def test_ranks_read_their_shares():
    on_ranks(shares, 3)


NESTED = "__bnb_optimizer_quant_state__"


def partitions_of(opened) -> list[dict[str, Any]]:
    """What each rank's file has, in the order of ranks."""
    paths = sorted(Path(opened.source).glob("*optim_states.pt"))
    return [torch.load(path, weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"] for path in paths]


def in_file_order(opened, group) -> list[str]:
    """The parameters of a group in the order in which ZeRO-3 lays them out: that of `param_shapes`."""
    [path] = Path(opened.source).glob("zero_pp_rank_0_*model_states.pt")
    return list(torch.load(path, weights_only=False)["param_shapes"][group])


def values(state, key) -> torch.Tensor:
    codes, number = state[key], key[-1]
    if codes.dtype == torch.float32:
        return codes
    scales = state[f"absmax{number}"].repeat_interleave(256)[: codes.numel()]
    return state[f"qmap{number}"][codes.long()] * scales


def test_blocks_of_each_ranks_partition():
    """Of ZeRO-3: rank after rank has a padded piece of each parameter, in the order of the sub-group."""
    run_directory = FIXTURES / "own_blockwise_s3_fp32_dp2"
    opened = zckpt.open(run_directory)
    with refusing(UnsupportedError, "each rank has its own"):
        zckpt.convert(run_directory, "t", to="zckpt")
    wanted = {}
    for number, group in enumerate(opened.param_groups):
        ranks = [one["state"][number][NESTED] for one in partitions_of(opened)]
        at = 0
        for name in in_file_order(opened, number):
            shape = opened.parameters[name].shape
            numel = torch.Size(shape).numel()
            piece = -(-numel // len(ranks))
            for state, slot in NAMES.items():
                parts = [values(one, state)[at : at + piece] for one in ranks]
                wanted[name, slot] = torch.cat(parts)[:numel].view(shape)
            at += piece
        assert sorted(in_file_order(opened, number)) == sorted(group.parameters)
    for key, value in wanted.items():
        assert torch.equal(opened.read(*key), value), key
    targets = {
        "zckpt": {"world_size": 3}, "universal": {}, "deepspeed": {"world_size": 3, "stage": 2},
    }  # fmt: skip
    for to, options in targets.items():
        zckpt.convert(run_directory, to, to=to, dequantize=True, **options)
        written = zckpt.open(to)
        assert not written.per_rank
        assert all(torch.equal(written.read(*key), value) for key, value in wanted.items()), to


def of_bitsandbytes(numel, block, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    count = -(-numel // block)
    return {
        "state1": torch.randint(256, shape, dtype=torch.uint8), "qmap1": torch.linspace(-1, 1, 256),
        "absmax1": torch.rand(count), "state2": torch.randint(256, shape, dtype=torch.uint8),
        "qmap2": torch.linspace(0, 1, 256), "absmax2": torch.rand(count),
    }  # fmt: skip


def saved(path, weight, state) -> Path:
    groups = [{"lr": 0.1, "params": [0]}]
    torch.save({"model": {"w": weight}, "optimizer": {"state": {0: state}, "param_groups": groups}}, path)
    return Path(path)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("numel", "block"), [(5000, 2048), (100, 256), (BLOCK_NBYTES // 4 + 77, 256), (129, 128)])
def test_blocks_of_any_size_end_anywhere(numel, block, nested):
    pieces = of_bitsandbytes(numel, block, (numel,))
    state = {"step": 3, **({"__bnb_optimizer_quant_state__": pieces} if nested else pieces)}
    path = saved("c.pt", torch.zeros(numel), state)
    scales = {key: pieces[f"absmax{key}"].repeat_interleave(block)[:numel] for key in "12"}
    wanted = {NAMES[f"state{k}"]: pieces[f"qmap{k}"][pieces[f"state{k}"].long()] * scales[k] for k in "12"}
    opened = zckpt.open(path)
    for slot, value in wanted.items():
        assert torch.equal(opened.read("w", slot), value)
    zckpt.convert(path, "d", to="deepspeed", dequantize=True, world_size=3, stage=1, verify=True)
    cut = zckpt.open("d")
    assert all(torch.equal(cut.read("w", slot), value) for slot, value in wanted.items())
    assert set(cut.parameters["w"].slots) == {"weight", "master", "exp_avg", "exp_avg_sq"}


def test_what_is_not_known_is_refused_by_name():
    pieces = of_bitsandbytes(5000, 256, (5000,))
    cases = [
        ({"step": 1, **pieces, "max1": torch.rand(1)}, UnsupportedError, "max1 of w is quantised in an unknown way"),
        ({"step": 1, "x": {**pieces}}, UnsupportedError, "x of w is quantised in an unknown way"),
        ({"step": 1, "x": State8bit(pieces["state1"], pieces["absmax1"], pieces["qmap1"])},
         UnsupportedError, "x of w is quantised in an unknown way"),
        ({"step": 1, **pieces, "absmax1": torch.rand(21)}, DamagedFileError, "its scales do not fit any block size"),
        ({"step": 1, **pieces, "qmap1": torch.rand(255)}, DamagedFileError, "state1 of w: .* do not belong together"),
        ({"step": 1, **pieces, "state1": torch.zeros(2, 2500, dtype=torch.uint8)}, UnsupportedError, "state1 of w is"),
    ]  # fmt: skip
    for number, (state, error, match) in enumerate(cases):
        path = saved(f"{number}.pt", torch.zeros(5000), state)
        with pytest.raises(error, match=match):
            zckpt.convert(path, "t", to="zckpt", dequantize=True)
    assert not Path("t").exists()


@pytest.mark.parametrize("kind", ["AdEMAMix8bit", "AdEMAMix", "AdamW32bit"])
def test_bitsandbytes_moments_are_found_in_small_and_large_tensors(kind, torch_file):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    net = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 3))  # the first weight is large enough for 8 bits
    optimizer = getattr(bitsandbytes.optim, kind)(net.parameters())
    for _ in range(3):
        net(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
    path = torch_file({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    zckpt.convert(path, "t", to="deepspeed", dequantize=True, world_size=2, stage=2)
    found = zckpt.open("t")
    for name, state in zip(net.state_dict(), optimizer.state_dict()["state"].values(), strict=True):
        its = state["__bnb_optimizer_quant_state__"]
        one, two = its["state1"], its["state2"]
        if "absmax1" in its:
            scales, undone = its["absmax1"].view(-1), bitsandbytes.functional.dequantize_blockwise
            assert kind == "AdEMAMix8bit"
            halves = zip(one, scales.view(2, -1), strict=True)
            one = [undone(half, absmax=scale, code=its["qmap1"], blocksize=256) for half, scale in halves]
            two = undone(two, absmax=its["absmax2"], code=its["qmap2"], blocksize=256)
        expected = {"exp_avg_sq": two, **({"exp_avg": one} if "32" in kind else dict(zip(SLOW, one, strict=True)))}
        assert all(torch.equal(found.read(name, slot), value) for slot, value in expected.items())


def test_the_option_is_refused_where_it_would_do_nothing(tmp_path):
    nothing = "no quantised optimizer state to turn into"
    with refusing(UsageError, nothing):
        zckpt.convert(FIXTURES / "s2_bf16_dp2", tmp_path / "t", to="zckpt", dequantize=True)
    with refusing(UsageError, nothing):
        zckpt.load(FIXTURES / "other" / "plain_adamw" / "ckpt.pt", model=nn.Linear(1, 1), dequantize=True)
    with refusing(UsageError, "no weights of few bits, and the optimizer's slots are not written"):
        zckpt.consolidate(source("bnb_adamw8bit"), tmp_path / "x.safetensors", dequantize=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("kind", ["bnb_adamw8bit", "ao_adamw8bit"])
def test_a_map_does_not_take_blocks_apart(kind, dequantize):
    rules = [{"a": {"0.weight": "out in"}, "b": {"w": "in out"}}, {"a": "0.bias", "b": "bias"}]
    turned = {"about": "a transposed layer", "sides": ["a", "b"], "sizes": {}, "rules": rules}
    words = r"of 0\.weight is computed, or is or was quantised in blocks, and the map .* splits it"
    with refusing(UnsupportedError, words):
        zckpt.convert(source(kind), "t", to="zckpt", map=turned, dequantize=dequantize)
    zckpt.convert(source(kind), "t", to="zckpt", dequantize=True)
    zckpt.convert("t", "u", to="zckpt", map=turned)
    expected = zckpt.open(source(kind)).read("0.weight", "exp_avg")
    assert torch.equal(zckpt.open("u").read("w", "exp_avg"), expected.t())


def test_the_command_line_has_it(tmp_path):
    path = str(source("ao_adamw4bit"))
    done = run("convert", path, str(tmp_path / "z"), "--to", "zckpt", "--dequantize", "--verify")
    assert done.returncode == 0, done.stderr
    same = run("diff", path, str(tmp_path / "z"), "--dequantize", "--ignore", "metadata", "-q")
    assert same.returncode == 0, same.stderr
    one = run("fingerprint", path, "--dequantize").stdout
    assert one == run("fingerprint", str(tmp_path / "z")).stdout
    assert run("consolidate", path, str(tmp_path / "m.pt"), "--slots", "all", "--dequantize").returncode == 0
    assert len(list(tmp_path.glob("m*.pt"))) == 2
    assert run("fingerprint", path, "--dequantize", "--write").returncode == 2
