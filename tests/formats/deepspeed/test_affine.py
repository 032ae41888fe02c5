"""Affine maps of slices: what is no map, or contradicts itself, is refused; how another degree follows from one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.refusals import refusing
from zckpt.errors import LayoutError, UnsupportedError
from zckpt.formats.deepspeed.axes.tp_rules import AFFINE_KEY, Rules, Share

NAME = "model.mlp.up_proj.weight"


def piece(shape: list[int], source, dest=0, *, columns=2, **more) -> dict[str, Any]:
    return {"shape": shape, "source": [source, [columns, 1]], "dest": [dest, [shape[1], 1]], "locations": [0], **more}


def rules(name, shape: list[int], *ranks: tuple[list[int], list[dict[str, Any]]], **more) -> Rules:
    entry = {
        "logical_shape": shape,
        "ranks": {str(rank): {"shard_shape": local, "pieces": held} for rank, (local, held) in enumerate(ranks)},
    }
    return Rules({AFFINE_KEY: {"version": 1, "params": {f"^{re.escape(name)}$": entry}}, **more}, "the file")


def two(name, rows, **more) -> Rules:
    first, second = -(-rows // 2), rows // 2
    halves = ([first, 2], [piece([first, 2], 0)]), ([second, 2], [piece([second, 2], 2 * first)])
    return rules(name, [rows, 2], *halves, **more)


def test_another_degree_has_equal_shares_or_almost():
    assert two(NAME, 5).rule(NAME, [(3, 2), (2, 2)]).shares == ((Share(0, 0, 3),), (Share(0, 3, 2),))
    assert two(NAME, 6).cut(NAME, (6, 2), 3).shares == ((Share(0, 0, 2),), (Share(0, 2, 2),), (Share(0, 4, 2),))
    assert [share[0].size for share in two(NAME, 7).cut(NAME, (7, 2), 4).shares] == [2, 2, 2, 1]
    assert two(NAME, 7).cut(NAME, (7, 2), 1).shares == ((Share(0, 0, 7),),)
    attention = "model.self_attn.q_proj.weight"
    with refusing(LayoutError, "cannot be cut for 4 tensor-parallel ranks"):
        two(attention, 7).cut(attention, (7, 2), 4)


def test_a_vocabulary_with_a_map_has_no_padding():
    more = {"original_vocab_size": 4, "vocabulary_parameter_patterns": [NAME]}
    found = two(NAME, 6, **more)
    assert not found.is_vocabulary(NAME)
    assert found.rule(NAME, [(3, 2), (3, 2)]).shape == (6, 2)


CONTRADICTIONS = {
    "a gap": [([2, 2], [piece([2, 2], 0)]), ([2, 2], [piece([2, 2], 6)])],
    "not all of a slice": [([3, 2], [piece([2, 2], 0)]), ([3, 2], [piece([3, 2], 4)])],
    "twice in a slice": [([4, 2], [piece([2, 2], 0), piece([2, 2], 4)]), ([1, 2], [piece([1, 2], 8)])],
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_contradictions(kind):
    with refusing(LayoutError, "contradicts itself"):
        rules(NAME, [5, 2], *CONTRADICTIONS[kind]).mapped(NAME)


STRANGE = {
    "multiplied": [([5, 2], [piece([5, 2], 0, scale=0.5)])],
    "transposed": [([2, 5], [{**piece([2, 5], 0), "source": [0, [1, 2]]}])],
    "outside": [([5, 2], [piece([5, 2], 2)])],
    "in two dimensions": [([2, 1], [piece([2, 1], 0)]), ([3, 1], [piece([3, 1], 4)])],
    "unreadable": [([5, 2], [{"shape": "x"}])],
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_not_followed(kind):
    with pytest.raises(UnsupportedError) as error:
        rules(NAME, [5, 2], *STRANGE[kind]).mapped(NAME)
    assert error.value.path == "the file"


def test_what_auto_tp_itself_cannot_describe_is_refused_by_name():
    found = Rules({"autotp_unsupported_parameter_patterns": {r"^a\.w$": "it interleaves"}}, "the file")
    with refusing(UnsupportedError, r"AutoTP does not say how a\.w is sliced"):
        found.rule("a.w", [(2, 2), (2, 2)])
    with refusing(UnsupportedError, "version"):
        Rules({AFFINE_KEY: {"version": 2, "params": {}}}, "the file")


def test_shapes_must_be_those_of_the_map():
    with refusing(LayoutError, "do not fit its affine map"):
        two(NAME, 6).rule(NAME, [(2, 2), (4, 2)])
