"""What an error says, and where it learns of which file."""

from __future__ import annotations

from pathlib import Path

import pytest

from zckpt.errors import DamagedFileError, about


def test_an_error_names_the_innermost_file_that_it_is_about():
    with pytest.raises(DamagedFileError) as of_none, about("run"), about(Path("run/model.pt")):
        raise DamagedFileError("ends early")
    assert str(of_none.value) == "run/model.pt: ends early"
    with pytest.raises(DamagedFileError) as of_its_own, about("run"):
        raise DamagedFileError("ends early", path="run/other.pt")
    assert of_its_own.value.path == "run/other.pt"


def test_what_is_no_error_of_zckpt_passes_as_it_is():
    with pytest.raises(KeyError, match="a name"), about("run"):
        raise KeyError("a name")
