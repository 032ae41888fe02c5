"""Families of transformers, by what its code saves and computes: the proofs of `bench/transformers_families.py`."""

from __future__ import annotations

import importlib.util
import json
from itertools import chain
from pathlib import Path

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors import safe_open

from tests.pairwise import some
from zckpt.formats.transformers_trainer.architectures import lacks_tied_name

if int(transformers.__version__.partition(".")[0]) < 5:
    pytest.skip("transformers converts since version 5", allow_module_level=True)

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).parents[2] / "bench" / "transformers_families.py"
_spec = importlib.util.spec_from_file_location("transformers_families", SCRIPT)
families = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)

KEPT = ["vit_mae", "llava", "mamba2", "jamba"]
"""An order that is not the file's, parts that are models, a state space, and a hybrid, whose experts are one tensor."""


@pytest.mark.parametrize("family", some(KEPT, sorted({*chain(*families.FAMILIES.values())} - {*KEPT})))
def test_a_family_loads_and_trains_on_under_both_names(family):
    row = families.row(family)
    assert {proof: row[proof] for proof in families.PROOFS} == dict.fromkeys(families.PROOFS, "yes")
    assert " | ".join(row.values()) in families.TABLE.read_text()


@pytest.mark.parametrize(
    "family",
    some(["gpt2", "t5", "marian", "idefics", "bert"], sorted({*chain(*families.FAMILIES.values())})),
)
@pytest.mark.parametrize("tied", [None, True, False])
def test_it_is_known_which_models_have_more_names_than_their_files(family, tied, tmp_path):
    model = families.model_of(family)
    if tied is not None:
        for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = tied
        try:
            model = type(model)(model.config)
            model.save_pretrained(tmp_path)
        except StrictDataclassClassValidationError:  # it can only be one of both
            return
    else:
        model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    first = {}
    every = model.named_parameters(remove_duplicate=False)
    ties = [name for name, one in every if first.setdefault(id(one), name) != name]
    config = json.loads((tmp_path / "config.json").read_text())
    assert lacks_tied_name(config, names) == (not names.issuperset(ties))
