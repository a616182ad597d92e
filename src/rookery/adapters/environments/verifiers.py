"""Environments of verifiers 0.4 packages: `verifiers:NAME`, where NAME is the ID of a taskset.

    rookery run verifiers:gsm8k --arg harness=null --policy http://localhost:8000/v1

verifiers runs the harness, the tool servers and the rewards. Its model calls go to the attempt's gateway session.
Runs in runner processes.

Guarantees:
- Every attempt has its own verifiers environment, with its own interception server and tool servers. They end
  with the attempt.
- verifiers does not retry. A failure that it attributes to the model, a sandbox or a tool server fails the attempt
  with fault infra, and the engine retries it. An exception in the package's code fails it as a bug.
- A reward that verifiers could not compute in its time fails the attempt with fault infra: it never counts as 0.
- A limit of turns or tokens ends the rollout in verifiers, which scores it; the outcome is Truncated.
- A role that the package does not train must have its own model: the policy's turns are always trained on.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from rookery.adapters.compatibility import check_version
from rookery.adapters.environments.session_work import (
    ScoredInRun,
    check_model_calls,
    read_reward_range,
    run_in_session,
)
from rookery.core import (
    Limits,
    Message,
    RookeryError,
    ScoringError,
    Task,
    TaskError,
    TruncatedReason,
    Truncation,
    UsageError,
)
from rookery.core.errors import describe
from rookery.environments import Context, Score
from rookery.gateway.gateway_session import GatewaySession

TESTED: Final = ("0.4.0", "0.5")
POLICY: Final = "policy"
CAUSES: Final = {
    "ProviderError": "upstream.error",
    "InterceptionError": "engine.gateway",
    "TunnelError": "engine.gateway",
    "SandboxError": "sandbox.lost",
    "ToolsetError": "tool.unreachable",
    "HarnessError": "agent.start",
}
"""Causes of the errors of verifiers. Every other error is `bug.environment`."""
TRUNCATIONS: Final[dict[str, TruncatedReason]] = {
    "max_turns": "turns",
    "max_output_tokens": "tokens",
    "max_input_tokens": "context",
    "max_total_tokens": "context",
    "compaction_failed": "context",
}


class VerifiersEnvironment(ScoredInRun):
    """Environment of an installed verifiers package. `name` is the ID of its taskset.

    `taskset` contains settings of the taskset, and `config` other settings of the verifiers environment, with the
    keys of verifiers' `[env]` table. `harness` and `runtime` are those of every role that does not set one in
    `config`. A harness that executes code needs a runtime. A package with infinitely many tasks yields `limit`.
    """

    needs_gateway = "the model calls of the verifiers environment"
    limits = Limits(run=3600.0)

    def __init__(
        self,
        name: str,
        *,
        harness: str | Mapping[str, Any] | None = None,
        runtime: str | Mapping[str, Any] | None = None,
        taskset: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        reward_range: tuple[float, float] = (0.0, 1.0),
        limit: int = 1000,
    ) -> None:
        self.name = f"verifiers:{name}"
        self.reward_range = read_reward_range(reward_range)
        self._limit = limit
        if not check_version("verifiers", *TESTED):
            raise UsageError("verifiers is not installed: pip install 'verifiers>=0.4'")
        from pydantic import ValidationError
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

        settings = {**(config or {}), "taskset": {**(taskset or {}), "id": name}}
        try:
            for role in agent_config_fields(env_config_type(name, settings.get("id", ""))()):
                agent = dict(settings.get(role) or {})
                if harness is not None:
                    agent.setdefault("harness", {"id": harness} if isinstance(harness, str) else dict(harness))
                chosen = {"type": runtime or "subprocess"} if not isinstance(runtime, Mapping) else dict(runtime)
                agent.setdefault("runtime", chosen)
                settings[role] = agent
            self.config = resolve_env_config(settings)
            env = load_environment(self.config)
        except ModuleNotFoundError as error:
            raise UsageError(f"the verifiers package {name!r} cannot be imported: {describe(error)}") from error
        except (ValidationError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"the verifiers environment {name!r} is not valid: {describe(error)}") from error
        self._agents = agent_config_fields(self.config)
        self.roles = tuple(
            sorted({agent.model for agent in self._agents.values() if agent.model and not agent.client} - {POLICY})
        )
        for role, agent in self._agents.items():
            loaded = env._harnesses[role]
            own = (config or {}).get(role) or {}
            if loaded.EXECUTES_CODE and agent.runtime.type == "subprocess" and not (runtime or own.get("runtime")):
                raise UsageError(
                    f"the harness {loaded.config.id!r} of {self.name} executes the policy's commands: "
                    "choose where with --arg runtime=docker (or runtime=subprocess: on this machine, without a "
                    "sandbox), or use --arg harness=null, which executes nothing"
                )

    def tasks(self) -> Iterator[Task]:
        from verifiers.v1.utils.loaders import load_taskset

        taskset = load_taskset(self.config.taskset)
        for task in taskset if taskset.bounded else islice(taskset, self._limit):
            data = task.data
            prompt = [] if data.system_prompt is None else [Message("system", data.system_prompt)]
            if isinstance(data.prompt, str):
                prompt.append(Message("user", data.prompt))
            yield Task(
                id=data.id or data.name or f"{self.config.taskset.id}-{data.idx}",
                prompt=tuple(prompt),
                data={"verifiers": data.model_dump(mode="json")},
            )

    async def run(self, ctx: Context) -> None:
        episode, session = await run_in_session(ctx, lambda session: self._run_episode(ctx, session))
        self._check_episode(episode, session)
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        ctx.state["score"] = get_score(traces)
        ctx.info["verifiers"] = {"traces": [_describe_trace(trace) for trace in episode.traces]}
        for trace in traces:
            if trace.is_timeout:
                raise Truncation("time", f"verifiers ended the rollout: {trace.stop_condition}")
            if trace.stop_condition in TRUNCATIONS:
                reason = TRUNCATIONS[trace.stop_condition]
                raise Truncation(reason, f"verifiers ended the rollout: {trace.stop_condition}")

    async def _run_episode(self, ctx: Context, session: GatewaySession) -> tuple[Any, GatewaySession]:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.utils.loaders import load_environment

        env = load_environment(self._limited_config(ctx.limits))
        task = self._make_task(env, ctx.task)
        # verifiers reads keys from environment variables, and hides those with this name from its programs.
        variable = f"ROOKERY_API_KEY_{session.id}".replace("-", "_").replace(".", "_")
        client = EvalClientConfig(base_url=f"{session.url}/v1", api_key_var=variable)
        os.environ[variable] = session.key
        try:
            async with env.serving():
                return await env.run_episode(task, ModelContext(model=POLICY, client=client)), session
        finally:
            del os.environ[variable]

    def _limited_config(self, limits: Limits) -> Any:
        """Return the configuration with the limits of the rollout, unless a role has lower ones."""
        update = {}
        for role, agent in self._agents.items():
            budgets = {"max_turns": limits.turns, "max_output_tokens": limits.tokens}
            lower = {
                name: budget if (own := getattr(agent, name)) is None else min(own, budget)
                for name, budget in budgets.items()
                if budget is not None
            }
            update[role] = agent.model_copy(update=lower)
        return self.config.model_copy(update=update)

    def _make_task(self, env: Any, task: Task) -> Any:
        from pydantic import ValidationError

        task_type = type(env.taskset).task_type()
        try:
            return task_type(task_type.data_type().model_validate(task.data["verifiers"]), env.config.taskset.task)
        except (KeyError, ValidationError) as error:
            raise TaskError(
                f"task {task.id} is not a task of {self.name}: use the tasks of the package ({describe(error)})"
            ) from error

    def _check_episode(self, episode: Any, session: GatewaySession) -> None:
        """Raise if the episode failed, or if the policy played a role that must not be trained."""
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if not episode.ok and errors:
            error = errors[-1]
            text = f"{error.type}: {error.message}"
            check_model_calls(session, session.record, text)
            cause = CAUSES.get(error.type, "bug.environment")
            raise RookeryError(
                f"verifiers reported {text}" + (f"\n{error.traceback}" if error.traceback else ""), cause=cause
            )
        for trace in episode.traces:
            agent = self._agents[trace.agent.name or next(iter(self._agents))]
            if not trace.agent.trainable and not agent.client and agent.model in (None, POLICY):
                raise UsageError(
                    f"{self.name} does not train the role {trace.agent.name!r}, but the policy would play it: "
                    f'use another model role with --arg \'config={{"{trace.agent.name}": {{"model": "judge"}}}}\'',
                    cause="bug.environment",
                )


def get_score(traces: list[Any]) -> Score | float:
    """Return the mean of the traces' rewards, with the means of their named rewards and metrics."""
    if not traces:
        raise RookeryError("verifiers returned no trace of the policy", cause="bug.environment")
    for trace in traces:
        for name, one in trace.rewards.items():
            if one is None:  # its time was over; the other rewards alone are not the score
                raise ScoringError(
                    f"verifiers did not compute the reward {name!r}: {trace.stop_condition}",
                    cause="scoring.timeout",
                )
    rewards = [{name: one.value for name, one in trace.rewards.items()} for trace in traces]
    metrics = [{name: one for name, one in trace.metrics.items() if one is not None} for trace in traces]
    return Score(sum(trace.reward for trace in traces) / len(traces), _get_means(rewards), _get_means(metrics))


def _get_means(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: float(sum(found) / len(found))
        for name in names
        if (found := [row[name] for row in rows if name in row])
    }


def _describe_trace(trace: Any) -> dict[str, Any]:
    return {
        "role": trace.agent.name,
        "reward": trace.reward,
        "turns": trace.num_turns,
        "stop": trace.stop_condition,
        "trained": trace.agent.trainable,
    }
