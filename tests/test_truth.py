"""Every real checkpoint among the fixtures comes out bit-equal to what the live optimizer held."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt
from tests.truth import Truth, assert_consolidated

FIXTURES = Path(__file__).parent.parent / "fixtures"
DIRECTORIES = sorted(p.parent for p in FIXTURES.rglob("truth.json"))


def source(directory: Path) -> Path:
    """What a user would name: the run directory, or the one file or directory beside the truth."""
    if (directory / "latest").is_file():
        return directory
    (only,) = [p for p in directory.iterdir() if not p.name.startswith("truth.")]
    return only


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda d: d.name)
def test_consolidated_state_is_the_truth(directory: Path, tmp_path: Path) -> None:
    truth = Truth(directory)
    without = frozenset(truth.frozen) if "nofrozen" in directory.name else frozenset()
    assert_consolidated(source(directory), truth, tmp_path, without=without, optimizer="pp2_s0" not in directory.name)


def test_optimizer_of_a_pipeline_without_zero_is_left_out_with_a_warning() -> None:
    checkpoint = zckpt.open(FIXTURES / "pp2_s0_fp32_dp2")
    assert not checkpoint.param_groups
    assert any("numbers its optimizer's parameters" in warning for warning in checkpoint.warnings)
