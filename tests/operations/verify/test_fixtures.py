"""Checkpoints that nobody has touched are sound, and everything in them has been looked at."""

from __future__ import annotations

import zipfile

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES
from tests.damage import copy, edit, set_element
from tests.pairwise import each, some
from tests.refusals import refusing
from zckpt.engine.checking import Checks
from zckpt.operations.verify import verify
from zckpt.operations.verify.inventory import take_inventory
from zckpt.state import CutSpans

RUNS = [p.parent.name for p in sorted(FIXTURES.glob("*/truth.json"))]
UNIVERSAL = [f"universal/{p.name}" for p in sorted((FIXTURES / "universal").iterdir())]
OTHERS = [
    p.relative_to(FIXTURES).as_posix()
    for folder in sorted((FIXTURES / "other").iterdir())
    for p in ([folder] if (folder / "checkpoint.json").exists() else sorted(folder.iterdir()))
    if not p.name.startswith("truth")
]
NOT_READ = "pp2_s0_fp32_dp2"
"""Without ZeRO, each stage numbers its optimizer's parameters; of float32 nothing tells which they are."""

EVERY = [name for name in (*RUNS, *UNIVERSAL, *OTHERS) if name != NOT_READ]

NO_HYPERPARAMETERS = "the elastic form of the optimizer state holds no hyperparameters"
NUMBERED = "several of the model's tensors fit"

REMARKS = {
    "ds0145_s2_bf16_dp2_elastic_fused": [NO_HYPERPARAMETERS],
    "s1_bf16_dp2_elastic": [NO_HYPERPARAMETERS],
    "s2_bf16_dp2_elastic": [NO_HYPERPARAMETERS],
    "s2_bf16_dp2_elastic_fused": [NO_HYPERPARAMETERS],
    "s0_fp32_dp2": [NUMBERED],
    "other/plain_adamw/ckpt.pt": [NUMBERED],
    "other/plain_bf16/ckpt.pt": [NUMBERED],
    "other/plain_legacy/ckpt.pt": [NUMBERED],
    "other/plain_proto4/ckpt.pt": [NUMBERED],
    "other/zro_dp2_adamw/ckpt": [NUMBERED],
    "other/zro_dp3_sgdm_1g/ckpt": [NUMBERED],
    "other/dcphf_sharded_dp3/ckpt": ["a missing last one would go unnoticed"],
}
"""What is true of some of them: a part that the files do not say, or that is not read, so that it is not verified."""


@pytest.mark.parametrize(
    ("name", "deep"),
    some(
        [(name, deep) for name in EVERY for deep in (True, False) if deep or name in REMARKS or name in EVERY[::12]],
        [(name, False) for name in EVERY if name not in REMARKS and name not in EVERY[::12]],
    ),
)
@pytest.mark.every(12, 1)
def test_untouched_checkpoint_is_sound(name, deep):
    found = verify(FIXTURES / name, deep=deep)
    assert found.sound
    assert {f.code for f in found.findings} <= {"ZC-130"}
    expected = REMARKS.get(name, [])
    assert len(found.findings) == len(expected)
    for part in expected:
        assert any(part in finding.message for finding in found.findings)


@pytest.mark.parametrize("deep", [False, True])
def test_optimizer_that_nothing_reads_is_an_error(deep):
    found = verify(FIXTURES / NOT_READ, deep=deep)
    assert {f.code for f in found.findings if f.severity == "error"} == {"ZC-131"}
    assert any("its state is not read" in f.message for f in found.findings)


@pytest.mark.parametrize(
    "name", ["s2_bf16_dp2", "s3_bf16_dp3", "moe_ep2_s2_bf16_dp2", "universal/s2_bf16_dp4", "s2_fp16_dp2"]
)
@pytest.mark.every(2)
def test_every_record_of_every_file_is_read_once(name):
    checkpoint = zckpt.open(FIXTURES / name)
    found = verify(FIXTURES / name, deep=True)
    records = [entry for file in checkpoint.files for entry in zipfile.ZipFile(file.path).infolist()]
    assert found.checked.checksums == len(records)
    again = sum(one.slot.nbytes + one.original.nbytes for one in checkpoint.duplicates)  # read beside each other
    assert found.checked.nbytes == sum(entry.file_size for entry in records) + again


