"""The public face: which names there are, what they are, and that reading gives the truth."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

import zckpt
from tests.cli.console import FIXTURES
from tests.damage import copy, flip
from tests.logical import assert_same_tree
from tests.refusals import refusing
from tests.truth import Truth, assert_state, bits
from zckpt.errors import DamagedFileError

READ = [
    "s0_bf16_dp2", "s1_bf16_dp2_bf16opt", "s1_fp32_dp3_palign", "s2_bf16_dp2_rr", "s2_bf16_dp2_elastic",
    "s2_bf16_dp2_bf16master", "s2_fp16_dp2", "s2_bf16_dp2_lion", "s2_bf16_dp2_zerodim", "s3_bf16_dp3",
    "s3_bf16_dp2_subgroup", "moe_ep2_s2_fp32_dp4", "tp2_s1_bf16_dp2", "tp2_s3_bf16_dp2", "hf_llama_s2_bf16_dp2",
]  # fmt: skip


def test_exported_names():
    assert zckpt.__all__ == [
        "Appeared", "Averaged", "Checkpoint", "Checkpointer", "Compared", "Consolidated", "DamagedFileError",
        "Distribution", "Elements", "Extent", "Finding", "Fingerprint", "History", "Inspection", "LayoutError",
        "LeftOutError", "Map", "Merged", "MissingPackageError", "NotRestoredError", "OpenedCheckpoint",
        "Packed", "ParamGroup", "Parameter", "Parting", "Patched", "PickleError", "Pruned", "Recorded",
        "Restored", "ResumeCheck", "Sanitized", "Saving", "Scalar", "Scanned", "Series", "ShardError", "Slot",
        "SourceError", "Span", "Statistics", "Stripped", "TargetError", "TargetExistsError", "Topology",
        "UnknownFormatError", "Unpacked", "UnsupportedError", "UsageError", "Verification",
        "WeightMismatchError", "WorkerError", "Written", "ZckptError", "__version__", "apply",
        "assert_restored", "average", "consolidate", "convert", "dcp", "deepspeed", "diff", "fingerprint", "hf",
        "history", "inspect", "load", "map", "merge_adapter", "open", "optim", "pack", "parting", "patch",
        "prune", "reshard", "resume_check", "sanitize", "save", "scan", "series", "show", "stats", "strip",
        "unpack", "verify", "watch",
    ]  # fmt: skip


@pytest.mark.parametrize("name", zckpt.__all__)
def test_exported_name_is_there_and_documented(name):
    value = getattr(zckpt, name)
    if name == "__version__":
        assert value.count(".") == 2
        return
    assert inspect.getdoc(value)
    assert value.__doc__


def test_the_face_is_what_dir_lists():
    assert dir(zckpt) == sorted(zckpt.__all__)


def test_a_checkpoint_shows_itself_in_two_lines():
    opened = zckpt.open(FIXTURES / "s2_bf16_dp4")
    nbytes = sum(path.stat().st_size for path in (FIXTURES / "s2_bf16_dp4/global_step5").iterdir())
    assert repr(opened).splitlines() == [
        f"<OpenedCheckpoint '{FIXTURES}/s2_bf16_dp4/global_step5': deepspeed 0.19.8, ZeRO stage 2, dp=4",
        f" parameters=21 elements=1,850 files=5 bytes={nbytes:,} step=5>",
    ]
    strange = zckpt.Checkpoint("a\nb'\x1b[31m", "torch", "\n2\x1b", parameters={})
    assert repr(strange).splitlines() == [
        '<Checkpoint "a\\nb\'\\x1b[31m": torch 2\ufffd, 1 rank',
        " parameters=0 elements=0 files=0 bytes=0>",
    ]


def test_what_is_large_shows_itself_in_ten_lines():
    opened = zckpt.open(FIXTURES / "s2_bf16_dp2")
    results = [
        zckpt.diff(opened, FIXTURES / "s2_bf16_dp3"), zckpt.inspect(opened, include_inventory=True), zckpt.map(opened),
        zckpt.verify(opened), zckpt.fingerprint(opened), zckpt.stats(opened), zckpt.history(FIXTURES / "s2_bf16_dp2"),
        zckpt.show(opened, "fc1.weight"), opened.parameters, opened.buffers,
    ]  # fmt: skip
    for one in [*results, *opened.parameters.values(), opened["fc1.weight"].slots["weight"]]:
        lines = repr(one).splitlines()
        assert len(lines) <= 10
        assert max(map(len, lines)) <= 140
    assert repr(opened.parameters["fc1.weight"]) == (
        "<Parameter fc1.weight [13, 8] bfloat16: weight, master, exp_avg, exp_avg_sq>"
    )


def test_a_checkpoint_is_asked_by_name():
    opened = zckpt.open(FIXTURES / "s2_bf16_dp2")
    assert list(opened) == [*opened.parameters, *opened.buffers]
    assert opened["head.weight"] is opened.parameters["emb.weight"]
    assert "fc1.weight" in opened
    assert "fc1.weigth" not in opened
    for names in (opened, opened.parameters):
        with pytest.raises(KeyError, match=r"fc1\.weigth; did you mean fc1\.weight"):
            names["fc1.weigth"]
    weights, moments = opened.state_dict(), opened.state_dict("exp_avg")
    assert weights.keys() == set(opened)
    assert weights["head.weight"] is weights["emb.weight"]
    assert moments.keys() == {one for one in opened.parameters if "exp_avg" in opened[one].slots}
    assert torch.equal(moments["fc1.weight"], opened.read("fc1.weight", "exp_avg"))
    with refusing(zckpt.UsageError, "there is no slot momentum"):
        opened.state_dict("momentum")


def test_other_names_are_none():
    with pytest.raises(AttributeError, match="frobnicate"):
        zckpt.frobnicate  # noqa: B018


@pytest.mark.parametrize(
    "name",
    ["open", "inspect", "map", "series", "consolidate", "convert", "reshard", "strip", "diff", "verify", "fingerprint"],
)
def test_arguments_after_the_first_two_are_keyword_only(name):
    parameters = list(inspect.signature(getattr(zckpt, name)).parameters.values())
    positional = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    assert len(positional) <= 2


@pytest.mark.parametrize("name", [n for n in zckpt.__all__ if n.endswith("Error")])
def test_errors_are_one_family_with_an_exit_status(name):
    kind = getattr(zckpt, name)
    assert issubclass(kind, zckpt.ZckptError)
    expected = {zckpt.UnsupportedError: 5, zckpt.UsageError: 2, zckpt.SourceError: 3, zckpt.TargetError: 4}
    assert [s for base, s in expected.items() if issubclass(kind, base)][:1] in ([kind.exit_status], [])
    assert issubclass(kind, (ValueError, OSError, AssertionError)) or kind is zckpt.ZckptError


# --- reading


@pytest.mark.parametrize("name", READ)
def test_read_gives_every_slot_of_every_parameter_the_models_own_weights_and_buffers(name):
    truth, opened = Truth(FIXTURES / name), zckpt.open(FIXTURES / name)
    assert_state(opened, truth)
    for parameter, value in truth.weights.items():
        if parameter not in truth.buffers and ("s3_" not in name or parameter in truth.frozen):
            assert_same_tree(opened.read(parameter, "weight"), value, parameter)
    assert_same_tree({name: bits(opened.read(name)) for name in opened.buffers}, truth.buffers)


def test_read_of_a_tied_name_gives_its_owners_values():
    opened = zckpt.open(FIXTURES / "s2_bf16_dp2")
    for slot in ("weight", "master", "exp_avg", None):
        assert torch.equal(opened.read("head.weight", slot), opened.read("emb.weight", slot))


def test_read_without_a_slot_is_the_master_or_else_the_weight():
    opened = zckpt.open(FIXTURES / "s2_bf16_dp2")
    assert torch.equal(opened.read("fc1.weight"), opened.read("fc1.weight", "master"))
    assert torch.equal(opened.read("frozen_odd"), opened.read("frozen_odd", "weight"))


@pytest.mark.parametrize("name", ["plain_mixed", "plain_adamw", "plain_bf16", "plain_proto4", "plain_legacy"])
def test_read_of_a_plain_file_is_what_torch_loads(name):
    path = FIXTURES / "other" / name / "ckpt.pt"
    opened = zckpt.open(path)
    loaded = torch.load(path, weights_only=False)
    tensors = next((v for k, v in loaded.items() if k in ("model", "state_dict", "module")), loaded)
    loaded = {key: value for key, value in tensors.items() if isinstance(value, torch.Tensor)}
    assert len(loaded) > 5
    assert_same_tree({key: opened.read(key) for key in loaded}, loaded)


def test_tensor_that_was_read_can_be_written_to():
    opened = zckpt.open(FIXTURES / "s2_bf16_dp2")
    first = opened.read("fc1.weight")
    first.zero_()
    assert opened.read("fc1.weight").any()


@pytest.mark.parametrize(("name", "slot"), [("nobody", None), ("fc1.weight", "momentum"), ("frozen_odd", "master")])
def test_read_of_what_is_not_there_is_a_usage_error(name, slot):
    with refusing(zckpt.UsageError, slot or name):
        zckpt.open(FIXTURES / "s2_bf16_dp2").read(name, slot)


# --- the fields of a checkpoint


def test_fields_of_a_checkpoint():
    opened = zckpt.open(FIXTURES / "s2_bf16_dp3")
    truth = Truth(FIXTURES / "s2_bf16_dp3")
    assert (opened.format, opened.format_version, opened.zero_stage) == ("deepspeed", "0.19.8", 2)
    assert opened.topology == zckpt.Topology(dp=3)
    assert (opened.world_size, opened.step, opened.loss_scale) == (3, 5, 1.0)
    assert opened.slot_names() == ["weight", "master", "exp_avg", "exp_avg_sq"]
    assert list(opened.parameters["head.weight"].slots) == []
    assert opened.parameters["head.weight"].tied_to == "emb.weight"
    assert opened.owner("head.weight") is opened.parameters["emb.weight"]
    assert opened.parameters["emb.weight"].shape == (37, 8)
    assert opened.parameters["emb.weight"].numel == 37 * 8
    assert [group.parameters for group in opened.param_groups] == truth.facts["order"]
    assert opened.param_groups[0].state["step"] == zckpt.Scalar(5.0, "float32")
    assert len(opened.files) == 4
    assert opened.warnings == []
    assert opened.unnamed == {}


def test_loss_scale_of_a_dynamic_scaler():
    assert zckpt.open(FIXTURES / "s2_fp16_dp2").loss_scale == Truth(FIXTURES / "s2_fp16_dp2").facts["loss_scale"]


def test_client_state_is_kept_as_inert_data():
    metadata = zckpt.open(FIXTURES / "s2_bf16_dp2_client").metadata
    assert metadata["epoch"] == 3
    assert metadata["note"] == "na\u00efve \u2713"
    assert {"args", "rng", "np_rng", "lr_scheduler"} <= set(metadata)


def test_errors_carry_their_data_and_survive_pickling():
    with pytest.raises(zckpt.SourceError) as caught:
        zckpt.open(FIXTURES / "absent")
    assert caught.value.path == str(FIXTURES / "absent")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


@pytest.mark.parametrize("name", ["s0_bf16_dp2", "s3_bf16_dp2"])
def test_what_is_read_is_held_against_the_checksums_that_lie_there(name, tmp_path):
    opened = zckpt.open(copy(name, tmp_path))
    fc1 = opened.parameters["fc1.weight"].slots["exp_avg"].spans[0]
    flip(fc1.path, fc1.offset)

    def refused():
        refusals = 0
        for parameter in opened.parameters.values():
            for slot in parameter.slots:
                try:
                    opened.read(parameter.name, slot)
                except DamagedFileError:
                    refusals += 1
        return refusals

    assert refused() == refused() == 1
    assert opened.read("fc1.weight", "exp_avg", verify=False).any()
