"""Every real checkpoint among the fixtures comes out bit-equal to what the live optimizer held."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt
from tests.truth import Truth, assert_consolidated, assert_same

FIXTURES = Path(__file__).parent.parent / "fixtures"
PIPELINE_WITHOUT_ZERO = FIXTURES / "pp2_s0_fp32_dp2"
TOLD = [{path.parent for path in FIXTURES.rglob(name)} for name in ("truth.json", "truth.safetensors")]
DIRECTORIES = sorted(TOLD[0] & TOLD[1] - {PIPELINE_WITHOUT_ZERO})


def source(directory: Path) -> Path:
    """What a user would name: the run directory, or the one file or directory beside the truth."""
    if (directory / "latest").is_file():
        return directory
    (only,) = [p for p in directory.iterdir() if not p.name.startswith("truth.")]
    return only


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda d: d.name)
@pytest.mark.every(8)
def test_consolidated_state_is_the_truth(directory, tmp_path):
    truth = Truth(directory)
    without = frozenset(truth.frozen) if "nofrozen" in directory.name else frozenset()
    assert_consolidated(source(directory), truth, tmp_path, without=without)


def test_pipeline_without_zero_has_weights_by_layer_and_a_warning_for_the_optimizer():
    checkpoint = zckpt.open(PIPELINE_WITHOUT_ZERO)
    weights = {name.replace("tied_modules.embed", "0"): w for name, w in Truth(PIPELINE_WITHOUT_ZERO).weights.items()}
    assert set(checkpoint.parameters) == set(weights)
    for name, weight in weights.items():
        assert_same(checkpoint.read(name), weight, name)
    assert not checkpoint.param_groups
    assert any("is uncertain" in warning for warning in checkpoint.warnings)
