"""`rookery exec`: run one command in a sandbox.

- Output is passed through unchanged as it arrives. A slow reader slows the command down; memory stays bounded.
- On a terminal, control characters are escaped unless --raw-output is set, so that a program cannot control the
  terminal.
- The exit code is the command's. 124: time limit, 137: memory limit, 125: Rookery failed, with a message.
- A provider that does not isolate is used only if --provider names it or with --unsafe, and a warning is printed.
- When this process ends, for whatever reason, the sandbox and its processes are removed.

Exit codes: the command's own, or 128 + n if signal n killed it; 124 for the time limit; 137 for the memory limit;
for another limit the command's code or 1; 125 for a failure of Rookery (usage, no isolation on this machine, lost
sandbox); 130 after Ctrl-C (129 and 143 for SIGHUP and SIGTERM).
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from rookery.cli.errors import print_error
from rookery.cli.options import NETWORKS, UNSAFE, Number, Size, option

if TYPE_CHECKING:
    from rookery.cli.sandbox_command import SandboxCommand
    from rookery.core import ExecResult, SandboxSpec

EXIT_ROOKERY: Final = 125
EXIT_TIME_LIMIT: Final = 124
EXIT_MEMORY_LIMIT: Final = 137

_HELP = """Run one command in a sandbox. Standard input, output and error are passed through.

\b
  rookery exec -- python3 -c 'print(6 * 7)'
  rookery exec --upload main.py --memory 128M --wall 6 -- python3 main.py
  rookery exec --upload program --json -- ./program --its-own-options

The exit code is that of the command; 124 if it exceeded the time limit, 137 for the memory limit,
and 125 if Rookery itself failed. Sizes are in bytes or have a unit: 512K, 128M, 1G.
"""


class _Exec(click.Command):
    """A click command that exits with 125 for usage errors, because other codes belong to the executed command."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*args, **more)
        except click.UsageError as error:
            from rookery.cli.errors import format_usage_error

            print_error(format_usage_error(error))
            raise click.exceptions.Exit(EXIT_ROOKERY) from error


