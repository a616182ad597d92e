"""The function form, for small environments: one `async def` that plays and returns the reward."""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeAlias, overload

from rookery.core import Limits, Sampling, SandboxSpec, Task, UsageError
from rookery.environments.base import Environment, Score
from rookery.environments.context import Context

Play: TypeAlias = Callable[[Context], Awaitable[Score | float | None]]
Judge: TypeAlias = Callable[[Context], Awaitable[Score | float]]
_REWARD = "__reward__"


class FunctionEnvironment(Environment):
    """What `@environment` makes."""

    def __init__(
        self,
        play: Play,
        *,
        tasks: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        score: Judge | None = None,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        sandbox: SandboxSpec | None = None,
        reward_range: tuple[float, float] = (0.0, 1.0),
        needs_gateway: bool | str = False,
    ) -> None:
        for what, function in (("play", play), ("score", score)):
            if function is not None and not inspect.iscoroutinefunction(function):
                name = getattr(function, "__name__", repr(function))
                raise UsageError(f"{name} must be an `async def {what}(ctx)` to make an environment")
        if isinstance(tasks, Iterator):
            raise UsageError(
                f"the tasks of {play.__name__} are an iterator, which can be read only once: "
                "give a list, or a function that returns them"
            )
        self.name = play.__name__
        self.play = play
        self.__module__ = play.__module__
        self.__qualname__ = play.__qualname__
        self.__doc__ = play.__doc__
        self.limits = limits or Limits()
        self.sampling = sampling or Sampling()
        self.sandbox = sandbox
        self.reward_range = reward_range
        self.needs_gateway = needs_gateway
        self.judge = score
        self._tasks = tasks

    def tasks(self) -> Iterable[Task | dict[str, Any] | str]:
        if self._tasks is None:
            return super().tasks()
        return self._tasks() if callable(self._tasks) else self._tasks

    async def run(self, ctx: Context) -> None:
        ctx.state[_REWARD] = await self.play(ctx)

    async def score(self, ctx: Context) -> Score | float:
        if self.judge is not None:
            return await self.judge(ctx)
        if _REWARD not in ctx.state:
            # Truncated before the function could return its reward: it did not get there.
            return self.reward_range[0]
        reward: Score | float = ctx.state[_REWARD]
        return reward


@overload
def environment(play: Play, /) -> FunctionEnvironment: ...
@overload
def environment(
    *,
    tasks: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    score: Judge | None = None,
    limits: Limits | None = None,
    sampling: Sampling | None = None,
    sandbox: SandboxSpec | None = None,
    reward_range: tuple[float, float] = (0.0, 1.0),
    needs_gateway: bool | str = False,
) -> Callable[[Play], FunctionEnvironment]: ...
def environment(play: Play | None = None, /, **options: Any) -> Any:
    """Makes an environment of one function: `@environment` or `@environment(tasks=[…], limits=…)`.

    The function plays the attempt and returns the reward, or leaves scoring to `score`.
    """
    if play is not None:
        return FunctionEnvironment(play)
    return lambda function: FunctionEnvironment(function, **options)
