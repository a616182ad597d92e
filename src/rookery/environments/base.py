"""The environment interface: `Environment`, which users subclass, and `@environment`, its function form.

Environments run in runner processes, or in the process that started the run if `runners=0`.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias, overload

from rookery.core import Limits, Message, Rollout, Sampling, SandboxSpec, Task, ToolSchema, UsageError
from rookery.environments.context import Context
from rookery.scoring import Score, Ungraded

__all__ = ["Environment", "FunctionEnvironment", "Score", "Ungraded", "environment", "reward_bounds"]

RunFunction: TypeAlias = Callable[[Context], Awaitable[Score | Ungraded | float | None]]
ScoreFunction: TypeAlias = Callable[[Context], Awaitable[Score | Ungraded | float]]
_REWARD = "__reward__"


class Environment:
    """Base class for environments: how a task is attempted and scored.

    Subclasses implement `run` and `score`, and optionally `setup` and `teardown`:

        class Echo(Environment):
            async def run(self, ctx):
                reply = await ctx.policy.chat(ctx.task.prompt)
                ctx.state["text"] = reply.text

            async def score(self, ctx):
                return float(ctx.state["text"] == ctx.task.data["answer"])

    An attempt is one try at a rollout. Rookery's engine calls its stages in the order `setup`, `run`, `score`,
    `teardown`. `score` is called only if `run` returned (Completed) or exhausted a budget (Truncated). `teardown`
    is always called, even if `setup` failed halfway. Stages should be `async def`; a plain `def` is treated as
    blocking code and runs in a thread.

    One instance serves all attempts in its process. Store per-attempt data in the context `ctx`, not on `self`.
    """

    name: str = ""
    """Name of the environment in run directories and tables. If empty, the class name is used."""
    limits: Limits = Limits()
    """Default limits of a rollout. Limits of the task override them, and limits of the run override both."""
    sampling: Sampling = Sampling()
    """Default sampling parameters of the policy."""
    sandbox: SandboxSpec | None = None
    """Default settings of an attempt's sandbox. Settings that the run names override them one by one. None means
    that the environment has no defaults of its own."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward. A reward outside of this range fails the rollout."""
    part_weights: Mapping[str, float] = MappingProxyType({})
    """Weights of the parts of a reward, if `score` returns a dictionary of parts. A weight defaults to 1."""
    roles: tuple[str, ...] = ()
    """Model roles needed besides the policy, such as `judge`. A run that does not configure one does not start."""

    needs_gateway: bool | str = False
    """True if attempts call `ctx.gateway_session`, so that the run must start a gateway: the HTTP service through
    which programs call models. Prefer a text that says what the gateway is for, such as
    `"the agent's model calls"`; error messages quote it. Set it on the class or in the constructor."""

    can_run_unrecorded: bool = False
    """True if attempts use `ctx.direct_session` where it is available, so that a run can have `record="off"`."""

    own_limits: ClassVar[frozenset[str]] = frozenset()
    """Names that a task's `limits` may contain besides the fields of `Limits`. Their values are moved to
    `task.data["limits"]`, where the environment reads them."""

    _constructor_arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        # Runner processes construct their own instance with the same arguments.
        self._constructor_arguments = (args, kwargs)
        return self

    @property
    def title(self) -> str:
        """Name of the environment in run directories and tables: `name`, or the class name if that is empty."""
        return self.name or type(self).__name__

    @property
    def needs_sandbox(self) -> bool:
        """True if attempts open a sandbox. If so, the engine checks before a run that sandboxes are available."""
        return self.sandbox is not None

    def check(self, spec: SandboxSpec) -> Sequence[str]:  # noqa: ARG002  (for subclasses)
        """Return the reasons why this environment cannot use sandboxes of `spec`, one sentence each.

        Rookery calls this before a run and does not start the run unless the result is empty. An implementation
        must not start processes or sandboxes.
        """
        return ()

    async def prepare(self, spec: SandboxSpec, report: Callable[[str], None]) -> None:
        """Prepare this machine for a run, for example by installing software.

        Rookery calls this once per run, after all checks and before the first rollout. `spec` specifies the run's
        sandboxes. An implementation calls `report` with progress messages for the user.
        """

    def tasks(self) -> Iterable[Task | dict[str, Any] | str]:
        """Return the environment's built-in tasks. They are used if a run does not specify tasks."""
        raise UsageError(f"{self.title} has no built-in tasks: pass some with --tasks FILE.jsonl")

    def held_out_tasks(self, count: int) -> Iterable[Task | dict[str, Any] | str] | None:  # noqa: ARG002
        """Return `count` tasks for evaluating a policy that is trained on `tasks`; none of them is in `tasks`.

        None, the default, means that the trainer holds out some of `tasks`.
        """
        return None

    def limits_for(self, task: Task, run: Limits) -> Limits:
        """Return the limits of a rollout of `task`. `run` contains the limits set explicitly for the run.

        By default the run's limits take precedence over the task's, and those over the environment's. The result
        must depend on the arguments only. If this raises, the setup stage of the task's attempts fails with the
        exception.
        """
        return run.over(task.limits.over(self.limits))

    def sandbox_for(self, task: Task, spec: SandboxSpec) -> SandboxSpec:  # noqa: ARG002  (for subclasses)
        """Return the specification of the sandbox that `ctx.sandbox()` opens for `task`.

        `spec` is the specification of the run. Rookery also calls this ahead of an attempt to create sandboxes in
        advance, so the result must depend on the arguments only. If this raises, the setup stage of the task's
        attempts fails with the exception.
        """
        return spec

    def tools(self) -> Sequence[ToolSchema]:
        """Return the schemas of the tools that the policy may call. Must not start processes or sandboxes."""
        return ()

    async def setup(self, ctx: Context) -> None:
        """Prepare the attempt before the policy acts. A failure here is never attributed to the policy."""

    async def run(self, ctx: Context) -> Any:
        """Let the policy work on the task. If this returns, the attempt is Completed; the return value is ignored.

        If a budget of the rollout is exhausted meanwhile, the attempt ends as Truncated and is still scored.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `async def run(self, ctx)`")

    async def score(self, ctx: Context) -> Score | Ungraded | float | Mapping[str, float]:
        """Return the reward: a finite number within `reward_range`, or a `Score`.

        Return `Ungraded()` if nothing can grade the rollout, for example because its task has no expected answer.
        The rollout then has no reward and does not train.

        A dictionary holds the named parts of the reward. The reward is then their sum, weighted by `part_weights`,
        and the parts are recorded as `Rollout.rewards`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `async def score(self, ctx)`")

    async def restore(self, ctx: Context, rollout: Rollout, messages: Sequence[Message]) -> None:  # noqa: ARG002
        """Set in `ctx.state` what `score` reads, from the stored record and conversation of a rollout.

        `rookery rescore` calls this instead of `setup` and `run`, and then `score`. An environment that does not
        define it can only be graded again with a named scorer.
        """
        raise UsageError(f"{self.title} cannot grade stored rollouts: it does not define `restore`")

    def find_restore_problem(self, task: Task, rollout: Rollout) -> str:  # noqa: ARG002  (for subclasses)
        """Return why a stored rollout cannot be graded again, or an empty string if `restore` and `score` can.

        `rookery rescore` keeps the score of such a rollout and reports the reason.
        """
        return "" if type(self).restore is not Environment.restore else "the environment does not define `restore`"

    async def teardown(self, ctx: Context) -> None:
        """Release resources that the attempt acquired. Sandboxes opened through `ctx` are closed automatically."""


