"""The base that users subclass."""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, ClassVar, Self

from rookery.core import Limits, Sampling, SandboxSpec, Task, ToolSchema, UsageError
from rookery.environments.context import Context
from rookery.scoring import Score

__all__ = ["Environment", "Score", "reward_bounds"]


class Environment:
    """One object serves every attempt of its process: keep what belongs to an attempt in its context.

    Stages, in order: `setup`, `run`, `score`, `teardown`. `score` runs if and only if `run` ended Completed
    or Truncated; `teardown` always, also after half a setup. Write stages as `async def`; a plain `def` is taken
    for blocking work and runs off the event loop.
    """

    name: str = ""
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    sandbox: SandboxSpec | None = None
    """What `ctx.sandbox()` makes by default; None leaves it to the run."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    roles: ClassVar[tuple[str, ...]] = ()
    """Model roles it needs besides the policy (judge, simulated user); checked before anything starts."""

    needs_gateway: bool | str = False
    """Whether its attempts open gateway sessions, for programs that call models themselves; best as a text that
    says what for (`"the agent's model calls"`). Set in the class or the constructor: the run then has one."""

    own_limits: ClassVar[frozenset[str]] = frozenset()
    """Names in a task's `limits` that are not every rollout's: they come as `task.data["limits"]`."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        # Runner processes build their own object the same way.
        self._made_with = (args, kwargs)
        return self

    @property
    def title(self) -> str:
        """The name for folders and tables."""
        return self.name or type(self).__name__

    @property
    def needs_sandbox(self) -> bool:
        """Whether its attempts are known to open a sandbox: if none can be had, that is said before the start."""
        return self.sandbox is not None

    def check(self, spec: SandboxSpec) -> Sequence[str]:  # noqa: ARG002  (for those who override it)
        """What cannot work in the sandboxes of a run, in sentences; asked before its start, starts nothing."""
        return ()

    def tasks(self) -> Iterable[Task | dict[str, Any] | str]:
        """The built-in taskset, for runs that name none."""
        raise UsageError(f"{self.title} has no tasks of its own: name some with --tasks FILE.jsonl")

    def limits_for(self, task: Task, run: Limits) -> Limits:
        """Return the limits of a rollout: what the run says explicitly, then the task, then the environment.

        It depends on nothing but its arguments and is quick. What it raises ends the attempts in their setup.
        """
        return run.over(task.limits.over(self.limits))

    def sandbox_for(self, task: Task, spec: SandboxSpec) -> SandboxSpec:  # noqa: ARG002
        """What `ctx.sandbox()` makes for a task, out of what the run gives; here just that.

        Known before the attempt: where sandboxes take long to make, some are made ahead. So it depends on nothing
        but its arguments, and is quick. What it raises ends the task's attempts in their setup.
        """
        return spec

    def tools(self) -> Sequence[ToolSchema]:
        """What the policy may call, for `--dry-run` and gateways; starts nothing."""
        return ()

    async def setup(self, ctx: Context) -> None:
        """Before the policy acts. What fails here is never the policy's fault."""

    async def run(self, ctx: Context) -> Any:
        """The attempt. Ends Completed by returning, Truncated by a spent budget."""
        raise NotImplementedError(f"{type(self).__name__} needs an `async def run(self, ctx)`")

    async def score(self, ctx: Context) -> Score | float:
        """A finite number in `reward_range`, or a `Score`."""
        raise NotImplementedError(f"{type(self).__name__} needs an `async def score(self, ctx)`")

    async def teardown(self, ctx: Context) -> None:
        """After everything. Sandboxes opened through the context are closed by the engine anyway."""


def reward_bounds(env: Environment) -> tuple[float, float]:
    """The declared range of rewards, or a `UsageError` for one that is none."""
    try:
        low, high = (float(bound) for bound in env.reward_range)
    except (TypeError, ValueError):
        low = high = float("nan")
    if not (isfinite(low) and isfinite(high) and low < high):
        raise UsageError(
            f"{env.title}.reward_range must be two finite numbers, low and high; it is {env.reward_range!r}"
        )
    return low, high
