"""The command line: parse, call an operation, print. No logic.

Exit status: 0 done, 1 different (`diff`) or unsound (`verify`), 2 unusable arguments, 3 the source cannot be read or is
damaged or unsafe, 4 the target cannot be written, 5 the source is intact but not supported, 6 processes that were to do
the work are lost, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from zckpt import __version__
from zckpt.cli.computing import average_command, merge_adapter_command
from zckpt.cli.reading import (
    diff_command,
    fingerprint_command,
    formats_command,
    inspect_command,
    map_command,
    verify_command,
)
from zckpt.cli.streams import CannotPrintError, standard_streams
from zckpt.cli.writing import consolidate_command, convert_command, reshard_command, strip_command
from zckpt.errors import Interrupted, SourceError, TargetError, UsageError, ZckptError
from zckpt.executors.launch import launched

SIGNALLED = 128
"""Exit status of what a signal ended, less the signal, as shells have it."""

SIGNALS = {int(signal.SIGINT): "interrupted", int(signal.SIGTERM): "terminated"}

COLLECTED_AFTER = (50_000, 20, 100)
"""New objects, and turns, after which Python looks for garbage: a command makes millions of objects and few cycles."""

SHORT_OF_MEMORY = ("failed to map segment", "annot allocate memory", "can't start new thread")
"""What the system's loader, and Python, say where a library or a thread finds no memory."""

HELP = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=HELP)
@click.version_option(__version__, prog_name="zckpt")
@click.option("--debug", is_flag=True, help="Show a traceback for errors.")
def cli(debug: bool) -> None:
    """Inspect, consolidate, reshard, convert, strip, compare and verify the checkpoints of sharded optimizers.

    No pickle is ever executed, and a target appears whole or not at all.
    """


for command in (inspect_command, consolidate_command, reshard_command, convert_command, strip_command, average_command,
                merge_adapter_command, diff_command, fingerprint_command, verify_command, map_command,
                formats_command):  # fmt: skip
    command.context_settings.update(HELP)  # click keeps the help option of the first call, which may be without a group
    cli.add_command(command)


def main() -> None:
    """Run the command line; an error is one line on standard error and an exit status."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads for algebra that nobody does here
    gc.set_threshold(*COLLECTED_AFTER)
    atexit.register(gc.freeze)  # Python would look for garbage among all objects before it ends
    standard_streams()
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        with _ending_in_order(), launched(arguments) as has_worked:
            words = ["--debug"] * debug + [a for a in arguments if a != "--debug"]
            status = 0 if has_worked else cli.main(words, standalone_mode=False)
            sys.stdout.flush()
    except click.exceptions.Exit as error:
        status = error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = error.exit_code
    except (click.ClickException, ZckptError) as error:
        status = _failed(error, debug=debug)
    except (click.Abort, KeyboardInterrupt) as error:
        found = error if isinstance(error, KeyboardInterrupt) else error.__cause__
        interrupt = found if isinstance(found, Interrupted) else Interrupted()
        click.echo(f"zckpt: {SIGNALS[interrupt.signal]}; {interrupt.said}", err=True)
        status = SIGNALLED + interrupt.signal
    except CannotPrintError as error:
        click.echo(f"zckpt: cannot print: {error}", err=True)
        status = TargetError.exit_status
    except OSError as error:  # of a file that was there a moment ago, or that the system refuses
        status = _failed(SourceError("cannot be used", path=error.filename, found=error.strerror), debug=debug)
    except (MemoryError, ImportError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in SHORT_OF_MEMORY):
            raise
        advice = "raise the limit of memory (`ulimit -v`) or of threads (`ulimit -u`), or give a smaller --memory"
        status = _failed(UsageError("not enough memory", found=str(error) or None, advice=advice), debug=debug)
    sys.exit(status if isinstance(status, int) else 0)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Let SIGTERM be as Ctrl-C: a scheduler that ends a job waits some seconds. Another one ends it at once."""
    before = signal.getsignal(signal.SIGTERM)
    if before == signal.SIG_DFL:
        with suppress(ValueError):  # in a thread, which gets no signals
            signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _terminated:
            signal.signal(signal.SIGTERM, before)


def _terminated(number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Interrupted(signal=number)


def _failed(error: click.ClickException | ZckptError, *, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    if isinstance(error, ZckptError):
        click.echo(f"zckpt: {error}", err=True)
        return error.exit_status
    click.echo(f"zckpt: {' '.join(error.format_message().split()).rstrip('.')}; see zckpt --help", err=True)
    return error.exit_code
