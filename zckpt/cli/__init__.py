"""The command line: parse, call an operation, print. No logic.

Exit status: 0 done, 2 unusable arguments, 3 the source cannot be read or is damaged or unsafe, 4 the target
cannot be written, 130 interrupted.
"""

from __future__ import annotations

import sys

import click

from zckpt import __version__
from zckpt.cli.consolidate_command import consolidate_command
from zckpt.cli.inspect_command import inspect_command
from zckpt.errors import ZckptError

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zckpt")
@click.option("--debug", is_flag=True, help="Show a traceback for errors.")
def cli(debug: bool) -> None:
    """Open, inspect and consolidate the checkpoints of sharded optimizers.

    No pickle is ever executed, and a target appears whole or not at all.
    """


cli.add_command(inspect_command)
cli.add_command(consolidate_command)


def main() -> None:
    """Run the command line; an error is one line on standard error and an exit status."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        status = cli.main(["--debug"] * debug + [a for a in arguments if a != "--debug"], standalone_mode=False)
    except click.exceptions.Exit as error:
        status = error.exit_code
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("zckpt: interrupted; nothing was left behind", err=True)
        status = INTERRUPTED
    except ZckptError as error:
        if debug:
            raise
        click.echo(f"zckpt: {error}", err=True)
        status = error.exit_status
    except BrokenPipeError:
        sys.stderr.close()
        status = 0
    sys.exit(status if isinstance(status, int) else 0)