@pytest.mark.parametrize("name", ["s2_bf16_dp2", "s3_bf16_dp2", "moe_ep2_s2_bf16_dp2", "s1_bf16_dp2_empty"])
@pytest.mark.every(2)
def test_every_element_is_looked_at(name):
    checkpoint = zckpt.open(FIXTURES / name)
    elements = sum(slot.numel for p in checkpoint.tensors() for slot in p.slots.values())
    padding = sum(run.nbytes for one in checkpoint.padding for run in one.zeros)
    assert verify(FIXTURES / name, deep=True).checked.elements == elements + padding


@pytest.mark.parametrize("name", ["s3_bf16_dp4", "s3_bf16_dp2_subgroup", "s2_bf16_dp4"])
def test_what_rules_cut_is_one_piece_of_a_file(name):
    checkpoint = zckpt.open(FIXTURES / name)
    cut = [
        (n, s.spans)
        for p in checkpoint.tensors()
        for n, s in p.slots.items()
        if isinstance(s.spans, CutSpans)
        if s.numel
    ]
    found = take_inventory(checkpoint, Checks())
    pieces = [piece for some in found.pieces.values() for piece in some if piece.many]
    files = sum(len(set(spans.files.paths)) for spans in {(n, id(s.files)): s for n, s in cut}.values())
    assert 0 < len(pieces) <= files < sum(len(spans) for _, spans in cut)


@pytest.mark.parametrize(("name", "sums"), each(["s3_bf16_dp4", "s2_bf16_dp4"], [True, False]))
def test_elements_of_what_is_one_piece_are_named(name, sums, tmp_path):
    run = copy(name, tmp_path)
    chosen = [p for p in zckpt.open(run).parameters.values() if "exp_avg_sq" in p.slots and p.numel > 4][:3]
    file = ""
    for parameter, value in zip(chosen, (float("nan"), float("inf"), -1.0), strict=True):
        file = set_element(run, parameter.name, "exp_avg_sq", 1, value)
    if not sums:
        for path in run.glob("*/*optim_states.pt"):
            edit(path, lambda _: None, legacy=True)
    found = verify(run, deep=True, memory=1 << 20).findings
    wrong = {(one.code, one.file, one.parameters) for one in found if one.severity == "error"}
    assert wrong == {("ZC-202", file, (chosen[0].name, chosen[1].name)), ("ZC-203", file, (chosen[2].name,))}


@pytest.mark.parametrize(
    ("name", "to"),
    each(
        ["s2_bf16_dp2", "s1_fp32_dp3_palign", "s3_bf16_dp2", "s2_bf16_dp2_zerodim"],
        ["zckpt", "deepspeed", "universal", "consolidated", "dcp", "zero-redundancy"],
    ),
)
@pytest.mark.every(2)
def test_what_zckpt_writes_is_sound(name, to):
    zckpt.convert(FIXTURES / name, "target", to=to)
    assert verify("target", deep=True).findings == []


def test_optimizers_in_files_of_their_own_may_step_at_their_own_pace():
    models = {name: torch.nn.Linear(3, low) for name, low in (("generator", 3), ("discriminator", 1))}
    content: dict[str, object] = {name: model.state_dict() for name, model in models.items()}
    for steps, (name, model) in enumerate(models.items(), 1):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        content[f"optimizer_{name[0]}"] = optimizer.state_dict()
    torch.save(content, "c.pt")
    zckpt.convert("c.pt", "state", to="accelerate")
    assert [one.code for one in verify("state", deep=True).findings] == ["ZC-212"]


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_padding_that_zckpt_writes_is_zero(world_size):
    zckpt.reshard(FIXTURES / "s2_bf16_dp2_palign", "target", world_size=world_size)
    checkpoint = zckpt.open("target")
    assert sum(run.nbytes for one in checkpoint.padding for run in one.zeros) > 0
    assert verify("target", deep=True).findings == []


def test_several_checkpoints_of_which_none_is_meant_are_nothing_to_verify(tmp_path):
    run = copy("s2_bf16_dp2_multitag", tmp_path)
    assert verify(run).sound
    (run / "latest").unlink()
    with refusing(zckpt.UnknownFormatError, "--tag"):
        verify(run)
    assert verify(run, tag="global_step5").sound
