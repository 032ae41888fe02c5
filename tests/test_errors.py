"""What an error says, and where it learns of which file."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import zckpt
from tests.cli.console import FIXTURES, run
from tests.refusals import refusing
from zckpt.cli import cli
from zckpt.errors import DamagedFileError, about, as_keywords, require_torch
from zckpt.operations.options import Converted


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


# --- options


@pytest.fixture
def in_python(monkeypatch):
    """Errors as they are without the tests' own setting."""
    monkeypatch.setattr(zckpt.ZckptError, "names_flags", False)


def _signature(verb: str) -> set[str]:
    function = getattr(zckpt, {"list": "history"}.get(verb, verb).replace("-", "_"))
    names = set(inspect.signature(function).parameters)
    return names | set(Converted.__annotations__) if "options" in names else names


@pytest.mark.parametrize("verb", sorted(set(cli.commands) - {"formats"}))
def test_every_option_that_a_verb_has_in_python_too_is_named_by_its_keyword(verb):
    command = cli.commands[verb]
    own = _signature(verb)
    options = [one for one in command.get_params(click.Context(command)) if isinstance(one, click.Option)]
    for one in options:
        if one.name not in own:  # of the command line alone
            continue
        for flag in (*one.opts, *one.secondary_opts):
            if flag.startswith("--"):
                keyword, value = as_keywords(f"give {flag}, or not").removeprefix("give ").split(",")[0].split("=")
                assert keyword == one.name
                assert value in (("True", "False", "") if one.is_flag else ("",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("give --names FILE, one a line", "give names=[...], one a line"),
        ("--stage 1 or 2, without --pipeline-parallel-size", "stage=1 or 2, without pipeline_parallel_size="),
        ("--overwrite replaces it, --no-checksums too", "overwrite=True replaces it, checksums=False too"),
        ("--groups=one, --slots=exp_avg,master, --fsdp-size=2", 'groups="one", slots=["exp_avg", "master"], '
            'fsdp_size=2'),
        ("write --drop 'a/*.pt'; --stage-bounds 0,N,...: all", "write drop=['a/*.pt']; stage_bounds=0,N,...: all"),
        ("--drop 'RMS' or --drop FILE", "drop=['RMS'] or drop=[...]"),
        ("`zckpt reshard A B --world-size 2` does", "`zckpt reshard A B --world-size 2` does"),
        ("a--b and -- and `--to=dcp`", 'a--b and -- and `to="dcp"`'),
    ],
)  # fmt: skip
def test_options_become_keywords_and_commands_stay(text, said):
    assert as_keywords(text) == said


SOURCE, PLAIN = FIXTURES / "s2_bf16_dp2", FIXTURES / "other/plain_adamw/ckpt.pt"
REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "consolidate fixtures/s2_bf16_dp2 fixtures/s2_bf16_dp3": (
        lambda: zckpt.consolidate(SOURCE, FIXTURES / "s2_bf16_dp3"), "give overwrite=True", "give --overwrite",
    ),
    "convert fixtures/other/plain_adamw/ckpt.pt x --to deepspeed": (
        lambda: zckpt.convert(PLAIN, "x", to="deepspeed"), "world_size=N and stage=1", "--world-size N and --stage 1",
    ),
    "reshard fixtures/s2_bf16_dp2 x --world-size 2 --resume --restart": (
        lambda: zckpt.reshard(SOURCE, "x", world_size=2, resume=True, restart=True),
        "resume=True and restart=True exclude", "--resume and --restart exclude",
    ),
    "average fixtures/s2_bf16_dp2 fixtures/s2_bf16_dp2 --target x --weights 1,2 --ema 0.5": (
        lambda: zckpt.average([SOURCE, SOURCE], "x", weights=[1, 2], ema=0.5),
        "weights= and ema= exclude", "--weights and --ema exclude",
    ),
    "strip fixtures/s2_bf16_dp2 x --optimizer --keep-slots exp_avg": (
        lambda: zckpt.strip(SOURCE, "x", optimizer=True, keep_slots=["exp_avg"]),
        "keep_slots= only", "--keep-slots only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command.partition(" ")[0])
@pytest.mark.usefixtures("in_python")
def test_a_verb_names_options_as_whoever_calls_it_does(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, keywords, flags = REFUSED[command]
    with pytest.raises(zckpt.ZckptError) as error:
        call()
    assert keywords in str(error.value)
    assert keywords in json.dumps(error.value.as_dict())
    assert "--" not in str(error.value)
    done = run(command, "--json")
    assert flags in done.stderr
    assert flags in done.stdout
    with refusing(zckpt.ZckptError, re.escape(keywords)):  # again, after the command line
        call()


@pytest.mark.usefixtures("in_python")
def test_notes_and_warnings_name_options_as_whoever_calls_does(tmp_path):
    source = FIXTURES / "s0_fp32_dp2"
    for warnings in (zckpt.inspect(source).warnings, zckpt.convert(source, tmp_path / "x", to="zckpt").warnings):
        assert any("give names=[...]" in one for one in warnings)
        assert not any("--" in one for one in warnings)
    done = run("convert", source, tmp_path / "y", "--to", "zckpt")
    assert "give --names FILE" in done.stdout + done.stderr


@pytest.mark.parametrize(("version", "refused"), [("2.4.1+cu121", True), ("2.5.0", False), ("3.0.0a0+git1", False)])
def test_a_torch_that_is_too_old_to_train_with_is_named(version, refused, monkeypatch):
    """Reading tensors needs no newer one."""
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    require_torch("read()", since=(2, 0))
    if not refused:
        require_torch("training")
        return
    with refusing(zckpt.MissingPackageError, r"training needs torch 2\.5 or newer.*found torch 2\.4\.1"):
        require_torch("training")
