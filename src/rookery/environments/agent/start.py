"""Tell an agent that could not start from a policy that failed.

Runs in a runner process. Before the first model call the policy has not acted, so how an agent ends until then is
never the policy's result: it raises `agent.start`. After an answered call the policy has acted, and an exit code
or a deadline is its result. An error exit after a call that failed at the upstream is the upstream's failure.
"""

import signal
from typing import Final

from rookery.core import Fault, RookeryError, SandboxSpec, UpstreamError, cause_of
from rookery.environments.agent.following import Ended
from rookery.gateway.client import Record

SHOWN: Final = 1_000
"""Characters of the agent's last output that an error quotes."""
_NOT_STARTED: Final = (126, 127)
"""Exit codes of shells, and of our sandboxes, for a program that is not executable or does not exist."""


def check_start(name: str, ended: Ended, session: Record, spec: SandboxSpec) -> None:
    """Raise if an agent that ended badly did so without, or before, any act of the policy.

    `session` is the state of the attempt's gateway session after the agent ended.
    """
    if ended.why == "budget" or session.truncated is not None:
        return
    code = session.failure or ""
    if ended.why == "exited" and code and (cause_of(code).fault == "infra" or not session.turns_recorded):
        raise UpstreamError(
            f"the agent {name} {_how(ended)} after its last model call failed with {code}{_output(ended)}",
            cause=code,
        )
    if session.calls:
        return
    if ended.why == "deadline":
        said = f"the agent {name} made no model call within its {ended.seconds:.0f} seconds"
    else:
        said = f"the agent {name} {_how(ended)} before its first model call"
    raise RookeryError(f"{said}{_output(ended)}", cause="agent.start", fault=_fault(ended, spec))


def _fault(ended: Ended, spec: SandboxSpec) -> Fault:
    result = ended.result
    if spec.image is not None and result.status == "exited" and result.exit_code in _NOT_STARTED:
        return "task"
    if ended.why == "exited" and result.status == "signaled" and result.signal == signal.SIGKILL:
        return "infra"  # killed from outside, for example by the machine's OOM killer
    return "bug"


def _how(ended: Ended) -> str:
    result = ended.result
    if result.status == "exited":
        said = f"ended with exit code {result.exit_code}"
    elif result.status == "signaled" and result.signal is not None:
        said = f"was killed by signal {result.signal}"
    else:
        said = f"was ended by the sandbox ({result.status})"
    return f"{said} ({result.detail})" if result.detail else said


def _output(ended: Ended) -> str:
    """The last line that it printed, which usually names the error, and then the lines around it."""
    result = ended.result
    text = (result.stderr.strip() or result.stdout.strip()).decode("utf-8", "replace")
    if not text:
        return ""
    last = text.splitlines()[-1].strip()
    return f": {last[-SHOWN:]}" + (f"\n{text[-SHOWN:]}" if last != text else "")
