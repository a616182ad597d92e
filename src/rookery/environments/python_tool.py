"""The tool `python`: run a program of the policy in the attempt's sandbox.

The first call creates the sandbox. The program's stdout and stderr are returned in the order in which they were
written, also if the program was killed. If the program fails, the policy is told how it ended. If the sandbox is
lost, `SandboxError` is raised.
"""

import asyncio
import signal

from rookery.core import ExecResult, SandboxError
from rookery.environments.context import Context
from rookery.environments.text import NO_OUTPUT, clip
from rookery.environments.tools import CallLimit, tool
from rookery.sandboxes.protocol import Command

GRACE = 30.0
"""Seconds that a sandbox gets to end a program after its time limit. After that the sandbox counts as lost."""
MAX_OUTPUT = 64 << 10
"""Maximum size of the returned output in bytes. The environment's `max_result` may shorten it further."""

# The program is read from stdin, which needs no file or quoting and has no size limit. stderr is redirected to
# stdout to preserve the order of writes. The loader lets tracebacks show the program's source lines; the hook
# removes the frame of this script. linecache takes a third of the interpreter's start-up time, so it is
# imported on error only.
_START = """\
import os, sys
os.dup2(1, 2)
sys.path.insert(0, "")
class _Loader:
    def __init__(self, source):
        self.source = source
    def get_source(self, name):
        return self.source
__loader__ = _Loader(sys.stdin.buffer.read().decode())
def _hook(kind, error, trace, source=__loader__.source):
    import linecache, traceback
    linecache.cache["program.py"] = (len(source), None, source.splitlines(True), "program.py")
    traceback.print_exception(kind, error, trace and trace.tb_next)
sys.excepthook = _hook
_code = compile(__loader__.source, "program.py", "exec")
del os, sys, _Loader, _hook
exec(globals().pop("_code"))
"""
_ARGV = ("python3", "-I", "-u", "-c", _START)


@tool(sandbox=True)
async def python(code: str, ctx: Context, limit: CallLimit) -> str:
    """Runs a Python program and returns what it printed. Files stay between calls; variables do not.

    Args:
        code: The whole program. Print what you want to see.
    """
    sandbox = await ctx.sandbox()
    # Creating the sandbox does not count against the program's limit.
    wall = max(0.001, min(limit, ctx.remaining))
    command = Command(argv=_ARGV, stdin=code.encode("utf-8", "replace"), wall=wall, warm=True)
    try:
        async with asyncio.timeout(wall + GRACE):
            result = await sandbox.exec(command)
    except TimeoutError as error:
        raise SandboxError(
            f"sandbox {sandbox.id} did not respond within {GRACE:g} s after the {wall:g} s limit of a program"
        ) from error
    if result.status == "lost":
        raise SandboxError(f"sandbox {sandbox.id} was lost while it ran a program: {result.detail or 'no detail'}")
    return render_result(result, wall)


def render_result(result: ExecResult, wall: float) -> str:
    """Return a program's output and, unless it exited with code 0, a line that says how it ended."""
    output = (result.stdout + result.stderr).decode(errors="replace")
    text = clip(output, MAX_OUTPUT, result.stdout_dropped + result.stderr_dropped)
    ending = _describe_ending(result, wall)
    if not ending:
        return text or NO_OUTPUT
    if not text:
        return ending
    return f"{text}{'' if text.endswith(chr(10)) else chr(10)}{ending}"


def _describe_ending(result: ExecResult, wall: float) -> str:
    match result.status:
        case "exited":
            return f"[exit code {result.exit_code}]" if result.exit_code else ""
        case "signaled":
            return f"[killed by signal {_format_signal(result.signal)}]"
        case "time_limit":
            return f"[stopped: the time limit of {wall:.3g} s was reached]"
        case "output_limit":
            return "[stopped: it wrote more than the output limit]"
        case other:
            return f"[stopped: the {other.replace('_', ' ')} was reached]"


def _format_signal(number: int | None) -> str:
    try:
        return f"{number} ({signal.Signals(number or 0).name})"
    except ValueError:
        return str(number)
