"""What the help says fits a screen and works; other words for verbs and values are understood; errors are documents."""

from __future__ import annotations

import json
import shlex

import click
import pytest

import zckpt
from tests.cli.console import ROOT, refused, run, succeeded
from tests.folders import contents
from zckpt.cli import cli
from zckpt.cli.verbs import EXAMPLES, GROUPS, RARE
from zckpt.report.errors import page

SOURCE = "fixtures/s2_bf16_dp2"


def test_each_verb_is_a_line_of_the_help():
    text = succeeded("--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    lines = {name: line for group in GROUPS.values() for name, line in group.items()}
    assert lines.keys() >= cli.commands.keys()
    for name in cli.commands:
        assert f"  {name:13}  {lines[name]}\n" in text
    assert "..." not in text.replace("[ARGS]...", "")


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_the_help_of_a_verb_has_what_most_need_and_examples_that_are_understood(name):
    command = cli.commands[name]
    short, whole = (succeeded(f"{name} {flag}").stdout for flag in ("--help", "--help-all"))
    options = [
        one
        for one in command.get_params(click.Context(command, **command.context_settings))
        if isinstance(one, click.Option)
    ]
    rare = [one for one in options if one.name in RARE]
    assert all(one.opts[0] in whole for one in options)
    assert not any(f"  {one.opts[0]} " in short for one in rare)
    assert ("more options" in short) == any(one.opts[0] not in short for one in options)
    assert succeeded(f"help {name}").stdout == short
    if name != "formats":
        assert len(EXAMPLES[name]) == 3
    for example in EXAMPLES.get(name, ()):
        assert f"  zckpt {name} {example}\n" in short
        command.make_context(name, shlex.split(example))


def test_other_words_for_verbs():
    assert succeeded(f"info {SOURCE}").stdout == succeeded(f"inspect {SOURCE}").stdout == succeeded(SOURCE).stdout
    assert succeeded(f"ls {SOURCE}").stdout == succeeded(f"list {SOURCE}").stdout
    succeeded(f"compare {SOURCE} {SOURCE}")
    assert "zckpt consolidate" in succeeded("merge --help").stdout
    assert succeeded("-V").stdout == succeeded("--version").stdout
    assert "Usage: zckpt [OPTIONS] COMMAND" in succeeded("help").stdout
    assert refused(2, f"consolidat {SOURCE}").count("consolidate") == 1
    refused(3, "./nowhere", words="cannot be opened")


@pytest.mark.parametrize("words", [
    [""], ["inspect", ""], ["inspect", "--json", ""], ["prune", "--keep-last", "1", "--delete", ""],
    ["convert", "--to=zckpt", SOURCE, ""], ["verify", "--", ""],
    ["help", ""], ["show", SOURCE, ""], ["inspect", SOURCE, "--tag="], ["diff", SOURCE, SOURCE, "--tag-b", ""],
    ["reshard", SOURCE, "x", "--world-size=1", "--stage-bounds", ""],
])  # fmt: skip
def test_a_variable_that_is_not_set_is_not_the_current_directory_nor_a_name(words):
    refused(2, words, words="it is empty: is a variable of the shell not set")
    assert "see zckpt inspect --help" in refused(2, f"inspect {SOURCE} --tag", words="requires an argument")


def test_the_help_for_a_format_has_what_that_format_takes_in_its_own_words():
    for flag in ("--help", "--help-all"):
        general, dcp, megatron = (
            " ".join(succeeded(f"convert {to} {flag}").stdout.split()).replace("- ", "-")
            for to in ("", "--to dcp", "--to=Megatron")
        )
        assert (
            "--world-size N Depends on the format: see --to FORMAT --help. (zckpt, fsdp-rank-files, "
            "deepspeed," in general
        )
        assert "--world-size N Number of files; any number of ranks can load them. Default: 1. --" in dcp
        assert "--world-size N Number of files; any parallelism can load them. Default: 1. --" in megatron
        assert ("--keys" in dcp, "--keys" in megatron) == (True, False)
        assert ("--iteration" in dcp, "--iteration" in megatron) == (False, True)
    assert succeeded("convert --to nothing --help").stdout == succeeded("convert --help").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("reshard", "Missing SOURCE, TARGET and --world-size"),
        ("convert x", "Missing TARGET and --to"),
        ("prune", "Missing RUN and --keep-last"),
        ("reshard x y", "Missing option '--world-size'"),
        ("diff", "Missing argument 'A B'"),
    ],
)
def test_all_that_is_missing_is_named_at_once(words, said):
    assert refused(2, words).startswith(f"zckpt: {said}")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_a_shell(shell):
    assert "_ZCKPT_COMPLETE" in succeeded(f"completion {shell}").stdout


def test_values_that_people_say_otherwise():
    for dtype in ("bf16", "BFloat16", "bfloat16"):
        succeeded(f"consolidate {SOURCE} {dtype}.safetensors --dtype {dtype}")
    assert len({*contents().values()}) == 1
    succeeded(f"convert {SOURCE} dcp --to DCP")
    for word, said in {"dpc": "Did you mean dcp?", "hf": "for the model alone, use zckpt consolidate"}.items():
        assert refused(2, f"convert {SOURCE} out --to {word}", words=said).endswith("see zckpt convert --help\n")


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        ("inspect /nowhere", "source", 3),
        (f"convert {SOURCE} x", "usage", 2),
        (f"consolidate {SOURCE} fixtures/README.md", "usage", 2),
        ("inspect fixtures/README.md", "unknown-format", 3),
        (f"convert {SOURCE} fixtures/s2_bf16_dp3 --to dcp", "target-exists", 4),
    ],
)
def test_an_error_is_a_document_with_json(arguments, code, status):
    done = run(arguments, "--json")
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["exit_status"], done.returncode) == (code, status, status)
    assert error["message"] in done.stderr
    refused(status, arguments)


def test_the_page_of_errors_has_every_error():
    assert (ROOT / "docs/errors.md").read_text() == page()
    for name in zckpt.__all__:
        if name.endswith("Error") and name != "ZckptError":
            assert f"| `{getattr(zckpt, name).kind()}` | `{name}` |" in page()


@pytest.mark.parametrize(
    ("verb", "options"),
    [("consolidate", ""), ("reshard", "--world-size 3"), ("convert", "--to dcp"), ("strip", "--optimizer")],
)
def test_arguments_that_are_swapped_are_told(verb, options):
    said = refused(3, f"{verb} out {SOURCE} {options}")
    assert said.endswith(f"; SOURCE comes first: zckpt {verb} {ROOT / SOURCE} out ...\n")
