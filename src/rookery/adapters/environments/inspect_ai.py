"""Tasks of Inspect AI: `inspect:MODULE@TASK`, `inspect:FILE.py@TASK`, or `inspect:PACKAGE/TASK` of a package.

    rookery run inspect:inspect_evals/gsm8k --policy http://localhost:8000/v1 -n 20 -k 4

Inspect runs the solver and the scorers on one sample. Its model calls go to the attempt's gateway session. Runs in
runner processes.

Guarantees:
- Every attempt has its own Inspect task, model and log, which end with the attempt.
- Inspect allows one evaluation at a time in a process, so attempts in a runner wait for each other. The wait does
  not count against their time. More runners (`--runners`) run more attempts at once.
- The reward is the value of a scorer as Inspect's `value_to_float` converts it: C is 1, P is 0.5, I is 0.
- A sample that ends at a limit of its task is Truncated, and scored. An error of the solver or a scorer is a bug.
"""

import asyncio
import importlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from rookery.adapters.compatibility import check_version
from rookery.adapters.environments.session_work import (
    ScoredInRun,
    check_model_calls,
    read_reward_range,
    run_in_session,
)
from rookery.core import Limits, Message, RookeryError, Task, TaskError, TruncatedReason, Truncation, UsageError
from rookery.core.errors import describe
from rookery.environments import Context, Score
from rookery.gateway.gateway_session import GatewaySession

TESTED: Final = ("0.3.285", "0.4")
TRUNCATIONS: Final[dict[str, TruncatedReason]] = {
    "message": "turns",
    "turn": "turns",
    "token": "tokens",
    "context": "context",
    "time": "time",
    "working": "time",
}
"""Reasons of truncation by the types of Inspect's limits."""
SHOWN: Final = ("system", "user", "assistant")
"""Roles of the messages of a sample that are in the task's prompt."""


class InspectEnvironment(ScoredInRun):
    """Task of Inspect AI. `name` is `MODULE@TASK`, `FILE.py@TASK` or `PACKAGE/TASK`.

    `task_args` are the arguments of the task. `scorer` is the name of the scorer whose value is the reward, by
    default the first one. `roles` are the model roles of the task that are not the policy, such as `grader`; the
    run must configure them.
    """

    needs_gateway = "the model calls of the Inspect task"
    limits = Limits(run=3600.0)

    def __init__(
        self,
        name: str,
        *,
        task_args: Mapping[str, Any] | None = None,
        scorer: str | None = None,
        roles: Sequence[str] = (),
        reward_range: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        if not check_version("inspect-ai", *TESTED):
            raise UsageError("the package inspect-ai is not installed: pip install inspect-ai openai")
        self.name = f"inspect:{name}"
        self.reward_range = read_reward_range(reward_range)
        self.roles = tuple(roles)
        self._reference = name
        self._task_args = dict(task_args or {})
        self._scorer = scorer
        self._turn: asyncio.Lock | None = None
        self._samples = list(self._load().dataset)

    def _load(self) -> Any:
        """Return a new Inspect task."""
        module, _, attribute = self._reference.partition("@")
        try:
            if attribute and not module.endswith(".py"):
                return getattr(importlib.import_module(module), attribute)(**self._task_args)
            from inspect_ai._eval.loader import load_tasks

            (task,) = load_tasks([self._reference], self._task_args)
        except Exception as error:
            raise UsageError(
                f"the Inspect task {self._reference!r} cannot be loaded: {describe(error)}"
            ) from error
        return task

    def tasks(self) -> Iterator[Task]:
        for number, sample in enumerate(self._samples):
            messages = (
                (Message("user", sample.input),)
                if isinstance(sample.input, str)
                else tuple(
                    Message(one.role, one.text)
                    for one in sample.input
                    if one.role in ("system", "user", "assistant")
                )
            )
            name = str(sample.id if sample.id is not None else number + 1)  # as Inspect numbers samples
            yield Task(id=name, prompt=messages, data={"sample": number})

    async def run(self, ctx: Context) -> None:
        sample, session = await run_in_session(ctx, lambda session: self._evaluate(ctx, session))
        if sample.error is not None:
            check_model_calls(session, session.record, sample.error.message)
            raise RookeryError(
                f"the Inspect task failed: {sample.error.message}\n{sample.error.traceback}",
                cause="bug.environment",
            )
        ctx.state["score"] = self._get_score(sample)
        if sample.limit is not None:
            reason = TRUNCATIONS.get(sample.limit.type, "time")
            raise Truncation(reason, f"the Inspect task ended at its limit of type {sample.limit.type}")

    async def _evaluate(self, ctx: Context, session: GatewaySession) -> tuple[Any, GatewaySession]:
        from inspect_ai import eval_async
        from inspect_ai.dataset import MemoryDataset
        from inspect_ai.model import get_model
        from inspect_ai.util._display import init_display_type

        index = ctx.task.data.get("sample")
        if not isinstance(index, int) or not 0 <= index < len(self._samples):
            raise TaskError(f"task {ctx.task.id} is not a sample of {self.name}: use the samples of the task")

        def open_model(role: str) -> Any:
            url = f"{session.url}/v1"
            return get_model(f"openai-api/rookery/{role}", base_url=url, api_key=session.key, memoize=False)

        self._turn = self._turn or asyncio.Lock()
        with ExitStack() as stack:
            stack.enter_context(ctx.pause_clock())
            async with self._turn:
                stack.close()  # the clock continues
                init_display_type("none")
                task = self._load()
                task.dataset = MemoryDataset([self._samples[index]])
                with tempfile.TemporaryDirectory(prefix="rookery-inspect-") as folder:
                    (log,) = await eval_async(
                        task,
                        model=open_model("policy"),
                        model_roles={role: open_model(role) for role in self.roles},
                        epochs=1,
                        fail_on_error=False,
                        log_dir=folder,
                        log_format="json",
                        log_level="warning",
                        turn_limit=ctx.limits.turns,
                    )
        if not log.samples:
            detail = log.error.message if log.error is not None else log.status
            raise RookeryError(f"the Inspect task returned no sample: {detail}", cause="bug.environment")
        return log.samples[0], session

    def _get_score(self, sample: Any) -> Score:
        from inspect_ai.scorer import value_to_float

        convert = value_to_float()
        parts: dict[str, float] = {}
        for name, score in (sample.scores or {}).items():
            values = score.value if isinstance(score.value, dict) else {"": score.value}
            for key, value in values.items():
                if not isinstance(value, list | tuple):
                    parts[f"{name}/{key}" if key else name] = float(convert(value))
        chosen = self._scorer or next(iter(parts), "")
        if chosen not in parts:
            raise RookeryError(
                f"{self.name} has no scorer {chosen!r}: its scores are {', '.join(parts) or 'none'}",
                cause="bug.scoring",
            )
        return Score(parts[chosen], parts)
