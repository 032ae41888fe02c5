"""One rule for what wrappers put into names: bare names, names that meet, and a checkpoint under other names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.state import Checkpoint, Duplicate, Extent, Parameter, ParamGroup, Slot, Span
from zckpt.state.names import (
    INNER,
    aligned,
    as_filed,
    bare,
    bare_names,
    canonical_names,
    like_model,
    natural_order,
    plain_name,
)

SEGMENTS = st.sampled_from(["fc", "body", "module", "0", "weight", "model"])
NAMES = st.lists(st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=6, unique=True)
WRAPPERS = st.lists(st.sampled_from(["module", *sorted(INNER)]), max_size=3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.fc.weight", "fc.weight"),
        ("module.module.fc.weight", "module.fc.weight"),
        ("_orig_mod.module.fc.weight", "fc.weight"),
        ("_forward_module._orig_mod.fc.weight", "fc.weight"),
        ("layers.0._orig_mod.fc._orig_mod.weight", "layers.0.fc.weight"),
        ("_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.fc.weight", "layers.0.fc.weight"),
        ("layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("base_model.model.fc.weight", "base_model.model.fc.weight"),
        ("my_module.fc.weight", "my_module.fc.weight"),
        ("encoder.module.weight", "encoder.module.weight"),
        ("submodule_orig_mod.weight", "submodule_orig_mod.weight"),
        ("module.", "module."),
        ("_orig_mod", "_orig_mod"),
    ],
)
def test_what_wrappers_put_there_is_left_out(name, expected):
    assert bare_names([name]) == {name: expected}


def test_a_prefix_that_not_all_have_is_a_child_of_the_model():
    names = ["module.a", "module.b", "head.weight"]
    assert bare_names(names) == {name: name for name in names}
    wrapped = [f"module.{name}" for name in names]
    assert bare_names(wrapped) == dict(zip(wrapped, names, strict=True))
    assert bare_names(["module.a", "n_averaged"]) == {"module.a": "a", "n_averaged": "n_averaged"}


def test_names_that_would_become_one_stay_apart():
    assert bare_names(["a._orig_mod.b", "a.b", "c._orig_mod.d"]) == {
        "a._orig_mod.b": "a._orig_mod.b",
        "a.b": "a.b",
        "c._orig_mod.d": "c.d",
    }
    assert bare_names(["module.a", "_orig_mod.a"]) == {"module.a": "module.a", "_orig_mod.a": "a"}


def test_names_that_were_bare_when_written_keep_a_child_called_module():
    assert bare_names(["module.a", "module.b"], front=False) == {"module.a": "module.a", "module.b": "module.b"}


def test_for_comparing_the_prefix_of_peft_is_left_out_too():
    assert canonical_names(["module.base_model.model.a", "module.base_model.model.b.module.c"]) == {
        "module.base_model.model.a": "a",
        "module.base_model.model.b.module.c": "b.module.c",
    }


@given(NAMES, WRAPPERS)
def test_wrappers_around_a_model_change_nothing(names, wrappers):
    wrapped = {".".join([*wrappers, name]): name for name in names}
    assert aligned(names, wrapped) == wrapped
    assert list(canonical_names(wrapped).values()) == list(canonical_names(names).values())
    if wrappers.count("module") == 1:
        assert list(bare_names(wrapped).values()) == names


@given(NAMES)
def test_bare_names_are_different_and_canonical_ones_stay(names):
    for found in (bare_names(names), canonical_names(names)):
        assert len(set(found.values())) == len(names)
    assert canonical_names(found.values()) == {name: name for name in found.values()}


@given(NAMES, NAMES, WRAPPERS)
def test_names_that_meet_meet_once_and_make_no_two_one(ours, theirs, around):
    theirs = [".".join([*around, name]) for name in theirs]
    found = aligned(ours, theirs)
    assert found.keys() <= set(theirs)
    assert set(found.values()) <= set(ours)
    assert len(set(found.values())) == len(found)
    assert not set(found.values()) & {plain_name(name) for name in theirs if name not in found}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (["a", "b"], ["module.a", "module.b", "averaged"], {"module.a": "a", "module.b": "b"}),
        (["module.a", "module.b"], ["a", "b"], {"a": "module.a", "b": "module.b"}),
        (["module.a", "h"], ["module.module.a", "module.h"], {"module.module.a": "module.a", "module.h": "h"}),
        (["module.a", "head"], ["module.a", "head"], {"module.a": "module.a", "head": "head"}),
        (["a", "b"], ["module.a", "b"], {"b": "b"}),  # no wrapper is around a part of the names
        (["a", "b", "c"], ["module.a", "module.b", "a"], {"a": "a"}),  # two of theirs would be `a`
        (["g.a", "d.a"], ["g.module.a", "d.module.module.a"], {"g.module.a": "g.a", "d.module.module.a": "d.a"}),
        (["g.module.a", "n"], ["g.a", "n"], {"g.a": "g.module.a", "n": "n"}),
        (["g.a", "d.a"], ["g.module.a", "g.module.module.a", "d.a"], {"d.a": "d.a"}),  # two of theirs would be `g.a`
        (["x"], ["y"], {}),
        (["module.a", "n_averaged"], ["a", "n_averaged"], {"a": "module.a", "n_averaged": "n_averaged"}),
        (["a"], ["module.a", "n_averaged"], {"module.a": "a"}),
        (["q.lora_A.weight", "q.w"], ["q.lora_A.default.weight"], {"q.lora_A.default.weight": "q.lora_A.weight"}),
        (["q.lora_A.my.weight", "q.lora_B.my.bias"], ["q.lora_A.weight"], {"q.lora_A.weight": "q.lora_A.my.weight"}),
        (["e.lora_embedding_A"], ["e.lora_embedding_A.default"], {"e.lora_embedding_A.default": "e.lora_embedding_A"}),
        (["q.lora_magnitude_vector"], ["q.lora_magnitude_vector.default.weight"],
         {"q.lora_magnitude_vector.default.weight": "q.lora_magnitude_vector"}),
        (["e.token_adapter.trainable_tokens_delta"], ["e.token_adapter.trainable_tokens_delta.default"],
         {"e.token_adapter.trainable_tokens_delta.default": "e.token_adapter.trainable_tokens_delta"}),
        (["h.weight"], ["h.modules_to_save.default.weight", "h.original_module.weight"],
         {"h.modules_to_save.default.weight": "h.weight"}),
        (["q.lora_A.weight"], ["q.lora_A.one.weight", "q.lora_A.other.weight"], {}),  # which is not known
        (["q.lora_A.one.weight", "q.lora_A.other.weight"], ["q.lora_A.weight"], {}),
        (["q.lora_A.one.weight"], ["q.lora_A.one.weight", "q.lora_A.weight"],
         {"q.lora_A.one.weight": "q.lora_A.one.weight"}),
        (["base_model.model.q.lora_A.weight", "base_model.model.w"], ["q.lora_A.weight", "w"],
         {"q.lora_A.weight": "base_model.model.q.lora_A.weight"}),  # added without PEFT's wrapper
        (["base_model.model.q.lora_magnitude_vector"], ["q.lora_magnitude"],
         {"q.lora_magnitude": "base_model.model.q.lora_magnitude_vector"}),
        (["q.lora_A.weight"], ["base_model.model.q.lora_A.my.weight"],
         {"base_model.model.q.lora_A.my.weight": "q.lora_A.weight"}),
    ],
)  # fmt: skip
def test_the_live_model_decides_what_a_prefix_is(ours, theirs, expected):
    assert aligned(ours, theirs) == expected


def made() -> Checkpoint:
    slot = Slot("weight", "float32", (2,), (Span(Extent.whole((2,)), "f", 0, "float32"),))
    parameters = {
        "_orig_mod.a": Parameter("_orig_mod.a", (2,), "float32", {"weight": slot}, group=0),
        "_orig_mod.b": Parameter("_orig_mod.b", (2,), "float32", tied_to="_orig_mod.a"),
    }
    return Checkpoint(
        "f", "torch", parameters=parameters,
        buffers={"_orig_mod.n": Parameter("_orig_mod.n", (2,), "float32", {"weight": slot})},
        param_groups=[ParamGroup({}, ["_orig_mod.a", "3"])],
        unnamed={"3": Parameter("3", (2,), "float32")},
        duplicates=[Duplicate("tied", "_orig_mod.b", "_orig_mod.a", slot, slot)],
    )  # fmt: skip


def test_a_checkpoint_is_renamed_whole_and_back():
    before, checkpoint = made(), bare(made())
    assert list(checkpoint.parameters) == ["a", "b"]
    assert [one.name for one in checkpoint.tensors()] == ["a", "b", "n"]
    assert checkpoint.parameters["b"].tied_to == "a"
    assert checkpoint.param_groups[0].parameters == ["a", "3"]
    assert [(one.name, one.of) for one in checkpoint.duplicates] == [("b", "a")]
    assert checkpoint.wrapped == {"a": "_orig_mod.a", "b": "_orig_mod.b", "n": "_orig_mod.n"}
    like_model(checkpoint, ["module.a", "module.b"])
    assert list(checkpoint.parameters) == ["module.a", "module.b"]
    assert as_filed(checkpoint) == before


def test_names_are_ordered_by_the_numbers_in_them_whatever_digits_they_have():
    names = ["layers.10.w", "layers.9.w", "layers.\u0663.w", "\u0663" * 5000, "9" * 5000, "w"]
    assert sorted(names, key=natural_order)[-2:] == ["w", "\u0663" * 5000]
    assert sorted(names[:2], key=natural_order) == names[1::-1]
