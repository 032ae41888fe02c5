"""Names that a format cannot hold are refused in one line, before anything is written; all others arrive."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from tests.cli.console import run
from tests.refusals import refusing
from zckpt.engine.plan import plan
from zckpt.engine.targets import Literal, TargetFile
from zckpt.engine.write import write
from zckpt.errors import TargetError, UnsupportedError
from zckpt.formats import open_checkpoint
from zckpt.formats.safetensors.layout import Entry, lay_out, lay_out_directory
from zckpt.state import Slot
from zckpt.storage.durable import written

SURROGATE = "a\ud800b"

HELD = ["", "\0", "a/b", "..", "\n", "é" * 300, "__Metadata__", "a b"]
"""Names that every format but universal holds."""


def saved(path, name) -> dict[str, torch.Tensor]:
    tensors = {name: torch.arange(3.0), "other": torch.ones(2)}
    torch.save(tensors, path)
    return tensors


@pytest.mark.parametrize("name", ["__metadata__", SURROGATE])
@pytest.mark.parametrize("target", ["model.safetensors", "model"])
def test_a_name_that_safetensors_cannot_hold_is_refused(name, target, tmp_path):
    saved(tmp_path / "x.pt", name)
    done = run("consolidate", tmp_path / "x.pt", tmp_path / target)
    assert done.returncode == 5
    assert len(done.stderr.splitlines()) == 1
    assert ascii(name).strip("'") in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.parametrize("name", ["__metadata__", SURROGATE, *HELD])
def test_a_torch_file_holds_any_name(name):
    tensors = saved("x.pt", name)
    zckpt.consolidate("x.pt", "model.pt")
    found = torch.load("model.pt")
    assert list(found) == list(tensors)
    assert all(found[key].equal(tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("to", ["zckpt", "dcp", "consolidated"])
@pytest.mark.every(3)
def test_other_names_arrive(name, to):
    tensors = saved("x.pt", name)
    zckpt.convert("x.pt", "target", to=to, verify=True)
    checkpoint = zckpt.open("target")
    assert {key: checkpoint.read(key).tolist() for key in checkpoint.parameters} == {
        key: tensor.tolist() for key, tensor in tensors.items()
    }
    if to == "consolidated":
        assert load_file(next(Path("target").glob("*.safetensors"))).keys() == tensors.keys()


@pytest.mark.parametrize("to", ["zckpt", "consolidated"])
def test_a_lone_surrogate_is_refused_where_names_are_utf_8(to):
    saved("x.pt", SURROGATE)
    done = run("convert", Path("x.pt"), Path("target"), "--to", to)
    assert (done.returncode, len(done.stderr.splitlines())) == (5, 1)
    assert "lone surrogate" in done.stderr
    assert not Path("target").exists()


def test_a_lone_surrogate_is_printed_and_stored_escaped(monkeypatch):
    saved("x.pt", SURROGATE)
    written = io.BytesIO()
    printed = io.TextIOWrapper(written, "utf-8")
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "argv", ["zckpt", "inspect", "--json", "x.pt"])
    from zckpt.cli import main

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed.flush()
    assert SURROGATE in [one["name"] for one in json.loads(written.getvalue())["parameters"]]
    done = run("fingerprint", "--write", Path("x.pt"))
    assert done.returncode == 0, done.stderr


def test_two_tensors_of_one_name_are_refused():
    slot = Slot("w", "float32", (0,), ())
    entries = [Entry("w", slot, "float32")] * 2
    for made in (lambda: lay_out("x.safetensors", entries), lambda: lay_out_directory(entries, 1)):
        with refusing(UnsupportedError, "two tensors in the safetensors file would be called 'w'"):
            made()


def test_keys_that_are_one_name_are_refused(torch_file):
    with refusing(UnsupportedError, "two keys give the name '1'"):
        open_checkpoint(torch_file({1: torch.ones(2), "1": torch.zeros(2)}))


def test_two_names_that_the_file_system_takes_for_one_are_refused():
    """As one that does not tell upper from lower case; here one directory is a link to the other."""
    made = plan([TargetFile(name, 1, [Literal(0, b"x")]) for name in ("A/x", "B/x")])
    Path("A").mkdir()
    Path("B").symlink_to("A")
    with refusing(TargetError, "two names as the same"):
        write(made, [Path("A/x"), Path("B/x")])
    Path("A/x").unlink()
    with pytest.raises(TargetError), written([Path("A/x"), Path("B/x")], overwrite=False):
        pass
    assert list(Path("A").iterdir()) == []
