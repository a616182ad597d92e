"""Wait for an agent's process and decide who is responsible for how it ended.

Runs in a runner process. Before the first model call the policy has not acted, so a failure until then raises an
error with the cause `agent.start`. After the first model call, an exit with an error code or at the deadline is a
result of the policy, unless the agent exited because its last model call failed at the inference engine.
"""

import asyncio
import signal
from contextlib import suppress
from typing import Final, Literal, TypeAlias

import msgspec

from rookery.core import ExecResult, Fault, RookeryError, SandboxError, SandboxSpec, UpstreamError, get_cause
from rookery.environments.context import Context
from rookery.gateway.client import SessionRecord
from rookery.gateway.direct_session import DirectSession
from rookery.gateway.gateway_session import GatewaySession
from rookery.sandboxes.protocol import Process

ExitReason: TypeAlias = Literal["exited", "deadline", "budget"]
AgentSession: TypeAlias = GatewaySession | DirectSession
"""The agent's access to the policy: recorded by the gateway, or direct and unrecorded."""
ONE_DAY: Final = 86_400.0
KILL_SECONDS: Final = 20.0
MAX_QUOTED: Final = 1_000
"""Characters of the agent's last output that an error message quotes."""
_NOT_STARTED: Final = (126, 127)
"""Exit codes with which shells and sandboxes report that a program is not executable or does not exist."""


class AgentExit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an agent's process, with its reason."""

    reason: ExitReason
    """`exited`: by itself. `deadline`: its time limit passed. `budget`: a budget of the rollout was exhausted."""
    result: ExecResult
    killed: bool = False
    """True if the process had to be killed."""
    seconds: float = 0.0
    """Seconds for which the process ran."""


async def wait_for_exit(
    ctx: Context, process: Process, session: AgentSession, seconds: float, *, grace: float
) -> AgentExit:
    """Wait until the agent exits, its deadline passes, or a budget of its gateway session is exhausted.

    In the last two cases the process is killed; after an exhausted budget it first gets `grace` seconds to exit.
    The deadline is `seconds` from now, by the stage's clock. Before this returns or raises, the process tree is
    killed. Raise `UpstreamError` with the cause `upstream.hung` if the deadline passes while an inference engine
    hangs, and `SandboxError` if the sandbox was lost.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    waiting = asyncio.create_task(process.wait(timeout=ONE_DAY), name="agent")
    exhausted = asyncio.create_task(session.wait_truncated(), name="agent's budget")
    try:
        reason: ExitReason = "deadline"
        with suppress(TimeoutError):  # only the deadline raises it here
            async with ctx.within(seconds):
                await asyncio.wait({waiting, exhausted}, return_when="FIRST_COMPLETED")
                reason = "exited" if waiting.done() else "budget"
                if reason == "budget" and exhausted.exception() is None:
                    # Every call is refused now, so an agent that handles this can still exit cleanly.
                    await asyncio.wait({waiting}, timeout=grace)
        if reason == "budget":
            exhausted.result()
        elif waiting.done():
            reason = "exited"
        else:
            await session.check_upstream()  # before the kill, which would end the call that proves the hang
        killed = not waiting.done()
        result = await process.kill() if killed else waiting.result()
    finally:
        await _stop(process, waiting, exhausted)
    if result.status == "lost":
        raise SandboxError(f"the sandbox was lost while its agent ran: {result.detail or 'no detail'}")
    return AgentExit(reason=reason, result=result, killed=killed, seconds=loop.time() - started)


async def _stop(process: Process, waiting: "asyncio.Task[ExecResult]", exhausted: "asyncio.Task[object]") -> None:
    """Cancel both tasks, and kill the process if it still runs; wait for that at most `KILL_SECONDS`."""
    running = not waiting.done()
    for task in (waiting, exhausted):
        task.cancel()
    await asyncio.wait({waiting, exhausted})
    for task in (waiting, exhausted):
        if not task.cancelled():
            task.exception()  # mark it as retrieved
    if running:
        killing = asyncio.ensure_future(process.kill())
        await asyncio.wait({killing}, timeout=KILL_SECONDS)
        if killing.done() and not killing.cancelled():
            killing.exception()


def check_exit(name: str, ended: AgentExit, session: SessionRecord, spec: SandboxSpec) -> None:
    """Raise an error if the policy is not responsible for an agent that ended with an error or at its deadline.

    `name` is that of the launcher, `session` the state of the attempt's gateway session after the agent ended, and
    `spec` specifies the agent's sandbox.
    """
    if ended.reason == "budget" or session.truncated is not None:
        return
    code = session.failure or ""
    if ended.reason == "exited" and code and (get_cause(code).fault == "infra" or not session.turns_recorded):
        raise UpstreamError(
            f"the agent {name} {_describe_end(ended)} after its last model call failed with {code}"
            f"{_quote_output(ended)}",
            cause=code,
        )
    if session.calls:
        return
    if ended.reason == "deadline":
        summary = f"the agent {name} made no model call within its {ended.seconds:.0f} seconds"
    else:
        summary = f"the agent {name} {_describe_end(ended)} before its first model call"
    raise RookeryError(f"{summary}{_quote_output(ended)}", cause="agent.start", fault=_find_fault(ended, spec))


def _find_fault(ended: AgentExit, spec: SandboxSpec) -> Fault:
    result = ended.result
    if spec.image is not None and result.status == "exited" and result.exit_code in _NOT_STARTED:
        return "task"
    if ended.reason == "exited" and result.status == "signaled" and result.signal == signal.SIGKILL:
        return "infra"  # killed from outside, for example by the machine's OOM killer
    return "bug"


def _describe_end(ended: AgentExit) -> str:
    result = ended.result
    if result.status == "exited":
        text = f"exited with code {result.exit_code}"
    elif result.status == "signaled" and result.signal is not None:
        text = f"was killed by signal {result.signal}"
    else:
        text = f"was ended by the sandbox ({result.status})"
    return f"{text} ({result.detail})" if result.detail else text


def _quote_output(ended: AgentExit) -> str:
    """Return the end of the agent's output for an error message: its last line, then its last characters.

    The last line comes first because it usually names the error.
    """
    result = ended.result
    text = (result.stderr.strip() or result.stdout.strip()).decode("utf-8", "replace")
    if not text:
        return ""
    last = text.splitlines()[-1].strip()
    return f": {last[-MAX_QUOTED:]}" + (f"\n{text[-MAX_QUOTED:]}" if last != text else "")
