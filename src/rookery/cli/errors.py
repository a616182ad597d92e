"""Exit codes and error messages of the commands.

Guarantees:
- a usage error is one sentence on stderr and exit code 2, never a traceback;
- an exception in a file of the user is reported with the file and the line;
- an internal error prints its traceback, asks for a report, and exits with 1;
- a closed pipe (`rookery show | head`) prints no error.
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
"""Environment variable. If it is set, usage errors print tracebacks too, which helps authors of environments."""


class Exit(IntEnum):
    """Exit codes of the commands."""

    OK = 0
    BUG = 1
    USAGE = 2
    FAILED = 3
    STOPPED = 4
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM
    CLOSED_PIPE = 128 + signal.SIGPIPE


def run_with_exit_code(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. An exception is printed as a message and gives an exit code too."""
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
        print_error(format_usage_error(error))
        return Exit.USAGE
    except click.ClickException as error:
        print_error(error.format_message())
        return Exit.USAGE
    except (click.Abort, KeyboardInterrupt):
        print_error("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        return Exit.CLOSED_PIPE
    except Exception as error:  # noqa: BLE001  (last boundary: a message for the user, or an internal error)
        return _report_exception(error)


def _report_exception(error: Exception) -> int:
    from rookery.core import RookeryError

    if isinstance(error, RookeryError):
        print_error(describe_error(error))
        return Exit.USAGE
    traceback.print_exception(error)
    print_error("this is a bug in Rookery: please report it, with the lines above and what you ran")
    return Exit.BUG


def describe_error(error: BaseException) -> str:
    """Return the message of an error and, if it was caused by a file of the user, the file and line."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    text = str(error)
    location = _find_user_frame(error.__cause__)
    return f"{text} ({location})" if location and location not in text else text


def _find_user_frame(error: BaseException | None) -> str:
    """Return file and line of the innermost frame that is in a file of the user, or an empty string."""
    if error is None or isinstance(error, SyntaxError):  # a syntax error contains its line
        return ""
    skipped = ("<", str(Path(__file__).resolve().parent.parent), str(Path(os.__file__).parent))
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(skipped) and "site-packages" not in frame.filename:
            found = f"{Path(frame.filename).name}, line {frame.lineno}"
    return found


def format_usage_error(error: click.UsageError) -> str:
    text = error.format_message().rstrip(".")
    if isinstance(error, click.BadParameter) and (name := _find_variable(error)):
        text = f"${name}: {error.message.rstrip('.')}"
    command = error.ctx.command_path if error.ctx is not None else "rookery"
    joint = "" if text.endswith("?") else ";"
    text = text if text.startswith("$") else f"{text[:1].lower()}{text[1:]}"
    return f"{text}{joint} see `{command} --help`"


def _find_variable(error: click.BadParameter) -> str:
    """Return the environment variable that an invalid value came from, or an empty string."""
    from click.core import ParameterSource

    param, ctx = error.param, error.ctx
    if param is None or ctx is None or param.name is None:
        return ""
    return str(param.envvar) if ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT else ""


def print_error(text: str) -> None:
    from rookery.cli.terminal import escape_controls

    try:
        click.echo(click.style("error: ", fg="red", bold=True) + escape_controls(text), err=True)
    except OSError:
        return  # stderr is closed; the exit code still reports the failure


def discard_if_closed(stream: TextIO | None) -> None:
    """Redirect an output stream to /dev/null if the reader of its pipe is gone.

    Otherwise the flush at the exit of the interpreter would fail and change the exit code to 120. `stream` is None
    if it was closed when this process started.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
