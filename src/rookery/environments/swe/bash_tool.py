"""The tools `bash` and `submit`.

`bash` runs commands in a shell in the attempt's sandbox that keeps its state between calls. The first call opens
the shell. The model sees stdout, stderr, the exit code and, if the command was killed, why. Long output is cut in
the middle. If the shell ends, it is replaced, and the model is told that its state is lost. `submit` ends the
current step of a task of the `swe` environment. `bash_tool` returns the tool for a configuration of that
environment; `bash` is the tool that other environments use by name.
"""

import asyncio
import shlex
from typing import Final

from rookery.core import ExecResult, SandboxError
from rookery.environments.context import Context
from rookery.environments.swe.tool_config import ToolConfig
from rookery.environments.text import clip
from rookery.environments.tool_environment import increment
from rookery.environments.tools import CallLimit, Tool
from rookery.sandboxes.protocol import Shell

SHELL: Final = "swe.shell"
FOLDER: Final = "swe.folder"
"""Key in `ctx.state` of the directory in which the shell starts."""
SUBMITTED: Final = "swe.submitted"
GRACE: Final = 30.0
"""Seconds that a sandbox gets to end a command after its time limit. After that the sandbox counts as lost."""
_MIN_SECONDS: Final = 0.05


async def run_bash(ctx: Context, command: str, seconds: float) -> ExecResult:
    """Run a command in the attempt's shell for at most `seconds`; raise `SandboxError` if the sandbox is lost."""
    shell: Shell | None = ctx.state.get(SHELL)
    if shell is None:
        shell = ctx.state[SHELL] = await (await ctx.sandbox()).shell()
    wall = max(_MIN_SECONDS, min(seconds, ctx.remaining))
    try:
        async with asyncio.timeout(wall + GRACE):
            result = await shell.run(_enter_directory(ctx) + command, timeout=wall)
    except TimeoutError as error:
        raise SandboxError(
            f"the sandbox's shell did not respond within {GRACE:g} s after the {wall:g} s limit of a command"
        ) from error
    if result.status == "lost":
        raise SandboxError(f"the sandbox was lost while it ran a command: {result.detail or 'no detail'}")
    increment(ctx, "bash_calls")
    if result.status != "exited":
        increment(ctx, f"bash/{result.status}")
    return result


def _enter_directory(ctx: Context) -> str:
    """Return shell code, to be put before a command, that changes a new shell to the initial directory.

    It does nothing in a shell in which it ran before. It has no newline, so that line numbers in bash's error
    messages refer to the command.
    """
    folder = ctx.state.get(FOLDER)
    if not folder:
        return ""
    return f'[ -n "${{_begun-}}" ] || {{ _begun=1; cd -- {shlex.quote(folder)}; }}; '


def render_result(result: ExecResult, limit: int) -> str:
    """Render a command's stdout, stderr and ending as text for the model, in about `limit` bytes."""
    stdout, stderr = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
    # Each stream gets half of the limit, plus what the other one does not need.
    sizes = (len(result.stdout), len(result.stderr))
    half = limit // 2
    stderr_limit = max(half, limit - sizes[0])
    stdout_limit = max(half, limit - sizes[1])
    parts = []
    if stdout:
        parts.append(_end_line(clip(stdout, stdout_limit, result.stdout_dropped)))
    if stderr:
        parts.append(f"[stderr]\n{_end_line(clip(stderr, stderr_limit, result.stderr_dropped))}")
    parts.append(_describe_ending(result))
    return "".join(parts)


def _end_line(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _describe_ending(result: ExecResult) -> str:
    if result.status == "exited":
        ending = f"exit code {result.exit_code}"
    elif result.status == "signaled":
        ending = f"ended by signal {result.signal}"
    elif result.status == "time_limit":
        ending = "killed: the time limit was reached"
    else:
        ending = f"killed: the {result.status.replace('_', ' ')} was reached"
    return f"[{ending}{f'; {result.detail}' if result.detail else ''}]"


def has_marker(result: ExecResult, marker: str) -> bool:
    """Return whether a command exited with code 0 and its first or last non-empty line is `marker`."""
    if not marker or not result.ok:
        return False
    lines = [line for line in result.stdout.decode(errors="replace").splitlines() if line.strip()]
    return bool(lines) and marker in (lines[0].strip(), lines[-1].strip())


def bash_tool(config: ToolConfig) -> Tool:
    """Return the tool `bash`, with the name, description and limits of the configuration."""
    settings = config.bash

    async def run(ctx: Context, command: str, seconds: float) -> str:
        result = await run_bash(ctx, command, seconds)
        if has_marker(result, config.marker):
            ctx.state[SUBMITTED] = True
        return render_result(result, settings.output)

    async def bash(command: str, ctx: Context, limit: CallLimit, timeout: float | None = None) -> str:
        """Run a command in a bash shell and return its output and exit code. The working directory, variables,
        functions and background jobs persist between calls. There is no terminal and no input.

        Args:
            command: One or more lines of bash.
            timeout: Seconds after which the command is killed, if less than the default limit.
        """
        seconds = limit if timeout is None or not timeout > 0 else min(limit, timeout)
        return await run(ctx, command, seconds)

    async def execute_bash(command: str, ctx: Context, limit: CallLimit) -> str:
        """Run a command in a bash shell and return its output and exit code. The working directory, variables,
        functions and background jobs persist between calls. There is no terminal and no input.

        Args:
            command: One or more lines of bash.
        """
        return await run(ctx, command, limit)

    function = bash if config.timeouts else execute_bash
    return Tool(
        function,
        name=settings.name or "bash",
        description=_describe_tool(settings.description, config),
        timeout=settings.timeout,
        sandbox=True,
    )


def _describe_tool(description: str, config: ToolConfig) -> str | None:
    """Return the description of the tool `bash`. If a marker is configured, add how to submit with it.

    None means the description in the docstring of the tool's function.
    """
    if not config.marker:
        return description or None
    text = description or (
        "Run a command in a bash shell and return its output and exit code. The working directory, "
        "variables, functions and background jobs persist between calls. There is no terminal and no input."
    )
    return f"{text} When you are done, submit with: echo {config.marker}"


def submit_tool(config: ToolConfig) -> Tool:
    """Return the tool `submit`, with the name, description and limits of the configuration."""
    settings = config.submit

    async def submit(ctx: Context) -> str:
        """Submit your work for grading. You cannot change it afterwards."""
        ctx.state[SUBMITTED] = True
        return "Submitted."

    return Tool(
        submit, name=settings.name or "submit", description=settings.description or None, timeout=settings.timeout
    )


bash: Final = bash_tool(ToolConfig())
"""The tool `bash` with its default settings, which any environment can use."""
bash.__qualname__ = "bash"  # runner processes import it by this name
