"""What IPython shows of a checkpoint: IPython itself runs, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.console import FIXTURES

SHOWN = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell({first!r}).raise_error()
shell.run_cell("checkpoint = zckpt.open({source!r})").raise_error()
formats, _ = shell.display_formatter.format(shell.user_ns["checkpoint"])
print(formats["text/plain"])
print(formats.get("text/html"))
assert "text/html" not in shell.display_formatter.format(shell.user_ns["checkpoint"].parameters)[0]
"""


@pytest.mark.parametrize("first", ["import zckpt", "%load_ext zckpt.notebook\nimport zckpt"])
def test_a_checkpoint_is_a_picture(first):
    code = SHOWN.format(first=first, source=str(FIXTURES / "s3_bf16_dp3"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<OpenedCheckpoint ")
    assert "<svg " in done.stdout
    assert "ZeRO stage 3, dp=3" in done.stdout.split("<svg ")[1]
    assert len(done.stdout) < 30_000


def test_without_ipython_nothing_of_it_is_loaded():
    code = "import sys, zckpt; sys.exit('zckpt.notebook' in sys.modules or 'IPython' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
