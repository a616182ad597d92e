"""The `bash` tool: a shell of the attempt's sandbox that keeps its folder and variables.

Promises:
- the model reads the exit code, what was printed and what went to stderr, and how the command ended where it did
  not end by itself;
- an answer is bounded in bytes, head and tail are kept and what was cut is counted, also out of one long line;
- a command over its time is killed, and that is said; a shell that ended is replaced, and what was lost is said;
- no sandbox and no shell is opened before the first call.
"""

import asyncio
import shlex
from typing import Final

from rookery.core import ExecResult, SandboxError
from rookery.environments.context import Context
from rookery.environments.results import clip
from rookery.environments.schemas import CallLimit, Tool
from rookery.environments.swe.config import Tooling
from rookery.sandboxes.protocol import Shell

SHELL: Final = "swe.shell"
FOLDER: Final = "swe.folder"
"""Where a shell begins; in the attempt's state."""
SUBMITTED: Final = "swe.submitted"
LATE: Final = 30.0
"""Seconds past a command's limit after which the sandbox counts as lost: it promised to have ended it."""
_LEAST: Final = 0.05


async def run_bash(ctx: Context, command: str, seconds: float) -> ExecResult:
    """Runs a command in the attempt's shell. `SandboxError` where the sandbox is gone."""
    shell: Shell | None = ctx.state.get(SHELL)
    if shell is None:
        shell = ctx.state[SHELL] = await (await ctx.sandbox()).shell()
    wall = max(_LEAST, min(seconds, ctx.remaining))
    try:
        async with asyncio.timeout(wall + LATE):
            result = await shell.run(_begun(ctx) + command, timeout=wall)
    except TimeoutError as error:
        raise SandboxError(f"the shell did not answer within {LATE:g} s after a limit of {wall:g} s") from error
    if result.status == "lost":
        raise SandboxError(f"the sandbox was lost under a command: {result.detail or 'no detail'}")
    _count(ctx, "bash_calls")
    if result.status != "exited":
        _count(ctx, f"bash/{result.status}")
    return result


def _begun(ctx: Context) -> str:
    """Brings a shell that is new, also one that was replaced a moment ago, to where it is to begin.

    On the command's own line, so that bash counts the lines of its messages as the model does.
    """
    folder = ctx.state.get(FOLDER)
    if not folder:
        return ""
    return f'[ -n "${{_begun-}}" ] || {{ _begun=1; cd -- {shlex.quote(folder)}; }}; '


def described(result: ExecResult, limit: int) -> str:
    """What the model reads: output, errors, and the ending, in at most about `limit` bytes and a few lines."""
    out, err = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
    # Each stream keeps its half; what one does not need is the other's.
    sizes = (len(result.stdout), len(result.stderr))
    half = limit // 2
    room_err = max(half, limit - sizes[0])
    room_out = max(half, limit - sizes[1])
    parts = []
    if out:
        parts.append(_ended(clip(out, room_out, result.stdout_dropped)))
    if err:
        parts.append(f"[stderr]\n{_ended(clip(err, room_err, result.stderr_dropped))}")
    parts.append(_ending(result))
    return "".join(parts)


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _ending(result: ExecResult) -> str:
    if result.status == "exited":
        said = f"exit code {result.exit_code}"
    elif result.status == "signaled":
        said = f"ended by signal {result.signal}"
    elif result.status == "time_limit":
        said = "killed: the time limit was reached"
    else:
        said = f"killed: the {result.status.replace('_', ' ')} was reached"
    return f"[{said}{f'; {result.detail}' if result.detail else ''}]"


def marked(result: ExecResult, marker: str) -> bool:
    """Whether a command that ended well printed the marker as its first or its last line."""
    if not marker or not result.ok:
        return False
    lines = [line for line in result.stdout.decode(errors="replace").splitlines() if line.strip()]
    return bool(lines) and marker in (lines[0].strip(), lines[-1].strip())


def bash_tool(tooling: Tooling) -> Tool:
    """The tool as configured."""
    own = tooling.bash

    async def call(ctx: Context, command: str, seconds: float) -> str:
        result = await run_bash(ctx, command, seconds)
        if marked(result, tooling.marker):
            ctx.state[SUBMITTED] = True
        return described(result, own.output)

    async def bash(command: str, ctx: Context, limit: CallLimit, timeout: float | None = None) -> str:
        """Runs a command in a bash shell and returns what it printed and its exit code. The folder, variables,
        functions and background jobs stay from call to call. There is no terminal and no input.

        Args:
            command: One or more lines of bash.
            timeout: Seconds after which the command is killed, where it should be less than the usual limit.
        """
        wanted = limit if timeout is None or not timeout > 0 else min(limit, timeout)
        return await call(ctx, command, wanted)

    async def execute_bash(command: str, ctx: Context, limit: CallLimit) -> str:
        """Runs a command in a bash shell and returns what it printed and its exit code. The folder, variables,
        functions and background jobs stay from call to call. There is no terminal and no input.

        Args:
            command: One or more lines of bash.
        """
        return await call(ctx, command, limit)

    function = bash if tooling.timeouts else execute_bash
    return Tool(
        function, name=own.name or "bash", description=_said(own.description, tooling), timeout=own.timeout
    )


def _said(description: str, tooling: Tooling) -> str | None:
    """With how to submit, where the shell is the way."""
    if not tooling.marker:
        return description or None
    plain = description or (
        "Runs a command in a bash shell and returns what it printed and its exit code. The folder, variables, "
        "functions and background jobs stay from call to call. There is no terminal and no input."
    )
    return f"{plain} When you are done, submit with: echo {tooling.marker}"


def submit_tool(tooling: Tooling) -> Tool:
    """The tool as configured."""
    own = tooling.submit

    async def submit(ctx: Context) -> str:
        """Hands your work in as it is now: it is graded, and you cannot change it any more."""
        ctx.state[SUBMITTED] = True
        return "Submitted."

    return Tool(submit, name=own.name or "submit", description=own.description or None, timeout=own.timeout)


def _count(ctx: Context, name: str) -> None:
    ctx.metrics[name] = ctx.metrics.get(name, 0.0) + 1
