"""The `python` tool: runs a program of the policy in the attempt's sandbox.

Promises:
- no sandbox is made before the first call;
- the program's output comes back in the order it was written, also what it wrote before it was killed;
- how the program ended is said whenever it did not end by itself with exit code 0;
- a program's failure is an observation; a lost sandbox is a `SandboxError`.
"""

import asyncio
import signal

from rookery.core import ExecResult, SandboxError
from rookery.environments.context import Context
from rookery.environments.results import NOTHING, clip
from rookery.environments.schemas import CallLimit, tool
from rookery.sandboxes.protocol import Command

LATE = 30.0
"""Seconds past a command's limit after which the sandbox counts as lost: it promised to have ended it."""
KEPT = 64 << 10
"""Bytes of output that come back; an environment may cut them further."""

# The program comes over stdin, so no file, no quoting and no argument limit is in its way. Error and output
# share a stream to keep their order. Tracebacks show the program's lines through its loader, and our own frame
# is taken out of them; linecache itself would cost a third of the interpreter's start, so it waits for an error.
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


@tool
async def python(code: str, ctx: Context, limit: CallLimit) -> str:
    """Runs a Python program and returns what it printed. Files stay between calls; variables do not.

    Args:
        code: The whole program. Print what you want to see.
    """
    sandbox = await ctx.sandbox()
    # Opening the sandbox was not the program's time.
    wall = max(0.001, min(limit, ctx.remaining))
    command = Command(argv=_ARGV, stdin=code.encode("utf-8", "replace"), wall=wall, warm=True)
    try:
        async with asyncio.timeout(wall + LATE):
            result = await sandbox.exec(command)
    except TimeoutError as error:
        raise SandboxError(
            f"sandbox {sandbox.id} did not answer within {LATE:g} s after the {wall:g} s limit of a program"
        ) from error
    if result.status == "lost":
        raise SandboxError(f"sandbox {sandbox.id} was lost under a program: {result.detail or 'no detail'}")
    return described(result, wall)


def described(result: ExecResult, wall: float) -> str:
    """A program's output, and the way it ended where that is not exit code 0."""
    output = (result.stdout + result.stderr).decode(errors="replace")
    text = clip(output, KEPT, result.stdout_dropped + result.stderr_dropped)
    ending = _ending(result, wall)
    if not ending:
        return text or NOTHING
    if not text:
        return ending
    return f"{text}{'' if text.endswith(chr(10)) else chr(10)}{ending}"


def _ending(result: ExecResult, wall: float) -> str:
    match result.status:
        case "exited":
            return f"[exit code {result.exit_code}]" if result.exit_code else ""
        case "signaled":
            return f"[killed by signal {_signal(result.signal)}]"
        case "time_limit":
            return f"[stopped: the time limit of {wall:.3g} s was reached]"
        case "output_limit":
            return "[stopped: it wrote more than the output limit]"
        case other:
            return f"[stopped: the {other.replace('_', ' ')} was reached]"


def _signal(number: int | None) -> str:
    try:
        return f"{number} ({signal.Signals(number or 0).name})"
    except ValueError:
        return str(number)
