"""Patterns of configurations match what `re` matches, and none takes for ever."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.formats.patterns import Patterns

ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "^", "$", r"\b", "a.b"])


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    mark = st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,2}", "{2,}"])
    group = st.sampled_from(["(%s)", "(?:%s)", "(?!%s)", "(?=%s)"])
    return st.one_of(
        st.tuples(inner, mark).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.lists(inner, min_size=2, max_size=3).map("|".join).map("(?:{})".format),
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.tuples(group, inner).map(lambda pair: pair[0] % pair[1]),
    )


@given(st.recursive(ATOMS, larger, max_leaves=6), st.text("ab.1", max_size=7))
def test_a_pattern_matches_what_re_matches(pattern, name):
    whole = re.fullmatch(pattern, name) is not None
    below = re.match(rf"(.*\.)?({pattern})$", name) is not None  # as PEFT has it
    assert Patterns().match(pattern, name) == whole
    assert Patterns().match(rf"(?:.*\.)?(?:{pattern})", name) == below


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:q_proj|k_proj|v_proj)))"
)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (UNSLOTH, "model.layers.11.self_attn.q_proj", True),
        (UNSLOTH, "model.language_model.layers.3.mlp.k_proj", True),
        (UNSLOTH, "model.layers.11.self_attn.o_proj", False),
        (r"^(?!.*(?:visual|lm_head)).*\.(q|v)_proj", "model.layers.1.q_proj", True),
        (r"^(?!.*(?:visual|lm_head)).*\.(q|v)_proj", "visual.layers.1.q_proj", False),
        (r".*(?<!visual)\.q_proj", "a.visual.q_proj", False),
        (r".*(?<!visual)\.q_proj", "a.text.q_proj", True),
        (r"(?i).*Q_PROJ", "a.q_proj", True),
    ],
)
def test_what_programs_write_is_matched(pattern, name, matches):
    assert Patterns().match(pattern, name) is matches is (re.fullmatch(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(a|aa)+$", "(a|a)*b", "(.*)*x", "((a*)*)*b", "a?" * 40 + "a" * 40 + "b", "(a|aa)" * 60 + "b",
        ".*.*.*.*.*.*=.*", "(?:a{1,200}){1,200}b", "(a{0,2147483646}){0,2147483646}b", "(?=(a+)+b)a*", "(.*a){40}b",
        "." * 60_000 + "b", "(" * 90 + "a*" + ")*" * 90 + "b",
    ],
)  # fmt: skip
def test_none_takes_for_ever(pattern):
    begun, patterns = time.process_time(), Patterns()
    with contextlib.suppress(ValueError):  # "it takes too long"
        for number in range(5):
            assert not patterns.match(rf"(?:.*\.)?(?:{pattern})", "a" * (2000 + number) + "!")
    assert time.process_time() - begun < 8


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("(", "unterminated"), (r"(a)\1+", "groupref"), ("(?i:a)+", "subpattern"), ("a" * 70_000, "too long")],
)
def test_what_is_not_followed_is_named(pattern, said):
    with pytest.raises(ValueError, match=said):
        Patterns().match(pattern, "aa")
