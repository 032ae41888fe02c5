"""What README.md and docs/ say of names, options and commands is so; what they show is run."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import zckpt
from tests.cli.console import ROOT, succeeded
from tests.folders import names_in
from tests.gloo import forked
from zckpt.cli import cli

README = (ROOT / "README.md").read_text()
VERBS, PYTHON = ((ROOT / "docs" / name).read_text() for name in ("verbs.md", "python.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PREPARED = """
import torch
import torch.distributed as dist
import zckpt


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20)

    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.wte(ids)), ids)


torch.manual_seed(0)
model, data, steps = Model(), [torch.arange(10)] * 2, 2
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def options(name: str) -> set[str]:
    command = cli.commands[name]
    parameters = command.get_params(click.Context(command, **command.context_settings))  # those that formats state, too
    every = {one for parameter in parameters for one in (*parameter.opts, *parameter.secondary_opts)}
    return {one for one in every if one[0] == "-"} - {"--help", "-h", "--help-all"}


def mentioned(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def paragraph(beginning: str) -> str:
    [found] = [one for one in VERBS.split("\n\n") if one.startswith(beginning)]
    return " ".join(found.split())


def names_used(tree: ast.AST) -> Iterator[tuple[object, ast.AST]]:
    """Everything of zckpt that a tree names, with the node that does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("zckpt."):
            value: object = zckpt
            for part in ast.unparse(node).split(".")[1:]:
                if not part.isidentifier():
                    break
                value = getattr(value, part)
            yield value, node


# --- what is said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_docs_uses_names_and_keywords_that_are_there(page):
    for block in blocks(page.read_text(), "python"):
        tree = ast.parse(block)
        list(names_used(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and re.fullmatch(r"zckpt(\.\w+)+", ast.unparse(node.func)):
                [called, *_] = [value for value, one in names_used(node.func) if one is node.func]
                known = inspect.signature(called).parameters  # type: ignore[arg-type]
                variable = any(one.kind is one.VAR_KEYWORD for one in known.values())
                assert variable or {one.arg for one in node.keywords} <= known.keys(), ast.unparse(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_have_options_that_are_there(page):
    for block in blocks(page.read_text(), "sh"):
        for line in block.replace("\n    ", " ").splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["zckpt"]:
                assert mentioned(" ".join(words)) <= options(words[1]), line
    for line in re.findall(r"`(zckpt [a-z-]+ [^`\n]*)`", page.read_text()):
        if line.split()[1] in cli.commands:
            assert mentioned(line) - {"--help", "--help-all"} <= options(line.split()[1]), line


def test_every_verb_is_on_its_page_and_has_the_options_that_are_said_to_be_common():
    verbs = {re.match(r"zckpt ([\w-]+)", line)[1] for block in blocks(VERBS, "sh") for line in block.splitlines()
             if line.startswith("zckpt ")}  # type: ignore[index]  # fmt: skip
    assert verbs == set(cli.commands)
    said = paragraph("Every verb: `--json`")
    assert all("--json" in options(name) for name in cli.commands)
    opens = [name for name in cli.commands if any(p.name in ("source", "sources") for p in cli.commands[name].params)]
    where = {"--tag", "--root", "--names", "--tp-rules"}
    assert all(where <= options(name) for name in opens)
    of_files = {"pack", "unpack", "patch", "apply"}  # which copy no elements into another form
    writes = [name for name in cli.commands if "--dry-run" in options(name) and name not in of_files]
    common = set.intersection(*(options(name) for name in writes)) - where - {"--json", "-q"}
    assert mentioned(said.split("Those that write also have")[1].split(";")[0]) == common


def test_what_the_page_on_security_promises_is_tested():
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/security.md").read_text())
    assert len(found) > 25
    for file, name in found:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), (file, name)


# --- what is shown


def train(directory: Path) -> Path:
    tools, _, training = blocks(PYTHON, "python")
    assert "ZeroOptimizer(" in training
    assert 'zckpt.open("run/global_step500")' in tools
    forked(run_in, directory, PREPARED + training + tools)
    return directory


def run_in(directory: Path, program: str) -> None:
    os.chdir(directory)
    exec(program, {"__name__": "__main__"})


@pytest.fixture
def trained(shared) -> Path:
    """A directory in which the training of docs/python.md, and then its tools, have run."""
    return shared("docs", train)


def test_training_and_tools_in_python_run(trained):
    assert zckpt.diff(trained / "run/global_step500", trained / "run6/global_step500").equal
    assert (trained / "model.safetensors").is_file()


def test_the_readmes_commands_run(trained, tmp_path, monkeypatch):
    (tmp_path / "run").symlink_to(trained / "run")
    monkeypatch.chdir(tmp_path)
    [block] = [one for one in blocks(README, "sh") if "zckpt inspect run/" in one]
    for line in block.splitlines():
        succeeded(shlex.split(line, comments=True)[1:])
    assert {"model.safetensors", "whole.safetensors", "whole.optimizer.safetensors", "run6", "dcp"} <= {*names_in()}
