"""The command line: parse, call an operation, print. No logic.

Exit status: 0 done, 1 different (`diff`), unsound (`verify`) or dangerous (`scan`), 2 unusable arguments, 3 the source
cannot be read or is damaged or unsafe, 4 the target cannot be written, 5 the source is intact but not supported, 6
processes that were to do the work are lost, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import click

from zckpt import __version__
from zckpt.cli import reading, writing
from zckpt.cli.streams import CannotPrintError, json_text, standard_streams
from zckpt.cli.verbs import Verbs
from zckpt.errors import Interrupted, SourceError, TargetError, UsageError, ZckptError, shown
from zckpt.executors.launch import launched

SIGNALLED = 128
"""Exit status of what a signal ended, less the signal, as shells have it."""

SIGNALS = {int(signal.SIGINT): "interrupted", int(signal.SIGTERM): "terminated"}

LATER_SECONDS = 0.002

COLLECTED_AFTER = (50_000, 20, 100)
"""New objects, and turns, after which Python looks for garbage: a command makes millions of objects and few cycles."""

SHORT_OF_MEMORY = ("failed to map segment", "annot allocate memory", "can't start new thread")
"""What the system's loader, and Python, say where a library or a thread finds no memory."""

HELP = {"help_option_names": ["-h", "--help"]}


@click.group(cls=Verbs, context_settings=HELP)
@click.version_option(__version__, "--version", "-V", prog_name="zckpt")
@click.option("--debug", is_flag=True, help="Show a traceback for errors.")
def cli(debug: bool) -> None:
    """Inspect, consolidate, reshard, convert, strip, compare and verify the checkpoints of sharded optimizers.

    No pickle is ever executed, and a target appears whole or not at all.
    """


for room in (reading, writing):
    for command in vars(room).values():
        if isinstance(command, click.Command):
            command.context_settings.update(HELP)  # click keeps the help option of the first call, which may be alone
            cli.add_command(command)


def main() -> None:
    """Run the command line; an error is one line on standard error and an exit status."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads for algebra that nobody does here
    gc.set_threshold(*COLLECTED_AFTER)
    atexit.register(gc.freeze)  # Python would look for garbage among all objects before it ends
    standard_streams()
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    failed = partial(_failed, debug=debug, as_json="--json" in arguments)
    named, ZckptError.names_flags = ZckptError.names_flags, True
    try:
        with _ending_in_order(), _telling(arguments), launched(arguments) as has_worked:
            words = ["--debug"] * debug + [a for a in arguments if a != "--debug"]
            status: int | None = 0
            if not has_worked and "_ZCKPT_COMPLETE" in os.environ:
                cli.main(words, "zckpt")
            if not has_worked:  # as `cli.main`, which prints an empty line where it is interrupted
                with cli.make_context("zckpt", words) as context:
                    status = cli.invoke(context)
            sys.stdout.flush()
    except click.exceptions.Exit as error:
        status = error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = error.exit_code
    except (click.ClickException, ZckptError) as error:
        status = failed(error)
    except KeyboardInterrupt as error:
        interrupt = error if isinstance(error, Interrupted) else Interrupted()
        click.echo(f"zckpt: {SIGNALS[interrupt.signal]}; {shown(interrupt.said)}", err=True)
        status = SIGNALLED + interrupt.signal
    except CannotPrintError as error:
        click.echo(f"zckpt: cannot print: {error}", err=True)
        status = TargetError.exit_status
    except OSError as error:  # of a file that was there a moment ago, or that the system refuses
        status = failed(SourceError("cannot be used", path=error.filename, found=error.strerror))
    except (MemoryError, ImportError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in SHORT_OF_MEMORY):
            raise
        advice = "raise the limit of memory (`ulimit -v`) or of threads (`ulimit -u`), or give a smaller --memory"
        status = failed(UsageError("not enough memory", found=str(error) or None, advice=advice))
    finally:
        ZckptError.names_flags = named
    sys.exit(status if isinstance(status, int) else 0)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Let Ctrl-C, and SIGTERM as well, end what is done: a scheduler that ends a job waits some seconds.

    What is imported may let an exception pass, or print it: it is raised when all is imported, or when it comes again.
    """
    came: list[int] = []

    def ended(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (number == signal.SIGALRM or not came) and _is_importing(frame):
            came.append(number)
            signal.signal(signal.SIGALRM, ended)
            signal.setitimer(signal.ITIMER_REAL, LATER_SECONDS)
            return
        Interrupted.came = True
        raise Interrupted(signal=came[0] if came else number)

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGALRM: None}
    before = {one: signal.getsignal(one) for one in usual}
    with suppress(ValueError):  # in a thread, which gets no signals
        for one, handler in before.items():
            if handler == usual[one]:
                signal.signal(one, ended)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if came:  # and all was done before it could be raised
            signal.setitimer(signal.ITIMER_REAL, 0)
        Interrupted.came = False
        for one, handler in before.items():
            if signal.getsignal(one) is ended:
                signal.signal(one, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _telling(arguments: Sequence[str]) -> Iterator[None]:
    """Let a warning be a line as an error is; under `--quiet`, none."""
    before = warnings.showwarning
    is_quiet = not {"-q", "--quiet"}.isdisjoint(arguments)
    warnings.showwarning = lambda message, *_: (
        None if is_quiet else click.echo(f"zckpt: {shown(str(message))}", err=True)
    )
    try:
        yield
    finally:
        warnings.showwarning = before


def _failed(error: click.ClickException | ZckptError, *, debug: bool, as_json: bool) -> int:
    if debug:
        import traceback

        click.echo(shown(traceback.format_exc()), err=True)
    if isinstance(error, click.ClickException):
        verb = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else "zckpt"
        message = shown(" ".join(error.format_message().split()).rstrip("."))
        error = UsageError(message, advice=f"see {verb} --help")
    click.echo(f"zckpt: {error}", err=True)
    if as_json:
        with suppress(CannotPrintError):
            click.echo(json_text({"error": error.as_dict()}))
    return error.exit_status
