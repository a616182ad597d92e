"""The table of failure causes. `docs/reference/causes.md` repeats it; a test keeps both equal."""

import msgspec

from rookery.core.outcomes import Fault


class Cause(msgspec.Struct, frozen=True):
    """One cause of failure: a stable code, who is responsible, an explanation, and the next step for the user."""

    code: str
    fault: Fault
    """The usual fault of failures with this code. An exception can carry another one."""
    meaning: str
    advice: str


_TABLE = (
    Cause(
        "sandbox.create",
        "infra",
        "A sandbox could not be created.",
        "Read the detail and check the memory, disk and process limits of the machine.",
    ),
    Cause(
        "sandbox.lost",
        "infra",
        "A sandbox died or stopped responding during the attempt.",
        "If it happens for one task only, check what the policy runs there. Otherwise check the machine.",
    ),
    Cause(
        "sandbox.exhausted",
        "infra",
        "A program used up the memory or the processes of its sandbox, and no program can run there any more. "
        "The engine ends such a rollout as truncated (`lost`) with the minimum reward and does not retry it.",
        "Nothing to do if it is rare. If the task needs that much, raise the sandbox's `memory` or `pids`.",
    ),
    Cause(
        "sandbox.host",
        "infra",
        "The machine or service that ran a sandbox could not be reached any more, and its sandboxes are lost.",
        "Nothing to do if it is rare: the engine retries. Otherwise check the host with `rookery doctor`.",
    ),
    Cause(
        "sandbox.quota",
        "infra",
        "The hosts or the service have reached their limit of sandboxes.",
        "Lower the concurrency (`-c`), or raise the capacity of the hosts or the quota of the service.",
    ),
    Cause(
        "sandbox.refused",
        "infra",
        "The provider does not support something that the sandbox's settings request.",
        "Choose another provider, or change the sandbox's settings (image, network, disk) as the detail says.",
    ),
    Cause(
        "sandbox.image",
        "infra",
        "An image could not be fetched or stored: a registry or container engine did not respond, or the disk is "
        "full.",
        "Read the detail. `rookery images pull` fetches it without a run; `rookery images prune` frees space.",
    ),
    Cause(
        "worker.unrecoverable",
        "infra",
        "A worker or the shell of a REPL died and could not be restarted.",
        "The engine retries in a new sandbox. If the policy's code causes it twice, the rollout is truncated.",
    ),
    Cause(
        "tool.unreachable",
        "infra",
        "A server that the environment uses (MCP, OpenEnv, NeMo Gym) did not start or did not respond.",
        "Check that the server named in the detail runs, and its address: the run's `mcp` setting, or the name "
        "after `openenv:` or `nemo-gym:`.",
    ),
    Cause(
        "upstream.unreachable",
        "infra",
        "The connection to the inference engine could not be opened, or it was lost.",
        "Check that the server is running and that its URL (`--policy`, for a gateway `--upstream`) is correct.",
    ),
    Cause(
        "upstream.timeout",
        "infra",
        "The inference engine accepted a call and did not reply in time.",
        "Raise `limits.model_call`, or lower the concurrency (-c).",
    ),
    Cause(
        "upstream.hung",
        "infra",
        "The inference engine hangs: it accepted a call and makes no progress on it.",
        "Read the evidence in the attempt's record, and restart the server named in the detail.",
    ),
    Cause(
        "upstream.overloaded",
        "infra",
        "The inference engine repeatedly returned 429 or 503.",
        "Lower the concurrency (-c), or add replicas.",
    ),
    Cause(
        "upstream.error",
        "infra",
        "The inference engine returned a server error (5xx).",
        "Read the server's log at the time of the attempt.",
    ),
    Cause(
        "upstream.protocol",
        "infra",
        "The response of the inference engine could not be parsed.",
        "Check that the URL belongs to a server with an OpenAI-compatible API.",
    ),
    Cause(
        "upstream.cut",
        "infra",
        "The inference engine closed the stream before the reply was complete.",
        "Read the server's log at the time of the attempt. If the server is fine, check proxies in between.",
    ),
    Cause(
        "upstream.aborted",
        "infra",
        "A call was aborted for a weight update after part of its reply was streamed, and could not be continued.",
        "Use --record tokens, pause with mode keep or drain, or raise the timeout of the pause.",
    ),
    Cause(
        "upstream.paused",
        "infra",
        "The upstream was paused and not resumed before the deadline of the pause.",
        "Find out why the weight sync did not finish. If it is only slow, raise the deadline of the pause.",
    ),
    Cause(
        "upstream.auth",
        "infra",
        "The inference engine rejected the API key.",
        "Set ROOKERY_API_KEY (or OPENAI_API_KEY) to the key of this server.",
    ),
    Cause(
        "upstream.rejected",
        "bug",
        "The inference engine rejected the request as invalid (4xx).",
        "Read the detail: the model name is wrong, or the environment built an invalid request.",
    ),
    Cause(
        "engine.gateway",
        "infra",
        "The run's gateway did not respond, or no longer has the attempt's session.",
        "Nothing to do if it is rare: its processes are restarted. Otherwise read its log in the run's `logs`.",
    ),
    Cause(
        "engine.queue",
        "infra",
        "The attempt waited for a runner longer than the queue deadline.",
        "Raise `limits.queue`, or lower the concurrency (-c).",
    ),
    Cause(
        "engine.setup",
        "infra",
        "The setup deadline passed while the attempt waited for a sandbox or a model.",
        "Raise `limits.setup`, or find out why sandboxes are slow.",
    ),
    Cause(
        "runner.lost",
        "infra",
        "The runner process died, and this attempt was not found to be the reason.",
        "Nothing to do if it is rare. Otherwise read the runner's log in the run's `logs` directory.",
    ),
    Cause(
        "machine.lost",
        "infra",
        "The cluster node on which the attempt ran died, could not be reached, or could not write to its disk.",
        "Nothing to do if it is rare: the attempt runs again on another node. Otherwise check the named node.",
    ),
    Cause(
        "scoring.timeout",
        "infra",
        "The scoring deadline passed while the attempt waited for a sandbox or a model.",
        "Raise `limits.score`, or find out why sandboxes or the judge are slow.",
    ),
    Cause(
        "scoring.unparsable",
        "task",
        "The task's grader wrote something that is not a reward.",
        "Fix the grader: it must write one finite number.",
    ),
    Cause(
        "scoring.missing",
        "task",
        "The task's grader ended without writing a reward.",
        "Fix the grader: it must always write its reward.",
    ),
    Cause(
        "scoring.empty",
        "task",
        "The reward file of the task's grader is empty.",
        "Fix the grader: it must write one finite number.",
    ),
    Cause(
        "scoring.infinite",
        "task",
        "The reward of the task's grader is infinite or not a number.",
        "Fix the grader: it must write one finite number.",
    ),
    Cause(
        "scoring.range",
        "task",
        "The reward of the task's grader is outside the declared range.",
        "Fix the grader, or declare the range of its rewards.",
    ),
    Cause(
        "scoring.helper",
        "infra",
        "The helper process that compares answers (scorers `regex` and `math`) could not be started, or it died.",
        "Check the memory and process limits of the machine.",
    ),
    Cause(
        "scoring.sandbox_gone",
        "bug",
        "A stored rollout was graded by code that uses the sandbox in which the policy worked, which is gone.",
        "The rollout keeps its score. Grade it with a scorer that reads only the answer and the messages.",
    ),
    Cause(
        "scoring.judge",
        "infra",
        "The judge model replied without a score.",
        "Read the judge's replies (`rookery show`). Use another judge, or give it more calls or tokens.",
    ),
    Cause(
        "agent.start",
        "bug",
        "A command-line agent could not be installed or started, or ended with an error before its first model "
        "call. The fault is infra if its installation failed, task if the task's image lacks the program.",
        "Read the end of the output in the detail, and fix the launcher, script, installation or image.",
    ),
    Cause(
        "agent.missing",
        "task",
        "The task's sandbox lacks a program that the launcher needs.",
        "Use another image, or another launcher.",
    ),
    Cause("task.invalid", "task", "The row is not a valid task.", "Fix the row and field named in the detail."),
    Cause(
        "task.setup", "task", "The task's own setup failed.", "Read its output in the detail, and fix the task."
    ),
    Cause(
        "task.image",
        "task",
        "The task's image is missing or broken.",
        "Pull, build or fix the image named in the detail.",
    ),
    Cause(
        "engine.tokens",
        "infra",
        "The rollout's recorded tokens cannot be read, because a token file is missing, truncated or corrupt.",
        "Check the disk that holds the run directory, then run the rollout again: `rookery resume RUN --failed`.",
    ),
    Cause(
        "upstream.logprobs",
        "infra",
        "A sampled token has no usable log probability, so the rollout was left out of the batch.",
        "Configure the inference engine to return log probabilities, or set BatchConfig(without_logprob=…).",
    ),
    Cause(
        "bug.environment",
        "bug",
        "The environment's code raised an exception in setup or run.",
        "Read the traceback in the record (`rookery show`).",
    ),
    Cause(
        "bug.scoring",
        "bug",
        "The environment's scoring code raised an exception.",
        "Read the traceback in the record (`rookery show`).",
    ),
    Cause(
        "bug.reward",
        "bug",
        "The environment's scoring did not return a finite number in the declared range.",
        "Return a finite float within `reward_range`.",
    ),
    Cause(
        "bug.hung",
        "bug",
        "The deadline of a stage passed inside the environment's own code.",
        "Find the wait in the traceback, and bound it with `async with ctx.within(seconds)`.",
    ),
    Cause(
        "bug.uncancellable",
        "bug",
        "The environment's code caught its cancellation and continued.",
        "Raise `CancelledError` again wherever you catch it.",
    ),
    Cause(
        "bug.blocked",
        "bug",
        "The environment blocked the event loop of its runner, also when it ran alone.",
        "Move blocking code into a plain `def` stage or tool, which runs in a thread, or into a sandbox.",
    ),
    Cause(
        "bug.crashed",
        "bug",
        "The rollout crashed its runner process, also when it ran alone.",
        "Read the stack of the crash in the record, and run the crashing code in a sandbox.",
    ),
    Cause(
        "bug.merge",
        "bug",
        "Rookery could not merge the rollout's turns into segments.",
        "This is a bug in Rookery: please report it with the traceback.",
    ),
    Cause(
        "bug.batch",
        "bug",
        "The rollout's segments contradict each other or its record, so it was left out of the batch.",
        "Read the detail. If you did not change the segments yourself, please report it.",
    ),
    Cause(
        "bug.send",
        "bug",
        "The rollout could not be encoded, sent or decoded between the engine and another process.",
        "Read the detail. If the rollout is too large, store less in `ctx.info`; otherwise please report it.",
    ),
    Cause("bug.exit", "bug", "The environment's code called exit.", "Return from the stage instead."),
    Cause("bug.rookery", "bug", "Rookery's own code failed.", "Please report it with the traceback."),
)

CAUSES: dict[str, Cause] = {cause.code: cause for cause in _TABLE}


def get_cause(code: str) -> Cause:
    """Return the entry of a cause code in the table.

    Environments may define their own codes. A code that is not in the table gets fault `bug` and a general text.
    """
    text = "A cause that the environment defines.", "See the documentation of the environment."
    return CAUSES.get(code) or Cause(code, "bug", *text)
