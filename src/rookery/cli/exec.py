"""`rookery exec`: run one command in a sandbox.

- Output passes through as it comes, byte for byte. A slow reader slows the command and fills no memory.
- On a terminal, control characters are written out unless --raw-output is given: a program cannot control it.
- The exit code is the command's. 124: time limit, 137: memory limit, 125: Rookery failed and said why.
- A provider that does not isolate is used only if it is named, or consented to with --unsafe, and says so.
- However this process ends, nothing of the command is left.

Exit codes in full: the command's own where it exited, 128 + n where signal n ended it, 124 for the time limit, 137
for the memory limit, for another limit the command's own code or else 1, 125 for all that is not the command's
(usage, a machine that cannot isolate, a lost sandbox), 130 after Ctrl-C (129, 143: SIGHUP, SIGTERM).
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from rookery.cli.errors import say_error
from rookery.cli.options import NETWORKS, UNSAFE, Number, Size

if TYPE_CHECKING:
    from rookery.cli.passing import Job
    from rookery.core import ExecResult, SandboxSpec

OURS: Final = 125
TIME: Final = 124
MEMORY: Final = 137

_HELP = """Runs one command in a sandbox and passes its output through. What is piped in is the command's input.

\b
  rookery exec -- python3 -c 'print(6 * 7)'
  rookery exec --upload main.py --memory 128M --wall 6 -- python3 main.py
  rookery exec --upload program --json -- ./program --its-own-options

The exit code is the command's. 124: the time limit, 137: the memory limit, 125: our own failure.
Sizes are bytes, or written with K, M, G: 512K, 128M, 1G.
"""


class _Exec(click.Command):
    """All codes but ours belong to the command: what is wrong with the usage is 125 too."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*args, **more)
        except click.UsageError as error:
            from rookery.cli.errors import usage_text

            say_error(usage_text(error))
            raise click.exceptions.Exit(OURS) from error