@click.command(
    name="exec",
    cls=_Exec,
    help=_HELP,
    short_help="Run one command in a sandbox.",
    context_settings={"allow_interspersed_args": False},
)
@option(
    "--provider",
    metavar="P",
    envvar="ROOKERY_SANDBOX",
    default="",
    help="Sandbox provider; see `rookery doctor`.  [default: the best that isolates]",
)
@option(
    "--image", metavar="I", envvar="ROOKERY_IMAGE", help="Image of the sandbox.  [default: this system's files]"
)
@option(
    "--memory", type=Size(1 << 20), default="1G", help="Memory limit of all processes of the sandbox together."
)
@option("--pids", type=Number(int, 2), default=256, help="Maximum number of processes and threads.")
@option("--cpus", metavar="N", type=Number(float, 0.01), help="Number of CPUs to use.  [default: all]")
@option("--wall", metavar="S", type=Number(float, 0, above=True), default=60, help="Time limit in seconds.")
@option("--disk", type=Size(1 << 16), default="1G", help="Limit on written data.")
@option(
    "--output",
    type=Size(),
    default="1M",
    help="Maximum bytes of stdout and of stderr in the --json result. A command that writes 64 times as much is "
    "killed.",
)
@option(
    "--network",
    metavar="N",
    type=click.Choice(NETWORKS),
    envvar="ROOKERY_NETWORK",
    help="Network access.  [default: none]",
)
@option("--allow", metavar="HOST", multiple=True, help="Host that the command may reach. Repeatable.")
@option(
    "--upload",
    "uploads",
    metavar="PATH[:TARGET]",
    multiple=True,
    help="Copy a file or directory into the sandbox. Repeatable.",
)
@option("--unsafe", is_flag=True, envvar="ROOKERY_UNSAFE", help=UNSAFE)
@option("--raw-output", is_flag=True, help="Do not escape control characters on a terminal.")
@option("--json", is_flag=True, help="Print the result as one JSON object instead of the output.")
@click.argument("argv", metavar="-- ARGV…", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(
    json: bool, unsafe: bool, raw_output: bool, uploads: tuple[str, ...], argv: tuple[str, ...], **asked: Any
) -> int:
    from rookery.cli.sandbox_command import SandboxCommand, parse_upload
    from rookery.core import RookeryError, SandboxError

    _reopen_closed_streams()
    spec = _build_spec(unsafe, **asked)
    try:
        job = SandboxCommand(
            argv=argv, uploads=tuple(map(parse_upload, uploads)), copy_output=not json, raw=raw_output
        )
        result, spec, isolated = _run_with_fallback(spec, job)
        if result.status == "lost":
            raise SandboxError(f"the sandbox was lost: {result.detail or 'no detail'}")
    except RookeryError as error:
        if json:
            _print_json({"status": "error", "exit_code": None, "detail": str(error), "provider": spec.provider})
        print_error(str(error))
        return EXIT_ROOKERY
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        print_error(f"the sandbox could not be used: {error}")
        return EXIT_ROOKERY
    if json:
        _print_json(_to_json(result, spec.provider, isolated=isolated))
    elif result.detail:
        print_error(result.detail)
    return get_exit_code(result)


def _reopen_closed_streams() -> None:
    """Open /dev/null for standard streams that are closed, so that no file opened later gets their descriptors."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def get_exit_code(result: "ExecResult") -> int:
    """Return the exit code of `rookery exec` for the result of its command."""
    match result.status:
        case "exited":
            return result.exit_code or 0
        case "signaled":
            return 128 + (result.signal or 0)
        case "time_limit":
            return EXIT_TIME_LIMIT
        case "memory_limit":
            return EXIT_MEMORY_LIMIT
        case "lost":
            return EXIT_ROOKERY
        case _:
            return result.exit_code or 1


def _build_spec(unsafe: bool, **asked: Any) -> "SandboxSpec":
    from rookery.core import SandboxSpec

    asked["network"] = asked["network"] or ("allow" if asked["allow"] else "none")
    return SandboxSpec(**asked, untrusted_ok=unsafe)


def _run_with_fallback(spec: "SandboxSpec", job: "SandboxCommand") -> "tuple[ExecResult, SandboxSpec, bool]":
    """Run the command; return its result, `spec` with the chosen provider, and whether that provider isolates.

    If `spec` names no provider, the preferred one is tried first without checking it, which is faster.
    """
    from msgspec.structs import replace

    from rookery.core import SandboxError
    from rookery.sandboxes import PREFERRED_PROVIDER, is_isolated, resolve_spec

    first: SandboxError | None = None
    if not spec.provider and is_isolated(PREFERRED_PROVIDER):
        # Checking whether the preferred provider works takes as long as using it.
        quick = replace(spec, provider=PREFERRED_PROVIDER)
        try:
            return _run(quick, job), quick, True
        except SandboxError as error:
            if error.code not in ("sandbox.create", "sandbox.refused", "task.image"):
                raise
            first = error
    spec, problem = resolve_spec(spec)
    if problem:
        if first is not None and first.code == "task.image":
            raise first
        raise SandboxError(problem, cause="sandbox.refused")
    if first is not None and spec.provider == PREFERRED_PROVIDER:
        raise first
    isolated = is_isolated(spec.provider)
    if not isolated:
        say = (
            f"{spec.provider} sandboxes do not isolate: the command runs as your user, with your files and network"
        )
        click.echo(f"{click.style('warning: ', fg='yellow', bold=True)}{say}", err=True)
    return _run(spec, job), spec, isolated


def _run(spec: "SandboxSpec", job: "SandboxCommand") -> "ExecResult":
    import asyncio
    import signal

    from rookery.cli.sandbox_command import run_command

    async def main() -> "ExecResult":
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(run_command(spec, job))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, _make_signal_handler(number, task, got))
        try:
            return await task
        except asyncio.CancelledError:
            if got:
                raise click.exceptions.Exit(128 + got[0]) from None
            raise

    got: list[int] = []
    with asyncio.Runner() as runner:
        return runner.run(main())


def _make_signal_handler(number: int, task: Any, got: list[int]) -> Callable[[], None]:
    def on_signal() -> None:
        if got:  # the kernel kills the keeper and its sandboxes with us
            os._exit(128 + number)
        got.append(number)
        task.cancel()

    return on_signal


def _to_json(result: "ExecResult", provider: str, *, isolated: bool) -> dict[str, Any]:
    usage = result.usage
    return {
        "status": result.status,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": result.stdout.decode("utf-8", "replace"),
        "stderr": result.stderr.decode("utf-8", "replace"),
        "dropped": {"stdout": result.stdout_dropped, "stderr": result.stderr_dropped},
        "usage": {"wall": usage.wall, "cpu": usage.cpu, "peak_memory": usage.peak_memory},
        "detail": result.detail,
        "provider": provider,
        "isolated": isolated,
    }


def _print_json(plain: dict[str, Any]) -> None:
    """Print a JSON object in ASCII, because some programs treat the character U+2028 as a line end."""
    from json import dumps

    click.echo(dumps(plain))
    sys.stdout.flush()
