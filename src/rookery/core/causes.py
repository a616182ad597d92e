"""The one table of causes. A released code keeps its meaning; docs/causes.md is made from this table."""

import msgspec

from rookery.core.outcomes import Fault


class Cause(msgspec.Struct, frozen=True):
    """A stable code, whose fault it is, what it means and what a person can do about it."""

    code: str
    fault: Fault
    meaning: str
    advice: str


_TABLE = (
    Cause(
        "sandbox.create",
        "infra",
        "A sandbox could not be made.",
        "Read the detail; check memory, disk and process limits of the machine.",
    ),
    Cause(
        "sandbox.lost",
        "infra",
        "A sandbox died or stopped answering under the attempt.",
        "If it repeats for one task only, look at what the policy runs there; else look at the machine.",
    ),
    Cause(
        "sandbox.exhausted",
        "infra",
        "A program in the sandbox used up the sandbox's memory or processes, and nothing can run there any more. "
        "The engine ends such a rollout as truncated (`lost`) with the minimum reward, without a new attempt.",
        "Nothing if it is rare; if the task really needs that much, raise the sandbox's memory or pids.",
    ),
    Cause(
        "sandbox.refused",
        "infra",
        "The provider cannot give what the sandbox spec asks for.",
        "Choose another provider, or ask for less (image, network, disk).",
    ),
    Cause(
        "sandbox.image",
        "infra",
        "An image could not be fetched or kept: a registry or engine did not answer, or there is no room for it.",
        "Read the detail; `rookery images pull` tries it apart from a run, `rookery images prune` makes room.",
    ),
    Cause(
        "worker.unrecoverable",
        "infra",
        "A worker or a REPL's shell died and could not be brought back.",
        "The engine tries again in a fresh sandbox. If the policy's code does it twice, the rollout is truncated.",
    ),
    Cause(
        "tool.unreachable",
        "infra",
        "A tool server of the run did not start, or did not answer.",
        "Check the server that the detail names, and the run's `mcp`.",
    ),
    Cause(
        "upstream.unreachable",
        "infra",
        "No connection to the model server could be made or kept.",
        "Check that the server runs and that its URL (--policy) is right.",
    ),
    Cause(
        "upstream.timeout",
        "infra",
        "The model server accepted a call and did not answer in time.",
        "Raise the call deadline or lower the concurrency.",
    ),
    Cause(
        "upstream.hung",
        "infra",
        "The model server hangs: it accepted a call and makes no progress on it.",
        "Read the evidence in the attempt's record; restart the server that the detail names.",
    ),
    Cause(
        "upstream.overloaded",
        "infra",
        "The model server kept answering 429 or 503.",
        "Lower -c, or add replicas.",
    ),
    Cause(
        "upstream.error",
        "infra",
        "The model server answered with a server error (5xx).",
        "Read the server's log at the time of the record.",
    ),
    Cause(
        "upstream.protocol",
        "infra",
        "The model server's answer could not be understood.",
        "Check that the URL speaks the OpenAI protocol.",
    ),
    Cause(
        "upstream.cut",
        "infra",
        "The model server's stream ended before its answer did.",
        "Read the server's log at the time of the record; if it is alive, look at what stands between.",
    ),
    Cause(
        "upstream.aborted",
        "infra",
        "A call was aborted for new weights when part of its answer was told already, and could not be continued.",
        "Record by tokens, pause with keep or drain, or give the drain more time.",
    ),
    Cause(
        "upstream.paused",
        "infra",
        "The upstream was paused, and nobody resumed it before the pause's deadline.",
        "Look at why the weight sync did not end; raise the pause's deadline if it is only slow.",
    ),
    Cause(
        "upstream.auth",
        "infra",
        "The model server refused the key.",
        "Set ROOKERY_API_KEY (or OPENAI_API_KEY) for this server.",
    ),
    Cause(
        "upstream.rejected",
        "bug",
        "The model server rejected the request itself (4xx).",
        "Read the detail: a wrong model name, or a request the environment built wrongly.",
    ),
    Cause(
        "engine.gateway",
        "infra",
        "The run's gateway did not answer, or no longer has the attempt's session.",
        "Nothing if it is rare: its processes are started again; else read the gateway's log in the run's folder.",
    ),
    Cause(
        "engine.queue",
        "infra",
        "The attempt waited for a runner longer than the queue deadline.",
        "Raise limits.queue or lower -c.",
    ),
    Cause(
        "engine.setup",
        "infra",
        "Setup ran out of time while waiting for a sandbox or a model.",
        "Raise limits.setup, or look at why sandboxes are slow.",
    ),
    Cause(
        "runner.lost",
        "infra",
        "The runner process died; the attempt was in it and is not suspected alone.",
        "Nothing if it is rare; else read runner.log in the run's folder.",
    ),
    Cause(
        "scoring.timeout",
        "infra",
        "Scoring ran out of time while waiting for a sandbox or a model.",
        "Raise limits.score.",
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
        "The task's grader ended without a verdict.",
        "Fix the grader: it must always write its reward.",
    ),
    Cause(
        "scoring.empty",
        "task",
        "The file that the task's grader writes its reward to is empty.",
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
        "The reward of the task's grader is outside of the declared range.",
        "Fix the grader, or declare the range that its rewards have.",
    ),
    Cause(
        "agent.start",
        "bug",
        "A command-line agent could not be installed or started, or ended with an error before its first model "
        "call. The fault is infra if its installation failed, task if the task's image lacks the program.",
        "Read the end of the output in the detail; fix the launcher, the script, the installation or the image.",
    ),
    Cause(
        "agent.missing",
        "task",
        "The task's sandbox lacks a program that the launcher needs.",
        "Use another image, or another launcher.",
    ),
    Cause("task.invalid", "task", "The row is not a valid task.", "Fix the named field of the named row."),
    Cause("task.setup", "task", "The task's own setup failed.", "Read its output in the detail; fix the task."),
    Cause("task.image", "task", "The task's image is missing or broken.", "Pull, build or fix the named image."),
    Cause(
        "engine.tokens",
        "infra",
        "The rollout's recorded tokens could not be read back: a token file is missing, truncated or corrupt.",
        "Check the disk that holds the run; `rookery resume RUN --failed` runs the rollout again.",
    ),
    Cause(
        "upstream.logprobs",
        "infra",
        "A sampled token has no usable log probability, so the rollout was left out of the batch.",
        "Let the model server return log probabilities, or set BatchConfig(without_logprob=…).",
    ),
    Cause(
        "bug.environment",
        "bug",
        "The environment's code raised in setup or run.",
        "Read the traceback in the record (`rookery show`).",
    ),
    Cause(
        "bug.scoring",
        "bug",
        "The environment's scoring code raised.",
        "Read the traceback in the record (`rookery show`).",
    ),
    Cause(
        "bug.reward",
        "bug",
        "The environment's scoring returned no finite number in its declared range.",
        "Return a finite float within reward_range.",
    ),
    Cause(
        "bug.hung",
        "bug",
        "A stage's deadline passed inside the environment's own code.",
        "Find the wait in the traceback; give it a deadline of its own.",
    ),
    Cause(
        "bug.uncancellable",
        "bug",
        "The environment's code swallowed its cancellation and went on.",
        "Never catch CancelledError without raising it again.",
    ),
    Cause(
        "bug.blocked",
        "bug",
        "The environment blocked its runner's event loop, also when run alone.",
        "Move blocking work into a plain `def` (it runs off the loop) or into a sandbox.",
    ),
    Cause(
        "bug.crashed",
        "bug",
        "The rollout killed its runner process, also when run alone.",
        "Read the crash stack in the record; run the suspect code in a sandbox.",
    ),
    Cause(
        "bug.merge",
        "bug",
        "Rookery could not merge the rollout's turns into segments.",
        "Please report it, with the traceback.",
    ),
    Cause(
        "bug.batch",
        "bug",
        "The rollout's segments contradict each other or its record, so it was left out of the batch.",
        "Read the detail; if you did not change the segments yourself, please report it.",
    ),
    Cause(
        "bug.send",
        "bug",
        "The rollout could not be encoded, sent or decoded between the engine and another process.",
        "Read the detail; keep less in `ctx.info` if the rollout is too large, else please report it.",
    ),
    Cause("bug.exit", "bug", "The environment's code called exit.", "Return from the stage instead."),
    Cause("bug.rookery", "bug", "Rookery's own code failed.", "Please report it, with the traceback."),
)

CAUSES: dict[str, Cause] = {cause.code: cause for cause in _TABLE}


def cause_of(code: str) -> Cause:
    """The table's row, or a row that says the code is not ours (an environment may add its own)."""
    return CAUSES.get(code) or Cause(code, "bug", "A cause of the environment's own.", "See its documentation.")
