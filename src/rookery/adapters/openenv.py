"""OpenEnv's trainable sessions, for TRL's `HarnessRolloutWorker` and other trainers that consume them.

    factory = functools.partial(RookerySessionFactory, "my_env.py", policy="http://localhost:8000/v1")
    worker = HarnessRolloutWorker(harness_session_factory=factory, ...)

A session is one rollout. The environment makes its model calls itself, and the trainer reads tokens and reward
after the rollout has ended. openenv is imported only when it is used.

Guarantees:
- The trace has exactly the tokens of the rollout's segments, with their masks and log probabilities.
- A failed rollout has no tokens and the reward None, which OpenEnv defines as unscored: no baseline counts it.
- Closing a session cancels its rollout. Closing the factory cancels all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final

from rookery.adapters.compatibility import TrainerSettings
from rookery.adapters.trainer_engine import ThreadedTrainerEngine
from rookery.core import Group, Task, UsageError
from rookery.core.lifetimes import ClosesOnExit
from rookery.environments import Environment
from rookery.training.rows import Row, make_rows, summarize_rows
from rookery.upstreams.protocol import UpstreamConfig

TESTED: Final = ("openenv", "0.10.0", "0.11")
COMPLETED, FAILED = 0, 1
"""Values of `wait_for_completion`: the exit codes of an agent."""


class RookerySession:
    """One rollout, as OpenEnv's `TrainableSession`. Its methods block and may be called from any thread."""

    def __init__(self, task: Task, future: "Future[Group]") -> None:
        self._task = task
        self._future = future
        self._rows: list[Row] | None = None

    def initial_messages(self) -> list[dict[str, Any]]:
        """Return the prompt of the task."""
        return [{"role": message.role, "content": message.text} for message in self._task.prompt]

    def list_tools(self) -> list[Any]:
        """Return no tools: the environment offers them to the policy itself."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:  # noqa: ARG002  (OpenEnv's signature)
        raise UsageError("the environment calls its tools itself: use the session without a harness adapter")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the rollout and return 0, or 1 if it failed. A timeout raises `TimeoutError`."""
        self._rows = make_rows([self._future.result(timeout_s)])
        return COMPLETED if self._rows[0].valid else FAILED

    def fetch_training_trace(self) -> Any:
        """Return the tokens of the rollout, one turn per segment. The mask covers prompt and completion."""
        from openenv.core.harness import TrainingTrace, TrainingTurn

        return TrainingTrace(
            turns=[
                TrainingTurn(
                    node_id=f"{row.rollout}-{row.segment}",
                    prompt_token_ids=row.prompt_ids,
                    completion_token_ids=row.response_ids,
                    per_token_logps=row.response_logprobs,
                    loss_mask=[0] * row.prompt_length + row.response_mask,
                    metadata={"versions": list(row.version_range or ())},
                )
                for row in self._rows or []
                if row.trained
            ]
        )

    def verify(self, transcript: Sequence[Any], final_state: Any = None) -> Any:  # noqa: ARG002  (OpenEnv's signature)
        """Return the environment's reward; None if the rollout failed or has not ended."""
        from openenv.core.harness import VerifyResult

        rows = self._rows or []
        reward = rows[0].reward if rows else None
        return VerifyResult(env_reward=reward, done=bool(rows), metrics=summarize_rows(rows))

    def close(self) -> None:
        """Cancel the rollout if it is still running, and wait until it has ended."""
        self._future.cancel()
        try:
            self._future.exception()
        except CancelledError:
            return


class RookerySessionFactory(ClosesOnExit):
    """Makes sessions that run in one Rookery engine, which is opened at once."""

    def __init__(
        self,
        env: Environment | str,
        *,
        policy: str | Sequence[str] | UpstreamConfig,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        sampling: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        """`sampling` is the trainer's policy (`temperature`, `top_p`, …), as TRL passes it; `max_tokens` limits
        one model call. `tokenizer` is the trainer's, to check that the policy has the same. `options` are
        arguments of `Engine`.
        """
        given = dict(sampling or {})
        known = {name: given.pop(name) for name in ("temperature", "top_p", "top_k") if name in given}
        self._settings = TrainerSettings(**known, max_tokens=max_tokens, extra=given)
        self._rollouts = ThreadedTrainerEngine(
            env, trainer="OpenEnv", tested=TESTED, policy=policy, tasks=tasks, tokenizer=tokenizer, **options
        )
        self.engine = self._rollouts.open(self._settings)

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> RookerySession:  # noqa: ARG002
        """Start a rollout of the task that a row's prompt names. The engine chooses the seed."""
        found = self._rollouts.find_task(task)
        return RookerySession(found, self._rollouts.submit(found, 1, self._settings))

    def close(self) -> None:
        """Cancel running rollouts and close the engine."""
        self._rollouts.close()