class FunctionEnvironment(Environment):
    """Environment made by `@environment` from one async function, which runs the attempt."""

    def __init__(
        self,
        run: RunFunction,
        *,
        tasks: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        score: ScoreFunction | None = None,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        sandbox: SandboxSpec | None = None,
        reward_range: tuple[float, float] = (0.0, 1.0),
        needs_gateway: bool | str = False,
    ) -> None:
        for stage, function in (("run", run), ("score", score)):
            if function is not None and not inspect.iscoroutinefunction(function):
                name = getattr(function, "__name__", repr(function))
                raise UsageError(f"{name} must be declared as `async def {name}(ctx)` to be the `{stage}` stage")
        if isinstance(tasks, Iterator):
            raise UsageError(
                f"tasks of {run.__name__} is an iterator, which can be read only once: "
                "pass a list, or a function that returns the tasks"
            )
        self.name = run.__name__
        self.run_function = run
        self.score_function = score
        self.__module__ = run.__module__
        self.__qualname__ = run.__qualname__
        self.__doc__ = run.__doc__
        self.limits = limits or Limits()
        self.sampling = sampling or Sampling()
        self.sandbox = sandbox
        self.reward_range = reward_range
        self.needs_gateway = needs_gateway
        self._tasks = tasks

    def tasks(self) -> Iterable[Task | dict[str, Any] | str]:
        if self._tasks is None:
            return super().tasks()
        return self._tasks() if callable(self._tasks) else self._tasks

    async def run(self, ctx: Context) -> None:
        ctx.state[_REWARD] = await self.run_function(ctx)

    async def score(self, ctx: Context) -> Score | Ungraded | float:
        if self.score_function is not None:
            return await self.score_function(ctx)
        if _REWARD not in ctx.state:
            # The attempt was truncated before the function returned a reward.
            return self.reward_range[0]
        reward: Score | Ungraded | float = ctx.state[_REWARD]
        return reward


@overload
def environment(run: RunFunction, /) -> FunctionEnvironment: ...
@overload
def environment(
    *,
    tasks: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    score: ScoreFunction | None = None,
    limits: Limits | None = None,
    sampling: Sampling | None = None,
    sandbox: SandboxSpec | None = None,
    reward_range: tuple[float, float] = (0.0, 1.0),
    needs_gateway: bool | str = False,
) -> Callable[[RunFunction], FunctionEnvironment]: ...
def environment(run: RunFunction | None = None, /, **options: Any) -> Any:
    """Make an environment from an async function that runs an attempt and returns its reward.

        @environment(tasks=[{"prompt": "Name a prime number."}])
        async def primes(ctx):
            reply = await ctx.policy.chat(ctx.task.prompt)
            return float(reply.text.strip() in {"2", "3", "5", "7"})

    Without options write `@environment`. If the option `score` is given, that function computes the reward, and
    the return value of the decorated function is ignored.
    """
    if run is not None:
        return FunctionEnvironment(run)
    return lambda function: FunctionEnvironment(function, **options)


def reward_bounds(env: Environment) -> tuple[float, float]:
    """Return `env.reward_range`, or raise `UsageError` unless it is two finite numbers in ascending order."""
    try:
        low, high = (float(bound) for bound in env.reward_range)
    except (TypeError, ValueError):
        low = high = float("nan")
    if not (isfinite(low) and isfinite(high) and low < high):
        raise UsageError(
            f"{env.title}.reward_range must be two finite numbers in ascending order, not {env.reward_range!r}"
        )
    return low, high
