"""Grade stored rollouts again. The environment behind `rookery rescore`; runs in a runner process.

A rollout of this environment is the grading of one stored rollout: no model is sampled, except those that the
scorer calls. All rules for scoring apply: deadlines, checks of the reward, and new attempts after infrastructure
failures.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import Limits, Message, Rollout, SandboxSpec, Task, TaskError, Truncated, Truncation, UsageError
from rookery.environments.base import Environment, Score, Ungraded
from rookery.environments.context import Context
from rookery.environments.loader import load_environment
from rookery.environments.tool_environment import find_stored_answer
from rookery.journal import RunReader
from rookery.scoring.scorers import CommandCheck, apply_scorer, make_scorer
from rookery.trajectories import build_transcript

SOURCE: Final = "rookery.environments.rescoring:RescoringEnvironment"
_KEY: Final = "rookery.rollout"
"""Field of `Task.data` with the ID of the stored rollout."""
_RESTORED: Final = "rescoring.restored"
"""Key in `ctx.state` that says that `restore` of the run's environment was called."""


class RescoringEnvironment(Environment):
    """Environment that grades the stored rollouts of the run in the directory `run`.

    `scorer` is a scorer, as `make_scorer` accepts it. If it is None, the run's own environment grades:
    `environment` and `arguments` describe it. `superseded` is the number of replaced records of the run when the
    grading was planned: if it has changed at the end, the results are refused.
    """

    name = "rescore"

    def __init__(
        self,
        run: str,
        *,
        scorer: Any = None,
        environment: str = "",
        arguments: dict[str, Any] | None = None,
        superseded: int = 0,
    ) -> None:
        self.stored_run = Path(run)
        self.superseded = superseded
        self._scorer = None if scorer is None else make_scorer(scorer)
        self._inner = None if scorer is not None else load_environment(environment, **(arguments or {}))
        if self._inner is not None:
            self.limits, self.reward_range = self._inner.limits, self._inner.reward_range
            self.sandbox, self.roles = _without_gateway(self._inner.sandbox), self._inner.roles
            self.part_weights = self._inner.part_weights
        elif self._scorer is not None:
            if isinstance(self._scorer, CommandCheck):
                raise UsageError(
                    "the scorer `command` needs the sandbox of the policy, which stored rollouts lack"
                )
            self.roles = self._scorer.roles

    @property
    def needs_sandbox(self) -> bool:
        return self._inner is not None and self._inner.needs_sandbox

    def limits_for(self, task: Task, run: Limits) -> Limits:
        return self._inner.limits_for(_get_original(task), run) if self._inner else super().limits_for(task, run)

    def sandbox_for(self, task: Task, spec: SandboxSpec) -> SandboxSpec:
        return self._inner.sandbox_for(_get_original(task), spec) if self._inner else spec

    async def teardown(self, ctx: Context) -> None:
        if self._inner is not None and ctx.state.get(_RESTORED):
            await self._inner.teardown(ctx)

    async def run(self, ctx: Context) -> None:
        rollout, messages = await asyncio.to_thread(self._read, str(ctx.task.data[_KEY]))
        ctx.task = msgspec.structs.replace(_get_original(ctx.task), id=rollout.task)
        ctx.state["stored"], ctx.state["messages"] = rollout, messages
        ctx.tool_calls = rollout.usage.tool_calls
        if self._inner is not None:
            ctx.state[_RESTORED] = True
            await self._inner.restore(ctx, rollout, messages)
        ctx.sandbox_gone = True  # unless `restore` has opened one
        if isinstance(rollout.outcome, Truncated):
            raise Truncation(rollout.outcome.reason)

    async def score(self, ctx: Context) -> Score | Ungraded | float | Mapping[str, float]:
        if self._inner is not None:
            return await self._inner.score(ctx)
        assert self._scorer is not None
        rollout: Rollout = ctx.state["stored"]
        submission = ctx.submission(find_stored_answer(rollout, ctx.state["messages"]))
        return await apply_scorer(self._scorer, submission, *self.reward_range)

    def _read(self, rollout_id: str) -> tuple[Rollout, list[Message]]:
        """Return the stored record, with the outcome of its run stage, and the policy's conversation."""
        with RunReader(self.stored_run) as reader:
            record = reader.rollout(rollout_id)
            if record is None:
                raise TaskError(f"{self.stored_run.name} has no record of rollout {rollout_id}")
            outcome = find_run_outcome(reader, record)
            turns = reader.turns(record)
        return msgspec.structs.replace(record, outcome=outcome), build_transcript(turns)


def _without_gateway(spec: SandboxSpec | None) -> SandboxSpec | None:
    """Return a spec without the network `model`: a run that only grades has no gateway."""
    if spec is None or spec.network != "model":
        return spec
    return msgspec.structs.replace(spec, network="none")


def find_run_outcome(reader: RunReader, record: Rollout) -> Any:
    """Return how the run stage of a stored rollout ended: its outcome, or an earlier one if grading failed."""
    from rookery.core import SCORED, Completed

    for one in (record, *(earlier.record for earlier in reversed(reader.earlier(record.id)))):
        if isinstance(one.outcome, SCORED):
            return one.outcome
    return Completed()


def make_rescoring_task(task: Task, rollout_id: str, environment: str = "") -> Task:
    """Return the task of the grading of one stored rollout. Its ID is that of the rollout.

    `environment` is the name of the environment in a mixture that grades it; the ID then begins with it.
    """
    data = {**task.data, _KEY: rollout_id}
    named = f"{environment}/{rollout_id}" if environment else rollout_id
    return msgspec.structs.replace(task, id=named, environment=environment, data=data)


def get_rollout_id(task_id: str) -> str:
    """Return the ID of the stored rollout from the ID of the task that `make_rescoring_task` made for it."""
    return task_id.rpartition("/")[2]


def _get_original(task: Task) -> Task:
    return msgspec.structs.replace(task, data={key: value for key, value in task.data.items() if key != _KEY})
