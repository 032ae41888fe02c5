"""An elastic checkpoint made rigid with hyperparameters from a file: stock DeepSpeed goes on from it."""

from __future__ import annotations

import json

import pytest

import zckpt
from tests.cli.console import FIXTURES
from tests.deepspeed_engine import SPECS, resume
from tests.truth import Truth

pytestmark = pytest.mark.interop


def test_deepspeed_goes_on_from_the_rigid_form(tmp_path):
    source = FIXTURES / "s2_bf16_dp2_elastic"
    (tmp_path / "groups.json").write_text(json.dumps(Truth(source).facts["param_groups"]))
    given = str(tmp_path / "groups.json")
    zckpt.reshard(source, tmp_path / "cut", world_size=3, elastic=False, hyperparameters=given)
    verdict = resume(tmp_path / "cut", SPECS["s2_bf16_dp2"].at(3), source)
    assert verdict.ok, verdict
