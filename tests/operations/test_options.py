"""Options that verbs share are in signatures, docstrings, flags and journals, each from its one line."""

from __future__ import annotations

import inspect

import numpy
import pytest

import zckpt
from tests.cli.console import FIXTURES
from tests.refusals import refusing
from zckpt.cli import cli
from zckpt.formats import registry
from zckpt.formats.options import options_of as format_options
from zckpt.operations.options import (
    Compared,
    ComparedTwo,
    Converted,
    Filled,
    ReadCopied,
    Reading,
    ReadWritten,
    Renamed,
    Resharded,
    Salvaged,
    options_of,
)
from zckpt.operations.target import How

GROUPS = {
    "open": Reading, "inspect": Salvaged, "map": Reading, "consolidate": Filled, "convert": Converted,
    "reshard": Resharded, "strip": ReadWritten, "average": Renamed, "merge_adapter": Renamed, "diff": ComparedTwo,
    "fingerprint": Compared, "verify": ReadCopied,
}  # fmt: skip
SOURCE = FIXTURES / "s1_fp32_dp1"


@pytest.mark.parametrize("verb", GROUPS)
def test_a_verb_shows_every_option_of_its_group_and_has_its_flags(verb):
    function = getattr(zckpt, verb)
    known, document = inspect.signature(function).parameters, inspect.getdoc(function)
    flags = set() if verb == "open" else {one.name for one in cli.commands[verb.replace("_", "-")].params}
    for name, one in options_of(GROUPS[verb]).items():
        assert known[name].default == one.default
        assert verb == "open" or f"\n{name}\n    {one.text}" in document
        assert verb == "open" or one.flag == "" or name in flags


@pytest.mark.parametrize("verb", [verb for verb in GROUPS if verb not in ("convert", "reshard")])
def test_an_option_that_a_verb_lacks_is_an_error_before_all_else(verb):
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        getattr(zckpt, verb)(SOURCE, colour="red")


@pytest.mark.parametrize("name", ["memory", "max_shard_size"])
@pytest.mark.parametrize("size", ["64MB", 0, 0.5, float("inf"), float("nan")])
def test_a_size_is_a_number_of_bytes(name, size):
    with refusing(zckpt.UsageError, f"unusable --{name.replace('_', '-')}: expected a positive number of bytes"):
        zckpt.consolidate(SOURCE, "out", **{name: size})


@pytest.mark.parametrize("verb", [lambda one: zckpt.average(one, "out"), zckpt.series])
@pytest.mark.parametrize("one", [str(SOURCE), SOURCE])
def test_one_source_is_not_taken_for_its_letters(verb, one):
    with refusing(zckpt.UsageError, "found 1"):
        verb(one)


def test_the_options_of_formats_that_come_with_zckpt_are_in_the_types():
    own = [one for one in registry.formats() if one.name in registry.BUILT_IN]
    written = {option.name: option.kind for one in own for option in format_options(one.options)}
    recut = {option.name: option.kind for one in own for option in format_options(one.recut_options)}
    hints = Converted.__annotations__
    of_formats = {name: kind for name, kind in hints.items() if name not in Filled.__annotations__}
    assert of_formats == {name: kind | None for name, kind in {**written, **recut}.items()}
    assert set(Resharded.__annotations__) - set(Renamed.__annotations__) == set(recut) - {"world_size"}


def test_another_run_is_the_same_only_with_the_same_options():
    defaults = {name: one.default for name, one in options_of(Renamed).items()}
    recorded = How.of("consolidate", {**defaults, "rename": [("a", "b")], "memory": 1}, dtype="keep").options
    assert recorded["rename"] == [("a", "b")]
    assert recorded["dtype"] == "keep"
    assert not {"memory", "overwrite", "reporter", "dry_run", "resume"} & recorded.keys()


def test_a_text_is_no_list_of_names():
    with refusing(zckpt.UsageError, "names is a text: expected a list"):
        zckpt.open(SOURCE, names="names.txt")
    for odd in ([1, 2], 5, (one for one in (1, 2))):
        with refusing(zckpt.UsageError, "unusable --names: expected a list of names"):
            zckpt.open(SOURCE, names=odd)  # type: ignore[arg-type]


def test_names_that_a_source_has_of_its_own_are_said_to_be_ignored():
    source = FIXTURES / "other" / "mcore16_grouped_tp2_ep2" / "ckpt"
    assert zckpt.open(source, names=zckpt.open(source).grouped).warnings == []
    assert zckpt.open(source, names=["a"]).warnings == [
        "--names is ignored: the files have the names of the parameters"
    ]


def test_a_text_is_one_root():
    assert zckpt.open(SOURCE, roots=str(SOURCE)).parameters


def test_a_whole_number_of_any_type_is_a_size(tmp_path):
    zckpt.consolidate(SOURCE, tmp_path / "m.safetensors", memory=1e8, max_shard_size=numpy.int64(1 << 30))
