"""Environments made from functions with `@environment`."""

import pytest

from rookery.core import Limits, UsageError
from rookery.environments import Context, FunctionEnvironment, environment
from rookery.scoring import Score
from tests.environments.helpers import Attempt


@environment
async def plain(ctx: Context) -> float:
    """Plays."""
    reply = await ctx.policy.chat("6 times 7?")
    return float(reply.text == "42")


async def judge(ctx: Context) -> Score:
    return Score(2.0, {"style": 1.0})


@environment(tasks=["one", "two"], score=judge, limits=Limits(turns=2), reward_range=(0.0, 2.0))
async def judged(ctx: Context) -> None:
    await ctx.policy.chat("hello")


async def test_function_runs_the_attempt_and_returns_the_reward():
    attempt = Attempt(["42"])
    await plain.run(attempt.ctx)
    assert await plain.score(attempt.ctx) == 1.0
    assert (plain.title, plain.__doc__) == ("plain", "Plays.")


async def test_score_function_computes_the_reward():
    attempt = Attempt(["hi"])
    await judged.run(attempt.ctx)
    assert await judged.score(attempt.ctx) == Score(2.0, {"style": 1.0})
    assert judged.limits == Limits(turns=2)


async def test_attempt_truncated_before_the_return_gets_the_lowest_reward():
    assert await plain.score(Attempt().ctx) == 0.0


async def test_rewards_of_attempts_are_independent():
    first, second = Attempt(["42"]), Attempt(["41"])
    await plain.run(first.ctx)
    await plain.run(second.ctx)
    assert [await plain.score(first.ctx), await plain.score(second.ctx)] == [1.0, 0.0]


def test_tasks_are_a_list_a_function_or_missing():
    assert list(judged.tasks()) == ["one", "two"]
    assert list(judged.tasks()) == ["one", "two"]
    with pytest.raises(UsageError, match="plain"):
        plain.tasks()

    async def lazy(ctx: Context) -> float:
        return 0.0

    assert list(FunctionEnvironment(lazy, tasks=lambda: (str(n) for n in range(2))).tasks()) == ["0", "1"]


def test_invalid_functions_are_refused_at_construction():
    def blocking(ctx: Context) -> float:
        return 0.0

    async def play(ctx: Context) -> float:
        return 0.0

    with pytest.raises(UsageError, match=r"blocking.*run"):
        environment(blocking)
    with pytest.raises(UsageError, match=r"blocking.*score"):
        environment(score=blocking)(play)
    with pytest.raises(UsageError, match="play"):
        environment(tasks=iter(["a"]))(play)
