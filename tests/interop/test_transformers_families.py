"""Families of transformers, by what its code saves and computes: the proofs of `bench/transformers_families.py`."""

from __future__ import annotations

import importlib.util
from itertools import chain
from pathlib import Path

import pytest
import transformers

from tests.pairwise import some

if int(transformers.__version__.partition(".")[0]) < 5:
    pytest.skip("transformers converts since version 5", allow_module_level=True)

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).parents[2] / "bench" / "transformers_families.py"
_spec = importlib.util.spec_from_file_location("transformers_families", SCRIPT)
families = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)

ONE_OF_EACH = ["gpt_neox", "deepseek_v3", "vit_mae", "paligemma", "marian", "wav2vec2", "mamba2", "nemotron_h"]
"""The kinds; a head that is tied away, an order that is not the file's, buffers that are computed, infinite limits."""


@pytest.mark.parametrize(
    "family",
    some(ONE_OF_EACH, sorted({*chain(*families.FAMILIES.values())} - {*ONE_OF_EACH})),
)
@pytest.mark.every(2)
def test_a_family_loads_and_trains_on_under_both_names(family):
    row = families.row(family)
    assert {proof: row[proof] for proof in families.PROOFS} == dict.fromkeys(families.PROOFS, "yes")
    assert " | ".join(row.values()) in families.TABLE.read_text()
