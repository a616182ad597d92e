"""How a command ends: exit codes, and one sentence for what went wrong.

Promises:
- what is wrong with the usage is one sentence on stderr and exit code 2, never a traceback;
- a fault in the user's own file is named with its file and line;
- our own bug shows its traceback, asks to be reported, and exits with 1;
- a reader that went away (`rookery show | head`) is not an error worth words.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TextIO

import click

DEBUG = "ROOKERY_DEBUG"
"""Set to anything: tracebacks of usage errors too, for those who write environments."""


class Exit(IntEnum):
    """What a command's exit code says."""

    OK = 0
    BUG = 1
    USAGE = 2
    FAILED = 3
    STOPPED = 4
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM
    CLOSED_PIPE = 128 + signal.SIGPIPE


def guarded(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. Whatever it raises becomes a message and the right code."""
    try:
        return _exit_code(command)
    finally:
        for stream in (sys.stdout, sys.stderr):
            discard_if_closed(stream)


def _exit_code(command: Callable[[], int]) -> int:
    try:
        return command()
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        say_error(usage_text(error))
        return Exit.USAGE
    except click.ClickException as error:
        say_error(error.format_message())
        return Exit.USAGE
    except (click.Abort, KeyboardInterrupt):
        say_error("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        return Exit.CLOSED_PIPE
    except Exception as error:  # noqa: BLE001  (the last seam: words for the user, or our own bug)
        return _ended_by(error)


def _ended_by(error: Exception) -> int:
    from rookery.core import RookeryError

    if isinstance(error, RookeryError):
        say_error(in_words(error))
        return Exit.USAGE
    traceback.print_exception(error)
    say_error("this is a bug in Rookery: please report it, with the lines above and what you ran")
    return Exit.BUG


def in_words(error: BaseException) -> str:
    """The error's own sentence, with the place in the user's file where one raised."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    text = str(error)
    place = _place(error.__cause__)
    return f"{text} ({place})" if place and place not in text else text


def _place(error: BaseException | None) -> str:
    """The last line of the user's own files that an exception passed through."""
    if error is None or isinstance(error, SyntaxError):  # a syntax error names its line itself
        return ""
    skipped = ("<", str(Path(__file__).resolve().parent.parent), str(Path(os.__file__).parent))
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(skipped) and "site-packages" not in frame.filename:
            found = f"{Path(frame.filename).name}, line {frame.lineno}"
    return found


def usage_text(error: click.UsageError) -> str:
    text = error.format_message().rstrip(".")
    if isinstance(error, click.BadParameter) and (name := _variable(error)):
        text = f"${name}: {error.message.rstrip('.')}"
    command = error.ctx.command_path if error.ctx is not None else "rookery"
    joint = "" if text.endswith("?") else ";"
    text = text if text.startswith("$") else f"{text[:1].lower()}{text[1:]}"
    return f"{text}{joint} see `{command} --help`"


def _variable(error: click.BadParameter) -> str:
    """The environment variable that a bad value came from."""
    from click.core import ParameterSource

    param, ctx = error.param, error.ctx
    if param is None or ctx is None or param.name is None:
        return ""
    return str(param.envvar) if ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT else ""


def say_error(text: str) -> None:
    from rookery.cli.text import clean

    try:
        click.echo(click.style("error: ", fg="red", bold=True) + clean(text), err=True)
    except OSError:
        return  # nobody reads our errors either; the exit code still says it


def discard_if_closed(stream: TextIO | None) -> None:
    """Redirect a stream to /dev/null if nobody reads it any more. A stream that was closed at the start is None.

    The interpreter flushes stdout and stderr when it exits. If that fails, the exit code becomes 120.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