@click.command(
    name="exec",
    cls=_Exec,
    help=_HELP,
    short_help="Run one command in a sandbox.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--provider",
    metavar="P",
    envvar="ROOKERY_SANDBOX",
    default="",
    help="Who makes the sandbox; rookery doctor lists them.  [default: the best that isolates here]",
)
@click.option(
    "--image",
    metavar="I",
    envvar="ROOKERY_IMAGE",
    help="What the sandbox's files are made from.  [default: this system]",
)
@click.option(
    "--memory", metavar="SIZE", type=Size(1 << 20), default="1G", show_default=True, help="For all its processes."
)
@click.option(
    "--pids",
    metavar="N",
    type=Number(int, 2),
    default=256,
    show_default=True,
    help="Processes and threads at once.",
)
@click.option("--cpus", metavar="N", type=Number(float, 0.01), help="Processors' worth of time.  [default: all]")
@click.option(
    "--wall",
    metavar="S",
    type=Number(float, 0, above=True),
    default=60,
    show_default=True,
    help="Seconds it may take.",
)
@click.option(
    "--disk", metavar="SIZE", type=Size(1 << 16), default="1G", show_default=True, help="For all that it writes."
)
@click.option(
    "--output",
    metavar="SIZE",
    type=Size(),
    default="1M",
    show_default=True,
    help="Kept of stdout and of stderr with --json, head and tail; 64 times as much ends the command.",
)
@click.option(
    "--network",
    metavar="N",
    type=click.Choice(NETWORKS),
    envvar="ROOKERY_NETWORK",
    help="What it reaches: none, model, allow or all.  [default: none]",
)
@click.option("--allow", metavar="HOST", multiple=True, help="A host that it may reach; repeat it.")
@click.option(
    "--upload",
    "uploads",
    metavar="PATH[:TARGET]",
    multiple=True,
    help="Copy a file or folder into the sandbox, under its own name or as TARGET; repeat it.",
)
@click.option("--unsafe", is_flag=True, envvar="ROOKERY_UNSAFE", help=UNSAFE)
@click.option("--raw-output", is_flag=True, help="Pass control characters through to a terminal too.")
@click.option("--json", is_flag=True, help="Print how it ended as the last line of stdout, instead of its output.")
@click.argument("argv", metavar="-- ARGV…", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(
    json: bool, unsafe: bool, raw_output: bool, uploads: tuple[str, ...], argv: tuple[str, ...], **asked: Any
) -> int:
    from rookery.cli.passing import Job, upload_of
    from rookery.core import RookeryError, SandboxError

    _filled()
    spec = _spec(unsafe, **asked)
    try:
        job = Job(argv=argv, uploads=tuple(map(upload_of, uploads)), passing=not json, raw=raw_output)
        result, spec, isolated = _tried(spec, job)
        if result.status == "lost":
            raise SandboxError(f"the sandbox was lost: {result.detail or 'no detail'}")
    except RookeryError as error:
        if json:
            _say({"status": "error", "exit_code": None, "detail": str(error), "provider": spec.provider})
        say_error(str(error))
        return OURS
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        say_error(f"the sandbox could not be used: {error}")
        return OURS
    if json:
        _say(_plain(result, spec.provider, isolated=isolated))
    elif result.detail:
        say_error(result.detail)
    return exit_code(result)


def _filled() -> None:
    """A standard stream that was closed would be whatever is opened next: a program's input, of our own making."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def exit_code(result: "ExecResult") -> int:
    """What this process ends with, for how the command ended."""
    match result.status:
        case "exited":
            return result.exit_code or 0
        case "signaled":
            return 128 + (result.signal or 0)
        case "time_limit":
            return TIME
        case "memory_limit":
            return MEMORY
        case "lost":
            return OURS
        case _:
            return result.exit_code or 1


def _spec(unsafe: bool, **asked: Any) -> "SandboxSpec":
    from rookery.core import SandboxSpec

    asked["network"] = asked["network"] or ("allow" if asked["allow"] else "none")
    return SandboxSpec(**asked, untrusted_ok=unsafe)


def _tried(spec: "SandboxSpec", job: "Job") -> "tuple[ExecResult, SandboxSpec, bool]":
    """The result, with the provider that gave the sandbox and whether that isolates."""
    from msgspec.structs import replace

    from rookery.core import SandboxError
    from rookery.sandboxes import QUICKEST, is_isolated, settle

    first: SandboxError | None = None
    if not spec.provider and is_isolated(QUICKEST):
        # The best where it works, and asking whether it does takes as long as using it.
        quick = replace(spec, provider=QUICKEST)
        try:
            return _run(quick, job), quick, True
        except SandboxError as error:
            if error.code not in ("sandbox.create", "sandbox.refused", "task.image"):
                raise
            first = error
    spec, why_not = settle(spec)
    if why_not:
        if first is not None and first.code == "task.image":
            raise first
        raise SandboxError(why_not, cause="sandbox.refused")
    if first is not None and spec.provider == QUICKEST:
        raise first
    isolated = is_isolated(spec.provider)
    if not isolated:
        say = f"{spec.provider} sandboxes do not isolate: the command runs as you, on your files and network"
        click.echo(f"{click.style('warning: ', fg='yellow', bold=True)}{say}", err=True)
    return _run(spec, job), spec, isolated


def _run(spec: "SandboxSpec", job: "Job") -> "ExecResult":
    import asyncio
    import signal

    from rookery.cli.passing import command

    async def main() -> "ExecResult":
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(command(spec, job))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, _interrupted(number, task, got))
        try:
            return await task
        except asyncio.CancelledError:
            if got:
                raise click.exceptions.Exit(128 + got[0]) from None
            raise

    got: list[int] = []
    with asyncio.Runner() as runner:
        return runner.run(main())


def _interrupted(number: int, task: Any, got: list[int]) -> Callable[[], None]:
    def on_signal() -> None:
        if got:  # the keeper and its boxes die with us, through the kernel
            os._exit(128 + number)
        got.append(number)
        task.cancel()

    return on_signal


def _plain(result: "ExecResult", provider: str, *, isolated: bool) -> dict[str, Any]:
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


def _say(plain: dict[str, Any]) -> None:
    """As ASCII: some readers take U+2028 and its like for the end of a line."""
    from json import dumps

    click.echo(dumps(plain))
    sys.stdout.flush()
